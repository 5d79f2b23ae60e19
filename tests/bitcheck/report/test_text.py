"""Reports as people read them, compared whole; `python -m tests.bitcheck.report.golden` writes them again."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from bitcheck.answer import Answer, Cause, Origin
from bitcheck.diff import diff_runs
from bitcheck.report.text import format_bytes, print_answer, print_report
from tests.bitcheck.made_up_runs import make_run
from tests.bitcheck.report.golden import FOLDER, REPORTS, render

LONG_NAME = "layers[0]." + ".".join(f"block_{number}[0]" for number in range(10)) + ".a_name_that_goes_on_and_on"


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_reads_as_it_should(name: str) -> None:
    assert render(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_every_report_says_its_verdict_in_the_first_line() -> None:
    for name in REPORTS:
        first = render(name).splitlines()[0]
        assert first.startswith(("IDENTICAL", "DIVERGED", "INCOMPARABLE")), name


def answer_with_long_name() -> Answer:
    answer = diff_runs(make_run(), make_run(faults=[(0, 2, "forward/blocks.1:out")]))
    assert answer.first is not None
    assert len(LONG_NAME) >= 120
    origin = replace(answer.first, site=f"forward/{LONG_NAME}:out", module=LONG_NAME)
    return replace(answer, first=origin, origins=(origin, origin), explanation=f"{LONG_NAME} gave other bits.")


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_long_name_with_brackets_survives_a_pipe_in_one_piece() -> None:
    out = io.StringIO()
    print_answer(answer_with_long_name(), file=out)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith(f"forward/{LONG_NAME}:out (cause: forward)")
    assert any(line.endswith(f"why          {LONG_NAME} gave other bits.") for line in lines)
    assert "\x1b" not in out.getvalue()


def test_a_long_name_with_brackets_is_folded_on_a_terminal_and_nothing_of_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_answer(answer_with_long_name(), file=out)
    plain = "".join(_without_styles(out.getvalue()).split())
    assert plain.count(LONG_NAME) >= 3
    assert "\x1b[" in out.getvalue()
    assert all(len(line) <= 80 for line in _without_styles(out.getvalue()).splitlines())


def test_no_color_is_honoured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    print_answer(answer_with_long_name(), file=out)
    assert "\x1b[3" not in out.getvalue()  # no colour; bold may stay


def _without_styles(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def answer_with_origins(count: int) -> Answer:
    answer = diff_runs(make_run(), make_run(faults=[(0, 2, "forward/blocks.1:out")]))
    assert answer.first is not None
    origins = tuple(replace(answer.first, site=f"forward/blocks.{number}:out") for number in range(count))
    return replace(answer, origins=origins)


def test_many_origins_are_cut_short_and_all_lists_them() -> None:
    short, whole = io.StringIO(), io.StringIO()
    print_answer(answer_with_origins(40), file=short)
    print_answer(answer_with_origins(40), file=whole, show_all=True)
    assert "and 35 more (--all lists them)" in short.getvalue()
    assert "blocks.39" not in short.getvalue()
    assert "blocks.39" in whole.getvalue()


def test_a_scalar_shows_both_values() -> None:
    out = io.StringIO()
    print_answer(diff_runs(make_run(), make_run(lr={2: 0.05})), file=out)
    assert "0.1 -> 0.05" in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (7 * 10**15, "7000.0 TB")]
)
def test_bytes_are_written_in_decimal_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_an_item_of_a_report_is_one_line_in_a_pipe() -> None:
    out = io.StringIO()
    print_report("TITLE", "red", [("first", ["a " * 200, "[bold]b[/bold]"]), ("second label", ["c"])], out)
    assert out.getvalue().splitlines() == [
        "TITLE",
        "",
        "first          " + ("a " * 200).rstrip(),
        "               [bold]b[/bold]",
        "second label   c",
    ]


def origin_json(**changes: Any) -> dict[str, Any]:
    answer = diff_runs(make_run(), make_run(faults=[(0, 2, "forward/blocks.1:out")]))
    assert answer.first is not None
    return replace(answer.first, **changes).to_json()


def test_an_origin_has_the_keys_of_the_schema_and_others_only_where_they_say_something() -> None:
    keys = ["step", "rank", "phase", "site", "module", "op", "tensor", "dtype", "shape", "elements", "cause"]
    assert list(origin_json()) == keys
    assert list(origin_json(also=("x",), missing_in="baseline", ranks=(0, 1), is_eval=True)) == [
        *keys,
        "also",
        "missing_in",
        "ranks",
        "evaluation",
    ]


def test_causes_are_the_words_of_the_schema() -> None:
    assert {str(cause) for cause in Cause} == {
        "data", "rng", "initial-state", "restore", "forward", "backward", "compute", "collective", "optimizer",
        "hyperparameter", "structure", "ended-early",
    }  # fmt: skip
    assert issubclass(Origin, object)
