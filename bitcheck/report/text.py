"""An answer as text for people: the verdict first, then where, why and what to do, then what was compared.

    DIVERGED in step 2: backward/core:grad_in.0 (cause: backward)

    where        step 2, backward, core, op BlockwiseAttentionBackward
                 backward/core:grad_in.0  float32 [4, 48, 32]  within elements 0 to 6,143 of 6,144
    why          core (BlockwiseAttentionBackward) gave other bits from equal inputs in the backward ...
    what to do   ...

    compared     6 steps, 1 rank, 812 events, 1.2 MB

On a terminal rich sets it, wrapped to the window and coloured (NO_COLOR is honoured). In a pipe it
is plain: one line an item, nothing wrapped, cut, or taken for markup.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TextIO

from bitcheck.answer import Answer, Cause, Origin, Verdict
from bitcheck.explain import format_ranks, word_processes
from bitcheck.wording import counted, word_line, word_status

MAX_ORIGINS = 5
"""Origins listed without `--all`."""
MAX_ALSO = 3
MAX_DIFFERENCES = 6

Section = tuple[str, list[str]]
"""A label and its lines."""


def print_answer(answer: Answer, *, show_all: bool = False, file: TextIO | None = None) -> None:
    """Print an answer on `file` (standard output)."""
    print_report(headline(answer), _STYLE[answer.verdict], sections(answer, show_all), file)


def print_report(title: str, style: str, parts: Sequence[Section], file: TextIO | None = None) -> None:
    """Print a headline and labelled sections: set by rich on a terminal, plain lines elsewhere."""
    stream = sys.stdout if file is None else file
    if stream.isatty():
        _print_rich(title, style, parts, stream)
    else:
        stream.write(render_plain(title, parts))


def render_plain(title: str, parts: Sequence[Section]) -> str:
    """Return the report as plain text, one line an item."""
    width = max((len(label) for label, _ in parts), default=0) + 3
    lines = [title, ""]
    for label, items in parts:
        for number, item in enumerate(items):
            lines.append(f"{'' if number else label:<{width}}{item}".rstrip())
    return "\n".join(lines).rstrip("\n") + "\n"


def _print_rich(title: str, style: str, parts: Sequence[Section], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    word, _, rest = title.partition(" ")
    console.print(Text.assemble((word, f"bold {style}"), f" {rest}", overflow="fold"))
    console.print()
    grid = Table.grid(padding=(0, 3))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for label, items in parts:
        for number, item in enumerate(items):
            grid.add_row(Text("" if number else label), Text(item, overflow="fold"))
    console.print(grid)


_STYLE = {Verdict.IDENTICAL: "green", Verdict.DIVERGED: "red", Verdict.INCOMPARABLE: "yellow"}


def headline(answer: Answer) -> str:
    """Return the first line: the verdict, and where."""
    if answer.verdict is Verdict.IDENTICAL:
        limit = ", of the recorded processes alone" if any(run.unrecorded for run in answer.runs) else ""
        return f"IDENTICAL over {_amounts(answer)}{limit}."
    if answer.verdict is Verdict.INCOMPARABLE:
        return f"INCOMPARABLE. {answer.explanation}"
    first = answer.first
    if first is None:
        return f"DIVERGED: equal up to step {answer.aligned.last_step}, then one run ended (cause: {answer.cause})."
    rank = f" on rank {first.rank}" if answer.compared.ranks > 1 else ""
    when = f"in step {first.step}"
    if answer.cause is Cause.INITIAL_STATE:
        when = f"before step {first.step + 1}"
    elif answer.cause is Cause.RESTORE:
        when = f"on resuming after step {first.step}"
    return f"DIVERGED {when}{rank}: {first.site} (cause: {answer.cause})"


def sections(answer: Answer, show_all: bool = False) -> list[Section]:
    """Return everything below the headline, as labels and lines."""
    parts: list[Section] = []
    if answer.first is not None:
        parts.append(("where", _where(answer, answer.first)))
    if answer.verdict is not Verdict.INCOMPARABLE:
        parts.append(("why" if answer.verdict is Verdict.DIVERGED else "what", [answer.explanation]))
    if answer.remedy:
        parts.append(("what to do", [answer.remedy]))
    if len(answer.origins) > 1 or (show_all and answer.origins):
        parts.append(
            (f"{len(answer.origins)} {'origin' if len(answer.origins) == 1 else 'origins'}", _origins(answer, show_all))
        )
    if parts:
        parts.append(("", [""]))
    parts.append(("compared", _compared(answer)))
    if answer.environment:
        shown = answer.environment if show_all else answer.environment[:MAX_DIFFERENCES]
        lines = [f"{entry.key}: {_or_unset(entry.baseline)} -> {_or_unset(entry.candidate)}" for entry in shown]
        parts.append(("environment", [*lines, *_more(len(answer.environment) - len(shown))]))
    if answer.notes:
        parts.append(("notes", list(answer.notes)))
    if answer.unobserved:
        parts.append(("unobserved", [f"{count:,} x {what}" for what, count in answer.unobserved.items()]))
    return parts


def _where(answer: Answer, first: Origin) -> list[str]:
    is_snapshot = answer.cause in (Cause.INITIAL_STATE, Cause.RESTORE)
    facts = [f"state after step {first.step}" if is_snapshot and first.step >= 0 else f"step {first.step}"]
    if is_snapshot and first.step < 0:
        facts = ["initial state"]
    if answer.compared.ranks > 1:
        facts.append(f"rank {first.rank}")
    facts.append(first.phase)
    if first.module:
        facts.append(first.module)
    if first.op:
        facts.append(f"op {first.op}")
    asked = [word_line(first.line)] if first.line is not None else []
    return [", ".join(facts), describe_tensor(first), *asked]


def describe_tensor(origin: Origin) -> str:
    """Return an origin's site with what is known of its tensor, on one line."""
    facts = [origin.site, f"{origin.dtype} [{', '.join(map(str, origin.shape))}]"]
    if origin.elements is not None and origin.shape:
        begin, end = origin.elements
        facts.append(f"within elements {begin:,} to {end:,} of {math.prod(origin.shape):,}")
    if origin.missing_in:
        facts.append(f"missing in the {origin.missing_in}")
    if origin.baseline_value is not None and origin.candidate_value is not None:
        facts.append(f"{origin.baseline_value} -> {origin.candidate_value}")
    return "  ".join(facts)


def _origins(answer: Answer, show_all: bool) -> list[str]:
    """Each origin on a line; without `--all` only a few, and what several ranks have in common once."""
    groups: dict[tuple[object, ...], list[Origin]] = {}
    for number, origin in enumerate(answer.origins):
        key = (number,) if show_all else (origin.step, origin.site, origin.missing_in, origin.also)
        groups.setdefault(key, []).append(origin)
    shown = list(groups.values()) if show_all else list(groups.values())[:MAX_ORIGINS]
    lines = []
    for origins in shown:
        origin = origins[0]
        ranks = [rank for other in origins for rank in (other.ranks or (other.rank,))]
        where = f", {format_ranks(ranks)}" if answer.compared.ranks > 1 else ""
        lines.append(f"step {origin.step}{where}: {describe_tensor(origin)}")
        also = origin.also if show_all else origin.also[:MAX_ALSO]
        lines.extend(f"  also {site}" for site in also)
        if len(also) < len(origin.also):
            lines.append(f"  and {len(origin.also) - len(also):,} more")
    return [*lines, *_more(len(answer.origins) - sum(map(len, shown)))]


def _compared(answer: Answer) -> list[str]:
    lines = []
    if answer.verdict is Verdict.DIVERGED:
        lines.append(_amounts(answer))
    for name, run in zip(("baseline", "candidate"), answer.runs, strict=True):
        span = "no whole step" if run.first_step is None else f"steps {run.first_step} to {run.last_step}"
        ranks = counted(run.world_size, "rank")
        beside = f"; unrecorded: {word_processes(run.unrecorded)} that trained" if run.unrecorded else ""
        lines.append(f"{name} {run.path}: {span}, {ranks}, level {run.level}, {word_status(run.status)}{beside}")
    return lines


def _amounts(answer: Answer) -> str:
    compared = answer.compared
    steps = counted(compared.steps, "step")
    ranks = counted(compared.ranks, "rank")
    return f"{steps}, {ranks}, {compared.events:,} events ({format_bytes(compared.bytes)})"


def format_bytes(count: int) -> str:
    """Return a number of bytes in decimal units: `1.2 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def _more(count: int) -> list[str]:
    return [f"and {count:,} more (--all lists them)"] if count > 0 else []


def _or_unset(value: str | None) -> str:
    return "unset" if value is None else value
