"""Calls on tensors of the CPU that come again, by the addresses of their memory.

A NumPy array over each tensor would take as long as the call. What is asked here is the replay of
`numfuse.operations`, which has the call as one of NumPy's arrays recorded it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, empty_like

from numfuse.activations import table
from numfuse.adapters.torch.tensors import dtypes
from numfuse.backends import ACTIVE, DEFAULT, LOADED
from numfuse.operations import Operation
from numfuse.runtime.fingerprint import form_of
from numfuse.runtime.replay import Replay
from numfuse.runtime.strided import ghost

#: An object behind whose header stands the address of its memory, as behind an array's.
place = ctypes.c_char.from_address


@cache
def reads_places() -> bool:
    """Whether such an object is what a launch of the CPU takes it for."""
    from numfuse.backends.cpu.launch.entries import HEADER, OBJECTS_CAN_BE_READ

    memory = ctypes.c_char()
    at = ctypes.addressof(memory)
    found = ctypes.c_void_p.from_address(id(probe := place(at)) + HEADER).value
    return OBJECTS_CAN_BE_READ and found == at and probe is not memory


def form_over(x: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array that is as one over a tensor would be, but for its memory."""
    steps = tuple([step * dtype.itemsize for step in x.stride()])
    return as_strided(np.empty((), dtype), x.shape, steps)


def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of a single element that `empty_like` makes one of this shape of."""
    several = prod(shape) > 1  # (else it would keep strides of 0)
    return torch.empty(() if several else shape, dtype=dtype, device="cpu").expand(shape)


def loaded(backend: Any) -> Any:
    """Return the backend of a call on tensors of the CPU; None: nobody has loaded it yet."""
    chosen: Any = ACTIVE.get() if backend is None else backend
    if chosen is None or type(chosen) is str:
        chosen = LOADED.get(DEFAULT if chosen is None else chosen)
    return chosen


class _Known(NamedTuple):
    """A call on tensors of known forms, as `numfuse.operations` knows it."""

    #: The fingerprint there.
    key: tuple[Hashable, ...]
    #: The bits of an address of which one makes a tensor unaligned.
    mask: int
    #: Of each result an array of its form, of a single element; None where there is none.
    results: tuple[Any, ...]


#: By operation, options and forms of tensors.
_KNOWN: Replay[_Known] = Replay(1024, 0)


def run(
    operation: Operation,
    operands: Sequence[Any],
    activation: Any,
    flags: tuple[bool | str, ...],
    needs: Any,
    backend: Any,
    flipped: tuple[int, ...],
) -> Any:
    """Return the result of a call that was recorded, or None.

    `flipped` are the places of matrices that are given transposed, as their gradients are returned.
    """
    act: Any = table.TABLE.get(activation) if type(activation) is str else activation
    chosen = loaded(backend)
    form: list[Any] = [operation, getattr(act, "serial", None), flags, needs, flipped, chosen]
    places: list[Any] = []
    bits = 0
    for x in operands:
        if x is None:
            form.append(None)
            places.append(None)
        else:
            at = x.data_ptr()
            if not at or x.is_neg():  # its memory has not its values
                return None
            bits |= at
            places.append(place(at))
            form += x.shape, x.stride(), x.dtype
    asked = tuple(form)
    known = _KNOWN.find(asked)
    if known is None:
        known = _read(operation, operands, asked)
        if known is None:
            return None
    replay = chosen.replay
    found = replay.find(known.key)
    if found is not None and found.varies is not None:
        found = replay.find((known.key, found.varies()))
    if found is None or found.program.zeroed or found.program.sums or bits & known.mask:
        return None
    made: list[Any] = []
    for one in known.results:
        if one is None:
            made.append(None)
            places.append(None)
        else:
            x = empty_like(one)
            made.append(x)
            places.append(place(x.data_ptr()))
    chosen.launch(found.program, tuple(places))
    return made[0] if found.pack is None else tuple.__new__(found.pack, made)


def _read(operation: Operation, operands: Sequence[Any], asked: tuple[Any, ...]) -> _Known | None:
    """Return what a call is, and keep it; None if it is not of the CPU, or was not recorded."""
    _, serial, flags, needs, flipped, chosen, *_ = asked
    replay = getattr(chosen, "replay", None)
    if type(replay) is not Replay or chosen.name != "cpu" or not reads_places():
        return None
    kinds = dtypes()
    dtype: Any = None
    forms: list[Any] = []  # arrays that are as those of the call would be, but for their memory
    for i, x in enumerate(operands):
        if x is None:
            forms.append(None)
            continue
        dtype = kinds.get(x.dtype)
        turned = i in flipped
        if not x.numel() or dtype is None or (turned and 1 in x.shape):
            return None
        form = form_over(x, dtype)
        forms.append(form.T if turned else form)
    flips = {place - 1: operands[place] for place in flipped if operation.operands[place] in needs}
    fingerprint: tuple[Hashable, ...] = serial, operation.mark, flags, needs
    if flips:
        count = len(operation.needs)
        forms += [ghost(flips[i].shape, dtype).T if i in flips else None for i in range(count)]
        fingerprint = *fingerprint, form_of(tuple(forms)), count
    else:
        fingerprint = *fingerprint, form_of(tuple(forms))
    found = replay.find(fingerprint)
    if found is not None and found.varies is not None:
        found = replay.find((fingerprint, found.varies()))
    if found is None:
        return None
    results = []
    for i, spec in enumerate(found.made):
        one: Any = None
        if spec is not None:
            shape, dtype = spec
            own = next(theirs for theirs, ours in kinds.items() if ours == dtype)
            one = like(shape[::-1] if i in flips else shape, own)
        results.append(one)
    known = _Known(fingerprint, dtype.itemsize - 1, tuple(results))
    return _KNOWN.keep(asked, known)
