"""The attention core: causal softmax attention over heads, and the forms of its backward.

    p = softmax(q k^T / sqrt(d) + causal mask)        o = p v

Backward as in FlashAttention-2 (Dao 2023, section 3.1): p is computed again from q, k and the row's
log-sum-exp. A query's gradient is a sum over blocks of keys, each worked on by a program of its own;
the switch `attention.backward` says how the blocks' parts meet: `deterministic` (ascending) or `fast`
(atomic additions, as they arrive).

Legend: B sequences, H heads, S queries, U keys, C width of q and k, V width of v.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.arrival import sum_parts
from bitcheck.reference_runs.device import gpu_forms

BLOCK_U = 16
"""Keys in a block; pinned, because another size gives other bits."""


def attend(q_BHSC: Tensor, k_BHUC: Tensor, v_BHUV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o float32 [B, H, S, V], log-sum-exp float32 [B, H, S]) of float32 operands, S = U."""
    scores_BHSU = _scores(q_BHSC, k_BHUC)
    max_BHS1 = scores_BHSU.amax(-1, keepdim=True)
    weights_BHSU = scores_BHSU.sub_(max_BHS1).exp_()
    sum_BHS1 = weights_BHSU.sum(-1, keepdim=True)
    return (weights_BHSU @ v_BHUV).div_(sum_BHS1), (max_BHS1 + sum_BHS1.log()).squeeze(-1)


def attend_backward(
    do_BHSV: Tensor, q_BHSC: Tensor, k_BHUC: Tensor, v_BHUV: Tensor, lse_BHS: Tensor, is_fixed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, float32, from float32 operands.

    Deterministic where `is_fixed`: key blocks are added to a query's gradient in ascending order.
    """
    p_BHSU = _scores(q_BHSC, k_BHUC).sub_(lse_BHS[..., None]).exp_()
    dv_BHUV = p_BHSU.transpose(-1, -2) @ do_BHSV
    dp_BHSU = do_BHSV @ v_BHUV.transpose(-1, -2)
    # Equal to the row sum of do * o, which FlashAttention uses in order not to need p for it.
    delta_BHS1 = (dp_BHSU * p_BHSU).sum(-1, keepdim=True)
    ds_BHSU = dp_BHSU.sub_(delta_BHS1).mul_(p_BHSU).mul_(1 / math.sqrt(q_BHSC.shape[-1]))
    dk_BHUC = ds_BHSU.transpose(-1, -2) @ q_BHSC
    blocks = zip(ds_BHSU.split(BLOCK_U, -1), k_BHUC.split(BLOCK_U, -2), strict=True)
    dq_BHSC = sum_parts([ds @ k for ds, k in blocks], is_fixed)
    return dq_BHSC, dk_BHUC, dv_BHUV


def _scores(q_BHSC: Tensor, k_BHUC: Tensor) -> Tensor:
    position_S = torch.arange(q_BHSC.shape[-2], device=q_BHSC.device)
    future_SU = position_S[:, None] < position_S
    scores_BHSU = (q_BHSC @ k_BHUC.transpose(-1, -2)).mul_(1 / math.sqrt(q_BHSC.shape[-1]))
    return scores_BHSU.masked_fill_(future_SU, -math.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHSC: Tensor, k_BHUC: Tensor, v_BHUV: Tensor, is_fixed: bool) -> Tensor:
        o_BHSV, lse_BHS = attend(q_BHSC.float(), k_BHUC.float(), v_BHUV.float())
        ctx.save_for_backward(q_BHSC, k_BHUC, v_BHUV, lse_BHS)
        ctx.is_fixed = is_fixed
        return o_BHSV.to(v_BHUV.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lse = ctx.saved_tensors
        grads = attend_backward(gradients[0].float(), q.float(), k.float(), v.float(), lse, ctx.is_fixed)
        return *(grad.to(operand.dtype) for grad, operand in zip(grads, (q, k, v), strict=True)), None


class Kept:
    """What one forward leaves for its own recomputation: nothing before the first, and again after the second.

    An object of its own and no list: a recorder would take a list's tensors for the module's arguments.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] | None = None

    def put(self, *tensors: Tensor) -> None:
        """Leave `tensors` for the second time."""
        self._tensors = tensors

    def take(self) -> tuple[Tensor, ...] | None:
        """Return what is there, which is then gone."""
        tensors, self._tensors = self._tensors, None
        return tensors


class AttentionCore(nn.Module):
    """Causal attention over heads, with no parameters of its own."""

    def __init__(self, is_fixed: bool) -> None:
        super().__init__()
        self.is_fixed = is_fixed

    def forward(self, q_BHSC: Tensor, k_BHUC: Tensor, v_BHUV: Tensor, kept: Kept | None = None) -> Tensor:
        """Return o [B, H, S, V] in the dtype of v; operands are bfloat16 or float32, computed in float32.

        On a GPU they are bfloat16, and sums float32; inside a checkpointed region `kept` spares the second forward.
        """
        o_BHSV: Tensor
        if (gpu := gpu_forms(q_BHSC)) is not None:
            o_BHSV = gpu.attention(q_BHSC, k_BHUC, v_BHUV, self.is_fixed, kept)
        else:
            o_BHSV = _Attention.apply(q_BHSC, k_BHUC, v_BHUV, self.is_fixed)
        return o_BHSV
