"""A step being recorded, on a stand-in for a device: plain tensors are captured many at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitcheck.errors import DigestError
from bitcheck.events import Kind, Phase, Site, StepKind
from bitcheck.hooks import steps
from bitcheck.hooks.sites import Known, PlaceKey
from bitcheck.hooks.steps import Digesters, StepBuilder
from bitcheck.hooks.tensors import digest_tensor, kind_of


class Device:
    """Digests CPU tensors as a device's digester does its own; all or none of those that are given at once."""

    def __init__(self) -> None:
        self.launches: list[int] = []
        self.unreadable: torch.Tensor | None = None
        self._known: dict[int, tuple[bytes, bytes]] = {}

    def digest(self, tensor: torch.Tensor) -> tuple[bytes, bytes]:
        """Return (digest, leaf digests). Raises DigestError for the tensor that cannot be read."""
        if tensor is self.unreadable:
            raise DigestError("its storage is freed")
        return digest_tensor(tensor)

    def submit_many(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind] | None = None) -> list[int]:
        """Return a ticket for each tensor."""
        assert kinds == [kind_of(tensor) for tensor in tensors]
        found = [self.digest(tensor) for tensor in tensors]
        tickets = [len(self._known) + number for number in range(len(tensors))]
        self._known.update(zip(tickets, found, strict=True))
        self.launches.append(len(tensors))
        return tickets

    def resolve(self, ticket: int) -> tuple[bytes, bytes]:
        """Return (digest, leaf digests), once."""
        found = self._known[ticket]
        self._known[ticket] = b"", b""
        return found

    def resolve_many(self, tickets: Sequence[int]) -> list[tuple[bytes, bytes]]:
        """Return what `resolve` returns, of many."""
        return [self.resolve(ticket) for ticket in tickets]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """What takes the place of a device on which all plain tensors lie."""
    device = Device()
    monkeypatch.setattr(Digesters, "__missing__", lambda self, key: device)
    monkeypatch.setattr(steps, "digest_plain", lambda tensor: None)
    monkeypatch.setattr(steps, "plain_on_device", kind_of)
    monkeypatch.setattr(steps, "digest_tensor", device.digest)
    return device


def record(tensors: list[torch.Tensor]) -> tuple[dict[str, bytes], dict[str, int]]:
    """Return digest by path, and what was missed, of tensors that are recorded together."""
    builder = StepBuilder(0, StepKind.STEP, True, Digesters(lambda num_bytes: True, lambda land: None))
    sites = [Site(Phase.PARAM, "Net", str(number), "value") for number in range(len(tensors))]
    builder.add_tensors(list(zip(sites, tensors, strict=True)))
    step = builder.finish()
    return {site.path: digest for site, digest in zip(step.sites, step.digests, strict=True)}, step.unobserved


def test_tensors_that_are_recorded_together_are_one_launch(device: Device) -> None:
    tensors = [torch.arange(5.0), torch.ones(3, 4).t(), torch.zeros(2, dtype=torch.int64)]
    digests, missed = record(tensors)
    assert digests == {str(number): digest_tensor(tensor)[0] for number, tensor in enumerate(tensors)}
    assert not missed
    assert device.launches == [3]


def test_a_tensor_that_cannot_be_read_is_missed_alone(device: Device) -> None:
    tensors = [torch.arange(5.0), torch.ones(4), torch.zeros(2)]
    device.unreadable = tensors[1]
    digests, missed = record(tensors)
    assert digests == {number: digest_tensor(tensors[int(number)])[0] for number in ("0", "2")}
    assert missed == {"param/1:value: its storage is freed": 1}
    assert not device.launches


# --- many places at once


KEYS: list[PlaceKey] = [(phase, "Net", path, "value") for phase in (Phase.PARAM, Phase.BUFFER) for path in "abcd"]


@settings(deadline=None)
@given(st.lists(st.lists(st.lists(st.sampled_from(KEYS), max_size=6), max_size=4), max_size=4))
def test_sites_of_many_places_are_those_of_one_after_the_other(program: list[list[list[PlaceKey]]]) -> None:
    """`program`: steps of rows of places; a row may have a place twice, and a place may be in several."""
    together, apart = Known(), Known()
    for number, rows in enumerate(program * 2):
        one = StepBuilder(number, StepKind.STEP, True, digesters(), together)
        other = StepBuilder(number, StepKind.STEP, True, digesters(), apart)
        for row in rows:
            expected = [other.next_sites(*key, False).first for key in row]
            assert one.sites_once(row) == expected
            for key in row[:1]:  # and what is counted by itself goes on from there
                assert one.next_sites(*key, False).first == other.next_sites(*key, False).first


def test_a_row_of_the_step_before_is_taken_as_it_is() -> None:
    known = Known()
    first, second = (StepBuilder(number, StepKind.STEP, True, digesters(), known) for number in range(2))
    assert first.sites_once(list(KEYS)) is second.sites_once(list(KEYS))
    assert second.sites_once(list(KEYS)) == [Site(*key, occurrence=1) for key in KEYS]
    assert second.sites_once([]) == []


def test_rows_without_end_are_not_kept() -> None:
    known = Known()
    for number in range(1000):
        builder = StepBuilder(number, StepKind.STEP, True, digesters(), known)
        builder.sites_once([(Phase.PARAM, "Net", f"{number}", "value")])
    assert len(known._rows) <= 64


def digesters() -> Digesters:
    """Return digesters of no device."""
    return Digesters(lambda: None, lambda land: None)
