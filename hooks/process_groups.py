"""Process groups and reductions by names that are the same in every run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


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
    if reduction is None:
        return "sum"
    name = str(getattr(reduction, "op", reduction)).rpartition(".")[2].partition(":")[0].strip("<> ").lower()
    return name if name.isidentifier() else "custom"


def group_name(ranks: Sequence[int]) -> str:
    """Return `world`, or the ranks: `0-3` for a row of them, `0,2,4` otherwise."""
    ordered = sorted(ranks)
    if ordered == list(range(dist.get_world_size())):
        return "world"
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))
