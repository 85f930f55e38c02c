"""Arrays that live on a device: a shape, a dtype and strides over a buffer.

The views of one are those of its ghost (`runtime.views`), at the same distance from the beginning
of its buffer's. (Memory that is never touched takes address space only.)
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy import ndarray

from numfuse.backends.webgpu.device import forks
from numfuse.backends.webgpu.device.commands import Commands
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.device.memory import Binding, Buffer
from numfuse.errors import DeviceLost
from numfuse.runtime import dlpack
from numfuse.runtime.strided import contiguous
from numfuse.runtime.views import GhostViews, address, bounds

#: Bytes that are downloaded at once: a buffer to read from is never larger than needed.
_PIECE = 256 << 20


class DeviceArray(GhostViews):
    """An array on a WebGPU device; made by :func:`numfuse.to_device` and by calls on such arrays.

    It is an operand and a result of numfuse's functions, and has the views of a NumPy array that
    move no data: basic indexing, ``.T``, :meth:`transpose`, :meth:`reshape` (where no copy is
    needed). :func:`numfuse.to_numpy` brings it back, and so does DLPack where it is asked for the
    host: ``numpy.from_dlpack(x, device="cpu")`` is a copy.
    """

    __slots__ = ("buffer", "device", "dtype", "offset", "shape", "strides")

    def __init__(
        self,
        device: Device,
        buffer: Buffer,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        offset: int = 0,
    ) -> None:
        # Attributes, not properties: a call that comes again reads them of every operand.
        self.device, self.buffer = device, buffer
        self.shape, self.strides, self.dtype = shape, strides, dtype
        #: Bytes from the beginning of the buffer to the first element.
        self.offset = offset

    @classmethod
    def empty(cls, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Return a new C-contiguous array of any content."""
        nbytes = prod(shape) * dtype.itemsize
        buffer = device.buffer(max(nbytes, 16), f"an array of shape {shape}")
        return cls(device, buffer, shape, contiguous(shape, dtype.itemsize), dtype)

    @property
    def ghost(self) -> ndarray:
        """The NumPy array that has its shape and strides, among those of its buffer."""
        return ndarray(self.shape, self.dtype, self.buffer.ghost, self.offset, self.strides)

    def _view(self, ghost: ndarray) -> DeviceArray:
        offset = address(ghost) - address(self.buffer.ghost) if ghost.size else 0
        return DeviceArray(
            self.device, self.buffer, ghost.shape, ghost.strides, ghost.dtype, offset
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.WEBGPU, 0

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        # A buffer has no address: what DLPack would hand over is a handle of this process' wgpu,
        # which no library of arrays reads.
        if dl_device != (dlpack.CPU, 0):
            raise BufferError(
                f"an array on {self.device} is exported as a copy in the host's memory alone: "
                f"dl_device must be (1, 0), as of numpy.from_dlpack(x, device='cpu'), "
                f"got {dl_device}"
            )
        return dlpack.host_copy(self, max_version, copy)

    def alive(self) -> None:
        """Raise DeviceLost where the device is gone, BackendUnavailable where a fork forbids it."""
        if self.device.lost:
            forks.refuse()
            raise DeviceLost(
                f"an array of shape {self.shape} was on {self.device.name}: it is lost"
            )

    def to_numpy(self) -> ndarray:
        """A copy as a C-contiguous NumPy array."""
        self.alive()
        out = np.empty(self.shape, self.dtype)
        if not out.size:
            return out
        low, high = bounds(self.offset, self.shape, self.strides, self.dtype.itemsize)
        first = low // 16 * 16
        last = min(-(-high // 16) * 16, self.buffer.size)
        block = np.empty(last - first, np.uint8)
        for at in range(first, last, _PIECE):
            part = block[at - first :][:_PIECE]
            wanted = Binding(self.buffer, at, part.nbytes), part
            (part[...],) = Commands(self.device).submit([wanted])
        out[...] = ndarray(self.shape, self.dtype, block, self.offset - first, self.strides)
        return out


def to_device(x: ndarray, device: Device) -> DeviceArray:
    """A NumPy array, copied to the device as a C-contiguous array."""
    x = np.asarray(x, order="C")
    buffer = device.buffer(max(x.nbytes, 4), f"an array of shape {x.shape}")
    device.upload(x, buffer)
    return DeviceArray(device, buffer, x.shape, x.strides, x.dtype)
