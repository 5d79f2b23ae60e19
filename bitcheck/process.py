"""Which process writes a run, and whether it is gone: what tells `killed` from `recording`.

    {"host": "node-17", "pid": 4242, "pid_started": 183482}

`pid_started` is the process's start in clock ticks since boot (field 22 of /proc/PID/stat), so that
a later process that got the same number is not taken for the writer; 0 where there is no /proc.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return host, pid and pid_started of the calling process."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_started": _start_ticks(pid) or 0}


def is_gone(writer: Mapping[str, Any]) -> bool:
    """Return whether the process `writer` (as of `this_process`) no longer runs.

    False where that cannot be told: it ran on another host, or belongs to another user.
    """
    host, pid, started = writer.get("host"), writer.get("pid"), writer.get("pid_started")
    if host != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    if started:
        return bool(_start_ticks(pid) != started)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat, None where no such process lives (a zombie is dead)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the command in parentheses, which may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
