"""The micro-kernel on the bfloat16 parts of float32: six or three products of AMX tiles a step.

With a = a0 + a1 + a2, b likewise, the products of parts that matter are summed in one go, in an
order in which each changes the tiles of one factor alone: seven pairs of tiles are loaded for 24
products.  Every block of K is summed from zero, and added to the sum before it by vectors.

An infinity as a0 meets zeros among the small parts, and infinity times zero is NaN.  So a sum that
is not finite (which one look at the stored sums tells) is made once more: the small products by
themselves, those that are not finite taken as 0, and then a0 b0, which follows IEEE.  Sums beside
it keep their bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numfuse.backends.cpu.llvm.tiles import ROWS, TILE, Tiles, tiles_of
from numfuse.backends.cpu.llvm.vectors import (
    I16,
    I64,
    address_intrinsic,
    multiply_add,
    pointer_to,
    prefetch,
    stack,
    vector_of,
)
from numfuse.backends.cpu.tiling import LINE, PARTS, Registers

_LANES = 16
_FLOATS = vector_of(ir.FloatType(), _LANES)
#: By the number of parts: the parts of A and of B of each product, in their order.
_SMALL = {3: ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0)), 2: ((0, 1), (1, 0))}
_EVERY = {3: (*_SMALL[3], (0, 0)), 2: ((0, 1), (0, 0), (1, 0))}
_LARGE = ((0, 0),)


class _Block:
    """One output of ``16 heights x 16 widths``; tile registers: sums 0-3, A 4 and 5, B 6 and 7."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        unit: Tiles,
        r: Registers,
        heights: int,
        widths: int,
        turned: bool,
        args: Any,
    ) -> None:
        self.builder, self.unit, self.r, self.turned = builder, unit, r, turned
        self.parts = PARTS[r.kind]
        self.heights, self.widths = heights, widths
        self.k, self.a, self.b, self.b_step = args
        self.places = [(i, j) for i in range(heights) for j in range(widths)]

    def move(self, what: Callable[..., None], base: ir.Value, step: ir.Value) -> None:
        """Load or store the tiles of sums."""
        b = self.builder
        for i, j in self.places:
            offset = b.add(b.mul(step, I64(ROWS * i)), I64(LINE * j))
            what(2 * i + j, b.add(base, offset), step)

    def zero(self) -> None:
        for i, j in self.places:
            self.unit.zero(2 * i + j)

    def add(self, products: Sequence[tuple[int, int]], each: Callable[..., None]) -> None:
        """Add these products of parts for all steps of K; `each` emits what a step does besides.

        Where the product is the transpose of the one that is meant, A has the parts of its B.
        """
        if self.turned:
            products = [pair[::-1] for pair in products]
        b, unit = self.builder, self.unit
        start = b.block
        loop = b.append_basic_block("parts.loop")
        done = b.append_basic_block("parts.done")
        b.branch(loop)
        b.position_at_end(loop)
        phis = [b.phi(I64) for _ in range(3)]
        left, a_at, b_at = phis
        plane_a, plane_b = self.r.mr * LINE, b.mul(self.b_step, I64(ROWS))
        held_a = held_b = -1
        for part_a, part_b in products:
            if part_b != held_b:
                base = b.add(b_at, b.mul(plane_b, I64(part_b)))
                for j in range(self.widths):
                    unit.load(6 + j, b.add(base, I64(LINE * j)), self.b_step)
            for i in range(self.heights):
                if part_a != held_a:
                    at = b.add(a_at, I64(plane_a * part_a + TILE * i))
                    unit.load(4 + i, at, I64(LINE))
                for j in range(self.widths):
                    unit.product(2 * i + j, 4 + i, 6 + j)
            held_a, held_b = part_a, part_b
        each(left)
        following = [
            b.sub(left, I64(1)),
            b.add(a_at, I64(self.parts * plane_a)),
            b.add(b_at, b.mul(plane_b, I64(self.parts))),
        ]
        for phi, initial, then in zip(phis, (self.k, self.a, self.b), following, strict=True):
            phi.add_incoming(initial, start)
            phi.add_incoming(then, b.block)
        b.cbranch(b.icmp_signed(">", following[0], I64(0)), loop, done)
        b.position_at_end(done)

    def rows(self, sides: Sequence[tuple[ir.Value, ir.Value]], emit: Callable[..., None]) -> None:
        """Emit for each vector of the sums, given its place on each side (base and step)."""
        b = self.builder
        with cgutils.for_range(b, I64(ROWS * self.heights)) as loop:
            bases = [b.add(base, b.mul(loop.index, step)) for base, step in sides]
            for j in range(self.widths):
                emit(*(pointer_to(b, base, LINE * j, _FLOATS) for base in bases))


def _is_finite(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    nothing = builder.fmul(x, ir.Constant(_FLOATS, [0.0] * _LANES))
    return builder.fcmp_ordered("ord", nothing, nothing)


def _any_is_not_finite(block: _Block, at: ir.Value, step: ir.Value) -> ir.Value:
    """Return whether one of the stored sums is infinite or NaN: times 0 it is NaN, and stays so."""
    b, zeros = block.builder, ir.Constant(_FLOATS, [0.0] * _LANES)
    seen = [cgutils.alloca_once_value(b, zeros) for _ in range(block.widths)]
    turn = iter(range(block.widths))
    for place in seen:
        b.store(zeros, place)

    def look(place: ir.Value) -> None:
        own = seen[next(turn)]
        x = b.load(place, align=4)
        b.store(multiply_add(b, x, zeros, b.load(own)), own)

    block.rows([(at, step)], look)
    total = b.load(seen[0])
    for own in seen[1:]:
        total = b.fadd(total, b.load(own))
    bits = b.bitcast(b.fcmp_unordered("uno", total, total), I16)
    return b.icmp_signed("!=", bits, I16(0))


def _again(block: _Block, at: ir.Value, step: ir.Value, scratch: ir.Value) -> None:
    """Make the sums that are not finite once more, the small products apart."""
    b, line = block.builder, I64(2 * LINE)
    zeros = ir.Constant(_FLOATS, [0.0] * _LANES)

    def cleared(place: ir.Value) -> None:
        x = b.load(place, align=4)
        b.store(b.select(_is_finite(b, x), x, zeros), place, align=4)

    def merged(place: ir.Value, other: ir.Value) -> None:
        x, y = b.load(place, align=4), b.load(other, align=4)
        b.store(b.select(_is_finite(b, x), x, y), place, align=4)

    block.zero()
    block.add(_SMALL[block.parts], lambda left: None)
    block.move(block.unit.store, scratch, line)
    block.rows([(scratch, line)], cleared)
    block.move(block.unit.load, scratch, line)
    block.add(_LARGE, lambda left: None)
    block.move(block.unit.store, scratch, line)
    block.rows([(at, step), (scratch, line)], merged)


def _sums(
    builder: ir.IRBuilder, block: _Block, asks: int, streams: int, scratch: ir.Value, args: Any
) -> None:
    before, before_step, c, c_step, first, table = args
    k = block.k

    def requested(stream: int) -> tuple[ir.Value, ir.Value]:
        word = pointer_to(builder, table, 16 * stream, I64)
        return builder.load(word), builder.load(pointer_to(builder, table, 16 * stream + 8, I64))

    def ask(left: ir.Value) -> None:
        for stream in range(streams):
            first_at, step = requested(stream)
            number = builder.mul(builder.sub(k, left), I64(asks))
            at = builder.add(first_at, builder.mul(number, step))
            for _ in range(asks):
                prefetch(builder, at)
                at = builder.add(at, step)

    fresh = builder.icmp_signed("!=", first, I64(0))
    at = builder.select(fresh, c, scratch)
    step = builder.select(fresh, c_step, I64(2 * LINE))
    block.zero()
    block.add(_EVERY[block.parts], ask)
    block.move(block.unit.store, at, step)
    for stream in range(streams):
        first_at, pace = requested(stream)
        end = builder.add(first_at, builder.mul(builder.mul(k, I64(asks)), pace))
        builder.store(end, pointer_to(builder, table, 16 * stream, I64))
    with builder.if_then(_any_is_not_finite(block, at, step), likely=False):
        _again(block, at, step, builder.add(scratch, I64(4 * TILE)))

    def added(own: ir.Value, so_far: ir.Value, place: ir.Value) -> None:
        total = builder.fadd(builder.load(own, align=4), builder.load(so_far, align=4))
        builder.store(total, place, align=4)

    with builder.if_then(builder.not_(fresh)):
        block.rows([(at, step), (before, before_step), (c, c_step)], added)


@functools.cache
def make_split_kernel(r: Registers, streams: int, emulated: bool, turned: bool = False) -> Any:
    """`amx.make_tile_kernel` on parts: the same arguments, with these differences.

    `a` is a panel of `parts.pack_parts_a`, `b` one of `parts.pack_parts_b`.  Sums are made from
    zero and then added to ``before``. Those of a transpose (`turned`) have the bits of the others.
    """

    def body(builder: ir.IRBuilder, rows: ir.Value, columns: ir.Value, *given: ir.Value) -> None:
        k, a, _, b, b_step, _, *others = given
        args = k, a, b, b_step, *others
        scratch = builder.ptrtoint(stack(builder, 8 * TILE), I64)
        unit = tiles_of(builder, "tdpbf16ps", emulated)
        end = builder.append_basic_block("parts.end")
        selector = builder.add(
            builder.select(builder.icmp_signed(">", rows, I64(ROWS)), I64(2), I64(0)),
            builder.select(builder.icmp_signed(">", columns, I64(ROWS)), I64(1), I64(0)),
        )
        switch = builder.switch(selector, end)
        for heights in (1, 2):
            for widths in (1, 2):
                entered = builder.append_basic_block(f"parts.{heights}x{widths}")
                switch.add_case(I64(2 * heights + widths - 3), entered)
                builder.position_at_end(entered)
                block = _Block(builder, unit, r, heights, widths, turned, args[:4])
                _sums(builder, block, r.requests // streams, streams, scratch, args[4:])
                builder.branch(end)
        builder.position_at_end(end)

    key = f"{r.kind},{r.mr},{r.nr},{r.requests},{streams},{emulated},{turned}"
    return address_intrinsic("split_kernel", key, 14, body)
