"""The fixture, in pytest sessions of their own: what passes, what fails and says why, golden runs by environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TRAINING = """
import os, random
import torch
from torch import nn

FAULT = os.environ.get("FAULT") == "1"
calls = []

def train(steps=2, seed=0, jitter=False, model_name="Sequential"):
    torch.manual_seed(seed) if seed is not None else None
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        if jitter and step == 1:
            calls.append(1)
            model[0].weight.grad.view(-1)[3] += 1e-6 * len(calls)
        optimizer.step()
    return model, optimizer
"""

REPEATABLE = (
    TRAINING
    + """
def test_training_repeats(bitcheck):
    bitcheck.assert_repeatable(lambda: train() and None, times=3)

def test_unseeded_training_repeats_because_generators_are_put_back(bitcheck):
    bitcheck.assert_repeatable(lambda: train(seed=None) and random.random() and None)

def test_a_tensor_repeats(bitcheck):
    bitcheck.assert_repeatable(lambda: {"loss": torch.ones(3), "step": 1})

def test_jitter_fails(bitcheck):
    bitcheck.assert_repeatable(lambda: train(jitter=True) and None)

def test_another_tensor_fails(bitcheck):
    numbers = iter([1.0, 1.0 + 1e-7, 1.0])
    bitcheck.assert_repeatable(lambda: (torch.zeros(2), torch.tensor(next(numbers), dtype=torch.float64)))

def test_signed_zero_fails(bitcheck):
    numbers = iter([0.0, -0.0])
    bitcheck.assert_repeatable(lambda: torch.tensor(next(numbers)))

def test_another_number_of_steps_fails(bitcheck):
    counts = iter([2, 3])
    bitcheck.assert_repeatable(lambda: train(steps=next(counts)) and None)

def test_nothing_fails(bitcheck):
    bitcheck.assert_repeatable(lambda: None)

def test_training_only_once_fails(bitcheck):
    runs = iter([True, False])
    bitcheck.assert_repeatable(lambda: train() and None if next(runs) else None)

def test_a_blind_comparison_fails(bitcheck, monkeypatch):
    import bitcheck.control as control
    from bitcheck.diff import diff_runs
    monkeypatch.setattr(control.run_control, "__kwdefaults__", {
        **control.run_control.__kwdefaults__,
        "compare": lambda a, b, *, until=None: diff_runs(a, a, until=until),
    })
    bitcheck.assert_repeatable(lambda: train() and None)

def test_an_object_without_exact_bits_is_refused(bitcheck):
    bitcheck.assert_repeatable(lambda: train()[0])

def test_one_call_is_refused(bitcheck):
    bitcheck.assert_repeatable(lambda: None, times=1)
"""
)

GOLDEN = (
    TRAINING
    + """
def test_golden(bitcheck):
    with bitcheck.record() as rec:
        train(jitter=FAULT)

def test_two_recordings_of_one_test(bitcheck):
    with bitcheck.record("first"):
        train(seed=1)
    with bitcheck.record("second"):
        train(seed=2)

def test_only_recorded(bitcheck):
    with bitcheck.record(golden=False) as rec:
        train()
    assert (rec.path / "run.json").exists()

def test_no_step(bitcheck):
    with bitcheck.record():
        pass
"""
)


class Session:
    """A folder of tests, run by pytest in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *options: str, **variables: str) -> tuple[dict[str, str], str]:
        command = [sys.executable, "-m", "pytest", "-p", "bitcheck.pytest_plugin", "-p", "no:cacheprovider", "-rA"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "", **variables}
        if self.is_installed():
            command = [part for part in command if part != "bitcheck.pytest_plugin"]
            command.remove("-p")
        done = subprocess.run(
            [*command, *options, "."], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        found = re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\w+)", done.stdout, re.MULTILINE)
        assert found, done.stdout + done.stderr
        return {name: outcome for outcome, name in found}, done.stdout

    @staticmethod
    def is_installed() -> bool:
        from importlib.metadata import entry_points

        return any(point.value == "bitcheck.pytest_plugin" for point in entry_points(group="pytest11"))


@pytest.fixture(scope="module")
def repeatable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], str]]:
    folder = tmp_path_factory.mktemp("repeatable")
    (folder / "test_training.py").write_text(REPEATABLE)
    yield Session(folder).run()


@pytest.mark.parametrize(
    "name",
    ["training_repeats", "unseeded_training_repeats_because_generators_are_put_back", "a_tensor_repeats"],
)
def test_code_that_repeats_itself_passes(repeatable: tuple[dict[str, str], str], name: str) -> None:
    assert repeatable[0][f"test_{name}"] == "PASSED"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("jitter_fails", "grad/0.weight:grad"),
        ("another_tensor_fails", "call 2 returned other bits than call 1 in returned.1"),
        ("signed_zero_fails", "call 2 returned other bits than call 1 in returned"),
        ("another_number_of_steps_fails", "call 2 differs from call 1: steps 0 to 2 instead of 0 to 1"),
        ("nothing_fails", "nothing to compare: the function trained no step and returned no tensor."),
        ("training_only_once_fails", "call 2 trained nothing, unlike call 1"),
        ("a_blind_comparison_fails", "bitcheck is broken: one bit of"),
        ("an_object_without_exact_bits_is_refused", "call 1 returned what has no exact bits"),
        ("one_call_is_refused", "one call is compared with nothing"),
    ],
)
def test_code_that_does_not_repeat_itself_fails_and_says_where(
    repeatable: tuple[dict[str, str], str], name: str, said: str
) -> None:
    outcomes, output = repeatable
    assert outcomes[f"test_{name}"] == "FAILED"
    assert said in output


def test_golden_runs_are_written_on_request_compared_and_told_apart_by_environment(tmp_path: Path) -> None:
    (tmp_path / "test_training.py").write_text(GOLDEN)
    session = Session(tmp_path)
    recorded = ("test_golden", "test_two_recordings_of_one_test")

    updated, _ = session.run("--bitcheck-update")
    assert [updated[name] for name in recorded] == ["PASSED"] * 2
    assert updated["test_only_recorded"] == "PASSED"
    assert updated["test_no_step"] == "FAILED", "a golden run of nothing is none"
    folders = sorted(path.parent.relative_to(tmp_path) for path in tmp_path.glob("bitcheck_golden/*/*/*/run.json"))
    assert [folder.parent.name for folder in folders] == ["1", "first", "second"]

    faulty, output = session.run(FAULT="1")
    assert [faulty[name] for name in recorded] == ["FAILED", "PASSED"]
    assert "DIVERGED in step 1: grad/0.weight:grad" in output

    elsewhere, output = session.run(OMP_NUM_THREADS="2")
    assert elsewhere["test_golden"] == "FAILED"
    assert "no golden run for this environment" in output and "pytest --bitcheck-update" in output
    assert "env.OMP_NUM_THREADS 1 -> 2" in output


def test_loading_the_plugin_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, bitcheck.pytest_plugin\n"
        "assert not {'torch', 'numpy', 'h5py', 'rich', 'click'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_session_without_the_fixture_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_other():\n    assert not {'torch', 'h5py'} & set(sys.modules)\n"
    )
    assert Session(tmp_path).run()[0] == {"test_other": "PASSED"}
