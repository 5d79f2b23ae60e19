"""A job that hangs ends, with what it started, and tells where it hung."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.hooks.jobs import Job, end_all, run_job

HANGING = """
import subprocess, sys, time

def hang_here(seconds):
    time.sleep(seconds)

if len(sys.argv) > 1:
    # A file of its own: two processes that tell their stacks at once would do so between each other's lines.
    print(subprocess.Popen([sys.executable, __file__], stderr=open("child.said", "w")).pid, flush=True)
hang_here(600)
"""


def wait_for_words(path: Path) -> None:
    limit = time.monotonic() + 30
    while not (path.exists() and path.read_text().strip()) and time.monotonic() < limit:
        time.sleep(0.05)


def test_a_job_that_hangs_is_ended_with_all_its_processes_and_their_stacks_are_told(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING)
    with pytest.raises(AssertionError, match="not ended after 5 s") as told:
        run_job(tmp_path, [sys.executable, "program.py", "parent"], tmp_path, timeout_s=5)
    assert "in hang_here" in str(told.value)
    assert "in hang_here" in (tmp_path / "child.said").read_text()
    (said,) = tmp_path.glob("said-*")
    child = int(said.read_text().split()[0])
    limit = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < limit, f"process {child} is left over"
        time.sleep(0.05)


def test_jobs_that_wait_for_one_that_failed_are_ended_and_all_are_heard(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(HANGING)
    waiting = Job(tmp_path / "one.said", [sys.executable, "program.py", "parent"], tmp_path)
    wait_for_words(tmp_path / "one.said")
    failing = Job(
        tmp_path / "two.said", [sys.executable, "-c", "raise SystemExit('no such luck')"], tmp_path, os.environ
    )
    with pytest.raises(AssertionError, match=r"ended with \[None, 1\]") as told:
        end_all([waiting, failing])
    assert "in hang_here" in str(told.value) and "no such luck" in str(told.value)
    assert waiting.status is not None
