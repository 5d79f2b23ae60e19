"""`bitcheck demo`: the whole story on the reference trainer."""

from __future__ import annotations

from pathlib import Path

import click

from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL


@click.command("demo")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the demo's runs and checkpoints.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier demo in the folder.")
def command(folder: Path, overwrite: bool) -> int:
    """Record, compare, resume and break a training run, in under two minutes on a CPU.

    A small FP8 mixture-of-experts model is trained twice and resumed once, and the three runs are
    proven the same bit for bit. Then one kernel sums in another order, and the diff names it. Each
    command is shown as you would type it.

    \b
    Example:
      bitcheck demo
      bitcheck diff runs/demo/fresh runs/demo/atomic --all

    Exit status: 0 where every answer is as told, 1 where one is not, 2 trouble.
    """
    from bitcheck.demo import play

    wrong = play(folder, overwrite)
    for sentence in wrong:
        click.echo(f"NOT AS TOLD: {sentence}", err=True)
    if wrong:
        return EXIT_DIFFERENT
    click.echo("Every answer is as told: fresh, again and resumed are one run; the switched kernel was found.")
    return EXIT_IDENTICAL
