"""What `bisect kernels` answers: frozen data, schema `bitcheck.bisect/1`.

    {"schema": "bitcheck.bisect/1", "sets": [{"switches": ["moe.dprob"], "differed": [3, 3], "where": "step 0: ...",
     "suspect": {"moe.dprob": "--set moe.dprob=atomic"}, "reproducible": {"moe.dprob": "--set moe.dprob=slots"}}],
     "sure": 0.987, "confidence": 0.95, "rate": 1.0, "runs": 24, "samples": 15, ...}

Place in the flow: bisect, switches -> *bisect_answer* -> report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitcheck.bisect import BisectResult, Search
from bitcheck.switches import SwitchSet

SCHEMA = "bitcheck.bisect/1"


@dataclass(frozen=True, slots=True)
class BisectAnswer:
    """The sets that were found, and what is behind them."""

    result: BisectResult
    search: Search
    switches: SwitchSet | None
    """None for the replay of a log, which holds names alone."""
    names: tuple[str, ...]
    command: tuple[str, ...]
    log: str
    num_replayed: int = 0
    """Samples that came from the log."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data."""
        result = self.result
        return {
            "schema": SCHEMA,
            "sets": [self._set(number) for number in range(len(result.sets))],
            "sure": result.sure,
            "confidence": self.search.confidence,
            "smallest_rate": self.search.rate,
            "rate": result.rate,
            "runs": result.num_runs,
            "samples": result.num_samples,
            "replayed": self.num_replayed,
            "switches": list(self.names),
            "command": list(self.command),
            "log": self.log,
        }

    def _set(self, number: int) -> dict[str, Any]:
        names = sorted(self.result.sets[number])
        content: dict[str, Any] = {
            "switches": names,
            "differed": list(self.result.shown[number]),
            "where": self.result.where[number],
        }
        if self.switches is not None:
            content["suspect"] = {name: str(self.switches.form(name, True)) for name in names}
            content["reproducible"] = {name: str(self.switches.form(name, False)) for name in names}
        return content
