"""What is in a run, as text for people: `bitcheck show`.

    runs/a: 6 steps, 1 rank, level module, complete

    steps        0 to 5, an initial snapshot before and a fragment after them
    recorded     812 events (1.2 MB) on rank 0
    step 5       batch 1, rng 3, forward 14, ...

Same rules as `bitcheck.report.text`: set by rich on a terminal, plain lines in a pipe.
"""

from __future__ import annotations

import shlex
from typing import TextIO

from bitcheck.explain import format_ranks
from bitcheck.report.text import Section, format_bytes, print_report
from bitcheck.summary import RecordedEvent, RunSummary, StepSummary
from bitcheck.wording import counted, word_status

_STYLE = {"complete": "green", "failed": "red", "killed": "red", "recording": "yellow", "stopped": "green"}


def print_run(summary: RunSummary, file: TextIO | None = None) -> None:
    """Print what is in a run."""
    info = summary.info
    size = info.get("world_size", 1)
    ranks = counted(size, "rank")
    steps = counted(summary.num_steps, "step")
    title = f"{summary.path}: {steps}, {ranks}, level {info.get('level')}, {word_status(summary.status)}"
    print_report(title, _STYLE.get(summary.status, "yellow"), run_sections(summary), file)


def run_sections(summary: RunSummary) -> list[Section]:
    """Return everything below the title."""
    info = summary.info
    parts: list[Section] = [("steps", [_span(summary)])]
    if info.get("command"):
        parts.append(("command", [shlex.join(map(str, info["command"]))]))
    if info.get("started"):
        parts.append(("time", [f"{info['started']} to {info.get('ended') or 'no end recorded'}"]))
    if info.get("exit_status"):
        why = ", of a program that bitcheck itself stopped, having seen enough of it" if info.get("stopped") else ""
        parts.append(("exit status", [f"{info['exit_status']}{why}"]))
    if len(summary.rank_statuses) > 1:
        parts.append(("ranks", [f"{count:,} {status}" for status, count in summary.rank_statuses.items()]))
    if summary.missing_ranks:
        lacks = f"the folder has no file of {format_ranks(summary.missing_ranks)}"
        parts.append(("missing", [f"{lacks}; `bitcheck merge` gathers the folders of several hosts"]))
    parts.append(("recorded", [f"{summary.events:,} events ({format_bytes(summary.bytes)}) on rank {summary.rank}"]))
    if summary.shown_step is not None:
        lines = [f"{row.phase:<10}{row.events:>7,}   {format_bytes(row.bytes)}" for row in summary.phases]
        modules = f" in {summary.num_modules:,} modules" if summary.num_modules else ""
        parts.append((f"step {summary.shown_step}", [*lines, f"events and bytes by phase{modules}"]))
    if summary.largest:
        parts.append(("largest", [describe_event(event) for event in summary.largest]))
    unobserved = [f"{count:,} x {what}" for what, count in summary.unobserved.items()]
    parts.append(("unobserved", unobserved or ["nothing that bitcheck knows of"]))
    if info.get("notes"):
        parts.append(("unrecorded", list(info["notes"])))
    if summary.remarks:
        parts.append(("remarks", list(summary.remarks)))
    if summary.environment:
        parts.append(("environment", [f"{key}  {value}" for key, value in sorted(summary.environment.items())]))
    return parts


def print_step(summary: StepSummary, file: TextIO | None = None) -> None:
    """Print every event of a step with its digest."""
    title = f"{summary.path}: {summary.kind} {summary.step} on rank {summary.rank}, {len(summary.events):,} events"
    lines = [f"{event.digest}  {describe_event(event)}" for event in summary.events]
    print_report(title, "bold", [("", lines)], file)


def describe_event(event: RecordedEvent) -> str:
    """Return an event on one line: site, dtype, shape, bytes or value."""
    facts = [event.site, f"{event.dtype} [{', '.join(map(str, event.shape))}]"]
    facts.append(event.value if event.value is not None else format_bytes(event.num_bytes))
    return "  ".join(facts)


def _span(summary: RunSummary) -> str:
    if summary.first_step is None:
        return "no whole step" + (", an initial snapshot" if summary.has_initial_snapshot else "")
    around = []
    if summary.has_initial_snapshot:
        around.append("an initial snapshot before")
    if summary.has_fragment:
        around.append("a fragment after")
    tail = f", {' and '.join(around)} them" if around else ""
    return f"{summary.first_step} to {summary.last_step}{tail}"
