"""What a number of identical runs proves, and how many are needed: bounds, beliefs about a rate, medians.

A divergence proves itself; that there is none is only ever a bound. n independent pairs that were
all identical leave, with confidence c, a divergence rate of at most

    1 - (1 - c)^(1/n)                         c = 0.95: 1 - 0.05^(1/n)

(the exact one-sided binomial limit for no success, C. J. Clopper and E. S. Pearson, Biometrika 26,
1934; near 3/n for c = 0.95, the "rule of three" of J. A. Hanley and A. Lippman-Hand, JAMA 249, 1983).
To bound a rate of p with confidence c takes n = ceil(log(1 - c) / log(1 - p)) identical pairs:

    rate_bound(59)                0.0495
    pairs_needed(0.05, 0.95)      59

Place in the flow: arithmetic alone; gate, bisect and tax ask it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bitcheck.errors import UsageError

DEFAULT_CONFIDENCE = 0.95
_HALVINGS = 200
"""Steps of a bisection on [0, 1]; doubles are exhausted long before."""


def check_probability(name: str, value: float) -> float:
    """Return `value`. Raises UsageError unless it lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise UsageError(f"{name} {value:g}: expected a number between 0 and 1, as in 0.95")
    return value


def rate_bound(num_pairs: int, confidence: float = DEFAULT_CONFIDENCE) -> float:
    """Return the largest divergence rate that `num_pairs` identical pairs leave possible; 1 for none."""
    check_probability("confidence", confidence)
    if num_pairs < 0:
        raise UsageError(f"{num_pairs} pairs: expected 0 or more")
    return -math.expm1(math.log1p(-confidence) / num_pairs) if num_pairs else 1.0


def pairs_needed(rate: float, confidence: float = DEFAULT_CONFIDENCE) -> int:
    """Return how many identical pairs bound the divergence rate by `rate` with this confidence.

    The inverse of `rate_bound`. A fault that shows in every pair (`rate` 1) takes one.
    """
    check_probability("confidence", confidence)
    if rate == 1.0:
        return 1
    check_probability("rate", rate)
    exact = math.log1p(-confidence) / math.log1p(-rate)
    # Rounded by hand: the quotient of two logarithms may end a hair above the integer that it is.
    nearest = round(exact)
    return max(1, nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.ceil(exact))


def rate_interval(num_diverged: int, num_pairs: int, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """Return the exact two-sided interval (Clopper-Pearson) of a divergence rate, from k of n pairs.

    The lower limit is the rate at which k or more of n are as improbable as (1 - confidence) / 2, the
    upper one that at which k or fewer are.
    """
    check_probability("confidence", confidence)
    if not 0 <= num_diverged <= num_pairs:
        raise UsageError(f"{num_diverged} of {num_pairs} pairs: expected 0 to {num_pairs}")
    tail = (1.0 - confidence) / 2
    low, high = 0.0, 1.0
    if num_diverged:
        low = _solve(lambda rate: 1.0 - binomial_cdf(num_diverged - 1, num_pairs, rate) - tail)
    if num_diverged < num_pairs:
        high = _solve(lambda rate: tail - binomial_cdf(num_diverged, num_pairs, rate))
    return low, high


def binomial_cdf(successes: int, trials: int, rate: float) -> float:
    """Return the probability of at most `successes` in `trials`."""
    if successes >= trials or rate <= 0.0:
        return 1.0 if successes >= 0 else 0.0
    if rate >= 1.0:
        return 0.0
    terms = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(rate)
        + (trials - k) * math.log1p(-rate)
        for k in range(successes + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, terms)))


def _solve(rising: Callable[[float], float]) -> float:
    """Return where a function that rises on [0, 1] crosses zero."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class RateBelief:
    """What is believed of the rate at which a fault shows: a weight for each of some rates.

    Half of the prior lies on rate 1 (a fault that shows every time, as most do), the rest is spread
    evenly over [lowest, 1). `after` is Bayes' rule for one pair of runs; `miss` is the probability
    that n pairs are all identical although the fault is in them: E[(1 - rate)^n].

        belief = RateBelief.prior(0.3)
        for _ in range(6):
            belief = belief.after(diverged=True)
        belief.miss(1)        0.021: after six of six, one identical pair all but clears
    """

    rates: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def prior(cls, lowest: float, num_rates: int = 24) -> RateBelief:
        """Return the prior. `lowest` is the smallest rate that is reckoned with; 1 for faults that always show."""
        if lowest == 1.0:
            return cls((1.0,), (1.0,))
        check_probability("rate", lowest)
        between = tuple(lowest + (1.0 - lowest) * k / num_rates for k in range(num_rates))
        return cls((*between, 1.0), (*(0.5 / num_rates for _ in between), 0.5))

    def after(self, diverged: bool) -> RateBelief:
        """Return the belief after one more pair with the fault in it. Raises ValueError for the impossible."""
        found = [w * (r if diverged else 1.0 - r) for r, w in zip(self.rates, self.weights, strict=True)]
        total = math.fsum(found)
        if total == 0.0:
            raise ValueError("a fault that shows every time did not show")
        return RateBelief(self.rates, tuple(weight / total for weight in found))

    def mean(self) -> float:
        """Return the expected rate."""
        return math.fsum(r * w for r, w in zip(self.rates, self.weights, strict=True))

    def miss(self, num_pairs: int) -> float:
        """Return the probability that `num_pairs` pairs are identical although the fault is in them."""
        return math.fsum(w * (1.0 - r) ** num_pairs for r, w in zip(self.rates, self.weights, strict=True))

    def pairs_to_clear(self, error: float, prior: float = 0.5) -> int:
        """Return how many identical pairs bring the probability of a fault from `prior` to at most `error`."""
        check_probability("error", error)
        num_pairs = 1
        while posterior_fault(prior, self.miss(num_pairs)) > error:
            num_pairs += 1
        return num_pairs


def posterior_fault(prior: float, miss: float) -> float:
    """Return the probability of a fault, `prior` before, after pairs that are identical with probability `miss` if
    it is there and always if it is not (Bayes)."""
    hidden = prior * miss
    return hidden / (hidden + 1.0 - prior)


class Interval(NamedTuple):
    """An estimate with the limits between which the truth lies with at least the confidence that was asked for."""

    estimate: float
    low: float
    high: float
    confidence: float
    """What the limits reach; less than was asked for where there are too few values."""


def median_interval(values: Sequence[float], confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    """Return the median of `values` with an interval that assumes nothing of their distribution.

    The interval is [x_(k), x_(n+1-k)] of the sorted values with the largest k for which
    1 - 2 P(Binomial(n, 1/2) < k) reaches the confidence (W. R. Thompson, Ann. Math. Stat. 7, 1936; the
    interval of the sign test). Six values are the fewest that reach 95 %. Raises UsageError for none.
    """
    check_probability("confidence", confidence)
    if not values:
        raise UsageError("a median of no values; expected at least one")
    ordered = sorted(values)
    n, k = len(ordered), 1
    while k < n - k and 1.0 - 2 * binomial_cdf(k, n, 0.5) >= confidence:
        k += 1
    reached = max(0.0, 1.0 - 2 * binomial_cdf(k - 1, n, 0.5))
    return Interval(median(ordered), ordered[k - 1], ordered[n - k], reached)


def percent(value: float) -> str:
    """Return a probability as people read it: `4.95 %`, `0.0021 %`, `100 %`."""
    scaled = 100 * value
    return f"{scaled:.3g} %" if scaled < 99.95 else f"{min(scaled, 100.0):.5g} %"


def sure(error_terms: Iterable[float]) -> float:
    """Return the probability that none of several conclusions is wrong, by the union bound."""
    return max(0.0, 1.0 - math.fsum(error_terms))
