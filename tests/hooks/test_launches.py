"""Launches of Triton kernels and operations of other threads: what the dispatcher does not show."""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from bitcheck.diff import diff_runs
from bitcheck.events import Level, StepRecord
from bitcheck.hooks.recorder import Recorder
from bitcheck.hooks.scan import ScanRecorder, _Nowhere
from bitcheck.memory import MemoryRun, MemoryStore

triton = pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
import triton.language as tl  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAULT = {"scale": 0.0}


@triton.jit
def scale_kernel(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * factor, mask=at < n)


def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """A launch whose buffer nobody wrote before it; a planted fault changes what is in it afterwards."""
    out = torch.empty_like(x)
    scale_kernel[(1,)](x, out, factor, x.numel(), BLOCK=32)
    return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        return h + scale(h.detach())


def train(recorder: Recorder, forward_alone: bool = False) -> None:
    torch.manual_seed(0)
    net = Net().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.start(net)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(3, 4, device=DEVICE)).sum().backward()
            optimizer.step()
    finally:
        recorder.stop()


def record() -> tuple[MemoryRun, list[StepRecord]]:
    memory = MemoryStore()
    train(Recorder(lambda: memory, level=Level.OP))
    run = MemoryRun({0: memory.records}, level=Level.OP, status="complete", environment={}, info={"digest_version": 1})
    return run, memory.records


def test_a_launch_is_an_operation_with_its_pointers_before_and_after() -> None:
    _, records = record()
    sites = [event.site.text(False) for event in records[1].events]
    launch = [site for site in sites if "triton.scale_kernel" in site]
    assert launch == [
        "forward/Net:triton.scale_kernel.x_ptr",
        *[site for site in launch if "scalars" in site],
        "forward/Net:triton.scale_kernel.x_ptr.written",
        "forward/Net:triton.scale_kernel.out_ptr.written",
    ]
    groups = [group.op for group in records[1].groups if group.kind == "op"]
    assert groups.count("triton.scale_kernel") == 1
    assert not [op for op in groups if "set_" in op or "new_empty" in op], "the interpreter's own work is not recorded"


def test_what_a_kernel_wrote_is_an_input_of_what_reads_it() -> None:
    _, records = record()
    events = records[1].events
    (written,) = [at for at, event in enumerate(events) if event.site.slot == "triton.scale_kernel.out_ptr.written"]
    readers = [event.site.slot for event in events if written in event.inputs]
    assert "aten.add.Tensor.other" in readers


def test_a_kernel_that_gives_other_bits_on_equal_inputs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline, _ = record()
    original = type(scale_kernel).run

    def faulty(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        original(kernel, *args, **kwargs)
        args[1].view(-1)[3] += 1.0

    monkeypatch.setattr(type(scale_kernel), "run", faulty)
    candidate, _ = record()
    answer = diff_runs(baseline, candidate)
    assert answer.first is not None
    assert answer.first.site == "forward/Net:triton.scale_kernel.out_ptr.written"
    assert answer.first.op == "triton.scale_kernel" and answer.cause == "forward"
    assert len([origin for origin in answer.origins if origin.step == 0]) == 1


class CachingAutotuner:
    """Named as the class of Inductor's kernels, with arguments named as Inductor names them."""

    arg_names = ("in_ptr0", "out_ptr0", "out_ptr1", "ws_ptr", "xnumel")
    inductor_meta: ClassVar[dict[str, str]] = {"kernel_name": "fused"}

    def run(self, *args: Any) -> None:
        x, out, total, scratch, _ = args
        out.copy_(x * 2)
        total += x.sum()
        scratch.fill_(1.0)


def past_the_dispatcher(like: torch.Tensor, value: float) -> torch.Tensor:
    """Memory of which no dispatched operation tells, holding `value` by chance."""
    return torch.from_numpy(np.full(tuple(like.shape), value, np.float32))


@pytest.mark.parametrize("chance", [0.0, 5.0])
def test_what_inductors_kernels_only_write_is_not_read_before_them(chance: float, monkeypatch: Any) -> None:
    from torch._inductor.runtime import triton_heuristics

    monkeypatch.setattr(triton_heuristics, "CachingAutotuner", CachingAutotuner)

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.fc(x)
            out, scratch = past_the_dispatcher(h, chance), past_the_dispatcher(h, chance)
            total = torch.zeros(())
            CachingAutotuner().run(h.detach(), out, total, scratch, h.numel())
            return h * out * total

    memory = MemoryStore()
    recorder = Recorder(lambda: memory, level=Level.OP)
    torch.manual_seed(0)
    net = Fused()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.start(net)
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    recorder.stop()
    slots = {
        event.site.slot.removeprefix("triton.fused.")
        for record in memory.records
        for event in record.events
        if "triton.fused" in event.site.slot
    }
    assert slots == {"in_ptr0", "in_ptr0.written", "out_ptr0.written", "out_ptr1", "out_ptr1.written", "scalars"}


def test_everything_is_put_back_when_recording_ends() -> None:
    before = type(scale_kernel).run
    record()
    assert type(scale_kernel).run is before


def test_scan_launches_a_kernel_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ScanRecorder(_Nowhere, poison=True)
    train(recorder)
    assert recorder.scanner.report(2)["findings"] == []
    original, draws = type(scale_kernel).run, iter(range(1, 100))

    def wobbly(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        original(kernel, *args, **kwargs)
        args[1].view(-1)[3] += next(draws)

    monkeypatch.setattr(type(scale_kernel), "run", wobbly)
    recorder = ScanRecorder(_Nowhere, poison=False)
    train(recorder)
    (finding,) = recorder.scanner.report(2)["findings"]
    assert (finding["op"], finding["disagreed"], finding["elements"]) == ("triton.scale_kernel", 2, 1)
    assert finding["outputs"] == ["out_ptr.written"]


def test_operations_of_other_threads_are_counted_as_unobserved() -> None:
    memory = MemoryStore()
    recorder = Recorder(lambda: memory, level=Level.OP)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder.start(net)
    try:
        net(torch.ones(1, 2)).sum().backward()
        thread = threading.Thread(target=lambda: torch.ones(3).mul(2).add(1), name="helper")
        thread.start()
        thread.join()
        optimizer.step()
    finally:
        recorder.stop()
    unobserved = {phrase: count for record in memory.records for phrase, count in record.unobserved.items()}
    assert unobserved == {"operations in thread helper, which is not looked into": 3}
    assert threading.Thread._bootstrap_inner.__module__ == "threading"  # type: ignore[attr-defined]
