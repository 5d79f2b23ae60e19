"""`bitcheck.record`: record a training program from inside it.

with bitcheck.record("runs/a", model=model, optimizer=optimizer) as rec:
    rec.track("ema", lambda: ema.shadow)
    for batch in data:
        ...
        optimizer.step()
        rec.step()
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bitcheck.environment import fingerprint
from bitcheck.errors import RecordingError, RunError, UsageError
from bitcheck.events import Level
from bitcheck.hooks.placement import this_placement
from bitcheck.hooks.recorder import Recorder, Trackable, active_recorder
from bitcheck.ranks import is_first_of_host
from bitcheck.run import create_run, open_run, rank_path, update_run, utc_now
from bitcheck.settings import leaf_limit_bytes, parse_steps
from bitcheck.store import RankWriter

_PATIENCE_S = 60.0
"""How long another rank waits for rank 0 to make the run's folder."""


class Recording:
    """A run that is being recorded from inside the program; made by `record`."""

    def __init__(
        self, folder: Path, recorder: Recorder, is_first_rank: bool, model: nn.Module | None, search: bool
    ) -> None:
        self.path = folder
        self._search = search
        self._recorder = recorder
        self._is_first_rank = is_first_rank
        self._model = model

    def __enter__(self) -> Recording:
        self._recorder.start(self._model, search_optimizers=self._search)
        self._model = None  # the program's to keep or to drop
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = kind is not None and not (kind is SystemExit and not getattr(error, "code", None))
        self._recorder.stop("failed" if failed else "complete")
        if not self._is_first_rank:
            return
        complete = not failed and self._recorder.trouble is None
        status = {
            "status": "complete" if complete else "failed",
            "ended": utc_now(),
        }
        try:
            update_run(self.path, **status)
        except RecordingError as trouble:
            if self._recorder.trouble is None:
                print(f"bitcheck: {trouble}", file=sys.stderr, flush=True)

    def step(self) -> None:
        """End the step here; call it after the optimizer stepped.

        Where it is left out, a step ends at the first forward after the optimizer's step. It has no
        effect where an optimizer is known and did not step, as when a GradScaler skips one.
        """
        self._recorder.step()

    def track(self, name: str, tensors: Trackable | Callable[[], Any]) -> None:
        """Record more tensors at the end of every step: an average of the weights, a loader's state.

        `tensors` is a tensor, a (nested) mapping or sequence of tensors, or a callable that returns
        one; the callable is asked when the state is taken.
        """
        self._recorder.track(name, tensors)


def record(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | list[Optimizer] | None = None,
    *,
    level: str = "module",
    start_step: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    steps: str | None = None,
    every: int = 1,
    leaves: str | int = 2**20,
    strict: bool = False,
    overwrite: bool = False,
    own_folder: bool = False,
) -> Recording:
    """Return a context manager that records the training inside it into the folder `path`.

    `model` and `optimizer` may be left out: modules are known from their first call, optimizers are
    looked up. `level` is `state`, `module` or `op`. `start_step` is the number of the first step, for
    a resumed run. `rank` and `world_size` come from torch.distributed or the launcher's environment.
    `steps` ("A:B") and `every` limit what is kept and paid; `leaves` is `all`, `none` or the size up
    to which a tensor keeps the digests of its pieces. With `strict` a recording that fails makes the
    program fail. Every rank calls this with the same path; with `own_folder` that is a folder of each
    host's own, and `bitcheck merge` gathers them afterwards.

    Raises RecordingError where the folder is in use or cannot be written, UsageError for arguments
    that make no sense.
    """
    folder = Path(path)
    try:
        wanted = Level(level)
    except ValueError:
        raise UsageError(f"level {level!r}: expected one of {', '.join(Level)}") from None
    if every < 1:
        raise UsageError(f"every={every}: expected 1 or more")
    if start_step is not None and start_step < 0:
        raise UsageError(f"start_step={start_step}: expected 0 or more")
    kept: tuple[int | None, int | None] = parse_steps(steps) if steps is not None else (None, None)
    limit = leaf_limit_bytes(leaves)
    own_rank, ranks, _ = this_placement()
    own_rank = own_rank if rank is None else rank
    ranks = max(ranks if world_size is None else world_size, own_rank + 1)
    makes_run = is_first_of_host(os.environ) if own_folder and ranks > 1 else own_rank == 0
    if makes_run:
        info = {"command": [sys.executable, *sys.argv], "cwd": os.getcwd(), "level": str(wanted), "world_size": ranks}
        info |= {"start_step": start_step, "leaves": leaves, "steps": steps, "every": every, "recorder": "record"}
        create_run(folder, info, overwrite)

    def open_store() -> RankWriter:
        run_id = _wait_for_run(folder)
        return RankWriter(
            rank_path(folder, own_rank),
            rank=own_rank,
            world_size=ranks,
            level=wanted,
            run_id=run_id,
            leaf_limit_bytes=limit,
        )

    def describe() -> None:
        if makes_run:
            update_run(folder, environment=fingerprint())

    recorder = Recorder(
        open_store,
        level=wanted,
        start_step=start_step or 0,
        steps=kept,
        every=every,
        is_strict=strict,
        on_first_step=describe,
    )
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or []
    for one in given:
        recorder.optimizers.add(one)
    return Recording(folder, recorder, makes_run, model, search=not given)


def _wait_for_run(folder: Path) -> str:
    """Return the run's id, as soon as rank 0 has made its folder."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with open_run(folder, allow_missing_ranks=True) as run:
                return run.run_id
        except RunError as error:
            if time.monotonic() > deadline:
                raise RecordingError(
                    f"{folder}: no run.json after {_PATIENCE_S:.0f} s; rank 0 makes it: {error}\n"
                    "Give every rank the same path, on a file system that all of them see; where each host has one of "
                    "its own: own_folder=True, and `bitcheck merge` afterwards."
                ) from None
        time.sleep(0.05)


def track(name: str, tensors: Trackable | Callable[[], Any]) -> None:
    """Record more tensors at the end of every step; without effect where nothing is being recorded.

    For programs that are run by `bitcheck run`: see `Recording.track`.
    """
    recorder = active_recorder()
    if recorder is not None:
        recorder.track(name, tensors)
