"""Two hosts, each with a launcher and a folder of its own: gathered, their run is one run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from bitcheck.answer import Verdict
from bitcheck.diff import diff_runs
from bitcheck.merge import merge_runs
from bitcheck.replicas import check_replicas
from bitcheck.replicas_answer import ReplicaVerdict
from bitcheck.run import open_run
from bitcheck.verify import verify_run

PROGRAM = """
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
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


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
        hosts.append(
            subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    for host in hosts:
        told, _ = host.communicate(timeout=240)
        assert host.returncode == 0, told.decode()[-3000:]
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
