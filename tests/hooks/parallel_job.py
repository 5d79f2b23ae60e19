"""Runs programs of several processes bare, recorded and recorded again, in one job of gloo processes.

python -m tests.hooks.parallel_job FOLDER NUM_RANKS LEVEL NAME ...

Leaves in FOLDER/NAME the runs `a` and `b`, and FOLDER/NAME-R.json with the final bits of rank R.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import bitcheck
from bitcheck.reference_runs.ranks import end_process_group
from tests.hooks.parallel_programs import PROGRAMS, Program
from tests.hooks.test_neutral import final_bits, seed


def final(program: Program) -> str:
    seed()
    return json.dumps(final_bits(program()), default=str)


def work(rank: int, num_ranks: int, folder: Path, level: str, names: list[str]) -> None:
    """One rank: every program three times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    for name in names:
        found: dict[str, Any] = {}
        try:
            found["bare"] = final(PROGRAMS[name])
            for run in ("a", "b"):
                dist.barrier()
                with bitcheck.record(folder / name / run, level=level, strict=True):
                    found[run] = final(PROGRAMS[name])
        except Exception:  # noqa: BLE001  told to the test
            found["error"] = traceback.format_exc()
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        if "error" in found:
            os._exit(1)
    dist.barrier()
    end_process_group()


if __name__ == "__main__":
    where, count, wanted, *chosen = sys.argv[1:]
    torch.multiprocessing.spawn(work, (int(count), Path(where), wanted, chosen or list(PROGRAMS)), int(count))
