"""The digests of the tensors in a checkpoint file: `bitcheck hash`.

    model.safetensors   read through the header, without torch; names as in the file
    state.pt            torch.load(weights_only=True), mapped where the format allows; nested
                        dicts and lists give dotted names: `optimizer.state.0.exp_avg`

A digest is comparable with the one that a run holds for the same tensor (`param`, `buffer`, `optim`
events): the same dtype, shape and bits give the same number. What a file holds beside tensors
(epoch numbers, configuration) is counted, not digested. Reading a file never executes anything from
it: a pickle that asks for more than tensors and plain values is refused.

Place in the flow: tensor -> *digest*. Torch, and what takes its tensors apart, are imported only for
a .pt file.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bitcheck.digest import digest_bytes
from bitcheck.errors import UnreadableFile

_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""The format's names of dtypes -> PyTorch's, which the digest covers."""

_HEADER_LENGTH_BYTES = 8
_ZIP_MAGIC = b"PK"
_PICKLE_MAGIC = b"\x80"


class HashedTensor(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    digest: bytes
    """16 bytes."""


class HashedFile(NamedTuple):
    """What a file holds."""

    path: Path
    format: str
    """`safetensors` or `torch`."""
    tensors: list[HashedTensor]
    num_other_values: int
    """Values in it that are no tensors."""


def hash_file(path: Path, on_tensor: Callable[[HashedTensor], None] | None = None) -> HashedFile:
    """Digest every tensor of a file, in the file's order; `on_tensor` hears of each as it is done.

    Raises UnreadableFile: missing, cut, of another kind, or with code in it.
    """
    file_format, found = _open(path)
    tensors = []
    num_other_values = 0
    for tensor in found:
        if tensor is None:
            num_other_values += 1
            continue
        tensors.append(tensor)
        if on_tensor is not None:
            on_tensor(tensor)
    return HashedFile(path, file_format, tensors, num_other_values)


def _open(path: Path) -> tuple[str, Iterator[HashedTensor | None]]:
    """Return a file's format, told by its first bytes, and what it holds: None stands for another value."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER_LENGTH_BYTES + 1)
    except OSError as error:
        raise UnreadableFile(f"{path}: {error.strerror}; expected a .safetensors or .pt file") from None
    if start.startswith((_ZIP_MAGIC, _PICKLE_MAGIC)):
        return "torch", _hash_torch(path, is_mappable=start.startswith(_ZIP_MAGIC))
    if start[_HEADER_LENGTH_BYTES:] == b"{" or path.suffix == ".safetensors":
        return "safetensors", _hash_safetensors(path)
    raise UnreadableFile(f"{path}: neither a .safetensors nor a .pt file, by its first bytes; name a file of tensors")


def _hash_safetensors(path: Path) -> Iterator[HashedTensor]:
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy"):  # checks the header: lengths, offsets, no gap, no overlap
            pass
    except safetensors.SafetensorError as error:
        raise UnreadableFile(
            f"{path}: not a whole .safetensors file ({str(error).rpartition('header: ')[2]}); write it again"
        ) from None
    memory = np.memmap(path, np.uint8, mode="r")
    header_bytes = int.from_bytes(memory[:_HEADER_LENGTH_BYTES].tobytes(), "little")
    data = memory[_HEADER_LENGTH_BYTES + header_bytes :]
    header = json.loads(memory[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + header_bytes].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise UnreadableFile(f"{path}: {name} has dtype {entry['dtype']}, which PyTorch has no name for")
        shape = tuple(entry["shape"])
        if entry["dtype"] == "F4":  # the format counts halves of a byte, PyTorch bytes
            shape = (*shape[:-1], shape[-1] // 2)
        first, end = entry["data_offsets"]
        digest, _ = digest_bytes(dtype, shape, data[first:end])
        yield HashedTensor(name, dtype, shape, end - first, digest)


def _hash_torch(path: Path, is_mappable: bool) -> Iterator[HashedTensor | None]:
    import torch

    from bitcheck.hooks.tensors import digest_tensor, dtype_name, tensor_parts

    for name, value in _walk(_load(path, is_mappable), ""):
        if not isinstance(value, torch.Tensor):
            yield None
            continue
        for suffix, part in tensor_parts(value):
            digest, _ = digest_tensor(part)
            yield HashedTensor(name + suffix, dtype_name(part), tuple(part.shape), part.nbytes, digest)


def _load(path: Path, is_mappable: bool) -> Any:
    """Load a .pt file with the unpickler that makes tensors and plain values and nothing else."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on deprecated storages and layouts: nothing a reader can act on
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a damaged or hostile pickle makes the unpickler stumble over
        raise UnreadableFile(f"{path}: {_why_not_loaded(str(error))}") from None


def _why_not_loaded(message: str) -> str:
    """Return torch.load's many lines, which advise to switch its protection off, as one sentence."""
    if match := re.search(r"GLOBAL ([\w.]+)", message):
        asks = f"it asks for {match[1]}"
    elif match := re.search(r"Unsupported (?:global|class|operand)[^.\n]*", message):
        asks = match[0].replace("Unsupported", "unsupported").strip()
    elif "TorchScript" in message:
        asks = "it is a TorchScript program"
    else:
        found = re.split(r"[.:;] |\n", message, maxsplit=1)[0] or "it ends too early"
        return f"not a whole file of tensors ({found}); save it again"
    return f"holds more than tensors and plain values ({asks}) and was not loaded; save a state_dict instead"


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, member) for each member that is no dict, list or tuple."""
    if isinstance(value, dict):
        members = [(str(key), member) for key, member in value.items()]
    elif isinstance(value, (list, tuple)):
        members = [(str(index), member) for index, member in enumerate(value)]
    else:
        yield name, value
        return
    for key, member in members:
        yield from _walk(member, f"{name}.{key}" if name else key)
