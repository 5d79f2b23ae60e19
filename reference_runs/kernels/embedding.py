"""Gradient of an embedding table: dE[v] = sum of dy[t] over the positions t whose token is v.

    sorted   positions are sorted by token, stably, so those of one token are in ascending order. Each
             run of a token is cut into pieces of PIECE positions; a program sums a piece in order, and
             one program a token sums its pieces in order. A frequent token is as parallel as a rare one;
             a token of one piece is summed at once
    atomic   the program of position t adds dy[t] to dE[token(t)] when it gets there

Sums are float32. Every row of the table is written; tokens that do not occur get zeros.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import triton
import triton.language as tl

EmbeddingForm = Literal["sorted", "atomic"]
PIECE = 64
UNROLL = 8
"""Rows that are loaded at once; they are still added one after the other."""
BLOCK = 1024


@triton.jit
def _sum_run(rows_ptr, index_ptr, begin, end, stride_r, cols, mask, INDEXED: tl.constexpr, UNROLL: tl.constexpr):
    """Return the float32 sum of rows begin .. end - 1 (through an index if INDEXED), ascending."""
    total = tl.zeros(cols.shape, dtype=tl.float32)
    for first in range(begin, end, UNROLL):  # ascending: the order of the sum
        for step in tl.static_range(UNROLL):
            at = first + step
            inside = at < end
            if INDEXED:
                row = tl.load(index_ptr + at, mask=inside, other=0).to(tl.int64)
            else:
                row = tl.cast(at, tl.int64)
            part = tl.load(rows_ptr + row * stride_r + cols, mask=mask & inside, other=0.0).to(tl.float32)
            total = tl.where(inside, total + part, total)
    return total


@triton.jit
def _piece_kernel(
    dy_ptr, order_ptr, starts_ptr, first_piece_ptr, pieces_ptr, num_tokens, num_cols, stride_dr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, PIECE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    # The token of this piece: the last one whose first piece is not after it, found by halving.
    token = 0
    width = 1 << STEPS
    for _ in tl.static_range(STEPS):
        width = width // 2
        is_token = token + width < num_tokens
        first = tl.load(first_piece_ptr + token + width, mask=is_token, other=piece + 1)
        token = tl.where(first <= piece, token + width, token)
    start = tl.load(starts_ptr + token)
    begin = start + (piece - tl.load(first_piece_ptr + token)) * PIECE
    end = tl.minimum(begin + PIECE, tl.load(starts_ptr + token + 1))
    total = _sum_run(dy_ptr, order_ptr, begin, end, stride_dr, cols, mask, True, UNROLL)
    tl.store(pieces_ptr + piece.to(tl.int64) * num_cols + cols, total, mask=mask)


@triton.jit
def _token_kernel(
    dy_ptr, order_ptr, starts_ptr, pieces_ptr, first_piece_ptr, out_ptr, num_cols, stride_dr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    start = tl.load(starts_ptr + token)
    stop = tl.load(starts_ptr + token + 1)
    if stop - start <= PIECE:
        total = _sum_run(dy_ptr, order_ptr, start, stop, stride_dr, cols, mask, True, UNROLL)
    else:
        begin = tl.load(first_piece_ptr + token)
        end = tl.load(first_piece_ptr + token + 1)
        total = _sum_run(pieces_ptr, order_ptr, begin, end, num_cols, cols, mask, False, UNROLL)
    tl.store(out_ptr + token.to(tl.int64) * num_cols + cols, total, mask=mask)


@triton.jit
def _scatter_kernel(dy_ptr, token_ptr, out_ptr, num_cols, stride_dr, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < num_cols
    token = tl.load(token_ptr + position).to(tl.int64)
    part = tl.load(dy_ptr + position * stride_dr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr + token * num_cols + cols, part, mask=mask, sem="relaxed")


def embedding_backward(dy: torch.Tensor, tokens: torch.Tensor, num_tokens: int, *, form: EmbeddingForm) -> torch.Tensor:
    """Return dE, float32 [V, D], from `dy` [T, D] and `tokens` int64 [T], each in 0 .. V - 1 = `num_tokens` - 1.

    Raises ValueError for an unknown `form` or shapes that do not fit.
    """
    if form not in get_args(EmbeddingForm):
        raise ValueError(f"embedding.backward: unknown form {form!r}; expected one of sorted, atomic")
    num_rows, num_cols = dy.shape
    if tokens.shape != (num_rows,) or (num_cols > 1 and dy.stride(1) != 1):
        raise ValueError(f"dy {tuple(dy.shape)}, tokens {tuple(tokens.shape)}: expected a token for each row")
    grid_cols = triton.cdiv(num_cols, BLOCK)
    if form == "atomic" or not num_rows:
        out = torch.zeros(num_tokens, num_cols, dtype=torch.float32, device=dy.device)
        if num_rows:
            _scatter_kernel[(num_rows, grid_cols)](dy, tokens, out, num_cols, dy.stride(0), BLOCK=BLOCK, num_warps=4)
        return out
    # As int32: a sort takes half as many passes.
    sorted_tokens, order = torch.sort(tokens.int(), stable=True)
    every = torch.arange(num_tokens + 1, dtype=torch.int32, device=dy.device)
    starts = torch.searchsorted(sorted_tokens, every, out_int32=True)
    num_pieces_of = (starts.diff() + (PIECE - 1)) // PIECE
    first_piece = torch.zeros(num_tokens + 1, dtype=torch.int32, device=dy.device)
    torch.cumsum(num_pieces_of * (num_pieces_of > 1), 0, dtype=torch.int32, out=first_piece[1:])
    # Room for as many pieces as there can be, so that nothing waits for the count; unused ones are empty.
    num_pieces = 2 * (num_rows // PIECE)
    pieces = torch.empty(num_pieces, num_cols, dtype=torch.float32, device=dy.device)
    if num_pieces:
        _piece_kernel[(grid_cols, num_pieces)](
            dy, order, starts, first_piece, pieces, num_tokens, num_cols, dy.stride(0),
            BLOCK=BLOCK, UNROLL=UNROLL, PIECE=PIECE, STEPS=num_tokens.bit_length(), num_warps=4,
        )  # fmt: skip
    out = torch.empty(num_tokens, num_cols, dtype=torch.float32, device=dy.device)
    _token_kernel[(num_tokens, grid_cols)](
        dy, order, starts, pieces, first_piece, out, num_cols, dy.stride(0),
        BLOCK=BLOCK, UNROLL=UNROLL, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    return out


def reference_embedding_backward(dy: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return dE [V, D] in plain PyTorch, in dy's dtype, positions added in ascending order."""
    out = dy.new_zeros(num_tokens, dy.shape[1])
    for row, token in zip(dy, tokens.tolist(), strict=True):
        out[token] += row
    return out
