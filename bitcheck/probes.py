"""The oracles of the bisections: run a program with some switches suspect, or at a commit, in pairs.

A suspect form may give other bits than the reproducible one and still be the same every time, so runs
are compared with runs of the same forms. One short cut: a first run that has the bits of the
reproducible end is an identical pair with that one already.

Place in the flow: pairs, switches -> *probes* -> bisect_log -> bisect, commits.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from bitcheck.commits import CommitSample
from bitcheck.errors import ProgramFailed
from bitcheck.launch import ProgramNotFound, run_program
from bitcheck.pairs import NoVerdict, PairRunner, second
from bitcheck.samples import Point, Sample
from bitcheck.settings import Options
from bitcheck.switches import SwitchSet
from bitcheck.trials import Trial, last_lines

_MAX_LABEL = 60


class SwitchProbe:
    """Takes samples by running a program; see `bitcheck.samples.Oracle`.

    Runs lie under `folder`/runs, logs under `folder`/logs, by the suspects' names. Raises ProgramFailed
    where the program does not end well with some forms, NoVerdict where what was recorded proves too little.
    """

    def __init__(
        self, switches: SwitchSet, command: Sequence[str], folder: Path, options: Options, pairs: PairRunner
    ) -> None:
        self._switches, self._command, self._folder, self._options = switches, tuple(command), folder, options
        self._pairs = pairs
        self._num_samples: dict[Point, int] = {}

    def price(self, point: Point) -> int:
        """Return how many programs the next sample at this point may run."""
        return 1 if point in self._num_samples else 2

    def __call__(self, point: Point) -> Sample:
        """Take one more sample."""
        before = self._pairs.num_runs
        number = self._num_samples[point] = self._num_samples.get(point, 0) + 1
        first = self._trial(point)
        self._pairs.run_first(first)
        if number == 1 and point and self._pairs.is_identical(self._reference(), first):
            return Sample(False, self._pairs.num_runs - before, None)
        outcome = self._pairs.run_again(first, second(first, number + 1))
        return Sample(outcome.diverged, self._pairs.num_runs - before, outcome.where)

    def _reference(self) -> Trial:
        reference = self._trial(frozenset())
        self._pairs.run_first(reference)
        return reference

    def _trial(self, point: Point) -> Trial:
        command, variables = self._switches.apply(self._command, point)
        label = point_label(point)
        name = f"with {', '.join(sorted(point))} suspect" if point else "with every switch reproducible"
        return Trial(
            name=name,
            command=command,
            folder=self._folder / "runs" / label,
            log=self._folder / "logs" / f"{label}.log",
            options=self._options,
            variables=variables,
        )


def point_label(point: Point) -> str:
    """Return a file name for a point: its switches where they are few, else their number and a digest."""
    if not point:
        return "reproducible"
    names = sorted(point)
    label = "+".join(re.sub(r"[^A-Za-z0-9._=-]", "_", name) for name in names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{label}-{digest}" if len(label) <= _MAX_LABEL else f"{len(names)}-suspects-{digest}"


class CommitProbe:
    """The oracle of `bisect commits`: builds what is checked out, and runs it in pairs.

    A commit that cannot be built, started or run to its end, or of which too little was recorded, is
    skipped. Runs lie under `folder`/runs by the commit's hash.
    """

    def __init__(
        self,
        command: Sequence[str],
        build: str | None,
        folder: Path,
        options: Options,
        pairs: PairRunner,
        subfolder: Path = Path(),
    ) -> None:
        self._command, self._build, self._folder, self._options = tuple(command), build, folder, options
        self._pairs, self._subfolder = pairs, subfolder
        self._num_samples: dict[str, int] = {}

    def __call__(self, worktree: Path, commit: str) -> CommitSample:
        """Take one more pair of runs of `commit`."""
        before = self._pairs.num_runs
        label = commit[:12]
        number = self._num_samples[commit] = self._num_samples.get(commit, 0) + 1
        cwd = worktree / self._subfolder
        first = Trial(
            name=f"commit {label}",
            command=self._command,
            folder=self._folder / "runs" / label,
            log=self._folder / "logs" / f"{label}.log",
            options=self._options,
            cwd=cwd,
        )
        try:
            if self._build is not None:
                self._run_build(cwd, self._folder / "logs" / f"{label}.build.log")
            self._pairs.run_first(first)
            outcome = self._pairs.run_again(first, second(first, number + 1))
        except (ProgramFailed, ProgramNotFound, NoVerdict) as error:
            if self._pairs.is_broken:
                raise
            return CommitSample("skip", self._pairs.num_runs - before, str(error))
        return CommitSample(
            "differs" if outcome.diverged else "identical", self._pairs.num_runs - before, outcome.where
        )

    def _run_build(self, cwd: Path, log: Path) -> None:
        """Raise ProgramFailed where the build does not end well."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.devnull, "rb") as nothing, log.open("wb") as output:
            ending = run_program(
                ("sh", "-c", self._build or ":"),
                os.environ,
                stdin=nothing,
                stdout=output,
                stderr=output,
                cwd=cwd,
                watch=lambda: False,
            )
        if ending.exit_status:
            said = last_lines(log, 1)
            raise ProgramFailed(f"the build ended with exit status {ending.exit_status}: {said[0] if said else ''}")
