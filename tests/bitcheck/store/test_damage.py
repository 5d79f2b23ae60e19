"""Files that are not what a writer left: one sentence each, whatever was done to them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcheck.document import decode_document, encode_document
from bitcheck.errors import BitcheckError, BrokenRun, DamagedStep, FutureRun, NotARun
from bitcheck.store import STEP_ROW, RankReader
from bitcheck.store.format import read_rows, row_check
from tests.bitcheck.store.records import flip_bit, make_steps, open_writer, write_rank

NUM_STEPS = 6


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished file of 7 rows."""
    return write_rank(tmp_path_factory.mktemp("finished") / "rank-00000.h5", make_steps(0, NUM_STEPS))


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as a killed writer leaves it."""
    folder = tmp_path_factory.mktemp("unfinished")
    writer = open_writer(folder / "growing.h5")
    for step in make_steps(0, NUM_STEPS):
        writer.append(step)
    shutil.copy(folder / "growing.h5", folder / "rank-00000.h5")
    writer.close("complete")
    return folder / "rank-00000.h5"


def read_everything(path: Path) -> int:
    """Return the number of steps of a file that can be read whole."""
    with RankReader(path) as reader:
        reader.tail()
        reader.check_layouts()
        for row in range(reader.num_rows):
            reader.load(row)
        return reader.num_rows


def check_sentence(error: BitcheckError, path: Path) -> None:
    """Hold an error to the house's form: the file, what was found, and on the second line what to do."""
    found, *advice = str(error).splitlines()
    assert found.startswith(str(path))
    assert len(advice) == 1
    assert all(line.endswith((".", ")")) or "bitcheck verify" in line for line in (found, *advice))
    assert "0x" not in found
    assert "errno" not in found


def edit(path: Path, change: Callable[[h5py.File], None]) -> None:
    """Change a file with h5py, as an editor of HDF5 files would."""
    with h5py.File(path, "r+", libver="latest") as file:
        change(file)


def edit_row(path: Path, row: int, **changes: int) -> None:
    """Change fields of a step's row, and its check with them."""

    def change(file: h5py.File) -> None:
        table = file["steps"][:]
        for name, value in changes.items():
            table[name][row] = value
        table["check"][row] = row_check(table[row].tobytes())
        file["steps"][:] = table

    edit(path, change)


@pytest.mark.parametrize("which", ["finished", "unfinished"])
def test_a_file_cut_at_any_length_says_so(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    whole = request.getfixturevalue(which)
    data = whole.read_bytes()
    path = tmp_path / "rank-00000.h5"
    lengths = {*range(64), *range(64, len(data), len(data) // 150), len(data) - 1}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        with pytest.raises((BrokenRun, NotARun)) as caught:
            assert read_everything(path) < 0, f"a file cut at {length} of {len(data)} bytes was read whole"
        assert not isinstance(caught.value, DamagedStep)
        check_sentence(caught.value, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; expected a rank's file of bitcheck"),
        (b"step,loss\n0,1.5\n", "is not an HDF5 file; expected a rank's file of bitcheck"),
        (os.urandom(100_000), "is not an HDF5 file; expected a rank's file of bitcheck"),
        (b"\x89HDF\r\n\x1a\n", "was cut, edited or damaged"),
        (b"\x89HDF\r\n\x1a\n" + os.urandom(10_000), "was cut, edited or damaged"),
    ],
    ids=["empty", "text", "noise", "signature", "signature and noise"],
)
def test_a_file_that_is_not_hdf5_says_so(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rank-00000.h5"
    path.write_bytes(content)
    with pytest.raises((BrokenRun, NotARun), match=message) as caught:
        RankReader(path)
    check_sentence(caught.value, path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="does not exist") as caught:
        RankReader(tmp_path / "rank-00000.h5")
    check_sentence(caught.value, tmp_path)


def test_a_folder_in_the_place_of_a_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.h5"
    path.mkdir()
    with pytest.raises(NotARun, match="cannot be read: Is a directory") as caught:
        RankReader(path)
    check_sentence(caught.value, path)


def test_another_programs_hdf5_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.h5"
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(4)
        file.attrs["schema"] = "another/1"
    with pytest.raises(NotARun, match="is an HDF5 file of another program") as caught:
        RankReader(path)
    check_sentence(caught.value, path)


def edit_header(path: Path, change: Callable[[bytes], bytes]) -> None:
    def edit_attribute(file: h5py.File) -> None:
        file.attrs["header"] = np.bytes_(change(file.attrs["header"]))

    edit(path, edit_attribute)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"schema": "bitcheck.rank/2"}, FutureRun, "has schema 'bitcheck.rank/2'; this bitcheck reads bitcheck.rank/1"),
        ({"digest_version": 2}, FutureRun, "holds digests of version 2; this bitcheck reads version 1"),
        ({"schema": "other.rank/1"}, NotARun, "has schema 'other.rank/1'; expected bitcheck.rank/1"),
        ({"rank": "zero"}, BrokenRun, "its header has no valid rank"),
        ({"level": "kernel"}, BrokenRun, "was cut, edited or damaged"),
        ({"writer": None}, BrokenRun, "its header has no valid writer"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, dict) else "",
)
def test_a_header_from_elsewhere_says_so(
    finished: Path, tmp_path: Path, changes: dict[str, Any], kind: type[BitcheckError], message: str
) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    edit_header(path, lambda text: encode_document({**decode_document(text), **changes}, one_line=True))
    with pytest.raises(kind, match=message) as caught:
        RankReader(path)
    check_sentence(caught.value, path)


def test_a_later_schema_says_so_even_where_its_checksum_is_unknown(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    edit_header(path, lambda text: b'{"schema": "bitcheck.rank/9"}')
    with pytest.raises(FutureRun, match=r"has schema 'bitcheck\.rank/9'"):
        RankReader(path)


def test_an_edited_header_says_so(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    edit_header(path, lambda text: text.replace(b'"rank": 0', b'"rank": 1'))
    with pytest.raises(BrokenRun, match="its header does not match its own checksum") as caught:
        RankReader(path)
    check_sentence(caught.value, path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_events": 2**32 - 1},
        {"first_event": 2**60},
        {"first_event": 2**64 - 1},
        {"num_leaves": 2**60},
        {"first_leaf": 2**60},
        {"first_value": 2**60},
        {"num_values": 2**32 - 1},
        {"notes": 2**32 - 1},
        {"layout": 2**32 - 1},
        {"meta": 2**32 - 1},
        {"kind": 2**32 - 1},
        {"first_event": 1},
        {"first_leaf": 1},
        {"layout": 0},
        {"meta": 0},
        {"notes": 1},
    ],
    ids=str,
)
def test_a_row_that_refers_to_something_else_names_the_step_and_the_rank(
    finished: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    edit_row(path, 3, **changes)
    with pytest.raises(DamagedStep, match="step 2 of rank 0 does not hold") as caught:
        read_everything(path)
    assert (caught.value.rank, caught.value.step) == (0, 2)
    check_sentence(caught.value, path)


def test_a_row_that_was_changed_without_its_check_says_so(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))

    def change(file: h5py.File) -> None:
        table = file["steps"][:]
        table["step"][3] = 77
        file["steps"][:] = table

    edit(path, change)
    with pytest.raises(DamagedStep, match="row 3 was changed") as caught:
        read_everything(path)
    check_sentence(caught.value, path)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("layouts", "num_events", 2**32 - 1),
        ("layouts", "num_groups", 2**32 - 1),
        ("layouts", "num_inputs", 2**60),
        ("layouts", "first_event", 2**60),
        ("layouts", "hash", 1),
        ("layout_events", "site", 2**32 - 1),
        ("layout_events", "group", 1000),
        ("layout_events", "num_inputs", 2**32 - 1),
        ("layout_inputs", None, 2**31 - 1),
        ("layout_groups", "parent", 2**31 - 1),
        ("layout_groups", "group", 2**32 - 1),
        ("metas", "num_events", 2**32 - 1),
        ("metas", "hash", 1),
        ("meta_tensors", None, 2**32 - 1),
        ("tensors", "num_bytes", 2**64 - 1),
        ("tensors", "num_leaves", 2**32 - 1),
        ("tensors", "shape", 2**32 - 1),
        ("tensors", "shape", 0),
        ("sites", "phase", 255),
        ("sites", "path", 2**32 - 1),
        ("groups", "op", 2**32 - 1),
        ("string_ends", None, 2**60),
        ("string_ends", None, 0),
        ("strings", None, 255),
        ("values", None, 2**32 - 1),
        ("digests", None, 7),
        ("leaves", None, 7),
    ],
)
def test_a_table_with_a_wrong_number_in_it_gives_one_sentence(
    finished: Path, tmp_path: Path, name: str, field: str | None, value: int
) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))

    def change(file: h5py.File) -> None:
        rows = file[name][:]
        if field is None:
            rows[len(rows) // 2 :] = value
        else:
            rows[field][-1] = value
        file[name][:] = rows

    edit(path, change)
    started = time.monotonic()
    with pytest.raises(DamagedStep) as caught:
        read_everything(path)
    assert time.monotonic() - started < 5
    check_sentence(caught.value, path)


@pytest.mark.parametrize("name", ["steps", "digests", "leaves", "strings", "string_ends", "layout_events"])
def test_a_table_that_claims_2_to_the_60_rows_gives_one_sentence(finished: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    edit(path, lambda file: file[name].resize(2**60 // file[name].dtype.itemsize, axis=0))
    with pytest.raises(
        BrokenRun, match=f"its dataset {name} claims [0-9]+ rows, more than the file has room for"
    ) as caught:
        read_everything(path)
    check_sentence(caught.value, path)


@pytest.mark.parametrize("kind", ["missing", "another type", "a group", "compressed", "elsewhere"])
def test_a_table_of_another_form_gives_one_sentence(finished: Path, tmp_path: Path, kind: str) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    (tmp_path / "secret").write_bytes(b"s" * 16 * 1000)

    def change(file: h5py.File) -> None:
        rows = file["digests"][:]
        del file["digests"]
        if kind == "another type":
            file.create_dataset("digests", data=rows.astype("f4"), chunks=(64, 16), maxshape=(None, 16))
        elif kind == "a group":
            file.create_group("digests")
        elif kind == "compressed":
            file.create_dataset("digests", data=rows, chunks=(64, 16), maxshape=(None, 16), compression="gzip")
        elif kind == "elsewhere":
            external = [(str(tmp_path / "secret"), 0, h5py.h5f.UNLIMITED)]
            file.create_dataset("digests", shape=rows.shape, dtype="u1", external=external)

    edit(path, change)
    with pytest.raises(BrokenRun) as caught:
        read_everything(path)
    check_sentence(caught.value, path)


def test_a_finished_file_that_says_it_is_not_is_damaged(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(finished, tmp_path / "rank-00000.h5"))
    flip_bit(path, 8 * 11)
    with pytest.raises(BrokenRun, match="its first 48 bytes were changed") as caught:
        RankReader(path)
    check_sentence(caught.value, path)


@pytest.mark.parametrize(("which", "reads"), [("unfinished", 3), ("finished", 1)])
def test_what_a_living_writer_may_be_changing_is_read_again(
    which: str, reads: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fail_twice(dataset: object, name: str, first: int, count: int) -> np.ndarray:
        tried.append(name)
        if len(tried) < 3:
            raise OSError("incorrect metadata checksum")
        return read_rows(dataset, name, first, count)

    monkeypatch.setattr("bitcheck.store.rank_file.read_rows", fail_twice)
    with RankReader(request.getfixturevalue(which)) as reader:
        if which == "unfinished":
            assert reader.num_rows == NUM_STEPS + 1
        else:
            with pytest.raises(BrokenRun, match="incorrect metadata checksum"):
                _ = reader.table
    assert tried == ["steps"] * reads


@given(bit=st.integers(0, 10**9))
def test_one_changed_bit_gives_one_sentence_or_the_same_steps(finished: Path, bit: int) -> None:
    path = finished.with_name("flipped.h5")
    shutil.copy(finished, path)
    flip_bit(path, bit % (8 * path.stat().st_size))
    try:
        with RankReader(path) as reader:
            loaded = [reader.load(row).to_record() for row in range(reader.num_rows)]
        # Space that HDF5 does not use, and the status, have no check but the seal.
        assert loaded == make_steps(0, NUM_STEPS)
    except BitcheckError as error:
        check_sentence(error, path)


def test_the_row_of_a_step_takes_the_bytes_it_is_said_to() -> None:
    assert STEP_ROW.itemsize == sum(STEP_ROW[name].itemsize for name in STEP_ROW.names or ())
