"""Sums of products of residues: AMX tiles of bytes, their remainders, and the way back.

A sum of 32 bits becomes a byte from 0 to p - 1, and the bytes of all moduli a float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from numfuse.backends.cpu.llvm.tiles import TILE, tiles_of
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
        unit = tiles_of(b, "tdpbssd", emulated)
        places = [(i, j) for i in range(2) for j in range(2)]
        pitch = I64(2 * LINE)

        def at(i: int, j: int) -> ir.Value:
            return b.add(sums, I64(2 * TILE * i + LINE * j))

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
                unit.load(4 + i, b.add(x_at, I64(TILE * i)), I64(LINE))
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
