"""Whether activation recompute gave back what the forward pass had computed, within one run.

A checkpointed call runs twice: in the forward pass and again in the backward pass. Where the second
run had the same inputs as the first and gave other outputs (another dropout mask, a buffer that
moved in between), the gradients belong to activations that never were. Two runs that do so alike
are identical and wrong alike, so this is looked at within each run.

Place in the flow: views -> *recompute* -> diff.
"""

from __future__ import annotations

from bitcheck.events import Phase
from bitcheck.views import StepView

_Call = tuple[str, str, int]
_Slots = dict[str, bytes]


def inconsistent_recomputes(step: StepView) -> list[tuple[str, str]]:
    """Return (root, path) of the innermost modules whose recompute differs from their forward.

    A recompute is compared with the forward calls of the same module that had the same inputs; it
    is inconsistent where there are some and none of them gave its outputs.
    """
    forwards: dict[tuple[str, str], list[tuple[_Slots, _Slots]]] = {}
    for (root, path, _), call in _calls(step, Phase.FORWARD).items():
        forwards.setdefault((root, path), []).append(call)
    found = set()
    for (root, path, _), (arguments, outputs) in _calls(step, Phase.RECOMPUTE).items():
        if not arguments or not outputs:
            continue
        same = [theirs for ours, theirs in forwards.get((root, path), []) if ours == arguments]
        if same and not any(outputs.items() <= theirs.items() for theirs in same):
            found.add((root, path))
    return sorted(place for place in found if not any(_is_inside(other, place) for other in found))


def _calls(step: StepView, phase: Phase) -> dict[_Call, tuple[_Slots, _Slots]]:
    """Calls of a phase outside evaluation: (root, path, occurrence) -> digests of arguments and of outputs."""
    calls: dict[_Call, tuple[_Slots, _Slots]] = {}
    for index, site in enumerate(step.sites):
        if site.phase is not phase or site.is_eval:
            continue
        arguments, outputs = calls.setdefault((site.root, site.path, site.occurrence), ({}, {}))
        slots = arguments if site.slot.partition(".")[0] == "in" else outputs
        slots[site.slot] = step.digests[index].tobytes()
    return calls


def _is_inside(inner: tuple[str, str], outer: tuple[str, str]) -> bool:
    if inner == outer or inner[0] != outer[0]:
        return False
    return not outer[1] or inner[1].startswith(outer[1] + ".")
