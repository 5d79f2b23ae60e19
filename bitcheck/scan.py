"""One run of a program in which each operation is executed again: which disagree with themselves, and what helps.

    answer = scan_program(["python", "train.py"], poison=True)
    answer.findings[0].op, answer.findings[0].disagreed, answer.findings[0].executed
    ('aten.index_put_.default', 3, 40)

Schema `bitcheck.scan/1`. Place in the flow: launch, remedies -> *scan* -> report.
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

from bitcheck.errors import EXIT_DIFFERENT, EXIT_IDENTICAL, ProgramFailed
from bitcheck.launch import attached_environment, find_program, package_folder, run_program
from bitcheck.remedies import Switch, find_switch
from bitcheck.settings import Settings
from bitcheck.wording import counted, word_line

SCHEMA = "bitcheck.scan/1"


@dataclass(frozen=True, slots=True)
class Finding:
    """An operation of one module that disagreed with itself."""

    op: str
    module: str
    phase: str
    node: str
    """The autograd node that ran it, "" outside backward."""
    kind: str
    """`race`: the same inputs gave other bits; `uninitialised`: the bits follow memory that nobody wrote."""
    disagreed: int
    executed: int
    first_step: int
    outputs: tuple[str, ...]
    elements: int
    """Elements that differed, of `of`, in the execution in which most did."""
    of: int
    line: str | None
    ranks: tuple[int, ...]

    @property
    def switch(self) -> Switch | None:
        """What is known to help, None for operations that the table does not have."""
        return find_switch(self.op) if self.kind == "race" else None

    @property
    def remedy(self) -> str:
        """What to do, in sentences."""
        if self.kind == "uninitialised":
            return (
                "It computes from memory that nobody wrote: find the torch.empty (empty_like, new_empty) whose "
                "elements are not all written before this line, and write them, or use zeros."
            )
        switch = self.switch
        if switch is not None:
            return switch.advice
        return (
            "The table of known operations does not have it: look for atomic additions, or a reduction whose order "
            "depends on timing, in its kernel."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON data."""
        switch = self.switch
        return {
            "op": self.op,
            "module": self.module,
            "phase": self.phase,
            "node": self.node or None,
            "kind": self.kind,
            "disagreed": self.disagreed,
            "executed": self.executed,
            "first_step": self.first_step,
            "outputs": list(self.outputs),
            "elements": [self.elements, self.of],
            "line": self.line,
            "ranks": list(self.ranks),
            "covered": None if switch is None else switch.is_covered,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class ScanAnswer:
    """What a scan found."""

    findings: tuple[Finding, ...]
    executed: int
    """Operations that were executed again, on all ranks."""
    steps: int
    ranks: int
    poisoned: bool
    skipped: dict[str, int]
    """What was not executed again: a phrase -> how many times."""

    @property
    def exit_status(self) -> int:
        """Return the exit status of the command."""
        return EXIT_DIFFERENT if self.findings else EXIT_IDENTICAL

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, schema `bitcheck.scan/1`."""
        return {
            "schema": SCHEMA,
            "verdict": "found" if self.findings else "clean",
            "findings": [finding.to_json() for finding in self.findings],
            "executed": self.executed,
            "steps": self.steps,
            "ranks": self.ranks,
            "poison": self.poisoned,
            "skipped": self.skipped,
        }


def scan_program(command: Sequence[str], *, poison: bool = False) -> ScanAnswer:
    """Run `command` once, each operation executed a second time; its output goes to standard error.

    Raises ProgramFailed where it ends badly or no training was seen, BitcheckError where there is no such program.
    """
    find_program(command)
    with tempfile.TemporaryDirectory(prefix="bitcheck-scan-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        words, found = scratch / "words", scratch / "found"
        words.mkdir()
        found.mkdir()
        settings = Settings(
            folder=name,
            home=str(package_folder()),
            words=str(words),
            scan={"folder": str(found), "poison": poison},
        )
        with open(os.devnull, "rb") as nothing:
            ending = run_program(
                command, attached_environment(settings, os.environ), stdin=nothing, stdout=sys.stderr.fileno()
            )
        if ending.exit_status:
            raise ProgramFailed(
                f"the program ended with exit status {ending.exit_status}, so what was found is not all.\n"
                "Expected: exit status 0. Its own output above says why it failed."
            )
        reports = read_reports(found)
    if not reports:
        raise ProgramFailed(
            "nothing was scanned: no process that imports torch ran a module with gradients or an optimizer's step.\n"
            "Expected: a program that trains with torch.nn and torch.optim."
        )
    return gather(reports, poison)


def read_reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each rank left. Raises ProgramFailed where a rank ended before it could say."""
    reports = {}
    for path in sorted(folder.glob("rank-*.json")):
        rank = int(path.stem.removeprefix("rank-"))
        try:
            reports[rank] = json.loads(path.read_bytes())
        except ValueError:
            raise ProgramFailed(
                f"rank {rank} ended before it wrote what was found (os._exit, or a signal).\n"
                "Expected: a program that ends by itself."
            ) from None
    return reports


def gather(reports: dict[int, dict[str, Any]], poison: bool) -> ScanAnswer:
    """Join the ranks' reports: the same operation of the same module is one finding, whatever the rank."""
    joined: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = {}
    skipped: dict[str, int] = {}
    for rank, report in reports.items():
        if (stopped := report.get("stopped")) is not None:
            if not any(other["findings"] for other in reports.values()):
                raise ProgramFailed(
                    f"scanning stopped on rank {rank}, so nothing is known of what ran after: {stopped}"
                )
            skipped[f"all that ran after scanning stopped on rank {rank}: {stopped}"] = 1
        for found in report["findings"]:
            key = tuple(found[name] for name in ("kind", "phase", "module", "op", "node"))
            joined.setdefault(key, []).append((rank, found))
        for phrase, count in report["skipped"].items():
            skipped[phrase] = skipped.get(phrase, 0) + count
    findings = []
    for same in joined.values():
        first = same[0][1]
        widest = max((found for _, found in same), key=lambda found: found["elements"])
        findings.append(
            Finding(
                op=first["op"],
                module=first["module"],
                phase=first["phase"],
                node=first["node"],
                kind=first["kind"],
                disagreed=sum(found["disagreed"] for _, found in same),
                executed=sum(found["executed"] for _, found in same),
                first_step=min(found["first_step"] for _, found in same),
                outputs=tuple(sorted({slot for _, found in same for slot in found["outputs"]})),
                elements=widest["elements"],
                of=widest["of"],
                line=first["line"],
                ranks=tuple(rank for rank, _ in same),
            )
        )
    findings.sort(key=lambda finding: (-finding.disagreed, finding.op, finding.module))
    return ScanAnswer(
        tuple(findings),
        sum(report["executed"] for report in reports.values()),
        max(report["steps"] for report in reports.values()),
        len(reports),
        poison,
        dict(sorted(skipped.items())),
    )


def describe(answer: ScanAnswer) -> list[tuple[str, list[str]]]:
    """Return the answer for people, as labelled lines; the headline is `headline`."""
    parts: list[tuple[str, list[str]]] = []
    for finding in answer.findings:
        where = f"{finding.module or 'outside modules'}, {finding.phase}"
        lines = [
            f"{finding.op}{f' in {finding.node}' if finding.node else ''}",
            f"{where}: disagreed in {finding.disagreed} of {finding.executed} executions, from step "
            f"{finding.first_step} on, in up to {finding.elements:,} of {finding.of:,} elements of "
            f"{', '.join(finding.outputs)}",
        ]
        if finding.line:
            lines.append(word_line(finding.line))
        parts.append((finding.kind, [*lines, finding.remedy]))
    if answer.skipped:
        lines = [f"{count:,} x {phrase}" for phrase, count in answer.skipped.items()]
        parts.append(("not executed again", lines))
    return parts


def headline(answer: ScanAnswer) -> str:
    """Return the first line of the answer."""
    amount = f"{answer.executed:,} operations in {counted(answer.steps, 'step')}"
    if answer.ranks > 1:
        amount += f" on {counted(answer.ranks, 'rank')}"
    if not answer.findings:
        return f"CLEAN: each of {amount} agreed with itself."
    count = len(answer.findings)
    return (
        f"FOUND {count} operation{'s' * (count != 1)} that disagree{'s' * (count == 1)} with "
        f"{'itself' if count == 1 else 'themselves'}, of {amount}."
    )
