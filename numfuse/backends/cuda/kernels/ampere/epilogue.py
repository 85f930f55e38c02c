"""How a block of `gemm` ends: its sums go through shared memory to whole rows of the result."""

# A kernel has no annotations but records, and its UPPER-case names are bound by `blocks`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.accesses import prefetch
from numfuse.backends.cuda.compile.intrinsics import least, quotient
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.epilogue import element, in_bytes
from numfuse.backends.cuda.plan.product import Product, Slot

i32, i64 = np.int32, np.int64


@dataclass
class Position:
    """Where a thread block is; a plane is a part of a place."""

    plane: Any
    place: Any
    #: In the cluster.
    rank: Any
    block_row: Any
    #: The first of the block.
    row0: Any
    column0: Any


@dataclass
class Second:
    """The arrays that a product of two sums or terms has, and one of a single sum has not."""

    #: The right factor of the second sum or term.
    y: Array
    #: Another operand as the bias is one, and a third result.
    bias: Array
    pre: Array
    #: The address of the left factor of the second term, which has the strides of the first one's.
    x: Any

    @classmethod
    def of(cls, product: Product, y: Array) -> Second:
        """Return those of a product, whose second right factor is `y`; strides in bytes."""
        p = product
        x = 0 if p.x1 is None else Slot("x1")
        return cls(y, in_bytes(Slot("bias1"), p.bias1), in_bytes(Slot("pre1"), p.pre1), x)


def place_of(column):
    """Where a column of the result lies among a block's sums, of two sums the first one's."""
    if WOVEN:
        return i32(2 * column)
    if TWO_SUMS:
        return i32(((column >> GAP_BITS) << (GAP_BITS + 1)) + (column & ((1 << GAP_BITS) - 1)))
    return column


def read_ahead(ends: Ends, m, n, here: Position):
    """Ask for what a block's end reads: the second-level cache has it when its sums are made."""
    t = i32(cuda.threadIdx.x)
    if BIAS:
        c = i32(t)
        while c < COLUMNS:
            column = i32(here.column0 + c)
            if column < n:
                prefetch(ends.bias.address + element(ends.bias, here.place, 0, i64(column)))
            c = i32(c + THREADS)
    if EXTRA:
        i = i32(t)
        while i < BLOCK_M * LINES:
            r = i32(quotient(i, LINES))
            row = i32(here.row0 + r)
            column = i32(here.column0 + (i - r * LINES) * LINE_VALUES)
            # (what all rows share is asked for once)
            if row < m and column < n and (r == 0 or ends.extra.row != 0):
                own = element(ends.extra, here.place, i64(row), i64(column))
                prefetch(ends.extra.address + own)
            i = i32(i + THREADS)


def finish(total, memory, ends: Ends, second: Second, summed, m, n, here: Position):
    """The epilogue of a block: thread (c, r) has VALUES columns of every ROW_STEP-th row."""
    t = i32(cuda.threadIdx.x)
    c, r0 = i32(t & (COLUMN_THREADS - 1)), i32(t >> COLUMN_BITS)
    place, row0 = here.place, here.row0
    column = i32(here.column0 + c * COLUMN_FIRST)
    offset = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    offset1 = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    value1 = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    added = cuda.local.array(VALUES * ROWS, dtype=ACCUMULATOR)
    value = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    result = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    begin_columns(offset, offset1, summed, ends, second, place, column, n)
    first = i64(column)
    ends.out.address += here.plane * ends.out.place + first * ends.out.column
    ends.extra.address += place * ends.extra.place + first * ends.extra.column
    # (where K is cut only planes are stored: of a second sum, too)
    ends.pre.address += here.plane * ends.pre.place + first * ends.pre.column
    second.pre.address += place * second.pre.place + first * second.pre.column
    put_to = PUT_TO(t, memory)
    take_from = i32(memory + r0 * PUT_PITCH)

    turn = i32(0)
    while turn < PASSES:
        BARRIER()
        for q in unrolled(PASSES):
            if turn == q:
                PUT_TOTALS(total, q, put_to)
        BARRIER()
        # a block of a cluster finishes its share of the rows: TAKE adds up what all blocks have
        r = i32(r0 + here.rank * (ROWS * ROW_STEP))
        while r < PASS_ROWS:
            # (rows that no result has would take as long, where a formula is a long one)
            nearest = i32(row0 + PASS_ROW(r, turn))
            for u in unrolled(1, ROWS):
                nearest = i32(least(nearest, row0 + PASS_ROW(i32(r + u * ROW_STEP), turn)))
            if nearest < m:
                if EXTRA:
                    for u in unrolled(ROWS):
                        row = i32(row0 + PASS_ROW(i32(r + u * ROW_STEP), turn))
                        load_row(added, u * VALUES, ends.extra, row, column, m, n)
                for u in unrolled(ROWS):
                    row = i32(row0 + PASS_ROW(i32(r + u * ROW_STEP), turn))
                    take_row = i32(take_from + (r - r0 + u * ROW_STEP) * PUT_PITCH)
                    if WOVEN:
                        take_both(value, value1, take_row, c)
                    else:
                        take_sums(value, take_row, c)
                    if TWO_SUMS and not WOVEN:
                        take_sums(value1, i32(take_row + (ACC_BYTES << GAP_BITS)), c)
                    finish_row(
                        value,
                        value1,
                        offset,
                        offset1,
                        added,
                        u * VALUES,
                        result,
                        summed,
                        ends,
                        second,
                        row,
                        column,
                        m,
                        n,
                    )
            r = i32(r + CLUSTER * (ROWS * ROW_STEP))
        turn = i32(turn + 1)


def begin_columns(offset, offset1, summed, ends: Ends, second: Second, place, column, n):
    """A thread's biases of its columns, the first of which is `column`; their sums begin at 0."""
    for v in unrolled(VALUES):
        offset[v] = ACCUMULATOR(0)
        offset1[v] = ACCUMULATOR(0)
        summed[v] = ACCUMULATOR(0)
        own = i64(column) + v * COLUMN_STEP
        if BIAS:
            if own < n:
                along = place * ends.bias.place + own * ends.bias.column
                offset[v] = LOAD_BIAS(ends.bias.address + along)
        if BIAS1:
            if own < n:
                along = place * second.bias.place + own * second.bias.column
                offset1[v] = LOAD_BIAS1(second.bias.address + along)


def finish_row(
    value,
    value1,
    offset,
    offset1,
    added,
    first,
    result,
    summed,
    ends: Ends,
    second: Second,
    row,
    column,
    m,
    n,
):
    """The results of a thread's sums of a row; `added` has its extra operand from `first` on."""
    finish_values(value, value1, offset, offset1, added, first, result)
    if row < m:
        if WIDE:
            if column < n:
                if PRE:
                    STORE_PRE(cell(ends.pre, row, 0), value)
                if PRE1:
                    STORE_PRE1(cell(second.pre, row, 0), value1)
                STORE_OUT(cell(ends.out, row, 0), result)
        else:
            for v in unrolled(VALUES):
                if column + v * COLUMN_STEP < n:
                    if PRE:
                        STORE_PRE(cell(ends.pre, row, v), value[v])
                    if PRE1:
                        STORE_PRE1(cell(second.pre, row, v), value1[v])
                    STORE_OUT(cell(ends.out, row, v), result[v])
        if SUMS:
            for v in unrolled(VALUES):
                summed[v] = summed[v] + result[v]


def finish_values(value, value1, offset, offset1, added, first, result):
    """The results of VALUES sums: the first in `result`, others in the places of the sums."""
    for v in unrolled(VALUES):
        extra = added[first + v]
        if TWO_SUMS:
            z, z1, bias, bias1 = value[v], value1[v], offset[v], offset1[v]
            if PRE1:
                result[v], value[v], value1[v] = EPILOGUE(z, z1, bias, bias1, extra)
            elif PRE:
                result[v], value[v] = EPILOGUE(z, z1, bias, bias1, extra)
            else:
                result[v] = EPILOGUE(z, z1, bias, bias1, extra)
        elif PRE:
            result[v], value[v] = EPILOGUE(value[v], offset[v], extra)
        else:
            result[v] = EPILOGUE(value[v], offset[v], extra)


def take_sums(value, at, c):
    """A thread's sums of a row, which lies at `at`."""
    if WIDE:
        taken = TAKE(i32(at + place_of(i32(c * COLUMN_FIRST)) * ACC_BYTES))
        for v in unrolled(VALUES):
            value[v] = taken[v]
    else:
        for v in unrolled(VALUES):
            value[v] = TAKE(i32(at + place_of(i32(c + v * COLUMN_STEP)) * ACC_BYTES))


def take_both(value, value1, at, c):
    """A thread's two sums of each column of a row, which lie side by side."""
    if WIDE:
        at = i32(at + place_of(i32(c * COLUMN_FIRST)) * ACC_BYTES)
        for h in unrolled(2):
            taken = TAKE(i32(at + h * (VALUES * ACC_BYTES)))
            for v in unrolled(VALUES // 2):
                value[h * (VALUES // 2) + v] = taken[2 * v]
                value1[h * (VALUES // 2) + v] = taken[2 * v + 1]
    else:
        for v in unrolled(VALUES):
            own = i32(at + place_of(i32(c + v * COLUMN_STEP)) * ACC_BYTES)
            value[v] = TAKE(own)
            value1[v] = TAKE(i32(own + ACC_BYTES))


def cell(array: Array, row, v):
    """Where a row's value of this thread is, of an array that begins at its first column."""
    return array.address + i64(row) * array.row + (v * COLUMN_STEP) * array.column


def load_row(added, first, extra: Array, row, column, m, n):
    """A thread's values of a row of the residual or grad, to `added` from `first` on."""
    for v in unrolled(VALUES):
        added[first + v] = ACCUMULATOR(0)
    if row < m:
        if WIDE:
            if column < n:
                loaded = LOAD_EXTRA(cell(extra, row, 0))
                for v in unrolled(VALUES):
                    added[first + v] = loaded[v]
        else:
            for v in unrolled(VALUES):
                if column + v * COLUMN_STEP < n:
                    added[first + v] = LOAD_EXTRA(cell(extra, row, v))


def sum_columns(memory, summed, sums, n, rank, column0):
    """The sums of a block's columns: those of the threads, in the order of their rows."""
    t = i32(cuda.threadIdx.x)
    c, r0 = i32(t & (COLUMN_THREADS - 1)), i32(t >> COLUMN_BITS)
    BARRIER()
    for v in unrolled(VALUES):
        at = i32(memory + (r0 * BLOCK_N + c * COLUMN_FIRST + v * COLUMN_STEP) * ACC_BYTES)
        PUT_ONE(at, summed[v])
    BARRIER()
    at = i32(t)
    while at < BLOCK_N:
        if rank == 0 and column0 + at < n:
            total = ACCUMULATOR(0)
            for q in unrolled(ROW_STEP):
                total = total + TAKE_ONE(i32(memory + (q * BLOCK_N + at) * ACC_BYTES))
            STORE_SUM(sums + (column0 + at) * ACC_BYTES, total)
        at = i32(at + THREADS)
