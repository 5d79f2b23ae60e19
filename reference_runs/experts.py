"""SwiGLU feed-forward networks: one (dense layers, the shared expert) or one per group (experts).

    up     h = x w13^T            [R, 2F]: the gate's half, then the other
    down   y = (p * silu(h1) * h3) w2^T

`down` is one autograd function, because V3 keeps only its input: h is cached in FP8 and the SwiGLU is
computed again in backward (report, section 3.3.3). The routing probability p is applied before the
second GEMM, so its gradient is a reduction in the epilogue of that GEMM's dgrad: see `dprob`. At the
level of modules it is the gradient of the second argument of `experts.down`.

Legend: R rows (tokens, or tokens times their experts, sorted by expert), D model width, F expert
width, E experts.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.device import gpu_products
from bitcheck.reference_runs.dprob import reduce_dprob
from bitcheck.reference_runs.fp8 import TILE, dequantize_rows, quantize_columns, quantize_rows
from bitcheck.reference_runs.gemm import WGRAD_SPLIT, Tiled, gemm, gemm_bf16, wgrad, wgrad_bf16
from bitcheck.reference_runs.linear import (
    GemmOptions,
    GroupedLinear,
    Linear,
    Offsets,
    Precision,
    Weight,
    offsets_from_loads,
)


def swiglu(h_R2F: Tensor) -> Tensor:
    """Return silu(h1) * h3 of the two halves of `h_R2F`, in its dtype."""
    gate_RF, other_RF = h_R2F.chunk(2, -1)
    return gate_RF * torch.sigmoid(gate_RF) * other_RF


def swiglu_backward(h_R2F: Tensor, dact_RF: Tensor) -> Tensor:
    """Return the gradient of `swiglu`'s input, [R, 2F], in its dtype."""
    gate_RF, other_RF = h_R2F.chunk(2, -1)
    sigmoid_RF = torch.sigmoid(gate_RF)
    dgate_RF = dact_RF * other_RF * sigmoid_RF * (1 + gate_RF * (1 - sigmoid_RF))
    return torch.cat((dgate_RF, dact_RF * gate_RF * sigmoid_RF), -1)


class _WeightedSwiGLULinear(torch.autograd.Function):
    """y = (p * swiglu(h)) w^T per group; h, y bfloat16, p float32 or None, gradient of w float32."""

    @staticmethod
    def forward(
        ctx: Any,
        h_R2F: Tensor,
        prob_R: Tensor | None,
        weight: Tensor,
        codes: Tensor | None,
        scale: Tensor | None,
        offsets: Offsets,
        options: GemmOptions,
        dprob_form: str,
    ) -> Tensor:
        ctx.offsets, ctx.options, ctx.dprob_form, ctx.weight_shape = offsets, options, dprob_form, weight.shape
        a_RF = _weighted(swiglu(h_R2F.float()), prob_R)
        if codes is None or scale is None:
            ctx.save_for_backward(prob_R, h_R2F, weight)
            return gemm_bf16(a_RF.bfloat16(), weight.view(-1, *weight.shape[-2:]), offsets).bfloat16()
        a = Tiled(*quantize_rows(a_RF, power_of_two=False))
        ctx.save_for_backward(prob_R, *quantize_rows(h_R2F, power_of_two=False), codes, scale)
        return gemm(a, Tiled(codes, scale), offsets).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_RD,) = gradients
        offsets, (power_of_two, is_fixed, split) = ctx.offsets, ctx.options
        prob_R, *saved = ctx.saved_tensors
        if len(saved) == 2:
            h_bf16_R2F, weight = saved
            h_R2F = h_bf16_R2F.float()
            da_RF = gemm_bf16(dy_RD, weight.view(-1, *weight.shape[-2:]).transpose(1, 2), offsets)
        else:
            h_codes, h_scale, codes, scale = saved
            h_R2F = dequantize_rows(h_codes, h_scale)
            dy = Tiled(*quantize_rows(dy_RD, power_of_two))
            da_RF = gemm(dy, Tiled(codes.transpose(1, 2), scale.transpose(1, 2)), offsets)
        act_RF = swiglu(h_R2F)
        a_RF = _weighted(act_RF, prob_R)
        if len(saved) == 2:
            dw = wgrad_bf16(dy_RD, a_RF.bfloat16(), offsets, is_fixed, split)
        else:
            dw = wgrad(
                Tiled(*quantize_columns(dy_RD, offsets, power_of_two)),
                Tiled(*quantize_columns(a_RF, offsets, power_of_two=False)),
                offsets,
                is_fixed,
                split,
            )
        dprob_R = None if prob_R is None else reduce_dprob(da_RF, act_RF, ctx.dprob_form)
        dh_R2F = swiglu_backward(h_R2F, _weighted(da_RF, prob_R))
        return dh_R2F.bfloat16(), dprob_R, dw.view(ctx.weight_shape), None, None, None, None, None


def _weighted(x_RF: Tensor, prob_R: Tensor | None) -> Tensor:
    return x_RF if prob_R is None else x_RF * prob_R[:, None]


class WeightedDown(Weight):
    """The second half of the experts: SwiGLU, routing probability, and w2."""

    def __init__(
        self,
        num_experts: int,
        width: int,
        d_model: int,
        precision: Precision,
        init_std: float,
        dprob_form: str,
        is_wgrad_fixed: bool,
    ) -> None:
        super().__init__((num_experts, d_model, width), precision, init_std)
        self.dprob_form = dprob_form
        self.options = GemmOptions(True, is_wgrad_fixed, WGRAD_SPLIT)

    def forward(self, h_R2F: Tensor, prob_R: Tensor, loads_E: Tensor) -> Tensor:
        """Return y bfloat16 [R, D] from `h_R2F` bfloat16, `prob_R` float32 and `loads_E` int64."""
        y_RD: Tensor
        if (gpu := gpu_products(self.weight)) is not None:
            y_RD = gpu.weighted_down(self, h_R2F, prob_R, loads_E, self.options, self.dprob_form)
        else:
            y_RD = _WeightedSwiGLULinear.apply(
                h_R2F, prob_R, *self.operands(), offsets_from_loads(loads_E), self.options, self.dprob_form
            )
        return y_RD


class Down(Weight):
    """The second half of a dense feed-forward: SwiGLU and w2."""

    def __init__(self, width: int, d_model: int, precision: Precision, init_std: float) -> None:
        super().__init__((d_model, width), precision, init_std)
        self.options = GemmOptions(False, True, TILE)

    def forward(self, h_T2F: Tensor) -> Tensor:
        """Return y bfloat16 [T, D] from `h_T2F` bfloat16."""
        y_TD: Tensor
        if (gpu := gpu_products(self.weight)) is not None:
            y_TD = gpu.down(self, h_T2F)
        else:
            rows = (0, h_T2F.shape[0])
            y_TD = _WeightedSwiGLULinear.apply(h_T2F, None, *self.operands(), rows, self.options, "")
        return y_TD


class Experts(nn.Module):
    """All routed experts: rows sorted by expert in, rows out, each weighted by its probability."""

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        width: int,
        precision: Precision,
        init_std: float,
        dprob_form: str,
        is_wgrad_fixed: bool,
    ) -> None:
        super().__init__()
        self.up = GroupedLinear(num_experts, d_model, 2 * width, precision, init_std, is_wgrad_fixed)
        self.down = WeightedDown(num_experts, width, d_model, precision, init_std, dprob_form, is_wgrad_fixed)

    def keep(self, first: int, count: int) -> None:
        """Keep `count` experts from `first` on; other ranks have the others."""
        self.up.keep_groups(first, count)
        self.down.keep_groups(first, count)

    def forward(self, x_RD: Tensor, prob_R: Tensor, loads_E: Tensor) -> Tensor:
        """Return y bfloat16 [R, D] from `x_RD` bfloat16, `prob_R` float32 and `loads_E` int64."""
        y_RD: Tensor = self.down(self.up(x_RD, loads_E), prob_R, loads_E)
        return y_RD


class FeedForward(nn.Module):
    """A dense SwiGLU network: the first layers' feed-forward, and the shared expert."""

    def __init__(self, d_model: int, width: int, precision: Precision, init_std: float) -> None:
        super().__init__()
        self.up = Linear(d_model, 2 * width, precision, init_std)
        self.down = Down(width, d_model, precision, init_std)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return y bfloat16 [T, D] from `x_TD` bfloat16."""
        y_TD: Tensor = self.down(self.up(x_TD))
        return y_TD
