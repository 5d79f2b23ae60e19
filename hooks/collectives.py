"""Collectives: what each rank contributed, and what came back, at levels `module` and `op`.

    comm/all_reduce.sum.world:in.0#3     this rank's contribution to the fourth such collective of the step
    comm/all_reduce.sum.world:out.0#3    its result, once it is complete
    comm/all_gather_into_tensor.0,2.dp:out.0   in the group of ranks 0 and 2 along the mesh's dimension `dp`
    comm/send.0-1:in.0                   what rank 0 sent to rank 1, and on rank 1
    comm/send.0-1:out.0                  what it received

Ranks call the collectives of a group in one order, so equal sites on its members are one collective.
Seen are the methods of `ProcessGroup`, which all functions of `torch.distributed` end in, and the functional
collectives (`functional_collectives`), which are operators. The functions themselves stay what
they are: pipelines and TorchDynamo compare them by identity. Objects that are sent as pickles are not
recorded: they hold what they like (times, host names). The reducer of DistributedDataParallel works below
all this: what it received and gave are `backward/...:grad` and `grad`.

A result has its place where the collective was begun, and its digest from when the program waits for
it: nothing is ever read while it is in flight, and nothing is waited for on the recorder's account.

Long because all kinds of collectives go through one place.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from bitcheck.events import Phase
from bitcheck.hooks.callers import Purpose, is_rehearsal, is_sending_objects, purpose_of_collective
from bitcheck.hooks.completion import Completions, Promised
from bitcheck.hooks.dynamo import paused, quiet, skip_frame
from bitcheck.hooks.functional_collectives import FunctionalCollectives
from bitcheck.hooks.modules import in_backward
from bitcheck.hooks.patches import Function, Patches
from bitcheck.hooks.process_groups import GroupNames, Members, reduction_name
from bitcheck.hooks.sites import Sites
from bitcheck.hooks.steps import Call, StepBuilder
from bitcheck.roles import is_local_gradient

if TYPE_CHECKING:
    from bitcheck.hooks.recorder import Recorder


class Shape(NamedTuple):
    """Where a collective's arguments are among those of `ProcessGroup`'s method."""

    word: str
    """What it is called in a site: as in torch.distributed."""
    given: int | None
    """Position of the argument that holds a rank's contribution, None where it has none."""
    received: int | None
    """Position of the argument that holds what it gets back."""
    reduces: bool = False
    gives_alone: bool = False
    """Only the root contributes."""
    gets_alone: bool = False
    """Only the root gets the result."""
    is_pairwise: bool = False


SHAPES = {
    "allreduce": Shape("all_reduce", 0, 0, reduces=True),
    "allreduce_coalesced": Shape("all_reduce_coalesced", 0, 0, reduces=True),
    "broadcast": Shape("broadcast", 0, 0, gives_alone=True),
    "reduce": Shape("reduce", 0, 0, reduces=True, gets_alone=True),
    "allgather": Shape("all_gather", 1, 0),
    "allgather_coalesced": Shape("all_gather_coalesced", 1, 0),
    "_allgather_base": Shape("all_gather_into_tensor", 1, 0),
    "all_gather_single": Shape("all_gather_into_tensor", 1, 0),
    "allgather_into_tensor_coalesced": Shape("all_gather_into_tensor_coalesced", 1, 0),
    "all_gather_single_coalesced": Shape("all_gather_into_tensor_coalesced", 1, 0),
    "gather": Shape("gather", 1, 0, gets_alone=True),
    "scatter": Shape("scatter", 1, 0, gives_alone=True),
    "reduce_scatter": Shape("reduce_scatter", 1, 0, reduces=True),
    "_reduce_scatter_base": Shape("reduce_scatter_tensor", 1, 0, reduces=True),
    "reduce_scatter_single": Shape("reduce_scatter_tensor", 1, 0, reduces=True),
    "reduce_scatter_tensor_coalesced": Shape("reduce_scatter_tensor_coalesced", 1, 0, reduces=True),
    "reduce_scatter_single_coalesced": Shape("reduce_scatter_tensor_coalesced", 1, 0, reduces=True),
    "alltoall": Shape("all_to_all", 1, 0),
    "alltoall_base": Shape("all_to_all_single", 1, 0),
    "all_to_all_single": Shape("all_to_all_single", 1, 0),
    "send": Shape("send", 0, None, is_pairwise=True),
    "recv": Shape("send", None, 0, is_pairwise=True),
    "recv_anysource": Shape("receive_from_any", None, 0),
}
"""The methods that are recorded; a version of PyTorch has some of them under one of two names."""


class Begun(NamedTuple):
    """A collective under way."""

    builder: StepBuilder
    sites: Sites
    group: int
    inputs: tuple[int, ...]
    received: list[torch.Tensor]
    heard_by: list[int] | None
    """Where its results are put for what is computed after them."""


class _Bucket(NamedTuple):
    """What a communication hook of DistributedDataParallel reduces."""

    gradients: list[int]
    """The events of the gradients in it."""
    received: list[int]
    """The events of what its collectives gave."""


class _Local(threading.local):
    depth = 0
    is_called_back = False
    """Inside the callback of a future."""
    bucket: _Bucket | None = None
    """Set inside a communication hook."""


class CollectiveHooks:
    """Records the collectives of one recorder's process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._local = _Local()
        self._patches = Patches()
        self.names = GroupNames()
        self.completions = Completions(recorder)
        self._functional = FunctionalCollectives(recorder, self)

    # --- attaching

    def install(self) -> None:
        """Wrap what collectives end in, where this PyTorch has them."""
        if not dist.is_available():
            return
        replace = self._patches.replace
        kind = torch._C._distributed_c10d.ProcessGroup
        for name, shape in SHAPES.items():
            replace(kind, name, functools.partial(self._observed, shape))
        for name in ("then", "add_done_callback"):
            replace(torch._C.Future, name, self._calling_back)
        replace(torch.nn.parallel.DistributedDataParallel, "register_comm_hook", self._hooking)
        self.completions.install(self._patches)
        self._functional.install()

    def remove(self) -> None:
        """Put the functions back."""
        self._functional.remove()
        self._patches.remove()
        self.completions.clear()

    # --- one collective

    def _observed(self, shape: Shape, original: Function) -> Function:
        @functools.wraps(original)
        @skip_frame
        def run(own: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.sees():
                if self._local.is_called_back and self._recorder.is_active:
                    self._recorder.current.miss("collectives that callbacks of futures began")
                return original(own, *args, **kwargs)
            with self.alone():
                begun = self._begin_method(shape, own, args, kwargs)
                result = original(own, *args, **kwargs)
                if begun is not None:
                    self._end_method(own, begun, result)
                return result

        return run

    def sees(self) -> bool:
        """Whether a collective that is begun now, by this thread, is to be recorded."""
        if self._local.depth or not self._recorder.is_active or torch.compiler.is_dynamo_compiling():
            return False
        if not self._recorder.trains_here():  # a checkpoint that is saved in the background: when it runs is chance
            self._recorder.current.miss("collectives of threads that do not train")
            return False
        return not is_sending_objects()

    def alone(self) -> _Alone:
        """Return a context in which collectives are parts of one that is recorded."""
        return _Alone(self._local)

    def members_of(self, process_group: Any) -> Members | None:
        """Return who is in a process group; None, and counted, for one that is not known."""
        members = self.names.members_of(process_group)
        if members is None:
            self._recorder.current.miss("collectives of process groups that torch.distributed does not know")
        return members

    @paused
    def _begin_method(self, shape: Shape, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun | None:
        members = self.members_of(own)
        if members is None:
            return None
        ranks, name, rank = members
        options = next((value for value in (*args[1:], *kwargs.values()) if hasattr(value, "timeout")), None)
        reduction = getattr(options, "reduceOp", None)
        if reduction is None:
            reduction = next((value for value in args[1:] if isinstance(value, _REDUCTIONS)), kwargs.get("op"))
        root = getattr(options, "rootRank", None)
        if root is None and (shape.gives_alone or shape.gets_alone):
            root = next((value for value in args[1:] if isinstance(value, int)), 0)
        gives = not shape.gives_alone or ranks[int(root or 0)] == rank
        gets = not shape.gets_alone or ranks[int(root or 0)] == rank
        if shape.is_pairwise:
            peer = ranks[int(args[1] if len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank", 0)))]
            sender, receiver = (rank, peer) if shape.given is not None else (peer, rank)
            path = f"send.{self.names.transfer_name(own, members, sender, receiver)}"
            op = "send" if shape.given is not None else "recv"
        else:
            word = reduction_name(reduction) if shape.reduces else ""
            path = f"{shape.word}.{word}.{name}" if word else f"{shape.word}.{name}"
            op = f"{shape.word}({word})" if word else shape.word
        given = list(_tensors(_argument(shape.given, args, kwargs))) if gives else []
        received = list(_tensors(_argument(shape.received, args, kwargs))) if gets else []
        return self.begin(path, op, given, received, is_pairwise=shape.is_pairwise)

    def begin(
        self,
        path: str,
        op: str,
        given: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        *,
        is_pairwise: bool = False,
    ) -> Begun | None:
        """Record what this rank contributes to a collective; None where its step is not kept."""
        recorder = self._recorder
        builder = recorder.between_steps() if recorder.optimizers.running is None else recorder.current
        self.completions.settle_dropped()
        if not builder.is_kept or (is_pairwise and is_rehearsal()):
            return None
        call = recorder.modules.current
        bucket = self._local.bucket or self._unknown_bucket(builder)
        if bucket is not None:
            path = f"{path}.bucket"
        sites = builder.next_sites(Phase.COMM, "", path, "", False)
        root, owner = (call.root, call.path) if call is not None else ("", "")
        group = builder.add_group("collective", root, owner, op, call.group if call is not None else -1)
        inputs: list[int] = []
        for index, tensor in enumerate(given):
            known = builder.recorded(tensor) or (bucket.gradients if bucket is not None else _surroundings(call))
            inputs += builder.add_tensor(sites[f"in.{index}"], tensor, -1, known)
        heard_by = bucket.received if bucket is not None else _listener(builder, call, is_pairwise)
        return Begun(builder, sites, group, builder.same(tuple(inputs)), list(received), heard_by)

    def promise(self, begun: Begun, received: Sequence[torch.Tensor]) -> Promised:
        """Give the results of a collective their places in the step; `settle` reads them."""
        builder = begun.builder
        results: list[tuple[int, torch.Tensor]] = []
        for index, tensor in enumerate(received):
            events = builder.reserve(begun.sites[f"out.{index}"], tensor, begun.group, begun.inputs)
            results += [(event, tensor) for event in events]
            self._note(begun, tensor, events)
        promised = Promised(builder, results)
        self.completions.take_off(promised)
        return promised

    def _note(self, begun: Begun, tensor: torch.Tensor, events: list[int]) -> None:
        begun.builder.remember(tensor, events)
        if begun.heard_by is not None:
            begun.heard_by.extend(events)
        if self._recorder.ops is not None:
            self._recorder.ops.note_received(begun.builder, tensor, events)

    @paused
    def _end_method(self, own: Any, begun: Begun, result: Any) -> None:
        if begun.received:
            self.completions.await_work(own, result, self.promise(begun, begun.received))

    def close(self, builder: StepBuilder) -> None:
        """Let go of what nobody waited for in a step that ends."""
        self.completions.close(builder)

    def _calling_back(self, original: Function) -> Function:
        """A callback runs in this thread or in another, as it happens: nothing that it does is recorded."""
        local = self._local

        @functools.wraps(original)
        @skip_frame
        def then(own: Any, callback: Function) -> Any:
            @functools.wraps(callback)
            def run(future: Any) -> Any:
                before = local.is_called_back
                local.depth, local.is_called_back = local.depth + 1, True
                try:
                    return quiet(callback)(future)
                finally:
                    local.depth, local.is_called_back = local.depth - 1, before

            return original(own, run)

        return then

    # --- DistributedDataParallel's communication hooks

    def _hooking(self, original: Function) -> Function:
        """Have a hook's collectives know that they carry a bucket, whose gradients change when buckets are rebuilt."""

        @functools.wraps(original)
        @skip_frame
        def register_comm_hook(own: Any, state: Any, hook: Function) -> Any:
            @functools.wraps(hook)
            @skip_frame
            def observed_hook(state: Any, bucket: Any) -> Any:
                before = self._local.bucket
                self._local.bucket = held = _Bucket(self._gradients_in(bucket), [])
                try:
                    return hook(state, bucket)
                finally:
                    self._local.bucket = before
                    self._note_reduced(bucket, held)

            return original(own, state, observed_hook)

        return register_comm_hook

    def _unknown_bucket(self, builder: StepBuilder) -> _Bucket | None:
        """Stand for the bucket of a hook that was registered before the recorder came: any of the gradients so far."""
        if not in_backward() or self._recorder.modules.current is not None:
            return None
        node = torch._C._current_autograd_node()
        if node is None or node.name() != "torch::autograd::AccumulateGrad":
            return None
        return _Bucket([index for index, site in enumerate(builder.record.sites) if is_local_gradient(site)], [])

    @paused
    def _note_reduced(self, bucket: Any, held: _Bucket) -> None:
        """What the hook leaves in the bucket, now or when its future is there, it has from its collectives."""
        recorder = self._recorder
        if recorder.ops is not None and recorder.is_active:
            recorder.ops.note_received(recorder.current, bucket.buffer(), held.received)

    @paused
    def _gradients_in(self, bucket: Any) -> list[int]:
        recorder = self._recorder
        if not recorder.is_active:
            return []
        builder, events = recorder.current, recorder.gradients.events_of
        return [event for parameter in bucket.parameters() for event in events(builder, parameter)]


class _Alone:
    """Counts how deep a thread is inside recorded collectives."""

    __slots__ = ("_local",)

    def __init__(self, local: _Local) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._local.depth += 1

    def __exit__(self, *error: object) -> None:
        self._local.depth -= 1


def _surroundings(call: Call | None) -> list[int]:
    """Return what the code of a module has to compute a contribution from that was recorded nowhere itself."""
    if call is None or in_backward():
        return []
    return [*call.inputs, *call.children, *call.heard()]


def _listener(builder: StepBuilder, call: Call | None, is_pairwise: bool) -> list[int] | None:
    """Return where results go that are not passed on as the tensors they are received in.

    Inside a module's call everything after them in it may be computed from them. In backward, gradients
    are; the parameters that FSDP gathers serve from then on, and the gradients that it reduces no further
    gradient is computed from.
    """
    if call is not None:
        return call.received
    if not in_backward():
        return None if is_pairwise else builder.top.received
    purpose = purpose_of_collective()
    if purpose is None:
        return builder.received
    return builder.gathered if purpose is Purpose.GATHER else None


def _argument(position: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if position is None:
        return None
    values = [*args, *kwargs.values()]
    return values[position] if position < len(values) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)


_REDUCTIONS: tuple[type, ...] = (
    (torch._C._distributed_c10d.ReduceOp, torch._C._distributed_c10d.ReduceOp.RedOpType) if dist.is_available() else ()
)
