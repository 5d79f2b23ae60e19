"""Where a strided tensor's bits lie on a device, and how to bring them to row-major order in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bitcheck.errors import DigestError
from bitcheck.hooks.tensors import dtype_name

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_BATCHES = 65535
"""Extent of a launch grid's second axis."""
_MAX_EXTENT = 2**31 - 1
_MIN_EXTENT = 8
"""Fewer rows or columns than this are left to an ordinary copy."""

FEW_TENSORS = 4
"""Up to so many tensors are described to a kernel by its arguments, which cost the host less than a table."""


def address_of(tensor: torch.Tensor, num_bytes: int) -> int:
    """Return where a strided tensor's first element lies on its device; 0 for an empty tensor."""
    if num_bytes == 0:
        return 0
    available = tensor.untyped_storage().nbytes()
    if available == 0 or (tensor.storage_offset() * tensor.itemsize + num_bytes > available and tensor.is_contiguous()):
        raise DigestError(
            f"the storage of a {dtype_name(tensor)} tensor of shape {list(tensor.shape)} is freed or too small; "
            f"expected {num_bytes} bytes: record it while it is gathered"
        )
    return tensor.data_ptr()


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of their size, with as few dimensions as describe them."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    words = tensor.view(_INTEGERS[tensor.itemsize])
    shape: list[int] = []
    strides: list[int] = []
    for extent, stride in zip(words.shape, words.stride(), strict=True):
        if extent == 1:
            continue
        if shape and strides[-1] == extent * stride:
            shape[-1] *= extent
            strides[-1] = stride
        else:
            shape.append(extent)
            strides.append(stride)
    return words.as_strided(shape, strides)


def as_transposed(words: torch.Tensor) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    """Return ([B, R, C], (stride_b, stride_c)) where a tensor's rows lie next to each other, else None."""
    shape, strides = tuple(words.shape), words.stride()
    if len(shape) == 2:
        shape, strides = (1, *shape), (0, *strides)
    if len(shape) != 3 or strides[1] != 1 or min(shape[1:]) < _MIN_EXTENT:
        return None
    if shape[0] > _MAX_BATCHES or max(shape) > _MAX_EXTENT:
        return None
    return (shape[0], shape[1], shape[2]), (strides[0], strides[2])


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
