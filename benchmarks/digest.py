"""What a digest costs on the CPU, beside one XXH3-128 call over the same bytes.

    python benchmarks/digest.py [--output benchmarks/results/digest_cpu_DATE.md]

Each row is measured interleaved with its yardstick, round by round in one process, and gives the
median of the rounds; the ratio is the median of the rounds' ratios, so that a machine that slows
down slows both. The yardstick hashes the same bytes, contiguous, in one call.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from bitcheck.digest import xxh3_128
from bitcheck.hooks.tensors import digest_tensor, tensor_bytes, tensor_parts

ROUNDS = 15
GOAL_RATIO = 1.25
"""A contiguous 64 MiB tensor: at most this times one xxh3_128 call."""
GOAL_CALL_US = 8.0
"""A 1 KiB tensor, taken apart and digested: at most this."""


def time_call(call: Callable[[], object], repeat: int) -> float:
    """Return the seconds that one of `repeat` calls took."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def digest_all(tensor: torch.Tensor) -> None:
    for _, part in tensor_parts(tensor):
        digest_tensor(part)


def compare(tensor: torch.Tensor, repeat: int) -> tuple[float, float, float]:
    """Return (seconds a digest, seconds a yardstick call, their ratio), medians over the rounds."""
    raw = tensor_bytes(tensor)  # the tensor's own memory where it is contiguous
    rounds = []
    for _ in range(ROUNDS + 1):
        rounds.append(
            (
                time_call(lambda: digest_all(tensor), repeat),
                time_call(lambda: xxh3_128(raw), repeat),
            )
        )
    own, yardstick = zip(*rounds[1:], strict=True)  # the first round warms up
    ratio = statistics.median(mine / theirs for mine, theirs in rounds[1:])
    return statistics.median(own), statistics.median(yardstick), ratio


def cases() -> list[tuple[str, torch.Tensor, int]]:
    """Return (what, tensor, calls a round)."""
    mib = 2**18  # float32 elements
    square = torch.randn(4096, 4096)
    return [
        ("1 KiB float32 parameter", torch.nn.Parameter(torch.randn(256)), 2000),
        ("1 KiB float32, transposed", torch.randn(16, 16).t(), 2000),
        ("16 KiB bfloat16", torch.randn(8192).bfloat16(), 1000),
        ("1 MiB float32", torch.randn(mib), 50),
        ("64 MiB float32", square, 1),
        ("64 MiB bfloat16", torch.randn(8192, 4096).bfloat16(), 1),
        ("64 MiB float32, transposed", square.t(), 1),
        ("64 MiB float32, expanded", square[0].expand(4096, 4096), 1),
        ("64 MiB complex64, conjugate", torch.randn(2048, 4096, dtype=torch.complex64).conj(), 1),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the table here as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Digest on the CPU",
        "",
        f"torch {torch.__version__}, xxhash {xxhash.VERSION}, Python {platform.python_version()}, "
        f"{platform.machine()}, one thread; medians of {ROUNDS} interleaved rounds.",
        "",
        "| tensor | digest | one xxh3_128 call | ratio | GB/s |",
        "|---|---:|---:|---:|---:|",
    ]
    missed = []
    for what, tensor, repeat in cases():
        own, yardstick, ratio = compare(tensor, repeat)
        speed = tensor.nbytes / own / 1e9
        lines.append(f"| {what} | {own * 1e6:,.1f} us | {yardstick * 1e6:,.1f} us | {ratio:.2f} | {speed:.1f} |")
        if what == "64 MiB float32" and ratio > GOAL_RATIO:
            missed.append(f"{what}: {ratio:.2f} times one call, goal {GOAL_RATIO}")
        if what == "1 KiB float32 parameter" and own * 1e6 > GOAL_CALL_US:
            missed.append(f"{what}: {own * 1e6:.1f} us, goal {GOAL_CALL_US}")
    lines += ["", *(missed or [f"Goals met: {GOAL_RATIO} times one call at 64 MiB, {GOAL_CALL_US} us at 1 KiB."])]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
