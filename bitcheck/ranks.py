"""Which rank of how many a process is, from the variables that its launcher set.

torchrun and everything that speaks its language set RANK and WORLD_SIZE; under `srun` and `mpirun` a
program may have only theirs. Where the program has a process group, that is asked instead
(`bitcheck.hooks.attach`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bitcheck.errors import UsageError


class Placement(NamedTuple):
    """One process's place in the job."""

    rank: int
    world_size: int
    job: str
    """The same text in all processes of one launch and in no other launch's; "" where there is none."""


_LAUNCHERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("RANK", ("WORLD_SIZE",), ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), ()),
    ("PMI_RANK", ("PMI_SIZE",), ("PMI_JOBID",)),
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
"""(rank, sizes of which the first that is set counts, parts of the job's name)."""


def launched_as(variables: Mapping[str, str]) -> Placement | None:
    """Return the place that `variables` name, None for a process that no launcher placed."""
    for rank_name, size_names, job_names in _LAUNCHERS:
        rank = _number(variables.get(rank_name))
        size = next((n for name in size_names if (n := _number(variables.get(name))) is not None), None)
        if rank is None or size is None or rank >= size:
            continue
        # In the script of a Slurm batch job, outside any `srun`, the variables speak of the whole job.
        if rank_name == "SLURM_PROCID" and "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables:
            continue
        return Placement(rank, size, ".".join(variables[name] for name in job_names if name in variables))
    return None


_LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


def local_rank(variables: Mapping[str, str]) -> int | None:
    """Return which process of its host this is, as its launcher says; None where none does."""
    return next((n for name in _LOCAL_RANKS if (n := _number(variables.get(name))) is not None), None)


def is_first_of_host(variables: Mapping[str, str]) -> bool:
    """Say whether this is the first process of its host. Raises UsageError where its launcher does not say."""
    number = local_rank(variables)
    if number is None:
        raise UsageError(
            "a folder of this host's own was asked for, and no launcher says which process of the host this is "
            f"({', '.join(_LOCAL_RANKS)}).\nSet LOCAL_RANK, 0 on one process of each host."
        )
    return number == 0


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
