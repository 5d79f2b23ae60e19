"""Combine: the K expert outputs of a token become one row, out[t] = sum over k of y[row(t, k)].

    gather   the program of token t reads its K rows in slot order k = 0 .. K - 1 and adds them in that
             order (the loop of the kernel); one writer a token
    atomic   the program of slot (t, k) adds y[row(t, k)] to out[t] when it gets there

`gather` sums in float32. `atomic` adds into the result itself, in its dtype, as scatter_add_ in Megatron Core's
unpermute does: bfloat16 is rounded after each addition, so that two that change places show in the result, where a
float32 sum rounded once hides nearly all of them. A token's programs are launched side by side. Launched in the order
of the rows, sorted by expert, 4,096 tokens at 4 of 8 experts with a width of 256 gave one result in 20 runs on an H200,
deterministic by the look of it though nothing orders them; larger shapes did differ (benchmarks/results).
The backward of the dispatch (each token's row copied to its K experts) is the same sum.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

CombineForm = Literal["gather", "atomic"]
BLOCK = 1024
# Tokens and rows are the first axis of the grids below: the others end at 65535.


@triton.jit
def _gather_kernel(y_ptr, row_of_ptr, out_ptr, num_cols, stride_yr, NUM_SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(NUM_SLOTS):  # slot order: the order of the sum
        row = tl.load(row_of_ptr + token * NUM_SLOTS + slot).to(tl.int64)
        part = tl.load(y_ptr + row * stride_yr + cols, mask=mask, other=0.0).to(tl.float32)
        total = part if slot == 0 else total + part
    tl.store(out_ptr + token * num_cols + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scatter_kernel(y_ptr, row_of_ptr, out_ptr, num_cols, stride_yr, NUM_SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)  # of all tokens: the K of one are neighbours
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    row = tl.load(row_of_ptr + slot).to(tl.int64)
    part = tl.load(y_ptr + row * stride_yr + cols, mask=mask, other=0.0).to(out_ptr.dtype.element_ty)
    tl.atomic_add(out_ptr + slot // NUM_SLOTS * num_cols + cols, part, mask=mask, sem="relaxed")


@triton.jit
def _invert_kernel(from_ptr, to_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    tl.store(to_ptr + tl.load(from_ptr + at, mask=mask, other=0), at.to(tl.int64), mask=mask)


def invert_permutation(permutation: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `permutation`, int64 [R], contiguous. Each element has one writer."""
    inverse = torch.empty_like(permutation)
    if permutation.numel():
        grid = (triton.cdiv(permutation.numel(), BLOCK),)
        _invert_kernel[grid](permutation, inverse, permutation.numel(), BLOCK=BLOCK, num_warps=4)
    return inverse


def combine(
    y: torch.Tensor,
    row_of: torch.Tensor,
    *,
    form: CombineForm,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return out [T, D] from the expert rows `y` [T K, D] (bfloat16 or float32).

    `row_of` int32 or int64 [T, K], contiguous: the row of y that holds slot k of token t; together the
    slots name every row once. Raises ValueError for an unknown `form` or shapes that do not fit.
    """
    if form not in get_args(CombineForm):
        raise ValueError(f"moe.combine: unknown form {form!r}; expected one of {', '.join(get_args(CombineForm))}")
    num_tokens, num_slots = row_of.shape
    num_rows, num_cols = y.shape
    if num_rows != num_tokens * num_slots or not row_of.is_contiguous() or (num_cols > 1 and y.stride(1) != 1):
        raise ValueError(f"y {tuple(y.shape)}, row_of {tuple(row_of.shape)}: expected a row for each token and slot")
    grid_cols = triton.cdiv(num_cols, BLOCK)
    if form == "gather":
        out = torch.empty(num_tokens, num_cols, dtype=out_dtype, device=y.device)
        if out.numel():
            _gather_kernel[(num_tokens, grid_cols)](
                y, row_of, out, num_cols, y.stride(0), NUM_SLOTS=num_slots, BLOCK=BLOCK, num_warps=4
            )
        return out
    # Triton's interpreter, on a CPU, has no atomic additions in bfloat16.
    total = torch.zeros(num_tokens, num_cols, dtype=out_dtype if y.is_cuda else torch.float32, device=y.device)
    if total.numel():
        _scatter_kernel[(num_rows, grid_cols)](
            y, row_of, total, num_cols, y.stride(0), NUM_SLOTS=num_slots, BLOCK=BLOCK, num_warps=4
        )
    return total.to(out_dtype)


def reference_combine(y: torch.Tensor, row_of: torch.Tensor) -> torch.Tensor:
    """Return out [T, D] in plain PyTorch, in y's dtype, slots added in order."""
    out = y[row_of[:, 0]]
    for slot in range(1, row_of.shape[1]):
        out = out + y[row_of[:, slot]]
    return out
