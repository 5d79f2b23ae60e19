"""Who called: what of PyTorch's own Python code runs around the recorder's.

A collective is told apart by the function that began it: FSDP gathers or reduces, a pipeline's stage
sends, an object is sent as its pickle. That function's frame is found, whatever name it was called by,
so nothing needs to be replaced, and it does not matter who imported what before the recorder came.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

FSDP_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
"""Where FSDP gathers parameters and reduces gradients."""
STAGES = "torch.distributed.pipelining.stage"
WEIGHT_GRADIENTS = "torch.distributed.pipelining._backward"
SCHEDULES = "torch.distributed.pipelining.schedules"
OBJECT_FUNCTIONS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip
_REHEARSALS = ((STAGES, ("inference", "warmup")), (SCHEDULES, ("_initialize_stage",)))
"""Where pipelines get ready, and words in the names of the functions that do it: 2.13 greets in a stage's, 2.11 not."""
MAX_FRAMES = 24
_MAX_FRAMES_OF_A_SUM = 8


def frames_of(module: str, max_frames: int = MAX_FRAMES) -> Iterator[FrameType]:
    """Yield the frames around the caller that run a module's functions, the innermost first.

    No frame of another module is looked into: that would keep its locals alive.
    """
    held = sys.modules.get(module)
    if held is None:
        return
    frame: FrameType | None = sys._getframe(1)
    for _ in range(max_frames):
        if frame is None:
            return
        if frame.f_code.co_filename == held.__file__:
            yield frame
        frame = frame.f_back


def global_values() -> Iterator[Any]:
    """Yield the global variables of the Python modules whose functions are running in this thread."""
    seen: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield from list(frame.f_globals.values())
        frame = frame.f_back


class Purpose(Enum):
    """What PyTorch's own code begins a collective for."""

    GATHER = "FSDP gathers parameters"
    REDUCE = "FSDP reduces gradients"
    OBJECTS = "objects are sent as their pickles"


def purpose_of_collective(max_frames: int = MAX_FRAMES) -> Purpose | None:
    """Return what the innermost of PyTorch's functions here begins collectives for, None for the program's own."""
    fsdp = sys.modules.get(FSDP_COLLECTIVES)
    gathers, objects = getattr(fsdp, "__file__", None), _object_functions()
    frame: FrameType | None = sys._getframe(1)
    for _ in range(max_frames):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_filename == gathers and code.co_name.startswith("foreach_"):
            return Purpose.REDUCE if "reduce" in code.co_name else Purpose.GATHER
        if id(code) in objects:
            return Purpose.OBJECTS
        frame = frame.f_back
    return None


def stage_in_call() -> int | None:
    """Return the number of the pipeline stage whose module is being called, None outside a pipeline."""
    for frame in frames_of(STAGES):
        number = getattr(frame.f_locals.get("self"), "stage_index", None)
        if isinstance(number, int):
            return number
    return None


def stages_in_call() -> list[tuple[Any, int]]:
    """Return the modules and numbers of all stages that this rank has of the pipeline that is running."""
    for frame in frames_of(SCHEDULES):
        stages = getattr(frame.f_locals.get("self"), "_stages", None)
        if isinstance(stages, list):
            return [(stage.submod, stage.stage_index) for stage in stages]
    return []


def is_rehearsal() -> bool:
    """Say whether a pipeline only gets ready: finds out shapes with memory that nobody wrote, or greets its neighbours.

    It does so in a process's first step, resumed or not, so that it is no part of any.
    """
    return any(
        word in frame.f_code.co_name for module, words in _REHEARSALS for frame in frames_of(module) for word in words
    )


def weight_in_call() -> tuple[torch.Tensor, int] | None:
    """Return the parameter to whose gradient a pipeline adds outside backward, None where it does no such thing.

    Zero-bubble schedules compute gradients of inputs and of weights apart. PyTorch (2.11 to 2.13) goes through the
    weights that share a gradient in the order of a set of autograd nodes, which is the order of their addresses:
    the sums are the same in every run, their order is not, so that only the weight tells which is which. PyTorch 2.11
    first adds up what comes into each node: these sums are the first weight's, and have the node's number.
    """
    for frame in frames_of(WEIGHT_GRADIENTS, _MAX_FRAMES_OF_A_SUM):
        if frame.f_code.co_name != "stage_backward_weight":
            continue
        local = frame.f_locals
        nodes = local.get("param_group", {}).get("intermediates")
        if nodes is None:
            return (local["weight"], 0) if "weight" in local else None
        places = [local["grad_acc_to_weight"][node] for node in local["param_group"]["params"]]
        order = sorted(node._sequence_nr() for node in nodes)
        return min(places, key=itemgetter(1))[0], order.index(local["intermediate"]._sequence_nr())
    return None


def is_sending_objects(max_frames: int = MAX_FRAMES) -> bool:
    """Say whether one of torch.distributed's functions that send objects as pickles is running."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return purpose_of_collective(max_frames) is Purpose.OBJECTS


@functools.cache
def _object_functions() -> dict[int, CodeType]:
    """Return the codes of the functions that send objects, by identity: to hash one would take longer than all else."""
    if not dist.is_available():
        return {}
    functions = [getattr(dist.distributed_c10d, name, None) for name in OBJECT_FUNCTIONS]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions if callable(function)]
    return {id(code): code for code in codes if code is not None}
