"""From the first copies that differ to a cause, a sentence that says what was seen, and what to do.

Place in the flow: replicas -> *replica_causes* -> report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitcheck.events import Phase
from bitcheck.explain import format_ranks
from bitcheck.naming import Naming
from bitcheck.replicas_answer import Disagreement, ReplicaAnswer, ReplicaCause, ReplicaGroup, ReplicaVerdict
from bitcheck.store import LoadedStep

_MAX_NAMED = 3
_NOUNS = {
    Phase.GRAD: "gradient",
    Phase.PARAM: "parameter",
    Phase.BUFFER: "buffer",
    Phase.OPTIM: "optimizer state",
}


class Evidence(NamedTuple):
    """What else the step says in which copies first differ."""

    scalars: tuple[str, ...]
    """Sites of the optimizer's numbers that differ too."""
    num_grads: int
    """Gradients that the optimizer found, of one rank."""
    num_differing_grads: int
    num_unreduced: int
    """Of those that differ: how many are, on every rank looked at, the rank's own local gradient."""
    has_local: bool
    """Whether the run's level has local gradients at all."""
    has_statistics: bool
    """Whether the differing buffers are running statistics, as a BatchNorm has them."""
    phases: frozenset[Phase]
    """Of all that differs."""
    has_before: bool = True
    """Whether the state before the step was recorded, so that it is known to have agreed."""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients were reduced and changed afterwards: some agree, and none that differs is a local one."""
        return self.num_unreduced == 0 and self.num_differing_grads < self.num_grads

    @classmethod
    def of(cls, differing: Mapping[str, Phase], steps: Sequence[LoadedStep], naming: Naming) -> Evidence:
        """Return what steps of differing ranks, the most frequent kind first, say of the sites that differ."""
        scalars: Counter[str] = Counter()
        for step in steps:
            found = {
                (naming.site(site), step.digests[event].tobytes())
                for event, site in enumerate(step.sites)
                if site.phase is Phase.SCALAR
            }
            scalars.update(text for text, _ in found - _scalars_of(steps[0], naming))
        unreduced: set[str] | None = None
        for step in steps:
            local: dict[tuple[str, str], set[bytes]] = {}
            for event, site in enumerate(step.sites):
                if site.phase is Phase.BACKWARD and site.slot == "grad":
                    local.setdefault((site.root, site.path), set()).add(step.digests[event].tobytes())
            own = {
                text
                for event, site in enumerate(step.sites)
                if site.phase is Phase.GRAD
                and step.digests[event].tobytes() in local.get((site.root, site.path), ())
                and (text := naming.site(site)) in differing
            }
            unreduced = own if unreduced is None else unreduced & own
        buffers = [text for text, phase in differing.items() if phase is Phase.BUFFER]
        return cls(
            tuple(sorted(scalars)),
            sum(site.phase is Phase.GRAD for site in steps[0].sites),
            sum(phase is Phase.GRAD for phase in differing.values()),
            len(unreduced or ()),
            any(site.phase is Phase.BACKWARD and site.slot == "grad" for site in steps[0].sites),
            bool(buffers) and any("running_mean" in site or "running_var" in site for site in buffers),
            frozenset(differing.values()),
        )


def _scalars_of(step: LoadedStep, naming: Naming) -> set[tuple[str, bytes]]:
    return {
        (naming.site(site), step.digests[event].tobytes())
        for event, site in enumerate(step.sites)
        if site.phase is Phase.SCALAR
    }


def explain_replicas(
    verdict: ReplicaVerdict,
    disagreements: Sequence[Disagreement],
    count: int,
    evidence: Evidence | None,
    odd: Mapping[int, int],
    groups: Sequence[ReplicaGroup],
    *,
    start_step: int,
    num_steps: int,
    num_ranks: int,
    world_size: int,
    has_shards: bool,
) -> tuple[ReplicaCause | None, str, str]:
    """Return cause, explanation and remedy of an answer."""
    if verdict is ReplicaVerdict.UNDECLARED:
        return None, *_explain_undeclared(world_size, bool(groups), has_shards)
    if verdict is ReplicaVerdict.AGREE:
        steps = "1 step" if num_steps == 1 else f"all {num_steps:,} steps"
        return (
            None,
            f"Every copy of every replicated tensor has the same bits on its {num_ranks:,} ranks in {steps}.",
            "",
        )
    assert evidence is not None
    first = disagreements[0]
    cause = _find_cause(disagreements, evidence, start_step)
    sentences = [_who(first, count), *_why(cause, first, evidence, odd)]
    later = sorted((step, rank) for rank, step in odd.items() if step > first.step)
    if later:
        step, rank = later[0]
        more = f" (and {len(later) - 1} more ranks later still)" if len(later) > 1 else ""
        sentences.append(f"Rank {rank} follows in step {step}{more}.")
    return cause, " ".join(sentences), _recommend(cause, first, evidence)


def explain_rest(rest: ReplicaAnswer) -> str:
    """Say what a run's copies do apart from its buffers, which differ first."""
    if rest.verdict is ReplicaVerdict.AGREE:
        return "Apart from buffers all copies agree in all steps."
    if rest.verdict is ReplicaVerdict.UNDECLARED:
        return ""
    return f"Apart from buffers: {rest.explanation[0].lower()}{rest.explanation[1:]}"


def _explain_undeclared(world_size: int, has_groups: bool, has_shards: bool) -> tuple[str, str]:
    if world_size == 1:
        return "The run has one rank: there is nothing to hold it against.", ""
    if has_groups:
        return "No whole step was recorded, so nothing was compared.", "Record at least one training step."
    if has_shards:
        return (
            "Every tensor whose placement is known is cut over all ranks of its mesh (as by FSDP): no rank holds what "
            "another one holds, so there is nothing to hold it against.",
            "Compare with a second run (`bitcheck diff`), or say what is replicated besides: "
            f"--group '0-{world_size - 1}:PATTERN'.",
        )
    return (
        f"Nothing in the run says what its {world_size:,} ranks replicate: no DistributedDataParallel and no "
        "replicated DTensor was seen, and bitcheck does not guess. Nothing was compared.",
        f"Say which ranks hold copies: --group 0-{world_size - 1}, or of some tensors only: "
        f"--group '0-{world_size - 1}:head.*'.",
    )


def _find_cause(disagreements: Sequence[Disagreement], evidence: Evidence, start_step: int) -> ReplicaCause:
    first = disagreements[0]
    phases = {str(phase) for phase in evidence.phases}
    if first.is_initial:
        return ReplicaCause.RESTORE if start_step > 0 else ReplicaCause.INITIAL_STATE
    if not phases <= set(_NOUNS):
        return ReplicaCause.OTHER
    if Phase.GRAD in phases:
        return ReplicaCause.COLLECTIVE
    if evidence.scalars:
        return ReplicaCause.HYPERPARAMETER
    if phases == {Phase.BUFFER}:
        return ReplicaCause.BUFFER
    return ReplicaCause.OPTIMIZER


def _who(first: Disagreement, count: int) -> str:
    """Say which ranks hold other bits, and how sure that is."""
    when = f"Before step {first.step + 1}" if first.is_initial else f"In step {first.step}"
    what = first.site if count == 1 else f"{first.site} and {count - 1:,} more"
    versions, total = first.versions, first.num_ranks
    if first.has_majority:
        odd = first.ranks
        missing = {rank for version in versions[1:] if version.digest is None for rank in version.ranks}
        verb = "lacks" if set(odd) == missing and len(odd) == 1 else "lack" if set(odd) == missing else ""
        others = f"the other {len(versions[0].ranks):,}, which agree"
        if verb:
            return f"{when} {format_ranks(odd)} {verb} {what}, which {len(versions[0].ranks):,} other ranks have."
        if len(odd) == 1:
            return f"{when} {format_ranks(odd)} has other bits of {what} than {others}: it is the odd one out."
        return f"{when} {format_ranks(odd)} have other bits of {what} than {others}: they are the odd ones out."
    if total == 2:
        return (
            f"{when} {format_ranks(first.ranks)} have different bits of {what}. With two ranks there is no majority: "
            "which of them is wrong cannot be told from this run alone."
        )
    shared = len(versions[0].ranks) > 1
    largest = f"the most frequent is that of {format_ranks(versions[0].ranks)}" if shared else "no two agree"
    return f"{when} the {total:,} ranks have {len(versions):,} versions of {what}, and none has a majority: {largest}."


def _why(cause: ReplicaCause, first: Disagreement, evidence: Evidence, odd: Mapping[int, int]) -> list[str]:
    if cause in (ReplicaCause.INITIAL_STATE, ReplicaCause.RESTORE):
        source = "broadcast" if cause is ReplicaCause.INITIAL_STATE else "restored alike"
        return [f"No step had been taken: the start was not {source}."]
    if cause is ReplicaCause.COLLECTIVE:
        share = (
            "all gradients"
            if evidence.num_differing_grads == evidence.num_grads
            else f"{evidence.num_differing_grads:,} of {evidence.num_grads:,} gradients"
        )
        if evidence.num_unreduced == evidence.num_differing_grads:
            return [
                f"What the optimizers found differs in {share}, and is on each rank its own local gradient: they were "
                "not reduced."
            ]
        if first.has_majority or evidence.is_reduced:
            return [
                f"{share.capitalize()} that the optimizer finds differ after the reduction, which gives all the same."
            ]
        unsure = "" if evidence.has_local else " (at level module it could be told whether they are the local ones)"
        return [f"What the optimizers found differs in {share}: as if they had not been reduced{unsure}."]
    if cause is ReplicaCause.HYPERPARAMETER:
        named = ", ".join(evidence.scalars[:_MAX_NAMED])
        return [f"The gradients agree; the optimizers' numbers do not: {named}."]
    if cause is ReplicaCause.BUFFER:
        ruler = (
            "DistributedDataParallel holds buffers equal at the beginning of a forward only, when it broadcasts those "
            "of its first rank: what the others made of them until the end of the step is lost then."
        )
        if evidence.has_statistics:
            return [f"These are running statistics that each rank takes of its own batch. {ruler}"]
        return [f"All else agrees: this rank's forward or the program wrote them otherwise than the others. {ruler}"]
    if cause is ReplicaCause.OPTIMIZER:
        before = ", and so did the state before" if evidence.has_before else "; the state before was not recorded"
        return [
            f"The gradients that the optimizers found agree{before}: this {_NOUNS[Phase(first.phase)]} was computed "
            "or kept otherwise from equal inputs."
        ]
    return []


def _recommend(cause: ReplicaCause, first: Disagreement, evidence: Evidence) -> str:
    if cause is ReplicaCause.INITIAL_STATE:
        return (
            "Build and load the model before DistributedDataParallel wraps it, which then broadcasts the first rank's "
            "(do not set init_sync=False); what is changed afterwards, and the optimizer's state, must be changed "
            "alike on every rank or broadcast with torch.distributed.broadcast."
        )
    if cause is ReplicaCause.RESTORE:
        return "Let every rank load the same checkpoint, or broadcast what one rank loaded before the first step."
    if cause is ReplicaCause.COLLECTIVE:
        if evidence.num_unreduced < evidence.num_differing_grads and (first.has_majority or evidence.is_reduced):
            who = format_ranks(first.ranks) if first.has_majority else "one of the ranks"
            return (
                f"Look at what {who} alone does to gradients between backward and the optimizer "
                "(clipping by a local norm, a hook, a skipped scaler step); if nothing, test that rank's device and "
                "memory, and its links."
            )
        return (
            "Call the DistributedDataParallel itself, model(x), not model.module(x) or a reference to what it wraps; "
            "run the last micro-batch before optimizer.step() outside no_sync()."
        )
    if cause is ReplicaCause.HYPERPARAMETER:
        return "Let the learning rate and the like depend on the step alone, not on the rank or on local data."
    if cause is ReplicaCause.BUFFER:
        if evidence.has_statistics:
            return (
                "Convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm; where only the first rank's "
                "statistics count, say broadcast_buffers=False, or leave them out here: --except '*.running_*'."
            )
        return (
            "Update buffers from values that all ranks share; where they are meant to be local, build "
            "DistributedDataParallel with broadcast_buffers=False, or leave them out here with --except."
        )
    if cause is ReplicaCause.OPTIMIZER:
        if first.has_majority:
            return (
                f"Test the device and memory of {format_ranks(first.ranks)}; record once more: a fault of the hardware "
                "shows elsewhere or not at all, one of the program at the same place. Restore the state from a rank of "
                "the majority."
            )
        return "Record once more and compare with `bitcheck diff`: the rank that differs there is the wrong one."
    return ""
