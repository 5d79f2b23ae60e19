"""Samples of a program with some switches suspect, and the ledger of those that were taken.

Place in the flow: *samples* -> bisect, bisect_log, probes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

Point = frozenset[str]
"""The switches in their suspect form."""


class Sample(NamedTuple):
    """One pair of runs at a point."""

    diverged: bool
    num_runs: int = 1
    """Programs that were run for it: the first sample at a point needs two."""
    where: str | None = None
    """Where the pair differed, for people."""


class Oracle(Protocol):
    """Takes samples."""

    def __call__(self, point: Point) -> Sample:
        """Take one more sample."""

    def price(self, point: Point) -> int:
        """Return how many programs the next sample at this point would run."""


class Ledger:
    """Every sample that was taken."""

    def __init__(self) -> None:
        self.entries: list[tuple[Point, Sample]] = []
        self.num_runs = 0
        """Programs that were run."""
        self._smallest: list[Point] = []
        """Points that were seen to diverge, none of them within another."""

    def add(self, point: Point, sample: Sample) -> None:
        """Write a sample down."""
        self.entries.append((point, sample))
        self.num_runs += sample.num_runs
        if sample.diverged and not self.is_known(point):
            self._smallest = [*(seen for seen in self._smallest if not point <= seen), point]

    def is_known(self, point: Point) -> bool:
        """Whether the point, or one with fewer suspects, was seen to diverge."""
        return any(seen <= point for seen in self._smallest)

    def num_cleared(self, point: Point) -> int:
        """Identical samples that speak for the point: at it and at points with more suspects, none known to diverge."""
        return sum(
            not sample.diverged and point <= tried and not self.is_known(tried) for tried, sample in self.entries
        )

    def count(self, point: Point) -> tuple[int, int]:
        """Return (samples at exactly this point that differed, all of them)."""
        outcomes = [sample.diverged for tried, sample in self.entries if tried == point]
        return sum(outcomes), len(outcomes)
