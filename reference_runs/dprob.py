"""Gradient of a routing probability: the reduction in the epilogue of the experts' dgrad GEMM.

With a[r] = p[r] * act(h[r]) entering the second GEMM of an expert and da flowing back,

    dp[r] = sum over n of da[r, n] * act(h)[r, n]

On a GPU n spans several tiles of the GEMM's N dimension, each worked on by a program of its own; how
their sums meet is the switch `moe.dprob`:

    slots    a private slot for each (row, tile), one writer each; slots summed in index order
    serial   tiles take turns at dp[r], in index order: the same additions, waiting for one another
    atomic   tiles add into dp[r] as they arrive

Legend: R rows (a token and one of its experts), F expert width, J tiles of F.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bitcheck.reference_runs.arrival import arrival_ranks

TILE_F = 32
"""Elements of F in a tile; pinned, because another tile size gives other bits."""


def reduce_dprob(da_RF: Tensor, act_RF: Tensor, form: str) -> Tensor:
    """Return dp float32 [R] from `da_RF` and `act_RF`, float32; `form` as above.

    Deterministic in `slots` and `serial`: a slot's own sum is one reduction over contiguous elements,
    and slots are added 0, 1, 2, ... by the loop.
    """
    products_RF = da_RF * act_RF
    padded = F.pad(products_RF, (0, -products_RF.shape[1] % TILE_F))
    slots_RJ = padded.view(len(padded), padded.shape[1] // TILE_F, TILE_F).sum(-1)
    if form == "atomic":
        # Rows race independently of one another, so each has an order of its own.
        slots_RJ = slots_RJ.gather(1, arrival_ranks(*slots_RJ.shape).to(slots_RJ.device))
    dp_R = slots_RJ.new_zeros(slots_RJ.shape[0])
    for tile in range(slots_RJ.shape[1]):
        dp_R += slots_RJ[:, tile]
    return dp_R
