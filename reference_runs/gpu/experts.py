"""Products over experts, and the second half of a SwiGLU network, dense or over experts.

In FP8 these are the trainer's kernels: torch has no grouped product with blockwise scales. In BF16 they are
`torch.nn.functional.grouped_mm`. Where an expert's rows begin stays on the device (`kernels.schedule`).

The switch `moe.dprob` is the epilogue of the grouped dgrad. In BF16 there is no such epilogue: the SwiGLU's
backward sums a row's products, in slots whatever the switch says. `moe.wgrad` in FP8: `workspace` is one program
a tile of the gradient, with nothing to add up; `atomic` three that race. In BF16 grouped_mm has one program a
tile.

Legend: R rows sorted by expert, D model width, F expert width, E experts, N features out, K features in.
"""

# PyTorch leaves Function.apply and autograd's context without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bitcheck.reference_runs.gpu.dense import Pair, pair, product, products_backward
from bitcheck.reference_runs.kernels import swiglu_quantise
from bitcheck.reference_runs.kernels.grouped_gemm import grouped_dgrad_swiglu, grouped_gemm
from bitcheck.reference_runs.kernels.grouped_wgrad import grouped_wgrad
from bitcheck.reference_runs.kernels.quantise import Quantised, quantise_columns, quantise_rows
from bitcheck.reference_runs.kernels.schedule import GroupSchedule, schedule_groups
from bitcheck.reference_runs.kernels.swiglu import (
    cached_swiglu_backward,
    cached_swiglu_forward,
    swiglu_backward,
    swiglu_forward,
    swiglu_prob_backward,
)
from bitcheck.reference_runs.linear import GemmOptions, Weight

WGRAD_PARTS = 3
"""Split-K parts of an expert's weight gradient in the form `atomic`: two terms have the same sum in either order.

In `workspace` one part is faster than any number (benchmarks/results)."""

_SCHEDULES: Any = WeakTensorKeyDictionary()
"""The schedule of a tensor of loads: a layer's two products ask for the same one."""


def remember_schedule(loads_E: Tensor, offsets: Tensor, num_rows: int) -> None:
    """Lay out the tiles of `num_rows` rows with `loads_E` an expert, whose bounds are `offsets`, int32 [E + 1]."""
    _SCHEDULES[loads_E] = schedule_groups(offsets, num_rows)


def _schedule(loads_E: Tensor, num_rows: int) -> GroupSchedule:
    if loads_E not in _SCHEDULES:
        remember_schedule(loads_E, F.pad(loads_E.cumsum(0), (1, 0)).int(), num_rows)
    schedule: GroupSchedule = _SCHEDULES[loads_E]
    return schedule


def _wgrad(dy: Quantised, x: Quantised, schedule: GroupSchedule, options: GemmOptions) -> Tensor:
    """Return the experts' weight gradients, float32 [E, N, K], from `dy` and `x` in columns."""
    return grouped_wgrad(
        dy,
        x,
        schedule,
        form="workspace" if options.is_wgrad_fixed else "atomic",
        num_parts=1 if options.is_wgrad_fixed else WGRAD_PARTS,
    )


def _activate(h_R2F: Tensor, prob_R: Tensor | None) -> tuple[Quantised, Quantised]:
    """Return (p * swiglu(h), h), both quantised in rows: what the second product reads, and what is cached."""
    if swiglu_quantise.takes(h_R2F.shape[1] // 2):
        return swiglu_quantise.swiglu_quantise(h_R2F, prob_R)
    gate_RF, up_RF = h_R2F.chunk(2, -1)
    return quantise_rows(swiglu_forward(gate_RF, up_RF, prob_R)), quantise_rows(h_R2F)


def _activate_again(h: Quantised, prob_R: Tensor | None, schedule: GroupSchedule | None) -> Quantised:
    """Return p * swiglu(h) in columns from the cached `h`: what the weight gradient reads."""
    if swiglu_quantise.takes(h.values.shape[1] // 2):
        return swiglu_quantise.swiglu_columns(h, prob_R, schedule)
    return quantise_columns(cached_swiglu_forward(h, prob_R), schedule)


def _wgrad_bf16(dy_RN: Tensor, x_RK: Tensor, schedule: GroupSchedule) -> Tensor:
    """Return what `_wgrad` does for BF16 operands: as grouped_mm gives it, in BF16, widened."""
    dw_ENK = F.grouped_mm(dy_RN.t(), x_RK, offs=schedule.offsets[1:])
    # Of an expert without rows nothing is promised; in the same pass the gradient becomes float32.
    has_rows_E = schedule.offsets.diff() > 0
    return torch.where(has_rows_E[:, None, None], dw_ENK, dw_ENK.new_zeros(1, 1, 1, dtype=torch.float32))


def _bf16(x_RK: Tensor, w_EKN: Tensor, schedule: GroupSchedule) -> Tensor:
    return F.grouped_mm(x_RK, w_EKN, offs=schedule.offsets[1:])


class _GroupedLinear(torch.autograd.Function):
    """y = x w^T per expert. x bfloat16 [R, K], y bfloat16 [R, N], gradient of w float32."""

    @staticmethod
    def forward(
        ctx: Any, x_RK: Tensor, weight: Tensor, weights: Pair | None, schedule: GroupSchedule, options: GemmOptions
    ) -> Tensor:
        ctx.weights, ctx.schedule, ctx.options = weights, schedule, options
        if weights is None:
            ctx.save_for_backward(x_RK, weight)
            return _bf16(x_RK, weight.transpose(1, 2), schedule)
        x = quantise_rows(x_RK, power_of_two=options.power_of_two)
        ctx.save_for_backward(x.values, x.scales)
        return grouped_gemm(x, weights[0], schedule)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_RN = gradients[0].contiguous()
        first, second = ctx.saved_tensors
        if ctx.weights is None:
            dx_RK = _bf16(dy_RN, second, ctx.schedule)
            return dx_RK, _wgrad_bf16(dy_RN, first, ctx.schedule), None, None, None
        dx_RK = grouped_gemm(quantise_rows(dy_RN), ctx.weights[1], ctx.schedule)
        dy = quantise_columns(dy_RN, ctx.schedule)
        x = quantise_columns(Quantised(first, second, 1), ctx.schedule, power_of_two=ctx.options.power_of_two)
        dw_ENK = _wgrad(dy, x, ctx.schedule, ctx.options)
        return dx_RK, dw_ENK, None, None, None


def grouped_linear(module: Weight, x_RK: Tensor, loads_E: Tensor, options: GemmOptions) -> Tensor:
    """Return bfloat16 [R, N] for bfloat16 `x_RK` sorted by expert; `loads_E` int64 counts each expert's rows."""
    schedule = _schedule(loads_E, x_RK.shape[0])
    y_RN: Tensor = _GroupedLinear.apply(x_RK, module.weight, pair(module, is_grouped=True), schedule, options)
    return y_RN


class _WeightedDown(torch.autograd.Function):
    """y = (p * swiglu(h)) w^T per expert; h, y bfloat16, p float32, gradient of w float32."""

    @staticmethod
    def forward(
        ctx: Any,
        h_R2F: Tensor,
        prob_R: Tensor,
        weight: Tensor,
        weights: Pair | None,
        schedule: GroupSchedule,
        options: GemmOptions,
        dprob_form: Any,
    ) -> Tensor:
        ctx.weights, ctx.schedule, ctx.options, ctx.dprob_form = weights, schedule, options, dprob_form
        if weights is None:
            ctx.save_for_backward(prob_R, h_R2F, weight)
            gate_RF, up_RF = h_R2F.chunk(2, -1)
            return _bf16(swiglu_forward(gate_RF, up_RF, prob_R), weight.transpose(1, 2), schedule)
        a, h = _activate(h_R2F, prob_R)
        ctx.save_for_backward(prob_R, h.values, h.scales)
        return grouped_gemm(a, weights[0], schedule)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_RD = gradients[0].contiguous()
        prob_R, first, second = ctx.saved_tensors
        schedule, options = ctx.schedule, ctx.options
        if ctx.weights is None:
            gate_RF, up_RF = first.chunk(2, -1)
            da_RF = _bf16(dy_RD, second, schedule)
            dh_R2F, dprob_R = swiglu_prob_backward(da_RF, gate_RF, up_RF, prob_R)
            dw = _wgrad_bf16(dy_RD, swiglu_forward(gate_RF, up_RF, prob_R), schedule)
        else:
            h = Quantised(first, second, 1)
            dy = quantise_rows(dy_RD, power_of_two=options.power_of_two)
            dh_R2F, dprob_R = grouped_dgrad_swiglu(dy, ctx.weights[1], schedule, h, prob_R, form=ctx.dprob_form)
            dy = quantise_columns(dy_RD, schedule, power_of_two=options.power_of_two)
            dw = _wgrad(dy, _activate_again(h, prob_R, schedule), schedule, options)
        return dh_R2F, dprob_R, dw, None, None, None, None


def weighted_down(
    module: Weight, h_R2F: Tensor, prob_R: Tensor, loads_E: Tensor, options: GemmOptions, dprob_form: str
) -> Tensor:
    """Return bfloat16 [R, D] for bfloat16 `h_R2F` and float32 `prob_R`, both sorted by expert."""
    schedule = _schedule(loads_E, h_R2F.shape[0])
    weights = pair(module, is_grouped=True)
    y_RD: Tensor = _WeightedDown.apply(h_R2F, prob_R, module.weight, weights, schedule, options, dprob_form)
    return y_RD


class _Down(torch.autograd.Function):
    """y = swiglu(h) w^T; h, y bfloat16, gradient of w float32."""

    @staticmethod
    def forward(ctx: Any, h_T2F: Tensor, weight: Tensor, weights: Pair | None) -> Tensor:
        ctx.weights = weights
        if weights is None:
            ctx.save_for_backward(h_T2F, weight)
            gate_TF, up_TF = h_T2F.chunk(2, -1)
            return swiglu_forward(gate_TF, up_TF) @ weight.t()
        a, h = _activate(h_T2F, None)
        ctx.save_for_backward(h.values, h.scales)
        return product(a, weights[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_TD = gradients[0].contiguous()
        first, second = ctx.saved_tensors
        if ctx.weights is None:
            gate_TF, up_TF = first.chunk(2, -1)
            da_TF, dw = products_backward(dy_TD, second, swiglu_forward(gate_TF, up_TF))
            return swiglu_backward(da_TF, gate_TF, up_TF), dw, None
        h = Quantised(first, second, 1)
        da_TF, dw = products_backward(dy_TD, ctx.weights, _activate_again(h, None, None))
        return cached_swiglu_backward(da_TF, h), dw, None


def down(module: Weight, h_T2F: Tensor) -> Tensor:
    """Return bfloat16 [T, D] for bfloat16 `h_T2F`; `module` has one weight [D, F]."""
    y_TD: Tensor = _Down.apply(h_T2F, module.weight, pair(module))
    return y_TD
