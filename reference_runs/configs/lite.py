"""Configurations for one H200: the layer shapes of DeepSeek-V2-Lite, with fewer layers.

V2-Lite (arXiv 2405.04434, appendix B): 27 layers, d 2048, 16 heads of 128 + 64, kv_lora 512, no
q_lora, 64 experts of width 1408, 6 of them chosen, 2 shared, first layer dense with 10944. Here the
query goes through a latent of 1536 as in V3, and experts are in 8 groups with limit 4.

A layer of experts has 586 million parameters, each with 20 bytes of state on the GPU (master, gradient, average,
moments, BF16, FP8 and its transpose): three of them, one in MTP, make some 37 GB. 32,768 tokens a micro-batch are
enough for 3,072 rows an expert, where a grouped product is near its full speed and launching kernels costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from bitcheck.reference_runs.configs.shapes import Config, DataConfig, ModelConfig, OptimizerConfig, SSMConfig

LITE = Config(
    name="lite",
    model=ModelConfig(
        d_model=2048,
        mixers=("mla",) * 3,
        num_dense=1,
        num_heads=16,
        d_nope=128,
        d_rope=64,
        d_value=128,
        q_lora=1536,
        kv_lora=512,
        dense_width=10944,
        num_experts=64,
        num_groups=8,
        group_limit=4,
        top_k=6,
        num_shared=2,
        expert_width=1408,
        route_scale=1.0,
        dropout=0.02,
        init_std=0.006,
        ssm=SSMConfig(head_dim=64, state_dim=128, chunk=64),
    ),
    optimizer=OptimizerConfig(lr=4.2e-4, warmup_steps=50, decay_steps=4000),
    data=DataConfig(seq_len=2048, sequences=16, micro_batches=2),
)

LITE_HYBRID = replace(
    LITE,
    name="lite-hybrid",
    model=replace(LITE.model, mixers=("ssm", "ssm", "mla", "ssm"), num_dense=2),
)
