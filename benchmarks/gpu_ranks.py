"""Two ranks and more on GPUs: are DDP and FSDP recorded rightly over NCCL, and what does recording cost them?

    torchrun --nproc-per-node 2 -m benchmarks.gpu_ranks --out benchmarks/results/gpu_ranks_h200_DATE.md

The model is the GPT of `gpu.py` (936 M parameters in bfloat16), each rank with a batch of its own, under
DistributedDataParallel and under `fully_shard`. First its verdicts: with the deterministic recipe two recordings
are identical; with attention's default backward they part, and that backward is named; the copies that DDP keeps
agree, and one bit changed in one rank's parameter is found. Then what a recorded step costs: blocks of steps of
the bare training and of each level take turns in one process group, and a ratio is the median over the rounds of
a block to the bare block of the same round. A verdict that is not what it has to be makes the exit status 1.

With `--device cpu` gloo and a small model stand in, to try the script itself; there a backward that draws from
the system's randomness stands in for attention's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bitcheck
from benchmarks.gpu import Attention, Job, RecordedJob, timed
from bitcheck.diff import diff_runs
from bitcheck.events import Level
from bitcheck.replicas import check_replicas
from bitcheck.run import open_run

LEVELS = (Level.STATE, Level.MODULE)
KINDS = ("ddp", "fsdp")
GOALS = {Level.STATE: 1.04, Level.MODULE: 1.12}
PERTURBED = "blocks.0.mlp.0.weight"
PERTURBED_STEP = 1
PERTURBED_RANK = 1


class Unsteady(torch.autograd.Function):
    """The identity, whose backward changes one element as chance has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient with another first element."""
        changed = gradients[0].clone()
        changed.view(-1)[0] += int.from_bytes(os.urandom(2), "little")
        return changed


class UnsteadyAttention(Attention):
    """Attention on a CPU, made what it is on a GPU by default: another gradient each time."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return what attention returns."""
        out_BTD: torch.Tensor = Unsteady.apply(super().forward(x_BTD))  # type: ignore[no-untyped-call]
        return out_BTD


class Bench:
    """What all parts share: the options, this rank, the lines found so far."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_cpu = options.device == "cpu"
        self.device = torch.device("cpu") if self.is_cpu else torch.device("cuda", torch.cuda.current_device())
        self.lines: list[str] = []
        self.failures = 0
        self.began = time.perf_counter()

    def say(self, *lines: str) -> None:
        """Add lines to the answer; rank 0 prints them, and writes all so far."""
        self.lines += lines
        if self.rank == 0:
            print("\n".join(lines), flush=True)
            if self.options.out is not None:
                self.options.out.write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def progress(self, what: str) -> None:
        """Say on stderr how far it is."""
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.began:6.1f} s] {what}", file=sys.stderr, flush=True)

    def job(self, kind: str, is_unsteady: bool = False) -> Job:
        """Return the training under DDP or FSDP, its parameters the same each time."""
        sizes: dict[str, Any] = {"width": 64, "vocabulary": 128, "length": 32} if self.is_cpu else {}

        def wrap(model: nn.Module) -> nn.Module:
            if is_unsteady and self.is_cpu:
                for module in list(model.modules()):
                    if isinstance(module, Attention):
                        module.__class__ = UnsteadyAttention
            if self.is_cpu:
                model.float()
            if kind == "ddp":
                return DistributedDataParallel(model)
            mesh = init_device_mesh(self.device.type, (self.world_size,))
            blocks: Any = model.blocks
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model

        return Job(
            self.options.layers, self.options.batch, device=self.device, data_seed=1 + self.rank, wrap=wrap, **sizes
        )

    def clean(self) -> None:
        """Let go of the memory of a job that is over."""
        gc.collect()
        if not self.is_cpu:
            torch.cuda.empty_cache()

    # --- verdicts

    def record(
        self, name: str, kind: str, level: Level, *, is_unsteady: bool = False, is_perturbed: bool = False
    ) -> Path:
        """Train a few steps and record them; return the run's folder once every rank has finished."""
        folder = self.scratch / name
        job = self.job(kind, is_unsteady)
        with bitcheck.record(folder, job.model, job.optimizer, level=str(level), strict=True) as rec:
            for step in range(self.options.steps):
                job.step()
                if is_perturbed and step == PERTURBED_STEP and self.rank == PERTURBED_RANK:
                    _flip_a_bit(dict(job.model.named_parameters())[f"module.{PERTURBED}"])
                rec.step()
        del job
        self.clean()
        dist.barrier()
        self.progress(f"recorded {name}")
        return folder

    def judge(self, what: str, must: str, found: Callable[[], tuple[bool, str]]) -> None:
        """Have rank 0 add a line of the table: what was looked at, what has to come out, what did."""
        if self.rank == 0:
            is_right, text = found()
            self.failures += not is_right
            self.say(f"| {what} | {must} | {text} | {'yes' if is_right else '**NO**'} |")
        dist.barrier()

    def verdicts(self, kind: str) -> None:
        """Record a kind of training at each level twice, with and without the deterministic recipe."""
        steps = self.options.steps
        for level in LEVELS:
            with deterministic():
                runs = [self.record(f"{kind}-{level}-{number}", kind, level) for number in range(2)]
            self.judge(
                f"{kind}, level {level}, deterministic recipe, recorded twice",
                "identical",
                functools.partial(_repeats, runs, steps),
            )
            if kind == "ddp":
                self.judge("replicas of the first of them", "agree", functools.partial(_copies_agree, runs[0]))
            for folder in runs:
                self.throw_away(folder)
        runs = [self.record(f"{kind}-default-{number}", kind, Level.MODULE, is_unsteady=True) for number in range(2)]
        self.judge(
            f"{kind}, level module, attention's default backward, recorded twice",
            "diverged, backward of attention",
            lambda: _attention_is_named(runs),
        )
        for folder in runs:
            self.throw_away(folder)
        if kind == "ddp":
            with deterministic():
                run = self.record("ddp-perturbed", kind, Level.STATE, is_perturbed=True)
            self.judge(
                f"replicas, a bit of {PERTURBED} flipped on rank {PERTURBED_RANK} after step {PERTURBED_STEP}",
                f"differ: that parameter, step {PERTURBED_STEP}",
                lambda: _perturbed_is_found(run, self.world_size),
            )
            self.throw_away(run)

    def throw_away(self, folder: Path) -> None:
        """Delete a run that was judged."""
        if self.rank == 0:
            shutil.rmtree(folder)

    # --- cost

    def cost(self, kind: str) -> None:
        """Measure the recorded levels of one kind of training beside the bare one."""
        rounds, steps = self.options.rounds, self.options.block
        job = self.job(kind)
        folder = self.scratch / f"{kind}-cost"
        folder.mkdir(exist_ok=True)
        recorded = {level: RecordedJob(job, level, folder, self.rank, self.world_size) for level in LEVELS}

        def bare() -> None:
            for _ in range(steps):
                job.step()

        blocks: dict[str, Callable[[], None]] = {"bare": bare}
        for level in LEVELS:
            blocks[str(level)] = functools.partial(recorded[level].block, steps, 1)
        seconds: dict[str, list[float]] = {name: [] for name in blocks}
        peaks = dict.fromkeys(blocks, 0)
        for number in range(rounds + 1):
            for name, block in blocks.items():
                dist.barrier()
                if not self.is_cpu:
                    torch.cuda.reset_peak_memory_stats()
                took = timed(block) / steps
                if number > 0:  # the first round warms up
                    seconds[name].append(took)
                if not self.is_cpu:
                    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            self.progress(f"{kind}: round {number} of {rounds}")
        base = seconds["bare"]
        for name, values in seconds.items():
            ratios = sorted(value / other for value, other in zip(values, base, strict=True))
            cells = [kind, name, f"{statistics.median(values) * 1e3:.1f}", f"{statistics.median(ratios):.3f}"]
            cells += [f"{ratios[0]:.3f} to {ratios[-1]:.3f}"]
            if name == "bare":
                cells += ["", "", ""]
            else:
                events, num_bytes = recorded[Level(name)].bytes_a_step()
                cells += [f"{GOALS[Level(name)]:.2f}", f"{events:,}", f"{num_bytes / 1e9:.2f}"]
            cells.append(f"{(peaks[name] - peaks['bare']) / 2**20:.0f}")
            self.say(f"| {' | '.join(cells)} |")
        for one in recorded.values():
            one.recorder.attach()
            one.recorder.stop()
        blocks.clear()


@contextmanager
def deterministic() -> Iterator[None]:
    """Let PyTorch take deterministic kernels."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@torch.no_grad()
def _flip_a_bit(parameter: torch.Tensor) -> None:
    parameter.view(-1)[:1].view(torch.uint8)[0].bitwise_xor_(1)


def _repeats(runs: list[Path], steps: int) -> tuple[bool, str]:
    with open_run(runs[0]) as baseline, open_run(runs[1]) as candidate:
        answer = diff_runs(baseline, candidate)
    if answer.verdict != "identical":
        return False, f"{answer.verdict}: {answer.explanation}"
    compared = answer.compared
    unobserved = "; ".join(f"unobserved: {count} {what}" for what, count in sorted(answer.unobserved.items()))
    return compared.steps == steps, ", ".join(
        filter(
            None, (f"identical: {compared.steps} steps, {compared.ranks} ranks, {compared.events:,} events", unobserved)
        )
    )


def _attention_is_named(runs: list[Path]) -> tuple[bool, str]:
    with open_run(runs[0]) as baseline, open_run(runs[1]) as candidate:
        answer = diff_runs(baseline, candidate)
    named = sorted({f"{origin.site} ({origin.op}, ranks {origin.ranks or origin.rank})" for origin in answer.origins})
    is_right = (
        (answer.verdict, answer.cause) == ("diverged", "backward")
        and bool(answer.origins)
        and all((origin.module or "").endswith(".attn") for origin in answer.origins)
    )
    text = f"{answer.verdict}, {answer.cause}: {'; '.join(named[:6])} ({len(named)} origins)"
    return is_right, text if is_right else f"{text} {answer.explanation}"


def _copies_agree(folder: Path) -> tuple[bool, str]:
    with open_run(folder) as run:
        answer = check_replicas(run)
    covered = "; ".join(f"{group.by}: {len(group.ranks)} ranks" for group in answer.groups)
    return answer.verdict == "agree", f"{answer.verdict} ({covered}) {answer.explanation}"


def _perturbed_is_found(folder: Path, world_size: int) -> tuple[bool, str]:
    with open_run(folder) as run:
        answer = check_replicas(run)
    first = answer.first
    ranks = (0, 1) if world_size == 2 else (PERTURBED_RANK,)  # two ranks: nobody can say which is the odd one
    is_right = (
        answer.verdict == "differ"
        and first is not None
        and (first.step, first.site, first.ranks) == (PERTURBED_STEP, f"param/{PERTURBED}:value", ranks)
    )
    return is_right, f"{answer.verdict}: {answer.explanation}"


def connect(device: str) -> tuple[str, str]:
    """Join the process group that torchrun made; return what the ranks run on, and over what they talk."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return "a CPU", "gloo"
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    return torch.cuda.get_device_name(), f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def run(options: argparse.Namespace) -> int:
    """Do everything; return the exit status."""
    name, backend = connect(options.device)
    shared: list[Any] = [tempfile.mkdtemp(prefix="gpu-ranks-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    bench = Bench(options, Path(shared[0]))
    bench.say(
        f"# Recording {bench.world_size} ranks on {name}\n",
        f"`torchrun --nproc-per-node {bench.world_size} -m benchmarks.gpu_ranks {' '.join(sys.argv[1:])}`  ",
        f"torch {torch.__version__}, {backend}, bitcheck {bitcheck.__version__}; {options.layers} layers, "
        f"batch {options.batch} a rank",
    )
    if "verdicts" in options.parts:
        bench.say("\n## Verdicts\n", "| what | has to be | is | right |", "|---|---|---|---|")
        for kind in options.kinds:
            bench.verdicts(kind)
    if "cost" in options.parts:
        bench.say(
            "\n## What a step costs\n",
            f"Blocks of {options.block} steps, {options.rounds} rounds; rank 0's times.\n",
            "| training | level | step, ms | ratio to bare | lowest to highest | goal | events | GB hashed a rank "
            "| peak memory over bare, MiB |",
            "|---|---|---|---|---|---|---|---|---|",
        )
        for kind in options.kinds:
            bench.cost(kind)
            bench.clean()
    bench.progress("done")
    status = torch.tensor([bench.failures], device=bench.device)
    dist.all_reduce(status)
    if bench.rank == 0:
        shutil.rmtree(bench.scratch, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(status.item()))


def main() -> None:
    """Parse, run, and end at once with a traceback where anything goes wrong on any rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--steps", type=int, default=3, help="steps of a recording that is judged, at least 3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=5, help="steps in a block that is timed")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--parts", nargs="+", choices=("verdicts", "cost"), default=("verdicts", "cost"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        status = run(options)
    except BaseException:  # noqa: BLE001  the other ranks may wait in a collective for ever: this one must not wait for them
        print(f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(2)
    sys.exit(status)


if __name__ == "__main__":
    main()
