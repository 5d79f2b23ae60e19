"""What a writer knows from the steps before is used where it holds, and nowhere else."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcheck.errors import RecordingError
from bitcheck.events import Group, Kind, Phase, Site, StepColumns, StepRecord
from bitcheck.store import RankReader, known
from bitcheck.store.known import KnownGroups, KnownKinds, KnownSites
from bitcheck.store.layout import LayoutError, TensorKind, digest_group, digest_key, digest_site
from tests.bitcheck.store.records import make_step, open_writer


def made_columns() -> StepColumns:
    """Return a step with something of everything in it."""
    columns = StepColumns.of(make_step(random.Random(0), 0))
    columns.groups.append(Group("op", "AdamW", "0", "aten.add", -1))
    columns.placements = {3: "S0"}
    return columns


def with_item(name: str, index: int, value: object) -> Callable[[StepColumns], None]:
    """Return what puts a value in the place of another."""

    def change(columns: StepColumns) -> None:
        getattr(columns, name)[index] = value

    return change


def swap_sites(columns: StepColumns) -> None:
    columns.sites[4], columns.sites[6] = columns.sites[6], columns.sites[4]


def drop_last_event(columns: StepColumns) -> None:
    for name in ("sites", "kinds", "digests", "leaves", "group_of", "inputs"):
        getattr(columns, name).pop()
    columns.values.clear()


NEW_LAYOUT = {
    "phase": with_item("sites", 4, Site(Phase.EXTRA, "Model", "blocks.0.weight", "grad")),
    "root": with_item("sites", 4, Site(Phase.GRAD, "Other", "blocks.0.weight", "grad")),
    "path": with_item("sites", 4, Site(Phase.GRAD, "Model", "blocks.0.bias", "grad")),
    "slot": with_item("sites", 4, Site(Phase.GRAD, "Model", "blocks.0.weight", "grad.values")),
    "occurrence": with_item("sites", 4, Site(Phase.GRAD, "Model", "blocks.0.weight", "grad", 1)),
    "evaluation": with_item("sites", 4, Site(Phase.GRAD, "Model", "blocks.0.weight", "grad", 0, True)),
    "order of sites": swap_sites,
    "group of an event": with_item("group_of", 2, 3),
    "group of state": with_item("group_of", 4, 0),
    "kind of a group": with_item("groups", 1, Group("recompute", "Model", "blocks.0", "Linear", 0)),
    "root of a group": with_item("groups", 1, Group("forward", "Other", "blocks.0", "Linear", 0)),
    "path of a group": with_item("groups", 1, Group("forward", "Model", "blocks.3", "Linear", 0)),
    "op of a group": with_item("groups", 1, Group("forward", "Model", "blocks.0", "Conv2d", 0)),
    "parent of a group": with_item("groups", 1, Group("forward", "Model", "blocks.0", "Linear", -1)),
    "one group more": lambda columns: columns.groups.append(columns.groups[-1]),
    "an input": with_item("inputs", 3, (1,)),
    "no input": with_item("inputs", 3, ()),
    "one input more": with_item("inputs", 3, (2, 1)),
    "an input moved to the next event": lambda columns: columns.inputs.__setitem__(slice(2, 4), [(), (1, 2)]),
    "one event less": drop_last_event,
}
NEW_META = {
    "dtype": with_item("kinds", 4, ("float64", (5, 1000), 20_000)),
    "shape": with_item("kinds", 4, ("float32", (1000, 5), 20_000)),
    "size": with_item("kinds", 4, ("float32", (5, 1000), 20_001)),
    "no leaves": with_item("leaves", 4, b""),
    "no value": lambda columns: columns.values.clear(),
    "one value more": lambda columns: setattr(columns, "values", {1: "1", **columns.values}),
    "placement": with_item("placements", 3, "S1"),
    "no placement": lambda columns: columns.placements.clear(),
    "one placement more": with_item("placements", 4, "S0"),
}


@pytest.mark.parametrize("objects", ["the same objects", "equal objects"])
@pytest.mark.parametrize("name", [*NEW_LAYOUT, *NEW_META])
def test_a_step_that_differs_in_one_thing_from_the_one_before_is_told_from_it(
    tmp_path: Path, name: str, objects: str
) -> None:
    steps = [made_columns()]
    for _ in range(3):
        steps.append(pickle.loads(pickle.dumps(steps[0])) if objects == "equal objects" else shallow_copy(steps[0]))
    (NEW_LAYOUT | NEW_META)[name](steps[1])
    (NEW_LAYOUT | NEW_META)[name](steps[3])
    writer = open_writer(tmp_path / "r.h5")
    for step in steps:
        writer.append(step)
    writer.close("complete")
    with RankReader(tmp_path / "r.h5") as reader:
        assert [reader.load(row).to_record() for row in range(4)] == [step.to_record() for step in steps]
        column, other = ("layout", "meta") if name in NEW_LAYOUT else ("meta", "layout")
        assert reader.table[column].tolist() == [0, 1, 0, 1]
        assert reader.table[other].tolist() == ([0, 1, 0, 1] if name == "one event less" else [0] * 4)


def shallow_copy(columns: StepColumns) -> StepColumns:
    """Return a step with lists of its own that hold the same objects, as a recorder's steps do."""
    again = copy.copy(columns)
    for name in StepColumns.__slots__:
        if isinstance(getattr(columns, name), list | dict):
            setattr(again, name, getattr(columns, name).copy())
    return again


def test_what_a_writer_forgets_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 8)
    rng = random.Random(1)
    steps: list[StepRecord] = []
    for number in range(24):
        step = make_step(rng, number, num_blocks=1 + number % 3, batch=1 + number)
        prefix = f"net{number % 5}."
        step.events = [replace(event, site=event.site._replace(path=prefix + event.site.path)) for event in step.events]
        steps.append(step)
    writer = open_writer(tmp_path / "r.h5")
    for step in steps:
        writer.append(step)
    writer.close("complete")
    with RankReader(tmp_path / "r.h5") as reader:
        assert [reader.load(row).to_record() for row in range(24)] == steps
        num_sites = reader.count("sites")
    assert num_sites > len({event.site for step in steps for event in step.events})


def test_what_many_events_and_steps_have_in_common_is_in_the_file_once(tmp_path: Path) -> None:
    steps = [made_columns(), pickle.loads(pickle.dumps(made_columns()))]
    swap_sites(steps[1])
    with_item("kinds", 4, ("float64", (5, 1000), 20_000))(steps[1])
    writer = open_writer(tmp_path / "r.h5")
    for step in steps:
        step.groups.append(step.groups[-1])
        writer.append(step)
    writer.close("complete")
    with RankReader(tmp_path / "r.h5") as reader:
        assert reader.table["layout"].tolist() == reader.table["meta"].tolist() == [0, 1]
        assert reader.count("sites") == len(set(steps[0].sites))
        assert reader.count("groups") == len({group[:4] for group in steps[0].groups})
        # The batch; what two blocks give, and the third, which has a placement; weights in two dtypes; a value.
        assert reader.count("tensors") == 6


def test_a_step_larger_than_what_is_known_between_steps_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 2)
    sites = [Site(Phase.PARAM, "M", str(number), "value") for number in range(10)]
    table = KnownSites()
    numbers = table.find(sites)
    table.rows[numbers] = 7
    numbers = table.find(sites)
    assert table.rows[numbers].tolist() == [7] * 10
    numbers = table.find(sites[:4])  # after a step that is far smaller it is forgotten
    assert table.rows[numbers].tolist() == [-1] * 4


names = st.sampled_from(["", "a", "B", "a/b", "b", "b:out", "\ud800", "\U0001f600", "\uffff"])
sites = st.builds(Site, st.sampled_from([Phase.GRAD, Phase.PARAM]), names, names, names, st.integers(0, 2))


@given(
    st.lists(st.lists(sites, max_size=12, unique_by=lambda site: site.key), max_size=6),
    st.sampled_from([0, 1, 1_000_000]),
)
def test_sites_are_in_the_order_of_their_keys_whenever_and_among_how_many_each_was_met(
    steps: list[list[Site]], few: int
) -> None:
    table = KnownSites()
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(known, "_FEW", few)
            numbers = table.find(step)
        assert [table.keys[number] for number in numbers] == [site.key for site in step]
        assert table.key_digests[numbers].tobytes() == b"".join(digest_key(site.key) for site in step)
        assert table.digests[numbers].tobytes() == b"".join(map(digest_site, step))
        assert table.order(numbers).tolist() == sorted(range(len(step)), key=lambda event: step[event].key)
        met = sorted(set(table.keys))
        assert table.ranks.tolist() == [met.index(key) for key in table.keys]


@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("met_together", [True, False])
def test_two_sites_of_one_step_with_one_key_are_refused(
    met_together: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "_FEW", few)
    one, other = Site(Phase.PARAM, "M/a", "b", "value"), Site(Phase.PARAM, "M", "a/b", "value")
    between = Site(Phase.PARAM, "M", "a/bb", "value")
    table = KnownSites()
    if not met_together:
        table.find([one, between])
        table.find([other])
    with pytest.raises(LayoutError, match="two events are named param/M/a/b:value"):
        table.order(table.find([between, one, other]))
    assert table.order(table.find([between, one])).tolist() == [1, 0]
    assert table.order(table.find([other, between])).tolist() == [0, 1]


def run_out(*_: object) -> None:
    raise MemoryError


def test_what_could_not_be_described_leaves_nothing_half_known(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Group("op", "", "", str(number), number - 1) for number in range(4)]
    table = KnownGroups()
    table.find(groups[:2])
    with monkeypatch.context() as patch:
        patch.setattr(known, "digest_group", run_out)
        with pytest.raises(MemoryError):
            table.find(groups)
    numbers = table.find(groups[::-1])
    assert table.parents[numbers].tolist() == [2, 1, 0, -1]
    assert table.digests[numbers].tobytes() == b"".join(map(digest_group, groups[::-1]))


def test_tensor_kinds_that_could_not_be_described_are_not_found_under_the_numbers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: list[Kind] = [("float32", (size,), 4 * size) for size in range(4)]

    def find(*wanted: int) -> list[TensorKind]:
        nothing = np.zeros(len(wanted), bool)
        numbers = table.find_tensors(table.find([kinds[size] for size in wanted]), nothing, nothing, {})
        return [table.tensors.tensors[number] for number in numbers]

    table = KnownKinds()
    assert find(0, 1) == [TensorKind(*kinds[size], 0, False) for size in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(known, "digest_tensor", run_out)
        with pytest.raises(MemoryError):
            find(0, 1, 2)
    assert find(3, 0, 1) == [TensorKind(*kinds[size], 0, False) for size in (3, 0, 1)]


def test_tensor_kinds_are_forgotten_with_the_kinds_that_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 2)
    table = KnownKinds()
    for size in range(20):
        kinds: list[Kind] = [("float32", (size,), 4 * size), ("float32", (size, 1), 4 * size)]
        has_value = np.array([False, True])
        numbers = table.find_tensors(
            table.find(kinds), has_value, ~has_value & (size > 0), {0: "S0"} if size % 2 else {}
        )
        assert [table.tensors.tensors[number] for number in numbers] == [
            TensorKind(*kinds[0], int(size > 0), False, "S0" if size % 2 else ""),
            TensorKind(*kinds[1], 0, True),
        ]
        assert len(table.tensors.tensors) <= 2 * 6


@pytest.mark.parametrize("parent", [1, 2, -2, 2**40, 2**80, -(2**80)])
def test_a_parent_that_is_no_group_before_is_refused_whatever_it_is(tmp_path: Path, parent: int) -> None:
    columns = made_columns()
    columns.groups[1] = columns.groups[1]._replace(parent=parent)
    with pytest.raises(RecordingError, match="a group does not come after its parent"):
        open_writer(tmp_path / "r.h5").append(columns)


@pytest.mark.parametrize(
    ("sizes", "is_refused"), [((2**62, 2**62 - 1), False), ((2**62, 2**62), True), ((2**80,), True)]
)
def test_sizes_add_up_exactly_and_are_refused_beyond_what_the_file_can_hold(
    tmp_path: Path, sizes: tuple[int, ...], is_refused: bool
) -> None:
    columns = StepColumns.of(make_step(random.Random(0), 0))
    columns.kinds = [("float32", (0,), 0)] * len(columns)
    columns.leaves = [b""] * len(columns)
    for event, size in enumerate(sizes):
        columns.kinds[event] = ("float32", (size,), size)
    writer = open_writer(tmp_path / "r.h5")
    if is_refused:
        with pytest.raises(RecordingError, match="a tensor's size is out of range"):
            writer.append(columns)
        return
    writer.append(columns)
    writer.close("complete")
    with RankReader(tmp_path / "r.h5") as reader:
        assert reader.table["num_bytes"].tolist() == [sum(sizes)]
        assert reader.load(0).num_bytes[:2].tolist() == list(sizes)
