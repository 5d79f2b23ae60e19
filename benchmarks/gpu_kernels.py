"""Time the Triton kernels on a GPU: what each deterministic form costs, and how near the card's limits they are.

    python benchmarks/gpu_kernels.py --out benchmarks/results/gpu_kernels_h200_2026-11-30.md
    python benchmarks/gpu_kernels.py --sweep        # other tiles and warps of the GEMM, to choose the constants by

Forms that are compared are captured as CUDA graphs and replayed in turn, a round each, so that a drift of
the card's clocks meets both. A number is the median over rounds; a ratio is the median of the rounds'
ratios, with the middle 90 % of them. Inputs are random, of the shapes of the config `lite` where nothing
else is said, and larger than the L2 cache.

Long because each kernel has inputs and peers of its own.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bitcheck.reference_runs.kernels import gemm as gemm_module
from bitcheck.reference_runs.kernels import grouped_gemm as grouped_module
from bitcheck.reference_runs.kernels import grouped_wgrad as wgrad_module
from bitcheck.reference_runs.kernels import quantise as quantise_module
from bitcheck.reference_runs.kernels.combine import combine
from bitcheck.reference_runs.kernels.embedding import embedding_backward
from bitcheck.reference_runs.kernels.gemm import gemm, gemm_cublas
from bitcheck.reference_runs.kernels.grouped_gemm import DprobForm, grouped_dgrad_swiglu, grouped_gemm
from bitcheck.reference_runs.kernels.grouped_wgrad import WgradForm, grouped_wgrad
from bitcheck.reference_runs.kernels.norm import rmsnorm_backward, rmsnorm_forward
from bitcheck.reference_runs.kernels.quantise import quantise_columns, quantise_rows, quantise_weight
from bitcheck.reference_runs.kernels.schedule import schedule_groups
from bitcheck.reference_runs.kernels.ssm import Operands, scan_forward
from bitcheck.reference_runs.kernels.ssm_backward import scan_backward
from bitcheck.reference_runs.kernels.swiglu import swiglu_backward, swiglu_forward

D_MODEL = 2048
D_EXPERT = 1408
NUM_EXPERTS = 64
TOP_K = 6
TOKENS = 8192
Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, round by round."""

    rounds_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return quantile(self.rounds_ms, 0.5)


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile of `values` by linear interpolation."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def ratio(timing: Timing, to: Timing) -> str:
    """Return timing / to as text: the median over rounds and the middle 90 %."""
    ratios = [mine / other for mine, other in zip(timing.rounds_ms, to.rounds_ms, strict=True)]
    return f"{quantile(ratios, 0.5):.4f} ({quantile(ratios, 0.05):.4f} to {quantile(ratios, 0.95):.4f})"


def time_calls(calls: Sequence[Call], *, rounds: int = 30, target_ms: float = 4.0) -> list[Timing]:
    """Time `calls` in turn, `rounds` times, each as a replayed graph of enough repetitions for `target_ms`."""
    graphs = []
    for call in calls:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        side.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        repetitions = max(1, min(20, int(target_ms / start.elapsed_time(end))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repetitions):
                call()
        graph.replay()
        graphs.append((graph, repetitions))
    torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for index, (graph, repetitions) in enumerate(graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[index].append(start.elapsed_time(end) / repetitions)
    return [Timing(tuple(sample)) for sample in samples]


class Report:
    """Markdown that grows, and is printed as it grows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines
        print("\n".join(lines), flush=True)

    def table(self, header: str, rows: Sequence[Sequence[str]]) -> None:
        columns = header.split(" | ")
        self.add("", f"| {header} |", "|" + " --- |" * len(columns))
        self.add(*("| " + " | ".join(row) + " |" for row in rows))


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measure_ceilings(report: Report) -> tuple[float, float]:
    """Return (bytes/s of a pass over memory, FLOP/s of an FP8 product with one scale a tensor) on this card."""
    source = randn(2**31)
    target = torch.empty_like(source)
    (copy,) = time_calls([partial(torch.neg, source, out=target)], rounds=10)
    bandwidth = 2 * source.nbytes / copy.median_ms * 1e3
    del source, target
    size = 8192
    a, b = randn(size, size), randn(size, size)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def tensorwise(fast: bool) -> Call:
        return lambda: torch._scaled_mm(
            a8, b8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    bf16, fp8, fp8_slow = time_calls([lambda: a @ b.T, tensorwise(True), tensorwise(False)])
    flops = 2 * size**3 * 1e3
    report.add("", "## The card")
    report.table(
        "what | measured",
        [
            ["a pass that reads and writes (y = -x)", f"{bandwidth / 1e12:.2f} TB/s"],
            ["BF16 product 8192^3 (torch)", f"{flops / bf16.median_ms / 1e12:.0f} TFLOP/s"],
            [
                "FP8 product 8192^3, one scale a tensor, fast accumulation",
                f"{flops / fp8.median_ms / 1e12:.0f} TFLOP/s",
            ],
            ["the same with promoted accumulation", f"{flops / fp8_slow.median_ms / 1e12:.0f} TFLOP/s"],
        ],
    )
    return bandwidth, flops / fp8.median_ms


GEMMS = (
    (8192, 8192, 8192),
    (8192, 2 * D_EXPERT, D_MODEL),
    (8192, D_MODEL, D_EXPERT),
    (8192, 7168, 2048),
    (4096, 2112, 7168),
)
"""(M, N, K): square; an expert's up and down; V3's w2; V3's down-projections."""


def bench_gemm(report: Report, peak: float) -> None:
    """Compare the GEMM with torch's scaled_mm, for fprop (1x128 by 128x128) and wgrad (128x1 by 128x1)."""
    rows = []
    for num_rows, num_cols, num_k in GEMMS:
        x = quantise_rows(randn(num_rows, num_k))
        weight, _ = quantise_weight(randn(num_cols, num_k))
        by_rows = quantise_rows(randn(num_cols, num_k))
        for kind, rhs in (("fprop", weight), ("wgrad", by_rows)):
            ours = partial(gemm, x, rhs)
            peer = partial(gemm_cublas, x, rhs)
            try:
                peer()
                timings = time_calls([ours, peer])
            except Exception as error:  # noqa: BLE001 - reported in the table: the peer refuses some shapes
                timings = [*time_calls([ours])]
                print(f"scaled_mm {kind} {num_rows, num_cols, num_k}: {error}", file=sys.stderr)
            speed = [2e3 * num_rows * num_cols * num_k / timing.median_ms / 1e12 for timing in timings]
            rows.append(
                [
                    f"{kind} {num_rows} x {num_cols} x {num_k}",
                    f"{speed[0]:.0f}",
                    f"{speed[0] * 1e12 / peak:.2f}",
                    f"{speed[1]:.0f}" if len(speed) > 1 else "refused",
                    f"{speed[1] * 1e12 / peak:.2f}" if len(speed) > 1 else "",
                ]
            )
    report.add(
        "", "## FP8 GEMM against torch.nn.functional.scaled_mm", "", "TFLOP/s, and the fraction of the FP8 peak."
    )
    report.table("product M x N x K | ours | of peak | scaled_mm blockwise | of peak", rows)


def bench_quantise(report: Report, bandwidth: float) -> None:
    """Report the bandwidth of each quantisation, with both casts."""
    x = randn(32768, 4096)
    cached = quantise_rows(x)
    weight = randn(16, 4096, 4096)
    rows = []
    cases: list[tuple[str, Callable[[bool], Call], int]] = [
        ("rows, 1x128, from BF16", lambda bits: lambda: quantise_rows(x, by_bits=bits), 3 * x.numel()),
        ("columns, 128x1, from BF16", lambda bits: lambda: quantise_columns(x, by_bits=bits), 3 * x.numel()),
        ("columns, 128x1, from cached FP8", lambda bits: lambda: quantise_columns(cached, by_bits=bits), 2 * x.numel()),
        (
            "weight, 128x128, and its transpose",
            lambda bits: lambda: quantise_weight(weight, by_bits=bits),
            4 * weight.numel(),
        ),
    ]
    for name, make, num_bytes in cases:
        speeds = [num_bytes / timing.median_ms * 1e3 for timing in time_calls([make(False), make(True)])]
        rows.append([name, *(f"{speed / 1e12:.2f} ({speed / bandwidth:.2f})" for speed in speeds)])
    report.add("", "## Quantisation", "", "TB/s read and written, and the fraction of a pass over memory.")
    report.table("tiles | hardware cast | cast by bits", rows)


def make_routing(skewed: bool) -> torch.Tensor:
    """Return offsets int32 [E + 1] of TOKENS * TOP_K rows: as a router near balance gives them, or skewed."""
    weights = torch.ones(NUM_EXPERTS) if not skewed else 1.0 / torch.arange(1, NUM_EXPERTS + 1)
    experts = torch.multinomial(weights, TOKENS * TOP_K, replacement=True)
    return torch.cat([torch.zeros(1), experts.bincount(minlength=NUM_EXPERTS).cumsum(0)]).int().cuda()


def bench_experts(report: Report, peak: float) -> None:
    """Report the grouped GEMMs, the three forms of dprob, and the forms of wgrad."""
    num_rows = TOKENS * TOP_K
    flops = 2e3 * num_rows * D_MODEL * D_EXPERT
    gemm_rows, dprob_rows, wgrad_rows = [], [], []
    for name, skewed in (("near balance", False), ("skewed, 1/rank", True)):
        schedule = schedule_groups(make_routing(skewed), num_rows)
        x, dz = quantise_rows(randn(num_rows, D_MODEL)), quantise_rows(randn(num_rows, D_MODEL))
        w13, _ = quantise_weight(randn(NUM_EXPERTS, 2 * D_EXPERT, D_MODEL) * 0.02)
        w2, w2_t = quantise_weight(randn(NUM_EXPERTS, D_MODEL, D_EXPERT) * 0.02)
        hidden = randn(num_rows, 2 * D_EXPERT)
        hidden_fp8 = quantise_rows(hidden)
        act = quantise_rows(randn(num_rows, D_EXPERT))
        prob = torch.rand(num_rows, device="cuda")
        up, down, dgrad = time_calls(
            [
                partial(grouped_gemm, x, w13, schedule),
                partial(grouped_gemm, act, w2, schedule),
                partial(grouped_gemm, dz, w2_t, schedule),
            ]
        )
        for what, timing, work in (("up", up, 2 * flops), ("down", down, flops), ("dgrad of down", dgrad, flops)):
            speed = work / timing.median_ms
            gemm_rows.append(
                [f"{what}, {name}", f"{timing.median_ms:.3f}", f"{speed / 1e12:.0f}", f"{speed / peak:.2f}"]
            )
        for cache, inputs in (("BF16", hidden), ("FP8", hidden_fp8)):
            slots, serial, atomic, atomic_again = time_calls(
                [partial(grouped_dgrad_swiglu, dz, w2_t, schedule, inputs, prob, form=form) for form in DPROB_FORMS]
            )
            for what, timing in (("slots", slots), ("serial", serial), ("atomic again", atomic_again)):
                dprob_rows.append(
                    [
                        f"{what}, h in {cache}, {name}",
                        f"{timing.median_ms:.3f}",
                        f"{atomic.median_ms:.3f}",
                        ratio(timing, atomic),
                    ]
                )
        dy, xt = (
            quantise_columns(randn(num_rows, D_EXPERT), schedule),
            quantise_columns(randn(num_rows, D_MODEL), schedule),
        )
        out = torch.zeros(NUM_EXPERTS, D_EXPERT, D_MODEL, device="cuda")
        forms: list[tuple[WgradForm, int]] = [
            ("atomic", 2),
            ("workspace", 1),
            ("workspace", 2),
            ("atomic", 4),
            ("workspace", 4),
        ]
        timings = time_calls(
            [partial(grouped_wgrad, dy, xt, schedule, form=form, num_parts=parts, out=out) for form, parts in forms]
        )
        for (form, parts), timing in zip(forms, timings, strict=True):
            speed = flops / timing.median_ms
            wgrad_rows.append(
                [
                    f"{form}, {parts} parts, {name}",
                    f"{timing.median_ms:.3f}",
                    f"{speed / 1e12:.0f}",
                    ratio(timing, timings[0]),
                ]
            )
    bf16 = [randn(num_rows, D_MODEL), randn(NUM_EXPERTS, 2 * D_EXPERT, D_MODEL).transpose(1, 2)]
    ends = make_routing(False)[1:]
    (timing,) = time_calls([partial(torch.nn.functional.grouped_mm, *bf16, offs=ends)])
    speed = 2 * flops / timing.median_ms
    gemm_rows.append(
        ["up in BF16, torch grouped_mm", f"{timing.median_ms:.3f}", f"{speed / 1e12:.0f}", f"{speed / peak:.2f}"]
    )
    wgrad_rows += bench_small_wgrad()
    report.add("", "## Grouped GEMM over 64 experts", "", f"{num_rows} rows, widths {D_MODEL} and {D_EXPERT}.")
    report.table("product | ms | TFLOP/s | of peak", gemm_rows)
    report.add(
        "", "## dprob in the epilogue of the grouped dgrad", "", "The whole launch: GEMM, SwiGLU backward, dprob."
    )
    report.table("form | ms | atomic, ms | form / atomic", dprob_rows)
    report.add("", "## Grouped wgrad, added to a float32 gradient")
    report.table("form | ms | TFLOP/s | form / atomic in 2 parts", wgrad_rows)


def bench_small_wgrad() -> list[list[str]]:
    """Return rows for one weight of few tiles and many tokens, where splitting the tokens pays."""
    num_tokens, num_rows, num_cols = 16384, 576, D_MODEL
    schedule = schedule_groups(torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda"), num_tokens)
    dy, x = (quantise_columns(randn(num_tokens, width), schedule) for width in (num_rows, num_cols))
    out = torch.zeros(1, num_rows, num_cols, device="cuda")
    forms: list[tuple[WgradForm, int]] = [("atomic", 4), ("workspace", 1), ("workspace", 4), ("atomic", 8)]
    forms.append(("workspace", 8))
    timings = time_calls(
        [partial(grouped_wgrad, dy, x, schedule, form=form, num_parts=parts, out=out) for form, parts in forms]
    )
    return [
        [
            f"{form}, {parts} parts, one weight {num_rows} x {num_cols}, {num_tokens} tokens",
            f"{timing.median_ms:.3f}",
            f"{2e-9 * num_tokens * num_rows * num_cols / timing.median_ms:.0f}",
            ratio(timing, timings[0]) + " of 4 parts",
        ]
        for (form, parts), timing in zip(forms, timings, strict=True)
    ]


def bench_reductions(report: Report, bandwidth: float) -> None:
    """Report the other pairs of forms."""
    y = randn(TOKENS * TOP_K, D_MODEL)
    row_of = torch.randperm(TOKENS * TOP_K, device="cuda").view(TOKENS, TOP_K)
    x, dy, weight = randn(32768, D_MODEL), randn(32768, D_MODEL), randn(D_MODEL)
    _, rstd = rmsnorm_forward(x, weight)
    text = torch.multinomial(1.0 / torch.arange(1, 257, dtype=torch.float), len(x), replacement=True).cuda()
    words = torch.multinomial(1.0 / torch.arange(1, 102401, dtype=torch.float), len(x), replacement=True).cuda()
    seqs, length, heads, head_dim, state = 4, 4096, 64, 64, 128
    scan = Operands(
        randn(seqs, length, heads, head_dim),
        torch.rand(seqs, length, heads, device="cuda") * 0.1,
        -torch.rand(heads, device="cuda") * 8,
        randn(seqs, length, state),
        randn(seqs, length, state),
        torch.rand(heads, device="cuda"),
    )
    dscan = randn(seqs, length, heads, head_dim)
    pairs: list[tuple[str, Call, Call]] = [
        (
            f"combine, {TOKENS} tokens of {TOP_K}: gather / atomic",
            lambda: combine(y, row_of, form="gather"),
            lambda: combine(y, row_of, form="atomic"),
        ),
        (
            "RMSNorm backward, 32768 x 2048: two-stage / atomic",
            lambda: rmsnorm_backward(dy, x, weight, rstd, form="two-stage"),
            lambda: rmsnorm_backward(dy, x, weight, rstd, form="atomic"),
        ),
        (
            "embedding, 32768 tokens of 256: sorted / atomic",
            lambda: embedding_backward(dy, text, 256, form="sorted"),
            lambda: embedding_backward(dy, text, 256, form="atomic"),
        ),
        (
            "embedding, 32768 tokens of 102400: sorted / atomic",
            lambda: embedding_backward(dy, words, 102400, form="sorted"),
            lambda: embedding_backward(dy, words, 102400, form="atomic"),
        ),
        (
            "scan backward, 4 x 4096, 64 heads of 64, state 128: workspace / atomic",
            lambda: scan_backward(dscan, scan, 64, form="workspace"),
            lambda: scan_backward(dscan, scan, 64, form="atomic"),
        ),
    ]
    rows = []
    for name, deterministic, atomic in pairs:
        first, second = time_calls([deterministic, atomic])
        rows.append([name, f"{first.median_ms:.3f}", f"{second.median_ms:.3f}", ratio(first, second)])
    report.add("", "## The other reductions")
    report.table("kernel | deterministic, ms | atomic, ms | ratio", rows)

    gate, up, dact = (randn(65536, D_EXPERT) for _ in range(3))
    forward, backward, norm, scan_fwd = time_calls(
        [
            lambda: swiglu_forward(gate, up),
            lambda: swiglu_backward(dact, gate, up),
            lambda: rmsnorm_forward(x, weight),
            lambda: scan_forward(scan, 64, out_dtype=torch.bfloat16),
        ]
    )
    size = 2 * gate.numel()
    report.table(
        "elementwise | ms | TB/s (of a pass)",
        [
            [
                name,
                f"{timing.median_ms:.3f}",
                f"{size_ / timing.median_ms / 1e9:.2f} ({size_ / timing.median_ms * 1e3 / bandwidth:.2f})",
            ]
            for name, timing, size_ in (
                ("SwiGLU forward", forward, 3 * size),
                ("SwiGLU backward", backward, 5 * size),
                ("RMSNorm forward", norm, 4 * x.numel()),
            )
        ]
        + [["scan forward, as above", f"{scan_fwd.median_ms:.3f}", ""]],
    )


DPROB_FORMS: tuple[DprobForm, ...] = ("slots", "serial", "atomic", "atomic")
"""Atomic twice: how far apart the same thing is from itself."""

SWEEP = ((64, 4, 3, None), (64, 4, 3, 168), (64, 4, 4, None), (128, 8, 3, None))
"""(rows of a tile, warps, stages, registers a thread at most)."""


def sweep(report: Report) -> None:
    """Time the GEMMs with other constants than the pinned ones."""
    from triton.runtime.jit import JITFunction

    run: Any = JITFunction.run
    num_rows = TOKENS * TOP_K
    schedule = schedule_groups(make_routing(False), num_rows)
    grouped = quantise_rows(randn(num_rows, D_MODEL))
    w13, _ = quantise_weight(randn(NUM_EXPERTS, 2 * D_EXPERT, D_MODEL))
    _, w2_t = quantise_weight(randn(NUM_EXPERTS, D_MODEL, D_EXPERT))
    hidden, prob = randn(num_rows, 2 * D_EXPERT), torch.rand(num_rows, device="cuda")
    hidden_fp8 = quantise_rows(hidden)
    dy, xt = (quantise_columns(randn(num_rows, width), schedule) for width in (D_EXPERT, D_MODEL))
    dweight = torch.zeros(NUM_EXPERTS, D_EXPERT, D_MODEL, device="cuda")
    square = [quantise_rows(randn(8192, 8192)), quantise_weight(randn(8192, 8192))[0]]
    calls: dict[str, tuple[Call, float]] = {
        "8192^3 fprop": (partial(gemm, *square), 8192**3),
        "8192^3 wgrad": (partial(gemm, square[0], square[0]), 8192**3),
        "grouped up": (partial(grouped_gemm, grouped, w13, schedule), 2 * num_rows * D_MODEL * D_EXPERT),
        "dgrad, SwiGLU, slots": (
            partial(grouped_dgrad_swiglu, grouped, w2_t, schedule, hidden, prob, form="slots"),
            num_rows * D_MODEL * D_EXPERT,
        ),
        "the same, h in FP8": (
            partial(grouped_dgrad_swiglu, grouped, w2_t, schedule, hidden_fp8, prob, form="slots"),
            num_rows * D_MODEL * D_EXPERT,
        ),
        "grouped wgrad": (
            partial(grouped_wgrad, dy, xt, schedule, form="workspace", out=dweight),
            num_rows * D_MODEL * D_EXPERT,
        ),
    }
    report.add("", "GEMMs in TFLOP/s: " + ", ".join(calls), "")
    for tile_m, warps, stages, registers in SWEEP:
        for module in (gemm_module, grouped_module):
            vars(module).update(TILE_M=tile_m, NUM_WARPS=warps, NUM_STAGES=stages)
        vars(wgrad_module).update(TILE_N=tile_m, NUM_WARPS=warps, NUM_STAGES=stages)

        def capped(self: Any, *args: Any, registers: int | None = registers, **kwargs: Any) -> Any:
            if "TILE_N" in kwargs and registers:
                kwargs["maxnreg"] = registers
            return run(self, *args, **kwargs)

        JITFunction.run = capped
        speeds = []
        for call, work in calls.values():
            (timing,) = time_calls([call], rounds=5)
            speeds.append(f"{2e-9 * work / timing.median_ms:.0f}")
        limit = f"{registers} registers" if registers else "any registers"
        report.add(f"- {tile_m} rows, {warps} warps, {stages} stages, {limit}: {', '.join(speeds)}")
    JITFunction.run = run

    x, weight = randn(32768, 4096), randn(16, 4096, 4096)
    cached = quantise_rows(x)
    rows: list[list[str]] = []
    for tile, warps in ((64, 4), (32, 4), (128, 4), (128, 8), (64, 8)):
        vars(quantise_module).update(COLUMNS_TILE=tile, COLUMNS_WARPS=warps)
        plain, again = time_calls([partial(quantise_columns, x), partial(quantise_columns, cached)], rounds=5)
        rows.append(
            [f"columns, {tile} channels, {warps} warps", tera(3 * x.numel(), plain), tera(2 * x.numel(), again)]
        )
    for tile in (16, 32, 64):
        vars(quantise_module).update(ROWS_TILE=tile)
        (plain,) = time_calls([partial(quantise_rows, x)], rounds=5)
        rows.append([f"rows, {tile} rows, 4 warps", tera(3 * x.numel(), plain), ""])
    for warps in (4, 8, 16):
        vars(quantise_module).update(WEIGHT_WARPS=warps)
        (plain,) = time_calls([partial(quantise_weight, weight)], rounds=5)
        rows.append([f"weight, {warps} warps", tera(4 * weight.numel(), plain), ""])
    report.table("quantisation | from BF16, TB/s | from FP8, TB/s", rows)


def tera(num_bytes: int, timing: Timing) -> str:
    """Return bytes over time as text in TB/s."""
    return f"{num_bytes / timing.median_ms / 1e9:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the report there, as markdown")
    parser.add_argument("--sweep", action="store_true", help="time other constants of the GEMM instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    import triton

    report = Report()
    properties = torch.cuda.get_device_properties(0)
    report.add("# The trainer's kernels on one GPU", "")
    report.add(f"- device: {properties.name}, {properties.multi_processor_count} multiprocessors")
    report.add(
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"CUDA {torch.version.cuda}"
    )
    report.add(f"- command: `python {' '.join(sys.argv)}`")
    if options.sweep:
        sweep(report)
        return
    bandwidth, peak = measure_ceilings(report)
    bench_gemm(report, peak)
    bench_quantise(report, bandwidth)
    bench_experts(report, peak)
    bench_reductions(report, bandwidth)
    if options.out:
        options.out.write_text("\n".join(report.lines) + "\n")


if __name__ == "__main__":
    main()
