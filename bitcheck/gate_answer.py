"""What a gate is asked and what it answers: frozen data, schema `bitcheck.gate/1`. It decides nothing.

    {"schema": "bitcheck.gate/1", "verdict": "fail", "explanation": "...", "remedy": "...",
     "runs": [{"name": "run 1", "role": "first", "steps": [0, 5], "ranks": 1, "exit_status": 0, ...}, ...],
     "comparisons": [{"baseline": "run 1", "candidate": "run 2", "answer": {"schema": "bitcheck.diff/1", ...}}],
     "control": {"passed": true, "step": 4, "rank": 0, "site": "grad/body.weight:grad", "problem": null},
     "chance": {"identical_pairs": 0, "confidence": 0.95, "rate_bound": 1.0}, ...}

Place in the flow: gate -> *gate_answer* -> report.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bitcheck.answer import Answer, EnvironmentDifference, Verdict
from bitcheck.control import Control
from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL, EXIT_TROUBLE, UsageError
from bitcheck.launch import find_program
from bitcheck.replicas_answer import ReplicaAnswer, ReplicaVerdict
from bitcheck.statistics import rate_bound
from bitcheck.vary import VARIATIONS, VariedRun

SCHEMA = "bitcheck.gate/1"


class GateVerdict(StrEnum):
    """What the gate says."""

    PASS = "pass"
    FAIL = "fail"
    INCOMPARABLE = "incomparable"
    """The golden run is of another environment."""
    INSUFFICIENT = "insufficient"
    """Nothing differed, and too little was compared to say so."""
    PROGRAM_FAILED = "program-failed"
    BROKEN = "broken"
    """The positive control was not seen: the gate itself cannot be trusted."""


EXIT_STATUS = {GateVerdict.PASS: EXIT_IDENTICAL, GateVerdict.FAIL: EXIT_DIFFERENT}
"""Every other verdict exits 2."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and what to ask of it."""

    command: tuple[str, ...]
    folder: Path
    """Where runs, logs and the answer go; empty or not there."""
    runs: int = 2
    level: str | None = None
    """None: that of the golden run, else `module`."""
    steps: int | None = None
    """Steps to compare; None: all that run 1 takes."""
    ranks: int | None = None
    stop_early: bool = False
    """Stop each program as soon as its steps are recorded."""
    resume_command: str | None = None
    checkpoint: str | None = None
    """Glob of what run 1 writes."""
    resume_step: int | None = None
    golden: Path | None = None
    may_differ: tuple[str, ...] = ()
    """Patterns of environment keys that may differ from the golden run's."""
    vary: tuple[str, ...] = ()
    confidence: float = 0.95
    allow_unobserved: tuple[str, ...] = ()
    is_strict: bool = False
    with_replicas: bool = False
    """Also hold the ranks of each run against each other."""
    replica_groups: tuple[str, ...] = ()
    replica_exceptions: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UsageError for what makes no sense, ProgramNotFound where there is no such program."""
        if self.runs < 1 or (self.runs < 2 and self.golden is None and self.resume_command is None):
            raise UsageError(f"--runs {self.runs}: one run is compared with nothing; expected 2 or more, or --golden")
        if self.steps is None and self.stop_early:
            raise UsageError("--stop-early stops a program after its --steps; give their number")
        if self.resume_command is None and (self.resume_step is not None or self.checkpoint is not None):
            raise UsageError("--resume-step and --checkpoint speak of --resume-cmd, which is not given")
        if self.resume_command is not None and "{checkpoint}" in self.resume_command and self.checkpoint is None:
            raise UsageError(
                "--resume-cmd names {checkpoint}; give the pattern that finds it: --checkpoint '{out}/*.pt'"
            )
        if (self.replica_groups or self.replica_exceptions) and not self.with_replicas:
            raise UsageError("--replica-group and --replica-except speak of --replicas, which is not given")
        for name in self.vary:
            if name not in VARIATIONS:
                raise UsageError(f"--vary {name}: expected some of {', '.join(VARIATIONS)}")
        find_program(self.command)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of the gate."""

    name: str
    role: str
    """`first`, `fresh`, `resumed`, `golden` or `varied`."""
    path: str
    command: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    """First and last whole step that every rank has."""
    ranks: int = 0
    exit_status: int | None = None
    was_stopped: bool = False
    seconds: float = 0.0
    log: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON data."""
        content = {name: getattr(self, name) for name in self.__slots__}
        content["command"] = list(self.command)
        content["steps"] = None if self.steps is None else list(self.steps)
        return content


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run held against another."""

    baseline: str
    candidate: str
    role: str
    answer: Answer
    gaps: tuple[str, ...] = ()
    """Why `identical` would prove less than was asked."""

    @property
    def is_identical(self) -> bool:
        """Whether all that was asked for is equal."""
        return self.answer.verdict is Verdict.IDENTICAL and not self.gaps

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data; `answer` has the schema bitcheck.diff/1."""
        return {
            "baseline": self.baseline,
            "candidate": self.candidate,
            "role": self.role,
            "identical": self.is_identical,
            "gaps": list(self.gaps),
            "answer": self.answer.to_json(),
        }


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """The ranks of one run held against each other."""

    run: str
    answer: ReplicaAnswer

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON data; `answer` has the schema bitcheck.replicas/1."""
        return {"run": self.run, "answer": self.answer.to_json()}


@dataclass(frozen=True, slots=True)
class GateResult:
    """The answer of a gate."""

    verdict: GateVerdict
    explanation: str
    remedy: str
    plan: Plan
    runs: tuple[RunReport, ...]
    comparisons: tuple[Comparison, ...]
    control: Control | None
    variations: tuple[VariedRun, ...] = ()
    problems: tuple[str, ...] = ()
    environment: tuple[EnvironmentDifference, ...] = ()
    """What the golden run's environment and this one do not share."""
    replicas: tuple[ReplicaCheck, ...] = ()
    replica_control: Control | None = None

    @property
    def exit_status(self) -> int:
        """Return the exit status of the command."""
        return EXIT_STATUS.get(self.verdict, EXIT_TROUBLE)

    @property
    def failing(self) -> Comparison | None:
        """The comparison that failed the gate."""
        diverged = [each for each in self.comparisons if each.answer.verdict is Verdict.DIVERGED]
        return diverged[-1] if diverged else None

    @property
    def failing_replicas(self) -> ReplicaCheck | None:
        """The run whose own ranks differ, which failed the gate."""
        return next((each for each in self.replicas if each.answer.verdict is ReplicaVerdict.DIFFER), None)

    @property
    def num_identical_pairs(self) -> int:
        """Fresh runs that were identical to the first."""
        return sum(each.is_identical for each in self.comparisons if each.role == "fresh")

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, schema `bitcheck.gate/1`."""
        plan, pairs = self.plan, self.num_identical_pairs
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "explanation": self.explanation,
            "remedy": self.remedy,
            "problems": list(self.problems),
            "command": list(plan.command),
            "asked": {
                "runs": plan.runs,
                "steps": plan.steps,
                "ranks": plan.ranks,
                "level": plan.level,
                "resume_cmd": plan.resume_command,
                "golden": None if plan.golden is None else str(plan.golden),
                "vary": list(plan.vary),
                "replicas": plan.with_replicas,
            },
            "runs": [run.to_json() for run in self.runs],
            "comparisons": [each.to_json() for each in self.comparisons],
            "control": None if self.control is None else self.control.to_json(),
            "replicas": [each.to_json() for each in self.replicas],
            "replica_control": None if self.replica_control is None else self.replica_control.to_json(),
            "chance": {
                "identical_pairs": pairs,
                "confidence": plan.confidence,
                "rate_bound": rate_bound(pairs, plan.confidence),
            },
            "variations": [each.to_json() for each in self.variations],
            "environment": [
                {"key": entry.key, "golden": entry.baseline, "here": entry.candidate} for entry in self.environment
            ],
        }
