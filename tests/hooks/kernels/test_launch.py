"""What a launch of the kernels hands to the compiled half, on a stand-in for what Triton compiles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bitcheck.hooks.kernels import launch
from bitcheck.hooks.kernels.layout import Runs, Transposed
from bitcheck.hooks.kernels.shortcut import CopyKernel, copy_key, kernel_of


class Compiled:
    """As Triton 3.6's CompiledKernel, as far as it is looked at."""

    def __init__(self, function: int, **run: Any) -> None:
        self.function = function
        self.packed_metadata = ()
        self.metadata = SimpleNamespace(num_ctas=1, num_warps=4, shared=1000)
        self.launched: list[tuple[Any, ...]] = []
        nothing = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": 0, "launch_pdl": 0}
        self.run = SimpleNamespace(**{**nothing, **run}, launch=lambda *given: self.launched.append(given))

    def _init_handles(self) -> None:
        pass


class Kernel:
    """As a kernel that Triton compiles at its first launch."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.grids: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **options: self.compiled


@pytest.fixture
def kernels() -> launch.LeafKernels:
    made = object.__new__(launch.LeafKernels)
    made._copies, made._copy_kernels, made._make_launcher = {}, {}, launch.launcher
    return made


def test_a_copying_kernel_is_known_to_the_compiled_half_once_it_is_compiled(
    kernels: launch.LeafKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    transpose, runs = Kernel(Compiled(7)), Kernel(Compiled(8))
    monkeypatch.setattr(launch, "transpose_kernel", transpose)
    monkeypatch.setattr(launch, "runs_kernel", runs)
    for _ in range(2):
        kernels.transpose(1600, 2, Transposed((3, 64, 80), (16, 64)), 320, 5)
        kernels.transpose(1608, 8, Transposed((1, 65, 33), (0, 70)), 320, 5)
        kernels.join_runs(1600, 2, Runs((1, 2, 600, 6), (0, 4000, 10)), 320, 5)
    assert kernels._copy_kernels == {
        copy_key(True, 2, True): CopyKernel(7, 128, 1000, 64),
        copy_key(True, 8, False): CopyKernel(7, 128, 1000, 32),
        copy_key(False, 4, False): CopyKernel(8, 128, 1000, 1024),
    }
    assert (transpose.grids, runs.grids) == ([(2, 3), (6, 1)], [(4, 1)])  # compiled once each, then launched as it is
    assert [given[:4] for given in transpose.compiled.launched] == [(2, 3, 1, 5), (6, 1, 1, 5)]
    assert [given[:4] for given in runs.compiled.launched] == [(4, 1, 1, 5)]


def test_a_kernel_that_takes_more_than_its_arguments_is_launched_by_triton_alone(
    kernels: launch.LeafKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "transpose_kernel", Kernel(Compiled(7, launch_pdl=1)))
    kernels.transpose(1600, 2, Transposed((3, 64, 80), (16, 64)), 320, 5)
    assert len(kernels._copies) == 1
    assert not kernels._copy_kernels


def test_what_another_triton_compiled_is_no_kernel_for_the_compiled_half() -> None:
    assert kernel_of(Compiled(7)) == (7, 128, 1000)
    assert kernel_of(SimpleNamespace()) is None
    of_another = Compiled(7)
    del of_another.run.launch_pdl
    assert kernel_of(of_another) is None
