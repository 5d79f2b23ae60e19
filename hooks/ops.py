"""Level `op`: every operation that PyTorch dispatches, with what it read and what it wrote.

    forward/blocks.0.mix:aten.addmm.default.mat1#3     an argument, digested before the operation runs
    forward/blocks.0.mix:aten.addmm.default.out#3      a result
    forward/net:aten.index_put_.default.self.written   an argument that was written
    rng/torch.cpu:aten.bernoulli_.float.generator#2    the generator that a drawing operation draws from
    forward/net:aten.native_dropout.default.scalars    its numbers, flags and strings

An argument's event has the events as inputs that last wrote its memory, so an argument that differs
though all of those agree was changed by something that is not dispatched (numpy, a custom kernel),
or was read before anybody wrote it. Memory that no recorded operation wrote, and that is no
parameter, buffer, gradient or optimizer state, is data from outside: phase `batch`.

Views move nothing and are not recorded; what `empty` and its kin return is no value. Operations on
fake or meta tensors, under tracing, and of TorchDynamo's own are not the program's. The mode below sits
under autograd, so it sees backward and the optimizer as well; it changes no operation.

Long because an operation's beginning and end are each other's mirror.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bitcheck.events import Kind, Phase, Site
from bitcheck.hooks.callers import is_sending_objects, weight_in_call
from bitcheck.hooks.capture import Capture
from bitcheck.hooks.dynamo import UnseenMode, is_quiet, paused, skip_frame
from bitcheck.hooks.fresh import Mask, Rerun, can_run_again
from bitcheck.hooks.launches import Kernel, LaunchHooks
from bitcheck.hooks.lines import Lines
from bitcheck.hooks.modules import in_backward, named_tensors
from bitcheck.hooks.native import native
from bitcheck.hooks.op_schema import (
    ATTRIBUTE_TYPES,
    PLAIN_SCALARS,
    SEQUENCES,
    OpFacts,
    facts_of,
    member_names,
    named_arguments,
)
from bitcheck.hooks.sites import Sites
from bitcheck.hooks.steps import StepBuilder
from bitcheck.hooks.storages import Memory, is_gone
from bitcheck.hooks.tensors import storage_id
from bitcheck.hooks.threads import ThreadWatch

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder

_MAX_SCALARS = 65_536
"""How many different sets of numbers are known by their text."""
DESUGARED = frozenset({"DTensor", "AsyncCollectiveTensor"})
"""Tensors around a tensor that say on which mesh it lies, or that it is in flight."""
DETOURED = frozenset(
    [
        "MaxBackward1",
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
        "ProdBackward0",
        "ProdBackward1",
        "MaskedFillBackward1",
    ]
)
"""Autograd nodes whose formula takes another path under any dispatch mode (`isTensorSubclassLike` in PyTorch's
FunctionsManual.cpp). Found by running all of PyTorch's operator samples with and without a mode."""
_SWEEP = 256
"""Storages to know of before those that are gone are looked for."""
_MAX_FRAMES_BELOW_OBJECTS = 8
"""How far below a function that sends objects its operations on the pickles are."""
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
PROGRAM = "program"
"""Stands for the module where an operation runs outside all modules."""


class Location(NamedTuple):
    """Where in a step an operation runs."""

    builder: StepBuilder
    phase: Phase
    root: str
    path: str
    parent: int
    """Group of the module call around it."""
    is_eval: bool
    node: str
    """The autograd node that runs it, "" outside backward."""


Writes = list[tuple[str, torch.Tensor, int | None]]
"""(slot, tensor, storage) of what an operation writes."""


class Besides(NamedTuple):
    """What is seldom known of an operation that is about to run."""

    line: str | None
    """The Python line that asked for it, where lines are noted."""
    rerun: Rerun | None
    """Where it was given what memory held by chance: tells what of its results hangs on that."""


Opened = tuple[StepBuilder, Sites, int, tuple[int, ...], Writes, set[int | None], Besides | None]
"""An operation that is about to run: the step; its sites; its group; the events that it is computed from; the
arguments that it writes; the storages of these, or where it writes none of all its arguments, since a
result that lies there is no new tensor; what is seldom known of it."""


class OpHooks(UnseenMode):
    """Records the operations of one recorder's process."""

    __slots__ = ("_capture", "_facts", "_last", "_launches", "_lines", "_memory", "_recorder", "in_part")
    """Those that are asked for with every operation; `UnseenMode` has a dictionary for the others."""

    def __init__(self, recorder: Recorder, capture: Mapping[str, Any] | None = None, with_lines: bool = False) -> None:
        super().__init__()
        self._recorder = recorder
        self._capture = Capture(capture) if capture is not None else None
        self._lines = Lines() if with_lines else None
        self._memory: dict[int | None, Memory] = {}
        self._next_sweep = _SWEEP
        self.in_part: dict[int | None, Memory] = {}
        """Of `_memory` on the CPU: what was handed out empty, until it is seen to be written in full. Where there is
        none, as mostly, nothing below is done that has to do with chance."""
        self._facts: dict[int, OpFacts] = {}
        self._last: tuple[tuple[object, ...], Location] | None = None
        """A place, and the location that it is; in one, for several threads of autograd may run."""
        self._scalars: dict[str, tuple[Kind, bytes, bytes, str]] = {}
        self._state: dict[int, Memory] = {}
        self._no_state: dict[int, Memory] = {}
        """Storages of this step that are parameters, buffers, gradients or optimizer state, and others; that they are
        referred to keeps their numbers from being given to other storages meanwhile."""
        self._state_of: StepBuilder | None = None
        self._is_entered = False
        self._launches = LaunchHooks(self.launch)
        self._threads = ThreadWatch(self._note_unobserved)
        self._open: Callable[[OpFacts, Any, Any], Opened | None] = self._begin
        self._close: Callable[[OpFacts, Opened, Any], None] = self._end
        self._run_natively: Callable[..., Any] = OpHooks._run
        if native is not None:
            self._run_natively = native.run_operation
            self._open = functools.partial(native.begin_operation, self)
            self._close = functools.partial(native.end_operation, self)

    def install(self) -> None:
        """Look at every operation of this thread, and of the backward passes it starts."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True
        self._launches.look()
        self._threads.install()

    def remove(self) -> None:
        """Stop looking."""
        if self._is_entered:
            self._is_entered = False
            # With a mode of the program's on top, ours can only stay where it is: it looks at nothing any more.
            if _get_current_dispatch_mode() is self:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._launches.remove()
        self._threads.remove()

    def _note_unobserved(self, sentence: str) -> None:
        if self._recorder.is_active:
            self._recorder.current.miss(sentence)

    # --- one operation

    @skip_frame
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run_natively(self, func, types, args, kwargs or {})

    @skip_frame
    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and record it."""
        if types and any(kind.__name__ in DESUGARED for kind in types):
            return NotImplemented  # they go first, and what they do with the tensors inside them is seen
        if not self._recorder.is_active or is_quiet():
            return func(*args, **kwargs)
        facts = self._facts.get(id(func))  # an operator's own hash is a function of Python's
        if facts is None:
            facts = self._facts[id(func)] = facts_of(func)  # which keeps the operator
        self._launches.look()
        if not facts.is_recorded:
            result = func(*args, **kwargs)
            if facts.is_empty:
                self._forget(result, is_fresh="empty" in facts.name)
            return result
        if is_sending_objects(_MAX_FRAMES_BELOW_OBJECTS):
            result = func(*args, **kwargs)
            self._forget(result, is_fresh=False)
            return result
        opened = self._open(facts, args, kwargs)
        result = func(*args, **kwargs)
        if opened is not None:
            self._close(facts, opened, result)
        return result

    @skip_frame
    def launch(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], execute: Any) -> Any:
        """Record the launch of a kernel; `execute(*args, **kwargs)` launches it."""
        if not self._recorder.is_active:
            return execute(*args, **kwargs)
        given = {key: value for key, value in kwargs.items() if key in kernel.arguments}
        facts = self._facts_of_launch(kernel, args, given)
        opened = self._open(facts, args, given)
        result = execute(*args, **kwargs)
        if opened is not None:
            self._close(facts, opened, None)
        return result

    def _facts_of_launch(self, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpFacts:
        """What is known of a kernel: it may write whatever it has a pointer to, and reads what was written before."""
        facts = OpFacts(f"triton.{kernel.name}", True, False, False, (), frozenset(), kernel.arguments)
        pointers = [
            (argument, value)
            for argument, value in named_arguments(facts, args, kwargs)
            if isinstance(value, torch.Tensor)
        ]
        unread = frozenset(
            argument
            for argument, value in pointers
            if argument in kernel.scratch or self._is_fresh(value, is_output=argument in kernel.outputs)
        )
        written = tuple(argument for argument, _ in pointers if argument not in kernel.scratch)
        return facts._replace(written=written, unread=unread)

    def _is_fresh(self, tensor: torch.Tensor, is_output: bool) -> bool:
        """Whether memory is known to hold nothing yet; of an output's, whether it is not known to hold anything."""
        storage = storage_id(tensor)
        memory = self._memory.get(storage) if storage is not None else None
        if memory is None or is_gone(memory.weak):
            return is_output
        return memory.is_fresh(tensor)

    def _locate(self) -> Location:
        recorder = self._recorder
        call = recorder.modules.current
        is_backward = in_backward()
        if call is None and not is_backward:
            return self._locate_outside()
        builder = recorder.current
        node = torch._C._current_autograd_node() if is_backward else None
        name = node.name() if node is not None else ""
        # Most operations run where the one before did. A node is known by its number: to hold it would keep its graph.
        number = node._sequence_nr() if node is not None else -1
        place = (builder, recorder.gradients.owners, call, number, name)
        last = self._last
        if last is not None and last[0] == place:
            return last[1]
        if call is not None:
            where = Location(builder, call.phase, call.root, call.path, call.group, call.is_eval, name)
        else:
            if name in DETOURED:
                _note_detour(builder, name)
            owner = recorder.gradients.owner_of(builder, node) if node is not None else None
            if owner is None:
                where = Location(builder, Phase.BACKWARD, "", PROGRAM, -1, False, name)
            else:
                where = Location(builder, Phase.BACKWARD, owner.root, owner.path, -1, owner.is_eval, name)
        self._last = place, where
        return where

    def _locate_outside(self) -> Location:
        """Where an operation runs that is in no module's call and not in backward."""
        recorder = self._recorder
        if recorder.optimizers.running is not None:
            builder, label = recorder.optimizers.running
            return Location(builder, Phase.OPTIM, label, "", -1, False, "")
        builder = recorder.between_steps()
        phase = Phase.GRAD if builder.is_after_backward else Phase.FORWARD
        added = weight_in_call()
        weight = recorder.parameter_name(added[0]) if added is not None else None
        if added is not None and weight is not None:
            path = f"{weight[1]}.{added[1]}" if added[1] else weight[1]
            return Location(builder, Phase.GRAD, weight[0], path, -1, False, "")
        return Location(builder, phase, "", PROGRAM, -1, False, "")

    @paused
    def _begin(self, facts: OpFacts, args: Any, kwargs: Any) -> Opened | None:
        where = self._locate()
        builder = where.builder
        if not builder.is_kept:
            self._lose_sight()
            return None
        given = _sort_arguments(facts, args, kwargs)
        if given is None:
            return None
        tensors, scalars = given
        sites = builder.next_sites(where.phase, where.root, where.path, facts.name, where.is_eval)
        group = builder.open_group(sites.group("op", facts.name, where.parent, where.node))
        if self._capture is not None:
            self._save(self._capture, facts, where, sites.first.occurrence, args, kwargs)
        if facts.is_scaling and kwargs and kwargs.get("beta", 1) == 0:
            facts = facts._replace(unread=facts.unread | {"self"})
        chances = self._chances(facts, tensors) if self.in_part else None
        rerun = self._rerun(builder, facts, args, kwargs, tensors, chances) if chances else None
        changes = bool(facts.written or facts.unread)
        read_sites, read, sources = [], [], []
        written: Writes = []
        storages: set[int | None] = set()
        memories = self._memory
        for name, tensor in tensors:
            storage = storage_id(tensor)
            if changes:
                argument = name.partition(".")[0]
                if argument in facts.written:
                    written.append((f"{name}.written", tensor, storage))
                    storages.add(storage)
                if argument in facts.unread:
                    continue
            else:
                storages.add(storage)
            memory = memories.get(storage)
            if memory is not None and not is_gone(memory.weak):
                if changes and argument in facts.written and memory.is_fresh(tensor):
                    continue  # what it held before is chance: what the operation leaves of that is in what it wrote
                read_sites.append(sites[name])
                sources.append(memory.events if memory.builder is builder else ())
            else:
                read_sites.append(self._site_of_unwritten(where, sites[name], tensor, storage))
                sources.append(())
            read.append(tensor)
        if rerun is None or chances is None:
            added = builder.add_all_computed(read_sites, read, group, sources)
        else:
            added = _add_in_part(builder, read_sites, read, group, sources, chances)
        inputs = [*chain.from_iterable(added)]
        if facts.draws:
            named = dict(named_arguments(facts, args, kwargs))
            inputs += self._record_generator(facts, where, sites.first.occurrence, group, named)
        if scalars:
            inputs += self._record_scalars(builder, sites["scalars"], scalars, group)
        line = self._lines.note(where.phase) if self._lines is not None else None
        besides = Besides(line, rerun) if line is not None or rerun is not None else None
        return builder, sites, group, tuple(inputs), written, storages, besides

    def _site_of_unwritten(self, where: Location, site: Site, tensor: torch.Tensor, storage: int | None) -> Site:
        """Return under which site an argument is recorded that no operation wrote: data, whichever phase reads it."""
        builder = where.builder
        if self._is_state(builder, tensor, storage):
            return site
        number = builder.count(Phase.BATCH, where.root, where.path, site.slot, where.is_eval)
        return builder.same(site._replace(phase=Phase.BATCH, occurrence=number))

    def _record_scalars(
        self, builder: StepBuilder, site: Site, scalars: list[tuple[str, Any]], group: int
    ) -> Sequence[int]:
        """Record an operation's numbers, flags and strings; those that were met before are known by their text."""
        text = repr(scalars)
        known = self._scalars.get(text)
        record = builder.record
        if known is not None:
            kind, digest, leaves, value = known
            index = record.add(site, kind, digest, leaves, group)
            record.values[index] = value
            return (index,)
        added = builder.add_value(site, tuple(scalars), group)
        # A text stands for one value only where all are Python's own: numpy's may look like them, NaNs look alike.
        if len(added) == 1 and len(self._scalars) < _MAX_SCALARS and _is_plain(scalars) and "nan" not in text:
            index = added[0]
            self._scalars[text] = (
                record.kinds[index], record.digests[index], record.leaves[index], record.values[index]
            )  # fmt: skip
        return added

    def _save(self, capture: Capture, facts: OpFacts, where: Location, occurrence: int, args: Any, kwargs: Any) -> None:
        builder = where.builder
        place = (builder.step, where.phase, where.root, where.path, facts.name, occurrence, where.is_eval)
        if not capture.wants(*place):
            return
        try:
            capture.save(facts, args, kwargs)
        except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
            builder.miss(f"the inputs of {facts.name} were not saved: {error}")

    @paused
    def _end(self, facts: OpFacts, opened: Opened, result: Any) -> None:
        builder, sites, group, inputs, written, storages, besides = opened
        line, rerun = besides if besides is not None else (None, None)
        outputs = (("out", result),) if type(result) is torch.Tensor else tuple(named_tensors(result, "out"))
        wrote = written.copy()
        for slot, tensor in outputs:
            if _has_bytes(tensor) and (storage := storage_id(tensor)) not in storages and not facts.is_private(slot):
                wrote.append((slot, tensor, storage))
        if not wrote:
            if rerun is not None and not outputs:
                builder.count_chance(inputs)  # it gave a number: what the program does may hang on it
            return
        chances: dict[int, Mask] = {}
        if rerun is not None:
            found = rerun.chances()
            if found is None or not rerun.explains({slot: tensor for slot, tensor, _ in wrote}, found):
                builder.count_chance(inputs)  # what it made of chance is not known, and so counts
            else:
                chances = self._chances_of_results(rerun, found, wrote)
        if chances:
            added = _add_in_part(
                builder, [sites[slot] for slot, _, _ in wrote], [tensor for _, tensor, _ in wrote], group,
                [inputs] * len(wrote), chances,
            )  # fmt: skip
        elif len(wrote) == 1:
            added = [builder.add_computed(sites[wrote[0][0]], wrote[0][1], group, inputs)]
        else:
            slots, tensors, _ = zip(*wrote, strict=True)
            places = [sites[slot] for slot in slots]
            added = builder.add_all_computed(places, list(tensors), group, [inputs] * len(wrote))
        for number, ((_, tensor, storage), events) in enumerate(zip(wrote, added, strict=True)):
            if line:
                builder.record.values.update(dict.fromkeys(events, line))
            self._note_write(builder, tensor, storage, events, number >= len(written), chances.get(id(tensor)))

    # --- memory that was handed out empty and written in part

    def _chances(self, facts: OpFacts, tensors: list[tuple[str, torch.Tensor]]) -> dict[int, Mask]:
        """Return `id` of an argument that is read -> which of its elements hold what memory held by chance."""
        found = {}
        for name, tensor in tensors:
            argument = name.partition(".")[0]
            if argument in facts.unread or (memory := self._in_part_at(storage_id(tensor))) is None:
                continue
            if memory.is_untouched and argument not in facts.written:
                self._trust(memory)
            elif (chance := memory.chance(tensor)) is not None:
                found[id(tensor)] = chance
        return found

    def _in_part_at(self, storage: int | None) -> Memory | None:
        """Return what is known of a storage that may hold chance; None where it does not any more."""
        if storage not in self.in_part:
            return None
        memory = self._memory.get(storage)
        if memory is not None and memory.written is not None and not is_gone(memory.weak):
            return memory
        del self.in_part[storage]
        return None

    def _trust(self, memory: Memory) -> None:
        """Take all that memory holds for data: nobody was seen to write it, and yet it is read. numpy may have."""
        memory.written = None

    def _rerun(
        self,
        builder: StepBuilder,
        facts: OpFacts,
        args: Any,
        kwargs: Any,
        tensors: list[tuple[str, torch.Tensor]],
        chances: dict[int, Mask],
    ) -> Rerun | None:
        """Return what tells which results hang on chance; where nothing can, chance counts as data."""
        if can_run_again(facts, args, kwargs):
            try:
                return Rerun(facts, args, kwargs, chances)
            except Exception:  # noqa: BLE001  an argument that cannot be copied: what it holds counts
                pass
        for _, tensor in tensors:
            if id(tensor) in chances:
                builder.count_chance(self.writers(builder, tensor))
                self.chance(tensor, True)
        return None

    def _chances_of_results(self, rerun: Rerun, found: dict[str, Mask], wrote: Writes) -> dict[int, Mask]:
        """Return `id` of a result -> which of its elements hang on chance."""
        chances = {}
        for slot, tensor, storage in wrote:
            chance = found.get(slot)
            if chance is None or chance.shape != tensor.shape or not tensor.is_cpu:
                continue
            memory = self._in_part_at(storage)
            if memory is not None and memory.is_untouched and chance.all() and rerun.is_all_from(tensor, slot):
                self._trust(memory)  # all was computed from what nobody was seen to write
            else:
                chances[id(tensor)] = chance
        return chances

    def chance(self, tensor: torch.Tensor, counts: bool) -> Mask | None:
        """Return which elements of a tensor hold chance, None where none does; `counts`: from now on they are data."""
        memory = self._in_part_at(storage_id(tensor))
        chance = memory.chance(tensor) if memory is not None and not memory.is_untouched else None
        if counts and chance is not None and memory is not None:
            memory.note_write(tensor)
        return chance

    def _lose_sight(self) -> None:
        """Operations are not looked at for now: what they write is not seen."""
        for memory in self.in_part.values():
            memory.written = None
        self.in_part.clear()

    def _record_generator(
        self, facts: OpFacts, where: Location, occurrence: int, group: int, named: dict[str, Any]
    ) -> list[int]:
        generator = named.get("generator")
        if not isinstance(generator, torch.Generator):
            device = next((value.device for value in named.values() if isinstance(value, torch.Tensor)), None)
            if device is None:
                device = torch.device(named.get("device") or "cpu")
            if device.type != "cpu":
                return []  # its state was read at the start of the step; reading it here could wait for the device
            generator = torch.default_generator
        elif generator.device.type != "cpu":
            return []
        state = generator.get_state().numpy()
        name = f"{facts.name}.generator"
        at = f"{where.root}.{where.path}" if where.root else where.path
        site = Site(Phase.RNG, "", "torch.cpu", f"{where.phase}.{at}.{name}", occurrence, where.is_eval)
        return where.builder.add_bytes(where.builder.same(site), state, group)

    # --- who wrote what

    def writers(self, builder: StepBuilder, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return in which events of this step recorded operations last wrote the tensor's memory."""
        storage = storage_id(tensor)
        memory = self._memory.get(storage)
        if memory is None or is_gone(memory.weak) or memory.builder is not builder:
            return ()
        return memory.events

    def note_received(self, builder: StepBuilder, tensor: torch.Tensor, events: list[int]) -> None:
        """Note what a collective wrote."""
        self._note_write(builder, tensor, storage_id(tensor), events, is_new=False)

    def _note_write(
        self,
        builder: StepBuilder,
        tensor: torch.Tensor,
        storage: int | None,
        events: Sequence[int],
        is_new: bool,
        chance: Mask | None = None,
    ) -> None:
        memory = self._memory_of(tensor, storage)
        if memory is None:
            return
        if chance is None or not (memory.is_untouched and chance.all()):
            memory.note_write(tensor, chance)
        if chance is not None:
            self.in_part[storage] = memory
        elif memory.written is None:
            self.in_part.pop(storage, None)
        if is_new or memory.builder is not builder or tensor.nbytes >= tensor.untyped_storage().nbytes():
            memory.builder = builder
            memory.events = tuple(events)
        else:
            memory.events = (*memory.events, *events)

    def _memory_of(self, tensor: torch.Tensor, storage: int | None) -> Memory | None:
        memory = self._memory.get(storage)
        if memory is not None:
            if is_gone(memory.weak):
                memory.begin_again(tensor)
        elif storage is not None:
            if len(self._memory) >= self._next_sweep:
                self._sweep()
            memory = self._memory[storage] = Memory(tensor)
        return memory

    @paused
    def _forget(self, result: Any, is_fresh: bool) -> None:
        """Memory that was just handed out holds nothing yet; what `set_` shows may hold anything."""
        for _, tensor in named_tensors(result, "out"):
            memory = self._memory_of(tensor, storage_id(tensor)) if _has_bytes(tensor) else None
            if memory is not None:
                memory.begin_again(tensor)
                memory.written = (0, 0) if is_fresh else None
                if is_fresh and tensor.is_cpu and tensor.untyped_storage().nbytes():
                    self.in_part[storage_id(tensor)] = memory
                    if len(self.in_part) > self._next_sweep:
                        self._sweep()

    def _is_state(self, builder: StepBuilder, tensor: torch.Tensor, storage: int | None) -> bool:
        if self._state_of is not builder:
            self._state_of = builder
            self._state, self._no_state = {}, {}
        if storage in self._state:
            return True
        if storage is None or storage in self._no_state:
            return False
        found: dict[int | None, torch.Tensor] = {}
        for _, held in self._recorder.living_tensors():
            found[storage_id(held)] = held
            if held.grad is not None:
                found[storage_id(held.grad)] = held.grad
        for _, value in self._recorder.optimizers.states(self._recorder.optimizers.holdings()):
            if isinstance(value, torch.Tensor):
                found[storage_id(value)] = value
        known = self._state
        self._state = {key: known.get(key) or Memory(held) for key, held in found.items() if key is not None}
        if storage not in self._state:
            self._no_state[storage] = Memory(tensor)
        return storage in self._state

    def forget(self) -> None:
        """Drop what is known of memory that is gone; called at the end of a step."""
        self._sweep()
        for memory in self._memory.values():
            if memory.builder is not self._recorder.current:
                memory.builder, memory.events = None, ()
        self._last = self._state_of = None
        self._state, self._no_state = {}, {}

    def _sweep(self) -> None:
        """Drop what is gone. Before long: what is known of a storage keeps a few of its bytes where they lie,
        and as many of those as a step has results would leave its memory in pieces that nothing fits into."""
        self._memory = {key: memory for key, memory in self._memory.items() if not is_gone(memory.weak)}
        self._next_sweep = 2 * len(self._memory) + _SWEEP
        for storage in list(self.in_part):
            self._in_part_at(storage)


def _add_in_part(
    builder: StepBuilder,
    sites: list[Site],
    tensors: list[torch.Tensor],
    group: int,
    inputs: list[tuple[int, ...]],
    chances: dict[int, Mask],
) -> list[tuple[int, ...]]:
    """Do as `StepBuilder.add_all_computed`, without the elements that hold chance."""
    added: list[tuple[int, ...]] = []
    for site, tensor, given in zip(sites, tensors, inputs, strict=True):
        chance = chances.get(id(tensor))
        if chance is None:
            added.append(builder.add_computed(site, tensor, group, given))
        else:
            added.append(builder.add_in_part(site, tensor, chance, group, given))
    return added


def _note_detour(builder: StepBuilder, node: str) -> None:
    remark = (
        f"{node} ran: PyTorch computes it in another way whenever operations are looked at, so its bits at level op "
        "may not be those of the bare program; level module leaves it alone"
    )
    if remark not in builder.record.remarks:
        builder.record.remarks += (remark,)


def _has_bytes(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TENSORS and not tensor.is_meta


def _sort_arguments(
    facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, Any]]] | None:
    """Return the tensors and the numbers among an operation's arguments, named; None where a tensor has no bytes."""
    tensors: list[tuple[str, torch.Tensor]] = []
    scalars: list[tuple[str, Any]] = []
    pairs: Iterable[tuple[str, Any]] = zip(facts.arguments, args, strict=False)
    if kwargs or not SEQUENCES.isdisjoint(map(type, args)):
        pairs = named_arguments(facts, args, kwargs)
    for pair in pairs:
        value = pair[1]
        kind = type(value)
        if kind in _PLAIN_TENSORS:
            if value.is_meta:
                return None
            tensors.append(pair)
        elif kind in PLAIN_SCALARS:
            scalars.append(pair)
        elif isinstance(value, torch.Tensor):
            return None
        elif _is_scalar(value):
            scalars.append(pair)
    return tensors, scalars


def _is_scalar(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return PLAIN_SCALARS.issuperset(map(type, value)) or all(_is_scalar(member) for member in value)
    return value is None or isinstance(value, (bool, int, float, complex, str, np.generic))


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in PLAIN_SCALARS


if native is not None:
    native.configure(
        attribute_types=ATTRIBUTE_TYPES,
        current_node=torch._C._current_autograd_node,
        free_weak_ref=torch.UntypedStorage._free_weak_ref,
        graph_task=torch._C._current_graph_task_id,
        is_distributed=dist.is_initialized if dist.is_available() else bool,
        is_expired=is_gone,
        loaded_modules=sys.modules,
        member_names=member_names,
    )
