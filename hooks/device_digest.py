"""Digests of a GPU's tensors, taken in stream order, without ever holding up the training thread.

    training thread                  the tensor's stream     side stream          writer's thread
    submit_many(tensors) -> tickets  kernel: leaf digests
                                     into a ring     ------> copy to the host --> digest of the leaves
    tensor.add_(1), del tensor       runs after that                              resolve(ticket)

The kernel is launched on the stream that is current, so it reads a tensor's bits as they are between the
operation before and the one after; that the tensor is overwritten or freed next does not matter, because
the caching allocator hands memory on in the same stream order. Nothing keeps a tensor alive and
no stream is recorded on it: the recorded program's memory is what it is without recording.

Only leaf digests, a thousandth of the data, go to the host (`kernels/ring.py`), where the writer's thread
takes them as they arrive: a step of a large model has hundreds of MiB of them, too many to be kept to its end.

A tensor that is not contiguous is brought to row-major order piece by piece in a scratch buffer. Place in
the flow: tensor -> *digest* -> event; `bitcheck.digest` is the definition, `kernels/` the hash.

Long because the order of launches, marks and slots has to be seen in one place.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bitcheck.digest import DIGEST_BYTES, LEAF_BYTES, begin_digest, digest_from_leaves, num_leaves
from bitcheck.errors import DigestError
from bitcheck.events import Kind
from bitcheck.hooks.kernels.cuda import CudaQueue
from bitcheck.hooks.kernels.layout import (
    FEW_TENSORS,
    STRIDED,
    Runs,
    Transposed,
    address_of,
    as_words,
    places_of,
    row_blocks,
    special_of,
)
from bitcheck.hooks.kernels.ring import LONG_PAUSE_S, Flight, Ring
from bitcheck.hooks.kernels.shortcut import Shortcut
from bitcheck.hooks.native import native
from bitcheck.hooks.tensors import Digest, digest_tensor, kind_of

RING_LEAVES = 2 * 1024 * 1024
"""Leaf digests that may be on their way at once: 32 MiB, which stand for 32 GiB of tensors."""
SCRATCH_BYTES = 32 * 1024 * 1024
"""A tensor that is not contiguous is copied in pieces of this size: half of an H200's L2."""

MAX_JOINED_LEAVES = 8192
"""Up to so many leaf digests are hashed in one call, after a copy. A hash that is updated lets go of the interpreter's
lock at each call in some versions of xxhash, and has to get it back from the thread that trains."""
MAX_TABLE_TENSORS = 16384
"""Tensors that one launch takes; the kernel could take 65536."""

_NO_FUNCTION: Any = torch._C.DisableTorchFunction
_NO_DISPATCH: Any = torch._C._DisableTorchDispatch

_CAPTURING = (
    "a CUDA graph is being captured on this stream, so tensors hold no values yet; "
    "record what goes into the graph and what comes out of it"
)

_log = logging.getLogger("bitcheck")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What whoever records asks of a digester."""

    leaf_limit_bytes: Callable[[], int | None] = lambda: None
    """Leaf digests are kept of tensors of up to so many bytes, of all where None; asked when they arrive."""
    on_departure: Callable[[Callable[[], None]], None] = lambda land: None
    """Called, in the training thread, whenever leaf digests leave the device; `land` waits for them and takes them,
    and raises DigestError where the device has failed. Who calls it in a thread of its own spares the training thread
    that work."""


class Digester(Protocol):
    """Takes digests of one device's tensors."""

    def check(self, tensor: torch.Tensor) -> None:
        """Raise DigestError where `submit_many` could not take this tensor now."""

    def submit_many(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind] | None = None) -> list[int]:
        """Capture the bits of strided tensors as they are at this moment on their current stream.

        `kinds`: of each, where they are known. Returns a ticket for each: a number and no object, for a step has
        thousands, and what outlives the moment is what sets off Python's cyclic garbage collector. Raises DigestError,
        and captures none, where `check` would.
        """

    def submit(self, tensor: torch.Tensor, kind: Kind) -> int:
        """Do the same for one tensor of which the kind is known."""

    def flush(self) -> None:
        """Set everything submitted on its way to the host; `resolve` does so itself."""

    def resolve(self, ticket: int) -> Digest:
        """Wait for and return (digest, leaf digests), b"" for leaf digests that are not kept; once a ticket.

        Raises DigestError where the device has failed, KeyError for a ticket that there is not, or is no more.
        """

    def resolve_many(self, tickets: Sequence[int]) -> list[Digest]:
        """Do the same for many."""


def open_digester(device: torch.device, wishes: Wishes = Wishes()) -> Digester:
    """Return what digests tensors of `device`: its own kernels where it has them, else the CPU.

    That the CPU has to do it is logged, once for each device, for it is slower: the tensors' bytes
    cross to the host and the training thread waits for them. Raises DigestError while a CUDA graph is
    being captured: nothing can be allocated then.
    """
    if device.type != "cuda":
        return HostDigester()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise DigestError(_CAPTURING)
    try:
        return _open_device_digester(device, wishes)
    except ImportError:
        reason = "Triton is not installed"
    except Exception as error:  # noqa: BLE001  no C compiler, no room, an old driver: the training must go on
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    _log.warning("tensors of %s are digested on the CPU, which is exact but slower: %s", device, reason)
    return HostDigester()


def _open_device_digester(device: torch.device, wishes: Wishes) -> DeviceDigester:
    # triton is optional, and importing it takes a while
    from bitcheck.hooks.kernels.launch import LeafKernels

    queue = CudaQueue(device)
    with queue.current(), queue.aside():
        kernels = LeafKernels(queue.device)
    digester = DeviceDigester(queue, kernels, wishes=wishes)
    digester.take_shortcut(kernels.shortcut(*queue.questions))
    return digester


class HostDigester:
    """The portable path: copies a tensor to the host in chunks and digests it there, at once."""

    _shortcut = None  # as `DeviceDigester` has it

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._known: dict[int, Digest] = {}

    def check(self, tensor: torch.Tensor) -> None:
        """Raise DigestError where the stream is being captured: a copy to the host would break the graph."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise DigestError(_CAPTURING)

    def submit_many(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind] | None = None) -> list[int]:
        """Digest each tensor now; the training thread waits for the copies."""
        for tensor in tensors:
            self.check(tensor)
        tickets = [next(self._numbers) for _ in tensors]
        self._known.update(zip(tickets, map(digest_tensor, tensors), strict=True))
        return tickets

    def submit(self, tensor: torch.Tensor, kind: Kind) -> int:
        """Do the same for one tensor."""
        return self.submit_many([tensor])[0]

    def flush(self) -> None:
        """Do nothing: nothing is under way."""

    def resolve(self, ticket: int) -> Digest:
        """Return (digest, leaf digests). Raises KeyError for a ticket that there is not, or is no more."""
        return self._known.pop(ticket)

    def resolve_many(self, tickets: Sequence[int]) -> list[Digest]:
        """Do the same for many."""
        return list(map(self.resolve, tickets))


class _Pieces:
    """Contiguous pieces of memory to hash in this order, each part of, or all of, a ticket's tensor."""

    __slots__ = ("addresses", "sizes", "tickets")

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []

    def add(self, ticket: int, address: int, num_bytes: int) -> None:
        self.tickets.append(ticket)
        self.addresses.append(address)
        self.sizes.append(num_bytes)


class Kernels(Protocol):
    """What hashes and transposes on a device: `kernels.launch.LeafKernels`."""

    def hash_one(self, address: int, num_bytes: int, out_address: int, stream: int) -> None:
        """Write the leaf digests, [L, 16], of the memory at `address`."""

    def hash_few(
        self, addresses: Sequence[int], sizes: Sequence[int], counts: Sequence[int], out_address: int, stream: int
    ) -> None:
        """Write the leaf digests, `counts` of each, of 2 to FEW_TENSORS pieces of memory one after the other."""

    def hash_table(self, table_address: int, num_tensors: int, leaves: int, out_address: int, stream: int) -> None:
        """Write the leaf digests of the memory that a table, int64 [3, T], lists."""

    def transpose(self, address: int, itemsize: int, found: Transposed, out_address: int, stream: int) -> None:
        """Copy elements whose rows lie next to each other to row-major order."""

    def join_runs(self, address: int, itemsize: int, found: Runs, out_address: int, stream: int) -> None:
        """Copy runs of elements to one place, one after the other."""


class DeviceDigester:
    """Digests of one device's tensors; `open_digester` makes one.

    Takes 2 * 16 bytes a leaf of `ring_leaves`, half of it on the host, and `scratch_bytes`, all of it
    allocated here and now.
    """

    __slots__ = (
        "_begun", "_flight_leaves", "_kernels", "_kinds", "_known", "_launch_leaves", "_num_tickets", "_queue",
        "_ring", "_scratch", "_scratch_address", "_scratch_bytes", "_scratch_stream", "_shortcut", "_table_tensors",
        "_wishes",
    )  # fmt: skip

    def __init__(
        self,
        queue: CudaQueue,
        kernels: Kernels,
        ring_leaves: int = RING_LEAVES,
        scratch_bytes: int = SCRATCH_BYTES,
        wishes: Wishes = Wishes(),
    ) -> None:
        self._queue = queue
        self._wishes = wishes
        self._kernels = kernels
        self._launch_leaves = ring_leaves // 4
        self._flight_leaves = self._launch_leaves // 2
        self._table_tensors = min(MAX_TABLE_TENSORS, ring_leaves // 8)
        self._scratch_stream: int | None = None
        self._num_tickets = 0
        self._kinds: dict[int, Kind] = {}
        """Of the tickets whose leaves are under way."""
        self._begun: dict[int, tuple[Any, int, bytes]] = {}
        """Of tickets whose leaves come in several flights: the hash so far, bytes missing, leaves kept."""
        self._known: dict[int, Digest] = {}
        with queue.current(), queue.aside():
            self._ring = Ring(queue, ring_leaves, self._receive, lambda: wishes.on_departure(self._land_one))
            self._scratch = queue.empty(scratch_bytes, torch.uint8)
            queue.synchronize()
        self._scratch_bytes = scratch_bytes
        self._scratch_address = self._scratch.data_ptr()
        self._shortcut: Shortcut | None = None
        """How the compiled half launches the kernels; None where it does not."""

    def take_shortcut(self, shortcut: Shortcut | None) -> None:
        """Let the compiled half launch, if what it gives on this device is what the CPU gives; waits for the device."""
        if shortcut is None or native is None:
            return
        data = torch.arange(12_289, dtype=torch.int64).view(torch.uint8)
        with self._queue.current(), _NO_FUNCTION():
            with self._queue.aside():
                copy = data.to(self._queue.device)
                bounds = [(0, 40_000), (3, 73), (16, 32_784), (8, 98_312)]
                copies, originals = [[whole[start:end] for start, end in bounds] for whole in (copy, data)]
            self._queue.synchronize()
            self._shortcut = shortcut
            for count in (1, 2, FEW_TENSORS):
                pieces = originals[:count]
                tickets = native.submit_tensors(self, copies[:count], list(map(kind_of, pieces)))
                if tickets is None or self.resolve_many(tickets) != list(map(digest_tensor, pieces)):
                    self._shortcut = None
                    return

    # --- the training thread

    def check(self, tensor: torch.Tensor) -> None:
        """Raise DigestError where the tensor's memory is freed or a CUDA graph is being captured."""
        with _NO_FUNCTION():
            if self._queue.is_capturing():
                raise DigestError(_CAPTURING)
            address_of(tensor, tensor.nbytes)

    def submit_many(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind] | None = None) -> list[int]:
        """Capture the bits of strided tensors as they are at this moment on the current stream.

        `kinds`: of each, where they are known. One launch for many. Waits only where the ring is full.
        Raises DigestError, and captures none, where `check` would.
        """
        with _NO_FUNCTION(), self._ring.lock:
            if self._queue.is_capturing():
                raise DigestError(_CAPTURING)
            if kinds is None:
                kinds = list(map(kind_of, tensors))
            if self._queue.is_current():
                return self._submit(tensors, kinds)
            with self._queue.current():
                return self._submit(tensors, kinds)

    def _submit(self, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind]) -> list[int]:
        places = places_of(tensors, kinds)
        if 1 < len(places) <= FEW_TENSORS and min(places) > 0:
            few = self._submit_few(kinds, places)
            if few is not None:
                return few
        tickets = list(range(self._num_tickets + 1, self._num_tickets + 1 + len(kinds)))
        self._num_tickets += len(kinds)
        self._kinds.update(zip(tickets, kinds, strict=True))
        pieces = _Pieces()
        strided: list[tuple[int, torch.Tensor]] = []
        if places and min(places) > 0:  # as mostly: hundreds at a time
            pieces.tickets, pieces.addresses, pieces.sizes = tickets, places, [kind[2] for kind in kinds]
        else:
            for ticket, tensor, kind, place in zip(tickets, tensors, kinds, places, strict=True):
                if place > 0:
                    pieces.add(ticket, place, kind[2])
                elif place == STRIDED:
                    strided.append((ticket, tensor))
                else:
                    self._receive_part(ticket, memoryview(b""), 0)
        if not (pieces.tickets or strided):
            return tickets
        stream = self._queue.stream()
        if strided:
            with _NO_DISPATCH(), torch.no_grad():
                pieces = self._gather(strided, pieces, stream)
        self._launch(pieces, stream)
        if self._ring.num_filling >= self._flight_leaves:
            self._ring.flush()
        return tickets

    def _add_ticket(self, kind: Kind) -> int:
        self._num_tickets = ticket = self._num_tickets + 1
        self._kinds[ticket] = kind
        return ticket

    def submit(self, tensor: torch.Tensor, kind: Kind) -> int:
        """Do as `submit_many` for one tensor of which the kind is known.

        A short way for what is done thousands of times a step: a contiguous tensor, a launch of its own.
        """
        queue, ring, num_bytes = self._queue, self._ring, kind[2]
        count = num_leaves(num_bytes)
        with _NO_FUNCTION(), ring.lock:
            if native is not None and self._shortcut is not None:
                quick = native.submit_tensors(self, [tensor], [kind])
                if quick is not None:
                    return quick[0]
            if (
                not 0 < count <= self._launch_leaves
                or queue.is_capturing()
                or not queue.is_current()
                or (address := places_of((tensor,), (kind,))[0]) == STRIDED
            ):
                return self.submit_many([tensor], [kind])[0]
            ticket = self._add_ticket(kind)
            stream = queue.stream()
            flight, slot = ring.reserve(count)
            self._kernels.hash_one(address, num_bytes, ring.address(slot), stream)
            ring.mark(stream)
            flight.add(ticket, slot - flight.start, count)
            if ring.num_filling >= self._flight_leaves:
                ring.flush()
        return ticket

    def _submit_few(self, kinds: Sequence[Kind], places: Sequence[int]) -> list[int] | None:
        """Capture a few tensors that are there and contiguous: a short way for what is done thousands of times a step.

        None where they are too much for one launch.
        """
        sizes = [kind[2] for kind in kinds]
        counts = list(map(num_leaves, sizes))
        leaves = sum(counts)
        if leaves > self._launch_leaves:
            return None
        ring, stream = self._ring, self._queue.stream()
        flight, slot = ring.reserve(leaves)
        if len(counts) == 1:
            self._kernels.hash_one(places[0], sizes[0], ring.address(slot), stream)
        else:
            self._kernels.hash_few(places, sizes, counts, ring.address(slot), stream)
        ring.mark(stream)
        first = slot - flight.start
        tickets = []
        for kind, count in zip(kinds, counts, strict=True):
            ticket = self._add_ticket(kind)
            flight.add(ticket, first, count)
            tickets.append(ticket)
            first += count
        if ring.num_filling >= self._flight_leaves:
            ring.flush()
        return tickets

    def _launch(self, pieces: _Pieces, stream: int) -> None:
        """Hash pieces in as few launches as the ring allows; a piece larger than a launch is cut."""
        count = len(pieces.sizes)
        # Each tensor's last leaf may be a small one, hence one leaf more for each.
        most_leaves = sum(pieces.sizes) // LEAF_BYTES + count
        if count <= self._table_tensors and most_leaves <= self._launch_leaves:
            self._launch_once(pieces, stream)
            return
        batch, leaves = _Pieces(), 0
        for ticket, address, size in zip(pieces.tickets, pieces.addresses, pieces.sizes, strict=True):
            start = 0
            while start < size:
                if leaves == self._launch_leaves or len(batch.sizes) == self._table_tensors:
                    self._launch_once(batch, stream)
                    batch, leaves = _Pieces(), 0
                taken = min(size - start, (self._launch_leaves - leaves) * LEAF_BYTES)
                batch.add(ticket, address + start, taken)
                leaves += num_leaves(taken)
                start += taken
        self._launch_once(batch, stream)

    def _launch_once(self, pieces: _Pieces, stream: int) -> None:
        """Hash pieces that fit in one launch: a few as its arguments, more through a table."""
        if not pieces.sizes:
            return
        if len(pieces.sizes) <= FEW_TENSORS:
            self._launch_few(pieces, stream)
        else:
            self._launch_table(pieces, stream)
        # At once, not when all is submitted: the next launch may find the ring full and send this flight off.
        self._ring.mark(stream)

    def _launch_few(self, pieces: _Pieces, stream: int) -> None:
        counts = [num_leaves(num_bytes) for num_bytes in pieces.sizes]
        flight, slot = self._ring.reserve(sum(counts))
        if len(counts) == 1:
            self._kernels.hash_one(pieces.addresses[0], pieces.sizes[0], self._ring.address(slot), stream)
        else:
            self._kernels.hash_few(pieces.addresses, pieces.sizes, counts, self._ring.address(slot), stream)
        first = slot - flight.start
        for ticket, count in zip(pieces.tickets, counts, strict=True):
            flight.add(ticket, first, count)
            first += count

    def _launch_table(self, pieces: _Pieces, stream: int) -> None:
        """Launch for many pieces; their table lies before their leaves in the ring, in pinned memory first."""
        num_tensors = len(pieces.sizes)
        sizes = np.array(pieces.sizes)
        counts = -(-sizes // LEAF_BYTES)
        firsts = np.cumsum(counts)
        leaves = int(firsts[-1])
        firsts -= counts
        table_slots = (3 * num_tensors + 1) // 2
        flight, slot = self._ring.reserve(table_slots + leaves)
        self._ring.upload(slot, np.concatenate([np.array(pieces.addresses), sizes, firsts]))
        out_address = self._ring.address(slot) + table_slots * DIGEST_BYTES
        self._kernels.hash_table(self._ring.address(slot), num_tensors, leaves, out_address, stream)
        firsts += slot - flight.start + table_slots
        flight.add_all(pieces.tickets, firsts.tolist(), counts.tolist())

    # --- tensors that are not contiguous

    def _gather(self, strided: list[tuple[int, torch.Tensor]], pieces: _Pieces, stream: int) -> _Pieces:
        """Copy tensors to row-major order into the scratch buffer; return `pieces` with these added.

        Whenever the buffer is full, what there is of `pieces` is launched, which empties both. Where all fit in at once
        and lie as a kernel of ours can copy them, `csrc/strided.c` does it.
        """
        # Whatever was copied into the buffer was hashed by a launch, and each launch moves its stream's mark.
        if self._scratch_stream not in (None, stream):
            self._queue.wait_for(self._scratch_stream)
        self._scratch_stream = stream
        room = self._scratch_bytes
        fill = 0
        for ticket, tensor in strided:
            num_bytes = tensor.nbytes
            fill = -(-fill // DIGEST_BYTES) * DIGEST_BYTES
            if fill + num_bytes > room:
                self._launch(pieces, stream)
                pieces, fill = _Pieces(), 0
            if num_bytes <= room:
                self._copy(tensor, fill, stream)
                pieces.add(ticket, self._scratch_address + fill, num_bytes)
                fill += num_bytes
                continue
            for block in row_blocks(as_words(tensor), room - LEAF_BYTES):
                self._copy(block, fill, stream)
                fill += block.nbytes
                whole = fill - fill % LEAF_BYTES
                if whole:
                    pieces.add(ticket, self._scratch_address, whole)
                    self._launch(pieces, stream)
                    pieces = _Pieces()
                    fill -= whole
                    if fill:
                        self._scratch[:fill].copy_(self._scratch[whole : whole + fill])
            if fill:
                pieces.add(ticket, self._scratch_address, fill)
        return pieces

    def _copy(self, tensor: torch.Tensor, offset: int, stream: int) -> None:
        """Copy a tensor's elements to row-major order, to the scratch buffer from byte `offset` on."""
        special = special_of(tensor)
        if special is None:
            words = as_words(tensor)
            self._scratch[offset : offset + words.nbytes].view(words.dtype).view(words.shape).copy_(words)
            return
        address, out_address = tensor.data_ptr(), self._scratch_address + offset
        if isinstance(special, Transposed):
            self._kernels.transpose(address, tensor.itemsize, special, out_address, stream)
        else:
            self._kernels.join_runs(address, tensor.itemsize, special, out_address, stream)

    # --- any thread

    def flush(self) -> None:
        """Send what was submitted on its way to the host, behind the streams that still compute it."""
        self._ring.flush()

    def resolve(self, ticket: int) -> Digest:
        """Wait for and return (digest, leaf digests), b"" for leaf digests that are not kept; once a ticket.

        Raises DigestError where the device has failed, KeyError for a ticket that there is not, or is no more.
        """
        if ticket not in self._kinds and ticket not in self._known:  # in this order: it goes from one to the other
            raise KeyError(ticket)
        while (found := self._known.pop(ticket, None)) is None:
            if not self._ring.land(lambda: ticket in self._known):
                self._ring.flush()
        return found

    def resolve_many(self, tickets: Sequence[int]) -> list[Digest]:
        """Do the same for many."""
        known = self._known
        found = [known.pop(ticket, None) for ticket in tickets]  # nearly all have been received by now
        return [
            digest if digest is not None else self.resolve(ticket)
            for ticket, digest in zip(tickets, found, strict=True)
        ]

    def _receive(self, flight: Flight, landed: memoryview) -> None:
        """Take the leaf digests of a flight, 16 bytes each."""
        tickets, firsts, counts = flight.tickets, flight.firsts, flight.counts
        limit = self._leaf_limit_bytes()
        rest: Iterable[int] = range(len(tickets))
        if native is not None:
            rest = native.receive_leaves(tickets, firsts, counts, landed, self._kinds, self._known, limit)
        for place in rest:
            leaves = landed[firsts[place] * DIGEST_BYTES : (firsts[place] + counts[place]) * DIGEST_BYTES]
            self._receive_leaves(tickets[place], counts[place], leaves, limit)

    def _leaf_limit_bytes(self) -> int:
        limit = self._wishes.leaf_limit_bytes()
        return sys.maxsize if limit is None else limit

    def _receive_leaves(self, ticket: int, count: int, leaves: memoryview, limit_bytes: int) -> None:
        kind = self._kinds[ticket]
        num_bytes = kind[2]
        if count == num_leaves(num_bytes) <= MAX_JOINED_LEAVES:
            self._known[ticket] = digest_from_leaves(*kind, leaves), bytes(leaves) if num_bytes <= limit_bytes else b""
            del self._kinds[ticket]
        else:
            self._receive_part(ticket, leaves, limit_bytes)

    def _receive_part(self, ticket: int, leaves: memoryview, limit_bytes: int) -> None:
        """Take a ticket's next leaf digests."""
        kind = self._kinds[ticket]
        num_bytes = kind[2]
        begun = self._begun.pop(ticket, None)
        taken, missing, kept = begun or (begin_digest(*kind), num_leaves(num_bytes) * DIGEST_BYTES, b"")
        taken.update(leaves)
        missing -= len(leaves)
        if num_bytes <= limit_bytes:
            kept += leaves
        if missing:
            self._begun[ticket] = taken, missing, kept
            return
        self._known[ticket] = taken.digest(), kept
        del self._kinds[ticket]

    def _land_one(self) -> None:
        self._ring.land(lambda: False, LONG_PAUSE_S)
