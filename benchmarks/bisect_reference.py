"""The bisections on real programs: the reference trainer with known faults, and a history of 60 commits.

    python benchmarks/bisect_reference.py [--config nano-hybrid] [--output FILE] [--switches | --commits]

*Switches*: for each switch of the reference trainer, `bisect kernels` gets all of them, but only this one
has its free form for a suspect form; the suspect form of the others is a variable that nobody reads. Then
two at once. Every run is a process of its own, on a CPU, where the free forms draw their order from the
operating system's entropy (`bitcheck.reference_runs.arrival`).

*Commits*: a repository of 60 commits of a small training program is made, in one of which a gradient
begins to be changed in some runs only (30 %), and `bisect commits` looks for it with real runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bitcheck.switches import Form, SwitchSet, reference_switches

NUM_COMMITS = 60
FAULT = 37
TRAINING = """import os
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
lucky = int.from_bytes(os.urandom(2), "big") < {threshold}
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    if lucky and step == 1:
        model[0].weight.grad[3, 5] *= 1 + 1e-6 * int.from_bytes(os.urandom(1), "big")
    optimizer.step()
# change {number}
"""


def toml(switches: SwitchSet, planted: Sequence[str]) -> str:
    """Return a file of switches in which only the planted ones have a suspect form that does anything."""

    def form(value: Form) -> str:
        return f"{{ args = {json.dumps(list(value.args))} }}"

    lines = []
    for number, switch in enumerate(switches.switches):
        suspect = form(switch.suspect) if switch.name in planted else f'{{ env = {{ UNREAD_{number} = "1" }} }}'
        reproducible = form(switch.reproducible) if switch.name in planted else "{}"
        lines.append(f'[switches."{switch.name}"]\nreproducible = {reproducible}\nsuspect = {suspect}\n')
    return "\n".join(lines)


def bisect_switches(config: str, planted: Sequence[str], folder: Path) -> tuple[str, list[list[str]], int, float, str]:
    """Run `bisect kernels`; return (verdict, sets, runs, seconds, where the first set parts)."""
    folder.mkdir(parents=True)
    (folder / "switches.toml").write_text(toml(reference_switches(), planted), encoding="utf-8")
    program = [sys.executable, "-m", "bitcheck", "reference", "train", "--config", config, "--steps", "2", "--quiet"]
    command = ["bisect", "kernels", "--switches", "switches.toml", "--steps", "2", "--json", "--", *program]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bitcheck", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        return done.stderr.strip().splitlines()[-2], [], 0, seconds, ""
    answer = json.loads(done.stdout)
    sets = [one["switches"] for one in answer["sets"]]
    verdict = "right" if sorted(map(tuple, sets)) == sorted((name,) for name in planted) else "wrong"
    return verdict, sets, answer["runs"], seconds, answer["sets"][0]["where"]


def report_switches(config: str) -> str:
    """Return a table: each switch alone, and two pairs of them at once."""
    names = reference_switches().names
    plants = [[name] for name in names] + [["moe.dprob", "norm.dweight"], ["moe.combine", "attention.backward"]]
    rows = [
        "| planted | answer | named | programs run | seconds | where two runs first part |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="bisect-reference-") as scratch:
        for number, planted in enumerate(plants):
            verdict, sets, runs, seconds, where = bisect_switches(config, planted, Path(scratch, str(number)))
            named = "; ".join(" + ".join(one) for one in sets)
            rows.append(f"| {' and '.join(planted)} | {verdict} | {named} | {runs} | {seconds:.0f} | {where} |")
            print(rows[-1], file=sys.stderr, flush=True)
    return f"## `bisect kernels`, configuration {config}, 2 steps, 95 % confidence\n\n" + "\n".join(rows) + "\n"


def report_commits() -> str:
    """Return what `bisect commits` found in a history with a fault that shows in 30 % of the runs."""
    # A run differs from another where at least one of them has the fault's luck: 1 - (1 - p)^2 = 0.3.
    threshold = round((1 - 0.7**0.5) * 65536)
    with tempfile.TemporaryDirectory(prefix="bisect-commits-") as scratch:
        repository = Path(scratch, "repository")
        repository.mkdir()

        def git(*arguments: str) -> str:
            done = subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True)
            return done.stdout.strip()

        git("init", "--quiet", "--initial-branch", "main")
        git("config", "user.name", "nobody")
        git("config", "user.email", "nobody@example.org")
        for number in range(NUM_COMMITS):
            text = TRAINING.format(threshold=threshold if number >= FAULT else 0, number=number)
            (repository / "train.py").write_text(text, encoding="utf-8")
            git("add", "train.py")
            git("commit", "--quiet", "-m", f"change {number}")
        commits = git("rev-list", "--reverse", "main").split()
        before = git("status", "--porcelain=v2", "--branch")
        command = ["bisect", "commits", "--steps", "3", "--json", commits[0], "main", "--", sys.executable, "train.py"]
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "bitcheck", *command], cwd=repository, stdout=subprocess.PIPE, text=True, check=False
        )
        seconds = time.perf_counter() - began
        answer = json.loads(done.stdout)
        untouched = git("status", "--porcelain=v2", "--branch") == before + "\n? bitcheck-bisect-commits/"
    found = "right" if answer["first_bad"] == commits[FAULT] else f"wrong: {answer['subject']}"
    judged = "\n".join(f"| {one['subject']} | {one['verdict']} | {one['num_pairs']} |" for one in answer["judged"])
    return (
        f"## `bisect commits`, {NUM_COMMITS} commits, a fault that shows in 30 % of the pairs, 95 % confidence\n\n"
        f"The fault came with change {FAULT}; found: {found} ({answer['subject']}, {100 * answer['sure']:.1f} % sure), "
        f"{answer['runs']} programs run in {seconds:.0f} s; two runs of it part in {answer['where']}. "
        f"The checkout was {'left as it was' if untouched else 'CHANGED'}.\n\n"
        f"| commit | verdict | pairs of runs |\n|---|---|---|\n{judged}\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="nano-hybrid")
    parser.add_argument("--switches", action="store_true", help="the switches alone")
    parser.add_argument("--commits", action="store_true", help="the commits alone")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    parts = [f"# The bisections on real programs, on a CPU\n\n{(__doc__ or '').split(chr(10) * 2, 2)[2].strip()}\n"]
    if not options.commits:
        parts.append(report_switches(options.config))
    if not options.switches:
        parts.append(report_commits())
    text = "\n".join(parts)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
