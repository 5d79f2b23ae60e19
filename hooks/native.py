"""The compiled half of the recorder: `csrc/`, in C. `native` is None where it was not compiled.

It does what the Python beside it does, bit for bit, in less of the time; the Python runs where there is no C
compiler, takes over whatever is not plain, and is what the tests compare with.
"""

from __future__ import annotations

import logging

INTERFACE = 6
"""One more with every change of what the two halves expect of each other: a checkout may hold an older one's build."""

try:
    from bitcheck.hooks import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

if native is not None and getattr(native, "INTERFACE", 0) != INTERFACE:
    logging.getLogger("bitcheck").warning(
        "bitcheck/hooks/_native was compiled from another version of the source, so Python does its work, slower: "
        "build it again by `make setup` or `pip install`"
    )
    native = None  # type: ignore[assignment]

__all__ = ["native"]
