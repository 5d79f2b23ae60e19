"""The recorder: owns the step that is being recorded, and says where one ends and the next begins.

A step lies between one optimizer step (the last before the next training forward) and the next:

    forward, backward, optimizer.step()  | evaluation, data loading | forward, ...
    ------------- step N --------------->|<------------- step N + 1 --------------

The first forward of any kind after an optimizer stepped opens the next step. The state at the end
of step N (parameters, buffers, optimizer, extra) is taken at the next *training* forward, so that a
clamp or an average after `optimizer.step()` is in it and weights swapped in for an evaluation are
not; or at `step()`; or at the end of the program, or just before the model is gone.

Long because when a step ends hangs on all that may happen around it.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitcheck.errors import BitcheckError, RecordingError, UsageError
from bitcheck.events import Level, Phase, StepKind
from bitcheck.hooks.callers import stage_in_call, stages_in_call
from bitcheck.hooks.collectives import CollectiveHooks
from bitcheck.hooks.dynamo import is_quiet, on_error, paused
from bitcheck.hooks.gradients import GradientHooks
from bitcheck.hooks.modules import ModuleHooks, in_backward, named_tensors
from bitcheck.hooks.naming import ModuleName, Registry, walk
from bitcheck.hooks.ops import OpHooks
from bitcheck.hooks.optimizers import OptimizerHooks
from bitcheck.hooks.rng import generator_states
from bitcheck.hooks.sharding import Sharding
from bitcheck.hooks.sites import Known, PlaceKey
from bitcheck.hooks.steps import Digesters, StepBuilder
from bitcheck.hooks.writer import StepWriter, Store

Trackable = nn.Module | torch.Tensor | Mapping[str, Any] | list[Any] | tuple[Any, ...]

_active: Recorder | None = None


def active_recorder() -> Recorder | None:
    """Return the recorder that is attached to this process, if any."""
    return _active


class Recorder:
    """Records one rank of a run. Attached by `start`, detached by `stop`.

    `open_store` is called when the program shows that it trains (a forward with gradients enabled,
    or an optimizer's step) and gives what steps are written to; raises BitcheckError where this
    process is not to record, which detaches the recorder for good. `on_first_step` is called then,
    after the program's own settings. `on_trouble` gets what stopped the recording.
    """

    __slots__ = ("__dict__", "__weakref__", "current", "gradients", "is_active", "modules", "registry")
    """Those that are asked for with every tensor have slots: the compiled half finds these at once (`csrc/slots.c`)."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        *,
        level: Level = Level.STATE,
        start_step: int = 0,
        steps: tuple[int | None, int | None] = (None, None),
        every: int = 1,
        is_strict: bool = False,
        capture: Mapping[str, Any] | None = None,
        with_lines: bool = False,
        on_first_step: Callable[[], None] = lambda: None,
        on_trouble: Callable[[BitcheckError], None] | None = None,
    ) -> None:
        self.level = Level(level)
        self.registry = Registry()
        self.parameter_name = self.registry.parameter_name
        """Gives (root, path) of a parameter, None where it is not known."""
        self.is_active = False
        self.num_steps = 0
        """Training steps that ended while it was attached."""
        self._open_store = open_store
        self._steps = steps
        self._every = every
        self._is_strict = is_strict
        self._on_first_step = on_first_step
        self._on_trouble = on_trouble or _tell
        self._trouble: BitcheckError | None = None
        self._writer: StepWriter | None = None
        self._leaf_limit_bytes: int | None = None
        self._digesters = Digesters(lambda: self._leaf_limit_bytes, self._on_departure)
        self._known = Known()
        self._tracked: dict[str, Trackable | Callable[[], Any]] = {}
        self._forward_order: dict[int, int] = {}
        self._lock = threading.RLock()
        self._closing: StepBuilder | None = None
        """A step whose optimizer stepped, while an evaluation runs before the next training forward."""
        self._initial: StepBuilder | None = None
        self._has_initial: set[PlaceKey] = set()
        self._stepped = False
        self._is_stopped = False
        self._pid = 0
        self._training_threads: set[int] = set()
        self._held: _Held | None = None
        self.sharding = Sharding(self)
        self.modules = ModuleHooks(self)
        self.gradients = GradientHooks(self)
        self.optimizers = OptimizerHooks(self)
        self.collectives = CollectiveHooks(self) if self.level is not Level.STATE else None
        self.ops = OpHooks(self, capture, with_lines) if self.level is Level.OP else None
        self._start_step = start_step
        self.current = self._new_step(start_step)

    # --- attaching

    def start(self, model: nn.Module | None = None, search_optimizers: bool = False) -> None:
        """Attach to this process for the first time; `model` is known by name before it is called.

        With `search_optimizers` those are found that were made before. Raises UsageError as `attach`.
        """
        self.attach(search_optimizers)
        if model is not None:
            self.add_root(model)

    def attach(self, search_optimizers: bool = False) -> None:
        """Attach to this process. Raises UsageError where a recorder is attached already."""
        global _active
        if _active is not None:
            raise UsageError(
                "this process is being recorded already: one recorder at a time; "
                "leave out bitcheck.record where the program runs under `bitcheck run`"
            )
        _active = self
        self.is_active = True
        self._pid = os.getpid()
        _watch_forks()
        on_error.append(self._own_mistake)
        self.modules.install()
        self.gradients.install()
        self.optimizers.install(search_optimizers)
        self.sharding.install()
        if self.collectives is not None:
            self.collectives.install()
        if self.ops is not None:
            self.ops.install()

    def stop(self, status: str = "complete") -> None:
        """End the step that is open, write what waits, detach. Does nothing the second time."""
        if self._is_stopped or self._pid not in (0, os.getpid()):
            return
        self._is_stopped = True
        try:
            if self._writer is not None and self._trouble is None and self.is_active:
                with self._lock:
                    self._finish()
        finally:
            self.detach()
            if self._writer is not None:
                self._writer.close(status)

    def go_on_after_fork(self) -> None:
        """In a forked child: record nothing where the parent has begun to, and leave its file and thread alone."""
        if not self.has_started:
            self._pid = os.getpid()  # either of the two may be the one that trains
            return
        self.detach()
        self._writer = None
        self._is_stopped = True

    def detach(self) -> None:
        """Take everything out of PyTorch again, at once; what waits to be written is left waiting."""
        global _active
        self.is_active = False
        self._let_go()
        if self._own_mistake in on_error:
            on_error.remove(self._own_mistake)
        if self.ops is not None:
            self.ops.remove()
        if self.collectives is not None:
            self.collectives.remove()
        self.modules.remove()
        self.gradients.remove()
        self.optimizers.remove()
        self.sharding.remove()
        if _active is self:
            _active = None

    @property
    def has_started(self) -> bool:
        """Whether the program was seen to train, so that a file was opened."""
        return self._writer is not None

    @property
    def trouble(self) -> BitcheckError | None:
        """What stopped the recording, None as long as nothing did."""
        return self._trouble

    # --- what the program says

    def step(self) -> None:
        """End the step here. Without effect where optimizers are known and none has stepped."""
        if not self.is_active or (len(self.optimizers) and not self._stepped and self._closing is None):
            return
        with self._lock:
            self._claim()
            if self._stepped or not len(self.optimizers):
                self._open_next()
            self._close_step()

    def drain(self) -> None:
        """Wait until every step that has ended is on the disk."""
        if self._writer is not None:
            self._writer.drain()

    def track(self, name: str, tensors: Trackable | Callable[[], Any]) -> None:
        """Record tensors beyond the model's and the optimizer's at the end of every step.

        A tensor, a (nested) mapping or sequence of tensors, or a callable that returns one of
        these; the callable is asked when the state is taken, and may wait for whoever writes it.
        A module stands for its state dict. Numbers and strings count as well.
        """
        self._tracked[name] = tensors.state_dict if isinstance(tensors, nn.Module) else tensors

    # --- what the sources of events ask

    def add_root(self, module: nn.Module) -> ModuleName:
        """Know an outermost module; its state joins an initial snapshot that is still open."""
        name = self.registry.name_of(module)
        if name is None:
            stage = stage_in_call()
            # All stages of this rank at once: the state of one that is called later is in the initial snapshot by name.
            for sibling, number in stages_in_call() if stage is not None else ():
                if sibling is not module and self.registry.name_of(sibling) is None:
                    self.registry.add_root(sibling, number)
                    self.sharding.learn(sibling)
            name = self.registry.add_root(module, stage)
            self.sharding.learn(module)
            for _, child, _ in walk(module):
                for parameter in child._parameters.values():
                    self._forward_order.setdefault(id(parameter), len(self._forward_order))
            if self._initial is not None:
                self._take_state(self._initial, self._has_initial)
        return name

    def rank_in_forward(self, parameter: torch.Tensor) -> int:
        """Return a number that grows along the forward pass, as far as registration shows it."""
        return self._forward_order.get(id(parameter), -1)

    def enter_forward(self, is_training: bool) -> None:
        """An outermost module is about to be called."""
        with self._lock:
            if is_training and self.optimizers.is_stale:
                self.optimizers.forget_stepping()
            if is_training and torch.is_grad_enabled():
                self._claim()
            if self._stepped:
                self._open_next()
            if is_training and self._closing is not None:
                self._close_step()
            builder = self.current
            builder.is_after_backward = False
            if is_training:
                self._begin_initial(builder)
                builder.has_training_forward = True
            self._record_generators(builder, is_eval=not is_training)

    def note_backward(self) -> None:
        """A loss is about to go backward: the step trains, whatever mode its modules were in."""
        self._training_threads.add(threading.get_ident())
        with self._lock:
            self._claim()
            if not self.current.has_training_forward and not self.optimizers.running:
                self._close_step()
                self._begin_initial(self.current)
                self.current.has_training_forward = True

    def trains_here(self) -> bool:
        """Whether this thread trains: the main one, and any that ran a backward or an optimizer."""
        own = threading.get_ident()
        return own in self._training_threads or own == threading.main_thread().ident or in_backward()

    def enter_optimizer(self, has_closure: bool) -> StepBuilder:
        """An optimizer is about to step; return the step that it belongs to."""
        self._training_threads.add(threading.get_ident())
        with self._lock:
            self._claim()
            if has_closure:  # its forward is the next step's first, whatever ran since the last one stepped
                if self._stepped:
                    self._open_next()
                self._close_step()
            if self._closing is not None and not self.current.has_training_forward:
                return self._closing
            builder = self.current
            if not has_closure:  # its forward comes first otherwise, and tells the modules' names
                self._begin_initial(builder)
                self._record_generators(builder)
            return builder

    def between_steps(self) -> StepBuilder:
        """Something runs outside modules, backward and optimizers; return the step that it belongs to."""
        if self._stepped:
            with self._lock:
                self._open_next()
        return self.current

    def leave_optimizer(self) -> None:
        """An optimizer has stepped."""
        if self._closing is not None and not self.current.has_training_forward:
            return
        self._stepped = True
        if self.current.is_kept and self._held is None:
            self._held = _Held(self)

    # --- the course of steps

    def _is_kept(self, step: int) -> bool:
        first, last = self._steps
        return (first is None or step >= first) and (last is None or step < last) and step % self._every == 0

    def _new_step(self, step: int) -> StepBuilder:
        builder = StepBuilder(step, StepKind.STEP, self._is_kept(step), self._digesters, self._known)
        if (ops := self.ops) is not None:
            builder.writers = ops.writers
            builder.in_part, builder.chance = ops.in_part, ops.chance
        if self.collectives is not None:
            completions = self.collectives.completions
            builder.awaited, builder.flying = completions.awaited, completions.flying
        return builder

    def _claim(self) -> None:
        """Open the file when the program is seen to train."""
        if self._trouble is not None and self._is_strict:
            raise self._trouble
        if self._writer is not None or not self.is_active:
            return
        try:
            store = self._open_store()
        except BitcheckError as error:
            self._trouble = error
            self.detach()
            self._on_trouble(error)
            if self._is_strict:
                raise
            return
        self._leaf_limit_bytes = store.leaf_limit_bytes
        self._writer = StepWriter(store, self._fail)
        try:
            self._on_first_step()
        except BitcheckError as error:
            self._fail(error)
            if self._is_strict:
                raise

    def _on_departure(self, land: Callable[[], None]) -> None:
        if self._writer is not None:
            self._writer.take(land)

    def _fail(self, error: BitcheckError) -> None:
        """Stop recording, let the training go on; called by the writer's thread."""
        self._trouble = error
        if not self._is_strict:
            self.is_active = False
            self._let_go()
        self._on_trouble(error)

    def _own_mistake(self, error: Exception) -> None:
        """Something went wrong in the recorder itself, or in what it asked of the program's objects."""
        if self._is_strict:
            raise error
        if self.is_active:
            frames = traceback.extract_tb(error.__traceback__)  # none where all of it was compiled
            where = f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "in compiled code"
            self._fail(
                RecordingError(f"step {self.current.step}: recording failed {where}: {type(error).__name__}: {error}")
            )

    def _begin_initial(self, builder: StepBuilder) -> None:
        if self._has_initial or not builder.is_kept:
            return
        self._initial = StepBuilder(builder.step - 1, StepKind.INITIAL, True, self._digesters, self._known)
        self._take_state(self._initial, self._has_initial)
        self._has_initial.add((Phase.RNG, "", "", ""))  # also where there was nothing to take

    def _open_next(self) -> None:
        """The step is over but for its end state; what comes belongs to the next."""
        self._closing = self.current
        self._stepped = False
        self.current = self._new_step(self._closing.step + 1)
        self.num_steps += 1

    def _close_step(self, is_aside: bool = False) -> None:
        """Take the end state and hand the step to the writer; `is_aside`: another thread is training meanwhile."""
        builder = self._closing
        if builder is None:
            return
        self._closing = None
        if builder.is_kept:
            self._take_state(builder, set())
            self._submit(builder)
        self._let_go()
        if is_aside:
            return  # what is known of memory is the training thread's; it forgets at the end of its next step
        self.modules.forget()
        if self.ops is not None:
            self.ops.forget()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.forget()

    def _submit(self, builder: StepBuilder) -> None:
        if self.collectives is not None:
            self.collectives.close(builder)
        if self._writer is None:
            return
        if self._initial is not None:
            self._writer.put(self._initial)
            self._initial = None
        self._writer.put(builder)

    def _finish(self) -> None:
        """The program ends, well or not: what is left is a fragment."""
        if self._stepped:
            self._open_next()
        self._close_step()
        rest = self.current
        self._record_generators(rest)
        if self.level is not Level.STATE:
            self._note_uncalled(rest)
        if rest.is_kept:
            rest.record.kind = StepKind.FRAGMENT
            self._submit(rest)

    def _record_generators(self, builder: StepBuilder, is_eval: bool = False) -> None:
        """Read the generators before the step's first forward; apart before the first of an evaluation.

        A checkpoint that is saved after an evaluation has what that left, so that is how a resumed run's step begins.
        """
        if is_eval in builder.read_generators or not builder.is_kept:
            return
        builder.read_generators.add(is_eval)
        for name, state in generator_states():
            builder.add_bytes(builder.next_sites(Phase.RNG, "", name, "state", is_eval).first, state)

    @paused
    def _take_state(self, builder: StepBuilder, taken: set[PlaceKey]) -> None:
        """Record parameters, buffers, optimizer state and tracked tensors that `taken` lacks."""
        held = self._held
        if held is not None and held.is_last_chance:
            tensors, holdings = held.tensors, held.holdings
        else:
            tensors, holdings = self.living_tensors(), self.optimizers.holdings()
        states = _untaken(self.optimizers.states(holdings), taken)
        living = _untaken(tensors, taken)
        sites = zip(builder.sites_once(list(living)), living.values(), strict=True)
        self.sharding.note(builder, builder.add_tensors(list(sites)))
        kept = []
        for site, value in zip(builder.sites_once(list(states)), states.values(), strict=True):
            if isinstance(value, torch.Tensor):
                kept.append((site, value))
            else:
                builder.add_value(site, value)
        self.sharding.note(builder, builder.add_tensors(kept))
        for name, tracked in self._tracked.items():
            key = (Phase.EXTRA, "", name, "")
            if key not in taken:
                taken.add(key)
                try:
                    value = _asked(tracked) if callable(tracked) else tracked
                except Exception as error:  # noqa: BLE001  the program's own code: told, and the training goes on
                    builder.miss(f"what is tracked as {name}: {type(error).__name__}: {error}")
                    continue
                own = builder.next_sites(Phase.EXTRA, "", name, "", False)
                if _holds_tensors_only(value):
                    found = named_tensors(value, "value")
                    builder.add_tensors([(own[slot], tensor) for slot, tensor in found])
                else:
                    builder.add_value(own["value"], value)

    def living_tensors(self) -> list[tuple[PlaceKey, torch.Tensor]]:
        """Return (place, tensor) of every parameter and buffer that is in memory."""
        shard_of, is_lazy = self.sharding.shard_of, nn.parameter.is_lazy
        found: list[tuple[PlaceKey, torch.Tensor]] = [
            ((Phase.PARAM if is_parameter else Phase.BUFFER, root, path, "value"), shard_of(tensor))
            for root, path, tensor, is_parameter in self.registry.tensors()
            if not is_lazy(tensor)
        ]
        free = self.optimizers.free_parameters()
        found += [((Phase.PARAM, root, path, "value"), tensor) for root, path, tensor in free]
        return found

    def _note_uncalled(self, builder: StepBuilder) -> None:
        """Say which modules were trained though their own call was never seen: nothing of them is lost by it."""
        roots = {label for label, _ in self.registry.roots}
        trained = {(root, path.rpartition(".")[0]) for root, path in self.optimizers.found_gradients if root in roots}
        missed = [path or root for root, path in sorted(trained - self.modules.called)]
        if missed:
            named = ", ".join(missed[:4]) + (f" and {len(missed) - 4} more" if len(missed) > 4 else "")
            builder.record.remarks += (
                f"{len(missed)} modules were trained without a call of their own (compiled, or used as functions): "
                f"{named}; what they compute is blamed on the module around them",
            )


class _Held:
    """Keeps the state alive from an optimizer's step until it is taken, no longer.

    A program may end, or drop its model, right after its last step. What is kept is the tensors,
    not the modules or the optimizers: when one of those goes, the state is taken at that moment and
    let go.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.tensors = recorder.living_tensors()
        self.holdings = recorder.optimizers.holdings()
        self.is_last_chance = False
        self._streams = [torch.cuda.current_stream(device) for device in recorder._digesters if device.type == "cuda"]
        """In which the optimizer wrote what is kept."""
        self._recorder = weakref.ref(recorder)
        trained = {root for root, _ in recorder.optimizers.found_gradients}
        modules = [
            module
            for label, reference in recorder.registry.roots
            if label in trained and (module := reference()) is not None
        ]
        self._watched = [weakref.ref(holder, self._gone) for holder in [*modules, *recorder.optimizers.living()]]

    def forget(self) -> None:
        """Let go of the state, and of the callbacks that stand for this: the two hold each other."""
        self.tensors, self.holdings, self._watched = [], [], []

    def _gone(self, _: object) -> None:
        recorder = self._recorder()
        if recorder is None or recorder._held is not self or not recorder.is_active:
            return
        self.is_last_chance = True
        writer = recorder._writer
        if writer is not None and (is_quiet() or writer.is_current()):
            # The cyclic collector came by in the middle of the recorder's own work: it may not begin on more.
            writer.take(self._take_last)
        else:
            self._take_last()

    def _take_last(self) -> None:
        recorder = self._recorder()
        if recorder is None or recorder._held is not self:
            return
        if not recorder._lock.acquire(blocking=False):
            return  # another thread is at the end of this very step
        try:
            writer = recorder._writer
            with ExitStack() as streams:
                for stream in self._streams:  # a thread has its own current streams
                    streams.enter_context(torch.cuda.stream(stream))
                if recorder._stepped:
                    recorder._open_next()
                recorder._close_step(is_aside=writer is not None and writer.is_current())
        finally:
            recorder._lock.release()


def _untaken(parts: Iterable[tuple[PlaceKey, Any]], taken: set[PlaceKey]) -> dict[PlaceKey, Any]:
    """Return those of some parts that were not taken before, the first of each place, and take them."""
    found: dict[PlaceKey, Any] = {}
    for key, value in parts:
        if key not in taken:
            found.setdefault(key, value)
    taken.update(found)
    return found


def _asked(tracked: Callable[[], Any]) -> Any:
    """Ask the program for what it tracks, as it would run by itself."""
    with torch._C._EnableTorchFunction():
        return tracked()


def _holds_tensors_only(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_holds_tensors_only, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_holds_tensors_only, value))
    return isinstance(value, torch.Tensor)


_watches_forks: list[bool] = []


def _watch_forks() -> None:
    if not _watches_forks:
        _watches_forks.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if _active is not None:
        _active.go_on_after_fork()


def _tell(error: BitcheckError) -> None:
    print(f"bitcheck: {error}\nbitcheck: recording has stopped; the program goes on.", file=sys.stderr, flush=True)
