"""Free memory that is kept to be given again: the oldest makes room for what comes back.

A pool that is full of sizes that nobody asks for any more must not send away the blocks in use:
each call would then ask the device for memory, and wait for the device to give it back.
"""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["FreeBlocks"]

T = TypeVar("T")


class FreeBlocks(Generic[T]):
    """Free blocks by owner and size, for any thread.

    The garbage collector may end an array, which gives its block back, in the middle of any line
    here: `keep` waits for nothing, and what it cannot put away at once waits for the next call.

    Parameters
    ----------
    drop : callable
        Called with each block that has to go.
    limit : int or None
        Bytes to keep; None: all that come.
    """

    def __init__(self, drop: Callable[[T], object], limit: int | None = None) -> None:
        self._drop, self._limit = drop, limit
        self._lock = threading.Lock()
        self._arrived: deque[tuple[Hashable, int, T]] = deque()
        #: By age, the oldest first.
        self._blocks: dict[int, tuple[Hashable, int, T]] = {}
        #: {owner: (sizes of which there are blocks, in order; {size: ages, in order})}
        self._owners: dict[Hashable, tuple[list[int], dict[int, list[int]]]] = defaultdict(
            lambda: ([], {})
        )
        self._age = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, owner: Hashable, nbytes: int, most: int) -> T | None:
        """The latest block of the smallest size from `nbytes` to `most`; None: there is none."""
        with self._lock:
            self._put_away()
            if owner not in self._owners:
                return None
            sizes, ages = self._owners[owner]
            at = bisect.bisect_left(sizes, nbytes)
            if at == len(sizes) or sizes[at] > most:
                return None
            return self._remove(ages[sizes[at]][-1])

    def keep(self, owner: Hashable, nbytes: int, block: T) -> None:
        """Keep a block, or drop it if it is larger than the limit."""
        self._arrived.append((owner, nbytes, block))
        if self._lock.acquire(blocking=False):
            try:
                self._put_away()
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._put_away()
            while self._blocks:
                self._drop(self._remove(next(iter(self._blocks))))

    def _put_away(self) -> None:
        while self._arrived:
            owner, nbytes, block = self._arrived.popleft()
            if self._limit is not None:
                if nbytes > self._limit:
                    self._drop(block)
                    continue
                while self.nbytes + nbytes > self._limit:
                    self._drop(self._remove(next(iter(self._blocks))))
            self._age += 1
            self._blocks[self._age] = owner, nbytes, block
            sizes, ages = self._owners[owner]
            if nbytes not in ages:
                bisect.insort(sizes, nbytes)
                ages[nbytes] = []
            ages[nbytes].append(self._age)
            self.nbytes += nbytes

    def _remove(self, age: int) -> T:
        owner, nbytes, block = self._blocks.pop(age)
        sizes, ages = self._owners[owner]
        ages[nbytes].remove(age)
        if not ages[nbytes]:
            del ages[nbytes]
            sizes.remove(nbytes)
            if not sizes:
                del self._owners[owner]
        self.nbytes -= nbytes
        return block
