"""Attention and what is around it; the chunked scan and what is around that.

Attention is PyTorch's own FlashAttention-2, called operator by operator. Its backward has two forms, chosen by
PyTorch's global flag for deterministic algorithms: with it programs keep their parts of dq apart, to be added in
order; without it they add with atomics. The switch `attention.backward` sets that flag around this one operator,
whatever the flag is for the rest of the run. FlashAttention wants one width for q, k and v: v is padded with zeros.

Legend: B sequences, H heads, S positions, C width of q and k, V width of v, P head width, N state width.
"""

# PyTorch leaves Function.apply and autograd's context without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitcheck.reference_runs.attention import Kept
from bitcheck.reference_runs.kernels.conv import conv_silu_backward, conv_silu_forward
from bitcheck.reference_runs.kernels.heads import split_heads as split_heads_forward
from bitcheck.reference_runs.kernels.heads import split_heads_backward
from bitcheck.reference_runs.kernels.ssm import Operands, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import scan_backward
from bitcheck.reference_runs.kernels.swiglu import swiglu_backward, swiglu_forward

aten = torch.ops.aten


@contextmanager
def _deterministic(mode: bool) -> Iterator[None]:
    """Set PyTorch's flag for what is called inside, and put back what it was."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


class _SplitHeads(torch.autograd.Function):
    """Projections to queries, keys and values as attention takes them, with RoPE."""

    @staticmethod
    def forward(
        ctx: Any, q_BSC: Tensor, kv_BSC: Tensor, k_rope_BSR: Tensor, rotation: Tensor, widths: tuple[int, int, int]
    ) -> tuple[Tensor, ...]:
        ctx.rotation, ctx.widths = rotation, widths
        outs = split_heads_forward(q_BSC, kv_BSC, k_rope_BSR, rotation, widths)
        return tuple(out.transpose(1, 2) for out in outs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
        return *split_heads_backward(dq, dk, dv, ctx.rotation, ctx.widths), None, None


def split_heads(
    q_BSC: Tensor, kv_BSC: Tensor, k_rope_BSR: Tensor, rotation_SZ: Tensor, widths: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, bfloat16 [B, H, S, N + R]; v is padded with zeros.

    `q_BSC` and `kv_BSC` bfloat16 hold all heads, `k_rope_BSR` the key's rotated part that they share, `rotation_SZ`
    is complex64, and `widths` are N, R and V, of the parts without and with rotation and of a value.
    """
    q, k, v = _SplitHeads.apply(q_BSC, kv_BSC, k_rope_BSR, torch.view_as_real(rotation_SZ), widths)
    return q, k, v


class _Attention(torch.autograd.Function):
    """Causal softmax attention, bfloat16."""

    @staticmethod
    def forward(ctx: Any, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSV: Tensor, is_fixed: bool, kept: Kept | None) -> Tensor:
        ctx.is_fixed, ctx.dtypes, ctx.width = is_fixed, (q_BHSC.dtype, k_BHSC.dtype, v_BHSV.dtype), v_BHSV.shape[-1]
        ctx.scale = 1 / math.sqrt(q_BHSC.shape[-1])
        q, k = q_BHSC.bfloat16(), k_BHSC.bfloat16()
        v = _widened(v_BHSV.bfloat16(), q.shape[-1])
        done = None if kept is None else kept.take()
        if done is not None:
            out, lse, seed, offset = done  # the second time: the forward is deterministic
        else:
            out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, True, False, scale=ctx.scale
            )
            if kept is not None:
                kept.put(out, lse, seed, offset)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        o_BHSV: Tensor = out[..., : ctx.width].to(v_BHSV.dtype)
        return o_BHSV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        do = _widened(gradients[0].bfloat16(), q.shape[-1])
        with _deterministic(ctx.is_fixed):
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, True, seed, offset, scale=ctx.scale
            )
        gradients = (dq, dk, dv[..., : ctx.width])
        return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None


def _widened(x_BHSV: Tensor, width: int) -> Tensor:
    return x_BHSV if x_BHSV.shape[-1] == width else F.pad(x_BHSV, (0, width - x_BHSV.shape[-1]))


def attention(q_BHSC: Tensor, k_BHSC: Tensor, v_BHSV: Tensor, is_fixed: bool, kept: Kept | None = None) -> Tensor:
    """Return o [B, H, S, V] in the dtype of v; computed in bfloat16 with float32 sums.

    With `kept` the first of two calls leaves there what the second one, on the same operands, takes instead.
    """
    o_BHSV: Tensor = _Attention.apply(q_BHSC, k_BHSC, v_BHSV, is_fixed, kept)
    return o_BHSV


class _ConvSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, weight_WC: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSC, weight_WC)
        return conv_silu_forward(x_BSC, weight_WC)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return conv_silu_backward(gradients[0].contiguous(), *ctx.saved_tensors)


def conv_silu(x_BSC: Tensor, weight_WC: Tensor) -> Tensor:
    """Return silu of the causal depthwise convolution of `x_BSC`, in its dtype; the weight's gradient is float32."""
    y_BSC: Tensor = _ConvSiLU.apply(x_BSC, weight_WC)
    return y_BSC


class _Gate(torch.autograd.Function):
    """y * silu(z): the kernel of SwiGLU, with z as its gate."""

    @staticmethod
    def forward(ctx: Any, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        ctx.save_for_backward(y_TI, z_TI)
        return swiglu_forward(z_TI, y_TI, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y_TI, z_TI = ctx.saved_tensors
        dz_TI, dy_TI = swiglu_backward(gradients[0].contiguous(), z_TI, y_TI).chunk(2, -1)
        return dy_TI, dz_TI


def gate(y_BSI: Tensor, z_BSI: Tensor) -> Tensor:
    """Return y * silu(z), bfloat16 [B, S, I], for bfloat16 operands."""
    gated_TI: Tensor = _Gate.apply(y_BSI.flatten(0, 1), z_BSI.flatten(0, 1))
    return gated_TI.view(z_BSI.shape)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands_and_options: Any) -> Tensor:
        *operands, ctx.chunk, ctx.is_fixed = operands_and_options
        ctx.save_for_backward(*operands)
        return scan_forward(Operands(*operands), ctx.chunk, out_dtype=operands[0].dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operands = Operands(*ctx.saved_tensors)
        form: Any = "workspace" if ctx.is_fixed else "atomic"
        dy_BSHP = gradients[0]
        if dy_BSHP.stride(-1) != 1:
            dy_BSHP = dy_BSHP.contiguous()
        grads = scan_backward(dy_BSHP, operands, ctx.chunk, form=form)
        kept = (grad.to(operand.dtype) for grad, operand in zip(grads, operands, strict=True))
        return *kept, None, None


def scan(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSN: Tensor,
    c_BSN: Tensor,
    d_H: Tensor,
    chunk: int,
    is_fixed: bool,
) -> Tensor:
    """Return y [B, S, H, P] in the dtype of x; `chunk` is 16, 32 or 64 and divides S; `is_fixed`: `ssm.backward`."""
    y_BSHP: Tensor = _Scan.apply(x_BSHP, dt_BSH, a_H, b_BSN, c_BSN, d_H, chunk, is_fixed)
    return y_BSHP
