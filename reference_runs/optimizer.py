"""AdamW (Loshchilov and Hutter 2019) on FP32 master weights with BF16 moments (V3 report, section 3.3.3).

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

`state[parameter]` holds `master` (float32, the truth), `exp_avg` and `exp_avg_sq` (bfloat16) and `step`
(int64, 0-d); all of it exists from the start. The arithmetic is FP32; moments are rounded when they are
put away, and the parameter is the rounded master. Elementwise throughout: no sum, hence no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitcheck.reference_runs.device import gpu_forms

PIECE = 1 << 16
"""Elements worked on at a time, so that the temporaries stay in the cache."""


class AdamW(torch.optim.Optimizer):
    """AdamW whose state holds the FP32 masters of (usually BF16) parameters."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "master": parameter.detach().float().clone(),
                    "exp_avg": torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False),
                    "step": torch.zeros((), dtype=torch.int64),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure` returned, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if (gpu := gpu_forms(parameter)) is not None:
                    gpu.update(parameter, self.state[parameter], group)
                else:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        state["step"] += 1
        count = int(state["step"])
        (beta1, beta2), lr = group["betas"], group["lr"]
        step_size = lr / (1 - beta1**count)
        second_correction = (1 - beta2**count) ** 0.5
        tensors = (state["master"], state["exp_avg"], state["exp_avg_sq"], parameter.grad)
        pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)
        for master, exp_avg, exp_avg_sq, grad in pieces:
            first = exp_avg.float().lerp_(grad, 1 - beta1)
            second = exp_avg_sq.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            exp_avg.copy_(first)
            exp_avg_sq.copy_(second)
            master.mul_(1 - lr * group["weight_decay"])
            master.addcdiv_(first, second.sqrt_().div_(second_correction).add_(group["eps"]), value=-step_size)
        parameter.copy_(state["master"])

    def derive_parameters(self) -> None:
        """Make every parameter anew from its master, by the conversion that a step uses."""
        with torch.no_grad():
            for parameter, state in self.state.items():
                parameter.copy_(state["master"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: PyTorch's loader casts state to the parameter's dtype, which would round the masters."""
        raise NotImplementedError("load a checkpoint with bitcheck.reference_runs.checkpoint instead")


def make_optimizer(model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamW:
    """Return AdamW over the model's parameters: matrices decay, vectors (norms, per-head numbers) do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


@torch.no_grad()
def unscale_and_clip(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    loss_scale: float,
    total_norm: Callable[[Tensor], Tensor] = torch.linalg.vector_norm,
) -> float | Tensor:
    """Divide gradients by `loss_scale`, scale them to a global norm of at most `max_norm`; return the norm.

    The norm is of the unscaled gradients before clipping. Deterministic: one norm a tensor, put together
    by `total_norm` in the order of `parameters`; one multiplication an element. On a GPU the norm is a tensor
    there, float32 and 0-d: who wants the number waits for it.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if (gpu := gpu_forms(grads[0])) is not None:
        on_device: Tensor = gpu.unscale_and_clip(grads, max_norm, loss_scale, total_norm)
        return on_device
    norm = float(total_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))) / loss_scale
    factor = min(1.0, max_norm / (norm + 1e-6)) / loss_scale
    for grad in grads:
        grad.mul_(factor)
    return norm


def masters(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return every parameter's FP32 master by the parameter's name."""
    return {name: optimizer.state[parameter]["master"] for name, parameter in model.named_parameters()}
