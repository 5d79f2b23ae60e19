"""Jobs of several processes: one that hangs is ended with all of them, and says where they were."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 240.0
_LAST_WORDS_S = 5.0


class Job:
    """A process that is the first of a session of its own, and what it and those that it starts say."""

    def __init__(
        self, said: Path, command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._said = said
        # Not by pipes: whoever is left over holds their ends, and a read of them would not end.
        with said.open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=cwd, env={**(environment or os.environ), "PYTHONFAULTHANDLER": "1"}, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """What was written to standard output and error."""
        return self._said.read_text(errors="replace")

    def end(self) -> None:
        """End what is left; each Python process tells the stacks of its threads."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            limit = time.monotonic() + _LAST_WORDS_S
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
                while time.monotonic() < limit:
                    self._process.poll()
                    os.killpg(self._process.pid, 0)
                    time.sleep(0.05)
        self._process.wait()


def end_all(jobs: Sequence[Job], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until all have ended well. Where one fails the others wait for it: they are ended, and all are heard."""
    limit = time.monotonic() + timeout_s
    try:
        statuses = [job.status for job in jobs]
        while None in statuses and not any(statuses) and time.monotonic() < limit:
            time.sleep(0.05)
            statuses = [job.status for job in jobs]
    finally:  # also where somebody interrupts the test
        for job in jobs:
            job.end()
    said = "".join(f"\n--- job {number}\n{job.said[-4000:]}" for number, job in enumerate(jobs))
    assert all(status == 0 for status in statuses), f"ended with {statuses}{said}"


def run_job(folder: Path, command: Sequence[str], cwd: Path, timeout_s: float = TIMEOUT_S) -> Job:
    """Run a job to its end, well or not; what it says goes to a file in `folder`. Fails where it does not end."""
    job = Job(folder / f"said-{time.monotonic_ns()}", command, cwd)
    limit = time.monotonic() + timeout_s
    try:
        while job.status is None and time.monotonic() < limit:
            time.sleep(0.05)
        is_hung = job.status is None
    finally:
        job.end()
    assert not is_hung, f"not ended after {timeout_s:.0f} s: {job.said[-4000:]}"
    return job
