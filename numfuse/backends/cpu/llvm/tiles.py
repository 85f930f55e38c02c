"""Tile registers as loads, stores and products of tiles, on AMX or emulated by vectors.

A tile has 16 rows of 64 bytes. A product adds to 16 x 16 sums of 32 bits: of pairs of bfloat16
(TDPBF16PS), or of four signed bytes (TDPBSSD).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numfuse.backends.cpu.llvm.vectors import (
    I8,
    I32,
    I64,
    VOID,
    broadcast,
    call,
    multiply_add,
    pointer_to,
    stack,
    vector_of,
)
from numfuse.backends.cpu.tiling import LINE

ROWS = LANES = 16
#: Bytes of a tile.
TILE = ROWS * LINE
FLOATS, WORDS = vector_of(ir.FloatType(), LANES), vector_of(I32, LANES)


def tiles_of(builder: ir.IRBuilder, product: str, emulated: bool) -> Tiles:
    """Return the eight tiles, whose products are made by this instruction."""
    return (Emulated if emulated else Tiles)(builder, product)


class Tiles:
    """The tile registers of the processor; steps from row to row are in bytes."""

    def __init__(self, builder: ir.IRBuilder, instruction: str) -> None:
        self.builder, self.instruction = builder, instruction

    def zero(self, tile: int) -> None:
        call(self.builder, "llvm.x86.tilezero", I8(tile))

    def load(self, tile: int, at: ir.Value, step: ir.Value) -> None:
        place = pointer_to(self.builder, at, 0, I8)
        call(self.builder, "llvm.x86.tileloadd64", I8(tile), place, step)

    def store(self, tile: int, at: ir.Value, step: ir.Value) -> None:
        place = pointer_to(self.builder, at, 0, I8)
        call(self.builder, "llvm.x86.tilestored64", I8(tile), place, step)

    def product(self, sums: int, a: int, b: int) -> None:
        call(self.builder, f"llvm.x86.{self.instruction}", I8(sums), I8(a), I8(b))


class Emulated(Tiles):
    """Eight tiles on the stack, for processors without them: every instruction in vectors."""

    def __init__(self, builder: ir.IRBuilder, instruction: str) -> None:
        super().__init__(builder, instruction)
        self.base = builder.ptrtoint(stack(builder, 8 * TILE), I64)

    def _at(self, tile: int) -> ir.Value:
        return self.builder.add(self.base, I64(tile * TILE))

    def _move(self, source: ir.Value, step: Any, target: ir.Value, onto: Any) -> None:
        b = self.builder
        with cgutils.for_range(b, I64(ROWS)) as loop:
            at = b.add(source, b.mul(loop.index, step))
            row = b.load(pointer_to(b, at, 0, WORDS), align=4)
            to = b.add(target, b.mul(loop.index, onto))
            b.store(row, pointer_to(b, to, 0, WORDS), align=4)

    def zero(self, tile: int) -> None:
        for row in range(ROWS):
            place = pointer_to(self.builder, self._at(tile), LINE * row, WORDS)
            self.builder.store(ir.Constant(WORDS, None), place, align=4)

    def load(self, tile: int, at: ir.Value, step: ir.Value) -> None:
        self._move(at, step, self._at(tile), I64(LINE))

    def store(self, tile: int, at: ir.Value, step: ir.Value) -> None:
        self._move(self._at(tile), I64(LINE), at, step)

    def product(self, sums: int, a: int, b: int) -> None:
        name = f"numfuse_emulated_{self.instruction}"
        kind = ir.FunctionType(VOID, [I64] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        if function.is_declaration:
            function.linkage = "internal"
            _EMULATED[self.instruction](function)
        self.builder.call(function, [self._at(x) for x in (sums, a, b)])


def _tdpbf16ps(function: ir.Function) -> None:
    """Emit TDPBF16PS as its manual has it: even and odd places of K in sums of their own.

    (The instruction takes subnormal numbers as zero, too, which this does not.)
    """
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    sums, a, b = function.args

    def floats(bits: ir.Value) -> ir.Value:
        return builder.bitcast(bits, FLOATS)

    high, half = (ir.Constant(WORDS, [x] * LANES) for x in (0xFFFF0000, 16))
    with cgutils.for_range(builder, I64(ROWS)) as rows:
        offset = builder.mul(rows.index, I64(LINE))
        even = odd = ir.Constant(FLOATS, [0.0] * LANES)
        for k in range(ROWS):
            pair = builder.load(pointer_to(builder, builder.add(a, offset), 4 * k, I32), align=4)
            left = broadcast(builder, pair, LANES)
            right = builder.load(pointer_to(builder, b, LINE * k, WORDS), align=4)
            low_a, low_b = (floats(builder.shl(x, half)) for x in (left, right))
            high_a, high_b = (floats(builder.and_(x, high)) for x in (left, right))
            even = multiply_add(builder, low_a, low_b, even)
            odd = multiply_add(builder, high_a, high_b, odd)
        place = pointer_to(builder, builder.add(sums, offset), 0, FLOATS)
        total = builder.fadd(builder.load(place, align=4), builder.fadd(even, odd))
        builder.store(total, place, align=4)
    builder.ret_void()


def _tdpbssd(function: ir.Function) -> None:
    """Emit TDPBSSD as its manual has it: four products of signed bytes to each sum."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    sums, a, b = function.args

    def bytes_of(words: ir.Value) -> list[ir.Value]:
        last = ir.Constant(WORDS, [24] * LANES)
        shifts = [ir.Constant(WORDS, [24 - 8 * i] * LANES) for i in range(4)]
        return [builder.ashr(builder.shl(words, shift), last) for shift in shifts]

    with cgutils.for_range(builder, I64(ROWS)) as rows:
        offset = builder.mul(rows.index, I64(LINE))
        place = pointer_to(builder, builder.add(sums, offset), 0, WORDS)
        total = builder.load(place, align=4)
        for k in range(ROWS):
            four = builder.load(pointer_to(builder, builder.add(a, offset), 4 * k, I32), align=4)
            left = bytes_of(broadcast(builder, four, LANES))
            right = bytes_of(builder.load(pointer_to(builder, b, LINE * k, WORDS), align=4))
            for factors in zip(left, right, strict=True):
                total = builder.add(total, builder.mul(*factors))
        builder.store(total, place, align=4)
    builder.ret_void()


_EMULATED = {"tdpbf16ps": _tdpbf16ps, "tdpbssd": _tdpbssd}
