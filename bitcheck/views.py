"""What the diff needs to know about a run, whoever holds it: a folder of files, or memory.

Place in the flow: event -> store -> *views* -> align -> diff. `bitcheck.run.Run`,
`bitcheck.store.RankReader` and `bitcheck.store.LoadedStep` have these shapes, and so have the runs
in memory of `bitcheck.memory`; the engine imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bitcheck.events import Group, Level, Site, StepKind

TAIL = np.dtype(
    [
        ("status", "U9"),
        ("num_rows", "<i8"),
        ("first_kind", "<u4"),
        ("last_step", "<i8"),
        ("last_kind", "<u4"),
        ("total_events", "<u8"),
        ("total_bytes", "<u8"),
        ("total_unobserved", "<u8"),
        ("chain", "u1", (16,)),
    ]
)
"""What `RunView.read_tails` says of a rank, at least; all zero after `num_rows` where nothing was recorded."""


class StepView(Protocol):
    """One recorded step of one rank: n events as columns, in the order in which they happened."""

    @property
    def step(self) -> int: ...
    @property
    def kind(self) -> StepKind: ...
    @property
    def sites(self) -> Sequence[Site]: ...
    @property
    def dtypes(self) -> Sequence[str]: ...
    @property
    def shapes(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def placements(self) -> Sequence[str]: ...
    @property
    def num_bytes(self) -> npt.NDArray[Any]:
        """int64 [n]."""

    @property
    def digests(self) -> npt.NDArray[np.uint8]:
        """uint8 [n, 16]."""

    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def group_of(self) -> npt.NDArray[Any]:
        """int32 [n]; index in `groups`, -1 for observed state."""

    @property
    def input_ptr(self) -> npt.NDArray[Any]:
        """int [n + 1]; event i was computed from events inputs[input_ptr[i]:input_ptr[i + 1]]."""

    @property
    def inputs(self) -> npt.NDArray[Any]: ...
    @property
    def unobserved(self) -> Mapping[str, int]: ...
    @property
    def remarks(self) -> Sequence[str]: ...
    def leaves(self, index: int, /) -> bytes: ...
    def value(self, index: int, /) -> str | None: ...


class RankView(Protocol):
    """One rank's steps: a table with a row a recorded step, and the steps behind it."""

    @property
    def rank(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def table(self) -> npt.NDArray[Any]:
        """Structured, a row a step: step, kind, root, state_root, chain, phase_roots, num_events, num_bytes,
        total_unobserved (of all rows up to it)."""

    def load(self, row: int, /) -> StepView: ...


class RunView(Protocol):
    """One recorded execution."""

    @property
    def path(self) -> Path: ...
    @property
    def run_id(self) -> str: ...
    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def level(self) -> Level: ...
    @property
    def world_size(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    def rank(self, rank: int, /) -> RankView: ...
    def close_rank(self, rank: int, /) -> None:
        """Close what `rank` opened, so that a run of thousands of ranks does not hold all of them open."""

    def read_tails(self) -> npt.NDArray[Any]:
        """What the ends of each rank of `ranks` say, without reading its table; the fields of TAIL.

        A chain covers everything that a rank recorded: equal chains, and all of it is equal.
        """
