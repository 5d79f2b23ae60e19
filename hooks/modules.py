"""Module calls: what went into each and came out of it, forward and recompute, and where a step begins.

`torch.nn.Module.__call__` is wrapped while a recorder is attached. Unlike PyTorch's global module
hooks this sees keyword arguments, sees a call that ends by an exception (activation checkpointing
stops its recompute so), makes no compiled module warn, and vanishes from what `torch.compile`
traces: inside a compiled region the wrapper is the original, so its graph, hence its bits, stay.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bitcheck.events import Level, Phase, Site
from bitcheck.hooks.callers import is_rehearsal
from bitcheck.hooks.dynamo import paused, quiet, skip_frame
from bitcheck.hooks.naming import ByIdentity, ModuleName, class_name, is_compiled
from bitcheck.hooks.native import native
from bitcheck.hooks.steps import Call, StepBuilder
from bitcheck.hooks.tensors import storage_id

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder

Forward = Callable[..., Any]

_MAX_DEPTH = 8
"""How deep containers among arguments and outputs are searched for tensors."""

next_node: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""The sequence number that the next autograd node of this thread gets."""


def named_tensors(value: Any, slot: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (slot, tensor) of every tensor in a value: tuples, lists, mappings, dataclasses, nested."""
    if isinstance(value, torch.Tensor):
        yield slot, value
        return
    if value is None or isinstance(value, (str, bytes, int, float)) or depth == _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from named_tensors(member, f"{slot}.{key}", depth + 1)
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None) or range(len(value))
        for name, member in zip(fields, value, strict=False):
            yield from named_tensors(member, f"{slot}.{name}", depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name, None), f"{slot}.{field.name}", depth + 1)


def named_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of every tensor among a call's arguments: `in.0`, `in.mask`."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            found.append((f"in.{name}", value))
        else:
            found += named_tensors(value, f"in.{name}")
    return found


def in_backward() -> bool:
    """Say whether this thread is inside a run of the autograd engine."""
    return bool(torch._C._current_graph_task_id() != -1)


def escapes_observation(args: tuple[Any, ...]) -> bool:
    """Say whether modules run here on stand-ins for tensors: tracing, `torch.func`, fake or meta tensors."""
    return (
        any(isinstance(value, torch.Tensor) and value.is_meta for value in args)
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


class _Local(threading.local):
    """The module calls that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.depth = 0
        self.is_blind = False
        """Inside a call that is not observed, nothing below it is."""
        self.is_eval = False
        self.root: nn.Module | None = None


class ModuleHooks:
    """Records the calls of modules for one recorder."""

    __slots__ = ("__dict__", "_local", "_recorder", "called")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_deep = recorder.level is not Level.STATE
        self._local = _Local()
        self._original: Forward | None = None
        self._trained: ByIdentity[nn.Module, bool] = ByIdentity()
        self.called: set[tuple[str, str]] = set()
        """(root, path) of every module that was seen to run."""
        self._activations: dict[int, StorageWeakRef] = {}
        """Storages that hold what recorded modules gave: not data when passed to another."""
        self._begin_call: Callable[..., Any] = self._begin
        self._end_call: Callable[..., None] = self._record_outputs
        if native is not None:
            self._begin_call = functools.partial(native.begin_call, self)
            self._end_call = functools.partial(native.end_call, self)

    def install(self) -> None:
        """Wrap `torch.nn.Module.__call__`."""
        original: Forward = nn.Module.__call__
        call = self.call

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(self, *args, **kwargs)
            return call(original, self, args, kwargs)

        self._original = original
        self._wrapper = __call__
        skip_frame(__call__)
        nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def remove(self) -> None:
        """Put `torch.nn.Module.__call__` back, unless somebody wrapped it once more."""
        if self._original is not None and nn.Module.__call__ is self._wrapper:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
        self._original = None

    @property
    def current(self) -> Call | None:
        """The innermost module call of this thread."""
        stack = self._local.stack
        return stack[-1] if stack else None

    @skip_frame
    def call(self, original: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call and record what went in and came out."""
        recorder, local = self._recorder, self._local
        is_outermost = local.depth == 0
        if not recorder.is_active or local.is_blind or (not is_outermost and not self._is_deep):
            return original(module, *args, **kwargs)
        local.depth += 1
        try:
            if not is_outermost:
                return self._call_inner(original, module, args, kwargs)
            if self._escapes(args, kwargs):
                local.is_blind = True
                return original(module, *args, **kwargs)
            if is_rehearsal():
                local.is_blind = True
                recorder.sharding.hush_rehearsals()
                return quiet(original)(module, *args, **kwargs)
            return self._call_outermost(original, module, args, kwargs)
        finally:
            local.depth -= 1
            if is_outermost:
                local.is_blind = False

    @paused
    def _escapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if escapes_observation((*args, *kwargs.values())):
            self._recorder.current.miss("module calls under tracing, torch.func, fake or meta tensors")
            return True
        if not self._recorder.trains_here():
            self._recorder.current.miss("module calls in threads that do not train")
            return True
        return False

    @skip_frame
    def _call_outermost(
        self, original: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            entered = self._enter_outermost(module)
            if entered is None or not self._recorder.is_active or not self._recorder.current.is_kept:
                return original(module, *args, **kwargs)
            name, recomputes = entered
            if recomputes and not self._is_deep:
                return original(module, *args, **kwargs)
            return self._observe(original, module, name, args, kwargs, recomputes)
        finally:
            self._local.root = None

    @paused
    def _enter_outermost(self, module: nn.Module) -> tuple[ModuleName, bool] | None:
        recorder, local = self._recorder, self._local
        name = recorder.add_root(module)
        recomputes = in_backward()
        is_eval = not module.training and (not torch.is_grad_enabled() or module in self._trained)
        if module.training:
            self._trained[module] = True
        if not recomputes:
            recorder.enter_forward(is_training=not is_eval)
        local.root = module
        local.is_eval = is_eval
        return name, recomputes

    @skip_frame
    def _call_inner(self, original: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._local.stack and not self._recorder.current.is_kept:
            return original(module, *args, **kwargs)
        name = self._recorder.registry.name_of(module) or self._name_inner(module)
        if name is None:
            return original(module, *args, **kwargs)
        return self._observe(original, module, name, args, kwargs, in_backward())

    @paused
    def _name_inner(self, module: nn.Module) -> ModuleName | None:
        recorder, local = self._recorder, self._local
        parent = local.stack[-1] if local.stack else None
        above = ModuleName(parent.root, parent.path, False) if parent is not None else recorder.add_root(module)
        return recorder.registry.add_below(module, above, local.root)

    @skip_frame
    def _observe(
        self,
        original: Forward,
        module: nn.Module,
        name: ModuleName,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recomputes: bool,
    ) -> Any:
        stack = self._local.stack
        passes_on = name.is_wrapper and self._is_deep and not is_compiled(module)
        repeats = bool(stack) and stack[-1].path == name.path and stack[-1].root == name.root
        if passes_on or repeats:  # the module that bears the name is called next, or it is a compiled one's own inside
            return original(module, *args, **kwargs)
        builder = self._recorder.current
        begun = self._begin_call(builder, module, name, args, kwargs, recomputes)
        if begun is None:
            return original(module, *args, **kwargs)
        call, arguments = begun
        stack.append(call)
        try:
            result = original(module, *args, **kwargs)
        except BaseException:
            if recomputes:  # checkpointing stops a recompute so, once it has what it needs
                self._note_recomputed(builder, call)
            raise
        finally:
            stack.pop()
            call.last_node = next_node()
        self._end_call(builder, call, arguments, result)
        return result

    @paused
    def _begin(
        self,
        builder: StepBuilder,
        module: nn.Module,
        name: ModuleName,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recomputes: bool,
    ) -> tuple[Call, list[tuple[str, torch.Tensor]]] | None:
        """Record what goes in."""
        stack, is_eval = self._local.stack, self._local.is_eval
        parent = stack[-1] if stack else None
        phase = Phase.RECOMPUTE if recomputes else Phase.FORWARD
        call = Call(phase, name.root, name.path, is_eval, parent)
        call.sites = builder.next_sites(phase, name.root, name.path, "", is_eval)
        call.occurrence = call.sites.first.occurrence
        above = parent.group if parent is not None else -1
        call.group = builder.open_group(call.sites.group(phase, class_name(module), above))
        call.thread = threading.get_ident()
        call.number = len(builder.calls)
        builder.calls.append(call)
        self.called.add((name.root, name.path))
        arguments = named_arguments(args, kwargs)
        self._record_inputs(builder, call, arguments)
        call.first_node = next_node()
        return call, arguments

    def _record_inputs(self, builder: StepBuilder, call: Call, arguments: list[tuple[str, torch.Tensor]]) -> None:
        above = call.parent if call.parent is not None else builder.top
        is_outermost = call.parent is None and call.phase is Phase.FORWARD
        for slot, tensor in arguments:
            is_data = is_outermost and tensor.grad_fn is None and not self._is_activation(tensor)
            is_data = is_data and not builder.was_received(tensor)
            if is_data:
                site = builder.same(Site(Phase.BATCH, call.root, call.path, slot, call.occurrence, call.is_eval))
                events = builder.add_tensor(site, tensor)
                builder.top.inputs += tuple(events)
            elif self._is_deep:
                site = call.sites[slot]
                known = builder.recorded(tensor)
                sources = known if known else [*above.inputs, *above.children, *above.heard(), *builder.top.received]
                events = builder.add_again(site, tensor, above.group, sources)
            else:
                continue
            call.inputs += tuple(events)
            if self._is_deep:
                builder.remember(tensor, events)
                if tensor.requires_grad:
                    self._recorder.gradients.track_input(builder, call, slot, tensor)

    @paused
    def _record_outputs(
        self, builder: StepBuilder, call: Call, arguments: list[tuple[str, torch.Tensor]], result: Any
    ) -> None:
        above = call.parent if call.parent is not None else builder.top
        outputs = [("out", result)] if isinstance(result, torch.Tensor) else [*named_tensors(result, "out")]
        if self._is_deep:
            sources = [*call.inputs, *call.children, *call.heard(), *builder.top.received]
            for slot, tensor in outputs:
                events = builder.add_again(call.sites[slot], tensor, call.group, sources)
                call.outputs += tuple(events)
                builder.remember(tensor, events)
                if tensor.grad_fn is not None:
                    self._recorder.gradients.track_output(builder, call, slot, tensor)
            above.children += call.outputs
            if call.phase is Phase.RECOMPUTE:
                self._note_recomputed(builder, call)
        if call.parent is None and call.phase is Phase.FORWARD:
            given = {storage for _, tensor in arguments if (storage := storage_id(tensor)) is not None}
            for _, tensor in outputs:
                storage = storage_id(tensor)
                if storage is not None and storage not in given:
                    self._activations[storage] = StorageWeakRef(tensor.untyped_storage())

    def _note_recomputed(self, builder: StepBuilder, call: Call) -> None:
        builder.recomputed.setdefault((call.root, call.path), []).extend(call.known())

    def _is_activation(self, tensor: torch.Tensor) -> bool:
        storage = storage_id(tensor)
        reference = self._activations.get(storage) if storage is not None else None
        return reference is not None and not reference.expired()

    def forget(self) -> None:
        """Drop the activations that are gone; called at the end of a step."""
        self._activations = {key: held for key, held in self._activations.items() if not held.expired()}


if native is not None:
    native.configure(
        call_pattern=Call(Phase.FORWARD, "", "", False, None),
        class_name=class_name,
        forward_phase=Phase.FORWARD,
        named_tensors=named_tensors,
        next_node=next_node,
        recompute_phase=Phase.RECOMPUTE,
    )
