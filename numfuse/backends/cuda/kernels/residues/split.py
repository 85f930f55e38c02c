"""A factor becomes residues: the scales of its rows, and a plane of bytes for each modulus.

A *row* is one of X, or a column of Y: what K runs along. The planes have K inside, whatever the
factor's layout is, as wgmma reads 8 bits that way alone.
"""

# A template has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.integers import packed_residues, store_residues, words_of
from numfuse.backends.cuda.compile.scalars import (
    absolute,
    exponent_parts,
    fused,
    select,
    two_powers_of_two,
)
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Slot
from numfuse.moduli import HUGE, TINY, Residues

#: Rows of a block of `scales`, and threads of each: neighbours read 256 bytes. A thread has so many
#: values in flight; all of a multiprocessor have 64 KiB, which is what memory needs to be busy.
SCALE_ROWS, SCALE_THREADS, SCALE_AHEAD = 32, 32, 4
#: Rows and values of K of a block of `split`, of which a thread has 16 values: 16 bytes of a plane.
ROWS, DEPTH, VALUES = 32, 128, 16
#: Blocks of `split` on a multiprocessor: one waits for memory while others multiply.
BLOCKS = 2
#: The same in the simulator, where a thread costs 20 ms.
SIMULATED_SCALE, SIMULATED_SPLIT = (2, 2), (2, 32)
#: Columns of Y that are stored in another order (`place_of`).
COLUMNS = 64
#: A number below 2^51, plus and minus this, is rounded to the nearest integer.
ROUNDER = 1.5 * 2.0**52


def scales(source: Array, exponents, rows, depth, spread):
    """exponents[place, row] = n, so that 2^n row has the norm that the moduli allow, or less.

    NaN of a row with an infinity or NaN, 0 of one of zeros. The sum of squares goes in the same
    order in every layout. Strides are in bytes.
    """
    if OVERLAPS:
        grid_wait()
        grid_release()
    squares = cuda.shared.array(SCALE_ROWS * (SCALE_THREADS + 1), types.float64)
    largest = cuda.shared.array(SCALE_ROWS * (SCALE_THREADS + 1), types.float64)
    loaded = cuda.local.array(AHEAD, types.float64)
    t = cuda.threadIdx.x
    place, row0 = cuda.blockIdx.y, cuda.blockIdx.x * SCALE_ROWS
    if ALONG:
        own, first = t // SCALE_THREADS, t % SCALE_THREADS
    else:
        own, first = t % SCALE_ROWS, t // SCALE_ROWS
    total, top = ZERO, ZERO
    at = source.address + place * source.place + min(row0 + own, rows - 1) * source.row
    for begin in range(first, depth, SCALE_THREADS * AHEAD):
        for u in unrolled(AHEAD):
            here = min(begin + u * SCALE_THREADS, depth - 1)
            loaded[u] = LOAD(at + here * source.column, 0)
        for u in unrolled(AHEAD):
            # behind the last the first once more, and not used
            x = select(begin + u * SCALE_THREADS < depth, absolute(loaded[u]), ZERO)
            total = fused(x, x, total)
            top = select(x > top, x, top)
    squares[own * (SCALE_THREADS + 1) + first] = total
    largest[own * (SCALE_THREADS + 1) + first] = top
    cuda.syncthreads()
    if t < SCALE_ROWS and row0 + t < rows:
        total, top = ZERO, ZERO
        for i in range(SCALE_THREADS):
            x = largest[t * (SCALE_THREADS + 1) + i]
            total = total + squares[t * (SCALE_THREADS + 1) + i]
            top = select(x > top, x, top)
        STORE(exponents, place * rows + row0 + t, exponent_of(total, top, types.float64(spread)))


def exponent_of(total, top, spread):
    """The exponent of a row by its sum of squares, or its largest element where that is no good."""
    exponent = ZERO
    if total != total or top == INFINITY:
        exponent = NAN
    elif total > TINY and total < HUGE:
        n, m = floor_log2(total)
        # 2^LIMIT_N LIMIT_M over that sum: its logarithm, halved and rounded down
        twice = LIMIT_N - n - select(m > LIMIT_M, ONE, ZERO)
        exponent = (twice * HALF - QUARTER + ROUNDER) - ROUNDER
    elif top > ZERO:
        small = top < TINY
        n, m = floor_log2(top * select(small, HUGE, ONE))
        exponent = spread - ONE - (n - select(small, HUGE_N, ZERO))
    return exponent


def floor_log2(x):
    """(n, m) of x = 2^n m, m from 1 to 2; x normal."""
    n, m, _ = exponent_parts(x)
    low = m < ONE
    return n - select(low, ONE, ZERO), m * select(low, TWO, ONE)


SCALES = Schema(scales)


def split(source: Array, exponents, out, rows, depth, plane, pitch):
    """out[place, modulus, row, k] = the residue of 2^n source[place, row, k], rounded.

    Strides are in bytes; `pitch` is a row's of `out`, `plane` those of a modulus. What lies between
    `depth` and `pitch` is written with something, and never read.
    """
    if OVERLAPS:
        grid_wait()
        grid_release()
    low = cuda.shared.array(ROWS, types.float64)
    high = cuda.shared.array(ROWS, types.float64)
    # a gap behind 16 values: eight threads that read along K meet eight banks
    held = cuda.shared.array(ROWS * HELD, types.float64)
    values = cuda.local.array(VALUES, types.float64)
    word = cuda.local.array(VALUES * WORDS, types.int32)
    t = cuda.threadIdx.x
    place, row0, k0 = cuda.blockIdx.z, cuda.blockIdx.y * ROWS, cuda.blockIdx.x * DEPTH
    if t < ROWS:
        n = LOAD(exponents, place * rows + min(row0 + t, rows - 1))
        a, b = two_powers_of_two(select(n == n, n, ZERO) + ROUNDER)
        low[t], high[t] = a, b
    at = source.address + place * source.place
    if THREADS >= DEPTH and row0 + ROWS <= rows and k0 + DEPTH <= depth:
        r, k = where(t + 0)
        at += (row0 + r) * source.row + (k0 + k) * source.column
        # neighbouring threads read neighbours, and each the next lines
        if ALONG:
            step = (THREADS // DEPTH) * source.row
        else:
            step = (THREADS // ROWS) * source.column
        for i in unrolled(VALUES):
            values[i] = LOAD(at, 0)
            at += step
    else:
        for i in unrolled(VALUES):
            r, k = where(t + i * THREADS)
            row, column = min(row0 + r, rows - 1), min(k0 + k, depth - 1)
            values[i] = LOAD(at + row * source.row + column * source.column, 0)
    cuda.syncthreads()
    for i in unrolled(VALUES):
        r, k = where(t + i * THREADS)
        held[r * HELD + k + k // VALUES] = values[i] * low[r] * high[r]
    cuda.syncthreads()
    r, group = t // (DEPTH // VALUES), t % (DEPTH // VALUES)
    for i in unrolled(VALUES):
        x = held[r * HELD + group * (VALUES + 1) + i]
        if WORDS == 2:
            word[2 * i], word[2 * i + 1] = WORDS_OF(x)
        else:
            word[3 * i], word[3 * i + 1], word[3 * i + 2] = WORDS_OF(x)
    row, k = row0 + r, k0 + group * VALUES
    if row < rows and k < pitch:
        to = out + place * (MODULI * plane) + place_of(row) * pitch + k
        for m in unrolled(MODULI):
            store_residues(
                to + m * plane,
                RESIDUES(m, word, 0), RESIDUES(m, word, 1), RESIDUES(m, word, 2),
                RESIDUES(m, word, 3),
            )  # fmt: skip


def where(number):
    """Row and K of a value of a block, so that neighbours are neighbours in memory."""
    if ALONG:
        return number // DEPTH, number % DEPTH
    else:
        return number % ROWS, number // ROWS


def place_of(row):
    """Where a row is stored.

    Of 64 columns of a product by wgmma, a thread has 8 g + 2 s and the next, for each g below 8.
    Here column 16 s + 2 g is at that place, so that a thread has 16 neighbours, and they are bytes
    of one access.
    """
    if TURNED:
        return (row & ~63) + 8 * ((row >> 1) & 7) + 2 * ((row >> 4) & 3) + (row & 1)
    else:
        return row


SPLIT = Schema(split)


def _constants(of: Residues) -> dict[str, Any]:
    real = np.float64
    n, m = of.limit
    names = {"ZERO": 0, "QUARTER": 0.25, "HALF": 0.5, "ONE": 1, "TWO": 2, "NAN": np.nan,
             "INFINITY": np.inf, "TINY": TINY, "HUGE": HUGE, "HUGE_N": np.log2(HUGE),
             "ROUNDER": ROUNDER, "LIMIT_N": n, "LIMIT_M": m}  # fmt: skip
    return {name: real(value) for name, value in names.items()}


def plane_rows(name: str, rows: int) -> int:
    """Return the rows of a plane of X ("x") or Y, whose last columns are in any place of 64."""
    return rows if name == "x" else tiling.round_up(rows, COLUMNS)


def planes_of(
    name: str,
    operand: Operand,
    rows: int,
    depth: int,
    places: int,
    of: Residues,
    info: DeviceInfo,
    to: Slot,
) -> tuple[Launch, ...]:
    """Return the launches that make residues of X ("x") or Y ("y").

    They fill the slots "x scales", a float64 for each row, and `to`; "x copy" is kept for other
    products of the factor.
    """
    own, inner = (1, 2) if name == "x" else (2, 1)
    place, row, column = (operand.steps[i] for i in (0, own, inner))
    source = Array(Slot(name), place, row, column)
    scale_slot, pitch = Slot(f"{name} scales"), tiling.pitch(depth, 1)
    plane = plane_rows(name, rows) * pitch
    simulated = not info.capability[0]
    scale_rows, scale_threads = SIMULATED_SCALE if simulated else (SCALE_ROWS, SCALE_THREADS)
    split_rows, split_depth = SIMULATED_SPLIT if simulated else (ROWS, DEPTH)
    bindings = _constants(of) | {
        "OVERLAPS": info.capability >= (9, 0),
        "ALONG": abs(column) <= abs(row),
        "LOAD": elements.loads("float64"),
    }
    scale_bindings = bindings | {
        "SCALE_ROWS": scale_rows,
        "SCALE_THREADS": scale_threads,
        "AHEAD": SCALE_AHEAD,
        "STORE": elements.stores("float64"),
    }
    made = kernel_of(
        scales, SCALES, scale_bindings, threads=scale_rows * scale_threads, name="scales"
    )
    given = SCALES(
        source=source, exponents=scale_slot, rows=rows, depth=depth, spread=of.spread(depth)
    )
    how: dict[str, Any] = {"overlaps": info.capability >= (9, 0)}
    grid, nbytes = (-(-rows // scale_rows), places, 1), 8 * places * rows
    first = Launch(made, grid, given, makes=(scale_slot.name, nbytes), **how)
    threads = split_rows * split_depth // VALUES
    split_bindings = bindings | {
        "ROWS": split_rows,
        "DEPTH": split_depth,
        "VALUES": VALUES,
        "THREADS": threads,
        # and an odd number of them, so that threads that write along rows meet other banks
        "HELD": split_depth + split_depth // VALUES + 1,
        "MODULI": of.count,
        "WORDS": of.words,
        "TURNED": name == "y",
        "WORDS_OF": words_of(of.words),
        "RESIDUES": packed_residues(of.moduli, of.words),
    }
    made = kernel_of(
        split, SPLIT, split_bindings, threads=threads, blocks=BLOCKS, name=f"residues {of.count}"
    )
    given = SPLIT(
        source=source, exponents=scale_slot, out=to, rows=rows, depth=depth, plane=plane,
        pitch=pitch,
    )  # fmt: skip
    grid = -(-pitch // split_depth), -(-rows // split_rows), places
    makes = None if to.name == "work" else (to.name, places * of.count * plane)
    return first, Launch(made, grid, given, makes=makes, **how)
