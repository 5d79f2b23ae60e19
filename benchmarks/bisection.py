"""How well `bisect kernels` names planted switches, and with how many runs: 200 planted faults among 16 switches.

    python benchmarks/bisection.py [--trials 200] [--output benchmarks/results/bisect_simulated_DATE.md]

Each trial plants one minimal set: a single switch, or a pair that diverges only together, in turn. A
quarter of the trials diverge in 30 % of the pairs of runs that have the whole set in them, the rest in
every one. The search is the one of the command, with its default of 95 % confidence and with 99 %; what
is simulated is the program. A set counts as found only if it is exactly the planted one, so a set with
one switch too many is a false one and a missed one.

Two prices are counted. *One run a sample*: a suspect form has the bits of the reproducible one unless it
diverges, so a run is compared with one that is there already. *Two runs for a first sample*: each
combination of forms has bits of its own, so a combination is run twice before it can be judged.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from bitcheck.bisect import BisectResult, EndRefused, Search, find_minimal_sets
from bitcheck.samples import Point, Sample

NAMES = [f"switch-{number:02}" for number in range(16)]
CHANCE = 0.3


class Planted:
    """A program in which some sets of suspect forms diverge."""

    def __init__(self, sets: list[Point], rate: float, seed: int, has_own_bits: bool) -> None:
        self.sets, self.rate, self.has_own_bits = sets, rate, has_own_bits
        self.random = random.Random(seed)
        self.tried: set[Point] = set()

    def price(self, point: Point) -> int:
        """Return how many programs the next sample runs."""
        return 2 if self.has_own_bits and point not in self.tried else 1

    def __call__(self, point: Point) -> Sample:
        """Take one sample."""
        price = self.price(point)
        self.tried.add(point)
        return Sample(any(one <= point and self.random.random() < self.rate for one in self.sets), price)


@dataclass
class Tally:
    """What became of some trials."""

    trials: int = 0
    exact: int = 0
    right: int = 0
    wrong: int = 0
    missed: int = 0
    refused: int = 0
    runs: int = 0
    most_runs: int = 0

    def add(self, planted: set[Point], result: BisectResult | None) -> None:
        """Count one trial; None where the search found nothing to look for."""
        found = set() if result is None else set(result.sets)
        self.trials += 1
        self.exact += found == planted
        self.right += len(found & planted)
        self.wrong += len(found - planted)
        self.missed += len(planted - found)
        self.refused += result is None
        if result is not None:
            self.runs += result.num_runs
            self.most_runs = max(self.most_runs, result.num_runs)

    def row(self, name: str) -> str:
        """Return a row of a Markdown table."""
        named, planted, answered = self.right + self.wrong, self.right + self.missed, self.trials - self.refused
        precision = f"{100 * self.right / named:.1f} %" if named else "-"
        recall = f"{100 * self.right / planted:.1f} %"
        average = f"{self.runs / answered:.1f}" if answered else "-"
        return (
            f"| {name} | {self.trials} | {self.exact} | {precision} | {recall} | {self.refused} | {average} "
            f"| {self.most_runs} |"
        )


def run_trials(num_trials: int, search: Search, has_own_bits: bool, kinds: tuple[str, ...]) -> dict[str, Tally]:
    """Return the tallies by kind of fault."""
    tallies: dict[str, Tally] = {}
    for trial in range(num_trials):
        kind = kinds[trial % len(kinds)]
        is_rare = trial % 8 in (1, 4)  # a quarter, of singles and pairs alike
        draw = random.Random(trial)
        first, second = draw.sample(NAMES, 2)
        planted = {"single": [{first}], "pair": [{first, second}], "two singles": [{first}, {second}]}[kind]
        sets = [frozenset(one) for one in planted]
        oracle = Planted(sets, CHANCE if is_rare else 1.0, trial, has_own_bits)
        try:
            result = find_minimal_sets(NAMES, oracle, search)
        except EndRefused:
            result = None
        for name in ("all", f"{kind}, {'30 % of pairs' if is_rare else 'every pair'}"):
            tallies.setdefault(name, Tally()).add(set(sets), result)
    return tallies


HEADER = (
    "| planted | trials | exactly right | precision | recall | not seen at all | runs, mean | runs, most |\n"
    "|---|---|---|---|---|---|---|---|"
)


def report(num_trials: int) -> str:
    """Run everything and return the result as Markdown."""
    began = time.perf_counter()
    parts = [
        f"# `bisect kernels` on planted switches, simulated\n\n{(__doc__ or '').split(chr(10) * 2, 2)[2].strip()}\n\n"
        "`not seen at all`: the search gave up at the suspect end, which did not diverge in as many pairs as the "
        "confidence asks.\n"
    ]
    for confidence in (0.95, 0.99):
        for has_own_bits, price in ((False, "one run a sample"), (True, "two runs for a first sample")):
            tallies = run_trials(num_trials, Search(confidence, CHANCE), has_own_bits, ("single", "pair"))
            rows = [tallies[name].row(name) for name in sorted(tallies)]
            parts.append(f"## Confidence {confidence:g}, {price}\n\n{HEADER}\n" + "\n".join(rows) + "\n")
    certain = run_trials(num_trials, Search(0.95, CHANCE), False, ("two singles",))
    rows = [certain[name].row(name) for name in sorted(certain)]
    parts.append(f"## Two independent switches at once, confidence 0.95, one run a sample\n\n{HEADER}\n")
    parts[-1] += "\n".join(rows) + "\n"
    always: dict[str, Tally] = {}
    for trial in range(num_trials):
        draw = random.Random(trial)
        first, second = draw.sample(NAMES, 2)
        sets = [frozenset({first} if trial % 2 else {first, second})]
        result = find_minimal_sets(NAMES, Planted(sets, 1.0, trial, False), Search(0.95, 1.0))
        for name in ("all", "single, every pair" if trial % 2 else "pair, every pair"):
            always.setdefault(name, Tally()).add(set(sets), result)
    rows = [always[name].row(name) for name in sorted(always)]
    parts.append(
        "## Faults known to show every time (`--rate 1`), one run a sample\n\n"
        "The world of bisectors that know no chance.\n\n" + f"{HEADER}\n" + "\n".join(rows) + "\n"
    )
    parts.append(
        f"Made by `python benchmarks/bisection.py --trials {num_trials}` in {time.perf_counter() - began:.0f} s; "
        "trials are numbered and drawn from their numbers, so it gives these figures again.\n"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = report(options.trials)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
