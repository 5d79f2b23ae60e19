"""The HDF5 file of one rank while it is written: created whole, grown, closed, or let go of.

Three things that HDF5 does are kept from the program that is being recorded:

- it writes on into a file whose name was removed: `size` looks whether the name still leads there;
- where a write fails (disk full, a limit on file size) it can neither flush nor close the file, and
  the process dies of SIGSEGV when it ends;
- in a forked child it closes, and so changes, the file that the parent is still writing.

The last two are met by putting /dev/null in the place of HDF5's file descriptor: whatever HDF5 still
has to write goes there, and the file on the disk stays as it was at the last step.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5s

from bitcheck.document import encode_document
from bitcheck.errors import RecordingError
from bitcheck.store.format import DATASETS, NATIVE, SCHEMA, STATUSES, create_dataset
from bitcheck.store.seal import prepare_seal

_LIBVER = ("v110", "v110")
"""The file format of HDF5 1.10, the first with single-writer mode: whatever version writes it, later ones read it."""

_WHOLE_PAGES = {"alignment_threshold": 1, "alignment_interval": 4096, "meta_block_size": 0}
"""Every piece of metadata starts on a page of its own. A process that is killed while it writes one has written
whole pages of it, so a piece within one page is old or new and never half of each."""

WRITING_ERRORS = (OSError, RuntimeError, ValueError)
"""What h5py raises where HDF5 cannot write."""

_open_files: weakref.WeakSet[GrowingFile] = weakref.WeakSet()
_fork_handlers: list[bool] = []


class GrowingFile:
    """A rank's file in single-writer mode, its datasets under `columns`.

    Raises RecordingError where it cannot be made or is there already.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self._descriptor = -1
        self._file = self._create(header)
        self._status_offset: int = self._file["status"].id.get_offset()
        self.columns = {name: Column(self._file[name].id, name) for name in DATASETS}
        found = os.stat(path)
        self._identity = (found.st_dev, found.st_ino)
        _open_files.add(self)
        if not _fork_handlers:
            _fork_handlers.append(True)
            os.register_at_fork(after_in_child=_let_go_in_child)

    @property
    def is_open(self) -> bool:
        """Whether the file is still being written."""
        return bool(self._file)

    def size(self) -> int:
        """Return the file's size in bytes. Raises RecordingError where its name no longer leads to it."""
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise RecordingError(
                f"{self.path} was removed or replaced while it was being recorded; its steps are lost.\n"
                "Leave a run's folder alone until its program has ended, and record again."
            )
        return found.st_size

    def close(self, status: str, *, num_rows: int, chain: bytes) -> None:
        """Close the file, seal it, and write its status. Raises one of WRITING_ERRORS.

        The seal is of the file with its status already in place, and is there a moment after it: a
        writer that dies while it computes the hash of a large file leaves an unfinished file, never a
        finished one without a seal.
        """
        self._close()
        with self.path.open("r+b", buffering=0) as file:
            # Byte 11 of the superblock: HDF5 clears it when the last handle of the process is closed.
            if os.pread(file.fileno(), 1, 11) != b"\0":
                raise OSError("this process still has it open for reading")
            code = bytes([STATUSES.index(status)])
            changes = {self._status_offset: code}
            seal = prepare_seal(self.path, changes, status=status, num_rows=num_rows, chain=chain)
            os.pwrite(file.fileno(), code, self._status_offset)
            seal.commit()

    def let_go(self, status: str) -> None:
        """Close the file and leave it on the disk as it is, but for its status."""
        if not self.is_open:
            return
        disk = os.dup(self._descriptor)
        try:
            self._divert()
            self._close()
            os.pwrite(disk, bytes([STATUSES.index(status)]), self._status_offset)
        finally:
            os.close(disk)

    def _create(self, header: dict[str, Any]) -> h5py.File:
        """Make the file under another name, start single-writer mode, and then give it its name."""
        building = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        file = None
        try:
            building.write_bytes(_empty_image(header))
            # No lock: readers take none, and not every file system has them.
            file = h5py.File(building, "r+", libver=_LIBVER, locking=False, **_WHOLE_PAGES)
            self._descriptor = file.id.get_vfd_handle()
            os.set_inheritable(self._descriptor, False)  # HDF5 would hand it to every program that is started
            file.swmr_mode = True
            os.link(building, self.path)
            os.unlink(building)
        except WRITING_ERRORS as error:
            if file is not None:
                self._divert()
                file.close()
            building.unlink(missing_ok=True)
            if isinstance(error, FileExistsError):
                message = (
                    f"{self.path} exists: another recording writes or wrote it.\n"
                    "Record into another folder, or give --overwrite to replace the run."
                )
            else:
                message = (
                    f"{self.path} cannot be created: {reason_of(error)}.\nCheck that the folder exists and has space."
                )
            raise RecordingError(message) from None
        return file

    def _close(self) -> None:
        self._descriptor = -1
        _open_files.discard(self)
        self._file.close()

    def _divert(self) -> None:
        """Let HDF5's descriptor lead to /dev/null."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self._descriptor, inheritable=False)
        os.close(nowhere)


class Column:
    """One growing dataset."""

    def __init__(self, dataset: h5d.DatasetID, name: str) -> None:
        self._dataset = dataset
        self._native = NATIVE[name]
        self._dtype, self._tail, _ = DATASETS[name]
        self._is_dirty = False
        self._pending: list[Any] = []
        self.num_rows = 0

    def add(self, row: Any) -> int:
        """Add one row, written at the next `append` or `flush`; return its number."""
        self._pending.append(row)
        self.num_rows += 1
        return self.num_rows - 1

    def extend(self, rows: Sequence[Any]) -> None:
        """Add several, as `add` does."""
        self._pending.extend(rows)
        self.num_rows += len(rows)

    def append(self, rows: np.ndarray) -> int:
        """Write `rows` at the end; return the number of the first."""
        self._write_pending()
        first = self.num_rows
        self.num_rows += len(rows)
        self._write(first, rows)
        return first

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        self._write_pending()
        if self._is_dirty:
            self._dataset.flush()
            self._is_dirty = False

    def _write_pending(self) -> None:
        if self._pending:
            rows, self._pending = np.array(self._pending, self._dtype), []
            self._write(self.num_rows - len(rows), rows)

    def _write(self, first: int, rows: np.ndarray) -> None:
        if not len(rows):
            return
        extent = (len(rows), *self._tail)
        self._dataset.set_extent((first + len(rows), *self._tail))
        space = self._dataset.get_space()
        space.select_hyperslab((first, *(0 for _ in self._tail)), extent)
        self._dataset.write(h5s.create_simple(extent), space, np.ascontiguousarray(rows), self._native)
        self._is_dirty = True


def _empty_image(header: dict[str, Any]) -> bytes:
    """Return a file with its header and all datasets empty: made in memory, where nothing can run full."""
    with h5py.File("empty", "w", driver="core", backing_store=False, libver=_LIBVER, **_WHOLE_PAGES) as file:
        file.attrs["schema"] = np.bytes_(SCHEMA)
        file.attrs["header"] = np.bytes_(encode_document(header, one_line=True))
        file.create_dataset("status", data=np.zeros(1, np.uint8))
        for name in DATASETS:
            create_dataset(file, name)
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def reason_of(error: Exception) -> str:
    """Return what the operating system said; h5py buries it in a paragraph of HDF5's own."""
    number = getattr(error, "errno", None)
    if number is None:
        found = re.search(r"errno = (\d+)", str(error))
        number = int(found[1]) if found else None
    if number:
        return os.strerror(number)
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _let_go_in_child() -> None:
    """In a child of fork: whatever happens to HDF5's state here, the parent's files stay as they are."""
    for file in list(_open_files):
        if file._descriptor >= 0:
            file._divert()
