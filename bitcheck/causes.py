"""From blamed events to origins: which cause word, which module and op, which elements.

| cause | an origin that is |
|---|---|
| `data` | a batch |
| `rng` | a generator's state |
| `forward` | a call's output, a loss, a buffer (a recompute too: its phase says so) |
| `backward` | a gradient inside autograd |
| `collective` | a collective's output, or the gradients the optimizer finds where every rank's own agree |
| `compute` | gradients at level `state`, tracked state, or a step before which steps went unrecorded |
| `optimizer` | parameters or optimizer state |
| `hyperparameter` | a scalar |
| `structure` | a site that one run lacks |
| `restore`, `initial-state` | a tensor of an initial snapshot |

Place in the flow: attribution -> *causes* -> diff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from bitcheck.answer import Cause, Origin
from bitcheck.attribution import Blame
from bitcheck.digest import differing_elements
from bitcheck.events import Group, Phase, Site
from bitcheck.naming import Naming
from bitcheck.pairing import Standing, StepPair
from bitcheck.roles import (
    CALLS,
    PROGRAM,
    are_numbers,
    has_local_gradients,
    is_argument,
    is_local_gradient,
    is_operation,
    is_result,
    owner_of,
)
from bitcheck.views import StepView

_CAUSE_OF_PHASE = {
    Phase.BATCH: Cause.DATA,
    Phase.RNG: Cause.RNG,
    Phase.FORWARD: Cause.FORWARD,
    Phase.RECOMPUTE: Cause.FORWARD,
    Phase.LOSS: Cause.FORWARD,
    Phase.BACKWARD: Cause.BACKWARD,
    Phase.BUFFER: Cause.FORWARD,
    Phase.PARAM: Cause.OPTIMIZER,
    Phase.OPTIM: Cause.OPTIMIZER,
    Phase.SCALAR: Cause.HYPERPARAMETER,
    Phase.EXTRA: Cause.COMPUTE,
}
READ_DIFFERENT = (
    "Every recorded operation that wrote this argument gave equal bits: the code passed other tensors, or in another "
    "order, or part of the memory was never written (torch.empty), or something that is not dispatched changed it (a "
    "kernel of one's own, numpy)."
)
_COMPUTED = (Cause.FORWARD, Cause.BACKWARD, Cause.OPTIMIZER, Cause.COLLECTIVE)
"""Causes that rest on the state before the step being equal."""


def describe_step_origins(
    blames: Iterable[Blame],
    pairs: Mapping[int, StepPair],
    step: int,
    naming: Naming,
    *,
    world_size: int,
    has_gap: bool,
) -> list[Origin]:
    """Return the blamed computations of one step as origins, earliest first.

    `has_gap`: the step before was not recorded, so what entered this one is unknown.
    """
    origins = []
    for blame in blames:
        pair = pairs[blame.shown.rank]
        cause = _cause_of(blame, pair, world_size)
        if has_gap and cause in _COMPUTED:
            cause = Cause.COMPUTE
        origin = describe_event(pair, blame.shown.position, step, cause, naming)
        also = dict.fromkeys(
            naming.site(pairs[place.rank].site(place.position)) for place in blame.members if place != blame.shown
        )
        also.pop(origin.site, None)
        ranks = blame.ranks if len(blame.ranks) > 1 else []
        group = pair.group(blame.shown.position)
        is_read = is_operation(group) and not is_result(pair.site(blame.shown.position), group)
        was_written = cause is Cause.DATA and bool(pair.inputs(blame.shown.position))
        if is_read and (cause in _COMPUTED or was_written):
            origin = replace(origin, remarks=(READ_DIFFERENT,))
        origins.append(replace(origin, also=tuple(also), ranks=tuple(ranks), order=blame.order))
    return origins


def describe_snapshot_difference(
    pairs: Mapping[int, StepPair], step: int, cause: Cause, naming: Naming
) -> list[Origin]:
    """Return every tensor of an initial snapshot that differs or is missing as an origin of its own."""
    return [
        describe_event(pair, position, step, cause, naming, with_op=False)
        for _, pair in sorted(pairs.items())
        for position in pair.parted()
    ]


def describe_event(
    pair: StepPair, position: int, step: int, cause: Cause, naming: Naming, *, with_op: bool = True
) -> Origin:
    """Return one event that differs or is missing as an origin."""
    site = pair.site(position)
    holder, index = pair.holder(position)
    group = pair.group(position)
    ours, theirs = int(pair.baseline_index[position]), int(pair.candidate_index[position])
    standing = Standing(int(pair.standing[position]))
    is_value = not _bears_line(holder, index)
    missing = {Standing.BASELINE_ONLY: "candidate", Standing.CANDIDATE_ONLY: "baseline"}.get(standing)
    return Origin(
        step=step,
        rank=pair.rank,
        phase=str(site.phase),
        site=naming.site(site),
        module=_module_of(site, group, naming),
        op=_op_of(site, group, pair) if with_op else None,
        tensor=_tensor_name(site, naming),
        dtype=holder.dtypes[index],
        shape=tuple(holder.shapes[index]),
        elements=_elements(pair, ours, theirs),
        cause=cause,
        missing_in=missing,
        baseline_value=pair.baseline.value(ours) if is_value and ours >= 0 else None,
        candidate_value=pair.candidate.value(theirs) if is_value and theirs >= 0 else None,
        line=_line_of(pair, position),
        is_eval=site.is_eval,
    )


def _cause_of(blame: Blame, pair: StepPair, world_size: int) -> Cause:
    site = pair.site(blame.shown.position)
    if blame.is_structural:
        return Cause.STRUCTURE
    if site.phase is Phase.COMM:
        return Cause.COMPUTE if is_argument(site) else Cause.COLLECTIVE
    group = pair.group(blame.shown.position)
    if group is not None and is_operation(group) and not is_result(site, group):
        if are_numbers(site.slot):
            return Cause.HYPERPARAMETER if site.phase is Phase.OPTIM else Cause.DATA
        if site.phase is Phase.FORWARD and site.path == PROGRAM:  # the program chose another tensor
            return Cause.DATA
    if site.phase is Phase.GRAD and is_operation(group):
        return Cause.BACKWARD  # clipping and the like, between backward and the optimizer
    if site.phase is Phase.GRAD:
        return Cause.COLLECTIVE if has_local_gradients(pair) and world_size > 1 else Cause.COMPUTE
    return _CAUSE_OF_PHASE[site.phase]


def _bears_line(step: StepView, index: int) -> bool:
    """Whether an event's value, where it has one, is a line: that of a tensor which an operation gave."""
    number = int(step.group_of[index])
    is_plain = step.dtypes[index].startswith(("python.", "numpy."))
    return number >= 0 and is_operation(step.groups[number]) and not is_plain


def _line_of(pair: StepPair, position: int) -> str | None:
    """The Python line of the operation: its results bear it, its arguments do not."""
    step, index = pair.holder(position)
    number = int(step.group_of[index])
    if number < 0 or not is_operation(step.groups[number]):
        return None
    members = np.flatnonzero(np.asarray(step.group_of) == number).tolist()
    lines = (step.value(member) for member in members if _bears_line(step, member))
    return next((line for line in lines if line is not None), None)


def _module_of(site: Site, group: Group | None, naming: Naming) -> str | None:
    if site.phase in CALLS:
        # An argument's group is the enclosing call, which made it.
        owner = group if group is not None and not is_argument(site) else site
        return naming.module(owner.root, owner.path)
    if group is not None and group.kind not in ("collective", "optimizer") and (group.root or group.path):
        return naming.module(group.root, group.path)
    if site.phase in (Phase.PARAM, Phase.BUFFER, Phase.OPTIM, Phase.GRAD) or is_local_gradient(site):
        return naming.module(site.root, owner_of(site.path))
    if site.phase is Phase.BATCH and (site.root or site.path):
        return naming.module(site.root, site.path)
    return None


def _op_of(site: Site, group: Group | None, pair: StepPair) -> str | None:
    if group is not None:
        return group.op or None
    if site.phase in (Phase.PARAM, Phase.OPTIM):
        labels = {other.root for other in pair.baseline.sites if other.phase is Phase.SCALAR}
        return labels.pop() if len(labels) == 1 else None
    return None


def _tensor_name(site: Site, naming: Naming) -> str:
    name = naming.module(site.root, site.path)
    if site.phase in (Phase.PARAM, Phase.BUFFER, Phase.GRAD):
        return name
    if site.phase in (Phase.OPTIM, Phase.SCALAR):
        return f"{name}.{site.slot}"
    return naming.site(site).partition("/")[2]


def _elements(pair: StepPair, ours: int, theirs: int) -> tuple[int, int] | None:
    if ours < 0 or theirs < 0:
        return None
    baseline, candidate = pair.baseline, pair.candidate
    shape = tuple(baseline.shapes[ours])
    if shape != tuple(candidate.shapes[theirs]) or baseline.dtypes[ours] != candidate.dtypes[theirs]:
        return None
    num_bytes = int(baseline.num_bytes[ours])
    if baseline.value(ours) is not None and not _bears_line(baseline, ours):
        return None
    count = math.prod(shape)
    itemsize = num_bytes // count if count else 0
    return differing_elements(baseline.leaves(ours), candidate.leaves(theirs), num_bytes, itemsize)
