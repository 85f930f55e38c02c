"""Weights that a network's products read from a ring of slices in shared memory.

A product has one factor in the tile, the other in memory: a matrix A whose rows are runs of memory,
the weights or (TURNED) their transpose. Slices of A are copied into the stages of a ring (cp.async)
while others are multiplied, so a block keeps some slices of a layer's weights and not all of them.
A slice *down* (DOWN) is SLICE rows, for X A; one *across* is SLICE columns, for X A'. Both are
SLICE values of K, in the order of K: the sums are those of weights that lie there whole.

A thread waits for its own copies, and the barrier for those of all threads. At this barrier the
slice before has been read too, so its stage is the next to be filled: a slice takes one barrier.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the plan.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.network import left_at, own_row, right_at, right_back_at


def copy_unit(memory, to, address, inside, beyond):
    """Copy neighbours of a row, of which `beyond` lie before its end; 0 where there are none."""
    if WIDE and FULL:
        COPY_FEW(memory, to, address)
    elif WIDE:
        COPY_SOME(memory, to, address, min(max(beyond, 0), FEW) * SIZE if inside else 0)
    else:
        COPY_ONE(memory, to, address, SIZE if inside and beyond > 0 else 0)


def copy_slice(memory, t, weights, step, rows, columns, number):
    """Copy a slice of a matrix to its stage; neighbouring threads have neighbours of a row."""
    wide = (WIDTH if DOWN else SLICE) // UNIT
    down, across = t // wide, t % wide * UNIT
    to = WEIGHTS_AT + number % STAGES * STAGE + down * SLICE_PITCH + across
    if DOWN:
        down += number * SLICE
    else:
        across += number * SLICE
    address = weights + (down * step + across) * SIZE
    for v in unrolled(SLICE * WIDTH // (UNIT * THREADS)):
        further = v * (UNIT * THREADS // (WIDTH if DOWN else SLICE))
        here, inside = address + further * step * SIZE, down + further < rows
        copy_unit(memory, to + further * SLICE_PITCH, here, inside, columns - across)


def oriented(row, column, rows, columns):
    """Return A's step from a row to the next, its rows and columns."""
    if TURNED:
        return column, columns, rows
    return row, rows, columns


def slices_of(rows, columns):
    """Return how many slices have the values of K."""
    if DOWN:
        return (rows + (SLICE - 1)) // SLICE
    return (columns + (SLICE - 1)) // SLICE


def open_ring(memory, t, weights, row, column, rows, columns):
    """Begin to copy the first slices of weights; nobody reads the ring."""
    step, rows, columns = oriented(row, column, rows, columns)
    slices = slices_of(rows, columns)
    for number in unrolled(STAGES - 1):
        if number < slices:
            copy_slice(memory, t, weights, step, rows, columns, number)
        COMMIT()


def multiply_ring(total, memory, t, weights, row, column, rows, columns, last_row):
    """Add the product of the tile's rows, up to the last one, and a layer's weights to the sums.

    `open_ring` has begun it; behind it the ring is read until the next barrier.
    """
    step, rows, columns = oriented(row, column, rows, columns)
    slices = slices_of(rows, columns)
    _row, warp_row = own_row(t)
    left = left_at(t)
    right = right_at(t) if DOWN else right_back_at(t)
    stage = 0
    for number in range(slices):
        ARRIVED()
        BARRIER()
        if number + (STAGES - 1) < slices:
            copy_slice(memory, t, weights, step, rows, columns, number + (STAGES - 1))
        COMMIT()
        if warp_row < last_row:
            for k in range(0, SLICE, RUN):
                for i in unrolled(RUN // CHUNK):
                    at = k + i * CHUNK
                    PRODUCT(total, memory, left + at, right + stage * STAGE + at * K_STEP)
        left += SLICE
        stage = stage + 1 if stage < STAGES - 1 else 0
