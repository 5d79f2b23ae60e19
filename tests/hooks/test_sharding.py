"""Wrappers of DistributedDataParallel are known whenever they were made, and though nobody calls them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bitcheck
from bitcheck.events import Phase
from bitcheck.run import open_run
from tests.hooks.programs import train_on_ones as train

pytestmark = pytest.mark.usefixtures("group_of_one")

PLACED = "mesh=ddp:1; ranks=0; placements=R"
wrapper: DistributedDataParallel | None = None
"""Where a program keeps its model."""


def placements(folder: Path, root: str) -> set[str]:
    with open_run(folder) as run:
        step = run.rank(0).load(run.rank(0).num_rows - 2)  # the last whole step
    of = zip(step.sites, step.placements, strict=True)
    return {placement for site, placement in of if site.phase is Phase.PARAM and site.root == root}


def test_one_made_when_steps_were_recorded_already_and_never_called_is_known(tmp_path: Path) -> None:
    first, second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2))
    with bitcheck.record(tmp_path / "run", level="state") as rec:
        train(first, torch.optim.SGD(first.parameters()))
        rec.step()
        made = DistributedDataParallel(second)
        train(made.module, torch.optim.SGD(second.parameters()))
        rec.step()
    assert (placements(tmp_path / "run", "Linear"), placements(tmp_path / "run", "Sequential")) == ({""}, {PLACED})


def test_one_that_the_garbage_collector_does_not_show_is_known_by_the_programs_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "wrapper", DistributedDataParallel(nn.Linear(3, 3)))
    assert wrapper is not None
    gc.freeze()
    try:
        with bitcheck.record(tmp_path / "run", level="state") as rec:
            train(wrapper.module, torch.optim.SGD(wrapper.parameters()))
            rec.step()
    finally:
        gc.unfreeze()
    assert placements(tmp_path / "run", "Linear") == {PLACED}


def test_nothing_is_left_of_the_recorder_where_wrappers_are_made(tmp_path: Path) -> None:
    from torch.nn.modules import module

    hooks = module._global_module_registration_hooks
    before = len(hooks)
    with bitcheck.record(tmp_path / "run"):
        assert len(hooks) == before + 1
    assert len(hooks) == before
