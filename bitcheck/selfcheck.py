"""Does recording change a program? Run it bare and recorded, and compare the final bits.

Three runs of the same command:
1. bare, counting optimizer steps only: K of them, rank by rank;
2. recorded, its state digested after the K-th step;
3. bare again, its state digested after the K-th step, nothing before.

The recorder is neutral where 2 and 3 agree in every bit of parameters, gradients, optimizer state,
buffers and generators. Where they do not, a fourth run, bare, says whether the program repeats itself
at all; only if it does is the recorder at fault. A generator of Python or numpy from which the program
draws unseeded, while all its tensors repeat, is left out and named.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL, EXIT_TROUBLE, ProgramFailed
from bitcheck.launch import Ending, attached_environment, find_program, package_folder, read_words, run_program
from bitcheck.run import create_run
from bitcheck.settings import Options, Settings

SCHEMA = "bitcheck.selfcheck/1"

_EXITS = {"neutral": EXIT_IDENTICAL, "altered": EXIT_DIFFERENT, "not-reproducible": EXIT_TROUBLE}


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor, or one number of steps, that two runs do not share."""

    rank: int
    site: str
    """As in a run; `steps` for the number of optimizer steps."""
    recorded: str | None
    """Digest, or number of steps; None where that run has no such tensor."""
    bare: str | None


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The answer."""

    verdict: str
    """`neutral`, `altered`, or `not-reproducible`: the program differs from itself without a recorder."""
    level: str
    steps: dict[int, int]
    """Rank -> optimizer steps after which the state was compared."""
    num_tensors: int
    num_bytes: int
    differences: tuple[Difference, ...]
    """Recorded against bare, in the order in which the state was read."""
    unread: tuple[str, ...]
    explanation: str

    @property
    def exit_status(self) -> int:
        """Return the exit status of the command."""
        return _EXITS[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return the answer as schema bitcheck.selfcheck/1."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "level": self.level,
            "steps": {str(rank): steps for rank, steps in sorted(self.steps.items())},
            "compared": {"ranks": len(self.steps), "tensors": self.num_tensors, "bytes": self.num_bytes},
            "differences": [
                {"rank": each.rank, "site": each.site, "recorded": each.recorded, "bare": each.bare}
                for each in self.differences
            ],
            "unread": list(self.unread),
            "explanation": self.explanation,
        }


@dataclass(frozen=True, slots=True)
class _State:
    """What one run left of one rank."""

    steps: int
    digests: dict[str, str]
    num_bytes: int
    unread: tuple[str, ...]


def check_program(command: Sequence[str], options: Options) -> SelfCheck:
    """Run `command` bare and recorded and compare their final states.

    The program's output goes to standard error; it has no standard input. Raises ProgramFailed where
    a run ends with an error or takes no optimizer step, BitcheckError where there is no such program.
    """
    find_program(command)
    with tempfile.TemporaryDirectory(prefix="bitcheck-selfcheck-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        counted = _run(command, scratch / "count", None, {})
        if not counted:
            raise ProgramFailed(
                "the program took no optimizer step, so there is no final state to compare.\n"
                "Expected: a program that trains with torch.optim, for a few steps at least."
            )
        steps = {rank: state.steps for rank, state in counted.items()}
        recorded = _run(command, scratch / "recorded", options, steps)
        bare = _run(command, scratch / "bare", None, steps)
        differences = _compare(recorded, bare)
        own = _compare(_run(command, scratch / "again", None, steps), bare) if differences else []
    return _judge(options.level, steps, bare, differences, own)


def _judge(
    level: str, steps: dict[int, int], bare: dict[int, _State], differences: list[Difference], own: list[Difference]
) -> SelfCheck:
    """Say what the differences mean; `own` are those between two bare runs."""
    its_own = {(each.rank, each.site) for each in own}
    unseeded = sorted({each.site for each in own if each.site.startswith("rng/")})
    if any(not each.site.startswith("rng/") for each in own):
        verdict = "not-reproducible"
        explanation = (
            "The program does not repeat itself: two bare runs end with different bits, so nothing can be said of "
            "recording it. Seed its generators, and see that it does not go on from files that it wrote itself; "
            "`bitcheck diff` of two recordings says where it parts."
        )
    elif differences := [each for each in differences if (each.rank, each.site) not in its_own]:
        verdict = "altered"
        explanation = (
            f"Recording at level {level} changed the program: bare, it repeats itself bit for bit; recorded, it does "
            "not. This is a fault of bitcheck: please report it with the program."
        )
    else:
        verdict = "neutral"
        explanation = f"Recorded at level {level} and bare, the program ends with the same bits."
        if unseeded:
            explanation += (
                f" Left out: {', '.join(unseeded)}, from which the program draws without having seeded it, "
                "so that it differs from run to run."
            )
    return SelfCheck(
        verdict=verdict,
        level=level,
        steps=steps,
        num_tensors=sum(len(state.digests) for state in bare.values()),
        num_bytes=sum(state.num_bytes for state in bare.values()),
        differences=tuple(differences),
        unread=tuple(line for state in bare.values() for line in state.unread),
        explanation=explanation,
    )


def _run(
    command: Sequence[str], folder: Path, options: Options | None, final_steps: dict[int, int]
) -> dict[int, _State]:
    """Run the program once; return what it left, by rank."""
    words = folder / "words"
    words.mkdir(parents=True)
    run_id = folder.name
    if options is not None:
        info = {"run_id": run_id, "command": list(command), "level": options.level, "world_size": 1, "recorder": "run"}
        create_run(folder / "run", info, overwrite=False)
    settings = Settings(
        folder=str(folder / "run"),
        home=str(package_folder()),
        words=str(words),
        run_id=run_id,
        options=options,
        final={str(rank): steps for rank, steps in final_steps.items()},
        final_folder=str(folder),
    )
    variables = attached_environment(settings, os.environ)
    with open(os.devnull, "rb") as nothing:
        ending = run_program(command, variables, stdin=nothing, stdout=sys.stderr.fileno())
    _check_ending(ending, folder.name, options)
    told = read_words(words)
    for word in told:
        if word["what"] in ("unattached", "failed"):
            raise ProgramFailed(f"the program could not be recorded: {word['reason']}")
    states = _read_states(folder)
    if options is not None:
        unseen = states.keys() - {word["rank"] for word in told if word["what"] == "claimed"}
        if unseen:
            raise ProgramFailed(f"nothing was recorded of rank {min(unseen)}, so its bits prove nothing.")
    return states


def _check_ending(ending: Ending, name: str, options: Options | None) -> None:
    if ending.exit_status == 0:
        return
    if options is not None:
        how = "although it ended well bare: recording may be what fails it"
    else:
        how = "bare" if name == "count" else "bare, although it ended well before"
    raise ProgramFailed(
        f"the program ended with exit status {ending.exit_status}, {how}.\n"
        "Expected: exit status 0 in every run. Its own output above says why it failed."
    )


def _read_states(folder: Path) -> dict[int, _State]:
    states = {}
    for path in sorted(folder.glob("rank-*.steps")):
        rank = int(path.stem.removeprefix("rank-"))
        steps = int(path.read_text(encoding="ascii"))
        try:
            content = json.loads(path.with_suffix(".json").read_bytes())
        except FileNotFoundError:
            content = {"digests": {}, "bytes": 0, "unread": []}  # it ended, or went on counting, before its K-th step
        states[rank] = _State(steps, content["digests"], content["bytes"], tuple(content["unread"]))
    return states


def _compare(recorded: dict[int, _State], bare: dict[int, _State]) -> list[Difference]:
    differences = []
    for rank in sorted(recorded.keys() | bare.keys()):
        ours, theirs = recorded.get(rank), bare.get(rank)
        steps = [None if state is None else str(state.steps) for state in (ours, theirs)]
        if steps[0] != steps[1]:
            differences.append(Difference(rank, "steps", *steps))
        mine, other = (({} if state is None else state.digests) for state in (ours, theirs))
        for site in [*other, *(site for site in mine if site not in other)]:
            if mine.get(site) != other.get(site):
                differences.append(Difference(rank, site, mine.get(site), other.get(site)))
    return differences
