"""What `bitcheck run` puts into a process, right after the program's `import torch`.

A recorder is attached at once and stays passive: it opens the rank's file when the process shows
that it trains (a forward with gradients enabled, an optimizer's step). Launchers, evaluators and
data workers import torch too and never get that far.

One process records a rank, the first that trains as that rank; others that train are counted. A
process forked from a recorded one records nothing, nor does a daemonic one (data loader and pool
workers), whatever it runs.

Processes leave word for the launcher in small files, a line a word:

    {"what": "attached"}
    {"what": "claimed", "rank": 0, "world_size": 1}
    {"what": "refused", "rank": 0}                       trained, not recorded
    {"what": "failed", "reason": "..."}                  the recording could not begin or go on
    {"what": "stepped"}                                  an optimizer stepped
    {"what": "ended", "taken": 800, "kept": 80}
    {"what": "varied", "change": "data-loading processes: 0 -> 1"}
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import multiprocessing.util
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitcheck.errors import BitcheckError, RecordingError
from bitcheck.events import Level, StepColumns
from bitcheck.hooks.placement import this_placement
from bitcheck.hooks.writer import Store
from bitcheck.ranks import Placement
from bitcheck.settings import WORKERS_VARIABLE, Options, Settings, leaf_limit_bytes, parse_steps, read_settings


def attach(content: Mapping[str, Any]) -> None:
    """Attach to this process what the launcher asked for; `content` is the parsed `Settings.to_json`."""
    settings = read_settings(content)
    leave_word(settings, "attached")
    if settings.options is not None:
        Attachment(settings, settings.options).begin()
    if os.environ.get(WORKERS_VARIABLE):
        from bitcheck.hooks.loaders import add_worker

        add_worker(settings)
    if settings.scan is not None:
        from bitcheck.hooks.scan import begin_scan

        begin_scan(settings)
    if settings.step_times:
        from bitcheck.hooks.step_times import watch_step_times

        watch_step_times(settings)
    if settings.final is not None:
        from bitcheck.hooks.final import watch_final_state

        watch_final_state(settings)


def is_worker() -> bool:
    """Say whether this is a daemonic process: a data loader's, a pool's. Its modules are no training."""
    return multiprocessing.current_process().daemon


def leave_word(settings: Settings, what: str, **details: Any) -> None:
    """Leave a word for the launcher; where that cannot be, the program goes on all the same."""
    line = json.dumps({"what": what, **details}) + "\n"
    path = Path(settings.words) / f"{socket.gethostname()}-{os.getpid()}.jsonl"
    with suppress(OSError), path.open("a", encoding="ascii") as file:
        file.write(line)


def call_at_end(end: Callable[[], None]) -> None:
    """Call `end` when this process ends by itself, before what was registered earlier (torch's, gloo's).

    The children of multiprocessing end without `atexit`; they run its finalizers instead.
    """
    atexit.register(end)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, end, exitpriority=100)


def call_when_spawned(then: Callable[[], None]) -> None:
    """Call `then` in a spawned process of multiprocessing as soon as it is known which process it is."""
    kind: Any = multiprocessing.process.BaseProcess
    original = kind._bootstrap

    def _bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        kind._bootstrap = original
        run = process.run

        def begin_then_run() -> None:
            del process.run
            then()
            run()

        process.run = begin_then_run
        return original(process, *args, **kwargs)

    kind._bootstrap = _bootstrap


def ending_status() -> str:
    """Return `failed` where an exception is what ends this process, else `complete`.

    Python sets `sys.last_type` for an exception that nobody caught (also Ctrl-C). It says nothing of
    `sys.exit(3)`: that the launcher sees, and writes into run.json.
    """
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return "complete" if error.code in (None, 0) else "failed"
    return "failed" if error is not None or getattr(sys, "last_type", None) is not None else "complete"


class Attachment:
    """The recorder of this process, and what becomes of it in the processes forked from here."""

    def __init__(self, settings: Settings, options: Options) -> None:
        from bitcheck.hooks.recorder import Recorder

        self._settings = settings
        self._options = options
        self._placement = Placement(0, 1, "")
        self._is_refused = False
        self._pid = 0
        """The process that records, 0 as long as none does."""
        self._recorder = Recorder(
            self._open_store,
            level=Level(options.level),
            start_step=options.start_step or 0,
            steps=(None, None) if options.steps is None else parse_steps(options.steps),
            every=options.every,
            is_strict=options.strict,
            capture=options.capture,
            with_lines=options.stacks,
            on_first_step=self._describe_run,
            on_trouble=self._tell,
        )

    def begin(self) -> None:
        """Attach; nothing is written before the program trains."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            call_when_spawned(self._begin)  # multiprocessing imports the program before it says what for
        else:
            self._begin()

    def _begin(self) -> None:
        if is_worker():
            self._note_first_step("refused", rank=this_placement().rank)
            return
        self._recorder.start()
        os.register_at_fork(after_in_child=self._after_fork)
        multiprocessing.util.register_after_fork(self, Attachment._after_process_start)

    # --- a process that trains

    def _open_store(self) -> Store:
        settings, options = self._settings, self._options
        from bitcheck.run import rank_path

        try:
            from bitcheck.store import RankWriter
        except ImportError as error:
            raise RecordingError(f"this Python ({sys.executable}) lacks what bitcheck needs: {error}") from None
        self._placement = placement = this_placement()
        path = rank_path(Path(settings.folder), placement.rank)
        try:
            store = RankWriter(
                path,
                rank=placement.rank,
                world_size=placement.world_size,
                level=Level(options.level),
                run_id=settings.run_id,
                leaf_limit_bytes=leaf_limit_bytes(options.leaves),
            )
        except RecordingError:
            if not path.exists():
                raise
            self._is_refused = True
            self._recorder.detach()
            leave_word(settings, "refused", rank=placement.rank)
            return _Nowhere()
        self._pid = os.getpid()
        leave_word(settings, "claimed", rank=placement.rank, world_size=placement.world_size)
        self._note_first_step("stepped")
        call_at_end(self._end)
        return store

    def _describe_run(self) -> None:
        """Write into run.json what is known at the first step only."""
        if self._is_refused or self._placement.rank != 0:
            return
        from bitcheck.environment import fingerprint
        from bitcheck.run import update_run

        update_run(Path(self._settings.folder), environment=fingerprint(), world_size=self._placement.world_size)

    def _end(self) -> None:
        """End the recording with the program. A second call, or one in a forked process, does nothing."""
        recorder = self._recorder
        if self._pid != os.getpid() or not recorder.has_started:
            return
        recorder.stop(ending_status())
        self._pid = 0
        first = self._options.start_step or 0
        begin, end = parse_steps(self._options.steps or ":")
        kept = range(first, first + recorder.num_steps)
        kept = kept[max(begin - first, 0) : None if end is None else max(end - first, 0)]
        num_kept = sum(step % self._options.every == 0 for step in kept)
        leave_word(self._settings, "ended", taken=recorder.num_steps, kept=num_kept)

    def _tell(self, error: BitcheckError) -> None:
        print(f"bitcheck: {error}", file=sys.stderr)
        leave_word(self._settings, "failed", reason=str(error))

    # --- processes that do not record

    def _after_fork(self) -> None:
        """In a process forked from one that records: record nothing (the store leaves the file alone)."""
        if not self._pid:
            return  # it does not record yet, and either of the two may be the one that trains
        self._recorder.detach()
        self._pid = 0
        self._note_first_step("refused", rank=self._placement.rank)

    def _after_process_start(self) -> None:
        """In a process that multiprocessing forked, once it is known what it is for."""
        if self._recorder.is_active and is_worker():
            self._recorder.detach()
            self._note_first_step("refused", rank=this_placement().rank)

    def _note_first_step(self, what: str, **details: Any) -> None:
        """Leave a word when an optimizer has stepped for the first time."""

        waiting = [what]

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            # It stays: a hook that removes itself breaks PyTorch's iteration over those after it.
            if waiting:
                leave_word(self._settings, waiting.pop(), **details)

        register_optimizer_step_post_hook(note)


class _Nowhere:
    """Takes the steps of a process whose rank another process records; there are none."""

    leaf_limit_bytes: int | None = 0

    def append(self, record: StepColumns) -> None:
        """Drop a step."""

    def close(self, status: str) -> None:
        """Do nothing."""
