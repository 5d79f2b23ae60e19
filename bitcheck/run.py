"""A run's folder: run.json beside one file a rank.

runs/a/
    run.json          what was run, where, and how it ended (bitcheck.run_document)
    rank-00000.h5     the steps of rank 0 (bitcheck.store)
    rank-00000.seal   the hash of that file, once it is finished (bitcheck.store.seal)
    rank-00001.h5
    ...
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitcheck import __version__
from bitcheck.digest import DIGEST_VERSION
from bitcheck.document import encode_document
from bitcheck.errors import BrokenRun, FutureRun, NotARun, RecordingError
from bitcheck.events import Level
from bitcheck.process import is_gone, this_process
from bitcheck.run_document import RUN_FILE, SCHEMA, STOPPED, find_problem, read_run_file, run_ids
from bitcheck.wording import counted

if TYPE_CHECKING:
    import numpy as np

    from bitcheck.store import RankReader

_RANK_FILE = re.compile(r"rank-(\d{5,})\.h5")
_OWN_FILE = re.compile(
    r"run\.json | rank-\d{5,}\.(h5|seal) | \.(run\.json|rank-\d{5,}\.(h5|seal))\.\d+\.tmp", re.VERBOSE
)


def rank_path(folder: Path, rank: int) -> Path:
    """Return where the file of `rank` is."""
    return Path(folder) / f"rank-{rank:05d}.h5"


def utc_now() -> str:
    """Return the time as run.json writes it, ISO 8601, UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def create_run(folder: Path, info: dict[str, Any], overwrite: bool) -> None:
    """Make a run's folder with its run.json; keys that `info` leaves out get their plain defaults.

    `info` must hold `level` and `world_size`. Raises RecordingError where the folder holds a run and
    `overwrite` is False, where it holds files that are not a run's, where a recording is going on in
    it, or where it cannot be written. With `overwrite` only a run's own files are removed.
    """
    folder = Path(folder)
    document = {
        "schema": SCHEMA,
        "digest_version": DIGEST_VERSION,
        "bitcheck_version": __version__,
        "run_id": uuid.uuid4().hex,
        "command": list(sys.argv),
        "cwd": os.getcwd(),
        "start_step": 0,
        "leaves": 1024 * 1024,
        "steps": None,
        "every": 1,
        "started": utc_now(),
        "ended": None,
        "status": "recording",
        "exit_status": None,
        "writer": this_process(),
        "environment": {},
        "recorder": "record",
        "notes": [],
        **info,
    }
    problem = find_problem(document)
    if problem:
        raise RecordingError(f"{folder / RUN_FILE} cannot be written: it {problem}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder, overwrite)
        building = _building_path(folder)
        building.write_bytes(encode_document(document))
        try:
            os.link(building, folder / RUN_FILE)  # fails where another recording was faster
        finally:
            building.unlink()
    except (FileExistsError, NotADirectoryError):
        if folder.is_dir():
            raise RecordingError(_in_use(folder)) from None
        raise RecordingError(f"{folder} is a file; expected a folder for the run.\nChoose another --output.") from None
    except OSError as error:
        raise RecordingError(
            f"{folder} cannot be written: {error.strerror}.\nChoose another --output, or free some space."
        ) from None


def update_run(folder: Path, **changes: Any) -> None:
    """Change keys of a run.json, atomically: a reader sees the old or the new one.

    Raises RecordingError where it cannot be written, RunError where it cannot be read.
    """
    folder = Path(folder)
    with _locked(folder):
        document = read_run_file(folder) | changes
        problem = find_problem(document)
        if problem:
            raise RecordingError(f"{folder / RUN_FILE} cannot be written: it {problem}.")
        building = _building_path(folder)
        try:
            building.write_bytes(encode_document(document))
            os.replace(building, folder / RUN_FILE)
        except OSError as error:
            building.unlink(missing_ok=True)
            raise RecordingError(
                f"{folder / RUN_FILE} cannot be written: {error.strerror}.\nFree some space, and record again."
            ) from None


def open_run(path: Path, *, allow_missing_ranks: bool = False) -> Run:
    """Open a recorded run for reading; its rank files are opened when they are asked for.

    Raises NotARun where there is none, FutureRun where a later bitcheck wrote it, BrokenRun where
    run.json was cut or edited, or where a rank's file is missing (unless `allow_missing_ranks`).
    """
    run = Run(Path(path))
    missing = run.missing_ranks
    if missing and not allow_missing_ranks:
        names = ", ".join(rank_path(run.path, rank).name for rank in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BrokenRun(
            f"{run.path}: {names}{more} missing; the run has {counted(run.world_size, 'rank')}.\n"
            "Copy the files of all its ranks into one folder (`bitcheck merge` gathers several hosts'), or record "
            "the run again."
        )
    return run


class Run:
    """A recorded run, read only.

    path, info       its folder; run.json as it is
    run_id, level, world_size, environment    from run.json
    ranks            ranks that have a file, ascending; missing_ranks: those that have none
    rank(r)          the RankReader of one rank, opened at the first call
    status           "recording", "complete", "failed", "killed" where the writer is gone, or "stopped"
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info = read_run_file(path)
        self.run_id: str = self.info["run_id"]
        self.level = Level(self.info["level"])
        self.world_size: int = self.info["world_size"]
        self.environment: dict[str, str] = self.info["environment"]
        try:
            names = os.listdir(path)
        except OSError as error:
            raise NotARun(f"{path} cannot be read: {error.strerror}.\nCheck its permissions.") from None
        found = {int(match[1]) for match in map(_RANK_FILE.fullmatch, names) if match}
        self.ranks = sorted(rank for rank in found if rank < self.world_size)
        self.missing_ranks = [rank for rank in range(self.world_size) if rank not in found]
        self._run_ids = run_ids(self.info)
        self._readers: dict[int, RankReader] = {}
        self._rank_statuses: set[str] | None = None
        self._seen_statuses: dict[int, str] = {}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all rank files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def rank(self, rank: int) -> RankReader:
        """Return the reader of one rank; it stays open until `close` or `close_rank`.

        Raises RunError where the file cannot be read or belongs to another run.
        """
        from bitcheck.store import RankReader  # here: a launcher makes a run, and reads none

        reader = self._readers.get(rank)
        if reader is None:
            reader = RankReader(rank_path(self.path, rank))
            run_id = self._run_ids.get(rank, self.run_id)
            if (reader.run_id, reader.rank, reader.world_size, reader.level) != (
                run_id,
                rank,
                self.world_size,
                self.level,
            ):
                reader.close()
                raise BrokenRun(
                    f"{reader.path} is rank {reader.rank} of run {reader.run_id}; expected rank {rank} of run "
                    f"{run_id}.\nPut the run's own file back."
                )
            self._readers[rank] = reader
        return reader

    def close_rank(self, rank: int) -> None:
        """Close the file of one rank, so that a run of thousands does not hold all of them open."""
        reader = self._readers.pop(rank, None)
        if reader is not None:
            reader.close()
            self._seen_statuses[rank] = reader.status

    def read_tails(self, ranks: Sequence[int] | None = None, *, num_processes: int = 1) -> np.ndarray:
        """Return one `bitcheck.store.TAIL_ROW` for each of `ranks` (all that have a file), in their order.

        About 0.25 ms a rank; with `num_processes` above 1 that many Python processes are started for it
        (the calling program must then guard its main module, as for any use of `multiprocessing`).
        Files that were not open are closed again. Raises RunError where a file cannot be read.
        """
        import numpy as np

        from bitcheck.store import TAIL_ROW

        wanted = self.ranks if ranks is None else list(ranks)
        if num_processes > 1 and len(wanted) > 1:
            parts = [wanted[start::num_processes] for start in range(num_processes)]
            tails = np.zeros(len(wanted), TAIL_ROW)
            import multiprocessing

            with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
                for start, part in enumerate(pool.starmap(_read_tails, [(self.path, part) for part in parts])):
                    tails[start::num_processes] = part
        else:
            tails = np.zeros(len(wanted), TAIL_ROW)
            for position, rank in enumerate(wanted):
                was_open = rank in self._readers
                tails[position] = self.rank(rank).tail()
                if not was_open:
                    self.close_rank(rank)
        if ranks is None:
            self._rank_statuses = set(tails["status"].tolist())
        return tails

    @property
    def status(self) -> str:
        """The run's status, from run.json and from every rank's file.

        `failed` where run.json or a rank says so; else `killed` where a writer is gone that had not
        finished; else `recording` where anything is still being written; else `complete`. `stopped` where
        bitcheck itself ended the program, and nothing is noted that failed before.
        """
        found = {self.info["status"]}
        if self.info["status"] == "recording" and is_gone(self.info["writer"]):
            found = {"killed"}
        if self._rank_statuses is None and len(self._seen_statuses) == len(self.ranks):
            self._rank_statuses = set(self._seen_statuses.values())  # every file was looked at already
        if self._rank_statuses is None:
            self.read_tails()
        found |= self._rank_statuses or set()
        if self.missing_ranks and "recording" not in found:
            found.add("killed")
        # A program may answer its end with an exception: that is the stop's doing, unless there is word of another.
        is_sound = not self.missing_ranks and not ("failed" in found and self.info["notes"])
        if self.info["status"] == "killed" and self.info.get("stopped") and is_sound:
            return STOPPED
        return next(status for status in ("failed", "killed", "recording", "complete") if status in found)


def _read_tails(path: Path, ranks: list[int]) -> np.ndarray:
    """Do the work of `Run.read_tails` in another process."""
    with Run(path) as run:
        return run.read_tails(ranks)


def _clear(folder: Path, overwrite: bool) -> None:
    """Make `folder` ready for a new run. Raises RecordingError where it must not be touched."""
    for name in check_overwrite(folder, overwrite):
        (folder / name).unlink(missing_ok=True)


def check_overwrite(folder: Path, overwrite: bool) -> list[str]:
    """Return the files of the run in `folder` that a new one is to replace; none where it is empty or not there.

    Raises RecordingError where it must not be touched: it is a file, holds what is not a run's, is being
    recorded, or holds a run and `overwrite` is False.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise RecordingError(f"{folder} is a file; expected a folder for the run.\nChoose another --output.") from None
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror}.\nChoose another --output.") from None
    foreign = [name for name in names if not _OWN_FILE.fullmatch(name)]
    if foreign:
        raise RecordingError(
            f"{folder} holds {foreign[0]}, which is not a run's; expected an empty folder.\nChoose another --output."
        )
    if not names:
        return []
    if not overwrite:
        raise RecordingError(_in_use(folder))
    try:
        with open_run(folder, allow_missing_ranks=True) as run:
            writer = run.info["writer"]
            is_mine = writer.get("pid") == os.getpid()
            if run.info["status"] == "recording" and not is_gone(writer) and not is_mine:
                raise RecordingError(
                    f"{folder} is being recorded by process {writer.get('pid')} on {writer.get('host')}.\n"
                    "Wait until it has ended, or choose another --output."
                )
    except NotARun:
        raise RecordingError(
            f"{folder} holds {names[0]} but no run.json of bitcheck; expected a run to replace.\n"
            "Choose another --output."
        ) from None
    except (BrokenRun, FutureRun):
        pass  # damaged or from a later version, and still a run: it may be replaced
    return names


def _in_use(folder: Path) -> str:
    return (
        f"{folder} holds a run already; expected an empty or a new folder.\n"
        "Choose another --output, or give --overwrite to replace the run."
    )


def _building_path(folder: Path) -> Path:
    return folder / f".{RUN_FILE}.{os.getpid()}.tmp"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder while run.json is read, changed and replaced: a launcher and a rank may both do it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RecordingError(
            f"{folder} cannot be written: {error.strerror}.\nLeave a run's folder alone until its program has ended."
        ) from None
    try:
        # On a file system without locks two changes at once are improbable, not impossible.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
