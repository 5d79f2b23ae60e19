"""A gathered run for people.

MERGED 4 ranks from 2 parts into runs/all (1.2 MB).

parts     host0/run: ranks 0-1
          host1/run: ranks 2-3
check it  bitcheck verify runs/all
"""

from __future__ import annotations

import shlex
from typing import TextIO

from bitcheck.explain import format_ranks
from bitcheck.merge import Merged
from bitcheck.report.text import Section, format_bytes, print_report


def print_merged(merged: Merged, file: TextIO | None = None) -> None:
    """Print what was gathered on `file` (standard output)."""
    num_parts = "1 part" if len(merged.parts) == 1 else f"{len(merged.parts):,} parts"
    of = f" of {merged.world_size:,}" if merged.missing else ""
    num_ranks = "1 rank" if len(merged.ranks) == 1 else f"{len(merged.ranks):,}{of} ranks"
    title = f"MERGED {num_ranks} from {num_parts} into {merged.path} ({format_bytes(merged.num_bytes)})."
    parts: list[Section] = [("parts", [f"{path}: {format_ranks(ranks)}" for path, ranks in merged.parts])]
    if merged.missing:
        parts.append(("missing", [format_ranks(merged.missing)]))
    if merged.notes:
        parts.append(("notes", list(merged.notes)))
    if not merged.missing:
        parts.append(("check it", [f"bitcheck verify {shlex.quote(merged.path)}"]))
    print_report(title, "yellow" if merged.missing else "green", parts, file)
