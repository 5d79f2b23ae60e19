"""Recording changes nothing: each program's final bits, bare and recorded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitcheck
from bitcheck.diff import diff_runs
from bitcheck.hooks.tensors import digest_tensor, tensor_parts
from bitcheck.run import open_run
from tests.hooks.programs import PROGRAMS, Program, Trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [(suffix, digest_tensor(part)[0].hex()) for suffix, part in tensor_parts(value.detach())]
    if isinstance(value, dict):
        return {str(key): bits(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(member) for member in value]
    return repr(value)


def final_bits(trained: Trained) -> dict[str, Any]:
    return {
        "parameters and buffers": [
            [(name, bits(tensor)) for name, tensor in [*module.named_parameters(), *module.named_buffers()]]
            for module in trained.modules
        ],
        "optimizers": [bits(optimizer.state_dict()) for optimizer in trained.optimizers],
        "printed": [value.hex() for value in trained.printed],
        "torch": bits(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": bits(list(np.random.get_state())),
    }


def run(program: Program) -> dict[str, Any]:
    seed()
    return final_bits(program())


@pytest.mark.parametrize("level", ["state", "module"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recorded_program_ends_with_the_bits_of_the_bare_one_and_repeats_itself(
    name: str, level: str, tmp_path: Path
) -> None:
    bare = run(PROGRAMS[name])
    for folder in ("a", "b"):
        with bitcheck.record(tmp_path / folder, level=level):
            recorded = run(PROGRAMS[name])
        assert recorded == bare
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    assert answer.verdict == "identical", answer.explanation
    assert answer.compared.steps >= 4
    assert run(PROGRAMS[name]) == bare, "the recorder left something behind"


def test_the_comparison_of_final_bits_sees_a_recorder_that_draws_a_random_number(tmp_path: Path) -> None:
    bare = run(PROGRAMS["plain"])
    with bitcheck.record(tmp_path / "a") as recording:
        recording.track("drawn", lambda: torch.rand(1))
        assert run(PROGRAMS["plain"]) != bare
