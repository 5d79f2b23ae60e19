"""The explanation: what was found, in sentences for a tired engineer.

Where it is, what agreed before it, what differs, what is only downstream; then what else a reader
should know (environments, recompute, alignment, coverage). It decides nothing: the findings do. Long
because each cause has sentences of its own.

Place in the flow: diff -> *explain* -> answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bitcheck.answer import STARTS, Cause, EnvironmentDifference, Origin
from bitcheck.events import Phase
from bitcheck.findings import Findings
from bitcheck.remedies import find_remedy
from bitcheck.roles import AFTER, are_numbers, is_given_by_program
from bitcheck.wording import counted

MAX_NAMED = 6
"""Names in one sentence; the JSON answer has them all."""


def recommend(findings: Findings) -> str:
    """Return what to do next, in sentences; empty where nothing needs doing."""
    if findings.cause is None:
        if findings.recomputes:
            return (
                "Make the recompute repeat its forward: checkpoint(..., preserve_rng_state=True), and no buffer or "
                "hidden state that moves between the two."
            )
        return ""
    if findings.cause is Cause.RESTORE and findings.alignment.remarks:
        return (
            "Load the checkpoint of the step before the number that was given, or give the number of the step after "
            "the state that was restored (--start-step, record(start_step=))."
        )
    if findings.cause is Cause.COLLECTIVE and findings.world_sizes[0] != findings.world_sizes[1]:
        return (
            "Compare runs of the same number of ranks, or reduce in an order and a scale that do not depend on it: a "
            "resumed job has to have the ranks of the one that it goes on."
        )
    return find_remedy(
        findings.cause,
        findings.origins,
        findings.level,
        is_rebuild=findings.is_rebuild,
        generators=findings.generators,
    )


def explain(findings: Findings) -> str:
    """Return the explanation of an answer, in sentences."""
    if findings.cause is None:
        sentences = [_identical(findings)]
    elif findings.cause is Cause.ENDED_EARLY:
        sentences = [_ended_early(findings)]
    else:
        sentences = [*_diverged(findings), *_downstream(findings)]
    sentences.extend(findings.alignment.remarks)
    if findings.alignment.by == "state":
        offset = findings.alignment.offset
        begins, other = ("candidate", "baseline") if offset > 0 else ("baseline", "candidate")
        sentences.append(
            f"Step 0 of the {begins} is taken for step {abs(offset)} of the {other}, because its initial snapshot is "
            "the state at the end of the step before."
        )
    sentences.extend(_recompute(findings))
    if findings.cause not in (None, Cause.ENDED_EARLY) and findings.environment:
        sentences.append(_environment(findings.environment))
    if findings.unobserved:
        count = sum(findings.unobserved.values())
        sentences.append(
            f"{counted(count, 'thing')} went unobserved in these steps ({_listed(list(findings.unobserved))}), "
            "so the verdict does not cover them."
        )
    sentences.extend(_unrecorded(findings))
    return " ".join(sentences)


def _unrecorded(findings: Findings) -> list[str]:
    """Say which processes that trained are in no run."""
    ours, theirs = findings.unrecorded
    both = [("both runs", ours)] if ours == theirs else [("the baseline", ours), ("the candidate", theirs)]
    return [
        f"In {name} {word_processes(counts)} trained and went unrecorded: the verdict is about the recorded process "
        "of a rank alone, the first that trains, and not about the whole program."
        for name, counts in both
        if counts
    ]


def word_processes(counts: Mapping[int, int]) -> str:
    """Say how many processes went unrecorded, given by rank: `2 more processes of rank 0`."""
    total = sum(counts.values())
    return f"{total:,} more process{'es' * (total > 1)} of {format_ranks(sorted(counts))}"


def _identical(findings: Findings) -> str:
    span = counted(findings.steps, "step")
    ranks = f" on {counted(findings.ranks, 'rank')}" if findings.ranks > 1 else ""
    return f"All {span} that both runs have{ranks} agree bit for bit."


_ENDINGS = {
    "killed": "was killed", "failed": "failed", "recording": "is still being recorded", "complete": "ended",
}  # fmt: skip
"""What became of a run, or of one of its ranks, by its status."""


def word_endings(endings: Mapping[tuple[str, int], Sequence[int]]) -> str:
    """Say what became of ranks, given as (status, last step) -> ranks: `rank 1 was killed after step 3; ...`."""
    each = [
        f"{format_ranks(members)} {_ENDINGS.get(own, 'ended')} {f'after step {last}' if last >= 0 else 'first'}"
        for (own, last), members in sorted(endings.items(), key=lambda entry: entry[0][1])
    ]
    return "; ".join(each[:MAX_NAMED])


def _ended_early(findings: Findings) -> str:
    parts = []
    for name, ranks in findings.ended_early.items():
        status = findings.statuses[0 if name == "baseline" else 1]
        how = _ENDINGS.get(status, "did not finish")
        where = f" on {format_ranks(ranks)}" if findings.ranks > 1 else ""
        parts.append(f"The {name} {how} and has fewer steps than the other run{where}.")
        endings = findings.endings.get(name, {})
        if len(endings) > 1 or any(own != status or own == "complete" for own, _ in endings):
            parts.append(f"Of its ranks, the earliest first: {word_endings(endings)}.")
    if findings.steps:
        span = counted(findings.steps, "step")
        equal = f"The {span} that both finished agree bit for bit, up to step {findings.last_step}."
    else:
        equal = "It finished no step; the states the runs start from agree bit for bit."
    return " ".join((*parts, equal))


def _diverged(findings: Findings) -> list[str]:
    first, cause = findings.origins[0], findings.origins[0].cause
    if cause in STARTS:
        return _snapshot(findings)
    where = _where(first, findings)
    sentences = {
        Cause.DATA: _data,
        Cause.RNG: _rng,
        Cause.FORWARD: _computation,
        Cause.BACKWARD: _computation,
        Cause.COMPUTE: _computation,
        Cause.COLLECTIVE: _collective,
        Cause.OPTIMIZER: _optimizer,
        Cause.HYPERPARAMETER: _hyperparameter,
        Cause.STRUCTURE: _structure,
    }[cause](first, where, findings)
    if cause is Cause.COLLECTIVE and findings.world_sizes[0] != findings.world_sizes[1]:
        sentences.append(
            f"The runs have {findings.world_sizes[0]} and {findings.world_sizes[1]} ranks: what others contribute is "
            "in this sum, too, with no fault in either run."
        )
    if findings.is_rebuild:
        sentences.append(
            "It is the first step after a restart, in which DistributedDataParallel reduces the gradients in other "
            "groups (buckets) than later: with three ranks or more that adds the ranks in another order, with no fault "
            "in either run."
        )
    could_shift = cause in (Cause.DATA, Cause.RNG) or first.phase == Phase.LOSS  # a computation's fault may add calls
    for run, (site, count) in findings.extra.items() if could_shift else ():
        more = f" and {counted(count - 1, 'other event')}" if count > 1 else ""
        sentences.append(
            f"Besides, only the {run} has {site}{more} in this step: it ran something that the other run did not, "
            "which may be what shifted or changed the rest."
        )
    if findings.gap is not None:
        begin, end = findings.gap
        span = f"step {begin}" if begin == end else f"steps {begin} to {end}"
        sentences.append(
            f"{span[0].upper()}{span[1:]} before it {'was' if begin == end else 'were'} not recorded, so what entered "
            "this step is not known and the origin may lie in them."
        )
    if findings.is_eval_only and all(origin.is_eval for origin in findings.origins):
        sentences.append("Only evaluation forwards differ: the training state is equal in both runs.")
    sentences.extend(first.remarks)
    others = findings.origins[1:]
    if others:
        listed = _listed(_origin_names(others, findings))
        sentences.append(
            f"{counted(len(others), 'further origin')} that {'does' if len(others) == 1 else 'do'} not depend on it: "
            f"{listed}."
        )
    return sentences


def _where(origin: Origin, findings: Findings) -> str:
    rank = ""
    if len(origin.ranks) > 1:
        rank = f" on {format_ranks(origin.ranks)}"
    elif findings.world_size > 1:
        rank = f" on rank {origin.rank}"
    mode = " (evaluation)" if origin.is_eval else ""
    return f"step {origin.step}{rank}{mode}"


def _origin_names(origins: Sequence[Origin], findings: Findings) -> list[str]:
    """Sites with their step and ranks; what several ranks have in common is said once."""
    places: dict[tuple[str, int], list[int]] = {}
    for origin in origins:
        places.setdefault((origin.site, origin.step), []).extend(origin.ranks or (origin.rank,))
    on_ranks = findings.world_size > 1
    return [
        f"{site} in step {step}{f' on {format_ranks(ranks)}' if on_ranks else ''}"
        for (site, step), ranks in places.items()
    ]


def _tensor(origin: Origin) -> str:
    """A site with its dtype, shape and differing elements in brackets."""
    facts = [f"{origin.dtype}, {_shape(origin.shape)}"]
    count = math.prod(origin.shape)
    if origin.elements is not None and origin.elements != (0, count - 1):
        begin, end = origin.elements
        facts.append(f"differing within elements {begin} to {end} of {count}")
    return f"{origin.site} ({'; '.join(facts)})"


def _also(origin: Origin) -> list[str]:
    if not origin.also:
        return []
    return [f"The same computation also gave other bits in {_listed(list(origin.also))}."]


def _data(first: Origin, where: str, findings: Findings) -> list[str]:
    if first.phase != Phase.BATCH:
        values = ""
        if first.baseline_value is not None:
            values = f" ({first.baseline_value} in the baseline, {first.candidate_value} in the candidate)"
        sentences = [
            f"The program gave the operation {first.op} another argument in {where}: {_tensor(first)}{values}."
        ]
        if not first.remarks:  # they say where it comes from
            memory = "" if are_numbers(first.site) else "memory that was never written, "
            sentences.append(
                "All that was recorded before it agrees, so it comes from outside: data, "
                f"{memory}or a choice made in Python."
            )
        return [*sentences, *_also(first)]
    return [
        f"The batch of {where} differs: {_tensor(first)}, while the state before it is equal in both runs.",
        *([f"So {_do(len(first.also))} {_listed(list(first.also))}."] if first.also else []),
    ]


def _rng(first: Origin, where: str, findings: Findings) -> list[str]:
    generator = first.tensor.partition(":")[0]
    slot = first.site.rpartition(":")[2].partition("#")[0]
    if slot == "state":
        sentences = [
            f"The random number generator {generator} has another state at the start of {where}, and it is drawn from; "
            "all tensors before that agree."
        ]
    else:  # level op: as an operation draws from it
        sentences = [
            f"The random number generator that {slot.removesuffix('.generator')} draws from has another state there, "
            f"in {where}: {generator}, or one that the program passes as `generator=`. All tensors before that agree."
        ]
    if first.also:
        sentences.append(f"So {_do(len(first.also))} {_listed(list(first.also))}.")
    if findings.first_tensor:
        sentences.append(f"The first tensor that differs is {findings.first_tensor}, in the same step.")
    return sentences


def _computation(first: Origin, where: str, findings: Findings) -> list[str]:
    phase = Phase(first.phase)
    if phase is Phase.LOSS:
        return _loss(first, where, findings)
    if phase is Phase.GRAD:
        return _gradient(first, where, findings)
    if phase is Phase.BUFFER:
        return [
            f"{_tensor(first)} is updated to other bits in {where}, while the batch, the parameters and the "
            f"state before it are equal.",
            *_also(first),
        ]
    if phase is Phase.EXTRA:
        return [
            f"{_tensor(first)} differs at the end of {where}, while everything recorded before it in "
            "the step is equal.",
            *_also(first),
        ]
    pass_name = {
        Phase.FORWARD: "forward pass",
        Phase.RECOMPUTE: "activation recompute",
        Phase.BACKWARD: "backward pass",
        Phase.COMM: "contribution to a collective",
    }.get(phase, str(phase))
    who = first.module or first.tensor
    op = f" ({first.op})" if first.op and first.op != first.module else ""
    equal = "inputs" if findings.gap is None else "recorded inputs"
    if first.remarks:
        more = [f"The same goes for {_listed(list(first.also))}."] if first.also else []
        return [f"{who}{op} read other bits in the {pass_name} of {where}: {_tensor(first)}.", *more]
    if is_given_by_program(first.phase, first.op):
        return [
            f"{who} is given other bits in the {pass_name} of {where}: {_tensor(first)}, while all that was recorded "
            "before is equal. What differs lies in what the program computes outside its modules.",
            *_also(first),
        ]
    sentences = [f"{who}{op} gave other bits from equal {equal} in the {pass_name} of {where}: {_tensor(first)}."]
    if AFTER in (first.op or ""):
        sentences.append(f"Which of these autograd nodes did, level {findings.level} does not tell.")
    return [*sentences, *_also(first)]


def _loss(first: Origin, where: str, findings: Findings) -> list[str]:
    has_modules = Phase.FORWARD in findings.phases
    agreed = "the batch, every module's output and" if has_modules else "the batch and"
    sentences = [f"The loss of {where} differs: {_tensor(first)}, while {agreed} the state before it are equal."]
    if has_modules:
        sentences.append(
            "What differs lies between the last module's output and the loss: the loss function itself, or a target "
            f"that only a functional loss sees, which level {findings.level} does not observe."
        )
    else:
        sentences.append(
            "The forward pass gave other bits; a target that only a functional loss sees is not observed at level "
            f"{findings.level}, and would look the same."
        )
    return sentences


def _gradient(first: Origin, where: str, findings: Findings) -> list[str]:
    total, parted = findings.phases.get(Phase.GRAD, (0, 0))
    has_local = Phase.BACKWARD in findings.phases
    if has_local:
        return [
            f"{_tensor(first)}, the gradient that the optimizer finds in {where}, differs, while every gradient agreed "
            "as it left autograd: something between the backward pass and the optimizer (a hook, clipping, unscaling) "
            "changed it.",
            *_also(first),
        ]
    agreed = [
        name
        for phase, name in ((Phase.BATCH, "the batch"), (Phase.LOSS, "the loss"))
        if phase in findings.phases and not findings.phases[phase][1]
    ]
    agreed.append("the state before the step")
    sentences = [f"{_tensor(first)} differs in {where}, while {_joined(agreed)} agree bit for bit."]
    if parted > 1:
        sentences.append(
            f"{parted} of {total} gradients differ; this one is the first of them that the backward pass computes."
        )
    ranks = findings.parted_ranks
    if len(ranks) > 1:
        sentences.append(
            f"The gradients differ on {format_ranks(ranks)}; level {findings.level} cannot tell a rank's own backward "
            "pass from the reduction over ranks."
        )
    else:
        sentences.append(
            f"Level {findings.level} cannot tell the forward from the backward pass here: a difference in the low bits "
            "of the forward pass can vanish in the loss."
            if "the loss" in agreed
            else f"Level {findings.level} cannot tell the forward from the backward pass here."
        )
    return sentences


def _collective(first: Origin, where: str, findings: Findings) -> list[str]:
    if first.phase == Phase.GRAD:
        own = first.ranks or (first.rank,)
        found = (
            f"{_tensor(first)}, the gradient that the optimizer finds in {where}, differs, while every rank's own "
            "gradients agree as they leave autograd: "
        )
        if len(own) == findings.ranks:
            return [f"{found}the reduction over ranks gave another result.", *_also(first)]
        return [
            f"{found}the reduction gave {format_ranks(own)} another result, or the program changed it there after the "
            "reduction.",
            "Where every rank holds the whole gradient a reduction gives all of them the same, so look first at what "
            "the program does to `.grad` between backward and the optimizer; `bitcheck replicas` on the run with the "
            "fault tells whether the ranks still agree.",
            *_also(first),
        ]
    op = f" ({first.op})" if first.op else ""
    return [
        f"The collective{op} of {where} gave another result from equal contributions of every rank: {_tensor(first)}.",
        *_also(first),
    ]


def _optimizer(first: Origin, where: str, findings: Findings) -> list[str]:
    op = f" ({first.op})" if first.op else ""
    return [
        f"The optimizer{op} left other bits in {where}: {_tensor(first)}, from equal gradients, hyperparameters and "
        "state.",
        *_also(first),
    ]


def _hyperparameter(first: Origin, where: str, findings: Findings) -> list[str]:
    sentences = [
        f"{first.tensor} is {first.baseline_value} in the baseline and {first.candidate_value} in the candidate at "
        f"{where}, while the gradients and the state before it are equal."
    ]
    if first.also:
        sentences.append(f"So {_do(len(first.also))} {_listed(list(first.also))}.")
    return sentences


def _structure(first: Origin, where: str, findings: Findings) -> list[str]:
    holder = "baseline" if first.missing_in == "candidate" else "candidate"
    sentences = [
        f"The runs did different things in {where}: {first.site} is in the {holder} only, and everything before it "
        "agrees."
    ]
    if first.also:
        sentences.append(f"The same goes for {_listed(list(first.also))}.")
    if findings.inherited_structure:
        sentences.append(
            f"{counted(findings.inherited_structure, 'later computation')} in the step gave other bits from equal "
            "inputs, which may follow from it (a call draws random numbers, or moves hidden state)."
        )
    return sentences


def _snapshot(findings: Findings) -> list[str]:
    first, origins = findings.origins[0], [origin for origin in findings.origins if origin.cause in STARTS]
    differing = [origin for origin in origins if origin.missing_in is None]
    if first.cause is Cause.INITIAL_STATE:
        sentences = ["The runs do not start from the same state."]
    elif findings.resumed:
        other = "baseline" if findings.resumed == "candidate" else "candidate"
        sentences = [
            f"The state that the {findings.resumed} was resumed with is not the {other}'s at the end of step "
            f"{first.step}."
        ]
    else:
        sentences = [f"The states that the two runs were resumed with (end of step {first.step}) are not the same."]
    if differing:
        sentences.append(
            f"{counted(len(differing), 'tensor')} {'differs' if len(differing) == 1 else 'differ'}: "
            f"{_listed([_with_values(origin) for origin in differing])}."
        )
    for name in ("baseline", "candidate"):
        missing = [origin.site for origin in origins if origin.missing_in == name]
        if missing:
            sentences.append(
                f"{counted(len(missing), 'tensor')} {'is' if len(missing) == 1 else 'are'} missing in the "
                f"{name}: {_listed(missing)}."
            )
    if first.cause is Cause.INITIAL_STATE:
        sentences.extend(_generators(findings.generators))
    entering = findings.origins[len(origins) :]
    if entering:
        sentences.append(
            f"Step {entering[0].step} begins otherwise in what does not follow from that, too: "
            f"{'; '.join(_entering(origin) for origin in entering[:MAX_NAMED])}."
        )
        if any(origin.cause is Cause.HYPERPARAMETER for origin in entering) and first.phase == Phase.OPTIM:
            sentences.append(
                "(An optimizer's state_dict holds such numbers, too: they may be right again once it is loaded.)"
            )
    return sentences


def _generators(generators: Mapping[str, bool]) -> list[str]:
    """Whether the runs were seeded alike, as far as the first step tells."""
    same = sorted(name for name, agrees in generators.items() if agrees)
    other = sorted(generators.keys() - set(same))
    parts = [f"{_joined(same)} in the same state"] if same else []
    if other:
        parts.append(f"{_joined(other)} in {'another' if len(other) == 1 else 'other'} state{'s'[: len(other) - 1]}")
    return [f"At the first forward the runs find {' and '.join(parts)}."] if parts else []


def _entering(origin: Origin) -> str:
    """What else differs in the first step, as a part of a sentence."""
    also = f" (so {_do(len(origin.also))} {_listed(list(origin.also))})" if origin.also else ""
    if origin.missing_in is not None:
        return f"{origin.site} is missing in the {origin.missing_in}{also}"
    if origin.cause is Cause.HYPERPARAMETER:
        return (
            f"{origin.tensor} is {origin.baseline_value} in the baseline and {origin.candidate_value} in the "
            f"candidate{also}"
        )
    if origin.cause is Cause.RNG:
        return f"the generator {origin.tensor.partition(':')[0]} is in another state, and is drawn from{also}"
    return f"{_tensor(origin)} differs{also}"


def _with_values(origin: Origin) -> str:
    if origin.baseline_value is not None and origin.candidate_value is not None:
        return f"{origin.site} ({origin.baseline_value} -> {origin.candidate_value})"
    return origin.site


def _downstream(findings: Findings) -> list[str]:
    sentences = []
    if findings.propagated:
        least = "" if findings.count_is_complete else "At least "
        verb = "differs" if findings.propagated == 1 else "differ"
        sentences.append(f"{least}{counted(findings.propagated, 'other event')} {verb} and only inherited it.")
    if findings.num_unread_ranks:
        total = len(findings.parted_ranks) + findings.num_unread_ranks
        sentences.append(
            f"{total:,} ranks differ in this step; the {len(findings.parted_ranks):,} that differ earliest in it were "
            "looked into."
        )
    steps = [step for step, is_fragment in findings.later_steps if not is_fragment]
    if steps:
        sentences.append(f"{counted(len(steps), 'later step')} {'differs' if len(steps) == 1 else 'differ'} as well.")
    return sentences


def _recompute(findings: Findings) -> list[str]:
    sentences = []
    for module, names in sorted(findings.recomputes.items()):
        runs = "both runs" if len(names) == 2 else f"the {names[0]}"
        sentences.append(
            f"In {runs} the activation recompute of {module} gives other bits than its forward from the same inputs, "
            "so its gradients belong to activations that the loss never saw."
        )
    return sentences[:MAX_NAMED]


def _environment(differences: Sequence[EnvironmentDifference]) -> str:
    listed = _listed(
        [f"{entry.key} ({_or_unset(entry.baseline)} -> {_or_unset(entry.candidate)})" for entry in differences]
    )
    return f"The environments differ in {listed}."


def _or_unset(value: str | None) -> str:
    return "unset" if value is None else value


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _do(count: int) -> str:
    return "does" if count == 1 else "do"


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    if len(names) <= MAX_NAMED:
        return _joined(names)
    return f"{', '.join(names[:MAX_NAMED])} and {len(names) - MAX_NAMED:,} more"


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as spans: `ranks 0-3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = _listed([str(begin) if begin == end else f"{begin}-{end}" for begin, end in spans])
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
