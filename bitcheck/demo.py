"""The whole story on the reference trainer, on a CPU, in under two minutes: `bitcheck demo`.

Three runs that must be the same (fresh, fresh again, resumed in the middle) are recorded and proven
so; then one kernel is switched to its unordered form, and the diff must name it. Each act is the
command that a person would type. The demo checks its own answers: one that is not as told is a
failure (exit 1), so that `make demo` is also a test of everything at once.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bitcheck.answer import Answer, Verdict
from bitcheck.diff import diff_runs
from bitcheck.errors import ProgramFailed, UsageError
from bitcheck.report.text import print_answer
from bitcheck.run import open_run

CONFIG = "tiny"
STEPS = 12
SWITCHED = "moe.dprob"
FOLDERS = ("checkpoints", "fresh", "again", "resumed", "atomic")
"""Everything that the demo writes into its folder."""

Expectation = tuple[str, Callable[[Answer], bool]]
"""What an answer must say, in words, and whether it does."""


@dataclass(frozen=True)
class Comparison:
    """One diff of the demo and what it must answer."""

    story: str
    baseline: str
    candidate: str
    expected: tuple[Expectation, ...]


def is_identical_over(steps: int) -> tuple[Expectation, ...]:
    """Return what proves two runs equal over exactly so many steps."""
    return (
        ("identical", lambda answer: answer.verdict is Verdict.IDENTICAL),
        (f"over {steps} steps", lambda answer: answer.compared.steps == steps),
    )


def names_the_switched_kernel() -> tuple[Expectation, ...]:
    """Return what shows that the unordered sum, and nothing else, is blamed."""
    return (
        ("diverged", lambda answer: answer.verdict is Verdict.DIVERGED),
        ("cause backward", lambda answer: answer.cause == "backward"),
        ("first in step 0", lambda answer: answer.first is not None and answer.first.step == 0),
        (
            "every origin in an experts module",
            lambda answer: (
                bool(answer.origins) and all(".experts" in (origin.module or "") for origin in answer.origins)
            ),
        ),
        ("the rest only inherited it", lambda answer: answer.propagated > len(answer.origins)),
    )


def play(folder: Path, overwrite: bool, config: str = CONFIG, steps: int = STEPS) -> list[str]:
    """Play the demo in `folder`; return a sentence for each answer that was not as told.

    Raises UsageError where an earlier demo is in the folder and may not be replaced, ProgramFailed
    where the trainer ended with an error.
    """
    _clear(folder, overwrite)
    began = time.monotonic()
    train = ["bitcheck", "reference", "train", "--config", config, "--steps", str(steps), "--level", "module"]
    checkpoints = folder / "checkpoints"
    resumed_at = steps // 2

    _say(1, f"A small FP8 mixture-of-experts model is trained for {steps} steps; every gradient is recorded.")
    save = ["--out", str(checkpoints), "--save-every", str(resumed_at)]
    _run([*train, *save, "--record", str(folder / "fresh")])
    _say(2, "The same again. Are the two the same, bit for bit?")
    _run([*train, "--record", str(folder / "again")])
    wrong = _compare(folder, Comparison("fresh again", "fresh", "again", is_identical_over(steps)))

    _say(3, f"Resumed from the checkpoint of step {resumed_at}. Is it still the same run?")
    _run([*train, "--resume", str(checkpoints / f"step-{resumed_at:06d}.pt"), "--record", str(folder / "resumed")])
    wrong += _compare(folder, Comparison("resumed", "fresh", "resumed", is_identical_over(steps - resumed_at)))

    _say(
        4,
        f"Now one kernel is switched: {SWITCHED}, the gradient of the routing probabilities, adds its parts in the "
        "order in which they arrive (simulated on a CPU) instead of from slots in index order.",
    )
    _run([*train, "--set", f"{SWITCHED}=atomic", "--record", str(folder / "atomic")])
    wrong += _compare(folder, Comparison("one kernel switched", "fresh", "atomic", names_the_switched_kernel()))

    print(f"\nThe demo took {time.monotonic() - began:.0f} s; its runs are in {folder}.", flush=True)
    return wrong


def _clear(folder: Path, overwrite: bool) -> None:
    """Make room for the demo; nothing but what a demo wrote is ever removed."""
    there = [folder / name for name in FOLDERS if (folder / name).exists()]
    if there and not overwrite:
        raise UsageError(f"{folder} holds an earlier demo; --overwrite replaces it, -o FOLDER plays it elsewhere")
    for path in there:
        shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)


def _say(act: int, story: str) -> None:
    print(f"\n{act}. {story}", flush=True)


def _run(command: list[str]) -> None:
    """Show a command as it would be typed, and run it with this interpreter's bitcheck."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    # Waiting threads that spin make a step 100x slower where the machine has other work; no bit depends on it.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    status = subprocess.run([sys.executable, "-m", *command], env=environment, check=False).returncode
    if status:
        raise ProgramFailed(f"the demo's command ended with status {status}: {shlex.join(command)}")


def _compare(folder: Path, comparison: Comparison) -> list[str]:
    """Show and answer a diff; return what is not as told."""
    baseline, candidate = folder / comparison.baseline, folder / comparison.candidate
    print(f"\n$ {shlex.join(['bitcheck', 'diff', str(baseline), str(candidate)])}", flush=True)
    with open_run(baseline) as ours, open_run(candidate) as theirs:
        answer = diff_runs(ours, theirs)
    print_answer(answer)
    sys.stdout.flush()
    return [f"{comparison.story}: not {what}" for what, holds in comparison.expected if not holds(answer)]
