"""`bitcheck scan`: each operation executed twice in one run."""

from __future__ import annotations

import click


@click.command("scan", context_settings={"allow_interspersed_args": False})
@click.option(
    "--poison",
    is_flag=True,
    help="Also look for reads of memory that nobody wrote, by filling it with two patterns in turn.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer as JSON, schema bitcheck.scan/1.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
@click.pass_context
def command(context: click.Context, poison: bool, as_json: bool, command: tuple[str, ...]) -> None:
    """Run CMD once, execute each operation a second time, and list those that disagree with themselves.

    The second execution works on copies of the inputs, with the random generators put back, so the
    training has the bits of a bare run. A race shows with some probability each time: give CMD as many
    steps as you can wait for. Custom operators run twice too; one that keeps state of its own will
    notice. The output of CMD goes to standard error.

    \b
    Example:
      bitcheck scan -- python train.py --max-steps 20
      bitcheck scan --poison -- python train.py --max-steps 20

    Exit status: 0 every operation agreed with itself, 1 some did not, 2 trouble, also where CMD failed.
    """
    from bitcheck.scan import describe, headline, scan_program

    answer = scan_program(command, poison=poison)
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(answer.to_json()), nl=False)
    else:
        from bitcheck.report.text import print_report

        print_report(headline(answer), "red" if answer.findings else "green", describe(answer))
    context.exit(answer.exit_status)
