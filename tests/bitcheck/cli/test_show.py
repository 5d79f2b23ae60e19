"""`bitcheck show`: what is in a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bitcheck.events import Event, Phase, Site
from bitcheck.run import update_run
from tests.bitcheck.made_up_runs import digest_of, make_run
from tests.bitcheck.recorded_runs import write_run


def run_show(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitcheck", "show", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shown(*args: str | Path) -> dict[str, Any]:
    done = run_show(*args, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_run_is_summarized(tmp_path: Path) -> None:
    run = make_run(num_ranks=2, environment={"torch.version": "2.13.0"})
    for records in run.steps.values():
        records[2].unobserved["modules that were not called"] = 3
        records[2].remarks = ("a remark",)
    answer = shown(write_run(tmp_path / "a", run))
    assert answer["schema"] == "bitcheck.show/1"
    assert (answer["status"], answer["world_size"], answer["level"]) == ("complete", 2, "module")
    assert answer["steps"] == {"count": 4, "first": 0, "last": 3, "initial_snapshot": True, "fragment": True}
    assert {row["phase"]: row["events"] for row in answer["phases"]} == {
        "batch": 1, "rng": 2, "forward": 7, "loss": 1, "backward": 6, "grad": 3, "param": 3, "buffer": 1, "optim": 3,
        "scalar": 1,
    }  # fmt: skip
    assert answer["modules"] == 4
    assert answer["unobserved"] == {"modules that were not called": 3}
    assert answer["remarks"] == ["a remark"]
    assert answer["environment"] == {"torch.version": "2.13.0"}
    assert answer["rank_statuses"] == {"complete": 2}


def test_what_went_unrecorded_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    assert shown(folder)["notes"] == []
    update_run(folder, notes=["one more process"])
    assert shown(folder)["notes"] == ["one more process"]
    assert any(line.split() == ["unrecorded", "one", "more", "process"] for line in run_show(folder).stdout.split("\n"))


def test_a_run_that_bitcheck_stopped_is_said_to_be_stopped_on_purpose(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", num_ranks=2)
    update_run(folder, status="killed", exit_status=143, stopped=True)
    assert (shown(folder)["status"], shown(folder)["rank_statuses"]) == ("stopped", {"complete": 2})
    text = run_show(folder).stdout
    assert text.splitlines()[0].endswith(": 4 steps, 2 ranks, level module, stopped on purpose")
    assert "killed" not in text


def test_the_largest_tensors_come_first(tmp_path: Path) -> None:
    run = make_run()
    site = Site(Phase.BUFFER, "Model", "table", "value")
    run.steps[0][-2].events.append(Event(site, "float32", (1000,), 4000, digest_of("table")))
    assert shown(write_run(tmp_path / "a", run))["largest"][0] == {
        "site": "buffer/table:value",
        "dtype": "float32",
        "shape": [1000],
        "bytes": 4000,
        "digest": digest_of("table").hex(),
    }


def test_a_step_lists_its_digests(tmp_path: Path) -> None:
    run = make_run()
    expected = [event for event in run.steps[0][3].events if event.site.phase is Phase.PARAM]
    answer = shown(write_run(tmp_path / "a", run), "--step", "2", "--phase", "param")
    assert (answer["step"], answer["kind"]) == (2, "step")
    assert [event["digest"] for event in answer["events"]] == [event.digest.hex() for event in expected]
    text = run_show(tmp_path / "a", "--step", "2", "--phase", "param").stdout
    for event in expected:
        assert f"{event.digest.hex()}  param/{event.site.path}:value  float32 [2, 8]  64 B" in text


def test_the_initial_snapshot_has_the_number_before_the_first_step(tmp_path: Path) -> None:
    assert shown(write_run(tmp_path / "a"), "--step", "-1")["kind"] == "initial snapshot"


def test_text_in_a_pipe_is_plain_and_names_the_run_first(tmp_path: Path) -> None:
    done = run_show(write_run(tmp_path / "a"))
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'a'}: 4 steps, 1 rank, level module, complete"
    assert "command      python train.py" in lines
    assert "unobserved   nothing that bitcheck knows of" in lines
    assert "\x1b" not in done.stdout


def test_ranks_whose_files_are_not_there_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", make_run(num_ranks=4))
    for rank in (1, 3):
        (folder / f"rank-0000{rank}.h5").unlink()
    assert shown(folder)["missing_ranks"] == [1, 3]
    assert "no file of ranks 1 and 3; `bitcheck merge` gathers" in run_show(folder).stdout


def test_a_step_or_a_rank_that_is_not_there_is_trouble(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    for arguments, words in (
        (["--step", "9"], "has no step 9"),
        (["--rank", "3"], "has no rank 3"),
        (["--phase", "param"], "--phase goes with --step"),
    ):
        done = run_show(run, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr


def test_a_folder_without_a_run_is_trouble(tmp_path: Path) -> None:
    done = run_show(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path) in done.stderr
