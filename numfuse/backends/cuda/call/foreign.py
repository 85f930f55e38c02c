"""Arrays of other libraries as the arguments of a call: what is read of them, and made for them.

A `Kind` is of one library or protocol. The kinds here are numfuse's own and the two protocols; a
library's is added to `LIBRARIES` by its adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends.cuda.call import dlpack
from numfuse.backends.cuda.call.arrays import DeviceArray, contiguous, dtype_of
from numfuse.backends.cuda.call.calls import Argument, Maker
from numfuse.backends.cuda.driver.devices import device
from numfuse.backends.cuda.driver.libcuda import ordinal_of

__all__ = ["KINDS", "LIBRARIES", "DLPack", "Interface", "Kind", "Own", "kind_of"]


class Kind:
    """How arrays of a kind are read and made."""

    #: Whether operands must be held until the work is done.
    holds = True

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        """The array, the number of its device, and what keeps it alive (None: x itself)."""
        raise NotImplementedError

    def stream(self, ordinal: int) -> int:
        """The caller's current stream."""
        return 0

    def maker(self, ordinal: int, stream: int) -> Maker:
        """Return a function that makes results."""
        owner = device(ordinal)

        def make(shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
            made = DeviceArray.new(owner, shape, dtype_of(dtype), stream)
            return self.wrap(made), made.address

        return make

    def wrap(self, made: DeviceArray) -> Any:
        """A result of numfuse's own as one of this kind."""
        return made

    def capture(self, ordinal: int) -> int | None:
        """0 where it is known that no graph is being captured; None: ask the driver."""
        return None

    def maker_of(
        self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int
    ) -> Callable[[], tuple[Any, int]]:
        """Return a function that makes one result of `maker` at every call."""
        return functools.partial(self.maker(ordinal, stream), shape, dtype)

    def glance(
        self, values: Iterable[Any], made: list[Any], addresses: list[int], ordinal: int
    ) -> int:
        """Add to `made` all that a call depends on in arguments, and the addresses of arrays.

        They are on the device `ordinal` (-1: on any one), which is returned; -1 of what has to be
        looked at closely.
        """
        for x in values:
            kind = KINDS.get(type(x))
            if kind is None:
                made.append(x)
                continue
            seen = self.look(x) if kind is self else None
            if seen is None or ordinal not in (-1, seen[2]):
                return -1
            one, at, ordinal = seen
            made.append(one)
            addresses.append(at)
        return ordinal

    def look(self, x: Any) -> tuple[Any, int, int] | None:
        """Return all that a call depends on in an operand, the operand's address and its device."""
        return None


class Own(Kind):
    """numfuse's own."""

    holds = False  # their memory knows the streams that used it

    def look(self, x: DeviceArray) -> tuple[Any, int, int] | None:
        # another stream than that of these calls, or memory that was given back
        if x.stream or x.memory.block is None:
            return None
        return x.layout, x.address, x.device.ordinal

    def maker_of(
        self, shape: tuple[int, ...], dtype: str, ordinal: int, stream: int
    ) -> Callable[[], tuple[Any, int]]:
        new = DeviceArray.maker(device(ordinal), shape, dtype_of(dtype), stream)

        def make() -> tuple[Any, int]:
            made = new()
            return self.wrap(made), made.address

        return make

    def read(self, name: str, x: DeviceArray) -> tuple[Argument, int, Any]:
        if x.memory.block is None:
            raise ValueError(f"{name} has been given back")
        size = x.dtype.itemsize
        strides = tuple(s // size for s in x.strides)
        return (
            Argument(x.address, x.shape, strides, x.dtype.name, x.writable),
            x.device.ordinal,
            None,
        )


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
            owner = device(ordinal)
            event = owner.event(theirs)
            owner.wait(0, event)
            owner.forget(event)
        return Argument(at, shape, strides, dtype.name, not read_only), ordinal, None


class DLPack(Kind):
    """Whatever has ``__dlpack__``."""

    def read(self, name: str, x: Any) -> tuple[Argument, int, Any]:
        if x.__dlpack_device__()[0] not in (dlpack.CUDA, 13):
            raise TypeError(f"{name} must be on a CUDA device, got {type(x).__qualname__}")
        held = dlpack.take(x, 0)
        if held.dtype is None:
            raise TypeError(f"{name} must have dtype float64, float32, float16 or bfloat16")
        return Argument(held.address, held.shape, held.strides, held.dtype), held.ordinal, held


#: {root of the module that defines a class: its kind}.
LIBRARIES: dict[str, Callable[[], Kind]] = {"numfuse": Own}
#: The kinds of the classes that were met.
KINDS: dict[type, Kind] = {}
_MADE: dict[str, Kind] = {}


def kind_of(x: Any) -> Kind | None:
    """How arrays like this one are read; None of what is no array of a device."""
    found = KINDS.get(type(x))
    if found is not None:
        return found
    if x is None or isinstance(x, (ndarray, np.generic)):
        return None
    for base in type(x).__mro__:
        root = base.__module__.partition(".")[0]
        if isinstance(x, DeviceArray):
            root = "numfuse"
        if root in LIBRARIES:
            if root not in _MADE:
                _MADE[root] = LIBRARIES[root]()
            found = _MADE[root]
            break
    else:
        if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
            found = _MADE.setdefault("dlpack", DLPack())
        elif hasattr(x, "__cuda_array_interface__"):
            found = _MADE.setdefault("interface", Interface())
        else:
            return None
    return KINDS.setdefault(type(x), found)
