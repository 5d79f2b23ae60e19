"""Sums over ranks: of gradients (the switch `comm.reduce`), and of the norm that they are clipped by.

    ordered   each micro-batch's gradients are kept apart; an all-to-all gives each rank a slice of all of
              them, which it adds in FP32 in the order of the micro-batches; an all-gather puts it together
    native    each rank's gradients add up as they come, and `all_reduce` sums over ranks

A sum's bits depend on where its brackets are. `native` brackets by rank, and inside by whatever the
library chooses for this number of ranks; `ordered` has no brackets that depend on ranks at all:

    ((g0 + g1) + g2) + g3      what one process does when it works on four micro-batches in turn

so with data parallelism alone 1, 2 and 4 ranks give the same bits. It moves as many bytes as an all-reduce
for each micro-batch that a rank has, and holds their gradients until the end of the step.

Legend: M micro-batches of a rank, N elements of all gradients, R ranks, n elements of one rank's slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bitcheck.reference_runs.arrival import sum_parts
from bitcheck.reference_runs.ranks import Ranks


def sum_ordered(parts_MN: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over micro-batches of all ranks, float32 [N], the same on each of them.

    Deterministic: rank r has micro-batches r, r + R, ...; `sum_parts` adds 0, 1, 2, ... whoever had them.
    """
    num_ranks, (num_parts, num_values) = dist.get_world_size(group), parts_MN.shape
    padded_MN = F.pad(parts_MN, (0, -num_values % num_ranks))
    sent_RMn = padded_MN.view(num_parts, num_ranks, -1).transpose(0, 1).contiguous()
    received_RMn = torch.empty_like(sent_RMn)
    dist.all_to_all_single(received_RMn, sent_RMn, group=group)
    slice_n = sum_parts(received_RMn.transpose(0, 1).flatten(0, 1), is_fixed=True)
    total_Rn = slice_n.new_empty(num_ranks, slice_n.numel())
    dist.all_gather(list(total_Rn.unbind()), slice_n, group=group)
    return total_Rn.flatten()[:num_values]


def global_norm(norms_n: Tensor, positions: Sequence[int], is_shard: Sequence[bool], size: int, ranks: Ranks) -> Tensor:
    """Return the norm of all gradients of the model, float32 0-d and the same on every rank.

    `norms_n` float32 are the norms of this rank's parameters, `positions` their places among the `size` ones of the
    whole model, `is_shard` whether the other expert-parallel ranks have other parts. Deterministic: norms are put
    in the model's order, a part an expert-parallel rank; each place is filled by one rank and zero on the others,
    so that the sum over ranks adds nothing.
    """
    norms_PN = norms_n.new_zeros(ranks.degrees.ep, size)
    for norm, position, is_part in zip(norms_n, positions, is_shard, strict=True):
        if is_part or ranks.ep_rank == 0:
            norms_PN[ranks.ep_rank if is_part else 0, position] = norm
    for group in (ranks.ep, ranks.pp):
        dist.all_reduce(norms_PN, group=group)
    total: Tensor = torch.linalg.vector_norm(norms_PN)
    return total


class GradientSum:
    """The gradients of `parameters`, summed over the ranks of `group` once a step."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, is_ordered: bool) -> None:
        self.parameters, self.group, self.is_ordered = list(parameters), group, is_ordered
        self._parts: list[Tensor] = []

    def end_micro_batch(self) -> None:
        """Put this micro-batch's gradients aside where order counts; else let them add up."""
        if self.is_ordered and self.parameters:
            self._parts.append(self._take())

    def finish(self) -> None:
        """Give every parameter the sum over micro-batches and ranks as its gradient, float32."""
        if not self.parameters:
            return
        if self.is_ordered:
            parts, self._parts = self._parts, []
            total_N = sum_ordered(torch.stack(parts), self.group)
        else:
            total_N = self._take()
            dist.all_reduce(total_N, group=self.group)
        pieces = total_N.split([parameter.numel() for parameter in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def _take(self) -> Tensor:
        gradients = []
        for parameter in self.parameters:
            assert parameter.grad is not None, "every parameter takes part in every micro-batch"
            gradients.append(parameter.grad.flatten())
            parameter.grad = None
        return torch.cat(gradients)
