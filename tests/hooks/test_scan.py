"""Every operation executed twice: which disagree with themselves, why, and the training none the wiser."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitcheck.hooks import replay
from bitcheck.hooks.scan import ScanHooks, ScanRecorder, _Fresh, _Nowhere

_chance = random.SystemRandom()
_library = torch.library.Library("bitcheck_tests_scan", "DEF")
_library.define("noisy(Tensor x) -> Tensor")
_library.define("seeded(Tensor x) -> Tensor")
_library.define("quiet(Tensor x) -> Tensor")
_library.impl("noisy", lambda x: x + _chance.random(), "CPU")
_library.impl("quiet", lambda x: x * 2, "CPU")
_library.impl("seeded", lambda x: x + random.random() + np.random.random() + np.random.normal(), "CPU")
_library.define("noisy_(Tensor(a!) x) -> ()")
_library.define("holes(Tensor x) -> Tensor")
ops = torch.ops.bitcheck_tests_scan


def _add_noise(x: torch.Tensor) -> None:
    x.add_(_chance.random())


def _holes(x: torch.Tensor) -> torch.Tensor:
    """Sums over a buffer of which it filled the first half."""
    buffer = torch.empty(2 * x.numel())
    buffer[: x.numel()] = x.reshape(-1)
    return buffer.sum() + x


_library.impl("noisy_", _add_noise, "CPU")
_library.impl("holes", _holes, "CPU")

Forward = Callable[[torch.Tensor], torch.Tensor]


class Body(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self._forward(self.fc(x)))


def train(forward: Forward, steps: int = 2, seed: int = 3) -> dict[str, torch.Tensor]:
    """Train for a few steps; return all state, generators too."""
    torch.manual_seed(seed)
    net = nn.Sequential(Body(forward))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    state = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    state |= {
        f"{i}.{key}": value.clone() for i, held in enumerate(optimizer.state.values()) for key, value in held.items()
    }
    return state | {"rng": torch.get_rng_state()}


def scan(forward: Forward, poison: bool = False, steps: int = 2) -> dict[str, Any]:
    recorder = ScanRecorder(_Nowhere, poison=poison)
    recorder.start()
    try:
        train(forward, steps)
    finally:
        recorder.stop()
    return recorder.scanner.report(recorder.num_steps)


def found(report: dict[str, Any]) -> list[tuple[str, str, str, int]]:
    return [(each["kind"], each["module"], each["op"], each["disagreed"]) for each in report["findings"]]


@pytest.mark.parametrize("poison", [False, True])
def test_a_program_that_repeats_itself_has_no_finding(poison: bool) -> None:
    report = scan(torch.relu, poison)
    assert report["findings"] == [] and report["steps"] == 2
    assert report["executed"] > 30 and report["skipped"] == {}


@pytest.mark.parametrize("poison", [False, True])
def test_the_training_has_the_bits_of_a_bare_run(poison: bool) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().mul_(2.0)
        x[:, 0] = torch.rand(len(x))
        return nn.functional.dropout(x.index_add(0, torch.tensor([1, 1]), x[:2]), 0.2)

    bare = train(forward)
    recorder = ScanRecorder(_Nowhere, poison=poison)
    recorder.start()
    try:
        scanned = train(forward)
    finally:
        recorder.stop()
    assert recorder.scanner.report(0)["findings"] == []
    assert bare.keys() == scanned.keys()
    assert [name for name in bare if not torch.equal(bare[name], scanned[name])] == []


def test_an_operation_that_disagrees_with_itself_is_named_with_module_count_and_line() -> None:
    report = scan(lambda x: x + ops.noisy(x.detach()), steps=3)
    assert found(report) == [("race", "0", "bitcheck_tests_scan.noisy.default", 3)]
    (finding,) = report["findings"]
    assert finding["executed"] == 3 and finding["first_step"] == 0 and finding["phase"] == "forward"
    assert finding["elements"] == finding["of"] == 30
    assert "test_scan.py" in finding["line"]


@pytest.mark.parametrize("poison", [False, True])
def test_an_operator_whose_python_draws_draws_what_it_would_in_a_bare_run(
    poison: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitcheck.hooks.scan._has_other_threads", lambda: False)  # those of pytest-xdist draw nothing

    def run(is_scanned: bool) -> tuple[dict[str, torch.Tensor], object, str, dict[str, Any]]:
        random.seed(1)
        np.random.seed(1)
        recorder = ScanRecorder(_Nowhere, poison=poison)
        if is_scanned:
            recorder.start()
        try:
            state = train(lambda x: ops.seeded(x.detach()) + x)
        finally:
            recorder.stop()
        return state, random.getstate(), repr(np.random.get_state()), recorder.scanner.report(0)

    (bare, *bare_states, _), (scanned, *scanned_states, report) = run(False), run(True)
    assert [name for name in bare if not torch.equal(bare[name], scanned[name])] == []
    assert bare_states == scanned_states
    assert report["findings"] == [] and report["skipped"] == {}


def test_what_another_thread_draws_is_no_operations() -> None:
    def draw() -> None:
        while not is_over.is_set() and len(drawn) < 10**6:
            drawn.append(random.random())
            time.sleep(1e-6)  # lets the other thread run

    random.seed(1)
    drawn: list[float] = []
    is_over = threading.Event()
    drawer = threading.Thread(target=draw)
    drawer.start()
    try:
        report = scan(lambda x: ops.quiet(x.detach()) + x, steps=40)
    finally:
        is_over.set()
        drawer.join()
    random.seed(1)
    assert len(drawn) > 100
    assert drawn == [random.random() for _ in drawn]
    tried = sum(each["executed"] for each in report["findings"]) + sum(report["skipped"].values())
    assert tried <= 40 and all("another thread" in reason for reason in report["skipped"])


def test_an_operation_that_writes_in_place_keeps_its_first_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chance, "random", iter([0.25, 0.5]).__next__)
    x = torch.ones(3)
    recorder = ScanRecorder(_Nowhere, poison=False)
    recorder.start()
    try:
        ops.noisy_(x)
    finally:
        recorder.stop()
    assert x.tolist() == [1.25] * 3
    assert [each["outputs"] for each in recorder.scanner.report(0)["findings"]] == [["x.written"]]


def test_an_operation_of_backward_bears_its_node() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ops.noisy(grad)

    (finding,) = scan(Noisy.apply)["findings"]
    assert (finding["phase"], finding["node"], finding["module"]) == ("backward", "NoisyBackward", "0")


def test_a_genuine_race_is_found() -> None:
    """Threads add into 8 sums in the order in which they come; how often that shows is a matter of chance."""
    rows, values = torch.randint(0, 8, (32768,)), torch.randn(32768)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(8).index_put_((rows,), values, accumulate=True).sum()

    torch.set_num_threads(2)
    try:
        with replay.load(torch.device("cpu"), 1):
            rounds = (scan(forward, steps=20)["findings"] for _ in range(40))
            findings = next((each for each in rounds if each), [])
    finally:
        torch.set_num_threads(1)
    assert {(each["op"], each["kind"]) for each in findings} == {("aten.index_put_.default", "race")}


# ---------------------------------------------------------------- memory that nobody wrote


def half_written(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(2, 6)
    buffer[0] = x[0].detach()
    return x + buffer.sum(0)


def test_a_read_of_memory_that_nobody_wrote_is_found_where_it_is_read() -> None:
    report = scan(half_written, poison=True)
    assert found(report) == [("uninitialised", "0", "aten.sum.dim_IntList", 2)]
    assert scan(half_written)["findings"] == []  # nothing disagrees with itself: the same memory both times


def test_memory_that_nobody_wrote_is_followed_through_copies() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(2, 6)
        buffer[0] = x[0].detach()
        copy = torch.cat([buffer.clone(), buffer]).t().contiguous()
        return x + copy.t().mean(0)

    assert found(scan(forward, poison=True)) == [("uninitialised", "0", "aten.mean.dim", 2)]


@pytest.mark.parametrize(
    "fill",
    [
        lambda b, x: b.copy_(x),
        lambda b, x: b.fill_(2.0),
        lambda b, x: torch.add(x, 1.0, out=b),
        lambda b, x: b.normal_(),
        lambda b, x: [row.copy_(value) for row, value in zip(b, x, strict=True)],
        lambda b, x: b.numpy().fill(3.0),
        lambda b, x: b.index_copy_(0, torch.arange(5), x),
    ],
)
def test_memory_that_was_written_in_whatever_way_is_no_finding(fill: Callable[[Any, Any], object]) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(5, 6)
        fill(buffer, x.detach())
        return x + buffer.exp()

    assert scan(forward, poison=True)["findings"] == []


def test_memory_that_is_written_behind_the_back_with_what_it_already_held_counts_as_written() -> None:
    left = torch.full((5, 6), 3.0)  # as memory is that was freed and handed out again
    fresh = _Fresh(left.untyped_storage(), left.element_size(), written=False)
    now = left.view(-1).view(torch.uint8)
    assert fresh.unwritten(0, 120, now).all()
    left.numpy().fill(3.0)
    assert not fresh.unwritten(0, 120, now).any()


def test_padding_that_is_never_read_is_no_finding() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        padded = torch.empty(8, 6)
        padded[:5] = x.detach()
        return x + padded.clone()[:5].exp()

    assert scan(forward, poison=True)["findings"] == []


def test_a_custom_operator_that_reads_its_own_fresh_memory_is_no_race() -> None:
    report = scan(lambda x: x + ops.holes(x.detach()), poison=True, steps=1)
    assert found(report) == [("uninitialised", "0", "bitcheck_tests_scan.holes.default", 1)]


def test_a_custom_operator_that_disagrees_with_itself_is_a_race_with_poison_too() -> None:
    report = scan(lambda x: x + ops.noisy(x.detach()), poison=True, steps=1)
    assert ("race", "0", "bitcheck_tests_scan.noisy.default", 1) in found(report)


@pytest.mark.parametrize(
    "turn", [lambda y: y.transpose_(0, 1).t_(), lambda y: y.unsqueeze_(0).squeeze_(0), lambda y: y.swapaxes_(0, 1).t_()]
)
def test_a_shape_changed_in_place_is_no_finding(turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert scan(lambda x: x + turn(x.detach() * 2), poison=True)["findings"] == []


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(
    "use", [lambda c: c.conj().resolve_conj(), lambda c: c.conj() * 2, lambda c: (c.conj().imag * 3).to(c.dtype)]
)
def test_a_conjugate_or_negative_view_is_no_finding(use: Callable[[torch.Tensor], torch.Tensor], poison: bool) -> None:
    assert scan(lambda x: x + use(torch.complex(x, x * 2)).real, poison)["findings"] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_scanning_goes_on_after_nested_tensors() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x.detach()[:2], x.detach()[2:]])
        return x + torch.nested.to_padded_tensor(nested, 0.0).sum()

    report = scan(forward)
    assert report["steps"] == 2 and report["stopped"] is None


def test_what_stops_the_scanning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot locate")

    monkeypatch.setattr(ScanHooks, "_locate", refuse)
    assert "cannot locate" in scan(lambda x: x)["stopped"]
