"""The one cast to E4M3 and its tiles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bitcheck.reference_runs.fp8 import (
    AMAX_FLOOR,
    E4M3_MAX,
    cast_e4m3,
    codes_to_float,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    row_tiles,
    scale_from_amax,
)

ONE = torch.ones(())


def all_codes() -> torch.Tensor:
    """Every E4M3 code that is a number."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    return codes[~codes.float().isnan()]


class Divisors(TorchDispatchMode):
    """Keeps what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div:
            self.seen.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_scale_is_divided_out_not_multiplied_by_a_reciprocal(power_of_two: bool) -> None:
    """On a GPU dividing by a Python number is that multiplication, and gives other bits than a CPU."""
    amax = torch.rand(10_000) * 100 + 1
    with Divisors() as divisors:
        scale = scale_from_amax(amax, power_of_two)
    (divisor,) = divisors.seen
    assert isinstance(divisor, torch.Tensor)
    assert (divisor.dtype, divisor.device, float(divisor)) == (amax.dtype, amax.device, 448.0)
    if not power_of_two:
        expected = amax.numpy() / np.float32(448)
        assert scale.numpy().tobytes() == expected.tobytes()
        assert (expected != amax.numpy() * np.float32(1 / 448)).any()


def test_every_code_is_read_as_pytorch_reads_it() -> None:
    codes = all_codes()
    assert codes.numel() == 254
    assert torch.equal(codes_to_float(codes).view(torch.int32), codes.float().view(torch.int32))


def test_every_value_of_e4m3_survives_the_cast() -> None:
    codes = all_codes()
    assert torch.equal(cast_e4m3(codes.float(), ONE).view(torch.uint8), codes.view(torch.uint8))


def test_a_value_between_two_codes_goes_to_the_nearer_and_a_tie_to_the_even_one() -> None:
    values = all_codes().float().sort().values.unique()
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    cast = codes_to_float(cast_e4m3(middle, ONE))
    assert bool(((cast == low) | (cast == high)).all())
    assert bool((cast_e4m3(middle, ONE).view(torch.uint8) % 2 == 0).all())
    above, below = torch.nextafter(middle, high), torch.nextafter(middle, low)
    assert torch.equal(codes_to_float(cast_e4m3(above, ONE)), high)
    assert torch.equal(codes_to_float(cast_e4m3(below, ONE)), low)


def test_a_value_past_the_largest_saturates() -> None:
    cast = codes_to_float(cast_e4m3(torch.tensor([448.0, 449.0, 1e30, torch.inf, -1e30, -torch.inf]), ONE))
    assert cast.tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, -448.0]


@given(st.floats(min_value=2.0**-99, max_value=2.0**99, width=32))
def test_a_power_of_two_scale_is_the_next_one_above(amax: float) -> None:
    exact = scale_from_amax(torch.tensor(amax), power_of_two=False)
    rounded = scale_from_amax(torch.tensor(amax), power_of_two=True)
    mantissa, _ = torch.frexp(rounded)
    assert mantissa == 0.5
    assert exact <= rounded < 2 * exact


def test_a_scale_that_is_a_power_of_two_already_stays() -> None:
    assert scale_from_amax(torch.tensor(E4M3_MAX), power_of_two=True) == 1.0


def test_a_tile_of_zeros_has_a_finite_scale_and_stays_zero() -> None:
    codes, scale = quantize_rows(torch.zeros(2, 128), power_of_two=False)
    assert torch.equal(scale, torch.full((2, 1), AMAX_FLOOR / E4M3_MAX))
    assert torch.equal(dequantize_rows(codes, scale), torch.zeros(2, 128))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nan_or_infinity_does_not_vanish_in_the_cast(power_of_two: bool, bad: float) -> None:
    x = torch.ones(1, 256)
    x[0, 3] = bad
    read = dequantize_rows(*quantize_rows(x, power_of_two))
    assert not read[0, 3].isfinite()
    assert torch.equal(read[0, 128:], torch.ones(128))


@pytest.mark.parametrize("width", [128, 160, 96, 1])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_tiles_of_rows_come_back_within_half_a_step(width: int, power_of_two: bool) -> None:
    x = torch.randn(37, width) * torch.logspace(-3, 3, 37)[:, None]
    codes, scale = quantize_rows(x, power_of_two)
    assert codes.shape == x.shape
    assert scale.shape == (37, -(-width // 128))
    # A step is 2**-3 of the exponent's value above the subnormals, and 2**-9 of the scale in them.
    step_R1 = scale.repeat_interleave(128, 1)[:, :width] * 2.0**-10
    assert bool(((dequantize_rows(codes, scale) - x).abs() <= x.abs() * 2.0**-4 + step_R1).all())


def test_each_row_tile_has_a_scale_of_its_own() -> None:
    x = torch.ones(2, 256)
    x[0, 200] = 1000.0
    _, scale = quantize_rows(x, power_of_two=False)
    one = torch.tensor(1.0) / E4M3_MAX
    assert torch.equal(scale, torch.stack([torch.stack([one, one * 0 + 1000 / E4M3_MAX]), torch.stack([one, one])]))


@pytest.mark.parametrize("offsets", [(0, 128, 256), (0, 5, 5, 256), (0, 130, 200, 256), (0, 256)])
def test_tiles_of_columns_agree_with_rows_of_the_transposed_group(offsets: tuple[int, ...]) -> None:
    x = torch.randn(256, 40)
    codes, scale = quantize_columns(x, offsets, power_of_two=False)
    first_tile = 0
    for (first, stop), tiles in zip(pairwise(offsets), row_tiles(offsets), strict=True):
        if first == stop:
            continue
        codes_t, scale_t = quantize_rows(x[first:stop].t().contiguous(), power_of_two=False)
        assert torch.equal(codes[first:stop].t().float(), codes_t.float())
        assert torch.equal(scale[first_tile : first_tile + len(tiles)].t(), scale_t)
        first_tile += len(tiles)
    assert scale.shape[0] == first_tile


def test_an_experts_tiles_do_not_depend_on_its_neighbours() -> None:
    x = torch.randn(300, 16)
    alone, _ = quantize_columns(x[100:], (0, 200), power_of_two=False)
    together, _ = quantize_columns(x, (0, 100, 300), power_of_two=False)
    assert torch.equal(alone.float(), together[100:].float())


@pytest.mark.parametrize("shape", [(1, 128, 128), (3, 160, 200), (2, 16, 300)])
def test_blocks_come_back_within_half_a_step(shape: tuple[int, int, int]) -> None:
    w = torch.randn(shape)
    codes, scale = quantize_blocks(w)
    assert scale.shape == (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    assert bool(((dequantize_blocks(codes, scale) - w).abs() <= w.abs() * 2.0**-4 + scale.max() * 2.0**-10).all())


def test_transposed_blocks_are_the_blocks_of_the_transposed_weight() -> None:
    w = torch.randn(1, 160, 200)
    codes, scale = quantize_blocks(w)
    codes_t, scale_t = quantize_blocks(w.transpose(1, 2).contiguous())
    assert torch.equal(codes.transpose(1, 2).float(), codes_t.float())
    assert torch.equal(scale.transpose(1, 2), scale_t)


def test_power_of_two_tiles_can_be_cut_the_other_way_with_hardly_a_change_in_value() -> None:
    """Why V3 takes powers of two where an activation is requantised 128 x 1 for the weight gradient."""
    x = torch.randn(128, 128).bfloat16()

    def num_changed(power_of_two: bool) -> int:
        once = dequantize_rows(*quantize_rows(x, power_of_two))
        codes, scale = quantize_columns(once, (0, 128), power_of_two)
        return int((codes_to_float(codes) * scale != once).sum())

    assert num_changed(power_of_two=True) < 0.01 * x.numel()
    assert num_changed(power_of_two=False) > 0.3 * x.numel()


def test_casting_what_was_cast_is_not_the_identity_on_scales() -> None:
    """Why weights are derived from the masters and never from FP8: some scales change at the second cast."""
    w = torch.randn(64, 128, 128)
    amax = w.abs().amax((1, 2))
    scale = scale_from_amax(amax, power_of_two=True)[:, None, None]
    again = codes_to_float(cast_e4m3(w, scale)) * scale
    assert not torch.equal(scale_from_amax(again.abs().amax((1, 2)), power_of_two=True), scale.flatten())
