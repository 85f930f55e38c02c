"""Memory of a device, kept and given again in the order of a stream.

What a stream's work used may be used by later work of the same stream at once, without waiting: the
stream is the order. A block that other streams used too is given again when they have passed the
event that was recorded when it came back.

CUDA graphs. Memory that is taken while a graph is being captured belongs to that graph, which may
be launched at any later time: it goes round within the capture, and is never given to other work.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from numfuse import tiling
from numfuse.backends.cuda.driver import Device

__all__ = ["Block", "Pool"]

_MEGABYTE = 1 << 20


def size_class(nbytes: int) -> int:
    """The bytes of a block for so many: a power of two, or a multiple of 2 MiB."""
    if nbytes <= _MEGABYTE:
        return max(512, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // (2 * _MEGABYTE)) * 2 * _MEGABYTE


class Block:
    """Memory of a device, aligned to 256 bytes; `owner` is the stream and the capture it is of."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: tuple[int, int]) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner


class Pool:
    """The free blocks of a device.

    Parameters
    ----------
    device : Device
    limit : int
        Bytes of free blocks to keep.
    """

    def __init__(self, device: Device, limit: int = tiling.CUDA_POOL_BYTES) -> None:
        self._device, self._limit = device, limit
        self._free: dict[tuple[int, int], dict[int, list[Block]]] = defaultdict(dict)
        #: Blocks that other streams may still use, with the events to wait for.
        self._late: list[tuple[Block, list[int]]] = []
        self._lock = threading.Lock()
        #: Bytes of free blocks, and all that were ever asked of the device and not given back.
        self.kept = self.held = 0

    def take(
        self, nbytes: int, stream: int, what: str = "workspace", capture: int | None = None
    ) -> Block:
        """A block for work of this stream; its content is undefined."""
        nbytes = size_class(nbytes)
        owner = stream, self._device.capture(stream) if capture is None else capture
        with self._lock:
            if self._late:
                self._collect()
            lists = self._free[owner]
            found = lists.get(nbytes)
            if not found:
                # a larger one that is not wasted on it
                near = [n for n, blocks in lists.items() if blocks and nbytes < n <= 2 * nbytes]
                found = lists[min(near)] if near else None
            if found:
                block = found.pop()
                self.kept -= block.nbytes
                return block
        try:
            address = self._device.allocate(nbytes, what)
        except MemoryError:
            self.release()
            address = self._device.allocate(nbytes, what)
        with self._lock:
            self.held += nbytes
        return Block(address, nbytes, owner)

    def give(self, block: Block, others: Iterable[int] = ()) -> None:
        """Take a block back. All its work is in its own stream, and in `others` of the device."""
        events = [self._device.event(stream) for stream in others if stream != block.owner[0]]
        with self._lock:
            if events:
                self._late.append((block, events))
            else:
                self._keep(block)

    def _keep(self, block: Block) -> None:
        if block.owner[1] == 0 and self.kept + block.nbytes > self._limit:
            self._device.free(block.address)
            self.held -= block.nbytes
            return
        self._free[block.owner].setdefault(block.nbytes, []).append(block)
        self.kept += block.nbytes

    def _collect(self) -> None:
        late, self._late = self._late, []
        for block, events in late:
            if all(self._device.passed(event) for event in events):
                for event in events:
                    self._device.forget(event)
                self._keep(block)
            else:
                self._late.append((block, events))

    def release(self) -> None:
        """Give all free blocks back to the device, but those of captured graphs."""
        with self._lock:
            for owner, lists in self._free.items():
                if owner[1]:
                    continue
                for blocks in lists.values():
                    for block in blocks:
                        self._device.free(block.address)
                        self.kept -= block.nbytes
                        self.held -= block.nbytes
                    blocks.clear()
