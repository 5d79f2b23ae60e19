"""`bitcheck merge`: ranks that several hosts recorded into folders of their own become one run, or nothing changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bitcheck.answer import Verdict
from bitcheck.diff import diff_runs
from bitcheck.document import encode_document
from bitcheck.errors import BitcheckError, BrokenRun, NotARun, RecordingError, UsageError
from bitcheck.memory import MemoryRun
from bitcheck.merge import merge_runs
from bitcheck.process import this_process
from bitcheck.run import create_run, open_run, rank_path, update_run
from bitcheck.store import RankWriter
from bitcheck.verify import verify_run
from tests.bitcheck.made_up_runs import make_run
from tests.bitcheck.recorded_runs import write_run

COMMAND = ["torchrun", "--nnodes=2", "--node-rank", "0", "train.py", "--lr", "0.1"]
FAULT = (2, 1, "forward/blocks.1:out")


def write_part(folder: Path, run: MemoryRun, ranks: Sequence[int], **info: Any) -> Path:
    """Write some ranks of a run as one host leaves them: a run of its own, with an id of its own."""
    end = info.pop("end", "2026-01-31T12:34:56Z")
    run_id = f"id-of-{folder.name}"
    facts: dict[str, Any] = {
        "run_id": run_id,
        "level": str(run.level),
        "world_size": run.world_size,
        "environment": {"torch": "2.13.0"} if 0 in ranks else {},
        "command": COMMAND,
        "started": "2026-01-31T12:00:00Z",
    }
    create_run(folder, facts | info, overwrite=False)
    for rank in ranks:
        writer = RankWriter(
            rank_path(folder, rank),
            rank=rank,
            world_size=run.world_size,
            level=run.level,
            run_id=run_id,
            leaf_limit_bytes=None,
        )
        for record in run.steps[rank]:
            writer.append(record)
        writer.close("complete")
    update_run(folder, status="complete", exit_status=0, ended=end)
    return folder


def two_parts(folder: Path, **changes: Any) -> list[Path]:
    """Write a run of four ranks as two hosts do; `changes` are in the second one's run.json."""
    run = make_run(num_ranks=4)
    command = [word.replace("0", "1") if word == "0" else word for word in COMMAND]
    return [
        write_part(folder / "host0", run, [0, 1]),
        write_part(folder / "host1", run, [2, 3], **{"command": command, **changes}),
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_refused(folder: Path, error: type[BitcheckError], parts: Sequence[Path], **options: Any) -> str:
    """Merge, expect a refusal in the house's form that leaves everything as it was, and return its text."""
    before = {path: contents(path) for path in parts if path.is_dir()}
    with pytest.raises(error) as caught:
        merge_runs(folder / "all", parts, **options)
    assert {path: contents(path) for path in before} == before
    assert not (folder / "all").exists()
    assert not list(folder.glob(".*"))
    found, *advice = str(caught.value).splitlines()
    assert found.endswith(".")
    assert len(advice) == 1
    return str(caught.value)


def test_a_run_gathered_from_two_hosts_is_sound_and_identical_to_the_same_run_in_one_folder(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    before = [contents(part) for part in parts]
    merged = merge_runs(tmp_path / "all", parts)
    assert (merged.ranks, merged.missing, merged.world_size, merged.status) == ((0, 1, 2, 3), (), 4, "complete")
    assert [contents(part) for part in parts] == before
    checked = verify_run(tmp_path / "all")
    assert checked.is_sound
    assert (checked.num_sealed, checked.world_size) == (4, 4)
    whole = write_run(tmp_path / "whole", num_ranks=4)
    with open_run(tmp_path / "all") as ours, open_run(whole) as theirs:
        assert ours.status == "complete"
        assert ours.environment == {"torch": "2.13.0"}
        answer = diff_runs(ours, theirs)
    assert answer.verdict is Verdict.IDENTICAL
    assert answer.compared.ranks == 4


def test_processes_that_went_unrecorded_are_counted_over_all_hosts(tmp_path: Path) -> None:
    parts = two_parts(tmp_path, unrecorded={"2": 1, "3": 2})
    update_run(parts[0], unrecorded={"0": 1})
    merge_runs(tmp_path / "all", parts)
    with open_run(tmp_path / "all") as run:
        assert run.info["unrecorded"] == {"0": 1, "2": 1, "3": 2}


def test_a_fault_on_a_rank_of_the_second_host_is_found_in_the_gathered_run(tmp_path: Path) -> None:
    run = make_run(num_ranks=4, faults=[FAULT])
    parts = [write_part(tmp_path / "host0", run, [0, 1]), write_part(tmp_path / "host1", run, [2, 3])]
    merge_runs(tmp_path / "all", parts)
    whole = write_run(tmp_path / "whole", num_ranks=4)
    with open_run(whole) as ours, open_run(tmp_path / "all") as theirs:
        first = diff_runs(ours, theirs).first
    assert first is not None
    assert (first.rank, first.step, first.site) == FAULT


def test_the_order_of_the_parts_does_not_matter_and_a_gathered_run_is_a_part_itself(tmp_path: Path) -> None:
    run = make_run(num_ranks=3)
    parts = [write_part(tmp_path / f"host{rank}", run, [rank]) for rank in range(3)]
    at_once = merge_runs(tmp_path / "at-once", parts)
    backwards = merge_runs(tmp_path / "backwards", parts[::-1])
    some = merge_runs(tmp_path / "some", parts[:2], allow_missing=True)
    assert some.missing == (2,)
    rest = merge_runs(tmp_path / "rest", [parts[2], tmp_path / "some"])
    assert at_once.run_id == backwards.run_id == rest.run_id != some.run_id
    assert contents(tmp_path / "at-once") == contents(tmp_path / "backwards") == contents(tmp_path / "rest")
    assert verify_run(tmp_path / "rest").is_sound


def test_a_rank_file_of_another_part_is_noticed_in_a_gathered_run(tmp_path: Path) -> None:
    merge_runs(tmp_path / "all", two_parts(tmp_path))
    other = write_part(tmp_path / "other", make_run(num_ranks=4), [2])
    shutil.copyfile(rank_path(other, 2), rank_path(tmp_path / "all", 2))
    with pytest.raises(BrokenRun, match="is rank 2 of run id-of-other; expected rank 2 of run id-of-host1"):
        verify_run(tmp_path / "all")


def test_the_parts_of_a_gathered_run_are_covered_by_its_checksum_and_make_sense(tmp_path: Path) -> None:
    merge_runs(tmp_path / "all", two_parts(tmp_path))
    path = tmp_path / "all" / "run.json"
    text = path.read_text()
    path.write_text(text.replace('"ranks": "2-3"', '"ranks": "1-3"'))
    with pytest.raises(BrokenRun, match="does not match its own checksum"):
        open_run(tmp_path / "all")
    document = json.loads(text)
    for parts in (
        [],
        [{"ranks": "0-9", "run_id": "x"}],
        [{"ranks": "0-1"}],
        "0-3",
        [{"ranks": "0-2", "run_id": "x"}] * 2,
    ):
        path.write_bytes(encode_document(document | {"parts": parts}))
        with pytest.raises(BrokenRun, match="has unusable parts"):
            open_run(tmp_path / "all")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start_step": 7}, "first step"),
        ({"every": 2}, "choice of steps"),
        ({"leaves": "none"}, "leaf digests"),
        ({"recorder": "run"}, "way of recording"),
        ({"command": ["torchrun", "--node-rank=1", "train.py", "--lr", "0.2"]}, "command"),
        ({"started": "2026-02-01T12:00:00Z", "end": "2026-02-01T13:00:00Z"}, "began at 2026-02-01T12:00:00Z"),
    ],
)
def test_parts_of_two_jobs_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in check_refused(tmp_path, UsageError, two_parts(tmp_path, **changes))


def test_two_jobs_of_one_launcher_are_refused(tmp_path: Path) -> None:
    run = make_run(num_ranks=2)
    parts = [write_part(tmp_path / name, run, [rank], job=name) for rank, name in enumerate(("j1", "j2"))]
    assert "job of the launcher j1 and j2" in check_refused(tmp_path, UsageError, parts)


def test_clocks_that_differ_by_minutes_are_no_reason_to_refuse(tmp_path: Path) -> None:
    times = {"started": "2026-01-31T12:40:00Z", "end": "2026-01-31T13:14:56Z"}
    assert merge_runs(tmp_path / "all", two_parts(tmp_path, **times)).ranks == (0, 1, 2, 3)


def test_other_commands_can_be_allowed(tmp_path: Path) -> None:
    parts = two_parts(tmp_path, command=["worker.sh"])
    assert "--any-command" in check_refused(tmp_path, UsageError, parts)
    assert merge_runs(tmp_path / "all", parts, any_command=True).ranks == (0, 1, 2, 3)


def test_other_world_sizes_and_levels_are_refused(tmp_path: Path) -> None:
    part = write_part(tmp_path / "host0", make_run(num_ranks=4), [0, 1])
    larger = write_part(tmp_path / "larger", make_run(num_ranks=8), [2, 3])
    coarser = write_part(tmp_path / "coarser", make_run(num_ranks=4, level="state"), [2, 3])
    assert "world size 4 and 8" in check_refused(tmp_path, UsageError, [part, larger])
    assert "level module and state" in check_refused(tmp_path, UsageError, [part, coarser])


def test_a_resumed_launch_is_not_merged_with_the_one_before_it(tmp_path: Path) -> None:
    part = write_part(tmp_path / "host0", make_run(num_ranks=4), [0, 1])
    resumed = make_run(num_ranks=4, start_step=2, explicit_start=True)
    later = write_part(tmp_path / "host1", resumed, [2, 3])
    assert "rank 0 begins with step -1, rank 2 with step 1" in check_refused(tmp_path, UsageError, [part, later])


def test_a_rank_that_is_in_two_parts_is_refused(tmp_path: Path) -> None:
    run = make_run(num_ranks=3)
    parts = [write_part(tmp_path / "host0", run, [0, 1]), write_part(tmp_path / "host1", run, [1, 2])]
    said = check_refused(tmp_path, UsageError, parts)
    assert f"rank 1 is in {parts[0]} and in {parts[1]}" in said


def test_missing_ranks_are_named_and_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    run = make_run(num_ranks=8)
    parts = [write_part(tmp_path / "host0", run, [0, 1, 2]), write_part(tmp_path / "host1", run, [6])]
    assert "4 ranks of 8 missing: 3-5,7" in check_refused(tmp_path, UsageError, parts)
    assert merge_runs(tmp_path / "all", parts, allow_missing=True).missing == (3, 4, 5, 7)
    with pytest.raises(BrokenRun, match=r"rank-00003\.h5"):
        verify_run(tmp_path / "all")


def test_a_part_that_is_written_named_twice_or_inside_another_is_refused(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    (tmp_path / "link").symlink_to(parts[0])
    assert "named twice" in check_refused(tmp_path, UsageError, [*parts, tmp_path / "link"])
    for target in (parts[0], parts[0] / "all", tmp_path):
        with pytest.raises(UsageError, match="apart from all parts"):
            merge_runs(target, parts, overwrite=True)
    assert len(contents(parts[0])) == 5


def test_a_part_that_is_still_being_recorded_is_refused_and_one_that_died_is_gathered(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    update_run(parts[1], status="recording", ended=None, writer=this_process())
    assert f"is being recorded by process {os.getpid()}" in check_refused(tmp_path, UsageError, parts)
    update_run(parts[1], writer={"host": "another", "pid": 1, "pid_started": 1})
    merged = merge_runs(tmp_path / "all", parts)
    assert merged.status == "killed"
    assert f"{parts[1]} had not finished (recording)" in merged.notes[0]


@pytest.mark.parametrize("first_stopped", [True, False])
def test_parts_that_were_stopped_on_purpose_are_a_run_that_was(tmp_path: Path, first_stopped: bool) -> None:
    parts = two_parts(tmp_path, status="killed", stopped=True)
    update_run(parts[0], status="killed", **({"stopped": True} if first_stopped else {}))
    merged = merge_runs(tmp_path / "all", parts)
    assert bool(merged.notes) is not first_stopped
    with open_run(tmp_path / "all") as run:
        assert run.status == ("stopped" if first_stopped else "killed")


def test_a_damaged_rank_file_is_not_gathered(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    path = rank_path(parts[1], 3)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert "does not match its seal" in check_refused(tmp_path, BrokenRun, parts)


def test_a_cut_rank_file_a_foreign_folder_and_an_empty_part_are_refused(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    (tmp_path / "foreign").mkdir()
    check_refused(tmp_path, NotARun, [parts[0], tmp_path / "foreign"])
    check_refused(tmp_path, NotARun, [parts[0], tmp_path / "nowhere"])
    create_run(tmp_path / "empty", {"level": "module", "world_size": 4, "status": "complete"}, overwrite=False)
    assert "holds no rank's file" in check_refused(tmp_path, UsageError, [parts[0], tmp_path / "empty"])
    os.truncate(rank_path(parts[1], 3), 3000)
    check_refused(tmp_path, BrokenRun, parts)
    rank_path(parts[1], 3).write_bytes(b"no HDF5")
    check_refused(tmp_path, NotARun, parts)


def test_an_older_run_is_replaced_only_when_asked_and_only_by_a_whole_one(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    old = write_run(tmp_path / "all", num_ranks=1)
    before = contents(old)
    with pytest.raises(RecordingError, match="--overwrite"):
        merge_runs(old, parts)
    damaged = rank_path(parts[1], 2)
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BitcheckError):
        merge_runs(old, parts, overwrite=True)
    assert contents(old) == before
    damaged.write_bytes(data)
    assert merge_runs(old, parts, overwrite=True).ranks == (0, 1, 2, 3)
    assert verify_run(old).is_sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "host0", "host1"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(RecordingError, match=r"thesis\.tex"):
        merge_runs(tmp_path / "mine", parts, overwrite=True)


def run_merge(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitcheck", "merge", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_says_what_it_gathered_and_ends_with_0(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    done = run_merge("-o", tmp_path / "all", *parts)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"MERGED 4 ranks from 2 parts into {tmp_path / 'all'} (")
    assert f"{parts[1]}: ranks 2-3" in done.stdout
    again = run_merge("-o", tmp_path / "again", *parts, "--json")
    answer = json.loads(again.stdout)
    assert (answer["schema"], answer["ranks"], answer["missing"]) == ("bitcheck.merge/1", [0, 1, 2, 3], [])


def test_the_command_ends_with_2_and_a_sentence_where_nothing_was_merged(tmp_path: Path) -> None:
    parts = two_parts(tmp_path)
    for args in (["-o", tmp_path / "all", parts[0]], ["-o", tmp_path / "all", parts[0], tmp_path / "no"], [*parts]):
        done = run_merge(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "all").exists()
