"""Token embedding and output head, which stay in BF16 / FP32, and which the MTP module shares.

The gradient of the embedding's row v is the sum of dy over all tokens that are v. The switch
`embedding.backward` says in which order: `sorted` (tokens sorted by v, stable, so in the order of the
text) or `atomic` (as they arrive).

Legend: T tokens, V vocabulary, D model width.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcheck.reference_runs.arrival import arrival_permutation
from bitcheck.reference_runs.device import gpu_forms
from bitcheck.reference_runs.linear import bf16_parameter


def embedding_grad(dy_TD: Tensor, ids_T: Tensor, vocab: int, is_fixed: bool) -> Tensor:
    """Return the gradient of the table, float32 [V, D], from `dy_TD` and int64 `ids_T`.

    Deterministic where `is_fixed`: `index_add_` on a CPU adds rows one after the other, and the stable
    sort fixes their order. A row is one run of equal ids, which is how a GPU kernel owns it alone.
    """
    order_T = ids_T.argsort(stable=True) if is_fixed else arrival_permutation(ids_T.numel()).to(ids_T.device)
    dy_TD = dy_TD.float()
    return dy_TD.new_zeros(vocab, dy_TD.shape[1]).index_add_(0, ids_T[order_T], dy_TD[order_T])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, table_VD: Tensor, is_fixed: bool) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.vocab, ctx.is_fixed = table_VD.shape[0], is_fixed
        return table_VD[ids_T].float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ids_T,) = ctx.saved_tensors
        return None, embedding_grad(gradients[0], ids_T, ctx.vocab, ctx.is_fixed), None


class Embedding(nn.Module):
    """Rows of a table."""

    def __init__(self, vocab: int, d_model: int, init_std: float, is_fixed: bool) -> None:
        super().__init__()
        self.weight = bf16_parameter(torch.randn(vocab, d_model) * init_std)
        self.is_fixed = is_fixed

    def forward(self, ids: Tensor) -> Tensor:
        """Return float32 [..., D] for int64 `ids` of any shape.

        FP32, so that dropout scales, and the gradient arrives, without another rounding.
        """
        gpu = gpu_forms(self.weight)
        embed = _Embedding.apply if gpu is None else gpu.embedding
        y: Tensor = embed(ids.reshape(-1), self.weight, self.is_fixed)
        return y.view(*ids.shape, -1)


class _FullPrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def full_precision(parameter: Tensor) -> Tensor:
    """Return a BF16 parameter as float32 such that its gradient stays float32.

    `parameter.float()` would round the gradient to BF16 on its way back.
    """
    value: Tensor = _FullPrecision.apply(parameter)
    return value


def wide_linear(x: Tensor, weight: nn.Parameter) -> Tensor:
    """Return x w^T, float32 [..., N], for bfloat16 `x` [..., K] and BF16 `weight` [N, K]; its gradient is float32."""
    gpu = gpu_forms(x)
    y: Tensor = F.linear(x.float(), full_precision(weight)) if gpu is None else gpu.wide_linear(x, weight)
    return y


class Head(nn.Module):
    """Logits over the vocabulary, in FP32."""

    def __init__(self, d_model: int, vocab: int, init_std: float) -> None:
        super().__init__()
        self.weight = bf16_parameter(torch.randn(vocab, d_model) * init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [..., V] for bfloat16 `x` [..., D]."""
        return wide_linear(x, self.weight)
