"""The chunked scan of Mamba-2, forward (Dao and Gu 2024, arXiv 2405.21060, section 6).

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t        a state h [P, N] a head

In chunks of L tokens, c_l the running sum of dt A inside the chunk, H the state at its start:

    H_{g+1} = exp(c_L) H_g + sum over m of exp(c_L - c_m) dt_m x_m B_m^T    one program walks all chunks
    y_l     = sum over m <= l of (C_l . B_m) exp(c_l - c_m) dt_m x_m        one program a chunk and head
            + exp(c_l) H C_l + D x_l

Every output element has one writer; the recurrence over chunks is a loop in ascending order. States and
sums are float32; on a GPU the operands of matrix products are rounded to TF32 (10 bits of mantissa),
which is more than the 7 of the bfloat16 activations they come from.

Legend: B sequences (before G) or the input matrix, G chunks, H heads, L and M positions in a chunk,
S positions, P head width, N state width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32")
TILE_P = 64
"""Elements of P that a program works on."""
PASS_TILE_P = 32
"""Elements of P that a program carries from chunk to chunk."""
NUM_WARPS = 4
NUM_STAGES = 1
PASS_STAGES = 3
"""Chunks in flight where one program walks them all: it has little else to hide a load behind."""


class Operands(NamedTuple):
    """The scan's operands: bfloat16 or float32, the last dimension contiguous."""

    x: torch.Tensor
    """[B, S, H, P]"""
    dt: torch.Tensor
    """[B, S, H]"""
    a: torch.Tensor
    """float32 [H], negative"""
    b: torch.Tensor
    """[B, S, N]"""
    c: torch.Tensor
    """[B, S, N]"""
    d: torch.Tensor
    """float32 [H]"""


class Shape(NamedTuple):
    """The extents of one scan, and the sizes of its tiles."""

    num_seqs: int
    num_chunks: int
    num_heads: int
    head_dim: int
    state_dim: int
    chunk: int
    tile_p: int
    tile_n: int

    @property
    def tiles_p(self) -> int:
        return -(-self.head_dim // self.tile_p)


@triton.jit
def load_tile(
    ptr, stride_row, row, num_cols, col, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):  # fmt: skip
    """Return the float32 tile [TILE_R, TILE_C] at (row, col), zero past the last column."""
    cols = col + tl.arange(0, TILE_C)
    rows = row + tl.arange(0, TILE_R)
    ptrs = ptr + rows[:, None].to(tl.int64) * stride_row + cols[None, :]
    return tl.load(ptrs, mask=(cols < num_cols)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _states_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, decay_sum_ptr, states_ptr, num_chunks, num_heads, head_dim, state_dim,
    stride_xb, stride_xs, stride_xh, stride_dtb, stride_dts, stride_bb, stride_bs,
    L: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    tile_p, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    positions = tl.arange(0, L)
    ps, ns = tile_p * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    mask = (ps < head_dim)[:, None] & (ns < state_dim)[None, :]
    a = tl.load(a_ptr + head)
    state = tl.zeros((TILE_P, TILE_N), dtype=tl.float32)
    for chunk in range(num_chunks):  # in the order of time: the order of the sum
        first = chunk * L
        cell = (seq * num_chunks + chunk) * num_heads + head
        dt_ptrs = dt_ptr + seq * stride_dtb + (first + positions).to(tl.int64) * stride_dts + head
        dt = tl.load(dt_ptrs).to(tl.float32)
        decay_sum = tl.cumsum(dt * a, axis=0)
        if tile_p == 0:
            tl.store(decay_sum_ptr + cell * L + positions, decay_sum)
        out = states_ptr + cell * head_dim * state_dim + ps[:, None] * state_dim + ns[None, :]
        tl.store(out, state, mask=mask)
        total = tl.sum(tl.where(positions == L - 1, decay_sum, 0.0))
        x_base = x_ptr + seq * stride_xb + head * stride_xh
        x = load_tile(x_base, stride_xs, first, head_dim, tile_p * TILE_P, L, TILE_P)
        b = load_tile(b_ptr + seq * stride_bb, stride_bs, first, state_dim, 0, L, TILE_N)
        x_weighted = x * (dt * tl.exp(total - decay_sum))[:, None]
        state = state * tl.exp(total) + tl.dot(tl.trans(x_weighted), b, input_precision=PRECISION)


@triton.jit
def _output_kernel(
    x_ptr, dt_ptr, b_ptr, c_ptr, d_ptr, decay_sum_ptr, states_ptr, y_ptr, num_chunks, num_heads, head_dim, state_dim,
    stride_xb, stride_xs, stride_xh, stride_dtb, stride_dts, stride_bb, stride_bs, stride_cb, stride_cs,
    L: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    tile_p, head = tl.program_id(0), tl.program_id(1)
    seq, chunk = (tl.program_id(2) // num_chunks).to(tl.int64), tl.program_id(2) % num_chunks
    first = chunk * L
    positions = tl.arange(0, L)
    cell = tl.program_id(2).to(tl.int64) * num_heads + head
    dt = tl.load(dt_ptr + seq * stride_dtb + (first + positions).to(tl.int64) * stride_dts + head).to(tl.float32)
    decay_sum = tl.load(decay_sum_ptr + cell * L + positions)
    x = load_tile(x_ptr + seq * stride_xb + head * stride_xh, stride_xs, first, head_dim, tile_p * TILE_P, L, TILE_P)
    b = load_tile(b_ptr + seq * stride_bb, stride_bs, first, state_dim, 0, L, TILE_N)
    c = load_tile(c_ptr + seq * stride_cb, stride_cs, first, state_dim, 0, L, TILE_N)
    past = positions[:, None] >= positions[None, :]
    # The exponent is masked, not the result: above the diagonal it is positive and could overflow.
    decay = tl.exp(tl.where(past, decay_sum[:, None] - decay_sum[None, :], float("-inf")))
    weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * decay
    y = tl.dot(weights, x * dt[:, None], input_precision=PRECISION)
    ps, ns = tile_p * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    state_ptrs = states_ptr + cell * head_dim * state_dim + ps[None, :] * state_dim + ns[:, None]
    state = tl.load(state_ptrs, mask=(ps < head_dim)[None, :] & (ns < state_dim)[:, None], other=0.0)
    y += tl.dot(c, state, input_precision=PRECISION) * tl.exp(decay_sum)[:, None]
    y += x * tl.load(d_ptr + head)
    row = (seq * num_chunks + chunk) * L + positions
    out = y_ptr + (row[:, None] * num_heads + head) * head_dim + ps[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=(ps < head_dim)[None, :])


def scan_shape(operands: Operands, chunk: int) -> Shape:
    """Return the extents of a scan in chunks of `chunk` tokens.

    Raises ValueError where shapes do not fit, a last dimension is strided, the sequence does not cut
    into chunks, or the chunk is not 16, 32 or 64.
    """
    x, dt, a, b, c, d = operands
    num_seqs, seq_len, num_heads, head_dim = x.shape
    state_dim = b.shape[-1]
    if chunk not in (16, 32, 64) or seq_len % chunk:
        raise ValueError(f"{seq_len} tokens in chunks of {chunk}; expected a divisor out of 16, 32, 64")
    if dt.shape != x.shape[:3] or a.shape != (num_heads,) or d.shape != (num_heads,):
        raise ValueError(f"dt {tuple(dt.shape)}, A {tuple(a.shape)}, D {tuple(d.shape)} for x {tuple(x.shape)}")
    if b.shape != (num_seqs, seq_len, state_dim) or c.shape != b.shape:
        raise ValueError(f"B {tuple(b.shape)}, C {tuple(c.shape)} for x {tuple(x.shape)}")
    if any(operand.stride(-1) != 1 for operand in operands):
        raise ValueError("expected every operand's last dimension to be contiguous")
    tile_p = min(TILE_P, max(16, triton.next_power_of_2(head_dim)))
    tile_n = max(16, triton.next_power_of_2(state_dim))
    return Shape(num_seqs, seq_len // chunk, num_heads, head_dim, state_dim, chunk, tile_p, tile_n)


def chunk_states(operands: Operands, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (c, the running sums of dt A, float32 [B, G, H, L]; H, float32 [B, G, H, P, N])."""
    x, dt, a, b = operands[:4]
    lead = (shape.num_seqs, shape.num_chunks, shape.num_heads)
    decay_sum = torch.empty(*lead, shape.chunk, dtype=torch.float32, device=x.device)
    states = torch.empty(*lead, shape.head_dim, shape.state_dim, dtype=torch.float32, device=x.device)
    tile_p = min(PASS_TILE_P, shape.tile_p)
    _states_kernel[(triton.cdiv(shape.head_dim, tile_p), shape.num_heads, shape.num_seqs)](
        x, dt, a, b, decay_sum, states, shape.num_chunks, shape.num_heads, shape.head_dim, shape.state_dim,
        *x.stride()[:3], *dt.stride()[:2], *b.stride()[:2],
        L=shape.chunk, TILE_P=tile_p, TILE_N=shape.tile_n, num_warps=4, num_stages=PASS_STAGES,
    )  # fmt: skip
    return decay_sum, states


def scan_forward(operands: Operands, chunk: int, *, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return y [B, S, H, P]; raises ValueError as `scan_shape` does."""
    shape = scan_shape(operands, chunk)
    x, dt, _, b, c, d = operands
    decay_sum, states = chunk_states(operands, shape)
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _output_kernel[(shape.tiles_p, shape.num_heads, shape.num_seqs * shape.num_chunks)](
        x, dt, b, c, d, decay_sum, states, y, shape.num_chunks, shape.num_heads, shape.head_dim, shape.state_dim,
        *x.stride()[:3], *dt.stride()[:2], *b.stride()[:2], *c.stride()[:2],
        L=shape.chunk, TILE_P=shape.tile_p, TILE_N=shape.tile_n, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return y


def reference_scan(operands: Operands) -> torch.Tensor:
    """Return y [B, S, H, P] token by token in plain PyTorch, in the dtype given; autograd gives gradients."""
    x, dt, a, b, c, d = operands
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)
        state = state * decay[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None]
        ys.append((state @ c[:, t, None, :, None])[..., 0] + d[:, None] * x[:, t])
    return torch.stack(ys, 1)
