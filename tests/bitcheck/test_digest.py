from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcheck.digest import (
    DIGEST_VERSION,
    LEAF_BYTES,
    differing_elements,
    digest_bytes,
    digest_from_leaves,
    digest_header,
    digest_leaves,
    num_leaves,
)
from tests.bitcheck.digest_definition import ITEMSIZE, define_digest, vector_bytes, vectors

PUBLISHED = json.loads(Path(__file__).with_name("digest_vectors.json").read_text(encoding="utf-8"))

PINNED = {
    "0 bytes": "d7d5361607ca289c586dc1b26a4ddfad",
    "1 bytes": "0f20fa82c76254bedeacea6a34e32a9c",
    "1025 bytes": "042b993ac0aedcbd43175ff12c5e4a5c",
    "16384 bytes": "bd06aae83bff07341f51f686ba831cf5",
    "16385 bytes": "eb31570d4598335cec6ff290fe7419a5",
    "0-d": "69a858bbb167af7ab36876bb3378f8c6",
    "arange(6.).view(2, 3)": "d5b9e1fd73d7985ce32619cce8d94fda",
    "-0.0": "ca3a804349da8d117b1f8f7a9eabad05",
    "bfloat16, 3 by 5": "bc14c34f7dcf9b6384ecdd12ccf93bb1",
    "float8_e4m3fn, 3 by 5": "e203db7844de72c42c6a1de8553ae756",
    "bool, 3 by 5": "d209454ff46e434a71b7767429b84db6",
}
"""Typed in here as well: a change of definition that rewrote the vectors would still be seen."""


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("vector", PUBLISHED["vectors"], ids=lambda vector: vector["name"])
def test_each_published_vector_comes_out(vector: dict) -> None:
    digest, leaves = digest_bytes(vector["dtype"], vector["shape"], as_array(vector_bytes(vector)))
    assert digest.hex() == vector["digest"]
    assert leaves.hex() == "".join(vector["leaves"])


def test_the_published_vectors_are_those_of_the_definition_in_its_first_version() -> None:
    assert PUBLISHED["digest_version"] == DIGEST_VERSION == 1
    assert PUBLISHED["vectors"] == vectors()


def test_the_published_vectors_keep_their_first_values() -> None:
    digests = {vector["name"]: vector["digest"] for vector in PUBLISHED["vectors"]}
    assert {name: digests[name] for name in PINNED} == PINNED


def test_no_two_published_vectors_share_a_digest() -> None:
    digests = [vector["digest"] for vector in PUBLISHED["vectors"]]
    assert len(set(digests)) == len(digests)


def test_the_header_is_four_lines_of_ascii() -> None:
    assert digest_header("float32", (2, 3), 24) == b"bitcheck1\nfloat32\n2,3\n24\n"
    assert digest_header("int64", (), 8) == b"bitcheck1\nint64\n\n8\n"


@given(data=st.binary(max_size=3 * LEAF_BYTES), dtype=st.sampled_from(sorted(ITEMSIZE)), split=st.integers(1, 4))
def test_any_bytes_digest_as_the_definition_says(data: bytes, dtype: str, split: int) -> None:
    shape = [split, len(data)]
    leaves, expected = define_digest(dtype, shape, data)
    digest, own_leaves = digest_bytes(dtype, shape, as_array(data))
    assert digest.hex() == expected
    assert own_leaves.hex() == "".join(leaves)
    assert len(own_leaves) == 16 * num_leaves(len(data))
    assert digest == digest_from_leaves(dtype, shape, len(data), own_leaves)


@given(size=st.integers(1, 3 * LEAF_BYTES), data=st.data())
def test_one_flipped_bit_changes_the_digest_and_exactly_its_own_leaf(size: int, data: st.DataObject) -> None:
    original = bytearray(vector_bytes({"pattern": size, "dtype": "uint8"}))
    bit = data.draw(st.integers(0, 8 * size - 1))
    flipped = bytearray(original)
    flipped[bit // 8] ^= 1 << bit % 8
    digest, leaves = digest_bytes("uint8", [size], as_array(bytes(original)))
    other_digest, other_leaves = digest_bytes("uint8", [size], as_array(bytes(flipped)))
    assert digest != other_digest
    parted = [i for i in range(num_leaves(size)) if leaves[16 * i : 16 * i + 16] != other_leaves[16 * i : 16 * i + 16]]
    assert parted == [bit // 8 // LEAF_BYTES]


@given(size=st.integers(2, 64), data=st.data())
def test_a_swapped_pair_of_elements_changes_the_digest(size: int, data: st.DataObject) -> None:
    values = np.arange(size, dtype=np.int64)
    first, second = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = values.copy()
    swapped[[first, second]] = swapped[[second, first]]
    assert digest_leaves(values.view(np.uint8)) != digest_leaves(swapped.view(np.uint8))


def test_zeros_that_pad_a_leaf_are_told_from_zeros_that_are_data() -> None:
    short = digest_bytes("uint8", [1000], np.ones(1000, np.uint8))
    padded = digest_bytes("uint8", [1024], as_array(b"\1" * 1000 + bytes(24)))
    assert short[1] == padded[1]
    assert short[0] != padded[0]


@pytest.mark.parametrize(
    ("dtype", "shape"), [("int32", [2, 3]), ("float32", [3, 2]), ("float32", [6]), ("float32", [1, 2, 3])]
)
def test_equal_bytes_of_another_dtype_or_shape_have_another_digest(dtype: str, shape: list[int]) -> None:
    data = as_array(bytes(range(24)))
    assert digest_bytes(dtype, shape, data)[0] != digest_bytes("float32", [2, 3], data)[0]


def leaves_of(data: np.ndarray) -> bytes:
    return digest_leaves(data.view(np.uint8))


def test_differing_elements_are_bounded_by_the_leaves_they_lie_in() -> None:
    baseline = np.zeros(10_000, np.float32)  # 40,000 bytes: leaves of 4,096 elements, the last of 1,808
    candidate = baseline.copy()
    candidate[5000] = 1
    assert differing_elements(leaves_of(baseline), leaves_of(candidate), 40_000, 4) == (4096, 8191)
    candidate[9000] = 1
    assert differing_elements(leaves_of(baseline), leaves_of(candidate), 40_000, 4) == (4096, 9999)
    candidate[0] = 1
    assert differing_elements(leaves_of(baseline), leaves_of(candidate), 40_000, 4) == (0, 9999)


def test_no_elements_are_named_where_no_leaf_differs_or_none_were_kept() -> None:
    leaves = leaves_of(np.zeros(100, np.float32))
    assert differing_elements(leaves, leaves, 400, 4) is None
    assert differing_elements(b"", b"", 400, 4) is None
    assert differing_elements(leaves, b"", 400, 4) is None
