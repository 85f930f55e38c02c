"""The producer of Hopper's kernel: slices of X and Y, on their way to the ring of stages.

One thread asks the copy engine for every slice.
"""

# A template has no annotations but records, and its UPPER-case names are bound by `kernel`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile.engines import tensor_load
from numfuse.backends.cuda.compile.intrinsics import (
    barrier_expect,
    barrier_wait,
    block_count,
    block_index,
    fresh,
    quotient,
)
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.hopper.mainloop import next_stage
from numfuse.backends.cuda.kernels.hopper.records import Fetched, Second, Unit, Work


def unit_at(unit, work: Work):
    """Where a unit of work is.

    GROUP rows of blocks are worked on together, column by column: the slices of X and Y that blocks
    at work share are then found in the second-level cache.
    """
    blocks = work.row_blocks * work.column_blocks
    part, place, block = 0, 0, unit
    if unit >= blocks:  # a division takes as long as the addresses of 16 sums
        outer = quotient(unit, blocks)
        block = unit - outer * blocks
        part = quotient(outer, work.places)
        place = outer - part * work.places
    # computed here: no register keeps it
    strip = quotient(block, GROUP * fresh(work.column_blocks))
    first = strip * GROUP
    height = min(GROUP, work.row_blocks - first)
    rest = block - first * work.column_blocks
    column = quotient(rest, height)
    row = first + rest - column * height
    return Unit(part, place, row * BLOCK_M, column * COLUMNS)


def produce(x: Fetched, y: Fetched, second: Second, shared, work: Work, slice_bytes):
    """The producer's thread: every slice of every unit of this block, in order."""
    full = shared + FULL_AT
    stage, parity, unit = 0, 1, block_index() + 0
    while unit < work.units:
        here: Unit = unit_at(unit, work)
        first = here.part * work.part_slices
        end = min(work.slices, first + work.part_slices)
        at = first
        while at < end:
            barrier = full + 8 * stage
            barrier_wait(barrier + 8 * STAGES, parity)
            barrier_expect(barrier, slice_bytes)
            x_at = shared + stage * STAGE_BYTES
            k, x_place, y_place = at * DEPTH, here.place * x.places, here.place * y.places
            if TWO_TERMS and at >= work.term_slices:
                k -= work.term_slices * DEPTH
                x_place, y_place = here.place * second.x.places, here.place * second.y.places
                fetch_x(second.x, x_at, here.row0, k, x_place, barrier)
                fetch_y(second.y, x_at + X_BYTES, here.column0, k, y_place, barrier)
            else:
                column = here.column0 * (Y_COLUMNS // COLUMNS)
                fetch_x(x, x_at, here.row0, k, x_place, barrier)
                y_at = x_at + X_BYTES
                for _plane in unrolled(PLANES):
                    fetch_y(y, y_at, column, k, y_place, barrier)
                    if TWO_RIGHTS:
                        y1_place = here.place * second.y.places
                        fetch_y(second.y, y_at + 128 * COLUMNS, here.column0, k, y1_place, barrier)
                    y_at += PLANE_BYTES
                    y_place += y.plane
            stage, parity = next_stage(stage, parity)
            at += 1
        unit += block_count()


def fetch_x(x: Fetched, at, row0, k, place, barrier):
    """A slice of X, on its way to shared memory."""
    if PLANES > 1:  # lines of 32 numbers
        for i in unrolled(BLOCK_M // 32 if X_TURNED else 2):
            if X_TURNED:
                tensor_load(at + 8192 * i, x.map, row0 + 32 * i, k, place, barrier)
            else:
                tensor_load(at + 128 * BLOCK_M * i, x.map, k + 32 * i, row0, place, barrier)
    elif X_TURNED:
        for i in unrolled(BLOCK_M // 64):
            tensor_load(at + 8192 * i, x.map, row0 + 64 * i, k, place, barrier)
    else:
        tensor_load(at, x.map, k, row0, place, barrier)


def fetch_y(y: Fetched, at, column0, k, place, barrier):
    """A slice of Y, on its way to shared memory."""
    if Y_TURNED:
        for i in unrolled(Y_COLUMNS // Y_BOX):
            column = column0 + Y_BOX * i
            tensor_load(at + 128 * Y_BOX * i, y.map, column, k, place, barrier)
    else:
        tensor_load(at, y.map, k, column0, place, barrier)
