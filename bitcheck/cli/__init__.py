"""The command line: a group whose commands are loaded when they are called, a file a command.

A file `bitcheck/cli/NAME.py` holds the click command `command`; its docstring is the command's help.
Exit status as diff(1): 0 identical or passed, 1 different or failed, 2 trouble. click would exit 1
for its own errors and Python 1 for a crash, and both would read as "diverged": here they are 2.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from typing import Any, NoReturn

import click

from bitcheck import __version__
from bitcheck.errors import EXIT_TROUBLE, BitcheckError

ORDER = (
    "run",
    "diff",
    "show",
    "verify",
    "hash",
    "selfcheck",
    "gate",
    "bisect",
    "scan",
    "zoom",
    "tax",
    "reference",
    "demo",
)
"""The order in which help lists commands; any other follows by name."""

EXIT_INTERRUPTED = 130


class Commands(click.Group):
    """Finds commands as files and gives every error the exit status that it must have."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}
        return [name for name in ORDER if name in names] + sorted(names - set(ORDER))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"bitcheck.cli.{cmd_name}").command
        return command

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command and exit: BitcheckError, usage and any other exception are status 2."""
        kwargs["standalone_mode"] = False
        try:
            result = super().main(*args, **kwargs)
            sys.stdout.flush()
            status = result if isinstance(result, int) else 0
        except BitcheckError as error:
            click.echo(f"bitcheck: {error}", err=True)
            status = EXIT_TROUBLE
        except click.exceptions.Exit as done:
            status = done.exit_code
        except click.Abort:
            status = EXIT_INTERRUPTED
        except click.ClickException as error:
            error.show()
            status = EXIT_TROUBLE
        except BrokenPipeError:  # `bitcheck show RUN | head`: nobody is left to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = EXIT_TROUBLE
        except Exception:  # noqa: BLE001  a crash must not exit 1, which would read as "the runs differ"
            traceback.print_exc()
            click.echo("bitcheck: this is a fault in bitcheck; please report what is above", err=True)
            status = EXIT_TROUBLE
        sys.exit(status)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="bitcheck %(version)s")
def main() -> None:
    """Are two PyTorch training runs the same bit for bit, and if not, where and why.

    \b
    Record a program twice, unchanged, and compare:
      bitcheck run -o runs/a -- python train.py
      bitcheck run -o runs/b -- python train.py
      bitcheck diff runs/a runs/b

    Exit status: 0 identical or passed, 1 different or failed, 2 trouble. `run` ends with the
    program's own.
    """
