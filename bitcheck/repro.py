"""A stand-alone script that shows one operation's fault, and what it says when it runs.

    runs/zoom/repro.py     bitcheck/hooks/replay.py under another name: needs torch only
    runs/zoom/repro.pt     the operation's inputs, as `bitcheck.hooks.capture` saved them

Place in the flow: zoom -> *repro* -> report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitcheck
from bitcheck.errors import ProgramFailed, RecordingError
from bitcheck.statistics import percent

SCRIPT, DATA = "repro.py", "repro.pt"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What executing an operation again and again on the inputs that it had in the job showed."""

    op: str
    executions: int
    differing: int
    """Executions whose bits were not those of a first one."""
    distinct: int
    """Different results, 16 at most."""
    interval: tuple[float, float]
    """95 % limits of the rate (Wilson)."""
    text: str
    """The same in sentences, and what to try next where all agreed."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "op": self.op,
            "executions": self.executions,
            "differing": self.differing,
            "distinct": self.distinct,
            "interval": list(self.interval),
            "explanation": self.text,
        }

    def __str__(self) -> str:
        low, high = map(percent, self.interval)
        return f"{self.op} differs in {self.differing} of {self.executions} executions (95 % interval {low} to {high})"


def write_repro(data: Path, folder: Path) -> Path:
    """Write repro.py and repro.pt into `folder`, made where it is missing; return the script.

    Raises RecordingError where that cannot be.
    """
    source = Path(bitcheck.__file__).parent / "hooks" / "replay.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data, folder / DATA)
        shutil.copyfile(source, folder / SCRIPT)
    except OSError as error:
        raise RecordingError(f"{folder}: the script that shows the fault cannot be written: {error}") from None
    return folder / SCRIPT


def run_repro(script: Path, executions: int, given: Mapping[str, str | None] | None = None) -> Confirmation:
    """Execute the script's operation `executions` times under load, in a process of its own.

    `given`: variables to put over this process's environment, None to take one away. Raises
    ProgramFailed where the script ends badly.
    """
    changed = {**os.environ, **(given or {}), "PYTHONPATH": None}
    variables = {name: value for name, value in changed.items() if value is not None}
    found = subprocess.run(
        [sys.executable, str(script), "--json", "-k", str(executions)],
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )
    try:
        answer = json.loads(found.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = found.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ProgramFailed(
            f"{script} ended with exit status {found.returncode}; expected 0 or 1: {last[0]}."
        ) from None
    low, high = answer["interval"]
    return Confirmation(
        answer["op"], answer["executions"], answer["differing"], answer["distinct"], (low, high), answer["explanation"]
    )
