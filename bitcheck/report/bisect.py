"""The answers of the bisections as text.

FOUND: moe.dprob brings divergence back (98.7 % sure)

moe.dprob     --set moe.dprob=atomic differs in 3 of 3 pairs, first in step 0: backward/...
              keep --set moe.dprob=slots
of            8 switches, 15 pairs of runs, 24 programs run; it showed in 100 % of the pairs it was in
"""

from __future__ import annotations

from typing import TextIO

from bitcheck.bisect_answer import BisectAnswer
from bitcheck.commits import CommitResult
from bitcheck.report.text import Section, print_report
from bitcheck.statistics import percent
from bitcheck.trials import command_line


def print_bisect(answer: BisectAnswer, file: TextIO | None = None) -> None:
    """Print which switches bring divergence back."""
    print_report(bisect_headline(answer), "red", bisect_sections(answer), file)


def bisect_headline(answer: BisectAnswer) -> str:
    """Return the first line: every minimal set, and how sure that is."""
    sets = [" with ".join(sorted(one)) for one in answer.result.sets]
    verb = "bring" if len(sets) > 1 or len(answer.result.sets[0]) > 1 else "brings"
    alone = ", each without the others," if len(sets) > 1 else ""
    return f"FOUND: {' and '.join(sets)}{alone} {verb} divergence back ({percent(answer.result.sure)} sure)"


def bisect_sections(answer: BisectAnswer) -> list[Section]:
    """Return everything below the headline."""
    result = answer.result
    parts: list[Section] = []
    for number, one in enumerate(result.sets):
        differed, pairs = result.shown[number]
        where = f", first in {result.where[number]}" if result.where[number] else ""
        lines = []
        for name in sorted(one):
            form = f"{answer.switches.form(name, True)}" if answer.switches is not None else name
            lines.append(f"suspect: {form}")
        lines.append(f"differs in {differed} of {pairs} pairs of runs{where}")
        if answer.switches is not None:
            for name in sorted(one):
                lines.append(f"keep: {answer.switches.form(name, False)}")
        parts.append((" + ".join(sorted(one)), lines))
    parts.append(("", [""]))
    switches = "1 switch" if len(answer.names) == 1 else f"{len(answer.names)} switches"
    replayed = f", {answer.num_replayed} of them from the log" if answer.num_replayed else ""
    parts.append(("of", [f"{switches}, {result.num_samples} pairs of runs{replayed}, {result.num_runs} programs run"]))
    parts.append(
        (
            "chance",
            [
                f"with these switches {percent(result.rate)} of the pairs differed; sets that show in fewer than "
                f"{percent(answer.search.rate)} of pairs may be missing"
            ],
        )
    )
    parts.append(("command", [command_line(answer.command)]))
    parts.append(("log", [answer.log]))
    return parts


def print_commits(result: CommitResult, file: TextIO | None = None) -> None:
    """Print which commit brought divergence."""
    print_report(commits_headline(result), "red" if result.first_bad else "yellow", commits_sections(result), file)


def commits_headline(result: CommitResult) -> str:
    """Return the first line: the commit, or those that it may be."""
    if result.first_bad is not None:
        return f"FOUND: {result.first_bad[:12]} {result.subject} ({percent(result.sure)} sure)"
    return f"NOT DECIDED: one of {len(result.possible)} commits, all but one of which could not be tested"


def commits_sections(result: CommitResult) -> list[Section]:
    """Return everything below the headline."""
    parts: list[Section] = []
    if result.where:
        parts.append(("where", [f"two runs of it part in {result.where}"]))
    if result.first_bad is None:
        parts.append(("possible", [commit[:12] for commit in result.possible]))
    lines = []
    for each in result.judged:
        pairs = "1 pair" if each.num_pairs == 1 else f"{each.num_pairs} pairs"
        detail = f" ({each.detail.splitlines()[0]})" if each.detail else ""
        lines.append(f"{each.commit[:12]} {each.verdict}, {pairs}: {each.subject}{detail}")
    parts.append(("judged", lines))
    parts.append(("of", [f"{len(result.judged)} commits looked at, {result.num_runs} programs run"]))
    if result.first_bad is not None:
        parts.append(("look closer", [f"git show {result.first_bad[:12]}"]))
    return parts
