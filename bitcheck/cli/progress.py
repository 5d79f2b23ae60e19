"""Progress of long work: on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY_S = 0.5
"""Work that takes less shows nothing."""


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of (done, total) that draws a bar, None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    import time

    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, visible=False)
        begin = time.monotonic()

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=time.monotonic() - begin > DELAY_S)

        yield update
