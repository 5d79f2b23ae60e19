"""Which autograd nodes a gradient's event names: all between it and the gradients that it is computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level
from bitcheck.hooks import gradients
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStore

_state = {"fault": 0.0}


class Faulty(torch.autograd.Function):
    """Doubles; its backward can be made to give other bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + _state["fault"]


def faulty(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Faulty.apply(x)  # type: ignore[no-untyped-call]
    return result


class Functional(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def compare(*functions: Callable[[torch.Tensor], torch.Tensor]) -> Answer:
    """Record a step of a model of a layer and these functions twice, with a faulty backward the second time."""
    runs = []
    for fault in (0.0, 0.5):
        memory = MemoryStore()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), *map(Functional, functions))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        recorder = Recorder(lambda: memory, level=Level.MODULE)  # noqa: B023  called at once
        recorder.start(net)
        _state["fault"] = fault
        try:
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        finally:
            recorder.stop()
            _state["fault"] = 0.0
        runs.append(MemoryRun({0: memory.records}, level=Level.MODULE, status="complete", environment={}, info={}))
    return diff_runs(*runs)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (faulty, "FaultyBackward"),
        (lambda x: faulty(x.view(-1)).view(2, 4), "FaultyBackward"),
        (lambda x: faulty(faulty(x)), "FaultyBackward"),
        (lambda x: faulty(x).sin(), "FaultyBackward after SinBackward0"),
        (lambda x: faulty(x * 3), "MulBackward0 after FaultyBackward"),
        (lambda x: faulty((x * 3).t()).t().sin(), "MulBackward0 after FaultyBackward, SinBackward0"),
    ],
)
def test_every_node_that_may_be_at_fault_is_named_and_no_other(
    function: Callable[[torch.Tensor], torch.Tensor], op: str
) -> None:
    answer = compare(function)
    assert [(origin.site, origin.op) for origin in answer.origins] == [("backward/1:grad_in.0", op)]
    assert ("Which of these autograd nodes did" in answer.explanation) == (" after " in op)


def test_what_lies_behind_a_recorded_gradient_is_not_named() -> None:
    answer = compare(lambda x: x.sin(), faulty, lambda x: x.exp())
    assert [(origin.site, origin.op) for origin in answer.origins] == [("backward/2:grad_in.0", "FaultyBackward")]


def test_branches_that_meet_are_all_named() -> None:
    answer = compare(lambda x: (lambda y: faulty(y) + y.sin())(x * 3))
    assert answer.first is not None and answer.first.op is not None
    nearest, _, others = answer.first.op.partition(" after ")
    assert nearest == "MulBackward0"
    assert set(others.split(", ")) == {"FaultyBackward", "SinBackward0", "AddBackward0"}


def test_of_too_many_nodes_the_farthest_are_left_out_and_custom_functions_last() -> None:
    names: tuple[str, ...] = ()
    for own in ("OneBackward0", "CustomBackward", "TwoBackward0", "ViewBackward0", "ThreeBackward0", "FourBackward0"):
        names = gradients._passed[own, names]
    assert names == ("FourBackward0", "ThreeBackward0", "TwoBackward0", "CustomBackward", "...")
    assert gradients._worded[names] == "FourBackward0 after ThreeBackward0, TwoBackward0, CustomBackward, ..."
    assert gradients._passed["FiveBackward0", names] == (
        "FiveBackward0", "FourBackward0", "ThreeBackward0", "CustomBackward", "...",
    )  # fmt: skip


def test_what_only_hands_a_gradient_on_is_named_where_there_is_nothing_else() -> None:
    names = gradients._passed["TBackward0", gradients._passed["ViewBackward0", ()]]
    assert names == ("TBackward0",)
    assert gradients._passed["MulBackward0", names] == ("MulBackward0",)
