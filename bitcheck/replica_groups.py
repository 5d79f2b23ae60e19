"""Which tensors of a run are copies over which ranks: as the recorder noted, and as the user says.

    --group 0-3                 parameters, gradients, buffers and optimizer state of ranks 0 to 3
    --group 0,2:head.*          the same of whatever is named head.*
    --group 0-7:extra/*         every tracked tensor; a pattern with a slash is held against the whole site

A tensor's placement in a rank's file (`bitcheck.placements`) names the ranks that hold the same bits. What
DistributedDataParallel manages bears one too; a tensor that is cut over all ranks of its mesh has no copy.

Place in the flow: store -> *replica_groups* -> replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bitcheck.errors import UsageError
from bitcheck.events import PHASES, Phase, Site, qualified_name
from bitcheck.placements import parse_placement
from bitcheck.rank_sets import parse_rank_set
from bitcheck.store import Layout, Meta

REPLICATED_PHASES = (Phase.GRAD, Phase.PARAM, Phase.BUFFER, Phase.OPTIM)
"""What data parallelism holds equal, in the order in which a step makes it."""
DDP = "DistributedDataParallel"
DTENSOR = "DTensor"
_COLUMN = {phase: number for number, phase in enumerate(PHASES)}
_MAX_SELECTIONS = 256


class GroupKey(NamedTuple):
    """Names a group of ranks that hold copies."""

    by: str
    """DDP, DTENSOR, or what the user wrote."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UserGroup:
    """Copies that the user declares."""

    text: str
    ranks: tuple[int, ...]
    pattern: str

    def covers(self, site: Site) -> bool:
        """Say whether a site belongs to it."""
        if "/" not in self.pattern and site.phase not in REPLICATED_PHASES:
            return False
        return matches(site, self.pattern)


def parse_group(text: str, world_size: int) -> UserGroup:
    """Return the group that `RANKS` or `RANKS:PATTERN` says. Raises UsageError."""
    ranks, _, pattern = text.partition(":")
    # A span may have a stride, which is a number after a colon: 0-24:8 or 0-24:8:head.*
    stride, _, rest = pattern.partition(":")
    last, comma, more = stride.partition(",")
    if last.isdigit() and "-" in ranks.rpartition(",")[2] and (not comma or more[:1].isdigit()):
        ranks, pattern = f"{ranks}:{stride}", rest
    try:
        members = parse_rank_set(ranks, world_size)
    except ValueError as error:
        raise UsageError(f"--group {text}: {error}; expected RANKS or RANKS:PATTERN, as 0-3 or 0,2:head.*") from None
    if len(members) < 2:
        raise UsageError(f"--group {text}: one rank has nothing to agree with; expected two or more")
    return UserGroup(text, members, pattern or "*")


def matches(site: Site, pattern: str) -> bool:
    """Say whether a pattern names a site: by its whole text where it holds a slash, else by its tensor's name."""
    if "/" in pattern:
        return any(fnmatchcase(site.text(with_root), pattern) for with_root in (False, True))
    return any(fnmatchcase(qualified_name(site.root, site.path, with_root), pattern) for with_root in (False, True))


class Selection(NamedTuple):
    """The events of a step that one group's copies are."""

    columns: tuple[int, ...]
    """Phases that count in the group, as columns of `phase_roots`."""
    events: tuple[np.ndarray, ...]
    """For each column, indices of events in the order in which a root is taken over them."""
    is_whole: tuple[bool, ...]
    """For each column, whether these are all events of the phase, so that the phase's root serves."""

    @property
    def num_events(self) -> int:
        """How many events."""
        return sum(map(len, self.events))


class Selector:
    """Finds the groups of a rank's steps, and the events of each."""

    def __init__(self, declared: bool, groups: Sequence[UserGroup], exceptions: Sequence[str]) -> None:
        self._has_declared = declared
        self._groups = tuple(groups)
        self._exceptions = tuple(exceptions)
        self._known: OrderedDict[tuple[bytes, bytes, tuple[int, ...]], dict[GroupKey, Selection]] = OrderedDict()
        self.ignored: dict[GroupKey, set[str]] = {}
        """Keys of sites that turned out to be nobody's copies."""
        self.undeclared: set[str] = set()
        """Parameters of which nobody says where they lie, as far as any group was found beside them."""
        self.has_shards = False
        """Whether any tensor was seen that is cut over all ranks of its mesh."""

    def forget(self) -> None:
        """Look again: `ignored` has changed."""
        self._known.clear()

    def select(self, rank: int, layout: Layout, meta: Meta) -> dict[GroupKey, Selection]:
        """Return the groups that a step of `rank` belongs to, with the events of each."""
        own = tuple(number for number, group in enumerate(self._groups) if rank in group.ranks)
        key = (layout.hash, meta.hash, own)
        found = self._known.get(key)
        if found is None or not all(rank in group.ranks for group in found):
            found = self._select(rank, layout, meta, [self._groups[number] for number in own])
            self._known[key] = found
            if len(self._known) > _MAX_SELECTIONS:
                self._known.popitem(last=False)
        return found

    def _select(self, rank: int, layout: Layout, meta: Meta, groups: Sequence[UserGroup]) -> dict[GroupKey, Selection]:
        chosen: dict[GroupKey, np.ndarray] = {}

        def choose(key: GroupKey, event: int) -> None:
            if key not in chosen:
                chosen[key] = np.zeros(len(layout.sites), bool)
            chosen[key][event] = True

        for event, placement in enumerate(meta.placements if self._has_declared else ()):
            site = layout.sites[event]
            if placement and site.phase in REPLICATED_PHASES and self._counts(layout, event):
                by, ranks = _replicas(placement)
                if len(ranks) > 1 and rank in ranks:
                    choose(GroupKey(by, ranks), event)
                elif len(ranks) == 1:
                    self.has_shards = True
        for group in groups:
            key = GroupKey(group.text, group.ranks)
            for event, site in enumerate(layout.sites):
                if group.covers(site) and self._counts(layout, event):
                    choose(key, event)
        if chosen:
            self._note_undeclared(layout, meta, groups)
        user = {group.text for group in groups}
        return {
            key: _order(layout, mask, range(len(PHASES)) if key.by in user else _DECLARED_COLUMNS, self._excluder(key))
            for key, mask in chosen.items()
        }

    def _note_undeclared(self, layout: Layout, meta: Meta, groups: Sequence[UserGroup]) -> None:
        for event, placement in enumerate(meta.placements):
            site = layout.sites[event]
            is_free = site.phase is Phase.PARAM and not placement and self._counts(layout, event)
            if is_free and not any(group.covers(site) for group in groups):
                self.undeclared.add(qualified_name(site.root, site.path, False))

    def _excluder(self, key: GroupKey) -> Callable[[str], bool]:
        ignored = self.ignored.get(key, set())
        return lambda text: text in ignored

    def _counts(self, layout: Layout, event: int) -> bool:
        site = layout.sites[event]
        group = int(layout.group_of[event])
        if group >= 0 and layout.groups[group].kind == "op" and site.phase in REPLICATED_PHASES:
            return False  # what an optimizer's operations read and wrote
        return not any(matches(site, pattern) for pattern in self._exceptions)


_DECLARED_COLUMNS = tuple(_COLUMN[phase] for phase in REPLICATED_PHASES)


def _order(layout: Layout, mask: np.ndarray, columns: Sequence[int], is_ignored: Callable[[str], bool]) -> Selection:
    events, wholes = [], []
    for column in columns:
        covered = layout.order[layout.phase_ptr[column] : layout.phase_ptr[column + 1]]
        own = covered[mask[covered]]
        own = own[[not is_ignored(layout.keys[event]) for event in own.tolist()]] if len(own) else own
        events.append(own)
        wholes.append(len(own) == len(covered) > 0)
    return Selection(tuple(columns), tuple(events), tuple(wholes))


@lru_cache(maxsize=4096)
def _replicas(text: str) -> tuple[str, tuple[int, ...]]:
    placement = parse_placement(text)
    assert placement is not None
    return DDP if placement.is_ddp else DTENSOR, placement.replica_ranks
