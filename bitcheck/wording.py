"""Words that every answer needs."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a number and what it counts: `1 rank`, `3,072 ranks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
