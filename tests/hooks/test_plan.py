"""The plan of a backward that is made by compiled code is the one that the Python makes, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitcheck
import bitcheck.hooks.recorder  # hands the compiled half all that it needs
from bitcheck.events import Phase
from bitcheck.hooks import gradients
from bitcheck.hooks.gradients import GradientHooks, Tracked
from bitcheck.hooks.native import native
from bitcheck.hooks.sites import Known
from bitcheck.hooks.steps import Call
from tests.hooks.programs import PROGRAMS
from tests.hooks.test_neutral import seed

if native is None and shutil.which("cc") is None:
    pytest.skip("hooks/csrc is not built: there is no C compiler", allow_module_level=True)
assert native is not None, "hooks/csrc is not built, or from another version: `make setup` builds it"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
Form = Callable[..., None]
Plan = tuple[Any, ...]


def test_this_process_plans_by_the_compiled_form() -> None:
    assert gradients._plan_nodes is native.plan_nodes


# --- graphs of PyTorch's


class Scaled(torch.autograd.Function):
    """Gives two outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return given[0] * 2, given[1] * 3


class Functional(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.view(-1)[::2].mul_(2)
    y[0].relu_()
    return y


def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])


def several_consumers() -> None:
    first, second, third = layers()
    hidden = first(torch.randn(4, 6))
    (second(hidden) * third(hidden) + hidden + hidden.sin() * second(hidden)).sum().backward()


def in_place_on_views() -> None:
    first, second, third = layers()
    relu, body = nn.ReLU(True), Functional(in_place)
    hidden = relu(first(torch.randn(2, 4, 6)))
    third(body(second(hidden)).transpose(0, 1)).sum().backward()


def many_outputs() -> None:
    first, second, third = layers()
    split, stack = Functional(lambda x: x.unbind(0)), Functional(lambda *rows: torch.stack(rows[::-1]))
    rows = split(first(torch.randn(4, 6)))
    left, right = Functional(lambda x: x.split(3, 1))(second(stack(*rows, rows[1])))
    (left * right).sort(1)[0].sum().backward()
    values = first(torch.randn(5, 6)).max(1)[0]
    (values.sum() + third(torch.randn(2, 6)).unbind(1)[2].sum()).backward()


def custom_functions() -> None:
    first, second, third = layers()
    x, y = Functional(Scaled.apply)(first(torch.randn(4, 6)), second(torch.randn(4, 6)))
    kept, _ = Scaled.apply(x, y)  # type: ignore[no-untyped-call]
    third(kept * y).sum().backward()


def several_roots() -> None:
    first, second, third = layers()
    hidden = first(torch.randn(4, 6))
    left, right = second(hidden), third(hidden)
    torch.autograd.backward([left, right, hidden, left], [torch.ones(4, 6)] * 4, retain_graph=True)
    torch.autograd.grad([first(hidden).sum(), second(hidden.detach()).sum()], [*first.parameters()])


def shared_parameters() -> None:
    first, second, _ = layers()
    second.weight = first.weight
    F.linear(second(first(torch.randn(4, 6))), first.weight).sum().backward()


def a_second_backward() -> None:
    first, second, third = layers()
    hidden = second(first(torch.randn(4, 6)))
    hidden.sum().backward(retain_graph=True)
    (third(hidden).sum() + hidden.mean()).backward(retain_graph=True)
    hidden.sum().backward()


def checkpointed() -> None:
    first, second, third = layers()
    for reentrant in (False, True):
        body = nn.Sequential(second, nn.ReLU(), nn.Dropout(0.1))
        hidden = first(torch.randn(4, 6))
        third(hidden + checkpoint(body, hidden, use_reentrant=reentrant)).sum().backward()


def micro_batches() -> None:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(3):
            model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def a_backward_within_a_forward() -> None:
    first, second, _ = layers()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(second(x).square().sum(), x, create_graph=True)
        return slope.square().sum()

    Functional(penalty)(first(torch.randn(4, 6))).backward()


def long_chains_of_functional_code() -> None:
    first, second, third = layers()
    hidden = first(torch.randn(4, 6))
    for function in (torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.cos, torch.neg):
        hidden = function(hidden) + hidden.t().contiguous().t()
    second(hidden).relu().sum().backward()
    sum([third(hidden.detach()).exp() for _ in range(100)]).sum().backward()  # type: ignore[union-attr]


UNSTEADY = "compiled", "loader", "torchscript"
"""Programs that are compiled otherwise when they are run again, or that start processes."""
GRAPHS: dict[str, Callable[[], Any]] = {
    graph.__name__: graph
    for graph in (
        several_consumers,
        in_place_on_views,
        many_outputs,
        custom_functions,
        several_roots,
        shared_parameters,
        a_second_backward,
        checkpointed,
        micro_batches,
        a_backward_within_a_forward,
        long_chains_of_functional_code,
    )
} | {name: program for name, program in PROGRAMS.items() if not name.startswith(UNSTEADY)}


def describe(tracked: Tracked, trace: Any, builder: Any) -> Plan:
    """Return what a plan says of a gradient, and whether by the objects that it has in common with others."""
    shared = [tracked.sources is None or builder.same(tracked.sources) is tracked.sources]
    shared += [
        builder.same(tracked.owners) is tracked.owners,
        any(tracked.op is text for text in gradients._worded.values()),
    ]
    return tracked.slot, tracked.sources, tracked.owners, tracked.op, tracked.trace is trace, shared


def describe_trace(trace: Any, parameters: list[Tracked], builder: Any) -> Plan:
    """Return what a plan leaves: of every gradient, of every node that is followed, of the views."""
    followed = [[(index, tracked.number) for index, tracked in outputs.items()] for outputs in trace.outputs.values()]
    planned = [describe(tracked, trace, builder) for tracked in (*trace.tracked, *parameters)]
    return planned, followed, [tracked.number for tracked in trace.views.values()]


def plans_of(form: Form, graph: Callable[[], Any], folder: Path) -> tuple[list[Plan], list[Any], list[Any]]:
    """Record a program, every backward planned by one form; return the plans, and the names in the order of asking."""
    plans: list[Plan] = []

    def plan(hooks: GradientHooks, builder: Any, trace: Any, *others: Any) -> None:
        form(hooks, builder, trace, *others)
        plans.append(describe_trace(trace, [tracked for _, tracked, _ in hooks._parameters.values()], builder))

    gradients._passed.clear()
    gradients._worded.clear()
    seed()
    with pytest.MonkeyPatch.context() as patch, bitcheck.record(folder, level="module"):
        patch.setattr(gradients, "_plan_nodes", plan)
        graph()
    return plans, list(gradients._passed.items()), list(gradients._worded.items())


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_planned_by_the_compiled_form_as_by_the_python(name: str, tmp_path: Path) -> None:
    compiled = plans_of(native.plan_nodes, GRAPHS[name], tmp_path / "compiled")
    portable = plans_of(GradientHooks._plan_nodes, GRAPHS[name], tmp_path / "portable")
    assert compiled == portable
    assert compiled[0] and compiled[1]


# --- graphs of any shape


@dataclasses.dataclass(eq=False)
class FakeNode:
    """What a plan asks a node for."""

    text: str
    number: int
    next_functions: tuple[tuple[FakeNode | None, int], ...] = ()
    num_hooks: int = 0

    @property
    def variable(self) -> FakeNode:
        return self

    def name(self) -> str:
        return "".join(self.text)  # a new string, as PyTorch's

    def _sequence_nr(self) -> int:
        return self.number

    def register_prehook(self, hook: Any) -> None:
        self.num_hooks += 1


class FakeBuilder:
    """What a plan asks a step for."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self._known = Known()
        self.same = self._known.same


class FakeHooks(GradientHooks):
    """Follows the parameters of every second node."""

    def __init__(self, trace: Any) -> None:
        self._trace = trace
        self.parameters: dict[int, Tracked] = {}

    def _parameter(self, variable: Any) -> Tracked | None:
        if variable.number % 2:
            return None
        return self.parameters.setdefault(variable.number, Tracked(None, "grad", False, None))


ACCUMULATE = "torch::autograd::AccumulateGrad"
NODE_NAMES = (
    "MulBackward0",
    "ViewBackward0",
    "Doubled",
    "AddBackward0",
    "TBackward0",
    "SinBackward0",
    "Halved",
    ACCUMULATE,
)
Graph = dict[str, Any]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw nodes with edges to later ones, the calls that they were made in, what is followed, and the roots."""
    count = draw(st.integers(1, 14))
    place = st.integers(0, count - 1)
    numbers = st.one_of(st.integers(0, 40), st.sampled_from([2**63, 2**64 - 1]))
    edges = [
        draw(st.lists(st.tuples(st.none() | st.integers(at + 1, count - 1), st.integers(0, 2)), max_size=4))
        for at in range(count - 1)
    ]
    return {
        "names": draw(st.lists(st.sampled_from(NODE_NAMES), min_size=count, max_size=count)),
        "numbers": draw(st.lists(numbers, min_size=count, max_size=count)),
        "edges": [*edges, []],
        "calls": draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 5)), max_size=6)),
        "followed": draw(st.lists(st.tuples(place, st.integers(0, 2)), max_size=12)),
        "views": draw(st.lists(st.tuples(place, st.integers(0, 11)), max_size=3)),
        "roots": draw(st.lists(place, max_size=4)),
    }


def build(graph: Graph) -> tuple[Any, ...]:
    """Return the arguments of a plan: hooks, a step, its trace, its owners, the nodes to begin at."""
    nodes = [FakeNode(name, number) for name, number in zip(graph["names"], graph["numbers"], strict=True)]
    for node, edges in zip(nodes, graph["edges"], strict=True):
        if node.text != ACCUMULATE:
            below = [(nodes[to] if to is not None else None, index) for to, index in edges]
            node.next_functions = tuple([(n, 0 if n is not None and n.text == ACCUMULATE else i) for n, i in below])
    calls: list[Call] = []
    for first, length, parent in sorted(graph["calls"]):
        inside = calls[parent] if 0 <= parent < len(calls) else None
        call = Call(Phase.FORWARD, "net", "" if inside is None else f"layer{len(calls)}", False, inside)
        call.first_node, call.last_node, call.number = first, first + length, len(calls)
        calls.append(call)
    builder: Any = FakeBuilder(calls)
    trace = gradients._Trace(builder)
    hooks = FakeHooks(trace)
    for at, index in graph["followed"]:
        tracked, key = trace.add(None, f"out.{index}", False), gradients._key_of(nodes[at])  # type: ignore[arg-type]
        tracked.key = key
        if key not in trace.outputs:
            trace.outputs[key] = gradients._Outputs(hooks, index, tracked)
        elif trace.outputs[key].get(index) is None:
            trace.outputs[key].add(index, tracked)
    for at, view in graph["views"]:
        if view < len(trace.tracked):
            trace.views[gradients._key_of(nodes[at])] = trace.tracked[view]  # type: ignore[arg-type]
    return hooks, builder, trace, gradients._Owners(calls), [nodes[at] for at in graph["roots"]]


def plan_of(form: Form, graph: Graph) -> tuple[Any, ...]:
    gradients._passed.clear()
    gradients._worded.clear()
    hooks, builder, trace, owners, roots = build(graph)
    form(hooks, builder, trace, owners, list(roots))
    told = describe_trace(trace, list(hooks.parameters.values()), builder)
    values = list(builder._known._values)
    names = list(gradients._passed.items()), list(gradients._worded.items())
    return told, list(hooks.parameters), values, names, [root.num_hooks for root in roots]


@settings(max_examples=400, deadline=None)
@given(graphs())
def test_graphs_of_any_shape_are_planned_by_the_compiled_form_as_by_the_python(graph: Graph) -> None:
    assert plan_of(native.plan_nodes, graph) == plan_of(GradientHooks._plan_nodes, graph)


def ladder(count: int) -> Graph:
    """Return a graph of which every node leads to the next two, in calls within calls, and to a parameter."""
    places = range(count)
    return {
        "names": [ACCUMULATE if at % 5 == 4 else NODE_NAMES[at % 7] for at in places],
        "numbers": [1000 + 2 * (count - at) for at in places],  # Python makes them anew: a leak of one counts
        "edges": [[(at + step, at % 2) for step in (1, 2, 4) if at + step < count] for at in places],
        "calls": [(1000 + start, 3 * count - start, start // 16 - 1) for start in range(0, 2 * count, 16)],
        "followed": [(at, at % 3 % 2) for at in places if at % 3],
        "views": [],
        "roots": [0, 1],
    }


def test_a_graph_of_thousands_of_nodes_is_planned_as_by_the_python() -> None:
    graph = ladder(5000)
    compiled = plan_of(native.plan_nodes, graph)
    assert compiled == plan_of(GradientHooks._plan_nodes, graph)
    assert len(compiled[0][0]) > 3000


# --- nothing is left behind


def kept_after(function: Callable[[], Any], times: int, *counted: Any) -> list[int]:
    """Return how many blocks, objects and references more there are after `times` calls than before."""
    counts = []
    for calls in (20, times):
        for _ in range(calls):
            function()
        gc.collect()
        counts.append([sys.getallocatedblocks(), len(gc.get_objects()), *map(sys.getrefcount, counted)])
    return [now - then for then, now in zip(*counts, strict=True)]


def test_plans_keep_nothing() -> None:
    hooks, builder, trace, owners, roots = build(ladder(60) | {"views": [(3, 2)]})
    counted = [*roots, *(node for node, _ in roots[0].next_functions), *builder.calls, *trace.tracked, trace]
    counted += [*(call.last_node for call in builder.calls), (), None]
    kept = kept_after(lambda: native.plan_nodes(hooks, builder, trace, owners, roots), 300, *counted)
    assert max(map(abs, kept)) < 100, kept
    assert not any(kept[2:-2])


def fail(*_: Any) -> Any:
    raise ZeroDivisionError


class FailsAt(dict[Any, Any]):
    """Has no more than a few keys, the same for each."""

    def __init__(self, behind: Any, count: int) -> None:
        self.behind, self.count = behind, count

    def __missing__(self, key: Any) -> Any:
        self.count -= 1
        return self.behind[key] if self.count >= 0 else 1 / 0


Broken = tuple[Any, str, Any]
BREAKS: dict[str, Callable[[Any, Any, Any, Any, Any, Any], Broken]] = {
    "a parameter": lambda hooks, builder, trace, owners, root, node: (hooks, "_parameter", fail),
    "the views": lambda hooks, builder, trace, owners, root, node: (hooks, "_catch_lost_views", fail),
    "a name": lambda hooks, builder, trace, owners, root, node: (node, "name", fail),
    "a name that is none": lambda hooks, builder, trace, owners, root, node: (node, "name", lambda: 3),
    "a number": lambda hooks, builder, trace, owners, root, node: (node, "_sequence_nr", fail),
    "a number that is none": lambda hooks, builder, trace, owners, root, node: (node, "_sequence_nr", lambda: "3"),
    "edges that are none": lambda hooks, builder, trace, owners, root, node: (node, "next_functions", 3),
    "edges that are no pairs": lambda hooks, builder, trace, owners, root, node: (node, "next_functions", (3,)),
    "edges that are too short": lambda hooks, builder, trace, owners, root, node: (node, "next_functions", ((node,),)),
    "an edge's index": lambda hooks, builder, trace, owners, root, node: (node, "next_functions", ((root, "0"),)),
    "the end of a call": lambda hooks, builder, trace, owners, root, node: (builder.calls[-1], "last_node", "9"),
    "the start of a call": lambda hooks, builder, trace, owners, root, node: (
        owners,
        "_starts",
        ["9"] * len(builder.calls),
    ),
    "a call without a parent": lambda hooks, builder, trace, owners, root, node: (
        owners,
        "_calls",
        [3] * len(builder.calls),
    ),
    "calls that are no list": lambda hooks, builder, trace, owners, root, node: (owners, "_calls", ()),
    "outputs that are no dictionary": lambda hooks, builder, trace, owners, root, node: (trace, "outputs", []),
    "values that are no dictionary": lambda hooks, builder, trace, owners, root, node: (builder._known, "_values", []),
    "what is followed": lambda hooks, builder, trace, owners, root, node: (
        trace,
        "outputs",
        dict.fromkeys(trace.outputs, 3),
    ),
}
"""Part of a plan -> the object that is to be broken there, an attribute of it and the value that breaks it."""


def broken(part: str) -> tuple[Any, ...]:
    """Return the arguments of a plan that fails at one of its parts."""
    hooks, builder, trace, owners, roots = build(ladder(40) | {"views": [(3, 2)]})
    node = roots[0].next_functions[0][0].next_functions[0][0]
    owner, name, value = BREAKS[part](hooks, builder, trace, owners, roots[0], node)
    setattr(owner, name, value)
    return hooks, builder, trace, owners, roots


@pytest.mark.parametrize("part", BREAKS)
def test_a_plan_that_fails_keeps_nothing(part: str) -> None:
    args = broken(part)

    def plan() -> None:
        with pytest.raises((ZeroDivisionError, TypeError, AttributeError)):
            native.plan_nodes(*args)

    kept = kept_after(plan, 200, *args[-1], *args[1].calls, *args[2].tracked)
    assert max(map(abs, kept)) < 100, kept
    assert not any(kept[2:])


def test_a_name_that_is_no_string_is_refused_before_it_is_compared() -> None:
    with pytest.raises(TypeError, match="a node's name is a string"):
        native.plan_nodes(*broken("a name that is none"))


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("table", ["passed", "worded"])
def test_a_plan_whose_names_fail_keeps_nothing(table: str, count: int) -> None:
    args = build(ladder(40))
    behind = getattr(gradients, f"_{table}")

    def plan() -> None:
        native.configure(**{table: FailsAt(behind, count)})
        with pytest.raises(ZeroDivisionError):
            native.plan_nodes(*args)

    try:
        kept = kept_after(plan, 200, *args[-1], *args[1].calls, *args[2].tracked)
    finally:
        native.configure(**{table: behind})
    assert max(map(abs, kept)) < 100, kept
    assert not any(kept[2:])


@pytest.mark.parametrize("args", [(), (None,) * 4, (None, None, None, None, ()), (None, None, None, None, None)])
def test_what_is_no_list_of_nodes_is_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="plan_nodes takes"):
        native.plan_nodes(*args)


def test_a_plan_on_another_thread_knows_nodes_by_that_thread() -> None:
    graph, seen = ladder(20), []
    thread = threading.Thread(target=lambda: seen.append(plan_of(native.plan_nodes, graph)))
    thread.start()
    thread.join()
    assert seen == [plan_of(GradientHooks._plan_nodes, graph)]
