"""The Python line of an operation, and which operation's it is within backward."""

from __future__ import annotations

import torch
from torch import nn

from bitcheck.events import Level
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryStore
from bitcheck.wording import word_line


class Doubled(torch.autograd.Function):
    """A function whose backward is Python of the program's own."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.cosh()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.sinh()


class Net(nn.Module):
    """A module whose operations are all of different names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Doubled.apply(self.weight * x)
        return doubled.exp().sum()


def lines_of_a_step() -> dict[str, str]:
    """Train for a step; return the line of each operation by its phase and name."""
    store = MemoryStore()
    recorder = Recorder(lambda: store, level=Level.OP, with_lines=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    recorder.start(net)
    try:
        net(torch.ones(4)).backward()
        optimizer.step()
    finally:
        recorder.stop()
    return {
        f"{event.site.phase}/{event.site.slot.split('.')[1]}": event.value
        for record in store.records
        for event in record.events
        if event.value is not None and event.site.slot.startswith("aten.") and ".out" in event.site.slot
    }


def test_a_line_within_backward_is_told_as_the_forwards_unless_it_runs_there() -> None:
    lines = lines_of_a_step()
    assert "test_lines.py:" in lines["forward/exp"] and lines["forward/exp"].endswith(" in forward")
    assert not lines["forward/exp"].startswith("of the forward")
    own, of_exp = lines["backward/sinh"], lines["backward/mul"]
    assert "test_lines.py:" in own and own.endswith(" in backward") and not own.startswith("of the forward"), own
    assert of_exp.startswith("of the forward, line ") and of_exp.endswith(" in forward"), of_exp


def test_a_line_is_said_as_what_it_is() -> None:
    assert word_line("train.py:3 in forward") == "asked for by train.py:3 in forward"
    assert word_line("of the forward, line train.py:3 in forward") == "of the forward, line train.py:3 in forward"
