"""Two hosts, each with a launcher and a folder of its own: gathered, their run is one run."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from bitcheck.answer import Verdict
from bitcheck.diff import diff_runs
from bitcheck.merge import merge_runs
from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaVerdict
from bitcheck.run import open_run
from bitcheck.verify import verify_run
from tests.hooks.jobs import Job, end_all

PROGRAM = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
time.sleep(0.2)  # as `end_process_group` of the reference trainer
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start_ranks(folder: Path, program: str, *command: str) -> list[Job]:
    """Start a program once a rank, as `srun` on two hosts of two processes does; `{host}` in the command is which."""
    (folder / "program.py").write_text(program)
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(4):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "HOST": str(rank // 2)}
        words = [word.format(host=rank // 2) for word in (*command, sys.executable, "program.py")]
        ranks.append(Job(folder / f"rank-{rank}.said", words, folder, own))
    return ranks


def check_gathered(folder: Path, parts: list[Path]) -> None:
    """Gather two hosts' folders, and hold the ranks of the run against each other."""
    merge_runs(folder / "all", parts)
    assert verify_run(folder / "all").is_sound
    with open_run(folder / "all") as run:
        answer = check_replicas(run)
        assert run.environment["torch.version"]
    assert (answer.verdict, answer.ranks, answer.steps) == (ReplicaVerdict.AGREE, 4, 3)


def test_a_launcher_a_rank_records_into_a_folder_of_each_hosts_own(tmp_path: Path) -> None:
    run = (sys.executable, "-m", "bitcheck", "run", "-o", "host{host}", "--own-folder", "--")
    end_all(start_ranks(tmp_path, PROGRAM, *run))
    check_gathered(tmp_path, [tmp_path / "host0", tmp_path / "host1"])


def test_a_program_that_records_itself_does_so_into_a_folder_of_each_hosts_own(tmp_path: Path) -> None:
    before, training = PROGRAM.split("for step in")
    body = "    ".join(f"for step in{training}".splitlines(keepends=True))
    program = f"""
import os
import bitcheck
{before}
with bitcheck.record("host" + os.environ["HOST"], own_folder=True, strict=True):
    {body}"""
    end_all(start_ranks(tmp_path, program))
    check_gathered(tmp_path, [tmp_path / "host0", tmp_path / "host1"])


def launch(folder: Path, name: str) -> list[Path]:
    """Record the program on two hosts of two processes each; return their folders."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    hosts = []
    for host in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        launcher += ["--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [sys.executable, "-m", "bitcheck", "run", "-o", f"{name}-{host}", "--", *launcher, "program.py"]
        hosts.append(Job(folder / f"host-{host}.said", command, folder, environment))
    end_all(hosts)
    return [folder / f"{name}-{host}" for host in range(2)]


def test_what_two_hosts_recorded_is_gathered_and_holds_as_one_run(tmp_path: Path) -> None:
    parts = launch(tmp_path, "host")
    found = []
    for part in parts:
        with open_run(part, allow_missing_ranks=True) as run:
            found.append((run.ranks, run.world_size, run.missing_ranks))
    assert found == [([0, 1], 4, [2, 3]), ([2, 3], 4, [0, 1])]
    merged = merge_runs(tmp_path / "all", parts[::-1])
    assert (merged.status, merged.ranks, merged.notes) == ("complete", (0, 1, 2, 3), ())
    assert verify_run(tmp_path / "all").is_sound
    with open_run(tmp_path / "all") as run, open_run(tmp_path / "all") as again:
        answer = check_replicas(run)
        compared = diff_runs(run, again)
        assert run.environment["torch.version"]
    assert (answer.verdict, answer.ranks, answer.steps) == (ReplicaVerdict.AGREE, 4, 3)
    assert (compared.verdict, compared.compared.ranks) == (Verdict.IDENTICAL, 4)
