"""The tier that runs everywhere: one tiled loop, as on the CPU and in WGSL.

A thread block makes one BLOCK_M x BLOCK_N block of the result: slices of BLOCK_K of both factors
are brought to shared memory, and every thread adds up MR x NR products in registers. Any dtype
(16-bit types are widened on the way), any strides, any shape, any GPU; it is also what Numba's
simulator runs.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Array, Ends, Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, types
from numfuse.backends.cuda.compile.unroll import bound, kernel_of, rebound
from numfuse.backends.cuda.kernels import members
from numfuse.backends.cuda.kernels.epilogue import element, finishing, in_elements, parts_of
from numfuse.backends.cuda.kernels.planes import Planes
from numfuse.backends.cuda.plan.product import (
    DeviceInfo,
    Launch,
    Plan,
    Product,
    Slot,
    Tier,
    Way,
)
from numfuse.backends.cuda.tiling import CudaTile


def product(x: Array, y: Array, ends: Ends, sums, m, n, k, part, parts, x_along_k, y_along_k):
    """One block of out = epilogue(X Y), of one part of the sum of one place.

    Shared memory holds the slices of X and Y, then the block.
    """
    shared = cuda.shared.array(SHARED, REAL)
    acc = cuda.local.array(SUMS_OF_A_THREAD, REAL)
    totals = cuda.local.array(SUMS_OF_A_THREAD, REAL)
    for i in range(SUMS_OF_A_THREAD):
        acc[i] = ZERO
        totals[i] = ZERO

    t = cuda.threadIdx.x
    tx, ty = t % (BLOCK_N // NR), t // (BLOCK_N // NR)
    rows, columns = (m + BLOCK_M - 1) // BLOCK_M, (n + BLOCK_N - 1) // BLOCK_N
    blocks = rows * columns
    # a plane is a part of a place
    plane, block = cuda.blockIdx.x // blocks, cuda.blockIdx.x % blocks
    place = plane // parts
    block_row, block_column = block_of(block, rows, columns)
    row0, column0 = block_row * BLOCK_M, block_column * BLOCK_N

    x_at, y_at = place * x.place + row0 * x.row, place * y.place + column0 * y.column
    begin = plane % parts * part
    end = min(begin + part, k)
    for k0 in range(begin, end, BLOCK_K):
        for i in range(t, BLOCK_M * BLOCK_K, THREADS):
            row, kk = (i // BLOCK_K, i % BLOCK_K) if x_along_k else (i % BLOCK_M, i // BLOCK_M)
            value = ZERO
            if row0 + row < m and k0 + kk < end:
                value = LOAD_X(x.address, x_at + row * x.row + (k0 + kk) * x.column)
            shared[kk * X_PITCH + row] = value
        for i in range(t, BLOCK_N * BLOCK_K, THREADS):
            column, kk = (i // BLOCK_K, i % BLOCK_K) if y_along_k else (i % BLOCK_N, i // BLOCK_N)
            value = ZERO
            if column0 + column < n and k0 + kk < end:
                value = LOAD_Y(y.address, y_at + (k0 + kk) * y.row + column * y.column)
            shared[Y_AT + kk * Y_PITCH + column] = value
        cuda.syncthreads()
        for kk in range(BLOCK_K):
            for i in range(MR):
                left = shared[kk * X_PITCH + ty + i * (BLOCK_M // MR)]
                for j in range(NR):
                    right = shared[Y_AT + kk * Y_PITCH + tx + j * (BLOCK_N // NR)]
                    acc[i * NR + j] = fused(left, right, acc[i * NR + j])
        cuda.syncthreads()
        # a chain of sums is added to those before, and the next one begins at 0
        if (k0 + BLOCK_K - begin) % CHAIN == 0:
            for i in range(SUMS_OF_A_THREAD):
                totals[i] = totals[i] + acc[i]
                acc[i] = ZERO
    for i in range(SUMS_OF_A_THREAD):
        totals[i] = totals[i] + acc[i]

    for i in range(MR):
        for j in range(NR):
            at = (ty + i * (BLOCK_M // MR)) * BLOCK_N + tx + j * (BLOCK_N // NR)
            shared[at] = totals[i * NR + j]
    cuda.syncthreads()
    finish(shared, t, ends, place, plane, row0, column0, m, n)
    if SUMS:
        cuda.syncthreads()
        sum_columns(shared, t, ends, sums, place * rows + block_row, row0, column0, m, n)


def block_of(number, rows, columns):
    """Row and column of a block: GROUP rows together, one column of them after the other."""
    first = number // (GROUP * columns) * GROUP
    height = min(GROUP, rows - first)
    within = number % (GROUP * columns)
    return first + within % height, within // height


def finish(shared, t, ends: Ends, place, plane, row0, column0, m, n):
    """The epilogue of a block: sums in shared memory become results, there and in `out`."""
    for i in range(t, BLOCK_M * BLOCK_N, THREADS):
        row, column = row0 + i // BLOCK_N, column0 + i % BLOCK_N
        if row < m and column < n:
            offset, added = ZERO, ZERO
            if BIAS:
                offset = LOAD_BIAS(ends.bias.address, element(ends.bias, place, 0, column))
            if EXTRA:
                added = LOAD_EXTRA(ends.extra.address, element(ends.extra, place, row, column))
            if PRE:
                value, kept = EPILOGUE(shared[i], offset, added)
                STORE_PRE(ends.pre.address, element(ends.pre, place, row, column), kept)
            else:
                value = EPILOGUE(shared[i], offset, added)
            STORE(ends.out.address, element(ends.out, plane, row, column), value)
            shared[i] = value


def sum_columns(shared, t, ends: Ends, sums, number, row0, column0, m, n):
    """The sums of the columns of a block in shared memory, to row `number` of `sums`."""
    height, first = min(BLOCK_M, m - row0), number * n + column0
    for i in range(t, min(BLOCK_N, n - column0), THREADS):
        total = ZERO
        for begin in range(0, height, RUN):
            run = ZERO
            for row in range(begin, min(begin + RUN, height)):
                run = run + shared[row * BLOCK_N + i]
            total = total + run
        STORE_SUM(sums, first + i, total)


#: Sizes and strides are in elements.
ARGUMENTS = Schema(
    product,
    u64="x_address y_address sums ends_bias_address ends_extra_address ends_pre_address"
    " ends_out_address",
)


#: The same with the end of a product of all members of points.
MEMBER_PRODUCT = rebound(
    product, Ends=members.MemberEnds, finish=members.finish, sum_columns=members.sum_points
)
MEMBER_ARGUMENTS = Schema(
    MEMBER_PRODUCT,
    u64="x_address y_address ends_planes_address ends_kept_address ends_out_address ends_weights"
    " ends_table",
)


def _kernel(p: Product, tile: CudaTile, storage: str) -> Kernel:
    real = np.dtype(p.accumulator).type

    # one more than a power of two: a transposed slice is stored without bank conflicts
    x_pitch, y_pitch = tile.block_m + 1, tile.block_n + 1
    y_at = tile.block_k * x_pitch
    bindings = bound(tile, "block_m block_n block_k mr nr group threads")
    bindings |= {
        "REAL": getattr(types, p.accumulator),
        "ZERO": real(0),
        "SUMS_OF_A_THREAD": tile.mr * tile.nr,
        "CHAIN": tiling.CHAIN,
        "RUN": tiling.RUN,
        "X_PITCH": x_pitch,
        "Y_PITCH": y_pitch,
        "Y_AT": y_at,
        "SHARED": max(y_at + tile.block_k * y_pitch, tile.block_m * tile.block_n),
        "LOAD_X": elements.loads(p.x.dtype),
        "LOAD_Y": elements.loads(p.y.dtype),
    }
    template, schema = product, ARGUMENTS
    if p.members is not None:
        template, schema = MEMBER_PRODUCT, MEMBER_ARGUMENTS
        bindings |= members.plain_bindings(p)
    else:
        bindings |= parts_of(p) | {
            "LOAD_BIAS": elements.loads((p.bias or p.x).dtype),
            "LOAD_EXTRA": elements.loads((p.extra or p.x).dtype),
            "STORE": elements.stores(storage),
            "STORE_PRE": elements.stores(p.accumulator if p.pre is None else p.pre.dtype),
            "STORE_SUM": elements.stores(p.accumulator),
        }
    return kernel_of(
        template,
        schema,
        bindings,
        threads=tile.threads,
        # two sets of 16 sums leave registers for two blocks; those of float64 would spill
        blocks=2 if p.accumulator == "float32" else 0,
        name=f"mirror {p.epilogue.name}",
    )


def _tiles(device: DeviceInfo) -> tuple[CudaTile, ...]:
    return tiling.MIRROR_TILES if device.capability[0] else tiling.SIMULATED_TILES


def plan(product: Product, device: DeviceInfo, tile: CudaTile | None = None) -> Plan:
    """How to run it with a tile, by default the first of all, by whose blocks K is cut."""
    first = _tiles(device)[0]
    tile = tile or first
    busy = -(-product.m // first.block_m) * -(-product.n // first.block_n)
    # d_b's do not depend on the number of places: an element of a batch gives what it gives alone
    if not product.free:
        busy *= product.places
    part, parts = product.k, 1
    if product.free or (busy < device.multiprocessors and not product.whole):
        part, parts = tiling.parts(busy, product.k, device.multiprocessors, first.block_k)
    planes = Planes.of(product, parts)
    p = planes.stored
    schema = ARGUMENTS if p.members is None else MEMBER_ARGUMENTS
    if p.members is None:
        ends = finishing(p, p.out, planes.slot, in_elements)
    else:
        ends = {"ends": members.ends_of(p, in_elements, tile.block_m), "sums": 0}
    arguments = schema(
        x=in_elements(Slot("x"), p.x),
        y=in_elements(Slot("y"), p.y),
        m=p.m,
        n=p.n,
        k=p.k,
        part=part,
        parts=parts,
        x_along_k=int(abs(p.x.strides[2]) < abs(p.x.strides[1])),
        y_along_k=int(abs(p.y.strides[1]) < abs(p.y.strides[2])),
        **ends,
    )
    blocks = -(-p.m // tile.block_m) * -(-p.n // tile.block_n)
    grid = (blocks * p.places * parts, 1, 1)
    launch = Launch(_kernel(p, tile, p.out.dtype), grid, arguments)
    found = planes.plan((launch,), device, tile, tile.block_m)
    return replace(found, part=part) if parts > 1 else found


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return the ways to run it: every tile."""
    for number, tile in enumerate(_tiles(device)):
        yield Way(str(tile), number, partial(plan, product, device, tile))


MIRROR = Tier("mirror", plan, ways)
