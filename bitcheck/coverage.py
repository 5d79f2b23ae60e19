"""What must have been recorded and compared before "identical" means anything.

A comparison passes where nothing differs, and also where nothing was compared. Each function returns
the reasons why it proves less than was asked, [] where it proves all of it; a reason says what was
found, what was expected and what to do.

Place in the flow: run, answer -> *coverage* -> gate, bisect, commits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from bitcheck.align import align_runs, pair_rows
from bitcheck.answer import Answer, Verdict
from bitcheck.events import PHASES, Phase, StepKind
from bitcheck.run import Run
from bitcheck.wording import counted

_GRAD = PHASES.index(Phase.GRAD)
STATE_SITES = tuple(f"{phase}/" for phase in Phase if phase not in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD))
"""How a sentence about something unobserved begins where that is state or data, and not a computation."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What was asked for."""

    num_steps: int | None = None
    """At least so many steps; None for as many as there are, and one at least."""
    first_step: int | None = None
    """The first of them; None for where the run begins."""
    num_ranks: int | None = None
    allow_unobserved: tuple[str, ...] = ()
    """Parts of sentences about what may go unobserved."""
    is_strict: bool = False
    """Whether a computation that went unobserved (a compiled module) counts as well as state."""
    needs_gradients: bool = True
    """Whether there must be gradients, and others in one step than in another."""


def find_gaps(run: Run, name: str, demand: Demand, *, was_stopped: bool = False) -> list[str]:
    """Return why this one run, which has ended, cannot prove what was asked. Raises RunError for a damaged one.

    `was_stopped`: it was stopped on purpose, and need not have come to its end.
    """
    notes = [f"{name}: {note}" for note in run.info.get("notes") or ()]
    if run.missing_ranks:
        listed = ", ".join(map(str, run.missing_ranks[:8])) + (" ..." if len(run.missing_ranks) > 8 else "")
        every = f"{'all ' * (run.world_size > 1)}{counted(run.world_size, 'rank')}"
        return [*notes, f"{name}: nothing was recorded of rank {listed}; expected {every}."]
    if demand.num_ranks is not None and run.world_size != demand.num_ranks:
        return [*notes, f"{name} has {counted(run.world_size, 'rank')}; expected {demand.num_ranks} (--ranks)."]
    if not was_stopped and run.status != "complete":
        return [*notes, f"{name}: its recording is {run.status}; expected a complete one."]
    gaps = notes + _find_missing_steps(run, name, demand)
    if not gaps and demand.needs_gradients:
        gaps += _find_still_gradients(run, name)
    return gaps + _find_unobserved(run, name, demand)


def step_range(run: Run) -> tuple[int, int] | None:
    """Return the first and the last step that every rank has; None where there is none."""
    spans = [whole_steps(run, rank) for rank in run.ranks]
    if not spans or not all(len(steps) for steps in spans):
        return None
    first, last = max(int(steps.min()) for steps in spans), min(int(steps.max()) for steps in spans)
    return (first, last) if first <= last else None


def whole_steps(run: Run, rank: int) -> np.ndarray:
    """Return the numbers of the whole training steps of one rank, int64, ascending."""
    table = run.rank(rank).table
    return np.sort(table["step"][table["kind"] == int(StepKind.STEP)].astype(np.int64))


def _wanted_steps(run: Run, demand: Demand) -> range | None:
    span = step_range(run)
    if span is None:
        return None
    first = span[0] if demand.first_step is None else demand.first_step
    return range(first, first + demand.num_steps if demand.num_steps is not None else span[1] + 1)


def _find_missing_steps(run: Run, name: str, demand: Demand) -> list[str]:
    wanted = _wanted_steps(run, demand)
    if wanted is None:
        return [
            f"{name}: no whole training step was recorded; expected {counted(demand.num_steps or 1, 'step')} at least."
        ]
    gaps = []
    for rank in run.ranks:
        steps = whole_steps(run, rank)
        missing = np.setdiff1d(np.array(wanted), steps)
        if len(missing):
            gaps.append(
                f"{name}: {counted(len(wanted) - len(missing), 'step')} of rank {rank} recorded; expected "
                f"{len(wanted)}, from step {wanted.start} to {wanted.stop - 1}. The first that is missing is step "
                f"{missing[0]}."
            )
    return gaps[:3]


def _find_still_gradients(run: Run, name: str) -> list[str]:
    """Look for gradients, and for a change of them: a program that trains nothing always repeats itself."""
    any_moved = False
    for rank in run.ranks:
        table = run.rank(rank).table
        rows = np.flatnonzero(table["kind"] == int(StepKind.STEP))
        if not any(site.phase is Phase.GRAD for row in rows[:4].tolist() for site in run.rank(rank).load(row).sites):
            return [
                f"{name}: no gradient was recorded of rank {rank}; expected those that an optimizer finds at its step."
            ]
        roots = table["phase_roots"][rows, _GRAD]
        any_moved |= len(roots) < 2 or bool((roots[1:] != roots[:-1]).any())
    if not any_moved:
        return [
            f"{name}: every step has the same gradients, bit for bit, on every rank; expected training that moves. "
            "A program that trains nothing repeats itself whatever its kernels do."
        ]
    return []


def _find_unobserved(run: Run, name: str, demand: Demand) -> list[str]:
    found = {
        what: count
        for what, count in count_unobserved(run).items()
        if (demand.is_strict or what.startswith(STATE_SITES))
        and not any(part in what for part in demand.allow_unobserved)
    }
    return [
        f"{name}: {count:,} x unobserved: {what}. What was not read was not compared; where that is known and "
        f"meant, say so with --allow-unobserved TEXT, a part of this sentence."
        for what, count in found.items()
    ]


def count_unobserved(run: Run) -> Counter[str]:
    """Return what escaped observation, over all ranks and steps: a sentence -> how many times."""
    counts: Counter[str] = Counter()
    for rank in run.ranks:
        reader = run.rank(rank)
        table = reader.table
        before = np.concatenate([[0], table["total_unobserved"][:-1]])
        for row in np.flatnonzero(table["total_unobserved"] != before).tolist():
            counts.update(reader.load(row).unobserved)
    return counts


def find_uncompared(
    baseline: Run, candidate: Run, answer: Answer, names: tuple[str, str], wanted: range, *, is_resumed: bool = False
) -> list[str]:
    """Return why an `identical` answer proves less than that the steps `wanted` are identical on every rank.

    `wanted` are steps of the baseline. A fresh run must begin where the baseline does; a resumed one later.
    """
    mine, theirs = names
    if answer.verdict is Verdict.INCOMPARABLE:
        return [f"{theirs} and {mine} share nothing that can be compared: {answer.explanation}"]
    if baseline.level != candidate.level:
        return [
            f"{theirs} was recorded at level {candidate.level}, {mine} at level {baseline.level}; expected the same "
            "level, since only what both hold is compared."
        ]
    if set(baseline.ranks) != set(candidate.ranks) or baseline.world_size != candidate.world_size:
        return [
            f"{theirs} has {counted(candidate.world_size, 'rank')}, {mine} {baseline.world_size}; "
            "expected the same ranks."
        ]
    alignment = align_runs(baseline, candidate)
    starts = step_range(baseline), step_range(candidate)
    if starts[0] is None or starts[1] is None:
        return [f"{mine if starts[0] is None else theirs}: no whole training step was recorded."]
    begins = starts[1][0] + alignment.offset
    if is_resumed and begins <= starts[0][0]:
        return [
            f"{theirs} begins with step {begins}, as {mine} does: it started afresh, so nothing is known of resuming. "
            "Check that its command loads the checkpoint; where the state that it restores is that of no step of the "
            "other run, say which step it begins with: --resume-step."
        ]
    if not is_resumed and begins != starts[0][0]:
        return [
            f"{theirs} begins with step {begins} of {mine}, not with step {starts[0][0]}: it went on from files that "
            f"an earlier run left. Give each run a folder of its own: {{out}} in the command stands for one."
        ]
    needed = range(begins, wanted.stop) if is_resumed else wanted
    gaps = []
    for rank in baseline.ranks:
        rows = pair_rows(baseline.rank(rank).table, candidate.rank(rank).table, alignment, with_fragments=False)
        compared = rows.steps[rows.kinds == int(StepKind.STEP)]
        missing = np.setdiff1d(np.array(needed), compared)
        if len(missing):
            gaps.append(
                f"{theirs}: {counted(len(needed) - len(missing), 'step')} of rank {rank} compared with "
                f"{mine}; expected {len(needed)}, up to step {wanted.stop - 1}. The first that is missing is "
                f"step {missing[0]}."
            )
    if not gaps and not len(needed):
        gaps.append(f"{theirs}: no step compared with {mine}; expected one at least after the checkpoint.")
    return gaps[:3]
