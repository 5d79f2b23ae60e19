"""Shapes and hyperparameters of the reference trainer, as frozen dataclasses; `get_config("tiny")`.

    nano, nano-hybrid    tests: a step in some 30 ms on one core
    tiny, tiny-hybrid    a CPU: under 0.5 s a step on two cores
    lite, lite-hybrid    one H200: DeepSeek-V2-Lite's layer shapes, fewer layers

Every name of a size follows the DeepSeek-V3 report (arXiv 2412.19437, section 2).
"""

from __future__ import annotations

from bitcheck.errors import UsageError
from bitcheck.reference_runs.configs.lite import LITE, LITE_HYBRID
from bitcheck.reference_runs.configs.shapes import Config, DataConfig, ModelConfig, OptimizerConfig, SSMConfig
from bitcheck.reference_runs.configs.tiny import NANO, NANO_HYBRID, TINY, TINY_HYBRID

CONFIGS: dict[str, Config] = {
    config.name: config for config in (NANO, NANO_HYBRID, TINY, TINY_HYBRID, LITE, LITE_HYBRID)
}

__all__ = ["CONFIGS", "Config", "DataConfig", "ModelConfig", "OptimizerConfig", "SSMConfig", "get_config"]


def get_config(name: str) -> Config:
    """Return the configuration called `name`; raises UsageError for a name that there is not."""
    if name not in CONFIGS:
        raise UsageError(f"no configuration is called {name!r}; there are {', '.join(CONFIGS)}")
    return CONFIGS[name]
