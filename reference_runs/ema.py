"""Exponential moving average of the masters in CPU memory, updated by a thread (V3 report, section 3.2.3).

    ema = ema + (1 - decay) (master - ema)

`start_update` copies the masters aside and returns; a thread does the arithmetic while the next step
runs; whoever wants to read waits for it first: `tensors` does. Deterministic: the copy is taken before
anything can change the masters, updates run one at a time in the order in which they were started, and
the arithmetic is elementwise.

From a GPU the copy goes into pinned memory on a stream of its own, beside the next step's forward; whatever
changes the masters next waits on the GPU until it is through (`release`).
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 22
"""Elements that PyTorch's threads share at a time, few enough to stay in their caches."""


class EMA:
    """The average of named float32 tensors; starts as a copy of them."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        sizes = [master.numel() for master in masters.values()]
        self._device = next(iter(masters.values())).device
        is_cuda = self._device.type == "cuda"
        self._flat = torch.empty(sum(sizes), dtype=torch.float32)
        self._staged = torch.empty(sum(sizes), dtype=torch.float32, pin_memory=is_cuda)
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None
        self._copied: torch.cuda.Event | None = None
        self._average = _views(self._flat, masters)
        self._copies = _views(self._staged, masters)
        for name, master in masters.items():
            self._average[name].copy_(master)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ema")
        self._pending: Future[None] | None = None

    def start_update(self, masters: Mapping[str, Tensor]) -> None:
        """Copy `masters` aside and let the thread average them in."""
        self.wait()
        if self._stream is None:
            with torch.no_grad():
                for name, master in masters.items():
                    self._copies[name].copy_(master)
            self._pending = self._thread.submit(_average_in, self._flat.numpy(), self._staged.numpy(), self.decay)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for name, master in masters.items():
                self._copies[name].copy_(master, non_blocking=True)
            self._copied = self._stream.record_event()
        self._pending = self._thread.submit(_average_when, self._copied, self._flat, self._staged, self.decay)

    def release(self) -> None:
        """Let nothing that is launched from here on change a master before it has been copied."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Return when no update is under way; raises what the update raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by name, float32 on the CPU, once no update is under way.

        They are the live tensors: the next update changes them.
        """
        self.wait()
        return self._average

    def close(self) -> None:
        """Wait for the last update and end the thread."""
        self.wait()
        self._thread.shutdown()


def _views(flat: Tensor, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = flat.split([master.numel() for master in masters.values()])
    return {name: piece.view(master.shape) for (name, master), piece in zip(masters.items(), pieces, strict=True)}


def _average_when(copied: torch.cuda.Event, average: Tensor, values: Tensor, decay: float) -> None:
    """Do what `_average_in` does, once `copied` has happened: the same roundings, on as many cores as PyTorch has."""
    copied.synchronize()
    with torch.no_grad():
        for mine, new in zip(average.split(PIECE), values.split(PIECE), strict=True):
            mine.add_(new.sub_(mine).mul_(1 - decay))


def _average_in(average: np.ndarray, values: np.ndarray, decay: float) -> None:
    """Move `average` towards `values`, which is used up. NumPy, so as not to touch PyTorch's thread pool."""
    np.subtract(values, average, out=values)
    np.multiply(values, np.float32(1 - decay), out=values)
    np.add(average, values, out=average)
