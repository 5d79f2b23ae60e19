"""Faults that can be planned in a run of the reference trainer, and what `bitcheck diff` has to say of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPECTED = {
    "masters": ("restore", ":master"),
    "moments": ("restore", ":exp_avg_sq"),
    "step": ("restore", ":step"),
    "router_bias": ("restore", "moe.router.bias"),
    "ema": ("restore", "extra/ema"),
    "rng.torch": ("rng", "rng/torch.cpu"),
    "rng.python": ("rng", "rng/python"),
    "rng.numpy": ("rng", "rng/numpy"),
    "data": ("data", "batch/Model"),
}
"""What is left out -> the cause that `diff` has to give, and a part of the site of one of the origins."""

SWITCHED = {
    "moe.dprob=atomic": ("backward", "moe.experts.down:grad_in.1"),
    "moe.combine=atomic": ("forward", "moe.combine:out"),
    "moe.wgrad=atomic": ("backward", "moe.experts."),
    "moe.topk=unstable": ("forward", "moe.router.topk:out"),
    "embedding.backward=atomic": ("backward", "embedding.weight:grad"),
    "norm.dweight=atomic": ("backward", "norm.weight:grad"),
    "attention.backward=fast": ("backward", "attn.core:grad_in.0"),
}
"""A switch's free form -> the cause, and a part of the site of the first origin."""


@dataclass(frozen=True)
class Fault:
    """A fault, and what `diff` has to say of it."""

    options: tuple[str, str]
    """Of `bitcheck reference train`."""
    cause: str
    part: str
    """Of the site of an origin."""

    @property
    def name(self) -> str:
        """A word for it that can be part of a file's name."""
        return f"{self.options[0].strip('-')}-{self.options[1].replace('=', '-')}"

    def is_found(self, answer: dict[str, Any]) -> bool:
        """Whether an answer of `diff` names this fault."""
        # What was not restored need not come first; what is switched has to.
        is_left_out = self.options[0] == "--leave-out"
        origins = answer.get("origins", []) if is_left_out else [answer.get("first") or {"site": ""}]
        return answer.get("cause") == self.cause and any(self.part in origin["site"] for origin in origins)


FAULTS = (
    *(Fault(("--leave-out", piece), *expected) for piece, expected in EXPECTED.items()),
    *(Fault(("--set", setting), *expected) for setting, expected in SWITCHED.items()),
)
