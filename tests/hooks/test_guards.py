"""What programs do that a recorder easily gets wrong: each was once recorded wrongly, or broke the program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import bitcheck
from bitcheck.diff import diff_runs
from bitcheck.errors import RecordingError, UsageError
from bitcheck.events import StepKind
from bitcheck.hooks.recorder import Recorder, active_recorder
from bitcheck.run import open_run

Body = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def record(folder: Path, body: Body, level: str = "module", steps: int = 3, **options: Any) -> list[tuple[int, int]]:
    """Record `steps` rounds of `body` and return (step number, kind) of every row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with bitcheck.record(folder, model, optimizer, level=level, **options):
        for step in range(steps):
            body(model, optimizer, step)
    with open_run(folder) as run:
        table = run.rank(0).table
        return [(int(row["step"]), int(row["kind"])) for row in table]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


WHOLE = [(-1, StepKind.INITIAL), (0, StepKind.STEP), (1, StepKind.STEP), (2, StepKind.STEP), (3, StepKind.FRAGMENT)]


def unobserved(folder: Path) -> dict[str, int]:
    with open_run(folder) as run:
        reader = run.rank(0)
        return {key: n for row in range(reader.num_rows) for key, n in reader.load(row).unobserved.items()}


def test_a_constant_that_forward_and_backward_read_is_data_in_both(tmp_path: Path) -> None:
    constant = torch.from_numpy(torch.arange(4.0).numpy())

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        (model[0](torch.ones(3, 4)) * constant).sum().backward()
        optimizer.step()

    assert record(tmp_path / "a", body, "op") == WHOLE


def test_tensors_edited_between_micro_batches_are_recorded_at_level_op(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for _ in range(2):
            x = torch.ones(2, 4)
            x[:, 0] = 1
            x[torch.tensor(1), 2] = 0
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert record(tmp_path / "a", body, "op") == WHOLE


def test_a_step_goes_on_after_an_optimizers_closure_raised(tmp_path: Path) -> None:
    def fail() -> float:
        raise RuntimeError("no loss")

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            with pytest.raises(RuntimeError):
                optimizer.step(fail)
        plain(model, optimizer, step)

    assert record(tmp_path / "a", body) == WHOLE


def test_training_in_eval_mode_after_train_mode_still_ends_its_steps(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model.train(step == 0)
        plain(model, optimizer, step)

    assert record(tmp_path / "a", body) == WHOLE


def test_a_generator_of_losses_reaches_backward(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        torch.autograd.backward(model(torch.ones(1, 4)).sum() for _ in range(2))
        assert model[0].weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()

    assert record(tmp_path / "a", body) == WHOLE


def test_what_is_tracked_and_cannot_be_had_is_counted_and_the_rest_is_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "a", model, optimizer, level="state") as rec:
        rec.track("broken", lambda: {}["missing"])
        rec.track("opaque", object())
        rec.track("average", nn.Linear(4, 2))
        rec.track("loader", {"position": 3, "order": torch.arange(4)})
        for _ in range(2):
            plain(model, optimizer, 0)
    with open_run(tmp_path / "a") as run:
        step = run.rank(0).load(1)
    names = {site.text(False) for site in step.sites if site.phase == "extra"}
    assert names >= {"extra/average:value.weight", "extra/loader:value.position", "extra/loader:value.order"}
    assert {sentence.partition(":")[0] for sentence in step.unobserved} == {"what is tracked as broken", "extra/opaque"}


class Unhashable(nn.Module):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_modules_are_told_apart_by_identity(tmp_path: Path) -> None:
    extra = Unhashable()

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model(extra(torch.ones(3, 4))).sum().backward()
        optimizer.step()

    assert record(tmp_path / "a", body) == WHOLE


def test_a_recording_that_cannot_begin_leaves_the_programs_own_modes_alone(tmp_path: Path) -> None:
    def refuse() -> Any:
        raise RecordingError("no room")

    model, x = nn.Linear(8, 8), torch.ones(3, 8)
    told: list[Exception] = []
    with FlopCounterMode(display=False) as bare:
        model(x)
    recorder = Recorder(refuse, level="op", on_trouble=told.append)  # type: ignore[arg-type]
    recorder.start()
    with FlopCounterMode(display=False) as counted:
        model(x)
    recorder.stop()
    assert counted.get_total_flops() == bare.get_total_flops() > 0
    assert len(told) == 1
    assert active_recorder() is None


class CountingMode(TorchFunctionMode):
    def __init__(self) -> None:
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["state", "module", "op"])
def test_a_function_mode_sees_nothing_of_the_recorder(level: str, tmp_path: Path) -> None:
    def count() -> int:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with CountingMode() as mode:
            for _ in range(2):
                plain(model, optimizer, 0)
        return mode.calls

    bare = count()
    with bitcheck.record(tmp_path / "a", level=level):
        recorded = count()
    assert recorded == bare > 0


def test_an_optimizer_made_anew_keeps_its_name(tmp_path: Path) -> None:
    def train(folder: Path, rounds: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bitcheck.record(folder, model, optimizer):
            for _ in range(rounds):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                plain(model, optimizer, 0)

    train(tmp_path / "a", 3)
    with open_run(tmp_path / "a") as run:
        roots = {site.root for row in (1, 2, 3) for site in run.rank(0).load(row).sites if site.phase == "scalar"}
    assert roots == {"SGD"}


def test_state_kept_under_an_object_has_a_name_without_an_address(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            optimizer.state[object()] = {"count": 1}  # type: ignore[index]
        plain(model, optimizer, step)

    for name in "ab":
        assert record(tmp_path / name, body) == WHOLE
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        assert diff_runs(baseline, candidate).verdict == "identical"


def test_a_forked_child_trains_on_and_leaves_the_parents_run_alone(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        plain(model, optimizer, step)
        if step != 1:
            return
        child = os.fork()
        if child == 0:
            for _ in range(10):
                plain(model, optimizer, step)
            os._exit(7 if active_recorder() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    assert record(tmp_path / "a", body) == WHOLE


def test_a_module_with_weights_of_its_own_may_come_and_go_within_a_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    first = torch.optim.SGD([model.weight], lr=0.1)
    second = torch.optim.SGD([model.bias], lr=0.1)
    with bitcheck.record(tmp_path / "a", model, [first, second]):
        for _ in range(3):
            projection = nn.Linear(2, 2)
            projection(model(torch.ones(3, 4))).sum().backward()
            first.step()
            del projection
            second.step()
    with open_run(tmp_path / "a") as run:
        assert (run.rank(0).table["kind"] == int(StepKind.STEP)).sum() == 3


class NamedVariable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = torch.ones(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_a_function_that_keeps_something_called_variable_is_no_leaf(tmp_path: Path) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model[2](NamedVariable.apply(model[0](torch.ones(3, 4)))).sum().backward()
        optimizer.step()

    record(tmp_path / "a", body)
    with open_run(tmp_path / "a") as run:
        step = run.rank(0).load(1)
    names = [site.text(False) for site in step.sites]
    upstream = names.index("backward/0.weight:grad")
    inputs = {names[i] for i in step.inputs[step.input_ptr[upstream] : step.input_ptr[upstream + 1]]}
    assert any(name.startswith("backward/") for name in inputs)
    assert unobserved(tmp_path / "a") == {}


@pytest.mark.parametrize(("reduce", "is_told"), [(torch.max, True), (torch.prod, True), (torch.sum, False)])
def test_gradients_that_pytorch_computes_otherwise_while_operations_are_looked_at_are_told(
    reduce: Callable[[torch.Tensor], torch.Tensor], is_told: bool, tmp_path: Path
) -> None:
    def body(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        reduce(model(torch.ones(3, 4))).backward()
        optimizer.step()

    for level in ("module", "op"):
        record(tmp_path / level, body, level)
        with open_run(tmp_path / level) as run:
            remarks = [remark for row in range(run.rank(0).num_rows) for remark in run.rank(0).load(row).remarks]
        assert any("may not be those of the bare program" in remark for remark in remarks) == (
            is_told and level == "op"
        )


def test_a_step_before_the_first_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="start_step=-3: expected 0 or more"):
        bitcheck.record(tmp_path / "a", start_step=-3)
    assert not (tmp_path / "a").exists()
