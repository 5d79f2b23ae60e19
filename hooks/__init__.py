"""Everything of bitcheck that touches a live PyTorch program."""

from __future__ import annotations

from bitcheck.hooks.session import Recording, record, track

__all__ = ["Recording", "record", "track"]
