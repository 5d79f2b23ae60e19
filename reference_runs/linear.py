"""Linear layers whose three matrix products run in FP8 (or BF16), over one or several groups of rows.

    fprop   x in tiles of 1 x 128, weights in blocks of 128 x 128
    dgrad   dy in tiles of 1 x 128, the same blocks
    wgrad   dy and the cached x requantised in tiles of 128 x 1

The input is cached in FP8, half the memory of BF16 (V3 report, section 3.3.3). The weight gradient
leaves in FP32 and is accumulated in FP32 although the weight is BF16 (`Tensor.grad_dtype`).

A weight exists three times: FP32 in the optimizer (the truth), BF16 as the parameter, E4M3 codes and
scales as buffers. The last two are derived, always by `Weight.derive`, after each optimizer step and
when a checkpoint is loaded: FP8 -> dequantise -> FP8 would not give the same codes back.

Legend: T rows, N features out, K features in, E groups.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.device import gpu_forms, gpu_products
from bitcheck.reference_runs.fp8 import (
    TILE,
    dequantize_rows,
    num_tiles,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
)
from bitcheck.reference_runs.gemm import WGRAD_SPLIT, Tiled, gemm, gemm_bf16, wgrad, wgrad_bf16

Precision = Literal["fp8", "bf16"]

Offsets = tuple[int, ...]
"""Bounds of the groups' rows: group e has rows [offsets[e], offsets[e + 1])."""


class GemmOptions(NamedTuple):
    """How one layer's products are done."""

    power_of_two: bool = False
    """Scales of the input (and, for experts, of the gradients that are dispatched)."""
    is_wgrad_fixed: bool = True
    wgrad_split: int = TILE


class Weight(nn.Module):
    """A weight [E, N, K] (or [N, K]) in BF16 and, in precision `fp8`, its E4M3 codes and scales.

    Base of the layers below; the derived buffers are not part of a checkpoint.
    """

    codes: Tensor
    scale: Tensor
    codes_t: Tensor
    """On a GPU: the codes of the transpose, [E, K, N], and its scales."""
    scale_t: Tensor

    def __init__(self, shape: tuple[int, ...], precision: Precision, init_std: float) -> None:
        super().__init__()
        self.precision = precision
        self.weight = bf16_parameter(torch.randn(shape) * init_std)
        if precision == "fp8":
            num_outs, num_ins = shape[-2:]
            num_groups = shape[0] if len(shape) == 3 else 1
            codes = torch.zeros(num_groups, num_outs, num_ins, dtype=torch.float8_e4m3fn)
            self.register_buffer("codes", codes, persistent=False)
            scale = torch.zeros(num_groups, num_tiles(num_outs), num_tiles(num_ins))
            self.register_buffer("scale", scale, persistent=False)
            self.derive()

    @torch.no_grad()
    def derive(self) -> None:
        """Make the codes and scales anew from the BF16 weight: the only place where they are made."""
        if self.precision != "fp8":
            return
        if (gpu := gpu_forms(self.weight)) is not None:
            gpu.derive(self)
        else:
            codes, scale = quantize_blocks(self.weight if self.weight.dim() == 3 else self.weight[None])
            self.codes.copy_(codes)
            self.scale.copy_(scale)

    def keep_groups(self, first: int, count: int) -> None:
        """Keep `count` groups of a weight [E, N, K] from `first` on: the experts of one rank."""
        kept = slice(first, first + count)
        self.weight = bf16_parameter(self.weight.detach()[kept].clone())
        if self.precision == "fp8":
            self.codes, self.scale = self.codes[kept].clone(), self.scale[kept].clone()

    def operands(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the weight, and its codes and scales where there are any."""
        return (self.weight, self.codes, self.scale) if self.precision == "fp8" else (self.weight, None, None)


def bf16_parameter(values: Tensor) -> nn.Parameter:
    """Return `values` as a BF16 parameter whose gradient is accumulated in FP32."""
    parameter = nn.Parameter(values.to(torch.bfloat16))
    parameter.grad_dtype = torch.float32
    return parameter


class _GroupedLinear(torch.autograd.Function):
    """y = x w^T per group. x bfloat16 [T, K], y bfloat16 [T, N], gradient of w float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TK: Tensor,
        weight: Tensor,
        codes: Tensor | None,
        scale: Tensor | None,
        offsets: Offsets,
        options: GemmOptions,
    ) -> Tensor:
        ctx.offsets, ctx.options, ctx.weight_shape = offsets, options, weight.shape
        if codes is None or scale is None:
            ctx.save_for_backward(x_TK, weight)
            return gemm_bf16(x_TK, weight.view(-1, *weight.shape[-2:]), offsets).bfloat16()
        x = Tiled(*quantize_rows(x_TK, options.power_of_two))
        ctx.save_for_backward(*x, codes, scale)
        return gemm(x, Tiled(codes, scale), offsets).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_TN,) = gradients
        offsets, (power_of_two, is_fixed, split) = ctx.offsets, ctx.options
        # Read once: inside a checkpointed region each reading unpacks, and only the first is allowed.
        saved = ctx.saved_tensors
        if len(saved) == 2:
            x_TK, weight = saved
            dx_TK = gemm_bf16(dy_TN, weight.view(-1, *weight.shape[-2:]).transpose(1, 2), offsets)
            dw = wgrad_bf16(dy_TN, x_TK, offsets, is_fixed, split)
        else:
            x_codes, x_scale, codes, scale = saved
            dy = Tiled(*quantize_rows(dy_TN, power_of_two=False))
            dx_TK = gemm(dy, Tiled(codes.transpose(1, 2), scale.transpose(1, 2)), offsets)
            x_TK = dequantize_rows(x_codes, x_scale)
            dw = wgrad(
                Tiled(*quantize_columns(dy_TN, offsets, power_of_two=False)),
                Tiled(*quantize_columns(x_TK, offsets, power_of_two)),
                offsets,
                is_fixed,
                split,
            )
        return dx_TK.bfloat16(), dw.view(ctx.weight_shape), None, None, None, None


class Linear(Weight):
    """y = x w^T without a bias: bfloat16 [..., K] to bfloat16 [..., N]."""

    def __init__(
        self,
        num_ins: int,
        num_outs: int,
        precision: Precision,
        init_std: float,
        power_of_two: bool = False,
    ) -> None:
        super().__init__((num_outs, num_ins), precision, init_std)
        self.options = GemmOptions(power_of_two)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the last dimension of `x`, bfloat16 [..., K], by the weight."""
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN: Tensor
        if (gpu := gpu_products(self.weight)) is not None:
            y_TN = gpu.linear(self, x_TK, self.options.power_of_two)
        else:
            y_TN = _GroupedLinear.apply(x_TK, *self.operands(), (0, x_TK.shape[0]), self.options)
        return y_TN.view(*x.shape[:-1], -1)


class GroupedLinear(Weight):
    """One weight a group: rows of group e are multiplied by weight[e]. What goes into the experts."""

    def __init__(
        self,
        num_groups: int,
        num_ins: int,
        num_outs: int,
        precision: Precision,
        init_std: float,
        is_wgrad_fixed: bool,
    ) -> None:
        super().__init__((num_groups, num_outs, num_ins), precision, init_std)
        self.options = GemmOptions(True, is_wgrad_fixed, WGRAD_SPLIT)

    def forward(self, x_TK: Tensor, loads_E: Tensor) -> Tensor:
        """Multiply rows of `x_TK`, bfloat16, sorted by group; `loads_E` int64 counts each group's."""
        y_TN: Tensor
        if (gpu := gpu_products(self.weight)) is not None:
            y_TN = gpu.grouped_linear(self, x_TK, loads_E, self.options)
        else:
            y_TN = _GroupedLinear.apply(x_TK, *self.operands(), offsets_from_loads(loads_E), self.options)
        return y_TN


def offsets_from_loads(loads_E: Tensor) -> Offsets:
    """Return the bounds of groups that have `loads_E` (int64 [E]) rows each."""
    return (0, *loads_E.cumsum(0).tolist())
