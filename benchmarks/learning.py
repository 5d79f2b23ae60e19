"""Loss of the reference trainer in FP8 and in BF16, on the same batches, and how far apart they are.

    python -m benchmarks.learning --config tiny --steps 300 --seeds 4 --result benchmarks/results/FILE.md

    python -m benchmarks.learning --config tiny --steps 300 --seeds 32 --device cuda --gpus 2 --jobs 32

    python -m benchmarks.learning --config lite --steps 3000 --seeds 1 --device cuda --gpus 2 --jobs 2 \\
        --run fp8 --run bf16 --sequences 2 --micro-batches 1 --data TEXT

For each seed there are three runs, each a process of its own, with the same data, dropout and schedule:

    fp8     the Linear layers in FP8
    bf16    the Linear layers in BF16
    again   BF16 once more, sums in arrival order: it differs from `bf16` in rounding alone

How far `again` strays is what any difference in rounding does to a run of this length: a difference
between FP8 and BF16 means something only beside it, and averaged over seeds. Runs leave the loss of each step in
a file as they go, and the result is written from those files again and again: also of runs that were cut short,
which are compared over the steps that all of a seed's have. The average over seeds is of those alone whose runs
all came to the last step.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from benchmarks import children
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
WINDOWS = 12
"""Into how many the steps are cut for the table of losses."""
REFRESH_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What one run has come to."""

    losses: list[float]
    """Of each step, nats a byte."""
    step_ms: float
    """Median."""
    held_out: float | None
    """None before its end."""

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Return what `train_alone` has left in `path` so far."""
        lines = path.read_text().splitlines() if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be half written
        steps = [entry for entry in told if "loss" in entry]
        held_out = told[-1].get("held_out") if told else None
        step_ms = statistics.median([entry["ms"] for entry in steps]) if steps else math.nan
        return cls([entry["loss"] for entry in steps], step_ms, held_out)


@dataclass(frozen=True)
class Plan:
    """What is to be run, and how many runs at a time."""

    config: Config
    text: Text
    steps: int
    seeds: int
    runs: tuple[str, ...]
    device: str
    gpus: int
    jobs: int
    last: int
    machine: str
    result: Path | None
    folder: Path

    def path(self, seed: int, name: str) -> Path:
        """Return where the losses of one run are."""
        return self.folder / f"{name}-{seed}.jsonl"


@dataclass(frozen=True)
class Running:
    """A run that is being made."""

    name: str
    gpu: int
    process: subprocess.Popen[bytes]


@click.command()
@click.option("--config", "config_name", default="tiny", show_default=True)
@click.option("--steps", default=300, show_default=True)
@click.option("--seeds", default=4, show_default=True, help="How many, from 0.")
@click.option("--run", "runs", multiple=True, type=click.Choice(list(RUNS)), default=list(RUNS), help="Repeatable.")
@click.option("--last", default=50, show_default=True, help="Steps at the end over which losses are averaged.")
@click.option("--data", "data_path", type=click.Path(path_type=Path), default=None)
@click.option("--sequences", type=int, help="Of a micro-batch; default: the configuration's.")
@click.option("--micro-batches", type=int, help="Of a step; default: the configuration's.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Runs at a time.")
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file, as it grows.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where runs leave losses; default: a temporary folder.")
@click.option("--alone", nargs=2, type=(int, str), default=None, hidden=True, help="Be one run: its seed and name.")
def main(
    config_name: str,
    steps: int,
    seeds: int,
    runs: tuple[str, ...],
    last: int,
    data_path: Path | None,
    sequences: int | None,
    micro_batches: int | None,
    device: str,
    gpus: int,
    jobs: int,
    hardware: str,
    date: str,
    result: Path | None,
    folder: Path | None,
    alone: tuple[int, str] | None,
) -> None:
    """Train with each seed in both precisions, and print the losses side by side."""
    config, text = get_config(config_name), read_text(data_path)
    sizes = {"sequences": sequences, "micro_batches": micro_batches}
    given = {name: size for name, size in sizes.items() if size is not None}
    config = replace(config, data=replace(config.data, **given))
    machine = f"{hardware}{', ' if date else ''}{date}"
    place = folder or Path()
    plan = Plan(config, text, steps, seeds, tuple(runs), device, gpus, jobs, last, machine, result, place)
    if alone is not None:  # in the folder of the whole
        train_alone(plan, *alone)
        return
    with children.sigterm_exits(), tempfile.TemporaryDirectory() as temporary:
        place = (folder or Path(temporary)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        plan = replace(plan, folder=place)
        # The same command line with one run to be and the folder for it.
        command = [sys.executable, "-m", "benchmarks.learning", *sys.argv[1:], "--folder", str(place)]
        failed: list[str] = []
        try:
            _train_all(plan, command, failed)
        finally:
            click.echo(_write(plan, failed))
    sys.exit(1 if failed else 0)


def train_alone(plan: Plan, seed: int, name: str) -> None:
    """Train one run of one seed, and leave its losses, a line a step."""
    precision, recipe = RUNS[name]
    switches = Switches.from_options(recipe)
    with plan.path(seed, name).open("w") as file, deterministic_algorithms(switches):
        trainer = Trainer(plan.config, plan.text, Options(plan.steps, seed, precision, switches, device=plan.device))
        # All runs of a seed begin with the same generators, whatever building the model has drawn.
        rng.seed_all(seed)
        for _ in range(plan.steps):
            report = trainer.train_step()
            print(json.dumps({"loss": report.loss, "ms": report.seconds * 1000}), file=file, flush=True)
        print(json.dumps({"held_out": trainer.evaluate()}), file=file)
        trainer.ema.close()


def _train_all(plan: Plan, command: list[str], failed: list[str]) -> None:
    """Start each run in a process of its own, `jobs` at a time, and write the result every few seconds.

    Those that fail are added to `failed`, with their exit status.
    """
    waiting = [(seed, name) for seed in range(plan.seeds) for name in plan.runs]
    for seed, name in waiting:
        plan.path(seed, name).unlink(missing_ok=True)
    running: list[Running] = []
    written, began = time.perf_counter(), time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < (plan.jobs if _is_warm(plan) else min(plan.jobs, len(plan.runs))):
                seed, name = waiting.pop(0)
                busy = [run.gpu for run in running]
                gpu = min(range(plan.gpus), key=busy.count)
                place = {} if plan.device == "cpu" else {"CUDA_VISIBLE_DEVICES": str(gpu)}
                process = subprocess.Popen([*command, "--alone", str(seed), name], env=os.environ | place)
                running.append(Running(f"{name} of seed {seed}", gpu, process))
            time.sleep(0.5)
            over = [run for run in running if run.process.poll() is not None]
            running = [run for run in running if run not in over]
            failed += [f"{run.name} (exit status {run.process.returncode})" for run in over if run.process.returncode]
            if time.perf_counter() - written > REFRESH_SECONDS:
                written = time.perf_counter()
                _write(plan, failed)
                click.echo(f"{written - began:5.0f} s  {_progress(plan)}")
    finally:
        children.stop(run.process for run in running)


def _is_warm(plan: Plan) -> bool:
    """Whether the first seed's runs have begun: on a GPU they compile the kernels, which others then find done."""
    return plan.device == "cpu" or all(Outcome.read(plan.path(0, name)).losses for name in plan.runs)


def _outcomes(plan: Plan) -> Iterator[tuple[int, dict[str, Outcome]]]:
    """Yield each seed of which every run has begun, with its runs."""
    for seed in range(plan.seeds):
        outcomes = {name: Outcome.read(plan.path(seed, name)) for name in plan.runs}
        if all(outcome.losses for outcome in outcomes.values()):
            yield seed, outcomes


def _progress(plan: Plan) -> str:
    """Say how far the runs are, and what the difference is where it stands."""
    seeds = dict(_outcomes(plan))
    done = sum(len(outcome.losses) for outcomes in seeds.values() for outcome in outcomes.values())
    told = f"{done:,} of {plan.steps * plan.seeds * len(plan.runs):,} steps"
    if not seeds or not {"fp8", "bf16"} <= set(plan.runs):
        return told
    seed, outcomes = next(reversed(seeds.items()))
    steps = min(len(outcome.losses) for outcome in outcomes.values())
    last = slice(max(0, steps - plan.last), steps)
    means = {name: statistics.fmean(outcome.losses[last]) for name, outcome in outcomes.items()}
    parts = "  ".join(f"{name} {mean:.4f}" for name, mean in means.items())
    return f"{told}; seed {seed}, step {steps}: {parts}  fp8 {means['fp8'] / means['bf16'] - 1:+.2%}"


def _write(plan: Plan, failed: Sequence[str]) -> str:
    """Return the result as it stands, and write it where it is wanted."""
    described = "\n".join(describe(plan, dict(_outcomes(plan)), failed)) + "\n"
    if plan.result is not None:
        plan.result.write_text(described)
    return described


def describe(plan: Plan, seeds: dict[int, dict[str, Outcome]], failed: Sequence[str] = ()) -> Iterator[str]:
    """Yield the result as lines of markdown; `failed` are runs that ended badly."""
    config, text = plan.config, plan.text
    where = f"threads: {torch.get_num_threads()}"
    if plan.device == "cuda":
        where = f"{plan.gpus} {torch.cuda.get_device_name()}"
    yield f"# Loss in FP8 and in BF16: `{config.name}`, {plan.steps} steps, {plan.seeds} seeds"
    yield ""
    yield f"{plan.machine}; {where}; PyTorch {torch.__version__}, Python {platform.python_version()}"
    yield ""
    yield f"    python -m benchmarks.learning {' '.join(sys.argv[1:])}"
    yield ""
    yield f"{config.data.tokens_per_step:,} tokens a step, text {text.name} ({text.data.size:,} bytes, {text.digest})."
    yield f"Unigram entropy of the text: {text.unigram_entropy():.4f} nats a byte."
    if failed:
        yield ""
        yield f"**Runs that failed: {len(failed)} of {plan.seeds * len(plan.runs)}**: {', '.join(failed)}."
    if not seeds:
        yield ""
        yield "Not finished: there is no seed yet of which every run has begun."
        return
    yield ""
    yield f"Training loss, mean of the last {plan.last} steps, and loss on held-out text after them (nats a byte):"
    yield ""
    others = [name for name in plan.runs if name != "bf16"]
    columns = ["seed", "steps", *plan.runs, *(f"{name} against bf16" for name in others)]
    columns += [f"held out, {name}" for name in plan.runs]
    yield _row(columns)
    yield "|---" * len(columns) + "|"
    differences: dict[str, list[float]] = {name: [] for name in others}
    for seed, outcomes in seeds.items():
        steps = min(len(outcome.losses) for outcome in outcomes.values())
        last = slice(max(0, steps - plan.last), steps)
        means = {name: statistics.fmean(outcome.losses[last]) for name, outcome in outcomes.items()}
        cells = [str(seed), str(steps), *(f"{mean:.4f}" for mean in means.values())]
        for name in others:
            difference = means[name] / means["bf16"] - 1 if "bf16" in means else math.nan
            # A run that was cut early says nothing of the others' end, nor of its own.
            if steps == plan.steps:
                differences[name].append(difference)
            cells.append(f"{difference:+.2%}")
        for outcome in outcomes.values():
            cells.append("-" if outcome.held_out is None else f"{outcome.held_out:.4f}")
        yield _row(cells)
    yield ""
    for name, values in differences.items():
        if not values:
            yield f"**{name} against bf16: not finished**: no seed has all {plan.steps} steps of every run."
            continue
        mean = statistics.fmean(values)
        goal = f"; goal: within {GOAL:.2%}: {'met' if abs(mean) <= GOAL else 'not met'}" if name == "fp8" else ""
        yield (
            f"**{name} against bf16: {mean:+.2%}** on average over the {len(values)} of {plan.seeds} seeds that were"
            f" finished{_standard_error(values)}, {max(map(abs, values)):.2%} at most{goal}."
        )
    if "again" in others:
        yield "`again` is BF16 with its sums in another order: what rounding alone does to a run of this length."
    medians = (f"{name} {statistics.median(o[name].step_ms for o in seeds.values()):.0f} ms" for name in plan.runs)
    yield ""
    yield f"Median step, {plan.jobs} runs at a time: {', '.join(medians)}."
    yield ""
    yield "Mean loss over windows of steps, of the seeds whose runs have all come to the end of the window:"
    yield ""
    yield from _windows(plan, seeds, others)


def _windows(plan: Plan, seeds: dict[int, dict[str, Outcome]], others: list[str]) -> Iterator[str]:
    columns = ["steps", "seeds", *plan.runs, *(f"{name} against bf16" for name in others)]
    yield _row(columns)
    yield "|---" * len(columns) + "|"
    width = max(1, plan.steps // WINDOWS)
    for start in range(0, plan.steps, width):
        stop = min(start + width, plan.steps)
        whole = [o for o in seeds.values() if min(len(outcome.losses) for outcome in o.values()) >= stop]
        if not whole:
            return
        means = {
            name: statistics.fmean(loss for o in whole for loss in o[name].losses[start:stop]) for name in plan.runs
        }
        against = [f"{means[name] / means['bf16'] - 1:+.2%}" if "bf16" in means else "-" for name in others]
        yield _row([f"{start} to {stop - 1}", str(len(whole)), *(f"{mean:.4f}" for mean in means.values()), *against])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _standard_error(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    return f" (standard error {statistics.stdev(values) / math.sqrt(len(values)):.2%})"


if __name__ == "__main__":
    main()
