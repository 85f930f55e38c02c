"""Memory of a device, kept and given again in the order of a stream.

What a stream's work used may be used by later work of the same stream at once, without waiting: the
stream is the order. A block that other streams used too is given again when they have passed the
event that was recorded when it came back.

CUDA graphs. Memory that is taken while a graph is being captured belongs to that graph, which may
be launched at any later time: it goes round within the capture, and is never given to other work.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.driver.device import Device
from numfuse.runtime.pool import FreeBlocks

_MEGABYTE = 1 << 20


@functools.lru_cache(maxsize=4096)
def size_class(nbytes: int) -> int:
    """Return the bytes of a block for so many: a power of two, or a multiple of 2 MiB."""
    if nbytes <= _MEGABYTE:
        return max(512, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // (2 * _MEGABYTE)) * 2 * _MEGABYTE


class Block:
    """Memory of a device, aligned to 256 bytes; `owner` is the stream and the capture it is of."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: tuple[int, int]) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner


class Pool:
    """The free blocks of a device, of which it keeps `limit` bytes."""

    def __init__(self, device: Device, limit: int = tiling.POOL_BYTES) -> None:
        self.device = device
        self._free: FreeBlocks[Block] = FreeBlocks(self._drop, limit)
        #: Of captured graphs: as long as the process.
        self._captured: FreeBlocks[Block] = FreeBlocks(self._drop)
        #: Blocks that other streams may still use, with the events to wait for.
        self._late: deque[tuple[Block, list[int]]] = deque()
        #: {address: bytes} of what was ever asked of the device and not given back.
        self._allocated: dict[int, int] = {}

    @property
    def kept(self) -> int:
        """Bytes of free blocks."""
        return self._free.nbytes + self._captured.nbytes

    @property
    def held(self) -> int:
        """Bytes that were ever asked of the device and not given back."""
        return sum(self._allocated.copy().values())

    def take(
        self, nbytes: int, stream: int, what: str = "workspace", capture: int | None = None
    ) -> Block:
        """A block for work of this stream; its content is undefined."""
        nbytes = size_class(nbytes)
        owner = stream, self.device.capture(stream) if capture is None else capture
        if self._late:
            self._collect()
        # or a larger one that is not wasted on it
        free = self._captured if owner[1] else self._free
        block = free.take(owner, nbytes, 2 * nbytes)
        if block is not None:
            return block
        try:
            address = self.device.allocate(nbytes, what)
        except MemoryError:
            self.release()
            address = self.device.allocate(nbytes, what)
        self._allocated[address] = nbytes
        return Block(address, nbytes, owner)

    def give(self, block: Block, others: Iterable[int] = ()) -> None:
        """Take a block back. All its work is in its own stream, and in `others` of the device."""
        events = [self.device.event(stream) for stream in others if stream != block.owner[0]]
        if events:
            self._late.append((block, events))
        else:
            self._keep(block)

    def release(self) -> None:
        """Give all free blocks back to the device, but those of captured graphs."""
        self._free.clear()

    def _keep(self, block: Block) -> None:
        free = self._captured if block.owner[1] else self._free
        free.keep(block.owner, block.nbytes, block)

    def _drop(self, block: Block) -> None:
        # known no longer before it is free, and so may be another's
        self._allocated.pop(block.address, None)
        self.device.free(block.address)

    def _collect(self) -> None:
        for _ in range(len(self._late)):
            try:
                block, events = self._late.popleft()
            except IndexError:  # another thread looks, too
                return
            if all(self.device.passed(event) for event in events):
                for event in events:
                    self.device.forget(event)
                self._keep(block)
            else:
                self._late.append((block, events))
