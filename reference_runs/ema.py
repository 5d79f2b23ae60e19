"""Exponential moving average of the masters in CPU memory, updated by a thread (V3 report, section 3.2.3).

    ema = ema + (1 - decay) (master - ema)

`start_update` copies the masters aside and returns; a thread does the arithmetic while the next step
runs; whoever wants to read waits for it first: `tensors` does. Deterministic: the copy is taken before
anything can change the masters, updates run one at a time in the order in which they were started, and
the arithmetic is elementwise.

Of a run on a GPU the average lies in CPU memory too, pinned; the arithmetic is done where the masters are. Piece by
piece the average is fetched, moved, and sent back, on streams of their own beside the next step's forward and
backward. Whatever changes the masters next waits on the GPU until they have been read (`release`).
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 26
"""Elements of an average that are on their way to the GPU, or back, at a time."""
NUM_BUFFERS = 3
"""Pieces on the GPU at once: one that comes, one that is worked on, one that goes."""


class EMA:
    """The average of named float32 tensors; starts as a copy of them."""

    def __init__(self, masters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        sizes = [master.numel() for master in masters.values()]
        is_cuda = next(iter(masters.values())).is_cuda
        self._flat = torch.empty(sum(sizes), dtype=torch.float32, pin_memory=is_cuda)
        self._staged = torch.empty(0 if is_cuda else sum(sizes), dtype=torch.float32)
        self._average = _views(self._flat, masters)
        self._copies = {} if is_cuda else _views(self._staged, masters)
        for name, master in masters.items():
            self._average[name].copy_(master)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ema")
        self._pending: Future[None] | None = None
        self._gpu = _OnGPU(decay) if is_cuda else None

    def start_update(self, masters: Mapping[str, Tensor]) -> None:
        """Copy `masters` aside and let the thread average them in."""
        if self._gpu is not None:
            self._gpu.start_update(self._average, masters)
            return
        self.wait()
        with torch.no_grad():
            for name, master in masters.items():
                self._copies[name].copy_(master)
        self._pending = self._thread.submit(_average_in, self._flat.numpy(), self._staged.numpy(), self.decay)

    def release(self) -> None:
        """Let nothing that is launched from here on change a master before it has been read."""
        if self._gpu is not None:
            self._gpu.release()

    def wait(self) -> None:
        """Return when no update is under way; raises what the update raised."""
        if self._gpu is not None:
            self._gpu.wait()
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


class _OnGPU:
    """The update's way through the GPU: one stream fetches a piece and moves it, another one sends it back.

    The order is that of the names, and a piece is worked on by one operation an element: nothing is added up.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._buffers = [torch.empty(PIECE, device="cuda") for _ in range(NUM_BUFFERS)]
        self._in, self._out = torch.cuda.Stream(), torch.cuda.Stream()
        self._moved = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._sent = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]

    def start_update(self, averages: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        """Launch the whole update behind what the current stream has been given, and return."""
        self._in.wait_stream(torch.cuda.current_stream())
        self._in.wait_stream(self._out)  # the last update's pieces are where this one fetches them
        pieces = (
            piece
            for name, master in masters.items()
            for piece in zip(averages[name].view(-1).split(PIECE), master.view(-1).split(PIECE), strict=True)
        )
        with torch.no_grad():
            for number, (average, master) in enumerate(pieces):
                slot = number % NUM_BUFFERS
                buffer = self._buffers[slot][: average.numel()]
                with torch.cuda.stream(self._in):
                    self._in.wait_event(self._sent[slot])
                    buffer.copy_(average, non_blocking=True)
                    buffer.lerp_(master, 1 - self._decay)
                    self._moved[slot].record()
                with torch.cuda.stream(self._out):
                    self._out.wait_event(self._moved[slot])
                    average.copy_(buffer, non_blocking=True)
                    self._sent[slot].record()

    def release(self) -> None:
        """Let the current stream wait until the masters have been read."""
        torch.cuda.current_stream().wait_stream(self._in)

    def wait(self) -> None:
        """Wait on the host until every piece is back."""
        self._out.synchronize()


def _average_in(average: np.ndarray, values: np.ndarray, decay: float) -> None:
    """Move `average` towards `values`, which is used up. NumPy, so as not to touch PyTorch's thread pool."""
    np.subtract(values, average, out=values)
    np.multiply(values, np.float32(1 - decay), out=values)
    np.add(average, values, out=average)
