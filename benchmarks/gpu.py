"""What recording costs a training step on a GPU: bare, each level, and the peers, interleaved in one run.

    python -m benchmarks.gpu --out benchmarks/results/gpu_overhead_h200_DATE.md

The model is a GPT of 936 M parameters in bfloat16 (16 layers, width 2048, 16 heads, sequence 2048,
batch 4, vocabulary 32,000) under fused AdamW: 8,192 tokens a step, 65,536 with accumulation. A block
is a few steps in a row with one wait for the device at each end; blocks of all variants take turns, in an order that
rotates, each after a few bare steps: a GPU's clock follows what it did just before, and after a variant that left it
waiting for the host it runs faster. A ratio is the median over the rounds of a variant's block to the bare block of the
same round.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._debug_mode import DebugMode

import bitcheck
from bitcheck.errors import BitcheckError
from bitcheck.events import Level, StepKind
from bitcheck.hooks.recorder import Recorder
from bitcheck.store import RankReader, RankWriter


class Attention(nn.Module):
    """Causal self-attention, bfloat16 [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed_BTD: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return mixed_BTD


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
        y_BTD: torch.Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class GPT(nn.Module):
    """Decoder with learned positions and an untied head; returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


class Job:
    """The training that is measured; every variant trains it on."""

    def __init__(
        self,
        layers: int = 16,
        batch: int = 4,
        length: int = 2048,
        *,
        width: int = 2048,
        vocabulary: int = 32_000,
        device: str | torch.device = "cuda",
        data_seed: int = 0,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = wrap(GPT(layers, width, 16, length, vocabulary).to(torch.bfloat16))
            torch.manual_seed(data_seed)
            self.data = torch.randint(0, vocabulary, (8, batch, length + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, micro_batches: int = 1) -> None:
        """Run one optimizer step over `micro_batches` batches."""
        for index in range(micro_batches):
            rows = self.data[index]
            (self.model(rows[:, :-1], rows[:, 1:]) / micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[torch.Tensor]:
        """Return everything that level `state` covers."""
        parameters = list(self.model.parameters())
        moments = [value for state in self.optimizer.state.values() for value in state.values() if value.is_cuda]
        return [*parameters, *(p.grad for p in parameters if p.grad is not None), *moments]


class RecordedJob:
    """The job under a recorder of one level, attached for this variant's blocks only."""

    def __init__(self, job: Job, level: Level, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.job, self.path = job, folder / f"{level}-{rank}.h5"
        self.recorder = Recorder(
            lambda: RankWriter(
                self.path, rank=rank, world_size=world_size, level=level, run_id="gpu", leaf_limit_bytes=2**20
            ),
            level=level,
            on_trouble=_give_up,
        )  # fmt: skip
        self.recorder.optimizers.add(job.optimizer)
        self.recorder.add_root(job.model)

    def block(self, steps: int, micro_batches: int) -> None:
        """Run a few recorded steps."""
        self.recorder.attach()
        try:
            for _ in range(steps):
                self.job.step(micro_batches)
                self.recorder.step()
        finally:
            self.recorder.detach()

    def bytes_a_step(self) -> tuple[int, int]:
        """Return (events, bytes) of the last whole step that was recorded."""
        with RankReader(self.path) as reader:
            table = reader.table
            last = table[table["kind"] == int(StepKind.STEP)][-1]
            return int(last["num_events"]), int(last["num_bytes"])


def _give_up(error: BitcheckError) -> None:
    raise error


def naive_block(job: Job, steps: int, micro_batches: int) -> None:
    """Copy everything to the host and hash it there."""
    for _ in range(steps):
        job.step(micro_batches)
        for tensor in job.state():
            hashlib.md5(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


def debug_block(job: Job, steps: int, micro_batches: int, kind: str) -> None:
    """PyTorch's DebugMode, hashing what every operation reads and writes."""
    for _ in range(steps):
        with DebugMode(), DebugMode.log_tensor_hashes(kind, hash_inputs=True):
            job.step(micro_batches)


def wait_for_device() -> None:
    """Wait for what was given to a GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], None]) -> float:
    """Return the seconds that `run` takes, the device's work included."""
    wait_for_device()
    began = time.perf_counter()
    run()
    wait_for_device()
    return time.perf_counter() - began


def copy_bandwidth() -> float:
    """Return what a device-to-device copy moves, bytes read and written a second."""
    import triton

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    took = float(triton.testing.do_bench(lambda: target.copy_(source), return_mode="median"))
    return 2 * source.numel() / (took * 1e-3)


WARM_STEPS = 3
"""Bare steps before each block."""


class Measured:
    """The blocks of all variants at one number of tokens a step."""

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.seconds: dict[str, list[float]] = {}
        """Seconds a step, one entry a round."""
        self.peak: dict[str, int] = {}
        """Peak allocated memory, bytes."""

    def run(self, name: str, block: Callable[[int, int], None], steps: int, is_warm: bool) -> None:
        """Time one block of `steps` steps; the first round only warms up."""
        torch.cuda.reset_peak_memory_stats()
        took = timed(lambda: block(steps, self.micro_batches)) / steps
        if is_warm:
            self.seconds.setdefault(name, []).append(took)
        self.peak[name] = max(self.peak.get(name, 0), torch.cuda.max_memory_allocated())

    def ratios(self, name: str) -> list[float]:
        """Return, for each round, a variant's step to the bare step of the same round."""
        return [value / bare for value, bare in zip(self.seconds[name], self.seconds["bare"], strict=False)]


def measure(
    job: Job, recorded: dict[Level, RecordedJob], rounds: int, steps: int, micro_batches: int, with_peers: bool
) -> Measured:
    """Interleave the bare job, its recorded levels and, at one micro-batch, the peers."""
    found = Measured(micro_batches)

    def bare(steps: int, micro_batches: int) -> None:
        for _ in range(steps):
            job.step(micro_batches)

    blocks: dict[str, Callable[[int, int], None]] = {"bare": bare}
    blocks |= {str(level): recorded[level].block for level in recorded if micro_batches == 1 or level is not Level.OP}
    names = list(blocks)
    for number in range(rounds + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            bare(WARM_STEPS, micro_batches)
            found.run(name, blocks[name], steps, number > 0)
    if micro_batches == 1 and with_peers:
        for kind in ("hash_tensor", "norm"):
            found.run(f"DebugMode {kind}", functools.partial(debug_block, job, kind=kind), 1, True)
        found.run("copy to the host, md5", functools.partial(naive_block, job), 1, True)
    return found


def table(found: Measured, recorded: dict[Level, RecordedJob], bandwidth: float) -> list[str]:
    """Return the measurement as lines of Markdown."""
    base = statistics.median(found.seconds["bare"])
    lines = [
        f"\n## {found.micro_batches * 8192:,} tokens a step\n",
        "Floor: 1 + bytes hashed / (copy bandwidth x bare step).\n",
        "| variant | step, ms | ratio to bare | quartiles | events | GB hashed | floor | peak memory over bare, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, values in found.seconds.items():
        hashed = " | | "
        if name in {str(level) for level in recorded}:
            events, num_bytes = recorded[Level(name)].bytes_a_step()
            hashed = f"{events:,} | {num_bytes / 1e9:.2f} | {1 + num_bytes / (bandwidth * base):.3f}"
        memory = (found.peak[name] - found.peak["bare"]) / 2**20
        ratios = found.ratios(name)
        spread = "one step"
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4)
            spread = f"{low:.3f} to {high:.3f}"
        middle = statistics.median(ratios)
        lines.append(
            f"| {name} | {statistics.median(values) * 1e3:.1f} | {middle:.3f} | {spread} | {hashed} | {memory:.0f} |"
        )
    return lines


def main() -> None:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="what else there is")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(options.layers)
        count = sum(p.numel() for p in job.model.parameters())
        bandwidth = copy_bandwidth()
        lines = [
            f"# Recording on {torch.cuda.get_device_name()}: what a step costs\n",
            f"`python -m benchmarks.gpu --rounds {options.rounds} --steps {options.steps} --layers {options.layers}`  ",
            f"torch {torch.__version__}, Triton {importlib.metadata.version('triton')}, "
            f"bitcheck {bitcheck.__version__}; "
            f"{count / 1e6:.0f} M parameters, bfloat16, fused AdamW; device copy {bandwidth / 1e12:.2f} TB/s",
        ]
        recorded = {level: RecordedJob(job, level, Path(scratch)) for level in Level}
        for micro_batches, steps in ((1, options.steps), (8, max(2, options.steps // 2))):
            found = measure(job, recorded, options.rounds, steps, micro_batches, options.peers)
            lines += table(found, recorded, bandwidth)
            print("\n".join(lines), flush=True)
        for one in recorded.values():
            one.recorder.attach()
            one.recorder.stop()
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
