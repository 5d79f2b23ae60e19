"""Every operator that PyTorch has tests for, recorded twice at level `op`: is any told apart from itself?

    python -m benchmarks.operator_sweep --result benchmarks/results/FILE.md

The operators and their inputs are those of PyTorch's own test suite (`torch.testing._internal`, which needs the
package expecttest); each is run forward and backward, a step of the recording each. Two processes do so, and what is
in memory that they are handed differs between them in every byte: an operator's result that depends on it is a fault
of the operator, and what bitcheck takes for a result and is none is a false alarm of bitcheck. Whatever differs is
listed, and makes the exit status 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

import bitcheck
from benchmarks.children import sigterm_exits, stop
from bitcheck.diff import diff_runs
from bitcheck.hooks.op_schema import EMPTY
from bitcheck.run import open_run

BYTES = {"a": 85, "b": 170}
"""A run -> what the C library fills its memory with before it hands it out."""
MEANINGLESS = EMPTY | {"resize_as_"}
"""Operators whose result is whatever memory held."""
MAX_SAMPLES = 4
"""Inputs of each operator that are taken."""


def operators() -> Iterator[tuple[str, Any]]:
    """Yield (name, description) of the operators that take float32 on a CPU."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds, and needs expecttest

    for op in op_db:
        if op.name not in MEANINGLESS and torch.float32 in op.supported_dtypes("cpu"):
            yield ".".join(filter(None, (op.name, op.variant_test_name))), op


def run_once(op: Any) -> None:
    """Run an operator forward and backward on some of its inputs."""
    for sample in list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:MAX_SAMPLES]:
        result = op(sample.input, *sample.args, **sample.kwargs)
        leaves = torch.utils._pytree.tree_leaves(result)
        losses = [leaf.abs().sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        if losses:
            torch.stack(losses).sum().backward()


def record(folder: Path) -> None:
    """Record all operators, a step each, and write their names, and what stopped any, beside the run."""
    warnings.simplefilter("ignore")
    seed_all()
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    done: list[str] = []
    with bitcheck.record(folder, net, optimizer, level="op") as rec:
        for name, op in operators():
            seed_all()
            net(torch.ones(1, 3)).sum().backward()
            with contextlib.suppress(Exception):  # an input that this build cannot take; what ran before it counts
                run_once(op)
            optimizer.step()
            optimizer.zero_grad()
            rec.step()
            done.append(name)
            folder.with_suffix(".json").write_text(json.dumps(done))


def seed_all() -> None:
    """Seed every generator that inputs are drawn from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def describe(folder: Path) -> tuple[list[str], bool]:
    """Compare the two runs; return the result as lines of Markdown, and whether nothing differed."""
    with open_run(folder / "a") as baseline, open_run(folder / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    names = json.loads((folder / "a.json").read_text())
    lines = [
        "# PyTorch's operators recorded twice at level `op`, in memory that held something else",
        "",
        f"{platform.machine()}; PyTorch {torch.__version__}, Python {platform.python_version()}",
        "",
        "    python -m benchmarks.operator_sweep",
        "",
        f"{answer.compared.steps:,} operators, {answer.compared.events:,} events: "
        f"**{len(answer.origins) or 'nothing'}** told apart.",
    ]
    if answer.origins:
        lines += ["", "| operator | what differs first | cause |", "|---|---|---|"]
    lines += [f"| {names[origin.step]} | `{origin.site}` | {origin.cause} |" for origin in answer.origins]
    return lines, not answer.origins


@click.command()
@click.option("--limit", type=float, help="Stop after so many seconds; what both runs have by then is compared.")
@click.option("--result", type=click.Path(path_type=Path), help="Also write the result to this file.")
@click.option("--alone", hidden=True, type=click.Path(path_type=Path))
def main(limit: float | None, result: Path | None, alone: Path | None) -> None:
    """Record every operator in two processes, and compare."""
    if alone is not None:
        record(alone)
        return
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="operator-sweep-") as scratch:
        children: list[subprocess.Popen[bytes]] = []
        deadline = time.perf_counter() + limit if limit is not None else None
        try:
            for name, byte in BYTES.items():
                command = [sys.executable, "-m", "benchmarks.operator_sweep", "--alone", str(Path(scratch) / name)]
                environment = os.environ | {"MALLOC_PERTURB_": str(byte)}  # of the C library
                children.append(subprocess.Popen(command, env=environment))
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(None if deadline is None else max(0.0, deadline - time.perf_counter()))
        finally:
            stop(children)
        lines, is_clean = describe(Path(scratch))
    print("\n".join(lines))
    if result is not None:
        result.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
