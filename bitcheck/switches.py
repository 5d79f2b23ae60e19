"""Switches of a program: each has a reproducible and a suspect form, as arguments or environment variables.

    # switches.toml
    command = ["python", "train.py", "--steps", "20"]     # optional; a command on the command line wins

    [switches."attention"]
    about = "backward of the attention kernel"            # optional
    reproducible = { args = ["--attention", "math"] }
    suspect = { args = ["--attention", "flash"] }

    [switches."matmul-splits"]
    suspect = { env = { CUBLAS_WORKSPACE_CONFIG = ":16:8" } }
    reproducible = { env = { CUBLAS_WORKSPACE_CONFIG = ":4096:8" }, unset = ["CUBLASLT_WORKSPACE_SIZE"] }

A form that is left out, or `{}`, changes nothing. The arguments of all switches stand where the command
has `{switches}`, else at its end, in the file's order.

Place in the flow: *switches* -> probes -> bisect, tax.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitcheck.errors import UsageError

PLACEHOLDER = "{switches}"
_FILE_KEYS = {"command", "switches"}
_SWITCH_KEYS = {"about", "reproducible", "suspect"}
_FORM_KEYS = {"args", "env", "unset"}


@dataclass(frozen=True, slots=True)
class Form:
    """What one form of a switch adds to a command and its environment."""

    args: tuple[str, ...] = ()
    variables: tuple[tuple[str, str | None], ...] = ()
    """Name and value, None for a variable that is taken away; sorted by name."""

    def __str__(self) -> str:
        parts = [f"{name}={value}" if value is not None else f"without {name}" for name, value in self.variables]
        return " ".join([*parts, *self.args]) or "as it is"


@dataclass(frozen=True, slots=True)
class KernelSwitch:
    """One switch."""

    name: str
    reproducible: Form
    suspect: Form
    about: str = ""


@dataclass(frozen=True, slots=True)
class SwitchSet:
    """The switches of one program."""

    switches: tuple[KernelSwitch, ...]
    command: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the file's order."""
        return tuple(switch.name for switch in self.switches)

    def only(self, names: Collection[str]) -> SwitchSet:
        """Return the set with these switches alone. Raises UsageError for a name that there is not."""
        for name in names:
            if name not in self.names:
                raise UsageError(f"no switch is called {name!r}; there are {', '.join(self.names)}")
        return SwitchSet(tuple(switch for switch in self.switches if switch.name in names), self.command)

    def form(self, name: str, is_suspect: bool) -> Form:
        """Return one form of a switch."""
        switch = next(switch for switch in self.switches if switch.name == name)
        return switch.suspect if is_suspect else switch.reproducible

    def apply(self, command: Sequence[str], suspects: Collection[str]) -> tuple[tuple[str, ...], dict[str, str | None]]:
        """Return the command and the variables with these switches suspect and the others reproducible."""
        args: list[str] = []
        variables: dict[str, str | None] = {}
        for switch in self.switches:
            form = self.form(switch.name, switch.name in suspects)
            args += form.args
            variables.update(form.variables)
        if PLACEHOLDER not in command:
            return (*command, *args), variables
        place = list(command).index(PLACEHOLDER)
        return (*command[:place], *args, *command[place + 1 :]), variables

    def digest(self, command: Sequence[str]) -> str:
        """Return a digest of what would be run: by it a log is known to belong to a search."""
        forms = [(each.name, form) for each in self.switches for form in (each.reproducible, each.suspect)]
        content = [list(command), [[name, form.args, form.variables] for name, form in forms]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def read_switches(path: Path) -> SwitchSet:
    """Read a TOML file of switches. Raises UsageError where it is not one, saying where."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; expected a TOML file of switches.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    _check_keys(path, "the file", content, _FILE_KEYS)
    command = content.get("command", [])
    if not _is_text_list(command):
        raise UsageError(f'{path}: command: expected a list of texts, as in ["python", "train.py"]')
    tables = content.get("switches")
    if not isinstance(tables, dict) or not tables:
        raise UsageError(f'{path}: expected a table for each switch, as in [switches."attention"]')
    return SwitchSet(tuple(_read_switch(path, name, table) for name, table in tables.items()), tuple(command))


def _read_switch(path: Path, name: str, table: Any) -> KernelSwitch:
    where = f'switches."{name}"'
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {where}: expected a table with reproducible and suspect")
    _check_keys(path, where, table, _SWITCH_KEYS)
    forms = [_read_form(path, f"{where}.{key}", table.get(key, {})) for key in ("reproducible", "suspect")]
    if forms[0] == forms[1]:
        raise UsageError(f"{path}: {where}: both forms are the same ({forms[0]}), so it switches nothing")
    about = table.get("about", "")
    if not isinstance(about, str):
        raise UsageError(f"{path}: {where}.about: expected a text")
    return KernelSwitch(name, forms[0], forms[1], about)


def _read_form(path: Path, where: str, table: Any) -> Form:
    if not isinstance(table, dict):
        raise UsageError(f'{path}: {where}: expected args, env or unset, as in {{ args = ["--x"] }}')
    _check_keys(path, where, table, _FORM_KEYS)
    args, variables, unset = table.get("args", []), table.get("env", {}), table.get("unset", [])
    if not _is_text_list(args) or not _is_text_list(unset):
        raise UsageError(f"{path}: {where}: args and unset are lists of texts")
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise UsageError(f'{path}: {where}: env is a table of texts, as in {{ X = "1" }}')
    both: Mapping[str, str | None] = {**dict.fromkeys(unset), **variables}
    return Form(tuple(args), tuple(sorted(both.items())))


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    for key in table:
        if key not in known:
            raise UsageError(f"{path}: {where} has {key!r}; expected {', '.join(sorted(known))}")


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def reference_switches() -> SwitchSet:
    """Return the switches of the reference trainer that have a form which is not reproducible."""
    from bitcheck.reference_runs.switches import TABLE

    return SwitchSet(
        tuple(
            KernelSwitch(
                switch.name,
                Form(("--set", f"{switch.name}={switch.deterministic[0]}")),
                Form(("--set", f"{switch.name}={switch.free[0]}")),
                switch.about,
            )
            for switch in TABLE.values()
            if switch.free
        )
    )
