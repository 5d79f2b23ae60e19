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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from bitcheck.answer import RunFacts
from bitcheck.digest import differing_elements
from bitcheck.errors import UsageError
from bitcheck.events import Phase, Site, StepKind
from bitcheck.explain import format_ranks
from bitcheck.naming import Naming
from bitcheck.replica_causes import Evidence, explain_replicas, explain_rest
from bitcheck.replica_groups import GroupKey, Selector, parse_group
from bitcheck.replica_scan import Group, Scan, StepKey
from bitcheck.replicas_answer import (
    Disagreement,
    ReplicaAnswer,
    ReplicaCause,
    ReplicaGroup,
    ReplicaVerdict,
    Version,
)
from bitcheck.run import Run
from bitcheck.run_document import unrecorded_processes
from bitcheck.store import LoadedStep
from bitcheck.tables import Progress

MAX_DISAGREEMENTS = 64
"""Tensors of the first step that are listed; the rest are counted."""
_MAX_STEPS_KEPT = 8
"""Ranks whose whole step is looked into for what else it says."""
_BUFFERS = "buffer/*"
"""The pattern of all buffers."""
_MAY_BE_PARTITIONED = (Phase.GRAD, Phase.OPTIM)
"""What an optimizer that divides its work among ranks (ZeRO) holds on one of them alone."""


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
    scan = Scan(run, selector, until)
    scan.go(run.ranks, progress)
    is_rest = _BUFFERS in exceptions
    if unmatched := [
        group.text for group in given if GroupKey(group.text, group.ranks) not in scan.groups and not is_rest
    ]:
        raise UsageError(
            f"--group {unmatched[0]}: no recorded tensor of these ranks is named so.\n"
            f"See the names: bitcheck show {run.path} --step 0"
        )
    found = [_settle(scan, group) for group in scan.groups.values()]
    answer = _Conclusion(scan, found).answer()
    if answer.cause is not ReplicaCause.BUFFER:
        return answer
    # Buffers often differ all the time, by design or neglect; what else goes wrong must not hide behind them.
    apart = [*exceptions, _BUFFERS]
    rest = check_replicas(run, groups=[group.text for group in given], exceptions=apart, until=until, progress=progress)
    return replace(answer, besides=rest, explanation=f"{answer.explanation} {explain_rest(rest)}")


@dataclass
class _Found:
    """What is known of a group at last."""

    group: Group
    key: StepKey | None = None
    disagreements: list[Disagreement] = field(default_factory=list)
    count: int = 0
    odd: dict[int, int] = field(default_factory=dict)
    evidence: Evidence | None = None


def _settle(scan: Scan, group: Group) -> _Found:
    """Find the first step in which copies really differ, and the ranks that are the odd ones."""
    while (key := group.first) is not None:
        kinds = _kinds_at(scan, group, key)
        found = _Look(scan, group, key, kinds).find()
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


def _scan_again(scan: Scan, group: Group, first: int) -> Group:
    members = sorted(group.members, key=lambda rank: (rank != first, rank))
    scan.selector.forget()
    scan.go(members, only=group.key)
    return scan.groups[group.key]


def _kinds_at(scan: Scan, group: Group, key: StepKey) -> list[list[int]]:
    """Return the ranks of a group by what their roots are in a step, the reference's kind first."""
    kinds: dict[bytes, list[int]] = {group.reference_roots[key]: []}
    for rank in sorted(group.members):
        if key[1] == int(StepKind.STEP) and scan.last_steps.get(rank, key[0] - 1) < key[0]:
            continue  # it ended before
        at, roots = group.parted.get(rank, (None, b""))
        kinds.setdefault(roots if at == key else group.reference_roots[key], []).append(rank)
    return [ranks for ranks in kinds.values() if ranks]


class _Kind(NamedTuple):
    """One of the contents that a group's copies have in a step: that of a few ranks, or of most."""

    ranks: list[int]
    places: Mapping[str, int]
    """Site key -> row in `digests`; one object for all kinds of one layout."""
    events: np.ndarray
    """Row -> event of the step."""
    digests: np.ndarray
    """uint8 [rows, 16]."""


class _Look:
    """Reads one step of one rank of each kind, and finds the sites whose copies differ.

    Of thousands of kinds (every rank its own gradients) only the digests of what is replicated are kept.
    """

    def __init__(self, scan: Scan, group: Group, key: StepKey, kinds: list[list[int]]) -> None:
        self.scan, self.group, self.key = scan, group, key
        self.naming = Naming()
        self.steps: list[LoadedStep] = []
        """Of the most frequent kinds."""
        self.kinds: list[_Kind] = []
        shared: dict[tuple[bytes, bytes], tuple[Mapping[str, int], np.ndarray]] = {}
        for ranks in sorted(kinds, key=lambda ranks: (-len(ranks), ranks)):
            step = scan.load(ranks[0], key)
            like = (step.layout.hash, step.meta.hash)
            if like not in shared:
                selection = scan.selector.select(ranks[0], step.layout, step.meta).get(group.key)
                events = np.sort(np.concatenate(selection.events)) if selection else np.zeros(0, np.int64)
                shared[like] = {step.keys[event]: row for row, event in enumerate(events.tolist())}, events
            places, events = shared[like]
            self.kinds.append(_Kind(ranks, places, events, step.digests[events]))
            self.naming.learn(step)
            if len(self.steps) < _MAX_STEPS_KEPT:
                self.steps.append(step)

    def find(self) -> _Found:
        """Return what differs; `count` without `disagreements`: how many sites are to be ignored from now on."""
        found, differing = _Found(self.group, self.key), {}
        ignored = self.scan.selector.ignored.setdefault(self.group.key, set())
        num_ignored = 0
        for site_key in dict.fromkeys(site_key for kind in self._distinct() for site_key in kind.places):
            contents: dict[bytes | None, list[int]] = {}
            for kind in self.kinds:
                row = kind.places.get(site_key)
                contents.setdefault(None if row is None else kind.digests[row].tobytes(), []).extend(kind.ranks)
            if len(contents) == 1:
                continue
            step, event = self._holder(site_key)
            site = step.sites[event]
            num_holders = sum(len(ranks) for digest, ranks in contents.items() if digest is not None)
            is_shared_out = num_holders == 1 and site.phase in _MAY_BE_PARTITIONED
            if is_shared_out and (site_key in ignored or not self._parameter_differs(site)):
                num_ignored += site_key not in ignored
                ignored.add(site_key)
                continue
            differing[self.naming.site(site)] = site.phase
            if len(found.disagreements) < MAX_DISAGREEMENTS:
                found.disagreements.append(self._disagreement(site_key, step, event, contents))
        found.count = len(differing) or num_ignored
        if differing:
            evidence = Evidence.of(differing, self.steps, self.naming)
            found.evidence = evidence._replace(has_before=self.key != self.group.begins)
        return found

    def _parameter_differs(self, site: Site) -> bool:
        """Whether the parameter that a gradient or a state belongs to parted too: then no optimizer shares it out."""
        key = Site(Phase.PARAM, site.root, site.path, "value").key
        rows = [(kind, kind.places.get(key)) for kind in self.kinds]
        return len({kind.digests[row].tobytes() for kind, row in rows if row is not None}) > 1

    def _distinct(self) -> Iterable[_Kind]:
        """Yield one kind for each set of sites, the most frequent first."""
        distinct: dict[int, _Kind] = {}
        for kind in self.kinds:
            distinct.setdefault(id(kind.places), kind)
        return distinct.values()

    def _holder(self, site_key: str) -> tuple[LoadedStep, int]:
        number, kind = next((n, kind) for n, kind in enumerate(self.kinds) if site_key in kind.places)
        return self._step(number), int(kind.events[kind.places[site_key]])

    def _step(self, number: int) -> LoadedStep:
        if number < len(self.steps):
            return self.steps[number]
        return self.scan.load(self.kinds[number].ranks[0], self.key)

    def _disagreement(
        self, site_key: str, step: LoadedStep, event: int, contents: Mapping[bytes | None, list[int]]
    ) -> Disagreement:
        versions = [
            Version(None if digest is None else digest.hex(), tuple(sorted(ranks)))
            for digest, ranks in contents.items()
        ]
        versions.sort(key=lambda version: (-len(version.ranks), version.ranks))
        pair = []
        for version in [version for version in versions if version.digest is not None][:2]:
            number = next(number for number, kind in enumerate(self.kinds) if version.ranks[0] in kind.ranks)
            kind = self.kinds[number]
            pair.append((self._step(number), int(kind.events[kind.places[site_key]])))
        return Disagreement(
            self.key[0],
            self.key[1] == int(StepKind.INITIAL),
            str(step.sites[event].phase),
            self.naming.site(step.sites[event]),
            step.dtypes[event],
            tuple(step.shapes[event]),
            _elements(pair),
            tuple(versions),
        )


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

    def __init__(self, scan: Scan, found: Sequence[_Found]) -> None:
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
            has_shards=scan.selector.has_shards,
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
            unrecorded_processes(run.info),
        )

    def _notes(self, ranks: Sequence[int]) -> Iterable[str]:
        yield from self.scan.run.info.get("notes") or ()
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
        if self.found and (free := sorted(self.scan.selector.undeclared)):
            more = f" and {len(free) - 1:,} more" if len(free) > 1 else ""
            yield (
                f"Nobody says which ranks hold copies of the parameter {free[0]}{more} (plain tensors that no wrapper "
                "manages), so they were not compared: --group RANKS:PATTERN says so."
            )
        if ignored := sum(map(len, self.scan.selector.ignored.values())):
            yield (
                f"{ignored:,} gradients or states of the optimizer are on one rank alone, as with an optimizer that "
                "divides its work among ranks, and were not compared."
            )
