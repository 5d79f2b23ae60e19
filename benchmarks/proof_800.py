"""800 steps of the reference trainer, twice fresh and once resumed in the middle: the same in every event?

    python -m benchmarks.proof_800 --config tiny --steps 800 --result benchmarks/results/FILE.md

    python -m benchmarks.proof_800 --config lite --device cuda --gpus 3 --level state --no-faults --steps 800

With several GPUs the first two runs go at once, each on one of them, and the resumed one starts on a third when
there is a checkpoint to resume from.

Then, for each piece of state that a checkpoint holds, the run is resumed without it, and `bitcheck diff`
has to say so and name it; and with one kernel switched to its atomic form, and `diff` has to blame it.
Every command is one that a user could type; the result lists them.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

EXPECTED = {
    "masters": ("restore", ":master"),
    "moments": ("restore", ":exp_avg_sq"),
    "step": ("restore", ":step"),
    "router_bias": ("restore", "moe.router.bias"),
    "ema": ("restore", "extra/ema"),
    "rng.torch": ("rng", "rng/torch.cpu"),
    "rng.python": ("rng", "rng/python"),
    "rng.numpy": ("rng", "rng/numpy"),
    "data": ("data", "batch/Model"),
}
"""What is left out -> the cause that `diff` has to give, and a part of the site of one of the origins."""

SWITCHED = {
    "moe.dprob=atomic": ("backward", "moe.experts.down:grad_in.1"),
    "moe.combine=atomic": ("forward", "moe.combine:out"),
    "moe.wgrad=atomic": ("backward", "moe.experts."),
    "moe.topk=unstable": ("forward", "moe.router.topk:out"),
    "embedding.backward=atomic": ("backward", "embedding.weight:grad"),
    "norm.dweight=atomic": ("backward", "norm.weight:grad"),
    "attention.backward=fast": ("backward", "attn.core:grad_in.0"),
}
"""A switch's free form -> the cause, and a part of the site of the first origin."""


@dataclass(frozen=True)
class Comparison:
    """One `bitcheck diff`."""

    baseline: str
    candidate: str
    answer: dict[str, Any]
    seconds: float


class Bench:
    """Runs commands in one folder and remembers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[str] = []

    def bitcheck(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
        """Run `bitcheck ARGUMENTS` and return its output; ends the program where it fails."""
        self.commands.append("bitcheck " + shlex.join(arguments))
        click.echo(f"$ {self.commands[-1]}")
        command = [sys.executable, "-m", "bitcheck", *arguments]
        done = subprocess.run(command, cwd=self.folder, text=True, stdout=subprocess.PIPE)
        if done.returncode not in allowed:
            sys.exit(f"exit status {done.returncode}")
        return done.stdout

    def start(self, gpu: int, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `bitcheck ARGUMENTS` on GPU number `gpu` and do not wait for it."""
        self.commands.append(f"CUDA_VISIBLE_DEVICES={gpu} bitcheck " + shlex.join(arguments))
        click.echo(f"$ {self.commands[-1]}")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        return subprocess.Popen([sys.executable, "-m", "bitcheck", *arguments], cwd=self.folder, env=environment)

    def diff(self, baseline: str, candidate: str) -> Comparison:
        """Compare two runs and print the verdict."""
        began = time.perf_counter()
        answer = json.loads(self.bitcheck("diff", baseline, candidate, "--json", allowed=(0, 1)))
        first = answer["first"]["site"] if answer["first"] else "no difference"
        click.echo(f"  {answer['verdict']}: {first} (cause: {answer['cause']})")
        return Comparison(baseline, candidate, answer, time.perf_counter() - began)


@click.command()
@click.option("--config", "config_name", default="tiny", show_default=True)
@click.option("--steps", default=800, show_default=True)
@click.option("--level", default="module", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--gpus", type=click.IntRange(1, 3), default=1, show_default=True, help="Runs at once, each on a GPU.")
@click.option("--faults/--no-faults", default=True, show_default=True, help="Also plan faults and find them.")
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where runs go; default: a temporary folder.")
def main(
    config_name: str,
    steps: int,
    level: str,
    device: str,
    gpus: int,
    faults: bool,
    hardware: str,
    date: str,
    result: Path | None,
    folder: Path | None,
) -> None:
    """Prove that the trainer repeats itself, and that bitcheck says when it does not."""
    with tempfile.TemporaryDirectory() as temporary:
        work = folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(work)
        machine = f"{hardware}{', ' if date else ''}{date}"
        report, is_good = _prove(bench, config_name, steps, level, device, gpus, faults, machine)
    click.echo(report)
    if result is not None:
        result.write_text(report)
    sys.exit(0 if is_good else 1)


def _prove(
    bench: Bench, config_name: str, steps: int, level: str, device: str, gpus: int, with_faults: bool, machine: str
) -> tuple[str, bool]:
    half = steps // 2
    checkpoint = f"ckpt/step-{half:06d}.pt"
    train = ("reference", "train", "--config", config_name, "--device", device, "--quiet", "--level", level)
    began = time.perf_counter()
    long = (*train, "--steps", str(steps))
    first = (*long, "--record", "first", "--save-every", str(half), "--out", "ckpt")
    second = (*long, "--record", "second")
    resumed = (*long, "--record", "resumed", "--resume", checkpoint)
    if gpus == 1:
        for arguments in (first, second, resumed):
            bench.bitcheck(*arguments)
    else:
        _run_at_once(bench, gpus, first, second, resumed, bench.folder / checkpoint)
    proofs = [bench.diff("first", "second"), bench.diff("first", "resumed")]
    short = (*train, "--steps", str(half + 3), "--resume", checkpoint)
    faults: list[tuple[str, str, Comparison, bool]] = []
    for piece, (cause, part) in EXPECTED.items() if with_faults else ():
        name = f"without-{piece}"
        bench.bitcheck(*short, "--record", name, "--leave-out", piece)
        comparison = bench.diff("first", name)
        is_named = any(part in origin["site"] for origin in comparison.answer["origins"])
        is_found = is_named and comparison.answer["cause"] == cause
        faults.append((f"--leave-out {piece}", f"{cause}, `{part}`", comparison, is_found))
    for setting, (cause, part) in SWITCHED.items() if with_faults else ():
        name = f"with-{setting.replace('=', '-')}"
        bench.bitcheck(*short, "--record", name, "--set", setting)
        comparison = bench.diff("first", name)
        first = comparison.answer["first"]
        is_found = first is not None and part in first["site"] and comparison.answer["cause"] == cause
        faults.append((f"--set {setting}", f"{cause}, `{part}`", comparison, is_found))
    seconds = time.perf_counter() - began
    is_good = all(proof.answer["verdict"] == "identical" for proof in proofs) and all(fault[3] for fault in faults)
    return _describe(bench, config_name, steps, level, device, machine, proofs, faults, seconds), is_good


def _where(device: str) -> str:
    """Return what the bits depend on besides the machine: the CPU's threads, or which GPU."""
    return torch.cuda.get_device_name() if device == "cuda" else f"threads: {torch.get_num_threads()}"


def _run_at_once(
    bench: Bench,
    gpus: int,
    first: tuple[str, ...],
    second: tuple[str, ...],
    resumed: tuple[str, ...],
    checkpoint: Path,
) -> None:
    """Run the first two beside one another, and the resumed one on the third GPU as soon as it can, or after them."""
    running = [bench.start(0, *first), bench.start(1, *second)]
    if gpus > 2:
        while not checkpoint.exists() and running[0].poll() is None:  # a name holds a whole checkpoint or none
            time.sleep(1)
        running.append(bench.start(2, *resumed))
    failed = [process.args for process in running if process.wait()]
    if gpus == 2 and not failed:
        bench.bitcheck(*resumed)
    if failed:
        sys.exit(f"failed: {failed}")


def _describe(
    bench: Bench,
    config_name: str,
    steps: int,
    level: str,
    device: str,
    machine: str,
    proofs: list[Comparison],
    faults: list[tuple[str, str, Comparison, bool]],
    seconds: float,
) -> str:
    lines = [
        f"# {steps} steps of `{config_name}`: fresh, fresh again, resumed",
        "",
        f"{machine}; {_where(device)}; PyTorch {torch.__version__},"
        f" Python {platform.python_version()}; level `{level}`; {seconds / 60:.0f} minutes in all.",
        "",
        f"    python -m benchmarks.proof_800 {shlex.join(sys.argv[1:])}",
        "",
        "| compared | verdict | steps | events | bytes | time of the diff |",
        "|---|---|---|---|---|---|",
    ]
    for proof in proofs:
        compared = proof.answer["compared"]
        lines.append(
            f"| {proof.baseline}, {proof.candidate} | **{proof.answer['verdict']}** | {compared['steps']:,}"
            f" | {compared['events']:,} | {compared['bytes']:,} | {proof.seconds:.1f} s |"
        )
    if faults:
        lines += [
            "",
            f"Resumed at step {steps // 2} with a fault, three steps, compared with the first run:",
            "",
            "| fault | should be found | cause | first | origins | found |",
            "|---|---|---|---|---|---|",
        ]
    for fault, expected, comparison, is_found in faults:
        answer = comparison.answer
        first = f"step {answer['first']['step']}, `{answer['first']['site']}`" if answer["first"] else "-"
        lines.append(
            f"| `{fault}` | {expected} | {answer['cause']} | {first} | {len(answer['origins'])}"
            f" | {'yes' if is_found else '**no**'} |"
        )
    lines += ["", "The commands:", "", *(f"    {command}" for command in bench.commands)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
