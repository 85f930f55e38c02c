"""The passes over memory beside the products: slopes, sums of columns, copies.

Each function returns launches. The kernels take any dtype and any strides; slopes by 16 bytes where
rows allow it.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, elements, intrinsics
from numfuse.backends.cuda.compile.accesses import load_words, store_words
from numfuse.backends.cuda.compile.intrinsics import advance, quotient
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of, unrolled
from numfuse.backends.cuda.kernels.ampere import registers
from numfuse.backends.cuda.kernels.elementwise import formula, is_short
from numfuse.backends.cuda.kernels.epilogue import in_bytes
from numfuse.backends.cuda.plan.product import WIDE_SINCE, DeviceInfo, Launch, Operand, Slot
from numfuse.epilogues import Epilogue

i32, i64 = np.int32, np.int64

#: Axes of a strided copy; of longer shapes the caller makes several.
COPY_AXES = 4


def threads_of(info: DeviceInfo) -> int:
    """Threads of a block of a pass."""
    return tiling.PASS_THREADS if info.capability[0] else 2


def grid_of(total: int, info: DeviceInfo) -> tuple[int, int, int]:
    """Blocks for one element a thread; in the simulator one block, of which threads take more."""
    if not info.capability[0]:
        return 1, 1, 1
    return max(1, min(-(-total // tiling.PASS_THREADS), 2**31 - 1)), 1, 1


def chunk_of(m: int, n: int) -> int:
    """Return the rows of a chunk whose columns a thread adds up: enough chunks for a device.

    The sizes of one place alone decide, and with that the order of the sums.
    """
    length = tiling.PASS_ROWS
    while length > tiling.RUN and m * n < tiling.PASS_BUSY * length:
        length //= 2
    return length


def sum_of(at, step):
    return at + step


def short_quotient(i, by):
    return i64(quotient(i32(i), i32(by)))


def long_quotient(i, by):
    return i // by


def quotient_of(total: int, info: DeviceInfo) -> Any:
    """Return ``quotient(i, by)`` of indices below `total`: by 32 bits where these are enough.

    Of 64 bits it is a hundred instructions, and a thread of a pass has little else to do.
    """
    short = total < 1 << 31 and info.capability[0]
    return inlined(short_quotient if short else long_quotient)


# --- slopes -------------------------------------------------------------------------------------
def one_value(at):
    """Return an element, as the loads of several return theirs."""
    return (LOAD_ELEMENT(at, 0),)


def store_one(at, values):
    STORE_ELEMENT(at, 0, values[0])


def wide_values(at):
    """Return what 16 bytes hold."""
    w0, w1, w2, w3 = load_words(at)
    return AS_VALUES(w0, w1, w2, w3)


def store_wide(at, values):
    w0, w1, w2, w3 = AS_WORDS(values)
    store_words(at, w0, w1, w2, w3)


def slope(pre: Array, extra: Array, out: Array, sums, m, n, per_row, chunks, length, total):
    """out = FORMULA(pre, extra), and the sums of its columns over chunks of `length` rows.

    A thread has VALUES neighbours of a row, and AHEAD rows of them in flight. Strides are in bytes.
    """
    z = cuda.local.array(AHEAD * VALUES, REAL)
    given = cuda.local.array(AHEAD * VALUES, REAL)
    made = cuda.local.array(VALUES, REAL)
    run = cuda.local.array(VALUES, REAL)
    value = cuda.local.array(VALUES, REAL)
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        number = QUOTIENT(i, per_row)
        column = (i - number * per_row) * VALUES
        place = QUOTIENT(number, chunks)
        row = (number - place * chunks) * length
        last = min(row + length, m) - 1
        pre_at = pre.address + place * pre.place + row * pre.row + column * pre.column
        extra_at = extra.address + place * extra.place + row * extra.row + column * extra.column
        out_at = out.address + place * out.place + row * out.row + column * out.column
        for v in unrolled(VALUES):
            value[v] = ZERO
        while row <= last:
            for v in unrolled(VALUES):
                run[v] = ZERO
            for turn in unrolled(RUN // AHEAD):
                for u in unrolled(AHEAD):
                    loaded = LOAD_EXTRA(extra_at)
                    for v in unrolled(VALUES):
                        given[u * VALUES + v] = loaded[v]
                    if PRE_PARTS:
                        for part in unrolled(PRE_PARTS):
                            of_pre = LOAD_PRE(pre_at + 16 * part)
                            for v in unrolled(VALUES // PRE_PARTS):
                                z[u * VALUES + part * (VALUES // PRE_PARTS) + v] = of_pre[v]
                    # a row behind the last is the last once more, and not used
                    if row + (turn * AHEAD + u) < last:
                        extra_at = ADVANCE(extra_at, extra.row)
                        if PRE_PARTS:
                            pre_at = ADVANCE(pre_at, pre.row)
                for u in unrolled(AHEAD):
                    if row + (turn * AHEAD + u) <= last:
                        for v in unrolled(VALUES):
                            if PRE_PARTS:
                                made[v] = FORMULA(z[u * VALUES + v], given[u * VALUES + v])
                            else:
                                made[v] = FORMULA(ZERO, given[u * VALUES + v])
                            run[v] = run[v] + made[v]
                        if OUT:
                            STORE(out_at, made)
                            out_at = ADVANCE(out_at, out.row)
            for v in unrolled(VALUES):
                value[v] = value[v] + run[v]
            row += RUN
        if SUMS:
            for v in unrolled(VALUES):
                STORE_SUM(sums, number * n + column + v, value[v])


#: Strides are in bytes.
SLOPE = Schema(slope, u64="sums")


def _accesses(dtype: str, accumulator: str, values: int) -> tuple[Any, Any]:
    """Return how a thread of a pass reads and writes neighbours: 16 bytes of them, or one."""
    if values == 1:
        return (
            inlined(one_value, LOAD_ELEMENT=elements.loads(dtype)),
            inlined(store_one, STORE_ELEMENT=elements.stores(dtype)),
        )
    return (
        inlined(wide_values, AS_VALUES=registers.words_as(dtype, accumulator)),
        inlined(store_wide, AS_WORDS=registers.as_words(dtype, accumulator)),
    )


def one_loaded(at):
    """Return a value by its address, as the loads of several return theirs."""
    return (LOAD_ONE(at),)


def loads(dtype: str, values: int, accumulator: str) -> Any:
    """Return ``load(address)``: so many neighbours as a tuple, widened; 16 bytes past a cache."""
    if values == 1:
        return inlined(one_loaded, LOAD_ONE=accesses.load(dtype, 1, accumulator))
    if values * intrinsics.itemsize(dtype) == 16:
        return inlined(wide_values, AS_VALUES=registers.words_as(dtype, accumulator))
    return accesses.load(dtype, values, accumulator)


def slopes(
    info: DeviceInfo,
    epilogue: Epilogue,
    accumulator: str,
    pre: Operand | None,
    extra: Operand,
    out: Operand | None,
    m: int,
    n: int,
    places: int,
    sums: bool,
) -> tuple[Launch, int]:
    """out = the epilogue's first result, of the accumulator `pre` and the operand `extra`.

    Its slots are pre, extra, out and sums. The second result is the rows of the sums, which are of
    columns in chunks of rows (`chunk_of`).
    """
    # A thread that adds nothing up has few rows: more of them begin at once. (With one, where a
    # thread is is a fifth of what gelu's slope is: an H200 took 27.6 us for 196 x 27648, and 24.5
    # with eight.)
    length, run = (chunk_of(m, n), tiling.RUN) if sums else (tiling.PASS_PAIR, tiling.PASS_PAIR)
    chosen = epilogue.select(epilogue.results[0][0])
    short = out is not None and is_short(accumulator, out.dtype)
    values = 16 // extra.itemsize
    wide = info.capability >= WIDE_SINCE[extra.dtype] and all(
        x is None or (x.in_wholes(n, 16 // x.itemsize) and n % values == 0)
        for x in (pre, extra, out)
    )
    many = -(-m // length)
    if not wide or (sums and places * many * n < tiling.PASS_FEW):
        values = 1  # (of few elements each thread has one column, and they begin at once)
    parts = 0
    if pre is not None:
        parts = max(1, values * pre.itemsize // 16)
    bindings: dict[str, Any] = {
        "VALUES": values,
        "AHEAD": min(run, max(2, tiling.PASS_AHEAD // max(1, values // 4))),
        "RUN": run,
        "PRE_PARTS": parts,
        "OUT": out is not None,
        "SUMS": sums,
        "REAL": getattr(types, accumulator),
        "ZERO": np.dtype(accumulator).type(0),
        "FORMULA": formula(chosen, ("z", "grad"), accumulator, short=short),
        "LOAD_EXTRA": _accesses(extra.dtype, accumulator, values)[0],
        "STORE_SUM": elements.stores(accumulator),
    }
    if pre is not None:
        bindings["LOAD_PRE"] = _accesses(pre.dtype, accumulator, values)[0]
    if out is not None:
        bindings["STORE"] = _accesses(out.dtype, accumulator, values)[1]
    total = places * many * (n // values)
    bindings["QUOTIENT"] = quotient_of(total, info)
    # (running addresses: multiples of the steps would be registers, forty of them)
    bindings["ADVANCE"] = advance if info.capability[0] else inlined(sum_of)
    threads, blocks = threads_of(info), tiling.PASS_BLOCKS[values > 1] if info.capability[0] else 0
    made = kernel_of(slope, SLOPE, bindings, threads=threads, blocks=blocks, name=epilogue.name)
    arguments = SLOPE(
        pre=in_bytes(Slot("pre"), pre),
        extra=in_bytes(Slot("extra"), extra),
        out=in_bytes(Slot("out"), out),
        sums=Slot("sums") if sums else 0,
        m=m,
        n=n,
        per_row=n // values,
        chunks=many,
        length=length,
        total=total,
    )
    return Launch(made, grid_of(total, info), arguments), many


# --- copies -------------------------------------------------------------------------------------
@dataclass
class Four:
    """An array of four axes: its address, and the strides in elements."""

    address: Any
    s0: Any
    s1: Any
    s2: Any
    s3: Any


def copy(source: Four, out: Four, n1, n2, n3, rows, lanes, column_blocks):
    """out = source, converted; `rows` are all but the last of the four axes.

    A block has rows of `lanes` threads. Each has SPAN values of a row, which it loads before it
    stores any: so what it costs to find a row is shared by several.
    """
    value = cuda.local.array(SPAN, REAL)
    row_block = cuda.blockIdx.x // column_blocks
    t = cuda.threadIdx.x
    r = t // lanes
    first = (cuda.blockIdx.x - row_block * column_blocks) * (lanes * SPAN) + (t - r * lanes)
    row = row_block * (THREADS // lanes) + r
    if row < rows:
        i2, rest = row % n2, row // n2
        i1, i0 = rest % n1, rest // n1
        at = i0 * source.s0 + i1 * source.s1 + i2 * source.s2
        to = i0 * out.s0 + i1 * out.s1 + i2 * out.s2
        for u in unrolled(SPAN):
            column = min(first + u * lanes, n3 - 1)
            value[u] = LOAD(source.address, at + column * source.s3)
        for u in unrolled(SPAN):
            column = first + u * lanes
            if column < n3:
                STORE(out.address, to + column * out.s3, value[u])


COPY = Schema(copy, u64="source_address out_address")


def copies(
    info: DeviceInfo,
    accumulator: str,
    source: str,
    out: str,
    shape: Sequence[int],
    source_strides: Sequence[int],
    out_strides: Sequence[int],
) -> Launch:
    """out = source, of at most four axes, strides in elements; slots x and out."""
    lead = COPY_AXES - len(shape)
    n0, n1, n2, n3 = (1,) * lead + tuple(shape)
    rows, threads = n0 * n1 * n2, threads_of(info)
    lanes = next((x for x in (threads, 32, 4) if x <= threads and 4 * x <= n3), 1)
    bindings = {
        "LOAD": elements.loads(source),
        "STORE": elements.stores(out),
        "REAL": getattr(types, accumulator),
        "SPAN": tiling.COPY_SPAN,
        "THREADS": threads,
    }
    name = f"copy {source} {out}"
    made = kernel_of(copy, COPY, bindings, threads=threads, name=name)
    column_blocks = -(-n3 // (lanes * tiling.COPY_SPAN))
    zeros = (0,) * lead
    arguments = COPY(
        source=Four(Slot("x"), *zeros, *source_strides),
        out=Four(Slot("out"), *zeros, *out_strides),
        n1=n1,
        n2=n2,
        n3=n3,
        rows=rows,
        lanes=lanes,
        column_blocks=column_blocks,
    )
    return Launch(made, (-(-rows // (threads // lanes)) * column_blocks, 1, 1), arguments)
