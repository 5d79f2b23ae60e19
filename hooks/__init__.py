"""Everything of bitcheck that touches a live PyTorch program.

Loaded piece by piece: a process that `bitcheck run` attaches to, and that never trains, does not
load HDF5 for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitcheck.hooks.session import Recording, record, track

__all__ = ["Recording", "record", "track"]


def __getattr__(name: str) -> Any:
    """Load the recording from inside a program when it is asked for."""
    if name in __all__:
        from bitcheck.hooks import session

        return getattr(session, name)
    raise AttributeError(f"module 'bitcheck.hooks' has no attribute {name!r}")
