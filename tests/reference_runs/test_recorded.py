"""The trainer under bitcheck: planned faults, and the answer that names exactly them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.reference_runs.configs import Config, get_config
from bitcheck.reference_runs.data import Text
from bitcheck.reference_runs.switches import Switches
from bitcheck.reference_runs.train import Options, StepReport, train
from bitcheck.run import open_run
from tests.two_memories import compare_in_two_memories


def often(config: Config) -> Config:
    """The configuration with every generator drawn from, to some effect, in every step."""
    data = replace(config.data, fim_rate=0.5, noise_rate=0.05, sequences=4)
    return replace(config, data=data, model=replace(config.model, dropout=0.1))


NANO = often(get_config("nano"))
HYBRID = often(get_config("nano-hybrid"))


class Silent:
    """Follows a run and says nothing."""

    def on_step(self, report: StepReport) -> None:
        pass

    def on_checkpoint(self, path: Path) -> None:
        pass


def compare(baseline: Path, candidate: Path) -> Answer:
    with open_run(baseline) as ours, open_run(candidate) as theirs:
        return diff_runs(ours, theirs)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both configurations recorded for three steps, with a checkpoint after the first."""
    import numpy as np

    words = np.random.default_rng(0).choice(["mixture ", "of ", "experts\n", "routing "], 4000)
    text = Text("words", np.frombuffer("".join(words).encode()[:20_000], np.uint8))
    runs = {}
    for config in (NANO, HYBRID):
        folder = tmp_path_factory.mktemp(config.name)
        options = Options(steps=3, save_every=1, out=folder, record=folder / "run", level="module")
        train(config, text, options, Silent())
        runs[config.name] = folder
    return runs


def record_again(text: Text, config: Config, folder: Path, **options: object) -> Path:
    run = folder / "again"
    train(config, text, replace(Options(steps=3, record=run, level="module"), **options), Silent())  # type: ignore[arg-type]
    return run


@pytest.mark.parametrize("config", [NANO, HYBRID], ids=lambda config: config.name)
def test_a_second_run_and_a_resumed_one_are_identical_in_every_event(
    text: Text, tmp_path: Path, recorded: dict[str, Path], config: Config
) -> None:
    first = recorded[config.name]
    answer = compare(first / "run", record_again(text, config, tmp_path))
    assert answer.verdict == "identical"
    assert answer.compared.steps == 3
    resumed = record_again(text, config, tmp_path / "resumed", resume=first / "step-000001.pt")
    answer = compare(first / "run", resumed)
    assert answer.verdict == "identical"
    assert answer.compared.steps == 2


@pytest.mark.parametrize(
    ("piece", "cause", "part"),
    [
        ("masters", "restore", ":master"),
        ("moments", "restore", ":exp_avg_sq"),
        ("step", "restore", ":step"),
        ("router_bias", "restore", "moe.router.bias"),
        ("ema", "restore", "extra/ema"),
        ("rng.torch", "rng", "rng/torch.cpu:state"),
        ("rng.python", "rng", "rng/python:state"),
        ("rng.numpy", "rng", "rng/numpy:state"),
        ("data", "data", "batch/Model:in.0"),
    ],
)
def test_a_piece_left_out_on_resume_is_named(
    text: Text, tmp_path: Path, recorded: dict[str, Path], piece: str, cause: str, part: str
) -> None:
    first = recorded["nano"]
    resumed = record_again(text, NANO, tmp_path, resume=first / "step-000001.pt", leave_out=(piece,))
    answer = compare(first / "run", resumed)
    assert answer.verdict == "diverged"
    assert answer.cause == cause
    assert any(part in origin.site for origin in answer.origins)


@pytest.mark.parametrize(
    ("setting", "cause", "sites"),
    [
        # Backward begins with the module that is applied last.
        ("moe.dprob=atomic", "backward", {"backward/mtp.block.moe.experts.down:grad_in.1"}),
        ("moe.combine=atomic", "forward", {"forward/layers.1.moe.combine:out"}),
        ("moe.topk=unstable", "forward", {"forward/layers.1.moe.router.topk:out"}),
        ("norm.dweight=atomic", "backward", {"backward/mtp.norm.weight:grad", "backward/norm.weight:grad"}),
        ("embedding.backward=atomic", "backward", {"backward/embedding.weight:grad"}),
    ],
)
def test_a_free_form_is_blamed_on_its_own_module(
    text: Text, tmp_path: Path, recorded: dict[str, Path], setting: str, cause: str, sites: set[str]
) -> None:
    switches = Switches.from_options(settings=[setting])
    run = record_again(text, NANO, tmp_path, switches=switches, steps=1)
    answer = compare(recorded["nano"] / "run", run)
    assert answer.verdict == "diverged"
    assert answer.cause == cause
    assert answer.first is not None
    assert answer.first.site in sites
    assert not answer.environment


def test_a_free_scan_is_blamed_on_the_scan(text: Text, tmp_path: Path, recorded: dict[str, Path]) -> None:
    switches = Switches.from_options(settings=["ssm.backward=atomic"])
    run = record_again(text, HYBRID, tmp_path, switches=switches, steps=1)
    answer = compare(recorded["nano-hybrid"] / "run", run)
    assert answer.cause == "backward"
    assert answer.first is not None
    assert answer.first.module == "layers.0.ssm.scan"
    assert answer.first.op == "_ScanBackward"


def test_the_digest_of_the_text_is_part_of_the_runs_environment(
    text: Text, tmp_path: Path, recorded: dict[str, Path]
) -> None:
    other = Text("words", text.data[::-1].copy())
    answer = compare(recorded["nano"] / "run", record_again(other, NANO, tmp_path, steps=1))
    assert answer.cause == "data"
    (difference,) = answer.environment
    assert (difference.key, difference.baseline, difference.candidate) == ("program.text", text.digest, other.digest)


def test_at_level_op_two_processes_are_identical_whatever_their_memory_held_before(tmp_path: Path) -> None:
    arguments = ["bitcheck", "reference", "train", "--config", "nano", "--steps", "1", "--level", "op", "--quiet"]
    answer = compare_in_two_memories(tmp_path, lambda run: [*arguments, "--record", run])
    assert answer.verdict == "identical", answer.explanation
