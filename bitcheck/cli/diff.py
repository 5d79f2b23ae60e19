"""`bitcheck diff`: parse, compare, print, exit status."""

from __future__ import annotations

from pathlib import Path

import click

from bitcheck.cli.progress import show_progress
from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL, EXIT_TROUBLE

EXIT_STATUS = {"identical": EXIT_IDENTICAL, "diverged": EXIT_DIFFERENT, "incomparable": EXIT_TROUBLE}


@click.command("diff")
@click.argument("baseline", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--until", type=click.IntRange(min=0), metavar="N", help="Compare up to step N (the baseline's number).")
@click.option("--all", "show_all", is_flag=True, help="List every origin and every site of it.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON (schema bitcheck.diff/1).")
def command(baseline: Path, candidate: Path, until: int | None, show_all: bool, as_json: bool) -> int:
    """Say whether two runs are bitwise identical and, where not, where and why they part.

    \b
    Example:
      bitcheck diff runs/a runs/b
      bitcheck diff runs/a runs/resumed --json

    A resumed run is compared with the steps that it shares with the other: where it was recorded
    with --start-step, by number, else where its initial snapshot equals a state of the other run.

    Exit status: 0 identical, 1 diverged, 2 nothing that can be compared, or trouble.
    """
    from bitcheck.diff import diff_runs
    from bitcheck.run import open_run

    with open_run(baseline) as ours, open_run(candidate) as theirs, show_progress("comparing ranks") as progress:
        answer = diff_runs(ours, theirs, until=until, progress=progress)
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(answer.to_json()), nl=False)
    else:
        from bitcheck.report.text import print_answer

        print_answer(answer, show_all=show_all)
    return EXIT_STATUS[answer.verdict]
