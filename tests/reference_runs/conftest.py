"""What the trainer's tests share: seeded generators, one thread, and a small text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bitcheck.reference_runs import rng
from bitcheck.reference_runs.data import Text


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> Iterator[None]:
    """Fix what a result depends on, and put the thread count back."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rng.seed_all(1234)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def text() -> Text:
    """20,000 bytes that have some structure: four words in a random order."""
    words = np.random.default_rng(0).choice(["mixture ", "of ", "experts\n", "routing "], 4000)
    return Text("words", np.frombuffer("".join(words).encode()[:20_000], np.uint8))
