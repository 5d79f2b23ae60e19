"""A causal depthwise convolution and its SiLU: y[s] = silu(p[s]), p[s] = sum over w of x[s - (W - 1) + w] k[w].

    dp[s] = dy[s] dsilu(p[s])        dx[s] = sum over w of dp[s + (W - 1) - w] k[w]
    dk[w] = sum over sequences and s of dp[s] x[s - (W - 1) + w]

Taps are added oldest first, in the kernel's loop. dk sums over all tokens: each program sums ROWS of them and
writes its part to a slot of its own; slots are summed in index order (`slots.sum_slots`). p is computed again in
the backward. Arithmetic is float32.

Legend: B sequences, S positions, C channels, W taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.slots import sum_slots

ROWS = 64
"""Positions of a program; a part of dk sums over them, so they are part of its bits."""
COLS = 64
NUM_WARPS = 4


@triton.jit
def _load_rows(ptr, rows, cols, seq_len, num_cols, stride_s):
    """Return float32 [ROWS, COLS] at `rows` of one sequence, zero before its first and after its last."""
    mask = ((rows >= 0) & (rows < seq_len))[:, None] & (cols < num_cols)[None, :]
    at = rows[:, None].to(tl.int64) * stride_s + cols[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(
    x_ptr, k_ptr, rows, cols, seq_len, num_cols, stride_s, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):  # oldest first: the order of the sum
        x = _load_rows(x_ptr, rows - (WIDTH - 1) + tap, cols, seq_len, num_cols, stride_s)
        k = tl.load(k_ptr + tap * num_cols + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        total += x * k[None, :]
    return total


@triton.jit
def _forward_kernel(
    x_ptr, k_ptr, y_ptr, seq_len, num_cols, stride_xb, stride_xs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    p = _convolve(x_ptr + seq * stride_xb, k_ptr, rows, cols, seq_len, num_cols, stride_xs, WIDTH, ROWS, COLS)
    at = (seq * seq_len + rows)[:, None] * num_cols + cols[None, :]
    mask = (rows < seq_len)[:, None] & (cols < num_cols)[None, :]
    tl.store(y_ptr + at, (p * tl.sigmoid(p)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _inner_kernel(
    dy_ptr, x_ptr, k_ptr, dp_ptr, slots_ptr, seq_len, num_cols, stride_db, stride_ds, stride_xb, stride_xs,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    x_ptr += seq * stride_xb
    p = _convolve(x_ptr, k_ptr, rows, cols, seq_len, num_cols, stride_xs, WIDTH, ROWS, COLS)
    sigmoid = tl.sigmoid(p)
    dy = _load_rows(dy_ptr + seq * stride_db, rows, cols, seq_len, num_cols, stride_ds)
    dp = dy * (sigmoid * (1.0 + p * (1.0 - sigmoid)))
    at = (seq * seq_len + rows)[:, None] * num_cols + cols[None, :]
    mask = (rows < seq_len)[:, None] & (cols < num_cols)[None, :]
    tl.store(dp_ptr + at, dp.to(dp_ptr.dtype.element_ty), mask=mask)
    part = seq * tl.num_programs(1) + tl.program_id(1)
    for tap in tl.static_range(WIDTH):
        x = _load_rows(x_ptr, rows - (WIDTH - 1) + tap, cols, seq_len, num_cols, stride_xs)
        slot = slots_ptr + (part * WIDTH + tap) * num_cols + cols
        tl.store(slot, tl.sum(dp * x, axis=0), mask=cols < num_cols)


@triton.jit
def _outer_kernel(
    dp_ptr, k_ptr, dx_ptr, seq_len, num_cols, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    seq = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for tap in tl.static_range(WIDTH):
        shifted = rows + (WIDTH - 1) - tap
        dp = _load_rows(dp_ptr + seq * seq_len * num_cols, shifted, cols, seq_len, num_cols, num_cols)
        k = tl.load(k_ptr + tap * num_cols + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        total += dp * k[None, :]
    at = (seq * seq_len + rows)[:, None] * num_cols + cols[None, :]
    mask = (rows < seq_len)[:, None] & (cols < num_cols)[None, :]
    tl.store(dx_ptr + at, total.to(dx_ptr.dtype.element_ty), mask=mask)


def conv_silu_forward(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Return y [B, S, C], contiguous, in the dtype of `x` [B, S, C], whose channels are contiguous.

    `kernel` [W, C], contiguous. Raises ValueError where shapes do not fit.
    """
    _check(x, kernel)
    _, seq_len, num_cols = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _forward_kernel[_grid(x)](
        x, kernel, y, seq_len, num_cols, x.stride(0), x.stride(1),
        WIDTH=kernel.shape[0], ROWS=ROWS, COLS=COLS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


def conv_silu_backward(dy: torch.Tensor, x: torch.Tensor, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dx [B, S, C] in the dtype of `x`, dkernel float32 [W, C]) from the gradient `dy` [B, S, C]."""
    _check(x, kernel)
    _check(dy, kernel)
    _, seq_len, num_cols = x.shape
    width = kernel.shape[0]
    grid = _grid(x)
    dp = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    slots = torch.empty(grid[1] * grid[2], width, num_cols, dtype=torch.float32, device=x.device)
    _inner_kernel[grid](
        dy, x, kernel, dp, slots, seq_len, num_cols, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1),
        WIDTH=width, ROWS=ROWS, COLS=COLS, num_warps=NUM_WARPS,
    )  # fmt: skip
    dx = torch.empty_like(dp)
    _outer_kernel[grid](
        dp, kernel, dx, seq_len, num_cols, WIDTH=width, ROWS=ROWS, COLS=COLS, num_warps=NUM_WARPS
    )  # fmt: skip
    return dx, sum_slots(slots)


def reference_conv_silu(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """Return y in plain PyTorch, in the dtype given; autograd gives its backward."""
    width, seq_len = kernel.shape[0], x.shape[1]
    padded = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
    taps = [padded[:, tap : tap + seq_len] * kernel[tap] for tap in range(width)]
    return torch.nn.functional.silu(torch.stack(taps).sum(0))


def _grid(x: torch.Tensor) -> tuple[int, int, int]:
    num_seqs, seq_len, num_cols = x.shape
    return (triton.cdiv(num_cols, COLS), triton.cdiv(seq_len, ROWS), num_seqs)


def _check(x: torch.Tensor, kernel: torch.Tensor) -> None:
    if x.dim() != 3 or kernel.dim() != 2 or kernel.shape[1] != x.shape[2] or not kernel.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)}, kernel {tuple(kernel.shape)}: expected [B, S, C] and [W, C]")
    if x.stride(2) != 1:
        raise ValueError(f"x {tuple(x.shape)}, strides {x.stride()}: expected contiguous channels")
