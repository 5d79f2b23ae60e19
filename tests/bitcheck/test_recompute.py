"""Whether a recompute gave back what the forward pass had computed."""

from __future__ import annotations

from bitcheck.events import Event, Phase, Site, StepKind, StepRecord
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
