"""Writes docs/cli.md, the reference of the command line, from the commands' own help: `make docs`.

    python docs/build_cli_reference.py [--check]

`--check` writes nothing and exits 1 where the file is not what the commands say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from bitcheck.cli import main

TARGET = Path(__file__).with_name("cli.md")
WIDTH = 100
INTRODUCTION = """# The command line

Written from the commands' own help by `make docs`; a test compares the two.
"""


def all_commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and everything below it, each with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from all_commands(below, (*path, name))


def render_help(command: click.Command, path: tuple[str, ...]) -> str:
    """Return a command's help as `--help` prints it, at one width wherever it is rendered."""
    settings = dict(command.context_settings) | {"terminal_width": WIDTH, "max_content_width": WIDTH}
    settings.setdefault("help_option_names", ["-h", "--help"])
    command._help_option = None  # click keeps what it made for whoever asked first, who may have had other names
    with click.Context(command, info_name=" ".join(path), **settings) as context:
        return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def render_reference() -> str:
    """Return the whole of docs/cli.md."""
    sections = [INTRODUCTION]
    for path, command in all_commands(main, ("bitcheck",)):
        sections.append(f"{'#' * min(len(path) + 1, 4)} {' '.join(path)}\n\n```\n{render_help(command, path)}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    reference = render_reference()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == reference else 1)
    TARGET.write_text(reference, encoding="utf-8")
