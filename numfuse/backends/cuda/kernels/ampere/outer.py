"""Products with a short K, d_b of few rows among them: what matters is how fast a result is made.

A thread keeps its columns of Y in registers and walks down some rows of X, which lie in shared
memory, where all threads of a warp read the same values. A row of it ends in the epilogue at once:
nothing of it passes through shared memory, and so rows may begin anywhere. A sum is one chain in
the order of K.
"""

# A kernel has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from numfuse.backends.cuda.compile import accesses, intrinsics
from numfuse.backends.cuda.compile.intrinsics import (
    block_barrier,
    least,
    quotient,
    shared_address,
)
from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Array, Ends, Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, types
from numfuse.backends.cuda.compile.unroll import bound, kernel_of, unrolled
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.kernels.ampere.epilogue import (
    Second,
    begin_columns,
    finish_row,
    load_row,
    sum_columns,
)
from numfuse.backends.cuda.kernels.epilogue import finish_of, finishing, in_bytes
from numfuse.backends.cuda.kernels.hopper.tiling import copies_pay
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Plan, Product, Slot, Tier, Way
from numfuse.language.curves import leaf

i32, i64 = np.int32, np.int64

#: Elements of a result from which on it is worth another kernel, and K up to which: for any result,
#: and for those whose rows are no whole 16 bytes, which tiles store value by value. On an H100, in
#: microseconds of tiles and of this kernel: float16 24849 x 20 x 83 16 and 14, 24941 x 34 x 438 37
#: and 52, the slope of 1003 x 17 x 7781 61 and 43, bfloat16 18 x 13 x 57818 19 and 9; float32
#: 32641 x 20 x 31 15 and 10, 387 x 33 x 373 9 and 8; float64, whose tensor cores add faster, 6278 x
#: 18 x 71 9 and 10, 528 x 27 x 5407 20 and 33.
LEAST = 1 << 16
SHORT = 8
ODD = {"float32": 40, "float64": SHORT, "float16": 24, "bfloat16": 24}
#: Rows and columns of which each is left to the kernels of few vectors.
FEW = 8
#: Values of K that a kernel has room for: one is compiled for each of these, and others are zeros.
#: (d_b of 5 x 4096 x 4096 in bfloat16 took an H200 13.8 us with a kernel of its own and 16.2 with
#: that of 8; of 3 rows, 30001 x 1001 in float32, 43.0 and 48.1 with that of 4.)
DEPTHS = (*range(1, SHORT + 1), *range(SHORT + 4, max(ODD.values()) + 1, 4))
#: Threads of a block; rows that each of them has, the most first, and those of a block.
THREADS = 128
ROWS, BLOCK_ROWS = (32, 16, 8), 128
#: Threads side by side, and so many times the fewest for all columns that may be too many.
SIDES, IDLE = (128, 64, 32, 16), 1.1
#: Rows of a thread that are on their way together.
AHEAD = 4
#: Bytes of X that are on their way to a thread's registers together.
BROUGHT_BYTES = 48
#: Blocks that keep a multiprocessor busy, and of threads whose columns are apart. (An H200 took 9.0
#: us for 32641 x 20 x 31 in float32 with 510 blocks of 16 rows of one column a thread, 9.7 with
#: 1,020 of 8, and 10.7 with 511 of 8 rows of two columns; 15.4 for 23232 x 15 x 161 in bfloat16
#: with 1,089 of 16 rows, and 15.9 with 545 of 32.)
BUSY, BUSY_APART = 3.8, 4.3
#: Blocks that have registers on a multiprocessor, at the most, where K is more than `SHORT` and
#: blocks are more than `FREE`: what is loaded before the arithmetic would take so many that fewer
#: have. (23232 x 15 x 161 in bfloat16 15.4 us, and 19.8 without the limit.) Registers that a thread
#: has beside Y's, and those of a multiprocessor's threads.
RESIDENT, FREE, OWN, REGISTERS = 6, 4, 40, 1 << 16
#: Registers that a thread has for Y, in bytes.
FACTORS = 384


@dataclass(frozen=True)
class Block:
    """How the threads of a block share its rows and columns."""

    #: Values of K; columns of a thread; threads side by side; rows of a thread.
    depth: int
    values: int
    across: int
    rows: int
    #: Whether a thread's columns are as far apart as there are threads side by side.
    apart: bool = False
    #: Blocks that shall fit on a multiprocessor; 0: as many as do.
    resident: int = 0

    @property
    def step_n(self) -> int:
        """Columns from one of a thread's to the next."""
        return self.across if self.apart else 1

    @property
    def wide(self) -> int:
        """Values of an access of a row."""
        return 1 if self.apart else self.values

    @property
    def groups(self) -> int:
        """Threads below each other: rows of a thread are so many apart."""
        return THREADS // self.across

    @property
    def block_m(self) -> int:
        return self.rows * self.groups

    @property
    def columns(self) -> int:
        return self.across * self.values

    def step(self, size: int) -> int:
        """Return the values of an access of a row of X, of so many bytes each."""
        return min(16 // size, 1 << (self.depth - 1).bit_length())

    def pitch(self, size: int) -> int:
        """Return the values from a row of X in shared memory to the next: whole accesses."""
        return -(-self.depth // self.step(size)) * self.step(size)

    def shared_bytes(self, size: int) -> int:
        """Return the bytes of X's rows, or of the sums of columns that groups of threads have."""
        return size * max(self.block_m * self.pitch(size), self.groups * self.columns)

    def bounded(self, factors: int) -> Block:
        """Return it with as many blocks on a multiprocessor as leave so many bytes for Y."""
        most = REGISTERS // THREADS // (factors // 4 + OWN)
        return replace(self, resident=min(RESIDENT, most))

    def __str__(self) -> str:
        found = f"{self.rows} rows of {self.values} columns a thread, K up to {self.depth}"
        return found + f", {self.across} side by side"


def load_factors(factors, y: Array, place, column, n, k):
    """A thread's columns of a factor Y; zeros behind the last value of K.

    Every load is of what is there, so that none waits for a condition: what lies behind an end is
    read in the last place before it.
    """
    at = cuda.local.array(VALUES, dtype=types.int64)
    for v in unrolled(1 if Y_RUNS else VALUES):
        here = least(i32(column + v * COLUMN_STEP), i32(n - WIDTH))
        at[v] = y.address + place * y.place + i64(here) * y.column
    for q in unrolled(DEPTH):
        if Y_RUNS:
            loaded = LOAD_Y(at[0])
            for v in unrolled(VALUES):
                factors[q * VALUES + v] = loaded[v]
        else:
            for v in unrolled(VALUES):
                factors[q * VALUES + v] = LOAD_ONE(at[v])
        step = y.row if q + 1 < k else i64(0)
        for v in unrolled(1 if Y_RUNS else VALUES):
            at[v] += step
    for q in unrolled(DEPTH):
        if q >= k:
            for v in unrolled(VALUES):
                factors[q * VALUES + v] = ACCUMULATOR(0)


def bring_rows(x: Array, memory, place, row0, m, k):
    """The block's rows of X to shared memory; zeros behind the last value of K.

    A thread has BROUGHT values on their way together, each of them of what is there.
    """
    base = x.address + place * x.place + i64(row0) * x.row
    held = cuda.local.array(BROUGHT, dtype=ACCUMULATOR)
    i = i32(cuda.threadIdx.x)
    while i < BLOCK_M * DEPTH:
        for u in unrolled(BROUGHT):
            row, q = row_of(i32(i + u * THREADS))
            row = least(row, i32(m - row0 - 1))
            held[u] = LOAD_X(base + i64(row) * x.row + i64(least(q, i32(k - 1))) * x.column)
        for u in unrolled(BROUGHT):
            row, q = row_of(i32(i + u * THREADS))
            if i + u * THREADS < BLOCK_M * DEPTH:
                value = held[u] if q < k else ACCUMULATOR(0)
                PUT_ONE(i32(memory + (row * PITCH + q) * ACC_BYTES), value)
        i = i32(i + BROUGHT * THREADS)


def row_of(i):
    """The row and the place in it of the i-th value: neighbours in memory have neighbours."""
    if X_ALONG_K:
        row = i32(quotient(i, DEPTH))
        return row, i32(i - row * DEPTH)
    q = i32(quotient(i, BLOCK_M))
    return i32(i - q * BLOCK_M), q


def multiply_row(value, factors, at):
    """A thread's sums of the row of X at an address of shared memory."""
    for v in unrolled(VALUES):
        value[v] = ACCUMULATOR(0)
    for q in unrolled(PITCH // STEP):
        if STEP > 1:
            loaded = TAKE(i32(at + q * (STEP * ACC_BYTES)))
            for s in unrolled(STEP):
                if q * STEP + s < DEPTH:
                    for v in unrolled(VALUES):
                        value[v] = fused(loaded[s], factors[(q * STEP + s) * VALUES + v], value[v])
        else:
            factor = TAKE_ONE(i32(at + q * ACC_BYTES))
            for v in unrolled(VALUES):
                value[v] = fused(factor, factors[q * VALUES + v], value[v])


def short_product(x: Array, y: Array, second: Second, ends: Ends, sums, m, n, k):
    """A block of out = epilogue(X Y): thread (c, r) has VALUES columns of every ROW_STEP-th row."""
    memory = i32(shared_address(cuda.shared.array(0, dtype=types.int64)))
    t = i32(cuda.threadIdx.x)
    c, r = i32(t & (COLUMN_THREADS - 1)), i32(t >> COLUMN_BITS)
    blocks = i32(quotient(n + (BLOCK_N - 1), BLOCK_N))
    block_rows = i32(quotient(m + (BLOCK_M - 1), BLOCK_M))
    number = i32(cuda.blockIdx.x)
    line = i32(quotient(number, blocks))
    column0 = i32((number - line * blocks) * BLOCK_N)
    column = i32(column0 + c * COLUMN_FIRST)
    place = i32(quotient(line, block_rows))
    row0 = i32((line - place * block_rows) * BLOCK_M)

    factors = cuda.local.array(DEPTH * VALUES, dtype=ACCUMULATOR)
    load_factors(factors, y, place, column, n, k)
    if TWO_SUMS:
        factors1 = cuda.local.array(DEPTH * VALUES, dtype=ACCUMULATOR)
        load_factors(factors1, second.y, place, column, n, k)
    bring_rows(x, memory, place, row0, m, k)
    offset = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    offset1 = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    added = cuda.local.array(VALUES * AHEAD, dtype=ACCUMULATOR)
    value = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    value1 = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    result = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    summed = cuda.local.array(VALUES, dtype=ACCUMULATOR)
    begin_columns(offset, offset1, summed, ends, second, place, column, n)
    ends.out.address += place * ends.out.place + i64(column) * ends.out.column
    ends.extra.address += place * ends.extra.place + i64(column) * ends.extra.column
    ends.pre.address += place * ends.pre.place + i64(column) * ends.pre.column
    second.pre.address += place * second.pre.place + i64(column) * second.pre.column
    block_barrier()
    while r < BLOCK_M and row0 + r < m:
        if EXTRA:
            for u in unrolled(AHEAD):
                row = i32(row0 + r + u * ROW_STEP)
                load_row(added, u * VALUES, ends.extra, row, column, m, n)
        for u in unrolled(AHEAD):
            at = i32(memory + (r + u * ROW_STEP) * (PITCH * ACC_BYTES))
            multiply_row(value, factors, at)
            if TWO_SUMS:
                multiply_row(value1, factors1, at)
            finish_row(
                value,
                value1,
                offset,
                offset1,
                added,
                u * VALUES,
                result,
                summed,
                ends,
                second,
                i32(row0 + r + u * ROW_STEP),
                column,
                m,
                n,
            )
        r = i32(r + AHEAD * ROW_STEP)
    if SUMS:
        sums += i64(line) * n * ACC_BYTES
        sum_columns(memory, summed, sums, n, i32(0), column0)


#: Strides are in bytes.
ARGUMENTS = Schema(short_product, i32="m n k")


def _kernel(p: Product, block: Block) -> Kernel:
    acc, size = p.accumulator, intrinsics.itemsize(p.accumulator)
    step = block.step(size)
    rights = [y for y in (p.y, p.y1) if y is not None]
    runs = not block.apart and all(y.in_wholes(p.n, block.values) for y in rights)
    bindings = bound(block, "depth values block_m")
    bindings |= finish_of(p, p.out.dtype, block.wide)
    bindings |= {
        "THREADS": THREADS,
        "AHEAD": AHEAD,
        "STEP": step,
        "PITCH": block.pitch(size),
        "BROUGHT": _brought(block, size),
        "ACC_BYTES": size,
        "BLOCK_N": block.columns,
        "COLUMN_THREADS": block.across,
        "COLUMN_BITS": block.across.bit_length() - 1,
        "COLUMN_FIRST": block.wide,
        "TWO_SUMS": p.has_two_sums,
        "WIDE": block.wide > 1,
        "COLUMN_STEP": block.step_n,
        "ROW_STEP": block.groups,
        "BARRIER": block_barrier,
        "X_ALONG_K": abs(p.x.strides[2]) <= abs(p.x.strides[1]),
        "Y_RUNS": runs,
        "WIDTH": block.values if runs else 1,
        "LOAD_X": accesses.load(p.x.dtype, 1, acc),
        "LOAD_ONE": accesses.load(p.y.dtype, 1, acc),
        "LOAD_Y": passes.loads(p.y.dtype, block.wide, acc),
        "TAKE": accesses.load(acc, step, acc, intrinsics.SHARED),
    }
    return kernel_of(
        short_product,
        ARGUMENTS,
        bindings,
        threads=THREADS,
        blocks=block.resident,
        name=f"short K {p.epilogue.name} {p.out.dtype}",
    )


def _brought(block: Block, size: int) -> int:
    """Return how many values of X, of so many bytes each, a thread has on their way together."""
    count = -(-block.block_m * block.depth // THREADS)
    turns = -(-count // (BROUGHT_BYTES // size))
    return -(-count // turns)


def _has_its_order(product: Product) -> bool:
    """Return whether a sum may be one chain in the order of K, however few rows or columns it has.

    d_b alone has no epilogue for sure, and may have its sum in an order of its own. Other bare
    products (d_a of few columns) may, where any other kernel makes the same bits: of one term, and
    in float32.
    """
    p = product
    graphs = p.epilogue.graphs
    bare = len(graphs) == 1 and graphs[0] is leaf("z") and not (p.sums or p.is_rich)
    same = p.k == 1 or (p.x.dtype == p.accumulator == "float32")
    return p.free or (bare and same)


def _is_wgmma(product: Product, device: DeviceInfo) -> bool:
    """Return whether wgmma makes a large d_b of 16 bits in less time, copies of factors included.

    (An H100 took 35 us for 36298 x 23 x 215 in bfloat16, and 22 by wgmma. Other sums do not ask, as
    an epilogue may make that cost more. Places do not count, as the order of such a sum is that of
    one of them.)
    """
    p = product
    if not p.free or intrinsics.itemsize(p.y.dtype) != 2 or device.capability[0] != 9:
        return False
    return copies_pay(p.m, p.n, p.k)


def _pays(product: Product, device: DeviceInfo) -> bool:
    """Return whether this is the kernel of a sum, whatever is made of it."""
    p = product
    if p.m * p.n < LEAST or p.k > ODD[p.y.dtype]:
        return False
    if p.k <= SHORT and _has_its_order(p):
        return True
    many = min(p.m, p.n) > FEW and not _is_wgmma(p, device)
    return many and (p.k <= SHORT or p.n % (16 // p.y.itemsize) != 0)


def _accesses(product: Product, depth: int) -> list[tuple[int, bool]]:
    """Return the columns that a thread can have, and whether they are apart, the most first."""
    p, size = product, intrinsics.itemsize(product.accumulator)
    values, factors = 16 // size, depth * (1 + p.has_two_sums) * size
    arrays = [p.out, p.pre, p.pre1]
    if p.extra is not None and p.extra.strides[2]:  # (else it is the same for all columns)
        arrays.append(p.extra)
    while values > 1 and not (
        values * factors <= FACTORS and all(x is None or x.in_wholes(p.n, values) for x in arrays)
    ):
        values //= 2
    if values == 1 and p.k > SHORT and 2 * factors <= FACTORS:
        # a value of X in shared memory serves two columns, where results are enough for that
        return [(2, True), (1, False)]
    return [(values, False)]


def _blocks(product: Product, multiprocessors: int) -> Iterator[tuple[Block, float]]:
    """Return the blocks that can make a product, the largest first, and how many there are.

    They are counted for each multiprocessor. Threads have whole accesses of columns, where all
    arrays allow it.
    """
    p, size = product, intrinsics.itemsize(product.accumulator) * (1 + product.has_two_sums)
    depth = next(x for x in DEPTHS if x >= p.k)
    for values, apart in _accesses(p, depth):
        wanted = -(-p.n // values)
        threads = {across: -(-wanted // across) * across for across in SIDES}
        across = next(x for x in SIDES if threads[x] <= IDLE * min(threads.values()))
        for rows in dict.fromkeys(min(x, BLOCK_ROWS * across // THREADS) for x in ROWS):
            block = Block(depth, values, across, rows, apart)
            count = -(-wanted // across) * p.places * -(-p.m // block.block_m) / multiprocessors
            if p.k > SHORT and count > FREE:
                block = block.bounded(depth * values * size)
            yield block, count


def block_of(product: Product, multiprocessors: int) -> Block:
    """Return how a block's threads share its work: the largest that keep a device busy."""
    found = list(_blocks(product, multiprocessors))
    busy = (block for block, each in found if each >= (BUSY_APART if block.apart else BUSY))
    return next(busy, found[-1][0])


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it; None of those that other kernels are for."""
    p = product
    if device.capability < (8, 0) or p.precision != "ieee" or p.members is not None:
        return None
    if p.is_rich and (not p.has_two_sums or p.free or p.sums):
        return None
    if p.x.dtype != p.y.dtype or not _pays(p, device) or max(p.m, p.n) >= 1 << 30:
        return None
    return _plan(p, block_of(p, device.multiprocessors))


def _plan(product: Product, block: Block) -> Plan | None:
    """Return the plan of a product by such blocks; None of more than a grid holds."""
    p = product
    lines = -(-p.m // block.block_m) * p.places
    count = -(-p.n // block.columns) * lines
    if count >= 1 << 31:
        return None
    arguments = ARGUMENTS(
        x=in_bytes(Slot("x"), p.x),
        y=in_bytes(Slot("y"), p.y),
        second=Second.of(p, in_bytes(Slot("y1"), p.y1)),
        m=p.m,
        n=p.n,
        k=p.k,
        **finishing(p, p.out, Slot("out"), in_bytes),
    )
    shared = block.shared_bytes(intrinsics.itemsize(p.accumulator))
    launch = Launch(_kernel(p, block), (count, 1, 1), arguments, shared)
    return Plan((launch,), block, block_m=block.block_m)


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return the ways to run it: every block that a thread's share of the columns allows."""
    if take(product, device) is not None:
        for block, count in _blocks(product, device.multiprocessors):
            yield Way(str(block), count, functools.partial(_plan, product, block))


SHORT_K = Tier("cores", take, ways)
