"""The learning rate as a function of the step alone, so that a resumed run needs nothing else."""

from __future__ import annotations

import math

from bitcheck.reference_runs.configs import OptimizerConfig

FLOOR = 0.1
"""What remains of the learning rate after the decay, as a part of it."""


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Return the rate for `step`, numbered from 0: linear warm-up, then cosine down to a tenth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    return config.lr * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
