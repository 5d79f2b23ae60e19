"""Plan a fault, record, diff: the answer names that fault; beside each the twin that has none."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitcheck
from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.errors import RecordingError, UsageError
from bitcheck.events import Level, Phase, StepKind
from bitcheck.hooks.dynamo import paused
from bitcheck.hooks.recorder import Recorder, _Held
from bitcheck.hooks.tensors import digest_tensor
from bitcheck.memory import MemoryStore
from bitcheck.run import open_run

STEPS, FAULT_STEP = 5, 2


class FaultPlan:
    """Flips the lowest bit of one element, at one place, in one step."""

    def __init__(self, place: str = "") -> None:
        self.place = place
        self.step = 0

    def strikes(self, place: str) -> bool:
        return self.place == place and self.step == FAULT_STEP

    def flip(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        """Touch a tensor's memory where no hook and no version counter sees it."""
        if self.strikes(place):
            tensor.detach().numpy().reshape(-1).view("uint32")[5 % tensor.numel()] ^= 1
        return tensor


class FlipGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: FaultPlan, place: str) -> torch.Tensor:
        ctx.plan, ctx.place = plan, place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.plan.flip(ctx.place, gradient.clone()), None, None


class Mix(nn.Module):
    """A linear layer with a fault of every kind on offer."""

    def __init__(self, plan: FaultPlan, width: int) -> None:
        super().__init__()
        self.plan = plan
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = FlipGradient.apply(x, self.plan, "mix backward input")
        weight = FlipGradient.apply(self.weight, self.plan, "mix backward weight")
        self.seen += self.plan.flip("mix buffer", x.detach().mean(0).contiguous())
        return self.plan.flip("mix forward", x @ weight)


class Block(nn.Module):
    def __init__(self, plan: FaultPlan, width: int) -> None:
        super().__init__()
        self.plan = plan
        self.norm, self.mix, self.act = nn.LayerNorm(width), Mix(plan, width), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(self.norm(x))
        hidden = self.plan.flip("block code", hidden * 2)
        hidden = FlipGradient.apply(hidden, self.plan, "block backward code")
        return x + self.act(hidden)


class Net(nn.Module):
    def __init__(self, plan: FaultPlan, width: int = 16) -> None:
        super().__init__()
        self.plan = plan
        self.inp, self.head = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(Block(plan, width) for _ in range(2))
        self.probe = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        x = self.blocks[0](x)
        x = checkpoint(self.block, x, use_reentrant=False)
        if self.plan.strikes("one call more"):
            self.probe(x.detach())
        return self.head(x)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1].act(self.blocks[1].norm(x))


def train(folder: Path, place: str, level: str, **options: Any) -> None:
    plan = FaultPlan(place)
    torch.manual_seed(0)
    model = Net(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    with bitcheck.record(folder, model, optimizer, level=level, **options) as rec:
        rec.track("ema", average)
        for plan.step in range(STEPS):
            if plan.strikes("random state"):
                torch.rand(1)
            x = plan.flip("batch", torch.randn(6, 8))
            if plan.strikes("learning rate"):
                optimizer.param_groups[0]["lr"] = 0.02
            loss = plan.flip("loss", F.dropout(model(x), 0.1).square().mean())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            plan.flip("gradient", model.head.weight.grad)
            optimizer.step()
            plan.flip("parameter", model.head.weight)
            plan.flip("moment", optimizer.state[model.head.weight]["exp_avg"])
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.1)
            plan.flip("average", average["head.weight"])
            rec.step()


def compare(tmp_path: Path, place: str, level: str) -> Answer:
    train(tmp_path / "a", "", level)
    train(tmp_path / "b", place, level)
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        return diff_runs(baseline, candidate)


STATE = {
    "batch": ("data", "batch/Net:in.0"),
    "random state": ("rng", "rng/torch.cpu:state"),
    "mix forward": ("compute", None),  # the loss, a mean, comes out the same
    "loss": ("forward", "loss/loss:value"),
    "mix backward weight": ("compute", None),
    "gradient": ("compute", "grad/head.weight:grad"),
    "learning rate": ("hyperparameter", "scalar/AdamW.0:lr"),
    "parameter": ("optimizer", "param/head.weight:value"),
    "moment": ("optimizer", "optim/head.weight:exp_avg"),
    "average": ("compute", "extra/ema:value.head.weight"),
}
MODULE = {
    "batch": ("data", "batch/Net:in.0", "Net"),
    "random state": ("rng", "rng/torch.cpu:state", None),
    "mix forward": ("forward", "forward/blocks.0.mix:out", "blocks.0.mix"),
    "mix buffer": ("forward", "buffer/blocks.0.mix.seen:value", "blocks.0.mix"),
    "block code": ("forward", "forward/blocks.0:out", "blocks.0"),
    "loss": ("forward", "loss/loss:value", None),
    "mix backward input": ("backward", "backward/blocks.0.mix:grad_in.0", "blocks.0.mix"),
    "mix backward weight": ("backward", "backward/blocks.0.mix.weight:grad", "blocks.0.mix"),
    "block backward code": ("backward", "backward/blocks.0:grad.mix.out", "blocks.0"),
    "gradient": ("compute", "grad/head.weight:grad", "head"),
    "learning rate": ("hyperparameter", "scalar/AdamW.0:lr", None),
    "parameter": ("optimizer", "param/head.weight:value", "head"),
    "moment": ("optimizer", "optim/head.weight:exp_avg", "head"),
    "average": ("compute", "extra/ema:value.head.weight", None),
    "one call more": ("structure", "forward/probe:out", "probe"),
}


@pytest.mark.parametrize("place", STATE)
def test_level_state_names_the_cause_and_the_first_tensor(place: str, tmp_path: Path) -> None:
    answer = compare(tmp_path, place, "state")
    cause, site = STATE[place]
    assert (answer.verdict, str(answer.cause)) == ("diverged", cause), answer.explanation
    assert answer.first is not None
    assert answer.first.step == FAULT_STEP
    assert site is None or answer.first.site == site


@pytest.mark.parametrize("place", MODULE)
def test_level_module_names_the_one_computation_at_fault(place: str, tmp_path: Path) -> None:
    answer = compare(tmp_path, place, "module")
    cause, site, module = MODULE[place]
    assert (answer.verdict, str(answer.cause)) == ("diverged", cause), answer.explanation
    assert answer.first is not None
    assert (answer.first.step, answer.first.site, answer.first.module) == (FAULT_STEP, site, module)
    assert len(answer.origins) == 1, [origin.site for origin in answer.origins]


@pytest.mark.parametrize("level", ["state", "module", "op"])
def test_the_twin_without_a_fault_is_identical(level: str, tmp_path: Path) -> None:
    answer = compare(tmp_path, "", level)
    assert answer.verdict == "identical", answer.explanation
    assert (answer.compared.steps, answer.compared.ranks) == (STEPS, 1)


def test_a_flipped_element_is_located_within_its_leaf(tmp_path: Path) -> None:
    answer = compare(tmp_path, "gradient", "state")
    assert answer.first is not None
    assert answer.first.elements == (0, 63)


def test_steps_and_every_limit_what_is_kept(tmp_path: Path) -> None:
    train(tmp_path / "a", "", "module", steps="1:4", every=2)
    with open_run(tmp_path / "a") as run:
        table = run.rank(0).table
        kept = table["step"][table["kind"] == int(StepKind.STEP)].tolist()
        initial = table["step"][table["kind"] == int(StepKind.INITIAL)].tolist()
    assert (initial, kept) == ([1], [2])


def test_a_resumed_run_is_numbered_from_its_start_step(tmp_path: Path) -> None:
    train(tmp_path / "a", "", "state", start_step=7)
    with open_run(tmp_path / "a") as run:
        assert run.rank(0).table["step"].tolist()[:3] == [6, 7, 8]


def test_an_exception_marks_the_run_failed_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), bitcheck.record(tmp_path / "a", level="state"):
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        model(torch.ones(1, 3))
        _ = 1 / 0
    with open_run(tmp_path / "a") as run:
        assert run.status == "failed"
        assert (run.rank(0).table["kind"] == int(StepKind.STEP)).sum() == 3


def test_a_second_recorder_and_a_folder_in_use_are_refused(tmp_path: Path) -> None:
    with bitcheck.record(tmp_path / "a"):
        with pytest.raises(UsageError, match="being recorded already"), bitcheck.record(tmp_path / "b"):
            pass
        nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(RecordingError):
        bitcheck.record(tmp_path / "a")


def wait_for_rows(folder: Path, num_rows: int) -> None:
    """Wait until so many steps of a run's first rank are in its file."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with open_run(folder, allow_missing_ranks=True) as run:
            if 0 in run.ranks and run.rank(0).num_rows >= num_rows:
                return
        time.sleep(0.01)
    raise AssertionError(f"{folder} has no {num_rows} steps")


def test_a_removed_folder_stops_the_recording_but_not_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitcheck.record(folder, level="state"):
        for step in range(6):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step == 2:
                wait_for_rows(folder, 2)  # steps are written behind the program's back
                folder.rename(tmp_path / "elsewhere")
    told = capfd.readouterr().err
    assert told.count("recording has stopped") == 1, told
    with open_run(tmp_path / "elsewhere") as run:
        assert (run.rank(0).table["kind"] == int(StepKind.STEP)).sum() >= 1


def test_a_strict_recording_that_fails_makes_the_program_fail(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RecordingError), bitcheck.record(folder, level="state", strict=True):
        for step in range(50):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if step == 2:
                folder.rename(tmp_path / "elsewhere")


def test_gradients_are_blamed_on_consumers_and_views_changed_in_place_are_still_seen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "a", model, optimizer):
        model(torch.randn(2, 3, 4)).sum().backward()
        optimizer.step()
    with open_run(tmp_path / "a") as run:
        step = run.rank(0).load(1)
    gradients = {site.text(False) for site in step.sites if site.phase is Phase.BACKWARD}
    assert {"backward/1:grad_in.0", "backward/2:grad_in.0", "backward/0.weight:grad"} <= gradients
    assert not any(name.startswith("backward/0:grad") for name in gradients), "blamed on the producer"


@pytest.mark.parametrize("model_goes_first", [True, False])
def test_the_last_step_has_its_end_state_though_the_model_is_gone_before_the_end(
    model_goes_first: bool, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with bitcheck.record(tmp_path / "a", optimizer=optimizer, level="state"):
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        final = {name: digest_tensor(p.detach())[0] for name, p in model.named_parameters()}
        if model_goes_first:
            del model, optimizer
        else:
            del optimizer, model
    with open_run(tmp_path / "a") as run:
        steps = [run.rank(0).load(row) for row in range(3)]
    phases = [{site.phase for site in step.sites} for step in steps]
    assert phases[2] == phases[1] >= {Phase.PARAM, Phase.OPTIM}
    last = steps[2]
    recorded = {
        site.path: last.digests[index].tobytes() for index, site in enumerate(last.sites) if site.phase is Phase.PARAM
    }
    assert recorded == final


def test_a_model_that_is_collected_in_the_middle_of_the_recorders_own_work_has_its_end_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = MemoryStore()
    recorder = Recorder(lambda: memory)
    recorder.optimizers.add(optimizer)
    threads = []
    take_state = Recorder._take_state

    def watched(self: Recorder, *args: Any) -> None:
        threads.append(threading.current_thread().name)
        take_state(self, *args)

    recorder.start()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(Recorder, "_take_state", watched)
    final = digest_tensor(model.weight.detach())[0]

    @paused
    def at_work() -> None:
        nonlocal model, optimizer
        model = optimizer = None

    at_work()
    recorder.drain()
    assert threads == ["bitcheck-writer"]  # by somebody who was at nothing else
    recorder.stop()
    (step,) = [record for record in memory.records if record.kind is StepKind.STEP]
    weights = [event.digest for event in step.events if event.site.phase is Phase.PARAM and event.site.path == "weight"]
    assert weights == [final]


@pytest.mark.parametrize("level", ["state", "module", "op"])
def test_a_step_is_gone_when_it_is_written_though_no_collector_runs(level: str, tmp_path: Path) -> None:
    frozen, model = nn.Linear(3, 3), nn.Linear(3, 2)
    whole = nn.Sequential(frozen, model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    steps = []
    gc.collect()
    gc.disable()
    try:
        with bitcheck.record(tmp_path / "run", whole, optimizer, level=level) as rec:
            for number in range(8):
                frozen.requires_grad_(number < 3)  # its parameters keep the gradients' events of their last step
                whole(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(weakref.ref(rec._recorder.current))
                rec.step()
                rec._recorder.drain()
            assert sum(step() is not None for step in steps) <= 2
    finally:
        gc.enable()


def test_what_keeps_the_state_for_its_step_is_gone_with_the_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                assert sum(type(found) is _Held for found in gc.get_objects()) == 1
                rec.step()
                assert not [found for found in gc.get_objects() if type(found) is _Held]
    finally:
        gc.enable()


@pytest.mark.parametrize("level", ["state", "op"])
def test_a_closure_after_an_evaluation_opens_the_next_step(level: str) -> None:
    torch.manual_seed(0)
    memory = MemoryStore()
    recorder = Recorder(lambda: memory, level=Level(level))
    net = nn.Linear(6, 6)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    recorder.start(net)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 6)).square().sum()
        loss.backward()
        return loss

    try:
        for _ in range(3):
            optimizer.step(closure)
            net.eval()
            with torch.no_grad():
                net(torch.ones(3, 6)).mean()
            net.train()
    finally:
        recorder.stop()
    assert recorder.trouble is None
    steps = [record for record in memory.records if record.kind is StepKind.STEP]
    rates = [[event.site.text(False) for event in step.events if event.site.slot == "lr"] for step in steps]
    assert rates == [["scalar/0:lr"]] * 3


# --- programs that change while they train


def replace_a_module(folder: Path, is_replaced: bool, fault_step: int | None, keeps_stale: bool = True) -> None:
    """Train; a module, or a parameter alone, is replaced, and one number of the new one's moment changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with bitcheck.record(folder, model, optimizer) as rec:
        for step in range(6):
            if step == 2:
                old = list(model[1].parameters()) if is_replaced else [model[1].weight]
                if is_replaced:
                    model[1] = nn.Linear(4, 4)
                else:
                    model[1].weight = nn.Parameter(torch.ones(4, 4))
                new = list(model[1].parameters()) if is_replaced else [model[1].weight]
                group = optimizer.param_groups[0]
                group["params"] = [each for each in group["params"] if all(each is not one for one in old)] + new
                if not keeps_stale:
                    for one in old:
                        del optimizer.state[one]
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == fault_step:
                optimizer.state[model[1].weight]["exp_avg"].mul_(1.5)
            rec.step()


@pytest.mark.parametrize("is_replaced", [True, False])
@pytest.mark.parametrize("keeps_stale", [True, False])
def test_the_state_of_a_parameter_that_took_anothers_place_is_recorded(
    is_replaced: bool, keeps_stale: bool, tmp_path: Path
) -> None:
    for name, fault_step in (("a", None), ("b", None), ("c", 4), ("d", 5)):
        replace_a_module(tmp_path / name, is_replaced, fault_step, keeps_stale)
    verdicts = []
    for name in "bcd":
        with open_run(tmp_path / "a") as baseline, open_run(tmp_path / name) as candidate:
            answer = diff_runs(baseline, candidate)
            verdicts.append((answer.first.step, answer.first.site) if answer.first is not None else None)
    assert verdicts == [None, (4, "optim/1.weight:exp_avg"), (5, "optim/1.weight:exp_avg")]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_what_the_program_computes_between_two_modules_is_no_modules_and_not_the_losss(
    factor: float, tmp_path: Path
) -> None:
    def train(folder: Path, factor: float) -> None:
        torch.manual_seed(0)
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
        with bitcheck.record(folder, first, optimizer, level="module") as rec:
            for step in range(3):
                between = first(torch.ones(4, 8)) * (factor if step == 1 else 1.0)
                second(between).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.step()

    train(tmp_path / "a", 1.0)
    train(tmp_path / "b", factor)
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    if factor == 1.0:
        assert answer.verdict == "identical"
        return
    assert [(origin.step, origin.site) for origin in answer.origins] == [(1, "forward/Linear_2:in.0")]
    assert "is given other bits" in answer.explanation and "outside its modules" in answer.explanation
    assert "hands to this one" in answer.remedy and "in this module" not in answer.remedy


def test_what_the_initial_snapshot_has_it_has_once(tmp_path: Path) -> None:
    """The second module is met after the first one's state was taken; then what is known already is passed over."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3, momentum=0.9)
    with bitcheck.record(tmp_path / "run", first, optimizer, level="module") as rec:
        for _ in range(2):
            second(first(torch.ones(1, 2))).sum().backward()
            optimizer.step()
            rec.step()
    with open_run(tmp_path / "run") as run:
        initial = run.rank(0).load(0)
    assert initial.kind is StepKind.INITIAL
    names = [site.text(True) for site in initial.sites if site.phase is Phase.PARAM]
    assert "param/Linear.weight:value" in names
    assert not [site for site in initial.sites if site.occurrence], names


def test_of_two_states_of_one_name_the_first_is_recorded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept, other = torch.ones(3), torch.zeros(3)
    with bitcheck.record(tmp_path / "run", model, optimizer) as rec:
        optimizer.state[model.weight] = {1: kept, "1": other}
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rec.step()
    with open_run(tmp_path / "run") as run:
        step = run.rank(0).load(1)
    found = [
        step.digests[index].tobytes()
        for index, site in enumerate(step.sites)
        if (site.phase, site.path, site.slot) == (Phase.OPTIM, "weight", "1")
    ]
    assert found == [digest_tensor(kept)[0]]


@pytest.mark.parametrize("forgotten", ["", "data", "python"])
def test_an_evaluation_before_the_checkpoint_is_not_taken_for_a_generator(forgotten: str, tmp_path: Path) -> None:
    """The evaluation draws, then the checkpoint is saved: the resumed run begins with what that left."""

    def train(folder: Path, saved: dict[str, Any] | None) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        data = torch.Generator().manual_seed(3)
        start = 3 if saved is not None else 0
        if saved is not None:
            model.load_state_dict(saved["model"])
            if forgotten != "data":
                data.set_state(saved["data"])
            if forgotten != "python":
                random.setstate(saved["python"])
        with bitcheck.record(folder, model, optimizer, level="module", start_step=start) as rec:
            for step in range(start, 6):
                model.train()
                (model(torch.randn(2, 4, generator=data)).square().sum() * random.random()).backward()
                optimizer.step()
                optimizer.zero_grad()
                rec.step()
                if step == 2:
                    model.eval()
                    with torch.no_grad():
                        assert model(torch.ones(2, 4)).mean() * random.random() < 1e9
                    parameters = {name: value.clone() for name, value in model.state_dict().items()}
                    kept = {"model": parameters, "data": data.get_state(), "python": random.getstate()}
        return kept if saved is None else saved

    train(tmp_path / "b", train(tmp_path / "a", None))
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    found = [(origin.site, str(origin.cause)) for origin in answer.origins]
    entering = {"data": ("batch/Linear:in.0", "data"), "python": ("rng/python:state", "rng")}
    evaluation = [("batch/Linear:in.0@eval", "structure")]
    if forgotten:
        assert entering[forgotten] in found
    else:
        assert found == evaluation
        assert "the training state is equal" in answer.explanation
    assert (("rng/python:state", "rng") in found) == (forgotten == "python")
