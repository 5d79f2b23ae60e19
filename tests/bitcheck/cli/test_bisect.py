"""`bitcheck bisect` as people see it: answers, refusals, logs; and one search over commits in earnest."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import bitcheck.pairs
from bitcheck.bisect import EndRefused
from bitcheck.bisect_log import LogEnded
from bitcheck.cli.bisect import command
from bitcheck.errors import ProgramFailed
from bitcheck.launch import Ending, Watch
from bitcheck.trials import Trial
from tests.bitcheck.made_up_programs import Behaviour, write_run

SWITCHES = """
command = ["python", "train.py"]
[switches."attention"]
reproducible = { args = ["--attention", "math"] }
suspect = { args = ["--attention", "flash"] }
[switches."embedding"]
suspect = { env = { EMBEDDING = "atomic" } }
[switches."norm"]
suspect = { args = ["--norm", "fused"] }
"""

Bisect = Callable[..., Result]


class Programs:
    """Made-up programs whose second runs part where one of some words is in their command or environment."""

    def __init__(self) -> None:
        self.suspects: set[str] = set()
        self.fails: set[str] = set()
        self.trials: list[Trial] = []

    def __call__(self, trial: Trial, watch: Watch) -> Ending:
        self.trials.append(trial)
        words = {*trial.command, *filter(None, trial.variables.values())}
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        trial.log.write_text("RuntimeError: no such kernel\n")
        parts_at = 1 if words & self.suspects and ", run " in trial.name else None
        fails = bool(words & self.fails)
        write_run(trial, Behaviour(num_steps=3, parts_at=parts_at, exit_status=fails), watch)
        return Ending(int(fails))


@pytest.fixture
def programs() -> Programs:
    return Programs()


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs) -> Bisect:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bitcheck.pairs, "PairRunner", partial(bitcheck.pairs.PairRunner, runner=programs))
    (tmp_path / "switches.toml").write_text(SWITCHES)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(command, arguments, standalone_mode=False)

    return run


def output(result: Result) -> str:
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_switch_is_named_with_its_forms_and_the_place_where_runs_part(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"atomic"}
    lines = output(bisect("kernels", "--switches", "switches.toml")).splitlines()
    assert lines[0].startswith("FOUND: embedding brings divergence back (9")
    assert lines[2] == "embedding   suspect: EMBEDDING=atomic"
    assert "first in step 1: forward/body:out (forward)" in lines[3]
    assert lines[4].split() == ["keep:", "as", "it", "is"]


def test_two_switches_are_named_each_alone(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"flash", "fused"}
    answer = json.loads(output(bisect("kernels", "--switches", "switches.toml", "--json")))
    assert answer["schema"] == "bitcheck.bisect/1"
    assert [one["switches"] for one in answer["sets"]] == [["attention"], ["norm"]]
    assert answer["sets"][0]["suspect"] == {"attention": "--attention flash"}
    assert answer["sets"][0]["reproducible"] == {"attention": "--attention math"}
    assert answer["runs"] == len(programs.trials)
    assert answer["sure"] >= 0.95


def test_a_log_is_replayed_without_running_anything(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"fused"}
    first = json.loads(output(bisect("kernels", "--switches", "switches.toml", "--json")))
    count = len(programs.trials)
    again = json.loads(output(bisect("replay", "bitcheck-bisect/bisect.jsonl", "--json")))
    assert len(programs.trials) == count
    assert [one["switches"] for one in again["sets"]] == [one["switches"] for one in first["sets"]]
    assert (again["replayed"], again["sure"]) == (first["samples"], first["sure"])


def test_the_same_command_again_goes_on_from_the_log(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"fused"}
    output(bisect("kernels", "--switches", "switches.toml"))
    log = Path("bitcheck-bisect/bisect.jsonl")
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join(whole[:-2]))
    count = len(programs.trials)
    answer = json.loads(output(bisect("kernels", "--switches", "switches.toml", "--json")))
    assert answer["sets"][0]["switches"] == ["norm"]
    assert answer["replayed"] == len(whole) - 3
    assert 0 < len(programs.trials) - count < 6


def test_a_log_cut_short_has_no_answer(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"fused"}
    output(bisect("kernels", "--switches", "switches.toml"))
    log = Path("bitcheck-bisect/bisect.jsonl")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    assert isinstance(bisect("replay", str(log)).exception, LogEnded)


def test_the_ends_are_refused_by_name(bisect: Bisect, programs: Programs) -> None:
    suspect = bisect("kernels", "--switches", "switches.toml", "--rate", "0.9").exception
    assert isinstance(suspect, EndRefused) and suspect.end == "suspect"
    programs.suspects = {"train.py"}
    reproducible = bisect("kernels", "--switches", "switches.toml", "-o", "other").exception
    assert isinstance(reproducible, EndRefused) and reproducible.end == "reproducible"


def test_a_program_that_fails_is_named_with_its_switches_and_last_words(bisect: Bisect, programs: Programs) -> None:
    programs.fails = {"flash"}
    error = bisect("kernels", "--switches", "switches.toml").exception
    assert isinstance(error, ProgramFailed)
    assert "with attention, embedding, norm suspect" in str(error) and "no such kernel" in str(error)


def test_only_leaves_the_other_switches_alone(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"fused"}
    output(bisect("kernels", "--switches", "switches.toml", "--only", "norm"))
    assert {trial.command for trial in programs.trials} == {
        ("python", "train.py"),
        ("python", "train.py", "--norm", "fused"),
    }


def test_the_command_after_two_dashes_wins_over_the_files(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"fused"}
    output(bisect("kernels", "--switches", "switches.toml", "--", "python", "other.py", "--steps", "9"))
    assert programs.trials[0].command[:4] == ("python", "other.py", "--steps", "9")


def test_the_reference_trainers_own_switches_need_no_file(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"moe.dprob=atomic"}
    answer = json.loads(output(bisect("kernels", "--reference", "--config", "nano", "--steps", "3", "--json")))
    assert [one["switches"] for one in answer["sets"]] == [["moe.dprob"]]
    assert answer["command"][3:9] == ["reference", "train", "--config", "nano", "--steps", "3"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a file of switches"),
        (("--reference", "--switches", "switches.toml"), "give a file of switches"),
        (("--reference", "--", "python", "x.py"), "brings its own command"),
        (("--switches", "switches.toml", "--only", "dropout"), "no switch is called 'dropout'"),
        (("--switches", "switches.toml", "--confidence", "0"), "between 0 and 1"),
    ],
)
def test_what_makes_no_sense_is_refused(bisect: Bisect, arguments: tuple[str, ...], said: str) -> None:
    assert said in str(bisect("kernels", *arguments).exception)


# ---------------------------------------------------------------------- commits


TRAINING = """import os
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(3, 2)).sum().backward()
    model.weight.grad[0, 1] += {fault}
    optimizer.step()
"""


def test_a_commit_is_found_by_real_runs_in_a_subfolder_of_the_repository(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "jobs").mkdir(parents=True)

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", repository, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet", "--initial-branch", "main")
    for fault in ("0", "1e-6 * int.from_bytes(os.urandom(2), 'big')"):
        (repository / "jobs" / "train.py").write_text(TRAINING.format(fault=fault))
        git("add", "-A")
        git("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "-m", f"add {fault}")
    (repository / "jobs" / "train.py").write_text("raise SystemExit('not committed')\n")
    command_line = ["bisect", "commits", "HEAD~1", "HEAD", "--rate", "1", "-o", tmp_path / "search", "--json"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bitcheck",
            *command_line,
            "--build",
            "test -f train.py",
            "--",
            sys.executable,
            "train.py",
        ],
        cwd=repository / "jobs",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["first_bad"] == git("rev-parse", "HEAD")
    assert answer["where"].startswith("step 0: grad/weight:grad")
    assert [each["verdict"] for each in answer["judged"]] == ["bad", "good"]
    assert answer["runs"] == 4
    assert (repository / "jobs" / "train.py").read_text().startswith("raise SystemExit")


def test_commits_that_cannot_be_told_apart_are_listed_and_the_exit_status_is_1(
    bisect: Bisect, programs: Programs, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", repository, *arguments], check=True, capture_output=True, text=True).stdout

    git("init", "--quiet", "--initial-branch", "main")
    for number in range(3):
        (repository / "number").write_text(str(number))
        git("add", "-A")
        git("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "--quiet", "-m", f"change {number}")

    class Commits(Programs):
        def __call__(self, trial: Trial, watch: Watch) -> Ending:
            assert trial.cwd is not None
            self.suspects = {"train"} if (trial.cwd / "number").read_text() == "2" else set()
            return super().__call__(trial, watch)

    commits = Commits()
    bitcheck.pairs.PairRunner.keywords["runner"] = commits  # type: ignore[attr-defined]
    build = "test $(cat number) != 1"
    result = bisect(
        "commits", "HEAD~2", "HEAD", "--repository", str(repository), "--rate", "1", "--build", build, "--", "train"
    )
    assert (result.exit_code, result.return_value) in ((1, None), (0, 1)), result.exception
    assert "NOT DECIDED: one of 2 commits" in result.stdout
    assert "skip, 0 pairs: change 1 (the build ended with exit status 1" in result.stdout


def test_the_numbers_of_a_search_do_not_depend_on_anything_drawn(bisect: Bisect, programs: Programs) -> None:
    programs.suspects = {"flash"}
    random.seed(1)
    first = json.loads(output(bisect("kernels", "--switches", "switches.toml", "-o", "a", "--json")))
    random.seed(2)
    programs.trials.clear()
    second = json.loads(output(bisect("kernels", "--switches", "switches.toml", "-o", "b", "--json")))
    assert {**first, "log": ""} == {**second, "log": ""}
