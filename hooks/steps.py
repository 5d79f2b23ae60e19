"""A step while it is being recorded: tensors become events here.

On the CPU a digest is taken at once. On another device it is a ticket, taken in stream order and
resolved by the writer's thread (`finish`), so that the training thread never waits.

Long because every way in which a tensor becomes an event is here.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bitcheck.digest import digest_bytes
from bitcheck.errors import DigestError
from bitcheck.events import Group, Kind, Phase, Site, StepColumns, StepKind
from bitcheck.hooks.native import native
from bitcheck.hooks.sharding import local_part, placement_text
from bitcheck.hooks.sites import Known, Place, PlaceKey, Sites
from bitcheck.hooks.tensors import (
    Digest,
    PlainValue,
    digest_in_part,
    digest_plain,
    digest_tensor,
    digest_value,
    kind_of,
    plain_on_device,
    python_value_parts,
    storage_id,
    tensor_parts,
)

if TYPE_CHECKING:
    from bitcheck.hooks.device_digest import Digester


_device_number = torch.Tensor.get_device
_PASSED_ON = frozenset({Phase.BATCH, Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD})
"""Phases whose tensors something else is computed from: what of them means nothing may never be used."""
_IN_PART = (
    "memory of torch.empty that was written in part: what nobody wrote, and what hangs on that, is left out of a "
    "tensor's digest unless it reaches a loss, a gradient, a parameter or other state"
)
UNREAD = bytes(16)
"""In place of the digest of a tensor that could not be read; it is counted as unobserved."""


class Digesters(dict[torch.device, "Digester"]):
    """What digests a device's tensors, opened when it is asked for first; the arguments as `Wishes` has them."""

    def __init__(
        self, leaf_limit_bytes: Callable[[], int | None], on_departure: Callable[[Callable[[], None]], None]
    ) -> None:
        super().__init__()
        self._leaf_limit_bytes = leaf_limit_bytes
        self._on_departure = on_departure

    def __missing__(self, device: torch.device) -> Digester:
        from bitcheck.hooks.device_digest import Wishes, open_digester  # a program on the CPU never needs it

        digester = self[device] = open_digester(device, Wishes(self._leaf_limit_bytes, self._on_departure))
        return digester


class Call:
    """One call of a module: what went in and came out, as indices into the step's events."""

    __slots__ = (
        "_received", "children", "first_node", "group", "inputs", "is_eval", "last_node", "number", "occurrence",
        "outputs", "parent", "path", "phase", "root", "sites", "thread",
    )  # fmt: skip

    sites: Sites
    """Slot -> where what goes in and comes out is recorded; the program itself has none."""

    def __init__(self, phase: Phase, root: str, path: str, is_eval: bool, parent: Call | None) -> None:
        self.phase = phase
        self.root = root
        self.path = path
        self.is_eval = is_eval
        self.parent = parent
        self.occurrence = 0
        self.group = -1
        self.inputs: tuple[int, ...] = ()
        self.children: tuple[int, ...] = ()
        """Outputs of the calls that finished within this one."""
        self.outputs: tuple[int, ...] = ()
        self._received: list[int] | None = None
        self.first_node = self.last_node = 0
        """The range of autograd sequence numbers that its thread drew while it ran."""
        self.thread = 0
        self.number = -1
        """Its place among the step's calls; none for what stands for the program."""

    def known(self) -> list[int]:
        """Return everything observed of what it computed from and to."""
        return [*self.inputs, *self.children, *self.outputs]

    @property
    def received(self) -> list[int]:
        """What collectives gave while it ran, and no call within it; to be added to."""
        if self._received is None:
            self._received = []
        return self._received

    def heard(self) -> list[int]:
        """Return what collectives gave in it and in the calls around it: gathered parameters, what other ranks hold."""
        found: list[int] = []
        call: Call | None = self
        while call is not None:
            found += call._received or ()
            call = call.parent
        return found


class _Remembered(weakref.ref[torch.Tensor]):
    """A tensor that was recorded, which it does not keep; one object, and not a tuple of several."""

    __slots__ = ("events", "version")

    version: int
    events: tuple[int, ...]


class StepBuilder:
    """Collects the events of one step on one rank."""

    __slots__ = (
        "__weakref__", "_counts", "_digesters", "_known", "_left_out", "_owed", "_remembered", "_unsettled",
        "awaited", "calls", "chance", "flying", "gathered", "has_training_forward", "in_part", "is_after_backward",
        "is_kept", "losses", "read_generators", "received", "recomputed", "record", "same", "top", "writers",
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        kind: StepKind,
        is_kept: bool,
        digesters: Digesters,
        known: Known | None = None,
    ) -> None:
        self.record = StepColumns(step, kind)
        self.is_kept = is_kept
        """A step outside `--steps` and `--every` only counts."""
        self.read_generators: set[bool] = set()
        """Whether generators were read before a training forward (False), and before an evaluation's (True)."""
        self.has_training_forward = False
        self.is_after_backward = False
        """Between a backward and the next forward: whatever runs now works on gradients."""
        self.writers: Callable[[StepBuilder, torch.Tensor], Sequence[int]] | None = None
        """At level `op`: in which events the operations are that last wrote a tensor's memory."""
        self.top = Call(Phase.FORWARD, "", "", False, None)
        """Stands for the program itself: holds what the outermost calls took and gave."""
        self.calls: list[Call] = []
        """Module calls in the order in which they began."""
        self.losses: list[int] = []
        self.received: list[int] = []
        """What collectives gave in backward."""
        self.gathered: list[int] = []
        """Parameters that were gathered in backward."""
        self.awaited: Callable[[StepBuilder, Site, torch.Tensor, int, tuple[int, ...]], list[int] | None] | None = None
        """Records a tensor that a collective is still writing; gives None for any other."""
        self.in_part: Mapping[int | None, Any] = {}
        """At level `op`: storages that may hold what memory held by chance."""
        self.chance: Callable[[torch.Tensor, bool], npt.NDArray[np.uint8] | None] | None = None
        """Tells which elements of a tensor that lies in one of them do, None where none does. With True what it holds
        counts from then on."""
        self._left_out: dict[int, Digest] = {}
        """Event -> the digest of all of a tensor, where elements were left out."""
        self.flying: Mapping[int, Any] = {}
        """Storages that collectives are still writing."""
        self.recomputed: dict[tuple[str, str], list[int]] = {}
        """Events of recomputed calls, by module."""
        self._digesters = digesters
        self._known = known if known is not None else Known()
        self.same = self._known.same
        self._counts: dict[Place, int] = {}
        self._owed: defaultdict[torch.device, dict[int, int]] = defaultdict(dict)
        """Event -> ticket of its digest, for each device."""
        self._unsettled: dict[int, tuple[tuple[int, ...], int]] = {}
        """Event that is still being written -> its tensor's strides and offset."""
        self._remembered: dict[int, _Remembered] = {}

    def remember(self, tensor: torch.Tensor, events: Sequence[int]) -> None:
        """Note under which events a tensor was last recorded."""
        self._remembered[id(tensor)] = held = _Remembered(tensor)
        held.version = version_of(tensor)
        held.events = _alone[events[0]] if len(events) == 1 else tuple(events)

    def recorded(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the events under which this very tensor was last recorded, () if it was not.

        Its bits may have changed since: the event that is made of it now then differs from them.
        """
        held = self._remembered.get(id(tensor))
        return held.events if held is not None and held() is tensor else ()

    def was_received(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was last recorded as what a collective gave."""
        return any(self.record.sites[index].phase is Phase.COMM for index in self.recorded(tensor))

    def add_again(self, site: Site, tensor: torch.Tensor, group: int, inputs: Iterable[int]) -> Sequence[int]:
        """Record a tensor that may have been recorded before in this step.

        On the CPU it is digested once more, so that a change which no version counter shows is seen.
        On a device, where that costs memory bandwidth, a tensor of the same version keeps its digest.
        """
        held = self._remembered.get(id(tensor))
        if (
            tensor.is_cpu
            or held is None
            or held() is not tensor
            or held.version != version_of(tensor)
            or held.version < 0  # in inference mode nothing counts versions
            or len(held.events) != 1
        ):
            return self.add_tensor(site, tensor, group, inputs)
        record, known = self.record, held.events[0]
        index = record.add(
            site, record.kinds[known], record.digests[known], record.leaves[known], group,
            self.same(tuple(inputs)),
        )  # fmt: skip
        owed = self._owed.get(tensor.device)
        if owed is not None and known in owed:
            owed[index] = owed[known]
        return [index]

    @property
    def step(self) -> int:
        """The step's number."""
        return self.record.step

    def count(self, phase: Phase, root: str, path: str, slot: str, is_eval: bool) -> int:
        """Return how many times this was asked for before: the occurrence of what is recorded next."""
        return self._take_number(self._known.place(phase, root, path, slot, is_eval))

    def next_sites(self, phase: Phase, root: str, path: str, slot: str, is_eval: bool) -> Sites:
        """Return the sites of what is recorded next, counted as `count` does."""
        place = self._known.place(phase, root, path, slot, is_eval)
        return place.execution(self._take_number(place))

    def sites_once(self, keys: list[PlaceKey]) -> list[Site]:
        """Return the site of each of many things of the program, counted as `next_sites` does for one after the other.

        Quick where none was recorded before in this step and the step before had the same.
        """
        if not keys:
            return []
        row = self._known.row(keys)
        if len(row.counts) == len(keys) and self._counts.keys().isdisjoint(row.counts):
            self._counts.update(row.counts)
            return row.sites
        return [self.next_sites(*key, False).first for key in keys]

    def _take_number(self, place: Place) -> int:
        number = self._counts.get(place, 0)
        self._counts[place] = number + 1
        return number

    def add_group(self, kind: str, root: str, path: str, op: str, parent: int = -1) -> int:
        """Open a computation and return its number."""
        return self.open_group(self.same(Group(kind, root, path, op, parent)))

    def open_group(self, group: Group) -> int:
        """Open a computation that is described already, and return its number."""
        self.record.groups.append(group)
        return len(self.record.groups) - 1

    def miss(self, sentence: str, count: int = 1) -> None:
        """Note something that could not be observed."""
        unobserved = self.record.unobserved
        unobserved[sentence] = unobserved.get(sentence, 0) + count

    def add_tensor(
        self, site: Site, tensor: torch.Tensor, group: int = -1, inputs: Iterable[int] = (), add_writers: bool = True
    ) -> Sequence[int]:
        """Record a tensor as it is now; return its events, one for each part that it is stored in.

        Without `add_writers`, `inputs` are all that it was computed from, also at level `op`.
        """
        if native is not None:
            inputs = tuple(inputs)
            if (at_hand := native.add_tensor(self, site, tensor, group, inputs)) is not None:
                return at_hand
        if self.in_part and self.is_kept:
            inputs = tuple(inputs)
            if (added := self._heed_chance(site, tensor, group, inputs, add_writers)) is not None:
                return added
        if self.is_kept and self._has_landed(tensor):
            inputs = self.same(tuple(inputs))
            sources = self._with_writers(inputs, tensor) if add_writers else inputs
            index = self._add_plain(site, tensor, group, sources)
            if index is not None:
                return _alone[index]
        return self.add_tensors([(site, tensor)], group, inputs, add_writers)

    def add_computed(self, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Record a tensor of which `inputs` are all that it was computed from: the short way for a plain one."""
        if self.is_kept and self._has_landed(tensor):
            index = self._add_plain(site, tensor, group, inputs)
            if index is not None:
                return _alone[index]
        return tuple(self.add_tensors([(site, tensor)], group, inputs, add_writers=False))

    def add_all_computed(
        self, sites: list[Site], tensors: list[torch.Tensor], group: int, inputs: list[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """Do as `add_computed` for many and return the events of each. On a device that is one launch."""
        if len(tensors) > 1 and tensors[0].is_cuda and self.is_kept:
            added = self._add_on_device(sites, tensors, group, inputs)
            if added is not None:
                return [_alone[index] for index in added]
        add = self.add_computed
        return [add(site, tensor, group, given) for site, tensor, given in zip(sites, tensors, inputs, strict=True)]

    def add_in_part(
        self, site: Site, tensor: torch.Tensor, chance: npt.NDArray[np.uint8], group: int, inputs: tuple[int, ...]
    ) -> tuple[int]:
        """Record a plain CPU tensor without the elements that are chance, [*shape], until `count_chance`."""
        index = self.record.add(site, kind_of(tensor), *digest_in_part(tensor, chance), group, inputs)
        self._left_out[index] = digest_tensor(tensor)
        if _IN_PART not in self.record.remarks:
            self.record.remarks += (_IN_PART,)
        return _alone[index]

    def count_chance(self, events: Iterable[int]) -> None:
        """What was left out of these events was of effect: it counts, and so does what it hung on."""
        waiting = list(events)
        while waiting:
            index = waiting.pop()
            whole = self._left_out.pop(index, None)
            if whole is not None:
                self.record.digests[index], self.record.leaves[index] = whole
                waiting += self.record.inputs[index]

    def _heed_chance(
        self, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...], add_writers: bool
    ) -> Sequence[int] | None:
        """Record a tensor that holds chance where that may be without effect; None for any other."""
        if site.phase not in _PASSED_ON:
            self._count_chance(tensor, inputs)
        elif self.chance is not None and storage_id(tensor) in self.in_part:
            chance = self.chance(tensor, False)
            if chance is not None:
                sources = self._with_writers(self.same(inputs), tensor) if add_writers else self.same(inputs)
                return self.add_in_part(site, tensor, chance, group, sources)
        return None

    def _count_chance(self, tensor: torch.Tensor, inputs: tuple[int, ...]) -> None:
        """Count what of a tensor is chance: it is state now, or leaves the process."""
        if self.chance is None or storage_id(tensor) not in self.in_part or self.chance(tensor, True) is None:
            return
        wrote = self.writers(self, tensor) if self.writers is not None else ()
        self.count_chance(wrote or inputs)

    def _with_writers(self, inputs: tuple[int, ...], tensor: torch.Tensor) -> tuple[int, ...]:
        """Return what a tensor was computed from, those included that last wrote its memory."""
        if self.writers is not None and (wrote := self.writers(self, tensor)):
            return self.same(tuple(dict.fromkeys((*inputs, *wrote))))
        return inputs

    def _has_landed(self, tensor: torch.Tensor) -> bool:
        """Say whether no collective still writes a plain tensor; of any other it is found out the long way."""
        return not self.flying or storage_id(tensor) not in self.flying

    def _add_plain(self, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...]) -> int | None:
        """Record what nearly every tensor is, a plain one, the short way; None where it is not, or cannot be read."""
        if not tensor.is_cuda:
            return _add_plain(self.record, site, tensor, group, inputs)
        kind = plain_on_device(tensor)
        if kind is None:
            return None
        device = tensor.device
        try:
            ticket = self._digesters[device].submit(tensor, kind)
        except DigestError:
            return None  # the long way tells why
        index = self.record.add(site, kind, b"", b"", group, inputs)
        self._owed[device][index] = ticket
        return index

    def _add_on_device(
        self, sites: list[Site], tensors: list[torch.Tensor], group: int, inputs: list[tuple[int, ...]]
    ) -> range | None:
        """Record plain tensors of one device, in one launch; None where they are not, or cannot be read."""
        if self.flying and not all(map(self._has_landed, tensors)):
            return None
        kinds = [kind for kind in map(plain_on_device, tensors) if kind is not None]
        if len(kinds) < len(tensors) or len(set(map(_device_number, tensors))) > 1:
            return None
        device = tensors[0].device
        try:
            tickets = self._digesters[device].submit_many(tensors, kinds)
        except DigestError:
            return None  # which of them it is, and why, is found one by one
        added = self.record.add_all(sites, kinds, b"", group, inputs)
        self._owed[device].update(zip(added, tickets, strict=True))
        return added

    def add_tensors(
        self,
        tensors: Sequence[tuple[Site, torch.Tensor]],
        group: int = -1,
        inputs: Iterable[int] = (),
        add_writers: bool = True,
    ) -> list[int]:
        """Record many tensors at once, which is one launch on a device."""
        if not (self.is_kept and tensors):
            return []
        if self.in_part:
            inputs = tuple(inputs)
            for _, tensor in tensors:
                self._count_chance(tensor, inputs)
        record = self.record
        added: list[int] = []
        given = self.same(tuple(inputs))
        if add_writers and self.writers is not None:
            computed_from = [self._with_writers(given, tensor) for _, tensor in tensors]
        else:
            computed_from = [given] * len(tensors)
        stored = [tensor if (local := local_part(tensor)) is None else local for _, tensor in tensors]
        if stored[0].is_cuda:
            together = self._add_on_device([site for site, _ in tensors], stored, group, computed_from)
            if together is not None:
                for event, local, (_, tensor) in zip(together, stored, tensors, strict=True):
                    if local is not tensor and (where := placement_text(tensor)):
                        record.placements[event] = where
                return list(together)
        captured = self._capture(stored)
        waiting: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for position, ((site, tensor), sources) in enumerate(zip(tensors, computed_from, strict=True)):
            try:
                if (
                    self.flying
                    and self.awaited is not None
                    and (owed := self.awaited(self, site, tensor, group, sources)) is not None
                ):
                    added += owed
                    continue
                local = stored[position]
                where = placement_text(tensor) if local is not tensor else ""
                index: int | None = None
                if position in captured:
                    kind, ticket = captured[position]
                    index = record.add(site, kind, b"", b"", group, sources)
                    self._owed[local.device][index] = ticket
                elif (plain := digest_plain(local)) is not None:
                    index = record.add(site, *plain, group, sources)
                if index is not None:
                    added.append(index)
                    if where:
                        record.placements[index] = where
                    continue
                for suffix, part in tensor_parts(local):
                    own = self.same(site._replace(slot=site.slot + suffix)) if suffix else site
                    digest, leaves = b"", b""
                    if part.is_cpu:
                        digest, leaves = digest_tensor(part)
                    else:
                        self._digesters[part.device].check(part)
                        waiting.setdefault(part.device, []).append((len(record), part))
                    added.append(record.add(own, kind_of(part), digest, leaves, group, sources))
                    if where := where or placement_text(tensor):
                        record.placements[added[-1]] = where
            except DigestError as error:
                self.miss(f"{site.text(False)}: {error}")
        for device, parts in waiting.items():
            try:
                kinds = [record.kinds[index] for index, _ in parts]
                tickets = self._digesters[device].submit_many([part for _, part in parts], kinds)
            except DigestError as error:  # the device has failed: the program hears of it by itself
                for index, _ in parts:
                    record.digests[index] = UNREAD
                self.miss(str(error), len(parts))
                continue
            self._owed[device].update(zip([index for index, _ in parts], tickets, strict=True))
        return added

    def _capture(self, tensors: Sequence[torch.Tensor]) -> dict[int, tuple[Kind, int]]:
        """Capture the plain tensors of devices, in one launch a device; return (kind, ticket) of each by its position.

        Where one of a device's cannot be read there are none of it: which, and why, is found one by one.
        """
        found: dict[torch.device, dict[int, Kind]] = {}
        captured: dict[int, tuple[Kind, int]] = {}
        if self.flying:
            return captured
        for position, tensor in enumerate(tensors):
            if (kind := plain_on_device(tensor)) is not None:
                found.setdefault(tensor.device, {})[position] = kind
        for device, places in found.items():
            kinds = list(places.values())
            try:
                tickets = self._digesters[device].submit_many([tensors[position] for position in places], kinds)
            except DigestError:
                continue
            captured.update(zip(places, zip(kinds, tickets, strict=True), strict=True))
        return captured

    def add_value(self, site: Site, value: object, group: int = -1) -> list[int]:
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
            own = self.same(site._replace(slot=site.slot + suffix)) if suffix else site
            if isinstance(part, PlainValue):
                digest, leaves = digest_value(part)
                kind = (part.dtype, part.shape, len(part.data))
                index = self.record.add(own, kind, digest, leaves, group)
                self.record.values[index] = part.text
                added.append(index)
            else:
                added += self.add_tensor(own, part, group)
        return added

    def add_bytes(self, site: Site, data: np.ndarray, group: int = -1) -> list[int]:
        """Record raw bytes, uint8 [n]."""
        if not self.is_kept:
            return []
        digest, leaves = digest_bytes("uint8", (data.size,), data)
        return [self.record.add(site, ("uint8", (data.size,), data.size), digest, leaves, group)]

    def reserve(self, site: Site, tensor: torch.Tensor, group: int, inputs: Iterable[int]) -> list[int]:
        """Give a strided tensor that is still being written its place; `settle` reads it. Any other is missed."""
        if not self.is_kept:
            return []
        # The parts of any other are known when it is there: too late for sites of their own.
        if tensor.layout is not torch.strided or tensor.is_nested:
            self.miss(f"{site.text(False)}: what a collective writes to a tensor that is not strided")
            return []
        index = self.record.add(site, kind_of(tensor), UNREAD, b"", group, self.same(tuple(inputs)))
        self._unsettled[index] = tensor.stride(), int(tensor.storage_offset())
        return [index]

    def settle(self, index: int, tensor: torch.Tensor) -> None:
        """Read a tensor that `reserve` gave a place to; without effect the second time, or when the step is over."""
        if index not in self._unsettled:
            return
        arrangement = self._unsettled.pop(index)
        plain = digest_plain(tensor) if tensor.is_cpu else None
        kind = plain[0] if plain is not None else plain_on_device(tensor) or kind_of(tensor)
        if kind != self.record.kinds[index] or arrangement != (tensor.stride(), tensor.storage_offset()):
            site = self.record.sites[index].text(False)
            self.miss(f"{site}: the program changed the tensor's shape or strides while a collective wrote it")
            return
        try:
            if tensor.is_cpu:
                found = plain[1:] if plain is not None else digest_tensor(tensor)
                self.record.digests[index], self.record.leaves[index] = found
            else:
                self._owed[tensor.device][index] = self._digesters[tensor.device].submit(tensor, kind)
        except DigestError as error:
            self.miss(f"{self.record.sites[index].text(False)}: {error}")

    def close(self) -> None:
        """Give up on tensors that are still being written; called at the end of the step."""
        if self._unsettled:
            self.miss("asynchronous collectives that were not waited for", len(self._unsettled))
            self._unsettled.clear()

    def finish(self) -> StepColumns:
        """Wait for the digests that devices still owe and return the step."""
        record = self.record
        for device, owed in self._owed.items():
            digester = self._digesters[device]
            tickets = list(dict.fromkeys(owed.values()))
            known = dict(zip(tickets, digester.resolve_many(tickets), strict=True))
            for index, ticket in owed.items():
                record.digests[index], record.leaves[index] = known[ticket]
        self._owed.clear()
        return record


def add_plain_portably(
    record: StepColumns, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...]
) -> int | None:
    """Add a plain CPU tensor as it is now; None where it is not plain."""
    plain = digest_plain(tensor)
    return record.add(site, *plain, group, inputs) if plain is not None else None


_add_plain = add_plain_portably if native is None else native.add_plain


class _Alone(dict[int, tuple[int]]):
    """Event -> a tuple of it alone, the same one in every step."""

    def __missing__(self, index: int) -> tuple[int]:
        self[index] = alone = (index,)
        return alone


_alone = _Alone()
if native is not None:
    native.configure(alone=_alone, digest_error=DigestError, remembered_type=_Remembered)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often operations wrote a tensor so far, -1 where PyTorch does not count."""
    return -1 if tensor.is_inference() else tensor._version
