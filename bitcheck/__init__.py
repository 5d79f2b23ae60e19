"""bitcheck: are two PyTorch training runs the same bit for bit, and if not, where and why.

    with bitcheck.record("runs/a", model=model, optimizer=optimizer) as rec:
        for batch in data:
            ...
            rec.step()

or, with no change to the program: `bitcheck run -o runs/a -- python train.py`.
Then `bitcheck diff runs/a runs/b`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bitcheck.hooks import record, track

__all__ = ["__version__", "record", "track"]


def __getattr__(name: str) -> Any:
    """Load what touches PyTorch only when it is asked for: `bitcheck diff` never needs it."""
    if name in ("record", "track"):
        import bitcheck.hooks

        return getattr(bitcheck.hooks, name)
    raise AttributeError(f"module 'bitcheck' has no attribute {name!r}")
