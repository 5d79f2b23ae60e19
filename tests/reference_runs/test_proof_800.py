"""The proof of 800 steps says of each run whether it was made, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import children, proof_800
from benchmarks.proof_800 import Bench, Comparison, Job, Running
from benchmarks.trainer_faults import FAULTS

SLEEPS, FAILS = "import time; time.sleep(60)", "raise SystemExit(2)"
Prove = Callable[..., tuple[bool, Bench]]


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prove:
    """The proof on `nano` with a program for each run in place of the trainer, and every comparison identical.

    The limit passes when so many runs have ended.
    """

    def make(
        programs: dict[str, str], limit: int = 1000, at_once: int = 1, with_faults: bool = False
    ) -> tuple[bool, Bench]:
        bench = Bench(tmp_path, "title", "machine", 1, at_once, time.perf_counter() + 60, None)
        real_end = bench._end

        def begin(job: Job, busy: list[int]) -> Running:
            (tmp_path / job.name).mkdir()
            (tmp_path / job.name / "run.json").write_text("{}")
            (tmp_path / f"{job.name}.log").write_text("")
            process = subprocess.Popen([sys.executable, "-c", programs.get(job.name, "")])
            return Running(0, job.name, time.perf_counter(), process)

        def end(name: str, run: Running) -> bool:
            is_good = real_end(name, run)
            if len(bench.lines) == limit:
                bench.deadline = time.perf_counter()
            return is_good

        def compare(baseline: str, candidate: str) -> Comparison:
            compared = {"steps": 1, "events": 2, "bytes": 3}
            return Comparison(baseline, candidate, "", "identical", {"compared": compared, "origins": []})

        monkeypatch.setattr(bench, "_start", begin)
        monkeypatch.setattr(bench, "_end", end)
        monkeypatch.setattr(bench, "diff", compare)
        if limit == 0:
            bench.deadline = time.perf_counter()
        saved = tmp_path / "saved"
        (saved / "nano").mkdir(parents=True)
        (saved / "nano" / "step-000003.pt").touch()
        return proof_800._prove(bench, ("nano",), 4, "state", 0, "cpu", (), with_faults, saved), bench

    return make


def compared(bench: Bench) -> set[tuple[str, str]]:
    return {(proof.baseline, proof.candidate) for proof in bench.proofs}


@pytest.mark.parametrize("name", ["nano-second", "nano-set-moe.topk-unstable"])
def test_a_folder_that_holds_a_run_of_that_name_is_refused_before_anything_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    arguments = ["--config", "nano", "--steps", "4", "--limit", "0", "--folder", str(tmp_path)]
    done = CliRunner().invoke(proof_800.main, arguments)
    assert done.exit_code == 2
    assert f"{name} there already" in done.output
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_that_failed_is_compared_with_none(prove: Prove) -> None:
    is_good, bench = prove({"nano-second": FAILS})
    assert not is_good
    assert compared(bench) == {("nano-first", "nano-resumed")}


def test_a_run_that_was_cut_is_compared_and_said_to_be_cut(prove: Prove) -> None:
    is_good, bench = prove({"nano-second": SLEEPS}, limit=2, at_once=3)
    assert not is_good
    assert compared(bench) == {("nano-first", "nano-second"), ("nano-first", "nano-resumed")}
    assert "| nano-first, nano-second (cut) |" in bench.write()
    assert bench.lines[-1] == "stopped at the limit: `nano-second`"


def test_nothing_is_begun_after_the_limit(prove: Prove) -> None:
    is_good, bench = prove({}, limit=0, with_faults=True)
    assert not is_good
    assert not bench.begun
    assert not bench.proofs
    assert not bench.faults
    assert bench.lines == [
        "not begun before the limit: `nano-first`, `nano-second`, `nano-resumed`",
        "no fault was planned in `nano`: the limit had passed",
    ]


def test_no_fault_is_planned_where_the_first_run_is_not_whole(prove: Prove) -> None:
    is_good, bench = prove({"nano-first": FAILS}, with_faults=True)
    assert not is_good
    assert not bench.faults
    assert bench.lines[-1] == "no fault was planned in `nano`: there is no whole first run with a checkpoint"


def test_a_fault_whose_run_did_not_end_is_not_called_missed(prove: Prove) -> None:
    is_good, bench = prove({f"nano-{FAULTS[1].name}": FAILS}, limit=5, with_faults=True)
    assert not is_good
    rows = [row for row in bench.write().splitlines() if row.startswith(("| `--leave-out", "| `--set"))]
    found = [row.split(" | ")[-1].removesuffix(" |") for row in rows]
    # The answer on the first does not name it, the second failed, and then the limit passed.
    assert found == ["**no**", "not finished", *["not run"] * (len(FAULTS) - 2)]


def test_the_checkpoint_goes_when_sigterm_comes_outside_of_a_run(tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from benchmarks import proof_800
def prove(*arguments):
    arguments[-1].mkdir()
    print(*os.listdir({str(tmp_path)!r}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
proof_800._prove = prove
proof_800.main(["--folder", {str(tmp_path)!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("proof-")
    assert done.returncode == 1
    assert "stopped by SIGTERM" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_process_that_ignores_sigterm_is_killed_and_waited_for() -> None:
    ignores = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); {SLEEPS}"
    with (
        subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE) as deaf,
        subprocess.Popen([sys.executable, "-c", SLEEPS]) as other,
    ):
        assert deaf.stdout is not None
        deaf.stdout.readline()
        children.stop([deaf, other], grace_seconds=1)
        assert [deaf.returncode, other.returncode] == [-signal.SIGKILL, -signal.SIGTERM]


def test_a_second_sigterm_does_not_cut_the_cleaning_up_short() -> None:
    before: Any = signal.getsignal(signal.SIGTERM)
    cleaned = False
    with pytest.raises(SystemExit), children.sigterm_exits():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before
