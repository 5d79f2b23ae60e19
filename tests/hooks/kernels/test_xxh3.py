"""The leaf hash kernel against xxHash: lengths, addresses, tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitcheck.digest import LEAF_BYTES, digest_leaves, num_leaves

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from bitcheck.hooks.kernels import xxh3

ROOM = 5 * LEAF_BYTES
DATA = np.random.default_rng(1).integers(0, 256, ROOM, dtype=np.uint8)

EDGES = (1, 7, 8, 9, 1016, 1023, 1024, 1025, 2048, 16383, 16384, 16385, 17408, 32768, 33000)


class Memory:
    """Bytes on the device under test, from an address that is a multiple of 16, and the kernels over them."""

    def __init__(self, device: str) -> None:
        room = torch.zeros(ROOM + 16, dtype=torch.uint8, device=device)
        self.start = -room.data_ptr() % 16
        self.bytes = room[self.start : self.start + ROOM]
        self.bytes.copy_(torch.from_numpy(DATA))
        self.secret = torch.tensor(xxh3.SECRET_WORDS, device=device)

    def hash_one(self, offset: int, size: int, blocks_a_load: int = 16) -> bytes:
        """Leaf digests of bytes [offset, offset + size)."""
        out = torch.zeros(num_leaves(size), 16, dtype=torch.uint8, device=self.bytes.device)
        address = self.bytes.data_ptr() + offset
        launch = xxh3.hash_one_kernel[(num_leaves(size),)]
        launch(address, size, out.data_ptr(), self.secret, BLOCKS_A_LOAD=blocks_a_load, num_warps=1)
        return out.cpu().numpy().tobytes()

    def hash_few(self, slices: list[tuple[int, int]]) -> bytes:
        """Leaf digests of 2 to 4 slices (offset, size), one launch, described by its arguments."""
        counts = [num_leaves(size) for _, size in slices]
        out = torch.zeros(sum(counts), 16, dtype=torch.uint8, device=self.bytes.device)
        absent = [0] * (4 - len(slices))
        addresses = [*(self.bytes.data_ptr() + offset for offset, _ in slices), *absent]
        sizes = [*(size for _, size in slices), *absent]
        firsts = [sum(counts[:index]) for index in range(1, 4)]
        launch = xxh3.hash_few_kernel[(sum(counts),)]
        launch(*addresses, *sizes, *firsts, out.data_ptr(), self.secret, BLOCKS_A_LOAD=16, num_warps=1)
        return out.cpu().numpy().tobytes()

    def hash_table(self, slices: list[tuple[int, int]]) -> bytes:
        """Leaf digests of many slices (offset, size), one launch."""
        counts = [num_leaves(size) for _, size in slices]
        firsts = np.cumsum(counts) - counts
        rows = [[self.bytes.data_ptr() + offset for offset, _ in slices], [size for _, size in slices], firsts.tolist()]
        table = torch.tensor(rows, dtype=torch.int64, device=self.bytes.device)
        out = torch.zeros(sum(counts), 16, dtype=torch.uint8, device=self.bytes.device)
        launch = xxh3.hash_table_kernel[(sum(counts),)]
        launch(table, len(slices), out.data_ptr(), self.secret, BLOCKS_A_LOAD=16, num_warps=1)
        return out.cpu().numpy().tobytes()


@pytest.fixture
def memory(device: str) -> Memory:
    return Memory(device)


@pytest.mark.parametrize("size", EDGES)
def test_every_length_has_the_leaves_of_xxhash(memory: Memory, size: int) -> None:
    assert memory.hash_one(0, size) == digest_leaves(DATA[:size])


@pytest.mark.parametrize("offset", range(16))
def test_every_address_gives_the_same_bits(memory: Memory, offset: int) -> None:
    for size in (1, 1025, LEAF_BYTES + 3):
        assert memory.hash_one(offset, size) == digest_leaves(DATA[offset : offset + size]), size


@pytest.mark.parametrize("blocks_a_load", [1, 2, 4, 8, 16])
def test_how_much_is_loaded_at_once_changes_nothing(memory: Memory, blocks_a_load: int) -> None:
    assert memory.hash_one(0, 2 * LEAF_BYTES, blocks_a_load) == digest_leaves(DATA[: 2 * LEAF_BYTES])


@settings(max_examples=15)
@given(offset=st.integers(0, 40), size=st.integers(1, 3 * LEAF_BYTES))
def test_any_slice_of_memory_has_the_leaves_of_xxhash(offset: int, size: int) -> None:
    memory = Memory("cuda" if torch.cuda.is_available() else "cpu")
    assert memory.hash_one(offset, size) == digest_leaves(DATA[offset : offset + size])


def test_one_launch_hashes_many_tensors_in_the_order_of_the_table(memory: Memory) -> None:
    slices = [(0, LEAF_BYTES), (3, 1), (16, 2 * LEAF_BYTES + 5), (8, 24), (1, LEAF_BYTES)]
    expected = b"".join(digest_leaves(DATA[offset : offset + size]) for offset, size in slices)
    assert memory.hash_table(slices) == expected


@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_launch_hashes_a_few_tensors_that_its_arguments_describe(memory: Memory, count: int) -> None:
    slices = [(3, LEAF_BYTES + 1), (16, 2 * LEAF_BYTES), (8, 24), (1, LEAF_BYTES)]
    for order in (slices, slices[::-1]):
        expected = [digest_leaves(DATA[offset : offset + size]) for offset, size in order[:count]]
        assert memory.hash_few(order[:count]) == b"".join(expected)


@triton.jit
def _find_kernel(firsts_ptr, num_tensors, leaves_ptr, out_ptr):
    program = tl.program_id(0)
    tensor = xxh3.find_tensor(firsts_ptr, num_tensors, tl.load(leaves_ptr + program))
    tl.store(out_ptr + program, tensor)


@pytest.mark.parametrize("num_tensors", [1, 255, 256, 257, 600, 65536])
def test_a_leaf_is_found_in_a_table_of_any_length(num_tensors: int, device: str) -> None:
    counts = np.random.default_rng(num_tensors).integers(1, 4, num_tensors)
    firsts = np.cumsum(counts) - counts
    total = int(counts.sum())
    leaves = sorted(
        {
            0,
            1,
            int(firsts[-1]),
            total - 1,
            total // 2,
            *(int(firsts[k]) for k in (255, 256) if k < total and k < num_tensors),
        }
    )
    leaves = [leaf for leaf in leaves if leaf < total]
    out = torch.zeros(len(leaves), dtype=torch.int64, device=device)
    launch = _find_kernel[(len(leaves),)]
    launch(torch.from_numpy(firsts).to(device), num_tensors, torch.tensor(leaves, device=device), out)
    assert out.tolist() == [int(np.searchsorted(firsts, leaf, side="right")) - 1 for leaf in leaves]


@pytest.mark.gpu
def test_one_launch_hashes_thousands_of_tensors(memory: Memory) -> None:
    slices = [(7 * index % 999, 5 + index % 3000) for index in range(9000)]
    assert memory.hash_table(slices) == b"".join(digest_leaves(DATA[offset : offset + size]) for offset, size in slices)


def test_bytes_around_a_tensor_are_no_part_of_it(memory: Memory) -> None:
    before = memory.hash_one(21, 1003)
    kept = memory.bytes[21 : 21 + 1003].clone()
    memory.bytes.fill_(255)
    memory.bytes[21 : 21 + 1003] = kept
    assert memory.hash_one(21, 1003) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="addresses are seen in the interpreter only")
@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (3, 5), (5, 3), (7, 2), (8, 1024), (13, 1019), (0, LEAF_BYTES), (1, LEAF_BYTES), (8, LEAF_BYTES + 1)],
)
def test_nothing_is_read_outside_the_aligned_16_bytes_that_hold_a_byte_of_the_tensor(
    memory: Memory, offset: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import interpreter_builder

    read: list[np.ndarray] = []
    load = interpreter_builder.create_masked_load

    def watched(pointers, mask, *rest):  # type: ignore[no-untyped-def]
        read.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        return load(pointers, mask, *rest)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", watched)
    memory.hash_one(offset, size)
    first = memory.bytes.data_ptr() + offset
    secret = memory.secret.data_ptr()
    addresses = np.unique(np.concatenate([words.reshape(-1) for words in read]).astype(np.int64))
    addresses = addresses[(addresses < secret) | (addresses >= secret + 8 * len(xxh3.SECRET_WORDS))]
    around = addresses // 16 * 16
    assert addresses.size >= size // 8
    assert ((around + 16 > first) & (around < first + size)).all()
