"""Loads, stores and asynchronous copies by their address, of values and of vectors.

`load` and `store` are LLVM's own vector accesses, which become the line that their docstring names
and which the compiler may move; the others are a line of PTX each (`intrinsics`).
"""

# A call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, arg-type"
from __future__ import annotations

import functools
from typing import Any

from numfuse.backends.cuda.compile.intrinsics import (
    ACCUMULATORS,
    F32,
    F64,
    FORMATS,
    GLOBAL,
    I16,
    I32,
    SHARED,
    array_pointer,
    emit,
    instruction,
    named,
    read_registers,
    to_bfloat16,
)
from numfuse.backends.cuda.compile.toolchain import ir, types


# --- loads and stores of LLVM ---------------------------------------------------------------------
def _vector_pointer(builder: Any, address: Any, kind: Any, count: int, space: int) -> Any:
    ty = kind if count == 1 else ir.VectorType(kind, count)
    if space == SHARED:
        address = builder.trunc(address, I32) if address.type.width > 32 else address
    return builder.inttoptr(address, ty.as_pointer(space))


def widened(builder: Any, value: Any, dtype: str, accumulator: Any) -> Any:
    """A scalar in storage format `dtype` as an accumulator; exact."""
    if dtype == "bits":
        return builder.zext(value, I32)
    if dtype == "bfloat16":
        bits = builder.shl(builder.zext(value, I32), I32(16))
        value = builder.bitcast(bits, F32)
    return value if value.type == accumulator else builder.fpext(value, accumulator)


def narrowed(builder: Any, value: Any, dtype: str) -> Any:
    """An accumulator rounded to storage format `dtype`: to nearest, ties to even."""
    kind = FORMATS[dtype][0]
    if dtype == "bits":
        return builder.trunc(value, I16)
    if dtype == "bfloat16":
        return to_bfloat16(builder, value)
    return value if value.type == kind else builder.fptrunc(value, kind)


def packed(builder: Any, values: list[Any]) -> Any:
    """Values as a vector; one alone as it is."""
    if len(values) == 1:
        return values[0]
    made = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        made = builder.insert_element(made, value, I32(i))
    return made


def unpacked(builder: Any, vector: Any, count: int) -> list[Any]:
    """The `count` values of a vector."""
    return (
        [builder.extract_element(vector, I32(i)) for i in range(count)] if count > 1 else [vector]
    )


def shared_vector(builder: Any, address: Any, kind: Any, count: int) -> list[Any]:
    """ld.shared.v2, .v4 (9.7.9.8): neighbours in shared memory, as scalars."""
    pointer = _vector_pointer(builder, address, kind, count, SHARED)
    value = builder.load(pointer)
    value.align = count * (8 if kind == F64 else 4)
    return unpacked(builder, value, count)


def put_shared_vector(builder: Any, address: Any, values: list[Any]) -> None:
    """st.shared.v2, .v4 (9.7.9.11)."""
    kind, count = values[0].type, len(values)
    pointer = _vector_pointer(builder, address, kind, count, SHARED)
    builder.store(packed(builder, values), pointer).align = count * (8 if kind == F64 else 4)


def _key(*parts: Any) -> str:
    return ",".join(map(str, parts))


@functools.cache
def load(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``load(address)``: `count` neighbours, widened, as a tuple (a scalar where it is one).

    ld.global or ld.shared, .v2, .v4 (9.7.9.8).
    """
    kind, size = FORMATS[dtype]
    llvm, numba = ACCUMULATORS[accumulator]

    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_vector_pointer(builder, args[0], kind, count, space))
            value.align = size * count
            parts = unpacked(builder, value, count)
            parts = [widened(builder, part, dtype, llvm) for part in parts]
            if count == 1:
                return parts[0]
            return context.make_tuple(builder, signature.return_type, parts)

        returned = numba if count == 1 else types.UniTuple(numba, count)
        return returned(types.int64), codegen

    return named("load", _key(dtype, count, accumulator, space), 1, typing)


def _stored(
    builder: Any, address: Any, values: list[Any], dtype: str, count: int, space: int
) -> None:
    kind, size = FORMATS[dtype]
    parts = [narrowed(builder, value, dtype) for value in values]
    pointer = _vector_pointer(builder, address, kind, count, space)
    builder.store(packed(builder, parts), pointer).align = size * count


@functools.cache
def store(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, values...)``: `count` neighbours, rounded.

    st.global or st.shared, .v2, .v4 (9.7.9.11).
    """
    _, numba = ACCUMULATORS[accumulator]

    def typing(typingctx: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _stored(builder, values[0], values[1:], dtype, count, space)
            return context.get_dummy_value()

        return types.void(types.int64, *[numba] * count), codegen

    return named("store", _key(dtype, count, accumulator, space), 1 + count, typing)


@functools.cache
def store_array(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, registers)``: the first `count` elements of a local array, as `store`."""

    def typing(typingctx: Any, address: Any, registers: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = array_pointer(context, builder, signature.args[1], args[1])
            _stored(
                builder, args[0], read_registers(builder, pointer, 0, count), dtype, count, space
            )
            return context.get_dummy_value()

        return types.void(types.int64, registers), codegen

    return named("store_array", _key(dtype, count, accumulator, space), 2, typing)


@functools.cache
def load_cluster(count: int, accumulator: str, blocks: int) -> Any:
    """``load(address)``: `count` neighbours in shared memory, each the sum over the cluster.

    Those of all blocks of a cluster, in the order of their ranks: mapa (9.7.9.23) and
    ld.shared::cluster (9.7.9.8).
    """
    llvm, numba = ACCUMULATORS[accumulator]
    letter, size = ("d", 64) if llvm == F64 else ("f", 32)
    names = ", ".join(f"${i}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    results = f"{{{names}}}" if count > 1 else names
    text = f"ld.shared::cluster{vector}.f{size} {results}, [${count}];"

    def typing(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own = builder.trunc(args[0], I32) if args[0].type.width > 32 else args[0]
            found = []
            for rank in range(blocks):
                at = emit(
                    builder, "mapa.shared::cluster.u32 $0, $1, $2;", "r", "rr", [own, I32(rank)]
                )
                values = emit(builder, text, letter * count, "r", [at], "memory")
                found.append([values] if count == 1 else values)
            total = found[0]
            for values in found[1:]:
                total = [builder.fadd(a, b) for a, b in zip(total, values, strict=True)]
            if count == 1:
                return total[0]
            return context.make_tuple(builder, signature.return_type, total)

        returned = numba if count == 1 else types.UniTuple(numba, count)
        return returned(types.int64), codegen

    return named("load_cluster", _key(count, accumulator, blocks), 1, typing)


#: 9.7.9.8, ld; 9.7.9.11, st; 9.7.9.1, cache operators: 16 bytes that are read, or written, once
load_words = instruction("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "l")
store_words = instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr")

# --- masked loads and stores ----------------------------------------------------------------------
#: 9.7.9.8, ld; 9.7.9.9, ld.global.nc; 9.7.9.11, st: by space and width; where the predicate of a
#: global access does not hold, 0 is read and nothing is written
shared_load16 = instruction("{ .reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t; }", "r", "r")
shared_store32 = instruction("st.shared.b32 [$0], $1;", "", "rr")
shared_load4_b32 = instruction("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "r")
shared_load_f32 = instruction("ld.shared.f32 $0, [$1];", "f", "r")
shared_load2_f32 = instruction("ld.shared.v2.f32 {$0, $1}, [$2];", "ff", "r")
shared_store_f32 = instruction("st.shared.f32 [$0], $1;", "", "rf")
global_load16 = instruction(
    "{ .reg .pred p; .reg .b16 t; setp.ne.b32 p, $2, 0; mov.b16 t, 0;"
    " @p ld.global.nc.b16 t, [$1]; cvt.u32.u16 $0, t; }",
    "r",
    "lp",
)
global_store16 = instruction(
    "{ .reg .pred p; .reg .b16 t; cvt.u16.u32 t, $1; setp.ne.b32 p, $2, 0;"
    " @p st.global.b16 [$0], t; }",
    "",
    "lrp",
)


def _masked_load(count: int) -> Any:
    """So many neighbours of float32."""
    names = [f"${i}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    to, vector = (f"{{{', '.join(names)}}}", f".v{count}") if count > 1 else (names[0], "")
    return instruction(
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros}"
        f" @p ld.global.nc{vector}.f32 {to}, [${count}]; }}",
        "f" * count,
        "lp",
    )


def _masked_store(count: int, kind: str, letter: str) -> Any:
    names = [f"${i + 1}" for i in range(count)]
    of, vector = (f"{{{', '.join(names)}}}", f".v{count}") if count > 1 else (names[0], "")
    return instruction(
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0;"
        f" @p st.global{vector}.{kind} [$0], {of}; }}",
        "",
        f"l{letter * count}p",
    )


global_load_f32, global_load2_f32, global_load4_f32 = (_masked_load(n) for n in (1, 2, 4))
global_store_f32, global_store2_f32 = (_masked_store(n, "f32", "f") for n in (1, 2))
global_store32, global_store4_b32 = (_masked_store(n, "b32", "r") for n in (1, 4))
#: 9.7.9.15, prefetch: the line of 128 bytes around an address is brought to the second-level cache
prefetch = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }", "", "lp"
)


# --- copies to shared memory, not waited for ------------------------------------------------------
@functools.cache
def fetch(bytes_: int, partial: bool = False, ahead: str = ".L2::128B") -> Any:
    """``copy(shared, address)``: 4, 8 or 16 bytes to shared memory without a register between.

    cp.async (9.7.9.25.3.1); `partial`: ``copy(shared, address, count)``, of which the first `count`
    bytes are read and the others are zero (none is read where it is 0). 16 bytes go past level 1;
    `ahead` is what the second-level cache takes with them.
    """
    cache = "cg" if bytes_ == 16 else "ca"
    text = f"cp.async.{cache}.shared.global{ahead} [$0], [$1], {bytes_}"
    return instruction(text + (", $2;" if partial else ";"), "", "rlr" if partial else "rl")


@functools.cache
def fetch_wait(pending: int) -> Any:
    """cp.async.wait_group (9.7.9.25.3.3): at most so many of the latest groups are on their way."""
    return instruction(f"cp.async.wait_group {pending};")


#: 9.7.9.25.3.2, cp.async.commit_group: closes the group of this thread's copies
fetch_commit = instruction("cp.async.commit_group;")
fetch16 = fetch(16, partial=True, ahead="")
fetch_wait0, fetch_wait1 = fetch_wait(0), fetch_wait(1)
