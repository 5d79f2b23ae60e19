"""Words that every answer needs."""

from __future__ import annotations


def word_status(status: str) -> str:
    """Return a run's status as it is said to people."""
    return "stopped on purpose" if status == "stopped" else status


def counted(count: int, noun: str) -> str:
    """Return a number and what it counts: `1 rank`, `3,072 ranks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
