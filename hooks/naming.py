"""Which name a module or a parameter has in a run: (root, path), stable from run to run.

A root is an outermost module, one that was called while no other module was running; its label is
its class, numbered from the second of its kind by first call (`Model`, `Model_2`). Below it, paths
are `named_modules()` and `named_parameters()` names with the wrappers' own components taken out, so
that `DistributedDataParallel(torch.compile(model))` and `model` give the same names. A tied
parameter or a shared module has the first of its names.

The registry holds no module or parameter alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from bitcheck.hooks.dynamo import skip_frame

WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes under which PyTorch's own wrappers hold what they wrap; no user names a child so."""


PIPELINE = "Pipeline"
"""The root of the modules of a pipeline's stages."""


class ModuleName(NamedTuple):
    """Where a module stands in a run."""

    root: str
    path: str
    is_wrapper: bool
    """A wrapper passes its calls on to the module that bears the name."""


def is_compiled(module: nn.Module) -> bool:
    """Say whether calling `module` runs a compiled region whose inside cannot be observed."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def wrapped_child(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return (attribute, module) of what a wrapper wraps, None for a module in its own right.

    PyTorch's wrappers, and any class that owns nothing but one child called `module`.
    """
    if not len(module._modules):
        return None
    children = list(module._modules.items())  # a TorchScript module's is no dict
    for name, child in children:
        if name in WRAPPER_COMPONENTS and child is not None:
            return name, child
    if len(children) == 1 and children[0][0] == "module" and children[0][1] is not None:
        owns = any(True for store in (module._parameters, module._buffers) for _ in store.items())
        return None if owns else ("module", children[0][1])
    return None


def class_name(module: object) -> str:
    """Return the name of an object's class; of the class that `fully_shard` makes, that of the user's."""
    kind = type(module)
    if len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        return kind.__bases__[1].__name__
    return kind.__name__


K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """A mapping whose keys are objects themselves, whatever they call equal, and which holds none of them."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}

    @skip_frame
    def get(self, key: K) -> V | None:
        """Return the value of a key, None where it has none."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: K) -> V:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        identity, entries = id(key), self._entries

        def forget(reference: weakref.ref[K]) -> None:
            if identity in entries and entries[identity][0] is reference:
                del entries[identity]

        entries[identity] = weakref.ref(key, forget), value

    def __delitem__(self, key: K) -> None:
        del self._entries[id(key)]

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[K, V]]:
        """Return every key that is alive, with its value."""
        return [(key, value) for reference, value in list(self._entries.values()) if (key := reference()) is not None]


class Registry:
    """The names of all modules and parameters that a run has met."""

    def __init__(self) -> None:
        self.roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._names: ByIdentity[nn.Module, ModuleName] = ByIdentity()
        self._labels: dict[str, weakref.ref[Any]] = {}
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], tuple[str, str]]] = {}
        self._free: dict[int, tuple[weakref.ref[torch.Tensor], tuple[str, str]]] = {}

    def label(self, holder: object) -> str:
        """Return a label that no other living module or optimizer has: its class, `Class_2`, ... .

        A label is free again when its holder is gone, so that a criterion made anew in every step
        keeps one name.
        """
        kind = class_name(holder)
        label, number = kind, 1
        while (held := self._labels.get(label)) is not None and held() is not None:
            number += 1
            label = f"{kind}_{number}"
        self._labels[label] = weakref.ref(holder)
        return label

    def pass_on(self, label: str, holder: object) -> None:
        """Give a label to another holder."""
        self._labels[label] = weakref.ref(holder)

    @skip_frame
    def name_of(self, module: nn.Module) -> ModuleName | None:
        """Return the name of a module, None for one that was never met."""
        return self._names.get(module)

    def add_root(self, module: nn.Module, stage: int | None = None) -> ModuleName:
        """Register an outermost module and all below it that have no name yet.

        The module of a pipeline's stage is known by the stage: `Pipeline`, `stage.2`.
        """
        known = self._names.get(module)
        if known is not None:
            return known
        inner: nn.Module = module
        while (step := wrapped_child(inner)) is not None:
            inner = step[1]
        held = self._names.get(inner)
        if held is not None:
            label, prefix = held.root, held.path
        elif stage is not None:
            label, prefix = PIPELINE, f"stage.{stage}"
        else:
            label, prefix = self.label(inner), ""
        self._add_below(module, label, prefix)
        self.roots = [(own, reference) for own, reference in self.roots if reference() is not None]
        self.roots.append((label, weakref.ref(module)))
        return self._names[module]

    def add_below(self, module: nn.Module, parent: ModuleName, root: nn.Module | None) -> ModuleName:
        """Name a module that was first called inside another one.

        It was added to `root` after the root was first called, or it belongs to no module tree: then
        it is known by its class, below the module that called it.
        """
        if root is not None:
            held = self._names.get(root)
            self._add_below(root, parent.root, held.path if held is not None else "")
        known = self._names.get(module)
        if known is None:
            path = f"{parent.path}.{type(module).__name__}" if parent.path else type(module).__name__
            self._add_below(module, parent.root, path)
            known = self._names[module]
        return known

    def _add_below(self, module: nn.Module, label: str, prefix: str) -> None:
        for path, child, is_wrapper in walk(module, prefix):
            if self._names.get(child) is None:
                self._names[child] = ModuleName(label, path, is_wrapper)
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    self.add_parameter(parameter, label, f"{path}.{name}" if path else name)

    def add_parameter(self, parameter: torch.Tensor, root: str, path: str) -> None:
        """Name a module's parameter, unless a module gave it a name already."""
        if _held_name(self._parameters, parameter) is None:
            self._parameters[id(parameter)] = (weakref.ref(parameter), (root, path))

    def add_free_parameter(self, parameter: torch.Tensor, root: str, path: str) -> None:
        """Name a parameter that no module owns, as far as is known now."""
        if self.parameter_name(parameter) is None:
            self._free[id(parameter)] = (weakref.ref(parameter), (root, path))

    def parameter_name(self, parameter: torch.Tensor) -> tuple[str, str] | None:
        """Return (root, path) of a parameter, None for one that was never met."""
        held = self._parameters.get(id(parameter))  # as `_held_name`, since it is asked thousands of times a step
        if held is not None and held[0]() is parameter:
            return held[1]
        return _held_name(self._free, parameter)

    def modules(self) -> Iterator[tuple[str, str, nn.Module]]:
        """Yield (root label, path, module) of every living module, each once, in a fixed order."""
        seen: set[int] = set()
        for label, reference in self.roots:
            root = reference()
            if root is None:
                continue
            name = self._names.get(root)
            for path, module, _ in walk(root, name.path if name is not None else ""):
                if id(module) not in seen:
                    seen.add(id(module))
                    yield label, path, module

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
        """Yield (root, path, tensor, is parameter) of every parameter and buffer, each once."""
        seen: set[int] = set()
        names = self._parameters
        for label, path, module in self.modules():
            parameters, buffers = module._parameters, module._buffers
            for name, parameter in parameters.items() if len(parameters) else ():
                identity = id(parameter)
                if parameter is None or identity in seen:
                    continue
                seen.add(identity)
                held = names.get(identity)  # as `_held_name`
                if held is None or held[0]() is not parameter:
                    own = (label, f"{path}.{name}" if path else name)
                    self.add_parameter(parameter, *own)
                else:
                    own = held[1]
                yield *own, parameter, True
            for name, buffer in buffers.items() if len(buffers) else ():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield label, f"{path}.{name}" if path else name, buffer, False


def _held_name(
    names: dict[int, tuple[weakref.ref[torch.Tensor], tuple[str, str]]], parameter: torch.Tensor
) -> tuple[str, str] | None:
    held = names.get(id(parameter))
    return held[1] if held is not None and held[0]() is parameter else None


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (path, module, is wrapper) of `module` and all below it, wrappers' components left out."""
    seen: set[int] = set()
    stack = [(prefix, module)]
    while stack:
        path, current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        wrapped = wrapped_child(current)
        yield path, current, wrapped is not None
        if not len(current._modules):
            continue
        children = []
        for name, child in current._modules.items():
            if child is not None:
                passes_on = wrapped is not None and name == wrapped[0]
                below = path if passes_on else f"{path}.{name}" if path else name
                children.append((below, child))
        stack.extend(reversed(children))
