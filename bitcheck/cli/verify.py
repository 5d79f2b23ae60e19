"""`bitcheck verify`: is a recorded run still what was recorded."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bitcheck.verify/1) instead of sentences.")
def command(run: Path, as_json: bool) -> int:
    """Recompute every root, chain and seal of RUN.

    Finds any changed bit of a finished run. A run that is still being recorded, or whose program was
    killed, is checked as far as it goes.

    Exit status: 0 all sound, 1 something was changed, 2 the run cannot be read.

    \b
    Example:
      bitcheck verify runs/a
      bitcheck verify --json runs/a
    """
    import json

    from bitcheck.cli.progress import show_progress
    from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL
    from bitcheck.verify import verify_run
    from bitcheck.wording import counted

    with show_progress("verifying") as update:
        answer = verify_run(run, update)
    if as_json:
        click.echo(json.dumps(answer.to_json(), indent=2))
    elif answer.is_sound:
        unfinished = answer.world_size - answer.num_sealed
        note = "" if not unfinished else f" ({unfinished} not finished: no seal to check)"
        click.echo(
            f"{answer.path}: sound. {counted(answer.num_rows, 'recorded step')} of "
            f"{counted(answer.world_size, 'rank')}, {counted(answer.num_events, 'digest')}: every root and chain "
            f"holds, {counted(answer.num_sealed, 'seal')} intact{note}."
        )
    else:
        for item in answer.damage:
            click.echo(f"{item}.")
        click.echo("Restore the files from a copy, or record the run again.")
    return EXIT_IDENTICAL if answer.is_sound else EXIT_DIFFERENT
