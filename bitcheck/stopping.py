"""Stop a program with everything that it started.

SIGTERM to its process group first: launchers such as torchrun then end their workers themselves, and a
trainer may clean up. What is left after a while gets SIGKILL, also processes that have a session of
their own (the workers of torchrun) and so are in no group of the program's. They are known by their
parents, from /proc; where there is none only the group is stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GRACE_S = 10.0
"""How long a program has between SIGTERM and SIGKILL."""
_PAUSE_S = 0.05
_KILLED_S = 5.0
"""How long a killed process may take to be gone; one that waits for a disk cannot be helped."""


class _Process(NamedTuple):
    pid: int
    started: int
    """In clock ticks since boot: a later process with the same number is another one."""


def stop_program(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End `child`, the leader of a process group, and everything below it; returns when it has ended."""
    family = _descendants(child.pid)
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (child.poll() is None or any(map(_is_alive, family))):
        time.sleep(_PAUSE_S)
    family |= _descendants(child.pid)
    _signal_group(child.pid, signal.SIGKILL)
    for process in family:
        if _is_alive(process):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + _KILLED_S
    while time.monotonic() < deadline and any(map(_is_alive, family)):
        time.sleep(_PAUSE_S)


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _descendants(pid: int) -> set[_Process]:
    """Return every process below `pid`, but not itself."""
    children: defaultdict[int, list[_Process]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None:
            children[stat[0]].append(stat[1])
    found: set[_Process] = set()
    waiting = [pid]
    while waiting:
        below = children[waiting.pop()]
        found.update(below)
        waiting += [process.pid for process in below]
    return found


def _is_alive(process: _Process) -> bool:
    stat = _stat(process.pid)
    return stat is not None and stat[1] == process


def _stat(pid: int) -> tuple[int, _Process] | None:
    """Return (parent's pid, process), None where no such process lives (a zombie is dead)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), _Process(pid, int(fields[19]))
