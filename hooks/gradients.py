"""Gradients: of what went into and came out of modules, and of parameters as they leave autograd.

The gradient of a tensor is the sum of what all its consumers gave back, so it is one event, and it
is blamed on them: `backward/CONSUMER:grad_in.0`. Who the consumers are, and from which other
gradients theirs were computed, is read off the autograd graph when `backward` is called:

    loss -> ... -> node N of module C -> (edge) -> node M that made tensor x

    grad(x) was computed by N, so it is C's (a module's nodes have the sequence numbers that were
    drawn while it ran), from the gradients of the nearest recorded tensors between the loss and N,
    and from what C's forward had.

A gradient is caught by a hook on the node that made the tensor, which runs after every hook on the
tensor itself, thus sees what goes on upstream. An in-place operation on a view (ReLU after a Linear
over three dimensions) takes the view's node out of the graph; the gradient is then caught at the
node of the view's base. Neither kind of hook changes a bit or keeps a tensor.
"""

from __future__ import annotations

import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node

from bitcheck.events import Level, Phase, Site
from bitcheck.hooks.dynamo import paused, skip_frame
from bitcheck.hooks.modules import in_backward
from bitcheck.hooks.steps import Call, StepBuilder

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder

_VIEWS = (
    "View ReshapeAlias UnsafeView T Transpose Permute Expand AsStrided Slice Select Squeeze Unsqueeze Alias Unbind "
    "Split SplitWithSizes Clone ToCopy Detach Chunk Narrow"
)
VIEW_NODES = frozenset(f"{name}Backward0" for name in _VIEWS.split(" "))
"""Nodes that pass a gradient on without arithmetic: an answer names the node behind them."""

MAX_NAMED_NODES = 4
"""How far behind an edge the node to name is looked for."""


class Tracked:
    """A tensor whose gradient is recorded: one output of one node, or a parameter."""

    __slots__ = ("consumers", "events", "is_eval", "names", "owners", "producer", "slot", "sources", "step")

    def __init__(self, producer: Call | None, slot: str, is_eval: bool) -> None:
        self.producer = producer
        """The call that gave the tensor; None for a parameter and for what came from outside all modules."""
        self.slot = slot
        self.is_eval = is_eval
        self.consumers: tuple[tuple[Call, str], ...] = ()
        self.sources: tuple[Tracked, ...] | None = None
        """Whose gradients its gradient is computed from; None as long as no plan was made."""
        self.owners: tuple[Call | None, ...] = ()
        """The module calls that compute it; None stands for code outside all modules."""
        self.names: tuple[str, ...] = ()
        """The autograd nodes that compute it, beside `owners`."""
        self.events: Sequence[int] = ()
        self.step: StepBuilder | None = None
        """Where `events` are."""


class _Flow:
    """What reaches a node from the loss: the recorded gradients, and the nodes passed since."""

    __slots__ = ("names", "sources")

    def __init__(self, sources: dict[Tracked, None], names: tuple[str, ...]) -> None:
        self.sources = sources
        self.names = names


class GradientHooks:
    """Records gradients and losses for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_deep = recorder.level is not Level.STATE
        self._step: weakref.ref[StepBuilder] | None = None
        self._tracked: dict[tuple[int, int], dict[int, Tracked]] = {}
        """(thread, sequence number) of a node -> output number -> tensor."""
        self._views: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        """Node of a view's base -> the view's own node and output number."""
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], Tracked, Any]] = {}
        self._groups: dict[tuple[int, str], int] = {}
        self._owners: _Owners | None = None
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
        tracked.consumers += ((call, slot),)

    def track_output(self, builder: StepBuilder, call: Call, slot: str, tensor: torch.Tensor) -> None:
        """Follow what a module call gave."""
        tracked = self._track(builder, tensor, call, slot, call.is_eval)
        if tracked.producer is None:
            tracked.producer, tracked.slot = call, slot

    def _track(
        self, builder: StepBuilder, tensor: torch.Tensor, producer: Call | None, slot: str, is_eval: bool
    ) -> Tracked:
        self._enter(builder)
        node = tensor.grad_fn
        assert node is not None
        key = (threading.get_ident(), node._sequence_nr())
        outputs = self._tracked.get(key)
        if outputs is None:
            outputs = self._tracked[key] = {}
            self._catch(node, outputs)
        tracked = outputs.get(tensor.output_nr)
        if tracked is None:
            tracked = outputs[tensor.output_nr] = Tracked(producer, slot, is_eval)
            if tensor._is_view() and (base := tensor._base) is not None and base.grad_fn is not None:
                at = (key[0], base.grad_fn._sequence_nr())
                if at != key:
                    self._views[at] = (key, tensor.output_nr)
        return tracked

    def _enter(self, builder: StepBuilder) -> None:
        """Forget the tensors of the step before: a graph seldom outlives its step."""
        if self._step is None or self._step() is not builder:
            self._step = weakref.ref(builder)
            self._tracked, self._views, self._groups, self._owners = {}, {}, {}, None

    def _catch(self, node: Node, outputs: dict[int, Tracked]) -> None:
        node.register_prehook(functools.partial(self._caught, outputs))

    @paused
    def _caught(self, outputs: dict[int, Tracked], gradients: Sequence[torch.Tensor | None]) -> None:
        for index, tracked in outputs.items():
            gradient = gradients[index] if index < len(gradients) else None
            if gradient is not None:
                self._record(tracked, gradient)

    # --- backward: the plan

    @paused
    def enter_backward(self, roots: list[torch.Tensor], is_loss: bool, given: Sequence[torch.Tensor] = ()) -> None:
        """Record the loss, and find out from which gradients each gradient will be computed.

        `given`: the gradients of the roots, where they come from elsewhere (the next stage of a pipeline).
        """
        recorder = self._recorder
        if not recorder.is_active or not recorder.current.is_kept:
            return
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
                occurrence = builder.count(Phase.LOSS, "", "loss", slot, False)
                known = builder.recorded(root)
                sources = known if known else [*builder.top.inputs, *builder.top.children, *builder.top.received]
                events = builder.add_tensor(
                    Site(Phase.LOSS, "", "loss", slot, occurrence), root, -1, sources if self._is_deep else ()
                )
                builder.losses += events
        if given and not nested:
            builder.losses = [event for tensor in given for event in builder.recorded(tensor)] or builder.losses
        builder.is_after_backward = not nested
        if self._is_deep:
            self._plan(builder, [root for root in roots if root.grad_fn is not None])

    def _plan(self, builder: StepBuilder, roots: list[torch.Tensor]) -> None:
        thread = threading.get_ident()
        nodes: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        waits: dict[Node, int] = {}
        keys: dict[Node, tuple[int, int]] = {}
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        while stack:
            node = stack.pop()
            if node in nodes:
                continue
            nodes[node] = edges = node.next_functions
            keys[node] = (thread, node._sequence_nr())
            for below, _ in edges:
                if below is not None:
                    waits[below] = waits.get(below, 0) + 1
                    stack.append(below)
        self._catch_lost_views(nodes, keys)
        owner_of = self._owners = _Owners([call for call in builder.calls if call.thread == thread])

        arriving: dict[Node, dict[int, list[tuple[Node, _Flow]]]] = {node: {} for node in nodes}
        ready = [node for node in nodes if not waits.get(node)]
        while ready:
            node = ready.pop()
            flow = self._flow_into(node, keys[node], arriving.pop(node), owner_of, builder)
            for below, index in nodes[node]:
                if below is None:
                    continue
                arriving[below].setdefault(index, []).append((node, flow))
                waits[below] -= 1
                if not waits[below]:
                    ready.append(below)

    def _flow_into(
        self,
        node: Node,
        key: tuple[int, int],
        arriving: dict[int, list[tuple[Node, _Flow]]],
        owner_of: _Owners,
        builder: StepBuilder,
    ) -> _Flow:
        """Settle whose gradients the node's own are made from; return what it passes on."""
        own = node.name()
        if own == "torch::autograd::AccumulateGrad":
            variable: torch.Tensor = node.variable  # type: ignore[attr-defined]
            tracked = self._parameter(variable)
            if tracked is not None:
                _settle(tracked, [pair for pairs in arriving.values() for pair in pairs], owner_of)
            return _Flow({}, (own,))
        outputs = self._tracked.get(key, {})
        sources: dict[Tracked, None] = {}
        names: tuple[str, ...] = ()
        for index, tracked in outputs.items():
            _settle(tracked, arriving.get(index, ()), owner_of)
            sources[tracked] = None
        for index, pairs in arriving.items():
            if index not in outputs:
                for _, flow in pairs:
                    sources.update(flow.sources)
                    names = names or flow.names
        return _Flow(sources, (own, *names)[:MAX_NAMED_NODES])

    def owner_of(self, builder: StepBuilder, node: Node) -> Call | None:
        """Return the module call that made a node which runs now, None for code outside all modules."""
        if self._owners is None or self._step is None or self._step() is not builder:
            return None
        return self._owners(node)

    def _catch_lost_views(self, nodes: Iterable[Node], keys: dict[Node, tuple[int, int]]) -> None:
        """Catch at its base the gradient of a view that an in-place operation took out of the graph."""
        if not self._views:
            return
        reached = set(keys.values())
        for node in nodes:
            lost = self._views.get(keys[node])
            if lost is None or lost[0] in reached:
                continue
            del self._views[keys[node]]
            outputs = self._tracked.get(keys[node])
            if outputs is None:
                outputs = self._tracked[keys[node]] = {}
                self._catch(node, outputs)
            outputs.setdefault(0, self._tracked[lost[0]][lost[1]])

    def _parameter(self, variable: torch.Tensor) -> Tracked | None:
        held = self._parameters.get(id(variable))
        if held is not None and held[0]() is variable:
            return held[1]
        name = self._recorder.parameter_name(variable) or self._recorder.sharding.name_gathered(variable)
        if name is None:
            return None
        tracked = Tracked(None, "grad", False)

        @paused
        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._record(tracked, parameter.grad, parameter)

        handle = variable.register_post_accumulate_grad_hook(accumulated)
        self._parameters[id(variable)] = (weakref.ref(variable), tracked, handle)
        return tracked

    def events_of(self, builder: StepBuilder, parameter: torch.Tensor) -> Sequence[int]:
        """Return the events of a parameter's gradient as it last left autograd in this step."""
        held = self._parameters.get(id(parameter))
        if held is None or held[0]() is not parameter or held[1].step is not builder:
            return []
        return held[1].events

    # --- backward: the events

    def _record(self, tracked: Tracked, gradient: torch.Tensor, parameter: torch.Tensor | None = None) -> None:
        recorder = self._recorder
        builder = recorder.current
        if not recorder.is_active or not builder.is_kept:
            return
        owner = next((call for call in tracked.owners if call is not None), None)
        if parameter is not None:
            name = recorder.parameter_name(parameter)
            if name is None:
                return
            (root, path), slot = name, "grad"
        else:
            root, path, slot, owner = _blame(tracked, owner)
        occurrence = builder.count(Phase.BACKWARD, root, path, slot, tracked.is_eval)
        site = Site(Phase.BACKWARD, root, path, slot, occurrence, tracked.is_eval)
        group = self._group(builder, tracked, owner)
        tracked.events = builder.add_tensor(site, gradient, group, self._sources(builder, tracked))
        tracked.step = builder

    def _sources(self, builder: StepBuilder, tracked: Tracked) -> list[int]:
        if tracked.sources is None:  # the engine was not entered through torch.autograd: everything before counts
            phases = (Phase.BACKWARD, Phase.LOSS, Phase.FORWARD)
            return [index for index, site in enumerate(builder.record.sites) if site.phase in phases]
        found: dict[int, None] = {}
        for source in tracked.sources:
            if source.step is builder:
                found.update(dict.fromkeys(source.events))
        if not tracked.sources:
            found.update(dict.fromkeys(builder.losses))
        if builder.received:  # by code between the gradients it is computed from and itself
            after = min(found, default=0)
            found.update(dict.fromkeys(event for event in builder.received if event > after))
        found.update(dict.fromkeys(builder.gathered))
        if tracked.slot == "grad" and tracked.step is builder:  # a micro-batch adds to the one before
            found.update(dict.fromkeys(tracked.events))
        for call in tracked.owners:
            if call is None:
                found.update(dict.fromkeys([*builder.top.inputs, *builder.top.children]))
            else:
                found.update(dict.fromkeys(call.known()))
                found.update(dict.fromkeys(builder.recomputed.get((call.root, call.path), ())))
        return list(found)

    def _group(self, builder: StepBuilder, tracked: Tracked, owner: Call | None) -> int:
        owners = [call for call in tracked.owners if call is not None]
        named = [
            name if len(owners) < 2 or call is None else f"{name} in {call.path or call.root}"
            for call, name in zip(tracked.owners, tracked.names, strict=True)
        ]
        op = "; ".join(dict.fromkeys(named))
        key = (id(owner), op)
        group = self._groups.get(key)
        if group is None or self._step is None or self._step() is not builder:
            root, path = (owner.root, owner.path) if owner is not None else ("", "")
            group = builder.add_group("backward", root, path, op)
            self._groups[key] = group
        return group


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


def _settle(tracked: Tracked, arriving: Iterable[tuple[Node, _Flow]], owner_of: _Owners) -> None:
    """Write down by whom and from what a gradient is computed."""
    sources: dict[Tracked, None] = {}
    computed: dict[tuple[Call | None, str], None] = {}
    for node, flow in arriving:
        sources.update(flow.sources)
        name = next((name for name in flow.names if name not in VIEW_NODES), flow.names[0])
        computed[(owner_of(node), name)] = None
    tracked.sources = tuple(sources)
    order = sorted(computed, key=lambda pair: (pair[0] is None, pair[0].first_node if pair[0] is not None else 0))
    tracked.owners = tuple([call for call, _ in order])
    tracked.names = tuple([name for _, name in order])


def _blame(tracked: Tracked, owner: Call | None) -> tuple[str, str, str, Call | None]:
    """Return (root, path, slot, call) under which a tensor's gradient is recorded."""
    for call in tracked.owners:
        for consumer, slot in tracked.consumers:
            if consumer is call:
                return call.root, call.path, f"grad_{slot}", call
    producer = tracked.producer
    if owner is not None and producer is not None and owner is not producer:
        below = producer.path.removeprefix(f"{owner.path}.") if owner.path else producer.path
        return owner.root, owner.path, f"grad.{below or producer.root}.{tracked.slot}", owner
    if tracked.consumers and owner is not None:
        consumer, slot = tracked.consumers[-1]
        return consumer.root, consumer.path, f"grad_{slot}", owner
    if producer is not None:
        return producer.root, producer.path, f"grad_{tracked.slot}", owner
    consumer, slot = tracked.consumers[-1]
    return consumer.root, consumer.path, f"grad_{slot}", owner


def _kept(value: Any) -> Any:
    """Return what may be looked at twice: a generator of tensors is drawn from once."""
    return tuple(value) if isinstance(value, Iterator) else value


def _as_list(value: Any) -> list[torch.Tensor]:
    values = list(value) if isinstance(value, (tuple, list)) and not hasattr(value, "node") else [value]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
