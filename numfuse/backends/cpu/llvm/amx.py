"""The micro-kernel on AMX tiles: half-precision factors, sums in float32.

A tile register holds 16 rows of 64 bytes.  One instruction adds to 16 x 16 float32 sums the
products of 16 x 32 values of A and 32 x 16 of B, as many as 32 fused multiply-adds of 512 bits
would, in 16 cycles.  Four tiles of sums, two of A and two of B make the eight that there are, and
load two tiles for four products.

LLVM's plain intrinsics name the tile registers themselves, so nothing here can be spilled; a
function that holds them must not lose control to other code with tiles in between.  A thread
configures the unit before (`make_open_tiles`) and releases it afterwards (`make_close_tiles`),
because a context switch would save 8 KiB of state as long as it is in use.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

from llvmlite import ir

from numfuse.backends.cpu.llvm.vectors import I8, I64, address_intrinsic, call, pointer_to, prefetch
from numfuse.backends.cpu.tiling import LINE, Registers

_P8 = I8.as_pointer()
_ROWS = 16
_PRODUCTS = {"bfloat16": "llvm.x86.tdpbf16ps", "float16": "llvm.x86.tdpfp16ps"}


@functools.cache
def make_open_tiles() -> Any:
    """``open_tiles(scratch)``: configure eight tiles of 16 x 64 bytes; writes 64 bytes there."""
    # Palette 1; from byte 16 on the bytes of a row, from byte 48 on the rows of each tile.
    words = struct.unpack("<8q", struct.pack("<16B8H16x8B8x", 1, *[0] * 15, *[64] * 8, *[16] * 8))

    def body(builder: ir.IRBuilder, scratch: ir.Value) -> None:
        for i, word in enumerate(words):
            builder.store(I64(word), pointer_to(builder, scratch, 8 * i, I64), align=8)
        call(builder, "llvm.x86.ldtilecfg", builder.inttoptr(scratch, _P8))

    return address_intrinsic("open_tiles", "amx", 1, body)


@functools.cache
def make_close_tiles() -> Any:
    """``close_tiles(scratch)``: release the unit."""

    def body(builder: ir.IRBuilder, scratch: ir.Value) -> None:
        call(builder, "llvm.x86.tilerelease")

    return address_intrinsic("close_tiles", "amx", 1, body)


def _sums_of(
    builder: ir.IRBuilder,
    product: str,
    heights: int,
    widths: int,
    streams: int,
    asks: int,
    args: Any,
) -> None:
    """One output of ``16 heights x 16 widths``; tile registers: sums 0-3, A 4 and 5, B 6 and 7."""
    k, a, b, b_step, before, before_step, c, c_step, first, table = args
    places = [(i, j) for i in range(heights) for j in range(widths)]

    def move(name: str, number: int, address: ir.Value, offset: Any, step: ir.Value) -> None:
        call(builder, name, I8(number), pointer_to(builder, address, offset, I8), step)

    def of_sums(name: str, base: ir.Value, step: ir.Value) -> None:
        for i, j in places:
            offset = builder.add(builder.mul(step, I64(_ROWS * i)), I64(LINE * j))
            move(name, 2 * i + j, base, offset, step)

    def requested(stream: int) -> tuple[ir.Value, ir.Value]:
        word = pointer_to(builder, table, 16 * stream, I64)
        return builder.load(word), builder.load(pointer_to(builder, table, 16 * stream + 8, I64))

    with builder.if_else(builder.icmp_signed("!=", first, I64(0))) as (fresh, running):
        with fresh:
            for i, j in places:
                call(builder, "llvm.x86.tilezero", I8(2 * i + j))
        with running:
            of_sums("llvm.x86.tileloadd64", before, before_step)
    start = builder.block
    loop = builder.append_basic_block("tiles.loop")
    done = builder.append_basic_block("tiles.done")
    builder.branch(loop)
    builder.position_at_end(loop)
    phis = [builder.phi(I64) for _ in range(3)]
    left, a_at, b_at = phis
    for j in range(widths):
        move("llvm.x86.tileloadd64", 6 + j, b_at, LINE * j, b_step)
    for i in range(heights):
        move("llvm.x86.tileloadd64", 4 + i, a_at, _ROWS * LINE * i, I64(LINE))
        for j in range(widths):
            call(builder, product, I8(2 * i + j), I8(4 + i), I8(6 + j))
    # Eighteen words do not fit the registers: addresses are computed anew from those at the start,
    # so that the loop loads only (with stores in it, loads of tiles would have to be told apart).
    for stream in range(streams):
        first_at, step = requested(stream)
        number = builder.mul(builder.sub(k, left), I64(asks))
        at = builder.add(first_at, builder.mul(number, step))
        for _ in range(asks):
            prefetch(builder, at)
            at = builder.add(at, step)
    following = [
        builder.sub(left, I64(1)),
        builder.add(a_at, I64(2 * _ROWS * LINE)),
        builder.add(b_at, builder.mul(b_step, I64(_ROWS))),
    ]
    for phi, initial, then in zip(phis, (k, a, b), following, strict=True):
        phi.add_incoming(initial, start)
        phi.add_incoming(then, builder.block)
    builder.cbranch(builder.icmp_signed(">", following[0], I64(0)), loop, done)
    builder.position_at_end(done)
    of_sums("llvm.x86.tilestored64", c, c_step)
    for stream in range(streams):
        first_at, step = requested(stream)
        end = builder.add(first_at, builder.mul(builder.mul(k, I64(asks)), step))
        builder.store(end, pointer_to(builder, table, 16 * stream, I64))


@functools.cache
def make_tile_kernel(fmt: str, r: Registers, streams: int) -> Any:
    """`microkernel.make_microkernel` on tiles: the same arguments, with these differences.

    `k` counts steps of 32 values, `a` is a panel of tiles (`packing.pack_tiles`), `b` one of pairs
    (`packing.pack_pairs`).  Sums start from ``before`` instead of being added to it.  Whole tiles
    are written, whatever `rows` is: 16 rows or 32, 16 columns or 32; no other tile follows in a
    call.
    """

    def body(builder: ir.IRBuilder, rows: ir.Value, columns: ir.Value, *given: ir.Value) -> None:
        k, a, _, b, b_step, _, *others = given
        args = k, a, b, b_step, *others
        end = builder.append_basic_block("tiles.end")
        selector = builder.add(
            builder.select(builder.icmp_signed(">", rows, I64(_ROWS)), I64(2), I64(0)),
            builder.select(builder.icmp_signed(">", columns, I64(_ROWS)), I64(1), I64(0)),
        )
        switch = builder.switch(selector, end)
        for heights in (1, 2):
            for widths in (1, 2):
                block = builder.append_basic_block(f"tiles.{heights}x{widths}")
                switch.add_case(I64(2 * heights + widths - 3), block)
                builder.position_at_end(block)
                asks = r.requests // streams
                _sums_of(builder, _PRODUCTS[fmt], heights, widths, streams, asks, args)
                builder.branch(end)
        builder.position_at_end(end)

    key = f"{fmt},{r.mr},{r.nr},{r.requests},{streams}"
    return address_intrinsic("tile_kernel", key, 14, body)
