"""The seal of a finished rank file: rank-NNNNN.seal beside rank-NNNNN.h5.

    {
      "chain": "8f14e45fceea167a5a36dedd4bea2543",
      "checksum": "...",
      "file": "rank-00000.h5",
      "num_bytes": 1048576,
      "num_rows": 801,
      "schema": "bitcheck.seal/1",
      "status": "complete",
      "xxh3_128": "0cc175b9c0f1b6a831c399e269772661"
    }

`xxh3_128` is over the whole file as it was when its writer closed it, so that one changed bit shows
wherever it is, in space that HDF5 does not use too. A file whose writer died has no seal; its steps are
held by their roots and chain.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from bitcheck.document import DocumentError, decode_document, encode_document
from bitcheck.errors import BrokenRun, FutureRun

SCHEMA_PREFIX = "bitcheck.seal/"
SCHEMA = SCHEMA_PREFIX + "1"
_BLOCK_BYTES = 4 * 1024 * 1024


def seal_path(path: Path) -> Path:
    """Return where the seal of the rank file `path` is."""
    return path.with_suffix(".seal")


class PreparedSeal(NamedTuple):
    """A seal that is written, but not yet under its name."""

    building: Path
    target: Path

    def commit(self) -> None:
        """Give it its name. Raises OSError."""
        os.replace(self.building, self.target)


def prepare_seal(path: Path, changes: Mapping[int, bytes], *, status: str, num_rows: int, chain: bytes) -> PreparedSeal:
    """Seal the closed file `path` as it will be after `changes` (offset -> one byte). Raises OSError."""
    num_bytes, file_hash = hash_file(path, changes)
    seal = {
        "schema": SCHEMA,
        "file": path.name,
        "status": status,
        "num_rows": num_rows,
        "chain": chain.hex(),
        "num_bytes": num_bytes,
        "xxh3_128": file_hash,
    }
    target = seal_path(path)
    building = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        building.write_bytes(encode_document(seal))
    except OSError:
        building.unlink(missing_ok=True)
        raise
    return PreparedSeal(building, target)


def read_seal(path: Path) -> dict[str, Any] | None:
    """Return the seal of the rank file `path`, None where it has none.

    Raises BrokenRun where the seal itself was changed, FutureRun where a later version wrote it.
    """
    target = seal_path(path)
    try:
        seal = decode_document(target.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, DocumentError) as error:
        raise BrokenRun(
            f"{target} {error}: the seal of {path.name} was changed.\n"
            "Restore it from a copy, or remove it to check the file by its roots and chain alone."
        ) from None
    if seal["schema"] != SCHEMA:
        raise FutureRun(f"{target} has schema {seal['schema']!r}; this bitcheck reads {SCHEMA}.\nUpdate bitcheck.")
    return seal


def hash_file(path: Path, changes: Mapping[int, bytes] = MappingProxyType({})) -> tuple[int, str]:
    """Return (size in bytes, XXH3-128 in hex) of a file, as if `changes` (offset -> one byte) were made.

    Raises OSError.
    """
    state = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            for offset, byte in changes.items():
                if num_bytes <= offset < num_bytes + len(block):
                    at = offset - num_bytes
                    block = block[:at] + byte + block[at + 1 :]
            state.update(block)
            num_bytes += len(block)
    return num_bytes, state.hexdigest()
