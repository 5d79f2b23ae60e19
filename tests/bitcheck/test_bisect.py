"""`bisect kernels`: planted sets of switches are named, ends refused, logs replayed and gone on from."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from bitcheck.bisect import BisectResult, EndRefused, OutOfRuns, Search, find_minimal_sets
from bitcheck.bisect_log import LogEnded, LoggedOracle, LogHeader, read_log
from bitcheck.coverage import Demand
from bitcheck.errors import BitcheckError, ProgramFailed, UsageError
from bitcheck.launch import Ending, Watch
from bitcheck.pairs import NoVerdict, PairRunner
from bitcheck.probes import SwitchProbe, point_label
from bitcheck.samples import Point, Sample
from bitcheck.settings import Options
from bitcheck.switches import Form, KernelSwitch, SwitchSet, read_switches, reference_switches
from bitcheck.trials import Trial
from tests.bitcheck.made_up_programs import Behaviour, MadeUpPrograms, write_run

NAMES = [f"switch-{number:02}" for number in range(16)]


class Planted:
    """Points with one of some sets in them differ, each set with its rate."""

    def __init__(self, sets: Iterable[Iterable[str]], rate: float = 1.0, seed: int = 0) -> None:
        self.sets = [frozenset(one) for one in sets]
        self.rate, self.random = rate, random.Random(seed)
        self.asked: list[Point] = []

    def price(self, point: Point) -> int:
        return 1 if point in self.asked else 2

    def __call__(self, point: Point) -> Sample:
        price = self.price(point)
        self.asked.append(point)
        return Sample(any(one <= point and self.random.random() < self.rate for one in self.sets), price)


def find(planted: Planted, confidence: float = 0.95, rate: float = 0.3) -> BisectResult:
    return find_minimal_sets(NAMES, planted, Search(confidence, rate))


# ---------------------------------------------------------------------- the search


@pytest.mark.parametrize("number", range(16))
def test_a_single_switch_is_named_in_few_runs(number: int) -> None:
    planted = Planted([[NAMES[number]]])
    result = find(planted)
    assert result.sets == (frozenset({NAMES[number]}),)
    assert result.num_runs <= 25
    assert result.sure >= 0.95


@pytest.mark.parametrize("pair", [(0, 15), (7, 8), (0, 1), (14, 15), (3, 12)])
def test_a_pair_that_diverges_only_together_is_named_as_one_set(pair: tuple[int, int]) -> None:
    wanted = frozenset(NAMES[number] for number in pair)
    assert find(Planted([wanted])).sets == (wanted,)


def test_two_switches_that_diverge_each_alone_are_two_sets() -> None:
    planted = Planted([[NAMES[2]], [NAMES[11]]])
    assert set(find(planted).sets) == {frozenset({NAMES[2]}), frozenset({NAMES[11]})}


@pytest.mark.parametrize(
    "sets",
    [
        [[0], [3, 7]],
        [[0, 1], [1, 2]],
        [[0, 1], [2, 3]],
        [[4, 5, 6]],
        [[0], [1], [2], [3]],
        [[0, 1], [0, 2], [0, 3]],
        [list(range(16))],
    ],
)
def test_every_minimal_set_is_found(sets: list[list[int]]) -> None:
    wanted = {frozenset(NAMES[number] for number in one) for one in sets}
    assert set(find(Planted(wanted)).sets) == wanted


def test_all_switches_at_fault_are_each_a_set() -> None:
    assert len(find(Planted([[name] for name in NAMES])).sets) == 16


@pytest.mark.parametrize("seed", range(8))
def test_a_switch_that_shows_in_three_of_ten_pairs_is_named(seed: int) -> None:
    wanted = frozenset(random.Random(seed).sample(NAMES, 1 + seed % 2))
    result = find(Planted([wanted], rate=0.3, seed=seed), confidence=0.99)
    assert result.sets == (wanted,)
    assert 0.1 < result.rate < 0.6


def test_planted_sets_are_found_with_the_precision_that_is_claimed() -> None:
    exact = 0
    for seed in range(40):
        draw = random.Random(1000 + seed)
        wanted = frozenset(draw.sample(NAMES, 1 + seed % 2))
        exact += find(Planted([wanted], rate=0.3 if seed % 4 == 0 else 1.0, seed=seed)).sets == (wanted,)
    assert exact >= 38, "at 95 % confidence 2 of 40 may be missed"


def test_a_set_is_named_only_if_it_was_itself_seen_to_diverge() -> None:
    planted = Planted([[NAMES[4], NAMES[9]]], rate=0.3, seed=3)
    result = find(planted)
    assert all(differed >= 1 for differed, _ in result.shown)


def test_the_rate_one_spares_repeats() -> None:
    sure, careful = Planted([[NAMES[5]]]), Planted([[NAMES[5]]])
    assert find(sure, rate=1.0).num_runs < find(careful).num_runs
    assert find(sure, rate=1.0).sure == 1.0


def test_a_miss_contradicts_the_rate_one_and_is_said_to() -> None:
    class Forgetful(Planted):
        def __call__(self, point: Point) -> Sample:
            sample = super().__call__(point)
            return sample._replace(diverged=False) if point == frozenset(NAMES[:8]) else sample

    with pytest.raises(BitcheckError, match="the same switches gave identical runs once"):
        find(Forgetful([[NAMES[5]]]), rate=1.0)


def test_a_reproducible_end_that_diverges_is_refused() -> None:
    with pytest.raises(EndRefused) as caught:
        find(Planted([[]]))
    assert caught.value.end == "reproducible"


@pytest.mark.parametrize("seed", range(6))
def test_a_reproducible_end_that_diverges_by_chance_is_refused_and_no_switch_is_named(seed: int) -> None:
    with pytest.raises(EndRefused) as caught:
        find(Planted([[]], rate=0.3, seed=seed))
    assert caught.value.end == "reproducible"


def test_a_suspect_end_that_does_not_diverge_is_refused_after_as_many_runs_as_the_confidence_asks() -> None:
    planted = Planted([])
    with pytest.raises(EndRefused) as caught:
        find(planted)
    assert caught.value.end == "suspect"
    assert planted.asked.count(frozenset(NAMES)) == 13


def test_no_more_programs_are_run_than_allowed() -> None:
    planted = Planted([[NAMES[3]]])
    with pytest.raises(OutOfRuns):
        find_minimal_sets(NAMES, planted, Search(max_runs=9))
    assert sum(2 if planted.asked.index(point) == place else 1 for place, point in enumerate(planted.asked)) <= 9


# ---------------------------------------------------------------------- log and replay


SEARCH = Search()
HEADER = LogHeader.of("program", NAMES, SEARCH, ("python", "train.py"))


def test_a_replayed_log_gives_the_same_answer_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bisect.jsonl"
    first = find_minimal_sets(NAMES, LoggedOracle(path, HEADER, Planted([[NAMES[6]]], 0.3, 1)), SEARCH)
    before = path.read_bytes()
    assert find_minimal_sets(NAMES, LoggedOracle(path, HEADER, None), SEARCH) == first
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, cut: int) -> None:
    whole = Planted([[NAMES[6], NAMES[9]]])
    wanted = find_minimal_sets(NAMES, LoggedOracle(tmp_path / "whole.jsonl", HEADER, whole), SEARCH)

    class Interrupted(Planted):
        def __call__(self, point: Point) -> Sample:
            if len(self.asked) == cut:
                raise KeyboardInterrupt
            return super().__call__(point)

    path = tmp_path / "cut.jsonl"
    first = Interrupted(whole.sets)
    with pytest.raises(KeyboardInterrupt):
        find_minimal_sets(NAMES, LoggedOracle(path, HEADER, first), SEARCH)
    with path.open("ab") as log:
        log.write(b'{"point": ["switch-0')  # killed while it wrote
    rest = Planted(whole.sets)
    oracle = LoggedOracle(path, HEADER, rest)
    assert find_minimal_sets(NAMES, oracle, SEARCH).sets == wanted.sets
    assert oracle.num_replayed == cut
    assert first.asked + rest.asked == whole.asked
    assert find_minimal_sets(NAMES, LoggedOracle(path, HEADER, None), SEARCH).sets == wanted.sets


def test_a_log_that_stops_too_early_has_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "bisect.jsonl"
    find_minimal_sets(NAMES, LoggedOracle(path, HEADER, Planted([[NAMES[6]]])), SEARCH)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))
    with pytest.raises(LogEnded, match="after 5 samples"):
        find_minimal_sets(NAMES, LoggedOracle(path, HEADER, None), SEARCH)


def test_the_log_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bisect.jsonl"
    LoggedOracle(path, HEADER, Planted([]))
    with pytest.raises(UsageError, match="another search"):
        LoggedOracle(path, LogHeader.of("other program", NAMES, SEARCH, ()), Planted([]))


def test_more_runs_may_be_allowed_to_a_search_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "bisect.jsonl"
    few = Search(max_runs=8)
    with pytest.raises(OutOfRuns):
        find_minimal_sets(NAMES, LoggedOracle(path, HEADER, Planted([[NAMES[2]]])), few)
    header = LogHeader.of("program", NAMES, Search(max_runs=100), ("python", "train.py"))
    result = find_minimal_sets(NAMES, LoggedOracle(path, header, Planted([[NAMES[2]]])), Search(max_runs=100))
    assert result.sets == (frozenset({NAMES[2]}),)


@pytest.mark.parametrize(
    "text",
    ["", "not json\n", '{"schema": "bitcheck.diff/1"}\n', '{"schema": "bitcheck.bisect-log/9"}\n', '["a"]\n'],
)
def test_a_file_that_is_no_log_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"some\.jsonl"):
        read_log(path)


def test_a_damaged_line_of_a_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bisect.jsonl"
    LoggedOracle(path, HEADER, Planted([]))
    with path.open("a") as log:
        log.write('{"point": ["unknown"], "diverged": true, "num_runs": 1, "where": null}\n')
    with pytest.raises(UsageError, match="line 2"):
        read_log(path)


# ---------------------------------------------------------------------- switch files


FILE = """
command = ["python", "train.py", "{switches}", "--quiet"]
[switches."attention"]
about = "backward of attention"
reproducible = { args = ["--attention", "math"] }
suspect = { args = ["--attention", "flash"] }
[switches."workspace"]
suspect = { env = { CUBLAS_WORKSPACE_CONFIG = ":16:8" }, unset = ["OTHER"] }
"""


def write_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "switches.toml"
    path.write_text(text)
    return path


def test_a_file_of_switches_gives_commands_and_variables(tmp_path: Path) -> None:
    switches = read_switches(write_file(tmp_path, FILE))
    assert switches.names == ("attention", "workspace")
    command, variables = switches.apply(switches.command, {"workspace"})
    assert command == ("python", "train.py", "--attention", "math", "--quiet")
    assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "OTHER": None}
    assert switches.apply(["train"], {"attention"}) == (("train", "--attention", "flash"), {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a table for each switch"),
        ("[switches.a]\n", "both forms are the same"),
        ("[switches.a]\nsuspect = { argv = ['x'] }\n", "has 'argv'"),
        ("[switches.a]\nfast = { args = ['x'] }\n", "has 'fast'"),
        ("[switches.a]\nsuspect = { args = 'x' }\n", "lists of texts"),
        ("[switches.a]\nsuspect = { env = { X = 1 } }\n", "table of texts"),
        ("[switch.a]\nsuspect = { args = ['x'] }\n", "has 'switch'"),
        ("command = 'python'\n[switches.a]\nsuspect = { args = ['x'] }\n", "command: expected a list"),
        ("[switches\n", "is not TOML"),
    ],
)
def test_a_mistake_in_a_file_of_switches_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"switches\.toml") as caught:
        read_switches(write_file(tmp_path, text))
    assert said in str(caught.value)


def test_another_form_of_a_switch_makes_another_program(tmp_path: Path) -> None:
    switches = read_switches(write_file(tmp_path, FILE))
    other = read_switches(write_file(tmp_path, FILE.replace("flash", "fast")))
    assert switches.digest(["train"]) != other.digest(["train"])
    assert switches.digest(["train"]) != switches.digest(["train", "--lr"])


def test_the_reference_trainers_switches_are_built_in() -> None:
    switches = reference_switches()
    assert {"moe.dprob", "moe.combine", "attention.backward"} <= set(switches.names)
    assert str(switches.form("moe.dprob", True)) == "--set moe.dprob=atomic"


def test_points_have_file_names_of_their_own() -> None:
    points = [frozenset(), frozenset({"a"}), frozenset({"a/b"}), frozenset({"a_b"}), frozenset(NAMES)]
    labels = [point_label(point) for point in points]
    assert len(set(labels)) == len(points)
    assert all("/" not in label and len(label) < 80 for label in labels)


# ---------------------------------------------------------------------- the oracle that runs programs


SWITCHES = SwitchSet(tuple(KernelSwitch(name, Form(), Form((f"--{name}",))) for name in ("a", "b", "c")))


class Programs:
    """Made-up programs whose forms are arguments: `differs` part from run to run, `other` gives other bits."""

    def __init__(self, differs: str, other: str = "", fails: str = "", **behaviour: int) -> None:
        self.differs, self.other, self.fails, self.behaviour = differs, other, fails, behaviour
        self.trials: list[Trial] = []

    def __call__(self, trial: Trial, watch: Watch) -> Ending:
        self.trials.append(trial)
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        trial.log.write_text("RuntimeError: unsupported\n")
        arguments = [argument.removeprefix("--") for argument in trial.command]
        parts_at = 0 if self.other in arguments else None
        if self.differs in arguments and len(self.trials) % 2:
            parts_at = 1
        behaviour = Behaviour(
            num_steps=3, parts_at=parts_at, exit_status=int(self.fails in arguments), **self.behaviour
        )
        was_stopped, _ = write_run(trial, behaviour, watch)
        return Ending(143, True) if was_stopped else Ending(behaviour.exit_status)


def probe(tmp_path: Path, programs: object, demand: Demand | None = None) -> SwitchProbe:
    pairs = PairRunner(demand or Demand(), runner=programs)  # type: ignore[arg-type]
    return SwitchProbe(SWITCHES, ("train",), tmp_path, Options(), pairs)


def test_programs_are_run_until_the_switch_is_named_with_the_place_where_it_parts(tmp_path: Path) -> None:
    result = find_minimal_sets(SWITCHES.names, probe(tmp_path, Programs("b")), Search())
    assert result.sets == (frozenset({"b"}),)
    assert result.where[0] is not None and "forward/body:out" in result.where[0]


def test_a_form_that_gives_other_bits_every_time_the_same_is_not_at_fault(tmp_path: Path) -> None:
    result = find_minimal_sets(SWITCHES.names, probe(tmp_path, Programs("c", other="a")), Search())
    assert result.sets == (frozenset({"c"}),)


def test_a_first_run_with_the_bits_of_the_reproducible_end_is_a_pair_already(tmp_path: Path) -> None:
    oracle = probe(tmp_path, Programs("c"))
    assert oracle(frozenset()) == Sample(False, 2, None)
    assert oracle(frozenset({"a"})) == Sample(False, 1, None)
    assert oracle(frozenset({"a"})) == Sample(False, 1, None)


def test_a_program_that_fails_with_some_forms_ends_the_search_and_they_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="with a, b, c suspect: the program ended with exit status 1"):
        find_minimal_sets(SWITCHES.names, probe(tmp_path, Programs("c", fails="a")), Search())


def test_too_few_steps_end_the_search(tmp_path: Path) -> None:
    programs = Programs("c")
    with pytest.raises(NoVerdict, match="expected 5"):
        find_minimal_sets(SWITCHES.names, probe(tmp_path, programs, Demand(num_steps=5)), Search())
    assert len(programs.trials) == 1


def test_a_blind_comparison_ends_the_search(tmp_path: Path) -> None:
    from bitcheck.diff import diff_runs

    pairs = PairRunner(
        Demand(), runner=MadeUpPrograms(Behaviour()), compare=lambda a, b, *, until=None: diff_runs(a, a, until=until)
    )
    with pytest.raises(NoVerdict, match="bitcheck is broken"):
        SwitchProbe(SWITCHES, ("train",), tmp_path, Options(), pairs)(frozenset())
    assert pairs.is_broken


def test_a_first_run_that_an_interrupted_search_left_is_used_again(tmp_path: Path) -> None:
    first = Programs("c")
    probe(tmp_path, first)(frozenset())
    for document in tmp_path.glob("runs/*/run.json"):
        assert json.loads(document.read_text())["status"] == "complete"
    again = Programs("c")
    probe(tmp_path, again)(frozenset())
    assert [trial.folder.name for trial in again.trials] == ["reproducible-2"]
