"""Checkpoints: whole or not at all, verified, and with nothing forgotten."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bitcheck.reference_runs import checkpoint
from bitcheck.reference_runs.checkpoint import PIECES, CheckpointError
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import Text
from bitcheck.reference_runs.train import Options, Trainer, state_digests

NANO = get_config("nano")
# Every generator is drawn from in every step, so that leaving one out cannot go unseen by chance.
CONFIG = replace(
    NANO,
    model=replace(NANO.model, dropout=0.1),
    data=replace(NANO.data, fim_rate=0.5, noise_rate=0.05, micro_batches=1),
)


def make_trainer(text: Text, out: Path, seed: int = 0) -> Trainer:
    return Trainer(CONFIG, text, Options(steps=4, seed=seed, out=out))


@pytest.fixture
def saved(text: Text, tmp_path: Path) -> Iterator[tuple[Path, dict[str, str], dict[str, str]]]:
    """A checkpoint after two steps, the digests of the state then, and after two steps more."""
    trainer = make_trainer(text, tmp_path)
    for _ in range(2):
        trainer.train_step()
    path, then = trainer.save(), state_digests(trainer)
    for _ in range(2):
        trainer.train_step()
    yield path, then, state_digests(trainer)
    trainer.ema.close()


def resumed(text: Text, path: Path, leave_out: tuple[str, ...] = ()) -> Trainer:
    trainer = make_trainer(text, path.parent)
    trainer.resume(path, leave_out)
    return trainer


def test_a_resumed_run_has_every_bit_of_the_one_that_went_on(text: Text, saved: Any) -> None:
    path, then, later = saved
    # What the process did before must not matter.
    random.random()
    np.random.random()
    torch.rand(3)
    trainer = resumed(text, path)
    assert trainer.step == 2
    assert state_digests(trainer) == then
    for _ in range(2):
        trainer.train_step()
    assert state_digests(trainer) == later
    trainer.ema.close()


@pytest.mark.parametrize("piece", PIECES)
def test_leaving_a_piece_out_changes_bits_now_or_later(text: Text, saved: Any, piece: str) -> None:
    path, then, later = saved
    trainer = resumed(text, path, (piece,))
    now = state_digests(trainer)
    differing = {name.partition("/")[0] for name in then if now[name] != then[name]}
    assert differing - {"derived"} == {piece}
    for _ in range(2):
        trainer.train_step()
    assert state_digests(trainer) != later
    trainer.ema.close()


def test_the_masters_are_the_only_weights_in_a_checkpoint(saved: Any) -> None:
    _, values = checkpoint.load(saved[0])
    assert {name.partition("/")[0] for name in values} == set(PIECES)
    assert all(v.dtype == torch.float32 for name, v in values.items() if name.startswith("masters/"))
    assert all(v.dtype == torch.bfloat16 for name, v in values.items() if name.startswith("moments/"))


def test_a_checkpoint_appears_whole_under_its_name_or_not_at_all(text: Text, tmp_path: Path) -> None:
    trainer = make_trainer(text, tmp_path)
    with (
        mock.patch.object(torch, "save", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckpointError, match="could not be written: No space left on device"),
    ):
        trainer.save()
    assert list(tmp_path.iterdir()) == []
    trainer.save()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.pt"]
    trainer.ema.close()


def test_a_checkpoint_is_synced_before_it_gets_its_name(text: Text, tmp_path: Path) -> None:
    trainer = make_trainer(text, tmp_path)
    happened: list[str] = []
    original = Path.replace

    def rename(self: Path, target: Path) -> Path:
        happened.append("rename")
        return original(self, target)

    with (
        mock.patch("os.fsync", side_effect=lambda _: happened.append("sync")),
        mock.patch.object(Path, "replace", rename),
    ):
        trainer.save()
    assert happened == ["sync", "rename", "sync"]
    trainer.ema.close()


def test_a_checkpoint_that_was_cut_is_refused_at_every_length(saved: Any, tmp_path: Path) -> None:
    data = saved[0].read_bytes()
    cut = tmp_path / "cut.pt"
    for length in (0, 10, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt: not a whole checkpoint"):
            checkpoint.load(cut)


def test_a_changed_bit_in_a_value_is_found(saved: Any, tmp_path: Path) -> None:
    content = torch.load(saved[0], weights_only=True)
    value = content["values"]["moments/head.weight.exp_avg"]
    value.view(torch.int16)[3, 5] ^= 1
    edited = tmp_path / "edited.pt"
    torch.save(content, edited)
    with pytest.raises(CheckpointError, match=r"moments/head\.weight\.exp_avg does not have its digest"):
        checkpoint.load(edited)


def test_what_was_verified_stays_as_it_was_whatever_becomes_of_the_file(saved: Any) -> None:
    path = saved[0]
    name = "masters/embedding.weight"
    _, values = checkpoint.load(path)
    digest, data = checkpoint.digest_value(values[name]), values[name].numpy().tobytes()
    at = path.read_bytes().index(data) + len(data) // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(255 - byte for byte in data[len(data) // 2 :][:4]))
    assert checkpoint.digest_value(values[name]) == digest
    with path.open("r+b") as file:
        file.truncate(4096)
    assert checkpoint.digest_value(values[name]) == digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["values"].update({"data/position": 5}), "data/position does not have its digest"),
        (lambda c: c["header"].update(step=7), "the header does not have its digest"),
        (lambda c: c["values"].pop("data/position"), "list of digests"),
        (lambda c: c.update(format="something else"), "not a checkpoint of the reference trainer"),
    ],
)
def test_an_edited_checkpoint_is_refused(saved: Any, tmp_path: Path, change: Any, message: str) -> None:
    content = torch.load(saved[0], weights_only=True)
    change(content)
    edited = tmp_path / "edited.pt"
    torch.save(content, edited)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(edited)


def test_another_file_is_refused_and_nothing_in_it_is_executed(tmp_path: Path) -> None:
    text_file = tmp_path / "text.pt"
    text_file.write_text("not a checkpoint")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        checkpoint.load(text_file)
    evil = tmp_path / "evil.pt"
    torch.save({"format": checkpoint.FORMAT, "call": print}, evil)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        checkpoint.load(evil)
    torch.save([1, 2], text_file)
    with pytest.raises(CheckpointError, match="not a checkpoint of the reference trainer"):
        checkpoint.load(text_file)
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        checkpoint.load(tmp_path / "absent.pt")


def test_a_checkpoint_of_another_run_is_refused_by_name(text: Text, saved: Any, tmp_path: Path) -> None:
    path = saved[0]
    other_seed = make_trainer(text, tmp_path, seed=1)
    with pytest.raises(CheckpointError, match="seed is 0 there and 1 here"):
        other_seed.resume(path)
    other_text = make_trainer(Text("words", text.data[::-1].copy()), tmp_path)
    with pytest.raises(CheckpointError, match="text_digest is"):
        other_text.resume(path)
    for trainer in (other_seed, other_text):
        trainer.ema.close()


def test_a_checkpoint_of_another_model_changes_nothing(text: Text, saved: Any, tmp_path: Path) -> None:
    header, values = checkpoint.load(saved[0])
    values["masters/head.weight"] = values["masters/head.weight"][:, :8]
    trainer = make_trainer(text, tmp_path)
    before = state_digests(trainer)
    with pytest.raises(CheckpointError, match=r"masters/head\.weight is torch\.float32 \[256, 8\]"):
        checkpoint.restore(saved[0], values, trainer.model, trainer.optimizer, trainer.ema, trainer.loader)
    assert state_digests(trainer) == before
    assert header["step"] == 2
    trainer.ema.close()
