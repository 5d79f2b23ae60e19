"""Which step of one run is which step of the other, and which rows of their tables go together.

An explicit step number (`--start-step`, `record(start_step=)`) wins. Without one a run is aligned
where its initial snapshot is bit for bit an end state of the other run, else at 0. Steps are
numbered as in the baseline from here on.

Place in the flow: views -> *align* -> diff.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitcheck.events import StepKind
from bitcheck.views import RunView

FINISHED = "complete"
"""The status of a run, or of one rank of it, that came to its own end."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the candidate's step numbers translate into the baseline's."""

    offset: int
    """Baseline step = candidate step + offset."""
    by: str
    """`step`: by number; `state`: where the initial snapshot equals an end state of the other run."""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowPairs:
    """Rows of one rank's two tables that go together, in order; all arrays have the same length."""

    steps: npt.NDArray[np.int64]
    """Step numbers of the baseline."""
    kinds: npt.NDArray[np.uint8]
    """INITIAL where at least one of the two rows is an initial snapshot: only states are compared."""
    baseline: npt.NDArray[np.int64]
    candidate: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.steps)


def has_explicit_start(run: RunView) -> bool:
    """Whether the user said at which step the run starts."""
    return run.info.get("start_step") is not None


def align_runs(baseline: RunView, candidate: RunView) -> Alignment:
    """Find the candidate's place in the baseline; ranks of a job share it, so one rank tells."""
    shared = [rank for rank in baseline.ranks if rank in set(candidate.ranks)]
    if not shared:
        return Alignment(0, "step")
    table, other = baseline.rank(shared[0]).table, candidate.rank(shared[0]).table
    explicit = has_explicit_start(baseline), has_explicit_start(candidate)
    if all(explicit):
        return Alignment(
            0, "step", (*_disagreement(table, other, "candidate"), *_disagreement(other, table, "baseline"))
        )
    if not explicit[1]:
        place = _restored_step(table, other)
        if place is not None:
            offset = place - int(_initial(other)["step"])
            return Alignment(offset, "state" if offset else "step")
    if not explicit[0]:
        place = _restored_step(other, table)
        if place is not None:
            offset = int(_initial(table)["step"]) - place
            return Alignment(offset, "state" if offset else "step")
    return Alignment(0, "step", (*_disagreement(table, other, "candidate"), *_disagreement(other, table, "baseline")))


def pair_rows(
    baseline: npt.NDArray[Any],
    candidate: npt.NDArray[Any],
    alignment: Alignment,
    *,
    until: int | None = None,
    with_fragments: bool = True,
) -> RowPairs:
    """Pair the rows of one rank's tables.

    An end of step and an initial snapshot with the same number go together (only their states are
    comparable); fragments go with fragments. `until` is the last step to pair, baseline's number.
    `with_fragments` is False where a run did not come to its end: its last piece is an unfinished step.
    """
    fragment = int(StepKind.FRAGMENT)
    if _line_up(baseline, candidate, alignment):
        wanted = np.ones(len(baseline), np.bool_)
        if until is not None:
            wanted &= baseline["step"] <= until
        if not with_fragments:
            wanted &= baseline["kind"] != fragment
        rows = np.flatnonzero(wanted)
        return RowPairs(baseline["step"][rows], baseline["kind"][rows].astype(np.uint8), rows, rows)
    places: dict[tuple[int, bool], int] = {}
    for row, (step, kind) in enumerate(zip(baseline["step"].tolist(), baseline["kind"].tolist(), strict=True)):
        places[step, kind == fragment] = row
    pairs = []
    for row, (step, kind) in enumerate(zip(candidate["step"].tolist(), candidate["kind"].tolist(), strict=True)):
        is_fragment = kind == fragment
        place = step + alignment.offset
        match = places.get((place, is_fragment))
        if match is None or (is_fragment and not with_fragments):
            continue
        if until is not None and place > until:
            continue
        both = {int(baseline["kind"][match]), kind}
        pairs.append((place, min(both) if int(StepKind.INITIAL) in both else kind, match, row))
    pairs.sort(key=lambda pair: (pair[0], pair[1] == fragment))
    columns = np.array(pairs, np.int64).reshape(len(pairs), 4)
    return RowPairs(columns[:, 0], columns[:, 1].astype(np.uint8), columns[:, 2], columns[:, 3])


def _line_up(baseline: npt.NDArray[Any], candidate: npt.NDArray[Any], alignment: Alignment) -> bool:
    """Whether the tables have the same steps, row by row."""
    return (
        len(baseline) == len(candidate)
        and np.array_equal(baseline["kind"], candidate["kind"])
        and np.array_equal(baseline["step"], candidate["step"] + alignment.offset)
    )


def _initial(table: npt.NDArray[Any]) -> Any:
    """The initial snapshot's row, None where there is none or it holds nothing."""
    rows = table[(table["kind"] == int(StepKind.INITIAL)) & (table["num_events"] > 0)]
    return rows[0] if len(rows) else None


def _end_states(table: npt.NDArray[Any], wanted: Any) -> list[int]:
    """Steps of `table` at whose end the state was that of the initial snapshot `wanted`."""
    rows = table[table["kind"] != int(StepKind.FRAGMENT)]
    same = (rows["state_root"] == wanted["state_root"]).all(axis=1)
    return [int(step) for step in rows["step"][same]]


def _restored_step(table: npt.NDArray[Any], resumed: npt.NDArray[Any]) -> int | None:
    """Step of `table` at whose end `resumed` starts, the first of several equal ones."""
    initial = _initial(resumed)
    if initial is None:
        return None
    places = _end_states(table, initial)
    return places[0] if places else None


def _disagreement(table: npt.NDArray[Any], resumed: npt.NDArray[Any], name: str) -> tuple[str, ...]:
    """A remark where the number that a resumed run was given is not that of the state it restored."""
    initial = _initial(resumed)
    if initial is None:
        return ()
    number = int(initial["step"])
    places = _end_states(table, initial)
    expected = table[(table["step"] == number) & (table["kind"] != int(StepKind.FRAGMENT))]
    if not places or number in places or not len(expected):
        return ()
    return (
        f"The {name} restored the state of step {places[0]}, not {number}: its initial snapshot equals the other "
        f"run's state at the end of step {places[0]}, and it was recorded with start step {number + 1}.",
    )
