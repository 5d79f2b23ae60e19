"""run.json: what was run, where, and how it ended.

    {
      "bitcheck_version": "0.1.0",
      "checksum": "1f0e...",                    XXH3-128 of all the rest
      "command": ["python", "train.py"],
      "cwd": "/home/me/job",
      "digest_version": 1,
      "ended": "2026-01-31T12:34:56Z",          null while it runs
      "environment": {"torch": "2.13.0", ...},
      "every": 1,
      "exit_status": 0,
      "leaves": 1048576,                        or "all", "none": tensors up to this size keep their leaves
      "level": "module",
      "notes": [],                              sentences about what went unrecorded
      "parts": [{"ranks": "0-3", "run_id": "..."}, ...],
                                                in a run that `bitcheck merge` gathered, and in no other: which
                                                ranks' files say which run_id
      "recorder": "run",                        or "record", the context manager
      "run_id": "0c3f...",
      "schema": "bitcheck.run/1",
      "start_step": 0,
      "started": "2026-01-31T12:00:00Z",
      "status": "complete",                     or "recording", "failed", "killed"
      "steps": null,                            or "A:B"
      "stopped": true,                          where bitcheck itself stopped the program, having seen enough of it;
                                                the status is then "killed". Not there otherwise
      "unrecorded": {"0": 1},                   rank -> how many processes trained beside the recorded one of that rank;
                                                not there where none did, nor in a run of an early bitcheck, whose
                                                notes say it
      "variables": {"OMP_NUM_THREADS": "1"},    that the command was started with, of those of `environment`; not in
                                                a run of the context manager, nor in one of an early bitcheck
      "world_size": 2,
      "writer": {"host": "node-17", "pid": 4242, "pid_started": 183482}
    }

It is a document (bitcheck.document): one that was cut or edited is not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitcheck.digest import DIGEST_VERSION
from bitcheck.document import MAX_BYTES, ChangedDocument, DocumentError, decode_document
from bitcheck.errors import BrokenRun, FutureRun, NotARun
from bitcheck.events import Level
from bitcheck.rank_sets import parse_rank_set

SCHEMA_PREFIX = "bitcheck.run/"
SCHEMA = SCHEMA_PREFIX + "1"
RUN_FILE = "run.json"
MAX_WORLD_SIZE = 1_000_000
STATUSES = ("recording", "complete", "failed", "killed")
STOPPED = "stopped"
"""What `bitcheck.run.Run.status` says of a run that bitcheck itself stopped; in run.json it is `killed`."""

_KEY_TYPES: dict[str, Any] = {
    "schema": str,
    "digest_version": int,
    "bitcheck_version": str,
    "run_id": str,
    "command": list,
    "cwd": str,
    "level": str,
    "world_size": int,
    "start_step": int | None,
    "leaves": int | str,
    "steps": str | None,
    "every": int,
    "started": str,
    "ended": str | None,
    "status": str,
    "exit_status": int | None,
    "writer": dict,
    "environment": dict,
    "recorder": str,
    "notes": list,
}


def read_run_file(folder: Path) -> dict[str, Any]:
    """Return a valid run.json. Raises NotARun, FutureRun, BrokenRun."""
    path = folder / RUN_FILE
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        what = "holds no run.json" if folder.is_dir() else "does not exist"
        raise NotARun(
            f"{folder} {what}; expected the folder of a recorded run.\nRecord one: bitcheck run -o {folder} -- CMD"
        ) from None
    except NotADirectoryError:
        raise NotARun(f"{folder} is a file; expected the folder of a recorded run.\nName the folder itself.") from None
    except OSError as error:
        raise NotARun(f"{path} cannot be read: {error.strerror}.\nCheck its permissions.") from None
    try:
        document = decode_document(text)
    except ChangedDocument as error:
        _check_schema(path, error.schema)
        raise BrokenRun(
            f"{path} {error}: it was edited or damaged.\nRestore it from a copy, or record the run again."
        ) from None
    except DocumentError as error:
        raise BrokenRun(
            f"{path} {error}; expected what bitcheck wrote.\nRestore it from a copy, or record the run again."
        ) from None
    _check_schema(path, document["schema"])
    if document.get("digest_version") != DIGEST_VERSION:
        raise FutureRun(
            f"{path} says digest version {document.get('digest_version')!r}; this bitcheck reads {DIGEST_VERSION}.\n"
            "Update bitcheck to read it."
        )
    problem = find_problem(document)
    if problem:
        raise BrokenRun(f"{path} {problem}.\nRestore it from a copy, or record the run again.")
    return document


def _check_schema(path: Path, schema: str) -> None:
    if schema == SCHEMA:
        return
    if schema.startswith(SCHEMA_PREFIX):
        raise FutureRun(f"{path} has schema {schema!r}; this bitcheck reads {SCHEMA}.\nUpdate bitcheck to read it.")
    raise NotARun(f"{path} has schema {schema[:40]!r}; expected {SCHEMA}.\nName the folder of a recorded run.")


def find_problem(document: dict[str, Any]) -> str | None:
    """Return what is wrong with the content of a run.json, to follow its name in a sentence."""
    for key, kind in _KEY_TYPES.items():
        if key not in document:
            return f"has no {key}"
        if not isinstance(document[key], kind) or (kind is int and isinstance(document[key], bool)):
            return f"has an unusable {key}: {str(document[key])[:60]!r}"
    if document["level"] not in set(Level):
        return f"has an unknown level: {document['level'][:60]!r}"
    if not 0 < document["world_size"] <= MAX_WORLD_SIZE:
        return f"has an impossible world_size: {document['world_size']}"
    if document["status"] not in STATUSES:
        return f"has an unknown status: {document['status'][:60]!r}"
    if not all(isinstance(value, str) for value in document["environment"].values()):
        return "has an environment that is not text"
    variables = document.get("variables", {})
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        return "has variables that are not text"
    if not all(isinstance(word, str) for word in [*document["command"], *document["notes"]]):
        return "has a command or notes that are not text"
    try:
        run_ids(document)
    except (ValueError, TypeError, KeyError):
        return "has unusable parts"
    if not isinstance(document.get("stopped", False), bool):
        return f"has an unusable stopped: {str(document['stopped'])[:60]!r}"
    unrecorded = document.get("unrecorded", {})
    if not isinstance(unrecorded, dict) or not all(
        re.fullmatch(r"\d{1,7}", rank) and type(count) is int and count > 0 for rank, count in unrecorded.items()
    ):
        return "has unusable counts of unrecorded processes"
    return None


def unrecorded_processes(document: Mapping[str, Any]) -> dict[int, int]:
    """Return how many processes trained beside the one that was recorded, by rank; only ranks where any did."""
    return {int(rank): count for rank, count in sorted(document.get("unrecorded", {}).items(), key=_rank_of)}


def _rank_of(entry: tuple[str, int]) -> int:
    return int(entry[0])


def note_unrecorded(rank: int, count: int) -> str:
    """Return the sentence for a run's notes about `count` processes of a rank beside the one recorded."""
    who = "one more process" if count == 1 else f"{count} more processes"
    return f"{who} of rank {rank} trained and went unrecorded: a run has one process a rank, the first that trains."


def run_ids(document: dict[str, Any]) -> dict[int, str]:
    """Return which run_id each rank's file says, by rank; empty where all of them say the run's own.

    Raises ValueError, TypeError or KeyError where the parts of a gathered run make no sense.
    """
    found: dict[int, str] = {}
    for part in document.get("parts", []):
        run_id = part["run_id"]
        ranks = parse_rank_set(part["ranks"], document["world_size"])
        if not isinstance(run_id, str) or any(rank in found for rank in ranks):
            raise ValueError("two parts hold one rank, or a part has no run_id")
        found.update(dict.fromkeys(ranks, run_id))
    if "parts" in document and not found:
        raise ValueError("no part holds a rank")
    return found
