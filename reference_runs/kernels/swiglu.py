"""SwiGLU in one kernel each way: y = prob * silu(gate) * up, prob optional and one a row.

    silu(g) = g * sigmoid(g)        dsilu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
    dgate = dy * prob * up * dsilu(gate)        dup = dy * prob * silu(gate)

Elementwise: every output element has one writer. The gradient of prob is a sum over columns; for experts in
FP8 it is taken in the epilogue of `grouped_gemm`. Here (`swiglu_prob_backward`) each program sums BLOCK columns
of a row into a slot of its own, and slots are added in index order (`slots.sum_slots`). Arithmetic is float32.

What is cached for the backward is [gate | up] in FP8, by 1x128: the `cached_` functions read it so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.quantise import Quantised
from bitcheck.reference_runs.kernels.slots import sum_slots

BLOCK = 1024
# Rows are the first axis of the grids below: the others end at 65535.


@triton.jit
def _load_inputs(
    gate_ptr, up_ptr, scale_ptr, row, cols, mask, num_cols, stride_gr, stride_ur, stride_sb, SCALED: tl.constexpr
):  # fmt: skip
    """Return gate and up of some columns of a row, float32; if SCALED, of a row [gate | up] by 1x128."""
    gate = tl.load(gate_ptr + row * stride_gr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_ur + cols, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        gate *= tl.load(scale_ptr + cols // 128 * stride_sb + row, mask=mask, other=0.0)
        up *= tl.load(scale_ptr + (cols + num_cols) // 128 * stride_sb + row, mask=mask, other=0.0)
    return gate, up


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, scale_ptr, prob_ptr, y_ptr, num_cols, stride_gr, stride_ur, stride_sb,
    SCALED: tl.constexpr, HAS_PROB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    gate, up = _load_inputs(
        gate_ptr, up_ptr, scale_ptr, row, cols, mask, num_cols, stride_gr, stride_ur, stride_sb, SCALED
    )
    y = gate * tl.sigmoid(gate) * up
    if HAS_PROB:
        y *= tl.load(prob_ptr + row)
    tl.store(y_ptr + row * num_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, scale_ptr, prob_ptr, dhidden_ptr, slots_ptr, num_cols, stride_dr, stride_gr, stride_ur,
    stride_sb, SCALED: tl.constexpr, HAS_PROB: tl.constexpr, WITH_DPROB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    dy = tl.load(dy_ptr + row * stride_dr + cols, mask=mask, other=0.0).to(tl.float32)
    gate, up = _load_inputs(
        gate_ptr, up_ptr, scale_ptr, row, cols, mask, num_cols, stride_gr, stride_ur, stride_sb, SCALED
    )
    sigmoid = tl.sigmoid(gate)
    if WITH_DPROB:
        part = tl.sum(dy * (gate * sigmoid * up), axis=0)
        tl.store(slots_ptr + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + row, part)
    if HAS_PROB:
        dy *= tl.load(prob_ptr + row)
    dgate = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    out_ptrs = dhidden_ptr + row * (2 * num_cols) + cols
    tl.store(out_ptrs, dgate.to(dhidden_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + num_cols, (dy * (gate * sigmoid)).to(dhidden_ptr.dtype.element_ty), mask=mask)


def swiglu_forward(
    gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return y [R, F] from `gate`, `up` [R, F] (rows may be strided) and `prob` float32 [R].

    The result has the inputs' dtype unless `out_dtype` names another.
    """
    _check(gate, up, prob)
    return _forward(gate, up, None, prob, out_dtype or gate.dtype)


def swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    prob: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return dhidden [R, 2 F], dgate then dup, from the gradient `dy` [R, F] of `swiglu_forward`."""
    _check(gate, up, prob)
    _check(dy, gate, None)
    return _backward(dy, gate, up, None, prob, out_dtype or gate.dtype, None)


def swiglu_prob_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dhidden [R, 2 F] in the inputs' dtype, dprob float32 [R]) from the gradient `dy` [R, F]."""
    _check(gate, up, prob)
    _check(dy, gate, None)
    num_rows, num_cols = gate.shape
    slots = torch.empty(triton.cdiv(num_cols, BLOCK), num_rows, dtype=torch.float32, device=gate.device)
    dhidden = _backward(dy, gate, up, None, prob, gate.dtype, slots)
    return dhidden, sum_slots(slots)


def cached_swiglu_forward(
    hidden: Quantised, prob: torch.Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return y [R, F] from `hidden` [R, 2 F], gate then up, as `quantise_rows` gives it."""
    gate, up = _halves(hidden)
    _check(gate, up, prob)
    return _forward(gate, up, hidden.scales, prob, out_dtype)


def cached_swiglu_backward(
    dy: torch.Tensor,
    hidden: Quantised,
    prob: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return dhidden [R, 2 F] from the gradient `dy` [R, F] of `cached_swiglu_forward`."""
    gate, up = _halves(hidden)
    _check(gate, up, prob)
    _check(dy, gate, None)
    return _backward(dy, gate, up, hidden.scales, prob, out_dtype, None)


def _forward(
    gate: torch.Tensor, up: torch.Tensor, scales: torch.Tensor | None, prob: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, num_cols = gate.shape
    y = torch.empty(num_rows, num_cols, dtype=dtype, device=gate.device)
    if y.numel():
        _forward_kernel[(num_rows, triton.cdiv(num_cols, BLOCK))](
            gate, up, scales, prob, y, num_cols, gate.stride(0), up.stride(0),
            0 if scales is None else scales.stride(1),
            SCALED=scales is not None, HAS_PROB=prob is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return y


def _backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scales: torch.Tensor | None,
    prob: torch.Tensor | None,
    dtype: torch.dtype,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, num_cols = gate.shape
    dhidden = torch.empty(num_rows, 2 * num_cols, dtype=dtype, device=gate.device)
    if dhidden.numel():
        _backward_kernel[(num_rows, triton.cdiv(num_cols, BLOCK))](
            dy, gate, up, scales, prob, dhidden, slots, num_cols, dy.stride(0), gate.stride(0), up.stride(0),
            0 if scales is None else scales.stride(1), SCALED=scales is not None, HAS_PROB=prob is not None,
            WITH_DPROB=slots is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return dhidden


def reference_swiglu(gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor | None = None) -> torch.Tensor:
    """Return y in plain PyTorch, in the dtype given; autograd gives its backward."""
    y = gate * gate.sigmoid() * up
    return y if prob is None else y * prob[:, None]


def _halves(hidden: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    if hidden.rows_per_scale != 1 or hidden.scales.stride(0) != 1 or hidden.values.shape[1] % 2:
        raise ValueError("expected [gate | up] in rows of 1x128 tiles as quantise_rows lays them out")
    num_cols = hidden.values.shape[1] // 2
    return hidden.values[:, :num_cols], hidden.values[:, num_cols:]


def _check(gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor | None) -> None:
    num_rows, num_cols = gate.shape
    if up.shape != gate.shape or (num_cols > 1 and (gate.stride(1) != 1 or up.stride(1) != 1)):
        raise ValueError(f"{tuple(gate.shape)} and {tuple(up.shape)}: expected equal shapes, innermost contiguous")
    if prob is not None and prob.shape != (num_rows,):
        raise ValueError(f"prob {tuple(prob.shape)}: expected {(num_rows,)}")
