"""How a site is written for people: with its outermost module's name only where there are several.

Place in the flow: events -> *naming* -> causes.
"""

from __future__ import annotations

import re

from bitcheck.events import Phase, Site, qualified_name
from bitcheck.views import StepView

MODULE_PHASES = (Phase.BATCH, Phase.FORWARD, Phase.RECOMPUTE, Phase.PARAM, Phase.BUFFER, Phase.BACKWARD, Phase.GRAD)
_NO_MODULE = re.compile(r"params\.\d+\.\d+")
"""Path of a parameter that no module owns: its root is an optimizer's label."""


class Naming:
    """Learns the outermost modules of two runs from their steps, and writes sites accordingly."""

    def __init__(self) -> None:
        self._roots: set[str] = set()
        self._seen: dict[int, object] = {}

    def learn(self, step: StepView) -> None:
        """Take note of the outermost modules in a step."""
        sites = step.sites
        if id(sites) in self._seen:
            return
        self._seen[id(sites)] = sites  # held, so that its id is not given away
        self._roots.update(
            site.root
            for site in sites
            if site.root and site.phase in MODULE_PHASES and not _NO_MODULE.fullmatch(site.path)
        )

    def site(self, site: Site) -> str:
        """Return a site as it is written in an answer."""
        return site.text(self._with_root(site.root))

    def module(self, root: str, path: str) -> str:
        """Return a module's name."""
        return qualified_name(root, path, self._with_root(root))

    def _with_root(self, root: str) -> bool:
        return len(self._roots) > 1 or root not in self._roots
