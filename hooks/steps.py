"""A step while it is being recorded: tensors become events here.

On the CPU a digest is taken at once. On another device it is a ticket, taken in stream order and
resolved by the writer's thread (`finish`), so that the training thread never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from bitcheck.digest import digest_bytes
from bitcheck.errors import DigestError
from bitcheck.events import Event, Group, Phase, Site, StepKind, StepRecord
from bitcheck.hooks.tensors import (
    PlainValue,
    digest_plain,
    digest_tensor,
    digest_value,
    dtype_name,
    python_value_parts,
    tensor_parts,
)

if TYPE_CHECKING:
    from bitcheck.hooks.device_digest import Digester, Ticket


class Call:
    """One call of a module: what went in and came out, as indices into the step's events."""

    __slots__ = ("children", "first_node", "group", "inputs", "is_eval", "last_node", "occurrence", "outputs", "parent",
                 "path", "phase", "root", "thread")  # fmt: skip

    def __init__(self, phase: Phase, root: str, path: str, is_eval: bool, parent: Call | None) -> None:
        self.phase = phase
        self.root = root
        self.path = path
        self.is_eval = is_eval
        self.parent = parent
        self.occurrence = 0
        self.group = -1
        self.inputs: list[int] = []
        self.children: list[int] = []
        """Outputs of the calls that finished within this one."""
        self.outputs: list[int] = []
        self.first_node = self.last_node = 0
        """The range of autograd sequence numbers that its thread drew while it ran."""
        self.thread = 0

    def known(self) -> list[int]:
        """Return everything observed of what it computed from and to."""
        return [*self.inputs, *self.children, *self.outputs]


class StepBuilder:
    """Collects the events of one step on one rank."""

    def __init__(self, step: int, kind: StepKind, is_kept: bool, digesters: dict[torch.device, Digester]) -> None:
        self.record = StepRecord(step, kind)
        self.is_kept = is_kept
        """A step outside `--steps` and `--every` only counts."""
        self.has_rng = False
        self.has_training_forward = False
        self.is_after_backward = False
        """Between a backward and the next forward: whatever runs now works on gradients."""
        self.writers: Callable[[torch.Tensor], list[int]] | None = None
        """At level `op`: in which events the operations are that last wrote a tensor's memory."""
        self.top = Call(Phase.FORWARD, "", "", False, None)
        """Stands for the program itself: holds what the outermost calls took and gave."""
        self.calls: list[Call] = []
        """Module calls in the order in which they began."""
        self.losses: list[int] = []
        self.recomputed: dict[tuple[str, str], list[int]] = {}
        """Events of recomputed calls, by module."""
        self._digesters = digesters
        self._counts: dict[tuple[Phase, str, str, str, bool], int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._remembered: dict[int, tuple[weakref.ref[torch.Tensor], int, list[int]]] = {}

    def remember(self, tensor: torch.Tensor, events: list[int]) -> None:
        """Note under which events a tensor was last recorded."""
        self._remembered[id(tensor)] = (weakref.ref(tensor), _version(tensor), events)

    def recorded(self, tensor: torch.Tensor) -> list[int]:
        """Return the events under which this very tensor was last recorded, [] if it was not.

        Its bits may have changed since: the event that is made of it now then differs from them.
        """
        held = self._remembered.get(id(tensor))
        return held[2] if held is not None and held[0]() is tensor else []

    def add_again(self, site: Site, tensor: torch.Tensor, group: int, inputs: Iterable[int]) -> list[int]:
        """Record a tensor that may have been recorded before in this step.

        On the CPU it is digested once more, so that a change which no version counter shows is seen.
        On a device, where that costs memory bandwidth, a tensor of the same version keeps its digest.
        """
        held = self._remembered.get(id(tensor))
        if tensor.is_cpu or held is None or held[0]() is not tensor or held[1] != _version(tensor) or len(held[2]) != 1:
            return self.add_tensor(site, tensor, group, inputs)
        known = self.record.events[held[2][0]]
        index = len(self.record.events)
        event = Event(site, known.dtype, known.shape, known.num_bytes, known.digest, known.leaves, group, tuple(inputs))
        self.record.events.append(event)
        ticket = self._tickets.get(held[2][0])
        if ticket is not None:
            self._tickets[index] = ticket
        return [index]

    @property
    def step(self) -> int:
        """The step's number."""
        return self.record.step

    def count(self, phase: Phase, root: str, path: str, slot: str, is_eval: bool) -> int:
        """Return how many times this was asked for before: the occurrence of what is recorded next."""
        key = (phase, root, path, slot, is_eval)
        occurrence = self._counts.get(key, 0)
        self._counts[key] = occurrence + 1
        return occurrence

    def add_group(self, kind: str, root: str, path: str, op: str, parent: int = -1) -> int:
        """Open a computation and return its number."""
        self.record.groups.append(Group(kind, root, path, op, parent))
        return len(self.record.groups) - 1

    def miss(self, sentence: str, count: int = 1) -> None:
        """Note something that could not be observed."""
        unobserved = self.record.unobserved
        unobserved[sentence] = unobserved.get(sentence, 0) + count

    def add_tensor(self, site: Site, tensor: torch.Tensor, group: int = -1, inputs: Iterable[int] = ()) -> list[int]:
        """Record a tensor as it is now; return its events, one for each part that it is stored in."""
        return self.add_tensors([(site, tensor)], group, inputs)

    def add_tensors(
        self,
        tensors: Sequence[tuple[Site, torch.Tensor]],
        group: int = -1,
        inputs: Iterable[int] = (),
    ) -> list[int]:
        """Record many tensors at once, which is one launch on a device."""
        if not self.is_kept:
            return []
        events = self.record.events
        added: list[int] = []
        given = tuple(inputs)
        waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for site, tensor in tensors:
            try:
                if self.writers is not None and (wrote := self.writers(tensor)):
                    sources = tuple(dict.fromkeys((*given, *wrote)))
                else:
                    sources = given
                plain = digest_plain(tensor)
                if plain is not None:
                    dtype, (digest, leaves) = plain
                    added.append(len(events))
                    shape = tuple(tensor.shape)
                    events.append(Event(site, dtype, shape, tensor.nbytes, digest, leaves, group, sources))
                    continue
                for suffix, part in tensor_parts(tensor):
                    own = site._replace(slot=site.slot + suffix) if suffix else site
                    index = len(events)
                    if part.is_cpu:
                        digest, leaves = digest_tensor(part)
                    else:
                        self._digester(part.device).check(part)
                        digest, leaves = b"", b""
                        waiting.setdefault(part.device, []).append((index, part))
                    events.append(
                        Event(own, dtype_name(part), tuple(part.shape), part.nbytes, digest, leaves, group, sources)
                    )
                    added.append(index)
            except DigestError as error:
                self.miss(f"{site.text(False)}: {error}")
        for device, parts in waiting.items():
            tickets = self._digester(device).submit_many([part for _, part in parts])
            self._tickets.update((index, ticket) for (index, _), ticket in zip(parts, tickets, strict=True))
        return added

    def add_value(self, site: Site, value: object) -> list[int]:
        """Record a Python value, or a container that may hold tensors."""
        if not self.is_kept:
            return []
        added = []
        try:
            parts = python_value_parts(value)
        except DigestError as error:
            self.miss(f"{site.text(False)}: {error}")
            return []
        for suffix, part in parts:
            own = site._replace(slot=site.slot + suffix) if suffix else site
            if isinstance(part, PlainValue):
                digest, leaves = digest_value(part)
                event = Event(own, part.dtype, part.shape, len(part.data), digest, leaves, value=part.text)
                self.record.events.append(event)
                added.append(len(self.record.events) - 1)
            else:
                added += self.add_tensor(own, part)
        return added

    def add_bytes(self, site: Site, data: np.ndarray) -> list[int]:
        """Record raw bytes, uint8 [n]."""
        if not self.is_kept:
            return []
        digest, leaves = digest_bytes("uint8", (data.size,), data)
        self.record.events.append(Event(site, "uint8", (data.size,), data.size, digest, leaves))
        return [len(self.record.events) - 1]

    def finish(self) -> StepRecord:
        """Wait for the digests that devices still owe and return the step."""
        for index, ticket in self._tickets.items():
            event = self.record.events[index]
            event.digest, event.leaves = ticket.resolve()
        self._tickets.clear()
        return self.record

    def _digester(self, device: torch.device) -> Digester:
        digester = self._digesters.get(device)
        if digester is None:
            from bitcheck.hooks.device_digest import open_digester  # a program on the CPU never needs it

            digester = self._digesters[device] = open_digester(device)
        return digester


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
