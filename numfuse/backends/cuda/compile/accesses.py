"""Loads, stores and asynchronous copies by their address, of values and of vectors.

`load` and `store` are LLVM's own vector accesses, which become the line that their docstring names
and which the compiler may move; the others are a line of PTX each (`intrinsics`).
"""

from __future__ import annotations

import functools
from typing import Any

from numfuse.backends.cuda.compile.intrinsics import (
    ACCUMULATORS,
    F32,
    FORMATS,
    GLOBAL,
    I8,
    I16,
    I32,
    LETTERS,
    SHARED,
    emit,
    instruction,
    intrinsic_of,
    read_registers,
    to_bfloat16,
)
from numfuse.backends.cuda.compile.toolchain import ir

# --- loads and stores of LLVM ---------------------------------------------------------------------
#: {name of an LLVM type: bytes}
SIZES = {str(kind): size for kind, size in FORMATS.values()} | {str(I32): 4, str(I8): 1}


def _vector_pointer(
    builder: Any, address: Any, offset: int, kind: Any, count: int, space: int
) -> Any:
    ty = kind if count == 1 else ir.VectorType(kind, count)
    if offset:
        address = builder.add(address, I32(offset))
    if space == SHARED:
        address = builder.trunc(address, I32)
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
    if count == 1:
        return [vector]
    return [builder.extract_element(vector, I32(i)) for i in range(count)]


def read_vector(
    builder: Any, address: Any, offset: int, kind: Any, count: int, space: int = SHARED
) -> list[Any]:
    """ld.shared or .global, .v2, .v4 (9.7.9.8): `count` neighbours, as scalars."""
    value = builder.load(_vector_pointer(builder, address, offset, kind, count, space))
    value.align = SIZES[str(kind)] * count
    return unpacked(builder, value, count)


def write_vector(
    builder: Any, address: Any, offset: int, values: list[Any], space: int = SHARED
) -> None:
    """st.shared or .global, .v2, .v4 (9.7.9.11)."""
    kind, count = values[0].type, len(values)
    pointer = _vector_pointer(builder, address, offset, kind, count, space)
    builder.store(packed(builder, values), pointer).align = SIZES[str(kind)] * count


def _key(*parts: Any) -> str:
    return ",".join(map(str, parts))


@functools.cache
def load(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``load(address)``: `count` neighbours, widened, as a tuple (a scalar where it is one).

    ld.global or ld.shared, .v2, .v4 (9.7.9.8).
    """
    letter = ACCUMULATORS[accumulator]

    def body(builder: Any, address: Any) -> list[Any]:
        parts = read_vector(builder, address, 0, FORMATS[dtype][0], count, space)
        return [widened(builder, part, dtype, LETTERS[letter][0]) for part in parts]

    return intrinsic_of("load", _key(dtype, count, accumulator, space), "l", body, letter * count)


@functools.cache
def load_repeated(dtype: str, count: int, accumulator: str) -> Any:
    """``load(address)``: one element, widened, as a tuple of `count` equal values."""
    letter = ACCUMULATORS[accumulator]

    def body(builder: Any, address: Any) -> list[Any]:
        (part,) = read_vector(builder, address, 0, FORMATS[dtype][0], 1, GLOBAL)
        return [widened(builder, part, dtype, LETTERS[letter][0])] * count

    key = _key(dtype, count, accumulator)
    return intrinsic_of("load_repeated", key, "l", body, letter * count)


def _stored(builder: Any, address: Any, values: list[Any], dtype: str, space: int) -> None:
    parts = [narrowed(builder, value, dtype) for value in values]
    write_vector(builder, address, 0, parts, space)


@functools.cache
def store(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, values...)``: `count` neighbours, rounded.

    st.global or st.shared, .v2, .v4 (9.7.9.11).
    """

    def body(builder: Any, address: Any, *values: Any) -> None:
        _stored(builder, address, list(values), dtype, space)

    key = _key(dtype, count, accumulator, space)
    return intrinsic_of("store", key, "l" + ACCUMULATORS[accumulator] * count, body)


@functools.cache
def store_array(dtype: str, count: int, accumulator: str, space: int = GLOBAL) -> Any:
    """``store(address, registers)``: the first `count` elements of a local array, as `store`."""

    def body(builder: Any, address: Any, pointer: Any) -> None:
        _stored(builder, address, read_registers(builder, pointer, 0, count), dtype, space)

    return intrinsic_of("store_array", _key(dtype, count, accumulator, space), "la", body)


@functools.cache
def load_cluster(count: int, accumulator: str, blocks: int) -> Any:
    """``load(address)``: `count` neighbours in shared memory, each the sum over the cluster.

    Those of all blocks of a cluster, in the order of their ranks: mapa (9.7.9.23) and
    ld.shared::cluster (9.7.9.8).
    """
    letter = ACCUMULATORS[accumulator]
    names = ", ".join(f"${i}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    results = f"{{{names}}}" if count > 1 else names
    size = 64 if letter == "d" else 32
    text = f"ld.shared::cluster{vector}.f{size} {results}, [${count}];"

    def body(builder: Any, address: Any) -> list[Any]:
        own = builder.trunc(address, I32)
        found = []
        for rank in range(blocks):
            at = emit(builder, "mapa.shared::cluster.u32 $0, $1, $2;", "r", "rr", [own, I32(rank)])
            values = emit(builder, text, letter * count, "r", [at], "memory")
            found.append([values] if count == 1 else values)
        total, *others = found
        for values in others:
            total = [builder.fadd(a, b) for a, b in zip(total, values, strict=True)]
        return total

    return intrinsic_of("load_cluster", _key(count, accumulator, blocks), "l", body, letter * count)


#: 9.7.9.8, ld; 9.7.9.11, st; 9.7.9.1, cache operators: 16 bytes that are read, or written, once
load_words = instruction("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", "l")
store_words = instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", "", "lrrrr")

#: 9.7.9.17, prefetch: a line of memory to the second-level cache
prefetch = instruction("prefetch.global.L2 [$0];", "", "l")

# --- masked loads and stores ----------------------------------------------------------------------
#: 9.7.9.8, ld; 9.7.9.9, ld.global.nc; 9.7.9.11, st: by space and width; where the predicate of a
#: global access does not hold, 0 is read and nothing is written
shared_load16 = instruction("{ .reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t; }", "r", "r")
shared_store32 = instruction("st.shared.b32 [$0], $1;", "", "rr")
shared_store16 = instruction("{ .reg .b16 t; cvt.u16.u32 t, $1; st.shared.b16 [$0], t; }", "", "rr")
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
def fetch_where(bytes_: int, ahead: str = ".L2::128B") -> Any:
    """``copy(shared, address, count, least)``: as `fetch`, where `count` exceeds `least`.

    Else nothing is read, and shared memory stays as it is.
    """
    cache = "cg" if bytes_ == 16 else "ca"
    text = f"cp.async.{cache}.shared.global{ahead} [$0], [$1], {bytes_};"
    return instruction(f"{{ .reg .pred p; setp.gt.s32 p, $2, $3; @p {text} }}", "", "rlrr")


@functools.cache
def fetch_wait(pending: int) -> Any:
    """cp.async.wait_group (9.7.9.25.3.3): at most so many of the latest groups are on their way."""
    return instruction(f"cp.async.wait_group {pending};")


#: 9.7.9.25.3.2, cp.async.commit_group: closes the group of this thread's copies
fetch_commit = instruction("cp.async.commit_group;")
#: 9.7.9.25.3.4, cp.async.wait_all: none of this thread's copies is on its way
fetch_all = instruction("cp.async.wait_all;")
fetch16 = fetch(16, partial=True, ahead="")
