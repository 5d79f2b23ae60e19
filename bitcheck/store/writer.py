"""Append the steps of one rank to its file, each on disk before `append` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bitcheck.digest import DIGEST_BYTES, DIGEST_VERSION
from bitcheck.errors import RecordingError
from bitcheck.events import PHASES, Level, Site, StepColumns, StepRecord
from bitcheck.process import this_process
from bitcheck.store.file import WRITING_ERRORS, GrowingFile, reason_of
from bitcheck.store.format import DATASETS, SCHEMA, STEP_ROW, row_check
from bitcheck.store.layout import (
    CHAIN_SEED,
    Layout,
    LayoutError,
    Meta,
    TensorKind,
    encode_notes,
    hash_contents,
    link_chain,
)

_PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
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
        self._sites = _Interned(self._write_site)
        self._groups = _Interned(self._write_group)
        self._tensors = _Interned(self._write_tensor)
        self._kinds: dict[tuple[str, tuple[int, ...], int, int, bool, str], TensorKind] = _Kinds()
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
        leaves = self._kept_leaves(record)
        layout_number, layout = self._find_layout(record)[:2]
        meta_number, meta = self._find_meta(record, leaves)[:2]
        leaf_bytes = b"".join(leaves)
        values = list(record.values.values())
        notes = encode_notes(record.unobserved, record.remarks)

        roots = layout.compute_roots(digests)
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
        row["layout"], row["meta"] = layout_number, meta_number
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

    def _kept_leaves(self, record: StepColumns) -> list[bytes]:
        limit = self.leaf_limit_bytes
        if limit is None:
            return record.leaves
        return [leaves if kind[2] <= limit else b"" for leaves, kind in zip(record.leaves, record.kinds, strict=True)]

    def _find_layout(self, record: StepColumns) -> _KnownLayout:
        """Return the step's layout, known or written now.

        A list compares its elements by identity before it compares them by value, so a recorder that
        uses its sites again pays for a comparison of pointers.
        """
        inputs, groups = record.inputs, record.groups
        key: list[list[Any]] = [record.sites, record.group_of, inputs, groups]
        for position, known in enumerate(self._layouts):
            if known.key == key:
                if position:
                    self._layouts.insert(0, self._layouts.pop(position))
                return known
        counts = list(map(len, inputs))
        input_ptr = np.zeros(len(record) + 1, np.int64)
        np.cumsum(counts, out=input_ptr[1:])
        layout = Layout(
            record.sites,
            groups,
            np.array(record.group_of, np.int32),
            input_ptr,
            np.array([index for indices in inputs for index in indices], np.int32),
        )
        known = _KnownLayout(self._layout_number(layout), layout, key)
        self._layouts = _most_recent([known, *self._layouts])
        return known

    def _layout_number(self, layout: Layout) -> int:
        number = self._layout_ids.get(layout.hash)
        if number is not None:
            return number
        columns = self._columns
        rows = np.zeros(1, DATASETS["layouts"][0])
        rows[0] = (
            columns["layout_events"].num_rows,
            len(layout.sites),
            columns["layout_groups"].num_rows,
            len(layout.groups),
            columns["layout_inputs"].num_rows,
            len(layout.inputs),
            np.frombuffer(layout.hash, np.uint8),
        )
        events = np.zeros(len(layout.sites), DATASETS["layout_events"][0])
        events["site"] = [self._sites[site] for site in layout.sites]
        events["group"] = layout.group_of
        events["num_inputs"] = np.diff(layout.input_ptr)
        groups = np.zeros(len(layout.groups), DATASETS["layout_groups"][0])
        groups["group"] = [self._groups[group[:4]] for group in layout.groups]
        groups["parent"] = [group.parent for group in layout.groups]
        columns["layout_events"].append(events)
        columns["layout_groups"].append(groups)
        columns["layout_inputs"].append(layout.inputs)
        self._layout_ids[layout.hash] = columns["layouts"].append(rows)
        return self._layout_ids[layout.hash]

    def _find_meta(self, record: StepColumns, leaves: list[bytes]) -> _KnownMeta:
        key: list[list[Any]] = [record.kinds, list(map(len, leaves))]
        key += [list(record.values), list(record.placements.items())]
        for position, known in enumerate(self._metas):
            if known.key == key:
                if position:
                    self._metas.insert(0, self._metas.pop(position))
                return known
        if any(length % DIGEST_BYTES for length in key[1]):
            raise LayoutError("a leaf digest is not 16 bytes long")
        has_value = map(record.values.__contains__, range(len(record)))
        placements = map(record.placements.get, range(len(record)), itertools.repeat(""))
        told = zip(record.kinds, key[1], has_value, placements, strict=True)
        kinds = [self._kinds[(*kind, *fields)] for kind, *fields in told]
        meta = Meta(kinds)
        number = self._meta_ids.get(meta.hash)
        if number is None:
            rows = np.zeros(1, DATASETS["metas"][0])
            rows[0] = (self._columns["meta_tensors"].num_rows, len(record), np.frombuffer(meta.hash, np.uint8))
            self._columns["meta_tensors"].append(np.array([self._tensors[kind] for kind in kinds], np.uint32))
            number = self._meta_ids[meta.hash] = self._columns["metas"].append(rows)
        known = _KnownMeta(number, meta, key)
        self._metas = _most_recent([known, *self._metas])
        return known

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
        return self._columns["sites"].add((_PHASE_NUMBER[site.phase], site.is_eval, *names, site.occurrence))

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


class _Kinds(dict[tuple[str, tuple[int, ...], int, int, bool, str], TensorKind]):
    """(dtype, shape, size, bytes of leaf digests, whether it has a value, placement) -> the one object that says so."""

    def __missing__(self, key: tuple[str, tuple[int, ...], int, int, bool, str]) -> TensorKind:
        if len(self) >= _KNOWN_VALUES:
            self.clear()
        dtype, shape, size, leaf_bytes, has_value, placement = key
        kind = self[key] = TensorKind(dtype, tuple(shape), size, leaf_bytes // DIGEST_BYTES, has_value, placement)
        return kind


class _KnownLayout(NamedTuple):
    number: int
    layout: Layout
    key: list[list[Any]]


class _KnownMeta(NamedTuple):
    number: int
    meta: Meta
    key: list[list[Any]]


_Known = TypeVar("_Known", _KnownLayout, _KnownMeta)


def _most_recent(known: list[_Known]) -> list[_Known]:
    """Return the first of what is known, as many as may be kept."""
    num_events = itertools.accumulate(len(each.key[0]) for each in known)
    num_kept = sum(total <= _KNOWN_EVENTS for total in num_events)
    return known[: min(max(num_kept, 1), _KNOWN_LAYOUTS)]
