"""The kernels, compiled once for one device, and launched without what Triton does at every call.

A launch through `kernel[grid](...)` binds and specialises its arguments anew, about 16 us on the host.
Here each kernel is compiled at the start, from arguments that nothing is specialised on, and the compiled
form is launched, with addresses as plain integers.

Importing this module needs triton; whoever wants the kernels imports it late.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl

from bitcheck.digest import LEAF_BYTES, digest_leaves, num_leaves
from bitcheck.errors import DigestError
from bitcheck.hooks.kernels.transpose import transpose_kernel
from bitcheck.hooks.kernels.xxh3 import SECRET_WORDS, hash_one_kernel, hash_table_kernel

BLOCKS_A_LOAD = 4
"""KiB that a program asks for at once (1, 2, 4, 8 or 16)."""

_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_TILE = {1: 128, 2: 64, 4: 64, 8: 32}
"""Rows and columns of a tile to transpose, by the size of an element."""


class LeafKernels:
    """Launches the digest's kernels on one device, on any stream of it.

    The device has to be the current one whenever a method is called. Raises DigestError where the
    compiled kernels do not give the digest on this device.
    """

    def __init__(self, device: torch.device, blocks_a_load: int = BLOCKS_A_LOAD) -> None:
        self._blocks = blocks_a_load
        self._secret = torch.tensor(SECRET_WORDS, dtype=torch.int64, device=device)
        self._secret_address = self._secret.data_ptr()
        self._transposes: dict[int, Any] = {}
        probe = _Probe(device)
        options = {"BLOCKS_A_LOAD": blocks_a_load, "num_warps": 1}
        self._one = hash_one_kernel[(1,)](
            probe.data.data_ptr(), LEAF_BYTES, probe.out.data_ptr(), self._secret, **options
        )
        self._table = hash_table_kernel[(1,)](
            probe.table, probe.num_tensors, probe.out.data_ptr(), self._secret, **options
        )
        self._prove(probe)

    def hash_one(self, address: int, num_bytes: int, out_address: int, stream: int) -> None:
        """Write the leaf digests, [L, 16], of the `num_bytes` (> 0) at `address` to `out_address`."""
        grid = (num_leaves(num_bytes), 1, 1)
        self._one[grid](address, num_bytes, out_address, self._secret_address, self._blocks, stream=stream)

    def hash_table(self, table_address: int, num_tensors: int, leaves: int, out_address: int, stream: int) -> None:
        """Write the leaf digests of all tensors in a table (int64 [3, T], `leaves` in all) to `out_address`."""
        self._table[(leaves, 1, 1)](
            table_address, num_tensors, out_address, self._secret_address, self._blocks, stream=stream
        )

    def transpose(
        self,
        address: int,
        itemsize: int,
        shape: tuple[int, int, int],
        strides: tuple[int, int],
        out_address: int,
        stream: int,
    ) -> None:
        """Copy elements [B, R, C] with strides (b, 1, c), `strides` being (b, c), to row-major order."""
        batches, rows, columns = shape
        tile = _TILE[itemsize]
        grid = (-(-rows // tile) * -(-columns // tile), batches, 1)
        arguments = (address, rows, columns, *strides, out_address)
        kernel = self._transposes.get(itemsize)
        if kernel is None:
            self._transposes[itemsize] = transpose_kernel[grid](
                *arguments, WORD=_WORDS[itemsize], BLOCK_R=tile, BLOCK_C=tile, num_warps=4
            )
        else:
            kernel[grid](*arguments, _WORDS[itemsize], tile, tile, stream=stream)

    def _prove(self, probe: _Probe) -> None:
        """Compare with the CPU's digest: a kernel that miscomputes here must never be used."""
        stream = torch.cuda.current_stream().cuda_stream
        self.hash_table(probe.table.data_ptr(), probe.num_tensors, probe.out.shape[0], probe.out.data_ptr(), stream)
        found = [probe.out.cpu().numpy().tobytes()]
        for offset, size in probe.SLICES:
            self.hash_one(probe.data.data_ptr() + offset, size, probe.out.data_ptr(), stream)
            found.append(probe.out[: num_leaves(size)].cpu().numpy().tobytes())
        if found != [b"".join(probe.expected), *probe.expected]:
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
