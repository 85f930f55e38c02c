"""How a block of `gemm` ends where its rows are those of all members of points (`..members`).

Thread (c, r) has 16 bytes of columns of every ROW_STEP-th row, as in `epilogue`. What a point has
alone is loaded where the thread comes to another point; the sums of points wait in shared memory,
where each thread has a place for every point of the block, and are added up at the end in the order
of the threads' rows.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by `blocks`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.accesses import prefetch
from numfuse.backends.cuda.compile.intrinsics import quotient
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import rebound, unrolled
from numfuse.backends.cuda.kernels import members
from numfuse.backends.cuda.kernels.ampere.epilogue import Position, Second
from numfuse.backends.cuda.kernels.ampere.gemm import block_product
from numfuse.backends.cuda.kernels.members import MemberEnds

if TYPE_CHECKING:
    from numfuse.backends.cuda.kernels.ampere.blocks import Engine
    from numfuse.backends.cuda.plan.product import Product

i32, i64 = np.int32, np.int64


def read_ahead(ends: MemberEnds, m, n, here: Position):
    """Ask for the forward's sums of the block: the second-level cache has them at its end."""
    i = i32(cuda.threadIdx.x)
    while i < BLOCK_M * LINES:
        r = i32(quotient(i, LINES))
        row = i32(here.row0 + r)
        column = i32(here.column0 + (i - r * LINES) * LINE_VALUES)
        point = i32(quotient(row, ends.members))
        member = i32(row - point * ends.members)
        if row < m and column < n and 0 < member and member <= ends.directions:
            prefetch(cell(ends.kept, point, member) + i64(column) * ends.kept.column)
        i = i32(i + THREADS)


def finish(total, memory, ends: MemberEnds, second: Second, summed, m, n, here: Position):
    """The end of a block; steps are in bytes, and rows are whole accesses of 16."""
    t = i32(cuda.threadIdx.x)
    c, r0 = i32(t & (COLUMN_THREADS - 1)), i32(t >> COLUMN_BITS)
    row0 = here.row0
    column = i32(here.column0 + c * VALUES)
    first = i64(column)
    value = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    result = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    before = cuda.local.array(VALUES * ROWS, dtype=ACCUMULATOR)
    # of each column of a thread: the slopes, and what a bend is weighted with
    alone = cuda.local.array(VALUES * 4, dtype=ACCUMULATOR)
    for v in unrolled(VALUES):
        summed[v] = ACCUMULATOR(0)
        for s in unrolled(4):
            alone[s * VALUES + v] = ACCUMULATOR(0)
    ends.planes.address += first * ends.planes.column
    ends.kept.address += first * ends.kept.column
    ends.out.address += first * ends.out.column
    put_to = PUT_TO(t, memory)
    take_from = i32(memory + r0 * PUT_PITCH + c * (VALUES * ACC_BYTES))
    own = i32(memory + TABLE_AT + (r0 * ends.slots * BLOCK_N + c * VALUES) * ACC_BYTES)
    BARRIER()
    if SUMMED:
        slot = i32(0)
        while slot < ends.slots:
            for v in unrolled(VALUES):
                PUT_ONE(i32(own + (slot * BLOCK_N + v) * ACC_BYTES), ACCUMULATOR(0))
            slot = i32(slot + 1)
    point0 = i32(quotient(row0, ends.members))
    now = i32(-1)

    turn = i32(0)
    while turn < PASSES:
        BARRIER()
        for q in unrolled(PASSES):
            if turn == q:
                PUT_TOTALS(total, q, put_to)
        BARRIER()
        r = i32(r0)
        while r < PASS_ROWS:
            if READS:
                for u in unrolled(ROWS):
                    row = i32(row0 + PASS_ROW(i32(r + u * ROW_STEP), turn))
                    point = i32(quotient(row, ends.members))
                    member = i32(row - point * ends.members)
                    load_before(before, u * VALUES, ends, row < m and column < n, point, member)
            for u in unrolled(ROWS):
                row = i32(row0 + PASS_ROW(i32(r + u * ROW_STEP), turn))
                point = i32(quotient(row, ends.members))
                member = i32(row - point * ends.members)
                taken = TAKE(i32(take_from + (r - r0 + u * ROW_STEP) * PUT_PITCH))
                for v in unrolled(VALUES):
                    value[v] = taken[v]
                if row < m and column < n:
                    if 0 < member and member <= ends.directions:
                        if point != now:
                            if SUMMED:
                                add_to(own, i32(now - point0), summed)
                            now = point
                            load_alone(alone, ends.planes, point)
                        weight = ACCUMULATOR(0)
                        if WEIGHTED:
                            weight = LOAD_WEIGHT(ends.weights + i64(member - 1) * ACC_BYTES)
                        for v in unrolled(VALUES):
                            kept = before[u * VALUES + v] if READS else ACCUMULATOR(0)
                            result[v], more = ENDING(
                                value[v], kept, weight, alone[3 * VALUES + v],
                                alone[v], alone[VALUES + v], alone[2 * VALUES + v],
                            )  # fmt: skip
                            if SUMMED:
                                summed[v] = summed[v] + more
                        STORE_OUT(cell(ends.out, point, member), result)
                        if KEEPS:
                            STORE_KEPT(cell(ends.kept, point, member), value)
                    elif (member == 0) == RIDES:
                        if KEEPS:
                            STORE_KEPT(cell(ends.kept, point, member), value)
                        else:
                            STORE_OUT(cell(ends.out, point, member), value)
            r = i32(r + ROWS * ROW_STEP)
        turn = i32(turn + 1)
    if SUMMED:
        add_to(own, i32(now - point0), summed)
        BARRIER()
        store_table(i32(memory + TABLE_AT), ends.table, ends.slots, here, n)


def cell(array: Array, point, member):
    """Return where a thread's columns of a member are, of an array that begins at the first."""
    return array.address + i64(point) * array.place + i64(member) * array.row


def load_before(before, first, ends: MemberEnds, there, point, member):
    """The forward's sums of a direction, to `before` from `first` on; zeros for other rows."""
    for v in unrolled(VALUES):
        before[first + v] = ACCUMULATOR(0)
    if there and 0 < member and member <= ends.directions:
        loaded = LOAD_KEPT(cell(ends.kept, point, member))
        for v in unrolled(VALUES):
            before[first + v] = loaded[v]


def load_alone(alone, planes: Array, point):
    """Load what a point has alone, of a thread's columns."""
    at = planes.address + i64(point) * planes.row
    for s in unrolled(SLOPES):
        loaded = LOAD_PLANE(at + s * planes.place)
        for v in unrolled(VALUES):
            alone[s * VALUES + v] = loaded[v]
    if BENT:
        turned = LOAD_PLANE(at + SLOPES * planes.place)
        for v in unrolled(VALUES):
            alone[3 * VALUES + v] = turned[v]


def add_to(own, slot, summed):
    """Add a thread's sums to those of a point in shared memory, and begin anew; slot < 0: none."""
    if slot >= 0:
        at = i32(own + slot * (BLOCK_N * ACC_BYTES))
        for v in unrolled(VALUES):
            PUT_ONE(i32(at + v * ACC_BYTES), TAKE_ONE(i32(at + v * ACC_BYTES)) + summed[v])
            summed[v] = ACCUMULATOR(0)


def store_table(at, table, slots, here: Position, n):
    """The sums of a block's points: those of the threads, in the order of their first rows."""
    t = i32(cuda.threadIdx.x)
    while t < slots * BLOCK_N:
        slot = i32(quotient(t, BLOCK_N))
        column = i32(here.column0 + t - slot * BLOCK_N)
        if column < n:
            total = ACCUMULATOR(0)
            for q in unrolled(ROW_STEP):
                total = total + TAKE_ONE(i32(at + (q * slots * BLOCK_N + t) * ACC_BYTES))
            place = (i64(here.block_row) * slots + slot) * n + column
            STORE_SUM(table + place * ACC_BYTES, total)
        t = i32(t + THREADS)


#: The kernel of `gemm` with this end, and its arguments.
PRODUCT: Any = rebound(block_product, Ends=MemberEnds, finish=finish, read_ahead=read_ahead)
ARGUMENTS = Schema(
    PRODUCT, i32="m n k part parts chain first last ends_members ends_directions ends_slots"
)


def table_bytes(product: Product, engine: Engine) -> int:
    """Return the bytes of shared memory up to the end of the sums of points, behind a pass."""
    passed = engine.pass_rows * engine.put_pitch
    if not product.sums or product.members is None:
        return passed
    size, tile = intrinsics.itemsize(product.accumulator), engine.tile
    row_step = tile.threads * 16 // (size * tile.block_n)
    slots = members.slots_of(tile.block_m, product.members.count)
    return passed + row_step * slots * tile.block_n * size


def bindings_of(product: Product, engine: Engine, rows: int) -> dict[str, Any]:
    """Return the UPPER-case names of this end; `rows` are those in flight of other ends.

    What a backward reads of a direction comes from memory, not from a cache, so that twice as many
    rows are on their way.
    """
    acc = product.accumulator
    values = 16 // intrinsics.itemsize(acc)
    row_step = engine.tile.threads * values // engine.tile.block_n
    found = members.bindings_of(product)
    rows = 2 * rows if found["READS"] and engine.pass_rows % (2 * rows * row_step) == 0 else rows
    return found | {
        "SUMS": False,  # (of columns)
        "ROWS": rows,
        "LINES": engine.tile.block_n * intrinsics.itemsize(acc) // tiling.LINE,
        "LINE_VALUES": tiling.LINE // intrinsics.itemsize(acc),
        "TABLE_AT": engine.pass_rows * engine.put_pitch,
        "ACCUMULATOR": getattr(types, acc),
        "LOAD_PLANE": accesses.load(acc, values, acc),
        "LOAD_WEIGHT": accesses.load(acc, 1, acc),
        "LOAD_KEPT": accesses.load(acc, values, acc),
        "STORE_KEPT": accesses.store_array(acc, values, acc),
        "STORE_OUT": accesses.store_array(product.out.dtype, values, acc),
        "STORE_SUM": accesses.store(acc, 1, acc),
        "TAKE_ONE": accesses.load(acc, 1, acc, intrinsics.SHARED),
        "PUT_ONE": accesses.store(acc, 1, acc, intrinsics.SHARED),
    }
