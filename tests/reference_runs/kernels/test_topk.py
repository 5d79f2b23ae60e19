"""Which elements are chosen, and in which order they are listed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bitcheck.reference_runs.kernels.combine import invert_permutation
from bitcheck.reference_runs.kernels.topk import reference_topk, topk


def scores_with_ties(device: str) -> torch.Tensor:
    # Few different values, minus infinity among them, as masked experts have.
    values = torch.tensor([-torch.inf, -0.5, 0.0, 0.25, 1.0])
    return values[torch.randint(0, 5, (37, 64))].to(device)


@pytest.mark.parametrize(("num_cols", "count"), [(64, 6), (8, 4), (20, 20), (1, 1)])
def test_the_stable_form_is_a_stable_sort(device: str, num_cols: int, count: int) -> None:
    scores = scores_with_ties(device)[:, :num_cols]
    assert torch.equal(topk(scores, count, form="stable"), reference_topk(scores, count))


def test_the_unstable_form_chooses_the_same_and_lists_them_in_any_order(device: str) -> None:
    scores = scores_with_ties(device)
    chosen = topk(scores, 6, form="unstable")
    assert torch.equal(chosen.sort(1).values, reference_topk(scores, 6).sort(1).values)


def test_where_scores_are_nan_every_slot_still_names_another_element(device: str) -> None:
    scores = torch.full((5, 64), torch.nan, device=device)
    scores[1:] = scores_with_ties(device)[:4]
    scores[2, 7] = torch.nan
    chosen = topk(scores, 6, form="stable").sort(1).values
    assert bool((chosen.diff(dim=1) > 0).all())
    assert bool(((chosen >= 0) & (chosen < 64)).all())


def test_the_order_of_the_programs_shows_in_the_unstable_form_alone(count_results: Callable[..., int]) -> None:
    scores = torch.rand(37, 64)
    assert count_results(lambda: topk(scores, 6, form="stable")) == 1
    assert count_results(lambda: topk(scores, 6, form="unstable")) > 1


@pytest.mark.gpu
def test_on_a_gpu_the_unstable_form_lists_the_chosen_in_another_order_each_time() -> None:
    scores = torch.rand(32768, 64, device="cuda")
    first = topk(scores, 6, form="unstable")
    assert any(not torch.equal(topk(scores, 6, form="unstable"), first) for _ in range(20))
    stable = topk(scores, 6, form="stable")
    assert all(torch.equal(topk(scores, 6, form="stable"), stable) for _ in range(200))


def test_what_makes_no_sense_is_refused(device: str) -> None:
    scores = torch.rand(4, 8, device=device)
    with pytest.raises(ValueError, match=r"unknown form 'sorted'; expected one of stable, unstable"):
        topk(scores, 2, form="sorted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"9 of torch\.float32"):
        topk(scores, 9, form="stable")


def test_an_inverted_permutation_undoes_it(device: str) -> None:
    permutation = torch.randperm(3000, device=device)
    assert torch.equal(invert_permutation(permutation)[permutation], torch.arange(3000, device=device))
