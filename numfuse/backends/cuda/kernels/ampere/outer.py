"""Bare products with a short K, d_b of few rows: what matters is how fast the result is written.

A thread keeps its columns of Y in registers and walks down some rows, of which it stores 16 bytes
each, or less where rows are no whole 16 bytes. A sum is one chain in the order of K.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Array, Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, types
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.kernels.epilogue import in_bytes
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Plan, Product, Slot, Tier
from numfuse.language.curves import leaf

#: K up to which, elements of the result from which on, threads of a
#: block and their rows. On an H200 the tiles above write d_b of 4096 x 4096 in float64 at 2.6 TB/s,
#: cuBLAS's kernel for K = 1 at 4.5.
OUTER_K = 8
OUTER_LEAST = 1 << 16
OUTER_THREADS = 128
OUTER_ROWS = 32


def _outer(x: Array, y: Array, out: Array, m, n):
    column = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * VALUES
    row = cuda.blockIdx.y * ROWS
    place = cuda.blockIdx.z
    if column < n:
        factors = cuda.local.array(DEPTH * VALUES, dtype=ACCUMULATOR)
        total = cuda.local.array(VALUES, dtype=ACCUMULATOR)
        y_at = y.address + place * y.place + column * y.column
        for q in unrolled(DEPTH):
            if Y_RUNS:
                loaded = LOAD_Y(y_at + q * y.row)
                for v in unrolled(VALUES):
                    factors[q * VALUES + v] = loaded[v]
            else:
                for v in unrolled(VALUES):
                    factors[q * VALUES + v] = LOAD_ONE(y_at + q * y.row + v * y.column)
        x_at = x.address + place * x.place + row * x.row
        out_at = out.address + place * out.place + row * out.row + column * OUT_BYTES
        end = min(row + ROWS, m)
        while row < end:
            for v in unrolled(VALUES):
                total[v] = ACCUMULATOR(0)
            for q in unrolled(DEPTH):
                factor = LOAD_X(x_at + q * x.column)
                for v in unrolled(VALUES):
                    total[v] = fused(factor, factors[q * VALUES + v], total[v])
            STORE(out_at, total)
            x_at += x.row
            out_at += out.row
            row += 1


#: Strides are in bytes.
ARGUMENTS = Schema(_outer)


def _kernel(p: Product, values: int) -> Kernel:
    acc = p.accumulator
    bindings = {
        "THREADS": OUTER_THREADS,
        "VALUES": values,
        "DEPTH": p.k,
        "ROWS": OUTER_ROWS,
        "Y_RUNS": p.y.in_wholes(p.n, values),
        "OUT_BYTES": p.out.itemsize,
        "ACCUMULATOR": getattr(types, acc),
        "LOAD_X": accesses.load(p.x.dtype, 1, acc),
        "LOAD_ONE": accesses.load(p.y.dtype, 1, acc),
        "LOAD_Y": passes.loads(p.y.dtype, values, acc),
        "STORE": accesses.store_array(p.out.dtype, values, acc),
    }
    threads, name = OUTER_THREADS, f"short K {p.out.dtype}"
    return kernel_of(_outer, ARGUMENTS, bindings, threads=threads, name=name)


def _has_its_order(product: Product) -> bool:
    """Return whether a sum may be one chain in the order of K.

    d_b alone has no epilogue for sure, and may have its sum in an order of its own. Other bare
    products (d_a of few columns) may, where any other kernel makes the same bits: of one term, and
    in float32.
    """
    p = product
    graphs = p.epilogue.graphs
    bare = len(graphs) == 1 and graphs[0] is leaf("z") and not (p.sums or p.is_rich or p.members)
    same = p.k == 1 or (p.x.dtype == p.accumulator == "float32")
    return p.free or (bare and same)


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it; None for others, and where rows are no runs of memory."""
    p = product
    if device.capability < (8, 0) or p.k > OUTER_K or p.precision != "ieee":
        return None
    if not _has_its_order(p) or p.m * p.n < OUTER_LEAST:
        return None
    # columns of a thread: 16 bytes of sums, or what rows are whole accesses of (of Y, which is
    # read once for OUTER_ROWS rows, they may be single values)
    values = 16 // intrinsics.itemsize(p.accumulator)
    while values > 1 and not p.out.in_wholes(p.n, values):
        values //= 2
    if p.x.dtype != p.y.dtype or not p.out.in_wholes(p.n, values):
        return None
    grid = -(-p.n // (OUTER_THREADS * values)), -(-p.m // OUTER_ROWS), p.places
    if max(grid[1:]) >= 1 << 16:
        return None
    arrays = {name: in_bytes(Slot(name), getattr(p, name)) for name in ("x", "y", "out")}
    launch = Launch(_kernel(p, values), grid, ARGUMENTS(**arrays, m=p.m, n=p.n))
    shown = f"{OUTER_ROWS} rows of {values} columns a thread, K = {p.k}"
    return Plan((launch,), shown)


SHORT_K = Tier("cores", take)
