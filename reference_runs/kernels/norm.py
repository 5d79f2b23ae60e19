"""RMSNorm: y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps), forward and backward.

    dx = rstd * (w dy - xhat * mean(w dy xhat))        dw[d] = sum over rows of dy[r, d] * xhat[r, d]

with xhat = x * rstd. A row's means are formed inside one program. dw sums over all rows; each of
NUM_PARTS programs walks its own rows in ascending order (the kernel's loop), then

    two-stage   part p writes slots[p]; the slots are summed in index order (`slots.sum_slots`)
    atomic      every part adds to dw when it gets there

NUM_PARTS is a constant and not the number of multiprocessors: bits must not depend on the card.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.slots import sum_slots

DweightForm = Literal["two-stage", "atomic"]
EPS = 1e-6
NUM_PARTS = 512


@triton.jit
def _forward_kernel(x_ptr, w_ptr, y_ptr, rstd_ptr, num_cols, stride_xr, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * stride_xr + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / num_cols + eps)
    tl.store(y_ptr + row * num_cols + cols, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, num_rows, num_cols, rows_per_part, stride_dr, stride_xr,
    BLOCK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < num_cols
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    first = part * rows_per_part
    for index in range(first, tl.minimum(first + rows_per_part, num_rows)):  # rows ascending: the order of the sum
        row = tl.cast(index, tl.int64)
        dy = tl.load(dy_ptr + row * stride_dr + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * stride_xr + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        xhat = x * rstd
        wdy = w * dy
        mean = tl.sum(wdy * xhat, axis=0) / num_cols
        dx = rstd * (wdy - xhat * mean)
        tl.store(dx_ptr + row * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * xhat
    if FORM == "atomic":
        tl.atomic_add(dw_ptr + cols, dw, mask=mask, sem="relaxed")
    else:
        tl.store(dw_ptr + part.to(tl.int64) * num_cols + cols, dw, mask=mask)


def rmsnorm_forward(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = EPS, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y [R, D], rstd float32 [R]) of `x` [R, D], rows may be strided; y has x's dtype by default."""
    _check(x, weight)
    num_rows, num_cols = x.shape
    y = torch.empty(num_rows, num_cols, dtype=out_dtype or x.dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block = triton.next_power_of_2(num_cols)
        _forward_kernel[(num_rows,)](
            x, weight, y, rstd, num_cols, x.stride(0), eps, BLOCK=block, num_warps=_warps(block)
        )
    return y, rstd


def rmsnorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    *,
    form: DweightForm,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dx [R, D], dweight float32 [D]) from `dy` [R, D] and what the forward saw and returned.

    Raises ValueError for an unknown `form` or shapes that do not fit.
    """
    if form not in get_args(DweightForm):
        raise ValueError(f"norm.dweight: unknown form {form!r}; expected one of {', '.join(get_args(DweightForm))}")
    _check(x, weight)
    _check(dy, weight)
    num_rows, num_cols = x.shape
    dx = torch.empty(num_rows, num_cols, dtype=out_dtype or x.dtype, device=x.device)
    rows_per_part = max(1, triton.cdiv(num_rows, NUM_PARTS))
    num_parts = max(1, triton.cdiv(num_rows, rows_per_part))
    if form == "atomic":
        dw = torch.zeros(num_cols, dtype=torch.float32, device=x.device)
    else:
        dw = torch.empty(num_parts, num_cols, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(num_cols)
    _backward_kernel[(num_parts,)](
        dy, x, weight, rstd, dx, dw, num_rows, num_cols, rows_per_part, dy.stride(0), x.stride(0),
        BLOCK=block, FORM=form, num_warps=_warps(block),
    )  # fmt: skip
    return dx, dw if form == "atomic" else sum_slots(dw)


def reference_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """Return y in plain PyTorch, in the dtype given; autograd gives its backward."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:] or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: expected [rows, width] and [width]")


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
