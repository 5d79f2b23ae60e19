"""What follows the backward pass: the norm of all gradients, clipping, and AdamW. Nothing waits for the GPU.

One launch a parameter for AdamW, one multi-tensor operation each for norms and scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.kernels.adamw import adamw_step


def update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Do one AdamW update of `parameter`, whose `state` holds `master`, the moments, and the count `step`."""
    assert parameter.grad is not None
    state["step"] += 1  # on the CPU: reading it waits for nothing
    adamw_step(
        state["master"],
        state["exp_avg"],
        state["exp_avg_sq"],
        parameter.grad,
        parameter.detach(),
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        count=int(state["step"]),
    )


def unscale_and_clip(
    grads: list[Tensor], max_norm: float, loss_scale: float, total_norm: Callable[[Tensor], Tensor]
) -> Tensor:
    """Do what `optimizer.unscale_and_clip` does, in FP32 on the device; return the norm, float32 0-d."""
    norms = torch.stack(torch._foreach_norm(grads))
    norm = total_norm(norms) / loss_scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / loss_scale
    torch._foreach_mul_(grads, factor)
    return norm
