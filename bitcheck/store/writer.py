"""Append the steps of one rank to its file, each on disk before `append` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bitcheck.digest import DIGEST_BYTES, DIGEST_VERSION
from bitcheck.errors import RecordingError
from bitcheck.events import Level, Site, StepColumns, StepRecord
from bitcheck.process import this_process
from bitcheck.store.file import WRITING_ERRORS, GrowingFile, reason_of
from bitcheck.store.format import DATASETS, SCHEMA, STEP_ROW, row_check
from bitcheck.store.known import KnownGroups, KnownKinds, KnownSites, write_new
from bitcheck.store.layout import (
    CHAIN_SEED,
    PHASE_NUMBER,
    Cover,
    LayoutError,
    TensorKind,
    check_indices,
    encode_notes,
    hash_contents,
    hash_layout,
    hash_meta,
    link_chain,
)

_KNOWN_LAYOUTS = 8
_KNOWN_EVENTS = 100_000
"""How many layouts a writer keeps to compare a step with, and of how many events together where that is more
than one; older ones are found by their hash."""
_KNOWN_VALUES = 65_536
"""Distinct strings remembered for interning; beyond it they are forgotten and may be stored again."""


class RankWriter:
    """Writes one rank's file: `append` each step, then `close`.

    The file appears under its name only when it is whole and readable, and never replaces another:
    FileExistsError becomes RecordingError. `leaf_limit_bytes`: leaf digests are kept of tensors up
    to this size, None for all, 0 for none. `num_rows`: steps written so far.

    Not for use from two threads at once. Raises RecordingError where the file cannot be made.
    """

    def __init__(
        self, path: Path, *, rank: int, world_size: int, level: Level, run_id: str, leaf_limit_bytes: int | None
    ) -> None:
        self.path = Path(path)
        self.leaf_limit_bytes = leaf_limit_bytes
        header = {
            "schema": SCHEMA,
            "digest_version": DIGEST_VERSION,
            "run_id": run_id,
            "rank": rank,
            "world_size": world_size,
            "level": str(level),
            "leaf_limit_bytes": leaf_limit_bytes,
            "writer": this_process(),
        }
        self._file = GrowingFile(self.path, header)
        self._columns = self._file.columns
        self._chain, self._totals = CHAIN_SEED, (0, 0, 0)
        self.num_rows = 0
        self._failure: str | None = None
        self._strings = _Interned(self._write_string)
        self._group_names = _Interned(self._write_group)
        self._sites, self._groups, self._kinds = KnownSites(), KnownGroups(), KnownKinds()
        self._layout_ids: dict[bytes, int] = {}
        self._meta_ids: dict[bytes, int] = {}
        self._layouts: list[_KnownLayout] = []
        self._metas: list[_KnownMeta] = []
        self._last_values: tuple[list[str], int] = ([], 0)

    def append(self, record: StepRecord | StepColumns) -> None:
        """Write one step and flush it: when this returns, no death of the process loses it.

        Raises RecordingError where it cannot be written (disk full, folder removed, a record that
        makes no sense); what was appended before stays readable.
        """
        if self._failure is not None:
            raise RecordingError(self._failure)
        try:
            self._file.size()
            self._append(record if isinstance(record, StepColumns) else StepColumns.of(record))
        except LayoutError as error:
            raise RecordingError(
                f"{self.path}: step {record.step} cannot be written: {error}.\n"
                "This is a mistake in what recorded the step, not in the disk: please report it."
            ) from None
        except RecordingError as error:
            self._failure = str(error)
            self._file.let_go("failed")
            raise
        except WRITING_ERRORS as error:
            raise self._fail(f"step {record.step} could not be written", error) from None

    def _append(self, record: StepColumns) -> None:
        columns = self._columns
        joined = b"".join(record.digests)
        if len(joined) != len(record) * DIGEST_BYTES:
            raise LayoutError("a digest is not 16 bytes long")
        digests = np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)
        layout = self._find_layout(record)
        meta, leaves = self._find_meta(record)
        leaf_bytes = b"".join(leaves)
        values = list(record.values.values())
        notes = encode_notes(record.unobserved, record.remarks)

        roots = layout.cover.compute_roots(digests)
        contents = hash_contents(leaf_bytes, values, notes)
        chain = link_chain(self._chain, record.step, record.kind, roots.root, layout.hash, meta.hash, contents)
        row = np.zeros(1, STEP_ROW)
        row["step"], row["kind"] = record.step, record.kind
        row["num_events"], row["num_bytes"] = len(record), meta.total_bytes
        totals = (
            self._totals[0] + meta.total_bytes,
            self._totals[1] + sum(record.unobserved.values()),
            self._totals[2] + len(record.remarks),
        )
        row["total_bytes"], row["total_unobserved"], row["total_remarks"] = totals
        row["layout"], row["meta"] = layout.number, meta.number
        row["phase_roots"] = np.frombuffer(roots.phase_roots, np.uint8).reshape(-1, DIGEST_BYTES)
        row["root"] = np.frombuffer(roots.root, np.uint8)
        row["state_root"] = np.frombuffer(roots.state_root, np.uint8)
        row["contents"] = np.frombuffer(contents, np.uint8)
        row["chain"] = np.frombuffer(chain, np.uint8)

        row["first_value"], row["num_values"] = self._write_values(values), len(values)
        row["notes"] = self._strings[notes]
        row["first_event"] = columns["digests"].append(digests)
        row["num_leaves"] = len(leaf_bytes) // DIGEST_BYTES
        row["first_leaf"] = columns["leaves"].append(np.frombuffer(leaf_bytes, np.uint8).reshape(-1, DIGEST_BYTES))
        # Everything that the row refers to is on disk before the row is: who reads while this is
        # written, or after a SIGKILL between the two, never finds a row whose digests are missing.
        for column in columns.values():
            column.flush()
        row["file_bytes"] = self._file.size()
        row["check"] = row_check(row.tobytes())
        columns["steps"].append(row)
        columns["steps"].flush()
        self._chain, self._totals = chain, totals
        self.num_rows += 1

    def close(self, status: str) -> None:
        """End the file as "complete" or "failed" and seal it. A second call does nothing.

        Raises RecordingError where that cannot be written.
        """
        if not self._file.is_open:
            return
        try:
            self._file.size()
            self._file.close(status, num_rows=self.num_rows, chain=self._chain)
        except RecordingError:
            self._file.let_go("failed")
            raise
        except WRITING_ERRORS as error:
            raise self._fail("the file could not be finished", error) from None

    def _fail(self, what: str, error: Exception) -> RecordingError:
        self._file.let_go("failed")
        before = f"the {self.num_rows} steps before it are readable" if self.num_rows else "it holds no step"
        self._failure = f"{self.path}: {what}: {reason_of(error)}; {before}.\nFree some space, and record again."
        return RecordingError(self._failure)

    def _find_layout(self, record: StepColumns) -> _KnownLayout:
        """Return the step's layout, known or written now.

        A list compares its elements by identity before it compares them by value, so a recorder that
        uses its sites again pays for a comparison of pointers.
        """
        key: list[list[Any]] = [record.sites, record.group_of, record.inputs, record.groups]
        for position, known in enumerate(self._layouts):
            if known.key == key:
                if position:
                    self._layouts.insert(0, self._layouts.pop(position))
                return known
        known_sites, known_groups = self._sites, self._groups
        sites, groups = known_sites.find(record.sites), known_groups.find(record.groups)
        group_of = np.array(record.group_of, np.int32)
        input_ptr = np.zeros(len(sites) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, record.inputs), np.int64, len(sites)), out=input_ptr[1:])
        inputs = np.fromiter(itertools.chain.from_iterable(record.inputs), np.int32, int(input_ptr[-1]))
        check_indices(group_of, known_groups.parents[groups], input_ptr, inputs)
        cover = Cover(
            known_sites.phases[sites],
            group_of,
            known_groups.is_op[groups],
            known_sites.order(sites),
            known_sites.key_digests[sites],
        )
        digests = known_sites.digests[sites].tobytes(), known_groups.digests[groups].tobytes()
        layout_hash = hash_layout(group_of, input_ptr, inputs, *digests)
        number = self._layout_ids.get(layout_hash)
        if number is None:
            numbers = _LayoutNumbers(sites, groups, group_of, np.diff(input_ptr), inputs)
            number = self._layout_ids[layout_hash] = self._write_layout(record, layout_hash, numbers)
        known = _KnownLayout(number, layout_hash, cover, key)
        self._layouts = _most_recent([known, *self._layouts])
        return known

    def _write_layout(self, record: StepColumns, layout_hash: bytes, numbers: _LayoutNumbers) -> int:
        """Write a layout; return its row."""
        sites, groups, group_of, num_inputs, inputs = numbers
        columns = self._columns
        rows = np.zeros(1, DATASETS["layouts"][0])
        rows[0] = (
            columns["layout_events"].num_rows,
            len(sites),
            columns["layout_groups"].num_rows,
            len(groups),
            columns["layout_inputs"].num_rows,
            len(inputs),
            np.frombuffer(layout_hash, np.uint8),
        )
        event_rows = np.zeros(len(sites), DATASETS["layout_events"][0])
        event_rows["site"] = write_new(self._sites.rows, sites, lambda event: self._write_site(record.sites[event]))
        event_rows["group"] = group_of
        event_rows["num_inputs"] = num_inputs
        group_rows = np.zeros(len(groups), DATASETS["layout_groups"][0])
        group_rows["group"] = write_new(
            self._groups.rows, groups, lambda group: self._group_names[record.groups[group][:4]]
        )
        group_rows["parent"] = self._groups.parents[groups]
        columns["layout_events"].append(event_rows)
        columns["layout_groups"].append(group_rows)
        columns["layout_inputs"].append(inputs)
        return columns["layouts"].append(rows)

    def _find_meta(self, record: StepColumns) -> tuple[_KnownMeta, list[bytes]]:
        """Return the step's meta, known or written now, and of each event the leaf digests that are kept."""
        key: list[list[Any]] = [record.kinds, list(record.values), list(record.placements.items())]
        for position, known in enumerate(self._metas):
            if known.key == key:
                leaves = _without(record.leaves, known.not_kept)
                if list(map(len, leaves)) == known.leaf_lengths:
                    if position:
                        self._metas.insert(0, self._metas.pop(position))
                    return known, leaves
        kinds = self._kinds.find(record.kinds)
        sizes = self._kinds.sizes[kinds]
        limit = self.leaf_limit_bytes
        not_kept = [] if limit is None else np.flatnonzero(sizes > limit).tolist()
        leaves = _without(record.leaves, not_kept)
        leaf_lengths = list(map(len, leaves))
        lengths = np.array(leaf_lengths, np.int64)
        if (lengths % DIGEST_BYTES).any():
            raise LayoutError("a leaf digest is not 16 bytes long")
        # In two halves, so that no sum is beyond an int64.
        total_bytes = (int((sizes >> 32).sum()) << 32) + int((sizes & (2**32 - 1)).sum())
        if total_bytes >= 2**63 or (sizes < 0).any():
            raise LayoutError("a tensor's size is out of range")
        num_leaves = lengths // DIGEST_BYTES
        if ((num_leaves != 0) & (num_leaves != self._kinds.num_leaves[kinds])).any():
            raise LayoutError("a tensor has some of its leaf digests, not all or none")
        has_value = np.zeros(len(kinds), bool)
        has_value[list(record.values)] = True
        tensors = self._kinds.find_tensors(kinds, has_value, num_leaves != 0, record.placements)
        meta_hash = hash_meta(self._kinds.tensors.digests[tensors].tobytes())
        number = self._meta_ids.get(meta_hash)
        if number is None:
            number = self._meta_ids[meta_hash] = self._write_meta(meta_hash, tensors)
        known = _KnownMeta(number, meta_hash, total_bytes, not_kept, leaf_lengths, key)
        self._metas = _most_recent([known, *self._metas])
        return known, leaves

    def _write_meta(self, meta_hash: bytes, tensors: np.ndarray) -> int:
        """Write a meta, `tensors` the numbers of its events' TensorKinds; return its row."""
        columns, known = self._columns, self._kinds.tensors
        rows = np.zeros(1, DATASETS["metas"][0])
        rows[0] = (columns["meta_tensors"].num_rows, len(tensors), np.frombuffer(meta_hash, np.uint8))
        numbers = write_new(known.rows, tensors, lambda event: self._write_tensor(known.tensors[tensors[event]]))
        columns["meta_tensors"].append(numbers.astype(np.uint32))
        return columns["metas"].append(rows)

    def _write_values(self, values: list[str]) -> int:
        """Write the step's values and return the first one's row; those of the step before serve again."""
        last, first = self._last_values
        if values != last:
            numbers = np.array([self._strings[value] for value in values], np.uint32)
            first = self._columns["values"].append(numbers)
            self._last_values = (values, first)
        return first if values else 0

    def _write_string(self, text: str) -> int:
        data = text.encode("utf-8", "surrogatepass")
        self._columns["strings"].extend(data)
        return self._columns["string_ends"].add(self._columns["strings"].num_rows)

    def _write_site(self, site: Site) -> int:
        names = (self._strings[site.root], self._strings[site.path], self._strings[site.slot])
        return self._columns["sites"].add((PHASE_NUMBER[site.phase], site.is_eval, *names, site.occurrence))

    def _write_group(self, names: tuple[str, str, str, str]) -> int:
        return self._columns["groups"].add(tuple([self._strings[name] for name in names]))

    def _write_tensor(self, kind: TensorKind) -> int:
        names = (self._strings[kind.dtype], self._strings[",".join(map(str, kind.shape))])
        placement = self._strings[kind.placement] + 1 if kind.placement else 0
        return self._columns["tensors"].add((*names, *kind[2:5], placement))


class _Interned(dict[Any, int]):
    """Key -> row; a key that is not there yet is written."""

    def __init__(self, write: Callable[[Any], int]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, key: Hashable) -> int:
        if len(self) >= _KNOWN_VALUES:
            self.clear()
        number = self[key] = self._write(key)
        return number


class _LayoutNumbers(NamedTuple):
    """A layout as arrays, of n events and g computations that have m inputs together."""

    sites: np.ndarray
    """int64 [n], numbers in KnownSites; groups: int64 [g], in KnownGroups."""
    groups: np.ndarray
    group_of: np.ndarray
    """int32 [n]; num_inputs: int64 [n]; inputs: int32 [m]."""
    num_inputs: np.ndarray
    inputs: np.ndarray


class _KnownLayout(NamedTuple):
    number: int
    hash: bytes
    cover: Cover
    key: list[list[Any]]


class _KnownMeta(NamedTuple):
    number: int
    hash: bytes
    total_bytes: int
    not_kept: list[int]
    """Events whose leaf digests are not kept: larger than the limit."""
    leaf_lengths: list[int]
    key: list[list[Any]]


_Known = TypeVar("_Known", _KnownLayout, _KnownMeta)


def _most_recent(known: list[_Known]) -> list[_Known]:
    """Return the first of what is known, as many as may be kept."""
    num_events = itertools.accumulate(len(each.key[0]) for each in known)
    num_kept = sum(total <= _KNOWN_EVENTS for total in num_events)
    return known[: min(max(num_kept, 1), _KNOWN_LAYOUTS)]


def _without(leaves: list[bytes], not_kept: list[int]) -> list[bytes]:
    """Return the leaf digests of each event, none of those named; the list itself where that changes nothing."""
    if not_kept:
        leaves = leaves.copy()
        for event in not_kept:
            leaves[event] = b""
    return leaves
