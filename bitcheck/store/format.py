"""The names, types and chunk sizes of a rank file's datasets, and HDF5 at its low level.

Everything goes through h5py's low-level calls: one row is read about twice as fast as through
`h5py.File`, and a step is appended three times as fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5d, h5f, h5fd, h5p, h5s, h5t

from bitcheck.events import PHASES
from bitcheck.store.unfinished import SUPERBLOCK_BYTES, UnfinishedFile, is_unfinished

SCHEMA_PREFIX = "bitcheck.rank/"
SCHEMA = SCHEMA_PREFIX + "1"

STATUSES = ("recording", "complete", "failed")
"""A rank's status by its code in the dataset `status`."""

DIGEST = ("u1", (16,))

STEP_ROW = np.dtype(
    [
        ("step", "<i8"),
        ("kind", "<u4"),  # StepKind
        ("num_events", "<u4"),
        ("num_bytes", "<u8"),  # bytes of all its tensors
        ("layout", "<u4"),  # row in layouts
        ("meta", "<u4"),  # row in metas
        ("first_event", "<u8"),  # row in digests
        ("first_leaf", "<u8"),  # row in leaves
        ("num_leaves", "<u8"),
        ("first_value", "<u8"),  # row in values
        ("num_values", "<u4"),
        ("notes", "<u4"),  # string: JSON [unobserved, remarks]
        ("total_bytes", "<u8"),  # num_bytes of this row and all before it
        ("total_unobserved", "<u8"),  # what escaped observation in this row and all before it
        ("total_remarks", "<u8"),  # remarks of this row and all before it
        ("file_bytes", "<u8"),  # what the file held when the row was written; less now: it was cut
        ("phase_roots", "u1", (len(PHASES), 16)),
        ("root", *DIGEST),
        ("state_root", *DIGEST),
        ("contents", *DIGEST),  # over leaves, values and notes
        ("chain", *DIGEST),
        ("check", "<u8"),  # XXH3-64 of the row before it
    ]
)
TAIL_ROW = np.dtype(
    [
        ("rank", "<i4"),
        ("status", "U9"),
        ("num_rows", "<i8"),  # 0: nothing was recorded, and all that follows is 0
        ("first_step", "<i8"),
        ("first_kind", "<u4"),
        ("last_step", "<i8"),
        ("last_kind", "<u4"),
        ("total_events", "<u8"),
        ("total_bytes", "<u8"),
        ("total_unobserved", "<u8"),
        ("total_remarks", "<u8"),
        ("root", *DIGEST),  # root, state root and chain of the last row
        ("state_root", *DIGEST),
        ("chain", *DIGEST),
    ]
)
"""What `RankReader.tail` reads of a rank: equal chains, and every step of two ranks is equal."""

SITE_ROW = np.dtype(
    [("phase", "u1"), ("is_eval", "u1"), ("root", "<u4"), ("path", "<u4"), ("slot", "<u4"), ("occurrence", "<u4")]
)
GROUP_ROW = np.dtype([("kind", "<u4"), ("root", "<u4"), ("path", "<u4"), ("op", "<u4")])
TENSOR_ROW = np.dtype(
    [
        ("dtype", "<u4"),
        ("shape", "<u4"),
        ("num_bytes", "<u8"),
        ("num_leaves", "<u4"),
        ("has_value", "u1"),
        ("placement", "<u4"),  # string + 1, 0 for none; files of before there were any lack the field
    ]
)
LAYOUT_ROW = np.dtype(
    [
        ("first_event", "<u8"),
        ("num_events", "<u4"),
        ("first_group", "<u8"),
        ("num_groups", "<u4"),
        ("first_input", "<u8"),
        ("num_inputs", "<u8"),
        ("hash", *DIGEST),
    ]
)
LAYOUT_EVENT_ROW = np.dtype([("site", "<u4"), ("group", "<i4"), ("num_inputs", "<u4")])
LAYOUT_GROUP_ROW = np.dtype([("group", "<u4"), ("parent", "<i4")])
META_ROW = np.dtype([("first_event", "<u8"), ("num_events", "<u4"), ("hash", *DIGEST)])

U1, U4, U8, I4 = (np.dtype(code) for code in ("u1", "<u4", "<u8", "<i4"))

DATASETS: dict[str, tuple[np.dtype[Any], tuple[int, ...], int]] = {
    "steps": (STEP_ROW, (), 32),
    "digests": (U1, (16,), 2048),
    "leaves": (U1, (16,), 4096),
    "values": (U4, (), 1024),
    "layouts": (LAYOUT_ROW, (), 64),
    "layout_events": (LAYOUT_EVENT_ROW, (), 1024),
    "layout_inputs": (I4, (), 2048),
    "layout_groups": (LAYOUT_GROUP_ROW, (), 512),
    "metas": (META_ROW, (), 64),
    "meta_tensors": (U4, (), 2048),
    "sites": (SITE_ROW, (), 512),
    "groups": (GROUP_ROW, (), 256),
    "tensors": (TENSOR_ROW, (), 256),
    "string_ends": (U8, (), 1024),
    "strings": (U1, (), 16384),
}
"""Growing datasets: name -> (type of an element, shape of a row, rows in a chunk)."""

NATIVE = {name: h5t.py_create(dtype) for name, (dtype, _, _) in DATASETS.items()}


def create_dataset(file: h5py.File, name: str) -> None:
    """Create one of DATASETS, empty."""
    dtype, tail, chunk = DATASETS[name]
    file.create_dataset(name, shape=(0, *tail), maxshape=(None, *tail), chunks=(chunk, *tail), dtype=dtype)


def open_read_only(path: Path) -> tuple[h5f.FileID, UnfinishedFile | None]:
    """Open a file for reading; return it and, where no writer has closed it, what to close after it.

    A file that its writer closed opens plainly, and HDF5 then refuses one that was cut. No lock is
    taken: a reader never stands in a writer's way, nor fails where a file system has no locks.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_LATEST)
    with path.open("rb", buffering=0) as file:
        start = file.read(SUPERBLOCK_BYTES)
    if not is_unfinished(start):
        access.set_file_locking(False, True)
        return h5f.open(bytes(path), h5f.ACC_RDONLY, access), None
    unfinished = UnfinishedFile(path)
    try:
        access.set_fileobj_driver(h5fd.fileobj_driver, unfinished)
        return h5f.open(bytes(path), h5f.ACC_RDONLY, access), unfinished
    except BaseException:
        unfinished.close()
        raise


def read_rows(dataset: h5d.DatasetID, name: str, first: int, count: int) -> np.ndarray:
    """Return rows [first, first + count) of one of DATASETS; bounds are the caller's to check."""
    dtype, tail, _ = DATASETS[name]
    rows = np.zeros((count, *tail), dtype)
    if count:
        start, extent = (first, *(0 for _ in tail)), (count, *tail)
        space = dataset.get_space()
        space.select_hyperslab(start, extent)
        dataset.read(h5s.create_simple(extent), space, rows, NATIVE[name])
    return rows


def row_check(row: bytes) -> int:
    """Return the XXH3-64 of one step row's bytes without its last field."""
    return xxhash.xxh3_64_intdigest(row[: STEP_ROW.itemsize - 8])
