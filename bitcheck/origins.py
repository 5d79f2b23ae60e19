"""The steps in which two runs differ, gone through in order, and the origins in them.

The first step in which anything differs holds the origins; a later step holds further ones only if
everything visible that entered it (the state before it, the generators, the batch) was equal again.
All ranks of a step are looked at together.

Place in the flow: tables -> *origins* -> diff.
"""

from __future__ import annotations

import numpy as np

from bitcheck.answer import STARTS, Cause, Origin
from bitcheck.attribution import attribute_step
from bitcheck.buckets import has_other_buckets, is_of_bucket
from bitcheck.causes import describe_snapshot_difference, describe_step_origins
from bitcheck.entry import find_entering_origins, generators_agree
from bitcheck.events import PHASES, STATE_PHASES, Group, Level, Phase, Site, StepKind
from bitcheck.findings import Findings
from bitcheck.generators import GeneratorReadings
from bitcheck.naming import Naming
from bitcheck.pairing import StepPair
from bitcheck.roles import PROGRAM, is_generator, is_operation
from bitcheck.tables import COLUMN, MAX_OPEN_RANKS, STATE_COLUMNS, StepKey, Tables

LATE_PHASES = (Phase.PARAM, Phase.BUFFER, Phase.EXTRA)
"""State that a run begins to record when it first calls the module that holds it."""
MAX_LOADED_RANKS = 256
"""Of more ranks that differ in one step, those that differ earliest in it are looked into."""
MAX_COUNTED_PAIRS = 256
"""Differing steps (times ranks) beyond the first whose events are counted one by one."""
MAX_STEPS_WITH_ORIGINS = 64
MAX_NOTED_RANKS = 16

_IS_ORDERED = np.array([phase not in (Phase.RNG, Phase.COMM) for phase in PHASES])
_ORDER = np.arange(len(PHASES))


def _is_outside_modules(group: Group | None) -> bool:
    """Whether it is an operation that no module, backward pass or optimizer ran."""
    return is_operation(group) and group is not None and group.path == PROGRAM


class OriginSearch:
    """Looks into the events of the steps whose roots differ."""

    def __init__(self, tables: Tables, naming: Naming) -> None:
        self.tables = tables
        self.naming = naming
        self.uncalled: dict[str, set[str]] = {"baseline": set(), "candidate": set()}
        """Roots of state that the other run alone recorded at some steps."""
        self.num_set_up = 0
        """Events of operations in which a resumed run set itself up, and which the other run therefore lacks."""
        self._pairs = tables.differing
        self._equal_states: set[tuple[int, StepKey]] = set()
        """Ends of steps whose roots differ by nothing that counts."""
        self._readings: dict[tuple[int, bool], GeneratorReadings] = {}

    def find(self) -> Findings | None:
        """Go through the differing steps in order; None where no site is common to both runs."""
        baseline, candidate = self.tables.baseline, self.tables.candidate
        findings = Findings(level=min(baseline.level, candidate.level, key=list(Level).index))
        findings.world_size = max(baseline.world_size, candidate.world_size)
        counted = with_origins = 0
        for key, ranks in self._schedule().items():
            is_later = bool(findings.origins)
            fresh = not is_later or (with_origins < MAX_STEPS_WITH_ORIGINS and self._enters_equal(key, ranks))
            if not fresh and counted >= MAX_COUNTED_PAIRS:
                findings.later_steps.append(key)
                findings.count_is_complete = False
                continue
            loaded = self._load(key, self._worth_loading(key, ranks))
            findings.count_is_complete &= len(loaded) == len(ranks)
            counted += len(loaded)
            if not is_later:
                findings.num_unread_ranks = len(ranks) - len(loaded)
            if not is_later and not self._agreed_before(key, ranks) and not self._has_common_site(loaded):
                return None
            is_entry = is_later and self._is_entry(key, findings)
            if is_entry and loaded:
                findings.generators = generators_agree(next(iter(loaded.values())))
            pairs = {rank: pair for rank, pair in loaded.items() if self._filter(pair, rank, key)}
            for rank, pair in loaded.items():
                if not any(
                    pair.site(position).phase in STATE_PHASES and not is_operation(pair.group(position))
                    for position in pair.parted()
                ):
                    self._equal_states.add((rank, key))
            if not pairs:
                continue
            if fresh:
                origins, propagated = self._describe(key, pairs, findings)
                findings.origins.extend(origins)
                with_origins += bool(origins)
            else:
                origins, propagated = [], sum(len(pair.parted()) for pair in pairs.values())
                if is_entry:
                    origins, shown = find_entering_origins(
                        pairs,
                        {origin.phase for origin in findings.origins},
                        key[0],
                        self.naming,
                        world_size=findings.world_size,
                        is_fresh=findings.origins[0].cause is Cause.INITIAL_STATE,
                    )
                    findings.origins.extend(origins)
                    propagated -= shown
            findings.propagated += propagated
            if is_later and not origins:
                findings.later_steps.append(key)
        return findings

    def _is_entry(self, key: StepKey, findings: Findings) -> bool:
        """Whether it is the first step after initial snapshots that differ."""
        last = findings.origins[-1]
        return last.cause in STARTS and key == (last.step + 1, False)

    def _schedule(self) -> dict[StepKey, list[int]]:
        """Differing steps in order, and the ranks in which each differs."""
        found: dict[StepKey, list[int]] = {}
        for rank, pairs in self._pairs.items():
            rows = pairs.rows
            for index in pairs.differing.tolist():
                key = int(rows.steps[index]), int(rows.kinds[index]) == int(StepKind.FRAGMENT)
                found.setdefault(key, []).append(rank)
        return dict(sorted(found.items()))

    def _worth_loading(self, key: StepKey, ranks: list[int]) -> list[int]:
        """Of very many ranks those that differ earliest in the step: before the reduction, if any does."""
        if len(ranks) <= MAX_LOADED_RANKS:
            return ranks
        earliest = {}
        for rank in ranks:
            pairs = self._pairs[rank]
            columns = pairs.parted[self.tables.index(rank, key)] & _IS_ORDERED
            earliest[rank] = int(_ORDER[columns].min()) if columns.any() else len(PHASES)
        return sorted(sorted(ranks, key=lambda rank: (earliest[rank], rank))[:MAX_LOADED_RANKS])

    def _load(self, key: StepKey, ranks: list[int]) -> dict[int, StepPair]:
        pairs = {}
        for rank in ranks:
            ours, theirs = self.tables.row_of(rank, key)
            baseline = self.tables.baseline.rank(rank).load(ours)
            candidate = self.tables.candidate.rank(rank).load(theirs)
            self.naming.learn(baseline)
            self.naming.learn(candidate)
            pairs[rank] = StepPair(rank, baseline, candidate)
            if len(self._pairs) > MAX_OPEN_RANKS:
                self.tables.close(rank)
        return pairs

    def _agreed_before(self, key: StepKey, ranks: list[int]) -> bool:
        """Whether something was recorded before the first step that differs, and was equal therefore."""
        for rank in ranks:
            earlier = self._pairs[rank].rows.baseline[: self.tables.index(rank, key)]
            if (self.tables.baseline.rank(rank).table["num_events"][earlier] > 0).any():
                return True
        return False

    def _has_common_site(self, pairs: dict[int, StepPair]) -> bool:
        def is_of_program(site: Site) -> bool:
            return site.phase not in (Phase.RNG, Phase.SCALAR)

        return not pairs or any(
            is_of_program(pair.site(position))
            for pair in pairs.values()
            for position in np.flatnonzero((pair.baseline_index >= 0) & (pair.candidate_index >= 0)).tolist()
        )

    def _filter(self, pair: StepPair, rank: int, key: StepKey) -> bool:
        """Take what is no divergence for equal; return whether anything else differs."""
        index = self.tables.index(rank, key)
        rows = self._pairs[rank].rows
        is_initial = int(rows.kinds[index]) == int(StepKind.INITIAL)
        previous = self._previous(rank, key)
        is_restart = (
            previous is not None
            and int(rows.kinds[previous]) == int(StepKind.INITIAL)
            and bool(self._resumed(rank, previous))
        )
        roots = [
            {site.root for site in step.sites if site.phase in LATE_PHASES} for step in (pair.baseline, pair.candidate)
        ]

        has_other = is_restart or has_other_buckets(pair)

        def is_no_divergence(site: Site, position: int) -> bool:
            if has_other and is_of_bucket(site):  # the gradients before and after tell what came of it
                return True
            operation = is_operation(pair.group(position))
            if is_initial and (operation or site.phase not in STATE_PHASES):
                return True
            if site.phase not in self.tables.phases:
                return True
            missing = pair.is_missing(position)
            if missing and is_restart and _is_outside_modules(pair.group(position)):
                self.num_set_up += 1
                return True
            if missing and self.tables.levels_differ:
                return True
            if missing and site.phase in LATE_PHASES:
                lacking = 1 if pair.baseline_index[position] >= 0 else 0
                if site.root not in roots[lacking]:
                    self.uncalled["candidate" if lacking else "baseline"].add(site.root)
                    return True
            if is_generator(site):  # what one operation drew from is in use by nature
                return missing or not self._is_in_use(rank, site, index)
            return False

        pair.ignore(is_no_divergence)
        return any(pair.site(position).phase is not Phase.RNG for position in pair.parted())

    def _is_in_use(self, rank: int, generator: Site, near: int) -> bool:
        rows = self._pairs[rank].rows
        for run, mine, is_candidate in (
            (self.tables.baseline, rows.baseline, False),
            (self.tables.candidate, rows.candidate, True),
        ):
            readings = self._readings.get((rank, is_candidate))
            if readings is None:
                readings = self._readings[rank, is_candidate] = GeneratorReadings(run, rank, mine)
            if readings.is_in_use(generator, int(mine[near])):
                return True
        return False

    def _previous(self, rank: int, key: StepKey) -> int | None:
        """The row pair whose end state enters the step, None where it was not recorded."""
        index = self.tables.index(rank, key)
        rows = self._pairs[rank].rows
        return index - 1 if index and int(rows.steps[index - 1]) == key[0] - 1 else None

    def _enters_equal(self, key: StepKey, ranks: list[int]) -> bool:
        """Whether everything visible that enters a later step is equal on every rank: state, generators, batch."""
        for rank in (*ranks, *(self._pairs.keys() - set(ranks))):
            pairs = self._pairs[rank]
            index = pairs.place(key)
            if index is None:
                continue
            previous = self._previous(rank, key)
            if previous is None or pairs.parted[index, COLUMN[Phase.BATCH]]:
                return False
            place = int(pairs.rows.steps[previous]), False
            if pairs.parted[previous, STATE_COLUMNS].any() and (rank, place) not in self._equal_states:
                return False
        for rank in ranks:
            pairs = self._pairs[rank]
            if pairs.parted[self.tables.index(rank, key), COLUMN[Phase.RNG]]:
                pair = self._load(key, [rank])[rank]
                self._filter(pair, rank, key)
                if any(pair.site(position).phase is Phase.RNG for position in pair.parted()):
                    return False
        return True

    def _describe(self, key: StepKey, pairs: dict[int, StepPair], findings: Findings) -> tuple[list[Origin], int]:
        """Return the origins of a step and how many other events differ in it."""
        step = key[0]
        rank = next(iter(pairs))
        index = self.tables.index(rank, key)
        rows = self._pairs[rank].rows
        if int(rows.kinds[index]) == int(StepKind.INITIAL):
            findings.resumed = self._resumed(rank, index)
            is_fresh = not findings.resumed and max(step, step - self.tables.alignment.offset) < 0
            cause = Cause.INITIAL_STATE if is_fresh else Cause.RESTORE
            return describe_snapshot_difference(pairs, step, cause, self.naming), 0
        attribution = attribute_step(pairs)
        gap = self._gap(rank, key)
        origins = describe_step_origins(
            attribution.blames, pairs, step, self.naming, world_size=findings.world_size, has_gap=gap is not None
        )
        if not findings.origins:
            findings.observe(pairs, attribution, gap, self.naming)
        return origins, attribution.propagated

    def _resumed(self, rank: int, index: int) -> str:
        """Which of the runs begins with this snapshot, in words."""
        rows = self._pairs[rank].rows
        begins = [
            int(run.rank(rank).table["kind"][row]) == int(StepKind.INITIAL)
            for run, row in (
                (self.tables.baseline, rows.baseline[index]),
                (self.tables.candidate, rows.candidate[index]),
            )
        ]
        return "" if all(begins) else "candidate" if begins[1] else "baseline"

    def _gap(self, rank: int, key: StepKey) -> tuple[int, int] | None:
        """The steps before this one that were not recorded, so that what entered it is unknown."""
        if self._previous(rank, key) is not None:
            return None
        index = self.tables.index(rank, key)
        rows = self._pairs[rank].rows
        before = int(rows.steps[index - 1]) + 1 if index else None
        if before is None:
            first = 0
            return (first, key[0] - 1) if key[0] > 0 else None
        return before, key[0] - 1

    def generators_in_use(self) -> dict[str, tuple[int, list[int]]]:
        """Return which generators differ although they are drawn from: name -> (first step, ranks)."""
        found: dict[str, tuple[int, list[int]]] = {}
        for rank, pairs in list(self._pairs.items())[:MAX_NOTED_RANKS]:
            for index in pairs.generators.tolist()[:1]:
                rows = pairs.rows
                key = int(rows.steps[index]), int(rows.kinds[index]) == int(StepKind.FRAGMENT)
                pair = self._load(key, [rank])[rank]
                for position in pair.parted():
                    site = pair.site(position)
                    if is_generator(site) and not pair.is_missing(position) and self._is_in_use(rank, site, index):
                        found.setdefault(site.path, (key[0], []))[1].append(rank)
        return dict(sorted(found.items()))
