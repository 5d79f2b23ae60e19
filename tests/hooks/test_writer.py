"""The writer's thread: steps in their order, what devices send in between, a training that waits for a slow disk."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bitcheck.errors import BitcheckError, DigestError, RecordingError
from bitcheck.events import StepColumns, StepKind
from bitcheck.hooks.steps import Digesters, StepBuilder
from bitcheck.hooks.writer import MAX_WAITING_STEPS, StepWriter


class SlowStore:
    """Writes a step once `go` says so."""

    leaf_limit_bytes: int | None = None

    def __init__(self) -> None:
        self.log: list[str] = []
        self.go = threading.Event()
        self.error: BitcheckError | None = None

    def append(self, record: StepColumns) -> None:
        self.go.wait(10)
        if self.error is not None:
            raise self.error
        self.log.append(f"step {record.step}")

    def close(self, status: str) -> None:
        self.log.append(status)


def a_step(number: int) -> StepBuilder:
    return StepBuilder(number, StepKind.STEP, True, Digesters(lambda num_bytes: True, lambda land: None))


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_a_device_sent_is_taken_before_the_step_that_it_belongs_to() -> None:
    store, told = SlowStore(), list[BitcheckError]()
    writer = StepWriter(store, told.append)
    writer.put(a_step(0))
    writer.take(lambda: store.log.append("landed"))
    writer.put(a_step(1))
    store.go.set()
    writer.close("complete")
    assert store.log == ["step 0", "landed", "step 1", "complete"]
    assert not told


def test_a_device_that_fails_meanwhile_is_told_by_the_step_and_not_twice() -> None:
    def fail() -> None:
        raise DigestError("the device failed")

    store, told = SlowStore(), list[BitcheckError]()
    store.go.set()
    writer = StepWriter(store, told.append)
    writer.take(fail)
    writer.put(a_step(0))
    writer.close("complete")
    assert store.log == ["step 0", "complete"]
    assert not told


def test_the_training_waits_where_the_disk_cannot_keep_up_and_what_devices_send_does_not() -> None:
    store = SlowStore()
    writer = StepWriter(store, lambda error: None)
    for number in range(MAX_WAITING_STEPS):
        writer.put(a_step(number))
    writer.take(lambda: store.log.append("landed"))
    training = in_thread(lambda: writer.put(a_step(MAX_WAITING_STEPS)))
    training.join(0.2)
    assert training.is_alive()
    store.go.set()
    training.join(10)
    writer.close("complete")
    assert store.log == [*(f"step {n}" for n in range(MAX_WAITING_STEPS)), "landed", "step 4", "complete"]


def test_after_an_error_nothing_waits_for_ever_and_nothing_is_written() -> None:
    store, told = SlowStore(), list[BitcheckError]()
    store.error = RecordingError("the disk is full")
    store.go.set()
    writer = StepWriter(store, told.append)
    for number in range(2 * MAX_WAITING_STEPS):
        writer.put(a_step(number))
    writer.take(lambda: store.log.append("landed"))
    writer.drain()
    writer.close("complete")
    assert store.log == ["failed"]
    assert told == [store.error]


def test_what_is_put_behind_the_end_is_waited_for_by_nobody() -> None:
    store = SlowStore()
    store.go.set()
    writer = StepWriter(store, lambda error: None)
    writer.put(a_step(0))
    writer.drain()
    assert store.log == ["step 0"]
    writer.close("complete")
    writer.take(lambda: store.log.append("too late"))
    waits = in_thread(writer.drain)
    waits.join(10)
    assert not waits.is_alive()
    assert store.log == ["step 0", "complete"]
