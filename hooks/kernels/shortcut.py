"""How the compiled half launches a kernel: by CUDA's own driver, past what Triton does in Python at every launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bitcheck.hooks.kernels.layout import Arrangement, arrangement

_WARP_THREADS = 32


class Kernel(NamedTuple):
    """A compiled kernel, as the driver is asked to launch it."""

    function: int
    """Its handle, a CUfunction."""
    num_threads: int
    """Of one program."""
    shared_bytes: int
    """Of memory that a program has for itself."""


class CopyKernel(NamedTuple):
    """A compiled kernel of `row_major.py`: a `Kernel`, and what its grid takes."""

    function: int
    num_threads: int
    shared_bytes: int
    block: int
    """Rows, and columns, of a tile that one program transposes; words that one program copies of runs."""


def copy_key(is_transpose: bool, word_bytes: int, is_aligned: bool) -> int:
    """Return what a kernel that copies is found under; `copy_key` in `csrc/strided.c` gives the same.

    `word_bytes`: of a word that it moves (1, 2, 4 or 8). `is_aligned`: as `transpose_kernel` has it, False for runs.
    """
    return word_bytes << 2 | is_transpose << 1 | is_aligned


class Shortcut(NamedTuple):
    """What `csrc/submit.c` launches with, and whom it asks."""

    launch: int
    """The address of cuLaunchKernel."""
    one: Kernel
    few: Kernel
    copies: dict[int, CopyKernel]
    """By `copy_key`, those that are compiled so far."""
    secret: int
    """The address of SECRET_WORDS on the device."""
    device: int
    is_capturing: Callable[[], bool]
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    arrangement: Callable[[tuple[int, ...], tuple[int, ...]], Arrangement] = arrangement


def driver_launch() -> int | None:
    """Return the address of the CUDA driver's cuLaunchKernel in this process, None where there is none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def kernel_of(compiled: Any) -> Kernel | None:
    """Return how to launch what Triton compiled, None where it takes more than its arguments and its programs.

    None, too, where it is of another Triton, whose inside is another.
    """
    try:
        compiled._init_handles()
        run, metadata = compiled.run, compiled.metadata
        if run.global_scratch_size or run.profile_scratch_size or run.launch_cooperative_grid or run.launch_pdl:
            return None
        if metadata.num_ctas != 1 or not isinstance(compiled.function, int):
            return None
        return Kernel(compiled.function, metadata.num_warps * _WARP_THREADS, metadata.shared)
    except AttributeError:
        return None
