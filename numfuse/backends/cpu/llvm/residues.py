"""Products of float64 by integers of 8 bits: their residues, AMX tiles of them, and the way back.

An integer of a scaled factor is cut into pieces of some 15 bits, and a modulus has it as the sum of
their products with what it leaves of their powers of two, exact in float32. Bytes of factors are
from -p/2 to p/2, those of sums from 0 to p - 1. Scales and numbers go by the operations that GPUs
have (`backends.cuda.kernels.residues`), in their order, and so have the same bits.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numfuse.backends.cpu.llvm.vectors import (
    I8,
    I32,
    I64,
    address_intrinsic,
    broadcast,
    call,
    lane_numbers,
    multiply_add,
    pointer_to,
    prefetch,
    stack,
    vector_of,
)
from numfuse.backends.cpu.tiling import LINE
from numfuse.moduli import Residues

#: Rows (of A, or columns of B) of a panel, values of K of a step, and bytes of both.
PANEL, STEP = 32, 64
PANEL_BYTES = PANEL * STEP
#: Bytes behind a plane, that of a modulus, and behind a step of one that waits to be turned: a line
#: of all moduli is written at once, and without them all would meet in one set of level 1.
GAP = LINE
#: Requests of a step to the caches, for each factor.
ASKED = 3
#: A number below 2^51, plus and minus this, is rounded to the nearest integer; the same of float32.
_ROUNDER, _ROUNDER_32 = 1.5 * 2.0**52, 1.5 * 2.0**23
#: Chains of a sum of squares, as a GPU's row has threads, and bytes of them and of their largest.
_CHAINS = 32
CHAIN_BYTES = 2 * 8 * _CHAINS
_F64, _F32 = ir.DoubleType(), ir.FloatType()
_D8, _F16 = vector_of(_F64, 8), vector_of(_F32, 16)
_L8, _I16 = vector_of(I64, 8), vector_of(I32, 16)


def _all(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _balanced(x: int, p: int) -> int:
    """Return what is left of x modulo p, from -p/2 to p/2."""
    return (x + p // 2) % p - p // 2


def _single(x: float) -> float:
    """Return the nearest float32, as llvmlite wants its constants."""
    (found,) = struct.unpack("f", struct.pack("f", x))
    return float(found)


def _rounded(b: ir.IRBuilder, x: ir.Value, factor: ir.Value, rounder: float) -> ir.Value:
    """Return x times a factor as the nearest integer."""
    magic = _all(x.type, rounder)
    return b.fsub(multiply_add(b, x, factor, magic), magic)


@functools.cache
def make_add_squares() -> Any:
    """``add_squares(source, chains)``: take 64 contiguous float64 into a line's sum of squares.

    There are 32 chains, of which each takes every 32nd value: their sums at `chains`, and their
    largest behind these.
    """

    def body(b: ir.IRBuilder, source: ir.Value, chains: ir.Value) -> None:
        for i in range(_CHAINS // 8):
            places = [pointer_to(b, chains, at + LINE * i, _D8) for at in (0, 8 * _CHAINS)]
            total, top = (b.load(place, align=8) for place in places)
            for at in (0, 8 * _CHAINS):
                x = b.load(pointer_to(b, source, at + LINE * i, _D8), align=8)
                size = call(b, "llvm.fabs.v8f64", x, result=_D8)
                total = multiply_add(b, size, size, total)
                top = b.select(b.fcmp_ordered(">", size, top), size, top)
            for x, place in zip((total, top), places, strict=True):
                b.store(x, place, align=8)

    return address_intrinsic("add_squares", "float64", 2, body)


@functools.cache
def make_norm() -> Any:
    """``norm(chains, target)``: the sum of squares and the largest, of chains in their order."""

    def body(b: ir.IRBuilder, chains: ir.Value, target: ir.Value) -> None:
        total = top = _F64(0.0)
        for i in range(_CHAINS):
            total = b.fadd(total, b.load(pointer_to(b, chains, 8 * i, _F64)))
            x = b.load(pointer_to(b, chains, 8 * (_CHAINS + i), _F64))
            top = b.select(b.fcmp_ordered(">", x, top), x, top)
        for i, x in enumerate((total, top)):
            b.store(x, pointer_to(b, target, 8 * i, _F64))

    return address_intrinsic("norm", "float64", 2, body)


@functools.cache
def make_add_products() -> Any:
    """``add_products(x, x_step, y, y_step, count, target)``: a chain of float64, in its order."""

    def body(b: ir.IRBuilder, *args: ir.Value) -> None:
        x, x_step, y, y_step, count, target = args
        place = pointer_to(b, target, 0, _F64)
        with cgutils.for_range(b, count) as loop:
            left, right = (
                b.load(pointer_to(b, at, b.mul(loop.index, step), _F64))
                for at, step in ((x, x_step), (y, y_step))
            )
            total = call(b, "llvm.fma.f64", left, right, b.load(place), result=_F64)
            b.store(total, place)

    return address_intrinsic("add_products", "float64", 6, body)


@functools.cache
def pieces(of: Residues) -> tuple[int, int]:
    """Return in how many pieces of how many bits an integer is cut.

    The sum of their products with what powers of two leave is at most 2^23: so its quotient by p,
    off by a 2^24th, is less than 1 / 2p from the right one, and rounded to the same integer.
    """
    limit = math.isqrt(int(of.square)) + 1
    for count in range(2, 8):
        for bits in range(16, 11, -1):
            below = 2 ** (bits - 1)
            most = below + 128 * (below * (count - 2) + (limit >> bits * (count - 1)) + 1)
            if most <= 1 << 23:
                return count, bits
    raise ValueError(f"{of.count} moduli need more pieces")


@functools.cache
def make_split(of: Residues) -> Any:
    """``split(source, powers, target, plane)``: residues of 64 contiguous float64.

    They are multiplied by the two float64 at `powers` and rounded. Those of modulus t are 64 bytes
    at ``target + t * plane``.
    """
    count, bits = pieces(of)

    def body(b: ir.IRBuilder, source: ir.Value, powers: ir.Value, *to: ir.Value) -> None:
        target, plane = to
        low, high = (broadcast(b, b.load(pointer_to(b, powers, 8 * i, _F64)), 8) for i in range(2))

        def cut(at: ir.Value) -> list[ir.Value]:
            """Return the pieces of 8 numbers, the lowest first."""
            x = b.load(pointer_to(b, at, 0, _D8), align=8)
            x = call(b, "llvm.rint.v8f64", b.fmul(b.fmul(x, low), high), result=_D8)
            found = []
            for _ in range(count - 1):
                upper = b.fmul(x, _all(_D8, 2.0**-bits))
                upper = call(b, "llvm.rint.v8f64", upper, result=_D8)
                found.append(multiply_add(b, upper, _all(_D8, -(2.0**bits)), x))
                x = upper
            return [b.fptrunc(piece, vector_of(_F32, 8)) for piece in (*found, x)]

        with cgutils.for_range(b, I64(STEP // 16)) as loop:
            at = b.add(source, b.mul(loop.index, I64(2 * LINE)))
            halves = zip(cut(at), cut(b.add(at, I64(LINE))), strict=True)
            first, *others = [b.shuffle_vector(x, y, lane_numbers([*range(16)])) for x, y in halves]
            place = b.add(target, b.mul(loop.index, I64(16)))
            for p in of.moduli:
                value = first
                for i, piece in enumerate(others, 1):
                    power = _all(_F16, float(_balanced(1 << bits * i, p)))
                    value = multiply_add(b, piece, power, value)
                quotient = _rounded(b, value, _all(_F16, _single(1 / p)), _ROUNDER_32)
                rest = multiply_add(b, quotient, _all(_F16, float(-p)), value)
                whole = b.bitcast(b.fadd(rest, _all(_F16, _ROUNDER_32)), _I16)
                narrow = b.trunc(whole, vector_of(I8, 16))
                b.store(narrow, pointer_to(b, place, 0, narrow.type), align=1)
                place = b.add(place, plane)

    return address_intrinsic("split", str(of.count), 4, body)


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
        return pointer_to(self.b, self.base, offset, _I16)

    def _rows(self, emit: Callable[[ir.Value], None]) -> None:
        with cgutils.for_range(self.b, I64(16)) as loop:
            emit(loop.index)

    def zero(self, tile: int) -> None:
        self._rows(lambda row: self.b.store(ir.Constant(_I16, None), self._row(tile, row), align=4))

    def load(self, tile: int, at: ir.Value, step: int) -> None:
        def one(row: ir.Value) -> None:
            place = pointer_to(self.b, at, self.b.mul(row, I64(step)), _I16)
            self.b.store(self.b.load(place, align=4), self._row(tile, row), align=4)

        self._rows(one)

    def store(self, tile: int, at: ir.Value, step: int) -> None:
        def one(row: ir.Value) -> None:
            place = pointer_to(self.b, at, self.b.mul(row, I64(step)), _I16)
            self.b.store(self.b.load(self._row(tile, row), align=4), place, align=4)

        self._rows(one)

    def product(self, sums: int, x: int, y: int) -> None:
        """Emit TDPBSSD as its manual has it: four products of signed bytes to each sum."""
        b = self.b

        def bytes_of(words: ir.Value) -> list[ir.Value]:
            shifts = [_all(_I16, 24 - 8 * i) for i in range(4)]
            return [b.ashr(b.shl(words, shift), _all(_I16, 24)) for shift in shifts]

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
        for value in (float(_balanced(1 << 16, p)), _single(1 / p), float(-p), float((p - 1) // 2))
    ]

    def body(b: ir.IRBuilder, sums: ir.Value, modulus: ir.Value, target: ir.Value) -> None:
        base = _table(b, f"numfuse_moduli_{of.count}", constants, _F32)
        base = b.add(base, b.mul(modulus, I64(16)))
        power, inverse, less, middle = (
            broadcast(b, b.load(pointer_to(b, base, 4 * i, _F32), align=4), 16) for i in range(4)
        )
        sixteen, magic = _all(_I16, 16), _all(_F16, _ROUNDER_32)
        with cgutils.for_range(b, I64(PANEL * PANEL // 16)) as loop:
            at = b.add(sums, b.mul(loop.index, I64(LINE)))
            x = b.load(pointer_to(b, at, 0, _I16), align=4)
            upper = b.ashr(b.add(x, _all(_I16, 1 << 15)), sixteen)
            lower = b.ashr(b.shl(x, sixteen), sixteen)
            value = multiply_add(b, b.sitofp(upper, _F16), power, b.sitofp(lower, _F16))
            value = b.fsub(value, middle)
            rest = multiply_add(b, _rounded(b, value, inverse, _ROUNDER_32), less, value)
            bits = b.bitcast(b.fadd(rest, b.fadd(middle, magic)), _I16)
            narrow = b.trunc(bits, vector_of(I8, 16))
            place = pointer_to(b, target, b.mul(loop.index, I64(16)), narrow.type)
            b.store(narrow, place, align=1)

    return address_intrinsic("reduce", str(of.count), 3, body)


def _power(b: ir.IRBuilder, n: ir.Value) -> ir.Value:
    """Return 2^n of integers, normal."""
    return b.bitcast(b.shl(b.add(n, _all(_L8, 1023)), _all(_L8, 52)), _D8)


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
        own = broadcast(b, b.load(pointer_to(b, row, 0, _F64), align=8), 8)
        magic, zeros = _all(_D8, _ROUNDER), ir.Constant(_D8, None)
        with cgutils.for_range(b, I64(PANEL // 8)) as loop:
            at, high, low = b.add(source, b.mul(loop.index, I64(8))), zeros, zeros
            for weight, rest in zip(highs, lows, strict=True):
                narrow = b.load(pointer_to(b, at, 0, vector_of(I8, 8)), align=1)
                residue = b.sitofp(b.zext(narrow, vector_of(I32, 8)), _D8)
                high = multiply_add(b, residue, _all(_D8, weight), high)
                low = multiply_add(b, residue, _all(_D8, rest), low)
                at = b.add(at, plane)
            high = b.fsub(high, b.fsub(b.fadd(high, magic), magic))
            top = b.fadd(high, low)
            part = b.fsub(top, high)
            rest = b.fadd(b.fsub(high, b.fsub(top, part)), b.fsub(low, part))
            scale = _all(_D8, scale_high)
            product = b.fmul(top, scale)
            error = multiply_add(b, top, scale, b.fneg(product))
            small = multiply_add(b, top, _all(_D8, scale_low), b.fmul(rest, scale))
            value = b.fadd(product, b.fadd(error, small))
            offset = b.mul(loop.index, I64(LINE))
            other = b.load(pointer_to(b, columns, offset, _D8), align=8)
            n = b.fsub(_all(_D8, float(scale_n)), b.fadd(own, other))
            # Beyond that all are infinite, or 0.
            for edge, beyond in ((2000.0, ">"), (-2000.0, "<")):
                limit = _all(_D8, edge)
                n = b.select(b.fcmp_ordered(beyond, n, limit), limit, n)
            n = b.select(b.fcmp_ordered("ord", n, n), n, zeros)
            whole = b.fptosi(n, _L8)
            half = b.ashr(whole, _all(_L8, 1))
            value = b.fmul(b.fmul(value, _power(b, half)), _power(b, b.sub(whole, half)))
            b.store(value, pointer_to(b, target, offset, _D8), align=8)

    return address_intrinsic("numbers", str(of.count), 5, body)
