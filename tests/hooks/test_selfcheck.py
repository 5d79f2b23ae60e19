"""`bitcheck selfcheck`: it finds a recorder that changes bits, and accuses none that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitcheck.cli.selfcheck import describe
from bitcheck.digest import digest_bytes
from bitcheck.hooks.final import UNTOUCHED, final_state
from bitcheck.hooks.rng import generator_states
from bitcheck.hooks.tensors import digest_tensor
from bitcheck.selfcheck import Difference, _compare, _judge, _State

TRAIN = """
import json, os, random, sys
import torch
from torch import nn

is_recorded = json.loads(os.environ.get("BITCHECK_ATTACH", '{"options": null}'))["options"] is not None
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
print("the program's own output")
"""


def selfcheck(
    folder: Path, *changes: tuple[str, str], options: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any], str]:
    """Check the program with these pieces of text replaced; return (exit status, JSON answer, standard error)."""
    source = textwrap.dedent(TRAIN)
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    program = folder / "program.py"
    program.write_text(source)
    checked = subprocess.run(
        [sys.executable, "-m", "bitcheck", "selfcheck", "--json", *options, "--", sys.executable, str(program)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=280,
        cwd=folder,
    )
    answer = json.loads(checked.stdout) if checked.stdout else {}
    return checked.returncode, answer, checked.stderr.decode()


def test_a_program_ends_with_the_same_bits_recorded_and_bare(tmp_path: Path) -> None:
    exit_status, answer, errors = selfcheck(tmp_path)
    assert (exit_status, answer["verdict"], answer["level"]) == (0, "neutral", "module")
    assert (answer["steps"], answer["differences"], answer["unread"]) == ({"0": 3}, [], [])
    assert answer["compared"]["ranks"] == 1
    # 6 parameters with their gradients and momenta, 3 buffers, generators of torch, Python and numpy.
    assert answer["compared"]["tensors"] == 6 * 3 + 3 + 3
    assert errors.count("the program's own output") == 3, "count, recorded, bare"


def test_a_recorder_that_draws_a_random_number_is_found_out(tmp_path: Path) -> None:
    # The recorder of this process takes the generators' states at each step; here, doing so draws from one.
    faulty = """
import bitcheck.hooks.recorder
states = bitcheck.hooks.recorder.generator_states
bitcheck.hooks.recorder.generator_states = lambda: (states(), torch.rand(1), random.random())[0]
torch.manual_seed(0)
"""
    exit_status, answer, errors = selfcheck(tmp_path, ("torch.manual_seed(0)\n", faulty))
    assert (exit_status, answer["verdict"]) == (1, "altered")
    sites = [difference["site"] for difference in answer["differences"]]
    assert sites[0] == "param/0.weight:value"
    assert {"rng/torch.cpu:state", "rng/python:state"} <= set(sites)
    assert errors.count("the program's own output") == 4, "count, recorded, bare, and bare again"


def test_a_program_that_does_not_repeat_itself_accuses_nobody(tmp_path: Path) -> None:
    exit_status, answer, _ = selfcheck(tmp_path, ("torch.manual_seed(0)", "torch.seed()"))
    assert (exit_status, answer["verdict"]) == (2, "not-reproducible")
    assert "does not repeat itself" in answer["explanation"]


def test_a_program_that_draws_unseeded_where_nothing_depends_on_it_is_still_neutral(tmp_path: Path) -> None:
    exit_status, answer, _ = selfcheck(tmp_path, ("for step", "random.random()\nfor step"))
    assert (exit_status, answer["verdict"]) == (0, "neutral")
    assert "rng/python:state" in answer["explanation"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((("for step in range(3)", "for step in range(0)"),), "took no optimizer step"),
        ((("print(", "sys.exit(4)\nprint("),), "exit status 4, bare.\n"),
        ((("print(", "sys.exit(5 * is_recorded)\nprint("),), "although it ended well bare"),
    ],
)
def test_without_a_final_state_there_is_no_verdict(
    tmp_path: Path, changes: tuple[tuple[str, str], ...], message: str
) -> None:
    exit_status, answer, errors = selfcheck(tmp_path, *changes)
    assert (exit_status, answer) == (2, {})
    assert message in errors and "Traceback" not in errors


def test_a_person_is_told_the_verdict_in_the_first_line_and_not_every_tensor() -> None:
    differences = [Difference(0, f"param/layers[{number}].weight:value", "0a", None) for number in range(7)]
    answer = _judge("module", {0: 3}, state(3, a="1"), differences, [])
    lines = list(describe(answer, show_all=False))
    assert lines[0] == "altered: recording at level module"
    assert lines[2] == "Compared after 3 optimizer steps: 1 tensors, 0.0 MiB, 1 rank."
    assert lines[3:] == [
        *[f"  rank 0  param/layers[{number}].weight:value  recorded 0a  bare none" for number in range(5)],
        "  and 2 more (--all lists them)",
    ]
    assert len(list(describe(answer, show_all=True))) == 3 + 7


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has stepped once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 2)).mean().backward()
    optimizer.step()
    return model, optimizer


def test_the_final_state_has_the_names_and_digests_of_a_run() -> None:
    model, optimizer = trained()
    wrapped = nn.Module()
    wrapped.module = model  # as DistributedDataParallel holds it
    state = final_state([optimizer], {})
    weight = model.get_parameter("0.weight")
    assert state.digests["param/0.weight:value"] == digest_tensor(weight)[0].hex()
    assert state.digests["grad/0.weight:grad"] == digest_tensor(weight.grad)[0].hex()  # type: ignore[arg-type]
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert state.digests["optim/0.weight:momentum_buffer"] == digest_tensor(momentum)[0].hex()
    assert state.digests["buffer/1.running_mean:value"] == digest_tensor(model.get_buffer("1.running_mean"))[0].hex()
    words = dict(generator_states())["torch.cpu"]
    assert state.digests["rng/torch.cpu:state"] == digest_bytes("uint8", (words.size,), words)[0].hex()
    assert state.unread == []


@pytest.mark.parametrize(
    "site", ["param/0.bias:value", "grad/0.bias:grad", "optim/0.bias:momentum_buffer", "buffer/1.running_var:value"]
)
def test_one_changed_bit_anywhere_in_the_final_state_is_seen(site: str) -> None:
    model, optimizer = trained()
    bias = model.get_parameter("0.bias")
    before = final_state([optimizer], {}).digests
    tensors = {
        "param": bias,
        "grad": bias.grad,
        "optim": optimizer.state[bias]["momentum_buffer"],
        "buffer": model.get_buffer("1.running_var"),
    }
    tensor = tensors[site.split("/")[0]]
    assert tensor is not None
    with torch.no_grad():
        tensor.view(torch.int32)[0] ^= 1
    after = final_state([optimizer], {}).digests
    assert [key for key in before if before[key] != after[key]] == [site]


def test_parameters_that_no_module_owns_are_named_by_their_place() -> None:
    loose = nn.Parameter(torch.ones(2))
    loose.grad = torch.ones(2)
    optimizer = torch.optim.SGD([loose], lr=0.1)
    optimizer.step()
    assert "param/SGD.params.0.0:value" in final_state([optimizer], {}).digests


def test_equal_names_of_two_models_are_kept_apart() -> None:
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    digests = final_state([optimizer], {}).digests
    assert digests["param/weight:value"] == digest_tensor(one.weight)[0].hex()
    assert digests["param/weight#1:value"] == digest_tensor(two.weight)[0].hex()


def test_a_generator_that_nobody_drew_from_counts_as_untouched() -> None:
    first = {name: words.tobytes() for name, words in generator_states()}
    assert final_state([], first).digests["rng/torch.cpu:state"] == UNTOUCHED
    torch.rand(1)
    assert final_state([], first).digests["rng/torch.cpu:state"] != UNTOUCHED


def test_an_optimizer_state_of_unknown_kind_is_named_as_not_compared() -> None:
    _, optimizer = trained()
    optimizer.state["note"] = {"what": object()}  # type: ignore[index]
    (line,) = final_state([optimizer], {}).unread
    assert line.startswith("optim/SGD.note:what: ")


def state(steps: int = 3, **digests: str) -> dict[int, _State]:
    """Return what one run of one rank left."""
    return {0: _State(steps, digests, 4, ())}


def test_another_number_of_steps_or_a_missing_tensor_is_a_difference() -> None:
    assert _compare(state(3, a="1"), state(3, a="1")) == []
    assert _compare(state(2, a="1"), state(3, a="1")) == [Difference(0, "steps", "2", "3")]
    assert _compare(state(3), state(3, a="1")) == [Difference(0, "a", None, "1")]
    assert _compare(state(3, a="1"), {}) == [Difference(0, "steps", "3", None), Difference(0, "a", "1", None)]


def test_a_difference_between_bare_runs_clears_the_recorder_only_of_that_generator() -> None:
    python = Difference(0, "rng/python:state", "1", "2")
    weight = Difference(0, "param/w:value", "1", "2")

    def verdict(differences: list[Difference], own: list[Difference]) -> str:
        return _judge("module", {0: 3}, state(), differences, own).verdict

    assert verdict([], []) == "neutral"
    assert verdict([python], [python]) == "neutral"
    assert verdict([python, weight], [python]) == "altered"
    assert verdict([python, weight], [python, weight]) == "not-reproducible"
