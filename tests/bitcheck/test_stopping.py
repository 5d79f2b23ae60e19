"""A watched program: it ends when its watcher says so, with everything that it started, however it resists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitcheck.launch import Ending, run_program
from bitcheck.stopping import stop_program

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('ready', flush=True); time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_ignores_sigterm_is_killed_with_a_child_in_a_session_of_its_own() -> None:
    program = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, process_group=0)
    assert program.stdout is not None
    grandchild = int(program.stdout.readline())
    assert program.stdout.readline() == b"ready\n"
    stop_program(program, grace_s=0.3)
    program.stdout.close()
    assert program.returncode == -signal.SIGKILL
    assert not is_running(grandchild)


def test_a_program_that_ends_at_sigterm_has_its_time_to_clean_up(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / 'clean')!r}, 'w').close(), sys.exit(3)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, process_group=0)
    assert program.stdout is not None
    program.stdout.readline()
    stop_program(program, grace_s=30)
    program.stdout.close()
    assert program.returncode == 3
    assert (tmp_path / "clean").exists()


def test_a_watched_program_is_stopped_when_enough_was_seen() -> None:
    began = time.monotonic()
    ending = run_program(["sleep", "60"], os.environ, watch=lambda: time.monotonic() > began + 0.3)
    assert ending == Ending(128 + signal.SIGTERM, was_stopped=True)
    assert ending.status == "killed"


def test_a_watched_program_that_ends_by_itself_was_not_stopped() -> None:
    assert run_program(["sh", "-c", "exit 3"], os.environ, watch=lambda: False) == Ending(3)


def test_a_watched_program_does_not_outlive_an_error_of_its_watcher(tmp_path: Path) -> None:
    def fail() -> bool:
        if not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            return False
        raise RuntimeError("the disk is full")

    script = f"echo $$ > {tmp_path / 'pid'}; exec sleep 60"
    with pytest.raises(RuntimeError, match="the disk is full"):
        run_program(["sh", "-c", script], os.environ, watch=fail)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_watched_program_does_not_outlive_a_terminated_watcher(tmp_path: Path) -> None:
    watcher = (
        "import os\nfrom bitcheck.launch import run_program\n"
        f"run_program(['sh', '-c', 'echo $$ > {tmp_path / 'pid'}; exec sleep 60'], os.environ, watch=lambda: False)"
    )
    process = subprocess.Popen([sys.executable, "-c", watcher])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_watcher_that_is_terminated_while_it_starts_the_program_still_ends_it(tmp_path: Path) -> None:
    watcher = f"""
import os, signal, subprocess
from bitcheck import launch

class TerminatedInTheMiddle(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with open({str(tmp_path / "pid")!r}, "w") as file:
            file.write(str(self.pid))
        os.kill(os.getpid(), signal.SIGTERM)

launch.subprocess.Popen = TerminatedInTheMiddle
launch.run_program(["sleep", "60"], os.environ, watch=lambda: False)
"""
    done = subprocess.run([sys.executable, "-c", watcher], timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_watched_program_runs_where_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "here.sh").write_text("#!/bin/sh\npwd > where\n")
    (tmp_path / "here.sh").chmod(0o755)
    assert run_program(["./here.sh"], os.environ, cwd=tmp_path, watch=lambda: False).exit_status == 0
    assert Path((tmp_path / "where").read_text().strip()).samefile(tmp_path)
