"""Functional collectives: those of DTensor, of compiled graphs, and of autograd in C++.

They are operators (`_c10d_functional.all_reduce`) that give a new tensor, in flight until `wait_tensor`
is called with it or with a view of it. Whoever calls them, Python, C++ or a compiled graph, PyTorch's
dispatcher runs a kernel that serves every kind of device; ours goes before it and calls it. So nothing
that is traced or compiled is any different.

PyTorch's kernel is called through the dispatcher, which lets go of the interpreter's lock: while it
waits for a lock of gloo's, a thread of gloo's may wait for the interpreter's, to free what was sent.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bitcheck.hooks.dynamo import paused

if TYPE_CHECKING:
    from bitcheck.hooks.collectives import Begun, CollectiveHooks
    from bitcheck.hooks.process_groups import Members
    from bitcheck.hooks.recorder import Recorder

NAMESPACE = "_c10d_functional"
WAIT = "wait_tensor"
OPERATORS = {
    name: (word, reduces)
    for word, reduces, names in (
        ("all_reduce", True, ("all_reduce", "all_reduce_")),
        ("all_reduce_coalesced", True, ("all_reduce_coalesced", "all_reduce_coalesced_")),
        ("all_gather_into_tensor", False, ("all_gather_into_tensor", "all_gather_into_tensor_out")),
        ("all_gather_into_tensor_coalesced", False, ("all_gather_into_tensor_coalesced",)),
        ("reduce_scatter_tensor", True, ("reduce_scatter_tensor", "reduce_scatter_tensor_out")),
        ("reduce_scatter_tensor_coalesced", True, ("reduce_scatter_tensor_coalesced",)),
        ("all_to_all_single", False, ("all_to_all_single",)),
        ("broadcast", False, ("broadcast", "broadcast_")),
    )
    for name in names
}
"""Operator -> (what it is called in a site, does it reduce)."""
PAIRWISE = ("isend", "irecv", "batch_p2p_ops")
KEYS = ("CPU", "CUDA")
_ANYWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)
"""A kind of device that nobody has and we put no kernel before: what runs there is PyTorch's own kernel."""


def _transfers(name: str, values: dict[str, Any]) -> list[tuple[str, int, torch.Tensor]]:
    """Return (operation, the other's rank in the group, memory) of what goes between this rank and others."""
    if name == "batch_p2p_ops":
        return list(zip(values["op_list"], values["peer_list"], values["tensors"], strict=True))
    return [(name, int(values["dst"] if name == "isend" else values["src"]), values["tensor"])]


class FunctionalCollectives:
    """Records functional collectives for one recorder."""

    def __init__(self, recorder: Recorder, collectives: CollectiveHooks) -> None:
        self._recorder = recorder
        self._collectives = collectives
        self._library: Any = None

    def install(self) -> None:
        """Put our kernels before PyTorch's."""
        if not hasattr(torch.ops, NAMESPACE):
            return
        self._library = torch.library.Library(NAMESPACE, "IMPL")
        for name in (*OPERATORS, *PAIRWISE, WAIT):
            try:
                operator = getattr(getattr(torch.ops, NAMESPACE), name).default
            except AttributeError:
                continue  # another version's
            names = [argument.name for argument in operator._schema.arguments]
            execute = functools.partial(operator.redispatch, _ANYWHERE)
            observed = self._observed_wait(execute) if name == WAIT else self._observed(name, names, execute)
            for key in KEYS:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._library.impl(name, observed, key, allow_override=True)

    def remove(self) -> None:
        """Take our kernels away."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _observed(self, name: str, names: Sequence[str], execute: Callable[..., Any]) -> Callable[..., Any]:
        collectives = self._collectives

        def run(*args: Any, **kwargs: Any) -> Any:
            if not collectives.sees():
                return execute(*args, **kwargs)
            with collectives.alone():
                begun = self._begin(name, dict(zip(names, args, strict=False)) | kwargs)
                result = execute(*args, **kwargs)
                if begun:
                    self._end(name, begun, result)
                return result

        return run

    def _observed_wait(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: torch.Tensor) -> Any:
            result = execute(tensor)
            self._settle(tensor)
            return result

        return run

    @paused
    def _begin(self, name: str, values: dict[str, Any]) -> list[Begun | None]:
        group = values["group_name"]
        if isinstance(group, str):
            registry: Any = dist.distributed_c10d
            group = registry._resolve_process_group(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        members = self._collectives.members_of(group)
        if members is None:
            return []
        if name in PAIRWISE:
            return [self._begin_transfer(group, members, *transfer) for transfer in _transfers(name, values)]
        word, reduces = OPERATORS[name]
        value = values.get("input", values.get("inputs"))
        given = [value] if isinstance(value, torch.Tensor) else list(value or ())
        if word == "broadcast" and members.ranks[int(values["src"])] != members.own:
            given = []
        reduction = str(values.get("reduce_op", "sum")).lower() if reduces else ""
        path = ".".join(filter(None, (word, reduction, members.name)))
        return [self._collectives.begin(path, f"{word}({reduction})" if reduces else word, given, ())]

    def _begin_transfer(self, group: Any, members: Members, op: str, peer: int, tensor: torch.Tensor) -> Begun | None:
        """Record what goes to, or will come from, the member `peer` of a group."""
        names, own, other = self._collectives.names, members.own, members.ranks[peer]
        is_sent = op == "isend"
        ends = (own, other) if is_sent else (other, own)
        given, received = ([tensor], []) if is_sent else ([], [tensor])
        path = f"send.{names.transfer_name(group, members, *ends)}"
        return self._collectives.begin(path, op, given, received, is_pairwise=True)

    @paused
    def _end(self, name: str, begun: list[Begun | None], result: Any) -> None:
        results = [result] if isinstance(result, torch.Tensor) else list(result or ())
        for one in begun:
            # What a transfer gives stands in the memory that was handed to it; what is sent gives nothing.
            received = one.received if one is not None and name in PAIRWISE else results
            if one is not None and received:
                self._collectives.completions.expect(self._collectives.promise(one, received))

    @paused
    def _settle(self, tensor: torch.Tensor) -> None:
        self._collectives.completions.land(tensor)
