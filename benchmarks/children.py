"""The processes that a benchmark starts, ended with it in whatever way it ends: `timeout` and Ctrl-C included."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Inside, a SIGTERM raises SystemExit, so that what has been started is cleaned up; a second one is ignored."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is not to be cut short
        sys.exit("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(processes: Iterable[subprocess.Popen[bytes]], grace_seconds: float = 10) -> None:
    """Terminate the processes, kill those that are still there after the grace, and wait for every one."""
    left = list(processes)
    for process in left:
        process.terminate()
    deadline = time.perf_counter() + grace_seconds
    for process in left:
        try:
            process.wait(max(0.0, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
