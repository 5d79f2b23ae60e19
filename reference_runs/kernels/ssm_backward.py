"""The chunked scan of Mamba-2, backward: the gradients of x, dt, A, B, C and D.

Names as in `ssm`. The gradient of the state after each chunk runs back through the chunks; then two
kernels, one for what goes through the states and one for what stays inside the chunk. In each a program
takes a chunk, a tile of P and HEADS heads, one head after the other:

    dx          one writer                               ddt     a part for each tile of P
    dB, dC      a part for each (kernel, heads, tile)    dA, dD  a part for each (chunk, tile)

B and C are shared by all heads, A and D by all tokens, so parts meet; the switch says how:

    workspace   each part is written to its own slot; slots are summed in index order
                (`slots.sum_slots`): kernels, heads and tiles ascending, chunks in the order of time
    atomic      each part is added when its program gets there

Inside a program heads are added in ascending order by the kernel's loop, in both forms.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.slots import sum_slots
from bitcheck.reference_runs.kernels.ssm import (
    PASS_STAGES,
    PASS_TILE_P,
    PRECISION,
    Operands,
    Shape,
    chunk_states,
    load_tile,
    scan_shape,
)

ScanForm = Literal["workspace", "atomic"]
HEADS = 16
"""Heads that a program takes."""
NUM_WARPS = 8
NUM_STAGES = 1


@triton.jit
def _dstates_kernel(
    dy_ptr, c_ptr, decay_sum_ptr, dstates_ptr, num_chunks, num_heads, head_dim, state_dim,
    stride_dyb, stride_dys, stride_dyh, stride_cb, stride_cs,
    L: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    tile_p, head, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    ps, ns = tile_p * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    mask = (ps < head_dim)[:, None] & (ns < state_dim)[None, :]
    dstate = tl.zeros((TILE_P, TILE_N), dtype=tl.float32)
    for step in range(num_chunks):  # last chunk first: the order of the sum
        chunk = num_chunks - 1 - step
        cell = (seq * num_chunks + chunk) * num_heads + head
        out = dstates_ptr + cell * head_dim * state_dim + ps[:, None] * state_dim + ns[None, :]
        tl.store(out, dstate, mask=mask)
        decay_sum = tl.load(decay_sum_ptr + cell * L + tl.arange(0, L))
        total = tl.load(decay_sum_ptr + cell * L + L - 1)
        dy_base = dy_ptr + seq * stride_dyb + head * stride_dyh
        dy = load_tile(dy_base, stride_dys, chunk * L, head_dim, tile_p * TILE_P, L, TILE_P)
        c = load_tile(c_ptr + seq * stride_cb, stride_cs, chunk * L, state_dim, 0, L, TILE_N)
        own = tl.dot(tl.trans(dy * tl.exp(decay_sum)[:, None]), c, input_precision=PRECISION)
        dstate = own + dstate * tl.exp(total)


@triton.jit
def _add_part(ptrs, part, mask, FORM: tl.constexpr):
    if FORM == "atomic":
        tl.atomic_add(ptrs, part, mask=mask, sem="relaxed")
    else:
        tl.store(ptrs, part, mask=mask)


@triton.jit
def _through_states_kernel(
    dy_ptr, x_ptr, dt_ptr, b_ptr, c_ptr, decay_sum_ptr, states_ptr, dstates_ptr, dx_dt_ptr, dsum_ptr, db_ptr, dc_ptr,
    num_chunks, num_heads, head_dim, state_dim,
    stride_dyb, stride_dys, stride_dyh, stride_xb, stride_xs, stride_xh, stride_dtb, stride_dts,
    stride_bb, stride_bs, stride_cb, stride_cs, slot_dsum, slot_bc,
    L: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    tile_p, part = tl.program_id(0), tl.program_id(1)
    cell = tl.program_id(2).to(tl.int64)
    seq, first = cell // num_chunks, tl.program_id(2) % num_chunks * L
    positions = tl.arange(0, L)
    rows = cell * L + positions
    ps, ns = tile_p * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    state_mask = (ps < head_dim)[:, None] & (ns < state_dim)[None, :]
    db = tl.zeros((L, TILE_N), dtype=tl.float32)
    dc = tl.zeros((L, TILE_N), dtype=tl.float32)
    for head in range(part * HEADS, tl.minimum(part * HEADS + HEADS, num_heads)):  # ascending: the order of the sum
        dt = tl.load(dt_ptr + seq * stride_dtb + (first + positions).to(tl.int64) * stride_dts + head).to(tl.float32)
        at_head = cell * num_heads + head
        decay_sum = tl.load(decay_sum_ptr + at_head * L + positions)
        total = tl.load(decay_sum_ptr + at_head * L + L - 1)
        to_end = tl.exp(total - decay_sum)
        at_state = at_head * head_dim * state_dim + ps[:, None] * state_dim + ns[None, :]
        state = tl.load(states_ptr + at_state, mask=state_mask, other=0.0)

        # From the state before the chunk.
        dy_base = dy_ptr + seq * stride_dyb + head * stride_dyh
        dy = load_tile(dy_base, stride_dys, first, head_dim, tile_p * TILE_P, L, TILE_P)
        part_dc = tl.dot(dy * tl.exp(decay_sum)[:, None], state, input_precision=PRECISION)
        c = load_tile(c_ptr + seq * stride_cb, stride_cs, first, state_dim, 0, L, TILE_N)
        dsum = tl.sum(part_dc * c, axis=1)
        dc += part_dc

        # Through the state after it.
        dstate = tl.load(dstates_ptr + at_state, mask=state_mask, other=0.0)
        kept = tl.sum(tl.sum(dstate * state, axis=1), axis=0) * tl.exp(total)
        x = load_tile(
            x_ptr + seq * stride_xb + head * stride_xh, stride_xs, first, head_dim, tile_p * TILE_P, L, TILE_P
        )
        part_db = tl.dot(x * (dt * to_end)[:, None], dstate, input_precision=PRECISION)
        b = load_tile(b_ptr + seq * stride_bb, stride_bs, first, state_dim, 0, L, TILE_N)
        dto_end = tl.sum(part_db * b, axis=1)
        dsum += tl.where(positions == L - 1, kept + tl.sum(dto_end), 0.0) - dto_end
        db += part_db
        dx_dt = tl.dot(b, tl.trans(dstate), input_precision=PRECISION) * to_end[:, None]
        out = dx_dt_ptr + (rows[:, None] * num_heads + head) * head_dim + ps[None, :]
        tl.store(out, dx_dt, mask=(ps < head_dim)[None, :])
        tl.store(dsum_ptr + tile_p * slot_dsum + at_head * L + positions, dsum)

    at = (part * tl.num_programs(0) + tile_p) * slot_bc + rows[:, None] * state_dim + ns[None, :]
    mask = (ns < state_dim)[None, :] & (positions < L)[:, None]
    _add_part(db_ptr + at, db, mask, FORM)
    _add_part(dc_ptr + at, dc, mask, FORM)


@triton.jit
def _inside_chunk_kernel(
    dy_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, decay_sum_ptr, dx_dt_ptr, dsum_ptr,
    dx_ptr, ddt_ptr, da_ptr, db_ptr, dc_ptr, dd_ptr, num_chunks, num_heads, head_dim, state_dim,
    stride_dyb, stride_dys, stride_dyh, stride_xb, stride_xs, stride_xh, stride_dtb, stride_dts,
    stride_bb, stride_bs, stride_cb, stride_cs, slot_dsum, slot_ddt, slot_da, slot_bc,
    L: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr, HEADS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    tile_p, part = tl.program_id(0), tl.program_id(1)
    tiles_p = tl.num_programs(0)
    cell = tl.program_id(2).to(tl.int64)
    seq, first = cell // num_chunks, tl.program_id(2) % num_chunks * L
    positions = tl.arange(0, L)
    rows = cell * L + positions
    ps, ns = tile_p * TILE_P + tl.arange(0, TILE_P), tl.arange(0, TILE_N)
    past = positions[:, None] >= positions[None, :]
    b = load_tile(b_ptr + seq * stride_bb, stride_bs, first, state_dim, 0, L, TILE_N)
    c = load_tile(c_ptr + seq * stride_cb, stride_cs, first, state_dim, 0, L, TILE_N)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    dscores = tl.zeros((L, L), dtype=tl.float32)
    for head in range(part * HEADS, tl.minimum(part * HEADS + HEADS, num_heads)):  # ascending: the order of the sum
        dt = tl.load(dt_ptr + seq * stride_dtb + (first + positions).to(tl.int64) * stride_dts + head).to(tl.float32)
        at_head = cell * num_heads + head
        decay_sum = tl.load(decay_sum_ptr + at_head * L + positions)
        x = load_tile(
            x_ptr + seq * stride_xb + head * stride_xh, stride_xs, first, head_dim, tile_p * TILE_P, L, TILE_P
        )
        dy_base = dy_ptr + seq * stride_dyb + head * stride_dyh
        dy = load_tile(dy_base, stride_dys, first, head_dim, tile_p * TILE_P, L, TILE_P)
        # The exponent is masked, not the result: above the diagonal it is positive and could overflow.
        decay = tl.exp(tl.where(past, decay_sum[:, None] - decay_sum[None, :], float("-inf")))
        weights = scores * decay
        dweights = tl.dot(dy, tl.trans(x * dt[:, None]), input_precision=PRECISION)
        dscores += dweights * decay
        dexponent = dweights * weights
        dsum = tl.load(dsum_ptr + tile_p * slot_dsum + at_head * L + positions)
        dsum += tl.sum(dexponent, axis=1) - tl.sum(dexponent, axis=0)
        ddt_a = tl.cumsum(dsum, axis=0, reverse=True)

        at = (rows[:, None] * num_heads + head) * head_dim + ps[None, :]
        is_p = (ps < head_dim)[None, :]
        dx_dt = tl.dot(tl.trans(weights), dy, input_precision=PRECISION)
        dx_dt += tl.load(dx_dt_ptr + at, mask=is_p, other=0.0)
        dx = dx_dt * dt[:, None] + dy * tl.load(d_ptr + head)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=is_p)
        ddt = ddt_a * tl.load(a_ptr + head) + tl.sum(dx_dt * x, axis=1)
        _add_part(ddt_ptr + tile_p * slot_ddt + rows * num_heads + head, ddt, None, FORM)
        at_part = (cell * tiles_p + tile_p) * slot_da + head
        _add_part(da_ptr + at_part, tl.sum(ddt_a * dt), None, FORM)
        _add_part(dd_ptr + at_part, tl.sum(tl.sum(dy * x, axis=1), axis=0), None, FORM)

    at_bc = (part * tiles_p + tile_p) * slot_bc + rows[:, None] * state_dim + ns[None, :]
    mask = (ns < state_dim)[None, :] & (positions < L)[:, None]
    _add_part(dc_ptr + at_bc, tl.dot(dscores, b, input_precision=PRECISION), mask, FORM)
    _add_part(db_ptr + at_bc, tl.dot(tl.trans(dscores), c, input_precision=PRECISION), mask, FORM)


def scan_backward(
    dy: torch.Tensor, operands: Operands, chunk: int, *, form: ScanForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, dt, A, B, C and D: float32, shaped as they are.

    `dy` [B, S, H, P] is the gradient of `scan_forward`'s result; states are computed again. Raises
    ValueError for an unknown `form`, or as `scan_shape` does.
    """
    if form not in get_args(ScanForm):
        raise ValueError(f"ssm.backward: unknown form {form!r}; expected one of {', '.join(get_args(ScanForm))}")
    shape = scan_shape(operands, chunk)
    x, dt, a, b, c, d = operands
    if dy.shape != x.shape or dy.stride(-1) != 1:
        raise ValueError(f"dy {tuple(dy.shape)}; expected {tuple(x.shape)}, the last dimension contiguous")
    decay_sum, states = chunk_states(operands, shape)
    dstates = _state_gradients(dy, c, decay_sum, shape)

    num_cells = shape.num_seqs * shape.num_chunks
    num_parts = triton.cdiv(shape.num_heads, HEADS)
    in_slots = form == "workspace"

    def parts(num_slots: int, like: torch.Tensor) -> torch.Tensor:
        if in_slots:
            return torch.empty(num_slots, *like.shape, dtype=torch.float32, device=x.device)
        return torch.zeros(like.shape, dtype=torch.float32, device=x.device)

    dx = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dsum = torch.empty(shape.tiles_p, *decay_sum.shape, dtype=torch.float32, device=x.device)
    ddt = parts(shape.tiles_p, dt)
    da, dd = parts(num_cells * shape.tiles_p, a), parts(num_cells * shape.tiles_p, d)
    db, dc = parts(2 * num_parts * shape.tiles_p, b), parts(2 * num_parts * shape.tiles_p, c)
    slot_ddt, slot_da, slot_bc = (dt.numel(), a.numel(), b.numel()) if in_slots else (0, 0, 0)
    grid = (shape.tiles_p, num_parts, num_cells)
    extents = (shape.num_chunks, shape.num_heads, shape.head_dim, shape.state_dim)
    strides = (*dy.stride()[:3], *x.stride()[:3], *dt.stride()[:2], *b.stride()[:2], *c.stride()[:2])
    second = num_parts * shape.tiles_p if in_slots else 0
    own = slice(second) if in_slots else slice(None)
    # dx carries its part through the states from the first kernel to the second, which completes it.
    _through_states_kernel[grid](
        dy, x, dt, b, c, decay_sum, states, dstates, dx, dsum, db[own], dc[own], *extents, *strides,
        decay_sum.numel(), slot_bc,
        L=shape.chunk, TILE_P=shape.tile_p, TILE_N=shape.tile_n, HEADS=HEADS, FORM=form, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    _inside_chunk_kernel[grid](
        dy, x, dt, a, b, c, d, decay_sum, dx, dsum, dx, ddt, da, db[second:], dc[second:], dd, *extents, *strides,
        decay_sum.numel(), slot_ddt, slot_da, slot_bc,
        L=shape.chunk, TILE_P=shape.tile_p, TILE_N=shape.tile_n, HEADS=HEADS, FORM=form, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    if in_slots:
        ddt, da, db, dc, dd = (sum_slots(slots) for slots in (ddt, da, db, dc, dd))
    return dx, ddt, da, db, dc, dd


def _state_gradients(dy: torch.Tensor, c: torch.Tensor, decay_sum: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the gradient of the state after each chunk, float32 [B, G, H, P, N]."""
    lead = (shape.num_seqs, shape.num_chunks, shape.num_heads)
    dstates = torch.empty(*lead, shape.head_dim, shape.state_dim, dtype=torch.float32, device=dy.device)
    tile_p = min(PASS_TILE_P, shape.tile_p)
    _dstates_kernel[(triton.cdiv(shape.head_dim, tile_p), shape.num_heads, shape.num_seqs)](
        dy, c, decay_sum, dstates, shape.num_chunks, shape.num_heads, shape.head_dim, shape.state_dim,
        *dy.stride()[:3], *c.stride()[:2], L=shape.chunk, TILE_P=tile_p, TILE_N=shape.tile_n,
        num_warps=4, num_stages=PASS_STAGES,
    )  # fmt: skip
    return dstates
