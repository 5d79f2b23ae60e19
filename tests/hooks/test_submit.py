"""The compiled half launches as the Python does: a stand-in for CUDA's driver reads what it was given."""

from __future__ import annotations

import ctypes
import shutil
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from bitcheck.digest import LEAF_BYTES, digest_leaves, num_leaves
from bitcheck.events import Kind
from bitcheck.hooks.device_digest import HostDigester
from bitcheck.hooks.kernels.layout import FEW_TENSORS
from bitcheck.hooks.kernels.shortcut import Kernel, Shortcut
from bitcheck.hooks.native import native
from bitcheck.hooks.tensors import digest_tensor, kind_of
from tests.hooks.test_device_digest import OnHost, random_bytes

if native is None and shutil.which("cc") is None:
    pytest.skip("hooks/csrc is not built: there is no C compiler", allow_module_level=True)
assert native is not None, "hooks/csrc is not built, or from another version: `make setup` builds it"

ONE, FEW, SECRET, DEVICE = 11, 2**63 + 5, 2**64 - 8, 3
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_UINTS = (ctypes.c_uint,) * 7
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *_UINTS, ctypes.c_void_p, _POINTERS, _POINTERS)


class Driver:
    """cuLaunchKernel on the host: reads memory at the launch, as a stream in order would."""

    def __init__(self, host: OnHost) -> None:
        self.host = host
        self.answer = 0
        self.flips = 0
        """A bit to flip in what is written, as a kernel would that miscomputes."""
        self.shapes: list[tuple[int, ...]] = []
        self.device = DEVICE
        self._callback = _LAUNCH(self._launch)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        assert address is not None
        queue = host.queue
        self.shortcut = Shortcut(
            address, Kernel(ONE, 32, 0), Kernel(FEW, 64, 7), SECRET, DEVICE,
            queue.is_capturing, lambda: self.device, lambda device: queue.now if device == DEVICE else -1,
        )  # fmt: skip

    def _launch(self, function: int, *rest: Any) -> int:
        *shape, stream, parameters, extra = rest
        self.shapes.append((function, *shape))
        if self.answer:
            return self.answer
        count = 1 if function == ONE else FEW_TENSORS
        values = [ctypes.c_uint64.from_address(parameters[index]).value for index in range(3 * count + 1)]
        addresses, sizes, firsts = values[:count], values[count : 2 * count], values[2 * count : 3 * count - 1]
        out, secret = values[3 * count - 1 :]
        leaves = shape[0]
        assert (secret, shape[1:3], bool(extra)) == (SECRET, [1, 1], False)
        found = b""
        for piece, first in enumerate([0, *firsts]):
            if first == leaves:
                assert (addresses[piece], sizes[piece]) == (0, 0)
                continue
            assert first * 16 == len(found)
            found += digest_leaves(np.frombuffer(ctypes.string_at(addresses[piece], sizes[piece]), np.uint8))
        assert len(found) == 16 * leaves
        found = bytes([found[0] ^ self.flips]) + found[1:]
        self.host.kernels._write(stream or 0, out, found)
        self.host.kernels.num_launches -= 1
        return 0


@pytest.fixture
def host() -> OnHost:
    return OnHost()


@pytest.fixture
def driver(host: OnHost) -> Driver:
    made = Driver(host)
    host.digester._shortcut = made.shortcut
    return made


def submit(host: OnHost, tensors: list[torch.Tensor]) -> list[int] | None:
    return native.submit_places(host.digester, list(map(kind_of, tensors)), [tensor.data_ptr() for tensor in tensors])


def test_one_tensor_to_a_few_have_the_digests_of_the_cpu_in_one_launch(host: OnHost, driver: Driver) -> None:
    block = random_bytes(20 * LEAF_BYTES)
    pieces = [block[5 : 5 + size] for size in (1, 1024, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES)]
    for count in range(1, FEW_TENSORS + 1):
        for start in range(len(pieces) - count + 1):
            given = pieces[start : start + count]
            tickets = submit(host, given)
            assert tickets is not None
            assert host.digester.resolve_many(tickets) == list(map(digest_tensor, given))
            leaves = sum(num_leaves(piece.nbytes) for piece in given)
            kernel = (ONE, leaves, 1, 1, 32, 1, 1, 0) if count == 1 else (FEW, leaves, 1, 1, 64, 1, 1, 7)
            assert driver.shapes.pop() == kernel
    assert host.kernels.num_launches == 0
    assert not driver.shapes


def test_a_ring_that_is_small_is_filled_again_and_again(host: OnHost, driver: Driver) -> None:
    tensors = [random_bytes(1 + 4001 * (seed % 9), seed) for seed in range(300)]
    tickets: list[int] = []
    for start in range(0, len(tensors), 3):
        tickets += submit(host, tensors[start : start + 3]) or []
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors))
    assert host.queue.num_sent > 10


def test_bits_are_those_of_the_moment(host: OnHost, driver: Driver) -> None:
    tensor = random_bytes(5000)
    before = digest_tensor(tensor)
    (ticket,) = submit(host, [tensor]) or [-1]
    tensor.add_(1)
    assert host.digester.resolve(ticket) == before != digest_tensor(tensor)


def test_both_halves_take_turns(host: OnHost, driver: Driver) -> None:
    tensors = [random_bytes(1 + 5003 * (seed % 7), seed) for seed in range(80)]
    tickets = []
    for number, tensor in enumerate(tensors):
        if number % 3:
            tickets += submit(host, [tensor]) or []
        else:
            tickets.append(host.digester.submit(tensor, kind_of(tensor)))
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors))
    assert host.kernels.num_launches and driver.shapes


def test_a_stream_beside_the_default_is_marked(host: OnHost, driver: Driver) -> None:
    host.queue.now = 2**63 + 9
    (ticket,) = submit(host, [random_bytes(100, 1)]) or [-1]
    assert list(host.queue.marks) == [2**63 + 9]
    assert host.digester.resolve(ticket) == digest_tensor(random_bytes(100, 1))


def refuse_capture(host: OnHost, driver: Driver) -> None:
    host.queue.capturing = True


def refuse_device(host: OnHost, driver: Driver) -> None:
    driver.device = DEVICE + 1


def refuse_launch(host: OnHost, driver: Driver) -> None:
    driver.answer = 700


@pytest.mark.parametrize("refuse", [refuse_capture, refuse_device, refuse_launch], ids=lambda make: make.__name__)
def test_what_cannot_be_launched_now_is_left_to_the_python(refuse: Any, host: OnHost, driver: Driver) -> None:
    tensor = random_bytes(3 * LEAF_BYTES)
    first = submit(host, [tensor])
    refuse(host, driver)
    assert submit(host, [tensor]) is None
    host.queue.capturing, driver.device, driver.answer = False, DEVICE, 0
    tickets = [*(first or []), host.digester.submit(tensor, kind_of(tensor)), *(submit(host, [tensor]) or [])]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)] * 3


def test_what_is_too_much_for_a_launch_empty_or_elsewhere_is_left_to_the_python(host: OnHost, driver: Driver) -> None:
    most = host.digester._launch_leaves * LEAF_BYTES
    fits, large, empty = random_bytes(most), random_bytes(most + 1), random_bytes(0)
    assert submit(host, [fits]) is not None
    assert submit(host, [large]) is None
    assert submit(host, [random_bytes(1), fits]) is None
    assert native.submit_places(host.digester, [kind_of(empty)], [1]) is None
    for place in (0, -1):
        assert native.submit_places(host.digester, [kind_of(fits)], [place]) is None
    host.digester._shortcut = None
    assert submit(host, [fits]) is None
    assert native.submit_places(HostDigester(), [kind_of(fits)], [1]) is None  # type: ignore[arg-type]
    assert len(driver.shapes) == 1


def test_arguments_that_are_none_are_refused(host: OnHost, driver: Driver) -> None:
    kind: Kind = ("uint8", (3,), 3)
    for kinds, places in (([], []), ([kind], []), ([kind] * 5, [1] * 5)):
        with pytest.raises(ValueError, match="as many places"):
            native.submit_places(host.digester, kinds, places)
    for wrong in (("uint8", 3), None, ("uint8", (3,), "3")):
        with pytest.raises(TypeError):
            native.submit_places(host.digester, [wrong], [1])  # type: ignore[list-item]
    for shortcut in ((), (1,) * 8, 3):
        host.digester._shortcut = shortcut  # type: ignore[assignment]
        with pytest.raises(TypeError, match="a Shortcut, not"):
            native.submit_places(host.digester, [kind], [1])


@pytest.mark.parametrize("piece", ["reserve", "flush", "mark"])
def test_a_mistake_in_the_middle_gives_the_lock_back(piece: str, host: OnHost, driver: Driver) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a planned mistake")

    host.queue.now = 5
    tensor = random_bytes(host.digester._flight_leaves * LEAF_BYTES)
    setattr(host.digester._ring, piece, fail)
    with pytest.raises(RuntimeError, match="a planned mistake"):
        submit(host, [tensor])
    free = threading.Event()

    def take() -> None:
        with host.digester._ring.lock:
            free.set()

    threading.Thread(target=take, daemon=True).start()
    assert free.wait(10)


def test_a_shortcut_is_taken_that_gives_the_digest(host: OnHost) -> None:
    driver = Driver(host)
    host.queue.writes.clear()
    host.digester.take_shortcut(driver.shortcut)
    assert host.digester._shortcut is driver.shortcut
    assert {shape[0] for shape in driver.shapes} == {ONE, FEW}


@pytest.mark.parametrize(("flips", "answer"), [(1, 0), (0, 1)])
def test_a_shortcut_is_not_taken_that_gives_another_or_none(flips: int, answer: int, host: OnHost) -> None:
    driver = Driver(host)
    driver.flips, driver.answer = flips, answer
    host.digester.take_shortcut(driver.shortcut)
    assert host.digester._shortcut is None
    assert driver.shapes
    host.digester.take_shortcut(None)
    assert host.digester._shortcut is None


def test_tickets_are_all_that_is_kept(host: OnHost, driver: Driver) -> None:
    tensor = random_bytes(100)
    kind = kind_of(tensor)
    kinds, places = [kind], [tensor.data_ptr()]

    def turn(count: int) -> None:
        for _ in range(count):
            host.digester.resolve_many(native.submit_places(host.digester, kinds, places) or [])

    turn(50)
    before = sys.getrefcount(kind), sys.getrefcount(driver.shortcut), sys.getrefcount(host.digester)
    turn(200)
    assert (sys.getrefcount(kind), sys.getrefcount(driver.shortcut), sys.getrefcount(host.digester)) == before
