"""Dense products: FP8 with 1x128 and 128x128 scales through cuBLAS, BF16 through torch.mm.

    fprop   y  = x  [T, K] w [N, K]^T       1x128 by 128x128
    dgrad   dx = dy [T, N] w^T [K, N]^T     1x128 by the same blocks, transposed
    wgrad   dw = dy^T [N, T] x^T [K, T]^T   128x1 by 128x1, in FP32

cuBLAS takes 0.61 to 0.90 of the FP8 peak here, the trainer's own kernel 0.54 to 0.66 (benchmarks/results); the
kernel stands in for it where there is no such product: off Hopper, and in Triton's interpreter. Deterministic:
cuBLAS has a fixed order on one kind of GPU with one workspace (`CUBLAS_WORKSPACE_CONFIG`).

Legend: T rows, N features out, K features in.
"""

# PyTorch leaves Function.apply and autograd's context without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcheck.reference_runs.kernels.gemm import gemm, gemm_cublas
from bitcheck.reference_runs.kernels.quantise import (
    BLOCK,
    Quantised,
    quantise_columns,
    quantise_rows,
    quantise_weight,
)
from bitcheck.reference_runs.linear import Weight

ROWS_ALIGNMENT = 8
"""Rows of an operand in 1x128 tiles of which cuBLAS takes multiples only."""
SCALES_ALIGNMENT = 4
"""Scales of a weight's row of blocks, to a multiple of which cuBLAS wants the row padded."""

Pair = tuple[Quantised, Quantised]
"""A weight for fprop, [..., N, K], and its transpose for dgrad, [..., K, N]."""


@cache
def _has_blockwise_product(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _is_taken(lhs: Quantised) -> bool:
    """Whether cuBLAS has a product for as many rows as `lhs` has; other numbers it refuses, whatever the widths are.

    A trainer's micro-batch is a multiple of a chunk of 16 tokens, so this is for who calls a layer with other rows.
    """
    return _has_blockwise_product(lhs.values.device) and lhs.values.shape[0] % ROWS_ALIGNMENT == 0


@cache
def gives_float32(device: torch.device) -> bool:
    """Ask cuBLAS, once a process, whether its product of 1x128 by 1x128 comes in float32 too.

    By an operation of its own: `device.prepare` asks, so that no training step has it.
    """
    ones = quantise_rows(torch.ones(128, 128, dtype=torch.bfloat16, device=device))
    try:
        gemm_cublas(ones, ones, out_dtype=torch.float32)
    except (RuntimeError, ValueError):
        return False
    return True


def product(lhs: Quantised, rhs: Quantised, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return lhs [M, K] times rhs [N, K] transposed, [M, N]; K and N are multiples of 16."""
    multiply = gemm_cublas if _is_taken(lhs) else gemm
    return multiply(lhs, rhs, out_dtype=out_dtype)


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] times b [K, N], bfloat16, accumulated and returned in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def derive(module: Weight) -> None:
    """Make the codes and scales of `module` anew from its BF16 weight, and those of the transpose beside them.

    The layout is that of the portable form, [E, N, K] and [E, NQ, KQ]; only the rows of scales are padded. The
    buffers are made the first time, or when the module has been moved, and stay the same tensors after that.
    """
    weight = module.weight.detach()
    weight = weight if weight.dim() == 3 else weight[None]
    is_made = _is_laid_out(module, weight)
    straight, transposed = quantise_weight(weight, out=(module.codes, module.codes_t) if is_made else None)
    for suffix, quantised in (("", straight), ("_t", transposed)):
        if is_made:
            module.get_buffer(f"scale{suffix}").copy_(quantised.scales)
        else:
            module.register_buffer(f"codes{suffix}", quantised.values, persistent=False)
            module.register_buffer(f"scale{suffix}", _padded(quantised.scales), persistent=False)


def _is_laid_out(module: Weight, weight_ENK: Tensor) -> bool:
    """Whether the module has buffers as `derive` makes them for this weight."""
    buffers = dict(module.named_buffers(recurse=False))
    if "codes_t" not in buffers:
        return False
    codes, codes_t = buffers["codes"], buffers["codes_t"]
    is_padded = all(buffers[name].stride(-2) % SCALES_ALIGNMENT == 0 for name in ("scale", "scale_t"))
    return is_padded and codes.shape == weight_ENK.shape == codes_t.mT.shape and codes.device == weight_ENK.device


def _padded(scales_ENK: Tensor) -> Tensor:
    """Return the scales with rows padded as cuBLAS wants them, so that no product has to do it."""
    num_blocks = scales_ENK.shape[-1]
    return F.pad(scales_ENK, (0, -num_blocks % SCALES_ALIGNMENT)).contiguous()[..., :num_blocks]


def pair(module: Weight, is_grouped: bool = False) -> Pair | None:
    """Return the FP8 weight of `module` as operands, with the dimension of experts where `is_grouped`; None in BF16."""
    if module.precision != "fp8":
        return None
    straight = Quantised(module.codes, module.scale, BLOCK)
    transposed = Quantised(module.codes_t, module.scale_t, BLOCK)
    return (straight, transposed) if is_grouped else (_only(straight), _only(transposed))


def _only(w: Quantised) -> Quantised:
    return Quantised(w.values[0], w.scales[0], w.rows_per_scale)


def wgrad(dy: Quantised, x: Quantised) -> Tensor:
    """Return dy^T x, float32 [N, K], from `dy` [N, T'] and `x` [K, T'], both quantised in columns."""
    multiply = gemm_cublas if _is_taken(dy) and gives_float32(dy.values.device) else gemm
    return multiply(dy, x, out_dtype=torch.float32)


def products_backward(dy_TN: Tensor, weight: Tensor | Pair, x: Tensor | Quantised) -> tuple[Tensor, Tensor]:
    """Return (dy w, bfloat16 [T, K]; dy^T x, float32 [N, K]) for bfloat16 `dy_TN`, contiguous.

    In BF16 `weight` is [N, K] and `x` [T, K]; in FP8 they are the weight's pair, and `x` quantised in columns.
    """
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return dy_TN @ weight, mm_fp32(dy_TN.t(), x)
    assert isinstance(x, Quantised)
    return product(quantise_rows(dy_TN), weight[1]), wgrad(quantise_columns(dy_TN), x)


class _Linear(torch.autograd.Function):
    """y = x w^T. x bfloat16 [T, K], y bfloat16 [T, N], gradient of w float32."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Tensor, weights: Pair | None, power_of_two: bool) -> Tensor:
        ctx.weights, ctx.power_of_two = weights, power_of_two
        if weights is None:
            ctx.save_for_backward(x_TK, weight)
            return x_TK @ weight.t()
        x = quantise_rows(x_TK, power_of_two=power_of_two)
        ctx.save_for_backward(x.values, x.scales)
        return product(x, weights[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dy_TN = gradients[0].contiguous()
        # Read once: inside a checkpointed region each reading unpacks, and only the first is allowed.
        first, second = ctx.saved_tensors
        if ctx.weights is None:
            return *products_backward(dy_TN, second, first), None, None
        x = quantise_columns(Quantised(first, second, 1), power_of_two=ctx.power_of_two)
        return *products_backward(dy_TN, ctx.weights, x), None, None


def linear(module: Weight, x_TK: Tensor, power_of_two: bool) -> Tensor:
    """Return x w^T, bfloat16 [T, N], for bfloat16 `x_TK`; `module` has one weight [N, K]."""
    y_TN: Tensor = _Linear.apply(x_TK, module.weight, pair(module), power_of_two)
    return y_TN


class _WideLinear(torch.autograd.Function):
    """y = x w^T in FP32 from BF16 operands, whose products are exact in FP32; dy is rounded to BF16."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight)
        return mm_fp32(x_TK, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight = ctx.saved_tensors
        return products_backward(gradients[0].bfloat16(), weight, x_TK)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x w^T, float32 [..., N], for bfloat16 `x` [..., K] and `weight` [N, K]: the router and the head."""
    y_TN: Tensor = _WideLinear.apply(x.reshape(-1, x.shape[-1]), weight)
    return y_TN.view(*x.shape[:-1], -1)
