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

from dataclasses import replace

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, kernel, types
from numfuse.backends.cuda.kernels import passes
from numfuse.backends.cuda.kernels.elementwise import is_short
from numfuse.backends.cuda.kernels.epilogue import addresses, formula_of, steps
from numfuse.backends.cuda.plan.product import (
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
    strides,
)
from numfuse.backends.cuda.tiling import CudaTile

__all__ = ["MIRROR", "Mirror"]


def product(
    x,
    y,
    bias,
    extra,
    pre,
    out,
    sums,
    m,
    n,
    k,
    part,
    parts,
    x_along_k,
    y_along_k,
    x_place,
    x_row,
    x_column,
    y_place,
    y_row,
    y_column,
    bias_place,
    bias_column,
    extra_place,
    extra_row,
    extra_column,
    pre_place,
    pre_row,
    pre_column,
    out_place,
    out_row,
    out_column,
):
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
    # GROUP rows of blocks together, one column of them after the other
    first = block // (GROUP * columns) * GROUP
    height = min(GROUP, rows - first)
    within = block % (GROUP * columns)
    block_row, block_column = first + within % height, within // height
    row0, column0 = block_row * BLOCK_M, block_column * BLOCK_N

    x_at, y_at = place * x_place + row0 * x_row, place * y_place + column0 * y_column
    begin = plane % parts * part
    end = min(begin + part, k)
    for k0 in range(begin, end, BLOCK_K):
        for i in range(t, BLOCK_M * BLOCK_K, THREADS):
            row, kk = (i // BLOCK_K, i % BLOCK_K) if x_along_k else (i % BLOCK_M, i // BLOCK_M)
            value = ZERO
            if row0 + row < m and k0 + kk < end:
                value = LOAD_X(x, x_at + row * x_row + (k0 + kk) * x_column)
            shared[kk * X_PITCH + row] = value
        for i in range(t, BLOCK_N * BLOCK_K, THREADS):
            column, kk = (i // BLOCK_K, i % BLOCK_K) if y_along_k else (i % BLOCK_N, i // BLOCK_N)
            value = ZERO
            if column0 + column < n and k0 + kk < end:
                value = LOAD_Y(y, y_at + (k0 + kk) * y_row + column * y_column)
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
    for i in range(t, BLOCK_M * BLOCK_N, THREADS):
        row, column = row0 + i // BLOCK_N, column0 + i % BLOCK_N
        if row < m and column < n:
            offset, added = ZERO, ZERO
            if BIAS:
                offset = LOAD_BIAS(bias, place * bias_place + column * bias_column)
            if EXTRA:
                at = place * extra_place + row * extra_row + column * extra_column
                added = LOAD_EXTRA(extra, at)
            if PRE:
                value, kept = EPILOGUE(shared[i], offset, added)
                STORE_PRE(pre, place * pre_place + row * pre_row + column * pre_column, kept)
            else:
                value = EPILOGUE(shared[i], offset, added)
            STORE(out, plane * out_place + row * out_row + column * out_column, value)
            shared[i] = value
    if SUMS:
        cuda.syncthreads()
        height = min(BLOCK_M, m - row0)
        for i in range(t, min(BLOCK_N, n - column0), THREADS):
            total = ZERO
            for first in range(0, height, RUN):
                run = ZERO
                for row in range(first, min(first + RUN, height)):
                    run = run + shared[row * BLOCK_N + i]
                total = total + run
            STORE_PRE(sums, (place * rows + block_row) * n + column0 + i, total)


#: Sizes and strides are in elements.
ARGUMENTS = Schema(product, u64="x y bias extra pre out sums")


def _kernel(p: Product, tile: CudaTile) -> Kernel:
    real = np.dtype(p.accumulator).type
    storage = p.out.dtype

    def load(operand: Operand) -> object:
        return elements.loads(operand.dtype)

    slices = tile.block_k * (tile.block_m + tile.block_n + 2)
    return kernel(
        product,
        ARGUMENTS.signature,
        threads=tile.threads,
        # two sets of 16 sums leave registers for two blocks; those of float64 would spill
        blocks=2 if p.accumulator == "float32" else 0,
        name=f"mirror {p.epilogue.name}",
        REAL=getattr(types, p.accumulator),
        ZERO=real(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        MR=tile.mr,
        NR=tile.nr,
        GROUP=tile.group,
        THREADS=tile.threads,
        SUMS_OF_A_THREAD=tile.mr * tile.nr,
        CHAIN=tiling.CHAIN,
        RUN=tiling.RUN,
        # one more than a power of two: a transposed slice is stored without bank conflicts
        X_PITCH=tile.block_m + 1,
        Y_PITCH=tile.block_n + 1,
        Y_AT=tile.block_k * (tile.block_m + 1),
        SHARED=max(slices, tile.block_m * tile.block_n),
        LOAD_X=load(p.x),
        LOAD_Y=load(p.y),
        BIAS=p.bias is not None,
        EXTRA=p.extra is not None,
        PRE=p.pre is not None,
        SUMS=p.sums,
        LOAD_BIAS=load(p.bias or p.x),
        LOAD_EXTRA=load(p.extra or p.x),
        STORE=elements.stores(storage),
        STORE_PRE=elements.stores(p.accumulator),
        EPILOGUE=formula_of(p, is_short(p.accumulator, storage)),
    )


class Mirror:
    """Takes every product; see the module."""

    name = "mirror"

    def take(self, product: Product, device: DeviceInfo) -> Plan:
        """How to run it."""
        p = product
        tile = tiling.MIRROR_TILE if device.capability[0] else tiling.SIMULATED_TILE
        blocks = -(-p.m // tile.block_m) * -(-p.n // tile.block_n)
        part, parts = p.k, 1
        if p.free:
            # not of the number of places: an element of a batch gives what it gives alone
            part, parts = tiling.parts(blocks, p.k, device.multiprocessors, tile.block_k)
        out, workspace, target = p.out, 0, Slot("out")
        if parts > 1:
            # the planes of a place, in the accumulator's dtype, are joined in their order
            out, target = Operand(p.accumulator, (p.m * p.n, p.n, 1), 16), Slot("work")
            workspace = p.places * parts * p.m * p.n * np.dtype(p.accumulator).itemsize
        made = _kernel(replace(p, out=out), tile)
        arguments = ARGUMENTS(
            x=Slot("x"),
            y=Slot("y"),
            m=p.m,
            n=p.n,
            k=p.k,
            part=part,
            parts=parts,
            x_along_k=int(abs(p.x.strides[2]) < abs(p.x.strides[1])),
            y_along_k=int(abs(p.y.strides[1]) < abs(p.y.strides[2])),
            **strides("elements", x=p.x, y=p.y),
            **addresses(p, target),
            **steps("elements", p, out),
        )
        launches: tuple[Launch, ...] = (Launch(made, (blocks * p.places * parts, 1, 1), arguments),)
        if parts > 1:
            stage = Slot("work", -(-workspace // 256) * 256)
            joins, staged = passes.joins(
                device,
                p.accumulator,
                target,
                Slot("out"),
                p.out.dtype,
                p.places,
                parts,
                p.m,
                p.n,
                p.out.strides,
                stage,
            )
            launches, workspace = launches + joins, stage.offset + staged
        return Plan(launches, tile, workspace, tile.block_m)


MIRROR = Mirror()
