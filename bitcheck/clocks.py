"""Logical time over the ranks of a step: later than all that happened before it anywhere.

Time runs with the position on a rank; a collective's outputs are later than the inputs of all its
members (L. Lamport, Time, Clocks, and the Ordering of Events in a Distributed System, 1978). Equal
sites on several ranks are one collective. What one rank sends to another is later there from its first use
on: a receive is often begun long before the sender has anything to send, and the sender waits for nobody.

Place in the flow: pairing -> *clocks* -> attribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np

from bitcheck.events import Phase, Site
from bitcheck.pairing import StepPair
from bitcheck.roles import is_argument

_Collective = tuple[str, str, int]
"""Root, path and occurrence of its site."""
TRANSFER = "send."
"""How the path of what goes from one rank to another begins."""


class _Part(IntEnum):
    """What a rank does in a collective."""

    MEETS = 0
    GIVES = 1
    TAKES = 2


def logical_clocks(pairs: Mapping[int, StepPair]) -> dict[int, list[int]]:
    """Return the time of every event of a step, rank -> position -> time.

    Ranks that wait for each other in a circle (the runs did different things) keep their own time
    from there on.
    """
    clocks = {rank: list(range(len(pair))) for rank, pair in pairs.items()}
    if len(pairs) < 2:
        return clocks
    collectives = {rank: _collectives(pair) for rank, pair in pairs.items()}
    members: dict[_Collective, set[int]] = {}
    givers: set[_Collective] = set()
    for rank, found in collectives.items():
        for collective, (_, part) in found.items():
            members.setdefault(collective, set()).add(rank)
            if part is _Part.GIVES:
                givers.add(collective)
    reached = dict.fromkeys(pairs, 0)
    shift = dict.fromkeys(pairs, 0)
    waiting: dict[_Collective, dict[int, int]] = {}
    given: dict[_Collective, int] = {}
    takers: dict[_Collective, tuple[int, int]] = {}

    def advance(rank: int, position: int) -> None:
        for index in range(reached[rank], position):
            clocks[rank][index] += shift[rank]
        reached[rank] = position

    def take(rank: int, position: int, collective: _Collective) -> None:
        advance(rank, position)
        shift[rank] = max(shift[rank], given.get(collective, -1) + 1 - position)
        ready.append(rank)

    queues = {rank: iter(found.items()) for rank, found in collectives.items()}
    ready = sorted(pairs)
    while ready:
        rank = ready.pop()
        entry = next(queues[rank], None)
        if entry is None:
            continue
        collective, (position, part) = entry
        if part is _Part.TAKES:
            if collective in given or collective not in givers:
                take(rank, position, collective)
            else:
                takers[collective] = rank, position
            continue
        advance(rank, position)
        if part is _Part.GIVES:
            given[collective] = position + shift[rank]
            ready.append(rank)
            if collective in takers:
                take(*takers.pop(collective), collective)
            continue
        present = waiting.setdefault(collective, {})
        present[rank] = position
        if set(present) == members[collective]:
            time = max(position + shift[member] for member, position in present.items())
            for member, position in present.items():
                shift[member] = time - position
            ready.extend(present)
    for rank in pairs:
        advance(rank, len(clocks[rank]))
    return clocks


def _collectives(pair: StepPair) -> dict[_Collective, tuple[int, _Part]]:
    """A rank's collectives in order, each with its first output's position; of a transfer, what it is given or used."""
    found: dict[_Collective, tuple[int, _Part]] = {}
    for position in range(len(pair)):
        site = pair.site(position)
        if site.phase is not Phase.COMM:
            continue
        collective = (site.root, site.path, site.occurrence)
        if site.path.startswith(TRANSFER):
            place = _part_of_transfer(pair, site, position)
            if place is not None:
                found.setdefault(collective, place)
        elif not is_argument(site):
            found.setdefault(collective, (position, _Part.MEETS))
    return dict(sorted(found.items(), key=lambda entry: entry[1][0]))


def _part_of_transfer(pair: StepPair, site: Site, position: int) -> tuple[int, _Part] | None:
    if is_argument(site):
        return position, _Part.GIVES
    step, index = pair.holder(position)
    uses = np.flatnonzero(np.asarray(step.inputs) == index)
    if not len(uses):
        return None
    user = int(np.searchsorted(np.asarray(step.input_ptr), uses[0], side="right")) - 1
    return pair.position_of(step, user), _Part.TAKES
