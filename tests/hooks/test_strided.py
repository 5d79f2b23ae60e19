"""The compiled half brings strided tensors to row-major order as the Python does, once their kernel is compiled."""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import pytest
import torch

from bitcheck.digest import LEAF_BYTES
from bitcheck.events import Phase, Site, StepKind
from bitcheck.hooks.device_digest import DeviceDigester, Digester, open_digester
from bitcheck.hooks.kernels.layout import Runs, Transposed, special_of
from bitcheck.hooks.native import native
from bitcheck.hooks.steps import Digesters, StepBuilder
from bitcheck.hooks.tensors import digest_tensor, kind_of
from tests.hooks.test_device_digest import OnHost, expected_digest, random_bytes, strided_tensors
from tests.hooks.test_submit import DEVICE, FEW, ONE, Driver, submit

WORDS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.complex64}
TILES = {1: 16, 2: 32, 4: 8, 8: 5}
A_PROGRAM = {1: 100, 2: 200, 4: 64, 8: 33}


@pytest.fixture
def host() -> OnHost:
    return OnHost(ring_leaves=256, scratch_bytes=4 * LEAF_BYTES)


@pytest.fixture
def driver(host: OnHost) -> Driver:
    """Return one for which every kernel is compiled that copies."""
    made = Driver(host)
    host.digester._shortcut = made.shortcut
    for word in WORDS:
        made.compile(True, word, True, TILES[word] + 3)
        made.compile(True, word, False, TILES[word])
        made.compile(False, word, False, A_PROGRAM[word])
    return made


def functions(driver: Driver) -> list[int]:
    """Return which kernels were launched since this was last asked: ONE, FEW, and the number of copies before them."""
    found = [shape[0] for shape in driver.shapes]
    driver.shapes.clear()
    return found


def kernel(driver: Driver, is_transpose: bool, word: int, is_aligned: bool) -> int:
    (found,) = (function for function, made in driver._compiled.items() if made[:3] == (is_transpose, word, is_aligned))
    return found


def elements(count: int, dtype: torch.dtype, first_byte: int = 0) -> torch.Tensor:
    """Return `count` elements of random bits that begin at `first_byte` of memory aligned to 64."""
    room = torch.empty(count * dtype.itemsize + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + first_byte
    part = room[start : start + count * dtype.itemsize]
    part.copy_(random_bytes(part.numel(), count))
    return part.view(dtype)


def transposed(
    word: int, rows: int, columns: int, batches: int = 1, first_byte: int = 0, apart: int = 0
) -> torch.Tensor:
    """Return [batches, rows, columns], or [rows, columns], columns `rows + apart` elements apart."""
    whole = elements(batches * columns * (rows + apart), WORDS[word], first_byte)
    view = whole.view(batches, columns, rows + apart)[:, :, :rows].transpose(1, 2)
    return view if batches > 1 else view[0]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    ("rows", "columns", "batches", "apart", "is_aligned"),
    [
        (32, 48, 1, 0, True),
        (32, 48, 3, 0, True),
        (48, 16, 2, 16, True),
        (33, 48, 1, 0, False),
        (32, 47, 1, 0, False),
        (32, 48, 1, 8, False),
        (24, 48, 1, 8, False),
        (8, 8, 1, 0, False),
        (9, 21, 5, 3, False),
        (50, 80, 2, 0, False),
    ],
)
def test_a_transposed_tensor_is_copied_by_the_kernel_for_it(
    host: OnHost, driver: Driver, word: int, rows: int, columns: int, batches: int, apart: int, is_aligned: bool
) -> None:
    tensor = transposed(word, rows, columns, batches, apart=apart)
    assert isinstance(special_of(tensor), Transposed)
    tickets = submit(host, [tensor])
    assert tickets is not None
    assert functions(driver) == [kernel(driver, True, word, is_aligned), ONE]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)]


def test_a_batch_of_which_the_second_begins_elsewhere_is_not_aligned(host: OnHost, driver: Driver) -> None:
    tensor = elements(2 * 33 * 48, torch.bfloat16).as_strided((2, 32, 48), (32 * 48 + 8, 1, 32))
    tickets = submit(host, [tensor])
    assert tickets is not None
    assert functions(driver) == [kernel(driver, True, 2, False), ONE]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)]


@pytest.mark.parametrize("word", WORDS)
def test_a_transposed_tensor_at_an_odd_address_is_copied_by_the_kernel_for_it(
    host: OnHost, driver: Driver, word: int
) -> None:
    tensor = transposed(word, 32, 48, first_byte=8)
    tickets = submit(host, [tensor])
    assert tickets is not None
    assert functions(driver) == [kernel(driver, True, word, False), ONE]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)]


def test_a_transposed_tensor_after_an_odd_number_of_bytes_lies_at_a_multiple_of_16(
    host: OnHost, driver: Driver
) -> None:
    tensors = [transposed(1, 9, 9), transposed(4, 32, 16)]
    tickets = submit(host, tensors)
    assert tickets is not None
    assert functions(driver) == [kernel(driver, True, 1, False), kernel(driver, True, 4, True), FEW]
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors))


@pytest.mark.parametrize("itemsize", WORDS)
@pytest.mark.parametrize(
    ("shape", "order", "length", "start"),
    [
        ((9, 64), (0, 1), 40, 0),
        ((9, 64), (0, 1), 40, 8),
        ((9, 64), (0, 1), 41, 1),
        ((9, 66), (0, 1), 40, 2),
        ((5, 7, 64), (0, 1, 2), 24, 4),
        ((5, 7, 64), (1, 0, 2), 64, 0),
        ((3, 5, 7, 24), (0, 2, 1, 3), 21, 0),
        ((3, 5, 7, 24), (2, 1, 0, 3), 16, 8),
        ((2, 3, 4, 5, 16), (0, 3, 1, 2, 4), 16, 0),
    ],
)
def test_runs_are_copied_in_the_largest_words_that_they_are_made_of(
    host: OnHost, driver: Driver, itemsize: int, shape: tuple[int, ...], order: tuple[int, ...], length: int, start: int
) -> None:
    stored = elements(torch.Size(shape).numel(), WORDS[itemsize]).view(shape)
    tensor = stored.permute(order)[..., start : start + length]
    special = special_of(tensor)
    assert isinstance(special, Runs)
    together = tensor.data_ptr() | 8
    for count in (special.shape[3], *special.strides):
        together |= count * itemsize
    word = together & -together
    tickets = submit(host, [tensor])
    assert tickets is not None
    assert functions(driver) == [kernel(driver, False, word, False), ONE]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)]


@pytest.mark.parametrize("dimension", range(3))
@pytest.mark.parametrize(("step", "word"), [(1, 1), (2, 2), (4, 4), (8, 8)])
def test_each_stride_of_runs_counts(host: OnHost, driver: Driver, dimension: int, step: int, word: int) -> None:
    strides = [4000, 1000, 200, 1]  # no two of them are one
    strides[dimension] += step
    tensor = elements(20_000, torch.uint8).as_strided((2, 3, 4, 16), strides)
    tickets = submit(host, [tensor])
    assert tickets is not None
    assert functions(driver) == [kernel(driver, False, word, False), ONE]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)]


def mixes() -> list[list[torch.Tensor]]:
    plain, weight = random_bytes(2 * LEAF_BYTES + 77), transposed(2, 50, 40)
    heads = elements(2 * 16 * 3 * 24, torch.bfloat16).view(2, 16, 3, 24)[:, :, 1, :21]
    odd = random_bytes(9)[1:8]
    return [list(given) for count in (2, 3, 4) for given in itertools.permutations((plain, weight, heads, odd), count)]


def test_contiguous_and_strided_tensors_share_a_launch_in_their_order(host: OnHost, driver: Driver) -> None:
    for tensors in mixes():
        first = host.digester._num_tickets
        tickets = submit(host, tensors)
        assert tickets == list(range(first + 1, first + 1 + len(tensors)))
        strided = [tensor for tensor in tensors if not tensor.is_contiguous()]
        *copies, last = functions(driver)
        assert (len(copies), last) == (len(strided), FEW)
        assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors))
    assert host.kernels.num_copies == host.kernels.num_launches == 0


def test_bits_are_those_of_the_moment_and_the_buffer_is_used_again_and_again(host: OnHost, driver: Driver) -> None:
    expected, tickets = [], []
    for seed in range(60):
        tensor = random_bytes(40 * 50, seed).view(50, 40).t()
        expected.append(digest_tensor(tensor))
        host.digester._shortcut = driver.shortcut if seed % 4 else None
        tickets.append(host.digester.submit(tensor, kind_of(tensor)))
        tensor.zero_()
    assert len(driver.shapes) == 2 * 45
    assert host.digester.resolve_many(tickets) == expected


@pytest.mark.parametrize("name", strided_tensors())
def test_what_a_kernel_cannot_copy_or_the_buffer_cannot_hold_is_left_to_the_python(
    host: OnHost, driver: Driver, name: str
) -> None:
    tensor = strided_tensors()[name]
    is_taken = special_of(tensor) is not None and tensor.nbytes <= host.digester._scratch_bytes
    tickets = submit(host, [tensor])
    assert (tickets is not None) is is_taken
    assert bool(driver.shapes) is is_taken
    if tickets is None:
        tickets = host.digester.submit_many([tensor])
    assert host.digester.resolve_many(tickets) == [expected_digest(tensor)]


def test_both_ways_are_among_what_is_tried() -> None:
    taken = {
        special_of(tensor) is not None and tensor.nbytes <= 4 * LEAF_BYTES for tensor in strided_tensors().values()
    }
    assert taken == {False, True}


@pytest.mark.parametrize("missing", [0, 1])
def test_all_have_to_fit_into_the_buffer_together_each_at_a_multiple_of_16(missing: int) -> None:
    tensors = [transposed(1, 9, 9), random_bytes(3 * LEAF_BYTES), transposed(2, 64, 99), transposed(1, 64, 80)]
    needed = 96 + 64 * 99 * 2 + 64 * 80
    host = OnHost(ring_leaves=256, scratch_bytes=needed - missing)
    driver = Driver(host)
    host.digester._shortcut = driver.shortcut
    for kernel in ((True, 1, False), (True, 2, False), (True, 1, True)):
        driver.compile(*kernel, 16)
    tickets = submit(host, tensors)
    assert (tickets is None) is bool(missing)
    assert bool(driver.shapes) is not bool(missing)
    if tickets is None:
        tickets = host.digester.submit_many(tensors)
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors))


@pytest.mark.parametrize("view", ["conj", "_neg_view"])
def test_views_that_stand_for_other_values_are_left_to_the_python(host: OnHost, driver: Driver, view: str) -> None:
    plain = elements(40 * 50, torch.complex64).view(50, 40)
    plain.copy_(torch.randn(50, 40, dtype=torch.complex64))
    for tensor in (plain, plain.t()):
        other = getattr(tensor, view)()
        assert submit(host, [other]) is None
        assert not driver.shapes
        (ticket,) = host.digester.submit_many([other])
        assert host.digester.resolve(ticket) == digest_tensor(other)
    assert submit(host, [plain.t()]) is not None


def test_elements_of_16_bytes_are_left_to_the_python(host: OnHost, driver: Driver) -> None:
    driver.compile(True, 16, False, 8)
    driver.compile(True, 16, True, 8)
    tensor = torch.randn(20, 30, dtype=torch.complex128).t()
    assert submit(host, [tensor]) is None
    assert not driver.shapes


def test_a_kernel_is_launched_as_soon_as_it_is_compiled(host: OnHost) -> None:
    driver = Driver(host)
    host.digester._shortcut = driver.shortcut
    tensor, heads = transposed(4, 33, 20), elements(20 * 64, torch.int16).view(20, 64)[:, 3:40]
    kernels = ((False, 2, False), (True, 4, True), (True, 2, False), (True, 4, False))
    for number, kernel in enumerate(kernels):
        assert submit(host, [random_bytes(5), tensor, heads]) is None
        assert not driver.shapes
        driver.compile(*kernel, 16 + number)
    tickets = submit(host, [random_bytes(5), tensor, heads])
    assert tickets is not None
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, [random_bytes(5), tensor, heads]))


def test_the_buffer_is_left_to_the_python_after_another_stream(host: OnHost, driver: Driver) -> None:
    tensor, plain = transposed(4, 33, 20), random_bytes(100)
    tickets, waits = [], []
    for stream in (5, 5, 0, 0, 2**63 + 9, 5, 0):
        is_other = host.digester._scratch_stream not in (None, stream)
        if is_other:
            waits.append((stream, host.digester._scratch_stream))
        host.queue.now = stream
        tickets += submit(host, [plain]) or []  # the buffer is not for it
        found = submit(host, [tensor, plain])
        assert (found is None) is is_other
        tickets += host.digester.submit_many([tensor, plain]) if found is None else found
        assert host.digester._scratch_stream == stream
        found = submit(host, [tensor])
        assert found is not None
        tickets += found
    assert host.queue.waits == waits == [(0, 5), (2**63 + 9, 0), (5, 2**63 + 9), (0, 5)]
    assert 0 not in host.queue.marks
    expected = [digest_tensor(plain), digest_tensor(tensor), digest_tensor(plain), digest_tensor(tensor)]
    assert host.digester.resolve_many(tickets) == expected * 7


def test_the_stream_after_waits_for_what_the_compiled_half_launched(host: OnHost, driver: Driver) -> None:
    tensor = transposed(4, 33, 20)
    host.queue.now = 5
    tickets = submit(host, [tensor])
    assert tickets is not None
    host.queue.now = 6
    tickets += host.digester.submit_many([tensor])  # its wait asks for a mark behind all of stream 5
    assert host.queue.waits == [(6, 5)]
    assert host.digester.resolve_many(tickets) == [digest_tensor(tensor)] * 2


def test_memory_that_is_not_there_is_left_to_the_python(host: OnHost, driver: Driver) -> None:
    tensor = transposed(4, 33, 20)
    kind = kind_of(tensor)
    tensor.untyped_storage().resize_(0)
    assert native.submit_tensors(host.digester, [tensor], [kind]) is None
    assert not driver.shapes


def test_a_tensor_that_is_no_more_what_its_kind_says_is_left_to_the_python(host: OnHost, driver: Driver) -> None:
    tensor = transposed(4, 33, 20)
    name, shape, num_bytes = kind_of(tensor)
    for wrong in (num_bytes - 4, num_bytes + 4, num_bytes // 20):
        assert native.submit_tensors(host.digester, [tensor], [(name, shape, wrong)]) is None
    assert not driver.shapes


def refuse_capture(host: OnHost, driver: Driver) -> None:
    host.queue.capturing = True


def refuse_device(host: OnHost, driver: Driver) -> None:
    driver.device = DEVICE + 1


def refuse_first_copy(host: OnHost, driver: Driver) -> None:
    driver.answers[kernel(driver, True, 4, False)] = 700


def refuse_second_copy(host: OnHost, driver: Driver) -> None:
    driver.answers[kernel(driver, False, 2, False)] = 700


def refuse_hash(host: OnHost, driver: Driver) -> None:
    driver.answers[FEW] = 1


@pytest.mark.parametrize(
    ("refuse", "num_launches"),
    [(refuse_capture, 0), (refuse_device, 0), (refuse_first_copy, 1), (refuse_second_copy, 2), (refuse_hash, 3)],
)
def test_what_cannot_be_launched_now_is_left_to_the_python(
    refuse: Any, num_launches: int, host: OnHost, driver: Driver
) -> None:
    tensors = [transposed(4, 33, 20), elements(20 * 64, torch.int16).view(20, 64)[:, 3:40], random_bytes(70)]
    first = submit(host, tensors)
    assert first is not None
    functions(driver)
    refuse(host, driver)
    assert submit(host, tensors) is None
    assert len(functions(driver)) == num_launches
    assert host.digester._num_tickets == len(first)
    host.queue.capturing, driver.device = False, DEVICE
    driver.answers.clear()
    tickets = [*first, *host.digester.submit_many(tensors), *(submit(host, tensors) or [])]
    assert host.digester.resolve_many(tickets) == list(map(digest_tensor, tensors)) * 3


def test_what_is_no_kernel_and_no_arrangement_is_refused(host: OnHost, driver: Driver) -> None:
    tensor, shortcut = transposed(4, 33, 20), driver.shortcut
    before = dict(shortcut.copies)
    for wrong in (3, (1, 2, 3), (1, 128, 0, 0), (1, 128, 0, "8")):
        shortcut.copies.update(dict.fromkeys(before, wrong))  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match=r"a CopyKernel, not|something to do|integer"):
            submit(host, [tensor])
    shortcut.copies.update(before)
    specials: list[Any] = [3, (3, 3), (("a", 1, 1), (1, 1)), ((1,) * 5, ())]
    arrangements: list[Any] = [3, (1, 2), *(((), (), special) for special in specials)]
    for given in arrangements:
        host.digester._shortcut = shortcut._replace(arrangement=lambda shape, strides, given=given: given)
        with pytest.raises(TypeError):
            submit(host, [tensor])
    for special in (((33, 20), (1,)), ((1, 33, 20), (1, 1, 1)), ((1, 33, -20), (1, 1)), ((2**62, 33, 20), (0, 33))):
        given = (), (), special
        host.digester._shortcut = shortcut._replace(arrangement=lambda shape, strides, given=given: given)
        assert submit(host, [tensor]) is None
    assert not driver.shapes
    host.digester._shortcut = shortcut
    assert submit(host, [tensor]) is not None


def test_nothing_is_kept_of_what_was_refused(host: OnHost, driver: Driver) -> None:
    tensor, large = transposed(4, 33, 20), transposed(1, 300, 300)
    copying = driver.shortcut.copies[4 << 2 | 2]
    stream = host.queue.now = 2**40
    held = tensor, large, copying, driver.shortcut, host.digester

    def turn(count: int) -> None:
        for _ in range(count):
            assert submit(host, [tensor, large]) is None

    turn(10)
    before, blocks = list(map(sys.getrefcount, held)), sys.getallocatedblocks()
    turn(500)
    assert list(map(sys.getrefcount, held)) == before
    assert sys.getallocatedblocks() < blocks + 100
    assert host.digester._scratch_stream is None
    assert host.queue.now == stream


def test_a_strided_tensor_becomes_an_event_without_the_python(
    host: OnHost, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("bitcheck.hooks.recorder")  # with which all is there that the compiled half takes
    digesters = Digesters(lambda: None, lambda land: None)
    device = torch.device("cpu")
    digesters[device] = host.digester
    builder = StepBuilder(3, StepKind.STEP, True, digesters)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    sites = [Site(Phase.FORWARD, "", "", slot) for slot in ("weight", "conjugate")]
    tensors = [transposed(4, 33, 20), torch.randn(30, 40, dtype=torch.complex64).t().conj()]
    added = [native.add_tensor(builder, site, tensor, -1, ()) for site, tensor in zip(sites, tensors, strict=True)]
    assert added == [(0,), None]
    assert (builder.record.sites, builder.record.kinds) == (sites[:1], [kind_of(tensors[0])])
    monkeypatch.undo()
    assert host.digester.resolve(builder._owed[device][0]) == digest_tensor(tensors[0])


# --- on a CUDA device


@pytest.fixture(scope="module")
def cuda() -> Digester:
    digester = open_digester(torch.device("cuda", 0))
    assert isinstance(digester, DeviceDigester)
    return digester


def on_device(host: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=host.dtype).set_(host.untyped_storage()).cuda()  # type: ignore[call-overload]
    return storage.as_strided(host.shape, host.stride(), host.storage_offset())


@pytest.mark.gpu
@pytest.mark.parametrize("name", strided_tensors())
def test_cuda_the_compiled_half_copies_what_the_python_copied_before(cuda: DeviceDigester, name: str) -> None:
    host = strided_tensors()[name]
    tensors = [on_device(host), torch.arange(5, device="cuda"), on_device(host)]
    expected = [expected_digest(host), expected_digest(torch.arange(5)), expected_digest(host)]
    tickets = cuda.submit_many(tensors)  # compiles its kernel
    found = native.submit_tensors(cuda, tensors, list(map(kind_of, tensors)))
    assert (found is not None) is (special_of(tensors[0]) is not None)
    for tensor in tensors:
        tensor.resolve_conj().fill_(1)  # later in the stream
    assert cuda.resolve_many(tickets) == expected
    assert found is None or cuda.resolve_many(found) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("sizes", [(512, 768, 1), (64, 48, 33), (513, 767, 1), (31, 9, 100)], ids=str)
def test_cuda_the_compiled_half_transposes(cuda: DeviceDigester, word: int, sizes: tuple[int, int, int]) -> None:
    host = transposed(word, *sizes)
    tensor = on_device(host)
    tickets = [*cuda.submit_many([tensor]), *(native.submit_tensors(cuda, [tensor], [kind_of(tensor)]) or [])]
    assert cuda.resolve_many(tickets) == [expected_digest(host)] * 2


@pytest.mark.gpu
def test_cuda_the_scratch_buffer_passes_from_stream_to_stream(cuda: DeviceDigester) -> None:
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    hosts = [random_bytes(3000 * 2000, seed).view(3000, 2000).t() for seed in range(len(streams))]
    tensors = [on_device(host) for host in hosts]
    cuda.resolve_many(cuda.submit_many(tensors[:1]))
    torch.cuda.synchronize()
    tickets, expected = [], []
    for turn in range(30):
        number = turn * 7 // 3 % 3
        with torch.cuda.stream(streams[number]):
            torch.cuda._sleep(1_000_000 * (turn % 3))
            found = native.submit_tensors(cuda, [tensors[number]], [kind_of(tensors[number])])
            tickets += cuda.submit_many([tensors[number]]) if found is None else found
        expected.append(expected_digest(hosts[number]))
    assert cuda.resolve_many(tickets) == expected
