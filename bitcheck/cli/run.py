"""`bitcheck run`: record a program, unchanged."""

from __future__ import annotations

from pathlib import Path

import click

from bitcheck.settings import Options, parse_leaves, parse_steps


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "-o", "--output", "folder", required=True, metavar="RUN", type=click.Path(path_type=Path), help="Folder of the run."
)
@click.option(
    "--level",
    type=click.Choice(["state", "module", "op"]),
    default="module",
    show_default=True,
    help="How much is recorded; each level holds all of the one before it.",
)
@click.option("--steps", metavar="A:B", help="Keep steps A up to but not including B only; either may be left out.")
@click.option("--every", type=click.IntRange(min=1), default=1, metavar="N", help="Keep every N-th step only.")
@click.option(
    "--start-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of the first step, for a resumed program; without it `diff` aligns the run by its state.",
)
@click.option(
    "--leaves",
    metavar="all|none|SIZE",
    default="1MiB",
    show_default=True,
    help="Keep leaf digests, which tell to 16 KiB where a tensor differs, of tensors up to this size.",
)
@click.option(
    "--strict", is_flag=True, help="Fail the program where recording fails (a full disk), instead of going on."
)
@click.option("--stacks", is_flag=True, help="At level op, note the Python line that asked for each operation.")
@click.option("--overwrite", is_flag=True, help="Replace a run that is in the folder.")
@click.option("--own-folder", is_flag=True, help="RUN is a folder of each host's own; `bitcheck merge` gathers them.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
@click.pass_context
def command(
    context: click.Context,
    folder: Path,
    level: str,
    steps: str | None,
    every: int,
    start_step: int | None,
    leaves: str,
    strict: bool,
    stacks: bool,
    overwrite: bool,
    own_folder: bool,
    command: tuple[str, ...],
) -> None:
    """Record CMD into the folder RUN, with no change to the program.

    CMD is whatever you would type: python train.py, a module, a shell script, torchrun. Its output
    passes through untouched and its exit status becomes this command's (128 + signal where a signal
    ended it). A step ends at the first forward, or the program's exit, after an optimizer has stepped.

    \b
    Example:
      bitcheck run -o runs/a -- python train.py --lr 0.001
      bitcheck run -o runs/b --level state -- torchrun --nproc-per-node 8 train.py
      srun bitcheck run -o /local/run --own-folder -- python train.py
    """
    from bitcheck.launch import ProgramNotFound, record_program

    if steps is not None:
        parse_steps(steps)
    options = Options(level, steps, every, start_step, parse_leaves(leaves), strict, stacks)
    try:
        ending = record_program(command, folder, options, overwrite=overwrite, own_folder=own_folder)
    except ProgramNotFound as error:
        click.echo(f"bitcheck: {error}", err=True)
        context.exit(error.exit_status)
    context.exit(ending.exit_status)
