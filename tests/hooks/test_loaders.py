"""One data-loading process more: the loader gets it, the data stay, and the launcher is told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bitcheck.hooks.loaders import add_worker
from bitcheck.launch import Ending, record_program
from bitcheck.run import open_run
from bitcheck.settings import WORKERS_VARIABLE, Options, Settings

DATA = TensorDataset(torch.arange(12.0))


@pytest.mark.parametrize("asked", [{}, {"num_workers": 0}, {"num_workers": 1}])
def test_every_loader_gets_one_worker_more_and_gives_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int]
) -> None:
    plain = [batch.tolist() for (batch,) in DataLoader(DATA, batch_size=4)]
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    monkeypatch.setattr("torch.utils.data.dataloader.DataLoader.check_worker_number_rationality", lambda self: None)
    add_worker(Settings(folder="", home="", words=str(tmp_path)))
    loader = DataLoader(DATA, 4, **asked)
    assert loader.num_workers == asked.get("num_workers", 0) + 1
    words = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert [word["what"] for word in words] == ["varied"]
    loader.num_workers = 0  # what is read does not depend on who reads it; no process need start for that
    assert [batch.tolist() for (batch,) in loader] == plain


TRAINING = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (batch,) in DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_the_variable_reaches_a_recorded_program_and_its_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    variables = {**os.environ, WORKERS_VARIABLE: "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "train.py")]
    assert record_program(command, tmp_path / "run", Options(), variables=variables) == Ending(0)
    with open_run(tmp_path / "run") as run:
        assert run.info["varied"] == ["data-loading processes: 0 -> 1"]
        assert not run.info.get("notes")
