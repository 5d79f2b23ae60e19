"""One trial: a program run once, recorded, for a verdict. The gate and both bisections are made of them.

A trial's output goes to a log file, so that the runs of one verdict do not mix; it has no standard
input. `Runner` is what runs one: `run_trial` in earnest, something that makes up runs in a test.

Place in the flow: launch -> *trials* -> follow, gate, bisect, commits.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bitcheck.errors import ProgramFailed
from bitcheck.launch import Ending, Watch, record_program
from bitcheck.settings import Options

LAST_LINES = 15
"""Lines of a failed program's log that are shown."""
_LAST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run, and where its recording goes."""

    name: str
    """As people are told: `run 2`."""
    command: tuple[str, ...]
    folder: Path
    """The run; it must not exist."""
    log: Path
    """Where standard output and standard error go; made with its folder."""
    options: Options = field(default_factory=Options)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Put over this process's environment; None takes a variable away."""
    cwd: Path | None = None


class Runner(Protocol):
    """Runs a trial to its end, or until `watch` says that it has seen enough."""

    def __call__(self, trial: Trial, watch: Watch) -> Ending: ...


def run_trial(trial: Trial, watch: Watch) -> Ending:
    """Run and record a program. Raises ProgramNotFound, RecordingError."""
    variables = dict(os.environ)
    for name, value in trial.variables.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    trial.log.parent.mkdir(parents=True, exist_ok=True)
    with open(os.devnull, "rb") as nothing, trial.log.open("wb") as log:
        return record_program(
            trial.command,
            trial.folder,
            trial.options,
            stdin=nothing,
            stdout=log,
            stderr=log,
            variables=variables,
            cwd=trial.cwd,
            watch=watch,
        )


def describe_failure(trial: Trial, ending: Ending) -> str:
    """Say how a program failed, with the end of its output."""
    how = f"exit status {ending.exit_status}"
    if ending.exit_status > 128:
        how += f" (signal {ending.exit_status - 128})"
    lines = last_lines(trial.log)
    said = "".join(f"\n  | {line}" for line in lines) if lines else " It printed nothing."
    return f"{trial.name}: the program ended with {how}; expected 0. The end of {trial.log}:{said}"


def check_ending(trial: Trial, ending: Ending) -> None:
    """Raise ProgramFailed unless the program ended well, or was stopped because enough was seen."""
    if ending.exit_status and not ending.was_stopped:
        raise ProgramFailed(describe_failure(trial, ending))


def command_line(command: Sequence[str]) -> str:
    """Return a command as it is typed, on one line."""
    return shlex.join(command).replace("\n", "\\n")


def last_lines(path: Path, count: int = LAST_LINES) -> list[str]:
    """Return the last lines of a log; [] where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-count:]
