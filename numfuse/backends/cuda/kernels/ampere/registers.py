"""The values that a thread keeps in registers: local arrays whose elements have constant indices.

Arithmetic on all of them at once, as LLVM instructions: written out in Python, it takes Numba's
compiler a second and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from numfuse.backends.cuda.compile.accesses import (
    narrowed,
    packed,
    read_vector,
    unpacked,
    widened,
    write_vector,
)
from numfuse.backends.cuda.compile.intrinsics import (
    ACCUMULATORS,
    F64,
    FORMATS,
    I32,
    LETTERS,
    intrinsic_of,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.toolchain import ir

#: LLVM values, one for each register.
Values = list[Any]
#: (part, k) of steps.
Turns = Sequence[tuple[int, int]]


def _zeros(builder: Any, at: Any, count: int) -> None:
    kind = at.type.pointee
    zero = ir.Constant(kind, 0 if isinstance(kind, ir.IntType) else 0.0)
    write_registers(builder, at, 0, [zero] * count)


@functools.cache
def clear(count: int) -> Any:
    """``clear(registers)``: the first `count` elements of a local array are 0."""
    return intrinsic_of("clear", str(count), "a", lambda builder, at: _zeros(builder, at, count))


@functools.cache
def add(count: int) -> Any:
    """``add(total, registers)``: total[i] += registers[i] for each i below `count`."""

    def emit(builder: Any, to: Any, of: Any) -> None:
        for i in range(count):
            (other,) = read_registers(builder, of, i, 1)
            (value,) = read_registers(builder, to, i, 1)
            write_registers(builder, to, i, [builder.fadd(value, other)])

    return intrinsic_of("add", str(count), "aa", emit)


# --- long sums ------------------------------------------------------------------------------------
# A chain of sums ends after `tiling.CHAIN` values of K and is added to those before. Where
# there are no registers for what these make, it waits in shared memory: a thread has 16 bytes there
# after those of the thread before, and again behind those of all.
def _waiting(sums: Any, count: int, threads: int) -> list[tuple[int, int, int]]:
    """(first register, registers, bytes from a thread's first) of each access."""
    few = 2 if sums.type.pointee == F64 else 4
    return [(i, min(few, count - i), i // few * threads * 16) for i in range(0, count, few)]


@functools.cache
def keep(count: int, threads: int) -> Any:
    """``keep(total, at)``: the first `count` registers to shared memory, and they become 0."""

    def emit(builder: Any, sums: Any, at: Any) -> None:
        for first, few, offset in _waiting(sums, count, threads):
            values = read_registers(builder, sums, first, few)
            write_vector(builder, at, offset, values)
        _zeros(builder, sums, count)

    return intrinsic_of("keep", f"{count},{threads}", "ar", emit)


@functools.cache
def add_kept(count: int, threads: int) -> Any:
    """``add_kept(total, at)``: what `keep` put there is added to the registers."""

    def emit(builder: Any, sums: Any, at: Any) -> None:
        kind = sums.type.pointee
        for first, few, offset in _waiting(sums, count, threads):
            kept = read_vector(builder, at, offset, kind, few)
            values = read_registers(builder, sums, first, few)
            values = [builder.fadd(x, y) for x, y in zip(kept, values, strict=True)]
            write_registers(builder, sums, first, values)

    return intrinsic_of("add_kept", f"{count},{threads}", "ar", emit)


@functools.cache
def words_as(dtype: str, accumulator: str) -> Any:
    """``words_as(w0, w1, w2, w3)``: what 16 bytes hold, widened, as a tuple."""
    kind, size = FORMATS[dtype]
    letter, count = ACCUMULATORS[accumulator], 16 // size

    def emit(builder: Any, *words: Any) -> Values:
        values = builder.bitcast(packed(builder, list(words)), ir.VectorType(kind, count))
        parts = unpacked(builder, values, count)
        return [widened(builder, part, dtype, LETTERS[letter][0]) for part in parts]

    return intrinsic_of("words_as", f"{dtype},{accumulator}", "rrrr", emit, letter * count)


@functools.cache
def as_words(dtype: str, accumulator: str) -> Any:
    """``as_words(registers)``: a local array, rounded, as the four words of 16 bytes."""
    count = 16 // FORMATS[dtype][1]

    def emit(builder: Any, pointer: Any) -> Values:
        values = read_registers(builder, pointer, 0, count)
        values = [narrowed(builder, value, dtype) for value in values]
        words = builder.bitcast(packed(builder, values), ir.VectorType(I32, 4))
        return unpacked(builder, words, 4)

    return intrinsic_of("as_words", f"{dtype},{accumulator}", "a", emit, "rrrr")


# --- the arithmetic of a block of warps -----------------------------------------------------------
def arithmetic(
    key: str,
    totals: int,
    factors: int,
    parts: int,
    steps: Sequence[int],
    first: Callable[[Any, Any, Any], Values],
    step: Callable[[Any, Values, Values, int, Any, Any, int], Values],
    passed: Callable[[int], Sequence[tuple[int, int, int]]],
) -> dict[str, Any]:
    """How a thread multiplies, as bindings of `gemm`: the numbers of registers, and intrinsics.

    - FIRST_FACTORS(factors, x, y): the factors of the first step of a slice, from the addresses of
      its parts
    - MULTIPLY_SLICE(totals, factors, x, y): all steps of a slice but the last
    - MULTIPLY_PART(totals, factors, number, x, y): part `number` of the last step; the factors of
      the next slice, at x and y, take the place of those that were used
    - PUT_TOTALS(totals, turn, to): the sums of pass `turn` to shared memory

    Parameters
    ----------
    key : str
        All that the functions depend on.
    totals, factors, parts : int
        Registers of the sums and of the factors of one step; every step has so many parts.
    steps : sequence of int
        The values of k that follow those of the first step of a slice.
    first : callable
        (builder, x, y) -> the factors of the first step.
    step : callable
        (builder, totals, factors, part, x, y, k) -> the factors after part `part` of a step, of
        which the successor begins at `k` of x and y. It replaces elements of `totals`.
    passed : callable
        (turn) -> (first of the sums, how many, byte in the thread's rows) of each store of a pass.
    """

    def first_factors(builder: Any, to: Any, x: Any, y: Any) -> None:
        write_registers(builder, to, 0, first(builder, x, y))

    def multiply(builder: Any, sums: Any, held: Any, x: Any, y: Any, turns: Turns) -> None:
        """Take (part, k) one after the other."""
        total = read_registers(builder, sums, 0, totals)
        now = read_registers(builder, held, 0, factors)
        for part, k in turns:
            now = step(builder, total, now, part, x, y, k)
        write_registers(builder, sums, 0, total)
        write_registers(builder, held, 0, now)

    def multiply_slice(builder: Any, total: Any, now: Any, x: Any, y: Any) -> None:
        multiply(builder, total, now, x, y, [(part, k) for k in steps for part in range(parts)])

    def multiply_part(builder: Any, total: Any, now: Any, number: int, x: Any, y: Any) -> None:
        multiply(builder, total, now, x, y, [(number, 0)])

    def put_totals(builder: Any, sums: Any, turn: int, to: Any) -> None:
        for at, count, offset in passed(turn):
            values = read_registers(builder, sums, at, count)
            write_vector(builder, to, offset, values)

    return {
        "TOTALS": totals,
        "FACTORS": factors,
        "PARTS": parts,
        "FIRST_FACTORS": intrinsic_of("first_factors", key, "arr", first_factors),
        "MULTIPLY_SLICE": intrinsic_of("multiply_slice", key, "aarr", multiply_slice),
        "MULTIPLY_PART": intrinsic_of("multiply_part", key, "aanrr", multiply_part),
        "PUT_TOTALS": intrinsic_of("put_totals", key, "anr", put_totals),
    }
