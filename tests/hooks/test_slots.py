"""Attributes that the compiled half reads and writes where they lie: what Python itself would have read and written."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from bitcheck.events import Phase, Site
from bitcheck.hooks import steps  # gives the compiled half what it needs
from bitcheck.hooks.native import native
from bitcheck.hooks.tensors import digest_plain

pytestmark = pytest.mark.skipif(steps.native is None, reason="the compiled half was not built")

COLUMNS = ("sites", "kinds", "digests", "leaves", "group_of", "inputs")
SITE = Site(Phase.EXTRA, "", "a", "value")
TENSOR = torch.arange(5)


def columns_class(names: tuple[str, ...] = COLUMNS) -> Any:
    """Return a new class of steps' columns, their slots in this order."""
    return type("Columns", (), {"__slots__": names})


def filled(kind: Any) -> Any:
    """Return a step without events."""
    made = kind()
    for name in COLUMNS:
        setattr(made, name, [])
    return made


def add(columns: Any) -> int | None:
    """Add an event by the compiled half."""
    return native.add_plain(columns, SITE, TENSOR, 3, (1, 2))  # type: ignore[union-attr]


def held(columns: Any) -> list[list[Any]]:
    """Return what each column holds."""
    return [list(getattr(columns, name)) for name in COLUMNS]


@functools.cache
def one_event() -> list[list[Any]]:
    """Return what columns hold after one event."""
    kind, digest, leaves = digest_plain(TENSOR) or ((), b"", b"")
    return [[SITE], [kind], [digest], [leaves], [3], [(1, 2)]]


def test_slots_are_read_whatever_their_order() -> None:
    order = list(COLUMNS)
    for seed in range(900):  # more than the table has entries, at addresses that are used again
        random.Random(seed).shuffle(order)
        columns = filled(columns_class(tuple(order)))
        assert add(columns) == 0
        assert held(columns) == one_event()


def test_a_class_that_was_changed_is_asked_again() -> None:
    kind = columns_class()
    columns = filled(kind)
    add(columns)
    slot, elsewhere = kind.sites, [1, 2]
    kind.sites = property(lambda self: elsewhere)
    with pytest.raises(AttributeError):
        columns.sites = []
    add(columns)
    assert elsewhere == [1, 2, SITE]
    kind.sites = slot
    assert columns.sites == [SITE]
    assert add(columns) == 1


def test_a_class_below_may_have_an_attribute_of_its_own() -> None:
    base = columns_class()
    add(filled(base))
    elsewhere: list[Site] = []
    below = type("Below", (base,), {"kinds": property(lambda self: elsewhere, lambda self, value: None)})
    columns = filled(below)
    add(columns)
    assert len(elsewhere) == len(columns.sites) == 1
    plain = type("Plain", (base,), {})  # has a dictionary beside the slots
    assert add(filled(plain)) == 0


def test_a_class_that_answers_for_itself_is_asked() -> None:
    class Answers:
        __slots__ = COLUMNS

        def __getattribute__(self, name: str) -> Any:
            return asked.setdefault(name, []) if name in COLUMNS else object.__getattribute__(self, name)

    asked: dict[str, list[Any]] = {}
    assert add(filled(Answers)) == 0
    assert set(asked) == set(COLUMNS)


@pytest.mark.parametrize("missing", COLUMNS)
def test_a_slot_that_is_empty_is_missing(missing: str) -> None:
    columns = filled(columns_class())
    add(columns)
    delattr(columns, missing)
    with pytest.raises(AttributeError, match=missing):
        add(columns)
