"""The GPU's forms run on the GPU where there is one, else in Triton's interpreter on CPU tensors, as kernels do.

`on_device` copies a module there and makes its forms be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TypeVar

import pytest
import torch
from torch import nn

from bitcheck.reference_runs.device import interpreted
from bitcheck.reference_runs.linear import Weight
from tests.reference_runs.kernels.conftest import (  # noqa: F401 - fixtures
    _range_over_loaded_numbers,
    _seeded,
    count_results,
    device,
    shuffle,
)

M = TypeVar("M", bound=nn.Module)
OnDevice = Callable[[M], M]


@pytest.fixture
def on_device(device: str) -> Iterator[OnDevice[M]]:  # noqa: F811 - the fixture
    def copy(module: M) -> M:
        copied = deepcopy(module).to(device)
        for parameter, original in zip(copied.parameters(), module.parameters(), strict=True):
            parameter.grad_dtype = original.grad_dtype  # which a deep copy forgets
        for weight in copied.modules():
            if isinstance(weight, Weight):
                weight.derive()
        return copied

    if torch.cuda.is_available():
        yield copy
    else:
        with interpreted():
            yield copy
