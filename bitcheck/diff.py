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

import numpy as np

from bitcheck.align import FINISHED, Alignment, align_runs
from bitcheck.answer import Aligned, Answer, Cause, Compared, EnvironmentDifference, RunFacts, Verdict
from bitcheck.events import StepKind
from bitcheck.explain import explain, recommend, word_endings
from bitcheck.findings import Findings
from bitcheck.naming import Naming
from bitcheck.origins import OriginSearch
from bitcheck.recompute import inconsistent_recomputes
from bitcheck.run_document import STOPPED, note_unrecorded, unrecorded_processes
from bitcheck.tables import Progress, Tables
from bitcheck.views import RunView

MAX_RECOMPUTE_RANKS = 8
MAX_RECOMPUTE_CHECKS = 256
"""Steps of each run, over these ranks, whose recompute is held against their forward."""
MAX_COVERAGE_STEPS = 64

NOTHING_IN_COMMON = (
    "The runs have no recorded tensor in common: no site of one is a site of the other.\n"
    "Compare two runs of the same program."
)


def diff_runs(
    baseline: RunView, candidate: RunView, *, until: int | None = None, progress: Progress | None = None
) -> Answer:
    """Say whether two runs are bitwise identical and, where not, where and why they part.

    `until` is the last step to compare, numbered as in the baseline. Reads the table of every rank,
    and the events of those steps alone in which something differs. Raises RunError where a run turns
    out to be damaged.
    """
    return _Comparison(baseline, candidate, until, progress).answer()


class _Comparison:
    def __init__(self, baseline: RunView, candidate: RunView, until: int | None, progress: Progress | None) -> None:
        self.baseline = baseline
        self.candidate = candidate
        self.until = until
        self.progress = progress
        self.alignment = Alignment(0, "step")
        self.naming = Naming()

    def answer(self) -> Answer:
        """Return the answer; see `diff_runs`."""
        if obstacle := self._find_obstacle():
            return self._incomparable(obstacle)
        self.alignment = align_runs(self.baseline, self.candidate)
        self.tables = Tables(self.baseline, self.candidate, self.alignment, self.until)
        self.tables.scan(self.progress)
        totals = self.tables.totals
        if not totals.num_pairs:
            return self._incomparable(self._no_step_in_common())
        search = OriginSearch(self.tables, self.naming)
        findings = search.find()
        if findings is None:
            return self._incomparable(NOTHING_IN_COMMON)
        if not totals.steps and not findings.origins:
            return self._incomparable(self._no_step_in_common())
        self._complete(findings)
        return Answer(
            verdict=Verdict.IDENTICAL if findings.cause is None else Verdict.DIVERGED,
            runs=self._facts(),
            aligned=Aligned(totals.first_step, totals.last_step, self.alignment.by),
            compared=Compared(totals.steps, totals.ranks, totals.events, totals.bytes),
            environment=self._environment(),
            first=findings.origins[0] if findings.origins else None,
            cause=findings.cause,
            origins=tuple(findings.origins),
            propagated=findings.propagated,
            explanation=explain(findings),
            remedy=recommend(findings),
            notes=(*self.alignment.remarks, *self._notes(findings, search)),
            unobserved=dict(findings.unobserved),
        )

    def _complete(self, findings: Findings) -> None:
        """Add to what the events say what the runs as wholes say."""
        totals = self.tables.totals
        findings.ended_early = {} if findings.origins else totals.ended_early
        findings.endings = totals.endings
        if findings.origins:
            findings.cause = findings.origins[0].cause
        elif findings.ended_early:
            findings.cause = Cause.ENDED_EARLY
        findings.steps, findings.ranks = totals.steps, totals.ranks
        findings.last_step = totals.last_step
        ours, theirs = self._facts()
        if ours.first_step is not None and theirs.first_step is not None:
            starts = ours.first_step, theirs.first_step + self.alignment.offset
            findings.restart_step = max(starts) if starts[0] != starts[1] else None
        findings.world_sizes = ours.world_size, theirs.world_size
        findings.statuses = (str(self.baseline.status), str(self.candidate.status))
        findings.alignment = self.alignment
        findings.environment = self._environment()
        findings.recomputes = self._check_recomputes()
        findings.unobserved = self._count_unobserved()
        findings.unrecorded = ours.unrecorded, theirs.unrecorded

    def _find_obstacle(self) -> str | None:
        versions = [run.info.get("digest_version", 1) for run in (self.baseline, self.candidate)]
        if versions[0] != versions[1]:
            return (
                f"The runs hold digests of versions {versions[0]} and {versions[1]}, which cannot be compared.\n"
                "Record both with the same version of bitcheck."
            )
        if not set(self.baseline.ranks) & set(self.candidate.ranks):
            return "The runs have no rank in common.\nCompare runs of the same job."
        return None

    def _no_step_in_common(self) -> str:
        spans = []
        for name, facts in zip(("baseline", "candidate"), self._facts(), strict=True):
            span = "no step" if facts.first_step is None else f"steps {facts.first_step} to {facts.last_step}"
            spans.append(f"the {name} has {span}")
        limit = "" if self.until is None else f" up to step {self.until}"
        ended = [
            f"the {name} is {run.status}"
            for name, run in (("baseline", self.baseline), ("candidate", self.candidate))
            if str(run.status) not in (FINISHED, STOPPED)
        ]
        if ended:
            return (
                f"The runs have no whole training step in common{limit}: {spans[0]}, {spans[1]}; "
                f"{' and '.join(ended)}.\n"
                "See what was printed when the run was recorded: its program or its recording ended too early. Then "
                "record it again."
            )
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
            notes=(*self.alignment.remarks, *self._notes_of_runs()),
        )

    def _notes(self, findings: Findings, search: OriginSearch) -> list[str]:
        """What else a reader should know, a sentence each."""
        ours, theirs = self.baseline, self.candidate
        notes = self._notes_of_runs()
        if self.tables.levels_differ:
            notes.append(
                f"The runs were recorded at levels {ours.level} and {theirs.level}; what both hold was compared."
            )
        if ours.world_size != theirs.world_size:
            notes.append(
                f"The runs have {ours.world_size} and {theirs.world_size} ranks; "
                f"the {len(self.tables.ranks)} in common were compared."
            )
        for name, status in zip(("baseline", "candidate"), findings.statuses, strict=True):
            if name in findings.ended_early:
                continue  # that is the verdict
            if status not in (FINISHED, STOPPED):
                notes.append(f"The {name} did not finish ({status}); its finished steps were compared.")
            if findings.ranks > 1 and name in findings.endings:
                notes.append(
                    f"Of the {name}'s ranks some have fewer steps than in the other run, the earliest first: "
                    f"{word_endings(findings.endings[name])}."
                )
        if findings.cause is None:
            for generator, (step, ranks) in search.generators_in_use().items():
                where = f" on rank {ranks[0]}" if findings.ranks > 1 else ""
                notes.append(
                    f"The generator {generator} is drawn from and its state differs{where} from step {step} on, while "
                    "every tensor agrees: what it gave went into nothing that was recorded. Seed it all the same."
                )
        if search.num_set_up:
            notes.append(
                f"{search.num_set_up:,} events of operations outside modules are in one run alone in the first step "
                "after the restart: there a resumed run sets itself up. They were not compared."
            )
        for name, roots in search.uncalled.items():
            other = "candidate" if name == "baseline" else "baseline"
            notes.extend(
                f"The state of {root or 'what is tracked'} is in the {other} alone at some steps, and was not compared "
                f"there: the {name} had not called it yet, or had let go of it."
                for root in sorted(roots)
            )
        return notes

    def _notes_of_runs(self) -> list[str]:
        """What the runs themselves say of what went unrecorded, but for the processes, which their facts count."""
        found: dict[str, list[str]] = {}
        for name, run in (("baseline", self.baseline), ("candidate", self.candidate)):
            counted_ones = {note_unrecorded(*entry) for entry in unrecorded_processes(run.info).items()}
            for note in dict.fromkeys(run.info.get("notes") or ()):
                if note not in counted_ones:
                    found.setdefault(note, []).append(name)
        return [f"{' and '.join(names)}: {note}" for note, names in found.items()]

    def _check_recomputes(self) -> dict[str, list[str]]:
        """Modules whose recompute differs from their forward within a run -> names of those runs."""
        found: dict[str, list[str]] = {}
        ranks = self.tables.totals.recompute[:MAX_RECOMPUTE_RANKS]
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
                if rank not in self.tables.differing:
                    run.close_rank(rank)
        return found

    def _count_unobserved(self) -> dict[str, int]:
        """What escaped observation: a sentence -> how many times, in the run with more of it.

        Beyond MAX_COVERAGE_STEPS steps of a run with something unobserved, the rest is counted only.
        """
        counts = []
        for run, tails in zip((self.baseline, self.candidate), self.tables.tails, strict=True):
            totals = dict(zip(self.tables.ranks, tails["total_unobserved"].tolist(), strict=True))
            count: Counter[str] = Counter()
            budget = MAX_COVERAGE_STEPS
            for rank in [rank for rank in self.tables.ranks if totals[rank]]:
                if budget <= 0:
                    break
                table = run.rank(rank).table
                rows = np.flatnonzero(np.diff(table["total_unobserved"].astype(np.int64), prepend=0))[:budget]
                for row in rows.tolist():
                    count.update(dict(run.rank(rank).load(row).unobserved))
                budget -= len(rows)
                if rank not in self.tables.differing:
                    run.close_rank(rank)
            rest = sum(totals[rank] for rank in self.tables.ranks) - count.total()
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

    def _facts(self) -> tuple[RunFacts, RunFacts]:
        return _facts(self.baseline), _facts(self.candidate)


def _facts(run: RunView) -> RunFacts:
    first = last = None
    if run.ranks:
        table = run.rank(run.ranks[0]).table
        steps = table["step"][table["kind"] == int(StepKind.STEP)]
        if len(steps):
            first, last = int(steps.min()), int(steps.max())
    return RunFacts(
        str(run.path),
        run.run_id,
        first,
        last,
        run.world_size,
        str(run.level),
        str(run.status),
        unrecorded_processes(run.info),
    )
