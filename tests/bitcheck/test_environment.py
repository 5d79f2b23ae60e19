"""The fingerprint of where a run ran: complete, stable, and without what differs by nature."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bitcheck import environment
from bitcheck.environment import fingerprint

PRINT = "import json, sys\nfrom bitcheck.environment import fingerprint\njson.dump(fingerprint(), sys.stdout)\n"


def fingerprint_of(*lines: str, **variables: str) -> dict[str, str]:
    """Return the fingerprint of a new process that has run these lines."""
    found = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, PRINT])],
        env={**os.environ, **variables},
        capture_output=True,
        timeout=120,
        check=True,
    )
    result: dict[str, str] = json.loads(found.stdout)
    return result


def differences(baseline: dict[str, str], candidate: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return key -> (baseline, candidate) of what differs."""
    keys = baseline.keys() | candidate.keys()
    return {key: (baseline.get(key), candidate.get(key)) for key in keys if baseline.get(key) != candidate.get(key)}


def test_two_processes_at_one_place_have_one_fingerprint() -> None:
    baseline, candidate = fingerprint_of("import torch"), fingerprint_of("import torch")
    assert baseline == candidate
    assert list(baseline) == sorted(baseline)
    assert all(isinstance(value, str) for value in baseline.values())


def test_it_names_machine_system_python_and_torch() -> None:
    import torch

    found = fingerprint_of("import torch")
    assert found["torch.version"] == torch.__version__
    assert found["torch.git"] == torch.version.git_version
    assert found["torch.num_threads"].isdigit()
    assert found["python.version"] == platform.python_version()
    assert found["os.release"] == platform.release()
    assert {"cpu.count", "torch.build", "torch.cpu_capability", "torch.deterministic", "package.numpy"} <= found.keys()


def test_settings_that_the_program_makes_are_in_it() -> None:
    program = [
        "import torch",
        "torch.set_num_threads(3)",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",  # after which the older getters raise
        "torch.backends.cudnn.benchmark = True",
        "torch.set_default_dtype(torch.float64)",
        "torch.set_flush_denormal(True)",
    ]
    changed = differences(fingerprint_of("import torch", "torch.set_num_threads(1)"), fingerprint_of(*program))
    changed.pop("package.triton", None)  # loaded by use_deterministic_algorithms
    assert changed == {
        "torch.num_threads": ("1", "3"),
        "torch.deterministic": ("False", "True"),
        "torch.deterministic.warn_only": ("False", "True"),
        "torch.fp32_precision.cuda.matmul": ("none", "tf32"),
        "torch.cudnn.benchmark": ("False", "True"),
        "torch.default_dtype": ("torch.float32", "torch.float64"),
        "torch.flush_denormal": ("False", "True"),
    }


def test_a_hash_seed_is_a_difference_of_one_key() -> None:
    changed = differences(fingerprint_of(PYTHONHASHSEED="1"), fingerprint_of(PYTHONHASHSEED="2"))
    assert changed == {"env.PYTHONHASHSEED": ("1", "2")}


def test_torch_is_read_only_where_the_program_imported_it() -> None:
    found = fingerprint_of(
        "import atexit, sys", "atexit.register(lambda: sys.exit if 'torch' not in sys.modules else 1 / 0)"
    )
    assert not [key for key in found if key.startswith(("torch.", "package."))]


def test_what_changes_numbers_is_read_of_the_variables_and_secrets_and_places_are_not() -> None:
    kept = {
        "OMP_NUM_THREADS": "4",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "NVIDIA_TF32_OVERRIDE": "0",
        "PYTHONHASHSEED": "0",
        "MALLOC_PERTURB_": "85",
        "MALLOC_ARENA_MAX": "1",
        "GLIBC_TUNABLES": "glibc.malloc.perturb=85",
        "NPY_DISABLE_CPU_FEATURES": "AVX512F",
    }
    left_out = {
        "HOME": "/home/x",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "TORCH_API_TOKEN": "secret",
        "NCCL_PASSWORD": "secret",
        "MASTER_PORT": "29500",
        "NCCL_COMM_ID": "10.0.0.1:4242",
        "TORCHELASTIC_RUN_ID": "5",
        "TRITON_CACHE_DIR": "/scratch/1",
        "TORCH_HOME": "/scratch/2",
        "CUDA_PATH": "/usr/local/cuda",
        "NCCL_TOPO_FILE": "/etc/topo",
        "MALLOC_TRACE": "/scratch/3",
        "RANK": "0",
        "PYTHONPATH": "/x",
        "BITCHECK_ATTACH": "{}",
    }
    found = {key: value for key, value in fingerprint(kept | left_out).items() if key.startswith("env.")}
    assert found == {f"env.{name}": value for name, value in kept.items()}


def test_nothing_that_differs_between_two_good_runs_is_in_it() -> None:
    found = fingerprint()
    host = platform.node()
    assert not [key for key, value in found.items() if host and value == host]
    assert str(os.getpid()) not in found.values()


def test_a_system_without_proc_still_has_a_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_read_text", lambda path: "")
    found = fingerprint()
    assert "cpu.model" not in found
    assert found["os.system"] == platform.system()


def test_an_nvidia_driver_is_named_without_asking_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x@y)\n"
    monkeypatch.setattr(environment, "_read_text", lambda path: driver if "nvidia/version" in str(path) else "")
    assert fingerprint()["gpu.driver"] == "570.86.15"


def test_arm_and_x86_name_their_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\nCPU revision\t: 1\n\n"
    x86 = "processor\t: 0\nmodel name\t: Some CPU\nstepping\t: 3\nflags\t: fpu avx2 avx512f\n\nmodel name\t: Other\n"
    for text, expected in ((arm, ("0x41 0xd4f", "asimd sve")), (x86, ("Some CPU", "avx2 avx512f"))):
        monkeypatch.setattr(environment, "_read_text", lambda path, text=text: text if "cpuinfo" in str(path) else "")
        found = fingerprint()
        assert (found["cpu.model"], found["cpu.simd"]) == expected
