"""LLVM vectors and pointers, and intrinsics made of them.

All `make_` functions of this folder build an intrinsic whose arguments are ``int64``: addresses,
byte strides and counts.  They trust their caller: every address is valid for the extent that its
docstring names.  The results carry ``numfuse_key``, the identity that `numfuse.runtime.specialise`
hashes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
VOID = ir.VoidType()


#: LLVM type and bytes of an element, by storage format.  bfloat16 travels as its 16 bits: a
#: shift widens it exactly, and no instruction set before AVX512-BF16 knows the type.
FORMATS: dict[str, tuple[ir.Type, int]] = {
    "float64": (ir.DoubleType(), 8),
    "float32": (ir.FloatType(), 4),
    "float16": (ir.HalfType(), 2),
    "bfloat16": (I16, 2),
}


#: Two neighbours of K as one element, as packing for dot products and tiles moves them.
FORMATS["pair"] = (I32, 4)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks; only on hosts whose processor has it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()


@functools.cache
def itemsize(fmt: str) -> int:
    return FORMATS[fmt][1]


def vector_of(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


def lane_numbers(values: list[int]) -> ir.Constant:
    return ir.Constant(vector_of(I32, len(values)), values)


def pointer_to(builder: ir.IRBuilder, address: ir.Value, offset: Any, ty: ir.Type) -> ir.Value:
    """``address + offset`` (bytes) as a pointer to `ty`."""
    if not isinstance(offset, ir.Value):
        offset = I64(offset)
    return builder.inttoptr(builder.add(address, offset), ty.as_pointer())


def broadcast(builder: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    """Broadcast a scalar to all lanes (one broadcasting load, once LLVM has folded it)."""
    ty = vector_of(scalar.type, count)
    one = builder.insert_element(ir.Constant(ty, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, lane_numbers([0] * count))


def typed_intrinsic(
    key: str, result: Any, arguments: Sequence[Any], emit: Callable[..., Any]
) -> Any:
    """Return an intrinsic of these types, whose name begins `key`.

    `emit(context, builder, *args)` emits it and returns its value, or None where `result` is void.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = emit(context, builder, *args)
        return context.get_dummy_value() if result is types.void else value

    def typing(typingctx: Any, *args: Any) -> Any:
        return result(*arguments), codegen

    typing.__name__ = key.partition("(")[0].partition(" ")[0]
    # Numba folds the arguments of a call by the signature, and cannot fold into *args.
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["typingctx", *(f"arg{i}" for i in range(len(arguments)))]
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, kind) for n in names]
    )
    made: Any = intrinsic(typing)
    made.numfuse_key = key
    return made


def address_intrinsic(name: str, key: str, nargs: int, body: Callable[..., None]) -> Any:
    """An intrinsic of `nargs` int64 and no result; `body(builder, *args)` emits it."""

    def emit(context: Any, builder: ir.IRBuilder, *args: ir.Value) -> None:
        body(builder, *args)

    return typed_intrinsic(f"{name}({key})", types.void, [types.int64] * nargs, emit)


def call(builder: ir.IRBuilder, name: str, *args: ir.Value, result: ir.Type = VOID) -> ir.Value:
    """Call the function of LLVM's own, or of the processor's, that has this name."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


_LETTERS = {ir.DoubleType(): "f64", ir.FloatType(): "f32", ir.HalfType(): "f16"}
_LETTERS |= {I16: "i16", I32: "i32"}


def called(ty: ir.Type) -> str:
    """Return what LLVM calls a number or vectors of a type in the names of its functions."""
    if isinstance(ty, ir.VectorType):
        return f"v{ty.count}{_LETTERS[ty.element]}"
    return _LETTERS[ty]


def stack(builder: ir.IRBuilder, size: int) -> ir.Value:
    """Return a pointer to `size` bytes on the stack, at a line, not cleared."""
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(I8, size))
    place.align = 64
    return place


def hold(builder: ir.IRBuilder, vector_bytes: int, sums: list[ir.Value]) -> None:
    """Let no sum be anywhere but in a register here, where sixteen are just enough for a tile.

    LLVM otherwise mixes the updates of an unrolled loop, and keeps what then has no register in
    memory: 1.4 of 6 x 2 sums a rank-1 update, at 0.45 of the speed (Zen 3). No instruction is made.
    """
    if vector_bytes == 32:
        kind = ir.FunctionType(ir.VoidType(), [x.type for x in sums])
        builder.asm(kind, "", ",".join("x" * len(sums)), sums, True)


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, sums: ir.Value) -> ir.Value:
    return call(builder, f"llvm.fma.{called(sums.type)}", a, b, sums, result=sums.type)


def masked_load(builder: ir.IRBuilder, pointer: ir.Value, live: ir.Value, bytes_: int) -> ir.Value:
    """Lanes ``< live`` (an int64) from memory, zero elsewhere; other lanes are not touched."""
    ty = pointer.type.pointee
    lane = ir.Constant(vector_of(I64, ty.count), list(range(ty.count)))
    mask = builder.icmp_signed("<", lane, broadcast(builder, live, ty.count))
    zero = ir.Constant(ty, None)
    name = f"llvm.masked.load.{called(ty)}.p0"
    return call(builder, name, pointer, I32(bytes_), mask, zero, result=ty)


def prefetch(builder: ir.IRBuilder, address: ir.Value, level: int = 2) -> None:
    """Ask for the line at an address, for reading, into a level of the cache.

    Mostly level 2: level 1 has no room beside the panel of A and the stream of B.
    """
    place = builder.inttoptr(address, I8.as_pointer())
    call(builder, "llvm.prefetch.p0", place, I32(0), I32(4 - level), I32(1))


def insert_part(builder: ir.IRBuilder, whole: ir.Value, part: ir.Value, at: int) -> ir.Value:
    """`whole` with its lanes from `at` on replaced by `part`: one insertion, from memory too."""
    if whole.type == part.type:
        return part
    name = f"llvm.vector.insert.{called(whole.type)}.{called(part.type)}"
    return call(builder, name, whole, part, I64(at), result=whole.type)


@functools.cache
def make_group_sum(fmt: str, vector_bytes: int, count: int) -> Any:
    """``group_sum(address)``: the sum of `count` contiguous values, in a tree.

    Whole vectors are added in pairs, a last one of an odd number to the sum, then halves of lanes.
    """
    element, size = FORMATS[fmt]
    lanes = vector_bytes // size

    def emit(context: Any, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        ty = vector_of(element, lanes)
        parts = []
        for i in range(count // lanes):
            pointer = pointer_to(builder, address, i * vector_bytes, ty)
            parts.append(builder.load(pointer, align=size))
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [*(builder.fadd(*pair) for pair in pairs), *parts[len(parts) // 2 * 2 :]]
        (total,) = parts
        half = lanes // 2
        while half:
            low, high = (lane_numbers([*range(i, i + half)]) for i in (0, half))
            total = builder.fadd(*(builder.shuffle_vector(total, total, x) for x in (low, high)))
            half //= 2
        return builder.extract_element(total, I32(0))

    number = types.float64 if fmt == "float64" else types.float32
    return typed_intrinsic(
        f"group_sum({fmt}, {vector_bytes}, {count})", number, [types.int64], emit
    )


def transpose_lanes(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Columns of the square block in each 128-bit lane of `rows` (as many as a lane has values)."""
    e, vl = len(rows), rows[0].type.count

    def lanes(pattern: list[int]) -> ir.Constant:
        # pattern: of e + e values of two lanes, as for a vector of one lane.
        return lane_numbers(
            [lane + (x if x < e else x - e + vl) for lane in range(0, vl, e) for x in pattern]
        )

    if e == 2:
        one, two = rows
        return [builder.shuffle_vector(one, two, lanes(p)) for p in ([0, 2], [1, 3])]
    low, high = lanes([0, 4, 1, 5]), lanes([2, 6, 3, 7])
    pairs = [
        builder.shuffle_vector(rows[x], rows[x + 1], pattern)
        for pattern in (low, high)
        for x in (0, 2)
    ]
    return [
        builder.shuffle_vector(pairs[x], pairs[x + 1], lanes(pattern))
        for x in (0, 2)
        for pattern in ([0, 1, 4, 5], [2, 3, 6, 7])
    ]
