"""Joins of planes in their fast forms: by 16 bytes, and of few columns by many threads each.

The order of a sum is fixed by the number of its planes, whatever the device. What its additions
lose is summed beside it, so that it is rounded once, however many planes there are.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.toolchain import cuda, device_function, kernel, types
from numfuse.backends.cuda.compile.unroll import expanded, names_of, unrolled
from numfuse.backends.cuda.plan.product import Launch, Slot

__all__ = ["columns", "corrected", "lost", "rows"]


@device_function
def lost(before, value, total):
    """Return what total = before + value is off by, exactly (Knuth); NaN beside an infinity."""
    added = total - before
    return (before - (total - added)) + (value - added)


@device_function
def corrected(total, error):
    """A total and what was lost of it; itself where that is no number, or infinite."""
    nothing = error - error
    return total + error if nothing == nothing else total


def join_rows(planes, out, vectors, per_row, depth, step, out_place, out_row):
    """out[o] = the sum of planes[o, q] over q; a thread has VALUES neighbours of a row.

    `vectors` of them in a place, `per_row` in a row; steps in bytes. AHEAD planes are on their way
    together.
    """
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    place = cuda.blockIdx.y
    if i < vectors:
        row = i // per_row
        at = planes + place * depth * step + i * 16
        total = cuda.local.array(VALUES, REAL)
        error = cuda.local.array(VALUES, REAL)
        ahead = cuda.local.array(VALUES * AHEAD, REAL)
        for v in unrolled(VALUES):
            total[v] = ZERO
            error[v] = ZERO
        q = 0
        while q + AHEAD <= depth:
            for u in unrolled(AHEAD):
                loaded = LOAD(at + (q + u) * step)
                for v in unrolled(VALUES):
                    ahead[u * VALUES + v] = loaded[v]
            for u in unrolled(AHEAD):
                for v in unrolled(VALUES):
                    before = total[v]
                    total[v] = before + ahead[u * VALUES + v]
                    error[v] = error[v] + lost(before, ahead[u * VALUES + v], total[v])
            q += AHEAD
        while q < depth:
            loaded = LOAD(at + q * step)
            for v in unrolled(VALUES):
                before = total[v]
                total[v] = before + loaded[v]
                error[v] = error[v] + lost(before, loaded[v], total[v])
            q += 1
        for v in unrolled(VALUES):
            total[v] = corrected(total[v], error[v])
        STORE(
            out + place * out_place + row * out_row + (i - row * per_row) * (VALUES * OUT_BYTES),
            total,
        )


def rows(
    accumulator: str,
    planes: Slot,
    out: Slot,
    dtype: str,
    count: int,
    depth: int,
    lengths: tuple[int, int],
    strides: tuple[int, int, int],
) -> Launch:
    """The join of contiguous planes (count, depth, rows, columns).

    Of `out` the columns are contiguous, and rows begin at whole vectors, as the caller has checked.
    """
    values = 16 // intrinsics.itemsize(accumulator)
    size = intrinsics.itemsize(dtype)
    bindings = {
        "THREADS": tiling.PASS_THREADS,
        "VALUES": values,
        "AHEAD": tiling.JOIN_AHEAD,
        "REAL": getattr(types, accumulator),
        "ZERO": np.dtype(accumulator).type(0),
        "OUT_BYTES": size,
        "LOAD": accesses.load(accumulator, values, accumulator),
        "STORE": accesses.store_array(dtype, values, accumulator),
    }
    template = expanded(join_rows, bindings)
    made = kernel(
        template,
        " ".join(["i64"] * 8),
        threads=tiling.PASS_THREADS,
        name=f"join {dtype}",
        **names_of(template, bindings),
    )
    m, n = lengths
    vectors = m * n // values
    grid = -(-vectors // tiling.PASS_THREADS), count, 1
    step = m * n * intrinsics.itemsize(accumulator)
    arguments = (
        planes,
        out,
        vectors,
        n // values,
        depth,
        step,
        strides[0] * size,
        strides[1] * size,
    )
    return Launch(made, grid, arguments)


def join_columns(planes, out, n, depth, out_place, out_column):
    """out[o, c] = the sum of planes[o, q, c] over q; 32 columns a block.

    Lane r of LANES adds up planes r, r + LANES, ..., and thread 0 of a column the lanes.
    """
    shared = cuda.shared.array((2 * LANES, 32), REAL)
    ahead = cuda.local.array(4, REAL)
    c = cuda.threadIdx.x & 31
    r = cuda.threadIdx.x >> 5
    column = cuda.blockIdx.x * 32 + c
    place = cuda.blockIdx.y
    total, error = ZERO, ZERO
    if column < n:
        at = planes + ((place * depth + r) * n + column) * ITEMSIZE
        step = n * (LANES * ITEMSIZE)
        q = r + 3 * LANES
        while q < depth:
            for u in unrolled(4):
                ahead[u] = LOAD(at + u * step)
            for u in unrolled(4):
                before, total = total, total + ahead[u]
                error = error + lost(before, ahead[u], total)
            at += 4 * step
            q += 4 * LANES
        q -= 3 * LANES
        while q < depth:
            plane = LOAD(at)
            before, total = total, total + plane
            error = error + lost(before, plane, total)
            at += step
            q += LANES
    shared[r, c] = total
    shared[LANES + r, c] = error
    cuda.syncthreads()
    if r == 0 and column < n:
        total, error = ZERO, ZERO
        for lane in range(LANES):
            before, total = total, total + shared[lane, c]
            error = error + (lost(before, shared[lane, c], total) + shared[LANES + lane, c])
        STORE(out + place * out_place + column * out_column, corrected(total, error))


def columns(
    accumulator: str,
    planes: Slot,
    out: Slot,
    dtype: str,
    count: int,
    depth: int,
    n: int,
    strides: tuple[int, int],
) -> Launch:
    """The join of contiguous planes (count, depth, n), of `out` with strides (place, column)."""
    lanes = tiling.JOIN_LANES
    size = intrinsics.itemsize(dtype)
    bindings = {
        "LANES": lanes,
        "REAL": getattr(types, accumulator),
        "ZERO": np.dtype(accumulator).type(0),
        "ITEMSIZE": intrinsics.itemsize(accumulator),
        "LOAD": accesses.load(accumulator, 1, accumulator),
        "STORE": accesses.store(dtype, 1, accumulator),
    }
    template = expanded(join_columns, bindings)
    made = kernel(
        template,
        " ".join(["i64"] * 6),
        threads=32 * lanes,
        name=f"join columns {dtype}",
        **names_of(template, bindings),
    )
    arguments = (planes, out, n, depth, strides[0] * size, strides[1] * size)
    return Launch(made, (-(-n // 32), count, 1), arguments)
