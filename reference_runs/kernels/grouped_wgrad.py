"""Weight gradients of the experts: dW[e] [N, C] = sum over the tokens t of expert e of dy[t, n] x[t, c].

Both operands come from `quantise_columns` with the experts' schedule: transposed, by 128 tokens, each
expert starting a block of its own. An expert's tokens may be split into parts that several programs sum
(split-K), because one program walking all tokens of a popular expert is the longest in the launch. Then
parts of one dW tile meet, in two forms:

    workspace   part s writes slots[s]; the part that arrives last sums the slots in index order
                (`slots.sum_if_last`). With one part there is no workspace: one program writes the tile
    atomic      every part adds to dW when it gets there

Inside a part, tokens are added in ascending blocks of 128 (the loop of `gemm.accumulate_tile`). The
number of parts is part of the result's bits, so it is a constant of the caller, not of the machine.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels.gemm import accumulate_tile, tile_descriptor
from bitcheck.reference_runs.kernels.quantise import BLOCK, Quantised
from bitcheck.reference_runs.kernels.schedule import GroupSchedule
from bitcheck.reference_runs.kernels.slots import sum_if_last

WgradForm = Literal["workspace", "atomic"]
TILE_N = 64
TILE_C = 128
NUM_WARPS = 4
NUM_STAGES = 3
REGISTERS = 168
"""A thread, at most, so that three programs share a multiprocessor; no bit depends on it."""


@triton.jit
def _wgrad_kernel(
    dy_desc, x_desc, dy_scale_ptr, x_scale_ptr, out_ptr, slots_ptr, counter_ptr, expert_tiles_ptr,
    num_rows, num_cols, tiles_c, num_parts, stride_part,
    TILE_N: tl.constexpr, TILE_C: tl.constexpr, BLOCK_T: tl.constexpr, FORM: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    # Parts of one tile run fastest, so they are launched side by side.
    part = tl.program_id(0) % num_parts
    tile = tl.program_id(0) // num_parts
    expert = tl.program_id(1)
    first = tl.load(expert_tiles_ptr + expert)
    last = tl.load(expert_tiles_ptr + expert + 1)
    depth = tl.cdiv(last - first, num_parts)
    begin = tl.minimum(first + part * depth, last)
    end = tl.minimum(begin + depth, last)
    tile_n, tile_c = tile // tiles_c, tile % tiles_c
    rows = tile_n * TILE_N + tl.arange(0, TILE_N)
    cols = tile_c * TILE_C + tl.arange(0, TILE_C)
    out = accumulate_tile(
        dy_desc, x_desc, dy_scale_ptr + tl.minimum(rows, num_rows - 1), x_scale_ptr + tl.minimum(cols, num_cols - 1),
        tile_n * TILE_N, tile_c * TILE_C, begin, end, num_rows, num_cols, TILE_N, TILE_C, BLOCK_T, True,
    )  # fmt: skip
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    at = expert.to(tl.int64) * num_rows * num_cols + rows[:, None].to(tl.int64) * num_cols + cols[None, :]
    if FORM == "atomic":
        tl.atomic_add(out_ptr + at, out, mask=mask & (begin < end), sem="relaxed")
    elif FORM == "slots":
        tl.store(slots_ptr + part.to(tl.int64) * stride_part + at, out, mask=mask)
        counter = counter_ptr + expert * tl.num_programs(0) + tile
        sum_if_last(slots_ptr + at, out_ptr + at, mask, stride_part, counter, num_parts, ACCUMULATE)
    else:
        if ACCUMULATE:
            out += tl.load(out_ptr + at, mask=mask, other=0.0)
        tl.store(out_ptr + at, out, mask=mask)


def grouped_wgrad(
    dy: Quantised,
    x: Quantised,
    schedule: GroupSchedule,
    *,
    form: WgradForm,
    num_parts: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return dW, float32 [E, N, C], from `dy` [N, T'] and `x` [C, T'], both by columns under `schedule`.

    With `out` (float32, contiguous) the gradient is added to it. An expert without tokens adds nothing,
    or is zero. Raises ValueError for an unknown `form` or shapes that do not fit.
    """
    if form not in get_args(WgradForm):
        raise ValueError(f"moe.wgrad: unknown form {form!r}; expected one of {', '.join(get_args(WgradForm))}")
    num_rows, num_cols = dy.values.shape[0], x.values.shape[0]
    depth = schedule.num_tiles * BLOCK
    if dy.values.shape[1] != depth or x.values.shape[1] != depth or num_parts < 1:
        raise ValueError(
            f"dy {tuple(dy.values.shape)}, x {tuple(x.values.shape)}, {num_parts} parts; expected {depth} "
            "columns, as quantise_columns gives with this schedule, and one part or more"
        )
    shape = (schedule.num_experts, num_rows, num_cols)
    if out is not None and (out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous()):
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}; expected contiguous float32 {shape}")
    accumulate = out is not None
    if out is None:
        fill = torch.zeros if form == "atomic" else torch.empty
        out = fill(shape, dtype=torch.float32, device=x.values.device)
    if not out.numel() or not depth:
        return out
    tiles_c = triton.cdiv(num_cols, TILE_C)
    grid = (triton.cdiv(num_rows, TILE_N) * tiles_c * num_parts, schedule.num_experts)
    slots = counters = None
    if form == "workspace" and num_parts > 1:
        slots = out.new_empty(num_parts, *shape)
        counters = torch.zeros(grid[0] * grid[1], dtype=torch.int32, device=out.device)
    _wgrad_kernel[grid](
        tile_descriptor(dy.values, TILE_N), tile_descriptor(x.values, TILE_C), dy.scales, x.scales, out, slots,
        counters, schedule.expert_tiles, num_rows, num_cols, tiles_c, num_parts, out.numel(),
        TILE_N=TILE_N, TILE_C=TILE_C, BLOCK_T=BLOCK, ACCUMULATE=accumulate,
        FORM="atomic" if form == "atomic" else "one" if slots is None else "slots",
        num_warps=NUM_WARPS, num_stages=NUM_STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def reference_grouped_wgrad(dy: torch.Tensor, x: torch.Tensor, schedule: GroupSchedule) -> torch.Tensor:
    """Return dW [E, N, C] of plain matrices dy [R, N], x [R, C] in plain PyTorch, in the dtype given."""
    bounds = schedule.offsets.tolist()
    return torch.stack([dy[b:e].T @ x[b:e] for b, e in pairwise(bounds)])
