"""Every exception bitcheck raises, and the exit status that each becomes on the command line.

    BitcheckError                 exit 2; the message is for a person: what was found, what was
    |                             expected, what to do
    |-- RunError                  a run cannot be read, or is not what it should be
    |   |-- NotARun               no run there: missing, another program's files, a text file
    |   |-- BrokenRun             cut, edited, or inconsistent with its own roots and chain
    |   |   `-- DamagedStep       the file can be read, and a step in it does not give its root
    |   `-- FutureRun             written by a later version of bitcheck
    |-- UnreadableFile          a file of tensors is damaged, or holds more than tensors
    |-- RecordingError            a run cannot be written: folder in use, disk full, folder removed
    |-- DigestError               a tensor has no bytes to digest (meta, uninitialised)
    |-- Incomparable              two runs share nothing that can be compared
    |-- UsageError                the command line or a call asks for something that makes no sense
    `-- ProgramFailed             a program that bitcheck ran for a verdict ended badly

A divergence is a result, not an error: it has no exception.
"""

from __future__ import annotations

from typing import Any

EXIT_IDENTICAL = 0
"""Identical, or the check passed (as diff(1))."""
EXIT_DIFFERENT = 1
"""The runs differ, or the check failed (as diff(1))."""
EXIT_TROUBLE = 2
"""No verdict: usage, unreadable or incomparable runs, a failed program (as diff(1))."""


class BitcheckError(Exception):
    """Something stands between the user and a verdict; `str(error)` is one clear message."""


class RunError(BitcheckError):
    """A run could not be read."""


class NotARun(RunError):
    """The path holds no run: it is missing, empty, or was written by something else."""


class BrokenRun(RunError):
    """The run was cut, edited or damaged: a root, the chain or the file format does not hold."""


class DamagedStep(BrokenRun):
    """The file can be read, but one step's digests, edges, values or row are not as they were written.

    `rank` and `step` say which; `found` what is wrong with it, to follow it in a sentence. `step` is None where its own
    number is what was changed.
    """

    def __init__(self, message: str, rank: int, step: int | None, found: str) -> None:
        super().__init__(message)
        self.rank, self.step, self.found = rank, step, found

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross from one process to another whole."""
        return DamagedStep, (str(self), self.rank, self.step, self.found)


class FutureRun(RunError):
    """The run was written in a schema or digest version that this bitcheck does not know."""


class UnreadableFile(BitcheckError):
    """A .safetensors or .pt file could not be read: damaged, of another kind, or with code in it."""


class RecordingError(BitcheckError):
    """The run could not be written: its folder is in use, gone, or on a full disk."""


class DigestError(BitcheckError):
    """A tensor has no bytes of its own to digest: on the meta device, or not yet initialised."""


class Incomparable(BitcheckError):
    """Two runs have nothing in common that can be compared."""


class UsageError(BitcheckError):
    """An option, or an argument of a call, that makes no sense."""


class ProgramFailed(BitcheckError):
    """A program that bitcheck had to run for its verdict ended with an error."""
