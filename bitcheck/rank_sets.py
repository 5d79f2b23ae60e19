"""Sets of ranks as short text: `0-7`, `0,2,5`, `0-24:8` (every eighth from 0 to 24), and all of these with commas.

format_rank_set([0, 1, 2, 3, 8, 16, 24])   "0-3,8-24:8"
parse_rank_set("0-3,8-24:8", 32)           (0, 1, 2, 3, 8, 16, 24)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPAN = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")
_MIN_SPAN = 3
"""So many ranks in equal distances are written as a span."""


def format_rank_set(ranks: Iterable[int]) -> str:
    """Return ranks as text, ascending, each once; "" for none."""
    rest = sorted(set(ranks))
    spans = []
    while rest:
        stride = rest[1] - rest[0] if len(rest) > 1 else 1
        count = 1
        while count < len(rest) and rest[count] - rest[count - 1] == stride:
            count += 1
        if count == 1 or (count < _MIN_SPAN and stride > 1):
            count = 1
            spans.append(str(rest[0]))
        else:
            spans.append(f"{rest[0]}-{rest[count - 1]}" + (f":{stride}" if stride > 1 else ""))
        rest = rest[count:]
    return ",".join(spans)


def parse_rank_set(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that `text` names, ascending.

    Raises ValueError where it is no such text, or names a rank twice or one that is not below `world_size`.
    """
    ranks: list[int] = []
    for word in text.split(","):
        match = _SPAN.fullmatch(word.strip())
        if match is None:
            raise ValueError(f"{word.strip()[:40]!r} is no rank, as 3, and no span of ranks, as 0-7 or 0-24:8")
        first = int(match[1])
        last = int(match[2] or first)
        stride = int(match[3] or 1)
        if last < first or stride < 1:
            raise ValueError(f"{word.strip()} holds no rank")
        if last >= world_size:
            raise ValueError(f"there is no rank {last}; the run has ranks 0 to {world_size - 1}")
        ranks += range(first, last + 1, stride)
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{text[:40]!r} names a rank twice")
    return tuple(sorted(ranks))
