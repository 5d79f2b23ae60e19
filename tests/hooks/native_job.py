"""Record the small programs at one level, a folder each: `python -m tests.hooks.native_job FOLDER LEVEL FORM`.

FORM is `compiled`, or `alone` for the Python alone, as where there is no C compiler.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path


def record_programs(folder: Path, level: str) -> None:
    """Record each program on its own, from the same seeds."""
    import bitcheck
    from tests.hooks.programs import PROGRAMS
    from tests.hooks.test_neutral import seed

    for name, program in PROGRAMS.items():
        seed()
        with bitcheck.record(folder / name, level=level):
            program()


if __name__ == "__main__":
    if sys.argv[3] == "alone":
        sys.modules["bitcheck.hooks._native"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    record_programs(Path(sys.argv[1]), sys.argv[2])
