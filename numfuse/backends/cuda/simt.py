"""Tier (b) on CUDA cores: float32 by fused multiply-adds of register tiles, strictly IEEE.

A thread has MR x NR sums. For one value of k it reads MR + NR factors from shared memory, by fours,
and the threads of a warp share them: 8 of them lie along M and 4 along N, so that a warp's part is
square where MR = 8 and NR = 16.
"""

# A kernel has no annotations, and its UPPER-case names are bound by the toolchain.
# mypy: disable-error-code="no-untyped-def, name-defined"
# ruff: noqa: F821
from __future__ import annotations

import functools
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

#: Values of a vector access of shared memory.
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


def _x_from(t, memory):
    return i32(memory + ROW(t) * 16)


def _y_from(t, memory):
    return i32(memory + COLUMN(t) * 16)


def _put_to(t, memory):
    return i32(memory + ROW(t) * (4 * PITCH) + COLUMN(t) * 16)


def _pass_row(r, turn):
    return r + turn * PASS_ROWS


class _Tile:
    """The arithmetic of a thread's tile, as LLVM instructions.

    A run is four neighbours; the runs of a thread are `block / runs` values apart, so that the
    threads of a warp read neighbouring runs.
    """

    def __init__(
        self, block_m: int, block_n: int, block_k: int, mr: int, nr: int, x_row: int, y_row: int
    ) -> None:
        self.mr, self.nr, self.block_k = mr, nr, block_k
        self.block_m, self.block_n = block_m, block_n
        # bytes from one k to the next
        self.x_row, self.y_row = x_row, y_row

    def factors(self, builder: Any, x: Any, y: Any, k: int) -> list[Any]:
        found = []
        for at, row, block, count in (
            (x, self.x_row, self.block_m, self.mr),
            (y, self.y_row, self.block_n, self.nr),
        ):
            for run in range(count // FOUR):
                offset = k * row + run * (block * FOUR // count) * 4
                found += shared_vector(builder, builder.add(at, I32(offset)), F32, FOUR)
        return found

    def multiply(self, builder: Any, total: list[Any], factors: list[Any]) -> list[Any]:
        total = list(total)
        a, b = factors[: self.mr], factors[self.mr :]
        for i in range(self.mr):
            # back and forth: neighbours in time share an operand
            for j in range(self.nr) if i % 2 == 0 else reversed(range(self.nr)):
                at = i * self.nr + j
                total[at] = fused(builder, a[i], b[j], total[at])
        return total


@functools.cache
def engine(
    block_m: int, block_n: int, block_k: int, mr: int, nr: int, x_row: int, y_row: int
) -> Engine:
    """The engine of a tile; `x_row`, `y_row`: bytes from one k to the next in shared memory."""
    tile = _Tile(block_m, block_n, block_k, mr, nr, x_row, y_row)
    key = f"{block_m},{block_n},{block_k},{mr},{nr},{x_row},{y_row}"
    totals, factors = mr * nr, mr + nr
    put_pitch = (block_n + FOUR) * 4

    def first_factors(typingctx: Any, registers: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to = array_pointer(context, builder, signature.args[0], args[0])
            write_registers(builder, to, 0, tile.factors(builder, args[1], args[2], 0))
            return context.get_dummy_value()

        return types.void(registers, types.int32, types.int32), codegen

    def multiply_slice(typingctx: Any, total: Any, now: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            held = array_pointer(context, builder, signature.args[1], args[1])
            value = read_registers(builder, sums, 0, totals)
            current = read_registers(builder, held, 0, factors)
            for k in range(1, block_k):
                following = tile.factors(builder, args[2], args[3], k)
                value = tile.multiply(builder, value, current)
                current = following
            write_registers(builder, sums, 0, value)
            write_registers(builder, held, 0, current)
            return context.get_dummy_value()

        return types.void(total, now, types.int32, types.int32), codegen

    def multiply_last(typingctx: Any, total: Any, now: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            held = array_pointer(context, builder, signature.args[1], args[1])
            value = read_registers(builder, sums, 0, totals)
            current = read_registers(builder, held, 0, factors)
            write_registers(builder, held, 0, tile.factors(builder, args[2], args[3], 0))
            write_registers(builder, sums, 0, tile.multiply(builder, value, current))
            return context.get_dummy_value()

        return types.void(total, now, types.int32, types.int32), codegen

    def put_totals(typingctx: Any, total: Any, turn: Any, to: Any) -> Any:
        if not isinstance(turn, types.IntegerLiteral):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            for i in range(FOUR):
                for run in range(nr // FOUR):
                    first = (turn.literal_value * FOUR + i) * nr + run * FOUR
                    values = read_registers(builder, sums, first, FOUR)
                    offset = i * put_pitch + run * (block_n * FOUR // nr) * 4
                    put_shared_vector(builder, builder.add(args[2], I32(offset)), values)
            return context.get_dummy_value()

        return types.void(total, turn, types.int32), codegen

    warps_n = block_n // nr // 4
    row = device(_thread_row, WARPS_N=warps_n)
    column = device(_thread_column, WARPS_N=warps_n)
    pass_rows = block_m * FOUR // mr
    return Engine(
        accumulator="float32",
        totals=totals,
        factors=factors,
        factor=types.float32,
        first_factors=named("first_factors", key, 3, first_factors),
        multiply_slice=named("multiply_slice", key, 4, multiply_slice),
        multiply_last=named("multiply_last", key, 4, multiply_last),
        x_from=device(_x_from, ROW=row),
        y_from=device(_y_from, COLUMN=column),
        put_totals=named("put_totals", key, 3, put_totals),
        put_to=device(_put_to, ROW=row, COLUMN=column, PITCH=put_pitch),
        put_pitch=put_pitch,
        passes=mr // FOUR,
        pass_rows=pass_rows,
        pass_row=device(_pass_row, PASS_ROWS=pass_rows),
    )


def fetch(operand: Operand, own: int, block: int, tile: CudaBlock) -> Fetch:
    """How a factor comes to shared memory; `own`: its axis that is not K (1: rows, 2: columns)."""
    along_k = abs(operand.strides[3 - own]) < abs(operand.strides[own])
    wide = runs_wide(operand, 3 - own if along_k else own, FOUR)
    return Fetch(
        block, tile.block_k, tile.threads, 4, along_k,
        values=FOUR if wide else 1,
        k_inner=False,
        # shared memory lies by k: four values of k are turned on their way through registers
        held=wide and along_k,
        # 8 values of k (2 vectors) side by side: a whole sector of memory, and no bank conflicts
        side_by_side=(2 if wide else 8) if along_k else 0,
    )  # fmt: skip


def plan(product: Product, device: DeviceInfo, tile: CudaBlock, part: int, parts: int) -> Plan:
    """How to run it with this tile."""
    x = fetch(product.x, 1, tile.block_m, tile)
    y = fetch(product.y, 2, tile.block_n, tile)
    made = engine(
        tile.block_m, tile.block_n, tile.block_k, tile.part_m, tile.part_n, x.offsets[1],
        y.offsets[1],
    )  # fmt: skip
    return blocks.plan(product, device, tile, part, parts, x, y, made, "cores")


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
