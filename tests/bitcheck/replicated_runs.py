"""Made-up data-parallel runs whose files say what the ranks replicate, with copies changed as planned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from bitcheck.events import Event, Phase, StepKind, StepRecord
from bitcheck.memory import MemoryRun
from bitcheck.placements import TensorPlacement
from bitcheck.replica_groups import REPLICATED_PHASES
from tests.bitcheck.made_up_runs import digest_of, make_run

Change = tuple[int, int, str]
"""(rank, step, the site as it is written): this copy is another from this step on."""
OnceAt = tuple[int, int, str]
"""The same, in this step alone."""


def replicate(
    run: MemoryRun,
    *,
    with_buffers: bool = True,
    changes: Collection[Change] = (),
    once: Collection[OnceAt] = (),
    placement: Callable[[int, Event], str] | None = None,
    edit: Callable[[int, StepRecord], None] | None = None,
) -> MemoryRun:
    """Return a run with placements, its buffers equal on all ranks where they are declared.

    `placement(rank, event)` tells where a tensor lies; left out, all ranks hold all of the state as under
    DistributedDataParallel. `edit` changes a record at last.
    """
    world = tuple(run.ranks)
    everywhere = TensorPlacement.of_ddp(world).to_text()
    steps = {rank: [copy.deepcopy(record) for record in records] for rank, records in run.steps.items()}
    for rank, records in steps.items():
        for number, record in enumerate(records):
            equal = {event.site: event for event in run.steps[world[0]][number].events}
            for event in record.events:
                text = event.site.text(with_root=False)
                if event.site.phase is Phase.BUFFER and with_buffers and rank != world[0]:
                    event.digest = event.leaves = equal[event.site].digest
                is_buffer = event.site.phase is Phase.BUFFER
                if event.site.phase in REPLICATED_PHASES and (with_buffers or not is_buffer):
                    event.placement = everywhere if placement is None else placement(rank, event)
            for event in record.events:
                text = event.site.text(with_root=False)
                is_state = event.site.phase in REPLICATED_PHASES
                changed = any((rank, text) == (r, t) and record.step >= s for r, s, t in changes)
                if is_state and (changed or (rank, record.step, text) in once):
                    event.digest = event.leaves = digest_of(event.digest, "flipped")
            if edit is not None and record.kind is not StepKind.FRAGMENT:
                edit(rank, record)
    run.steps = steps
    return run


def replicated_run(*, level: str = "module", num_ranks: int = 4, num_steps: int = 4, **plan: Any) -> MemoryRun:
    """Return `replicate(make_run(...))`; `plan` goes to `replicate`."""
    return replicate(make_run(level=level, num_ranks=num_ranks, num_steps=num_steps), **plan)
