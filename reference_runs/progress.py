"""How a training run tells a person where it is: a live line on a terminal, plain lines in a pipe.

The live line is rich's and goes to stderr; plain lines go to stdout, one a step:

    step     12  loss 3.4182  grad norm 1.204  lr 1.30e-03  2,412 tokens/s

With expert parallelism it ends in how many of its experts a token meets at each node that it visits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bitcheck.reference_runs.train import StepReport


def format_step(report: StepReport) -> str:
    """Return a step's line."""
    spread = "" if report.experts_per_node is None else f"  {report.experts_per_node:.2f} experts a node"
    return (
        f"step {report.step:6d}  loss {report.loss:.4f}  grad norm {report.grad_norm:.3f}  lr {report.lr:.2e}"
        f"  {report.tokens / report.seconds:,.0f} tokens/s{spread}"
    )


class ProgressLine:
    """Follows a run to `steps`; a context manager, silent where `is_quiet`."""

    def __init__(self, steps: int, is_quiet: bool = False, stdout: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._is_quiet = is_quiet
        self._steps = steps
        self._line: Progress | None = None
        if not is_quiet and sys.stderr.isatty():
            # Text, not markup: a path may have brackets in it.
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
            self._line = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> ProgressLine:
        if self._line is not None:
            self._line.start()
            self._line.add_task("starting", total=self._steps)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()

    def on_step(self, report: StepReport) -> None:
        """Show a step."""
        if self._line is not None:
            task = self._line.task_ids[0]
            self._line.update(task, description=format_step(report), completed=report.step + 1)
        elif not self._is_quiet:
            print(format_step(report), file=self._stdout, flush=True)

    def on_checkpoint(self, path: Path) -> None:
        """Say where a checkpoint was written."""
        if self._is_quiet:
            return
        if self._line is not None:
            self._line.console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"wrote {path}", file=self._stdout, flush=True)
