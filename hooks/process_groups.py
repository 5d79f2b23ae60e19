"""Process groups and reductions by names that are the same in every run."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

WORLD = "world"
_PYTORCH_OWN = ("default_pg", "mesh_default", "undefined")
"""Descriptions that say nothing of what the program uses a group for; those with a colon count splits."""


def process_group_ranks(process_group: Any) -> list[int] | None:
    """Return the global ranks of a process group in its own order, None for one that PyTorch's registry lacks."""
    if not dist.is_initialized():
        return None
    try:
        return list(dist.get_process_group_ranks(process_group))
    except (KeyError, ValueError, RuntimeError):
        return None


def reduction_name(reduction: Any) -> str:
    """Return `sum`, `avg`, ...; `custom` for one with parameters."""
    return "sum" if reduction is None else _name_of_operator(getattr(reduction, "op", reduction))


@functools.cache
def _name_of_operator(operator: Any) -> str:
    name = str(operator).rpartition(".")[2].partition(":")[0].strip("<> ").lower()
    return name if name.isidentifier() else "custom"


class Members(NamedTuple):
    """Who is in a process group."""

    ranks: list[int]
    """Global ones, in the group's own order."""
    name: str
    own: int
    """This process's rank, a global one."""


class GroupNames:
    """Names of process groups that are the same on all members and in every run.

        world         all ranks, the default group
        0-3  0,2,4    others, by their ranks
        0-3.tp        what the program calls a group (`group_desc`), or a dimension of a mesh; all that it calls so
        world.2       the second of those that have the same ranks and no name, in the order of their first use

    PyTorch's own names are numbers that count what a process ever made: one group more, for a checkpoint say,
    and all after it have others.
    """

    def __init__(self) -> None:
        self._named: dict[str, list[str]] = {}
        """Name without a number -> torch's names of the groups that have it."""
        self._known: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()

    def members_of(self, process_group: Any) -> Members | None:
        """Return who is in a group, and its name; None for one that PyTorch's registry lacks."""
        ranks = process_group_ranks(process_group)
        if ranks is None:  # destroyed, for one, though its methods still work
            return None
        known = self._known.get(process_group)
        if known is None:
            known = self._known[process_group] = Members(ranks, self._name_of(process_group, ranks), dist.get_rank())
        return known

    def _name_of(self, process_group: Any, ranks: Sequence[int]) -> str:
        word = _given_name(process_group)
        name = ".".join(filter(None, (_ranks_name(ranks), word)))
        if word:
            return name  # a mesh made twice has two groups for a dimension, and PyTorch's caches use either
        own = str(process_group.group_name)
        same = self._named.setdefault(name, [""] if name == WORLD else [])
        if process_group is dist.group.WORLD:
            same[0] = own
        elif own not in same:
            self._take_place(same, own)
        number = same.index(own) + 1
        return name if number == 1 else f"{name}.{number}"

    def _take_place(self, same: list[str], own: str) -> None:
        """Number a group; one that is made for each checkpoint and destroyed after it has the same number each time."""
        registry: Any = dist.distributed_c10d
        living = set(map(str, registry._world.pg_names.values()))
        first = 1 if self._named.get(WORLD) is same else 0  # the default group's place stays its own
        for number in range(first, len(same)):
            if same[number] not in living:
                same[number] = own
                return
        same.append(own)

    def transfer_name(self, process_group: Any, members: Members, sender: int, receiver: int) -> str:
        """Return the name of what goes between two members: `0-1`, `0-1.pp`, `0-1.world.2`."""
        ends = f"{sender}-{receiver}"
        if members.name == _ranks_name(members.ranks):
            return ends
        return f"{ends}.{_given_name(process_group) or members.name}"


def _given_name(process_group: Any) -> str:
    """Return what the program calls a group, "" where it does not."""
    text = str(getattr(process_group, "group_desc", "") or "")
    if process_group is dist.group.WORLD or text in _PYTORCH_OWN or ":" in text:
        return ""
    return re.sub(r"[^\w-]", "_", text.removeprefix("mesh_"))


def _ranks_name(ranks: Sequence[int]) -> str:
    """Return `world`, or the ranks: `0-3` for a row of them, `0,2,4` otherwise."""
    ordered = sorted(ranks)
    if ordered == list(range(dist.get_world_size())):
        return WORLD
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))
