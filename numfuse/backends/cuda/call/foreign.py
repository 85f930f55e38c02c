"""Arrays of other libraries as the arguments of a call: what is read of them, and made for them.

A `Kind` is of one library or protocol. The kinds here are numfuse's own and the two protocols; a
library's is added to `LIBRARIES` by its adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends.cuda.call.arrays import DeviceArray
from numfuse.backends.cuda.call.record import RECALLS, Argument
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.driver.libcuda import ordinal_of
from numfuse.backends.cuda.face import CudaBackend
from numfuse.runtime import dlpack
from numfuse.runtime.strided import contiguous
from numfuse.runtime.views import dtype_of

#: Python's numbers, the operands whose values a program is given with its addresses.
NUMBERS = frozenset({int, float})
#: Classes of arguments that stand for themselves in a fingerprint.
PLAIN = frozenset({type(None), bool, int, str, bytes, CudaBackend})


class Kind:
    """How arrays of a kind are read and made.

    The callables among its attributes are not Python's where they can be: they open no frame.
    """

    #: Whether operands must be held until the work is done; then each is read with care.
    holds = True
    #: From an array to what a call depends on, and at last its address and the number of its
    #: device, or None where it has to be read with care; of kinds that hold none.
    parts: Any = None
    #: From what is asked of a call, its operands and an empty list, which takes their addresses:
    #: (call, its program, number of the device) where `keep` was given such operands before, or
    #: Nones; None: this kind has no shorter way than a glance.
    recall: Any = None
    #: What lets `recall` find a call: from what is asked, operands, the call and a device's number.
    keep: Any = None
    #: What lets `recall` find none of the calls that were kept.
    forget: Any = None
    #: From a device's number to the caller's current stream; None: it is the default one.
    stream: Any = None
    #: Whether a graph may be being captured; None: the driver has to be asked.
    capturing: Any = None
    #: From an array that `maker`'s function made to its address.
    address: Any = attrgetter("address")

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        """Return the array, the number of its device, and what keeps it alive (None: x itself)."""
        raise NotImplementedError

    def glance(self, values: list[Any], seen: list[Any], addresses: list[int]) -> int:
        """Add to `seen` all that a call depends on in its arguments, and the addresses of arrays.

        Return the number of the device they are on; -1 if they have to be read with care.
        """
        ordinal = -1
        for x in values:  # (which grows)
            kind = type(x)
            if kind in PLAIN:
                seen.append(x)
            elif isinstance(x, (tuple, list)):  # needs, or out
                seen.append(len(x))
                values += x
            elif (KINDS.get(kind) or kind_of(x)) is self:
                parts = self.parts(x)
                if parts is None:
                    return -1
                at, place = parts[-2:]
                if place != ordinal:
                    if ordinal >= 0:
                        return -1
                    ordinal = place
                seen += parts[:-2]
                seen.append(at & 15)
                addresses.append(at)
            else:
                return -1
        return ordinal

    def maker(self, ordinal: int, shape: tuple[int, ...], dtype: str) -> Callable[[], Any]:
        """Return a function that makes a C-contiguous array of any content at every call."""
        return DeviceArray.maker(device(ordinal), shape, dtype_of(dtype))

    def part(self, made: Any, at: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return a view of what `maker`'s function made, of kinds that hold none.

        It begins `at` an element, and its strides are in elements.
        """
        size = made.dtype.itemsize
        steps = tuple([s * size for s in strides])
        return DeviceArray(made.memory, made.address + at * size, shape, steps, made.dtype)

    def wrap(self, made: Any) -> Any:
        """Return what `maker`'s function made as one of this kind (of those that hold)."""
        return made


class Own(Kind):
    """numfuse's own."""

    holds = False  # their memory knows the streams that used it
    parts = attrgetter("layout", "address", "ordinal")

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        (shape, steps, dtype, writable), at, ordinal = self.parts(x)
        strides = tuple(s // dtype.itemsize for s in steps)
        return Argument(at, shape, strides, dtype.name, writable), ordinal, None


class Interface(Kind):
    """Whatever has ``__cuda_array_interface__`` (version 2 or 3)."""

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        made: dict[str, Any] = x.__cuda_array_interface__
        if made.get("mask") is not None:
            raise TypeError(f"{name} must be a plain array, got one with a mask")
        dtype = np.dtype(made["typestr"])
        at, read_only = made["data"]
        shape = tuple(made["shape"])
        steps = made.get("strides")
        if steps is None:
            strides = contiguous(shape)
        else:
            if any(s % dtype.itemsize for s in steps):
                raise ValueError(
                    f"{name} must have strides of whole elements, got {tuple(steps)} bytes"
                )
            strides = tuple(s // dtype.itemsize for s in steps)
        ordinal = ordinal_of(at) if at else 0
        theirs = made.get("stream")
        if theirs not in (None, 0, 1):
            device(ordinal).follow(0, theirs)
        return Argument(at, shape, strides, dtype.name, not read_only), ordinal, None


class DLPack(Kind):
    """Whatever has ``__dlpack__``."""

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if x.__dlpack_device__()[0] not in dlpack.CUDA_TYPES:
            raise TypeError(f"{name} must be on a CUDA device, got {type(x).__qualname__}")
        held = dlpack.take(name, x, 1)
        read = held.address, held.shape, held.strides, held.dtype, held.writable
        return Argument(*read), held.device[1], held


#: {root of the module that defines a class: its kind}; the bases of a class count.
LIBRARIES: dict[str, type[Kind]] = {}
#: The kinds of the classes that were met.
KINDS: dict[type, Kind] = {}
#: The one object of a kind.
_MADE: dict[type[Kind], Kind] = {}


def kind_of(x: Any) -> Kind | None:
    """Return how arrays like this one are read; None of what is no array of a device."""
    found = KINDS.get(type(x))
    if found is not None or x is None or isinstance(x, (ndarray, np.generic)):
        return found
    roots = (base.__module__.partition(".")[0] for base in type(x).__mro__)
    made: type[Kind] | None = next((LIBRARIES[root] for root in roots if root in LIBRARIES), None)
    if isinstance(x, DeviceArray):
        made = Own
    elif made is None and hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        made = DLPack
    elif made is None and hasattr(x, "__cuda_array_interface__"):
        made = Interface
    if made is None:
        return None
    if made not in _MADE:
        _MADE[made] = made()
        if _MADE[made].forget is not None:
            RECALLS.append(_MADE[made].forget)
    return KINDS.setdefault(type(x), _MADE[made])
