"""Whether activation recompute gave back what the forward pass had computed, within one run.

A checkpointed call runs twice: in the forward pass and again in the backward pass. Where the second
run had the same inputs as the first and gave other outputs (another dropout mask, a buffer that
moved in between), the gradients belong to activations that never were. Two runs that do so alike
are identical and wrong alike, so this is looked at within each run.

Place in the flow: roles -> *recompute* -> diff.
"""

from __future__ import annotations

from bitcheck.events import Phase
from bitcheck.roles import is_argument, is_operation
from bitcheck.views import StepView

_Call = tuple[str, str, int, bool]
_Slots = dict[str, bytes]


def inconsistent_recomputes(step: StepView) -> list[tuple[str, str]]:
    """Return (root, path) of the innermost modules whose recompute differs from their forward.

    A recompute is compared with the forward calls of the same module that had the same inputs; it
    is inconsistent where there are some and none of them gave its outputs. Its own forward may be
    marked as an evaluation: reentrant checkpointing runs it without gradients, and that is how a
    module in evaluation mode is told. So evaluations excuse a recompute, and accuse none.
    """
    forwards: dict[tuple[str, str], list[tuple[bool, _Slots, _Slots]]] = {}
    for (root, path, _, is_eval), call in _calls(step, Phase.FORWARD).items():
        forwards.setdefault((root, path), []).append((is_eval, *call))
    found = set()
    for (root, path, _, _), (arguments, outputs) in _calls(step, Phase.RECOMPUTE).items():
        if not arguments or not outputs:
            continue
        same = [(is_eval, theirs) for is_eval, ours, theirs in forwards.get((root, path), []) if ours == arguments]
        has_forward = not all(is_eval for is_eval, _ in same)
        if has_forward and not any(outputs.items() <= theirs.items() for _, theirs in same):
            found.add((root, path))
    return sorted(place for place in found if not any(_is_inside(other, place) for other in found))


def _calls(step: StepView, phase: Phase) -> dict[_Call, tuple[_Slots, _Slots]]:
    """Calls of a phase: (root, path, occurrence, is evaluation) -> digests of arguments and of outputs.

    What data the outermost module of a forward pass is given is in phase `batch`; in its recompute
    it is an argument like any other. Operations inside have occurrences of their own and say nothing
    of which call they belong to.
    """
    phases = (phase, Phase.BATCH) if phase is Phase.FORWARD else (phase,)
    calls: dict[_Call, tuple[_Slots, _Slots]] = {}
    for index, site in enumerate(step.sites):
        if site.phase not in phases:
            continue
        group = int(step.group_of[index])
        if group >= 0 and is_operation(step.groups[group]):
            continue
        arguments, outputs = calls.setdefault((site.root, site.path, site.occurrence, site.is_eval), ({}, {}))
        slots = arguments if is_argument(site) else outputs
        slots[site.slot] = step.digests[index].tobytes()
    return calls


def _is_inside(inner: tuple[str, str], outer: tuple[str, str]) -> bool:
    if inner == outer or inner[0] != outer[0]:
        return False
    return not outer[1] or inner[1].startswith(outer[1] + ".")
