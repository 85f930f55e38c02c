"""The buffers of a device: given from a pool, uploaded to, read from."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import wgpu
from numpy import ndarray

from numfuse.backends.webgpu import tiling
from numfuse.backends.webgpu.device import forks
from numfuse.errors import DeviceError, DeviceLost
from numfuse.runtime.pool import FreeBlocks

_USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST

#: A pipeline, a bind group and a grid.
Dispatch: TypeAlias = tuple[Any, Any, tuple[int, ...]]
#: A call that waits to be submitted: the handles of its buffers, and its dispatches.
Waiting: TypeAlias = tuple[tuple[Any, ...], Sequence[Dispatch]]


class Buffer:
    """Memory of a device; goes back to the device's pool when nothing refers to it."""

    def __init__(self, device: Memory, handle: Any, size: int) -> None:
        self.device, self.handle, self.size = device, handle, size

    @property
    def ghost(self) -> ndarray:
        """Return addresses that stand for the bytes; never touched, they take no memory."""
        found: ndarray | None = vars(self).get("_ghost")
        if found is None:  # (one of two threads' is kept)
            found = vars(self).setdefault("_ghost", np.empty(self.size, np.uint8))
        return found

    def __del__(self) -> None:
        # At the end of the process the device's own fields may be gone already.
        with contextlib.suppress(Exception):
            self.device.reclaim(self.handle, self.size)


class Binding(NamedTuple):
    """A part of a buffer as a kernel sees it."""

    buffer: Buffer
    offset: int
    size: int


@functools.lru_cache(1024)
def _capacity(size: int, limit: int) -> int:
    """Return `size` rounded up so that buffers of nearly one size can stand in for each other."""
    if size <= 256:
        return 256
    step = max(256, 1 << (size.bit_length() - 3))
    return min(-(-size // step) * step, limit)


class Memory:
    """The part of a device that gives buffers; what it keeps is guarded by a lock."""

    name: str
    handle: Any
    queue: Any
    lost: bool
    #: Bytes of the largest buffer.
    buffer_limit: int

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: Every buffer of the pool and of a Buffer. Python may find both a Buffer and wgpu's object
        #: in one cycle of garbage, and would then end the second before the first gives it back.
        self._live: set[Any] = set()
        self.free: FreeBlocks[Any] = FreeBlocks(self._destroy, tiling.POOL_BYTES)
        #: Buffers for the temporaries of recorded calls, and a number that changes when they do.
        #: All calls share them: a submit reads only what it wrote, and submits follow one another.
        self.spares: tuple[int, tuple[Buffer, ...]] = 0, ()
        self._staging: list[Any] = []
        #: The calls that wait, in their order (`submits`).
        self.waiting: list[Waiting] = []

    def settle(self, handle: Any) -> None:
        """Submit the calls that wait, if one uses a buffer."""
        raise NotImplementedError

    @contextlib.contextmanager
    def reported(self, what: Any) -> Iterator[None]:
        """wgpu's errors as Python's and numfuse's, with a label, or the dispatches, of the work."""
        try:
            yield
        except DeviceError:
            raise
        except (wgpu.GPUError, RuntimeError) as error:
            if not isinstance(what, str):
                labels: list[str] = [step[0].label for step in what]
                what = ", ".join(dict.fromkeys(labels)) or "copy"
            beyond, text = isinstance(error, wgpu.GPUOutOfMemoryError), str(error)
            if not beyond and (self.lost or "lost" in text.casefold() or "destroyed" in text):
                self.lost = True
                raise DeviceLost(f"{self.name} is lost, in {what!r}: {text}") from error
            if beyond or re.search("not enough memory|out of memory", text, re.IGNORECASE):
                raise MemoryError(f"{self.name} is out of memory in {what!r}: {text}") from error
            raise DeviceError(f"{self.name} refused {what!r}: {text}") from error

    def buffer(self, size: int, what: str = "array") -> Buffer:
        """A buffer of `size` bytes or more, with any content; ValueError if that is too large."""
        if size > self.buffer_limit:
            raise ValueError(
                f"{what} must have at most max-buffer-size = {self.buffer_limit} bytes on "
                f"{self.name}, got {size}"
            )
        size = _capacity(size, self.buffer_limit)
        free = self.free.take(None, size, size)
        if free is not None:
            return Buffer(self, free, size)
        if self.lost:
            forks.refuse()
            raise DeviceLost(f"{self.name} is lost")
        with self.reported(f"buffer of {size} bytes"):
            handle = self.handle.create_buffer(size=size, usage=_USAGE)
        with self._lock:
            self._live.add(handle)
        return Buffer(self, handle, size)

    def spare(self, sizes: Sequence[int]) -> tuple[int, tuple[Buffer, ...]]:
        """Return `spares` with buffers of these sizes first; they are kept if they are not many."""
        number, held = self.spares
        grown = list(held)
        for i, size in enumerate(sizes):
            if i == len(grown) or grown[i].size < size:
                grown[i : i + 1] = [self.buffer(size, "a temporary")]
        found = number + 1, tuple(grown)
        if sum(x.size for x in grown) <= tiling.SPARE_BYTES:
            self.spares = found
        return found

    def reclaim(self, handle: Any, size: int) -> None:
        """Keep a buffer that nobody refers to any more for the next one of its size."""
        # What reads it is submitted, or waits to be, and what the next owner does comes behind it.
        if not self.lost:
            self.free.keep(None, size, handle)
        elif not forks.forked():  # (in a child every device is lost, and the handle its parent's)
            self._destroy(handle)

    def _destroy(self, handle: Any) -> None:
        self._live.discard(handle)
        handle.destroy()

    def trim(self) -> None:
        """Give the memory of the pool back to the driver."""
        with self._lock:
            staging, self._staging = self._staging, []
        self.spares = self.spares[0] + 1, ()
        self.free.clear()
        for handle in staging:
            handle.destroy()

    def upload(self, x: ndarray, buffer: Buffer, offset: int = 0) -> None:
        """The bytes of a C-contiguous array into a buffer, at a multiple of four bytes."""
        if x.nbytes == 0:
            return
        if self.waiting:
            self.settle(buffer.handle)
        data = x.reshape(-1).view(np.uint8)
        whole = data.nbytes // 4 * 4
        with self.reported("upload"):
            if whole:
                self.queue.write_buffer(buffer.handle, offset, data[:whole])
            if whole < data.nbytes:  # a copy takes whole words
                tail = np.zeros(4, np.uint8)
                tail[: data.nbytes - whole] = data[whole:]
                self.queue.write_buffer(buffer.handle, offset + whole, tail)

    def staging(self, size: int) -> Any:
        """A buffer to read from, of at least `size` bytes."""
        capacity = _capacity(size, self.buffer_limit)
        with self._lock:
            for i, handle in enumerate(self._staging):
                if handle.size == capacity:
                    return self._staging.pop(i)
        return self.handle.create_buffer(size=capacity, usage=_STAGING)

    def keep_staging(self, handle: Any) -> None:
        """Keep a buffer to read from for the next download, the latest few and no large ones."""
        with self._lock:
            if handle.size <= tiling.STAGING_BYTES:
                self._staging.append(handle)
                if len(self._staging) <= tiling.KEPT_STAGING:
                    return
                handle = self._staging.pop(0)
        handle.destroy()
