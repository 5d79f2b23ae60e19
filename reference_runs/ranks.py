"""The ranks of a parallel run: which groups this process is in, and what is exchanged in them as a matter of course.

    dp     ranks with the same stages, each with micro-batches of its own
    ep     neighbours in dp that share the routed experts
    edp    ranks in dp with the same experts
    pp     ranks with the other stages of the same micro-batches

torch.distributed with gloo on a CPU and NCCL on a GPU, started by torchrun. What is exchanged lies where the
model does; numbers that are counted on the host go by gloo.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bitcheck.reference_runs.configs.degrees import Degrees
from bitcheck.reference_runs.moe import MoE, Router


class Ranks:
    """This process's place among the others; made in every process at once, in an initialised process group."""

    def __init__(self, degrees: Degrees, device: str = "cpu") -> None:
        self.degrees = degrees
        dense = init_device_mesh(device, (degrees.pp, degrees.dp), mesh_dim_names=("pp", "dp"))
        shape = (degrees.pp, degrees.dp // degrees.ep, degrees.ep)
        sparse = init_device_mesh(device, shape, mesh_dim_names=("pp", "edp", "ep"))
        self.rank = dist.get_rank()
        self.dp, self.dp_rank = dense.get_group("dp"), dense.get_local_rank("dp")
        self.pp, self.pp_rank = dense.get_group("pp"), dense.get_local_rank("pp")
        self.ep, self.ep_rank = sparse.get_group("ep"), sparse.get_local_rank("ep")
        self.edp = sparse.get_group("edp")
        self.experts_mesh = sparse["ep"]
        """Over which a tensor of all experts is sharded."""

    def sum_loads(self, routers: Iterable[Router]) -> None:
        """Give each router the loads of all data-parallel ranks. Whole numbers: no order can show."""
        loads = [router.load for router in routers]
        if not loads:
            return
        total = torch.stack(loads)
        dist.all_reduce(total, group=self.dp)
        for load, summed in zip(loads, total, strict=True):
            load.copy_(summed)

    def experts_per_node(self, layers: Iterable[MoE]) -> float:
        """Return on how many experts a token meets at a node it visits, mean of the step on all ranks; starts anew."""
        counts = torch.zeros(2, dtype=torch.int64)
        for moe in layers:
            counts += torch.tensor([moe.num_placed, moe.num_visits])
            moe.num_placed = moe.num_visits = 0
        dist.all_reduce(counts)
        return int(counts[0]) / int(counts[1])

    def gather(self, values: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """Return `values` of every rank of `group`, in rank order; all have one shape and dtype."""
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, values.contiguous(), group=group)
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """Return what every rank of the run gives, in rank order; any pickled value."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


@contextmanager
def process_group(degrees: Degrees, device: str = "cpu") -> Iterator[Ranks | None]:
    """Join the other processes of torchrun for the time of a run; None where there are no others."""
    if degrees.world_size == 1:
        yield None
        return
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield Ranks(degrees, device)
    finally:
        end_process_group()


def end_process_group() -> None:
    """Leave the other processes, after the last collective has let go of what it held.

    A collective that began in a backward holds an object of Python's (PyTorch 2.13: the context that
    `_engine_run_backward` notes), which gloo's thread gives back when the collective has ended, with the interpreter's
    lock. Where the main thread, with that lock, waits for gloo's (`~ProcessGroupGloo`), both wait for ever; where the
    interpreter ends first, the process aborts. The lock is free while this sleeps.
    """
    time.sleep(0.2)
    dist.destroy_process_group()
