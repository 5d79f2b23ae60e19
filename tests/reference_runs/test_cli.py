"""`bitcheck reference` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitcheck.cli import main, reference
from bitcheck.errors import UsageError
from bitcheck.reference_runs.checkpoint import PIECES
from bitcheck.reference_runs.configs import CONFIGS, Config, get_config
from bitcheck.reference_runs.switches import TABLE


def bitcheck(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bitcheck", *arguments], capture_output=True, text=True, timeout=300)


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return bitcheck("reference", "train", "--config", "nano", *arguments)


def assert_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    """In this process, which has PyTorch loaded already."""
    with pytest.raises(SystemExit) as exit_:
        main(["reference", "train", "--config", "nano", "--quiet", "--steps", "1", *arguments])
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_the_lists_that_the_command_line_shows_are_the_trainers() -> None:
    assert reference.LEAVE_OUT == PIECES
    assert set(reference.CONFIGS) == set(CONFIGS)


def test_in_a_pipe_each_step_is_a_plain_line_with_its_loss_and_speed(tmp_path: Path) -> None:
    done = train("--steps", "2", "--save-every", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "simulated" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("nano, fp8, seed 0, on pydoc_data.topics (")
    assert lines[1].startswith("step      0  loss 5.5")
    assert lines[1].endswith("tokens/s")
    assert lines[2] == f"wrote {tmp_path / 'step-000001.pt'}"
    assert "held-out loss" in lines[-1]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("sizes", [(), ("--sequences", "3"), ("--sequences", "3", "--micro-batches", "1")])
def test_a_step_has_as_many_tokens_as_asked_for(sizes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from bitcheck.reference_runs import train as module

    tokens = []

    def note(config: Config, *_: object) -> None:
        tokens.append(config.data.tokens_per_step)
        raise UsageError("seen")  # where the training would begin

    monkeypatch.setattr(module, "train", note)
    data = get_config("nano").data
    asked = dict(zip(sizes[::2], map(int, sizes[1::2]), strict=True))
    rows = asked.get("--sequences", data.sequences) * asked.get("--micro-batches", data.micro_batches)
    with pytest.raises(SystemExit):
        main(["reference", "train", "--config", "nano", "--quiet", "--steps", "1", *sizes])
    assert tokens == [rows * data.seq_len]


def test_free_forms_are_said_to_be_a_simulated_arrival_order() -> None:
    done = train("--steps", "1", "--set", "moe.dprob=atomic", "--set", "norm.dweight=atomic")
    assert "simulated arrival order, different in every run: moe.dprob, norm.dweight" in done.stdout


def test_under_torchrun_one_rank_speaks_and_tells_how_many_experts_a_token_meets_at_a_node(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["reference", "train", "--config", "nano", "--ep", "2", "--steps", "1", "--save-every", "1"]
    command = [*launcher, "-m", "bitcheck", *arguments, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[1] == "dp 2, ep 2, pp 1 on 2 ranks, comm.reduce=ordered"
    words = lines[2].split()
    assert words[-3:] == ["experts", "a", "node"]
    # Two experts a token: both on one node, or one on each of two.
    assert 1 < float(words[-4]) < 2
    assert lines[3] == f"wrote {tmp_path / 'step-000001'}"


def test_a_user_text_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "text [0] of mine.txt"
    path.write_bytes(b"to be or not to be, " * 500)
    done = train("--steps", "1", "--data", str(path))
    assert done.returncode == 0, done.stderr
    assert f"on {path} (10,000 bytes" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, ["--config", "tiny", "--device", "cuda"], "PyTorch finds no GPU here; train on --device cpu")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "moe.dprop=atomic"], "no switch is called 'moe.dprop'; there are moe.dprob,"),
        (["--set", "moe.dprob=fast"], "moe.dprob takes slots or serial or atomic"),
        (["--set", "moe.dprob"], "moe.dprob takes slots or serial or atomic"),
        (["--leave-out", "ema"], "--leave-out skips a piece of what --resume restores"),
        (["--resume", "absent.pt"], "absent.pt: no checkpoint there"),
        (
            ["--dp", "2"],
            "--dp 2 --pp 1 is for 2 processes and this run has 1: start it with torchrun --nproc-per-node 2",
        ),
        (["--device", "cuda"], "nano has widths that no FP8 product on a GPU takes; give --config tiny"),
        (["--device", "cuda", "--config", "tiny", "--dp", "2", "--ep", "2"], "leave --ep and --pp out"),
        (["--config", "lite"], "--config lite is for a GPU: a step would take minutes here; give --device cuda"),
        (["--data", "absent.txt"], "--data absent.txt: No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert_refused(capsys, arguments, sentence)


def test_a_broken_checkpoint_is_one_sentence_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "step-000001.pt"
    path.write_bytes(b"PK\x03\x04 and then nothing of use")
    assert_refused(capsys, ["--resume", str(path)], "not a whole checkpoint; resume from an earlier")


def test_the_switches_are_listed_with_every_form() -> None:
    done = bitcheck("reference", "switches")
    assert done.returncode == 0
    for switch in TABLE.values():
        assert switch.name in done.stdout
        assert all(form in done.stdout for form in switch.forms)


def test_an_unknown_configuration_names_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="no configuration is called 'small'; there are nano, nano-hybrid, tiny"):
        get_config("small")
