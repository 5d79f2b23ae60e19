"""Pairs of runs of one command: run it, run it again, and say whether the second differs from the first.

What both bisections are made of. The first run is kept; each further one is followed while it runs,
stopped at the first step that differs, compared, and removed again unless it differed. A pair counts
only if it proves what it says: `coverage` looks at every run, and the first run of all is put through
the positive control.

Place in the flow: trials, follow, coverage, control -> *pairs* -> probes, commits.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

from bitcheck.answer import Answer, Verdict
from bitcheck.control import run_control
from bitcheck.coverage import Demand, find_gaps, find_uncompared, step_range
from bitcheck.diff import diff_runs
from bitcheck.errors import BitcheckError, RunError
from bitcheck.follow import Compare, Follower
from bitcheck.run import open_run
from bitcheck.trials import Runner, Trial, check_ending, run_trial


class NoVerdict(BitcheckError):
    """A program ran, and what was recorded of it proves too little; or the pipeline itself is broken."""


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """What a second run showed."""

    diverged: bool
    answer: Answer

    @property
    def where(self) -> str | None:
        """Where the runs parted, for people: `step 3: forward/body:out (forward)`."""
        if not self.diverged:
            return None
        first = self.answer.first
        return f"step {first.step}: {first.site} ({self.answer.cause})" if first is not None else str(self.answer.cause)


class PairRunner:
    """Runs trials in pairs. `num_runs` counts the programs that were run."""

    def __init__(self, demand: Demand, *, runner: Runner = run_trial, compare: Compare = diff_runs) -> None:
        self.num_runs = 0
        self.is_broken = False
        """The positive control was not seen: no verdict of this pipeline means anything."""
        self._demand, self._runner, self._compare = demand, runner, compare
        self._is_controlled = False

    def run_first(self, trial: Trial) -> None:
        """Run what later runs are compared with; one that is there whole already is used again.

        Raises ProgramFailed where the program ends badly, NoVerdict where too little was recorded, or
        where the positive control is not seen.
        """
        if not self._is_whole(trial):
            shutil.rmtree(trial.folder, ignore_errors=True)
            self._run(trial, Follower(trial.folder, None))
        if not self._is_controlled:
            with open_run(trial.folder) as run:
                control = run_control(run, compare=self._compare)
            if not control.has_passed:
                self.is_broken = True
                raise NoVerdict(
                    f"bitcheck is broken: one bit of {control.site} in step {control.step} was flipped in a copy of a "
                    f"run, and {control.problem}.\nPlease report it with the run."
                )
            self._is_controlled = True

    def run_again(self, first: Trial, again: Trial) -> PairOutcome:
        """Run a second time and compare. Raises as `run_first` does."""
        shutil.rmtree(again.folder, ignore_errors=True)
        with open_run(first.folder) as baseline:
            span = step_range(baseline)
            assert span is not None
            last = span[1] if self._demand.num_steps is None else span[0] + self._demand.num_steps - 1
            follower = Follower(again.folder, baseline, until=last, compare=self._compare)
            self._run(again, follower)
            if follower.answer is not None:
                return PairOutcome(True, follower.answer)
            with open_run(again.folder) as candidate:
                answer = self._compare(baseline, candidate, until=last)
                gaps = (
                    find_uncompared(
                        baseline, candidate, answer, ("the first run", again.name), range(span[0], last + 1)
                    )
                    if answer.verdict is not Verdict.DIVERGED
                    else []
                )
        if gaps:
            raise NoVerdict(gaps[0])
        if answer.verdict is Verdict.IDENTICAL:
            shutil.rmtree(again.folder, ignore_errors=True)
        return PairOutcome(answer.verdict is Verdict.DIVERGED, answer)

    def is_identical(self, baseline: Trial, candidate: Trial) -> bool:
        """Whether two runs that are there already are the same in everything that was asked for."""
        with open_run(baseline.folder) as ours, open_run(candidate.folder) as theirs:
            span = step_range(ours)
            if span is None:
                return False
            answer = self._compare(ours, theirs)
            wanted = range(span[0], span[1] + 1)
            return answer.verdict is Verdict.IDENTICAL and not find_uncompared(
                ours, theirs, answer, ("the first run", candidate.name), wanted
            )

    def _run(self, trial: Trial, follower: Follower) -> None:
        """Run a program and see that its recording holds what counts, unless it differs already."""
        self.num_runs += 1
        ending = self._runner(trial, follower)
        if follower.answer is not None:
            return
        check_ending(trial, ending)
        with open_run(trial.folder, allow_missing_ranks=True) as run:
            gaps = find_gaps(run, trial.name, self._demand, was_stopped=ending.was_stopped)
        if gaps:
            raise NoVerdict(f"{gaps[0]}\nNothing was judged: what is missing could hide a difference.")

    def _is_whole(self, trial: Trial) -> bool:
        """Whether an earlier, interrupted search left this very run."""
        if not trial.folder.is_dir():
            return False
        try:
            with open_run(trial.folder) as run:
                is_same = run.info["command"] == list(trial.command)
                return is_same and run.info["exit_status"] == 0 and not find_gaps(run, trial.name, self._demand)
        except RunError:
            return False


def second(trial: Trial, number: int) -> Trial:
    """Return the trial that runs the same again, for the `number`-th time."""
    label = f"{trial.folder.name}-{number}"
    return replace(
        trial,
        name=f"{trial.name}, run {number}",
        folder=trial.folder.with_name(label),
        log=trial.log.with_name(f"{label}.log"),
    )
