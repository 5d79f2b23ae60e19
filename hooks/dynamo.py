"""Keeping out of the program's way: of torch.compile, and of the recorder's own looks at operations.

While a compiled program runs what its graphs could not hold, TorchDynamo looks at every Python frame
and compiles the ones it can: ours, too, which would give the modules below them other graphs than in
the bare program. So the frames that lead from a module's call to its forward are marked to be passed
over (`skip_frame`), and whatever the recorder does of its own runs with TorchDynamo off (`paused`).

What the recorder computes for itself is no operation of the program: `is_quiet` says in which threads
one of its functions is running.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitcheck.errors import BitcheckError
from bitcheck.hooks.native import native

_dynamo: Any = torch._C._dynamo.eval_frame
pause: Callable[[Any], Any] = _dynamo.set_eval_frame
"""`before = pause(None)` turns TorchDynamo off in this thread, `pause(before)` puts it back."""


_no_function: Any = torch._C.DisableTorchFunction


class _Local(threading.local):
    depth = 0


_local = _Local()
on_error: list[Callable[[Exception], None]] = []
"""Who hears of a mistake of the recorder's own: it ends the recording and never the program."""

F = TypeVar("F", bound=Callable[..., Any])


_skipped: set[CodeType] = set()
"""Frames that were marked; marking one again would only cost time."""


def skip_frame(function: F) -> F:
    """Have TorchDynamo pass over the function's own frame, but look at those that it calls."""
    code = function.__code__
    if code in _skipped:
        return function
    _skipped.add(code)
    if hasattr(_dynamo, "set_code_exec_strategy"):
        action = _dynamo._FrameAction
        _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    else:
        _dynamo.skip_code(code)
    return function


def paused(function: F) -> F:
    """Run the function with TorchDynamo off, its operations unseen by the recorder and the program's modes.

    Where it fails and somebody listens (`on_error`), the error ends there and the function returns None.
    A BitcheckError is meant for the program and goes on to it.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = pause(None)
        _local.depth += 1
        try:
            with _no_function():
                return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  told, or raised again
            _tell_error(error)
            return None
        finally:
            _local.depth -= 1
            pause(before)

    return skip_frame(run)  # type: ignore[return-value]


def _tell_error(error: Exception) -> None:
    """Tell an error of the recorder's own to who listens; raise it where nobody does, or it is for the program."""
    if isinstance(error, BitcheckError) or not on_error:
        raise error
    on_error[-1](error)


if native is not None:
    native.configure(set_eval_frame=pause, no_function=_no_function, local_depth=_local, tell_error=_tell_error)


def quiet(function: F) -> F:
    """Run a function of the program's without its operations being recorded."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _local.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _local.depth -= 1

    return run  # type: ignore[return-value]


def is_quiet() -> bool:
    """Say whether a function of the recorder's own is running in this thread."""
    return _local.depth > 0 or (native is not None and native.is_paused())


class UnseenMode(TorchDispatchMode):
    """A mode that looks at operations and changes none: torch.compile does what it does without it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch.compile do what it does without this mode."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay out of compilation; see what a compiled region dispatches when it runs."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
