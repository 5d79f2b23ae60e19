"""Make two finished runs of thousands of ranks without training, to measure what reads them.

    python benchmarks/make_runs.py FOLDER --ranks 3072 --steps 800 --events 64
    python benchmarks/make_runs.py FOLDER --ranks 3072 --steps 800 --events 64 --differ 1234:567

writes FOLDER/baseline and FOLDER/candidate; and

    python benchmarks/make_runs.py FOLDER --ranks 3072 --steps 800 --events 64 --replicated [--differ 1234:567]

writes FOLDER/replicated alone, whose ranks hold copies of gradients and parameters and have batches and
activations of their own, for `bitcheck replicas`. A few ranks are written by the store's own writer; every other
rank is a copy of one of them with a header and a seal of its own, so the files are as valid as if each had
been recorded (`bitcheck verify` agrees). With --differ, one digest of one rank parts from the given step on,
as a fault would: that rank is recorded anew, so its roots and chain are consistent.

Prints how long it took to make them, and to read what the ends of all files say.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from bitcheck.digest import digest_from_leaves, num_leaves
from bitcheck.document import decode_document, encode_document
from bitcheck.events import Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.placements import TensorPlacement
from bitcheck.run import create_run, open_run, rank_path, update_run
from bitcheck.store import RankReader, RankWriter
from bitcheck.store.seal import prepare_seal

NUM_RECORDED = 8
"""Ranks of different content; rank r is like rank r % NUM_RECORDED."""
SHAPE, NUM_BYTES = (64, 128), 32 * 1024


def make_steps(
    rank: int, num_steps: int, num_events: int, differ_from: int | None, run: random.Random, num_copies: int = 0
) -> Iterator[StepRecord]:
    """Yield an initial snapshot and the steps of one rank; from step `differ_from` on one digest is another.

    With `num_copies` gradients and parameters are the same on so many ranks, and the file says so.
    """
    bits, shared = random.Random(rank), random.Random("copies")
    world = tuple(range(num_copies))
    everywhere = TensorPlacement.of_ddp(world).to_text() if num_copies else ""
    odd = num_events - 1 if num_copies else num_events // 2
    num_modules = max(1, (num_events - 2) // 3)
    groups = [Group("forward", "Model", f"blocks.{module}", "Linear") for module in range(num_modules)]
    sites = [Site(Phase.BATCH, "Model", "", "in.0"), Site(Phase.LOSS, "Model", "", "out")]
    sites += [Site(Phase.FORWARD, "Model", f"blocks.{module}", "out") for module in range(num_modules)]
    sites += [Site(Phase.GRAD, "Model", f"blocks.{module}.weight", "grad") for module in range(num_modules)]
    sites += [Site(Phase.PARAM, "Model", f"blocks.{module}.weight", "value") for module in range(num_modules)]
    inputs: list[tuple[int, ...]] = [(), ()] + [(max(0, at - 1),) for at in range(2, 2 + num_modules)]
    inputs += [()] * (2 * num_modules)
    group_of = [-1, -1, *range(num_modules), *[-1] * (2 * num_modules)]
    for step in range(-1, num_steps):
        events = []
        for at, site in enumerate(sites):
            is_copy = bool(num_copies) and site.phase in (Phase.GRAD, Phase.PARAM)
            leaves = (shared if is_copy else bits).randbytes(16 * num_leaves(NUM_BYTES))
            if differ_from is not None and step >= differ_from and at == min(odd, len(sites) - 1):
                leaves = run.randbytes(len(leaves))
            digest = digest_from_leaves("float32", SHAPE, NUM_BYTES, leaves)
            where = everywhere if is_copy else ""
            events.append(
                Event(site, "float32", SHAPE, NUM_BYTES, digest, b"", group_of[at], inputs[at], placement=where)
            )
        if step < 0:
            state = [event for event in events if event.site.phase is Phase.PARAM]
            yield StepRecord(step, StepKind.INITIAL, state)
        else:
            yield StepRecord(step, StepKind.STEP, events, groups)


def record_rank(path: Path, rank: int, args: argparse.Namespace, run_id: str, differ_from: int | None = None) -> None:
    """Write the file of one rank as the recorder does."""
    writer = RankWriter(path, rank=rank, world_size=args.ranks, level=Level.MODULE, run_id=run_id, leaf_limit_bytes=0)
    like = rank % NUM_RECORDED
    copies = args.ranks if args.replicated else 0
    for record in make_steps(like, args.steps, args.events, differ_from, random.Random("another"), copies):
        writer.append(record)
    writer.close("complete")


def copy_rank(source: Path, target: Path, rank: int, run_id: str) -> None:
    """Make the file of another rank out of a recorded one."""
    shutil.copyfile(source, target)
    with h5py.File(target, "r+", libver=("v110", "v110"), locking=False) as file:
        header = decode_document(file.attrs["header"]) | {"rank": rank, "run_id": run_id}
        del file.attrs["header"]
        file.attrs["header"] = np.bytes_(encode_document(header, one_line=True))
    with RankReader(target) as reader:
        tail = reader.tail()
        num_rows, chain = int(tail["num_rows"]), tail["chain"].tobytes()
    prepare_seal(target, {}, status="complete", num_rows=num_rows, chain=chain).commit()


def make_run(folder: Path, args: argparse.Namespace, templates: list[Path], differ: tuple[int, int] | None) -> None:
    """Write one run, its ranks on as many processes as asked for."""
    create_run(folder, {"level": "module", "world_size": args.ranks, "command": ["made", "up"]}, overwrite=True)
    with open_run(folder, allow_missing_ranks=True) as run:
        run_id = run.run_id
    jobs = []
    for rank in range(args.ranks):
        if differ is not None and rank == differ[0]:
            record_rank(rank_path(folder, rank), rank, args, run_id, differ_from=differ[1])
        else:
            jobs.append((templates[rank % len(templates)], rank_path(folder, rank), rank, run_id))
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.starmap(copy_rank, jobs, chunksize=32)
    update_run(folder, status="complete", exit_status=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--events", type=int, default=64, help="events in a step")
    parser.add_argument("--differ", metavar="RANK:STEP", help="one digest of this rank differs from this step on")
    parser.add_argument("--replicated", action="store_true", help="one run, whose ranks hold copies of the state")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    differ = None
    if args.differ:
        rank, step = map(int, args.differ.split(":"))
        differ = (rank, step)

    started = time.perf_counter()
    recorded = args.folder / "recorded"
    recorded.mkdir(parents=True)
    templates = [rank_path(recorded, rank) for rank in range(min(NUM_RECORDED, args.ranks))]
    for rank, path in enumerate(templates):
        record_rank(path, rank, args, "template")
    runs = [args.folder / "replicated"] if args.replicated else [args.folder / "baseline", args.folder / "candidate"]
    for run in runs[:-1]:
        make_run(run, args, templates, None)
    make_run(runs[-1], args, templates, differ)
    shutil.rmtree(recorded)
    size = sum(path.stat().st_size for run in runs for path in run.iterdir())
    print(f"made {len(runs)} run(s) of {args.ranks} ranks x {args.steps} steps x {args.events} events, "
          f"{size / 1e9:.1f} GB, in {time.perf_counter() - started:.1f} s")  # fmt: skip
    if args.replicated:
        return

    started = time.perf_counter()
    with open_run(runs[0]) as baseline, open_run(runs[1]) as candidate:
        tails = baseline.read_tails(), candidate.read_tails()
    parted = np.flatnonzero((tails[0]["chain"] != tails[1]["chain"]).any(axis=1))
    print(f"read the ends of {2 * args.ranks} files in {time.perf_counter() - started:.2f} s; "
          f"chains that part: {parted.tolist()}")  # fmt: skip


if __name__ == "__main__":
    main()
