"""Configurations for a CPU: `tiny` to be used, `nano` to be tested.

Sizes that are no multiple of 128 are meant: V3 has kv_lora + d_rope = 576 = 4.5 x 128, here it is
160 = 1.25 x 128, and the expert width 192 is 1.5 x 128.
"""

from __future__ import annotations

from dataclasses import replace

from bitcheck.reference_runs.configs.shapes import Config, DataConfig, ModelConfig, OptimizerConfig, SSMConfig

TINY = Config(
    name="tiny",
    model=ModelConfig(
        d_model=256,
        mixers=("mla",) * 4,
        num_dense=1,
        num_heads=4,
        d_nope=64,
        d_rope=32,
        d_value=64,
        q_lora=128,
        kv_lora=128,
        dense_width=704,
        num_experts=8,
        num_groups=4,
        group_limit=2,
        top_k=2,
        num_shared=1,
        expert_width=192,
        route_scale=1.0,
        dropout=0.02,
    ),
    optimizer=OptimizerConfig(lr=3e-4, warmup_steps=30, decay_steps=2000),
    data=DataConfig(seq_len=128, sequences=4, micro_batches=2),
)

TINY_HYBRID = replace(TINY, name="tiny-hybrid", model=replace(TINY.model, mixers=("ssm", "mla", "ssm", "ssm")))

NANO = Config(
    name="nano",
    model=replace(
        TINY.model,
        d_model=64,
        mixers=("mla", "mla"),
        num_heads=2,
        d_nope=16,
        d_rope=8,
        d_value=16,
        q_lora=32,
        kv_lora=40,
        dense_width=160,
        expert_width=96,
        ssm=SSMConfig(head_dim=32, state_dim=16, chunk=16),
    ),
    optimizer=replace(TINY.optimizer, lr=2e-3, warmup_steps=10),
    data=DataConfig(seq_len=64, sequences=2, micro_batches=2),
)

NANO_HYBRID = replace(NANO, name="nano-hybrid", model=replace(NANO.model, mixers=("ssm", "mla")))
