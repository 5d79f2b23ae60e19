"""MLA's heads: queries, keys and values laid out for an attention kernel, with RoPE, and the way back.

    q'[h] = [q_nope[h] ; R q_rope[h]]     k'[h] = [k_nope[h] ; R k_rope]     v'[h] = [v[h] ; 0]

q holds [nope | rope] a head, kv holds [k_nope | v] a head, k_rope is one for all heads; q', k' and v' are as
wide as q, because FlashAttention takes one width. R turns each pair (2z, 2z + 1) by the angle of its position:

    R: (a, b) -> (a cos - b sin, b cos + a sin)        its gradient turns the other way

A program takes one token and all its heads, HEADS at a time, in ascending order: that is the order in which the
gradient of k_rope is added up over the heads, inside one program. Everything else has one term. Arithmetic is
float32, and bfloat16 is stored.

Legend: T tokens = sequences times S positions, H heads, N, R and V the widths of nope, rope and value, C = N + R.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 16
"""Heads that a program has in registers at once."""
NUM_WARPS = 8


@triton.jit
def _rotated(base_ptrs, cols, mask, cos, sin):
    """Return the elements at `cols` of rows of pairs, each pair turned by (cos, sin), float32."""
    own = tl.load(base_ptrs + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(base_ptrs + (cols ^ 1)[None, :], mask=mask, other=0.0).to(tl.float32)
    is_first = (cols % 2 == 0)[None, :]
    return own * cos[None, :] + tl.where(is_first, -partner, partner) * sin[None, :]


@triton.jit
def _forward_kernel(
    q_ptr, kv_ptr, k_rope_ptr, rotation_ptr, q_out_ptr, k_out_ptr, v_out_ptr, seq_len, num_heads, stride_rope,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = NOPE + ROPE
    nope, rope, every = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    angle = rotation_ptr + tl.program_id(0) % seq_len * ROPE + rope // 2 * 2
    cos = tl.load(angle, mask=rope < ROPE, other=0.0)
    sin = tl.load(angle + 1, mask=rope < ROPE, other=0.0)
    zeros = tl.zeros((HEADS, BLOCK_R), dtype=tl.int64)
    for first in range(0, num_heads, HEADS):
        heads = first + tl.arange(0, HEADS)
        is_head = (heads < num_heads)[:, None]
        is_nope = is_head & (nope < NOPE)[None, :]
        is_rope = is_head & (rope < ROPE)[None, :]
        row = (token * num_heads + heads)[:, None]
        out = row * width + nope[None, :]
        q_row, kv_row = q_ptr + row * width, kv_ptr + row * (NOPE + VALUE)
        tl.store(q_out_ptr + out, tl.load(q_row + nope[None, :], mask=is_nope, other=0.0), mask=is_nope)
        tl.store(k_out_ptr + out, tl.load(kv_row + nope[None, :], mask=is_nope, other=0.0), mask=is_nope)
        out = row * width + NOPE + rope[None, :]
        q = _rotated(q_row + NOPE, rope, is_rope, cos, sin)
        tl.store(q_out_ptr + out, q.to(q_out_ptr.dtype.element_ty), mask=is_rope)
        k = _rotated(k_rope_ptr + token * stride_rope + zeros, rope, is_rope, cos, sin)
        tl.store(k_out_ptr + out, k.to(k_out_ptr.dtype.element_ty), mask=is_rope)
        v = tl.load(kv_row + NOPE + every[None, :], mask=is_head & (every < VALUE)[None, :], other=0.0)
        tl.store(v_out_ptr + row * width + every[None, :], v, mask=is_head & (every < width)[None, :])


@triton.jit
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, rotation_ptr, dq_out_ptr, dkv_out_ptr, dk_rope_ptr, seq_len, num_heads,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    seq, position = token // seq_len, token % seq_len
    width: tl.constexpr = NOPE + ROPE
    nope, rope, value = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    angle = rotation_ptr + position * ROPE + rope // 2 * 2
    cos = tl.load(angle, mask=rope < ROPE, other=0.0)
    sin = -tl.load(angle + 1, mask=rope < ROPE, other=0.0)
    dk_rope = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for first in range(0, num_heads, HEADS):  # heads ascending: the order of the sum
        heads = first + tl.arange(0, HEADS)
        is_head = (heads < num_heads)[:, None]
        is_nope = is_head & (nope < NOPE)[None, :]
        is_rope = is_head & (rope < ROPE)[None, :]
        is_value = is_head & (value < VALUE)[None, :]
        wide = heads[:, None].to(tl.int64)
        dq_row = dq_ptr + seq * stride_qb + position * stride_qs + wide * stride_qh
        dk_row = dk_ptr + seq * stride_kb + position * stride_ks + wide * stride_kh
        dv_row = dv_ptr + seq * stride_vb + position * stride_vs + wide * stride_vh
        row = (token * num_heads + heads)[:, None]
        dq_out, dkv_out = dq_out_ptr + row * width, dkv_out_ptr + row * (NOPE + VALUE)
        tl.store(dq_out + nope[None, :], tl.load(dq_row + nope[None, :], mask=is_nope, other=0.0), mask=is_nope)
        tl.store(dkv_out + nope[None, :], tl.load(dk_row + nope[None, :], mask=is_nope, other=0.0), mask=is_nope)
        dv = tl.load(dv_row + value[None, :], mask=is_value, other=0.0)
        tl.store(dkv_out + NOPE + value[None, :], dv, mask=is_value)
        dq = _rotated(dq_row + NOPE, rope, is_rope, cos, sin)
        tl.store(dq_out + NOPE + rope[None, :], dq.to(dq_out_ptr.dtype.element_ty), mask=is_rope)
        dk_rope += tl.sum(_rotated(dk_row + NOPE, rope, is_rope, cos, sin), axis=0)
    dk_rope_out = dk_rope_ptr + token * ROPE + rope
    tl.store(dk_rope_out, dk_rope.to(dk_rope_ptr.dtype.element_ty), mask=rope < ROPE)


def split_heads(
    q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, rotation: torch.Tensor, widths: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q', k' and v', bfloat16 [B, S, H, C] each, contiguous.

    `q` [B, S, H C] and `kv` [B, S, H (N + V)] are contiguous, `k_rope` [B, S, R] may have strided rows; all
    bfloat16. `rotation` float32 [S, R / 2, 2], contiguous, holds (cos, sin). `widths` are N, R and V, V at
    most C. Raises ValueError for other layouts.
    """
    nope, rope, value = widths
    num_seqs, seq_len, _ = q.shape
    num_heads = q.shape[-1] // (nope + rope)
    _check(q, kv, k_rope, rotation, widths, num_heads)
    outs = [q.new_empty(num_seqs, seq_len, num_heads, nope + rope) for _ in range(3)]
    _forward_kernel[(num_seqs * seq_len,)](
        q, kv, k_rope, rotation, *outs, seq_len, num_heads, k_rope.stride(1), NOPE=nope, ROPE=rope, VALUE=value,
        BLOCK_N=triton.next_power_of_2(nope), BLOCK_R=triton.next_power_of_2(rope),
        BLOCK_C=triton.next_power_of_2(nope + rope), HEADS=_heads(num_heads), num_warps=NUM_WARPS,
    )  # fmt: skip
    return outs[0], outs[1], outs[2]


def split_heads_backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, rotation: torch.Tensor, widths: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, kv and k_rope, contiguous, from those of q', k' and v' [B, S, H, C].

    The last dimension of each is contiguous; what flows into the padding of v' is left out.
    """
    nope, rope, value = widths
    num_seqs, seq_len, num_heads, width = dq.shape
    if any(grad.shape != dq.shape or grad.stride(-1) != 1 for grad in (dq, dk, dv)) or width != nope + rope:
        raise ValueError(f"gradients {tuple(dq.shape)}, {tuple(dk.shape)}, {tuple(dv.shape)}: expected one layout")
    dq_out = dq.new_empty(num_seqs, seq_len, num_heads * width)
    dkv_out = dq.new_empty(num_seqs, seq_len, num_heads * (nope + value))
    dk_rope = dq.new_empty(num_seqs, seq_len, rope)
    _backward_kernel[(num_seqs * seq_len,)](
        dq, dk, dv, rotation, dq_out, dkv_out, dk_rope, seq_len, num_heads,
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], NOPE=nope, ROPE=rope, VALUE=value,
        BLOCK_N=triton.next_power_of_2(nope), BLOCK_R=triton.next_power_of_2(rope),
        BLOCK_V=triton.next_power_of_2(value), HEADS=_heads(num_heads), num_warps=NUM_WARPS,
    )  # fmt: skip
    return dq_out, dkv_out, dk_rope


def reference_split_heads(
    q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, rotation: torch.Tensor, widths: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q', k' and v' in plain PyTorch, in the dtype given; autograd gives the gradients."""
    nope, rope, value = widths
    heads = q.shape[-1] // (nope + rope)
    q_nope, q_rope = q.unflatten(-1, (heads, -1)).split((nope, rope), -1)
    k_nope, v = kv.unflatten(-1, (heads, -1)).split((nope, value), -1)
    cos, sin = rotation[:, None, :, 0], rotation[:, None, :, 1]

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    k_turned = turn(k_rope.unsqueeze(2)).expand(-1, -1, heads, -1)
    padded = torch.nn.functional.pad(v, (0, nope + rope - value))
    return torch.cat((q_nope, turn(q_rope)), -1), torch.cat((k_nope, k_turned), -1), padded


def _heads(num_heads: int) -> int:
    return min(HEADS, int(triton.next_power_of_2(num_heads)))


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    rotation: torch.Tensor,
    widths: tuple[int, int, int],
    num_heads: int,
) -> None:
    nope, rope, value = widths
    num_seqs, seq_len, _ = q.shape
    if q.shape[-1] != num_heads * (nope + rope) or rope % 2 or value > nope + rope:
        raise ValueError(f"q {tuple(q.shape)} for widths {widths}: expected heads of nope + rope, rope even")
    if kv.shape != (num_seqs, seq_len, num_heads * (nope + value)) or k_rope.shape != (num_seqs, seq_len, rope):
        raise ValueError(f"kv {tuple(kv.shape)}, k_rope {tuple(k_rope.shape)} do not fit q {tuple(q.shape)}")
    if rotation.shape != (seq_len, rope // 2, 2) or not rotation.is_contiguous():
        raise ValueError(f"rotation {tuple(rotation.shape)}: expected contiguous {(seq_len, rope // 2, 2)}")
    is_rows = k_rope.stride(2) == 1 and k_rope.stride(0) == seq_len * k_rope.stride(1)
    if not (q.is_contiguous() and kv.is_contiguous() and is_rows):
        raise ValueError("expected contiguous q and kv, and k_rope with rows of one stride")
