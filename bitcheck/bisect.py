"""Which switches bring divergence back: every minimal set of suspect forms, by delta debugging with chance.

A switch has a reproducible and a suspect form. A *point* is the set of switches in their suspect form;
a *sample* at a point is one pair of runs of the program there, which differ or do not. Taken as given:
more suspect forms never make a program more reproducible (a set that diverges, diverges with further
suspects too), and a sample at a point with a culprit in it differs with some rate, every time or not.

    result = find_minimal_sets(["moe.dprob", "moe.combine", ...], oracle, Search(confidence=0.99))
    result.sets                     ({"moe.dprob"},)

1. *The ends.* The reproducible end must not diverge, the suspect end must: else EndRefused.
2. *One minimal set* (`_find_one`). Of the suspects in a row, the shortest prefix that diverges ends in a
   member of a minimal set. It is kept, and the rest is looked for in front of it, until what is kept
   diverges by itself: delta debugging (A. Zeller, R. Hildebrandt, IEEE TSE 28, 2002) in its dichotomic
   form (U. Junker, QuickXplain, AAAI 2004), k log2 n points for a set of k among n.
   The prefix is found by a search that allows for samples that do not show the culprit: over all
   positions and rates there is a posterior, each sample is taken where it tells most for its price, and
   the search ends when one position holds all but a small rest of it (M. Horstein, IEEE Trans. Inf.
   Theory 9, 1963; R. Karp, R. Kleinberg, SODA 2007). A difference is always certain, "identical" is not.
3. *All of them.* Another minimal set lacks some member of each one that is known, so for each member the
   search goes on without it, until no difference is left (R. Reiter's hitting-set tree, Artif. Intell.
   32, 1987). This also shows that each set is minimal. Sets are reported only after they were themselves
   seen to diverge.

What is not random is not drawn: the same samples lead to the same questions, so a log of samples replays
a search, and a search that was interrupted goes on from its log.

Place in the flow: statistics -> *bisect*; the oracle is `bitcheck.probes`, or in a test a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bitcheck.errors import BitcheckError
from bitcheck.samples import Ledger, Oracle, Point
from bitcheck.statistics import RateBelief, check_probability, pairs_needed, posterior_fault

_PRIOR_ALONE = 0.5
"""Believed beforehand that what is kept so far diverges by itself: single culprits are the most frequent."""
_PRIOR_ANOTHER = 0.5
"""Believed beforehand that there is a further minimal set."""


class EndRefused(BitcheckError):
    """An end of the search is not what it must be; `end` is `reproducible` or `suspect`."""

    def __init__(self, end: str, message: str) -> None:
        super().__init__(message)
        self.end = end


class OutOfRuns(BitcheckError):
    """The search would need more runs than it was allowed."""


@dataclass(frozen=True, slots=True)
class Search:
    """How sure the answer is to be."""

    confidence: float = 0.95
    rate: float = 0.3
    """The smallest rate at which a culprit is expected to show; 1 where it shows every time."""
    max_runs: int | None = None

    def check(self) -> None:
        """Raise UsageError for what makes no sense."""
        check_probability("--confidence", self.confidence)
        if self.rate != 1.0:
            check_probability("--rate", self.rate)


@dataclass(frozen=True, slots=True)
class BisectResult:
    """The answer of a search."""

    sets: tuple[Point, ...]
    """Every minimal set, in the order in which they were found."""
    sure: float
    """At least this probability that the sets are minimal and all there are."""
    num_runs: int
    num_samples: int
    rate: float
    """The part of the samples with a culprit in them that differed."""
    shown: tuple[tuple[int, int], ...]
    """Of each set: samples at it that differed, and all samples at it."""
    where: tuple[str | None, ...]
    """Of each set: where it was first seen to differ."""


def find_minimal_sets(
    names: Sequence[str], oracle: Oracle, search: Search, tell: Callable[[str], None] = lambda line: None
) -> BisectResult:
    """Return every minimal set of suspect forms that brings divergence back.

    Raises EndRefused where the reproducible end diverges or the suspect end does not, OutOfRuns, and
    whatever the oracle raises.
    """
    search.check()
    return _Bisection(tuple(names), oracle, search, tell).run()


class _Bisection:
    def __init__(self, names: tuple[str, ...], oracle: Oracle, search: Search, tell: Callable[[str], None]) -> None:
        self.names, self.oracle, self.options, self.tell = names, oracle, search, tell
        self.ledger = Ledger()
        self.prior = RateBelief.prior(search.rate)
        self.error = (1.0 - search.confidence) / 4
        """How wrong one conclusion may be; a single culprit takes four."""
        self.errors: list[float] = []

    def run(self) -> BisectResult:
        everything = frozenset(self.names)
        self._check_reproducible_end(1)
        self._check_suspect_end(everything)
        found: list[Point] = []
        num_samples = -1
        while num_samples < len(self.ledger.entries):
            # Again from the start, by what is known now: early conclusions may have come too easily, before
            # the fault was seen to show by chance. The last time, all of it follows without a new sample.
            num_samples = len(self.ledger.entries)
            self.errors.clear()
            found = self._find_all(everything)
            self._clear_reproducible_end()
        minimal = [one for one in found if not any(other < one for other in found)]
        return BisectResult(
            sets=tuple(minimal),
            sure=max(0.0, 1.0 - math.fsum(self.errors)),
            num_runs=self.ledger.num_runs,
            num_samples=len(self.ledger.entries),
            rate=self._shown()[0] / self._shown()[1],
            shown=tuple(self.ledger.count(one) for one in minimal),
            where=tuple(self._where(one) for one in minimal),
        )

    # ------------------------------------------------------------------ samples

    def _sample(self, point: Point) -> bool:
        limit = self.options.max_runs
        if limit is not None and self.ledger.num_runs + self.oracle.price(point) > limit:
            raise OutOfRuns(
                f"{self.ledger.num_runs} runs were not enough to name the switches with "
                f"{self.options.confidence:g} confidence.\nAllow more with --max-runs; the log keeps what is known."
            )
        sample = self.oracle(point)
        self.ledger.add(point, sample)
        names = ", ".join(sorted(point)) if point else "none"
        if len(point) > max(3, len(self.names) // 2):
            rest = sorted(set(self.names) - point)
            names = f"all but {', '.join(rest)}" if rest else "all"
        outcome = f"differs ({sample.where})" if sample.where else "differs" if sample.diverged else "identical"
        self.tell(f"suspect: {names}: {outcome}")
        return sample.diverged

    def _rates(self) -> RateBelief:
        """What is reckoned with of rates, before the samples.

        Once a point with a culprit in it gave identical runs, faults here show by chance, and their rate
        is no longer believed to be anything: the lowest that was asked for counts.
        """
        shown, all_ = self._shown()
        return self.prior if shown == all_ else RateBelief((self.options.rate,), (1.0,))

    def _shown(self) -> tuple[int, int]:
        """Return (those that differed, all) of the samples at points that certainly have a culprit in them."""
        outcomes = [
            sample.diverged for point, sample in self.ledger.entries if sample.diverged or self.ledger.is_known(point)
        ]
        if self.options.rate == 1.0 and not all(outcomes):
            raise self._shows_by_chance()
        return sum(outcomes), len(outcomes)

    def _belief(self) -> RateBelief:
        """What is believed of the rate, after the samples."""
        belief = self._rates()
        if len(belief.rates) > 1:
            for _ in range(self._shown()[0]):
                belief = belief.after(True)
        return belief

    @staticmethod
    def _shows_by_chance() -> BitcheckError:
        return BitcheckError(
            "the same switches gave identical runs once and different ones another time; --rate 1 takes faults to "
            "show every time.\nGive the smallest rate at which one may show: --rate 0.3"
        )

    def _where(self, point: Point) -> str | None:
        return next((sample.where for tried, sample in self.ledger.entries if sample.diverged and tried <= point), None)

    # ------------------------------------------------------------------ the ends

    def _check_reproducible_end(self, num_samples: int) -> None:
        for _ in range(num_samples):
            if self._sample(frozenset()):
                raise EndRefused(
                    "reproducible",
                    "the program diverges with every switch in its reproducible form, so something else is at fault: "
                    "no switch can be named.\nFind out what: bitcheck gate --runs 5 -- CMD",
                )

    def _check_suspect_end(self, everything: Point) -> None:
        needed = pairs_needed(self.options.rate, 1.0 - self.error)
        for _ in range(needed):
            if self._sample(everything):
                return
        raise EndRefused(
            "suspect",
            f"the program does not diverge with every switch in its suspect form, in {needed} pairs of runs: there is "
            f"nothing to find, or it shows in fewer than {self.options.rate:.3g} of pairs ({1.0 - self.error:.4g} "
            "confidence).\nCheck that the switches reach the program, or look longer with a lower --rate.",
        )

    def _clear_reproducible_end(self) -> None:
        """Every identical sample at a point without a known culprit speaks for the reproducible end too."""
        nothing: Point = frozenset()
        while (error := self._doubt(nothing)) > self.error:
            self._check_reproducible_end(1)
        self.errors.append(error)

    def _doubt(self, point: Point) -> float:
        """The probability that a culprit is in a point that has not been seen to diverge."""
        return posterior_fault(_PRIOR_ANOTHER, self._belief().miss(self.ledger.num_cleared(point)))

    # ------------------------------------------------------------------ sets

    def _find_all(self, everything: Point) -> list[Point]:
        found: list[Point] = []
        waiting: list[Point] = [frozenset()]
        """Sets of switches to leave out."""
        done: set[Point] = set()
        while waiting:
            left_out = waiting.pop(0)
            universe = everything - left_out
            known = next((one for one in found if one <= universe), None)
            if known is None:
                if not self._diverges(universe):
                    continue
                known = self._find_one(universe)
                self.tell(f"found: {' + '.join(sorted(known))}")
                for number, other in enumerate(found, 1):
                    self._look_again(known & other, number)
                found.append(known)
            for member in self._ordered(known):
                further = left_out | {member}
                if further not in done:
                    done.add(further)
                    waiting.append(further)
        return found

    def _diverges(self, point: Point) -> bool:
        """Decide a point, by as many samples as it takes to be sure enough that it does not diverge."""
        while not self.ledger.is_known(point):
            doubt = self._doubt(point)
            if doubt <= self.error:
                self.errors.append(doubt)
                return False
            self._sample(point)
        return True

    def _look_again(self, shared: Point, times: int) -> None:
        """Look at what two sets share by itself, by new samples, the more sets there are the more of them.

        Two sets with a common member are rare. That the member alone brings divergence and was missed
        by bad luck is not, and would give a false set for every other switch.
        """
        if shared:
            needed = times * self._belief().pairs_to_clear(self.error)
            while not self.ledger.is_known(shared) and self.ledger.count(shared)[1] < needed:
                self._sample(shared)

    def _find_one(self, universe: Point) -> Point:
        """Return a minimal set within a point that diverges; it has itself been seen to diverge.

        That it has follows: nothing but a sample that differs moves belief from a longer prefix to a
        shorter one.
        """
        kept: Point = frozenset()
        row = self._ordered(universe)
        while True:
            length, doubt = self._shortest_prefix(kept, row)
            self.errors.append(doubt)
            if length == 0:
                assert self.ledger.is_known(kept)
                return kept
            kept |= {row[length - 1]}
            row = row[: length - 1]

    def _ordered(self, point: Iterable[str]) -> list[str]:
        wanted = set(point)
        return [name for name in self.names if name in wanted]

    def _shortest_prefix(self, kept: Point, row: Sequence[str]) -> tuple[int, float]:
        """Return (length of the shortest prefix of `row` that diverges together with `kept`, doubt left)."""
        prefixes = [kept | frozenset(row[:length]) for length in range(len(row) + 1)]
        while True:
            posterior = self._posterior(kept, row, prefixes)
            over_length = posterior.sum(axis=1)
            best = int(over_length.argmax())
            doubt = float(1.0 - over_length[best])
            if doubt <= self.error:
                return best, max(0.0, doubt)
            gains = _information(posterior, np.array(self._rates().rates))
            prices = np.array([self.oracle.price(prefix) for prefix in prefixes], np.float64)
            self._sample(prefixes[int((gains / prices).argmax())])

    def _posterior(self, kept: Point, row: Sequence[str], prefixes: Sequence[Point]) -> npt.NDArray[np.float64]:
        """Return the probability of each length and rate, [len(row) + 1, rates], from every sample so far."""
        reckoned = self._rates()
        rates = np.array(reckoned.rates)
        alone = _PRIOR_ALONE if kept else 0.0  # nothing at all does not diverge: that end was looked at
        lengths = np.full(len(prefixes), (1.0 - alone) / max(1, len(row)))
        lengths[0] = alone if row else 1.0
        likely: npt.NDArray[np.float64] = lengths[:, None] * np.array(reckoned.weights)[None, :]
        known = [self.ledger.is_known(point) for point, _ in self.ledger.entries]
        for (point, sample), is_known in zip(self.ledger.entries, known, strict=True):
            if sample.diverged:
                # Where a shorter prefix holds this point, that one diverges: the length is not the shortest.
                possible = np.array([not point <= shorter for shorter in prefixes[:-1]])
                likely[1:] *= possible[:, None]
                likely *= rates[None, :]
            else:
                has_culprit = np.array([prefix <= point for prefix in prefixes]) | is_known
                likely *= np.where(has_culprit[:, None], 1.0 - rates[None, :], 1.0)
            total = float(likely.sum())
            if total == 0.0:
                raise self._shows_by_chance()
            likely = likely / total
        return likely


def _information(posterior: npt.NDArray[np.float64], rates: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how many bits about the length a sample at each prefix is expected to give, [lengths]."""
    over_length = posterior.sum(axis=1)
    shown = posterior @ rates
    """Probability of each length together with: a sample that has the culprit differs."""
    gains = np.zeros(len(posterior))
    for length in range(len(posterior)):
        differs = np.where(np.arange(len(posterior)) <= length, shown, 0.0)
        identical = over_length - differs
        gains[length] = _entropy(over_length) - sum(
            branch.sum() * _entropy(branch / branch.sum()) for branch in (differs, identical) if branch.sum() > 0
        )
    return np.maximum(gains, 0.0)


def _entropy(weights: npt.NDArray[np.float64]) -> float:
    present = weights[weights > 0]
    return -float((present * np.log2(present)).sum())
