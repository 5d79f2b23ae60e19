"""AdamW on FP32 masters with BF16 moments: one pass over memory a parameter.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd) - step_size m / (sqrt(v) / correction + eps)

Elementwise, arithmetic in float32: every element has one writer and no sum is formed, so neither the
block size nor anything else shows in the bits. Moments are rounded to BF16 when they are put away, and
the parameter is the rounded master.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _adamw_kernel(
    master_ptr, first_ptr, second_ptr, grad_ptr, parameter_ptr, size,
    weight_1, beta2, weight_2, decay, step_size, correction, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    first = tl.load(first_ptr + at, mask=mask, other=0.0).to(tl.float32)
    first += weight_1 * (grad - first)
    second = tl.load(second_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = second * beta2 + weight_2 * grad * grad
    master = tl.load(master_ptr + at, mask=mask, other=0.0) * decay
    master -= step_size * tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), correction + tl.zeros_like(second)) + eps)
    tl.store(first_ptr + at, first.to(tl.bfloat16), mask=mask)
    tl.store(second_ptr + at, second.to(tl.bfloat16), mask=mask)
    tl.store(master_ptr + at, master, mask=mask)
    tl.store(parameter_ptr + at, master.to(parameter_ptr.dtype.element_ty), mask=mask)


def adamw_step(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    parameter: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    count: int,
) -> None:
    """Update in place, as the `count`-th update: float32 `master`, bfloat16 moments, and `parameter`.

    All have one shape and are contiguous; `grad` is float32. Raises ValueError for other layouts.
    """
    tensors = (master, exp_avg, exp_avg_sq, grad, parameter)
    if any(not tensor.is_contiguous() or tensor.shape != master.shape for tensor in tensors):
        raise ValueError(f"expected contiguous tensors of shape {tuple(master.shape)}")
    if grad.dtype != torch.float32:
        raise ValueError(f"grad: {grad.dtype}; expected float32")
    beta1, beta2 = betas
    _adamw_kernel[(triton.cdiv(master.numel(), BLOCK),)](
        master, exp_avg, exp_avg_sq, grad, parameter, master.numel(),
        1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay, lr / (1 - beta1**count), (1 - beta2**count) ** 0.5, eps,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
