"""FP8 GEMMs, dense and over experts, against float64 and the plain references."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from bitcheck.reference_runs.kernels.gemm import gemm, reference_gemm
from bitcheck.reference_runs.kernels.grouped_gemm import (
    DprobForm,
    grouped_dgrad_swiglu,
    grouped_gemm,
    reference_dgrad_swiglu,
    reference_grouped_gemm,
)
from bitcheck.reference_runs.kernels.grouped_wgrad import WgradForm, grouped_wgrad, reference_grouped_wgrad
from bitcheck.reference_runs.kernels.quantise import quantise_columns, quantise_rows, quantise_weight
from bitcheck.reference_runs.kernels.schedule import GroupSchedule, schedule_groups

RAGGED = [0, 140, 0, 1, 65]
"""Rows of each expert: none, more than a tile, none, one, more than a tile."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def tolerance(device: str) -> float:
    """Of an FP8 product of exact operands: float32 on a CPU; the tensor core's 14 bits, promoted, on a GPU."""
    return 2e-4 if device == "cuda" else 1e-6


def make_schedule(counts: list[int], device: str) -> GroupSchedule:
    offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
    return schedule_groups(offsets, sum(counts))


@pytest.mark.parametrize("shape", [(150, 200, 320), (1, 1, 16), (129, 257, 144)])
def test_fprop_multiplies_rows_by_weight_blocks(device: str, shape: tuple[int, int, int]) -> None:
    num_rows, num_cols, num_k = shape
    x = quantise_rows(torch.randn(num_rows, num_k, device=device))
    weight, _ = quantise_weight(torch.randn(num_cols, num_k, device=device))
    out = gemm(x, weight, out_dtype=torch.float32)
    exact = x.dequantise().double() @ weight.dequantise().double().T
    assert relative_error(out, exact) < tolerance(device)
    assert relative_error(reference_gemm(x, weight), exact) < 1e-6


def test_dgrad_multiplies_rows_by_the_transposed_weight(device: str) -> None:
    dy = quantise_rows(torch.randn(70, 208, device=device))
    weight, weight_t = quantise_weight(torch.randn(208, 144, device=device))
    exact = dy.dequantise().double() @ weight.dequantise().double()
    assert relative_error(gemm(dy, weight_t, out_dtype=torch.float32), exact) < tolerance(device)


def test_wgrad_sums_over_tokens_and_adds_to_the_gradient_that_is_there(device: str) -> None:
    dy = quantise_columns(torch.randn(300, 130, device=device))
    x = quantise_columns(torch.randn(300, 72, device=device))
    exact = dy.dequantise().double() @ x.dequantise().double().T
    out = gemm(dy, x, out_dtype=torch.float32)
    assert relative_error(out, exact) < tolerance(device)
    before = torch.randn(130, 72, device=device) * 10
    after = gemm(dy, x, out=before.clone())
    assert torch.equal(after, before + out)


def test_a_sum_over_a_dimension_that_the_copy_engine_cannot_walk_is_refused(device: str) -> None:
    x = quantise_rows(torch.randn(8, 20, device=device))
    with pytest.raises(ValueError, match="multiple of 16"):
        gemm(x, x)


@pytest.mark.parametrize("counts", [RAGGED, [128, 256], [0, 0, 5]])
def test_each_row_meets_the_weight_of_its_expert(device: str, counts: list[int]) -> None:
    schedule = make_schedule(counts, device)
    x = quantise_rows(torch.randn(sum(counts), 144, device=device))
    weight, weight_t = quantise_weight(torch.randn(len(counts), 200, 144, device=device))
    out = grouped_gemm(x, weight, schedule, out_dtype=torch.float32)
    exact = reference_grouped_gemm(x.dequantise().double(), weight.dequantise().double(), schedule)
    assert relative_error(out, exact) < tolerance(device)

    dy = quantise_rows(torch.randn(sum(counts), 208, device=device))
    _, weight_t = quantise_weight(torch.randn(len(counts), 208, 144, device=device))
    out = grouped_gemm(dy, weight_t, schedule, out_dtype=torch.float32)
    exact = reference_grouped_gemm(dy.dequantise().double(), weight_t.dequantise().double(), schedule)
    assert relative_error(out, exact) < tolerance(device)


def test_no_rows_at_all_give_an_empty_product_and_zero_gradients(device: str) -> None:
    schedule = make_schedule([0, 0], device)
    x = quantise_rows(torch.randn(0, 144, device=device))
    weight, _ = quantise_weight(torch.randn(2, 64, 144, device=device))
    assert grouped_gemm(x, weight, schedule).shape == (0, 64)
    columns = quantise_columns(torch.randn(0, 32, device=device), schedule)
    assert torch.equal(grouped_wgrad(columns, columns, schedule, form="workspace").cpu(), torch.zeros(2, 32, 32))


class Dgrad:
    """Inputs of the dprob epilogue: width 200 is two N tiles, the second ragged."""

    def __init__(
        self, counts: list[int], device: str, width: int = 200, model: int = 144, cached_fp8: bool = False
    ) -> None:
        num_rows = sum(counts)
        self.schedule = make_schedule(counts, device)
        self.dz = quantise_rows(torch.randn(num_rows, model, device=device))
        _, self.weight_t = quantise_weight(torch.randn(len(counts), model, width, device=device))
        hidden = torch.randn(num_rows, 2 * width, device=device)
        self.hidden = quantise_rows(hidden) if cached_fp8 else hidden
        self.prob = torch.rand(num_rows, device=device)

    def run(self, form: DprobForm, out_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped_dgrad_swiglu(
            self.dz, self.weight_t, self.schedule, self.hidden, self.prob, form=form, out_dtype=out_dtype
        )

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden if isinstance(self.hidden, torch.Tensor) else self.hidden.dequantise()
        return reference_dgrad_swiglu(
            self.dz.dequantise().double(), self.weight_t.dequantise().double(), self.schedule,
            hidden.double(), self.prob.double(),
        )  # fmt: skip


@pytest.mark.parametrize(("cached_fp8", "width"), [(False, 200), (True, 200), (True, 256)])
@pytest.mark.parametrize("form", ["slots", "serial", "atomic"])
def test_the_epilogue_gives_the_gradients_of_swiglu_and_of_the_probability(
    device: str, form: DprobForm, cached_fp8: bool, width: int
) -> None:
    case = Dgrad(RAGGED, device, width=width, cached_fp8=cached_fp8)
    dhidden, dprob = case.run(form)
    exact_dhidden, exact_dprob = case.exact()
    assert relative_error(dhidden, exact_dhidden) < tolerance(device)
    assert relative_error(dprob, exact_dprob) < tolerance(device)


def test_slots_and_serial_add_in_the_same_order(device: str) -> None:
    case = Dgrad([70, 20], device, width=400)
    for slots, serial in zip(case.run("slots"), case.run("serial"), strict=True):
        assert torch.equal(slots, serial)


@pytest.mark.parametrize("form", ["slots", "serial"])
def test_dprob_is_one_result_in_any_order_of_the_programs(count_results: Callable[..., int], form: DprobForm) -> None:
    case = Dgrad([70, 20], "cpu", width=400)
    assert count_results(lambda: case.run(form)) == 1


def test_dprob_by_atomic_additions_differs_with_the_order_of_the_programs(count_results: Callable[..., int]) -> None:
    case = Dgrad([70, 20], "cpu", width=400)
    assert count_results(lambda: case.run("atomic")[1]) > 1
    assert count_results(lambda: case.run("atomic")[0]) == 1


class Wgrad:
    """Inputs of the experts' weight gradients; the first expert has enough tokens for three parts."""

    def __init__(self, counts: list[int], device: str, width: int = 72, model: int = 130) -> None:
        self.schedule = make_schedule(counts, device)
        self.dy = quantise_columns(torch.randn(sum(counts), width, device=device), self.schedule)
        self.x = quantise_columns(torch.randn(sum(counts), model, device=device), self.schedule)

    def run(self, form: WgradForm, num_parts: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return grouped_wgrad(self.dy, self.x, self.schedule, form=form, num_parts=num_parts, out=out)

    def exact(self) -> torch.Tensor:
        dy, x = self.dy.dequantise().double(), self.x.dequantise().double()
        tiles = [128 * tile for tile in self.schedule.expert_tiles.tolist()]
        return torch.stack([dy[:, b:e] @ x[:, b:e].T for b, e in pairwise(tiles)])


@pytest.mark.parametrize("form", ["workspace", "atomic"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_each_expert_gets_the_gradient_of_its_own_tokens(device: str, form: WgradForm, num_parts: int) -> None:
    case = Wgrad([300, 0, 5], device, width=70, model=24)
    out = case.run(form, num_parts)
    assert relative_error(out, case.exact()) < tolerance(device)
    assert not out[1].any()
    before = torch.randn_like(out) * 10
    after = case.run(form, num_parts, before.clone())
    assert relative_error(after, before.double() + case.exact()) < tolerance(device)
    assert torch.equal(after[1], before[1])


def test_the_gradient_of_the_padded_blocks_is_that_of_the_tokens(device: str) -> None:
    schedule = make_schedule([200, 3], device)
    dy, x = torch.randn(203, 24, device=device), torch.randn(203, 40, device=device)
    out = grouped_wgrad(quantise_columns(dy, schedule), quantise_columns(x, schedule), schedule, form="workspace")
    assert relative_error(out, reference_grouped_wgrad(dy.double(), x.double(), schedule)) < 0.05


def test_wgrad_is_one_result_in_any_order_of_the_programs_and_by_atomics_several(
    count_results: Callable[..., int],
) -> None:
    case = Wgrad([400, 5], "cpu", width=40, model=24)
    assert count_results(lambda: case.run("workspace", 4)) == 1
    assert count_results(lambda: case.run("workspace", 1)) == 1
    assert count_results(lambda: case.run("atomic", 4)) > 1


@pytest.mark.parametrize("call", ["dprob", "wgrad"])
def test_a_form_that_does_not_exist_is_named(device: str, call: str) -> None:
    with pytest.raises(ValueError, match=f"moe.{call}: unknown form 'fastest'"):
        if call == "dprob":
            Dgrad([3], device).run("fastest")  # type: ignore[arg-type]
        else:
            Wgrad([3], device).run("fastest", 1)  # type: ignore[arg-type]
