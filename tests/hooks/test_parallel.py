"""Trainings spread over ranks: recording changes no bit of them, and two recordings of one agree.

Each test is one job of gloo processes that runs its programs bare, recorded and recorded again.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bitcheck.diff import diff_runs
from bitcheck.events import Phase, StepKind
from bitcheck.hooks.tensors import digest_tensor
from bitcheck.placements import parse_placement
from bitcheck.run import Run, open_run
from bitcheck.store import LoadedStep
from tests.hooks.jobs import run_job

LOW_RANK = "ddp_with_low_rank_gradients"
V_SHAPED = ("pipeline_zero_bubble_v", "pipeline_dual_v") if torch.__version__ >= (2, 13) else ()
"""Pipelines that go back through the ranks; in PyTorch 2.11 a rank cannot greet itself over gloo."""
ROOT = Path(__file__).resolve().parent.parent.parent


def run_programs(folder: Path, num_ranks: int, level: str, *names: str) -> None:
    """Run programs and check what holds of each: the same bits thrice, and two equal recordings."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.parallel_job", str(folder), str(num_ranks), level]
    ended = run_job(folder, [*command, *names], ROOT)
    for name in names:
        for rank in range(num_ranks):
            path = folder / f"{name}-{rank}.json"
            found = json.loads(path.read_text()) if path.exists() else {"error": ended.said}
            assert "error" not in found, found["error"]
            assert found["bare"] == found["a"] == found["b"], f"{name}, rank {rank}: other final bits"
        with open_run(folder / name / "a") as baseline, open_run(folder / name / "b") as candidate:
            answer = diff_runs(baseline, candidate)
            assert answer.verdict == "identical", f"{name}: {answer.explanation}"
            assert (answer.compared.steps, answer.compared.ranks) == (3, num_ranks)
            in_callbacks = {"collectives that callbacks of futures began"} if name == LOW_RANK else set()
            assert set(answer.unobserved) == in_callbacks, name


def step(run: Run, rank: int, number: int = 1) -> LoadedStep:
    """Return a whole training step of a rank."""
    table = run.rank(rank).table
    (row,) = ((table["step"] == number) & (table["kind"] == int(StepKind.STEP))).nonzero()[0].tolist()
    return run.rank(rank).load(row)


def keys(loaded: LoadedStep, phase: Phase) -> list[str]:
    return [site.text(False) for site in loaded.sites if site.phase is phase]


def _digests(loaded: LoadedStep) -> dict[str, bytes]:
    return {site.text(False): loaded.digests[index].tobytes() for index, site in enumerate(loaded.sites)}


def test_data_parallel_programs_are_recorded_as_they_are(tmp_path: Path) -> None:
    names = (
        "ddp", "ddp_with_bucket_views_and_static_graph", "ddp_that_accumulates",
        "ddp_with_unused_parameters_and_buffers", "ddp_with_a_hook_of_its_own", "ddp_with_low_rank_gradients",
        "averaged_by_hand",
    )  # fmt: skip
    run_programs(tmp_path, 2, "module", *names)
    with open_run(tmp_path / "ddp" / "a") as run:
        loaded = step(run, 1)
        assert "param/blocks.0.up.weight:value" in keys(loaded, Phase.PARAM), "the wrapper is in no name"
        assert "backward/blocks.0.up.weight:grad" in keys(loaded, Phase.BACKWARD)
        placements = dict(zip([site.text(False) for site in loaded.sites], loaded.placements, strict=True))
        for text in (
            "param/head.bias:value", "grad/head.bias:grad", "optim/head.bias:exp_avg",
        ):  # fmt: skip
            placement = parse_placement(placements[text])
            assert placement is not None and placement.replica_ranks == (0, 1), text
        assert placements["backward/head.bias:grad"] == "", "before the reduction it is this rank's own"
    with open_run(tmp_path / "ddp_with_a_hook_of_its_own" / "a") as run:
        found = keys(step(run, 0), Phase.COMM)
        assert "comm/all_reduce.sum.world.bucket:in.0" in found and "comm/all_reduce.sum.world.bucket:out.0#1" in found


def test_sharded_programs_are_recorded_as_they_are(tmp_path: Path) -> None:
    names = (
        "fsdp", "fsdp_that_keeps_parameters_gathered", "fsdp_in_mixed_precision",
        "fsdp_that_accumulates_and_recomputes",
    )  # fmt: skip
    run_programs(tmp_path, 2, "module", *names)
    for name in names:
        with open_run(tmp_path / name / "a") as run:
            loaded = step(run, 1)
            texts = [site.text(False) for site in loaded.sites]
            at = texts.index("param/blocks.0.up.weight:value")
            placement = parse_placement(loaded.placements[at])
            assert placement is not None and placement.kinds == ("S(0)",) and placement.replica_ranks == (1,)
            assert loaded.shapes[at] == (8, 8), "half of 16 x 8"
            local = texts.index("backward/blocks.0.up.weight:grad")
            assert loaded.shapes[local] == (16, 8), "the gradient leaves autograd whole"
            assert loaded.shapes[texts.index("grad/blocks.0.up.weight:grad")] == (8, 8)
            assert "optim/head.weight:exp_avg" in texts or "optim/head.weight:momentum_buffer" in texts
            collectives = {site.path.partition(".")[0] for site in loaded.sites if site.phase is Phase.COMM}
            assert collectives >= {"all_gather_into_tensor", "reduce_scatter_tensor"}


def test_tensor_parallel_programs_are_recorded_as_they_are(tmp_path: Path) -> None:
    run_programs(tmp_path, 2, "module", "tensor_parallel", "sequence_parallel", "fsdp_and_tensor_parallel")
    with open_run(tmp_path / "tensor_parallel" / "a") as run:
        loaded = step(run, 0)
        texts = [site.text(False) for site in loaded.sites]
        placement = parse_placement(loaded.placements[texts.index("param/blocks.1.down.weight:value")])
        assert placement is not None
        assert (placement.dims, placement.kinds) == ((("tp", 2),), ("S(1)",))
        bias = parse_placement(loaded.placements[texts.index("param/blocks.1.down.bias:value")])
        assert bias is not None and bias.replica_ranks == (0, 1)
        group = loaded.groups[int(loaded.group_of[texts.index("comm/all_reduce.sum.world:out.0")])]
        assert (group.path, group.op) == ("blocks.0.down", "all_reduce(sum)"), "which module ran it"


def test_expert_parallel_programs_are_recorded_as_they_are(tmp_path: Path) -> None:
    names = (
        "expert_parallel", "expert_parallel_asynchronous", "expert_parallel_functional", "every_collective",
        "groups_of_the_same_ranks",
    )  # fmt: skip
    run_programs(tmp_path, 2, "module", *names)
    for name in names[:3]:
        with open_run(tmp_path / name / "a") as run:
            found = [key for key in keys(step(run, 0), Phase.COMM) if ":out" in key]
            # Counts, rows, rows back; and in backward the gradients of both.
            assert found == [f"comm/all_to_all_single.world:out.0{tail}" for tail in ("", "#1", "#2", "#3", "#4")]
    with open_run(tmp_path / "every_collective" / "a") as run:
        words = {site.path.split(".")[0] for site in step(run, 0).sites if site.phase is Phase.COMM}
        assert words == {
            "broadcast", "all_gather", "all_reduce", "gather", "scatter", "reduce", "reduce_scatter_tensor",
            "all_gather_into_tensor", "send",
        }  # fmt: skip
        sent, received = (keys(step(run, rank), Phase.COMM) for rank in (0, 1))
        assert "comm/send.0-1:in.0#1" in sent and "comm/send.0-1:out.0#1" in received
    with open_run(tmp_path / "groups_of_the_same_ranks" / "a") as run:
        for number in range(3):
            sites = step(run, 0, number).sites
            found = [site.path for site in sites if site.phase is Phase.COMM and site.slot == "out.0"]
            assert found == [f"all_reduce.sum.{name}" for name in ("world.experts_dp", "world.2", "world", "world.3")]


@pytest.mark.skipif(not hasattr(torch.ops._c10d_functional, "isend"), reason="this PyTorch has no such operators")
def test_transfers_by_operators_are_recorded_as_they_are(tmp_path: Path) -> None:
    run_programs(tmp_path, 2, "module", "transfers_by_operators")
    with open_run(tmp_path / "transfers_by_operators" / "a") as run:
        sent, received = (keys(step(run, rank), Phase.COMM) for rank in (0, 1))
        assert sent == ["comm/send.0-1:in.0", "comm/send.0-1:in.0#1", "comm/send.1-0:out.0"]
        assert received == ["comm/send.0-1:out.0", "comm/send.1-0:in.0", "comm/send.0-1:out.0#1"]
        given, gotten = (_digests(step(run, rank)) for rank in (0, 1))
        assert all(given[f"comm/send.0-1:in.0{tail}"] == gotten[f"comm/send.0-1:out.0{tail}"] for tail in ("", "#1"))


def test_objects_are_no_tensors_whoever_imported_the_functions_that_send_them(tmp_path: Path) -> None:
    name = "objects_sent_by_functions_imported_by_name"
    for level in ("module", "op"):
        (tmp_path / level).mkdir()
        run_programs(tmp_path / level, 2, level, name)
        with open_run(tmp_path / level / name / "a") as run:
            assert not keys(step(run, 0), Phase.COMM)


def test_pipelines_are_recorded_as_they_are_by_stage_and_micro_batch(tmp_path: Path) -> None:
    names = ("pipeline_1f1b", "pipeline_interleaved")
    run_programs(tmp_path, 2, "module", *names, *V_SHAPED)
    for name in names:
        with open_run(tmp_path / name / "a") as run:
            for rank in (0, 1):
                loaded = step(run, rank)
                forward = keys(loaded, Phase.FORWARD)
                assert all(f"forward/stage.{rank}.0.up:out{tail}" in forward for tail in ("", "#1", "#2", "#3"))
                assert f"param/stage.{rank}.0.up.weight:value" in keys(loaded, Phase.PARAM)
                assert (f"forward/stage.{rank + 2}.0.up:out#3" in forward) == (name == "pipeline_interleaved")
            assert keys(step(run, 0), Phase.BATCH) == [f"batch/stage.0:in.0{tail}" for tail in ("", "#1", "#2", "#3")]
            assert not keys(step(run, 1), Phase.BATCH), "what a stage receives is no data"


def test_programs_of_several_ranks_are_recorded_as_they_are_operation_by_operation(tmp_path: Path) -> None:
    names = (
        "fsdp", "tensor_parallel", "expert_parallel_functional", "pipeline_gpipe", "pipeline_zero_bubble", *V_SHAPED,
    )  # fmt: skip
    run_programs(tmp_path, 2, "op", *names)
    with open_run(tmp_path / "tensor_parallel" / "a") as run:
        loaded = step(run, 0)
        texts = [site.text(False) for site in loaded.sites]
        assert "forward/blocks.0.up:aten.addmm.default.out" in texts, "the operation on the local shard"
        result = texts.index("comm/all_reduce.sum.world:out.0")
        used = [index for index in range(len(texts)) if result in loaded.layout.inputs_of(index)]
        assert any(texts[index].startswith("forward/") for index in used), "what comes after knows whence it has it"
        assert not any(text.startswith("batch/") and not text.startswith("batch/Net:in.0") for text in texts)
    with open_run(tmp_path / "pipeline_zero_bubble" / "a") as run:
        added = {site.path for site in step(run, 1).sites if site.phase is Phase.GRAD and "aten.add_" in site.slot}
        assert added >= {"stage.1.0.up.weight", "stage.1.0.up.bias"}, "in the order of their addresses, so by name"


def test_a_restart_with_other_buckets_is_told_as_what_it_is_and_what_is_advised_helps(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.restart_job", str(tmp_path)]
    ended = run_job(tmp_path, command, ROOT)
    assert ended.status == 0, ended.said
    for way in ("plain", "own_hook"):
        with open_run(tmp_path / way / "whole") as whole, open_run(tmp_path / way / "resumed") as resumed:
            answer = diff_runs(whole, resumed)
        assert answer.first is not None, way
        assert (answer.verdict, answer.cause, answer.first.step) == ("diverged", "collective", 2)
        assert (answer.first.phase, answer.first.ranks, len(answer.origins)) == ("grad", (0, 1, 2), 1)
        assert "first step after a restart" in answer.explanation and "(buckets)" in answer.explanation
        assert "find_unused_parameters=True" in answer.remedy and "before the checkpoint is loaded" in answer.remedy
    for way in ("unused", "warmed"):  # the two remedies
        with open_run(tmp_path / way / "whole") as whole, open_run(tmp_path / way / "resumed") as resumed:
            assert diff_runs(whole, resumed).verdict == "identical", way


def test_a_rank_that_was_killed_is_named_and_its_finished_steps_are_compared(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, "-m", "bitcheck", "run", "-o"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    for name, status in (("whole", 0), ("cut", 1)):
        ended = run_job(tmp_path, [*command, str(tmp_path / name), "--level", "module", "--", *launch, name], ROOT)
        assert ended.status == status, ended.said
    with open_run(tmp_path / "whole") as whole, open_run(tmp_path / "cut") as cut:
        answer = diff_runs(whole, cut)
        assert cut.rank(1).status == "killed"
    assert (answer.verdict, answer.cause, answer.first) == ("diverged", "ended-early", None)
    assert answer.compared.steps >= 2
    assert "rank 1 was killed after step" in answer.explanation


KILLED = """
    import os, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from bitcheck.hooks.recorder import active_recorder

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.ones(4, 8) * (step + dist.get_rank() + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[1] == "cut" and dist.get_rank() == 1 and step == 3:
            active_recorder().drain()  # steps 0 to 2 are on the disk
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)  # as `end_process_group` of the reference trainer
    dist.destroy_process_group()
"""


def test_what_is_in_flight_is_read_when_it_is_there_in_every_step(tmp_path: Path) -> None:
    """A module gives a tensor that a collective still writes; tensors change when their futures were waited for."""
    (tmp_path / "job.py").write_text(textwrap.dedent(IN_FLIGHT))
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *launcher, "job.py"]
    ended = run_job(tmp_path, command, tmp_path)
    assert ended.status == 0, ended.said
    with open_run(tmp_path / "a") as baseline, open_run(tmp_path / "b") as candidate:
        answer = diff_runs(baseline, candidate)
        assert (answer.verdict, answer.compared.steps) == ("identical", 3), answer.explanation
        assert set(answer.unobserved) == {"collectives of threads that do not train"}
        for rank in (0, 1):
            for number in range(3):
                loaded = step(baseline, rank, number)
                digests = _digests(loaded)
                assert digests["forward/Model:out.1"] == digests["comm/all_reduce.sum.world:out.0"], "of the whole sum"
                for index in range(20):
                    reduced = digest_tensor(torch.full((16,), 2 * index + 1.0))[0]
                    assert digests[f"comm/all_reduce.sum.world:out.0#{index + 1}"] == reduced


IN_FLIGHT = """
    import threading, time
    import torch
    import torch.distributed as dist
    import bitcheck
    from torch import nn

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    background = dist.new_group()


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            z = y.detach().clone()
            time.sleep(0.2 * rank)
            self.work = dist.all_reduce(z, async_op=True)
            return y, z


    for name in "ab":
        torch.manual_seed(rank)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bitcheck.record(name, model, optimizer):
            for step in range(3):
                save = threading.Thread(target=dist.all_reduce, args=(torch.ones(3), dist.ReduceOp.SUM, background))
                save.start()
                y, z = model(torch.ones(2, 4))
                y.square().mean().backward()
                model.work.wait()
                for index in range(20):
                    t = torch.full((16,), float(rank + index))
                    dist.all_reduce(t, async_op=True).get_future().wait()
                    t.div_(2)
                save.join()
                optimizer.step()
                optimizer.zero_grad()
    time.sleep(0.2)  # as `end_process_group` of the reference trainer
    dist.destroy_process_group()
"""
