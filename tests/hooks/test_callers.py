"""Whose code runs around the recorder's."""

from __future__ import annotations

import weakref
from typing import Any

from bitcheck.hooks.callers import purpose_of_collective


def test_the_programs_code_is_not_kept() -> None:
    names: dict[str, Any] = {"purpose": purpose_of_collective}
    exec("def ask():\n    return purpose()", names)
    assert names["ask"]() is None
    code = weakref.ref(names["ask"].__code__)
    names.clear()
    assert code() is None
