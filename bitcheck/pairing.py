"""Two recordings of the same step, event by event: what is equal, what differs, what only one has.

Events are joined by their site, those of operations by their place in the common sequence of
operations (`op_alignment`). The pair has one order, which does not depend on which run comes first,
and one set of edges, the union of both runs', over the positions in that order.

Place in the flow: align -> *pairing* -> attribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from bitcheck.events import Group, Site
from bitcheck.op_alignment import joint_sites
from bitcheck.views import StepView


class Standing(IntEnum):
    """How an event stands in the two runs."""

    EQUAL = 0
    DIFFERS = 1
    BASELINE_ONLY = 2
    CANDIDATE_ONLY = 3


class StepPair:
    """A step of the baseline and the same step of the candidate, one rank, events at positions 0 .. n - 1."""

    def __init__(self, rank: int, baseline: StepView, candidate: StepView) -> None:
        self.rank = rank
        self.baseline = baseline
        self.candidate = candidate
        if _has_same_layout(baseline, candidate):
            whole = np.arange(len(baseline.sites), dtype=np.int64)
            self.baseline_index, self.candidate_index = whole, whole
        else:
            self.baseline_index, self.candidate_index = _merge_orders(*joint_sites(baseline, candidate))
        self._position_of_baseline = _inverse(self.baseline_index, len(baseline.sites))
        self._position_of_candidate = _inverse(self.candidate_index, len(candidate.sites))
        self.standing = self._standings()

    def __len__(self) -> int:
        return len(self.standing)

    def _standings(self) -> npt.NDArray[np.uint8]:
        standing = np.zeros(len(self.baseline_index), np.uint8)
        standing[self.candidate_index < 0] = Standing.BASELINE_ONLY
        standing[self.baseline_index < 0] = Standing.CANDIDATE_ONLY
        shared = np.flatnonzero(standing == Standing.EQUAL)
        ours = np.asarray(self.baseline.digests)[self.baseline_index[shared]]
        theirs = np.asarray(self.candidate.digests)[self.candidate_index[shared]]
        differs = (ours != theirs).any(axis=1)
        differs &= ours.any(axis=1) & theirs.any(axis=1)  # of what is UNREAD in either run nothing can be said
        standing[shared[differs]] = Standing.DIFFERS
        return standing

    def ignore(self, unwanted: Callable[[Site, int], bool]) -> list[Site]:
        """Take events that part for equal where `unwanted(site, position)`; return their sites."""
        dropped = []
        for position in self.parted():
            site = self.site(position)
            if unwanted(site, position):
                self.standing[position] = Standing.EQUAL
                dropped.append(site)
        return dropped

    def parted(self) -> list[int]:
        """Positions of everything that differs or is missing, in order."""
        positions: list[int] = np.flatnonzero(self.standing).tolist()
        return positions

    def is_missing(self, position: int) -> bool:
        """Whether only one of the runs has the event."""
        return int(self.standing[position]) >= Standing.BASELINE_ONLY

    def holder(self, position: int) -> tuple[StepView, int]:
        """Return a step that has the event, the baseline's where both do, and its index there."""
        index = int(self.baseline_index[position])
        if index >= 0:
            return self.baseline, index
        return self.candidate, int(self.candidate_index[position])

    def position_of(self, step: StepView, index: int) -> int:
        """Return the position of an event of one of the two steps."""
        positions = self._position_of_baseline if step is self.baseline else self._position_of_candidate
        return int(positions[index])

    def site(self, position: int) -> Site:
        """Return the event's site."""
        step, index = self.holder(position)
        return step.sites[index]

    def group(self, position: int) -> Group | None:
        """Return the computation that made the event, None for observed state."""
        step, index = self.holder(position)
        number = int(step.group_of[index])
        return step.groups[number] if number >= 0 else None

    def group_key(self, position: int) -> tuple[bool, int] | None:
        """Return what identifies the computation within this pair: (is it the candidate's, index)."""
        step, index = self.holder(position)
        number = int(step.group_of[index])
        return (step is not self.baseline, number) if number >= 0 else None

    def ancestors(self, key: tuple[bool, int]) -> list[tuple[bool, int]]:
        """Return the enclosing calls of a computation, innermost first."""
        groups = (self.candidate if key[0] else self.baseline).groups
        chain: list[tuple[bool, int]] = []
        number = groups[key[1]].parent
        while number >= 0 and len(chain) < len(groups):
            chain.append((key[0], number))
            number = groups[number].parent
        return chain

    def inputs(self, position: int) -> list[int]:
        """Return the positions of everything the event was computed from, in either run."""
        found: set[int] = set()
        for step, indices, positions in (
            (self.baseline, self.baseline_index, self._position_of_baseline),
            (self.candidate, self.candidate_index, self._position_of_candidate),
        ):
            index = int(indices[position])
            if index >= 0:
                edges = step.inputs[int(step.input_ptr[index]) : int(step.input_ptr[index + 1])]
                found.update(positions[np.asarray(edges, np.int64)].tolist())
        found.discard(position)
        return sorted(found)


def _has_same_layout(baseline: StepView, candidate: StepView) -> bool:
    """Whether the same events come in the same order; with other shapes they may be other operations."""
    if baseline.sites is not candidate.sites and list(baseline.sites) != list(candidate.sites):
        return False
    return baseline.shapes is candidate.shapes or list(baseline.shapes) == list(candidate.shapes)


def _inverse(indices: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    inverse = np.full(length, -1, np.int64)
    present = np.flatnonzero(indices >= 0)
    inverse[indices[present]] = present
    return inverse


def _keys(sites: Sequence[Site]) -> list[tuple[Site, int]]:
    """Sites made unique: a site that comes twice is joined in order."""
    seen: dict[Site, int] = {}
    keys = []
    for site in sites:
        count = seen.get(site, 0)
        seen[site] = count + 1
        keys.append((site, count))
    return keys


def _merge_orders(
    baseline: Sequence[Site], candidate: Sequence[Site]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return indices (baseline, candidate) in one common order, -1 where a run lacks the event.

    Both runs' orders are walked side by side. An event that only one run has comes as soon as it is
    met; where both have the next event but not the same one, the smaller site goes first. Nothing
    here tells the runs apart, so swapping them swaps the two columns and changes nothing else.
    """
    ours, theirs = _keys(baseline), _keys(candidate)
    place_in_theirs = {key: index for index, key in enumerate(theirs)}
    place_in_ours = {key: index for index, key in enumerate(ours)}
    rows: list[tuple[int, int]] = []
    emitted: set[tuple[Site, int]] = set()
    i = j = 0
    while i < len(ours) or j < len(theirs):
        if i < len(ours) and ours[i] in emitted:
            i += 1
            continue
        if j < len(theirs) and theirs[j] in emitted:
            j += 1
            continue
        heads = [key for key, has in ((ours[i : i + 1], i < len(ours)), (theirs[j : j + 1], j < len(theirs))) if has]
        alone = [key[0] for key in heads if key[0] not in place_in_theirs or key[0] not in place_in_ours]
        key = min(alone or [key[0] for key in heads])
        rows.append((place_in_ours.get(key, -1), place_in_theirs.get(key, -1)))
        emitted.add(key)
    columns = np.array(rows, np.int64).reshape(len(rows), 2)
    return columns[:, 0].copy(), columns[:, 1].copy()
