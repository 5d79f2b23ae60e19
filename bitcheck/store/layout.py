"""What steps have in common, held once: their layout (which sites, made by what, from what) and their
meta (each event's dtype, shape and size); and the roots and the chain over a step's digests.

A layout is a step without its digests. Its `hash` is over its content, not over row numbers of a
file, so that two ranks or runs whose steps have equal layout hashes line up event by event.

    key digest   XXH3-128 of the site's key, 16 bytes
    phase root   XXH3-128 of (key digest + event digest), 32 bytes an event, the events of the phase
                 in the order of their keys: registration order does not matter. What the operations
                 of an optimizer read and wrote (phase `optim`, level op) is no state: the root of
                 `grad` covers it, so that state roots agree whatever the level
    root         XXH3-128 of the 13 phase roots in the order of PHASES
    state root   XXH3-128 of the roots of STATE_PHASES
    chain        XXH3-128 of the previous row's chain (CHAIN_SEED for the first), the step number
                 (int64), the kind (uint32), root, layout hash, meta hash, contents
    contents     XXH3-128 of the XXH3-128s of the leaf digests kept, of the JSON list of the values, of
                 the JSON of the notes
"""

from __future__ import annotations

import functools
import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from bitcheck.digest import DIGEST_BYTES, num_leaves
from bitcheck.events import PHASES, STATE_PHASES, Group, Phase, Site

CHAIN_SEED = xxh3_128_digest(b"bitcheck.rank/1")
"""What the first row's chain covers in place of a previous chain: the same for every rank and run."""

PHASE_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
"""A phase's number in a file."""
_STATE_NUMBERS = [PHASE_NUMBER[phase] for phase in STATE_PHASES]
_IS_STATE = np.array([phase in STATE_PHASES for phase in PHASES])

_KNOWN_SITES = 131_072
"""Sites, and computations, that are described once for all layouts; the steps of a program share nearly all."""

_quoted = json.encoder.encode_basestring_ascii
"""A text as `json.dumps` writes it, in a fifth of the time."""

NO_NOTES = "[{},[]]"
"""Notes of a step that has none."""


class LayoutError(ValueError):
    """Events, groups and inputs that make no step: an index out of range, a site twice."""


class Roots(NamedTuple):
    """The roots of one step."""

    phase_roots: bytes
    """[13, 16] bytes, in the order of PHASES."""
    root: bytes
    state_root: bytes


class _Described(NamedTuple):
    """What a layout needs to know of a site."""

    key: str
    key_digest: bytes
    phase: int
    digest: bytes
    """Of its parts, not of its key: a name with a slash in it can give two sites one key."""


@functools.lru_cache(maxsize=_KNOWN_SITES)
def _describe(site: Site) -> _Described:
    key = site.key
    return _Described(key, digest_key(key), PHASE_NUMBER[site.phase], digest_site(site))


def digest_key(key: str) -> bytes:
    """Return the key digest of a site, 16 bytes."""
    return xxh3_128_digest(_utf8(key))


def digest_site(site: Site) -> bytes:
    """Return the XXH3-128 of a site's parts as JSON, 16 bytes."""
    phase, root, path, slot, occurrence, is_eval = site
    names = f"{_quoted(phase)}, {_quoted(root)}, {_quoted(path)}, {_quoted(slot)}"
    return xxh3_128_digest(f"[{names}, {occurrence:d}, {'true' if is_eval else 'false'}]".encode("ascii"))


def digest_group(group: Group) -> bytes:
    """Return the XXH3-128 of a computation's parts as JSON, 16 bytes."""
    kind, root, path, op, parent = group
    names = f"{_quoted(kind)}, {_quoted(root)}, {_quoted(path)}, {_quoted(op)}"
    return xxh3_128_digest(f"[{names}, {parent:d}]".encode("ascii"))


_digest_group = functools.lru_cache(maxsize=_KNOWN_SITES)(digest_group)


class Cover:
    """Which events each phase's root covers, and in which order.

    order      int64 [n], events by the phase whose root covers them, then by key;
               order[phase_ptr[p] : phase_ptr[p + 1]] are phase p's

    `phases` uint8 [n], `by_key` int64 [n] the events in the order of their keys, `key_digests` uint8 [n, 16];
    `is_op` bool, of each computation: whether it is an operation.
    """

    __slots__ = ("_pairs", "order", "phase_ptr")

    def __init__(
        self, phases: np.ndarray, group_of: np.ndarray, is_op: np.ndarray, by_key: np.ndarray, key_digests: np.ndarray
    ) -> None:
        # An optimizer's operations bear the phase `optim` and are no state: they count with the gradients.
        of_op = np.append(is_op, False)[group_of]  # the last for -1, no computation
        covering = np.where(_IS_STATE[phases] & of_op, np.uint8(PHASE_NUMBER[Phase.GRAD]), phases)
        self.order = by_key[np.argsort(covering[by_key], kind="stable")]
        self.phase_ptr = [0, *np.cumsum(np.bincount(covering, minlength=len(PHASES))).tolist()]
        self._pairs = np.empty((len(phases), 32), np.uint8)
        self._pairs[:, :16] = key_digests[self.order]

    def compute_roots(self, digests: np.ndarray) -> Roots:
        """Return the roots of a step with this layout; `digests` uint8 [n, 16], in event order."""
        pairs = self._pairs.copy()
        pairs[:, 16:] = digests[self.order]
        ptr = self.phase_ptr
        roots = [xxh3_128_digest(pairs[start:end].data) for start, end in itertools.pairwise(ptr)]
        phase_roots = b"".join(roots)
        state_root = xxh3_128_digest(b"".join([roots[number] for number in _STATE_NUMBERS]))
        return Roots(phase_roots, xxh3_128_digest(phase_roots), state_root)


def parents_of(groups: Sequence[Group]) -> np.ndarray:
    """Return the parents of computations, int64 [n], -2 for one that cannot be any's."""
    return np.array([group.parent if -1 <= group.parent < 2**31 else -2 for group in groups], np.int64)


def check_indices(group_of: np.ndarray, parents: np.ndarray, input_ptr: np.ndarray, inputs: np.ndarray) -> None:
    """Check what a layout's numbers refer to; `parents` of its computations, the rest as in Layout.

    Raises LayoutError where an index is out of range, an input does not come before its event, or a
    group not after its parent.
    """
    n, num_groups = len(group_of), len(parents)
    if n and not (group_of.min() >= -1 and group_of.max() < num_groups):
        raise LayoutError("an event's group is out of range")
    if inputs.size and not (
        inputs.min() >= 0 and (inputs < np.repeat(np.arange(n, dtype=np.int32), np.diff(input_ptr))).all()
    ):
        raise LayoutError("an event's input does not come before it")
    if not ((parents >= -1) & (parents < np.arange(num_groups))).all():
        raise LayoutError("a group does not come after its parent")


def hash_layout(
    group_of: np.ndarray, input_ptr: np.ndarray, inputs: np.ndarray, site_digests: bytes, group_digests: bytes
) -> bytes:
    """Return a layout's hash, 16 bytes: of its numbers, and of the digests of its sites and groups, joined."""
    hashed = xxh3_128(struct.pack("<4sQQQ", b"lay2", len(group_of), len(group_digests) // DIGEST_BYTES, len(inputs)))
    hashed.update(group_of.astype("<i4").tobytes())
    hashed.update(input_ptr.astype("<i8").tobytes())
    hashed.update(inputs.astype("<i4").tobytes())
    hashed.update(site_digests)
    hashed.update(group_digests)
    return hashed.digest()


class Layout:
    """The sites of a step, the computations that made them, and what each was computed from.

    sites       n sites in happens-before order
    groups      the computations
    group_of    int32 [n], index in groups, -1 for observed state
    input_ptr   int64 [n + 1], inputs int32 [m]: event i was computed from the events
                inputs[input_ptr[i] : input_ptr[i + 1]], all of them before i
    phases      uint8 [n], index in PHASES
    keys        the sites' canonical text; key_digests uint8 [n, 16]
    order       int64 [n], events by the phase whose root covers them, then by key;
                order[phase_ptr[p] : phase_ptr[p + 1]] are phase p's
    hash        16 bytes over all of the above: XXH3-128 of the numbers, then of the XXH3-128 of each site's
                and each computation's parts as JSON

    Raises LayoutError where an index is out of range, an input does not come before its event, a
    group not after its parent, or two events share a site.
    """

    __slots__ = (
        "_cover", "group_of", "groups", "hash", "input_ptr", "inputs", "key_digests", "keys", "order", "phase_ptr",
        "phases", "sites",
    )  # fmt: skip

    def __init__(
        self,
        sites: Sequence[Site],
        groups: Sequence[Group],
        group_of: np.ndarray,
        input_ptr: np.ndarray,
        inputs: np.ndarray,
    ) -> None:
        n = len(sites)
        self.sites, self.groups = list(sites), list(groups)
        self.group_of, self.input_ptr, self.inputs = group_of, input_ptr, inputs
        check_indices(group_of, parents_of(groups), input_ptr, inputs)
        described = [_describe(site) for site in sites]
        self.keys = keys = [each.key for each in described]
        if len(set(keys)) != n:
            raise LayoutError(f"two events are named {next(key for key in keys if keys.count(key) > 1)}")
        self.phases = np.array([each.phase for each in described], np.uint8)
        self.key_digests = np.frombuffer(b"".join([each.key_digest for each in described]), np.uint8).reshape(n, 16)
        self._cover = Cover(
            self.phases,
            group_of,
            np.array([group.kind == "op" for group in groups], bool),
            np.array(sorted(range(n), key=keys.__getitem__), np.int64),
            self.key_digests,
        )
        self.order, self.phase_ptr = self._cover.order, self._cover.phase_ptr
        self.hash = hash_layout(
            group_of,
            input_ptr,
            inputs,
            b"".join([each.digest for each in described]),
            b"".join([_digest_group(group) for group in groups]),
        )

    def compute_roots(self, digests: np.ndarray) -> Roots:
        """Return the roots of a step with this layout; `digests` uint8 [n, 16], in event order."""
        return self._cover.compute_roots(digests)

    def inputs_of(self, event: int) -> np.ndarray:
        """Return the indices of the events that `event` was computed from, int32."""
        return self.inputs[self.input_ptr[event] : self.input_ptr[event + 1]]


class TensorKind(NamedTuple):
    """What a meta holds of one event."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_leaves: int
    """Leaf digests kept: all of the tensor's, or 0."""
    has_value: bool
    placement: str = ""


class Meta:
    """Each event's dtype, shape, size and placement, apart from the layout: a batch size changes them, not the sites.

    dtypes, shapes, placements   lists of n
    num_bytes        int64 [n]
    leaf_ptr         int64 [n + 1]: event i's leaves are [leaf_ptr[i], leaf_ptr[i + 1]) of the step's
    value_of         event index -> position among the step's values
    hash             16 bytes over all of it
    """

    __slots__ = ("dtypes", "hash", "leaf_ptr", "num_bytes", "placements", "shapes", "total_bytes", "value_of")

    def __init__(self, tensors: Sequence[TensorKind]) -> None:
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.shapes = [tensor.shape for tensor in tensors]
        self.placements = [tensor.placement for tensor in tensors]
        sizes = [tensor.num_bytes for tensor in tensors]
        self.total_bytes = sum(sizes)
        if self.total_bytes >= 2**63 or any(size < 0 for size in sizes):
            raise LayoutError("a tensor's size is out of range")
        if any(tensor.num_leaves not in (0, num_leaves(tensor.num_bytes)) for tensor in tensors):
            raise LayoutError("a tensor has some of its leaf digests, not all or none")
        self.num_bytes = np.array(sizes, np.int64)
        self.leaf_ptr = np.zeros(len(tensors) + 1, np.int64)
        np.cumsum([tensor.num_leaves for tensor in tensors], out=self.leaf_ptr[1:])
        self.value_of = {
            event: position
            for position, event in enumerate(event for event, tensor in enumerate(tensors) if tensor.has_value)
        }
        digests: dict[TensorKind, bytes] = {tensor: digest_tensor(tensor) for tensor in set(tensors)}
        self.hash = hash_meta(b"".join([digests[tensor] for tensor in tensors]))


def digest_tensor(tensor: TensorKind) -> bytes:
    """Return the XXH3-128 of a tensor kind's parts as JSON, 16 bytes."""
    return xxh3_128_digest(json.dumps(tensor).encode("ascii"))


def hash_meta(digests: bytes) -> bytes:
    """Return a meta's hash, 16 bytes, of the digests of each event's TensorKind, joined."""
    return xxh3_128_digest(b"meta1" + digests)


def hash_contents(leaves: Any, values: list[str], notes: str) -> bytes:
    """Return `contents` of a step: what its chain covers beside roots, layout and meta, 16 bytes."""
    return xxh3_128_digest(
        xxh3_128_digest(leaves)
        + xxh3_128_digest(json.dumps(values).encode("ascii"))
        + xxh3_128_digest(notes.encode("ascii"))
    )


def link_chain(
    previous: bytes, step: int, kind: int, root: bytes, layout_hash: bytes, meta_hash: bytes, contents: bytes
) -> bytes:
    """Return a row's chain, 16 bytes."""
    return xxh3_128_digest(previous + struct.pack("<qI", step, kind) + root + layout_hash + meta_hash + contents)


def encode_notes(unobserved: dict[str, int], remarks: Sequence[str]) -> str:
    """Return a step's notes as ASCII JSON: [unobserved, remarks]."""
    if not unobserved and not remarks:
        return NO_NOTES
    return json.dumps([unobserved, list(remarks)], sort_keys=True, separators=(",", ":"))


def decode_notes(text: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return (unobserved, remarks). Raises ValueError where `text` is not what `encode_notes` writes."""
    notes = json.loads(text)
    if not (isinstance(notes, list) and len(notes) == 2 and isinstance(notes[0], dict) and isinstance(notes[1], list)):
        raise ValueError("notes are not a pair")
    unobserved, remarks = notes
    if not all(isinstance(count, int) for count in unobserved.values()) or not all(
        isinstance(remark, str) for remark in remarks
    ):
        raise ValueError("notes are not sentences")
    return unobserved, tuple(remarks)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
