"""Which part of a tensor this rank holds: DTensor, FSDP's shards, the copies of DistributedDataParallel, stages.

A DTensor says itself on which mesh it lies. The parameters of a module that DistributedDataParallel
wraps are plain tensors, equal on every rank of its group, and so are their gradients as the
optimizer finds them and what the optimizer keeps of them. FSDP (`fully_shard`) computes with
gathered parameters that take the place of the shards for a while: those bear the shards' names.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from bitcheck.events import Phase
from bitcheck.hooks.callers import global_values
from bitcheck.hooks.dynamo import quiet
from bitcheck.hooks.naming import walk
from bitcheck.hooks.patches import Patches
from bitcheck.hooks.process_groups import process_group_ranks
from bitcheck.placements import TensorPlacement

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder
    from bitcheck.hooks.steps import StepBuilder


_placements: dict[int, tuple[Any, str]] = {}
"""Identity of a DTensor's specification -> it, its text: a tensor keeps the same from step to step."""
_MAX_PLACEMENTS = 16_384


def placement_text(tensor: Any) -> str:
    """Return where a DTensor lies (see `bitcheck.placements`), "" for any other tensor."""
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        return ""
    known = _placements.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    mesh = getattr(spec, "mesh", None)
    coords = mesh.get_coordinate() if mesh is not None else None
    if mesh is None or not coords:  # a rank outside the mesh holds nothing
        return ""
    text = _placement_text(mesh, tuple(coords), tuple(map(str, spec.placements)))
    if len(_placements) >= _MAX_PLACEMENTS:
        _placements.clear()
    _placements[id(spec)] = spec, text
    return text


def local_part(tensor: Any) -> torch.Tensor | None:
    """Return what this rank holds of a DTensor, where that is a plain tensor; None for all else."""
    if type(tensor).__name__ != "DTensor":
        return None
    local = getattr(tensor, "_local_tensor", None)
    return local if type(local) is torch.Tensor else None


@lru_cache(maxsize=1024)
def _placement_text(mesh: Any, coords: tuple[int, ...], kinds: tuple[str, ...]) -> str:
    names = mesh.mesh_dim_names or [f"dim{number}" for number in range(len(coords))]
    dims = tuple(zip(names, map(int, mesh.shape), strict=True))
    return TensorPlacement(dims, tuple(map(int, mesh.mesh.flatten().tolist())), coords, kinds).to_text()


class Sharding:
    """Knows for one recorder what lies where."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._replicated: dict[tuple[bool, str, str], str] = {}
        """(is a buffer, root, path) -> placement."""
        self._shards: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}
        """Identity of a gathered parameter -> it, its shard."""
        self._made: list[weakref.ref[nn.parallel.DistributedDataParallel]] = []
        """Wrappers of which nothing had a name when it was last looked."""
        self._has_searched = False
        self._handle: Any = None
        self._patches = Patches()
        self._has_hushed = False

    def hush_rehearsals(self) -> None:
        """Record no operation while a pipeline finds out shapes: its tensors hold whatever the memory held."""
        stages = sys.modules.get("torch.distributed.pipelining.stage")
        if self._has_hushed or stages is None:
            return
        self._has_hushed = True
        for kind in (stages.PipelineStage, stages._PipelineStageBase):
            for name in [name for name, value in vars(kind).items() if "inference" in name and callable(value)]:
                self._patches.replace(kind, name, quiet)

    def install(self) -> None:
        """See wrappers being made."""
        self._handle = register_module_module_registration_hook(self._note_made)

    def remove(self) -> None:
        """Put everything back."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._patches.remove()
        self._has_hushed = False

    # --- DistributedDataParallel

    def learn(self, module: nn.Module) -> None:
        """Look for DistributedDataParallel in a module that was just given a name."""
        if not dist.is_available() or not dist.is_initialized():
            return
        for _, child, _ in walk(module):
            if isinstance(child, nn.parallel.DistributedDataParallel):
                self._learn_replicas(child)

    def _note_made(self, owner: nn.Module, name: str, module: object) -> None:
        """See DistributedDataParallel take the module that it wraps.

        Its constructor needs no wrapper for that: warnings name the line that called it.
        """
        if name == "module" and isinstance(owner, nn.parallel.DistributedDataParallel):
            self._made.append(weakref.ref(owner))

    def _search(self) -> None:
        """Find every wrapper that was there before the recorder, once: a program may call what one wraps, never itself.

        The garbage collector does not show what a program froze (`gc.freeze`), so the variables of the modules that
        are running are looked at, too. Locals are not: that would keep them alive.
        """
        if self._has_searched or not dist.is_available() or not dist.is_initialized():
            return
        self._has_searched = True
        kind = nn.parallel.DistributedDataParallel
        # By type(): isinstance() would run the code of proxy objects that pretend to be of another class.
        for objects in (gc.get_objects, global_values):  # one by one: a list of all would hold itself
            self._made += [weakref.ref(found) for found in objects() if issubclass(type(found), kind)]

    def _learn_made(self) -> None:
        """Learn of the wrappers of modules that have a name by now."""
        for reference in list(self._made):
            wrapper = reference()
            if wrapper is None or self._learn_replicas(wrapper):
                self._made.remove(reference)

    def _learn_replicas(self, wrapper: nn.parallel.DistributedDataParallel) -> bool:
        """Note what a wrapper holds equal; False where nothing of it has a name yet."""
        group = getattr(wrapper, "process_group", None)
        members = process_group_ranks(group) if group is not None else None
        if members is None:
            return True  # its group was destroyed, or its constructor failed: it reduces nothing
        text = TensorPlacement.of_ddp(members).to_text()
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        is_known = False
        for name, parameter in wrapper.module.named_parameters():
            own = self._recorder.parameter_name(parameter)
            if own is not None:
                is_known = True
                if name not in ignored:
                    self._replicated[(False, *own)] = text
        if not is_known or not wrapper.broadcast_buffers:
            return is_known
        managed = {id(buffer) for name, buffer in wrapper.module.named_buffers() if name not in ignored}
        for root, path, module in self._recorder.registry.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in managed:
                    self._replicated[(True, root, f"{path}.{name}" if path else name)] = text
        return True

    def note(self, builder: StepBuilder, events: Iterable[int]) -> None:
        """Note of state, and of gradients as an optimizer finds them, that every rank of a group holds them."""
        self._search()
        if self._made:
            self._learn_made()
        if not self._replicated:
            return
        record = builder.record
        for event in events:
            site = record.sites[event]
            text = self._replicated.get((site.phase is Phase.BUFFER, site.root, site.path))
            if text is not None:
                record.placements.setdefault(event, text)

    # --- FSDP

    def name_gathered(self, parameter: torch.Tensor) -> tuple[str, str] | None:
        """Give a gathered parameter the name of its shard; None for any other tensor."""
        if "torch.distributed.fsdp._fully_shard" not in sys.modules:
            return None
        for _, _, module in self._recorder.registry.modules():
            for gathered, shard in _fsdp_parameters(module):
                name = self._recorder.parameter_name(shard)
                if name is not None:
                    self._recorder.registry.add_parameter(gathered, *name)
                    self._shards[id(gathered)] = (weakref.ref(gathered), weakref.ref(shard))
        return self._recorder.parameter_name(parameter)

    def shard_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what this rank keeps of a parameter: the shard of a gathered one, else itself."""
        held = self._shards.get(id(parameter))
        if held is None or held[0]() is not parameter:
            return parameter
        shard = held[1]()
        return shard if shard is not None else parameter


def _fsdp_parameters(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (gathered, shard) of the parameters that FSDP manages at a module, where they were gathered once."""
    find = getattr(module, "_get_fsdp_state", None)
    if find is None:
        return
    state = find()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # an earlier PyTorch has one a module
        groups = [state._fsdp_param_group]
    for group in groups:
        for held in getattr(group, "fsdp_params", ()):
            gathered, shard = getattr(held, "_unsharded_param", None), getattr(held, "sharded_param", None)
            if gathered is not None and shard is not None:
                yield gathered, shard
