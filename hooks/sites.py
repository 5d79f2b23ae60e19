"""What steps have in common, as the same objects in each: sites, groups, the tuples of what events are computed from.

A step has the sites of the step before, nearly always. To make them anew costs time, to keep two of each costs
more: Python's cyclic garbage collector is set off by how many objects outlive their making, and then looks at them.
"""

from __future__ import annotations

from typing import Any, TypeVar

from bitcheck.events import Group, Phase, Site

_MAX_KNOWN = 131_072
"""Tuples that are used again from step to step; beyond it they are made anew."""
_MAX_MEMBERS = 64
"""Of a tuple that is kept for the next step; few are longer, and those would be much to keep."""
_MAX_EXECUTIONS = 4_096
"""Executions at one place in one step whose sites are kept."""
_MAX_ROWS = 64
"""Rows of sites that are kept for the next step: a few a step."""
PlaceKey = tuple[Phase, str, str, str]
"""(phase, root, path, slot)."""
Shared = TypeVar("Shared", bound=tuple[Any, ...])


class Sites(dict[str, Site]):
    """Slot -> site of one execution of a module or an operator at one place of the program."""

    __slots__ = ("_group", "_node", "first")

    def __init__(self, first: Site) -> None:
        super().__init__()
        self.first = first
        """With the slot that the place has; those of the sites follow it."""
        self._group: Group | None = None
        self._node = ""

    def __missing__(self, slot: str) -> Site:
        own = self.first.slot
        site = self[slot] = self.first._replace(slot=f"{own}.{slot}" if own else slot)
        return site

    def group(self, kind: str, op: str, parent: int, node: str = "") -> Group:
        """Return the computation, at `parent`; `node` is the autograd node that runs it, if one does."""
        group = self._group
        if group is None or group.parent != parent or self._node != node or (not node and group.op != op):
            site = self.first
            self._group = group = Group(kind, site.root, site.path, f"{op} in {node}" if node else op, parent)
            self._node = node
        return group


class Place:
    """Something of the program that runs any number of times in a step."""

    __slots__ = ("_executions", "_first")

    def __init__(self, first: Site) -> None:
        self._first = first
        self._executions: list[Sites] = []

    def execution(self, number: int) -> Sites:
        """Return the sites of one execution, by its number in the step."""
        executions = self._executions
        if number < len(executions):
            return executions[number]
        sites = Sites(self._first._replace(occurrence=number))
        if number == len(executions) < _MAX_EXECUTIONS:
            executions.append(sites)
        return sites


class Row:
    """Places of the program each of which runs once in a step, one after the other."""

    __slots__ = ("counts", "keys", "sites")

    def __init__(self, keys: list[PlaceKey], places: list[Place]) -> None:
        self.keys = keys
        self.sites = [place.execution(0).first for place in places]
        self.counts = dict.fromkeys(places, 1)
        """How often each has run; fewer than `sites` where one is there twice."""


class Known:
    """What the steps of one recorder have in common."""

    __slots__ = ("_places", "_rows", "_values")

    def __init__(self) -> None:
        self._values: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._places = _Places()
        self._rows: dict[tuple[int, PlaceKey], Row] = {}
        """(how many, the first) -> the row of the last step that had such a one."""

    def same(self, value: Shared) -> Shared:
        """Return the object that stood for an equal one before, so that no new one outlives the call."""
        if len(value) > _MAX_MEMBERS:
            return value
        if len(self._values) >= _MAX_KNOWN:
            self._values.clear()
        return self._values.setdefault(value, value)  # type: ignore[return-value]

    def place(self, phase: Phase, root: str, path: str, slot: str, is_eval: bool) -> Place:
        """Return a place of the program."""
        return self._places[phase, root, path, slot, is_eval]

    def row(self, keys: list[PlaceKey]) -> Row:
        """Return places, none of an evaluation, in this order: mostly the row of the step before."""
        like = len(keys), keys[0]
        row = self._rows.get(like)
        if row is None or row.keys != keys:
            if len(self._rows) >= _MAX_ROWS:
                self._rows.clear()
            row = self._rows[like] = Row(keys, [self.place(*key, False) for key in keys])
        return row


class _Places(dict[tuple[Phase, str, str, str, bool], Place]):
    """(phase, root, path, slot, whether it is an evaluation) -> the place."""

    def __missing__(self, key: tuple[Phase, str, str, str, bool]) -> Place:
        phase, root, path, slot, is_eval = key
        place = self[key] = Place(Site(phase, root, path, slot, 0, is_eval))
        return place
