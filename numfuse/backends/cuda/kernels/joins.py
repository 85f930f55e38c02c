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
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import cuda, device_function, types
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.kernels.epilogue import element, in_bytes
from numfuse.backends.cuda.plan.product import Launch, Operand, Slot

__all__ = ["columns", "corrected", "fits", "plus", "rows"]


@device_function
def lost(before, value, total):
    """Return what total = before + value is off by, exactly (Knuth); NaN beside an infinity."""
    added = total - before
    return (before - (total - added)) + (value - added)


@device_function
def plus(total, error, value):
    """A total with one value more, and what its additions have lost."""
    made = total + value
    return made, error + lost(total, value, made)


@device_function
def corrected(total, error):
    """A total and what was lost of it; itself where that is no number, or infinite."""
    nothing = error - error
    return total + error if nothing == nothing else total


def join_rows(planes, out: Array, vectors, columns, per_row, depth, step, place_step):
    """out[o] = the sum of planes[o, q] over q; a thread has VALUES neighbours of a row.

    A row of a plane has `per_row` times VALUES values, of which `columns` count; steps in bytes.
    AHEAD planes are on their way together.
    """
    if OVERLAPS:
        grid_wait()
        grid_release()
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    place = cuda.blockIdx.y
    if i < vectors:
        row = i // per_row
        at = planes + place * place_step + i * 16
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
                    total[v], error[v] = plus(total[v], error[v], ahead[u * VALUES + v])
            q += AHEAD
        while q < depth:
            loaded = LOAD(at + q * step)
            for v in unrolled(VALUES):
                total[v], error[v] = plus(total[v], error[v], loaded[v])
            q += 1
        for v in unrolled(VALUES):
            total[v] = corrected(total[v], error[v])
        column = (i - row * per_row) * VALUES
        to = out.address + place * out.place + row * out.row
        if WIDE:
            STORE(to + column * OUT_BYTES, total)
        else:
            for v in unrolled(VALUES):
                if column + v < columns:
                    STORE(to + (column + v) * out.column, total[v])


#: Steps and strides are in bytes.
ROWS = Schema(join_rows)


def fits(out: Operand, lengths: tuple[int, int, int, int], accumulator: str) -> bool:
    """Return whether `rows` joins contiguous planes to whole accesses of the result."""
    values = 16 // intrinsics.itemsize(accumulator)
    return out.in_wholes(lengths[3], values) and lengths[0] < 1 << 16


def rows(
    accumulator: str,
    planes: Slot,
    out: Operand,
    lengths: tuple[int, int, int, int],
    steps: tuple[int, int, int] | None = None,
    overlaps: bool = False,
) -> Launch:
    """The join of planes to `out`, by 16 bytes of a plane.

    Parameters
    ----------
    accumulator : str
    planes : Slot
        At a multiple of 16 bytes.
    out : Operand
    lengths : tuple of int
        Places, planes of each, rows and columns.
    steps : tuple of int, optional
        Values from a place, a plane and a row to the next, each a multiple of 16 bytes; by default
        planes (places, planes, rows, columns) are contiguous.
    overlaps : bool
        Whether the launch may begin before the one before it has ended.
    """
    count, depth, m, n = lengths
    place, plane, pitch = steps or (depth * m * n, m * n, n)
    size = intrinsics.itemsize(accumulator)
    values = 16 // size
    wide = fits(out, lengths, accumulator)
    store = accesses.store_array if wide else accesses.store
    bindings = {
        "THREADS": tiling.PASS_THREADS,
        "VALUES": values,
        "AHEAD": tiling.JOIN_AHEAD,
        "REAL": getattr(types, accumulator),
        "ZERO": np.dtype(accumulator).type(0),
        "WIDE": wide,
        "OUT_BYTES": out.itemsize,
        "OVERLAPS": overlaps,
        "LOAD": accesses.load(accumulator, values, accumulator),
        "STORE": store(out.dtype, values if wide else 1, accumulator),
    }
    name = f"join {out.dtype}"
    made = kernel_of(join_rows, ROWS, bindings, threads=tiling.PASS_THREADS, name=name)
    arguments = ROWS(
        planes=planes,
        out=in_bytes(Slot("out"), out),
        vectors=m * (pitch // values),
        columns=n,
        per_row=pitch // values,
        depth=depth,
        step=plane * size,
        place_step=place * size,
    )
    grid = -(-m * (pitch // values) // tiling.PASS_THREADS), count, 1
    return Launch(made, grid, arguments, overlaps=overlaps)


def join_columns(planes, out: Array, n, depth):
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
                total, error = plus(total, error, ahead[u])
            at += 4 * step
            q += 4 * LANES
        q -= 3 * LANES
        while q < depth:
            total, error = plus(total, error, LOAD(at))
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
        STORE(out.address + element(out, place, 0, column), corrected(total, error))


#: Strides are in bytes.
COLUMNS = Schema(join_columns)


def columns(
    accumulator: str,
    planes: Slot,
    out: Slot,
    dtype: str,
    count: int,
    depth: int,
    n: int,
    steps: tuple[int, int],
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
    name = f"join columns {dtype}"
    made = kernel_of(join_columns, COLUMNS, bindings, threads=32 * lanes, name=name)
    to = Array(out, steps[0] * size, 0, steps[1] * size)
    arguments = COLUMNS(planes=planes, out=to, n=n, depth=depth)
    return Launch(made, (-(-n // 32), count, 1), arguments)
