"""Loss curves of the reference trainer in FP8 and in BF16, on the same batches, and how far apart they are.

    python -m benchmarks.learning --config tiny --steps 300 --result benchmarks/results/FILE.md

Both runs have the same seed, data, dropout and schedule; they differ in the precision of the Linear
layers alone. They advance step by step in one process, so that both meet the same load of the machine.
"""

from __future__ import annotations

import platform
import statistics
import sys
from pathlib import Path

import click
import torch

from bitcheck.reference_runs import rng
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import read_text
from bitcheck.reference_runs.linear import Precision
from bitcheck.reference_runs.train import Options, StepReport, Trainer, deterministic_algorithms

PRECISIONS: tuple[Precision, ...] = ("fp8", "bf16")


@click.command()
@click.option("--config", "config_name", default="tiny", show_default=True)
@click.option("--steps", default=300, show_default=True)
@click.option("--last", default=50, show_default=True, help="Steps at the end over which losses are averaged.")
@click.option("--seed", default=0, show_default=True)
@click.option("--data", "data_path", type=click.Path(path_type=Path), default=None)
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file.")
def main(
    config_name: str,
    steps: int,
    last: int,
    seed: int,
    data_path: Path | None,
    hardware: str,
    date: str,
    result: Path | None,
) -> None:
    """Train in both precisions and print their losses side by side."""
    text = read_text(data_path)
    trainers = {
        precision: Trainer(get_config(config_name), text, Options(steps=steps, seed=seed, precision=precision))
        for precision in PRECISIONS
    }
    reports: dict[str, list[StepReport]] = {precision: [] for precision in trainers}
    rng.seed_all(seed)
    generators = {precision: rng.capture() for precision in trainers}
    with deterministic_algorithms(next(iter(trainers.values())).options.switches):
        for step in range(steps):
            for precision, trainer in trainers.items():
                # The generators are the process's: each run gets its own states back for its step.
                for name, state in generators[precision].items():
                    rng.restore(name, state)
                reports[precision].append(trainer.train_step())
                generators[precision] = rng.capture()
            if step % 10 == 0 or step == steps - 1:
                line = "  ".join(f"{precision} {reports[precision][-1].loss:.4f}" for precision in trainers)
                click.echo(f"step {step:5d}  {line}")
    text_result = _describe(trainers, reports, last, hardware, date)
    click.echo(text_result)
    if result is not None:
        result.write_text(text_result)
    for trainer in trainers.values():
        trainer.ema.close()


def _describe(
    trainers: dict[Precision, Trainer], reports: dict[str, list[StepReport]], last: int, hardware: str, date: str
) -> str:
    trainer = trainers["fp8"]
    steps = len(reports["fp8"])
    means = {p: statistics.fmean(r.loss for r in reports[p][-last:]) for p in reports}
    held_out = {p: t.evaluate() for p, t in trainers.items()}
    step_ms = {p: statistics.median(r.seconds for r in reports[p]) * 1000 for p in reports}
    difference = (means["fp8"] - means["bf16"]) / means["bf16"]
    text = trainer.text
    lines = [
        f"# Loss in FP8 and in BF16: `{trainer.config.name}`, {steps} steps",
        "",
        f"{hardware}, {torch.get_num_threads()} of its cores in use, PyTorch {torch.__version__},"
        f" Python {platform.python_version()}" + (f", {date}" if date else ""),
        "",
        f"    python -m benchmarks.learning {' '.join(sys.argv[1:])}",
        "",
        f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters, {trainer.config.data.tokens_per_step:,}"
        f" tokens a step, seed {trainer.options.seed}, text {text.name} (digest {text.digest}).",
        "",
        "| | FP8 | BF16 |",
        "|---|---|---|",
        f"| training loss, mean of the last {last} steps (nats a byte) | {means['fp8']:.4f} | {means['bf16']:.4f} |",
        f"| held-out loss | {held_out['fp8']:.4f} | {held_out['bf16']:.4f} |",
        f"| median step (ms) | {step_ms['fp8']:.0f} | {step_ms['bf16']:.0f} |",
        "",
        f"FP8 against BF16 over the last {last} steps: {difference:+.3%} (goal: within 0.25 %).",
        f"Unigram entropy of the text: {text.unigram_entropy():.4f} nats a byte.",
        "",
        "| step | FP8 | BF16 |",
        "|---|---|---|",
    ]
    for step in sorted({*range(0, steps, max(1, steps // 15)), steps - 1}):
        lines.append(f"| {step} | {reports['fp8'][step].loss:.4f} | {reports['bf16'][step].loss:.4f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
