"""Where a strided tensor's bits lie on a device, and how to bring them to row-major order in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from bitcheck.errors import DigestError
from bitcheck.events import Kind
from bitcheck.hooks.native import native
from bitcheck.hooks.tensors import dtype_name

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_BATCHES = 65535
"""Extent of a launch grid's second axis."""
_MAX_EXTENT = 2**31 - 1
_MAX_ELEMENTS = 2**30
"""That are counted in 32 bits."""
_MIN_EXTENT = 8
"""Fewer rows or columns, or elements in a run, than this are left to an ordinary copy."""

FEW_TENSORS = 4
"""Up to so many tensors are described to a kernel by its arguments, which cost the host less than a table."""


def address_of(tensor: torch.Tensor, num_bytes: int) -> int:
    """Return where a strided tensor's first element lies on its device; 0 for an empty tensor."""
    if num_bytes == 0:
        return 0
    available, span = tensor.untyped_storage().nbytes(), num_bytes
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (1 + sum((extent - 1) * stride for extent, stride in steps)) * tensor.itemsize
    if tensor.storage_offset() * tensor.itemsize + span > available:
        raise DigestError(
            f"the storage of a {dtype_name(tensor)} tensor of shape {list(tensor.shape)} is freed or too small; "
            f"expected {num_bytes} bytes: record it while it is gathered"
        )
    return tensor.data_ptr()


STRIDED = -1
"""The place of a tensor whose elements have to be brought to row-major order first."""


def places_of_portably(tensors: Sequence[torch.Tensor], kinds: Sequence[Kind]) -> list[int]:
    """Return where each tensor's elements lie on its device, one after the other; 0 for an empty tensor, or STRIDED.

    Raises DigestError where a tensor's memory is not there.
    """
    places = []
    for tensor, kind in zip(tensors, kinds, strict=True):
        address = address_of(tensor, kind[2])
        is_plain = not kind[2] or (tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()))
        places.append(address if is_plain else STRIDED)
    return places


def places_of(tensors: Sequence[torch.Tensor], kinds: Sequence[Kind]) -> list[int]:
    """Do as `places_of_portably`, quicker where that was compiled."""
    places = native.places_of(tensors, kinds) if native is not None else None
    return places if places is not None else places_of_portably(tensors, kinds)


class Transposed(NamedTuple):
    """Elements [B, R, C] whose rows lie next to each other."""

    shape: tuple[int, int, int]
    strides: tuple[int, int]
    """Of B and C; R's is 1."""


class Runs(NamedTuple):
    """Elements [A, B, C, R], of which R lie in a row."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    """Of A, B and C."""


class Arrangement(NamedTuple):
    """How a strided tensor lies in memory, with as few dimensions as describe it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    special: Transposed | Runs | None
    """As what a kernel of ours can copy it."""


@lru_cache(maxsize=4096)
def arrangement(shape: tuple[int, ...], strides: tuple[int, ...]) -> Arrangement:
    """Return how elements of this shape lie that have these strides."""
    extents: list[int] = []
    steps: list[int] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if extents and steps[-1] == extent * stride:
            extents[-1] *= extent
            steps[-1] = stride
        else:
            extents.append(extent)
            steps.append(stride)
    return Arrangement(tuple(extents), tuple(steps), _as_transposed(extents, steps) or _as_runs(extents, steps))


def _as_transposed(shape: list[int], strides: list[int]) -> Transposed | None:
    if len(shape) == 2:
        shape, strides = [1, *shape], [0, *strides]
    if len(shape) != 3 or strides[1] != 1 or min(shape[1:]) < _MIN_EXTENT:
        return None
    if shape[0] > _MAX_BATCHES or max(shape) > _MAX_EXTENT:
        return None
    return Transposed((shape[0], shape[1], shape[2]), (strides[0], strides[2]))


def _as_runs(shape: list[int], strides: list[int]) -> Runs | None:
    if not 2 <= len(shape) <= 4 or strides[-1] != 1 or shape[-1] < _MIN_EXTENT or math.prod(shape) > _MAX_ELEMENTS:
        return None
    missing = 4 - len(shape)
    a, b, c, run = [1] * missing + shape
    step_a, step_b, step_c = [0] * missing + strides[:-1]
    return Runs((a, b, c, run), (step_a, step_b, step_c))


def special_of(tensor: torch.Tensor) -> Transposed | Runs | None:
    """Return as what a kernel of ours can copy a tensor's elements, None where PyTorch has to.

    `find_copy` in `csrc/strided.c` asks the same.
    """
    if tensor.is_conj() or tensor.is_neg() or tensor.itemsize not in _INTEGERS:
        return None
    return arrangement(tuple(tensor.shape), tensor.stride()).special


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of their size, with as few dimensions as describe them."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    words = tensor.view(_INTEGERS[tensor.itemsize])
    shape, strides, _ = arrangement(tuple(words.shape), words.stride())
    return words.as_strided(shape, strides)


def row_blocks(words: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order, in blocks of at most `limit_bytes`."""
    row_bytes = words[0].nbytes
    if row_bytes > limit_bytes:
        for row in words:
            yield from row_blocks(row, limit_bytes)
        return
    num_rows = limit_bytes // row_bytes
    for start in range(0, words.shape[0], num_rows):
        yield words[start : start + num_rows]
