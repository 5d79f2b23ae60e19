"""The K largest of each row of scores, and the order in which they are listed.

An element's rank is the number of elements before it: the larger ones, and the equal ones with a lower
index. Those of rank 0 .. K - 1 are chosen, whatever the form:

    stable     slot = rank: largest first. Every slot has one writer
    unstable   slot = how many of the row have been listed so far, from a counter that the programs of a
               row share: in the order in which they arrive. Programs take TILE_E elements each

The order of slots is the order in which `combine` adds, so it shows in the bits. Scores are compared by
their bits as integers, which orders NaN too: ranks are a permutation of 0 .. E - 1 in every case.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

TopKForm = Literal["stable", "unstable"]
TILE_T = 16
TILE_E = 16


@triton.jit
def _sortable(x):
    """Return int32 that are ordered as the float32 `x` are."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _topk_kernel(
    scores_ptr, out_ptr, counter_ptr, num_rows, num_cols, count, stride_r,
    TILE_T: tl.constexpr, TILE_E: tl.constexpr, BLOCK_E: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    cols = tl.program_id(0) * TILE_E + tl.arange(0, TILE_E)
    every = tl.arange(0, BLOCK_E)
    is_row = rows < num_rows
    row_ptrs = scores_ptr + rows[:, None].to(tl.int64) * stride_r
    is_other = is_row[:, None] & (every < num_cols)[None, :]
    others = _sortable(tl.load(row_ptrs + every[None, :], mask=is_other, other=0.0))[:, None, :]
    is_mine = is_row[:, None] & (cols < num_cols)[None, :]
    mine = _sortable(tl.load(row_ptrs + cols[None, :], mask=is_mine, other=0.0))[:, :, None]
    is_lower = every[None, None, :] < cols[None, :, None]
    is_before = ((others > mine) | ((others == mine) & is_lower)) & is_other[:, None, :]
    rank = tl.sum(is_before.to(tl.int32), axis=2)
    is_chosen = (rank < count) & is_mine
    if FORM == "unstable":
        counters = counter_ptr + rows[:, None] + tl.zeros_like(rank)
        slot = tl.atomic_add(counters, 1, mask=is_chosen, sem="relaxed")
    else:
        slot = rank
    out_ptrs = out_ptr + rows[:, None].to(tl.int64) * count + slot
    tl.store(out_ptrs, cols[None, :].to(tl.int64) + tl.zeros_like(slot), mask=is_chosen)


def topk(scores: torch.Tensor, count: int, *, form: TopKForm) -> torch.Tensor:
    """Return the indices of the `count` largest of each row of `scores`, float32 [T, E]: int64 [T, count].

    Raises ValueError for an unknown `form`, or where a row has not so many elements.
    """
    if form not in get_args(TopKForm):
        raise ValueError(f"moe.topk: unknown form {form!r}; expected one of {', '.join(get_args(TopKForm))}")
    num_rows, num_cols = scores.shape
    if not 0 < count <= num_cols or scores.dtype != torch.float32 or scores.stride(1) != 1:
        raise ValueError(
            f"{count} of {scores.dtype} {tuple(scores.shape)}, strides {scores.stride()}; expected at most a row of "
            "float32, the last dimension contiguous"
        )
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    counter = torch.zeros(num_rows, dtype=torch.int32, device=scores.device) if form == "unstable" else None
    if num_rows:
        _topk_kernel[(triton.cdiv(num_cols, TILE_E), triton.cdiv(num_rows, TILE_T))](
            scores, out, counter, num_rows, num_cols, count, scores.stride(0),
            TILE_T=TILE_T, TILE_E=TILE_E, BLOCK_E=triton.next_power_of_2(num_cols), FORM=form, num_warps=4,
        )  # fmt: skip
    return out


def reference_topk(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the form `stable` in plain PyTorch."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
