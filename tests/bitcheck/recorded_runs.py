"""Made-up runs written into folders, as `bitcheck run` leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitcheck.memory import MemoryRun
from bitcheck.run import create_run, rank_path, update_run
from bitcheck.store import RankWriter
from tests.bitcheck.made_up_runs import make_run


def write_run(folder: Path, run: MemoryRun | None = None, **plan: Any) -> Path:
    """Write a run (that of `Plan(**plan)`) into `folder`; return the folder."""
    chosen = run if run is not None else make_run(**plan)
    run_id = f"id-of-{folder.name}"
    info = {
        "run_id": run_id,
        "level": str(chosen.level),
        "world_size": chosen.world_size,
        "start_step": chosen.info["start_step"],
        "environment": dict(chosen.environment),
        "command": ["python", "train.py"],
    }
    create_run(folder, info, overwrite=False)
    status = "failed" if chosen.status == "failed" else "complete"
    for rank, records in chosen.steps.items():
        writer = RankWriter(
            rank_path(folder, rank),
            rank=rank,
            world_size=chosen.world_size,
            level=chosen.level,
            run_id=run_id,
            leaf_limit_bytes=None,
        )
        for record in records:
            writer.append(record)
        writer.close(status)
    update_run(folder, status=status, ended="2026-01-31T12:34:56Z")
    return folder
