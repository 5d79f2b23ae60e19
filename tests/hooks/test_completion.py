"""What nobody waits for is held no longer than its step, and is never read when it is no longer the result."""

from __future__ import annotations

import functools
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bitcheck
from bitcheck.events import Phase
from bitcheck.hooks.callers import _object_functions
from bitcheck.hooks.completion import Completions
from bitcheck.hooks.recorder import active_recorder
from bitcheck.hooks.steps import UNREAD
from bitcheck.run import open_run
from tests.hooks.programs import train_on_ones as train

pytestmark = pytest.mark.usefixtures("group_of_one")


def finish(work: dist.Work) -> None:
    """Let a work be complete without a word of it to the recorder."""
    while not is_completed(work):
        pass


is_completed = torch._C._distributed_c10d.Work.is_completed


def test_a_devices_result_that_nobody_waits_for_is_let_go_of_at_the_end_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_nothing_left(own: Completions, work: object) -> bool:  # a device's results are read for nobody's asking
        return not any(promised.results for promised in own._pending[id(work)][1])

    monkeypatch.setattr(Completions, "_is_on_host", is_nothing_left)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = []
    with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
        for _ in range(3):
            reduced = torch.ones(4)
            gone.append(weakref.ref(reduced))
            finish(dist.all_reduce(reduced, async_op=True))
            train(model, optimizer)
            del reduced
            rec.step()
            recorder = active_recorder()
            assert recorder is not None and recorder.collectives is not None
            held = recorder.collectives.completions
            assert not held._pending and not held.flying and not held._futures
            assert all(tensor() is None for tensor in gone)
    with open_run(tmp_path / "run") as run:
        missed = [run.rank(0).load(row).unobserved for row in range(1, 4)]
    assert missed == [{"asynchronous collectives that were not waited for": 1}] * 3


def test_a_result_that_the_program_changed_before_anybody_saw_it_is_not_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
        kept, changed = torch.ones(4), torch.ones(4)
        finish(dist.all_reduce(kept, async_op=True))
        dist.all_reduce(torch.ones(1))  # reads it
        finish(dist.all_reduce(changed, async_op=True))
        changed.add_(1)
        dist.all_reduce(torch.ones(1))
        train(model, optimizer)
        rec.step()
    with open_run(tmp_path / "run") as run:
        step = run.rank(0).load(1)
    digests = [
        step.digests[index].tobytes()
        for index, site in enumerate(step.sites)
        if site.phase is Phase.COMM and site.slot == "out.0"
    ]
    assert [digest == UNREAD for digest in digests] == [False, False, True, False]
    assert step.unobserved == {"asynchronous collectives that were not waited for": 1}


def recorded_step(folder: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """Return the digests of what the first step's collectives gave and took, by site, and what was not observed."""
    with open_run(folder) as run:
        step = run.rank(0).load(1)
    digests = {
        site.text(False): step.digests[index].tobytes()
        for index, site in enumerate(step.sites)
        if site.phase is Phase.COMM
    }
    return digests, step.unobserved


def test_a_tensor_that_changes_its_shape_while_a_collective_writes_it_is_not_read(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
        for change in (
            lambda tensor: None,
            lambda tensor: tensor.resize_(2),
            lambda tensor: tensor.unsqueeze_(0),
            lambda tensor: tensor.t_(),
        ):
            reduced = torch.ones(2, 2)
            work = dist.all_reduce(reduced, async_op=True)
            change(reduced)
            work.wait()
        dist.all_reduce(torch.ones(2, 2))
        train(model, optimizer)
        rec.step()
    digests, unobserved = recorded_step(tmp_path / "run")
    outputs = [digests[f"comm/all_reduce.sum.world:out.0{number}"] for number in ("", "#1", "#2", "#3", "#4")]
    assert [digest == UNREAD for digest in outputs] == [False, True, True, True, False]
    assert outputs[0] == outputs[4]
    changed = "the program changed the tensor's shape or strides while a collective wrote it"
    assert unobserved == {f"comm/all_reduce.sum.world:out.0{number}: {changed}": 1 for number in ("#1", "#2", "#3")}


def test_a_sparse_collective_is_counted_and_the_recording_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
        rows = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), check_invariants=True)
        dist.all_reduce(rows)
        dist.all_reduce(torch.ones(4))
        train(model, optimizer)
        rec.step()
    digests, unobserved = recorded_step(tmp_path / "run")
    assert "comm/all_reduce.sum.world:out.0#1" in digests
    assert "comm/all_reduce.sum.world:in.0.indices" in digests
    [(sentence, count)] = unobserved.items()
    assert "not strided" in sentence and count == 1


def test_a_function_of_torch_distributed_without_code_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _object_functions.cache_clear()
    monkeypatch.setattr(dist.distributed_c10d, "gather_object", functools.partial(dist.gather_object))
    try:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
            dist.all_gather_object([None], {"a": 1})
            dist.all_reduce(torch.ones(4))
            train(model, optimizer)
            rec.step()
    finally:
        _object_functions.cache_clear()
    digests, unobserved = recorded_step(tmp_path / "run")
    assert set(digests) == {"comm/all_reduce.sum.world:in.0", "comm/all_reduce.sum.world:out.0"}
    assert not unobserved
