"""How fast the digest is on a GPU: bandwidth beside a device copy in the same run, latency, host cost.

    python benchmarks/gpu_digest.py -o benchmarks/results/gpu_digest_h200_DATE.md [--variants]

Bandwidth counts bytes read for the digest, bytes read and written for the copy. Times are medians of
CUDA event timings with the L2 flushed before each, unless a table says otherwise. Prints markdown.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.testing import do_bench

from bitcheck.digest import digest_leaves, num_leaves
from bitcheck.hooks import device_digest
from bitcheck.hooks.device_digest import DeviceDigester, open_digester
from bitcheck.hooks.kernels.launch import BLOCKS_A_LOAD, LeafKernels
from bitcheck.hooks.kernels.xxh3 import SECRET_WORDS, hash_one_kernel

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB, 4 * GIB)


def median_ms(function: Callable[[], object]) -> float:
    """Median time of a function's work on the device, L2 flushed before each."""
    return float(do_bench(function, warmup=10, rep=60, return_mode="median"))


def size_name(size: int) -> str:
    """Return 1048576 as "1 MiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def random_buffer(size: int) -> torch.Tensor:
    """Return `size` random bytes on the device; zeros would run faster than data does."""
    return torch.randint(-(2**63), 2**63 - 1, (size // 8,), device="cuda").view(torch.uint8)


class Report:
    """Markdown, printed as it grows and written at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "") -> None:
        self.lines.append(text)
        print(text, flush=True)

    def table(self, *heads: str) -> None:
        self.say()
        self.say("| " + " | ".join(heads) + " |")
        self.say("|" + "---|" * len(heads))

    def row(self, *cells: object) -> None:
        self.say("| " + " | ".join(map(str, cells)) + " |")


def hash_direct(kernels: LeafKernels, data: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    """Return a launch of the leaf kernel alone."""

    def launch() -> None:
        kernels.hash_one(data.data_ptr(), data.numel(), out.data_ptr(), torch.cuda.current_stream().cuda_stream)

    return launch


def bench_bandwidth(report: Report, kernels: LeafKernels, room: torch.Tensor, out: torch.Tensor) -> None:
    report.say("\n## One tensor, contiguous")
    report.table("size", "copy, us", "copy, TB/s", "digest, us", "digest, TB/s", "digest / copy")
    target = torch.empty_like(room)
    for size in SIZES:
        data, copied = room[:size], target[:size]
        copy_ms = median_ms(partial(copied.copy_, data))
        hash_ms = median_ms(hash_direct(kernels, data, out))
        copy_rate, hash_rate = 2 * size / copy_ms / 1e9, size / hash_ms / 1e9
        report.row(
            size_name(size),
            f"{copy_ms * 1e3:.1f}",
            f"{copy_rate:.3f}",
            f"{hash_ms * 1e3:.1f}",
            f"{hash_rate:.3f}",
            f"{hash_rate / copy_rate:.3f}",
        )


def bench_variants(report: Report, room: torch.Tensor, out: torch.Tensor) -> None:
    report.say("\n## Kernel variants (TB/s; KiB that a program asks for at once, warps a program)")
    sizes = (MIB, 256 * MIB, 4 * GIB)
    report.table("KiB a load", "warps", "registers", *map(size_name, sizes))
    secret = torch.tensor(SECRET_WORDS, device="cuda")
    expected = digest_leaves(room[: 8 * MIB].cpu().numpy())
    for blocks, warps in ((1, 1), (4, 1), (8, 1), (16, 1), (16, 2), (16, 4)):
        cells = []
        for size in sizes:

            def launch(size: int = size, blocks: int = blocks, warps: int = warps) -> object:
                launcher = hash_one_kernel[(num_leaves(size),)]
                return launcher(room.data_ptr(), size, out.data_ptr(), secret, BLOCKS_A_LOAD=blocks, num_warps=warps)

            out.zero_()
            kernel = launch(8 * MIB)
            assert out[: num_leaves(8 * MIB)].cpu().numpy().tobytes() == expected
            cells.append(f"{size / median_ms(launch) / 1e9:.3f}")
        report.row(blocks, warps, kernel.n_regs, *cells)  # type: ignore[attr-defined]


def bench_latency(report: Report, kernels: LeafKernels, room: torch.Tensor, out: torch.Tensor) -> None:
    report.say("\n## Latency of small launches, us")
    report.say()
    report.say(
        "Graph: a CUDA graph of 128 launches over 128 different buffers (over the L2's size at 1 MiB), time / 128."
    )
    report.table("size", "events, L2 flushed", "graph replay", "fill of one byte, events")
    fill_us = median_ms(out[:1].zero_) * 1e3
    for size in (4 * KIB, 64 * KIB, 256 * KIB, MIB):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            for index in range(128):
                kernels.hash_one(room.data_ptr() + index * size, size, out.data_ptr(), stream)
        replay_us = median_ms(graph.replay) * 1e3 / 128
        one_us = median_ms(hash_direct(kernels, room[:size], out)) * 1e3
        report.row(size_name(size), f"{one_us:.2f}", f"{replay_us:.2f}", f"{fill_us:.2f}")


def bench_addresses(report: Report, kernels: LeafKernels, room: torch.Tensor, out: torch.Tensor) -> None:
    report.say("\n## Addresses, 1 GiB")
    report.table("address modulo 16", "digest, TB/s")
    for offset in (0, 8, 4, 12, 2, 1):
        data = room[offset : offset + GIB]
        report.row(offset, f"{GIB / median_ms(hash_direct(kernels, data, out)) / 1e9:.3f}")


def model_shapes() -> list[tuple[int, ...]]:
    """A GPT of 936 M parameters: 16 layers, d 2048, vocabulary 32,000, untied."""
    layer = [(2048,), (6144, 2048), (2048, 2048), (2048,), (8192, 2048), (2048, 8192)]
    return [(32_000, 2048), *(shape for _ in range(16) for shape in layer), (2048,), (32_000, 2048)]


def bench_model(report: Report, digester: DeviceDigester, kernels: LeafKernels, out: torch.Tensor) -> None:
    report.say("\n## The state of a 936 M-parameter GPT in bf16")
    report.say()
    report.say(
        "Kernel: the launch alone, its table ready. Submit: the host's time for `submit_many`, device idle before;"
    )
    report.say("to digests: until the last ticket is resolved, by the same thread.")
    report.table("tensors", "number", "GB", "kernel, ms", "TB/s", "submit, ms", "to digests, ms")
    parameters = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in model_shapes()]
    state = [*parameters, *(torch.randn_like(tensor) for _ in range(3) for tensor in parameters)]
    small = [torch.randn(256 * (1 + index % 32), device="cuda") for index in range(300)]
    for name, tensors in (
        ("parameters", parameters),
        ("parameters, gradients, two moments", state),
        ("300 tensors of 1 to 32 KiB", small),
    ):
        size = sum(tensor.nbytes for tensor in tensors)
        counts = [num_leaves(tensor.nbytes) for tensor in tensors]
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        rows = [[tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors], firsts]
        table = torch.tensor(rows, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        launch = partial(kernels.hash_table, table.data_ptr(), len(tensors), sum(counts), out.data_ptr(), stream)
        kernel_ms = median_ms(launch)
        hosts, wholes = [], []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            tickets = digester.submit_many(tensors)
            hosts.append(time.perf_counter() - start)
            for ticket in tickets:
                digester.resolve(ticket)
            wholes.append(time.perf_counter() - start)
        report.row(
            name,
            len(tensors),
            f"{size / 1e9:.3f}",
            f"{kernel_ms:.3f}",
            f"{size / kernel_ms / 1e9:.3f}",
            f"{statistics.median(hosts) * 1e3:.3f}",
            f"{statistics.median(wholes) * 1e3:.3f}",
        )


def bench_strides(report: Report, digester: DeviceDigester) -> None:
    report.say("\n## Tensors that are not contiguous, through the digester")
    report.say()
    report.say("Plain copy: the scratch buffer is filled by PyTorch's copy instead of the transposing kernel.")
    report.table("tensor", "MB", "digest, us", "TB/s", "with plain copy, us", "`.contiguous()` alone, us")
    square = torch.randn(8192, 8192, device="cuda")
    images = torch.randn(32, 256, 112, 112, device="cuda").bfloat16()
    heads = torch.randn(8, 2048, 16, 128, device="cuda").bfloat16()
    cases = (
        ("bf16 [8192, 8192].t()", square.bfloat16().t()),
        ("bf16 [2048, 8192].t()", square[:2048].bfloat16().t()),
        ("float32 [8192, 8192].t()", square.t()),
        ("fp8 [8192, 8192].t()", square.to(torch.float8_e4m3fn).t()),
        ("bf16 channels-last [32, 256, 112, 112]", images.contiguous(memory_format=torch.channels_last)),
        ("bf16 heads [8, 16, 2048, 128] of [8, 2048, 16, 128]", heads.transpose(1, 2)),
        ("float32 half of the columns [8192, 4096]", square[:, :4096]),
    )
    for name, tensor in cases:
        own_ms = median_ms(partial(digester.submit_many, [tensor]))
        with mock.patch.object(device_digest, "special_of", return_value=None):
            plain_ms = median_ms(partial(digester.submit_many, [tensor]))
        copy_ms = median_ms(tensor.contiguous)
        report.row(
            name,
            f"{tensor.nbytes / 1e6:.1f}",
            f"{own_ms * 1e3:.0f}",
            f"{tensor.nbytes / own_ms / 1e9:.3f}",
            f"{plain_ms * 1e3:.0f}",
            f"{copy_ms * 1e3:.0f}",
        )


def bench_host(report: Report, digester: DeviceDigester, out: torch.Tensor) -> None:
    report.say("\n## Host cost of a submit, us (median of 20 times 100 calls)")
    report.table("call", "us a call", "us a tensor")
    tensors = [torch.randn(1000, device="cuda") for _ in range(300)]
    transposed = torch.randn(64, 64, device="cuda").t()
    secret = torch.tensor(SECRET_WORDS, device="cuda")
    address = tensors[0].data_ptr()
    stream = torch.cuda.current_stream().cuda_stream

    def plain_launch() -> object:
        launcher = hash_one_kernel[(1,)]
        return launcher(address, 4000, out.data_ptr(), secret, BLOCKS_A_LOAD=BLOCKS_A_LOAD, num_warps=1)

    kernels = digester._kernels
    cases: tuple[tuple[str, int, Callable[[], object]], ...] = (
        ("plain Triton launch", 1, plain_launch),
        ("launch of the compiled kernel", 1, lambda: kernels.hash_one(address, 4000, out.data_ptr(), stream)),
        ("submit_many, 1 tensor", 1, lambda: digester.submit_many(tensors[:1])),
        ("submit_many, 1 transposed tensor", 1, lambda: digester.submit_many([transposed])),
        ("submit_many, 4 tensors", 4, lambda: digester.submit_many(tensors[:4])),
        ("submit_many, 10 tensors", 10, lambda: digester.submit_many(tensors[:10])),
        ("submit_many, 300 tensors", 300, lambda: digester.submit_many(tensors)),
    )
    for name, count, call in cases:
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - start) / 100)
        microseconds = statistics.median(times) * 1e6
        report.row(name, f"{microseconds:.1f}", f"{microseconds / count:.2f}")
    digester.resolve(digester.submit_many(tensors[:1])[0])
    flushes = []
    for _ in range(50):
        digester.submit_many(tensors[:1])
        start = time.perf_counter()
        digester.flush()
        flushes.append(time.perf_counter() - start)
    report.row("flush", f"{statistics.median(flushes) * 1e6:.1f}", "")


def main() -> None:
    """Measure everything on the current device and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="markdown file to write")
    parser.add_argument("--variants", action="store_true", help="also time the kernel's other forms")
    arguments = parser.parse_args()
    report = Report()
    report.say("# The digest on a GPU\n")
    device = torch.cuda.get_device_properties(0)
    report.say(
        f"- {device.name}, {device.multi_processor_count} multiprocessors, {device.L2_cache_size >> 20} MiB of L2"
    )
    report.say(f"- torch {torch.__version__}, triton {triton.__version__}, Python {sys.version.split()[0]}")
    report.say(f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC")
    report.say(f"- `python benchmarks/gpu_digest.py{' --variants' if arguments.variants else ''}`")
    room = random_buffer(4 * GIB + 64)
    out = torch.zeros(num_leaves(4 * GIB) + 1, 16, dtype=torch.uint8, device="cuda")
    kernels = LeafKernels(torch.device("cuda", 0))
    if arguments.variants:
        bench_variants(report, room, out)
    bench_bandwidth(report, kernels, room, out)
    bench_latency(report, kernels, room, out)
    bench_addresses(report, kernels, room, out)
    del room
    before = torch.cuda.memory_reserved()
    digester = open_digester(torch.device("cuda", 0))
    assert isinstance(digester, DeviceDigester)
    report.say(f"\nThe digester reserves {(torch.cuda.memory_reserved() - before) / MIB:.0f} MiB of device memory.")
    bench_model(report, digester, kernels, out)
    bench_strides(report, digester)
    bench_host(report, digester, out)
    if arguments.output is not None:
        arguments.output.write_text("\n".join(report.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
