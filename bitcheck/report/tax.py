"""What determinism costs, as text.

deterministic takes 1.021 times as long as fast (1.015 to 1.030, 97.9 %)

fast            95.1 ms a step
deterministic   97.2 ms a step   1.021  (1.015 to 1.030)
"""

from __future__ import annotations

from typing import TextIO

from bitcheck.report.text import Section, print_report
from bitcheck.statistics import percent
from bitcheck.tax import Tax, TaxRow


def print_tax(tax: Tax, file: TextIO | None = None) -> None:
    """Print the step times and ratios."""
    print_report(tax_headline(tax), "cyan", tax_sections(tax), file)


def tax_headline(tax: Tax) -> str:
    """Return the first line: the ratio of the first row."""
    row = tax.rows[0]
    return f"{row.name} takes {row.ratio.estimate:.3f} times as long as {tax.baseline} {_limits(row)}"


def tax_sections(tax: Tax) -> list[Section]:
    """Return everything below the headline."""
    parts: list[Section] = [(tax.baseline, [f"{tax.baseline_ms:.1f} ms a step"])]
    for row in tax.rows:
        parts.append((row.name, [f"{row.step_ms:.1f} ms a step, {row.ratio.estimate:.3f} times {_limits(row)}"]))
    parts.append(("", [""]))
    whose = "on the GPU" if tax.clock == "gpu" else "by the clock of the host"
    parts.append(
        (
            "measured",
            [
                f"{tax.num_steps} steps of each {whose}, in turn; the first {tax.warmup} of each run left out; ratios "
                f"of {tax.num_ratios} neighbours in time"
            ],
        )
    )
    if tax.notes:
        parts.append(("notes", list(tax.notes)))
    return parts


def _limits(row: TaxRow) -> str:
    low, high, confidence = row.ratio.low, row.ratio.high, row.ratio.confidence
    return f"({low:.3f} to {high:.3f}, {percent(confidence)} confidence)"
