"""Residues become numbers: the Chinese remainder theorem, the scales, and the epilogue.

With weights w = q / p, where q is the inverse of P / p modulo p, the sum of residue times w over
all moduli is C / P but for a whole number, for the integer C. The high words of the weights make a
sum that is exact in float64, and so is what is left of it when its nearest integer is taken away;
that of the low words is below 2^-20 and has an error of 2^-78. So C / P is a double word, and its
product with P and the scales is rounded once.
"""

# A template has no annotations but records, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile import elements
from numfuse.backends.cuda.compile.engines import grid_release, grid_wait
from numfuse.backends.cuda.compile.integers import byte_above, load_bytes
from numfuse.backends.cuda.compile.scalars import fused, select, two_powers_of_two
from numfuse.backends.cuda.compile.schema import Array, Ends, Schema
from numfuse.backends.cuda.compile.toolchain import cuda
from numfuse.backends.cuda.compile.unroll import kernel_of, unrolled
from numfuse.backends.cuda.kernels.ampere.epilogue import finish_values
from numfuse.backends.cuda.kernels.epilogue import finishing, in_bytes
from numfuse.backends.cuda.kernels.planes import (
    block_at,
    finish_of,
    load_values,
    store_values,
    sum_columns,
)
from numfuse.backends.cuda.kernels.residues import split
from numfuse.backends.cuda.plan.product import DeviceInfo, Launch, Product, Slot
from numfuse.moduli import Residues

#: Accesses of a thread: where its block is takes a third of the instructions of one.
TURNS = 4


@dataclass
class Bytes:
    """The residues of sums; steps in bytes."""

    address: Any
    #: Parts of K, and the steps from one to the next, from a place, a modulus and a row.
    parts: Any
    step: Any
    place: Any
    plane: Any
    row: Any


@dataclass
class Scaled:
    """A factor, strides in bytes, and the exponents of its rows (of Y: columns)."""

    array: Array
    exponents: Any


def reconstruct(
    given: Bytes, x: Scaled, y: Scaled, ends: Ends, sums, m, n, k, row_blocks, column_blocks
):
    """One block of ROWS rows and LANES accesses of VALUES columns, as `planes.finish_planes`."""
    if OVERLAPS:
        grid_wait()
        grid_release()
    if SUMS:
        shared = cuda.shared.array(ROWS * LANES * VALUES, REAL)
    total = cuda.local.array(VALUES, REAL)
    rest = cuda.local.array(VALUES, REAL)
    offset = cuda.local.array(VALUES, REAL)
    added = cuda.local.array(VALUES, REAL)
    made = cuda.local.array(VALUES, REAL)
    t = cuda.threadIdx.x
    place, block_row, column0 = block_at(cuda.blockIdx.x, row_blocks, column_blocks)
    for i in range(t, ROWS * LANES, THREADS):
        r = i // LANES
        row, column = block_row * ROWS + r, column0 + (i - r * LANES) * VALUES
        for v in unrolled(VALUES):
            made[v] = ZERO
        if row < m and column < n:
            at = given.address + place * given.place + row * given.row + column
            fractions(total, rest, at, given.parts, given.step, given.plane)
            of_row = LOAD_SCALE(x.exponents, place * m + row)
            for v in unrolled(VALUES):
                exponent = of_row + LOAD_SCALE(y.exponents, place * n + column + v)
                if exponent == exponent:
                    total[v] = number(total[v], rest[v], exponent)
                else:
                    total[v] = plain(x.array, y.array, place, row, column + v, k)
            load_values(offset, added, ends, place, row, column)
            finish_values(total, total, offset, offset, added, 0, made)  # (of one sum)
            store_values(total, made, ends, place, row, column)
        if SUMS:
            for v in unrolled(VALUES):
                shared[i * VALUES + v] = made[v]
    if SUMS:
        cuda.syncthreads()
        sum_columns(shared, sums, t, place, block_row, row_blocks, column0, m, n)


def fractions(high, low, at, parts, step, plane):
    """high + low = C / P of VALUES neighbours, from -1/2 to 1/2; `high` is exact, `low` small."""
    for v in unrolled(VALUES):
        high[v] = ZERO
        low[v] = ZERO
    for _ in range(parts):
        for modulus in unrolled(MODULI):
            word = LOAD_BYTES(at + modulus * plane)
            for v in unrolled(VALUES):
                residue = byte(word, v) - ABOVE
                high[v] = fused(residue, HIGH[modulus], high[v])
                low[v] = fused(residue, LOW[modulus], low[v])
        for v in unrolled(VALUES):
            high[v] = high[v] - ((high[v] + ROUNDER) - ROUNDER)
        at += step


def byte(word, number):
    """2^52 plus a byte of a word."""
    if number == 0:
        return BYTE_0(word)
    else:
        return BYTE_1(word)


def number(high, low, exponent):
    """(high + low) P / 2^exponent, rounded once (where it is normal, to some 2^-100)."""
    top = high + low
    part = top - high
    rest = (high - (top - part)) + (low - part)
    product = top * SCALE_HIGH
    error = fused(top, SCALE_HIGH, -product)
    value = product + (error + fused(top, SCALE_LOW, rest * SCALE_HIGH))
    n = SCALE_N - exponent
    # beyond that all are infinite, or 0
    n = select(n > MOST, MOST, select(n < -MOST, -MOST, n))
    a, b = two_powers_of_two(n + ROUNDER)
    return value * a * b


def plain(x: Array, y: Array, place, row, column, k):
    """The sum of a row with an infinity or NaN, in the order of K: infinite or NaN as IEEE says."""
    total = ZERO
    x_at = x.address + place * x.place + row * x.row
    y_at = y.address + place * y.place + column * y.column
    for i in range(k):
        total = fused(LOAD_SCALE(x_at + i * x.column, 0), LOAD_SCALE(y_at + i * y.row, 0), total)
    return total


RECONSTRUCT = Schema(reconstruct)


def finished(
    product: Product, info: DeviceInfo, of: Residues, parts: int, pitch: int, overlaps: bool
) -> Launch:
    """Return the launch that makes a product of the residues at "work", and of both scales."""
    p, how = product, finish_of(product, info, pitch % 2 == 0, TURNS)
    high, low = of.weights
    n, scale_high, scale_low = of.scale
    real = np.float64
    bindings = how.bindings | {
        "OVERLAPS": overlaps,
        "MODULI": of.count,
        "LOAD_BYTES": load_bytes(how.values),
        "BYTE_0": byte_above(0),
        "BYTE_1": byte_above(1),
        "ABOVE": real(2.0**52),
        "HIGH": tuple(map(real, high)),
        "LOW": tuple(map(real, low)),
        "ROUNDER": real(split.ROUNDER),
        "SCALE_N": real(n),
        "SCALE_HIGH": real(scale_high),
        "SCALE_LOW": real(scale_low),
        # two powers of two have exponents to 2046
        "MOST": real(2000),
        "LOAD_SCALE": elements.loads("float64"),
    }
    name = f"numbers {p.epilogue.name}"
    made = kernel_of(reconstruct, RECONSTRUCT, bindings, threads=how.threads, blocks=2, name=name)
    plane = p.m * pitch
    scaled = {
        name: Scaled(in_bytes(Slot(name), operand), Slot(f"{name} scales"))
        for name, operand in (("x", p.x), ("y", p.y))
    }
    arguments = RECONSTRUCT(
        given=Bytes(
            Slot("work"), parts, p.places * of.count * plane, of.count * plane, plane, pitch
        ),
        **scaled,
        m=p.m,
        n=p.n,
        k=p.k,
        row_blocks=how.row_blocks,
        column_blocks=how.column_blocks,
        **finishing(p, p.out, Slot("out"), in_bytes),
    )
    return Launch(made, how.grid, arguments, overlaps=overlaps)
