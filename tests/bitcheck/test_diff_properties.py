"""Properties of diff over generated steps: a fault planted anywhere is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bitcheck.answer import Answer, Origin
from bitcheck.diff import diff_runs
from bitcheck.events import Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.memory import MemoryRun
from tests.bitcheck.made_up_runs import digest_of, make_run


@dataclass(frozen=True)
class Graph:
    """One step as a graph: for each event the earlier ones that it was computed from."""

    inputs: tuple[tuple[int, ...], ...]

    @property
    def roots(self) -> int:
        """How many events come first and were computed from nothing."""
        return next((index for index, edges in enumerate(self.inputs) if edges), len(self.inputs))

    def descendants(self, event: int) -> set[int]:
        found = {event}
        for index, edges in enumerate(self.inputs):
            if found & set(edges):
                found.add(index)
        return found - {event}


@st.composite
def graphs(draw: st.DrawFn, min_events: int = 2, max_events: int = 24) -> Graph:
    """Steps whose first event is a batch and whose others were each computed from one to three earlier ones."""
    count = draw(st.integers(min_events, max_events))
    inputs: list[tuple[int, ...]] = [()]
    for index in range(1, count):
        edges = draw(st.sets(st.integers(0, index - 1), min_size=1, max_size=3))
        inputs.append(tuple(sorted(edges)))
    return Graph(tuple(inputs))


def site_of(index: int) -> Site:
    if index == 0:
        return Site(Phase.BATCH, "Net", "", "in.0")
    return Site(Phase.BACKWARD if index % 3 == 0 else Phase.FORWARD, "Net", f"layers.{index}", "out")


def record(
    graph: Graph, step: int, faults: frozenset[int] = frozenset(), missing: frozenset[int] = frozenset()
) -> StepRecord:
    digests: list[bytes] = []
    events: list[Event] = []
    places: dict[int, int] = {}
    groups = [Group("forward", "Net", f"layers.{index}", "Layer") for index in range(len(graph.inputs))]
    for index, edges in enumerate(graph.inputs):
        digest = digest_of(index, step, [digests[edge] for edge in edges], index in faults)
        digests.append(digest)
        if index not in missing:
            places[index] = len(events)
            known = tuple(places[edge] for edge in edges if edge in places)
            group = index if edges else -1
            events.append(Event(site_of(index), "float32", (4,), 16, digest, digest, group, known))
    return StepRecord(step, StepKind.STEP, events, groups)


def run_of(graph: Graph, *, faults: dict[int, frozenset[int]] | None = None, num_steps: int = 3) -> MemoryRun:
    planted = faults or {}
    return MemoryRun({0: [record(graph, step, planted.get(step, frozenset())) for step in range(num_steps)]})


def named(answer: Answer) -> list[tuple[int, str]]:
    return [(origin.step, origin.site) for origin in answer.origins]


def text(index: int) -> str:
    return site_of(index).text(with_root=False)


@given(graph=graphs(), data=st.data())
def test_a_fault_at_any_event_is_the_one_origin_and_all_that_follows_is_propagated(graph: Graph, data: Any) -> None:
    event = data.draw(st.integers(0, len(graph.inputs) - 1), label="faulty event")
    answer = diff_runs(run_of(graph), run_of(graph, faults={1: frozenset({event})}))
    assert answer.verdict == "diverged"
    assert named(answer) == [(1, text(event))]
    assert answer.propagated == len(graph.descendants(event))


@given(graph=graphs())
def test_the_twin_without_a_fault_finds_nothing(graph: Graph) -> None:
    answer = diff_runs(run_of(graph), run_of(graph))
    assert (answer.verdict, answer.origins, answer.propagated) == ("identical", (), 0)
    assert answer.compared.events == 3 * len(graph.inputs)


@given(graph=graphs(min_events=4), data=st.data())
def test_of_two_faults_both_are_found_unless_one_feeds_the_other(graph: Graph, data: Any) -> None:
    events = st.integers(1, len(graph.inputs) - 1)
    pair = data.draw(st.lists(events, min_size=2, max_size=2, unique=True).map(sorted), label="faulty events")
    answer = diff_runs(run_of(graph), run_of(graph, faults={1: frozenset(pair)}))
    # The later one is hidden where one of its own inputs differs already.
    parted = graph.descendants(pair[0]) | {pair[0]}
    hidden = bool(parted & set(graph.inputs[pair[1]]))
    assert named(answer) == [(1, text(event)) for event in (pair[:1] if hidden else pair)]


@given(graph=graphs(), data=st.data())
def test_swapping_the_runs_swaps_the_roles_and_nothing_else(graph: Graph, data: Any) -> None:
    events = st.frozensets(st.integers(0, len(graph.inputs) - 1), max_size=3)
    missing = data.draw(st.tuples(events, events), label="missing")
    faults = data.draw(events, label="faults")
    steps = [
        [record(graph, 0), record(graph, 1, faults if side else frozenset(), missing[side]), record(graph, 2)]
        for side in (0, 1)
    ]
    baseline, candidate = MemoryRun({0: steps[0]}, run_id="one"), MemoryRun({0: steps[1]}, run_id="other")
    answer, mirrored = diff_runs(baseline, candidate), diff_runs(candidate, baseline)
    assert mirrored.verdict == answer.verdict
    assert mirrored.cause == answer.cause
    assert mirrored.propagated == answer.propagated
    assert tuple(map(_swap_roles, mirrored.origins)) == answer.origins
    assert [run.run_id for run in mirrored.runs] == ["other", "one"]


def _swap_roles(origin: Origin) -> Origin:
    other = {"baseline": "candidate", "candidate": "baseline", None: None}[origin.missing_in]
    return replace(
        origin,
        missing_in=other,
        baseline_value=origin.candidate_value,
        candidate_value=origin.baseline_value,
    )


PROGRAM_SITES = [
    "batch/Model:in.0",
    "rng/torch.cpu:state",
    *(f"forward/blocks.{block}:{slot}" for block in range(3) for slot in ("in.0", "out")),
    "forward/Model:out",
    "loss/loss:value",
    *(f"backward/blocks.{block}:grad_in.0" for block in range(3)),
    *(f"backward/blocks.{block}.weight:grad" for block in range(3)),
    *(f"grad/blocks.{block}.weight:grad" for block in range(3)),
    "scalar/SGD.0:lr",
    *(f"param/blocks.{block}.weight:value" for block in range(3)),
    "buffer/blocks.0.mean:value",
    *(f"optim/blocks.{block}.weight:momentum_buffer" for block in range(3)),
]

plans: st.SearchStrategy[Callable[[], MemoryRun]] = st.builds(
    lambda **plan: lambda: make_run(**plan),
    level=st.sampled_from([Level.STATE, Level.MODULE]),
    num_ranks=st.integers(1, 3),
    num_steps=st.integers(2, 4),
    start_step=st.integers(0, 2),
    explicit_start=st.booleans(),
    faults=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(PROGRAM_SITES)), max_size=3),
    skipped=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(PROGRAM_SITES)), max_size=2),
    seeds=st.fixed_dictionaries({"torch.cpu": st.integers(0, 1), "python": st.integers(0, 1)}),
    data_seed=st.integers(0, 1),
    status=st.sampled_from(["complete", "killed"]),
)


@given(plan=plans)
def test_a_run_is_identical_to_itself(plan: Callable[[], MemoryRun]) -> None:
    answer = diff_runs(plan(), plan())
    assert (answer.verdict, answer.origins, answer.propagated) == ("identical", (), 0)


@given(plan=plans, other=plans)
def test_any_two_runs_mirror_each_other(plan: Callable[[], MemoryRun], other: Callable[[], MemoryRun]) -> None:
    answer, mirrored = diff_runs(plan(), other()), diff_runs(other(), plan())
    assert mirrored.verdict == answer.verdict
    assert mirrored.cause == answer.cause
    assert mirrored.compared.steps == answer.compared.steps
    offset = 0
    if answer.first is not None and mirrored.first is not None:
        offset = answer.first.step - mirrored.first.step  # steps are numbered as in the baseline
    swapped = [replace(_swap_roles(origin), step=origin.step + offset) for origin in mirrored.origins]
    assert swapped == list(answer.origins)


@given(
    site=st.sampled_from([site for site in PROGRAM_SITES if not site.startswith(("param", "buffer", "optim"))]),
    rank=st.integers(0, 2),
    step=st.integers(0, 3),
)
def test_one_fault_on_one_rank_is_one_origin_on_that_rank(site: str, rank: int, step: int) -> None:
    answer = diff_runs(make_run(num_ranks=3), make_run(num_ranks=3, faults=[(rank, step, site)]))
    assert answer.first is not None
    assert (answer.first.rank, answer.first.step, len(answer.origins)) == (rank, step, 1)
    expected = "forward/Model:out" if site.endswith(":in.0") and site.startswith("forward") else site
    assert answer.first.site == expected
