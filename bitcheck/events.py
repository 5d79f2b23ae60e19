"""What a run is made of: phases, levels, sites, events, steps. Frozen data, no behaviour.

Place in the flow: tensor -> digest -> *event* -> store -> align -> diff -> report.

A site is the stable identity of a recorded tensor. It is written

    phase/qualified.name:slot#occurrence@eval

    forward/blocks.2.mix:out              the output of a module, first call in the step
    forward/blocks.2.mix:out#1            its second call in the step
    forward/head:out.logits@eval          in an evaluation forward
    backward/blocks.0.attn.core:grad_in.0 the gradient of an argument, blamed on its consumer
    optim/blocks.0.mix.weight:exp_avg     a tensor of the optimizer's state
    scalar/AdamW.0:lr                     a number of the optimizer's first parameter group
    rng/torch.cpu:state

The qualified name has a root (the class of the outermost module that it belongs to, numbered from
the second of its kind: `Model`, `Model_2`) and a path below it (`named_modules()` and
`named_parameters()` names, wrapper prefixes stripped). A run with one outermost module leaves the
root out when it writes a name, and a root by itself is written as its class; two runs are compared
by (root, path) always, so that an evaluation model which one run called and the other did not
changes no name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Where in a step an event belongs, in the order in which a step goes through them."""

    BATCH = "batch"
    RNG = "rng"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    LOSS = "loss"
    BACKWARD = "backward"
    GRAD = "grad"
    COMM = "comm"
    PARAM = "param"
    BUFFER = "buffer"
    OPTIM = "optim"
    SCALAR = "scalar"
    EXTRA = "extra"


PHASES: tuple[Phase, ...] = tuple(Phase)
"""All phases; a phase's index in it is its number in a file."""

STATE_PHASES: tuple[Phase, ...] = (Phase.PARAM, Phase.BUFFER, Phase.OPTIM, Phase.EXTRA)
"""The phases of a snapshot: what an end of step and an initial snapshot have in common."""


class Level(StrEnum):
    """How much is recorded; each level holds all of the one before it."""

    STATE = "state"
    MODULE = "module"
    OP = "op"


class StepKind(IntEnum):
    """What one row of a run's step table is."""

    INITIAL = 0
    """The initial snapshot; its step number is `start_step - 1`."""
    STEP = 1
    """A whole training step."""
    FRAGMENT = 2
    """What ran after the last step (an evaluation, a final log line); numbered one past it."""


class Site(NamedTuple):
    """The stable identity of a recorded tensor within a step."""

    phase: Phase
    root: str
    """Label of the outermost module or of the optimizer, "" where there is none."""
    path: str
    """Qualified name below the root, "" for the root itself."""
    slot: str
    """`out`, `out.0`, `in.mask`, `grad_in.0`, `grad`, `exp_avg`, `value`, ..."""
    occurrence: int = 0
    is_eval: bool = False

    @property
    def key(self) -> str:
        """The canonical text, root always included: what roots are taken over and runs joined by."""
        tail = f"#{self.occurrence}" if self.occurrence else ""
        mode = "@eval" if self.is_eval else ""
        return f"{self.phase}/{self.root}/{self.path}:{self.slot}{tail}{mode}"

    def text(self, with_root: bool) -> str:
        """The site as people read it; `with_root` where the run has several outermost modules."""
        name = qualified_name(self.root, self.path, with_root)
        tail = f"#{self.occurrence}" if self.occurrence else ""
        mode = "@eval" if self.is_eval else ""
        return f"{self.phase}/{name}:{self.slot}{tail}{mode}"


def qualified_name(root: str, path: str, with_root: bool) -> str:
    """Return the name of a module or tensor as people read it."""
    if not path:
        return root
    return f"{root}.{path}" if root and with_root else path


class Group(NamedTuple):
    """One computation that produced events: the unit in which origins are counted.

    A module's call, its backward, an optimizer's step, a collective, an operation. Several outputs
    of one computation that differ on equal inputs are one origin.
    """

    kind: str
    """`forward`, `recompute`, `backward`, `optimizer`, `collective`, `op`."""
    root: str
    path: str
    """The module (root and path as in Site) that ran, or in which it ran."""
    op: str
    """The finest name known: an autograd node, an ATen op, a collective, a module's class."""
    parent: int = -1
    """Index in the step's groups of the enclosing module call, -1 for an outermost one."""


@dataclass(slots=True)
class Event:
    """One site's digest in one step on one rank."""

    site: Site
    dtype: str
    """`float32`, ...; of a Python value `python.float`, `python.str`, ..."""
    shape: tuple[int, ...]
    num_bytes: int
    digest: bytes
    """16 bytes."""
    leaves: bytes = b""
    """Leaf digests, 16 bytes each; empty where they were not kept."""
    group: int = -1
    """Index in the step's groups of the computation that produced it, -1 for observed state."""
    inputs: tuple[int, ...] = ()
    """Indices in the step's events of everything it was computed from, as far as it was observed."""
    value: str | None = None
    """`repr` of a Python value (phase `scalar`, non-tensor optimizer state), for people."""
    placement: str = ""
    """Which part of a tensor that several ranks hold this is (`bitcheck.placements`); "" where it is not known."""


@dataclass(slots=True)
class StepRecord:
    """Everything recorded in one step on one rank, in the order in which it happened."""

    step: int
    kind: StepKind
    events: list[Event] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    unobserved: dict[str, int] = field(default_factory=dict)
    """What was seen to escape observation in this step: a sentence -> how many times."""
    remarks: tuple[str, ...] = ()
    """Other facts for a reader: "recompute of blocks.0.drop differs from its forward", ..."""


Kind = tuple[str, tuple[int, ...], int]
"""A tensor's (dtype, shape, number of bytes), as in `Event`: what its digest covers besides its bits."""


class StepColumns:
    """A step with a list for each field of its events: what a recorder fills and a rank's file takes.

    A step at level `op` has tens of thousands of events. As objects each they would be looked at by
    every pass of Python's cyclic garbage collector, which then costs the training more than the
    digests do; strings, bytes, numbers and tuples of these are not.
    """

    __slots__ = (
        "digests", "group_of", "groups", "inputs", "kind", "kinds", "leaves", "placements", "remarks", "sites", "step",
        "unobserved", "values",
    )  # fmt: skip

    def __init__(self, step: int, kind: StepKind) -> None:
        self.step = step
        self.kind = kind
        self.sites: list[Site] = []
        self.kinds: list[Kind] = []
        """Mostly the same objects in every step: as many tensors are of one kind."""
        self.digests: list[bytes] = []
        self.leaves: list[bytes] = []
        self.group_of: list[int] = []
        self.inputs: list[tuple[int, ...]] = []
        self.values: dict[int, str] = {}
        """Event -> `repr` of a Python value, in the order of the events."""
        self.placements: dict[int, str] = {}
        """Event -> its placement, where it has one."""
        self.groups: list[Group] = []
        self.unobserved: dict[str, int] = {}
        self.remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.sites)

    def add(
        self,
        site: Site,
        kind: Kind,
        digest: bytes,
        leaves: bytes = b"",
        group: int = -1,
        inputs: tuple[int, ...] = (),
    ) -> int:
        """Add an event, its fields as in `Event`; return its index."""
        index = len(self.sites)
        self.sites.append(site)
        self.kinds.append(kind)
        self.digests.append(digest)
        self.leaves.append(leaves)
        self.group_of.append(group)
        self.inputs.append(inputs)
        return index

    def add_all(
        self, sites: list[Site], kinds: list[Kind], digest: bytes, group: int, inputs: list[tuple[int, ...]]
    ) -> range:
        """Add events of one group that have one digest for now, none of them any leaves; return their indices."""
        first, count = len(self.sites), len(sites)
        self.sites += sites
        self.kinds += kinds
        self.digests += [digest] * count
        self.leaves += [b""] * count
        self.group_of += [group] * count
        self.inputs += inputs
        return range(first, first + count)

    @classmethod
    def of(cls, record: StepRecord) -> StepColumns:
        """Return a record's columns."""
        columns = cls(record.step, record.kind)
        for index, event in enumerate(record.events):
            kind = (event.dtype, event.shape, event.num_bytes)
            columns.add(event.site, kind, event.digest, event.leaves, event.group, event.inputs)
            if event.value is not None:
                columns.values[index] = event.value
            if event.placement:
                columns.placements[index] = event.placement
        columns.groups, columns.unobserved, columns.remarks = list(record.groups), record.unobserved, record.remarks
        return columns

    def to_record(self) -> StepRecord:
        """Return the step as a record, an object an event."""
        fields = zip(self.sites, self.kinds, self.digests, self.leaves, self.group_of, self.inputs, strict=True)
        events = [Event(site, *kind, *rest) for site, kind, *rest in fields]
        for index, value in self.values.items():
            events[index].value = value
        for index, placement in self.placements.items():
            events[index].placement = placement
        return StepRecord(self.step, self.kind, events, self.groups, self.unobserved, self.remarks)
