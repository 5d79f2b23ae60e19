"""Gradients: of what went into and came out of modules, and of parameters as they leave autograd.

The gradient of a tensor is the sum of what all its consumers gave back, so it is one event, and it
is blamed on them: `backward/CONSUMER:grad_in.0`. Who the consumers are, and from which other
gradients theirs were computed, is read off the autograd graph when `backward` is called:

    loss -> ... -> node N of module C -> (edge) -> node M that made tensor x

    grad(x) was computed by N, so it is C's (a module's nodes have the sequence numbers that were
    drawn while it ran), from the gradients of the nearest recorded tensors between the loss and N,
    and from what C's forward had. Between those and grad(x) nothing is recorded: a fault may be in N or
    in any node before it, so all of them are named, N first: `MulBackward0 after FaultyBackward`.

A gradient is caught by a hook on the node that made the tensor, which runs after every hook on the
tensor itself, thus sees what goes on upstream. An in-place operation on a view (ReLU after a Linear
over three dimensions) takes the view's node out of the graph; the gradient is then caught at the
node of the view's base. Neither kind of hook changes a bit or keeps a tensor.

Long because following gradients, planning a backward and recording it share their numbers.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node

from bitcheck.events import Level, Phase
from bitcheck.hooks.dynamo import paused, skip_frame
from bitcheck.hooks.modules import in_backward
from bitcheck.hooks.native import native
from bitcheck.hooks.steps import Call, StepBuilder

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder

_VIEWS = (
    "View ReshapeAlias UnsafeView T Transpose Permute Expand AsStrided Slice Select Squeeze Unsqueeze Alias Unbind "
    "Split SplitWithSizes Clone ToCopy Detach Chunk Narrow"
)
VIEW_NODES = frozenset(f"{name}Backward0" for name in _VIEWS.split(" "))
"""Nodes that pass a gradient on without arithmetic: an answer names the node behind them."""

_OUTSIDE = -1
"""Stands for code outside all modules where calls are numbers."""
MAX_NAMED_NODES = 4
"""Of the nodes between a gradient and those it is computed from, which are not told apart, so many are named."""
MORE = "..."
_MAX_CHAINS = 65_536
"""Rows of nodes whose names are kept from step to step."""


class Tracked:
    """A tensor whose gradient is recorded: one output of one node, or a parameter.

    What it has to do with others it holds as tuples of numbers: every object that a step keeps is looked at by
    Python's cyclic garbage collector, and a tuple that a step before had as well (`StepBuilder.same`) is no new one.
    """

    __slots__ = (
        "consumers", "events", "is_eval", "key", "number", "op", "owners", "producer", "slot", "sources", "step",
        "trace",
    )  # fmt: skip

    def __init__(self, producer: Call | None, slot: str, is_eval: bool, trace: _Trace | None) -> None:
        self.producer = producer
        """The call that gave the tensor; None for a parameter and for what came from outside all modules."""
        self.slot = slot
        self.is_eval = is_eval
        self.trace = trace
        """Whose numbers these are; of a parameter those of the last plan."""
        self.number = -1
        """Its own."""
        self.key = 0
        """Of the node that made it."""
        self.consumers: tuple[int | str, ...] = ()
        """A call and the argument's slot, the next call and its slot, ..."""
        self.sources: tuple[int, ...] | None = None
        """Whose gradients its gradient is computed from; None as long as no plan was made."""
        self.owners: tuple[int, ...] = ()
        """The module calls that compute it, _OUTSIDE last."""
        self.op = ""
        """The autograd nodes that compute it."""
        self.events: Sequence[int] = ()
        self.step: int | None = None
        """The number of the step that `events` are in: to hold the step would keep it alive."""


class _Trace:
    """Which tensors are followed in one step, by number, and where its calls are."""

    __slots__ = ("builder", "calls", "groups", "outputs", "tracked", "views")

    def __init__(self, builder: StepBuilder) -> None:
        self.builder = weakref.ref(builder)
        self.calls = builder.calls
        self.tracked: list[Tracked] = []
        self.outputs: dict[int, _Outputs] = {}
        """Key of a node -> what is followed of it."""
        self.views: dict[int, Tracked] = {}
        """Key of the node of a view's base -> the view."""
        self.groups: dict[tuple[int, str], int] = {}

    def add(self, producer: Call | None, slot: str, is_eval: bool) -> Tracked:
        """Follow a tensor."""
        tracked = Tracked(producer, slot, is_eval, self)
        tracked.number = len(self.tracked)
        self.tracked.append(tracked)
        return tracked

    def owners(self, tracked: Tracked) -> list[Call | None]:
        """Return the module calls that compute a gradient; None, the last, stands for code outside all modules."""
        return [self.calls[number] if number != _OUTSIDE else None for number in tracked.owners]


class _Outputs:
    """The outputs of one node whose gradients are recorded, mostly one; called as the hook on the node."""

    __slots__ = ("_first", "_hooks", "_index", "_others")

    def __init__(self, hooks: GradientHooks, index: int, first: Tracked) -> None:
        self._hooks = hooks
        self._index = index
        self._first = first
        self._others: dict[int, Tracked] | None = None

    def get(self, index: int) -> Tracked | None:
        """Return what is followed of an output, by its number."""
        if index == self._index:
            return self._first
        return self._others.get(index) if self._others is not None else None

    def add(self, index: int, tracked: Tracked) -> None:
        """Follow a further output."""
        if self._others is None:
            self._others = {}
        self._others[index] = tracked

    def items(self) -> list[tuple[int, Tracked]]:
        """Return (output number, tensor) in the order in which they were added."""
        first = (self._index, self._first)
        return [first] if self._others is None else [first, *self._others.items()]

    @skip_frame
    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        _record_node(self, gradients)

    @paused
    def record(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Record what reaches the node."""
        for index, tracked in self.items():
            gradient = gradients[index] if index < len(gradients) else None
            if gradient is not None:
                self._hooks.record(tracked, gradient)


_record_node = _Outputs.record if native is None else native.record_node

_Arrival = tuple[int, Node, tuple[int, ...], tuple[str, ...]]
"""What comes along an edge: to which output of a node, from which node; the recorded gradients that reached that one
from the loss, by number, and the names of the nodes passed since."""


class GradientHooks:
    """Records gradients and losses for one recorder."""

    __slots__ = ("__dict__", "_recorder", "_trace", "owners")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_deep = recorder.level is not Level.STATE
        self._trace: _Trace | None = None
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], Tracked, Any]] = {}
        self.owners: _Owners | None = None
        """Finds the call that made a node, as of the last plan."""
        self._backward: Callable[..., Any] | None = None
        self._grad: Callable[..., Any] | None = None

    # --- attaching

    def install(self) -> None:
        """Wrap `torch.autograd.backward` and `torch.autograd.grad`."""
        self._backward, self._grad = backward, grad = torch.autograd.backward, torch.autograd.grad

        @skip_frame
        def observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                tensors = _kept(tensors)
                given = kwargs.get("grad_tensors", args[0] if args else None)
                self.enter_backward(_as_list(tensors), is_loss=True, given=_as_list(given))
            return backward(tensors, *args, **kwargs)

        @skip_frame
        def observed_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                outputs = _kept(outputs)
                given = kwargs.get("grad_outputs", args[1] if len(args) > 1 else None)
                self.enter_backward(_as_list(outputs), is_loss=False, given=_as_list(given))
            return grad(outputs, *args, **kwargs)

        self._wrappers = observed_backward, observed_grad
        torch.autograd.backward, torch.autograd.grad = observed_backward, observed_grad

    def remove(self) -> None:
        """Put everything back and take the hooks off the parameters."""
        if self._backward is not None and self._grad is not None:
            if torch.autograd.backward is self._wrappers[0]:
                torch.autograd.backward = self._backward
            if torch.autograd.grad is self._wrappers[1]:
                torch.autograd.grad = self._grad
        self._backward = self._grad = None
        for _, _, handle in self._parameters.values():
            handle.remove()
        self._parameters.clear()

    # --- forward: which tensors to follow

    def track_input(self, builder: StepBuilder, call: Call, slot: str, tensor: torch.Tensor) -> None:
        """Follow an argument of a module call that requires a gradient."""
        if tensor.grad_fn is None:
            return  # a leaf: a parameter, whose own hook sees it, or an input that the program differentiates by
        tracked = self._track(builder, tensor, None, slot, call.is_eval)
        tracked.consumers = builder.same((*tracked.consumers, call.number, slot))

    def track_output(self, builder: StepBuilder, call: Call, slot: str, tensor: torch.Tensor) -> None:
        """Follow what a module call gave."""
        tracked = self._track(builder, tensor, call, slot, call.is_eval)
        if tracked.producer is None:
            tracked.producer, tracked.slot = call, slot

    def _track(
        self, builder: StepBuilder, tensor: torch.Tensor, producer: Call | None, slot: str, is_eval: bool
    ) -> Tracked:
        trace = self._enter(builder)
        node = tensor.grad_fn
        assert node is not None
        key, index = _key_of(node), tensor.output_nr
        outputs = trace.outputs.get(key)
        tracked = outputs.get(index) if outputs is not None else None
        if tracked is not None:
            return tracked
        tracked = trace.add(producer, slot, is_eval)
        tracked.key = key
        if outputs is None:
            trace.outputs[key] = outputs = _Outputs(self, index, tracked)
            node.register_prehook(outputs)
        else:
            outputs.add(index, tracked)
        if tensor._is_view() and (base := tensor._base) is not None and base.grad_fn is not None:
            at = _key_of(base.grad_fn)
            if at != key:
                trace.views[at] = tracked
        return tracked

    def _enter(self, builder: StepBuilder) -> _Trace:
        """Forget the tensors of the step before: a graph seldom outlives its step."""
        trace = self._trace
        if trace is None or trace.builder() is not builder:
            trace = self._trace = _Trace(builder)
            self.owners = None
        return trace

    # --- backward: the plan

    @paused
    def enter_backward(self, roots: list[torch.Tensor], is_loss: bool, given: Sequence[torch.Tensor] = ()) -> None:
        """Record the loss, and find out from which gradients each gradient will be computed.

        `given`: the gradients of the roots, where they come from elsewhere (the next stage of a pipeline).
        """
        recorder = self._recorder
        if not recorder.is_active or not recorder.current.is_kept:
            return
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return  # a compiler traces a backward, unless it finds it in its cache
        builder = recorder.current
        self._enter(builder)
        nested = in_backward()
        if is_loss and not nested:
            recorder.note_backward()
            builder = recorder.current
            self._enter(builder)
        if is_loss and not nested:
            builder.losses = []
            recorder.optimizers.record_loss_scales(builder)
            for index, root in enumerate(roots):
                slot = "value" if len(roots) == 1 else f"value.{index}"
                site = builder.next_sites(Phase.LOSS, "", "loss", slot, False).first
                known = builder.recorded(root)
                sources = known if known else [*builder.top.inputs, *builder.top.children, *builder.top.received]
                events = builder.add_tensor(site, root, -1, sources if self._is_deep else ())
                builder.losses += events
        if given and not nested:
            builder.losses = [event for tensor in given for event in builder.recorded(tensor)] or builder.losses
        builder.is_after_backward = not nested
        if self._is_deep:
            self._plan(builder, [root for root in roots if root.grad_fn is not None])

    def _plan(self, builder: StepBuilder, roots: list[torch.Tensor]) -> None:
        thread = threading.get_ident()
        trace = self._enter(builder)
        owner_of = self.owners = _Owners([call for call in builder.calls if call.thread == thread])
        _plan_nodes(self, builder, trace, owner_of, [root.grad_fn for root in roots if root.grad_fn is not None])

    def _plan_nodes(self, builder: StepBuilder, trace: _Trace, owner_of: _Owners, stack: list[Node]) -> None:
        keys: dict[Node, int] = {}
        waits: dict[Node, int] = {}
        """Edges to a node that nothing came along yet."""
        while stack:
            node = stack.pop()
            if node in keys:
                continue
            keys[node] = _key_of(node)
            for below, _ in node.next_functions:  # asked again later: to keep them all would set off the collector
                if below is not None:
                    waits[below] = waits.get(below, 0) + 1
                    stack.append(below)
        self._catch_lost_views(trace, keys)

        arriving: dict[Node, list[_Arrival]] = {}
        ready = [node for node in keys if not waits.get(node)]
        while ready:
            node = ready.pop()
            outputs = trace.outputs.get(keys[node])
            sources, names = self._flow_into(node, outputs, arriving.pop(node, []), owner_of, builder)
            for below, index in node.next_functions:
                if below is None:
                    continue
                arrival = (index, node, sources, names)
                if below in arriving:
                    arriving[below].append(arrival)
                else:
                    arriving[below] = [arrival]
                waits[below] -= 1
                if not waits[below]:
                    ready.append(below)

    def _flow_into(
        self,
        node: Node,
        outputs: _Outputs | None,
        arriving: list[_Arrival],
        owner_of: _Owners,
        builder: StepBuilder,
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Settle whose gradients the node's own are made from; return (sources, names) of what it passes on."""
        own = node.name()
        if own == "torch::autograd::AccumulateGrad":
            variable: torch.Tensor = node.variable  # type: ignore[attr-defined]
            tracked = self._parameter(variable)
            if tracked is not None:
                tracked.trace = self._trace
                _settle(tracked, arriving, owner_of, builder)
            return (), ()
        if outputs is None and len(arriving) == 1:
            _, _, flowing, names = arriving[0]
            return flowing, _passed[own, names]
        sources: dict[int, None] = {}
        names = ()
        for index, tracked in outputs.items() if outputs is not None else ():
            _settle(tracked, [arrival for arrival in arriving if arrival[0] == index], owner_of, builder)
            sources[tracked.number] = None
        for index in dict.fromkeys([arrival[0] for arrival in arriving]):
            if outputs is None or outputs.get(index) is None:
                for at, _, flowing, passed in arriving:
                    if at == index:
                        sources.update(dict.fromkeys(flowing))
                        names = (*names, *passed)
        return tuple(sources), _passed[own, names]

    def owner_of(self, builder: StepBuilder, node: Node) -> Call | None:
        """Return the module call that made a node which runs now, None for code outside all modules."""
        if self.owners is None or self._trace is None or self._trace.builder() is not builder:
            return None
        return self.owners(node)

    def _catch_lost_views(self, trace: _Trace, keys: dict[Node, int]) -> None:
        """Catch at its base the gradient of a view that an in-place operation took out of the graph."""
        if not trace.views:
            return
        reached = set(keys.values())
        for node, key in keys.items():
            view = trace.views.get(key)
            if view is None or view.key in reached:
                continue
            del trace.views[key]
            outputs = trace.outputs.get(key)
            if outputs is None:
                trace.outputs[key] = outputs = _Outputs(self, 0, view)
                node.register_prehook(outputs)
            elif outputs.get(0) is None:
                outputs.add(0, view)

    def _parameter(self, variable: torch.Tensor) -> Tracked | None:
        held = self._parameters.get(id(variable))
        if held is not None and held[0]() is variable:
            return held[1]
        name = self._recorder.parameter_name(variable) or self._recorder.sharding.name_gathered(variable)
        if name is None:
            return None
        tracked = Tracked(None, "grad", False, self._trace)
        hook = functools.partial(_record_accumulated, self, tracked)
        handle = variable.register_post_accumulate_grad_hook(hook)
        self._parameters[id(variable)] = (weakref.ref(variable), tracked, handle)
        return tracked

    @paused
    def _accumulated(self, tracked: Tracked, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.record(tracked, parameter.grad, parameter)

    def events_of(self, builder: StepBuilder, parameter: torch.Tensor) -> Sequence[int]:
        """Return the events of a parameter's gradient as it last left autograd in this step."""
        held = self._parameters.get(id(parameter))
        if held is None or held[0]() is not parameter or held[1].step != builder.step:
            return []
        return held[1].events

    # --- backward: the events

    def record(self, tracked: Tracked, gradient: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        """Record a gradient as it is now, of a parameter under the parameter's name."""
        recorder = self._recorder
        builder = recorder.current
        if not recorder.is_active or not builder.is_kept:
            return
        owners = tracked.trace.owners(tracked) if tracked.trace is not None else []
        owner = owners[0] if owners else None  # None is the last, where there is another
        if parameter is not None:
            name = recorder.parameter_name(parameter)
            if name is None:
                return
            (root, path), slot = name, "grad"
        else:
            root, path, slot, owner = _blame(tracked, owners, owner)
        site = builder.next_sites(Phase.BACKWARD, root, path, slot, tracked.is_eval).first
        group = self._group(builder, tracked, owner)
        tracked.events = builder.add_tensor(site, gradient, group, self._sources(builder, tracked, owners))
        tracked.step = builder.step

    def _sources(self, builder: StepBuilder, tracked: Tracked, owners: list[Call | None]) -> tuple[int, ...]:
        trace = tracked.trace
        if tracked.sources is None or trace is None:  # entered past torch.autograd: everything before counts
            phases = (Phase.BACKWARD, Phase.LOSS, Phase.FORWARD)
            return tuple([index for index, site in enumerate(builder.record.sites) if site.phase in phases])
        step = builder.step
        found: list[int] = []
        for number in tracked.sources:
            source = trace.tracked[number]
            if source.step == step:
                found += source.events
        if not tracked.sources:
            found += builder.losses
        if builder.received:  # by code between the gradients it is computed from and itself
            after = min(found, default=0)
            found += [event for event in builder.received if event > after]
        found += builder.gathered
        if tracked.slot == "grad" and tracked.step == step:  # a micro-batch adds to the one before
            found += tracked.events
        for call in owners:
            if call is None:
                found += [*builder.top.inputs, *builder.top.children]
            else:
                found += call.known()
                if builder.recomputed:
                    found += builder.recomputed.get((call.root, call.path), ())
        return tuple(dict.fromkeys(found))

    def _group(self, builder: StepBuilder, tracked: Tracked, owner: Call | None) -> int:
        trace = self._trace
        groups = trace.groups if trace is not None and trace.builder() is builder else {}
        number = owner.number if owner is not None and tracked.trace is trace else id(owner)
        key = builder.same((number, tracked.op))
        group = groups.get(key)
        if group is None:
            root, path = (owner.root, owner.path) if owner is not None else ("", "")
            group = groups[key] = builder.add_group("backward", root, path, tracked.op)
        return group


_record_accumulated = GradientHooks._accumulated if native is None else native.record_accumulated
_plan_nodes = GradientHooks._plan_nodes if native is None else native.plan_nodes


def _key_of(node: Node) -> int:
    """Return what identifies a node: the number that its thread gave it, and the thread."""
    return node._sequence_nr() << 64 | threading.get_ident()


class _Owners:
    """Finds the innermost module call during which an autograd node was made."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls
        self._starts = [call.first_node for call in calls]

    def __call__(self, node: Node) -> Call | None:
        number = node._sequence_nr()
        index = bisect_right(self._starts, number) - 1
        call = self._calls[index] if index >= 0 else None
        while call is not None and number >= call.last_node:
            call = call.parent
        return call


class _Passed(dict[tuple[str, tuple[str, ...]], tuple[str, ...]]):
    """(a node's name, the names that came along to it) -> the names that it passes on; always the same objects.

    Names are those of nodes that compute, the nearest first, each once; what only hands a gradient on is
    named as long as nothing else was met. Of too many the farthest are left out, custom functions last.
    """

    def __missing__(self, key: tuple[str, tuple[str, ...]]) -> tuple[str, ...]:
        own, names = key
        met = dict.fromkeys(name for name in (own, *names) if name not in VIEW_NODES and name != MORE)
        kept = list(met) or [own]
        while len(kept) > MAX_NAMED_NODES:
            built_in = [place for place, name in enumerate(kept) if place and name[-1].isdigit()]
            del kept[built_in[-1] if built_in else -1]
        if MORE in names or len(kept) < len(met):
            kept.append(MORE)
        if len(self) >= _MAX_CHAINS:
            self.clear()
        self[key] = found = tuple(kept)
        return found


class _Worded(dict[tuple[str, ...], str]):
    """Names of nodes, the nearest first -> how they are written: `MulBackward0 after FaultyBackward`."""

    def __missing__(self, names: tuple[str, ...]) -> str:
        if len(self) >= _MAX_CHAINS:
            self.clear()
        self[names] = text = f"{names[0]} after {', '.join(names[1:])}" if len(names) > 1 else names[0]
        return text


_passed, _worded = _Passed(), _Worded()


def _settle(tracked: Tracked, arriving: list[_Arrival], owner_of: _Owners, builder: StepBuilder) -> None:
    """Write down by whom and from what a gradient is computed."""
    computed: dict[tuple[Call | None, str], None] = {}
    for _, node, _, names in arriving:
        computed[(owner_of(node), _worded[names])] = None
    if len(arriving) == 1:
        sources = arriving[0][2]
    else:
        sources = tuple(dict.fromkeys([number for _, _, flowing, _ in arriving for number in flowing]))
    tracked.sources = builder.same(sources)
    order = list(computed)
    if len(order) == 1:
        call, tracked.op = order[0]
        tracked.owners = builder.same((call.number if call is not None else _OUTSIDE,))
        return
    order.sort(key=lambda pair: (pair[0] is None, pair[0].first_node if pair[0] is not None else 0))
    tracked.owners = builder.same(tuple([call.number if call is not None else _OUTSIDE for call, _ in order]))
    is_one = sum([call is not None for call, _ in order]) < 2
    named = [name if is_one or call is None else f"{name} in {call.path or call.root}" for call, name in order]
    tracked.op = "; ".join(dict.fromkeys(named))


def _blame(tracked: Tracked, owners: list[Call | None], owner: Call | None) -> tuple[str, str, str, Call | None]:
    """Return (root, path, slot, call) under which a tensor's gradient is recorded."""
    consumers = tracked.consumers
    for call in owners:
        for position in range(0, len(consumers), 2):
            if call is not None and call.number == consumers[position]:
                return call.root, call.path, f"grad_{consumers[position + 1]}", call
    producer = tracked.producer
    if owner is not None and producer is not None and owner is not producer:
        below = producer.path.removeprefix(f"{owner.path}.") if owner.path else producer.path
        return owner.root, owner.path, f"grad.{below or producer.root}.{tracked.slot}", owner
    if consumers and owner is not None:
        return *_place_of(tracked), owner
    if producer is not None:
        return producer.root, producer.path, f"grad_{tracked.slot}", owner
    return *_place_of(tracked), owner


def _place_of(tracked: Tracked) -> tuple[str, str, str]:
    """Return (root, path, slot) of a gradient as its last consumer's."""
    assert tracked.trace is not None
    number, slot = tracked.consumers[-2:]
    consumer = tracked.trace.calls[int(number)]
    return consumer.root, consumer.path, f"grad_{slot}"


def _kept(value: Any) -> Any:
    """Return what may be looked at twice: a generator of tensors is drawn from once."""
    return tuple(value) if isinstance(value, Iterator) else value


def _as_list(value: Any) -> list[torch.Tensor]:
    values = list(value) if isinstance(value, (tuple, list)) and not hasattr(value, "node") else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


if native is not None:
    _PATTERN = Tracked(None, "", False, None)
    native.configure(
        backward_phase=Phase.BACKWARD,
        blame=_blame,
        outputs_pattern=_Outputs(None, 0, _PATTERN),  # type: ignore[arg-type]
        passed=_passed,
        tracked_pattern=_PATTERN,
        worded=_worded,
    )
