"""Which expert, and which rows, each tile of a grouped GEMM works on.

Rows are sorted by expert: expert e owns rows offsets[e] .. offsets[e + 1] - 1, any number of them,
also none. A tile is up to 128 rows of one expert. Say offsets = [0, 200, 200, 290], 290 rows:

    tile    0    1    2    3    4    5
    expert  0    0    2   -1   -1   -1        -1: no work; there is room for ceil(290/128) + 3 tiles
    begin   0  128  200    0    0    0
    end   200  200  290    0    0    0        where the expert's rows end
    expert_tiles = [0, 2, 2, 3]               the tiles of expert e are expert_tiles[e] .. [e + 1] - 1

Counts stay on the device: nothing waits for a copy to the host. All numbers are integers, so no
order of summation matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE_ROWS = 128
"""Rows of a tile; also the depth of a 128x1 quantisation tile, which therefore never straddles two experts."""
_BLOCK = 128


@dataclass(frozen=True)
class GroupSchedule:
    """The tiles of one sorted batch of rows; every tensor is int32 on the rows' device."""

    offsets: torch.Tensor
    """[E + 1] first row of each expert, then the number of rows."""
    tile_expert: torch.Tensor
    """[num_tiles] expert of a tile, -1 where there is no work."""
    tile_begin: torch.Tensor
    """[num_tiles] first row of a tile."""
    tile_end: torch.Tensor
    """[num_tiles] end of the rows of the tile's expert."""
    expert_tiles: torch.Tensor
    """[E + 1] first tile of each expert, then the number of tiles with work."""
    num_rows: int

    @property
    def num_experts(self) -> int:
        return self.offsets.numel() - 1

    @property
    def num_tiles(self) -> int:
        """Tiles there is room for; at least as many as have work."""
        return self.tile_expert.numel()


@triton.jit
def _schedule_kernel(
    offsets_ptr, expert_ptr, begin_ptr, end_ptr, expert_tiles_ptr, num_experts, num_tiles,
    BLOCK_E: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)  # the program after the last expert fills the tiles without work
    ids = tl.arange(0, BLOCK_E)
    inside = ids < num_experts
    starts = tl.load(offsets_ptr + ids, mask=inside, other=0)
    ends = tl.load(offsets_ptr + ids + 1, mask=inside, other=0)
    tiles = (ends - starts + TILE - 1) // TILE
    first = tl.sum(tl.where(ids < expert, tiles, 0))
    is_expert = expert < num_experts
    count = tl.where(is_expert, tl.sum(tl.where(ids == expert, tiles, 0)), num_tiles - first)
    start = tl.sum(tl.where(ids == expert, starts, 0))
    end = tl.sum(tl.where(ids == expert, ends, 0))
    tl.store(expert_tiles_ptr + expert, first)
    for base in range(0, count, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        mask = tile < count
        tl.store(expert_ptr + first + tile, tl.where(is_expert, expert, -1), mask=mask)
        tl.store(begin_ptr + first + tile, tl.where(is_expert, start + tile * TILE, 0), mask=mask)
        tl.store(end_ptr + first + tile, tl.where(is_expert, end, 0), mask=mask)


def schedule_groups(offsets: torch.Tensor, num_rows: int) -> GroupSchedule:
    """Lay out the tiles of `num_rows` rows sorted by expert.

    `offsets` [E + 1], int32, ascending from 0 to `num_rows`, on the device of the rows. Raises
    ValueError for another dtype or shape; the values are not read back, so they are not checked.
    """
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.numel() < 2 or not offsets.is_contiguous():
        raise ValueError(f"offsets: {offsets.dtype} {tuple(offsets.shape)}; expected contiguous int32 [experts + 1]")
    num_experts = offsets.numel() - 1
    num_tiles = triton.cdiv(num_rows, TILE_ROWS) + num_experts
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=offsets.device)
    expert_tiles = torch.empty(num_experts + 1, dtype=torch.int32, device=offsets.device)
    _schedule_kernel[(num_experts + 1,)](
        offsets, tiles[0], tiles[1], tiles[2], expert_tiles, num_experts, num_tiles,
        BLOCK_E=triton.next_power_of_2(num_experts), TILE=TILE_ROWS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return GroupSchedule(offsets, tiles[0], tiles[1], tiles[2], expert_tiles, num_rows)


def reference_schedule(offsets: torch.Tensor, num_rows: int) -> GroupSchedule:
    """Lay out the tiles in plain Python, one expert after another."""
    bounds = offsets.tolist()
    num_experts = len(bounds) - 1
    rows: list[tuple[int, int, int]] = []
    expert_tiles = []
    for expert in range(num_experts):
        expert_tiles.append(len(rows))
        rows += [(expert, begin, bounds[expert + 1]) for begin in range(bounds[expert], bounds[expert + 1], TILE_ROWS)]
    expert_tiles.append(len(rows))
    rows += [(-1, 0, 0)] * (triton.cdiv(num_rows, TILE_ROWS) + num_experts - len(rows))
    tiles = torch.tensor(rows, dtype=torch.int32, device=offsets.device).T.contiguous()
    first = torch.tensor(expert_tiles, dtype=torch.int32, device=offsets.device)
    return GroupSchedule(offsets, tiles[0], tiles[1], tiles[2], first, num_rows)
