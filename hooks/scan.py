"""Every operation of a program executed a second time on copies of its inputs: which disagree with themselves.

The program's own execution comes first and is the one that counts; the second runs on copies, in
memory of its own, with the random generators put back before it and put right after it. So the
training's bits are those of a bare run.

With `poison`, memory that `empty` and its kin hand out is followed until it is written. An operation
that is given some of it which nobody wrote is executed twice more, on copies with two different
patterns there: what changes was computed from uninitialised memory. Elements that only carry a
pattern on (a copy, a partial write) are followed further and are no finding. Custom operators get
their own fresh memory filled with the two patterns. Only floating point is poisoned: indices may not be.

Left in the folder of the settings, a file a rank: what `bitcheck.scan` reads.

    {"executed": 1284, "steps": 3, "skipped": {"...": 2}, "findings": [{"op": "aten.index_put.default", ...}]}

Long because both kinds of trial, races and memory that nobody wrote, execute alike.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bitcheck.errors import RecordingError
from bitcheck.events import Level, Site, StepColumns, qualified_name
from bitcheck.hooks.attach import call_at_end, is_worker, leave_word
from bitcheck.hooks.capture import CallMemory
from bitcheck.hooks.dynamo import UnseenMode, is_quiet, paused, skip_frame
from bitcheck.hooks.launches import Kernel
from bitcheck.hooks.lines import Lines
from bitcheck.hooks.modules import named_tensors
from bitcheck.hooks.op_schema import OpFacts, facts_of, named_arguments
from bitcheck.hooks.ops import Location, OpHooks
from bitcheck.hooks.placement import this_placement
from bitcheck.hooks.recorder import Recorder
from bitcheck.hooks.rng import HostGenerator, host_generators, same_state
from bitcheck.hooks.steps import StepBuilder
from bitcheck.hooks.writer import WRITER
from bitcheck.settings import Settings

PATTERNS = (0x11, 0x77)
"""Bytes that stand for memory that nobody wrote: finite numbers in every floating dtype, and far apart."""
RACE, UNINITIALISED = "race", "uninitialised"
_OWN_NAMESPACES = ("aten", "prims", "c10d")
_KERNELS = "triton."
_SHARED = "operators that drew from Python's or numpy's generator, or ran while another thread did"

Results = list[tuple[str, torch.Tensor]]


def begin_scan(settings: Settings) -> None:
    """Attach a scanner to this process; the first that trains as its rank scans."""
    assert settings.scan is not None
    if is_worker():
        return
    folder, poison = Path(settings.scan["folder"]), bool(settings.scan["poison"])
    pid = os.getpid()

    def open_store() -> _Nowhere:
        rank = this_placement().rank
        path = folder / f"rank-{rank:05d}.json"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            raise RecordingError(f"another process of rank {rank} is scanned already") from None
        leave_word(settings, "claimed", rank=rank, world_size=this_placement().world_size)

        def end() -> None:
            if os.getpid() == pid:
                recorder.stop()
                path.write_text(json.dumps(recorder.scanner.report(recorder.num_steps)), encoding="ascii")

        call_at_end(end)
        return _Nowhere()

    recorder = ScanRecorder(open_store, poison=poison)
    recorder.start()
    os.register_at_fork(after_in_child=recorder.detach)


class _Nowhere:
    """Takes steps that hold nothing."""

    leaf_limit_bytes: int | None = 0

    def append(self, record: StepColumns) -> None:
        """Drop a step."""

    def close(self, status: str) -> None:
        """Do nothing."""


class _Blank(StepBuilder):
    """A step of which only the course of calls is wanted: no tensor is digested."""

    def add_tensors(
        self, tensors: Any, group: int = -1, inputs: Iterable[int] = (), add_writers: bool = True
    ) -> list[int]:
        """Record nothing."""
        return []

    def add_tensor(
        self, site: Site, tensor: torch.Tensor, group: int = -1, inputs: Iterable[int] = (), add_writers: bool = True
    ) -> list[int]:
        """Record nothing."""
        return []

    def add_again(self, site: Site, tensor: torch.Tensor, group: int, inputs: Iterable[int]) -> list[int]:
        """Record nothing."""
        return []

    def add_value(self, site: Site, value: object, group: int = -1) -> list[int]:
        """Record nothing."""
        return []

    def add_bytes(self, site: Site, data: Any, group: int = -1) -> list[int]:
        """Record nothing."""
        return []


class ScanRecorder(Recorder):
    """Knows at every operation in which step, phase and module it runs, as the recorder does; records nothing."""

    def __init__(self, open_store: Any, *, poison: bool, on_trouble: Any = None) -> None:
        super().__init__(open_store, level=Level.OP, on_trouble=on_trouble)
        self.scanner = ScanHooks(self, poison)
        self.ops = self.scanner

    def _new_step(self, step: int) -> StepBuilder:
        blank = super()._new_step(step)
        return _Blank(step, blank.record.kind, True, self._digesters, self._known)

    def _begin_initial(self, builder: StepBuilder) -> None:
        pass


class _Fresh:
    """Memory that was handed out and not yet wholly written."""

    def __init__(self, storage: torch.UntypedStorage, element_size: int, written: bool) -> None:
        self.reference = StorageWeakRef(storage)
        self._element_size = element_size
        if not written:
            _disturb(_bytes_of(storage), element_size)
        self.content = _bytes_of(storage).clone()
        """What it held: an element that is no longer so was written by something that is no operation."""
        self.written = torch.full_like(self.content, written, dtype=torch.bool)

    def unwritten(self, begin: int, end: int, now: torch.Tensor) -> torch.Tensor:
        """Return which of its bytes nobody wrote, bool [end - begin]; `now` is what they hold."""
        kept = self.content[begin:end] == now
        if len(kept) % self._element_size == 0:
            elements = kept.reshape(-1, self._element_size)
            kept = elements.all(-1, keepdim=True).expand_as(elements).reshape(-1)
        return ~self.written[begin:end] & kept


def _disturb(memory: torch.Tensor, element_size: int) -> None:
    """Change the lowest bit of every element of memory that was just handed out, uint8 [n].

    What it holds means nothing, but is often what the step before wrote there: were the program to
    write the same again without an operation, through numpy say, nothing would seem to be written.
    """
    memory[: len(memory) // element_size * element_size].view(-1, element_size)[:, 0] ^= 1


class ScanHooks(OpHooks):
    """Executes each operation again."""

    def __init__(self, recorder: Recorder, poison: bool) -> None:
        super().__init__(recorder)
        self._poison = poison
        self._fresh: dict[int, _Fresh] = {}
        self._where = Lines()
        self._executed: Counter[tuple[Any, ...]] = Counter()
        self._findings: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._skipped: Counter[str] = Counter()

    @skip_frame
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if not self._recorder.is_active or is_quiet():
            return func(*args, **kwargs)
        self._launches.look()
        if not facts.is_recorded:
            result = func(*args, **kwargs)
            if self._poison and _is_allocation(facts):
                self._note_fresh(result)
            return result
        trial = self._prepare(func, facts, args, kwargs)
        result = func(*args, **kwargs)
        if trial is not None:
            self._try_again(trial, result)
        return result

    @skip_frame
    def launch(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], execute: Any) -> Any:
        """Launch a kernel twice, the second time on copies of what its pointers point at."""
        if not self._recorder.is_active:
            return execute(*args, **kwargs)
        given = {key: value for key, value in kwargs.items() if key in kernel.arguments}
        facts = self._facts_of_launch(kernel, args, given)._replace(unread=frozenset())
        rest = {key: value for key, value in kwargs.items() if key not in kernel.arguments}
        trial = self._prepare(lambda *own, **named: execute(*own, **named, **rest), facts, args, given)
        result = execute(*args, **kwargs)
        if trial is not None:
            self._try_again(trial, None)
        return result

    # --- one operation

    @paused
    def _prepare(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> _Trial | None:
        where = self._locate()
        tensors = [value for _, value in named_arguments(facts, args, kwargs) if isinstance(value, torch.Tensor)]
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
            self._skipped["operations on tensors of another kind (subclasses, fake, distributed)"] += 1
            return None
        if any(tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
            self._skipped["operations on sparse, nested or meta tensors"] += 1
            return None
        line = self._where.note(where.phase)
        return _Trial(func, facts, args, kwargs, where, line)

    @paused
    def _try_again(self, trial: _Trial, result: Any) -> None:
        where, facts = trial.where, trial.facts
        first = trial.results(trial.args, trial.kwargs, result)
        if not trial.note_executed():
            self._skip(_SHARED, first)
            return
        key = (where.phase, where.root, where.path, facts.name, where.node)
        self._executed[key] += 1
        try:
            if self._poison and not trial.is_own:
                # Its own fresh memory would differ from one execution to the next: the same in two of them.
                one, other = (trial.execute(trial.fresh_copies(), PATTERNS[0])[0] for _ in range(2))
                self._note(key, trial, RACE, _compare(one, other))
            elif first or _is_number(result):
                second, number = trial.execute(trial.fresh_copies())
                changed = _compare(first, second)
                if _is_number(result) and repr(number) != repr(result):
                    changed.append(("out", torch.ones(1, dtype=torch.bool)))
                self._note(key, trial, RACE, changed)
            if self._poison:
                self._try_poisoned(key, trial, first)
        except Exception as error:  # noqa: BLE001  the program's own execution went well; it must go on
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._skip(f"{facts.name} could not be executed again: {reason}", first)

    def _skip(self, reason: str, written: Results) -> None:
        """Count an operation that is not executed again; what it wrote counts as written in full."""
        self._skipped[reason] += 1
        for _, tensor in written if self._poison else ():
            self._note_written(tensor, None)

    def _note(self, key: tuple[Any, ...], trial: _Trial, kind: str, changed: list[tuple[str, torch.Tensor]]) -> None:
        if not changed:
            return
        where = trial.where
        found = self._findings.setdefault(
            (*key, kind),
            {
                "kind": kind,
                "phase": str(where.phase),
                "module": qualified_name(where.root, where.path, False),
                "op": trial.facts.name,
                "node": where.node,
                "line": trial.line,
                "first_step": where.builder.step,
                "disagreed": 0,
                "outputs": [],
                "elements": 0,
                "of": 0,
            },
        )
        found["disagreed"] += 1
        found["outputs"] = sorted({*found["outputs"], *(slot for slot, _ in changed)})
        elements = sum(int(mask.sum()) for _, mask in changed)
        if elements > found["elements"]:
            found["elements"], found["of"] = elements, sum(mask.numel() for _, mask in changed)

    def report(self, num_steps: int) -> dict[str, Any]:
        """Return what was found, as JSON data."""
        findings = [found | {"executed": self._executed[key[:-1]]} for key, found in self._findings.items()]
        return {
            "executed": sum(self._executed.values()),
            "steps": num_steps,
            "skipped": dict(sorted(self._skipped.items())),
            "findings": findings,
            "stopped": str(self._recorder.trouble) if self._recorder.trouble is not None else None,
        }

    # --- memory that nobody wrote

    def _try_poisoned(self, key: tuple[Any, ...], trial: _Trial, first: Results) -> None:
        """Execute the operation with either pattern where it is given memory that nobody wrote."""
        unwritten = {}
        for place, (storage, begin, end) in enumerate(trial.memory.storages()):
            fresh = self._fresh.get(storage)
            if fresh is not None and not fresh.reference.expired() and trial.reads(storage):
                mask = fresh.unwritten(begin, end, trial.copies[place])
                if mask.any():
                    unwritten[place] = mask
        carried: dict[str, torch.Tensor] = {}
        if unwritten or not trial.is_own:
            results = [
                trial.execute(
                    [flat.masked_fill(unwritten[place], pattern) if place in unwritten else flat.clone()
                     for place, flat in enumerate(trial.copies)],
                    pattern,
                )[0]
                for pattern in PATTERNS
            ]  # fmt: skip
            changed = []
            for (slot, one), (_, other) in zip(*results, strict=True):
                keeps = _is_pattern(one, PATTERNS[0]) & _is_pattern(other, PATTERNS[1])
                differs = _differs(one, other) & ~keeps
                if keeps.any():
                    carried[slot] = keeps
                if differs.any():
                    changed.append((slot, differs))
            self._note(key, trial, UNINITIALISED, changed)
        for slot, tensor in first:
            self._note_written(tensor, carried.get(slot))

    @paused
    def _note_fresh(self, result: Any) -> None:
        for _, tensor in named_tensors(result, "out"):
            if (
                type(tensor) is torch.Tensor
                and not tensor.is_meta
                and tensor.dtype.is_floating_point
                and tensor.numel()
            ):
                storage = tensor.untyped_storage()
                self._fresh[storage._cdata] = _Fresh(storage, tensor.element_size(), written=False)

    def _note_written(self, tensor: torch.Tensor, carried: torch.Tensor | None) -> None:
        """The tensor was written, but for the elements that only carry on what nobody wrote."""
        if not tensor.numel():
            return
        storage = tensor.untyped_storage()
        fresh = self._fresh.get(storage._cdata)
        if fresh is None or fresh.reference.expired():
            self._fresh.pop(storage._cdata, None)
            if carried is None:
                return
            fresh = self._fresh[storage._cdata] = _Fresh(storage, tensor.element_size(), written=True)
        size = tensor.element_size()
        view = fresh.written.as_strided(
            (*tensor.size(), size), (*(stride * size for stride in tensor.stride()), 1), tensor.storage_offset() * size
        )
        view.copy_((~carried).unsqueeze(-1) if carried is not None else torch.ones((), dtype=torch.bool))
        if carried is not None:
            fresh.content = _bytes_of(storage).clone()
        elif fresh.written.all():
            del self._fresh[storage._cdata]

    def forget(self) -> None:
        """Drop what is known of memory that is gone."""
        super().forget()
        self._fresh = {key: fresh for key, fresh in self._fresh.items() if not fresh.reference.expired()}


class _Trial:
    """One call of an operator, its inputs copied before it runs, to be executed again."""

    def __init__(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, where: Location, line: str | None) -> None:
        self.func, self.facts, self.args, self.kwargs = func, facts, args, kwargs
        self.where, self.line = where, line
        self.memory = CallMemory()
        for value in (*args, *kwargs.values()):
            self.memory.measure(value)
        self.copies = self.memory.copies()
        self._drawn = [(generator, generator.get_state()) for generator in _generators(facts, args, kwargs)]
        """Generators that it may draw from, with their states before; after `note_executed` those that it drew from."""

    def note_executed(self) -> bool:
        """It has run: a generator that did not move it does not draw from, and other threads may.

        False where it cannot be executed again: Python's or numpy's generator moved, and another thread may have drawn,
        whose numbers would come twice.
        """
        self._drawn = [
            (generator, state) for generator, state in self._drawn if not same_state(generator.get_state(), state)
        ]
        is_moved = any(isinstance(generator, HostGenerator) for generator, _ in self._drawn)
        return not (is_moved and _has_other_threads())

    @property
    def is_own(self) -> bool:
        """Whether it is PyTorch's own operator: what it takes from the allocator it writes."""
        return self.facts.name.startswith(_OWN_NAMESPACES)

    def fresh_copies(self) -> list[torch.Tensor]:
        """Return the inputs' memory once more."""
        return [flat.clone() for flat in self.copies]

    def reads(self, storage: int) -> bool:
        """Say whether the operation reads the storage, rather than only overwriting it."""
        return any(
            isinstance(value, torch.Tensor)
            and value.untyped_storage()._cdata == storage
            and name.partition(".")[0] not in self.facts.unread
            for name, value in named_arguments(self.facts, self.args, self.kwargs)
        )

    def execute(self, copies: list[torch.Tensor], pattern: int | None = None) -> tuple[Results, Any]:
        """Execute the operation in `copies`, its generators as they were before; they are put right afterwards."""
        args = tuple(self.memory.rebuild(value, copies) for value in self.args)
        kwargs = {name: self.memory.rebuild(value, copies) for name, value in self.kwargs.items()}
        fills = nullcontext() if pattern is None or self.is_own else _Filling(self.func, self._backend_key(), pattern)
        with _put_back(self._drawn), fills:
            result = self.func(*args, **kwargs)
        return self.results(args, kwargs, result), result

    def _backend_key(self) -> torch._C.DispatchKey:
        is_cuda = any(tensor.is_cuda for tensor in self.memory.tensors)
        return torch._C.DispatchKey.CUDA if is_cuda else torch._C.DispatchKey.CPU

    def results(self, args: Any, kwargs: Mapping[str, Any], result: Any) -> Results:
        """Return (slot, tensor) of all that the operation wrote and gave."""
        written = [
            (f"{name}.written", value)
            for name, value in named_arguments(self.facts, args, dict(kwargs))
            if isinstance(value, torch.Tensor) and name.partition(".")[0] in self.facts.written
        ]
        held = {value.untyped_storage()._cdata for _, value in written}
        given = [
            (slot, tensor)
            for slot, tensor in named_tensors(result, "out")
            if tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata not in held
            and not self.facts.is_private(slot)
        ]
        return [*written, *given]


class _Filling(UnseenMode):
    """Fills fresh memory inside a custom operator with a pattern."""

    def __init__(self, operator: Any, key: torch._C.DispatchKey, pattern: int) -> None:
        super().__init__()
        self._operator, self._key, self._pattern = operator, key, pattern

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._operator:
            with self:  # straight to its kernel, below this mode, which sees what the kernel calls
                return func.redispatch(torch._C.DispatchKeySet(self._key), *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if _is_allocation(facts_of(func)):
            for _, tensor in named_tensors(result, "out"):
                if tensor.dtype.is_floating_point and tensor.numel():
                    _bytes_of(tensor.untyped_storage()).fill_(self._pattern)
        return result


@contextmanager
def _put_back(states: list[tuple[torch.Generator | HostGenerator, Any]]) -> Iterator[None]:
    """Give generators other states for as long as this lasts."""
    after = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in after:
            generator.set_state(state)


def _has_other_threads() -> bool:
    """Whether the program has threads beside this one."""
    own = threading.current_thread()
    return any(thread is not own and thread.name != WRITER for thread in threading.enumerate())


def _generators(facts: OpFacts, args: Any, kwargs: Any) -> Iterator[torch.Generator | HostGenerator]:
    """The generators that an operation may draw from; one that is not PyTorch's may from any, by Python code too."""
    is_own = facts.name.startswith(_OWN_NAMESPACES)
    if not facts.draws and is_own:
        return
    if not is_own and not facts.name.startswith(_KERNELS):
        yield from host_generators()
    values = [value for _, value in named_arguments(facts, args, kwargs)]
    given = [value for value in values if isinstance(value, torch.Generator)]
    yield from given
    if given:
        return
    yield torch.default_generator
    for index in sorted(
        {value.device.index or 0 for value in values if isinstance(value, torch.Tensor) and value.is_cuda}
    ):
        yield torch.cuda.default_generators[index]


def _is_allocation(facts: OpFacts) -> bool:
    """Whether the operator hands out memory, rather than a tensor over memory that is there (`set_`, `resize_`)."""
    return facts.is_empty and "empty" in facts.name


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes, uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, uint8 [*shape, element size]."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """bool [*shape]: the element's bits differ."""
    return (_words(one) != _words(other)).any(-1)


def _is_pattern(tensor: torch.Tensor, pattern: int) -> torch.Tensor:
    """bool [*shape]: the element holds nothing but the pattern."""
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    return (_words(tensor) == pattern).all(-1)


def _compare(first: Results, second: Results) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, bool [*shape]) of the results whose bits differ."""
    changed = []
    for (slot, one), (_, other) in zip(first, second, strict=True):
        if one.shape != other.shape:
            changed.append((slot, torch.ones(one.shape, dtype=torch.bool)))
        elif one.numel() and not torch.equal(_words(one), _words(other)):
            changed.append((slot, _differs(one, other)))
    return changed
