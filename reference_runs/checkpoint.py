"""A training run on disk: everything that the next step depends on, and a digest of each piece.

    masters/NAME                the FP32 weights: the only truth about weights
    moments/NAME.exp_avg(_sq)   AdamW's moments, BF16
    step/NAME                   how many updates each parameter has had
    router_bias/NAME            the routers' biases
    ema/NAME                    the average of the masters
    rng.torch/... rng.python/... rng.numpy/...
    data/position               samples drawn

BF16 and FP8 weights are not in it: they are derived from the masters at load, by the same code that
derives them after a step. The file is written under a temporary name, synced and renamed, so that a
name holds a whole checkpoint or none; it is read with `weights_only`, so that reading it executes
nothing, and every digest is verified before anything is restored.

`leave_out` skips a piece on purpose: a resume that forgets something is the fault that bitcheck finds.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitcheck.digest import digest_bytes
from bitcheck.errors import BitcheckError
from bitcheck.reference_runs import rng
from bitcheck.reference_runs.data import Loader
from bitcheck.reference_runs.ema import EMA
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.optimizer import AdamW

FORMAT = "bitcheck.reference.checkpoint/1"
PIECES = (
    "masters",
    "moments",
    "step",
    "router_bias",
    "ema",
    *(f"rng.{generator}" for generator in rng.GENERATORS),
    "data",
)
"""What a checkpoint holds, by the names that `--leave-out` takes."""


class CheckpointError(BitcheckError):
    """A checkpoint is missing, damaged, or of another run; or it cannot be written."""


def digest_value(value: Any) -> str:
    """Return the digest of a tensor, or of a number, string or None by its JSON, in hex."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return digest_bytes(str(value.dtype).removeprefix("torch."), value.shape, data)[0].hex()
    text = json.dumps(value, sort_keys=True).encode()
    return digest_bytes("python.json", (len(text),), np.frombuffer(text, np.uint8))[0].hex()


def collect(model: Model, optimizer: AdamW, ema: EMA, loader: Loader) -> dict[str, Any]:
    """Return everything that a checkpoint holds by its name, the live tensors themselves."""
    values: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        values[f"masters/{name}"] = state["master"]
        values[f"moments/{name}.exp_avg"] = state["exp_avg"]
        values[f"moments/{name}.exp_avg_sq"] = state["exp_avg_sq"]
        values[f"step/{name}"] = state["step"]
    values |= {f"router_bias/{name}": router.bias for name, router in model.routers().items()}
    values |= {f"ema/{name}": average for name, average in ema.tensors().items()}
    for generator, state in rng.capture().items():
        values |= {f"rng.{generator}/{name}": value for name, value in state.items()}
    values["data/position"] = loader.position
    return values


def save(path: Path, values: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Write `values` (from `collect`) and `header` (JSON values) to `path`, whole or not at all.

    While it runs, the host's memory holds a copy of all that lies on a GPU: for AdamW some 8 bytes a parameter.

    Raises CheckpointError where the file cannot be written.
    """
    # What lies on a GPU crosses to the host once, for its digest and for the file.
    values = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
    digests = {name: digest_value(value) for name, value in values.items()}
    content = {
        "format": FORMAT,
        "header": dict(header),
        "header_digest": digest_value(dict(header)),
        "values": values,
        "digests": digests,
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        # The new name is on disk only when its folder is.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise CheckpointError(f"{path}: the checkpoint could not be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (header, values) of the checkpoint in `path`, every digest verified; the values are copies in memory.

    Raises CheckpointError, in one sentence, for what is missing, cut, edited or something else.
    """
    try:
        # Read, not mapped: what is verified below is then what is restored, whatever becomes of the file.
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no checkpoint there; --save-every writes them") from error
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint; resume from an earlier one") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of the reference trainer ({FORMAT})")
    header, values, digests = content["header"], content["values"], content["digests"]
    if digest_value(header) != content["header_digest"]:
        raise CheckpointError(f"{path}: the header does not have its digest; the file was changed after it was saved")
    if values.keys() != digests.keys():
        raise CheckpointError(f"{path}: the list of digests is not that of the values; the file was changed")
    for name, value in values.items():
        if digest_value(value) != digests[name]:
            raise CheckpointError(f"{path}: {name} does not have its digest; the file was changed after it was saved")
    return header, values


def restore(
    path: Path,
    values: Mapping[str, Any],
    model: Model,
    optimizer: AdamW,
    ema: EMA,
    loader: Loader,
    leave_out: Collection[str] = (),
) -> None:
    """Put `values` (from `load`) back in place, but for the pieces in `leave_out`.

    Raises CheckpointError where the checkpoint's tensors are not those of this model; nothing has been
    changed then.
    """
    current = collect(model, optimizer, ema, loader)
    wanted = [name for name in current if name.partition("/")[0] not in leave_out]
    for name in wanted:
        if name not in values:
            raise CheckpointError(f"{path}: {name} is missing; it is a checkpoint of another model")
        new, old = values[name], current[name]
        if isinstance(old, Tensor) and (new.shape != old.shape or new.dtype != old.dtype):
            raise CheckpointError(
                f"{path}: {name} is {new.dtype} {list(new.shape)}, the model wants {old.dtype} {list(old.shape)}"
            )
    for name in wanted:
        if isinstance(current[name], Tensor) and not name.startswith("rng."):
            current[name].copy_(values[name])
    if "data" not in leave_out:
        loader.position = values["data/position"]
    optimizer.derive_parameters()
    model.derive_weights()
    for generator in rng.GENERATORS:
        prefix = f"rng.{generator}/"
        if f"rng.{generator}" not in leave_out:
            state = {name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)}
            rng.restore(generator, state)
