"""What is in a run: its steps, its sites by phase, its largest tensors, what went unobserved.

Place in the flow: store -> *summary* -> report. It compares nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitcheck.errors import UsageError
from bitcheck.events import PHASES, Phase, StepKind
from bitcheck.naming import Naming
from bitcheck.run_document import STOPPED
from bitcheck.views import RankView, RunView, StepView

SCHEMA = "bitcheck.show/1"
NUM_LARGEST = 8
MAX_STEPS_READ = 256
"""Steps whose notes are read for what went unobserved; of a longer run the first ones."""

_KIND_NAMES = {StepKind.INITIAL: "initial snapshot", StepKind.STEP: "step", StepKind.FRAGMENT: "fragment"}


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One site of a step, with its digest."""

    site: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    digest: str
    """32 hexadecimal digits."""
    value: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the event as JSON data."""
        answer: dict[str, Any] = {
            "site": self.site,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "bytes": self.num_bytes,
            "digest": self.digest,
        }
        if self.value is not None:
            answer["value"] = self.value
        return answer


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """How much of a step one phase is."""

    phase: str
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is in a run; steps, phases and tensors are those of one rank."""

    path: str
    info: Mapping[str, Any]
    status: str
    rank_statuses: Mapping[str, int]
    """Status -> number of ranks."""
    missing_ranks: tuple[int, ...]
    """Ranks of which the folder has no file."""
    rank: int
    num_steps: int
    first_step: int | None
    last_step: int | None
    has_initial_snapshot: bool
    has_fragment: bool
    shown_step: int | None
    """The step that `phases` and `largest` are of: the last whole one."""
    phases: tuple[PhaseCount, ...]
    largest: tuple[RecordedEvent, ...]
    num_modules: int
    events: int
    """Over all steps of this rank."""
    bytes: int
    unobserved: Mapping[str, int]
    remarks: tuple[str, ...]
    environment: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON data, schema `bitcheck.show/1`."""
        info = self.info
        return {
            "schema": SCHEMA,
            "path": self.path,
            "run_id": info.get("run_id"),
            "level": info.get("level"),
            "world_size": info.get("world_size"),
            "status": self.status,
            "exit_status": info.get("exit_status"),
            "command": info.get("command"),
            "started": info.get("started"),
            "ended": info.get("ended"),
            "bitcheck_version": info.get("bitcheck_version"),
            "digest_version": info.get("digest_version"),
            "rank_statuses": dict(self.rank_statuses),
            "missing_ranks": list(self.missing_ranks),
            "rank": self.rank,
            "steps": {
                "count": self.num_steps,
                "first": self.first_step,
                "last": self.last_step,
                "initial_snapshot": self.has_initial_snapshot,
                "fragment": self.has_fragment,
            },
            "events": self.events,
            "bytes": self.bytes,
            "shown_step": self.shown_step,
            "phases": [{"phase": row.phase, "events": row.events, "bytes": row.bytes} for row in self.phases],
            "modules": self.num_modules,
            "largest": [event.to_json() for event in self.largest],
            "unobserved": dict(self.unobserved),
            "notes": list(info.get("notes") or ()),
            "remarks": list(self.remarks),
            "environment": dict(self.environment),
        }


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Every event of one recorded step."""

    path: str
    rank: int
    step: int
    kind: str
    events: tuple[RecordedEvent, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON data, schema `bitcheck.show/1`."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "rank": self.rank,
            "step": self.step,
            "kind": self.kind,
            "events": [event.to_json() for event in self.events],
        }


def summarize_run(run: RunView, rank: int | None = None) -> RunSummary:
    """Return what is in a run; `rank` (the first recorded one) is looked into. Raises UsageError for no such rank."""
    chosen = _choose_rank(run, rank)
    reader = run.rank(chosen)
    table = reader.table
    kinds = table["kind"]
    steps = table["step"][kinds == int(StepKind.STEP)]
    whole = (kinds == int(StepKind.STEP)).nonzero()[0]
    shown = int(whole[-1]) if len(whole) else len(table) - 1
    naming = Naming()
    unobserved: Counter[str] = Counter()
    remarks: dict[str, None] = {}
    for row in range(min(len(table), MAX_STEPS_READ)):
        step = reader.load(row)
        unobserved.update(dict(step.unobserved))
        remarks.update(dict.fromkeys(step.remarks))
        naming.learn(step)
    last = reader.load(shown) if shown >= 0 else None
    if last is not None:
        naming.learn(last)
    return RunSummary(
        path=str(run.path),
        info=run.info,
        status=str(run.status),
        rank_statuses=_rank_statuses(run),
        missing_ranks=tuple(sorted({*range(run.world_size)} - {*run.ranks})),
        rank=chosen,
        num_steps=len(steps),
        first_step=int(steps.min()) if len(steps) else None,
        last_step=int(steps.max()) if len(steps) else None,
        has_initial_snapshot=bool((kinds == int(StepKind.INITIAL)).any()),
        has_fragment=bool((kinds == int(StepKind.FRAGMENT)).any()),
        shown_step=None if last is None else last.step,
        phases=() if last is None else _count_phases(last),
        largest=() if last is None else _largest(last, naming),
        num_modules=0 if last is None else _count_modules(last),
        events=int(table["num_events"].sum()),
        bytes=int(table["num_bytes"].sum()),
        unobserved=dict(sorted(unobserved.items())),
        remarks=tuple(remarks),
        environment=run.environment,
    )


def summarize_step(run: RunView, step: int, rank: int | None = None, phase: Phase | None = None) -> StepSummary:
    """Return every event of one step, of one phase where given.

    The initial snapshot has the number before the first step. Raises UsageError where the run has no
    such rank or step.
    """
    chosen = _choose_rank(run, rank)
    reader = run.rank(chosen)
    row = _find_row(reader, step)
    if row is None:
        steps = reader.table["step"]
        has = f"steps {int(steps.min())} to {int(steps.max())}" if len(steps) else "no steps"
        raise UsageError(f"{run.path} has no step {step} on rank {chosen}; it has {has}.\nChoose one of those.")
    loaded = reader.load(row)
    naming = Naming()
    naming.learn(loaded)
    wanted = [index for index, site in enumerate(loaded.sites) if phase is None or site.phase is phase]
    return StepSummary(
        path=str(run.path),
        rank=chosen,
        step=loaded.step,
        kind=_KIND_NAMES[StepKind(loaded.kind)],
        events=tuple(_recorded(loaded, index, naming) for index in wanted),
    )


def _choose_rank(run: RunView, rank: int | None) -> int:
    if not run.ranks:
        raise UsageError(f"{run.path} has no rank's file: nothing was recorded.\nRecord it again.")
    if rank is None:
        return run.ranks[0]
    if rank not in run.ranks:
        raise UsageError(f"{run.path} has no rank {rank}; it has ranks {run.ranks[0]} to {run.ranks[-1]}.")
    return rank


def _find_row(reader: RankView, step: int) -> int | None:
    """The row of a step; a whole step before a fragment with the same number."""
    rows = (reader.table["step"] == step).nonzero()[0].tolist()
    rows.sort(key=lambda row: int(reader.table["kind"][row]) == int(StepKind.FRAGMENT))
    return int(rows[0]) if rows else None


def _rank_statuses(run: RunView) -> dict[str, int]:
    statuses = run.read_tails()["status"].tolist()
    if str(run.status) == STOPPED:
        statuses = [status if status == "complete" else STOPPED for status in statuses]
    return dict(sorted(Counter(statuses).items()))


def _count_phases(step: StepView) -> tuple[PhaseCount, ...]:
    events: Counter[Phase] = Counter()
    sizes: Counter[Phase] = Counter()
    for index, site in enumerate(step.sites):
        events[site.phase] += 1
        sizes[site.phase] += int(step.num_bytes[index])
    return tuple(PhaseCount(str(phase), events[phase], sizes[phase]) for phase in PHASES if events[phase])


def _count_modules(step: StepView) -> int:
    return len({(group.root, group.path) for group in step.groups if group.kind == "forward"})


def _largest(step: StepView, naming: Naming) -> tuple[RecordedEvent, ...]:
    order = sorted(range(len(step.sites)), key=lambda index: (-int(step.num_bytes[index]), index))
    return tuple(_recorded(step, index, naming) for index in order[:NUM_LARGEST])


def _recorded(step: StepView, index: int, naming: Naming) -> RecordedEvent:
    return RecordedEvent(
        site=naming.site(step.sites[index]),
        dtype=step.dtypes[index],
        shape=tuple(step.shapes[index]),
        num_bytes=int(step.num_bytes[index]),
        digest=step.digests[index].tobytes().hex(),
        value=step.value(index),
    )
