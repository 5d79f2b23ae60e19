"""Made-up steps and runs for the tests of the store."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from bitcheck.digest import digest_from_leaves, num_leaves
from bitcheck.events import Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.run import create_run, open_run, rank_path, update_run
from bitcheck.store import RankWriter

LEAF_LIMIT_BYTES = 1 << 20


def make_event(
    rng: random.Random,
    site: Site,
    *,
    shape: tuple[int, ...] = (3, 2),
    num_bytes: int = 24,
    group: int = -1,
    inputs: tuple[int, ...] = (),
    value: str | None = None,
) -> Event:
    """Return an event whose digest follows from random leaves, as a tensor's does."""
    leaves = rng.randbytes(16 * num_leaves(num_bytes))
    digest = digest_from_leaves("float32", shape, num_bytes, leaves)
    return Event(site, "float32", shape, num_bytes, digest, leaves, group, inputs, value)


def make_step(rng: random.Random, step: int, *, num_blocks: int = 3, batch: int = 2) -> StepRecord:
    """Return a step of a little model: a batch, blocks in a row, their weights, a learning rate."""
    groups = [Group("forward", "Model", "", "Model")]
    events = [make_event(rng, Site(Phase.BATCH, "Model", "", "in.0"), shape=(batch, 4), num_bytes=16 * batch)]
    for block in range(num_blocks):
        groups.append(Group("forward", "Model", f"blocks.{block}", "Linear", 0))
        site = Site(Phase.FORWARD, "Model", f"blocks.{block}", "out")
        events.append(make_event(rng, site, group=len(groups) - 1, inputs=(len(events) - 1,)))
    for block in range(num_blocks):
        path = f"blocks.{block}.weight"
        # More than one leaf, the last of them not whole.
        events.append(make_event(rng, Site(Phase.GRAD, "Model", path, "grad"), shape=(5, 1000), num_bytes=20_000))
        events.append(make_event(rng, Site(Phase.PARAM, "Model", path, "value"), shape=(5, 1000), num_bytes=20_000))
    site = Site(Phase.SCALAR, "AdamW", "0", "lr")
    events.append(make_event(rng, site, shape=(), num_bytes=8, value=repr(0.1 / (step + 2))))
    unobserved = {"kernel é of a custom op": step} if step % 3 == 1 else {}
    return StepRecord(step, StepKind.STEP, events, groups, unobserved, ("a remark",) if step % 2 else ())


def make_steps(seed: int, num_steps: int) -> list[StepRecord]:
    """Return an initial snapshot and `num_steps` steps; equal seeds give equal steps."""
    rng = random.Random(seed)
    initial = make_step(rng, -1)
    state = [event for event in initial.events if event.site.phase is Phase.PARAM]
    return [StepRecord(-1, StepKind.INITIAL, state), *(make_step(rng, step) for step in range(num_steps))]


def open_writer(path: Path, *, rank: int = 0, world_size: int = 1, run_id: str = "made-up") -> RankWriter:
    """Return a writer with the recorder's usual settings."""
    return RankWriter(
        path,
        rank=rank,
        world_size=world_size,
        level=Level.MODULE,
        run_id=run_id,
        leaf_limit_bytes=LEAF_LIMIT_BYTES,
    )


def write_rank(path: Path, records: list[StepRecord], status: str | None = "complete", **settings: object) -> Path:
    """Write one rank's file; `status` None leaves it as a writer that was killed does, but for its flags."""
    writer = open_writer(path, **settings)  # type: ignore[arg-type]
    for record in records:
        writer.append(record)
    if status is not None:
        writer.close(status)
    return path


def write_run(
    folder: Path, num_steps: int = 4, *, world_size: int = 1, status: str = "complete", seed: int = 0
) -> Path:
    """Write a finished run of `world_size` ranks."""
    create_run(folder, {"level": "module", "world_size": world_size, "environment": {"torch": "2.13.0"}}, False)
    with open_run(folder, allow_missing_ranks=True) as run:
        run_id = run.run_id
    for rank in range(world_size):
        path = rank_path(folder, rank)
        write_rank(path, make_steps(seed + rank, num_steps), status, rank=rank, world_size=world_size, run_id=run_id)
    update_run(folder, status=status, exit_status=0 if status == "complete" else 1)
    return folder


def with_digest(record: StepRecord, event: int, digest: bytes) -> StepRecord:
    """Return a copy of `record` in which one event has another digest."""
    events = [*record.events]
    events[event] = replace(events[event], digest=digest)
    return replace(record, events=events)


def flip_bit(path: Path, bit: int) -> None:
    """Change one bit of a file, bit 0 being the lowest of its first byte."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << (bit % 8))]))
