"""Which random number generators a run draws from: a state that nobody uses says nothing.

States are read at the first forward of each step, and once more at the end of the run, so a
generator is in use where two readings in a row differ. What draws between the last step and the end may be
what the program does after its training, so that says nothing of the steps before. Most programs seed
PyTorch alone, and Python's and numpy's generators differ between any two runs of them.

Place in the flow: views -> *generators* -> diff.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bitcheck.events import PHASES, Phase, Site, StepKind
from bitcheck.views import RunView

RNG_COLUMN = PHASES.index(Phase.RNG)


class GeneratorReadings:
    """The generator states of one rank of one run, over the compared steps and the reading after them."""

    def __init__(self, run: RunView, rank: int, rows: npt.NDArray[np.int64]) -> None:
        self._run, self._rank = run, rank
        table = run.rank(rank).table
        kinds = table["kind"]
        wanted = [int(row) for row in rows if kinds[row] != int(StepKind.INITIAL)]
        if wanted and wanted[-1] + 1 < len(table):
            wanted.append(wanted[-1] + 1)
        self._rows = wanted
        steps = np.flatnonzero(kinds == int(StepKind.STEP))
        self._last_step = int(steps[-1]) if len(steps) else -1
        self._roots: npt.NDArray[Any] = table["phase_roots"][wanted, RNG_COLUMN]
        self._states: dict[int, dict[Site, bytes]] = {}

    def is_in_use(self, generator: Site, near: int) -> bool:
        """Whether the generator's state changes between two readings in a row; looks near row `near` first."""
        moved = np.flatnonzero((self._roots[1:] != self._roots[:-1]).any(axis=1)).tolist()
        if near < self._last_step:
            moved = [place for place in moved if self._rows[place] < self._last_step]
        moved.sort(key=lambda place: abs(self._rows[place] - near))
        for place in moved:
            earlier = self._state(self._rows[place]).get(generator)
            later = self._state(self._rows[place + 1]).get(generator)
            if earlier is not None and later is not None and earlier != later:
                return True
        return False

    def _state(self, row: int) -> dict[Site, bytes]:
        if row not in self._states:
            step = self._run.rank(self._rank).load(row)
            self._states[row] = {
                site: step.digests[index].tobytes() for index, site in enumerate(step.sites) if site.phase is Phase.RNG
            }
        return self._states[row]
