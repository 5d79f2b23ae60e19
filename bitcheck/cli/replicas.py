"""`bitcheck replicas`: do the ranks of one run hold equal copies."""

from __future__ import annotations

from pathlib import Path

import click

from bitcheck.cli.progress import show_progress


@click.command("replicas")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="RANKS[:PATTERN]",
    help="Ranks that hold copies, as 0-3 or 0,2; of all tensors, or of those that PATTERN names.",
)
@click.option(
    "--except", "exceptions", multiple=True, metavar="PATTERN", help="Tensors that may differ, as '*.running_*'."
)
@click.option("--until", type=int, metavar="N", help="Look at the steps up to N.")
@click.option("--all", "show_all", is_flag=True, help="List every tensor, version and group.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON (schema bitcheck.replicas/1).")
def command(
    path: Path, groups: tuple[str, ...], exceptions: tuple[str, ...], until: int | None, show_all: bool, as_json: bool
) -> int:
    """Say whether the ranks of one run hold equal copies of what they replicate, with no second run.

    What DistributedDataParallel manages (parameters, their gradients as the optimizer finds them, their
    optimizer state, and buffers unless broadcast_buffers=False) and replicated DTensors are known from the
    recording; other copies are named with --group. Finds the first step, the tensor and the ranks: silent
    data corruption, a missed broadcast, a bypassed wrapper, drifting buffers. PATTERN is a shell pattern
    for a tensor's name (head.*), or with a slash for its whole site (extra/ema:*).

    \b
    Example:
      bitcheck replicas runs/a
      bitcheck replicas runs/a --group 0-3 --group '0,4:experts.*'

    Exit status: 0 all copies agree, 1 some differ, 2 nothing is known to be replicated, or trouble.
    """
    from bitcheck.replicas import check_replicas
    from bitcheck.run import open_run

    with open_run(path) as run, show_progress("comparing ranks") as progress:
        answer = check_replicas(run, groups=groups, exceptions=exceptions, until=until, progress=progress)
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(answer.to_json()), nl=False)
    else:
        from bitcheck.report.replicas import print_replicas

        print_replicas(answer, show_all=show_all)
    return answer.exit_status
