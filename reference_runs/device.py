"""Which form an operation takes: the portable one, in plain PyTorch, or the GPU's, on Triton kernels and cuBLAS.

This is the one place that decides. Every operation that has two forms asks for its tensors:

    gpu = gpu_forms(x)
    return _RMSNorm.apply(x, ...) if gpu is None else gpu.rms_norm(x, ...)

The GPU's forms (`bitcheck.reference_runs.gpu`) are loaded when a tensor on a GPU asks for them, so a machine
without a GPU, or without Triton, never imports them. They agree with the portable ones in what they compute,
not in bits: orders of summation differ. Tests run them on a CPU in Triton's interpreter, `interpreted()`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bitcheck.errors import UsageError

DEVICES = ("cpu", "cuda")
ALIGNMENT = 16
"""Elements: matrix products in FP8 on a GPU take widths that are a multiple of it."""

_is_interpreted = False


def gpu_forms(tensor: Tensor) -> Any:
    """Return the module of the GPU's forms where `tensor` is on a GPU, else None."""
    return _load_forms() if tensor.is_cuda or _is_interpreted else None


def gpu_products(weight: Tensor) -> Any:
    """Return what `gpu_forms` does, but None for a weight [..., N, K] whose widths no FP8 product on a GPU takes."""
    return gpu_forms(weight) if all(width % ALIGNMENT == 0 for width in weight.shape[-2:]) else None


@cache
def _load_forms() -> ModuleType:
    return importlib.import_module("bitcheck.reference_runs.gpu")


@contextmanager
def interpreted() -> Iterator[None]:
    """Take the GPU's forms for CPU tensors too: for tests, with TRITON_INTERPRET=1 in the environment."""
    global _is_interpreted
    was, _is_interpreted = _is_interpreted, True
    try:
        yield
    finally:
        _is_interpreted = was


def prepare(name: str) -> torch.device:
    """Return the device called `name`, one of DEVICES, ready to train on.

    Raises UsageError for `cuda` where PyTorch finds no GPU that the kernels run on, or there is no Triton.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: PyTorch finds no GPU here; train on --device cpu")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("--device cuda: the trainer's kernels need triton, which is not installed; pip install triton")
    # Read when cuBLAS starts: without it PyTorch refuses cuBLAS in its deterministic mode. The same in every recipe.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # One process a GPU: torchrun says which of the GPUs that it sees is this one's.
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    major, minor = torch.cuda.get_device_capability(index)
    if major < 9:
        raise UsageError(
            f"--device cuda: the kernels need FP8 tensor cores and TMA, sm90; this GPU is sm{major}{minor}"
        )
    device = torch.device("cuda", index)
    if major == 9:
        importlib.import_module("bitcheck.reference_runs.gpu.dense").gives_float32(device)
    return device
