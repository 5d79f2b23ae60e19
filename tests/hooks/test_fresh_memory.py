"""Memory that was handed out and not yet written, at level `op`: what is in it is chance, and no fault by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStore

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What is done with (a permutation, fresh memory of its shape)."""


def indexed(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    fresh[order] = torch.arange(len(order))
    return fresh


def scattered(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.scatter_(0, order, torch.arange(len(order)))


def halves(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    fresh[:4] = order[4:]
    fresh[4:] = order[:4]
    return fresh


def read(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh + order


def added_to(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.add_(order)


def written_in_part(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.scatter_(0, order[:4], order[:4])


def compare(use: Use) -> Answer:
    """Record a step twice, with other bits in fresh memory the second time."""
    runs = []
    for left_behind in (1, 2):
        memory = MemoryStore()
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        order = torch.randperm(8)
        recorder = Recorder(lambda: memory, level=Level.OP)  # noqa: B023  called at once
        recorder.start(net)
        try:
            fresh = torch.empty_like(order)
            fresh.numpy()[:] = left_behind  # as whoever had the memory before may have left it
            weight = use(order, fresh).float()
            (net(torch.ones(3, 8)) * weight).sum().backward()
            optimizer.step()
        finally:
            recorder.stop()
        run = MemoryRun({0: memory.records}, level=Level.OP, status="complete", environment={}, info={})
        runs.append(run)
    return diff_runs(*runs)


@pytest.mark.parametrize("use", [indexed, scattered, halves])
def test_what_is_written_over_is_not_read(use: Use) -> None:
    answer = compare(use)
    assert answer.verdict == "identical", answer.explanation


@pytest.mark.parametrize(
    ("use", "op"),
    [(read, "aten.add.Tensor"), (added_to, "aten.add_.Tensor"), (written_in_part, "aten.scatter_.src")],
)
def test_what_reads_it_or_passes_it_on_is_named(use: Use, op: str) -> None:
    first = compare(use).first
    assert first is not None
    assert op in str(first.site)
