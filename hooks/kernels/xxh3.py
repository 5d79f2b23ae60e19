"""XXH3-128 of the leaves of many tensors in one launch, in Triton: the digest's leaves, bit for bit.

One program, one warp, hashes one leaf of 16 KiB (`bitcheck.digest` defines leaves). XXH3's long input,
with its default 192-byte secret and seed 0, is

    block     1024 bytes = 16 stripes of 8 words of 64 bits, little endian
    a stripe  key = word ^ secret[8 * stripe + 8 * lane]
              acc[lane]     += low32(key) * high32(key)
              acc[lane ^ 1] += word
    scramble  acc = (acc ^ acc >> 47 ^ secret[128 + 8 * lane]) * PRIME32_1, between two blocks
    the end   the last stripe takes secret[121 + 8 * lane], nothing is scrambled after it
    merge     8 accumulators and the length into 2 * 64 bits

(xxHash doc/xxhash_spec.md, "XXH3 Algorithm Description (for large inputs)"). A leaf is a whole number
of blocks, 1 to 16, because its end is padded with zeros, so every stripe but the last is alike. All
of it is integer arithmetic modulo 2**64: the order of the sums over stripes changes nothing.

Even and odd lanes are kept apart, for then `acc[lane ^ 1] += word` needs no exchange between
threads: a thread loads 16 bytes, one even and one odd lane, and adds each word to the other's sum.

Tensors are given as a table of addresses, so the launch is one for any number of them. Words are
loaded 16 bytes at a time, all 16 KiB of a leaf before the first is used. A leaf at an odd address (a
slice) is put together from the aligned words around it, a tensor's end byte by byte: nothing is read
outside the aligned 16 bytes that hold a byte of the tensor.

Shapes: L leaves, T tensors; within a leaf B blocks, S = 16 stripes, H = 4 pairs of lanes.

Importing this module needs triton. TRITON_INTERPRET=1 runs the kernels on a CPU.

Long because the leaf kernels share one arithmetic.
"""

# Triton's decorator is untyped, and what it takes are no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import struct

import triton
import triton.language as tl

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret, 192 bytes (xxhash.h, XXH3_kSecret)."""

WORD_OFFSETS = (
    [8 * word for word in range(24)]  # 0: stripe keys; from 16: the keys of the scramble
    + [121 + 8 * lane for lane in range(8)]  # 24: the last stripe's keys
    + [11 + 8 * lane for lane in range(8)]  # 32: merge, low half
    + [117 + 8 * lane for lane in range(8)]  # 40: merge, high half
)
SECRET_WORDS: list[int] = [struct.unpack_from("<q", SECRET, offset)[0] for offset in WORD_OFFSETS]
"""The words of the secret that the kernel reads, int64 [48], aligned: its `secret_ptr` argument."""

TABLE_ROWS = 3
"""The table is int64 [3, T]: addresses; numbers of bytes, none of them 0; indices of the first leaves."""
MAX_TENSORS = 65536
"""Tensors that one launch can take: two levels of a search among 256."""

_FANOUT = tl.constexpr(256)
_BLOCKS = tl.constexpr(16)
_BLOCKS_UNALIGNED = tl.constexpr(4)
_ALL_ONES = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME32_2 = tl.constexpr(0x85EBCA77)
_PRIME32_3 = tl.constexpr(0xC2B2AE3D)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_PRIME64_3 = tl.constexpr(0x165667B19E3779F9)
_PRIME64_4 = tl.constexpr(0x85EBCA77C2B2AE63)
_PRIME64_5 = tl.constexpr(0x27D4EB2F165667C5)
_PRIME_AVALANCHE = tl.constexpr(0x165667919E3779F9)


@triton.jit
def _u64(value):
    """A constant as uint64; Triton would take one above 2**63 for something else."""
    return tl.full((), value, tl.uint64)


@triton.jit
def find_tensor(firsts_ptr, num_tensors, leaf):
    """Return the number of the tensor that `leaf` belongs to: the last whose first leaf is not after it."""
    steps = tl.arange(0, _FANOUT)
    base = 0
    if num_tensors > _FANOUT:
        coarse = steps * _FANOUT
        firsts = tl.load(firsts_ptr + coarse, mask=coarse < num_tensors, other=0x7FFFFFFFFFFFFFFF)
        base = (tl.sum((firsts <= leaf).to(tl.int32), axis=0) - 1) * _FANOUT
    tensors = base + steps
    firsts = tl.load(firsts_ptr + tensors, mask=tensors < num_tensors, other=0x7FFFFFFFFFFFFFFF)
    return base + tl.sum((firsts <= leaf).to(tl.int32), axis=0) - 1


@triton.jit
def _product(word, key):
    mixed = word ^ key
    return mixed.to(tl.uint32).to(tl.uint64) * (mixed >> 32)


@triton.jit
def _scramble(acc, key):
    return (acc ^ (acc >> 47) ^ key) * _u64(_PRIME32_1)


@triton.jit
def _avalanche(value):
    value = (value ^ (value >> 37)) * _u64(_PRIME_AVALANCHE)
    return value ^ (value >> 32)


@triton.jit
def _merge(even_H, odd_H, secret_ptr, offset: tl.constexpr, start):
    pairs = tl.arange(0, 4)
    left = even_H ^ tl.load(secret_ptr + offset + 2 * pairs).to(tl.uint64, bitcast=True)
    right = odd_H ^ tl.load(secret_ptr + offset + 2 * pairs + 1).to(tl.uint64, bitcast=True)
    folded = (left * right) ^ tl.umulhi(left, right)
    return _avalanche(start + tl.sum(folded, axis=0))


@triton.jit
def _swap_bytes(value):
    value = ((value & _u64(0x00FF00FF00FF00FF)) << 8) | ((value >> 8) & _u64(0x00FF00FF00FF00FF))
    value = ((value & _u64(0x0000FFFF0000FFFF)) << 16) | ((value >> 16) & _u64(0x0000FFFF0000FFFF))
    return (value << 32) | (value >> 32)


@triton.jit
def _store_digest(out_ptr, leaf, even_H, odd_H, secret_ptr, num_blocks):
    """Merge the accumulators and write the 16 canonical (big-endian) bytes: high half, low half."""
    length = num_blocks.to(tl.uint64) * _u64(1024)
    low = _merge(even_H, odd_H, secret_ptr, 32, length * _u64(_PRIME64_1))
    high = _merge(even_H, odd_H, secret_ptr, 40, (length * _u64(_PRIME64_2)) ^ _u64(_ALL_ONES))
    tl.store(out_ptr + leaf * 2, _swap_bytes(high).to(tl.int64, bitcast=True))
    tl.store(out_ptr + leaf * 2 + 1, _swap_bytes(low).to(tl.int64, bitcast=True))


@triton.jit
def _load_pairs(words_ptr, offset_SBL):
    """Load words whose addresses are, two by two, multiples of 16: 16 bytes at a time.

    Triton does not see the alignment of an address that was an integer.
    """
    return tl.load(tl.multiple_of(words_ptr + offset_SBL, (16, 16, 16)))


@triton.jit
def _join_words(low, high, skew):
    """Return the words that start `skew` bytes into the aligned words `low`, whose successors are `high`."""
    # A shift by 64 is undefined, hence in two steps.
    joined = (low >> (skew * 8)) | ((high << 8) << ((56 - skew * 8) & 63))
    return tl.where(skew > 0, joined, low)


@triton.jit
def _keep_bytes(words, num_bytes):
    """Set all but the first `num_bytes` (any number) of each word to zero."""
    missing_bits = (8 - tl.minimum(tl.maximum(num_bytes, 1), 8)).to(tl.uint64) * 8
    return tl.where(num_bytes > 0, words & (_u64(_ALL_ONES) >> missing_bits), 0)


@triton.jit
def _add_blocks(
    even_H,
    odd_H,
    word_even_SBH,
    word_odd_SBH,
    key_even_SH,
    key_odd_SH,
    last_even_SH,
    last_odd_SH,
    scramble_even_H,
    scramble_odd_H,
    TILE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Add tile `TILE`, of NUM_BLOCKS blocks, of a leaf of 16, scrambling after each but the leaf's last."""
    blocks = tl.arange(0, NUM_BLOCKS)
    is_last = (blocks == _BLOCKS - 1 - TILE * NUM_BLOCKS)[None, :, None]
    key_even = tl.where(is_last, last_even_SH[:, None, :], key_even_SH[:, None, :])
    key_odd = tl.where(is_last, last_odd_SH[:, None, :], key_odd_SH[:, None, :])
    sum_even_BH = tl.sum(_product(word_even_SBH, key_even) + word_odd_SBH, axis=0)
    sum_odd_BH = tl.sum(_product(word_odd_SBH, key_odd) + word_even_SBH, axis=0)
    for block in tl.static_range(NUM_BLOCKS):
        # One warp holds all blocks of a tile in its registers, so this sum only picks one.
        is_block = (blocks == block)[:, None]
        even_H += tl.sum(tl.where(is_block, sum_even_BH, 0), axis=0)
        odd_H += tl.sum(tl.where(is_block, sum_odd_BH, 0), axis=0)
        if TILE * NUM_BLOCKS + block < _BLOCKS - 1:
            even_H = _scramble(even_H, scramble_even_H)
            odd_H = _scramble(odd_H, scramble_odd_H)
    return even_H, odd_H


@triton.jit
def _tile_offsets(NUM_BLOCKS: tl.constexpr):
    """Return the words of a tile [S, B, 8], counted from its first.

    Stripes before blocks: of two such dimensions Triton spreads the threads over the first, and a
    thread that holds its stripes of every block needs no exchange to go from block to block.
    """
    stripes = tl.arange(0, 16)[:, None, None]
    blocks = tl.arange(0, NUM_BLOCKS)[None, :, None]
    return stripes * 8 + blocks * 128 + tl.arange(0, 8)[None, None, :]


@triton.jit
def _add_aligned_leaf(
    even_H,
    odd_H,
    words_ptr,
    key_even_SH,
    key_odd_SH,
    last_even_SH,
    last_odd_SH,
    scramble_even_H,
    scramble_odd_H,
    NUM_BLOCKS: tl.constexpr,
):
    """Add a leaf of 16 KiB whose address is a multiple of 16, `NUM_BLOCKS` blocks at a time."""
    for tile in tl.static_range(_BLOCKS // NUM_BLOCKS):
        words = _load_pairs(words_ptr + tile * NUM_BLOCKS * 128, _tile_offsets(NUM_BLOCKS))
        word_even, word_odd = tl.split(tl.reshape(words, (16, NUM_BLOCKS, 4, 2)))
        even_H, odd_H = _add_blocks(
            even_H, odd_H, word_even, word_odd, key_even_SH, key_odd_SH, last_even_SH, last_odd_SH,
            scramble_even_H, scramble_odd_H, tile, NUM_BLOCKS
        )  # fmt: skip
    return even_H, odd_H


@triton.jit
def _add_unaligned_leaf(
    even_H,
    odd_H,
    words_ptr,
    offset,
    key_even_SH,
    key_odd_SH,
    last_even_SH,
    last_odd_SH,
    scramble_even_H,
    scramble_odd_H,
):
    """Add a leaf of 16 KiB that lies `offset` bytes, 1 to 15, after an aligned address.

    Each 16 bytes of it are put together from the two aligned 16 bytes that they lie in.
    """
    skew = (offset & 7).to(tl.uint64)
    starts_odd = (offset & 8) != 0
    for tile in tl.static_range(_BLOCKS // _BLOCKS_UNALIGNED):
        tile_ptr = words_ptr + tile * _BLOCKS_UNALIGNED * 128
        offset_SBL = _tile_offsets(_BLOCKS_UNALIGNED)
        below = _load_pairs(tile_ptr, offset_SBL)
        above = _load_pairs(tile_ptr + 2, offset_SBL)
        below_even, below_odd = tl.split(tl.reshape(below, (16, _BLOCKS_UNALIGNED, 4, 2)))
        above_even, above_odd = tl.split(tl.reshape(above, (16, _BLOCKS_UNALIGNED, 4, 2)))
        first = tl.where(starts_odd, below_odd, below_even)
        second = tl.where(starts_odd, above_even, below_odd)
        third = tl.where(starts_odd, above_odd, above_even)
        even_H, odd_H = _add_blocks(
            even_H, odd_H, _join_words(first, second, skew), _join_words(second, third, skew),
            key_even_SH, key_odd_SH, last_even_SH, last_odd_SH, scramble_even_H, scramble_odd_H,
            tile, _BLOCKS_UNALIGNED
        )  # fmt: skip
    return even_H, odd_H


@triton.jit
def _hash_leaf(address, num_bytes, leaf, out_ptr, secret_ptr, BLOCKS_A_LOAD: tl.constexpr):
    """Hash the 16 KiB at `address`, or the `num_bytes` that are left there; write digest number `leaf`."""
    stripes = tl.arange(0, 16)
    pairs = tl.arange(0, 4)
    key_SH = secret_ptr + stripes[:, None] + 2 * pairs[None, :]
    key_even_SH = tl.load(key_SH).to(tl.uint64, bitcast=True)
    key_odd_SH = tl.load(key_SH + 1).to(tl.uint64, bitcast=True)
    last_SH = tl.where(stripes[:, None] == 15, secret_ptr + 24 + 2 * pairs[None, :], key_SH)
    last_even_SH = tl.load(last_SH).to(tl.uint64, bitcast=True)
    last_odd_SH = tl.load(last_SH + 1).to(tl.uint64, bitcast=True)
    scramble_even_H = tl.load(secret_ptr + 16 + 2 * pairs).to(tl.uint64, bitcast=True)
    scramble_odd_H = tl.load(secret_ptr + 17 + 2 * pairs).to(tl.uint64, bitcast=True)

    even_H = tl.where(
        pairs == 0,
        _u64(_PRIME32_3),
        tl.where(pairs == 1, _u64(_PRIME64_2), tl.where(pairs == 2, _u64(_PRIME64_4), _u64(_PRIME64_5))),
    )
    odd_H = tl.where(
        pairs == 0,
        _u64(_PRIME64_1),
        tl.where(pairs == 1, _u64(_PRIME64_3), tl.where(pairs == 2, _u64(_PRIME32_2), _u64(_PRIME32_1))),
    )
    num_blocks = (tl.minimum(num_bytes, 16384).to(tl.int32) + 1023) // 1024

    if num_bytes >= 16384:
        words_ptr = (address & -16).to(tl.pointer_type(tl.uint64))
        if (address & 15) == 0:
            even_H, odd_H = _add_aligned_leaf(
                even_H, odd_H, words_ptr, key_even_SH, key_odd_SH, last_even_SH, last_odd_SH,
                scramble_even_H, scramble_odd_H, BLOCKS_A_LOAD
            )  # fmt: skip
        else:
            even_H, odd_H = _add_unaligned_leaf(
                even_H, odd_H, words_ptr, address & 15, key_even_SH, key_odd_SH, last_even_SH, last_odd_SH,
                scramble_even_H, scramble_odd_H
            )  # fmt: skip
    else:
        # A tensor's end, byte by byte: an aligned word is read where it holds one byte of it at least.
        skew = (address & 7).to(tl.uint64)
        offset_SH = stripes[:, None] * 64 + pairs[None, :] * 16
        words_ptr_SH = (address & -8).to(tl.pointer_type(tl.uint64)) + stripes[:, None] * 8 + pairs[None, :] * 2
        end = num_bytes.to(tl.int32) + skew.to(tl.int32)
        block = 0  # not `for`: the interpreter of Triton 3.6 cannot take a bound as numpy 2.4 gives it
        while block < num_blocks:
            at_SH = offset_SH + block * 1024
            first_SH = tl.load(words_ptr_SH + block * 128, mask=at_SH < end, other=0)
            second_SH = tl.load(words_ptr_SH + block * 128 + 1, mask=at_SH + 8 < end, other=0)
            third_SH = tl.load(words_ptr_SH + block * 128 + 2, mask=at_SH + 16 < end, other=0)
            left_SH = num_bytes.to(tl.int32) - at_SH
            even_SH = _keep_bytes(_join_words(first_SH, second_SH, skew), left_SH)
            odd_SH = _keep_bytes(_join_words(second_SH, third_SH, skew), left_SH - 8)
            is_last = block == num_blocks - 1
            use_even_SH = tl.where(is_last, last_even_SH, key_even_SH)
            use_odd_SH = tl.where(is_last, last_odd_SH, key_odd_SH)
            even_H += tl.sum(_product(even_SH, use_even_SH) + odd_SH, axis=0)
            odd_H += tl.sum(_product(odd_SH, use_odd_SH) + even_SH, axis=0)
            even_H = tl.where(is_last, even_H, _scramble(even_H, scramble_even_H))
            odd_H = tl.where(is_last, odd_H, _scramble(odd_H, scramble_odd_H))
            block += 1
    _store_digest(out_ptr, leaf, even_H, odd_H, secret_ptr, num_blocks)


@triton.jit(do_not_specialize=["num_tensors", "out_address"])
def hash_table_kernel(table_ptr, num_tensors: tl.int32, out_address: tl.int64, secret_ptr, BLOCKS_A_LOAD: tl.constexpr):
    """Hash leaf `program_id` of the tensors in the table, int64 [3, T], `num_tensors` of them.

    `out_address` is where the digests go, uint8 [L, 16]; `secret_ptr` is SECRET_WORDS, int64 [48].
    """
    leaf = tl.program_id(0).to(tl.int64)
    firsts_ptr = table_ptr + 2 * num_tensors
    tensor = find_tensor(firsts_ptr, num_tensors, leaf)
    address = tl.load(table_ptr + tensor)
    num_bytes = tl.load(table_ptr + num_tensors + tensor)
    start = (leaf - tl.load(firsts_ptr + tensor)) * 16384
    out_ptr = out_address.to(tl.pointer_type(tl.int64))
    _hash_leaf(address + start, num_bytes - start, leaf, out_ptr, secret_ptr, BLOCKS_A_LOAD)


@triton.jit(do_not_specialize=["address", "num_bytes", "out_address"])
def hash_one_kernel(
    address: tl.int64, num_bytes: tl.int64, out_address: tl.int64, secret_ptr, BLOCKS_A_LOAD: tl.constexpr
):
    """Hash leaf `program_id` of the one tensor at `address`; the rest as in `hash_table_kernel`."""
    leaf = tl.program_id(0).to(tl.int64)
    start = leaf * 16384
    out_ptr = out_address.to(tl.pointer_type(tl.int64))
    _hash_leaf(address + start, num_bytes - start, leaf, out_ptr, secret_ptr, BLOCKS_A_LOAD)


@triton.jit(
    do_not_specialize=[
        "address_0", "address_1", "address_2", "address_3",
        "num_bytes_0", "num_bytes_1", "num_bytes_2", "num_bytes_3",
        "first_1", "first_2", "first_3", "out_address",
    ]
)  # fmt: skip
def hash_few_kernel(
    address_0: tl.int64,
    address_1: tl.int64,
    address_2: tl.int64,
    address_3: tl.int64,
    num_bytes_0: tl.int64,
    num_bytes_1: tl.int64,
    num_bytes_2: tl.int64,
    num_bytes_3: tl.int64,
    first_1: tl.int64,
    first_2: tl.int64,
    first_3: tl.int64,
    out_address: tl.int64,
    secret_ptr,
    BLOCKS_A_LOAD: tl.constexpr,
):
    """Hash leaf `program_id` of up to four tensors, leaf `first_n` being tensor n's first; else as `hash_table_kernel`.

    That of a tensor which is not there is the number of leaves of all.
    """
    leaf = tl.program_id(0).to(tl.int64)
    address, num_bytes, first = address_0, num_bytes_0, leaf * 0
    address = tl.where(leaf >= first_1, address_1, address)
    num_bytes = tl.where(leaf >= first_1, num_bytes_1, num_bytes)
    first = tl.where(leaf >= first_1, first_1, first)
    address = tl.where(leaf >= first_2, address_2, address)
    num_bytes = tl.where(leaf >= first_2, num_bytes_2, num_bytes)
    first = tl.where(leaf >= first_2, first_2, first)
    address = tl.where(leaf >= first_3, address_3, address)
    num_bytes = tl.where(leaf >= first_3, num_bytes_3, num_bytes)
    first = tl.where(leaf >= first_3, first_3, first)
    start = (leaf - first) * 16384
    out_ptr = out_address.to(tl.pointer_type(tl.int64))
    _hash_leaf(address + start, num_bytes - start, leaf, out_ptr, secret_ptr, BLOCKS_A_LOAD)
