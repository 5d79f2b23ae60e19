"""The reference trainer, fresh, fresh again, and resumed in the middle: every bit of every step the same.

    python -m benchmarks.proof --config tiny --steps 800 --level module

Two fresh runs side by side; from the first one's checkpoint in the middle a third; all recorded and
compared. Then the negative controls: the resumed half once more for each piece of state that a
checkpoint holds, with that piece left out, and once with a kernel switched to its racing form. Prints
Markdown; ends with status 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import bitcheck
from bitcheck.reference_runs.checkpoint import PIECES

RESTORE_CAUSES = {"restore", "rng", "data", "hyperparameter"}
CONTROL_STEPS = 4
"""Steps that a negative control goes on for after the checkpoint."""


class Job:
    """`bitcheck reference train` as a user would type it."""

    def __init__(self, scratch: Path, config: str, level: str) -> None:
        self.scratch = scratch
        self.base = [sys.executable, "-m", "bitcheck", "reference", "train", "--quiet", "--config", config, "--level", level]

    def start(self, name: str, *options: str) -> subprocess.Popen[str]:
        """Start a recorded run called `name`."""
        command = [*self.base, "--record", str(self.scratch / name), "--out", str(self.scratch / f"{name}-out"), *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def diff(self, baseline: str, candidate: str) -> dict[str, Any]:
        """Compare two runs."""
        command = [sys.executable, "-m", "bitcheck", "diff", "--json", str(self.scratch / baseline), str(self.scratch / candidate)]
        answer: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        return answer


def finish(name: str, process: subprocess.Popen[str]) -> None:
    """Wait for a run; end with its error where it failed."""
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}:\n{errors}")


def row(name: str, answer: dict[str, Any], expected: Sequence[str]) -> tuple[str, bool]:
    """Return a table row, and whether the answer is one of those expected."""
    said = answer["cause"] or answer["verdict"]
    first, compared = answer["first"] or {}, answer["compared"]
    good = said in expected
    cells = [name, said if good else f"**{said}**, expected {' or '.join(expected)}", first.get("site") or "",
             str(first.get("step", "")), f"{compared['steps']:,}", f"{compared['events']:,}"]  # fmt: skip
    return f"| {' | '.join(cells)} |", good


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--level", default="module")
    options = parser.parse_args()
    middle = options.steps // 2
    began = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(Path(scratch), options.config, options.level)
        steps = ("--steps", str(options.steps))
        running = {"fresh": job.start("fresh", *steps, "--save-every", str(middle)), "again": job.start("again", *steps)}
        checkpoint = Path(scratch) / "fresh-out" / f"step-{middle:06d}.pt"
        while not checkpoint.exists() and running["fresh"].poll() is None:
            time.sleep(0.2)
        resume = ("--resume", str(checkpoint))
        running["resumed"] = job.start("resumed", *steps, *resume)
        for name, process in running.items():
            finish(name, process)
        for name in ("again", "resumed"):
            rows.append(row(f"fresh, {name}", job.diff("fresh", name), ["identical"]))
        few = ("--steps", str(middle + CONTROL_STEPS))
        for piece in PIECES:
            finish(piece, job.start(piece, *few, *resume, "--leave-out", piece))
            rows.append(row(f"fresh, resumed without {piece}", job.diff("fresh", piece), sorted(RESTORE_CAUSES)))
        finish("racing", job.start("racing", *few, *resume, "--set", "moe.dprob=atomic"))
        rows.append(row("fresh, resumed with moe.dprob=atomic", job.diff("fresh", "racing"), ["backward"]))
    print(f"`python -m benchmarks.proof --config {options.config} --steps {options.steps} --level {options.level}`  ")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, bitcheck {bitcheck.__version__}, "
          f"{os.cpu_count()} cores, {torch.get_num_threads()} threads a run; {time.monotonic() - began:.0f} s\n")  # fmt: skip
    print("| runs | answer | first site | first step | steps | events |\n|---|---|---|---|---|---|")
    print("\n".join(text for text, _ in rows))
    sys.exit(0 if all(good for _, good in rows) else 1)


if __name__ == "__main__":
    main()
