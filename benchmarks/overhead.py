"""What recording costs a training step on the CPU: bare, `state`, `module`, `op`, and the peers, interleaved.

    python -m benchmarks.overhead --config tiny --rounds 8

Every round times a few steps in a row of each variant on its own copy of the reference trainer, in an order that
rotates, so that whatever else the machine does falls on all alike; a recorded variant's last step counts until it is on
the disk. A variant's ratio is the median over the rounds of (its steps / the bare steps of the same round). The
peers are what else a PyTorch user has:

    DebugMode   torch.utils._debug_mode.DebugMode with the hash of every tensor of every operation; one step each
    naive       copy every gradient, parameter and optimizer tensor to bytes and hash each with sha256
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.utils._debug_mode import DebugMode

import bitcheck
from bitcheck.errors import BitcheckError
from bitcheck.events import Level
from bitcheck.hooks.recorder import Recorder
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import read_text
from bitcheck.reference_runs.train import Options, Trainer
from bitcheck.store import RankWriter


class Variant:
    """One way of running a step; this one runs it bare."""

    def __init__(self, config: str) -> None:
        self.trainer = Trainer(get_config(config), read_text(None), Options(steps=sys.maxsize))

    def step(self) -> None:
        """Run one training step."""
        self.trainer.train_step()

    def finish(self) -> None:
        """Wait for what a step left to be done."""

    def time_steps(self, count: int) -> float:
        """Run training steps in a row and return how long one took, in seconds."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        self.finish()
        return (time.perf_counter() - began) / count


class Recorded(Variant):
    """A step under bitcheck's recorder, which is attached for this variant's turns only."""

    def __init__(self, config: str, level: Level, folder: Path) -> None:
        super().__init__(config)

        def open_store() -> RankWriter:
            return RankWriter(
                folder / f"{level}.h5", rank=0, world_size=1, level=level, run_id="overhead", leaf_limit_bytes=2**20
            )

        self.recorder = Recorder(open_store, level=level, on_trouble=_give_up)
        self.recorder.optimizers.add(self.trainer.optimizer)
        self.recorder.add_root(self.trainer.model)
        self.recorder.track("ema", self.trainer.ema.tensors)

    def step(self) -> None:
        self.trainer.train_step()
        self.recorder.step()

    def finish(self) -> None:
        self.recorder.drain()

    def time_steps(self, count: int) -> float:
        self.recorder.attach()
        try:
            return super().time_steps(count)
        finally:
            self.recorder.detach()


class UnderDebugMode(Variant):
    """A step under PyTorch's DebugMode, hashing every tensor of every operation."""

    def __init__(self, config: str, kind: str) -> None:
        super().__init__(config)
        self.kind = kind

    def step(self) -> None:
        hashes: AbstractContextManager[None] = DebugMode.log_tensor_hashes(self.kind, hash_inputs=True)
        with DebugMode(), hashes:
            self.trainer.train_step()


class Naive(Variant):
    """A bare step, then everything that level `state` covers copied and hashed, as one does by hand."""

    def step(self) -> None:
        trainer = self.trainer
        trainer.train_step()
        parameters = list(trainer.model.parameters())
        tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None), *trainer.ema.tensors().values()]
        for state in trainer.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        for tensor in tensors:
            hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()


def _give_up(error: BitcheckError) -> None:
    raise error


PEER_ROUNDS = 1
"""Rounds in which the peers take part: DebugMode needs minutes for a step."""


def measure(config: str, rounds: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of each variant's steps, a warm-up round left out: [rounds] each, of a peer [PEER_ROUNDS]."""
    variants: dict[str, Variant] = {"bare": Variant(config)}
    variants |= {str(level): Recorded(config, level, folder) for level in Level}
    peers: dict[str, Variant] = {"naive sha256": Naive(config)}
    peers["DebugMode hash_tensor"] = UnderDebugMode(config, "hash_tensor")  # its other hash, `norm`, is far slower
    seconds: dict[str, list[float]] = {name: [] for name in (*variants, *peers)}
    for number in range(rounds + 1):
        names = [*variants, *peers] if 1 <= number <= PEER_ROUNDS else list(variants)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            took = (variants | peers)[name].time_steps(1 if name in peers else steps)
            if number >= 1:
                seconds[name].append(took)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def measure_memory(config: str, steps: int) -> dict[str, float]:
    """Return the peak resident memory of a process that trains bare and recorded, MiB."""
    program = (
        "import sys; from pathlib import Path; from bitcheck.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('peak', Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)"
    )  # not getrusage: what it gives starts at the peak of the process that forked this one
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("bare", *Level):
            command = [sys.executable, "-c", program, "reference", "train", "--config", config, "--steps", str(steps)]
            if name != "bare":
                command += ["--record", f"{scratch}/{name}", "--level", name]
            ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=scratch)
            found[str(name)] = int(ended.stderr.rpartition("peak")[2]) / 1024
    return found


def main() -> None:
    """Measure and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps in a row")
    parser.add_argument("--memory-steps", type=int, default=4, help="0 leaves the memory out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        seconds = measure(options.config, options.rounds, options.steps, Path(scratch))
    memory = measure_memory(options.config, options.memory_steps) if options.memory_steps else {}
    print(
        f"`python -m benchmarks.overhead --config {options.config} --rounds {options.rounds} --steps {options.steps}`"
    )
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, "
        f"torch {torch.__version__}, Python {platform.python_version()}, bitcheck {bitcheck.__version__}\n"
    )
    print("| variant | median step, ms | ratio to bare | quartiles of the ratio | peak memory over bare, MiB |")
    print("|---|---|---|---|---|")
    for name, values in seconds.items():
        ratios = [value / bare for value, bare in zip(values, seconds["bare"], strict=False)]
        more = f"{memory[name] - memory['bare']:.0f}" if name in memory else ""
        spread = "one step"
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4)
            spread = f"{low:.3f} to {high:.3f}"
        middle = statistics.median(ratios)
        print(f"| {name} | {statistics.median(values) * 1e3:.1f} | {middle:.3f} | {spread} | {more} |")


if __name__ == "__main__":
    main()
