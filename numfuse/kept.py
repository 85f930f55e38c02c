"""What a network's forward keeps for its backward."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from numfuse.runtime.slabs import Slab

#: Bytes up to which NumPy's own memory costs less than a slab does.
SMALL = 64 << 10


class Holds(Protocol):
    """The memory of stacks."""

    slab: Slab


class Kept:
    """The inputs and the sums of each layer that a forward keeps; of a jet, stacks.

    A backend that has whole networks keeps those of all blocks as one array, `stacks`. There is
    nothing where it makes them again in less time than it takes to read them.
    """

    def __init__(
        self, inputs: list[Any] | None = None, sums: list[Any] | None = None,
        memory: Holds | None = None,
    ) -> None:  # fmt: skip
        self.inputs = [] if inputs is None else inputs
        self.sums = [] if sums is None else sums
        self.stacks: ndarray | None = None
        if memory is not None:
            weakref.finalize(self, memory.slab.release)


def kept_stacks(count: int, dtype: np.dtype[Any]) -> tuple[Kept, ndarray]:
    """Return room for stacks of so many elements, and that as an array."""
    kept, size = Kept(), count * dtype.itemsize
    if size <= SMALL:
        stacks = np.empty(count, dtype)
    else:
        slab = Slab([size])
        stacks = slab.array(0, (count,), dtype)
        weakref.finalize(kept, slab.release)
    kept.stacks = stacks
    return kept, stacks
