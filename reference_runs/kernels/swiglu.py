"""SwiGLU in one kernel each way: y = prob * silu(gate) * up, prob optional and one a row.

    silu(g) = g * sigmoid(g)        dsilu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
    dgate = dy * prob * up * dsilu(gate)        dup = dy * prob * silu(gate)

Elementwise: every output element has one writer and no sum is formed. (The gradient of prob is a sum
over columns; for experts it is taken in the epilogue of `grouped_gemm`.) Arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
# Rows are the first axis of the grids below: the others end at 65535.


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, prob_ptr, y_ptr, num_cols, stride_gr, stride_ur, HAS_PROB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    gate = tl.load(gate_ptr + row * stride_gr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_ur + cols, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if HAS_PROB:
        y *= tl.load(prob_ptr + row)
    tl.store(y_ptr + row * num_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, prob_ptr, dhidden_ptr, num_cols, stride_dr, stride_gr, stride_ur,
    HAS_PROB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    dy = tl.load(dy_ptr + row * stride_dr + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_ur + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_PROB:
        dy *= tl.load(prob_ptr + row)
    sigmoid = tl.sigmoid(gate)
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
    num_rows, num_cols = _check(gate, up, prob)
    y = torch.empty(num_rows, num_cols, dtype=out_dtype or gate.dtype, device=gate.device)
    if y.numel():
        _forward_kernel[(num_rows, triton.cdiv(num_cols, BLOCK))](
            gate, up, prob, y, num_cols, gate.stride(0), up.stride(0), HAS_PROB=prob is not None, BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return y


def swiglu_backward(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    prob: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return dhidden [R, 2 F], dgate then dup, from the gradient `dy` [R, F] of `swiglu_forward`."""
    num_rows, num_cols = _check(gate, up, prob)
    _check(dy, gate, None)
    dhidden = torch.empty(num_rows, 2 * num_cols, dtype=out_dtype or gate.dtype, device=gate.device)
    if dhidden.numel():
        _backward_kernel[(num_rows, triton.cdiv(num_cols, BLOCK))](
            dy, gate, up, prob, dhidden, num_cols, dy.stride(0), gate.stride(0), up.stride(0),
            HAS_PROB=prob is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return dhidden


def reference_swiglu(gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor | None = None) -> torch.Tensor:
    """Return y in plain PyTorch, in the dtype given; autograd gives its backward."""
    y = gate * gate.sigmoid() * up
    return y if prob is None else y * prob[:, None]


def _check(gate: torch.Tensor, up: torch.Tensor, prob: torch.Tensor | None) -> tuple[int, int]:
    num_rows, num_cols = gate.shape
    if up.shape != gate.shape or (num_cols > 1 and (gate.stride(1) != 1 or up.stride(1) != 1)):
        raise ValueError(f"{tuple(gate.shape)} and {tuple(up.shape)}: expected equal shapes, innermost contiguous")
    if prob is not None and prob.shape != (num_rows,):
        raise ValueError(f"prob {tuple(prob.shape)}: expected {(num_rows,)}")
    return num_rows, num_cols
