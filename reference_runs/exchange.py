"""What expert-parallel ranks exchange: rows of tokens go to their experts' rank, rows of results come back.

    a rank's rows, sorted by expert          [ for rank 0 | for rank 1 | ... ]
    all-to-all                               [ from rank 0 | from rank 1 | ... ]   each sorted by expert
    sorted by expert, then by source rank    what the grouped GEMM takes

Activations cross as E4M3 codes with power-of-two scales (one FP32 for 128 of them: 1.03 bytes an element);
results, and all gradients, in BF16 (V3 report, section 3.3.2). Bits are moved and nothing is added, so there is
no order to fix but that of the rows: by source rank, and in the tokens' order inside. The sum over a token's
experts is done where the token is, in slot order (`moe.combine`).

Legend: R rows of this rank's tokens, S rows of this rank's experts, P ranks, E experts, D features.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """The two ways between tokens and experts for one micro-batch of every rank of a group."""

    def __init__(self, loads_E: Tensor, group: dist.ProcessGroup) -> None:
        """Tell the others how many rows each expert gets from here: `loads_E` int64. Called by all at once."""
        self._group = group
        loads_PE = loads_E.view(dist.get_world_size(group), -1)
        received_PE = torch.empty_like(loads_PE)
        dist.all_to_all_single(received_PE, loads_PE, group=group)
        self.loads_E = received_PE.sum(0)
        """Rows that each expert of this rank has, int64 [E / P]."""
        self._sent: list[int] = loads_PE.sum(1).tolist()
        self._received: list[int] = received_PE.sum(1).tolist()
        expert_PE = torch.arange(received_PE.shape[1], device=loads_E.device).expand_as(received_PE)
        self._order_S = expert_PE.flatten().repeat_interleave(received_PE.flatten()).argsort(stable=True)

    def to_experts(self, rows_R: Tensor) -> Tensor:
        """Return [S, ...], sorted by expert, for rows [R, ...] sorted by expert; any dtype but FP8."""
        received_S = rows_R.new_empty(sum(self._received), *rows_R.shape[1:])
        dist.all_to_all_single(received_S, rows_R.contiguous(), self._received, self._sent, group=self._group)
        return received_S[self._order_S]

    def to_tokens(self, rows_S: Tensor) -> Tensor:
        """Return [R, ...] for rows [S, ...]: the way back."""
        by_source_S = torch.empty_like(rows_S)
        by_source_S[self._order_S] = rows_S
        back_R = rows_S.new_empty(sum(self._sent), *rows_S.shape[1:])
        dist.all_to_all_single(back_R, by_source_S, self._sent, self._received, group=self._group)
        return back_R


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_R: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.to_experts(rows_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.to_tokens(gradients[0]), None


def send_to_experts(rows_R: Tensor, exchange: Exchange) -> Tensor:
    """Return `exchange.to_experts(rows_R)` with a gradient, which comes back the other way in its own dtype."""
    rows_S: Tensor = _ToExperts.apply(rows_R, exchange)
    return rows_S


def count_nodes(experts_TK: Tensor, num_experts: int, num_nodes: int) -> Tensor:
    """Return over how many nodes each token's experts are spread, int64 [T]; a node has neighbouring experts.

    V3 lets a token's 8 experts be on 4 of 8 nodes: its activation once over InfiniBand to each of them, from there over
    NVLink to its experts. The two links are in balance with 3.2 experts a node (section 3.2.2).
    """
    nodes_TK = experts_TK // (num_experts // num_nodes)
    is_used_TG = experts_TK.new_zeros(experts_TK.shape[0], num_nodes).scatter_(1, nodes_TK, 1)
    return is_used_TG.sum(1)
