"""One rank's recorded steps in one HDF5 file: append-only, readable at any moment.

Place in the flow: tensor -> digest -> event -> *store* -> align -> diff -> report.
"""

from __future__ import annotations

from bitcheck.store.format import STATUSES, STEP_ROW, TAIL_ROW
from bitcheck.store.layout import Layout, Meta
from bitcheck.store.reader import LoadedStep, RankReader
from bitcheck.store.writer import RankWriter

__all__ = ["STATUSES", "STEP_ROW", "TAIL_ROW", "Layout", "LoadedStep", "Meta", "RankReader", "RankWriter"]
