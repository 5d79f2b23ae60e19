"""Who last wrote a storage, at level `op`, and which part of it where it was handed out with nothing in it.

One `Memory` a storage: the events that hold its last writing, and of memory from `torch.empty` the bytes that mean
something since, as a range while that is enough (`written`), else byte by byte (`fresh.Shadow`). Place in the flow:
ops -> *storages*, fresh -> which events an argument was computed from, and what of it is digested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bitcheck.hooks.fresh import Mask, Shadow, can_follow, is_dense
from bitcheck.hooks.native import native
from bitcheck.hooks.steps import StepBuilder
from bitcheck.hooks.tensors import byte_span

is_gone: Callable[[Any], bool] = torch.UntypedStorage._expired  # type: ignore[assignment]
"""Says of a weak reference's number whether the storage was freed."""


class StorageWriters:
    """Who last wrote a storage, and whether that is still there; `native.Memory` is the same, compiled."""

    __slots__ = ("builder", "events", "weak", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.weak: Any = tensor.untyped_storage()._weak_ref()
        """`is_gone(memory.weak)`: the storage was freed; another may lie at its address."""
        self.written: tuple[int, int] | Shadow | None = None
        """Of memory that was handed out with nothing in it: bytes from and up to which it was written since, or which
        mean something where they are not all of those; None where all of it may mean something. On a device, and of
        large memory, always the first: what lies between two parts that were written counts as written."""
        self.builder: StepBuilder | None = None
        self.events: tuple[int, ...] = ()

    def begin_again(self, tensor: torch.Tensor) -> None:
        """Stand for the storage that a tensor has now."""
        torch.UntypedStorage._free_weak_ref(self.weak)
        self.weak = tensor.untyped_storage()._weak_ref()
        self.written, self.builder, self.events = None, None, ()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self.weak)


if TYPE_CHECKING or native is None:  # noqa: SIM108  a base that mypy knows
    _Base = StorageWriters
else:
    _Base = native.Memory


class Memory(_Base):
    """Who last wrote a storage. One object serves all that follow each other at one address."""

    __slots__ = ()

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Say whether nobody wrote yet where a tensor lies, as far as is known."""
        if self.written is None or isinstance(self.written, Shadow):
            return False
        begin, end = byte_span(tensor)
        return end <= self.written[0] or begin >= self.written[1]

    @property
    def is_untouched(self) -> bool:
        """Nobody wrote any of it yet, as far as is known."""
        return isinstance(self.written, tuple) and self.written[0] >= self.written[1]

    def note_write(self, tensor: torch.Tensor, chance: Mask | None = None) -> None:
        """Note that a tensor over this memory was written, all of it but for the elements that are chance."""
        if self.written is None and chance is None:
            return
        begin, end = byte_span(tensor)
        known = self.written
        is_followed = can_follow(tensor)
        if not is_followed and not isinstance(known, tuple):
            self.written = None
            return
        if isinstance(known, tuple) and (chance is None or not is_followed):
            is_apart = known[0] < known[1] and (begin > known[1] or end < known[0])
            if not is_followed or (is_dense(tensor) and not is_apart):
                if known[0] < known[1]:
                    begin, end = min(begin, known[0]), max(end, known[1])
                self.written = (begin, end) if end - begin < tensor.untyped_storage().nbytes() else None
                return
        shadow = self._shadow(tensor)
        shadow.note(tensor, chance)
        self.written = None if chance is None and shadow.is_complete else shadow

    def chance(self, tensor: torch.Tensor) -> Mask | None:
        """Return which elements of a CPU tensor over this memory hold what it held by chance, None where none does."""
        known = self.written
        if isinstance(known, Shadow):
            if not (known.fits(tensor) and can_follow(tensor)):
                self.written = None  # resized behind PyTorch's back, or more dimensions than numpy has
                return None
            return known.chance(tensor)
        if known is None or not can_follow(tensor):
            return None
        begin, end = byte_span(tensor)
        return None if known[0] <= begin and end <= known[1] else self._shadow(tensor).chance(tensor)

    def _shadow(self, tensor: torch.Tensor) -> Shadow:
        num_bytes = tensor.untyped_storage().nbytes()
        if isinstance(self.written, Shadow) and self.written.fits(tensor):
            return self.written
        begin, end = self.written if isinstance(self.written, tuple) else (0, num_bytes)
        return Shadow(num_bytes, begin, end)
