"""Hold the ranks of one run against each other: copies of one tensor must have the same bits.

    answer = check_replicas(run)
    answer.verdict, answer.first.site, answer.first.ranks
    ('differ', 'param/head.weight:value', (2,))

Roots first. In a group of ranks that hold copies, the first rank's roots of the phases that count are kept,
and every other rank's table is held against them, one rank at a time: where all of a phase is replicated its
root in the table serves, else a root is taken over the events that are. Only in the first step in which any
rank's roots differ are events read, one rank of each kind. Where the first rank turns out to be an odd one,
the tables are gone through again with one of the majority.

Place in the flow: store, placements -> *replicas* -> gate, report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_128_digest

from bitcheck.answer import RunFacts
from bitcheck.digest import differing_elements
from bitcheck.errors import UsageError
from bitcheck.events import PHASES, Phase, StepKind
from bitcheck.explain import format_ranks
from bitcheck.naming import Naming
from bitcheck.replica_causes import Evidence, explain_replicas
from bitcheck.replica_groups import GroupKey, Selection, Selector, parse_group
from bitcheck.replicas_answer import Disagreement, ReplicaAnswer, ReplicaGroup, ReplicaVerdict, Version
from bitcheck.run import Run
from bitcheck.store import LoadedStep, RankReader
from bitcheck.tables import Progress

MAX_DISAGREEMENTS = 64
"""Tensors of the first step that are listed; the rest are counted."""
_MAY_BE_PARTITIONED = (Phase.GRAD, Phase.OPTIM)
"""What an optimizer that divides its work among ranks (ZeRO) holds on one of them alone."""

StepKey = tuple[int, int]
"""(step, StepKind): sorts as steps happen."""


def check_replicas(
    run: Run,
    *,
    groups: Sequence[str] = (),
    exceptions: Sequence[str] = (),
    until: int | None = None,
    progress: Progress | None = None,
) -> ReplicaAnswer:
    """Say whether the copies that the ranks of a run hold agree at every step and, where not, which and why.

    `groups` are declared by the user (`bitcheck.replica_groups`), beside what the recorder noted;
    `exceptions` are patterns of tensors that may differ; `until` is the last step to look at. Raises
    UsageError for a group that makes no sense or names nothing, RunError where the run is damaged.
    """
    given = [parse_group(text, run.world_size) for text in dict.fromkeys(groups)]
    selector = Selector(True, given, exceptions)
    scan = _Scan(run, selector, until)
    scan.go(run.ranks, progress)
    if unmatched := [group.text for group in given if GroupKey(group.text, group.ranks) not in scan.groups]:
        raise UsageError(
            f"--group {unmatched[0]}: no recorded tensor of these ranks is named so.\n"
            f"See the names: bitcheck show {run.path} --step 0"
        )
    found = [_settle(scan, group) for group in scan.groups.values()]
    return _Conclusion(scan, found).answer()


@dataclass
class _Reference:
    """The roots that the other ranks of a group are held against."""

    ids: np.ndarray
    """int64, a number for each (step, kind)."""
    roots: np.ndarray
    """uint8 [rows, columns, 16]."""


@dataclass
class _Group:
    """One group while it is gone through."""

    key: GroupKey
    reference: _Reference | None = None
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


class _Scan:
    """Goes through the tables of a run, rank by rank."""

    def __init__(self, run: Run, selector: Selector, until: int | None) -> None:
        self.run = run
        self.selector = selector
        self.until = until
        self.groups: dict[GroupKey, _Group] = {}
        self.last_steps: dict[int, int] = {}
        """Rank -> its last whole step."""
        self.steps: set[int] = set()
        self._numbers = b""

    def go(self, ranks: Iterable[int], progress: Progress | None = None, only: GroupKey | None = None) -> None:
        """Look at every rank; `only` one group, which begins anew with the first of `ranks`."""
        if only is not None:
            self.groups[only] = _Group(only)
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
                group = self.groups.setdefault(key, _Group(key))
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
    def _compare(group: _Group, rank: int, ids: np.ndarray, roots: np.ndarray) -> None:
        group.members.append(rank)
        if group.reference is None:
            group.reference, group.reference_rank = _Reference(ids, roots), rank
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


@dataclass
class _Found:
    """What is known of a group at last."""

    group: _Group
    key: StepKey | None = None
    disagreements: list[Disagreement] = field(default_factory=list)
    count: int = 0
    odd: dict[int, int] = field(default_factory=dict)
    evidence: Evidence | None = None


def _settle(scan: _Scan, group: _Group) -> _Found:
    """Find the first step in which copies really differ, and the ranks that are the odd ones."""
    while (key := group.first) is not None:
        kinds = _kinds_at(scan, group, key)
        found = _look(scan, group, key, kinds)
        if found.disagreements:
            members = max(kinds, key=len)
            if 2 * len(members) > sum(map(len, kinds)):
                if group.reference_rank not in members:
                    group = _scan_again(scan, group, members[0])
                    found.group = group
                found.odd = {rank: step for rank, ((step, _), _) in group.parted.items()}
            return found
        if not found.count:
            break
        group = _scan_again(scan, group, group.reference_rank)
    return _Found(group)


def _scan_again(scan: _Scan, group: _Group, first: int) -> _Group:
    members = sorted(group.members, key=lambda rank: (rank != first, rank))
    scan.selector.forget()
    scan.go(members, only=group.key)
    return scan.groups[group.key]


def _kinds_at(scan: _Scan, group: _Group, key: StepKey) -> list[list[int]]:
    """Return the ranks of a group by what their roots are in a step, the reference's kind first."""
    kinds: dict[bytes, list[int]] = {group.reference_roots[key]: []}
    for rank in sorted(group.members):
        if key[1] == int(StepKind.STEP) and scan.last_steps.get(rank, key[0] - 1) < key[0]:
            continue  # it ended before
        at, roots = group.parted.get(rank, (None, b""))
        kinds.setdefault(roots if at == key else group.reference_roots[key], []).append(rank)
    return [ranks for ranks in kinds.values() if ranks]


def _look(scan: _Scan, group: _Group, key: StepKey, kinds: list[list[int]]) -> _Found:
    """Read the events of one rank of each kind. `count` without `disagreements`: sites that are to be ignored."""
    kinds = sorted(kinds, key=lambda ranks: (-len(ranks), ranks))
    naming = Naming()
    steps, places = [], []
    for ranks in kinds:
        step = scan.load(ranks[0], key)
        selection = scan.selector.select(ranks[0], step.layout, step.meta).get(group.key)
        events = sorted(event for column in (selection.events if selection else ()) for event in column.tolist())
        naming.learn(step)
        steps.append(step)
        places.append({step.keys[event]: event for event in events})
    found = _Found(group, key)
    ignored = scan.selector.ignored.setdefault(group.key, set())
    for site_key in dict.fromkeys(site_key for place in places for site_key in place):
        holders = [number for number, place in enumerate(places) if site_key in place]
        contents: dict[bytes | None, list[int]] = {}
        for number, (ranks, step, place) in enumerate(zip(kinds, steps, places, strict=True)):
            digest = step.digests[place[site_key]].tobytes() if number in holders else None
            contents.setdefault(digest, []).extend(ranks)
        if len(contents) == 1:
            continue
        step, event = steps[holders[0]], places[holders[0]][site_key]
        num_holders = sum(len(kinds[number]) for number in holders)
        if num_holders == 1 and step.sites[event].phase in _MAY_BE_PARTITIONED:
            found.count += site_key not in ignored
            ignored.add(site_key)
            continue
        versions = [
            Version(None if digest is None else digest.hex(), tuple(sorted(ranks)))
            for digest, ranks in contents.items()
        ]
        versions.sort(key=lambda version: (-len(version.ranks), version.ranks))
        present = [version.ranks[0] for version in versions if version.digest is not None][:2]
        pair = [next(n for n, ranks in enumerate(kinds) if rank in ranks) for rank in present]
        disagreement = Disagreement(
            key[0],
            key[1] == int(StepKind.INITIAL),
            str(step.sites[event].phase),
            naming.site(step.sites[event]),
            step.dtypes[event],
            tuple(step.shapes[event]),
            _elements([(steps[n], places[n][site_key]) for n in pair]),
            tuple(versions),
        )
        found.disagreements.append(disagreement)
    if found.disagreements:
        found.count = len(found.disagreements)
        found.evidence = Evidence.of(found.disagreements, steps, naming)._replace(has_before=key != group.begins)
        del found.disagreements[MAX_DISAGREEMENTS:]
    return found


def _elements(pair: Sequence[tuple[LoadedStep, int]]) -> tuple[int, int] | None:
    """Return the first and last element in which two versions of a tensor differ, None where it is not known."""
    if len(pair) < 2:
        return None
    (ours, at), (theirs, place) = pair
    if (ours.dtypes[at], ours.shapes[at]) != (theirs.dtypes[place], theirs.shapes[place]) or ours.value(at) is not None:
        return None
    num_bytes, count = int(ours.num_bytes[at]), math.prod(ours.shapes[at])
    return differing_elements(ours.leaves(at), theirs.leaves(place), num_bytes, num_bytes // count if count else 0)


class _Conclusion:
    """Makes one answer of what was found in each group."""

    def __init__(self, scan: _Scan, found: Sequence[_Found]) -> None:
        self.scan = scan
        self.found = sorted(found, key=lambda one: (one.key is None, one.key or (0, 0), one.group.key))

    def answer(self) -> ReplicaAnswer:
        scan, run = self.scan, self.scan.run
        groups = tuple(
            ReplicaGroup(one.group.key.by, one.group.key.ranks, one.group.tensors, one.group.has_buffers, one.count)
            for one in sorted(self.found, key=lambda one: one.group.key)
            if len(one.group.members) > 1
        )
        differing = [one for one in self.found if one.disagreements]
        first = [one for one in differing if one.key == differing[0].key]
        odd: dict[int, int] = {}
        for one in differing:
            for rank, step in one.odd.items():
                odd[rank] = min(step, odd.get(rank, step))
        verdict = ReplicaVerdict.DIFFER if differing else ReplicaVerdict.AGREE if groups else ReplicaVerdict.UNDECLARED
        ranks = sorted({rank for one in self.found if len(one.group.members) > 1 for rank in one.group.members})
        steps = len(scan.steps)
        if verdict is not ReplicaVerdict.UNDECLARED and not steps:
            verdict = ReplicaVerdict.UNDECLARED if not differing else verdict
        cause, explanation, remedy = explain_replicas(
            verdict,
            [disagreement for one in first for disagreement in one.disagreements],
            sum(one.count for one in first),
            next((one.evidence for one in first if one.evidence is not None), None),
            odd,
            groups,
            start_step=run.info["start_step"] or 0,
            num_steps=steps,
            num_ranks=len(ranks),
            world_size=run.world_size,
        )
        return ReplicaAnswer(
            verdict,
            self._facts(),
            groups,
            steps,
            len(ranks),
            sum(group.tensors for group in groups),
            cause,
            tuple(disagreement for one in first for disagreement in one.disagreements)[:MAX_DISAGREEMENTS],
            sum(one.count for one in first),
            tuple(sorted(odd.items(), key=lambda entry: (entry[1], entry[0]))),
            explanation,
            remedy,
            tuple(self._notes(ranks)),
        )

    def _facts(self) -> RunFacts:
        run, steps = self.scan.run, self.scan.steps
        return RunFacts(
            str(run.path),
            run.run_id,
            min(steps, default=None),
            max(steps, default=None),
            run.world_size,
            str(run.level),
            run.status,
        )

    def _notes(self, ranks: Sequence[int]) -> Iterable[str]:
        last = max(self.scan.steps, default=0)
        short = [rank for rank in self.scan.run.ranks if self.scan.last_steps.get(rank, -1) < last]
        if short and self.scan.steps:
            ends = sorted({self.scan.last_steps.get(rank, -1) for rank in short})
            where = f"after step {ends[0]}" if ends[0] >= 0 else "before the first step ended"
            yield (
                f"{format_ranks(short).capitalize()} ended {where}, others after step {last}: what only some of them "
                "have was compared over these, as far as the first rank of a group has it."
            )
        lacking = {rank for one in self.found for rank in one.group.key.ranks if rank not in one.group.members} - set(
            ranks
        )
        if lacking and ranks:
            yield f"{format_ranks(sorted(lacking)).capitalize()} recorded none of the tensors and was not compared."
        alone = [rank for rank in self.scan.run.ranks if rank not in ranks and rank not in lacking]
        if alone and ranks:
            yield f"{format_ranks(alone).capitalize()} held no copy of anything and was not compared."
        if ignored := sum(map(len, self.scan.selector.ignored.values())):
            yield (
                f"{ignored:,} gradients or states of the optimizer are on one rank alone, as with an optimizer that "
                "divides its work among ranks, and were not compared."
            )
