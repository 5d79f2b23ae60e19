"""`bitcheck gate` as people and CI see it: screen, JSON, JUnit XML, Markdown, exit status; and in earnest, once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

import bitcheck.gate
from bitcheck.cli.gate import command
from bitcheck.run import open_run
from bitcheck.settings import Options
from bitcheck.trials import Trial
from tests.bitcheck.made_up_programs import Behaviour, MadeUpPrograms, write_run

GOOD = Behaviour()
PROGRAM = ("--", "python", "train.py")
Gate = Callable[..., Result]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Run the command on made-up programs, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bitcheck.follow._SHARE", 0)
    original = bitcheck.gate.judge

    def run(*arguments: str, programs: tuple[Behaviour, ...] = (GOOD,)) -> Result:
        monkeypatch.setattr(bitcheck.gate, "judge", partial(original, runner=MadeUpPrograms(*programs)))
        return CliRunner().invoke(command, [*arguments, *PROGRAM], standalone_mode=False)

    return run


def status(result: Result) -> int:
    """The exit status that the group of commands would end with."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code if result.return_value is None else int(result.return_value)


FAILED = """\
FAIL: run 2 differs from run 1 in step 3: forward/body:out (cause: forward)

where         step 3, forward, body, op Linear
              forward/body:out  float32 [4, 4]  within elements 0 to 15 of 16
why           {why}
what to do    {remedy}

command       python train.py
runs          run 1: steps 0 to 5, 1 rank, exit status 0, {time} s
              run 2: steps 0 to 3, 1 rank, stopped by the gate, {time} s
compared      run 2 with run 1: diverged over 4 steps, 1 rank, 30 events
control       one bit of grad/body.weight:grad in step {step} was flipped in a copy of run 1, and was seen
files         bitcheck-gate: runs, logs and gate.json
look closer   bitcheck diff bitcheck-gate/runs/1 bitcheck-gate/runs/2
about         The gate runs one training command several times and compares every recorded tensor (batches, \
gradients, parameters, optimizer state) bit for bit; a difference means that the training does not repeat itself.
"""

PASSED = """\
PASS: 3 fresh runs have the same bits in every recorded tensor of 6 steps.

command   python train.py
runs      run 1: steps 0 to 5, 1 rank, exit status 0, {time} s
          run 2: steps 0 to 5, 1 rank, exit status 0, {time} s
          run 3: steps 0 to 5, 1 rank, exit status 0, {time} s
compared  run 2 with run 1: identical over 6 steps, 1 rank, 44 events
          run 3 with run 1: identical over 6 steps, 1 rank, 44 events
control   one bit of grad/body.weight:grad in step {step} was flipped in a copy of run 1, and was seen
chance    2 identical pairs: with 95 % confidence fewer than 77.6 % of runs differ from the first
          to show that fewer than 30 % do: 10 runs (--rate 0.3)
files     bitcheck-gate: runs, logs and gate.json
"""


def pattern(text: str) -> str:
    """Return a pattern for a report: times, the control's step and the diff's own sentences are free."""
    escaped = re.escape(text)
    for name, free in (("time", r"\d+\.\d"), ("step", r"\d"), ("why", ".+"), ("remedy", ".+")):
        escaped = escaped.replace(re.escape("{" + name + "}"), free)
    return re.sub(r"(\\ ){2,}", " +", escaped)


def test_a_failing_gate_says_all_on_one_screen(gate: Gate) -> None:
    result = gate(programs=(GOOD, replace(GOOD, parts_at=3)))
    assert status(result) == 1
    assert re.fullmatch(pattern(FAILED), result.stdout), result.stdout


def test_a_passing_gate_says_how_much_and_how_sure(gate: Gate) -> None:
    result = gate("--runs", "3")
    assert status(result) == 0
    assert re.fullmatch(pattern(PASSED), result.stdout), result.stdout


def test_the_answer_as_json_holds_the_diff(gate: Gate) -> None:
    result = gate("--json", programs=(GOOD, replace(GOOD, parts_at=3)))
    content = json.loads(result.stdout)
    assert (content["schema"], content["verdict"]) == ("bitcheck.gate/1", "fail")
    assert content["comparisons"][0]["answer"]["schema"] == "bitcheck.diff/1"
    assert content["comparisons"][0]["answer"]["first"]["site"] == "forward/body:out"
    assert json.loads(Path("bitcheck-gate/gate.json").read_text()) == content


@pytest.mark.parametrize(
    ("programs", "arguments", "expected"),
    [
        ((GOOD,), (), (2, 0, 0)),
        ((GOOD, replace(GOOD, parts_at=3)), (), (2, 1, 0)),
        ((GOOD,), ("--steps", "9"), (1, 0, 1)),
        ((replace(GOOD, exit_status=1, says="\x1b[31mboom\x00"),), (), (1, 0, 1)),
        ((GOOD, GOOD, replace(GOOD, parts_at=0)), ("--vary", "threads"), (3, 1, 0)),
    ],
    ids=["passed", "failed", "insufficient", "program-failed", "varied"],
)
def test_junit_xml_counts_tests_failures_and_errors(
    gate: Gate, programs: tuple[Behaviour, ...], arguments: tuple[str, ...], expected: tuple[int, int, int]
) -> None:
    gate("--junit", "reports/gate.xml", *arguments, programs=programs)
    suite = ElementTree.fromstring(Path("reports/gate.xml").read_text())
    assert tuple(int(suite.get(name, "")) for name in ("tests", "failures", "errors")) == expected
    assert len(suite.findall("testcase")) == expected[0]
    assert len(suite.findall("testcase/failure")) == expected[1]
    assert len(suite.findall("testcase/error")) == expected[2]


def test_the_summary_is_appended_and_no_name_is_taken_for_markup(gate: Gate) -> None:
    Path("summary.md").write_text("what another step wrote\n")
    odd = replace(GOOD, module="blocks[0].<b>*|mix_in")
    gate("--summary", "summary.md", programs=(odd, replace(odd, parts_at=1)))
    text = Path("summary.md").read_text()
    assert text.startswith("what another step wrote\n## bitcheck gate: FAIL\n")
    assert r"forward/blocks\[0\].&lt;b&gt;\*\|mix\_in:out" in text


def test_a_long_name_with_brackets_is_neither_wrapped_nor_cut_in_a_pipe(gate: Gate) -> None:
    name = "decoder." + "layers[0]." * 11 + "mix"
    assert len(name) > 120
    odd = replace(GOOD, module=name)
    result = gate(programs=(odd, replace(odd, parts_at=1)))
    assert f"forward/{name}:out  float32 [4, 4]" in result.stdout


def test_a_rate_chooses_the_number_of_runs(gate: Gate) -> None:
    result = gate("--rate", "0.5", "--confidence", "0.9", "--json")
    assert json.loads(result.stdout)["asked"]["runs"] == 5
    assert json.loads(result.stdout)["chance"]["rate_bound"] <= 0.5


def test_a_golden_run_is_written_where_the_gate_passes_and_not_where_it_fails(gate: Gate) -> None:
    assert status(gate("--write-golden", "golden/a", programs=(GOOD, replace(GOOD, parts_at=2)))) == 1
    assert not Path("golden").exists()
    assert status(gate("--write-golden", "golden/a")) == 0
    assert status(gate("--golden", "golden/a")) == 0
    assert status(gate("--golden", "golden/a", programs=(replace(GOOD, parts_at=2),))) == 1


def test_the_folder_of_an_earlier_gate_is_replaced_and_any_other_is_left_alone(gate: Gate) -> None:
    gate()
    assert status(gate()) == 0
    Path("bitcheck-gate/thesis.tex").write_text("years of work")
    result = gate()
    assert result.exception is not None and "thesis.tex" in str(result.exception)
    assert Path("bitcheck-gate/thesis.tex").read_text() == "years of work"


def test_a_golden_run_in_the_gates_own_folder_is_not_removed(gate: Gate) -> None:
    write_run(Trial("x", ("x",), Path("bitcheck-gate/runs/1"), Path("x.log"), Options()), GOOD)
    result = gate("--golden", "bitcheck-gate/runs/1")
    assert result.exception is not None and "about to be replaced" in str(result.exception)
    open_run(Path("bitcheck-gate/runs/1")).close()


@pytest.mark.parametrize(
    ("programs", "arguments", "expected"),
    [
        ((GOOD,), (), 0),
        ((GOOD, replace(GOOD, parts_at=1)), (), 1),
        ((replace(GOOD, exit_status=1),), (), 125),
        ((GOOD,), ("--steps", "9"), 125),
        ((GOOD,), ("--runs", "1"), 128),
        ((GOOD,), ("--no-such-option",), 128),
    ],
    ids=["good", "bad", "program-failed", "too-little", "usage", "mistyped"],
)
def test_git_bisect_gets_its_own_exit_statuses(
    gate: Gate, programs: tuple[Behaviour, ...], arguments: tuple[str, ...], expected: int
) -> None:
    assert status(gate("--for-git-bisect", *arguments, programs=programs)) == expected


def test_a_program_that_is_not_there_is_skipped_by_git_bisect(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bitcheck",
            "gate",
            "--for-git-bisect",
            "-o",
            tmp_path / "gate",
            "--",
            "no-such-program",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 125


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--runs", "1"), "compared with nothing"),
        (("--rate", "0.1", "--runs", "3"), "leave out --runs"),
        (("--rate", "2"), "between 0 and 1"),
        (("--confidence", "1"), "between 0 and 1"),
        (("--vary", "colour"), "expected some of threads"),
        (("--stop-early",), "give their number"),
        (("--checkpoint", "*.pt"), "speak of --resume-cmd"),
        (("--resume-cmd", "python t.py {checkpoint}"), "names {checkpoint}"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_before_anything_runs(
    gate: Gate, arguments: tuple[str, ...], said: str
) -> None:
    result = gate(*arguments)
    assert result.exception is not None and said in str(result.exception)
    assert not Path("bitcheck-gate").exists()


# ---------------------------------------------------------------------- in earnest


TRAINING = """
import os, signal, sys, time
import torch
from torch import nn
torch.manual_seed(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN) if "stubborn" in sys.argv else None
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.randn(2, 4)).sum().backward()
    if step == 2 and "fault" in sys.argv:
        model.weight.grad[1, 2] += int.from_bytes(os.urandom(4), "big") * 1e-12
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
    time.sleep(float(sys.argv[2]))
"""


def run_gate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAINING)
    return subprocess.run(
        [sys.executable, "-m", "bitcheck", "gate", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_real_program_that_differs_is_stopped_long_before_its_end(tmp_path: Path) -> None:
    done = run_gate(
        tmp_path, "--stop-early", "--steps", "8", "--json", "--", sys.executable, "train.py", "1000", "0.2", "fault"
    )
    assert done.returncode == 1, done.stderr
    content = json.loads(done.stdout)
    assert content["comparisons"][0]["answer"]["first"]["step"] == 2
    assert content["comparisons"][0]["answer"]["first"]["site"] == "grad/weight:grad"
    assert [run["was_stopped"] for run in content["runs"]] == [True, True]
    log = (tmp_path / "bitcheck-gate" / "logs" / "2.log").read_text()
    assert "step 2" in log and "step 999" not in log
    assert "run 2 differs from run 1 in step 2" in done.stderr


def test_a_real_program_that_repeats_itself_passes_and_its_output_is_in_the_logs(tmp_path: Path) -> None:
    done = run_gate(tmp_path, "--steps", "3", "--", sys.executable, "train.py", "3", "0")
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0,
        "PASS: 2 fresh runs have the same bits in every recorded tensor of 3 steps.",
    ), done.stderr
    assert (tmp_path / "bitcheck-gate" / "logs" / "1.log").read_text() == "step 0\nstep 1\nstep 2\n"
