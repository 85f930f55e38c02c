"""Memory for arrays that a call holds between its operations, kept for the next call.

Fresh pages cost 0.1 ms a MiB, as much as what is done with them: who gives a slab back finds it,
with its pages in place, at its next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy import ndarray

#: Slabs that are kept, and bytes of all of them.
KEPT, KEPT_BYTES = 4, 256 << 20
#: Regions begin on lines, and some lines apart: not all in one cache set.
_LINE, _APART = 64, 4096 + 5 * 64
#: By identity. Every step is one of a dict, so the pool needs no lock (and survives a fork).
_pool: dict[int, ndarray] = {}


class Slab:
    """Regions of one piece of memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        steps = [-(-size // _LINE) * _LINE + _APART for size in sizes]
        starts = [0, *accumulate(steps)]
        self._starts, size = starts, starts[-1] + _LINE
        fits = sorted((x.size, key) for key, x in list(_pool.items()) if x.size >= size)
        memory = _pool.pop(fits[0][1], None) if fits else None
        if memory is None:
            memory = np.empty(size, np.uint8)
        self._memory: ndarray | None = memory
        self._first = -memory.__array_interface__["data"][0] % _LINE

    def array(self, region: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> ndarray:
        """Return the beginning of a region as an array; its values are what was left there."""
        memory = self._memory
        assert memory is not None
        return np.ndarray(shape, dtype, memory, self._first + self._starts[region])

    def release(self) -> None:
        """Give the memory back; whoever still has an array of it must not use it."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        # The newest are those that the next calls want.
        _pool[id(memory)] = memory
        while len(_pool) > KEPT or sum(x.nbytes for x in list(_pool.values())) > KEPT_BYTES:
            _pool.pop(next(iter(_pool)), None)
