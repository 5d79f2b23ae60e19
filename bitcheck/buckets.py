"""The buckets in which DistributedDataParallel reduces gradients, where a communication hook of the program's does it.

A collective inside such a hook has `.bucket` at the end of its path, and its contribution has the gradients
in the bucket as inputs, in their order. DistributedDataParallel lays its buckets out anew after the first
step. So in the first step after a restart the contributions of two runs can differ though every gradient
in them is equal: they hold other gradients, or the same ones in another order.

Place in the flow: pairing -> *buckets* -> origins.
"""

from __future__ import annotations

from bitcheck.events import Phase, Site
from bitcheck.pairing import StepPair
from bitcheck.roles import is_argument
from bitcheck.views import StepView

SUFFIX = ".bucket"


def is_of_bucket(site: Site) -> bool:
    """Whether a collective reduced a bucket of gradients, or what a hook made of it."""
    return site.phase is Phase.COMM and site.path.endswith(SUFFIX)


def has_other_buckets(pair: StepPair) -> bool:
    """Whether the two runs laid their buckets out differently in a step, on one rank."""
    return _plan(pair.baseline) != _plan(pair.candidate)


def _plan(step: StepView) -> list[tuple[Site, tuple[int, ...], tuple[Site, ...]]]:
    """Return each contribution's site, shape and gradients."""
    plan = []
    for index, site in enumerate(step.sites):
        if is_of_bucket(site) and is_argument(site):
            inputs = step.inputs[int(step.input_ptr[index]) : int(step.input_ptr[index + 1])].tolist()
            plan.append((site, tuple(step.shapes[index]), tuple(step.sites[number] for number in inputs)))
    return plan
