"""One rank's recorded steps in one HDF5 file: append-only, readable at any moment.

Place in the flow: tensor -> digest -> event -> *store* -> align -> diff -> report.
"""

from __future__ import annotations

from bitcheck.store.format import STATUSES, STEP_ROW, TAIL_ROW
from bitcheck.store.layout import CHAIN_SEED, Layout, Meta, link_chain
from bitcheck.store.reader import LoadedStep, RankReader
from bitcheck.store.seal import hash_file, read_seal
from bitcheck.store.writer import RankWriter

__all__ = [
    "CHAIN_SEED",
    "STATUSES",
    "STEP_ROW",
    "TAIL_ROW",
    "Layout",
    "LoadedStep",
    "Meta",
    "RankReader",
    "RankWriter",
    "hash_file",
    "link_chain",
    "read_seal",
]
