"""The text of `vectors`: a long factor that is read once, times few vectors in shared memory.

The other factor's vectors, SIDE of them, lie in shared memory in slices of DEPTH values of K. A
block has LINES lines of the long factor, and SHARERS threads share the sums of some of these:

- ALONG: K is contiguous, or no axis is. SHARERS neighbouring threads take UNIT values of a line
  each, of OWN lines that lie GROUPS apart.
- else lines are neighbours in memory: a thread has OWN of them side by side, and every SHARERS-th
  value of K.

What sharers have added up meets in shared memory, 16 of them at a time in their order.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile.accesses import prefetch
from numfuse.backends.cuda.compile.engines import grid_release
from numfuse.backends.cuda.compile.intrinsics import block_barrier, least, shared_address
from numfuse.backends.cuda.compile.schema import Ends
from numfuse.backends.cuda.compile.toolchain import cuda, types
from numfuse.backends.cuda.compile.unroll import unrolled
from numfuse.backends.cuda.kernels.ampere.finish import ask_ahead, bias_of, finish_sum

i32, i64 = np.int32, np.int64


@dataclass
class Vectors:
    """A factor: its address, and the bytes from a place, a vector and a value of K to the next."""

    address: Any
    place: Any
    line: Any
    depth: Any


def of_slice(number):
    """Return the vector and the value of K of an element of a slice: neighbours are in memory."""
    if SIDE_ALONG:
        return i32(number >> DEPTH_BITS), i32(number & (DEPTH - 1))
    return i32(number & (SIDE - 1)), i32(number >> SIDE_BITS)


def bring(memory, side: Vectors, t, place, begin, left, few):
    """A slice of the few vectors to shared memory; zeros for what is not there.

    What is loaded in its place is the last that is there: a branch at each load would wait for the
    one before.
    """
    values = cuda.local.array(BROUGHT, dtype=ACCUMULATOR)
    at = side.address + place * side.place + i64(begin) * side.depth
    i = i32(t)
    while i < SIDE * DEPTH:
        for u in unrolled(BROUGHT):
            s, kk = of_slice(i32(i + u * THREADS))
            s, kk = i32(least(s, i32(few - 1))), i32(least(kk, i32(left - 1)))
            values[u] = LOAD_SIDE(at + i64(s) * side.line + i64(kk) * side.depth)
        for u in unrolled(BROUGHT):
            number = i32(i + u * THREADS)
            s, kk = of_slice(number)
            value = values[u] if s < few and kk < left else ACCUMULATOR(0)
            if number < SIDE * DEPTH:
                to = i32(s * DEPTH + kk) if ALONG else i32(kk * SIDE + s)
                PUT_ONE(i32(memory + to * SIZE), value)
        i = i32(i + BROUGHT * THREADS)


def take_line(memory, line, s, share):
    """Return where a sharer's part of a line's sum number s is."""
    if ALONG:
        number = i32((line >> GROUP_BITS) * SIDE + s)
        t = i32((line & (GROUPS - 1)) * SHARERS + share)
    else:
        number = i32((line & (OWN - 1)) * SIDE + s)
        t = i32(share * GROUPS + (line >> OWN_BITS))
    return i32(memory + (number * PITCH + t + (t >> 5)) * SIZE)


def of_result(number):
    """Return the line and the vector of a block's element: neighbours are neighbours in `out`."""
    if COLUMNS:
        return i32(number >> SIDE_BITS), i32(number & (SIDE - 1))
    return i32(number & (LINES - 1)), i32(number >> LINE_BITS)


def beyond(a, u, step):
    """Return how far access number u of the unit number a is from the first one of these.

    Where K is contiguous it is a number in the instruction.
    """
    if CONTIGUOUS:
        return i64((a * (SHARERS * UNIT) + u % PIECES * WIDTH) * ITEM)
    return i64(a * (SHARERS * UNIT) + u % PIECES * WIDTH) * step


def all_there(kk, left, share):
    """Return whether the next units of all sharers are there: a warp does not do both ways."""
    return i32(kk - share * UNIT + AHEAD * SHARERS * UNIT) <= left


def load_all(values, at, long: Vectors, begin, kk):
    """A thread's values of its lines for AHEAD units of K, the first at `kk` of a slice."""
    away = i64(begin + kk) * long.depth
    for a in unrolled(AHEAD):
        for u in unrolled(LOADS):
            loaded = LOAD_LONG(at[u // PIECES] + away + beyond(a, u, long.depth))
            for v in unrolled(WIDTH):
                values[(a * LOADS + u) * WIDTH + v] = loaded[v]


def load_some(values, at, long: Vectors, begin, kk, left):
    """Load what is there of those; the last of it is loaded in place of others, which are 0."""
    for a in unrolled(AHEAD):
        for u in unrolled(LOADS):
            own = i32(kk + a * (SHARERS * UNIT) + u % PIECES * WIDTH)
            far = i64(begin + least(own, i32(left - REACH))) * long.depth
            loaded = LOAD_LONG(at[u // PIECES] + far)
            for v in unrolled(WIDTH):
                value = loaded[v] if own < left else ACCUMULATOR(0)
                values[(a * LOADS + u) * WIDTH + v] = value


def load_early(values, at, long: Vectors, begin, kk, left, share):
    """A thread's values before it needs them; a block has registers for them."""
    if kk < left:
        if all_there(kk, left, share):
            load_all(values, at, long, begin, kk)
        else:
            load_some(values, at, long, begin, kk, left)


def vector_product(
    side: Vectors, long: Vectors, ends: Ends, sums, m, n, few, lines, k, part, parts
):
    memory = i32(shared_address(cuda.shared.array(0, dtype=types.int64)))
    t = i32(cuda.threadIdx.x)
    place = i64(cuda.blockIdx.y)
    plane = place
    if CUT:
        place = plane // parts
        k0 = (plane - place * parts) * part
        side.address += k0 * side.depth
        long.address += k0 * long.depth
        k = i32(least(i32(k - k0), part))
    if RELEASES:
        grid_release()
    first = i32(cuda.blockIdx.x * LINES)
    share, group = i32(t & (SHARERS - 1)), i32(t >> SHARE_BITS)
    if not ALONG:
        share, group = i32(t >> GROUP_BITS), i32(t & (GROUPS - 1))
    # where this thread's lines are, or accesses of neighbouring lines; those behind the last are
    # the last again, of which nothing is kept
    at = cuda.local.array(SPOTS, dtype=types.int64)
    start = long.address + place * long.place
    for p in unrolled(SPOTS):
        line = i32(first + p * GROUPS + group) if ALONG else i32(first + group * OWN + p * WIDTH)
        last = i32(lines - 1) if ALONG else i32(lines - WIDTH)
        at[p] = start + i64(least(line, last)) * long.line
        # (on its way while the few vectors are brought to shared memory)
        if not EARLY and share * UNIT < k:
            prefetch(at[p] + i64(share * UNIT) * long.depth)
    if BIAS or EXTRA:
        number = i32(t)
        while number < LINES * SIDE:
            own, s = of_result(number)
            line = i32(first + own)
            if line < lines and s < few:
                row, column = (i64(line), i64(s)) if COLUMNS else (i64(s), i64(line))
                ask_ahead(ends, place, row, column, own == 0 if COLUMNS else s == 0)
            number = i32(number + THREADS)
    total = cuda.local.array(TOTAL, dtype=ACCUMULATOR)
    kept = cuda.local.array(TOTAL, dtype=ACCUMULATOR)
    values = cuda.local.array(HELD, dtype=ACCUMULATOR)
    CLEAR(total)
    CLEAR(kept)
    begin = i32(0)
    while begin < k:
        left = i32(least(i32(k - begin), DEPTH))
        kk = i32(share * UNIT)
        if EARLY:
            load_early(values, at, long, begin, kk, left, share)
        block_barrier()  # the slice before has been read by all
        bring(memory, side, t, place, begin, left, few)
        block_barrier()
        while kk < left:
            if all_there(kk, left, share):
                if not EARLY:
                    load_all(values, at, long, begin, kk)
                for a in unrolled(AHEAD):
                    here = i32(kk + a * (SHARERS * UNIT))
                    MULTIPLY(total, values, a, i32(memory + here * FACTOR_BYTES))
            else:
                if not EARLY:
                    load_some(values, at, long, begin, kk, left)
                for a in unrolled(AHEAD):
                    here = i32(kk + a * (SHARERS * UNIT))
                    if here < left:
                        MULTIPLY(total, values, a, i32(memory + here * FACTOR_BYTES))
            kk = i32(kk + AHEAD * SHARERS * UNIT)
            if EARLY:
                load_early(values, at, long, begin, kk, left, share)
        if CHAINS:
            ADD(kept, total)
            CLEAR(total)
        begin = i32(begin + DEPTH)
    ADD(kept, total)
    # the bias of a thread's first element is on its way meanwhile
    own, s = of_result(t)
    offset = ACCUMULATOR(0)
    if t < LINES * SIDE and first + own < lines and s < few:
        offset = bias_of(ends, place, i64(s) if COLUMNS else i64(first + own))
    block_barrier()
    for j in unrolled(TOTAL):
        PUT_ONE(i32(memory + (j * PITCH + t + (t >> 5)) * SIZE), kept[j])
    block_barrier()
    if SHARERS > JOINED:
        i = i32(t)
        while i < LINES * SIDE * (SHARERS // JOINED):
            line, s = of_result(i32(i >> JOIN_BITS))
            own = i32((i & (SHARERS // JOINED - 1)) * JOINED)
            to = take_line(memory, line, s, own)
            value = TAKE_ONE(to)
            for x in unrolled(1, JOINED):
                value = value + TAKE_ONE(take_line(memory, line, s, i32(own + x)))
            PUT_ONE(to, value)
            i = i32(i + THREADS)
        block_barrier()
    finish(memory, ends, sums, offset, m, n, t, few, lines, place, plane, first)


def finish(memory, ends: Ends, sums, offset, m, n, t, few, lines, place, plane, first):
    """The epilogue of the elements of a block, and the sums of its columns.

    `offset` is the bias of the thread's first element.
    """
    number = i32(t)
    while number < LINES * SIDE:
        own, s = of_result(number)
        line = i32(first + own)
        result = ACCUMULATOR(0)
        if line < lines and s < few:
            value = TAKE_ONE(take_line(memory, own, s, i32(0)))
            for x in unrolled(1, SHARERS // STEP):
                value = value + TAKE_ONE(take_line(memory, own, s, i32(x * STEP)))
            row, column = (i64(line), i64(s)) if COLUMNS else (i64(s), i64(line))
            if number != t:
                offset = bias_of(ends, place, column)
            result = finish_sum(value, offset, ends, place, plane, row, column)
        if SUMS:
            PUT_ONE(i32(memory + (TOTAL * PITCH + number) * SIZE), result)
        number = i32(number + THREADS)
    if SUMS:
        block_barrier()
        sum_columns(i32(memory + TOTAL * PITCH * SIZE), sums, m, n, t, few, lines, place, first)


def sum_columns(memory, sums, m, n, t, few, lines, place, first):
    """The sums of the columns of a block, in runs of RUN rows; `memory` has its results."""
    if COLUMNS:
        i = i32(t)
        while i < LINES // RUN * SIDE:
            s, own = i32(i & (SIDE - 1)), i32((i >> SIDE_BITS) * RUN)
            run = ACCUMULATOR(0)
            for x in unrolled(RUN):
                run = run + TAKE_ONE(i32(memory + ((own + x) * SIDE + s) * SIZE))
            PUT_ONE(i32(memory + (LINES * SIDE + i) * SIZE), run)
            i = i32(i + THREADS)
        block_barrier()
        if t < few:
            total, i = ACCUMULATOR(0), i32(0)
            while i < LINES // RUN:
                total = total + TAKE_ONE(i32(memory + (LINES * SIDE + i * SIDE + t) * SIZE))
                i = i32(i + 1)
            rows = i64((m + LINES - 1) // LINES)
            STORE_SUM(sums + ((place * rows + cuda.blockIdx.x) * n + t) * SIZE, total)
    else:
        own = i32(t)
        while own < LINES:
            if first + own < lines:
                total = ACCUMULATOR(0)
                for x in unrolled(SIDE):
                    total = total + TAKE_ONE(i32(memory + (x * LINES + own) * SIZE))
                STORE_SUM(sums + (place * n + first + own) * SIZE, total)
            own = i32(own + THREADS)
