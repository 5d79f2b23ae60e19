"""SwiGLU and the quantisation around it in one pass over memory each way; widths are multiples of 128.

    forward    h [R, 2 F] bfloat16     ->  h in FP8 by 1x128, to be cached, and a = prob * silu(gate) * up by 1x128
    backward   h in FP8 by 1x128       ->  a again, quantised in columns, 128x1, and transposed: what a wgrad reads

In two passes (`swiglu`, then `quantise`) a is written and read in between, and h is read once more. Nothing is
summed and every element has one writer. `a` is not rounded to bfloat16 on its way, which the two passes do.
Formulas: `casts`; layouts: `quantise`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.casts import magnitude_bits, scale_of_amax, to_e4m3
from bitcheck.reference_runs.kernels.quantise import BLOCK, Quantised
from bitcheck.reference_runs.kernels.schedule import GroupSchedule

ROWS_TILE = 16
"""Rows of a program of the forward."""
COLUMNS_TILE = 32
"""Channels of a program of the backward."""
NUM_WARPS = 4


@triton.jit
def _store_rows(x, q_ptr, s_ptr, rows, cols, block, is_row, stride_q, stride_sb, BY_BITS: tl.constexpr):
    """Quantise float32 `x` [rows, 128] by 1x128 and store codes and scales."""
    scale = scale_of_amax(tl.max(magnitude_bits(x), axis=1), False)
    q = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), BY_BITS)
    at = rows[:, None].to(tl.int64) * stride_q + cols[None, :]
    tl.store(q_ptr + at, q, mask=is_row[:, None])
    tl.store(s_ptr + block * stride_sb + rows, scale, mask=is_row)


@triton.jit
def _forward_kernel(
    h_ptr, prob_ptr, hq_ptr, hs_ptr, aq_ptr, as_ptr, num_rows, num_cols, stride_h,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, HAS_PROB: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    is_row = rows < num_rows
    at = h_ptr + rows[:, None].to(tl.int64) * stride_h + cols[None, :]
    gate = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + num_cols, mask=is_row[:, None], other=0.0).to(tl.float32)
    _store_rows(gate, hq_ptr, hs_ptr, rows, cols, block, is_row, 2 * num_cols, num_rows, BY_BITS)
    _store_rows(up, hq_ptr, hs_ptr, rows, cols + num_cols, block + blocks, is_row, 2 * num_cols, num_rows, BY_BITS)
    a = gate * tl.sigmoid(gate) * up
    if HAS_PROB:
        a *= tl.load(prob_ptr + rows, mask=is_row, other=0.0)[:, None]
    _store_rows(a, aq_ptr, as_ptr, rows, cols, block, is_row, num_cols, num_rows, BY_BITS)


@triton.jit
def _columns_kernel(
    hq_ptr, hs_ptr, prob_ptr, q_ptr, s_ptr, tile_begin_ptr, tile_end_ptr, num_rows, num_cols, stride_hs, stride_qc,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUPED: tl.constexpr, HAS_PROB: tl.constexpr,
    BY_BITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if GROUPED:
        begin = tl.load(tile_begin_ptr + tile)
        end = tl.minimum(tl.load(tile_end_ptr + tile), begin + BLOCK_R)
    else:
        begin = tile * BLOCK_R
        end = tl.minimum(num_rows, begin + BLOCK_R)
    lane = tl.arange(0, BLOCK_R)
    rows = begin + lane
    is_row = rows < end
    wide = rows.to(tl.int64)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)  # BLOCK_C divides 128: all in one block of scales
    at = hq_ptr + wide[:, None] * (2 * num_cols) + cols[None, :]
    block = tl.program_id(0) * BLOCK_C // 128
    gate_scale = tl.load(hs_ptr + block * stride_hs + rows, mask=is_row, other=0.0)
    up_scale = tl.load(hs_ptr + (block + num_cols // 128) * stride_hs + rows, mask=is_row, other=0.0)
    gate = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32) * gate_scale[:, None]
    up = tl.load(at + num_cols, mask=is_row[:, None], other=0.0).to(tl.float32) * up_scale[:, None]
    a = gate * tl.sigmoid(gate) * up
    if HAS_PROB:
        a *= tl.load(prob_ptr + rows, mask=is_row, other=0.0)[:, None]
    scale = scale_of_amax(tl.max(magnitude_bits(a), axis=0), False)
    q = to_e4m3(tl.div_rn(a, tl.broadcast_to(scale[None, :], a.shape)), BY_BITS)
    # All BLOCK_R tokens are written, so the padding is zeros and not what the memory held.
    out = cols[:, None].to(tl.int64) * stride_qc + tile * BLOCK_R + lane[None, :]
    tl.store(q_ptr + out, tl.trans(q))
    tl.store(s_ptr + tile.to(tl.int64) * num_cols + cols, scale)


def swiglu_quantise(hidden: torch.Tensor, prob: torch.Tensor | None = None) -> tuple[Quantised, Quantised]:
    """Return (a [R, F], h [R, 2 F]), both by rows, from `hidden` [R, 2 F], gate then up, rows contiguous inside.

    `prob` float32 [R]. Raises ValueError where F is no multiple of 128.
    """
    num_rows, num_cols = hidden.shape[0], hidden.shape[1] // 2
    _check(hidden, num_cols)
    device = hidden.device
    h, a = (
        Quantised(
            torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(width // BLOCK, num_rows, dtype=torch.float32, device=device).T,
            1,
        )
        for width in (2 * num_cols, num_cols)
    )
    if num_rows:
        _forward_kernel[(num_cols // BLOCK, triton.cdiv(num_rows, ROWS_TILE))](
            hidden, prob, h.values, h.scales, a.values, a.scales, num_rows, num_cols, hidden.stride(0),
            BLOCK_R=ROWS_TILE, BLOCK_C=BLOCK, HAS_PROB=prob is not None, BY_BITS=not hidden.is_cuda,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return a, h


def swiglu_columns(
    hidden: Quantised, prob: torch.Tensor | None = None, schedule: GroupSchedule | None = None
) -> Quantised:
    """Return a, quantised in columns as `quantise_columns` does under `schedule`, from the cached `hidden` [R, 2 F].

    Raises ValueError where F is no multiple of 128.
    """
    num_rows, num_cols = hidden.values.shape[0], hidden.values.shape[1] // 2
    _check(hidden.values, num_cols)
    if hidden.rows_per_scale != 1 or hidden.scales.stride(0) != 1:
        raise ValueError("swiglu_columns takes rows of 1x128 tiles as swiglu_quantise lays them out")
    num_tiles = triton.cdiv(num_rows, BLOCK) if schedule is None else schedule.num_tiles
    device = hidden.values.device
    values = torch.empty(num_cols, num_tiles * BLOCK, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(num_tiles, num_cols, dtype=torch.float32, device=device)
    if values.numel():
        _columns_kernel[(num_cols // COLUMNS_TILE, num_tiles)](
            hidden.values, hidden.scales, prob, values, scales,
            None if schedule is None else schedule.tile_begin, None if schedule is None else schedule.tile_end,
            num_rows, num_cols, hidden.scales.stride(1), values.stride(0), BLOCK_R=BLOCK, BLOCK_C=COLUMNS_TILE,
            GROUPED=schedule is not None, HAS_PROB=prob is not None, BY_BITS=not values.is_cuda, num_warps=NUM_WARPS,
        )  # fmt: skip
    return Quantised(values, scales.T, 1)


def takes(num_cols: int) -> bool:
    """Tell whether a width F is one that these kernels take."""
    return num_cols % BLOCK == 0


def _check(hidden: torch.Tensor, num_cols: int) -> None:
    if not takes(num_cols) or hidden.shape[1] != 2 * num_cols or hidden.stride(1) != 1:
        raise ValueError(f"hidden {tuple(hidden.shape)}: expected [R, 2 F] with F a multiple of {BLOCK}")
