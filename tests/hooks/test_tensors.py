from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bitcheck.digest import digest_bytes
from bitcheck.errors import DigestError
from bitcheck.hooks import tensors
from bitcheck.hooks.tensors import (
    PlainValue,
    digest_plain,
    digest_tensor,
    digest_value,
    dtype_name,
    python_value_parts,
    tensor_bytes,
    tensor_parts,
)
from tests.bitcheck.digest_definition import ITEMSIZE, define_digest, pattern, vector_bytes

VECTORS = json.loads((Path(__file__).parents[1] / "bitcheck/digest_vectors.json").read_text(encoding="utf-8"))[
    "vectors"
]
DTYPES = sorted(
    {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)},
)
MULTIBYTE = ("int16", "int32", "int64", "uint16", "uint32", "uint64")
NOT_MOVABLE = ("q", "bits", "complex32", *(f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 8)))
MOVABLE = [name for name in DTYPES if name in MULTIBYTE or not name.startswith(NOT_MOVABLE)]
"""Dtypes whose tensors PyTorch itself copies, without a warning."""


def from_bytes(data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return a tensor that holds exactly these bytes, at an address that no dtype is aligned to."""
    room = torch.zeros(len(data) + 16, dtype=torch.uint8)
    room[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return room[: len(data)].view(getattr(torch, dtype)).reshape(shape)


def logical_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in row-major order, one by one, without what is tested here."""
    flat = [tensor[index] for index in np.ndindex(*tensor.shape)]
    return b"".join(element.clone().reshape(1).view(torch.uint8).numpy().tobytes() for element in flat)


def hex_parts(tensor: torch.Tensor) -> dict[str, str]:
    return {suffix: digest_tensor(part)[0].hex() for suffix, part in tensor_parts(tensor)}


def expected_digest(tensor: torch.Tensor) -> str:
    return define_digest(dtype_name(tensor), list(tensor.shape), logical_bytes(tensor))[1]


# --- dtypes and strides


def test_the_published_vectors_cover_every_dtype_that_torch_has() -> None:
    assert set(DTYPES) <= set(ITEMSIZE)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_tensor_with_the_bytes_of_a_vector_has_its_digest(vector: dict[str, Any]) -> None:
    tensor = from_bytes(vector_bytes(vector), vector["dtype"], vector["shape"])
    digest, leaves = digest_tensor(tensor)
    assert digest.hex() == vector["digest"]
    assert leaves.hex() == "".join(vector["leaves"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read_through_any_stride(dtype: str) -> None:
    itemsize = ITEMSIZE[dtype]
    data = pattern(24 * itemsize, dtype)
    elements = [data[i * itemsize : (i + 1) * itemsize] for i in range(24)]
    tensor = from_bytes(data, dtype, [4, 6])
    transposed = b"".join(elements[6 * row + column] for column in range(6) for row in range(4))
    assert tensor_bytes(tensor.t()).tobytes() == transposed
    sliced = b"".join(elements[6 * row + column] for row in (1, 2, 3) for column in (1, 3, 5))
    assert tensor_bytes(tensor[1:, 1::2]).tobytes() == sliced
    expanded = b"".join(elements[6] for _ in range(5))
    assert tensor_bytes(tensor[1, 0].expand(5)).tobytes() == expanded


@given(data=st.data(), dtype=st.sampled_from(MOVABLE))
def test_a_strided_tensor_has_the_digest_of_its_contiguous_copy(data: st.DataObject, dtype: str) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    tensor = from_bytes(pattern(math.prod(shape) * ITEMSIZE[dtype], dtype), dtype, shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.dim()))))
    for dim in range(tensor.dim()):
        step = data.draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(data.draw(st.integers(0, 2)), None, step),)]
    assert hex_parts(tensor) == hex_parts(tensor.contiguous()) == {"": expected_digest(tensor)}


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_a_large_transposed_tensor_is_read_as_a_small_one_is(dtype: str) -> None:
    shape = [400, 700]
    tensor = from_bytes(pattern(math.prod(shape) * ITEMSIZE[dtype]), dtype, shape)
    moved = tensor.view(torch.uint8).reshape(400, 700, ITEMSIZE[dtype]).permute(1, 0, 2).contiguous()
    assert tensor_bytes(tensor.t()).tobytes() == moved.numpy().tobytes()


@given(st.data())
def test_one_flipped_bit_of_a_tensor_changes_its_digest(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    size = math.prod(shape) * ITEMSIZE[dtype]
    original = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    bit = data.draw(st.integers(0, 8 * size - 1))
    tensor = from_bytes(bytes(original), dtype, shape)
    original[bit // 8] ^= 1 << bit % 8
    assert hex_parts(tensor) != hex_parts(from_bytes(bytes(original), dtype, shape))


@given(st.data())
def test_another_dtype_or_shape_of_equal_bytes_is_another_digest(data: st.DataObject) -> None:
    dtype, other = data.draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=2, unique=True))
    blob = pattern(96)
    digest = hex_parts(from_bytes(blob, dtype, [-1]))
    assert digest != hex_parts(from_bytes(blob, other, [-1]))
    assert digest != hex_parts(from_bytes(blob, dtype, [1, -1]))


def test_a_flipped_expanded_or_offset_tensor_is_its_logical_elements() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    for view in (
        tensor.flip(0),
        tensor.T,
        tensor[2, 1].expand(3, 3),
        tensor[1:3, ::2],
        tensor.as_strided((3, 3), (1, 2)),
    ):
        assert hex_parts(view) == {"": expected_digest(view)}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_a_large_transposed_tensor_is_its_logical_elements_to_the_last_column(dtype: torch.dtype) -> None:
    numbers = torch.arange(3 * 200 * 165).remainder(127).view(3, 200, 165).to(dtype)
    for view in (
        numbers.transpose(1, 2),
        numbers[:, :, :100].transpose(1, 2),
        numbers.permute(2, 1, 0),
        numbers.permute(1, 2, 0),
        numbers[:, 1:].transpose(0, 1),
        numbers.view(-1)[::2],
        numbers[0].t().expand(2, 165, 200),
    ):
        assert not view.is_contiguous()
        whole = view.contiguous()
        assert tensor_bytes(view).tobytes() == whole.view(-1).view(torch.uint8).numpy().tobytes()
        assert digest_plain(view) == digest_plain(whole)


def test_a_tensor_at_an_odd_address_is_read_exactly() -> None:
    raw = bytearray(pattern(4 * 10 + 1))
    tensor = torch.frombuffer(raw, dtype=torch.float32, offset=1)
    assert tensor.data_ptr() % 4 == 1
    assert tensor_bytes(tensor).tobytes() == bytes(raw[1:])
    assert tensor_bytes(tensor.view(2, 5).t()).tobytes() == struct.pack(
        "<10f", *tensor.view(2, 5).t().flatten().tolist()
    )


# --- bits that other comparisons do not see


def test_signed_zeros_and_nan_payloads_differ_where_torch_equal_sees_none() -> None:
    zeros = torch.zeros(4)
    negative = torch.tensor([0.0, -0.0, 0.0, 0.0])
    assert torch.equal(zeros, negative)
    assert hex_parts(zeros) != hex_parts(negative)
    quiet, payload = (from_bytes(struct.pack("<I", bits), "float32", [1]) for bits in (0x7FC00000, 0x7FC00001))
    assert torch.isnan(quiet) and torch.isnan(payload)
    assert hex_parts(quiet) != hex_parts(payload)


def test_conjugate_and_negative_bits_are_resolved() -> None:
    values = torch.tensor([1 + 2j, -0.0 - 0.0j, complex("nan"), 3 - 4j], dtype=torch.complex64)
    for dtype in (torch.complex64, torch.complex128):
        conj = values.to(dtype).conj()
        assert conj.is_conj()
        assert tensor_bytes(conj).tobytes() == tensor_bytes(conj.resolve_conj()).tobytes()
        assert conj.imag.is_neg()
        assert tensor_bytes(conj.imag).tobytes() == tensor_bytes(conj.imag.resolve_neg()).tobytes()
        assert tensor_bytes(conj[::2]).tobytes() == tensor_bytes(conj[::2].resolve_conj()).tobytes()
    both = torch._neg_view(values.conj())
    assert tensor_bytes(both).tobytes() == tensor_bytes(both.resolve_conj().resolve_neg()).tobytes()
    integers = torch._neg_view(torch.tensor([1, -2, 0], dtype=torch.int32))
    assert tensor_bytes(integers).tobytes() == struct.pack("<3i", -1, 2, 0)


def test_resolving_a_conjugate_bit_leaves_the_tensor_as_it_was() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    digest_tensor(values.conj())
    assert values.tolist() == [1 + 2j, 3 - 4j]


def test_zeros_that_are_not_in_memory_are_zeros() -> None:
    zeros = torch._efficientzerotensor((2, 3))
    assert hex_parts(zeros) == hex_parts(torch.zeros(2, 3))
    assert hex_parts(zeros.t()) == hex_parts(torch.zeros(3, 2))


# --- layouts, subclasses, wrappers


def parts_of(tensor: torch.Tensor) -> dict[str, list[Any]]:
    return {suffix: part.tolist() for suffix, part in tensor_parts(tensor)}


@pytest.fixture
def allow_prototypes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_sparse_coo_tensor_is_taken_apart_as_it_is_stored() -> None:
    indices, values = torch.tensor([[1, 0, 1], [2, 1, 2]]), torch.tensor([1.0, 2.0, 3.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2, 4), check_invariants=True)
    assert parts_of(sparse) == {".indices": indices.tolist(), ".values": [1.0, 2.0, 3.0]}
    assert not sparse.is_coalesced()
    assert parts_of(sparse.coalesce()) == {".indices": [[0, 1], [1, 2]], ".values": [2.0, 4.0]}


@pytest.mark.usefixtures("allow_prototypes")
def test_compressed_sparse_tensors_are_taken_apart() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    rows = {".crow_indices": [0, 1, 2], ".col_indices": [1, 0], ".values": [1.0, 2.0]}
    columns = {".ccol_indices": [0, 1, 2], ".row_indices": [1, 0], ".values": [2.0, 1.0]}
    assert parts_of(dense.to_sparse_csr()) == rows
    assert parts_of(dense.to_sparse_csc()) == columns
    assert list(parts_of(dense.to_sparse_bsr((1, 1)))) == list(rows)
    assert list(parts_of(dense.to_sparse_bsc((1, 1)))) == list(columns)


@pytest.mark.usefixtures("allow_prototypes")
def test_nested_tensors_of_both_layouts_are_taken_apart() -> None:
    rows = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert parts_of(jagged) == {".values": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], ".offsets": [0, 1, 3]}
    narrowed = torch.nested.narrow(
        torch.arange(6.0).view(2, 3), 1, torch.tensor([0, 1]), torch.tensor([2, 1]), torch.jagged
    )
    assert list(parts_of(narrowed)) == [".values", ".offsets", ".lengths"]
    strided = torch.nested.nested_tensor(rows)
    assert parts_of(strided) == {".values": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], ".sizes": [[1, 2], [2, 2]]}
    turned = strided.transpose(1, 2)
    assert parts_of(turned) == {".values": [1.0, 2.0, 3.0, 5.0, 4.0, 6.0], ".sizes": [[2, 1], [2, 2]]}


@pytest.mark.usefixtures("allow_prototypes")
def test_a_quantized_tensor_is_its_integers_and_what_gives_them_meaning() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    quantized = torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8)
    parts = dict(tensor_parts(quantized))
    assert tensor_bytes(parts[""]).tobytes() == tensor_bytes(quantized.int_repr()).tobytes()
    assert (dtype_name(parts[""]), parts[".scale"].item(), parts[".zero_point"].item()) == ("qint8", 0.5, 3)
    assert hex_parts(quantized) != hex_parts(torch.quantize_per_tensor(2 * dense, 1.0, 3, torch.qint8))
    channels = torch.quantize_per_channel(dense, torch.tensor([0.5, 1.0]), torch.tensor([0, 1]), 1, torch.qint8)
    parts = dict(tensor_parts(channels))
    assert parts[".scale"].tolist() == [0.5, 1.0]
    assert (parts[".zero_point"].tolist(), parts[".axis"].item()) == ([0, 1], 1)


def test_a_blocked_cpu_layout_is_its_dense_elements() -> None:
    dense = torch.arange(6.0).view(2, 3)
    assert hex_parts(dense.to_mkldnn()) == hex_parts(dense)


def test_a_subclass_is_the_tensors_it_names() -> None:
    inner = TwoTensor(torch.ones(2), torch.zeros(3)[:2])
    assert parts_of(inner) == {".a": [1.0, 1.0], ".b": [0.0, 0.0]}
    assert list(parts_of(TwoTensor(inner, inner))) == [".a.a", ".a.b", ".b.a", ".b.b"]
    assert list(parts_of(torch.nn.Parameter(inner))) == [".a", ".b"]


def test_a_subclass_with_storage_of_its_own_is_a_plain_tensor() -> None:
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: object, **kwargs: object) -> Any:
            raise AssertionError("recording must not call into a user's subclass")

    tensor = torch.arange(3.0).as_subclass(Named)
    (part,) = tensor_parts(tensor)
    assert digest_tensor(part[1])[0].hex() == expected_digest(torch.arange(3.0))


def test_a_dtensor_is_its_local_shard() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        local = torch.arange(6.0).view(2, 3)
        sharded = DTensor.from_local(local, DeviceMesh("cpu", [0]), [Shard(0)])
        assert hex_parts(sharded) == hex_parts(torch.nn.Parameter(sharded)) == hex_parts(local)
    finally:
        dist.destroy_process_group()


def test_the_result_of_a_functional_collective_is_waited_for() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        reduced = all_reduce(torch.arange(6.0), "sum", dist.group.WORLD)
        assert isinstance(reduced, AsyncCollectiveTensor)
        assert hex_parts(reduced) == hex_parts(torch.arange(6.0))
    finally:
        dist.destroy_process_group()


def test_a_tensor_inside_func_grad_is_the_value_that_it_wraps() -> None:
    seen = []

    def squares(x: torch.Tensor) -> torch.Tensor:
        seen.append(hex_parts(x))
        return (x * x).sum()

    torch.func.grad(torch.func.grad(squares))(torch.tensor(3.0))
    assert seen == [hex_parts(torch.tensor(3.0))]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def freed() -> torch.Tensor:
    tensor = torch.arange(5.0)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.arange(6.0).view(2, 3).t()
    tensor.untyped_storage().resize_(20)
    return tensor


def wrapper() -> torch.Tensor:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: object, **kwargs: object) -> Any:
            raise AssertionError("recording must not call into a user's subclass")

    return torch.Tensor._make_wrapper_subclass(Wrapper, (3,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(3, device="meta"), "a meta tensor (float32, shape [3]) has no bytes"),
        (fake, "a fake tensor (float32, shape [3]) has no bytes"),
        (lambda: torch.nn.LazyLinear(3).weight, "a lazy parameter has no bytes"),
        (freed, "is freed or too small"),
        (cut, "is freed or too small"),
        (wrapper, "is freed or too small"),
    ],
)
def test_a_tensor_without_bytes_is_refused_in_one_sentence(make: Any, message: str) -> None:
    tensor = make()
    with pytest.raises(DigestError) as caught:
        hex_parts(tensor)
    assert message in str(caught.value)


def test_a_tensor_inside_vmap_is_refused() -> None:
    with pytest.raises(DigestError, match=r"inside torch\.func\.vmap"):
        torch.vmap(lambda x: hex_parts(x) and x)(torch.ones(3))
    with pytest.raises(DigestError, match="has no bytes to digest"):
        torch.vmap(lambda x: digest_tensor(x) and x)(torch.ones(3))


# --- reading changes nothing


class SeesOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("allow_prototypes")
def test_no_mode_of_the_program_sees_a_tensor_being_read() -> None:
    leaf = torch.randn(300, 200, requires_grad=True)
    samples = [
        leaf,
        leaf.t(),
        leaf * 2,
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        TwoTensor(torch.ones(3), torch.ones(3)),
        torch.ones(3).to_mkldnn(),
    ]
    operators, functions = SeesOperators(), SeesFunctions()
    with operators, functions:
        for sample in samples:
            for _, part in tensor_parts(sample):
                digest_tensor(part)
                dtype_name(part)
    assert (operators.seen, functions.seen) == ([], [])


def test_reading_bumps_no_version_and_makes_no_graph() -> None:
    leaf = torch.randn(300, 200, requires_grad=True)
    result = leaf * 2
    versions = leaf._version, result._version
    graph = result.grad_fn
    for tensor in (leaf, result, result.t()):
        for _, part in tensor_parts(tensor):
            digest_tensor(part)
    assert (leaf._version, result._version) == versions
    assert result.grad_fn is graph
    result.sum().backward()


@pytest.mark.usefixtures("allow_prototypes")
def test_the_parts_of_a_tensor_that_needs_gradients_have_no_graph() -> None:
    composite = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]
    for tensor in composite:
        parts = tensor_parts(tensor.requires_grad_())
        assert [part.grad_fn for _, part in parts] == [None] * len(parts)


def test_tensors_are_read_in_and_from_inference_mode() -> None:
    outside = torch.arange(3.0)
    with torch.inference_mode():
        inside = torch.arange(3.0)
        assert hex_parts(inside) == hex_parts(outside)
    assert hex_parts(inside) == hex_parts(outside)


def test_a_window_on_a_tensor_cannot_write_to_it_and_keeps_it_alive() -> None:
    window = tensor_bytes(torch.full((1000,), 7, dtype=torch.uint8))
    torch.full((1000,), 8, dtype=torch.uint8)
    assert not window.flags.writeable
    assert set(window.tolist()) == {7}


# --- other devices


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(70, 50),
        lambda: torch.randn(50, 70).t(),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
    ],
)
def test_the_way_of_other_devices_gives_the_same_digest(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = make()
    expected = digest_tensor(tensor)
    monkeypatch.setattr(tensors, "HOST_CHUNK_BYTES", 16 * 1024 // 4)
    chunks = list(tensors._chunks(tensor))
    assert b"".join(chunk.tobytes() for chunk in chunks) == tensor_bytes(tensor).tobytes()
    assert tensors._fetch(tensor).tobytes() == tensor_bytes(tensor).tobytes()
    monkeypatch.setattr(tensors, "HOST_CHUNK_BYTES", 16 * 1024)
    assert b"".join(map(tensors.digest_leaves, tensors._chunks(tensor))) == expected[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MOVABLE)
def test_a_tensor_on_a_gpu_has_the_digest_of_its_copy_on_the_host(dtype: str) -> None:
    tensor = from_bytes(pattern(9000 * ITEMSIZE[dtype], dtype), dtype, [90, 100])
    on_device = tensor.cuda()
    assert digest_tensor(on_device) == digest_tensor(tensor)
    assert digest_tensor(on_device.t()) == digest_tensor(tensor.t())
    assert digest_tensor(on_device[1:, 1::3]) == digest_tensor(tensor[1:, 1::3])


# --- Python values


class Colour(Enum):
    RED = 1
    BLUE = 2


DISTINCT = [
    *(None, False, True, 0, 1, -1, 127, 128, -128, -129, 2**53, 2**53 + 1, 2**200),
    *(0.0, -0.0, 1.0, float("inf"), math.nextafter(1.0, 2.0), 1j, complex(-0.0, 1)),
    *("", "1", "None", b"", b"1", torch.float32, torch.bfloat16, torch.device("cpu"), Colour.RED, Colour.BLUE),
    *((), [], {}, (1,), [1], (1, 1), ((1,), 1), (1, (1,)), [None], [[]], [()], ("a", "bc"), ("ab", "c")),
    *(("apython.strb", "c"), ("a", "bpython.strc")),
    *({"a": 1}, {"a": 1.0}, {"b": 1}, {1}, frozenset({1})),
    *(np.float64(1.0), np.float32(1.0), np.array([1.0]), np.array([[1.0]])),
]


def value_hex(value: object) -> str:
    ((suffix, part),) = python_value_parts(value)
    assert suffix == "" and isinstance(part, PlainValue)
    return digest_value(part)[0].hex()


def test_values_of_another_type_or_other_bits_never_share_a_digest() -> None:
    digests = [value_hex(value) for value in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)


@given(st.integers() | st.integers(1, 40).map(lambda n: -(2 ** (4 * n - 1))))
def test_an_integer_of_any_size_is_twos_complement_and_round_trips(value: int) -> None:
    ((_, part),) = python_value_parts(value)
    assert isinstance(part, PlainValue)
    assert (part.dtype, part.shape, part.text) == ("python.int", (), repr(value))
    assert int.from_bytes(part.data, "little", signed=True) == value
    assert len(part.data) == 1 or int.from_bytes(part.data[:-1], "little", signed=True) != value


@given(st.floats(), st.floats())
def test_floats_agree_exactly_where_their_bits_do(first: float, second: float) -> None:
    assert (value_hex(first) == value_hex(second)) == (struct.pack("<d", first) == struct.pack("<d", second))


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@given(NESTED, NESTED)
def test_nested_values_agree_exactly_where_their_text_does(first: object, second: object) -> None:
    if repr(first) == repr(second) and "nan" not in repr(first):
        assert value_hex(first) == value_hex(second)
    elif not (isinstance(first, dict) or "{" in repr(first) or "nan" in repr(first)):
        assert value_hex(first) != value_hex(second)


def test_the_order_of_a_dict_or_set_does_not_count() -> None:
    assert value_hex({"a": 1, "b": 2}) == value_hex({"b": 2, "a": 1})
    assert value_hex({"a": 1, "b": 2}) != value_hex({"a": 2, "b": 1})
    assert value_hex({8, 0}) == value_hex({0, 8})  # one hash bucket: iterated in the order of insertion


def test_a_container_with_tensors_gives_its_outline_and_each_member() -> None:
    steps = torch.ones(2)
    parts = dict(python_value_parts({"dirs": [steps, None], "al": (0.5, 2), 3: "x"}))
    assert list(parts) == ["", ".dirs", ".dirs.0", ".dirs.1", ".al", ".3"]
    assert parts[".dirs.0"] is steps
    assert isinstance(parts[".al"], PlainValue) and parts[".al"].dtype == "python.tuple"
    shorter = dict(python_value_parts({"dirs": [steps], "al": (0.5, 2), 3: "x"}))
    assert parts[".dirs"] != shorter[".dirs"]


def test_a_float_is_digested_as_its_eight_bytes_under_its_type() -> None:
    expected = digest_bytes("python.float", (), np.frombuffer(struct.pack("<d", 3e-4), np.uint8))[0]
    assert value_hex(3e-4) == expected.hex()


def test_the_text_of_a_long_value_is_cut() -> None:
    ((_, part),) = python_value_parts("x" * 1000)
    assert isinstance(part, PlainValue)
    assert len(part.text) == 200 and part.text.endswith("...")


def looped() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a value of type builtins.object has no exact bytes"),
        ([lambda: 1], "a value of type builtins.function has no exact bytes"),
        (np.array([object()]), "a numpy array of Python objects"),
        (looped(), "nested deeper than 64"),
    ],
)
def test_a_value_without_exact_bytes_is_refused_in_one_sentence(value: object, message: str) -> None:
    with pytest.raises(DigestError) as caught:
        python_value_parts(value)
    assert message in str(caught.value)
