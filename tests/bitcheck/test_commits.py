"""`bisect commits` on a generated history; the judge reads the program's text instead of running it."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from bitcheck.commits import BadRefused, CommitSample, CommitSearch, GoodRefused, bisect_commits
from bitcheck.errors import UsageError
from bitcheck.git import Git

NUM_COMMITS = 60


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A repository of 60 commits; each writes its number into train.py, from fast-import: one process for all."""
    folder = tmp_path_factory.mktemp("history")
    lines = []
    for number in range(NUM_COMMITS):
        message, text = f"change {number}", f"number = {number}\n"
        lines.append(f"commit refs/heads/main\nmark :{number + 1}\ncommitter T <t@example.org> {1000 + number} +0000\n")
        lines.append(f"data {len(message)}\n{message}\nM 100644 inline train.py\ndata {len(text)}\n{text}\n")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    subprocess.run(
        ["git", "-C", folder, "fast-import", "--quiet"], input="".join(lines).encode(), check=True, capture_output=True
    )
    git(folder, "reset", "--hard", "--quiet")
    return folder, git(folder, "rev-list", "--reverse", "main").split()


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout


class Judge:
    """A fault that came with commit `fault` and shows with a rate; commits in `broken` cannot be built."""

    def __init__(self, fault: int, rate: float = 1.0, seed: int = 0, broken: frozenset[int] = frozenset()) -> None:
        self.fault, self.rate, self.broken = fault, rate, broken
        self.random = random.Random(seed)
        self.asked: list[int] = []

    def __call__(self, worktree: Path, commit: str) -> CommitSample:
        number = int((worktree / "train.py").read_text().split("=")[1])
        self.asked.append(number)
        (worktree / "train.py").write_text("changed by its own run\n")
        (worktree / "checkpoint.pt").write_text("left behind\n")
        if number in self.broken:
            return CommitSample("skip", 0, "the build failed")
        differs = number >= self.fault and self.random.random() < self.rate
        return CommitSample("differs" if differs else "identical", 1, "step 3: forward/body:out" if differs else None)


@pytest.mark.parametrize("fault", [1, 59])
def test_the_commit_that_brought_divergence_is_named(
    history: tuple[Path, list[str]], tmp_path: Path, fault: int
) -> None:
    repository, commits = history
    judge = Judge(fault)
    result = bisect_commits(repository, commits[0], "main", tmp_path, judge, CommitSearch())
    assert result.first_bad == commits[fault]
    assert (result.subject, result.where) == (f"change {fault}", "step 3: forward/body:out")
    assert result.sure > 0.95
    assert len(judge.asked) < 35, "a few pairs for each of at most eight commits"


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_that_shows_in_three_of_ten_runs_is_named(
    history: tuple[Path, list[str]], tmp_path: Path, seed: int
) -> None:
    repository, commits = history
    judge = Judge(13 + 17 * seed, rate=0.3, seed=seed)
    result = bisect_commits(repository, commits[0], commits[-1], tmp_path, judge, CommitSearch(0.99))
    assert result.first_bad == commits[judge.fault]


def test_the_users_checkout_stays_as_it_is(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repository, commits = history
    before = git(repository, "status", "--porcelain=v2", "--branch"), git(repository, "for-each-ref")
    bisect_commits(repository, commits[0], "main", tmp_path / "search", Judge(20), CommitSearch())
    assert (git(repository, "status", "--porcelain=v2", "--branch"), git(repository, "for-each-ref")) == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not (tmp_path / "search" / "worktree").exists()


def test_commits_that_cannot_be_built_are_skipped(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repository, commits = history
    broken = frozenset({29, 30, 14, 15, 44})
    result = bisect_commits(repository, commits[0], "main", tmp_path, Judge(37, broken=broken), CommitSearch())
    assert result.first_bad == commits[37]
    assert "skip" in {each.verdict for each in result.judged}


def test_where_skipped_commits_lie_in_between_all_candidates_are_named(
    history: tuple[Path, list[str]], tmp_path: Path
) -> None:
    repository, commits = history
    result = bisect_commits(
        repository, commits[0], "main", tmp_path, Judge(32, broken=frozenset({30, 31})), CommitSearch()
    )
    assert result.first_bad is None
    assert set(result.possible) == {commits[30], commits[31], commits[32]}


def test_a_good_commit_that_diverges_is_refused(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repository, commits = history
    with pytest.raises(GoodRefused, match="diverges itself"):
        bisect_commits(repository, commits[5], "main", tmp_path, Judge(0, rate=0.3, seed=1), CommitSearch())


def test_a_bad_commit_that_does_not_diverge_is_refused(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repository, commits = history
    with pytest.raises(BadRefused, match="does not diverge"):
        bisect_commits(repository, commits[0], "main", tmp_path, Judge(999), CommitSearch())


@pytest.mark.parametrize(("broken", "error"), [(0, GoodRefused), (59, BadRefused)])
def test_an_end_that_cannot_be_built_is_refused(
    history: tuple[Path, list[str]], tmp_path: Path, broken: int, error: type[Exception]
) -> None:
    repository, commits = history
    with pytest.raises(error, match="the build failed"):
        bisect_commits(repository, commits[0], "main", tmp_path, Judge(9, broken=frozenset({broken})), CommitSearch())


def test_commits_in_the_wrong_order_are_refused(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repository, commits = history
    with pytest.raises(UsageError, match="no ancestor"):
        bisect_commits(repository, "main", commits[0], tmp_path, Judge(9), CommitSearch())


def test_a_name_that_is_no_commit_is_refused(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no commit"):
        bisect_commits(history[0], "nonsense", "main", tmp_path, Judge(9), CommitSearch())


def test_an_interrupted_search_goes_on_from_its_log(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    repository, commits = history
    whole = Judge(41)
    bisect_commits(repository, commits[0], "main", tmp_path / "whole", whole, CommitSearch())

    class Interrupted(Judge):
        def __call__(self, worktree: Path, commit: str) -> CommitSample:
            if len(self.asked) == 4:
                raise KeyboardInterrupt
            return super().__call__(worktree, commit)

    first = Interrupted(41)
    with pytest.raises(KeyboardInterrupt):
        bisect_commits(repository, commits[0], "main", tmp_path / "cut", first, CommitSearch())
    with (tmp_path / "cut" / "commits.jsonl").open("a") as log:
        log.write('{"commit": "12')  # the line that was being written
    rest = Judge(41)
    result = bisect_commits(repository, commits[0], "main", tmp_path / "cut", rest, CommitSearch())
    assert result.first_bad == commits[41]
    assert first.asked + rest.asked == whole.asked


def test_git_is_deaf_to_the_variables_of_a_hook(
    history: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert Git(history[0]).resolve("main") == history[1][-1]
