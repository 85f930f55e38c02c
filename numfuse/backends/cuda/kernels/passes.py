"""The passes over memory beside the products: joins of planes, slopes, sums of columns, copies.

Each function returns launches. The kernels take any dtype and any strides, one element at a time.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import cuda, kernel
from numfuse.backends.cuda.kernels import joins as wide_joins
from numfuse.backends.cuda.kernels.elementwise import formula, is_short
from numfuse.backends.cuda.kernels.joins import corrected, lost
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Slot, strides
from numfuse.epilogues import Epilogue

__all__ = ["COPY_AXES", "chunks", "copies", "joins", "slopes", "threads_of"]

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


# --- joins --------------------------------------------------------------------------------------
def join(planes, out, size, columns, depth, width, groups, total, out_place, out_row, out_column):
    """out[o, g] = the sum of planes[o, q] with q in the group g of `width`, in their order.

    What additions lose is summed beside it: a sum is rounded once, however many planes there are.
    """
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        element, group, place = i % size, i // size % groups, i // (size * groups)
        first = group * width
        last = min(first + width, depth)
        at = (place * depth + first) * size + element
        value, error = ZERO, ZERO
        for _ in range(first, last):
            plane = LOAD(planes, at)
            before, value = value, value + plane
            error = error + lost(before, plane, value)
            at += size
        value = corrected(value, error)
        row, column = element // columns, element % columns
        STORE(out, place * out_place + group * size + row * out_row + column * out_column, value)


#: Strides are in elements.
JOIN = Schema(join, u64="planes out")


def joins(
    info: DeviceInfo,
    accumulator: str,
    planes: Slot,
    out: Slot,
    dtype: str,
    count: int,
    depth: int,
    rows: int,
    columns: int,
    strides: tuple[int, int, int],
    stage: Slot,
) -> tuple[tuple[Launch, ...], int]:
    """out[o] = the sum of planes[o, q] over q, and the bytes that it wants at `stage`.

    The planes (count, depth, rows, columns) are contiguous, and so many at a time that the tree in
    which they are added up depends on their number alone. `strides` are those of `out` (place, row,
    column), in elements.
    """
    if info.capability[0] and rows == 1 and depth >= tiling.JOIN_DEEP and count < 1 << 16:
        steps = strides[0], strides[2]
        launch = wide_joins.columns(accumulator, planes, out, dtype, count, depth, columns, steps)
        return (launch,), 0
    size = rows * columns
    itemsize = 8 if accumulator == "float64" else 4
    launches: list[Launch] = []
    used = 0
    source = planes

    def add(target: Slot, kind: str, width: int, groups: int, steps: tuple[int, int, int]) -> None:
        total = count * groups * size
        made = kernel(
            join,
            JOIN.signature,
            threads=threads_of(info),
            name=f"join {kind}",
            LOAD=elements.loads(accumulator),
            STORE=elements.stores(kind),
            ZERO=np.dtype(accumulator).type(0),
        )
        arguments = JOIN(
            planes=source,
            out=target,
            size=size,
            columns=columns,
            depth=depth,
            width=width,
            groups=groups,
            total=total,
            out_place=steps[0],
            out_row=steps[1],
            out_column=steps[2],
        )
        launches.append(Launch(made, grid_of(total, info), arguments))

    while depth > tiling.JOINED:
        groups = -(-depth // tiling.JOINED)
        target = Slot(stage.name, stage.offset + used)
        add(target, accumulator, tiling.JOINED, groups, (groups * size, columns, 1))
        used += -(-count * groups * size * itemsize // 256) * 256
        source, depth = target, groups
    add(out, dtype, max(depth, 1), 1, strides)
    return tuple(launches), used


# --- slopes -------------------------------------------------------------------------------------
def slope(
    pre,
    extra,
    out,
    sums,
    m,
    n,
    chunks,
    length,
    total,
    pre_place,
    pre_row,
    pre_column,
    extra_place,
    extra_row,
    extra_column,
    out_place,
    out_row,
    out_column,
):
    """out = FORMULA(pre, extra), and the sums of its columns over chunks of `length` rows."""
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        column, chunk, place = i % n, i // n % chunks, i // (n * chunks)
        first = chunk * length
        value, end = ZERO, min(first + length, m)
        for begin in range(first, end, RUN):
            run = ZERO
            for row in range(begin, min(begin + RUN, end)):
                x = ZERO
                if PRE:
                    x = LOAD_PRE(pre, place * pre_place + row * pre_row + column * pre_column)
                at = place * extra_place + row * extra_row + column * extra_column
                made = FORMULA(x, LOAD_EXTRA(extra, at))
                if OUT:
                    STORE(out, place * out_place + row * out_row + column * out_column, made)
                run = run + made
            value = value + run
        if SUMS:
            STORE_SUM(sums, i, value)


def chunks(m: int) -> int:
    """Rows of the sums of columns that `slopes` makes."""
    return -(-m // tiling.PASS_ROWS)


#: Strides are in elements.
SLOPE = Schema(slope, u64="pre extra out sums")


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
) -> Launch:
    """out = the epilogue's first result, of the accumulator `pre` and the operand `extra`.

    Its slots are pre, extra, out and sums.
    """
    many = chunks(m)
    total = places * many * n
    chosen = epilogue.select(epilogue.results[0][0])
    short = out is not None and is_short(accumulator, out.dtype)
    made = kernel(
        slope,
        SLOPE.signature,
        threads=threads_of(info),
        name=epilogue.name,
        PRE=pre is not None,
        OUT=out is not None,
        SUMS=sums,
        RUN=tiling.RUN,
        FORMULA=formula(chosen, ("z", "grad"), accumulator, short=short),
        LOAD_PRE=elements.loads(accumulator if pre is None else pre.dtype),
        LOAD_EXTRA=elements.loads(extra.dtype),
        STORE=elements.stores(accumulator if out is None else out.dtype),
        STORE_SUM=elements.stores(accumulator),
        ZERO=np.dtype(accumulator).type(0),
    )
    arguments = SLOPE(
        pre=Slot("pre") if pre else 0,
        extra=Slot("extra"),
        out=Slot("out") if out else 0,
        sums=Slot("sums") if sums else 0,
        m=m,
        n=n,
        chunks=many,
        length=tiling.PASS_ROWS,
        total=total,
        **strides("elements", pre=pre, extra=extra, out=out),
    )
    return Launch(made, grid_of(total, info), arguments)


# --- copies -------------------------------------------------------------------------------------
def copy(source, out, n1, n2, n3, total, s0, s1, s2, s3, o0, o1, o2, o3):
    """out = source, converted; both of four axes, of which the first is what is left of `total`."""
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        i3, rest = i % n3, i // n3
        i2, rest = rest % n2, rest // n2
        i1, i0 = rest % n1, rest // n1
        value = LOAD(source, i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3)
        STORE(out, i0 * o0 + i1 * o1 + i2 * o2 + i3 * o3, value)


COPY = Schema(copy, u64="source out")


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
    n = (1,) * lead + tuple(shape)
    total = n[0] * n[1] * n[2] * n[3]
    made = kernel(
        copy,
        COPY.signature,
        threads=threads_of(info),
        name=f"copy {source} {out}",
        LOAD=elements.loads(source),
        STORE=elements.stores(out),
    )
    zeros = (0,) * lead
    steps = {f"s{i}": s for i, s in enumerate((*zeros, *source_strides))}
    steps |= {f"o{i}": s for i, s in enumerate((*zeros, *out_strides))}
    arguments = COPY(
        source=Slot("x"), out=Slot("out"), n1=n[1], n2=n[2], n3=n[3], total=total, **steps
    )
    return Launch(made, grid_of(total, info), arguments)
