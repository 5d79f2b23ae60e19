"""The digest written a second time, from its definition and with nothing of bitcheck, and its test vectors.

    python -m tests.bitcheck.digest_definition > tests/bitcheck/digest_vectors.json

writes the published vectors again. A vector is a dtype's name, a shape, the bytes, and what must
come out. Bytes are given in hex or as a pattern: byte i is the top byte of i * 2654435761 mod 2**32
(a multiplicative hash: no two leaves alike). For bool the pattern's lowest bit.
"""

from __future__ import annotations

import json
import struct
import sys
from math import prod

import xxhash

ITEMSIZE = {
    "bool": 1,
    **dict.fromkeys(("uint8", "int8", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys((f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)), 1),
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, for each dtype that PyTorch has."""


def define_digest(dtype: str, shape: list[int], data: bytes) -> tuple[list[str], str]:
    """Return the leaf digests and the digest in hex, step by step as bitcheck/digest.py tells it."""
    leaves = []
    for start in range(0, len(data), 16384):
        leaf = data[start : start + 16384]
        while len(leaf) % 1024:
            leaf += b"\0"
        leaves.append(xxhash.xxh3_128(leaf, seed=0).hexdigest())
    header = "bitcheck1\n" + dtype + "\n" + ",".join(str(extent) for extent in shape) + "\n" + str(len(data)) + "\n"
    whole = header.encode("ascii") + b"".join(bytes.fromhex(leaf) for leaf in leaves)
    return leaves, xxhash.xxh3_128(whole, seed=0).hexdigest()


def pattern(num_bytes: int, dtype: str = "uint8") -> bytes:
    """Return the bytes that a vector with `"pattern": num_bytes` has."""
    data = bytes((i * 2654435761 % 2**32) >> 24 for i in range(num_bytes))
    return bytes(byte & 1 for byte in data) if dtype == "bool" else data


def vector_bytes(vector: dict) -> bytes:
    """Return the bytes of a published vector."""
    if "hex" in vector:
        return bytes.fromhex(vector["hex"])
    return pattern(vector["pattern"], vector["dtype"])


def vectors() -> list[dict]:
    """Return the vectors, each with its leaves and digest."""
    sizes = [0, 1, 1023, 1024, 1025, 16383, 16384, 16385, 50000]
    made = [{"name": f"{size} bytes", "dtype": "uint8", "shape": [size], "pattern": size} for size in sizes]
    made += [
        {"name": "no elements, three dimensions", "dtype": "float32", "shape": [2, 0, 3], "hex": ""},
        {"name": "0-d", "dtype": "float32", "shape": [], "hex": struct.pack("<f", 1.5).hex()},
        {
            "name": "arange(6.).view(2, 3)",
            "dtype": "float32",
            "shape": [2, 3],
            "hex": struct.pack("<6f", *range(6)).hex(),
        },
        {"name": "+0.0", "dtype": "float64", "shape": [1], "hex": "00" * 8},
        {"name": "-0.0", "dtype": "float64", "shape": [1], "hex": "00" * 7 + "80"},
        {"name": "quiet NaN", "dtype": "float32", "shape": [1], "hex": "0000c07f"},
        {"name": "NaN with a payload", "dtype": "float32", "shape": [1], "hex": "0100c07f"},
        {"name": "signalling NaN", "dtype": "float32", "shape": [1], "hex": "0100807f"},
        {"name": "2**53 + 1", "dtype": "int64", "shape": [1], "hex": (2**53 + 1).to_bytes(8, "little").hex()},
        {"name": "two leaves of bfloat16", "dtype": "bfloat16", "shape": [100, 100], "pattern": 20000},
    ]
    for dtype, itemsize in ITEMSIZE.items():
        shape = [3, 5]
        made.append({"name": f"{dtype}, 3 by 5", "dtype": dtype, "shape": shape, "pattern": prod(shape) * itemsize})
    for vector in made:
        vector["leaves"], vector["digest"] = define_digest(vector["dtype"], vector["shape"], vector_bytes(vector))
    return made


if __name__ == "__main__":
    lines = ",\n".join("  " + json.dumps(vector) for vector in vectors())
    sys.stdout.write(f'{{"digest_version": 1, "vectors": [\n{lines}\n]}}\n')
