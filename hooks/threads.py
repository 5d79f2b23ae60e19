"""Operations of threads that the recorder does not look into: counted, so that an answer can say so.

A dispatch mode belongs to one thread. Threads that Python starts while a recorder is attached get a
mode that only counts; nothing of what they run is changed, or recorded as part of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bitcheck.hooks.dynamo import UnseenMode, is_quiet, skip_frame
from bitcheck.hooks.op_schema import facts_of


class ThreadWatch:
    """Counts operations in other threads than the one it is made in."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._original: Any = None
        self._wrapper: Any = None

    def install(self) -> None:
        """Have every thread that starts from now on counted."""
        kind: Any = threading.Thread
        original, note = kind._bootstrap_inner, self._note

        def _bootstrap_inner(thread: Any) -> None:
            if getattr(getattr(thread, "_target", None), "__module__", "").startswith("bitcheck."):
                original(thread)
                return
            with _Counter(thread.name, note):
                original(thread)

        self._original, self._wrapper = original, _bootstrap_inner
        kind._bootstrap_inner = _bootstrap_inner

    def remove(self) -> None:
        """Let threads start as ever; those that run are counted on, to no effect."""
        kind: Any = threading.Thread
        if self._original is not None and kind._bootstrap_inner is self._wrapper:
            kind._bootstrap_inner = self._original
        self._original = None


class _Counter(UnseenMode):
    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        super().__init__()
        self._sentence = f"operations in thread {name}, which is not looked into"
        self._note_one = note

    @skip_frame
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if facts_of(func).is_recorded and not is_quiet():
            self._note_one(self._sentence)
        return func(*args, **(kwargs or {}))
