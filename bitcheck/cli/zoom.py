"""`bitcheck zoom`: record the step that parted again, at level op."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bitcheck.cli.diff import EXIT_STATUS

if TYPE_CHECKING:
    from bitcheck.zoom_answer import Confirmed, ZoomAnswer


@click.command("zoom")
@click.argument("baseline", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option(
    "--around", type=click.IntRange(min=0), default=0, metavar="N", help="Record N steps before and after it, too."
)
@click.option(
    "--tries",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="K",
    help="Record up to K pairs, until one diverges: for faults of chance.",
)
@click.option(
    "--resume-template",
    default="",
    metavar="CMD",
    help="Begin at the nearest checkpoint: a command with {checkpoint} in it, and {step} if it likes.",
)
@click.option(
    "--checkpoints",
    default="",
    metavar="PATH",
    help="Where the checkpoints are: a path with {step}, the number of the first step after it.",
)
@click.option("--confirm", type=click.IntRange(min=1), metavar="K", help="Execute the operation found K times.")
@click.option(
    "--repro", type=click.Path(path_type=Path), metavar="DIR", help="Write a script that shows the fault, into DIR."
)
@click.option("--stacks", is_flag=True, help="Note the Python line that asked for each operation.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Keep the new runs in DIR.")
@click.option("--baseline-env", multiple=True, metavar="NAME=VALUE", help="A variable for the baseline's program.")
@click.option("--candidate-env", multiple=True, metavar="NAME=VALUE", help="A variable for the candidate's program.")
@click.option("--all", "show_all", is_flag=True, help="List every origin and every site of it.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON (schema bitcheck.diff/1, with `zoom`).")
def command(
    baseline: Path,
    candidate: Path,
    around: int,
    tries: int,
    resume_template: str,
    checkpoints: str,
    confirm: int | None,
    repro: Path | None,
    stacks: bool,
    output: Path | None,
    baseline_env: tuple[str, ...],
    candidate_env: tuple[str, ...],
    show_all: bool,
    as_json: bool,
) -> int:
    """Record the step in which two runs part once more, at level op, and name the operation.

    Both recorded commands run again, in their folders, up to the end of that step. Where the fault is
    one of chance, --tries repeats until a pair diverges. --confirm executes the operation found on the
    inputs that it had, under load, and counts how often its bits change; --repro keeps that as a script
    which needs torch only.

    \b
    Example:
      bitcheck zoom runs/a runs/b
      bitcheck zoom runs/a runs/b --tries 20 --confirm 50 --repro fault/

    Exit status, as diff: 0 the runs, or all pairs, are identical; 1 a pair diverged; 2 trouble, also
    where a program ended badly.
    """
    from bitcheck.zoom import ZoomPlan, zoom
    from bitcheck.zoom import confirm as confirm_origin

    with ExitStack() as stack:
        scratch = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bitcheck-zoom-")))
        plan = ZoomPlan(
            baseline,
            candidate,
            scratch,
            around=around,
            tries=tries,
            resume_template=resume_template,
            checkpoints=checkpoints,
            baseline_variables=_variables(baseline_env),
            candidate_variables=_variables(candidate_env),
            stacks=stacks,
        )
        answer = zoom(plan)
        confirmed = None
        if confirm or repro:
            confirmed = confirm_origin(plan, answer, confirm or 0, repro or scratch / "repro")
        if as_json:
            from bitcheck.report.json import render_json

            content = answer.to_json()
            if confirmed is not None:
                content["zoom"]["confirmed"] = confirmed.to_json()
            click.echo(render_json(content), nl=False)
        else:
            from bitcheck.report.text import print_answer

            print_answer(answer.diff, show_all=show_all)
            missing = what_is_missing(confirm, repro)
            for line in describe(answer, confirmed, keeps_script=bool(repro or output), missing=missing):
                click.echo(line)
    return EXIT_STATUS[answer.diff.verdict]


def what_is_missing(confirm: int | None, repro: Path | None) -> str:
    """Return what cannot be had without an operation, of what was asked for."""
    return " and ".join(["not confirmed"] * bool(confirm) + [f"no script written into {repro}"] * bool(repro))


def describe(answer: ZoomAnswer, confirmed: Confirmed | None, keeps_script: bool, missing: str) -> Iterable[str]:
    """Yield the lines that follow the answer; `missing` is what the obstacle is one to, where there is an obstacle."""
    if answer.pairs:
        pairs = "1 pair" if answer.pairs == 1 else f"{answer.pairs} pairs"
        yield f"recorded again: {pairs}, steps {answer.steps}, level op"
    if confirmed is None:
        return
    if confirmed.confirmation is not None and confirmed.confirmation.differing:
        yield f"confirmed: {confirmed.confirmation}"
    elif confirmed.confirmation is not None:
        yield f"not confirmed: {confirmed.confirmation.text}"
        yield confirmed.advice
    if confirmed.script is not None and keeps_script:
        yield f"script: {confirmed.script}"
    if confirmed.obstacle:
        yield f"{missing if confirmed.script is None else 'not confirmed'}: {confirmed.obstacle}"


def _variables(entries: Iterable[str]) -> dict[str, str]:
    found = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{entry!r}: expected NAME=VALUE")
        found[name] = value
    return found
