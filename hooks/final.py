"""What `bitcheck selfcheck` asks of a process: how often optimizers stepped, and the state after the K-th time.

Nothing but one hook on optimizers. Each rank leaves two files in the folder of the settings:

    rank-00000.steps    the number of optimizer steps so far, as text
    rank-00000.json     {"steps": K, "digests": {"param/head.weight:value": "0c3f...", ...}, "bytes": n}

The state: parameters, their gradients and the optimizer's state of every optimizer that stepped,
the buffers of the modules that own these parameters, and the global generators.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitcheck.digest import digest_bytes
from bitcheck.hooks.attach import is_worker, leave_word, this_placement
from bitcheck.hooks.naming import walk
from bitcheck.hooks.rng import generator_states
from bitcheck.hooks.tensors import PlainValue, digest_tensor, digest_value, python_value_parts, tensor_parts
from bitcheck.settings import Settings


def watch_final_state(settings: Settings) -> None:
    """Count this process's optimizer steps and digest its state after the one that the settings name."""
    _Watch(settings).begin()


class _Watch:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._num_steps = 0
        self._wanted: int | None = None
        self._rank = 0
        self._file = -1
        self._pid = 0
        self._optimizers: list[Optimizer] = []
        """Those that stepped, in the order in which they first did."""

    def begin(self) -> None:
        """Install the hook."""
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._num_steps == 0 and not self._claim():
            return
        if self._pid != os.getpid():
            return  # forked from the process that counts
        self._num_steps += 1
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        os.pwrite(self._file, b"%d" % self._num_steps, 0)
        if self._num_steps == self._wanted:
            self._write_state()

    def _claim(self) -> bool:
        """Make this process the one that counts for its rank; False where another does."""
        self._rank = this_placement().rank
        path = Path(self._settings.folder) / f"rank-{self._rank:05d}.steps"
        try:
            if is_worker():
                raise FileExistsError
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self._handle.remove()
            leave_word(self._settings, "refused", rank=self._rank)
            return False
        self._pid = os.getpid()
        self._wanted = (self._settings.final or {}).get(str(self._rank))
        return True

    def _write_state(self) -> None:
        digests: dict[str, str] = {}
        num_bytes = 0
        for site, digest, size in final_state(self._optimizers):
            digests[site] = digest.hex()
            num_bytes += size
        path = Path(self._settings.folder) / f"rank-{self._rank:05d}.json"
        path.write_text(json.dumps({"steps": self._num_steps, "digests": digests, "bytes": num_bytes}), encoding="ascii")


def final_state(optimizers: list[Optimizer]) -> Iterator[tuple[str, bytes, int]]:
    """Yield (site as text, digest, bytes) of everything that these optimizers train, and the generators."""
    names = parameter_names(optimizers)
    for name, parameter in names:
        yield from _parts(f"param/{name}", "value", parameter)
        if parameter.grad is not None:
            yield from _parts(f"grad/{name}", "grad", parameter.grad)
    by_id = {id(parameter): name for name, parameter in names}
    for number, optimizer in enumerate(optimizers):
        label = type(optimizer).__name__ if number == 0 else f"{type(optimizer).__name__}_{number + 1}"
        for key, state in optimizer.state.items():
            name = by_id.get(id(key), label) if isinstance(key, torch.Tensor) else f"{label}.{key}"
            for slot, value in state.items() if isinstance(state, dict) else [("value", state)]:
                yield from _parts(f"optim/{name}", str(slot), value)
    for name, buffer in _buffers({id(parameter) for _, parameter in names}):
        yield from _parts(f"buffer/{name}", "value", buffer)
    for name, words in generator_states():
        yield f"rng/{name}:state", digest_bytes("uint8", (words.size,), words)[0], words.size


def parameter_names(optimizers: list[Optimizer]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) of every parameter, in the optimizers' order, each once.

    The name is that in the module that owns it; a parameter that no living module owns is named by
    its place in the optimizer.
    """
    parameters: dict[int, tuple[str, torch.Tensor]] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                parameters.setdefault(id(parameter), (f"{type(optimizer).__name__}.{number}.{index}", parameter))
    for root in _roots(set(parameters)):
        for path, module, _ in walk(root):
            for name, parameter in module._parameters.items():
                known = parameters.get(id(parameter))
                if known is not None and known[0][:1] != "/":
                    parameters[id(parameter)] = (f"/{path}.{name}" if path else f"/{name}", known[1])
    named: list[tuple[str, torch.Tensor]] = []
    taken: dict[str, int] = {}
    for name, parameter in parameters.values():
        plain = name.removeprefix("/")
        count = taken[plain] = taken.get(plain, 0) + 1
        named.append((plain if count == 1 else f"{plain}#{count - 1}", parameter))
    return named


def _buffers(parameters: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    taken: dict[str, int] = {}
    for root in _roots(parameters):
        for path, module, _ in walk(root):
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                plain = f"{path}.{name}" if path else name
                count = taken[plain] = taken.get(plain, 0) + 1
                yield plain if count == 1 else f"{plain}#{count - 1}", buffer


def _roots(parameters: set[int]) -> list[nn.Module]:
    """Return the outermost living modules that own any of `parameters`, in the order of these.

    They are looked for in memory, so that no module needs a hook. A module without such parameters
    is left out: it may be one that is dead and not yet collected, which differs from run to run.
    """
    modules = [found for found in gc.get_objects() if isinstance(found, nn.Module) and "_modules" in vars(found)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    order = {identity: position for position, identity in enumerate(sorted(parameters))}
    owned = []
    for module in modules:
        if id(module) in inner:
            continue
        found = [order[id(p)] for _, child, _ in walk(module) for p in child._parameters.values() if id(p) in order]
        if found:
            owned.append((min(found), len(found), module))
    return [module for *_, module in sorted(owned, key=lambda entry: entry[:2])]


def _parts(site: str, slot: str, value: Any) -> Iterator[tuple[str, bytes, int]]:
    parts: list[tuple[str, torch.Tensor | PlainValue]] = (
        [*tensor_parts(value)] if isinstance(value, torch.Tensor) else python_value_parts(value)
    )
    for suffix, part in parts:
        if isinstance(part, PlainValue):
            yield f"{site}:{slot}{suffix}", digest_value(part)[0], len(part.data)
        else:
            yield f"{site}:{slot}{suffix}", digest_tensor(part)[0], part.nbytes
