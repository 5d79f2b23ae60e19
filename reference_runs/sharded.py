"""A parallel run on disk: a folder that torch.distributed.checkpoint writes, and what each piece of it must be.

    step-000400/
        .metadata, __0_0.distcp, ...    the tensors, each rank's own; replicated ones once
        bitcheck.json                   what the run is, numbers, and the digest of every tensor

It holds what `checkpoint` lists. Weights of routed experts are DTensors over the expert-parallel ranks, so they
can be loaded at another number of ranks; their digests are taken expert by expert for that reason. Replicated
tensors have to agree on every rank, or nothing is written: a checkpoint that silently takes one rank's copy
hides that copies have drifted apart.

The folder is written under a temporary name and renamed when all of it is on disk. PyTorch keeps the list of
tensors, `.metadata`, as a pickle: resume only from folders that you or your job wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.distributed.tensor import DTensor, Shard

from bitcheck.reference_runs.checkpoint import CheckpointError, digest_value
from bitcheck.reference_runs.ranks import Ranks

FORMAT = "bitcheck.reference.sharded/1"
INDEX = "bitcheck.json"


def save(path: Path, values: Mapping[str, Any], header: Mapping[str, Any], ranks: Ranks) -> None:
    """Write every rank's `values` (from `checkpoint.collect`) to the folder `path`; called by all ranks at once.

    Raises CheckpointError, on every rank, where replicated values differ between ranks or nothing can be written.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    index = _agree(ranks.gather_objects(digests_of(values, ranks)), path)
    temporary = path.with_name(f".{path.name}.tmp")
    trouble = None
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    ranks.gather_objects(None)
    try:
        save_state_dict(_sharded(tensors, ranks), storage_writer=FileSystemWriter(temporary))
    except CheckpointException as error:
        trouble = f"{path}: the checkpoint could not be written: {next(iter(error.failures.values()))[0]}"
    numbers = ranks.gather_objects({name: value for name, value in values.items() if not isinstance(value, Tensor)})
    if ranks.rank == 0 and trouble is None:
        content = {
            "format": FORMAT,
            "header": dict(header),
            "header_digest": digest_value(dict(header)),
            "numbers": {name: value for own in numbers for name, value in own.items()},
            "digests": index,
        }
        try:
            _publish(temporary, path, json.dumps(content, indent=1))
        except OSError as error:
            trouble = f"{path}: the checkpoint could not be written: {error.strerror}"
    # All ranks go on, or none does: nobody trains on while rank 0 has failed to write.
    for told in ranks.gather_objects(trouble):
        if told is not None:
            raise CheckpointError(told)


def load(path: Path, current: Mapping[str, Any], ranks: Ranks | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (header, values) of the checkpoint in the folder `path`: this rank's part, every digest verified.

    `current` (from `checkpoint.collect`) says which part that is and is left as it was; `ranks` is None in a
    single process. Raises CheckpointError for what is missing, changed or of another model.
    """
    try:
        content = json.loads((path / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole checkpoint; resume from an earlier one") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of the reference trainer ({FORMAT})")
    header, index = content["header"], content["digests"]
    if digest_value(header) != content["header_digest"]:
        raise CheckpointError(f"{path}: the header does not have its digest; the file was changed after it was saved")
    tensors = {name: torch.empty_like(value) for name, value in current.items() if isinstance(value, Tensor)}
    try:
        with warnings.catch_warnings():
            # PyTorch warns of loading in a single process, which is what `no_dist` asks for.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_state_dict(_sharded(tensors, ranks), storage_reader=FileSystemReader(path), no_dist=ranks is None)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{path}: it cannot be loaded into this model: {reason}") from error
    values = content["numbers"] | tensors
    for name, digest in digests_of(values, ranks).items():
        if index.get(name) != digest:
            raise CheckpointError(f"{path}: {name} does not have its digest; the file was changed after it was saved")
    return header, values


def is_sharded(name: str) -> bool:
    """Tell whether the value called `name` holds one piece an expert, along its first dimension."""
    return ".experts." in name and not name.startswith("step/")


def digests_of(values: Mapping[str, Any], ranks: Ranks | None = None) -> dict[str, str]:
    """Return the digest of every value by its name, of routed experts' by `NAME[EXPERT]`: whoever has which."""
    digests: dict[str, str] = {}
    for name, value in values.items():
        if is_sharded(name):
            first = 0 if ranks is None else ranks.ep_rank * len(value)
            digests |= {f"{name}[{first + i}]": digest_value(piece) for i, piece in enumerate(value)}
        else:
            digests[name] = digest_value(value)
    return digests


def _agree(digests_of_ranks: list[dict[str, str]], path: Path) -> dict[str, str]:
    """Return the digests of all ranks in one; raises CheckpointError where two give one name different ones."""
    index: dict[str, str] = {}
    holder: dict[str, int] = {}
    for rank, digests in enumerate(digests_of_ranks):
        for name, digest in digests.items():
            if index.setdefault(name, digest) != digest:
                raise CheckpointError(
                    f"{path}: {name} has other bits on rank {rank} than on rank {holder[name]}, its copy; not written."
                    " Record the run and ask bitcheck since when they have drifted apart"
                )
            holder.setdefault(name, rank)
    return index


def _sharded(tensors: Mapping[str, Tensor], ranks: Ranks | None) -> dict[str, Any]:
    """Return `tensors` with what is one expert-parallel rank's part declared as such; storage is shared."""
    if ranks is None or ranks.degrees.ep == 1:
        return dict(tensors)
    return {
        name: DTensor.from_local(tensor, ranks.experts_mesh, [Shard(0)], run_check=False)
        if is_sharded(name)
        else tensor
        for name, tensor in tensors.items()
    }


def _publish(temporary: Path, path: Path, index: str) -> None:
    with (temporary / INDEX).open("w") as file:
        file.write(index)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.rmtree(path)
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
