"""Launches of Triton kernels, by the user's code or by Inductor's, as operations.

    forward/net.mix:triton.add_kernel.x_ptr            a pointer argument before the launch
    forward/net.mix:triton.add_kernel.out_ptr.written  a pointer argument after it

A launch does not go through the dispatcher. So the ways in which one is asked for are wrapped:
`kernel[grid](...)` (compiled, interpreted, autotuned) and what Inductor's generated code calls. What
happens inside a launch (autotuning, the interpreter's copies) is no operation of the program.

Which pointers a kernel writes is not known, so all are taken before and after; memory that nobody
wrote before the launch is only taken after it. Inductor allocates past the dispatcher, but its kernels'
arguments say by their names what they are for. Triton is wrapped when the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bitcheck.hooks.dynamo import is_quiet, paused, skip_frame

PLACES = (
    ("triton.runtime.jit", "JITFunction", "run"),
    ("triton.runtime.autotuner", "Autotuner", "run"),
    ("triton.runtime.autotuner", "Heuristics", "run"),
    ("triton.runtime.interpreter", "InterpretedFunction", "run"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "run"),
)
"""(module, class, method) of everything that launches a kernel."""
_NO_LAUNCH = ("warmup", "benchmark_run")
_INDUCTOR = "CachingAutotuner"
"""The class of Inductor's kernels. Their arguments are called in_ptr0, in_out_ptr0, out_ptr0, ws_ptr ..."""
_INDUCTORS_OUTPUT = "out_ptr"
_INDUCTORS_SCRATCH = ("ws_ptr", "semaphores_ptr")


class Kernel(NamedTuple):
    """What is known of a kernel that is about to be launched."""

    name: str
    arguments: tuple[str, ...]
    outputs: frozenset[str] = frozenset()
    """Arguments that it writes, and reads only where something was written there before."""
    scratch: frozenset[str] = frozenset()
    """Arguments that hold nothing before it and mean nothing after it."""


Launch = Callable[[Kernel, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]
"""Called with the kernel, its arguments, and what launches it."""


class LaunchHooks:
    """Hands every launch to `launch`."""

    __slots__ = ("_launch", "_num_modules", "_wrapped")

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._wrapped: dict[tuple[str, str, str], tuple[Any, Any, Any]] = {}
        self._num_modules = 0

    def look(self) -> None:
        """Wrap what has been imported since the last look; called before each operation, so it is cheap."""
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            for place in PLACES:
                if place not in self._wrapped:
                    self._wrap(place)

    def remove(self) -> None:
        """Put everything back."""
        for (_, _, method), (owner, original, wrapper) in self._wrapped.items():
            if vars(owner).get(method) is wrapper:
                setattr(owner, method, original)
        self._wrapped.clear()
        self._num_modules = 0

    def _wrap(self, place: tuple[str, str, str]) -> None:
        module, kind, method = place
        owner = getattr(sys.modules.get(module), kind, None)
        original = vars(owner).get(method) if owner is not None else None
        if original is None:
            return
        launch = self._launch

        @skip_frame
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if is_quiet() or any(kwargs.get(word) for word in _NO_LAUNCH) or torch.compiler.is_dynamo_compiling():
                return original(kernel, *args, **kwargs)
            described = describe_kernel(kernel)
            if described is None:
                return original(kernel, *args, **kwargs)
            execute = paused(lambda *own, **named: original(kernel, *own, **named))
            return launch(described, args, kwargs, execute)

        self._wrapped[place] = owner, original, run
        setattr(owner, method, run)


def describe_kernel(kernel: Any) -> Kernel | None:
    """Return what is known of a kernel, None for bitcheck's own."""
    names = getattr(kernel, "arg_names", None)
    function = kernel
    while hasattr(function, "fn"):
        function = function.fn
        names = names if names is not None else getattr(function, "arg_names", None)
    if getattr(function, "__module__", "").startswith("bitcheck.hooks"):
        return None
    given = (getattr(kernel, "inductor_meta", None) or {}).get("kernel_name")
    name = given or getattr(function, "__name__", type(kernel).__name__)
    code = getattr(function, "__code__", None)
    if names is None:
        names = code.co_varnames[: code.co_argcount] if code is not None else ()
    names = tuple(names)
    if type(kernel).__name__ != _INDUCTOR:
        return Kernel(str(name), names)
    outputs = frozenset(argument for argument in names if argument.startswith(_INDUCTORS_OUTPUT))
    scratch = frozenset(argument for argument in names if argument.startswith(_INDUCTORS_SCRATCH))
    return Kernel(str(name), names, outputs, scratch)
