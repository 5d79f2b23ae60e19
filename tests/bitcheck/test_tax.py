"""Step times: what is alternated, what is left out, what the ratio says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bitcheck.errors import ProgramFailed, UsageError
from bitcheck.report.tax import tax_headline, tax_sections
from bitcheck.tax import tax_commands, tax_variants, time_command

BASELINE, CANDIDATE = ("python", "fast.py"), ("python", "slow.py")


class Machine:
    """Runs commands whose steps take known times, on a machine that gets slower and slower."""

    def __init__(self, slowdown: float, drift: float = 0.0) -> None:
        self.slowdown, self.drift = slowdown, drift
        self.order: list[str] = []

    def __call__(self, command: Sequence[str]) -> tuple[list[float], str]:
        self.order.append(command[1])
        pace = 1 + self.drift * len(self.order)
        step = 0.1 * pace * (self.slowdown if command[1] == "slow.py" else 1.0)
        return [9.0, 9.0, step, step, step], "cpu"


def test_the_ratio_is_that_of_the_steps_after_the_warm_up() -> None:
    tax = tax_commands(BASELINE, CANDIDATE, warmup=2, time_steps=Machine(1.5))
    assert tax.baseline_ms == pytest.approx(100)
    assert tax.rows[0].step_ms == pytest.approx(150)
    assert tax.rows[0].ratio.estimate == pytest.approx(1.5)
    assert tax.num_steps == 18


def test_the_order_changes_each_round_so_that_a_drift_cancels() -> None:
    machine = Machine(1.5, drift=0.02)
    tax = tax_commands(BASELINE, CANDIDATE, warmup=2, time_steps=machine)
    assert machine.order[:4] == ["fast.py", "slow.py", "slow.py", "fast.py"]
    assert tax.rows[0].ratio.estimate == pytest.approx(1.5, rel=0.01)
    assert tax.rows[0].ratio.low < 1.5 < tax.rows[0].ratio.high


def test_six_rounds_reach_the_confidence_and_three_say_that_they_do_not() -> None:
    assert tax_commands(BASELINE, CANDIDATE, time_steps=Machine(1.1)).rows[0].ratio.confidence >= 0.95
    few = tax_commands(BASELINE, CANDIDATE, rounds=3, time_steps=Machine(1.1))
    assert few.rows[0].ratio.confidence == 0.75
    assert "75 % confidence" in tax_headline(few)


def test_a_run_that_is_all_warm_up_is_refused() -> None:
    with pytest.raises(ProgramFailed, match="within the warm-up of 5"):
        tax_commands(BASELINE, CANDIDATE, warmup=5, time_steps=Machine(1.0))


def test_variants_step_in_turn_and_each_is_held_against_the_baseline() -> None:
    order: list[str] = []

    def stepper(name: str, seconds: float) -> object:
        def step() -> float:
            order.append(name)
            return seconds * len(order)  # slower and slower

        return step

    variants = {"fast": stepper("fast", 1.0), "deterministic": stepper("deterministic", 1.02), "x": stepper("x", 1.0)}
    tax = tax_variants("fast", variants, steps=60, warmup=3)  # type: ignore[arg-type]
    assert order[:9] == ["fast", "deterministic", "x", "x", "deterministic", "fast", "deterministic", "x", "fast"]
    assert [row.name for row in tax.rows] == ["deterministic", "x"]
    assert tax.rows[0].ratio.low < 1.02 < tax.rows[0].ratio.high
    assert tax.num_steps == 60


def test_no_step_beside_the_warm_up_is_refused() -> None:
    with pytest.raises(UsageError):
        tax_variants("fast", {"fast": lambda: 1.0}, steps=0, warmup=3)


def test_the_text_names_both_times_and_how_they_were_taken() -> None:
    tax = tax_commands(BASELINE, CANDIDATE, warmup=2, time_steps=Machine(1.25))
    assert tax_headline(tax).startswith("candidate takes 1.250 times as long as baseline (1.250 to 1.250")
    text = " ".join(line for _, lines in tax_sections(tax) for line in lines)
    assert "100.0 ms a step" in text and "125.0 ms a step" in text and "first 2 of each run left out" in text
    assert json.loads(json.dumps(tax.to_json()))["schema"] == "bitcheck.tax/1"


TRAINING = """
import time, torch
model = torch.nn.Linear(2, 2)
optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
for step in range(6):
    model(torch.ones(2)).sum().backward()
    time.sleep(0.05)
    for optimizer in optimizers:
        optimizer.step()
"""


def test_steps_of_a_real_program_are_timed_once_each_whatever_its_number_of_optimizers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    seconds, clock = time_command((sys.executable, str(tmp_path / "train.py")))
    assert len(seconds) == 5 and clock == "cpu"
    assert all(0.05 <= value < 2 for value in seconds)


def test_a_program_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ProgramFailed, match="no step was timed"):
        time_command((sys.executable, "-c", "pass"))


def test_one_command_alone_is_refused_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bitcheck", "tax", "--baseline", "true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "belong together" in done.stderr
