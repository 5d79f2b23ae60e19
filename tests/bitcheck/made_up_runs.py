"""Made-up training runs whose digests follow from each other, so that a planned fault spreads as a real one does.

The program trains a model of a few blocks in a row, by data parallelism where there are several
ranks. Every digest is a hash of the site's own key and of the digests that it was computed from, state
included; a fault changes one digest where it is computed, and everything after it follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bitcheck.digest import xxh3_128
from bitcheck.events import STATE_PHASES, Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.memory import MemoryRun

NUM_BLOCKS = 3
ROOT = "Model"
PARAMETERS = [f"blocks.{block}.weight" for block in range(NUM_BLOCKS)]
STATE_LEVEL = {
    Phase.RNG, Phase.BATCH, Phase.LOSS, Phase.GRAD, Phase.SCALAR, Phase.PARAM, Phase.BUFFER, Phase.OPTIM, Phase.EXTRA,
}  # fmt: skip

Fault = tuple[int, int, str]
"""(rank, step, the site as it is written): that digest comes out otherwise, from the same inputs."""


def digest_of(*parts: object) -> bytes:
    """Return a digest that depends on all parts."""
    return xxh3_128(repr(parts).encode())


@dataclass
class Plan:
    """What one made-up run does."""

    level: Level = Level.MODULE
    num_steps: int = 4
    num_ranks: int = 1
    start_step: int = 0
    """The run begins with the state of a run from 0 at the end of the step before."""
    explicit_start: bool = False
    """Whether the run was given its number."""
    faults: Collection[Fault] = ()
    lost: Collection[str] = ()
    """Sites of the state that a resumed run does not restore: they are missing."""
    skipped: Collection[Fault] = ()
    """Sites that are not there in a step of a rank."""
    lr: Mapping[int, float] = field(default_factory=dict)
    """Learning rate from a step on."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """Seed of a generator; `torch.cpu` is drawn from in every step, `python` never."""
    data_seed: int = 0
    num_recorded: int | None = None
    status: str = "complete"
    environment: Mapping[str, str] = field(default_factory=dict)


def make_run(**plan: Any) -> MemoryRun:
    """Return the run of `Plan(**plan)`."""
    return _Program(Plan(**plan)).run()


class _Rank:
    """One rank's state and the step it is in."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.params = {name: digest_of("param", name) for name in PARAMETERS}
        self.moments = {name: digest_of("moment", name) for name in PARAMETERS}
        self.buffer = digest_of("buffer")
        self.record = StepRecord(0, StepKind.STEP)
        self.gradients: dict[str, bytes] = {}
        self.records: list[StepRecord] = []
        self.lost: frozenset[str] = frozenset()


class _Program:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks = [_Rank(rank) for rank in range(plan.num_ranks)]

    def run(self) -> MemoryRun:
        plan = self.plan
        begin = plan.start_step
        for step in range(begin):
            self.step(step, faults=())
        for rank in self.ranks:
            rank.records.clear()
            rank.record = StepRecord(begin - 1, StepKind.INITIAL)
            rank.lost = frozenset(plan.lost)
            self.snapshot(rank, begin - 1, plan.faults)
            rank.records.append(rank.record)
        for step in range(begin, begin + plan.num_steps):
            self.step(step, plan.faults)
        steps = {}
        for rank in self.ranks:
            end = begin + plan.num_steps
            rank.record = StepRecord(end, StepKind.FRAGMENT)
            self.generators(rank, end, plan.faults)
            rank.records.append(rank.record)
            steps[rank.rank] = rank.records if plan.num_recorded is None else rank.records[: plan.num_recorded + 1]
        for records in steps.values():
            offset = 0 if plan.explicit_start else begin
            for record in records:
                record.step -= offset
        return MemoryRun(
            steps,
            level=plan.level,
            status=plan.status,
            environment=plan.environment,
            info={"start_step": begin if plan.explicit_start else None, "digest_version": 1},
        )

    def emit(
        self,
        rank: _Rank,
        step: int,
        faults: Collection[Fault],
        site: Site,
        *sources: bytes,
        inputs: tuple[int, ...] = (),
        group: int = -1,
        value: str | None = None,
    ) -> tuple[bytes, int]:
        """Add an event; return its digest and its index, -1 where it is not recorded."""
        # A snapshot records the state as it is; everything else is computed here.
        digest = sources[0] if site.phase in STATE_PHASES else digest_of(site.key, sources)
        text = site.text(with_root=site.root != ROOT)
        if (rank.rank, step, text) in faults:
            digest = digest_of(digest, "fault")
        is_recorded = self.plan.level is not Level.STATE or site.phase in STATE_LEVEL
        if not is_recorded or (rank.rank, step, text) in self.plan.skipped or text in rank.lost:
            return digest, -1
        known = tuple(index for index in inputs if index >= 0)
        if self.plan.level is Level.STATE:
            known, group = (), -1
        rank.record.events.append(Event(site, "float32", (2, 8), 64, digest, digest, group, known, value))
        return digest, len(rank.record.events) - 1

    def group(self, rank: _Rank, kind: str, path: str, op: str, parent: int = -1) -> int:
        rank.record.groups.append(Group(kind, ROOT, path, op, parent))
        return len(rank.record.groups) - 1

    def generators(self, rank: _Rank, step: int, faults: Collection[Fault]) -> bytes:
        plan = self.plan
        state = digest_of("torch.cpu", plan.seeds.get("torch.cpu", 0), step)
        drawn, _ = self.emit(rank, step, faults, Site(Phase.RNG, "", "torch.cpu", "state"), state)
        unused = digest_of("python", plan.seeds.get("python", 0))
        self.emit(rank, step, faults, Site(Phase.RNG, "", "python", "state"), unused)
        return drawn

    def step(self, step: int, faults: Collection[Fault]) -> None:
        for rank in self.ranks:
            rank.record = StepRecord(step, StepKind.STEP)
            self.forward_backward(rank, step, faults)
        reduced = {name: digest_of("reduced", [rank.gradients[name] for rank in self.ranks]) for name in PARAMETERS}
        for rank in self.ranks:
            self.optimize(rank, step, faults, reduced)
            rank.lost = frozenset()
            rank.records.append(rank.record)

    def forward_backward(self, rank: _Rank, step: int, faults: Collection[Fault]) -> None:
        drawn = self.generators(rank, step, faults)
        data = digest_of("data", self.plan.data_seed, step, rank.rank)
        batch, at = self.emit(rank, step, faults, Site(Phase.BATCH, ROOT, "", "in.0"), data)
        outer = self.group(rank, "forward", "", ROOT)
        value = batch
        flow: tuple[int, ...] = (at,)
        groups, outs, values = [], [], []
        for block in range(NUM_BLOCKS):
            path = f"blocks.{block}"
            groups.append(self.group(rank, "forward", path, "Linear", outer))
            weight = rank.params[f"{path}.weight"]
            site = Site(Phase.FORWARD, ROOT, path, "in.0")
            value, entered = self.emit(rank, step, faults, site, value, inputs=flow, group=outer)
            site = Site(Phase.FORWARD, ROOT, path, "out")
            value, at = self.emit(rank, step, faults, site, value, weight, drawn, inputs=(entered,), group=groups[-1])
            values.append(value)
            outs.append(at)
            flow = (at,)
        site = Site(Phase.FORWARD, ROOT, "", "out")
        value, at = self.emit(rank, step, faults, site, *values, inputs=tuple(outs), group=outer)
        loss, at = self.emit(rank, step, faults, Site(Phase.LOSS, "", "loss", "value"), value, inputs=(at,))
        gradient, flow = loss, (at,)
        for block in reversed(range(NUM_BLOCKS)):
            path = f"blocks.{block}"
            group = self.group(rank, "backward", path, "AddmmBackward0")
            sources = (*flow, outs[block])
            site = Site(Phase.BACKWARD, ROOT, f"{path}.weight", "grad")
            own, at = self.emit(rank, step, faults, site, gradient, values[block], inputs=sources, group=group)
            rank.gradients[f"{path}.weight"] = own
            site = Site(Phase.BACKWARD, ROOT, path, "grad_in.0")
            gradient, at = self.emit(rank, step, faults, site, gradient, inputs=sources, group=group)
            flow = (at,)
        rank.buffer = digest_of(rank.buffer, values[0])

    def optimize(self, rank: _Rank, step: int, faults: Collection[Fault], reduced: Mapping[str, bytes]) -> None:
        locals_ = tuple(index for index, event in enumerate(rank.record.events) if event.site.slot == "grad")
        gradients = {}
        for name in reversed(PARAMETERS):
            site = Site(Phase.GRAD, ROOT, name, "grad")
            gradients[name], _ = self.emit(rank, step, faults, site, reduced[name], inputs=locals_)
        lr = next((self.plan.lr[at] for at in sorted(self.plan.lr, reverse=True) if at <= step), 0.1)
        site = Site(Phase.SCALAR, "SGD", "0", "lr")
        rate, _ = self.emit(rank, step, faults, site, digest_of(lr), value=repr(lr))
        for name in PARAMETERS:
            rank.moments[name] = digest_of(rank.moments[name], gradients[name])
            rank.params[name] = digest_of(rank.params[name], rank.moments[name], rate)
        self.snapshot(rank, step, faults)

    def snapshot(self, rank: _Rank, step: int, faults: Collection[Fault]) -> None:
        for name in PARAMETERS:
            site = Site(Phase.PARAM, ROOT, name, "value")
            rank.params[name], _ = self.emit(rank, step, faults, site, rank.params[name])
        site = Site(Phase.BUFFER, ROOT, "blocks.0.mean", "value")
        rank.buffer, _ = self.emit(rank, step, faults, site, rank.buffer)
        for name in PARAMETERS:
            site = Site(Phase.OPTIM, ROOT, name, "momentum_buffer")
            rank.moments[name], _ = self.emit(rank, step, faults, site, rank.moments[name])
