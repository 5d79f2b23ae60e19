"""The gate: run a program several times, compare each run with the first, pass or fail.

    result = judge(Plan(("python", "train.py"), Path("bitcheck-gate"), runs=3))
    result.verdict, result.exit_status
    (GateVerdict.PASS, 0)

In order: run 1 (followed against the golden run where there is one), the positive control on run 1,
the fresh runs, the resumed run, the variations. Each candidate is followed while it runs and stopped
as soon as a step of it differs; the first failure ends the gate. `pass` means that everything that was
asked for was recorded, compared and equal, by a comparison that has just been seen to fail
(`control`), on runs that hold what counts (`coverage`). The whole order of a gate is read here, in one place, which is
why the module is long.

Place in the flow: trials, follow, coverage, control -> *gate* -> report.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path

from bitcheck.answer import EnvironmentDifference, Verdict
from bitcheck.control import Control, run_control, run_replica_control
from bitcheck.coverage import Demand, find_gaps, find_uncompared, step_range
from bitcheck.diff import diff_runs
from bitcheck.errors import RunError, UsageError
from bitcheck.follow import Compare, Follower
from bitcheck.gate_answer import Comparison, GateResult, GateVerdict, Plan, ReplicaCheck, RunReport
from bitcheck.launch import Ending
from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaVerdict
from bitcheck.run import Run, open_run
from bitcheck.run_document import STOPPED
from bitcheck.settings import Options
from bitcheck.statistics import pairs_needed
from bitcheck.trials import Runner, Trial, command_line, describe_failure, run_trial
from bitcheck.vary import VariedRun, plan_variation

_OWN_NAMES = frozenset({"runs", "logs", "out", "gate.json", "gate.txt", "junit.xml", "summary.md"})
"""What a gate leaves in its folder."""


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
    replicas: list[ReplicaCheck] = field(default_factory=list)
    replica_control: Control | None = None

    def judge(self) -> GateResult:
        problems: tuple[str, ...] = ()
        remedy = ""
        try:
            self._check_golden()
            self._run_first()
            self._run_control()
            self._check_replicas("run 1", self.first)
            self._run_replica_control()
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
            tuple(self.replicas),
            self.replica_control,
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
        # One that was stopped once it had the steps that are asked for is as good as a complete one.
        was_stopped = self.plan.steps is not None and self.golden.status in ("killed", STOPPED)
        gaps = find_gaps(self.golden, "the golden run", self._demand(), was_stopped=was_stopped)
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

    def _check_replicas(self, name: str, run: Run) -> None:
        """Hold the ranks of one run against each other, where that was asked for."""
        if not self.plan.with_replicas:
            return
        answer = check_replicas(
            run,
            groups=self.plan.replica_groups,
            exceptions=self.plan.replica_exceptions,
            until=self.wanted[-1],
        )
        self.replicas.append(ReplicaCheck(name, answer))
        remedy = answer.remedy.replace("--group", "--replica-group").replace("--except", "--replica-except")
        if answer.verdict is ReplicaVerdict.DIFFER:
            assert answer.first is not None
            self.tell(f"the ranks of {name} hold different copies in step {answer.first.step}")
            raise _Ended(GateVerdict.FAIL, answer.explanation, remedy)
        if answer.verdict is ReplicaVerdict.UNDECLARED:
            raise _Ended(GateVerdict.INSUFFICIENT, f"{name}: {answer.explanation}", remedy)
        self.tell(f"the ranks of {name} hold equal copies of {answer.tensors:,} tensors")

    def _run_replica_control(self) -> None:
        if not self.plan.with_replicas:
            return
        self.replica_control = control = run_replica_control(
            self.first, groups=self.plan.replica_groups, exceptions=self.plan.replica_exceptions
        )
        if not control.has_passed:
            raise _Ended(
                GateVerdict.BROKEN,
                f"The gate is broken: one bit of rank {control.rank}'s copy of {control.site} in step {control.step} "
                f"was flipped in a copy of run 1, and {control.problem}. Whatever it says of replicas proves nothing.",
                "This is a fault of bitcheck: please report it with the run.",
            )

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
        found = sorted(map(Path, glob(pattern)), key=lambda path: (path.stat().st_mtime_ns, path.name))
        fresh = [path for path in found if path.stat().st_mtime >= self.first_started - 1]
        if not fresh:
            what = f"{found[0]} is older than run 1" if found else f"nothing matches {pattern}"
            raise _Ended(
                GateVerdict.INSUFFICIENT,
                f"No checkpoint of run 1: {what}. The resumed run has nothing to go on from.",
                "Let the command write a checkpoint, into {out} for instance, and name it with --checkpoint.",
            )
        return fresh[(len(fresh) - 1) // 2]  # of several one in the middle: with steps before it and after it

    def _run_varied(self, name: str) -> None:
        variation = plan_variation(name, self.first.environment)
        trial = self._trial(f"{name} varied", f"vary-{name}", self.plan.command)
        trial = replace(trial, variables=variation.variables)
        follower = self._run(trial, "varied", self._follower(trial))
        with open_run(trial.folder, allow_missing_ranks=follower.answer is not None) as run:
            answer = follower.answer or self.compare(self.first, run, until=self.wanted[-1])
            effect = variation.effect(self.first.environment, run.environment, run.info.get("varied") or ())
            gaps: list[str] = []
            if answer.verdict is Verdict.IDENTICAL:
                gaps = find_uncompared(self.first, run, answer, ("run 1", trial.name), self.wanted)
                self._check_replicas(trial.name, run)
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
        self.tell(f"{trial.name}: {command_line(trial.command)}")
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
            self._check_replicas(trial.name, candidate)

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


def clear_folder(folder: Path) -> None:
    """Make the gate's folder, emptied of an earlier gate. Raises UsageError where it holds anything else."""
    if folder.is_dir():
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in _OWN_NAMES)
        if foreign:
            raise UsageError(
                f"{folder} holds {foreign[0]}, which is not a gate's; expected a new folder or that of an earlier "
                "gate.\nChoose another --output."
            )
        shutil.rmtree(folder)
    elif folder.exists():
        raise UsageError(f"{folder} is a file; expected a folder for runs and the answer. Choose another --output.")
    folder.mkdir(parents=True)


__all__ = ["GateResult", "GateVerdict", "Plan", "clear_folder", "judge", "runs_for", "write_answer"]
