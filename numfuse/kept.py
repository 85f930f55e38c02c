"""The inputs and sums that a network's forward keeps for its backward."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import numpy as np
from numpy import ndarray

from numfuse.runtime.slabs import Slab

#: Arrays of stacks that are kept for the next forward, and bytes of all of them: fresh pages cost
#: 0.1 ms a MiB.
POOLED, POOLED_BYTES = 8, 256 << 20
#: The oldest first. Every step is one of a list, so the pool needs no lock (and survives a fork).
_pool: list[ndarray] = []


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


def given_back(kept: Any) -> Any:
    """Return what a forward kept for its backward; None where there is nothing."""
    if kept is None:
        return None
    if not hasattr(kept, "inputs"):
        raise TypeError(
            f"kept must be what the forward returned with keep=True, got {type(kept).__name__}"
        )
    return kept if kept.inputs else None


def check_kept(kept: Any, layers: int, points: Any) -> None:
    """Raise a ValueError for what was kept of another number of layers, or of points."""
    rows = tuple(points.shape[:-1])
    given = tuple(kept.inputs[0].shape[: len(rows)])
    # (a jet whose last layer has an activation keeps its result, too)
    if given != rows or len(kept.inputs) - layers not in (0, 1):
        raise ValueError(
            f"kept must come from a forward of {layers} layers on points {rows}, got "
            f"{len(kept.inputs)} arrays for points {given}"
        )


class KeptStacks(Kept):
    """Stacks of a network's blocks, whose memory goes to the next forward that keeps as many."""

    def __init__(self, count: int, dtype: np.dtype[Any]) -> None:
        self.inputs, self.sums = [], []
        size = count * dtype.itemsize
        for i, memory in enumerate(_pool):
            if memory.size == size:
                try:
                    memory = _pool.pop(i)
                except IndexError:  # another thread was here
                    continue
                if memory.size == size:
                    break
                _pool.append(memory)
        else:
            memory = np.empty(size, np.uint8)
        self._memory = memory
        self.stacks: ndarray = memory.view(dtype)

    def __del__(self) -> None:
        _pool.append(self._memory)
        while len(_pool) > POOLED or sum(x.size for x in _pool) > POOLED_BYTES:
            try:
                _pool.pop(0)
            except IndexError:
                break
