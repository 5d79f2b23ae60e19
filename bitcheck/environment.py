"""The fingerprint of where a run ran: hardware, system, Python, PyTorch and its switches, variables.

    cpu.model              Intel(R) Xeon(R) Platinum 8480C
    torch.version          2.13.0+cpu
    torch.num_threads      2
    torch.deterministic    False
    env.OMP_NUM_THREADS    1
    program.text           d10f6d2becdc2cef8ad603a81663b170   (declared by the program itself)

Flat, text to text, so that two of them are compared key by key; a key that is missing on one side
means "not set" or "not there". It holds what can change bits and nothing that differs between two good
runs by nature: no host name, process number, time, port or job number. Of the environment variables
only those of numerical and communication libraries and of allocators are read, none whose name speaks
of a secret, and no paths.

Reading it changes nothing: no device is initialised, no module imported, no warning filter touched.
What belongs to PyTorch is read where the program has imported it, so it is read at the first step,
after the program's own settings.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

VARIABLE_PREFIXES = (
    "ACL_",
    "ATEN_",
    "BLIS_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "FLASH_ATTENTION_",
    "GLOO_",
    "GOMP_",
    "GOTO_",
    "HIP_",
    "HIPBLASLT_",
    "HSA_",
    "JEMALLOC_",
    "KMP_",
    "MALLOC_",
    "MIMALLOC_",
    "MIOPEN_",
    "MKL_",
    "NCCL_",
    "NPY_",
    "NUMEXPR_",
    "NVIDIA_",
    "NVTE_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTORCH_",
    "RCCL_",
    "ROCBLAS_",
    "TCMALLOC_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "UCX_",
    "VECLIB_",
    "XFORMERS_",
)
"""Variables of the libraries that compute and communicate, and of those that hand out memory: its alignment decides how
sums are split, and what nobody wrote yet is in what they left."""
VARIABLES = frozenset({"GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONOPTIMIZE"})
"""Variables of no such family."""

_NEVER = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH"  # secrets
    r"|_DIRS?$|_DIRECTORY$|_HOME$|_PATHS?$|_FILE$|_ROOT$|_CACHE"  # places
    r"|_PORT$|_ADDR$|_COMM_ID$|_RUN_ID$|_HOSTNAME$|_LOGS|_LOG_|_TRACE$|_DRIVER_CAPABILITIES$|_VERSION$"
)
_SIMD = re.compile(r"(sse4_[12]|ssse3|avx|fma|f16c|amx|bf16|neon|asimd|sve|vsx)")
_PACKAGES = (
    "accelerate",
    "apex",
    "causal_conv1d",
    "deepspeed",
    "fairscale",
    "flash_attn",
    "flash_attn_interface",
    "jax",
    "lightning",
    "mamba_ssm",
    "megatron.core",
    "numpy",
    "pytorch_lightning",
    "scipy",
    "torchao",
    "torchaudio",
    "torchvision",
    "transformer_engine",
    "transformers",
    "triton",
    "xformers",
)
"""Packages that compute, or decide what is computed; those that the program has imported count."""


_declared: dict[str, str] = {}


@contextmanager
def declared(facts: Mapping[str, str]) -> Iterator[None]:
    """Add what a program says of itself (the digest of its data, say) to fingerprints taken inside.

    Keys get the prefix `program.`.
    """
    before = dict(_declared)
    _declared.update({f"program.{key}": value for key, value in facts.items()})
    try:
        yield
    finally:
        _declared.clear()
        _declared.update(before)


def fingerprint(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of this process, keys sorted.

    `variables` are the environment variables, by default those of the process now.
    """
    found = dict(_system())
    found.update(_python())
    found.update(_packages())
    found.update(_gpu_driver())
    torch = sys.modules.get("torch")
    if torch is not None:
        found.update(_torch(torch))
    told = telling_variables(os.environ if variables is None else variables)
    found.update((f"env.{name}", value) for name, value in told.items())
    found.update(_declared)
    return dict(sorted(found.items()))


def telling_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those environment variables that can change bits and may be written down."""
    return {
        name: value
        for name, value in variables.items()
        if (name in VARIABLES or name.startswith(VARIABLE_PREFIXES)) and not _NEVER.search(name)
    }


def _system() -> Iterator[tuple[str, str]]:
    system = os.uname()
    yield "os.system", system.sysname
    yield "os.release", system.release
    yield "os.machine", system.machine
    yield from _if_readable("os.distribution", lambda: platform.freedesktop_os_release()["PRETTY_NAME"])
    yield from _if_readable("os.libc", lambda: os.confstr("CS_GNU_LIBC_VERSION"))
    yield "cpu.count", str(os.cpu_count())
    if hasattr(os, "sched_getaffinity"):
        yield "cpu.usable", str(len(os.sched_getaffinity(0)))
    yield from _cpu()


def _cpu() -> Iterator[tuple[str, str]]:
    """Read the first processor of /proc/cpuinfo; the names are those of x86 and of ARM."""
    fields: dict[str, str] = {}
    for line in _read_text("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if not name.strip():
            break
        fields.setdefault(name.strip(), value.strip())
    implementer = " ".join(fields[key] for key in ("CPU implementer", "CPU part") if key in fields)
    if model := fields.get("model name") or implementer:
        yield "cpu.model", model
    if stepping := fields.get("stepping") or fields.get("CPU revision"):
        yield "cpu.stepping", stepping
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    if simd := sorted({flag for flag in flags if _SIMD.match(flag)}):
        yield "cpu.simd", " ".join(simd)


def _gpu_driver() -> Iterator[tuple[str, str]]:
    """Read what the NVIDIA driver tells in /proc, which initialises nothing."""
    if version := re.search(r"Module.*?\s(\d+\.[\d.]+)\s", _read_text("/proc/driver/nvidia/version")):
        yield "gpu.driver", version[1]
    models = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        if model := re.search(r"^Model:\s*(.+?)\s*$", _read_text(card), re.MULTILINE):
            models.append(model[1])
    if models:
        yield "gpu.installed", ", ".join(models)


def _python() -> Iterator[tuple[str, str]]:
    yield "python.version", platform.python_version()
    yield "python.implementation", sys.implementation.name
    yield "python.compiler", platform.python_compiler()


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if isinstance(version, str):
            yield f"package.{name}", version


def _torch(torch: Any) -> Iterator[tuple[str, str]]:
    """Read PyTorch's build, switches and devices; what this version lacks is left out."""
    yield from _if_readable("torch.version", lambda: torch.__version__)
    yield from _if_readable("torch.git", lambda: torch.version.git_version)
    yield from _if_readable("torch.cuda", lambda: torch.version.cuda)
    yield from _if_readable("torch.hip", lambda: torch.version.hip)
    build = torch.__config__.show()
    yield "torch.build", hashlib.sha256(build.encode()).hexdigest()[:16]
    for name, pattern in _BUILD.items():
        if match := re.search(pattern, build):
            yield f"torch.{name}", match[1]
    if match := re.search(r"parallel backend: (.+)", torch.__config__.parallel_info()):
        yield "torch.parallel", match[1]
    for name, getter in _SWITCHES.items():
        yield from _if_readable(f"torch.{name}", lambda getter=getter: attrgetter(getter)(torch)())  # type: ignore[misc]
    for backend, op in _FP32_PRECISION:
        yield from _if_readable(
            f"torch.fp32_precision.{backend}.{op}",
            lambda backend=backend, op=op: torch._C._get_fp32_precision_getter(backend, op),  # type: ignore[misc]
        )
    yield "torch.flush_denormal", str(_flushes_denormals())
    if torch.cuda.is_initialized():
        yield from _if_readable("torch.cudnn", torch.backends.cudnn.version)
        yield from _if_readable("torch.nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
        yield from _if_readable("torch.blas.preferred", torch.backends.cuda.preferred_blas_library)
        yield from _if_readable("torch.linalg.preferred", torch.backends.cuda.preferred_linalg_library)
        yield from _if_readable("torch.gpus", lambda: ", ".join(_gpus(torch)))


_BUILD = {
    "blas": r"BLAS_INFO=(\w+)",
    "mkl": r"Math Kernel Library Version (\S+)",
    "onednn": r"MKL-DNN (v\S+)",
    "cpu_capability": r"CPU capability usage: (\S+)",
}
"""Parts of `torch.__config__.show()` that are worth a line of their own."""
_SWITCHES = {
    "num_threads": "get_num_threads",
    "num_interop_threads": "get_num_interop_threads",
    "default_dtype": "get_default_dtype",
    "deterministic": "are_deterministic_algorithms_enabled",
    "deterministic.warn_only": "is_deterministic_algorithms_warn_only_enabled",
    "deterministic.fill_uninitialized_memory": "_C._get_deterministic_fill_uninitialized_memory",
    "mkldnn.enabled": "_C._get_mkldnn_enabled",
    "mkldnn.deterministic": "_C._get_mkldnn_deterministic",
    "nnpack.enabled": "_C._get_nnpack_enabled",
    "cudnn.enabled": "_C._get_cudnn_enabled",
    "cudnn.benchmark": "_C._get_cudnn_benchmark",
    "cudnn.deterministic": "_C._get_cudnn_deterministic",
    "cublas.fp16_reduced_precision_reduction": "_C._get_cublas_allow_fp16_reduced_precision_reduction",
    "cublas.bf16_reduced_precision_reduction": "_C._get_cublas_allow_bf16_reduced_precision_reduction",
    "cublas.fp16_accumulation": "_C._get_cublas_allow_fp16_accumulation",
    "sdp.flash": "_C._get_flash_sdp_enabled",
    "sdp.mem_efficient": "_C._get_mem_efficient_sdp_enabled",
    "sdp.math": "_C._get_math_sdp_enabled",
    "sdp.cudnn": "_C._get_cudnn_sdp_enabled",
}
"""Key -> what to call, below `torch`."""
_FP32_PRECISION = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
)
"""TF32 and the like, by backend and op: `set_float32_matmul_precision` and `allow_tf32` show here too. Their own
getters raise once a program has used the newer setters; these never do."""


def _gpus(torch: Any) -> Iterable[str]:
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"{device.name} ({device.multi_processor_count} SMs, {device.total_memory >> 20} MiB)"


def _flushes_denormals() -> bool:
    smallest = sys.float_info.min
    return smallest / 2 == 0.0


def _if_readable(key: str, read: Callable[[], object]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) unless this system or this version of PyTorch has no such thing."""
    try:
        value = read()
    except (AttributeError, KeyError, IndexError, OSError, RuntimeError, TypeError, ValueError):
        return
    if value is not None:
        yield key, str(value)


def _read_text(path: str | Path) -> str:
    """Return a file's text, nothing where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
