"""Bytes of a text as tokens, sampled by a counter.

A sample is a window of the text whose start is a hash of (seed, number of the sample): the number is
the loader's whole position, there is no buffer, no worker and no epoch to restore. What each sample is
then turned into draws from generators that belong to the run's state (`rng`):

    fill in the middle (V3 report, section 4.1): at some rate a window becomes
        BEGIN prefix HOLE suffix END middle      cut by Python's generator
    noise: a few of the input bytes, never the targets, are replaced, by NumPy's generator

The three sentinels are bytes that no UTF-8 text contains. The last part of the text is held out.

Legend: B sequences, S positions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitcheck.digest import digest_bytes
from bitcheck.errors import UsageError
from bitcheck.reference_runs.configs import DataConfig

BEGIN, HOLE, END = 0xF8, 0xF9, 0xFA
"""Sentinels of fill in the middle."""
AHEAD = 2
"""Targets reach this far past the inputs: the next token and, for MTP, the one after."""


@dataclass(frozen=True)
class Text:
    """A text as bytes, and its identity."""

    name: str
    data: np.ndarray
    """uint8 [num_bytes]."""

    @property
    def digest(self) -> str:
        """The digest of the bytes as bitcheck takes it of a uint8 tensor, in hex."""
        return digest_bytes("uint8", self.data.shape, self.data)[0].hex()

    def unigram_entropy(self) -> float:
        """Return the entropy of a byte, in nats: the loss of a model that knows frequencies only."""
        counts = np.bincount(self.data, minlength=256)
        shares = counts[counts > 0] / self.data.size
        return float(-(shares * np.log(shares)).sum())


def read_text(path: Path | None) -> Text:
    """Return the text in `path`, or the documentation that Python carries in `pydoc_data.topics`.

    Raises UsageError where the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics

        built_in = "\n".join(f"{name}\n\n{text}" for name, text in topics.items())
        return Text("pydoc_data.topics", np.frombuffer(built_in.encode(), np.uint8))
    try:
        return Text(str(path), np.frombuffer(path.read_bytes(), np.uint8))
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror}; give a readable file of text") from error


def sample_start(seed: int, number: int, num_starts: int) -> int:
    """Return where sample `number` begins: a hash (SplitMix64), uniform over `num_starts` to 2**-40."""
    mask = (1 << 64) - 1
    z = (seed * 0xD1342543DE82EF95 + (number + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) % num_starts


class Loader:
    """Micro-batches of a text's training part, from a position on."""

    def __init__(self, text: Text, config: DataConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.window = config.seq_len + AHEAD
        num_train = math.floor(text.data.size * (1 - config.held_out))
        self._train, self._held_out = text.data[:num_train], text.data[num_train:]
        if self._held_out.size < self.window:
            needed = math.ceil(self.window / config.held_out)
            raise UsageError(f"{text.name} has {text.data.size} bytes; this configuration needs {needed} or more")
        self.position = 0
        """Samples drawn so far; the whole state of the loader."""

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs int64 [B, S] and targets int64 [B, S, 2], and move on by B samples."""
        windows = np.stack([self._next_window() for _ in range(self.config.sequences)])
        inputs, targets = _split(windows)
        is_noisy = np.random.random(inputs.shape) < self.config.noise_rate
        inputs = np.where(is_noisy, np.random.randint(0, 256, inputs.shape), inputs)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _next_window(self) -> np.ndarray:
        start = sample_start(self.seed, self.position, self._train.size - self.window + 1)
        self.position += 1
        window = self._train[start : start + self.window]
        if random.random() < self.config.fim_rate:
            first, second = sorted(random.sample(range(1, self.window - 3), 2))
            window = fill_in_the_middle(window, first, second)
        return window

    def held_out_batches(self, num_sequences: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield up to `num_sequences` windows of the held-out part, evenly spread; draws nothing."""
        starts = np.linspace(0, self._held_out.size - self.window, num_sequences).astype(int)
        for first in range(0, num_sequences, self.config.sequences):
            chosen = starts[first : first + self.config.sequences]
            inputs, targets = _split(np.stack([self._held_out[s : s + self.window] for s in chosen]))
            yield torch.from_numpy(inputs), torch.from_numpy(targets)


def fill_in_the_middle(window: np.ndarray, first: int, second: int) -> np.ndarray:
    """Return prefix, suffix and middle of `window` behind their sentinels, cut to its length.

    The middle is window[first:second]; the last three bytes make room for the sentinels.
    """
    body = window[:-3]
    prefix, middle, suffix = body[:first], body[first:second], body[second:]
    sentinels = np.array([BEGIN, HOLE, END], np.uint8)
    return np.concatenate((sentinels[:1], prefix, sentinels[1:2], suffix, sentinels[2:], middle))


def _split(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    windows = windows.astype(np.int64)
    return windows[:, :-AHEAD].copy(), np.stack((windows[:, 1:-1], windows[:, 2:]), -1)
