"""What stops a writer: it says so in a sentence, keeps what was written, and harms nobody else."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import h5py
import pytest

from bitcheck.errors import RecordingError
from bitcheck.events import Group, StepRecord
from bitcheck.store import RankReader
from tests.bitcheck.store.records import make_step, make_steps, open_writer

FILL = """
import os, resource, sys
from pathlib import Path
from bitcheck.errors import RecordingError
from tests.bitcheck.store.records import make_steps, open_writer
if sys.argv[2]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    writer = open_writer(Path(sys.argv[1]))
except RecordingError as error:
    sys.exit(f"cannot open: {error}")
count = 0
try:
    for step in make_steps(0, 5000):
        writer.append(step)
        count += 1
except RecordingError as error:
    print(error)
for again in (lambda: writer.append(step), lambda: writer.close("complete")):
    try:
        again()
    except RecordingError as error:
        print("again", str(error).count("\\n"))
print(count)
"""


def fill(path: Path, limit_bytes: int | str = "") -> subprocess.CompletedProcess[str]:
    """Write steps to `path` in a process of its own until no more fit."""
    command = [sys.executable, "-c", FILL, str(path), str(limit_bytes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=700k", "none", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_what_was_kept(path: Path, done: subprocess.CompletedProcess[str], reason: str) -> None:
    *sentences, last = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    count = int(last)
    assert count > 0
    assert sentences == [
        f"{path}: step {count - 1} could not be written: {reason}; the {count} steps before it are readable.",
        "Free some space, and record again.",
        "again 1",
    ]
    steps = make_steps(0, count)
    with RankReader(path) as reader:
        assert reader.status == "failed"
        assert [reader.load(row).to_record() for row in range(reader.num_rows)] == steps[:count]


def test_a_full_disk_ends_the_recording_and_keeps_what_was_written(small_disk: Path) -> None:
    path = small_disk / "rank-00000.h5"
    check_what_was_kept(path, fill(path), "No space left on device")


@pytest.mark.parametrize("limit_bytes", [400_000, 400_001, 523_457, 700_000])
def test_a_limit_on_the_file_size_ends_the_recording_and_keeps_what_was_written(
    tmp_path: Path, limit_bytes: int
) -> None:
    path = tmp_path / "rank-00000.h5"
    check_what_was_kept(path, fill(path, limit_bytes), "File too large")


def test_a_file_that_cannot_even_be_begun_leaves_nothing(tmp_path: Path) -> None:
    done = fill(tmp_path / "rank-00000.h5", 3_000)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cannot open: {tmp_path}/rank-00000.h5 cannot be created: File too large.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_removed_folder_ends_the_recording(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = open_writer(folder / "r.h5")
    writer.append(make_step(random.Random(0), 0))
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(RecordingError, match=r"r\.h5 was removed or replaced while it was being recorded"):
            writer.append(make_step(random.Random(0), 1))
    writer.close("complete")
    assert not folder.exists()


def test_a_file_put_in_the_place_of_the_recording_is_left_alone(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "r.h5")
    (tmp_path / "r.h5").unlink()
    (tmp_path / "r.h5").write_text("mine")
    with pytest.raises(RecordingError, match="was removed or replaced"):
        writer.close("complete")
    assert (tmp_path / "r.h5").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.h5"]


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r.h5").write_text("mine")
    with pytest.raises(RecordingError, match=r"r\.h5 exists: another recording writes or wrote it\."):
        open_writer(tmp_path / "r.h5")
    assert (tmp_path / "r.h5").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot be created: No such file or directory"):
        open_writer(tmp_path / "none" / "r.h5")


def bad_steps() -> dict[str, StepRecord]:
    step = make_step(random.Random(0), 0)
    first, second, *rest = step.events
    return {
        "two events are named batch/Model/in.0": replace(step, events=[first, replace(second, site=first.site)]),
        "an event's input does not come before it": replace(step, events=[first, replace(second, inputs=(1,)), *rest]),
        "an event's group is out of range": replace(step, events=[replace(first, group=4), second]),
        "a group does not come after its parent": replace(
            step, groups=[Group("forward", "", "", "", 0)], events=[first]
        ),
        "a digest is not 16 bytes long": replace(step, events=[replace(first, digest=b"short")]),
        "a leaf digest is not 16 bytes long": replace(step, events=[replace(first, leaves=b"short")]),
        "a tensor has some of its leaf digests": replace(step, events=[replace(rest[2], leaves=rest[2].leaves[:16])]),
        "a tensor's size is out of range": replace(step, events=[replace(first, num_bytes=-1)]),
    }


@pytest.mark.parametrize("found", bad_steps())
def test_a_step_that_makes_no_sense_is_refused_and_the_next_one_is_not(tmp_path: Path, found: str) -> None:
    writer = open_writer(tmp_path / "r.h5")
    with pytest.raises(RecordingError, match=found.replace("/in.0", "/:in.0")):
        writer.append(bad_steps()[found])
    step = make_step(random.Random(1), 1)
    writer.append(step)
    writer.close("complete")
    with RankReader(tmp_path / "r.h5") as reader:
        assert [reader.load(row).to_record() for row in range(reader.num_rows)] == [step]


def test_a_forked_child_that_ends_does_not_touch_the_file(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tests.bitcheck.store.records import make_steps, open_writer
writer = open_writer(Path(sys.argv[1]))
steps = make_steps(3, 40)
for number, step in enumerate(steps):
    writer.append(step)
    if number % 10 == 5:
        before = Path(sys.argv[1]).read_bytes()
        child = os.fork()
        if child == 0:
            if number % 20 == 5:
                writer.append(step)
            del writer
            sys.exit(0)  # runs HDF5's exit handlers, as os._exit would not
        assert os.waitpid(child, 0)[1] == 0
        assert Path(sys.argv[1]).read_bytes() == before
writer.close("complete")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "r.h5")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with RankReader(tmp_path / "r.h5") as reader:
        assert [reader.load(row).to_record() for row in range(reader.num_rows)] == make_steps(3, 40)


def test_a_program_that_is_started_does_not_inherit_the_file(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "r.h5")
    script = "import os, sys; print([n for n in range(3, 100) if os.path.exists(f'/proc/self/fd/{n}')"
    script += " and os.fstat(n).st_ino == int(sys.argv[1])])"
    inode = str((tmp_path / "r.h5").stat().st_ino)
    done = subprocess.run([sys.executable, "-c", script, inode], close_fds=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    writer.close("complete")


def test_a_reader_left_open_in_the_writing_process_is_said_to_be_in_the_way(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "r.h5")
    writer.append(make_step(random.Random(0), 0))
    in_the_way = pytest.raises(RecordingError, match="still has it open for reading")
    with h5py.File(tmp_path / "r.h5", "r", swmr=True, locking=False), in_the_way:
        writer.close("complete")


def test_a_reader_of_ours_in_the_writing_process_is_not_in_the_way(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "r.h5")
    step = make_step(random.Random(0), 0)
    writer.append(step)
    with RankReader(tmp_path / "r.h5") as reader:
        writer.append(make_step(random.Random(0), 1))
        writer.close("complete")
        assert reader.load(0).to_record() == step
    with RankReader(tmp_path / "r.h5") as reader:
        assert (reader.status, reader.num_rows) == ("complete", 2)


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "r.h5")
    writer.close("complete")
    before = (tmp_path / "r.h5").read_bytes()
    writer.close("failed")
    assert (tmp_path / "r.h5").read_bytes() == before
