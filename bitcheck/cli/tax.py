"""`bitcheck tax`: what determinism costs."""

from __future__ import annotations

import shlex
import sys

import click

from bitcheck.errors import UsageError


@click.command("tax")
@click.option("--baseline", metavar="CMD", help="Measure against this command.")
@click.option("--candidate", metavar="CMD", help="Measure this command.")
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Pairs of runs of commands.")
@click.option("--config", default="tiny", show_default=True, help="Reference trainer's configuration.")
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Steps of each recipe.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Steps of each run left out.")
@click.option("--each/--no-each", default=True, show_default=True, help="Also measure each switch alone.")
@click.option("--confidence", type=float, default=0.95, show_default=True, metavar="C", help="Of the intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON (schema bitcheck.tax/1).")
def command(
    baseline: str | None,
    candidate: str | None,
    rounds: int,
    config: str,
    steps: int,
    warmup: int,
    each: bool,
    confidence: float,
    as_json: bool,
) -> None:
    """Measure the time of a training step: of two commands, or of the reference trainer's recipes.

    What is compared takes turns, so that a drifting machine disturbs both alike. Without commands, the
    reference trainer's deterministic recipe is measured against its fast one, and each switch alone,
    step by step in one process.

    \b
    Example:
      bitcheck tax --config nano --steps 20
      bitcheck tax --baseline 'python train.py' --candidate 'python train.py --deterministic'
    """
    from bitcheck.statistics import check_probability
    from bitcheck.tax import tax_commands

    check_probability("--confidence", confidence)
    if (baseline is None) != (candidate is None):
        raise UsageError("--baseline and --candidate belong together; give both commands, or none for the recipes")
    if baseline is not None and candidate is not None:
        commands = [shlex.split(text) for text in (baseline, candidate)]
        if not all(commands):
            raise UsageError("--baseline and --candidate: an empty command")
        tax = tax_commands(
            commands[0],
            commands[1],
            rounds=rounds,
            warmup=warmup,
            confidence=confidence,
            tell=lambda line: print(f"bitcheck tax: {line}", file=sys.stderr, flush=True),
        )
    else:
        from bitcheck.cli.progress import show_progress
        from bitcheck.reference_runs.side_by_side import tax_recipes

        with show_progress("training in turn") as progress:
            tax = tax_recipes(
                config,
                steps=steps,
                warmup=warmup,
                each_switch=each,
                confidence=confidence,
                tell=progress or (lambda done, total: None),
            )
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(tax.to_json()), nl=False)
    else:
        from bitcheck.report.tax import print_tax

        print_tax(tax)
