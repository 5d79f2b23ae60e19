"""`bitcheck diff` on runs in folders: what it prints, its JSON, its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitcheck.events import Event, Phase, Site
from bitcheck.run import update_run
from bitcheck.run_document import note_unrecorded
from tests.bitcheck.made_up_runs import digest_of, make_run
from tests.bitcheck.recorded_runs import write_run

FAULT = (0, 2, "forward/blocks.1:out")


def run_diff(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitcheck", "diff", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answer_of(*args: str | Path) -> dict[str, Any]:
    done = run_diff(*args, "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == {"identical": 0, "diverged": 1, "incomparable": 2}[answer["verdict"]]
    assert done.stderr == ""
    return answer


def test_identical_runs_end_with_0(tmp_path: Path) -> None:
    answer = answer_of(write_run(tmp_path / "a", num_ranks=2), write_run(tmp_path / "b", num_ranks=2))
    assert answer["verdict"] == "identical"
    assert (answer["first"], answer["cause"], answer["origins"], answer["remedy"]) == (None, None, [], "")
    assert (answer["compared"]["steps"], answer["compared"]["ranks"]) == (4, 2)


def test_the_answer_has_the_keys_of_the_schema_in_its_order(tmp_path: Path) -> None:
    answer = answer_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", faults=[FAULT]))
    keys = [
        "schema", "verdict", "runs", "aligned", "compared", "environment", "first", "cause", "origins", "propagated",
        "explanation", "remedy",
    ]  # fmt: skip
    assert list(answer)[: len(keys)] == keys
    assert answer["schema"] == "bitcheck.diff/1"
    assert list(answer["runs"][0]) == ["path", "run_id", "first_step", "last_step", "world_size", "level", "status"]
    assert answer["runs"][1] == {
        "path": str(tmp_path / "b"),
        "run_id": "id-of-b",
        "first_step": 0,
        "last_step": 3,
        "world_size": 1,
        "level": "module",
        "status": "complete",
    }
    assert answer["first"] == answer["origins"][0]
    assert answer["first"] | {"dtype": "", "cause": ""} == {
        "step": 2,
        "rank": 0,
        "phase": "forward",
        "site": "forward/blocks.1:out",
        "module": "blocks.1",
        "op": "Linear",
        "tensor": "blocks.1:out",
        "dtype": "",
        "shape": [2, 8],
        "elements": [0, 15],
        "cause": "",
    }


def test_the_first_rank_that_parted_is_found_among_many_files(tmp_path: Path) -> None:
    fault = (2, 1, "backward/blocks.1.weight:grad")
    answer = answer_of(write_run(tmp_path / "a", num_ranks=4), write_run(tmp_path / "b", num_ranks=4, faults=[fault]))
    assert (answer["cause"], answer["first"]["rank"], answer["first"]["step"]) == ("backward", 2, 1)


def test_until_stops_the_comparison(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", faults=[FAULT])
    assert answer_of(*runs, "--until", "1")["verdict"] == "identical"
    assert answer_of(*runs, "--until", "2")["verdict"] == "diverged"


def test_a_resumed_run_is_aligned_by_its_state(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", num_steps=6), write_run(tmp_path / "b", start_step=3, num_steps=3)
    answer = answer_of(*runs)
    assert (answer["verdict"], answer["aligned"]) == ("identical", {"first_step": 3, "last_step": 5, "by": "state"})


def test_a_run_and_itself_are_identical(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert answer_of(run, run)["verdict"] == "identical"


def test_runs_without_a_step_in_common_end_with_2(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a", num_steps=2), write_run(tmp_path / "b", start_step=4, explicit_start=True)
    assert answer_of(*runs)["verdict"] == "incomparable"


def test_the_text_says_the_verdict_first_and_ends_with_1(tmp_path: Path) -> None:
    done = run_diff(write_run(tmp_path / "a"), write_run(tmp_path / "b", faults=[FAULT]))
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "DIVERGED in step 2: forward/blocks.1:out (cause: forward)"
    assert done.stderr == ""


def test_processes_that_went_unrecorded_stand_beside_the_verdict(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    update_run(runs[1], unrecorded={"0": 2}, notes=[note_unrecorded(0, 2), "the disk was full"])
    answer = answer_of(*runs)
    assert "unrecorded_processes" not in answer["runs"][0]
    assert answer["runs"][1]["unrecorded_processes"] == {"0": 2}
    assert answer["notes"] == ["candidate: the disk was full"]
    assert "In the candidate 2 more processes of rank 0 trained and went unrecorded" in answer["explanation"]
    text = run_diff(*runs).stdout.splitlines()
    assert text[0].startswith("IDENTICAL over 4 steps") and text[0].endswith(", of the recorded processes alone.")
    assert text[-2].endswith("complete; unrecorded: 2 more processes of rank 0 that trained")
    assert text[-1] == "notes      candidate: the disk was full"


def test_a_run_of_before_processes_were_counted_says_in_its_notes_what_went_unrecorded(tmp_path: Path) -> None:
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for run in runs:
        update_run(run, notes=[note_unrecorded(0, 1)])
    answer = answer_of(*runs)
    assert answer["notes"] == [f"baseline and candidate: {note_unrecorded(0, 1)}"]


def test_a_name_of_120_characters_with_brackets_survives_a_pipe_and_json(tmp_path: Path) -> None:
    path = "layers[0]." + ".".join(f"block_{number}[0]" for number in range(10)) + ".[bold]a_long_name[/bold]"
    assert len(path) >= 120
    runs = [make_run(), make_run()]
    for run, word in zip(runs, ("same", "other"), strict=True):
        site = Site(Phase.BUFFER, "Model", path, "value")
        run.steps[0][2].events.append(Event(site, "float32", (4,), 16, digest_of(word)))
    folders = [write_run(tmp_path / name, run) for name, run in zip("ab", runs, strict=True)]
    assert answer_of(*folders)["first"]["site"] == f"buffer/{path}:value"
    lines = run_diff(*folders).stdout.splitlines()
    assert f"buffer/{path}:value" in lines[0]
    assert any(f"  buffer/{path}:value  float32 [4]" in line for line in lines[1:])


@pytest.mark.parametrize("broken", ["missing", "empty", "text", "cut"])
def test_what_cannot_be_read_is_one_sentence_and_ends_with_2(tmp_path: Path, broken: str) -> None:
    good, bad = write_run(tmp_path / "a"), tmp_path / "b"
    if broken == "empty":
        bad.mkdir()
    elif broken == "text":
        bad.write_text("no run")
    elif broken == "cut":
        write_run(bad)
        file = bad / "rank-00000.h5"
        file.write_bytes(file.read_bytes()[:2000])
    for runs in ((good, bad), (bad, good)):
        done = run_diff(*runs, "--json")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("bitcheck: ")
        assert str(bad) in done.stderr
        assert "Traceback" not in done.stderr
