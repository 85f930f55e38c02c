"""Sums of products of residues: AMX tiles of bytes, their remainders, and the way back.

A sum of 32 bits becomes a byte from 0 to p - 1, and the bytes of all moduli a float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numfuse.backends.cpu.llvm.residues import (
    DOUBLES,
    F32,
    F64,
    FLOATS,
    LONGS,
    PANEL,
    PANEL_BYTES,
    ROUNDER,
    ROUNDER_32,
    WORDS,
    balanced,
    rounded,
    single,
    splat,
)
from numfuse.backends.cpu.llvm.vectors import (
    I8,
    I32,
    I64,
    address_intrinsic,
    broadcast,
    call,
    multiply_add,
    pointer_to,
    prefetch,
    stack,
    vector_of,
)
from numfuse.backends.cpu.tiling import LINE
from numfuse.moduli import Residues

#: Requests of a step to the caches, for each factor.
ASKED = 3


@functools.cache
def make_add_products() -> Any:
    """``add_products(x, x_step, y, y_step, count, target)``: a chain of float64, in its order."""

    def body(b: ir.IRBuilder, *args: ir.Value) -> None:
        x, x_step, y, y_step, count, target = args
        place = pointer_to(b, target, 0, F64)
        with cgutils.for_range(b, count) as loop:
            left, right = (
                b.load(pointer_to(b, at, b.mul(loop.index, step), F64))
                for at, step in ((x, x_step), (y, y_step))
            )
            total = call(b, "llvm.fma.f64", left, right, b.load(place), result=F64)
            b.store(total, place)

    return address_intrinsic("add_products", "float64", 6, body)


class _Tiles:
    """The tile registers: sums 0 to 3, of A 4 and 5, of B 6 and 7."""

    def __init__(self, b: ir.IRBuilder) -> None:
        self.b = b

    def zero(self, tile: int) -> None:
        call(self.b, "llvm.x86.tilezero", I8(tile))

    def load(self, tile: int, at: ir.Value, step: int) -> None:
        call(self.b, "llvm.x86.tileloadd64", I8(tile), pointer_to(self.b, at, 0, I8), I64(step))

    def store(self, tile: int, at: ir.Value, step: int) -> None:
        call(self.b, "llvm.x86.tilestored64", I8(tile), pointer_to(self.b, at, 0, I8), I64(step))

    def product(self, sums: int, x: int, y: int) -> None:
        call(self.b, "llvm.x86.tdpbssd", I8(sums), I8(x), I8(y))


class _Emulated(_Tiles):
    """The same on the stack, for processors without them."""

    def __init__(self, b: ir.IRBuilder) -> None:
        super().__init__(b)
        self.base = b.ptrtoint(stack(b, 8 * 16 * LINE), I64)

    def _row(self, tile: int, row: Any) -> ir.Value:
        offset = self.b.add(I64(tile * 16 * LINE), self.b.mul(row, I64(LINE)))
        return pointer_to(self.b, self.base, offset, WORDS)

    def _rows(self, emit: Callable[[ir.Value], None]) -> None:
        with cgutils.for_range(self.b, I64(16)) as loop:
            emit(loop.index)

    def zero(self, tile: int) -> None:
        self._rows(
            lambda row: self.b.store(ir.Constant(WORDS, None), self._row(tile, row), align=4)
        )

    def load(self, tile: int, at: ir.Value, step: int) -> None:
        def one(row: ir.Value) -> None:
            place = pointer_to(self.b, at, self.b.mul(row, I64(step)), WORDS)
            self.b.store(self.b.load(place, align=4), self._row(tile, row), align=4)

        self._rows(one)

    def store(self, tile: int, at: ir.Value, step: int) -> None:
        def one(row: ir.Value) -> None:
            place = pointer_to(self.b, at, self.b.mul(row, I64(step)), WORDS)
            self.b.store(self.b.load(self._row(tile, row), align=4), place, align=4)

        self._rows(one)

    def product(self, sums: int, x: int, y: int) -> None:
        """Emit TDPBSSD as its manual has it: four products of signed bytes to each sum."""
        b = self.b

        def bytes_of(words: ir.Value) -> list[ir.Value]:
            shifts = [splat(WORDS, 24 - 8 * i) for i in range(4)]
            return [b.ashr(b.shl(words, shift), splat(WORDS, 24)) for shift in shifts]

        def one(row: ir.Value) -> None:
            place = self._row(sums, row)
            own = b.ptrtoint(self._row(x, row), I64)
            with cgutils.for_range(b, I64(16)) as loop:
                at = pointer_to(b, own, b.mul(loop.index, I64(4)), I32)
                left = bytes_of(broadcast(b, b.load(at, align=4), 16))
                right = bytes_of(b.load(self._row(y, loop.index), align=4))
                total = b.load(place, align=4)
                for factors in zip(left, right, strict=True):
                    total = b.add(total, b.mul(*factors))
                b.store(total, place, align=4)

        self._rows(one)


@functools.cache
def make_residue_kernel(emulated: bool) -> Any:
    """``kernel(steps, a, b, sums, first, next_a, pace_a, next_b, pace_b)``: sums += A B.

    They are 32 x 32 int32 of a panel of each, in contiguous rows, and begin from zero where `first`
    is not 0. A has 32 rows of 64 bytes for each step, B 16 rows of 32 times four bytes along K;
    both steps are 2 KiB. Each step asks level 2 for `ASKED` more addresses from `next_a` on, and
    as many from `next_b` on, which lie a pace apart.
    """

    def body(b: ir.IRBuilder, steps: ir.Value, *args: ir.Value) -> None:
        x, y, sums, first, *asked = args
        unit = _Emulated(b) if emulated else _Tiles(b)
        places = [(i, j) for i in range(2) for j in range(2)]
        pitch = 2 * LINE

        def at(i: int, j: int) -> ir.Value:
            return b.add(sums, I64(16 * pitch * i + LINE * j))

        with b.if_else(b.icmp_signed("!=", first, I64(0))) as (fresh, running):
            with fresh:
                for i, j in places:
                    unit.zero(2 * i + j)
            with running:
                for i, j in places:
                    unit.load(2 * i + j, at(i, j), pitch)
        with cgutils.for_range(b, steps) as loop:
            offset = b.mul(loop.index, I64(PANEL_BYTES))
            x_at, y_at = b.add(x, offset), b.add(y, offset)
            for base, pace in zip(asked[::2], asked[1::2], strict=True):
                at_hand = b.add(base, b.mul(b.mul(loop.index, I64(ASKED)), pace))
                for _ in range(ASKED):
                    prefetch(b, at_hand)
                    at_hand = b.add(at_hand, pace)
            for j in range(2):
                unit.load(6 + j, b.add(y_at, I64(LINE * j)), pitch)
            for i in range(2):
                unit.load(4 + i, b.add(x_at, I64(16 * LINE * i)), LINE)
                for j in range(2):
                    unit.product(2 * i + j, 4 + i, 6 + j)
        for i, j in places:
            unit.store(2 * i + j, at(i, j), pitch)

    return address_intrinsic("residue_kernel", str(emulated), 9, body)


def _table(b: ir.IRBuilder, name: str, values: Sequence[float], kind: ir.Type) -> ir.Value:
    """Return the address of constants in the module."""
    held = ir.ArrayType(kind, len(values))
    if name not in b.module.globals:
        made = ir.GlobalVariable(b.module, held, name)
        made.linkage, made.global_constant, made.align = "internal", True, 64
        made.initializer = ir.Constant(held, list(values))
    return b.ptrtoint(b.module.globals[name], I64)


@functools.cache
def make_reduce(of: Residues) -> Any:
    """``reduce(sums, modulus, target)``: 32 x 32 sums of int32 become bytes from 0 to p - 1.

    A sum is 2^16 h + l; h (2^16 mod p) + l is below 2^22.1, and exact in float32. Its quotient by
    p is off by 2^-9.4 at the most, less than the 1 / 2p that lie between the middle of two integers
    and the nearest multiple of 1 / p.
    """
    constants = [
        value
        for p in of.moduli
        for value in (float(balanced(1 << 16, p)), single(1 / p), float(-p), float((p - 1) // 2))
    ]

    def body(b: ir.IRBuilder, sums: ir.Value, modulus: ir.Value, target: ir.Value) -> None:
        base = _table(b, f"numfuse_moduli_{of.count}", constants, F32)
        base = b.add(base, b.mul(modulus, I64(16)))
        power, inverse, less, middle = (
            broadcast(b, b.load(pointer_to(b, base, 4 * i, F32), align=4), 16) for i in range(4)
        )
        sixteen, magic = splat(WORDS, 16), splat(FLOATS, ROUNDER_32)
        with cgutils.for_range(b, I64(PANEL * PANEL // 16)) as loop:
            at = b.add(sums, b.mul(loop.index, I64(LINE)))
            x = b.load(pointer_to(b, at, 0, WORDS), align=4)
            upper = b.ashr(b.add(x, splat(WORDS, 1 << 15)), sixteen)
            lower = b.ashr(b.shl(x, sixteen), sixteen)
            value = multiply_add(b, b.sitofp(upper, FLOATS), power, b.sitofp(lower, FLOATS))
            value = b.fsub(value, middle)
            rest = multiply_add(b, rounded(b, value, inverse, ROUNDER_32), less, value)
            bits = b.bitcast(b.fadd(rest, b.fadd(middle, magic)), WORDS)
            narrow = b.trunc(bits, vector_of(I8, 16))
            place = pointer_to(b, target, b.mul(loop.index, I64(16)), narrow.type)
            b.store(narrow, place, align=1)

    return address_intrinsic("reduce", str(of.count), 3, body)


def _power(b: ir.IRBuilder, n: ir.Value) -> ir.Value:
    """Return 2^n of integers, normal."""
    return b.bitcast(b.shl(b.add(n, splat(LONGS, 1023)), splat(LONGS, 52)), DOUBLES)


@functools.cache
def make_numbers(of: Residues) -> Any:
    """``numbers(source, plane, row, columns, target)``: 32 sums of a row from their residues.

    Those of modulus t are 32 bytes at ``source + t * plane``. The exponents of the row and of the
    columns are float64 at `row` and `columns`; so are the numbers at `target`, any where an
    exponent is NaN.
    """
    highs, lows = of.weights
    scale_n, scale_high, scale_low = of.scale

    def body(b: ir.IRBuilder, source: ir.Value, plane: ir.Value, *args: ir.Value) -> None:
        row, columns, target = args
        own = broadcast(b, b.load(pointer_to(b, row, 0, F64), align=8), 8)
        magic, zeros = splat(DOUBLES, ROUNDER), ir.Constant(DOUBLES, None)
        with cgutils.for_range(b, I64(PANEL // 8)) as loop:
            at, high, low = b.add(source, b.mul(loop.index, I64(8))), zeros, zeros
            for weight, rest in zip(highs, lows, strict=True):
                narrow = b.load(pointer_to(b, at, 0, vector_of(I8, 8)), align=1)
                residue = b.sitofp(b.zext(narrow, vector_of(I32, 8)), DOUBLES)
                high = multiply_add(b, residue, splat(DOUBLES, weight), high)
                low = multiply_add(b, residue, splat(DOUBLES, rest), low)
                at = b.add(at, plane)
            high = b.fsub(high, b.fsub(b.fadd(high, magic), magic))
            top = b.fadd(high, low)
            part = b.fsub(top, high)
            rest = b.fadd(b.fsub(high, b.fsub(top, part)), b.fsub(low, part))
            scale = splat(DOUBLES, scale_high)
            product = b.fmul(top, scale)
            error = multiply_add(b, top, scale, b.fneg(product))
            small = multiply_add(b, top, splat(DOUBLES, scale_low), b.fmul(rest, scale))
            value = b.fadd(product, b.fadd(error, small))
            offset = b.mul(loop.index, I64(LINE))
            other = b.load(pointer_to(b, columns, offset, DOUBLES), align=8)
            n = b.fsub(splat(DOUBLES, float(scale_n)), b.fadd(own, other))
            # Beyond that all are infinite, or 0.
            for edge, beyond in ((2000.0, ">"), (-2000.0, "<")):
                limit = splat(DOUBLES, edge)
                n = b.select(b.fcmp_ordered(beyond, n, limit), limit, n)
            n = b.select(b.fcmp_ordered("ord", n, n), n, zeros)
            whole = b.fptosi(n, LONGS)
            half = b.ashr(whole, splat(LONGS, 1))
            value = b.fmul(b.fmul(value, _power(b, half)), _power(b, b.sub(whole, half)))
            b.store(value, pointer_to(b, target, offset, DOUBLES), align=8)

    return address_intrinsic("numbers", str(of.count), 5, body)
