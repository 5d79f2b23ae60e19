"""What `bitcheck zoom` found, and the words for what it could not find. It decides nothing.

Place in the flow: answer, repro -> *zoom_answer* -> zoom.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitcheck.answer import Answer, Cause, Origin, Verdict
from bitcheck.repro import Confirmation
from bitcheck.roles import are_numbers
from bitcheck.statistics import percent, rate_bound

MAX_NAMED = 6
"""Environment entries in one sentence."""
POISON = "`bitcheck scan --poison -- CMD`"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two programs, as it is run again."""

    name: str
    """`baseline` or `candidate`."""
    command: tuple[str, ...]
    cwd: Path | None
    start_step: int
    """Number of its first step, as in the baseline."""
    variables: Mapping[str, str | None]
    leaves: str | int
    environment: Mapping[str, str]
    """As it was recorded."""


@dataclass(frozen=True, slots=True)
class ZoomAnswer:
    """What was found."""

    recorded: Answer
    """The diff of the two runs that were given."""
    diff: Answer
    """The diff of the last pair recorded at level `op`; `recorded` where there was nothing to look at closer."""
    pairs: int
    """Pairs that were recorded."""
    steps: str
    """`A:B`, the steps recorded at level `op` in the last pair, in the baseline's numbers."""
    runs: tuple[Path, Path] | None
    """The last pair."""
    sides: tuple[Side, Side] | None = None
    """The programs, as they were run."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data: bitcheck.diff/1, and `zoom` beside it."""
        first = self.recorded.first
        return self.diff.to_json() | {
            "zoom": {
                "parted_in": None if first is None else first.step,
                "pairs": self.pairs,
                "steps": self.steps,
                "runs": None if self.runs is None else [str(path) for path in self.runs],
            }
        }


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What became of the wish to confirm an origin."""

    script: Path | None
    confirmation: Confirmation | None
    obstacle: str
    """Why there is no script, or why it could not execute the operation, and what to do instead; "" where it did."""
    advice: str = ""
    """Where all executions agree: what they do not show, and what to try next."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "script": None if self.script is None else str(self.script),
            "confirmation": None if self.confirmation is None else self.confirmation.to_json(),
            "obstacle": self.obstacle,
            "advice": self.advice,
        }


def is_operation_result(origin: Origin) -> bool:
    """Whether an origin is what a dispatched operation gave or wrote: its inputs say all about it."""
    name = (origin.op or "").partition(" in ")[0]
    slot = origin.site.rpartition(":")[2].partition("#")[0].partition("@")[0]
    return (
        origin.missing_in is None
        and name.count(".") >= 2
        and slot.startswith(name + ".")
        and (slot.endswith(".written") or re.fullmatch(r"out(\.\d+)*", slot.removeprefix(name + ".")) is not None)
    )


def nothing_to_record(answer: Answer) -> Answer:
    """Say why no step was recorded again."""
    if answer.verdict is Verdict.INCOMPARABLE:
        return answer
    if answer.verdict is Verdict.IDENTICAL:
        note = "The runs are identical, so there is no step to record again."
    elif answer.first is None:
        note = "The runs agree as far as both go, so there is no step to record again."
    else:
        note = "The runs part before their first step, so there is no operation to look for."
    return replace(answer, notes=(*answer.notes, note))


def environment_changes(side: Side, again: Mapping[str, str]) -> list[str]:
    """Say in what the environment of a program that ran again is not the recorded one."""
    before, now = side.environment, again
    if not before or not now:
        return []
    unlike = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if not unlike:
        return []
    named = _listed([f"{key} {before.get(key, 'unset')} -> {now.get(key, 'unset')}" for key in unlike])
    return [f"The {side.name} ran again in another environment than it was recorded in: {named}."]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def none_diverged(answer: Answer, recorded: Answer, tries: int, steps: str) -> Answer:
    """Say what it means that every pair recorded again agrees, and what to try next."""
    assert recorded.first is not None
    pairs = "the pair" if tries == 1 else f"all {tries} pairs"
    return replace(
        answer,
        explanation=f"The runs part in step {recorded.first.step} ({recorded.first.site}), but {pairs} recorded again "
        f"at level op (steps {steps}) agree. Either the fault is one of chance, and shows in at most "
        f"{percent(rate_bound(tries))} of pairs (95 % confidence); or something that the programs find outside is no "
        "longer as it was; or to look at every operation hides it: memory is handed out in another order, and "
        "operations are further apart in time.",
        remedy="Raise --tries, record under the load under which it showed, and see that both programs find the same "
        "files and variables as when they were recorded (--baseline-env, --candidate-env). Then look without a second "
        f"run: {POISON} names reads of memory that was never written, `bitcheck scan -- CMD` operations that disagree "
        "with themselves.",
    )


def no_operation(answer: Answer, num_pairs: int = 1) -> str:
    """Say in one sentence why the first origin cannot be executed again, and then what to do instead.

    `num_pairs`: how many pairs were recorded again.
    """
    first = answer.first
    if answer.verdict is Verdict.INCOMPARABLE:
        return "The runs hold nothing that can be compared, so no operation was found. Next: what the answer advises."
    if first is None and not num_pairs:
        return "The runs agree as far as both go, so there is no operation to execute. Next: compare longer runs."
    if first is None:
        return (
            "No pair recorded again parts, so there is no operation to execute. Next: more pairs (--tries), or "
            "`bitcheck scan -- CMD`, which executes every operation twice."
        )
    if answer.cause in (Cause.INITIAL_STATE, Cause.RESTORE):
        return (
            f"The runs part before their first step ({first.site}), where no operation is recorded. Next: what the "
            "answer advises about the state."
        )
    if first.missing_in is not None:
        return (
            f"{first.site} is missing in the {first.missing_in}: there is nothing in it to execute. Next: find what "
            "makes only one program do it."
        )
    is_of_operation = first.op is not None and first.op.partition(" in ")[0].count(".") >= 2
    if is_of_operation and are_numbers(first.site):
        found = first.line if first.line is not None else "--stacks names it"
        return (
            f"The first origin, {first.site}, consists of the numbers, flags and words that {first.op} was given: "
            "Python made them and no operation did, so there is none to execute. Next: find what makes the number at "
            f"the line that asks for the operation ({found}): an argument, a configuration, a count, a value read from "
            "a tensor (.item()), or one that an operation returned as a number."
        )
    if is_of_operation and first.cause is Cause.RNG:
        return (
            f"The first origin, {first.site}, is the state of the generator that {first.op} draws from, and not what "
            "it gave: from one and the same state it would agree. Next: what the answer advises about the generator."
        )
    if is_of_operation:
        return (
            f"The first origin, {first.site}, is what {first.op} was given, and not what it gave: executed again on "
            f"one and the same argument it would agree. Next: {POISON}, which names reads of memory that was never "
            "written; --stacks, which names the line; then whatever is not dispatched and writes this tensor (numpy, "
            "kernels of your own, other streams and threads)."
        )
    what = {"batch": "a batch", "rng": "a generator's state", "scalar": "a number of the optimizer"}.get(
        first.phase, "not the result of one dispatched operation"
    )
    return (
        f"The first origin, {first.site}, is {what}: only what an operation gave can be executed again. Next: what "
        "the answer advises, and `bitcheck scan -- CMD`, which executes every operation of one run twice."
    )


def not_saved(origin: Origin, log: Path) -> str:
    """Say that an operation's inputs could not be had, and what to do instead."""
    return (
        f"The inputs of {origin.op} in {origin.site} were not saved. One more run of the baseline up to step "
        f"{origin.step} was tried: the operation did not come up at this site, or it takes what cannot be saved (an "
        f"object that is no tensor, number or text). Its output is in {log}. Next: `bitcheck scan -- CMD`, which "
        "executes every operation twice where it runs."
    )


def script_failed(origin: Origin, said: str) -> str:
    """Say that the operation could not be executed outside its program, and what to do instead."""
    return (
        f"{origin.op} could not be executed by the script alone: {said} An operator of your own is found where its "
        "library is imported at the top of the script. Next: that, or `bitcheck scan -- CMD`, which executes every "
        "operation twice where it runs."
    )


def all_agreed(answer: ZoomAnswer, confirmation: Confirmation) -> str:
    """Say what executions that all agree do not show, and what to try next."""
    origin = answer.diff.first
    assert origin is not None and answer.sides is not None
    differences = answer.diff.environment
    unlike = [f"{each.key} ({each.baseline or 'unset'} -> {each.candidate or 'unset'})" for each in differences]
    between = (
        f"The two programs ran in environments that differ in {_listed(unlike)}: that alone can give other bits, the "
        "same ones each time. Record both in one environment, or take these differences for the cause."
        if unlike
        else "What differs between two processes and stays within one (a kernel chosen by a timing, the alignment of "
        "memory, what memory held before) does not show here."
    )
    return (
        f"Tried: {confirmation.executions} executions in one process, on the inputs of step {origin.step} in the "
        f"baseline, under load, with the variables that the baseline was recorded with. {between}"
    )
