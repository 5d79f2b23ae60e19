"""Which part of a tensor a rank holds, as text in a rank's file, and which ranks hold the same part.

    mesh=dp:2,tp:2; ranks=0-3; coords=0,1; placements=R|S(0)
    mesh=ddp:4; ranks=0-3; placements=R

The tensor lies on a mesh of 2 x 2 ranks (0 to 3, row-major), this rank at (0, 1); along `dp` it is
replicated, along `tp` it is cut in its first dimension. So ranks 1 and 3 hold the same bits.

    R        every rank along this dimension of the mesh holds the same bits
    S(d)     each holds its own slice of dimension d; _S(d, n) one of a slice that is cut once more
    P(op)    each holds its own summand

Where all is `R` there are no coordinates: the text is then one for all ranks, and so is what a reader keeps of it.
`ddp` is DistributedDataParallel and no mesh; names that a program gave to a mesh's dimensions are percent-encoded
where they have to be, one that is called `ddp` too (`%64dp`).

Place in the flow: tensor -> digest -> *event* -> store.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

_TEXT = re.compile(
    r"mesh=(?P<mesh>[^;]*); ranks=(?P<ranks>[^;]*); (?:coords=(?P<coords>[^;]*); )?placements=(?P<kinds>.*)"
)
_MAX_RANKS = 1_000_000
_DDP = "ddp"
_KEPT = "() ,"
"""What stands in a kind as it is, besides letters and digits."""


class TensorPlacement(NamedTuple):
    """Where in a mesh of ranks a tensor's local part lies."""

    dims: tuple[tuple[str, int], ...]
    """Names and sizes of the mesh's dimensions."""
    ranks: tuple[int, ...]
    """The mesh's global ranks, row-major."""
    coords: tuple[int, ...]
    """This rank's place in the mesh; () where all ranks of it hold the same bits."""
    kinds: tuple[str, ...]
    """`R`, `S(0)`, `P(sum)`, ...: a word for each dimension of the mesh."""
    is_ddp: bool = False
    """Whether DistributedDataParallel holds the tensor equal on these ranks; there is no mesh then."""

    @classmethod
    def of_ddp(cls, ranks: Sequence[int]) -> TensorPlacement:
        """Return the placement of what DistributedDataParallel holds equal on these global ranks."""
        return cls(((_DDP, len(ranks)),), tuple(ranks), (), ("R",), is_ddp=True)

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same bits as this one, itself among them, ascending."""
        if all(kind == "R" for kind in self.kinds):
            return tuple(sorted(self.ranks))
        axes = [
            range(size) if kind == "R" else (at,)
            for (_, size), at, kind in zip(self.dims, self.coords, self.kinds, strict=True)
        ]
        found = []
        for place in itertools.product(*axes):
            index = 0
            for (_, size), at in zip(self.dims, place, strict=True):
                index = index * size + at
            found.append(self.ranks[index])
        return tuple(sorted(found))

    def to_text(self) -> str:
        """Return the placement as it is written into a file."""
        mesh = ",".join(f"{self._encoded(name)}:{size}" for name, size in self.dims)
        kinds = "|".join(quote(kind, safe=_KEPT) for kind in self.kinds)
        is_replicated = all(kind == "R" for kind in self.kinds)
        coords = "" if is_replicated else f"coords={','.join(map(str, self.coords))}; "
        return f"mesh={mesh}; ranks={_format_ranks(self.ranks)}; {coords}placements={kinds}"

    def _encoded(self, name: str) -> str:
        if name == _DDP and not self.is_ddp:
            return f"%{ord(name[0]):x}{name[1:]}"
        return quote(name, safe="")


@functools.lru_cache(maxsize=4096)
def parse_placement(text: str) -> TensorPlacement | None:
    """Return what a placement's text says, None for "" (nothing is known).

    Raises ValueError where it is no such text.
    """
    if not text:
        return None
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"no placement: {text}")
    dims = tuple(
        (unquote(name), int(size)) for name, _, size in (part.rpartition(":") for part in match["mesh"].split(","))
    )
    ranks = _parse_ranks(match["ranks"])
    coords = tuple(map(int, match["coords"].split(","))) if match["coords"] is not None else ()
    kinds = tuple(map(unquote, match["kinds"].split("|")))
    count = 1
    for _, size in dims:
        count *= size
    fits = all(0 <= at < size for (_, size), at in zip(dims, coords, strict=False))
    is_located = len(coords) == len(dims) or (not coords and all(kind == "R" for kind in kinds))
    if not (len(dims) == len(kinds) and is_located and count == len(ranks) == len(set(ranks)) and fits):
        raise ValueError(f"no placement: {text}")
    return TensorPlacement(dims, ranks, coords, kinds, is_ddp=match["mesh"] == f"{_DDP}:{count}")


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return `0-3`, `0-6:2` for a row of equal steps, `0,1,5` otherwise."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def _parse_ranks(text: str) -> tuple[int, ...]:
    span = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", text)
    if span is not None:
        if int(span[2]) - int(span[1]) >= _MAX_RANKS or int(span[3] or 1) < 1:
            raise ValueError(f"no ranks: {text[:40]}")
        return tuple(range(int(span[1]), int(span[2]) + 1, int(span[3] or 1)))
    return tuple(map(int, text.split(",")))
