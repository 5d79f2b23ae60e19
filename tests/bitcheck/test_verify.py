"""`verify` finds any change to a run, and none in one that was not changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bitcheck.document import decode_document, encode_document
from bitcheck.errors import BitcheckError, BrokenRun, NotARun
from bitcheck.run import open_run, rank_path, update_run
from bitcheck.store.format import row_check
from bitcheck.verify import verify_run
from tests.bitcheck.store.records import flip_bit, make_steps, open_writer, with_digest, write_rank, write_run

NUM_STEPS = 5


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("sound") / "run", NUM_STEPS, world_size=2)


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy of a sound run, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a rank's file with h5py, and make its seal anew: what is left are roots and chain."""
    with h5py.File(path, "r+") as file:
        change(file)
    path.with_suffix(".seal").unlink()


def edit_rows(path: Path, change: Callable[[np.ndarray], None]) -> None:
    """Change rows of the step table, and their checks with them."""

    def edit_table(file: h5py.File) -> None:
        table = file["steps"][:]
        change(table)
        for row in table:
            row["check"] = row_check(row.tobytes())
        file["steps"].resize(len(table), axis=0)
        file["steps"][:] = table

    edit(path, edit_table)


def found(run: Path) -> list[tuple[int, int | None, str]]:
    return [(item.rank, item.step, item.found) for item in verify_run(run).damage]


def test_a_run_that_was_not_changed_is_sound(sound: Path) -> None:
    done: list[tuple[int, int]] = []
    answer = verify_run(sound, lambda *told: done.append(told))
    assert answer.is_sound
    assert (answer.num_rows, answer.num_sealed, answer.world_size, answer.status) == (12, 2, 2, "complete")
    assert answer.num_events == 2 * sum(len(step.events) for step in make_steps(0, NUM_STEPS))
    assert done == [(1, 2), (2, 2)]


def test_a_changed_digest_names_the_rank_and_the_step(run: Path) -> None:
    def change(file: h5py.File) -> None:
        first = file["steps"][3]["first_event"]
        file["digests"][first + 2, 5] ^= 1

    edit(rank_path(run, 1), change)
    assert found(run) == [
        (1, 2, "its digests do not give its root"),
        (1, None, "it is finished and has no seal; the seal was removed"),
    ]


def test_a_changed_leaf_digest_names_the_rank_and_the_step(run: Path) -> None:
    def change(file: h5py.File) -> None:
        file["leaves"][file["steps"][4]["first_leaf"], 0] ^= 128

    edit(rank_path(run, 0), change)
    assert found(run)[0] == (0, 3, "its leaf digests, values or notes were changed")


def test_a_step_that_was_taken_out_breaks_the_chain(run: Path) -> None:
    def change(table: np.ndarray) -> None:
        table[2:-1] = table[3:].copy()

    path = rank_path(run, 0)
    edit_rows(path, change)
    with h5py.File(path, "r+") as file:
        file["steps"].resize(NUM_STEPS, axis=0)
    assert found(run)[0] == (0, 2, "its chain does not follow from the step before it")


def test_steps_that_changed_places_break_the_chain(run: Path) -> None:
    def change(table: np.ndarray) -> None:
        table[[2, 3]] = table[[3, 2]]

    edit_rows(rank_path(run, 0), change)
    assert found(run)[0][:2] == (0, 2)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("step", "its chain does not follow from the step before it"),
        ("kind", "its chain does not follow from the step before it"),
        ("root", "its digests do not give its root"),
        ("state_root", "its digests do not give its root"),
        ("phase_roots", "its digests do not give its root"),
        ("contents", "its leaf digests, values or notes were changed"),
        ("chain", "its chain does not follow from the step before it"),
        ("num_bytes", "its counts do not follow from the step before"),
        ("total_bytes", "its counts do not follow from the step before"),
        ("total_unobserved", "its counts do not follow from the step before"),
        ("total_remarks", "its counts do not follow from the step before"),
    ],
)
def test_every_field_of_a_row_is_checked(run: Path, field: str, message: str) -> None:
    def change(table: np.ndarray) -> None:
        table[field].reshape(len(table), -1)[4, -1] += 1

    edit_rows(rank_path(run, 1), change)
    rank, step, sentence = found(run)[0]
    assert (rank, sentence) == (1, message)
    assert step == (4 if field == "step" else 3)


def test_a_row_whose_check_does_not_hold_is_found(run: Path) -> None:
    def change(file: h5py.File) -> None:
        table = file["steps"][:]
        table["num_leaves"][2] += 1
        file["steps"][:] = table

    edit(rank_path(run, 0), change)
    assert found(run)[0] == (0, 1, "row 2 was changed")


def test_a_changed_byte_in_a_row_is_found_by_the_row_and_by_the_seal(run: Path) -> None:
    path = rank_path(run, 0)
    with h5py.File(path, "r") as file:
        root = file["steps"][2]["root"].tobytes()
    flip_bit(path, 8 * path.read_bytes().index(root))
    assert found(run) == [
        (0, 1, "row 2 was changed"),
        (0, None, "a byte of the file was changed after it was sealed"),
    ]


def test_a_renamed_site_is_found_at_the_first_step_that_has_it(run: Path) -> None:
    def change(file: h5py.File) -> None:
        text = file["strings"][:].tobytes()
        at = text.index(b"blocks.1")
        file["strings"][at : at + 8] = np.frombuffer(b"blocks.7", np.uint8)

    # Another reader of this process knows the layout by its hash; the check must not take its word.
    with open_run(run) as other:
        other.rank(0).load(1)
    edit(rank_path(run, 0), change)
    assert found(run)[0][:2] == (0, -1)
    assert found(run)[0][2] == "its layout was changed"


def test_a_changed_shape_is_found(run: Path) -> None:
    edit(rank_path(run, 0), lambda file: file["tensors"].__setitem__(0, file["tensors"][1]))
    assert found(run)[0][2] == "its dtypes and shapes were changed"


@given(place=st.floats(0, 1, exclude_max=True), suffix=st.sampled_from(["h5", "h5", "h5", "seal"]))
@example(place=0.0, suffix="h5")
def test_one_changed_bit_anywhere_in_a_finished_file_is_never_sound(sound: Path, place: float, suffix: str) -> None:
    path = rank_path(sound, 1).with_suffix(f".{suffix}")
    before = path.read_bytes()
    try:
        flip_bit(path, int(place * len(before) * 8))
        try:
            assert not verify_run(sound).is_sound
        except (BrokenRun, NotARun) as error:
            assert str(path) in str(error) or "rank-00001" in str(error)
    finally:
        path.write_bytes(before)


def test_a_bit_in_space_that_hdf5_does_not_use_is_found(run: Path) -> None:
    path = rank_path(run, 1)
    data = path.read_bytes()
    spare = data.rindex(bytes(4000)) + 2000
    flip_bit(path, 8 * spare)
    with open_run(run) as opened:
        assert [opened.rank(1).load(row).to_record() for row in range(6)] == make_steps(1, NUM_STEPS)
    assert found(run) == [(1, None, "a byte of the file was changed after it was sealed")]


def test_bytes_added_at_the_end_are_found(run: Path) -> None:
    with rank_path(run, 0).open("ab") as file:
        file.write(b"more")
    rank, step, sentence = found(run)[0]
    assert (rank, step) == (0, None)
    assert sentence.startswith("it has ")


def test_a_status_that_was_changed_is_found(run: Path) -> None:
    with h5py.File(rank_path(run, 0), "r+") as file:
        file["status"][0] = 2
    with open_run(run) as opened:
        assert opened.status == "failed"
    assert found(run) == [(0, None, "a byte of the file was changed after it was sealed")]


def test_a_missing_seal_is_found(run: Path) -> None:
    rank_path(run, 1).with_suffix(".seal").unlink()
    assert found(run) == [(1, None, "it is finished and has no seal; the seal was removed")]


def test_a_seal_of_another_file_is_found(run: Path) -> None:
    shutil.copy(run / "rank-00000.seal", run / "rank-00001.seal")
    assert [item[:2] for item in found(run)] == [(1, None)]


def test_a_seal_whose_words_were_changed_is_found(run: Path) -> None:
    seal = run / "rank-00001.seal"
    seal.write_bytes(encode_document(decode_document(seal.read_bytes()) | {"chain": "00" * 16}))
    assert found(run) == [(1, None, "its seal was made of another recording")]


def test_a_file_whose_steps_were_all_recomputed_does_not_match_its_seal(run: Path) -> None:
    path = rank_path(run, 1)
    steps = make_steps(1, NUM_STEPS)
    steps[3] = with_digest(steps[3], 2, bytes(16))
    with open_run(run) as opened:
        run_id = opened.run_id
    other = write_rank(run.parent / "rank-00001.h5", steps, rank=1, world_size=2, run_id=run_id)
    shutil.copy(other, path)
    assert [item[:2] for item in found(run)] == [(1, None)]


def test_a_run_that_is_being_recorded_is_sound_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", NUM_STEPS, world_size=2)
    with open_run(folder) as opened:
        run_id = opened.run_id
    for path in (rank_path(folder, 1), rank_path(folder, 1).with_suffix(".seal")):
        path.unlink()
    update_run(folder, status="recording")
    writer = open_writer(rank_path(folder, 1), rank=1, world_size=2, run_id=run_id)
    for number, step in enumerate(make_steps(1, NUM_STEPS), 1):
        writer.append(step)
        answer = verify_run(folder)
        assert answer.is_sound
        assert (answer.num_rows, answer.num_sealed, answer.status) == (6 + number, 1, "recording")
    writer.close("complete")


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "bitcheck", "verify", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"}, check=False)


def test_the_command_says_that_a_sound_run_is_sound(sound: Path) -> None:
    done = command(sound)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{sound}: sound. 12 recorded steps of 2 ranks, 116 digests: every root and chain holds, 2 seals intact.\n"
    )
    done = command("--json", sound)
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["verdict"], answer["damage"]) == ("bitcheck.verify/1", "sound", [])
    assert answer["checked"] == {"ranks": 2, "rows": 12, "events": 116, "seals": 2}


def test_the_command_names_rank_and_step_and_exits_1(run: Path) -> None:
    edit(rank_path(run, 1), lambda file: file["digests"].__setitem__((-1, 0), 0))
    done = command(run)
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{run}/rank-00001.h5: step 4 of rank 1 does not hold: its digests do not give its root.",
        f"{run}/rank-00001.h5: rank 1 does not hold: it is finished and has no seal; the seal was removed.",
        "Restore the files from a copy, or record the run again.",
    ]
    done = command("--json", run)
    assert done.returncode == 1
    assert json.loads(done.stdout)["damage"][0] == {
        "rank": 1,
        "step": 4,
        "file": f"{run}/rank-00001.h5",
        "found": "its digests do not give its root",
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "rank-00001.h5").unlink(),
        lambda run: (run / "rank-00001.h5").write_text("text"),
        lambda run: (run / "rank-00001.h5").write_bytes((run / "rank-00001.h5").read_bytes()[:-1]),
        lambda run: (run / "run.json").unlink(),
        lambda run: (run / "run.json").write_bytes((run / "run.json").read_bytes()[:-20]),
        lambda run: shutil.rmtree(run),
    ],
)
def test_the_command_exits_2_where_a_run_cannot_be_read(run: Path, damage: Callable[[Path], object]) -> None:
    damage(run)
    for arguments in ((run,), ("--json", run)):
        done = command(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"bitcheck: {run}")
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 2


def test_what_verify_raises_is_one_of_our_errors(run: Path) -> None:
    rank_path(run, 0).write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(1000))
    with pytest.raises(BitcheckError):
        verify_run(run)
