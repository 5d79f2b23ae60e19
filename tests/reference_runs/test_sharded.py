"""Sharded checkpoints: whole, verified, and written only where all ranks agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bitcheck.reference_runs import checkpoint, sharded
from bitcheck.reference_runs.checkpoint import CheckpointError
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.configs.degrees import Degrees
from bitcheck.reference_runs.data import Text
from bitcheck.reference_runs.ranks import process_group
from bitcheck.reference_runs.train import Options, Trainer
from tests.reference_runs.processes import run_on_ranks

NANO = get_config("nano")
CONFIG = replace(NANO, data=replace(NANO.data, seq_len=32, sequences=1))
DP, EP = Degrees(dp=2), Degrees(dp=2, ep=2)


def save(text: Text, out: Path, degrees: Degrees, spoil: str = "") -> str:
    """Save a trainer that has not trained yet; on rank 1 with one bit of the value `spoil` changed."""
    with process_group(degrees) as ranks:
        assert ranks is not None
        trainer = Trainer(CONFIG, text, Options(steps=1, out=out, degrees=degrees), ranks)
        if spoil and ranks.rank == 1:
            values = checkpoint.collect(trainer.model, trainer.optimizer, trainer.ema, trainer.loader)
            values[spoil].view(-1)[0] += 1
        try:
            trainer.save()
        except CheckpointError as error:
            return str(error)
        finally:
            trainer.ema.close()
    return ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks that share the experts."""
    out = tmp_path_factory.mktemp("sharded")
    run_on_ranks(2, save, words(), out, EP)
    return out / "step-000000"


def words() -> Text:
    import numpy as np

    return Text("words", np.frombuffer(b"mixture of experts\n" * 1000, np.uint8))


def load(path: Path, config: object = CONFIG) -> None:
    trainer = Trainer(config, words(), Options(steps=1))  # type: ignore[arg-type]
    try:
        trainer.resume(path)
    finally:
        trainer.ema.close()


def test_one_process_gets_whole_experts_from_the_parts_of_two_ranks(saved: Path) -> None:
    trainer = Trainer(CONFIG, words(), Options(steps=1, seed=0))
    expected = checkpoint.collect(trainer.model, trainer.optimizer, trainer.ema, trainer.loader)
    header, values = sharded.load(saved, expected, None)
    assert sharded.digests_of(values) == sharded.digests_of(expected)
    assert header["step"] == 0
    assert values["masters/layers.1.moe.experts.up.weight"].shape[0] == CONFIG.model.num_experts
    trainer.ema.close()


def test_nothing_is_written_where_copies_have_drifted_apart_and_the_rank_is_named(tmp_path: Path) -> None:
    told = run_on_ranks(2, save, words(), tmp_path, DP, "moments/head.weight.exp_avg")
    assert set(told) == {told[0]}
    assert "moments/head.weight.exp_avg has other bits on rank 1 than on rank 0, its copy; not written" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_experts_of_different_ranks_are_no_copies(tmp_path: Path) -> None:
    told = run_on_ranks(2, save, words(), tmp_path, EP, "moments/layers.1.moe.experts.up.weight.exp_avg")
    assert told == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000"]


def edit_index(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / sharded.INDEX).read_text())
        change(content)
        (folder / sharded.INDEX).write_text(json.dumps(content))

    return edit


def flip_a_byte(folder: Path) -> None:
    """In the middle of the first rank's tensors, which no archive's table of contents is in."""
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / sharded.INDEX).unlink(), "not a whole checkpoint"),
        (lambda folder: (folder / sharded.INDEX).write_text("{"), "not a whole checkpoint"),
        (lambda folder: (folder / sharded.INDEX).write_text("{}"), "not a checkpoint of the reference trainer"),
        (lambda folder: (folder / ".metadata").unlink(), "cannot be loaded into this model"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "cannot be loaded into this model"),
        (edit_index(lambda content: content["header"].update(step=7)), "the header does not have its digest"),
        (edit_index(lambda content: content["numbers"].update({"data/position": 7})), "data/position does not have"),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(saved, folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_changed_bit_in_a_tensor_is_found(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(saved, folder)
    flip_a_byte(folder)
    with pytest.raises(CheckpointError, match=r"does not have its digest|cannot be loaded"):
        load(folder)


def test_a_checkpoint_of_another_configuration_is_refused_by_name(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="config_digest is"):
        load(saved, replace(CONFIG, data=replace(CONFIG.data, micro_batches=3)))


def test_a_second_checkpoint_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        assert run_on_ranks(2, save, words(), tmp_path, DP) == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000"]
    load(tmp_path / "step-000000")
