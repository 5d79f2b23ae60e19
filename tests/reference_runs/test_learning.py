"""The learning benchmark averages over whole runs alone, and tells of those that failed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import learning
from benchmarks.learning import Outcome, Plan
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import Text

STEPS = 24


@pytest.fixture
def plan(text: Text, tmp_path: Path) -> Plan:
    return Plan(get_config("nano"), text, STEPS, 3, ("fp8", "bf16"), "cpu", 1, 2, 4, "machine", None, tmp_path)


def outcomes(fp8: float, num_steps: int) -> dict[str, Outcome]:
    """BF16 at a loss of 2 to its end, FP8 at another for some steps."""
    is_whole = num_steps == STEPS
    return {
        "fp8": Outcome([fp8] * num_steps, 1.0, 2.0 if is_whole else None),
        "bf16": Outcome([2.0] * STEPS, 1.0, 2.0),
    }


def line_of(described: list[str], start: str) -> str:
    (line,) = (line for line in described if line.startswith(start))
    return line


def test_a_run_that_was_cut_is_in_the_table_and_not_in_the_average(plan: Plan) -> None:
    seeds = {0: outcomes(2.2, STEPS), 1: outcomes(2.0, STEPS - 1), 2: outcomes(2.4, STEPS)}
    described = list(learning.describe(plan, seeds))
    assert line_of(described, "| 1 |").startswith("| 1 | 23 | 2.0000 | 2.0000 | +0.00% |")
    assert line_of(described, "**fp8 against bf16") == (
        "**fp8 against bf16: +15.00%** on average over the 2 of 3 seeds that were finished (standard error 5.00%),"
        " 20.00% at most; goal: within 0.25%: not met."
    )


def test_a_goal_is_neither_met_nor_missed_before_a_seed_is_finished(plan: Plan) -> None:
    described = list(learning.describe(plan, {0: outcomes(2.0, 3)}))
    assert line_of(described, "**fp8 against bf16") == (
        "**fp8 against bf16: not finished**: no seed has all 24 steps of every run."
    )
    assert "met" not in " ".join(described)
    assert list(learning.describe(plan, {}))[-1].startswith("Not finished")


def test_a_window_says_how_many_seeds_it_is_the_mean_of(plan: Plan) -> None:
    seeds = {0: outcomes(2.2, STEPS), 1: outcomes(2.0, 3)}
    described = list(learning.describe(plan, seeds))
    assert line_of(described, "| 0 to 1 |") == "| 0 to 1 | 2 | 2.1000 | 2.0000 | +5.00% |"
    assert line_of(described, "| 2 to 3 |") == "| 2 to 3 | 1 | 2.2000 | 2.0000 | +10.00% |"


def test_runs_that_fail_are_named_with_their_exit_status(plan: Plan) -> None:
    failed: list[str] = []
    program = "import sys; sys.exit(3 if sys.argv[1:] == ['--alone', '1', 'fp8'] else 0)"
    learning._train_all(plan, [sys.executable, "-c", program], failed)
    assert failed == ["fp8 of seed 1 (exit status 3)"]
    told = "**Runs that failed: 1 of 6**: fp8 of seed 1 (exit status 3)."
    assert told in learning._write(plan, failed)


def test_the_benchmark_fails_where_a_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--config", "nano", "--folder", str(tmp_path), "--result", str(tmp_path / "result.md")]
    monkeypatch.setattr(learning, "_train_all", lambda plan, command, failed: failed.append("one"))
    done = CliRunner().invoke(learning.main, arguments)
    assert done.exit_code == 1
    assert "Runs that failed: 1 of 12" in (tmp_path / "result.md").read_text()
    monkeypatch.setattr(learning, "_train_all", lambda plan, command, failed: None)
    assert CliRunner().invoke(learning.main, arguments).exit_code == 0


def test_no_run_outlives_the_benchmark(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(learning, "time", SimpleNamespace(sleep=interrupt, perf_counter=time.perf_counter))
    with pytest.raises(KeyboardInterrupt):
        learning._train_all(plan, [sys.executable, "-c", "import time; time.sleep(60)"], [])
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_one_run_alone_makes_no_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(learning, "train_alone", lambda plan, seed, name: seen.append(plan.path(seed, name)))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: pytest.fail("a temporary folder was made"))
    arguments = ["--config", "nano", "--folder", str(tmp_path), "--alone", "1", "fp8"]
    CliRunner().invoke(learning.main, arguments, catch_exceptions=False)
    assert seen == [tmp_path / "fp8-1.jsonl"]
