"""A gate's answer for people: one screen of text, a Markdown summary for a CI job's page, JUnit XML.

    FAIL: run 2 differs from run 1 in step 3: forward/body:out (cause: forward)

    where        step 3, forward, body, op Linear
                 forward/body:out  float32 [4, 4]  within elements 0 to 15 of 16
    why          ...
    what to do   ...

    runs         run 1: 6 steps, 1 rank, exit status 0, 3.2 s
                 run 2: stopped after step 3, as soon as it differed, 2.1 s
    control      one bit of grad/body.weight:grad in step 4 was flipped in a copy, and was seen

Whoever reads it need not know bitcheck: the last lines say what was done and how to look closer.
"""

from __future__ import annotations

import shlex
from typing import TextIO
from xml.etree import ElementTree

from bitcheck.gate_answer import Comparison, GateResult, GateVerdict, ReplicaCheck, RunReport
from bitcheck.report.replicas import replicas_headline, replicas_sections
from bitcheck.report.text import Section, print_report, render_plain, sections
from bitcheck.statistics import pairs_needed, percent, rate_bound
from bitcheck.trials import command_line
from bitcheck.wording import counted

_WORDS = {
    GateVerdict.PASS: "PASS",
    GateVerdict.FAIL: "FAIL",
    GateVerdict.INCOMPARABLE: "INCOMPARABLE",
    GateVerdict.INSUFFICIENT: "NO VERDICT",
    GateVerdict.PROGRAM_FAILED: "PROGRAM FAILED",
    GateVerdict.BROKEN: "GATE BROKEN",
}
_COLOURS = {GateVerdict.PASS: "green", GateVerdict.FAIL: "red"}
_FROM_DIFF = ("where", "why", "what to do")
_FROM_REPLICAS = (*_FROM_DIFF, "also", "odd ranks", "groups")
MAX_DIFFERENCES = 12
ABOUT = (
    "The gate runs one training command several times and compares every recorded tensor (batches, gradients, "
    "parameters, optimizer state) bit for bit; a difference means that the training does not repeat itself."
)


def print_gate(result: GateResult, file: TextIO | None = None) -> None:
    """Print a gate's answer on `file` (standard output)."""
    print_report(gate_headline(result), _COLOURS.get(result.verdict, "yellow"), gate_sections(result), file)


def render_gate(result: GateResult) -> str:
    """Return a gate's answer as plain text, as `print_gate` writes it into a pipe."""
    return render_plain(gate_headline(result), gate_sections(result))


def gate_headline(result: GateResult) -> str:
    """Return the first line: the verdict, and where."""
    word = _WORDS[result.verdict]
    if result.verdict is not GateVerdict.FAIL:
        return f"{word}: {result.explanation.splitlines()[0]}"
    broken = [each for each in result.variations if each.outcome == "breaks"]
    failing = result.failing
    if failing is None and broken:
        first = broken[0].answer.first
        where = "" if first is None else f" in step {first.step}: {first.site}"
        return f"{word}: {broken[0].name} ({broken[0].change}) changes the bits{where}"
    if failing is None and (check := result.failing_replicas) is not None:
        return f"{word}: the ranks of {check.run} {replicas_headline(check.answer).replace('DIFFER', 'differ', 1)}"
    assert failing is not None
    first = failing.answer.first
    pair = f"{failing.candidate} differs from {_name(failing.baseline)}"
    if first is None:
        return f"{word}: {pair}: equal as far as the shorter one goes, and that one ended early"
    rank = f" on rank {first.rank}" if failing.answer.compared.ranks > 1 else ""
    return f"{word}: {pair} in step {first.step}{rank}: {first.site} (cause: {failing.answer.cause})"


def gate_sections(result: GateResult) -> list[Section]:
    """Return everything below the headline."""
    parts: list[Section] = []
    failing = result.failing
    replicas = result.failing_replicas if failing is None else None
    if failing is not None:
        parts += [part for part in sections(failing.answer) if part[0] in _FROM_DIFF]
    elif replicas is not None:
        parts += [part for part in replicas_sections(replicas.answer) if part[0] in _FROM_REPLICAS]
    else:
        rest = result.explanation.splitlines()[1:] + list(result.problems[1:])
        if result.verdict is GateVerdict.FAIL:
            rest = [result.explanation]
        if rest:
            parts.append(("why", rest))
        if result.remedy:
            parts.append(("what to do", [result.remedy]))
    if result.environment:
        shown = result.environment[:MAX_DIFFERENCES]
        lines = [f"{each.key}: {_or_unset(each.baseline)} -> {_or_unset(each.candidate)}" for each in shown]
        if len(shown) < len(result.environment):
            lines.append(f"and {len(result.environment) - len(shown)} more (in gate.json)")
        parts.append(("environment", ["golden -> here", *lines]))
    if parts:
        parts.append(("", [""]))
    parts.append(("command", [command_line(result.plan.command)]))
    if result.runs:
        parts.append(("runs", [_describe_run(run) for run in result.runs]))
    if result.comparisons:
        parts.append(("compared", [_describe_comparison(each) for each in result.comparisons]))
    if result.variations:
        parts.append(("varied", [_describe_variation(result, number) for number in range(len(result.variations))]))
    if result.control is not None:
        parts.append(("control", [_describe_control(result)]))
    if result.replicas:
        parts.append(("replicas", [_describe_replicas(each) for each in result.replicas]))
    if (planted := result.replica_control) is not None:
        what = f"one bit of rank {planted.rank}'s copy of {planted.site} in step {planted.step} was flipped"
        seen = "and was seen" if planted.has_passed else str(planted.problem)
        parts.append(("", [f"{what} in a copy of run 1, {seen}"]))
    if result.num_identical_pairs:
        parts.append(("chance", describe_chance(result)))
    unobserved = _unobserved(result)
    if unobserved:
        parts.append(("unobserved", unobserved))
    parts.append(("files", [f"{result.plan.folder}: runs, logs and gate.json"]))
    if failing is not None:
        parts.append(("look closer", [_diff_command(result, failing)]))
    elif replicas is not None:
        paths = {run.name: run.path for run in result.runs}
        parts.append(("look closer", [f"bitcheck replicas {shlex.quote(paths[replicas.run])} --all"]))
    if result.verdict is not GateVerdict.PASS:
        parts.append(("about", [ABOUT]))
    return parts


def describe_chance(result: GateResult) -> list[str]:
    """Return what the identical pairs prove, and what would prove more."""
    pairs, confidence = result.num_identical_pairs, result.plan.confidence
    bound = rate_bound(pairs, confidence)
    noun = "1 identical pair" if pairs == 1 else f"{pairs} identical pairs"
    lines = [f"{noun}: with {percent(confidence)} confidence fewer than {percent(bound)} of runs differ from the first"]
    for rate in (0.3, 0.05):
        if rate < bound:
            runs = pairs_needed(rate, confidence) + 1
            lines.append(f"to show that fewer than {percent(rate)} do: {runs} runs (--rate {rate:g})")
            break
    return lines


def _describe_run(run: RunReport) -> str:
    if run.role == "golden":
        return f"golden {run.path}: {_steps(run)}, {counted(run.ranks, 'rank')}"
    facts = [_steps(run), counted(run.ranks, "rank")] if run.ranks else ["nothing recorded"]
    if run.was_stopped:
        facts.append("stopped by the gate")
    elif run.exit_status is not None:
        facts.append(f"exit status {run.exit_status}")
    return f"{run.name}: {', '.join(facts)}, {run.seconds:.1f} s"


def _describe_comparison(each: Comparison) -> str:
    answer = each.answer
    pair = f"{each.candidate} with {_name(each.baseline)}"
    steps = counted(answer.compared.steps, "step")
    amount = f"{steps}, {counted(answer.compared.ranks, 'rank')}, {answer.compared.events:,} events"
    if each.gaps:
        return f"{pair}: too little to say ({amount})"
    return f"{pair}: {answer.verdict} over {amount}"


def _describe_replicas(each: ReplicaCheck) -> str:
    answer = each.answer
    return f"{each.run}: {answer.verdict} over {counted(answer.ranks, 'rank')}, {answer.tensors:,} tensors"


def _describe_variation(result: GateResult, number: int) -> str:
    each = result.variations[number]
    text = f"{each.name} ({each.change}): {each.outcome}"
    if each.outcome == "breaks" and each.answer.first is not None:
        text += f", first in step {each.answer.first.step}: {each.answer.first.site} (cause: {each.answer.cause})"
    if each.outcome == "no effect":
        text += f", so nothing is known: {each.no_effect}"
    return text


def _describe_control(result: GateResult) -> str:
    control = result.control
    assert control is not None
    what = f"one bit of {control.site} in step {control.step} was flipped in a copy of run 1"
    return f"{what}, and was seen" if control.has_passed else f"{what}: {control.problem}"


def _unobserved(result: GateResult) -> list[str]:
    found: dict[str, int] = {}
    for each in result.comparisons:
        for what, count in each.answer.unobserved.items():
            found[what] = max(found.get(what, 0), count)
    return [f"{count:,} x {what}" for what, count in found.items()]


def _diff_command(result: GateResult, failing: Comparison) -> str:
    paths = {run.name: run.path for run in result.runs}
    return f"bitcheck diff {shlex.join([paths[failing.baseline], paths[failing.candidate]])}"


def _name(name: str) -> str:
    return "the golden run" if name == "golden" else name


def _steps(run: RunReport) -> str:
    if run.steps is None:
        return "no whole step"
    first, last = run.steps
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _or_unset(value: str | None) -> str:
    return "unset" if value is None else value


def render_markdown(result: GateResult) -> str:
    """Return a summary in Markdown, as $GITHUB_STEP_SUMMARY takes it."""
    lines = [f"## bitcheck gate: {_WORDS[result.verdict]}", "", f"**{_escape(gate_headline(result))}**", ""]
    lines += ["| run | steps | ranks | ended | seconds |", "|---|---|---|---|---|"]
    for run in result.runs:
        ended = "stopped" if run.was_stopped else "" if run.exit_status is None else str(run.exit_status)
        lines.append(f"| {run.name} | {_steps(run)} | {run.ranks} | {ended} | {run.seconds:.1f} |")
    lines.append("")
    for label, items in gate_sections(result):
        if label and label not in ("runs", "command"):
            lines += [f"- **{label}**: " + "<br>".join(map(_escape, items))]
    lines += ["", "```", command_line(result.plan.command), "```", ""]
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Keep site names and the like from being taken for markup."""
    text = text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{character}" if character in "`*_[]|#" else character for character in text)


def render_junit(result: GateResult) -> str:
    """Return JUnit XML: one test case for each comparison and variation, one for the control.

    A difference is a `failure`; whatever kept the gate from a verdict is an `error`.
    """
    suite = ElementTree.Element("testsuite", name="bitcheck gate")
    cases = failures = errors = 0

    def add(name: str, seconds: float = 0.0) -> ElementTree.Element:
        nonlocal cases
        cases += 1
        case = ElementTree.SubElement(suite, "testcase", classname="bitcheck.gate", name=name)
        case.set("time", f"{seconds:.3f}")
        return case

    seconds = {run.name: run.seconds for run in result.runs}
    if result.control is not None:
        case = add("one flipped bit is seen")
        if not result.control.has_passed:
            errors += 1
            _complain(case, "error", "broken", result.explanation, "")
    for each in result.comparisons:
        case = add(f"{each.candidate} is identical to {_name(each.baseline)}", seconds.get(each.candidate, 0.0))
        if not each.is_identical and not each.gaps:
            failures += 1
            _complain(case, "failure", str(each.answer.cause), gate_headline(result), render_gate(result))
    for check in result.replicas:
        case = add(f"the ranks of {check.run} hold equal copies")
        if check.answer.exit_status == 1:
            failures += 1
            _complain(case, "failure", str(check.answer.cause), gate_headline(result), render_gate(result))
    for varied in result.variations:
        case = add(f"the bits hold with {varied.name} changed ({varied.change})")
        if varied.outcome == "breaks":
            failures += 1
            _complain(case, "failure", str(varied.answer.cause), varied.answer.explanation, varied.answer.remedy)
        elif varied.outcome == "no effect":
            ElementTree.SubElement(case, "skipped", message=_legal(varied.no_effect or ""))
    if result.exit_status == 2 and result.verdict is not GateVerdict.BROKEN:
        errors += 1
        _complain(add("the gate reaches a verdict"), "error", str(result.verdict), result.explanation, result.remedy)
    suite.set("tests", str(cases))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    suite.set("time", f"{sum(seconds.values()):.3f}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _complain(case: ElementTree.Element, kind: str, type_: str, message: str, text: str) -> None:
    element = ElementTree.SubElement(case, kind, type=type_, message=_legal(message))
    element.text = _legal(text)


def _legal(text: str) -> str:
    """Replace what XML 1.0 cannot hold, as escape sequences in a failed program's output."""
    return "".join(
        character if character in "\t\n\r" or " " <= character <= "\ud7ff" or "\ue000" <= character <= "\ufffd" else "?"
        for character in text
    )
