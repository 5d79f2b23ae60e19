"""The chunked scan against a token-by-token recurrence in float64, and its bits over orders of the programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from bitcheck.reference_runs.kernels import ssm_backward
from bitcheck.reference_runs.kernels.ssm import Operands, reference_scan, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import ScanForm, scan_backward

TOLERANCE = 3e-3 if torch.cuda.is_available() else 2e-5
"""On a GPU the operands of products are rounded to TF32."""
NAMES = ("x", "dt", "A", "B", "C", "D")


def make_operands(device: str, num_seqs: int, seq_len: int, num_heads: int, head_dim: int, state_dim: int) -> Operands:
    return Operands(
        x=torch.randn(num_seqs, seq_len, num_heads, head_dim, device=device),
        dt=torch.rand(num_seqs, seq_len, num_heads, device=device) * 0.2 + 0.01,
        a=-torch.rand(num_heads, device=device) * 4 - 0.5,
        b=torch.randn(num_seqs, seq_len, state_dim, device=device),
        c=torch.randn(num_seqs, seq_len, state_dim, device=device),
        d=torch.randn(num_heads, device=device),
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", [(2, 32, 2, 20, 24), (1, 32, 3, 80, 16)])
def test_the_chunked_scan_and_its_gradients_match_the_recurrence_in_float64(
    device: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int, int]
) -> None:
    monkeypatch.setattr(ssm_backward, "HEADS", 2)  # the last part has one head
    operands = make_operands(device, *shape)
    exact = Operands(*(operand.double().requires_grad_() for operand in operands))
    y = reference_scan(exact)
    assert relative_error(scan_forward(operands, 16), y.detach()) < TOLERANCE
    dy = torch.randn_like(operands.x)
    y.backward(dy.double())
    forms: tuple[ScanForm, ...] = ("workspace", "atomic")
    for form in forms:
        for name, grad, operand in zip(NAMES, scan_backward(dy, operands, 16, form=form), exact, strict=True):
            assert operand.grad is not None
            assert relative_error(grad, operand.grad) < TOLERANCE, (form, name)


def test_operands_may_be_slices_of_one_projection(device: str) -> None:
    operands = make_operands(device, 1, 32, 2, 16, 16)
    joined = torch.cat([operands.x.flatten(2), operands.b, operands.c], -1)
    x, b, c = joined.split([32, 16, 16], -1)
    sliced = operands._replace(x=x.unflatten(-1, (2, 16)), b=b, c=c)
    assert torch.equal(scan_forward(sliced, 16), scan_forward(operands, 16))
    dy = torch.randn_like(operands.x)
    for got, expected in zip(
        scan_backward(dy, sliced, 16, form="workspace"), scan_backward(dy, operands, 16, form="workspace"), strict=True
    ):
        assert torch.equal(got, expected)


def test_a_sequence_that_does_not_cut_into_chunks_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="40 tokens in chunks of 16"):
        scan_forward(make_operands(device, 1, 40, 1, 16, 16), 16)


@pytest.mark.parametrize(
    ("shape", "raced"),
    [
        ((1, 48, 3, 16, 16), {"A", "B", "C", "D"}),  # three parts of heads, three chunks
        ((1, 16, 1, 144, 16), {"dt", "B", "C"}),  # three tiles of P; two would commute
    ],
)
def test_gradients_by_workspace_are_one_result_and_by_atomics_several(
    shuffle: Callable[[int], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int, int],
    raced: set[str],
) -> None:
    monkeypatch.setattr(ssm_backward, "HEADS", 1)
    operands = make_operands("cpu", *shape)
    dy = torch.randn_like(operands.x)
    forms: tuple[ScanForm, ...] = ("workspace", "atomic")
    for form in forms:
        results: dict[str, set[bytes]] = {name: set() for name in NAMES}
        for seed in range(4):
            with shuffle(seed):
                for name, grad in zip(NAMES, scan_backward(dy, operands, 16, form=form), strict=True):
                    results[name].add(grad.numpy().tobytes())
        differing = {name for name, bits in results.items() if len(bits) > 1}
        assert differing >= raced if form == "atomic" else not differing, (form, differing)
        assert "x" not in differing
