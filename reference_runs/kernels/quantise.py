"""Quantisation to e4m3 in tiles of 1x128, 128x1 and 128x128.

    quantise_rows      x [R, C] -> values [R, C], a scale for each row and 128 columns
    quantise_columns   x [T, C] -> values [C, T'], a scale for each channel and 128 tokens: the transpose,
                       because a wgrad sums over tokens and FP8 tensor cores want that dimension innermost
    round_rows         the same values as quantise_rows gives, as bfloat16
    quantise_weight    w [N, C] -> values [N, C] and [C, N], a scale for each 128x128 block

So every result is laid out for a GEMM that sums over its last dimension. Scales are float32 and are
stored with the rows innermost (a tile reads 128 of them at once); as tensors they have the shape that
one expects, [rows, blocks]. Tokens are padded with zeros to whole blocks; with a schedule, each expert
starts a block of its own, so a block never holds the tokens of two experts.

No program touches what another writes, so there is no order to fix. Formulas: `casts`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.casts import (
    magnitude_bits,
    reference_cast,
    reference_scale,
    scale_of_amax,
    to_e4m3,
)
from bitcheck.reference_runs.kernels.schedule import GroupSchedule

BLOCK = 128
"""Elements that share a scale, along the dimension that a GEMM sums over."""
ROWS_TILE = 32
"""Rows of a program of quantise_rows."""
COLUMNS_TILE = 32
"""Channels of a program of quantise_columns."""
COLUMNS_WARPS = 4
WEIGHT_WARPS = 16


@dataclass(frozen=True)
class Quantised:
    """A matrix as e4m3 values and float32 scales, to be summed over its last dimension."""

    values: torch.Tensor
    """float8_e4m3fn [..., R, C], C innermost."""
    scales: torch.Tensor
    """float32 [..., ceil(R / rows_per_scale), ceil(C / 128)]."""
    rows_per_scale: int
    """1 for activations and gradients, 128 for weights."""

    def dequantise(self) -> torch.Tensor:
        """Return the float32 matrix [..., R, C] that values and scales stand for."""
        num_rows, num_cols = self.values.shape[-2:]
        scales = self.scales.repeat_interleave(self.rows_per_scale, -2)[..., :num_rows, :]
        return self.values.float() * scales.repeat_interleave(BLOCK, -1)[..., :num_cols]


@triton.jit
def _rows_kernel(
    x_ptr, q_ptr, s_ptr, num_rows, num_cols, stride_xr, stride_qr, stride_sb,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, POWER_OF_TWO: tl.constexpr, BY_BITS: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = block * BLOCK_C + tl.arange(0, BLOCK_C)
    is_row = rows < num_rows
    mask = is_row[:, None] & (cols < num_cols)[None, :]
    wide = rows.to(tl.int64)
    x = tl.load(x_ptr + wide[:, None] * stride_xr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = scale_of_amax(tl.max(magnitude_bits(x), axis=1), POWER_OF_TWO)
    q = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), BY_BITS)
    if ROUND:
        rounded = q.to(tl.float32) * scale[:, None]
        tl.store(q_ptr + wide[:, None] * stride_qr + cols[None, :], rounded.to(tl.bfloat16), mask=mask)
    else:
        tl.store(q_ptr + wide[:, None] * stride_qr + cols[None, :], q, mask=mask)
        tl.store(s_ptr + block * stride_sb + rows, scale, mask=is_row)


@triton.jit
def _columns_kernel(
    x_ptr, xs_ptr, q_ptr, s_ptr, tile_begin_ptr, tile_end_ptr, num_rows, num_cols, stride_xr, stride_xsb, stride_qc,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    if GROUPED:
        begin = tl.load(tile_begin_ptr + tile)
        end = tl.minimum(tl.load(tile_end_ptr + tile), begin + BLOCK_R)
    else:
        begin = tile * BLOCK_R
        end = tl.minimum(num_rows, begin + BLOCK_R)
    lane = tl.arange(0, BLOCK_R)
    rows = (begin + lane).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_row = rows < end
    is_col = cols < num_cols
    mask = is_row[:, None] & is_col[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALED:  # BLOCK_C divides 128: one block of the 1x128 scales holds all of this tile's channels
        block = tl.program_id(0) * BLOCK_C // 128
        x = x * tl.load(xs_ptr + block * stride_xsb + rows, mask=is_row, other=0.0)[:, None]
    scale = scale_of_amax(tl.max(magnitude_bits(x), axis=0), POWER_OF_TWO)
    q = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape)), BY_BITS)
    # All BLOCK_R tokens are written, so the padding is zeros and not what the memory held.
    at = cols[:, None].to(tl.int64) * stride_qc + tile * BLOCK_R + lane[None, :]
    tl.store(q_ptr + at, tl.trans(q), mask=is_col[:, None])
    tl.store(s_ptr + tile.to(tl.int64) * num_cols + cols, scale, mask=is_col)


@triton.jit
def _weight_kernel(
    w_ptr, q_ptr, qt_ptr, s_ptr, num_rows, num_cols, num_col_blocks,
    BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    col_block, row_block, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = row_block * BLOCK + tl.arange(0, BLOCK)
    cols = col_block * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    base = expert.to(tl.int64) * num_rows * num_cols
    at = rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    w = tl.load(w_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of_amax(tl.max(tl.max(magnitude_bits(w), axis=1), axis=0), POWER_OF_TWO)
    q = to_e4m3(tl.div_rn(w, tl.full(w.shape, 1.0, tl.float32) * scale), BY_BITS)
    tl.store(q_ptr + base + at, q, mask=mask)
    at_t = cols[:, None].to(tl.int64) * num_rows + rows[None, :]
    tl.store(qt_ptr + base + at_t, tl.trans(q), mask=tl.trans(mask))
    tl.store(s_ptr + (expert * tl.num_programs(1) + row_block) * num_col_blocks + col_block, scale)


def quantise_rows(x: torch.Tensor, *, power_of_two: bool = False, by_bits: bool | None = None) -> Quantised:
    """Quantise `x` [R, C], bfloat16 or float32, innermost dimension contiguous, in tiles of 1x128.

    `by_bits` picks the cast (the same bits either way): integer operations, or on a GPU, where it is
    the default, the hardware's instruction.
    """
    num_rows, num_cols = x.shape
    _check_innermost(x)
    num_blocks = triton.cdiv(num_cols, BLOCK)
    values = torch.empty(num_rows, num_cols, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_blocks, num_rows, dtype=torch.float32, device=x.device)
    if x.numel():
        _rows_kernel[(num_blocks, triton.cdiv(num_rows, ROWS_TILE))](
            x, values, scales, num_rows, num_cols, x.stride(0), values.stride(0), scales.stride(0),
            BLOCK_R=ROWS_TILE, BLOCK_C=BLOCK, POWER_OF_TWO=power_of_two, BY_BITS=_by_bits(x, by_bits), ROUND=False,
            num_warps=4,
        )  # fmt: skip
    return Quantised(values, scales.T, 1)


def round_rows(x: torch.Tensor, *, by_bits: bool | None = None) -> torch.Tensor:
    """Return what `quantise_rows(x, power_of_two=True)` stands for, bfloat16 [R, C]; for R up to 2 million.

    Three bits of mantissa times a power of two: bfloat16 holds each of these values exactly.
    """
    num_rows, num_cols = x.shape
    _check_innermost(x)
    rounded = torch.empty(num_rows, num_cols, dtype=torch.bfloat16, device=x.device)
    if x.numel():
        _rows_kernel[(triton.cdiv(num_cols, BLOCK), triton.cdiv(num_rows, ROWS_TILE))](
            x, rounded, None, num_rows, num_cols, x.stride(0), rounded.stride(0), 0,
            BLOCK_R=ROWS_TILE, BLOCK_C=BLOCK, POWER_OF_TWO=True, BY_BITS=_by_bits(x, by_bits), ROUND=True,
            num_warps=4,
        )  # fmt: skip
    return rounded


def quantise_columns(
    x: torch.Tensor | Quantised,
    schedule: GroupSchedule | None = None,
    *,
    power_of_two: bool = False,
    by_bits: bool | None = None,
) -> Quantised:
    """Quantise `x` [T, C] in tiles of 128x1 and transpose it: values [C, T'], scales [C, T' / 128].

    `x` is bfloat16 or float32, or a matrix already quantised in rows (a cached activation), which is
    multiplied out to float32 first. T' is T rounded up to 128; with a `schedule`, 128 a tile of it,
    and tile i holds its tokens at columns 128 i and up. What no token fills is zero.
    """
    source = x.values if isinstance(x, Quantised) else x
    _check_innermost(source)
    if isinstance(x, Quantised) and (x.rows_per_scale != 1 or x.scales.stride(0) != 1):
        raise ValueError("quantise_columns takes rows of 1x128 tiles as quantise_rows lays them out")
    num_rows, num_cols = source.shape
    num_tiles = triton.cdiv(num_rows, BLOCK) if schedule is None else schedule.num_tiles
    values = torch.empty(num_cols, num_tiles * BLOCK, dtype=torch.float8_e4m3fn, device=source.device)
    scales = torch.empty(num_tiles, num_cols, dtype=torch.float32, device=source.device)
    if values.numel():
        _columns_kernel[(triton.cdiv(num_cols, COLUMNS_TILE), num_tiles)](
            source, x.scales if isinstance(x, Quantised) else None, values, scales,
            None if schedule is None else schedule.tile_begin, None if schedule is None else schedule.tile_end,
            num_rows, num_cols, source.stride(0), x.scales.stride(1) if isinstance(x, Quantised) else 0,
            values.stride(0), BLOCK_R=BLOCK, BLOCK_C=COLUMNS_TILE, SCALED=isinstance(x, Quantised),
            GROUPED=schedule is not None, POWER_OF_TWO=power_of_two, BY_BITS=_by_bits(source, by_bits),
            num_warps=COLUMNS_WARPS,
        )  # fmt: skip
    return Quantised(values, scales.T, 1)


def quantise_weight(
    weight: torch.Tensor,
    *,
    power_of_two: bool = False,
    by_bits: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Quantised, Quantised]:
    """Quantise `weight` [N, C] or [E, N, C], contiguous, in blocks of 128x128; return it and its transpose.

    The first is for fprop (sums over C), the second, [C, N] or [E, C, N], for dgrad (sums over N). A
    block's scale is the same in both: the transpose costs no second rounding. `out` are tensors for
    the values of both, contiguous; new ones by default.
    """
    if not weight.is_contiguous() or weight.dim() not in (2, 3):
        raise ValueError(f"weight {tuple(weight.shape)}: expected contiguous [N, C] or [experts, N, C]")
    *lead, num_rows, num_cols = weight.shape
    row_blocks, col_blocks = triton.cdiv(num_rows, BLOCK), triton.cdiv(num_cols, BLOCK)
    if out is None:
        values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        out = values, values.new_empty(*lead, num_cols, num_rows)
    values, values_t = out
    if values.shape != weight.shape or values_t.shape != weight.mT.shape or not all(o.is_contiguous() for o in out):
        raise ValueError(f"out {[tuple(o.shape) for o in out]}: expected contiguous tensors for {tuple(weight.shape)}")
    scales = torch.empty(*lead, row_blocks, col_blocks, dtype=torch.float32, device=weight.device)
    _weight_kernel[(col_blocks, row_blocks, lead[0] if lead else 1)](
        weight, values, values_t, scales, num_rows, num_cols, col_blocks,
        BLOCK=BLOCK, POWER_OF_TWO=power_of_two, BY_BITS=_by_bits(weight, by_bits), num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return Quantised(values, scales, BLOCK), Quantised(values_t, scales.transpose(-1, -2), BLOCK)


def reference_rows(x: torch.Tensor, power_of_two: bool = False) -> Quantised:
    """Quantise [..., C] in tiles of 1x128 in plain PyTorch."""
    x_tiles = _pad(x.float(), BLOCK, -1).unflatten(-1, (-1, BLOCK))
    scales = reference_scale(x_tiles.abs().amax(-1), power_of_two)
    return Quantised(reference_cast(x_tiles / scales[..., None]).flatten(-2)[..., : x.shape[-1]], scales, 1)


def reference_columns(x: torch.Tensor, schedule: GroupSchedule | None = None, power_of_two: bool = False) -> Quantised:
    """Quantise [T, C] in tiles of 128x1 and transpose it, in plain PyTorch."""
    if schedule is None:
        tiles = _pad(x.float(), BLOCK, 0).unflatten(0, (-1, BLOCK))
    else:
        tiles = x.new_zeros(schedule.num_tiles, BLOCK, x.shape[1], dtype=torch.float32)
        bounds = zip(schedule.tile_begin.tolist(), schedule.tile_end.tolist(), strict=True)
        for tile, (begin, end) in enumerate(bounds):
            rows = x[begin : min(end, begin + BLOCK)].float()
            tiles[tile, : len(rows)] = rows
    return reference_rows(tiles.flatten(0, 1).T.contiguous(), power_of_two)


def reference_weight(weight: torch.Tensor, power_of_two: bool = False) -> Quantised:
    """Quantise [..., N, C] in blocks of 128x128 in plain PyTorch."""
    num_rows, num_cols = weight.shape[-2:]
    padded = _pad(_pad(weight.float(), BLOCK, -1), BLOCK, -2)
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., rows, 128, cols, 128]
    scales = reference_scale(blocks.abs().amax((-3, -1)), power_of_two)
    values = reference_cast(blocks / scales[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return Quantised(values[..., :num_rows, :num_cols], scales, BLOCK)


def _pad(x: torch.Tensor, multiple: int, dim: int) -> torch.Tensor:
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _check_innermost(x: torch.Tensor) -> None:
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"shape {tuple(x.shape)}, strides {x.stride()}: expected two dimensions, the last contiguous")


def _by_bits(x: torch.Tensor, by_bits: bool | None) -> bool:
    return not x.is_cuda if by_bits is None else by_bits
