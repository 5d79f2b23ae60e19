"""Everything a diff found, as the explanation and the remedy need it.

Place in the flow: attribution -> *findings* -> explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bitcheck.align import Alignment
from bitcheck.answer import Cause, EnvironmentDifference, Origin
from bitcheck.attribution import Attribution
from bitcheck.events import Level, Phase
from bitcheck.naming import Naming
from bitcheck.pairing import Standing, StepPair


@dataclass(slots=True)
class Findings:
    """Everything a diff found, as the explanation and the remedy need it."""

    level: Level
    world_size: int = 1
    cause: Cause | None = None
    origins: list[Origin] = field(default_factory=list)
    propagated: int = 0
    count_is_complete: bool = True
    later_steps: list[tuple[int, bool]] = field(default_factory=list)
    """Steps after the first that differ and hold no further origin."""
    steps: int = 0
    ranks: int = 0
    last_step: int | None = None
    restart_step: int | None = None
    """The first step that both runs have, where it is not the first of both: one was resumed there."""
    world_sizes: tuple[int, int] = (1, 1)
    """Ranks of the baseline and of the candidate."""
    statuses: tuple[str, str] = ("complete", "complete")
    ended_early: dict[str, list[int]] = field(default_factory=dict)
    endings: Mapping[str, Mapping[tuple[str, int], list[int]]] = field(default_factory=dict)
    """Of those ranks: the run -> (a rank's own status, its last whole step) -> ranks."""
    resumed: str = ""
    """`baseline` or `candidate` where an initial snapshot was held against the other run's end of step."""
    gap: tuple[int, int] | None = None
    """Steps before the first difference that were not recorded."""
    phases: dict[Phase, tuple[int, int]] = field(default_factory=dict)
    """Of the first origin's step and rank: phase -> (events, events that differ)."""
    num_unread_ranks: int = 0
    """Ranks that differ in the first origins' step, in which they were not looked for."""
    parted_ranks: list[int] = field(default_factory=list)
    generators: Mapping[str, bool] = field(default_factory=dict)
    """Where initial snapshots differ: generator -> whether both runs find it in the same state in the first step."""
    first_tensor: str | None = None
    """The first differing event that is no generator's state, where a generator's is the origin."""
    is_eval_only: bool = False
    inherited_structure: int = 0
    extra: dict[str, tuple[str, int]] = field(default_factory=dict)
    """`baseline`, `candidate` -> the first event of the first origin's step and rank that only this run has, their
    number. Not what the origins themselves already say: that a run lacks something."""
    environment: Sequence[EnvironmentDifference] = ()
    recomputes: Mapping[str, list[str]] = field(default_factory=dict)
    alignment: Alignment = field(default_factory=lambda: Alignment(0, "step"))
    unobserved: Mapping[str, int] = field(default_factory=dict)
    unrecorded: tuple[Mapping[int, int], Mapping[int, int]] = field(default_factory=lambda: ({}, {}))
    """Of the baseline and of the candidate: rank -> processes that trained beside the one that was recorded."""

    @property
    def is_rebuild(self) -> bool:
        """Whether it looks like DistributedDataParallel with buckets rebuilt in one run and not yet in the other.

        Its first step reduces the gradients in other groups than all later ones do; with three ranks or
        more the groups decide in which order the ranks are added.
        """
        first = self.origins[0] if self.origins else None
        return (
            first is not None
            and first.cause in (Cause.COLLECTIVE, Cause.COMPUTE)
            and first.phase in (Phase.GRAD, Phase.COMM)
            and first.step == self.restart_step
            and self.world_size >= 3
            and len(self.parted_ranks) > 1
        )

    def observe(
        self, pairs: Mapping[int, StepPair], attribution: Attribution, gap: tuple[int, int] | None, naming: Naming
    ) -> None:
        """Take note of what surrounds the first origins."""
        self.gap = gap
        self.parted_ranks = sorted(pairs)
        if not attribution.blames:
            return
        first = attribution.blames[0]
        self.inherited_structure = first.inherited_structure
        pair = pairs[first.shown.rank]
        for position in range(len(pair)):
            if not pair.standing[position] and min(pair.baseline_index[position], pair.candidate_index[position]) < 0:
                continue  # recorded in one run alone, and no divergence
            phase = pair.site(position).phase
            total, parted = self.phases.get(phase, (0, 0))
            self.phases[phase] = total + 1, parted + bool(pair.standing[position])
        if not first.is_structural:
            for run, standing in (("baseline", Standing.BASELINE_ONLY), ("candidate", Standing.CANDIDATE_ONLY)):
                alone = [position for position in pair.parted() if pair.standing[position] == standing]
                if alone:
                    self.extra[run] = (naming.site(pair.site(alone[0])), len(alone))
        tensors = [pair.site(position) for position in pair.parted() if pair.site(position).phase is not Phase.RNG]
        if tensors:
            self.first_tensor = naming.site(tensors[0])
        self.is_eval_only = all(pair.site(position).is_eval for pair in pairs.values() for position in pair.parted())
