"""Faults planted on one rank of four: does the answer name the rank, and its side of the collective?

    python benchmarks/rank_faults.py

Small programs train on four gloo processes: data parallel, FSDP, tensor, expert and pipeline parallel. In
the second step the lowest bit of one element changes on one rank, below the recorder: of what a module
gives, of a gradient inside backward, of what a collective gave or is given, of a batch, of a parameter
after the optimizer's step. The answer is right where its origins are on that rank, in that phase and at
that site, and nothing else is called one. A twin is the same program with the same code counting and
changing nothing: it has to be identical.

Long because the faults, what plants them and what judges them belong together.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level, StepRecord
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStore
from bitcheck.reference_runs.ranks import end_process_group

PROGRAMS = "tests.hooks.parallel_programs"
"""The module that has the programs."""
NUM_RANKS = 4
FAULTY_STEP = 1
EARLIER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Methods of `ProcessGroup` and what they are called in an earlier PyTorch."""


@dataclass(frozen=True)
class Fault:
    """One bit on one rank, and what the answer has to say of it."""

    program: str
    rank: int
    kind: str
    """`output`, `gradient`, `batch`: of the module `at`. `result`, `contribution`: of the collective `at`.
    `leaf`: the gradient of the parameter `at`. `parameter`: the optimizer's first."""
    at: str
    call: int
    """So many such calls of the step come before it."""
    cause: str
    site: str
    """Part of the one site that is to be named."""
    also_rank: int = -1
    """A second rank with the same fault, independent of the first."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that are to be named."""
        return sorted({self.rank, self.also_rank} - {-1})


FAULTS = (
    Fault("ddp", 3, "output", "blocks.0.up", 0, "forward", "forward/blocks.0.up:out"),
    Fault("ddp", 1, "gradient", "blocks.1.norm", 0, "backward", "backward/blocks.1.up:grad_in.0"),
    Fault("ddp", 2, "leaf", "head.weight", 0, "backward", "backward/head.weight:grad"),
    Fault("ddp", 1, "batch", "", 0, "data", "batch/Net:in.0"),
    Fault("ddp", 1, "output", "blocks.1.down", 0, "forward", "forward/blocks.1.down:out", also_rank=3),
    Fault("ddp_with_a_hook_of_its_own", 3, "result", "allreduce", 1, "collective", "comm/all_reduce.sum.world.bucket"),
    Fault("averaged_by_hand", 2, "result", "allreduce", 4, "collective", "comm/all_reduce.sum.world:out.0#4"),
    Fault("averaged_by_hand", 3, "output", "blocks.1.norm", 0, "forward", "forward/blocks.1.norm:out"),
    Fault("averaged_by_hand", 0, "contribution", "allreduce", 2, "compute", "comm/all_reduce.sum.world:in.0#2"),
    Fault("fsdp", 3, "output", "blocks.1.down", 0, "forward", "forward/blocks.1.down:out"),
    Fault("fsdp", 2, "gradient", "blocks.0.norm", 0, "backward", "backward/blocks.0.up:grad_in.0"),
    Fault("fsdp", 1, "result", "all_gather_single", 1, "collective", "comm/all_gather_into_tensor.world:out.0#1"),
    Fault("fsdp", 2, "result", "reduce_scatter_single", 1, "collective",
          "comm/reduce_scatter_tensor.avg.world:out.0#1"),
    Fault("fsdp", 3, "parameter", "", 0, "optimizer", "param/"),
    Fault("tensor_parallel", 3, "output", "blocks.0.up", 0, "forward", "forward/blocks.0.up:out"),
    Fault("tensor_parallel", 1, "result", "wait_tensor", 1, "collective", "comm/all_reduce.sum.world:out.0#1"),
    Fault("tensor_parallel", 2, "gradient", "blocks.1.up", 0, "backward", "backward/blocks.1:grad.up.out"),
    Fault("fsdp_and_tensor_parallel", 2, "output", "blocks.1.up", 0, "forward", "forward/blocks.1.up:out"),
    Fault("expert_parallel", 2, "output", "1.expert", 0, "forward", "forward/1.expert:out"),
    Fault("expert_parallel", 3, "result", "all_to_all_single", 1, "collective", "comm/all_to_all_single.world:out.0#1"),
    Fault("expert_parallel_asynchronous", 1, "contribution", "all_to_all_single", 2, "compute",
          "comm/all_to_all_single.world:in.0#2"),
    Fault("expert_parallel_functional", 3, "result", "wait_tensor", 2, "collective",
          "comm/all_to_all_single.world:out.0#3"),
    Fault("pipeline_1f1b", 1, "output", "stage.1.0.up", 2, "forward", "forward/stage.1.0.up:out#2"),
    Fault("pipeline_1f1b", 3, "gradient", "stage.3.0.norm", 1, "backward", "backward/stage.3.0.up:grad_in.0#1"),
    Fault("pipeline_1f1b", 2, "result", "recv", 1, "collective", "comm/send.1-2:out.0#1"),
    Fault("every_collective", 2, "result", "broadcast", 0, "collective", "comm/broadcast.world:out.0"),
    Fault("every_collective", 3, "result", "reduce_scatter_single", 0, "collective",
          "comm/reduce_scatter_tensor.sum.world"),
    Fault("every_collective", 0, "result", "gather", 0, "collective", "comm/gather.world:out."),
)  # fmt: skip
"""The faults: rank x phase x kind of collective."""


class Injector:
    """Changes one bit below the recorder; unarmed it only counts."""

    def __init__(self, fault: Fault | None, is_armed: bool, recorder: Recorder) -> None:
        self._fault, self._recorder = fault, recorder
        self._is_here = fault is not None and dist.get_rank() in fault.ranks
        self._is_armed = is_armed
        self._calls: Counter[int] = Counter()
        self._undo: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []
        self._pending: dict[int, Any] = {}
        self._library: Any = None
        self.num_planted = 0

    def _is_now(self) -> bool:
        """Count a call of the right kind; whether it is the one."""
        step = self._recorder.current.step + (self._recorder._stepped and self._fault.kind != "parameter")  # type: ignore[union-attr]
        self._calls[step] += 1
        return step == FAULTY_STEP and self._calls[step] - 1 == self._fault.call  # type: ignore[union-attr]

    def _flip(self, tensor: torch.Tensor) -> None:
        if self._is_armed:
            flip(tensor.detach())
            self.num_planted += 1

    def _patch(self, holder: Any, name: str, wrapper: Any) -> None:
        self._undo.append((holder, name, getattr(holder, name)))
        setattr(holder, name, wrapper)

    def begin(self) -> None:
        """Put in what lies below the recorder; to be called before it attaches."""
        if not self._is_here or self._fault is None:
            return
        kind, at = self._fault.kind, self._fault.at
        if kind in ("output", "gradient", "batch", "leaf"):
            self._patch(nn.Module, "__call__", self._module_call(nn.Module.__call__))
        elif kind == "parameter":
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
        elif kind == "result" and at == "wait_tensor":
            self._patch_wait_tensor()
        elif kind == "result":
            group = torch._C._distributed_c10d.ProcessGroup
            work = torch._C._distributed_c10d.Work
            method = self._method(at)
            self._patch(group, method, self._collective(getattr(group, method)))
            self._patch(work, "wait", self._wait(work.wait))
            self._patch(work, "get_future", self._get_future(work.get_future))

    def begin_above(self) -> None:
        """Put in what lies above the recorder: it changes what a collective is given."""
        if self._is_here and self._fault is not None and self._fault.kind == "contribution":
            group = torch._C._distributed_c10d.ProcessGroup
            method = self._method(self._fault.at)
            self._patch(group, method, self._contribution(getattr(group, method)))

    def end(self) -> None:
        """Take everything out again."""
        for holder, name, original in reversed(self._undo):
            setattr(holder, name, original)
        for handle in self._handles:
            handle.remove()
        if self._library is not None:
            self._library._destroy()

    def _method(self, name: str) -> str:
        return name if hasattr(torch._C._distributed_c10d.ProcessGroup, name) else EARLIER_NAMES[name]

    def _module_call(self, original: Any) -> Any:
        fault = self._fault
        assert fault is not None

        @functools.wraps(original)
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self._recorder.registry.name_of(module)
            owner = fault.at.rpartition(".")[0] if fault.kind == "leaf" else fault.at
            is_it = name is not None and name.path == owner and not name.is_wrapper and torch.is_grad_enabled()
            is_it = is_it and self._is_now()
            if is_it and fault.kind == "leaf":
                parameter = getattr(module, fault.at.rpartition(".")[2])
                self._handles.append(parameter.register_hook(self._changed))
            result = original(module, *args, **kwargs)
            if is_it and fault.kind == "output":
                self._flip(result)
            elif is_it and fault.kind == "gradient":
                result.register_hook(self._changed)
            return result

        if fault.kind == "batch":

            @functools.wraps(original)
            def called_with_another_batch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if type(module).__name__ == "DistributedDataParallel" and self._is_now():
                    self._flip(args[0])
                return original(module, *args, **kwargs)

            return called_with_another_batch
        return __call__

    def _changed(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.num_planted or not self._is_armed:  # a parameter's hook stays
            return gradient
        other = gradient.clone()
        self._flip(other)
        return other

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_now():
            parameter: Any = optimizer.param_groups[0]["params"][0]
            self._flip(getattr(parameter, "_local_tensor", parameter))

    def _collective(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(own: Any, *args: Any, **kwargs: Any) -> Any:
            is_it = self._is_now()
            result = original(own, *args, **kwargs)
            if is_it:
                received = args[0]
                while isinstance(received, (list, tuple)):
                    received = received[-1]
                self._pending[id(result)] = (result, received)
            return result

        return run

    def _settle(self, work: Any) -> None:
        held = self._pending.pop(id(work), None)
        if held is not None:
            self._flip(held[1])

    def _wait(self, original: Any) -> Any:
        @functools.wraps(original)
        def wait(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(own, *args, **kwargs)
            self._settle(own)
            return result

        return wait

    def _get_future(self, original: Any) -> Any:
        @functools.wraps(original)
        def get_future(own: Any) -> Any:
            future = original(own)
            if id(own) in self._pending:
                future.add_done_callback(lambda _: self._settle(own))
            return future

        return get_future

    def _patch_wait_tensor(self) -> None:
        # Where the recorder calls PyTorch's own kernel: see hooks/functional_collectives.py.
        key = "PrivateUse3"
        kernel = torch.library.get_kernel("_c10d_functional::wait_tensor", key)
        self._library = torch.library.Library("_c10d_functional", "IMPL")

        def wait(keys: Any, tensor: torch.Tensor) -> Any:
            result = kernel.call_boxed(keys, tensor)
            if self._is_now():
                self._flip(tensor)
            return result

        self._library.impl("wait_tensor", wait, key, with_keyset=True)

    def _contribution(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(own: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_now():
                given = args[0][0] if self._fault is not None and self._fault.at == "allreduce" else args[1]
                self._flip(given)
            return original(own, *args, **kwargs)

        return run


def flip(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the middle element of a tensor that lies in one piece."""
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    flat[(tensor.storage_offset() + tensor.numel() // 2) * tensor.element_size()] ^= 1


def record(program: str, fault: Fault | None = None, is_armed: bool = False) -> tuple[list[StepRecord], int]:
    """Train on this rank; return what was recorded, and how many bits were changed."""
    torch.manual_seed(7)
    memory = MemoryStore()
    recorder = Recorder(lambda: memory, level=Level.MODULE, is_strict=True)
    injector = Injector(fault, is_armed, recorder)
    injector.begin()
    try:
        recorder.start()
        injector.begin_above()
        try:
            importlib.import_module(PROGRAMS).PROGRAMS[program]()
        finally:
            recorder.stop()
    finally:
        injector.end()
    return memory.records, injector.num_planted


def work(rank: int, folder: Path, numbers: list[int]) -> None:
    """One rank of the job: every program without a fault, each fault, each twin."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    clean: dict[str, Any] = {}
    for number in numbers:
        fault = FAULTS[number]
        if fault.program not in clean:
            clean[fault.program] = record(fault.program)
            (folder / f"{fault.program}.{rank}").write_bytes(pickle.dumps(clean[fault.program]))
        for name, is_armed in (("fault", True), ("twin", False)):
            dist.barrier()
            (folder / f"{number}.{name}.{rank}").write_bytes(pickle.dumps(record(fault.program, fault, is_armed)))
    dist.barrier()
    end_process_group()


def load(folder: Path, name: str) -> tuple[MemoryRun, int]:
    """Return a run of all ranks, and how many bits were changed in it."""
    found = [pickle.loads((folder / f"{name}.{rank}").read_bytes()) for rank in range(NUM_RANKS)]
    steps = {rank: records for rank, (records, _) in enumerate(found)}
    run = MemoryRun(steps, level=Level.MODULE, status="complete", environment={}, info={"digest_version": 1})
    return run, sum(count for _, count in found)


def judge(fault: Fault, answer: Answer) -> str:
    """Return `right`, or what is wrong with the answer."""
    if not answer.origins:
        return "missed: no origin"
    named = sorted({rank for origin in answer.origins for rank in origin.ranks or (origin.rank,)})
    sites = [origin.site for origin in answer.origins]
    if any(fault.site not in site for site in sites):
        return f"another origin: {', '.join(sites[:3])} on {named}"
    if named != fault.ranks:
        return f"another rank: {named}"
    if answer.cause != fault.cause:
        return f"another cause: {answer.cause}"
    if answer.origins[0].step != FAULTY_STEP:
        return f"another step: {answer.origins[0].step}"
    return "right"


def run_faults(folder: Path, numbers: list[int]) -> list[dict[str, Any]]:
    """Plant the faults of these numbers; return a row for each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.rank_faults", "--work", str(folder), *map(str, numbers)]
    root = Path(__file__).resolve().parent.parent
    subprocess.run(command, check=True, env=environment, cwd=root, timeout=120 + 30 * len(numbers))
    rows = []
    for number in numbers:
        fault = FAULTS[number]
        baseline, _ = load(folder, fault.program)
        candidate, num_planted = load(folder, f"{number}.fault")
        verdict = judge(fault, diff_runs(baseline, candidate))
        if num_planted != len(fault.ranks):
            verdict = f"{num_planted} bits were changed"
        twin = diff_runs(baseline, load(folder, f"{number}.twin")[0]).verdict
        rows.append(asdict(fault) | {"verdict": verdict, "twin": str(twin)})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Plant every fault, print a table; exit status 1 where one was not right."""
    parser = argparse.ArgumentParser(description="Faults planted on one rank of four: is the rank named?")
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--only", default="", help="faults of programs whose name has this in it")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("numbers", nargs="*", type=int, help="numbers of the faults; all without")
    options = parser.parse_args(arguments)
    chosen = [number for number, fault in enumerate(FAULTS) if options.only in fault.program]
    numbers = options.numbers or chosen
    if options.work is not None:
        processes: Any = torch.multiprocessing
        processes.spawn(work, (options.work, numbers), NUM_RANKS)
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_faults(Path(folder), numbers)
    for number, row in zip(numbers, rows, strict=True):
        ranks = FAULTS[number].ranks
        print(f"{number:2}  {row['program']:28} {row['cause']:10} rank {ranks!s:7} {row['verdict']:8}  {row['twin']}")
    right = sum(row["verdict"] == "right" for row in rows)
    twins = sum(row["twin"] == "identical" for row in rows)
    seconds = time.monotonic() - begin
    print(f"{len(rows)} faults: {right} right; {twins} of {len(rows)} twins identical; {seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if right == twins == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
