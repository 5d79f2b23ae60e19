"""A step of a small model in the GPU's forms, in Triton's interpreter, recorded at level `op`; run by test_forms.py.

python -m tests.reference_runs.gpu.recorded_job CONFIG FOLDER
"""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

import bitcheck
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.device import interpreted
from bitcheck.reference_runs.gpu import mixers
from bitcheck.reference_runs.linear import Weight
from bitcheck.reference_runs.switches import Switches
from bitcheck.reference_runs.train import deterministic_algorithms
from tests.reference_runs.gpu.test_forms import stand_in, whole_model
from tests.reference_runs.kernels.conftest import range_over_loaded_numbers


def main(name: str, folder: str) -> None:
    """Train one step."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, batch = whole_model(get_config(name))
    with pytest.MonkeyPatch.context() as patch, interpreted(), deterministic_algorithms(Switches.from_options()):
        range_over_loaded_numbers(patch)
        patch.setattr(mixers, "aten", stand_in([]))
        for weight in model.modules():
            if isinstance(weight, Weight):
                weight.derive()
        with bitcheck.record(folder, model, level="op") as rec:
            losses = model(*batch)
            (losses.total * 2.0**16).backward()
            rec.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
