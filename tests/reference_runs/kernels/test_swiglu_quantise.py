"""SwiGLU with the quantisation around it, against the same in several steps."""

from __future__ import annotations

import pytest
import torch

from bitcheck.reference_runs.kernels.quantise import Quantised, reference_columns, reference_rows
from bitcheck.reference_runs.kernels.schedule import GroupSchedule, reference_schedule
from bitcheck.reference_runs.kernels.swiglu import reference_swiglu, swiglu_prob_backward
from bitcheck.reference_runs.kernels.swiglu_quantise import swiglu_columns, swiglu_quantise

WIDTH, ROWS = 256, 150


def assert_same(actual: Quantised, expected: Quantised) -> None:
    """Scales agree closely, and so do values: sigmoid is not the same function to the last bit everywhere."""
    assert actual.values.shape == expected.values.shape
    assert actual.scales.shape == expected.scales.shape
    torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-5, atol=0)
    difference = (actual.dequantise() - expected.dequantise()).norm()
    assert difference < 5e-3 * expected.dequantise().norm()


def hidden_and_prob(device: str, with_prob: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    hidden = torch.randn(ROWS, 2 * WIDTH).bfloat16().to(device)
    return hidden, torch.rand(ROWS).to(device) if with_prob else None


@pytest.mark.parametrize("with_prob", [True, False])
def test_one_pass_forward_gives_what_two_give(device: str, with_prob: bool) -> None:
    hidden, prob = hidden_and_prob(device, with_prob)
    a, h = swiglu_quantise(hidden, prob)
    expected = reference_rows(hidden)
    assert torch.equal(h.scales, expected.scales)
    assert torch.equal(h.values.view(torch.uint8), expected.values.contiguous().view(torch.uint8))
    assert_same(a, reference_rows(reference_swiglu(*hidden.float().chunk(2, -1), prob)))


def schedule(device: str) -> GroupSchedule:
    return reference_schedule(torch.tensor([0, 70, 70, 149, 150], dtype=torch.int32, device=device), ROWS)


@pytest.mark.parametrize("with_prob", [True, False])
@pytest.mark.parametrize("is_grouped", [True, False])
def test_one_pass_backward_gives_what_two_give_for_ragged_and_empty_experts_too(
    device: str, with_prob: bool, is_grouped: bool
) -> None:
    hidden, prob = hidden_and_prob(device, with_prob)
    _, h = swiglu_quantise(hidden, prob)
    groups = schedule(device) if is_grouped else None
    a = reference_swiglu(*h.dequantise().chunk(2, -1), prob)
    assert_same(swiglu_columns(h, prob, groups), reference_columns(a, groups))


@pytest.mark.parametrize("width", [96, 1408])
def test_the_gradient_of_a_probability_is_summed_over_all_columns(device: str, width: int) -> None:
    hidden, prob = torch.randn(9, 2 * width).to(device), torch.rand(9).to(device)
    dy = torch.randn(9, width).to(device)
    leaves = [hidden.double().requires_grad_(), prob.double().requires_grad_()]
    reference_swiglu(*leaves[0].chunk(2, -1), leaves[1]).backward(dy.double())
    dhidden, dprob = swiglu_prob_backward(dy, *hidden.chunk(2, -1), prob)
    assert leaves[0].grad is not None and leaves[1].grad is not None
    torch.testing.assert_close(dhidden.double(), leaves[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dprob.double(), leaves[1].grad, rtol=1e-4, atol=1e-4)


def test_other_widths_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="F a multiple of 128"):
        swiglu_quantise(torch.randn(8, 2 * 192, device=device))
