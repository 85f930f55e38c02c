"""Products on tensor cores: float64 on all that have them, bfloat16 and float16 before Hopper.

A warp multiplies its part of a slice by mma.sync in chunks of K. The factors of a chunk are
replaced while it is multiplied, each after its last use, so that what the first instruction of the
next chunk needs has been asked for long before.

In the layouts of the PTX ISA (9.7.14.5) lane ``4 g + s`` has, of a 16 x 8 result, columns 2 s and
2 s + 1 of rows g and g + 8.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import numpy as np

from numfuse.backends.cuda import block_tiling, few_tiling, tiling
from numfuse.backends.cuda.block_tiling import CudaBlock
from numfuse.backends.cuda.compile.accesses import read_vector
from numfuse.backends.cuda.compile.engines import (
    load_matrix,
    mma_double,
    mma_double_small,
    mma_half,
)
from numfuse.backends.cuda.compile.intrinsics import F64, I32
from numfuse.backends.cuda.compile.toolchain import types
from numfuse.backends.cuda.compile.unroll import inlined
from numfuse.backends.cuda.kernels.ampere import blocks, tails
from numfuse.backends.cuda.kernels.ampere.blocks import Engine
from numfuse.backends.cuda.kernels.ampere.registers import arithmetic
from numfuse.backends.cuda.kernels.ampere.slices import Fetch
from numfuse.backends.cuda.plan.product import DeviceInfo, Operand, Plan, Product, Tier, Way

i32 = np.int32


def _from(t, memory):
    """Where a lane reads its first factor: its part of a warp's rows (or columns) and of K."""
    warp = (t >> 5) // WARPS_ACROSS if ROWS else (t >> 5) % WARPS_ACROSS
    lane = t & 31
    if HALVES:
        # Lanes 8 i to 8 i + 7 have the addresses of ldmatrix' matrix i, which is 8 values of the
        # own axis by 8 of K. X: the matrices go down the own axis first; Y: along K first.
        first, second = (lane >> 3) & 1, lane >> 4
        own = (first if ROWS else second) * 8
        k = (second if ROWS else first) * 8
        # a matrix' rows, as it lies in shared memory
        if K_INNER:
            own = own + (lane & 7)
        else:
            k = k + (lane & 7)
    else:
        own, k = lane >> 2, lane & 3
    return i32(memory + (warp * WARP_LENGTH + own) * OWN_OFFSET + k * K_OFFSET)


def _put_to(t, memory):
    warp, lane = t >> 5, t & 31
    row = warp // WARPS_N * 16 + (lane >> 2)
    column = warp % WARPS_N * WARP_N + (lane & 3) * 2
    return i32(memory + row * PITCH + column * SIZE)


def _pass_row(r, turn):
    return (r >> 4) * WARP_M + turn * 16 + (r & 15)


class _Warp:
    """A warp's arithmetic on chunks of K, as LLVM instructions."""

    def __init__(self, dtype: str, tile: CudaBlock, small: bool, x: Fetch, y: Fetch) -> None:
        self.dtype, self.chunk, self.small = dtype, tile.chunk, small
        self.x, self.y = x, y
        self.mi, self.nj = tile.part_m // 16, tile.part_n // 8
        #: registers of one piece of X (16 rows) and of Y (8 columns)
        self.a, self.b = (self.chunk // 2, self.chunk // 4) if dtype == "float64" else (4, 2)

    def rows(self, builder: Any, x: Any, i: int, k: int) -> list[Any]:
        """16 rows of X for the chunk that begins at `k`."""
        own, along = self.x.offsets
        at = builder.add(x, I32(16 * i * own + k * along))
        if self.dtype != "float64":
            return load_matrix(builder, at, turned=not self.x.k_inner)
        return [
            read_vector(builder, at, 8 * h * own + 4 * r * along, F64, 1)[0]
            for r in range(self.chunk // 4)
            for h in range(2)
        ]

    def columns(self, builder: Any, y: Any, j: int, k: int) -> list[Any]:
        """8 columns of Y, float64; 16 (of `j` and `j` + 1) else."""
        own, along = self.y.offsets
        at = builder.add(y, I32(8 * j * own + k * along))
        if self.dtype != "float64":
            return load_matrix(builder, at, turned=not self.y.k_inner)
        return [read_vector(builder, at, 4 * r * along, F64, 1)[0] for r in range(self.chunk // 4)]

    @property
    def column_step(self) -> int:
        return 1 if self.dtype == "float64" else 2

    def factors(self, builder: Any, x: Any, y: Any, k: int) -> list[Any]:
        found = []
        for j in range(0, self.nj, self.column_step):
            found += self.columns(builder, y, j, k)
        for i in range(self.mi):
            found += self.rows(builder, x, i, k)
        return found

    def mma(self, builder: Any, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
        if self.dtype != "float64":
            return mma_half(builder, self.dtype, a, b, c)
        if not self.small:
            return mma_double(builder, self.chunk, a, b, c)
        for r in range(self.chunk // 4):
            top = mma_double_small(builder, a[2 * r], b[r], c[:2])
            c = top + mma_double_small(builder, a[2 * r + 1], b[r], c[2:])
        return c

    def multiply(
        self, builder: Any, total: list[Any], now: list[Any], i: int, x: Any, y: Any, k: int
    ) -> list[Any]:
        """16 rows of a chunk multiplied, and their successors fetched, from `k` of x.

        The columns are in use until the last rows. All rows in turn make the chunk.
        """
        now = list(now)
        first = self.b * self.nj + i * self.a
        for j in range(self.nj):
            at = (i * self.nj + j) * 4
            total[at : at + 4] = self.mma(
                builder,
                now[first : first + self.a],
                now[j * self.b : (j + 1) * self.b],
                total[at : at + 4],
            )
            if i == self.mi - 1 and (j + 1) % self.column_step == 0:
                column = j + 1 - self.column_step
                now[column * self.b : (j + 1) * self.b] = self.columns(builder, y, column, k)
        now[first : first + self.a] = self.rows(builder, x, i, k)
        return now


@functools.cache
def engine(dtype: str, tile: CudaBlock, small: bool, x: Fetch, y: Fetch) -> Engine:
    """The engine of a block of warps.

    `small`: mma.m8n8k4, the instruction for float64 of compute capability 8.0.
    """
    warp = _Warp(dtype, tile, small, x, y)
    key = f"{dtype},{tile},{tile.chunk},{small},{x},{y}"
    totals, factors = warp.mi * warp.nj * 4, warp.mi * warp.a + warp.nj * warp.b
    size = 8 if dtype == "float64" else 4
    put_pitch = (tile.block_n + 8) * size

    def passed(turn: int) -> list[tuple[int, int, int]]:
        return [
            ((turn * warp.nj + j) * 4 + 2 * h, 2, 8 * h * put_pitch + 8 * j * size)
            for j in range(warp.nj)
            for h in range(2)
        ]

    made = arithmetic(
        key,
        totals,
        factors,
        warp.mi,
        range(tile.chunk, tile.block_k, tile.chunk),
        lambda builder, x, y: warp.factors(builder, x, y, 0),
        warp.multiply,
        passed,
    )
    warps_n = tile.block_n // tile.part_n

    def starts(fetch: Fetch, rows: bool) -> Any:
        own, along = fetch.offsets
        return inlined(
            _from,
            WARPS_ACROSS=warps_n,
            ROWS=rows,
            HALVES=dtype != "float64",
            K_INNER=fetch.k_inner,
            WARP_LENGTH=tile.part_m if rows else tile.part_n,
            OWN_OFFSET=own,
            K_OFFSET=along,
        )

    return Engine(
        tile,
        x,
        y,
        factor=types.float64 if dtype == "float64" else types.int32,
        arithmetic=made,
        x_from=starts(x, True),
        y_from=starts(y, False),
        put_to=inlined(_put_to, WARPS_N=warps_n, WARP_N=tile.part_n, PITCH=put_pitch, SIZE=size),
        put_pitch=put_pitch,
        passes=tile.part_m // 16,
        pass_rows=tile.block_m // tile.part_m * 16,
        pass_row=inlined(_pass_row, WARP_M=tile.part_m),
    )


def _values(operand: Operand, own: int) -> tuple[bool, int]:
    """Whether a factor lies along K, and the values of it that one access fetches."""
    along_k = abs(operand.strides[3 - own]) < abs(operand.strides[own])
    axis = 3 - own if along_k else own
    for values in (16 // operand.itemsize, 4 // operand.itemsize):
        if values > 1 and operand.runs_wide(axis, values):
            return along_k, values
    return along_k, 1


def plan(
    product: Product,
    device: DeviceInfo,
    tile: CudaBlock,
    part: int,
    parts: int,
    clustered: bool = False,
    turn: str = "",
) -> Plan | None:
    """How to run it with this tile; the parts of K are planes, or blocks of a cluster.

    `turn` is that of `tails.plan`. Return None where two factors of one side cannot come in the
    same way.
    """
    p = product
    found = []
    right, *others = p.rights
    if any(_values(other, 2) != _values(right, 2) for other in others):
        return None
    if p.x1 is not None and _values(p.x1, 1) != _values(p.x, 1):
        return None
    for operand, own, block in ((p.x, 1, tile.block_m), (right, 2, tile.block_n)):
        along_k, values = _values(operand, own)
        found.append(
            Fetch(
                block,
                tile.block_k,
                tile.threads,
                operand.itemsize,
                along_k,
                values,
                k_inner=along_k,
                held=values * operand.itemsize < 4,  # cp.async copies 4 bytes or more
            )
        )
    x, y = found[0], blocks.paired(p, found[1])
    if y is None:
        return None
    made = engine(p.x.dtype, tile, device.capability < (9, 0), x, y)
    beside = turn if device.capability >= (9, 0) else ""
    return blocks.plan(
        *(p, device, part, parts, made, "tensor cores"),
        clustered=clustered,
        waits="last" if beside == "last" else "",
        releases=beside == "first",
    )


def _tiles(product: Product, device: DeviceInfo) -> tuple[CudaBlock, ...]:
    """Return the tiles for a product; none for float32, mixed types, and before 8.0."""
    p = product
    if not blocks.takes(p, device) or p.x.dtype != p.y.dtype or p.x.dtype == "float32":
        return ()
    if p.accumulator != ("float64" if p.x.dtype == "float64" else "float32"):
        return ()
    if p.x.dtype == "float64":
        long = p.k > tiling.one_chain("float64", p.m, p.n, p.free)
        if long and p.members is not None:
            return block_tiling.DOUBLE_MEMBERS
        tiles = block_tiling.DOUBLE_LONG if long else block_tiling.DOUBLE_BLOCKS
        return tuple(tile for tile in tiles if tile.resident > 1 or _has_room(tile, device))
    held = 1 in (_values(p.x, 1)[1], _values(p.rights[0], 2)[1])
    return block_tiling.HALF_BLOCKS_HELD if held else block_tiling.HALF_BLOCKS


def _has_room(tile: CudaBlock, device: DeviceInfo) -> bool:
    """Return whether a block of a device can have the slices of a float64 tile, in any layout."""
    values = (tile.block_m + tile.block_n) * (tile.block_k + 4)
    return tile.stages * values * 8 <= device.shared_per_block


def _fitting(plan: Plan | None, device: DeviceInfo) -> Plan | None:
    """Return a plan of which all launches have the shared memory that they want, or None."""
    if plan is None:
        return None
    most = max(x.shared_bytes for x in plan.launches)
    return plan if most <= device.shared_per_block else None


def take(product: Product, device: DeviceInfo) -> Plan | None:
    """How to run it; None for float32, mixed types, and before compute capability 8.0."""
    p, tiles, few = product, _tiles(product, device), None
    if not tiles:
        return None
    if p.x1 is not None:
        terms = block_tiling.two_terms(tiles, p.m, p.n, p.k, p.places, device.multiprocessors)
        return None if terms is None else _fitting(plan(p, device, *terms), device)
    n = p.n * (1 + p.has_two_sums)  # as many columns of sums
    clusters = p.x.dtype == "float64" and device.capability >= (9, 0)
    if clusters and not p.free and p.members is None:
        few = few_tiling.few(few_tiling.DOUBLE_FEW, p.m, p.n, p.k, device.multiprocessors)
    if few is not None:
        if p.is_rich:
            return None
        made = _fitting(plan(p, device, *few, clustered=True), device)
        if made is not None:
            return made
    if p.part:
        found = blocks.ways_of(p, tiles, device.multiprocessors)
        for _, tile, part, parts in sorted(found, key=itemgetter(0)):
            made = _fitting(plan(p, device, tile, part, parts), device)
            if made is not None:
                return made
        return None
    for first in range(min(3, len(tiles))):  # the largest want more than consumers' GPUs have
        fitting = tiles[first:]
        tile, part, parts, work = block_tiling.block(
            fitting, p.m, n, p.k, p.places, p.free, device.multiprocessors, p.whole
        )
        if p.is_rich and parts > 1:
            return None
        made = tails.plan(p, device, fitting, (), work, plan)
        if made is None:
            made = plan(p, device, tile, part, parts)
        made = _fitting(made, device)
        if made is not None:
            return made
    return None


def ways(product: Product, device: DeviceInfo) -> Iterator[Way]:
    """Return all ways to run it: every tile, in the parts that a model names."""
    p, busy = product, device.multiprocessors
    n = p.n * (1 + p.has_two_sums)

    def made(tile: CudaBlock, part: int, parts: int) -> Plan | None:
        return _fitting(plan(p, device, tile, part, parts), device)

    for _, tile, part, parts in blocks.ways_of(p, _tiles(p, device), busy):
        name = block_tiling.way_name(tile, part, parts)
        cost = block_tiling.cost(tile, p.m, n, p.places, part, parts, busy)
        yield Way(name, cost, functools.partial(made, tile, part, parts))


TENSOR_CORES = Tier("tensor cores", take, ways)
