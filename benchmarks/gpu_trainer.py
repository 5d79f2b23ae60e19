"""Time whole training steps on one GPU: FP8 against BF16, the deterministic recipe against the fast one, each switch.

    python -m benchmarks.gpu_trainer --config lite --config lite-hybrid --out benchmarks/results/FILE.md
    python -m benchmarks.gpu_trainer --config lite --profile        # where the time of a step goes

One trainer in one process: its forms and its precision are changed between steps, so that every variant has the
same memory, the same routing and the same card. All variants take a step in turn, in an order that changes each
time; a ratio is of two steps of one round, and what is given is the median ratio with its interval
(`bitcheck.tax`). A step is all of it: batch, forward, backward, clipping, optimizer, FP8 weights, and the start
of the average's update; it ends when the GPU is done.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kernels import Report, time_calls
from bitcheck.reference_runs.attention import AttentionCore
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import read_text
from bitcheck.reference_runs.embedding import Embedding
from bitcheck.reference_runs.experts import WeightedDown
from bitcheck.reference_runs.linear import GroupedLinear, Precision, Weight
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.moe import Combine, Dispatch, TopK
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.scan import Scan
from bitcheck.reference_runs.switches import TABLE, Switches
from bitcheck.reference_runs.train import Options, Trainer, deterministic_algorithms
from bitcheck.tax import Tax, tax_variants

FIXED: tuple[tuple[Any, str, str], ...] = (
    (RMSNorm, "is_fixed", "norm.dweight"),
    (Embedding, "is_fixed", "embedding.backward"),
    (AttentionCore, "is_fixed", "attention.backward"),
    (Scan, "is_fixed", "ssm.backward"),
    (TopK, "is_stable", "moe.topk"),
    (Dispatch, "is_fixed", "moe.combine"),
    (Combine, "is_fixed", "moe.combine"),
)
"""A kind of module, its attribute, and the switch that decides it."""


class Variant:
    """One way to run: a precision and the form of every switch."""

    def __init__(self, trainer: Trainer, precision: Precision, switches: Switches) -> None:
        self.trainer, self.precision, self.switches = trainer, precision, switches

    def __call__(self) -> float:
        """Take one step this way and return its seconds; where the precision changes, one untimed step before."""
        is_new = set_precision(self.trainer.model, self.precision)
        set_forms(self.trainer.model, self.switches)
        with deterministic_algorithms(self.switches):
            if is_new:
                self.trainer.train_step()
            return self.trainer.train_step().seconds


def set_forms(model: Model, switches: Switches) -> None:
    """Give every module of `model` the forms that `switches` has."""
    for module in model.modules():
        for kind, attribute, name in FIXED:
            if isinstance(module, kind):
                setattr(module, attribute, switches.is_fixed(name))
        if isinstance(module, (GroupedLinear, WeightedDown)):
            module.options = module.options._replace(is_wgrad_fixed=switches.is_fixed("moe.wgrad"))
        if isinstance(module, WeightedDown):
            module.dprob_form = switches["moe.dprob"]


def set_precision(model: Model, precision: Precision) -> bool:
    """Let every product of `model` run in `precision`; return whether that is new."""
    weights = [module for module in model.modules() if isinstance(module, Weight)]
    if weights[0].precision == precision:
        return False
    for weight in weights:
        weight.precision = precision
    for module in model.modules():
        if isinstance(module, Dispatch):
            module.is_fp8 = precision == "fp8"
    model.derive_weights()
    return True


def count_flops(trainer: Trainer) -> tuple[float, float]:
    """Return the operations of a step's products with FP8 weights, forward and backward: (as trained, with recompute).

    Routed experts count for the tokens that they get; recomputed are MLA's up-projections.
    """
    model, tokens = trainer.config.model, trainer.config.data.tokens_per_step
    trained = again = 0.0
    for name, module in trainer.model.named_modules():
        if isinstance(module, Weight):
            rows = tokens * model.top_k / model.num_experts if module.weight.dim() == 3 else tokens
            forward = 2.0 * rows * module.weight.numel()
            trained += 3 * forward
            again += forward * name.endswith(("wq_b", "wkv_b"))
    return trained, trained + again


def measure_peak() -> float:
    """Return the FLOP/s of an FP8 product 8192^3 with one scale a tensor on this card."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    (timing,) = time_calls(
        [lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)],
        rounds=10,
    )
    return 2e3 * size**3 / timing.median_ms


BASELINE = "FP8, deterministic"
FASTER = ("moe.combine=gather", "moe.wgrad=workspace", "embedding.backward=sorted")
"""Deterministic forms that take less time than their free ones do (`gpu_kernels`)."""


def make_variants(trainer: Trainer) -> dict[str, Variant]:
    """Return every variant by name, the baseline first."""
    variants = {
        BASELINE: Variant(trainer, "fp8", Switches.from_options()),
        "the same again": Variant(trainer, "fp8", Switches.from_options()),
        "BF16, deterministic": Variant(trainer, "bf16", Switches.from_options()),
        "FP8, fast": Variant(trainer, "fp8", Switches.from_options("fast")),
        "FP8, fast but where deterministic is faster": Variant(trainer, "fp8", Switches.from_options("fast", FASTER)),
    }
    has_scan = "ssm" in trainer.config.model.mixers
    settings = [f"{s.name}={form}" for s in TABLE.values() for form in s.free if has_scan or s.name != "ssm.backward"]
    for setting in [*settings, "moe.dprob=serial"]:
        variants[setting] = Variant(trainer, "fp8", Switches.from_options(settings=[setting]))
    return variants


@contextmanager
def make_trainer(config_name: str) -> Iterator[Trainer]:
    """A trainer of `config_name` on the GPU, whose memory is free again afterwards."""
    trainer = Trainer(get_config(config_name), read_text(None), Options(steps=1, device="cuda"))
    try:
        yield trainer
    finally:
        trainer.ema.close()
        del trainer
        torch.cuda.empty_cache()


def bench(report: Report, config_name: str, peak: float, rounds: int, warmup: int) -> None:
    """Measure one configuration."""
    with make_trainer(config_name) as trainer:
        torch.cuda.reset_peak_memory_stats()

        def tell(done: int, total: int) -> None:
            print(f"{config_name}: round {done} of {total}", file=sys.stderr)

        variants = make_variants(trainer)
        tax = tax_variants(BASELINE, dict(variants), steps=rounds, warmup=warmup, clock="gpu", tell=tell)
        describe(report, trainer, tax, peak)


def describe(report: Report, trainer: Trainer, tax: Tax, peak: float) -> None:
    """Write what was measured as Markdown."""
    config, tokens = trainer.config, trainer.config.data.tokens_per_step
    trained, with_recompute = count_flops(trainer)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    mixers = (*config.model.mixers, "mla")  # MTP's block
    width = config.model.d_nope + config.model.d_rope + config.model.d_value
    # Causal: half of the pairs, two operations each; backward is 2.5 times the forward.
    attention = 3.5 * tokens * mixers.count("mla") * config.data.seq_len * config.model.num_heads * width
    report.add("", f"## {config.name}", "")
    report.add(
        f"{num_parameters / 1e9:.2f} billion parameters; {tokens:,} tokens a step in {config.data.micro_batches}"
        f" micro-batches; products with FP8 weights: {trained / 1e12:.0f} TFLOP a step"
        f" ({with_recompute / 1e12:.0f} with recompute), attention some {attention / 1e12:.0f};"
        f" peak memory {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB; {tax.num_ratios} rounds.",
    )
    speeds = [(tax.baseline, tax.baseline_ms), *((row.name, row.step_ms) for row in tax.rows[1:3])]
    report.table(
        "step | ms | tokens/s | TFLOP/s in products | of the FP8 peak",
        [
            [
                name,
                f"{ms:.1f}",
                f"{tokens / ms * 1e3:,.0f}",
                f"{trained / ms / 1e9:.0f}",
                f"{trained / ms * 1e3 / peak:.2f}",
            ]
            for name, ms in speeds
        ],
    )
    confidence = f"{tax.rows[0].ratio.confidence:.0%}"
    report.add(
        "", f"Time of a step over that of `{tax.baseline}`, median of the rounds' ratios ({confidence} interval):"
    )
    report.table(
        "variant | ms | ratio | interval",
        [
            [row.name, f"{row.step_ms:.1f}", f"{r.estimate:.4f}", f"{r.low:.4f} to {r.high:.4f}"]
            for row in tax.rows
            for r in (row.ratio,)
        ],
    )
    for row in tax.rows:
        if row.name.startswith("FP8, fast"):
            cost, low, high = (100 * (1 / ratio - 1) for ratio in (row.ratio.estimate, row.ratio.high, row.ratio.low))
            report.add("", f"Deterministic over `{row.name}`: {cost:+.2f} % of a step ({low:+.2f} to {high:+.2f} %).")


def profile(config_name: str, precision: Precision, recipe: str) -> None:
    """Print the kernels that a step's time goes to, and the times in which the GPU had nothing to do."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    switches = Switches.from_options(recipe)
    with make_trainer(config_name) as trainer, deterministic_algorithms(switches):
        set_precision(trainer.model, precision)
        set_forms(trainer.model, switches)
        for _ in range(3):
            seconds = trainer.train_step().seconds
        with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            trainer.train_step()
        print(f"# {config_name}, {precision}, {recipe}: {1e3 * seconds:.1f} ms a step without the profiler\n")
        print(recorded.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=60))
        kernels = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in recorded.events() or ()
            if event.device_type.name == "CUDA" and "Memcpy DtoH" not in event.name
        )
        print_gaps(kernels)


def print_gaps(kernels: list[tuple[float, float, str]]) -> None:
    """Print how much of the time from the first kernel to the last no kernel ran, and the longest of these times."""
    gaps, end, last = [], kernels[0][1], kernels[0][2]
    for start, stop, name in kernels[1:]:
        if start > end:
            gaps.append((start - end, last, name))
        if stop > end:
            end, last = stop, name
    total = end - kernels[0][0]
    idle = sum(gap for gap, _, _ in gaps)
    print(
        f"\n{len(kernels)} kernels in {total / 1e3:.1f} ms; idle {idle / 1e3:.1f} ms in {len(gaps)} gaps; the longest:"
    )
    for gap, before, after in sorted(gaps, reverse=True)[:15]:
        print(f"  {gap:8.0f} us  after {before[:50]:<50}  before {after[:50]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", help="a configuration; repeatable (default: lite)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each variant that count")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each variant that do not")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes instead")
    parser.add_argument("--precision", choices=["fp8", "bf16"], default="fp8", help="for --profile")
    parser.add_argument("--recipe", choices=["deterministic", "fast"], default="deterministic", help="for --profile")
    parser.add_argument("--out", type=Path, help="write the report there, as Markdown")
    options = parser.parse_args()
    configs = options.config or ["lite"]
    if options.profile:
        for name in configs:
            profile(name, options.precision, options.recipe)
        return
    import triton

    report = Report()
    properties = torch.cuda.get_device_properties(0)
    peak = measure_peak()
    report.add("# The reference trainer on one GPU", "")
    report.add(f"- device: {properties.name}, {properties.multi_processor_count} multiprocessors")
    report.add(
        f"- versions: Python {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"CUDA {torch.version.cuda}"
    )
    report.add(f"- command: `python -m benchmarks.gpu_trainer {' '.join(sys.argv[1:])}`")
    report.add(f"- FP8 peak here, 8192^3 with one scale a tensor: {peak / 1e12:.0f} TFLOP/s")
    for name in configs:
        bench(report, name, peak, options.rounds, options.warmup)
        if options.out:
            options.out.write_text("\n".join(report.lines) + "\n")


if __name__ == "__main__":
    main()
