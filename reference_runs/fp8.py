"""FP8 numbers: the one cast to E4M3, the tiles that share a scale, and the way back.

E4M3 (`float8_e4m3fn`): 1 sign, 4 exponent and 3 mantissa bits; largest 448, smallest normal 2**-6,
smallest subnormal 2**-9, no infinity. So a tensor is cut into tiles, each with a scale in FP32
(DeepSeek-V3 report, section 3.3.2):

    rows      1 x 128   activations and their gradients, along the contracted dimension
    columns   128 x 1   the same tensors again for a weight gradient, which contracts over tokens
    blocks  128 x 128   weights; fprop and dgrad share them, one being the other transposed

    scale = max(amax, 1e-4) / 448        or the power of two above it, by its exponent bits
    code  = round_to_nearest_even(clamp(x / scale, -448, 448))

A scale that is a power of two changes no bit of the codes when a tile is cut another way: V3 uses
it for the input of the Linear after attention and for what is dispatched to experts. The last tile
of a dimension that is no multiple of 128 is smaller.

Legend for suffixes: M, T rows or tokens; K, N features; E experts; Q tiles of 128 along the
dimension before it (KQ: along K).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
"""Elements along the long side of a tile, and K elements between two promotions."""
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
"""Smallest amax that a scale is made from: a tile of zeros keeps a finite, normal scale."""


def num_tiles(size: int) -> int:
    """Return how many tiles of 128 cover `size` elements, the last one possibly smaller."""
    return -(-size // TILE)


def scale_from_amax(amax: Tensor, power_of_two: bool) -> Tensor:
    """Return the FP32 scale for tiles whose largest magnitude is `amax`, any shape, float32.

    A NaN or infinity in a tile makes its scale one too, so that it is never cast away.
    """
    # A tensor: on a GPU PyTorch divides by a Python number by multiplying with its reciprocal, which rounds twice.
    scale = amax.clamp(min=AMAX_FLOOR) / amax.new_full((), E4M3_MAX)
    if not power_of_two:
        return scale
    # Adding all ones below the exponent carries into it unless the mantissa was zero already.
    up = (scale.view(torch.int32) + 0x7FFFFF).bitwise_and_(-0x800000).view(torch.float32)
    return torch.where(scale.isnan(), scale, up)


def cast_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x / scale` as float8_e4m3fn, saturated at 448, rounded to nearest even.

    The one cast of the trainer. `x` is float32, `scale` float32 and broadcastable to it.
    """
    return (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def codes_to_float(codes: Tensor) -> Tensor:
    """Return float8_e4m3fn `codes` as float32, exactly, for codes that are not NaN.

    By bits, through float16, whose exponent bias is 15 where E4M3's is 7: shifted left by 7 a code
    is the float16 of 2**-8 times its value. Eight times as fast as PyTorch's conversion on a CPU.
    A NaN code reads as 480; `scale_from_amax` has made its scale NaN.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    # The int8 was sign-extended: the mask clears the copy of the sign below float16's own.
    bits = bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def quantize_rows(x_MK: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Cast in tiles of 1 x 128: codes float8_e4m3fn [M, K], scales float32 [M, KQ].

    `x_MK` is bfloat16 or float32.
    """
    num_rows, num_features = x_MK.shape
    x_MK = x_MK.float()
    padding = -num_features % TILE
    tiles_MQt = (F.pad(x_MK, (0, padding)) if padding else x_MK).view(num_rows, num_tiles(num_features), TILE)
    scale_MQ = scale_from_amax(tiles_MQt.abs().amax(-1), power_of_two)
    codes_MK = cast_e4m3(tiles_MQt, scale_MQ.unsqueeze(-1)).flatten(1)
    return codes_MK[:, :num_features].contiguous(), scale_MQ


def dequantize_rows(codes_MK: Tensor, scale_MQ: Tensor) -> Tensor:
    """Return the float32 [M, K] that `quantize_rows` stands for."""
    num_rows, num_features = codes_MK.shape
    x_MK = codes_to_float(codes_MK)
    whole = num_features // TILE * TILE
    x_MK[:, :whole].view(num_rows, whole // TILE, TILE).mul_(scale_MQ[:, : whole // TILE].unsqueeze(-1))
    if whole < num_features:
        x_MK[:, whole:].mul_(scale_MQ[:, -1:])
    return x_MK


def row_tiles(offsets: Sequence[int], size: int = TILE) -> list[list[tuple[int, int]]]:
    """Cut each group of rows [offsets[e], offsets[e + 1]) into ranges of at most `size` rows.

    Tiles start at a group's own first row, so that an expert's bits do not depend on its neighbours.
    """
    return [
        [(start, min(start + size, stop)) for start in range(first, stop, size)] for first, stop in pairwise(offsets)
    ]


def quantize_columns(x_TK: Tensor, offsets: Sequence[int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Cast in tiles of 128 x 1: codes float8_e4m3fn [T, K], scales float32 [TQ, K].

    `x_TK` is bfloat16 or float32; tiles lie inside the groups that `offsets` bounds, in the order of
    `row_tiles`.
    """
    x_TK = x_TK.float()
    tiles = [tile for group in row_tiles(offsets) for tile in group]
    if not tiles:
        return x_TK.to(torch.float8_e4m3fn), x_TK.new_empty(0, x_TK.shape[1])
    if all(stop - start == TILE for start, stop in tiles):
        tiles_QtK = x_TK.view(len(tiles), TILE, -1)
        scale_QK = scale_from_amax(tiles_QtK.abs().amax(1), power_of_two)
        return cast_e4m3(tiles_QtK, scale_QK.unsqueeze(1)).view_as(x_TK), scale_QK
    magnitude_TK = x_TK.abs()
    amax_QK = torch.stack([magnitude_TK[start:stop].amax(0) for start, stop in tiles])
    scale_QK = scale_from_amax(amax_QK, power_of_two)
    rows = torch.tensor([stop - start for start, stop in tiles], device=x_TK.device)
    return cast_e4m3(x_TK, scale_QK.repeat_interleave(rows, 0)), scale_QK


def quantize_blocks(w_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """Cast weights in blocks of 128 x 128: codes float8_e4m3fn [E, N, K], scales float32 [E, NQ, KQ].

    `w_ENK` is bfloat16 or float32.
    """
    num_experts, num_outs, num_ins = w_ENK.shape
    padded = F.pad(w_ENK.float(), (0, -num_ins % TILE, 0, -num_outs % TILE))
    blocks_EQtQt = padded.view(num_experts, num_tiles(num_outs), TILE, num_tiles(num_ins), TILE)
    scale_ENQKQ = scale_from_amax(blocks_EQtQt.abs().amax((2, 4)), power_of_two=False)
    codes = cast_e4m3(blocks_EQtQt, scale_ENQKQ[:, :, None, :, None]).view_as(padded)
    return codes[:, :num_outs, :num_ins].contiguous(), scale_ENQKQ


def dequantize_blocks(codes_ENK: Tensor, scale_ENQKQ: Tensor) -> Tensor:
    """Return the float32 [E, N, K] that `quantize_blocks` stands for."""
    _, num_outs, num_ins = codes_ENK.shape
    scale = scale_ENQKQ.repeat_interleave(TILE, 1)[:, :num_outs].repeat_interleave(TILE, 2)[..., :num_ins]
    return codes_to_float(codes_ENK) * scale
