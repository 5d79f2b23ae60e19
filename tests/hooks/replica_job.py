"""Small data-parallel programs, each with its copies as they should be or with one planned fault, in one gloo job.

python -m tests.hooks.replica_job FOLDER NUM_RANKS LEVEL NAME ...

Leaves in FOLDER/NAME the run of the program NAME.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import bitcheck
from bitcheck.reference_runs.ranks import end_process_group

STEPS, WIDTH = 4, 6
Case = Callable[[], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Enter a program under its name."""
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers and a buffer that nobody writes."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = norm if norm is not None else nn.Identity()
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.norm(self.body(x))) * self.scale)
        return out


class SharedMean(nn.Module):
    """Keeps an average over the batches of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.detach().mean(0)
        dist.all_reduce(own)
        self.mean.mul_(0.9).add_(own / dist.get_world_size(), alpha=0.1)
        return x - self.mean


def net(norm: nn.Module | None = None) -> Net:
    """Return a model that is the same on every rank."""
    torch.manual_seed(0)
    return Net(norm)


def batches() -> Iterator[torch.Tensor]:
    """Yield a batch a step, another on every rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(STEPS):
        yield torch.randn(5, WIDTH, generator=generator)


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit of the first element, as a fault of the memory does."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 3)


def fit(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    call: Callable[[torch.Tensor], torch.Tensor] | None = None,
    after: Callable[[int, Optimizer], None] = lambda step, optimizer: None,
) -> None:
    """Train for STEPS steps; `after` is called at the end of each."""
    optimizer = optimizer if optimizer is not None else torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, x in enumerate(batches()):
        F.mse_loss((call or model)(x), x[:, :2].exp()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step, optimizer)


@case
def clean() -> None:
    fit(DistributedDataParallel(net()))


@case
def flipped_parameter() -> None:
    model = DistributedDataParallel(net())
    at = (2, 2)
    fit(model, after=lambda step, _: flip(model.module.head.weight) if (step, dist.get_rank()) == at else None)


@case
def flipped_moment() -> None:
    model = DistributedDataParallel(net())

    def after(step: int, optimizer: Optimizer) -> None:
        if (step, dist.get_rank()) == (1, 1):
            flip(optimizer.state[model.module.body.bias]["exp_avg"])

    fit(model, after=after)


@case
def flipped_buffer() -> None:
    model = DistributedDataParallel(net())
    fit(model, after=lambda step, _: flip(model.module.scale) if (step, dist.get_rank()) == (1, 3) else None)


@case
def flipped_gradient() -> None:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, x in enumerate(batches()):
        F.mse_loss(model(x), x[:, :2].exp()).backward()
        if (step, dist.get_rank()) == (2, 0):
            grad = model.module.head.weight.grad
            assert grad is not None
            flip(grad)
        optimizer.step()
        optimizer.zero_grad()


@case
def missed_broadcast() -> None:
    """One rank loads other weights once the wrapper has broadcast the first rank's."""
    model = DistributedDataParallel(net())
    if dist.get_rank() == 1:
        flip(model.module.body.weight)
    fit(model)


@case
def never_broadcast() -> None:
    """Each rank begins with weights of its own, and the wrapper was told to leave them."""
    torch.manual_seed(dist.get_rank())
    fit(DistributedDataParallel(Net(), init_sync=False))


@case
def bypassed() -> None:
    model = DistributedDataParallel(net())
    fit(model, call=model.module)


@case
def stepped_without_reduction() -> None:
    model = DistributedDataParallel(net())

    def call(x: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            out: torch.Tensor = model(x)
        return out

    fit(model, call=call)


@case
def accumulating() -> None:
    """The local gradients of the first micro-batch are not reduced; what the optimizer finds is."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        for number, part in enumerate(x.split(2)):
            with contextlib.nullcontext() if number == 2 else model.no_sync():
                F.mse_loss(model(part), part[:, :2].exp()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def local_statistics() -> None:
    """Statistics of each rank's own batches, and the wrapper was told that buffers are local."""
    fit(DistributedDataParallel(net(nn.BatchNorm1d(WIDTH)), broadcast_buffers=False))


@case
def drifting_statistics() -> None:
    """The same, and nobody told the wrapper."""
    fit(DistributedDataParallel(net(nn.BatchNorm1d(WIDTH))))


@case
def shared_statistics() -> None:
    """Statistics over the batches of all ranks, as SyncBatchNorm takes them."""
    fit(DistributedDataParallel(net(SharedMean())))


@case
def ignored_parameter() -> None:
    """A parameter and a buffer that the wrapper is told not to manage are each rank's own."""
    model = net()
    model.register_parameter("own", nn.Parameter(torch.full((2,), float(dist.get_rank()))))
    model.norm.register_buffer("own", torch.full((2,), float(dist.get_rank())))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own", "norm.own"])
    wrapped = DistributedDataParallel(model)
    fit(wrapped, call=lambda x: wrapped(x) + model.own)


@case
def divided_optimizer() -> None:
    model = DistributedDataParallel(net())
    fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))


@case
def own_learning_rate() -> None:
    model = DistributedDataParallel(net())

    def after(step: int, optimizer: Optimizer) -> None:
        if step == 1 and dist.get_rank() == 3:
            optimizer.param_groups[0]["lr"] *= 1.5

    fit(model, after=after)


@case
def frozen_layer() -> None:
    model = net()
    model.body.requires_grad_(False)
    fit(DistributedDataParallel(model))


@case
def two_groups() -> None:
    """Each pair of ranks trains a model of its own; in the second pair one copy is flipped."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    torch.manual_seed(dist.get_rank() // 2)
    model = DistributedDataParallel(Net(), process_group=pairs[dist.get_rank() // 2])
    fit(model, after=lambda step, _: flip(model.module.head.bias) if (step, dist.get_rank()) == (1, 2) else None)


@case
def averaged_by_hand() -> None:
    """No wrapper: nothing says what is replicated."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        F.mse_loss(model(x), x[:, :2].exp()).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def work(rank: int, num_ranks: int, folder: Path, level: str, names: list[str]) -> None:
    """One rank: every program, recorded."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    for name in names:
        try:
            dist.barrier()
            with bitcheck.record(folder / name, level=level, strict=True):
                CASES[name]()
        except Exception:  # noqa: BLE001  told to the test
            (folder / f"{name}-{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)
    dist.barrier()
    end_process_group()


if __name__ == "__main__":
    where, count, wanted, *chosen = sys.argv[1:]
    torch.multiprocessing.spawn(work, (int(count), Path(where), wanted, chosen or list(CASES)), int(count))
