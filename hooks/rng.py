"""The states of the global generators, whole: torch's on the CPU and each CUDA device, Python's, numpy's.

Reading a state draws nothing. Python's and numpy's generators are read where the program has
imported them; numpy's includes its position and the cached second normal value.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


def generator_states() -> list[tuple[str, np.ndarray]]:
    """Return (generator's name, state as uint8 [n]) of every global generator in use."""
    states = [("torch.cpu", torch.get_rng_state().numpy())]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += [
            (f"torch.cuda.{index}", torch.cuda.get_rng_state(index).cpu().numpy())
            for index in range(torch.cuda.device_count())
        ]
    version, words, gauss = random.getstate()
    python = array("Q", words).tobytes() + repr((version, gauss)).encode()
    states.append(("python", np.frombuffer(python, np.uint8)))
    if "numpy.random" in sys.modules:
        states.append(("numpy", np.frombuffer(numpy_state(), np.uint8)))
    return states


class HostGenerator(NamedTuple):
    """A global generator that is not torch's, with the methods of `torch.Generator` that give and take its state."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], None]


def host_generators() -> Iterator[HostGenerator]:
    """Yield Python's global generator, and numpy's where the program has imported it."""
    yield HostGenerator(random.getstate, random.setstate)
    if "numpy.random" in sys.modules:
        yield HostGenerator(lambda: np.random.get_state(legacy=False), np.random.set_state)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states that one generator gave are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return _as_bytes(one) == _as_bytes(other)


def numpy_state() -> bytes:
    """Return numpy's global generator as bytes, whatever bit generator it runs on."""
    return _as_bytes(np.random.get_state(legacy=False))


def _as_bytes(state: Any) -> bytes:
    parts: list[bytes] = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                parts.append(str(key).encode())
                collect(value[key])
        elif isinstance(value, np.ndarray):
            parts.append(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, float):
            parts.append(value.hex().encode())
        else:
            parts.append(repr(value).encode())

    collect(state)
    return b"\0".join(parts)
