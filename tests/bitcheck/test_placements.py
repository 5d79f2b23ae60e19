"""Which ranks hold the same part of a tensor, read off its placement; and that a file keeps it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitcheck.events import Event, Level, Phase, Site, StepKind, StepRecord
from bitcheck.placements import TensorPlacement, parse_placement
from bitcheck.store import RankReader, RankWriter

MESH = (("dp", 2), ("tp", 2))

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def placed(draw: st.DrawFn) -> TensorPlacement:
    """A place in a mesh of any ranks."""
    dims = tuple(
        (draw(st.text(max_size=6) | st.sampled_from(["ddp", "a;b, c=d:e|f", "%64dp"])), size) for size in draw(sizes)
    )
    count = 1
    for _, size in dims:
        count *= size
    ranks = draw(st.one_of(st.just(list(range(3, 3 + 2 * count, 2))), st.permutations(range(count))))
    coords = tuple(draw(st.integers(0, size - 1)) for _, size in dims)
    kinds = tuple(draw(st.sampled_from(["R", "S(0)", "S(1)", "P(sum)", "_S(0, 2)", "Mask|P; x=1"])) for _ in dims)
    return TensorPlacement(dims, tuple(ranks), coords, kinds)


@given(placement=placed())
def test_a_placement_reads_back_from_its_text(placement: TensorPlacement) -> None:
    is_replicated = set(placement.kinds) == {"R"}
    assert parse_placement(placement.to_text()) == (placement._replace(coords=()) if is_replicated else placement)


@given(placement=placed())
def test_a_placement_read_back_names_the_same_copies(placement: TensorPlacement) -> None:
    read = parse_placement(placement.to_text())
    assert read is not None
    assert read.replica_ranks == placement.replica_ranks


def test_a_dimension_that_a_program_calls_ddp_is_not_taken_for_distributed_data_parallel() -> None:
    own = parse_placement(TensorPlacement((("ddp", 2),), (0, 1), (), ("R",)).to_text())
    torchs = parse_placement(TensorPlacement.of_ddp((0, 1)).to_text())
    assert own is not None and torchs is not None
    assert (own.is_ddp, torchs.is_ddp) == (False, True)
    assert own.dims == torchs.dims == (("ddp", 2),)


def test_every_rank_writes_the_same_text_where_all_is_replicated() -> None:
    texts = {TensorPlacement(MESH, (0, 1, 2, 3), (i, j), ("R", "R")).to_text() for i in (0, 1) for j in (0, 1)}
    assert texts == {"mesh=dp:2,tp:2; ranks=0-3; placements=R|R"}


@given(placement=placed())
def test_the_ranks_that_hold_copies_agree_on_who_they_are(placement: TensorPlacement) -> None:
    groups = {}
    for rank, coords in zip(
        placement.ranks, itertools.product(*(range(size) for _, size in placement.dims)), strict=True
    ):
        groups[rank] = placement._replace(coords=coords).replica_ranks
    for rank, replicas in groups.items():
        assert rank in replicas
        assert all(groups[other] == replicas for other in replicas)


@pytest.mark.parametrize(
    ("coords", "kinds", "replicas"),
    [
        ((0, 1), ("R", "S(0)"), (1, 3)),
        ((0, 1), ("S(0)", "R"), (0, 1)),
        ((1, 0), ("R", "R"), (0, 1, 2, 3)),
        ((1, 0), ("P(sum)", "S(1)"), (2,)),
    ],
)
def test_copies_lie_along_the_replicated_dimensions(
    coords: tuple[int, ...], kinds: tuple[str, ...], replicas: tuple[int, ...]
) -> None:
    assert TensorPlacement(MESH, (0, 1, 2, 3), coords, kinds).replica_ranks == replicas


@pytest.mark.parametrize(
    "text",
    ["R", "mesh=dp:2; ranks=0-2; coords=0; placements=R", "mesh=dp:2; ranks=0,1; coords=2; placements=R",
     "mesh=dp:2; ranks=0,1; coords=0; placements=R|R", "mesh=dp:2; ranks=0,1; placements=S(0)",
     "mesh=dp:2; ranks=0,0; placements=R"],
)  # fmt: skip
def test_a_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no placement"):
        parse_placement(text)


def test_a_text_that_names_more_ranks_than_there_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no ranks"):
        parse_placement("mesh=dp:99999999999; ranks=0-99999999998; placements=R")


def test_a_file_keeps_the_placement_of_each_tensor_that_has_one(tmp_path: Path) -> None:
    placement = TensorPlacement(MESH, (0, 1, 2, 3), (0, 1), ("R", "S(0)")).to_text()
    events = [
        Event(Site(Phase.PARAM, "Net", name, "value"), "float32", (4,), 16, bytes(16), placement=where)
        for name, where in (("plain", ""), ("cut", placement))
    ]
    writer = RankWriter(
        tmp_path / "rank-00000.h5", rank=0, world_size=4, level=Level.MODULE, run_id="r", leaf_limit_bytes=0
    )
    writer.append(StepRecord(0, StepKind.STEP, events))
    writer.append(StepRecord(1, StepKind.STEP, [events[0], Event(*[getattr(events[1], n) for n in FIELDS])]))
    writer.close("complete")
    with RankReader(tmp_path / "rank-00000.h5") as reader:
        assert reader.load(0).placements == ["", placement]
        assert reader.load(0).to_record().events[1].placement == placement
        assert reader.load(1).placements == ["", ""], "equal in all else, and still told apart"


FIELDS = ("site", "dtype", "shape", "num_bytes", "digest")
