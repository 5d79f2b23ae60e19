from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bitcheck import errors
from bitcheck.answer import Cause
from bitcheck.cli import COMMANDS, main
from bitcheck.events import PHASES, Level

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    path for pattern in ("*.md", "docs/*.md", "tests/*.md", "benchmarks/*.md") for path in sorted(ROOT.glob(pattern))
]
EXAMPLE = ROOT / "docs/examples/train.py"


def section(heading: str) -> str:
    """Return what stands under a heading of README."""
    _, _, rest = README.partition(f"\n## {heading}\n")
    assert rest, f"README has no section {heading!r}"
    return rest.partition("\n## ")[0]


def words_of_table(text: str) -> list[str]:
    """Return the first cell of each row whose first cell is code."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def after_example(name: str) -> str:
    """Return the code block that follows `<!-- example: NAME -->` in README."""
    _, _, rest = README.partition(f"<!-- example: {name} -->")
    return blocks(rest)[0]


# --- the command line


def test_the_command_reference_is_what_the_commands_say() -> None:
    reference = runpy.run_path(str(ROOT / "docs/build_cli_reference.py"))["render_reference"]()
    assert (ROOT / "docs/cli.md").read_text(encoding="utf-8") == reference, "run `make docs`"


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield each call of bitcheck in the code blocks of a document, as words."""
    for block in blocks(text):
        for line in block.splitlines():
            if match := re.match(r"(?:\$ )?(bitcheck .*)", line):
                yield shlex.split(match[1], comments=True)


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that some words call, and what follows its name."""
    command: click.Command = main
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"`{shlex.join(words)}`: no command {rest[0]!r}"
        command, rest = found, rest[1:]
    return command, rest


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "cli.md"], ids=lambda path: path.name)
def test_every_call_of_bitcheck_in_a_document_has_a_command_and_its_options(path: Path) -> None:
    for words in command_lines(path.read_text(encoding="utf-8")):
        command, rest = find_command(words)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        own = rest[: rest.index("--")] if "--" in rest else rest
        unknown = (
            {word.partition("=")[0] for word in own if word.startswith("-")} - known - {"--help", "-h", "--version"}
        )
        assert not unknown, f"`{shlex.join(words)}`: no option {unknown}"


def test_readme_calls_bitcheck_at_all() -> None:
    called = {words[1] for words in command_lines(README)}
    assert {"run", "diff", "hash", "verify", "selfcheck"} <= called


def test_the_commands_in_readme_are_those_that_there_are_with_their_lines_of_help() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section("Commands"), flags=re.MULTILINE)
    assert rows == [(name, COMMANDS[name]) for name in main.list_commands(click.Context(main))]


def test_help_names_every_command_that_has_a_file() -> None:
    commands = main.list_commands(click.Context(main))
    assert {"run", "diff", "hash"} <= set(commands)
    for name in commands:
        command = main.get_command(click.Context(main), name)
        assert command is not None and command.name == name
        assert command.help, f"bitcheck {name} has no help"


# --- tables of README against the code


def test_the_causes_in_readme_are_those_that_diff_gives() -> None:
    assert words_of_table(section("What a verdict means")) == [str(cause) for cause in ORDER_OF_CAUSES]
    assert set(ORDER_OF_CAUSES) == set(Cause)


ORDER_OF_CAUSES = [
    *(Cause.DATA, Cause.RNG, Cause.INITIAL_STATE, Cause.RESTORE, Cause.FORWARD, Cause.BACKWARD, Cause.COMPUTE),
    *(Cause.COLLECTIVE, Cause.OPTIMIZER, Cause.HYPERPARAMETER, Cause.STRUCTURE, Cause.ENDED_EARLY),
]


def test_the_levels_and_phases_in_readme_are_those_that_are_recorded() -> None:
    words = words_of_table(section("What is recorded"))
    assert words == [str(level) for level in Level] + [str(phase) for phase in PHASES]


def test_the_phases_of_the_levels_in_readme_are_all_phases() -> None:
    state, module = re.findall(r"^\| `(?:state|module)` \|(.*)\|$", section("What is recorded"), flags=re.MULTILINE)
    named = [*re.findall(r"`(\w+)`", state), *re.findall(r"`(\w+)`", module)]
    assert sorted(named) == sorted(PHASES)


def test_the_exit_statuses_in_readme_are_those_of_the_code() -> None:
    told = dict(re.findall(r"\*\*(\d)\*\* (\w+)", section("Exit status")))
    assert told == {
        str(errors.EXIT_IDENTICAL): "identical",
        str(errors.EXIT_DIFFERENT): "different",
        str(errors.EXIT_TROUBLE): "trouble",
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_every_file_named_in_a_document_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for name in re.findall(r"`((?:bitcheck|hooks|reference_runs|tests|benchmarks|docs)/[\w./]*)`", text):
        assert (ROOT / name).exists() or (path.parent / name).exists(), f"{path.name} names {name}"


def test_every_number_in_the_table_of_costs_is_in_the_result_it_names() -> None:
    """1.10 may be told as it is, 1.071 rounded to 1.07."""
    result = ""
    for row in re.findall(r"^\| (?!what|-)(.*) \|$", section("Cost"), flags=re.MULTILINE):
        _, measured, where = row.rsplit(" | ", 2)
        if target := re.search(r"\(([^)]+)\)", where):
            result = (ROOT / target[1]).read_text(encoding="utf-8")
        there = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", result)]
        for number in re.findall(r"(?<![-\w.])\d+(?:\.\d+)?(?= times| us|$)", measured):
            digits = len(number.partition(".")[2])
            assert any(abs(value - float(number)) <= 0.5 * 10**-digits + 1e-9 for value in there), f"{number}: {row}"


def test_every_benchmark_is_listed_and_every_listed_one_is_there() -> None:
    listed = words_of_table((ROOT / "benchmarks/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if "__" not in path.name)


def test_no_benchmark_hides_a_module_of_the_standard_library() -> None:
    """`python benchmarks/digest.py` puts that folder first on the path: a `bisect.py` there broke every other one."""
    assert not {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & sys.stdlib_module_names


def test_make_has_every_target_that_a_document_calls() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    calls = re.compile(r"(?:`|^ *)make (\w+)", flags=re.MULTILINE)
    called = {name for path in DOCUMENTS for name in calls.findall(path.read_text(encoding="utf-8"))}
    assert {"setup", "demo", "test", "check", "bench"} <= targets
    assert {"demo", "test", "docs"} <= called <= targets


def test_the_ci_script_runs_what_readme_tells_people_to_run() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "\nmake test" in script and "\nmake check" in script
    assert "\nmake test " in section("Try it")


# --- examples are run


def shell(command: str, cwd: Path) -> str:
    """Run a command line of README in a folder, with this Python's bitcheck."""
    words = shlex.split(command)
    if words[0] == "bitcheck":
        words[:1] = [sys.executable, "-m", "bitcheck"]
    words = [sys.executable if word == "python" else word for word in words]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the example recorded fresh, and resumed with and without its generator's state."""
    folder = tmp_path_factory.mktemp("example")
    program = EXAMPLE.read_text(encoding="utf-8")
    forgetful = program.replace('        torch.set_rng_state(checkpoint["rng"])\n', "")
    assert forgetful != program
    (folder / "train.py").write_text(program, encoding="utf-8")
    (folder / "forgetful.py").write_text(forgetful, encoding="utf-8")
    shell("bitcheck run -o runs/fresh -- python train.py --steps 8", folder)
    shell("python train.py --steps 4 --save half.pt", folder)
    shell("bitcheck run -o runs/whole --start-step 4 -- python train.py --steps 8 --resume half.pt", folder)
    shell("bitcheck run -o runs/resumed --start-step 4 -- python forgetful.py --steps 8 --resume half.pt", folder)
    return folder


def test_the_example_resumed_with_all_its_state_is_identical(resumed: Path) -> None:
    answer = shell("bitcheck diff runs/fresh runs/whole", resumed)
    assert answer.startswith("IDENTICAL over 4 steps")


def without_amounts(text: str) -> str:
    """Return a text without its line breaks, and without how much was recorded: that grows with bitcheck."""
    return re.sub(r"[\d,]+( other)? events( \([\d.]+ MB\))?", "N events", " ".join(text.split()))


def test_the_output_that_readme_shows_is_what_the_example_prints(resumed: Path) -> None:
    command, _, shown = after_example("diff").partition("\n")
    assert command.startswith("$ ")
    assert without_amounts(shell(command[2:], resumed)) == without_amounts(shown)


def test_the_code_that_readme_shows_for_use_from_inside_a_program_runs(tmp_path: Path) -> None:
    program = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
ema = [parameter.detach().clone() for parameter in model.parameters()]
batches = torch.randn(4, 5, 3)
"""
    (tmp_path / "program.py").write_text(program + after_example("record"), encoding="utf-8")
    shell("python program.py", tmp_path)
    assert shell("bitcheck diff runs/fresh runs/fresh", tmp_path).startswith("IDENTICAL over 4 steps")
