"""Check that a recorded run is what was recorded: every root, the chain, every seal.

For each rank, from its file alone:

    seal      the whole file's hash, where the file is finished: one changed bit shows, wherever it is
    rows      each row of the step table, by its own check
    layouts   sites, groups and edges, dtypes and shapes, by their hashes
    roots     phase roots, root and state root of each step, from its digests
    chain     each step's chain, from the one before; leaves, values and notes are part of it

A file that cannot be read at all (cut, foreign, missing, of a later version) is no damage found but an
error: BrokenRun and its like, as for every other command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitcheck.errors import BrokenRun, DamagedStep
from bitcheck.run import Run, open_run, rank_path
from bitcheck.store import CHAIN_SEED, RankReader, hash_file, link_chain, read_seal

SCHEMA = "bitcheck.verify/1"


@dataclass(frozen=True)
class Damage:
    """One thing in a run that is not as it was recorded."""

    rank: int
    step: int | None
    """The first step that does not hold; None where it is not one step that was changed."""
    file: str
    found: str
    """What does not hold, to follow "step 3 of rank 1" in a sentence."""

    def __str__(self) -> str:
        where = f"step {self.step} of rank {self.rank}" if self.step is not None else f"rank {self.rank}"
        return f"{self.file}: {where} does not hold: {self.found}"


@dataclass(frozen=True)
class Verification:
    """What was checked of a run, and what did not hold."""

    path: str
    run_id: str
    status: str
    world_size: int
    num_rows: int
    """Recorded steps of all ranks, snapshots and fragments among them."""
    num_events: int
    num_sealed: int
    """Ranks whose file is finished and carries a seal."""
    damage: tuple[Damage, ...]
    """By rank; of each rank its seal and its first step that does not hold."""

    @property
    def is_sound(self) -> bool:
        """Whether everything held."""
        return not self.damage

    def to_json(self) -> dict[str, Any]:
        """Return the answer as schema bitcheck.verify/1."""
        return {
            "schema": SCHEMA,
            "verdict": "sound" if self.is_sound else "damaged",
            "run": {
                "path": self.path,
                "run_id": self.run_id,
                "status": self.status,
                "world_size": self.world_size,
            },
            "checked": {
                "ranks": self.world_size,
                "rows": self.num_rows,
                "events": self.num_events,
                "seals": self.num_sealed,
            },
            "damage": [
                {"rank": item.rank, "step": item.step, "file": item.file, "found": item.found} for item in self.damage
            ],
        }


def verify_run(path: Path, on_progress: Callable[[int, int], None] | None = None) -> Verification:
    """Check the run at `path`; `on_progress` is told how many ranks are done, of how many.

    Raises RunError where the run, or one of its files, cannot be read at all.
    """
    damage: list[Damage] = []
    num_rows = num_events = num_sealed = 0
    with open_run(path) as run:
        for done, rank in enumerate(run.ranks, 1):
            checked = _RankCheck(run, rank)
            damage += checked.damage
            num_rows += checked.num_rows
            num_events += checked.num_events
            num_sealed += checked.is_sealed
            run.close_rank(rank)
            if on_progress is not None:
                on_progress(done, len(run.ranks))
        return Verification(
            str(path), run.run_id, run.status, run.world_size, num_rows, num_events, num_sealed, tuple(damage)
        )


class _RankCheck:
    """The check of one rank's file."""

    def __init__(self, run: Run, rank: int) -> None:
        self.path = rank_path(run.path, rank)
        self.rank = rank
        self.damage: list[Damage] = []
        self.num_rows = self.num_events = 0
        self.is_sealed = False
        self.chain: bytes | None = None
        reader = run.rank(rank)
        try:
            self._check_steps(reader)
        except DamagedStep as error:
            self._report(error.step, error.found)
        self._check_seal(reader)

    def _report(self, step: int | None, found: str) -> None:
        self.damage.append(Damage(self.rank, step, str(self.path), found))

    def _check_steps(self, reader: RankReader) -> None:
        chain = CHAIN_SEED
        totals = [0, 0, 0]
        reader.check_layouts()
        for number in range(reader.num_rows):
            row = reader.table[number]
            step = reader.load(number)
            name = int(row["step"])
            chain = link_chain(
                chain, step.step, step.kind, step.root, step.layout.hash, step.meta.hash, row["contents"].tobytes()
            )
            if chain != row["chain"].tobytes():
                return self._report(name, "its chain does not follow from the step before it")
            counted = (step.meta.total_bytes, sum(step.unobserved.values()), len(step.remarks))
            totals = [total + count for total, count in zip(totals, counted, strict=True)]
            recorded = [int(row[field]) for field in ("total_bytes", "total_unobserved", "total_remarks")]
            if (
                recorded != totals
                or int(row["num_bytes"]) != step.meta.total_bytes
                or int(row["first_event"]) != self.num_events
            ):
                return self._report(name, "its counts do not follow from the step before")
            self.num_rows += 1
            self.num_events += len(step)
        self.chain = chain
        return None

    def _check_seal(self, reader: RankReader) -> None:
        """Compare the file with its seal. Called last: the reader has the file open, and unchanged."""
        try:
            seal = read_seal(self.path)
        except BrokenRun as error:
            return self._report(None, str(error).splitlines()[0])
        if seal is None:
            if not reader.is_live and reader.status in ("complete", "failed"):
                self._report(None, "it is finished and has no seal; the seal was removed")
            return None
        self.is_sealed = True
        num_bytes, file_hash = hash_file(self.path)
        if num_bytes != seal.get("num_bytes"):
            return self._report(None, f"it has {num_bytes} bytes; its seal says {seal.get('num_bytes')}")
        if file_hash != seal.get("xxh3_128"):
            return self._report(None, "a byte of the file was changed after it was sealed")
        of = (seal.get("file"), seal.get("num_rows"), seal.get("chain"))
        if self.chain is not None and of != (self.path.name, reader.num_rows, self.chain.hex()):
            return self._report(None, "its seal was made of another recording")
        return None
