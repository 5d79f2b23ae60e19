"""Multi-token prediction, depth 1 (V3 report, section 2.2).

    h' = M [RMSNorm(h) ; RMSNorm(Emb(next token))]
    h'' = block(h'), from which the shared head predicts the token after the next

Embedding and head are those of the main model, physically shared: the model hands the embedded next
tokens in and applies its head to what comes out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.block import Block
from bitcheck.reference_runs.configs import ModelConfig
from bitcheck.reference_runs.linear import Linear, Precision
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.switches import Switches


class MTP(nn.Module):
    """One more block, one token further ahead."""

    def __init__(self, config: ModelConfig, precision: Precision, switches: Switches) -> None:
        super().__init__()
        is_norm_fixed = switches.is_fixed("norm.dweight")
        self.hidden_norm = RMSNorm(config.d_model, config.norm_eps, is_norm_fixed)
        self.embedding_norm = RMSNorm(config.d_model, config.norm_eps, is_norm_fixed)
        self.proj = Linear(2 * config.d_model, config.d_model, precision, config.init_std)
        self.block = Block(config, "mla", is_dense=False, precision=precision, switches=switches)
        self.norm = RMSNorm(config.d_model, config.norm_eps, is_norm_fixed)

    def forward(self, h_BSD: Tensor, next_BSD: Tensor, rotation_SZ: Tensor) -> tuple[Tensor, Tensor]:
        """Return (what the head reads, bfloat16 [B, S, D]; balance loss) for the trunk's `h_BSD`."""
        joined = torch.cat((self.hidden_norm(h_BSD), self.embedding_norm(next_BSD)), -1)
        x_BSD, balance_loss = self.block(self.proj(joined), rotation_SZ)
        return self.norm(x_BSD), balance_loss
