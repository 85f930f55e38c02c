"""Batches of small products: a thread block makes several members, each smaller than a tile.

With a block for each member most of a tile lies outside of it, and few bytes are on their way at
any time: a block waits for its factors, multiplies for a tenth of that time and is gone. Here a
block brings the factors of a group of members to shared memory, a thread adds up MR x NR products
of one member in the order of K, and the sums go through shared memory to rows of the result, where
the epilogue runs. A sum is one chain. It is plain code, as `mirror` is: any dtype, strides and GPU.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from numfuse.backends.cuda import tiling
from numfuse.backends.cuda.compile import elements, intrinsics
from numfuse.backends.cuda.compile.scalars import fused
from numfuse.backends.cuda.compile.schema import Array, Ends, Schema
from numfuse.backends.cuda.compile.toolchain import Kernel, cuda, types
from numfuse.backends.cuda.compile.unroll import inlined, kernel_of, unrolled
from numfuse.backends.cuda.kernels.epilogue import element, finishing, in_elements, parts_of
from numfuse.backends.cuda.kernels.network_tiles import window
from numfuse.backends.cuda.plan.product import (
    DeviceInfo,
    Launch,
    Operand,
    Plan,
    Product,
    Slot,
    Tier,
    Way,
)

i32, i64, f32 = np.int32, np.int64, np.float32

#: Rows and columns of a member, at most: a warp's tiles of 4 x 4. At 32 x 32 x 32 a block to a
#: member is no worse: it has no more to do than its 12 KiB take to come.
LONGEST, WORK = 32, 1 << 14
#: A thread's rows and columns; threads of a block; rows of a factor that one has on their way.
PART, THREADS, AHEAD = 4, 128, 4
#: In the simulator, where a thread costs 20 ms.
SIMULATED_THREADS = 4
#: Bytes of shared memory of a block: nine are on a multiprocessor of Hopper, with 1152 threads.
SHARED_BYTES = 24 << 10
#: Groups that a multiprocessor gets at the least, before they grow: so that all have some.
BUSY = 2


@dataclass
class Inverses:
    """One by sizes, for quotients of numbers below 2^13, to which a half is added before.

    Such a quotient by at most 32 is a 64th from the next whole number at least, and float32 is off
    by 2^-10 at most.
    """

    m: Any
    n: Any
    k: Any
    tiles: Any
    across: Any


def _bring(
    t, values, spots, shared, to, to_member, to_outer, to_inner, address, base, place, outer_step,
    inner_step, rows, outer, inner, inverse,
):  # fmt: skip
    """The factor of all members to shared memory, its neighbours in memory by neighbouring lanes.

    `rows` are those of `outer` of each member; `inverse` is 1 / outer.
    """
    lane, line = i32(t & (LANES - 1)), i32(t >> LANE_BITS)
    while lane < inner:
        row = line
        while row < rows:
            for u in unrolled(AHEAD):
                r = i32(row + u * LINES)
                values[u] = ZERO
                if r < rows:
                    member = i32((f32(r) + HALF) * inverse)
                    o = i32(r - member * outer)
                    spots[u] = i32(to + member * to_member + o * to_outer + lane * to_inner)
                    at = base + i64(member) * place + i64(o) * outer_step + i64(lane) * inner_step
                    values[u] = LOAD(address, at)
            for u in unrolled(AHEAD):
                if row + u * LINES < rows:
                    POKE(shared, spots[u], values[u])
            row = i32(row + AHEAD * LINES)
        lane = i32(lane + LANES)


def small_products(
    x: Array, y: Array, ends: Ends, sums, m, n, k, places, group, across, down, by: Inverses
):  # fmt: skip
    """The members of a group: out = epilogue(X Y). `across` and `down` are a member's tiles."""
    shared = WINDOW(cuda.shared.array(0, dtype=REAL))
    t = i32(cuda.threadIdx.x)
    first = i64(cuda.blockIdx.x) * group
    members = i32(min(i64(group), places - first))
    values = cuda.local.array(AHEAD, REAL)
    spots = cuda.local.array(AHEAD, types.int32)
    # odd: rows and columns that a warp reads or writes together lie in different banks
    x_pitch, y_pitch = i32(k | 1), i32(n | 1)
    y_at = i32(group * m * x_pitch)
    x_from, y_from, x_size, y_size = first * x.place, first * y.place, m * x_pitch, k * y_pitch
    if X_ALONG_K:
        BRING_X(t, values, spots, shared, 0, x_size, x_pitch, 1,
                x.address, x_from, x.place, x.row, x.column,
                i32(members * m), m, k, by.m)  # fmt: skip
    else:
        BRING_X(t, values, spots, shared, 0, x_size, 1, x_pitch,
                x.address, x_from, x.place, x.column, x.row,
                i32(members * k), k, m, by.k)  # fmt: skip
    if Y_ALONG_K:
        BRING_Y(t, values, spots, shared, y_at, y_size, 1, y_pitch,
                y.address, y_from, y.place, y.column, y.row,
                i32(members * n), n, k, by.n)  # fmt: skip
    else:
        BRING_Y(t, values, spots, shared, y_at, y_size, y_pitch, 1,
                y.address, y_from, y.place, y.row, y.column,
                i32(members * k), k, n, by.k)  # fmt: skip
    cuda.syncthreads()

    tiles = i32(across * down)
    own = i32((f32(t) + HALF) * by.tiles)
    tile = i32(t - own * tiles)
    row0 = i32((f32(tile) + HALF) * by.across)
    column0 = i32(tile - row0 * across)
    total = cuda.local.array(PART * PART, REAL)
    left, right = cuda.local.array(PART, REAL), cuda.local.array(PART, REAL)
    for i in unrolled(PART * PART):
        total[i] = ZERO
    if own < members:
        # beyond the member's end the last row and column again, of which nothing is kept
        x_row, y_column = cuda.local.array(PART, types.int32), cuda.local.array(PART, types.int32)
        for i in unrolled(PART):
            x_row[i] = i32(own * x_size + min(i32(row0 + i * down), i32(m - 1)) * x_pitch)
            y_column[i] = i32(y_at + own * y_size + min(i32(column0 + i * across), i32(n - 1)))
        kk, step = i32(0), i32(0)
        while kk < k:
            for i in unrolled(PART):
                left[i] = PEEK(shared, i32(x_row[i] + kk))
                right[i] = PEEK(shared, i32(y_column[i] + step))
            for i in unrolled(PART):
                for j in unrolled(PART):
                    total[i * PART + j] = fused(left[i], right[j], total[i * PART + j])
            kk, step = i32(kk + 1), i32(step + y_pitch)
    cuda.syncthreads()
    if own < members:
        for i in unrolled(PART):
            for j in unrolled(PART):
                r, c = i32(row0 + i * down), i32(column0 + j * across)
                if r < m and c < n:
                    POKE(shared, i32((own * m + r) * n + c), total[i * PART + j])
    cuda.syncthreads()

    at = t
    while at < i32(members * m * n):
        line = i32((f32(at) + HALF) * by.n)
        column = i32(at - line * n)
        member = i32((f32(line) + HALF) * by.m)
        row, place = i32(line - member * m), first + member
        offset, added = ZERO, ZERO
        if BIAS:
            offset = LOAD_BIAS(ends.bias.address, element(ends.bias, place, 0, column))
        if EXTRA:
            added = LOAD_EXTRA(ends.extra.address, element(ends.extra, place, row, column))
        if PRE:
            value, kept = EPILOGUE(PEEK(shared, at), offset, added)
            STORE_PRE(ends.pre.address, element(ends.pre, place, row, column), kept)
        else:
            value = EPILOGUE(PEEK(shared, at), offset, added)
        STORE(ends.out.address, element(ends.out, place, row, column), value)
        if SUMS:
            POKE(shared, at, value)
        at = i32(at + STEP)
    if SUMS:
        cuda.syncthreads()
        at = t
        while at < i32(members * n):
            member = i32((f32(at) + HALF) * by.n)
            column = i32(at - member * n)
            added = ZERO
            for begin in range(0, m, RUN):
                run = ZERO
                for at_row in range(begin, min(begin + RUN, m)):
                    run = run + PEEK(shared, i32((member * m + at_row) * n + column))
                added = added + run
            STORE_SUM(sums, (first + member) * n + column, added)
            at = i32(at + STEP)


#: Sizes and strides are in elements.
ARGUMENTS = Schema(
    small_products,
    u64="x_address y_address sums ends_bias_address ends_extra_address ends_pre_address"
    " ends_out_address",
    i32="m n k group across down",
    f32="by_m by_n by_k by_tiles by_across",
)


def _along_k(operand: Operand, own: int) -> bool:
    """Return whether a factor's neighbours lie along K; `own`: its other axis."""
    return abs(operand.strides[3 - own]) < abs(operand.strides[own])


def _kernel(product: Product, threads: int) -> Kernel:
    p, real = product, np.dtype(product.accumulator).type

    def bring(operand: Operand, own: int, length: int) -> dict[str, object]:
        inner = p.k if _along_k(operand, own) else length
        lanes = min(threads, 32, 1 << max(0, inner - 1).bit_length())
        return {
            "LANES": lanes,
            "LANE_BITS": lanes.bit_length() - 1,
            "LINES": threads // lanes,
            "AHEAD": AHEAD,
            "ZERO": real(0),
            "HALF": f32(0.5),
            "LOAD": elements.loads(operand.dtype),
            "POKE": elements.poke(p.accumulator),
        }

    bindings = parts_of(p) | {
        "X_ALONG_K": _along_k(p.x, 1),
        "Y_ALONG_K": _along_k(p.y, 2),
        "BRING_X": inlined(_bring, **bring(p.x, 1, p.m)),
        "BRING_Y": inlined(_bring, **bring(p.y, 2, p.n)),
        "REAL": getattr(types, p.accumulator),
        "ZERO": real(0),
        "HALF": f32(0.5),
        "WINDOW": window,
        "PEEK": elements.peek(p.accumulator),
        "POKE": elements.poke(p.accumulator),
        "PART": PART,
        "AHEAD": AHEAD,
        "STEP": threads,
        "RUN": tiling.RUN,
        "LOAD_BIAS": elements.loads((p.bias or p.x).dtype),
        "LOAD_EXTRA": elements.loads((p.extra or p.x).dtype),
        "STORE": elements.stores(p.out.dtype),
        "STORE_PRE": elements.stores(p.accumulator if p.pre is None else p.pre.dtype),
        "STORE_SUM": elements.stores(p.accumulator),
    }
    blocks = 8 if p.accumulator == "float32" else 4  # 64 and 128 registers a thread
    name = f"small {p.epilogue.name}"
    return kernel_of(small_products, ARGUMENTS, bindings, threads=threads, blocks=blocks, name=name)


def _most(product: Product, threads: int) -> int:
    """Return the members of a block at most; fewer than one where none fits."""
    p, size = product, intrinsics.itemsize(product.accumulator)
    factors = p.m * (p.k | 1) + p.k * (p.n | 1)
    room = SHARED_BYTES // size // max(factors, p.m * p.n, 1)
    return min(room, threads // max(1, -(-p.m // PART) * -(-p.n // PART)))


def _threads(device: DeviceInfo) -> int:
    return THREADS if device.capability[0] else SIMULATED_THREADS


def _takes(product: Product, device: DeviceInfo) -> bool:
    """Return whether members are small, and whether there are several for every block."""
    p = product
    # (first what most products are not: this is asked of each)
    if p.places < 2 * BUSY * device.multiprocessors or max(p.m, p.n) > LONGEST:
        return False
    # (an option for float32 is none of 16-bit types')
    other = p.x.dtype == "float32" and p.precision != "ieee"
    if p.is_rich or p.x.dtype != p.y.dtype or other:
        return False
    return 0 < p.m * p.n * p.k <= WORK and _most(p, _threads(device)) > 1


def plan(product: Product, device: DeviceInfo, group: int) -> Plan:
    """How to run it, with so many members to a block."""
    p, threads, size = product, _threads(device), intrinsics.itemsize(product.accumulator)
    across, down = -(-p.n // PART), -(-p.m // PART)
    arguments = ARGUMENTS(
        x=in_elements(Slot("x"), p.x),
        y=in_elements(Slot("y"), p.y),
        m=p.m,
        n=p.n,
        k=p.k,
        places=p.places,
        group=group,
        across=across,
        down=down,
        by=Inverses(*(1.0 / x for x in (p.m, p.n, p.k, across * down, across))),
        **finishing(p, p.out, Slot("out"), in_elements),
    )
    values = group * max(p.m * (p.k | 1) + p.k * (p.n | 1), p.m * p.n)
    grid = (-(-p.places // group), 1, 1)
    launch = Launch(_kernel(p, threads), grid, arguments, values * size)
    return Plan((launch,), f"{group} members of {p.m}x{p.n} a block", 0, p.m)


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it; None for members that fill a tile, and for few of them."""
    if not _takes(product, device):
        return None
    most = _most(product, _threads(device))
    return plan(product, device, min(most, product.places // (BUSY * device.multiprocessors)))


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return the ways to run it: groups of as many members as fit, a half and a quarter of that."""
    if not _takes(product, device):
        return
    most = _most(product, _threads(device))
    for number, group in enumerate(dict.fromkeys(max(1, most // x) for x in (1, 2, 4))):
        yield Way(f"{group} members a block", number, partial(plan, product, device, group))


SMALL = Tier("small", take, ways)
