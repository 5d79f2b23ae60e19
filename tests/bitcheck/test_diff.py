"""diff over made-up runs: plan one fault, and the answer names exactly that; its twin finds nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import bitcheck.origins
from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.memory import MemoryRank, MemoryRun, MemoryStep
from tests.bitcheck.made_up_runs import NUM_BLOCKS, digest_of, make_run


def compare(**faulty: Any) -> Answer:
    """Compare a run without a fault with one that differs in `faulty`, level and ranks taken from it."""
    common = {key: faulty[key] for key in ("level", "num_ranks") if key in faulty}
    return diff_runs(make_run(**common), make_run(**faulty))


def first_of(answer: Answer) -> tuple[str, int, int, str]:
    assert answer.first is not None
    return str(answer.cause), answer.first.step, answer.first.rank, answer.first.site


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_two_runs_of_one_program_are_identical(level: Level, num_ranks: int) -> None:
    answer = compare(level=level, num_ranks=num_ranks)
    assert answer.verdict == "identical"
    assert (answer.first, answer.cause, answer.origins, answer.propagated) == (None, None, (), 0)
    assert (answer.compared.steps, answer.compared.ranks) == (4, num_ranks)
    assert (answer.aligned.first_step, answer.aligned.last_step, answer.aligned.by) == (0, 3, "step")


@pytest.mark.parametrize(
    ("level", "site", "cause", "module", "op"),
    [
        ("module", "batch/Model:in.0", "data", "Model", None),
        ("module", "forward/blocks.1:out", "forward", "blocks.1", "Linear"),
        ("module", "loss/loss:value", "forward", None, None),
        ("module", "backward/blocks.1:grad_in.0", "backward", "blocks.1", "AddmmBackward0"),
        ("module", "backward/blocks.1.weight:grad", "backward", "blocks.1", "AddmmBackward0"),
        ("module", "grad/blocks.1.weight:grad", "compute", "blocks.1", None),
        ("module", "scalar/SGD.0:lr", "hyperparameter", None, None),
        ("module", "param/blocks.1.weight:value", "optimizer", "blocks.1", "SGD"),
        ("module", "buffer/blocks.0.mean:value", "forward", "blocks.0", None),
        ("module", "optim/blocks.1.weight:momentum_buffer", "optimizer", "blocks.1", "SGD"),
        ("state", "batch/Model:in.0", "data", "Model", None),
        ("state", "loss/loss:value", "forward", None, None),
        ("state", "grad/blocks.1.weight:grad", "compute", "blocks.1", None),
        ("state", "scalar/SGD.0:lr", "hyperparameter", None, None),
        ("state", "param/blocks.1.weight:value", "optimizer", "blocks.1", "SGD"),
        ("state", "buffer/blocks.0.mean:value", "forward", "blocks.0", None),
        ("state", "optim/blocks.1.weight:momentum_buffer", "optimizer", "blocks.1", "SGD"),
    ],
)
def test_the_answer_names_the_planned_fault(
    level: str, site: str, cause: str, module: str | None, op: str | None
) -> None:
    answer = compare(level=Level(level), faults=[(0, 2, site)])
    assert first_of(answer) == (cause, 2, 0, site)
    assert [origin.site for origin in answer.origins] == [site]
    assert answer.first is not None
    assert (answer.first.module, answer.first.op) == (module, op)
    assert answer.propagated > 0
    assert site in answer.explanation or cause in ("hyperparameter", "rng")
    assert answer.remedy


def test_a_fault_in_the_forward_pass_at_level_state_is_seen_in_the_loss() -> None:
    answer = compare(level=Level.STATE, faults=[(0, 1, "forward/blocks.1:out")])
    assert first_of(answer) == ("forward", 1, 0, "loss/loss:value")
    assert "target" in answer.explanation


def test_a_fault_in_the_backward_pass_at_level_state_is_the_gradient_it_reached_first() -> None:
    answer = compare(level=Level.STATE, faults=[(0, 1, "backward/blocks.2:grad_in.0")])
    assert first_of(answer) == ("compute", 1, 0, "grad/blocks.1.weight:grad")
    assert [origin.also for origin in answer.origins] == [()]
    assert f"2 of {NUM_BLOCKS} gradients" in answer.explanation


def test_independent_faults_of_one_step_are_each_an_origin() -> None:
    answer = compare(faults=[(0, 1, "backward/blocks.1.weight:grad"), (0, 1, "backward/blocks.0:grad_in.0")])
    assert [origin.site for origin in answer.origins] == [
        "backward/blocks.1.weight:grad",
        "backward/blocks.0:grad_in.0",
    ]


def test_a_fault_downstream_of_another_is_not_told_apart_from_it() -> None:
    answer = compare(faults=[(0, 1, "forward/blocks.0:out"), (0, 1, "forward/blocks.2:out")])
    assert [origin.site for origin in answer.origins] == ["forward/blocks.0:out"]


def test_a_later_fault_is_no_origin_where_the_state_had_parted_before() -> None:
    answer = compare(faults=[(0, 1, "forward/blocks.0:out"), (0, 3, "forward/blocks.2:out")])
    assert [(origin.step, origin.site) for origin in answer.origins] == [(1, "forward/blocks.0:out")]
    assert "2 later steps differ as well" in answer.explanation


def test_a_later_fault_is_an_origin_where_all_that_enters_was_equal_again() -> None:
    """A fault in an evaluation changes no state."""
    baseline, candidate = make_run(), make_run()
    for step in (1, 3):
        for run, word in ((baseline, "same"), (candidate, "other")):
            site = Site(Phase.FORWARD, "Model", "blocks.1", "out", is_eval=True)
            record = run.steps[0][step + 1]
            record.events.append(Event(site, "float32", (4,), 16, digest_of(word), group=0))
    answer = diff_runs(baseline, candidate)
    assert [(origin.step, origin.site) for origin in answer.origins] == [
        (1, "forward/blocks.1:out@eval"),
        (3, "forward/blocks.1:out@eval"),
    ]
    assert answer.verdict == "diverged"
    assert "training state is equal" in answer.explanation


# ---------------------------------------------------------------- generators


def test_a_generator_in_use_that_differs_is_the_cause() -> None:
    answer = compare(seeds={"torch.cpu": 1})
    assert first_of(answer) == ("rng", 0, 0, "rng/torch.cpu:state")
    assert [origin.site for origin in answer.origins] == ["rng/torch.cpu:state"]


def test_a_generator_that_nobody_draws_from_does_not_count() -> None:
    answer = compare(seeds={"python": 1})
    assert answer.verdict == "identical"
    assert answer.notes == ()


def test_an_unused_generator_is_not_blamed_for_another_fault() -> None:
    answer = compare(seeds={"python": 1}, faults=[(0, 2, "forward/blocks.1:out")])
    assert first_of(answer) == ("forward", 2, 0, "forward/blocks.1:out")


def test_a_generator_in_use_that_differs_while_all_tensors_agree_is_a_note() -> None:
    baseline, candidate = make_run(), make_run()
    for run, word in ((baseline, "same"), (candidate, "other")):
        for record in run.steps[0][1:]:
            site = Site(Phase.RNG, "", "numpy", "state")
            record.events.insert(0, Event(site, "uint8", (8,), 8, digest_of(word, record.step)))
            for event in record.events:
                event.inputs = tuple(index + 1 for index in event.inputs)
    answer = diff_runs(baseline, candidate)
    assert answer.verdict == "identical"
    assert len(answer.notes) == 1
    assert "numpy" in answer.notes[0]
    assert "step 0" in answer.notes[0]


@pytest.mark.parametrize("until", [None, 3])
def test_a_generator_drawn_from_in_the_last_step_alone_is_in_use(until: int | None) -> None:
    """What it drew is seen in the reading after the last step."""
    runs = [make_run(), make_run(faults=[(0, 3, "forward/blocks.1:out")])]
    for seed, run in enumerate(runs):
        for record in run.steps[0][1:]:
            state = digest_of("numpy", seed, record.step == 4)
            site = Site(Phase.RNG, "", "numpy", "state")
            record.events.append(Event(site, "uint8", (8,), 8, state))
    assert first_of(diff_runs(*runs, until=until)) == ("rng", 3, 0, "rng/numpy:state")


@pytest.mark.parametrize(("fault_step", "cause"), [(1, "forward"), (3, "rng")])
def test_a_generator_drawn_from_after_the_last_step_alone_says_nothing_of_the_steps_before(
    fault_step: int, cause: str
) -> None:
    runs = [
        make_run(),
        make_run(faults=[(0, fault_step, "forward/blocks.1:out")]),
    ]
    for seed, run in enumerate(runs):
        assert [record.kind for record in run.steps[0]][-2:] == [StepKind.STEP, StepKind.FRAGMENT]
        assert run.steps[0][-2].step == 3
        for record in run.steps[0][1:]:
            state = digest_of("python", seed, record.kind is StepKind.FRAGMENT)
            site = Site(Phase.RNG, "", "python", "state")
            record.events.append(Event(site, "uint8", (8,), 8, state))
    assert first_of(diff_runs(*runs))[:2] == (cause, fault_step)


def test_equal_runs_are_told_by_their_roots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        (make_run(num_ranks=3), make_run(num_ranks=3)),
        (make_run(num_steps=6), make_run(start_step=3, num_steps=3, explicit_start=True)),
        (make_run(num_steps=6), make_run(num_steps=4)),
    ]

    def refuse(self: MemoryRank, row: int) -> MemoryStep:
        raise AssertionError(row)

    monkeypatch.setattr(MemoryRank, "load", refuse)
    assert [diff_runs(*pair).verdict for pair in runs] == ["identical"] * 3


# ---------------------------------------------------------------- resumed and unfinished runs


def test_a_resumed_run_is_compared_where_it_overlaps() -> None:
    answer = diff_runs(make_run(num_steps=6), make_run(start_step=3, num_steps=3, explicit_start=True))
    assert answer.verdict == "identical"
    assert (answer.compared.steps, answer.aligned.first_step, answer.aligned.last_step) == (3, 3, 5)


def test_a_resumed_run_without_a_number_is_aligned_by_its_state() -> None:
    answer = diff_runs(make_run(num_steps=6), make_run(start_step=3, num_steps=3))
    assert answer.verdict == "identical"
    assert (answer.aligned.first_step, answer.aligned.last_step, answer.aligned.by) == (3, 5, "state")
    assert "Step 0 of the candidate is taken for step 3 of the baseline" in answer.explanation
    mirrored = diff_runs(make_run(start_step=3, num_steps=3), make_run(num_steps=6))
    assert "Step 0 of the baseline is taken for step 3 of the candidate" in mirrored.explanation


@pytest.mark.parametrize("fault", ["param/blocks.1.weight:value", "optim/blocks.2.weight:momentum_buffer"])
def test_a_state_that_was_not_restored_is_named(fault: str) -> None:
    resumed = make_run(start_step=3, num_steps=3, explicit_start=True, faults=[(0, 2, fault)])
    answer = diff_runs(make_run(num_steps=6), resumed)
    assert first_of(answer) == ("restore", 2, 0, fault)
    assert answer.origins[0].missing_in is None
    assert "7 tensors" not in answer.explanation
    assert answer.remedy


def test_every_tensor_that_is_missing_after_a_restart_is_named_with_the_run_that_lacks_it() -> None:
    lost = [f"optim/blocks.{block}.weight:momentum_buffer" for block in range(NUM_BLOCKS)]
    resumed = make_run(start_step=3, num_steps=3, explicit_start=True, lost=lost)
    answer = diff_runs(make_run(num_steps=6), resumed)
    assert answer.cause == "restore"
    assert [origin.site for origin in answer.origins] == lost
    assert {origin.missing_in for origin in answer.origins} == {"candidate"}
    assert "optimizer.state_dict()" in answer.remedy


def test_fresh_runs_that_start_from_different_states_say_so() -> None:
    answer = compare(faults=[(0, -1, "param/blocks.0.weight:value"), (0, -1, "param/blocks.2.weight:value")])
    assert first_of(answer) == ("initial-state", -1, 0, "param/blocks.0.weight:value")
    assert len(answer.origins) == 2


LOST_OPTIMIZER = [f"optim/blocks.{block}.weight:momentum_buffer" for block in range(NUM_BLOCKS)]
GENERATOR, BATCH = (0, 3, "rng/torch.cpu:state"), (0, 3, "batch/Model:in.0")


@pytest.mark.parametrize(
    ("forgotten", "causes", "advice"),
    [
        ({}, [], "optimizer.state_dict()"),
        ({"lr": {3: 0.2}}, ["hyperparameter"], "lr_scheduler.state_dict()"),
        ({"faults": [GENERATOR]}, ["rng"], "generators (torch.cpu)"),
        ({"faults": [BATCH]}, ["data"], "sampler's generator"),
        ({"seeds": {"python": 1}}, [], "optimizer.state_dict()"),
        ({"faults": [GENERATOR, BATCH], "lr": {3: 0.2}}, ["rng", "hyperparameter"], "lr_scheduler"),
        ({"faults": [(0, 3, "forward/blocks.1:out")]}, ["forward"], "optimizer.state_dict()"),
        ({"faults": [(0, 4, "forward/blocks.1:out")]}, [], "optimizer.state_dict()"),
    ],
)
def test_a_forgotten_optimizer_hides_nothing_else_that_was_forgotten(
    forgotten: dict[str, Any], causes: list[str], advice: str
) -> None:
    start: dict[str, Any] = {"start_step": 3, "num_steps": 3, "explicit_start": True}
    answer = diff_runs(make_run(num_steps=6), make_run(**start, lost=LOST_OPTIMIZER, **forgotten))
    assert [str(origin.cause) for origin in answer.origins] == ["restore"] * NUM_BLOCKS + causes
    assert {origin.step for origin in answer.origins[NUM_BLOCKS:]} <= {3}
    assert answer.cause == "restore" and advice in answer.remedy
    assert ("does not follow from that" in answer.explanation) == bool(causes)
    assert ("may be right again once it is loaded" in answer.explanation) == ("hyperparameter" in causes)


def test_what_follows_from_parameters_that_were_not_restored_is_no_origin() -> None:
    site = "param/blocks.1.weight:value"
    resumed = make_run(start_step=3, num_steps=3, explicit_start=True, faults=[(0, 2, site)], data_seed=0)
    slower = make_run(start_step=3, num_steps=3, explicit_start=True, faults=[(0, 2, site)], lr={3: 0.2})
    assert [origin.site for origin in diff_runs(make_run(num_steps=6), resumed).origins] == [site]
    sites = [origin.site for origin in diff_runs(make_run(num_steps=6), slower).origins]
    assert sites == [site, "scalar/SGD.0:lr"]


def test_seeds_are_not_advised_where_the_generators_agree() -> None:
    buffer = [(0, -1, "buffer/blocks.0.mean:value")]
    alike, unlike = compare(faults=buffer), compare(faults=buffer, seeds={"torch.cpu": 1})
    assert alike.cause == unlike.cause == "initial-state"
    assert "Seed before" not in alike.remedy and "torch.empty" in alike.remedy and "--poison" in alike.remedy
    assert "find python and torch.cpu in the same state" in alike.explanation
    assert "Seed before" in unlike.remedy
    assert "torch.cpu in another state" in unlike.explanation
    assert len(unlike.origins) == 1  # one seed: the generator's state is no second origin


def test_a_number_that_disagrees_with_the_restored_state_is_remarked() -> None:
    resumed = make_run(start_step=3, num_steps=3, explicit_start=True)
    shifted = replace(resumed, info={"start_step": 4, "digest_version": 1})
    for record in shifted.steps[0]:
        record.step += 1
    answer = diff_runs(make_run(num_steps=6), shifted)
    assert answer.cause == "restore"
    assert "restored the state of step 2, not 3" in answer.explanation
    assert "--start-step" in answer.remedy


def test_a_run_that_was_asked_for_fewer_steps_is_no_divergence() -> None:
    answer = diff_runs(make_run(num_steps=6), make_run(num_steps=4))
    assert answer.verdict == "identical"
    assert answer.compared.steps == 4


@pytest.mark.parametrize("status", ["killed", "failed", "recording"])
def test_a_run_that_did_not_finish_ended_early(status: str) -> None:
    answer = diff_runs(make_run(num_steps=6), make_run(num_steps=6, num_recorded=4, status=status))
    assert (answer.verdict, answer.cause, answer.first, answer.origins) == ("diverged", "ended-early", None, ())
    assert (answer.compared.steps, answer.aligned.last_step) == (4, 3)


def test_a_run_that_bitcheck_stopped_is_compared_as_far_as_each_rank_goes_and_did_not_end_early() -> None:
    whole = make_run(num_steps=6, num_ranks=2)
    steps = {0: whole.steps[0][:5], 1: whole.steps[1][:4]}
    stopped = replace(whole, steps=steps, statuses={0: "killed", 1: "killed"}, status="stopped")
    for runs in ((whole, stopped), (stopped, whole)):
        answer = diff_runs(*runs)
        assert (answer.verdict, answer.compared.steps, answer.notes) == ("identical", 4, ())
    killed = replace(stopped, status="killed")
    assert diff_runs(whole, killed).cause == "ended-early"


def test_until_leaves_out_what_a_killed_run_lacks() -> None:
    answer = diff_runs(make_run(num_steps=6), make_run(num_steps=6, num_recorded=4, status="killed"), until=3)
    assert (answer.verdict, answer.compared.steps) == ("identical", 4)


def test_until_leaves_out_a_later_fault() -> None:
    faulty = make_run(faults=[(0, 3, "forward/blocks.1:out")])
    assert diff_runs(make_run(), faulty, until=2).verdict == "identical"
    assert diff_runs(make_run(), faulty, until=3).verdict == "diverged"


def test_until_counts_what_it_compared_on_every_rank() -> None:
    whole, part = compare(num_ranks=3), diff_runs(make_run(num_ranks=3), make_run(num_ranks=3), until=1)
    assert (part.compared.steps, part.compared.ranks) == (2, 3)
    assert part.compared.events < whole.compared.events


def test_the_unfinished_steps_of_two_runs_that_failed_are_not_compared() -> None:
    runs = [make_run(status="failed"), make_run(status="failed")]
    for run, word in zip(runs, ("one", "other"), strict=True):
        site = Site(Phase.BATCH, "Model", "", "in.0")
        run.steps[0][-1].events.append(Event(site, "float32", (4,), 16, digest_of(word)))
    answer = diff_runs(*runs)
    assert (answer.verdict, answer.compared.steps) == ("identical", 4)
    assert [note for note in answer.notes if "did not finish (failed)" in note]


def test_a_difference_is_the_verdict_even_where_a_run_ended_early() -> None:
    faulty = make_run(num_steps=6, num_recorded=4, status="killed", faults=[(0, 2, "forward/blocks.1:out")])
    answer = diff_runs(make_run(num_steps=6), faulty)
    assert first_of(answer)[:2] == ("forward", 2)
    assert any("did not finish" in note for note in answer.notes)


def test_runs_without_a_step_in_common_are_incomparable() -> None:
    answer = diff_runs(make_run(num_steps=2), make_run(start_step=4, num_steps=2, explicit_start=True))
    assert (answer.verdict, answer.first, answer.cause) == ("incomparable", None, None)
    assert "no training step in common" in answer.explanation


def test_digests_of_different_versions_are_incomparable() -> None:
    other = replace(make_run(), info={"start_step": None, "digest_version": 2})
    assert diff_runs(make_run(), other).verdict == "incomparable"


def test_programs_without_a_site_in_common_are_incomparable() -> None:
    site = Site(Phase.PARAM, "Other", "weight", "value")
    steps = [StepRecord(step, StepKind.STEP, [Event(site, "float32", (), 4, digest_of(step))]) for step in range(3)]
    assert diff_runs(make_run(), MemoryRun({0: steps})).verdict == "incomparable"


def test_runs_that_agreed_before_they_did_different_things_are_comparable() -> None:
    def evaluated(name: str) -> MemoryRun:
        run = make_run(num_steps=3)
        site = Site(Phase.BATCH, "Net", "", name, is_eval=True)
        events = [Event(site, "float32", (4,), 16, digest_of(name))]
        steps = [step for step in run.steps[0] if step.kind is not StepKind.FRAGMENT]
        return MemoryRun({0: [*steps, StepRecord(3, StepKind.FRAGMENT, events)]}, info=run.info)

    answer = diff_runs(evaluated("in.0"), evaluated("in.1"))
    assert (answer.verdict, answer.cause, answer.compared.steps) == ("diverged", "structure", 3)


@pytest.mark.parametrize(("at", "verdict"), [(3, "identical"), (4, "diverged")])
def test_what_a_resumed_run_does_to_set_itself_up_is_no_divergence(at: int, verdict: str) -> None:
    resumed = make_run(level=Level.OP, start_step=3, num_steps=3, explicit_start=True)
    record = resumed.steps[0][at - 2]
    assert record.step == at
    record.groups.append(Group("op", "", "program", "aten.normal_.default"))
    site = Site(Phase.FORWARD, "", "program", "aten.normal_.default.self.written")
    record.events.append(Event(site, "float32", (4,), 16, digest_of("init"), group=len(record.groups) - 1))
    answer = diff_runs(make_run(level=Level.OP, num_steps=6), resumed)
    assert answer.verdict == verdict
    assert any("sets itself up" in note for note in answer.notes) == (verdict == "identical")


# ---------------------------------------------------------------- structure


def test_a_call_that_one_run_makes_alone_is_structure() -> None:
    skipped = [(0, 2, f"forward/blocks.1:{slot}") for slot in ("in.0", "out")]
    answer = compare(skipped=skipped)
    assert first_of(answer) == ("structure", 2, 0, "forward/blocks.1:out")
    assert answer.first is not None
    assert answer.first.missing_in == "candidate"
    assert answer.first.also == ("forward/blocks.1:in.0",)
    mirrored = diff_runs(make_run(skipped=skipped), make_run())
    assert mirrored.first is not None
    assert mirrored.first.missing_in == "baseline"


@pytest.mark.parametrize("level", [Level.STATE, Level.MODULE])
def test_a_gradient_that_only_one_run_has_is_structure(level: Level) -> None:
    answer = compare(level=level, skipped=[(0, 2, "grad/blocks.1.weight:grad")])
    assert first_of(answer) == ("structure", 2, 0, "grad/blocks.1.weight:grad")
    assert "zero_grad" in answer.remedy


def test_a_site_that_one_run_lacks_after_a_difference_is_not_the_cause() -> None:
    answer = compare(faults=[(0, 2, "forward/blocks.0:out")], skipped=[(0, 2, "grad/blocks.1.weight:grad")])
    assert first_of(answer)[0] == "forward"
    assert len(answer.origins) == 1


@pytest.mark.parametrize(("fault", "is_told"), [("batch/Model:in.0", True), ("forward/blocks.0:out", False)])
def test_what_only_one_run_did_is_told_where_it_may_have_shifted_the_data(fault: str, is_told: bool) -> None:
    skipped = "grad/blocks.1.weight:grad"
    answer = compare(faults=[(0, 2, fault)], skipped=[(0, 2, skipped)])
    assert answer.first is not None and answer.first.site == fault
    assert (f"Besides, only the baseline has {skipped} in this step" in answer.explanation) == is_told


@pytest.mark.parametrize("step", [1, 2])
def test_what_could_not_be_read_in_one_run_differs_from_nothing(step: int) -> None:
    baseline, candidate = make_run(), make_run(faults=[(0, 2, "forward/blocks.1:out")] if step == 2 else [])
    unread = next(event for event in candidate.steps[0][2].events if event.site.phase is Phase.FORWARD)
    unread.digest = bytes(16)
    answer = diff_runs(baseline, candidate)
    expected = None if step == 1 else "forward/blocks.1:out"
    assert (answer.first and answer.first.site) == expected


def test_the_state_of_a_module_that_the_other_run_has_not_called_is_a_note() -> None:
    baseline, candidate = make_run(), make_run()
    for record in candidate.steps[0][2:4]:
        site = Site(Phase.PARAM, "Judge", "weight", "value")
        record.events.append(Event(site, "float32", (4,), 16, digest_of("judge")))
    answer = diff_runs(baseline, candidate)
    assert answer.verdict == "identical"
    assert any("Judge" in note for note in answer.notes)


def test_the_state_of_a_module_that_a_resumed_run_has_not_called_yet_is_no_divergence() -> None:
    baseline = make_run(num_steps=6)
    for record in baseline.steps[0][1:-1]:
        site = Site(Phase.PARAM, "Judge", "weight", "value")
        record.events.append(Event(site, "float32", (4,), 16, digest_of("judge")))
    answer = diff_runs(baseline, make_run(start_step=3, num_steps=3, explicit_start=True))
    assert answer.verdict == "identical"
    assert any("Judge" in note for note in answer.notes)


def test_state_that_was_not_compared_hides_no_later_origin() -> None:
    baseline, candidate = make_run(), make_run()
    for record in candidate.steps[0][1:-1]:
        site = Site(Phase.PARAM, "Judge", "weight", "value")
        record.events.append(Event(site, "float32", (4,), 16, digest_of("judge")))
    for step in (1, 3):
        for run, word in ((baseline, "same"), (candidate, "other")):
            site = Site(Phase.FORWARD, "Model", "blocks.1", "out", is_eval=True)
            run.steps[0][step + 1].events.append(Event(site, "float32", (4,), 16, digest_of(word), group=0))
    assert [origin.step for origin in diff_runs(baseline, candidate).origins] == [1, 3]


# ---------------------------------------------------------------- ranks


def test_the_rank_whose_own_gradient_differed_is_named_and_the_others_inherit() -> None:
    answer = compare(num_ranks=4, faults=[(2, 1, "backward/blocks.1.weight:grad")])
    assert first_of(answer) == ("backward", 1, 2, "backward/blocks.1.weight:grad")
    assert len(answer.origins) == 1


def test_a_reduction_that_differs_on_equal_gradients_is_one_collective() -> None:
    answer = compare(num_ranks=3, faults=[(rank, 1, "grad/blocks.1.weight:grad") for rank in range(3)])
    assert first_of(answer) == ("collective", 1, 0, "grad/blocks.1.weight:grad")
    assert len(answer.origins) == 1
    assert answer.origins[0].ranks == (0, 1, 2)
    assert "the reduction over ranks gave another result" in answer.explanation


def test_a_gradient_that_one_rank_alone_finds_otherwise_may_have_been_changed_after_the_reduction() -> None:
    answer = compare(num_ranks=3, faults=[(1, 1, "grad/blocks.1.weight:grad")])
    assert first_of(answer) == ("collective", 1, 1, "grad/blocks.1.weight:grad")
    assert "gave rank 1 another result, or the program changed it there after the reduction" in answer.explanation
    assert "over ranks gave another result" not in answer.explanation


def test_ranks_that_part_independently_are_each_an_origin() -> None:
    faults = [(2, 1, "forward/blocks.1:out"), (0, 1, "backward/blocks.2.weight:grad")]
    answer = compare(num_ranks=3, faults=faults)
    assert [(origin.rank, origin.site) for origin in answer.origins] == [(2, faults[0][2]), (0, faults[1][2])]


def test_gradients_that_differ_on_all_ranks_at_level_state_are_one_origin() -> None:
    faults = [(rank, 1, "grad/blocks.1.weight:grad") for rank in range(3)]
    answer = compare(level=Level.STATE, num_ranks=3, faults=faults)
    assert first_of(answer) == ("compute", 1, 0, "grad/blocks.1.weight:grad")
    assert len(answer.origins) == 1
    assert "ranks 0-2" in answer.explanation


def test_a_loss_that_differs_on_one_rank_explains_the_gradients_of_all_at_level_state() -> None:
    answer = compare(level=Level.STATE, num_ranks=3, faults=[(1, 1, "loss/loss:value")])
    assert [(origin.rank, origin.site) for origin in answer.origins] == [(1, "loss/loss:value")]


@pytest.mark.parametrize("level", [Level.STATE, Level.MODULE])
@pytest.mark.parametrize(("num_ranks", "start", "fault_step"), [(3, 2, 2), (2, 2, 2), (3, 2, 3), (3, 0, 0)])
def test_buckets_that_were_not_rebuilt_yet_are_told_in_the_first_step_after_a_restart_of_three_ranks(
    level: Level, num_ranks: int, start: int, fault_step: int
) -> None:
    faults = [(rank, fault_step, "grad/blocks.1.weight:grad") for rank in range(num_ranks)]
    whole = make_run(level=level, num_ranks=num_ranks, num_steps=6)
    resumed = make_run(
        level=level, num_ranks=num_ranks, num_steps=3, start_step=start, explicit_start=True, faults=faults
    )
    for answer in (diff_runs(whole, resumed), diff_runs(resumed, whole)):
        is_told = (num_ranks, start, fault_step) == (3, 2, 2)
        assert ("first step after a restart" in answer.explanation) == is_told
        assert ("find_unused_parameters=True" in answer.remedy) == is_told


@pytest.mark.parametrize("site", ["forward/blocks.1:out", "grad/blocks.1.weight:grad"])
def test_of_very_many_ranks_those_that_differ_earliest_are_looked_into(
    monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    monkeypatch.setattr(bitcheck.origins, "MAX_LOADED_RANKS", 2)
    faults = [(rank, 1, "grad/blocks.0.weight:grad") for rank in range(4)] + [(4, 1, site)]
    answer = compare(num_ranks=6, faults=faults)
    assert answer.first is not None
    assert answer.first.rank == (4 if site.startswith("forward") else 0)
    assert len(answer.origins) == 1
    assert "6 ranks differ in this step" in answer.explanation or site.startswith("grad")


def test_one_setting_that_differs_on_every_rank_is_one_origin() -> None:
    answer = compare(num_ranks=3, lr={2: 0.05})
    assert first_of(answer) == ("hyperparameter", 2, 0, "scalar/SGD.0:lr")
    assert len(answer.origins) == 1
    assert "0.1 in the baseline and 0.05 in the candidate" in answer.explanation


def test_a_rank_that_ended_early_is_named() -> None:
    whole, cut = make_run(num_ranks=2, num_steps=6), make_run(num_ranks=2, num_steps=6)
    short = replace(cut, steps={0: cut.steps[0], 1: cut.steps[1][:4]}, statuses={1: "killed"}, status="killed")
    answer = diff_runs(whole, short)
    assert (answer.cause, answer.first) == ("ended-early", None)
    assert "rank 1" in answer.explanation


def test_a_sum_over_another_number_of_ranks_is_told_as_what_it_is() -> None:
    baseline = make_run(num_ranks=2)
    site = next(event.site for event in baseline.steps[0][1].events if event.site.phase is Phase.GRAD)
    fault = [(rank, 1, site.text(with_root=False)) for rank in (0, 1)]
    more, same = make_run(num_ranks=4, faults=fault), make_run(num_ranks=2, faults=fault)
    answer = diff_runs(baseline, more)
    assert answer.cause == "collective"
    assert "The runs have 2 and 4 ranks: what others contribute is in this sum, too" in answer.explanation
    assert "same number of ranks" in answer.remedy
    assert "ranks: what others" not in diff_runs(baseline, same).explanation


def test_a_rank_that_left_while_the_others_went_on_ended_early_though_it_says_that_all_is_well() -> None:
    whole, cut = make_run(num_ranks=3, num_steps=6), make_run(num_ranks=3, num_steps=6)
    left = replace(cut, steps={0: cut.steps[0], 1: cut.steps[1][:4], 2: cut.steps[2]})
    answer = diff_runs(whole, left)
    assert (answer.verdict, answer.cause, answer.first) == ("diverged", "ended-early", None)
    assert "fewer steps than the other run on rank 1. Of its ranks, the earliest first: rank 1 ended after step 2." in (
        answer.explanation
    )
    asked_for_less = replace(cut, steps={rank: steps[:4] for rank, steps in cut.steps.items()})
    assert diff_runs(whole, asked_for_less).verdict == "identical"


@pytest.mark.parametrize(
    ("baseline", "candidate", "left"),
    [
        ({0: 9, 1: 4}, {0: 6, 1: 4}, None),  # asked for fewer steps; rank 1 does the same in both
        ({0: 9, 1: 4}, {0: 6, 1: 6}, "baseline"),
        ({0: 6, 1: 6}, {0: 9, 1: 4}, "candidate"),
    ],
)
def test_whether_a_rank_left_is_told_by_the_others_of_its_own_run(
    baseline: dict[int, int], candidate: dict[int, int], left: str | None
) -> None:
    whole = make_run(num_ranks=2, num_steps=10)
    ours, theirs = (
        replace(whole, steps={rank: whole.steps[rank][:count] for rank, count in counts.items()})
        for counts in (baseline, candidate)
    )
    answer = diff_runs(ours, theirs)
    if left is None:
        assert answer.verdict == "identical", answer.explanation
    else:
        assert (answer.verdict, answer.cause) == ("diverged", "ended-early")
        assert f"The {left} ended" in answer.explanation or f"The {left} " in answer.explanation
        assert "rank 1 ended after step 2" in answer.explanation
        assert "rank 0 ended" not in answer.explanation


def test_a_rank_that_left_is_told_beside_what_became_of_the_others() -> None:
    fault = make_run(num_ranks=2, num_steps=6, faults=[(0, 5, "forward/blocks.1:out")])
    left = replace(fault, steps={0: fault.steps[0], 1: fault.steps[1][:4]})
    answer = diff_runs(make_run(num_ranks=2, num_steps=6), left)
    assert first_of(answer)[1:3] == (5, 0)
    assert [note for note in answer.notes if "rank 1 ended after step 2" in note]


# ---------------------------------------------------------------- what else is said


def test_the_environment_is_named_where_the_runs_diverged() -> None:
    baseline = make_run(environment={"env.PYTHONHASHSEED": "1", "torch.num_threads": "2"})
    fault = make_run(
        environment={"env.PYTHONHASHSEED": "2", "torch.num_threads": "2"}, faults=[(0, 0, "batch/Model:in.0")]
    )
    answer = diff_runs(baseline, fault)
    assert "env.PYTHONHASHSEED (1 -> 2)" in answer.explanation
    assert [entry.key for entry in answer.environment] == ["env.PYTHONHASHSEED"]
    identical = diff_runs(baseline, make_run(environment={"torch.num_threads": "2"}))
    assert identical.verdict == "identical"
    assert identical.to_json()["environment"] == {
        "identical": False,
        "differences": [{"key": "env.PYTHONHASHSEED", "baseline": "1", "candidate": None}],
    }


def test_what_went_unobserved_is_counted_in_the_verdict() -> None:
    baseline, candidate = make_run(), make_run()
    for run in (baseline, candidate):
        for record in run.steps[0][1:3]:
            record.unobserved["kernels launched by a custom extension"] = 2
    answer = diff_runs(baseline, candidate)
    assert answer.unobserved == {"kernels launched by a custom extension": 4}
    assert answer.to_json()["unobserved"] == answer.unobserved
    assert "kernels launched by a custom extension" in answer.explanation


def test_recordings_of_different_levels_are_compared_at_what_they_share() -> None:
    fault = [(0, 2, "grad/blocks.1.weight:grad")]
    assert diff_runs(make_run(), make_run(level=Level.STATE)).verdict == "identical"
    answer = diff_runs(make_run(), make_run(level=Level.STATE, faults=fault))
    assert first_of(answer) == ("compute", 2, 0, fault[0][2])
    assert any("levels module and state" in note for note in answer.notes)


def test_what_only_the_finer_level_records_in_a_shared_phase_is_no_divergence() -> None:
    finer = make_run(level=Level.OP)
    for record in finer.steps[0][1:-1]:
        record.groups.append(Group("op", "", "program", "aten.nll_loss_forward.default"))
        site = Site(Phase.BATCH, "", "program", "aten.nll_loss_forward.default.target")
        record.events.append(Event(site, "int64", (4,), 32, digest_of("target"), group=len(record.groups) - 1))
    assert diff_runs(finer, make_run(level=Level.STATE)).verdict == "identical"
    assert diff_runs(finer, make_run(level=Level.OP)).cause == "structure"


def test_a_step_after_unrecorded_ones_is_not_accused_of_what_may_have_entered_it() -> None:
    runs = [make_run(num_steps=6), make_run(num_steps=6, faults=[(0, 4, "forward/blocks.1:out")])]
    kept = [replace(run, steps={0: [run.steps[0][0], run.steps[0][5]]}) for run in runs]
    answer = diff_runs(*kept)
    assert answer.cause == "compute"
    assert "not recorded" in answer.explanation


def test_two_outputs_of_one_computation_are_one_origin() -> None:
    answer = compare(faults=[(0, 1, "backward/blocks.1:grad_in.0"), (0, 1, "backward/blocks.1.weight:grad")])
    assert len(answer.origins) == 1
    assert answer.origins[0].site == "backward/blocks.1.weight:grad"
    assert answer.origins[0].also == ("backward/blocks.1:grad_in.0",)


def test_an_argument_made_by_code_in_a_module_is_blamed_on_that_module() -> None:
    answer = compare(faults=[(0, 1, "forward/blocks.1:in.0")])
    assert first_of(answer) == ("forward", 1, 0, "forward/Model:out")
    assert answer.origins[0].also == ("forward/blocks.1:in.0",)


def test_a_recompute_unlike_its_forward_is_mentioned_though_the_runs_agree() -> None:
    def with_recompute(word: str) -> MemoryRun:
        run = make_run()
        for record in run.steps[0][1:-1]:
            forward = {
                event.site.slot: event for event in record.events if event.site[:3] == ("forward", "Model", "blocks.1")
            }
            record.groups.append(Group("recompute", "Model", "blocks.1", "Linear"))
            for slot, digest in (("in.0", forward["in.0"].digest), ("out", digest_of(word, record.step))):
                site = Site(Phase.RECOMPUTE, "Model", "blocks.1", slot)
                record.events.append(Event(site, "float32", (4,), 16, digest, group=len(record.groups) - 1))
        return run

    answer = diff_runs(with_recompute("other"), with_recompute("other"))
    assert answer.verdict == "identical"
    assert "In both runs the activation recompute of blocks.1" in answer.explanation
    parted = diff_runs(with_recompute("other"), with_recompute("another"))
    assert (parted.cause, parted.origins[0].phase) == ("forward", "recompute")


def test_a_fragment_is_compared_and_not_counted() -> None:
    baseline, candidate = make_run(), make_run()
    for run, word in ((baseline, "same"), (candidate, "other")):
        site = Site(Phase.FORWARD, "Model", "", "out", is_eval=True)
        run.steps[0][-1].events.append(Event(site, "float32", (4,), 16, digest_of(word)))
    answer = diff_runs(baseline, candidate)
    assert (answer.verdict, answer.compared.steps) == ("diverged", 4)
    assert answer.first is not None
    assert answer.first.step == 4
