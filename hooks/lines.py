"""The Python line that asked for an operation, for `--stacks`.

    train.py:31 in forward
    of the forward, line train.py:31 in forward

The line is the innermost one outside PyTorch and bitcheck. Within backward that is only a line that runs
there itself: of a custom function, a hook, a recompute. Where autograd computes in C++ there is none, and
what is said is the line of the forward operation whose gradient is computed, found by the number that
autograd gives to the two. Place in the flow: ops -> *lines* -> the event's value.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from bitcheck.events import Phase
from bitcheck.hooks.modules import in_backward, next_node
from bitcheck.wording import OF_FORWARD

_FOREIGN = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep)
"""Folders whose frames are passed over: PyTorch's and this package's."""
_ENGINE = ("_engine_run_backward", str(Path("torch", "autograd", "graph.py")))
"""The function that hands over to autograd's engine, and the file that it is in: frames above it began a backward."""
_MAX_KEPT = 1 << 16


class Lines:
    """Knows which line asked for which operation."""

    def __init__(self) -> None:
        self._of_node: dict[int, str] = {}
        self._is_foreign: dict[str, bool] = {}

    def note(self, phase: Phase) -> str | None:
        """Return the line that asks for the operation that is about to run, None where no Python does."""
        line, is_own = self._current()
        if in_backward() and not is_own:
            node = torch._C._current_autograd_node()
            found = self._of_node.get(node._sequence_nr()) if node is not None else None
            return line if found is None else OF_FORWARD + found
        if line is not None and phase is not Phase.OPTIM:
            if len(self._of_node) > _MAX_KEPT:
                self._of_node.clear()
            # Autograd has made the node by the time the operation is dispatched below it.
            self._of_node[next_node() - 1] = line
        return line

    def _current(self) -> tuple[str | None, bool]:
        """Return the innermost line of the program, and whether it is below the innermost backward, if any runs."""
        frame = sys._getframe(2)
        is_own = True
        while frame is not None:
            code = frame.f_code
            is_own = is_own and not (code.co_name == _ENGINE[0] and code.co_filename.endswith(_ENGINE[1]))
            foreign = self._is_foreign.get(code.co_filename)
            if foreign is None:
                foreign = code.co_filename.startswith((*_FOREIGN, "<")) or "/bitcheck/hooks/" in code.co_filename
                self._is_foreign[code.co_filename] = foreign
            if not foreign:
                return f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}", is_own
            frame = frame.f_back  # type: ignore[assignment]
        return None, False


def _short(name: str) -> str:
    """A file as seen from the working directory, where it lies below it."""
    try:
        return str(Path(name).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return name
