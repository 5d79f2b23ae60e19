"""MLA's heads against plain PyTorch, forward and backward."""

from __future__ import annotations

import pytest
import torch

from bitcheck.reference_runs.kernels.heads import reference_split_heads, split_heads, split_heads_backward

WIDTHS = [(16, 8, 16), (12, 4, 8), (8, 8, 16)]


def operands(device: str, heads: int, widths: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    nope, rope, value = widths
    angles = torch.rand(5, rope // 2) * 6
    latent = torch.randn(2, 5, 20 + rope, dtype=dtype)
    values = (
        torch.randn(2, 5, heads * (nope + rope), dtype=dtype),
        torch.randn(2, 5, heads * (nope + value), dtype=dtype),
        latent[..., 20:],  # strided rows, as a split leaves them
        torch.stack((angles.cos(), angles.sin()), -1),
    )
    return tuple(value.to(device) for value in values)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", [2, 3, 20])
def test_heads_are_laid_out_and_turned_as_in_plain_pytorch(
    device: str, heads: int, widths: tuple[int, int, int]
) -> None:
    q, kv, k_rope, rotation = operands(device, heads, widths, torch.float32)
    outs = split_heads(q, kv, k_rope, rotation, widths)
    for actual, expected in zip(outs, reference_split_heads(q, kv, k_rope, rotation, widths), strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", [2, 3, 20])
def test_gradients_turn_back_and_that_of_the_shared_key_is_a_sum_over_heads(
    device: str, heads: int, widths: tuple[int, int, int]
) -> None:
    q, kv, k_rope, rotation = operands(device, heads, widths, torch.float32)
    leaves = [x.detach().requires_grad_() for x in (q, kv, k_rope)]
    outs = reference_split_heads(*leaves, rotation, widths)
    # Attention gives its gradients with heads before positions.
    grads = [torch.randn(2, heads, 5, widths[0] + widths[1], device=device).transpose(1, 2) for _ in outs]
    torch.autograd.backward(outs, grads)
    for actual, leaf in zip(split_heads_backward(*grads, rotation, widths), leaves, strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, leaf.grad, rtol=1e-5, atol=1e-5)


def test_layouts_that_would_be_misread_are_refused(device: str) -> None:
    widths = WIDTHS[0]
    q, kv, k_rope, rotation = operands(device, 2, widths, torch.float32)
    with pytest.raises(ValueError, match="expected heads of nope"):
        split_heads(q[..., :47], kv, k_rope, rotation, widths)
    with pytest.raises(ValueError, match="do not fit q"):
        split_heads(q, kv[..., 1:], k_rope, rotation, widths)
    with pytest.raises(ValueError, match="rotation"):
        split_heads(q, kv, k_rope, rotation[1:], widths)
    with pytest.raises(ValueError, match="expected contiguous q"):
        split_heads(q, kv, k_rope.transpose(0, 1).contiguous().transpose(0, 1), rotation, widths)
    with pytest.raises(ValueError, match="expected one layout"):
        split_heads_backward(*(torch.zeros(2, 5, 2, 24)[..., :23] for _ in range(3)), rotation, widths)
