"""The trainer on several ranks: whose bits it has, that it repeats itself, and that bitcheck names the rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bitcheck
from bitcheck.answer import Answer
from bitcheck.diff import diff_runs
from bitcheck.errors import UsageError
from bitcheck.reference_runs import checkpoint
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.configs.degrees import Degrees
from bitcheck.reference_runs.data import Text
from bitcheck.reference_runs.exchange import Exchange, count_nodes, send_to_experts
from bitcheck.reference_runs.pipeline import layers_of_stages
from bitcheck.reference_runs.reduce import sum_ordered
from bitcheck.reference_runs.sharded import digests_of
from bitcheck.reference_runs.switches import Switches
from bitcheck.reference_runs.train import Options, Trainer, train
from bitcheck.run import open_run
from tests.reference_runs.listeners import Silent
from tests.reference_runs.processes import meet_elsewhere, run_on_ranks

NANO = get_config("nano")
# Four micro-batches: enough for four ranks, or for the four stages of a pipeline of two.
CONFIG = replace(NANO, data=replace(NANO.data, seq_len=16, sequences=4, micro_batches=4, fim_rate=0.5))
TWO_ROUNDS = replace(CONFIG, data=replace(CONFIG.data, micro_batches=8))
NATIVE = Switches.from_options(settings=["comm.reduce=native"])


State = dict[str, str]


def end_state(trainer: Trainer) -> State:
    """The digests of all that the next step depends on, a routed expert's weights apart."""
    values = checkpoint.collect(trainer.model, trainer.optimizer, trainer.ema, trainer.loader)
    return digests_of(values, trainer.ranks)


def run(text: Text, options: Options, config: Any = CONFIG) -> tuple[State, list[float], float]:
    """Train, on this rank or in this process; return the end state, losses and norms, and the held-out loss."""
    listener = Silent()
    trainer = train(config, text, options, listener)
    told = [number for report in listener.reports for number in (report.loss, report.grad_norm)]
    return end_state(trainer), told, trainer.held_out_loss


def run_all(text: Text, options: Options, *more: Options) -> list[tuple[State, list[float], float]]:
    """Train one time after the other in the same processes."""
    results = [run(text, options)]
    for each in more:
        meet_elsewhere()
        results.append(run(text, each))
    return results


def whole(states: list[State]) -> State:
    """What all ranks have; what two of them have is the same."""
    joined: State = {}
    for state in states:
        assert all(joined.setdefault(name, digest) == digest for name, digest in state.items())
    return joined


def test_ordered_sums_give_one_two_and_four_ranks_the_same_bits_and_a_resumed_run_may_change_ranks(
    text: Text, tmp_path: Path
) -> None:
    one_state, one_told, one_held_out = run(text, Options(steps=2))
    two = Options(steps=2, degrees=Degrees(dp=2), save_every=1, out=tmp_path)
    for state, told, held_out in run_on_ranks(2, run, text, two):
        assert (state, told, held_out) == (one_state, one_told, one_held_out)
    four = Options(steps=2, degrees=Degrees(dp=4), resume=tmp_path / "step-000001")
    for state, told, held_out in run_on_ranks(4, run, text, four):
        assert (state, told, held_out) == (one_state, one_told[2:], one_held_out)
    resumed_alone, _, _ = run(text, Options(steps=2, resume=tmp_path / "step-000001"))
    assert resumed_alone == one_state


def test_native_sums_repeat_themselves_on_four_ranks_and_differ_from_one_process(text: Text) -> None:
    native = Options(steps=1, degrees=Degrees(dp=4), switches=NATIVE)
    answers = run_on_ranks(4, run_all, text, native, native)
    first, again = (whole([answer[time][0] for answer in answers]) for time in (0, 1))
    assert first == again
    one, _, _ = run(text, Options(steps=1))
    differing = {name.partition("/")[0] for name in one if one[name] != first[name]}
    assert "masters" in differing
    assert differing <= {"masters", "moments", "ema"}


def sum_of_parts(parts: Tensor, is_ordered: bool) -> bytes:
    """This rank's share of `parts`, dealt out in turn, summed over the ranks."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    mine = parts[dist.get_rank() :: dist.get_world_size()].contiguous()
    if is_ordered:
        total = sum_ordered(mine, group)
    else:
        total = mine.sum(0)
        dist.all_reduce(total)
    dist.destroy_process_group()
    return total.numpy().tobytes()


def test_an_ordered_sum_has_the_bits_of_adding_one_part_after_the_other() -> None:
    parts = torch.randn(12, 1001) * torch.logspace(-4, 4, 12)[:, None]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for num_ranks in (3, 4):
        assert set(run_on_ranks(num_ranks, sum_of_parts, parts, True)) == {expected.numpy().tobytes()}
    assert set(run_on_ranks(4, sum_of_parts, parts, False)) != {expected.numpy().tobytes()}


def test_experts_on_two_ranks_repeat_themselves_resumed_too_and_learn_what_one_process_does(
    text: Text, tmp_path: Path
) -> None:
    fresh = Options(steps=2, degrees=Degrees(dp=2, ep=2), save_every=1, out=tmp_path)
    resumed = replace(fresh, save_every=None, resume=tmp_path / "step-000001")
    answers = run_on_ranks(2, run_all, text, fresh, resumed)
    first, again = (whole([answer[time][0] for answer in answers]) for time in (0, 1))
    assert first == again
    one_state, one_told, one_held_out = run(text, Options(steps=2))
    assert first.keys() == one_state.keys()
    _, told, held_out = answers[0][0]
    # An expert's rows of two micro-batches are one group here: sums are bracketed in another way, no more.
    assert told == pytest.approx(one_told, rel=1e-3)
    assert held_out == pytest.approx(one_held_out, rel=1e-3)


def test_with_the_same_number_of_expert_ranks_more_data_parallel_ranks_change_no_bit(text: Text) -> None:
    two = run_on_ranks(2, run, text, Options(steps=1, degrees=Degrees(dp=2, ep=2)), TWO_ROUNDS)
    four = run_on_ranks(4, run, text, Options(steps=1, degrees=Degrees(dp=4, ep=2)), TWO_ROUNDS)
    assert whole([state for state, _, _ in two]) == whole([state for state, _, _ in four])


def there_and_back(loads: list[list[int]]) -> tuple[list[list[float]], list[int], bool]:
    """Send rows (rank, expert) to experts; return what came, the loads, and whether the way back undoes it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    loads_E = torch.tensor(loads[rank])
    experts = torch.arange(len(loads_E)).repeat_interleave(loads_E)
    rows = torch.stack((torch.full_like(experts, rank), experts), 1).float().requires_grad_()
    exchange = Exchange(loads_E, group)
    came = send_to_experts(rows, exchange)
    (gradient,) = torch.autograd.grad((came * came).sum(), rows)
    is_undone = torch.equal(exchange.to_tokens(came.detach()), rows) and torch.equal(gradient, 2 * rows)
    dist.destroy_process_group()
    return came.tolist(), exchange.loads_E.tolist(), is_undone


def test_rows_come_sorted_by_expert_then_by_rank_and_go_back_where_they_were_even_where_a_rank_gets_none() -> None:
    first, second = run_on_ranks(2, there_and_back, [[2, 1, 0, 1], [1, 2, 0, 0]])
    assert first == ([[0, 0], [0, 0], [1, 0], [0, 1], [1, 1], [1, 1]], [3, 3], True)
    assert second == ([[0, 3]], [0, 1], True)
    first, second = run_on_ranks(2, there_and_back, [[1, 0, 0, 0], [0, 1, 0, 0]])
    assert first == ([[0, 0], [1, 1]], [1, 1], True)
    assert second == ([], [0, 0], True)


def test_a_token_visits_a_node_once_for_all_of_its_experts_there() -> None:
    experts = torch.tensor([[0, 1, 2], [7, 0, 5], [4, 5, 7]])
    assert count_nodes(experts, num_experts=8, num_nodes=4).tolist() == [2, 3, 2]


def gradients_of_a_step(text: Text, degrees: Degrees) -> State:
    """Digests of what the optimizer finds in the first step."""
    from bitcheck.reference_runs.ranks import process_group

    with process_group(degrees) as ranks:
        trainer = Trainer(CONFIG, text, Options(steps=1, degrees=degrees), ranks)
        trainer.train_step()
        trainer.ema.close()
    named = dict(trainer.model.named_parameters())
    return digests_of({name: parameter.grad for name, parameter in named.items()})


def test_a_pipeline_of_two_has_the_gradients_of_one_process_but_for_the_shared_embedding(text: Text) -> None:
    piped = whole(run_on_ranks(2, gradients_of_a_step, text, Degrees(pp=2)))
    alone = gradients_of_a_step(text, Degrees())
    assert {name for name in alone if piped.get(name) != alone[name]} == {"embedding.weight"}
    assert piped.keys() == alone.keys()


def test_a_pipeline_repeats_itself_resumed_too(text: Text, tmp_path: Path) -> None:
    fresh = Options(steps=2, degrees=Degrees(pp=2), save_every=1, out=tmp_path)
    resumed = replace(fresh, save_every=None, resume=tmp_path / "step-000001")
    answers = run_on_ranks(2, run_all, text, fresh, resumed)
    first, again = (whole([answer[time][0] for answer in answers]) for time in (0, 1))
    assert first == again
    one_state, one_told, one_held_out = run(text, Options(steps=2))
    assert first.keys() == one_state.keys()
    _, told, held_out = answers[0][0]
    assert told == pytest.approx(one_told, rel=1e-3)
    assert held_out == pytest.approx(one_held_out, rel=1e-3)


def record_around(text: Text, options: Options, *resumed: Options) -> None:
    """Record each training from outside, as `bitcheck run` does: the recorder is told of no model."""
    for number, each in enumerate((options, *resumed)):
        if number:
            meet_elsewhere()
        with bitcheck.record(each.out / f"run-{number}", level="module"):
            run(text, each)


def test_a_pipeline_recorded_from_outside_is_found_to_be_resumed_with_the_same_state(
    text: Text, tmp_path: Path
) -> None:
    """Of a stage that is called later the initial state is known too, and neighbours that greet are in no step."""
    fresh = Options(steps=2, degrees=Degrees(pp=2), save_every=1, out=tmp_path)
    resumed = replace(fresh, save_every=None, resume=tmp_path / "step-000001")
    run_on_ranks(2, record_around, text, fresh, resumed)
    answer = compare(tmp_path / "run-0", tmp_path / "run-1")
    assert answer.verdict == "identical"
    assert answer.compared.steps == 1


@pytest.mark.parametrize(("num_layers", "num_stages"), [(2, 4), (4, 4), (6, 8), (27, 8)])
def test_every_layer_is_in_one_stage_and_stages_between_the_ends_have_some(num_layers: int, num_stages: int) -> None:
    layers = layers_of_stages(num_layers, num_stages)
    assert [index for stage in layers for index in stage] == list(range(num_layers))
    assert len(layers) == num_stages
    assert all(layers[1:-1])


def record_with_a_fault(text: Text, options: Options, rank: int, setting: str) -> None:
    """Train with a switch in another form on one rank."""
    if int(os.environ["RANK"]) == rank:
        options = replace(options, switches=Switches.from_options(settings=[setting]))
    run(text, options)


def compare(baseline: Path, candidate: Path) -> Answer:
    with open_run(baseline) as ours, open_run(candidate) as theirs:
        return diff_runs(ours, theirs)


def test_a_fault_on_one_of_the_ranks_that_share_the_experts_is_found_on_that_rank(text: Text, tmp_path: Path) -> None:
    options = Options(steps=1, degrees=Degrees(dp=2, ep=2), level="module", record=tmp_path / "first")
    run_on_ranks(2, run, text, options)
    faulty = replace(options, record=tmp_path / "faulty")
    run_on_ranks(2, record_with_a_fault, text, faulty, 1, "moe.dprob=atomic")
    answer = compare(tmp_path / "first", tmp_path / "faulty")
    assert answer.verdict == "diverged"
    assert answer.cause == "backward"
    assert answer.first is not None
    assert (answer.first.rank, answer.first.site) == (1, "backward/mtp.block.moe.experts.down:grad_in.1")
    assert {origin.rank for origin in answer.origins} == {1}
    run_on_ranks(2, run, text, replace(options, record=tmp_path / "twin"))
    assert compare(tmp_path / "first", tmp_path / "twin").verdict == "identical"


def test_a_piece_left_out_of_a_sharded_checkpoint_is_named(text: Text, tmp_path: Path) -> None:
    options = Options(
        steps=2, degrees=Degrees(dp=2, ep=2), record=tmp_path / "first", save_every=1, out=tmp_path / "checkpoints"
    )
    again = replace(options, record=tmp_path / "resumed", resume=tmp_path / "checkpoints" / "step-000001")
    forgetful = replace(again, record=tmp_path / "forgetful", leave_out=("router_bias",))
    run_on_ranks(2, run_all, text, options, again, forgetful)
    assert compare(tmp_path / "first", tmp_path / "resumed").verdict == "identical"
    answer = compare(tmp_path / "first", tmp_path / "forgetful")
    assert answer.cause == "restore"
    assert {origin.module for origin in answer.origins} == {"layers.1.moe.router", "mtp.block.moe.router"}


@pytest.mark.parametrize(
    ("dp", "ep", "pp", "world_size", "sentence"),
    [
        (4, 1, 1, 1, r"--dp 4 --pp 1 is for 4 processes and this run has 1: start it with torchrun --nproc-per-node 4"),
        (2, 1, 2, 2, r"--dp 2 --pp 2 is for 4 processes and this run has 2"),
        (None, 1, 4, 2, r"--dp 1 --pp 4 is for 4 processes and this run has 2"),
        (4, 3, 1, 4, r"--ep 3: .* divides --dp 4 and the 8 experts of nano"),
        (3, 1, 1, 3, r"--dp 3: 4 micro-batches a step cannot be shared by 3 ranks; give --micro-batches a multiple"),
        (2, 1, 2, 4, r"--pp 2: DualPipeV has 4 stages .* here 2; give --micro-batches 8 or more"),
        (1, 1, 3, 3, r"--pp 3: .* give --micro-batches 6 or more"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_in_a_sentence(
    dp: int | None, ep: int, pp: int, world_size: int, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        Degrees.from_options(dp, ep, pp, world_size, CONFIG)


def test_a_pipeline_has_no_more_stages_than_layers_and_ends() -> None:
    with pytest.raises(UsageError, match="6 stages are more than the 2 layers of nano, the embedding and the head"):
        Degrees.from_options(1, 1, 3, 3, TWO_ROUNDS)


def test_data_parallelism_takes_the_ranks_that_a_pipeline_leaves() -> None:
    assert Degrees.from_options(None, 2, 2, 4, TWO_ROUNDS) == Degrees(dp=2, ep=2, pp=2)
    assert Degrees.from_options(None, 1, 1, 1, CONFIG) == Degrees()
