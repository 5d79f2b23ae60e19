"""Real data-parallel programs of four gloo processes: each planted fault is found, and its twins without one agree."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaAnswer, ReplicaCause, ReplicaVerdict
from bitcheck.run import open_run
from tests.hooks.jobs import run_job

pytestmark = pytest.mark.xdist_group("replica_job")

FAULTS = {
    "flipped_parameter": (2, "param/head.weight:value", (2,), ReplicaCause.OPTIMIZER),
    "flipped_moment": (1, "optim/body.bias:exp_avg", (1,), ReplicaCause.OPTIMIZER),
    "flipped_buffer": (1, "buffer/scale:value", (3,), ReplicaCause.BUFFER),
    "flipped_gradient": (2, "grad/head.weight:grad", (0,), ReplicaCause.COLLECTIVE),
    "missed_broadcast": (-1, "param/body.weight:value", (1,), ReplicaCause.INITIAL_STATE),
    "never_broadcast": (-1, "param/body.weight:value", (0, 1, 2, 3), ReplicaCause.INITIAL_STATE),
    "bypassed": (0, "grad/head.bias:grad", (0, 1, 2, 3), ReplicaCause.COLLECTIVE),
    "stepped_without_reduction": (0, "grad/head.bias:grad", (0, 1, 2, 3), ReplicaCause.COLLECTIVE),
    "own_learning_rate": (2, "param/body.weight:value", (3,), ReplicaCause.HYPERPARAMETER),
    "drifting_statistics": (0, "buffer/norm.running_mean:value", (0, 1, 2, 3), ReplicaCause.BUFFER),
    "two_groups": (1, "param/head.bias:value", (2, 3), ReplicaCause.OPTIMIZER),
}
"""Program -> (step, site, odd ranks, cause)."""
SOUND = (
    "clean", "accumulating", "local_statistics", "shared_statistics", "ignored_parameter", "divided_optimizer",
    "frozen_layer",
)  # fmt: skip
LAUNCHES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "module": (4, "module", (*FAULTS, *SOUND, "averaged_by_hand")),
    "state": (4, "state", ("clean", "flipped_parameter", "bypassed")),
    "op": (4, "op", ("clean", "flipped_moment")),
    "two": (2, "module", ("clean", "flipped_moment", "bypassed", "flipped_gradient")),
}
Check = Callable[..., ReplicaAnswer]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    @functools.cache
    def launched(name: str) -> Path:
        num_ranks, level, programs = LAUNCHES[name]
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.replica_job", str(folder), str(num_ranks), level]
        command += programs
        done = run_job(folder, command, Path(__file__).parents[2])
        told = "".join(path.read_text() for path in folder.glob("*.txt"))
        assert done.status == 0, f"{told}\n{done.said[-3000:]}"
        return folder

    @functools.cache
    def answer(program: str, launch: str = "module", **options: tuple[str, ...]) -> ReplicaAnswer:
        with open_run(launched(launch) / program) as run:
            return check_replicas(run, **options)  # type: ignore[arg-type]

    return answer


@pytest.mark.parametrize("program", FAULTS)
def test_a_planted_fault_is_found_on_its_rank_in_its_step(check: Check, program: str) -> None:
    step, site, ranks, cause = FAULTS[program]
    answer = check(program)
    assert answer.first is not None
    assert (answer.first.step, answer.first.site, answer.first.ranks, answer.cause) == (step, site, ranks, cause)
    assert answer.first.has_majority == (len(ranks) == 1)
    assert answer.groups[0].by == "DistributedDataParallel"


@pytest.mark.parametrize("program", SOUND)
def test_a_program_whose_copies_are_as_they_should_be_agrees(check: Check, program: str) -> None:
    answer = check(program)
    assert answer.verdict is ReplicaVerdict.AGREE
    assert (answer.steps, answer.ranks) == (4, 4)


def test_gradients_moments_and_buffers_are_among_what_agrees(check: Check) -> None:
    answer = check("clean")
    assert answer.tensors == 4 + 4 + 1 + 12, "gradients, parameters, the buffer; two moments and a count of each"
    assert answer.groups[0].has_buffers
    assert not check("local_statistics").groups[0].has_buffers


@pytest.mark.parametrize("program", ["bypassed", "stepped_without_reduction"])
def test_gradients_that_nobody_reduced_are_known_as_each_ranks_own(check: Check, program: str) -> None:
    answer = check(program)
    assert "differs in all gradients, and is on each rank its own local gradient" in answer.explanation
    assert "model.module(x)" in answer.remedy
    assert "no_sync()" in answer.remedy


def test_one_gradient_changed_on_one_of_two_ranks_is_not_taken_for_one_that_nobody_reduced(check: Check) -> None:
    answer = check("flipped_gradient", "two")
    assert answer.first is not None and not answer.first.has_majority
    assert "1 of 4 gradients that the optimizer finds differ after the reduction" in answer.explanation
    assert "Look at what one of the ranks alone does to gradients" in answer.remedy


def test_a_flipped_bit_of_the_memory_is_told_to_the_element(check: Check) -> None:
    first = check("flipped_parameter").first
    assert first is not None
    assert (first.dtype, first.shape) == ("float32", (2, 6))
    assert first.elements == (0, 11), "one leaf holds the whole of so small a tensor"


def test_statistics_of_each_ranks_own_batch_are_named_as_such_and_can_be_excepted(check: Check) -> None:
    answer = check("drifting_statistics")
    assert "running statistics that each rank takes of its own batch" in answer.explanation
    assert "holds buffers equal at the beginning of a forward only" in answer.explanation
    assert "broadcasts those of its first rank" in answer.explanation
    assert "SyncBatchNorm" in answer.remedy and "--except '*.running_*'" in answer.remedy
    assert check("drifting_statistics", exceptions=("*.running_*",)).verdict is ReplicaVerdict.AGREE


def test_a_program_without_a_wrapper_declares_nothing_and_the_user_can(check: Check) -> None:
    answer = check("averaged_by_hand")
    assert (answer.verdict, answer.exit_status) == (ReplicaVerdict.UNDECLARED, 2)
    assert "--group 0-3" in answer.remedy
    assert check("averaged_by_hand", groups=("0-3",)).verdict is ReplicaVerdict.AGREE


@pytest.mark.parametrize(("launch", "program"), [("state", "flipped_parameter"), ("op", "flipped_moment")])
def test_a_fault_is_found_at_every_level(check: Check, launch: str, program: str) -> None:
    step, site, ranks, _ = FAULTS[program]
    first = check(program, launch).first
    assert first is not None
    assert (first.step, first.site, first.ranks) == (step, site, ranks)
    assert check("clean", launch).verdict is ReplicaVerdict.AGREE


def test_at_level_state_a_bypassed_wrapper_is_found_and_the_local_gradients_are_not_claimed(check: Check) -> None:
    answer = check("bypassed", "state")
    assert answer.cause is ReplicaCause.COLLECTIVE
    assert "as if they had not been reduced (at level module it could be told" in answer.explanation


def test_two_processes_have_no_majority(check: Check) -> None:
    first = check("flipped_moment", "two").first
    assert first is not None
    assert (first.site, first.ranks, first.has_majority) == ("optim/body.bias:exp_avg", (0, 1), False)
    assert check("bypassed", "two").cause is ReplicaCause.COLLECTIVE
    assert check("clean", "two").verdict is ReplicaVerdict.AGREE
