"""FP8 GEMM over experts, and the SwiGLU backward with dprob in its epilogue.

Rows are sorted by expert (see `schedule`); rows of expert e meet that expert's weight. Shapes:

    R  rows, one a (token, chosen expert)     D  model width     F  expert width     E  experts

    grouped_gemm             x [R, K] @ w[e] [N, K]^T                     -> [R, N]
    grouped_dgrad_swiglu     dy [R, F] = dz [R, D] @ w2[e]^T [F, D]^T     stays in registers; from it
                             dgate, dup [R, F], the gradients of SwiGLU's inputs, and
                             dprob[r] = sum over n of dy[r, n] * silu(gate)[r, n] * up[r, n]

for y = prob * silu(gate) * up and z = y w2^T. dprob sums over F, which spans several N tiles, each
computed by another program. That is the race, and it has three forms:

    slots    tile n writes its part to slots[n, r], one writer each; a second launch sums the slots in
             index order (`slots.sum_slots`). To let the last tile to arrive do it was slower: each tile
             then waits until its other results have left the multiprocessor
    serial   tiles take turns: tile n waits until n - 1 has added, so dprob grows in the order of n. A
             program draws its tile from a counter, so whoever waits, waits for a tile already running
    atomic   every tile adds to dprob[r] when it gets there: the order is that of the GPU's scheduler

Tiles of the same rows are launched side by side (n runs fastest): with rows fastest they would arrive
one wave after another, and the atomic form looks reproducible while it is not. Inside a tile, its four
quarters are added from the left, and in a quarter `tl.sum` over the columns is the order; that depends
on the tile's width and the warps, hence constants.
slots and serial add in the same order and give the same bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.gemm import (
    NUM_STAGES,
    NUM_WARPS,
    TILE_M,
    TILE_N,
    accumulate_tile,
    tile_descriptor,
)
from bitcheck.reference_runs.kernels.quantise import BLOCK, Quantised
from bitcheck.reference_runs.kernels.schedule import TILE_ROWS, GroupSchedule
from bitcheck.reference_runs.kernels.slots import sum_slots

DprobForm = Literal["slots", "serial", "atomic"]
EPILOGUE_REGISTERS = 168
"""A thread, at most, so that three programs with an epilogue share a multiprocessor; no bit depends on it."""


@triton.jit
def _grouped_gemm_kernel(
    lhs_desc, rhs_desc, lhs_scale_ptr, rhs_scale_ptr, out_ptr, tile_expert_ptr, tile_begin_ptr, tile_end_ptr,
    num_rows, num_cols, num_blocks, stride_lsr, stride_lsb, stride_rse, stride_rsr, stride_rsb,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile_n = tl.program_id(0)
    tile = tl.program_id(1) // PARTS
    expert = tl.load(tile_expert_ptr + tile)
    begin = tl.load(tile_begin_ptr + tile) + tl.program_id(1) % PARTS * TILE_M
    end = tl.load(tile_end_ptr + tile)
    if begin >= end:
        return
    rows = begin + tl.arange(0, TILE_M)
    cols = tile_n * TILE_N + tl.arange(0, TILE_N)
    out = accumulate_tile(
        lhs_desc, rhs_desc, lhs_scale_ptr + tl.minimum(rows, num_rows - 1) * stride_lsr,
        rhs_scale_ptr + expert * stride_rse + tile_n * stride_rsr, begin, expert * num_cols + tile_n * TILE_N,
        0, num_blocks, stride_lsb, stride_rsb, TILE_M, TILE_N, BLOCK_K, False,
    )  # fmt: skip
    mask = (rows < end)[:, None] & (cols < num_cols)[None, :]
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def halve(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the left and the right half of `tile` [ROWS, COLS]."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1)))


@triton.jit
def _swiglu_epilogue(
    dy, rows, cols, is_row, prob, hidden_ptr, scale_ptr, dhidden_ptr, num_cols, stride_hr, stride_hsb,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write dgate and dup of some columns of a tile; return their part of dprob, one number a row."""
    is_col = cols < num_cols
    mask = is_row[:, None] & is_col[None, :]
    wide = rows[:, None].to(tl.int64)
    hidden_ptrs = hidden_ptr + wide * stride_hr + cols[None, :]
    gate = tl.load(hidden_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptrs + num_cols, mask=mask, other=0.0).to(tl.float32)
    if SCALED:  # by 1x128 along [gate | up]
        if ALIGNED:  # a quarter of a tile lies inside one block
            block = tl.min(cols, axis=0) // 128
            gate *= tl.load(scale_ptr + block * stride_hsb + rows, mask=is_row, other=0.0)[:, None]
            block += num_cols // 128
            up *= tl.load(scale_ptr + block * stride_hsb + rows, mask=is_row, other=0.0)[:, None]
        else:  # a block holds some of both halves
            scale_ptrs = scale_ptr + rows[:, None] + (cols // 128 * stride_hsb)[None, :]
            gate *= tl.load(scale_ptrs, mask=mask, other=0.0)
            scale_ptrs = scale_ptr + rows[:, None] + ((cols + num_cols) // 128 * stride_hsb)[None, :]
            up *= tl.load(scale_ptrs, mask=mask, other=0.0)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dy = tl.where(mask, dy, 0.0)  # past the last column lies the next expert's weight
    dact = dy * prob[:, None]
    dgate = dact * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    dhidden_ptrs = dhidden_ptr + wide * (2 * num_cols) + cols[None, :]
    tl.store(dhidden_ptrs, dgate.to(dhidden_ptr.dtype.element_ty), mask=mask)
    tl.store(dhidden_ptrs + num_cols, (dact * silu).to(dhidden_ptr.dtype.element_ty), mask=mask)
    return tl.sum(dy * (silu * up), axis=1)


@triton.jit
def _dswiglu_kernel(
    lhs_desc, rhs_desc, lhs_scale_ptr, rhs_scale_ptr, hidden_ptr, hidden_scale_ptr, prob_ptr, dhidden_ptr,
     dprob_ptr, slots_ptr, turn_ptr, tile_expert_ptr, tile_begin_ptr, tile_end_ptr,
    num_rows, num_cols, num_blocks, tiles_n, stride_lsr, stride_lsb, stride_rse, stride_rsr, stride_rsb,
    stride_hr, stride_hsb,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    if FORM == "serial":
        pid = tl.atomic_add(turn_ptr, 1)  # tiles start in the order of this counter, whatever the launch order
    else:
        pid = tl.program_id(0)
    tile_n = pid % tiles_n
    row_tile = pid // tiles_n
    tile = row_tile // PARTS
    expert = tl.load(tile_expert_ptr + tile)
    begin = tl.load(tile_begin_ptr + tile) + row_tile % PARTS * TILE_M
    end = tl.load(tile_end_ptr + tile)
    if begin >= end:
        return
    rows = begin + tl.arange(0, TILE_M)
    dy = accumulate_tile(
        lhs_desc, rhs_desc, lhs_scale_ptr + tl.minimum(rows, num_rows - 1) * stride_lsr,
        rhs_scale_ptr + expert * stride_rse + tile_n * stride_rsr, begin, expert * num_cols + tile_n * TILE_N,
        0, num_blocks, stride_lsb, stride_rsb, TILE_M, TILE_N, BLOCK_K, False,
    )  # fmt: skip

    # The epilogue takes the tile's columns in quarters, from the left: a quarter of the registers.
    is_row = rows < end
    prob = tl.load(prob_ptr + rows, mask=is_row, other=0.0)
    left, right = halve(dy, TILE_M, TILE_N)
    part = tl.zeros((TILE_M,), dtype=tl.float32)
    for half in tl.static_range(2):
        quarter_0, quarter_1 = halve(left if half == 0 else right, TILE_M, TILE_N // 2)
        for quarter in tl.static_range(2):
            cols = tile_n * TILE_N + (2 * half + quarter) * (TILE_N // 4) + tl.arange(0, TILE_N // 4)
            part += _swiglu_epilogue(
                quarter_0 if quarter == 0 else quarter_1, rows, cols, is_row, prob, hidden_ptr, hidden_scale_ptr,
                dhidden_ptr, num_cols, stride_hr, stride_hsb, SCALED, ALIGNED,
            )  # fmt: skip

    if FORM == "slots":
        tl.store(slots_ptr + tile_n.to(tl.int64) * num_rows + rows, part, mask=is_row)
    elif FORM == "atomic":
        tl.atomic_add(dprob_ptr + rows, part, mask=is_row, sem="relaxed")
    else:
        turn = turn_ptr + 1 + row_tile
        while tl.atomic_add(turn, 0, sem="acquire") != tile_n:
            pass
        before = tl.load(dprob_ptr + rows, mask=is_row & (tile_n > 0), other=0.0, cache_modifier=".cg")
        tl.store(dprob_ptr + rows, tl.where(tile_n > 0, before + part, part), mask=is_row)
        tl.debug_barrier()  # every thread's sum is written before the next tile may read it
        tl.atomic_add(turn, 1, sem="release")


def _check_operands(lhs: Quantised, rhs: Quantised, schedule: GroupSchedule) -> None:
    num_rows, num_k = lhs.values.shape
    expected = (schedule.num_experts, rhs.values.shape[1], num_k)
    if num_rows != schedule.num_rows or lhs.rows_per_scale != 1 or rhs.rows_per_scale != BLOCK:
        raise ValueError(f"{num_rows} rows; expected {schedule.num_rows} by 1x128, and weights by 128x128")
    if rhs.values.dim() != 3 or rhs.values.shape != expected:
        raise ValueError(f"weights {tuple(rhs.values.shape)}; expected [experts, N, K] = {expected}")


def grouped_gemm(
    lhs: Quantised, rhs: Quantised, schedule: GroupSchedule, *, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Multiply the rows `lhs` [R, K] of each expert with its weight `rhs` [E, N, K], to [R, N].

    For fprop give the weights, for dgrad their transposes (`quantise_weight` returns both). Raises
    ValueError where shapes do not fit or K is not a multiple of 16.
    """
    _check_operands(lhs, rhs, schedule)
    num_rows, num_k = lhs.values.shape
    num_cols = rhs.values.shape[1]
    out = torch.empty(num_rows, num_cols, dtype=out_dtype, device=lhs.values.device)
    if out.numel():
        parts = TILE_ROWS // TILE_M
        _grouped_gemm_kernel[(triton.cdiv(num_cols, TILE_N), schedule.num_tiles * parts)](
            tile_descriptor(lhs.values, TILE_M), tile_descriptor(rhs.values, TILE_N), lhs.scales, rhs.scales, out,
            schedule.tile_expert, schedule.tile_begin, schedule.tile_end, num_rows, num_cols,
            triton.cdiv(num_k, BLOCK), *lhs.scales.stride(), *rhs.scales.stride(),
            TILE_M=TILE_M, TILE_N=TILE_N, BLOCK_K=BLOCK, PARTS=parts,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
    return out


def grouped_dgrad_swiglu(
    lhs: Quantised,
    rhs: Quantised,
    schedule: GroupSchedule,
    hidden: torch.Tensor | Quantised,
    prob: torch.Tensor,
    *,
    form: DprobForm,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dhidden [R, 2 F], dprob float32 [R]) from the gradient of the experts' outputs.

    `lhs` [R, D] is that gradient by rows, `rhs` [E, F, D] the transposed w2; `hidden` [R, 2 F] holds
    SwiGLU's inputs as they were cached, gate then up, as a tensor or by rows in FP8; `prob` float32 [R]
    is each row's routing probability. dhidden holds dgate, then dup. Raises ValueError for an unknown
    `form`, shapes that do not fit, or D not a multiple of 16.
    """
    _check_operands(lhs, rhs, schedule)
    if form not in get_args(DprobForm):
        raise ValueError(f"moe.dprob: unknown form {form!r}; expected one of {', '.join(get_args(DprobForm))}")
    num_rows, num_k = lhs.values.shape
    num_cols = rhs.values.shape[1]
    values, scales = (hidden.values, hidden.scales) if isinstance(hidden, Quantised) else (hidden, None)
    if values.shape != (num_rows, 2 * num_cols) or prob.shape != (num_rows,):
        raise ValueError(
            f"hidden {tuple(values.shape)}, prob {tuple(prob.shape)}; "
            f"expected {(num_rows, 2 * num_cols)} and {(num_rows,)}"
        )
    device = lhs.values.device
    tiles_n, parts = triton.cdiv(num_cols, TILE_N), TILE_ROWS // TILE_M
    row_tiles = schedule.num_tiles * parts
    dhidden = torch.empty(num_rows, 2 * num_cols, dtype=out_dtype, device=device)
    fill = torch.zeros if form == "atomic" else torch.empty
    dprob = fill(num_rows, dtype=torch.float32, device=device)
    slots = torch.empty(tiles_n, num_rows, dtype=torch.float32, device=device) if form == "slots" else None
    turns = torch.zeros(1 + row_tiles, dtype=torch.int32, device=device) if form == "serial" else None
    if not num_rows:
        return dhidden, dprob
    _dswiglu_kernel[(tiles_n * row_tiles,)](
        tile_descriptor(lhs.values, TILE_M), tile_descriptor(rhs.values, TILE_N), lhs.scales, rhs.scales,
        values, scales, prob, dhidden, dprob if slots is None else None, slots, turns,
        schedule.tile_expert, schedule.tile_begin, schedule.tile_end, num_rows, num_cols,
        triton.cdiv(num_k, BLOCK), tiles_n, *lhs.scales.stride(), *rhs.scales.stride(),
        values.stride(0), 0 if scales is None else scales.stride(1),
        TILE_M=TILE_M, TILE_N=TILE_N, BLOCK_K=BLOCK, PARTS=parts, SCALED=scales is not None,
        ALIGNED=num_cols % BLOCK == 0, FORM=form,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES, maxnreg=EPILOGUE_REGISTERS,
    )  # fmt: skip
    return dhidden, dprob if slots is None else sum_slots(slots, out=dprob)


def reference_grouped_gemm(lhs: torch.Tensor, rhs: torch.Tensor, schedule: GroupSchedule) -> torch.Tensor:
    """Multiply rows [R, K] with their expert's weight [E, N, K] in plain PyTorch, in the dtype given."""
    out = lhs.new_zeros(lhs.shape[0], rhs.shape[1])
    bounds = schedule.offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        out[begin:end] = lhs[begin:end] @ rhs[expert].T
    return out


def reference_dgrad_swiglu(
    lhs: torch.Tensor, rhs: torch.Tensor, schedule: GroupSchedule, hidden: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dhidden, dprob) in plain PyTorch from plain matrices, in the dtype given."""
    gate, up = hidden.chunk(2, dim=1)
    dy = reference_grouped_gemm(lhs, rhs, schedule)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dact = dy * prob[:, None]
    dgate = dact * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, dact * silu], 1), (dy * silu * up).sum(1)
