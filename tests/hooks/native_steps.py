"""Record many steps in a process of its own: `python -m tests.hooks.native_steps LEVEL` prints what they keep.

A line of JSON: how many allocated blocks, objects of the garbage collector, and references to things that every step
refers to there are after 350 steps more than after 150.
"""

from __future__ import annotations

import gc
import json
import sys

import torch

from bitcheck.events import Level, Phase, StepColumns
from bitcheck.hooks.recorder import Recorder
from tests.hooks.programs import mlp


class Nowhere:
    """In place of a rank's file: what that takes is not to be measured."""

    leaf_limit_bytes = 0

    def append(self, record: StepColumns) -> None:
        """Take a step."""
        assert len(record)

    def close(self, status: str) -> None:
        """Have nothing to close."""


def kept(level: Level) -> list[int]:
    """Return what 200 steps leave behind."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # AdamW's numbers are new in each step, and are kept
    x = torch.randn(6, 8)
    recorder = Recorder(Nowhere, level=level)
    recorder.start(model, search_optimizers=True)

    def steps(count: int) -> list[int]:
        for _ in range(count):
            hidden = torch.empty(6, 3)
            hidden[:] = model(x)
            torch.cat([hidden, hidden.t().reshape(6, 3)]).sort()[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.step()
        recorder.drain()
        gc.collect()
        facts = recorder.ops._facts.values() if recorder.ops is not None else ()
        shared = (None, True, False, (), 0, 1, "", torch.float32, torch.strided, *Phase, *facts)
        return [sys.getallocatedblocks(), len(gc.get_objects()), *map(sys.getrefcount, shared)]

    steps(150)  # until all that is kept for the next step is there
    before, after = steps(1), steps(200)
    recorder.stop("complete")
    return [now - then for then, now in zip(before, after, strict=True)]


if __name__ == "__main__":
    print(json.dumps(kept(Level(sys.argv[1]))))
