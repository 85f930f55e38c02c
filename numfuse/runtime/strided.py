"""Strided parts of a device's buffers: the views of an operand that move no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided


def contiguous(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of an array in C order: in elements, or with `itemsize` in bytes."""
    strides, run = [], itemsize
    for length in reversed(shape):
        strides.append(run)
        run *= max(1, length)
    return tuple(strides[::-1])


def ghost(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array that is never read: there is one element behind it, in C order."""
    one = np.empty(1, dtype)
    return as_strided(one, shape, contiguous(shape, one.itemsize))


def walk(shape: Sequence[int], *strides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Return where each index of a shape lies by each of these strides, in C order."""
    for index in np.ndindex(*shape):
        yield tuple(sum(i * s for i, s in zip(index, mine, strict=False)) for mine in strides)


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided part of a buffer; its offset and strides are in elements."""

    buffer: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def contiguous(self) -> bool:
        """Whether it is one run in C order."""
        axes = [i for i, length in enumerate(self.shape) if length != 1]
        return self.order == tuple(axes)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The order in memory of the axes that are not of length 1; None if it is not one run."""
        axes = [i for i, length in enumerate(self.shape) if length != 1]
        order = sorted(axes, key=lambda i: -self.strides[i])
        run = 1
        for axis in reversed(order):
            if self.strides[axis] != run:
                return None
            run *= self.shape[axis]
        return tuple(order)

    @property
    def turned(self) -> Self:
        """The transpose of its matrices."""
        (*batch, m, n), (*steps, row, column) = self.shape, self.strides
        return replace(self, shape=(*batch, n, m), strides=(*steps, column, row))

    def axes(self, order: Sequence[int]) -> Self:
        """Return it with its axes in another order."""
        shape, strides = (tuple(x[i] for i in order) for x in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def part(self, axis: int, first: int, last: int) -> Self:
        """Return a range of one axis; all of it if the axis is not there (-1) or has length 1."""
        if axis < 0 or self.shape[axis] == 1:
            return self
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + first * self.strides[axis])

    def batch_steps(self, axes: int) -> tuple[int, ...]:
        """Return the strides of `axes` batch axes: 0 of one that it repeats, or lacks."""
        own = zip(self.shape[:-2], self.strides[:-2], strict=True)
        steps = tuple(0 if length == 1 else stride for length, stride in own)
        return (0,) * (axes - len(steps)) + steps

    def summed_to(self, target: Self) -> tuple[Self, Self, int]:
        """Return what is summed over the axes along which `target` was broadcast to it: planes.

        The planes are it with those axes first. With them come the target with all its axes, those
        of the sum of length 1, and the number of the planes.
        """
        lead = len(self.shape) - len(target.shape)
        shape, strides = (1,) * lead + target.shape, (0,) * lead + target.strides
        summed = [i for i, length in enumerate(shape) if length != self.shape[i]]
        planes = self.axes([*summed, *(i for i in range(len(shape)) if i not in summed)])
        count = prod(self.shape[i] for i in summed)
        return planes, replace(target, shape=shape, strides=strides), count
