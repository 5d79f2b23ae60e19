"""One recorded step, as it is read."""

from __future__ import annotations

import numpy as np

from bitcheck.events import Event, StepKind, StepRecord
from bitcheck.store.layout import Layout, Meta


class LoadedStep:
    """One recorded step. n events, in happens-before order.

    step, kind        its number, StepKind
    sites             list of n Site; keys: their canonical text
    dtypes, shapes, placements   lists of n; num_bytes int64 [n]
    digests           uint8 [n, 16]
    groups            list of Group; group_of int32 [n], -1 for observed state
    input_ptr         int64 [n + 1], inputs int32: event i was computed from
                      inputs[input_ptr[i] : input_ptr[i + 1]], all of them before i
    unobserved        what escaped observation -> how many times; remarks: other facts
    layout            Layout: equal `layout.hash`, and two steps line up event by event
    root, state_root, phase_roots   bytes of 16, 16 and 13 * 16
    """

    def __init__(
        self,
        row: np.void,
        layout: Layout,
        meta: Meta,
        digests: np.ndarray,
        leaves: np.ndarray,
        values: list[str],
        notes: tuple[dict[str, int], tuple[str, ...]],
    ) -> None:
        self.step = int(row["step"])
        self.kind = StepKind(int(row["kind"]))
        self.root, self.state_root = row["root"].tobytes(), row["state_root"].tobytes()
        self.phase_roots = row["phase_roots"].tobytes()
        self.layout, self.meta = layout, meta
        self.sites, self.keys, self.groups = layout.sites, layout.keys, layout.groups
        self.group_of, self.input_ptr, self.inputs = layout.group_of, layout.input_ptr, layout.inputs
        self.dtypes, self.shapes, self.num_bytes = meta.dtypes, meta.shapes, meta.num_bytes
        self.placements = meta.placements
        self.digests = digests
        self.unobserved, self.remarks = notes
        self._leaves, self._values = leaves, values

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.sites)

    def leaves(self, event: int) -> bytes:
        """Return the leaf digests of an event, 16 bytes each; empty where they were not kept."""
        start, end = self.meta.leaf_ptr[event], self.meta.leaf_ptr[event + 1]
        return self._leaves[start:end].tobytes()

    def value(self, event: int) -> str | None:
        """Return the `repr` of a Python value, None for a tensor."""
        position = self.meta.value_of.get(event)
        return None if position is None else self._values[position]

    def to_record(self) -> StepRecord:
        """Return the step as it was given to `RankWriter.append`, less leaf digests not kept."""
        events = [
            Event(
                site=site,
                dtype=self.dtypes[index],
                shape=self.shapes[index],
                num_bytes=int(self.num_bytes[index]),
                digest=self.digests[index].tobytes(),
                leaves=self.leaves(index),
                group=int(self.group_of[index]),
                inputs=tuple(self.layout.inputs_of(index).tolist()),
                value=self.value(index),
                placement=self.placements[index],
            )
            for index, site in enumerate(self.sites)
        ]
        return StepRecord(self.step, self.kind, events, list(self.groups), dict(self.unobserved), self.remarks)
