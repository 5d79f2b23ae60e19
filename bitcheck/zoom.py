"""Record the step in which two runs parted again, at level `op`, and compare what that shows.

    answer = zoom(ZoomPlan(Path("runs/a"), Path("runs/b"), scratch))
    answer.diff.first.op, answer.pairs
    ('aten.index_put_.default', 3)            the third pair diverged

Both commands run again as run.json has them, in their folder, with the variables that can decide bits
(`bitcheck.environment`) as they were, set or not; what else the programs read from their environment
must be as it was. Which devices are visible is left to this process, unless the runs differ in it. A
program is stopped once it is past the steps that are looked at. A pair that parts before those steps
is no answer: the next one is recorded from its first step on.

Place in the flow: diff, trials, zoom_answer -> *zoom* -> report.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitcheck.align import align_runs
from bitcheck.answer import Cause, Verdict
from bitcheck.diff import diff_runs
from bitcheck.environment import telling_variables
from bitcheck.errors import ProgramFailed, RecordingError, UsageError
from bitcheck.follow import Follower
from bitcheck.repro import run_repro, write_repro
from bitcheck.run import Run, open_run
from bitcheck.settings import Options
from bitcheck.trials import Runner, Trial, check_ending, run_trial
from bitcheck.zoom_answer import (
    Confirmed,
    Side,
    ZoomAnswer,
    all_agreed,
    environment_changes,
    is_operation_result,
    no_operation,
    none_diverged,
    not_saved,
    nothing_to_record,
    script_failed,
)

_VARIABLE = "env."
_STEP = "{step}"
_DEVICES = "_VISIBLE_DEVICES"
"""How variables end that say which devices a program may use: another allocation gives it others."""


@dataclass(frozen=True, slots=True)
class ZoomPlan:
    """What to record again."""

    baseline: Path
    candidate: Path
    scratch: Path
    """Folder for the new runs and the programs' output."""
    around: int = 0
    """Steps before and after the one that parted."""
    tries: int = 1
    """Pairs to record at most, until one diverges."""
    resume_template: str = ""
    """A command with `{checkpoint}` (and `{step}`), to begin at a checkpoint and not at the program's start."""
    checkpoints: str = ""
    """Path with `{step}`, the number of the first step after the checkpoint; relative to the programs' folder."""
    baseline_variables: Mapping[str, str] = field(default_factory=dict)
    candidate_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the programs are to find in their environment beside this process's."""
    stacks: bool = False
    """Note the Python line of each operation."""


def zoom(plan: ZoomPlan, runner: Runner = run_trial) -> ZoomAnswer:
    """Find the step in which two runs part, record it again at level `op`, and say what parts in it.

    Raises RunError where a run cannot be read, UsageError where it cannot be run again, ProgramFailed
    where a program ends badly.
    """
    with open_run(plan.baseline) as baseline, open_run(plan.candidate) as candidate:
        recorded = diff_runs(baseline, candidate)
        if recorded.first is None or recorded.cause in (Cause.INITIAL_STATE, Cause.RESTORE):
            return ZoomAnswer(recorded, nothing_to_record(recorded), 0, "", None)
        offset = align_runs(baseline, candidate).offset
        sides = (
            _side("baseline", baseline, candidate, 0, plan.baseline_variables),
            _side("candidate", candidate, baseline, offset, plan.candidate_variables),
        )
    step = recorded.first.step
    first, last = max(step - plan.around, 0), step + plan.around
    sides = (_resumed(sides[0], plan, first), _resumed(sides[1], plan, first))
    first = max(first, sides[0].start_step, sides[1].start_step)
    for number in range(1, plan.tries + 1):
        folder = plan.scratch / f"pair-{number}"
        runs = folder / "baseline", folder / "candidate"
        steps = f"{first}:{last + 1}"
        for side, run in zip(sides, runs, strict=True):
            _record(side, run, steps, last, f"{side.name} of pair {number}", runner, stacks=plan.stacks)
        with open_run(runs[0]) as ours, open_run(runs[1]) as theirs:
            answer = diff_runs(ours, theirs)
            changes = (
                *environment_changes(sides[0], ours.environment),
                *environment_changes(sides[1], theirs.environment),
            )
            answer = replace(answer, notes=(*answer.notes, *changes))
        if answer.verdict is Verdict.INCOMPARABLE:
            return ZoomAnswer(recorded, answer, number, steps, runs, sides)
        if answer.cause is None or answer.first is None:
            continue
        if answer.cause in (Cause.INITIAL_STATE, Cause.RESTORE) and first > max(side.start_step for side in sides):
            first = max(side.start_step for side in sides)  # it parted before the steps that were recorded
            continue
        return ZoomAnswer(recorded, answer, number, steps, runs, sides)
    if answer.cause is None or answer.first is None:
        answer = none_diverged(answer, recorded, plan.tries, steps)
    return ZoomAnswer(recorded, answer, plan.tries, steps, runs, sides)


def confirm(plan: ZoomPlan, answer: ZoomAnswer, executions: int, folder: Path, runner: Runner = run_trial) -> Confirmed:
    """Save the inputs of the first origin's operation in one more run of the baseline, and execute it again and again.

    `folder` gets repro.py and repro.pt. Raises ProgramFailed where the run ends badly.
    """
    origin = answer.diff.first
    if answer.sides is None or origin is None or not is_operation_result(origin):
        return Confirmed(None, None, no_operation(answer.diff, answer.pairs))
    data = plan.scratch / "inputs.pt"
    spec = {"step": origin.step, "rank": origin.rank, "site": origin.site, "file": str(data.absolute())}
    steps = f"{origin.step}:{origin.step + 1}"
    side, run = answer.sides[0], plan.scratch / "capture"
    _record(side, run, steps, origin.step, "the run for the inputs", runner, capture=spec)
    if not data.exists():
        return Confirmed(None, None, not_saved(origin, run.with_suffix(".log")))
    script = write_repro(data, folder)
    if not executions:
        return Confirmed(script, None, "")
    try:
        confirmation = run_repro(script, executions, side.variables)
    except ProgramFailed as error:  # what was found stays found
        return Confirmed(script, None, script_failed(origin, str(error)))
    return Confirmed(script, confirmation, "", "" if confirmation.differing else all_agreed(answer, confirmation))


def _side(name: str, run: Run, other: Run, offset: int, given: Mapping[str, str]) -> Side:
    info = run.info
    if info.get("recorder") == "record":
        raise UsageError(
            f"{run.path} was recorded by bitcheck.record inside its program, which would record itself again.\n"
            "Record both with `bitcheck run -o RUN -- CMD`, whose command can be repeated."
        )
    command = info.get("command")
    if not command:
        raise UsageError(f"{run.path}: run.json has no command, so the run cannot be repeated.")
    variables = _variables_of(run, other)
    cwd = Path(info["cwd"]) if info.get("cwd") else None
    if cwd is not None and not cwd.is_dir():
        raise UsageError(f"{run.path} was recorded in {cwd}, which is no folder here; run zoom where it is.")
    start = (info.get("start_step") or 0) + offset
    return Side(
        name, tuple(command), cwd, start, variables | dict(given), info.get("leaves", 2**20), dict(run.environment)
    )


def _variables_of(run: Run, other: Run) -> dict[str, str | None]:
    """Return what to put over this process's environment so that a program finds it as it was recorded.

    A run of an early bitcheck does not say what it was started with, only what the program saw at its
    first step, its own settings included: of that the variables in which the runs differ are taken.
    """
    variables: dict[str, str | None] = {}
    started, others = run.info.get("variables"), other.info.get("variables")
    if started is None or others is None:
        for key in run.environment.keys() | other.environment.keys():
            mine = run.environment.get(key)
            if key.startswith(_VARIABLE) and mine != other.environment.get(key):
                variables[key.removeprefix(_VARIABLE)] = mine
        return variables
    for name in started.keys() | others.keys() | telling_variables(os.environ).keys():
        if not name.endswith(_DEVICES) or started.get(name) != others.get(name):
            variables[name] = started.get(name)
    return variables


def _resumed(side: Side, plan: ZoomPlan, first: int) -> Side:
    """Return the program from the latest checkpoint at or before step `first` on, itself where there is none."""
    if not plan.resume_template:
        return side
    if "{checkpoint}" not in plan.resume_template or _STEP not in plan.checkpoints:
        raise UsageError(
            "a resume template needs {checkpoint} in it, and --checkpoints a path with {step}: "
            "--resume-template 'python train.py --resume {checkpoint}' --checkpoints 'ckpt/{step}.pt'"
        )
    found = find_checkpoints(plan.checkpoints, side.cwd or Path.cwd())
    usable = [step for step in found if side.start_step <= step <= first]
    if not usable:
        return side
    step = max(usable)
    text = plan.resume_template.replace("{checkpoint}", shlex.quote(str(found[step]))).replace(_STEP, str(step))
    return replace(side, command=tuple(shlex.split(text)), start_step=step)


def find_checkpoints(pattern: str, folder: Path) -> dict[int, Path]:
    """Return step -> path of everything that `pattern` with a number for `{step}` names, seen from `folder`."""
    before, _, after = pattern.partition(_STEP)
    name = re.compile(re.escape(before) + r"0*(\d+)" + re.escape(after))
    found = {}
    root = Path(pattern).is_absolute()
    # Only the part of the path that holds the number varies.
    head = before.rpartition("/")[0]
    base = Path(head or "/") if root else folder / head
    depth = pattern.count("/") - before.count("/") + 1
    for path in base.glob("/".join(["*"] * depth)) if base.is_dir() else ():
        text = str(path) if root else str(path.relative_to(folder))
        if match := name.fullmatch(text):
            found[int(match[1])] = path
    return found


def _record(
    side: Side,
    folder: Path,
    steps: str,
    last: int,
    name: str,
    runner: Runner,
    *,
    stacks: bool = False,
    capture: Mapping[str, Any] | None = None,
) -> None:
    """Record one program, to its end or until it is past step `last`."""
    trial = Trial(
        name=name,
        command=side.command,
        folder=folder,
        log=folder.with_suffix(".log"),
        options=Options("op", steps, 1, side.start_step, side.leaves, stacks=stacks, capture=capture),
        variables=side.variables,
        cwd=side.cwd,
    )
    ending = runner(trial, Follower(folder, None, stop_after=last))
    check_ending(trial, ending)
    if not ending.was_stopped:
        with open_run(folder, allow_missing_ranks=True) as run:
            notes = run.info.get("notes") or []
            if any(run.rank(rank).status == "failed" for rank in run.ranks):
                reason = "; ".join(notes) or f"its log is {trial.log}"
                raise RecordingError(f"{name} could not be recorded at level op to its end: {reason}")
