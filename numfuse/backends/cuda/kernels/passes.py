"""The passes over memory beside the products: joins of planes, slopes, sums of columns, copies.

Each function returns launches. The kernels take any dtype and any strides, one element at a time.
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
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import kernel_of
from numfuse.backends.cuda.kernels import joins as wide_joins
from numfuse.backends.cuda.kernels.elementwise import formula, is_short
from numfuse.backends.cuda.kernels.epilogue import element, in_elements
from numfuse.backends.cuda.kernels.joins import corrected, plus
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Product, Slot
from numfuse.epilogues import Epilogue

__all__ = ["COPY_AXES", "Planes", "chunks", "copies", "joins", "slopes", "threads_of"]

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
def join(planes, out: Array, size, columns, depth, width, groups, total):
    """out[o, g] = the sum of planes[o, q] with q in the group g of `width`, in their order.

    What additions lose is summed beside it: a sum is rounded once, however many planes there are.
    """
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        within, group, place = i % size, i // size % groups, i // (size * groups)
        first = group * width
        last = min(first + width, depth)
        at = (place * depth + first) * size + within
        value, error = ZERO, ZERO
        for _ in range(first, last):
            value, error = plus(value, error, LOAD(planes, at))
            at += size
        value = corrected(value, error)
        at = group * size + element(out, place, within // columns, within % columns)
        STORE(out.address, at, value)


#: Strides are in elements.
JOIN = Schema(join, u64="planes out_address")


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
        bindings = {
            "LOAD": elements.loads(accumulator),
            "STORE": elements.stores(kind),
            "ZERO": np.dtype(accumulator).type(0),
        }
        made = kernel_of(join, JOIN, bindings, threads=threads_of(info), name=f"join {kind}")
        arguments = JOIN(
            planes=source,
            out=Array(target, *steps),
            size=size,
            columns=columns,
            depth=depth,
            width=width,
            groups=groups,
            total=total,
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


@dataclass(frozen=True)
class Planes:
    """Where a product whose K is cut into parts (split-K) stores them: planes in the workspace.

    One part is stored in the result.
    """

    operand: Operand
    slot: Slot
    parts: int

    @classmethod
    def of(cls, product: Product, parts: int, workspace: int) -> Planes:
        """Return the planes behind so many bytes of the workspace."""
        if parts == 1:
            return cls(product.out, Slot("out"), parts)
        strides = (product.m * product.n, product.n, 1)
        return cls(Operand(product.accumulator, strides, 16), Slot("work", workspace), parts)

    def joined(self, product: Product, info: DeviceInfo) -> tuple[tuple[Launch, ...], int]:
        """Return the launches that add up the planes in their order, and the workspace."""
        p, acc = product, product.accumulator
        if self.parts == 1:
            return (), 0
        end = self.slot.offset + p.places * self.parts * p.m * p.n * self.operand.itemsize
        stage = Slot("work", -(-end // 256) * 256)
        lengths = p.places, self.parts, p.m, p.n
        if info.capability[0] and wide_joins.fits(p.out, lengths, acc):
            return (wide_joins.rows(acc, self.slot, p.out, lengths),), stage.offset
        launches, staged = joins(
            info, acc, self.slot, Slot("out"), p.out.dtype, *lengths, p.out.strides, stage
        )
        return launches, stage.offset + staged


# --- slopes -------------------------------------------------------------------------------------
def slope(pre: Array, extra: Array, out: Array, sums, m, n, chunks, length, total):
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
                    x = LOAD_PRE(pre.address, element(pre, place, row, column))
                made = FORMULA(x, LOAD_EXTRA(extra.address, element(extra, place, row, column)))
                if OUT:
                    STORE(out.address, element(out, place, row, column), made)
                run = run + made
            value = value + run
        if SUMS:
            STORE_SUM(sums, i, value)


def chunks(m: int) -> int:
    """Rows of the sums of columns that `slopes` makes."""
    return -(-m // tiling.PASS_ROWS)


#: Strides are in elements.
SLOPE = Schema(slope, u64="pre_address extra_address out_address sums")


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
    bindings = {
        "PRE": pre is not None,
        "OUT": out is not None,
        "SUMS": sums,
        "RUN": tiling.RUN,
        "FORMULA": formula(chosen, ("z", "grad"), accumulator, short=short),
        "LOAD_PRE": elements.loads(accumulator if pre is None else pre.dtype),
        "LOAD_EXTRA": elements.loads(extra.dtype),
        "STORE": elements.stores(accumulator if out is None else out.dtype),
        "STORE_SUM": elements.stores(accumulator),
        "ZERO": np.dtype(accumulator).type(0),
    }
    made = kernel_of(slope, SLOPE, bindings, threads=threads_of(info), name=epilogue.name)
    arguments = SLOPE(
        pre=in_elements(Slot("pre"), pre),
        extra=in_elements(Slot("extra"), extra),
        out=in_elements(Slot("out"), out),
        sums=Slot("sums") if sums else 0,
        m=m,
        n=n,
        chunks=many,
        length=tiling.PASS_ROWS,
        total=total,
    )
    return Launch(made, grid_of(total, info), arguments)


# --- copies -------------------------------------------------------------------------------------
@dataclass
class Four:
    """An array of four axes: its address, and the strides in elements."""

    address: Any
    s0: Any
    s1: Any
    s2: Any
    s3: Any


def copy(source: Four, out: Four, n1, n2, n3, total):
    """out = source, converted; the first of the four axes is what is left of `total`."""
    for i in range(cuda.grid(1), total, cuda.gridsize(1)):
        i3, rest = i % n3, i // n3
        i2, rest = rest % n2, rest // n2
        i1, i0 = rest % n1, rest // n1
        at = i0 * source.s0 + i1 * source.s1 + i2 * source.s2 + i3 * source.s3
        value = LOAD(source.address, at)
        STORE(out.address, i0 * out.s0 + i1 * out.s1 + i2 * out.s2 + i3 * out.s3, value)


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
    total = n0 * n1 * n2 * n3
    bindings = {"LOAD": elements.loads(source), "STORE": elements.stores(out)}
    name = f"copy {source} {out}"
    made = kernel_of(copy, COPY, bindings, threads=threads_of(info), name=name)
    zeros = (0,) * lead
    arguments = COPY(
        source=Four(Slot("x"), *zeros, *source_strides),
        out=Four(Slot("out"), *zeros, *out_strides),
        n1=n1,
        n2=n2,
        n3=n3,
        total=total,
    )
    return Launch(made, grid_of(total, info), arguments)
