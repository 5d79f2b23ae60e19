"""The HDF5 file of one rank while it is read: opened, its header understood, its tables read row by row.

Whatever HDF5 or a wrong number in the file raises becomes one sentence: `reading` is where.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from h5py import h5a, h5d, h5f, h5s

from bitcheck.digest import DIGEST_VERSION
from bitcheck.document import ChangedDocument, DocumentError, decode_document
from bitcheck.errors import BrokenRun, DamagedStep, FutureRun, NotARun
from bitcheck.events import Level
from bitcheck.process import is_gone
from bitcheck.store.format import DATASETS, NATIVE, SCHEMA, SCHEMA_PREFIX, STATUSES, open_read_only, read_rows
from bitcheck.store.unfinished import UnfinishedFile

T = TypeVar("T")
_ATTEMPTS = 10
_ATTEMPT_SECONDS = 0.001
"""What a writer changes in place is a few hundred bytes: done in microseconds."""
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


class RankFile:
    """An open file of one rank; what its header says is in the attributes.

    Raises NotARun where there is no file or another program's, FutureRun for a later schema, and
    BrokenRun where it was cut, edited or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._datasets: dict[str, h5d.DatasetID] = {}
        self._sizes: dict[str, int] = {}
        self._file_bytes: int | None = None
        self._file: h5f.FileID | None = None
        self._unfinished: UnfinishedFile | None = None
        with self.reading():
            try:
                self._open()
            except (OSError, RuntimeError):
                # A writer that closes the file writes its first bytes anew.
                time.sleep(_ATTEMPT_SECONDS)
                self._open()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        # HDF5 keeps a file open for as long as one of its datasets is.
        self._datasets.clear()
        if self._file is not None and self._file.valid:
            self._file.close()
        if self._unfinished is not None:
            self._unfinished.close()

    def read(self, name: str, first: int, count: int) -> np.ndarray:
        """Return `count` rows of a dataset. Raises IndexError where it has not so many."""

        def read_now() -> np.ndarray:
            dataset = self._open_dataset(name)
            if first < 0 or count < 0 or first + count > self._sizes[name]:
                raise IndexError(f"rows {first} to {first + count} of {name} do not exist")
            return read_rows(dataset, name, first, count)

        return self._try_again(read_now)

    def count(self, name: str) -> int:
        """Return how many rows a dataset has."""
        self._try_again(lambda: self._open_dataset(name))
        return self._sizes[name]

    def size(self) -> int:
        """Return the size of the file, which grows while it is written."""
        if self.is_live or self._file_bytes is None:
            self._file_bytes = self.path.stat().st_size
        return self._file_bytes

    @contextmanager
    def reading(self, step: int | None = None) -> Iterator[None]:
        """Turn whatever HDF5 or a wrong number in the file causes into one sentence.

        With `step`, what HDF5 can read and is wrong is DamagedStep; all else is NotARun or BrokenRun.
        """
        try:
            yield
        except FileNotFoundError:
            raise NotARun(f"{self.path} does not exist.\nName the folder that `bitcheck run -o` made.") from None
        except _READING_ERRORS as error:
            if step is not None and not isinstance(error, OSError | RuntimeError):
                raise self.damaged(step, _first_line(error)) from None
            raise self._broken(error) from None

    def damaged(self, step: int | None, found: str) -> DamagedStep:
        """Return the error that says what is wrong with a step of this file."""
        where = f"step {step} of rank {self.rank}" if step is not None else f"rank {self.rank}"
        return DamagedStep(
            f"{self.path}: {where} does not hold: {found}.\n"
            f"Find how far the run holds: bitcheck verify {self.path.parent}",
            self.rank,
            step,
            found,
        )

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
        if shape[0] * dtype.itemsize * math.prod(tail) > self.size():
            raise ValueError(f"its dataset {name} claims {shape[0]} rows, more than the file has room for")
        self._datasets[name], self._sizes[name] = dataset, shape[0]
        return dataset

    def _try_again(self, read: Callable[[], T]) -> T:
        """Return what `read` does, in a file opened anew where a living writer changed a piece of it just then."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return read()
            except (OSError, RuntimeError):
                if not self.is_live:
                    raise
                # HDF5 keeps what it has read, damaged or not: only a new start reads it again.
                was_gone = is_gone(self.writer)
                self.close()
                time.sleep(_ATTEMPT_SECONDS)
                self._open()
                if was_gone:
                    break
        return read()

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


def _read_text(file: h5f.FileID, name: bytes) -> bytes:
    """Return a fixed-length string attribute."""
    attribute = h5a.open(file, name)
    if attribute.shape != () or attribute.dtype.kind != "S":
        raise ValueError(f"its attribute {name.decode()} is no text")
    text = np.empty((), attribute.dtype)
    attribute.read(text)
    return bytes(text[()])


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
