"""Runs held in memory: steps that were never written, in the shape the diff reads.

The same views as a run folder's (`bitcheck.views`), so that a few steps recorded again can be
compared without a file, and the diff can be tested without a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bitcheck.digest import xxh3_128
from bitcheck.events import PHASES, STATE_PHASES, Event, Group, Level, Phase, Site, StepColumns, StepKind, StepRecord
from bitcheck.views import TAIL

TABLE = np.dtype(
    [
        ("step", "<i8"),
        ("kind", "u1"),
        ("root", "u1", (16,)),
        ("state_root", "u1", (16,)),
        ("chain", "u1", (16,)),
        ("phase_roots", "u1", (len(PHASES), 16)),
        ("num_events", "<i8"),
        ("num_bytes", "<i8"),
        ("total_unobserved", "<i8"),
    ]
)
"""The columns of a rank's table that the diff reads."""


class MemoryStore:
    """Takes the steps of a recorder, as a rank's file does, and keeps them as records."""

    leaf_limit_bytes: int | None = None

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def append(self, record: StepColumns) -> None:
        """Keep one step."""
        self.records.append(record.to_record())

    def close(self, status: str) -> None:
        """Do nothing."""


class MemoryStep:
    """A StepRecord as columns."""

    def __init__(self, record: StepRecord) -> None:
        events = record.events
        self.record = record
        self.step: int = record.step
        self.kind: StepKind = record.kind
        self.sites: list[Site] = [event.site for event in events]
        self.dtypes: list[str] = [event.dtype for event in events]
        self.shapes: list[tuple[int, ...]] = [event.shape for event in events]
        self.placements: list[str] = [event.placement for event in events]
        self.num_bytes: npt.NDArray[Any] = np.array([event.num_bytes for event in events], np.int64)
        joined = b"".join(event.digest for event in events)
        self.digests: npt.NDArray[np.uint8] = np.frombuffer(joined, np.uint8).reshape(len(events), 16)
        self.groups: list[Group] = record.groups
        self.group_of: npt.NDArray[Any] = np.array([event.group for event in events], np.int32)
        counts = [len(event.inputs) for event in events]
        self.input_ptr: npt.NDArray[Any] = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.inputs: npt.NDArray[Any] = np.array([i for event in events for i in event.inputs], np.int64)
        self.unobserved: Mapping[str, int] = record.unobserved
        self.remarks: Sequence[str] = record.remarks

    def leaves(self, index: int) -> bytes:
        """Return the leaf digests of an event, 16 bytes each; empty where not kept."""
        return self.record.events[index].leaves

    def value(self, index: int) -> str | None:
        """Return the `repr` of a Python value, None for a tensor."""
        return self.record.events[index].value


def _root_phase(record: StepRecord, event: Event) -> Phase:
    """The phase whose root covers an event: an optimizer's operations bear `optim` and are no state."""
    phase = event.site.phase
    is_operation = event.group >= 0 and record.groups[event.group].kind == "op"
    return Phase.GRAD if is_operation and phase in STATE_PHASES else phase


class MemoryRank:
    """One rank's StepRecords."""

    def __init__(self, rank: int, records: Sequence[StepRecord], status: str = "complete") -> None:
        self.rank = rank
        self.records = list(records)
        self.status = status

    @cached_property
    def table(self) -> npt.NDArray[Any]:
        """A row a step, with roots built as in a file: over (site key, digest) in sorted order."""
        table = np.zeros(len(self.records), TABLE)
        chain, unobserved = b"", 0
        for row, record in zip(table, self.records, strict=True):
            keyed = sorted((event.site.key, event.digest, _root_phase(record, event)) for event in record.events)
            roots = [
                xxh3_128(b"".join(xxh3_128(key.encode()) + digest for key, digest, owner in keyed if owner == phase))
                for phase in PHASES
            ]
            state = [root for phase, root in zip(PHASES, roots, strict=True) if phase in STATE_PHASES]
            root = xxh3_128(b"".join(roots))
            notes = repr((sorted(record.unobserved.items()), record.remarks)).encode()
            chain = xxh3_128(chain + b"%d %d" % (record.step, record.kind) + root + notes)
            unobserved += sum(record.unobserved.values())
            row["step"], row["kind"] = record.step, record.kind
            row["root"] = np.frombuffer(root, np.uint8)
            row["state_root"] = np.frombuffer(xxh3_128(b"".join(state)), np.uint8)
            row["chain"] = np.frombuffer(chain, np.uint8)
            row["phase_roots"] = np.frombuffer(b"".join(roots), np.uint8).reshape(len(PHASES), 16)
            row["num_events"] = len(record.events)
            row["total_unobserved"] = unobserved
            row["num_bytes"] = sum(event.num_bytes for event in record.events)
        return table

    def load(self, row: int) -> MemoryStep:
        """Return one step as columns."""
        return MemoryStep(self.records[row])


@dataclass
class MemoryRun:
    """A run as ranks -> list of steps."""

    steps: Mapping[int, Sequence[StepRecord]]
    """Each rank's steps, an initial snapshot first where there is one."""
    level: Level = Level.MODULE
    status: str = "complete"
    environment: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    path: Path = Path("memory")
    run_id: str = "memory"
    statuses: Mapping[int, str] = field(default_factory=dict)
    """Status of single ranks, where it is not the run's."""

    @property
    def ranks(self) -> list[int]:
        """Ranks that have steps, sorted."""
        return sorted(self.steps)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.steps)

    @cached_property
    def _readers(self) -> dict[int, MemoryRank]:
        return {
            rank: MemoryRank(rank, records, self.statuses.get(rank, self.status))
            for rank, records in self.steps.items()
        }

    def rank(self, rank: int) -> MemoryRank:
        """Return one rank's steps."""
        return self._readers[rank]

    def close_rank(self, rank: int) -> None:
        """Do nothing: memory needs no closing."""

    def read_tails(self) -> npt.NDArray[Any]:
        """Return one TAIL for each rank."""
        tails = np.zeros(len(self.ranks), TAIL)
        for tail, rank in zip(tails, self.ranks, strict=True):
            reader = self._readers[rank]
            table = reader.table
            tail["status"], tail["num_rows"] = reader.status, len(table)
            if len(table):
                tail["first_kind"], tail["last_kind"] = table["kind"][0], table["kind"][-1]
                tail["last_step"], tail["chain"] = table["step"][-1], table["chain"][-1]
                tail["total_events"], tail["total_bytes"] = table["num_events"].sum(), table["num_bytes"].sum()
                tail["total_unobserved"] = table["total_unobserved"][-1]
        return tails
