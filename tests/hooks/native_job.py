"""Record the small programs at one level, a folder each: `python -m tests.hooks.native_job FOLDER LEVEL FORM`.

FORM is `compiled`, or `alone` for the Python alone, as where there is no C compiler.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

NAMES = [
    "plain",
    "several_optimizers_in_turn",
    "closure_lbfgs",
    "gradient_accumulation_and_clipping",
    "autocast_and_grad_scaler",
    "module_called_twice",
    "outputs_of_every_form",
    "in_place_activations",
    "in_place_activation_on_a_view",
    "packed_sequences",
    "activation_checkpointing",
    "reentrant_checkpointing",
    "sparse_gradients",
    "complex_and_integer_buffers",
    "evaluation_between_steps",
    "optimizer_in_backward",
    "gradient_penalty",
    "multihead_attention",
    "function_transforms",
]
"""Programs whose operations differ in kind; what a compiled module does inside is not recorded."""


def record_programs(folder: Path, level: str) -> None:
    """Record each program on its own, from the same seeds."""
    import bitcheck
    from tests.hooks.programs import PROGRAMS
    from tests.hooks.test_neutral import seed

    for name in NAMES:
        seed()
        with bitcheck.record(folder / name, level=level):
            PROGRAMS[name]()


if __name__ == "__main__":
    if sys.argv[3] == "alone":
        sys.modules["bitcheck.hooks._native"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    record_programs(Path(sys.argv[1]), sys.argv[2])
