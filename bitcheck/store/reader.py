"""Read one rank's file, a step at a time; what is read is checked against its root."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bitcheck.events import PHASES, Group, Site
from bitcheck.store.format import DATASETS, STEP_ROW, TAIL_ROW, row_check
from bitcheck.store.layout import Layout, Meta, TensorKind, decode_notes, hash_contents
from bitcheck.store.rank_file import RankFile
from bitcheck.store.step import LoadedStep

_SHARED_EVENTS = 400_000
"""Layouts of up to this many events in all are kept decoded, for every reader of the process."""
_STRING_GAP = 4096
"""Interned strings whose numbers lie this close are read together."""


class RankReader(RankFile):
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
        self._table: np.ndarray | None = None
        self._strings: dict[int, str] = {}
        self._layouts: dict[int, Layout] = {}
        self._metas: dict[int, Meta] = {}
        super().__init__(path)

    def __enter__(self) -> RankReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def table(self) -> np.ndarray:
        """The step table, read once."""
        if self._table is None:
            with self.reading():
                self._table = self._read_table()
        return self._table

    def tail(self) -> np.void:
        """Return what the first and the last row say, one TAIL_ROW, without reading the table.

        A row's chain covers all rows before it: equal chains of two ranks, and all their steps are equal.
        """
        with self.reading():
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
        with self.reading(int(self.table[row]["step"])):
            return self._load(self.table[row])

    def _read_table(self) -> np.ndarray:
        table = self.read("steps", 0, self.count("steps"))
        # The last row of a file whose writer died while it wrote may be half there; no other may.
        if self.is_live and len(table) and not self._row_holds(table[-1:]):
            table = table[:-1]
        data, size = table.tobytes(), STEP_ROW.itemsize
        checks = [row_check(data[start : start + size]) for start in range(0, len(data), size)]
        damaged = np.flatnonzero(table["check"] != np.array(checks, np.uint64))
        if self.is_live:
            num_bytes = self.size()
            is_hole = ~table.view(np.uint8).reshape(-1, size).any(axis=1)
            cut = np.flatnonzero((table["file_bytes"] > num_bytes) | is_hole)
            if cut.size:
                raise OSError(f"it ends after {num_bytes} bytes, before its row {cut[0]}")
        if damaged.size:
            raise self.damaged(self._plausible_step(table["step"], damaged[0]), f"row {damaged[0]} was changed")
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
            self.is_live and int(row["file_bytes"][0]) > self.size()
        )

    def _read_tail(self) -> np.ndarray:
        tail = np.zeros(1, TAIL_ROW)
        tail["rank"], tail["status"] = self.rank, self.status
        count = self.count("steps")
        if count:
            last = self.read("steps", count - 1, 1)
            if not self._row_holds(last) and self.is_live and count > 1:
                count -= 1
                last = self.read("steps", count - 1, 1)
            first = self.read("steps", 0, 1)
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
        digests = self.read("digests", int(row["first_event"]), n)
        leaves = self.read("leaves", int(row["first_leaf"]), int(row["num_leaves"]))
        values = self._texts(self.read("values", int(row["first_value"]), int(row["num_values"])))
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
                with self.reading(int(self.table[row]["step"])):
                    decoded[number] = decode(self.read(f"{name}s", number, 1)[0])

    def layout(self, number: int) -> Layout:
        """Return a layout of the file. Readers of the process share those of equal hash."""
        layout = self._layouts.get(number)
        if layout is None:
            row = self.read("layouts", number, 1)[0]
            shared = _find_shared(row["hash"].tobytes())
            if isinstance(shared, Layout) and len(shared.sites) == int(row["num_events"]):
                layout = shared
            else:
                layout = self._decode_layout(row)
                _share(layout.hash, layout, len(layout.sites))
            self._layouts[number] = layout
        return layout

    def _decode_layout(self, row: np.void) -> Layout:
        """Return the layout that one row of `layouts` describes, checked against its hash."""
        events = self.read("layout_events", int(row["first_event"]), int(row["num_events"]))
        group_rows = self.read("layout_groups", int(row["first_group"]), int(row["num_groups"]))
        inputs = self.read("layout_inputs", int(row["first_input"]), int(row["num_inputs"]))
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
            row = self.read("metas", number, 1)[0]
            shared = _find_shared(row["hash"].tobytes())
            if isinstance(shared, Meta) and len(shared.dtypes) == int(row["num_events"]):
                meta = shared
            else:
                meta = self._decode_meta(row)
                _share(meta.hash, meta, len(meta.dtypes))
            self._metas[number] = meta
        return meta

    def _decode_meta(self, row: np.void) -> Meta:
        """Return the meta that one row of `metas` describes, checked against its hash."""
        numbers = self.read("meta_tensors", int(row["first_event"]), int(row["num_events"]))
        tensors = self._rows_at("tensors", numbers)
        meta = Meta(
            [
                TensorKind(dtype, _parse_shape(shape), num_bytes, num_leaves, bool(has_value), placement)
                for dtype, shape, num_bytes, num_leaves, has_value, placement in zip(
                    self._texts(tensors["dtype"]),
                    self._texts(tensors["shape"]),
                    tensors["num_bytes"].tolist(),
                    tensors["num_leaves"].tolist(),
                    tensors["has_value"].tolist(),
                    self._placements(tensors["placement"]),
                    strict=True,
                )
            ]
        )
        if meta.hash != row["hash"].tobytes():
            raise ValueError("its dtypes and shapes were changed")
        return meta

    def _placements(self, numbers: np.ndarray) -> list[str]:
        """Return the placements that a column of `tensors` names."""
        if not numbers.any():
            return [""] * len(numbers)
        known = numbers > 0
        texts = iter(self._texts(numbers[known] - 1))
        return [next(texts) if is_known else "" for is_known in known.tolist()]

    def _rows_at(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Return rows of an interned table by their numbers."""
        if not len(numbers):
            return np.empty(0, DATASETS[name][0])
        low, high = int(numbers.min()), int(numbers.max())
        return self.read(name, low, high + 1 - low)[numbers.astype(np.int64) - low]

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
        ends = self.read("string_ends", first - before, end - first + before).tolist()
        start = ends.pop(0) if before else 0
        data = self.read("strings", start, ends[-1] - start).tobytes()
        offset = start
        for number, stop in enumerate(ends, first):
            try:
                self._strings[number] = data[offset - start : stop - start].decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                raise ValueError("one of its names is not text") from None
            offset = stop


_shared: OrderedDict[bytes, Layout | Meta] = OrderedDict()
_shared_sizes: dict[bytes, int] = {}


def _share(key: bytes, decoded: Layout | Meta, size: int) -> None:
    """Keep a decoded layout or meta for other readers; the oldest go where it gets too much."""
    _shared[key], _shared_sizes[key] = decoded, size
    _shared.move_to_end(key)
    while len(_shared) > 1 and sum(_shared_sizes.values()) > _SHARED_EVENTS:
        oldest, _ = _shared.popitem(last=False)
        del _shared_sizes[oldest]


def _find_shared(key: bytes) -> Layout | Meta | None:
    """Return what a reader has kept, the youngest now."""
    found = _shared.get(key)
    if found is not None:
        _shared.move_to_end(key)
    return found


def _parse_shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
