"""What an event is in a step, read off its site and its computation: argument, result, local gradient, ...

Place in the flow: pairing -> *roles* -> attribution, causes.
"""

from __future__ import annotations

import re

from bitcheck.events import Group, Phase, Site
from bitcheck.pairing import StepPair

CALLS = (Phase.FORWARD, Phase.RECOMPUTE)
PROGRAM = "program"
"""The path of operations that run outside all modules."""
AFTER = " after "
"""Between the autograd node nearest to a gradient and those before it, in the name of a computation."""
LOCAL_GRADIENT_SLOTS = frozenset(
    (
        "grad",
        *(
            f"grad.{part}"
            for part in ("indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices")
        ),
    )
)
"""A parameter's gradient within phase `backward`, the parts of a sparse one included. (`grad.head.out` is the
gradient of the output of `head`, as code in the module around it computed it.)"""

NUMBERS = r"\.scalars(?:[#@]|$)"
"""Regular expression, found in sites and slots of the numbers, flags and words that the program gave an operation:
Python made them, no operation did, and they are no tensor."""


def are_numbers(site: str) -> bool:
    """Whether a site, or its slot, is that of the numbers, flags and words that the program gave an operation."""
    return re.search(NUMBERS, site) is not None


def is_local_gradient(site: Site) -> bool:
    """Whether it is a parameter's gradient as it leaves autograd, before any reduction."""
    return site.phase is Phase.BACKWARD and site.slot in LOCAL_GRADIENT_SLOTS


def has_local_gradients(pair: StepPair) -> bool:
    """Whether both runs recorded gradients as they leave autograd; level `state` does not."""
    return all(any(map(is_local_gradient, step.sites)) for step in (pair.baseline, pair.candidate))


def is_argument(site: Site) -> bool:
    """Whether it is an argument of a call, or a contribution to a collective."""
    return site.slot == "in" or site.slot.startswith("in.")


def is_given_by_program(phase: str, op: str | None) -> bool:
    """Whether an origin is what an outermost module was given: the code outside all modules computed it."""
    return phase in (Phase.FORWARD, Phase.RECOMPUTE) and op is None


def is_operation(group: Group | None) -> bool:
    """Whether a computation is one dispatched operation: all that it depends on is among its edges."""
    return group is not None and group.kind == "op"


def is_generator(site: Site) -> bool:
    """Whether it is a generator's state at the start of a step, not what one operation found it in."""
    return site.phase is Phase.RNG and site.slot == "state"


def is_result(site: Site, group: Group | None) -> bool:
    """Whether an operation wrote it, rather than read it."""
    slot = site.slot.removeprefix(group.op.partition(" in ")[0] + ".") if group is not None else site.slot
    return slot == "out" or slot.startswith("out.") or slot.endswith(".written")


def owner_of(path: str) -> str:
    """Return the path of the module that owns a parameter or a buffer."""
    return path.rpartition(".")[0]
