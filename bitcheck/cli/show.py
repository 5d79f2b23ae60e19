"""`bitcheck show`: what is in a run."""

from __future__ import annotations

from pathlib import Path

import click

from bitcheck.events import Phase


@click.command("show")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", type=int, metavar="N", help="List every tensor of step N with its digest.")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Look into rank R (default: the first).")
@click.option("--phase", type=click.Choice([str(phase) for phase in Phase]), help="With --step: this phase only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bitcheck.show/1).")
def command(path: Path, step: int | None, rank: int | None, phase: str | None, as_json: bool) -> None:
    """Say what is in a run: steps, sites by phase, largest tensors, what went unobserved, environment.

    \b
    Example:
      bitcheck show runs/a
      bitcheck show runs/a --step 3 --phase param
    """
    from bitcheck.errors import UsageError
    from bitcheck.report.json import render_json
    from bitcheck.report.show import print_run, print_step
    from bitcheck.run import open_run
    from bitcheck.summary import summarize_run, summarize_step

    if phase is not None and step is None:
        raise UsageError("--phase goes with --step: it chooses among the tensors of one step.")
    with open_run(path, allow_missing_ranks=True) as run:
        if step is None:
            summary = summarize_run(run, rank)
            if as_json:
                click.echo(render_json(summary.to_json()), nl=False)
            else:
                print_run(summary)
            return
        listing = summarize_step(run, step, rank, None if phase is None else Phase(phase))
    if as_json:
        click.echo(render_json(listing.to_json()), nl=False)
    else:
        print_step(listing)
