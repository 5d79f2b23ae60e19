"""The tables of a run gone through rank by rank: where do the roots of a group's copies first differ.

A group's first rank is the reference, and its roots are kept until the last rank of the group was held against
them: 16 bytes a step and phase, however many ranks there are. Of every other rank that differs only the first
step and its roots there stay.

Place in the flow: store, replica_groups -> *replica_scan* -> replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_128_digest

from bitcheck.events import PHASES, Phase, StepKind
from bitcheck.replica_groups import GroupKey, Selection, Selector
from bitcheck.run import Run
from bitcheck.store import LoadedStep, RankReader
from bitcheck.tables import Progress

StepKey = tuple[int, int]
"""(step, StepKind): sorts as steps happen."""


@dataclass
class Reference:
    """The roots that the other ranks of a group are held against."""

    ids: np.ndarray
    """int64, a number for each (step, kind)."""
    roots: np.ndarray
    """uint8 [rows, columns, 16]."""


@dataclass
class Group:
    """One group while it is gone through."""

    key: GroupKey
    reference: Reference | None = None
    reference_rank: int = -1
    members: list[int] = field(default_factory=list)
    parted: dict[int, tuple[StepKey, bytes]] = field(default_factory=dict)
    """Rank -> the first step in which its roots differ from the reference's, and its roots there."""
    reference_roots: dict[StepKey, bytes] = field(default_factory=dict)
    """The reference's own in those steps."""
    tensors: int = 0
    has_buffers: bool = False
    begins: StepKey | None = None
    """The reference's first recorded step."""

    @property
    def first(self) -> StepKey | None:
        """The first step in which any rank's roots differ."""
        return min((key for key, _ in self.parted.values()), default=None)


class Scan:
    """Goes through the tables of a run, rank by rank."""

    def __init__(self, run: Run, selector: Selector, until: int | None) -> None:
        self.run = run
        self.selector = selector
        self.until = until
        self.groups: dict[GroupKey, Group] = {}
        self.last_steps: dict[int, int] = {}
        """Rank -> its last whole step."""
        self.steps: set[int] = set()
        self._numbers = b""

    def go(self, ranks: Iterable[int], progress: Progress | None = None, only: GroupKey | None = None) -> None:
        """Look at every rank; `only` one group, which begins anew with the first of `ranks`."""
        if only is not None:
            self.groups[only] = Group(only)
        ordered = list(ranks)
        for done, rank in enumerate(ordered, 1):
            reader = self.run.rank(rank)
            self._scan_rank(rank, reader, only)
            self.run.close_rank(rank)
            if progress is not None:
                progress(done, len(ordered))

    def rows(self, reader: RankReader) -> np.ndarray:
        """Return the rows of a rank's table that count."""
        table = reader.table
        counts = table["kind"] != int(StepKind.FRAGMENT)
        if self.until is not None:
            counts &= table["step"] <= self.until
        return np.flatnonzero(counts)

    def _scan_rank(self, rank: int, reader: RankReader, only: GroupKey | None) -> None:
        rows = self.rows(reader)
        table = reader.table[rows]
        whole = table["step"][table["kind"] == int(StepKind.STEP)]
        if len(whole):
            self.last_steps[rank] = int(whole[-1])
            if (numbers := whole.tobytes()) != self._numbers:
                self._numbers = numbers
                self.steps.update(whole.tolist())
        ids = table["step"].astype(np.int64) * 4 + table["kind"]
        pairs = table["layout"].astype(np.uint64) << np.uint64(32) | table["meta"]
        roots: dict[GroupKey, np.ndarray] = {}
        for pair in np.unique(pairs).tolist():
            at = np.flatnonzero(pairs == np.uint64(pair))
            layout_number, meta_number = pair >> 32, pair & 0xFFFFFFFF
            with reader.reading(int(table["step"][at[0]])):
                layout, meta = reader.layout(layout_number), reader.meta(meta_number)
                selections = self.selector.select(rank, layout, meta)
            for key, selection in selections.items():
                if only is not None and key != only:
                    continue
                if key not in roots:
                    roots[key] = np.zeros((len(rows), len(selection.columns), 16), np.uint8)
                self._fill(roots[key], at, table, selection, reader, rows)
                group = self.groups.setdefault(key, Group(key))
                group.tensors = max(group.tensors, selection.num_events)
                group.has_buffers |= any(
                    len(events) > 0 and PHASES[column] is Phase.BUFFER
                    for column, events in zip(selection.columns, selection.events, strict=True)
                )
        for key, own in roots.items():
            self._compare(self.groups[key], rank, ids, own)

    @staticmethod
    def _fill(
        roots: np.ndarray, at: np.ndarray, table: np.ndarray, selection: Selection, reader: RankReader, rows: np.ndarray
    ) -> None:
        """Set the roots of the rows `at`, which share a layout."""
        partial = []
        for number, (column, events, is_whole) in enumerate(
            zip(selection.columns, selection.events, selection.is_whole, strict=True)
        ):
            if is_whole:
                roots[at, number] = table["phase_roots"][at, column]
            elif len(events):
                partial.append((number, events))
        for row in at.tolist() if partial else ():
            step = reader.load(int(rows[row]))
            for number, events in partial:
                taken = np.concatenate([step.layout.key_digests[events], step.digests[events]], axis=1)
                roots[row, number] = np.frombuffer(xxh3_128_digest(taken.tobytes()), np.uint8)

    @staticmethod
    def _compare(group: Group, rank: int, ids: np.ndarray, roots: np.ndarray) -> None:
        group.members.append(rank)
        if group.reference is None:
            group.reference, group.reference_rank = Reference(ids, roots), rank
            group.begins = _step_key(int(ids[0])) if len(ids) else None
            return
        reference = group.reference
        ours = theirs = np.arange(len(ids))
        if not np.array_equal(ids, reference.ids):
            _, ours, theirs = np.intersect1d(ids, reference.ids, return_indices=True)
        differs = (roots[ours] != reference.roots[theirs]).any(axis=(1, 2))
        if differs.any():
            at = int(differs.argmax())
            key = _step_key(int(ids[ours[at]]))
            group.parted[rank] = (key, roots[ours[at]].tobytes())
            group.reference_roots[key] = reference.roots[theirs[at]].tobytes()
        if len(group.members) == len(group.key.ranks):
            group.reference = None  # nobody is left to hold against it

    def load(self, rank: int, key: StepKey) -> LoadedStep:
        """Return one step of a rank that has it."""
        reader = self.run.rank(rank)
        table = reader.table
        at = np.flatnonzero((table["step"] == key[0]) & (table["kind"] == key[1]))
        step = reader.load(int(at[0]))
        self.run.close_rank(rank)
        return step


def _step_key(number: int) -> StepKey:
    """Undo what makes one number of a step and its kind."""
    return number >> 2, number & 3
