"""The named sources of nondeterminism, and the form that each one takes in a run.

A switch has one or more deterministic forms and one or more that are not reproducible. `--recipe`
sets them all, `--set NAME=FORM` one of them:

    Switches.from_options("deterministic", ["moe.dprob=atomic"])

On a CPU every form that is not reproducible really adds in another order each time: see `arrival`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bitcheck.errors import UsageError


@dataclass(frozen=True, slots=True)
class Switch:
    """One source of nondeterminism; the first of `deterministic` is the default form."""

    name: str
    deterministic: tuple[str, ...]
    fast: str
    """What `--recipe fast` sets."""
    about: str
    free: tuple[str, ...]
    """Forms whose bits are not reproducible."""

    @property
    def forms(self) -> tuple[str, ...]:
        """Every form, the deterministic ones first."""
        return (*self.deterministic, *self.free)


def _switch(name: str, deterministic: tuple[str, ...], free: str, about: str) -> Switch:
    return Switch(name, deterministic, free, about, (free,))


TABLE: Mapping[str, Switch] = MappingProxyType(
    {
        switch.name: switch
        for switch in (
            _switch(
                "moe.dprob",
                ("slots", "serial"),
                "atomic",
                "gradient of the routing probability, in the epilogue of the experts' grouped GEMM",
            ),
            _switch("moe.combine", ("gather",), "atomic", "sum of a token's expert outputs"),
            _switch("moe.wgrad", ("workspace",), "atomic", "split-K parts of the experts' weight gradients"),
            _switch("moe.topk", ("stable",), "unstable", "ties between experts, and the order of the chosen ones"),
            _switch("ssm.backward", ("workspace",), "atomic", "dB, dC, dA, dD and ddt of the chunked scan"),
            _switch("embedding.backward", ("sorted",), "atomic", "gradient rows of tokens that occur more than once"),
            _switch("norm.dweight", ("two-stage",), "atomic", "gradient of the norms' weights"),
            _switch("attention.backward", ("deterministic",), "fast", "gradient of the queries over key blocks"),
            # On a CPU gloo adds in one order for one number of ranks: `native` repeats itself, but only there.
            Switch(
                "comm.reduce",
                ("ordered", "native"),
                "native",
                "sum of gradients over data-parallel ranks; native gives other bits at another number of ranks",
                (),
            ),
            Switch(
                "memory.fill",
                ("off", "on"),
                "off",
                "fill what torch.empty returns with NaN, so that reading it before writing shows",
                (),
            ),
        )
    }
)
"""Every switch by name, in the order in which they are listed to people."""

RECIPES = ("deterministic", "fast")


@dataclass(frozen=True, slots=True)
class Switches:
    """The form of every switch in one run."""

    forms: Mapping[str, str]
    recipe: str = "deterministic"
    """Whose forms they are, but for the ones that were set singly."""

    @classmethod
    def from_options(cls, recipe: str = "deterministic", settings: Iterable[str] = ()) -> Switches:
        """Return the recipe's forms with `settings`, each `NAME=FORM`, put over them.

        Raises UsageError for a recipe, a name or a form that there is not.
        """
        if recipe not in RECIPES:
            raise UsageError(f"no recipe is called {recipe!r}; there are {' and '.join(RECIPES)}")
        forms = {s.name: s.deterministic[0] if recipe == "deterministic" else s.fast for s in TABLE.values()}
        for setting in settings:
            name, equals, form = setting.partition("=")
            if name not in TABLE:
                raise UsageError(f"--set {setting}: no switch is called {name!r}; there are {', '.join(TABLE)}")
            if not equals or form not in TABLE[name].forms:
                raise UsageError(f"--set {setting}: {name} takes {' or '.join(TABLE[name].forms)}")
            forms[name] = form
        return cls(MappingProxyType(forms), recipe)

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross from one process to another, which the read-only mapping would not."""
        return Switches.from_options, (self.recipe, [f"{name}={form}" for name, form in self.forms.items()])

    def __getitem__(self, name: str) -> str:
        return self.forms[name]

    def is_fixed(self, name: str) -> bool:
        """Tell whether the form that `name` has is a deterministic one."""
        return self.forms[name] in TABLE[name].deterministic

    @property
    def free(self) -> list[str]:
        """Names of the switches whose form is not reproducible."""
        return [name for name in self.forms if not self.is_fixed(name)]
