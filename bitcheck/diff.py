"""Compare two runs: roots first, events only where roots differ, and then which of them is the origin.

    answer = diff_runs(baseline, candidate)
    answer.verdict, answer.first.site, answer.cause
    ('diverged', 'forward/blocks.2.mix:out', 'forward')

Steps are gone through in order, all ranks of a step together. The first step in which anything
differs holds the origins; a later step holds further ones only if everything visible that entered
it (the state before it, the generators, the batch) was equal again.

Place in the flow: align -> *diff* -> report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bitcheck.align import FINISHED, Alignment, RowPairs, align_runs, pair_rows
from bitcheck.answer import Aligned, Answer, Cause, Compared, EnvironmentDifference, Origin, RunFacts, Verdict
from bitcheck.attribution import attribute_step, is_generator, is_operation
from bitcheck.causes import describe_snapshot_difference, describe_step_origins
from bitcheck.events import PHASES, STATE_PHASES, Level, Phase, Site, StepKind
from bitcheck.explain import Findings, explain, recommend
from bitcheck.generators import RNG_COLUMN, GeneratorReadings
from bitcheck.naming import Naming
from bitcheck.pairing import StepPair
from bitcheck.recompute import inconsistent_recomputes
from bitcheck.views import RankView, RunView, StepView

Progress = Callable[[int, int], None]
"""Called with (ranks done, ranks in all)."""

STATE_LEVEL_PHASES = frozenset(Phase) - {Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.COMM}
LATE_PHASES = (Phase.PARAM, Phase.BUFFER, Phase.EXTRA)
"""State that a run begins to record when it first calls the module that holds it."""
MAX_LOADED_RANKS = 256
"""Of more ranks that differ in one step, those that differ earliest in it are looked into."""
MAX_COUNTED_PAIRS = 256
"""Differing steps (times ranks) beyond the first whose events are counted one by one."""
MAX_STEPS_WITH_ORIGINS = 64
MAX_RECOMPUTE_RANKS = 8
MAX_RECOMPUTE_CHECKS = 256
"""Steps of each run, over these ranks, whose recompute is held against their forward."""
MAX_NOTED_RANKS = 16
MAX_COVERAGE_STEPS = 64

_COLUMN = {phase: number for number, phase in enumerate(PHASES)}
_STATE_COLUMNS = np.array([_COLUMN[phase] for phase in STATE_PHASES])
_IS_STATE = np.array([phase in STATE_PHASES for phase in PHASES])
_IS_ORDERED = np.array([phase not in (Phase.RNG, Phase.COMM) for phase in PHASES])
_ORDER = np.arange(len(PHASES))


def diff_runs(
    baseline: RunView, candidate: RunView, *, until: int | None = None, progress: Progress | None = None
) -> Answer:
    """Say whether two runs are bitwise identical and, where not, where and why they part.

    `until` is the last step to compare, numbered as in the baseline. Reads the table of every rank,
    and the events of those steps alone in which something differs. Raises RunError where a run turns
    out to be damaged.
    """
    return _Comparison(baseline, candidate, until, progress).answer()


StepKey = tuple[int, bool]
"""(step number of the baseline, whether it is the fragment after the last step)."""


@dataclass
class _RankPairs:
    """The row pairs of a rank in which anything differs."""

    rows: RowPairs
    parted: npt.NDArray[np.bool_]
    """[rows, 13]: the root of this phase differs."""
    differing: npt.NDArray[np.int64]
    """Indices in `rows` where something beside the generators differs."""
    generators: npt.NDArray[np.int64]
    """Indices in `rows` where generator states differ."""

    @cached_property
    def places(self) -> dict[StepKey, int]:
        """Where in `rows` a step is."""
        fragment = int(StepKind.FRAGMENT)
        pairs = zip(self.rows.steps.tolist(), self.rows.kinds.tolist(), strict=True)
        return {(step, kind == fragment): index for index, (step, kind) in enumerate(pairs)}


@dataclass(slots=True)
class _Totals:
    """What was compared, over all ranks."""

    steps: int = 0
    ranks: int = 0
    events: int = 0
    bytes: int = 0
    first_step: int | None = None
    last_step: int | None = None
    num_pairs: int = 0
    ended_early: dict[str, list[int]] = field(default_factory=dict)
    """`baseline` or `candidate` -> ranks that it has fewer steps of, unfinished."""
    recompute: list[int] = field(default_factory=list)
    """Ranks with activation recompute."""


class _Comparison:
    def __init__(self, baseline: RunView, candidate: RunView, until: int | None, progress: Progress | None) -> None:
        self.baseline = baseline
        self.candidate = candidate
        self.until = until
        self.progress = progress
        self.alignment = Alignment(0, "step")
        self.ranks: list[int] = []
        self.notes: list[str] = []
        self.totals = _Totals()
        self.pairs: dict[int, _RankPairs] = {}
        self.levels_differ = baseline.level != candidate.level
        self.phases = (
            STATE_LEVEL_PHASES
            if Level.STATE in (baseline.level, candidate.level) and self.levels_differ
            else set(Phase)
        )
        self.columns = np.array([_COLUMN[phase] for phase in PHASES if phase in self.phases and phase is not Phase.RNG])
        self.uncalled: dict[str, set[str]] = {"baseline": set(), "candidate": set()}
        self.equal_states: set[tuple[int, StepKey]] = set()
        """Ends of steps whose roots differ by nothing that counts."""
        self.readings: dict[tuple[int, bool], GeneratorReadings] = {}
        self.naming = Naming()

    # ------------------------------------------------------------------ the whole

    def answer(self) -> Answer:
        """Return the answer; see `diff_runs`."""
        if trouble := self._find_obstacle():
            return self._incomparable(trouble)
        self.alignment = align_runs(self.baseline, self.candidate)
        self._scan_tables()
        if not self.totals.num_pairs:
            return self._incomparable(self._no_step_in_common())
        findings = self._find_origins()
        if findings is None:
            return self._incomparable(
                "The runs have no recorded tensor in common: no site of one is a site of the other.\n"
                "Compare two runs of the same program."
            )
        if not self.totals.steps and not findings.origins and not self.totals.ended_early:
            return self._incomparable(self._no_step_in_common())
        self._note_levels_and_ranks()
        findings.alignment_remarks = self.alignment.remarks
        findings.environment = self._environment()
        findings.recomputes = self._check_recomputes()
        findings.aligned_by = self.alignment.by
        findings.ended_early = {name: ranks for name, ranks in self.totals.ended_early.items() if not findings.origins}
        findings.steps, findings.ranks = self.totals.steps, self.totals.ranks
        findings.first_step, findings.last_step = self.totals.first_step, self.totals.last_step
        findings.statuses = (self._status(self.baseline), self._status(self.candidate))
        diverged = bool(findings.origins or findings.ended_early)
        if not diverged:
            self._note_generators()
        else:
            self.notes.extend(
                f"The {name} did not finish ({status}); its finished steps were compared."
                for name, status in zip(("baseline", "candidate"), findings.statuses, strict=True)
                if status != FINISHED and findings.origins
            )
        cause = findings.origins[0].cause if findings.origins else Cause.ENDED_EARLY if diverged else None
        findings.cause = cause
        self._note_uncalled()
        findings.unobserved = self._coverage()
        findings.notes = self.notes
        return Answer(
            verdict=Verdict.DIVERGED if diverged else Verdict.IDENTICAL,
            runs=self._facts(),
            aligned=Aligned(self.totals.first_step, self.totals.last_step, self.alignment.by),
            compared=self._compared(),
            environment=findings.environment,
            first=findings.origins[0] if findings.origins else None,
            cause=cause,
            origins=tuple(findings.origins),
            propagated=findings.propagated,
            explanation=explain(findings),
            remedy=recommend(findings),
            notes=tuple(dict.fromkeys((*self.alignment.remarks, *self.notes))),
            unobserved=findings.unobserved,
        )

    def _find_obstacle(self) -> str | None:
        versions = [run.info.get("digest_version", 1) for run in (self.baseline, self.candidate)]
        if versions[0] != versions[1]:
            return (
                f"The runs hold digests of versions {versions[0]} and {versions[1]}, which cannot be compared.\n"
                "Record both with the same version of bitcheck."
            )
        present = set(self.candidate.ranks)
        self.ranks = [rank for rank in self.baseline.ranks if rank in present]
        if not self.ranks:
            return "The runs have no rank in common.\nCompare runs of the same job."
        return None

    def _no_step_in_common(self) -> str:
        spans = []
        for name, facts in zip(("baseline", "candidate"), self._facts(), strict=True):
            span = "no step" if facts.first_step is None else f"steps {facts.first_step} to {facts.last_step}"
            spans.append(f"the {name} has {span}")
        limit = "" if self.until is None else f" up to step {self.until}"
        return (
            f"The runs have no training step in common{limit}: {spans[0]}, {spans[1]}.\n"
            "Record runs that overlap; give a resumed run its number with --start-step."
        )

    def _incomparable(self, why: str) -> Answer:
        explanation, _, remedy = why.partition("\n")
        return Answer(
            verdict=Verdict.INCOMPARABLE,
            runs=self._facts(),
            aligned=Aligned(None, None, self.alignment.by),
            compared=Compared(0, 0, 0, 0),
            environment=self._environment(),
            first=None,
            cause=None,
            origins=(),
            propagated=0,
            explanation=explanation,
            remedy=remedy,
            notes=self.alignment.remarks,
        )

    # ------------------------------------------------------------------ tables: roots only

    def _scan_tables(self) -> None:
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
            if self.progress is not None:
                self.progress(done + 1, len(self.ranks))

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
        self._count(rows, ours.table, rank)
        self._find_early_end(ours, theirs, rank)
        found = self._compare_roots(rows, ours.table, theirs.table)
        if found is not None:
            self.pairs[rank] = found
        if found is None or len(self.pairs) > MAX_LOADED_RANKS:
            self._close(rank)

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

    def _close(self, rank: int) -> None:
        """Close a rank's files: thousands of them are not held open."""
        self.baseline.close_rank(rank)
        self.candidate.close_rank(rank)

    def _count(self, rows: RowPairs, table: npt.NDArray[Any], rank: int) -> None:
        totals = self.totals
        steps = rows.steps[rows.kinds == int(StepKind.STEP)]
        totals.num_pairs += len(rows)
        totals.ranks += bool(len(rows))
        totals.steps = max(totals.steps, len(steps))
        totals.events += int(table["num_events"][rows.baseline].sum())
        totals.bytes += int(table["num_bytes"][rows.baseline].sum())
        if len(steps):
            first, last = int(steps[0]), int(steps[-1])
            totals.first_step = first if totals.first_step is None else min(first, totals.first_step)
            totals.last_step = last if totals.last_step is None else max(last, totals.last_step)
        column = _COLUMN[Phase.RECOMPUTE]
        roots = table["phase_roots"][rows.baseline, column]
        if len(roots) > 1 and (roots != roots[0]).any():
            totals.recompute.append(rank)

    def _find_early_end(self, ours: RankView, theirs: RankView, rank: int) -> None:
        last = [
            _last_step(ours.table, 0, self.until),
            _last_step(theirs.table, self.alignment.offset, self.until),
        ]
        for name, reader, mine, other in (
            ("baseline", ours, last[0], last[1]),
            ("candidate", theirs, last[1], last[0]),
        ):
            if mine < other and reader.status != FINISHED:
                self.totals.ended_early.setdefault(name, []).append(rank)

    def _compare_roots(self, rows: RowPairs, ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> _RankPairs | None:
        """Return where the rows' roots differ, None where nowhere."""
        whole = len(rows) == len(ours) == len(theirs)
        if whole and len(rows) and (ours["chain"][-1] == theirs["chain"][-1]).all():
            return None
        parted = (ours["phase_roots"][rows.baseline] != theirs["phase_roots"][rows.candidate]).any(axis=2)
        is_initial = rows.kinds == int(StepKind.INITIAL)
        parted[is_initial] &= _IS_STATE
        differs = parted[:, self.columns].any(axis=1)
        generators = ~is_initial & parted[:, RNG_COLUMN]
        if not differs.any() and not generators.any():
            return None
        return _RankPairs(rows, parted, np.flatnonzero(differs), np.flatnonzero(generators))

    # ------------------------------------------------------------------ events

    def _find_origins(self) -> Findings | None:
        """Go through the differing steps in order; None where no site is common to both runs."""
        findings = Findings(level=min(self.baseline.level, self.candidate.level, key=list(Level).index))
        findings.world_size = max(self.baseline.world_size, self.candidate.world_size)
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
            if not is_later and not self._has_common_site(loaded):
                return None
            pairs = {rank: pair for rank, pair in loaded.items() if self._filter(pair, rank, key)}
            for rank, pair in loaded.items():
                if not any(
                    pair.site(position).phase in STATE_PHASES and not is_operation(pair.group(position))
                    for position in pair.parted()
                ):
                    self.equal_states.add((rank, key))
            if not pairs:
                continue
            if fresh:
                origins, propagated = self._describe(key, pairs, findings)
                findings.origins.extend(origins)
                with_origins += bool(origins)
            else:
                origins, propagated = [], sum(len(pair.parted()) for pair in pairs.values())
            findings.propagated += propagated
            if is_later and not origins:
                findings.later_steps.append(key)
        return findings

    def _schedule(self) -> dict[StepKey, list[int]]:
        """Differing steps in order, and the ranks in which each differs."""
        found: dict[StepKey, list[int]] = {}
        for rank, pairs in self.pairs.items():
            rows = pairs.rows
            for index in pairs.differing.tolist():
                key = int(rows.steps[index]), int(rows.kinds[index]) == int(StepKind.FRAGMENT)
                found.setdefault(key, []).append(rank)
        return dict(sorted(found.items()))

    def _index(self, rank: int, key: StepKey) -> int:
        return self.pairs[rank].places[key]

    def _worth_loading(self, key: StepKey, ranks: list[int]) -> list[int]:
        """Of very many ranks those that differ earliest in the step: before the reduction, if any does."""
        if len(ranks) <= MAX_LOADED_RANKS:
            return ranks
        earliest = {}
        for rank in ranks:
            pairs = self.pairs[rank]
            columns = pairs.parted[self._index(rank, key)] & _IS_ORDERED
            earliest[rank] = int(_ORDER[columns].min()) if columns.any() else len(PHASES)
        return sorted(sorted(ranks, key=lambda rank: (earliest[rank], rank))[:MAX_LOADED_RANKS])

    def _load(self, key: StepKey, ranks: list[int]) -> dict[int, StepPair]:
        pairs = {}
        for rank in ranks:
            index = self._index(rank, key)
            assert index is not None
            rows = self.pairs[rank].rows
            baseline = self.baseline.rank(rank).load(int(rows.baseline[index]))
            candidate = self.candidate.rank(rank).load(int(rows.candidate[index]))
            self.naming.learn(baseline)
            self.naming.learn(candidate)
            pairs[rank] = StepPair(rank, baseline, candidate)
            if len(self.pairs) > MAX_LOADED_RANKS:
                self._close(rank)
        return pairs

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
        index = self._index(rank, key)
        rows = self.pairs[rank].rows
        is_initial = int(rows.kinds[index]) == int(StepKind.INITIAL)
        roots = [
            {site.root for site in step.sites if site.phase in LATE_PHASES} for step in (pair.baseline, pair.candidate)
        ]

        def is_no_divergence(site: Site, position: int) -> bool:
            operation = is_operation(pair.group(position))
            if is_initial and (operation or site.phase not in STATE_PHASES):
                return True
            if site.phase not in self.phases:
                return True
            missing = pair.is_missing(position)
            if missing and self.levels_differ:
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
        rows = self.pairs[rank].rows
        for run, mine, is_candidate in (
            (self.baseline, rows.baseline, False),
            (self.candidate, rows.candidate, True),
        ):
            readings = self.readings.get((rank, is_candidate))
            if readings is None:
                readings = self.readings[rank, is_candidate] = GeneratorReadings(run, rank, mine)
            if readings.is_in_use(generator, int(mine[near])):
                return True
        return False

    def _previous(self, rank: int, key: StepKey) -> int | None:
        """The row pair whose end state enters the step, None where it was not recorded."""
        index = self._index(rank, key)
        rows = self.pairs[rank].rows
        return index - 1 if index and int(rows.steps[index - 1]) == key[0] - 1 else None

    def _enters_equal(self, key: StepKey, ranks: list[int]) -> bool:
        """Whether everything visible that enters a later step is equal on every rank: state, generators, batch."""
        for rank in (*ranks, *(self.pairs.keys() - set(ranks))):
            pairs = self.pairs[rank]
            if key not in pairs.places:
                continue
            index, previous = pairs.places[key], self._previous(rank, key)
            if previous is None or pairs.parted[index, _COLUMN[Phase.BATCH]]:
                return False
            place = int(pairs.rows.steps[previous]), False
            if pairs.parted[previous, _STATE_COLUMNS].any() and (rank, place) not in self.equal_states:
                return False
        for rank in ranks:
            pairs = self.pairs[rank]
            if pairs.parted[pairs.places[key], RNG_COLUMN]:
                pair = self._load(key, [rank])[rank]
                self._filter(pair, rank, key)
                if any(pair.site(position).phase is Phase.RNG for position in pair.parted()):
                    return False
        return True

    def _describe(self, key: StepKey, pairs: dict[int, StepPair], findings: Findings) -> tuple[list[Origin], int]:
        """Return the origins of a step and how many other events differ in it."""
        step = key[0]
        rank = next(iter(pairs))
        index = self._index(rank, key)
        rows = self.pairs[rank].rows
        if int(rows.kinds[index]) == int(StepKind.INITIAL):
            findings.resumed = self._resumed(rank, index)
            is_fresh = not findings.resumed and max(step, step - self.alignment.offset) < 0
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
        rows = self.pairs[rank].rows
        begins = [
            int(run.rank(rank).table["kind"][row]) == int(StepKind.INITIAL)
            for run, row in ((self.baseline, rows.baseline[index]), (self.candidate, rows.candidate[index]))
        ]
        return "" if all(begins) else "candidate" if begins[1] else "baseline"

    def _gap(self, rank: int, key: StepKey) -> tuple[int, int] | None:
        """The steps before this one that were not recorded, so that what entered it is unknown."""
        if self._previous(rank, key) is not None:
            return None
        index = self._index(rank, key)
        rows = self.pairs[rank].rows
        before = int(rows.steps[index - 1]) + 1 if index else None
        if before is None:
            first = 0
            return (first, key[0] - 1) if key[0] > 0 else None
        return before, key[0] - 1

    # ------------------------------------------------------------------ what else there is to say

    def _note_levels_and_ranks(self) -> None:
        ours, theirs = self.baseline, self.candidate
        if self.levels_differ:
            self.notes.append(
                f"The runs were recorded at levels {ours.level} and {theirs.level}; what both hold was compared."
            )
        if ours.world_size != theirs.world_size:
            self.notes.append(
                f"The runs have {ours.world_size} and {theirs.world_size} ranks; "
                f"the {len(self.ranks)} in common were compared."
            )

    def _note_uncalled(self) -> None:
        for name, roots in self.uncalled.items():
            other = "candidate" if name == "baseline" else "baseline"
            self.notes.extend(
                f"{root or 'A tracked state'} is recorded in the {other} alone at some steps: the {name} had not "
                "called it yet, and a module is recorded from its first call on."
                for root in sorted(roots)
            )

    def _note_generators(self) -> None:
        """Say of an identical verdict which generators differ although they are drawn from."""
        noted: dict[str, tuple[int, list[int]]] = {}
        for rank, pairs in list(self.pairs.items())[:MAX_NOTED_RANKS]:
            for index in pairs.generators.tolist()[:1]:
                rows = pairs.rows
                key = int(rows.steps[index]), int(rows.kinds[index]) == int(StepKind.FRAGMENT)
                pair = self._load(key, [rank])[rank]
                for position in pair.parted():
                    site = pair.site(position)
                    if site.phase is Phase.RNG and not pair.is_missing(position) and self._is_in_use(rank, site, index):
                        noted.setdefault(site.path, (key[0], []))[1].append(rank)
        for generator, (step, ranks) in sorted(noted.items()):
            where = f" on rank {ranks[0]}" if self.totals.ranks > 1 else ""
            self.notes.append(
                f"The generator {generator} is drawn from and its state differs{where} from step {step} on, while "
                "every tensor agrees: what it gave went into nothing that was recorded. Seed it all the same."
            )

    def _check_recomputes(self) -> dict[str, list[str]]:
        """Modules whose recompute differs from their forward within a run -> names of those runs."""
        found: dict[str, list[str]] = {}
        ranks = self.totals.recompute[:MAX_RECOMPUTE_RANKS]
        for name, run in (("baseline", self.baseline), ("candidate", self.candidate)):
            for rank in ranks:
                reader = run.rank(rank)
                rows = np.flatnonzero(reader.table["kind"] == int(StepKind.STEP))
                for row in rows[: MAX_RECOMPUTE_CHECKS // len(ranks)].tolist():
                    step = reader.load(row)
                    self.naming.learn(step)
                    for root, path in inconsistent_recomputes(step):
                        module = self.naming.module(root, path)
                        if name not in found.setdefault(module, []):
                            found[module].append(name)
                if rank not in self.pairs:
                    run.close_rank(rank)
        return found

    def _coverage(self) -> dict[str, int]:
        """What escaped observation: a sentence -> how many times, in the run with more of it.

        Beyond MAX_COVERAGE_STEPS steps of a run with something unobserved, the rest is counted only.
        """
        counts = []
        for run, tails in zip((self.baseline, self.candidate), self.tails, strict=True):
            totals = dict(zip(self.ranks, tails["total_unobserved"].tolist(), strict=True))
            count: Counter[str] = Counter()
            budget = MAX_COVERAGE_STEPS
            for rank in [rank for rank in self.ranks if totals[rank]]:
                if budget <= 0:
                    break
                table = run.rank(rank).table
                rows = np.flatnonzero(np.diff(table["total_unobserved"].astype(np.int64), prepend=0))[:budget]
                for row in rows.tolist():
                    count.update(dict(run.rank(rank).load(row).unobserved))
                budget -= len(rows)
                if rank not in self.pairs:
                    run.close_rank(rank)
            rest = sum(totals[rank] for rank in self.ranks) - count.total()
            if rest > 0:
                count["others, in steps that were not looked into one by one"] = rest
            counts.append(count)
        return dict(sorted((counts[0] | counts[1]).items()))

    def _environment(self) -> tuple[EnvironmentDifference, ...]:
        ours, theirs = self.baseline.environment, self.candidate.environment
        return tuple(
            EnvironmentDifference(key, ours.get(key), theirs.get(key))
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key)
        )

    def _compared(self) -> Compared:
        totals = self.totals
        return Compared(totals.steps, totals.ranks, totals.events, totals.bytes)

    def _status(self, run: RunView) -> str:
        return str(run.status)

    def _facts(self) -> tuple[RunFacts, RunFacts]:
        return _facts(self.baseline), _facts(self.candidate)


def _facts(run: RunView) -> RunFacts:
    first = last = None
    if run.ranks:
        table = run.rank(run.ranks[0]).table
        steps = table["step"][table["kind"] == int(StepKind.STEP)]
        if len(steps):
            first, last = int(steps.min()), int(steps.max())
    return RunFacts(str(run.path), run.run_id, first, last, run.world_size, str(run.level), str(run.status))


def _last_step(table: npt.NDArray[Any], offset: int, until: int | None) -> int:
    """Return the last whole step in the baseline's numbers, at most `until`; one before the first where none."""
    steps = table["step"][table["kind"] == int(StepKind.STEP)]
    initial = table["step"][table["kind"] == int(StepKind.INITIAL)]
    last = int(steps.max()) if len(steps) else int(initial[0]) if len(initial) else -1
    last += offset
    return last if until is None else min(last, until)


__all__ = ["StepView", "diff_runs"]
