"""Which rank this process is, of how many: of its process group, else as its launcher says."""

from __future__ import annotations

import os

import torch.distributed as dist

from bitcheck.ranks import Placement, launched_as


def this_placement() -> Placement:
    """Return this process's place, rank 0 of 1 outside a parallel job."""
    if dist.is_available() and dist.is_initialized():
        return Placement(dist.get_rank(), dist.get_world_size(), "")
    return launched_as(os.environ) or Placement(0, 1, "")
