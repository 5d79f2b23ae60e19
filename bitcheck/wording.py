"""Words that every answer needs."""

from __future__ import annotations

OF_FORWARD = "of the forward, line "
"""How a line begins where backward computes in C++ and no Python asks for it: the line is that of the forward
operation whose gradient is computed."""


def word_line(line: str) -> str:
    """Return the Python line of an operation as it is said to people: `asked for by train.py:31 in forward`."""
    return line if line.startswith(OF_FORWARD) else f"asked for by {line}"


def word_status(status: str) -> str:
    """Return a run's status as it is said to people."""
    return "stopped on purpose" if status == "stopped" else status


def counted(count: int, noun: str) -> str:
    """Return a number and what it counts: `1 rank`, `3,072 ranks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
