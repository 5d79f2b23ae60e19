"""A program recorded by two processes whose memory held something else before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.run import open_run


def compare_in_two_memories(folder: Path, arguments: Callable[[str], Sequence[str]]) -> Answer:
    """Run `python -m ARGUMENTS` twice and compare what is recorded; `arguments` gets the run's folder.

    The C library fills what it hands out with a byte of choice: what nobody wrote differs between the two in every bit.
    """
    for name, byte in (("a", "85"), ("b", "170")):
        environment = os.environ | {"MALLOC_PERTURB_": byte, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", *arguments(str(folder / name))]
        subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)
    with open_run(folder / "a") as baseline, open_run(folder / "b") as candidate:
        return diff_runs(baseline, candidate)
