"""Mixture of experts: routing, dispatch, experts, combine (V3 report, sections 2.1.2 and 3.3).

    s = sigmoid(u . e_i)                     affinity to each expert, FP32
    group score = sum of its top two s + b   keep the best `group_limit` groups
    chosen = top K of s + b inside them      b only selects
    p_i = s_i / sum of the chosen s          times route_scale
    y = shared(u) + sum over the chosen of expert_i(u, p_i)

After each step b_i += gamma * sign(mean load - load_i), with loads counted as integers, so that no
rounding enters. Complementary sequence-wise balance loss: alpha * sum over i of f_i P_i. No token is
ever dropped.

Legend: B sequences, T tokens, D model width, E experts, G groups, K chosen experts a token,
R = T K rows sorted by expert.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitcheck.reference_runs.arrival import arrival_ranks
from bitcheck.reference_runs.configs import ModelConfig
from bitcheck.reference_runs.device import gpu_forms
from bitcheck.reference_runs.embedding import wide_linear
from bitcheck.reference_runs.exchange import Exchange, count_nodes, send_to_experts
from bitcheck.reference_runs.experts import Experts, FeedForward
from bitcheck.reference_runs.fp8 import dequantize_rows, quantize_rows
from bitcheck.reference_runs.linear import Precision, bf16_parameter
from bitcheck.reference_runs.switches import Switches


def select_top(scores_TE: Tensor, count: int, is_stable: bool) -> Tensor:
    """Return the indices of the `count` largest in each row, int64 [T, count].

    Where `is_stable`: largest first, and of equal ones the lower index first. `torch.topk` promises
    neither (a row of 16 equal scores gives 10, 11, 12, 9 on a CPU). Otherwise equal ones are taken in
    any order, and the chosen are listed in any order, as parallel selection on a GPU does.
    """
    if (gpu := gpu_forms(scores_TE)) is not None:
        chosen: Tensor = gpu.select_top(scores_TE, count, is_stable)
        return chosen
    if is_stable:
        return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    shuffled_TE = arrival_ranks(*scores_TE.shape).to(scores_TE.device)
    best = scores_TE.gather(1, shuffled_TE).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return shuffled_TE.gather(1, best).gather(1, arrival_ranks(*best.shape).to(best.device))


class TopK(nn.Module):
    """Group-limited selection of experts: the switch `moe.topk`."""

    def __init__(self, config: ModelConfig, is_stable: bool) -> None:
        super().__init__()
        self.num_groups, self.group_limit, self.top_k = config.num_groups, config.group_limit, config.top_k
        self.is_stable = is_stable

    def forward(self, scores_TE: Tensor) -> Tensor:
        """Return the chosen experts, int64 [T, K], for biased affinities float32 [T, E]."""
        scores_TGe = scores_TE.unflatten(1, (self.num_groups, -1))
        best_two = min(2, scores_TGe.shape[2])
        group_scores_TG = scores_TGe.sort(dim=-1, descending=True, stable=True).values[..., :best_two].sum(-1)
        kept = select_top(group_scores_TG, self.group_limit, self.is_stable)
        is_out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, False)
        masked_TE = scores_TGe.masked_fill(is_out_TG.unsqueeze(2), -math.inf).flatten(1)
        return select_top(masked_TE, self.top_k, self.is_stable)


class Routing(NamedTuple):
    """Where each token goes."""

    experts_TK: Tensor
    """int64: a token's experts, in slot order."""
    prob_TK: Tensor
    """float32: their weights, with a gradient."""
    balance_loss: Tensor
    """float32, 0-d."""


class Router(nn.Module):
    """Affinities, selection and weights, in FP32."""

    bias: Tensor
    load: Tensor

    def __init__(self, config: ModelConfig, switches: Switches) -> None:
        super().__init__()
        self.config = config
        self.weight = bf16_parameter(torch.randn(config.num_experts, config.d_model) * config.init_std)
        self.topk = TopK(config, switches.is_fixed("moe.topk"))
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("load", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, u_BSD: Tensor) -> Routing:
        """Route bfloat16 `u_BSD`; counts the loads of a training forward."""
        s_TE = torch.sigmoid(wide_linear(u_BSD.flatten(0, 1), self.weight))
        experts_TK = self.topk((s_TE + self.bias).detach())
        is_chosen_TE = torch.zeros_like(s_TE).scatter_(1, experts_TK, 1.0)
        if self.training:
            # Not bincount, which waits for a GPU; a sum of ones in FP32 is exact up to 2**24 of them.
            self.load += is_chosen_TE.sum(0).to(torch.int64)
        gpu = gpu_forms(s_TE)
        chosen_TK = s_TE.gather(1, experts_TK) if gpu is None else gpu.scores_of_chosen(s_TE, experts_TK)
        prob_TK = chosen_TK / chosen_TK.sum(1, keepdim=True) * self.config.route_scale
        return Routing(experts_TK, prob_TK, self._balance_loss(s_TE, is_chosen_TE, u_BSD.shape[0]))

    def _balance_loss(self, s_TE: Tensor, chosen_TE: Tensor, num_sequences: int) -> Tensor:
        """Return alpha * mean over sequences of sum over experts of f_i P_i (equations 17 to 20)."""
        config = self.config
        share_TE = s_TE / s_TE.sum(1, keepdim=True)
        mean_share_BE = share_TE.unflatten(0, (num_sequences, -1)).mean(1)
        count_BE = chosen_TE.unflatten(0, (num_sequences, -1)).mean(1)
        frequency_BE = count_BE * (config.num_experts / config.top_k)
        imbalance_B: Tensor = (frequency_BE * mean_share_BE).sum(1)
        return config.balance_alpha * imbalance_B.mean()

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move each bias by gamma towards an even load, and start counting anew. Once a step."""
        above_mean = self.load * self.config.num_experts - self.load.sum()
        self.bias -= self.config.bias_gamma * above_mean.sign()
        self.load.zero_()


class Plan(NamedTuple):
    """The permutation between tokens and rows sorted by expert."""

    row_TK: Tensor
    """int64: the row of each (token, slot)."""
    slot_R: Tensor
    """int64: the (token, slot), flattened, of each row."""
    loads_E: Tensor
    """int64: rows of each expert."""


def make_plan(experts_TK: Tensor, num_experts: int) -> Plan:
    """Sort (token, slot) pairs by expert; stable, so an expert's rows keep the tokens' order."""
    if (gpu := gpu_forms(experts_TK)) is not None:
        return Plan(*gpu.make_plan(experts_TK, num_experts))
    flat = experts_TK.flatten()
    slot_R = flat.argsort(stable=True)
    rows_R = torch.arange(slot_R.numel(), device=slot_R.device)
    row_TK = torch.empty_like(slot_R).scatter_(0, slot_R, rows_R).view_as(experts_TK)
    return Plan(row_TK, slot_R, torch.bincount(flat, minlength=num_experts))


def add_slots(total_TD: Tensor, y_RD: Tensor, row_TK: Tensor, is_fixed: bool) -> Tensor:
    """Add to `total_TD` (in place) each token's K rows of `y_RD`, one after the other, in its dtype.

    Deterministic where `is_fixed`: in slot order (`gather`). Otherwise every token's rows are added in
    an arrival order of its own (`atomic`).
    """
    if not is_fixed:
        row_TK = row_TK.gather(1, arrival_ranks(*row_TK.shape).to(row_TK.device))
    for slot in range(row_TK.shape[1]):
        total_TD += y_RD[row_TK[:, slot]]
    return total_TD


class _Dispatch(torch.autograd.Function):
    """Rows for the experts. The backward is a combine: it sums a token's K gradients in BF16."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        row_TK: Tensor,
        slot_R: Tensor,
        is_fp8: bool,
        is_fixed: bool,
        exchange: Exchange | None,
    ) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.is_fixed, ctx.exchange = is_fixed, exchange
        token_R = slot_R // row_TK.shape[1]
        if not is_fp8:
            return x_TD[token_R] if exchange is None else exchange.to_experts(x_TD[token_R])
        # What crosses to the experts is codes and scales. Four bits of mantissa times a power of two
        # is a BF16 number: read as BF16 and cast again by the experts, the values stay what they are.
        codes_TD, scale_TQ = quantize_rows(x_TD, power_of_two=True)
        codes_RD, scale_RQ = codes_TD.view(torch.uint8)[token_R], scale_TQ[token_R]
        if exchange is not None:
            codes_RD, scale_RQ = exchange.to_experts(codes_RD), exchange.to_experts(scale_RQ)
        return dequantize_rows(codes_RD.view(torch.float8_e4m3fn), scale_RQ).bfloat16()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (row_TK,) = ctx.saved_tensors
        dx_RD = gradients[0] if ctx.exchange is None else ctx.exchange.to_tokens(gradients[0])
        dx_TD = dx_RD.new_zeros(row_TK.shape[0], dx_RD.shape[1])
        return add_slots(dx_TD, dx_RD, row_TK, ctx.is_fixed), None, None, None, None, None


def _by_row(prob_TK: Tensor, row_TK: Tensor, slot_R: Tensor) -> Tensor:
    """Return the weights sorted by expert, float32 [R]."""
    gpu = gpu_forms(prob_TK)
    prob_R: Tensor = (
        prob_TK.flatten().gather(0, slot_R) if gpu is None else gpu.permute_probabilities(prob_TK, row_TK, slot_R)
    )
    return prob_R


class Dispatch(nn.Module):
    """Copy tokens to their experts' rows, in FP8 with power-of-two scales, and perhaps to other ranks."""

    def __init__(self, precision: Precision, is_fixed: bool) -> None:
        super().__init__()
        self.is_fp8, self.is_fixed = precision == "fp8", is_fixed

    def forward(self, x_TD: Tensor, row_TK: Tensor, slot_R: Tensor, exchange: Exchange | None = None) -> Tensor:
        """Return bfloat16 [R, D] for bfloat16 `x_TD`; with `exchange` the rows of this rank's experts."""
        x_RD: Tensor
        if exchange is None and (gpu := gpu_forms(x_TD)) is not None:
            x_RD = gpu.dispatch(x_TD, row_TK, slot_R, self.is_fp8, self.is_fixed)
        else:
            x_RD = _Dispatch.apply(x_TD, row_TK, slot_R, self.is_fp8, self.is_fixed, exchange)
        return x_RD


class _Combine(torch.autograd.Function):
    """The shared expert's output plus each token's rows, in BF16. The backward is a dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        y_RD: Tensor,
        shared_TD: Tensor,
        row_TK: Tensor,
        slot_R: Tensor,
        is_fixed: bool,
        exchange: Exchange | None,
    ) -> Tensor:
        ctx.save_for_backward(slot_R)
        ctx.top_k, ctx.exchange = row_TK.shape[1], exchange
        if exchange is not None:
            y_RD = exchange.to_tokens(y_RD)
        return add_slots(shared_TD.clone(), y_RD, row_TK, is_fixed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slot_R,) = ctx.saved_tensors
        dy_RD = gradients[0][slot_R // ctx.top_k]
        if ctx.exchange is not None:
            dy_RD = ctx.exchange.to_experts(dy_RD)
        return dy_RD, gradients[0], None, None, None, None


class Combine(nn.Module):
    """Sum of a token's expert outputs: the switch `moe.combine`."""

    def __init__(self, is_fixed: bool) -> None:
        super().__init__()
        self.is_fixed = is_fixed

    def forward(
        self, y_RD: Tensor, shared_TD: Tensor, row_TK: Tensor, slot_R: Tensor, exchange: Exchange | None = None
    ) -> Tensor:
        """Return bfloat16 [T, D] for bfloat16 `y_RD` and `shared_TD`."""
        out_TD: Tensor
        if exchange is None and (gpu := gpu_forms(y_RD)) is not None:
            out_TD = gpu.combine(y_RD, shared_TD, row_TK, slot_R, self.is_fixed)
        else:
            out_TD = _Combine.apply(y_RD, shared_TD, row_TK, slot_R, self.is_fixed, exchange)
        return out_TD


class MoE(nn.Module):
    """A feed-forward layer of one shared and many routed experts."""

    def __init__(self, config: ModelConfig, precision: Precision, switches: Switches) -> None:
        super().__init__()
        is_combine_fixed = switches.is_fixed("moe.combine")
        self.router = Router(config, switches)
        self.shared = FeedForward(config.d_model, config.num_shared * config.expert_width, precision, config.init_std)
        self.dispatch = Dispatch(precision, is_combine_fixed)
        self.experts = Experts(
            config.num_experts,
            config.d_model,
            config.expert_width,
            precision,
            config.init_std,
            switches["moe.dprob"],
            switches.is_fixed("moe.wgrad"),
        )
        self.combine = Combine(is_combine_fixed)
        self._group: dist.ProcessGroup | None = None
        self.num_placed = 0
        """(token, expert) pairs of training forwards with experts on several ranks."""
        self.num_visits = 0
        """(token, node) pairs of the same: a token visits a node for all of its experts there."""

    def share_experts(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's part of the experts, and reach the others' through `group`."""
        count = self.router.config.num_experts // dist.get_world_size(group)
        self.experts.keep(dist.get_rank(group) * count, count)
        self._group = group

    def forward(self, u_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y bfloat16 [B, S, D], balance loss) for bfloat16 `u_BSD`."""
        routing = self.router(u_BSD)
        u_TD = u_BSD.flatten(0, 1)
        row_TK, slot_R, loads_E = make_plan(routing.experts_TK, self.router.config.num_experts)
        prob_R = _by_row(routing.prob_TK, row_TK, slot_R)
        if self._group is None:
            y_RD = self.experts(self.dispatch(u_TD, row_TK, slot_R), prob_R, loads_E)
            y_TD = self.combine(y_RD, self.shared(u_TD), row_TK, slot_R)
        else:
            self._count(routing.experts_TK)
            exchange = Exchange(loads_E, self._group)
            x_RD = self.dispatch(u_TD, row_TK, slot_R, exchange)
            y_RD = self.experts(x_RD, send_to_experts(prob_R, exchange), exchange.loads_E)
            y_TD = self.combine(y_RD, self.shared(u_TD), row_TK, slot_R, exchange)
        return y_TD.view_as(u_BSD), routing.balance_loss

    def _count(self, experts_TK: Tensor) -> None:
        if self.training:
            config = self.router.config
            self.num_placed += experts_TK.numel()
            self.num_visits += int(count_nodes(experts_TK, config.num_experts, config.num_groups).sum())
