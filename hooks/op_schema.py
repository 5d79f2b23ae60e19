"""What an operator does to its arguments, read off its schema: writes, views, draws, fills nothing.

aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1)   writes self, reads both
aten::copy_(Tensor(a!) self, Tensor src, ...)                         writes self without reading it
aten::mm.out(..., *, Tensor(a!) out)                                  writes out without reading it
aten::view(Tensor(a) self, ...)                                       moves nothing
aten::empty_like(Tensor self, ...)                                    gives memory that nobody wrote
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

EMPTY = frozenset(
    [
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "empty_quantized",
        "_empty_affine_quantized",
        "resize_",
        "set_",
    ]
)
"""Operators whose output holds whatever the memory held: no value of theirs means anything."""
OVERWRITING = frozenset(
    [
        "fill_",
        "zero_",
        "copy_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
        "log_normal_",
        "cauchy_",
        "geometric_",
        "eye_",
        "_foreach_copy_",
        "_foreach_zero_",
    ]
)
"""Operators that write their first argument without reading it."""
PARTLY_WRITTEN = frozenset({"fsdp.all_gather_copy_in.default"})
"""Operators that give memory of which they wrote a part: a collective writes the rest, and is recorded."""
PRIVATE_OUTPUTS = {
    "mkldnn_rnn_layer": (3,),
    "_cudnn_rnn": (3, 4),
    "miopen_rnn": (3, 4),
    "cudnn_batch_norm": (3,),
    "_batch_norm_with_update": (3,),
    "_batch_norm_with_update_functional": (3,),
    "_ctc_loss": (1,),
}
"""Outputs without a name that an operator gives for its own backward alone: room to work in, written in part."""
PRIVATE_NAMES = frozenset({"debug_attn_mask", "philox_offset", "philox_seed", "rng_state", "unused"})
"""Outputs of that kind by their names, and arguments of the backward: where attention draws nothing nobody writes
them."""
PRIVATE_ARGUMENTS = {
    "mkldnn_rnn_layer_backward": ("workspace",),
    "_cudnn_rnn_backward": ("weight_buf", "reserve"),
    "miopen_rnn_backward": ("weight_buf", "reserve"),
    "cudnn_batch_norm_backward": ("reserveSpace",),
    "batch_norm_backward": ("reserve",),
    "_ctc_loss_backward": ("log_alpha",),
    "rrelu_with_noise": ("noise",),
    "rrelu_with_noise_": ("noise",),
    "rrelu_with_noise_backward": ("noise",),
}
"""An operator's arguments of that kind."""
SCALING = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "addr"})
"""Operators that multiply `self` by `beta`, and do not read it where that is zero."""
PASSED_OVER = frozenset({"c10d", "_c10d_functional", "c10d_functional", "profiler", "prim", "prims", "debugprims"})
"""Namespaces whose operators are not recorded here: collectives are recorded where they complete."""
SEQUENCES = frozenset({list, tuple})
"""What holds several arguments in one."""
PLAIN_SCALARS = frozenset({type(None), bool, int, float, str})
ATTRIBUTE_TYPES = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that only say what results are like: they are told by what is recorded of those."""


class OpFacts(NamedTuple):
    """One operator overload."""

    name: str
    """`aten.index_put_.default`."""
    is_recorded: bool
    """False for views, for what gives empty memory, and for what is recorded elsewhere."""
    is_empty: bool
    draws: bool
    """Draws random numbers: the generator's state is an input."""
    written: tuple[str, ...]
    """Arguments that it writes."""
    unread: frozenset[str]
    """Those that it does not read, or that hold what only its own forward made of them."""
    arguments: tuple[str, ...]
    """All arguments' names, in order."""
    is_scaling: bool = False
    """`self` counts for nothing where `beta` is zero."""
    private: tuple[int, ...] = ()
    """Places of those outputs that are for its own backward alone: what is in them is chance in part."""

    def is_private(self, slot: str) -> bool:
        """Say of an output, `out.3`, whether it is for the operator's own backward alone."""
        return bool(self.private) and slot in [f"out.{place}" for place in self.private]


@functools.cache
def facts_of(op: Any) -> OpFacts:
    """Return what is known of an operator overload; of a higher-order operator only its name."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return OpFacts(str(op), False, False, False, (), frozenset(), ())
    base = op.overloadpacket.__name__
    private = PRIVATE_ARGUMENTS.get(base, ())
    written = tuple(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and a.name not in private
    )
    unread = {a.name for a in schema.arguments if a.is_out}
    if base in OVERWRITING:
        unread.update(written)
    unread.update(private)
    unread.update(a.name for a in schema.arguments if a.name in PRIVATE_NAMES)
    is_empty = base in EMPTY
    moves_nothing = op.is_view or torch.Tag.inplace_view in op.tags
    is_recorded = not (moves_nothing or is_empty or op.namespace in PASSED_OVER or str(op) in PARTLY_WRITTEN)
    return OpFacts(
        name=str(op),
        is_recorded=is_recorded,
        is_empty=is_empty,
        draws=torch.Tag.nondeterministic_seeded in op.tags,
        written=written,
        unread=frozenset(unread),
        arguments=tuple(a.name for a in schema.arguments),
        is_scaling=base in SCALING,
        private=PRIVATE_OUTPUTS.get(base, ())
        + tuple(place for place, output in enumerate(schema.returns) if output.name in PRIVATE_NAMES),
    )


def named_arguments(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) of the arguments that a call gives, members of lists as `name.0`, `name.1`."""
    named = [*zip(facts.arguments, args, strict=False), *kwargs.items()]
    if SEQUENCES.isdisjoint([type(value) for _, value in named]):
        return named
    found: list[tuple[str, Any]] = []
    for name, value in named:
        if type(value) in SEQUENCES and _has_tensor(value):
            found += zip(member_names(name, len(value)), value, strict=True)
        else:
            found.append((name, value))
    return found


def _has_tensor(values: Sequence[Any]) -> bool:
    if PLAIN_SCALARS.issuperset(map(type, values)):  # a shape, mostly
        return False
    return any(isinstance(value, torch.Tensor) for value in values)


@functools.lru_cache(maxsize=4096)
def member_names(name: str, count: int) -> list[str]:
    """Return the names of a sequence's members: `name.0`, `name.1`, ..."""
    return [f"{name}.{index}" for index in range(count)]
