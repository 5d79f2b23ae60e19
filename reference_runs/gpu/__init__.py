"""The GPU's form of every operation of the trainer that has one; `device.gpu_forms` chooses.

    dense       FP8 products of a Linear through cuBLAS (`torch.nn.functional.scaled_mm`); router and head in BF16
    experts     grouped products over experts, SwiGLU, and the gradient of the routing probability
    routing     top-k, the permutation of tokens to experts, dispatch and combine
    mixers      attention (FlashAttention-2 as PyTorch has it), the chunked scan, and what is around them
    rows        RMSNorm and the embedding
    update      clipping and AdamW

Each wraps kernels of `bitcheck.reference_runs.kernels` in an autograd function with the interface of the portable
one beside the module that it is for. Numbers of rows stay on the device: nothing here waits for the GPU. Which
reductions have a free form, and what it is called, is told by the switches; in a deterministic form the order
is that of the kernel, see there.
"""

from bitcheck.reference_runs.gpu.dense import derive, linear, wide_linear
from bitcheck.reference_runs.gpu.experts import down, grouped_linear, weighted_down
from bitcheck.reference_runs.gpu.mixers import attention, conv_silu, gate, scan, split_heads
from bitcheck.reference_runs.gpu.routing import (
    combine,
    dispatch,
    make_plan,
    permute_probabilities,
    scores_of_chosen,
    select_top,
)
from bitcheck.reference_runs.gpu.rows import embedding, rms_norm
from bitcheck.reference_runs.gpu.update import unscale_and_clip, update

__all__ = [
    "attention",
    "combine",
    "conv_silu",
    "derive",
    "dispatch",
    "down",
    "embedding",
    "gate",
    "grouped_linear",
    "linear",
    "make_plan",
    "permute_probabilities",
    "rms_norm",
    "scan",
    "scores_of_chosen",
    "select_top",
    "split_heads",
    "unscale_and_clip",
    "update",
    "weighted_down",
    "wide_linear",
]
