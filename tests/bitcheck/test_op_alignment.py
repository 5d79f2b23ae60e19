"""Operations of two runs side by side: one more, one less, one moved, and what still differs after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bitcheck import op_alignment
from bitcheck.attribution import attribute_step
from bitcheck.diff import diff_runs
from bitcheck.events import Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStep, MemoryStore
from bitcheck.op_alignment import common_subsequence
from bitcheck.pairing import StepPair
from tests.bitcheck.made_up_runs import digest_of

Op = tuple[str, tuple[int, ...], str]
"""(operation, shape, word on which its bits depend beside its input's)."""


def chain(*operations: Op) -> MemoryStep:
    """A step in which each operation reads what the one before it gave."""
    record = StepRecord(0, StepKind.STEP)
    bits, last, counts = digest_of("batch"), (), dict.fromkeys((name for name, _, _ in operations), 0)
    for name, shape, word in operations:
        record.groups.append(Group("op", "Net", "fc", name))
        group = len(record.groups) - 1
        for slot, digest in (("self", bits), ("out", digest_of(bits, name, word))):
            site = Site(Phase.FORWARD, "Net", "fc", f"{name}.{slot}", counts[name])
            record.events.append(Event(site, "float32", shape, 16, digest, b"", group, last))
            last = (len(record.events) - 1,)
        counts[name] += 1
        bits = record.events[-1].digest
    return MemoryStep(record)


def parallel(*operations: Op) -> MemoryStep:
    """A step whose operations read nothing of each other."""
    record = StepRecord(0, StepKind.STEP)
    counts = dict.fromkeys((name for name, _, _ in operations), 0)
    for name, shape, word in operations:
        record.groups.append(Group("op", "Net", "fc", name))
        group = len(record.groups) - 1
        for slot in ("self", "out"):
            site = Site(Phase.FORWARD, "Net", "fc", f"{name}.{slot}", counts[name])
            inputs = (len(record.events) - 1,) if slot == "out" else ()
            bits = digest_of(name, shape, word if slot == "out" else "")
            record.events.append(Event(site, "float32", shape, 16, bits, b"", group, inputs))
        counts[name] += 1
    return MemoryStep(record)


def blamed(baseline: MemoryStep, candidate: MemoryStep) -> list[tuple[str, bool]]:
    """(site, whether only one run has it) of every origin."""
    pair = StepPair(0, baseline, candidate)
    return [
        (pair.site(blame.shown.position).text(False), blame.is_structural) for blame in attribute_step({0: pair}).blames
    ]


def mm(word: str = "", rows: int = 4) -> Op:
    return ("mm", (rows,), word)


def relu(rows: int = 4) -> Op:
    return ("relu", (rows,), "")


def test_an_inserted_operation_is_named_once_and_does_not_shift_those_after_it() -> None:
    baseline = parallel(mm(), relu(), mm(rows=8), mm(rows=2))
    candidate = parallel(mm(), relu(), mm(rows=5), mm(rows=8), mm(rows=2))
    assert blamed(baseline, candidate) == [("forward/fc:mm.self#1", True)]
    assert blamed(candidate, baseline) == [("forward/fc:mm.self#1", True)]
    pair = StepPair(0, baseline, candidate)
    assert len(pair.parted()) == 2


def test_a_removed_operation_is_named_by_the_number_it_had() -> None:
    baseline, candidate = parallel(mm(), mm(rows=8), relu()), parallel(mm(), relu())
    assert blamed(baseline, candidate) == [("forward/fc:mm.self#1", True)]


def test_a_moved_operation_is_one_change_of_structure() -> None:
    baseline = parallel(("exp", (4,), ""), mm(), relu(), mm(rows=8))
    candidate = parallel(mm(), relu(), mm(rows=8), ("exp", (4,), ""))
    assert blamed(baseline, candidate) == [("forward/fc:exp.self", True)]


def test_of_equal_operations_in_a_row_the_one_with_new_bits_is_the_inserted_one() -> None:
    """Three updates of tensors of one shape; the candidate scales the second one once more."""
    baseline = parallel(mm("a"), mm("b"), mm("c"))
    candidate = parallel(mm("a"), mm("extra"), mm("b"), mm("c"))
    assert blamed(baseline, candidate) == [("forward/fc:mm.self#1", True)]


def test_an_independent_fault_after_an_inserted_operation_is_found_too() -> None:
    baseline = parallel(mm(), relu(), mm(rows=8))
    candidate = parallel(mm(), ("exp", (4,), ""), relu(), mm("fault", rows=8))
    assert blamed(baseline, candidate) == [("forward/fc:exp.self", True), ("forward/fc:mm.out#1", False)]


def test_what_follows_from_an_inserted_operation_is_no_origin() -> None:
    assert blamed(chain(mm(), relu(), mm()), chain(mm(), mm(rows=3), relu(), mm())) == [("forward/fc:mm.self#1", True)]


def test_other_shapes_alone_are_no_change_of_structure() -> None:
    """A short batch gives every operation other shapes."""
    baseline, candidate = chain(mm(), relu(), mm()), chain(mm(rows=3), relu(rows=3), mm(rows=3))
    pair = StepPair(0, baseline, candidate)
    assert not any(pair.is_missing(position) for position in range(len(pair)))


def test_same_named_operations_that_changed_places_are_told_apart_by_their_shapes() -> None:
    baseline, candidate = parallel(mm(rows=4), mm(rows=8)), parallel(mm(rows=8), mm(rows=4))
    assert [is_structural for _, is_structural in blamed(baseline, candidate)] == [True]


def test_beyond_the_limit_of_changes_operations_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_alignment, "MAX_CHANGES", 3)
    baseline = parallel(*((f"a{number}", (4,), "") for number in range(5)), mm())
    candidate = parallel(*((f"b{number}", (4,), "") for number in range(5)), mm())
    assert op_alignment.align_operations(*map(op_alignment.operations, (baseline, candidate))) is None
    pair = StepPair(0, baseline, candidate)
    assert sum(not pair.is_missing(position) for position in range(len(pair))) == 2


def longest(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of a longest common subsequence, by the table of all prefixes."""
    row = [0] * (len(second) + 1)
    for mine in first:
        before = list(row)
        for at, other in enumerate(second, 1):
            row[at] = before[at - 1] + 1 if mine == other else max(before[at], row[at - 1])
    return row[-1]


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_a_common_subsequence_is_as_long_as_the_table_says(first: list[int], second: list[int]) -> None:
    matches = common_subsequence(first, second)
    assert matches is not None and len(matches) == longest(first, second)
    assert all(first[at] == second[to] for at, to in matches)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(matches))


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_swapping_the_runs_swaps_the_pairs_alone(first: list[int], second: list[int]) -> None:
    def build(numbers: list[int]) -> list[op_alignment.Operation]:
        return op_alignment.operations(parallel(*((f"op{number}", (4,), "") for number in numbers)))

    ours, theirs = build(first), build(second)
    matches = op_alignment.align_operations(ours, theirs)
    mirrored = op_alignment.align_operations(theirs, ours)
    assert matches is not None and mirrored is not None
    assert matches == [(mine, other) for other, mine in mirrored]


# ---------------------------------------------------------------- a recorded program


class Net(nn.Module):
    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x).exp()
        if self.extra:
            h = h.mul(2.0).mul(0.5)
        return self.fc(h).exp()


def record(extra: bool) -> MemoryRun:
    torch.manual_seed(0)
    memory = MemoryStore()
    net = Net(extra)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    recorder = Recorder(lambda: memory, level=Level.OP)
    recorder.start(net)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    finally:
        recorder.stop()
    return MemoryRun({0: memory.records}, level=Level.OP, status="complete", environment={}, info={"digest_version": 1})


def test_operations_that_change_no_bit_are_the_only_thing_that_a_diff_names() -> None:
    answer = diff_runs(record(extra=False), record(extra=True))
    assert answer.cause == "structure"
    assert answer.first is not None and answer.first.site == "forward/Net:aten.mul.Tensor.self"
    assert answer.first.missing_in == "baseline"
    assert {origin.step for origin in answer.origins} == {0, 1}
    assert len(answer.origins) == 2


def test_the_same_recorded_program_has_no_change_of_structure() -> None:
    assert diff_runs(record(extra=True), record(extra=True)).verdict == "identical"
