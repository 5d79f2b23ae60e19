"""The three matrix products, over groups of rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bitcheck.reference_runs.fp8 import (
    codes_to_float,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_columns,
    quantize_rows,
    row_tiles,
)
from bitcheck.reference_runs.gemm import Tiled, gemm, gemm_bf16, wgrad, wgrad_bf16

OFFSETS = (0, 70, 70, 210, 211)
"""Four groups: ragged, empty, longer than a tile, a single row."""


def columns_to_float(tiled: Tiled, offsets: tuple[int, ...]) -> torch.Tensor:
    sizes = torch.tensor([stop - start for group in row_tiles(offsets) for start, stop in group])
    return codes_to_float(tiled.codes) * tiled.scale.repeat_interleave(sizes, 0)


@pytest.mark.parametrize(("num_ins", "num_outs"), [(256, 128), (160, 192), (40, 300)])
def test_a_product_of_tiles_is_that_of_what_the_tiles_stand_for(num_ins: int, num_outs: int) -> None:
    a = Tiled(*quantize_rows(torch.randn(OFFSETS[-1], num_ins), power_of_two=False))
    w = Tiled(*quantize_blocks(torch.randn(4, num_outs, num_ins)))
    y = gemm(a, w, OFFSETS)
    a_exact, w_exact = dequantize_rows(*a).double(), dequantize_blocks(*w).double()
    for group, (first, stop) in enumerate(pairwise(OFFSETS)):
        exact = a_exact[first:stop] @ w_exact[group].t()
        bound = a_exact[first:stop].abs() @ w_exact[group].abs().t() * num_ins * 2.0**-24
        assert bool(((y[first:stop] - exact).abs() <= bound + 1e-6).all())


def test_a_data_gradient_reads_the_same_codes_transposed() -> None:
    dy = Tiled(*quantize_rows(torch.randn(50, 192), power_of_two=False))
    w = Tiled(*quantize_blocks(torch.randn(1, 192, 160)))
    dx = gemm(dy, Tiled(w.codes.transpose(1, 2), w.scale.transpose(1, 2)), (0, 50))
    exact = dequantize_rows(*dy).double() @ dequantize_blocks(*w)[0].double()
    assert torch.allclose(dx.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("split", [64, 128])
def test_a_weight_gradient_sums_each_groups_rows(split: int) -> None:
    dy = Tiled(*quantize_columns(torch.randn(OFFSETS[-1], 40), OFFSETS, power_of_two=False))
    x = Tiled(*quantize_columns(torch.randn(OFFSETS[-1], 72), OFFSETS, power_of_two=True))
    dw = wgrad(dy, x, OFFSETS, is_fixed=True, split=split)
    dy_exact, x_exact = columns_to_float(dy, OFFSETS).double(), columns_to_float(x, OFFSETS).double()
    for group, (first, stop) in enumerate(pairwise(OFFSETS)):
        exact = dy_exact[first:stop].t() @ x_exact[first:stop]
        assert torch.allclose(dw[group].double(), exact, rtol=1e-5, atol=1e-4)
    assert not dw[1].any()


def test_the_error_of_fp8_against_the_unquantised_product_is_what_three_mantissa_bits_imply() -> None:
    a, w = torch.randn(200, 512), torch.randn(1, 256, 512)
    y = gemm(Tiled(*quantize_rows(a, False)), Tiled(*quantize_blocks(w)), (0, 200))
    exact = a.double() @ w[0].double().t()
    relative = (y - exact).norm() / exact.norm()
    assert 0.01 < relative < 0.05


def test_promotion_keeps_what_one_short_accumulator_loses() -> None:
    """The product with promotion every 128 K, beside one accumulator of 14 bits over all of K."""
    num_ins = 4096
    a, w = torch.rand(4, num_ins), torch.rand(1, 4, num_ins)
    tiled_a, tiled_w = Tiled(*quantize_rows(a, False)), Tiled(*quantize_blocks(w))
    exact = dequantize_rows(*tiled_a).double() @ dequantize_blocks(*tiled_w)[0].double().t()

    def to_14_bits(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**14).trunc() / 2**14, exponent)

    a_exact, w_exact = dequantize_rows(*tiled_a), dequantize_blocks(*tiled_w)[0]
    short = torch.zeros(4, 4)
    promoted = torch.zeros(4, 4)
    for start in range(0, num_ins, 128):
        partial = torch.zeros(4, 4)
        for k in range(start, start + 128, 32):
            term = a_exact[:, k : k + 32] @ w_exact[:, k : k + 32].t()
            short = to_14_bits(short + term)
            partial = to_14_bits(partial + term)
        promoted += partial
    ours = gemm(tiled_a, tiled_w, (0, 4))
    assert (ours - exact).abs().max() < 0.01 * (short - exact).abs().max()
    assert (promoted - exact).abs().max() < 0.2 * (short - exact).abs().max()


def test_partial_products_are_added_in_ascending_order_of_k() -> None:
    """Two huge partial products that cancel leave a small one intact only if it is added last."""
    a = torch.zeros(1, 384)
    a[0, 0], a[0, 128], a[0, 256] = 2.0**27, -(2.0**27), 1 / 448
    w = torch.full((1, 1, 384), 448.0)  # a scale of exactly 1
    tiled = Tiled(*quantize_rows(a, power_of_two=True)), Tiled(*quantize_blocks(w))
    assert gemm(*tiled, (0, 1)).item() == pytest.approx(1.0, rel=0.1)
    a = a.view(3, 128).roll(1, 0).reshape(1, 384)  # the small one now comes first
    tiled = Tiled(*quantize_rows(a, power_of_two=True)), tiled[1]
    assert gemm(*tiled, (0, 1)).item() == 0.0


def test_bf16_products_are_exact_products_of_their_operands() -> None:
    a, w = torch.randn(OFFSETS[-1], 160).bfloat16(), torch.randn(4, 96, 160).bfloat16()
    y = gemm_bf16(a, w, OFFSETS)
    dw = wgrad_bf16(y.bfloat16(), a, OFFSETS, is_fixed=True, split=64)
    for group, (first, stop) in enumerate(pairwise(OFFSETS)):
        rows = slice(first, stop)
        assert torch.allclose(y[rows].double(), a[rows].double() @ w[group].double().t(), rtol=1e-5, atol=1e-4)
        exact = y[rows].bfloat16().double().t() @ a[rows].double()
        assert torch.allclose(dw[group].double(), exact, rtol=1e-5, atol=1e-3)


def test_split_k_parts_give_one_result_in_order_and_several_as_they_arrive() -> None:
    offsets = (0, 300, 512)
    dy = Tiled(*quantize_columns(torch.randn(512, 24), offsets, power_of_two=False))
    x = Tiled(*quantize_columns(torch.randn(512, 32), offsets, power_of_two=False))

    def distinct(is_fixed: bool) -> int:
        return len({wgrad(dy, x, offsets, is_fixed, 64).numpy().tobytes() for _ in range(8)})

    assert distinct(is_fixed=True) == 1
    assert distinct(is_fixed=False) > 1
