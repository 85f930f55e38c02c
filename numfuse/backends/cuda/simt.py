"""Tier (b) on CUDA cores: float32 by fused multiply-adds of register tiles, strictly IEEE.

A thread has MR x NR sums, each one chain over K in its order, whatever the tile. Factors come from
shared memory by fours, of neighbours or of values of k, as the factor lies in memory: no layout is
turned. The threads of a warp share them: 8 of them lie along M and 4 along N, so that a warp's part
is square where MR = 8 and NR = 16.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from numfuse import tiling
from numfuse.backends.cuda import blocks
from numfuse.backends.cuda.blocks import Engine, Fetch, device, runs_wide
from numfuse.backends.cuda.intrinsics import (
    F32,
    I32,
    array_pointer,
    fused,
    named,
    put_shared_vector,
    read_registers,
    shared_vector,
    write_registers,
)
from numfuse.backends.cuda.product import DeviceInfo, Operand, Plan, Product
from numfuse.backends.cuda.toolchain import types
from numfuse.tiling import CudaBlock

i32 = np.int32

#: Values of an access of shared memory.
FOUR = 4


def _thread_row(t):
    """A thread's number along M: 8 of a warp.

    Neighbouring lanes share their rows, and every second pair its columns: a warp's 16-byte reads
    then take two turns of shared memory instead of four.
    """
    return (t >> 5) // WARPS_N * 8 + ((t >> 1) & 7)


def _thread_column(t):
    """The same along N: 4 of a warp."""
    return (t >> 5) % WARPS_N * 4 + ((t & 1) | ((t >> 3) & 2))


def _from(t, memory):
    return i32(memory + NUMBER(t) * 16)


def _put_to(t, memory):
    return i32(memory + ROW(t) * (ROW_RUN * PITCH) + COLUMN(t) * (COLUMN_RUN * 4))


def _pass_row(r, turn):
    return r + turn * PASS_ROWS


class _Factor:
    """A thread's values of one factor, in blocks of four by four values of k.

    In lines (K outermost) four neighbours are one access, and the threads of a warp have
    neighbouring fours; in quads four values of k are, and the threads have neighbouring values, so
    that the accesses of a warp are neighbours too.
    """

    def __init__(self, fetch: Fetch, count: int) -> None:
        self.fetch, self.count = fetch, count
        #: neighbours of a thread
        self.run = 1 if fetch.quads else FOUR

    @property
    def blocks(self) -> int:
        return self.count // FOUR

    def value(self, i: int) -> int:
        """Where a thread's value `i` lies, from its first."""
        if self.fetch.quads:
            return i * (self.fetch.block // self.count)
        return i // FOUR * (self.fetch.block * FOUR // self.count) + i % FOUR

    def block(self, builder: Any, at: Any, block: int, k: int) -> list[list[Any]]:
        """Block number `block` for the four values from `k` on: [value][k]."""
        own, along = self.fetch.offsets
        found = []
        for i in range(FOUR):
            if self.fetch.quads:
                offset = self.value(FOUR * block + i) * own + k * along
            else:
                offset = self.value(FOUR * block) * own + (k + i) * along
            found.append(shared_vector(builder, builder.add(at, I32(offset)), F32, FOUR))
        return found if self.fetch.quads else [list(row) for row in zip(*found, strict=True)]


class _Tile:
    """The arithmetic of a thread's tile, as LLVM instructions.

    Four values of k at a time, one block of columns after the other: the next block is on its way
    from shared memory while this one is multiplied, and a block of rows is replaced after its last
    use, so that MR + 8 fours of registers hold all factors.
    """

    def __init__(self, x: _Factor, y: _Factor) -> None:
        self.x, self.y = x, y

    def first(self, builder: Any, x: Any, y: Any) -> list[Any]:
        """All of X and the first block of Y, and room for the next."""
        rows = [self.x.block(builder, x, b, 0) for b in range(self.x.blocks)]
        return [*rows, *[self.y.block(builder, y, 0, 0)] * 2]

    def multiply(
        self, builder: Any, total: list[Any], a: list[Any], b: list[Any], row: int, column: int
    ) -> None:
        """A block of X by one of Y, four values of k in their order."""
        for k in range(FOUR):
            for i in range(FOUR):
                # back and forth: neighbours in time share an operand
                for j in range(FOUR) if i % 2 == 0 else reversed(range(FOUR)):
                    at = (FOUR * row + i) * self.y.count + FOUR * column + j
                    total[at] = fused(builder, a[i][k], b[j][k], total[at])

    def columns(
        self, builder: Any, total: list[Any], now: list[Any], column: int, y: Any, k: int
    ) -> list[Any]:
        """A block of columns; the one after it in the same values of k is fetched."""
        following = self.y.block(builder, y, column + 1, k)
        for row in range(self.x.blocks):
            self.multiply(builder, total, now[row], now[-2], row, column)
        return [*now[:-2], following, following]

    def last_columns(
        self, builder: Any, total: list[Any], now: list[Any], row: int, x: Any, y: Any, k: int
    ) -> list[Any]:
        """Block `row` of the last block of columns; its successor, and with the first the first
        block of Y, for the values from `k` are fetched. All rows in turn make the chunk."""
        now = list(now)
        if row == 0:
            now[-1] = self.y.block(builder, y, 0, k)
        if self.x.blocks == 1:
            following = self.x.block(builder, x, row, k)
        self.multiply(builder, total, now[row], now[-2], row, self.y.blocks - 1)
        if self.x.blocks > 1:
            following = self.x.block(builder, x, row, k)
        now[row] = following
        if row == self.x.blocks - 1:
            now[-2] = now[-1]
        return now


def _flat(blocks: list[Any]) -> list[Any]:
    return [value for block in blocks for row in block for value in row]


def _blocks(values: list[Any]) -> list[Any]:
    rows = [values[i : i + FOUR] for i in range(0, len(values), FOUR)]
    return [rows[i : i + FOUR] for i in range(0, len(rows), FOUR)]


@functools.cache
def engine(tile: CudaBlock, x_fetch: Fetch, y_fetch: Fetch) -> Engine:
    """The engine of a tile."""
    mr, nr = tile.part_m, tile.part_n
    rows, columns = _Factor(x_fetch, mr), _Factor(y_fetch, nr)
    part = _Tile(rows, columns)
    key = f"{tile},{x_fetch},{y_fetch}"
    totals, factors = mr * nr, FOUR * (mr + 2 * FOUR)
    put_pitch = (tile.block_n + FOUR) * 4

    def first_factors(typingctx: Any, registers: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to = array_pointer(context, builder, signature.args[0], args[0])
            write_registers(builder, to, 0, _flat(part.first(builder, args[1], args[2])))
            return context.get_dummy_value()

        return types.void(registers, types.int32, types.int32), codegen

    def on_registers(
        builder: Any, context: Any, signature: Any, args: Any,
        body: Callable[[list[Any], list[Any]], list[Any]],
    ) -> Any:  # fmt: skip
        """Change the sums and the factors of a thread."""
        sums = array_pointer(context, builder, signature.args[0], args[0])
        held = array_pointer(context, builder, signature.args[1], args[1])
        value = read_registers(builder, sums, 0, totals)
        current = body(value, _blocks(read_registers(builder, held, 0, factors)))
        write_registers(builder, sums, 0, value)
        write_registers(builder, held, 0, _flat(current))
        return context.get_dummy_value()

    def multiply_slice(typingctx: Any, total: Any, now: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def body(total: list[Any], now: list[Any]) -> list[Any]:
                for k in range(0, tile.block_k, FOUR):
                    for column in range(columns.blocks - 1):
                        now = part.columns(builder, total, now, column, args[3], k)
                    if k + FOUR < tile.block_k:
                        for row in range(rows.blocks):
                            now = part.last_columns(
                                builder, total, now, row, args[2], args[3], k + FOUR
                            )
                return now

            return on_registers(builder, context, signature, args, body)

        return types.void(total, now, types.int32, types.int32), codegen

    def multiply_part(typingctx: Any, total: Any, now: Any, number: Any, x: Any, y: Any) -> Any:
        if not isinstance(number, types.IntegerLiteral):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def body(total: list[Any], now: list[Any]) -> list[Any]:
                row = number.literal_value
                return part.last_columns(builder, total, now, row, args[3], args[4], 0)

            return on_registers(builder, context, signature, args, body)

        return types.void(total, now, number, types.int32, types.int32), codegen

    def put_totals(typingctx: Any, total: Any, turn: Any, to: Any) -> Any:
        if not isinstance(turn, types.IntegerLiteral):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            for i in range(FOUR):
                for j in range(0, nr, columns.run):
                    first = (turn.literal_value * FOUR + i) * nr + j
                    values = read_registers(builder, sums, first, columns.run)
                    offset = rows.value(i) * put_pitch + columns.value(j) * 4
                    put_shared_vector(builder, builder.add(args[2], I32(offset)), values)
            return context.get_dummy_value()

        return types.void(total, turn, types.int32), codegen

    warps_n = tile.block_n // nr // 4
    row = device(_thread_row, WARPS_N=warps_n)
    column = device(_thread_column, WARPS_N=warps_n)
    pass_rows = tile.block_m * FOUR // mr
    return Engine(
        accumulator="float32",
        totals=totals,
        factors=factors,
        factor=types.float32,
        first_factors=named("first_factors", key, 3, first_factors),
        multiply_slice=named("multiply_slice", key, 4, multiply_slice),
        multiply_part=named("multiply_part", key, 5, multiply_part),
        parts=rows.blocks,
        x_from=device(_from, NUMBER=row),
        y_from=device(_from, NUMBER=column),
        put_totals=named("put_totals", key, 3, put_totals),
        put_to=device(
            _put_to, ROW=row, COLUMN=column, ROW_RUN=rows.run, COLUMN_RUN=columns.run,
            PITCH=put_pitch,
        ),
        put_pitch=put_pitch,
        passes=mr // FOUR,
        pass_rows=pass_rows,
        pass_row=device(_pass_row, PASS_ROWS=pass_rows),
    )  # fmt: skip


def fetch(operand: Operand, own: int, block: int, tile: CudaBlock) -> Fetch:
    """How a factor comes to shared memory; `own`: its axis that is not K (1: rows, 2: columns)."""
    along_k = abs(operand.strides[3 - own]) < abs(operand.strides[own])
    wide = runs_wide(operand, 3 - own if along_k else own, FOUR)
    return Fetch(
        block, tile.block_k, tile.threads, 4, along_k, FOUR if wide else 1, k_inner=False,
        quads=along_k,
    )  # fmt: skip


def plan(product: Product, device: DeviceInfo, tile: CudaBlock, part: int, parts: int) -> Plan:
    """How to run it with this tile."""
    x = fetch(product.x, 1, tile.block_m, tile)
    y = fetch(product.y, 2, tile.block_n, tile)
    return blocks.plan(product, device, tile, part, parts, x, y, engine(tile, x, y), "cores")


class Cores:
    """Takes float32 products; see the module."""

    name = "cores"

    def take(self, product: Product, device: DeviceInfo) -> Plan | None:
        """How to run it; None for other types, and before compute capability 8.0."""
        p = product
        if not blocks.takes(p, device) or p.precision != "ieee":
            return None
        if (p.x.dtype, p.y.dtype, p.accumulator) != ("float32",) * 3:
            return None
        tile, part, parts = tiling.cuda_block(
            tiling.CUDA_CORE_BLOCKS, p.m, p.n, p.k, p.places, p.free, device.multiprocessors
        )
        return plan(p, device, tile, part, parts)


CORES = Cores()
