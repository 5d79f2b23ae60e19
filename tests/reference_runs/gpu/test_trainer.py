"""The whole trainer on a GPU: it repeats itself, goes on from a checkpoint, and each free form is found by name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitcheck.diff import diff_runs
from bitcheck.reference_runs import rng
from bitcheck.reference_runs.checkpoint import CheckpointError
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.data import Text
from bitcheck.reference_runs.switches import Switches
from bitcheck.reference_runs.train import Options, Trainer, deterministic_algorithms, state_digests, train
from bitcheck.run import open_run
from tests.reference_runs.listeners import Silent

pytestmark = pytest.mark.gpu


def widened(name: str) -> Any:
    """A configuration in which every race is a race: three terms or more in each sum, for two have one result."""
    config = get_config(name)
    model = replace(config.model, expert_width=768, top_k=4)
    return replace(config, model=model, data=replace(config.data, seq_len=1024, sequences=4))


TINY, HYBRID = widened("tiny"), widened("tiny-hybrid")
BY_SWITCH = {
    "moe.dprob=atomic": (TINY, "moe.experts.down:grad_in.1"),
    "moe.combine=atomic": (TINY, "moe."),
    "moe.wgrad=atomic": (TINY, "moe.experts."),
    "moe.topk=unstable": (TINY, "moe.router.topk:out"),
    "ssm.backward=atomic": (HYBRID, "ssm.scan"),
    "embedding.backward=atomic": (TINY, "embedding.weight:grad"),
    "norm.dweight=atomic": (TINY, "norm.weight:grad"),
    "attention.backward=fast": (TINY, "attn.core:grad_in.0"),
}
"""A switch's free form -> a configuration, and a part of the first origin's site, or of its module."""


@pytest.fixture
def long_text(text: Text) -> Text:
    """Enough for windows of 1,024 in the held-out part."""
    return Text(text.name, np.tile(text.data, 4))


def run(text: Text, config: Any = TINY, **options: Any) -> Trainer:
    return train(config, text, Options(**{"steps": 3, "device": "cuda"} | options), Silent())


@pytest.mark.parametrize(("name", "precision"), [("tiny", "fp8"), ("tiny", "bf16"), ("tiny-hybrid", "fp8")])
def test_the_first_steps_have_the_losses_of_a_cpu(text: Text, name: str, precision: Any) -> None:
    # No dropout: its generators differ. Widths of experts that the fused kernels take.
    config = replace(get_config(name), model=replace(get_config(name).model, dropout=0.0, expert_width=256))
    here, there = (
        Trainer(config, text, Options(steps=3, precision=precision, device=device)) for device in ("cpu", "cuda")
    )
    weights = dict(here.model.named_parameters())
    with torch.no_grad():
        for parameter_name, parameter in there.model.named_parameters():
            there.optimizer.state[parameter]["master"].copy_(here.optimizer.state[weights[parameter_name]]["master"])
    there.optimizer.derive_parameters()
    there.model.derive_weights()
    losses: dict[str, list[float]] = {}
    for trainer, device in ((here, "cpu"), (there, "cuda")):
        with deterministic_algorithms(trainer.options.switches):
            rng.seed_all(0)
            losses[device] = [trainer.train_step().loss for _ in range(3)]
        trainer.ema.close()
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=5e-3)
    assert losses["cuda"][-1] < losses["cuda"][0]


@pytest.mark.parametrize("config", [TINY, HYBRID], ids=lambda config: config.name)
def test_two_runs_a_resumed_one_and_one_in_filled_memory_end_in_the_same_bits(
    long_text: Text, tmp_path: Path, config: Any
) -> None:
    listener = Silent()
    options = Options(steps=3, device="cuda", save_every=2, out=tmp_path)
    first = state_digests(train(config, long_text, options, listener))
    assert "rng.torch/cuda" in first
    assert state_digests(run(long_text, config)) == first
    assert state_digests(run(long_text, config, resume=listener.checkpoints[0])) == first
    filled = Switches.from_options(settings=["memory.fill=on"])
    assert state_digests(run(long_text, config, switches=filled)) == first
    # What is forgotten of the GPU's generator shows: dropout draws from it.
    forgetful = state_digests(run(long_text, config, resume=listener.checkpoints[0], leave_out=("rng.torch",)))
    assert forgetful["rng.torch/cuda"] != first["rng.torch/cuda"]


def test_a_checkpoint_of_a_cpu_is_refused_in_one_sentence(text: Text, tmp_path: Path) -> None:
    listener = Silent()
    train(get_config("tiny"), text, Options(steps=1, save_every=1, out=tmp_path), listener)
    with pytest.raises(CheckpointError, match="device is 'cpu' there and 'cuda' here"):
        run(text, get_config("tiny"), resume=listener.checkpoints[0])


@pytest.mark.parametrize("setting", BY_SWITCH)
def test_a_free_form_differs_from_run_to_run_and_is_found_where_it_is(
    long_text: Text, tmp_path: Path, setting: str
) -> None:
    config, site = BY_SWITCH[setting]
    switches = Switches.from_options(settings=[setting])
    run(long_text, config, steps=1, switches=switches, record=tmp_path / "first", level="module")
    for number in range(5):  # a race need not be lost each time
        again = tmp_path / f"again-{number}"
        run(long_text, config, steps=1, switches=switches, record=again, level="module")
        with open_run(tmp_path / "first") as baseline, open_run(again) as candidate:
            answer = diff_runs(baseline, candidate)
        if answer.first is not None:
            break
    assert answer.first is not None
    assert site in f"{answer.first.site} {answer.first.module}"


@pytest.mark.parametrize("level", ["module", "op"])
def test_the_deterministic_recipe_gives_identical_runs(long_text: Text, tmp_path: Path, level: str) -> None:
    for name in ("a", "b"):
        run(long_text, HYBRID, steps=1, record=tmp_path / name, level=level)
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
    assert answer.verdict == "identical", answer.explanation


def test_the_average_is_complete_when_it_is_read(long_text: Text) -> None:
    trainer = Trainer(TINY, long_text, Options(steps=3, device="cuda"))
    masters = {name: trainer.optimizer.state[p]["master"] for name, p in trainer.model.named_parameters()}
    expected = {name: master.clone() for name, master in masters.items()}
    for _ in range(3):
        trainer.train_step()
        for name, master in masters.items():
            expected[name].lerp_(master, 1 - trainer.ema.decay)
    for name, average in trainer.ema.tensors().items():
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-9, msg=name)
    trainer.ema.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_share_the_data_end_in_the_bits_of_one(tmp_path: Path) -> None:
    train = ["reference", "train", "--device", "cuda", "--steps", "2", "--save-every", "2", "--quiet"]
    one = [sys.executable, "-m", "bitcheck", *train, "--out", str(tmp_path / "one")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = [*torchrun, "-m", "bitcheck", *train, "--out", str(tmp_path / "two")]
    for command in (one, two):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    alone = torch.load(tmp_path / "one/step-000002.pt", weights_only=True)["digests"]
    together = json.loads((tmp_path / "two/step-000002/bitcheck.json").read_text())["digests"]
    # Experts' digests are one an expert there, so theirs are compared through the loss alone, which they enter.
    names = [name for name in alone if name in together and name.startswith(("masters/", "moments/", "ema/"))]
    assert len(names) > 100
    assert [name for name in names if alone[name] != together[name]] == []
