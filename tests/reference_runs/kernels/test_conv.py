"""The convolution against plain PyTorch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bitcheck.reference_runs.kernels.conv import conv_silu_backward, conv_silu_forward, reference_conv_silu


@pytest.mark.parametrize(("seq_len", "num_cols", "width"), [(7, 24, 4), (130, 70, 4), (3, 8, 5)])
def test_values_and_gradients_are_those_of_plain_pytorch(device: str, seq_len: int, num_cols: int, width: int) -> None:
    wide = torch.randn(2, seq_len, num_cols + 16, device=device)
    x = wide[..., 8 : 8 + num_cols]  # strided rows, as a split leaves them
    kernel, dy = torch.randn(width, num_cols, device=device), torch.randn(2, seq_len, num_cols, device=device)
    leaves = [x.double().detach().requires_grad_(), kernel.double().requires_grad_()]
    expected = reference_conv_silu(*leaves)
    expected.backward(dy.double())
    torch.testing.assert_close(conv_silu_forward(x, kernel).double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for actual, leaf in zip(conv_silu_backward(dy, x, kernel), leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(actual.double(), leaf.grad, rtol=1e-4, atol=1e-4)


def test_the_order_of_the_programs_does_not_show(count_results: Callable[..., int]) -> None:
    x, kernel, dy = torch.randn(2, 130, 24), torch.randn(4, 24), torch.randn(2, 130, 24)
    assert count_results(lambda: (conv_silu_forward(x, kernel), *conv_silu_backward(dy, x, kernel))) == 1


def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    x, kernel = torch.randn(2, 8, 6, device=device), torch.randn(4, 6, device=device)
    with pytest.raises(ValueError, match="expected \\[B, S, C\\] and"):
        conv_silu_forward(x, kernel[:, 1:])
    with pytest.raises(ValueError, match="contiguous channels"):
        conv_silu_forward(x.transpose(1, 2).contiguous().transpose(1, 2), kernel)
