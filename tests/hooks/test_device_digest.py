"""Digests in stream order: the ring, back-pressure, strides. On a stand-in for CUDA everywhere, on CUDA if there."""

from __future__ import annotations

import ctypes
import logging
import queue as queues
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bitcheck.digest import LEAF_BYTES, digest_bytes, digest_leaves, num_leaves
from bitcheck.errors import DigestError
from bitcheck.events import Kind
from bitcheck.hooks.device_digest import DeviceDigester, Digester, HostDigester, Wishes, open_digester
from bitcheck.hooks.kernels.cuda import CudaQueue
from bitcheck.hooks.kernels.layout import Runs, Transposed
from bitcheck.hooks.tensors import dtype_name

NOT_ON_A_DEVICE = ("q", "bits", "complex32", *(f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 8)))
DTYPES = sorted(
    {
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and not str(value).removeprefix("torch.").startswith(NOT_ON_A_DEVICE)
    },
    key=str,
)


def expected_digest(tensor: torch.Tensor) -> tuple[bytes, bytes]:
    """(digest, leaves) of a tensor's logical elements, gathered one by one by numpy's strides."""
    host = tensor.detach().cpu()
    size = host.itemsize
    storage = np.frombuffer(
        ctypes.string_at(host.untyped_storage().data_ptr(), host.untyped_storage().nbytes()), np.uint8
    )
    strides = tuple(stride * size for stride in host.stride())
    elements = np.lib.stride_tricks.as_strided(
        storage[host.storage_offset() * size :], (*host.shape, size), (*strides, 1)
    )
    data = np.frombuffer(elements.tobytes(), np.uint8)
    return digest_bytes(dtype_name(tensor), tuple(tensor.shape), data)


# --- a stand-in for CUDA: streams whose writes land late, a side stream that is a thread


class HostQueue(CudaQueue):
    """Streams of a device that is the host. What a launch writes appears when the side stream waited for its mark."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.now = 1
        self.capturing = False
        self.failed = False
        self.delay_s = 0.0
        self.writes: dict[int, list[Callable[[], None]]] = {}
        self.marks: dict[int, int] = {}
        self.waits: list[tuple[int, int]] = []
        """Which stream waited for which."""
        self.num_sent = 0
        self._jobs: queues.SimpleQueue[Callable[[], None]] = queues.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            time.sleep(self.delay_s)
            if not self.failed:
                job()

    def is_capturing(self) -> bool:
        return self.capturing

    def is_current(self) -> bool:
        return True

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((size,), 99, dtype=dtype)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def stream(self) -> int:
        return self.now

    def mark(self, stream: int) -> None:
        assert stream == self.now and self.needs_mark(stream)
        self.marks[stream] = len(self.writes.get(stream, ()))

    def _how_far(self, stream: int) -> int:
        return self.marks[stream] if self.needs_mark(stream) else len(self.writes.get(stream, ()))

    def wait_for(self, stream: int) -> None:
        assert self._how_far(stream) == len(self.writes[stream])  # none of what uses the scratch buffer comes after it
        self.waits.append((self.now, stream))

    def send(self, streams: Iterable[int], copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        marks = {stream: self._how_far(stream) for stream in streams}
        self.num_sent += 1

        def run() -> None:
            for stream, mark in marks.items():
                for index in range(mark):
                    self.writes[stream][index]()
            for target, source in copies:
                target.copy_(source)

        self._jobs.put(run)

    def synchronize(self) -> None:
        pass

    def ask(self) -> None:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


class HostKernels:
    """Reads memory at the launch, as a stream in order would; writes once the side stream asks for it."""

    def __init__(self, queue: HostQueue) -> None:
        self._queue = queue
        self.num_launches = 0
        self.num_copies = 0

    def _write(self, stream: int, address: int, data: bytes) -> None:
        done = threading.Event()

        def write() -> None:
            if not done.is_set():
                ctypes.memmove(address, data, len(data))
                done.set()

        self._queue.writes.setdefault(stream, []).append(write)
        self.num_launches += 1

    def hash_one(self, address: int, num_bytes: int, out_address: int, stream: int) -> None:
        self._write(stream, out_address, digest_leaves(np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)))

    def hash_few(
        self, addresses: Sequence[int], sizes: Sequence[int], counts: Sequence[int], out_address: int, stream: int
    ) -> None:
        found = b""
        for address, num_bytes, count in zip(addresses, sizes, counts, strict=True):
            found += digest_leaves(np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8))
            assert count == num_leaves(num_bytes)
        self._write(stream, out_address, found)

    def hash_table(self, table_address: int, num_tensors: int, leaves: int, out_address: int, stream: int) -> None:
        table = np.frombuffer(ctypes.string_at(table_address, 24 * num_tensors), np.int64).reshape(3, num_tensors)
        found = b""
        for address, num_bytes, first in table.T.tolist():
            assert first == len(found) // 16
            found += digest_leaves(np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8))
        assert len(found) == 16 * leaves
        self._write(stream, out_address, found)

    def transpose(self, address: int, itemsize: int, found: Transposed, out_address: int, stream: int) -> None:
        self._copy(address, itemsize, found.shape, (found.strides[0], 1, found.strides[1]), out_address)

    def join_runs(self, address: int, itemsize: int, found: Runs, out_address: int, stream: int) -> None:
        self._copy(address, itemsize, found.shape, (*found.strides, 1), out_address)

    def _copy(
        self, address: int, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], out_address: int
    ) -> None:
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        memory = np.frombuffer(ctypes.string_at(address, span * itemsize), f"u{itemsize}")
        steps = tuple(stride * itemsize for stride in strides)
        data = np.lib.stride_tricks.as_strided(memory, shape, steps).tobytes()
        ctypes.memmove(out_address, data, len(data))
        self.num_copies += 1


class OnHost:
    """A digester over the stand-in, small enough to be filled."""

    def __init__(
        self, ring_leaves: int = 64, scratch_bytes: int = 3 * LEAF_BYTES, wishes: Wishes | None = None
    ) -> None:
        self.queue = HostQueue()
        self.kernels = HostKernels(self.queue)
        self.digester = DeviceDigester(self.queue, self.kernels, ring_leaves, scratch_bytes, wishes or Wishes())


@pytest.fixture
def host() -> OnHost:
    return OnHost()


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def test_tensors_of_all_kinds_in_one_launch_have_the_digests_of_the_cpu(host: OnHost) -> None:
    tensors = [
        torch.arange(10, dtype=torch.int16),
        random_bytes(LEAF_BYTES + 5),
        torch.empty(0, 3),
        torch.tensor(1.5),
        random_bytes(48)[3:44],
        torch.randn(5, 7, dtype=torch.float64),
    ]
    tickets = host.digester.submit_many(tensors)
    assert host.kernels.num_launches == 1
    assert [host.digester.resolve(ticket) for ticket in tickets] == [expected_digest(tensor) for tensor in tensors]


def test_a_few_tensors_share_a_flight(host: OnHost) -> None:
    tensors = [random_bytes(LEAF_BYTES * seed + 1, seed) for seed in range(3)]
    tickets = host.digester.submit_many(tensors)
    host.digester.flush()
    assert host.queue.num_sent == 1
    assert [host.digester.resolve(ticket) for ticket in tickets] == [expected_digest(tensor) for tensor in tensors]


def kind_of(tensor: torch.Tensor) -> Kind:
    return dtype_name(tensor), tuple(tensor.shape), tensor.nbytes


def single_tensors() -> list[torch.Tensor]:
    """What the short way takes, and what it leaves to the long one."""
    block = random_bytes(20 * LEAF_BYTES)
    return [
        random_bytes(LEAF_BYTES),
        random_bytes(3 * LEAF_BYTES + 5)[3:],
        torch.tensor(1.5),
        torch.empty(0, 3),
        block.view(20, -1).t(),
        (torch.arange(8) * (1 - 2j)).conj(),
        block,  # of more leaves than the small ring takes in one launch
    ]


@pytest.mark.parametrize("number", range(len(single_tensors())))
def test_one_tensor_taken_the_short_way_has_the_digest_of_the_cpu(host: OnHost, number: int) -> None:
    tensor = single_tensors()[number]
    ticket = host.digester.submit(tensor, kind_of(tensor))
    assert host.digester.resolve(ticket) == expected_digest(tensor.resolve_conj())


def test_one_tensor_after_the_other_goes_round_the_ring(host: OnHost) -> None:
    tensors = [random_bytes(LEAF_BYTES * (seed % 5) + 1, seed) for seed in range(100)]
    tickets = [host.digester.submit(tensor, kind_of(tensor)) for tensor in tensors]
    assert host.queue.num_sent > 3
    assert [host.digester.resolve(ticket) for ticket in tickets] == [expected_digest(tensor) for tensor in tensors]


def test_what_a_tensor_becomes_after_it_was_submitted_does_not_count(host: OnHost) -> None:
    tensor = random_bytes(1000)
    expected = expected_digest(tensor)
    (ticket,) = host.digester.submit_many([tensor])
    tensor.zero_()
    assert host.digester.resolve(ticket) == expected


def test_a_full_ring_waits_and_loses_nothing(host: OnHost) -> None:
    tensors = [random_bytes(LEAF_BYTES * (1 + seed % 5) - seed, seed) for seed in range(100)]
    tickets = [host.digester.submit_many(tensors[start : start + 1 + start % 3]) for start in range(0, 100, 3)]
    assert host.queue.num_sent > 3  # the ring, of 64 leaves, went round though nobody resolved a ticket
    for start, row in zip(range(0, 100, 3), tickets, strict=True):
        for tensor, ticket in zip(tensors[start:], row, strict=False):
            assert host.digester.resolve(ticket) == expected_digest(tensor)


def test_leaf_digests_that_nobody_keeps_are_dropped_as_they_arrive_and_the_digest_is_whole() -> None:
    host = OnHost(wishes=Wishes(leaf_limit_bytes=lambda: 2 * LEAF_BYTES))
    tensors = [random_bytes(2 * LEAF_BYTES), random_bytes(2 * LEAF_BYTES + 1), random_bytes(100 * LEAF_BYTES)]
    tickets = host.digester.submit_many(tensors)
    expected = [expected_digest(tensor) for tensor in tensors]
    assert [host.digester.resolve(ticket) for ticket in tickets] == [
        expected[0],
        (expected[1][0], b""),
        (expected[2][0], b""),  # of more leaves than the ring has: it came in several flights
    ]


def test_another_thread_takes_what_departs_so_that_the_training_thread_lands_nothing() -> None:
    lands: list[Callable[[], None]] = []
    host = OnHost(wishes=Wishes(on_departure=lands.append))
    tensors = [random_bytes(LEAF_BYTES, seed) for seed in range(100)]
    tickets = []
    for tensor in tensors:
        tickets += host.digester.submit_many([tensor])
        while lands:
            writer = threading.Thread(target=lands.pop())
            writer.start()
            writer.join()
    host.digester.flush()
    assert len(lands) == 1
    lands.pop()()
    host.queue.failed = True  # nothing lands any more: all is here already
    assert [host.digester.resolve(ticket) for ticket in tickets] == [expected_digest(tensor) for tensor in tensors]


def test_a_flight_ends_where_the_ring_does(host: OnHost) -> None:
    tensors = [random_bytes(4 * LEAF_BYTES, seed) for seed in range(18)]
    tickets = []
    for index, tensor in enumerate(tensors):
        tickets += host.digester.submit_many([tensor])
        if index == 0:  # from here on each flight takes two tensors, so that one of them would reach over the end
            host.digester.flush()
        if index == 12:  # room at the ring's beginning: nothing else sends the flight at its end off
            host.digester.resolve(tickets[12])
    rest = [number for number in range(len(tensors)) if number != 12]
    assert [host.digester.resolve(tickets[n]) for n in rest] == [expected_digest(tensors[n]) for n in rest]


def test_a_flight_never_leaves_before_the_launches_that_fill_it(host: OnHost) -> None:
    # More leaves than a launch takes: the first launches' flight leaves while later ones are still to come.
    tensor = random_bytes(150 * LEAF_BYTES)
    (ticket,) = host.digester.submit_many([tensor])
    assert host.kernels.num_launches > 2
    assert host.digester.resolve(ticket) == expected_digest(tensor)


def test_streams_do_not_disturb_each_other(host: OnHost) -> None:
    tensors = [random_bytes(700 + seed, seed) for seed in range(20)]
    tickets = []
    for seed, tensor in enumerate(tensors):
        host.queue.now = 1 + seed % 3
        tickets += host.digester.submit_many([tensor, tensor.view(-1, 1)[::2]])
    resolved = [host.digester.resolve(ticket) for ticket in tickets]
    assert resolved[::2] == [expected_digest(tensor) for tensor in tensors]
    assert resolved[1::2] == [expected_digest(tensor.view(-1, 1)[::2]) for tensor in tensors]


def test_tickets_may_be_resolved_in_any_order_and_each_once(host: OnHost) -> None:
    tensors = [random_bytes(2000 + seed, seed) for seed in range(30)]
    tickets = []
    for tensor in tensors:
        tickets += host.digester.submit_many([tensor])
        host.digester.flush()
    for ticket, tensor in reversed(list(zip(tickets, tensors, strict=True))):
        assert host.digester.resolve(ticket) == expected_digest(tensor)
        with pytest.raises(KeyError):
            host.digester.resolve(ticket)


def test_a_writer_resolves_while_the_training_submits(host: OnHost) -> None:
    tensors = [random_bytes(3 * LEAF_BYTES + seed, seed) for seed in range(60)]
    handed: queues.SimpleQueue[object] = queues.SimpleQueue()
    found: list[object] = []

    def write() -> None:
        while (ticket := handed.get()) is not None:
            found.append(host.digester.resolve(ticket))  # type: ignore[attr-defined]

    thread = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # many more ways for the two to meet
    try:
        thread.start()
        for tensor in tensors:
            handed.put(host.digester.submit_many([tensor])[0])
        handed.put(None)
        thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected_digest(tensor) for tensor in tensors]


def strided_tensors() -> dict[str, torch.Tensor]:
    base = random_bytes(200_000, 5)
    return {
        "transposed": base[:60_000].view(torch.int16).view(300, 100).t(),
        "transposed, larger than the scratch buffer": base[:180_000].view(torch.int32).view(300, 150).t(),
        "transposed batch": base[:72_000].view(torch.int16).view(9, 50, 80).transpose(1, 2),
        "rows of another tensor": base[:160_000].view(400, 400)[:, 3:150],
        "heads": base[:98_304].view(torch.bfloat16).view(2, 64, 3, 8, 16)[:, :, 1].transpose(1, 2),
        "heads of an odd width": base[:129_024].view(torch.bfloat16).view(2, 64, 3, 8, 21)[:, :, 1].transpose(1, 2),
        "every third byte": base[1::3],
        "permuted": base[:120_000].view(torch.int64).view(10, 5, 6, 50).permute(3, 0, 2, 1),
        "expanded": base[:8].view(torch.float32)[:1].expand(30_000),
        "expanded rows": base[:400].view(torch.int32).view(1, 100).expand(300, 100),
        "channels last": base[:96_000].view(torch.int16).view(4, 20, 30, 20).permute(0, 3, 1, 2),
        "complex double": base[:160_000].view(torch.complex128).view(100, 100).t(),
        "fp8": base[:100_000].view(torch.float8_e4m3fn).view(250, 400).t(),
        "bool": (base[:100_000] > 99).view(250, 400).t(),
        "one long row a step": base[:150_000].view(2, 75_000).t()[:60_000].t(),
    }  # fmt: skip


@pytest.mark.parametrize("name", strided_tensors())
def test_a_tensor_of_any_strides_has_the_digest_of_its_row_major_order(host: OnHost, name: str) -> None:
    tensor = strided_tensors()[name]
    (ticket,) = host.digester.submit_many([tensor])
    assert host.digester.resolve(ticket) == expected_digest(tensor)


@pytest.mark.parametrize(
    ("name", "is_frequent"),
    [("transposed", True), ("heads", True), ("rows of another tensor", True), ("every third byte", False)],
)
def test_a_frequent_arrangement_is_copied_by_a_kernel(host: OnHost, name: str, is_frequent: bool) -> None:
    host.digester.submit_many([strided_tensors()[name]])
    assert (host.kernels.num_copies > 0) is is_frequent


def test_tensors_of_any_strides_and_others_share_a_batch(host: OnHost) -> None:
    tensors = [random_bytes(100), *strided_tensors().values(), random_bytes(LEAF_BYTES)]
    tickets = host.digester.submit_many(tensors)
    assert [host.digester.resolve(ticket) for ticket in tickets] == [expected_digest(tensor) for tensor in tensors]


def test_small_tensors_of_any_strides_share_one_launch() -> None:
    host = OnHost(ring_leaves=1024)
    tensors = [random_bytes(3 * 50 * (1 + seed), seed).view(-1, 3).t()[:, 1:] for seed in range(20)]
    tickets = host.digester.submit_many([*tensors, random_bytes(100)])
    assert host.kernels.num_launches == 1
    assert [host.digester.resolve(ticket) for ticket in tickets[:-1]] == [expected_digest(tensor) for tensor in tensors]


def test_the_scratch_buffer_passes_from_stream_to_stream_in_order(host: OnHost) -> None:
    transposed = random_bytes(900).view(30, 30).t()
    tickets = []
    for stream in (1, 1, 2, 1, 1, 0, 0, 2):
        host.queue.now = stream
        tickets += host.digester.submit_many([transposed])
    assert host.queue.waits == [(2, 1), (1, 2), (0, 1), (2, 0)]
    assert host.digester.resolve_many(tickets) == [expected_digest(transposed)] * len(tickets)


def test_a_conjugate_counts_as_the_values_that_it_stands_for(host: OnHost) -> None:
    tensor = torch.randn(40, 3, dtype=torch.complex64)
    (ticket,) = host.digester.submit_many([tensor.conj()])
    assert host.digester.resolve(ticket) == expected_digest(tensor.conj().resolve_conj())


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]),
    data=st.data(),
)
def test_any_view_has_the_digest_of_the_cpu(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    step = data.draw(st.integers(1, 3))
    count = int(np.prod(shape))
    tensor = random_bytes(count * dtype.itemsize, count).view(dtype).view(shape).permute(order)[::step]
    (ticket,) = SHARED.digester.submit_many([tensor])
    assert SHARED.digester.resolve(ticket) == expected_digest(tensor)


SHARED = OnHost(ring_leaves=512, scratch_bytes=4 * LEAF_BYTES)


class SeenOperators(TorchDispatchMode):
    """Notes every operator that reaches a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_of_the_program_sees_the_digester_at_work(host: OnHost) -> None:
    tensors = [random_bytes(100 + seed, seed) for seed in range(8)]
    strided = [random_bytes(900).view(30, 30).t(), random_bytes(1000).view(10, 10, 10)[:, :, 1:]]
    with SeenOperators() as seen:
        tickets = host.digester.submit_many([*tensors, *strided])
        host.digester.flush()
    assert seen.names == []
    assert [host.digester.resolve(ticket) for ticket in tickets] == [
        expected_digest(tensor) for tensor in [*tensors, *strided]
    ]


# --- what cannot be digested


def test_a_freed_storage_is_refused_and_nothing_of_its_batch_is_captured(host: OnHost) -> None:
    freed = torch.randn(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(DigestError, match="is freed or too small"):
        host.digester.check(freed)
    with pytest.raises(DigestError, match="is freed or too small"):
        host.digester.submit_many([random_bytes(100), freed])
    with pytest.raises(DigestError, match="is freed or too small"):
        host.digester.submit(freed, kind_of(freed))
    assert host.kernels.num_launches == 0


def test_nothing_is_launched_into_a_graph_that_is_being_captured(host: OnHost) -> None:
    host.queue.capturing = True
    with pytest.raises(DigestError, match="is being captured"):
        host.digester.check(random_bytes(4))
    with pytest.raises(DigestError, match="is being captured"):
        host.digester.submit_many([random_bytes(4)])
    with pytest.raises(DigestError, match="is being captured"):
        host.digester.submit(random_bytes(4), ("uint8", (4,), 4))
    assert host.kernels.num_launches == 0


def test_a_device_that_failed_is_told_instead_of_waited_for(host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitcheck.hooks.kernels.ring._STALL_S", 0.05)
    (ticket,) = host.digester.submit_many([random_bytes(100)])
    host.queue.failed = True
    for _ in range(2):
        with pytest.raises(
            DigestError, match="failed before its digests reached the host: CUDA error: an illegal memory"
        ):
            host.digester.resolve(ticket)


def test_a_slow_device_is_waited_for(host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitcheck.hooks.kernels.ring._STALL_S", 0.01)
    host.queue.delay_s = 0.1
    tensor = random_bytes(100)
    (ticket,) = host.digester.submit_many([tensor])
    assert host.digester.resolve(ticket) == expected_digest(tensor)


def test_without_triton_the_cpu_digests_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("launch", "xxh3", "transpose"):
        monkeypatch.delitem(sys.modules, f"bitcheck.hooks.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "bitcheck"):
        digester = open_digester(torch.device("cuda", 0))
    assert isinstance(digester, HostDigester)
    assert [record.getMessage() for record in caplog.records] == [
        "tensors of cuda:0 are digested on the CPU, which is exact but slower: Triton is not installed"
    ]
    tensor = torch.randn(30, 4).t()
    assert digester.resolve(digester.submit_many([tensor])[0]) == expected_digest(tensor)


# --- on a CUDA device


@pytest.fixture(scope="module")
def cuda() -> Digester:
    digester = open_digester(torch.device("cuda", 0))
    assert isinstance(digester, DeviceDigester)
    return digester


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 1023, 4096, 40_000])
def test_cuda_every_dtype_has_the_digest_of_the_cpu(cuda: Digester, dtype: torch.dtype, count: int) -> None:
    tensor = random_bytes(count * dtype.itemsize, count).cuda()
    tensor = (tensor & 1).view(dtype) if dtype is torch.bool else tensor.view(dtype)
    tickets = cuda.submit_many([tensor, tensor[1:]])
    assert [cuda.resolve(ticket) for ticket in tickets] == [expected_digest(tensor), expected_digest(tensor[1:])]


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(single_tensors())))
def test_cuda_one_tensor_taken_the_short_way_has_the_digest_of_the_cpu(cuda: Digester, number: int) -> None:
    tensor = single_tensors()[number].cuda()
    ticket = cuda.submit(tensor, kind_of(tensor))
    tensor.resolve_conj().fill_(0)  # later in the stream
    assert cuda.resolve(ticket) == expected_digest(single_tensors()[number].resolve_conj())


@pytest.mark.gpu
@pytest.mark.parametrize("name", strided_tensors())
def test_cuda_a_tensor_of_any_strides_has_the_digest_of_its_row_major_order(cuda: Digester, name: str) -> None:
    host = strided_tensors()[name]
    storage = torch.empty(0, dtype=host.dtype).set_(host.untyped_storage()).cuda()  # type: ignore[call-overload]
    tensor = storage.as_strided(host.shape, host.stride(), host.storage_offset())
    (ticket,) = cuda.submit_many([tensor])
    assert cuda.resolve(ticket) == expected_digest(host)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_cuda_large_transposed_weights_pass_through_the_scratch_buffer_in_pieces(
    cuda: Digester, dtype: torch.dtype
) -> None:
    count = 100_000_000 // dtype.itemsize
    tensor = random_bytes(count // 5000 * 5000 * dtype.itemsize).cuda().view(dtype).view(-1, 5000).t()
    (ticket,) = cuda.submit_many([tensor])
    data = tensor.contiguous().view(torch.uint8).view(-1).cpu().numpy()
    assert cuda.resolve(ticket) == digest_bytes(dtype_name(tensor), tuple(tensor.shape), data)


@pytest.mark.gpu
def test_cuda_thousands_of_tensors_of_random_sizes_and_addresses(cuda: Digester) -> None:
    random = np.random.default_rng(3)
    data = random_bytes(20_000_000, 3)
    room = data.cuda()
    slices = []
    for _ in range(20_000):
        start = int(random.integers(0, 19_000_000))
        slices.append(
            (start, start + int(random.choice([1, 8, 100, 1024, 5000, 16384, 70_000]) + random.integers(0, 9)))
        )
    tickets = cuda.submit_many([room[first:last] for first, last in slices])
    host = data.numpy()
    for (first, last), ticket in zip(slices, tickets, strict=True):
        assert cuda.resolve(ticket) == digest_bytes("uint8", (last - first,), host[first:last])


@pytest.mark.gpu
def test_cuda_overwritten_and_freed_right_after_the_submit_it_is_the_bits_before_that_count(cuda: Digester) -> None:
    expected, tickets = [], []
    handed_on = 0
    for seed in range(50):
        host = random_bytes(3_000_000, seed)
        expected.append(expected_digest(host))
        tensor = host.cuda()
        tickets += cuda.submit_many([tensor])
        if seed % 2:
            tensor.zero_()
        else:
            address = tensor.data_ptr()
            del tensor
            others = [torch.full((3_000_000,), 7, dtype=torch.uint8, device="cuda") for _ in range(3)]
            handed_on += address in [other.data_ptr() for other in others]
    assert handed_on > 10  # the allocator gave the memory to somebody else at once
    assert [cuda.resolve(ticket) for ticket in tickets] == expected


@pytest.mark.gpu
def test_cuda_the_training_thread_does_not_wait_for_the_device(cuda: Digester) -> None:
    tensors = [torch.randn(1000, 1000, device="cuda") for _ in range(20)]
    cuda.resolve(cuda.submit_many([*tensors, tensors[0].t()])[0])  # whatever is compiled late is compiled
    torch.cuda.synchronize()
    torch.cuda._sleep(1_500_000_000)
    start = time.monotonic()
    tickets = [*cuda.submit_many(tensors), *cuda.submit_many(tensors[:1]), *cuda.submit_many([tensors[0].t()])]
    cuda.flush()
    submitted = time.monotonic() - start
    torch.cuda.synchronize()
    assert time.monotonic() - start > 0.5
    assert submitted < 0.1
    assert cuda.resolve(tickets[0]) == cuda.resolve(tickets[20]) == expected_digest(tensors[0])
    assert cuda.resolve(tickets[21]) == expected_digest(tensors[0].t())


@pytest.mark.gpu
def test_cuda_each_stream_is_taken_in_its_own_order(cuda: Digester) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    tickets, expected = [], []
    torch.cuda.synchronize()
    tensors = [torch.zeros(256, 1024, dtype=torch.int32, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    for turn in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000 * ((index + turn) % 3))
                tensors[index].fill_(100 * index + turn)
                tickets += cuda.submit_many([tensors[index], tensors[index].t()])
                tensors[index].fill_(-1)
            value = torch.full((256, 1024), 100 * index + turn, dtype=torch.int32)
            expected += [expected_digest(value), expected_digest(value.t())]
    assert [cuda.resolve(ticket) for ticket in tickets] == expected


@pytest.mark.gpu
def test_cuda_a_small_ring_under_load_loses_nothing() -> None:
    from bitcheck.hooks.kernels.launch import LeafKernels

    queue = CudaQueue(torch.device("cuda", 0))
    digester = DeviceDigester(queue, LeafKernels(queue.device), ring_leaves=1024, scratch_bytes=1 << 20)
    hosts = [random_bytes(1_000_000 + 7 * seed, seed) for seed in range(20)]
    tensors = [host.cuda() for host in hosts]
    tickets = [ticket for turn in range(30) for ticket in digester.submit_many(tensors[turn % 20 :])]
    expected = [expected_digest(host) for host in hosts]
    assert [digester.resolve(ticket) for ticket in tickets] == [
        digest for turn in range(30) for digest in expected[turn % 20 :]
    ]


@pytest.mark.gpu
def test_cuda_a_capture_is_refused_and_not_disturbed_by_who_waits_for_digests(cuda: Digester) -> None:
    tensor = torch.randn(1000, device="cuda")
    cuda.resolve(cuda.submit_many([tensor])[0])
    (ticket,) = cuda.submit_many([tensor])
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(cuda.resolve(ticket)))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        doubled = tensor * 2
        with pytest.raises(DigestError, match="is being captured"):
            cuda.submit_many([doubled])
        thread.start()
        thread.join(10)
    graph.replay()
    assert found == [expected_digest(tensor)]
    assert cuda.resolve(cuda.submit_many([doubled])[0]) == expected_digest(tensor * 2)


@pytest.mark.gpu
def test_cuda_nothing_that_the_program_sees_has_changed(cuda: Digester) -> None:
    tensors = [torch.randn(500, 300, device="cuda", requires_grad=True), torch.randn(64, 128, device="cuda").t()]
    torch.cuda.synchronize()
    state = torch.cuda.get_rng_state()
    allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    stream, versions = torch.cuda.current_stream(), [tensor._version for tensor in tensors]
    tickets = cuda.submit_many(tensors)
    cuda.flush()
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (allocated, peak)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert [tensor._version for tensor in tensors] == versions
    assert all(tensor.grad_fn is None for tensor in tensors[:1])
    assert [cuda.resolve(ticket) for ticket in tickets] == [expected_digest(tensor) for tensor in tensors]


@pytest.mark.gpu
def test_cuda_another_triton_is_launched_the_public_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitcheck.hooks.kernels import launch

    def of_another_triton(kernel: object) -> object:
        raise AttributeError("no such thing inside")

    monkeypatch.setattr(launch, "launcher", of_another_triton)
    digester = open_digester(torch.device("cuda", 0))
    assert isinstance(digester, DeviceDigester)
    tensors = [*(random_bytes(1000 + seed, seed).cuda() for seed in range(9)), torch.randn(64, 32, device="cuda").t()]
    tickets = [*digester.submit_many(tensors), *digester.submit_many(tensors[9:])]
    assert [digester.resolve(ticket) for ticket in tickets] == [expected_digest(t) for t in [*tensors, tensors[9]]]


@pytest.mark.gpu
def test_cuda_a_kernel_that_miscomputes_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bitcheck.hooks.kernels import launch

    words = list(launch.SECRET_WORDS)
    words[24] ^= 1  # the last stripe's key
    monkeypatch.setattr(launch, "SECRET_WORDS", words)
    with caplog.at_level(logging.WARNING, "bitcheck"):
        digester = open_digester(torch.device("cuda", 0))
    assert isinstance(digester, HostDigester)
    assert "gives other leaf digests on this device than xxhash on the CPU" in caplog.text
    tensor = torch.randn(30, 4, device="cuda").t()
    assert digester.resolve(digester.submit_many([tensor])[0]) == expected_digest(tensor)


@pytest.mark.gpu
def test_cuda_a_device_that_is_not_the_current_one_has_its_own_digester() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    first, second = (open_digester(torch.device("cuda", index)) for index in range(2))
    assert isinstance(second, DeviceDigester)
    host = random_bytes(3_000_000)
    tensor = host.to("cuda:1")
    strided = tensor.view(3000, 1000).t()
    tickets = [*second.submit_many([tensor, strided]), *first.submit_many([host.to("cuda:0")])]
    with torch.cuda.device(1):
        torch.cuda.current_stream().synchronize()
        tickets += second.submit_many([tensor])
    assert torch.cuda.current_device() == 0
    expected = [expected_digest(host), expected_digest(strided), expected_digest(host), expected_digest(host)]
    owners = [second, second, first, second]
    assert [owner.resolve(ticket) for owner, ticket in zip(owners, tickets, strict=True)] == expected


@pytest.mark.gpu
def test_cuda_its_memory_is_within_what_recording_may_take() -> None:
    before = torch.cuda.memory_reserved()
    digester = open_digester(torch.device("cuda", 0))
    assert torch.cuda.memory_reserved() - before <= 256 * 2**20
    del digester
