"""A writer that is killed at a random moment loses no step that was on the disk."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from bitcheck.store import RankReader
from tests.bitcheck.store.records import make_steps

NUM_KILLS = 100
MAX_STEPS = 400

NURSERY = """
import os, random, signal, sys, time
from pathlib import Path
from tests.bitcheck.store.records import make_steps, open_writer
folder, num_kills, max_steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
steps = make_steps(0, max_steps)
moments = random.Random(sys.argv[4])
for number in range(num_kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        writer = open_writer(folder / f"{number}.h5")
        for step in steps:
            writer.append(step)
            os.write(writing, b".")
        time.sleep(60)
    os.close(writing)
    os.read(reading, 1)
    time.sleep(moments.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    flushed = 1
    while told := os.read(reading, 4096):
        flushed += len(told)
    os.close(reading)
    print(flushed, flush=True)
"""
"""Starts writers by fork, which saves them loading HDF5, and kills them."""


def test_no_flushed_step_is_lost_by_a_hundred_kills(tmp_path: Path) -> None:
    seed = str(random.randrange(2**32))
    command = [sys.executable, "-c", NURSERY, str(tmp_path), str(NUM_KILLS), str(MAX_STEPS), seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    flushed = [int(line) for line in done.stdout.split()]
    assert len(flushed) == NUM_KILLS
    steps = make_steps(0, MAX_STEPS)
    for number, count in enumerate(flushed):
        with RankReader(tmp_path / f"{number}.h5") as reader:
            assert reader.status == "killed"
            # The step that was being written may be there too.
            assert reader.num_rows in (count, count + 1)
            for row in range(reader.num_rows):
                assert reader.load(row).digests.tobytes() == b"".join(event.digest for event in steps[row].events)
            assert reader.load(reader.num_rows - 1).to_record() == steps[reader.num_rows - 1]
    assert len(set(flushed)) > NUM_KILLS // 4, "the moments were not random"


def test_a_file_can_be_read_at_any_moment_while_another_process_writes_it(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tests.bitcheck.store.records import make_steps, open_writer
writer = open_writer(Path(sys.argv[1]))
for step in make_steps(0, 400):
    writer.append(step)
writer.close("complete")
"""
    path = tmp_path / "r.h5"
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)])
    steps = make_steps(0, 400)
    seen: list[int] = []
    while writer.poll() is None:
        if not path.exists():
            time.sleep(0.001)
            continue
        with RankReader(path) as reader:
            seen.append(reader.num_rows)
            for row in {0, reader.num_rows // 2, reader.num_rows - 1} & set(range(reader.num_rows)):
                assert reader.load(row).digests.tobytes() == b"".join(event.digest for event in steps[row].events)
    assert writer.returncode == 0
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    with RankReader(path) as reader:
        assert (reader.status, reader.num_rows) == ("complete", 401)
