"""The kernels and the trainer's CPU forms are two implementations of one definition.

Casts agree bit for bit. Sums agree to rounding: the two add in other blocks.
"""

from __future__ import annotations

import pytest
import torch

from bitcheck.reference_runs import fp8
from bitcheck.reference_runs import gemm as cpu_gemm
from bitcheck.reference_runs.dprob import reduce_dprob
from bitcheck.reference_runs.embedding import embedding_grad
from bitcheck.reference_runs.experts import swiglu, swiglu_backward
from bitcheck.reference_runs.kernels import quantise
from bitcheck.reference_runs.kernels.embedding import embedding_backward
from bitcheck.reference_runs.kernels.gemm import gemm
from bitcheck.reference_runs.kernels.grouped_gemm import grouped_dgrad_swiglu, grouped_gemm
from bitcheck.reference_runs.kernels.grouped_wgrad import grouped_wgrad
from bitcheck.reference_runs.kernels.schedule import schedule_groups
from bitcheck.reference_runs.kernels.ssm import Operands, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import scan_backward
from bitcheck.reference_runs.kernels.swiglu import swiglu_forward
from bitcheck.reference_runs.scan import scan as cpu_scan
from bitcheck.reference_runs.scan import scan_backward as cpu_scan_backward

OFFSETS = (0, 0, 70, 75)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, device: str) -> None:
    error = (actual.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < (2e-3 if device == "cuda" else 1e-5)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_columns_and_blocks_are_cast_to_the_same_codes_and_scales(device: str, power_of_two: bool) -> None:
    x = torch.randn(75, 200) * torch.logspace(-4, 2, 200)
    codes, scale = fp8.quantize_rows(x, power_of_two)
    rows = quantise.quantise_rows(x.to(device), power_of_two=power_of_two)
    assert_same_bits(rows.values, codes)
    assert_same_bits(rows.scales, scale)

    codes, scale = fp8.quantize_columns(x, OFFSETS, power_of_two)
    schedule = schedule_groups(torch.tensor(OFFSETS, dtype=torch.int32, device=device), 75)
    columns = quantise.quantise_columns(x.to(device), schedule, power_of_two=power_of_two)
    assert_same_bits(columns.scales.T[:2], scale)
    tokens = torch.cat([columns.values[:, :70], columns.values[:, 128:133]], 1)
    assert_same_bits(tokens.T, codes)


def test_weights_are_cast_to_the_same_codes_and_scales(device: str) -> None:
    weight = torch.randn(2, 130, 70)
    codes, scale = fp8.quantize_blocks(weight)
    plain, transposed = quantise.quantise_weight(weight.to(device))
    assert_same_bits(plain.values, codes)
    assert_same_bits(plain.scales, scale)
    assert_same_bits(transposed.values, codes.transpose(1, 2))


def test_the_experts_products_agree(device: str) -> None:
    x, dy, weight = torch.randn(75, 64), torch.randn(75, 48), torch.randn(3, 48, 64)
    schedule = schedule_groups(torch.tensor(OFFSETS, dtype=torch.int32, device=device), 75)
    expected = cpu_gemm.gemm(
        cpu_gemm.Tiled(*fp8.quantize_rows(x, False)), cpu_gemm.Tiled(*fp8.quantize_blocks(weight)), OFFSETS
    )
    rows, (plain, _) = quantise.quantise_rows(x.to(device)), quantise.quantise_weight(weight.to(device))
    assert_close(grouped_gemm(rows, plain, schedule, out_dtype=torch.float32), expected, device)

    expected = cpu_gemm.wgrad(
        cpu_gemm.Tiled(*fp8.quantize_columns(dy, OFFSETS, False)),
        cpu_gemm.Tiled(*fp8.quantize_columns(x, OFFSETS, False)),
        OFFSETS,
        is_fixed=True,
    )
    columns = (quantise.quantise_columns(matrix.to(device), schedule) for matrix in (dy, x))
    assert_close(grouped_wgrad(*columns, schedule, form="workspace"), expected, device)

    # The backward of SwiGLU and the second product: width 64, model 48.
    hidden, prob = torch.randn(75, 128), torch.rand(75)
    w2 = torch.randn(3, 48, 64)
    codes, scale = fp8.quantize_blocks(w2)
    dz = fp8.quantize_rows(dy, True)
    dact = cpu_gemm.gemm(cpu_gemm.Tiled(*dz), cpu_gemm.Tiled(codes.transpose(1, 2), scale.transpose(1, 2)), OFFSETS)
    cached = fp8.dequantize_rows(*fp8.quantize_rows(hidden, False))
    dhidden, dprob = grouped_dgrad_swiglu(
        quantise.quantise_rows(dy.to(device), power_of_two=True),
        quantise.quantise_weight(w2.to(device))[1],
        schedule,
        quantise.quantise_rows(hidden.to(device)),
        prob.to(device),
        form="slots",
        out_dtype=torch.float32,
    )
    assert_close(dhidden, swiglu_backward(cached, dact * prob[:, None]), device)
    assert_close(dprob, reduce_dprob(dact, swiglu(cached), "slots"), device)
    assert_close(
        swiglu_forward(*hidden.to(device).chunk(2, 1), prob.to(device)), swiglu(hidden) * prob[:, None], device
    )


def test_the_products_of_a_dense_layer_agree(device: str) -> None:
    x, weight = torch.randn(40, 144), torch.randn(70, 144)
    expected = cpu_gemm.gemm(
        cpu_gemm.Tiled(*fp8.quantize_rows(x, False)), cpu_gemm.Tiled(*fp8.quantize_blocks(weight[None])), (0, 40)
    )
    rows, (blocks, _) = quantise.quantise_rows(x.to(device)), quantise.quantise_weight(weight.to(device))
    assert_close(gemm(rows, blocks, out_dtype=torch.float32), expected, device)


def test_the_embedding_and_the_scan_agree(device: str) -> None:
    dy, ids = torch.randn(50, 40), torch.randint(0, 6, (50,))
    assert_close(
        embedding_backward(dy.to(device), ids.to(device), 9, form="sorted"), embedding_grad(dy, ids, 9, True), device
    )
    operands = Operands(
        torch.randn(1, 32, 2, 16),
        torch.rand(1, 32, 2),
        -torch.rand(2),
        torch.randn(1, 32, 16),
        torch.randn(1, 32, 16),
        torch.randn(2),
    )
    on_device = Operands(*(operand.to(device) for operand in operands))
    assert_close(scan_forward(on_device, 16), cpu_scan(*operands, 16), device)
    dy = torch.randn(1, 32, 2, 16)
    expected = cpu_scan_backward(dy, *operands, 16, True)
    for grad, other in zip(scan_backward(dy.to(device), on_device, 16, form="workspace"), expected, strict=True):
        assert_close(grad, other, device)
