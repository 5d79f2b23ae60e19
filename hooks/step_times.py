"""What `bitcheck tax` asks of a process: how long its steps take. One hook on optimizers, nothing is recorded.

A step is what lies between two steps of the first optimizer that stepped. On a GPU the time is taken
where the work is, by an event on the current stream, so that nothing waits. Each rank leaves

    rank-00000.times    {"seconds": [0.41, 0.39, ...], "clock": "gpu"}
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitcheck.hooks.attach import call_at_end, is_worker
from bitcheck.hooks.placement import this_placement
from bitcheck.settings import Settings


def watch_step_times(settings: Settings) -> None:
    """Time this process's steps, from the first step of an optimizer on."""
    _Watch(Path(settings.step_times)).begin()


class _Watch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._optimizer: Optimizer | None = None
        self._pid = 0
        self._marks: list[Any] = []
        """`torch.cuda.Event`s, or seconds of the process's clock."""

    def begin(self) -> None:
        """Install the hook."""
        self._handle = register_optimizer_step_post_hook(self._stepped)
        call_at_end(self._write)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            if is_worker():
                return
            self._optimizer, self._pid = optimizer, os.getpid()
        if optimizer is not self._optimizer or self._pid != os.getpid():
            return
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _write(self) -> None:
        if self._pid != os.getpid() or len(self._marks) < 2:
            return
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if isinstance(self._marks[0], float):
            clock, seconds = "cpu", [later - earlier for earlier, later in pairs if isinstance(later, float)]
        else:
            torch.cuda.synchronize()
            clock, seconds = "gpu", [earlier.elapsed_time(later) / 1000 for earlier, later in pairs]
        path = self._folder / f"rank-{this_placement().rank:05d}.times"
        path.write_text(json.dumps({"seconds": seconds, "clock": clock}), encoding="ascii")
