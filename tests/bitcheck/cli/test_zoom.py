"""`bitcheck zoom` in earnest: two recorded programs, run again and recorded at level op where they part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import os, sys
import torch
from torch import nn

library = torch.library.Library("zoom_cli", "DEF")
library.define("scale(Tensor x) -> Tensor")
library.impl("scale", lambda x: x * 2 + float(os.environ.get("FAULT", 0)) * (step == 2), "CPU")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.fc(x)
        return torch.ops.zoom_cli.scale(hidden.detach()).exp() * hidden


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    if step == 1 and "STATUS" in os.environ:
        sys.exit(int(os.environ["STATUS"]))
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def bitcheck(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "bitcheck", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.py, and with two runs of it, the second with a fault in step 2."""
    folder = tmp_path_factory.mktemp("zoom")
    (folder / "train.py").write_text(PROGRAM)
    for name, fault in (("good", "0"), ("bad", "0.5")):
        ended = bitcheck(folder, "run", "-o", name, "--level", "module", "--", sys.executable, "train.py", FAULT=fault)
        assert ended.returncode == 0, ended.stderr
    return folder


def test_it_names_the_operation_and_the_line_that_asked_for_it(runs: Path) -> None:
    ended = bitcheck(runs, "zoom", "good", "bad", "--candidate-env", "FAULT=0.5", "--stacks", "-o", "kept")
    assert ended.returncode == 1, ended.stderr
    headline, *rest = ended.stdout.splitlines()
    assert headline == "DIVERGED in step 2: forward/Net:zoom_cli.scale.default.out (cause: forward)"
    assert any("train.py" in line and "forward" in line for line in rest), ended.stdout
    assert any(line.endswith("level op, stopped on purpose") for line in rest), ended.stdout
    assert "killed" not in ended.stdout + bitcheck(runs, "show", "kept/pair-1/baseline").stdout
    assert sorted(path.name for path in (runs / "kept/pair-1").iterdir() if path.is_dir()) == ["baseline", "candidate"]


def test_programs_that_agree_when_they_run_again_are_no_difference(runs: Path) -> None:
    ended = bitcheck(runs, "zoom", "good", "bad", "--json")  # nobody sets FAULT for the candidate
    answer = json.loads(ended.stdout)
    assert (ended.returncode, answer["verdict"], answer["first"]) == (0, "identical", None)
    assert (answer["zoom"]["pairs"], answer["zoom"]["steps"]) == (1, "2:3")


def test_where_there_is_nothing_to_execute_it_says_so_and_what_is_next(runs: Path) -> None:
    ended = bitcheck(runs, "zoom", "good", "bad", "--confirm", "5")  # nobody sets FAULT for the candidate
    assert ended.returncode == 0, ended.stderr
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("not confirmed: No pair recorded again parts") and "Next: " in last


def test_an_operation_that_repeats_itself_is_not_called_confirmed(runs: Path) -> None:
    from bitcheck.cli.zoom import describe
    from bitcheck.diff import diff_runs
    from bitcheck.repro import Confirmation
    from bitcheck.zoom_answer import Confirmed, ZoomAnswer
    from tests.bitcheck.made_up_runs import make_run

    answer = ZoomAnswer(diff_runs(make_run(), make_run()), diff_runs(make_run(), make_run()), 1, "2:3", None)
    for differing, word in ((0, "not confirmed: text"), (3, "confirmed: op differs in 3 of 5")):
        confirmed = Confirmed(None, Confirmation("op", 5, differing, 1, (0.0, 0.1), "text"), "", "advice")
        lines = list(describe(answer, confirmed, keeps_script=False, missing="not confirmed"))
        assert lines[1].startswith(word), lines
        assert (lines[-1] == "advice") == (not differing)


@pytest.mark.parametrize(
    ("executions", "script", "words"),
    [
        (50, None, "not confirmed: no operation"),
        (None, Path("fault"), "no script written into fault: no operation"),
        (50, Path("fault"), "not confirmed and no script written into fault: no operation"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_told(executions: int | None, script: Path | None, words: str) -> None:
    from bitcheck.cli.zoom import describe, what_is_missing
    from bitcheck.diff import diff_runs
    from bitcheck.zoom_answer import Confirmed, ZoomAnswer
    from tests.bitcheck.made_up_runs import make_run

    compared = diff_runs(make_run(), make_run())
    answer = ZoomAnswer(compared, compared, 0, "", None)
    lines = describe(answer, Confirmed(None, None, "no operation"), False, what_is_missing(executions, script))
    assert list(lines) == [words]


def test_a_program_that_fails_is_trouble(runs: Path) -> None:
    ended = bitcheck(runs, "zoom", "good", "bad", "--candidate-env", "STATUS=3")
    assert ended.returncode == 2
    assert "candidate of pair 1" in ended.stderr and "status 3" in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
