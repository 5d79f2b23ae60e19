"""Loss of the reference trainer in FP8 and in BF16, on the same batches, and how far apart they are.

    python -m benchmarks.learning --config tiny --steps 300 --seeds 4 --result benchmarks/results/FILE.md

For each seed three runs advance step by step in one process, with the same data, dropout and schedule:

    fp8     the Linear layers in FP8
    bf16    the Linear layers in BF16
    again   BF16 once more, sums in arrival order: it differs from `bf16` in rounding alone

How far `again` strays is what any difference in rounding does to a run of this length: a difference
between FP8 and BF16 means something only beside it, and averaged over seeds.
"""

from __future__ import annotations

import math
import platform
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from bitcheck.reference_runs import rng
from bitcheck.reference_runs.configs import Config, get_config
from bitcheck.reference_runs.data import Text, read_text
from bitcheck.reference_runs.linear import Precision
from bitcheck.reference_runs.switches import Switches
from bitcheck.reference_runs.train import Options, Trainer, deterministic_algorithms

RUNS: dict[str, tuple[Precision, str]] = {
    "fp8": ("fp8", "deterministic"),
    "bf16": ("bf16", "deterministic"),
    "again": ("bf16", "fast"),
}
"""A run -> its precision and recipe."""
GOAL = 0.0025


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    losses: list[float]
    """Of each step, nats a byte."""
    held_out: float
    step_ms: float
    """Median."""

    def mean(self, last: int) -> float:
        """Return the mean loss of the last so many steps."""
        return statistics.fmean(self.losses[-last:])


@click.command()
@click.option("--config", "config_name", default="tiny", show_default=True)
@click.option("--steps", default=300, show_default=True)
@click.option("--seeds", default=4, show_default=True, help="How many, from 0.")
@click.option("--last", default=50, show_default=True, help="Steps at the end over which losses are averaged.")
@click.option("--data", "data_path", type=click.Path(path_type=Path), default=None)
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file.")
def main(
    config_name: str,
    steps: int,
    seeds: int,
    last: int,
    data_path: Path | None,
    hardware: str,
    date: str,
    result: Path | None,
) -> None:
    """Train with each seed in both precisions, and print the losses side by side."""
    config, text = get_config(config_name), read_text(data_path)
    outcomes = [train_side_by_side(config, text, seed, steps) for seed in range(seeds)]
    described = describe(config, text, outcomes, last, f"{hardware}{', ' if date else ''}{date}")
    click.echo(described)
    if result is not None:
        result.write_text(described)


def train_side_by_side(config: Config, text: Text, seed: int, steps: int) -> dict[str, Outcome]:
    """Train the three runs of one seed, a step of each in turn, so that all meet the same load."""
    options = {
        name: Options(steps, seed, precision, Switches.from_options(recipe))
        for name, (precision, recipe) in RUNS.items()
    }
    trainers = {name: Trainer(config, text, options[name]) for name in RUNS}
    rng.seed_all(seed)
    generators = {name: rng.capture() for name in RUNS}
    losses: dict[str, list[float]] = {name: [] for name in RUNS}
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    for step in range(steps):
        for name, trainer in trainers.items():
            # The generators are the process's: each run gets its own states back for its step.
            for generator, state in generators[name].items():
                rng.restore(generator, state)
            with deterministic_algorithms(options[name].switches):
                report = trainer.train_step()
            generators[name] = rng.capture()
            losses[name].append(report.loss)
            seconds[name].append(report.seconds)
        if step % 50 == 49:
            means = "  ".join(f"{name} {statistics.fmean(losses[name][-50:]):.4f}" for name in RUNS)
            click.echo(f"seed {seed}, steps {step - 49} to {step}: {means}")
    outcomes = {
        name: Outcome(losses[name], trainer.evaluate(), statistics.median(seconds[name]) * 1000)
        for name, trainer in trainers.items()
    }
    for trainer in trainers.values():
        trainer.ema.close()
    return outcomes


def describe(config: Config, text: Text, outcomes: list[dict[str, Outcome]], last: int, machine: str) -> str:
    """Return the result as markdown."""
    steps = len(outcomes[0]["fp8"].losses)
    differences = {name: [o[name].mean(last) / o["bf16"].mean(last) - 1 for o in outcomes] for name in ("fp8", "again")}
    mean = statistics.fmean(differences["fp8"])
    lines = [
        f"# Loss in FP8 and in BF16: `{config.name}`, {steps} steps, {len(outcomes)} seeds",
        "",
        f"{machine}; threads: {torch.get_num_threads()}; PyTorch {torch.__version__},"
        f" Python {platform.python_version()}",
        "",
        f"    python -m benchmarks.learning {' '.join(sys.argv[1:])}",
        "",
        f"{config.data.tokens_per_step:,} tokens a step, text {text.name} ({text.data.size:,} bytes, {text.digest}).",
        f"Unigram entropy of the text: {text.unigram_entropy():.4f} nats a byte.",
        "",
        f"Training loss, mean of the last {last} steps, and loss on held-out text after them (nats a byte):",
        "",
        "| seed | FP8 | BF16 | FP8 against BF16 | BF16 with sums in another order | held out, FP8 | held out, BF16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed, outcome in enumerate(outcomes):
        lines.append(
            f"| {seed} | {outcome['fp8'].mean(last):.4f} | {outcome['bf16'].mean(last):.4f}"
            f" | {differences['fp8'][seed]:+.2%} | {differences['again'][seed]:+.2%}"
            f" | {outcome['fp8'].held_out:.4f} | {outcome['bf16'].held_out:.4f} |"
        )
    lines += [
        "",
        f"**FP8 against BF16: {mean:+.2%}** on average over the seeds"
        f"{_standard_error(differences['fp8'])}; goal: within {GOAL:.2%}: {'met' if abs(mean) <= GOAL else 'not met'}.",
        f"BF16 against itself with sums in another order: {statistics.fmean(differences['again']):+.2%} on average"
        f"{_standard_error(differences['again'])}, {max(map(abs, differences['again'])):.2%} at most: what rounding"
        " alone does to a run of this length.",
        "",
        "Median step: "
        + ", ".join(f"{name} {statistics.median(o[name].step_ms for o in outcomes):.0f} ms" for name in ("fp8", "bf16"))
        + ".",
        "",
        "Loss of the first seed:",
        "",
        "| steps | FP8 | BF16 |",
        "|---|---|---|",
    ]
    width = max(1, steps // 12)
    for start in range(0, steps, width):
        fp8, bf16 = (statistics.fmean(outcomes[0][name].losses[start : start + width]) for name in ("fp8", "bf16"))
        lines.append(f"| {start} to {min(start + width, steps) - 1} | {fp8:.4f} | {bf16:.4f} |")
    return "\n".join(lines) + "\n"


def _standard_error(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    return f" (standard error {statistics.stdev(values) / math.sqrt(len(values)):.2%})"


if __name__ == "__main__":
    main()
