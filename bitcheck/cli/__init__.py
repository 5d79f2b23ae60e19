"""The command line: `bitcheck COMMAND`, a file a command, loaded when it is asked for.

Exit status as diff(1): 0 identical or passed, 1 different or failed, 2 trouble. click's own exit
status for an error is 1, and so is Python's for a crash; both would read as "different", so every
way out goes through `Main.main`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

import bitcheck
from bitcheck.errors import EXIT_TROUBLE, BitcheckError

COMMANDS: dict[str, str] = {
    "run": "Record a program's training, unchanged.",
    "diff": "Say whether two runs are bitwise identical, where they part, and why.",
    "show": "Say what is in a run.",
    "verify": "Recompute every root and chain of a run.",
    "hash": "Print the digests of the tensors in a file.",
    "selfcheck": "Prove that recording changes no bit of a program.",
    "gate": "Run a program several times and pass or fail, for CI.",
    "bisect": "Find the switch, or the commit, that brought nondeterminism back.",
    "scan": "Execute each operation twice in one run, and list those that disagree with themselves.",
    "zoom": "Record the step that parted again, at level op.",
    "replicas": "Say whether the ranks of one run hold equal copies.",
    "merge": "Gather the ranks of one run from several folders.",
    "tax": "Measure what determinism costs.",
    "reference": "Train the bundled reference model.",
    "demo": "Show the whole story on the reference trainer.",
}
"""Command -> its line in `bitcheck --help`; the file of the same name holds the click command `command`.

The lines are here so that help loads no command. Commands whose file is not there are not listed.
"""


class Main(click.Group):
    """The group of commands, loaded lazily; every way out has one of the three exit statuses."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a user meets them."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"bitcheck.cli.{name}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command's file, None where there is no such command."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"bitcheck.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' lines without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run a command and exit with its status; 2 for whatever stands between the user and a verdict."""
        extra.pop("standalone_mode", None)
        try:
            status = super().main(args, prog_name or "bitcheck", standalone_mode=False, **extra)
        except click.exceptions.Exit as exit_:
            status = exit_.exit_code
        except click.ClickException as error:
            error.show()
            status = EXIT_TROUBLE
        except (click.Abort, KeyboardInterrupt):
            click.echo("bitcheck: interrupted.", err=True)
            status = 130
        except BitcheckError as error:
            click.echo(f"bitcheck: {error}", err=True)
            status = EXIT_TROUBLE
        except BrokenPipeError:
            # The reader of a pipe went away (`bitcheck diff a b | head`): nothing is left to say.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = EXIT_TROUBLE
        except Exception as error:  # noqa: BLE001 - a crash must not exit 1, which says "different"
            if os.environ.get("BITCHECK_TRACEBACK"):
                traceback.print_exc()
            lines = str(error).splitlines()
            what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
            click.echo(f"bitcheck: internal error, no verdict: {what} (BITCHECK_TRACEBACK=1 shows where).", err=True)
            status = EXIT_TROUBLE
        sys.exit(status if isinstance(status, int) else 0)


@click.group(
    cls=Main,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Are two PyTorch training runs the same bit for bit, and if not, where and why.\n\n"
    "\b\n  bitcheck run -o runs/a -- python train.py\n  bitcheck run -o runs/b -- python train.py\n"
    "  bitcheck diff runs/a runs/b\n\n"
    "Exit status, as diff(1): 0 identical or passed, 1 different or failed, 2 trouble.",
)
@click.version_option(bitcheck.__version__, prog_name="bitcheck")
def main() -> None:
    """The entry point of the console script."""
