"""Follows a run of the trainer without a word."""

from __future__ import annotations

from pathlib import Path

from bitcheck.reference_runs.train import StepReport


class Silent:
    """Follows a run and keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.checkpoints: list[Path] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_checkpoint(self, path: Path) -> None:
        self.checkpoints.append(path)
