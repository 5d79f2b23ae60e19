"""Torch tensors and Python values as bytes: the step from *tensor* to digest in the flow.

    tensor_parts(tensor)        what a tensor consists of: itself, or the pieces it stores
    tensor_bytes(part)          one piece's logical elements, row-major, as uint8 on the host
    digest_tensor(part)         (digest, leaf digests) of one piece
    python_value_parts(value)   the same for what is no tensor: numbers, strings, containers

    ""                                              strided, DTensor (the local shard), a collective's result
    .indices .values                                sparse COO, as stored: a tensor that was not coalesced stays so
    .crow_indices .col_indices .values              CSR, BSR
    .ccol_indices .row_indices .values              CSC, BSC
    .values .offsets [.lengths]                     nested, jagged layout
    .values .sizes                                  nested, strided layout: the components one after the other
    "" .scale .zero_point [.axis]                   quantized: the integers, then what gives them meaning
    .NAME                                           each tensor that a subclass names in `__tensor_flatten__`

Reading changes nothing and asks nothing of PyTorch that a program could see: a strided CPU tensor's
bytes are read at their address through numpy's array interface, so no operator is dispatched, no
mode is entered, no graph node is made, no version is bumped. Where an operator cannot be avoided
(sparse, nested, quantized, other devices), dispatch modes, function modes and autograd are off for
its duration. Hosts are little endian.

Long because every kind of tensor and value is taken apart here.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from bitcheck.digest import (
    LEAF_BYTES,
    digest_buffer,
    digest_bytes,
    digest_from_leaves,
    digest_header,
    digest_leaves,
    digest_memory,
    memory_at,
)
from bitcheck.errors import DigestError
from bitcheck.events import Kind
from bitcheck.hooks.native import native

Bytes = npt.NDArray[np.uint8]
Digest = tuple[bytes, bytes]
"""(digest, leaf digests)."""

HOST_CHUNK_BYTES = 1024 * LEAF_BYTES
"""Another device's memory is brought to the host in pieces of this size."""

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_WORD = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "|V16"}
"""How numpy moves an element of so many bytes."""
_COLUMNS = 32
"""So many columns of a transposed matrix are put in order at a time: what lies beside an element is still in the
processor's cache when its row comes. 3x faster than numpy's own order or PyTorch's copy at 1 MiB."""
_MIN_COLUMNS_BYTES = 32 * 1024
_MIN_ROWS = 64
"""Below these it does not pay."""
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_MAX_KINDS = 65_536
"""Dtypes and shapes that are known; beyond it they are looked at anew."""
_NO_FUNCTION: Any = torch._C.DisableTorchFunction
_is_functorch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

T = TypeVar("T")


class PlainValue(NamedTuple):
    """A Python value, or a numpy one, as what the digest covers."""

    dtype: str
    """`python.int`, `python.tuple`, `numpy.float64`, ..."""
    shape: tuple[int, ...]
    """() for a scalar, (n,) for a container of n, an array's shape."""
    data: bytes
    text: str
    """`repr`, for people; cut where it is long."""


# --- what a tensor consists of


def tensor_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the strided pieces that hold a tensor's bits, each with the suffix of its name.

    Raises DigestError where there are none: a meta, fake or lazy tensor, a batched one inside
    `vmap`, a wrapper subclass without `__tensor_flatten__`.
    """
    with _NO_FUNCTION():
        if (
            type(tensor) in _PLAIN_TYPES
            and tensor.layout is torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or _is_functorch(tensor))
        ):
            return [("", tensor)]
    with unseen():
        return list(_take_apart(tensor, ""))


@contextmanager
def unseen() -> Iterator[None]:
    """Keep operators from user's modes, from subclasses and from autograd."""
    with _NO_FUNCTION(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def _take_apart(tensor: torch.Tensor, suffix: str) -> Iterator[tuple[str, torch.Tensor]]:
    if _is_functorch(tensor):
        if not torch._C._functorch.is_gradtrackingtensor(tensor):
            raise DigestError(
                f"a tensor of shape {list(tensor.shape)} inside torch.func.vmap is one of a batch and has no bytes of "
                "its own; record the call around vmap instead"
            )
        yield from _take_apart(torch._C._functorch.get_unwrapped(tensor), suffix)
    elif tensor.layout is torch.jagged:
        for name in ("_values", "_offsets", "_lengths"):
            if (component := getattr(tensor, name)) is not None:
                yield from _take_apart(component, f"{suffix}.{name[1:]}")
    elif type(tensor) not in _PLAIN_TYPES and hasattr(tensor, "__tensor_flatten__"):
        yield from _take_subclass_apart(tensor, suffix)
    elif torch.nn.parameter.is_lazy(tensor) or tensor.is_meta or _is_fake(tensor):
        raise DigestError(_no_bytes(tensor))
    elif tensor.layout is torch.sparse_coo:
        yield f"{suffix}.indices", tensor._indices()
        yield f"{suffix}.values", tensor._values()
    elif tensor.layout in _COMPRESSED:
        for name in (*_COMPRESSED[tensor.layout], "values"):
            yield f"{suffix}.{name}", getattr(tensor, name)()
    elif tensor.is_nested:
        components = tensor.unbind()
        flat = [component.reshape(-1) for component in components]
        yield f"{suffix}.values", torch.cat(flat) if flat else torch.empty(0, dtype=tensor.dtype)
        yield f"{suffix}.sizes", tensor._nested_tensor_size()
    elif tensor.layout is not torch.strided:  # torch._mkldnn: blocked for one CPU, opaque
        yield suffix, tensor.to_dense()
    elif tensor.is_quantized:
        yield from _take_quantized_apart(tensor, suffix)
    else:
        yield suffix, tensor


def _take_subclass_apart(tensor: Any, suffix: str) -> Iterator[tuple[str, torch.Tensor]]:
    names, _ = tensor.__tensor_flatten__()
    inner = {name: value for name in names if isinstance(value := getattr(tensor, name), torch.Tensor)}
    if hasattr(tensor, "trigger_wait"):  # a functional collective's result: readable once the collective is done
        yield from _take_apart(tensor.trigger_wait(), suffix)
    elif list(inner) == ["_local_tensor"]:  # DTensor
        yield from _take_apart(inner["_local_tensor"], suffix)
    else:
        for name, value in inner.items():
            yield from _take_apart(value, f"{suffix}.{name.lstrip('_')}")


def _take_quantized_apart(tensor: torch.Tensor, suffix: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield suffix, tensor
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield f"{suffix}.scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)
        yield f"{suffix}.zero_point", torch.tensor(tensor.q_zero_point(), dtype=torch.int64)
    else:
        yield f"{suffix}.scale", tensor.q_per_channel_scales()
        yield f"{suffix}.zero_point", tensor.q_per_channel_zero_points()
        yield f"{suffix}.axis", torch.tensor(tensor.q_per_channel_axis(), dtype=torch.int64)


def _is_fake(tensor: torch.Tensor) -> bool:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def _no_bytes(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return (
            "a lazy parameter has no bytes to digest before the first forward gives it a shape; "
            "run one forward before recording starts"
        )
    kind = "fake" if _is_fake(tensor) else tensor.device.type
    return (
        f"a {kind} tensor ({dtype_name(tensor)}, shape {list(tensor.shape)}) has no bytes to digest; expected one "
        "whose storage is allocated: materialise it before recording starts"
    )


# --- bytes and digest of a piece


_dtype_names: dict[torch.dtype, str] = {}
_plain_dtypes: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
"""All dtypes but the quantized, whose tensors are more than their bytes."""


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype as the digest writes it: "bfloat16", "float8_e4m3fn", "bool"."""
    with _NO_FUNCTION():
        dtype = tensor.dtype
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def kind_of(tensor: torch.Tensor) -> Kind:
    """Return the kind of a strided tensor."""
    return dtype_name(tensor), tuple(tensor.shape), tensor.nbytes


class _Window:
    """Memory as numpy's array interface describes it; keeps the tensor alive as long as the array."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, interface: dict[str, Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = interface


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the logical elements of a strided tensor, row-major, as uint8 [numel * itemsize].

    A contiguous CPU tensor gives a read-only window on its own memory, to be read before the tensor
    changes; any other gives a copy. Conjugate and negative bits are resolved. Any dtype, stride,
    storage offset and alignment. Raises DigestError where the memory is not there: meta, fake, a
    storage that was freed (FSDP frees parameters between uses).
    """
    with _NO_FUNCTION():
        if not tensor.is_cpu:
            return _fetch(tensor)
        num_bytes = tensor.nbytes
        if num_bytes == 0:
            return np.empty(0, np.uint8)
        if not tensor.is_contiguous():
            data = _gather(tensor)
        else:
            address = _address(tensor, num_bytes)
            if address == 0:
                return np.zeros(num_bytes, np.uint8)
            interface = {"data": (address, True), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
            data = np.asarray(_Window(tensor, interface))
        if tensor.is_conj() or tensor.is_neg():
            data = _resolve(tensor, data)
        return data


def _address(tensor: torch.Tensor, span_bytes: int) -> int:
    """Return where a CPU tensor's first element lies; 0 for zeros that are not in memory.

    `span_bytes` reach from its first element to the end of its last.
    """
    try:
        address = tensor.data_ptr()
        end = tensor.storage_offset() * tensor.itemsize + span_bytes
        if address and end <= tensor.untyped_storage().nbytes():
            return address
    except RuntimeError:  # a wrapper: "Cannot access data pointer of Tensor that doesn't have storage"
        raise DigestError(_no_bytes(tensor)) from None
    if tensor._is_zerotensor():
        return 0
    raise DigestError(
        f"the storage of a {dtype_name(tensor)} tensor of shape {list(tensor.shape)} is freed or too small; expected "
        f"{end} bytes: record it while it is gathered"
    )


def _gather(tensor: torch.Tensor) -> Bytes:
    """Copy a CPU tensor of any strides to row-major order."""
    itemsize, shape = tensor.itemsize, tuple(tensor.shape)
    strides = [stride * itemsize for stride in tensor.stride()]
    span_bytes = _span_bytes(shape, strides, itemsize)
    address = _address(tensor, span_bytes)
    if address == 0:
        return np.zeros(tensor.nbytes, np.uint8)
    return np.frombuffer(_in_order(_view(address, span_bytes, shape, strides, itemsize)), np.uint8)


def _span_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from a tensor's first element to the end of its last, `strides` in bytes."""
    return itemsize + sum([(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)])


def _view(
    address: int, span_bytes: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> npt.NDArray[Any]:
    """Return memory as an array of any strides, dimensions of one element left out: numpy's are limited in number."""
    longer = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent > 1]
    extents, steps = zip(*longer, strict=True) if longer else ((), ())
    return np.ndarray(extents, _WORD[itemsize], memory_at(address, span_bytes), 0, steps)


def _in_order(view: npt.NDArray[Any]) -> bytes | memoryview:
    """Return the bytes of an array of any strides in row-major order, uint8 [nbytes]."""
    if view.nbytes >= _MIN_COLUMNS_BYTES and view.ndim > 1:
        *outer, inner = view.strides
        num_columns = view.shape[-1]
        if min(outer) < inner and view.size >= _MIN_ROWS * num_columns:
            data = np.empty(view.shape, view.dtype)
            for start in range(0, num_columns, _COLUMNS):
                columns = slice(start, start + _COLUMNS)
                data[..., columns] = view[..., columns]
            return data.reshape(-1).view(np.uint8).data
    return view.tobytes()


def _resolve(tensor: torch.Tensor, data: Bytes) -> Bytes:
    """Return the bytes that a tensor with its conjugate or negative bit set stands for."""
    dtype = tensor.dtype
    word = f"<u{tensor.itemsize // 2 if dtype.is_complex else tensor.itemsize}"
    words = data.copy().view(word)
    sign = words.dtype.type(1 << (8 * words.itemsize - 1))
    if tensor.is_neg():
        if dtype.is_floating_point or dtype.is_complex:
            words ^= sign
        else:
            np.negative(words, out=words)
    if tensor.is_conj():
        words[1::2] ^= sign
    return words.view(np.uint8)


def _chunks(tensor: torch.Tensor) -> Iterator[Bytes]:
    """Yield a tensor's bytes in order, each piece but the last of HOST_CHUNK_BYTES."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), HOST_CHUNK_BYTES):
        yield flat[start : start + HOST_CHUNK_BYTES].cpu().numpy()


def _fetch(tensor: torch.Tensor) -> Bytes:
    """Copy a tensor of another device to the host."""
    if tensor.is_meta or _is_fake(tensor):
        raise DigestError(_no_bytes(tensor))
    with unseen():
        data = np.empty(tensor.nbytes, np.uint8)
        start = 0
        for chunk in _chunks(tensor):
            data[start : start + chunk.size] = chunk
            start += chunk.size
        return data


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return what identifies a tensor's storage, None for a tensor that has none of its own."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):
        return None


class _PlainKind(NamedTuple):
    """What all plain tensors of one dtype and shape have in common; the same objects for each of them."""

    kind: Kind
    itemsize: int
    is_complex: bool
    header: bytes


class _PlainKinds(dict[tuple[torch.dtype, torch.Size], _PlainKind | None]):
    """(dtype, shape) -> what is known of such tensors; None where one is more than its bytes."""

    def __missing__(self, key: tuple[torch.dtype, torch.Size]) -> _PlainKind | None:
        if len(self) >= _MAX_KINDS:
            self.clear()
        dtype, size = key
        name, shape = _plain_dtypes.get(dtype), tuple(size)
        num_bytes = math.prod(shape) * dtype.itemsize
        kind = None
        if name is not None:
            header = digest_header(name, shape, num_bytes)
            kind = _PlainKind((name, shape, num_bytes), dtype.itemsize, dtype.is_complex, header)
        self[key] = kind
        return kind


_plain_kinds = _PlainKinds()
_STRIDED = torch.strided


def digest_plain_portably(tensor: torch.Tensor) -> tuple[Kind, bytes, bytes] | None:
    """Return (kind, digest, leaf digests) of a plain CPU tensor; None for any other.

    What nearly every tensor of a program is, so it is asked in as few words as can be; another takes the
    long way. To be called with `__torch_function__` off.
    """
    if type(tensor) not in _PLAIN_TYPES or not tensor.is_cpu or tensor.layout is not _STRIDED or tensor.is_nested:
        return None
    plain = _plain_kinds[tensor.dtype, tensor.shape]
    if plain is None:
        return None
    kind, itemsize, is_complex, header = plain
    num_bytes = kind[2]
    if not num_bytes or tensor.is_neg() or (is_complex and tensor.is_conj()) or _is_functorch(tensor):
        return None
    address, span_bytes = tensor.data_ptr(), num_bytes
    is_contiguous = tensor.is_contiguous()
    if not is_contiguous:
        strides = [stride * itemsize for stride in tensor.stride()]
        span_bytes = _span_bytes(kind[1], strides, itemsize)
    if not address or tensor.storage_offset() * itemsize + span_bytes > tensor.untyped_storage().nbytes():
        return None
    if is_contiguous:
        return kind, *digest_memory(header, address, num_bytes)
    return kind, *digest_buffer(header, _in_order(_view(address, span_bytes, kind[1], strides, itemsize)))


def plain_on_device_portably(tensor: torch.Tensor) -> Kind | None:
    """Return the kind of a CUDA tensor that is no more than its elements; None for any other.

    As `digest_plain`, for what a digester of the device can take as it is.
    """
    if type(tensor) not in _PLAIN_TYPES or not tensor.is_cuda or tensor.layout is not _STRIDED or tensor.is_nested:
        return None
    plain = _plain_kinds[tensor.dtype, tensor.shape]
    return plain[0] if plain is not None and not _is_functorch(tensor) else None


digest_plain: Callable[[torch.Tensor], tuple[Kind, bytes, bytes] | None] = digest_plain_portably
plain_on_device: Callable[[torch.Tensor], Kind | None] = plain_on_device_portably
if native is not None:
    native.configure(
        digest_header=digest_header,
        tensor_type=torch.Tensor,
        parameter_type=torch.nn.Parameter,
        strided_layout=_STRIDED,
        plain_kinds=_plain_kinds,
        is_functorch=_is_functorch,
    )
    digest_plain, plain_on_device = native.digest_plain, native.plain_on_device


def digest_tensor(tensor: torch.Tensor) -> Digest:
    """Return (digest, leaf digests) of one strided piece as it is at this moment, any device.

    Raises DigestError as `tensor_bytes` does.
    """
    with _NO_FUNCTION():
        shape = tensor.shape
        if tensor.is_cpu or tensor.is_meta:
            return digest_bytes(dtype_name(tensor), shape, tensor_bytes(tensor))
        with unseen():
            leaves = b"".join(map(digest_leaves, _chunks(tensor)))
            return digest_from_leaves(dtype_name(tensor), shape, tensor.nbytes, leaves), leaves


def digest_in_part(tensor: torch.Tensor, chance: npt.NDArray[np.uint8]) -> Digest:
    """Return (digest, leaf digests) of a plain CPU tensor with zeros where `chance`, [*shape], is not 0."""
    data = tensor_bytes(tensor).copy()
    data.reshape(-1, tensor.itemsize)[chance.reshape(-1) != 0] = 0
    return digest_bytes(dtype_name(tensor), tensor.shape, data)


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a strided tensor covers, from and up to."""
    itemsize = tensor.itemsize
    begin = int(tensor.storage_offset()) * itemsize
    if not tensor.numel():
        return begin, begin
    return begin, begin + _span_bytes(tensor.shape, [itemsize * int(stride) for stride in tensor.stride()], itemsize)


# --- Python values

_TEXT_LIMIT = 200
_DEPTH_LIMIT = 64


def python_value_parts(value: object) -> list[tuple[str, torch.Tensor | PlainValue]]:
    """Return what a value that is no tensor consists of, each piece with the suffix of its name.

    A number, None, a string, bytes, a numpy value, an Enum, a torch dtype or device, or a container
    of these (tuple, list, dict, set, nested) is one piece, "", told apart by type and bits: 1, 1.0
    and True differ, (1,) and [1] differ, a dict's order does not count. A container that holds tensors
    somewhere is its own shape and keys, then its members as `.0`, `.key`, ...; the tensors in it
    are to be taken apart by `tensor_parts`. Raises DigestError for any other type: its `repr` may
    hold an address, so nothing exact can be said of it.
    """
    if not _holds_tensor(value, 0):
        return [("", _plain(value))]
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if isinstance(value, dict):
        members = [(_member_name(key), member) for key, member in value.items()]
        own = _encode_many([_encode(key, 0) for key in value], is_ordered=False)
        outline = PlainValue("python.dict", (len(value),), own, f"{len(value)} keys")
    else:
        assert isinstance(value, (list, tuple))
        members = [(str(index), member) for index, member in enumerate(value)]
        outline = PlainValue(_container_name(value), (len(value),), b"", f"{len(value)} members")
    parts: list[tuple[str, torch.Tensor | PlainValue]] = [("", outline)]
    for name, member in members:
        parts.extend((f".{name}{suffix}", part) for suffix, part in python_value_parts(member))
    return parts


def digest_value(value: PlainValue) -> Digest:
    """Return (digest, leaf digests) of a Python value."""
    return digest_bytes(value.dtype, value.shape, np.frombuffer(value.data, np.uint8))


def _member_name(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


def _holds_tensor(value: object, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth > _DEPTH_LIMIT:
        raise DigestError(f"a value is nested deeper than {_DEPTH_LIMIT} containers, or holds itself; flatten it")
    if isinstance(value, dict):
        return any(_holds_tensor(member, depth + 1) for member in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(member, depth + 1) for member in value)
    return False


def _plain(value: object) -> PlainValue:
    dtype, shape, data = _encode(value, 0)
    text = repr(value)
    return PlainValue(dtype, shape, data, text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 3] + "...")


Encoded = tuple[str, tuple[int, ...], bytes]


def _encode(value: object, depth: int) -> Encoded:
    """Return (dtype, shape, bytes): equal exactly where type and bits are."""
    if depth > _DEPTH_LIMIT:
        raise DigestError(f"a value is nested deeper than {_DEPTH_LIMIT} containers; flatten it")
    if value is None:
        return "python.none", (), b""
    if isinstance(value, Enum):
        name = f"{type(value).__qualname__}.{value.name}"
        return "python.enum", (), name.encode()
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise DigestError("a numpy array of Python objects has no exact bytes; expected a numeric dtype")
        little = value.dtype.newbyteorder("<")
        return f"numpy.{value.dtype.name}", value.shape, np.asarray(value).astype(little, copy=False).tobytes()
    encoder = _SCALARS.get(type(value))
    if encoder is not None:
        name, encode = encoder
        return name, (), encode(value)
    if isinstance(value, dict):
        pairs = [_encode_many([_encode(key, depth + 1), _encode(member, depth + 1)]) for key, member in value.items()]
        return "python.dict", (len(value),), _join(sorted(pairs))
    if isinstance(value, (set, frozenset)):
        name = f"python.{'set' if isinstance(value, set) else 'frozenset'}"
        return name, (len(value),), _encode_many([_encode(member, depth + 1) for member in value], is_ordered=False)
    if isinstance(value, (list, tuple)):
        members = [_encode(member, depth + 1) for member in value]
        return _container_name(value), (len(value),), _encode_many(members)
    raise DigestError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} has no exact bytes; expected numbers, "
        "strings, tensors, arrays or containers of them: hand over its state_dict() instead"
    )


def _container_name(value: list[Any] | tuple[Any, ...]) -> str:
    return "python.list" if isinstance(value, list) else "python.tuple"


def _encode_many(members: list[Encoded], is_ordered: bool = True) -> bytes:
    """Return members as bytes that no other sequence of members gives."""
    encoded = [_join([dtype.encode(), ",".join(map(str, shape)).encode(), data]) for dtype, shape, data in members]
    return _join(encoded if is_ordered else sorted(encoded))


def _join(pieces: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(piece)) + piece for piece in pieces)


def _encode_int(value: int) -> bytes:
    """Two's complement, little endian, no longer than needed: -128 to 127 are one byte."""
    bits = (value if value >= 0 else ~value).bit_length()
    return value.to_bytes(bits // 8 + 1, "little", signed=True)


_SCALARS: dict[type, tuple[str, Callable[[Any], bytes]]] = {
    bool: ("python.bool", lambda value: bytes([value])),
    int: ("python.int", _encode_int),
    float: ("python.float", lambda value: struct.pack("<d", value)),
    complex: ("python.complex", lambda value: struct.pack("<dd", value.real, value.imag)),
    str: ("python.str", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: ("python.bytes", bytes),
    bytearray: ("python.bytes", bytes),
    torch.dtype: ("torch.dtype", lambda value: str(value).encode()),
    torch.device: ("torch.device", lambda value: str(value).encode()),
    torch.layout: ("torch.layout", lambda value: str(value).encode()),
}
