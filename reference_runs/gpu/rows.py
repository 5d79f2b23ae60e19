"""RMSNorm and the embedding on Triton kernels.

Legend: T tokens, D features, V vocabulary.
"""

# PyTorch leaves Function.apply and autograd's context without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcheck.reference_runs.kernels.embedding import embedding_backward
from bitcheck.reference_runs.kernels.norm import rmsnorm_backward, rmsnorm_forward


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row; the normalised x is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float, is_fixed: bool) -> Tensor:
        y_TD, rstd_T = rmsnorm_forward(x_TD, weight_D, eps=eps, out_dtype=torch.bfloat16)
        ctx.save_for_backward(x_TD, weight_D, rstd_T)
        ctx.is_fixed = is_fixed
        return y_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        form: Any = "two-stage" if ctx.is_fixed else "atomic"
        dx_TD, dw_D = rmsnorm_backward(gradients[0].contiguous(), *ctx.saved_tensors, form=form)
        return dx_TD, dw_D, None, None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, is_fixed: bool) -> Tensor:
    """Return bfloat16 [T, D] for `x_TD`, bfloat16 or float32; `is_fixed`: `norm.dweight` in two stages."""
    y_TD: Tensor = _RMSNorm.apply(x_TD, weight_D, eps, is_fixed)
    return y_TD


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, table_VD: Tensor, is_fixed: bool) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.vocab, ctx.is_fixed = table_VD.shape[0], is_fixed
        return F.embedding(ids_T, table_VD).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ids_T,) = ctx.saved_tensors
        form: Any = "sorted" if ctx.is_fixed else "atomic"
        return None, embedding_backward(gradients[0].contiguous(), ids_T, ctx.vocab, form=form), None


def embedding(ids_T: Tensor, table_VD: Tensor, is_fixed: bool) -> Tensor:
    """Return float32 [T, D] for int64 `ids_T`; `is_fixed`: `embedding.backward` sorted."""
    y_TD: Tensor = _Embedding.apply(ids_T, table_VD, is_fixed)
    return y_TD
