"""The kernels that sum over programs, and SwiGLU: values against float64, bits over orders of the programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bitcheck.reference_runs.kernels import combine as combine_module
from bitcheck.reference_runs.kernels import norm, swiglu
from bitcheck.reference_runs.kernels.combine import combine, reference_combine
from bitcheck.reference_runs.kernels.embedding import embedding_backward, reference_embedding_backward
from bitcheck.reference_runs.kernels.norm import reference_rmsnorm, rmsnorm_backward, rmsnorm_forward
from bitcheck.reference_runs.kernels.slots import reference_sum_slots, sum_slots
from bitcheck.reference_runs.kernels.swiglu import reference_swiglu, swiglu_backward, swiglu_forward


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("num_slots", [1, 2, 17, 64, 150])
def test_slots_are_added_in_index_order(device: str, num_slots: int) -> None:
    slots = torch.randn(num_slots, 3, 100, device=device) * 10 ** torch.randn(num_slots, 1, 1, device=device)
    assert torch.equal(sum_slots(slots), reference_sum_slots(slots))
    before = torch.randn(3, 100, device=device)
    groups = [reference_sum_slots(group) for group in slots.split(64)]
    expected = reference_sum_slots(torch.stack([before + groups[0], *groups[1:]]))
    if len(groups) == 1:
        expected = reference_sum_slots(torch.stack([before + slots[0], *slots[1:]]))
    assert torch.equal(sum_slots(slots, out=before.clone(), accumulate=True), expected)


def test_a_sum_of_no_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="with a slot or more"):
        sum_slots(torch.empty(0, 4))


@pytest.mark.parametrize("with_prob", [False, True])
@pytest.mark.parametrize("shape", [(3, 200), (2, 1300)])
def test_swiglu_and_its_gradients_match_float64(device: str, shape: tuple[int, int], with_prob: bool) -> None:
    hidden = torch.randn(shape[0], 2 * shape[1], device=device) * 3
    gate, up = hidden.chunk(2, dim=1)
    prob = torch.rand(shape[0], device=device) if with_prob else None
    dy = torch.randn(shape, device=device)
    leaf = hidden.double().requires_grad_()
    y = reference_swiglu(*leaf.chunk(2, dim=1), None if prob is None else prob.double())
    y.backward(dy.double())
    assert leaf.grad is not None
    assert relative_error(swiglu_forward(gate, up, prob), y.detach()) < 1e-6
    assert relative_error(swiglu_backward(dy, gate, up, prob), leaf.grad) < 1e-6


def _routing(num_tokens: int, num_slots: int, device: str) -> torch.Tensor:
    return torch.randperm(num_tokens * num_slots).view(num_tokens, num_slots).to(device)


@pytest.mark.parametrize("form", ["gather", "atomic"])
def test_each_token_gets_the_sum_of_its_expert_rows(device: str, form: str) -> None:
    row_of = _routing(9, 3, device)
    y = torch.randn(27, 1100, device=device)
    out = combine(y, row_of, form=form, out_dtype=torch.float32)  # type: ignore[arg-type]
    assert relative_error(out, reference_combine(y.double(), row_of)) < 1e-6
    if form == "gather":
        assert torch.equal(out, reference_combine(y, row_of))


def test_combine_by_gather_is_one_result_and_by_atomics_several(count_results: Callable[..., int]) -> None:
    row_of = _routing(8, 4, "cpu")
    y = torch.randn(32, 60)
    assert count_results(lambda: combine(y, row_of, form="gather", out_dtype=torch.float32)) == 1
    assert count_results(lambda: combine(y, row_of, form="atomic", out_dtype=torch.float32)) > 1


@pytest.mark.parametrize("num_rows", [70_000])
def test_more_rows_than_the_later_axes_of_a_grid_have_programs_are_launched(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    grids: list[tuple[int, ...]] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    for module, names in (
        (swiglu, ("_forward_kernel", "_backward_kernel")),
        (combine_module, ("_gather_kernel", "_scatter_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Recorded())
    x = torch.zeros(num_rows, 2)
    row_of = torch.arange(num_rows).view(-1, 1)
    swiglu_forward(x, x)
    swiglu_backward(x, x, x)
    combine(x, row_of, form="gather")
    combine(x, row_of, form="atomic")
    assert len(grids) == 4
    assert all(later <= 65535 for grid in grids for later in grid[1:])


@pytest.mark.parametrize("form", ["two-stage", "atomic"])
@pytest.mark.parametrize("shape", [(5, 100), (45, 24)])  # fewer rows than parts, and six rows a part
def test_rmsnorm_and_its_gradients_match_float64(
    device: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], form: str
) -> None:
    monkeypatch.setattr(norm, "NUM_PARTS", 8)
    x, dy = torch.randn(shape, device=device), torch.randn(shape, device=device)
    weight = torch.randn(shape[1], device=device)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = reference_rmsnorm(x64, weight64)
    expected.backward(dy.double())
    y, rstd = rmsnorm_forward(x, weight)
    dx, dweight = rmsnorm_backward(dy, x, weight, rstd, form=form)  # type: ignore[arg-type]
    assert x64.grad is not None and weight64.grad is not None
    assert relative_error(y, expected.detach()) < 1e-6
    assert relative_error(dx, x64.grad) < 1e-6
    assert relative_error(dweight, weight64.grad) < 1e-6


def test_dweight_in_two_stages_is_one_result_and_by_atomics_several(count_results: Callable[..., int]) -> None:
    x, dy, weight = torch.randn(40, 24), torch.randn(40, 24), torch.randn(24)
    _, rstd = rmsnorm_forward(x, weight)
    assert count_results(lambda: rmsnorm_backward(dy, x, weight, rstd, form="two-stage")) == 1
    assert count_results(lambda: rmsnorm_backward(dy, x, weight, rstd, form="atomic")) > 1


@pytest.mark.parametrize("form", ["sorted", "atomic"])
@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_each_token_gets_the_sum_over_its_positions(device: str, form: str, num_rows: int) -> None:
    tokens = torch.randint(0, 5, (num_rows,), device=device)
    tokens[: num_rows // 2] = 3  # a token with more positions than a piece
    dy = torch.randn(num_rows, 600, device=device)
    out = embedding_backward(dy, tokens, 7, form=form)  # type: ignore[arg-type]
    expected = reference_embedding_backward(dy.double(), tokens, 7)
    assert out.shape == (7, 600)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert not out[5:].any()


def test_the_embedding_gradient_sorted_is_one_result_and_by_atomics_several(count_results: Callable[..., int]) -> None:
    tokens, dy = torch.randint(0, 3, (100,)), torch.randn(100, 16)
    assert count_results(lambda: embedding_backward(dy, tokens, 3, form="sorted")) == 1
    assert count_results(lambda: embedding_backward(dy, tokens, 3, form="atomic")) > 1
