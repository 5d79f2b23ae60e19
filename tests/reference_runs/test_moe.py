"""Routing: ties, groups, weights, balance; and the permutation between tokens and experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bitcheck.reference_runs.configs import ModelConfig, get_config
from bitcheck.reference_runs.moe import MoE, Router, TopK, make_plan, select_top
from bitcheck.reference_runs.switches import Switches

CONFIG = replace(get_config("nano").model, num_experts=16, num_groups=4, group_limit=2, top_k=3)
DETERMINISTIC = Switches.from_options()


def make_router(config: ModelConfig = CONFIG, *settings: str) -> Router:
    return Router(config, Switches.from_options(settings=settings))


def test_of_equal_scores_the_lower_index_is_taken_first() -> None:
    assert select_top(torch.zeros(2, 16), 4, is_stable=True).tolist() == [[0, 1, 2, 3]] * 2
    scores = torch.tensor([[1.0, 2.0, 0.0, 2.0, 1.0, 2.0]])
    assert select_top(scores, 5, is_stable=True).tolist() == [[1, 3, 5, 0, 4]]


def test_pytorchs_own_top_k_breaks_ties_otherwise() -> None:
    """Why the router does not use it; should this fail one day, the router's docstring is out of date."""
    assert torch.zeros(16).topk(4).indices.tolist() != [0, 1, 2, 3]


def test_the_unstable_form_takes_any_of_equal_scores_and_lists_them_in_any_order() -> None:
    tied = {tuple(row) for row in select_top(torch.zeros(200, 4), 2, is_stable=False).tolist()}
    assert len(tied) == 12
    untied = {tuple(row) for row in select_top(torch.arange(4.0).expand(200, 4), 2, is_stable=False).tolist()}
    assert untied == {(2, 3), (3, 2)}


@given(st.integers(0, 2**32), st.sampled_from([True, False]))
def test_a_tokens_experts_are_distinct_and_in_no_more_groups_than_the_limit(seed: int, is_stable: bool) -> None:
    # Few different values, so that ties are common.
    scores = torch.randint(0, 4, (32, 16), generator=torch.Generator().manual_seed(seed)).float()
    chosen = TopK(CONFIG, is_stable)(scores)
    assert chosen.shape == (32, 3)
    for row in chosen.tolist():
        assert len(set(row)) == 3
        assert len({expert // 4 for expert in row}) <= 2


def test_a_groups_score_is_the_sum_of_its_two_best() -> None:
    scores = torch.zeros(1, 16)
    scores[0, 0] = 10.0  # group 0: one very good expert
    scores[0, 4:6] = 6.0  # group 1: two good ones, 12 together
    scores[0, 8:12] = 5.5  # group 2: four, of which two count, 11 together
    assert TopK(CONFIG, True)(scores).tolist() == [[4, 5, 8]]


def test_without_a_limit_the_best_experts_are_taken_wherever_they_are() -> None:
    scores = torch.randn(50, 16)
    free = replace(CONFIG, group_limit=4)
    assert torch.equal(TopK(free, True)(scores), select_top(scores, 3, is_stable=True))


def test_the_weights_are_normalised_affinities_and_the_bias_only_selects() -> None:
    router = make_router(replace(CONFIG, group_limit=4, route_scale=2.5))
    u = torch.randn(2, 8, CONFIG.d_model).bfloat16()
    router.bias[7] = 100.0
    routing = router(u)
    assert bool((routing.experts_TK == 7).any(1).all())
    s = torch.sigmoid(u.flatten(0, 1).float() @ router.weight.float().t())
    chosen = s.gather(1, routing.experts_TK)
    assert torch.allclose(routing.prob_TK, chosen / chosen.sum(1, keepdim=True) * 2.5)
    assert torch.allclose(routing.prob_TK.sum(1), torch.tensor(2.5))


def test_the_bias_moves_by_gamma_against_the_load() -> None:
    router = make_router()
    router.load.copy_(torch.tensor([3] * 4 + [1] * 4 + [2] * 8))
    router.update_bias()
    gamma = CONFIG.bias_gamma
    assert torch.equal(router.bias, torch.tensor([-gamma] * 4 + [gamma] * 4 + [0.0] * 8))
    assert not router.load.any()


def test_loads_are_whole_numbers_counted_in_training_alone() -> None:
    router = make_router()
    u = torch.randn(2, 8, CONFIG.d_model).bfloat16()
    router(u)
    router(u)
    assert router.load.dtype == torch.int64
    assert int(router.load.sum()) == 2 * 16 * CONFIG.top_k
    router.eval()
    router(u)
    assert int(router.load.sum()) == 2 * 16 * CONFIG.top_k


def test_an_expert_that_is_never_chosen_becomes_chosen_by_its_bias() -> None:
    router = make_router(replace(CONFIG, bias_gamma=0.05, group_limit=4))
    router.weight.data[5] = 0.0
    router.bias[5] = -0.4
    u = torch.randn(4, 32, CONFIG.d_model).bfloat16()
    assert not (router(u).experts_TK == 5).any()
    times_chosen = 0
    for _ in range(30):
        router.load.zero_()
        times_chosen += int((router(u).experts_TK == 5).sum())
        router.update_bias()
    assert times_chosen > 0


def balance_loss(router: Router, affinity: Tensor, experts: Tensor, num_sequences: int) -> float:
    is_chosen = torch.zeros_like(affinity).scatter_(1, experts, 1.0)
    return float(router._balance_loss(affinity, is_chosen, num_sequences))


def test_the_balance_loss_is_alpha_where_every_expert_is_used_alike_and_more_where_one_is_not() -> None:
    router = make_router(replace(CONFIG, balance_alpha=1.0, group_limit=4))
    even = torch.stack([(torch.arange(3) * 5 + t) % 16 for t in range(16)])
    affinity = torch.full((16, 16), 0.5)
    assert balance_loss(router, affinity, even, 1) == pytest.approx(1.0)
    skewed = affinity.clone()
    skewed[:, :3] = 0.9
    assert balance_loss(router, skewed, torch.arange(3).expand(16, 3), 1) > 1.3


def test_the_balance_loss_looks_at_one_sequence_at_a_time() -> None:
    router = make_router(replace(CONFIG, balance_alpha=1.0, group_limit=4))
    affinity = torch.full((32, 16), 0.1)
    affinity[:16, :3], affinity[16:, 3:6] = 0.9, 0.9
    experts = torch.cat((torch.arange(3).expand(16, 3), torch.arange(3, 6).expand(16, 3)))
    assert balance_loss(router, affinity, experts, 2) > balance_loss(router, affinity, experts, 1) + 0.5


@given(st.integers(0, 2**32))
def test_the_plan_is_a_permutation_sorted_by_expert_that_keeps_the_tokens_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(40, 8, generator=generator).argsort(1)[:, :3]
    row, slot, loads = make_plan(experts, 8)
    assert torch.equal(slot[row.flatten()], torch.arange(120))
    sorted_experts = experts.flatten()[slot]
    assert torch.equal(sorted_experts, sorted_experts.sort().values)
    for rows in slot.split(loads.tolist()):
        assert torch.equal(rows, rows.sort().values)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_mixture_is_the_weighted_sum_of_its_experts(top_k: int) -> None:
    config = replace(CONFIG, top_k=top_k)
    moe = MoE(config, "bf16", DETERMINISTIC)
    u = torch.randn(2, 10, config.d_model).bfloat16()
    y, _ = moe(u)
    routing = moe.router(u)
    up, down = moe.experts.up.weight.float(), moe.experts.down.weight.float()
    flat = u.flatten(0, 1)
    exact = moe.shared(flat).float()
    for token in range(20):
        for expert, prob in zip(routing.experts_TK[token], routing.prob_TK[token], strict=True):
            gate, other = (up[expert] @ flat[token].float()).chunk(2)
            exact[token] += down[expert] @ (gate * torch.sigmoid(gate) * other * prob)
    assert (y.flatten(0, 1).float() - exact).norm() < 0.02 * exact.norm()


def test_experts_that_get_no_token_have_a_gradient_of_zero() -> None:
    moe = MoE(CONFIG, "fp8", DETERMINISTIC)
    moe.router.bias[8:] = -100.0
    y, _ = moe(torch.randn(2, 10, CONFIG.d_model).bfloat16())
    y.float().sum().backward()
    for weight in (moe.experts.up.weight, moe.experts.down.weight):
        assert weight.grad is not None
        assert bool(weight.grad[:8].any())
        assert not weight.grad[8:].any()
