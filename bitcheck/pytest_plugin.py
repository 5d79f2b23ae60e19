"""pytest: training code that must repeat itself, as a fixture.

    def test_a_step_repeats_itself(bitcheck):
        bitcheck.assert_repeatable(train_two_steps, times=3)

    def test_training_gives_the_golden_bits(bitcheck):
        with bitcheck.record(model=model, optimizer=optimizer) as rec:
            ...
            rec.step()

`assert_repeatable` calls a function several times, each time with the generators as they were before the
first, and holds every recorded step and every tensor that it returns against the first call's.
`record` records the block and holds it against the golden run that is kept for this test and this
environment; `pytest --bitcheck-update` writes golden runs. They lie in `bitcheck_golden/` beside the
test's file, in a folder for each environment, and belong into version control.

What could pass on nothing fails: a function that records and returns nothing, a test without a golden
run, a comparison that does not see a flipped bit. pytest loads this module in every session where
bitcheck is installed, so it imports nothing but pytest: PyTorch comes with the first test that asks.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from bitcheck.answer import Answer
    from bitcheck.hooks.session import Recording

GOLDEN_FOLDER = "bitcheck_golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("bitcheck")
    group.addoption(
        "--bitcheck-update", action="store_true", help="Write golden runs for this environment instead of comparing."
    )
    group.addoption(
        "--bitcheck-may-differ",
        action="append",
        default=[],
        metavar="KEY",
        help="Environment key (or pattern) that does not tell golden runs apart, such as os.release. Repeatable.",
    )


@pytest.fixture
def bitcheck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BitcheckFixture:
    """Assert that training code repeats itself, or gives the golden bits."""
    return BitcheckFixture(
        folder=tmp_path_factory.mktemp("bitcheck"),
        golden=request.path.parent / GOLDEN_FOLDER / _file_name(request.path.stem, request.node.name),
        is_updating=request.config.getoption("--bitcheck-update"),
        may_differ=tuple(request.config.getoption("--bitcheck-may-differ")),
    )


class BitcheckFixture:
    """What a test gets; see the module."""

    def __init__(self, folder: Path, golden: Path, is_updating: bool, may_differ: tuple[str, ...]) -> None:
        self._folder, self._golden = folder, golden
        self._is_updating, self._may_differ = is_updating, may_differ
        self._num_runs = 0
        self._num_golden = 0

    def assert_repeatable(self, function: Callable[[], Any], *, times: int = 2, level: str = "module") -> None:
        """Fail unless `function()` gives the same bits each time.

        Compared are all steps that it trains and all tensors that it returns, alone or in tuples, lists
        and dicts. Before each call the generators of torch, Python and numpy are put back to what they
        were before the first.
        """
        if times < 2:
            raise ValueError(f"times={times}: one call is compared with nothing; expected 2 or more")
        from bitcheck.hooks import record

        generators = _read_generators()
        first_run: Path | None = None
        first_digests: dict[str, str] = {}
        for number in range(1, times + 1):
            _restore_generators(generators)
            run = self._new_folder()
            with record(run, level=level):
                returned = function()
            digests = _digest_returned(returned, number)
            has_steps = _has_steps(run)
            if number == 1:
                first_run, first_digests = run if has_steps else None, digests
                if not has_steps and not digests:
                    _fail(
                        "nothing to compare: the function trained no step and returned no tensor.\n"
                        "Return what it computes, or let it take a step with a torch.optim optimizer."
                    )
                if first_run is not None:
                    self._check_pipeline(first_run)
                continue
            if has_steps != (first_run is not None):
                _fail(f"call {number} {'trained' if has_steps else 'trained nothing'}, unlike call 1")
            if first_run is not None:
                self._compare(first_run, run, f"call {number} differs from call 1")
            parted = [name for name in {**first_digests, **digests} if first_digests.get(name) != digests.get(name)]
            if parted:
                _fail(f"call {number} returned other bits than call 1 in {', '.join(parted[:8])}")

    @contextmanager
    def record(self, name: str = "", *, golden: bool = True, **options: Any) -> Iterator[Recording]:
        """Record the block, with the options of `bitcheck.record`, and hold it against its golden run.

        `name` tells several recordings of one test apart; without one they are numbered. With
        `golden=False` the block is only recorded, for a test to look at `.path`.
        """
        from bitcheck.hooks import record

        self._num_golden += 1
        label = name or str(self._num_golden)
        run = self._new_folder()
        with record(run, **options) as recording:
            yield recording
        if golden:
            self._check_golden(run, self._golden / _file_name(label))

    # ------------------------------------------------------------------ golden runs

    def _check_golden(self, run: Path, folder: Path) -> None:
        """Compare with the golden run of this environment, or write it."""
        if not _has_steps(run):
            _fail("nothing to compare: no training step was recorded in the block")
        environment = self._environment(run)
        golden = folder / _environment_key(environment)
        if self._is_updating:
            shutil.rmtree(golden, ignore_errors=True)
            golden.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(run, golden)
            return
        if not golden.is_dir():
            _fail(_explain_missing(folder, environment, self._may_differ))
        self._check_pipeline(run)
        self._compare(golden, run, f"other bits than the golden run {golden}")

    def _environment(self, run: Path) -> dict[str, str]:
        from bitcheck.run import open_run

        with open_run(run) as opened:
            return _kept(opened.environment, self._may_differ)

    def _check_pipeline(self, run: Path) -> None:
        """Fail where a flipped bit of a gradient would not be seen."""
        from bitcheck.control import run_control
        from bitcheck.run import open_run

        with open_run(run) as opened:
            try:
                control = run_control(opened)
            except ValueError:
                return  # no gradient reached an optimizer: steps of something else
        if not control.has_passed:
            _fail(f"bitcheck is broken: one bit of {control.site} was flipped in a copy, and {control.problem}")

    def _compare(self, baseline: Path, candidate: Path, what: str) -> None:
        from bitcheck.answer import Verdict
        from bitcheck.coverage import Demand, find_gaps, find_uncompared, step_range
        from bitcheck.diff import diff_runs
        from bitcheck.run import open_run

        with open_run(baseline) as ours, open_run(candidate) as theirs:
            answer = diff_runs(ours, theirs)
            if answer.verdict is Verdict.DIVERGED:
                _fail_with(answer, what)
            spans = step_range(ours), step_range(theirs)
            if spans[0] != spans[1] or spans[0] is None:
                _fail(f"{what}: steps {_span(spans[1])} instead of {_span(spans[0])}")
            wanted = range(spans[0][0], spans[0][1] + 1)
            # A test may well take one step on fixed gradients: what it trains is its own business.
            gaps = find_gaps(theirs, "the recording", Demand(needs_gradients=False))
            gaps += find_uncompared(ours, theirs, answer, ("the first", "the second"), wanted)
            if gaps:
                _fail(gaps[0])

    def _new_folder(self) -> Path:
        self._num_runs += 1
        return self._folder / str(self._num_runs)


def _fail(message: str) -> NoReturn:
    pytest.fail(f"bitcheck: {message}", pytrace=False)


def _fail_with(answer: Answer, what: str) -> NoReturn:
    from bitcheck.report.text import headline, render_plain, sections

    _fail(f"{what}\n\n{render_plain(headline(answer), sections(answer))}")


def _span(span: tuple[int, int] | None) -> str:
    return "none" if span is None else f"{span[0]} to {span[1]}"


def _has_steps(run: Path) -> bool:
    """Whether any training step was recorded."""
    from bitcheck.coverage import step_range
    from bitcheck.errors import RunError
    from bitcheck.run import open_run

    try:
        with open_run(run) as opened:
            return step_range(opened) is not None
    except RunError:
        return False  # the recorder opens a rank's file only once the program trains


def _digest_returned(value: object, number: int) -> dict[str, str]:
    """Return the digest of everything in what a call returned, by its place; {} where it holds no tensor."""
    from bitcheck.errors import DigestError
    from bitcheck.hooks.tensors import digest_tensor, digest_value, python_value_parts, tensor_parts

    digests: dict[str, str] = {}
    has_tensor = False
    try:
        parts = python_value_parts(value)
    except DigestError as error:
        _fail(f"call {number} returned what has no exact bits: {error}.\nReturn tensors, or nothing.")
    for place, part in parts:
        if hasattr(part, "data_ptr"):
            has_tensor = True
            for suffix, piece in tensor_parts(part):  # type: ignore[arg-type]
                header = f"{piece.dtype} {tuple(piece.shape)} "
                digests[f"returned{place}{suffix}"] = header + digest_tensor(piece.detach().cpu())[0].hex()
        else:
            digests[f"returned{place}"] = digest_value(part)[0].hex()
    return digests if has_tensor else {}


def _read_generators() -> dict[str, Any]:
    """Return the states of the global generators."""
    import random
    import sys

    import torch

    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        states["numpy"] = numpy_random.get_state()
    return states


def _restore_generators(states: Mapping[str, Any]) -> None:
    import random
    import sys

    import torch

    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy.random"].set_state(states["numpy"])


def _kept(environment: Mapping[str, str], may_differ: tuple[str, ...]) -> dict[str, str]:
    """Return the environment without the keys that may differ."""
    from fnmatch import fnmatchcase

    return {key: value for key, value in environment.items() if not any(fnmatchcase(key, one) for one in may_differ)}


def _environment_key(environment: Mapping[str, str]) -> str:
    """Return the name of the folder of an environment."""
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:16]


def _explain_missing(folder: Path, environment: Mapping[str, str], may_differ: tuple[str, ...]) -> str:
    """Say that there is no golden run, and how the environments of those that there are differ from this one."""
    from bitcheck.errors import RunError
    from bitcheck.run import open_run

    lines = [f"no golden run for this environment in {folder}; write one: pytest --bitcheck-update"]
    for other in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            with open_run(other) as run:
                theirs = _kept(run.environment, may_differ)
        except RunError as error:
            lines.append(f"  {other.name}: {error}")
            continue
        keys = [key for key in sorted({*environment, *theirs}) if environment.get(key) != theirs.get(key)]
        named = ", ".join(f"{key} {theirs.get(key, 'unset')} -> {environment.get(key, 'unset')}" for key in keys[:6])
        lines.append(f"  {other.name} is of an environment that differs in {named}{' ...' if len(keys) > 6 else ''}")
    return "\n".join(lines)


def _file_name(*parts: str) -> str:
    """Return a file name for a test: what may stand in one, and a digest where something had to be replaced."""
    text = "-".join(parts)
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:80]
    return clean if clean == text else f"{clean}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
