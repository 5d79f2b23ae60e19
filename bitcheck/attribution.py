"""Which differing events of one step are origins, over all ranks: equal inputs, other output.

A step is a graph: events, and edges from each to what it was computed from. An event that differs
while nothing it depends on does is an origin, everything else that differs inherited it. Where a
recording has no edges (level `state`, and observed state at any level), the order of the phases
within a step stands in for them, on the careful side: an event without edges depends on whatever
came before it. Ranks depend on each other through collectives and through the reduced gradients.

Place in the flow: pairing -> *attribution* -> causes.

Long because the graph of one step is one object, whose parts make no sense alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from bitcheck.clocks import logical_clocks
from bitcheck.events import Phase, Site
from bitcheck.pairing import StepPair
from bitcheck.roles import (
    CALLS,
    has_local_gradients,
    is_argument,
    is_generator,
    is_local_gradient,
    is_operation,
    is_result,
    owner_of,
)

OPTIMIZED = (Phase.PARAM, Phase.OPTIM)
_DRAWING = re.compile(
    r"drop|bernoulli|rand|normal|uniform|exponential|poisson|geometric|cauchy|multinomial|binomial|rrelu"
)
"""Operations that draw random numbers; of a device's generator they do not hold the state as an input."""
AFTER_GRADIENTS = (Phase.PARAM, Phase.OPTIM, Phase.BUFFER, Phase.EXTRA)


class Place(NamedTuple):
    """An event: a rank and a position in that rank's pair."""

    rank: int
    position: int


@dataclass(slots=True)
class Blame:
    """One origin: the computation at fault, as the events that show it."""

    shown: Place
    """The event that names it."""
    members: list[Place]
    """All its events that differ on equal inputs, in order; several outputs of one computation, or several ranks."""
    is_structural: bool
    order: tuple[int, int]
    """Happens-before: (logical clock, rank)."""
    enclosing: bool = False
    """Whether the fault is in the functional code of the module that made an argument."""
    inherited_structure: int = 0
    """Events with equal inputs that differ after a structural origin and may follow from it."""

    @property
    def ranks(self) -> list[int]:
        """Ranks on which it was seen."""
        return sorted({place.rank for place in self.members})


@dataclass(slots=True)
class Attribution:
    """What was found in one step."""

    blames: list[Blame] = field(default_factory=list)
    """Origins, earliest first."""
    propagated: int = 0
    """Events that differ and are no origin."""


def attribute_step(pairs: Mapping[int, StepPair]) -> Attribution:
    """Find the origins of one step; `pairs` has every rank in which something differs."""
    return _StepGraph(pairs).attribute()


class _StepGraph:
    """The differing part of one step on all ranks, with its explicit and its implied edges."""

    def __init__(self, pairs: Mapping[int, StepPair]) -> None:
        self.pairs = pairs
        self.parted = {rank: pair.parted() for rank, pair in pairs.items()}
        self.first: dict[int, dict[tuple[Phase, bool], int]] = {}
        """rank -> (phase, is evaluation) -> position of the first event that differs."""
        for rank, positions in self.parted.items():
            first: dict[tuple[Phase, bool], int] = {}
            for position in positions:
                site = pairs[rank].site(position)
                first.setdefault((site.phase, site.is_eval), position)
            self.first[rank] = first

    # ------------------------------------------------------------------ what depends on what

    def _before(self, place: Place, phases: Iterable[Phase], with_eval: bool) -> bool:
        """Whether an event of these phases differs before `place` on its rank."""
        first = self.first[place.rank]
        modes = (False, True) if with_eval else (False,)
        return any(first.get((phase, mode), place.position) < place.position for phase in phases for mode in modes)

    @cached_property
    def _parted_phases(self) -> frozenset[Phase]:
        """Phases of training events that differ on any rank."""
        return frozenset(phase for first in self.first.values() for phase, is_eval in first if not is_eval)

    def _anywhere(self, phases: Iterable[Phase]) -> bool:
        """Whether a training event of these phases differs on any rank."""
        return not self._parted_phases.isdisjoint(phases)

    @cached_property
    def _has_local_gradients(self) -> bool:
        return any(map(has_local_gradients, self.pairs.values()))

    @cached_property
    def _local_gradient_parted(self) -> bool:
        return any(
            is_local_gradient(self.pairs[rank].site(position))
            for rank, positions in self.parted.items()
            for position in positions
        )

    @cached_property
    def _unlike_generators(self) -> set[int]:
        """Ranks on which a generator's state at the start of the step differs."""
        return {
            rank
            for rank, positions in self.parted.items()
            if any(is_generator(self.pairs[rank].site(position)) for position in positions)
        }

    @cached_property
    def _unlike_operations(self) -> set[int]:
        """Ranks on which an operation of the optimizer differs, so that what it left is explained."""
        return {
            rank
            for rank, positions in self.parted.items()
            if any(
                self.pairs[rank].site(position).phase is Phase.OPTIM and is_operation(self.pairs[rank].group(position))
                for position in positions
            )
        }

    @cached_property
    def _parted_contributions(self) -> set[tuple[str, str, int]]:
        """Collectives to which some rank contributed other bits."""
        found = set()
        for rank, positions in self.parted.items():
            for position in positions:
                site = self.pairs[rank].site(position)
                if site.phase is Phase.COMM and is_argument(site):
                    found.add((site.root, site.path, site.occurrence))
        return found

    @cached_property
    def _recomputed_regions(self) -> dict[int, list[tuple[int, str, str]]]:
        """rank -> (position, root, path) of checkpointed regions whose recompute differs."""
        regions: dict[int, list[tuple[int, str, str]]] = {}
        for rank, positions in self.parted.items():
            pair = self.pairs[rank]
            found = regions[rank] = []
            for position in positions:
                if pair.site(position).phase is not Phase.RECOMPUTE:
                    continue
                site, key = pair.site(position), pair.group_key(position)
                found.append((position, site.root, site.path))
                if key is not None:
                    groups = (pair.candidate if key[0] else pair.baseline).groups
                    calls = [groups[number] for _, number in (key, *pair.ancestors(key))]
                    outer = [group for group in calls if group.kind == "recompute"]
                    found.extend((position, group.root, group.path) for group in outer[-1:])
        return regions

    @cached_property
    def _unlike_calls(self) -> dict[int, set[tuple[str, str]]]:
        """rank -> (root, path) of modules whose forward or recompute differs in anything."""
        return {
            rank: {
                site[1:3] for site in map(self.pairs[rank].site, positions) if site.phase in CALLS and not site.is_eval
            }
            for rank, positions in self.parted.items()
        }

    @cached_property
    def _unlike_owners(self) -> dict[int, set[tuple[str, str]]]:
        """rank -> (root, path) of modules of which a parameter differs."""
        return {
            rank: {
                (site.root, owner_of(site.path))
                for site in map(self.pairs[rank].site, positions)
                if site.phase is Phase.PARAM
            }
            for rank, positions in self.parted.items()
        }

    @cached_property
    def _calls(self) -> dict[int, dict[tuple[str, str], list[int]]]:
        """rank -> (root, path) of a module -> its arguments and outputs in this step."""
        calls: dict[int, dict[tuple[str, str], list[int]]] = {}
        for rank, pair in self.pairs.items():
            found = calls[rank] = {}
            for position in range(len(pair)):
                site = pair.site(position)
                if site.phase in CALLS:
                    found.setdefault((site.root, site.path), []).append(position)
        return calls

    def _inherits(self, place: Place) -> bool:
        """Whether something that the event depends on differs."""
        pair = self.pairs[place.rank]
        site = pair.site(place.position)
        if site.phase is not Phase.RNG and place.rank in self._unlike_generators:
            return True
        inputs = pair.inputs(place.position)
        if any(pair.standing[position] for position in inputs):
            return True
        if is_operation(pair.group(place.position)):
            return self._operation(place, site, inputs)
        return self._implied[site.phase](self, place, site, inputs)

    def _rng(self, place: Place, site: Site, inputs: list[int]) -> bool:
        return False

    def _operation(self, place: Place, site: Site, inputs: list[int]) -> bool:
        """All that an operation depends on is among its edges, but for what goes on below the dispatcher.

        The gradients that an operation reads after the backward pass may have come through a
        reduction over ranks that is not dispatched, and what one reads in the backward pass of a
        module was kept by its forward, in an order that code chose.
        """
        if site.phase is Phase.BATCH:
            return self._batch(place, site, inputs)
        is_read = not is_result(site, self.pairs[place.rank].group(place.position))
        if is_read and site.phase is Phase.GRAD:
            return self._grad(place, site, inputs)
        if is_read and site.phase is Phase.BACKWARD and site[1:3] in self._unlike_calls[place.rank]:
            return True
        return self._observed(place, site, inputs)

    def _observed(self, place: Place, site: Site, inputs: list[int]) -> bool:
        """Without edges: whatever came before. With edges: they have been asked."""
        return not inputs and self._before(place, set(Phase) - {Phase.RNG}, site.is_eval)

    def _batch(self, place: Place, site: Site, inputs: list[int]) -> bool:
        return self._before(place, set(Phase) - {Phase.BATCH, Phase.RNG}, site.is_eval)

    def _backward(self, place: Place, site: Site, inputs: list[int]) -> bool:
        pair = self.pairs[place.rank]
        if any(
            position < place.position and _is_within(site.root, site.path, root, path)
            for position, root, path in self._recomputed_regions[place.rank]
        ):
            return True
        if not any(pair.site(position).phase is Phase.BACKWARD for position in inputs) and self._before(
            place, (Phase.LOSS,), site.is_eval
        ):
            return True
        return self._observed(place, site, inputs)

    def _comm(self, place: Place, site: Site, inputs: list[int]) -> bool:
        if is_argument(site):
            return self._observed(place, site, inputs)
        return (site.root, site.path, site.occurrence) in self._parted_contributions

    def _grad(self, place: Place, site: Site, inputs: list[int]) -> bool:
        if self._has_local_gradients:
            return self._local_gradient_parted or self._before(place, (Phase.COMM,), False)
        earlier = (Phase.RNG, Phase.BATCH, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD, Phase.COMM)
        return self._anywhere(earlier) or self._before(place, (Phase.GRAD, Phase.SCALAR), False)

    def _scalar(self, place: Place, site: Site, inputs: list[int]) -> bool:
        return self._before(place, set(Phase) - {Phase.SCALAR}, True)

    def _optimized(self, place: Place, site: Site, inputs: list[int]) -> bool:
        if place.rank in self._unlike_operations:
            return True
        return self._anywhere(set(Phase) - set(AFTER_GRADIENTS))

    def _buffer(self, place: Place, site: Site, inputs: list[int]) -> bool:
        """Its module's forward writes it, or whoever derives it from the new parameters: weights cast to FP8, say."""
        pair = self.pairs[place.rank]
        owner = owner_of(site.path)
        calls = self._calls[place.rank].get((site.root, owner))
        if calls:
            return (
                any(pair.standing[position] for position in calls)
                or self._before(place, (Phase.COMM,), True)
                or (site.root, owner) in self._unlike_owners[place.rank]
            )
        return self._before(place, set(Phase) - {Phase.BUFFER, Phase.EXTRA}, True)

    def _extra(self, place: Place, site: Site, inputs: list[int]) -> bool:
        return self._before(place, set(Phase) - {Phase.EXTRA}, True)

    _implied: Mapping[Phase, Callable[[_StepGraph, Place, Site, list[int]], bool]] = {
        Phase.RNG: _rng,
        Phase.BATCH: _batch,
        Phase.FORWARD: _observed,
        Phase.RECOMPUTE: _observed,
        Phase.LOSS: _observed,
        Phase.BACKWARD: _backward,
        Phase.GRAD: _grad,
        Phase.COMM: _comm,
        Phase.PARAM: _optimized,
        Phase.OPTIM: _optimized,
        Phase.BUFFER: _buffer,
        Phase.SCALAR: _scalar,
        Phase.EXTRA: _extra,
    }

    # ------------------------------------------------------------------ from events to computations

    def attribute(self) -> Attribution:
        """Return the origins, earliest first, and how many other events differ."""
        total = sum(map(len, self.parted.values()))
        origins = [
            Place(rank, position)
            for rank, positions in self.parted.items()
            for position in positions
            if not self._inherits(Place(rank, position))
        ]
        if not origins:
            # Orders that disagree between the runs can close a circle of edges: the first event stands for it.
            origins = [Place(rank, positions[0]) for rank, positions in self.parted.items() if positions][:1]
        clocks = logical_clocks({place.rank: self.pairs[place.rank] for place in origins})
        order = {place: (clocks[place.rank][place.position], place.rank) for place in origins}
        computations: dict[tuple[object, ...], list[Place]] = {}
        for place in sorted(origins, key=order.__getitem__):
            computations.setdefault(self._computation(place), []).append(place)
        blames = [self._blame(members, order[members[0]]) for members in computations.values()]
        blames = self._without_containers(blames)
        blames.sort(key=lambda blame: blame.order)
        blames = self._settle_structure(blames)
        return Attribution(blames, total - sum(len(blame.members) for blame in blames))

    def _computation(self, place: Place) -> tuple[object, ...]:
        """What makes several events one origin."""
        pair = self.pairs[place.rank]
        site = pair.site(place.position)
        if pair.is_missing(place.position):
            return ("structure",)
        if site.phase is Phase.COMM and not is_argument(site):
            return ("collective", site.root, site.path, site.occurrence)
        if site.phase is Phase.BATCH:
            return (Phase.BATCH, place.rank)
        key = pair.group_key(place.position)
        group = pair.group(place.position)
        if key is not None and is_operation(group):
            if is_result(site, group):
                return ("group", place.rank, *key)
            # Arguments that code in a module chose otherwise (another order of slices) are one fault of that code.
            return ("arguments", place.rank, site.phase, site.root, site.path, site.is_eval)
        if site.phase in (Phase.GRAD, Phase.SCALAR):
            return (site.phase,)
        if key is not None:
            return ("group", place.rank, *key)
        if site.phase in OPTIMIZED:
            return ("optimizer", place.rank)
        if site.phase is Phase.BUFFER:
            has_calls = bool(self._calls[place.rank])
            return ("buffer", place.rank, site.root, owner_of(site.path)) if has_calls else ("buffer", place.rank)
        if site.phase in (Phase.RNG, Phase.EXTRA):
            return (site.phase, place.rank)
        return ("event", place.rank, place.position)

    def _blame(self, members: list[Place], order: tuple[int, int]) -> Blame:
        first = members[0]
        pair = self.pairs[first.rank]
        site = pair.site(first.position)
        structural = pair.is_missing(first.position)
        blame = Blame(first, members, structural, order)
        if site.phase not in CALLS or not is_argument(site):
            return blame
        if structural:
            blame.shown = self._output_of_call(first, site) or first
            return blame
        blame.enclosing = pair.group_key(first.position) is not None
        for position in self.parted[first.rank] if blame.enclosing else ():  # the program itself gives nothing
            other = pair.site(position)
            if pair.group_key(position) == pair.group_key(first.position) and not is_argument(other):
                blame.shown = Place(first.rank, position)
                break
        return blame

    def _output_of_call(self, place: Place, site: Site) -> Place | None:
        """The output of a call that only one run made, given an argument of it."""
        pair = self.pairs[place.rank]
        for position in self.parted[place.rank]:
            other = pair.site(position)
            same_call = other[:3] == site[:3] and other[4:] == site[4:]
            if same_call and pair.is_missing(position) and not is_argument(other):
                return Place(place.rank, position)
        return None

    def _without_containers(self, blames: list[Blame]) -> list[Blame]:
        """Leave out calls around a call that is itself an origin: their outputs only pass it on."""
        inner: set[tuple[int, bool, int]] = set()
        for blame in blames:
            for place in blame.members:
                pair = self.pairs[place.rank]
                key = pair.group_key(place.position)
                if key is not None:
                    inner.update((place.rank, *ancestor) for ancestor in pair.ancestors(key))
        kept = []
        for blame in blames:
            place = blame.members[0]
            key = self.pairs[place.rank].group_key(place.position)
            if blame.enclosing or blame.is_structural or key is None or (place.rank, *key) not in inner:
                kept.append(blame)
        return kept

    def _settle_structure(self, blames: list[Blame]) -> list[Blame]:
        """Decide between a site that one run lacks and values that differ: the earlier one wins.

        A call more or less changes what follows in ways that no edge shows (it may draw random
        numbers), and a value that differs may change which calls follow (a branch on it). An
        operation's edges show all that it reads: one that gives other bits after a change of
        structure, from equal ones, is an origin of its own. So is a batch of the training where the change is
        an evaluation's: the generators are read again after it.
        """
        if not blames:
            return blames
        if not blames[0].is_structural:
            return [blame for blame in blames if not blame.is_structural]
        is_eval = self._site(blames[0]).is_eval
        kept = [blames[0]]
        for blame in blames[1:]:
            site = self._site(blame)
            enters = is_eval and not site.is_eval and site.phase is Phase.BATCH and not blame.is_structural
            if enters or self._stands_alone(blame):
                kept.append(blame)
        blames[0].inherited_structure = len(blames) - len(kept)
        return kept

    def _site(self, blame: Blame) -> Site:
        return self.pairs[blame.shown.rank].site(blame.shown.position)

    def _stands_alone(self, blame: Blame) -> bool:
        """Whether edges show everything that the event depends on: an operation wrote it, and drew nothing unseen."""
        pair = self.pairs[blame.shown.rank]
        group, site = pair.group(blame.shown.position), pair.site(blame.shown.position)
        if blame.is_structural or group is None or not is_operation(group) or not is_result(site, group):
            return False
        inputs = pair.inputs(blame.shown.position)
        draws = _DRAWING.search(group.op) is not None
        return bool(inputs) and (not draws or any(pair.site(at).phase is Phase.RNG for at in inputs))


def _is_within(root: str, path: str, region_root: str, region_path: str) -> bool:
    if root != region_root:
        return False
    return not region_path or path == region_path or path.startswith(region_path + ".")
