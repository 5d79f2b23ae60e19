"""Three gloo processes train with DistributedDataParallel, and once more from the middle on: python -m ... FOLDER.

Leaves in FOLDER, for each way of building the wrapper, the run `NAME/whole` of steps 0 to 3 and the run
`NAME/resumed` of steps 2 and 3.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import bitcheck
from bitcheck.reference_runs.ranks import end_process_group
from tests.hooks.parallel_programs import WIDTH, Net, seeded

NUM_RANKS, STEPS, RESUMED_AT = 3, 4, 2
WAYS = ("plain", "own_hook", "unused", "warmed")


def _average(state: Any, bucket: Any) -> Any:
    future = dist.all_reduce(bucket.buffer().div_(NUM_RANKS), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


_average.__annotations__.clear()  # PyTorch wants classes there, not their names


def build(way: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a wrapped model and its optimizer."""
    model = DistributedDataParallel(seeded(Net), bucket_cap_mb=0.001, find_unused_parameters=way == "unused")
    if way == "own_hook":
        model.register_comm_hook(None, _average)
    if way == "warmed":  # in both runs, before the state is loaded
        model(torch.ones(2, WIDTH)).sum().backward()
        model.zero_grad()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int, rec: Any) -> dict[str, Any]:
    """Train from step `first` on; return the state before step RESUMED_AT."""
    saved: dict[str, Any] = {}
    for step in range(first, STEPS):
        if step == RESUMED_AT:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved = torch.load(_in_memory(saved))
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rec.step()
    return saved


def _in_memory(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    for way in WAYS:
        model, optimizer = build(way)
        dist.barrier()
        with bitcheck.record(folder / way / "whole", model, optimizer, strict=True) as rec:
            saved = train(model, optimizer, 0, rec)
        model, optimizer = build(way)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dist.barrier()
        with bitcheck.record(folder / way / "resumed", model, optimizer, start_step=RESUMED_AT, strict=True) as rec:
            train(model, optimizer, RESUMED_AT, rec)
    dist.barrier()
    end_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (Path(sys.argv[1]),), NUM_RANKS)
