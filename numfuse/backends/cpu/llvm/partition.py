"""Splitting float32 into parts of bfloat16, and storing each part where tiles read it.

A part is the number of 8 significant bits that is nearest to what the parts before left (halves
away from zero), so two parts keep 16 bits and three all 24; each subtraction is exact.  Numbers
above the largest bfloat16 are cut instead of rounded, so that none becomes an infinity.  The first
part of an infinity or a NaN is itself; the others are then without meaning, and `splits` drops the
products that they enter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from numfuse.backends.cpu.llvm.vectors import (
    I16,
    I32,
    I64,
    address_intrinsic,
    lane_numbers,
    masked_load,
    pointer_to,
    vector_of,
)

_LANES = 16
_FLOATS, _WORDS = vector_of(ir.FloatType(), _LANES), vector_of(I32, _LANES)
#: The bits of a float32 that a bfloat16 has, half of its last bit, and all but the sign.
_HIGH, _HALF, _SIZE = 0xFFFF0000, 0x8000, 0x7FFFFFFF
#: From these bits on rounding would give an infinity, or make a NaN another number.
_TOP = 0x7F7F8000
_QUIET = 0x00400000


def _all(bits: int) -> ir.Constant:
    return ir.Constant(_WORDS, [bits] * _LANES)


def _parts(builder: ir.IRBuilder, x: ir.Value, count: int) -> list[ir.Value]:
    """Return the parts of 16 numbers, as the upper halves of words; the lower have no meaning."""
    bits = builder.bitcast(x, _WORDS)
    top = builder.icmp_unsigned(">=", builder.and_(bits, _all(_SIZE)), _all(_TOP))
    rounded = builder.select(top, bits, builder.add(bits, _all(_HALF)))
    # A NaN whose bits are all in the half that is cut off would become an infinity.
    nan = builder.fcmp_unordered("uno", x, x)
    found = [builder.select(nan, builder.or_(rounded, _all(_QUIET)), rounded)]
    for number in range(1, count):
        before = builder.bitcast(builder.and_(found[-1], _all(_HIGH)), _FLOATS)
        x = builder.fsub(x, before)
        bits = builder.bitcast(x, _WORDS)
        # Three parts leave nothing behind the last: 8 bits are what it has.
        exact = number == 2
        found.append(bits if exact else builder.add(bits, _all(_HALF)))
    return found


def _loaded(builder: ir.IRBuilder, address: ir.Value, offset: int, live: ir.Value) -> ir.Value:
    return masked_load(builder, pointer_to(builder, address, offset, _FLOATS), live, 4)


def _stored(
    builder: ir.IRBuilder, parts: list[ir.Value], target: ir.Value, plane: ir.Value
) -> None:
    for part in parts:
        builder.store(part, pointer_to(builder, target, 0, part.type), align=4)
        target = builder.add(target, plane)


def _either(
    builder: ir.IRBuilder, whole: ir.Value, emit: Callable[[Callable[..., ir.Value]], None]
) -> None:
    """Emit code twice: for vectors that are there whole, and for those that have to be masked."""

    def plain(address: ir.Value, offset: int, live: ir.Value) -> ir.Value:
        return builder.load(pointer_to(builder, address, offset, _FLOATS), align=4)

    def masked(address: ir.Value, offset: int, live: ir.Value) -> ir.Value:
        return _loaded(builder, address, offset, live)

    with builder.if_else(whole) as (full, part):
        with full:
            emit(plain)
        with part:
            emit(masked)


@functools.cache
def make_split_tile(count: int) -> Any:
    """``split_tile(source, live, target, plane)``: the parts of 32 values of a row of A.

    Part q is 32 bfloat16 at ``target + q * plane``; values from `live` on are zeros and not read.
    """
    upper = lane_numbers([2 * lane + 1 for lane in range(2 * _LANES)])

    def body(builder: ir.IRBuilder, *args: ir.Value) -> None:
        source, live, target, plane = args

        def emit(load: Callable[..., ir.Value]) -> None:
            low = _parts(builder, load(source, 0, live), count)
            rest = builder.sub(live, I64(_LANES))
            high = _parts(builder, load(source, 4 * _LANES, rest), count)
            halves = vector_of(I16, 2 * _LANES)
            rows = [
                builder.shuffle_vector(
                    builder.bitcast(one, halves), builder.bitcast(two, halves), upper
                )
                for one, two in zip(low, high, strict=True)
            ]
            _stored(builder, rows, target, plane)

        _either(builder, builder.icmp_signed(">=", live, I64(2 * _LANES)), emit)

    return address_intrinsic("split_tile", str(count), 4, body)


@functools.cache
def make_split_pair(count: int) -> Any:
    """``split_pair(first, second, live, live_2, target, plane)``: the parts of two rows of B.

    Part q is 16 pairs (of a value of either row) at ``target + q * plane``; values of a row from
    `live` (`live_2`) on are zeros and not read.
    """

    def body(builder: ir.IRBuilder, *args: ir.Value) -> None:
        first, second, live, live_2, target, plane = args

        def emit(load: Callable[..., ir.Value]) -> None:
            low = _parts(builder, load(first, 0, live), count)
            high = _parts(builder, load(second, 0, live_2), count)
            rows = [
                builder.or_(builder.lshr(one, _all(16)), builder.and_(two, _all(_HIGH)))
                for one, two in zip(low, high, strict=True)
            ]
            _stored(builder, rows, target, plane)

        # (live_2 is never more than live)
        _either(builder, builder.icmp_signed(">=", live_2, I64(_LANES)), emit)

    return address_intrinsic("split_pair", str(count), 6, body)
