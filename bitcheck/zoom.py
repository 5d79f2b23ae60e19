"""Record the step in which two runs parted again, at level `op`, and compare what that shows.

    answer = zoom(ZoomPlan(Path("runs/a"), Path("runs/b"), scratch))
    answer.diff.first.op, answer.pairs
    ('aten.index_put_.default', 3)            the third pair diverged

Both commands run again as run.json has them, in their folder, with the variables of numerical
libraries that the runs do not share set as they were; what else the programs read from their
environment must be as it was. A program is stopped once it is past the steps that are looked at.
A pair that parts before those steps is no answer: the next one is recorded from its first step on.

Place in the flow: diff, trials -> *zoom* -> report.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitcheck.align import align_runs
from bitcheck.answer import Answer, Cause, Origin, Verdict
from bitcheck.diff import diff_runs
from bitcheck.errors import RecordingError, UsageError
from bitcheck.follow import Follower
from bitcheck.repro import Confirmation, run_repro, write_repro
from bitcheck.run import Run, open_run
from bitcheck.settings import Options
from bitcheck.statistics import percent, rate_bound
from bitcheck.trials import Runner, Trial, check_ending, run_trial

_VARIABLE = "env."
_STEP = "{step}"


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


@dataclass(frozen=True, slots=True)
class ZoomAnswer:
    """What was found."""

    recorded: Answer
    """The diff of the two runs that were given."""
    diff: Answer
    """The diff of the last pair recorded at level `op`; `recorded` where there was nothing to look at closer."""
    pairs: int
    """Pairs that were recorded."""
    steps: str
    """`A:B`, the steps recorded at level `op` in the last pair, in the baseline's numbers."""
    runs: tuple[Path, Path] | None
    """The last pair."""
    sides: tuple[Side, Side] | None = None
    """The programs, as they were run."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data: bitcheck.diff/1, and `zoom` beside it."""
        first = self.recorded.first
        return self.diff.to_json() | {
            "zoom": {
                "parted_in": None if first is None else first.step,
                "pairs": self.pairs,
                "steps": self.steps,
                "runs": None if self.runs is None else [str(path) for path in self.runs],
            }
        }


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What became of the wish to confirm an origin."""

    script: Path | None
    confirmation: Confirmation | None
    obstacle: str
    """Why there is no script, "" where there is one."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "script": None if self.script is None else str(self.script),
            "confirmation": None if self.confirmation is None else self.confirmation.to_json(),
            "obstacle": self.obstacle,
        }


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two programs, as it is run again."""

    name: str
    """`baseline` or `candidate`."""
    command: tuple[str, ...]
    cwd: Path | None
    start_step: int
    """Number of its first step, as in the baseline."""
    variables: Mapping[str, str | None]
    leaves: str | int


def zoom(plan: ZoomPlan, runner: Runner = run_trial) -> ZoomAnswer:
    """Find the step in which two runs part, record it again at level `op`, and say what parts in it.

    Raises RunError where a run cannot be read, UsageError where it cannot be run again, ProgramFailed
    where a program ends badly.
    """
    with open_run(plan.baseline) as baseline, open_run(plan.candidate) as candidate:
        recorded = diff_runs(baseline, candidate)
        if recorded.first is None or recorded.cause in (Cause.INITIAL_STATE, Cause.RESTORE):
            return ZoomAnswer(recorded, _nothing_to_record(recorded), 0, "", None)
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
        was_stopped = [
            _record(side, folder, steps, last, f"{side.name} of pair {number}", runner, stacks=plan.stacks)
            for side, folder in zip(sides, runs, strict=True)
        ]
        with open_run(runs[0]) as ours, open_run(runs[1]) as theirs:
            answer = _without_stops(diff_runs(ours, theirs), was_stopped)
        if answer.verdict is Verdict.INCOMPARABLE:
            return ZoomAnswer(recorded, answer, number, steps, runs, sides)
        if answer.cause is None or answer.first is None:
            continue
        if answer.cause in (Cause.INITIAL_STATE, Cause.RESTORE) and first > max(side.start_step for side in sides):
            first = max(side.start_step for side in sides)  # it parted before the steps that were recorded
            continue
        return ZoomAnswer(recorded, answer, number, steps, runs, sides)
    if answer.cause is None or answer.first is None:
        answer = _none_diverged(answer, recorded, plan.tries)
    return ZoomAnswer(recorded, answer, plan.tries, steps, runs, sides)


def confirm(plan: ZoomPlan, answer: ZoomAnswer, executions: int, folder: Path, runner: Runner = run_trial) -> Confirmed:
    """Save the inputs of the first origin's operation in one more run of the baseline, and execute it again and again.

    `folder` gets repro.py and repro.pt. Raises ProgramFailed where the run, or the script, ends badly.
    """
    origin = answer.diff.first
    if answer.sides is None or origin is None or not is_operation_result(origin):
        return Confirmed(
            None, None, "Only what an operation gave can be confirmed, and the first origin is no such thing."
        )
    data = plan.scratch / "inputs.pt"
    spec = {"step": origin.step, "rank": origin.rank, "site": origin.site, "file": str(data.absolute())}
    steps = f"{origin.step}:{origin.step + 1}"
    _record(
        answer.sides[0], plan.scratch / "capture", steps, origin.step, "the run for the inputs", runner, capture=spec
    )
    if not data.exists():
        why = "It did not come up, or its inputs cannot be saved"
        return Confirmed(None, None, f"The inputs of {origin.op} in {origin.site} were not saved. {why}.")
    script = write_repro(data, folder)
    return Confirmed(script, run_repro(script, executions) if executions else None, "")


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
    variables: dict[str, str | None] = {}
    for key in run.environment.keys() | other.environment.keys():
        mine, theirs = run.environment.get(key), other.environment.get(key)
        if key.startswith(_VARIABLE) and mine != theirs:
            variables[key.removeprefix(_VARIABLE)] = mine
    cwd = Path(info["cwd"]) if info.get("cwd") else None
    if cwd is not None and not cwd.is_dir():
        raise UsageError(f"{run.path} was recorded in {cwd}, which is no folder here; run zoom where it is.")
    start = (info.get("start_step") or 0) + offset
    return Side(name, tuple(command), cwd, start, variables | dict(given), info.get("leaves", 2**20))


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
) -> bool:
    """Record one program; return whether it was stopped because it was past step `last`."""
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
    return ending.was_stopped


def is_operation_result(origin: Origin) -> bool:
    """Whether an origin is what a dispatched operation gave or wrote: its inputs say all about it."""
    name = (origin.op or "").partition(" in ")[0]
    slot = origin.site.rpartition(":")[2].partition("#")[0].partition("@")[0]
    return (
        origin.missing_in is None
        and name.count(".") >= 2
        and slot.startswith(name + ".")
        and (slot.endswith(".written") or re.fullmatch(r"out(\.\d+)*", slot.removeprefix(name + ".")) is not None)
    )


def _without_stops(answer: Answer, was_stopped: Sequence[bool]) -> Answer:
    """Leave out that a run did not finish where it was zoom that stopped it."""
    stopped = [
        f"The {name} did not finish" for name, was in zip(("baseline", "candidate"), was_stopped, strict=True) if was
    ]
    return replace(answer, notes=tuple(note for note in answer.notes if not note.startswith(tuple(stopped))))


def _nothing_to_record(answer: Answer) -> Answer:
    """Say why no step was recorded again."""
    if answer.verdict is Verdict.INCOMPARABLE:
        return answer
    if answer.verdict is Verdict.IDENTICAL:
        note = "The runs are identical, so there is no step to record again."
    elif answer.first is None:
        note = "The runs agree as far as both go, so there is no step to record again."
    else:
        note = "The runs part before their first step, so there is no operation to look for."
    return replace(answer, notes=(*answer.notes, note))


def _none_diverged(answer: Answer, recorded: Answer, tries: int) -> Answer:
    assert recorded.first is not None
    pairs = "the pair" if tries == 1 else f"all {tries} pairs"
    return replace(
        answer,
        explanation=f"The runs part in step {recorded.first.step} ({recorded.first.site}), but {pairs} recorded again "
        f"at level op agree: the fault is one of chance, and shows in at most {percent(rate_bound(tries))} of pairs "
        "(95 % confidence), or what the program reads from outside is no longer as it was.",
        remedy="Raise --tries, record under the load under which it showed, and see that both programs find the same "
        "files and variables as when they were recorded.",
    )
