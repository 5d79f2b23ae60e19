"""RMSNorm (Zhang and Sennrich 2019), recomputed in backward, and the forms of its weight's gradient.

    y = x * rstd * w      rstd = 1 / sqrt(mean(x^2) + eps)
    dw[d] = sum over t of dy[t, d] * x[t, d] * rstd[t]

Only x is kept: rstd and the normalised x are computed again in backward (V3 report, section 3.2.3).
dw sums over all tokens. On a GPU each program sums a block of rows; the switch `norm.dweight` says how
the blocks' sums meet: `two-stage` (a workspace, then added in order) or `atomic` (as they arrive).

Legend: T tokens, D features, P blocks of rows.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcheck.reference_runs.arrival import sum_parts
from bitcheck.reference_runs.device import gpu_forms
from bitcheck.reference_runs.linear import bf16_parameter

ROWS = 32
"""Rows in a block; pinned, because another size gives other bits."""


def reduce_dweight(products_TD: Tensor, is_fixed: bool) -> Tensor:
    """Return the sum of `products_TD` float32 over tokens, float32 [D], block by block.

    Deterministic where `is_fixed`: the blocks' sums are added in ascending order.
    """
    num_rows, num_features = products_TD.shape
    padded = F.pad(products_TD, (0, 0, 0, -num_rows % ROWS))
    parts_PD = padded.view(-1, ROWS, num_features).sum(1)
    return sum_parts(parts_PD, is_fixed)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float, is_fixed: bool) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps, ctx.is_fixed = eps, is_fixed
        x_TD = x_TD.float()
        return (x_TD * _rstd(x_TD, eps) * weight_D.float()).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved_TD, weight_D = ctx.saved_tensors
        dy_TD, x_TD = gradients[0].float(), saved_TD.float()
        rstd_T1 = _rstd(x_TD, ctx.eps)
        normed_TD = x_TD * rstd_T1
        dnormed_TD = dy_TD * weight_D.float()
        dx_TD = (dnormed_TD - normed_TD * (dnormed_TD * normed_TD).mean(-1, keepdim=True)) * rstd_T1
        return dx_TD.to(saved_TD.dtype), reduce_dweight(dy_TD * normed_TD, ctx.is_fixed), None, None


def _rstd(x_TD: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square, then by a learned weight."""

    def __init__(self, num_features: int, eps: float, is_fixed: bool) -> None:
        super().__init__()
        self.weight = bf16_parameter(torch.ones(num_features))
        self.eps, self.is_fixed = eps, is_fixed

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`, bfloat16 or float32; returns bfloat16 of its shape."""
        gpu = gpu_forms(x)
        normalise = _RMSNorm.apply if gpu is None else gpu.rms_norm
        y: Tensor = normalise(x.reshape(-1, x.shape[-1]), self.weight, self.eps, self.is_fixed)
        return y.view_as(x)
