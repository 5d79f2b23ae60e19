"""Start a program with bitcheck inside, wait for it, and pass its end through.

The child gets two variables: the settings, and a PYTHONPATH that begins with the folder of
`hooks/bootstrap/sitecustomize.py`. Everything else is the user's: standard streams and other open
files, working directory, process group, signals that were ignored, exit status.

Signals. What a terminal sends (Ctrl-C, Ctrl-backslash) goes to the whole foreground group, so the
child has it already and the launcher only waits. What is sent to one process (SIGTERM, SIGHUP,
SIGUSR1, SIGUSR2: schedulers, `kill`) is passed on.

Long because what passes between a shell and the program is all here.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

import bitcheck
from bitcheck.environment import telling_variables
from bitcheck.errors import BitcheckError, RecordingError
from bitcheck.ranks import Placement, is_first_of_host, launched_as
from bitcheck.run_document import note_unrecorded, unrecorded_processes
from bitcheck.settings import VARIABLE, Options, Settings

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
"""As `env` and shells end where there is no such program."""

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SHARED = (signal.SIGINT, signal.SIGQUIT)
_KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU})
"""Signals by which somebody else ended the program; the others are its own doing, or its user's."""
_JOIN_TIMEOUT_S = 60.0
_WATCH_INTERVAL_S = 0.2

Stream = IO[Any] | int | None


class Ending(NamedTuple):
    """How a program ended."""

    exit_status: int
    """0 to 255; 128 + the signal's number where a signal ended it."""
    was_stopped: bool = False
    """`watch` had seen enough, and the program was stopped."""

    @property
    def status(self) -> str:
        """Return `complete`, `failed` or `killed`."""
        if self.was_stopped:
            return "killed"
        if self.exit_status == 0:
            return "complete"
        return "killed" if self.exit_status - 128 in _KILLS else "failed"


Watch = Callable[[], bool]
"""Called again and again while a program runs; True stops the program."""


class ProgramNotFound(BitcheckError):
    """There is no such program, or it cannot be executed; `exit_status` is what a shell would say."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def package_folder() -> Path:
    """Return the absolute folder of the package `bitcheck`."""
    return Path(os.path.abspath(bitcheck.__file__)).parent


def attached_environment(settings: Settings, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with what makes every Python process below read `settings`."""
    bootstrap = str(package_folder() / "hooks" / "bootstrap")
    path = variables.get("PYTHONPATH", "")
    entries = [entry for entry in path.split(os.pathsep) if entry != bootstrap] if path else []
    return {**variables, VARIABLE: settings.to_json(), "PYTHONPATH": os.pathsep.join([bootstrap, *entries])}


def find_program(command: Sequence[str], cwd: Path | None = None) -> None:
    """Raise ProgramNotFound where `command` cannot be started in the folder `cwd`, with what to look at."""
    name = command[0]
    if cwd is not None and os.sep in name:
        name = os.path.join(cwd, name)
    if shutil.which(name) is not None:
        return
    if os.sep in name and os.path.isfile(name):
        message = f"{name} is not executable.\nGive the interpreter: python {shlex.join(command)}"
        raise ProgramNotFound(message, EXIT_NOT_EXECUTABLE)
    hint = f"python {name}" if os.path.isfile(name) else "a name on PATH, or the path of a file"
    raise ProgramNotFound(f"there is no program {name!r}; nothing was run.\nExpected: {hint}", EXIT_NOT_FOUND)


def run_program(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    cwd: Path | None = None,
    watch: Watch | None = None,
) -> Ending:
    """Run `command` to its end, with `variables` for its environment.

    With `watch` the program gets a process group of its own, and all of it ends with this call:
    `watch` is asked a few times a second, and what ends this process ends the program first.
    Raises ProgramNotFound where it cannot be started.
    """
    if watch is not None:
        return _run_watched(command, variables, watch, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    def wait_for_child(number: int, frame: FrameType | None) -> None:
        pass  # the child has it from the terminal

    with _handlers({**dict.fromkeys(_FORWARDED, forward), **dict.fromkeys(_SHARED, wait_for_child)}):
        try:
            # close_fds: what the shell handed down (`3>log`, `<(command)`) is the program's; ours are close-on-exec.
            child = subprocess.Popen(
                command, env=variables, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, close_fds=False
            )
        except OSError as error:
            raise _not_started(command, error) from None
        for number in early:
            child.send_signal(number)
        code = child.wait()
    return Ending(128 - code if code < 0 else code)


def _not_started(command: Sequence[str], error: OSError) -> ProgramNotFound:
    if isinstance(error, FileNotFoundError):
        return ProgramNotFound(f"there is no program {command[0]!r}; nothing was run.", EXIT_NOT_FOUND)
    return ProgramNotFound(f"{command[0]} cannot be executed: {error.strerror}.", EXIT_NOT_EXECUTABLE)


def _run_watched(
    command: Sequence[str],
    variables: Mapping[str, str],
    watch: Watch,
    *,
    stdin: Stream,
    stdout: Stream,
    stderr: Stream,
    cwd: Path | None,
) -> Ending:
    """Run `command` in a process group of its own until it ends or `watch` has seen enough."""
    from bitcheck.stopping import stop_program

    is_starting = True
    early: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if is_starting:  # Popen may have made the process and not told us yet: nobody could stop it
            early.append(number)
        else:
            raise SystemExit(128 + number)  # through `finally` below: the program does not outlive its judge

    with _handlers(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), leave)):
        try:
            child = subprocess.Popen(
                command, env=variables, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, process_group=0
            )
        except OSError as error:
            raise _not_started(command, error) from None
        was_stopped = False
        try:
            is_starting = False
            if early:
                raise SystemExit(128 + early[0])
            while child.poll() is None:
                if watch():
                    was_stopped = child.poll() is None
                    break
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_WATCH_INTERVAL_S)
        finally:
            if child.poll() is None:
                stop_program(child)
        code = child.wait()
    return Ending(128 - code if code < 0 else code, was_stopped)


@contextmanager
def _handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Set signal handlers; a signal that was ignored (`nohup`) stays so, here and in the child."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] not in (signal.SIG_IGN, None):
                signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, handler)


def record_program(
    command: Sequence[str],
    folder: Path,
    options: Options,
    *,
    overwrite: bool = False,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    watch: Watch | None = None,
    own_folder: bool = False,
) -> Ending:
    """Run `command` and record it into `folder`; return how it ended.

    `variables` is its environment (this process's), `cwd` its working directory (this process's), and
    `watch` may stop it: see `run_program`. Where the launcher itself was launched once a rank
    (`srun bitcheck run ...`), rank 0's makes the folder and the others join it; with `own_folder` each host
    has one of its own, which the first process of the host makes. Raises RecordingError
    where the folder cannot be made or joined, ProgramNotFound where there is no such program.
    """
    from bitcheck.run import create_run

    find_program(command, cwd)
    folder = Path(os.path.abspath(folder))
    placement = launched_as(os.environ)
    is_first = placement is None or (is_first_of_host(os.environ) if own_folder else placement.rank == 0)
    if is_first:
        run_id = secrets.token_hex(8)
        info = _run_info(command, run_id, options, placement)
        info["variables"] = telling_variables(os.environ if variables is None else variables)
        if cwd is not None:
            info["cwd"] = os.path.abspath(cwd)
        create_run(folder, info, overwrite=overwrite)
    else:
        assert placement is not None
        run_id = join_run(folder, placement.job)
    with tempfile.TemporaryDirectory(prefix="bitcheck-", ignore_cleanup_errors=True) as words:
        settings = Settings(str(folder), str(package_folder()), words, run_id, options)
        try:
            ending = run_program(
                command,
                attached_environment(settings, os.environ if variables is None else variables),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                watch=watch,
            )
        except ProgramNotFound:
            if is_first:
                (folder / "run.json").unlink()
            raise
        told = read_words(Path(words))
    _finish_run(folder, ending, told, options, is_first)
    return ending


def _finish_run(folder: Path, ending: Ending, told: Sequence[Word], options: Options, is_first: bool) -> None:
    """Write down how the run ended, and tell the user what went unrecorded."""
    from bitcheck.run import update_run, utc_now

    notes = summarise_words(told, options)
    for note in notes:
        # What failed was said when it did, by the process in which it did.
        if note.is_news:
            print(f"bitcheck: {note.text}", file=sys.stderr)
    written = _read_info(folder)
    changes: dict[str, Any] = {}
    if notes:
        changes["notes"] = [*written.get("notes", []), *(note.text for note in notes)]
    if refused := count_refused(told):
        known = Counter(unrecorded_processes(written))
        changes["unrecorded"] = {str(rank): count for rank, count in sorted((known + refused).items())}
    if varied := sorted({str(word["change"]) for word in told if word["what"] == "varied"}):
        changes["varied"] = varied
    # With a launcher a rank, one that failed has had its say: rank 0's own good end does not undo it.
    if ending.exit_status or (is_first and written.get("status") == "recording"):
        changes |= {"status": ending.status, "exit_status": ending.exit_status}
    if ending.was_stopped:
        changes["stopped"] = True
    if is_first:
        changes["ended"] = utc_now()
        if sizes := [word["world_size"] for word in told if word["what"] == "claimed"]:
            changes["world_size"] = max(sizes)
    try:
        if changes:
            update_run(folder, **changes)
    except BitcheckError as error:
        print(f"bitcheck: the end of the run is not written down: {error}", file=sys.stderr)


def _read_info(folder: Path) -> dict[str, Any]:
    """Return run.json, nothing where it cannot be read: `update_run` says then what is wrong with it."""
    try:
        info = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _run_info(command: Sequence[str], run_id: str, options: Options, placement: Placement | None) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "command": list(command),
        "level": options.level,
        "world_size": placement.world_size if placement is not None else 1,
        "start_step": options.start_step,
        "leaves": options.leaves,
        "steps": options.steps,
        "every": options.every,
        "recorder": "run",
        "job": placement.job if placement is not None else "",
    }


def join_run(folder: Path, job: str, timeout_s: float = _JOIN_TIMEOUT_S) -> str:
    """Wait for the run that rank 0's launcher of the same job makes; return its id.

    Raises RecordingError where none appears within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        info = _read_info(folder)  # nothing yet, perhaps, or an older run that rank 0 is about to replace
        if info.get("status") == "recording" and info.get("job") == job:
            return str(info["run_id"])
        if time.monotonic() > deadline:
            raise RecordingError(
                f"{folder}: rank 0 made no run here within {timeout_s:g} s; this rank would be lost.\n"
                "Give all ranks the same folder, on a disk that all of them see; where each host has a disk of its "
                "own: --own-folder, and `bitcheck merge` afterwards."
            )
        time.sleep(0.05)


Word = Mapping[str, Any]
"""What a process left: `bitcheck.hooks.attach` lists the kinds."""


class Note(NamedTuple):
    """A sentence for run.json."""

    text: str
    is_news: bool
    """The user has not been told of it yet."""


def read_words(folder: Path) -> list[Word]:
    """Return what the processes of a run left word of, process by process."""
    words = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            try:
                word = json.loads(line)
            except ValueError:
                continue  # cut off by the end of its process
            words.append(word)
    return words


def count_refused(words: Sequence[Word]) -> Counter[int]:
    """Return how many processes trained as a rank that another process records, by rank."""
    return Counter(int(word["rank"]) for word in words if word["what"] == "refused")


def summarise_words(words: Sequence[Word], options: Options) -> list[Note]:
    """Return what the user must know of a run beside its steps."""
    by_kind: defaultdict[str, list[Word]] = defaultdict(list)
    for word in words:
        by_kind[word["what"]].append(word)
    notes = []
    notes += [Note(note_unrecorded(rank, count), True) for rank, count in sorted(count_refused(words).items())]
    unattached = sorted({f"the program ran unrecorded: {word['reason']}" for word in by_kind["unattached"]})
    failed = sorted({str(word["reason"]) for word in by_kind["failed"]})
    notes += [Note(text, False) for text in (*unattached, *failed)]
    if not unattached and not failed and (reason := _why_nothing(by_kind, options)):
        notes.append(Note(f"nothing was recorded: {reason}", True))
    return notes


def _why_nothing(by_kind: Mapping[str, Sequence[Word]], options: Options) -> str:
    """Return why no step was recorded, "" where one was."""
    if not by_kind["attached"]:
        return (
            "no Python process that imports torch was seen. Either the program never imports it, or its Python "
            "ignores PYTHONPATH (python -I, python -E) or got an environment of its own (env -i, ssh, a container)."
        )
    if not by_kind["claimed"]:
        return (
            "the program imports torch, but no torch.nn.Module ran with gradients enabled and no "
            "torch.optim.Optimizer stepped."
        )
    if not by_kind["stepped"]:
        return (
            "modules ran, but no torch.optim.Optimizer stepped, so no step ended. An optimizer that is not "
            "PyTorch's is recorded by bitcheck.record(...) and its step()."
        )
    ended = by_kind["ended"]
    if ended and not any(word["kept"] for word in ended):
        asked = " ".join(
            [f"--steps {options.steps}"] * bool(options.steps) + [f"--every {options.every}"] * (options.every > 1)
        )
        return f"the program took {max(word['taken'] for word in ended)} steps, none of those of {asked}."
    return ""
