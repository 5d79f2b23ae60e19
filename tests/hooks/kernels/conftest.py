"""Kernels run on the GPU where there is one, else in Triton's interpreter, on CPU tensors.

Integers are exact in both, so the same tests hold in both.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any import of one


@pytest.fixture
def device() -> str:
    """Where a test's tensors live."""
    return "cuda" if torch.cuda.is_available() else "cpu"
