"""`bitcheck gate`: a program run several times, compared bit for bit, pass or fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from bitcheck.errors import UsageError

VARIABLE_THINGS = ("threads", "hashseed", "workers", "allocator")
_FOR_GIT = "--for-git-bisect"
_GOOD, _BAD, _SKIP, _ABORT = 0, 1, 125, 128
"""What `git bisect run` makes of exit statuses; 128 and above end the bisection."""


class GateCommand(click.Command):
    """A mistyped option must not read as "bad" to `git bisect run`, which takes 2 for that."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments; with --for-git-bisect a mistake in them ends the bisection."""
        is_for_git = _FOR_GIT in args[: args.index("--")] if "--" in args else _FOR_GIT in args
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            if is_for_git:
                error.show()
                raise click.exceptions.Exit(_ABORT) from None
            raise


@click.command("gate", cls=GateCommand, context_settings={"allow_interspersed_args": False})
@click.option("--runs", type=click.IntRange(min=1), metavar="K", help="Run CMD so many times.  [default: 2]")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Compare N steps; fewer do not pass.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="R", help="Expect so many ranks; others do not pass.")
@click.option(
    "--level",
    type=click.Choice(["state", "module", "op"]),
    help="Level of the recordings.  [default: that of the golden run, else module]",
)
@click.option("--stop-early", is_flag=True, help="Stop each program once its N steps are recorded.")
@click.option("--resume-cmd", metavar="CMD", help="Also run this command, which goes on from a checkpoint of run 1.")
@click.option("--checkpoint", metavar="PATTERN", help="Where run 1 writes it; fills {checkpoint} in --resume-cmd.")
@click.option("--resume-step", type=click.IntRange(min=0), metavar="N", help="First step of the resumed run.")
@click.option("--golden", type=click.Path(path_type=Path), metavar="RUN", help="Also compare run 1 with this run.")
@click.option(
    "--may-differ",
    multiple=True,
    metavar="KEY",
    help="Environment key (or pattern) in which the golden run may differ.",
)
@click.option(
    "--write-golden", type=click.Path(path_type=Path), metavar="RUN", help="Where it passes, copy run 1 here."
)
@click.option("--vary", metavar="THINGS", help=f"Also change one thing at a time: {','.join(VARIABLE_THINGS)}.")
@click.option(
    "--confidence", type=float, default=0.95, show_default=True, metavar="C", help="Of what is said of chance."
)
@click.option(
    "--rate", type=float, metavar="P", help="Choose K: so many runs that, all identical, fewer than P differ."
)
@click.option(
    "--allow-unobserved",
    multiple=True,
    metavar="TEXT",
    help="Pass although state went unobserved whose line has TEXT.",
)
@click.option("--strict", is_flag=True, help="Do not pass where anything went unobserved, state or not.")
@click.option("--replicas", is_flag=True, help="Also check that the ranks of each run hold equal copies.")
@click.option("--replica-group", multiple=True, metavar="RANKS", help="As --group of `bitcheck replicas`.")
@click.option("--replica-except", multiple=True, metavar="PATTERN", help="As --except of `bitcheck replicas`.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("bitcheck-gate"),
    show_default=True,
    metavar="DIR",
    help="Folder for runs, logs and the answer; that of an earlier gate is replaced.",
)
@click.option("--junit", type=click.Path(path_type=Path), metavar="FILE", help="Write the answer as JUnit XML too.")
@click.option("--summary", type=click.Path(path_type=Path), metavar="FILE", help="Append the answer as Markdown too.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON (schema bitcheck.gate/1).")
@click.option("--for-git-bisect", is_flag=True, help="Exit 0 good, 1 bad, 125 cannot be tested, for `git bisect run`.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
@click.pass_context
def command(
    context: click.Context,
    /,
    command: tuple[str, ...],
    runs: int | None,
    rate: float | None,
    confidence: float,
    vary: str | None,
    folder: Path,
    write_golden: Path | None,
    junit: Path | None,
    summary: Path | None,
    as_json: bool,
    for_git_bisect: bool,
    **asked: Any,
) -> None:
    """Run CMD several times, fresh, and pass only if every run has the same bits as the first.

    A program that differs is stopped at once. The gate does not pass on too little: fewer steps than
    asked for, a missing rank, unobserved state, a program that failed. Each gate first flips one bit of
    one gradient in a copy of run 1 and must see it.

    In CMD and --resume-cmd {out} stands for a new folder of each run, {first} for that of run 1.

    \b
    Example:
      bitcheck gate --runs 3 --steps 20 -- python train.py --max-steps 20
      bitcheck gate --resume-cmd 'python train.py --resume {checkpoint} --out {out}' \\
          --checkpoint '{out}/*.pt' -- python train.py --save --out {out}

    Exit status: 0 passed, 1 failed, 2 no verdict (too little compared, a program that failed, a golden
    run of another environment).
    """
    from bitcheck.gate import GateVerdict, Plan, clear_folder, judge, runs_for, write_answer
    from bitcheck.launch import ProgramNotFound
    from bitcheck.statistics import check_probability

    try:
        check_probability("--confidence", confidence)
        if rate is not None and runs is not None:
            raise UsageError("--rate chooses the number of runs; leave out --runs, or --rate")
        count = runs_for(check_probability("--rate", rate), confidence) if rate is not None else runs or 2
        plan = Plan(
            command=command,
            folder=folder,
            runs=count,
            level=asked["level"],
            steps=asked["steps"],
            ranks=asked["ranks"],
            stop_early=asked["stop_early"],
            resume_command=asked["resume_cmd"],
            checkpoint=asked["checkpoint"],
            resume_step=asked["resume_step"],
            golden=asked["golden"],
            may_differ=asked["may_differ"],
            vary=tuple(part.strip() for part in vary.split(",") if part.strip()) if vary else (),
            confidence=confidence,
            allow_unobserved=asked["allow_unobserved"],
            is_strict=asked["strict"],
            with_replicas=asked["replicas"],
            replica_groups=asked["replica_group"],
            replica_exceptions=asked["replica_except"],
        )
        plan.check()
        if plan.golden is not None and folder.resolve() in [plan.golden.resolve(), *plan.golden.resolve().parents]:
            raise UsageError(
                f"{plan.golden} lies in {folder}, which is about to be replaced; keep golden runs elsewhere"
            )
        clear_folder(folder)
        result = judge(plan, tell=_tell)
        write_answer(result)
        _write_reports(result, folder, junit, summary)
        if write_golden is not None and result.verdict is GateVerdict.PASS:
            _copy_golden(result, write_golden)
    except Exception as error:
        if not for_git_bisect:
            raise
        click.echo(f"bitcheck: {error}", err=True)
        context.exit(_SKIP if isinstance(error, ProgramNotFound) else _ABORT)
    if as_json:
        from bitcheck.report.json import render_json

        click.echo(render_json(result.to_json()), nl=False)
    else:
        from bitcheck.report.gate import print_gate

        print_gate(result)
    if for_git_bisect:
        context.exit(_git_status(result.verdict))
    context.exit(result.exit_status)


def _git_status(verdict: Any) -> int:
    """Return 0 good, 1 bad, 125 where this commit cannot be tested, 128 where no commit can."""
    from bitcheck.gate import GateVerdict

    return {GateVerdict.PASS: _GOOD, GateVerdict.FAIL: _BAD, GateVerdict.BROKEN: _ABORT}.get(verdict, _SKIP)


def _tell(line: str) -> None:
    """Say on standard error what is going on; on a terminal and in a CI log alike a line is enough."""
    print(f"bitcheck gate: {line}", file=sys.stderr, flush=True)


def _write_reports(result: Any, folder: Path, junit: Path | None, summary: Path | None) -> None:
    from bitcheck.report.gate import render_gate, render_junit, render_markdown

    (folder / "gate.txt").write_text(render_gate(result), encoding="utf-8")
    (folder / "summary.md").write_text(render_markdown(result), encoding="utf-8")
    (folder / "junit.xml").write_text(render_junit(result), encoding="utf-8")
    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        junit.write_text(render_junit(result), encoding="utf-8")
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:
            file.write(render_markdown(result))


def _copy_golden(result: Any, target: Path) -> None:
    """Copy run 1, whole and sealed, to where golden runs are kept; an older one there is replaced."""
    import shutil

    from bitcheck.run import open_run

    if target.exists():
        open_run(target, allow_missing_ranks=True).close()  # refuses to replace what is no run
        shutil.rmtree(target)
    shutil.copytree(next(run.path for run in result.runs if run.role == "first"), target)
