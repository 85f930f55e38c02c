"""Free memory that is kept to be given again: the oldest makes room for what comes back.

A pool that is full of sizes that nobody asks for any more must not send away the blocks in use:
each call would then ask the device for memory, and wait for the device to give it back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class FreeBlocks(Generic[T]):
    """Free blocks by owner and size, for any thread.

    The garbage collector may end an array, which gives its block back, in the middle of any line
    here: `keep` waits for nothing, and what it cannot put away at once waits for the next call.
    `drop` is called with each block that has to go; `limit` is in bytes.
    """

    def __init__(self, drop: Callable[[T], object], limit: int | None = None) -> None:
        self._drop, self._limit = drop, limit
        self._lock = threading.Lock()
        self._arrived: deque[tuple[Hashable, int, T]] = deque()
        #: By age, the oldest first.
        self._blocks: dict[int, tuple[list[int], int, T]] = {}
        #: {owner: {size: ages, in order}}
        self._owners: dict[Hashable, dict[int, list[int]]] = {}
        self._age = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, owner: Hashable, nbytes: int, most: int) -> T | None:
        """The latest block of the smallest size from `nbytes` to `most`; None: there is none."""
        with self._lock:
            if self._arrived:
                self._put_away()
            sizes = self._owners.get(owner)
            if sizes is None:
                return None
            block = self._latest(sizes.get(nbytes))  # nearly every call's
            if block is not None:
                return block
            for size in sorted(size for size in sizes if nbytes < size <= most):
                block = self._latest(sizes[size])
                if block is not None:
                    return block
            return None

    def take_each(self, owner: Hashable, sizes: Iterable[int]) -> list[T | None]:
        """Return the latest block of each of these sizes, and None where there is none."""
        taken: list[T | None] = []
        with self._lock:
            if self._arrived:
                self._put_away()
            known = self._owners.get(owner, {})
            for size in sizes:
                found, ages = None, known.get(size)
                while found is None and ages:  # as `_latest`, without its frame
                    found = self._blocks.pop(ages.pop(), None)
                if found is not None:
                    self.nbytes -= size
                taken.append(None if found is None else found[2])
        return taken

    def keep(self, owner: Hashable, nbytes: int, block: T) -> None:
        """Keep a block, or drop it if it is larger than the limit."""
        if self._lock.acquire(False):
            try:
                self._add(owner, nbytes, block)
                if self._arrived:
                    self._put_away()
            finally:
                self._lock.release()
        else:
            self._arrived.append((owner, nbytes, block))

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._put_away()
            while self._blocks:
                self._drop(self._oldest())
            self._owners.clear()

    def _put_away(self) -> None:
        while self._arrived:
            self._add(*self._arrived.popleft())

    def _add(self, owner: Hashable, nbytes: int, block: T) -> None:
        if self._limit is not None and self.nbytes + nbytes > self._limit:
            if nbytes > self._limit:
                self._drop(block)
                return
            while self._blocks and self.nbytes + nbytes > self._limit:
                self._drop(self._oldest())
        sizes = self._owners.get(owner)
        if sizes is None:
            sizes = self._owners[owner] = {}
        ages = sizes.get(nbytes)
        if ages is None:
            ages = sizes[nbytes] = []
        self._age = age = self._age + 1
        self._blocks[age] = ages, nbytes, block
        ages.append(age)
        self.nbytes += nbytes

    # What an interrupt left half done above is passed over here.

    def _latest(self, ages: list[int] | None) -> T | None:
        """Take the latest block of a size; None: there is none."""
        while ages:
            found = self._blocks.pop(ages.pop(), None)
            if found is not None:
                self.nbytes -= found[1]
                return found[2]
        return None

    def _oldest(self) -> T:
        """Take the oldest block."""
        age = next(iter(self._blocks))
        ages, nbytes, block = self._blocks.pop(age)
        if age in ages:
            ages.remove(age)
        self.nbytes -= nbytes
        return block
