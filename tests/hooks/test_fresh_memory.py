"""Memory that was handed out and not yet written, at level `op`: what is in it is chance, and no fault by itself."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.events import Level
from bitcheck.hooks import fresh as fresh_memory
from bitcheck.hooks.fresh import CHANCE, SIGN, Rerun, Shadow
from bitcheck.hooks.native import native
from bitcheck.hooks.op_schema import facts_of
from bitcheck.hooks.ops import OpHooks
from bitcheck.hooks.recorder import Recorder
from bitcheck.memory import MemoryRun, MemoryStore
from tests.two_memories import compare_in_two_memories

Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What is done with (a permutation, fresh memory of its shape)."""
Empty = Callable[..., torch.Tensor]
"""`torch.empty` of float32, in memory that somebody had before."""
Program = Callable[[Empty], torch.Tensor]

EXPERT = torch.tensor([0, 0, 1, 2, 2, 2, 1, 0])
POSITION = torch.tensor([0, 1, 0, 0, 1, 2, 1, 2])
"""Where in a buffer of 3 experts with 4 slots each the 8 tokens go: 4 slots stay empty."""
CHOSEN = EXPERT == 1
TOKENS = torch.arange(32.0).reshape(8, 4) - 16
NATIVE = pytest.param(True, marks=pytest.mark.skipif(native is None, reason="hooks/csrc was not compiled"))


@pytest.fixture(params=[NATIVE, False], ids=["compiled", "python"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[OpHooks]:
    """Record by the compiled code, and by the Python alone; return what is made to do so."""
    made: list[OpHooks] = []
    make = OpHooks.__init__

    def make_one(self: OpHooks, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.append(self)
        if not request.param:
            self._run_natively, self._open, self._close = OpHooks._run, self._begin, self._end

    monkeypatch.setattr(OpHooks, "__init__", make_one)
    return made


def indexed(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    fresh[order] = torch.arange(len(order))
    return fresh


def scattered(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.scatter_(0, order, torch.arange(len(order)))


def halves(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    fresh[:4] = order[4:]
    fresh[4:] = order[:4]
    return fresh


def scattered_by_halves(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    for half in (fresh[:4], fresh[4:]):
        half.scatter_(0, order[:4].argsort(), order[:4])
    return fresh


def scaled_to_nothing(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return torch.addmv(fresh, order.outer(order), order, beta=0)


def scaled(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return torch.addmv(fresh, order.outer(order), order, beta=1)


def read(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh + order


def added_to(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.add_(order)


def read_beside_what_was_written(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    fresh[:4] = order[:4]
    return fresh[3:] + 1


def written_in_part(order: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    return fresh.scatter_(0, order[:4], order[:4])


def compare(use: Use) -> Answer:
    """Record a step twice, with other bits in fresh memory the second time."""

    def run(empty: Empty) -> torch.Tensor:
        order = torch.randperm(8)
        return use(order, empty(8, dtype=order.dtype))

    return compare_programs(run, run)


def compare_programs(*programs: Program, num_steps: int = 1, **options: Any) -> Answer:
    """Record a baseline and a candidate, with other bits in fresh memory the second time."""
    runs = [
        record(program, byte, num_steps, **options)[0] for program, byte in zip(programs, (0x35, 0xCA), strict=True)
    ]
    return diff_runs(*runs)


def record(program: Program, byte: int, num_steps: int = 1, **options: Any) -> tuple[MemoryRun, Recorder]:
    """Record steps whose gradients a program's result weighs."""
    memory = MemoryStore()
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = Recorder(lambda: memory, level=Level.OP, **options)
    recorder.start(net)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        fresh = torch.empty(*shape, dtype=dtype)
        fresh.view(torch.uint8).numpy()[...] = byte  # as whoever had the memory before may have left it
        return fresh

    try:
        for _ in range(num_steps):
            weight = program(empty).float().mean()
            (net(torch.ones(3, 8)) * weight).sum().backward()
            optimizer.step()
    finally:
        recorder.stop()
    assert recorder.trouble is None
    return MemoryRun({0: memory.records}, level=Level.OP, status="complete", environment={}, info={}), recorder


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("use", [indexed, scattered, halves, scattered_by_halves, scaled_to_nothing])
def test_what_is_written_over_is_not_read(use: Use) -> None:
    answer = compare(use)
    assert answer.verdict == "identical", answer.explanation


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize(
    ("use", "op"),
    [
        (read, "aten.add.Tensor"),
        (scaled, "aten.addmv.default"),
        (read_beside_what_was_written, "aten.add.Tensor"),
        (added_to, "aten.add_.Tensor"),
        (written_in_part, "aten.scatter_.src"),
    ],
)
def test_what_reads_it_or_passes_it_on_is_named(use: Use, op: str) -> None:
    answer = compare(use)
    assert answer.first is not None
    assert op in str(answer.first.site)
    if answer.cause == "data":
        assert "never written" in answer.explanation
    assert "torch.empty" in answer.remedy and "`bitcheck scan --poison -- CMD`" in answer.remedy


def masked(empty: Empty) -> torch.Tensor:
    buffer = empty(8, 4)
    buffer[CHOSEN] = TOKENS[CHOSEN]
    buffer[~CHOSEN] = TOKENS[~CHOSEN] * 2
    return buffer


def masked_by_nothing_and_all(empty: Empty) -> torch.Tensor:
    buffer, nothing = empty(8, 4), torch.zeros(8, dtype=torch.bool)
    buffer[nothing] = TOKENS[nothing]
    buffer[~nothing] = TOKENS
    return buffer


def every_second_row(empty: Empty) -> torch.Tensor:
    buffer = empty(8, 4)
    buffer[0::2] = TOKENS[0::2]
    half = buffer.clone()
    buffer[1::2] = TOKENS[1::2]
    return buffer + half[0::2].repeat(2, 1)


def rows_out_of_order(empty: Empty) -> torch.Tensor:
    buffer = empty(8, 4)
    buffer[6] = TOKENS[6]
    buffer[0] = TOKENS[0]
    copy = buffer.clone()
    return copy[6] + copy[0]


def dispatched_to_experts(empty: Empty) -> torch.Tensor:
    slots = empty(3, 4, 4)
    slots[EXPERT, POSITION] = TOKENS
    return slots[EXPERT, POSITION]


def multiplied_by_experts(empty: Empty) -> torch.Tensor:
    slots = empty(3, 4, 4)
    slots[EXPERT, POSITION] = TOKENS
    weight = torch.ones(3, 4, 5, requires_grad=True)
    hidden = nn.functional.silu(torch.bmm(slots, weight))
    hidden = nn.functional.dropout(nn.functional.layer_norm(hidden, (5,)).softmax(-1))
    return hidden[EXPERT, POSITION]


def given_to_modules(empty: Empty) -> torch.Tensor:
    experts = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4).eval())
    slots = empty(12, 4)
    slots[:8] = TOKENS
    result: torch.Tensor = experts(slots)[:8]
    return result


def chosen_by_where(empty: Empty) -> torch.Tensor:
    buffer = empty(8, 4)
    buffer[CHOSEN] = TOKENS[CHOSEN]
    return torch.where(CHOSEN[:, None], buffer, 0) + buffer.masked_fill(~CHOSEN[:, None], 1)


def copied_with_its_padding(empty: Empty) -> torch.Tensor:
    padded = empty(8, 8)
    padded[:, :4] = TOKENS
    copy = torch.cat([padded.clone(), padded.t().contiguous().t()])
    return copy.index_select(0, POSITION)[:, :4] + torch.stack([padded, padded])[1].narrow(1, 1, 3).sum()


def padded_indices(empty: Empty) -> torch.Tensor:
    indices = empty(3, 4, dtype=torch.int64)
    indices[EXPERT, POSITION] = POSITION
    return nn.functional.embedding(indices.clamp(0, 3), TOKENS)[EXPERT, POSITION]


def without_autograd(empty: Empty) -> torch.Tensor:
    with torch.inference_mode():
        result = masked(empty) + multiplied_by_experts_at_rest(empty)
    return result.clone()


def multiplied_by_experts_at_rest(empty: Empty) -> torch.Tensor:
    slots = empty(3, 4, 4)
    slots[EXPERT, POSITION] = TOKENS
    return torch.bmm(slots, torch.ones(3, 4, 4)).exp_()[EXPERT, POSITION]


def kinds_of_numbers(empty: Empty) -> torch.Tensor:
    found = TOKENS
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int16, torch.uint8, torch.bool):
        slots = empty(3, 4, 4, dtype=dtype)
        slots[EXPERT, POSITION] = TOKENS.to(dtype)
        copy = slots.mT.contiguous().mT
        found = found + (copy + copy).reshape(12, 4)[EXPERT * 4 + POSITION].to(torch.complex64).real
    return found


def unravelled(empty: Empty) -> torch.Tensor:
    parts = [empty(4), empty(2, 3)]
    for part in parts:
        part.view(-1)[:2].copy_(TOKENS[0, :2])
    torch._foreach_mul_(parts, 2.0)
    parts = torch._foreach_add(parts, 1.0)
    return parts[0][0] * 3 + parts[1][0, 1]


def kept_over_steps() -> Program:
    kept: list[torch.Tensor] = []

    def run(empty: Empty) -> torch.Tensor:
        if not kept:
            kept.append(empty(8, 4))
            kept[0][CHOSEN] = TOKENS[CHOSEN]
        return kept[0][CHOSEN] * 2

    return run


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize(
    "program",
    [
        masked,
        masked_by_nothing_and_all,
        every_second_row,
        rows_out_of_order,
        dispatched_to_experts,
        multiplied_by_experts,
        given_to_modules,
        chosen_by_where,
        copied_with_its_padding,
        padded_indices,
        without_autograd,
        kinds_of_numbers,
        unravelled,
    ],
)
def test_a_part_that_nobody_wrote_and_that_has_no_effect_is_no_difference(program: Program) -> None:
    answer = compare_programs(program, program)
    assert answer.verdict == "identical", answer.explanation


@pytest.mark.usefixtures("how")
def test_what_is_known_of_a_part_outlives_the_step() -> None:
    answer = compare_programs(kept_over_steps(), kept_over_steps(), num_steps=3)
    assert answer.verdict == "identical", answer.explanation


def activated(empty: Empty) -> torch.Tensor:
    buffer = empty(8, 4)
    buffer[CHOSEN] = TOKENS[CHOSEN]
    return torch.relu(buffer * 2)


def read_as_a_number(empty: Empty) -> torch.Tensor:
    buffer = empty(8, 4)
    buffer[CHOSEN] = TOKENS[CHOSEN]
    buffer.sum().item()
    return TOKENS


def normalised_in_a_batch() -> Program:
    norm = nn.BatchNorm1d(4)

    def run(empty: Empty) -> torch.Tensor:
        norm(TOKENS)
        buffer = empty(8, 4)
        buffer[CHOSEN] = TOKENS[CHOSEN]
        with torch.no_grad():
            norm(buffer)
        return TOKENS

    return run


def copied_into_a_parameter() -> Program:
    module = nn.Linear(4, 8)

    def run(empty: Empty) -> torch.Tensor:
        module(TOKENS)
        buffer = empty(8, 4)
        buffer[CHOSEN] = TOKENS[CHOSEN]
        with torch.no_grad():
            module.weight.copy_(buffer)
        return TOKENS

    return run


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize(
    "make", [lambda: activated, lambda: read_as_a_number, normalised_in_a_batch, copied_into_a_parameter]
)
def test_a_part_that_nobody_wrote_is_named_where_it_takes_effect(make: Callable[[], Program]) -> None:
    torch.manual_seed(0)
    baseline = make()
    torch.manual_seed(0)
    answer = compare_programs(baseline, make())
    assert answer.first is not None
    assert "aten.index_put_.default.self.written" in str(answer.first.site)
    assert "torch.empty" in answer.remedy and "`bitcheck scan --poison -- CMD`" in answer.remedy


@pytest.mark.usefixtures("how")
def test_what_has_no_effect_stays_out_beside_what_has() -> None:
    def run(empty: Empty) -> torch.Tensor:
        return multiplied_by_experts(empty).mean() + activated(empty)

    answer = compare_programs(run, run)
    assert answer.first is not None
    assert {str(origin.site) for origin in answer.origins} == {"forward/program:aten.index_put_.default.self.written#1"}


def faulty(bits: int) -> Program:
    """Change bits of an element that was written, of memory that was written in part, where no operation does it."""

    def run(empty: Empty) -> torch.Tensor:
        slots = empty(3, 4, 4)
        slots[EXPERT, POSITION] = TOKENS
        slots.numpy().view("uint32")[1, 1, 3] ^= bits
        copy = slots.clone()
        return torch.bmm(copy, torch.ones(3, 4, 4))[EXPERT, POSITION]

    return run


@pytest.mark.usefixtures("how")
def test_a_difference_in_the_part_that_was_written_is_found_and_named() -> None:
    answer = compare_programs(faulty(0), faulty(1))
    assert answer.first is not None
    assert str(answer.first.site) == "forward/program:aten.clone.default.self"
    assert compare_programs(faulty(1), faulty(1)).verdict == "identical"


@pytest.mark.usefixtures("how")
def test_what_is_left_out_is_said_once_in_a_step() -> None:
    run, _ = record(multiplied_by_experts, 1, num_steps=2)
    for step in (1, 2):
        (remark,) = run.rank(0).load(step).remarks
        assert "torch.empty" in remark


def written_in_full_by_step_1(more: int) -> Program:
    kept: list[torch.Tensor] = []

    def run(empty: Empty) -> torch.Tensor:
        if not kept:
            kept.append(empty(8, 4))
            kept[0][:4] = TOKENS[:4]
        elif len(kept) == 1:
            kept.append(TOKENS + more)
            kept[0][4:] = kept[1][4:]
        return kept[0].clone()[:4]

    return run


@pytest.mark.usefixtures("how")
def test_a_step_that_is_not_recorded_may_write_the_rest() -> None:
    answer = compare_programs(written_in_full_by_step_1(0), written_in_full_by_step_1(1), num_steps=3, every=2)
    assert answer.first is not None
    assert (answer.first.step, str(answer.first.site)) == (2, "forward/program:aten.clone.default.self")
    answer = compare_programs(written_in_full_by_step_1(1), written_in_full_by_step_1(1), num_steps=3, every=2)
    assert answer.verdict == "identical", answer.explanation


@pytest.mark.usefixtures("how")
def test_the_programs_bits_and_generators_are_its_own() -> None:
    def run(empty: Empty) -> torch.Tensor:
        results.append(multiplied_by_experts(empty) + masked(empty).mean())
        buffer = empty(64)
        buffer[:60] = 1
        results.append(nn.functional.dropout(buffer)[:60])
        buffer[::2].normal_()
        buffer.masked_fill_(torch.arange(64) > 5, 2).mul_(torch.rand(64))
        results.append(buffer[:60].clone())
        results.append(torch.rand(3))
        return results[-1]

    results: list[torch.Tensor] = []
    record(run, 1)
    recorded, results = results, []
    torch.manual_seed(0)
    nn.Linear(8, 8)
    run(torch.empty)
    for own, bare in zip(recorded, results, strict=True):
        assert torch.equal(own, bare)


def test_a_program_that_writes_all_that_it_takes_is_recorded_as_ever(
    how: list[OpHooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(empty: Empty) -> torch.Tensor:
        rows = empty(8, 4)
        for row in range(8):
            rows[row] = TOKENS[row]
        assert not how[-1].in_part
        return nn.functional.dropout(empty(8, 4).copy_(rows))

    def fail(*args: Any) -> None:
        raise AssertionError("an operation is executed again")

    monkeypatch.setattr(Rerun, "__init__", fail)
    record(run, 1)


@pytest.mark.usefixtures("how")
def test_memory_that_only_numpy_wrote_is_data() -> None:
    def filled(first: float) -> Program:
        def run(empty: Empty) -> torch.Tensor:
            batch = empty(8, 4)
            batch.numpy()[:] = TOKENS.numpy()
            batch.numpy()[0, 0] = first
            return batch.div_(2)[:1]

        return run

    assert compare_programs(filled(3), filled(3)).verdict == "identical"
    answer = compare_programs(filled(3), filled(4))
    assert answer.first is not None
    assert str(answer.first.site) == "forward/program:aten.div_.Tensor.self.written"


@pytest.mark.usefixtures("how")
def test_nothing_is_kept_of_memory_that_is_gone() -> None:
    held: list[weakref.ref[Any]] = []

    def run(empty: Empty) -> torch.Tensor:
        slots = empty(3, 4, 4)
        slots[EXPERT, POSITION] = TOKENS
        held.append(weakref.ref(slots.untyped_storage()))
        return slots[EXPERT, POSITION]

    _, recorder = record(run, 1, num_steps=2)
    gc.collect()
    assert recorder.ops is not None
    recorder.ops.forget()
    assert not recorder.ops.in_part


def test_memory_that_is_written_in_full_is_followed_no_more(how: list[OpHooks]) -> None:
    followed: list[int] = []

    def run(empty: Empty) -> torch.Tensor:
        result = masked(empty)
        result = result.abs()
        followed.append(len(how[-1].in_part))
        result = multiplied_by_experts(empty)
        followed.append(len(how[-1].in_part))
        return result

    record(run, 1)
    assert followed[0] == 0 < followed[1]


RECURRENT = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.ModuleList([nn.LSTM(24, 40, 2, batch_first=True), nn.GRU(40, 8, batch_first=True), nn.BatchNorm1d(8)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(5, 17, 24)
y = net[2](net[1](net[0](x)[0])[0][:, -1])
y.square().mean().backward()
optimizer.step()
"""


def test_an_operator_that_disagrees_with_itself_is_not_taken_for_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[int] = []

    def race(_: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def double(value: torch.Tensor) -> torch.Tensor:
            executed.append(1)
            result = value * 2
            result[3] += len(executed)
            return result

        return double

    monkeypatch.setattr(fresh_memory, "find_operator", race)
    chance = np.array([0, 1, 0, 0], np.uint8)
    value = torch.ones(4)
    found = Rerun(facts_of(torch.ops.aten.abs.default), (value,), {}, {id(value): chance}).chances()
    assert found is not None
    assert found["out"].tolist() == [0, CHANCE, 0, 0]
    assert value.tolist() == [1, 1, 1, 1]


def test_of_a_zero_only_the_sign_hangs_on_chance() -> None:
    empty_slot, weight = torch.tensor([[0.0], [2.0]]), torch.ones(1, 2)
    chance = np.array([[1, 1]], np.uint8)
    found = Rerun(facts_of(torch.ops.aten.mm.default), (empty_slot, weight), {}, {id(weight): chance}).chances()
    assert found is not None
    assert found["out"].tolist() == [[SIGN, SIGN], [CHANCE, CHANCE]]
    signs = np.array([[SIGN], [0]], np.uint8)
    found = Rerun(
        facts_of(torch.ops.aten.add.Tensor), (empty_slot, empty_slot + 1), {}, {id(empty_slot): signs}
    ).chances()
    assert found == {}


def test_a_storage_is_complete_once_its_last_byte_is_written() -> None:
    buffer = torch.empty(300_000, 2)
    known = Shadow(buffer.nbytes, 0, 0)
    known.note(buffer[:, 0], None)
    known.note(buffer[1:, 1], None)
    assert not known.is_complete
    chance = known.chance(buffer)
    assert chance is not None
    assert np.flatnonzero(chance).tolist() == [1]
    known.note(buffer[:1], None)
    assert known.is_complete
    known.note(buffer[:1], np.array([[CHANCE, SIGN]], np.uint8))
    assert not known.is_complete


EXPERTS = """
import torch
from torch import nn

torch.manual_seed(0)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.norm = nn.LayerNorm(32)
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x):
        weight, expert = self.gate(x).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(expert, 4)
        position = (chosen.cumsum(0) * chosen).sum(-1) - 1
        slots = torch.empty(4, len(x), 16)
        slots[expert, position] = x
        hidden = nn.functional.silu(self.norm(torch.bmm(slots, self.up)))
        y = torch.bmm(hidden, self.down)[expert, position] * weight[:, None]
        is_first = expert == 0
        scaled = torch.empty_like(y)
        scaled[is_first] = y[is_first]
        scaled[~is_first] = y[~is_first] * 2
        return scaled


net = nn.Sequential(Experts(), Experts())
optimizer = torch.optim.AdamW(net.parameters())
for step in range(2):
    net(torch.randn(24, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("program", [RECURRENT, EXPERTS], ids=["recurrent", "experts"])
def test_what_operators_and_programs_leave_empty_tells_no_two_runs_apart(tmp_path: Path, program: str) -> None:
    (tmp_path / "train.py").write_text(program)
    answer = compare_in_two_memories(
        tmp_path, lambda run: ["bitcheck", "run", "--level", "op", "-o", run, "--", sys.executable, "train.py"]
    )
    assert answer.verdict == "identical", answer.explanation


def test_which_outputs_are_room_to_work_in() -> None:
    aten = torch.ops.aten
    flash = facts_of(aten._scaled_dot_product_flash_attention.default)
    assert [flash.is_private(f"out.{place}") for place in range(9)] == [False] * 6 + [True] * 3
    assert facts_of(aten.mkldnn_rnn_layer_backward.default).unread == {"workspace"}
    assert not facts_of(aten.native_batch_norm.default).private


@pytest.mark.usefixtures("how")
def test_another_threads_random_numbers_are_those_of_the_bare_program() -> None:
    def run(empty: Empty) -> torch.Tensor:
        numbers: list[float] = []
        is_over = threading.Event()

        def draw() -> None:
            while not is_over.is_set() or len(numbers) < 200:
                numbers.append(torch.rand(()).item())

        torch.manual_seed(1)
        feeder = threading.Thread(target=draw)
        feeder.start()
        buffer = empty(64, 64)
        for row in range(0, 60, 2):
            buffer[row] = row
            (buffer * 2).sum(1)
        is_over.set()
        feeder.join()
        drawn.append(numbers)
        return buffer[::2].sum()

    drawn: list[list[float]] = []
    record(run, 1)
    torch.manual_seed(1)
    assert drawn[0] == [torch.rand(()).item() for _ in drawn[0]]


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("is_small", [True, False])
def test_what_is_given_many_bytes_is_not_executed_again(is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[int] = []
    execute = Rerun._execute

    def execute_one(self: Rerun, number: int) -> Any:
        executed.append(number)
        return execute(self, number)

    def run(empty: Empty) -> torch.Tensor:
        buffer = empty(64, 64)
        buffer[CHOSEN.nonzero()[:, 0]] = 1.0
        return (buffer * 2)[CHOSEN.nonzero()[:, 0]]

    monkeypatch.setattr(Rerun, "_execute", execute_one)
    if not is_small:
        monkeypatch.setattr(fresh_memory, "MOST_BYTES", 8192)
    record(run, 1)
    assert bool(executed) == is_small


@pytest.mark.usefixtures("how")
def test_large_memory_is_followed_by_ranges_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_memory, "MOST_STORAGE_BYTES", 100)
    monkeypatch.setattr(Shadow, "__init__", lambda *_: pytest.fail("a byte of knowledge for each byte"))
    record(lambda empty: empty(64).index_fill_(0, torch.arange(0, 64, 2), 1.0)[::2], 1)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("num_dimensions", [8, 31, 32, 64, 70])
def test_tensors_of_many_dimensions_are_recorded(num_dimensions: int) -> None:
    def run(empty: Empty) -> torch.Tensor:
        buffer = empty(8)
        buffer[::2] = 1.0
        return (buffer.view([1] * (num_dimensions - 1) + [8]) * 2).flatten()[::2]

    record(run, 1)


QUIET, OTHER, NAN = 0x3F800000, 0x40000000, 0x7FC00001


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize(("before", "has_effect"), [((QUIET, OTHER), False), ((QUIET, NAN), True), ((NAN, NAN), False)])
def test_a_nan_that_zeros_do_not_hide_is_told_where_it_is_read(before: tuple[int, int], has_effect: bool) -> None:
    def holding(bits: int) -> Program:
        def run(empty: Empty) -> torch.Tensor:
            buffer = empty(8, 4)
            buffer.numpy().view(np.uint32)[...] = bits
            buffer[:4] = TOKENS[:4]
            weight = nn.Parameter(torch.ones(4, 2))
            (buffer @ weight)[:4].sum().backward()
            assert weight.grad is not None
            return weight.grad.nan_to_num(7.0)

        return run

    baseline, candidate = (record(holding(bits), 1)[0] for bits in before)
    answer = diff_runs(baseline, candidate)
    assert (answer.verdict == "diverged") == has_effect, answer.explanation
    if has_effect:
        assert "torch.empty" in answer.explanation + answer.remedy
        assert "from equal inputs" not in answer.explanation
