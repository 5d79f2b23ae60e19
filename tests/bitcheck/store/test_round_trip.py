"""What is read is what was appended; roots, layouts and chains are what they are said to be."""

from __future__ import annotations

import json
import random
import re
import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bitcheck import store
from bitcheck.digest import num_leaves
from bitcheck.events import PHASES, STATE_PHASES, Event, Group, Level, Phase, Site, StepKind, StepRecord
from bitcheck.store import RankReader, RankWriter
from bitcheck.store.format import DATASETS
from bitcheck.store.layout import digest_group, digest_site
from tests.bitcheck.store.records import make_event, make_step, make_steps, open_writer, with_digest, write_rank

names = st.text(st.characters(codec="utf-8"), max_size=8)
sites = st.builds(Site, st.sampled_from(PHASES), names, names, names, st.integers(0, 2**32 - 1), st.booleans())
groups = st.builds(Group, names, names, names, names)


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    group_list = draw(st.lists(groups, max_size=4))
    for number, group in enumerate(group_list):
        group_list[number] = group._replace(parent=draw(st.integers(-1, number - 1)))
    events: list[Event] = []
    for site in draw(st.lists(sites, max_size=8, unique_by=lambda site: site.key)):
        num_bytes = draw(st.sampled_from([0, 1, 16 * 1024, 50_000, 2**40]))
        has_leaves = num_bytes < 2**20 and draw(st.booleans())
        events.append(
            Event(
                site,
                draw(st.sampled_from(["float32", "python.float", "bfloat16"])),
                tuple(draw(st.lists(st.integers(0, 2**40), max_size=3))),
                num_bytes,
                draw(st.binary(min_size=16, max_size=16)),
                bytes([len(events)]) * (16 * num_leaves(num_bytes)) if has_leaves else b"",
                draw(st.integers(-1, len(group_list) - 1)),
                tuple(draw(st.lists(st.integers(0, len(events) - 1), max_size=3))) if events else (),
                draw(st.none() | names),
            )
        )
    return StepRecord(
        draw(st.integers(-1, 2**40)),
        draw(st.sampled_from(StepKind)),
        events,
        group_list,
        draw(st.dictionaries(names, st.integers(0, 1000), max_size=2)),
        tuple(draw(st.lists(names, max_size=2))),
    )


@given(st.lists(records(), max_size=5))
def test_any_steps_come_back_as_they_were(steps: list[StepRecord]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_rank(Path(folder) / "rank-00000.h5", steps)
        with RankReader(path) as reader:
            assert [reader.load(row).to_record() for row in range(reader.num_rows)] == steps
            assert reader.status == "complete"
            assert reader.table["num_events"].tolist() == [len(step.events) for step in steps]
            assert reader.table["num_bytes"].tolist() == [sum(e.num_bytes for e in step.events) for step in steps]


def test_what_is_read_of_a_step_says_what_was_recorded(tmp_path: Path) -> None:
    step = make_step(random.Random(0), 7)
    with RankReader(write_rank(tmp_path / "r.h5", [step])) as reader:
        loaded = reader.load(0)
        assert (reader.rank, reader.world_size, reader.level, reader.run_id) == (0, 1, Level.MODULE, "made-up")
    assert (loaded.step, loaded.kind, len(loaded)) == (7, StepKind.STEP, len(step.events))
    assert loaded.sites == [event.site for event in step.events]
    assert loaded.keys == [event.site.key for event in step.events]
    assert loaded.digests.tobytes() == b"".join(event.digest for event in step.events)
    assert loaded.inputs[loaded.input_ptr[2] : loaded.input_ptr[3]].tolist() == [1]
    assert loaded.leaves(4) == step.events[4].leaves
    assert loaded.value(len(step.events) - 1) == step.events[-1].value
    assert loaded.value(0) is None
    assert loaded.unobserved == {"kernel é of a custom op": 7}
    assert loaded.remarks == ("a remark",)


def test_roots_are_the_hashes_that_the_documentation_says(tmp_path: Path) -> None:
    step = make_step(random.Random(1), 3)
    with RankReader(write_rank(tmp_path / "r.h5", [step])) as reader:
        row = reader.table[0]
        layout, meta = reader.load(0).layout.hash, reader.load(0).meta.hash
    h = xxhash.xxh3_128_digest
    phase_roots = []
    for phase in PHASES:
        ours = sorted((event for event in step.events if event.site.phase is phase), key=lambda event: event.site.key)
        phase_roots.append(h(b"".join(h(event.site.key.encode()) + event.digest for event in ours)))
    assert row["phase_roots"].tobytes() == b"".join(phase_roots)
    assert row["root"].tobytes() == h(b"".join(phase_roots))
    assert row["state_root"].tobytes() == h(b"".join(phase_roots[PHASES.index(phase)] for phase in STATE_PHASES))
    leaves = b"".join(event.leaves for event in step.events)
    values = f'["{step.events[-1].value}"]'
    notes = '[{"kernel \\u00e9 of a custom op":3},["a remark"]]' if step.unobserved else '[{},["a remark"]]'
    contents = h(h(leaves) + h(values.encode()) + h(notes.encode()))
    assert row["contents"].tobytes() == contents
    linked = h(b"bitcheck.rank/1") + struct.pack("<qI", 3, 1) + row["root"].tobytes() + layout + meta + contents
    assert row["chain"].tobytes() == h(linked)


@given(sites, groups, st.sampled_from([-1, 0, 7, 2**40]))
def test_what_a_layout_hash_covers_of_a_site_and_of_a_computation_is_their_json(
    site: Site, group: Group, parent: int
) -> None:
    group = group._replace(parent=parent)
    assert digest_site(site) == xxhash.xxh3_128_digest(json.dumps(site).encode())
    assert digest_group(group) == xxhash.xxh3_128_digest(json.dumps(group).encode())


def test_the_order_in_which_events_were_registered_does_not_change_the_root(tmp_path: Path) -> None:
    rng = random.Random(2)
    events = [make_event(rng, Site(Phase.PARAM, "M", f"layer.{number}", "value")) for number in range(20)]
    shuffled = rng.sample(events, len(events))
    steps = [StepRecord(0, StepKind.STEP, events), StepRecord(0, StepKind.STEP, shuffled)]
    with RankReader(write_rank(tmp_path / "r.h5", steps)) as reader:
        assert (reader.table["root"][0] == reader.table["root"][1]).all()
        assert reader.load(1).to_record() == steps[1]


def test_operations_of_an_optimizer_count_with_the_gradients_and_not_with_the_state(tmp_path: Path) -> None:
    step = make_step(random.Random(14), 0)
    groups = [*step.groups, Group("op", "AdamW", "", "aten._fused_adamw_"), Group("optimizer", "AdamW", "", "AdamW")]
    rng, slots = random.Random(15), ("exp_avg", "fused_adamw.self")
    state, operand = (make_event(rng, Site(Phase.OPTIM, "Model", "blocks.0.weight", slot)) for slot in slots)
    of_step = replace(state, group=len(groups) - 1)
    with_state = replace(step, groups=groups, events=[*step.events, of_step])
    with_operand = replace(step, groups=groups, events=[*with_state.events, replace(operand, group=len(groups) - 2)])
    with RankReader(write_rank(tmp_path / "r.h5", [step, with_state, with_operand])) as reader:
        roots, state_roots = reader.table["phase_roots"], reader.table["state_root"]
        assert reader.load(2).to_record() == with_operand
    changed = [(roots[row] != roots[row + 1]).any(axis=1) for row in range(2)]
    assert [[PHASES[number] for number in np.flatnonzero(each)] for each in changed] == [[Phase.OPTIM], [Phase.GRAD]]
    assert (state_roots[0] != state_roots[1]).any()
    assert (state_roots[1] == state_roots[2]).all()


def test_digests_that_change_places_change_the_root(tmp_path: Path) -> None:
    step = make_step(random.Random(3), 0)
    swapped = with_digest(with_digest(step, 1, step.events[2].digest), 2, step.events[1].digest)
    with RankReader(write_rank(tmp_path / "r.h5", [step, swapped])) as reader:
        assert (reader.table["root"][0] != reader.table["root"][1]).any()
        assert (reader.table["state_root"][0] == reader.table["state_root"][1]).all()


@given(event=st.integers(0, 10), bit=st.integers(0, 127))
def test_any_bit_of_any_digest_changes_the_root(event: int, bit: int) -> None:
    step = make_step(random.Random(4), 0)
    digest = bytearray(step.events[event].digest)
    digest[bit // 8] ^= 1 << bit % 8
    with tempfile.TemporaryDirectory() as folder:
        path = write_rank(Path(folder) / "r.h5", [step, with_digest(step, event, bytes(digest))])
        with RankReader(path) as reader:
            assert (reader.table["root"][0] != reader.table["root"][1]).any()
            parted = (reader.table["phase_roots"][0] != reader.table["phase_roots"][1]).any(axis=1)
            assert [PHASES[number] for number in np.flatnonzero(parted)] == [step.events[event].site.phase]


def test_the_root_does_not_depend_on_the_step_number_and_the_chain_does(tmp_path: Path) -> None:
    step = make_step(random.Random(5), 1)
    for name, number in (("a.h5", 1), ("b.h5", 2)):
        write_rank(tmp_path / name, [replace(step, step=number)])
    with RankReader(tmp_path / "a.h5") as one, RankReader(tmp_path / "b.h5") as other:
        assert (one.table["root"] == other.table["root"]).all()
        assert (one.table["chain"] != other.table["chain"]).any()


@pytest.mark.parametrize(
    "change",
    [
        lambda step: replace(step, kind=StepKind.FRAGMENT),
        lambda step: replace(step, remarks=("another",)),
        lambda step: replace(step, unobserved={"something": 1}),
        lambda step: replace(step, groups=[group._replace(op="Conv2d") for group in step.groups]),
        lambda step: replace(step, events=[*step.events[:-1], replace(step.events[-1], value="0.25")]),
        lambda step: replace(step, events=[replace(step.events[0], leaves=b"\1" * 16), *step.events[1:]]),
        lambda step: replace(step, events=[*step.events[:2], replace(step.events[2], inputs=()), *step.events[3:]]),
        lambda step: replace(step, events=[*step.events[:2], replace(step.events[2], inputs=(0,)), *step.events[3:]]),
        lambda step: replace(step, events=[*step.events[:-1], replace(step.events[-1], dtype="float64")]),
    ],
    ids=["kind", "remark", "unobserved", "group", "value", "leaves", "no edge", "another edge", "dtype"],
)
def test_the_chain_covers_all_that_the_root_does_not(tmp_path: Path, change: object) -> None:
    step = make_step(random.Random(6), 1)
    write_rank(tmp_path / "a.h5", [step])
    write_rank(tmp_path / "b.h5", [change(step)])  # type: ignore[operator]
    with RankReader(tmp_path / "a.h5") as one, RankReader(tmp_path / "b.h5") as other:
        assert (one.table["root"] == other.table["root"]).all()
        assert (one.tail()["chain"] != other.tail()["chain"]).any()


def test_equal_steps_give_equal_chains_in_any_rank_of_any_run(tmp_path: Path) -> None:
    steps = make_steps(7, 5)
    write_rank(tmp_path / "a.h5", steps)
    write_rank(tmp_path / "b.h5", make_steps(7, 5), rank=3, world_size=4, run_id="another")
    with RankReader(tmp_path / "a.h5") as one, RankReader(tmp_path / "b.h5") as other:
        assert one.tail()["chain"].tobytes() == other.tail()["chain"].tobytes() == one.table["chain"][-1].tobytes()
        assert one.load(1).layout is other.load(1).layout


def test_steps_with_the_same_sites_share_a_layout_whatever_their_shapes(tmp_path: Path) -> None:
    rng = random.Random(8)
    steps = [make_step(rng, step, num_blocks=3 if step % 4 else 5, batch=1 + step % 3) for step in range(24)]
    with RankReader(write_rank(tmp_path / "r.h5", steps)) as reader:
        assert reader.table["layout"].tolist() == [0 if step % 4 == 0 else 1 for step in range(24)]
        assert len(set(reader.table["meta"].tolist())) == 6
        assert reader.load(20).to_record() == steps[20]


def test_a_layout_that_was_forgotten_is_found_again_by_its_hash(tmp_path: Path) -> None:
    rng = random.Random(9)
    steps = [make_step(rng, step, num_blocks=1 + step % 20) for step in range(40)]
    with RankReader(write_rank(tmp_path / "r.h5", steps)) as reader:
        assert reader.table["layout"].tolist() == [*range(20), *range(20)]
        assert [reader.load(row).to_record() for row in range(40)] == steps


def test_two_sites_with_one_key_are_not_taken_for_each_other(tmp_path: Path) -> None:
    rng = random.Random(13)
    sites = [Site(Phase.PARAM, "M/a", "b", "value"), Site(Phase.PARAM, "M", "a/b", "value")]
    assert sites[0].key == sites[1].key
    for site in sites:
        step = StepRecord(0, StepKind.STEP, [make_event(rng, site)])
        with RankReader(write_rank(tmp_path / f"{site.root.count('/')}.h5", [step])) as reader:
            assert reader.load(0).to_record() == step


@pytest.mark.parametrize(("limit", "kept"), [(None, [24, 20_000, 2_000_000]), (0, []), (20_000, [24, 20_000])])
def test_leaf_digests_are_kept_up_to_the_limit(tmp_path: Path, limit: int | None, kept: list[int]) -> None:
    rng = random.Random(10)
    sizes = [24, 20_000, 2_000_000]
    events = [make_event(rng, Site(Phase.PARAM, "M", str(size), "value"), num_bytes=size) for size in sizes]
    writer = RankWriter(tmp_path / "r.h5", rank=0, world_size=1, level=Level.STATE, run_id="x", leaf_limit_bytes=limit)
    writer.append(StepRecord(0, StepKind.STEP, events))
    writer.close("complete")
    with RankReader(tmp_path / "r.h5") as reader:
        loaded = reader.load(0)
        assert [size for number, size in enumerate(sizes) if loaded.leaves(number)] == kept
        assert all(loaded.leaves(number) in (b"", event.leaves) for number, event in enumerate(events))


def test_a_tail_says_what_the_table_says(tmp_path: Path) -> None:
    steps = make_steps(11, 6)
    with RankReader(write_rank(tmp_path / "r.h5", steps)) as reader:
        tail, table = reader.tail(), reader.table
        assert (tail["num_rows"], tail["first_step"], tail["last_step"]) == (7, -1, 5)
        assert (tail["first_kind"], tail["last_kind"]) == (StepKind.INITIAL, StepKind.STEP)
        assert tail["total_events"] == table["num_events"].sum()
        assert tail["total_bytes"] == table["num_bytes"].sum()
        assert tail["total_unobserved"] == sum(sum(step.unobserved.values()) for step in steps) > 0
        assert tail["total_remarks"] == sum(len(step.remarks) for step in steps) > 0
        assert tail["status"] == "complete"


def test_a_file_without_steps_has_an_empty_tail(tmp_path: Path) -> None:
    with RankReader(write_rank(tmp_path / "r.h5", [])) as reader:
        assert reader.tail()["num_rows"] == reader.num_rows == 0
        with pytest.raises(IndexError):
            reader.load(0)


def test_steps_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    steps = make_steps(12, 6)
    writer = open_writer(tmp_path / "r.h5")
    for count, step in enumerate(steps, 1):
        writer.append(step)
        with RankReader(tmp_path / "r.h5") as reader:
            assert reader.status == "recording"
            assert reader.num_rows == count
            assert reader.load(count - 1).to_record() == step
    writer.close("failed")
    with RankReader(tmp_path / "r.h5") as reader:
        assert reader.status == "failed"


def test_the_documentation_of_the_store_names_every_dataset() -> None:
    documented = re.findall(r"^    [|`]-- (\w+) ", store.__doc__ or "", re.MULTILINE)
    assert sorted(documented) == sorted([*DATASETS, "status"])
