"""A run's folder: made, changed, opened; refused where it is not what it should be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcheck.document import encode_document
from bitcheck.errors import BitcheckError, BrokenRun, DamagedStep, FutureRun, NotARun, RecordingError
from bitcheck.events import Level
from bitcheck.process import is_gone, this_process
from bitcheck.run import create_run, open_run, rank_path, update_run
from tests.bitcheck.store.records import flip_bit, make_steps, open_writer, write_rank, write_run

INFO = {"level": "module", "world_size": 2}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_sentence(error: BitcheckError, folder: Path) -> None:
    """Hold an error to the house's form: the path and what was found; then what to do."""
    found, *advice = str(error).splitlines()
    assert found.startswith(str(folder))
    assert found.endswith(".")
    assert len(advice) == 1


def rewrite(folder: Path, **changes: Any) -> None:
    """Change run.json and its checksum, as somebody who knows the format would; None removes a key."""
    document = json.loads((folder / "run.json").read_text()) | changes
    kept = {key: value for key, value in document.items() if value != "removed"}
    (folder / "run.json").write_bytes(encode_document(kept))


def test_a_finished_run_says_what_was_recorded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 3, world_size=2)
    with open_run(folder) as run:
        assert (run.level, run.world_size, run.ranks, run.status) == (Level.MODULE, 2, [0, 1], "complete")
        assert run.environment == {"torch": "2.13.0"}
        assert run.info["exit_status"] == 0
        assert run.info["recorder"] == "record"
        assert [run.rank(rank).num_rows for rank in run.ranks] == [4, 4]
        assert run.rank(1) is run.rank(1)
        assert run.rank(1).load(2).to_record() == make_steps(1, 3)[2]
        assert run.read_tails()["num_rows"].tolist() == [4, 4]
        assert run.read_tails([1])["rank"].tolist() == [1]
    assert names_in(folder) == ["rank-00000.h5", "rank-00000.seal", "rank-00001.h5", "rank-00001.seal", "run.json"]


def test_several_processes_read_what_one_does(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 2, world_size=5)
    with open_run(folder) as run:
        assert (run.read_tails(num_processes=3) == run.read_tails()).all()
        assert (run.read_tails([4, 1], num_processes=2)["rank"] == [4, 1]).all()
    with h5py.File(rank_path(folder, 4), "r+") as file:
        row = file["steps"][-1]
        row["chain"][0] ^= 1
        file["steps"][-1] = row
    with open_run(folder) as run, pytest.raises(DamagedStep, match="row 2 was changed") as caught:
        run.read_tails(num_processes=2)
    assert (caught.value.rank, caught.value.step, caught.value.found) == (4, 1, "row 2 was changed")


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RecordingError, match=r"holds a run already; .*\n.*--overwrite") as caught:
        create_run(folder, INFO, overwrite=False)
    check_sentence(caught.value, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_overwriting_replaces_a_run_and_all_of_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", world_size=3)
    with open_run(folder) as run:
        old = run.run_id
    (folder / ".rank-00001.h5.77.tmp").write_bytes(b"left by a killed writer")
    create_run(folder, INFO, overwrite=True)
    assert names_in(folder) == ["run.json"]
    with open_run(folder, allow_missing_ranks=True) as run:
        assert run.run_id != old
        assert (run.world_size, run.ranks, run.missing_ranks) == (2, [], [0, 1])


@pytest.mark.parametrize("damage", ["cut", "future", "text"])
def test_overwriting_replaces_a_damaged_run_too(tmp_path: Path, damage: str) -> None:
    folder = write_run(tmp_path / "a")
    if damage == "cut":
        (folder / "run.json").write_bytes((folder / "run.json").read_bytes()[:50])
    elif damage == "future":
        rewrite(folder, schema="bitcheck.run/2")
    else:
        (folder / "rank-00000.h5").write_text("text")
    create_run(folder, INFO, overwrite=True)
    assert names_in(folder) == ["run.json"]


@pytest.mark.parametrize("name", ["model.pt", "rank-0.h5", "rank-00000.h5.bak", "run.json~", ".hidden"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_foreign_files_is_never_touched(tmp_path: Path, name: str, overwrite: bool) -> None:
    folder = write_run(tmp_path / "a")
    (folder / name).write_text("mine")
    before = names_in(folder)
    with pytest.raises(RecordingError, match=f"holds {name}, which is not a run's") as caught:
        create_run(folder, INFO, overwrite=overwrite)
    check_sentence(caught.value, folder)
    assert names_in(folder) == before


def test_a_rank_file_without_a_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.h5").write_text("of some other program")
    with pytest.raises(RecordingError, match=r"holds rank-00000\.h5 but no run\.json of bitcheck") as caught:
        create_run(tmp_path, INFO, overwrite=True)
    check_sentence(caught.value, tmp_path)
    assert names_in(tmp_path) == ["rank-00000.h5"]


def test_a_run_that_another_process_is_recording_is_not_overwritten(tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from bitcheck.run import create_run\n"
    script += "create_run(Path(sys.argv[1]), {'level': 'state', 'world_size': 1}, False); print('made', flush=True)\n"
    script += "time.sleep(60)"
    folder = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "made\n"
        with pytest.raises(RecordingError, match=f"is being recorded by process {other.pid}") as caught:
            create_run(folder, INFO, overwrite=True)
        check_sentence(caught.value, folder)
        with open_run(folder, allow_missing_ranks=True) as run:
            assert run.status == "recording"
        other.kill()
    with open_run(folder, allow_missing_ranks=True) as run:
        assert run.status == "killed"
    create_run(folder, INFO, overwrite=True)


def test_of_two_recordings_that_start_at_once_one_wins(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from bitcheck.run import create_run\n"
    script += "from bitcheck.errors import RecordingError\nsys.stdin.read()\n"
    script += "try: create_run(Path(sys.argv[1]), {'level': 'state', 'world_size': 1}, False)\n"
    script += "except RecordingError as error: sys.exit(3)"
    for trial in range(3):
        command = [sys.executable, "-c", script, str(tmp_path / str(trial))]
        racers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.close()
        assert sorted(racer.wait() for racer in racers) == [0, 3, 3, 3]
        assert names_in(tmp_path / str(trial)) == ["run.json"]


def test_a_recording_that_started_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(tmp_path, INFO, overwrite=False)
    before = (tmp_path / "run.json").read_bytes()
    monkeypatch.setattr("bitcheck.run._clear", lambda folder, overwrite: None)  # it looked before the other wrote
    with pytest.raises(RecordingError, match="holds a run already"):
        create_run(tmp_path, INFO, overwrite=False)
    assert (tmp_path / "run.json").read_bytes() == before
    assert names_in(tmp_path) == ["run.json"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(RecordingError, match="is a file; expected a folder"):
        create_run(tmp_path / "a", INFO, overwrite=True)
    assert (tmp_path / "a").read_text() == "mine"


def test_information_that_makes_no_run_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for info in ({"level": "module"}, {"level": "kernel", "world_size": 1}, {"level": "state", "world_size": 0}):
        with pytest.raises(RecordingError, match=r"run\.json cannot be written"):
            create_run(tmp_path / "a", info, overwrite=False)
    assert names_in(tmp_path) == []


def test_an_update_keeps_all_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with open_run(folder) as run:
        before = run.info
    update_run(folder, environment={"host": "é"}, notes=["something"])
    with open_run(folder) as run:
        assert run.info == before | {"environment": {"host": "é"}, "notes": ["something"]}
    with pytest.raises(RecordingError, match="has an unknown status: 'fine'"):
        update_run(folder, status="fine")
    shutil.rmtree(folder)
    with pytest.raises(RecordingError, match="cannot be written: No such file or directory"):
        update_run(folder, status="complete")


def test_updates_from_several_processes_are_all_kept_and_each_reader_sees_a_whole_file(tmp_path: Path) -> None:
    create_run(tmp_path / "a", INFO, overwrite=False)
    script = "import sys; from pathlib import Path; from bitcheck.run import update_run\n"
    script += "for number in range(40): update_run(Path(sys.argv[1]), **{f'{sys.argv[2]}{number}': number})"
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "a"), name]) for name in "xyz"]
    while any(writer.poll() is None for writer in writers):
        open_run(tmp_path / "a", allow_missing_ranks=True)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    info = open_run(tmp_path / "a", allow_missing_ranks=True).info
    assert all(info[f"{name}{number}"] == number for name in "xyz" for number in range(40))
    assert names_in(tmp_path / "a") == ["run.json"]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda a: shutil.rmtree(a), NotARun, "does not exist; expected the folder of a recorded run"),
        (lambda a: (a / "run.json").unlink(), NotARun, "holds no run.json"),
        (lambda a: (a / "run.json").write_text(""), BrokenRun, "run.json is empty"),
        (lambda a: (a / "run.json").write_text("a run"), BrokenRun, "run.json is not JSON"),
        (lambda a: (a / "run.json").write_bytes(b"\xff\xfe"), BrokenRun, "run.json is not JSON"),
        (lambda a: (a / "run.json").write_text("[" * 100_000), BrokenRun, "run.json is not JSON"),
        (lambda a: (a / "run.json").write_text("[]"), BrokenRun, "run.json has no schema"),
        (lambda a: (a / "run.json").write_text('{"schema": 1}'), BrokenRun, "run.json has no schema"),
        (lambda a: (a / "run.json").write_text('{"schema": "x"}'), NotARun, "has schema 'x'; expected bitcheck.run/1"),
        (lambda a: (a / "run.json").write_text('{"schema": "bitcheck.run/3"}'), FutureRun, "this bitcheck reads"),
        (lambda a: rewrite(a, schema="bitcheck.run/2"), FutureRun, "has schema 'bitcheck.run/2'; this bitcheck reads"),
        (lambda a: rewrite(a, digest_version=2), FutureRun, "says digest version 2; this bitcheck reads 1"),
        (lambda a: rewrite(a, world_size=2**60), BrokenRun, "has an impossible world_size"),
        (lambda a: rewrite(a, world_size=-1), BrokenRun, "has an impossible world_size"),
        (lambda a: rewrite(a, world_size=True), BrokenRun, "has an unusable world_size"),
        (lambda a: rewrite(a, world_size="2"), BrokenRun, "has an unusable world_size"),
        (lambda a: rewrite(a, level="kernel"), BrokenRun, "has an unknown level: 'kernel'"),
        (lambda a: rewrite(a, status="fine"), BrokenRun, "has an unknown status: 'fine'"),
        (lambda a: rewrite(a, environment={"torch": 2}), BrokenRun, "has an environment that is not text"),
        (lambda a: rewrite(a, command=[1]), BrokenRun, "has a command or notes that are not text"),
        (lambda a: rewrite(a, notes=[["x"]]), BrokenRun, "has a command or notes that are not text"),
        (lambda a: rewrite(a, unrecorded={"0": "1"}), BrokenRun, "has unusable counts of unrecorded processes"),
        (lambda a: rewrite(a, unrecorded={"x": 1}), BrokenRun, "has unusable counts of unrecorded processes"),
        (lambda a: rewrite(a, stopped="yes"), BrokenRun, "has an unusable stopped: 'yes'"),
        (lambda a: rewrite(a, run_id="removed"), BrokenRun, "has no run_id"),
        (lambda a: rewrite(a, world_size=5), BrokenRun, r"rank-00002\.h5, .*4\.h5 missing; the run has 5 ranks"),
        (lambda a: rewrite(a, world_size=900), BrokenRun, r"rank-00004\.h5 and 895 more missing"),
        (lambda a: (a / "rank-00001.h5").unlink(), BrokenRun, r"rank-00001\.h5 missing; the run has 2 ranks"),
    ],
)
def test_what_is_no_run_gives_one_sentence(
    tmp_path: Path, change: Callable[[Path], object], kind: type[BitcheckError], message: str
) -> None:
    folder = write_run(tmp_path / "a", world_size=2)
    change(folder)
    with pytest.raises(kind, match=message) as caught:
        open_run(folder)
    check_sentence(caught.value, folder)


def test_a_file_instead_of_a_folder_gives_one_sentence(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with pytest.raises(NotARun, match="is a file; expected the folder of a recorded run") as caught:
        open_run(folder / "rank-00000.h5")
    check_sentence(caught.value, folder)


@given(bit=st.integers(0, 10**9))
def test_any_changed_bit_of_run_json_is_seen(tmp_path_factory: pytest.TempPathFactory, bit: int) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    create_run(folder, INFO | {"environment": {"name": "é" * 3}, "cwd": "/home/a b"}, overwrite=False)
    flip_bit(folder / "run.json", bit % (8 * (folder / "run.json").stat().st_size))
    with pytest.raises((BrokenRun, NotARun, FutureRun)):
        open_run(folder, allow_missing_ranks=True)


def test_the_case_of_an_escape_in_run_json_is_seen_too(tmp_path: Path) -> None:
    create_run(tmp_path, INFO | {"cwd": "/é"}, overwrite=False)
    text = (tmp_path / "run.json").read_text()
    assert "\\u00e9" in text
    (tmp_path / "run.json").write_text(text.replace("\\u00e9", "\\u00E9"))
    with pytest.raises(BrokenRun, match="does not match its own checksum"):
        open_run(tmp_path, allow_missing_ranks=True)


@pytest.mark.parametrize("mistake", ["another run", "another rank"])
def test_a_rank_file_from_elsewhere_is_not_taken_for_the_runs_own(tmp_path: Path, mistake: str) -> None:
    folder = write_run(tmp_path / "a", world_size=2)
    other = write_run(tmp_path / "b", world_size=2)
    source = other / "rank-00001.h5" if mistake == "another run" else folder / "rank-00000.h5"
    shutil.copy(source, folder / "rank-00001.h5")
    with open_run(folder) as run, pytest.raises(BrokenRun, match=r"rank-00001\.h5 is rank . of run") as caught:
        run.rank(1)
    check_sentence(caught.value, folder)


def finish(folder: Path, run_status: str, rank_statuses: list[str | None]) -> None:
    """Write a run whose run.json and ranks have these statuses; None is a rank without a file."""
    size = len(rank_statuses)
    create_run(folder, {"level": "module", "world_size": size, "status": run_status}, overwrite=False)
    run_id = open_run(folder, allow_missing_ranks=True).run_id
    for rank, status in enumerate(rank_statuses):
        path = rank_path(folder, rank)
        if status == "killed":
            script = "import os, sys; from pathlib import Path\n"
            script += "from tests.bitcheck.store.records import make_steps, write_rank\n"
            script += "path, rank, size, run_id = sys.argv[1:]\n"
            script += "write_rank(Path(path), make_steps(0, 1), None, rank=int(rank), world_size=int(size), "
            script += "run_id=run_id); os._exit(0)"
            subprocess.run([sys.executable, "-c", script, str(path), str(rank), str(size), run_id], check=True)
        elif status == "recording":
            WRITERS.append(open_writer(path, rank=rank, world_size=size, run_id=run_id))
        elif status is not None:
            write_rank(path, make_steps(0, 1), status, rank=rank, world_size=size, run_id=run_id)


WRITERS: list[object] = []
"""Keeps files open that are being recorded."""


@pytest.mark.parametrize(
    ("run_status", "rank_statuses", "status"),
    [
        ("complete", ["complete", "complete"], "complete"),
        ("complete", ["complete", "failed"], "failed"),
        ("complete", ["complete", "killed"], "killed"),
        ("complete", ["complete", "recording"], "recording"),
        ("complete", ["complete", None], "killed"),
        ("failed", ["complete", "complete"], "failed"),
        ("failed", ["killed", "complete"], "failed"),
        ("killed", ["complete", "killed"], "killed"),
        ("recording", ["complete", "complete"], "recording"),
        ("recording", ["recording", None], "recording"),
        ("recording", ["recording", "killed"], "killed"),
        ("recording", ["recording", "failed"], "failed"),
    ],
)
def test_the_status_of_a_run_is_that_of_its_parts(
    tmp_path: Path, run_status: str, rank_statuses: list[str | None], status: str
) -> None:
    finish(tmp_path / "a", run_status, rank_statuses)
    with open_run(tmp_path / "a", allow_missing_ranks=True) as run:
        assert run.status == status
    WRITERS.clear()


@pytest.mark.parametrize(
    ("rank_statuses", "notes", "status"),
    [
        (["complete", "killed"], [], "stopped"),
        (["failed", "killed"], [], "stopped"),
        (["failed", "killed"], ["the disk was full"], "failed"),
        (["killed", None], [], "killed"),
    ],
)
def test_a_run_that_bitcheck_stopped_is_not_called_killed(
    tmp_path: Path, rank_statuses: list[str | None], notes: list[str], status: str
) -> None:
    finish(tmp_path / "a", "killed", rank_statuses)
    update_run(tmp_path / "a", stopped=True, notes=notes)
    with open_run(tmp_path / "a", allow_missing_ranks=True) as run:
        assert run.status == status


def test_a_process_is_gone_when_its_number_belongs_to_another(tmp_path: Path) -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone(me | {"pid_started": me["pid_started"] + 1})
    assert not is_gone(me | {"host": "elsewhere", "pid_started": 1})
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(me | {"pid": child.pid}), "a zombie writes nothing"
    child.wait()
    assert is_gone({"host": me["host"], "pid": child.pid, "pid_started": 0})
