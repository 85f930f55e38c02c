"""The passes over memory beside the products: slopes, sums of columns, copies.

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
from numfuse.backends.cuda.kernels.elementwise import formula, is_short
from numfuse.backends.cuda.kernels.epilogue import element, in_elements
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Operand, Slot
from numfuse.epilogues import Epilogue

__all__ = ["COPY_AXES", "chunks", "copies", "grid_of", "slopes", "threads_of"]

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
