"""The inputs of one operation, saved as it is about to run, so that it can be executed again elsewhere.

    Capture({"step": 3, "rank": 0, "site": "backward/emb:aten.index_put_.default.self.written#1", "file": "x.pt"})

Saved are the bytes of the memory that its tensors lie in, and where in it each of them lies: strides,
overlaps and the alignment of addresses are those of the training job. Beside them numbers and flags,
the states of the generators, and PyTorch's switches; `replay` reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bitcheck.events import Phase, qualified_name
from bitcheck.hooks.op_schema import OpFacts
from bitcheck.hooks.replay import ALIGNMENT_BYTES, with_bits
from bitcheck.hooks.tensors import byte_span

_SITE = re.compile(r"(?P<head>[a-z]+/.*):(?P<slot>[^:#@]+)(#(?P<occurrence>\d+))?(?P<eval>@eval)?")


class Capture:
    """Waits for one operation and saves what it is called with."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        match = _SITE.fullmatch(wanted["site"])
        if match is None:
            raise ValueError(f"no site of an operation: {wanted['site']}")
        self._head, self._slot = match["head"], match["slot"]
        self._occurrence, self._is_eval = int(match["occurrence"] or 0), match["eval"] is not None
        self._step, self._rank, self._file = int(wanted["step"]), int(wanted["rank"]), Path(wanted["file"])
        self.is_done = False

    def wants(self, step: int, phase: Phase, root: str, path: str, op: str, occurrence: int, is_eval: bool) -> bool:
        """Say whether this is the operation."""
        if self.is_done or (step, occurrence, is_eval) != (self._step, self._occurrence, self._is_eval):
            return False
        heads = {f"{phase}/{qualified_name(root, path, with_root)}" for with_root in (False, True)}
        return self._slot.startswith(op + ".") and self._head in heads and _rank() == self._rank

    def save(self, facts: OpFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Write the file."""
        self.is_done = True
        temporary = self._file.with_suffix(".tmp")
        torch.save(snapshot_call(facts, args, kwargs), temporary)
        os.replace(temporary, self._file)


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def snapshot_call(facts: OpFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that one call of an operator takes, as data that `torch.load(weights_only=True)` reads.

    Raises ValueError for an argument that is neither tensor, number, text nor a word of PyTorch's.
    """
    memory = CallMemory()
    for value in (*args, *kwargs.values()):
        memory.measure(value)
    devices = {int(tensor.device.index or 0) for tensor in memory.tensors if tensor.is_cuda}
    generators = {"cpu": torch.get_rng_state()}
    generators |= {str(index): torch.cuda.get_rng_state(index) for index in sorted(devices)}
    return {
        "op": facts.name,
        "names": list(facts.arguments[: len(args)]),
        "written": list(facts.written),
        "private": list(facts.private),
        "args": [memory.encode(value) for value in args],
        "kwargs": {name: memory.encode(value) for name, value in kwargs.items()},
        "storages": memory.copies(),
        "generators": generators,
        "switches": {
            "num_threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
        "torch": str(torch.__version__),
    }


class CallMemory:
    """The storages that a call's tensors lie in, and the part of each that they cover."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        """In the order in which `measure` met them."""
        self._spans: dict[int, list[int]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def measure(self, value: Any) -> None:
        """Take note of the tensors in an argument."""
        if isinstance(value, (list, tuple)):
            for member in value:
                self.measure(member)
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
            storage = value.untyped_storage()
            begin, end = byte_span(value)
            span = self._spans.setdefault(storage._cdata, [begin, end])
            span[0], span[1] = min(span[0], begin), max(span[1], end)
            self._storages[storage._cdata] = storage

    def copies(self) -> list[torch.Tensor]:
        """Return the bytes of each storage, uint8 [n]."""
        found = []
        for key, storage in self._storages.items():
            begin, end = self._aligned(key)
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
            flat.set_(storage, begin, (end - begin,), (1,))
            found.append(flat.clone())
        return found

    def _aligned(self, key: int) -> tuple[int, int]:
        begin, end = self._spans[key]
        return begin // ALIGNMENT_BYTES * ALIGNMENT_BYTES, end

    def storages(self) -> list[tuple[int, int, int]]:
        """Return, in the order of `copies`, what identifies each storage and the bytes of it that were copied."""
        return [(key, *self._aligned(key)) for key in self._storages]

    def rebuild(self, value: Any, copies: list[torch.Tensor]) -> Any:
        """Return an argument with its tensors lying in `copies` as they lie in their own memory."""
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            flat = copies[list(self._storages).index(key)]
            offset = (value.storage_offset() * value.element_size() - self._aligned(key)[0]) // value.element_size()
            tensor = torch.empty(0, dtype=value.dtype, device=value.device)
            tensor.set_(flat.untyped_storage(), offset, value.size(), value.stride())
            return with_bits(tensor, value.is_conj(), value.is_neg())
        if type(value) in (list, tuple):
            return type(value)(self.rebuild(member, copies) for member in value)
        return value

    def encode(self, value: Any) -> tuple[str, Any]:
        """Return an argument as plain data."""
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            offset_bytes = value.storage_offset() * value.element_size() - self._aligned(key)[0]
            place = {
                "storage": list(self._storages).index(key),
                "dtype": str(value.dtype).removeprefix("torch."),
                "offset": offset_bytes // value.element_size(),
                "size": list(value.size()),
                "stride": list(value.stride()),
                "is_conj": value.is_conj(),
                "is_neg": value.is_neg(),
            }
            return "tensor", place
        if isinstance(value, (list, tuple)):
            return type(value).__name__ if type(value) in (list, tuple) else "list", [self.encode(m) for m in value]
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return "value", value
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return "torch", str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return "device", str(value)
        if isinstance(value, torch.Generator):
            return "generator", "cpu" if value.device.type == "cpu" else str(value.device.index or 0)
        raise ValueError(f"an argument of type {type(value).__name__} cannot be saved")
