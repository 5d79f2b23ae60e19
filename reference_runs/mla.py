"""Multi-head latent attention (V3 report, section 2.1.1).

    c_q  = RMSNorm(W_DQ h)                   [q_nope ; q_rope] = W_UQ c_q       per head
    [c_kv ; k_rope] = W_DKV h                one k_rope for all heads
    [k_nope ; v] = W_UKV RMSNorm(c_kv)       per head
    o = W_O attention([q_nope ; R q_rope], [k_nope ; R k_rope], v)

Both RMSNorms and both up-projections are recomputed in backward (section 3.2.3), and with them the
attention core, whose operands they are: only the latents are kept. On a GPU the core's output is kept as well,
and it is not run again. W_O reads powers of two as scales, as V3's Linear after attention does.

Legend: B sequences, S positions, D model width, H heads, N and R widths without and with rotation,
V value width, L latent, Z half of R.
"""

# PyTorch leaves Tensor.split, Tensor.unflatten and Function.apply without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitcheck.reference_runs.attention import AttentionCore, Kept
from bitcheck.reference_runs.configs import ModelConfig
from bitcheck.reference_runs.device import gpu_forms
from bitcheck.reference_runs.linear import Linear, Precision
from bitcheck.reference_runs.norm import RMSNorm
from bitcheck.reference_runs.switches import Switches


def rotations(seq_len: int, d_rope: int, theta: float) -> Tensor:
    """Return e^(i s theta^(-2z/R)), complex64 [S, R / 2] (RoPE, Su et al. 2021, section 3.2)."""
    frequencies_Z = theta ** (-torch.arange(0, d_rope, 2, dtype=torch.float64) / d_rope)
    angles_SZ = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies_Z)
    return torch.polar(torch.ones_like(angles_SZ), angles_SZ).to(torch.complex64)


def rotate(x_BHSR: Tensor, rotation_SZ: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dimension by position: float32 of the shape of `x_BHSR`."""
    pairs = torch.view_as_complex(x_BHSR.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation_SZ).flatten(-2)


class MLA(nn.Module):
    """Attention whose queries, keys and values come from low-rank latents."""

    def __init__(self, config: ModelConfig, precision: Precision, switches: Switches) -> None:
        super().__init__()
        self.config = config
        heads, std = config.num_heads, config.init_std
        is_norm_fixed = switches.is_fixed("norm.dweight")
        self.wq_a = Linear(config.d_model, config.q_lora, precision, std)
        self.q_norm = RMSNorm(config.q_lora, config.norm_eps, is_norm_fixed)
        self.wq_b = Linear(config.q_lora, heads * (config.d_nope + config.d_rope), precision, std)
        self.wkv_a = Linear(config.d_model, config.kv_lora + config.d_rope, precision, std)
        self.kv_norm = RMSNorm(config.kv_lora, config.norm_eps, is_norm_fixed)
        self.wkv_b = Linear(config.kv_lora, heads * (config.d_nope + config.d_value), precision, std)
        self.core = AttentionCore(switches.is_fixed("attention.backward"))
        self.wo = Linear(heads * config.d_value, config.d_model, precision, std, power_of_two=True)

    def forward(self, x_BSD: Tensor, rotation_SZ: Tensor) -> Tensor:
        """Return bfloat16 [B, S, D] for bfloat16 `x_BSD`."""
        q_latent_BSL = self.wq_a(x_BSD)
        kv_BSL, k_rope_BSR = self.wkv_a(x_BSD).split((self.config.kv_lora, self.config.d_rope), -1)
        if torch.is_grad_enabled():
            # No generator is drawn from inside, so there is no state to put back for the second time.
            o_BSC = checkpoint(
                self._attend,
                q_latent_BSL,
                kv_BSL,
                k_rope_BSR,
                rotation_SZ,
                Kept(),
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            o_BSC = self._attend(q_latent_BSL, kv_BSL, k_rope_BSR, rotation_SZ)
        y_BSD: Tensor = self.wo(o_BSC)
        return y_BSD

    def _attend(
        self,
        q_latent_BSL: Tensor,
        kv_BSL: Tensor,
        k_rope_BSR: Tensor,
        rotation_SZ: Tensor,
        kept: Kept | None = None,
    ) -> Tensor:
        q_BSC, kv_BSC = self.wq_b(self.q_norm(q_latent_BSL)), self.wkv_b(self.kv_norm(kv_BSL))
        o_BHSV = self.core(*self._heads(q_BSC, kv_BSC, k_rope_BSR, rotation_SZ), kept)
        # Where values were padded to the width of queries, the output is too.
        o_BSHV: Tensor = o_BHSV[..., : self.config.d_value].transpose(1, 2)
        return o_BSHV.flatten(2)

    def _heads(
        self, q_BSC: Tensor, kv_BSC: Tensor, k_rope_BSR: Tensor, rotation_SZ: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head, with RoPE; C is all heads' widths together."""
        config, heads = self.config, self.config.num_heads
        if (gpu := gpu_forms(q_BSC)) is not None:
            widths = (config.d_nope, config.d_rope, config.d_value)
            q_BHSC, k_BHSC, v_BHSV = gpu.split_heads(q_BSC, kv_BSC, k_rope_BSR, rotation_SZ, widths)
            return q_BHSC, k_BHSC, v_BHSV
        q_BHSC = q_BSC.unflatten(-1, (heads, -1)).transpose(1, 2)
        kv_BHSC = kv_BSC.unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope_BHSN, q_rope_BHSR = q_BHSC.split((config.d_nope, config.d_rope), -1)
        k_nope_BHSN, v_BHSV = kv_BHSC.split((config.d_nope, config.d_value), -1)
        k_rope_BHSR = rotate(k_rope_BSR.unsqueeze(1), rotation_SZ).expand(-1, heads, -1, -1)
        # Joined with what was rotated, queries and keys are FP32, and so are their gradients.
        q_BHSC = torch.cat((q_nope_BHSN, rotate(q_rope_BHSR, rotation_SZ)), -1)
        return q_BHSC, torch.cat((k_nope_BHSN, k_rope_BHSR), -1), v_BHSV
