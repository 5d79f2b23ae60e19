"""What only a GPU can show: real races, real schedules, hardware arithmetic at the sizes of a model.

Each form that is called deterministic gives one result in 1,000 runs while another stream keeps the
multiprocessors busy; each `atomic` form is shown to differ, so the 1,000 runs mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from bitcheck.reference_runs.kernels.combine import combine
from bitcheck.reference_runs.kernels.embedding import embedding_backward
from bitcheck.reference_runs.kernels.gemm import gemm, gemm_cublas
from bitcheck.reference_runs.kernels.grouped_gemm import (
    grouped_dgrad_swiglu,
    grouped_gemm,
    reference_dgrad_swiglu,
    reference_grouped_gemm,
)
from bitcheck.reference_runs.kernels.grouped_wgrad import grouped_wgrad
from bitcheck.reference_runs.kernels.norm import reference_rmsnorm, rmsnorm_backward, rmsnorm_forward
from bitcheck.reference_runs.kernels.quantise import (
    quantise_columns,
    quantise_rows,
    quantise_weight,
    reference_columns,
    reference_rows,
)
from bitcheck.reference_runs.kernels.schedule import GroupSchedule, schedule_groups
from bitcheck.reference_runs.kernels.ssm import Operands, reference_scan, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import scan_backward
from bitcheck.reference_runs.kernels.swiglu import reference_swiglu, swiglu_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NUM_RUNS = 1000
ROWS, MODEL, WIDTH, EXPERTS = 1024, 512, 1408, 8
Run = Callable[[], Any]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def routed(num_rows: int, num_experts: int) -> GroupSchedule:
    """Ragged experts, the first of them empty."""
    experts = torch.randint(1, num_experts, (num_rows,))
    return schedule_groups(
        torch.cat([torch.zeros(1), experts.bincount(minlength=num_experts).cumsum(0)]).int().cuda(), num_rows
    )


def dprob_case(form: str) -> Run:
    schedule = routed(ROWS, EXPERTS)
    dz = quantise_rows(randn(ROWS, MODEL))
    _, weight_t = quantise_weight(randn(EXPERTS, MODEL, WIDTH))
    hidden, prob = randn(ROWS, 2 * WIDTH), torch.rand(ROWS, device="cuda")
    return lambda: grouped_dgrad_swiglu(dz, weight_t, schedule, hidden, prob, form=form)  # type: ignore[arg-type]


def wgrad_case(form: str) -> Run:
    num_rows = 4096
    schedule = routed(num_rows, 3)
    dy, x = (quantise_columns(randn(num_rows, width), schedule) for width in (192, 256))
    return lambda: grouped_wgrad(dy, x, schedule, form=form, num_parts=8)  # type: ignore[arg-type]


def combine_case(form: str) -> Run:
    y = randn(512 * 8, 1024)
    row_of = torch.randperm(512 * 8, device="cuda").view(512, 8)
    return lambda: combine(y, row_of, form=form)  # type: ignore[arg-type]


def norm_case(form: str) -> Run:
    x, dy, weight = randn(4096, 512), randn(4096, 512), randn(512)
    _, rstd = rmsnorm_forward(x, weight)
    return lambda: rmsnorm_backward(dy, x, weight, rstd, form=form)  # type: ignore[arg-type]


def embedding_case(form: str) -> Run:
    dy, tokens = randn(4096, 512), torch.randint(0, 40, (4096,), device="cuda")
    return lambda: embedding_backward(dy, tokens, 64, form=form)  # type: ignore[arg-type]


def make_scan(seqs: int, length: int, heads: int, head_dim: int, state: int) -> Operands:
    return Operands(
        randn(seqs, length, heads, head_dim),
        torch.rand(seqs, length, heads, device="cuda") * 0.2,
        -torch.rand(heads, device="cuda") * 4,
        randn(seqs, length, state),
        randn(seqs, length, state),
        randn(heads, dtype=torch.float32),
    )


def scan_case(form: str) -> Run:
    operands, dy = make_scan(2, 512, 32, 192, 64), randn(2, 512, 32, 192)  # three tiles of a head's width
    return lambda: scan_backward(dy, operands, 64, form=form)  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[str], Run], tuple[str, ...]]] = {
    "moe.dprob": (dprob_case, ("slots", "serial")),
    "moe.wgrad": (wgrad_case, ("workspace",)),
    "moe.combine": (combine_case, ("gather",)),
    "norm.dweight": (norm_case, ("two-stage",)),
    "embedding.backward": (embedding_case, ("sorted",)),
    "ssm.backward": (scan_case, ("workspace",)),
}


@pytest.fixture
def busy_stream() -> Iterator[Callable[[], None]]:
    """A function that gives a side stream something to do, of another length each time."""
    stream = torch.cuda.Stream()
    operands = [randn(size, size) for size in (512, 1536, 1024, 2560)]
    calls = 0

    def give() -> None:
        nonlocal calls
        calls += 1
        with torch.cuda.stream(stream):
            operand = operands[calls % len(operands)]
            torch.mm(operand, operand)

    yield give
    torch.cuda.synchronize()


def count_differing(run: Run, give_work: Callable[[], None], num_runs: int) -> dict[int, int]:
    """Return, for each output, how many of `num_runs` runs differ from the first in some bit."""

    def outputs() -> list[torch.Tensor]:
        value = run()
        return [t.view(torch.uint8) for t in (value if isinstance(value, tuple) else (value,))]

    first = outputs()
    differing = torch.zeros(len(first), dtype=torch.int64, device="cuda")
    for _ in range(num_runs - 1):
        give_work()
        differing += torch.stack([(now != then).any() for now, then in zip(outputs(), first, strict=True)])
    return {index: count for index, count in enumerate(differing.tolist()) if count}


@pytest.mark.parametrize(("switch", "form"), [(name, form) for name, (_, forms) in CASES.items() for form in forms])
def test_a_deterministic_form_gives_one_result_in_1000_runs_beside_a_busy_stream(
    busy_stream: Callable[[], None], switch: str, form: str
) -> None:
    assert count_differing(CASES[switch][0](form), busy_stream, NUM_RUNS) == {}


RACED = {"moe.dprob": {1}, "norm.dweight": {1}, "ssm.backward": {1, 2, 3, 4, 5}}
"""Outputs that atomics add into; elsewhere the only one. ssm.backward: dt, A, B, C, D."""


@pytest.mark.parametrize("switch", CASES)
def test_the_atomic_form_differs_from_run_to_run_in_what_it_adds_into_and_in_nothing_else(
    busy_stream: Callable[[], None], switch: str, record_property: Callable[[str, object], None]
) -> None:
    differing = count_differing(CASES[switch][0]("atomic"), busy_stream, 200)
    record_property("runs_that_differ_of_199", str(differing))
    print(f"{switch}: runs of 199 that differ from the first, by output: {differing}")
    assert set(differing) == RACED.get(switch, {0})


def test_the_gemms_give_one_result_in_1000_runs_beside_a_busy_stream(busy_stream: Callable[[], None]) -> None:
    x = quantise_rows(randn(1000, 576))
    weight, _ = quantise_weight(randn(712, 576))
    schedule = routed(1000, 5)
    weights, _ = quantise_weight(randn(5, 712, 576))
    assert count_differing(lambda: (gemm(x, weight), grouped_gemm(x, weights, schedule)), busy_stream, NUM_RUNS) == {}


@pytest.mark.parametrize("num_k", [512, 576])
def test_torchs_own_blockwise_product_is_as_exact_and_gives_one_result_in_1000_runs(
    busy_stream: Callable[[], None], num_k: int
) -> None:
    x, (weight, _) = quantise_rows(randn(1000, num_k)), quantise_weight(randn(768, num_k))
    by_row = quantise_rows(randn(768, num_k))
    for rhs in (weight, by_row):
        exact = x.dequantise().double() @ rhs.dequantise().double().T
        ours, theirs = gemm(x, rhs), gemm_cublas(x, rhs)
        print(f"K = {num_k}: ours {relative_error(ours, exact):.2e}, cuBLAS {relative_error(theirs, exact):.2e}")
        assert relative_error(theirs, exact) < 3e-3
        assert count_differing(partial(gemm_cublas, x, rhs), busy_stream, NUM_RUNS) == {}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_an_fp8_product_over_a_long_k_is_as_exact_as_promotion_makes_it() -> None:
    """14 bits inside 128 K, then float32: the error must not grow with K as it does without promotion."""
    errors = []
    for num_k in (512, 16384):
        # Positive operands: sums grow, so bits that are lost are lost in one direction.
        x, weight = quantise_rows(randn(256, num_k).abs()), quantise_weight(randn(256, num_k).abs())[0]
        exact = x.dequantise().double() @ weight.dequantise().double().T
        errors.append(relative_error(gemm(x, weight, out_dtype=torch.float32), exact))
        assert errors[-1] < 1e-3
        assert relative_error(gemm(x, weight), exact) < 3e-3
    print(f"relative error at K = 512: {errors[0]:.2e}, at K = 16384: {errors[1]:.2e}")
    assert errors[1] < 2 * errors[0]


def test_grouped_products_at_model_size_match_float64() -> None:
    schedule = routed(ROWS, EXPERTS)
    x = quantise_rows(randn(ROWS, MODEL))
    _, weight_t = quantise_weight(randn(EXPERTS, MODEL, WIDTH))
    up, _ = quantise_weight(randn(EXPERTS, WIDTH, MODEL))
    exact = reference_grouped_gemm(x.dequantise().double(), up.dequantise().double(), schedule)
    assert relative_error(grouped_gemm(x, up, schedule), exact) < 3e-3
    hidden, prob = randn(ROWS, 2 * WIDTH), torch.rand(ROWS, device="cuda")
    exact_dhidden, exact_dprob = reference_dgrad_swiglu(
        x.dequantise().double(), weight_t.dequantise().double(), schedule, hidden.double(), prob.double()
    )
    dhidden, dprob = grouped_dgrad_swiglu(x, weight_t, schedule, hidden, prob, form="slots")
    assert relative_error(dhidden, exact_dhidden) < 3e-3
    assert relative_error(dprob, exact_dprob) < 1e-3


def test_bfloat16_results_are_rounded_to_the_nearest() -> None:
    gate, up, x, weight = randn(64, 1408), randn(64, 1408), randn(64, 2048), randn(2048)
    assert relative_error(swiglu_forward(gate, up), reference_swiglu(gate.double(), up.double())) < 2e-3
    assert relative_error(rmsnorm_forward(x, weight)[0], reference_rmsnorm(x.double(), weight.double())) < 2e-3


def test_the_scan_in_bfloat16_and_tf32_matches_float64() -> None:
    operands = make_scan(2, 128, 9, 64, 128)
    exact = Operands(*(operand.double().requires_grad_() for operand in operands))
    y = reference_scan(exact)
    assert relative_error(scan_forward(operands, 64), y.detach()) < 2e-3
    dy = randn(2, 128, 9, 64)
    y.backward(dy.double())
    for name, grad, operand in zip(
        Operands._fields, scan_backward(dy, operands, 64, form="workspace"), exact, strict=True
    ):
        assert operand.grad is not None
        assert relative_error(grad, operand.grad) < 3e-3, name


def test_quantisation_at_model_size_matches_the_reference_bit_for_bit() -> None:
    x = randn(1000, 1408) * torch.logspace(-5, 4, 1408, device="cuda").bfloat16()
    for actual, expected in (
        (quantise_rows(x), reference_rows(x)),
        (quantise_rows(x, power_of_two=True), reference_rows(x, True)),
        (quantise_columns(x), reference_columns(x)),
    ):
        assert torch.equal(actual.scales, expected.scales)
        assert torch.equal(actual.values.view(torch.uint8), expected.values.contiguous().view(torch.uint8))
