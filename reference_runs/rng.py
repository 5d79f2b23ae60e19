"""The states of every random generator that a training step draws from: seed, capture, restore.

    torch    embedding dropout          (on a GPU from the generator of the process's device)
    python   fill in the middle: which sequences, and where they are cut
    numpy    which input bytes are replaced by noise, and by what

States are plain tensors and numbers, so that a checkpoint can be read without executing anything.
"""

# PyTorch leaves torch.cuda.is_initialized without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

GENERATORS = ("torch", "python", "numpy")


def seed_all(seed: int) -> None:
    """Seed PyTorch (all devices), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def capture() -> dict[str, dict[str, Any]]:
    """Return the whole state of each generator, as tensors and numbers by name."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    # Of this process's device alone: reading another one's would start it, and may be another process's.
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {
        "torch": {"cpu": torch.get_rng_state(), **cuda},
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def restore(generator: str, state: dict[str, Any]) -> None:
    """Put back what `capture` returned for `generator`, one of GENERATORS."""
    if generator == "torch":
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
    elif generator == "python":
        random.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    else:
        key = state["key"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", key, state["pos"], state["has_gauss"], state["gauss"]))
