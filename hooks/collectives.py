"""Collectives: what each rank contributed, and what came back, at levels `module` and `op`.

    comm/all_reduce.sum.world:in.0#3     this rank's contribution to the fourth such collective of the step
    comm/all_reduce.sum.world:out.0#3    its result, once it is complete
    comm/send.0-1:in.0                   what rank 0 sent to rank 1, and on rank 1
    comm/send.0-1:out.0                  what it received

Ranks call the collectives of a group in one order, so equal sites on its members are one collective.
The functions of `torch.distributed` are wrapped; an asynchronous one is read when the program waits for
it, so that nothing is ever read while it is in flight. Objects that are sent as pickles are not recorded:
they hold what they like (times, host names). The reducer of DistributedDataParallel works below
these functions: what it received and gave are `backward/...:grad` and `grad`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from bitcheck.events import Phase, Site
from bitcheck.hooks.dynamo import paused, skip_frame
from bitcheck.hooks.steps import StepBuilder

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder

Function = Callable[..., Any]


class Shape(NamedTuple):
    """Where a collective's arguments are."""

    arguments: str
    """Names of the positional arguments, in order."""
    given: str
    """The argument that holds a rank's contribution."""
    received: str
    """The argument that holds what it gets back."""
    root: str = ""
    """The argument that names the one rank that gives or gets alone."""
    gives_alone: bool = False
    gets_alone: bool = False
    is_pairwise: bool = False


SHAPES = {
    "all_reduce": Shape("tensor op group async_op", "tensor", "tensor"),
    "all_reduce_coalesced": Shape("tensors op group async_op", "tensors", "tensors"),
    "broadcast": Shape("tensor src group async_op group_src", "tensor", "tensor", "src", gives_alone=True),
    "reduce": Shape("tensor dst op group async_op group_dst", "tensor", "tensor", "dst", gets_alone=True),
    "all_gather": Shape("tensor_list tensor group async_op", "tensor", "tensor_list"),
    "all_gather_into_tensor": Shape("output_tensor input_tensor group async_op", "input_tensor", "output_tensor"),
    "gather": Shape("tensor gather_list dst group async_op group_dst", "tensor", "gather_list", "dst", gets_alone=True),
    "scatter": Shape(
        "tensor scatter_list src group async_op group_src", "scatter_list", "tensor", "src", gives_alone=True
    ),
    "reduce_scatter": Shape("output input_list op group async_op", "input_list", "output"),
    "reduce_scatter_tensor": Shape("output input op group async_op", "input", "output"),
    "all_to_all": Shape(
        "output_tensor_list input_tensor_list group async_op", "input_tensor_list", "output_tensor_list"
    ),
    "all_to_all_single": Shape("output input output_split_sizes input_split_sizes group async_op", "input", "output"),
    "send": Shape("tensor dst group tag group_dst", "tensor", "", "dst", is_pairwise=True),
    "isend": Shape("tensor dst group tag group_dst", "tensor", "", "dst", is_pairwise=True),
    "recv": Shape("tensor src group tag group_src", "", "tensor", "src", is_pairwise=True),
    "irecv": Shape("tensor src group tag group_src", "", "tensor", "src", is_pairwise=True),
}
"""The collectives that are recorded."""
PAIRS = ("isend", "irecv")
OBJECT_COLLECTIVES = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "monitored_barrier", "barrier",
)  # fmt: skip


class _Begun(NamedTuple):
    """A collective under way."""

    builder: StepBuilder
    path: str
    occurrence: int
    group: int
    inputs: list[int]
    received: list[torch.Tensor]
    is_coalesced: bool
    """It only joins others, and runs when the program has named them all."""


class _Local(threading.local):
    depth = 0


class CollectiveHooks:
    """Records the collectives of one recorder's process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._local = _Local()
        self._originals: list[tuple[Any, str, Function, Function]] = []
        self._pending: dict[int, tuple[Any, _Begun]] = {}

    def install(self) -> None:
        """Wrap the collectives of `torch.distributed`, where this PyTorch has them."""
        if not dist.is_available():
            return
        for name, shape in SHAPES.items():
            self._wrap(name, functools.partial(self._observed, name, shape))
        for name in OBJECT_COLLECTIVES:
            self._wrap(name, lambda original: self._unobserved(original))
        self._wrap("batch_isend_irecv", self._batched)
        self._wrap_pairs()
        work = torch._C._distributed_c10d.Work
        wait = work.wait
        settle = self._settle

        @skip_frame
        def observed_wait(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = wait(own, *args, **kwargs)
            settle(own)
            return result

        work.wait = observed_wait  # type: ignore[method-assign, assignment]
        self._originals.append((work, "wait", wait, observed_wait))

    def _wrap(self, name: str, make: Callable[[Function], Function]) -> None:
        if not hasattr(dist.distributed_c10d, name):
            return
        original: Function = getattr(dist.distributed_c10d, name)
        wrapper = make(original)
        module: Any
        # Inside its own module PyTorch compares `isend` and `irecv` by identity.
        for module in (dist,) if name in PAIRS else (dist.distributed_c10d, dist):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)
                self._originals.append((module, name, original, wrapper))

    def _wrap_pairs(self) -> None:
        """Have P2POp take the wrapped functions for what they wrap."""
        wrapped = {wrapper: original for _, name, original, wrapper in self._originals if name in PAIRS}
        kind = dist.P2POp
        make, init = kind.__new__, kind.__init__

        def observed_new(cls: Any, op: Function, *args: Any, **kwargs: Any) -> Any:
            return make(cls, wrapped.get(op, op), *args, **kwargs)

        def observed_init(own: Any, op: Function, *args: Any, **kwargs: Any) -> None:
            init(own, wrapped.get(op, op), *args, **kwargs)

        kind.__new__ = observed_new  # type: ignore[method-assign]
        kind.__init__ = observed_init  # type: ignore[method-assign, assignment]
        self._originals += [(kind, "__new__", make, observed_new), (kind, "__init__", init, observed_init)]

    def _batched(self, original: Function) -> Function:
        run = self._unobserved(original)

        @functools.wraps(original)
        @skip_frame
        def batched(p2p_op_list: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder.is_active and not self._local.depth:
                self._recorder.current.miss("transfers in batch_isend_irecv", len(p2p_op_list))
            return run(p2p_op_list, *args, **kwargs)

        return batched

    def remove(self) -> None:
        """Put the functions back."""
        for holder, name, original, wrapper in self._originals:
            if getattr(holder, name) is wrapper:
                setattr(holder, name, original)
        self._originals = []
        self._pending.clear()

    def _unobserved(self, original: Function) -> Function:
        local = self._local

        @functools.wraps(original)
        @skip_frame
        def run(*args: Any, **kwargs: Any) -> Any:
            local.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                local.depth -= 1

        return run

    def _observed(self, name: str, shape: Shape, original: Function) -> Function:
        local = self._local

        @functools.wraps(original)
        @skip_frame
        def run(*args: Any, **kwargs: Any) -> Any:
            if local.depth or not self._recorder.is_active or torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            local.depth += 1
            try:
                begun = self._begin(name, shape, args, kwargs)
                result = original(*args, **kwargs)
                if begun is not None:
                    self._end(begun, result)
                return result
            finally:
                local.depth -= 1

        return run

    @paused
    def _begin(self, name: str, shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun | None:
        recorder = self._recorder
        builder = recorder.current
        if not builder.is_kept:
            return None
        if not dist.is_initialized():
            builder.miss("collectives of process groups that torch.distributed does not know")
            return None
        values = {**dict(zip(shape.arguments.split(), args, strict=False)), **kwargs}
        process_group = values.get("group")
        own = dist.get_rank()
        ranks = (
            dist.get_process_group_ranks(process_group)
            if process_group is not None
            else list(range(dist.get_world_size()))
        )
        if own not in ranks:
            return None
        peer = _peer(shape, values, ranks)
        reduction = values.get("op")
        if shape.is_pairwise:
            sender, receiver = (own, peer) if shape.given else (peer, own)
            path = f"send.{sender}-{receiver}"
        else:
            reduces = "reduce" in name
            words = [name, *([_reduction_name(reduction)] if reduces else []), _group_name(ranks)]
            path = ".".join(words)
        occurrence = builder.count(Phase.COMM, "", path, "", False)
        call = recorder.modules.current
        op = f"{name}({_reduction_name(reduction)})" if "reduce" in name else name
        group = builder.add_group(
            "collective", call.root if call is not None else "", call.path if call is not None else "", op,
            call.group if call is not None else -1,
        )  # fmt: skip
        inputs: list[int] = []
        if shape.given and not (shape.gives_alone and peer != own):
            for index, tensor in enumerate(_tensors(values.get(shape.given))):
                site = Site(Phase.COMM, "", path, f"in.{index}", occurrence)
                inputs += builder.add_tensor(site, tensor, -1, builder.recorded(tensor))
        gets = bool(shape.received) and not (shape.gets_alone and peer != own)
        received = list(_tensors(values.get(shape.received))) if gets else []
        return _Begun(builder, path, occurrence, group, inputs, received, _is_coalescing(process_group))

    @paused
    def _end(self, begun: _Begun, result: Any) -> None:
        if isinstance(result, torch._C._distributed_c10d.Work):
            self._pending[id(result)] = (result, begun)
        elif begun.is_coalesced:
            begun.builder.miss("results of coalesced collectives", len(begun.received))
        else:
            self._record_received(begun)

    @paused
    def _settle(self, work: Any) -> None:
        held = self._pending.pop(id(work), None)
        if held is not None and self._recorder.is_active:
            self._record_received(held[1])

    def _record_received(self, begun: _Begun) -> None:
        builder = begun.builder
        if builder is not self._recorder.current:
            self._recorder.current.miss("collectives that were begun in one step and waited for in the next")
            return
        for index, tensor in enumerate(begun.received):
            site = Site(Phase.COMM, "", begun.path, f"out.{index}", begun.occurrence)
            events = builder.add_tensor(site, tensor, begun.group, begun.inputs)
            builder.remember(tensor, events)

    def forget(self) -> None:
        """Note the collectives of a step that nobody waited for; called at the end of a step."""
        if self._pending:
            self._recorder.current.miss("asynchronous collectives that were not waited for", len(self._pending))
            self._pending.clear()


def _is_coalescing(process_group: Any) -> bool:
    world = dist.distributed_c10d._world
    own = process_group if process_group is not None else dist.distributed_c10d._get_default_group()
    return own in world.pg_coalesce_state


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)


def _peer(shape: Shape, values: dict[str, Any], ranks: Sequence[int]) -> int:
    """Return the global rank that a rooted or pairwise collective names, -1 where it names none."""
    if not shape.root:
        return -1
    within = values.get(f"group_{shape.root}")
    if within is not None:
        return int(ranks[within])
    peer = values.get(shape.root)
    return int(peer) if peer is not None else (ranks[0] if not shape.is_pairwise else -1)


def _reduction_name(reduction: Any) -> str:
    if reduction is None:
        return "sum"
    name = str(reduction).rpartition(".")[2].lower()
    return name if name.isidentifier() else "custom"


def _group_name(ranks: Sequence[int]) -> str:
    """Return `world`, or the ranks: `0-3` for a row of them, `0,2,4` otherwise."""
    ordered = sorted(ranks)
    if ordered == list(range(dist.get_world_size())):
        return "world"
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))
