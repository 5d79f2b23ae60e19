"""What the launcher tells the processes that it starts: how to record, and where.

It travels as JSON in one environment variable, through launchers and shells, to every Python process
below (`hooks/bootstrap/sitecustomize.py` reads it there).

    BITCHECK_ATTACH='{"folder": "/data/runs/a", "home": ".../bitcheck", "options": {"level": "module", ...}, ...}'
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bitcheck.errors import UsageError

VARIABLE = "BITCHECK_ATTACH"
"""The environment variable."""
WORKERS_VARIABLE = "BITCHECK_ADD_WORKER"
"""Where it is set, every DataLoader of a recorded program gets one worker more (`gate --vary workers`)."""
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Options:
    """How to record."""

    level: str = "module"
    steps: str | None = None
    """`A:B`: steps from A up to but not including B, either may be left out; None for all."""
    every: int = 1
    """Keep every so-manieth step only."""
    start_step: int | None = None
    """Number of the first step; None for 0, to be aligned by state."""
    leaves: str | int = 2**20
    """Keep leaf digests of `all` tensors, of `none`, or of those of up to so many bytes."""
    strict: bool = False
    """Fail the program where recording fails, instead of letting it go on unrecorded."""
    stacks: bool = False
    """At level `op`: note the Python line that asked for each operation."""
    capture: Mapping[str, Any] | None = None
    """At level `op`: save the inputs of one operation (`bitcheck.hooks.capture`)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one process is told."""

    folder: str
    """Absolute path of the run."""
    home: str
    """Absolute path of the package `bitcheck`."""
    words: str
    """Absolute path of a folder of this machine in which the processes leave word for the launcher."""
    run_id: str = ""
    options: Options | None = None
    """None: nothing is recorded."""
    final: Mapping[str, int] | None = None
    """For `selfcheck`: after how many optimizer steps each rank's state is digested, by rank; an empty
    mapping only counts the steps; None does neither."""
    scan: Mapping[str, Any] | None = None
    """For `scan`: {"folder": where each rank's findings go, "poison": bool}; None does not scan."""
    final_folder: str = ""
    """Absolute path of where `selfcheck` collects steps and states."""
    step_times: str = ""
    """For `tax`: absolute path of the folder in which each rank leaves how long its steps took; "" takes no time."""

    def to_json(self) -> str:
        """Return the text for the environment variable."""
        return json.dumps(asdict(self), sort_keys=True)


def read_settings(content: Mapping[str, Any]) -> Settings:
    """Return the settings that `Settings.to_json` wrote, from the parsed JSON."""
    options = content["options"]
    return Settings(
        folder=content["folder"],
        home=content["home"],
        words=content["words"],
        run_id=content["run_id"],
        options=None if options is None else Options(**options),
        final=content["final"],
        scan=content.get("scan"),
        final_folder=content["final_folder"],
        step_times=content["step_times"],
    )


def parse_steps(text: str) -> tuple[int, int | None]:
    """Return (first, end) of `A:B`: from A up to but not including B, None for no end.

    Raises UsageError where `text` is nothing of the kind or holds no step.
    """
    match = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", text)
    if match is None:
        raise UsageError(f"steps {text!r}: expected A:B, as in 10:20 (steps 10 to 19), 10: or :20")
    first = int(match[1] or 0)
    end = int(match[2]) if match[2] else None
    if end is not None and end <= first:
        raise UsageError(f"steps {text!r} hold no step: the first ({first}) must be below the end ({end})")
    return first, end


def parse_leaves(text: str) -> str | int:
    """Return `all`, `none`, or the number of bytes that `text` says (`1MiB`, `64 KiB`, `4096`).

    Raises UsageError for anything else.
    """
    word = text.strip().lower()
    if word in ("all", "none"):
        return word
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", word)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"leaves {text!r}: expected all, none, or a size such as 1MiB, 64KiB or 4096 (bytes)")
    return int(match[1]) * _UNITS[match[2].upper()]


def leaf_limit_bytes(leaves: str | int) -> int | None:
    """Return up to how many bytes a tensor keeps its leaf digests: None for any, 0 for none."""
    parsed = parse_leaves(leaves) if isinstance(leaves, str) else leaves
    if isinstance(parsed, int):
        return parsed
    return None if parsed == "all" else 0
