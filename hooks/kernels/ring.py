"""Leaf digests on their way from a device to the host: a ring of slots, emptied flight by flight.

    slots     . . . | landed, free again | under way, a flight each | being filled | free . . .
    counted         ^ tail                                                         ^ head

A slot holds 16 bytes, on the device and at the same place in pinned memory. A *flight* is a run of slots
that is copied to the host at once, on a side stream, behind the streams that still compute it. That it
has landed is told by its number, copied after it over the same stream: to wait, a thread looks at memory
and calls nothing of CUDA, which it must not do while the program captures a graph. Whoever lands a flight
hands its leaf digests to those who wait for them, so that none is kept longer than that. Where the ring is
full whoever needs room lands the oldest flight: nothing is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from bitcheck.digest import DIGEST_BYTES
from bitcheck.errors import DigestError
from bitcheck.hooks.kernels.cuda import CudaQueue
from bitcheck.hooks.native import native

MAX_FLIGHTS = 1024
_NUMBERS = 4096
"""Flights are numbered modulo this, far more than can be under way."""
_FIRST_PAUSE_S = 20e-6
SHORT_PAUSE_S = 1e-3
"""For who has nothing else to do. Each look takes the interpreter's lock from whoever has."""
LONG_PAUSE_S = 5e-3
"""For who waits beside a thread that trains."""
_NATIVE_PAUSE_S = 200e-6
"""Between looks of the compiled half, which need no lock."""
_STALL_S = 5.0
"""After this long without a landing the device is asked whether it has failed."""

_NO_FUNCTION: Any = torch._C.DisableTorchFunction
_NO_DISPATCH: Any = torch._C._DisableTorchDispatch


class Flight:
    """Slots [start, end) of the ring, counted without end, that go to the host together."""

    __slots__ = ("counts", "end", "firsts", "number", "start", "tickets")

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.number = -1
        """Its place among the flights that left; -1 while it is being filled."""
        self.tickets: list[int] = []
        """For whom slots are,"""
        self.firsts: list[int] = []
        """the first of each one's, counted from the flight's own first,"""
        self.counts: list[int] = []
        """and how many."""

    def add(self, ticket: int, first: int, count: int) -> None:
        """Note for whom slots are."""
        self.tickets.append(ticket)
        self.firsts.append(first)
        self.counts.append(count)

    def add_all(self, tickets: list[int], firsts: list[int], counts: list[int]) -> None:
        """Note for whom many slots are."""
        self.tickets += tickets
        self.firsts += firsts
        self.counts += counts


class Ring:
    """Slots of 16 bytes on a device, and the same number in pinned memory, allocated here and now.

    `receive(flight, its slots' bytes)` is called for each flight that has landed; that memory is used again as soon as
    it returns. `on_departure` is called after each flight's departure by whoever sent it, `lock` held.
    """

    __slots__ = (
        "_address", "_capacity", "_departed", "_failure", "_filling", "_flights", "_head", "_host", "_host_bytes",
        "_host_words", "_is_full", "_landed", "_landed_word", "_landing", "_numbers", "_on_departure", "_queue",
        "_receive", "_slots", "_tail", "_used", "lock",
    )  # fmt: skip

    def __init__(
        self,
        queue: CudaQueue,
        num_slots: int,
        receive: Callable[[Flight, memoryview], None],
        on_departure: Callable[[], None] = lambda: None,
    ) -> None:
        self.lock = threading.RLock()
        """Held from `reserve` to `mark`, and to flush."""
        self._queue = queue
        self._receive = receive
        self._on_departure = on_departure
        self._landing = threading.Lock()
        """Held to wait for the oldest flight and to empty it; taken after `lock`, never before."""
        self._capacity = num_slots
        self._head = 0
        self._tail = 0
        self._filling = Flight(0)
        self._flights: deque[Flight] = deque()
        self._departed = 0
        self._used: set[int] = set()
        """Streams that wrote to the flight that is being filled."""
        self._failure: str | None = None
        self._is_full = False
        """Somebody needs room: who waits for a flight is to look often."""
        self._slots = queue.empty(num_slots * 2, torch.int64)
        self._numbers = torch.arange(_NUMBERS, dtype=torch.int64, device=self._slots.device)
        self._host = queue.pinned(num_slots * 2)
        self._landed = queue.pinned(1)
        self._host_words = self._host.numpy()
        self._host_bytes = memoryview(self._host_words).cast("B")  # type: ignore[arg-type]
        self._landed_word = self._landed.numpy()
        self._address = self._slots.data_ptr()

    @property
    def num_filling(self) -> int:
        """Slots of the flight that is being filled."""
        return self._filling.end - self._filling.start

    def address(self, slot: int) -> int:
        """Return where a slot lies on the device."""
        return self._address + slot % self._capacity * DIGEST_BYTES

    def upload(self, slot: int, words: Any) -> None:
        """Copy int64 words, numpy [n], into a flight's slots on the current stream; the host waits for nothing."""
        at = 2 * (slot % self._capacity)
        span = slice(at, at + words.size)
        self._host_words[span] = words
        with _NO_DISPATCH():
            self._slots[span].copy_(self._host[span], non_blocking=True)

    def mark(self, stream: int) -> None:
        """Say that the current stream, `stream`, has been given all that writes to the slots reserved last."""
        if self._queue.needs_mark(stream):
            self._queue.mark(stream)
        self._used.add(stream)

    def reserve(self, slots: int) -> tuple[Flight, int]:
        """Return a flight and the first of `slots` slots in a row of it, waiting for room if need be."""
        at = self._head % self._capacity
        if at == 0 or at + slots > self._capacity:  # a flight is one piece of memory, so it ends where the ring does
            self.flush()
            self._head += -at % self._capacity
            self._filling = Flight(self._head)
        if not self._has_room(slots):
            self._make_room(slots)
        flight = self._filling
        slot = self._head
        self._head = flight.end = slot + slots
        return flight, slot

    def _has_room(self, slots: int) -> bool:
        return self._head + slots - self._tail <= self._capacity and len(self._flights) < MAX_FLIGHTS

    def _make_room(self, slots: int) -> None:
        self._is_full = True
        while not self._has_room(slots):
            self.flush()
            if not self.land(lambda: self._has_room(slots)):
                self._tail = self._head
        self._is_full = False

    def flush(self) -> None:
        """Send what was submitted on its way to the host, behind the streams that still compute it."""
        with self.lock:
            flight = self._filling
            if flight.end == flight.start:
                return
            self._departed += 1
            flight.number = self._departed
            at = 2 * (flight.start % self._capacity)
            words = slice(at, at + 2 * (flight.end - flight.start))
            number = flight.number % _NUMBERS
            with _NO_FUNCTION(), _NO_DISPATCH():
                landed = self._numbers[number : number + 1]
                self._queue.send(self._used, [(self._host[words], self._slots[words]), (self._landed, landed)])
            self._used.clear()
            self._flights.append(flight)
            self._filling = Flight(self._head)
            self._on_departure()

    def land(self, is_enough: Callable[[], bool], longest_pause_s: float = SHORT_PAUSE_S) -> bool:
        """Wait for the oldest flight, hand out its leaf digests and free its slots; False where none is under way.

        Returns at once where another thread's landing was enough. Between looks it sleeps, up to `longest_pause_s`.
        Raises DigestError where the device has failed.
        """
        with self._landing:
            if is_enough():
                return True
            if not self._flights:
                return False
            flight = self._flights[0]
            self._wait(flight.number, longest_pause_s)
            at = flight.start % self._capacity * DIGEST_BYTES
            self._receive(flight, self._host_bytes[at : at + (flight.end - flight.start) * DIGEST_BYTES])
            self._tail = flight.end
            self._flights.popleft()
            return True

    def _wait(self, number: int, longest_pause_s: float) -> None:
        """Wait until flight `number` has landed, by looking at memory alone."""
        pause = _FIRST_PAUSE_S
        asked = time.monotonic()
        while (int(self._landed_word[0]) - number) % _NUMBERS >= _NUMBERS // 2:
            if self._failure is not None:
                raise DigestError(self._failure)
            if native is not None:
                native.wait_for_number(self._landed.data_ptr(), number, _NUMBERS, _NATIVE_PAUSE_S, _STALL_S / 10)
            else:
                time.sleep(pause)
                pause = min(2 * pause, SHORT_PAUSE_S if self._is_full else longest_pause_s)
            if time.monotonic() - asked > _STALL_S:
                self._ask_device()
                asked = time.monotonic()

    def _ask_device(self) -> None:
        """Raise DigestError where the device has failed, so that nobody waits for it for ever."""
        try:
            self._queue.ask()
        except RuntimeError as error:
            self._failure = (
                f"{self._slots.device} failed before its digests reached the host: {str(error).splitlines()[0]}. "
                "What the program reports is the cause; the steps recorded before it are whole"
            )
            raise DigestError(self._failure) from error
