"""What determinism costs: step times of one way to run against another, alternated, with a ratio and an interval.

Machines drift: clocks, temperature, neighbours. So the two are not measured one after the other but
in turn, the order changing each time, and what is averaged are ratios of neighbours in time:

    commands    baseline, candidate; candidate, baseline; ...: each pair of processes gives one ratio, of
                the medians of their steps; the first steps of each process are left out
    recipes     trainers of the reference model in one process, one step each in turn: each round of
                steps gives one ratio for every variant

The interval is that of the median ratio, from order statistics, and assumes nothing of how times are
distributed (`bitcheck.statistics.median_interval`).

Place in the flow: launch, statistics -> *tax* -> report.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bitcheck.errors import ProgramFailed, UsageError
from bitcheck.launch import attached_environment, find_program, package_folder, run_program
from bitcheck.settings import Settings
from bitcheck.statistics import DEFAULT_CONFIDENCE, Interval, median_interval

SCHEMA = "bitcheck.tax/1"


@dataclass(frozen=True, slots=True)
class TaxRow:
    """One way to run, against the baseline."""

    name: str
    step_ms: float
    """Median time of a step."""
    ratio: Interval
    """Its time over the baseline's."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return {"name": self.name, "step_ms": self.step_ms, "ratio": self.ratio._asdict()}


@dataclass(frozen=True, slots=True)
class Tax:
    """The answer."""

    baseline: str
    baseline_ms: float
    rows: tuple[TaxRow, ...]
    """The candidate first; then, for recipes, each switch alone."""
    num_ratios: int
    num_steps: int
    """Steps of each that were timed."""
    warmup: int
    """Steps of each that were left out."""
    clock: str
    """`cpu`, `gpu`: whose time it is."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, schema `bitcheck.tax/1`."""
        return {
            "schema": SCHEMA,
            "baseline": {"name": self.baseline, "step_ms": self.baseline_ms},
            "rows": [row.to_json() for row in self.rows],
            "ratios": self.num_ratios,
            "steps": self.num_steps,
            "warmup": self.warmup,
            "clock": self.clock,
            "notes": list(self.notes),
        }


class TimeCommand(Protocol):
    """Runs a command and says how long each of its steps took; see `time_command`."""

    def __call__(self, command: Sequence[str]) -> tuple[list[float], str]: ...


def time_command(command: Sequence[str]) -> tuple[list[float], str]:
    """Run a command and return (seconds of each step of its slowest rank, `cpu` or `gpu`).

    Its output goes to standard error. Raises ProgramFailed where it does not end well or takes fewer
    than two optimizer steps, ProgramNotFound.
    """
    with tempfile.TemporaryDirectory(prefix="bitcheck-tax-", ignore_cleanup_errors=True) as name:
        settings = Settings(folder=name, home=str(package_folder()), words=name, step_times=name)
        with open(os.devnull, "rb") as nothing:
            ending = run_program(
                command, attached_environment(settings, os.environ), stdin=nothing, stdout=sys.stderr.fileno()
            )
        if ending.exit_status:
            raise ProgramFailed(f"the program ended with exit status {ending.exit_status}; expected 0.")
        ranks = [json.loads(path.read_bytes()) for path in sorted(Path(name).glob("rank-*.times"))]
    if not ranks:
        raise ProgramFailed(
            "no step was timed: the program took fewer than two steps of a torch.optim.Optimizer.\n"
            "Expected a program that trains, for some steps more than are left out as warm-up."
        )
    slowest = max(ranks, key=lambda rank: sum(rank["seconds"]))
    return list(map(float, slowest["seconds"])), str(slowest["clock"])


def tax_commands(
    baseline: Sequence[str],
    candidate: Sequence[str],
    *,
    rounds: int = 6,
    warmup: int = 3,
    confidence: float = DEFAULT_CONFIDENCE,
    time_steps: TimeCommand = time_command,
    tell: Callable[[str], None] = lambda line: None,
) -> Tax:
    """Measure the step time of `candidate` over that of `baseline`.

    Raises ProgramFailed where a run fails or has no steps beyond the warm-up, ProgramNotFound.
    """
    for command in (baseline, candidate):
        find_program(command)
    names = "baseline", "candidate"
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    clock = "cpu"
    for number in range(rounds):
        order = [(names[0], baseline), (names[1], candidate)]
        for name, command in order if number % 2 == 0 else reversed(order):
            steps, clock = time_steps(command)
            kept = steps[warmup:]
            if not kept:
                raise ProgramFailed(
                    f"the {name} took {len(steps) + 1} steps, all within the warm-up of {warmup}; expected more.\n"
                    "Let it take more steps, or leave fewer out with --warmup."
                )
            times[name].append(kept)
            tell(f"round {number + 1} of {rounds}, {name}: {1000 * median(kept):.1f} ms a step")
    medians = {name: [median(steps) for steps in times[name]] for name in names}
    ratios = [later / earlier for earlier, later in zip(*medians.values(), strict=True)]
    row = TaxRow("candidate", 1000 * median(medians["candidate"]), median_interval(ratios, confidence))
    num_steps = min(sum(map(len, times[name])) for name in names)
    return Tax("baseline", 1000 * median(medians["baseline"]), (row,), rounds, num_steps, warmup, clock)


class Stepper(Protocol):
    """Something that takes a training step and returns its seconds."""

    def __call__(self) -> float: ...


def tax_variants(
    baseline: str,
    variants: dict[str, Stepper],
    *,
    steps: int,
    warmup: int,
    confidence: float = DEFAULT_CONFIDENCE,
    clock: str = "cpu",
    notes: tuple[str, ...] = (),
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Tax:
    """Let several trainers in this process step in turn, and measure each against `baseline`.

    In each round everybody takes one step; the order is turned round each time and begins with another
    one every second time, so that everybody comes before everybody else as often as after.
    """
    if steps < 1:
        raise UsageError(f"{steps} steps: expected 1 or more beside the warm-up")
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + steps):
        start = number // 2 % len(names)
        order = names[start:] + names[:start]
        for name in order if number % 2 == 0 else reversed(order):
            seconds[name].append(variants[name]())
        tell(number + 1, warmup + steps)
    kept = {name: values[warmup:] for name, values in seconds.items()}
    rows = []
    for name in names:
        if name != baseline:
            ratios = [mine / base for mine, base in zip(kept[name], kept[baseline], strict=True)]
            rows.append(TaxRow(name, 1000 * median(kept[name]), median_interval(ratios, confidence)))
    return Tax(baseline, 1000 * median(kept[baseline]), tuple(rows), steps, steps, warmup, clock, notes)
