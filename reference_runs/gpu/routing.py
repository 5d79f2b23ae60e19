"""Routing on the device: which rows each expert gets, and the way there and back. Nothing waits for the GPU.

Legend: T tokens, E experts, K chosen experts a token, R = T K rows sorted by expert, D model width.
"""

# PyTorch leaves Function.apply and autograd's context without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitcheck.reference_runs.gpu.experts import remember_schedule
from bitcheck.reference_runs.kernels.combine import combine as combine_rows
from bitcheck.reference_runs.kernels.combine import invert_permutation
from bitcheck.reference_runs.kernels.quantise import round_rows
from bitcheck.reference_runs.kernels.topk import topk


def select_top(scores_TE: Tensor, count: int, is_stable: bool) -> Tensor:
    """Return the indices of the `count` largest in each row, int64 [T, count]: the switch `moe.topk`."""
    return topk(scores_TE, count, form="stable" if is_stable else "unstable")


def make_plan(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the row of each slot int64 [T, K], the slot of each row int64 [R], rows of each expert int64 [E]).

    Stable: an expert's rows keep the tokens' order.
    """
    flat = experts_TK.flatten().int()
    sorted_R, slot_R = flat.sort(stable=True)
    every = torch.arange(num_experts + 1, dtype=torch.int32, device=flat.device)
    offsets = torch.searchsorted(sorted_R, every, out_int32=True)
    loads_E = offsets.diff().long()
    remember_schedule(loads_E, offsets, slot_R.numel())
    return invert_permutation(slot_R).view_as(experts_TK), slot_R, loads_E


class _ScoresOfChosen(torch.autograd.Function):
    """s[t, chosen[t, k]]. Each (token, expert) is chosen once at most, so nothing is added up on the way back."""

    @staticmethod
    def forward(ctx: Any, s_TE: Tensor, experts_TK: Tensor) -> Tensor:
        ctx.save_for_backward(experts_TK)
        ctx.num_experts = s_TE.shape[1]
        return s_TE.gather(1, experts_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (experts_TK,) = ctx.saved_tensors
        every = torch.arange(ctx.num_experts, device=experts_TK.device)
        # One comparison an element instead of a scatter: PyTorch sorts for that in its deterministic mode.
        is_chosen_TKE = experts_TK[..., None] == every
        return torch.where(is_chosen_TKE, gradients[0][..., None], 0.0).sum(1), None


def scores_of_chosen(s_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return the affinities to the chosen experts, float32 [T, K]."""
    s_TK: Tensor = _ScoresOfChosen.apply(s_TE, experts_TK)
    return s_TK


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prob_TK: Tensor, row_TK: Tensor, slot_R: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return prob_TK.flatten()[slot_R]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return gradients[0][row_TK], None, None


def permute_probabilities(prob_TK: Tensor, row_TK: Tensor, slot_R: Tensor) -> Tensor:
    """Return the weights float32 `prob_TK` sorted by expert, [R]."""
    prob_R: Tensor = _Permute.apply(prob_TK, row_TK, slot_R)
    return prob_R


def _add_up(y_RD: Tensor, row_TK: Tensor, is_fixed: bool) -> Tensor:
    """Return each token's K rows of `y_RD` added up, bfloat16 [T, D]: the switch `moe.combine`."""
    return combine_rows(y_RD, row_TK, form="gather" if is_fixed else "atomic")


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_TK: Tensor, slot_R: Tensor, is_fp8: bool, is_fixed: bool) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.is_fixed = is_fixed
        if is_fp8:
            # Four bits of mantissa times a power of two is a BF16 number: the experts' cast changes no value.
            x_TD = round_rows(x_TD)
        return x_TD[slot_R // row_TK.shape[1]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        return _add_up(gradients[0].contiguous(), row_TK, ctx.is_fixed), None, None, None, None


def dispatch(x_TD: Tensor, row_TK: Tensor, slot_R: Tensor, is_fp8: bool, is_fixed: bool) -> Tensor:
    """Return bfloat16 [R, D] for bfloat16 `x_TD`, as FP8 with powers of two as scales leaves it where `is_fp8`."""
    x_RD: Tensor = _Dispatch.apply(x_TD, row_TK, slot_R, is_fp8, is_fixed)
    return x_RD


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, shared_TD: Tensor, row_TK: Tensor, slot_R: Tensor, is_fixed: bool) -> Tensor:
        ctx.save_for_backward(slot_R)
        ctx.top_k = row_TK.shape[1]
        return _add_up(y_RD, row_TK, is_fixed).add_(shared_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slot_R,) = ctx.saved_tensors
        return gradients[0][slot_R // ctx.top_k], gradients[0], None, None, None


def combine(y_RD: Tensor, shared_TD: Tensor, row_TK: Tensor, slot_R: Tensor, is_fixed: bool) -> Tensor:
    """Return bfloat16 [T, D]: the shared expert's output plus each token's rows, bfloat16."""
    out_TD: Tensor = _Combine.apply(y_RD, shared_TD, row_TK, slot_R, is_fixed)
    return out_TD
