"""When a collective is complete, so that its results may be read.

A program waits for a work (`work.wait()`), polls it, takes its future, or waits for a functional collective's
tensor. At that moment what was promised of it is read, and whatever else was recorded of the same memory
while it was in flight: a module that passes on a tensor which is still being written gave that tensor.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from bitcheck.events import Site
from bitcheck.hooks.dynamo import paused, skip_frame
from bitcheck.hooks.modules import in_backward
from bitcheck.hooks.patches import Function, Patches
from bitcheck.hooks.steps import StepBuilder, version_of
from bitcheck.hooks.tensors import storage_id

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder


_OWN_REFERENCES = 3
"""To a work that the program has let go of: from what is pending, from a variable, as an argument."""


class Promised:
    """Results of a collective under way: their places in the step, and the tensors they will be read from."""

    __slots__ = ("builder", "results", "storages", "versions")

    def __init__(self, builder: StepBuilder, results: list[tuple[int, torch.Tensor]]) -> None:
        self.builder = builder
        self.results = results
        self.versions = [version_of(tensor) for _, tensor in results]
        """Of the tensors now: what the program changes from here on is no longer the result."""
        self.storages = tuple(dict.fromkeys(storage for _, t in results if (storage := storage_id(t)) is not None))

    def forget(self) -> None:
        """Let go of the tensors, unread; their memory is known to be in flight all the same."""
        self.results, self.versions = [], []


class _Flight:
    """A storage that collectives are writing."""

    __slots__ = ("num_works", "promises")

    def __init__(self) -> None:
        self.num_works = 0
        """Works under way that write it; none where a functional collective does."""
        self.promises: list[Promised] = []
        """What was recorded of it meanwhile."""


class Completions:
    """Reads the results of one recorder's collectives when they are there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: dict[int, tuple[Any, list[Promised]]] = {}
        """Identity of a work -> the work and what it promises."""
        self._coalesced: dict[int, list[Promised]] = {}
        """Identity of a group that is coalescing -> what was begun."""
        self._futures: dict[int, tuple[Any, Any]] = {}
        """Identity of a future -> the future and the pending work that it was taken of."""
        self.flying: dict[int, _Flight] = {}
        """Storage -> the collectives that write it. Steps hold this very dict."""
        self._ask: Function | None = None
        """`Work.is_completed` itself."""
        self._lock = threading.RLock()
        """A thread of gloo's calls back where a program took a work's future."""

    def install(self, patches: Patches) -> None:
        """See works being waited for."""
        group, work = torch._C._distributed_c10d.ProcessGroup, torch._C._distributed_c10d.Work
        patches.replace(group, "_start_coalescing", self._starting)
        patches.replace(group, "_end_coalescing", self._ending)
        for name in ("wait", "synchronize", "block_current_stream"):
            patches.replace(work, name, self._waiting)
        patches.replace(work, "is_completed", self._asking)
        patches.replace(work, "get_future", self._promising)
        for name in ("wait", "value", "done"):
            patches.replace(torch._C.Future, name, self._taking)

    def clear(self) -> None:
        """Forget everything."""
        self._pending.clear()
        self._coalesced.clear()
        self._futures.clear()
        self.flying.clear()

    # --- what is promised

    def take_off(self, promised: Promised) -> None:
        """Know that a collective writes these tensors from now on."""
        for storage in promised.storages:
            self.flying.setdefault(storage, _Flight())

    def expect(self, promised: Promised) -> None:
        """Read what was promised when somebody waits for its memory."""
        for event, tensor in promised.results:
            one = Promised(promised.builder, [(event, tensor)])
            for storage in one.storages:
                self.flying.setdefault(storage, _Flight()).promises.append(one)

    def await_work(self, group: Any, work: Any, promised: Promised) -> None:
        """Read what was promised when somebody waits for a work; at once where there is none to wait for."""
        waiting = self._coalesced.get(id(group))
        if waiting is not None:
            waiting.append(promised)
            return
        with self._lock:
            for storage in promised.storages:
                self.flying.setdefault(storage, _Flight()).num_works += 1
            if isinstance(work, torch._C._distributed_c10d.Work):
                self._pending.setdefault(id(work), (work, []))[1].append(promised)
            else:
                self._settle(promised)

    def awaited(
        self, builder: StepBuilder, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...]
    ) -> list[int] | None:
        """Record a tensor that a collective is still writing, to be read when it is complete; None for any other."""
        if not self.flying:
            return None
        inner = _written(tensor)
        storage = storage_id(inner)
        with self._lock:
            flight = self.flying.get(storage) if storage is not None else None
            if flight is None:
                return None
            events = builder.reserve(site, inner, group, inputs)
            flight.promises.append(Promised(builder, [(event, inner) for event in events]))
            return events

    # --- what is there

    def _settle(self, promised: Promised, is_chance: bool = False) -> None:
        """Read what a work has written, and what else was recorded of the memory where no other still writes it."""
        self._read(promised, is_chance)
        for storage in promised.storages:
            flight = self.flying.setdefault(storage, _Flight())
            flight.num_works -= 1
            if flight.num_works <= 0:
                self._land(storage, is_chance)

    def _read(self, promised: Promised, is_chance: bool) -> None:
        """Read tensors whose bits are there.

        Where it is by chance that it happens now, not those that the program has changed, nor a device's: this
        stream is none that the program had wait for them, so their memory may be handed on under our reading.
        """
        for (event, tensor), version in zip(promised.results, promised.versions, strict=True):
            is_readable = not is_chance or (tensor.is_cpu and version_of(tensor) == version)
            if self._recorder.is_active and is_readable:
                promised.builder.settle(event, tensor)

    def land(self, tensor: torch.Tensor) -> None:
        """Read what was recorded of a tensor's memory while a collective, which is complete, was writing it."""
        storage = storage_id(tensor) if self.flying else None
        if storage is not None:
            with self._lock:
                self._land(storage, False)

    def _land(self, storage: int, is_chance: bool) -> None:
        flight = self.flying.pop(storage, None)
        for promised in flight.promises if flight is not None else ():
            self._read(promised, is_chance)

    @paused
    def _settle_work(self, work: Any, is_chance: bool = False) -> None:
        with self._lock:
            held = self._pending.pop(id(work), None)
            for promised in held[1] if held is not None else ():
                self._settle(promised, is_chance)
            for key in [key for key, (_, own) in self._futures.items() if own is work]:
                del self._futures[key]

    def settle_dropped(self) -> None:
        """Read what is complete in the host's memory and nobody can wait for any more: the program has let go of the
        work.

        When that is, is chance: what was changed since is not read, and counts as unobserved.
        """
        with self._lock:
            for work, _ in list(self._pending.values()):
                if sys.getrefcount(work) <= _OWN_REFERENCES:
                    self._settle_complete(work)

    def _settle_complete(self, work: Any) -> None:
        if self._ask is not None and self._is_on_host(work) and self._ask(work):
            self._settle_work(work, is_chance=True)

    def close(self, builder: StepBuilder) -> None:
        """Let go of what a step that ends was promised; what a work still writes the next step does not read either.

        So a tensor that nobody waits for is held until a collective begins when it is there and its work is dropped,
        and never beyond the end of its step; of its work no more than the handle, until that says that it is complete.
        """
        with self._lock:
            for work, promises in list(self._pending.values()):
                self._settle_complete(work)
                for promised in promises:
                    if promised.builder is builder:
                        promised.forget()
                self._settle_complete(work)
            for storage, flight in list(self.flying.items()):
                flight.promises = [promised for promised in flight.promises if promised.builder is not builder]
                if not flight.promises and flight.num_works <= 0:
                    del self.flying[storage]
            builder.close()

    # --- a work

    def _waiting(self, original: Function) -> Function:
        @functools.wraps(original)
        @skip_frame
        def wait(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(own, *args, **kwargs)
            self._settle_work(own)
            return result

        return wait

    def _asking(self, original: Function) -> Function:
        """A program may read a result that it polled for. Of a device's work that says nothing of its stream."""
        self._ask = original

        @functools.wraps(original)
        @skip_frame
        def is_completed(own: Any) -> Any:
            result = original(own)
            if result and self._is_on_host(own):
                self._settle_work(own)
            return result

        return is_completed

    def _promising(self, original: Function) -> Function:
        """Whoever takes a work's future may never wait for the work: the future's first callback reads its results."""

        @functools.wraps(original)
        @skip_frame
        def get_future(own: Any) -> Any:
            future = original(own)
            if id(own) in self._pending:
                self._futures[id(future)] = future, own
                if self._is_on_host(own):
                    future.add_done_callback(lambda _: self._settle_work(own))
                elif in_backward():
                    self._settle_after_backward(own)
            return future

        return get_future

    def _taking(self, original: Function) -> Function:
        """A future wakes whoever waits for it before it calls back, so what it stands for is read by both, once."""

        @functools.wraps(original)
        @skip_frame
        def take(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(own, *args, **kwargs)
            held = self._futures.get(id(own))
            if held is not None and held[0] is own and result is not False:  # `done` may say no
                self._settle_work(held[1])
            elif held is None and self._futures:
                with self._lock:  # one that follows from it: whoever is reading comes first
                    pass
            return result

        return take

    def _settle_after_backward(self, work: Any) -> None:
        """Read a device's results when backward ends, after what others have put there has run, which waits."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(lambda: self._settle_work(work)))

    def _is_on_host(self, work: Any) -> bool:
        held = self._pending.get(id(work))
        return held is not None and all(tensor.is_cpu for promised in held[1] for _, tensor in promised.results)

    # --- several works in one

    def _starting(self, original: Function) -> Function:
        @functools.wraps(original)
        @skip_frame
        def start(own: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.is_active:
                self._coalesced[id(own)] = []
            return original(own, *args, **kwargs)

        return start

    def _ending(self, original: Function) -> Function:
        @functools.wraps(original)
        @skip_frame
        def end(own: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(own, *args, **kwargs)
            self._end_coalesced(own, work)
            return work

        return end

    @paused
    def _end_coalesced(self, own: Any, work: Any) -> None:
        for promised in self._coalesced.pop(id(own), []):
            self.await_work(own, work, promised)


def _written(tensor: Any) -> torch.Tensor:
    """Return the plain tensor that a functional collective's result, or the shard of a DTensor, stands for."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(local, "elem", local)
