"""Every hand-written backward against autograd on a plain implementation of the same forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bitcheck.reference_runs.attention import AttentionCore
from bitcheck.reference_runs.dprob import reduce_dprob
from bitcheck.reference_runs.embedding import Embedding, Head, full_precision
from bitcheck.reference_runs.experts import Down, Experts, WeightedDown, swiglu, swiglu_backward
from bitcheck.reference_runs.linear import GroupedLinear, Linear, bf16_parameter
from bitcheck.reference_runs.moe import Combine, Dispatch, make_plan
from bitcheck.reference_runs.norm import RMSNorm, reduce_dweight
from bitcheck.reference_runs.scan import Scan, scan

LOADS = torch.tensor([70, 0, 130, 1])
BF16_STEP = 2.0**-8


def gradients(function: Callable[..., Tensor], operands: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """The gradients of `operands` where `dy` flows back into `function` of them."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    (function(*leaves) * dy).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], relative: float) -> None:
    """Each pair differs by at most `relative` of the norm."""
    assert len(ours) == len(theirs)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.shape == plain.shape
        error = (mine.double() - plain.double()).norm() / plain.double().norm()
        assert error < relative


def plain_groups(x: Tensor, w: Tensor) -> Tensor:
    """Rows of each group times the group's own weight, transposed."""
    return torch.cat([rows @ w[group].t() for group, rows in enumerate(x.split(LOADS.tolist()))])


def test_rms_norm_has_the_gradients_of_its_formula() -> None:
    norm = RMSNorm(96, eps=1e-6, is_fixed=True)
    norm.weight.data.copy_(torch.rand(96) + 0.5)
    x, dy = torch.randn(70, 96).bfloat16(), torch.randn(70, 96).bfloat16()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (96,), w, 1e-6)

    x.requires_grad_()
    norm(x).backward(dy)
    assert x.grad is not None and norm.weight.grad is not None
    theirs = gradients(plain, [x.float(), norm.weight.float()], dy.float())
    assert norm.weight.grad.dtype == torch.float32
    assert_close([x.grad, norm.weight.grad], theirs, 2 * BF16_STEP)
    assert_close([norm.weight.grad], theirs[1:], 1e-6)


def test_the_embeddings_gradient_adds_up_tokens_that_occur_more_than_once() -> None:
    embedding = Embedding(16, 8, 1.0, is_fixed=True)
    ids, dy = torch.randint(0, 16, (5, 20)), torch.randn(5, 20, 8).bfloat16()
    embedding(ids).backward(dy)
    (theirs,) = gradients(lambda w: F.embedding(ids, w), [embedding.weight.double()], dy.double())
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.dtype == torch.float32
    assert_close([embedding.weight.grad], [theirs], 1e-6)


def test_a_parameter_read_in_full_precision_keeps_its_gradient_in_full_precision() -> None:
    parameter = bf16_parameter(torch.randn(4))
    gradient = torch.rand(4) + 2.0**-20
    full_precision(parameter).backward(gradient)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, gradient)


def test_the_heads_gradient_is_not_rounded_to_bf16() -> None:
    head = Head(32, 16, 1.0)
    x, dy = torch.randn(40, 32).bfloat16(), torch.randn(40, 16)
    head(x).backward(dy)
    assert head.weight.grad is not None
    assert_close([head.weight.grad], [dy.double().t() @ x.double()], 1e-6)


def test_attention_has_the_gradients_of_softmax_attention() -> None:
    q, k = (torch.randn(2, 3, 70, 24) for _ in range(2))
    v, dy = (torch.randn(2, 3, 70, 16) for _ in range(2))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    core = AttentionCore(is_fixed=True)
    assert torch.allclose(core(q, k, v), plain(q, k, v), atol=1e-5)
    assert_close(gradients(core, [q, k, v], dy), gradients(plain, [q, k, v], dy), 1e-5)


def test_swiglu_has_the_gradient_of_its_formula() -> None:
    h, dy = torch.randn(20, 48, dtype=torch.float64), torch.randn(20, 24, dtype=torch.float64)
    assert_close([swiglu_backward(h, dy)], gradients(swiglu, [h], dy), 1e-12)
    gate, other = h.chunk(2, -1)
    assert torch.allclose(swiglu(h), F.silu(gate) * other)


@pytest.mark.parametrize(("precision", "relative"), [("bf16", 3 * BF16_STEP), ("fp8", 0.08)])
def test_a_linear_has_the_gradients_of_a_matrix_product(precision: Any, relative: float) -> None:
    linear = Linear(160, 72, precision, 0.1)
    x, dy = torch.randn(3, 50, 160).bfloat16(), torch.randn(3, 50, 72).bfloat16()
    theirs = gradients(F.linear, [x.double(), linear.weight.double()], dy.double())
    x.requires_grad_()
    y = linear(x)
    y.backward(dy)
    assert x.grad is not None and linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32
    assert_close([y, x.grad, linear.weight.grad], [F.linear(x.double(), linear.weight.double()), *theirs], relative)


@pytest.mark.parametrize(("precision", "relative"), [("bf16", 3 * BF16_STEP), ("fp8", 0.08)])
def test_a_grouped_linear_has_the_gradients_of_one_product_a_group(precision: Any, relative: float) -> None:
    linear = GroupedLinear(4, 160, 72, precision, 0.1, is_wgrad_fixed=True)
    x, dy = torch.randn(201, 160).bfloat16(), torch.randn(201, 72).bfloat16()
    theirs = gradients(plain_groups, [x.double(), linear.weight.double()], dy.double())
    x.requires_grad_()
    linear(x, LOADS).backward(dy)
    assert x.grad is not None and linear.weight.grad is not None
    assert_close([x.grad, linear.weight.grad], theirs, relative)
    assert not linear.weight.grad[1].any()


@pytest.mark.parametrize("dprob_form", ["slots", "serial"])
@pytest.mark.parametrize(("precision", "relative"), [("bf16", 4 * BF16_STEP), ("fp8", 0.12)])
def test_the_experts_second_half_has_the_gradients_of_its_formula(
    precision: Any, relative: float, dprob_form: str
) -> None:
    down = WeightedDown(4, 96, 40, precision, 0.1, dprob_form, is_wgrad_fixed=True)
    h, prob, dy = torch.randn(201, 192).bfloat16(), torch.rand(201), torch.randn(201, 40).bfloat16()

    def plain(h: Tensor, prob: Tensor, w: Tensor) -> Tensor:
        return plain_groups(swiglu(h) * prob[:, None], w)

    operands = [h.double(), prob.double(), down.weight.double()]
    theirs = gradients(plain, operands, dy.double())
    h.requires_grad_()
    prob.requires_grad_()
    y = down(h, prob, LOADS)
    y.backward(dy)
    assert h.grad is not None and prob.grad is not None and down.weight.grad is not None
    assert_close([y, h.grad, prob.grad, down.weight.grad], [plain(*operands), *theirs], relative)


@pytest.mark.parametrize(("precision", "relative"), [("bf16", 4 * BF16_STEP), ("fp8", 0.12)])
def test_a_dense_second_half_has_the_gradients_of_its_formula(precision: Any, relative: float) -> None:
    down = Down(96, 40, precision, 0.1)
    h, dy = torch.randn(150, 192).bfloat16(), torch.randn(150, 40).bfloat16()
    theirs = gradients(lambda h, w: swiglu(h) @ w.t(), [h.double(), down.weight.double()], dy.double())
    h.requires_grad_()
    down(h).backward(dy)
    assert h.grad is not None and down.weight.grad is not None
    assert_close([h.grad, down.weight.grad], theirs, relative)


def test_dispatch_and_combine_have_the_gradients_of_gathering_and_summing() -> None:
    experts = torch.stack([torch.randperm(4)[:3] for _ in range(50)])
    row, slot, loads = make_plan(experts, 4)
    x, shared = torch.randn(50, 40).bfloat16(), torch.randn(50, 40).bfloat16()
    dy = torch.randn(150, 40).bfloat16()
    dispatch, combine = Dispatch("bf16", is_fixed=True), Combine(is_fixed=True)
    x_rows = dispatch(x, row, slot)
    for group, rows in enumerate(x_rows.split(loads.tolist())):
        tokens = (experts == group).any(1).nonzero().flatten()
        assert torch.equal(rows, x[tokens])
    (dx,) = gradients(lambda x: dispatch(x, row, slot), [x], dy)
    assert_close([dx], gradients(lambda x: x[slot // 3], [x.double()], dy.double()), 3 * BF16_STEP)

    def plain(y: Tensor, shared: Tensor) -> Tensor:
        return shared + y[row].sum(1)

    out = combine(x_rows, shared, row, slot)
    assert_close([out], [plain(x_rows.double(), shared.double())], 3 * BF16_STEP)
    ours = gradients(lambda y, s: combine(y, s, row, slot), [x_rows, shared], dy[:50])
    assert_close(ours, gradients(plain, [x_rows.double(), shared.double()], dy[:50].double()), 1e-6)


def test_what_is_dispatched_in_fp8_is_read_again_without_a_change() -> None:
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(50)])
    row, slot, _ = make_plan(experts, 4)
    dispatch = Dispatch("fp8", is_fixed=True)
    x = torch.randn(50, 160).bfloat16()
    once = dispatch(x, row, slot)[row[:, 0]]
    assert not torch.equal(once, x)
    # Three bits of mantissa, of BF16's seven: a power of two as the scale adds none, so BF16 holds it exactly.
    assert not (once.contiguous().view(torch.int16) & 0b1111).any()
    assert torch.equal(dispatch(once, row, slot)[row[:, 0]], once)


def naive_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The recurrence, one token after the other."""
    batch, length, heads, width = x.shape
    state = x.new_zeros(batch, heads, width, b.shape[-1])
    outs = []
    for t in range(length):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None, :]
        state = decay * state + added
        outs.append((state * c[:, t, None, None, :]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outs, 1)


@pytest.mark.parametrize("chunk", [8, 24])
def test_the_chunked_scan_has_the_values_and_gradients_of_the_recurrence(chunk: int) -> None:
    x, dy = torch.randn(2, 24, 3, 40), torch.randn(2, 24, 3, 40)
    dt, a, d = torch.rand(2, 24, 3) * 0.5, -torch.rand(3) * 3, torch.randn(3)
    b, c = torch.randn(2, 24, 5), torch.randn(2, 24, 5)
    operands = [x, dt, a, b, c, d]
    exact = [operand.double() for operand in operands]
    module = Scan(chunk, is_fixed=True)
    assert_close([module(*operands)], [naive_scan(*exact)], 1e-5)
    assert_close(gradients(module, operands, dy), gradients(naive_scan, exact, dy.double()), 1e-5)


def test_a_sequence_that_does_not_cut_into_chunks_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="10 tokens does not cut into chunks of 4"):
        scan(torch.ones(1, 10, 1, 1), torch.ones(1, 10, 1), one, torch.ones(1, 10, 1), torch.ones(1, 10, 1), one, 4)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_an_experts_rows_do_not_depend_on_the_other_experts(precision: Any) -> None:
    experts = Experts(4, 64, 96, precision, 0.1, "slots", is_wgrad_fixed=True)
    x, prob = torch.randn(201, 64).bfloat16(), torch.rand(201)
    x[:70] *= 100  # another expert's rows, much larger
    together = experts(x, prob, LOADS)
    alone = experts(x[70:200], prob[70:200], torch.tensor([0, 0, 130, 0]))
    assert torch.equal(together[70:200], alone)


def distinct(function: Callable[[], Tensor], runs: int = 8) -> int:
    """How many different bits `runs` calls give."""
    return len({function().detach().numpy().tobytes() for _ in range(runs)})


def test_dprob_has_one_result_in_slots_or_turns_and_several_where_tiles_race() -> None:
    da, act = torch.randn(300, 192), torch.randn(300, 192)
    slots, serial = (reduce_dprob(da, act, form) for form in ("slots", "serial"))
    assert torch.equal(slots, serial)
    assert torch.allclose(slots, (da * act).sum(1), atol=1e-4)
    assert distinct(lambda: reduce_dprob(da, act, "slots")) == 1
    assert distinct(lambda: reduce_dprob(da, act, "atomic")) == 8
    assert torch.allclose(reduce_dprob(da, act, "atomic"), slots, atol=1e-4)


def test_a_norms_weight_gradient_has_one_result_in_two_stages_and_several_as_blocks_arrive() -> None:
    products = torch.randn(300, 64)
    assert torch.allclose(reduce_dweight(products, True), products.sum(0), atol=1e-4)
    assert distinct(lambda: reduce_dweight(products, True)) == 1
    assert distinct(lambda: reduce_dweight(products, False)) > 1


def test_the_embeddings_gradient_has_one_result_sorted_and_several_as_tokens_arrive() -> None:
    # BF16 numbers of one magnitude add up exactly in FP32; gradients of a whole sequence are not of one.
    ids, dy = torch.randint(0, 4, (400,)), (torch.randn(400, 8) * 2.0 ** torch.randint(-9, 9, (400, 1))).bfloat16()

    def result(is_fixed: bool) -> Tensor:
        embedding = Embedding(4, 8, 1.0, is_fixed)
        embedding(ids).backward(dy)
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    assert distinct(lambda: result(True)) == 1
    assert distinct(lambda: result(False)) > 1


def test_a_querys_gradient_has_one_result_in_order_and_several_as_key_blocks_arrive() -> None:
    q, k, v, dy = (torch.randn(1, 2, 160, 16) for _ in range(4))
    assert distinct(lambda: gradients(AttentionCore(True), [q, k, v], dy)[0]) == 1
    assert distinct(lambda: gradients(AttentionCore(False), [q, k, v], dy)[0]) > 1


def test_each_shared_gradient_of_the_scan_has_one_result_in_order_and_several_as_parts_arrive() -> None:
    x, dy = torch.randn(2, 32, 4, 96), torch.randn(2, 32, 4, 96)
    dt, a, d = torch.rand(2, 32, 4), -torch.rand(4), torch.randn(4)
    b, c = torch.randn(2, 32, 8), torch.randn(2, 32, 8)

    def results(is_fixed: bool) -> list[list[Tensor]]:
        return [gradients(Scan(8, is_fixed), [x, dt, a, b, c, d], dy) for _ in range(8)]

    fixed, free = results(True), results(False)
    names = ("x", "dt", "a", "b", "c", "d")
    for index, name in enumerate(names):
        assert len({run[index].numpy().tobytes() for run in fixed}) == 1, name
        assert (len({run[index].numpy().tobytes() for run in free}) > 1) == (name != "x"), name


def test_combining_has_one_result_in_slot_order_and_several_as_rows_arrive() -> None:
    row, slot, _ = make_plan(torch.stack([torch.randperm(4)[:2] for _ in range(200)]), 4)
    y, shared = torch.randn(400, 16).bfloat16(), torch.randn(200, 16).bfloat16()

    def result(is_fixed: bool) -> Tensor:
        return torch.as_tensor(Combine(is_fixed)(y, shared, row, slot)).float()

    assert distinct(lambda: result(True)) == 1
    assert distinct(lambda: result(False)) > 1
