"""The fields of a configuration and what each one means. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SSMConfig:
    """A Mamba-2 mixer (Dao and Gu 2024, arXiv 2405.21060, sections 6 and 7)."""

    expand: int = 2
    """Inner width as a multiple of the model width."""
    head_dim: int = 64
    state_dim: int = 32
    chunk: int = 32
    """Tokens in a chunk of the scan; divides the sequence length. The GPU's kernel takes 16, 32 or 64."""
    conv_width: int = 4


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V3-style decoder; sizes as in its report, section 4.2."""

    d_model: int
    mixers: tuple[str, ...]
    """A layer's mixer each, `mla` or `ssm`; its length is the number of layers."""
    num_dense: int
    """The first so many layers have a dense feed-forward, the others a mixture of experts."""
    num_heads: int
    d_nope: int
    """Part of a head's query and key without position."""
    d_rope: int
    """Part of a head's query and key that is rotated; the key's is shared by the heads."""
    d_value: int
    q_lora: int
    kv_lora: int
    dense_width: int
    num_experts: int
    num_groups: int
    group_limit: int
    """A token's experts come from at most so many groups (a group stands for a node)."""
    top_k: int
    num_shared: int
    expert_width: int
    route_scale: float
    vocab: int = 256
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    dropout: float = 0.0
    """Of the embedding's output in training: what draws from PyTorch's generator."""
    balance_alpha: float = 1e-4
    """Weight of the sequence-wise balance loss (equation 17)."""
    bias_gamma: float = 1e-3
    """Step of the router's bias (section 2.1.2)."""
    mtp_lambda: float = 0.3
    """Weight of the loss on the token after the next (section 2.2)."""
    init_std: float = 0.02
    ssm: SSMConfig = SSMConfig()


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW as in the report, section 4.2; the schedule depends on the step alone."""

    lr: float
    warmup_steps: int
    decay_steps: int
    """Cosine from `lr` after the warm-up down to a tenth of it at this step, flat from there."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema_decay: float = 0.99
    loss_scale: float = 2.0**16
    """What the loss is multiplied by before backward, and gradients divided by before they are clipped.

    A power of two, so it rounds nothing. The cast to FP8 makes no scale from an amax below 1e-4: the
    gradients of a mean over a thousand tokens, 1e-7 and less, would be left with hardly any bits.
    """


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What a step sees: `micro_batches` times `sequences` windows of `seq_len` bytes."""

    seq_len: int
    sequences: int
    micro_batches: int
    held_out: float = 0.05
    """The last so much of the text is never trained on."""
    fim_rate: float = 0.3
    """Part of the sequences rearranged to fill in the middle: what draws from Python's generator.

    V3 has 0.1; more of it, so that hardly a step goes by without.
    """
    noise_rate: float = 0.01
    """Part of the input bytes replaced by random ones: what draws from NumPy's generator."""

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one optimizer step trains on."""
        return self.seq_len * self.sequences * self.micro_batches


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that fixes a training run besides its seed, its data and its switches."""

    name: str
    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig
