"""The compiled half launches as the Python does: a stand-in for CUDA's driver reads what it was given."""

from __future__ import annotations

import ast
import ctypes
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitcheck.digest import LEAF_BYTES, digest_leaves, num_leaves
from bitcheck.events import Kind
from bitcheck.hooks.device_digest import HostDigester
from bitcheck.hooks.kernels.layout import FEW_TENSORS, arrangement
from bitcheck.hooks.kernels.ring import Ring
from bitcheck.hooks.kernels.shortcut import CopyKernel, Kernel, Shortcut, copy_key
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
_PARAMETERS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64}
_SOURCE = Path(__file__).parents[2] / "hooks/kernels/row_major.py"


def parameters_of(kernel: str) -> dict[str, Any]:
    """Return the types of a copying kernel's parameters as its source names them: importing it needs triton."""
    (found,) = (
        part
        for part in ast.parse(_SOURCE.read_text()).body
        if isinstance(part, ast.FunctionDef) and part.name == kernel
    )
    types = {
        parameter.arg: ast.unparse(parameter.annotation or found).removeprefix("tl.") for parameter in found.args.args
    }
    return {name: _PARAMETERS[text] for name, text in types.items() if text != "constexpr"}


def memory_at(address: int, words: int, word_bytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_uint8 * (words * word_bytes)).from_address(address), f"u{word_bytes}")


class Driver:
    """cuLaunchKernel on the host: reads memory at the launch, as a stream in order would."""

    def __init__(self, host: OnHost) -> None:
        self.host = host
        self.answer = 0
        self.flips = 0
        """A bit to flip in what is written, as a kernel would that miscomputes."""
        self.shapes: list[tuple[int, ...]] = []
        self.device = DEVICE
        self.answers: dict[int, int] = {}
        """What a kernel's launch gives, where it is not `answer`."""
        self._compiled: dict[int, tuple[bool, int, bool, int]] = {}
        self._callback = _LAUNCH(self._launch)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        assert address is not None
        queue = host.queue
        self.shortcut = Shortcut(
            address, Kernel(ONE, 32, 0), Kernel(FEW, 64, 7), {}, SECRET, DEVICE,
            queue.is_capturing, lambda: self.device, lambda device: queue.now if device == DEVICE else -1,
        )  # fmt: skip

    def compile(self, is_transpose: bool, word_bytes: int, is_aligned: bool, block: int) -> int:
        """Do as `LeafKernels` where it compiles a kernel that copies; return the kernel's handle."""
        key = copy_key(is_transpose, word_bytes, is_aligned)
        function = 2**62 + len(self._compiled)
        self._compiled[function] = is_transpose, word_bytes, is_aligned, block
        self.shortcut.copies[key] = CopyKernel(function, 128, 40 + key, block)
        return function

    def _copy(self, function: int, shape: list[int], parameters: Any) -> None:
        is_transpose, word_bytes, is_aligned, block = self._compiled[function]
        types = parameters_of("transpose_kernel" if is_transpose else "runs_kernel")
        given = {name: kind.from_address(parameters[index]).value for index, (name, kind) in enumerate(types.items())}
        address, out_address = given["address"], given["out_address"]
        assert shape[3:] == [128, 1, 1, 40 + copy_key(is_transpose, word_bytes, is_aligned)]
        assert address % word_bytes == out_address % word_bytes == 0
        if is_transpose:
            from_words, to_words = self._transposed(given, shape, block, is_aligned)
        else:
            from_words, to_words = self._runs(given, shape, block)
        words = memory_at(address, int(from_words.max()) + 1, word_bytes)
        memory_at(out_address, int(to_words.max()) + 1, word_bytes)[to_words] = words[from_words]

    @staticmethod
    def _transposed(given: dict[str, int], shape: list[int], tile: int, is_aligned: bool) -> Any:
        rows, columns = given["num_rows"], given["num_columns"]
        if is_aligned:  # what the kernel is compiled for holds
            assert not (given["address"] | given["out_address"] | rows | columns) % 16
            assert not (given["stride_b"] | given["stride_c"]) % 16
        tiles = -(-columns // tile)
        batch, program, r, c = np.ogrid[: shape[1], : shape[0], :tile, :tile]
        row, column = program // tiles * tile + r, program % tiles * tile + c
        is_there = np.broadcast_to((row < rows) & (column < columns), (shape[1], shape[0], tile, tile))
        from_words = batch * given["stride_b"] + row + column * given["stride_c"]
        return from_words[is_there], (batch * rows * columns + row * columns + column)[is_there]

    @staticmethod
    def _runs(given: dict[str, int], shape: list[int], block: int) -> Any:
        assert shape[1] == 1
        at = np.arange(shape[0] * block)
        at = at[at < given["num_words"]]
        run, place = at // given["length"], at % given["length"]
        group, c = run // given["num_runs"], run % given["num_runs"]
        a, b = group // given["num_groups"], group % given["num_groups"]
        return place + c * given["stride_c"] + b * given["stride_b"] + a * given["stride_a"], at

    def _launch(self, function: int, *rest: Any) -> int:
        *shape, stream, parameters, extra = rest
        self.shapes.append((function, *shape))
        if answer := self.answers.get(function, self.answer):
            return answer
        if function in self._compiled:
            assert (shape[2], stream or 0, bool(extra)) == (1, self.host.queue.now, False)
            self._copy(function, shape, parameters)
            return 0
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
    return native.submit_tensors(host.digester, tensors, list(map(kind_of, tensors)))


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
        host.digester._shortcut = driver.shortcut if number % 3 else None
        tickets.append(host.digester.submit(tensor, kind_of(tensor)))
    assert (host.kernels.num_launches, len(driver.shapes)) == (27, 53)
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors))


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
    assert submit(host, [empty]) is None
    assert submit(host, [random_bytes(1), empty]) is None
    gone = random_bytes(100).clone()
    kind = kind_of(gone)
    gone.untyped_storage().resize_(0)
    assert native.submit_tensors(host.digester, [gone], [kind]) is None
    host.digester._shortcut = None
    assert submit(host, [fits]) is None
    assert native.submit_tensors(HostDigester(), [fits], [kind_of(fits)]) is None  # type: ignore[arg-type]
    assert len(driver.shapes) == 1


def test_arguments_that_are_none_are_refused(host: OnHost, driver: Driver) -> None:
    kind: Kind = ("uint8", (3,), 3)
    tensor = random_bytes(3)
    for kinds, tensors in (([], []), ([kind], []), ([kind] * 5, [tensor] * 5)):
        with pytest.raises(ValueError, match="as many kinds"):
            native.submit_tensors(host.digester, tensors, kinds)
    for wrong in (("uint8", 3), None, ("uint8", (3,), "3")):
        with pytest.raises(TypeError):
            native.submit_tensors(host.digester, [tensor], [wrong])  # type: ignore[list-item]
    with pytest.raises(AttributeError):
        native.submit_tensors(host.digester, [None], [kind])  # type: ignore[list-item]
    for shortcut in ((), (1,) * 10, 3, driver.shortcut._replace(copies=None)):  # type: ignore[arg-type]
        host.digester._shortcut = shortcut  # type: ignore[assignment]
        with pytest.raises(TypeError, match="a Shortcut, not"):
            native.submit_tensors(host.digester, [tensor], [kind])


@pytest.mark.parametrize("piece", ["reserve", "flush", "mark"])
def test_a_mistake_in_the_middle_gives_the_lock_back(
    piece: str, host: OnHost, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a planned mistake")

    host.queue.now = 5
    tensor = random_bytes(host.digester._flight_leaves * LEAF_BYTES)
    monkeypatch.setattr(Ring, piece, fail)
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
    strided = tensor.view(10, 10).t()
    driver.compile(True, 1, False, 8)
    copying = next(iter(driver.shortcut.copies.values()))
    tensors, kinds = [tensor, strided], [kind, kind_of(strided)]
    held = kind, driver.shortcut, host.digester, tensor, strided, copying, arrangement(strided.shape, strided.stride())

    def turn(count: int) -> None:
        for _ in range(count):
            tickets = native.submit_tensors(host.digester, tensors, kinds)
            assert tickets is not None
            host.digester.resolve_many(tickets)

    turn(50)
    before = list(map(sys.getrefcount, held))
    turn(200)
    assert list(map(sys.getrefcount, held)) == before
