"""The order in which partial results arrive: fixed in the deterministic forms, free in the others.

Floating-point addition is not associative: a sum's bits depend on the order of its terms. On a GPU
the terms of an `atomic` form arrive in whatever order the hardware's scheduler lets them. A CPU has
no such race, so here the order is drawn from the operating system's entropy, which no seed reaches:
the bits differ from run to run as they do on a GPU. It is called a *simulated arrival order*.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

_ENTROPY = random.SystemRandom()
"""Reads the operating system's entropy; has no state to seed, save or restore."""


def arrival_order(num_parts: int, is_fixed: bool) -> list[int]:
    """Return the order in which `num_parts` partial results are added: 0, 1, ... where it is fixed."""
    order = list(range(num_parts))
    if not is_fixed:
        _ENTROPY.shuffle(order)
    return order


def arrival_permutation(num_parts: int) -> Tensor:
    """Return a free order of `num_parts`, int64 [num_parts] on the CPU."""
    # A torch generator of its own, seeded by entropy: shuffling thousands of rows in Python is slow.
    generator = torch.Generator().manual_seed(_ENTROPY.getrandbits(63))
    return torch.randperm(num_parts, generator=generator)


def sum_parts(parts: Sequence[Tensor] | Tensor, is_fixed: bool) -> Tensor:
    """Return the sum of `parts`, tensors of one shape, added one after the other in arrival order.

    Deterministic where `is_fixed`: the parts are added in index order, in their own dtype. The
    accumulator is a private copy, so that the parts stay what they were. Raises ValueError where
    there is no part.
    """
    if len(parts) == 0:
        raise ValueError("a sum of no parts has no shape")
    order = arrival_order(len(parts), is_fixed)
    total = parts[order[0]].clone()
    for index in order[1:]:
        total += parts[index]
    return total


def arrival_ranks(num_rows: int, num_parts: int) -> Tensor:
    """Return a free order of `num_parts` for each of `num_rows`, int64 [num_rows, num_parts]."""
    generator = torch.Generator().manual_seed(_ENTROPY.getrandbits(63))
    return torch.rand(num_rows, num_parts, generator=generator).argsort(1)
