"""Partial sums, each in a slot of its own, summed in index order: the pattern of every deterministic form.

    atomic     program i adds its part to total         the order is the order of arrival
    slots      program i writes slots[i] = part         one writer a slot, so no order matters yet;
               total = ((slots[0] + slots[1]) + ...)    one program a total, and its loop is the order

Float addition does not associate, so only the second gives the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256
UNROLL = 16
"""Slots that are loaded at once; they are still added one after the other."""


@triton.jit
def _sum_slots_kernel(
    slots_ptr, out_ptr, num_slots, size, stride_slot,
    ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    if ACCUMULATE:
        total = tl.load(out_ptr + at, mask=mask, other=0.0) + tl.load(slots_ptr + at, mask=mask, other=0.0)
    else:
        total = tl.load(slots_ptr + at, mask=mask, other=0.0)
    for first in range(1, num_slots, UNROLL):  # index order: the order of the sum
        for step in tl.static_range(UNROLL):
            is_slot = first + step < num_slots
            part = tl.load(
                slots_ptr + tl.cast(first + step, tl.int64) * stride_slot + at, mask=mask & is_slot, other=0.0
            )
            total = tl.where(is_slot, total + part, total)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_slots(slots: torch.Tensor, *, out: torch.Tensor | None = None, accumulate: bool = False) -> torch.Tensor:
    """Sum `slots` [S, ...], float32, contiguous, over S in index order, to float32 [...].

    `out`, contiguous, takes the result in its own dtype; with `accumulate` (float32) slots are added to
    what it holds, the first slot first. Raises ValueError for other layouts or S = 0.
    """
    if not slots.is_contiguous() or slots.dtype != torch.float32 or not slots.shape[0]:
        raise ValueError(f"slots: {slots.dtype} {tuple(slots.shape)}; expected contiguous float32 with a slot or more")
    if out is None:
        out = torch.empty(slots.shape[1:], dtype=torch.float32, device=slots.device)
    if out.shape != slots.shape[1:] or not out.is_contiguous() or (accumulate and out.dtype != torch.float32):
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}; expected contiguous {tuple(slots.shape[1:])}")
    if out.numel():
        _sum_slots_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            slots, out, slots.shape[0], out.numel(), slots.stride(0),
            ACCUMULATE=accumulate, BLOCK=BLOCK, UNROLL=UNROLL, num_warps=4,
        )  # fmt: skip
    return out


def reference_sum_slots(slots: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension one slot after the other, in plain PyTorch."""
    total = slots[0].clone()
    for part in slots[1:]:
        total += part
    return total
