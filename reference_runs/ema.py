"""Exponential moving average of the masters, in CPU memory and updated by a thread (V3 report, section 3.2.3).

    ema = ema + (1 - decay) (master - ema)

`start_update` copies the masters aside and returns; a thread does the arithmetic while the next step
runs; whoever wants to read waits for it first: `tensors` does. Deterministic: the copy is taken before
anything can change the masters, updates run one at a time in the order in which they were started, and
the arithmetic is elementwise.

Of a run on a GPU the average lies in its memory, and is moved by the stream that has changed the masters, in one
multi-tensor operation: V3 spreads its average over the memory of many hosts, while the average of one card would
cross the one link to its host twice a step.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from bitcheck.reference_runs.device import gpu_forms


class EMA:
    """The average of named float32 tensors; starts as a copy of them."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._pending: Future[None] | None = None
        self._is_on_gpu = gpu_forms(next(iter(masters.values()))) is not None
        if self._is_on_gpu:
            self._average = {name: master.clone() for name, master in masters.items()}
            return
        self._flat = torch.empty(sum(master.numel() for master in masters.values()), dtype=torch.float32)
        self._staged = torch.empty_like(self._flat)
        self._average = _views(self._flat, masters)
        self._copies = _views(self._staged, masters)
        for name, master in masters.items():
            self._average[name].copy_(master)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ema")

    @torch.no_grad()
    def start_update(self, masters: Mapping[str, Tensor]) -> None:
        """Copy `masters` aside and let the thread average them in; on a GPU launch the update."""
        if self._is_on_gpu:
            torch._foreach_lerp_(list(self._average.values()), list(masters.values()), 1 - self.decay)
            return
        self.wait()
        for name, master in masters.items():
            self._copies[name].copy_(master)
        self._pending = self._thread.submit(_average_in, self._flat.numpy(), self._staged.numpy(), self.decay)

    def wait(self) -> None:
        """Return when no update is under way; raises what the update raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by name, float32 where the masters are, once no update is under way.

        They are the live tensors: the next update changes them.
        """
        self.wait()
        return self._average

    def close(self) -> None:
        """Wait for the last update and end the thread."""
        self.wait()
        if not self._is_on_gpu:
            self._thread.shutdown()


def _views(flat: Tensor, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = flat.split([master.numel() for master in masters.values()])
    return {name: piece.view(master.shape) for (name, master), piece in zip(masters.items(), pieces, strict=True)}


def _average_in(average: np.ndarray, values: np.ndarray, decay: float) -> None:
    """Move `average` towards `values`, which is used up. NumPy, so as not to touch PyTorch's thread pool."""
    np.subtract(values, average, out=values)
    np.multiply(values, np.float32(1 - decay), out=values)
    np.add(average, values, out=average)
