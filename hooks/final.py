"""What `bitcheck selfcheck` asks of a process: how often optimizers stepped, and the state after the K-th time.

Nothing but one hook on optimizers. Each rank leaves two files in the folder of the settings:

    rank-00000.steps    the number of optimizer steps so far, as text
    rank-00000.json     {"steps": K, "digests": {"param/head.weight:value": "0c3f...", ...}, "bytes": n, "unread": []}

The state: parameters, their gradients and the optimizer's state of every optimizer that stepped,
the buffers of the modules that own these parameters, and the global generators.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitcheck.digest import digest_bytes
from bitcheck.errors import DigestError
from bitcheck.hooks.attach import is_worker, leave_word
from bitcheck.hooks.naming import walk
from bitcheck.hooks.placement import this_placement
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
        self._is_refused = False
        """Another process counts for this rank, or this is a worker."""
        self._optimizers: list[Optimizer] = []
        """Those that stepped, in the order in which they first did."""
        self._first_generators: dict[str, bytes] = {}

    def begin(self) -> None:
        """Install the hook."""
        import numpy.random  # noqa: F401  numpy loads it late, with a state of its own; from here on it has one

        self._first_generators = {name: words.tobytes() for name, words in generator_states()}
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_refused:
            return
        if self._num_steps == 0 and not self._claim():
            self._is_refused = True
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
        path = Path(self._settings.final_folder) / f"rank-{self._rank:05d}.steps"
        try:
            if is_worker():
                raise FileExistsError
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            leave_word(self._settings, "refused", rank=self._rank)
            return False
        self._pid = os.getpid()
        self._wanted = (self._settings.final or {}).get(str(self._rank))
        return True

    def _write_state(self) -> None:
        state = final_state(self._optimizers, self._first_generators)
        content = {"steps": self._num_steps, "digests": state.digests, "bytes": state.num_bytes, "unread": state.unread}
        path = Path(self._settings.final_folder) / f"rank-{self._rank:05d}.json"
        path.write_text(json.dumps(content), encoding="ascii")


class FinalState(NamedTuple):
    """Everything that some optimizers train, and the global generators."""

    digests: dict[str, str]
    """Site as text -> digest as hexadecimal text."""
    num_bytes: int
    unread: list[str]
    """What has no exact bits (an object of an unknown type in an optimizer's state), and why."""


UNTOUCHED = "untouched"
"""In place of the digest of a generator that is still as it was when torch was imported. Python's and
numpy's begin differently in every process: unless the program seeds them, all that can be compared is
whether anybody drew from them."""


def final_state(optimizers: Sequence[Optimizer], first_generators: Mapping[str, bytes]) -> FinalState:
    """Digest parameters, gradients, optimizer state, buffers and the global generators."""
    parameters, buffers = _named_tensors(optimizers)
    names = {id(parameter): name for name, parameter in parameters}
    values: list[tuple[str, str, Any]] = []
    for name, parameter in parameters:
        values.append((f"param/{name}", "value", parameter))
        if parameter.grad is not None:
            values.append((f"grad/{name}", "grad", parameter.grad))
    for number, optimizer in enumerate(optimizers):
        label = type(optimizer).__name__ + (f"_{number + 1}" if number else "")
        for key, state in optimizer.state.items():
            name = names.get(id(key), label) if isinstance(key, torch.Tensor) else f"{label}.{key}"
            slots = state.items() if isinstance(state, dict) else [("value", state)]
            values.extend((f"optim/{name}", str(slot), value) for slot, value in slots)
    values.extend((f"buffer/{name}", "value", buffer) for name, buffer in buffers)

    digests: dict[str, str] = {}
    num_bytes = 0
    unread = []
    for name, slot, value in values:
        try:
            for suffix, part in tensor_parts(value) if isinstance(value, torch.Tensor) else python_value_parts(value):
                digest, size = _digest(part)
                digests[f"{name}:{slot}{suffix}"] = digest.hex()
                num_bytes += size
        except DigestError as error:
            unread.append(f"{name}:{slot}: {error}")
    for name, words in generator_states():
        is_untouched = words.tobytes() == first_generators.get(name)
        digest = digest_bytes("uint8", (words.size,), words)[0]
        digests[f"rng/{name}:state"] = UNTOUCHED if is_untouched else digest.hex()
        num_bytes += words.size
    return FinalState(digests, num_bytes, unread)


def _digest(part: torch.Tensor | PlainValue) -> tuple[bytes, int]:
    """Return (digest, bytes) of one piece."""
    if isinstance(part, PlainValue):
        return digest_value(part)[0], len(part.data)
    return digest_tensor(part)[0], part.nbytes


Named = list[tuple[str, torch.Tensor]]


def _named_tensors(optimizers: Sequence[Optimizer]) -> tuple[Named, Named]:
    """Return (name, tensor) of the optimizers' parameters, and of the buffers beside them, each tensor once.

    The names are those in the modules that own the tensors; a parameter that no living module owns is
    named by its place in its optimizer.
    """
    fallback: dict[int, str] = {}
    parameters: list[torch.Tensor] = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in fallback:
                    fallback[id(parameter)] = f"{type(optimizer).__name__}.params.{number}.{index}"
                    parameters.append(parameter)
    names: dict[int, str] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    for root in _roots(parameters):
        for path, module, _ in walk(root):
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if id(parameter) in fallback:
                    names.setdefault(id(parameter), prefix + name)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    buffers.setdefault(id(buffer), (prefix + name, buffer))
    named = [(names.get(id(parameter), fallback[id(parameter)]), parameter) for parameter in parameters]
    return _distinct(named), _distinct(buffers.values())


def _distinct(named: Iterable[tuple[str, torch.Tensor]]) -> Named:
    """Number the names that two roots have in common."""
    counts: Counter[str] = Counter()
    found = []
    for name, tensor in named:
        found.append((f"{name}#{counts[name]}" if counts[name] else name, tensor))
        counts[name] += 1
    return found


def _roots(parameters: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost living modules that own any of `parameters`, in the order of these.

    They are looked for in memory, so that no module needs a hook. A module without such parameters
    is left out: it may be one that is dead and not yet collected, which differs from run to run.
    """
    # By type(): isinstance() would run the code of proxy objects that pretend to be of another class.
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module) and "_modules" in vars(found)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    order = {id(parameter): position for position, parameter in enumerate(parameters)}
    owners = []
    for module in modules:
        if id(module) in inner:
            continue
        owned = [order[id(p)] for _, child, _ in walk(module) for p in child._parameters.values() if id(p) in order]
        if owned:
            owners.append((min(owned), len(owned), module))
    return [module for *_, module in sorted(owners, key=lambda owner: owner[:2])]
