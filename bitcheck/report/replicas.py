"""A replica check for people: the verdict first, then which tensor on which ranks, why, and what to do.

    DIFFER in step 3: param/head.weight:value on rank 2

    where        step 3, param/head.weight:value  float32 [8, 4]  within elements 0 to 15 of 32
                 ranks 0-1, 3   5b0d6d0e2a8f0f0c
                 rank 2         0cc175b9c0f1b6a8
    why          In step 3 rank 2 has other bits ...
    what to do   ...

    compared     4 steps, 4 ranks, 12 tensors
    groups       DistributedDataParallel: ranks 0-3, 12 tensors, buffers too

It decides nothing.
"""

from __future__ import annotations

import math
from typing import TextIO

from bitcheck.explain import format_ranks
from bitcheck.replicas_answer import Disagreement, ReplicaAnswer, ReplicaGroup, ReplicaVerdict
from bitcheck.report.text import Section, print_report, render_plain
from bitcheck.wording import counted, word_status

MAX_VERSIONS = 5
MAX_TENSORS = 6
MAX_GROUPS = 6
MAX_ODD = 6
_DIGITS = 16
_STYLE = {ReplicaVerdict.AGREE: "green", ReplicaVerdict.DIFFER: "red", ReplicaVerdict.UNDECLARED: "yellow"}


def print_replicas(answer: ReplicaAnswer, *, show_all: bool = False, file: TextIO | None = None) -> None:
    """Print an answer on `file` (standard output)."""
    title = replicas_headline(answer)
    print_report(title, _STYLE[answer.verdict], replicas_sections(answer, show_all), file)


def render_replicas(answer: ReplicaAnswer, *, show_all: bool = False) -> str:
    """Return an answer as plain text, as `print_replicas` writes it into a pipe."""
    return render_plain(replicas_headline(answer), replicas_sections(answer, show_all))


def replicas_headline(answer: ReplicaAnswer) -> str:
    """Return the first line: the verdict, and where."""
    if answer.verdict is ReplicaVerdict.UNDECLARED:
        return f"UNDECLARED. {answer.explanation}"
    if answer.verdict is ReplicaVerdict.AGREE:
        return f"AGREE over {_amounts(answer)}."
    first = answer.first
    assert first is not None
    when = f"before step {first.step + 1}" if first.is_initial else f"in step {first.step}"
    more = f" and {answer.num_disagreements - 1:,} more" if answer.num_disagreements > 1 else ""
    sure = "" if first.has_majority else ", no majority"
    return f"DIFFER {when}: {first.site}{more} on {format_ranks(first.ranks)}{sure} (cause: {answer.cause})"


def replicas_sections(answer: ReplicaAnswer, show_all: bool = False) -> list[Section]:
    """Return everything below the headline."""
    parts: list[Section] = []
    first = answer.first
    if first is not None:
        parts.append(("where", [_describe(first), *_versions(first, show_all)]))
    if answer.verdict is not ReplicaVerdict.UNDECLARED:
        parts.append(("why" if first is not None else "what", [answer.explanation]))
    if answer.remedy:
        parts.append(("what to do", [answer.remedy]))
    if answer.num_disagreements > 1:
        others = answer.disagreements[1:]
        shown = others if show_all else others[:MAX_TENSORS]
        lines = [f"{_describe(each)} on {format_ranks(each.ranks)}" for each in shown]
        parts.append(("also", [*lines, *_more(answer.num_disagreements - 1 - len(shown))]))
    rest = answer.besides
    if rest is not None and rest.first is not None:
        where = [f"{'before ' if rest.first.is_initial else ''}step {rest.first.step + rest.first.is_initial}"]
        where.append(f"{_describe(rest.first)} on {format_ranks(rest.first.ranks)} (cause: {rest.cause})")
        parts.append(("besides", [", ".join(where), *([rest.remedy] if rest.remedy else [])]))
    if len(answer.odd) > 1:
        steps: dict[int, list[int]] = {}
        for rank, step in answer.odd:
            steps.setdefault(step, []).append(rank)
        lines = [f"{format_ranks(ranks)} from step {step} on" for step, ranks in sorted(steps.items())]
        cut = lines if show_all else lines[:MAX_ODD]
        parts.append(("odd ranks", [*cut, *_more(len(lines) - len(cut))]))
    parts.append(("", [""]))
    run = answer.run
    span = "no whole step" if run.first_step is None else f"steps {run.first_step} to {run.last_step}"
    ranks = counted(run.world_size, "rank")
    compared = [] if answer.verdict is ReplicaVerdict.AGREE or not answer.groups else [_amounts(answer)]
    parts.append(
        ("compared", [*compared, f"{run.path}: {span}, {ranks}, level {run.level}, {word_status(run.status)}"])
    )
    if answer.groups:
        groups = answer.groups if show_all else answer.groups[:MAX_GROUPS]
        parts.append(("groups", [*map(_describe_group, groups), *_more(len(answer.groups) - len(groups))]))
    if answer.notes:
        parts.append(("notes", list(answer.notes)))
    return parts


def _describe(each: Disagreement) -> str:
    facts = [each.site, f"{each.dtype} [{', '.join(map(str, each.shape))}]"]
    if each.elements is not None and each.shape:
        first, last = each.elements
        facts.append(f"within elements {first:,} to {last:,} of {math.prod(each.shape):,}")
    return "  ".join(facts)


def _versions(first: Disagreement, show_all: bool) -> list[str]:
    shown = first.versions if show_all else first.versions[:MAX_VERSIONS]
    names = [format_ranks(version.ranks) for version in shown]
    width = min(max(map(len, names)), 40)
    lines = [
        f"{name:<{width}}   {'missing' if version.digest is None else version.digest[:_DIGITS]}"
        for name, version in zip(names, shown, strict=True)
    ]
    return [*lines, *_more(len(first.versions) - len(shown))]


def _describe_group(group: ReplicaGroup) -> str:
    facts = [
        f"{group.by}: {format_ranks(group.ranks)}",
        "1 tensor" if group.tensors == 1 else f"{group.tensors:,} tensors",
    ]
    facts.append("buffers too" if group.has_buffers else "no buffers")
    if group.num_differing:
        facts.append(f"{group.num_differing:,} differ")
    return ", ".join(facts)


def _amounts(answer: ReplicaAnswer) -> str:
    steps = counted(answer.steps, "step")
    tensors = "1 replicated tensor" if answer.tensors == 1 else f"{answer.tensors:,} replicated tensors"
    return f"{steps}, {counted(answer.ranks, 'rank')}, {tensors}"


def _more(count: int) -> list[str]:
    return [f"and {count:,} more (--all lists them)"] if count > 0 else []
