"""`bitcheck bisect`: which switch, or which commit, brought divergence back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bitcheck.errors import UsageError

_SHARED = [
    click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Compare N steps; fewer prove nothing."),
    click.option("--ranks", type=click.IntRange(min=1), metavar="R", help="Expect so many ranks."),
    click.option(
        "--level",
        type=click.Choice(["state", "module", "op"]),
        default="module",
        show_default=True,
        help="Level of the recordings.",
    ),
    click.option("--confidence", type=float, default=0.95, show_default=True, metavar="C", help="How sure to be."),
    click.option(
        "--rate",
        type=float,
        default=0.3,
        show_default=True,
        metavar="P",
        help="Smallest part of pairs of runs in which the fault shows; 1 where it always does.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON."),
]


def _with_shared_options(function: Any) -> Any:
    for option in reversed(_SHARED):
        function = option(function)
    return function


@click.group("bisect")
def command() -> None:
    """Find what brought nondeterminism back: a switch of the program (kernels) or a commit (commits).

    Every point is judged by pairs of recorded runs, as many as it takes: two runs that differ prove
    divergence, identical ones only make it improbable.
    """


@command.command("kernels", context_settings={"allow_interspersed_args": False})
@click.option("--switches", "path", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of switches.")
@click.option("--reference", is_flag=True, help="Search the reference trainer's own switches.")
@click.option("--config", default="tiny", show_default=True, help="With --reference: its configuration.")
@click.option("--only", multiple=True, metavar="NAME", help="Search these switches alone; the others are left out.")
@click.option("--max-runs", type=click.IntRange(min=1), metavar="N", help="Stop after so many programs were run.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("bitcheck-bisect"),
    show_default=True,
    metavar="DIR",
    help="Folder for runs and the log; a search that is in it goes on.",
)
@_with_shared_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARGS]...]")
def kernels(
    command: tuple[str, ...],
    path: Path | None,
    reference: bool,
    config: str,
    only: tuple[str, ...],
    max_runs: int | None,
    folder: Path,
    steps: int | None,
    ranks: int | None,
    level: str,
    confidence: float,
    rate: float,
    as_json: bool,
) -> None:
    """Name every minimal set of suspect switches that makes runs of CMD differ from each other.

    The file lists switches, each with a reproducible and a suspect form (docs/bisect.md):

    \b
      [switches."attention"]
      reproducible = { args = ["--attention", "math"] }
      suspect = { args = ["--attention", "flash"] }

    \b
    Example:
      bitcheck bisect kernels --switches switches.toml --steps 20 -- python train.py --max-steps 20
      bitcheck bisect kernels --reference --config nano --steps 2

    Exit status: 0 found, 2 refused: the reproducible end diverges, the suspect end does not, or CMD failed.
    """
    from bitcheck.bisect import Search
    from bitcheck.bisect_log import LoggedOracle, LogHeader
    from bitcheck.coverage import Demand
    from bitcheck.launch import find_program
    from bitcheck.pairs import PairRunner
    from bitcheck.probes import SwitchProbe
    from bitcheck.settings import Options
    from bitcheck.switches import read_switches, reference_switches

    if (path is None) == (not reference):
        raise UsageError("give a file of switches with --switches, or --reference for the reference trainer's own")
    if reference:
        if command:
            raise UsageError("--reference brings its own command; leave out CMD, or give --switches")
        switches = reference_switches()
        command = _reference_command(config, steps or 2)
    else:
        assert path is not None
        switches = read_switches(path)
        command = command or switches.command
        if not command:
            raise UsageError(f"no command: give one after --, or as command = [...] in {path}")
    if only:
        switches = switches.only(only)
    find_program(command)
    search = Search(confidence, rate, max_runs)
    search.check()
    options = Options(level=level, steps=None if steps is None else f":{steps}")
    pairs = PairRunner(Demand(num_steps=steps, num_ranks=ranks))
    header = LogHeader.of(switches.digest([*command, level, str(steps)]), switches.names, search, command)
    oracle = LoggedOracle(folder / "bisect.jsonl", header, SwitchProbe(switches, command, folder, options, pairs))
    _search(oracle, search, header, switches, as_json)


@command.command("replay")
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def replay(log: Path, as_json: bool) -> None:
    """Derive the answer of `bisect kernels` again from its LOG; nothing is run.

    \b
    Example:
      bitcheck bisect replay bitcheck-bisect/bisect.jsonl
    """
    from bitcheck.bisect_log import LoggedOracle, read_log

    header, _, _ = read_log(log)
    _search(LoggedOracle(log, header, None), header.search, header, None, as_json)


def _search(oracle: Any, search: Any, header: Any, switches: Any, as_json: bool) -> None:
    from bitcheck.bisect import find_minimal_sets
    from bitcheck.bisect_answer import BisectAnswer

    result = find_minimal_sets(header.names, oracle, search, _tell)
    answer = BisectAnswer(result, search, switches, header.names, header.command, str(oracle.path), oracle.num_replayed)
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(answer.to_json()), nl=False)
    else:
        from bitcheck.report.bisect import print_bisect

        print_bisect(answer)


def _reference_command(config: str, steps: int) -> tuple[str, ...]:
    arguments = ["reference", "train", "--config", config, "--steps", str(steps), "--quiet"]
    return (sys.executable, "-m", "bitcheck", *arguments)


@command.command("commits")
@click.option(
    "--build", metavar="SHELL", help="Run this before each commit's runs; a commit where it fails is skipped."
)
@click.option("--repository", type=click.Path(path_type=Path), default=Path(), help="Checkout to search.  [default: .]")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("bitcheck-bisect-commits"),
    show_default=True,
    metavar="DIR",
    help="Folder for the worktree, runs and the log; a search that is in it goes on.",
)
@_with_shared_options
@click.argument("good")
@click.argument("bad")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
def commits(
    command: tuple[str, ...],
    good: str,
    bad: str,
    build: str | None,
    repository: Path,
    folder: Path,
    steps: int | None,
    ranks: int | None,
    level: str,
    confidence: float,
    rate: float,
    as_json: bool,
) -> None:
    """Name the first commit after GOOD, up to BAD, whose runs of CMD differ from each other.

    Drives `git bisect` in a worktree of its own, in which CMD runs; your checkout stays as it is.
    A commit that cannot be built or run is skipped.

    \b
    Example:
      bitcheck bisect commits v1.2 main --steps 20 -- python train.py --max-steps 20

    Exit status: 0 found, 1 not decided because of skipped commits, 2 refused: GOOD diverges itself,
    BAD does not.
    """
    from bitcheck.commits import CommitSearch, bisect_commits
    from bitcheck.coverage import Demand
    from bitcheck.git import Git
    from bitcheck.pairs import PairRunner
    from bitcheck.probes import CommitProbe
    from bitcheck.settings import Options

    search = CommitSearch(confidence, rate)
    search.check()
    git = Git(repository)
    top = Path(git.run("rev-parse", "--show-toplevel").stdout.strip())
    subfolder = repository.resolve().relative_to(top.resolve())
    options = Options(level=level, steps=None if steps is None else f":{steps}")
    pairs = PairRunner(Demand(num_steps=steps, num_ranks=ranks))
    probe = CommitProbe(command, build, folder, options, pairs, subfolder)
    result = bisect_commits(repository, good, bad, folder, probe, search, _tell)
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(result.to_json()), nl=False)
    else:
        from bitcheck.report.bisect import print_commits

        print_commits(result)
    raise click.exceptions.Exit(0 if result.first_bad is not None else 1)


def _tell(line: str) -> None:
    print(f"bitcheck bisect: {line}", file=sys.stderr, flush=True)
