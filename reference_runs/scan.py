"""The chunked scan of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 6), forward and backward.

A head is a linear recurrence over a state h [P, N], with a decay per token:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

Cut into chunks of L tokens, with c_l the running sum of dt A inside a chunk and H the state at its start:

    y_l = sum over m <= l of (C_l . B_m) exp(c_l - c_m) dt_m x_m        inside the chunk
        + exp(c_l) H C_l                                                from before it
    H'  = exp(c_L) H + sum over m of exp(c_L - c_m) dt_m x_m B_m^T      for the next one

B and C are shared by all heads, A and D by all tokens, so their gradients are sums over heads or over
chunks, each worked on by a program of its own on a GPU. So is ddt, over tiles of P. The switch
`ssm.backward` says how the parts meet: `workspace` (written apart, added in order) or `atomic`.

Legend: B sequences (before G) or the input matrix, G chunks, H heads, L and M positions in a chunk,
P head width, N state width.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.arrival import sum_parts
from bitcheck.reference_runs.device import gpu_forms

TILE_P = 32
"""Elements of P in a tile of ddt's reduction; pinned, because another size gives other bits."""


class _Chunks(NamedTuple):
    """What forward and backward both start from, all float32."""

    x_dt: Tensor
    """dt x, [B, G, H, L, P]."""
    decay_sum: Tensor
    """c, [B, G, H, L]."""
    scores: Tensor
    """C_l . B_m, [B, G, 1, L, M]."""
    decay: Tensor
    """exp(c_l - c_m) for m <= l, else 0, [B, G, H, L, M]."""
    to_end: Tensor
    """exp(c_L - c_m), [B, G, H, M]."""


def _by_chunk(x_BSHP: Tensor, chunk: int) -> Tensor:
    """[B, S, H, P] to [B, G, H, L, P]."""
    x_BGLHP: Tensor = x_BSHP.unflatten(1, (-1, chunk))
    return x_BGLHP.transpose(2, 3)


def _by_token(x_BGHLP: Tensor) -> Tensor:
    """[B, G, H, L, P] to [B, S, H, P]."""
    return x_BGHLP.transpose(2, 3).flatten(1, 2)


def _prepare(x_BGHLP: Tensor, dt_BGHL: Tensor, a_H: Tensor, b_BG1LN: Tensor, c_BG1LN: Tensor) -> _Chunks:
    decay_sum = (dt_BGHL * a_H[:, None]).cumsum(-1)
    chunk = decay_sum.shape[-1]
    position_L = torch.arange(chunk, device=x_BGHLP.device)
    future_LM = position_L[:, None] < position_L
    exponent = decay_sum[..., :, None] - decay_sum[..., None, :]
    return _Chunks(
        x_BGHLP * dt_BGHL[..., None],
        decay_sum,
        c_BG1LN @ b_BG1LN.transpose(-1, -2),
        exponent.masked_fill_(future_LM, -torch.inf).exp_(),
        (decay_sum[..., -1:] - decay_sum).exp(),
    )


def _states(chunks: _Chunks, b_BG1LN: Tensor) -> Tensor:
    """Return the state at the start of each chunk, float32 [B, G, H, P, N]; chunks in order of time."""
    added = (chunks.x_dt * chunks.to_end[..., None]).transpose(-1, -2) @ b_BG1LN
    decay_BGH11 = chunks.decay_sum[..., -1, None, None].exp()
    states = torch.zeros_like(added)
    for g in range(1, added.shape[1]):
        states[:, g] = states[:, g - 1] * decay_BGH11[:, g - 1] + added[:, g - 1]
    return states


def scan(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSN: Tensor, c_BSN: Tensor, d_H: Tensor, chunk: int) -> Tensor:
    """Return y float32 [B, S, H, P] of float32 operands; `chunk` divides S, else ValueError."""
    if x_BSHP.shape[1] % chunk:
        raise ValueError(f"a sequence of {x_BSHP.shape[1]} tokens does not cut into chunks of {chunk}")
    x, dt = _by_chunk(x_BSHP, chunk), _by_chunk(dt_BSH[..., None], chunk)[..., 0]
    b, c = _by_chunk(b_BSN[:, :, None], chunk), _by_chunk(c_BSN[:, :, None], chunk)
    chunks = _prepare(x, dt, a_H, b, c)
    y = (chunks.scores * chunks.decay) @ chunks.x_dt
    y += (c @ _states(chunks, b).transpose(-1, -2)) * chunks.decay_sum.exp()[..., None]
    y += x * d_H[:, None, None]
    return _by_token(y)


def scan_backward(
    dy_BSHP: Tensor,
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSN: Tensor,
    c_BSN: Tensor,
    d_H: Tensor,
    chunk: int,
    is_fixed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and D, float32 and shaped as they are.

    The forward's chunk products are computed again. Deterministic where `is_fixed`: parts are added in
    ascending order of head, of (sequence, chunk), and of tile.
    """
    x, dt = _by_chunk(x_BSHP, chunk), _by_chunk(dt_BSH[..., None], chunk)[..., 0]
    b, c = _by_chunk(b_BSN[:, :, None], chunk), _by_chunk(c_BSN[:, :, None], chunk)
    dy = _by_chunk(dy_BSHP, chunk)
    chunks = _prepare(x, dt, a_H, b, c)
    states = _states(chunks, b)
    from_start = chunks.decay_sum.exp()[..., None]

    # Inside the chunk.
    weights = chunks.scores * chunks.decay
    dweights = dy @ chunks.x_dt.transpose(-1, -2)
    dx_dt = weights.transpose(-1, -2) @ dy
    dscores = dweights * chunks.decay
    dc_heads = dscores @ b
    db_heads = dscores.transpose(-1, -2) @ c
    dexponent = dweights * weights
    ddecay_sum = dexponent.sum(-1) - dexponent.sum(-2)

    # From before the chunk.
    dy_decayed = dy * from_start
    dc_heads += dy_decayed @ states
    dstates = dy_decayed.transpose(-1, -2) @ c
    ddecay_sum += (dy_decayed * (c @ states.transpose(-1, -2))).sum(-1)

    # Through the states, last chunk first.
    decay_BGH11 = chunks.decay_sum[..., -1, None, None].exp()
    dadded = torch.zeros_like(states)
    for g in range(states.shape[1] - 1, 0, -1):
        dadded[:, g - 1] = dstates[:, g]
        dstates[:, g - 1] += dstates[:, g] * decay_BGH11[:, g - 1]
    ddecay_sum[..., -1] += (dadded * states * decay_BGH11).sum((-1, -2))
    dx_dt_end = (b @ dadded.transpose(-1, -2)) * chunks.to_end[..., None]
    db_heads += (chunks.x_dt * chunks.to_end[..., None]) @ dadded
    dto_end = (dx_dt_end * chunks.x_dt).sum(-1)
    ddecay_sum -= dto_end
    ddecay_sum[..., -1] += dto_end.sum(-1)
    dx_dt += dx_dt_end

    # A running sum's gradient runs backwards.
    ddt_a = ddecay_sum.flip(-1).cumsum(-1).flip(-1)
    dx = dx_dt * dt[..., None] + dy * d_H[:, None, None]
    ddt_parts = [(tile).sum(-1) for tile in (dx_dt * x).split(TILE_P, -1)]
    ddt = sum_parts([ddt_a * a_H[:, None], *ddt_parts], is_fixed)
    da = sum_parts((ddt_a * dt).sum(-1).flatten(0, 1), is_fixed)
    dd = sum_parts((dy * x).sum((-1, -2)).flatten(0, 1), is_fixed)
    db = sum_parts(db_heads.unbind(2), is_fixed)
    dc = sum_parts(dc_heads.unbind(2), is_fixed)
    return _by_token(dx), _by_token(ddt[..., None])[..., 0], da, db.flatten(1, 2), dc.flatten(1, 2), dd


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *operands_and_options: Any) -> Tensor:
        *operands, ctx.chunk, ctx.is_fixed = operands_and_options
        ctx.save_for_backward(*operands)
        x, dt, a, b, c, d = (operand.float() for operand in operands)
        return scan(x, dt, a, b, c, d, ctx.chunk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, dt, a, b, c, d = (operand.float() for operand in saved)
        grads = scan_backward(gradients[0].float(), x, dt, a, b, c, d, ctx.chunk, ctx.is_fixed)
        kept = (grad.to(operand.dtype) for grad, operand in zip(grads, saved, strict=True))
        return *kept, None, None


class Scan(nn.Module):
    """The recurrence of all heads, with no parameters of its own: the switch `ssm.backward`."""

    def __init__(self, chunk: int, is_fixed: bool) -> None:
        super().__init__()
        self.chunk, self.is_fixed = chunk, is_fixed

    def forward(self, x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSN: Tensor, c_BSN: Tensor, d_H: Tensor) -> Tensor:
        """Return y float32 [B, S, H, P]; operands are bfloat16 or float32, computed in float32.

        On a GPU y has the dtype of x, and matrix products inside read TF32.
        """
        gpu = gpu_forms(x_BSHP)
        run = _Scan.apply if gpu is None else gpu.scan
        y_BSHP: Tensor = run(x_BSHP, dt_BSH, a_H, b_BSN, c_BSN, d_H, self.chunk, self.is_fixed)
        return y_BSHP
