"""A fault planted in one operation of each phase, and the answer that names it; `benchmarks/op_faults.py` has more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.op_faults import Fault, as_run, judge, list_faults, pick, record
from bitcheck.diff import diff_runs
from bitcheck.memory import MemoryRun


@pytest.fixture(scope="module")
def clean() -> Iterator[tuple[MemoryRun, dict[str, Fault]]]:
    """The run without a fault, and a fault of each phase."""
    torch.set_num_threads(1)
    records = record()
    faults = pick(list_faults(records), 25)
    yield as_run(records), {fault.phase: fault for fault in faults}


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward", "grad", "optim"])
def test_an_operation_with_one_bit_changed_is_the_only_origin(
    clean: tuple[MemoryRun, dict[str, Fault]], phase: str
) -> None:
    baseline, faults = clean
    assert judge(faults[phase], diff_runs(baseline, as_run(record(faults[phase], is_armed=True)))) == "right"


def test_the_twin_in_which_nothing_is_planted_is_identical(clean: tuple[MemoryRun, dict[str, Fault]]) -> None:
    baseline, faults = clean
    assert diff_runs(baseline, as_run(record(faults["backward"]))).verdict == "identical"
