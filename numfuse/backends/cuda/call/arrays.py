"""Arrays that live on a CUDA device.

The ghost of one (`runtime.views`) is a NumPy array at the device's address.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.call.memory import Block, Pool
from numfuse.backends.cuda.driver.device import Device
from numfuse.runtime import dlpack
from numfuse.runtime.strided import contiguous
from numfuse.runtime.views import GhostViews, address, bounds

_POOLS: dict[int, Pool] = {}


def pool_of(owner: Device) -> Pool:
    """Return the pool of a device."""
    found = _POOLS.get(owner.ordinal)
    if found is None:
        limit = max(tiling.POOL_BYTES, owner.memory()[1] // tiling.POOL_SHARE)
        found = _POOLS.setdefault(owner.ordinal, Pool(owner, limit))
    return found


def ghost(
    at: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any], writable: bool
) -> ndarray:
    """A NumPy array over memory that is not there; strides in bytes."""
    low, high = bounds(at, shape, strides, dtype.itemsize)
    if low == high:
        return np.empty(tuple(shape), dtype)
    memory: Any = (ctypes.c_char * (high - low)).from_address(low)
    x = ndarray(tuple(shape), dtype, memory, at - low, tuple(strides))
    if not writable:
        x.flags.writeable = False
    return x


class Memory:
    """A block of a pool, given back when the last array over it is gone."""

    __slots__ = ("block", "pool", "streams")

    def __init__(self, pool: Pool, nbytes: int, what: str) -> None:
        self.pool = pool
        self.block: Block | None = pool.take(nbytes, 0, what, 0)
        #: Streams whose work used it, beside the default one.
        self.streams: tuple[int, ...] = ()

    def __del__(self) -> None:
        block, self.block = getattr(self, "block", None), None
        if block is not None and self.pool.device.lost is None:
            self.pool.give(block, self.streams)


class DeviceArray(GhostViews):
    """An array on a CUDA device; made by :func:`numfuse.to_device` and by calls on such arrays.

    It has the views of a NumPy array that move no data: basic indexing, ``.T``, :meth:`transpose`,
    :meth:`reshape` (where no copy is needed), and other libraries take it without a copy
    (``__cuda_array_interface__``, but for bfloat16, and DLPack). :func:`numfuse.to_numpy` brings it
    back. The work that makes it is on the default stream.
    """

    __slots__ = (
        "__weakref__",
        "_ghost",
        "address",
        "dtype",
        "layout",
        "memory",
        "ordinal",
        "shape",
        "strides",
        "writable",
    )

    def __init__(
        self,
        memory: Memory,
        at: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        writable: bool = True,
    ) -> None:
        self.memory = memory
        #: Of the first element.
        self.address = at
        self.shape, self.strides, self.dtype, self.writable = shape, strides, dtype, writable
        #: What a call depends on, beside the address; and the number of the device.
        self.layout = shape, strides, dtype, writable
        self.ordinal = memory.pool.device.ordinal
        self._ghost: ndarray | None = None

    @classmethod
    def maker(
        cls, owner: Device, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Callable[[], DeviceArray]:
        """Return a function that makes a C-contiguous array of any content at every call."""
        strides, nbytes = contiguous(shape, dtype.itemsize), max(1, prod(shape) * dtype.itemsize)
        pool, what = pool_of(owner), f"an array of shape {shape}"

        def make() -> DeviceArray:
            memory = Memory(pool, nbytes, what)
            assert memory.block is not None
            return cls(memory, memory.block.address, shape, strides, dtype)

        return make

    @classmethod
    def empty(cls, owner: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Return a new C-contiguous array of any content."""
        return cls.maker(owner, shape, dtype)()

    @property
    def device(self) -> Device:
        return self.memory.pool.device

    @property
    def ghost(self) -> ndarray:  # made when it is wanted: a call that comes again does not
        if self._ghost is None:
            self._ghost = ghost(self.address, self.shape, self.strides, self.dtype, self.writable)
        return self._ghost

    def _view(self, x: ndarray) -> DeviceArray:
        writable = bool(x.flags.writeable)
        return DeviceArray(self.memory, address(x), x.shape, x.strides, x.dtype, writable)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.name == "bfloat16":
            raise AttributeError(
                "__cuda_array_interface__ has no bfloat16: use DLPack (torch.from_dlpack(x))"
            )
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.address, not self.writable),
            "version": 3,
            "stream": 1,  # the default one; 0 is forbidden there
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        own = self.__dlpack_device__()
        if dl_device == (dlpack.CPU, 0):
            return dlpack.host_copy(self, max_version, copy)
        if dl_device not in (None, own):
            raise BufferError(
                f"an array on {self.device} is exported to its own device {own} or, as a copy, to "
                f"the host (1, 0), got dl_device={dl_device}"
            )
        # (rare, and so by the host: the driver's copies within a device are not used elsewhere)
        x = upload(self.device, self.to_numpy()) if copy else self
        if stream not in (None, -1, 0, 1):
            self.device.follow(stream, 0)
            x.memory.streams = *x.memory.streams, stream
        there = dlpack.over(x, x.address, x.shape, x.strides, x.dtype, x.writable)
        return dlpack.export(there, own, max_version, bool(copy))

    def to_numpy(self) -> ndarray:
        """A copy as a C-contiguous NumPy array."""
        out = np.empty(self.shape, self.dtype)
        download(self.device, self.ghost, out, 0)
        return out


def upload(owner: Device, x: ndarray) -> DeviceArray:
    """Return a NumPy array, copied to the device as a C-contiguous array."""
    x = np.asarray(x, order="C")
    made = DeviceArray.maker(owner, x.shape, x.dtype)()
    if x.size:
        owner.upload(address(x), made.address, x.nbytes, 0)
    return made


def download(owner: Device, x: ndarray, out: ndarray, stream: int) -> None:
    """The elements of a ghost into a NumPy array of its shape, after the stream's work."""
    if not x.size:
        return
    low, high = bounds(address(x), x.shape, x.strides, x.itemsize)
    if x.flags.c_contiguous and out.flags.c_contiguous:
        owner.download(low, address(out), high - low, stream)
        return
    raw = np.empty(high - low, np.uint8)
    owner.download(low, address(raw), high - low, stream)
    out[...] = ndarray(x.shape, x.dtype, raw, address(x) - low, x.strides)
