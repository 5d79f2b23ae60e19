"""A bit that changes on one rank of four, and the answer that names that rank; `benchmarks/rank_faults.py` has more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rank_faults import FAULTS, run_faults

CHOSEN = (
    ("ddp", "output"),
    ("fsdp", "result"),
    ("tensor_parallel", "output"),
    ("tensor_parallel", "result"),
    ("fsdp_and_tensor_parallel", "output"),  # equal meshes made anew for each recording
    ("pipeline_1f1b", "gradient"),
)
"""Of each pair of program and kind the last fault: of `ddp` the one on two ranks at once."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What became of each chosen fault and of its twin."""
    numbers = {(fault.program, fault.kind): number for number, fault in enumerate(FAULTS)}
    folder: Path = tmp_path_factory.mktemp("faults")
    found = run_faults(folder, [numbers[pair] for pair in CHOSEN])
    return {(row["program"], row["kind"]): row for row in found}


@pytest.mark.parametrize("pair", CHOSEN, ids=[f"{program}-{kind}" for program, kind in CHOSEN])
def test_the_rank_at_fault_is_named_whatever_it_reached_and_its_twin_is_identical(
    rows: dict[tuple[str, str], dict[str, Any]], pair: tuple[str, str]
) -> None:
    assert rows[pair]["verdict"] == "right"
    assert rows[pair]["twin"] == "identical"
