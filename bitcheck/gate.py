"""The gate: run a program several times, compare each run with the first, pass or fail.

    result = judge(Plan(("python", "train.py"), Path("bitcheck-gate"), runs=3))
    result.verdict, result.exit_status
    (GateVerdict.PASS, 0)

In order: run 1 (followed against the golden run where there is one), the positive control on run 1,
the fresh runs, the resumed run, the variations. Each candidate is followed while it runs and stopped
as soon as a step of it differs; the first failure ends the gate. `pass` means that everything that was
asked for was recorded, compared and equal, by a comparison that has just been seen to fail
(`control`), on runs that hold what counts (`coverage`).

Place in the flow: trials, follow, coverage, control -> *gate* -> report.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import Any

from bitcheck.answer import Answer, EnvironmentDifference, Verdict
from bitcheck.control import Control, run_control
from bitcheck.coverage import Demand, find_gaps, find_uncompared, step_range
from bitcheck.diff import diff_runs
from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL, EXIT_TROUBLE, RunError, UsageError
from bitcheck.follow import Compare, Follower
from bitcheck.launch import Ending, find_program
from bitcheck.run import Run, open_run
from bitcheck.settings import Options
from bitcheck.statistics import pairs_needed, rate_bound
from bitcheck.trials import Runner, Trial, describe_failure, run_trial
from bitcheck.vary import Variation, VariedRun, plan_variation

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
            },
            "runs": [run.to_json() for run in self.runs],
            "comparisons": [each.to_json() for each in self.comparisons],
            "control": None if self.control is None else self.control.to_json(),
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


def judge(
    plan: Plan,
    *,
    runner: Runner = run_trial,
    compare: Compare = diff_runs,
    tell: Callable[[str], None] = lambda line: None,
) -> GateResult:
    """Run the gate; `tell` gets a line whenever something begins or ends.

    Raises UsageError for a plan that makes no sense, ProgramNotFound, RecordingError where the folder
    cannot be written, RunError for a golden run that cannot be read.
    """
    plan.check()
    with ExitStack() as stack:
        return _Gate(plan, runner, compare, tell, stack).judge()


class _Ended(Exception):
    """The gate has its verdict."""

    def __init__(self, verdict: GateVerdict, explanation: str, remedy: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(explanation)
        self.verdict, self.explanation, self.remedy, self.problems = verdict, explanation, remedy, tuple(problems)


@dataclass
class _Gate:
    plan: Plan
    runner: Runner
    compare: Compare
    tell: Callable[[str], None]
    stack: ExitStack
    reports: list[RunReport] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    varied: list[VariedRun] = field(default_factory=list)
    environment: tuple[EnvironmentDifference, ...] = ()
    control: Control | None = None

    def judge(self) -> GateResult:
        problems: tuple[str, ...] = ()
        remedy = ""
        try:
            self._check_golden()
            self._run_first()
            self._run_control()
            for number in range(2, self.plan.runs + 1):
                self._run_fresh(number)
            self._run_resumed()
            for variation in self.plan.vary:
                self._run_varied(variation)
            verdict, explanation = self._conclude()
        except _Ended as ended:
            verdict, explanation, remedy, problems = ended.verdict, ended.explanation, ended.remedy, ended.problems
        return GateResult(
            verdict,
            explanation,
            remedy,
            self.plan,
            tuple(self.reports),
            tuple(self.comparisons),
            self.control,
            tuple(self.varied),
            problems,
            self.environment,
        )

    # ------------------------------------------------------------------ the parts, in order

    def _check_golden(self) -> None:
        """Open the golden run, and see that it holds what is asked for."""
        self.golden: Run | None = None
        self.level = self.plan.level or "module"
        if self.plan.golden is None:
            return
        from bitcheck.verify import verify_run

        self.golden = self.stack.enter_context(open_run(self.plan.golden, allow_missing_ranks=True))
        if self.plan.level is None:
            self.level = str(self.golden.level)
        gaps = find_gaps(self.golden, "the golden run", self._demand())
        if self.golden.level != self.level:
            gaps.append(f"the golden run was recorded at level {self.golden.level}; expected {self.level} (--level).")
        if not gaps:
            damage = verify_run(self.plan.golden).damage
            gaps = [f"the golden run is damaged: {damage[0]}"] if damage else []
        span = step_range(self.golden)
        self.reports.append(
            RunReport("golden", "golden", str(self.plan.golden), steps=span, ranks=self.golden.world_size)
        )
        if gaps:
            raise _Ended(
                GateVerdict.INSUFFICIENT, gaps[0], "Record the golden run again, with what is asked for here.", gaps
            )

    def _demand(self) -> Demand:
        plan = self.plan
        return Demand(plan.steps, None, plan.ranks, plan.allow_unobserved, plan.is_strict)

    def _run_first(self) -> None:
        started = time.time()
        trial = self._trial("run 1", "1", self.plan.command)
        follower = Follower(
            trial.folder,
            self.golden,
            until=self._last_step,
            stop_after=self._last_step if self.plan.stop_early else None,
            object_to=self._find_foreign_environment if self.golden is not None else None,
            compare=self.compare,
        )
        self._run(trial, "first", follower)
        self.first = self.stack.enter_context(open_run(trial.folder))
        self.first_started = started
        span = step_range(self.first)
        assert span is not None
        last = span[1] if self.plan.steps is None else span[0] + self.plan.steps - 1
        self.wanted = range(span[0], last + 1)
        if self.golden is not None:
            if differences := self._find_foreign_environment(self.first):
                self._end_as_foreign(differences)
            self._compare(self.golden, self.first, ("golden", "run 1"), "golden", follower)

    @property
    def _last_step(self) -> int | None:
        return None if self.plan.steps is None else self.plan.steps - 1

    def _find_foreign_environment(self, run: Run) -> tuple[EnvironmentDifference, ...]:
        assert self.golden is not None
        ours, theirs = self.golden.environment, run.environment
        return tuple(
            EnvironmentDifference(key, ours.get(key), theirs.get(key))
            for key in sorted({*ours, *theirs})
            if ours.get(key) != theirs.get(key) and not any(fnmatchcase(key, one) for one in self.plan.may_differ)
        )

    def _end_as_foreign(self, differences: Sequence[EnvironmentDifference]) -> None:
        self.environment = tuple(differences)
        named = ", ".join(each.key for each in differences[:4]) + (" ..." if len(differences) > 4 else "")
        raise _Ended(
            GateVerdict.INCOMPARABLE,
            f"The golden run was recorded in another environment than this one ({named}); equal bits are not to be "
            "expected, and different ones prove nothing.",
            "Record a golden run in this environment, or say which keys may differ with --may-differ PATTERN.",
        )

    def _run_control(self) -> None:
        self.control = run_control(self.first, compare=self.compare)
        if not self.control.has_passed:
            raise _Ended(
                GateVerdict.BROKEN,
                f"The gate is broken: one bit of {self.control.site} in step {self.control.step} was flipped in a copy "
                f"of run 1, and {self.control.problem}. Whatever it says of these runs proves nothing.",
                "This is a fault of bitcheck: please report it with the run.",
            )
        self.tell(f"control: one flipped bit of {self.control.site} in step {self.control.step} was seen")

    def _run_fresh(self, number: int) -> None:
        trial = self._trial(f"run {number}", str(number), self.plan.command)
        self._run_against_first(trial, "fresh")

    def _run_resumed(self) -> None:
        if self.plan.resume_command is None:
            return
        values = {"step": "" if self.plan.resume_step is None else str(self.plan.resume_step)}
        if self.plan.checkpoint is not None:
            values["checkpoint"] = str(self._find_checkpoint())
        command = tuple(shlex.split(self.plan.resume_command))
        trial = self._trial("the resumed run", "resumed", command, values, start_step=self.plan.resume_step)
        self._run_against_first(trial, "resumed")

    def _find_checkpoint(self) -> Path:
        """Return what run 1 wrote; a file that was there before is no checkpoint of run 1."""
        assert self.plan.checkpoint is not None
        pattern = self._fill(self.plan.checkpoint, {"out": str(self._out_folder("1"))})
        found = [Path(name) for name in sorted(glob(pattern))]
        fresh = [path for path in found if path.stat().st_mtime >= self.first_started - 1]
        if not fresh:
            what = f"{found[0]} is older than run 1" if found else f"nothing matches {pattern}"
            raise _Ended(
                GateVerdict.INSUFFICIENT,
                f"No checkpoint of run 1: {what}. The resumed run has nothing to go on from.",
                "Let the command write a checkpoint, into {out} for instance, and name it with --checkpoint.",
            )
        return fresh[len(fresh) // 2]  # of several one in the middle: steps before it, and steps after it

    def _run_varied(self, name: str) -> None:
        variation = plan_variation(name, self.first.environment)
        trial = self._trial(f"{name} varied", f"vary-{name}", self.plan.command)
        trial = replace(trial, variables=variation.variables)
        follower = self._run(trial, "varied", self._follower(trial))
        with open_run(trial.folder) as run:
            answer = follower.answer or self.compare(self.first, run, until=self.wanted[-1])
            effect = variation.effect(self.first.environment, run.environment, run.info.get("notes") or ())
            gaps: list[str] = []
            if answer.verdict is Verdict.IDENTICAL:
                gaps = find_uncompared(self.first, run, answer, ("run 1", trial.name), self.wanted)
        self.varied.append(VariedRun(name, variation.change, effect, answer, tuple(gaps)))
        self.tell(f"{trial.name} ({variation.change}): {self.varied[-1].outcome}")

    def _conclude(self) -> tuple[GateVerdict, str]:
        breaking = [each for each in self.varied if each.outcome == "breaks"]
        if breaking:
            each = breaking[0]
            raise _Ended(
                GateVerdict.FAIL,
                f"Run after run the bits are the same, but not with {each.name} changed ({each.change}): "
                f"{each.answer.explanation}",
                each.answer.remedy,
            )
        gaps = [gap for each in self.varied for gap in each.gaps]
        if gaps:
            raise _Ended(GateVerdict.INSUFFICIENT, gaps[0], "", gaps)
        compared = [each.role for each in self.comparisons]
        parts = []
        if compared.count("fresh"):
            parts.append(f"{compared.count('fresh') + 1} fresh runs")
        if "resumed" in compared:
            parts.append("the resumed run" if parts else "run 1 and the resumed run")
        if "golden" in compared:
            parts.append("the golden run" if parts else "run 1 and the golden run")
        return (
            GateVerdict.PASS,
            f"{' and '.join(parts)} have the same bits in every recorded tensor of {len(self.wanted):,} "
            f"step{'s' * (len(self.wanted) > 1)}.",
        )

    # ------------------------------------------------------------------ running and comparing

    def _trial(
        self,
        name: str,
        label: str,
        command: Sequence[str],
        values: Mapping[str, str] | None = None,
        *,
        start_step: int | None = None,
    ) -> Trial:
        folder = self.plan.folder
        out = self._out_folder(label)
        fills = {"out": str(out), "first": str(self._out_folder("1")), **(values or {})}
        filled = tuple(self._fill(part, fills) for part in command)
        if any("{out}" in part for part in command):
            out.mkdir(parents=True, exist_ok=True)
        steps = None if self.plan.steps is None else f":{self.plan.steps}"
        return Trial(
            name=name,
            command=filled,
            folder=folder / "runs" / label,
            log=folder / "logs" / f"{label}.log",
            options=Options(level=self.level, steps=steps, start_step=start_step),
        )

    def _out_folder(self, label: str) -> Path:
        return (self.plan.folder / "out" / label).absolute()

    @staticmethod
    def _fill(text: str, values: Mapping[str, str]) -> str:
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        return text

    def _run(self, trial: Trial, role: str, follower: Follower) -> Follower:
        """Run a program and see that its recording holds what is asked for, unless it differs already."""
        self.tell(f"{trial.name}: {shlex.join(trial.command)}")
        began = time.monotonic()
        ending = self.runner(trial, follower)
        seconds = time.monotonic() - began
        was_stopped = ending.was_stopped
        report = RunReport(
            trial.name,
            role,
            str(trial.folder),
            trial.command,
            exit_status=ending.exit_status,
            was_stopped=was_stopped,
            seconds=round(seconds, 3),
            log=str(trial.log),
        )
        try:
            with open_run(trial.folder, allow_missing_ranks=True) as run:
                report = replace(report, steps=step_range(run), ranks=run.world_size)
                differs = follower.answer is not None or bool(follower.objection)
                is_resumed = role == "resumed"
                demand = replace(self._demand(), num_steps=None) if is_resumed else self._demand()
                gaps = [] if differs else find_gaps(run, trial.name, demand, was_stopped=was_stopped)
        except RunError as error:
            gaps, differs = [f"{trial.name}: {error}"], False
        self.reports.append(report)
        if follower.objection:
            self._end_as_foreign(follower.objection)
        self._check_ending(trial, ending, differs)
        if gaps:
            raise _Ended(
                GateVerdict.INSUFFICIENT, gaps[0], "Nothing was judged: what is missing could hide a difference.", gaps
            )
        return follower

    def _check_ending(self, trial: Trial, ending: Ending, differs: bool) -> None:
        if ending.exit_status and not ending.was_stopped and not differs:
            raise _Ended(
                GateVerdict.PROGRAM_FAILED,
                describe_failure(trial, ending),
                "Let the command run by itself first; the gate judges programs that end well.",
            )

    def _follower(self, trial: Trial) -> Follower:
        last = self.wanted[-1]
        return Follower(
            trial.folder,
            self.first,
            until=last,
            stop_after=last if self.plan.stop_early else None,
            compare=self.compare,
        )

    def _run_against_first(self, trial: Trial, role: str) -> None:
        follower = self._run(trial, role, self._follower(trial))
        with open_run(trial.folder, allow_missing_ranks=follower.answer is not None) as candidate:
            self._compare(self.first, candidate, ("run 1", trial.name), role, follower)

    def _compare(self, baseline: Run, candidate: Run, names: tuple[str, str], role: str, follower: Follower) -> None:
        """Compare two runs to the end, unless the follower has found a difference already."""
        answer = follower.answer or self.compare(baseline, candidate, until=self.wanted[-1])
        gaps: list[str] = []
        if answer.verdict is not Verdict.DIVERGED:
            gaps = find_uncompared(baseline, candidate, answer, names, self.wanted, is_resumed=role == "resumed")
            if not gaps and self.plan.steps is None and role in ("fresh", "golden"):
                gaps = _find_extra_steps(baseline, candidate, names)
        self.comparisons.append(Comparison(*names, role, answer, tuple(gaps)))
        if answer.verdict is Verdict.DIVERGED:
            where = f"step {answer.first.step}" if answer.first is not None else "its end"
            self.tell(f"{names[1]} differs from {names[0]} in {where}")
            raise _Ended(GateVerdict.FAIL, answer.explanation, answer.remedy)
        if gaps:
            raise _Ended(
                GateVerdict.INSUFFICIENT, gaps[0], "Nothing differed in what was compared, which is too little.", gaps
            )
        self.tell(f"{names[1]} is identical to {names[0]} in {answer.compared.steps:,} steps")


def _find_extra_steps(baseline: Run, candidate: Run, names: tuple[str, str]) -> list[str]:
    """Without a number of steps to compare, both must have taken the same."""
    spans = step_range(baseline), step_range(candidate)
    if spans[0] == spans[1] or spans[0] is None or spans[1] is None:
        return []
    return [
        f"{names[1]} goes on to step {spans[1][1]}, {names[0]} to step {spans[0][1]}; the same command took another "
        "number of steps. Where that is meant (a limit of time), say how many count with --steps."
    ]


def runs_for(rate: float, confidence: float) -> int:
    """Return how many runs show, if all are identical, a divergence rate of at most `rate`."""
    return pairs_needed(rate, confidence) + 1


def write_answer(result: GateResult) -> Path:
    """Write gate.json into the gate's folder and return its path."""
    path = result.plan.folder / "gate.json"
    path.write_text(json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


__all__ = ["Comparison", "GateResult", "GateVerdict", "Plan", "RunReport", "Variation", "judge", "runs_for"]
