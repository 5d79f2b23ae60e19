"""Memory that was handed out empty and written in part: which of its bytes mean anything, at level `op`.

    known = Shadow(storage_bytes, 0, 0)      nobody wrote any of it
    known.note(rows, None)                   rows were written
    known.chance(buffer)                     uint8 [*shape]: CHANCE where it holds what memory held by chance

What an operation makes of such memory is found by executing it again, on copies, with several fillings in the place
of what is chance: an element that is the same for all of them does not hang on chance, one that is not the same does,
and is chance from then on. So a masked write, a padded copy and a grouped product over empty slots are all followed
to the element, with nothing known of the operators but what they do. An element that also differs between two
executions on one filling is a race, and no chance. What is known is kept in numpy on the host, and the executions are
seen by no mode and by autograd not at all: no tensor of the program's is changed. What draws random numbers is not
executed again, since its generator may be another thread's too; nor is what is given many bytes (`MOST_BYTES`).

Nothing that is left out is lost: `StepBuilder` keeps the digest of all of it, and puts that in its place as soon as
what hangs on chance reaches a loss, a gradient, a parameter or other state, or a number that the program reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bitcheck.hooks.capture import CallMemory
from bitcheck.hooks.modules import named_tensors
from bitcheck.hooks.op_schema import OpFacts, named_arguments
from bitcheck.hooks.replay import find_operator
from bitcheck.hooks.tensors import byte_span, tensor_bytes, unseen

Mask = npt.NDArray[np.uint8]
"""[*shape] of a tensor: CHANCE, SIGN, or 0 for the elements that do not hang on chance."""
CHANCE, SIGN = 1, 2
"""What an element may be besides: anything; or a zero, of which only the sign hangs on chance. A gradient of zero times
the derivative at a chance element is one, and added to anything else it is nothing."""
_KNOWN = 3
MOST_BYTES = 16 * 1024 * 1024
"""That an operation may be given, and may give, to be executed again: several copies of each are made."""
MOST_STORAGE_BYTES = 64 * 1024 * 1024
"""Of a storage that is followed to the byte."""
_MOST_DIMENSIONS = 31
"""Of an array of numpy's, of which one is for an element's bytes."""
_PIECE_BYTES = 65_536
_Truths = npt.NDArray[np.bool_]

_TOP_BYTES = ((0x3E, 0x3E), (0xC0, 0xC0), (0x4B, 0xCB))
"""For each filling, what an element's byte of sign and exponent may be: a fraction; about -4; large, of either sign.
One of them mostly shows whether a maximum, a ReLU, a softmax, a square or an arcsine hangs on the element. The bytes
below vary from one element to the next, as a row of equal numbers is nothing to a LayerNorm. All are finite in every
floating dtype, and so are their cubes and products, which a LayerNorm's backward takes: a NaN times the zeros that
empty slots get would make chance of a weight's whole gradient."""
_NAN = len(_TOP_BYTES)
"""The filling that shows which zeros are made from chance at all: the sign of those, no finite filling may show."""


class Shadow:
    """Which bytes of a storage on the CPU mean something."""

    __slots__ = ("_bytes", "_num_complete")

    def __init__(self, num_bytes: int, begin: int, end: int) -> None:
        """Of `num_bytes`, those from `begin` up to `end` do."""
        self._bytes = np.zeros(num_bytes, np.uint8)
        """_KNOWN, SIGN, or 0 for what is chance, so that of a large storage only what is written takes memory."""
        self._bytes[begin:end] = _KNOWN
        self._num_complete = 0
        """All before this one mean something, so that many small writes do not look at all of a large storage each."""

    @property
    def is_complete(self) -> bool:
        """All of them do."""
        while self._num_complete < len(self._bytes):
            piece = self._bytes[self._num_complete : self._num_complete + _PIECE_BYTES] != _KNOWN
            if piece.any():
                self._num_complete += int(piece.argmax())
                return False
            self._num_complete += len(piece)
        return True

    def fits(self, tensor: torch.Tensor) -> bool:
        """Say whether the tensor's storage still has the size that it had."""
        return tensor.untyped_storage().nbytes() == len(self._bytes)

    def note(self, tensor: torch.Tensor, chance: Mask | None) -> None:
        """A tensor was written: all of it means something but the elements that are chance."""
        states = _KNOWN if chance is None else np.choose(chance, (_KNOWN, 0, SIGN))[..., None]
        _window(self._bytes, tensor)[...] = states
        if chance is not None:
            self._num_complete = 0

    def chance(self, tensor: torch.Tensor) -> Mask | None:
        """Return which elements of a tensor are chance, None where none is."""
        if not tensor.numel():
            return None
        states = _window(self._bytes, tensor).min(-1)
        chance = np.asarray(np.choose(states, (CHANCE, CHANCE, SIGN, 0)), np.uint8)
        return chance if chance.any() else None


def can_follow(tensor: torch.Tensor) -> bool:
    """Say whether what is known of a tensor's storage is to be known to the byte."""
    return (
        tensor.is_cpu and tensor.dim() <= _MOST_DIMENSIONS and tensor.untyped_storage().nbytes() <= MOST_STORAGE_BYTES
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor covers all bytes from its first to its last."""
    begin, end = byte_span(tensor)
    return end - begin == tensor.nbytes


class Rerun:
    """One call of an operator that is given chance, with its inputs as they were before it ran."""

    def __init__(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], chances: Mapping[int, Mask | None]
    ) -> None:
        """`chances`: `id` of a tensor among the arguments -> which of its elements are chance."""
        self._facts, self._args, self._kwargs = facts, args, kwargs
        self._filled = [
            (value, chance)
            for _, value in named_arguments(facts, args, kwargs)
            if isinstance(value, torch.Tensor) and (chance := chances.get(id(value))) is not None
        ]
        self._memory = CallMemory()
        with unseen():
            for value in (*args, *kwargs.values()):
                self._memory.measure(value)
            self._copies = self._memory.copies()
        self._unchanged: set[str] = set()
        self._first: dict[str, torch.Tensor] = {}
        self._silent = self._places_not_written()

    def is_all_from(self, tensor: torch.Tensor, slot: str) -> bool:
        """Say of an argument that was written whether the only chance there was is what it held, and was used."""
        return slot not in self._unchanged and all(value is tensor for value, _ in self._filled)

    def chances(self) -> dict[str, Mask] | None:
        """Return slot -> which elements of a result are chance, where any are; None where that cannot be told."""
        try:
            with unseen():
                return self._chances()
        except Exception:  # noqa: BLE001  an operator that cannot take the fillings: its results count as they are
            return None

    def explains(self, results: Mapping[str, torch.Tensor], chances: Mapping[str, Mask]) -> bool:
        """Say whether the program's own results are those that were found, but for what is chance.

        They are not where memory held what none of the fillings is: a NaN, an infinity, times zero.
        """
        for slot, own in results.items():
            found, chance = self._first.get(slot), chances.get(slot)
            if found is None or found.shape != own.shape or found.dtype != own.dtype or not _is_plain(own):
                continue
            differs = _differs(found, own)
            if (differs if chance is None else differs & (chance == 0)).any():
                return False
        return True

    def _places_not_written(self) -> list[int]:
        """Return which of the storages hold no chance and are not said to be written."""
        said = {value.untyped_storage()._cdata for value, _ in self._filled}
        for name, value in named_arguments(self._facts, self._args, self._kwargs):
            if isinstance(value, torch.Tensor) and name.partition(".")[0] in self._facts.written:
                said.add(value.untyped_storage()._cdata)
        return [place for place, (storage, _, _) in enumerate(self._memory.storages()) if storage not in said]

    def _chances(self) -> dict[str, Mask] | None:
        first, silent = self._execute(0)
        self._first = first
        if not all(map(_is_plain, first.values())) or sum(tensor.nbytes for tensor in first.values()) > MOST_BYTES:
            return None
        results = [first]
        for number in range(1, len(_TOP_BYTES)):
            other, silent_other = self._execute(number)
            if not all(map(torch.equal, silent, silent_other)):
                return None  # chance takes effect in what its schema does not say: a BatchNorm's running mean
            results.append(other)
        found: dict[str, Mask] = {}
        zeros: dict[str, _Truths] = {}
        for slot, one in first.items():
            given = [other[slot] for other in results]
            if any(other.shape != one.shape or other.dtype != one.dtype for other in given):
                return None
            differs = np.logical_or.reduce([_differs(one, other) for other in given[1:]])
            is_zero = np.logical_and.reduce(list(map(_is_zero, given)))
            found[slot] = np.asarray(differs * np.where(is_zero, SIGN, CHANCE), np.uint8)
            if is_zero.any() and (one.is_floating_point() or one.is_complex()):
                zeros[slot] = np.asarray(is_zero)
        if zeros:
            self._find_signs(first, zeros, found)
        if any(map(np.any, found.values())):
            again, _ = self._execute(0)
            for slot, chance in found.items():
                chance[_differs(first[slot], again[slot])] = 0
        return {slot: chance for slot, chance in found.items() if chance.any()}

    def _find_signs(self, first: dict[str, torch.Tensor], zeros: dict[str, _Truths], found: dict[str, Mask]) -> None:
        """Add those zeros that are made from chance."""
        try:
            probe, _ = self._execute(_NAN)
        except Exception:  # noqa: BLE001  it takes no NaN: a decomposition, a distribution
            return
        for slot, is_zero in zeros.items():
            if probe[slot].shape == is_zero.shape:
                found[slot][is_zero & _differs(first[slot], probe[slot])] = SIGN

    def _execute(self, number: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Execute the operator with one of the fillings.

        Return slot -> what it wrote and gave, and the bytes of what it is not said to write.
        """
        copies = [flat.clone() for flat in self._copies]
        for place, (value, chance) in enumerate(self._filled):
            _fill(self._memory.rebuild(value, copies), chance, number, place)
        args = tuple(self._memory.rebuild(value, copies) for value in self._args)
        kwargs = {name: self._memory.rebuild(value, copies) for name, value in self._kwargs.items()}
        written = {
            f"{name}.written": value
            for name, value in named_arguments(self._facts, args, kwargs)
            if isinstance(value, torch.Tensor) and name.partition(".")[0] in self._facts.written
        }
        before = {slot: tensor_bytes(value).copy() for slot, value in written.items()} if number == 0 else {}
        result = find_operator(self._facts.name)(*args, **kwargs)
        self._unchanged.update(
            slot for slot, data in before.items() if np.array_equal(data, tensor_bytes(written[slot]))
        )
        return written | dict(named_tensors(result, "out")), [copies[place] for place in self._silent]


def can_run_again(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call may be executed again on copies: PyTorch's own operator, all plain, small and on the CPU."""
    if facts.draws or not facts.name.startswith("aten."):
        return False
    num_bytes = 0
    for _, value in named_arguments(facts, args, kwargs):
        if isinstance(value, torch.Tensor):
            if not _is_plain(value):
                return False
            begin, end = byte_span(value)
            num_bytes += end - begin
        if isinstance(value, torch.device) and value.type != "cpu":
            return False
    return num_bytes <= MOST_BYTES


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dim() <= _MOST_DIMENSIONS
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _window(memory: npt.NDArray[Any], tensor: torch.Tensor) -> npt.NDArray[Any]:
    """View one value a byte of a storage as a tensor over that storage lies in it, [*shape, itemsize]."""
    size = tensor.itemsize
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return np.ndarray((*tensor.shape, size), memory.dtype, memory, tensor.storage_offset() * size, strides)


def _differs(one: torch.Tensor, other: torch.Tensor) -> _Truths:
    """bool [*shape]: the element's bits differ."""
    words = (tensor_bytes(one) != tensor_bytes(other)).reshape(-1, one.itemsize)
    return np.asarray(words.any(-1).reshape(tuple(one.shape)))


def _word_size(dtype: torch.dtype) -> int:
    """Bytes of a real number."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _is_zero(tensor: torch.Tensor) -> _Truths:
    """bool [*shape]: the element is zero of either sign."""
    words = tensor_bytes(tensor).copy().reshape(-1, _word_size(tensor.dtype))
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        words[:, -1] &= 0x7F
    return np.asarray((words.reshape(-1, tensor.itemsize) == 0).all(-1).reshape(tuple(tensor.shape)))


def _fill(tensor: torch.Tensor, chance: Mask, number: int, place: int) -> None:
    """Write one of the fillings over the elements of a copy that are chance; each tensor of a call gets its own."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    window = _window(memory, tensor)
    for kind in (CHANCE, SIGN):
        elements = chance == kind
        filling = _filling(tensor.dtype, int(elements.sum()), number, place)
        if kind == SIGN and number != _NAN:
            words = filling.reshape(-1, _word_size(tensor.dtype))
            words[:, :-1] = 0
            words[:, -1] &= 0x80
        window[elements] = filling


def _filling(dtype: torch.dtype, count: int, number: int, place: int) -> npt.NDArray[np.uint8]:
    """Return elements that may stand anywhere, uint8 [count, itemsize].

    Whole numbers are 0 or 1, as they may be indices. Of two tensors that are compared one is the larger in the first
    filling and the other in the second.
    """
    size = dtype.itemsize
    if not (dtype.is_floating_point or dtype.is_complex):
        filling = np.zeros((count, size), np.uint8)
        filling[:, 0] = np.random.default_rng((place, number // 2)).integers(0, 2, count) ^ (number & 1)
        return filling
    word = _word_size(dtype)
    if number == _NAN:
        words = np.full((count * size // word, word), 0xFF, np.uint8)
        words[:, -1] = 0x7F
        return words.reshape(count, size)
    words = np.random.default_rng((place, number)).integers(0, 256, (count * size // word, word), np.uint8)
    tops = np.asarray(_TOP_BYTES[number ^ (place & 1) if number < 2 else number], np.uint8)[words[:, 0] & 1]
    words[:, -1] = (tops & 0xF0) | (words[:, 0] & 0x07) if word == 1 else tops
    return words.reshape(count, size)
