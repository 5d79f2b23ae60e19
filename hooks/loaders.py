"""More data-loading processes in a program that is recorded to see whether they change a bit.

`bitcheck gate --vary workers` sets a variable; where it is set, every DataLoader that the program makes
gets one worker more than it asks for. Nothing of this is done in any other recording.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.utils.data import DataLoader

from bitcheck.hooks.attach import leave_word
from bitcheck.settings import Settings


def add_worker(settings: Settings) -> None:
    """Let every DataLoader of this process have one worker more, and leave word where one was made."""
    original: Any = DataLoader.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        asked = given.arguments.get("num_workers", 0)
        given.arguments["num_workers"] = asked + 1
        leave_word(settings, "varied", change=f"data-loading processes: {asked} -> {asked + 1}")
        original(*given.args, **given.kwargs)

    DataLoader.__init__ = make  # type: ignore[method-assign]
