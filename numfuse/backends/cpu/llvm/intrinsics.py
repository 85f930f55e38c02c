"""Typed addresses, calls by address, atomics and fences, which Numba code lacks."""

from __future__ import annotations

import functools
import platform
from typing import Any

from llvmlite import ir
from numba.core import types

from numfuse.backends.cpu.llvm.vectors import (
    I32,
    I64,
    address_intrinsic,
    call,
    prefetch,
    stack,
    typed_intrinsic,
)


@functools.cache
def make_fence() -> Any:
    """``fence()``: stores before it, non-temporal ones included, are seen before any after it."""

    def body(builder: ir.IRBuilder) -> None:
        builder.fence("seq_cst")

    return address_intrinsic("fence", "", 0, body)


@functools.cache
def make_call(nargs: int) -> Any:
    """``call(function, *args)``: call ``void function(int64, ...)`` by its address."""

    def body(builder: ir.IRBuilder, function: ir.Value, *args: ir.Value) -> None:
        ty = ir.FunctionType(ir.VoidType(), [I64] * nargs)
        builder.call(builder.inttoptr(function, ty.as_pointer()), args)

    return address_intrinsic("call", str(nargs), nargs + 1, body)


@functools.cache
def make_call_number() -> Any:
    """``call_number(function) -> int64``: call ``int function(void)`` by its address."""

    def emit(context: Any, builder: ir.IRBuilder, function: ir.Value) -> ir.Value:
        pointer = builder.inttoptr(function, ir.FunctionType(I32, []).as_pointer())
        return builder.sext(builder.call(pointer, []), I64)

    return typed_intrinsic("call_number", types.int64, [types.int64], emit)


@functools.cache
def make_nothing() -> Any:
    """``nothing(address)``: for a name that only other kinds of kernel need."""
    return address_intrinsic("nothing", "", 1, lambda builder, address: None)


@functools.cache
def make_prefetch(level: int = 2) -> Any:
    """``prefetch(address)``: ask for a line into a level of the cache."""

    def body(builder: ir.IRBuilder, address: ir.Value) -> None:
        prefetch(builder, address, level)

    return address_intrinsic("prefetch", str(level), 1, body)


@functools.cache
def make_scratch(size: int) -> Any:
    """``scratch() -> int64``: the address of `size` bytes on the stack, at a line's beginning."""

    def emit(context: Any, builder: ir.IRBuilder) -> ir.Value:
        return builder.ptrtoint(stack(builder, size), I64)

    return typed_intrinsic(f"scratch({size})", types.int64, [], emit)


def _atomic(name: str, operation: str) -> Any:
    def emit(context: Any, builder: ir.IRBuilder, address: ir.Value, number: ir.Value) -> ir.Value:
        # What was written before is seen by whoever sees the new value.
        pointer = builder.inttoptr(address, I64.as_pointer())
        return builder.atomic_rmw(operation, pointer, number, "acq_rel")

    return typed_intrinsic(name, types.int64, [types.int64] * 2, emit)


@functools.cache
def make_fetch_add() -> Any:
    """``fetch_add(address, number) -> int64``: adds atomically, and tells the value before."""
    return _atomic("fetch_add 2", "add")


@functools.cache
def make_exchange() -> Any:
    """``exchange(address, number) -> int64``: stores atomically, and tells the value before."""
    return _atomic("exchange", "xchg")


@functools.cache
def make_atomic_load() -> Any:
    """``atomic_load(address) -> int64``: a counter's value, and all that was written before it."""

    def emit(context: Any, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "acquire", 8)

    return typed_intrinsic("atomic_load", types.int64, [types.int64], emit)


@functools.cache
def make_pause() -> Any:
    """``pause()``: tells the processor that this thread waits in a loop."""
    machine = platform.machine().lower()

    def body(builder: ir.IRBuilder) -> None:
        if machine in ("x86_64", "amd64"):
            call(builder, "llvm.x86.sse2.pause")
        elif machine in ("aarch64", "arm64"):
            call(builder, "llvm.aarch64.hint", I32(1))

    return address_intrinsic("pause", machine, 0, body)


#: How a storage format looks to Numba: half types travel as their 16 bits.
CARRIERS: dict[str, Any] = {
    "float64": types.float64,
    "float32": types.float32,
    "float16": types.uint16,
    "bfloat16": types.uint16,
    "int64": types.int64,
    "uint16": types.uint16,
    "uint32": types.uint32,
    "uint64": types.uint64,
}


@functools.cache
def make_elements(fmt: str) -> Any:
    """``elements(address)``: the address as a pointer ``p`` for ``p[i]`` in Numba code."""
    pointer = types.CPointer(CARRIERS[fmt])

    def emit(context: Any, builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return builder.inttoptr(address, context.get_value_type(pointer))

    return typed_intrinsic(f"elements({CARRIERS[fmt]})", pointer, [types.int64], emit)


@functools.cache
def make_wide_vectors(bits: int) -> Any:
    """``wide_vectors()``: let LLVM use vectors of `bits` bits in the loops of this function.

    For many processors with AVX-512 LLVM prefers 256 bits, for fear of lower clocks.  Between two
    tiles of the micro-kernel, which is written in 512 bits, the clock is what it is, and the wider
    loops of an epilogue take half the time.  The function is kept out of line, because inlined into
    its C wrapper it would lose the attribute.
    """

    def body(builder: ir.IRBuilder) -> None:
        attributes = builder.function.attributes
        attributes.add("noinline")
        # llvmlite lists the attributes that it knows; one with a value goes past that list.
        set.add(attributes, f'"prefer-vector-width"="{bits}"')

    return address_intrinsic("wide_vectors", str(bits), 0, body)
