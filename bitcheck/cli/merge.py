"""`bitcheck merge`: the ranks of one run gathered from several folders."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("merge")
@click.option(
    "-o", "--output", "target", required=True, metavar="RUN", type=click.Path(path_type=Path), help="The new run."
)
@click.option("--allow-missing", is_flag=True, help="Merge although ranks are missing; merge the rest later.")
@click.option("--any-command", is_flag=True, help="Merge although the commands differ.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is in the folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bitcheck.merge/1).")
@click.argument("parts", nargs=-1, required=True, metavar="PART...", type=click.Path(path_type=Path))
def command(
    parts: tuple[Path, ...], target: Path, allow_missing: bool, any_command: bool, overwrite: bool, as_json: bool
) -> None:
    """Gather the ranks that several hosts recorded into folders of their own into one run.

    The parts must be of one job: the same world size, level, steps and command (apart from --node-rank
    and the like), at one time, no rank twice. They are copied and left as they are; RUN is there whole or
    not at all. A gathered run can itself be a part.

    \b
    Example:
      bitcheck merge -o runs/all host0/run host1/run
      bitcheck diff runs/all runs/other

    Exit status: 0 merged, 2 nothing was merged.
    """
    from bitcheck.cli.progress import show_progress
    from bitcheck.merge import merge_runs
    from bitcheck.report.json import render_json
    from bitcheck.report.merge import print_merged

    with show_progress("copying ranks") as progress:
        merged = merge_runs(
            target,
            parts,
            allow_missing=allow_missing,
            any_command=any_command,
            overwrite=overwrite,
            on_progress=progress,
        )
    if as_json:
        click.echo(render_json(merged.to_json()), nl=False)
    else:
        print_merged(merged)
