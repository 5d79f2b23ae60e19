"""The answer of a diff: one tree of frozen data, schema `bitcheck.diff/1`. It decides nothing.

    {"schema": "bitcheck.diff/1", "verdict": "diverged", "cause": "backward",
     "first": {"step": 3, "rank": 0, "phase": "grad", "site": "grad/mid.weight:grad", ...},
     "origins": [...], "propagated": 14, "explanation": "...", "remedy": "...", ...}

Keys beyond the schema: a run has `unrecorded_processes` where more processes of a rank trained; an origin
has `cause`, and where they say something `also` (other outputs of the same computation that differ),
`missing_in`, `baseline_value` and `candidate_value`, `line` and `ranks`; the answer has `notes` and
`unobserved`. Place in the flow: diff -> *answer* -> report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = "bitcheck.diff/1"


class Verdict(StrEnum):
    """What a diff says of two runs."""

    IDENTICAL = "identical"
    DIVERGED = "diverged"
    INCOMPARABLE = "incomparable"


class Cause(StrEnum):
    """Why two runs part."""

    DATA = "data"
    RNG = "rng"
    INITIAL_STATE = "initial-state"
    RESTORE = "restore"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    OPTIMIZER = "optimizer"
    HYPERPARAMETER = "hyperparameter"
    STRUCTURE = "structure"
    ENDED_EARLY = "ended-early"


STARTS = frozenset({Cause.INITIAL_STATE, Cause.RESTORE})
"""Causes of what initial snapshots show."""


@dataclass(frozen=True, slots=True)
class Origin:
    """An event whose inputs are bitwise equal in both runs and which is not."""

    step: int
    rank: int
    phase: str
    site: str
    module: str | None
    op: str | None
    tensor: str
    dtype: str
    shape: tuple[int, ...]
    elements: tuple[int, int] | None
    """Flat indices of the first and last element inside differing leaves."""
    cause: Cause
    also: tuple[str, ...] = ()
    """Other sites of the same computation that differ."""
    missing_in: str | None = None
    """`baseline` or `candidate`, where that run does not have the site."""
    baseline_value: str | None = None
    candidate_value: str | None = None
    """`repr` of a Python value in each run."""
    line: str | None = None
    """The Python line that asked for the operation, where lines were noted."""
    ranks: tuple[int, ...] = ()
    """All ranks on which this one origin was seen, where more than one."""
    is_eval: bool = False
    remarks: tuple[str, ...] = ()
    """What the attribution has to say about this origin, in sentences."""
    order: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Position in happens-before order; origins are sorted by it."""

    def to_json(self) -> dict[str, Any]:
        """Return the origin as JSON data; optional keys only where they say something."""
        answer: dict[str, Any] = {
            "step": self.step,
            "rank": self.rank,
            "phase": self.phase,
            "site": self.site,
            "module": self.module,
            "op": self.op,
            "tensor": self.tensor,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "elements": None if self.elements is None else list(self.elements),
            "cause": str(self.cause),
        }
        if self.also:
            answer["also"] = list(self.also)
        if self.missing_in:
            answer["missing_in"] = self.missing_in
        if self.baseline_value is not None or self.candidate_value is not None:
            answer["baseline_value"] = self.baseline_value
            answer["candidate_value"] = self.candidate_value
        if self.line is not None:
            answer["line"] = self.line
        if self.ranks:
            answer["ranks"] = list(self.ranks)
        if self.is_eval:
            answer["evaluation"] = True
        return answer


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a reader needs to recognise a run."""

    path: str
    run_id: str
    first_step: int | None
    last_step: int | None
    world_size: int
    level: str
    status: str
    unrecorded: dict[int, int] = field(default_factory=dict)
    """Rank -> how many processes trained beside the one that was recorded, where any did."""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON data; `unrecorded_processes` only where there are any."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "unrecorded"}
        if self.unrecorded:
            facts["unrecorded_processes"] = {str(rank): count for rank, count in self.unrecorded.items()}
        return facts


@dataclass(frozen=True, slots=True)
class Aligned:
    """The training steps that both runs have, numbered as in the baseline."""

    first_step: int | None
    last_step: int | None
    by: str
    """`step` or `state`."""


@dataclass(frozen=True, slots=True)
class Compared:
    """How much was compared."""

    steps: int
    ranks: int
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class EnvironmentDifference:
    """One entry of the environment that the runs do not share."""

    key: str
    baseline: str | None
    candidate: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What `diff` says of two runs."""

    verdict: Verdict
    runs: tuple[RunFacts, RunFacts]
    aligned: Aligned
    compared: Compared
    environment: tuple[EnvironmentDifference, ...]
    first: Origin | None
    cause: Cause | None
    origins: tuple[Origin, ...]
    propagated: int
    explanation: str
    remedy: str
    notes: tuple[str, ...] = ()
    unobserved: dict[str, int] = field(default_factory=dict)
    """What escaped observation in the compared steps: a sentence -> how many times."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, schema `bitcheck.diff/1`."""
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "runs": [run.to_json() for run in self.runs],
            "aligned": {
                "first_step": self.aligned.first_step,
                "last_step": self.aligned.last_step,
                "by": self.aligned.by,
            },
            "compared": {
                "steps": self.compared.steps,
                "ranks": self.compared.ranks,
                "events": self.compared.events,
                "bytes": self.compared.bytes,
            },
            "environment": {
                "identical": not self.environment,
                "differences": [
                    {"key": entry.key, "baseline": entry.baseline, "candidate": entry.candidate}
                    for entry in self.environment
                ],
            },
            "first": None if self.first is None else self.first.to_json(),
            "cause": None if self.cause is None else str(self.cause),
            "origins": [origin.to_json() for origin in self.origins],
            "propagated": self.propagated,
            "explanation": self.explanation,
            "remedy": self.remedy,
            "notes": list(self.notes),
            "unobserved": dict(self.unobserved),
        }
