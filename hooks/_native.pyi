"""What `csrc/` holds: see the Python that each function stands for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from bitcheck.events import Kind, Site, StepColumns
from bitcheck.hooks.device_digest import DeviceDigester
from bitcheck.hooks.fresh import Shadow
from bitcheck.hooks.gradients import GradientHooks, Tracked, _Outputs, _Owners, _Trace
from bitcheck.hooks.modules import ModuleHooks
from bitcheck.hooks.naming import ModuleName
from bitcheck.hooks.op_schema import OpFacts
from bitcheck.hooks.ops import Opened, OpHooks
from bitcheck.hooks.steps import Call, StepBuilder

INTERFACE: int

class Memory:
    """As `storages.StorageWriters`."""

    written: tuple[int, int] | Shadow | None
    builder: Any
    events: tuple[int, ...]
    @property
    def weak(self) -> Any: ...
    def __init__(self, tensor: torch.Tensor) -> None: ...
    def begin_again(self, tensor: torch.Tensor) -> None: ...

def configure(**needs: object) -> None:
    """Take what the functions need of PyTorch and of the Python beside them. Raises TypeError for what they do not."""

def choose(limit: str) -> str:
    """Hash by the quickest form up to "portable", "avx2" or "avx512" that this processor has; return its name."""

def xxh3_128(data: bytes | bytearray | memoryview) -> bytes:
    """Return XXH3-128, seed 0, as 16 canonical bytes. Raises ValueError for less than 17 bytes."""

def is_paused() -> bool:
    """Say whether one of these functions is at work in this thread."""

def digest_plain(tensor: torch.Tensor) -> tuple[Kind, bytes, bytes] | None:
    """As `tensors.digest_plain_portably`."""

def add_plain(record: StepColumns, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...]) -> int | None:
    """As `steps.add_plain_portably`."""

def add_tensor(
    builder: StepBuilder, site: Site, tensor: torch.Tensor, group: int, inputs: tuple[int, ...]
) -> tuple[int] | None:
    """As `StepBuilder.add_tensor` for a plain tensor, where nothing but the tensor counts; None where it is not so."""

def plain_on_device(tensor: torch.Tensor) -> Kind | None:
    """As `tensors.plain_on_device_portably`."""

def places_of(tensors: Sequence[torch.Tensor], kinds: Sequence[Kind]) -> list[int] | None:
    """As `layout.places_of_portably`; None where a tensor's memory is not there."""

def receive_leaves(
    tickets: list[int],
    firsts: list[int],
    counts: list[int],
    landed: memoryview,
    kinds: dict[int, Kind],
    known: dict[int, tuple[bytes, bytes]],
    limit_bytes: int,
) -> list[int]:
    """As `DeviceDigester._receive` for tickets whose leaves come in one flight; return the places of the others."""

def wait_for_number(address: int, number: int, modulus: int, pause_s: float, timeout_s: float) -> bool:
    """Look at the int64 at an address every `pause_s`, the interpreter's lock let go, until it has reached a number.

    Numbers grow one by one modulo `modulus`. Returns whether it has, False after `timeout_s`.
    """

def submit_tensors(digester: DeviceDigester, tensors: list[torch.Tensor], kinds: list[Kind]) -> list[int] | None:
    """As `DeviceDigester._submit` for up to FEW_TENSORS tensors; None where the Python has to.

    It has to where memory is not there, where they are too much for one launch or for the scratch buffer, and where no
    kernel that is compiled brings a strided one to row-major order.
    """

def begin_call(
    hooks: ModuleHooks,
    builder: StepBuilder,
    module: nn.Module,
    name: ModuleName,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recomputes: bool,
) -> tuple[Call, list[tuple[str, torch.Tensor]]] | None:
    """As `ModuleHooks._begin`."""

def end_call(
    hooks: ModuleHooks, builder: StepBuilder, call: Call, arguments: list[tuple[str, torch.Tensor]], result: Any
) -> None:
    """As `ModuleHooks._record_outputs`."""

def record_node(outputs: _Outputs, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """As `_Outputs.__call__`, which hands itself over."""

def record_accumulated(hooks: GradientHooks, tracked: Tracked, parameter: torch.Tensor) -> None:
    """As `GradientHooks._accumulated`."""

def plan_nodes(hooks: GradientHooks, builder: StepBuilder, trace: _Trace, owner_of: _Owners, stack: list[Node]) -> None:
    """As `GradientHooks._plan_nodes`."""

def run_operation(hooks: OpHooks, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """As `OpHooks._run`."""

def begin_operation(hooks: OpHooks, facts: OpFacts, args: Any, kwargs: Any) -> Opened | None:
    """As `OpHooks._begin`."""

def end_operation(hooks: OpHooks, facts: OpFacts, opened: Opened, result: Any) -> None:
    """As `OpHooks._end`."""
