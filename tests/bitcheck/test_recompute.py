"""Whether a recompute gave back what the forward pass had computed."""

from __future__ import annotations

from dataclasses import replace

from bitcheck.events import Event, Group, Phase, Site, StepKind, StepRecord
from bitcheck.memory import MemoryStep
from bitcheck.recompute import inconsistent_recomputes
from tests.bitcheck.made_up_runs import digest_of

Call = tuple[Phase, str, int, str, str]
"""(phase, module, occurrence, what goes in, what comes out)."""


def step_of(*calls: Call, is_eval: bool = False) -> MemoryStep:
    record = StepRecord(0, StepKind.STEP)
    for phase, path, occurrence, argument, output in calls:
        for slot, word in (("in.0", argument), ("out", output)):
            if word:
                site = Site(phase, "Net", path, slot, occurrence, is_eval)
                record.events.append(Event(site, "float32", (4,), 16, digest_of(word)))
    return MemoryStep(record)


def test_a_recompute_that_repeats_its_forward_is_consistent() -> None:
    assert (
        inconsistent_recomputes(step_of((Phase.FORWARD, "drop", 0, "x", "y"), (Phase.RECOMPUTE, "drop", 0, "x", "y")))
        == []
    )


def test_a_recompute_with_the_same_input_and_another_output_is_named() -> None:
    step = step_of((Phase.FORWARD, "drop", 0, "x", "y"), (Phase.RECOMPUTE, "drop", 0, "x", "z"))
    assert inconsistent_recomputes(step) == [("Net", "drop")]


def test_a_recompute_is_held_against_the_call_that_had_its_input() -> None:
    step = step_of(
        (Phase.FORWARD, "drop", 0, "x0", "y0"),
        (Phase.FORWARD, "drop", 1, "x1", "y1"),
        (Phase.RECOMPUTE, "drop", 0, "x1", "y1"),
        (Phase.RECOMPUTE, "drop", 1, "x0", "y0"),
    )
    assert inconsistent_recomputes(step) == []


def test_of_several_calls_with_its_input_one_that_gave_its_output_is_enough() -> None:
    step = step_of(
        (Phase.FORWARD, "drop", 0, "x", "one mask"),
        (Phase.FORWARD, "drop", 1, "x", "another mask"),
        (Phase.RECOMPUTE, "drop", 0, "x", "another mask"),
    )
    assert inconsistent_recomputes(step) == []


def test_a_recompute_with_another_input_is_not_judged() -> None:
    step = step_of((Phase.FORWARD, "drop", 0, "x", "y"), (Phase.RECOMPUTE, "drop", 0, "other", "z"))
    assert inconsistent_recomputes(step) == []


def test_a_recompute_that_was_stopped_before_its_output_is_not_judged() -> None:
    step = step_of((Phase.FORWARD, "drop", 0, "x", "y"), (Phase.RECOMPUTE, "drop", 0, "x", ""))
    assert inconsistent_recomputes(step) == []


def test_only_the_innermost_module_is_named() -> None:
    step = step_of(
        (Phase.FORWARD, "block", 0, "x", "z"),
        (Phase.FORWARD, "block.drop", 0, "x", "y"),
        (Phase.FORWARD, "blocks", 0, "x", "y"),
        (Phase.RECOMPUTE, "block", 0, "x", "z'"),
        (Phase.RECOMPUTE, "block.drop", 0, "x", "y'"),
        (Phase.RECOMPUTE, "blocks", 0, "x", "y'"),
    )
    assert inconsistent_recomputes(step) == [("Net", "block.drop"), ("Net", "blocks")]


def test_an_evaluation_is_no_forward_of_a_recompute() -> None:
    evaluation = step_of((Phase.FORWARD, "drop", 0, "x", "y"), is_eval=True).record
    training = step_of((Phase.RECOMPUTE, "drop", 0, "x", "z")).record
    step = MemoryStep(StepRecord(0, StepKind.STEP, [*evaluation.events, *training.events]))
    assert inconsistent_recomputes(step) == []


def test_a_forward_marked_as_an_evaluation_excuses_its_recompute() -> None:
    """Reentrant checkpointing runs a module in evaluation mode without gradients; another call of it has them."""
    own = step_of((Phase.FORWARD, "drop", 1, "x", "mask of the checkpointed call"), is_eval=True).record
    rest = step_of(
        (Phase.FORWARD, "drop", 0, "x", "mask of the direct call"),
        (Phase.RECOMPUTE, "drop", 0, "x", "mask of the checkpointed call"),
    ).record
    assert inconsistent_recomputes(MemoryStep(StepRecord(0, StepKind.STEP, [*own.events, *rest.events]))) == []
    assert inconsistent_recomputes(MemoryStep(rest)) == [("Net", "drop")]


def with_data(record: StepRecord, path: str, occurrence: int) -> StepRecord:
    """Make a forward call's argument a batch, as it is where the call is an outermost one."""
    for index, event in enumerate(record.events):
        site = event.site
        if site.phase is Phase.FORWARD and site[2:5] == (path, "in.0", occurrence):
            record.events[index] = replace(event, site=site._replace(phase=Phase.BATCH))
    return record


def test_data_that_the_outermost_module_is_given_is_its_argument() -> None:
    """Below reentrant checkpointing no gradients are noted, so what functional code made there counts as data."""
    direct = (Phase.FORWARD, "", 0, "x", "mask of the direct call")
    own = (Phase.FORWARD, "", 1, "x", "mask of the checkpointed call")
    good = step_of(direct, own, (Phase.RECOMPUTE, "", 0, "x", "mask of the checkpointed call"))
    bad = step_of(direct, own, (Phase.RECOMPUTE, "", 0, "x", "a third mask"))
    alone = step_of(own, (Phase.RECOMPUTE, "", 0, "x", "a third mask"))
    assert inconsistent_recomputes(MemoryStep(with_data(good.record, "", 1))) == []
    assert inconsistent_recomputes(MemoryStep(with_data(bad.record, "", 1))) == [("Net", "")]
    assert inconsistent_recomputes(MemoryStep(with_data(alone.record, "", 1))) == [("Net", "")]


def test_operations_do_not_say_to_which_call_they_belong() -> None:
    """A call that multiplies twice: the second multiplication of the first call is number 1, as the second call is."""
    step = step_of(
        (Phase.FORWARD, "drop", 0, "x", "y0"),
        (Phase.FORWARD, "drop", 1, "x", "y1"),
        (Phase.RECOMPUTE, "drop", 0, "x", "y1"),
    ).record
    step.groups.append(Group("op", "Net", "drop", "aten.mul.Tensor"))
    for phase, words in ((Phase.FORWARD, ("a0", "b0", "a1", "b1")), (Phase.RECOMPUTE, ("a1", "b1"))):
        for occurrence, word in enumerate(words):
            site = Site(phase, "Net", "drop", "aten.mul.Tensor.out", occurrence)
            step.events.append(Event(site, "float32", (4,), 16, digest_of(word), group=0))
    assert inconsistent_recomputes(MemoryStep(step)) == []
