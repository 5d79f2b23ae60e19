"""Tiles of 1x128, 128x1 and 128x128 against plain PyTorch, bit for bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from bitcheck.reference_runs.kernels import casts
from bitcheck.reference_runs.kernels.quantise import (
    Quantised,
    quantise_columns,
    quantise_rows,
    quantise_weight,
    reference_columns,
    reference_rows,
    reference_weight,
    round_rows,
)
from bitcheck.reference_runs.kernels.schedule import reference_schedule, schedule_groups

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # numpy, on NaN


@triton.jit
def _cast_kernel(x_ptr, code_ptr, n, BLOCK: tl.constexpr, BY_BITS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(code_ptr + at, casts.to_e4m3(x, BY_BITS), mask=at < n)


def _cast(x: torch.Tensor, by_bits: bool = True) -> torch.Tensor:
    code = torch.full(x.shape, 0xAA, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)
    _cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, code, x.numel(), BLOCK=4096, BY_BITS=by_bits)
    return code.view(torch.uint8)


def _edges(device: str) -> torch.Tensor:
    """Every e4m3 value, every midpoint between neighbours, the float32 just above and below; NaN, inf, tiny."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, middles])
    bits = points.view(torch.int32)
    near = torch.cat([points, (bits + 1).view(torch.float32), (bits - 1).clamp(min=0).view(torch.float32)])
    odd = torch.tensor([float("nan"), float("inf"), 448.1, 463.9, 464.0, 1e38, 1e-45, 2.0**-10, 0.0])
    return torch.cat([near, -near, odd, -odd]).to(device)


def _reference_codes(x: torch.Tensor) -> torch.Tensor:
    codes = casts.reference_cast(x).view(torch.uint8)
    return torch.where(x.isnan(), codes & 0x80 | 0x7F, codes)


def test_the_cast_by_bits_agrees_with_torch_on_every_value_and_every_tie(device: str) -> None:
    x = _edges(device)
    assert torch.equal(_cast(x), _reference_codes(x))


def test_the_cast_by_bits_agrees_with_torch_on_random_bit_patterns(device: str) -> None:
    x = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32).view(torch.float32).to(device)
    assert torch.equal(_cast(x), _reference_codes(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_hardware_cast_gives_the_same_bits_as_the_integer_cast() -> None:
    exponents = torch.arange(2**16, device="cuda", dtype=torch.int32) << 16
    x = torch.cat([(exponents + low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)] + [_edges("cuda")])
    numbers = x[~x.isnan()]
    assert torch.equal(_cast(numbers, by_bits=False), _cast(numbers))
    assert ((_cast(x[x.isnan()], by_bits=False) & 0x7F) == 0x7F).all()


def _assert_same(actual: Quantised, expected: Quantised) -> None:
    assert actual.scales.shape == expected.scales.shape
    assert torch.equal(actual.scales.view(torch.int32), expected.scales.contiguous().view(torch.int32))
    assert torch.equal(actual.values.view(torch.uint8), expected.values.contiguous().view(torch.uint8))


def _input(rows: int, cols: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    x = torch.randn(rows, cols) * torch.logspace(-4, 3, cols)
    x[rows // 2] = 0  # a tile whose amax is under the floor
    return x.to(device, dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (70, 576), (33, 129)])
def test_rows_match_the_reference_bit_for_bit(device: str, shape: tuple[int, int], power_of_two: bool) -> None:
    x = _input(*shape, device)
    _assert_same(quantise_rows(x, power_of_two=power_of_two), reference_rows(x, power_of_two))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (200, 96), (128, 65)])
def test_columns_match_the_reference_bit_for_bit(device: str, shape: tuple[int, int], power_of_two: bool) -> None:
    x = _input(*shape, device, torch.float32)
    _assert_same(quantise_columns(x, power_of_two=power_of_two), reference_columns(x, power_of_two=power_of_two))


@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (3, 129, 144)])
def test_weights_and_their_transpose_match_the_reference_bit_for_bit(device: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, device=device)
    for power_of_two in (False, True):
        plain, transposed = quantise_weight(weight, power_of_two=power_of_two)
        _assert_same(plain, reference_weight(weight, power_of_two))
        _assert_same(transposed, reference_weight(weight.transpose(-1, -2), power_of_two))


def test_a_cached_activation_is_requantised_from_its_fp8_values(device: str) -> None:
    cached = quantise_rows(_input(150, 192, device))
    _assert_same(quantise_columns(cached), reference_columns(cached.dequantise()))


@pytest.mark.parametrize("counts", [[0, 200, 0, 1, 128], [0, 0], [3], [129] * 5])
def test_each_expert_starts_a_block_of_its_own(device: str, counts: list[int]) -> None:
    offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
    x = torch.randn(sum(counts), 70, device=device)
    schedule = schedule_groups(offsets, len(x))
    expected = reference_schedule(offsets, len(x))
    for name in ("tile_expert", "tile_begin", "tile_end", "expert_tiles"):
        assert torch.equal(getattr(schedule, name), getattr(expected, name)), name
    _assert_same(quantise_columns(x, schedule), reference_columns(x, expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_or_an_infinity_poisons_its_tile_and_no_other(device: str, bad: float) -> None:
    x = torch.randn(40, 256, device=device)
    x[7, 130] = bad
    values = quantise_rows(x).values.float().isnan()
    expected = reference_rows(x).values.float().isnan()
    assert torch.equal(values, expected)
    assert values[7, 130]
    assert not values[:, :128].any()
    columns = quantise_columns(x).values.float().isnan()
    assert torch.equal(columns, reference_columns(x).values.float().isnan())


def test_a_matrix_whose_last_dimension_is_strided_is_refused() -> None:
    with pytest.raises(ValueError, match="the last contiguous"):
        quantise_rows(torch.ones(8, 8).T[:, ::2])


def test_rounded_rows_are_what_the_quantised_ones_stand_for(device: str) -> None:
    x = (torch.randn(70, 200) * torch.logspace(-4, 3, 200)).bfloat16().to(device)
    assert torch.equal(round_rows(x).float(), quantise_rows(x, power_of_two=True).dequantise())
    assert not torch.equal(round_rows(x), x)
