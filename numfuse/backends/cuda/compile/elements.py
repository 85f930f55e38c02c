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

from numfuse.backends.cuda.compile.accesses import narrowed, widened
from numfuse.backends.cuda.compile.intrinsics import ACCUMULATORS, FORMATS, I16, I32, named
from numfuse.backends.cuda.compile.toolchain import SIMULATED, ir, types

_C = {"float64": ctypes.c_double, "float32": ctypes.c_float}


def _place(builder: Any, address: Any, index: Any, dtype: str) -> Any:
    pointer = builder.inttoptr(address, ir.PointerType(FORMATS[dtype][0], addrspace=1))
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


@functools.cache
def loads(dtype: str) -> Any:
    """``load(address, index)``: an element, float16 and bfloat16 as float32."""
    if SIMULATED:
        c = _C.get(dtype, ctypes.c_uint16)
        size = ctypes.sizeof(c)

        def simulated(address, index):
            value = c.from_address(int(address) + size * int(index)).value
            if size == 2:
                return _widened(dtype, value)
            return np.float32(value) if size == 4 else np.float64(value)

        simulated.numfuse_key = f"load_{dtype}"
        return simulated

    llvm, numba = ACCUMULATORS["float64" if dtype == "float64" else "float32"]

    def typing(typingctx, address, index):
        def codegen(context, builder, signature, args):
            value = builder.load(_place(builder, *args, dtype))
            return widened(builder, value, dtype, llvm)

        return numba(types.uint64, types.int64), codegen

    return named("load_element", dtype, 2, typing)


@functools.cache
def stores(dtype: str) -> Any:
    """``store(address, index, value)``: of the accumulator's value, rounded to nearest even."""
    if SIMULATED:
        c = _C.get(dtype, ctypes.c_uint16)
        size = ctypes.sizeof(c)

        def simulated(address, index, value):
            narrow = _narrowed(dtype, value) if size == 2 else float(value)
            c.from_address(int(address) + size * int(index)).value = narrow

        simulated.numfuse_key = f"store_{dtype}"
        return simulated

    _, numba = ACCUMULATORS["float64" if dtype == "float64" else "float32"]

    def typing(typingctx, address, index, value):
        def codegen(context, builder, signature, args):
            address, index, value = args
            # bfloat16: by the bits, as the instruction is there since sm_80
            narrow = (
                _bfloat16(builder, value)
                if dtype == "bfloat16"
                else narrowed(builder, value, dtype)
            )
            builder.store(narrow, _place(builder, address, index, dtype))
            return context.get_dummy_value()

        return types.void(types.uint64, types.int64, numba), codegen

    return named("store_element", dtype, 3, typing)


def _bfloat16(builder: Any, value: Any) -> Any:
    """Rounded to nearest even on the bits, which every capability can; NaN stays NaN."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), odd), I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, I32(0x7FFF), rounded), I16)
