"""One operation's inputs saved and executed again: the same call, in another process, with nothing but torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bitcheck.events import Phase
from bitcheck.hooks import replay
from bitcheck.hooks.capture import Capture, snapshot_call
from bitcheck.hooks.op_schema import facts_of
from bitcheck.repro import run_repro, write_repro
from bitcheck.statistics import rate_interval

aten = torch.ops.aten


def snapshot(op: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return snapshot_call(facts_of(op), args, kwargs)


def through_file(data: dict[str, Any], path: Path) -> dict[str, Any]:
    torch.save(data, path)
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def test_an_operation_gives_what_it_gave_with_strides_dtypes_flags_and_numbers(tmp_path: Path) -> None:
    left = torch.randn(6, 8).t()[1:5:2]
    right = torch.randn(1, 6).expand(2, 6).to(torch.bfloat16).float()
    data = through_file(snapshot(aten.add.Tensor, left, right, alpha=3), tmp_path / "x.pt")
    (result,) = replay.execute(data)
    assert torch.equal(result, torch.add(left, right, alpha=3))
    storages = [flat.clone() for flat in data["storages"]]
    copy = replay.decode(data["args"][0], storages)
    assert copy.stride() == left.stride() and copy.shape == left.shape
    assert copy.data_ptr() % 64 == left.data_ptr() % 64


def test_words_of_pytorch_survive(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    call = snapshot(
        aten._to_copy.default, x, dtype=torch.float64, device=torch.device("cpu"), memory_format=torch.contiguous_format
    )
    (result,) = replay.execute(through_file(call, tmp_path / "x.pt"))
    assert result.dtype == torch.float64 and torch.equal(result, x.double())


def test_a_conjugate_and_a_negative_view_are_what_they_stand_for(tmp_path: Path) -> None:
    numbers = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    for view in (numbers.conj(), numbers.conj().imag, numbers):
        (result,) = replay.execute(through_file(snapshot(aten.mul.Tensor, view, 2), tmp_path / "x.pt"))
        assert torch.equal(result, view.resolve_conj().resolve_neg() * 2)


def test_arguments_that_share_memory_still_share_it() -> None:
    base = torch.arange(8.0)
    call = snapshot(aten.add_.Tensor, base[2:6], base[2:6])
    assert len(call["storages"]) == 1
    assert torch.equal(replay.execute(call)[0], 2 * base[2:6])
    assert torch.equal(base, torch.arange(8.0)), "saving and executing leave the job's tensors alone"


def test_what_an_operation_writes_is_compared_and_every_execution_starts_anew() -> None:
    call = snapshot(aten.index_put_.default, torch.zeros(4), [torch.tensor([1, 1, 2])], torch.ones(3), True)
    first, second = replay.execute(call), replay.execute(call)
    assert torch.equal(first[-1], torch.tensor([0.0, 2.0, 1.0, 0.0]))
    assert replay.same_bits(first, second)


def test_a_drawing_operation_draws_the_same_again() -> None:
    torch.manual_seed(5)
    call = snapshot(aten.bernoulli_.float, torch.zeros(64), 0.5)
    expected = torch.zeros(64).bernoulli_(0.5)
    assert torch.equal(replay.execute(call)[0], expected)
    assert torch.equal(replay.execute(call)[0], expected)


def test_signs_of_zero_and_nan_bits_are_bits() -> None:
    assert not replay.same_bits([torch.tensor([0.0])], [torch.tensor([-0.0])])
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert replay.same_bits([nan], [nan.clone()])
    assert not replay.same_bits([nan[:1]], [nan[1:]])


def test_executions_that_differ_are_counted_with_an_interval() -> None:
    call = snapshot(aten.neg.default, torch.ones(2))
    draws = iter([0.0, 0.0, 1.0, 2.0, 0.0])
    answer = replay.count_differences(call, 4, 0, once=lambda data: [torch.tensor([next(draws)])])
    assert (answer["executions"], answer["differing"], answer["distinct"]) == (4, 2, 3)
    assert "differs in 2 of 4 executions" in replay.describe(answer)


def test_executions_that_agree_say_where_else_to_look() -> None:
    answer = replay.count_differences(snapshot(aten.neg.default, torch.ones(2)), 20, 1)
    assert answer["differing"] == 0
    assert "outside the operation" in replay.describe(answer) and "--poison" in replay.describe(answer)


@pytest.mark.parametrize(("count", "total"), [(0, 50), (37, 50), (50, 50), (1, 20)])
def test_wilsons_interval_is_near_the_exact_one(count: int, total: int) -> None:
    low, high = replay.wilson(count, total)
    assert low <= count / total <= high
    assert (low, high) == pytest.approx(rate_interval(count, total), abs=0.06)


def test_an_operator_whose_library_is_not_imported_is_a_clear_sentence() -> None:
    with pytest.raises(LookupError, match="import the library"):
        replay.find_operator("nowhere.op.default")


def test_an_argument_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(ValueError, match="object"):
        snapshot(aten.neg.default, object())


SITE = "backward/net.emb:aten.index_put_.default.self.written#2@eval"


def test_a_capture_waits_for_one_occurrence_of_one_operation(tmp_path: Path) -> None:
    capture = Capture({"step": 3, "rank": 0, "site": SITE, "file": str(tmp_path / "x.pt")})
    place: tuple[Any, ...] = (3, Phase.BACKWARD, "Model", "net.emb", "aten.index_put_.default", 2, True)
    assert capture.wants(*place)
    for index, other in enumerate((4, Phase.FORWARD, "Model", "net", "aten.index_put.default", 1, False)):
        if index != 2:  # the root may be left out of a name
            assert not capture.wants(*place[:index], other, *place[index + 1 :])
    capture.save(facts_of(aten.neg.default), (torch.ones(2),), {})
    assert (tmp_path / "x.pt").exists() and not capture.wants(*place)


def test_the_script_runs_where_there_is_no_bitcheck(tmp_path: Path) -> None:
    torch.save(snapshot(aten.add_.Tensor, torch.ones(5), torch.ones(5)), tmp_path / "data.pt")
    script = write_repro(tmp_path / "data.pt", tmp_path / "fault")
    assert sorted(path.name for path in script.parent.iterdir()) == ["repro.pt", "repro.py"]
    blocker = "import sys; sys.modules['bitcheck'] = None; import runpy; sys.argv = sys.argv[1:]; " + (
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    found = subprocess.run(
        [sys.executable, "-c", blocker, str(script), "-k", "3", "--json"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["executions"] == 3


def test_a_script_that_fails_is_no_verdict(tmp_path: Path) -> None:
    from bitcheck.errors import ProgramFailed

    script = tmp_path / "repro.py"
    script.write_text("raise SystemExit('no torch here')")
    with pytest.raises(ProgramFailed, match="no torch here"):
        run_repro(script, 3)


def test_the_script_finds_the_variables_that_the_job_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    script = tmp_path / "repro.py"
    script.write_text(
        "import json, os\n"
        "found = [os.environ.get(name) for name in ('MALLOC_PERTURB_', 'OMP_DYNAMIC', 'PYTHONPATH')]\n"
        "print(json.dumps(dict(op=found, executions=1, differing=0, distinct=1, interval=[0, 1], explanation='')))"
    )
    assert run_repro(script, 1, {"MALLOC_PERTURB_": "85", "OMP_DYNAMIC": None}).op == ["85", None, None]
    assert run_repro(script, 1).op == [os.environ.get("MALLOC_PERTURB_"), "true", None]


def test_a_genuine_race_differs_in_some_executions() -> None:
    """Threads add into 8 sums in no fixed order; with one thread there is no race."""
    if torch.get_num_threads() < 2:
        torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        rows = torch.randint(0, 8, (32768,))
        call = snapshot(aten.index_put_.default, torch.zeros(8), [rows], torch.randn(32768), True)
        assert replay.count_differences(call, 60, 1)["differing"] > 0
        call["switches"]["num_threads"] = 1
        assert replay.count_differences(call, 20, 0)["differing"] == 0
    finally:
        torch.set_num_threads(1)
