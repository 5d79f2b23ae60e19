"""The copies to row-major order against PyTorch's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from bitcheck.hooks.kernels.row_major import runs_kernel, transpose_kernel

WORDS = {
    torch.uint8: tl.uint8,
    torch.int16: tl.uint16,
    torch.int32: tl.uint32,
    torch.int64: tl.uint64,
}


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 70, 33), (3, 16, 48), (2, 65, 9), (2, 96, 80)])
def test_a_transposed_tensor_is_copied_to_row_major_order(
    dtype: torch.dtype, shape: tuple[int, int, int], device: str
) -> None:
    batches, rows, columns = shape
    stored = torch.arange(batches * rows * columns).mul(2654435761).to(dtype).view(batches, columns, rows).to(device)
    out = torch.zeros(batches, rows, columns, dtype=dtype, device=device)
    grid = (-(-rows // 32) * -(-columns // 32), batches)
    launch = transpose_kernel[grid]
    is_aligned = rows % 16 == columns % 16 == stored.data_ptr() % 16 == out.data_ptr() % 16 == 0
    options = {"WORD": WORDS[dtype], "BLOCK_R": 32, "BLOCK_C": 32, "IS_ALIGNED": is_aligned}
    launch(stored.data_ptr(), rows, columns, rows * columns, rows, out.data_ptr(), **options)
    assert torch.equal(out, stored.transpose(1, 2))


def test_rows_and_columns_may_lie_apart_in_memory(device: str) -> None:
    stored = torch.arange(2 * 40 * 48, dtype=torch.int32, device=device).view(2, 40, 48)
    view = stored[:, 3:23, :17].transpose(1, 2)
    out = torch.zeros(view.shape, dtype=torch.int32, device=device)
    options = {"WORD": tl.uint32, "BLOCK_R": 32, "BLOCK_C": 32, "IS_ALIGNED": False}
    launch = transpose_kernel[(1, 2)]
    launch(view.data_ptr(), 17, 20, view.stride(0), view.stride(2), out.data_ptr(), **options)
    assert torch.equal(out, view)


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize("block", [64, 1024])
def test_runs_are_copied_to_row_major_order(dtype: torch.dtype, block: int, device: str) -> None:
    stored = torch.arange(2 * 7 * 3 * 5 * 24).mul(2654435761).to(dtype).view(2, 7, 3, 5, 24).to(device)
    view = stored[:, :, 1, :, 4:21].transpose(1, 2)
    out = torch.full((view.numel() + 1,), 77, dtype=dtype, device=device)
    launch = runs_kernel[(-(-view.numel() // block), 1)]
    numbers = (view.data_ptr(), *view.shape[1:], view.numel(), *view.stride()[:3], out.data_ptr())
    launch(*numbers, WORD=WORDS[dtype], BLOCK=block)
    assert torch.equal(out[:-1].view(view.shape), view)
    assert int(out[-1]) == 77
