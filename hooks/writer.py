"""The thread that writes finished steps, so that a slow disk does not slow the training.

Between steps it takes what devices send. Few steps may wait: where the disk cannot keep up the training does,
nothing is lost. The first error stops the writing for good and is told once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from bitcheck.errors import BitcheckError, DigestError, RecordingError
from bitcheck.events import StepColumns
from bitcheck.hooks.steps import StepBuilder

WRITER = "bitcheck-writer"
"""The thread's name."""
MAX_WAITING_STEPS = 4
"""Steps that may wait for the disk, that being written among them, before the training does."""


class Store(Protocol):
    """What a step is written to: `bitcheck.store.RankWriter`."""

    leaf_limit_bytes: int | None
    """Leaf digests are kept of tensors of up to so many bytes, of all where None."""

    def append(self, record: StepColumns) -> None:
        """Write one step and flush it."""

    def close(self, status: str) -> None:
        """End the file."""


class StepWriter:
    """Writes steps in the order in which they are handed over."""

    def __init__(self, store: Store, on_error: Callable[[BitcheckError], None]) -> None:
        self._store = store
        self._on_error = on_error
        self._queue: queue.SimpleQueue[StepBuilder | Callable[[], None] | threading.Event | None] = queue.SimpleQueue()
        """A simple one, since the cyclic collector may come by, and put something in, while something is put in."""
        self._room = threading.Semaphore(MAX_WAITING_STEPS)
        self.error: BitcheckError | None = None
        self._late: list[StepBuilder] = []
        self._thread = threading.Thread(target=self._run, name=WRITER, daemon=True)
        self._thread.start()

    def put(self, builder: StepBuilder) -> None:
        """Hand a step over; waits while the queue is full."""
        if self.error is not None:
            return
        if self.is_current():  # a model that is collected while a step is being written
            self._late.append(builder)
        else:
            self._room.acquire()
            self._queue.put(builder)

    def take(self, work: Callable[[], None]) -> None:
        """Do `work` in this thread, before the steps that come after: taking digests that a device has sent, say."""
        self._queue.put(work)

    def is_current(self) -> bool:
        """Say whether the thread that asks is this one."""
        return threading.current_thread() is self._thread

    def drain(self) -> None:
        """Wait until every step that was handed over is on the disk, or was given up."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def close(self, status: str) -> None:
        """Write what waits and end the file with `status`; a file that lost steps ends as `failed`."""
        self._queue.put(None)
        self._thread.join()
        try:
            self._store.close("failed" if self.error is not None else status)
        except BitcheckError as error:
            if self.error is None:
                self._fail(error)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, threading.Event):
                work.set()
            elif isinstance(work, StepBuilder):
                self._write(work)
                self._room.release()
            else:
                with suppress(DigestError):  # the step whose digests they are will tell
                    self._do(work)
            while self._late:
                self._write(self._late.pop(0))

    def _write(self, builder: StepBuilder) -> None:
        try:
            self._do(lambda: self._store.append(builder.finish()))
        except DigestError as error:
            self._fail(error)

    def _do(self, work: Callable[[], None]) -> None:
        """Do `work`, unless something went wrong before. Raises DigestError; any other error ends the recording."""
        if self.error is not None:
            return
        try:
            work()
        except DigestError:
            raise
        except BitcheckError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the training must go on and the user must know
            self._fail(RecordingError(f"writing a step failed: {type(error).__name__}: {error}"))

    def _fail(self, error: BitcheckError) -> None:
        self.error = error
        self._on_error(error)
