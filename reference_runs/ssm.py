"""The Mamba-2 mixer (Dao and Gu 2024, arXiv 2405.21060, section 7): what a hybrid has for attention.

    [z, x, B, C, dt] = W_in h
    x, B, C = silu(causal depthwise convolution of each)
    y = scan(x, softplus(dt + dt_bias), -exp(A_log), B, C, D)
    out = W_out RMSNorm(y * silu(z))

W_in and W_out run in FP8 as every Linear does; the convolution and the scan in FP32, on a GPU on and to BF16.

Legend: B sequences, S positions, D model width, I inner width = heads H times P, N state width,
C channels of the convolution = I + 2 N, W taps.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitcheck.reference_runs.configs import ModelConfig
from bitcheck.reference_runs.device import gpu_forms
from bitcheck.reference_runs.embedding import full_precision
from bitcheck.reference_runs.linear import Linear, Precision, bf16_parameter
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.scan import Scan
from bitcheck.reference_runs.switches import Switches


def gate(y_BSI: Tensor, z_BSI: Tensor) -> Tensor:
    """Return y * silu(z), bfloat16, for bfloat16 `z_BSI`."""
    gpu = gpu_forms(z_BSI)
    gated_BSI: Tensor = (y_BSI * F.silu(z_BSI.float())).bfloat16() if gpu is None else gpu.gate(y_BSI, z_BSI)
    return gated_BSI


class CausalConv(nn.Module):
    """A depthwise convolution over the last W tokens, and its SiLU."""

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = bf16_parameter((torch.rand(width, num_channels) * 2 - 1) / math.sqrt(width))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Return float32 [B, S, C] for bfloat16 or float32 `x_BSC`; taps are added oldest first.

        On a GPU the result has the dtype of `x_BSC`.
        """
        if (gpu := gpu_forms(x_BSC)) is not None:
            on_gpu_BSC: Tensor = gpu.conv_silu(x_BSC, self.weight)
            return on_gpu_BSC
        width, seq_len = self.weight.shape[0], x_BSC.shape[1]
        weight_WC = full_precision(self.weight)
        padded = F.pad(x_BSC.float(), (0, 0, width - 1, 0))
        y_BSC = padded[:, :seq_len] * weight_WC[0]
        for tap in range(1, width):
            y_BSC = y_BSC + padded[:, tap : tap + seq_len] * weight_WC[tap]
        return F.silu(y_BSC)


class SSM(nn.Module):
    """A mixer over time that takes and returns bfloat16 [B, S, D]."""

    def __init__(self, config: ModelConfig, precision: Precision, switches: Switches) -> None:
        super().__init__()
        ssm = config.ssm
        self.inner, self.state_dim, self.head_dim = ssm.expand * config.d_model, ssm.state_dim, ssm.head_dim
        num_heads = self.inner // ssm.head_dim
        num_ins = 2 * self.inner + 2 * ssm.state_dim + num_heads
        self.w_in = Linear(config.d_model, num_ins, precision, config.init_std)
        self.conv = CausalConv(self.inner + 2 * ssm.state_dim, ssm.conv_width)
        # These three stay in FP32 altogether: exponentials of them decide how long a state lives.
        self.a_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log_())
        self.d = nn.Parameter(torch.ones(num_heads))
        dt = torch.empty(num_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp_()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.scan = Scan(ssm.chunk, switches.is_fixed("ssm.backward"))
        self.norm = RMSNorm(self.inner, config.norm_eps, switches.is_fixed("norm.dweight"))
        self.w_out = Linear(self.inner, config.d_model, precision, config.init_std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return bfloat16 [B, S, D] for bfloat16 `x_BSD`."""
        num_heads = self.dt_bias.shape[0]
        z_BSI, xbc_BSC, dt_BSH = self.w_in(x_BSD).split((self.inner, self.inner + 2 * self.state_dim, num_heads), -1)
        xbc_BSC = self.conv(xbc_BSC)
        x_BSI, b_BSN, c_BSN = xbc_BSC.split((self.inner, self.state_dim, self.state_dim), -1)
        y_BSHP = self.scan(
            x_BSI.unflatten(-1, (num_heads, -1)),
            F.softplus(dt_BSH.float() + self.dt_bias),
            -self.a_log.exp(),
            b_BSN,
            c_BSN,
            self.d,
        )
        y_BSD: Tensor = self.w_out(self.norm(gate(y_BSHP.flatten(2), z_BSI)))
        return y_BSD
