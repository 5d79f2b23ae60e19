"""Logical time over the ranks of a step: later than all that happened before it anywhere.

Time runs with the position on a rank; a collective's outputs are later than the inputs of all its
members (L. Lamport, Time, Clocks, and the Ordering of Events in a Distributed System, 1978). Equal
sites on several ranks are one collective.

Place in the flow: pairing -> *clocks* -> attribution.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitcheck.events import Phase
from bitcheck.pairing import StepPair
from bitcheck.roles import is_argument

_Collective = tuple[str, str, int]
"""Root, path and occurrence of its site."""


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
    for rank, found in collectives.items():
        for collective in found:
            members.setdefault(collective, set()).add(rank)
    reached = dict.fromkeys(pairs, 0)
    shift = dict.fromkeys(pairs, 0)
    waiting: dict[_Collective, dict[int, int]] = {}

    def advance(rank: int, position: int) -> None:
        for index in range(reached[rank], position):
            clocks[rank][index] += shift[rank]
        reached[rank] = position

    queues = {rank: iter(found.items()) for rank, found in collectives.items()}
    ready = sorted(pairs)
    while ready:
        rank = ready.pop()
        entry = next(queues[rank], None)
        if entry is None:
            continue
        collective, position = entry
        advance(rank, position)
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


def _collectives(pair: StepPair) -> dict[_Collective, int]:
    """A rank's collectives in order, each with the position of its first output."""
    found: dict[_Collective, int] = {}
    for position in range(len(pair)):
        site = pair.site(position)
        if site.phase is Phase.COMM and not is_argument(site):
            found.setdefault((site.root, site.path, site.occurrence), position)
    return found
