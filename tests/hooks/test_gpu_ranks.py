"""Two GPUs: DDP and FSDP2 over NCCL recorded, with the deterministic recipe, without it, and with an odd copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_verdict_on_two_ranks_is_as_it_has_to_be(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--layers", "4", "--parts", "verdicts", "--out", str(tmp_path / "verdicts.md")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*launcher, "-m", "benchmarks.gpu_ranks", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    told = (tmp_path / "verdicts.md").read_text() if (tmp_path / "verdicts.md").exists() else ""
    assert done.returncode == 0, f"{told}\n{done.stderr[-4000:]}"
    assert told.count("| yes |") == 9
