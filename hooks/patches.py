"""Putting functions in the place of others, and putting those back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
_MISSING = object()


class Patches:
    """The functions that one recorder replaced."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Function]] = []

    def replace(self, holder: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Replace a function or a method by what `make` makes of it; nothing where there is none of that name."""
        if not hasattr(holder, name):
            return
        # A method of a class in C++ is a descriptor around a function: what is looked up could not be put back.
        kept = vars(holder).get(name, _MISSING)
        wrapper = make(getattr(holder, name))
        setattr(holder, name, wrapper)
        self._done.append((holder, name, kept, wrapper))

    def remove(self) -> None:
        """Put everything back, but for what somebody replaced once more."""
        for holder, name, kept, wrapper in reversed(self._done):
            if vars(holder).get(name) is not wrapper:
                continue
            if kept is _MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, kept)
        self._done = []
