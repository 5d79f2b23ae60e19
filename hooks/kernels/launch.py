"""The kernels, compiled once for one device, and launched without what Triton does at every call.

A launch through `kernel[grid](...)` binds and specialises its arguments anew, about 16 us on the host.
Here each kernel is compiled at the start, from arguments that nothing is specialised on, and the compiled
form is launched, with addresses as plain integers.

Importing this module needs triton; whoever wants the kernels imports it late.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from bitcheck.digest import LEAF_BYTES, digest_leaves, num_leaves
from bitcheck.errors import DigestError
from bitcheck.hooks.kernels.layout import FEW_TENSORS, Runs, Transposed
from bitcheck.hooks.kernels.row_major import runs_kernel, transpose_kernel
from bitcheck.hooks.kernels.shortcut import CopyKernel, Shortcut, copy_key, driver_launch, kernel_of
from bitcheck.hooks.kernels.xxh3 import SECRET_WORDS, hash_few_kernel, hash_one_kernel, hash_table_kernel

BLOCKS_A_LOAD = 16
"""KiB that a program asks for at once (1, 2, 4, 8 or 16)."""

_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_TILE = {1: 64, 2: 64, 4: 64, 8: 32}
"""Rows and columns of a tile to transpose, by the size of an element."""


_WORDS_A_PROGRAM = 1024
"""That are copied where runs are joined."""

Launch = Callable[[int, int, int, tuple[Any, ...]], None]
"""(programs, programs on the second axis, stream, arguments with the constants among them)."""


def launcher(kernel: Any) -> Launch:
    """Return the quickest launch of a compiled kernel that this Triton has.

    The C function behind it takes 3 us less than the public way in; where it takes other arguments
    than those of Triton 3.6 its TypeError comes before anything is launched.
    """
    kernel._init_handles()
    run = kernel.run
    function, packed = kernel.function, kernel.packed_metadata
    launch = getattr(run, "launch", None)
    if launch is None or run.global_scratch_size or run.profile_scratch_size:
        return plain_launcher(kernel)
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl

    def straight(x: int, y: int, stream: int, arguments: tuple[Any, ...]) -> None:
        launch(x, y, 1, stream, function, cooperative, dependent, None, None, packed, None, None, None, *arguments)

    return straight


def plain_launcher(kernel: Any) -> Launch:
    """Return the public launch of a compiled kernel."""
    return lambda x, y, stream, arguments: kernel[(x, y, 1)](*arguments, stream=stream)


class LeafKernels:
    """Launches the digest's kernels on one device, on any stream of it.

    The device has to be the current one whenever a method is called. Raises DigestError where the
    compiled kernels do not give the digest on this device.
    """

    def __init__(self, device: torch.device) -> None:
        self._secret = torch.tensor(SECRET_WORDS, dtype=torch.int64, device=device)
        self._constants = (self._secret.data_ptr(), BLOCKS_A_LOAD)
        self._copies: dict[int, Launch] = {}
        """By `copy_key`; compiled when the first tensor needs it."""
        self._copy_kernels: dict[int, CopyKernel] = {}
        """The same, for the compiled half."""
        probe = _Probe(device)
        options = {"BLOCKS_A_LOAD": BLOCKS_A_LOAD, "num_warps": 1}
        out_address = probe.out.data_ptr()
        one = hash_one_kernel[(1,)](probe.data.data_ptr(), LEAF_BYTES, out_address, self._secret, **options)
        few = hash_few_kernel[(1,)](
            *[probe.data.data_ptr()] * FEW_TENSORS,
            *[LEAF_BYTES] * FEW_TENSORS,
            *[1] * (FEW_TENSORS - 1),
            out_address,
            self._secret,
            **options,
        )
        table = hash_table_kernel[(1,)](probe.table, probe.num_tensors, out_address, self._secret, **options)
        self._compiled = one, few
        for make in (launcher, plain_launcher):
            self._make_launcher = make
            try:
                self._one, self._few, self._table = make(one), make(few), make(table)
                self._prove(probe)
                break
            except (AttributeError, TypeError):  # another Triton, whose inside is another
                if make is plain_launcher:
                    raise

    def shortcut(
        self,
        device: int,
        is_capturing: Callable[[], bool],
        current_device: Callable[[], int],
        current_stream: Callable[[int], int],
    ) -> Shortcut | None:
        """Return how the compiled half may launch the kernels of a few tensors, None where it cannot."""
        launch, one, few = driver_launch(), kernel_of(self._compiled[0]), kernel_of(self._compiled[1])
        if launch is None or one is None or few is None:
            return None
        kernels = one, few, self._copy_kernels
        return Shortcut(launch, *kernels, self._secret.data_ptr(), device, is_capturing, current_device, current_stream)

    def hash_one(self, address: int, num_bytes: int, out_address: int, stream: int) -> None:
        """Write the leaf digests, [L, 16], of the `num_bytes` (> 0) at `address` to `out_address`."""
        self._one(num_leaves(num_bytes), 1, stream, (address, num_bytes, out_address, *self._constants))

    def hash_few(
        self, addresses: Sequence[int], sizes: Sequence[int], counts: Sequence[int], out_address: int, stream: int
    ) -> None:
        """Write the leaf digests, `counts` of each, of 2 to FEW_TENSORS pieces of memory one after the other."""
        firsts = list(itertools.accumulate(counts))
        leaves = firsts.pop()
        missing = FEW_TENSORS - len(counts)
        absent = (0,) * missing
        arguments = (*addresses, *absent, *sizes, *absent, *firsts, *(leaves,) * missing, out_address)
        self._few(leaves, 1, stream, (*arguments, *self._constants))

    def hash_table(self, table_address: int, num_tensors: int, leaves: int, out_address: int, stream: int) -> None:
        """Write the leaf digests of all tensors in a table (int64 [3, T], `leaves` in all) to `out_address`."""
        self._table(leaves, 1, stream, (table_address, num_tensors, out_address, *self._constants))

    def transpose(self, address: int, itemsize: int, found: Transposed, out_address: int, stream: int) -> None:
        """Copy elements [B, R, C] with strides (b, 1, c) to row-major order, as `csrc/strided.c` does."""
        (batches, rows, columns), strides = found
        # 16 of everything: then rows and columns are read and written 16 elements at a time.
        is_aligned = not (address | out_address | rows | columns | strides[0] | strides[1]) & 15
        tile = _TILE[itemsize]
        x = -(-rows // tile) * -(-columns // tile)
        numbers = (address, rows, columns, *strides, out_address)
        constants = (_WORDS[itemsize], tile, tile, is_aligned)
        key = copy_key(True, itemsize, is_aligned)
        self._launch_copy(transpose_kernel, key, tile, (x, batches), stream, numbers, constants)

    def join_runs(self, address: int, itemsize: int, found: Runs, out_address: int, stream: int) -> None:
        """Copy elements [A, B, C, R] with strides (a, b, c, 1) to row-major order, as `csrc/strided.c` does."""
        (batches, groups, runs, length), strides = found
        # In the largest words of which everything is a whole number.
        together = address | out_address | (length | strides[0] | strides[1] | strides[2]) * itemsize | 8
        word = together & -together
        many = word // itemsize
        length //= many
        words = batches * groups * runs * length
        numbers = (address, groups, runs, length, words, *(stride // many for stride in strides), out_address)
        constants = (_WORDS[word], _WORDS_A_PROGRAM)
        programs = -(-words // _WORDS_A_PROGRAM)
        key = copy_key(False, word, False)
        self._launch_copy(runs_kernel, key, _WORDS_A_PROGRAM, (programs, 1), stream, numbers, constants)

    def _launch_copy(
        self,
        kernel: Any,
        key: int,
        block: int,
        grid: tuple[int, int],
        stream: int,
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch a copying kernel, which is compiled the first time."""
        launch = self._copies.get(key)
        if launch is not None:
            launch(*grid, stream, (*numbers, *constants))
            return
        compiled = kernel[grid](*numbers, *constants, num_warps=4)
        self._copies[key] = self._make_launcher(compiled)
        plain = kernel_of(compiled)
        if plain is not None:
            self._copy_kernels[key] = CopyKernel(*plain, block)

    def _prove(self, probe: _Probe) -> None:
        """Compare with the CPU's digest: a kernel that miscomputes here must never be used."""
        stream = torch.cuda.current_stream().cuda_stream
        self.hash_table(probe.table.data_ptr(), probe.num_tensors, probe.out.shape[0], probe.out.data_ptr(), stream)
        found = [probe.out.cpu().numpy().tobytes()]
        for offset, size in probe.SLICES:
            self.hash_one(probe.data.data_ptr() + offset, size, probe.out.data_ptr(), stream)
            found.append(probe.out[: num_leaves(size)].cpu().numpy().tobytes())
        for count in range(2, FEW_TENSORS + 1):
            pieces = probe.SLICES[1 : 1 + count]
            counts = [num_leaves(size) for _, size in pieces]
            addresses = [probe.data.data_ptr() + offset for offset, _ in pieces]
            self.hash_few(addresses, [size for _, size in pieces], counts, probe.out.data_ptr(), stream)
            found.append(probe.out[: sum(counts)].cpu().numpy().tobytes())
        few = [b"".join(probe.expected[1 : 1 + count]) for count in range(2, FEW_TENSORS + 1)]
        if found != [b"".join(probe.expected), *probe.expected, *few]:
            raise DigestError(
                "the digest kernel gives other leaf digests on this device than xxhash on the CPU; expected the same "
                "bits. Digests are taken on the CPU instead; please report the device and the version of triton"
            )


class _Probe:
    """Slices of a few leaves, at aligned and other addresses, and what the CPU makes of them."""

    SLICES = ((0, 2 * LEAF_BYTES + 1), (16, LEAF_BYTES), (8, LEAF_BYTES), (3, LEAF_BYTES + 1029), (1, 1))

    def __init__(self, device: torch.device) -> None:
        data = np.random.default_rng(0).integers(0, 256, 3 * LEAF_BYTES, dtype=np.uint8)
        slices = [data[offset : offset + size] for offset, size in self.SLICES]
        self.expected = [digest_leaves(piece) for piece in slices]
        self.data = torch.from_numpy(data).to(device)
        self.num_tensors = len(slices)
        counts = [num_leaves(piece.size) for piece in slices]
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        addresses = [self.data.data_ptr() + offset for offset, _ in self.SLICES]
        sizes = [size for _, size in self.SLICES]
        self.table = torch.tensor([addresses, sizes, firsts], dtype=torch.int64, device=device)
        self.out = torch.zeros(sum(counts), 16, dtype=torch.uint8, device=device)
