"""The kernel of `blocks`: a thread block's loop over slices of K, and the epilogue."""

# A kernel has no annotations but records, and its UPPER-case names are bound by `blocks`.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import numpy as np

from numfuse.backends.cuda.compile.accesses import fetch_commit
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.intrinsics import (
    advance,
    block_barrier,
    fresh,
    least,
    most,
    quotient,
    shared_address,
)
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.ampere.epilogue import (
    Position,
    Second,
    finish,
    read_ahead,
    sum_columns,
)

i32, i64 = np.int32, np.int64


def block_at(block_rows, block_columns, parts, first):
    """Where this thread block is.

    Blocks go in columns of GROUP rows of blocks: neighbours in time share operands in the cache.
    """
    number = i32(cuda.blockIdx.x)
    rank = i32(0)
    if CLUSTER > 1:
        cluster = i32(quotient(number, CLUSTER))
        rank = i32(number - cluster * CLUSTER)
        number = cluster
    blocks = i32(block_rows * block_columns)
    plane = i32(quotient(number, blocks))
    number = i32(number - plane * blocks)
    group = i32(quotient(number, i32(GROUP * block_columns)))
    within = i32(number - group * (GROUP * block_columns))
    group_rows = i32(least(i32(block_rows - group * GROUP), GROUP))
    column = i32(quotient(within, group_rows))
    row = i32(group * GROUP + within - column * group_rows)
    place = i32(quotient(plane, parts))
    return Position(plane, place, rank, row, i32(row * BLOCK_M), i32(first + column * COLUMNS))


def block_product(
    x: Array, y: Array, second: Second, ends: Ends, sums, m, n, k, part, parts, chain, first, last
):
    memory = i32(shared_address(cuda.shared.array(0, dtype=types.int64)))
    t = i32(cuda.threadIdx.x)
    block_rows = i32(quotient(m + (BLOCK_M - 1), BLOCK_M))
    block_columns = i32(quotient(last - first + (COLUMNS - 1), COLUMNS))
    here: Position = block_at(block_rows, block_columns, parts, first)
    place, row0, column0 = here.place, here.row0, here.column0
    if READS:
        read_ahead(ends, m, n, here)
    number = i32(here.plane - place * parts)
    if TWO_TERMS:
        # the planes of the second term are behind those of the first
        terms = i32(parts >> 1)
        if number >= terms:
            number = i32(number - terms)
            x.address, y.address = second.x, second.y.address
    k0 = i32(here.rank * part) if CLUSTER > 1 else i32(number * part)
    k_left = i32(least(i32(k - k0), part))

    x_own, x_along = X_FIRST(t)
    y_own, y_along = Y_FIRST(t)
    own_column = y_own
    first_column, end_column = column0, n
    if WOVEN:
        first_column, end_column = i32(2 * column0), i32(2 * n)
    if TWO_SUMS and not WOVEN:
        # each right factor has one half of the columns of a step, and so of its threads
        if y_own >= Y_OWN_GAP:
            own_column = i32(y_own - Y_OWN_GAP)
            y.address = second.y.address
            y.place = second.y.place
            y.row = second.y.row
            y.column = second.y.column
    x_at = x.address + place * x.place + i64(row0 + x_own) * x.row + i64(k0 + x_along) * x.column
    y_at = y.address + place * y.place
    y_at = y_at + i64(first_column + own_column) * y.column + i64(k0 + y_along) * y.row
    x_left, y_left = i32(m - row0 - x_own), i32(end_column - first_column - own_column)
    # each copy is of values that all lie inside of the factor's own axis, or all outside
    whole = (row0 + BLOCK_M <= m or m % X_ABREAST == 0) and (
        column0 + COLUMNS <= n or end_column % Y_ABREAST == 0
    )
    x_step, y_step = x.row * X_OWN_GAP, y.column * Y_OWN_GAP
    x_k_step = x.column * X_K_STEP - x.row * X_BACK
    y_k_step = y.row * Y_K_STEP - y.column * Y_BACK
    x_slice, y_slice = x.column * BLOCK_K, y.row * BLOCK_K
    # LLVM would compute these in the loop, at every use
    x_to = fresh(i32(memory + x_own * X_OWN_OFFSET + x_along * X_K_START))
    y_to = fresh(i32(memory + X_BYTES + y_own * Y_OWN_OFFSET + y_along * Y_K_START))

    if WAITS == "first":
        grid_wait()
    if RELEASES:
        grid_release()
    # A factor that goes through registers is put two slices ahead, and loaded one more. (As far
    # ahead as the copies go, each slice before the first product would wait for the one before.)
    k_second, k_third = i32(k_left - BLOCK_K), i32(k_left - 2 * BLOCK_K)
    if X_HELD:
        x_first = cuda.local.array(X_HELD, dtype=X_REGISTER)
        x_held = cuda.local.array(X_HELD, dtype=X_REGISTER)
        for i in unrolled(X_HELD):
            x_first[i], x_held[i] = X_REGISTER(0), X_REGISTER(0)
        X_AHEAD(x_first, x_at, x_left, k_left, x_along, whole, x_step, x_k_step)
        x_at = x_at + x_slice
        X_AHEAD(x_held, x_at, x_left, k_second, x_along, whole, x_step, x_k_step)
        x_at = x_at + x_slice
    if Y_HELD:
        y_first = cuda.local.array(Y_HELD, dtype=Y_REGISTER)
        y_held = cuda.local.array(Y_HELD, dtype=Y_REGISTER)
        for i in unrolled(Y_HELD):
            y_first[i], y_held[i] = Y_REGISTER(0), Y_REGISTER(0)
        Y_AHEAD(y_first, y_at, y_left, k_left, y_along, whole, y_step, y_k_step)
        y_at = y_at + y_slice
        Y_AHEAD(y_held, y_at, y_left, k_second, y_along, whole, y_step, y_k_step)
        y_at = y_at + y_slice
    write = i32(0)
    while write < STAGES * STAGE:
        # (what lies behind the last slice is never multiplied, and so nobody writes zeros there)
        if k_left > 0:
            if X_COPIES:
                X_MASKED(i32(x_to + write), x_at, x_left, k_left, x_along, x_step, x_k_step)
            if Y_COPIES:
                Y_MASKED(i32(y_to + write), y_at, y_left, k_left, y_along, y_step, y_k_step)
        fetch_commit()
        if X_COPIES:
            x_at = x_at + x_slice
        if Y_COPIES:
            y_at = y_at + y_slice
        k_left = i32(k_left - BLOCK_K)
        write = i32(write + STAGE)
    if X_HELD:
        X_PUT(x_to, x_first)
        X_PUT(i32(x_to + STAGE), x_held)
        X_AHEAD(x_held, x_at, x_left, k_third, x_along, whole, x_step, x_k_step)
        x_at = x_at + x_slice
    if Y_HELD:
        Y_PUT(y_to, y_first)
        Y_PUT(i32(y_to + STAGE), y_held)
        Y_AHEAD(y_held, y_at, y_left, k_third, y_along, whole, y_step, y_k_step)
        y_at = y_at + y_slice

    total = cuda.local.array(TOTALS, dtype=ACCUMULATOR)
    now = cuda.local.array(FACTORS, dtype=FACTOR)
    CLEAR(total)
    if KEPT == "registers":
        kept = cuda.local.array(TOTALS, dtype=ACCUMULATOR)
        CLEAR(kept)
    x_from, y_from = X_FROM(t, memory), Y_FROM(t, i32(memory + X_BYTES))
    WAIT_FIRST()
    block_barrier()
    FIRST_FACTORS(now, x_from, y_from)
    stage, ended = i32(0), i32(0)
    # A chain of sums is `chain` values of K long; the last ends where K does. (In the prologue
    # k_left has gone ahead of what is multiplied by the slices that are on their way.)
    end = i32(-STAGES * BLOCK_K)
    while k_left > end:
        stop = i32(most(i32(k_left - chain), end)) if KEPT else end
        while k_left > stop:
            MULTIPLY_SLICE(total, now, i32(x_from + stage), i32(y_from + stage))
            # Every thread has read this slice, but for what it has in registers, and the next one
            # is there: its first factors, and the copies of the slice that takes this one's place,
            # come between the parts of the arithmetic that is left.
            WAIT_NEXT()
            block_barrier()
            x_next, y_next = i32(x_to + stage), i32(y_to + stage)
            stage = i32(stage + STAGE) if stage < (STAGES - 1) * STAGE else i32(0)
            if X_HELD or Y_HELD:
                to = i32(stage + STAGE) if stage < (STAGES - 1) * STAGE else i32(0)
                k_ahead = i32(k_left + (STAGES - 3) * BLOCK_K)
            if X_HELD:
                X_PUT(i32(x_to + to), x_held)
                X_AHEAD(x_held, x_at, x_left, k_ahead, x_along, whole, x_step, x_k_step)
            if Y_HELD:
                Y_PUT(i32(y_to + to), y_held)
                Y_AHEAD(y_held, y_at, y_left, k_ahead, y_along, whole, y_step, y_k_step)
            if whole and k_left >= BLOCK_K:
                x_run, y_run = x_at, y_at
                for q in unrolled(PARTS):
                    MULTIPLY_PART(total, now, q, i32(x_from + stage), i32(y_from + stage))
                    for c in unrolled(q * X_COPIES // PARTS, (q + 1) * X_COPIES // PARTS):
                        own = c % X_OWN_REPEATS * X_OWN_GAP
                        X_COPY(x_next + X_OFFSETS[c], x_run, x_left, own)
                        x_run = advance(x_run, x_step if (c + 1) % X_OWN_REPEATS else x_k_step)
                    for c in unrolled(q * Y_COPIES // PARTS, (q + 1) * Y_COPIES // PARTS):
                        own = c % Y_OWN_REPEATS * Y_OWN_GAP
                        Y_COPY(y_next + Y_OFFSETS[c], y_run, y_left, own)
                        y_run = advance(y_run, y_step if (c + 1) % Y_OWN_REPEATS else y_k_step)
            else:
                if k_left > 0:
                    if X_COPIES:
                        X_MASKED(x_next, x_at, x_left, k_left, x_along, x_step, x_k_step)
                    if Y_COPIES:
                        Y_MASKED(y_next, y_at, y_left, k_left, y_along, y_step, y_k_step)
                for q in unrolled(PARTS):
                    MULTIPLY_PART(total, now, q, i32(x_from + stage), i32(y_from + stage))
            fetch_commit()
            x_at, y_at = x_at + x_slice, y_at + y_slice
            k_left = i32(k_left - BLOCK_K)
        if KEPT == "registers":
            if k_left > end:
                ADD(kept, total)
                CLEAR(total)
        elif KEPT:
            if k_left > end:
                if ended:
                    ADD_KEPT(total, i32(memory + KEPT_AT + t * 16))
                KEEP(total, i32(memory + KEPT_AT + t * 16))
                ended = i32(1)
    if KEPT == "registers":
        ADD(total, kept)
    elif KEPT:
        if ended:
            ADD_KEPT(total, i32(memory + KEPT_AT + t * 16))
    WAIT_ALL()

    summed = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    finish(total, memory, ends, second, summed, m, n, here)
    if SUMS:
        sums += (i64(place) * block_rows + here.block_row) * n * ACC_BYTES
        sum_columns(memory, summed, sums, n, here.rank, column0)
    if CLUSTER > 1:
        BARRIER()  # a block's shared memory is there until all have read it
    if WAITS == "last":
        grid_wait()  # what comes behind waits for this launch alone
