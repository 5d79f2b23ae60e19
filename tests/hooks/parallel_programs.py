"""Small training programs of several processes, one for each way of spreading a training over ranks.

Each is a function of no arguments that every rank calls, inside a process group, and that returns
what it trained. `parallel_job` runs them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.hooks.programs import Trained

STEPS = 3
WIDTH = 8

Program = Callable[[], Trained]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(num_rows: int = 4, is_replicated: bool = False) -> Iterator[torch.Tensor]:
    """Yield a batch a step, of this rank's own unless `is_replicated`."""
    generator = torch.Generator().manual_seed(11 + (0 if is_replicated else dist.get_rank()))
    for _ in range(STEPS):
        yield torch.randn(num_rows, WIDTH, generator=generator)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, is_replicated: bool = False, clip: bool = False
) -> Trained:
    for x in batches(is_replicated=is_replicated):
        model(x).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return make()


# --- data parallel


@program
def ddp() -> Trained:
    """Small buckets, so that there are several."""
    model = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.001)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def ddp_with_bucket_views_and_static_graph() -> Trained:
    model = DistributedDataParallel(seeded(Net), gradient_as_bucket_view=True, static_graph=True)
    return fit(model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), clip=True)


@program
def ddp_that_accumulates() -> Trained:
    model = DistributedDataParallel(seeded(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches():
        with model.no_sync():
            model(x[:2]).square().mean().backward()
        model(x[2:]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, 3)
        self.right = nn.Linear(WIDTH, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((self.left if x.sum() > 0 else self.right)(x))


@program
def ddp_with_unused_parameters_and_buffers() -> Trained:
    model = DistributedDataParallel(seeded(Branches), find_unused_parameters=True)
    return fit(model, torch.optim.SGD(model.parameters(), lr=1e-1))


def _mean_in_half(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(half, async_op=True).get_future()

    def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
        bucket.buffer().copy_(done.value()[0])
        return bucket.buffer()

    return future.then(decompress)


_mean_in_half.__annotations__.clear()  # PyTorch wants classes there, not their names


@program
def ddp_with_a_hook_of_its_own() -> Trained:
    model = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.001)
    model.register_comm_hook(None, _mean_in_half)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def ddp_with_low_rank_gradients() -> Trained:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = DistributedDataParallel(seeded(Net))
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    other = DistributedDataParallel(seeded(Net))
    other.register_comm_hook(None, default_hooks.fp16_compress_hook)
    first, second = (torch.optim.SGD(one.parameters(), lr=1e-2) for one in (model, other))
    for x in batches():
        (model(x).square().mean() + other(x).square().mean()).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return Trained([model, other], [first, second])


@program
def averaged_by_hand() -> Trained:
    """Gradients are reduced by the program itself, between backward and the optimizer."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches():
        model(x).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


# --- sharded


def _sharded(**options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = seeded(Net)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@program
def fsdp() -> Trained:
    model = _sharded()
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def fsdp_that_keeps_parameters_gathered() -> Trained:
    model = _sharded(reshard_after_forward=False)
    return fit(model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), clip=True)


@program
def fsdp_in_mixed_precision() -> Trained:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def fsdp_that_accumulates_and_recomputes() -> Trained:
    from torch.distributed.fsdp import fully_shard

    class Recomputed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model: Any = seeded(Recomputed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x in batches():
        model.set_requires_gradient_sync(False)
        model(x[:2]).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model(x[2:]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


# --- tensor parallel


def _tensor_parallel(mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = seeded(Net)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@program
def tensor_parallel() -> Trained:
    model = _tensor_parallel(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), is_replicated=True)


@program
def sequence_parallel() -> Trained:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    model = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    for x in batches(is_replicated=True, num_rows=8):
        model(x.view(2, 4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def fsdp_and_tensor_parallel() -> Trained:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    model.head.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-1, foreach=False)
    return fit(model, optimizer, is_replicated=True)


# --- expert parallel


class Experts(nn.Module):
    """Rows go to the rank of their expert and come back; how many is known a step at a time."""

    def __init__(self, is_async: bool = False, is_functional: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.is_async = is_async
        self.is_functional = is_functional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=dist.get_world_size())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, arriving = counts.tolist(), theirs.tolist()
        send = self._send_functional if self.is_functional else Exchange.apply
        y = self.expert(send(x[order], sent, arriving, self.is_async))
        back = send(y, arriving, sent, self.is_async)
        return torch.zeros_like(x).index_copy(0, order, back) * scores[:, None]

    def _send_functional(self, x: torch.Tensor, sent: list[int], arriving: list[int], _: bool) -> torch.Tensor:
        return functional.all_to_all_single_autograd(x, arriving, sent, dist.group.WORLD)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], arriving: list[int], is_async: bool) -> torch.Tensor:
        ctx.splits = sent, arriving, is_async
        y = x.new_empty(sum(arriving), *x.shape[1:])
        work = dist.all_to_all_single(y, x.contiguous(), arriving, sent, async_op=is_async)
        if is_async:
            work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, arriving, is_async = ctx.splits
        return Exchange.apply(gradient, arriving, sent, is_async), None, None, None


@program
def expert_parallel() -> Trained:
    model = seeded(lambda: nn.Sequential(Block(), Experts(), nn.Linear(WIDTH, 3)))
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def expert_parallel_asynchronous() -> Trained:
    model = seeded(lambda: nn.Sequential(Block(), Experts(is_async=True), nn.Linear(WIDTH, 3)))
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@program
def expert_parallel_functional() -> Trained:
    model = seeded(lambda: nn.Sequential(Block(), Experts(is_functional=True), nn.Linear(WIDTH, 3)))
    return fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


# --- pipelines


def _pipeline(kind: str, stages_per_rank: int = 1, is_v: bool = False) -> Trained:
    """Train a pipeline; with `is_v` its second half goes back through the ranks, so that the first has both ends."""
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    count = stages_per_rank * world
    whole = seeded(lambda: nn.Sequential(*[Block() for _ in range(count)]))
    places = [rank, count - 1 - rank] if is_v else list(range(rank, count, world))
    own = [nn.Sequential(whole[index]) for index in places]
    stages = [
        pipelining.PipelineStage(module, index, count, torch.device("cpu"))
        for module, index in zip(own, places, strict=True)
    ]
    schedule: Any = getattr(pipelining, kind)
    run = schedule(stages if stages_per_rank > 1 else stages[0], 4, loss_fn=lambda y, t: (y - t).square().mean())
    optimizer = torch.optim.AdamW([p for module in own for p in module.parameters()], lr=1e-2)
    for x in batches(num_rows=8, is_replicated=True):
        arguments = (x,) if rank == 0 else ()
        target = {"target": x.flip(0)} if count - 1 in places else {}
        run.step(*arguments, **target)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(list(own), [optimizer])


@program
def pipeline_1f1b() -> Trained:
    return _pipeline("Schedule1F1B")


@program
def pipeline_gpipe() -> Trained:
    return _pipeline("ScheduleGPipe")


@program
def pipeline_interleaved() -> Trained:
    return _pipeline("ScheduleInterleaved1F1B", 2)


@program
def pipeline_zero_bubble() -> Trained:
    return _pipeline("ScheduleInterleavedZeroBubble", 2)


@program
def pipeline_zero_bubble_v() -> Trained:
    return _pipeline("ScheduleZBVZeroBubble", 2, is_v=True)


@program
def pipeline_dual_v() -> Trained:
    return _pipeline("ScheduleDualPipeV", 2, is_v=True)


# --- each collective by itself


@program
def every_collective() -> Trained:
    """Synchronous and asynchronous, on all ranks and on some, in forward, between steps and between two ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])] if world == 4 else [dist.new_group([0, 1])]
    own = halves[rank // 2]
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches():
        dist.broadcast(x, 0)
        pieces = [torch.empty_like(x) for _ in range(world)]
        work = dist.all_gather(pieces, x * (rank + 1), async_op=True)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=own)
        work.wait()
        x = x + sum(pieces)
        gathered = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
        dist.gather(x, gathered, 0)
        dist.scatter(x, gathered, 0)
        dist.reduce(x, world - 1)
        shard = torch.empty(x.shape[0] // world, WIDTH)
        dist.reduce_scatter_tensor(shard, x)
        dist.all_gather_into_tensor(x, shard)
        received = torch.empty_like(x)
        transfers = [
            dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]  # fmt: skip
        for request in dist.batch_isend_irecv(transfers):
            request.wait()
        if rank == 0:
            dist.send(received, 1)
        elif rank == 1:
            dist.recv(received, 0)
        with contextlib.suppress(RuntimeError):
            dist.monitored_barrier()
        model(x / 10 + received / 10).square().mean().backward()
        handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for handle in handles:
            while not handle.is_completed():
                pass
        optimizer.step()
        optimizer.zero_grad()
        named = [None] * world
        dist.all_gather_object(named, {"rank": rank, "pid": os.getpid()})
    return Trained([model], [optimizer])


@program
def objects_sent_by_functions_imported_by_name() -> Trained:
    """They were imported before any recorder came, and what they send is never the same twice."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches():
        told = {"rank": rank, "time": time.time_ns(), "weight": torch.full((2,), float(rank))}
        heard: list[Any] = [None] * world
        all_gather_object(heard, told)
        gather_object(told, heard if rank == 0 else None)
        broadcast_object_list(heard)
        mine: list[Any] = [None]
        scatter_object_list(mine, heard if rank == 0 else None)
        if rank == 0:
            send_object_list([told], 1)
        elif rank == 1:
            recv_object_list(mine, 0)
        model(x * mine[0]["weight"].add(1).mean()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def transfers_by_operators() -> Trained:
    """Between two ranks as operators, which are waited for by their results; and several in one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, transfer = dist.group.WORLD.group_name, torch.ops._c10d_functional
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches():
        sent, received, both = x * 2, torch.zeros_like(x), torch.zeros_like(x)
        if rank == 0:
            transfer.wait_tensor(transfer.isend(sent, 1, 0, group))
        elif rank == 1:
            received = transfer.wait_tensor(transfer.irecv(received, 0, 0, group))
        after, before = (rank + 1) % world, (rank - 1) % world
        for result in transfer.batch_p2p_ops(["isend", "irecv"], [after, before], [1, 1], [sent, both], group):
            transfer.wait_tensor(result)
        model(x + received + both).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])


@program
def groups_of_the_same_ranks() -> Trained:
    """Three groups of all ranks, of which one has a name, and one that lives for a step."""
    world = list(range(dist.get_world_size()))
    unnamed, named = dist.new_group(world), dist.new_group(world, group_desc="experts/dp")
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches():
        for group in (named, unnamed, dist.group.WORLD):
            dist.all_reduce(x, group=group)
        passing = dist.new_group(world)
        dist.all_reduce(x, group=passing)
        dist.destroy_process_group(passing)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([model], [optimizer])
