"""The kernel of `thin`: all rows and all of K of 32 columns, read once through a long ring."""

# A kernel has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import numpy as np

from numfuse.backends.cuda.compile.accesses import fetch16, fetch_commit
from numfuse.backends.cuda.compile.engines import grid_release
from numfuse.backends.cuda.compile.intrinsics import block_barrier, least, most, shared_address
from numfuse.backends.cuda.compile.schema import Array, Ends
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.ampere.finish import ask_ahead, bias_of, finish_sum

i32, i64 = np.int32, np.int64


def copy_y(to, at, step, bytes_left, lines_left):
    """This thread's copies of a slice of Y; zeros for what is not there."""
    for c in unrolled(COPIES):
        inside = i32(least(most(bytes_left, 0), 16)) if c * REACH < lines_left else i32(0)
        fetch16(i32(to + c * (REACH * PITCH)), at, inside)
        at = at + step


def copy_x(to, at, step, left, row0, m):
    """This thread's copies of a slice of X; zeros for what is not there."""
    for c in unrolled(X_COPIES):
        if row0 + c * X_STEP < ROWS:
            inside = i32(least(most(left, 0), X_VALUES) * SIZE)
            inside = inside if row0 + c * X_STEP < m else i32(0)
            FETCH_X(i32(to + c * (X_STEP * X_PITCH)), at, inside)
        at = at + step


def copy_whole(y_to, y_at, y_step, x_to, x_at, x_step, x_rows):
    """This thread's copies of a slice that K fills; of the `x_rows` of X that are left for it."""
    for c in unrolled(COPIES):
        FETCH_16(i32(y_to + c * (REACH * PITCH)), y_at)
        y_at = y_at + y_step
    for c in unrolled(X_COPIES):
        FETCH_WHOLE_X(i32(x_to + c * (X_STEP * X_PITCH)), x_at, x_rows, c * X_STEP)
        x_at = x_at + x_step


def thin_product(x: Array, y: Array, ends: Ends, sums, m, n, k, part, parts):
    memory = i32(shared_address(cuda.shared.array(0, dtype=types.int64)))
    t = i32(cuda.threadIdx.x)
    lane, warp = i32(t & 31), i32(t >> 5)
    place = i64(cuda.blockIdx.y)
    plane = place
    column0 = i32(cuda.blockIdx.x * 32)
    if CUT:
        place = plane // parts
        k0 = (plane - place * parts) * part
        x.address += k0 * x.column
        y.address += k0 * y.row
        k = i32(least(i32(k - k0), part))
    slices = i32((k + (DEPTH - 1)) // DEPTH)
    if RELEASES:
        grid_release()

    # What this thread copies of a slice: every REACH-th line, the same 16 bytes of it. Lines are
    # values of K where Y's columns are neighbours, else columns.
    line, piece = i32(t >> PIECE_BITS), i32(t & (PIECES - 1))
    y_to = i32(memory + line * PITCH + piece * 16)
    if ALONG_K:
        y_at = y.address + place * y.place + i64(column0 + line) * y.column + piece * 16
        y_lines = i32(n - column0 - line)
        y_bytes = i32(k * SIZE - piece * 16)
        y_line, y_slice = y.column * REACH, i64(DEPTH * SIZE)
    else:
        y_at = y.address + place * y.place + i64(line) * y.row + i64(column0) * SIZE + piece * 16
        y_lines = i32(k - line)
        y_bytes = i32(least(i32((n - column0) * SIZE), LINE_BYTES) - piece * 16)
        y_line, y_slice = y.row * REACH, y.row * DEPTH
    # ... and of X's: the same K of every X_STEP-th row
    x_k, x_row0 = i32((t & (X_PIECES - 1)) * X_VALUES), i32(t >> X_BITS)
    x_to = i32(memory + Y_SLICE + x_row0 * X_PITCH + x_k * SIZE)
    x_at = x.address + place * x.place + i64(x_row0) * x.row + x_k * x.column
    x_left = i32(k - x_k)
    x_line, x_slice = x.row * X_STEP, x.column * DEPTH
    # (rows behind the last are not fetched: they reach no sum that is stored)
    x_rows = i32(m - x_row0)
    whole = column0 + 32 <= n
    if BIAS or EXTRA:
        row_here = i32(warp)
        while row_here < m:
            if column0 + lane < n:
                ask_ahead(ends, place, i64(row_here), i64(column0 + lane), row_here == 0)
            row_here = i32(row_here + WARPS)
    write = i32(0)
    while write < (STAGES - 1) * SLICE:
        if whole and x_left + x_k >= DEPTH:
            copy_whole(i32(y_to + write), y_at, y_line, i32(x_to + write), x_at, x_line, x_rows)
        else:
            copy_y(i32(y_to + write), y_at, y_line, y_bytes, y_lines)
            copy_x(i32(x_to + write), x_at, x_line, x_left, x_row0, m)
        fetch_commit()
        y_at, x_at, x_left = y_at + y_slice, x_at + x_slice, i32(x_left - DEPTH)
        y_bytes, y_lines = i32(y_bytes - Y_BYTES_STEP), i32(y_lines - Y_LINES_STEP)
        write = i32(write + SLICE)

    total = cuda.local.array(PART, dtype=ACCUMULATOR)
    CLEAR(total)
    # a lane's first row and column; its share of K begins at that of the warp
    own_row, own_column = i32(0), lane
    if LANES_M > 1:
        own_row, own_column = LANE_ROW(lane), i32(LANE_COLUMN(lane) * (1 if ALONG_K else FEW))
    y_from = i32(memory + (own_column * PITCH + warp * (SHARE * SIZE)))
    if not ALONG_K:
        y_from = i32(memory + (own_column * SIZE + warp * (SHARE * PITCH)))
    x_from = i32(memory + (Y_SLICE + own_row * X_PITCH + warp * (SHARE * SIZE)))
    kept = cuda.local.array(PART, dtype=ACCUMULATOR)
    CLEAR(kept)
    read, done = i32(0), i32(0)
    while done < slices:
        WAIT()
        block_barrier()  # the slice is there, and the one before has been read by all
        if whole and x_left + x_k >= DEPTH:
            if PARTS == 1:
                copy_whole(i32(y_to + write), y_at, y_line, i32(x_to + write), x_at, x_line, x_rows)
                MULTIPLY(total, 0, i32(x_from + read), i32(y_from + read))
            else:
                # copies and reads of shared memory share a queue: the copies go between the parts
                y_run, x_run = y_at, x_at
                for u in unrolled(PARTS):
                    MULTIPLY(total, u, i32(x_from + read), i32(y_from + read))
                    for c in unrolled(u * COPIES // PARTS, (u + 1) * COPIES // PARTS):
                        FETCH_16(i32(y_to + write + c * (REACH * PITCH)), y_run)
                        y_run = y_run + y_line
                    for c in unrolled(u * X_COPIES // PARTS, (u + 1) * X_COPIES // PARTS):
                        to = i32(x_to + write + c * (X_STEP * X_PITCH))
                        FETCH_WHOLE_X(to, x_run, x_rows, c * X_STEP)
                        x_run = x_run + x_line
        else:
            copy_y(i32(y_to + write), y_at, y_line, y_bytes, y_lines)
            copy_x(i32(x_to + write), x_at, x_line, x_left, x_row0, m)
            for u in unrolled(PARTS):
                MULTIPLY(total, u, i32(x_from + read), i32(y_from + read))
        fetch_commit()
        y_at, x_at, x_left = y_at + y_slice, x_at + x_slice, i32(x_left - DEPTH)
        y_bytes, y_lines = i32(y_bytes - Y_BYTES_STEP), i32(y_lines - Y_LINES_STEP)
        write = i32(write + SLICE) if write < (STAGES - 1) * SLICE else i32(0)
        read = i32(read + SLICE) if read < (STAGES - 1) * SLICE else i32(0)
        done = i32(done + 1)
        if (done & (CHAIN - 1)) == 0:  # a chain of sums ends
            ADD(kept, total)
            CLEAR(total)
    ADD(total, kept)
    WAIT_ALL()
    block_barrier()
    PUT_PART(total, i32(memory + ((warp * ROWS + own_row) * 32 + own_column) * SIZE))
    block_barrier()

    finish(memory, ends, sums, m, n, t, place, plane, column0)


def finish(memory, ends: Ends, sums, m, n, t, place, plane, column0):
    """The epilogue: each warp adds up the warps' sums of every WARPS-th row, and stores it."""
    lane, warp = i32(t & 31), i32(t >> 5)
    column = i64(column0 + lane)
    inside_n = column0 + lane < n
    offset = ACCUMULATOR(0)
    if inside_n:
        offset = bias_of(ends, place, column)
    row_here = i32(warp)
    while row_here < ROWS:
        row = i64(row_here)
        result = ACCUMULATOR(0)
        if row_here < m and inside_n:
            at = i32(memory + (row_here * 32 + lane) * SIZE)
            value = TAKE_ONE(at)
            for w in unrolled(1, WARPS):
                value = value + TAKE_ONE(i32(at + w * (ROWS * 32 * SIZE)))
            result = finish_sum(value, offset, ends, place, plane, row, column)
        if SUMS:
            # behind the chains' sums, which other warps may still read
            PUT_ONE(i32(memory + ((WARPS * ROWS + row_here) * 32 + lane) * SIZE), result)
        row_here = i32(row_here + WARPS)
    if SUMS:
        block_barrier()
        if t < 32 and inside_n:
            total = ACCUMULATOR(0)
            at = i32(0)
            while at < m:
                run, end = ACCUMULATOR(0), i32(least(i32(at + RUN), m))
                while at < end:
                    run = run + TAKE_ONE(i32(memory + ((WARPS * ROWS + at) * 32 + lane) * SIZE))
                    at = i32(at + 1)
                total = total + run
            STORE_SUM(sums + (place * n + column) * SIZE, total)
