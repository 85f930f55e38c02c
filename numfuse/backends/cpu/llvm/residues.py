"""Lines of float64 as residues of 8 bits: the sums of squares that scale them, and their bytes.

An integer of a scaled line is cut into pieces of some 15 bits, and a modulus p has it as the sum of
their products with what it leaves of their powers of two, exact in float32: a byte from -p/2 to
p/2. Scales, here, and numbers (`residue_sums`) go by the operations that GPUs have
(`backends.cuda.kernels.residues`), in their order, and so have the same bits.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
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
#: A number below 2^51, plus and minus this, is rounded to the nearest integer; the same of float32.
ROUNDER, ROUNDER_32 = 1.5 * 2.0**52, 1.5 * 2.0**23
#: Chains of a sum of squares, as a GPU's row has threads, and bytes of them and of their largest.
CHAINS = 32
CHAIN_BYTES = 2 * 8 * CHAINS
F64, F32 = ir.DoubleType(), ir.FloatType()
DOUBLES, FLOATS = vector_of(F64, 8), vector_of(F32, 16)
LONGS, WORDS = vector_of(I64, 8), vector_of(I32, 16)


def splat(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def balanced(x: int, p: int) -> int:
    """Return what is left of x modulo p, from -p/2 to p/2."""
    return (x + p // 2) % p - p // 2


def single(x: float) -> float:
    """Return the nearest float32, as llvmlite wants its constants."""
    (found,) = struct.unpack("f", struct.pack("f", x))
    return float(found)


def rounded(b: ir.IRBuilder, x: ir.Value, factor: ir.Value, rounder: float) -> ir.Value:
    """Return x times a factor as the nearest integer."""
    magic = splat(x.type, rounder)
    return b.fsub(multiply_add(b, x, factor, magic), magic)


def _add_square(b: ir.IRBuilder, x: ir.Value, sums: ir.Value, tops: ir.Value) -> None:
    """Add the squares of 8 numbers to sums, and take their sizes where they are the largest."""
    total, top = b.load(sums, align=8), b.load(tops, align=8)
    size = call(b, "llvm.fabs.v8f64", x, result=DOUBLES)
    b.store(multiply_add(b, size, size, total), sums, align=8)
    b.store(b.select(b.fcmp_ordered(">", size, top), size, top), tops, align=8)


@functools.cache
def make_add_squares() -> Any:
    """``add_squares(source, chains)``: take 64 contiguous float64 into a line's sum of squares.

    There are 32 chains, of which each takes every 32nd value: their sums at `chains`, and their
    largest behind these.
    """

    def body(b: ir.IRBuilder, source: ir.Value, chains: ir.Value) -> None:
        for at in range(0, 8 * STEP, LINE):
            place = at % (8 * CHAINS)
            sums, tops = (pointer_to(b, chains, x, DOUBLES) for x in (place, place + 8 * CHAINS))
            _add_square(b, b.load(pointer_to(b, source, at, DOUBLES), align=8), sums, tops)

    return address_intrinsic("add_squares", "float64", 2, body)


@functools.cache
def make_add_squares_across() -> Any:
    """``add_squares_across(source, sums, tops)``: one float64 of each of 32 lines, side by side."""

    def body(b: ir.IRBuilder, source: ir.Value, *to: ir.Value) -> None:
        for at in range(0, 8 * PANEL, LINE):
            places = (pointer_to(b, x, at, DOUBLES) for x in to)
            _add_square(b, b.load(pointer_to(b, source, at, DOUBLES), align=8), *places)

    return address_intrinsic("add_squares_across", "float64", 3, body)


@functools.cache
def make_norm() -> Any:
    """``norm(chains, target)``: the sum of squares and the largest, of chains in their order."""

    def body(b: ir.IRBuilder, chains: ir.Value, target: ir.Value) -> None:
        total = top = F64(0.0)
        for i in range(CHAINS):
            total = b.fadd(total, b.load(pointer_to(b, chains, 8 * i, F64)))
            x = b.load(pointer_to(b, chains, 8 * (CHAINS + i), F64))
            top = b.select(b.fcmp_ordered(">", x, top), x, top)
        for i, x in enumerate((total, top)):
            b.store(x, pointer_to(b, target, 8 * i, F64))

    return address_intrinsic("norm", "float64", 2, body)


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


def _pieces(
    b: ir.IRBuilder, of: Residues, halves: Sequence[tuple[ir.Value, ir.Value, ir.Value]]
) -> list[ir.Value]:
    """Return the pieces of 16 numbers, the lowest first: two vectors, and what these are times."""
    count, bits = pieces(of)
    found = []
    for x, low, high in halves:
        x = call(b, "llvm.rint.v8f64", b.fmul(b.fmul(x, low), high), result=DOUBLES)
        own = []
        for _ in range(count - 1):
            upper = b.fmul(x, splat(DOUBLES, 2.0**-bits))
            upper = call(b, "llvm.rint.v8f64", upper, result=DOUBLES)
            own.append(multiply_add(b, upper, splat(DOUBLES, -(2.0**bits)), x))
            x = upper
        found.append([b.fptrunc(piece, vector_of(F32, 8)) for piece in (*own, x)])
    both = lane_numbers([*range(16)])
    return [b.shuffle_vector(x, y, both) for x, y in zip(*found, strict=True)]


def _residue(b: ir.IRBuilder, of: Residues, cut: Sequence[ir.Value], p: int) -> ir.Value:
    """Return words whose lowest byte is the residue modulo p of numbers that are cut in pieces."""
    _, bits = pieces(of)
    value, *others = cut
    for i, piece in enumerate(others, 1):
        power = splat(FLOATS, float(balanced(1 << bits * i, p)))
        value = multiply_add(b, piece, power, value)
    quotient = rounded(b, value, splat(FLOATS, single(1 / p)), ROUNDER_32)
    rest = multiply_add(b, quotient, splat(FLOATS, float(-p)), value)
    return b.bitcast(b.fadd(rest, splat(FLOATS, ROUNDER_32)), WORDS)


@functools.cache
def make_split(of: Residues) -> Any:
    """``split(source, powers, target, plane)``: residues of 64 contiguous float64.

    They are multiplied by the float64 at `powers` and the one a panel behind it, and rounded. Those
    of modulus t are 64 bytes at ``target + t * plane``.
    """

    def body(b: ir.IRBuilder, source: ir.Value, powers: ir.Value, *to: ir.Value) -> None:
        target, plane = to
        own = [broadcast(b, b.load(pointer_to(b, powers, at, F64)), 8) for at in (0, 8 * PANEL)]
        with cgutils.for_range(b, I64(STEP // 16)) as loop:
            at = b.add(source, b.mul(loop.index, I64(2 * LINE)))
            values = [b.load(pointer_to(b, at, x, DOUBLES), align=8) for x in (0, LINE)]
            cut = _pieces(b, of, [(x, *own) for x in values])
            place = b.add(target, b.mul(loop.index, I64(16)))
            for p in of.moduli:
                narrow = b.trunc(_residue(b, of, cut, p), vector_of(I8, 16))
                b.store(narrow, pointer_to(b, place, 0, narrow.type), align=1)
                place = b.add(place, plane)

    return address_intrinsic("split", str(of.count), 4, body)


@functools.cache
def make_split_across(of: Residues) -> Any:
    """``split_across(source, stride, powers, target, plane)``: residues of 4 values of 16 lines.

    The lines are side by side in memory, as their powers are; values lie `stride` apart. Those of
    modulus t are 64 bytes at ``target + t * plane``, the four of a line side by side.
    """

    def body(b: ir.IRBuilder, source: ir.Value, stride: ir.Value, *rest: ir.Value) -> None:
        powers, target, plane = rest
        scales = [
            [b.load(pointer_to(b, powers, x + y, DOUBLES), align=8) for y in (0, 8 * PANEL)]
            for x in (0, LINE)
        ]
        cuts = []
        for _ in range(4):
            values = [b.load(pointer_to(b, source, x, DOUBLES), align=8) for x in (0, LINE)]
            cuts.append(_pieces(b, of, [(x, *y) for x, y in zip(values, scales, strict=True)]))
            source = b.add(source, stride)
        low = splat(WORDS, 255)
        for p in of.moduli:
            words = _residue(b, of, cuts[0], p)
            words = b.and_(words, low)
            for i, cut in enumerate(cuts[1:], 1):
                byte = b.and_(_residue(b, of, cut, p), low)
                words = b.or_(words, b.shl(byte, splat(WORDS, 8 * i)))
            b.store(words, pointer_to(b, target, 0, WORDS), align=4)
            target = b.add(target, plane)

    return address_intrinsic("split_across", str(of.count), 5, body)
