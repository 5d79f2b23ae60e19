"""Two sequences of operations laid side by side: which operation of one run is which of the other.

An operation is known by its occurrence among the same operations of the same module in a step. One
inserted, removed or moved shifts all later numbers, and everything after it would seem to differ.
So where the sequences are not the same, operations are paired by a longest common subsequence over
(phase, module, operation, dtypes and shapes), and where that leaves a gap in both runs, over the
names alone: a short batch changes the shapes of all operations and is no change of structure.

    baseline   mm.self   relu.self   mm.self#1          joint numbers   relu 0
    candidate  mm.self   relu.self   relu.self#1   mm   joint numbers   relu 0, relu 1 (the candidate's alone)

E. W. Myers, "An O(ND) difference algorithm and its variations", Algorithmica 1, 1986: n operations
with d changes take about n + d^2 steps. Beyond MAX_CHANGES changes the occurrence numbers stand.

Place in the flow: views -> *op_alignment* -> pairing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from bitcheck.events import Group, Site
from bitcheck.views import StepView

MAX_CHANGES = 600
"""Operations, of one run or the other, that a common subsequence may leave over."""

Match = tuple[int, int]
"""An operation of the baseline and the one of the candidate that it is, as places in their sequences."""


class Operation(NamedTuple):
    """One dispatched operation of a step."""

    name: Hashable
    """Phase, module and operation: what its occurrence is counted within."""
    form: Hashable
    """The name, and the dtypes and shapes of all its events."""
    bits: Hashable
    """The form, and the digests of all its events."""
    events: tuple[int, ...]


def joint_sites(baseline: StepView, candidate: StepView) -> tuple[Sequence[Site], Sequence[Site]]:
    """Return the sites by which the events of two steps are joined, in the order of each.

    They are the recorded ones, but for operations where the two sequences of them are unlike: their
    occurrences then number the common sequence, so that equal sites are the same operation.
    """
    ours, theirs = operations(baseline), operations(candidate)
    if [one.form for one in ours] == [one.form for one in theirs]:
        return baseline.sites, candidate.sites
    matches = align_operations(ours, theirs)
    if matches is None:
        return baseline.sites, candidate.sites
    joint: tuple[list[Site], list[Site]] = (list(baseline.sites), list(candidate.sites))
    counts: dict[Hashable, int] = {}

    def number(name: Hashable, *places: tuple[int, Operation]) -> None:
        occurrence = counts.get(name, 0)
        counts[name] = occurrence + 1
        for side, operation in places:
            for event in operation.events:
                joint[side][event] = joint[side][event]._replace(occurrence=occurrence)

    i = j = 0
    for mine, other in (*matches, (len(ours), len(theirs))):
        for one in ours[i:mine]:
            number(one.name, (0, one))
        for one in theirs[j:other]:
            number(one.name, (1, one))
        if mine < len(ours):
            number(ours[mine].name, (0, ours[mine]), (1, theirs[other]))
        i, j = mine + 1, other + 1
    return joint


def operations(step: StepView) -> list[Operation]:
    """Return the operations of a step in the order in which they began."""
    group_of = np.asarray(step.group_of)
    members: dict[int, list[int]] = {}
    is_operation = np.fromiter((group.kind == "op" for group in step.groups), bool, len(step.groups))
    if not is_operation.any():
        return []
    for index in np.flatnonzero(group_of >= 0).tolist():
        number = int(group_of[index])
        if is_operation[number]:
            members.setdefault(number, []).append(index)
    digests = np.asarray(step.digests)
    found = []
    for number in sorted(members):
        events = tuple(members[number])
        name = _name(step.groups[number], step.sites[events[-1]])
        form = (name, tuple((step.sites[at].slot, step.dtypes[at], tuple(step.shapes[at])) for at in events))
        found.append(Operation(name, form, (form, digests[list(events)].tobytes()), events))
    return found


def _name(group: Group, last: Site) -> Hashable:
    """What an operation is; its last event, a result wherever it has one, tells the phase it ran in."""
    return last.phase, group.root, group.path, group.op, last.is_eval


def align_operations(baseline: Sequence[Operation], candidate: Sequence[Operation]) -> list[Match] | None:
    """Return which operations are the same, in order; None where the sequences have too little in common.

    Swapping the two swaps each pair and changes nothing else.
    """
    if _rank(candidate) < _rank(baseline):
        mirrored = _align(candidate, baseline)
        return None if mirrored is None else [(mine, other) for other, mine in mirrored]
    return _align(baseline, candidate)


def _rank(sequence: Sequence[Operation]) -> tuple[int, list[str]]:
    """An order between two sequences that does not depend on which run comes first."""
    return len(sequence), [repr(one.bits) for one in sequence]


def _align(first: Sequence[Operation], second: Sequence[Operation]) -> list[Match] | None:
    # What went before the first difference has the same bits. From there on ends are matched before
    # beginnings: of several like operations in a row, the one whose bits are new was inserted.
    begin = _common_prefix([one.bits for one in first], [one.bits for one in second])
    mine, other = first[begin:], second[begin:]
    found = common_subsequence([one.form for one in mine], [one.form for one in other])
    if found is None:
        found = common_subsequence([one.name for one in mine], [one.name for one in other])
    if found is None:
        return None
    matches = [(at, at) for at in range(begin)]
    i = j = 0
    for at, to in (*found, (len(mine), len(other))):
        gap = common_subsequence([one.name for one in mine[i:at]], [one.name for one in other[j:to]]) or []
        matches.extend((begin + i + left, begin + j + right) for left, right in gap)
        if at < len(mine):
            matches.append((begin + at, begin + to))
        i, j = at + 1, to + 1
    return matches


def _common_prefix(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    length = min(len(first), len(second))
    return next((at for at in range(length) if first[at] != second[at]), length)


def common_subsequence(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[Match] | None:
    """Return a longest common subsequence as pairs of places, None beyond MAX_CHANGES changes."""
    end = _common_prefix(first[::-1], second[::-1])
    begin = min(_common_prefix(first, second), min(len(first), len(second)) - end)
    codes: dict[Hashable, int] = {}
    coded = [
        [codes.setdefault(key, len(codes)) for key in sequence[begin : len(sequence) - end]]
        for sequence in (first, second)
    ]
    middle = _myers(*coded)
    if middle is None:
        return None
    return [
        *((at, at) for at in range(begin)),
        *((begin + at, begin + to) for at, to in middle),
        *((len(first) - at, len(second) - at) for at in range(end, 0, -1)),
    ]


def _myers(first: list[int], second: list[int]) -> list[Match] | None:
    """Myers' greedy search: the furthest point reached on each diagonal k = x - y with d changes, d = 0, 1, ..."""
    n, m = len(first), len(second)
    if not n or not m:
        return []
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for changes in range(min(n + m, MAX_CHANGES) + 1):
        history.append(furthest)
        reached: dict[int, int] = {}
        for k in range(-changes, changes + 1, 2):
            if k == -changes or (k != changes and furthest.get(k - 1, -1) < furthest.get(k + 1, -1)):
                x = furthest.get(k + 1, -1)
            else:
                x = furthest.get(k - 1, -1) + 1
            y = x - k
            if x < 0 or x > n or y < 0 or y > m:
                continue
            while x < n and y < m and first[x] == second[y]:
                x, y = x + 1, y + 1
            reached[k] = x
            if x == n and y == m:
                return _walk_back(history, n, m)
        furthest = reached
    return None


def _walk_back(history: list[dict[int, int]], x: int, y: int) -> list[Match]:
    matches = []
    for changes in range(len(history) - 1, -1, -1):
        furthest = history[changes]
        k = x - y
        goes_down = k == -changes or (k != changes and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
        before = k + 1 if goes_down else k - 1
        from_x = furthest.get(before, -1)
        from_y = from_x - before
        while x > max(from_x, 0) and y > max(from_y, 0):
            x, y = x - 1, y - 1
            matches.append((x, y))
        if changes:
            x, y = from_x, from_y
    matches.reverse()
    return matches
