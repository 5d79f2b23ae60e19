"""Trainers of several recipes in one process, one step each in turn: what `bitcheck tax` measures.

In turn, because a machine drifts: whatever slows one trainer's step down slows its neighbours' too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from bitcheck.reference_runs.configs import Config, get_config
from bitcheck.reference_runs.data import Text, read_text
from bitcheck.reference_runs.switches import TABLE, Switches
from bitcheck.reference_runs.train import Options, Trainer, deterministic_algorithms
from bitcheck.statistics import DEFAULT_CONFIDENCE
from bitcheck.tax import Tax, tax_variants


def tax_recipes(
    config: str,
    *,
    steps: int = 12,
    warmup: int = 3,
    each_switch: bool = True,
    confidence: float = DEFAULT_CONFIDENCE,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Tax:
    """Measure the reference trainer's deterministic recipe over the fast one, and each switch alone.

    A switch alone is the fast recipe with this one switch in its deterministic form: what it adds.
    Raises UsageError for a configuration that there is not.
    """
    chosen, text = get_config(config), read_text(None)
    recipes = {"fast": Switches.from_options("fast"), "deterministic": Switches.from_options("deterministic")}
    if each_switch:
        for switch in TABLE.values():
            if switch.free:
                form = switch.deterministic[0]
                recipes[f"{switch.name}={form}"] = Switches.from_options("fast", [f"{switch.name}={form}"])
    trainers = {name: _ReferenceStepper(chosen, text, switches, steps + warmup) for name, switches in recipes.items()}
    try:
        return tax_variants(
            "fast",
            dict(trainers),
            steps=steps,
            warmup=warmup,
            confidence=confidence,
            notes=(
                "On a CPU the fast forms only simulate the free order of a GPU's atomics, at a cost of their own: what "
                "the deterministic forms cost on a GPU has to be measured there.",
            ),
            tell=tell,
        )
    finally:
        for trainer in trainers.values():
            trainer.close()


class _ReferenceStepper:
    """One trainer of the reference model, under its own switches only while it steps."""

    def __init__(self, config: Config, text: Text, switches: Switches, num_steps: int) -> None:
        self._switched: Callable[[], AbstractContextManager[None]] = lambda: deterministic_algorithms(switches)
        with self._switched():
            self._trainer = Trainer(config, text, Options(steps=num_steps, switches=switches))

    def __call__(self) -> float:
        """Take one step and return its seconds; the average's thread is done before the next trainer's turn."""
        with self._switched():
            seconds = self._trainer.train_step().seconds
        self._trainer.ema.wait()
        return seconds

    def close(self) -> None:
        """End the trainer's threads."""
        self._trainer.ema.close()
