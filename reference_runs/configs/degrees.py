"""How many ranks share a run, and in which way; counted as torchtitan counts.

    world size = pp x dp        a rank is one process of torchrun
    dp    data parallel: micro-batch m of a step is worked on by rank m mod dp
    ep    expert parallel: each `ep` neighbouring data-parallel ranks share the routed experts among them
    pp    pipeline parallel: each rank has two of the 2 pp stages, the first and the last on rank 0 (V)

Ranks lie in the order pp, dp / ep, ep: ranks that exchange tokens are neighbours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from bitcheck.errors import UsageError
from bitcheck.reference_runs.configs.shapes import Config


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degree of each kind of parallelism; 1 is none."""

    dp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        """Processes that a run of these degrees has."""
        return self.pp * self.dp

    @property
    def text(self) -> str:
        """The degrees as they are told to people: `dp 4, ep 2, pp 1`."""
        return f"dp {self.dp}, ep {self.ep}, pp {self.pp}"

    @classmethod
    def from_options(cls, dp: int | None, ep: int, pp: int, world_size: int, config: Config) -> Degrees:
        """Return the degrees of a run on `world_size` processes; `dp` None takes the ranks that are left.

        Raises UsageError where they do not fit the processes or the configuration.
        """
        if dp is None:
            dp = max(1, world_size // pp)
        degrees = cls(dp, ep, pp)
        if degrees.world_size != world_size:
            raise UsageError(
                f"--dp {dp} --pp {pp} is for {dp * pp} processes and this run has {world_size}: start it with "
                f"torchrun --nproc-per-node {dp * pp} -m bitcheck reference train ..."
            )
        if dp % ep or config.model.num_experts % ep:
            raise UsageError(
                f"--ep {ep}: data-parallel ranks share the experts, so it divides --dp {dp}"
                f" and the {config.model.num_experts} experts of {config.name}"
            )
        micro = config.data.micro_batches
        if micro % dp:
            raise UsageError(
                f"--dp {dp}: {micro} micro-batches a step cannot be shared by {dp} ranks;"
                f" give --micro-batches a multiple of {dp}, the same in every run that is to have the same bits"
            )
        if pp > 1 and micro // dp < 2 * pp:
            raise UsageError(
                f"--pp {pp}: DualPipeV has {2 * pp} stages and wants as many micro-batches a rank, here {micro // dp};"
                f" give --micro-batches {2 * pp * dp} or more"
            )
        if pp > 1 and len(config.model.mixers) + 2 < 2 * pp:
            raise UsageError(
                f"--pp {pp}: {2 * pp} stages are more than the {len(config.model.mixers)} layers of {config.name},"
                " the embedding and the head"
            )
        return degrees


def torchrun_world_size() -> int:
    """Return how many processes torchrun started; 1 where it started none."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def torchrun_rank() -> int:
    """Return this process's number among those that torchrun started; 0 where it started none."""
    return int(os.environ.get("RANK", "0"))
