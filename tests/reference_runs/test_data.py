"""Text, samples by a counter, what is done to them, and the generators that it draws from."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bitcheck.errors import UsageError
from bitcheck.reference_runs import rng
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import BEGIN, END, HOLE, Loader, Text, fill_in_the_middle, read_text, sample_start

CONFIG = get_config("nano").data
PLAIN = replace(CONFIG, fim_rate=0.0, noise_rate=0.0)


def test_the_built_in_text_needs_no_file_and_is_large_enough() -> None:
    text = read_text(None)
    assert text.data.size > 400_000
    assert 2.5 < text.unigram_entropy() < 4.0
    assert not set(np.unique(text.data).tolist()) & {BEGIN, HOLE, END}


def test_a_file_is_read_as_it_is_and_known_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    text = read_text(path)
    assert bytes(text.data) == bytes(range(256))
    assert text.unigram_entropy() == pytest.approx(np.log(256))
    other = Text("other", text.data[::-1].copy())
    assert text.digest != other.digest == Text("", other.data).digest


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_text(tmp_path / "absent")


def test_a_text_that_is_too_short_says_how_long_it_must_be() -> None:
    with pytest.raises(UsageError, match=r"has 100 bytes; this configuration needs 1320 or more"):
        Loader(Text("short", np.zeros(100, np.uint8)), CONFIG, 0)


def test_a_sample_depends_on_its_number_and_the_seed_alone(text: Text) -> None:
    first, second = Loader(text, PLAIN, 7), Loader(text, PLAIN, 7)
    batches = [first.next_batch() for _ in range(3)]
    second.position = 2 * PLAIN.sequences
    assert torch.equal(second.next_batch()[0], batches[2][0])
    assert first.position == second.position == 3 * PLAIN.sequences
    assert not torch.equal(Loader(text, PLAIN, 8).next_batch()[0], batches[0][0])


def test_samples_begin_evenly_all_over_the_text() -> None:
    starts = np.array([sample_start(3, number, 1000) for number in range(20_000)])
    counts = np.histogram(starts, 10, (0, 1000))[0]
    assert starts.min() >= 0
    assert starts.max() < 1000
    assert bool((abs(counts - 2000) < 200).all())


def test_targets_are_the_next_byte_and_the_one_after(text: Text) -> None:
    inputs, targets = Loader(text, PLAIN, 0).next_batch()
    assert inputs.shape == (PLAIN.sequences, PLAIN.seq_len)
    assert torch.equal(inputs[:, 1:], targets[:, :-1, 0])
    assert torch.equal(targets[:, 1:, 0], targets[:, :-1, 1])
    start = sample_start(0, 0, int(text.data.size * 0.95) - PLAIN.seq_len - 1)
    assert bytes(inputs[0].to(torch.uint8).numpy()) == bytes(text.data[start : start + PLAIN.seq_len])


def test_held_out_text_is_never_trained_on() -> None:
    data = np.zeros(20_000, np.uint8)
    data[19_000:] = 1
    loader = Loader(Text("", data), PLAIN, 0)
    for _ in range(200):
        inputs, targets = loader.next_batch()
        assert not inputs.any()
        assert not targets.any()
    batches = list(loader.held_out_batches(5))
    assert sum(len(inputs) for inputs, _ in batches) == 5
    assert all(bool((inputs == 1).all()) for inputs, _ in batches)


def test_reading_held_out_text_draws_nothing_and_moves_nothing(text: Text) -> None:
    loader = Loader(text, CONFIG, 0)
    before = random.getstate(), np.random.get_state()[2]
    list(loader.held_out_batches(8))
    assert (random.getstate(), np.random.get_state()[2]) == before
    assert loader.position == 0


def test_fill_in_the_middle_moves_the_middle_behind_its_sentinel() -> None:
    window = np.arange(20, dtype=np.uint8)
    assert fill_in_the_middle(window, 3, 7).tolist() == [
        BEGIN, 0, 1, 2, HOLE, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, END, 3, 4, 5, 6,
    ]  # fmt: skip


def test_some_sequences_are_rearranged_by_pythons_generator(text: Text) -> None:
    config = replace(CONFIG, noise_rate=0.0, sequences=200, fim_rate=0.1)
    inputs, _ = Loader(text, config, 0).next_batch()
    share = (inputs[:, 0] == BEGIN).float().mean().item()
    assert 0.04 < share < 0.2
    random.seed(99)
    again, _ = Loader(text, config, 0).next_batch()
    assert not torch.equal(inputs, again)


def test_some_input_bytes_but_no_targets_are_noise_from_numpys_generator(text: Text) -> None:
    config = replace(PLAIN, sequences=200, noise_rate=0.1)
    inputs, targets = Loader(text, config, 0).next_batch()
    clean_inputs, clean_targets = Loader(text, replace(config, noise_rate=0.0), 0).next_batch()
    assert torch.equal(targets, clean_targets)
    assert 0.08 < (inputs != clean_inputs).float().mean().item() < 0.12


@pytest.mark.parametrize("generator", rng.GENERATORS)
def test_a_restored_generator_goes_on_as_it_would_have(generator: str) -> None:
    def draw() -> list[object]:
        normal = {"torch": torch.randn(1).item(), "python": random.gauss(0, 1), "numpy": np.random.standard_normal()}
        uniform = {"torch": torch.rand(1).item(), "python": random.random(), "numpy": np.random.random()}
        return [normal[generator], uniform[generator]]

    # An odd number of normal numbers leaves half of a pair in the state, which is part of it.
    random.gauss(0, 1)
    np.random.standard_normal()
    state = rng.capture()[generator]
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    rng.restore(generator, state)
    assert [draw() for _ in range(3)] == expected
