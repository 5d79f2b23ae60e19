"""What a replica check answers: frozen data, schema `bitcheck.replicas/1`. It decides nothing.

    {"schema": "bitcheck.replicas/1", "verdict": "differ", "cause": "optimizer",
     "first": {"step": 3, "phase": "param", "site": "param/head.weight:value", "ranks": [2], "majority": true,
               "versions": [{"digest": "...", "ranks": [0, 1, 3]}, {"digest": "...", "ranks": [2]}], ...},
     "odd": [{"rank": 2, "first_step": 3}], "groups": [{"by": "DistributedDataParallel", "ranks": [0, 1, 2, 3], ...}],
     ...}

Place in the flow: replicas -> *replicas_answer* -> report.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bitcheck.answer import RunFacts
from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL, EXIT_TROUBLE

SCHEMA = "bitcheck.replicas/1"


class ReplicaVerdict(StrEnum):
    """What the check says."""

    AGREE = "agree"
    DIFFER = "differ"
    UNDECLARED = "undeclared"
    """The run does not say what is replicated, and nobody else did: nothing was compared."""


EXIT_STATUS = {
    ReplicaVerdict.AGREE: EXIT_IDENTICAL,
    ReplicaVerdict.DIFFER: EXIT_DIFFERENT,
    ReplicaVerdict.UNDECLARED: EXIT_TROUBLE,
}


class ReplicaCause(StrEnum):
    """Why copies differ, as far as what differs first tells it."""

    INITIAL_STATE = "initial-state"
    """They differed before the first step: the start was not broadcast."""
    RESTORE = "restore"
    """The same, in a run that went on from a checkpoint."""
    COLLECTIVE = "collective"
    """The optimizers found different gradients: not reduced, or changed after the reduction."""
    HYPERPARAMETER = "hyperparameter"
    """A number of the optimizer differs in the step in which what it computes first does."""
    OPTIMIZER = "optimizer"
    """Equal gradients and equal state before, another parameter or another state after."""
    BUFFER = "buffer"
    """Buffers differ, and nothing else in that step."""
    OTHER = "other"
    """A tensor that the user declared differs, of a phase that none of these speaks of."""


@dataclass(frozen=True, slots=True)
class Version:
    """One of the contents that the copies of a tensor have."""

    digest: str | None
    """32 hexadecimal digits; None where the tensor is missing."""
    ranks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"digest": self.digest, "ranks": list(self.ranks)}


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One tensor whose copies differ."""

    step: int
    """The step after whose end the state is; in the initial snapshot one before the first step."""
    is_initial: bool
    phase: str
    site: str
    dtype: str
    shape: tuple[int, ...]
    elements: tuple[int, int] | None
    """Flat indices of the first and last element in which the two most frequent versions differ, where leaves
    were kept."""
    versions: tuple[Version, ...]
    """The most frequent first."""

    @property
    def num_ranks(self) -> int:
        """Ranks that hold the tensor, or should."""
        return sum(len(version.ranks) for version in self.versions)

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks agree."""
        return 2 * len(self.versions[0].ranks) > self.num_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The odd ones out; all of them where there is no majority."""
        odd = self.versions[1:] if self.has_majority else self.versions
        return tuple(sorted(rank for version in odd for rank in version.ranks))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "step": self.step,
            "initial": self.is_initial,
            "phase": self.phase,
            "site": self.site,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "elements": None if self.elements is None else list(self.elements),
            "ranks": list(self.ranks),
            "majority": self.has_majority,
            "versions": [version.to_json() for version in self.versions],
        }


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold copies of the same tensors, and who says so."""

    by: str
    """`DistributedDataParallel`, `DTensor`, or the pattern that the user gave."""
    ranks: tuple[int, ...]
    tensors: int
    """Sites of a step that were compared over these ranks."""
    has_buffers: bool
    num_differing: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "by": self.by,
            "ranks": list(self.ranks),
            "tensors": self.tensors,
            "buffers": self.has_buffers,
            "differing": self.num_differing,
        }


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """Whether the copies within one run agree."""

    verdict: ReplicaVerdict
    run: RunFacts
    groups: tuple[ReplicaGroup, ...]
    steps: int
    """Training steps compared; the initial snapshot is not counted."""
    ranks: int
    tensors: int
    """Sites of a step, of all groups."""
    cause: ReplicaCause | None
    disagreements: tuple[Disagreement, ...]
    """Those of the first step in which any copies differ, in the order in which the step made them."""
    num_disagreements: int
    """How many there are in that step; of very many only the first are listed."""
    odd: tuple[tuple[int, int], ...]
    """(rank, step) from which on a rank holds other bits than the majority, as far as there is one."""
    explanation: str
    remedy: str
    notes: tuple[str, ...] = ()
    besides: ReplicaAnswer | None = None
    """Where buffers alone differ first: the same run with its buffers left out."""

    @property
    def first(self) -> Disagreement | None:
        """The first tensor whose copies differ."""
        return self.disagreements[0] if self.disagreements else None

    @property
    def exit_status(self) -> int:
        """Return the exit status of the command."""
        return EXIT_STATUS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, schema `bitcheck.replicas/1`."""
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "run": self.run.to_json(),
            "groups": [group.to_json() for group in self.groups],
            "compared": {"steps": self.steps, "ranks": self.ranks, "tensors": self.tensors},
            "first": None if self.first is None else self.first.to_json(),
            "cause": None if self.cause is None else str(self.cause),
            "disagreements": [each.to_json() for each in self.disagreements],
            "num_disagreements": self.num_disagreements,
            "odd": [{"rank": rank, "first_step": step} for rank, step in self.odd],
            "explanation": self.explanation,
            "remedy": self.remedy,
            "notes": list(self.notes),
            "besides": None if self.besides is None else self.besides.to_json(),
        }
