"""Partial sums, each in a slot of its own, summed in index order: the pattern of every deterministic form.

    atomic     program i adds its part to total         the order is the order of arrival
    slots      program i writes slots[i] = part         one writer a slot, so no order matters yet;
               total = ((slots[0] + slots[1]) + ...)    one program a total, and its loop is the order

Float addition does not associate, so only the second gives the same bits every time. Many slots are
summed in groups of GROUP first, each group in index order, then the groups in index order: as fixed,
and not one long chain of additions.

Where few programs share a total, no second launch is needed (`sum_if_last`): the program that arrives
last sums the slots. Which one that is changes from run to run; the order of the sum does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = 64
BLOCK = 256
SMALL_BLOCK = 64
"""For totals of few elements, where a larger block would leave the card idle; no bit depends on it."""
UNROLL = 16
"""Slots that are loaded at once; they are still added one after the other."""


@triton.jit
def _sum_slots_kernel(
    slots_ptr, out_ptr, num_slots, size, GROUP: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.program_id(1) * GROUP
    end = tl.minimum(begin + GROUP, num_slots)
    mask = at < size
    wide = tl.cast(size, tl.int64)
    out_ptrs = out_ptr + tl.program_id(1) * wide + at
    total = tl.load(slots_ptr + begin * wide + at, mask=mask, other=0.0)
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=mask, other=0.0)
    for first in range(begin + 1, end, UNROLL):  # index order: the order of the sum
        for step in tl.static_range(UNROLL):
            is_slot = first + step < end
            part = tl.load(slots_ptr + (first + step) * wide + at, mask=mask & is_slot, other=0.0)
            total = tl.where(is_slot, total + part, total)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_if_last(slots_ptrs, out_ptrs, mask, stride_slot, counter_ptr, num_slots, ACCUMULATE: tl.constexpr):
    """Count this program in, its slot being written; if it is the last of `num_slots`, write the total.

    `slots_ptrs` and `out_ptrs` (any shape, float32) point at slot 0 and at the total, `counter_ptr` at an
    int32 zero that these programs share. With ACCUMULATE the total is added to what is there.
    """
    tl.debug_barrier()  # every thread's part is written before this program is counted
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if arrived == num_slots - 1:
        # Past the first-level cache, which may hold what was there before another program wrote.
        total = tl.load(slots_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        if ACCUMULATE:
            total += tl.load(out_ptrs, mask=mask, other=0.0)
        for slot in range(1, num_slots):  # index order: the order of the sum
            at = tl.cast(slot, tl.int64) * stride_slot
            total += tl.load(slots_ptrs + at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(out_ptrs, total, mask=mask)


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
    num_groups = triton.cdiv(slots.shape[0], GROUP)
    if num_groups > 1:
        groups = torch.empty(num_groups, *slots.shape[1:], dtype=torch.float32, device=slots.device)
        _launch(slots, groups, accumulate=False)
        return sum_slots(groups, out=out, accumulate=accumulate)
    _launch(slots, out, accumulate)
    return out


def _launch(slots: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    num_slots, size = slots.shape[0], slots[0].numel()
    if size:
        block, num_warps = (BLOCK, 4) if size > 2**14 else (SMALL_BLOCK, 2)
        unroll = min(UNROLL, triton.next_power_of_2(max(num_slots - 1, 1)))
        _sum_slots_kernel[(triton.cdiv(size, block), triton.cdiv(num_slots, GROUP))](
            slots, out, num_slots, size, GROUP=GROUP, ACCUMULATE=accumulate, BLOCK=block, UNROLL=unroll,
            num_warps=num_warps,
        )  # fmt: skip


def reference_sum_slots(slots: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension in the same order in plain PyTorch: groups, then the groups' sums."""
    if slots.shape[0] > GROUP:
        return reference_sum_slots(torch.stack([reference_sum_slots(group) for group in slots.split(GROUP)]))
    total = slots[0].clone()
    for part in slots[1:]:
        total += part
    return total
