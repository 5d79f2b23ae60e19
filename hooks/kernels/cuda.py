"""What the digester asks of CUDA: streams, marks on them, buffers, copies on a side stream.

The one place of the digester that calls `torch.cuda`; tests put a host's thread in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_NO_FUNCTION: Any = torch._C.DisableTorchFunction
_NO_DISPATCH: Any = torch._C._DisableTorchDispatch
# What torch.cuda's functions call in the end; absent where PyTorch was built without CUDA.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_DEFAULT = 0
"""The handle of a device's default stream."""


class CudaQueue:
    """The streams of one CUDA device, seen from whatever thread calls.

    A stream is named by its handle. Its *mark* is how far it had come when `mark` was last called.
    Who waits for a stream waits for its mark; for the default stream, for all that the stream has by then, which spares
    a mark after each launch: that stream never ends, and PyTorch never captures it.
    Buffers are allocated with the side stream current, so that the caching allocator never mixes
    them with the program's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._index: int = self.device.index
        # PyTorch hands out 32 streams of each priority again and again, and captures graphs on one of the common
        # priority: ours must never be that one.
        self._side: torch.cuda.Stream = torch.cuda.Stream(self._index, priority=-1)
        self._streams: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._default = torch.cuda.default_stream(self._index)
        self._default_event = torch.cuda.Event()
        self.questions: tuple[int, Any, Any, Any] = (self._index, _is_capturing, _current_device, _raw_stream)
        """The device's number, and what `is_capturing`, `is_current` and `stream` ask in the end."""

    def is_capturing(self) -> bool:
        """Say whether this thread's current stream is being captured into a CUDA graph."""
        return bool(_is_capturing())

    def is_current(self) -> bool:
        """Say whether the device is this thread's current one."""
        return bool(_current_device() == self._index)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device this thread's current one for a while."""
        with torch.cuda.device(self._index):
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on the side stream, unseen by modes and by autograd."""
        with _NO_FUNCTION(), _NO_DISPATCH(), torch.no_grad(), torch.cuda.stream(self._side):
            yield

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised buffer on the device, [size]."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def pinned(self, size: int) -> torch.Tensor:
        """Return an int64 buffer of zeros in the host's page-locked memory, [size]."""
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def stream(self) -> int:
        """Return the device's current stream."""
        handle: int = _raw_stream(self._index)
        return handle

    def mark(self, stream: int) -> None:
        """Move the current stream's mark to here; `stream` is its handle."""
        known = self._streams.get(stream)
        if known is None:
            event = torch.cuda.Event()
            known = self._streams[stream] = torch.cuda.current_stream(self._index), event
        known[1].record(known[0])

    def wait_for(self, stream: int) -> None:
        """Let the current stream wait for another's mark; the host waits for nothing."""
        torch.cuda.current_stream(self._index).wait_event(self._mark_of(stream))

    def needs_mark(self, stream: int) -> bool:
        """Say whether `send` and `wait_for` have to be told by `mark` how far a stream has come."""
        return stream != _DEFAULT

    def _mark_of(self, stream: int) -> torch.cuda.Event:
        """Return what to wait for. The default stream's is moved to here; who waits for it already does as before."""
        if stream != _DEFAULT:
            return self._streams[stream][1]
        self._default_event.record(self._default)
        return self._default_event

    def send(self, streams: Iterable[int], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy device buffers to pinned ones (target, source) in this order, behind the marks of `streams`."""
        with self.aside():
            for stream in streams:
                self._side.wait_event(self._mark_of(stream))
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the side stream; at the start only."""
        self._side.synchronize()

    def ask(self) -> None:
        """Raise RuntimeError where the device has failed."""
        self._side.query()
