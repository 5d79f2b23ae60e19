"""Follow a run while it is being written, and see where it first parts from another.

A rank's file can be read while it grows (bitcheck.store), so a program need not run on once a step
of it differs. Roots are compared first; where they differ, `diff` has the last word, because not every
difference counts (a generator that nobody draws from). The generators' own root is left out.

Place in the flow: align, diff -> *follow* -> gate, bisect, commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bitcheck.align import align_runs, pair_rows
from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.errors import RunError
from bitcheck.events import PHASES, STATE_PHASES, Phase, StepKind
from bitcheck.run import Run, open_run
from bitcheck.views import RunView

_IS_STATE = np.array([phase in STATE_PHASES for phase in PHASES])
_COUNTS = np.array([phase is not Phase.RNG for phase in PHASES])
_SHARE = 20
"""Looking may take one part in so many of the time."""


class Compare(Protocol):
    """What compares two runs: `diff_runs`, and in a test something that is blind."""

    def __call__(self, baseline: RunView, candidate: RunView, *, until: int | None = None) -> Answer: ...


def first_differing_step(
    baseline: RunView, candidate: RunView, *, after: int | None = None, until: int | None = None
) -> int | None:
    """Return the first step, in the baseline's numbers, whose roots differ on any rank; None where none does.

    Steps up to and including `after` are passed over, as are those beyond `until`. Raises RunError where
    a run cannot be read.
    """
    alignment = align_runs(baseline, candidate)
    first = None
    for rank in sorted(set(baseline.ranks) & set(candidate.ranks)):
        ours, theirs = baseline.rank(rank).table, candidate.rank(rank).table
        rows = pair_rows(ours, theirs, alignment, until=until, with_fragments=False)
        parted = (ours["phase_roots"][rows.baseline] != theirs["phase_roots"][rows.candidate]).any(axis=2)
        parted[:, ~_COUNTS] = False
        parted[rows.kinds == int(StepKind.INITIAL)] &= _IS_STATE
        steps = rows.steps[parted.any(axis=1)]
        if after is not None:
            steps = steps[steps > after]
        if len(steps) and (first is None or steps[0] < first):
            first = int(steps[0])
    return first


class Follower:
    """Watches a candidate; called again and again, it says True once there is no point in going on.

    answer        the diff, once a step was seen to differ
    objection     what `object_to` said, once it said something
    has_enough    every rank has recorded the last step that was wanted

    Raises nothing while the run cannot be read yet: what is wrong with it shows when it has ended.
    """

    def __init__(
        self,
        folder: Path,
        baseline: Run | None,
        *,
        until: int | None = None,
        stop_after: int | None = None,
        object_to: Callable[[Run], Sequence[Any]] | None = None,
        compare: Compare = diff_runs,
    ) -> None:
        self.folder, self.baseline = folder, baseline
        self.answer: Answer | None = None
        self.objection: Sequence[Any] = ()
        self.has_enough = False
        self._until, self._stop_after = until, stop_after
        self._object_to, self._compare = object_to, compare
        self._cleared: int | None = None
        """A step whose roots differ by nothing that counts."""
        self._next_look = 0.0

    def __call__(self) -> bool:
        """Look once; return whether the program can be stopped."""
        began = time.monotonic()
        if began < self._next_look:
            return False
        try:
            with open_run(self.folder, allow_missing_ranks=True) as candidate:
                found = self._look(candidate)
        except RunError:
            found = False  # not there yet, or its files belong together only at its end
        now = time.monotonic()
        self._next_look = now + _SHARE * (now - began)
        return found

    def _look(self, candidate: Run) -> bool:
        if self._object_to is not None and candidate.environment:
            self.objection = self._object_to(candidate)
            if self.objection:
                return True
        if self.baseline is not None:
            self.answer = self.find_divergence(candidate)
            if self.answer is not None:
                return True
        self.has_enough = self._stop_after is not None and _has_step(candidate, self._stop_after)
        return self.has_enough

    def find_divergence(self, candidate: RunView) -> Answer | None:
        """Return the diff up to the first step that differs; None where none does so far."""
        assert self.baseline is not None
        while True:
            step = first_differing_step(self.baseline, candidate, after=self._cleared, until=self._until)
            if step is None:
                return None
            answer = self._compare(self.baseline, candidate, until=step)
            if answer.first is not None:
                return answer
            self._cleared = step


def _has_step(run: Run, step: int) -> bool:
    """Whether every rank has recorded the whole of `step`."""
    if run.missing_ranks or not run.environment:
        return False
    for rank in run.ranks:
        table = run.rank(rank).table
        steps = table["step"][table["kind"] == int(StepKind.STEP)]
        if not len(steps) or steps.max() < step:
            return False
    return True
