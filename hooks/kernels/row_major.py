"""Copy a strided tensor to row-major order, in Triton, both sides in whole memory transactions.

The digest is over the row-major order, so a tensor that lies otherwise is copied first, a piece at a time. Two
arrangements are frequent. A weight that was transposed, or an image batch in channels-last order, is laid out with its
*rows* next to each other: elements [B, R, C] with strides (stride_b, 1, stride_c). A plain elementwise copy reads
such a tensor element by element from a different place each; `transpose_kernel` reads a tile along R and writes it
along C. A head of attention, or some columns of a matrix, is laid out in *runs*: elements [A, B, C, R] with R in a row.
There `runs_kernel` costs the host less than a copy by PyTorch.

Elements are moved as unsigned integers: no bit changes. Importing this module needs triton.
"""

# Triton's decorator is untyped, and what it takes are no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["address", "num_rows", "num_columns", "stride_b", "stride_c", "out_address"])
def transpose_kernel(
    address: tl.int64,
    num_rows: tl.int32,
    num_columns: tl.int32,
    stride_b: tl.int64,
    stride_c: tl.int64,
    out_address: tl.int64,
    WORD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Write x [B, R, C] with strides (stride_b, 1, stride_c) to out [B, R, C], contiguous.

    `address` and `out_address` point to elements of type `WORD`; strides count elements. The grid is
    (tiles of R * tiles of C, B). `IS_ALIGNED` says that both addresses, R, C and the strides are multiples of 16.
    """
    if IS_ALIGNED:
        # Changes no number; tells the compiler that a mask is the same for 16 elements in a row.
        num_rows = num_rows // 16 * 16
        num_columns = num_columns // 16 * 16
    tiles_c = tl.cdiv(num_columns, BLOCK_C)
    rows = (tl.program_id(0) // tiles_c) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    batch = tl.program_id(1).to(tl.int64)
    mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    x_ptr = address.to(tl.pointer_type(WORD)) + batch * stride_b
    out_ptr = out_address.to(tl.pointer_type(WORD)) + batch * num_rows * num_columns
    x_ptr_RC = x_ptr + rows[:, None] + columns[None, :] * stride_c
    out_ptr_RC = out_ptr + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    if IS_ALIGNED:
        x_ptr_RC = tl.multiple_of(x_ptr_RC, (16, 16))
        out_ptr_RC = tl.multiple_of(out_ptr_RC, (16, 16))
    tl.store(out_ptr_RC, tl.load(x_ptr_RC, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=[
        "address", "num_groups", "num_runs", "length", "num_words", "stride_a", "stride_b", "stride_c", "out_address",
    ]
)  # fmt: skip
def runs_kernel(
    address: tl.int64,
    num_groups: tl.int32,
    num_runs: tl.int32,
    length: tl.int32,
    num_words: tl.int32,
    stride_a: tl.int64,
    stride_b: tl.int64,
    stride_c: tl.int64,
    out_address: tl.int64,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write x [A, num_groups, num_runs, length] with strides (stride_a, stride_b, stride_c, 1) to out, contiguous.

    `address` and `out_address` point to words of type `WORD`; strides count words, and `num_words` all of x.
    The grid is (blocks of words, 1).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_words
    run = at // length
    group = run // num_runs
    batch = group // num_groups
    offset = (at % length).to(tl.int64) + (run % num_runs).to(tl.int64) * stride_c
    offset += (group % num_groups).to(tl.int64) * stride_b + batch.to(tl.int64) * stride_a
    x_ptr = address.to(tl.pointer_type(WORD))
    out_ptr = out_address.to(tl.pointer_type(WORD))
    tl.store(out_ptr + at, tl.load(x_ptr + offset, mask=mask), mask=mask)
