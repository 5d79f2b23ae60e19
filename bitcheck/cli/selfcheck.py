"""`bitcheck selfcheck`: does recording change this program?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bitcheck.selfcheck import SelfCheck

_SHOWN = 5
"""Differences that are listed without --all."""


@click.command("selfcheck", context_settings={"allow_interspersed_args": False})
@click.option(
    "--level",
    type=click.Choice(["state", "module", "op"]),
    default="module",
    show_default=True,
    help="Level at which the program is recorded.",
)
@click.option("--all", "show_all", is_flag=True, help="List every tensor that differs.")
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON, schema bitcheck.selfcheck/1.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
@click.pass_context
def command(context: click.Context, level: str, show_all: bool, as_json: bool, command: tuple[str, ...]) -> None:
    """Prove that recording changes nothing: run CMD bare and recorded, and compare the final bits.

    Compared after the last optimizer step, on every rank: parameters, gradients, optimizer state,
    buffers, random generators. CMD runs three times (a fourth where bits differ), its output goes to
    standard error. Exit status 0: the same bits; 1: recording changed them; 2: the program does not
    repeat itself even without bitcheck, or failed.

    \b
    Example:
      bitcheck selfcheck -- python train.py --max-steps 20
    """
    from bitcheck.selfcheck import check_program
    from bitcheck.settings import Options

    answer = check_program(command, Options(level=level))
    if as_json:
        click.echo(json.dumps(answer.to_json(), indent=2))
    else:
        click.echo("\n".join(describe(answer, show_all)))
    context.exit(answer.exit_status)


def describe(answer: SelfCheck, show_all: bool) -> Iterator[str]:
    """Yield the lines of the answer for a person."""
    steps = sorted(set(answer.steps.values()))
    yield f"{answer.verdict}: recording at level {answer.level}"
    yield answer.explanation
    yield (
        f"Compared after {' or '.join(map(str, steps))} optimizer steps: {answer.num_tensors} tensors, "
        f"{answer.num_bytes / 2**20:.1f} MiB, {len(answer.steps)} rank{'s' * (len(answer.steps) > 1)}."
    )
    shown = answer.differences if show_all else answer.differences[:_SHOWN]
    for each in shown:
        yield f"  rank {each.rank}  {each.site}  recorded {each.recorded or 'none'}  bare {each.bare or 'none'}"
    if len(shown) < len(answer.differences):
        yield f"  and {len(answer.differences) - len(shown)} more (--all lists them)"
    for line in answer.unread:
        yield f"  not compared: {line}"
