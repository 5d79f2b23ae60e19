"""The oracle of `bisect kernels`: runs a program with some switches suspect, and says whether it repeats itself.

A suspect form may give other bits than the reproducible one and still be the same every time, so runs
are compared with runs of the same forms. One short cut: a first run that has the bits of the
reproducible end is an identical pair with that one already.

Place in the flow: pairs, switches -> *probes* -> bisect_log -> bisect.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from bitcheck.bisect import Point, Sample
from bitcheck.pairs import PairRunner, second
from bitcheck.settings import Options
from bitcheck.switches import SwitchSet
from bitcheck.trials import Trial

_MAX_LABEL = 60


class SwitchProbe:
    """Takes samples by running a program; see `bitcheck.bisect.Oracle`.

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
