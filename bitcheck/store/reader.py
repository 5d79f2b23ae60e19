"""Read one rank's file, a step at a time; what is read is checked against its root."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from h5py import h5a, h5d, h5f, h5s

from bitcheck.digest import DIGEST_VERSION
from bitcheck.document import ChangedDocument, DocumentError, decode_document
from bitcheck.errors import BrokenRun, DamagedStep, FutureRun, NotARun
from bitcheck.events import PHASES, Event, Group, Level, Site, StepKind, StepRecord
from bitcheck.process import is_gone
from bitcheck.store.format import (
    DATASETS,
    NATIVE,
    SCHEMA,
    SCHEMA_PREFIX,
    STATUSES,
    STEP_ROW,
    TAIL_ROW,
    open_read_only,
    read_rows,
    row_check,
)
from bitcheck.store.layout import Layout, Meta, TensorKind, decode_notes, hash_contents
from bitcheck.store.unfinished import UnfinishedFile

_SHARED_EVENTS = 400_000
"""Layouts of up to this many events in all are kept decoded, for every reader of the process."""
T = TypeVar("T")
_ATTEMPTS = 10
_ATTEMPT_SECONDS = 0.001
"""What a writer changes in place is a few hundred bytes: done in microseconds."""
_STRING_GAP = 4096
"""Interned strings whose numbers lie this close are read together."""


class LoadedStep:
    """One recorded step. n events, in happens-before order.

    step, kind        its number, StepKind
    sites             list of n Site; keys: their canonical text
    dtypes, shapes    lists of n; num_bytes int64 [n]
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
            )
            for index, site in enumerate(self.sites)
        ]
        return StepRecord(self.step, self.kind, events, list(self.groups), dict(self.unobserved), self.remarks)


class RankReader:
    """Reads one rank's file, finished, being written, or left by a writer that died.

    rank, world_size, level, run_id   from its header
    status      "recording", "complete", "failed", or "killed": recording by a process that is gone
    num_rows    recorded steps, the initial snapshot and a closing fragment among them
    table       structured array [num_rows], a row a step; the fields are those of
                `bitcheck.store.format.STEP_ROW`

    Raises NotARun where there is no file or another program's, FutureRun for a later schema, and
    BrokenRun where it was cut, edited or damaged. `load` checks the step against its roots; the whole
    file is checked by `bitcheck.verify`.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._datasets: dict[str, h5d.DatasetID] = {}
        self._sizes: dict[str, int] = {}
        self._table: np.ndarray | None = None
        self._strings: dict[int, str] = {}
        self._layouts: dict[int, Layout] = {}
        self._metas: dict[int, Meta] = {}
        self._file_bytes: int | None = None
        self._file: h5f.FileID | None = None
        self._unfinished: UnfinishedFile | None = None
        with self._reading():
            try:
                self._open()
            except (OSError, RuntimeError):
                # A writer that closes the file writes its first bytes anew.
                time.sleep(_ATTEMPT_SECONDS)
                self._open()

    def __enter__(self) -> RankReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        # HDF5 keeps a file open for as long as one of its datasets is.
        self._datasets.clear()
        if self._file is not None and self._file.valid:
            self._file.close()
        if self._unfinished is not None:
            self._unfinished.close()

    @property
    def table(self) -> np.ndarray:
        """The step table, read once."""
        if self._table is None:
            with self._reading():
                self._table = self._read_table()
        return self._table

    def tail(self) -> np.void:
        """Return what the first and the last row say, one TAIL_ROW, without reading the table.

        A row's chain covers all rows before it: equal chains of two ranks, and all their steps are equal.
        """
        with self._reading():
            tail: np.void = self._read_tail()[0]
            return tail

    @property
    def num_rows(self) -> int:
        """Recorded steps, the initial snapshot and a closing fragment among them."""
        return len(self.table)

    def load(self, row: int) -> LoadedStep:
        """Return the step at `row` of the table, checked against its roots.

        Raises BrokenRun where it does not hold, IndexError where there is no such row.
        """
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        with self._reading(row):
            return self._load(self.table[row])

    def _open(self) -> None:
        try:
            self._file, self._unfinished = open_read_only(self.path)
            self.is_live = self._unfinished is not None
            self._open_parts()
        except BaseException:
            self.close()
            raise

    def _open_parts(self) -> None:
        header = self._read_header()
        self.rank, self.world_size = header["rank"], header["world_size"]
        self.run_id, self.level = header["run_id"], Level(header["level"])
        self.leaf_limit_bytes: int | None = header["leaf_limit_bytes"]
        self.writer: dict[str, Any] = header["writer"]
        self.status = self._read_status()

    def _read_header(self) -> dict[str, Any]:
        if not h5a.exists(self._file, b"header"):
            raise NotARun(
                f"{self.path} is an HDF5 file of another program: it has no header of bitcheck.\n"
                "Name the folder that `bitcheck run -o` made."
            )
        try:
            header = decode_document(_read_text(self._file, b"header"))
            schema = header["schema"]
        except ChangedDocument as error:
            if not error.schema.startswith(SCHEMA_PREFIX) or error.schema == SCHEMA:
                raise
            schema = error.schema
        if schema != SCHEMA:
            if schema.startswith(SCHEMA_PREFIX):
                raise FutureRun(
                    f"{self.path} has schema {schema!r}; this bitcheck reads {SCHEMA}.\nUpdate bitcheck to read it."
                )
            raise NotARun(
                f"{self.path} has schema {schema[:40]!r}; expected {SCHEMA}.\n"
                "Name the folder that `bitcheck run -o` made."
            )
        if header.get("digest_version") != DIGEST_VERSION:
            raise FutureRun(
                f"{self.path} holds digests of version {header.get('digest_version')!r}; this bitcheck reads "
                f"version {DIGEST_VERSION}.\nUpdate bitcheck to read it."
            )
        for key, kind in _HEADER_TYPES.items():
            if not isinstance(header.get(key), kind):
                raise DocumentError(f"has no valid {key}")
        return header

    def _read_status(self) -> str:
        dataset = h5d.open(self._file, b"status")
        if dataset.shape != (1,) or not dataset.get_type().equal(NATIVE["strings"]):
            raise ValueError("its status is not one byte")
        code = np.zeros(1, np.uint8)
        dataset.read(h5s.ALL, h5s.ALL, code, NATIVE["strings"])
        status = STATUSES[int(code[0])]
        return "killed" if status == "recording" and is_gone(self.writer) else status

    def _size(self) -> int:
        """Return the size of the file, which grows while it is written."""
        if self.is_live or self._file_bytes is None:
            self._file_bytes = self.path.stat().st_size
        return self._file_bytes

    def _open_dataset(self, name: str) -> h5d.DatasetID:
        dataset = self._datasets.get(name)
        if dataset is not None:
            return dataset
        dtype, tail, _ = DATASETS[name]
        try:
            dataset = h5d.open(self._file, name.encode())
        except KeyError as error:  # what h5py makes of whatever kept HDF5 from opening it
            raise OSError(error.args[0]) from None
        shape = dataset.shape
        if len(shape) != 1 + len(tail) or shape[1:] != tail or not dataset.get_type().equal(NATIVE[name]):
            raise ValueError(f"its dataset {name} is not of type {dtype}")
        plist = dataset.get_create_plist()
        if plist.get_layout() != h5d.CHUNKED or plist.get_nfilters():
            raise ValueError(f"its dataset {name} is not stored in plain chunks")
        if shape[0] * dtype.itemsize * math.prod(tail) > self._size():
            raise ValueError(f"its dataset {name} claims {shape[0]} rows, more than the file has room for")
        self._datasets[name], self._sizes[name] = dataset, shape[0]
        return dataset

    def _read(self, name: str, first: int, count: int) -> np.ndarray:
        """Return `count` rows of a dataset. Raises IndexError where it has not so many."""

        def read() -> np.ndarray:
            dataset = self._open_dataset(name)
            if first < 0 or count < 0 or first + count > self._sizes[name]:
                raise IndexError(f"rows {first} to {first + count} of {name} do not exist")
            return read_rows(dataset, name, first, count)

        return self._try_again(read)

    def _count(self, name: str) -> int:
        """Return how many rows a dataset has."""
        self._try_again(lambda: self._open_dataset(name))
        return self._sizes[name]

    def _try_again(self, read: Callable[[], T]) -> T:
        """Return what `read` does, in a file opened anew where a living writer changed a piece of it just then."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return read()
            except (OSError, RuntimeError):
                if not self.is_live or is_gone(self.writer):
                    raise
                # HDF5 keeps what it has read, damaged or not: only a new start reads it again.
                self.close()
                time.sleep(_ATTEMPT_SECONDS)
                self._open()
        return read()

    def _read_table(self) -> np.ndarray:
        table = self._read("steps", 0, self._count("steps"))
        # The last row of a file whose writer died while it wrote may be half there; no other may.
        if self.is_live and len(table) and not self._row_holds(table[-1:]):
            table = table[:-1]
        data, size = table.tobytes(), STEP_ROW.itemsize
        checks = [row_check(data[start : start + size]) for start in range(0, len(data), size)]
        damaged = np.flatnonzero(table["check"] != np.array(checks, np.uint64))
        if self.is_live:
            num_bytes = self._size()
            is_hole = ~table.view(np.uint8).reshape(-1, size).any(axis=1)
            cut = np.flatnonzero((table["file_bytes"] > num_bytes) | is_hole)
            if cut.size:
                raise OSError(f"it ends after {num_bytes} bytes, before its row {cut[0]}")
        if damaged.size:
            raise self._damaged(self._plausible_step(table["step"], damaged[0]), f"row {damaged[0]} was changed")
        return table

    @staticmethod
    def _plausible_step(steps: np.ndarray, row: int) -> int | None:
        """Return the step that a damaged row says it is, where it lies between its neighbours."""
        step = int(steps[row])
        if (row and step <= int(steps[row - 1])) or (row + 1 < len(steps) and step >= int(steps[row + 1])):
            return None
        return step

    def _row_holds(self, row: np.ndarray) -> bool:
        return int(row["check"][0]) == row_check(row.tobytes()) and not (
            self.is_live and int(row["file_bytes"][0]) > self._size()
        )

    def _read_tail(self) -> np.ndarray:
        tail = np.zeros(1, TAIL_ROW)
        tail["rank"], tail["status"] = self.rank, self.status
        count = self._count("steps")
        if count:
            last = self._read("steps", count - 1, 1)
            if not self._row_holds(last) and self.is_live and count > 1:
                count -= 1
                last = self._read("steps", count - 1, 1)
            first = self._read("steps", 0, 1)
            if not self._row_holds(last) or not self._row_holds(first):
                count = len(self.table)  # says which row does not hold
            tail["num_rows"] = count
        if count:
            tail["first_step"], tail["first_kind"] = first["step"], first["kind"]
            tail["last_step"], tail["last_kind"] = last["step"], last["kind"]
            tail["total_events"] = last["first_event"] + last["num_events"]
            for name in ("total_bytes", "total_unobserved", "total_remarks", "root", "state_root", "chain"):
                tail[name] = last[name]
        return tail

    def _load(self, row: np.void) -> LoadedStep:
        layout = self.layout(int(row["layout"]))
        meta = self.meta(int(row["meta"]))
        n = int(row["num_events"])
        if n != len(layout.sites) or n != len(meta.dtypes):
            raise ValueError("its layout has another number of events")
        if int(row["num_leaves"]) != meta.leaf_ptr[-1] or int(row["num_values"]) != len(meta.value_of):
            raise ValueError("its leaves or values are not as many as its events say")
        digests = self._read("digests", int(row["first_event"]), n)
        leaves = self._read("leaves", int(row["first_leaf"]), int(row["num_leaves"]))
        values = self._texts(self._read("values", int(row["first_value"]), int(row["num_values"])))
        notes = self._texts(row["notes"].reshape(1))[0]
        roots = layout.compute_roots(digests)
        if (
            roots.root != row["root"].tobytes()
            or roots.phase_roots != row["phase_roots"].tobytes()
            or roots.state_root != row["state_root"].tobytes()
        ):
            raise ValueError("its digests do not give its root")
        if hash_contents(leaves.data, values, notes) != row["contents"].tobytes():
            raise ValueError("its leaf digests, values or notes were changed")
        return LoadedStep(row, layout, meta, digests, leaves, values, decode_notes(notes))

    def check_layouts(self) -> None:
        """Decode each layout and meta of the file and check its hash, whatever other readers have shared.

        Raises DamagedStep naming the first step that uses a damaged one.
        """
        kept: list[tuple[str, dict[int, Any], Callable[[np.void], Layout | Meta]]] = [
            ("layout", self._layouts, self._decode_layout),
            ("meta", self._metas, self._decode_meta),
        ]
        for name, decoded, decode in kept:
            numbers, first_rows = np.unique(self.table[name], return_index=True)
            for row, number in sorted(zip(first_rows.tolist(), numbers.tolist(), strict=True)):
                with self._reading(row):
                    decoded[number] = decode(self._read(f"{name}s", number, 1)[0])

    def layout(self, number: int) -> Layout:
        """Return a layout of the file. Readers of the process share those of equal hash."""
        layout = self._layouts.get(number)
        if layout is None:
            row = self._read("layouts", number, 1)[0]
            shared = _shared.get(row["hash"].tobytes())
            if isinstance(shared, Layout) and len(shared.sites) == int(row["num_events"]):
                layout = shared
            else:
                layout = self._decode_layout(row)
                _share(layout.hash, layout, len(layout.sites))
            self._layouts[number] = layout
        return layout

    def _decode_layout(self, row: np.void) -> Layout:
        """Return the layout that one row of `layouts` describes, checked against its hash."""
        events = self._read("layout_events", int(row["first_event"]), int(row["num_events"]))
        group_rows = self._read("layout_groups", int(row["first_group"]), int(row["num_groups"]))
        inputs = self._read("layout_inputs", int(row["first_input"]), int(row["num_inputs"]))
        input_ptr = np.zeros(len(events) + 1, np.int64)
        np.cumsum(events["num_inputs"], out=input_ptr[1:])
        if input_ptr[-1] != len(inputs):
            raise ValueError("its layout has another number of inputs")
        sites = self._rows_at("sites", events["site"])
        groups = self._rows_at("groups", group_rows["group"])
        site_texts = [self._texts(sites[field]) for field in ("root", "path", "slot")]
        group_texts = [self._texts(groups[field]) for field in ("kind", "root", "path", "op")]
        layout = Layout(
            [
                Site(PHASES[phase], root, path, slot, occurrence, bool(is_eval))
                for phase, root, path, slot, occurrence, is_eval in zip(
                    sites["phase"].tolist(),
                    *site_texts,
                    sites["occurrence"].tolist(),
                    sites["is_eval"].tolist(),
                    strict=True,
                )
            ],
            list(map(Group, *group_texts, group_rows["parent"].tolist())),
            events["group"].astype(np.int32),
            input_ptr,
            inputs,
        )
        if layout.hash != row["hash"].tobytes():
            raise ValueError("its layout was changed")
        return layout

    def meta(self, number: int) -> Meta:
        """Return a meta of the file. Readers of the process share those of equal hash."""
        meta = self._metas.get(number)
        if meta is None:
            row = self._read("metas", number, 1)[0]
            shared = _shared.get(row["hash"].tobytes())
            if isinstance(shared, Meta) and len(shared.dtypes) == int(row["num_events"]):
                meta = shared
            else:
                meta = self._decode_meta(row)
                _share(meta.hash, meta, len(meta.dtypes))
            self._metas[number] = meta
        return meta

    def _decode_meta(self, row: np.void) -> Meta:
        """Return the meta that one row of `metas` describes, checked against its hash."""
        numbers = self._read("meta_tensors", int(row["first_event"]), int(row["num_events"]))
        tensors = self._rows_at("tensors", numbers)
        meta = Meta(
            [
                TensorKind(dtype, _parse_shape(shape), num_bytes, num_leaves, bool(has_value))
                for dtype, shape, num_bytes, num_leaves, has_value in zip(
                    self._texts(tensors["dtype"]),
                    self._texts(tensors["shape"]),
                    tensors["num_bytes"].tolist(),
                    tensors["num_leaves"].tolist(),
                    tensors["has_value"].tolist(),
                    strict=True,
                )
            ]
        )
        if meta.hash != row["hash"].tobytes():
            raise ValueError("its dtypes and shapes were changed")
        return meta

    def _rows_at(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Return rows of an interned table by their numbers."""
        if not len(numbers):
            return np.empty(0, DATASETS[name][0])
        low, high = int(numbers.min()), int(numbers.max())
        return self._read(name, low, high + 1 - low)[numbers.astype(np.int64) - low]

    def _texts(self, numbers: np.ndarray) -> list[str]:
        """Return interned strings by their numbers."""
        wanted = numbers.tolist()
        missing = sorted({number for number in wanted if number not in self._strings})
        while missing:
            last = 0
            while last + 1 < len(missing) and missing[last + 1] - missing[last] <= _STRING_GAP:
                last += 1
            self._read_strings(missing[0], missing[last] + 1)
            missing = missing[last + 1 :]
        return [self._strings[number] for number in wanted]

    def _read_strings(self, first: int, end: int) -> None:
        before = 1 if first else 0
        ends = self._read("string_ends", first - before, end - first + before).tolist()
        start = ends.pop(0) if before else 0
        data = self._read("strings", start, ends[-1] - start).tobytes()
        offset = start
        for number, stop in enumerate(ends, first):
            try:
                self._strings[number] = data[offset - start : stop - start].decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise ValueError("one of its names is not text") from None
            offset = stop

    @contextmanager
    def _reading(self, row: int | None = None) -> Iterator[None]:
        """Turn whatever HDF5 or a wrong number in the file causes into one sentence."""
        try:
            yield
        except FileNotFoundError:
            raise NotARun(f"{self.path} does not exist.\nName the folder that `bitcheck run -o` made.") from None
        except _READING_ERRORS as error:
            if row is not None and self._table is not None and not isinstance(error, OSError | RuntimeError):
                raise self._damaged(int(self._table[row]["step"]), _first_line(error)) from None
            raise self._broken(error) from None

    def _damaged(self, step: int | None, found: str) -> DamagedStep:
        where = f"step {step} of rank {self.rank}" if step is not None else f"rank {self.rank}"
        return DamagedStep(
            f"{self.path}: {where} does not hold: {found}.\n"
            f"Find how far the run holds: bitcheck verify {self.path.parent}",
            self.rank,
            step,
            found,
        )

    def _broken(self, error: Exception) -> NotARun | BrokenRun:
        try:
            with self.path.open("rb") as file:
                start = file.read(len(_HDF5_SIGNATURE))
        except OSError as failure:
            return NotARun(f"{self.path} cannot be read: {failure.strerror}.\nCheck its permissions.")
        if not start:
            return NotARun(f"{self.path} is empty; expected a rank's file of bitcheck.\nRecord the run again.")
        if start != _HDF5_SIGNATURE:
            return NotARun(
                f"{self.path} is not an HDF5 file; expected a rank's file of bitcheck.\nRecord the run again."
            )
        if isinstance(error, DocumentError):
            return BrokenRun(
                f"{self.path}: its header {error}.\nThe file was edited or damaged: restore it from a copy."
            )
        return BrokenRun(
            f"{self.path} was cut, edited or damaged: {_first_line(error)}.\n"
            "Restore it from a copy, or record the run again."
        )


_READING_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, OverflowError, MemoryError)
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_HEADER_TYPES: dict[str, Any] = {
    "run_id": str,
    "rank": int,
    "world_size": int,
    "level": str,
    "leaf_limit_bytes": int | None,
    "writer": dict,
}

_shared: OrderedDict[bytes, Layout | Meta] = OrderedDict()
_shared_sizes: dict[bytes, int] = {}


def _share(key: bytes, decoded: Layout | Meta, size: int) -> None:
    """Keep a decoded layout or meta for other readers; the oldest go where it gets too much."""
    _shared[key], _shared_sizes[key] = decoded, size
    while len(_shared) > 1 and sum(_shared_sizes.values()) > _SHARED_EVENTS:
        oldest, _ = _shared.popitem(last=False)
        del _shared_sizes[oldest]


def _read_text(file: h5f.FileID, name: bytes) -> bytes:
    """Return a fixed-length string attribute."""
    attribute = h5a.open(file, name)
    if attribute.shape != () or attribute.dtype.kind != "S":
        raise ValueError(f"its attribute {name.decode()} is no text")
    text = np.empty((), attribute.dtype)
    attribute.read(text)
    return bytes(text[()])


def _parse_shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
