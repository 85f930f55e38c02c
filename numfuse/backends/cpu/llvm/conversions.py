"""Storage formats to the accumulator's and back: vectors of elements, and one."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numfuse.backends.cpu import host
from numfuse.backends.cpu.llvm.intrinsics import CARRIERS
from numfuse.backends.cpu.llvm.vectors import (
    FORMATS,
    I16,
    I32,
    lane_numbers,
    typed_intrinsic,
    vector_of,
)


def converts_by_integers(fmt: str) -> bool:
    """Whether this format is converted by operations on its bits."""
    return fmt == "float16" and not host.converts_halves()


def _same(ty: ir.Type, number: int) -> ir.Constant:
    """The number as an integer of this type, in every lane of a vector."""
    return ir.Constant(ty, [number] * ty.count if isinstance(ty, ir.VectorType) else number)


def _like(ty: ir.Type, element: ir.Type) -> ir.Type:
    return vector_of(element, ty.count) if isinstance(ty, ir.VectorType) else element


def widen_by_integers(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """float16, a scalar or a vector of I16, in float32; NaN as an instruction of F16C has it."""
    whole, real = _like(half.type, I32), _like(half.type, ir.FloatType())

    def of(number: int) -> ir.Constant:
        return _same(whole, number)

    bits = builder.zext(half, whole)
    # The exponent and the mantissa at their places; the exponent's bias grows by 127 - 15 = 112.
    placed = builder.shl(builder.and_(bits, of(0x7FFF)), of(13))
    normal = builder.add(placed, of(112 << 23))
    # Subnormal: as the mantissa of 2^-14, which is then taken away (exactly, in normal numbers).
    first = of(113 << 23)
    raised = builder.bitcast(builder.add(placed, first), real)
    exact = builder.fsub(raised, builder.bitcast(first, real), flags=("arcp",))
    subnormal = builder.bitcast(exact, whole)
    infinite = builder.or_(placed, of(0x7F800000))
    quiet = builder.or_(infinite, of(0x400000))
    is_small = builder.icmp_unsigned("<", placed, of(1 << 23))
    is_special = builder.icmp_unsigned(">=", placed, of(31 << 23))
    is_nan = builder.icmp_unsigned(">", placed, of(31 << 23))
    found = builder.select(is_small, subnormal, normal)
    found = builder.select(is_special, builder.select(is_nan, quiet, infinite), found)
    sign = builder.shl(builder.and_(bits, of(0x8000)), of(16))
    return builder.bitcast(builder.or_(found, sign), real)


def narrow_by_integers(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A float32 as the bits of a float16, rounded to nearest even; NaN as F16C has it."""
    bits = builder.bitcast(value, I32)
    size = builder.and_(bits, I32(0x7FFFFFFF))
    # Below 2^-14, 0.5 + size has as many bits behind the point as a subnormal half: 24.
    sum_ = builder.fadd(builder.bitcast(size, ir.FloatType()), ir.FloatType()(0.5), flags=("arcp",))
    subnormal = builder.sub(builder.bitcast(sum_, I32), I32(0x3F000000))
    odd = builder.and_(builder.lshr(size, I32(13)), I32(1))
    lowered = builder.sub(builder.add(size, odd), I32((112 << 23) - 0xFFF))
    normal = builder.lshr(lowered, I32(13))
    payload = builder.and_(builder.lshr(size, I32(13)), I32(0x3FF))
    found = builder.select(builder.icmp_unsigned("<", size, I32(113 << 23)), subnormal, normal)
    # From 65520 on, halfway to what would come after the largest finite number.
    found = builder.select(builder.icmp_unsigned(">=", size, I32(0x477FF000)), I32(0x7C00), found)
    is_nan = builder.icmp_unsigned(">", size, I32(0x7F800000))
    found = builder.select(is_nan, builder.or_(payload, I32(0x7E00)), found)
    sign = builder.and_(builder.lshr(bits, I32(16)), I32(0x8000))
    return builder.trunc(builder.or_(found, sign), I16)


def widen_vector(builder: ir.IRBuilder, value: ir.Value, fmt: str, acc: str) -> ir.Value:
    """A vector of storage format `fmt` in the accumulator's format; exact in every case."""
    if fmt == acc:
        return value
    count = value.type.count
    wide = vector_of(FORMATS[acc][0], count)
    if fmt == "bfloat16":
        bits = builder.zext(value, vector_of(I32, count))
        return builder.bitcast(builder.shl(bits, lane_numbers([16] * count)), wide)
    if converts_by_integers(fmt):
        return widen_by_integers(builder, builder.bitcast(value, vector_of(I16, count)))
    return builder.fpext(value, wide)


@functools.cache
def make_widen(fmt: str, acc: str) -> Any:
    """``widen(element) -> accumulator`` for one storage element; exact."""
    by_integers = converts_by_integers(fmt)

    def emit(context: Any, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        if fmt == acc:
            return value
        if fmt == "bfloat16":
            return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), ir.FloatType())
        if fmt == "float16":
            if by_integers:
                return widen_by_integers(builder, value)
            value = builder.bitcast(value, FORMATS[fmt][0])
        return builder.fpext(value, FORMATS[acc][0])

    key = f"widen({fmt},{acc},{by_integers})"
    return typed_intrinsic(key, CARRIERS[acc], [CARRIERS[fmt]], emit)


@functools.cache
def make_narrow(fmt: str, acc: str) -> Any:
    """``narrow(accumulator) -> element``: the one rounding at the store, to nearest even.

    NaN stays NaN; beyond the largest finite number the result is infinite, as IEEE 754 has it.
    """
    by_integers = converts_by_integers(fmt)

    def emit(context: Any, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        if fmt == acc:
            return value
        if fmt == "bfloat16":
            bits = builder.bitcast(value, I32)
            odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
            rounded = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), odd), I32(16))
            # Rounding the payload of a NaN could carry into the exponent: one NaN for all.
            is_nan = builder.fcmp_unordered("uno", value, value)
            return builder.trunc(builder.select(is_nan, I32(0x7FC0), rounded), I16)
        if by_integers:
            return narrow_by_integers(builder, value)
        narrowed = builder.fptrunc(value, FORMATS[fmt][0])
        return builder.bitcast(narrowed, I16) if fmt == "float16" else narrowed

    key = f"narrow({fmt},{acc},{by_integers})"
    return typed_intrinsic(key, CARRIERS[fmt], [CARRIERS[acc]], emit)


@functools.cache
def make_is_finite() -> Any:
    """``is_finite(x)`` on the bits of a float32 or float64: no compiler may assume it away."""

    def is_finite(typingctx: Any, x: Any) -> Any:
        bits = x.bitwidth
        exponent = 0x7F800000 if bits == 32 else 0x7FF0000000000000

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            integer = ir.IntType(bits)
            masked = builder.and_(builder.bitcast(args[0], integer), integer(exponent))
            return builder.icmp_unsigned("!=", masked, integer(exponent))

        return types.boolean(x), codegen

    made: Any = intrinsic(is_finite)
    made.numfuse_key = "is_finite"
    return made
