"""A decoder layer: a mixer over time (MLA or SSM) and a feed-forward (dense or MoE), pre-normalised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.configs import ModelConfig
from bitcheck.reference_runs.experts import FeedForward
from bitcheck.reference_runs.linear import Precision
from bitcheck.reference_runs.mla import MLA
from bitcheck.reference_runs.moe import MoE
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.ssm import SSM
from bitcheck.reference_runs.switches import Switches


class Block(nn.Module):
    """x + mixer(norm(x)), then the same with the feed-forward; the residual stream is BF16.

    The mixer is called `attn` or `ssm`, the feed-forward `ffn` or `moe`, so that a name says the kind.
    """

    def __init__(
        self, config: ModelConfig, mixer: str, is_dense: bool, precision: Precision, switches: Switches
    ) -> None:
        super().__init__()
        is_norm_fixed = switches.is_fixed("norm.dweight")
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps, is_norm_fixed)
        self.attn = MLA(config, precision, switches) if mixer == "mla" else None
        self.ssm = SSM(config, precision, switches) if mixer == "ssm" else None
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps, is_norm_fixed)
        self.ffn = FeedForward(config.d_model, config.dense_width, precision, config.init_std) if is_dense else None
        self.moe = None if is_dense else MoE(config, precision, switches)

    def forward(self, x_BSD: Tensor, rotation_SZ: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x bfloat16 [B, S, D], balance loss float32 0-d, zero for a dense layer)."""
        normed_BSD = self.mixer_norm(x_BSD)
        if self.attn is not None:
            x_BSD = x_BSD + self.attn(normed_BSD, rotation_SZ)
        elif self.ssm is not None:
            x_BSD = x_BSD + self.ssm(normed_BSD)
        normed_BSD = self.ffn_norm(x_BSD)
        if self.moe is not None:
            y_BSD, balance_loss = self.moe(normed_BSD)
            return x_BSD + y_BSD, balance_loss
        assert self.ffn is not None
        y_BSD = self.ffn(normed_BSD.flatten(0, 1)).view_as(normed_BSD)
        return x_BSD + y_BSD, y_BSD.new_zeros((), dtype=torch.float32)
