"""800 steps of the reference trainer, twice fresh and once resumed in the middle: the same in every event?

    python -m benchmarks.proof_800 --config tiny --steps 800 --result benchmarks/results/FILE.md

    python -m benchmarks.proof_800 --config lite --config lite-hybrid --steps 800 --device cuda --gpus 2 --at-once 4 \\
        --sequences 2 --micro-batches 1 --level state --module-steps 50 --no-faults --checkpoints /dev/shm --limit 550

Of each configuration there are three runs, `first`, `second` and `resumed`, and with --module-steps two short ones
at level module. Up to --at-once of them run at a time, spread over the GPUs; a resumed one goes before others as soon
as its checkpoint is there. The result is written anew after each run and each comparison, so that what was found is
on disk whenever this ends; at the --limit runs are stopped, and compared as far as they came. Only runs of this
invocation are compared: a --folder that holds one of their names is refused.

Then, for each piece of state that a checkpoint holds, the run is resumed without it, and `bitcheck diff`
has to say so and name it; and with one kernel switched to its atomic form, and `diff` has to blame it.
Every command is one that a user could type; the result lists them.

Long because the whole proof stands here in its order.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import children
from benchmarks.trainer_faults import FAULTS, Fault


@dataclass(frozen=True)
class Job:
    """One run to make."""

    name: str
    """Of the folder that it is recorded into."""
    arguments: tuple[str, ...]
    checkpoint: Path | None = None
    """What it resumes from, and cannot start before."""


@dataclass(frozen=True)
class Running:
    """A run that is being made."""

    gpu: int
    command: str
    began: float
    process: subprocess.Popen[bytes]


@dataclass
class Comparison:
    """One `bitcheck diff`."""

    baseline: str
    candidate: str
    command: str
    verdict: str
    answer: dict[str, Any]
    """Empty where nothing could be compared; `verdict` says why."""

    @property
    def is_identical(self) -> bool:
        """Whether both runs are whole and have the same bits."""
        return self.verdict == "identical"


@dataclass
class Bench:
    """Runs commands in one folder and keeps a result of what they found so far."""

    folder: Path
    title: str
    machine: str
    gpus: int
    at_once: int
    deadline: float
    result: Path | None
    began: float = field(default_factory=time.perf_counter)
    lines: list[str] = field(default_factory=list)
    """A line for each run that has ended."""
    begun: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    """Of those begun: stopped at the limit."""
    proofs: list[Comparison] = field(default_factory=list)
    faults: list[tuple[Fault, str, Comparison | None]] = field(default_factory=list)
    """With the name of the run; what did not come to its end was not compared."""

    def train(self, jobs: list[Job], on_end: Callable[[set[str]], None] = lambda ended: None) -> set[str]:
        """Make the runs, as many at a time as may be, and return the names of those that came to their end.

        `on_end` gets those names so far after each run.
        """
        waiting, running, ended = list(jobs), dict[str, Running](), set[str]()
        try:
            while waiting or running:
                over = [name for name, run in running.items() if run.process.poll() is not None]
                for name in over:
                    if self._end(name, running.pop(name)):
                        ended.add(name)
                if not self.is_over:
                    self._start_some(waiting, running)
                if over:
                    on_end(ended)
                if self.is_over:
                    break
                time.sleep(0.2)
        finally:
            children.stop(run.process for run in running.values())
        self.cut |= set(running)
        for what, names in (("stopped at", list(running)), ("not begun before", [job.name for job in waiting])):
            if names:
                self.note(f"{what} the limit: {', '.join(f'`{name}`' for name in names)}")
        return ended

    @property
    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.perf_counter() > self.deadline

    def _start_some(self, waiting: list[Job], running: dict[str, Running]) -> None:
        """Move runs that can start from `waiting` to `running`, as many as may run at a time."""
        for job in [job for job in waiting if _is_hopeless(job, waiting, running)]:
            waiting.remove(job)
            self.note(f"`{job.name}` was not run: there is no checkpoint")
        ready = [job for job in waiting if job.checkpoint is None or job.checkpoint.exists()]
        ready.sort(key=lambda job: job.checkpoint is None)
        for job in ready[: max(0, self.at_once - len(running))]:
            waiting.remove(job)
            self.begun.add(job.name)
            running[job.name] = self._start(job, [run.gpu for run in running.values()])

    def _start(self, job: Job, busy: list[int]) -> Running:
        gpu = min(range(self.gpus), key=busy.count)
        place = {} if self.gpus == 1 else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        click.echo(f"{self._seconds:4.0f} s  $ {_shown(job.arguments)}{f'  on GPU {gpu}' if place else ''}")
        with (self.folder / f"{job.name}.log").open("wb") as log:
            command = [sys.executable, "-m", "bitcheck", *job.arguments]
            process = subprocess.Popen(
                command, cwd=self.folder, env=_environment() | place, stdout=log, stderr=subprocess.STDOUT
            )
        return Running(gpu, _shown(job.arguments), time.perf_counter(), process)

    def _end(self, name: str, run: Running) -> bool:
        """Note how a run ended, and return whether well."""
        took = time.perf_counter() - run.began
        said = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        last, status = said[-1] if said else "", run.process.returncode
        if status:
            click.echo("\n".join(said[-30:]))
        self.note(f"`{run.command}`: {f'exit status {status}' if status else 'done'} after {took:.0f} s; {last}")
        return status == 0

    def note(self, line: str) -> None:
        """Add a line to those of the runs."""
        click.echo(f"{self._seconds:4.0f} s  {line}")
        self.lines.append(line)
        self.write()

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def diff(self, baseline: str, candidate: str) -> Comparison:
        """Compare two runs and print the verdict."""
        arguments = ("diff", baseline, candidate, "--json")
        command = [sys.executable, "-m", "bitcheck", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=_environment(), text=True, capture_output=True)
        answer = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        verdict = answer["verdict"] if answer else (done.stderr.strip().splitlines() or ["no answer"])[-1]
        first = answer.get("first")
        click.echo(f"{self._seconds:4.0f} s  $ {_shown(arguments)}")
        click.echo(f"        {verdict}: {first['site'] if first else 'no difference'} (cause: {answer.get('cause')})")
        return Comparison(baseline, candidate, _shown(arguments), verdict, answer)

    def write(self) -> str:
        """Return the result so far, and write it where it is wanted."""
        report = "\n".join(self._describe()) + "\n"
        if self.result is not None:
            self.result.write_text(report)
        return report

    def _describe(self) -> Iterator[str]:
        yield f"# {self.title}"
        yield ""
        yield f"{self.machine}; {self._seconds / 60:.1f} minutes in all."
        yield ""
        yield f"    python -m benchmarks.proof_800 {shlex.join(sys.argv[1:])}"
        if self.proofs:
            yield ""
            yield "| compared | verdict | steps | events | bytes | command |"
            yield "|---|---|---|---|---|---|"
        for proof in self.proofs:
            compared = proof.answer.get("compared")
            counts = [f"{compared[key]:,}" for key in ("steps", "events", "bytes")] if compared else ["-"] * 3
            first = proof.answer.get("first")
            where = f", step {first['step']}, `{first['site']}`" if first else ""
            if not first and proof.answer.get("cause"):
                where = f", {proof.answer['cause']}"
            cells = [
                ", ".join(f"{name} (cut)" if name in self.cut else name for name in (proof.baseline, proof.candidate)),
                f"**{proof.verdict}**{where}",
                *counts,
                f"`{proof.command}`",
            ]
            yield f"| {' | '.join(cells)} |"
        if self.faults:
            yield ""
            yield "Resumed in the middle with a fault, three steps, compared with the first run:"
            yield ""
            yield "| fault | should be found | cause | first | origins | found |"
            yield "|---|---|---|---|---|---|"
        for fault, name, comparison in self.faults:
            answer = comparison.answer if comparison else {}
            first = f"step {answer['first']['step']}, `{answer['first']['site']}`" if answer.get("first") else "-"
            count = len(answer["origins"]) if answer else "-"
            found = "yes" if fault.is_found(answer) else "**no**"
            if comparison is None:
                found = "not finished" if name in self.begun else "not run"
            named = f"`{' '.join(fault.options)}` | {fault.cause}, `{fault.part}`"
            yield f"| {named} | {answer.get('cause') or '-'} | {first} | {count} | {found} |"
        yield ""
        yield "The runs, in the order in which they ended:"
        yield ""
        yield from (f"- {line}" for line in self.lines)
        yield ""


def _is_hopeless(job: Job, waiting: list[Job], running: dict[str, Any]) -> bool:
    """Whether nothing that runs, or will, makes the checkpoint that `job` waits for."""
    if job.checkpoint is None or job.checkpoint.exists():
        return False
    maker = job.name.replace("resumed", "first")
    return maker not in running and all(other.name != maker for other in waiting)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def _shown(arguments: tuple[str, ...]) -> str:
    return "bitcheck " + shlex.join(arguments)


@click.command()
@click.option("--config", "configs", multiple=True, default=("tiny",), show_default=True, help="Repeatable.")
@click.option("--steps", default=800, show_default=True)
@click.option("--level", default="module", show_default=True)
@click.option("--module-steps", default=0, help="Also so many steps twice at level module; 0 for none.")
@click.option("--sequences", type=int, help="Of a micro-batch; default: the configuration's.")
@click.option("--micro-batches", type=int, help="Of a step; default: the configuration's.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--gpus", type=click.IntRange(1), default=1, show_default=True)
@click.option("--at-once", type=click.IntRange(1), help="Runs at a time; default: one a GPU.")
@click.option("--faults/--no-faults", default=True, show_default=True, help="Also plan faults and find them.")
@click.option(
    "--checkpoints", type=click.Path(path_type=Path), help="Where checkpoints go, such as /dev/shm; default: --folder."
)
@click.option("--limit", type=float, default=float("inf"), help="Seconds after which runs are stopped.")
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file, as it grows.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where runs go; default: a temporary folder.")
def main(
    configs: tuple[str, ...],
    steps: int,
    level: str,
    module_steps: int,
    sequences: int | None,
    micro_batches: int | None,
    device: str,
    gpus: int,
    at_once: int | None,
    faults: bool,
    checkpoints: Path | None,
    limit: float,
    hardware: str,
    date: str,
    result: Path | None,
    folder: Path | None,
) -> None:
    """Prove that the trainer repeats itself, and that bitcheck says when it does not."""
    where = torch.cuda.get_device_name() if device == "cuda" else f"threads: {torch.get_num_threads()}"
    machine = (
        f"{hardware}{', ' if date else ''}{date}; {where}; PyTorch {torch.__version__}, Python"
        f" {platform.python_version()}; level `{level}`"
    )
    title = f"{steps} steps of {' and '.join(f'`{name}`' for name in configs)}: fresh, fresh again, resumed"
    sizes = [("--sequences", sequences), ("--micro-batches", micro_batches)]
    given = tuple(word for option, size in sizes if size is not None for word in (option, str(size)))
    with children.sigterm_exits(), tempfile.TemporaryDirectory() as temporary:
        work = (folder or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        saved = (checkpoints or work).absolute() / f"proof-{os.getpid()}"
        bench = Bench(work, title, machine, gpus, at_once or gpus, time.perf_counter() + limit, result)
        try:
            is_good = _prove(bench, configs, steps, level, module_steps, device, given, faults, saved)
        finally:
            shutil.rmtree(saved, ignore_errors=True)
        click.echo(bench.write())
    sys.exit(0 if is_good else 1)


def _prove(
    bench: Bench,
    configs: tuple[str, ...],
    steps: int,
    level: str,
    module_steps: int,
    device: str,
    sizes: tuple[str, ...],
    with_faults: bool,
    saved: Path,
) -> bool:
    half = steps // 2 + 1  # so that --save-every writes one checkpoint, of gigabytes for large configurations
    jobs, pairs, short_jobs = list[Job](), list[tuple[str, str]](), list[Job]()
    faulty = dict[str, list[Job]]()
    for config in configs:
        train = ("reference", "train", "--config", config, "--device", device, *sizes, "--quiet")
        long = (*train, "--steps", str(steps), "--level", level)
        out = saved / config
        checkpoint = out / f"step-{half:06d}.pt"  # a name holds a whole checkpoint or none
        first, second, resumed = (f"{config}-{name}" for name in ("first", "second", "resumed"))
        jobs += [
            Job(first, (*long, "--record", first, "--save-every", str(half), "--out", str(out))),
            Job(second, (*long, "--record", second)),
            Job(resumed, (*long, "--record", resumed, "--resume", str(checkpoint)), checkpoint),
        ]
        pairs += [(first, second), (first, resumed)]
        if module_steps:
            names = [f"{config}-module-{number}" for number in (1, 2)]
            short = (*train, "--steps", str(module_steps), "--level", "module")
            short_jobs += [Job(name, (*short, "--record", name)) for name in names]
            pairs.append((names[0], names[1]))
        if with_faults:
            short = (*train, "--level", level, "--steps", str(half + 3), "--resume", str(checkpoint))
            names = [f"{config}-{fault.name}" for fault in FAULTS]
            faulty[config] = [
                Job(name, (*short, "--record", name, *fault.options)) for name, fault in zip(names, FAULTS, strict=True)
            ]
    jobs += short_jobs
    all_jobs = [*jobs, *(job for config in faulty for job in faulty[config])]
    there = [job.name for job in all_jobs if (bench.folder / job.name).exists()]
    if there:
        raise click.UsageError(
            f"{bench.folder}: {', '.join(there)} there already, which would be taken for runs of this invocation; "
            "give an empty --folder"
        )
    compared = set[tuple[str, str]]()

    def compare(ended: set[str]) -> None:
        for pair in pairs:
            if pair not in compared and ended.issuperset(pair):
                compared.add(pair)
                bench.proofs.append(bench.diff(*pair))
                bench.write()
        for config in configs:
            if f"{config}-resumed" in ended and not with_faults:
                shutil.rmtree(saved / config, ignore_errors=True)

    ended = bench.train(jobs, compare)
    # What was cut is compared as far as it came.
    compare(ended | {name for name in bench.cut if (bench.folder / name / "run.json").exists()})
    is_good = ended == {job.name for job in jobs} and all(proof.is_identical for proof in bench.proofs)
    for config, planned in faulty.items():
        checkpoint = saved / config / f"step-{half:06d}.pt"
        if bench.is_over:
            bench.note(f"no fault was planned in `{config}`: the limit had passed")
        elif f"{config}-first" not in ended or not checkpoint.exists():
            bench.note(f"no fault was planned in `{config}`: there is no whole first run with a checkpoint")
        elif _find_faults(bench, config, planned):
            continue
        is_good = False
    return is_good


def _find_faults(bench: Bench, config: str, planned: list[Job]) -> bool:
    """Make the runs with faults, three steps from the checkpoint each, and tell whether all faults were found."""
    ended = bench.train(planned)
    are_found = True
    for fault, job in zip(FAULTS, planned, strict=True):
        comparison = bench.diff(f"{config}-first", job.name) if job.name in ended else None
        are_found &= comparison is not None and fault.is_found(comparison.answer)
        bench.faults.append((fault, job.name, comparison))
        bench.write()
    return are_found


if __name__ == "__main__":
    main()
