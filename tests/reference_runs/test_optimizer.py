"""AdamW on FP32 masters, and the average in CPU memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bitcheck.reference_runs import ema as ema_module
from bitcheck.reference_runs.configs import get_config
from bitcheck.reference_runs.ema import EMA
from bitcheck.reference_runs.linear import bf16_parameter
from bitcheck.reference_runs.optimizer import PIECE, AdamW, make_optimizer, unscale_and_clip
from bitcheck.reference_runs.schedule import learning_rate


def test_one_update_is_pytorchs_adamw_on_the_masters() -> None:
    # Longer than one piece, so that pieces join.
    ours = bf16_parameter(torch.randn(PIECE + 300))
    theirs = torch.nn.Parameter(ours.detach().float().clone())
    optimizer = AdamW([ours], lr=1e-2)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    ours.grad = torch.randn(PIECE + 300)
    theirs.grad = ours.grad.clone()
    optimizer.step()
    reference.step()
    state = optimizer.state[ours]
    assert torch.allclose(state["master"], theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours, state["master"].bfloat16())
    assert torch.equal(state["exp_avg"], reference.state[theirs]["exp_avg"].bfloat16())


def test_many_updates_stay_near_pytorchs_in_spite_of_bf16_moments() -> None:
    ours, theirs = bf16_parameter(torch.randn(500)), torch.nn.Parameter(torch.empty(500))
    theirs.data.copy_(ours)
    start = theirs.detach().clone()
    optimizer = AdamW([ours], lr=1e-3)
    reference = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(50):
        ours.grad = torch.randn(500) + 1
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    moved = (theirs - start).norm()
    assert (optimizer.state[ours]["master"] - theirs).norm() < 0.02 * moved


def test_updates_too_small_for_bf16_add_up_in_the_master() -> None:
    parameter = bf16_parameter(torch.full((8,), 100.0))
    optimizer = AdamW([parameter], lr=1e-2, weight_decay=0.0)
    seen = set()
    for _ in range(60):
        parameter.grad = torch.ones(8)
        optimizer.step()
        seen.add(parameter[0].item())
    assert optimizer.state[parameter]["master"][0].item() == pytest.approx(99.4, abs=0.02)
    assert seen == {100.0, 99.5}


def test_state_is_there_before_the_first_step_in_the_dtypes_that_are_promised() -> None:
    parameter = bf16_parameter(torch.randn(3, 4))
    state = AdamW([parameter], lr=1e-3).state[parameter]
    dtypes = {key: value.dtype for key, value in state.items()}
    assert dtypes == {
        "master": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "step": torch.int64,
    }


def test_global_optimizer_hooks_see_the_step() -> None:
    parameter = bf16_parameter(torch.randn(4))
    optimizer = AdamW([parameter], lr=1e-3)
    seen: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    try:
        parameter.grad = torch.ones(4)
        optimizer.step()
    finally:
        handle.remove()
    assert seen == [optimizer]


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    parameter = bf16_parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=1e-2)

    def closure() -> float:
        loss = (parameter.float() ** 2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert optimizer.state[parameter]["master"][0] < 1


def test_gradients_of_micro_batches_add_up_in_fp32() -> None:
    parameter = bf16_parameter(torch.ones(1))
    for value in (1.0, 2.0**-20):
        torch.autograd.backward([parameter * 1.0], [torch.tensor([value], dtype=torch.bfloat16)])
    assert parameter.grad is not None
    assert parameter.grad.item() == 1 + 2.0**-20


def test_pytorchs_way_of_loading_state_is_refused_because_it_would_round_the_masters() -> None:
    optimizer = AdamW([bf16_parameter(torch.randn(4))], lr=1e-3)
    with pytest.raises(NotImplementedError, match="checkpoint"):
        optimizer.load_state_dict(optimizer.state_dict())


def test_gradients_are_unscaled_exactly_and_clipped_to_the_norm() -> None:
    parameters = [bf16_parameter(torch.zeros(3)), bf16_parameter(torch.zeros(4)), bf16_parameter(torch.zeros(1))]
    gradients = [torch.randn(3), torch.randn(4)]

    def clip(max_norm: float) -> float:
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad = gradient * 2.0**16
        return unscale_and_clip(parameters, max_norm, 2.0**16)

    norm = torch.cat(gradients).norm().item()
    assert clip(100.0) == pytest.approx(norm)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=False) if p.grad is not None)
    clip(norm / 4)
    clipped = torch.cat([p.grad for p in parameters if p.grad is not None])
    assert torch.allclose(clipped, torch.cat(gradients) / 4, rtol=1e-5)
    assert parameters[2].grad is None


def test_only_matrices_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = make_optimizer(model, 1e-3, (0.9, 0.95), 1e-8, 0.1).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [p.dim() for p in groups[0]["params"]] == [2]
    assert [p.dim() for p in groups[1]["params"]] == [1, 1, 1]


def test_the_learning_rate_warms_up_decays_and_stays() -> None:
    config = get_config("tiny").optimizer
    rates = [learning_rate(step, config) for step in range(config.decay_steps + 100)]
    warm = config.warmup_steps
    assert rates[0] == config.lr / warm
    assert max(rates) == rates[warm] == config.lr
    assert all(later < earlier for earlier, later in zip(rates[warm:-101], rates[warm + 1 : -100], strict=False))
    assert rates[-1] == pytest.approx(config.lr / 10)


def test_the_average_follows_its_formula() -> None:
    masters = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    ema = EMA(masters, 0.9)
    for _ in range(3):
        ema.start_update({"a": torch.full((3,), 2.0), "b": torch.ones(2, 2)})
    average = ema.tensors()
    assert torch.allclose(average["a"], torch.full((3,), 2 - 0.9**3))
    assert torch.allclose(average["b"], torch.full((2, 2), 1 - 0.9**3))
    ema.close()


def test_whoever_reads_the_average_waits_for_the_update_and_whoever_trains_does_not() -> None:
    may_go_on = threading.Event()
    original = ema_module._average_in

    def slow(*args: object) -> None:
        may_go_on.wait(10)
        original(*args)  # type: ignore[arg-type]

    master = torch.ones(4)
    ema = EMA({"a": torch.zeros(4)}, 0.5)
    with mock.patch.object(ema_module, "_average_in", slow):
        ema.start_update({"a": master})
        master.fill_(1000.0)  # the next optimizer step, before the average has been taken
        threading.Timer(0.05, may_go_on.set).start()
        began = time.perf_counter()
        assert torch.equal(ema.tensors()["a"], torch.full((4,), 0.5))
        assert time.perf_counter() - began > 0.02
    ema.close()


def test_an_update_that_fails_is_heard_of() -> None:
    ema = EMA({"a": torch.zeros(4)}, 0.5)
    with mock.patch.object(ema_module, "_average_in", side_effect=MemoryError("full")):
        ema.start_update({"a": torch.ones(4)})
        with pytest.raises(MemoryError, match="full"):
            ema.wait()
    ema.close()


def test_the_average_lies_in_cpu_memory_in_fp32(tmp_path: Path) -> None:
    ema = EMA({"a": torch.zeros(4)}, 0.5)
    assert ema.tensors()["a"].device.type == "cpu"
    assert ema.tensors()["a"].dtype == torch.float32
    ema.close()
