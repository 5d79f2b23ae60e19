"""Which process groups have a name."""

from __future__ import annotations

import torch.distributed as dist

from bitcheck.hooks.process_groups import GroupNames


def test_a_group_that_was_destroyed_has_no_name_any_more_though_it_had_one(group_of_one: None) -> None:
    names = GroupNames()
    passing = dist.new_group([0])
    before = names.members_of(passing)
    assert before is not None and (before.ranks, before.name) == ([0], "world.2")
    assert names.members_of(passing) is before
    dist.destroy_process_group(passing)
    assert names.members_of(passing) is None
    again = names.members_of(dist.new_group([0]))
    assert again is not None and again.name == "world.2", "its place is free"
