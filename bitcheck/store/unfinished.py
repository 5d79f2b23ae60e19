"""Open a file that its writer has not closed: it is still writing, or it died.

HDF5's own way is single-writer mode for readers. It was tried and is not used: where a piece of metadata
does not hold, HDF5 then believes that the writer is about to complete it, and waits for it in up to a
hundred steps, each twice as long as the one before; a file that was cut hangs its reader for good.

Here HDF5 reads through a Python file that shows the superblock as a closed file has it, and zeros after
the end, which moves while the file is read. A single-writer file is whole on the disk at any moment, in
the order in which its parts refer to each other; what is caught half-written is read again, by us, a few
times.

    superblock, version 3, 48 bytes
        11      consistency flags: not 0 while a writer has it open
        28:36   end of the file, of when the writer opened it
        44:48   checksum of the bytes before, Bob Jenkins' lookup3
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType

SUPERBLOCK_BYTES = 48
_FLAGS = 11
_END = slice(28, 36)
_WORD = 0xFFFFFFFF
_ANY_SIZE = 1 << 60
"""What HDF5 is told that the file's size is."""


def is_unfinished(superblock: bytes) -> bool:
    """Return whether the first bytes of a file say that a writer has it open, or died with it open."""
    return len(superblock) == SUPERBLOCK_BYTES and superblock[8] == 3 and superblock[_FLAGS] != 0


class UnfinishedFile:
    """The file for HDF5 to read, by h5py's file object driver. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._position = 0
        try:
            superblock = os.pread(self._descriptor, SUPERBLOCK_BYTES, 0)
            if lookup3(superblock[:-4]) != struct.unpack("<I", superblock[-4:])[0]:
                raise OSError("its first 48 bytes were changed")
            shown = bytearray(superblock[:-4])
            shown[_FLAGS] = 0
            shown[_END] = struct.pack("<Q", _ANY_SIZE)
            self._superblock = bytes(shown) + struct.pack("<I", lookup3(bytes(shown)))
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, from the start or the end."""
        self._position = offset + (_ANY_SIZE if whence == os.SEEK_END else 0)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def read(self, size: int) -> bytes:
        """Return `size` bytes; zeros beyond the end, as HDF5's own driver does."""
        buffer = bytearray(size)
        self.readinto(memoryview(buffer))
        return bytes(buffer)

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` from the position on."""
        start, size = self._position, len(buffer)
        data = os.pread(self._descriptor, size, start)
        while len(data) < size and (more := os.pread(self._descriptor, size - len(data), start + len(data))):
            data += more
        if start < SUPERBLOCK_BYTES:
            data = self._superblock[start : start + len(data)] + data[SUPERBLOCK_BYTES - start :]
        buffer[: len(data)] = data
        buffer[len(data) :] = bytes(size - len(data))
        self._position += size
        return size

    def flush(self) -> None:
        """Do nothing: nothing is written."""

    def __enter__(self) -> UnfinishedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def lookup3(data: bytes) -> int:
    """Return Bob Jenkins' lookup3 hash (`hashlittle`, initial value 0) of `data`, which HDF5 uses for metadata."""
    a = b = c = (0xDEADBEEF + len(data)) & _WORD
    padded = data + bytes(-len(data) % 12)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)
    last = len(words) - 3
    for at in range(0, len(words), 3):
        a = (a + words[at]) & _WORD
        b = (b + words[at + 1]) & _WORD
        c = (c + words[at + 2]) & _WORD
        if at == last:
            break
        a = ((a - c) & _WORD) ^ _rotate(c, 4)
        c = (c + b) & _WORD
        b = ((b - a) & _WORD) ^ _rotate(a, 6)
        a = (a + c) & _WORD
        c = ((c - b) & _WORD) ^ _rotate(b, 8)
        b = (b + a) & _WORD
        a = ((a - c) & _WORD) ^ _rotate(c, 16)
        c = (c + b) & _WORD
        b = ((b - a) & _WORD) ^ _rotate(a, 19)
        a = (a + c) & _WORD
        c = ((c - b) & _WORD) ^ _rotate(b, 4)
        b = (b + a) & _WORD
    c = ((c ^ b) - _rotate(b, 14)) & _WORD
    a = ((a ^ c) - _rotate(c, 11)) & _WORD
    b = ((b ^ a) - _rotate(a, 25)) & _WORD
    c = ((c ^ b) - _rotate(b, 16)) & _WORD
    a = ((a ^ c) - _rotate(c, 4)) & _WORD
    b = ((b ^ a) - _rotate(a, 14)) & _WORD
    return ((c ^ b) - _rotate(b, 24)) & _WORD


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
