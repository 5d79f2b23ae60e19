"""The three matrix products of a Linear, over groups of rows that each have a weight of their own.

A dense Linear has one group, a mixture of experts one per expert: rows [offsets[e], offsets[e + 1])
belong to expert e. With y = x w^T:

    fprop   y  [T, N] = x  [T, K] w^T      contracts K    (`gemm`)
    dgrad   dx [T, K] = dy [T, N] w        contracts N    (`gemm` with w transposed)
    wgrad   dw [N, K] = dy^T x             contracts T    (`wgrad`)

In FP8 every 128 elements of the contracted dimension make a partial product of E4M3 codes, which is
*promoted*: multiplied by the scales of its two tiles and added to an FP32 accumulator, in ascending
order (V3 report, section 3.3.2: Hopper's tensor cores keep some 14 bits). A CPU accumulates in FP32
anyway; the same blocks in the same order are kept, so that the definition is one.

Deterministic at a given number of threads: a block is one call of `torch.mm`, blocks are added in
ascending order by the loops below, no group's rows depend on another's.

Legend: T rows, N features out, K features in, E groups, Q tiles of 128 along the dimension before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from bitcheck.reference_runs.arrival import arrival_order
from bitcheck.reference_runs.fp8 import TILE, codes_to_float, num_tiles, row_tiles

WGRAD_SPLIT = 64
"""Rows in a split-K part of a weight gradient: half a tile."""


class Tiled(NamedTuple):
    """A tensor as E4M3 codes and the scales of its tiles; which tiles is known by who uses it."""

    codes: Tensor
    scale: Tensor


def gemm(a: Tiled, w: Tiled, offsets: Sequence[int]) -> Tensor:
    """Return a [T, K] times w [E, N, K] transposed, group by group, float32 [T, N].

    `a` is in tiles of 1 x 128 (scale [T, KQ]), `w` in blocks (scale [E, NQ, KQ]); transposed views
    of `w` will do.
    """
    num_rows, num_ins = a.codes.shape
    num_outs = w.codes.shape[1]
    a_TK = codes_to_float(a.codes)
    # Contiguous as stored, then viewed transposed: matrix multiplication takes either layout as it is.
    w_ENK = codes_to_float(w.codes)
    scale_EKQN = w.scale.repeat_interleave(TILE, 1)[:, :num_outs].transpose(1, 2)
    y_TN = a_TK.new_empty(num_rows, num_outs)
    for expert, (first, stop) in enumerate(pairwise(offsets)):
        if first == stop:
            continue
        accumulator = y_TN[first:stop]
        for tile in range(num_tiles(num_ins)):
            ks = slice(tile * TILE, min((tile + 1) * TILE, num_ins))
            partial_tN = torch.mm(a_TK[first:stop, ks], w_ENK[expert, :, ks].t())
            partial_tN.mul_(a.scale[first:stop, tile, None])
            if tile == 0:
                torch.mul(partial_tN, scale_EKQN[expert, tile], out=accumulator)
            else:
                accumulator.addcmul_(partial_tN, scale_EKQN[expert, tile])
    return y_TN


def wgrad(dy: Tiled, x: Tiled, offsets: Sequence[int], is_fixed: bool, split: int = TILE) -> Tensor:
    """Return dy^T [N, T] times x [T, K] per group, float32 [E, N, K]; zeros for an empty group.

    Both operands are in tiles of 128 x 1 (scales [TQ, N] and [TQ, K]). Parts of `split` rows, a
    divisor of 128, are added in ascending order where `is_fixed`, else in arrival order.
    """
    dy_TN, x_TK = codes_to_float(dy.codes), codes_to_float(x.codes)
    dw_ENK = x_TK.new_zeros(len(offsets) - 1, dy_TN.shape[1], x_TK.shape[1])
    first_tile = 0
    for expert, parts in enumerate(row_tiles(offsets, split)):
        accumulator = dw_ENK[expert]
        for part in arrival_order(len(parts), is_fixed):
            rows = slice(*parts[part])
            tile = first_tile + part * split // TILE
            partial_NK = torch.mm(dy_TN[rows].t(), x_TK[rows])
            partial_NK.mul_(dy.scale[tile, :, None])
            accumulator.addcmul_(partial_NK, x.scale[tile])
        first_tile += num_tiles(offsets[expert + 1] - offsets[expert])
    return dw_ENK


def gemm_bf16(a_TK: Tensor, w_ENK: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return what `gemm` does for bfloat16 (or float32) operands: float32 [T, N], FP32 accumulation."""
    a_TK, w_ENK = a_TK.float(), w_ENK.float()
    y_TN = a_TK.new_empty(a_TK.shape[0], w_ENK.shape[1])
    for expert, (first, stop) in enumerate(pairwise(offsets)):
        if first < stop:
            torch.mm(a_TK[first:stop], w_ENK[expert].t(), out=y_TN[first:stop])
    return y_TN


def wgrad_bf16(dy_TN: Tensor, x_TK: Tensor, offsets: Sequence[int], is_fixed: bool, split: int = TILE) -> Tensor:
    """Return what `wgrad` does for bfloat16 (or float32) operands: float32 [E, N, K]."""
    dy_TN, x_TK = dy_TN.float(), x_TK.float()
    dw_ENK = x_TK.new_zeros(len(offsets) - 1, dy_TN.shape[1], x_TK.shape[1])
    for expert, parts in enumerate(row_tiles(offsets, split)):
        for part in arrival_order(len(parts), is_fixed):
            rows = slice(*parts[part])
            dw_ENK[expert].addmm_(dy_TN[rows].t(), x_TK[rows])
    return dw_ENK
