"""git, as `bisect commits` needs it: in a worktree of its own, deaf to a hook's variables.

Place in the flow: *git* -> commits.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitcheck.errors import BitcheckError, UsageError


class Git:
    """git in one folder, deaf to the variables by which a hook points it elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a git command. Raises BitcheckError where it fails and must not."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        variables |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
        try:
            done = subprocess.run(
                ["git", "-C", str(self.folder), *arguments],
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except FileNotFoundError:
            raise BitcheckError("there is no git; `bisect commits` needs it.") from None
        if done.returncode and not may_fail:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise BitcheckError(f"git {' '.join(arguments[:2])} failed in {self.folder}: {said[-1] if said else ''}")
        return done

    def resolve(self, name: str) -> str:
        """Return the hash of a commit. Raises UsageError where there is no such commit."""
        done = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", may_fail=True)
        if done.returncode:
            raise UsageError(f"{self.folder}: {name!r} is no commit of this repository.")
        return done.stdout.strip()

    def is_ancestor(self, ancestor: str, commit: str) -> bool:
        """Whether `commit` is `ancestor` or comes after it."""
        return self.run("merge-base", "--is-ancestor", ancestor, commit, may_fail=True).returncode == 0

    def check_out(self, commit: str) -> None:
        """Check a commit out, over whatever a build or a run left of tracked files."""
        self.run("checkout", "--quiet", "--force", "--detach", commit)
        self.run("clean", "-fdq")  # not what .gitignore names: build products spare the next build


class History:
    """The commits from a good one up to a bad one: who comes after whom, and what each is called."""

    def __init__(self, git: Git, good: str, bad: str) -> None:
        listed = git.run("log", "--format=%H %P%x00%s", f"{good}..{bad}").stdout.splitlines()
        self.num_commits = len(listed)
        self._parents: dict[str, list[str]] = {good: []}
        self._subjects = {good: git.run("log", "-1", "--format=%s", good).stdout.strip()}
        for line in listed:
            hashes, _, subject = line.partition("\0")
            commit, *parents = hashes.split()
            self._parents[commit], self._subjects[commit] = parents, subject
        self._ancestors: dict[str, set[str]] = {}

    def subject(self, commit: str) -> str:
        """Return the first line of a commit's message."""
        return self._subjects.get(commit, "")

    def is_ancestor(self, ancestor: str, commit: str) -> bool:
        """Whether `commit` is `ancestor` or comes after it, both of them within this history."""
        if commit not in self._ancestors:
            found, waiting = {commit}, [commit]
            while waiting:
                above = [parent for parent in self._parents.get(waiting.pop(), ()) if parent not in found]
                found.update(above)
                waiting += above
            self._ancestors[commit] = found
        return ancestor in self._ancestors[commit]


@contextmanager
def added_worktree(git: Git, folder: Path, commit: str) -> Iterator[Git]:
    """Add a worktree for the time of a search; one that an interrupted search left is taken away first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    _remove_worktree(git, folder)
    git.run("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield Git(folder)
    finally:
        _remove_worktree(git, folder)


def _remove_worktree(git: Git, folder: Path) -> None:
    if folder.exists():
        git.run("worktree", "remove", "--force", "--force", str(folder), may_fail=True)
    git.run("worktree", "prune", may_fail=True)
