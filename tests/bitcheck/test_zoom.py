"""The step that parted, recorded again at level op. The programs run in this process, recorded as ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bitcheck.answer import Cause, EnvironmentDifference, Origin
from bitcheck.cli.zoom import describe
from bitcheck.diff import diff_runs
from bitcheck.errors import ProgramFailed, RecordingError, UsageError
from bitcheck.events import Level
from bitcheck.hooks import replay
from bitcheck.hooks.recorder import Recorder
from bitcheck.launch import Ending, Watch
from bitcheck.repro import Confirmation, run_repro
from bitcheck.run import create_run, rank_path, update_run
from bitcheck.settings import Options, parse_steps
from bitcheck.store import RankWriter
from bitcheck.trials import Trial
from bitcheck.zoom import ZoomPlan, confirm, find_checkpoints, zoom
from bitcheck.zoom_answer import Side, ZoomAnswer, all_agreed, no_operation
from tests.bitcheck.made_up_runs import make_run

STEPS = 4


_library = torch.library.Library("bitcheck_tests_zoom", "DEF")
_library.define("scale(Tensor x, float by) -> Tensor")
_state = {"fault": 0.0}
_library.impl("scale", lambda x, by: x * by + _state["fault"], "CPU")


class Net(nn.Module):
    """Adds rows into a few sums; where it is faulty, memory changes that no operation wrote."""

    def __init__(self, has_faulty_operation: bool = False) -> None:
        super().__init__()
        self.has_faulty_operation = has_faulty_operation
        self.weight = nn.Parameter(torch.ones(4))
        self.fault = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(4).index_add(0, torch.tensor([0, 1, 1, 3]), x * self.weight)
        if self.has_faulty_operation:
            _state["fault"] = self.fault
            return sums.exp() + torch.ops.bitcheck_tests_zoom.scale(sums.detach(), 2.0)
        if self.fault:
            with torch.no_grad():
                sums.numpy()[1] += self.fault  # no operation: memory that somebody else writes
        return sums.exp()


@dataclass
class Programs:
    """Runs trials: the command's first word chooses what the program does in its so-manieth run."""

    faulty_at: Callable[[str, int], int | None]
    """(program, how many times it ran before) -> the step of its fault."""
    status: int = 0
    ran: list[tuple[str, Options]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    variables: list[Mapping[str, str | None]] = field(default_factory=list)

    def __call__(self, trial: Trial, watch: Watch) -> Ending:
        name = trial.command[0]
        before = sum(ran == name for ran, _ in self.ran)
        self.ran.append((name, trial.options))
        self.variables.append(trial.variables)
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        trial.log.write_text("what it printed\n")
        first = int(trial.command[1]) if len(trial.command) > 1 else 0
        self.starts.append(first)
        record(trial.folder, list(trial.command), trial.options, self.faulty_at(name, before), first, trial.cwd)
        return Ending(self.status)


def record(
    folder: Path, command: list[str], options: Options, faulty: int | None, first: int = 0, cwd: Path | None = None
) -> Path:
    info = {"run_id": folder.name, "level": options.level, "world_size": 1, "start_step": options.start_step}
    info |= {"command": command, "cwd": str(cwd or folder.parent), "leaves": "all", "recorder": "run"}
    create_run(folder, info, overwrite=False)

    def open_store() -> RankWriter:
        path = rank_path(folder, 0)
        level = Level(options.level)
        return RankWriter(path, rank=0, world_size=1, level=level, run_id=folder.name, leaf_limit_bytes=None)

    torch.manual_seed(0)
    net = Net(has_faulty_operation=command[0].endswith("!"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = torch.randn(STEPS, 4)
    with torch.no_grad():
        net.weight.mul_(1 + first)  # a resumed program starts from another state
    steps = (None, None) if options.steps is None else parse_steps(options.steps)
    recorder = Recorder(
        open_store,
        level=Level(options.level),
        start_step=options.start_step or 0,
        steps=steps,
        capture=options.capture,
        with_lines=options.stacks,
    )
    recorder.start(net)
    try:
        for step in range(first, STEPS):
            net.fault = 0.5 if step == faulty else 0.0
            optimizer.zero_grad()
            net(batches[step]).sum().backward()
            optimizer.step()
    finally:
        recorder.stop()
    update_run(folder, status="complete", ended="2026-01-31T12:34:56Z", environment={"torch.version": "2"})
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[ZoomPlan]:
    """Two runs at level module that part in step 2, and where zoom may work."""
    for name, faulty in (("a", None), ("b", 2)):
        record(tmp_path / name, [name], Options(), faulty)
    yield ZoomPlan(tmp_path / "a", tmp_path / "b", tmp_path / "scratch")


def test_a_program_whose_recording_at_level_op_failed_is_no_answer(plan: ZoomPlan) -> None:
    programs = Programs(always)

    def failing(trial: Trial, watch: Watch) -> Ending:
        ending = programs(trial, watch)
        if trial.command[0] == "b":
            rank_path(trial.folder, 0).unlink()
            writer = RankWriter(
                rank_path(trial.folder, 0), rank=0, world_size=1, level=Level.OP, run_id=trial.folder.name,
                leaf_limit_bytes=None,
            )  # fmt: skip
            writer.close("failed")
            update_run(trial.folder, notes=["the disk is full"])
        return ending

    with pytest.raises(RecordingError, match=r"candidate of pair 1 could not be recorded .*the disk is full"):
        zoom(plan, failing)


def always(name: str, before: int) -> int | None:
    return 2 if name == "b" else None


def test_only_the_step_that_parted_is_recorded_at_level_op_and_the_operation_is_named(plan: ZoomPlan) -> None:
    programs = Programs(always)
    answer = zoom(plan, programs)
    assert [(name, options.level, options.steps) for name, options in programs.ran] == [
        ("a", "op", "2:3"),
        ("b", "op", "2:3"),
    ]
    assert answer.diff.first is not None and answer.diff.first.step == 2
    assert answer.diff.first.op == "aten.exp.default"  # the first operation that read what no operation wrote
    assert answer.pairs == 1
    assert answer.to_json()["zoom"]["steps"] == "2:3" and answer.to_json()["schema"] == "bitcheck.diff/1"


def test_around_records_more_steps(plan: ZoomPlan) -> None:
    programs = Programs(always)
    zoom(ZoomPlan(plan.baseline, plan.candidate, plan.scratch, around=1), programs)
    assert {options.steps for _, options in programs.ran} == {"1:4"}


def test_a_fault_of_chance_is_repeated_until_a_pair_diverges(plan: ZoomPlan) -> None:
    programs = Programs(lambda name, before: 2 if name == "b" and before == 2 else None)
    answer = zoom(ZoomPlan(plan.baseline, plan.candidate, plan.scratch, tries=5), programs)
    assert answer.pairs == 3 and len(programs.ran) == 6
    assert answer.diff.verdict == "diverged"


def test_pairs_that_all_agree_say_so_and_bound_the_rate(plan: ZoomPlan) -> None:
    answer = zoom(ZoomPlan(plan.baseline, plan.candidate, plan.scratch, tries=2), Programs(lambda name, before: None))
    assert answer.diff.verdict == "identical" and answer.pairs == 2
    assert "one of chance" in answer.diff.explanation and "step 2" in answer.diff.explanation
    assert "steps 2:3" in answer.diff.explanation and "hides it" in answer.diff.explanation
    assert "--tries" in answer.diff.remedy and "`bitcheck scan --poison -- CMD`" in answer.diff.remedy


def test_programs_find_the_variables_that_they_were_recorded_with(
    plan: ZoomPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    common = {"MALLOC_PERTURB_": "85", "CUDA_VISIBLE_DEVICES": "3"}
    update_run(plan.baseline, variables=common | {"MKL_CBWR": "AVX2"})
    update_run(plan.candidate, variables=common)
    programs = Programs(always)
    zoom(plan, programs)
    for variables, own in zip(programs.variables, ("AVX2", None), strict=True):
        assert (variables["MALLOC_PERTURB_"], variables["MKL_CBWR"], variables["OMP_DYNAMIC"]) == ("85", own, None)
        assert "CUDA_VISIBLE_DEVICES" not in variables and "PATH" not in variables


def test_devices_in_which_the_runs_differ_are_restored(plan: ZoomPlan) -> None:
    update_run(plan.baseline, variables={"CUDA_VISIBLE_DEVICES": "0"})
    update_run(plan.candidate, variables={"CUDA_VISIBLE_DEVICES": "1"})
    programs = Programs(always)
    zoom(plan, programs)
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in programs.variables] == ["0", "1"]


def test_of_runs_that_do_not_say_what_they_were_started_with_the_differences_are_restored(
    plan: ZoomPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    update_run(plan.baseline, environment={"env.MKL_CBWR": "AVX2", "env.OMP_NUM_THREADS": "1"})
    update_run(plan.candidate, environment={"env.OMP_NUM_THREADS": "1"})
    programs = Programs(always)
    zoom(plan, programs)
    assert programs.variables == [{"MKL_CBWR": "AVX2"}, {"MKL_CBWR": None}]


def test_variables_given_to_zoom_win(plan: ZoomPlan) -> None:
    for run in (plan.baseline, plan.candidate):
        update_run(run, variables={"MALLOC_PERTURB_": "85"})
    programs = Programs(always)
    zoom(replace(plan, candidate_variables={"MALLOC_PERTURB_": "17"}), programs)
    assert [variables["MALLOC_PERTURB_"] for variables in programs.variables] == ["85", "17"]


def test_an_environment_that_is_no_longer_as_it_was_is_noted(plan: ZoomPlan) -> None:
    update_run(plan.baseline, environment={"torch.version": "1"})
    answer = zoom(plan, Programs(always))
    notes = [note for note in answer.diff.notes if "another environment" in note]
    assert notes == ["The baseline ran again in another environment than it was recorded in: torch.version 1 -> 2."]


def test_a_pair_that_parts_before_the_step_is_recorded_again_from_the_start(plan: ZoomPlan) -> None:
    programs = Programs(lambda name, before: 1 if name == "b" else None)
    answer = zoom(ZoomPlan(plan.baseline, plan.candidate, plan.scratch, tries=3), programs)
    assert [options.steps for _, options in programs.ran] == ["2:3", "2:3", "0:3", "0:3"]
    assert answer.diff.first is not None and answer.diff.first.step == 1


def test_identical_runs_run_nothing(plan: ZoomPlan) -> None:
    programs = Programs(always)
    answer = zoom(ZoomPlan(plan.baseline, plan.baseline, plan.scratch), programs)
    assert answer.diff.verdict == "identical" and not programs.ran
    assert any("no step to record again" in note for note in answer.diff.notes)


def test_a_program_that_fails_is_no_verdict(plan: ZoomPlan) -> None:
    with pytest.raises(ProgramFailed, match=r"baseline of pair 1.*exit status 3"):
        zoom(plan, Programs(always, status=3))


def test_a_run_that_recorded_itself_cannot_be_repeated(plan: ZoomPlan) -> None:
    update_run(plan.baseline, recorder="record")
    with pytest.raises(UsageError, match="recorded by bitcheck"):
        zoom(plan, Programs(always))


def test_a_resume_template_begins_at_the_nearest_checkpoint(plan: ZoomPlan, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:03d}.ckpt").touch()
    programs = Programs(lambda name, before: 2 if before % 2 else None)
    answer = zoom(
        ZoomPlan(
            plan.baseline,
            plan.candidate,
            plan.scratch,
            resume_template="resumed {step} {checkpoint}",
            checkpoints="step-{step}.ckpt",
        ),
        programs,
    )
    assert programs.starts == [2, 2]
    assert [options.start_step for _, options in programs.ran] == [2, 2]
    assert answer.diff.first is not None and answer.diff.first.op == "aten.exp.default"


def test_a_resume_template_without_its_word_is_refused(plan: ZoomPlan) -> None:
    bad = ZoomPlan(plan.baseline, plan.candidate, plan.scratch, resume_template="train.py", checkpoints="x-{step}")
    with pytest.raises(UsageError, match=r"\{checkpoint\}"):
        zoom(bad, Programs(always))


def test_checkpoints_are_found_in_folders_and_by_absolute_paths(tmp_path: Path) -> None:
    for step in (5, 10):
        (tmp_path / f"ckpt-{step}").mkdir()
        (tmp_path / f"ckpt-{step}" / "all.pt").touch()
    assert sorted(find_checkpoints("ckpt-{step}/all.pt", tmp_path)) == [5, 10]
    assert sorted(find_checkpoints(f"{tmp_path}/ckpt-{{step}}/all.pt", Path("/"))) == [5, 10]
    assert find_checkpoints("none-{step}/all.pt", tmp_path) == {}


def test_the_line_of_the_operation_is_in_the_answer_with_stacks(plan: ZoomPlan) -> None:
    answer = zoom(ZoomPlan(plan.baseline, plan.candidate, plan.scratch, stacks=True), Programs(always))
    assert answer.diff.first is not None and answer.diff.first.line is not None
    assert "test_zoom.py" in answer.diff.first.line and "in forward" in answer.diff.first.line


def test_an_argument_that_differs_cannot_be_confirmed(plan: ZoomPlan, tmp_path: Path) -> None:
    programs = Programs(always)
    confirmed = confirm(plan, zoom(plan, programs), 5, tmp_path / "fault", programs)
    assert confirmed.script is None and not confirmed.advice
    assert "what aten.exp.default was given" in confirmed.obstacle
    assert "`bitcheck scan --poison -- CMD`" in confirmed.obstacle


def test_without_an_operation_it_is_said_why_and_what_is_next(plan: ZoomPlan, tmp_path: Path) -> None:
    programs = Programs(lambda name, before: None)
    confirmed = confirm(plan, zoom(plan, programs), 5, tmp_path / "fault", programs)
    assert "No pair recorded again parts" in confirmed.obstacle and "--tries" in confirmed.obstacle
    assert len(programs.ran) == 2  # no further run for inputs that nobody knows


@pytest.mark.parametrize(
    ("phase", "site", "op", "missing_in", "words"),
    [
        ("batch", "batch/Net:in.0", None, None, "is a batch"),
        ("forward", "forward/program:aten.add.Tensor.self", "aten.add.Tensor", None, "was given"),
        ("forward", "forward/program:aten.add.Tensor.scalars#2", "aten.add.Tensor", None, "Python made them"),
        (
            "grad",
            "grad/program:aten.mul_.Tensor.self.written",
            "aten.mul_.Tensor",
            "baseline",
            "missing in the baseline",
        ),
        ("forward", "forward/Net:out", "OptimizedModule", None, "not the result of one dispatched operation"),
    ],
)
def test_an_origin_that_is_no_operations_result_is_told_apart(
    phase: str, site: str, op: str | None, missing_in: str | None, words: str
) -> None:
    first = Origin(2, 0, phase, site, None, op, site, "float32", (4,), None, Cause.FORWARD, missing_in=missing_in)
    with_first = replace(diff_runs(make_run(), make_run()), first=first, cause=first.cause)
    assert words in no_operation(with_first) and "Next: " in no_operation(with_first)


def test_executions_that_all_agree_say_what_was_tried_and_what_is_next() -> None:
    first = Origin(
        2, 0, "forward", "x:aten.mm.default.out", None, "aten.mm.default", "x", "float32", (4,), None, Cause.FORWARD
    )
    alike = replace(diff_runs(make_run(), make_run()), first=first, cause=first.cause)
    unlike = replace(alike, environment=(EnvironmentDifference("env.OMP_NUM_THREADS", "1", None),))
    side = Side("baseline", ("python",), None, 0, {}, "all", {})
    confirmation = Confirmation("aten.mm.default", 50, 0, 1, (0.0, 0.07), "agreed")
    texts = [
        all_agreed(ZoomAnswer(alike, each, 1, "2:3", None, (side, side)), confirmation) for each in (alike, unlike)
    ]
    assert all("50 executions" in text and "step 2" in text for text in texts)
    assert "alignment of memory" in texts[0] and "env.OMP_NUM_THREADS (1 -> unset)" in texts[1]


def test_inputs_of_the_operation_found_are_saved_for_a_script(plan: ZoomPlan, tmp_path: Path) -> None:
    for name, faulty in (("c!", None), ("d!", 2)):
        record(tmp_path / name, [name], Options(), faulty)
    plan = ZoomPlan(tmp_path / "c!", tmp_path / "d!", plan.scratch)
    programs = Programs(lambda name, before: 2 if name == "d!" else None)
    answer = zoom(plan, programs)
    assert answer.diff.first is not None and answer.diff.first.op == "bitcheck_tests_zoom.scale.default"
    confirmed = confirm(plan, answer, 0, tmp_path / "fault", programs)
    assert confirmed.script == tmp_path / "fault" / "repro.py" and not confirmed.obstacle
    data = torch.load(tmp_path / "fault" / "repro.pt", weights_only=True)
    _state["fault"] = 0.0
    torch.manual_seed(0)
    (result,) = replay.execute(data)
    assert data["args"][1] == ("value", 2.0) and result.shape == (4,)
    with pytest.raises(ProgramFailed, match=r"exit status 2.*import the library"):
        run_repro(confirmed.script, 3)
    shutil.rmtree(plan.scratch / "capture")
    unconfirmed = confirm(plan, answer, 3, tmp_path / "fault", programs)
    assert unconfirmed.script == confirmed.script and unconfirmed.confirmation is None
    assert "import the library" in unconfirmed.obstacle and "Traceback" not in unconfirmed.obstacle
    (*_, said) = describe(answer, unconfirmed, keeps_script=True, missing="not confirmed and no script")
    assert said.startswith("not confirmed: bitcheck_tests_zoom.scale.default could not be executed")
