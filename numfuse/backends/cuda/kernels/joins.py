"""Joins: sums of planes, the parts of a sum over K or over places.

The order of a sum is fixed by the number of its planes, whatever the device. What its additions
lose is summed beside it, so that it is rounded once, however many planes there are.

A thread joins neighbours of a row, 16 bytes of each plane or one value (`join`); where there are
few columns, several threads share one (`join_columns`).
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import accesses, elements, intrinsics
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import cuda, device_function, types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of, unrolled
from numfuse.backends.cuda.kernels.epilogue import element, in_bytes
from numfuse.backends.cuda.kernels.passes import grid_of, one_value, threads_of
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Slot

#: Blocks of a grid along y.
MOST_ALONG_Y = (1 << 16) - 1


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


def add_planes(total, error, ahead, at, count, step):
    """Add VALUES neighbours of `count` planes to `total`, and to `error` what the additions lose.

    The planes are `step` bytes apart, the first is at `at`. AHEAD are on their way together, then
    THEN. (The
    registers are the caller's: in the simulator, threads share the `cuda` of a device function.)
    """
    for few in unrolled(2):
        SOME = THEN if few else AHEAD
        while count >= SOME:
            for u in unrolled(SOME):
                loaded = LOAD(at + u * step)
                for v in unrolled(VALUES):
                    ahead[u * VALUES + v] = loaded[v]
            for u in unrolled(SOME):
                for v in unrolled(VALUES):
                    total[v], error[v] = plus(total[v], error[v], ahead[u * VALUES + v])
            at += SOME * step
            count -= SOME
    while count > 0:
        loaded = LOAD(at)
        for v in unrolled(VALUES):
            total[v], error[v] = plus(total[v], error[v], loaded[v])
        at += step
        count -= 1


@dataclass
class Stack:
    """Planes that are joined; steps in bytes."""

    #: Values of a row that count; its memory has room for `per_row` times VALUES.
    columns: Any
    per_row: Any
    #: Planes of a place, the groups that they are joined in, from a plane and a place to the next.
    depth: Any
    groups: Any
    step: Any
    place_step: Any


def join_one(total, error, ahead, planes, stack: Stack, out: Array, number, i):
    """Join the VALUES neighbours number i of the planes of a place, or of a group of them."""
    for v in unrolled(VALUES):
        total[v] = ZERO
        error[v] = ZERO
    place, count = number, stack.depth
    at = planes + i * (VALUES * ITEMSIZE)
    if GROUP:
        place = number // stack.groups
        first = (number - place * stack.groups) * GROUP
        count = min(GROUP, stack.depth - first)
        at += first * stack.step
    add_planes(total, error, ahead, at + place * stack.place_step, count, stack.step)
    for v in unrolled(VALUES):
        total[v] = corrected(total[v], error[v])
    row = i // stack.per_row
    column = (i - row * stack.per_row) * VALUES
    to = out.address + element(out, number, row, column)
    if WIDE:
        STORE(to, total)
    else:
        for v in unrolled(VALUES):
            if column + v < stack.columns:
                STORE(to + v * out.column, 0, total[v])


def join(planes, stack: Stack, out: Array, numbers, vectors):
    """out[o, g] = the sum of planes[o, q] over q in group g; a thread has VALUES neighbours.

    `numbers` are those of (o, g), g inside; a group has GROUP planes, and the last what is left.
    """
    if OVERLAPS:
        grid_wait()
        grid_release()
    total = cuda.local.array(VALUES, REAL)
    error = cuda.local.array(VALUES, REAL)
    ahead = cuda.local.array(VALUES * AHEAD, REAL)
    if VALUES > 1:
        i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if i < vectors:
            join_one(total, error, ahead, planes, stack, out, cuda.blockIdx.y, i)
    else:
        for index in range(cuda.grid(1), numbers * vectors, cuda.gridsize(1)):
            number = index // vectors
            i = index - number * vectors
            join_one(total, error, ahead, planes, stack, out, number, i)


#: Steps and strides are in bytes.
JOIN = Schema(join)


def join_columns(planes, out: Array, n, depth):
    """out[o, c] = the sum of planes[o, q, c] over q; ACROSS columns a block.

    Lane r of LANES adds up planes r, r + LANES, ..., and thread 0 of a column the lanes.
    """
    if OVERLAPS:
        grid_wait()
        grid_release()
    shared = cuda.shared.array((2 * LANES, ACROSS), REAL)
    total = cuda.local.array(1, REAL)
    error = cuda.local.array(1, REAL)
    ahead = cuda.local.array(AHEAD, REAL)
    total[0], error[0] = ZERO, ZERO
    c = cuda.threadIdx.x & (ACROSS - 1)
    r = cuda.threadIdx.x >> ACROSS_BITS
    column = cuda.blockIdx.x * ACROSS + c
    place = cuda.blockIdx.y
    if column < n:
        at = planes + ((place * depth + r) * n + column) * ITEMSIZE
        count = (depth - r + (LANES - 1)) // LANES
        add_planes(total, error, ahead, at, count, n * (LANES * ITEMSIZE))
    shared[r, c] = total[0]
    shared[LANES + r, c] = error[0]
    cuda.syncthreads()
    if r == 0 and column < n:
        value, missed = ZERO, ZERO
        for lane in range(LANES):
            before, value = value, value + shared[lane, c]
            missed = missed + (lost(before, shared[lane, c], value) + shared[LANES + lane, c])
        STORE(out.address + element(out, place, 0, column), 0, corrected(value, missed))


#: Strides are in bytes.
COLUMNS = Schema(join_columns)


def _bindings(accumulator: str, values: int) -> dict[str, Any]:
    """Return what `add_planes` is bound to, with so many neighbours of a plane a thread."""
    if values > 1:
        load = accesses.load(accumulator, values, accumulator)
    else:
        load = inlined(one_value, LOAD_ELEMENT=elements.loads(accumulator))
    return {
        "VALUES": values,
        "AHEAD": tiling.JOIN_AHEAD,
        "THEN": tiling.JOIN_THEN,
        "REAL": getattr(types, accumulator),
        "ZERO": np.dtype(accumulator).type(0),
        "ITEMSIZE": intrinsics.itemsize(accumulator),
        "LOAD": load,
    }


def _fits(out: Operand, n: int, accumulator: str) -> bool:
    """Return whether contiguous planes are joined to whole accesses of the result."""
    return out.in_wholes(n, 16 // intrinsics.itemsize(accumulator))


def rows(
    info: DeviceInfo,
    accumulator: str,
    planes: Slot,
    out: Operand,
    lengths: tuple[int, int, int, int],
    steps: tuple[int, int, int] | None = None,
    overlaps: bool = False,
    *,
    slot: Slot | None = None,
    values: int = 0,
    group: int = 0,
) -> Launch:
    """Return the join of planes, each thread with 16 bytes of a plane or `values` neighbours.

    `planes` begin at a multiple of what is joined at a time. `lengths` are places, planes of each,
    rows and columns; `steps`, multiples of `values`, lead from a place, a plane and a row to the
    next (by default they are contiguous). `overlaps`: the launch may begin before the one before it
    has ended. `slot` is where `out` lies, "out" by default; `group` planes make a sum, 0 for all.
    """
    count, depth, m, n = lengths
    place, plane, pitch = steps or (depth * m * n, m * n, n)
    size = intrinsics.itemsize(accumulator)
    values = values or 16 // size
    wide = values > 1 and _fits(out, n, accumulator)
    threads = threads_of(info)
    store = elements.stores(out.dtype)
    if wide:
        store = accesses.store_array(out.dtype, values, accumulator)
    bindings = _bindings(accumulator, values) | {
        "THREADS": threads,
        "GROUP": group,
        "WIDE": wide,
        "OVERLAPS": overlaps,
        "STORE": store,
    }
    made = kernel_of(join, JOIN, bindings, threads=threads, name=f"join {out.dtype}")
    groups = -(-depth // group) if group else 1
    vectors = m * (pitch // values)
    stack = Stack(n, pitch // values, depth, groups, plane * size, place * size)
    to, numbers = in_bytes(slot or Slot("out"), out), count * groups
    arguments = JOIN(planes=planes, stack=stack, out=to, numbers=numbers, vectors=vectors)
    # by 16 bytes there are no divisions for a place, nor for the simulator loops
    flat = grid_of(numbers * vectors, info)
    grid = flat if values == 1 else (-(-vectors // threads), count, 1)
    return Launch(made, grid, arguments, overlaps=overlaps)


def columns(
    accumulator: str,
    planes: Slot,
    out: Operand,
    lengths: tuple[int, int, int, int],
    overlaps: bool = False,
) -> Launch:
    """Return the join of contiguous planes of one row to the slot "out"; arguments as of `rows`."""
    count, depth, _, n = lengths
    deepest = depth >= tiling.JOIN_DEEPEST and n < tiling.JOIN_WIDE
    lanes, across = tiling.JOIN_LANES[deepest]
    bindings = _bindings(accumulator, 1) | {
        "LANES": lanes,
        "ACROSS": across,
        "ACROSS_BITS": across.bit_length() - 1,
        "OVERLAPS": overlaps,
        "STORE": elements.stores(out.dtype),
    }
    name = f"join columns {out.dtype}"
    made = kernel_of(join_columns, COLUMNS, bindings, threads=across * lanes, name=name)
    arguments = COLUMNS(planes=planes, out=in_bytes(Slot("out"), out), n=n, depth=depth)
    return Launch(made, (-(-n // across), count, 1), arguments, overlaps=overlaps)


def joins(
    info: DeviceInfo,
    accumulator: str,
    planes: Slot,
    out: Operand,
    lengths: tuple[int, int, int, int],
    stage: Slot,
    overlaps: bool = False,
) -> tuple[tuple[Launch, ...], int]:
    """Return the joins of contiguous planes to the slot "out", and the bytes they want at `stage`.

    So many planes are joined at a time that the tree in which they are added up depends on their
    number alone. `lengths` and `overlaps` as of `rows`; nothing is aligned but to its dtype.
    """
    count, depth, m, n = lengths
    if info.capability[0] and m == 1 and depth >= tiling.JOIN_DEEP and count <= MOST_ALONG_Y:
        return (columns(accumulator, planes, out, lengths, overlaps),), 0
    itemsize = intrinsics.itemsize(accumulator)
    between = Operand(accumulator, (m * n, n, 1), itemsize)
    launches: list[Launch] = []
    used = 0
    while depth > tiling.JOINED:
        target, lengths = Slot(stage.name, stage.offset + used), (count, depth, m, n)
        made = rows(
            info, accumulator, planes, between, lengths, overlaps=overlaps,
            slot=target, values=1, group=tiling.JOINED,
        )  # fmt: skip
        launches.append(made)
        planes, depth = target, -(-depth // tiling.JOINED)
        used += tiling.round_up(count * depth * m * n * itemsize, 256)
    lengths = count, depth, m, n
    launches.append(rows(info, accumulator, planes, out, lengths, overlaps=overlaps, values=1))
    return tuple(launches), used
