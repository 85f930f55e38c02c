"""Parts of a backward: blocks of rows or of batch elements, so that grad_pre is never held whole.

A block depends on the problem alone, never on threads, and blocks are taken in their order: so the
order of every sum over them is fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """Whether a block is the first, and the last, of those that a gradient is summed over."""

    first: bool = True
    last: bool = True


class Block(NamedTuple):
    """Some rows of some batch elements."""

    batch: tuple[slice, ...]
    rows: slice

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its batch shape, then its rows."""
        return tuple(s.stop - s.start for s in (*self.batch, self.rows))

    def of(self, x: np.ndarray, by_rows: bool) -> np.ndarray:
        """Its part of an operand (..., rows or any, columns); a broadcast axis stays as it is."""
        own = x.shape[:-2]
        parts = self.batch[len(self.batch) - len(own) :]
        where = [slice(None) if size == 1 else s for size, s in zip(own, parts, strict=True)]
        return x[(*where, self.rows)] if by_rows else x[tuple(where)]

    def turn(self, summed: tuple[int, ...], batch: tuple[int, ...], m: int | None = None) -> Turn:
        """Its turn in a sum over the axes `summed` of `batch`, and over m rows where m is given."""
        parts = [(self.batch[axis], batch[axis]) for axis in summed]
        if m is not None:
            parts.append((self.rows, m))
        return Turn(all(s.start == 0 for s, _ in parts), all(s.stop == size for s, size in parts))


def cut(batch: tuple[int, ...], m: int, rows: int, members: int) -> Iterator[Block]:
    """Blocks of `rows` rows of up to `members` batch elements; the first one is the largest."""
    axes: list[list[slice]] = []
    for size in reversed(batch):
        step = max(1, min(size, members))
        members //= max(1, size)
        axes.insert(0, _pieces(size, step))
    axes.append(_pieces(m, max(1, rows)))
    for *parts, part in itertools.product(*axes):
        yield Block(tuple(parts), part)


def _pieces(size: int, step: int) -> list[slice]:
    """A length in slices of `step`; an empty one is a slice too: its sums are zero."""
    return [slice(i, min(i + step, size)) for i in range(0, max(1, size), step)]
