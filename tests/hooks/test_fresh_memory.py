"""Memory that was handed out and not yet written, at level `op`: what is in it is chance, and no fault by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level
from bitcheck.hooks.op_schema import facts_of
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStore
from tests.two_memories import compare_in_two_memories

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


def scattered_by_halves(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    for half in (fresh[:4], fresh[4:]):
        half.scatter_(0, order[:4].argsort(), order[:4])
    return fresh


def scaled_to_nothing(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return torch.addmv(fresh, order.outer(order), order, beta=0)


def scaled(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return torch.addmv(fresh, order.outer(order), order, beta=1)


def read(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh + order


def added_to(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.add_(order)


def read_beside_what_was_written(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    fresh[:4] = order[:4]
    return fresh[3:] + 1


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
            weight = use(order, fresh).float().mean()
            (net(torch.ones(3, 8)) * weight).sum().backward()
            optimizer.step()
        finally:
            recorder.stop()
        run = MemoryRun({0: memory.records}, level=Level.OP, status="complete", environment={}, info={})
        runs.append(run)
    return diff_runs(*runs)


@pytest.mark.parametrize("use", [indexed, scattered, halves, scattered_by_halves, scaled_to_nothing])
def test_what_is_written_over_is_not_read(use: Use) -> None:
    answer = compare(use)
    assert answer.verdict == "identical", answer.explanation


@pytest.mark.parametrize(
    ("use", "op"),
    [
        (read, "aten.add.Tensor"),
        (scaled, "aten.addmv.default"),
        (read_beside_what_was_written, "aten.add.Tensor"),
        (added_to, "aten.add_.Tensor"),
        (written_in_part, "aten.scatter_.src"),
    ],
)
def test_what_reads_it_or_passes_it_on_is_named(use: Use, op: str) -> None:
    answer = compare(use)
    assert answer.first is not None
    assert op in str(answer.first.site)
    if answer.cause == "data":
        assert "never written" in answer.explanation
    assert "torch.empty" in answer.remedy and "`bitcheck scan --poison -- CMD`" in answer.remedy


RECURRENT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.ModuleList([nn.LSTM(24, 40, 2, batch_first=True), nn.GRU(40, 8, batch_first=True), nn.BatchNorm1d(8)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(5, 17, 24)
y = net[2](net[1](net[0](x)[0])[0][:, -1])
y.square().mean().backward()
optimizer.step()
"""


def test_room_that_an_operator_works_in_is_no_result_of_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECURRENT)
    answer = compare_in_two_memories(
        tmp_path, lambda run: ["bitcheck", "run", "--level", "op", "-o", run, "--", sys.executable, "train.py"]
    )
    assert answer.verdict == "identical", answer.explanation


def test_which_outputs_are_room_to_work_in() -> None:
    aten = torch.ops.aten
    flash = facts_of(aten._scaled_dot_product_flash_attention.default)
    assert [flash.is_private(f"out.{place}") for place in range(9)] == [False] * 6 + [True] * 3
    assert facts_of(aten.mkldnn_rnn_layer_backward.default).unread == {"workspace"}
    assert not facts_of(aten.native_batch_norm.default).private
