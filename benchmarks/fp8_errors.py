"""Error of each FP8 product of the reference trainer, beside what the casts to E4M3 alone imply.

    python -m benchmarks.fp8_errors --config tiny --steps 40 --result benchmarks/results/FILE.md

A model is trained for some steps. Then what each layer with an FP8 weight was given in one more micro-batch, its
input and the gradient of its output, is put through that layer once more, and through the same formula in float64
from the unquantised operands, the BF16 weight among them. Relative errors are in the Euclidean norm.

What is implied: a number x in [1, 2) times a power of two is rounded by up to 2**-4, so with mantissas spread evenly
over the logarithm a cast errs by 2**-4 / sqrt(3) / sqrt(3 / (2 ln 2)) = 2.45 %. A product of two such operands errs
by sqrt(2) times that where rounding errors are independent and terms have any sign; a weight gradient by sqrt(3)
times, because the cached input is cast again in other tiles. Sums whose terms agree in sign err by less. The input
of a `down` is cached in FP8 before its SwiGLU, whose derivative brings that error into dgrad as well.

Last, the loss of the same weights in FP8 and in BF16, on the same batches: what FP8 costs when nothing is trained.
"""

from __future__ import annotations

import math
import platform
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from bitcheck.reference_runs import rng
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import read_text
from bitcheck.reference_runs.experts import Down, WeightedDown, swiglu
from bitcheck.reference_runs.linear import Weight, offsets_from_loads
from bitcheck.reference_runs.train import Options, Trainer

CAST = 2.0**-4 / math.sqrt(3) / math.sqrt(3 / (2 * math.log(2)))
"""Relative error of one cast to E4M3."""
IMPLIED = {"fprop": math.sqrt(2) * CAST, "dgrad": math.sqrt(2) * CAST, "wgrad": math.sqrt(3) * CAST}

Seen = dict[str, tuple[tuple[Tensor, ...], Tensor]]
"""A layer's name -> its inputs, and the gradient of its output."""


def watch(trainer: Trainer) -> Seen:
    """Run one micro-batch, and return what each layer with an FP8 weight was given."""
    inputs: dict[str, tuple[Tensor, ...]] = {}
    seen: Seen = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name] = tuple(tensor.detach() for tensor in given)
            if y.requires_grad:
                y.register_hook(lambda dy: seen.__setitem__(name, (inputs[name], dy.detach())))

        return hook

    layers = {name: module for name, module in trainer.model.named_modules() if isinstance(module, Weight)}
    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    losses = trainer.model(*trainer._next_batch())
    (losses.total * trainer._loss_weight).backward()
    for handle in handles:
        handle.remove()
    return seen


def exact(layer: Weight, given: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    """Return the layer's output from its operands as they are: float64 where they are."""
    x, *others = given
    x = x.reshape(-1, x.shape[-1])
    if isinstance(layer, WeightedDown | Down):
        x = swiglu(x)
    if isinstance(layer, WeightedDown):
        x = x * others[0][:, None]
    if weight.dim() == 2:
        return x @ weight.t()
    rows = pairwise(offsets_from_loads(given[-1]))
    return torch.cat([x[first:stop] @ weight[expert].t() for expert, (first, stop) in enumerate(rows)])


def errors(layer: Weight, given: tuple[Tensor, ...], dy: Tensor) -> dict[str, float]:
    """Return the relative errors of a layer's three products; of a second half, with its SwiGLU."""
    layer.weight.grad = None
    ours = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    y = layer(*ours)
    y.backward(dy)
    wide = [x.double().requires_grad_() if x.is_floating_point() else x for x in given]
    weight = layer.weight.detach().double().requires_grad_()
    y_exact = exact(layer, tuple(wide), weight)
    y_exact.backward(dy.double().view_as(y_exact))
    pairs = {
        "fprop": (y.detach().view_as(y_exact), y_exact.detach()),
        "dgrad": (ours[0].grad, wide[0].grad),
        "wgrad": (layer.weight.grad, weight.grad),
    }
    found = {}
    for product, (mine, theirs) in pairs.items():
        assert mine is not None and theirs is not None
        found[product] = float((mine.double() - theirs).norm() / theirs.norm())
    return found


@torch.no_grad()
def losses_of_the_same_weights(trainer: Trainer, num_batches: int) -> list[float]:
    """Return by how much the loss in FP8 is above that in BF16, relatively, for each of so many batches."""
    options = replace(trainer.options, precision="bf16")
    twin = Trainer(trainer.config, trainer.text, options)
    buffers = dict(trainer.model.named_buffers())
    for name, parameter in trainer.model.named_parameters():
        twin.model.get_parameter(name).copy_(parameter)
    for name, buffer in twin.model.named_buffers():
        buffer.copy_(buffers[name])
    twin.ema.close()
    models = trainer.model.eval(), twin.model.eval()
    pairs = []
    for _ in range(num_batches):
        batch = trainer._next_batch()
        pairs.append([float(model(*batch).main) for model in models])
    return [fp8 / bf16 - 1 for fp8, bf16 in pairs]


def kind_of(name: str) -> str:
    """Return a layer's name without the block that it is in."""
    parts = name.split(".")
    return ".".join(part for part in parts if not part.isdigit() and part not in ("layers", "mtp", "block"))


@click.command()
@click.option("--config", "config_name", default="tiny", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=40, show_default=True, help="Of training before.")
@click.option(
    "--batches", type=click.IntRange(2), default=60, show_default=True, help="On which the same weights are compared."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file.")
def main(
    config_name: str, steps: int, batches: int, device: str, hardware: str, date: str, result: Path | None
) -> None:
    """Measure the error of each FP8 product of a model in training."""
    trainer = Trainer(get_config(config_name), read_text(None), Options(steps, device=device))
    rng.seed_all(0)
    for _ in range(steps):
        report = trainer.train_step()
    layers = dict(trainer.model.named_modules())
    by_kind: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, (given, dy) in watch(trainer).items():
        layer = layers[name]
        assert isinstance(layer, Weight)
        by_kind[kind_of(name)].append(errors(layer, given, dy))
    trainer.ema.close()
    differences = losses_of_the_same_weights(trainer, batches)
    where = torch.cuda.get_device_name() if device == "cuda" else f"threads: {torch.get_num_threads()}"
    lines = [
        f"# Errors of FP8 products: `{config_name}` after {steps} steps, loss {report.loss:.3f}",
        "",
        f"{hardware}{', ' if date else ''}{date}; {where}; PyTorch {torch.__version__}",
        "",
        f"    python -m benchmarks.fp8_errors {shlex.join(sys.argv[1:])}",
        "",
        "| layer | how many | fprop | dgrad | wgrad |",
        "|---|---|---|---|---|",
    ]
    for kind, found in sorted(by_kind.items()):
        means = (statistics.fmean(one[product] for one in found) for product in IMPLIED)
        lines.append(f"| {kind} | {len(found)} | {' | '.join(f'{mean:.2%}' for mean in means)} |")
    every = [one for found in by_kind.values() for one in found]
    for what, of in (("mean", statistics.fmean), ("largest", max)):
        lines.append(f"| {what} | {len(every)} | {' | '.join(f'{of(o[p] for o in every):.2%}' for p in IMPLIED)} |")
    lines.append(f"| implied by the casts | | {' | '.join(f'{value:.2%}' for value in IMPLIED.values())} |")
    error = statistics.stdev(differences) / math.sqrt(batches)
    lines += [
        "",
        f"The loss of these weights in FP8 is {statistics.fmean(differences):+.3%} (standard error {error:.3%}) above"
        f" that in BF16, over {batches} micro-batches of the training text.",
    ]
    described = "\n".join(lines) + "\n"
    click.echo(described)
    if result is not None:
        result.write_text(described)


if __name__ == "__main__":
    main()
