"""The pipeline: layers cut into stages, two of them on each rank, worked on in DualPipeV's order.

    rank 0    stage 0: embedding, layers ...        stage 2 pp - 1: layers ..., head, MTP, loss
    rank 1    stage 1: layers ...                   stage 2 pp - 2: layers ...
    ...                                                             going down on the left, up on the right

The V puts the first and the last stage on one rank, which is how MTP and the main model share the embedding
and the head physically (V3 report, section 3.2.1). The schedule (arXiv 2412.19437; PyTorch's `ScheduleDualPipeV`)
splits some backward passes in two, inputs first. Deterministic: it is a fixed list of actions, a parameter's
gradients are added in the order of the micro-batches, and what crosses between ranks is BF16 as it is inside.
So gradients are those of one process bit for bit, but for the embedding's: there each micro-batch's two parts,
from the trunk and from MTP, are added before the next micro-batch's; here they come from two stages.

What one process would draw for a micro-batch is fixed before the pipeline starts: each first stage's forward
begins in the generator's state of its micro-batch, whichever action ran before it.

Legend: B sequences of a micro-batch, S positions, D model width, M micro-batches of this rank.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.distributed.pipelining.stage import _PipelineStageBase

from bitcheck.reference_runs.configs import DataConfig
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.ranks import Ranks


def layers_of_stages(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each stage; the embedding and the head count as a layer each, as in torchtitan."""
    bounds = [(num_layers + 2) * stage // num_stages for stage in range(num_stages + 1)]
    return [range(max(first - 1, 0), min(stop - 1, num_layers)) for first, stop in pairwise(bounds)]


class _WithLoss(torch.autograd.Function):
    """x as it is; its backward also gives `weight` as the gradient of a loss that was added up elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.shape = weight, loss.shape
        return x.clone()  # not a view: the schedule detaches a stage's output in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight = gradients[0].new_full(ctx.shape, ctx.weight, dtype=torch.float32)
        return gradients[0], weight, None


class Stage(nn.Module):
    """Some neighbouring layers of `model`, under the names that they have there."""

    def __init__(self, model: Model, layers: range, is_first: bool, is_last: bool, loss_weight: float) -> None:
        super().__init__()
        # Whose arithmetic it is; not a child, which would make all of the rank's parameters this stage's.
        self._model = (model,)
        self.is_first, self.is_last, self.loss_weight = is_first, is_last, loss_weight
        for name in _ENDS["first"] * is_first + _ENDS["last"] * is_last:
            self.add_module(name, getattr(model, name))
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in layers})

    def forward(self, x: Tensor, targets_BS2: Tensor | None = None, generator_state: Tensor | None = None) -> Tensor:
        """Return bfloat16 [B, S, D]; the last stage the total and the main loss, float32 [2].

        `x` is what the stage before returned, on the first stage int64 [B, S]. The balance loss of a stage goes
        into the gradients there and is not in the total.
        """
        (model,) = self._model
        if self.is_first:
            x = _embed(model, x, generator_state)
        for layer in self.layers.values():
            x, balance = layer(x, model.rotation)
            if self.training and balance.requires_grad:
                x = _WithLoss.apply(x, balance, self.loss_weight)
        if not self.is_last:
            return x
        assert targets_BS2 is not None
        losses = model.losses(x, torch.zeros((), device=x.device), targets_BS2)
        return torch.stack((losses.total, losses.main))


_ENDS = {"first": ("embedding",), "last": ("embedding", "norm", "head", "mtp", "loss")}
"""What the first and the last stage have besides layers."""


def _embed(model: Model, inputs_BS: Tensor, generator_state: Tensor | None) -> Tensor:
    if generator_state is None:
        return model.embed(inputs_BS)
    after = torch.get_rng_state()
    # A copy: PyTorch reads a state with instructions that end the process where memory is not aligned.
    torch.set_rng_state(generator_state.flatten().clone())
    x_BSD = model.embed(inputs_BS)
    torch.set_rng_state(after)
    return x_BSD


class Pipeline:
    """This rank's two stages of `model`, which loses all that belongs to other ranks."""

    def __init__(self, model: Model, data: DataConfig, ranks: Ranks, loss_weight: float) -> None:
        degrees, config = ranks.degrees, model.config
        self.num_micro = data.micro_batches // degrees.dp
        num_stages = 2 * degrees.pp
        layers = layers_of_stages(len(config.mixers), num_stages)
        mine = (ranks.pp_rank, num_stages - 1 - ranks.pp_rank)
        x_BSD = torch.empty(data.sequences, data.seq_len, config.d_model, dtype=torch.bfloat16, requires_grad=True)
        inputs_BS = torch.empty(data.sequences, data.seq_len, dtype=torch.int64)
        self._stages: dict[int, Stage] = {}
        stages: list[_PipelineStageBase] = []
        for index in mine:
            is_first, is_last = index == 0, index == num_stages - 1
            # Shapes are given: asked to find them out, PyTorch runs a forward of its own in a process's first step,
            # which a resumed run would have where an uninterrupted one has not.
            self._stages[index] = Stage(model, layers[index], is_first, is_last, loss_weight)
            stages.append(
                PipelineStage(
                    self._stages[index],
                    index,
                    num_stages,
                    torch.device("cpu"),
                    input_args=inputs_BS if is_first else x_BSD,
                    output_args=torch.empty(2, requires_grad=True) if is_last else x_BSD,
                    group=ranks.pp,
                )
            )
        kept = {index for stage in mine for index in layers[stage]}
        for index in range(len(config.mixers)):
            if index not in kept:
                model.layers[index] = nn.Identity()
        if ranks.pp_rank > 0:
            for name in _ENDS["last"]:
                setattr(model, name, nn.Identity())
        self._group, self._rank, self._shape = ranks.pp, ranks.pp_rank, x_BSD.shape
        self._schedule = ScheduleDualPipeV(
            stages, self.num_micro, loss_fn=lambda losses, _: losses[0] * loss_weight, scale_grads=False
        )
        # The handshake of neighbours would otherwise be part of the first step.
        self._schedule._initialize_stages((inputs_BS,), {}, None)

    def step(self, batches: Sequence[tuple[Tensor, Tensor]], generator_states: Sequence[Tensor]) -> Tensor:
        """Run forward and backward of this rank's micro-batches; return their main losses, float32 [M].

        Zeros on ranks that have not the last stage. `generator_states` are PyTorch's, uint8, one a micro-batch.
        """
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        if self._rank > 0:
            self._schedule.step(return_outputs=False)
            return torch.zeros(self.num_micro)
        states = torch.stack(tuple(generator_states))
        losses: Tensor = self._schedule.step(inputs, target=targets, targets_BS2=targets, generator_state=states)
        return losses.detach().view(-1, 2)[:, 1]

    def evaluate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the main losses of any number of batches, forward only and one after the other, as `step` does.

        `ScheduleDualPipeV.eval` cannot: in PyTorch 2.13 it runs the backward of a schedule with a V all the same.
        """
        losses = torch.zeros(len(batches))
        for number, (x, targets_BS2) in enumerate(batches):
            for index, stage in sorted(self._stages.items()):
                before, after = self._rank_of(index - 1), self._rank_of(index + 1)
                if index > 0 and before != self._rank:
                    x = torch.empty(self._shape, dtype=torch.bfloat16)
                    dist.recv(x, group=self._group, group_src=before)
                x = stage(x, targets_BS2)
                if stage.is_last:
                    losses[number] = x[1]
                elif after != self._rank:
                    dist.send(x, group=self._group, group_dst=after)
        return losses

    def _rank_of(self, stage: int) -> int:
        """Return which rank of the pipeline has `stage`."""
        return min(stage, 2 * dist.get_world_size(self._group) - 1 - stage)
