"""`bitcheck reference`: the bundled FP8 mixture-of-experts trainer, to try bitcheck on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

LEAVE_OUT = ("masters", "moments", "step", "router_bias", "ema", "rng.torch", "rng.python", "rng.numpy", "data")
CONFIGS = ("tiny", "tiny-hybrid", "nano", "nano-hybrid", "lite", "lite-hybrid")
"""test_cli compares both lists with the trainer's."""


@click.group("reference")
def command() -> None:
    """Train the bundled DeepSeek-V3-style FP8 model, to try bitcheck on it.

    Every known source of nondeterminism in it is a named switch: see `bitcheck reference switches`.
    """


@command.command("switches")
def list_switches() -> None:
    """List the switches that `train --set` takes, and their forms.

    Example: bitcheck reference switches
    """
    from bitcheck.reference_runs.switches import TABLE

    for switch in TABLE.values():
        free = f"; not reproducible: {', '.join(switch.free)}" if switch.free else ""
        click.echo(f"{switch.name:<20} {', '.join(switch.deterministic)}{free}")
        click.echo(f"{'':<20} {switch.about}")


@command.command("train")
@click.option("--config", "config_name", type=click.Choice(CONFIGS), default="tiny", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Train up to this step; steps count from 0.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--precision", type=click.Choice(["fp8", "bf16"]), default="fp8", show_default=True)
@click.option("--recipe", type=click.Choice(["deterministic", "fast"]), default="deterministic", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="NAME=FORM", help="Give one switch another form. Repeatable.")
@click.option("--data", "data_path", type=click.Path(path_type=Path), help="Text to train on; default: Python's own.")
@click.option(
    "--micro-batches",
    type=click.IntRange(min=1),
    metavar="M",
    help="Micro-batches of a step, over all ranks; default: the configuration's.",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    metavar="S",
    help="Sequences of a micro-batch; default: the configuration's.",
)
@click.option(
    "--dp", type=click.IntRange(min=1), metavar="N", help="Data-parallel ranks; default: those that --pp leaves."
)
@click.option(
    "--ep",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="How many of the data-parallel ranks share the routed experts among them.",
)
@click.option(
    "--pp",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="Ranks of a pipeline in DualPipeV's order, with two stages each.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda trains on one GPU with Triton kernels: any configuration but nano.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/reference"),
    show_default=True,
    help="Folder for checkpoints.",
)
@click.option("--save-every", type=click.IntRange(min=1), metavar="M", help="Write a checkpoint after every M steps.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="CKPT", help="Go on from a checkpoint.")
@click.option(
    "--leave-out",
    type=click.Choice(LEAVE_OUT),
    multiple=True,
    help="A fault to try bitcheck on: with --resume, do not restore this piece. Repeatable.",
)
@click.option("--record", type=click.Path(path_type=Path), metavar="RUN", help="Record the run into this folder.")
@click.option(
    "--level",
    type=click.Choice(["state", "module", "op"]),
    default="state",
    show_default=True,
    help="How much --record keeps.",
)
@click.option("--quiet", is_flag=True, help="Print the result only.")
def train(
    config_name: str,
    steps: int,
    seed: int,
    precision: Any,
    recipe: str,
    settings: tuple[str, ...],
    data_path: Path | None,
    micro_batches: int | None,
    sequences: int | None,
    dp: int | None,
    ep: int,
    pp: int,
    device: str,
    out: Path,
    save_every: int | None,
    resume: Path | None,
    leave_out: tuple[str, ...],
    record: Path | None,
    level: str,
    quiet: bool,
) -> None:
    """Train the model, and perhaps record, save or resume it.

    Two recordings of the same command are identical bit for bit; with a switch in a form that is not
    reproducible they are not:

    \b
        bitcheck reference train --steps 20 --record runs/a
        bitcheck reference train --steps 20 --record runs/b --set moe.dprob=atomic
        bitcheck diff runs/a runs/b

    On several ranks torchrun starts it, and --dp times --pp is their number. With data parallelism alone the bits
    are those of one process that has as many micro-batches a step:

    \b
        torchrun --nproc-per-node 4 -m bitcheck reference train --steps 20 --micro-batches 4 --dp 4 --record runs/c
    """
    from dataclasses import replace

    from bitcheck.errors import UsageError
    from bitcheck.reference_runs.switches import Switches

    switches = Switches.from_options(recipe, settings)
    if leave_out and resume is None:
        raise UsageError("--leave-out skips a piece of what --resume restores; give a checkpoint to --resume")

    # PyTorch takes seconds to load: what can be refused without it has been.
    from bitcheck.reference_runs.configs import get_config
    from bitcheck.reference_runs.configs.degrees import Degrees, torchrun_rank, torchrun_world_size

    config = get_config(config_name)
    _refuse_device(config_name, device, max(ep, pp))
    sizes = {"micro_batches": micro_batches, "sequences": sequences}
    given = {name: size for name, size in sizes.items() if size is not None}
    config = replace(config, data=replace(config.data, **given))
    degrees = Degrees.from_options(dp, ep, pp, torchrun_world_size(), config)
    quiet, is_first = quiet or torchrun_rank() > 0, torchrun_rank() == 0

    from bitcheck.reference_runs.data import read_text
    from bitcheck.reference_runs.progress import ProgressLine
    from bitcheck.reference_runs.train import Options
    from bitcheck.reference_runs.train import train as run

    options = Options(
        steps=steps,
        seed=seed,
        precision=precision,
        switches=switches,
        save_every=save_every,
        out=out,
        resume=resume,
        leave_out=leave_out,
        record=record,
        level=level,
        degrees=degrees,
        device=device,
    )
    text = read_text(data_path)
    if not quiet:
        click.echo(f"{config.name}, {precision}, seed {seed}, on {text.name} ({text.data.size:,} bytes, {text.digest})")
        if degrees.world_size > 1:
            click.echo(f"{degrees.text} on {degrees.world_size} ranks, comm.reduce={switches['comm.reduce']}")
        if switches.free:
            order = "simulated arrival order" if device == "cpu" else "the GPU's order of arrival"
            click.echo(f"{order}, different in every run: {', '.join(switches.free)}")
        if leave_out:
            click.echo(f"not restored, on purpose: {', '.join(leave_out)}")
    with ProgressLine(steps, quiet) as progress:
        trainer = run(config, text, options, progress)
    if not is_first:
        return
    click.echo(
        f"held-out loss {trainer.held_out_loss:.4f} nats a byte after {trainer.step} steps"
        f" (unigram entropy {text.unigram_entropy():.4f})"
    )


def _refuse_device(config_name: str, device: str, largest_degree: int) -> None:
    """Raise UsageError for a configuration or a degree of parallelism that `device` is not for."""
    from bitcheck.errors import UsageError

    is_lite, is_nano = config_name.startswith("lite"), config_name.startswith("nano")
    if device == "cpu" and is_lite:
        raise UsageError(f"--config {config_name} is for a GPU: a step would take minutes here; give --device cuda")
    if device == "cuda" and is_nano:
        raise UsageError(f"--config {config_name} has widths that no FP8 product on a GPU takes; give --config tiny")
    if device == "cuda" and largest_degree > 1:
        raise UsageError("--device cuda: several GPUs share the data alone, --dp; leave --ep and --pp out")
