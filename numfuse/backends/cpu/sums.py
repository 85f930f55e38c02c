"""Partial sums of a result, made in the pass that makes it, and what joins them.

Sums over rows are made by chunks of rows, sums over columns by groups of columns; a total of
whichever are fewer. Both lengths depend on the dtype alone, so no order depends on cells or
threads, and nothing of the size of the result is stored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numfuse.backends.cpu import descriptors
from numfuse.backends.cpu.descriptors import Slots
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.launch.sequence import Operand, Plan, temporary
from numfuse.problem.operands import format_of
from numfuse.runtime.specialise import Kernel


class Turn(NamedTuple):
    """Whether a block is the first, and the last, of those that a gradient is summed over."""

    first: bool = True
    last: bool = True


class Partials(NamedTuple):
    """Partial sums (..., count, n), joined over count and the batch axes that a result lacks."""

    x: Operand
    #: They are of "columns", to a row of the result; of "rows", to a column; or of "all".
    of: str = "columns"
    #: A contiguous array of the result's elements, copied to it when their sum is there.
    made: Operand | None = None

    def total(self, name: str, out: Operand) -> Operand:
        """Return where blocks sum up a result: its sums, and the rounding errors made in them."""
        *batch, m, n = (self.made or out).shape
        if self.of == "rows":
            return temporary(f"total {name}", (*batch, 2, m), "float64").turned()
        return temporary(f"total {name}", (*batch, 2, n), "float64")


def summed_axes(gradient: Operand, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of `batch` that a gradient lacks or has with length 1."""
    if not batch:
        return ()
    own = (1,) * (len(batch) - (len(gradient.shape) - 2)) + gradient.shape[:-2]
    return tuple(axis for axis, size in enumerate(batch) if own[axis] == 1 and size != 1)


def partial_sums(
    p: Any,
    name: str,
    out: Operand,
    sizes: tuple[int, ...],
    batch: tuple[int, ...],
    across: bool = False,
) -> Operand:
    """Return the partial sums of what has these sizes.

    They are those of columns, two rows for every chunk of rows; or, `across`, those of rows, a row
    for every group of columns. Batch axes that the gradient has come first in memory: for each of
    its members, what is joined is contiguous rows.
    """
    (m, n), fmt = sizes, format_of(p.acc_dtype)
    if across:
        shape = *batch, -(-n // library.group(format_of(p.dtype))), m
    else:
        shape = *batch, 2 * -(-m // library.chunk(format_of(p.dtype))), n
    if not batch:
        return temporary(name, shape, fmt)
    summed = summed_axes(out, batch)
    inner = [axis for axis, size in enumerate(batch) if size == 1 or axis in summed]
    outer = [axis for axis in range(len(batch)) if axis not in inner]
    order = [*outer, *inner, len(batch), len(batch) + 1]
    made = temporary(name, tuple(shape[axis] for axis in order), fmt)
    steps = dict(zip(order, made.strides, strict=True))
    return made._replace(shape=shape, strides=tuple(steps[axis] for axis in range(len(shape))))


def join(
    partials: Partials,
    out: Operand,
    total: Operand | None,
    turn: Turn,
    batch: tuple[int, ...],
    threads: int,
) -> Plan | None:
    """Join a block's partial sums to those of the blocks before."""
    summed = summed_axes(out, batch)
    outer = [axis for axis, size in enumerate(batch) if size != 1 and axis not in summed]
    sizes = tuple(batch[axis] for axis in outer)
    *_, n = partials.x.shape
    count = math.prod(partials.x.shape[:-1]) // max(1, math.prod(sizes))
    whole = partials.of == "all"
    form = (count * n, 1) if whole else (count, n)
    missing = len(batch) - (len(out.shape) - 2)

    def kept(x: Operand) -> Operand:
        x = x.turned() if partials.of == "rows" else x
        steps = tuple(x.strides[axis - missing] for axis in outer)
        return x._replace(shape=(*sizes, *x.shape[-2:]), strides=(*steps, *x.strides[-2:]))

    return descriptors.join(
        library.join_cell(out.fmt, whole),
        temporary(partials.x.name, (*sizes, *form), partials.x.fmt),
        threads,
        kept(out) if turn.last else None,
        None if turn.first or total is None else kept(total),
        None if turn.last or total is None else kept(total),
    )


def copied(source: Operand, target: Operand, threads: int) -> Plan | None:
    """Return the pass that brings the elements of a contiguous array to a matrix."""
    source = temporary(source.name, target.shape, source.fmt)
    if abs(target.strides[-2]) < abs(target.strides[-1]):
        source, target = source.turned(), target.turned()
    m, n = target.shape
    row, slots = rows.copy(target.fmt, target.fmt), Slots(extra=source, out=target)
    return descriptors.rows(m, n, row, slots, threads)


def growing(acc: str, out: Operand, total: Operand | None, turn: Turn) -> tuple[Kernel, Slots]:
    """Return the row function that stores a block's part of a sum or adds to it, and its operands.

    `total` is where a half type is summed; others are summed in `out`.
    """
    if turn.first and (turn.last or total is None):
        return rows.store(out.fmt), Slots(out=out)
    if turn.first:
        return rows.store(acc), Slots(out=total)
    if total is None or not turn.last:
        return rows.add(acc), Slots(out=total or out)
    return rows.add_and_store(out.fmt), Slots(extra=total, out=out)
