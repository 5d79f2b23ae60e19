"""The whole trainer: it learns, it repeats itself, and each switch does what its name says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitcheck.reference_runs.configs import Config, get_config
from bitcheck.reference_runs.data import Text
from bitcheck.reference_runs.switches import TABLE, Switches
from bitcheck.reference_runs.train import Options, Trainer, deterministic_algorithms, state_digests, train
from tests.reference_runs.listeners import Silent

NANO = get_config("nano")
HYBRID = get_config("nano-hybrid")


def end_state(text: Text, config: Config = NANO, **options: Any) -> dict[str, str]:
    return state_digests(train(config, text, Options(**{"steps": 3} | options), Silent()))


@pytest.mark.parametrize("config", [NANO, HYBRID], ids=lambda config: config.name)
def test_two_runs_and_a_resumed_one_end_in_the_same_bits(text: Text, tmp_path: Path, config: Config) -> None:
    listener = Silent()
    first = state_digests(train(config, text, Options(steps=3, save_every=2, out=tmp_path), listener))
    assert end_state(text, config) == first
    assert end_state(text, config, resume=listener.checkpoints[0]) == first


@pytest.mark.parametrize("name", ["nano-hybrid"])
def test_so_they_do_on_two_threads(tmp_path: Path, name: str) -> None:
    """In processes of their own, whose threads sleep while they wait: others may be using the cores."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    train_command = [
        sys.executable,
        "-m",
        "bitcheck",
        "reference",
        "train",
        "--config",
        name,
        "--quiet",
        "--steps",
        "3",
    ]
    contents = []
    for folder, options in (
        ("a", ["--save-every", "1"]),
        ("b", ["--save-every", "3"]),
        ("c", ["--save-every", "1", "--resume", str(tmp_path / "a" / "step-000002.pt")]),
    ):
        out = tmp_path / folder
        subprocess.run([*train_command, "--out", str(out), *options], check=True, env=environment, capture_output=True)
        contents.append(torch.load(out / "step-000003.pt", weights_only=True)["digests"])
    assert contents[0] == contents[1] == contents[2]


def test_another_seed_gives_another_run(text: Text) -> None:
    assert end_state(text, seed=1, steps=1) != end_state(text, seed=0, steps=1)


def first_gradients(config: Config, text: Text, *settings: str, recipe: str = "deterministic") -> dict[str, bytes]:
    switches = Switches.from_options(recipe, settings)
    with deterministic_algorithms(switches):
        trainer = Trainer(config, text, Options(steps=1, switches=switches))
        trainer.model(*trainer.loader.next_batch()).total.backward()
        trainer.ema.close()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return {name: gradient.numpy().tobytes() for name, gradient in gradients.items() if gradient is not None}


# Which gradients a free form may change: those that its own reduction makes, and what they flow into.
OWN_GRADIENT = {
    "moe.dprob": (NANO, "layers.1.moe.router.weight"),
    "moe.combine": (NANO, "head.weight"),
    "moe.wgrad": (NANO, "layers.1.moe.experts.down.weight"),
    "moe.topk": (NANO, "head.weight"),
    "ssm.backward": (HYBRID, "layers.0.ssm.d"),
    "embedding.backward": (NANO, "embedding.weight"),
    "norm.dweight": (NANO, "norm.weight"),
}
# More tokens than nano has, for enough split-K parts in an expert.
LONGER = replace(NANO.data, sequences=4)


@pytest.mark.parametrize("name", OWN_GRADIENT)
def test_a_free_form_changes_its_own_gradient_from_run_to_run(text: Text, name: str) -> None:
    config, gradient = OWN_GRADIENT[name]
    config = replace(config, data=LONGER)
    (form,) = TABLE[name].free
    seen = {first_gradients(config, text, f"{name}={form}")[gradient] for _ in range(4)}
    assert len(seen) > 1


def test_a_free_gradient_of_the_routing_probability_reaches_the_routers_and_nothing_after_them(text: Text) -> None:
    fixed, free = first_gradients(NANO, text), first_gradients(NANO, text, "moe.dprob=atomic")
    assert {name for name in fixed if fixed[name] != free[name]} >= {
        "layers.1.moe.router.weight",
        "mtp.block.moe.router.weight",
    }
    untouched = {
        "head.weight",
        "mtp.norm.weight",
        "mtp.block.moe.experts.down.weight",
        "mtp.block.moe.experts.up.weight",
    }
    assert all(fixed[name] == free[name] for name in untouched)


@pytest.mark.parametrize(
    "setting", [f"{s.name}={form}" for s in TABLE.values() for form in s.deterministic], ids=lambda setting: setting
)
def test_a_deterministic_form_gives_one_result(text: Text, setting: str) -> None:
    config = HYBRID if setting.startswith("ssm") else NANO
    assert first_gradients(config, text, setting) == first_gradients(config, text, setting)


def test_taking_turns_gives_the_bits_of_slots_and_filling_memory_changes_none(text: Text) -> None:
    plain = first_gradients(NANO, text)
    assert first_gradients(NANO, text, "moe.dprob=serial") == plain
    assert first_gradients(NANO, text, "memory.fill=on") == plain
    assert first_gradients(HYBRID, text, "memory.fill=on") == first_gradients(HYBRID, text)


def test_the_fast_recipe_differs_from_run_to_run(text: Text) -> None:
    assert first_gradients(HYBRID, text, recipe="fast") != first_gradients(HYBRID, text, recipe="fast")


def test_the_fast_recipe_trains_as_well(text: Text) -> None:
    losses = {}
    for recipe in ("deterministic", "fast"):
        listener = Silent()
        train(NANO, text, Options(steps=12, switches=Switches.from_options(recipe)), listener)
        losses[recipe] = listener.reports[-1].loss
    assert losses["fast"] == pytest.approx(losses["deterministic"], rel=0.02)


@pytest.fixture
def settings_of_pytorch() -> Iterator[None]:
    yield
    assert not torch.are_deterministic_algorithms_enabled()


def test_pytorchs_own_switches_are_put_back(settings_of_pytorch: None) -> None:
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with deterministic_algorithms(Switches.from_options(settings=["memory.fill=on"])):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.empty(3).isnan().all()
    with deterministic_algorithms(Switches.from_options()):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with deterministic_algorithms(Switches.from_options("fast")):
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == was_filling  # type: ignore[attr-defined]


@pytest.mark.parametrize("config", [NANO, HYBRID], ids=lambda config: config.name)
def test_it_learns(text: Text, config: Config) -> None:
    trainer = Trainer(config, text, Options(steps=80))
    for _ in range(80):
        report = trainer.train_step()
    assert report.loss < 0.7 * text.unigram_entropy()
    assert trainer.evaluate() < 0.7 * text.unigram_entropy()
    trainer.ema.close()


def test_an_evaluation_changes_nothing_of_the_next_step(text: Text) -> None:
    plain, evaluated = (Trainer(NANO, text, Options(steps=2)) for _ in range(2))
    ends = []
    for trainer in (plain, evaluated):
        from bitcheck.reference_runs import rng

        rng.seed_all(5)
        trainer.train_step()
        if trainer is evaluated:
            assert trainer.evaluate() == trainer.evaluate()
        trainer.train_step()
        ends.append(state_digests(trainer))
        trainer.ema.close()
    assert ends[0] == ends[1]


def test_after_a_step_codes_are_those_of_the_new_weights_and_biases_have_moved(text: Text) -> None:
    trainer = Trainer(NANO, text, Options(steps=1))
    before = state_digests(trainer)
    trainer.train_step()
    after = state_digests(trainer)
    trainer.model.derive_weights()
    assert state_digests(trainer) == after
    changed = {name for name in after if after[name] != before[name]}
    assert "derived/layers.1.moe.experts.up.codes" in changed
    assert "router_bias/layers.1.moe.router" in changed
    assert "derived/layers.1.moe.router.load" not in changed
    trainer.ema.close()
