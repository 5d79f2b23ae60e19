"""The training loop: wires the model, the optimizer, the average, the loader and the recorder together.

One step, in this order:

    learning rate from the number of updates so far
    for each micro-batch, in order: batch, forward, backward (gradients add up in FP32)
    sum gradients over ranks, if there are others
    clip, optimizer step
    derive FP8 weights from the new BF16 ones, move the routers' biases
    start the average's update in its thread
    `rec.step()`: the recorder reads the state; then perhaps a checkpoint

Nothing else carries over from step to step: a process that resumes at a step does what one that never
stopped does, by construction.

Each rank draws what all ranks draw, for the micro-batches of others too: so generators and the loader's
position are the same on all of them, and those of a single process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import bitcheck
from bitcheck.environment import declared
from bitcheck.errors import UsageError
from bitcheck.reference_runs import checkpoint, device, rng, sharded
from bitcheck.reference_runs.checkpoint import CheckpointError, digest_value
from bitcheck.reference_runs.configs import Config
from bitcheck.reference_runs.configs.degrees import Degrees
from bitcheck.reference_runs.data import Loader, Text
from bitcheck.reference_runs.ema import EMA
from bitcheck.reference_runs.linear import Precision
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.optimizer import make_optimizer, masters, unscale_and_clip
from bitcheck.reference_runs.pipeline import Pipeline
from bitcheck.reference_runs.ranks import Ranks, process_group
from bitcheck.reference_runs.reduce import GradientSum, global_norm
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
    degrees: Degrees = field(default_factory=Degrees)
    device: str = "cpu"
    """One of `device.DEVICES`; Triton kernels and cuBLAS are used on `cuda`."""


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
    experts_per_node: float | None = None
    """With expert parallelism: how many experts a token meets at a node that it visits, on average."""


class Listener(Protocol):
    """Whoever follows a run's progress."""

    def on_step(self, report: StepReport) -> None:
        """Called after each step."""

    def on_checkpoint(self, path: Path) -> None:
        """Called after a checkpoint has been written."""


class Trainer:
    """One training run in memory: all of it, or with `ranks` one rank's part."""

    def __init__(self, config: Config, text: Text, options: Options, ranks: Ranks | None = None) -> None:
        self.device = device.prepare(options.device)
        rng.seed_all(options.seed)
        self.config, self.text, self.options, self.ranks = config, text, options, ranks
        self.loader = Loader(text, config.data, options.seed)
        with self.device:
            self.model = Model(config.model, config.data.seq_len, options.precision, options.switches)
        names = [name for name, _ in self.model.named_parameters()]
        self._pipeline: Pipeline | None = None
        if ranks is not None and ranks.degrees.pp > 1:
            self._pipeline = Pipeline(self.model, config.data, ranks, self._loss_weight)
        if ranks is not None and ranks.degrees.ep > 1:
            for moe in self.model.expert_layers():
                moe.share_experts(ranks.ep)
        o = config.optimizer
        self.optimizer = make_optimizer(self.model, o.lr, o.betas, o.eps, o.weight_decay)
        self.ema = EMA(masters(self.model, self.optimizer), o.ema_decay)
        self._sums: list[GradientSum] = []
        self._total_norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm
        if ranks is not None:
            is_ordered = options.switches["comm.reduce"] == "ordered"
            named = dict(self.model.named_parameters())
            is_shard = [ranks.degrees.ep > 1 and sharded.is_sharded(name) for name in named]
            for group, is_theirs in ((ranks.dp, False), (ranks.edp, True)):
                theirs = [p for p, is_part in zip(named.values(), is_shard, strict=True) if is_part is is_theirs]
                self._sums.append(GradientSum(theirs, group, is_ordered))
            positions = [names.index(name) for name in named]
            self._total_norm = partial(
                global_norm, positions=positions, is_shard=is_shard, size=len(names), ranks=ranks
            )
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
        optimizer = self.config.optimizer
        losses = self._run_micro_batches()
        mean_loss, experts_per_node = self._sum_over_ranks(losses)
        total = unscale_and_clip(self.model.parameters(), optimizer.clip_norm, optimizer.loss_scale, self._total_norm)
        self.optimizer.step()
        self.model.finish_step()
        self.ema.start_update(masters(self.model, self.optimizer))
        self.step += 1
        # Read last: on a GPU this waits for the whole step, the only time that the host does.
        loss, norm = float(mean_loss), float(total)
        seconds = time.perf_counter() - began
        tokens = self.config.data.tokens_per_step
        return StepReport(self.step - 1, loss, norm, lr, seconds, tokens, experts_per_node)

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        return self._to_device(self.loader.next_batch())

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Copy a batch to the model's device; from pinned memory, so that the host need not wait."""
        if self.device.type == "cpu":
            return batch
        inputs_BS, targets_BS2 = (tensor.pin_memory().to(self.device, non_blocking=True) for tensor in batch)
        return inputs_BS, targets_BS2

    def _run_micro_batches(self) -> list[Tensor]:
        """Run forward and backward of a step's micro-batches that are this rank's; return their losses."""
        if self._pipeline is not None:
            return self._run_pipeline(self._pipeline)
        losses = []
        for number in range(self.config.data.micro_batches):
            inputs_BS, targets_BS2 = self._next_batch()
            if not self._is_mine(number):
                self.model.draw_only(inputs_BS)
                continue
            output = self.model(inputs_BS, targets_BS2)
            (output.total * self._loss_weight).backward()
            losses.append(output.main.detach())
            for gradients in self._sums:
                gradients.end_micro_batch()
        return losses

    def _run_pipeline(self, pipeline: Pipeline) -> list[Tensor]:
        batches, states = [], []
        for number in range(self.config.data.micro_batches):
            batch, state = self.loader.next_batch(), torch.get_rng_state()
            self.model.draw_only(batch[0])
            if self._is_mine(number):
                batches.append(batch)
                states.append(state)
        losses = pipeline.step(batches, states)
        # They have added up already: a rank's micro-batches are one part.
        for gradients in self._sums:
            gradients.end_micro_batch()
        return list(losses)

    def _is_mine(self, number: int) -> bool:
        """Tell whether micro-batch `number` of a step is for this rank, or this rank's pipeline."""
        return self.ranks is None or number % self.ranks.degrees.dp == self.ranks.dp_rank

    @property
    def _loss_weight(self) -> float:
        """What a micro-batch's loss is multiplied by before backward."""
        return self.config.optimizer.loss_scale / self.config.data.micro_batches

    def _sum_over_ranks(self, losses: list[Tensor]) -> tuple[Tensor, float | None]:
        """Sum gradients and routers' loads over ranks; return the step's loss, 0-d, and its experts a node.

        All of it before the optimizer's step, which is where a recorded step ends.
        """
        mine, ranks = torch.stack(losses), self.ranks
        if ranks is None:
            return mine.mean(), None
        for gradients in self._sums:
            gradients.finish()
        ranks.sum_loads(self.model.routers().values())
        experts_per_node = ranks.experts_per_node(self.model.expert_layers()) if ranks.degrees.ep > 1 else None
        if self._pipeline is not None:
            mine = ranks.gather(mine, ranks.pp)[0]  # the last stage is on the first rank
        # Rank r has micro-batches r, r + dp, ...: in their own order the sum is that of one process.
        return torch.stack(ranks.gather(mine, ranks.dp), 1).mean(), experts_per_node

    @property
    def num_updates(self) -> int:
        """Updates that the parameters have had, as the optimizer counts them."""
        return int(next(iter(self.optimizer.state.values()))["step"])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the cross entropy of held-out bytes, in nats. Draws from no generator."""
        self.model.eval()
        batches = list(self.loader.held_out_batches(EVAL_SEQUENCES))
        if self._pipeline is not None:
            assert self.ranks is not None
            losses = self.ranks.gather(self._pipeline.evaluate(batches), self.ranks.pp)[0]
        else:
            losses = torch.stack([self.model(*self._to_device(batch)).main for batch in batches])
        self.model.train()
        return float(losses.mean())

    def header(self) -> dict[str, Any]:
        """Return what a checkpoint says about the run that it is of."""
        return {
            "config": self.config.name,
            "config_digest": digest_value(asdict(self.config)),
            "text": self.text.name,
            "text_digest": self.text.digest,
            "seed": self.options.seed,
            "precision": self.options.precision,
            "device": self.options.device,
            "step": self.step,
        }

    def save(self) -> Path:
        """Write a checkpoint of the steps done so far and return its path: a file; of a parallel run a folder."""
        values = checkpoint.collect(self.model, self.optimizer, self.ema, self.loader)
        path = self.options.out / f"step-{self.step:06d}"
        if self.ranks is not None:
            sharded.save(path, values, self.header(), self.ranks)
            return path
        path = path.with_suffix(".pt")
        checkpoint.save(path, values, self.header())
        return path

    def resume(self, path: Path, leave_out: Collection[str] = ()) -> None:
        """Go on from a checkpoint; raises CheckpointError where it is of another run."""
        if path.is_dir():
            current = checkpoint.collect(self.model, self.optimizer, self.ema, self.loader)
            header, values = sharded.load(path, current, self.ranks)
        else:
            header, values = checkpoint.load(path)
        for key, mine in self.header().items():
            if key != "step" and header.get(key) != mine:
                raise CheckpointError(f"{path}: {key} is {header.get(key)!r} there and {mine!r} here")
        checkpoint.restore(path, values, self.model, self.optimizer, self.ema, self.loader, leave_out)
        self.step = header["step"]


def train(config: Config, text: Text, options: Options, listener: Listener) -> Trainer:
    """Run to `options.steps`, evaluate, and return the trainer, its average complete and its thread ended."""
    device.prepare(options.device)
    facts = {"config": config.name, "precision": options.precision, "seed": str(options.seed), "text": text.digest}
    if options.degrees.world_size > 1:
        facts["parallel"] = options.degrees.text
    with (
        deterministic_algorithms(options.switches),
        declared(facts),
        process_group(options.degrees, options.device) as ranks,
    ):
        trainer = Trainer(config, text, options, ranks)
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
