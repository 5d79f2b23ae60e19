"""The tables of two runs side by side: which steps differ on which ranks, told by roots alone.

Identical ranks cost one comparison of their chains; of the others the table is read, and the roots
of each phase of each step are compared. No event is read here.

Place in the flow: align -> *tables* -> origins -> diff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bitcheck.align import FINISHED, Alignment, RowPairs, pair_rows
from bitcheck.events import PHASES, STATE_PHASES, Level, Phase, StepKind
from bitcheck.run_document import STOPPED
from bitcheck.views import RankView, RunView

Progress = Callable[[int, int], None]
"""Called with (ranks done, ranks in all)."""

StepKey = tuple[int, bool]
"""(step number of the baseline, whether it is the fragment after the last step)."""

STATE_LEVEL_PHASES = frozenset(Phase) - {Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.COMM}
MAX_OPEN_RANKS = 32
"""Of more ranks that differ, the files are closed between uses."""

COLUMN = {phase: number for number, phase in enumerate(PHASES)}
"""Where a phase's root is among a row's."""
STATE_COLUMNS = np.array([COLUMN[phase] for phase in STATE_PHASES])
_IS_STATE = np.array([phase in STATE_PHASES for phase in PHASES])


@dataclass
class DifferingRank:
    """The row pairs of a rank in which anything differs."""

    rows: RowPairs
    parted: npt.NDArray[np.bool_]
    """[rows, 13]: the root of this phase differs."""
    differing: npt.NDArray[np.int64]
    """Indices in `rows` where something beside the generators differs."""
    generators: npt.NDArray[np.int64]
    """Indices in `rows` where generator states differ."""

    def place(self, key: StepKey) -> int | None:
        """Return where in `rows` a step is, None where it is not."""
        steps, kinds = self.rows.steps, self.rows.kinds
        first = int(np.searchsorted(steps, key[0]))
        for index in range(first, min(first + 2, len(steps))):
            if int(steps[index]) == key[0] and (int(kinds[index]) == int(StepKind.FRAGMENT)) == key[1]:
                return index
        return None


@dataclass(slots=True)
class Totals:
    """What was compared, over all ranks."""

    steps: int = 0
    ranks: int = 0
    events: int = 0
    bytes: int = 0
    first_step: int | None = None
    last_step: int | None = None
    num_pairs: int = 0
    ended_early: dict[str, list[int]] = field(default_factory=dict)
    """`baseline` or `candidate` -> ranks that it has fewer steps of: unfinished, or left while others of it went on."""
    endings: dict[str, dict[tuple[str, int], list[int]]] = field(default_factory=dict)
    """Of those: `baseline` or `candidate` -> (a rank's own status, its last whole step) -> ranks."""
    recompute: list[int] = field(default_factory=list)
    """Ranks with activation recompute."""


class Tables:
    """Two runs' tables, rank by rank; `scan` fills `totals` and `differing`."""

    def __init__(self, baseline: RunView, candidate: RunView, alignment: Alignment, until: int | None) -> None:
        self.baseline = baseline
        self.candidate = candidate
        self.alignment = alignment
        self.until = until
        present = set(candidate.ranks)
        self.ranks = [rank for rank in baseline.ranks if rank in present]
        """Ranks that both runs have."""
        self.totals = Totals()
        self._finished: dict[str, dict[int, tuple[int, int]]] = {}
        """`baseline` or `candidate` -> rank that finished -> its last step there, and in the other run."""
        self._longest: dict[str, int] = {}
        """`baseline` or `candidate` -> the last step of the rank that went furthest."""
        self.differing: dict[int, DifferingRank] = {}
        self.levels_differ = baseline.level != candidate.level
        self.phases: frozenset[Phase] = (
            STATE_LEVEL_PHASES
            if Level.STATE in (baseline.level, candidate.level) and self.levels_differ
            else frozenset(Phase)
        )
        """Phases that both runs' levels have."""
        self._columns = np.array([COLUMN[phase] for phase in PHASES if phase in self.phases and phase is not Phase.RNG])

    def scan(self, progress: Progress | None) -> None:
        """Pair the rows of every rank and keep the ranks in which roots differ.

        A rank whose chain is the same in both runs is equal in everything, and its table is not read
        (except the first one's, for the numbers of the steps).
        """
        ours, theirs = self.tails
        equal = (ours["chain"] == theirs["chain"]).all(axis=1) & (ours["num_rows"] == theirs["num_rows"])
        equal &= ours["num_rows"] > 0
        if self.alignment.offset or self.until is not None:
            equal[:] = False
        for done, rank in enumerate(self.ranks):
            if equal[done] and done:
                self._count_whole(ours[done], rank)
            else:
                self._scan_rank(rank)
            if progress is not None:
                progress(done + 1, len(self.ranks))
        self._find_those_who_left()

    @cached_property
    def tails(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The ends of the common ranks, baseline's and candidate's."""
        found = []
        for run in (self.baseline, self.candidate):
            place = {rank: index for index, rank in enumerate(run.ranks)}
            found.append(run.read_tails()[[place[rank] for rank in self.ranks]])
        return found[0], found[1]

    def _scan_rank(self, rank: int) -> None:
        ours, theirs = self.baseline.rank(rank), self.candidate.rank(rank)
        rows = pair_rows(
            ours.table,
            theirs.table,
            self.alignment,
            until=self.until,
            with_fragments=(ours.status, theirs.status) == (FINISHED, FINISHED),
        )
        self._count(rows, ours.table, theirs.table, rank)
        self._find_early_end(ours, theirs, rank)
        found = self._compare_roots(rows, ours.table, theirs.table)
        if found is not None:
            self.differing[rank] = found
        if found is None or len(self.differing) > MAX_OPEN_RANKS:
            self.close(rank)

    def _count_whole(self, tail: Any, rank: int) -> None:
        """Count a rank that is equal in everything."""
        totals = self.totals
        first, last = int(tail["first_kind"]), int(tail["last_kind"])
        num_rows = int(tail["num_rows"])
        steps = num_rows - (first == int(StepKind.INITIAL)) - (last == int(StepKind.FRAGMENT) and num_rows > 1)
        totals.num_pairs += num_rows
        totals.ranks += 1
        totals.steps = max(totals.steps, steps)
        totals.events += int(tail["total_events"])
        totals.bytes += int(tail["total_bytes"])
        if totals.recompute:
            totals.recompute.append(rank)

    def close(self, rank: int) -> None:
        """Close a rank's files: thousands of them are not held open."""
        self.baseline.close_rank(rank)
        self.candidate.close_rank(rank)

    def _count(self, rows: RowPairs, table: npt.NDArray[Any], other: npt.NDArray[Any], rank: int) -> None:
        totals = self.totals
        steps = rows.steps[rows.kinds == int(StepKind.STEP)]
        totals.num_pairs += len(rows)
        totals.ranks += bool(len(rows))
        totals.steps = max(totals.steps, len(steps))
        # An initial snapshot is compared with a whole step's end state: what both have counts.
        totals.events += int(np.minimum(table["num_events"][rows.baseline], other["num_events"][rows.candidate]).sum())
        totals.bytes += int(np.minimum(table["num_bytes"][rows.baseline], other["num_bytes"][rows.candidate]).sum())
        if len(steps):
            first, last = int(steps[0]), int(steps[-1])
            totals.first_step = first if totals.first_step is None else min(first, totals.first_step)
            totals.last_step = last if totals.last_step is None else max(last, totals.last_step)
        column = COLUMN[Phase.RECOMPUTE]
        roots = table["phase_roots"][rows.baseline, column]
        if len(roots) > 1 and (roots != roots[0]).any():
            totals.recompute.append(rank)

    def _find_early_end(self, ours: RankView, theirs: RankView, rank: int) -> None:
        last = [
            _last_step(ours.table, 0, self.until),
            _last_step(theirs.table, self.alignment.offset, self.until),
        ]
        for name, run, reader, mine, other in (
            ("baseline", self.baseline, ours, last[0], last[1]),
            ("candidate", self.candidate, theirs, last[1], last[0]),
        ):
            if str(run.status) == STOPPED:
                pass  # its ranks got as far as they did when it was asked to end
            elif reader.status == FINISHED:
                self._finished.setdefault(name, {})[rank] = (mine, other)
            elif mine < other:
                self._end_early(name, reader.status, mine, [rank])
            self._longest[name] = max(mine, self._longest.get(name, mine))

    def _find_those_who_left(self) -> None:
        """Tell a run that was asked for fewer steps from ranks that went while others of their run did not."""
        for name, finished in self._finished.items():
            left: dict[int, list[int]] = {}
            for rank, (mine, other) in finished.items():
                if mine < min(other, self._longest[name]):
                    left.setdefault(mine, []).append(rank)
            for last, ranks in left.items():
                self._end_early(name, FINISHED, last, ranks)

    def _end_early(self, name: str, status: str, last: int, ranks: list[int]) -> None:
        totals = self.totals
        totals.ended_early[name] = sorted((*totals.ended_early.get(name, ()), *ranks))
        totals.endings.setdefault(name, {}).setdefault((status, last), []).extend(ranks)

    def _compare_roots(self, rows: RowPairs, ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> DifferingRank | None:
        """Return where the rows' roots differ, None where nowhere."""
        whole = len(rows) == len(ours) == len(theirs)
        if whole and len(rows) and (ours["chain"][-1] == theirs["chain"][-1]).all():
            return None
        parted = (ours["phase_roots"][rows.baseline] != theirs["phase_roots"][rows.candidate]).any(axis=2)
        is_initial = rows.kinds == int(StepKind.INITIAL)
        parted[is_initial] &= _IS_STATE
        differs = parted[:, self._columns].any(axis=1)
        generators = ~is_initial & parted[:, COLUMN[Phase.RNG]]
        if not differs.any() and not generators.any():
            return None
        return DifferingRank(rows, parted, np.flatnonzero(differs), np.flatnonzero(generators))

    def index(self, rank: int, key: StepKey) -> int:
        """Return where among a differing rank's row pairs a step is."""
        index = self.differing[rank].place(key)
        if index is None:
            raise KeyError(key)
        return index

    def row_of(self, rank: int, key: StepKey) -> tuple[int, int]:
        """Return the rows of a step in the baseline's and in the candidate's table of a differing rank."""
        rows = self.differing[rank].rows
        index = self.index(rank, key)
        return int(rows.baseline[index]), int(rows.candidate[index])


def _last_step(table: npt.NDArray[Any], offset: int, until: int | None) -> int:
    """Return the last whole step in the baseline's numbers, at most `until`; one before the first where none."""
    steps = table["step"][table["kind"] == int(StepKind.STEP)]
    initial = table["step"][table["kind"] == int(StepKind.INITIAL)]
    last = int(steps.max()) if len(steps) else int(initial[0]) if len(initial) else -1
    last += offset
    return last if until is None else min(last, until)
