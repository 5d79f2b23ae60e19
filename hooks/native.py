"""The compiled half of the recorder: `csrc/`, in C. `native` is None where it was not compiled.

It does what the Python beside it does, bit for bit, in less of the time; the Python runs where there is no C
compiler, takes over whatever is not plain, and is what the tests compare with.
"""

from __future__ import annotations

try:
    from bitcheck.hooks import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]
