"""Which step of one run is which of the other."""

from __future__ import annotations

from typing import Any

import pytest

from bitcheck.align import align_runs, pair_rows
from bitcheck.events import Event, Phase, Site, StepKind, StepRecord
from bitcheck.memory import MemoryRun
from tests.bitcheck.made_up_runs import digest_of, make_run


def resumed(start: int, **plan: Any) -> MemoryRun:
    return make_run(start_step=start, num_steps=3, **plan)


def test_two_fresh_runs_are_aligned_by_number() -> None:
    alignment = align_runs(make_run(), make_run())
    assert (alignment.offset, alignment.by, alignment.remarks) == (0, "step", ())


def test_an_explicit_number_needs_no_equal_state() -> None:
    run = resumed(3, explicit_start=True, faults=[(0, 2, "param/blocks.0.weight:value")])
    assert align_runs(make_run(num_steps=6), run).offset == 0


@pytest.mark.parametrize(("baseline_is_resumed", "offset"), [(False, 3), (True, -3)])
def test_without_a_number_the_initial_snapshot_finds_its_place(baseline_is_resumed: bool, offset: int) -> None:
    whole, rest = make_run(num_steps=6), resumed(3)
    runs = (rest, whole) if baseline_is_resumed else (whole, rest)
    alignment = align_runs(*runs)
    assert (alignment.offset, alignment.by) == (offset, "state")


def test_two_resumed_runs_find_each_other() -> None:
    alignment = align_runs(resumed(2), resumed(4))
    assert (alignment.offset, alignment.by) == (2, "state")


def test_an_unnumbered_run_finds_a_numbered_one() -> None:
    alignment = align_runs(resumed(2, explicit_start=True), resumed(2))
    assert (alignment.offset, alignment.by) == (2, "state")


def test_a_state_that_is_nowhere_in_the_other_run_aligns_at_zero() -> None:
    run = resumed(3, faults=[(0, 2, "param/blocks.0.weight:value")])
    alignment = align_runs(make_run(num_steps=6), run)
    assert (alignment.offset, alignment.by) == (0, "step")


@pytest.mark.parametrize("baseline_is_resumed", [False, True])
def test_a_wrong_number_is_remarked_and_kept(baseline_is_resumed: bool) -> None:
    run = resumed(3, explicit_start=True)
    for record in run.steps[0]:
        record.step += 1
    whole = make_run(num_steps=6, explicit_start=True)
    alignment = align_runs(*((run, whole) if baseline_is_resumed else (whole, run)))
    assert alignment.offset == 0
    assert len(alignment.remarks) == 1
    name = "baseline" if baseline_is_resumed else "candidate"
    assert f"The {name} restored the state of step 2, not 3" in alignment.remarks[0]


def test_a_run_whose_state_never_changes_needs_no_remark() -> None:
    """The state restored is that of every step."""
    site = Site(Phase.PARAM, "Frozen", "weight", "value")
    event = Event(site, "float32", (4,), 16, digest_of("frozen"))

    def frozen(start: int) -> MemoryRun:
        steps = [StepRecord(start - 1, StepKind.INITIAL, [event])]
        steps += [StepRecord(step, StepKind.STEP, [event]) for step in range(start, start + 3)]
        return MemoryRun({0: steps}, info={"start_step": start})

    alignment = align_runs(frozen(0), frozen(2))
    assert (alignment.offset, alignment.remarks) == (0, ())


def pairs_of(baseline: MemoryRun, candidate: MemoryRun, **options: Any) -> list[tuple[int, StepKind]]:
    tables = baseline.rank(0).table, candidate.rank(0).table
    rows = pair_rows(*tables, align_runs(baseline, candidate), **options)
    assert len(rows) == len(rows.steps) == len(rows.baseline) == len(rows.candidate)
    offset = align_runs(baseline, candidate).offset
    for step, ours, theirs in zip(rows.steps, rows.baseline, rows.candidate, strict=True):
        assert tables[0]["step"][ours] == step == tables[1]["step"][theirs] + offset
    return [(int(step), StepKind(int(kind))) for step, kind in zip(rows.steps, rows.kinds, strict=True)]


def test_all_rows_of_equal_tables_go_together() -> None:
    expected = [(-1, StepKind.INITIAL), *((step, StepKind.STEP) for step in range(4)), (4, StepKind.FRAGMENT)]
    assert pairs_of(make_run(), make_run()) == expected


def test_an_initial_snapshot_goes_with_the_end_of_the_step_before_it() -> None:
    rows = pairs_of(make_run(num_steps=6), resumed(3))
    assert rows == [
        (2, StepKind.INITIAL),
        (3, StepKind.STEP),
        (4, StepKind.STEP),
        (5, StepKind.STEP),
        (6, StepKind.FRAGMENT),
    ]


def test_a_fragment_goes_with_no_step_of_a_longer_run() -> None:
    rows = pairs_of(make_run(num_steps=4), make_run(num_steps=6))
    assert rows[-1] == (3, StepKind.STEP)


def test_an_unfinished_piece_is_left_out() -> None:
    assert pairs_of(make_run(), make_run(), with_fragments=False)[-1] == (3, StepKind.STEP)
    longer = make_run(num_steps=6)
    longer.steps[0][5].kind = StepKind.FRAGMENT
    assert pairs_of(make_run(num_steps=5), longer, with_fragments=False)[-1] == (3, StepKind.STEP)


@pytest.mark.parametrize("candidate_steps", [4, 6])
def test_until_is_the_last_step_paired(candidate_steps: int) -> None:
    assert pairs_of(make_run(), make_run(num_steps=candidate_steps), until=2)[-1] == (2, StepKind.STEP)
