"""What else is unlike when the first step begins, where the states that two runs start from differ already.

A forgotten optimizer hides a forgotten scheduler: everything after the initial snapshot differs and
could have inherited it. But what a step begins with is not computed from the state: the generators'
states, the hyperparameters that the optimizer finds, and where parameters, buffers and tracked state
agree, the batch and everything up to the optimizer's step. What differs there is an origin of its own.

Place in the flow: causes -> *entry* -> origins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from bitcheck.answer import Origin
from bitcheck.attribution import AFTER_GRADIENTS, Blame, attribute_step
from bitcheck.causes import describe_step_origins
from bitcheck.events import STATE_PHASES, Phase
from bitcheck.naming import Naming
from bitcheck.pairing import Standing, StepPair
from bitcheck.roles import is_generator


def generators_agree(pair: StepPair) -> dict[str, bool]:
    """Return generator -> whether both runs find it in the same state at the first forward of a step."""
    return {
        site.path: int(pair.standing[position]) == Standing.EQUAL
        for position in range(len(pair))
        if is_generator(site := pair.site(position)) and not pair.is_missing(position)
    }


def find_entering_origins(
    pairs: Mapping[int, StepPair],
    snapshot: Collection[str],
    step: int,
    naming: Naming,
    *,
    world_size: int,
    is_fresh: bool,
) -> tuple[list[Origin], int]:
    """Return what differs in the first step whatever the initial state, and how many events show it.

    `snapshot`: the phases of the initial state in which something differs. `pairs` stay as they are.
    `is_fresh`: no run was resumed; then the state and the generators come from one seed, and are one origin.
    """
    generators = _blame(pairs, lambda pair, position: is_generator(pair.site(position)))
    blames = [] if is_fresh else generators
    is_same_forward = not set(snapshot) - {str(Phase.OPTIM)}
    if is_same_forward and not generators:
        later = {*AFTER_GRADIENTS, *STATE_PHASES, Phase.SCALAR}
        blames = _blame(pairs, lambda pair, position: pair.site(position).phase not in later)
    hyperparameters = _blame(
        pairs, lambda pair, position: pair.site(position).phase is Phase.SCALAR and not pair.is_missing(position)
    )
    if not hyperparameters:
        hyperparameters = _blame(pairs, lambda pair, position: pair.site(position).phase is Phase.SCALAR)
    blames = [*blames, *hyperparameters]
    origins = describe_step_origins(blames, pairs, step, naming, world_size=world_size, has_gap=False)
    return origins, sum(len(blame.members) for blame in blames)


def _blame(pairs: Mapping[int, StepPair], is_wanted: Callable[[StepPair, int], bool]) -> list[Blame]:
    """Attribute a step as if only the wanted events differed."""
    whole = {rank: pair.standing for rank, pair in pairs.items()}
    try:
        for pair in pairs.values():
            kept = [position for position in pair.parted() if is_wanted(pair, position)]
            standing = np.zeros_like(pair.standing)
            standing[kept] = pair.standing[kept]
            pair.standing = standing
        parted = {rank: pair for rank, pair in pairs.items() if pair.standing.any()}
        return attribute_step(parted).blames if parted else []
    finally:
        for rank, pair in pairs.items():
            pair.standing = whole[rank]
