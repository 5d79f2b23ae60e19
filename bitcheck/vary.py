"""Change one thing about a run that should change no bit, and see which equality it breaks.

    threads     another number of threads for the libraries that compute on the CPU
    hashseed    another PYTHONHASHSEED: the order of Python's sets of strings
    workers     another number of data-loading processes, set in every DataLoader that is made
    allocator   memory that is filled with another pattern when it is handed out, and no caching on a
                GPU: whoever reads before writing computes something else

A change that had no effect proves nothing, and is told from one that had an effect and broke nothing.

Place in the flow: run's environment -> *vary* -> gate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitcheck.answer import Answer, Verdict
from bitcheck.errors import UsageError
from bitcheck.settings import WORKERS_VARIABLE

_PERTURB = "glibc.malloc.perturb=165"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Variation:
    """One change, and how to tell that it took effect."""

    name: str
    change: str
    """`2 -> 1`."""
    variables: Mapping[str, str | None]
    find_no_effect: Callable[[Mapping[str, str], Mapping[str, str], Sequence[str]], str | None]

    def effect(
        self, baseline: Mapping[str, str], candidate: Mapping[str, str], varied: Sequence[str] = ()
    ) -> str | None:
        """Return why the change had no effect, None where it had one.

        From the environments of both runs and from what the program said of changes to itself (`varied`
        in run.json).
        """
        return self.find_no_effect(baseline, candidate, varied)


@dataclass(frozen=True, slots=True)
class VariedRun:
    """What a change did to the bits."""

    name: str
    change: str
    no_effect: str | None
    """Why the change did not reach the program."""
    answer: Answer
    gaps: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """Return `breaks`, `holds`, `no effect` or `insufficient`."""
        if self.answer.verdict is Verdict.DIVERGED:
            return "breaks"
        if self.gaps:
            return "insufficient"
        return "no effect" if self.no_effect else "holds"

    def to_json(self) -> dict[str, Any]:
        """Return the variation as JSON data."""
        return {
            "name": self.name,
            "change": self.change,
            "outcome": self.outcome,
            "no_effect": self.no_effect,
            "gaps": list(self.gaps),
            "answer": self.answer.to_json(),
        }


def plan_variation(name: str, environment: Mapping[str, str]) -> Variation:
    """Return the change that `name` stands for, against a run with this environment. Raises UsageError."""
    try:
        return VARIATIONS[name](environment)
    except KeyError:
        raise UsageError(f"--vary {name}: expected some of {', '.join(VARIATIONS)}") from None


def _vary_threads(environment: Mapping[str, str]) -> Variation:
    key = "torch.num_threads"
    now = environment.get(key, "")
    other = "1" if now.isdigit() and int(now) > 1 else "2"

    def find_no_effect(ours: Mapping[str, str], theirs: Mapping[str, str], varied: Sequence[str]) -> str | None:
        if ours.get(key) != theirs.get(key):
            return None
        return f"the program sets its number of threads itself ({theirs.get(key)})"

    change = f"{now or 'unknown'} -> {other}"
    return Variation("threads", change, dict.fromkeys(_THREAD_VARIABLES, other), find_no_effect)


def _vary_hash_seed(environment: Mapping[str, str]) -> Variation:
    key = "env.PYTHONHASHSEED"
    now = environment.get(key, "random")
    other = "1" if now != "1" else "2"

    def find_no_effect(ours: Mapping[str, str], theirs: Mapping[str, str], varied: Sequence[str]) -> str | None:
        return None if theirs.get(key) == other else "the program did not get the variable"

    return Variation("hashseed", f"PYTHONHASHSEED {now} -> {other}", {"PYTHONHASHSEED": other}, find_no_effect)


def _vary_workers(environment: Mapping[str, str]) -> Variation:
    def find_no_effect(ours: Mapping[str, str], theirs: Mapping[str, str], varied: Sequence[str]) -> str | None:
        return None if varied else "the program makes no DataLoader"

    return Variation("workers", "1 data-loading process more", {WORKERS_VARIABLE: "1"}, find_no_effect)


def _vary_allocator(environment: Mapping[str, str]) -> Variation:
    tunables = [part for part in os.environ.get("GLIBC_TUNABLES", "").split(":") if part]
    tunables = [part for part in tunables if not part.startswith("glibc.malloc.perturb=")]
    variables = {"GLIBC_TUNABLES": ":".join([*tunables, _PERTURB]), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def find_no_effect(ours: Mapping[str, str], theirs: Mapping[str, str], varied: Sequence[str]) -> str | None:
        on_gpu = "torch.gpus" in theirs
        return None if on_gpu or theirs.get("os.libc", "").startswith("glibc") else "this C library fills no memory"

    return Variation("allocator", "fresh memory filled, no caching on a GPU", variables, find_no_effect)


VARIATIONS: dict[str, Callable[[Mapping[str, str]], Variation]] = {
    "threads": _vary_threads,
    "hashseed": _vary_hash_seed,
    "workers": _vary_workers,
    "allocator": _vary_allocator,
}
"""Name -> what plans it."""
