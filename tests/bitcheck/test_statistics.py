"""Bounds against closed forms, published values and brute force."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcheck.errors import UsageError
from bitcheck.statistics import (
    RateBelief,
    binomial_cdf,
    median_interval,
    pairs_needed,
    percent,
    posterior_fault,
    rate_bound,
    rate_interval,
)


def test_the_bound_after_n_identical_pairs_is_that_of_the_formula() -> None:
    assert rate_bound(1) == pytest.approx(0.95)
    assert rate_bound(20) == pytest.approx(1 - 0.05 ** (1 / 20))
    assert rate_bound(0) == 1.0
    assert rate_bound(10**6) == pytest.approx(-math.log(0.05) / 10**6, rel=1e-5), "the rule of three"


def test_fifty_nine_pairs_show_five_percent_with_95_percent_confidence_and_ninety_with_99() -> None:
    assert pairs_needed(0.05, 0.95) == 59
    assert pairs_needed(0.05, 0.99) == 90
    assert pairs_needed(1.0, 0.99) == 1


@given(rate=st.floats(1e-4, 0.999), confidence=st.floats(0.5, 0.9999))
def test_the_number_of_pairs_is_the_smallest_whose_bound_is_low_enough(rate: float, confidence: float) -> None:
    needed = pairs_needed(rate, confidence)
    assert rate_bound(needed, confidence) <= rate * (1 + 1e-9)
    assert needed == 1 or rate_bound(needed - 1, confidence) > rate * (1 - 1e-9)


@pytest.mark.parametrize("rate", [0.5, 0.75, 0.875, 0.9375])
def test_a_number_of_pairs_that_is_exact_is_not_rounded_up(rate: float) -> None:
    confidence = 1 - (1 - rate) ** 3
    assert pairs_needed(rate, confidence) == 3


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(UsageError):
        pairs_needed(rate)


@given(trials=st.integers(1, 9), rate=st.floats(0.01, 0.99), data=st.data())
def test_the_binomial_sum_is_that_of_all_outcomes(trials: int, rate: float, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    brute = sum(
        rate ** sum(outcome) * (1 - rate) ** (trials - sum(outcome))
        for outcome in product((0, 1), repeat=trials)
        if sum(outcome) <= successes
    )
    assert binomial_cdf(successes, trials, rate) == pytest.approx(brute)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.3084971),
        (3, 10, 0.06673951, 0.65245285),
        (10, 10, 0.6915029, 1.0),
        (1, 100, 0.0002531, 0.0544594),
    ],
)
def test_the_interval_of_a_rate_is_that_of_clopper_and_pearson(
    successes: int, trials: int, low: float, high: float
) -> None:
    assert rate_interval(successes, trials) == (pytest.approx(low, abs=1e-7), pytest.approx(high, abs=1e-7))


def test_a_belief_is_that_of_bayes_rule() -> None:
    belief = RateBelief((0.5, 1.0), (0.5, 0.5)).after(True)
    assert belief.weights == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert belief.mean() == pytest.approx(5 / 6)
    assert belief.miss(2) == pytest.approx(1 / 3 * 0.25)
    assert belief.after(False).weights == (1.0, 0.0)


def test_a_fault_that_always_shows_cannot_be_missed() -> None:
    belief = RateBelief.prior(1.0)
    assert belief.miss(1) == 0.0
    with pytest.raises(ValueError, match="every time"):
        belief.after(False)


@given(shown=st.integers(0, 30))
def test_the_more_often_a_fault_showed_the_fewer_identical_pairs_clear_a_point(shown: int) -> None:
    belief = RateBelief.prior(0.3)
    before = belief.pairs_to_clear(0.01)
    for _ in range(shown):
        belief = belief.after(True)
    assert belief.pairs_to_clear(0.01) <= before
    assert posterior_fault(0.5, belief.miss(belief.pairs_to_clear(0.01))) <= 0.01


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    assert median_interval([6, 1, 5, 2, 4, 3])[:3] == (3.5, 1, 6), "of six values all are needed for 95 %"
    ten = median_interval(list(range(1, 11)))
    assert (ten.low, ten.high, round(ten.confidence, 4)) == (2, 9, 0.9785)
    assert median_interval([1, 2, 3]).confidence == 0.75, "three values reach no more"
    assert median_interval([7]).confidence == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_the_interval_of_a_median_holds_it_and_a_wider_one_is_surer(values: list[float]) -> None:
    low, high = median_interval(values, 0.5), median_interval(values, 0.99)
    assert low.low <= low.estimate <= low.high
    assert high.low <= low.low and low.high <= high.high
    assert high.confidence >= low.confidence


def test_no_values_have_no_median() -> None:
    with pytest.raises(UsageError):
        median_interval([])


def test_percentages_keep_three_digits() -> None:
    assert [percent(value) for value in (0.0495, 0.5, 1.0, 0.000021, 0.99997)] == [
        "4.95 %",
        "50 %",
        "100 %",
        "0.0021 %",
        "99.997 %",
    ]
