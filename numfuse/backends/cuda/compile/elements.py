"""One element of memory by its address and index.

Each access has two texts: LLVM for the compiler, and Python for Numba's simulator, whose device
memory is the process's own. An address is a uint64, an index counts elements; both are the caller's
to check.
"""

# A Numba function has no annotations, and a call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, unreachable, arg-type, attr-defined"
from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile import intrinsics
from numfuse.backends.cuda.compile.toolchain import SIMULATED, intrinsic, ir, types

#: LLVM's and C's type of an element in memory.
_STORED: dict[str, tuple[Any, Any]] = {
    "float64": (ir.DoubleType(), ctypes.c_double),
    "float32": (ir.FloatType(), ctypes.c_float),
    "float16": (ir.IntType(16), ctypes.c_uint16),
    "bfloat16": (ir.IntType(16), ctypes.c_uint16),
}
_I64 = ir.IntType(64)


def _place(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    pointer = builder.inttoptr(address, ir.PointerType(kind, addrspace=1))
    return builder.gep(pointer, [index])


def _widened(dtype: str, value: int) -> Any:
    if dtype == "bfloat16":
        return np.uint32(value << 16).view(np.float32)
    return np.float32(np.uint16(value).view(np.float16))


def _narrowed(dtype: str, value: Any) -> int:
    if dtype == "float16":
        return int(np.float16(value).view(np.uint16))
    bits = int(np.float32(value).view(np.uint32))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _named(name: str, function: Any) -> Any:
    """Return the intrinsic, or what stands for it in the simulator, under a name."""
    function.__name__ = function.__qualname__ = name
    made = intrinsic(function)
    made.numfuse_key = name
    return made


@functools.cache
def loads(dtype: str) -> Any:
    """``load(address, index)``: an element, float16 and bfloat16 as float32."""
    if SIMULATED:
        c = _STORED[dtype][1]
        size = ctypes.sizeof(c)

        def simulated(address, index):
            value = c.from_address(int(address) + size * int(index)).value
            if size == 2:
                return _widened(dtype, value)
            return np.float32(value) if size == 4 else np.float64(value)

        return _named(f"load_{dtype}", simulated)

    made = types.float64 if dtype == "float64" else types.float32

    def codegen(context, builder, signature, args):
        kind = _STORED[dtype][0]
        value = builder.load(_place(builder, *args, kind))
        if dtype == "bfloat16":  # the upper half of a float32
            word = ir.IntType(32)
            return builder.bitcast(builder.shl(builder.zext(value, word), word(16)), ir.FloatType())
        if dtype == "float16":
            return intrinsics.from_half(builder, value)
        return value

    def typed(typingctx, address, index):
        return made(types.uint64, types.int64), codegen

    return _named(f"load_{dtype}", typed)


@functools.cache
def stores(dtype: str) -> Any:
    """``store(address, index, value)``: of the accumulator's value, rounded to nearest even."""
    if SIMULATED:
        c = _STORED[dtype][1]
        size = ctypes.sizeof(c)

        def simulated(address, index, value):
            narrow = _narrowed(dtype, value) if size == 2 else float(value)
            c.from_address(int(address) + size * int(index)).value = narrow

        return _named(f"store_{dtype}", simulated)

    taken = types.float64 if dtype == "float64" else types.float32

    def codegen(context, builder, signature, args):
        address, index, value = args
        kind = _STORED[dtype][0]
        if kind.__class__ is ir.IntType:
            # bfloat16: by the bits, as the instruction is there since sm_80
            narrow = intrinsics.to_half if dtype == "float16" else _bfloat16
            value = narrow(builder, value)
        builder.store(value, _place(builder, address, index, kind))
        return context.get_dummy_value()

    def typed(typingctx, address, index, value):
        return types.void(types.uint64, types.int64, taken), codegen

    return _named(f"store_{dtype}", typed)


def _bfloat16(builder: Any, value: Any) -> Any:
    """Rounded to nearest even on the bits, which every capability can; NaN stays NaN."""
    word = ir.IntType(32)
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, word(0x7FFF), rounded), ir.IntType(16))
