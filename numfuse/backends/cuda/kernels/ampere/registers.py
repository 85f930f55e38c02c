"""The values that a thread keeps in registers: local arrays whose elements have constant indices.

Arithmetic on all of them at once, as LLVM instructions: written out in Python, it takes Numba's
compiler a second and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numfuse.backends.cuda.compile.accesses import (
    narrowed,
    put_shared_vector,
    shared_vector,
    widened,
)
from numfuse.backends.cuda.compile.intrinsics import (
    ACCUMULATORS,
    F64,
    FORMATS,
    I32,
    array_pointer,
    named,
    read_registers,
    write_registers,
)
from numfuse.backends.cuda.compile.toolchain import ir, types

#: LLVM values, one for each register.
Values = list[Any]


@functools.cache
def clear(count: int) -> Any:
    """``clear(registers)``: the first `count` elements of a local array are 0."""

    def typing(typingctx: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = array_pointer(context, builder, signature.args[0], args[0])
            zero = ir.Constant(pointer.type.pointee, 0.0)
            write_registers(builder, pointer, 0, [zero] * count)
            return context.get_dummy_value()

        return types.void(registers), codegen

    return named("clear", str(count), 1, typing)


@functools.cache
def add(count: int) -> Any:
    """``add(total, registers)``: total[i] += registers[i] for each i below `count`."""

    def typing(typingctx: Any, total: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to, of = (
                array_pointer(context, builder, kind, array)
                for kind, array in zip(signature.args, args, strict=True)
            )
            for i in range(count):
                (other,) = read_registers(builder, of, i, 1)
                (value,) = read_registers(builder, to, i, 1)
                write_registers(builder, to, i, [builder.fadd(value, other)])
            return context.get_dummy_value()

        return types.void(total, registers), codegen

    return named("add", str(count), 2, typing)


# --- long sums ------------------------------------------------------------------------------------
# A chain of sums ends after `tiling.CHAIN` values of K and is added to those before. Where
# there are no registers for what these make, it waits in shared memory: a thread has 16 bytes there
# after those of the thread before, and again behind those of all.
def _waiting(count: int, size: int, threads: int) -> list[tuple[int, int, int]]:
    """(first register, registers, bytes from a thread's first) of each access."""
    few = 16 // size
    return [(i, min(few, count - i), i // few * threads * 16) for i in range(0, count, few)]


@functools.cache
def keep(count: int, threads: int) -> Any:
    """``keep(total, at)``: the first `count` registers to shared memory, and they become 0."""

    def typing(typingctx: Any, total: Any, at: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            kind = sums.type.pointee
            for first, few, offset in _waiting(count, 8 if kind == F64 else 4, threads):
                values = read_registers(builder, sums, first, few)
                put_shared_vector(builder, builder.add(args[1], I32(offset)), values)
            write_registers(builder, sums, 0, [ir.Constant(kind, 0.0)] * count)
            return context.get_dummy_value()

        return types.void(total, types.int32), codegen

    return named("keep", f"{count},{threads}", 2, typing)


@functools.cache
def add_kept(count: int, threads: int) -> Any:
    """``add_kept(total, at)``: what `keep` put there is added to the registers."""

    def typing(typingctx: Any, total: Any, at: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            kind = sums.type.pointee
            for first, few, offset in _waiting(count, 8 if kind == F64 else 4, threads):
                kept = shared_vector(builder, builder.add(args[1], I32(offset)), kind, few)
                values = read_registers(builder, sums, first, few)
                values = [builder.fadd(x, y) for x, y in zip(kept, values, strict=True)]
                write_registers(builder, sums, first, values)
            return context.get_dummy_value()

        return types.void(total, types.int32), codegen

    return named("add_kept", f"{count},{threads}", 2, typing)


@functools.cache
def words_as(dtype: str, accumulator: str) -> Any:
    """``words_as(w0, w1, w2, w3)``: what 16 bytes hold, widened, as a tuple."""
    kind, size = FORMATS[dtype]
    llvm, numba = ACCUMULATORS[accumulator]
    count = 16 // size

    def typing(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
            for i, word in enumerate(args):
                words = builder.insert_element(words, word, I32(i))
            values = builder.bitcast(words, ir.VectorType(kind, count))
            parts = [builder.extract_element(values, I32(i)) for i in range(count)]
            parts = [widened(builder, part, dtype, llvm) for part in parts]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(numba, count)(*[types.int32] * 4), codegen

    return named("words_as", f"{dtype},{accumulator}", 4, typing)


@functools.cache
def as_words(dtype: str, accumulator: str) -> Any:
    """``as_words(registers)``: a local array, rounded, as the four words of 16 bytes."""
    kind, size = FORMATS[dtype]
    count = 16 // size

    def typing(typingctx: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = array_pointer(context, builder, signature.args[0], args[0])
            packed = ir.Constant(ir.VectorType(kind, count), ir.Undefined)
            for i, value in enumerate(read_registers(builder, pointer, 0, count)):
                packed = builder.insert_element(packed, narrowed(builder, value, dtype), I32(i))
            words = builder.bitcast(packed, ir.VectorType(I32, 4))
            parts = [builder.extract_element(words, I32(i)) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(types.int32, 4)(registers), codegen

    return named("as_words", f"{dtype},{accumulator}", 1, typing)


# --- the arithmetic of a block of warps -----------------------------------------------------------
class Arithmetic(NamedTuple):
    """How a thread multiplies: the intrinsics of a `blocks.Engine` that change registers."""

    #: Registers: sums, and factors of one step.
    totals: int
    factors: int
    #: Of the last step of a slice.
    parts: int
    #: (factors, x, y): the factors of the first step of a slice, from the addresses of its parts.
    first_factors: Any
    #: (totals, factors, x, y): all steps of a slice but the last.
    multiply_slice: Any
    #: (totals, factors, number, x, y): part `number` of the last step; the factors of the next
    #: slice, at x and y, take the place of those that were used.
    multiply_part: Any
    #: (totals, turn, to): the sums of pass `turn` to shared memory.
    put_totals: Any


def arithmetic(
    key: str,
    totals: int,
    factors: int,
    parts: int,
    steps: Sequence[int],
    first: Callable[[Any, Any, Any], Values],
    step: Callable[[Any, Values, Values, int, Any, Any, int], Values],
    passed: Callable[[int], Sequence[tuple[int, int, int]]],
) -> Arithmetic:
    """The intrinsics around `first`, `step` and `passed`, of which `key` tells the difference.

    Parameters
    ----------
    key : str
        All that the functions depend on.
    totals, factors, parts : int
        As in `Arithmetic`; every step has so many parts.
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

    def first_factors(typingctx: Any, registers: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to = array_pointer(context, builder, signature.args[0], args[0])
            write_registers(builder, to, 0, first(builder, args[1], args[2]))
            return context.get_dummy_value()

        return types.void(registers, types.int32, types.int32), codegen

    def on_registers(
        context: Any,
        builder: Any,
        signature: Any,
        args: Any,
        change: Callable[[Values, Values], Values],
    ) -> Any:
        """Change the sums and the factors of a thread."""
        sums = array_pointer(context, builder, signature.args[0], args[0])
        held = array_pointer(context, builder, signature.args[1], args[1])
        total = read_registers(builder, sums, 0, totals)
        now = change(total, read_registers(builder, held, 0, factors))
        write_registers(builder, sums, 0, total)
        write_registers(builder, held, 0, now)
        return context.get_dummy_value()

    def multiply_slice(typingctx: Any, total: Any, now: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def change(total: Values, now: Values) -> Values:
                for k in steps:
                    for part in range(parts):
                        now = step(builder, total, now, part, args[2], args[3], k)
                return now

            return on_registers(context, builder, signature, args, change)

        return types.void(total, now, types.int32, types.int32), codegen

    def multiply_part(typingctx: Any, total: Any, now: Any, number: Any, x: Any, y: Any) -> Any:
        if not isinstance(number, types.IntegerLiteral):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def change(total: Values, now: Values) -> Values:
                return step(builder, total, now, number.literal_value, args[3], args[4], 0)

            return on_registers(context, builder, signature, args, change)

        return types.void(total, now, number, types.int32, types.int32), codegen

    def put_totals(typingctx: Any, total: Any, turn: Any, to: Any) -> Any:
        if not isinstance(turn, types.IntegerLiteral):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = array_pointer(context, builder, signature.args[0], args[0])
            for at, count, offset in passed(turn.literal_value):
                values = read_registers(builder, sums, at, count)
                put_shared_vector(builder, builder.add(args[2], I32(offset)), values)
            return context.get_dummy_value()

        return types.void(total, turn, types.int32), codegen

    return Arithmetic(
        totals,
        factors,
        parts,
        named("first_factors", key, 3, first_factors),
        named("multiply_slice", key, 4, multiply_slice),
        named("multiply_part", key, 5, multiply_part),
        named("put_totals", key, 3, put_totals),
    )
