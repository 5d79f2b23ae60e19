"""Programs that are none: a runner writes their recordings at once, so that verdicts are tested in milliseconds.

    runner = MadeUpPrograms(Behaviour(), Behaviour(parts_at=3))
    judge(plan, runner=runner)

The runs are real files, written and read by the store; a step is a small model's: batch, forward,
loss, backward, gradients, parameters, moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bitcheck.digest import xxh3_128
from bitcheck.events import Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.launch import Ending, Watch
from bitcheck.process import this_process
from bitcheck.run import create_run, rank_path, update_run
from bitcheck.store import RankWriter
from bitcheck.trials import Trial

GROUPS = [
    Group("forward", "Model", "body", "Linear"),
    Group("backward", "Model", "body", "MmBackward0"),
    Group("optimizer", "AdamW", "", "AdamW"),
]
GONE = {**this_process(), "pid_started": 1}
"""A process that wrote a run and is no more: nobody started at the first clock tick."""
ORDER = [Phase.BATCH, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.GRAD, Phase.PARAM, Phase.OPTIM]


@dataclass(frozen=True)
class Behaviour:
    """What one made-up program does."""

    num_steps: int = 6
    first_step: int = 0
    """Where its state begins: a resumed program has that of the end of the step before."""
    parts_at: int | None = None
    """The step in which it begins to give other bits, and everything after it."""
    parts_in: Phase = Phase.FORWARD
    parts_on: int = 0
    """The rank on which."""
    exit_status: int = 0
    world_size: int = 1
    ranks: Sequence[int] | None = None
    """Ranks that record anything; None for all."""
    steps_of: Mapping[int, int] = field(default_factory=dict)
    """Number of steps of single ranks, where it is another."""
    level: str | None = None
    unobserved: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: {"torch.num_threads": "2", "os.libc": "glibc 2.36"})
    notes: Sequence[str] = ()
    has_gradients: bool = True
    is_frozen: bool = False
    """The same gradients in every step."""
    status: str = "complete"
    module: str = "body"
    """Name of the module whose forward it is."""
    placement: str = ""
    """Where its state and its gradients lie; with one, all ranks hold the same bits of them."""
    odd: tuple[int, int] | None = None
    """(rank, step): from this step on the rank's copy of the parameter is another."""
    says: str = "step 0  loss 5.01\n"
    writes: str | None = None
    """A file that it leaves."""


class MadeUpPrograms:
    """A runner that plays one behaviour after the other; the last one serves for all further trials."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self.behaviours = behaviours
        self.trials: list[Trial] = []
        self.written: list[int] = []
        """Steps that each trial wrote."""

    def __call__(self, trial: Trial, watch: Watch) -> Ending:
        behaviour = self.behaviours[min(len(self.trials), len(self.behaviours) - 1)]
        self.trials.append(trial)
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        trial.log.write_text(behaviour.says)
        if behaviour.writes:
            Path(behaviour.writes).parent.mkdir(parents=True, exist_ok=True)
            Path(behaviour.writes).write_text("weights")
        was_stopped, count = write_run(trial, behaviour, watch)
        self.written.append(count)
        return Ending(143, True) if was_stopped else Ending(behaviour.exit_status)


def write_run(trial: Trial, behaviour: Behaviour, watch: Watch = lambda: False) -> tuple[bool, int]:
    """Write the run of a made-up program; return whether `watch` stopped it, and how many steps it wrote."""
    level = behaviour.level or trial.options.level
    run_id = xxh3_128(str(trial.folder).encode()).hex()
    info: dict[str, Any] = {"run_id": run_id, "level": level, "world_size": behaviour.world_size}
    info |= {"command": list(trial.command), "start_step": trial.options.start_step, "recorder": "run"}
    create_run(trial.folder, info | {"environment": dict(behaviour.environment)}, overwrite=False)
    with patch("bitcheck.store.writer.this_process", lambda: GONE):
        writers = {
            rank: RankWriter(
                rank_path(trial.folder, rank),
                rank=rank,
                world_size=behaviour.world_size,
                level=Level(level),
                run_id=run_id,
                leaf_limit_bytes=None,
            )
            for rank in (range(behaviour.world_size) if behaviour.ranks is None else behaviour.ranks)
        }
    number = trial.options.start_step or 0
    for writer in writers.values():
        writer.append(make_snapshot(behaviour, number - 1))
    was_stopped, count = False, 0
    for offset in range(behaviour.num_steps):
        for rank, writer in writers.items():
            if offset < behaviour.steps_of.get(rank, behaviour.num_steps):
                writer.append(make_step(behaviour, rank, behaviour.first_step + offset, number + offset))
        count += 1
        if watch():
            was_stopped = True
            break
    for writer in writers.values():
        if was_stopped:
            writer._file.let_go("recording")  # unsealed, as it is left by a process that is no more
        else:
            writer.close("failed" if behaviour.status == "failed" else "complete")
    status = "killed" if was_stopped else "failed" if behaviour.exit_status else "complete"
    exit_status = 143 if was_stopped else behaviour.exit_status
    stopped = {"stopped": True} if was_stopped else {}
    update_run(trial.folder, status=status, exit_status=exit_status, notes=list(behaviour.notes), **stopped)
    return was_stopped, count


def make_step(behaviour: Behaviour, rank: int, step: int, number: int) -> StepRecord:
    """Return a step; `step` is what it computes, `number` how it is called."""

    def event(phase: Phase, path: str, slot: str, group: int = -1, inputs: tuple[int, ...] = ()) -> Event:
        site = Site(phase, "" if phase is Phase.LOSS else "Model", path, slot)
        parts_at = behaviour.parts_at
        is_parted = parts_at is not None and step >= parts_at and rank == behaviour.parts_on
        if step == parts_at:
            is_parted &= ORDER.index(phase) >= ORDER.index(behaviour.parts_in)
        if phase is Phase.BATCH:
            is_parted &= behaviour.parts_in is Phase.BATCH
        moment = 0 if behaviour.is_frozen and phase in (Phase.GRAD, Phase.BACKWARD) else step
        is_copy = bool(behaviour.placement) and phase in (Phase.GRAD, Phase.PARAM, Phase.OPTIM)
        who = "any" if is_copy else rank
        if phase is Phase.PARAM and behaviour.odd is not None and rank == behaviour.odd[0] and step >= behaviour.odd[1]:
            who = "odd"
        digest = xxh3_128(f"{site.key} {moment} {who} {is_parted}".encode())
        placement = behaviour.placement if is_copy else ""
        return Event(site, "float32", (4, 4), 64, digest, digest, group, inputs, placement=placement)

    events = [
        event(Phase.BATCH, "", "in.0"),
        event(Phase.FORWARD, behaviour.module, "out", 0, (0,)),
        event(Phase.LOSS, "", "value", -1, (1,)),
        event(Phase.BACKWARD, "body.weight", "grad", 1, (1, 2)),
    ]
    if behaviour.has_gradients:
        events.append(event(Phase.GRAD, "body.weight", "grad", -1, (3,)))
    last = len(events) - 1
    events.append(event(Phase.PARAM, "body.weight", "value", 2, (last,)))
    events.append(event(Phase.OPTIM, "body.weight", "exp_avg", 2, (last,)))
    groups = [Group("forward", "Model", behaviour.module, "Linear"), *GROUPS[1:]]
    return StepRecord(number, StepKind.STEP, events, groups, dict(behaviour.unobserved))


def make_snapshot(behaviour: Behaviour, number: int) -> StepRecord:
    """Return the state that a program starts from: that of the end of the step before its first."""
    step = make_step(behaviour, 0, behaviour.first_step - 1, number)
    events = [event for event in step.events if event.site.phase in (Phase.PARAM, Phase.OPTIM)]
    for event in events:
        event.group, event.inputs = -1, ()
    return StepRecord(number, StepKind.INITIAL, events)
