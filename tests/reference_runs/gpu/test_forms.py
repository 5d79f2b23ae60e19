"""Each GPU form against the portable form of the same module: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcheck.reference_runs import device as devices
from bitcheck.reference_runs.attention import AttentionCore
from bitcheck.reference_runs.configs import Config, get_config
from bitcheck.reference_runs.ema import EMA
from bitcheck.reference_runs.embedding import Embedding, Head
from bitcheck.reference_runs.experts import Down, WeightedDown
from bitcheck.reference_runs.linear import GroupedLinear, Linear
from bitcheck.reference_runs.mla import MLA, rotations
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.moe import Combine, Dispatch, MoE, TopK, make_plan
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.optimizer import make_optimizer, unscale_and_clip
from bitcheck.reference_runs.scan import Scan
from bitcheck.reference_runs.ssm import CausalConv, gate
from bitcheck.reference_runs.switches import Switches
from bitcheck.reference_runs.train import deterministic_algorithms
from tests.reference_runs.gpu.conftest import OnDevice
from tests.two_memories import compare_in_two_memories

BF16_STEP = 2.0**-8
LOADS = torch.tensor([70, 0, 130, 1])
"""Ragged experts, one of them empty, one of a single row."""
NUM_ROWS = 201


@contextmanager
def portable() -> Any:
    """Inside a test whose CPU tensors take the GPU's forms: the portable ones again."""
    was, devices._is_interpreted = devices._is_interpreted, False
    try:
        yield
    finally:
        devices._is_interpreted = was


def run(module: nn.Module, operands: Sequence[Tensor], dy: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of operands and parameters, on the CPU."""
    place = next((p.device for p in module.parameters()), operands[0].device)
    inputs = [operand.detach().to(place).requires_grad_(operand.is_floating_point()) for operand in operands]
    y = module(*inputs)
    y.backward(dy.to(place))
    results = {"y": y.detach()}
    results |= {f"d{index}": x.grad for index, x in enumerate(inputs) if x.grad is not None}
    results |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: tensor.cpu() for name, tensor in results.items()}


def assert_agree(
    on_device: OnDevice[Any], module: nn.Module, operands: Sequence[Tensor], dy: Tensor, relative: float
) -> dict[str, Tensor]:
    with portable():
        theirs = run(module, operands, dy)
    module.zero_grad()
    copied = on_device(module)
    if torch.cuda.is_available() and not any(True for _ in module.parameters()):
        operands, dy = [operand.cuda() for operand in operands], dy.cuda()
    ours = run(copied, operands, dy)
    assert ours.keys() == theirs.keys()
    for name, theirs_of in theirs.items():
        assert ours[name].dtype == theirs_of.dtype, name
        assert ours[name].shape == theirs_of.shape, name
        error = (ours[name].double() - theirs_of.double()).norm() / theirs_of.double().norm()
        assert error < relative, f"{name}: {error:.2e}"
    return ours


@pytest.mark.parametrize(("precision", "relative"), [("bf16", 2 * BF16_STEP), ("fp8", 2 * BF16_STEP)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_linear(on_device: OnDevice[Any], precision: Any, relative: float, power_of_two: bool) -> None:
    linear = Linear(160, 80, precision, 0.1, power_of_two)
    assert_agree(on_device, linear, [torch.randn(3, 50, 160).bfloat16()], torch.randn(3, 50, 80).bfloat16(), relative)


def test_a_linear_of_strided_rows_as_a_split_leaves_them(on_device: OnDevice[Any]) -> None:
    x, dy = torch.randn(150, 192).bfloat16()[:, 16:176], torch.randn(150, 160).bfloat16()[:, 40:120]
    assert_agree(on_device, Linear(160, 80, "fp8", 0.1), [x], dy, 2 * BF16_STEP)


@pytest.mark.parametrize(("num_rows", "is_taken"), [(150, False), (152, True), (4, False), (4096, True)])
def test_products_of_rows_that_cublas_refuses_are_the_kernels(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, is_taken: bool
) -> None:
    from bitcheck.reference_runs.gpu import dense

    called: list[str] = []

    def note(name: str) -> Any:
        return lambda lhs, rhs, out_dtype: called.append(name)

    monkeypatch.setattr(dense, "_has_blockwise_product", lambda device: True)
    monkeypatch.setattr(dense, "gives_float32", lambda device: True)
    monkeypatch.setattr(dense, "gemm", note("kernel"))
    monkeypatch.setattr(dense, "gemm_cublas", note("cublas"))
    x = dense.Quantised(torch.empty(num_rows, 128), torch.empty(num_rows, 1), 1)
    dense.product(x, x)
    dense.wgrad(x, x)
    assert called == ["cublas" if is_taken else "kernel"] * 2


def test_a_linear_whose_width_no_product_takes_falls_back_to_the_portable_form(on_device: OnDevice[Any]) -> None:
    linear = Linear(72, 80, "fp8", 0.1)
    x, dy = torch.randn(150, 72).bfloat16(), torch.randn(150, 80).bfloat16()
    # On a CPU it is the same code; on a GPU other orders of summation.
    assert_agree(on_device, linear, [x], dy, BF16_STEP)


class OverExperts(nn.Module):
    """A module over experts whose loads are given beforehand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *operands: Tensor) -> Any:
        return self.module(*operands, LOADS.to(operands[0].device))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("is_wgrad_fixed", [True, False])
def test_a_grouped_linear(on_device: OnDevice[Any], precision: Any, is_wgrad_fixed: bool) -> None:
    linear = OverExperts(GroupedLinear(4, 160, 80, precision, 0.1, is_wgrad_fixed))
    x, dy = torch.randn(NUM_ROWS, 160).bfloat16(), torch.randn(NUM_ROWS, 80).bfloat16()
    ours = assert_agree(on_device, linear, [x], dy, 2 * BF16_STEP)
    assert not ours["module.weight"][1].any()


@pytest.mark.parametrize("dprob_form", ["slots", "serial", "atomic"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("width", [208, 256])
def test_the_experts_second_half(on_device: OnDevice[Any], precision: Any, dprob_form: str, width: int) -> None:
    down = OverExperts(WeightedDown(4, width, 48, precision, 0.1, dprob_form, is_wgrad_fixed=True))
    h, dy = torch.randn(NUM_ROWS, 2 * width).bfloat16(), torch.randn(NUM_ROWS, 48).bfloat16()
    prob = torch.rand(NUM_ROWS)
    assert_agree(on_device, down, [h, prob], dy, 6 * BF16_STEP)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("width", [208, 256])
def test_a_dense_second_half(on_device: OnDevice[Any], precision: Any, width: int) -> None:
    down = Down(width, 48, precision, 0.1)
    h, dy = torch.randn(150, 2 * width).bfloat16(), torch.randn(150, 48).bfloat16()
    assert_agree(on_device, down, [h], dy, 6 * BF16_STEP)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_norm_and_an_embedding(on_device: OnDevice[Any], is_fixed: bool) -> None:
    norm = RMSNorm(96, 1e-6, is_fixed)
    norm.weight.data.copy_(torch.rand(96) + 0.5)
    x, dy = torch.randn(70, 160).bfloat16()[:, :96], torch.randn(70, 96).bfloat16()
    assert_agree(on_device, norm, [x], dy, 2 * BF16_STEP)
    ids, dy = torch.randint(0, 40, (5, 40)), torch.randn(5, 40, 24)
    assert_agree(on_device, Embedding(64, 24, 1.0, is_fixed), [ids], dy, 1e-6)


def test_the_heads_products_are_in_full_precision_and_its_gradients_of_a_gradient_in_bf16(
    on_device: OnDevice[Any],
) -> None:
    x, dy = torch.randn(3, 20, 32).bfloat16(), torch.randn(3, 20, 48)
    ours = assert_agree(on_device, Head(32, 48, 1.0), [x], dy, BF16_STEP)
    again = assert_agree(on_device, Head(32, 48, 1.0), [x], dy.bfloat16().float(), BF16_STEP)
    assert ours["weight"].dtype == torch.float32
    assert not torch.equal(ours["y"], ours["y"].bfloat16().float())
    assert torch.equal(ours["weight"], again["weight"])


@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_scan(on_device: OnDevice[Any], is_fixed: bool) -> None:
    wide, dy = torch.randn(2, 32, 3 * 40 + 2 * 16), torch.randn(2, 32, 3, 40)
    tolerance = 1e-5
    if torch.cuda.is_available():
        # TF32 there, which cuts an operand of a product by up to 2**-10, and a term of any result is a product of
        # four at most. Without signs no terms cancel (those of dA do, to a thousandth), so this bounds the sums too.
        wide, dy, tolerance = wide.abs(), dy.abs(), 4 * 2.0**-10
    x, b, c = wide.split((120, 16, 16), -1)
    dt, a, d = torch.rand(2, 32, 3) * 0.5, -torch.rand(3) * 3, torch.rand(3)
    operands = [x.unflatten(-1, (3, 40)), dt, a, b, c, d]
    assert_agree(on_device, Scan(16, is_fixed), operands, dy, tolerance)


def test_the_convolution_and_the_gate_around_the_scan(on_device: OnDevice[Any]) -> None:
    x, dy = torch.randn(2, 20, 56).bfloat16()[..., 8:40], torch.randn(2, 20, 32).bfloat16()

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = CausalConv(32, 4)

        def forward(self, x: Tensor) -> Any:
            return self.conv(x).bfloat16()

    assert_agree(on_device, Narrow(), [x], dy, 3 * BF16_STEP)

    class Gate(nn.Module):
        def forward(self, y: Tensor, z: Tensor) -> Any:
            return gate(y, z)

    assert_agree(on_device, Gate(), [dy, x], torch.randn(2, 20, 32).bfloat16(), 3 * BF16_STEP)


def plan_of(experts: Tensor, device: str) -> tuple[Any, Any]:
    with portable():
        theirs = make_plan(experts, 8)
    return theirs, make_plan(experts.to(device), 8)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_plan_and_the_way_to_the_experts_and_back(
    on_device: OnDevice[Any], device: str, precision: Any, is_fixed: bool
) -> None:
    # The last expert gets nothing.
    experts = torch.stack([torch.randperm(7)[:3] for _ in range(50)])
    theirs, ours = plan_of(experts, device)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine.cpu(), other)
    row, slot = theirs[:2]

    class There(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Dispatch(precision, is_fixed)(x, row.to(x.device), slot.to(x.device))

    class Back(nn.Module):
        def forward(self, y: Tensor, shared: Tensor) -> Any:
            return Combine(is_fixed)(y, shared, row.to(y.device), slot.to(y.device))

    x, dy = torch.randn(50, 160).bfloat16(), torch.randn(150, 160).bfloat16()
    assert_agree(on_device, There(), [x], dy, 3 * BF16_STEP)
    assert_agree(on_device, Back(), [dy, x], torch.randn(50, 160).bfloat16(), 3 * BF16_STEP)


def test_a_mixture_of_experts_routes_alike_and_has_the_gradients_of_the_portable_one(on_device: OnDevice[Any]) -> None:
    config = replace(get_config("nano").model, num_experts=16, top_k=3, init_std=0.3)
    moe = MoE(config, "bf16", Switches.from_options())

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = moe

        def forward(self, x: Tensor) -> Any:
            y, balance = self.moe(x)
            return y + (1000 * balance).bfloat16()

    x, dy = torch.randn(2, 32, config.d_model).bfloat16(), torch.randn(2, 32, config.d_model).bfloat16()
    total = Total()
    assert_agree(on_device, total, [x], dy, 8 * BF16_STEP)
    load = moe.router.load.clone()
    copied = on_device(total)
    copied.moe.router.load.zero_()
    copied(x.to(copied.moe.router.load.device))
    assert torch.equal(copied.moe.router.load.cpu(), load)
    assert int(load.sum()) == 64 * 3


def test_mla_recomputes_its_projections_and_not_attention_itself(
    on_device: OnDevice[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitcheck.reference_runs.gpu import mixers

    calls: list[str] = []
    if torch.cuda.is_available():
        flash = mixers.aten._scaled_dot_product_flash_attention
        backward = mixers.aten._scaled_dot_product_flash_attention_backward

        def counted(*arguments: Any, **options: Any) -> Any:
            calls.append("forward")
            return flash(*arguments, **options)

        names = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
        replacement: Any = SimpleNamespace(**dict(zip(names, (counted, backward), strict=True)))
    else:
        replacement = stand_in(calls)
    monkeypatch.setattr(mixers, "aten", replacement)
    config = replace(get_config("nano").model, kv_lora=48, d_rope=16, init_std=0.2)
    rotation = rotations(20, config.d_rope, config.rope_theta)

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mla = MLA(config, "fp8", Switches.from_options())

        def forward(self, x: Tensor) -> Any:
            return self.mla(x, rotation.to(x.device))

    x, dy = (torch.randn(2, 20, config.d_model).bfloat16() for _ in range(2))
    assert_agree(on_device, Rotated(), [x], dy, 0.05 if torch.cuda.is_available() else 0.15)
    assert calls.count("forward") == 1


def stand_in(calls: list[str]) -> Any:
    """FlashAttention's two operators with plain arithmetic, as aten declares them; they want one width."""

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float) -> Any:
        calls.append("forward")
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and causal and not dropout and not debug
        out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=scale)
        empty = torch.empty(0)
        return out.bfloat16(), empty, None, None, q.shape[2], k.shape[2], empty, empty, empty

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: None, cum_k: None,
        max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> Any:  # fmt: skip
        calls.append("deterministic" if torch.are_deterministic_algorithms_enabled() else "fast")
        assert do.shape == v.shape and max_q == max_k == q.shape[2]
        with torch.enable_grad():
            leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
            F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale).backward(do.float())
        return tuple(leaf.grad.bfloat16() for leaf in leaves if leaf.grad is not None)

    return SimpleNamespace(
        _scaled_dot_product_flash_attention=forward, _scaled_dot_product_flash_attention_backward=backward
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_attention_follows_its_own_switch_whatever_the_flag_is(
    on_device: OnDevice[Any], monkeypatch: pytest.MonkeyPatch, is_fixed: bool, dtype: torch.dtype
) -> None:
    from bitcheck.reference_runs.gpu import mixers

    calls: list[str] = []
    if not torch.cuda.is_available():
        monkeypatch.setattr(mixers, "aten", stand_in(calls))
    q, k = (torch.randn(2, 3, 70, 24).to(dtype) for _ in range(2))
    v, dy = (torch.randn(2, 3, 70, 16).bfloat16() for _ in range(2))
    for flag in (True, False):
        torch.use_deterministic_algorithms(flag)
        try:
            assert_agree(on_device, AttentionCore(is_fixed), [q, k, v], dy, 4 * BF16_STEP)
            assert torch.are_deterministic_algorithms_enabled() == flag
        finally:
            torch.use_deterministic_algorithms(False)
    if calls:
        assert calls == ["forward", "deterministic" if is_fixed else "fast"] * 2


def test_clipping_and_adamw(on_device: OnDevice[Any]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Linear(48, 80, "fp8", 0.1), RMSNorm(80, 1e-6, True))
    model.register_parameter("rate", nn.Parameter(torch.rand(5)))
    copied = on_device(model)
    ours, theirs = (make_optimizer(m, 1e-2, (0.9, 0.95), 1e-8, 0.1) for m in (copied, model))
    for _ in range(3):
        for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
            other.grad = torch.randn(other.shape) * 2.0**16
            mine.grad = other.grad.clone().to(mine.device)
        with portable():
            their_norm = unscale_and_clip(model.parameters(), 1.0, 2.0**16)
            theirs.step()
        our_norm = unscale_and_clip(copied.parameters(), 1.0, 2.0**16)
        ours.step()
        assert float(our_norm) == pytest.approx(float(their_norm), rel=1e-5)
    for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
        assert (mine.grad.cpu() - other.grad).norm() < 1e-5 * other.grad.norm()
        for key, state in theirs.state[other].items():
            # Moments are rounded to BF16, which the interpreter truncates.
            tolerance = 2 * BF16_STEP if key.startswith("exp_avg") else 1e-3
            mine_of = ours.state[mine][key].cpu()
            assert mine_of.dtype == state.dtype
            assert (mine_of.double() - state.double()).norm() <= tolerance * state.double().norm(), key
        assert (
            mine.detach().cpu().double() - other.detach().double()
        ).norm() < 2 * BF16_STEP * other.detach().double().norm()


def test_weights_are_quantised_alike_and_transposed_beside(on_device: OnDevice[Any]) -> None:
    for module in (Linear(160, 80, "fp8", 0.1), GroupedLinear(3, 160, 80, "fp8", 0.1, True)):
        copied = on_device(module)
        assert torch.equal(copied.codes.cpu().view(torch.uint8), module.codes.view(torch.uint8))
        assert torch.equal(copied.scale.cpu(), module.scale)
        assert torch.equal(copied.codes_t.cpu().view(torch.uint8), module.codes.view(torch.uint8).transpose(1, 2))
        assert torch.equal(copied.scale_t.cpu(), module.scale.transpose(1, 2))
        assert copied.scale.stride(-2) % 4 == 0
        assert copied.scale_t.stride(-2) % 4 == 0


def test_derived_weights_stay_the_same_tensors_and_are_made_anew_where_the_weight_is_another(
    on_device: OnDevice[Any],
) -> None:
    copied = on_device(GroupedLinear(3, 160, 80, "fp8", 0.1, True))
    before = {name: (buffer, buffer.clone()) for name, buffer in copied.named_buffers()}
    with torch.no_grad():
        copied.weight.mul_(1.7)
    copied.derive()
    for name, buffer in copied.named_buffers():
        was, bits = before[name]
        assert buffer is was
        assert not torch.equal(buffer.view(torch.uint8), bits.view(torch.uint8)), name
    fresh = on_device(copied)
    for name, buffer in copied.named_buffers():
        assert torch.equal(fresh.get_buffer(name).view(torch.uint8), buffer.view(torch.uint8)), name
    copied.keep_groups(1, 2)
    copied.derive()
    assert copied.codes_t.shape == (2, 160, 80)
    assert copied.scale.stride(-2) % 4 == 0


def whole_model(config: Config) -> tuple[Model, tuple[Tensor, Tensor]]:
    """A small model of widths for which nothing falls back, and a batch; no dropout, whose generators differ."""
    shape = replace(config.model, kv_lora=48, d_rope=16, expert_width=128, dropout=0.0, init_std=0.05)
    tokens = torch.randint(0, 256, (2, 34))
    batch = tokens[:, :-2], torch.stack((tokens[:, 1:-1], tokens[:, 2:]), -1)
    return Model(shape, 32, "fp8", Switches.from_options()), batch


@pytest.mark.parametrize("name", ["nano", "nano-hybrid"])
def test_what_uninitialised_memory_holds_changes_no_bit(
    on_device: OnDevice[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from bitcheck.reference_runs.gpu import mixers

    if not torch.cuda.is_available():
        monkeypatch.setattr(mixers, "aten", stand_in([]))
    model, batch = whole_model(get_config(name))
    results = []
    for form in ("off", "on"):
        with deterministic_algorithms(Switches.from_options(settings=[f"memory.fill={form}"])):
            copied = on_device(model)
            losses = copied(*(tensor.to(copied.head.weight.device) for tensor in batch))
            (losses.total * 2.0**16).backward()
        results.append([losses.total.detach(), *(parameter.grad for parameter in copied.parameters())])
    assert all(torch.equal(off, on) for off, on in zip(*results, strict=True))
    assert not any(bool(value.isnan().any()) for value in results[1])


def test_recorded_at_level_op_two_processes_are_identical_whatever_their_memory_held(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter's memory is the C library's; tests marked gpu record the trainer on a GPU")
    answer = compare_in_two_memories(
        tmp_path, lambda run: ["tests.reference_runs.gpu.recorded_job", "nano-hybrid", run]
    )
    assert answer.verdict == "identical", answer.explanation
    assert answer.compared.events > 2000


@contextmanager
def hooked(model: Model, kind: type[nn.Module] | None, hook: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Inside, a tensor that a module of `kind` gives, or one without parts where None, is what `hook` makes of it."""

    def add(name: str, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda _, __, y: hook(name, y) if isinstance(y, Tensor) else y)

    handles = [
        add(name, module)
        for name, module in model.named_modules()
        if (isinstance(module, kind) if kind is not None else not any(module.children()))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_and_gradients(model: Model, batch: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    losses = model(*(tensor.to(model.head.weight.device) for tensor in batch))
    (losses.total * 2.0**16).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        gradients[name] = parameter.grad.cpu().double()
    return losses.main.item(), gradients


@pytest.mark.parametrize("name", ["nano", "nano-hybrid"])
def test_a_whole_model_has_the_loss_and_the_gradients_of_the_portable_one(
    on_device: OnDevice[Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from bitcheck.reference_runs.gpu import mixers

    if not torch.cuda.is_available():
        monkeypatch.setattr(mixers, "aten", stand_in([]))
    model, batch = whole_model(get_config(name))
    chosen: dict[str, Tensor] = {}

    def keep(name: str, experts_TK: Tensor) -> Tensor:
        return chosen.setdefault(name, experts_TK)

    def choose_again(name: str, experts_TK: Tensor) -> Tensor:
        # A rounding turns some tokens to other experts, which says nothing of either form. `TopK` has its own tests.
        return chosen[name].to(experts_TK.device)

    def move(name: str, y: Tensor) -> Tensor:
        noise = 1 + BF16_STEP * torch.randn(y.shape)
        return (y * noise).to(y.dtype) if y.is_floating_point() else y

    copied = on_device(model)
    with portable(), hooked(model, TopK, keep):
        loss, theirs = loss_and_gradients(model, batch)
    assert chosen
    # How far the portable form's gradients go from there when what its modules give is moved by a rounding: FP8's
    # next code is up to an eighth away, and sums that cancel, as the scan's D, move by more.
    with portable(), hooked(model, TopK, choose_again), hooked(model, None, move):
        moved = [loss_and_gradients(model, batch)[1] for _ in range(3)]
    with hooked(copied, TopK, choose_again):
        our_loss, ours = loss_and_gradients(copied, batch)
    assert our_loss == pytest.approx(loss, rel=2e-3)
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        floor = max(float((other[name] - gradient).norm() / gradient.norm()) for other in moved)
        # The interpreter, which cuts BF16 off instead of rounding it, comes to 1.1 times.
        assert error < 2 * floor, f"{name}: {error:.3f}, a rounding moves it by {floor:.3f}"


@pytest.mark.parametrize("function", [devices.gpu_forms, devices.gpu_products])
def test_cpu_tensors_take_the_portable_forms(function: Callable[[Tensor], Any]) -> None:
    assert function(torch.ones(16, 16)) is None


def test_the_average_of_a_run_on_a_gpu(on_device: OnDevice[Any]) -> None:
    model = nn.Sequential(Linear(48, 80, "bf16", 0.1), RMSNorm(80, 1e-6, True))
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    with portable():
        theirs = EMA(masters, 0.9)
    ours = EMA({name: p.detach().float() for name, p in on_device(model).named_parameters()}, 0.9)
    for _ in range(3):
        moved = {name: torch.randn_like(master) for name, master in masters.items()}
        theirs.start_update(moved)
        ours.start_update({name: value.to(ours.tensors()[name].device) for name, value in moved.items()})
    for name, average in theirs.tensors().items():
        torch.testing.assert_close(ours.tensors()[name].cpu(), average)
    theirs.close()
    ours.close()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(576, 2048, 4096), (160, 256, 500), (5632, 2048, 1000)])
def test_a_weight_gradient_by_cublas_is_that_of_the_kernel(shape: tuple[int, int, int]) -> None:
    from bitcheck.reference_runs.gpu import dense
    from bitcheck.reference_runs.kernels.gemm import gemm
    from bitcheck.reference_runs.kernels.quantise import quantise_columns

    num_outs, num_ins, rows = shape
    dy, x = (
        quantise_columns(torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)) for width in (num_outs, num_ins)
    )
    ours, theirs = dense.wgrad(dy, x), gemm(dy, x, out_dtype=torch.float32)
    print(f"float32 from cuBLAS: {dense.gives_float32(dy.values.device)}")
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() < 1e-4 * theirs.norm()
    assert torch.equal(dense.wgrad(dy, x), ours)
