"""The kernel of `blocks`: a thread block's loop over slices of K, and the epilogue."""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import numpy as np

from numfuse.backends.cuda.compile.accesses import fetch_commit
from numfuse.backends.cuda.compile.intrinsics import (
    advance,
    block_barrier,
    least,
    most,
    quotient,
    shared_address,
)
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled

i32, i64 = np.int32, np.int64


def block_product(
    x,
    y,
    bias,
    extra,
    pre,
    out,
    sums,
    m,
    n,
    k,
    part,
    parts,
    chain,
    x_place,
    x_row,
    x_column,
    y_place,
    y_row,
    y_column,
    bias_place,
    bias_column,
    extra_place,
    extra_row,
    extra_column,
    pre_place,
    pre_row,
    pre_column,
    out_place,
    out_row,
    out_column,
):
    memory = i32(shared_address(cuda.shared.array(0, dtype=types.int64)))
    t = i32(cuda.threadIdx.x)

    # Blocks in columns of GROUP rows of blocks: neighbours in time share operands in the cache.
    block_rows = i32(quotient(m + (BLOCK_M - 1), BLOCK_M))
    block_columns = i32(quotient(n + (BLOCK_N - 1), BLOCK_N))
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
    block_column = i32(quotient(within, group_rows))
    block_row = i32(group * GROUP + within - block_column * group_rows)
    row0 = i32(block_row * BLOCK_M)
    column0 = i32(block_column * BLOCK_N)
    place = i32(quotient(plane, parts))
    k0 = i32(rank * part) if CLUSTER > 1 else i32((plane - place * parts) * part)
    k_left = i32(least(i32(k - k0), part))

    x_own, x_along = X_OWN(t), X_ALONG(t)
    y_own, y_along = Y_OWN(t), Y_ALONG(t)
    x_at = x + place * x_place + i64(row0 + x_own) * x_row + i64(k0 + x_along) * x_column
    y_at = y + place * y_place + i64(column0 + y_own) * y_column + i64(k0 + y_along) * y_row
    x_left, y_left = i32(m - row0 - x_own), i32(n - column0 - y_own)
    whole = row0 + BLOCK_M <= m and column0 + BLOCK_N <= n
    x_own_step, y_own_step = x_row * X_OWN_STEP, y_column * Y_OWN_STEP
    x_k_step = x_column * X_K_STEP - x_row * X_BACK
    y_k_step = y_row * Y_K_STEP - y_column * Y_BACK
    x_slice, y_slice = x_column * BLOCK_K, y_row * BLOCK_K
    x_to = i32(memory + x_own * X_OWN_OFFSET + x_along * X_K_OFFSET)
    y_to = i32(memory + X_BYTES + y_own * Y_OWN_OFFSET + y_along * Y_K_OFFSET)

    # a factor that goes through registers is loaded a slice ahead of what is put
    if X_HELD:
        x_held = cuda.local.array(X_HELD, dtype=X_REGISTER)
        X_AHEAD(x_held, x_at, x_left, k_left, x_along, whole, x_own_step, x_k_step)
        x_at = x_at + x_slice
    if Y_HELD:
        y_held = cuda.local.array(Y_HELD, dtype=Y_REGISTER)
        Y_AHEAD(y_held, y_at, y_left, k_left, y_along, whole, y_own_step, y_k_step)
        y_at = y_at + y_slice
    write = i32(0)
    while write < STAGES * STAGE:
        x_next, y_next = i32(x_to + write), i32(y_to + write)
        if X_HELD:
            X_PUT(x_next, x_held)
            X_AHEAD(
                x_held, x_at, x_left, i32(k_left - BLOCK_K), x_along, whole, x_own_step, x_k_step
            )
        else:
            X_MASKED(x_next, x_at, x_left, k_left, x_along, x_own_step, x_k_step)
        if Y_HELD:
            Y_PUT(y_next, y_held)
            Y_AHEAD(
                y_held, y_at, y_left, i32(k_left - BLOCK_K), y_along, whole, y_own_step, y_k_step
            )
        else:
            Y_MASKED(y_next, y_at, y_left, k_left, y_along, y_own_step, y_k_step)
        fetch_commit()
        x_at, y_at = x_at + x_slice, y_at + y_slice
        k_left = i32(k_left - BLOCK_K)
        write = i32(write + STAGE)

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
            if X_HELD:
                X_PUT(x_next, x_held)
                X_AHEAD(
                    x_held,
                    x_at,
                    x_left,
                    i32(k_left - BLOCK_K),
                    x_along,
                    whole,
                    x_own_step,
                    x_k_step,
                )
            if Y_HELD:
                Y_PUT(y_next, y_held)
                Y_AHEAD(
                    y_held,
                    y_at,
                    y_left,
                    i32(k_left - BLOCK_K),
                    y_along,
                    whole,
                    y_own_step,
                    y_k_step,
                )
            if whole and k_left >= BLOCK_K:
                x_run, y_run = x_at, y_at
                for q in unrolled(PARTS):
                    MULTIPLY_PART(total, now, q, i32(x_from + stage), i32(y_from + stage))
                    for c in unrolled(q * X_COPIES // PARTS, (q + 1) * X_COPIES // PARTS):
                        X_COPY(
                            x_next
                            + (
                                c // X_OWN_REPEATS * X_K_STEP * X_K_OFFSET
                                + c % X_OWN_REPEATS * X_OWN_STEP * X_OWN_OFFSET
                            ),
                            x_run,
                        )
                        x_run = advance(x_run, x_own_step if (c + 1) % X_OWN_REPEATS else x_k_step)
                    for c in unrolled(q * Y_COPIES // PARTS, (q + 1) * Y_COPIES // PARTS):
                        Y_COPY(
                            y_next
                            + (
                                c // Y_OWN_REPEATS * Y_K_STEP * Y_K_OFFSET
                                + c % Y_OWN_REPEATS * Y_OWN_STEP * Y_OWN_OFFSET
                            ),
                            y_run,
                        )
                        y_run = advance(y_run, y_own_step if (c + 1) % Y_OWN_REPEATS else y_k_step)
            else:
                if X_COPIES:
                    X_MASKED(x_next, x_at, x_left, k_left, x_along, x_own_step, x_k_step)
                if Y_COPIES:
                    Y_MASKED(y_next, y_at, y_left, k_left, y_along, y_own_step, y_k_step)
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

    # The epilogue: thread (c, r) has VALUES columns of every ROW_STEP-th row.
    c = i32(t & (COLUMN_THREADS - 1))  # type: ignore[assignment]
    r0 = i32(t >> COLUMN_BITS)
    column = i32(column0 + c * COLUMN_FIRST)
    first = i64(column)
    offset = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    added = cuda.local.array(VALUES * ROWS, dtype=ACCUMULATOR)
    summed = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    value = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    result = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    for v in unrolled(VALUES):
        offset[v] = ACCUMULATOR(0)
        summed[v] = ACCUMULATOR(0)
        if BIAS:
            if column + v * COLUMN_STEP < n:
                offset[v] = LOAD_BIAS(
                    bias + place * bias_place + (first + v * COLUMN_STEP) * bias_column
                )
    out_at = out + plane * out_place + first * out_column
    if EXTRA:
        extra_at = extra + place * extra_place + first * extra_column
    if PRE:
        pre_at = pre + place * pre_place + first * pre_column
    put_to = PUT_TO(t, memory)
    take_from = i32(memory + r0 * PUT_PITCH + c * (COLUMN_FIRST * ACC_BYTES))

    turn = i32(0)
    while turn < PASSES:
        BARRIER()
        for q in unrolled(PASSES):
            if turn == q:
                PUT_TOTALS(total, q, put_to)
        BARRIER()
        # a block of a cluster finishes its share of the rows: TAKE adds up what all blocks have
        r = i32(r0 + rank * (ROWS * ROW_STEP))
        while r < PASS_ROWS:
            # row of the block: runs of RUN rows are JUMP apart
            if EXTRA:
                for u in unrolled(ROWS):
                    row = i32(row0 + PASS_ROW(i32(r + u * ROW_STEP), turn))
                    for v in unrolled(VALUES):
                        added[u * VALUES + v] = ACCUMULATOR(0)
                    if row < m:
                        if WIDE:
                            if column < n:
                                loaded = LOAD_EXTRA(extra_at + i64(row) * extra_row)
                                for v in unrolled(VALUES):
                                    added[u * VALUES + v] = loaded[v]
                        else:
                            for v in unrolled(VALUES):
                                if column + v * COLUMN_STEP < n:
                                    added[u * VALUES + v] = LOAD_EXTRA(
                                        extra_at
                                        + i64(row) * extra_row
                                        + (v * COLUMN_STEP) * extra_column
                                    )
            for u in unrolled(ROWS):
                row = i32(row0 + PASS_ROW(i32(r + u * ROW_STEP), turn))
                take_row = i32(take_from + (r - r0 + u * ROW_STEP) * PUT_PITCH)
                if WIDE:
                    taken = TAKE(take_row)
                    for v in unrolled(VALUES):
                        value[v] = taken[v]
                else:
                    for v in unrolled(VALUES):
                        value[v] = TAKE(i32(take_row + v * (COLUMN_STEP * ACC_BYTES)))
                for v in unrolled(VALUES):
                    if PRE:
                        result[v], value[v] = EPILOGUE(value[v], offset[v], added[u * VALUES + v])
                    else:
                        result[v] = EPILOGUE(value[v], offset[v], added[u * VALUES + v])
                if row < m:
                    if WIDE:
                        if column < n:
                            if PRE:
                                STORE_PRE(pre_at + i64(row) * pre_row, value)
                            STORE_OUT(out_at + i64(row) * out_row, result)
                    else:
                        for v in unrolled(VALUES):
                            if column + v * COLUMN_STEP < n:
                                if PRE:
                                    STORE_PRE(
                                        pre_at
                                        + i64(row) * pre_row
                                        + (v * COLUMN_STEP) * pre_column,
                                        value[v],
                                    )
                                STORE_OUT(
                                    out_at + i64(row) * out_row + (v * COLUMN_STEP) * out_column,
                                    result[v],
                                )
                    if SUMS:
                        for v in unrolled(VALUES):
                            summed[v] = summed[v] + result[v]
            r = i32(r + CLUSTER * (ROWS * ROW_STEP))
        turn = i32(turn + 1)

    if SUMS:
        # thread (c, r) has sums of its rows: in the order of r
        BARRIER()
        for v in unrolled(VALUES):
            PUT_ONE(
                i32(memory + (r0 * BLOCK_N + c * COLUMN_FIRST + v * COLUMN_STEP) * ACC_BYTES),
                summed[v],
            )
        BARRIER()
        at = i32(t)
        while at < BLOCK_N:
            if rank == 0 and column0 + at < n:
                result_sum = ACCUMULATOR(0)
                for q in unrolled(ROW_STEP):
                    result_sum = result_sum + TAKE_ONE(i32(memory + (q * BLOCK_N + at) * ACC_BYTES))
                row_of_sums = i64(place) * block_rows + block_row
                STORE_SUM(sums + (row_of_sums * n + column0 + at) * ACC_BYTES, result_sum)
            at = i32(at + THREADS)
    if CLUSTER > 1:
        BARRIER()  # a block's shared memory is there until all have read it
