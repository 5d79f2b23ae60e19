"""Attention, the second token ahead, the hybrid's mixer and the whole model, against plain code."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitcheck.reference_runs.configs import CONFIGS, Config, get_config
from bitcheck.reference_runs.linear import Linear
from bitcheck.reference_runs.mla import MLA, rotate, rotations
from bitcheck.reference_runs.model import Model
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.ssm import SSM, CausalConv
from bitcheck.reference_runs.switches import Switches

NANO = get_config("nano")
HYBRID = get_config("nano-hybrid")
DETERMINISTIC = Switches.from_options()


def make_model(config: Config = NANO, dropout: float = 0.0) -> Model:
    return Model(replace(config.model, dropout=dropout), config.data.seq_len, "fp8", DETERMINISTIC)


def make_batch(config: Config = NANO) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (2, config.data.seq_len + 2))
    return tokens[:, :-2], torch.stack((tokens[:, 1:-1], tokens[:, 2:]), -1)


def linear(layer: Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.double().t()


def norm(layer: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), layer.weight.double(), layer.eps)


def test_rotation_makes_scores_depend_on_the_distance_alone() -> None:
    rotation = rotations(64, 8, 10_000.0)
    q, k = torch.randn(8), torch.randn(8)
    queries, keys = rotate(q.expand(1, 1, 64, 8), rotation)[0, 0], rotate(k.expand(1, 1, 64, 8), rotation)[0, 0]
    scores = queries @ keys.t()
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert torch.equal(queries[0], q)


def test_mla_is_attention_over_what_its_latents_unfold_to() -> None:
    c = replace(NANO.model, init_std=0.2)
    mla = MLA(c, "bf16", DETERMINISTIC)
    rotation = rotations(20, c.d_rope, c.rope_theta)
    x = torch.randn(2, 20, c.d_model).bfloat16()
    exact = x.double()
    queries = linear(mla.wq_b, norm(mla.q_norm, linear(mla.wq_a, exact))).view(2, 20, c.num_heads, -1)
    latent, k_rope = linear(mla.wkv_a, exact).split((c.kv_lora, c.d_rope), -1)
    keys_values = linear(mla.wkv_b, norm(mla.kv_norm, latent)).view(2, 20, c.num_heads, -1)
    k_rope = rotate(k_rope[:, None], rotation)[:, 0].double()
    outs = []
    for head in range(c.num_heads):
        q_nope, q_rope = queries[:, :, head].split((c.d_nope, c.d_rope), -1)
        k_nope, value = keys_values[:, :, head].split((c.d_nope, c.d_value), -1)
        q_rope = rotate(q_rope[:, None], rotation)[:, 0].double()
        scores = (q_nope @ k_nope.transpose(1, 2) + q_rope @ k_rope.transpose(1, 2)) / math.sqrt(c.d_nope + c.d_rope)
        scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -math.inf)
        outs.append(scores.softmax(-1) @ value)
    expected = linear(mla.wo, torch.cat(outs, -1))
    assert (mla(x, rotation).double() - expected).norm() < 0.02 * expected.norm()


def test_mla_does_the_same_with_and_without_a_gradient() -> None:
    mla = MLA(NANO.model, "fp8", DETERMINISTIC)
    x, rotation = torch.randn(2, 64, 64).bfloat16(), rotations(64, 8, 10_000.0)
    with torch.no_grad():
        without = mla(x, rotation)
    assert torch.equal(mla(x, rotation), without)


def test_mla_keeps_no_projected_queries_keys_or_values_for_backward() -> None:
    mla = MLA(NANO.model, "fp8", DETERMINISTIC)
    calls: list[str] = []
    for name, module in mla.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    y = mla(torch.randn(2, 64, 64).bfloat16(), rotations(64, 8, 10_000.0))
    in_forward = calls.copy()
    calls.clear()
    y.float().sum().backward()
    assert {"q_norm", "wq_b", "kv_norm", "wkv_b"} <= set(in_forward)
    assert {"q_norm", "wq_b", "kv_norm", "wkv_b"} <= set(calls)
    assert not {"wq_a", "wkv_a", "wo"} & set(calls)


@pytest.mark.parametrize("config", [NANO, HYBRID], ids=lambda config: config.name)
def test_no_position_sees_a_later_token(config: Config) -> None:
    model = make_model(config).eval()
    tokens, _ = make_batch(config)
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256

    def trunk(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens).bfloat16()
        for layer in model.layers:
            x, _ = layer(x, model.rotation)
        return x

    with torch.no_grad():
        before, after = trunk(tokens), trunk(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_a_causal_convolution_is_pytorchs_with_padding_in_front_and_silu_behind() -> None:
    conv = CausalConv(6, 4)
    x = torch.randn(2, 10, 6)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight.float().t().unsqueeze(1), groups=6)
    assert torch.allclose(conv(x), F.silu(expected.transpose(1, 2)), atol=1e-6)


def test_the_ssm_mixer_takes_and_returns_the_residual_streams_shape() -> None:
    ssm = SSM(HYBRID.model, "fp8", DETERMINISTIC)
    y = ssm(torch.randn(2, 64, 64).bfloat16())
    assert y.shape == (2, 64, 64)
    assert y.dtype == torch.bfloat16
    dt = F.softplus(ssm.dt_bias)
    assert bool(((dt > 0.9e-3) & (dt < 1.1e-1)).all())


@pytest.mark.parametrize("config", [NANO, HYBRID], ids=lambda config: config.name)
def test_the_loss_of_an_untrained_model_is_that_of_guessing(config: Config) -> None:
    losses = make_model(config)(*make_batch(config))
    assert losses.main.item() == pytest.approx(math.log(256), rel=0.02)
    assert losses.mtp.item() == pytest.approx(math.log(256), rel=0.02)
    c = config.model
    assert torch.allclose(losses.total, losses.main + c.mtp_lambda * losses.mtp + losses.balance)
    num_moe = len(c.mixers) - c.num_dense + 1
    assert losses.balance.item() == pytest.approx(num_moe * c.balance_alpha, rel=0.2)


def test_every_parameter_gets_a_gradient_in_fp32() -> None:
    for config in (NANO, HYBRID):
        model = make_model(config)
        model(*make_batch(config)).total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == torch.float32, name
            assert bool(parameter.grad.any()), name


def test_the_second_token_ahead_is_predicted_by_the_shared_embedding_and_head() -> None:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    assert [name for name in names if "embedding.weight" in name] == ["embedding.weight"]
    assert [name for name in names if "head" in name] == ["head.weight"]
    inputs, targets = make_batch()
    (gradient,) = torch.autograd.grad(model(inputs, targets).mtp, model.head.weight)
    assert bool(gradient.any())


def test_the_second_loss_reads_the_next_token_and_is_scored_on_the_one_after() -> None:
    model = make_model()
    inputs, targets = make_batch()
    first = model(inputs, targets)
    other_next, other_after = targets.clone(), targets.clone()
    other_next[..., 0] = (other_next[..., 0] + 1) % 256
    other_after[..., 1] = (other_after[..., 1] + 1) % 256
    assert model(inputs, other_after).main == first.main
    assert model(inputs, other_after).mtp != first.mtp
    assert model(inputs, other_next).mtp != first.mtp


def test_weights_below_the_parameters_are_their_cast() -> None:
    model = make_model()
    codes = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("codes")}
    assert codes
    for parameter in model.parameters():
        parameter.data.mul_(-1)
    model.derive_weights()
    for name, buffer in model.named_buffers():
        if name in codes:
            assert torch.equal(buffer.float(), -codes[name].float()), name


def test_bf16_has_no_codes() -> None:
    model = Model(NANO.model, 64, "bf16", DETERMINISTIC)
    assert not [name for name, _ in model.named_buffers() if name.endswith(("codes", "scale"))]


@pytest.mark.parametrize("name", [name for name in CONFIGS if "lite" not in name])
def test_a_size_that_is_no_multiple_of_128_is_in_every_configuration(name: str) -> None:
    c = get_config(name).model
    assert (c.kv_lora + c.d_rope) % 128
    assert c.expert_width % 128
    assert get_config("lite").model.kv_lora + get_config("lite").model.d_rope == 576


def test_tiny_trains_on_1024_tokens_a_step() -> None:
    assert get_config("tiny").data.tokens_per_step == 1024
    assert get_config("tiny-hybrid").data.tokens_per_step == 1024
