"""The trainer on several ranks: fresh, fresh again and resumed, for each kind of parallelism, on a CPU.

python -m benchmarks.parallel_reference --result benchmarks/results/parallel_reference_cpu_DATE.md

Each layout of ranks is recorded three times at level `module`, the third time resumed from the first run's
sharded checkpoint in the middle; `bitcheck diff` has to find all three identical. Then: data parallelism with
`comm.reduce=ordered` has to end in the same bits whatever the number of ranks, a run resumed on another number
of ranks included; a switch in a free form on one rank has to be found on that rank; and each piece of state
left out when a sharded checkpoint is loaded has to be named.
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

from benchmarks.trainer_faults import EXPECTED
from bitcheck.reference_runs.checkpoint import load as load_checkpoint
from bitcheck.reference_runs.sharded import INDEX, digests_of

ON_ONE_RANK = Path(__file__).with_name("on_one_rank.py")


@dataclass(frozen=True)
class Layout:
    """How ranks share a run."""

    name: str
    num_ranks: int
    options: tuple[str, ...]
    micro_batches: int = 4


LAYOUTS = (
    Layout("dp 2, ordered", 2, ()),
    Layout("dp 4, ordered", 4, ()),
    Layout("dp 2, native", 2, ("--set", "comm.reduce=native")),
    Layout("dp 4, native", 4, ("--set", "comm.reduce=native")),
    Layout("dp 2, ep 2", 2, ("--ep", "2")),
    Layout("dp 4, ep 2", 4, ("--ep", "2")),
    Layout("dp 4, ep 4", 4, ("--ep", "4")),
    Layout("pp 2", 2, ("--pp", "2")),
    Layout("pp 2, dp 2", 4, ("--pp", "2"), 8),
    Layout("pp 2, dp 2, ep 2", 4, ("--pp", "2", "--ep", "2"), 8),
)


class Bench:
    """Runs commands in one folder and remembers them."""

    def __init__(self, folder: Path, config: str, steps: int) -> None:
        self.folder, self.config, self.steps = folder, config, steps
        self.commands: list[str] = []
        self.spread: dict[str, str] = {}
        """What a layout with expert parallelism printed of experts a node."""

    def run(self, command: list[str], shown: str, allowed: tuple[int, ...] = (0,)) -> str:
        """Run `command` and return its output; ends the program where it fails."""
        self.commands.append(shown)
        click.echo(f"$ {shown}")
        done = subprocess.run(command, cwd=self.folder, text=True, capture_output=True, env=_environment())
        if done.returncode not in allowed:
            sys.exit(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def train(self, layout: Layout, record: str, *options: str, fault: tuple[int, str] | None = None) -> str:
        """Train on the layout's ranks, recorded into `record`; return what was printed."""
        arguments = ["reference", "train", "--config", self.config, "--micro-batches", str(layout.micro_batches)]
        arguments += [*layout.options, "--level", "module", "--record", record, *options]
        if "--steps" not in options:
            arguments += ["--steps", str(self.steps)]
        if layout.num_ranks == 1:
            return self.run([sys.executable, "-m", "bitcheck", *arguments], "bitcheck " + shlex.join(arguments))
        torchrun = ["--standalone", "--nproc-per-node", str(layout.num_ranks)]
        program = ["-m", "bitcheck"]
        shown = f"torchrun --nproc-per-node {layout.num_ranks} -m bitcheck {shlex.join(arguments)}"
        if fault is not None:
            program = [str(ON_ONE_RANK), str(fault[0]), fault[1]]
            shown = shown.replace("-m bitcheck", f"benchmarks/on_one_rank.py {fault[0]} {fault[1]}")
        return self.run([sys.executable, "-m", "torch.distributed.run", *torchrun, *program, *arguments], shown)

    def diff(self, baseline: str, candidate: str) -> dict[str, Any]:
        """Compare two runs and print the verdict."""
        command = ["diff", baseline, candidate, "--json"]
        answer: dict[str, Any] = json.loads(
            self.run([sys.executable, "-m", "bitcheck", *command], "bitcheck " + shlex.join(command), allowed=(0, 1))
        )
        first = answer["first"]
        where = f"step {first['step']}, rank {first['rank']}, {first['site']}" if first else "no difference"
        click.echo(f"  {answer['verdict']}: {where} (cause: {answer['cause']})")
        return answer

    def end_state(self, out: str) -> dict[str, str]:
        """Return the digests in the last checkpoint under `out`, of one process or of many."""
        path = self.folder / out / f"step-{self.steps:06d}"
        if path.is_dir():
            found: dict[str, str] = json.loads((path / INDEX).read_text())["digests"]
            return found
        return digests_of(load_checkpoint(path.with_suffix(".pt"))[1])


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


@click.command()
@click.option("--config", default="tiny", show_default=True)
@click.option("--steps", default=8, show_default=True)
@click.option("--hardware", default=platform.processor() or platform.machine(), help="What to call this machine.")
@click.option("--date", default="", help="The day, for the result's first lines.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where runs go; default: a temporary folder.")
def main(config: str, steps: int, hardware: str, date: str, result: Path | None, folder: Path | None) -> None:
    """Prove that the trainer repeats itself on several ranks, and that bitcheck says when it does not."""
    with tempfile.TemporaryDirectory() as temporary:
        work = folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        report, is_good = _prove(Bench(work, config, steps), f"{hardware}{', ' if date else ''}{date}")
    click.echo(report)
    if result is not None:
        result.write_text(report)
    sys.exit(0 if is_good else 1)


def _prove(bench: Bench, machine: str) -> tuple[str, bool]:
    began = time.perf_counter()
    half = bench.steps // 2
    tables = [_table(("ranks", "layout", "compared", "verdict", "steps", "events", "bytes"))]
    is_good = True
    for layout in LAYOUTS:
        name = layout.name.replace(", ", "-").replace(" ", "")
        lines = bench.train(layout, f"{name}-first", "--save-every", str(half), "--out", f"{name}-ckpt")
        if "--ep" in layout.options:
            bench.spread[layout.name] = _last_step(lines)
        bench.train(layout, f"{name}-again")
        bench.train(layout, f"{name}-resumed", "--resume", f"{name}-ckpt/step-{half:06d}")
        for other in ("again", "resumed"):
            answer = bench.diff(f"{name}-first", f"{name}-{other}")
            compared, verdict = answer["compared"], answer["verdict"]
            is_good &= verdict == "identical"
            cells = (layout.num_ranks, layout.name, f"first, {other}", f"**{verdict}**", compared["steps"])
            tables[0].append(_row((*cells, f"{compared['events']:,}", f"{compared['bytes']:,}")))
    for table, is_table_good in (_across_rank_counts(bench, half), _faults(bench), _left_out(bench, half)):
        tables.append(table)
        is_good &= is_table_good
    return _describe(bench, machine, tables, time.perf_counter() - began), is_good


def _across_rank_counts(bench: Bench, half: int) -> tuple[list[str], bool]:
    """The same steps on one process, and resumed on other numbers of ranks."""
    save = ("--save-every", str(bench.steps))
    bench.train(Layout("one process", 1, ()), "dp1-first", *save, "--out", "dp1-ckpt")
    resumed = ("--resume", f"dp2-ordered-ckpt/step-{half:06d}", *save)
    bench.train(LAYOUTS[1], "dp2-on-4", *resumed, "--out", "dp2-on-4-ckpt")
    bench.train(Layout("one process", 1, ()), "dp2-on-1", *resumed, "--out", "dp2-on-1-ckpt")
    one = bench.end_state("dp1-ckpt")
    table, is_good = _table(("run", "values in the last checkpoint", "with other bits than one process")), True
    for name, out, is_same in (
        ("dp 2, ordered", "dp2-ordered-ckpt", True),
        ("dp 4, ordered", "dp4-ordered-ckpt", True),
        ("dp 2, ordered, resumed on 4 ranks", "dp2-on-4-ckpt", True),
        ("dp 2, ordered, resumed in one process", "dp2-on-1-ckpt", True),
        ("dp 2, native", "dp2-native-ckpt", False),
        ("dp 4, native", "dp4-native-ckpt", False),
    ):
        state = bench.end_state(out)
        num_other = sum(one.get(key) != state.get(key) for key in one.keys() | state.keys())
        # At 2 ranks native may have the bits of one process, should the library add in that order: no claim.
        is_good &= num_other == 0 or not is_same
        table.append(_row((name, len(state), num_other)))
    return table, is_good


def _faults(bench: Bench) -> tuple[list[str], bool]:
    """A switch in a free form on one rank, for each rank of a layout with experts on four."""
    layout, steps = LAYOUTS[6], ("--steps", "2")
    table, is_good = _table(("fault", "cause", "first", "origins on ranks", "found")), True
    for rank, setting, part in (
        (0, "moe.dprob=atomic", "moe.experts.down:grad_in.1"),
        (1, "moe.dprob=atomic", "moe.experts.down:grad_in.1"),
        (2, "moe.wgrad=atomic", "moe.experts."),
        (3, "moe.combine=atomic", "moe.combine:out"),
    ):
        name = f"rank{rank}-{setting.partition('=')[0]}"
        bench.train(layout, name, *steps, fault=(rank, setting))
        answer = bench.diff("dp4-ep4-first", name)
        first = answer["first"]
        is_found = first is not None and first["rank"] == rank and part in first["site"]
        is_good &= is_found
        ranks = sorted({origin["rank"] for origin in answer["origins"]})
        where = f"step {first['step']}, rank {first['rank']}, `{first['site']}`" if first else "-"
        cells = (f"`{setting}` on rank {rank}", answer["cause"], where, ", ".join(map(str, ranks)))
        table.append(_row((*cells, "yes" if is_found else "**no**")))
    return table, is_good


def _left_out(bench: Bench, half: int) -> tuple[list[str], bool]:
    """Each piece of state in turn not restored from a sharded checkpoint."""
    table, is_good = _table(("not restored", "should be found", "cause", "first", "origins", "found")), True
    for piece, (cause, part) in EXPECTED.items():
        options = ("--resume", f"dp2-ep2-ckpt/step-{half:06d}", "--leave-out", piece, "--steps", str(half + 2))
        bench.train(LAYOUTS[4], f"without-{piece}", *options)
        answer = bench.diff("dp2-ep2-first", f"without-{piece}")
        first, origins = answer["first"], answer["origins"]
        is_found = answer["cause"] == cause and any(part in origin["site"] for origin in origins)
        is_good &= is_found
        where = f"step {first['step']}, rank {first['rank']}, `{first['site']}`" if first else "-"
        cells = (f"`{piece}`", f"{cause}, `{part}`", answer["cause"], where, len(origins))
        table.append(_row((*cells, "yes" if is_found else "**no**")))
    return table, is_good


def _last_step(lines: str) -> str:
    return next(line for line in reversed(lines.splitlines()) if line.startswith("step ")).rpartition("tokens/s")[2]


def _row(cells: tuple[object, ...]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _table(titles: tuple[str, ...]) -> list[str]:
    return [_row(titles), f"|{'---|' * len(titles)}"]


def _describe(bench: Bench, machine: str, tables: list[list[str]], seconds: float) -> str:
    ranks, counts, faults, left_out = tables
    lines = [
        f"# `{bench.config}` on several ranks: fresh, fresh again, resumed",
        "",
        f"{machine}; gloo, {torch.get_num_threads()} thread a rank; PyTorch {torch.__version__},"
        f" Python {platform.python_version()}; level `module`; {bench.steps} steps, resumed at {bench.steps // 2};"
        f" {seconds / 60:.0f} minutes in all.",
        "",
        f"    python -m benchmarks.parallel_reference {shlex.join(sys.argv[1:])}",
        "",
        *ranks,
        "",
        "Experts that a token meets at a node it visits, in the last step (a node is a group of the router's; V3's"
        " links are in balance at 3.2):",
        "",
        *(f"- {name}: {spread.strip()}" for name, spread in bench.spread.items()),
        "",
        "Data parallelism on other numbers of ranks, the same global batch: everything that a checkpoint holds",
        "(masters, moments, average, routers' biases, generators, position), a routed expert's weight a value.",
        "",
        *counts,
        "",
        "A fault on one rank of four that share the experts, compared with the first run:",
        "",
        *faults,
        "",
        "Resumed from the sharded checkpoint of `dp 2, ep 2` without one piece of it:",
        "",
        *left_out,
        "",
        "The commands:",
        "",
        *(f"    {command}" for command in bench.commands),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
