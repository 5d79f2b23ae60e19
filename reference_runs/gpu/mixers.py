"""Attention and the chunked scan.

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

from bitcheck.reference_runs.kernels.ssm import Operands, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import scan_backward

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


class _Attention(torch.autograd.Function):
    """Causal softmax attention, bfloat16."""

    @staticmethod
    def forward(ctx: Any, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSV: Tensor, is_fixed: bool) -> Tensor:
        ctx.is_fixed, ctx.dtypes, ctx.width = is_fixed, (q_BHSC.dtype, k_BHSC.dtype, v_BHSV.dtype), v_BHSV.shape[-1]
        ctx.scale = 1 / math.sqrt(q_BHSC.shape[-1])
        q, k = q_BHSC.bfloat16(), k_BHSC.bfloat16()
        v = F.pad(v_BHSV.bfloat16(), (0, q.shape[-1] - ctx.width))
        out, lse, _, _, ctx.max_q, ctx.max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=ctx.scale
        )
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        o_BHSV: Tensor = out[..., : ctx.width].to(v_BHSV.dtype)
        return o_BHSV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        do = F.pad(gradients[0].bfloat16(), (0, q.shape[-1] - ctx.width))
        with _deterministic(ctx.is_fixed):
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, out, lse, None, None, ctx.max_q, ctx.max_k, 0.0, True, seed, offset, scale=ctx.scale
            )
        gradients = (dq, dk, dv[..., : ctx.width])
        return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def attention(q_BHSC: Tensor, k_BHSC: Tensor, v_BHSV: Tensor, is_fixed: bool) -> Tensor:
    """Return o [B, H, S, V] in the dtype of v; computed in bfloat16 with float32 sums."""
    o_BHSV: Tensor = _Attention.apply(q_BHSC, k_BHSC, v_BHSV, is_fixed)
    return o_BHSV


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands_and_options: Any) -> Tensor:
        *operands, ctx.chunk, ctx.is_fixed = operands_and_options
        ctx.save_for_backward(*operands)
        return scan_forward(Operands(*operands), ctx.chunk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operands = Operands(*ctx.saved_tensors)
        form: Any = "workspace" if ctx.is_fixed else "atomic"
        grads = scan_backward(gradients[0].contiguous(), operands, ctx.chunk, form=form)
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
    """Return y float32 [B, S, H, P]; `chunk` is 16, 32 or 64 and divides S; `is_fixed`: `ssm.backward`."""
    y_BSHP: Tensor = _Scan.apply(x_BSHP, dt_BSH, a_H, b_BSN, c_BSN, d_H, chunk, is_fixed)
    return y_BSHP
