"""The gate on made-up programs: what passes, what fails, and every way in which it could pass on nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitcheck.answer import Answer
from bitcheck.control import run_control, run_replica_control
from bitcheck.diff import diff_runs
from bitcheck.errors import UsageError
from bitcheck.events import Phase
from bitcheck.gate import GateResult, GateVerdict, Plan, judge, runs_for, write_answer
from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaAnswer, ReplicaVerdict
from bitcheck.report.gate import render_gate, render_junit, render_markdown
from bitcheck.run import open_run
from bitcheck.settings import Options
from bitcheck.trials import Trial
from tests.bitcheck.made_up_programs import Behaviour, MadeUpPrograms, write_run

PROGRAM = ("python", "train.py")
GOOD = Behaviour()


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up programs take no time, so the follower must not spare them its looks."""
    monkeypatch.setattr("bitcheck.follow._SHARE", 0)


def gate(tmp_path: Path, *behaviours: Behaviour, compare: Any = diff_runs, **plan: Any) -> GateResult:
    runner = MadeUpPrograms(*behaviours)
    return judge(Plan(PROGRAM, tmp_path / "gate", **plan), runner=runner, compare=compare)


def golden(tmp_path: Path, behaviour: Behaviour, level: str = "module") -> Path:
    folder = tmp_path / "golden"
    write_run(Trial("golden", PROGRAM, folder, tmp_path / "golden.log", Options(level=level)), behaviour)
    return folder


# ---------------------------------------------------------------------- verdicts


def test_equal_runs_pass_with_all_their_steps(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, runs=3)
    assert (result.verdict, result.exit_status) == (GateVerdict.PASS, 0)
    assert result.explanation == "3 fresh runs have the same bits in every recorded tensor of 6 steps."
    assert [each.answer.compared.steps for each in result.comparisons] == [6, 6]
    assert result.num_identical_pairs == 2


def test_a_run_that_parts_fails_and_is_named_with_step_and_site(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, parts_at=3))
    assert (result.verdict, result.exit_status) == (GateVerdict.FAIL, 1)
    assert result.failing is not None and result.failing.answer.first is not None
    assert (result.failing.answer.first.step, result.failing.answer.first.site) == (3, "forward/body:out")


def test_a_run_that_parts_is_stopped_at_once_and_no_further_run_is_started(tmp_path: Path) -> None:
    runner = MadeUpPrograms(replace(GOOD, num_steps=40), replace(GOOD, num_steps=40, parts_at=2))
    result = judge(Plan(PROGRAM, tmp_path / "gate", runs=5), runner=runner)
    assert result.verdict is GateVerdict.FAIL
    assert len(runner.trials) == 2
    assert runner.written[0] == 40 and runner.written[1] < 40
    assert result.runs[1].was_stopped


def test_a_difference_on_another_rank_than_the_first_fails(tmp_path: Path) -> None:
    two = replace(GOOD, world_size=2)
    result = gate(tmp_path, two, replace(two, parts_at=5, parts_on=1))
    assert result.verdict is GateVerdict.FAIL
    assert result.failing is not None and result.failing.answer.first is not None
    assert result.failing.answer.first.rank == 1


def test_a_difference_in_the_very_last_state_fails(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, parts_at=5, parts_in=Phase.OPTIM))
    assert result.verdict is GateVerdict.FAIL


def test_steps_beyond_those_asked_for_are_not_judged(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, parts_at=4), steps=3)
    assert result.verdict is GateVerdict.PASS
    assert result.comparisons[0].answer.compared.steps == 3


def test_stop_early_ends_each_program_after_its_steps(tmp_path: Path) -> None:
    runner = MadeUpPrograms(replace(GOOD, num_steps=60))
    result = judge(Plan(PROGRAM, tmp_path / "gate", steps=3, stop_early=True), runner=runner)
    assert result.verdict is GateVerdict.PASS
    assert all(3 <= count < 60 for count in runner.written)


# ---------------------------------------------------------------------- every way to pass on too little


def test_fewer_steps_than_asked_for_do_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, steps=7)
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "6 steps of rank 0 recorded; expected 7" in result.explanation


def test_a_second_run_with_fewer_steps_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, num_steps=5), steps=6)
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)


@pytest.mark.parametrize("num_steps", [5, 7])
def test_another_number_of_steps_does_not_pass_where_none_was_asked_for(tmp_path: Path, num_steps: int) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, num_steps=num_steps))
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)


def test_a_rank_with_fewer_steps_than_the_others_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, world_size=2, steps_of={1: 4}), steps=6)
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "4 steps of rank 1" in result.explanation


def test_a_missing_rank_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, world_size=2, ranks=[0]))
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "nothing was recorded of rank 1" in result.explanation


def test_fewer_ranks_than_asked_for_do_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, ranks=2)
    assert result.verdict is GateVerdict.INSUFFICIENT


def test_a_second_run_with_more_ranks_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, world_size=2))
    assert result.verdict is GateVerdict.INSUFFICIENT


def test_no_recorded_step_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, num_steps=0))
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "no whole training step" in result.explanation


def test_no_recorded_rank_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, ranks=[]))
    assert result.verdict is GateVerdict.INSUFFICIENT


def test_a_run_without_gradients_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, has_gradients=False))
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "no gradient" in result.explanation


def test_a_program_that_trains_nothing_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, is_frozen=True))
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "same gradients" in result.explanation


def test_unobserved_state_does_not_pass_unless_it_is_allowed(tmp_path: Path) -> None:
    blind = replace(GOOD, unobserved={"optim/body.weight:cache: an object of type Cache has no exact bits": 1})
    result = gate(tmp_path / "refused", blind)
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "6 x unobserved" in result.explanation
    assert gate(tmp_path / "allowed", blind, allow_unobserved=("type Cache",)).verdict is GateVerdict.PASS


def test_an_unobserved_module_passes_unless_the_gate_is_strict(tmp_path: Path) -> None:
    blind = replace(GOOD, unobserved={"modules whose own call was not seen: blocks.0": 1})
    assert gate(tmp_path / "a", blind).verdict is GateVerdict.PASS
    assert gate(tmp_path / "b", blind, is_strict=True).verdict is GateVerdict.INSUFFICIENT


def test_a_program_that_fails_does_not_pass_and_its_last_words_are_shown(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, exit_status=3, says="Traceback\nRuntimeError: no such file"))
    assert (result.verdict, result.exit_status) == (GateVerdict.PROGRAM_FAILED, 2)
    assert "exit status 3" in result.explanation and "RuntimeError: no such file" in result.explanation


def test_a_second_run_that_fails_after_equal_steps_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, exit_status=1))
    assert result.verdict is GateVerdict.PROGRAM_FAILED


def test_a_recording_that_failed_in_a_program_that_did_not_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, status="failed"))
    assert result.verdict is GateVerdict.INSUFFICIENT


def test_processes_that_trained_unrecorded_do_not_pass(tmp_path: Path) -> None:
    note = "one more process of rank 0 trained and went unrecorded: a run has one process a rank."
    result = gate(tmp_path, replace(GOOD, notes=[note]))
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert note in result.explanation


def test_a_run_that_went_on_from_files_of_the_first_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, first_step=2, num_steps=4), steps=4)
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "{out}" in result.explanation


def test_one_run_compared_with_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compared with nothing"):
        gate(tmp_path, GOOD, runs=1)


# ---------------------------------------------------------------------- the positive control


def blind(baseline: Any, candidate: Any, *, until: int | None = None) -> Answer:
    return diff_runs(baseline, baseline, until=until)


def test_a_comparison_that_sees_nothing_makes_the_gate_broken(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, replace(GOOD, parts_at=1), compare=blind)
    assert (result.verdict, result.exit_status) == (GateVerdict.BROKEN, 2)
    assert "did not see it" in result.explanation
    assert len(result.runs) == 1, "nothing is worth running any more"


def test_a_comparison_that_takes_everything_for_different_makes_the_gate_broken(tmp_path: Path) -> None:
    other = golden(tmp_path, replace(GOOD, parts_at=0))

    def alarmist(baseline: Any, candidate: Any, *, until: int | None = None) -> Answer:
        with open_run(other) as run:
            return diff_runs(run, baseline, until=None)

    assert gate(tmp_path, GOOD, compare=alarmist).verdict is GateVerdict.BROKEN


def test_the_control_sees_through_a_digest_that_ignores_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitcheck.control.digest_bytes", lambda dtype, shape, data: (bytes(16), bytes(16)))
    assert gate(tmp_path, GOOD).verdict is GateVerdict.BROKEN


def test_a_follower_that_sees_nothing_makes_the_control_fail(tmp_path: Path) -> None:
    with open_run(golden(tmp_path, GOOD)) as run:
        control = run_control(run, first_differing=lambda *runs, until: None)
    assert control.problem is not None and "follower" in control.problem


def test_the_control_names_a_gradient_of_a_recorded_step(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD)
    assert result.control is not None and result.control.has_passed
    assert result.control.site == "grad/body.weight:grad"
    assert 0 <= result.control.step < 6


def test_the_control_works_for_several_ranks(tmp_path: Path) -> None:
    with open_run(golden(tmp_path, replace(GOOD, world_size=3))) as run:
        assert run_control(run).problem is None


# ---------------------------------------------------------------------- golden runs


def test_a_golden_run_of_the_same_environment_is_compared(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, golden=golden(tmp_path, GOOD), runs=1)
    assert result.verdict is GateVerdict.PASS
    assert result.explanation == "run 1 and the golden run have the same bits in every recorded tensor of 6 steps."


def test_a_run_unlike_the_golden_one_fails(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, parts_at=2), golden=golden(tmp_path, GOOD))
    assert result.verdict is GateVerdict.FAIL
    assert result.failing is not None and result.failing.baseline == "golden"


def test_a_golden_run_of_another_environment_is_incomparable_with_the_differences(tmp_path: Path) -> None:
    other = replace(GOOD, environment={**GOOD.environment, "torch.version": "2.12.0"}, parts_at=0)
    result = gate(tmp_path, GOOD, golden=golden(tmp_path, other))
    assert (result.verdict, result.exit_status) == (GateVerdict.INCOMPARABLE, 2)
    assert [(each.key, each.baseline, each.candidate) for each in result.environment] == [
        ("torch.version", "2.12.0", None)
    ]


def test_an_environment_that_nobody_looked_at_in_time_is_incomparable_all_the_same(tmp_path: Path) -> None:
    other = replace(GOOD, environment={**GOOD.environment, "torch.version": "2.12.0"}, parts_at=0)
    programs = MadeUpPrograms(GOOD)
    plan = Plan(PROGRAM, tmp_path / "gate", golden=golden(tmp_path, other))
    result = judge(plan, runner=lambda trial, watch: programs(trial, lambda: False))
    assert result.verdict is GateVerdict.INCOMPARABLE


def test_an_environment_key_that_may_differ_does_not_stop_the_gate(tmp_path: Path) -> None:
    other = replace(GOOD, environment={**GOOD.environment, "os.release": "6.1"})
    result = gate(tmp_path, GOOD, golden=golden(tmp_path, other), may_differ=("os.*",))
    assert result.verdict is GateVerdict.PASS


def test_a_golden_run_with_fewer_steps_than_asked_for_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, golden=golden(tmp_path, replace(GOOD, num_steps=3)), steps=6)
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert not result.comparisons, "nothing is run against a golden run that proves nothing"


def test_a_golden_run_with_fewer_steps_than_the_program_takes_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, golden=golden(tmp_path, replace(GOOD, num_steps=3)))
    assert result.verdict is GateVerdict.INSUFFICIENT


def test_a_golden_run_of_another_level_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, golden=golden(tmp_path, GOOD, level="state"), level="module")
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "level state" in result.explanation


def test_without_a_level_the_gate_records_at_that_of_the_golden_run(tmp_path: Path) -> None:
    runner = MadeUpPrograms(GOOD)
    plan = Plan(PROGRAM, tmp_path / "gate", golden=golden(tmp_path, GOOD, level="state"))
    assert judge(plan, runner=runner).verdict is GateVerdict.PASS
    assert runner.trials[0].options.level == "state"


def test_a_golden_run_that_was_stopped_serves_for_the_steps_that_it_has(tmp_path: Path) -> None:
    long = replace(GOOD, num_steps=40)
    stopped = Plan(PROGRAM, tmp_path / "first", steps=6, stop_early=True)
    assert judge(stopped, runner=MadeUpPrograms(long)).verdict is GateVerdict.PASS
    kept = tmp_path / "first" / "runs" / "1"
    with open_run(kept) as run:
        assert (run.info["status"], run.status) == ("killed", "stopped")
    assert gate(tmp_path, long, golden=kept, steps=6).verdict is GateVerdict.PASS
    assert gate(tmp_path / "b", replace(long, parts_at=5), golden=kept, steps=6).verdict is GateVerdict.FAIL
    assert gate(tmp_path / "c", long, golden=kept).verdict is GateVerdict.INSUFFICIENT, "whose steps are not counted"


def test_a_golden_run_that_was_edited_does_not_pass(tmp_path: Path) -> None:
    folder = golden(tmp_path, GOOD)
    seal = folder / "rank-00000.seal"
    seal.unlink()
    result = gate(tmp_path, GOOD, golden=folder)
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "damaged" in result.explanation


# ---------------------------------------------------------------------- resumed runs


RESUMED = replace(GOOD, first_step=3, num_steps=3)


def test_a_resumed_run_that_goes_on_like_the_first_passes(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, GOOD, RESUMED, resume_command="python train.py --resume x")
    assert result.verdict is GateVerdict.PASS
    assert result.explanation.startswith("2 fresh runs and the resumed run")


def test_a_resumed_run_that_parts_fails(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, GOOD, replace(RESUMED, parts_at=4), resume_command="python train.py", resume_step=3)
    assert result.verdict is GateVerdict.FAIL
    assert result.failing is not None and result.failing.role == "resumed"


def test_a_resumed_run_that_started_afresh_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, resume_command="python train.py --resume x")
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "started afresh" in result.explanation


def test_a_resumed_run_that_ends_before_the_first_one_does_does_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, GOOD, replace(RESUMED, num_steps=2), resume_command="python train.py")
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "2 steps of rank 0 compared" in result.explanation


def test_the_checkpoint_that_run_1_wrote_is_filled_into_the_command(tmp_path: Path) -> None:
    checkpoint = tmp_path / "gate" / "out" / "1" / "step-3.pt"
    runner = MadeUpPrograms(replace(GOOD, writes=str(checkpoint)), GOOD, RESUMED)
    plan = Plan(
        (*PROGRAM, "--out", "{out}"),
        tmp_path / "gate",
        resume_command="python train.py --resume {checkpoint} --out {out}",
        checkpoint="{out}/*.pt",
    )
    assert judge(plan, runner=runner).verdict is GateVerdict.PASS
    out = tmp_path / "gate" / "out"
    assert [trial.command[-1] for trial in runner.trials] == [str(out / name) for name in ("1", "2", "resumed")]
    assert runner.trials[2].command[3] == str(checkpoint)


@pytest.mark.parametrize(
    ("names", "chosen"), [(("5", "10"), "5"), (("5", "10", "15"), "10"), (("9", "10", "11", "12"), "10")]
)
def test_of_several_checkpoints_one_in_the_middle_is_resumed(
    tmp_path: Path, names: tuple[str, ...], chosen: str
) -> None:
    import os

    class Saving(MadeUpPrograms):
        def __call__(self, trial: Trial, watch: Any) -> Any:
            ending = super().__call__(trial, watch)
            for number, name in enumerate(names if len(self.trials) == 1 else ()):
                path = tmp_path / f"step-{name}.pt"
                path.write_text("weights")
                os.utime(path, ns=(2 * 10**18 + number,) * 2)
            return ending

    runner = Saving(GOOD, GOOD, RESUMED)
    plan = Plan(PROGRAM, tmp_path / "gate", resume_command="t {checkpoint}", checkpoint=str(tmp_path / "*.pt"))
    assert judge(plan, runner=runner).verdict is GateVerdict.PASS
    assert runner.trials[2].command == ("t", str(tmp_path / f"step-{chosen}.pt"))


def test_a_checkpoint_that_was_there_before_run_1_is_none_of_it(tmp_path: Path) -> None:
    import os

    stale = tmp_path / "old.pt"
    stale.write_text("weights")
    os.utime(stale, (1, 1))
    result = gate(
        tmp_path, GOOD, resume_command="python train.py --resume {checkpoint}", checkpoint=str(tmp_path / "*.pt")
    )
    assert result.verdict is GateVerdict.INSUFFICIENT
    assert "older than run 1" in result.explanation


# ---------------------------------------------------------------------- variations


def test_a_change_that_breaks_the_bits_is_named(tmp_path: Path) -> None:
    changed = {**GOOD.environment, "torch.num_threads": "1"}
    result = gate(tmp_path, GOOD, GOOD, replace(GOOD, environment=changed, parts_at=0), vary=("threads",))
    assert (result.verdict, result.exit_status) == (GateVerdict.FAIL, 1)
    assert [(each.name, each.outcome, each.change) for each in result.variations] == [("threads", "breaks", "2 -> 1")]


def test_all_changes_are_tried_though_the_first_one_breaks_the_bits(tmp_path: Path) -> None:
    runner = MadeUpPrograms(GOOD, GOOD, replace(GOOD, parts_at=0), GOOD)
    result = judge(Plan(PROGRAM, tmp_path / "gate", vary=("threads", "allocator")), runner=runner)
    assert [(each.name, each.outcome) for each in result.variations] == [("threads", "breaks"), ("allocator", "holds")]


def test_a_change_that_does_not_reach_the_program_is_told_from_one_that_holds(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, vary=("threads", "workers"))
    assert [each.outcome for each in result.variations] == ["no effect", "no effect"]
    assert result.variations[1].no_effect == "the program makes no DataLoader"


def test_the_hash_seed_of_a_variation_reaches_the_program(tmp_path: Path) -> None:
    runner = MadeUpPrograms(GOOD, GOOD, replace(GOOD, environment={**GOOD.environment, "env.PYTHONHASHSEED": "1"}))
    result = judge(Plan(PROGRAM, tmp_path / "gate", vary=("hashseed",)), runner=runner)
    assert runner.trials[2].variables == {"PYTHONHASHSEED": "1"}
    assert result.variations[0].outcome == "holds"


# ---------------------------------------------------------------------- chance and answer


def test_the_number_of_runs_for_a_rate_is_that_of_the_bound() -> None:
    assert runs_for(0.05, 0.99) == 91


def test_the_answer_says_how_rare_a_divergence_may_be(tmp_path: Path) -> None:
    result = gate(tmp_path, GOOD, runs=3)
    content = json.loads(write_answer(result).read_text())
    assert content["schema"] == "bitcheck.gate/1"
    assert content["chance"] == {"identical_pairs": 2, "confidence": 0.95, "rate_bound": pytest.approx(1 - 0.05**0.5)}
    assert content["control"]["passed"] is True
    assert [run["role"] for run in content["runs"]] == ["first", "fresh", "fresh"]


# ---------------------------------------------------------------------- replicas

COPIES = replace(GOOD, world_size=4, placement="mesh=ddp:4; ranks=0-3; placements=R")


def test_runs_whose_ranks_hold_equal_copies_pass_and_each_was_looked_at(tmp_path: Path) -> None:
    result = gate(tmp_path, COPIES, runs=3, with_replicas=True)
    assert result.verdict is GateVerdict.PASS
    assert [(each.run, str(each.answer.verdict)) for each in result.replicas] == [
        ("run 1", "agree"), ("run 2", "agree"), ("run 3", "agree"),
    ]  # fmt: skip
    assert result.replica_control is not None and result.replica_control.has_passed
    assert "hold equal copies" in render_junit(result)
    assert "was flipped in a copy of run 1, and was seen" in render_gate(result)


def test_runs_that_are_identical_with_an_odd_rank_in_each_fail(tmp_path: Path) -> None:
    odd = replace(COPIES, odd=(2, 3))
    assert gate(tmp_path, odd).verdict is GateVerdict.PASS, "nobody asked"
    result = gate(tmp_path / "asked", odd, with_replicas=True)
    assert (result.verdict, result.exit_status) == (GateVerdict.FAIL, 1)
    assert result.failing is None and result.failing_replicas is not None
    first = result.failing_replicas.answer.first
    assert first is not None
    assert (result.failing_replicas.run, first.step, first.site, first.ranks) == (
        "run 1", 3, "param/body.weight:value", (2,),
    )  # fmt: skip
    assert len(result.runs) == 1, "no further run is started"
    text = render_gate(result)
    assert text.startswith("FAIL: the ranks of run 1 differ in step 3: param/body.weight:value on rank 2")
    assert "bitcheck replicas" in text
    assert "failure" in render_junit(result)
    assert render_markdown(result)
    write_answer(result)
    answer = json.loads((tmp_path / "asked" / "gate" / "gate.json").read_text())
    assert answer["replicas"][0]["answer"]["first"]["ranks"] == [2]


def test_what_is_advised_names_the_gates_own_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advise(run: Any, **options: Any) -> ReplicaAnswer:
        return replace(check_replicas(run, **options), remedy="leave them out here: --except '*.running_*'")

    monkeypatch.setattr("bitcheck.gate.check_replicas", advise)
    result = gate(tmp_path, replace(COPIES, odd=(2, 3)), with_replicas=True)
    assert result.remedy == "leave them out here: --replica-except '*.running_*'"


def test_an_odd_rank_of_a_resumed_run_fails_though_the_fresh_ones_are_sound(tmp_path: Path) -> None:
    resumed = replace(COPIES, first_step=3, num_steps=3)
    asked = {"resume_command": "python train.py --resume", "resume_step": 3, "with_replicas": True, "runs": 2}
    assert gate(tmp_path / "sound", COPIES, COPIES, resumed, **asked).verdict is GateVerdict.PASS
    result = gate(tmp_path / "odd", COPIES, COPIES, replace(resumed, odd=(1, 5)), **asked)
    assert result.verdict is GateVerdict.FAIL


def test_copies_that_nobody_declared_do_not_pass(tmp_path: Path) -> None:
    result = gate(tmp_path, replace(GOOD, world_size=2), with_replicas=True)
    assert (result.verdict, result.exit_status) == (GateVerdict.INSUFFICIENT, 2)
    assert "--replica-group 0-1" in result.remedy
    result = gate(tmp_path / "one", GOOD, with_replicas=True)
    assert result.verdict is GateVerdict.INSUFFICIENT


def test_copies_that_the_user_declares_are_checked_and_exceptions_made(tmp_path: Path) -> None:
    undeclared = replace(COPIES, odd=(1, 2))
    asked: dict[str, Any] = {"with_replicas": True, "replica_groups": ("0,2-3:body.*",)}
    result = gate(tmp_path, replace(undeclared, placement="mesh=ddp:1; ranks=0; placements=R"), **asked)
    assert result.verdict is GateVerdict.PASS
    asked = {"with_replicas": True, "replica_exceptions": ("param/*",)}
    assert gate(tmp_path / "declared", undeclared, **asked).verdict is not GateVerdict.FAIL
    with pytest.raises(UsageError, match="--replicas"):
        gate(tmp_path / "alone", COPIES, replica_groups=("0-3",))


def test_a_replica_check_that_sees_nothing_makes_the_gate_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def see_nothing(run: Any, **options: Any) -> ReplicaAnswer:
        return replace(check_replicas(run, **options), verdict=ReplicaVerdict.AGREE, disagreements=())

    def control(run: Any, **options: Any) -> Any:
        return run_replica_control(run, check=see_nothing, **options)

    monkeypatch.setattr("bitcheck.gate.run_replica_control", control)
    result = gate(tmp_path, COPIES, with_replicas=True)
    assert (result.verdict, result.exit_status) == (GateVerdict.BROKEN, 2)
    assert "the check did not see it" in result.explanation
