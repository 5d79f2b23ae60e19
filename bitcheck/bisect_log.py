"""The log of a bisection: every sample, a line a sample, written before the next one is taken.

    {"schema": "bitcheck.bisect-log/1", "program": "5f0c...", "names": ["a", "b"], "search": {"confidence": 0.95, ...}}
    {"point": [], "diverged": false, "num_runs": 2, "where": null, "seconds": 6.1}
    {"point": ["a", "b"], "diverged": true, "num_runs": 2, "where": "step 3: forward/body:out", "seconds": 5.0}

A search asks the same questions when it gets the same answers, so an interrupted one is started again
with its log: logged samples are answered from it, and only then is anything run. A replay runs nothing.

Place in the flow: bisect -> *bisect_log* -> probes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bitcheck.bisect import Search
from bitcheck.errors import BitcheckError, UsageError
from bitcheck.samples import Oracle, Point, Sample

SCHEMA_PREFIX = "bitcheck.bisect-log/"
SCHEMA = SCHEMA_PREFIX + "1"


class LogEnded(BitcheckError):
    """A replayed log stops before the search has its answer."""


@dataclass(frozen=True, slots=True)
class LogHeader:
    """What a log is of."""

    program: str
    """Digest of the command and the switches."""
    names: tuple[str, ...]
    search: Search
    command: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the header as JSON data."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def of(cls, program: str, names: Sequence[str], search: Search, command: Sequence[str]) -> LogHeader:
        """Return the header of a search; how many runs it may take makes it no other one."""
        return cls(program, tuple(names), replace(search, max_runs=None), tuple(command))


def read_log(path: Path) -> tuple[LogHeader, list[tuple[Point, Sample]], int]:
    """Return (header, samples, length in bytes of what is whole). A last line that was cut off does not count.

    Raises UsageError where it is no log of a bisection.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; expected the log of a bisection.") from None
    lines = data.split(b"\n")[:-1]  # what follows the last newline was cut off
    if not lines:
        raise UsageError(f"{path} is empty; expected the log of a bisection.")
    header = _read_header(path, lines[0])
    samples = []
    for number, line in enumerate(lines[1:], 2):
        try:
            entry = json.loads(line)
            point = frozenset(map(str, entry["point"]))
            sample = Sample(bool(entry["diverged"]), int(entry["num_runs"]), entry["where"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path}, line {number}: expected a sample of a bisection.") from None
        if not point <= set(header.names):
            raise UsageError(f"{path}, line {number}: names a switch that its first line does not.")
        samples.append((point, sample))
    return header, samples, sum(len(line) + 1 for line in lines)


def _read_header(path: Path, line: bytes) -> LogHeader:
    try:
        content = json.loads(line)
        schema = content["schema"]
        if schema != SCHEMA:
            kind = "of a later version" if str(schema).startswith(SCHEMA_PREFIX) else "not the log of a bisection"
            raise UsageError(f"{path} is {kind} (schema {str(schema)[:40]!r}); expected {SCHEMA}.")
        return LogHeader(
            str(content["program"]),
            tuple(map(str, content["names"])),
            Search(**content["search"]),
            tuple(map(str, content["command"])),
        )
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not the log of a bisection; expected {SCHEMA}.") from None


class LoggedOracle:
    """Answers from a log as far as it goes, then takes samples and writes them down.

    With `oracle` None it is a replay, which raises LogEnded where the log stops. Raises UsageError
    where the log is of another search than `header`.
    """

    def __init__(self, path: Path, header: LogHeader, oracle: Oracle | None) -> None:
        self.path, self._oracle = path, oracle
        self.num_replayed = 0
        self._waiting: list[tuple[Point, Sample]] = []
        self._seen: set[Point] = set()
        if path.exists():
            logged, samples, length = read_log(path)
            if logged != header:
                raise UsageError(
                    f"{path} is the log of another search (other switches, command or options).\n"
                    "Give another --output, or remove it."
                )
            self._waiting = samples
            if oracle is not None:
                os.truncate(path, length)
        elif oracle is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(header.to_json())

    def price(self, point: Point) -> int:
        """Return how many programs the next sample takes: the first at a point has nothing to be compared with.

        Told from the samples alone, so that a replayed search weighs its questions as the first one did.
        """
        return 1 if point in self._seen else 2

    def __call__(self, point: Point) -> Sample:
        """Return the next sample, logged or new."""
        self._seen.add(point)
        if self._waiting:
            logged, sample = self._waiting.pop(0)
            if logged != point:
                raise UsageError(
                    f"{self.path} does not fit: it goes on with {_named(logged)}, the search with {_named(point)}.\n"
                    "It was written by another version of bitcheck; remove it and search again."
                )
            self.num_replayed += 1
            return sample
        if self._oracle is None:
            raise LogEnded(f"{self.path} ends after {self.num_replayed} samples, before there is an answer.")
        began = time.monotonic()
        sample = self._oracle(point)
        entry = {"point": sorted(point), **sample._asdict(), "seconds": round(time.monotonic() - began, 3)}
        self._write(entry)
        return sample

    def _write(self, content: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(content).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _named(point: Sequence[str] | Point) -> str:
    return " + ".join(sorted(point)) or "no suspect"
