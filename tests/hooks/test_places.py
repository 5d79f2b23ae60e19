"""At level `op`: what phase an operation belongs to hangs on the program, and neither on addresses nor on caches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import bitcheck
from bitcheck.diff import diff_runs
from bitcheck.events import Phase
from bitcheck.run import open_run


def phases_of(folder: Path, slot: str) -> list[Phase]:
    """Return the phases of all events with one slot, in order."""
    with open_run(folder) as run:
        rows = run.rank(0)
        return [site.phase for row in range(rows.num_rows) for site in rows.load(row).sites if site.slot == slot]


def test_state_at_the_address_of_data_that_is_gone_is_state(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "a", net, optimizer, level="op"):
        loss = net(torch.ones(2, 3)).sum()
        for _ in range(50):
            torch.tensor([1.0]).neg()
            net.register_buffer("level", torch.tensor([2.0]))
            net.level.abs()
        loss.backward()
        optimizer.step()
    assert phases_of(tmp_path / "a", "aten.neg.default.self") == [Phase.BATCH] * 50
    assert phases_of(tmp_path / "a", "aten.abs.default.self") == [Phase.FORWARD] * 50


def test_data_at_the_address_of_a_gradient_that_is_gone_is_data(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "a", net, optimizer, level="op"):
        loss = net(torch.ones(2, 3)).sum()
        for _ in range(50):
            net.bias.grad = torch.tensor([1.0, 2.0, 3.0])
            net.bias.grad.abs()
            net.bias.grad = None
            torch.tensor([1.0, 2.0, 3.0]).neg()
        loss.backward()
        optimizer.step()
    assert phases_of(tmp_path / "a", "aten.abs.default.self") == [Phase.FORWARD] * 50
    assert phases_of(tmp_path / "a", "aten.neg.default.self") == [Phase.BATCH] * 50


def test_a_backward_that_a_compiler_traces_is_no_backward_of_the_program(tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(net, backend="aot_eager")
    with bitcheck.record(tmp_path / "a", net, optimizer, level="op"):
        for _ in range(3):  # it is traced in the first step
            compiled(torch.ones(2, 3)).exp().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert phases_of(tmp_path / "a", "aten.exp.default.self") == [Phase.FORWARD] * 3


def test_a_generator_of_the_programs_own_is_not_told_to_be_another_at_the_start_of_the_step(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(0)
        net = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with bitcheck.record(tmp_path / name, net, optimizer, level="op"):
            own = torch.Generator().manual_seed(seed)
            (net(torch.ones(2, 3)) * torch.empty(2, 3).uniform_(generator=own)).sum().backward()
            optimizer.step()
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    assert str(answer.origins[0].cause) == "rng"
    assert "aten.uniform_.default draws from has another state there" in answer.explanation
    assert "at the start of" not in answer.explanation
