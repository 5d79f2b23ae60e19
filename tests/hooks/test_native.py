"""The compiled form of the recorder does what the Python beside it does, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import bitcheck
from bitcheck.errors import DigestError, RecordingError
from bitcheck.events import Phase, Site, StepColumns, StepKind
from bitcheck.hooks import dynamo, gradients, modules, ops, steps, storages, tensors
from bitcheck.hooks.kernels import layout
from bitcheck.hooks.naming import Registry
from bitcheck.hooks.native import native
from bitcheck.hooks.op_schema import facts_of
from bitcheck.hooks.sites import Place, Sites
from bitcheck.hooks.steps import StepBuilder
from bitcheck.run import open_run
from tests.hooks import native_job
from tests.hooks.programs import PROGRAMS
from tests.hooks.test_neutral import run

if native is None and shutil.which("cc") is None:
    pytest.skip("hooks/csrc is not built: there is no C compiler", allow_module_level=True)
assert native is not None, "hooks/csrc is not built, or from another version: `make setup` builds it"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
FORMS = ("portable", "avx2", "avx512")
ROOT = Path(__file__).resolve().parents[2]
Digested = tuple[Any, bytes, bytes] | None


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each form of the hash that this processor has."""
    if native.choose(request.param) != request.param:
        native.choose("avx512")
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.choose("avx512")


# --- the hash


def test_every_length_has_the_hash_that_the_xxhash_package_gives(form: str) -> None:
    data = bytes((7 * index + index // 251) % 256 for index in range(6000))
    for length in range(17, 5000):
        start = length % 61  # any alignment
        piece = data[start : start + length]
        assert native.xxh3_128(piece) == xxhash.xxh3_128_digest(piece), length


def test_long_inputs_of_odd_lengths_have_the_hash_that_the_xxhash_package_gives(form: str) -> None:
    data = torch.arange(300_000).view(torch.uint8).numpy().tobytes()
    for length in (8191, 16384, 65_537, 1_000_001, len(data)):
        for start in (0, 1, 63):
            piece = memoryview(data)[start : start + length]
            assert native.xxh3_128(piece) == xxhash.xxh3_128_digest(piece)


@pytest.mark.parametrize("data", [b"", b"x", bytes(16)])
def test_less_than_17_bytes_have_no_hash(data: bytes) -> None:
    with pytest.raises(ValueError, match="17 bytes or more"):
        native.xxh3_128(data)


def test_a_form_of_the_hash_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="sse2"):
        native.choose("sse2")


# --- a tensor's digest


def both(tensor: torch.Tensor) -> tuple[Digested, Digested]:
    """Return (compiled, Python) of a tensor's kind, digest and leaves."""
    with torch._C.DisableTorchFunction():
        return native.digest_plain(tensor), tensors.digest_plain_portably(tensor)


def assert_equal_and_there(tensor: torch.Tensor) -> None:
    compiled, portable = both(tensor)
    assert compiled is not None
    assert compiled == portable, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def assert_neither(tensor: torch.Tensor) -> None:
    assert both(tensor) == (None, None)


def of_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of any dtype whose bytes follow each other without a period."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = (torch.arange(count, dtype=torch.int64) * 2654435761 >> 7).to(torch.uint8)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).view(shape)


DTYPES = sorted(tensors._plain_dtypes, key=str)
"""All that PyTorch has but the quantized."""
SIZES = (1, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 16_383, 16_384, 16_385, 40_001)


def views(base: Callable[..., torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors of many layouts; `base(*shape)` makes one."""
    yield base(3, 5).t()
    yield base(64, 96).t()
    yield base(65, 97).t()
    yield base(130, 200)[3:, 7:].t()
    yield base(200, 130)[::3, ::2]
    yield base(7, 11).expand(5, 7, 11)
    yield base(7, 1).expand(7, 300).t()
    yield base(1).expand(33, 65)
    yield base(4, 6, 8).permute(2, 0, 1)
    yield base(40, 33, 34).permute(1, 2, 0)
    yield base(3, 4, 5, 6).permute(3, 1, 0, 2)
    yield base(2, 3, 4, 5, 6).permute(4, 0, 3, 1, 2)
    yield base(2, 1, 7, 1, 6).permute(4, 0, 3, 1, 2)
    yield base(2, 16, 9, 9).to(memory_format=torch.channels_last)
    yield base(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    yield base(9, 17).unfold(1, 5, 2)
    yield base(100).as_strided((10, 10), (3, 7))
    yield base(*[1] * 68, 3, 4).transpose(-1, -2)
    yield base(41)[1:]
    yield base(5000)[3::7]
    yield base(1)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype_and_size_has_the_digest_that_the_python_gives(dtype: torch.dtype) -> None:
    assert_equal_and_there(of_bytes(dtype, 1).view(()))
    for size in SIZES:
        assert_equal_and_there(of_bytes(dtype, size))
        assert_equal_and_there(of_bytes(dtype, size + 1)[1:])
    assert_neither(of_bytes(dtype, 3)[3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_strides_has_the_digest_that_the_python_gives(dtype: torch.dtype) -> None:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    word = words[dtype.itemsize]  # a view as another dtype: not all dtypes can be copied into another memory format

    def base(*shape: int) -> torch.Tensor:
        return of_bytes(word, *shape)

    for tensor in views(base):
        assert_equal_and_there(tensor.view(dtype) if dtype.itemsize == word.itemsize and tensor.ndim else tensor)


def test_the_digest_of_a_strided_tensor_is_that_of_its_contiguous_copy(form: str) -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128):
        for tensor in views(lambda *shape, dtype=dtype: of_bytes(torch.uint8, *shape).to(dtype)):
            assert native.digest_plain(tensor) == native.digest_plain(tensor.contiguous())


def test_memory_that_is_not_aligned_to_its_elements_is_read_as_it_lies(form: str) -> None:
    data = of_bytes(torch.uint8, 70_000).numpy().data
    for offset in range(1, 9):
        tensor = torch.frombuffer(data, dtype=torch.float64, offset=offset, count=8_000)
        assert_equal_and_there(tensor)
        assert_equal_and_there(tensor.view(80, 100).t())


def test_a_parameter_is_as_plain_as_a_tensor() -> None:
    assert_equal_and_there(nn.Parameter(torch.randn(30, 40)))
    assert_equal_and_there(torch.randn(30, 40, requires_grad=True) * 2)
    with torch.inference_mode():
        assert_equal_and_there(torch.randn(30, 40).t())


class Sub(torch.Tensor):
    pass


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def freed() -> torch.Tensor:
    tensor = torch.randn(64)
    tensor.untyped_storage().resize_(0)
    return tensor


def too_small() -> torch.Tensor:
    tensor = torch.randn(64, 64).t()[5:]
    tensor.untyped_storage().resize_(64 * 64 * 4 - 4)
    return tensor


NOT_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "opaque": lambda: torch.ones(3, 3).to_mkldnn(),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.ones(3)),
    "meta": lambda: torch.ones(3, device="meta"),
    "zeros that are not in memory": lambda: torch._efficientzerotensor((3,)),
    "subclass": lambda: torch.ones(3).as_subclass(Sub),
    "wrapper": Wrapper,
    "buffer": lambda: nn.Buffer(torch.ones(3)).as_subclass(Sub),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "uninitialized": lambda: nn.UninitializedParameter(),
    "no elements": lambda: torch.ones(3, 0, 2),
    "freed": freed,
    "too small": too_small,
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_the_python(name: str) -> None:
    assert_neither(NOT_PLAIN[name]())


def test_tensors_inside_function_transforms_are_left_to_the_python() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(both(x))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [(None, None)] * 2


@pytest.mark.parametrize("value", [None, 3, "text", [torch.ones(2)], object()], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_has_no_digest(value: Any) -> None:
    assert native.digest_plain(value) is None


def test_elements_that_reach_past_their_storage_are_not_read() -> None:
    tensor = torch.randn(1000)
    tensor.untyped_storage().resize_(4 * 1000 - 1)
    assert_neither(tensor)
    tensor = torch.randn(1000)
    view = tensor[::2]
    last = (view.numel() - 1) * 2 * 4 + 4
    tensor.untyped_storage().resize_(last)
    assert_equal_and_there(view)
    tensor.untyped_storage().resize_(last - 1)
    assert_neither(view)


def test_a_tensor_that_says_of_itself_what_no_memory_can_hold_is_not_read() -> None:
    tensor = torch.ones(1).expand(2**62)
    with pytest.raises(OverflowError):
        native.digest_plain(tensor)


def test_an_error_of_a_tensors_own_comes_out_as_it_is() -> None:
    tensor = torch.ones(3)
    tensor.data_ptr = lambda: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        native.digest_plain(tensor)
    tensor = torch.ones(3, 4).t()
    tensor.stride = lambda: (1,)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="changed its shape"):
        native.digest_plain(tensor)
    tensor.stride = lambda: [1, 4]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="changed its shape"):
        native.digest_plain(tensor)
    tensor.stride = lambda: (2**62, 2**62)  # type: ignore[method-assign]
    assert native.digest_plain(tensor) is None


# --- on several threads


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives PyTorch back the threads that it had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_digest_is_the_same_on_any_number_of_threads(count: int, threads: None) -> None:
    torch.set_num_threads(count)
    for num_leaves in (7, 8, 9, 12, 13, 31, 33, 100):
        for more in (0, 4, 1024, 16_380):
            assert_equal_and_there(of_bytes(torch.float32, (num_leaves * 16_384 + more) // 4))
    for shape in ((300, 200), (7, 30_000), (40_000, 3), (3, 5, 17_000), (16, 64, 64, 3)):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
            turned = of_bytes(dtype, *shape).transpose(0, -1)
            assert_equal_and_there(turned)
            assert_equal_and_there(turned[1:, ::2])


IMPORTS = (
    "from bitcheck.hooks import recorder\n"
    "from bitcheck.hooks.native import native\n"
    "from bitcheck.hooks.tensors import digest_plain_portably\n"
)


def run_code(code: str, num_threads: int) -> str:
    """Run Python code in a process of its own where PyTorch has some threads; return what it prints."""
    head = (
        "import os, torch\n"
        "large = torch.frombuffer(bytearray(os.urandom(100)) * 80_000, dtype=torch.int64)\n"  # by this thread alone
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(num_threads)}
    environment.pop("OMP_THREAD_LIMIT", None)
    ended = subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how many threads there are")
@pytest.mark.parametrize("count", [1, 3])
def test_a_large_tensor_is_digested_on_the_threads_that_pytorch_has(count: int) -> None:
    code = IMPORTS + (
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "before = threads()\n"
        "others = torch.get_num_threads() - 1\n"
        "native.digest_plain(large[:1000])\n"
        "print(threads() - before)\n"
        "native.digest_plain(large)\n"
        "print(threads() - before - others)\n"
        "large.add_(1)\n"
        "print(threads() - before - others)\n"
    )
    assert run_code(code, count).split() == ["0"] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("before", ["", IMPORTS, IMPORTS + "native.digest_plain(large)\n"], ids=["", "loaded", "used"])
def test_a_forked_child_waits_for_no_thread_of_its_parents(before: str) -> None:
    code = (
        f"{before}large.add_(1)\n"
        "child = os.fork()\n"
        f"{IMPORTS}"
        "expected = digest_plain_portably(large)\n"
        "if not child: os._exit(native.digest_plain(large) != expected)\n"
        "import signal; signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL)); signal.alarm(20)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert run_code(code, 2).split() == ["0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_of_a_program_whose_only_threads_were_ours_runs_on() -> None:
    code = IMPORTS + (
        "native.digest_plain(large)\n"
        "child = os.fork()\n"
        "if not child: large.add_(1); os._exit(0)\n"
        "import signal; signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL)); signal.alarm(20)\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    assert run_code(code, 2).split() == ["0"]


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler")
def test_threads_that_another_library_numbers_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int omp_get_thread_num(void) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    code = IMPORTS + "print(native.digest_plain(large) == digest_plain_portably(large))"
    assert run_code(code, 2).split() == ["True"]


# --- what a device's digester asks for: of the CPU's tensors it gives the same


def test_where_tensors_lie_is_told_as_by_the_python() -> None:
    tensors_there = [of_bytes(torch.float32, 5, 6), of_bytes(torch.int16, 40)[3:], torch.ones(0), torch.ones(2, 3).t()]
    tensors_there += [torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))]
    kinds = [tensors.kind_of(tensor) for tensor in tensors_there]
    assert native.places_of(tensors_there, kinds) == layout.places_of_portably(tensors_there, kinds)
    gone = [*tensors_there, freed()]
    assert native.places_of(gone, [*kinds, tensors.kind_of(gone[-1])]) is None
    for wrong in (kinds[1:], [3] * len(kinds), None):
        with pytest.raises(TypeError):
            native.places_of(tensors_there, wrong)  # type: ignore[arg-type]


def test_a_tensor_that_reaches_past_its_storage_is_not_there_whatever_its_strides() -> None:
    chance = random.Random(1)
    for _ in range(500):
        shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        strides = [chance.choice((0, 1, 2, 3, 5)) for _ in shape]
        offset, dtype = chance.choice((0, 1, 7)), chance.choice((torch.uint8, torch.int16, torch.complex128))
        last = offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        whole = torch.zeros(last + 3, dtype=dtype)
        tensor = whole.as_strided(shape, strides, offset)
        num_kept = chance.choice((0, offset, last, last + 1, last + 3))
        whole.untyped_storage().resize_(num_kept * dtype.itemsize)
        given = [tensor], [tensors.kind_of(tensor)]
        if num_kept > last:
            assert native.places_of(*given) == layout.places_of_portably(*given)
        else:
            assert native.places_of(*given) is None
            with pytest.raises(DigestError, match="freed or too small"):
                layout.places_of_portably(*given)


def test_leaf_digests_that_arrive_become_the_digests_that_the_python_gives() -> None:
    tensor = of_bytes(torch.float32, 10_000)
    kind, digest, leaves = tensors.digest_plain_portably(tensor)  # type: ignore[misc]
    count = len(leaves) // 16
    for limit, kept in ((10**6, leaves), (0, b"")):
        waiting, known = {7: kind, 8: kind}, {}  # type: ignore[var-annotated]
        landed = bytes(16) + leaves + leaves[:16]
        assert native.receive_leaves([7, 8], [1, 1 + count], [count, 1], landed, waiting, known, limit) == [1]
        assert (known, waiting) == ({7: (digest, kept)}, {8: kind})


def test_other_threads_run_while_leaf_digests_are_hashed() -> None:
    leaves, count, num_tickets = bytes(2**17), 2**13, 200
    kind = ("uint8", (count * 16384,), count * 16384)
    turn, has_run = threading.Lock(), []
    turn.acquire()

    def other() -> None:
        with turn:
            has_run.append(True)

    waiter = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    waiter.start()
    time.sleep(0.05)  # until it waits
    sys.setswitchinterval(1000)  # from here on this thread is interrupted by nobody
    try:
        turn.release()
        limit = time.monotonic() + 20
        while not has_run and time.monotonic() < limit:
            waiting, known = dict.fromkeys(range(num_tickets), kind), {}  # type: ignore[var-annotated]
            firsts, counts = [0] * num_tickets, [count] * num_tickets
            native.receive_leaves(list(range(num_tickets)), firsts, counts, leaves, waiting, known, 0)
            assert len(known) == num_tickets
        assert has_run
    finally:
        sys.setswitchinterval(interval)
        waiter.join()


@pytest.mark.parametrize(
    ("first", "count"), [(0, 2), (1, 1), (-1, 1), (0, -1), (2**62, 1), (0, 2**62), (2**59, 2**59), (2**63 - 1, 1)]
)
def test_leaf_digests_beyond_what_has_arrived_are_not_read(first: int, count: int) -> None:
    kind = ("uint8", (20_000,), 20_000)
    with pytest.raises(ValueError, match="within its bytes"):
        native.receive_leaves([7], [first], [count], bytes(16), {7: kind}, {}, 0)
    with pytest.raises(ValueError, match="under way"):
        native.receive_leaves([6], [0], [1], bytes(16), {7: kind}, {}, 0)
    with pytest.raises(ValueError, match="as many firsts"):
        native.receive_leaves([7], [], [1], bytes(16), {7: kind}, {}, 0)


def test_a_number_is_waited_for_and_no_longer_than_asked() -> None:
    word = torch.zeros(1, dtype=torch.int64)
    assert native.wait_for_number(word.data_ptr(), 0, 2**31, 1e-5, 5.0)
    assert not native.wait_for_number(word.data_ptr(), 1, 2**31, 1e-5, 0.01)
    later = threading.Timer(0.05, word.numpy().__setitem__, (0, 1))
    later.start()
    assert native.wait_for_number(word.data_ptr(), 1, 2**31, 1e-5, 20.0)  # the timer's thread runs meanwhile
    later.join()
    with pytest.raises(ValueError, match="an address"):
        native.wait_for_number(0, 1, 2**31, 1e-5, 1.0)


# --- a tensor to an event


def test_what_a_collective_still_writes_is_left_to_the_python_and_nothing_else() -> None:
    builder = StepBuilder(0, StepKind.STEP, True, steps.Digesters(lambda: None, lambda land: None))
    site = Site(Phase.FORWARD, "Net", "a", "out", 0, False)
    written, other = torch.ones(6), torch.ones(6)
    builder.flying = {tensors.storage_id(written): None}  # type: ignore[dict-item]
    for tensor in (written, written[2:], written.view(2, 3).t()):
        assert native.add_tensor(builder, site, tensor, -1, ()) is None
    assert native.add_tensor(builder, site, other, -1, ()) == (0,)
    assert builder.record.digests == [tensors.digest_tensor(other)[0]]
    builder.flying = {}
    assert native.add_tensor(builder, site, written, -1, (0,)) == (1,)


def test_a_step_that_is_not_kept_and_memory_written_in_part_are_left_to_the_python() -> None:
    site = Site(Phase.FORWARD, "Net", "a", "out", 0, False)
    for is_kept, in_part in ((False, {}), (True, {1: None})):
        builder = StepBuilder(0, StepKind.STEP, is_kept, steps.Digesters(lambda: None, lambda land: None))
        builder.in_part = in_part  # type: ignore[assignment]
        assert native.add_tensor(builder, site, torch.ones(3), -1, ()) is None
        assert not len(builder.record)


# --- whole recordings


def record_all(folder: Path, level: str, form: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.hooks.native_job", str(folder), level, form]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE)


@pytest.mark.parametrize("level", ["module", "op"])
def test_every_program_is_recorded_by_the_compiled_form_as_by_the_python_alone(level: str, tmp_path: Path) -> None:
    children = {form: record_all(tmp_path / form, level, form) for form in ("compiled", "alone")}
    for child in children.values():
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors.decode()
        assert b"recording has stopped" not in errors, errors.decode()
    for name in native_job.NAMES:
        with open_run(tmp_path / "compiled" / name) as compiled, open_run(tmp_path / "alone" / name) as alone:
            rows, expected = compiled.rank(0), alone.rank(0)
            assert rows.num_rows == expected.num_rows >= 4
            for row in range(rows.num_rows):
                assert rows.load(row).to_record() == expected.load(row).to_record(), (name, row)
            for column in rows.table.dtype.names or ():
                assert (rows.table[column] == expected.table[column]).all(), (name, column)


def test_the_python_alone_is_the_python_alone(tmp_path: Path) -> None:
    code = "import sys; sys.modules['bitcheck.hooks._native'] = None\n" + (
        "from bitcheck.hooks import steps, storages, tensors, native\n"
        "assert native.native is None and storages._Base is storages.StorageWriters\n"
        "assert tensors.digest_plain is tensors.digest_plain_portably\n"
        "assert steps._add_plain is steps.add_plain_portably\n"
        "from bitcheck.hooks import gradients\n"
        "assert gradients._record_node is gradients._Outputs.record\n"
        "assert gradients._record_accumulated is gradients.GradientHooks._accumulated\n"
        "assert gradients._plan_nodes is gradients.GradientHooks._plan_nodes"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def test_a_build_that_is_left_from_another_version_is_passed_over() -> None:
    code = (
        "import bitcheck.hooks._native as built; built.INTERFACE += 1\n"
        "from bitcheck.hooks import tensors, native\n"
        "assert native.native is None and tensors.digest_plain is tensors.digest_plain_portably"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)
    assert b"compiled from another version" in ended.stderr


def test_this_process_records_by_the_compiled_form() -> None:
    assert tensors.digest_plain is native.digest_plain
    assert steps._add_plain is native.add_plain
    assert gradients._record_node is native.record_node
    assert gradients._record_accumulated is native.record_accumulated
    assert gradients._plan_nodes is native.plan_nodes
    assert issubclass(storages.Memory, native.Memory)


# --- failures in the middle


def fail_at(number: int, method: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Return a method that raises when it is called for the `number`-th time."""
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return method(*args, **kwargs)

    return fail


PIECES: dict[str, tuple[Any, str]] = {
    "begin, where it runs": (ops.OpHooks, "_locate"),
    "begin, the Python's": (ops.OpHooks, "_begin"),
    "begin, its sites": (Place, "execution"),
    "begin, its group": (Sites, "group"),
    "begin, an argument that nobody wrote": (ops.OpHooks, "_site_of_unwritten"),
    "begin, its numbers": (ops.OpHooks, "_record_scalars"),
    "begin, memory that was handed out": (storages.Memory, "is_fresh"),
    "end, the Python's": (ops.OpHooks, "_end"),
    "end, new memory": (ops.OpHooks, "_memory_of"),
    "end, memory that was handed out": (storages.Memory, "note_write"),
    "a call, what goes into it": (modules.ModuleHooks, "_record_inputs"),
    "a gradient, whose it is": (Registry, "parameter_name"),
    "a gradient, its computation": (gradients.GradientHooks, "_group"),
    "a plan, a parameter": (gradients.GradientHooks, "_parameter"),
}


def left_behind() -> tuple[Any, ...]:
    """What the recorder changes while it looks: torch functions, TorchDynamo's callback, the quiet depth."""
    callback = dynamo.pause(None)
    dynamo.pause(callback)
    return torch._C._is_torch_function_enabled(), callback, dynamo.is_quiet(), dynamo._local.depth, dynamo.on_error[:]


def program() -> Any:
    """Operations of every kind: memory that is handed out, draws, lists of tensors, results in a tuple."""
    trained = PROGRAMS["plain"]()
    memory = torch.empty(6)
    memory[:3] = torch.ones(3)
    memory[3:] = trained.modules[0][0].bias.detach()[:3]
    for _ in range(2):
        torch.empty(3).clamp_(0, 0)
    values, _ = torch.cat([memory, memory * 2]).view(3, 4).sort()
    trained.printed += values.flatten().tolist()
    return trained


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("piece", PIECES)
def test_a_mistake_in_the_middle_of_an_operation_ends_the_recording_and_nothing_else(
    piece: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, before = run(program), left_behind()
    owner, name = PIECES[piece]
    monkeypatch.setattr(owner, name, fail_at(number, getattr(owner, name), RuntimeError("a planned mistake")))
    with bitcheck.record(tmp_path / "a", level="op"):
        assert run(program) == bare
        assert left_behind()[:-1] == before[:-1]
    assert "RuntimeError: a planned mistake" in capsys.readouterr().err
    assert left_behind() == before
    monkeypatch.undo()
    with open_run(tmp_path / "a", allow_missing_ranks=True) as failed:  # nothing is written before the first step ends
        assert failed.status == "failed"
    assert run(program) == bare


def test_a_mistake_without_a_line_of_python_ends_the_recording_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = left_behind()
    with bitcheck.record(tmp_path / "a", level="op") as recording:
        x = torch.ones(3)
        assert recording._recorder.ops is not None
        recording._recorder.ops._memory = None  # type: ignore[assignment]
        assert (x + 1).tolist() == [2, 2, 2]
    assert "recording failed in compiled code" in capsys.readouterr().err
    assert left_behind() == before


def test_what_the_python_opens_is_looked_at_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with bitcheck.record(tmp_path / "a", level="op"):
        x = torch.ones(3)
        x.bernoulli_(1)  # the Python runs an operator that is new
        monkeypatch.setattr(ops.OpHooks, "_begin", lambda *_: ())
        assert x.bernoulli_(1).tolist() == [1] * 3
    assert "recording failed in compiled code: TypeError: what was opened, not ()" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RecordingError("meant for the program")], ids=repr)
@pytest.mark.parametrize(("owner", "name"), [(Place, "execution"), (StepBuilder, "add_computed")])
def test_an_interrupt_and_an_error_for_the_program_go_on_to_it(
    owner: Any, name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = left_behind()
    with bitcheck.record(tmp_path / "a", level="op"):
        x = torch.ones(3)
        inside = left_behind()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail_at(1, getattr(owner, name), error))
            with pytest.raises(type(error)):
                x.to_sparse().add(1)
        assert left_behind() == inside
    assert left_behind() == before


def test_torchdynamo_is_put_back_as_it_was(tmp_path: Path) -> None:
    with bitcheck.record(tmp_path / "a", level="op"):
        x = torch.ones(3) + 1
        before = dynamo.pause(False)  # as in code that TorchDynamo has compiled: run it, compile no more
        try:
            x = x + 1
            assert dynamo.pause(False) is False
        finally:
            dynamo.pause(before)
    assert x.tolist() == [3, 3, 3]


@pytest.mark.parametrize("level", ["module", "op"])
def test_gradients_that_a_compiled_backward_hands_over_are_recorded(level: str, tmp_path: Path) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = net(torch.ones(3, 4)).square().mean()
            with compiled_autograd._enable(lambda graph: graph):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    bare = losses()
    with bitcheck.record(tmp_path / "a", level=level):
        assert losses() == bare
    with open_run(tmp_path / "a") as run:
        sites = [event.site for event in run.rank(0).load(1).to_record().events]
    assert any(site.phase is Phase.BACKWARD and site.path == "1" and site.slot == "grad_in.0" for site in sites), sites


def test_an_operation_that_fails_fails_as_in_the_bare_program(tmp_path: Path) -> None:
    before = left_behind()
    with bitcheck.record(tmp_path / "a", level="op"):
        with pytest.raises(RuntimeError, match="The size of tensor"):
            torch.ones(3).add_(torch.ones(4))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert left_behind() == before


def test_what_a_mode_of_the_programs_does_is_its_own_affair(tmp_path: Path) -> None:
    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.ops.aten.add.Tensor else result

    with bitcheck.record(tmp_path / "a", level="op"), Doubles():
        assert (torch.ones(2) + 1).tolist() == [4, 4]


# --- nothing is left behind


def steady(function: Callable[[], Any], times: int) -> tuple[int, int]:
    """Return how many blocks and objects more there are after `times` calls than before, once all is warm."""
    for _ in range(30):
        function()
    counts = []
    for _ in range(2):
        gc.collect()
        counts.append((sys.getallocatedblocks(), len(gc.get_objects())))
        for _ in range(times):
            function()
    gc.collect()
    counts[-1] = (sys.getallocatedblocks(), len(gc.get_objects()))
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def test_digests_keep_nothing() -> None:
    kinds = [torch.randn(5), torch.randn(90, 90).t(), torch.randn(100_000), *(make() for make in NOT_PLAIN.values())]
    counted = [*kinds, torch.float32, torch.strided, tensors._plain_kinds]

    def digest() -> None:
        for tensor in kinds:
            native.digest_plain(tensor)

    digest()
    before = [sys.getrefcount(value) for value in counted]
    blocks, objects = steady(digest, 500)
    assert abs(blocks) < 50 and abs(objects) < 50
    assert [sys.getrefcount(value) for value in counted] == before


def test_digests_that_fail_keep_nothing() -> None:
    kinds = [torch.ones(3, 4).t() for _ in range(5)]
    for tensor, name in zip(kinds, ("data_ptr", "stride", "is_neg", "untyped_storage", "storage_offset"), strict=True):
        setattr(tensor, name, None)
    before = [sys.getrefcount(value) for value in kinds]

    def digest() -> None:
        for tensor in kinds:
            with pytest.raises(TypeError):
                native.digest_plain(tensor)

    blocks, objects = steady(digest, 200)
    assert abs(blocks) < 50 and abs(objects) < 50
    assert [sys.getrefcount(value) for value in kinds] == before


def test_columns_take_one_reference_of_each() -> None:
    record, tensor = StepColumns(0, StepKind.STEP), torch.randn(3)
    site, group, inputs = Site(Phase.FORWARD, "a", "b", "c", 0, False), 10**9, (10**9, 7)
    before = [sys.getrefcount(value) for value in (site, group, inputs, tensor, record)]
    assert [native.add_plain(record, site, tensor, group, inputs) for _ in range(100)] == list(range(100))
    after = [sys.getrefcount(value) for value in (site, group, inputs, tensor, record)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [100, 100, 100, 0, 0]
    assert native.add_plain(record, site, torch.ones(0), group, inputs) is None
    assert len(record) == 100
    portable = StepColumns(0, StepKind.STEP)
    for _ in range(100):
        steps.add_plain_portably(portable, site, tensor, group, inputs)
    assert portable.to_record() == record.to_record()


@pytest.mark.parametrize("level", ["module", "op"])
def test_hundreds_of_recorded_steps_keep_nothing(level: str) -> None:
    command = [sys.executable, "-m", "tests.hooks.native_steps", level]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = json.loads(done.stdout)
    assert max(kept) < 200, kept  # one of anything in each step would be 200


def test_memory_is_freed_with_what_it_holds_and_in_a_circle() -> None:
    class Holder:
        pass

    tensor, builder = torch.randn(8), Holder()
    storage = tensor.untyped_storage()._weak_ref()
    memory = storages.Memory(tensor)
    memory.builder, memory.events = builder, (10**9,)  # type: ignore[assignment]
    count = sys.getrefcount(builder)
    memory.begin_again(tensor)
    assert sys.getrefcount(builder) == count - 1
    builder.memory = memory  # type: ignore[attr-defined]
    memory.builder = builder  # type: ignore[assignment]
    gone = threading.Event()
    weakref.finalize(builder, gone.set)
    del builder, memory
    gc.collect()
    assert gone.is_set()
    assert not torch.UntypedStorage._expired(storage)
    del tensor
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def test_memory_outlives_its_storage_and_survives_its_members_being_deleted() -> None:
    memory = native.Memory(torch.randn(8))
    assert torch.UntypedStorage._expired(memory.weak)
    del memory.events, memory.builder, memory.written
    assert (memory.events, memory.builder, memory.written) == (None, None, None)
    with pytest.raises(AttributeError, match="readonly"):
        memory.weak = 0  # type: ignore[misc]
    memory.begin_again(torch.ones(2))
    assert memory.events == ()


def test_memory_gives_back_each_weak_reference_once() -> None:
    freed_ones: list[int] = []
    free = torch.UntypedStorage._free_weak_ref

    def note(weak: int) -> None:
        freed_ones.append(weak)
        free(weak)

    native.configure(free_weak_ref=note)
    try:
        memory = native.Memory(torch.ones(2))
        first = memory.weak
        memory.begin_again(torch.ones(3))
        second = memory.weak
        assert freed_ones == [first]
        del memory
        assert freed_ones == [first, second]
    finally:
        native.configure(free_weak_ref=free)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_memory_whose_weak_reference_cannot_be_given_back_goes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    free, builder = torch.UntypedStorage._free_weak_ref, type("Builder", (), {})()
    memory = native.Memory(torch.ones(2))
    memory.builder, weak, count = builder, memory.weak, sys.getrefcount(builder)
    native.configure(free_weak_ref=lambda weak: 1 / 0)
    try:
        del memory
    finally:
        native.configure(free_weak_ref=free)
        free(weak)
    assert told == [ZeroDivisionError]
    assert sys.getrefcount(builder) == count - 1


def test_a_write_to_memory_of_which_nothing_is_known_any_more_is_noted(tmp_path: Path) -> None:
    with bitcheck.record(tmp_path / "a", level="op") as recording:
        x = torch.zeros(4)
        x[:2].add_(1)
        hooks = recording._recorder.ops
        assert hooks is not None
        memory = hooks._memory[tensors.storage_id(x)]
        del memory.events
        x[:2].add_(1)
        assert len(memory.events) == 1


def test_a_type_of_memory_goes_with_its_last_object() -> None:
    kind = type("Kind", (native.Memory,), {"__slots__": ()})
    memory, count = kind(torch.ones(2)), sys.getrefcount(native.Memory)
    seen = weakref.ref(kind)
    del kind
    gc.collect()
    assert seen() is not None
    del memory
    gc.collect()
    assert seen() is None
    assert sys.getrefcount(native.Memory) < count


# --- arguments that make no sense

FACTS = facts_of(torch.ops.aten.add.Tensor)
OPENED = (None, None, 0, (), [], set(), None)
BAD_CALLS: dict[str, Callable[[], Any]] = {
    "a number to hash": lambda: native.xxh3_128(3),  # type: ignore[arg-type]
    "text to hash": lambda: native.xxh3_128("text of some length"),  # type: ignore[arg-type]
    "bytes as a form": lambda: native.choose(b"avx2"),  # type: ignore[arg-type]
    "no name": lambda: native.configure(3),  # type: ignore[call-arg]
    "a name that is not known": lambda: native.configure(nothing=3),
    "modules that are no dict": lambda: native.configure(loaded_modules=[]),
    "no tensor for a memory": lambda: native.Memory(),  # type: ignore[call-arg]
    "too few arguments to add": lambda: native.add_plain(),  # type: ignore[call-arg]
    "columns that are no lists": lambda: native.add_plain(
        type("Columns", (), {"sites": 3})(),
        None,
        torch.ones(2),
        0,
        (),  # type: ignore[arg-type]
    ),
    "too few to run": lambda: native.run_operation(None),  # type: ignore[call-arg,arg-type]
    "a list of arguments": lambda: native.run_operation(None, None, (), [], {}),  # type: ignore[arg-type]
    "no named arguments": lambda: native.run_operation(None, None, (), (), None),  # type: ignore[arg-type]
    "facts of nothing": lambda: native.begin_operation(None, (), (), {}),  # type: ignore[arg-type]
    "facts that are too short": lambda: native.begin_operation(None, FACTS[:-1], (), {}),  # type: ignore[arg-type]
    "facts of another form": lambda: native.begin_operation(None, tuple(range(9)), (), {}),  # type: ignore[arg-type]
    "names that are none": lambda: native.begin_operation(None, FACTS, (), None),  # type: ignore[arg-type]
    "arguments that are none": lambda: native.begin_operation(None, FACTS, None, {}),  # type: ignore[arg-type]
    "too few to end": lambda: native.end_operation(None, FACTS, OPENED),  # type: ignore[call-arg,arg-type]
    "nothing opened": lambda: native.end_operation(None, FACTS, None, None),  # type: ignore[arg-type]
    "opened in part": lambda: native.end_operation(None, FACTS, OPENED[:-1], None),  # type: ignore[arg-type]
    "opened with other members": lambda: native.end_operation(None, FACTS, tuple("bsgiwsl"), None),  # type: ignore
    "written without a place": lambda: native.end_operation(
        None,
        FACTS,
        (None, None, 0, (), [3], set(), None),
        None,  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_arguments_of_the_wrong_type_are_refused(call: str) -> None:
    before = left_behind()
    with pytest.raises(TypeError):
        BAD_CALLS[call]()
    assert left_behind() == before


def test_without_configure_every_function_says_what_it_lacks() -> None:
    code = f"""
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("bitcheck.hooks._native", {native.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
tensor, facts = torch.ones(3), ("f", True, False, False, (), frozenset(), (), False, ())
calls = [
    lambda: native.digest_plain(tensor),
    lambda: native.add_plain(None, None, tensor, 0, ()),
    lambda: native.plain_on_device(tensor),
    lambda: native.receive_leaves([], [], [], b"", {{}}, {{}}, 0),
    lambda: native.Memory(tensor),
    lambda: native.plan_nodes(None, None, None, None, []),
    lambda: native.run_operation(None, None, (), (), {{}}),
    lambda: native.begin_operation(None, facts, (), {{}}),
    lambda: native.end_operation(None, facts, (None, None, 0, (), [], set(), None), None),
]
for call in calls:
    try:
        call()
    except RuntimeError as error:
        assert "configure was not given" in str(error), error
    else:
        raise SystemExit("no error")
print(native.xxh3_128(bytes(20)).hex())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == xxhash.xxh3_128_hexdigest(bytes(20))
