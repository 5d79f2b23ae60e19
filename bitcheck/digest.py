"""The digest, version 1: 128 bits that stand for one tensor's exact bits.

    bytes     the logical elements in row-major order, their exact bits, little endian
    leaves    pieces of 16 KiB; the last is padded with zeros to a multiple of 1 KiB;
              leaf digest = XXH3-128, seed 0, of each
    digest    XXH3-128, seed 0, of the header followed by the leaf digests in order,
              each as its 16 canonical (big-endian) bytes

The header is ASCII text on four lines, each ended by a newline: the tag, the dtype's name, the
shape's extents joined by commas (empty for a 0-d tensor), the number of bytes before padding:

    b"bitcheck1\\nfloat32\\n2,3\\n24\\n"

So torch.arange(6.).view(2, 3) has one leaf (24 bytes padded to 1,024) and

    leaf    xxh3_128(24 bytes + 1000 zero bytes)
    digest  xxh3_128(b"bitcheck1\\nfloat32\\n2,3\\n24\\n" + leaf)

An empty tensor has no leaves; its digest is that of the header alone. -0.0 and +0.0, and any two
NaN payloads, differ. A DTensor is its local shard; a sparse or nested tensor is several tensors,
one digest each (`bitcheck.hooks.tensors` takes them apart).

Why a tree: XXH3's long input is a serial chain of 1 KiB blocks, so one flat hash of a tensor cannot
run in parallel; padding to 1 KiB keeps a GPU on XXH3's long path only. Any xxHash library checks it.

This module knows bytes, not torch. Its place in the flow: tensor -> *digest* -> event -> store.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    import numpy as np

DIGEST_VERSION = 1
TAG = b"bitcheck1"
LEAF_BYTES = 16 * 1024
"""Bytes in a leaf."""
PAD_BYTES = 1024
"""The last leaf is padded with zeros to a multiple of this."""
DIGEST_BYTES = 16

xxh3_128: Callable[[Any], bytes] = xxhash.xxh3_128_digest
"""XXH3-128, seed 0, as 16 canonical (big-endian) bytes."""


_MAX_READERS = 4_096


class _Readers(dict[int, Callable[[int], Any]]):
    """Number of bytes -> what gives a ctypes array of so many that lies at an address.

    The bound method is kept, since to look it up on the type takes longer than to call it.
    """

    def __missing__(self, num_bytes: int) -> Callable[[int], Any]:
        if len(self) >= _MAX_READERS:
            self.clear()
        self[num_bytes] = read = (ctypes.c_char * num_bytes).from_address
        return read


_readers = _Readers()
_leaf_at = _readers[LEAF_BYTES]


@lru_cache(maxsize=65_536)
def digest_header(dtype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """Return the header bytes that a digest covers before its leaves.

    `dtype` is the name without a package, as in "bfloat16" or "float8_e4m3fn"; `num_bytes` counts
    the elements' bytes before padding.
    """
    extents = ",".join(map(str, shape))
    return b"%s\n%s\n%s\n%d\n" % (TAG, dtype.encode("ascii"), extents.encode("ascii"), num_bytes)


def num_leaves(num_bytes: int) -> int:
    """Return how many leaves a tensor of `num_bytes` has; 0 for an empty one."""
    return -(-num_bytes // LEAF_BYTES)


def digest_leaves(data: np.ndarray) -> bytes:
    """Return the leaf digests of `data`, uint8 [num_bytes] and contiguous, 16 bytes each."""
    num_bytes = data.size
    whole = num_bytes - num_bytes % LEAF_BYTES
    leaves = b"".join(map(xxh3_128, data[:whole].reshape(-1, LEAF_BYTES)))
    if whole == num_bytes:
        return leaves
    tail = data[whole:].tobytes()
    return leaves + xxh3_128(tail + bytes(-len(tail) % PAD_BYTES))


def digest_from_leaves(dtype: str, shape: Sequence[int], num_bytes: int, leaves: bytes | memoryview) -> bytes:
    """Return the digest of a tensor whose leaf digests are known, 16 bytes."""
    return xxh3_128(b"".join((digest_header(dtype, tuple(shape), num_bytes), leaves)))


def begin_digest(dtype: str, shape: Sequence[int], num_bytes: int) -> xxhash.xxh3_128:
    """Return the hash of a tensor whose leaf digests are still to come: `update` it with them, in order.

    Its `digest()` then equals `digest_from_leaves`.
    """
    return xxhash.xxh3_128(digest_header(dtype, tuple(shape), num_bytes))


def memory_at(address: int, num_bytes: int) -> Any:
    """Return memory as a buffer, char [num_bytes]. Who calls keeps it alive."""
    return _readers[num_bytes](address)


def digest_memory(header: bytes, address: int, num_bytes: int) -> tuple[bytes, bytes]:
    """Return (digest, leaf digests) of a tensor that lies at `address`, contiguous; 1 byte at least.

    `header` is its `digest_header`. The same as `digest_bytes`, in a third of the time for a small tensor.
    Who calls keeps the memory alive.
    """
    tail_bytes = num_bytes % LEAF_BYTES or LEAF_BYTES
    last = address + num_bytes - tail_bytes
    tail = _readers[tail_bytes](last)
    missing = -tail_bytes % PAD_BYTES
    leaves = xxh3_128(tail.raw + bytes(missing) if missing else tail)
    if last != address:
        leaves = b"".join([xxh3_128(_leaf_at(start)) for start in range(address, last, LEAF_BYTES)]) + leaves
    return xxh3_128(header + leaves), leaves


def digest_buffer(header: bytes, data: bytes | memoryview) -> tuple[bytes, bytes]:
    """Return (digest, leaf digests) of a tensor given as its bytes, uint8 [1 at least].

    `header` is its `digest_header`.
    """
    pieces = memoryview(data)
    whole = (len(data) - 1) // LEAF_BYTES * LEAF_BYTES
    tail = pieces[whole:]
    missing = -len(tail) % PAD_BYTES
    leaves = xxh3_128(tail.tobytes() + bytes(missing) if missing else tail)
    if whole:
        leaves = b"".join([xxh3_128(pieces[at : at + LEAF_BYTES]) for at in range(0, whole, LEAF_BYTES)]) + leaves
    return xxh3_128(header + leaves), leaves


def digest_bytes(dtype: str, shape: Sequence[int], data: np.ndarray) -> tuple[bytes, bytes]:
    """Return (digest, leaf digests) of a tensor given as its bytes, uint8 [num_bytes], contiguous."""
    leaves = digest_leaves(data)
    return digest_from_leaves(dtype, shape, data.size, leaves), leaves


def differing_elements(
    baseline_leaves: bytes, candidate_leaves: bytes, num_bytes: int, itemsize: int
) -> tuple[int, int] | None:
    """Return flat indices of the first and the last element inside leaves that differ.

    Both tensors have the same dtype and shape. None where no leaf differs or the leaves were not
    kept. The last differing leaf counts to its end, or to the tensor's last element.
    """
    if len(baseline_leaves) != len(candidate_leaves) or not baseline_leaves or not itemsize:
        return None
    import numpy as np  # here: `bitcheck run` starts before a program, and must not keep it waiting

    rows = (-1, DIGEST_BYTES)
    baseline = np.frombuffer(baseline_leaves, np.uint8).reshape(rows)
    candidate = np.frombuffer(candidate_leaves, np.uint8).reshape(rows)
    parted = np.flatnonzero((baseline != candidate).any(axis=1))
    if parted.size == 0:
        return None
    first = int(parted[0]) * LEAF_BYTES // itemsize
    end = min((int(parted[-1]) + 1) * LEAF_BYTES, num_bytes)
    return first, (end - 1) // itemsize
