"""Logical time: what happened before something, on any rank, has an earlier time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bitcheck.clocks import logical_clocks
from bitcheck.events import Phase
from bitcheck.pairing import StepPair
from bitcheck.roles import is_argument
from tests.bitcheck.test_attribution import Step

# What each rank does: a number of calls of its own, then a collective of some group with some outputs.
groups = st.sampled_from(["0-1", "1-2", "0-2", "world"])
programs = st.lists(
    st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=3), groups, st.integers(1, 3)), max_size=8
)


def members_of(group: str) -> list[int]:
    return [0, 1, 2] if group == "world" else [int(rank) for rank in group.split("-")]


def pairs_of(program: list[tuple[list[int], str, int]]) -> dict[int, StepPair]:
    steps = [Step() for _ in range(3)]
    counts: dict[str, int] = {}
    for number, (calls, group, num_outputs) in enumerate(program):
        occurrence = counts.get(group, 0)
        counts[group] = occurrence + 1
        for rank, step in enumerate(steps):
            for call in range(calls[rank]):
                step.add(f"forward/layer.{number}.{call}:out")
            if rank in members_of(group):
                step.add(f"comm/all_gather.{group}:in.0", occurrence=occurrence)
                for output in range(num_outputs):
                    step.add(f"comm/all_gather.{group}:out.{output}", occurrence=occurrence)
    return {rank: step.pair(rank) for rank, step in enumerate(steps)}


@given(program=programs)
def test_time_never_stands_still_on_a_rank(program: list[tuple[list[int], str, int]]) -> None:
    for times in logical_clocks(pairs_of(program)).values():
        assert all(earlier < later for earlier, later in itertools.pairwise(times))


@given(program=programs)
def test_what_a_collective_gave_is_later_than_what_every_member_contributed(
    program: list[tuple[list[int], str, int]],
) -> None:
    pairs = pairs_of(program)
    clocks = logical_clocks(pairs)
    contributed: dict[tuple[str, int], list[int]] = {}
    received: dict[tuple[str, int], list[int]] = {}
    for rank, pair in pairs.items():
        for position in range(len(pair)):
            site = pair.site(position)
            if site.phase is Phase.COMM:
                found = contributed if is_argument(site) else received
                found.setdefault((site.path, site.occurrence), []).append(clocks[rank][position])
    for collective, times in received.items():
        assert min(times) > max(contributed[collective])


def test_ranks_that_wait_for_each_other_in_a_circle_keep_their_own_time() -> None:
    one = Step().add("comm/all_reduce.a:out.0").add("comm/all_reduce.b:out.0")
    other = Step().add("comm/all_reduce.b:out.0").add("comm/all_reduce.a:out.0")
    assert logical_clocks({0: one.pair(0), 1: other.pair(1)}) == {0: [0, 1], 1: [0, 1]}


def test_what_is_received_is_later_than_what_was_sent_from_its_first_use_on() -> None:
    sender = Step()
    for number in range(6):
        sender.add(f"forward/a.{number}:out")
    sender.add("comm/send.0-1:in.0", inputs=("forward/a.5:out",)).add("forward/a.6:out")
    receiver = Step().add("comm/send.0-1:out.0").add("forward/own:out")
    receiver.add("forward/b:out", inputs=("comm/send.0-1:out.0",)).add("forward/c:out")
    for ranks in ((sender, receiver), (receiver, sender)):
        clocks = logical_clocks({rank: step.pair(rank) for rank, step in enumerate(ranks)})
        sent, received = clocks[ranks.index(sender)], clocks[ranks.index(receiver)]
        assert received[1] == 1, "begun early, and waited for later"
        assert received[2] > sent[6] and received[3] > received[2]
        assert sent == list(range(8)), "who sends waits for nobody"


def test_ranks_that_send_to_each_other_at_once_are_in_no_circle() -> None:
    steps = []
    for own, other in ((0, 1), (1, 0)):
        step = Step().add(f"comm/send.{other}-{own}:out.0").add(f"forward/a.{own}:out")
        step.add(f"comm/send.{own}-{other}:in.0", inputs=(f"forward/a.{own}:out",))
        steps.append(step.add(f"forward/b.{own}:out", inputs=(f"comm/send.{other}-{own}:out.0",)))
    clocks = logical_clocks({rank: step.pair(rank) for rank, step in enumerate(steps)})
    assert clocks == {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
