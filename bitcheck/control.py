"""The positive control: does this very pipeline see one flipped bit of one gradient?

A check that cannot fail proves nothing, and the ways in which it cannot are many: nothing recorded,
a blind comparison, a file that is read but not looked at. So each verdict first plants a fault. One
recorded step is written again as runs of their own: twice as it is, and once with one gradient's
digest changed by what a flipped bit changes. The changed copy must be found different, at that step
and that gradient, by the comparison and by the follower that stops programs; the second plain copy
must not. The change is taken from the digest itself: the digests of a buffer before and after one bit of it
was flipped, combined by exclusive or. A digest that does not see the bit changes nothing, and the
control fails.

The same for the check of replicas: one bit of one rank's copy must be found, on that rank.

Place in the flow: run, store, diff, replicas -> *control* -> gate, bisect, commits.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitcheck.answer import Verdict
from bitcheck.diff import diff_runs
from bitcheck.digest import digest_bytes
from bitcheck.events import Phase, StepKind, StepRecord
from bitcheck.follow import Compare, first_differing_step
from bitcheck.replica_groups import Selector, parse_group
from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaVerdict
from bitcheck.run import Run, create_run, open_run, rank_path, update_run
from bitcheck.store import LoadedStep, RankWriter

_MAX_BUFFER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Control:
    """What the planted fault was, and whether it was seen."""

    step: int
    rank: int
    site: str
    problem: str | None
    """Why the pipeline cannot be trusted; None where it saw exactly the planted fault."""

    @property
    def has_passed(self) -> bool:
        """Whether the pipeline saw the flipped bit, and nothing without it."""
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        """Return the control as JSON data."""
        return {
            "passed": self.has_passed,
            "step": self.step,
            "rank": self.rank,
            "site": self.site,
            "problem": self.problem,
        }


def run_control(run: Run, *, compare: Compare = diff_runs, first_differing: Any = first_differing_step) -> Control:
    """Plant a flipped bit in a copy of a step of `run` and look for it.

    Which gradient of which step is drawn anew for each run, from its id. Raises ValueError where the
    run holds no gradient, RunError where it cannot be read.
    """
    rank, row, event = _choose_gradient(run)
    record = run.rank(rank).load(row).to_record()
    site = record.events[event].site
    with tempfile.TemporaryDirectory(prefix="bitcheck-control-", ignore_cleanup_errors=True) as scratch:
        plain, again, flipped = (Path(scratch, name) for name in ("plain", "again", "flipped"))
        _copy_step(run, record.step, plain)
        _copy_step(run, record.step, again)
        _copy_step(run, record.step, flipped, (rank, event))
        problem = None
        for folder, is_flipped in ((again, False), (flipped, True)):
            with open_run(plain) as baseline, open_run(folder) as copy:
                answer = compare(baseline, copy, until=record.step)
                step = first_differing(baseline, copy, until=record.step)
            seen = answer.first is not None
            if not is_flipped and (answer.verdict is not Verdict.IDENTICAL or step is not None):
                problem = "an unchanged copy of a recorded step was taken for another"
            elif is_flipped and (answer.verdict is not Verdict.DIVERGED or not seen):
                problem = f"the comparison did not see it: {answer.verdict}"
            elif is_flipped and step != record.step:
                problem = f"the follower that stops programs did not see it: it found step {step}"
            elif is_flipped and answer.first is not None and not _is_planted(answer.first, record, rank, event):
                problem = f"the comparison saw {answer.first.site} in step {answer.first.step} instead"
            if problem:
                break
    return Control(record.step, rank, site.text(False), problem)


def run_replica_control(
    run: Run, *, groups: Sequence[str] = (), exceptions: Sequence[str] = (), check: Any = check_replicas
) -> Control:
    """Plant a flipped bit in one rank's copy of a replicated tensor, in a copy of a step of `run`, and look for it.

    Raises ValueError where no rank holds a copy of anything, RunError where the run cannot be read.
    """
    rank, row, event = _choose_copy(run, groups, exceptions)
    record = run.rank(rank).load(row).to_record()
    site = record.events[event].site
    names = (site.text(False), site.text(True))
    with tempfile.TemporaryDirectory(prefix="bitcheck-control-", ignore_cleanup_errors=True) as scratch:
        plain, flipped = Path(scratch, "plain"), Path(scratch, "flipped")
        _copy_step(run, record.step, plain)
        _copy_step(run, record.step, flipped, (rank, event))
        problem = None
        with open_run(plain) as copy:
            if check(copy, groups=groups, exceptions=exceptions).verdict is not ReplicaVerdict.AGREE:
                problem = "the copies in an unchanged step were taken for different ones"
        with open_run(flipped) as copy:
            answer = check(copy, groups=groups, exceptions=exceptions)
            first = answer.first
            if problem is None and first is None:
                problem = f"the check did not see it: {answer.verdict}"
            elif problem is None and first is not None and (first.site not in names or rank not in first.ranks):
                problem = f"the check saw {first.site} on ranks {first.ranks} instead"
    return Control(record.step, rank, site.text(False), problem)


def _choose_copy(run: Run, groups: Sequence[str], exceptions: Sequence[str]) -> tuple[int, int, int]:
    """Return (rank, row, index of an event) of a tensor that another rank holds too."""
    draw = random.Random(run.run_id)
    selector = Selector(True, [parse_group(text, run.world_size) for text in groups], exceptions)
    for rank, row, step in _draw_steps(run, draw):
        found = [
            event
            for selection in selector.select(rank, step.layout, step.meta).values()
            for events in selection.events
            for event in events.tolist()
            if step.num_bytes[event] > 0
        ]
        # Gradients and optimizer states may be divided among ranks: one that no other rank holds is no copy.
        parameters = [event for event in found if step.sites[event].phase is Phase.PARAM]
        if found:
            return rank, row, draw.choice(sorted(parameters or found))
    raise ValueError("no rank holds a copy of anything in a whole step")


def _is_planted(first: Any, record: StepRecord, rank: int, event: int) -> bool:
    site = record.events[event].site
    return (first.step, first.rank) == (record.step, rank) and first.site in (site.text(False), site.text(True))


def _choose_gradient(run: Run) -> tuple[int, int, int]:
    """Return (rank, row, index of a `grad` event) of a whole step."""
    draw = random.Random(run.run_id)
    for rank, row, step in _draw_steps(run, draw):
        gradients = [
            index
            for index, site in enumerate(step.sites)
            if site.phase is Phase.GRAD and not site.is_eval and step.num_bytes[index] > 0
        ]
        if gradients:
            return rank, row, draw.choice(gradients)
    raise ValueError("no gradient was recorded")


def _draw_steps(run: Run, draw: random.Random) -> Iterator[tuple[int, int, LoadedStep]]:
    """Yield (rank, row, step) of whole steps in an order that is drawn, at most 64 of a rank."""
    ranks = list(run.ranks)
    draw.shuffle(ranks)
    for rank in ranks:
        reader = run.rank(rank)
        rows = np.flatnonzero(reader.table["kind"] == int(StepKind.STEP)).tolist()
        draw.shuffle(rows)
        for row in rows[:64]:
            yield rank, row, reader.load(row)


def _copy_step(run: Run, step: int, folder: Path, flip: tuple[int, int] | None = None) -> None:
    """Write one step of every rank as a complete run; with `flip` (rank, event) one bit of it changed."""
    info = {key: value for key, value in run.info.items() if key not in ("schema", "checksum", "job")}
    create_run(folder, info | {"status": "recording", "start_step": step}, overwrite=False)
    for rank in run.ranks:
        reader = run.rank(rank)
        table = reader.table
        row = int(np.flatnonzero((table["step"] == step) & (table["kind"] == int(StepKind.STEP)))[0])
        record = reader.load(row).to_record()
        if flip is not None and flip[0] == rank:
            event = record.events[flip[1]]
            mask = _flipped_bit_mask(event.num_bytes)
            event.digest = _xor(event.digest, mask)
            if event.leaves:
                event.leaves = _xor(event.leaves[:16], mask) + event.leaves[16:]
        writer = RankWriter(
            rank_path(folder, rank),
            rank=rank,
            world_size=run.world_size,
            level=run.level,
            run_id=run.run_id,
            leaf_limit_bytes=None,
        )
        writer.append(record)
        writer.close("complete")
    update_run(folder, status="complete", exit_status=0)


def _flipped_bit_mask(num_bytes: int) -> bytes:
    """Return what one flipped bit does to the digest of a tensor of this size, as 16 bytes for an exclusive or."""
    buffer = np.frombuffer(random.Random(num_bytes).randbytes(min(num_bytes, _MAX_BUFFER_BYTES)), np.uint8).copy()
    before, _ = digest_bytes("uint8", (buffer.size,), buffer)
    buffer[buffer.size // 2] ^= 1
    after, _ = digest_bytes("uint8", (buffer.size,), buffer)
    return _xor(before, after)


def _xor(first: bytes, second: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(first, second, strict=True))
