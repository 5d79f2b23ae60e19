"""The training loop: wires the model, the optimizer, the average, the loader and the recorder together.

One step, in this order:

    learning rate from the number of updates so far
    for each micro-batch, in order: batch, forward, backward (gradients add up in FP32)
    clip, optimizer step
    derive FP8 weights from the new BF16 ones, move the routers' biases
    start the average's update in its thread
    `rec.step()`: the recorder reads the state; then perhaps a checkpoint

Nothing else carries over from step to step: a process that resumes at a step does what one that never
stopped does, by construction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import bitcheck
from bitcheck.environment import declared
from bitcheck.errors import UsageError
from bitcheck.reference_runs import checkpoint, rng
from bitcheck.reference_runs.checkpoint import CheckpointError, digest_value
from bitcheck.reference_runs.configs import Config
from bitcheck.reference_runs.data import Loader, Text
from bitcheck.reference_runs.ema import EMA
from bitcheck.reference_runs.linear import Precision
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.optimizer import make_optimizer, masters, unscale_and_clip
from bitcheck.reference_runs.schedule import learning_rate
from bitcheck.reference_runs.switches import Switches

EVAL_SEQUENCES = 32
"""Held-out windows that an evaluation reads."""


@dataclass(frozen=True)
class Options:
    """What a run does besides what its configuration says."""

    steps: int
    """Number of the step at which to stop; a resumed run goes on to it."""
    seed: int = 0
    precision: Precision = "fp8"
    switches: Switches = field(default_factory=Switches.from_options)
    save_every: int | None = None
    out: Path = Path("runs/reference")
    resume: Path | None = None
    leave_out: Collection[str] = ()
    record: Path | None = None
    level: str = "state"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step tells about itself."""

    step: int
    loss: float
    """Cross entropy of the next byte in nats, averaged over the step's micro-batches."""
    grad_norm: float
    lr: float
    seconds: float
    tokens: int


class Listener(Protocol):
    """Whoever follows a run's progress."""

    def on_step(self, report: StepReport) -> None:
        """Called after each step."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint has been written."""


class Trainer:
    """One training run in memory."""

    def __init__(self, config: Config, text: Text, options: Options) -> None:
        rng.seed_all(options.seed)
        self.config, self.text, self.options = config, text, options
        self.loader = Loader(text, config.data, options.seed)
        self.model = Model(config.model, config.data.seq_len, options.precision, options.switches)
        o = config.optimizer
        self.optimizer = make_optimizer(self.model, o.lr, o.betas, o.eps, o.weight_decay)
        self.ema = EMA(masters(self.model, self.optimizer), o.ema_decay)
        self.step = 0
        self.held_out_loss = math.nan
        """What `train` found at its end, nats a byte."""

    def train_step(self) -> StepReport:
        """Do one optimizer step."""
        began = time.perf_counter()
        lr = learning_rate(self.num_updates, self.config.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        num_micro, optimizer = self.config.data.micro_batches, self.config.optimizer
        losses = []
        for _ in range(num_micro):
            output = self.model(*self.loader.next_batch())
            (output.total * (optimizer.loss_scale / num_micro)).backward()
            losses.append(output.main.detach())
        norm = unscale_and_clip(self.model.parameters(), optimizer.clip_norm, optimizer.loss_scale)
        self.optimizer.step()
        self.model.finish_step()
        self.ema.start_update(masters(self.model, self.optimizer))
        self.step += 1
        loss = float(torch.stack(losses).mean())
        seconds = time.perf_counter() - began
        return StepReport(self.step - 1, loss, norm, lr, seconds, self.config.data.tokens_per_step)

    @property
    def num_updates(self) -> int:
        """Updates that the parameters have had, as the optimizer counts them."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the cross entropy of held-out bytes, in nats. Draws from no generator."""
        self.model.eval()
        losses = [self.model(*batch).main for batch in self.loader.held_out_batches(EVAL_SEQUENCES)]
        self.model.train()
        return float(torch.stack(losses).mean())

    def header(self) -> dict[str, Any]:
        """Return what a checkpoint says about the run that it is of."""
        return {
            "config": self.config.name,
            "config_digest": digest_value(asdict(self.config)),
            "text": self.text.name,
            "text_digest": self.text.digest,
            "seed": self.options.seed,
            "precision": self.options.precision,
            "step": self.step,
        }

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far and return its path."""
        path = self.options.out / f"step-{self.step:06d}.pt"
        values = checkpoint.collect(self.model, self.optimizer, self.ema, self.loader)
        checkpoint.save(path, values, self.header())
        return path

    def resume(self, path: Path, leave_out: Collection[str] = ()) -> None:
        """Go on from a checkpoint; raises CheckpointError where it is of another run."""
        header, values = checkpoint.load(path)
        for key, mine in self.header().items():
            if key != "step" and header[key] != mine:
                raise CheckpointError(f"{path}: {key} is {header[key]!r} there and {mine!r} here")
        checkpoint.restore(path, values, self.model, self.optimizer, self.ema, self.loader, leave_out)
        self.step = header["step"]


def train(config: Config, text: Text, options: Options, listener: Listener) -> Trainer:
    """Run to `options.steps`, evaluate, and return the trainer, its average complete and its thread ended."""
    facts = {"config": config.name, "precision": options.precision, "seed": str(options.seed), "text": text.digest}
    with deterministic_algorithms(options.switches), declared(facts):
        trainer = Trainer(config, text, options)
        if options.resume is not None:
            trainer.resume(options.resume, options.leave_out)
            if trainer.step >= options.steps:
                raise UsageError(
                    f"--steps {options.steps}: {options.resume} has {trainer.step} steps behind it already"
                )
        try:
            with _recording(trainer) as end_step:
                while trainer.step < options.steps:
                    report = trainer.train_step()
                    end_step()
                    listener.on_step(report)
                    if options.save_every and trainer.step % options.save_every == 0:
                        listener.on_checkpoint(trainer.save())
                # Still recorded, as it is where `bitcheck run` records the whole program.
                trainer.held_out_loss = trainer.evaluate()
        finally:
            trainer.ema.close()
    return trainer


@contextmanager
def _recording(trainer: Trainer) -> Iterator[Any]:
    """Yield what to call at the end of a step: the recorder's `step` with --record, else nothing much."""
    if trainer.options.record is None:
        bitcheck.track("ema", trainer.ema.tensors)
        yield lambda: None
        return
    with bitcheck.record(
        trainer.options.record,
        model=trainer.model,
        optimizer=trainer.optimizer,
        level=trainer.options.level,
        start_step=trainer.step,
    ) as rec:
        rec.track("ema", trainer.ema.tensors)
        yield rec.step


@contextmanager
def deterministic_algorithms(switches: Switches) -> Iterator[None]:
    """Set PyTorch's own switches for a run, and put back what they were.

    In the deterministic recipe an operation of PyTorch without a deterministic form raises, whatever
    single switches say; `memory.fill` works only while that is so.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    is_filling = switches["memory.fill"] == "on"
    torch.use_deterministic_algorithms(switches.recipe == "deterministic" or is_filling)
    torch.utils.deterministic.fill_uninitialized_memory = is_filling  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]


def state_digests(trainer: Trainer) -> dict[str, str]:
    """Return the digest of everything that the next step depends on, by the names of a checkpoint."""
    values = checkpoint.collect(trainer.model, trainer.optimizer, trainer.ema, trainer.loader)
    named: dict[str, Any] = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers())
    values |= {f"derived/{name}": tensor for name, tensor in named.items()}
    return {
        name: digest_value(value.detach() if isinstance(value, Tensor) else value) for name, value in values.items()
    }
