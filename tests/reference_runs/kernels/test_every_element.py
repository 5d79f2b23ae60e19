"""Every element of every result is written: memory full of NaN before the call leaves no trace in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitcheck.reference_runs.kernels.combine import combine
from bitcheck.reference_runs.kernels.embedding import embedding_backward
from bitcheck.reference_runs.kernels.gemm import gemm
from bitcheck.reference_runs.kernels.grouped_gemm import grouped_dgrad_swiglu, grouped_gemm
from bitcheck.reference_runs.kernels.grouped_wgrad import grouped_wgrad
from bitcheck.reference_runs.kernels.norm import rmsnorm_backward, rmsnorm_forward
from bitcheck.reference_runs.kernels.quantise import Quantised, quantise_columns, quantise_rows, quantise_weight
from bitcheck.reference_runs.kernels.schedule import GroupSchedule, schedule_groups
from bitcheck.reference_runs.kernels.slots import sum_slots
from bitcheck.reference_runs.kernels.ssm import Operands, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import scan_backward
from bitcheck.reference_runs.kernels.swiglu import swiglu_backward, swiglu_forward

COUNTS = [0, 70, 0, 5]


def cases(device: str) -> dict[str, Callable[[], Any]]:
    """Calls of every kernel in its deterministic forms, on shapes that fill no tile."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    rows = sum(COUNTS)
    offsets = torch.tensor([0, *COUNTS], device=device).cumsum(0).int()
    schedule = schedule_groups(offsets, rows)
    x, hidden, prob = randn(rows, 144), randn(rows, 400), torch.rand(rows, device=device)
    quantised, columns = quantise_rows(x), quantise_columns(x, schedule)
    dense, weight_t = quantise_weight(randn(70, 144))[0], quantise_weight(randn(4, 144, 200))[1]
    wide = randn(2, 130, 70)
    up = quantise_weight(randn(4, 200, 144))[0]
    _, rstd = rmsnorm_forward(x, x[0])
    row_of = torch.randperm(rows).view(-1, 3).to(device)
    scan = Operands(
        randn(1, 32, 2, 20), randn(1, 32, 2).abs(), -randn(2).abs(), randn(1, 32, 17), randn(1, 32, 17), randn(2)
    )
    dscan = randn(1, 32, 2, 20)
    return {
        "schedule": lambda: schedule_groups(offsets, rows),
        "rows": lambda: quantise_rows(x),
        "columns": lambda: quantise_columns(x, schedule),
        "weight": lambda: quantise_weight(wide),
        "gemm": lambda: gemm(quantised, dense),
        "grouped": lambda: grouped_gemm(quantised, up, schedule),
        "slots": lambda: grouped_dgrad_swiglu(quantised, weight_t, schedule, hidden, prob, form="slots"),
        "serial": lambda: grouped_dgrad_swiglu(quantised, weight_t, schedule, hidden, prob, form="serial"),
        "wgrad": lambda: grouped_wgrad(columns, columns, schedule, form="workspace"),
        "wgrad in parts": lambda: grouped_wgrad(columns, columns, schedule, form="workspace", num_parts=2),
        "sum": lambda: sum_slots(x),
        "swiglu": lambda: (swiglu_forward(x, x, prob), swiglu_backward(x, x, x, prob)),
        "combine": lambda: combine(x, row_of, form="gather"),
        "norm": lambda: (rmsnorm_forward(x, x[0]), rmsnorm_backward(x, x, x[0], rstd, form="two-stage")),
        "embedding": lambda: embedding_backward(x, row_of.flatten() % 3, 5, form="sorted"),
        "scan": lambda: (scan_forward(scan, 16), scan_backward(dscan, scan, 16, form="workspace")),
    }


def bits(value: Any) -> list[torch.Tensor]:
    """Return the bytes of every tensor in a result, in order."""
    if isinstance(value, Quantised):
        return [*bits(value.values), *bits(value.scales)]
    if isinstance(value, GroupSchedule):
        return bits((value.tile_expert, value.tile_begin, value.tile_end, value.expert_tiles))
    if isinstance(value, torch.Tensor):
        return [value.contiguous().view(torch.uint8)]
    return [each for part in value for each in bits(part)]


NAMES = (
    "schedule", "rows", "columns", "weight", "gemm", "grouped", "slots", "serial", "wgrad", "wgrad in parts", "sum",
    "swiglu", "combine", "norm", "embedding", "scan",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_held_nan_leaves_no_trace_in_a_result(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    call = cases(device)[name]
    expected = bits(call())
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in float32, bfloat16 and e4m3; -1 in int32
            return tensor

        return filled

    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))
    assert torch.isnan(torch.empty(3)).all()
    for actual, other in zip(bits(call()), expected, strict=True):
        assert torch.equal(actual, other)
