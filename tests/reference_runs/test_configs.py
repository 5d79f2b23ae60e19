"""Configurations: sizes that every form of the trainer takes."""

from __future__ import annotations

import pytest

from bitcheck.reference_runs.configs import CONFIGS, Config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_scans_chunks_are_of_a_size_that_the_kernel_takes_and_fill_the_sequence(config: Config) -> None:
    assert config.model.ssm.chunk in (16, 32, 64)
    assert config.data.seq_len % config.model.ssm.chunk == 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_experts_fall_into_groups_that_have_enough_of_them(config: Config) -> None:
    model = config.model
    assert model.num_experts % model.num_groups == 0
    assert model.group_limit * (model.num_experts // model.num_groups) >= model.top_k
