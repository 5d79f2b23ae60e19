"""Gather the ranks of one job, recorded into a folder on each host, into one run.

    merge_runs(Path("runs/all"), [Path("host0/run"), Path("host1/run")])
    Merged(path="runs/all", world_size=16, ranks=(0, ..., 15), missing=(), ...)

Where each host ran `bitcheck run` by itself, each made a run of its own: a run.json and a run_id, which the
headers of its ranks' files bear. The files are copied as they are, byte for byte, with the seals that cover
them; the new run.json says under `parts` which ranks' files say which run_id, and its checksum covers that.

What makes parts one job: the same world size, level, numbering and choice of steps, the same command (but
for words that say which host it is), the same launcher's job where it has a name, times that overlap, and no
rank twice.

Place in the flow: store -> run -> *merge*. The new run is made beside its place and renamed into it.

Long because every way in which parts are no job is looked for before anything is written.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from bitcheck.document import encode_document
from bitcheck.errors import BrokenRun, NotARun, RecordingError, UsageError
from bitcheck.process import is_gone
from bitcheck.rank_sets import format_rank_set
from bitcheck.run import check_overwrite, open_run, rank_path
from bitcheck.run_document import RUN_FILE, find_problem, read_run_file, run_ids, unrecorded_processes
from bitcheck.store import RankReader, hash_file, read_seal
from bitcheck.store.seal import seal_path
from bitcheck.wording import counted

SCHEMA = "bitcheck.merge/1"
CLOCK_TOLERANCE = timedelta(minutes=10)
"""By how much the clocks of two hosts may differ, and one host may begin after another has ended."""
_RANK_FILE = re.compile(r"rank-(\d{5,})\.h5")
_HOST_OPTION = re.compile(r"--?(node[-_]rank|machine[-_]rank|local[-_]addr|log[-_]dir)(=.*)?")
"""Words of a launcher's command line that differ from host to host; without `=` the value is the next word."""
_SAME = {
    "level": "level",
    "start_step": "first step (--start-step)",
    "steps": "choice of steps (--steps)",
    "every": "choice of steps (--every)",
    "leaves": "leaf digests (--leaves)",
    "recorder": "way of recording",
}
"""Keys of run.json that the parts of one job have in common, and what a person calls them."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What was gathered."""

    path: str
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """(folder, ranks) of each."""
    status: str
    num_bytes: int
    """Of the copied files."""
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data, schema `bitcheck.merge/1`."""
        return {
            "schema": SCHEMA,
            "run": {"path": self.path, "run_id": self.run_id, "world_size": self.world_size, "status": self.status},
            "ranks": list(self.ranks),
            "missing": list(self.missing),
            "parts": [{"path": path, "ranks": list(ranks)} for path, ranks in self.parts],
            "bytes": self.num_bytes,
            "notes": list(self.notes),
        }


class _Rank(NamedTuple):
    """One rank's file, as its header has it."""

    path: Path
    run_id: str
    world_size: int
    first_step: int | None


class _Part(NamedTuple):
    path: Path
    info: dict[str, Any]
    ranks: dict[int, _Rank]

    @property
    def first_rank(self) -> int:
        return min(self.ranks)


def merge_runs(
    target: Path,
    paths: Sequence[Path],
    *,
    allow_missing: bool = False,
    any_command: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Merged:
    """Copy the ranks of `paths` into the new run `target`; `on_progress` is told how many are done, of how many.

    The parts are only read. `target` is there whole or not at all. With `allow_missing` ranks may be
    missing, with `any_command` the commands may differ, with `overwrite` an older run at `target` is
    replaced. Raises UsageError where the parts are not of one job or do not make a whole, RunError where
    one cannot be read, RecordingError where `target` cannot be written.
    """
    target = Path(target)
    _check_places(target, paths)
    parts = sorted((_read_part(Path(path)) for path in paths), key=lambda part: part.first_rank)
    world_size = _check_one_job(parts, any_command)
    ranks = {rank: found for part in parts for rank, found in part.ranks.items()}
    missing = tuple(rank for rank in range(world_size) if rank not in ranks)
    if missing and not allow_missing:
        raise UsageError(
            f"{counted(len(missing), 'rank')} of {world_size:,} missing: {format_rank_set(missing)} in none of the "
            f"{counted(len(parts), 'part')}.\nName the folders of all hosts, or gather the rest later: --allow-missing."
        )
    check_overwrite(target, overwrite)
    info, notes = _describe(parts, ranks, world_size)
    building = target.absolute().with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        num_bytes = _build(building, ranks, info, on_progress)
        _put_in_place(building, target)
    except OSError as error:
        raise RecordingError(
            f"{target} cannot be written: {error.strerror or error}.\nChoose another --output, or free some space."
        ) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Merged(
        str(target),
        info["run_id"],
        world_size,
        tuple(sorted(ranks)),
        missing,
        tuple((str(part.path), tuple(sorted(part.ranks))) for part in parts),
        info["status"],
        num_bytes,
        tuple(notes),
    )


def _check_places(target: Path, paths: Sequence[Path]) -> None:
    """Raise UsageError where a folder is named twice, or lies in another one that is written or read."""
    if not paths:
        raise UsageError("nothing to merge; name the folders that hold the ranks")
    places = [Path(os.path.realpath(path)) for path in paths]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"{paths[number]} is named twice.\nName each folder once.")
    goal = Path(os.path.realpath(target))
    for path, place in zip(paths, places, strict=True):
        if goal == place or place in goal.parents or goal in place.parents:
            raise UsageError(
                f"{path} is a part, and {target} is to be written.\nChoose an --output apart from all parts."
            )


def _read_part(path: Path) -> _Part:
    """Open one part and every rank's file in it. Raises RunError, UsageError."""
    info = read_run_file(path)
    if info["status"] == "recording" and info["ended"] is None and _is_running_here(info["writer"]):
        raise UsageError(
            f"{path} is being recorded by process {info['writer'].get('pid')}.\nWait until it has ended, then merge."
        )
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise NotARun(f"{path} cannot be read: {error.strerror}.\nCheck its permissions.") from None
    known = run_ids(info)
    level = info["level"]
    ranks: dict[int, _Rank] = {}
    for match in filter(None, map(_RANK_FILE.fullmatch, names)):
        rank = int(match[1])
        file = path / match[0]
        with RankReader(file) as reader:
            tail = reader.tail()
            found = _Rank(
                file, reader.run_id, reader.world_size, int(tail["first_step"]) if int(tail["num_rows"]) else None
            )
            run_id = known.get(rank, info["run_id"])
            is_own = (reader.rank, reader.level, reader.run_id) == (rank, level, run_id)
        if not is_own:
            raise BrokenRun(
                f"{file} is rank {reader.rank} of run {reader.run_id}, level {reader.level}; expected rank {rank} of "
                f"run {run_id}, level {level}.\nPut the run's own file back."
            )
        ranks[rank] = found
    if not ranks:
        raise UsageError(f"{path} holds no rank's file: nothing was recorded there.\nLeave it out, or record it again.")
    return _Part(path, info, ranks)


def _is_running_here(writer: dict[str, Any]) -> bool:
    import socket

    return writer.get("host") == socket.gethostname() and not is_gone(writer)


def _check_one_job(parts: Sequence[_Part], any_command: bool) -> int:
    """Return the world size that all ranks say. Raises UsageError where the parts are not of one job."""
    first = parts[0]
    world_size = next(iter(first.ranks.values())).world_size
    holders: dict[int, Path] = {}
    for part in parts:
        for rank, found in part.ranks.items():
            if found.world_size != world_size:
                raise _other_job(first, part, "world size", world_size, found.world_size)
            if rank in holders:
                raise UsageError(
                    f"rank {rank} is in {holders[rank]} and in {part.path}.\n"
                    "One job has each rank once: leave out the folder of the other launch."
                )
            holders[rank] = part.path
    for part in parts[1:]:
        for key, what in _SAME.items():
            if part.info[key] != first.info[key]:
                raise _other_job(first, part, what, first.info[key], part.info[key])
        ours, theirs = (one.info.get("job") or "" for one in (first, part))
        if ours and theirs and ours != theirs:
            raise _other_job(first, part, "job of the launcher", ours, theirs)
        commands = [_without_host(one.info["command"]) for one in (first, part)]
        if commands[0] != commands[1] and not any_command:
            raise _other_job(
                first,
                part,
                "command",
                shlex.join(commands[0]),
                shlex.join(commands[1]),
                "Merge what one launch recorded; where the command differs from host to host: --any-command.",
            )
    _check_beginnings(parts)
    _check_times(parts)
    return world_size


def _other_job(
    first: _Part, part: _Part, what: str, ours: object, theirs: object, advice: str = "Merge what one launch recorded."
) -> UsageError:
    return UsageError(
        f"{first.path} and {part.path} are not of one job: {what} {_shown(ours)} and {_shown(theirs)}.\n{advice}"
    )


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 300 else text[:300] + " ..."


def _check_beginnings(parts: Sequence[_Part]) -> None:
    """A resumed launch has other first steps than the one before it."""
    steps: dict[int, tuple[_Part, int]] = {}
    for part in parts:
        for rank, found in part.ranks.items():
            if found.first_step is not None:
                steps.setdefault(found.first_step, (part, rank))
    if len(steps) > 1:
        (one, (part, rank)), (other, (other_part, other_rank)) = sorted(steps.items())[:2]
        raise UsageError(
            f"{part.path} and {other_part.path} are not of one job: rank {rank} begins with step {one}, "
            f"rank {other_rank} with step {other}.\nMerge what one launch recorded."
        )


def _check_times(parts: Sequence[_Part]) -> None:
    """Raise UsageError where a part began long after another had ended."""
    times = []
    for part in parts:
        try:
            began = datetime.fromisoformat(part.info["started"])
            ended = datetime.fromisoformat(part.info["ended"]) if part.info["ended"] else None
        except ValueError:
            continue  # written by hand, or by a later version: no reason to refuse
        times.append((began, ended, part))
    for ended, earlier in [(ended, part) for _, ended, part in times if ended is not None]:
        for began, _, later in times:
            with suppress(TypeError):  # one time has a zone and the other none
                if began - ended > CLOCK_TOLERANCE:
                    raise UsageError(
                        f"{later.path} began at {later.info['started']}, after {earlier.path} had ended at "
                        f"{earlier.info['ended']}: they are not of one launch.\nMerge what one launch recorded."
                    )


def _without_host(command: Sequence[str]) -> list[str]:
    """Return a command without the words that say on which host it runs."""
    kept, skip = [], False
    for word in command:
        match = _HOST_OPTION.fullmatch(word)
        if not skip and match is None:
            kept.append(word)
        skip = match is not None and match[2] is None
    return kept


def _describe(parts: Sequence[_Part], ranks: dict[int, _Rank], world_size: int) -> tuple[dict[str, Any], list[str]]:
    """Return the new run.json, and what a user must know of it."""
    infos = [part.info for part in parts]
    by_id: dict[str, list[int]] = {}
    for rank, found in sorted(ranks.items()):
        by_id.setdefault(found.run_id, []).append(rank)
    sets = sorted((format_rank_set(members), run_id) for run_id, members in by_id.items())
    notes = []
    described = next((info for info in infos if info["environment"]), infos[0])
    for part in parts:
        if part.info["status"] in ("recording", "killed") and not part.info.get("stopped"):
            notes.append(f"{part.path} had not finished ({part.info['status']}) when it was merged.")
        other = part.info["environment"]
        if other and other != described["environment"]:
            keys = sorted(
                k for k in {*other, *described["environment"]} if other.get(k) != described["environment"].get(k)
            )
            named = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
            notes.append(f"{part.path} was recorded in another environment ({named}).")
        if part.info["bitcheck_version"] != infos[0]["bitcheck_version"]:
            notes.append(f"{part.path} was recorded by bitcheck {part.info['bitcheck_version']}.")
    statuses = {"killed" if info["status"] == "recording" else info["status"] for info in infos}
    ends = [info["ended"] for info in infos]
    info = infos[0] | {
        "run_id": xxhash.xxh3_128_hexdigest("\n".join(map(" ".join, sets)).encode("utf-8")),
        "parts": [{"ranks": text, "run_id": run_id} for text, run_id in sets],
        "world_size": world_size,
        "environment": described["environment"],
        "status": next(status for status in ("failed", "killed", "complete") if status in statuses),
        "exit_status": next((info["exit_status"] for info in infos if info["exit_status"]), infos[0]["exit_status"]),
        "started": min(info["started"] for info in infos),
        "ended": None if None in ends else max(ends),
        "notes": list(dict.fromkeys([*(note for info in infos for note in info["notes"]), *notes])),
    }
    unfinished = [info for info in infos if info["status"] in ("recording", "killed")]
    info.pop("stopped", None)
    if unfinished and all(each.get("stopped") for each in unfinished):
        info["stopped"] = True
    unrecorded = sum((Counter(unrecorded_processes(info)) for info in infos), Counter[int]())
    if unrecorded:
        info["unrecorded"] = {str(rank): count for rank, count in sorted(unrecorded.items())}
    if varied := sorted({str(change) for info in infos for change in info.get("varied", [])}):
        info["varied"] = varied
    problem = find_problem(info)
    if problem:
        raise RecordingError(f"the merged {RUN_FILE} {problem}: please report it.")
    return info, notes


def _build(
    building: Path, ranks: dict[int, _Rank], info: dict[str, Any], on_progress: Callable[[int, int], None] | None
) -> int:
    """Write the whole run into the folder `building`; return the bytes copied. Raises OSError, BrokenRun."""
    building.mkdir(parents=True)
    num_bytes = 0
    for done, (rank, found) in enumerate(sorted(ranks.items()), 1):
        copy = rank_path(building, rank)
        shutil.copyfile(found.path, copy)
        num_bytes += copy.stat().st_size
        seal = read_seal(found.path)
        if seal is not None:
            if hash_file(copy) != (seal.get("num_bytes"), seal.get("xxh3_128")):
                raise BrokenRun(
                    f"{found.path} does not match its seal: it was cut, edited or damaged.\n"
                    f"Restore it from a copy. What does not hold: bitcheck verify {found.path.parent}"
                )
            shutil.copyfile(seal_path(found.path), seal_path(copy))
        if on_progress is not None:
            on_progress(done, len(ranks))
    (building / RUN_FILE).write_bytes(encode_document(info))
    with open_run(building, allow_missing_ranks=True) as run:
        for rank in ranks:
            run.rank(rank)  # its run_id is the one that run.json says
            run.close_rank(rank)
    return num_bytes


def _put_in_place(building: Path, target: Path) -> None:
    """Give the finished folder its name; an older run there goes only then. Raises OSError."""
    if not target.is_dir():
        os.rename(building, target)
        return
    old = building.with_suffix(".old")
    os.rename(target, old)
    try:
        os.rename(building, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
