"""Parts of a backward: blocks of rows or of batch elements, so that grad_pre is never held whole.

A block depends on the problem alone, never on threads, and blocks are taken in their order: so the
order of every sum over them is fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from numfuse.backends.cpu import launch
from numfuse.backends.cpu.descriptors import Operand, Plan


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
        # One row that serves all is never cut (and one row in all is a block of its own).
        return x[(*where, self.rows)] if by_rows and x.shape[-2] != 1 else x[tuple(where)]

    def shape(self, shape: tuple[int, ...], by_rows: bool) -> tuple[int, ...]:
        """The shape of its part of an operand of this shape."""
        *sizes, rows = self.sizes
        *own, length, columns = shape
        sizes = sizes[len(sizes) - len(own) :]
        part = (1 if size == 1 else s for size, s in zip(own, sizes, strict=True))
        return (*part, rows if by_rows and length != 1 else length, columns)

    def turns(
        self, summed: Sequence[tuple[int, ...]], batch: tuple[int, ...], m: int
    ) -> tuple[Turn, ...]:
        """Its turns in the sums of d_a, d_b and d_bias: each over its own batch axes, all but the
        first over the m rows as well."""
        found = []
        for i, axes in enumerate(summed):
            parts = [(self.batch[axis], batch[axis]) for axis in axes]
            if i > 0:
                parts.append((self.rows, m))
            first = all(s.start == 0 for s, _ in parts)
            found.append(Turn(first, all(s.stop == size for s, size in parts)))
        return tuple(found)


class Total(NamedTuple):
    """An array beside a gradient in which that grows, by its number among those of a call."""

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Held(NamedTuple):
    """An array of a block's own, `offset` bytes into the call's memory."""

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


class Launches(NamedTuple):
    """The launches of a block, by phases, and the block's own arrays that these launches need.

    Each phase may read what the phases before it wrote (grad_pre, then all that reads grad_pre).
    """

    phases: list[list[Plan]]
    own: list[Operand]

    @property
    def plans(self) -> list[Plan]:
        return [plan for phase in self.phases for plan in phase]


class Move(NamedTuple):
    """A pass that copies part of an array to an array of the block's own, or back."""

    plan: Plan
    #: How many bytes into each of the two, by number, it begins.
    offsets: dict[int, int]
    #: The same as a launch of its own.
    alone: launch.Sequence


class Step(NamedTuple):
    """The work that is run for one block, or for everything where `block` is None."""

    block: Block | None
    turns: tuple[Turn, ...]
    launches: Launches
    #: Where its own arrays lie where each plan is a launch of its own.
    held: list[Held]
    #: Rows that are gathered before all this, and scattered afterwards.
    before: list[Move]
    after: list[Move]


class Schedule(NamedTuple):
    """A backward by blocks, for every call of its form."""

    steps: list[Step]
    #: Bytes of its memory: the workspaces of threads, then what the first block holds.
    size: int
    totals: list[Total]


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
