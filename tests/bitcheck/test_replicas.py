"""Copies within one run: a planned fault on one rank is found there and then; its twin without a fault agrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitcheck.errors import UsageError
from bitcheck.events import Event, Phase, StepKind, StepRecord
from bitcheck.memory import MemoryRun
from bitcheck.placements import TensorPlacement
from bitcheck.replica_groups import GroupKey, parse_group
from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaAnswer, ReplicaCause, ReplicaVerdict
from bitcheck.report.replicas import render_replicas
from bitcheck.run import open_run, rank_path, update_run
from tests.bitcheck.made_up_runs import PARAMETERS, digest_of, make_run
from tests.bitcheck.recorded_runs import write_run
from tests.bitcheck.replicated_runs import replicate, replicated_run

WEIGHT = "param/blocks.1.weight:value"
GRAD = "grad/blocks.1.weight:grad"
MOMENT = "optim/blocks.1.weight:momentum_buffer"
MEAN = "buffer/blocks.0.mean:value"


def check(folder: Path, run: MemoryRun, **options: Any) -> ReplicaAnswer:
    """Write a run, check it, and see that its JSON is JSON."""
    with open_run(write_run(folder / f"run-{len(list(folder.iterdir()))}", run)) as opened:
        answer = check_replicas(opened, **options)
    assert json.loads(json.dumps(answer.to_json()))["verdict"] == answer.verdict
    assert (answer.verdict is ReplicaVerdict.DIFFER) == bool(answer.disagreements) == (answer.cause is not None)
    return answer


def test_copies_that_agree_are_said_to_agree(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run())
    assert answer.verdict is ReplicaVerdict.AGREE
    assert (answer.exit_status, answer.steps, answer.ranks, answer.tensors) == (0, 4, 4, 10)
    assert [(group.by, group.ranks, group.has_buffers) for group in answer.groups] == [
        ("DistributedDataParallel", (0, 1, 2, 3), True)
    ]
    assert answer.notes == ()


def test_what_went_unrecorded_stands_in_the_notes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", replicated_run())
    update_run(folder, notes=["one more process of rank 0 trained and went unrecorded"], unrecorded={"0": 1})
    with open_run(folder) as run:
        answer = check_replicas(run)
    assert answer.notes == ("one more process of rank 0 trained and went unrecorded",)
    assert answer.to_json()["run"]["unrecorded_processes"] == {"0": 1}


@pytest.mark.parametrize(
    ("site", "cause"),
    [
        (WEIGHT, ReplicaCause.OPTIMIZER),
        (MOMENT, ReplicaCause.OPTIMIZER),
        (MEAN, ReplicaCause.BUFFER),
        (GRAD, ReplicaCause.COLLECTIVE),
    ],
)
@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("level", ["state", "module"])
def test_a_flipped_copy_on_one_rank_of_four_is_named_with_its_step(
    tmp_path: Path, site: str, cause: ReplicaCause, rank: int, level: str
) -> None:
    answer = check(tmp_path, replicated_run(level=level, changes=[(rank, 2, site)]))
    first = answer.first
    assert answer.exit_status == 1
    assert first is not None
    assert (first.step, first.site, first.ranks, first.has_majority) == (2, site, (rank,), True)
    assert (first.dtype, first.shape, first.elements) == ("float32", (2, 8), (0, 15))
    assert answer.odd == ((rank, 2),)
    assert answer.cause is cause
    assert answer.num_disagreements == 1
    assert f"rank {rank} has other bits of {site} than the other 3" in answer.explanation
    others = tuple(other for other in range(4) if other != rank)
    assert [version.ranks for version in first.versions] == [others, (rank,)]


def test_a_copy_that_is_wrong_in_one_step_alone_is_found_too(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(once=[(1, 2, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.step, answer.first.site, answer.first.ranks) == (2, WEIGHT, (1,))


def test_what_the_optimizer_finds_comes_before_what_it_makes_of_it(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(changes=[(1, 2, MOMENT), (1, 2, WEIGHT), (1, 2, GRAD)]))
    assert [each.site for each in answer.disagreements] == [GRAD, WEIGHT, MOMENT]
    assert answer.cause is ReplicaCause.COLLECTIVE


def test_ranks_that_become_odd_one_after_the_other_are_told_apart(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(num_ranks=5, changes=[(0, 1, WEIGHT), (3, 2, MOMENT)]))
    assert answer.odd == ((0, 1), (3, 2))
    assert "Rank 3 follows in step 2." in answer.explanation
    assert "odd ranks" in render_replicas(answer)


def test_several_odd_ranks_are_outvoted_by_the_majority(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(num_ranks=5, changes=[(0, 1, WEIGHT), (3, 1, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.ranks, answer.first.has_majority) == ((0, 3), True)
    assert answer.odd == ((0, 1), (3, 1))


def test_two_ranks_have_no_majority_and_the_answer_says_so(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(num_ranks=2, changes=[(1, 1, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.ranks, answer.first.has_majority, answer.odd) == ((0, 1), False, ())
    assert "With two ranks there is no majority" in answer.explanation
    assert "no majority" in render_replicas(answer).splitlines()[0]
    assert check(tmp_path, replicated_run(num_ranks=2)).verdict is ReplicaVerdict.AGREE


def test_a_tie_is_no_majority(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(changes=[(0, 1, WEIGHT), (3, 1, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.ranks, answer.first.has_majority, answer.odd) == ((0, 1, 2, 3), False, ())
    assert "the most frequent is that of ranks 0 and 3" in answer.explanation


def test_copies_that_differ_before_the_first_step_were_not_broadcast(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(changes=[(3, -1, f"param/{name}:value") for name in PARAMETERS]))
    assert answer.cause is ReplicaCause.INITIAL_STATE
    assert answer.first is not None
    assert (answer.first.step, answer.first.is_initial, answer.first.ranks) == (-1, True, (3,))
    assert answer.num_disagreements == len(PARAMETERS)
    assert "before step 0" in render_replicas(answer).splitlines()[0]


def test_a_resumed_run_whose_copies_differ_at_once_was_not_restored_alike(tmp_path: Path) -> None:
    run = replicate(make_run(num_ranks=4, start_step=2, explicit_start=True), changes=[(1, 1, MOMENT)])
    assert check(tmp_path, run).cause is ReplicaCause.RESTORE


def keep_local(rank: int, record: StepRecord) -> None:
    """Let the optimizer find each rank's own gradients, as where the wrapper was bypassed."""
    local = {event.site.path: event.digest for event in record.events if event.site.phase is Phase.BACKWARD}
    for event in record.events:
        if event.site.phase is Phase.GRAD:
            event.digest = event.leaves = local[event.site.path]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_that_were_never_reduced_are_recognised_as_the_local_ones(tmp_path: Path, num_ranks: int) -> None:
    answer = check(tmp_path, replicated_run(num_ranks=num_ranks, edit=keep_local))
    assert answer.cause is ReplicaCause.COLLECTIVE
    assert answer.first is not None
    assert (answer.first.step, answer.first.phase, answer.first.has_majority) == (0, "grad", False)
    assert "differs in all gradients, and is on each rank its own local gradient" in answer.explanation
    assert "model.module" in answer.remedy


def test_a_gradient_that_one_rank_lacks_is_a_difference(tmp_path: Path) -> None:
    def lose(rank: int, record: StepRecord) -> None:
        if rank == 1 and record.step == 2:
            record.events = [event for event in record.events if event.site.phase is not Phase.GRAD]

    answer = check(tmp_path, replicated_run(level="state", edit=lose))
    assert answer.first is not None
    assert (answer.first.ranks, answer.first.versions[1].digest) == ((1,), None)
    assert "rank 1 lacks grad/" in answer.explanation


def test_a_gradient_that_one_rank_of_two_lacks_is_the_cause_of_a_parameter_that_parts(tmp_path: Path) -> None:
    def lose(rank: int, record: StepRecord) -> None:
        if rank == 1 and record.step == 2:
            record.events = [e for e in record.events if e.site.text(with_root=False) != GRAD]

    run = replicated_run(level="state", num_ranks=2, edit=lose, changes=[(1, 2, WEIGHT)])
    answer = check(tmp_path, run)
    assert (answer.cause, answer.first is not None and answer.first.site) == (ReplicaCause.COLLECTIVE, GRAD)


def test_optimizer_states_that_are_divided_among_ranks_are_no_copies(tmp_path: Path) -> None:
    def divide(rank: int, record: StepRecord) -> None:
        mine = PARAMETERS[rank % len(PARAMETERS)] if rank < len(PARAMETERS) else None
        record.events = [e for e in record.events if e.site.phase is not Phase.OPTIM or e.site.path == mine]

    answer = check(tmp_path, replicated_run(level="state", edit=divide))
    assert answer.verdict is ReplicaVerdict.AGREE
    assert "on one rank alone" in answer.notes[0]
    answer = check(tmp_path, replicated_run(level="state", edit=divide, changes=[(2, 1, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.site, answer.first.ranks, answer.first.step) == (WEIGHT, (2,), 1)


def test_a_learning_rate_of_one_rank_alone_is_named(tmp_path: Path) -> None:
    def change(rank: int, record: StepRecord) -> None:
        for event in record.events:
            if rank == 2 and record.step >= 1 and event.site.phase is Phase.SCALAR:
                event.digest = digest_of("another rate")

    answer = check(tmp_path, replicated_run(edit=change, changes=[(2, 1, WEIGHT)]))
    assert answer.cause is ReplicaCause.HYPERPARAMETER
    assert "scalar/SGD.0:lr" in answer.explanation


def test_buffers_that_are_not_declared_may_differ(tmp_path: Path) -> None:
    run = replicate(make_run(num_ranks=4), with_buffers=False)
    digests = {
        r: [e.digest for s in steps for e in s.events if e.site.phase is Phase.BUFFER] for r, steps in run.steps.items()
    }
    assert digests[0] != digests[1]
    answer = check(tmp_path, run)
    assert answer.verdict is ReplicaVerdict.AGREE
    assert (answer.tensors, answer.groups[0].has_buffers) == (9, False)
    answer = check(tmp_path, run, groups=["0-3:*.mean"])
    assert answer.first is not None
    assert answer.first.site == MEAN
    assert answer.cause is ReplicaCause.BUFFER


def test_what_differs_besides_buffers_does_not_hide_behind_them(tmp_path: Path) -> None:
    answer = check(tmp_path, replicated_run(changes=[(1, 0, MEAN), (2, 2, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.site, answer.first.step, answer.cause) == (MEAN, 0, ReplicaCause.BUFFER)
    assert answer.besides is not None and answer.besides.first is not None
    assert (answer.besides.first.site, answer.besides.first.step, answer.besides.first.ranks) == (WEIGHT, 2, (2,))
    assert f"Apart from buffers: in step 2 rank 2 has other bits of {WEIGHT}" in answer.explanation
    shown = next(line for line in render_replicas(answer).splitlines() if line.startswith("besides"))
    assert shown.split(maxsplit=1)[1].startswith(f"step 2, {WEIGHT}  float32 [2, 8]")
    answer = check(tmp_path, replicated_run(changes=[(1, 0, MEAN)]))
    assert answer.besides is not None and answer.besides.verdict is ReplicaVerdict.AGREE
    assert "Apart from buffers all copies agree in all steps." in answer.explanation


def test_what_is_excepted_may_differ_and_nothing_else(tmp_path: Path) -> None:
    flips = [(1, 1, MEAN), (2, 2, WEIGHT)]
    answer = check(tmp_path, replicated_run(changes=flips), exceptions=["*.mean"])
    assert answer.first is not None
    assert (answer.first.site, answer.first.step) == (WEIGHT, 2)
    assert check(tmp_path, replicated_run(changes=flips), exceptions=["buffer/*", "blocks.1.weight"]).exit_status == 0


def test_the_steps_after_until_are_not_looked_at(tmp_path: Path) -> None:
    run = replicated_run(changes=[(1, 2, WEIGHT)])
    assert check(tmp_path, run, until=1).verdict is ReplicaVerdict.AGREE
    assert check(tmp_path, run, until=2).verdict is ReplicaVerdict.DIFFER


def on_mesh(rank: int, event: Event) -> str:
    """Lay a tensor on a mesh of 2 x 2: copied along `dp`, cut along `tp`; one of them is cut along both."""
    kinds = ("S(0)", "S(1)") if event.site.path == PARAMETERS[2] else ("R", "S(0)")
    return TensorPlacement((("dp", 2), ("tp", 2)), (0, 1, 2, 3), divmod(rank, 2), kinds).to_text()


def shard(rank: int, record: StepRecord) -> None:
    """Give each rank along `tp` bits of its own, and each rank its own of what is cut along both."""
    for event in record.events:
        if event.placement:
            part = rank if event.site.path == PARAMETERS[2] else rank % 2
            event.digest = event.leaves = digest_of(event.digest, part)


def test_shards_are_held_against_the_ranks_of_the_mesh_that_hold_the_same_shard(tmp_path: Path) -> None:
    run = replicated_run(placement=on_mesh, edit=shard)
    answer = check(tmp_path, run)
    assert answer.verdict is ReplicaVerdict.AGREE
    assert [(group.by, group.ranks) for group in answer.groups] == [("DTensor", (0, 2)), ("DTensor", (1, 3))]
    assert answer.tensors == 2 * 7
    answer = check(tmp_path, replicated_run(placement=on_mesh, edit=shard, changes=[(3, 1, WEIGHT)]))
    assert answer.first is not None
    assert (answer.first.site, answer.first.step, answer.first.ranks) == (WEIGHT, 1, (1, 3))
    sharded = f"param/{PARAMETERS[2]}:value"
    assert check(tmp_path, replicated_run(placement=on_mesh, edit=shard, changes=[(3, 1, sharded)])).exit_status == 0


def test_parameters_that_nobody_declared_are_named_where_others_were(tmp_path: Path) -> None:
    everywhere = TensorPlacement((("tp", 4),), (0, 1, 2, 3), (), ("R",)).to_text()

    def without_one(rank: int, event: Event) -> str:
        return "" if event.site.path == PARAMETERS[0] else everywhere

    run = replicated_run(placement=without_one)
    (note,) = check(tmp_path, run).notes
    assert f"which ranks hold copies of the parameter {PARAMETERS[0]} (plain tensors" in note
    assert check(tmp_path, run, groups=[f"0-3:{PARAMETERS[0]}"]).notes == ()


def test_groups_that_part_in_different_steps_are_settled_one_by_one(tmp_path: Path) -> None:
    halves = [TensorPlacement.of_ddp(ranks).to_text() for ranks in ((0, 1, 2), (3, 4, 5))]
    run = replicated_run(
        num_ranks=6, placement=lambda rank, event: halves[rank // 3], changes=[(4, 1, WEIGHT), (0, 3, MOMENT)]
    )
    answer = check(tmp_path, run)
    assert answer.first is not None
    assert (answer.first.site, answer.first.ranks) == (WEIGHT, (4,))
    assert answer.odd == ((4, 1), (0, 3))
    assert [(group.ranks, group.num_differing) for group in answer.groups] == [((0, 1, 2), 1), ((3, 4, 5), 1)]


def test_without_a_declaration_nothing_is_guessed(tmp_path: Path) -> None:
    answer = check(tmp_path, make_run(num_ranks=4))
    assert answer.verdict is ReplicaVerdict.UNDECLARED
    assert (answer.exit_status, answer.ranks, answer.groups) == (2, 0, ())
    assert "--group 0-3" in answer.remedy
    alone = check(tmp_path, replicated_run(num_ranks=1))
    assert (alone.exit_status, "one rank" in alone.explanation) == (2, True)


def test_where_all_is_sharded_the_answer_says_that_there_are_no_copies(tmp_path: Path) -> None:
    def cut(rank: int, event: Event) -> str:
        return TensorPlacement((("dp", 4),), (0, 1, 2, 3), (rank,), ("S(0)",)).to_text()

    answer = check(tmp_path, replicated_run(placement=cut))
    assert answer.exit_status == 2
    assert "cut over all ranks of its mesh" in answer.explanation
    assert "--group" in answer.remedy


def test_what_the_user_declares_is_compared(tmp_path: Path) -> None:
    flips = [(2, 1, WEIGHT)]
    run = replicate(make_run(num_ranks=4), placement=lambda rank, event: "", changes=flips)
    answer = check(tmp_path, run, groups=["0-3:blocks.*.weight"])
    assert answer.first is not None
    assert (answer.first.site, answer.first.ranks, answer.groups[0].by) == (WEIGHT, (2,), "0-3:blocks.*.weight")
    assert check(tmp_path, run, groups=["0,1,3"]).verdict is ReplicaVerdict.AGREE
    answer = check(tmp_path, run, groups=["0-3:forward/*"])
    assert answer.cause is ReplicaCause.OTHER, "each rank has a batch of its own"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-9", "there is no rank 9"),
        ("1", "one rank has nothing to agree with"),
        ("a-b", "is no rank"),
        ("0,0", "names a rank twice"),
        ("3-1", "holds no rank"),
        ("0-3:no.such.*", "no recorded tensor of these ranks is named so"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(tmp_path, make_run(num_ranks=4), groups=[text])


@pytest.mark.parametrize(
    ("text", "ranks", "pattern"),
    [
        ("0-3", (0, 1, 2, 3), "*"),
        ("0,2:head.*", (0, 2), "head.*"),
        ("0-8:4", (0, 4, 8), "*"),
        ("0-8:4:head.*", (0, 4, 8), "head.*"),
        ("0-8:4,1:x", (0, 1, 4, 8), "x"),
        ("0-1:param/*", (0, 1), "param/*"),
        ("0-1:0.weight", (0, 1), "0.weight"),
    ],
)
def test_a_group_is_ranks_and_a_pattern(text: str, ranks: tuple[int, ...], pattern: str) -> None:
    group = parse_group(text, 9)
    assert (group.ranks, group.pattern) == (ranks, pattern)
    assert GroupKey(text, ranks) == (text, ranks)


def test_a_rank_that_ended_early_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    run = replicated_run(num_steps=5, changes=[(1, 3, WEIGHT)])
    run.steps = {rank: records[: 4 if rank == 2 else None] for rank, records in run.steps.items()}
    answer = check(tmp_path, run)
    assert answer.first is not None
    assert [version.ranks for version in answer.first.versions] == [(0, 3), (1,)]
    assert "Rank 2 ended after step 2" in answer.notes[0]


def test_of_very_many_tensors_the_first_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    def multiply(rank: int, record: StepRecord) -> None:
        for event in [event for event in record.events if event.site.phase is Phase.PARAM]:
            for number in range(40):
                site = event.site._replace(path=f"{event.site.path}.{number}")
                digest = digest_of(event.digest, number, rank if record.step >= 1 else None)
                record.events.append(Event(site, "float32", (2, 8), 64, digest, digest, placement=event.placement))

    answer = check(tmp_path, replicated_run(num_ranks=12, edit=multiply))
    assert (len(answer.disagreements), answer.num_disagreements) == (64, 120)
    assert answer.groups[0].num_differing == 120
    assert all(len(each.versions) == 12 for each in answer.disagreements)
    assert "no two agree" in answer.explanation


@pytest.mark.parametrize("placement", ["nonsense", "mesh=ddp:99999999999; ranks=0-99999999998; placements=R"])
def test_a_placement_that_makes_no_sense_is_damage_and_no_crash(tmp_path: Path, placement: str) -> None:
    folder = write_run(tmp_path / "run", replicated_run(placement=lambda rank, event: placement))
    done = run_replicas(folder)
    assert done.returncode == 2
    assert "does not hold: no" in done.stderr
    assert "internal error" not in done.stderr


def test_a_group_of_ranks_that_the_run_has_not_is_compared_as_far_as_it_has_them(tmp_path: Path) -> None:
    wider = "mesh=ddp:8; ranks=0-7; placements=R"
    answer = check(tmp_path, replicated_run(placement=lambda rank, event: wider, changes=[(1, 1, WEIGHT)]))
    assert answer.first is not None
    assert answer.first.ranks == (1,)
    assert "Ranks 4-7 recorded none of the tensors" in answer.notes[0]


def run_replicas(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bitcheck", "replicas", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_the_verdict_first_and_ends_as_diff_does(tmp_path: Path) -> None:
    clean = write_run(tmp_path / "clean", replicated_run())
    flipped = write_run(tmp_path / "flipped", replicated_run(changes=[(2, 1, WEIGHT)]))
    unknown = write_run(tmp_path / "unknown", make_run(num_ranks=4))
    done = run_replicas(clean)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "AGREE over 4 steps, 4 ranks, 10 replicated tensors."
    done = run_replicas(flipped)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0] == f"DIFFER in step 1: {WEIGHT} on rank 2 (cause: optimizer)"
    assert len(done.stdout.splitlines()) < 20
    done = run_replicas(unknown, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (2, "undeclared")
    answer = json.loads(run_replicas(flipped, "--json").stdout)
    assert (answer["schema"], answer["first"]["ranks"]) == ("bitcheck.replicas/1", [2])
    assert list(answer)[:5] == ["schema", "verdict", "run", "groups", "compared"]


def test_a_run_that_cannot_be_read_ends_with_2_and_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no run")
    missing = write_run(tmp_path / "missing", replicated_run())
    rank_path(missing, 2).unlink()
    cut = write_run(tmp_path / "cut", replicated_run())
    os.truncate(rank_path(cut, 3), rank_path(cut, 3).stat().st_size // 2)
    damaged = write_run(tmp_path / "damaged", replicated_run(changes=[(2, 1, WEIGHT)]))
    data = rank_path(damaged, 2).read_bytes()
    with open_run(damaged) as run:
        step = run.rank(2).load(2)
        assert step.kind is StepKind.STEP
        digest = step.digests[step.keys.index(f"{WEIGHT.replace('/', '/Model/')}")].tobytes()
    assert digest in data
    rank_path(damaged, 2).write_bytes(data.replace(digest, bytes(16)))
    for path in (tmp_path / "text", tmp_path / "nowhere", missing, cut, damaged):
        done = run_replicas(path)
        assert (done.returncode, done.stdout) == (2, ""), path
        assert done.stderr.startswith("bitcheck: ")
        assert "internal error" not in done.stderr
        assert "Traceback" not in done.stderr


def test_a_long_name_with_brackets_is_printed_whole_in_a_pipe(tmp_path: Path) -> None:
    name = "blocks[0]." + "deep." * 24 + "weight"

    def rename(rank: int, record: StepRecord) -> None:
        for event in record.events:
            if event.site.path == PARAMETERS[1]:
                event.site = event.site._replace(path=name)

    flipped = write_run(tmp_path / "a", replicated_run(changes=[(2, 1, WEIGHT)], edit=rename))
    assert f"param/{name}:value" in run_replicas(flipped).stdout.splitlines()[0]
