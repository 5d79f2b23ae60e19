"""Kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors.

`device` is where a test's tensors live. Marked `gpu`: a test that means something on a GPU only.
`shuffle` reorders the interpreter's programs, which stand for the blocks of a GPU's grid: a result
that depends on the order in which programs run shows it here, without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when a kernel is defined, so before any import of one

triton = pytest.importorskip("triton", reason="triton is not installed")


def range_over_loaded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter loop to a bound that a kernel loaded: its scalars are arrays of one element,
    and NumPy 2.4 no longer turns those into an int (seen with triton 3.6)."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(autouse=True)
def _range_over_loaded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    range_over_loaded_numbers(monkeypatch)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@contextmanager
def _shuffled(seed: int) -> Iterator[None]:
    from triton.runtime.interpreter import interpreter_builder

    in_order = interpreter_builder.set_grid_idx
    orders: dict[tuple[int, ...], Any] = {}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        grid = tuple(interpreter_builder.grid_dim)
        if grid not in orders:
            orders[grid] = np.random.default_rng((seed, *grid)).permutation(int(np.prod(grid)))
        index = orders[grid][np.ravel_multi_index((x, y, z), grid)]
        in_order(*(int(i) for i in np.unravel_index(index, grid)))

    interpreter_builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del interpreter_builder.set_grid_idx


@pytest.fixture
def shuffle() -> Callable[[int], AbstractContextManager[None]]:
    """A context manager that runs each launch's programs in an order drawn from a seed; interpreter only."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has its own order; tests marked gpu look at that")
    return _shuffled


@pytest.fixture
def count_results(shuffle: Callable[[int], AbstractContextManager[None]]) -> Callable[..., int]:
    """Count the different results (bits) of a function over several orders of the programs."""

    def count(function: Callable[[], Any], num_orders: int = 3) -> int:
        results = set()
        for seed in range(num_orders):
            with shuffle(seed):
                value = function()
            tensors = value if isinstance(value, tuple) else (value,)
            results.add(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors))
        return len(results)

    return count
