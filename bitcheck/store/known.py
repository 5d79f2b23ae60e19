"""What a writer knows of the sites, computations and tensor kinds that its steps have in common, by number.

At level `op` a step has tens of thousands of events, and where a router sends tokens elsewhere nearly every step has
another layout. What a step has of its own are then numbers: one look into a dictionary finds an event's site by its
value, and all that layout, hash and roots need of the site is taken from arrays by that number, of all events at once.

    Known          things of a kind -> their numbers, in the order in which they were met
    KnownSites     ... phase, digests, their order by key, their rows in the file
    KnownGroups    ... digest, parent, whether it is an operation, its row in the file
    KnownTensors   ... digest, row in the file
    KnownKinds     ... size, number of leaves, the KnownTensors of them

Numbers are the writer's own and stand in no file. Where there get to be too many all are forgotten, between two
steps; their rows in the file, too, and what comes again is written again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from bitcheck.digest import DIGEST_BYTES, num_leaves
from bitcheck.events import Group, Kind, Site
from bitcheck.store.layout import (
    PHASE_NUMBER,
    LayoutError,
    TensorKind,
    digest_group,
    digest_key,
    digest_site,
    digest_tensor,
    parents_of,
)

MAX_KNOWN = 131_072
"""Things of a kind that a writer knows between two steps, or twice as many as a step has where that is more."""

_FEW = 16
"""New sites are put among the others one by one where those are so many times as many."""

Thing = TypeVar("Thing", Site, Group, Kind, TensorKind)


class _Numbers(dict[Any, int]):
    """Thing -> its number; what is not there yet gets the next."""

    def __missing__(self, thing: Any) -> int:
        self[thing] = number = len(self)
        return number


class Known(Generic[Thing]):
    """Numbers things, and keeps what is known of each in arrays, at its number."""

    _is_bounded = True

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing any more."""
        self._numbers = _Numbers()
        self._num_described = 0

    def find(self, things: Sequence[Thing]) -> np.ndarray:
        """Return the number of each, int64 [n]; what is new is described."""
        count = len(things)
        if self._is_bounded and self._num_described > max(MAX_KNOWN, 2 * count):
            self.forget()
        numbers = np.fromiter(map(self._numbers.__getitem__, things), np.int64, count)
        if len(self._numbers) > self._num_described:
            first, self._num_described = self._num_described, len(self._numbers)
            try:
                self._describe(first, list(itertools.islice(self._numbers, first, None)))
            except BaseException:  # what is known of some and not of others would be taken for that of others
                self.forget()
                raise
        return numbers

    def _describe(self, first: int, things: list[Thing]) -> None:
        """Take in new things, numbered from `first` on."""
        raise NotImplementedError


class KnownSites(Known[Site]):
    """Sites.

    phases        uint8 [k], index in PHASES
    key_digests   uint8 [k, 16]; digests uint8 [k, 16], of their parts
    ranks         int64 [k], their order by key; the same number where two have one key
    keys          list of k
    rows          int64 [k], in the file's `sites`, -1 where it is not there yet
    """

    def forget(self) -> None:
        """Know nothing any more."""
        super().forget()
        self.phases = np.zeros(0, np.uint8)
        self.key_digests, self.digests = np.zeros((0, DIGEST_BYTES), np.uint8), np.zeros((0, DIGEST_BYTES), np.uint8)
        self.ranks = self.rows = np.zeros(0, np.int64)
        self.keys: list[str] = []
        self._by_key = np.zeros(0, np.int64)
        self._is_again = np.zeros(0, bool)
        """Whether the one before it by key has the same key."""

    def order(self, numbers: np.ndarray) -> np.ndarray:
        """Return the events of a step in the order of their keys, int64 [n]; `numbers` of their sites.

        Raises LayoutError where two have one key.
        """
        ranks = self.ranks[numbers]
        event_of = np.full(len(self.keys), -1, np.int64)
        event_of[ranks] = np.arange(len(numbers))
        events = event_of[event_of >= 0]
        if len(events) != len(numbers):
            is_twice = np.bincount(ranks)[ranks] > 1
            raise LayoutError(f"two events are named {self.keys[numbers[is_twice.argmax()]]}")
        return events

    def _describe(self, first: int, things: list[Site]) -> None:
        new_keys = [site.key for site in things]
        self.phases = np.append(self.phases, np.array([PHASE_NUMBER[site.phase] for site in things], np.uint8))
        self.key_digests = _with_digests(self.key_digests, map(digest_key, new_keys))
        self.digests = _with_digests(self.digests, map(digest_site, things))
        self.rows = np.append(self.rows, np.full(len(things), -1, np.int64))
        self.keys += new_keys
        self._put_in_order(first)

    def _put_in_order(self, first: int) -> None:
        """Give the sites numbered from `first` on their places among the others."""
        keys, key_of = self.keys, self.keys.__getitem__
        if (len(keys) - first) * _FEW > first:  # so many that they are sorted again, all together
            first = 0
        known = self._by_key if first else self._by_key[:0]
        new = sorted(range(first, len(keys)), key=key_of)
        places = [bisect_right(known, keys[number], key=key_of) for number in new] if first else [0] * len(new)
        is_again: list[bool] = []
        last_place, before = -1, None
        for number, place in zip(new, places, strict=True):
            if place != last_place:
                last_place, before = place, keys[known[place - 1]] if place else None
            is_again.append(keys[number] == before)
            before = keys[number]
        self._by_key = np.insert(known, places, new)
        self._is_again = np.append(self._is_again[:first], np.zeros(len(new), bool))
        self._is_again[new] = is_again
        self.ranks = np.empty(len(keys), np.int64)
        self.ranks[self._by_key] = np.cumsum(~self._is_again[self._by_key]) - 1


class KnownGroups(Known[Group]):
    """Computations.

    parents   int64 [k], as `layout.parents_of` gives them; is_op bool [k]
    digests   uint8 [k, 16]
    rows      int64 [k], in the file's `groups`, -1 where it is not there yet
    """

    def forget(self) -> None:
        """Know nothing any more."""
        super().forget()
        self.parents = self.rows = np.zeros(0, np.int64)
        self.is_op = np.zeros(0, bool)
        self.digests = np.zeros((0, DIGEST_BYTES), np.uint8)

    def _describe(self, first: int, things: list[Group]) -> None:
        self.parents = np.append(self.parents, parents_of(things))
        self.is_op = np.append(self.is_op, np.array([group.kind == "op" for group in things], bool))
        self.digests = _with_digests(self.digests, map(digest_group, things))
        self.rows = np.append(self.rows, np.full(len(things), -1, np.int64))


class KnownTensors(Known[TensorKind]):
    """What a meta holds of an event.

    tensors   list of k
    digests   uint8 [k, 16]
    rows      int64 [k], in the file's `tensors`, -1 where it is not there yet
    """

    _is_bounded = False  # it is forgotten with the kinds that they are made of

    def forget(self) -> None:
        """Know nothing any more."""
        super().forget()
        self.tensors: list[TensorKind] = []
        self.digests = np.zeros((0, DIGEST_BYTES), np.uint8)
        self.rows = np.zeros(0, np.int64)

    def _describe(self, first: int, things: list[TensorKind]) -> None:
        self.tensors += things
        self.digests = _with_digests(self.digests, map(digest_tensor, things))
        self.rows = np.append(self.rows, np.full(len(things), -1, np.int64))


class KnownKinds(Known[Kind]):
    """Dtypes, shapes and sizes.

    kinds        list of k
    sizes        int64 [k], -1 where it is out of any range
    num_leaves   int64 [k], of all its leaves
    tensors      the TensorKinds made of them
    """

    def forget(self) -> None:
        """Know nothing any more."""
        super().forget()
        self.kinds: list[Kind] = []
        self.sizes = self.num_leaves = np.zeros(0, np.int64)
        self.tensors = KnownTensors()
        self._tensor_of = np.zeros(0, np.int64)
        """Code of a kind, of whether there is a value and of whether there are leaves -> number in `tensors`, or -1."""

    def find_tensors(
        self, numbers: np.ndarray, has_value: np.ndarray, has_leaves: np.ndarray, placements: dict[int, str]
    ) -> np.ndarray:
        """Return the numbers in `tensors` of a step's events, int64 [n]: of the kind `numbers`, both others bool [n].

        `placements`: of the events that have one.
        """
        codes = numbers * 4 + has_value * 2 + has_leaves
        new = np.flatnonzero(np.bincount(codes[self._tensor_of[codes] < 0])).tolist()
        placed = list(placements)
        told = [self._tell(code, "") for code in new]
        told += [
            self._tell(code, placements[event]) for event, code in zip(placed, codes[placed].tolist(), strict=True)
        ]
        try:
            found = self.tensors.find(told)
        except BaseException:  # `tensors` has forgotten what it knew, and other numbers will come
            self.forget()
            raise
        self._tensor_of[new] = found[: len(new)]
        tensors: np.ndarray = self._tensor_of[codes]
        tensors[placed] = found[len(new) :]
        return tensors

    def _tell(self, code: int, placement: str) -> TensorKind:
        dtype, shape, size = self.kinds[code // 4]
        kept = int(self.num_leaves[code // 4]) if code % 2 else 0
        return TensorKind(dtype, tuple(shape), size, kept, code & 2 != 0, placement)

    def _describe(self, first: int, things: list[Kind]) -> None:
        self.kinds += things
        sizes = [size if 0 <= size < 2**63 else -1 for _, _, size in things]
        self.sizes = np.append(self.sizes, np.array(sizes, np.int64))
        self.num_leaves = np.append(self.num_leaves, np.array(list(map(num_leaves, sizes)), np.int64))
        self._tensor_of = np.append(self._tensor_of, np.full(4 * len(things), -1, np.int64))


def write_new(rows: np.ndarray, numbers: np.ndarray, write: Callable[[int], int]) -> np.ndarray:
    """Return the rows in the file of `numbers`, int64 [n]; those that are not there yet are written, first come first.

    `write` is called with a position in `numbers` and gives the row; `rows` are what is known, and learn of it.
    """
    for position in np.flatnonzero(rows[numbers] < 0).tolist():
        number = numbers[position]
        if rows[number] < 0:
            rows[number] = write(position)
    found: np.ndarray = rows[numbers]
    return found


def _with_digests(known: np.ndarray, new: Iterable[bytes]) -> np.ndarray:
    """Return digests, uint8 [k, 16], with new ones after them."""
    return np.concatenate([known, np.frombuffer(b"".join(new), np.uint8).reshape(-1, DIGEST_BYTES)])
