"""Which commit brought divergence: `git bisect` in a worktree of its own, each commit judged by repeated runs.

The user's checkout, index, branches and bisect state stay as they are: a worktree has its own HEAD
and its own `refs/bisect`. A commit is bad once two runs of it differ, which is certain; it is good once
so many pairs were identical that chance hardly explains it; where it cannot be built or run it is
skipped. Pairs at later good commits speak for earlier ones too, so the last good commit before the
fault has the most behind it. What was concluded while the fault seemed to show every time is looked at
again once it was seen not to.

    result = bisect_commits(repository, "v1.2", "main", folder, judge, CommitSearch())
    result.first_bad, result.sure

Place in the flow: git, statistics -> *commits*; the oracle is `bitcheck.probes`, or in a test a file's text.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bitcheck.errors import BitcheckError, UsageError
from bitcheck.git import Git, History, added_worktree
from bitcheck.statistics import RateBelief, check_probability, pairs_needed, posterior_fault

SCHEMA = "bitcheck.bisect-commits/1"
LOG_SCHEMA = "bitcheck.bisect-commits-log/1"
_PRIOR_BAD = 0.5
_NUM_AT_BAD = 4
"""Pairs at the bad end: how often the fault shows there decides how many pairs clear every other commit."""


@dataclass(frozen=True, slots=True)
class CommitSample:
    """What one pair of runs of a commit showed."""

    outcome: str
    """`differs`, `identical`, or `skip`: it could not be built or run."""
    num_runs: int
    detail: str | None = None
    """Where the runs parted, or why the commit was skipped."""


class CommitOracle(Protocol):
    """Builds and runs what is checked out."""

    def __call__(self, worktree: Path, commit: str) -> CommitSample:
        """Take one more pair of runs of `commit`, which is checked out in `worktree`."""


@dataclass(frozen=True, slots=True)
class CommitSearch:
    """How sure the answer is to be."""

    confidence: float = 0.95
    rate: float = 0.3
    """The smallest rate at which the fault is expected to show."""

    def check(self) -> None:
        """Raise UsageError for what makes no sense."""
        check_probability("--confidence", self.confidence)
        if self.rate != 1.0:
            check_probability("--rate", self.rate)


@dataclass(frozen=True, slots=True)
class JudgedCommit:
    """One commit that was looked at."""

    commit: str
    subject: str
    verdict: str
    """`good`, `bad` or `skip`."""
    num_pairs: int
    detail: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the commit as JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The answer."""

    good: str
    bad: str
    first_bad: str | None
    """None where commits that had to be skipped lie in between."""
    possible: tuple[str, ...]
    """All that it may be; one where nothing stands in the way."""
    subject: str
    sure: float
    num_runs: int
    judged: tuple[JudgedCommit, ...]
    where: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, schema `bitcheck.bisect-commits/1`."""
        return {
            "schema": SCHEMA,
            "good": self.good,
            "bad": self.bad,
            "first_bad": self.first_bad,
            "possible": list(self.possible),
            "subject": self.subject,
            "sure": self.sure,
            "runs": self.num_runs,
            "where": self.where,
            "judged": [each.to_json() for each in self.judged],
        }


class GoodRefused(BitcheckError):
    """The commit that was called good diverges itself, or cannot be run."""


class BadRefused(BitcheckError):
    """The commit that was called bad does not diverge, or cannot be run."""


def bisect_commits(
    repository: Path,
    good: str,
    bad: str,
    folder: Path,
    oracle: CommitOracle,
    search: CommitSearch,
    tell: Callable[[str], None] = lambda line: None,
) -> CommitResult:
    """Return the first commit after `good`, up to `bad`, whose runs differ.

    `folder` gets the worktree, which is removed at the end, and the log commits.jsonl, from which an
    interrupted search goes on. Raises GoodRefused, BadRefused, UsageError where the commits make no
    sense, and whatever the oracle raises.
    """
    search.check()
    git = Git(repository)
    ends = git.resolve(good), git.resolve(bad)
    if ends[0] == ends[1] or not git.is_ancestor(*ends):
        raise UsageError(
            f"{good} is no ancestor of {bad}; expected the good commit first, and the bad one somewhere after it."
        )
    ledger = CommitLedger(folder / "commits.jsonl", ends)
    with added_worktree(git, folder / "worktree", ends[1]) as tree:
        return _CommitBisection(tree, ends, oracle, search, ledger, tell).run()


@dataclass
class CommitLedger:
    """Every pair of runs, also those of an interrupted search of the same commits; written as it is taken."""

    path: Path
    ends: tuple[str, str]
    entries: list[tuple[str, CommitSample]] = field(default_factory=list)

    def __post_init__(self) -> None:
        header = json.dumps({"schema": LOG_SCHEMA, "good": self.ends[0], "bad": self.ends[1]})
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(header + "\n", encoding="ascii")
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        if not lines or lines[0] != header:
            raise UsageError(f"{self.path} is the log of another search.\nGive another --output, or remove it.")
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                sample = CommitSample(entry["outcome"], int(entry["num_runs"]), entry["detail"])
                self.entries.append((str(entry["commit"]), sample))
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{self.path} is damaged: {line[:60]!r}.\nRemove it and search again.") from None
        with self.path.open("w", encoding="ascii") as file:  # without a last line that was cut off
            file.write("".join(line + "\n" for line in lines))

    def add(self, commit: str, sample: CommitSample) -> None:
        """Write a sample down, on the disk before the next one is taken."""
        self.entries.append((commit, sample))
        content = {"commit": commit, "outcome": sample.outcome, "num_runs": sample.num_runs, "detail": sample.detail}
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def outcomes(self, commit: str) -> list[CommitSample]:
        """Return the samples of a commit."""
        return [sample for tried, sample in self.entries if tried == commit]

    def verdict(self, commit: str) -> str | None:
        """Return `bad` or `skip` where that is settled."""
        found = {sample.outcome for sample in self.outcomes(commit)}
        return "bad" if "differs" in found else "skip" if "skip" in found else None


class _CommitBisection:
    def __init__(
        self,
        git: Git,
        ends: tuple[str, str],
        oracle: CommitOracle,
        search: CommitSearch,
        ledger: CommitLedger,
        tell: Callable[[str], None],
    ) -> None:
        self.git, self.oracle, self.options, self.ledger, self.tell = git, oracle, search, ledger, tell
        self.good, self.bad = ends
        self.history = History(git, *ends)
        # Of the commits that are called good, one after the other, none may be wrong.
        self.error = (1.0 - search.confidence) / (math.ceil(math.log2(self.history.num_commits + 1)) + 1)
        self.judged_good: list[str] = []

    def run(self) -> CommitResult:
        self._check_bad()
        while True:
            num_samples = len(self.ledger.entries)
            self.judged_good = []
            if self._judge(self.good) != "good":
                self._refuse_good()
            first_bad, possible = self._drive()
            # Once more by what is known now of the rate; the last time nothing new is asked.
            if num_samples == len(self.ledger.entries):
                return self._answer(first_bad, possible)

    # ------------------------------------------------------------------ one commit

    def _sample(self, commit: str) -> CommitSample:
        self.git.check_out(commit)
        sample = self.oracle(self.git.folder, commit)
        self.ledger.add(commit, sample)
        detail = f" ({sample.detail.splitlines()[0]})" if sample.detail else ""
        self.tell(f"{commit[:10]} {self.history.subject(commit)[:60]}: {sample.outcome}{detail}")
        return sample

    def _judge(self, commit: str) -> str:
        """Return `good`, `bad` or `skip`, by as many pairs of runs as it takes."""
        while (settled := self.ledger.verdict(commit)) is None and self._doubt(commit) > self.error:
            self._sample(commit)
        if settled is None:
            self.judged_good.append(commit)
        return settled or "good"

    def _doubt(self, commit: str) -> float:
        """The probability that the fault is in a commit all of whose pairs were identical so far."""
        belief = self._belief()
        if belief is None:
            return 1.0
        num_pairs = sum(
            sample.outcome == "identical"
            and self.ledger.verdict(tried) is None
            and self.history.is_ancestor(commit, tried)
            for tried, sample in self.ledger.entries
        )
        return posterior_fault(_PRIOR_BAD, belief.miss(num_pairs))

    def _belief(self) -> RateBelief | None:
        """What is reckoned with of the rate at which the fault shows; None before it was seen to."""
        outcomes = [
            sample.outcome == "differs"
            for tried, sample in self.ledger.entries
            if self.ledger.verdict(tried) == "bad" and sample.outcome != "skip"
        ]
        if not any(outcomes):
            return None
        if not all(outcomes):
            return RateBelief((self.options.rate,), (1.0,))  # it shows by chance: the lowest rate counts
        belief = RateBelief.prior(self.options.rate)
        for _ in outcomes:
            belief = belief.after(True)
        return belief

    # ------------------------------------------------------------------ the ends

    def _check_bad(self) -> None:
        needed = pairs_needed(self.options.rate, 1.0 - self.error)
        while self.ledger.verdict(self.bad) is None and len(self.ledger.outcomes(self.bad)) < needed:
            self._sample(self.bad)
        num_at_bad = 1 if self.options.rate == 1.0 else _NUM_AT_BAD
        while self.ledger.verdict(self.bad) == "bad" and len(self.ledger.outcomes(self.bad)) < num_at_bad:
            self._sample(self.bad)
        verdict = self.ledger.verdict(self.bad)
        if verdict == "skip":
            raise BadRefused(f"{self.bad[:10]} (bad) cannot be tested: {self.ledger.outcomes(self.bad)[-1].detail}")
        if verdict is None:
            raise BadRefused(
                f"{self.bad[:10]} (bad) does not diverge in {needed} pairs of runs: there is nothing to find, or it "
                f"shows in fewer than {self.options.rate:.3g} of pairs.\nGive a lower --rate to look longer."
            )

    def _refuse_good(self) -> None:
        samples = self.ledger.outcomes(self.good)
        if self.ledger.verdict(self.good) == "skip":
            raise GoodRefused(f"{self.good[:10]} (good) cannot be tested: {samples[-1].detail}")
        raise GoodRefused(
            f"{self.good[:10]} (good) diverges itself ({samples[-1].detail}), in pair {len(samples)} of runs: the "
            "fault is older, or there is another one.\nStart from a commit that passes: bitcheck gate --runs 10 -- CMD"
        )

    # ------------------------------------------------------------------ git bisect

    def _drive(self) -> tuple[str | None, list[str]]:
        """Let git choose commits until it knows; return (first bad commit, all that it may be)."""
        git = self.git
        git.check_out(self.bad)
        git.run("bisect", "start", self.bad, self.good)
        while True:
            log = git.run("bisect", "log").stdout
            if found := re.search(r"^# first bad commit: \[(\w+)\]", log, re.MULTILINE):
                return found[1], [found[1]]
            if possible := re.findall(r"^# possible first bad commit: \[(\w+)\]", log, re.MULTILINE):
                return None, possible
            commit = git.resolve("HEAD")
            verdict = self._judge(commit)
            git.check_out(commit)
            git.run("bisect", verdict, commit, may_fail=True)  # fails, and says so in its log, at the end too

    def _answer(self, first_bad: str | None, possible: Sequence[str]) -> CommitResult:
        tried = list(dict.fromkeys(commit for commit, _ in self.ledger.entries))
        judged = []
        for commit in tried:
            samples = self.ledger.outcomes(commit)
            detail = next((each.detail for each in samples if each.outcome != "identical"), None)
            pairs = sum(sample.outcome != "skip" for sample in samples)
            verdict = self.ledger.verdict(commit) or "good"
            judged.append(JudgedCommit(commit, self.history.subject(commit), verdict, pairs, detail))
        error = math.fsum(self._doubt(commit) for commit in set(self.judged_good))
        last = first_bad or possible[0]
        return CommitResult(
            good=self.good,
            bad=self.bad,
            first_bad=first_bad,
            possible=tuple(possible),
            subject=self.history.subject(last),
            sure=max(0.0, 1.0 - error),
            num_runs=sum(sample.num_runs for _, sample in self.ledger.entries),
            judged=tuple(judged),
            where=next((each.detail for each in judged if each.commit == first_bad), None),
        )
