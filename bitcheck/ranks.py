"""Which rank of how many a process is, from the variables that its launcher set.

torchrun and everything that speaks its language set RANK and WORLD_SIZE; under `srun` and `mpirun` a
program may have only theirs. Where the program has a process group, that is asked instead
(`bitcheck.hooks.attach`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
