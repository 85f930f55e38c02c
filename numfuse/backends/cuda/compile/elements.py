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

from numfuse.backends.cuda.compile.accesses import narrowed, read_vector, widened, write_vector
from numfuse.backends.cuda.compile.intrinsics import (
    ACCUMULATORS,
    FORMATS,
    I16,
    I32,
    LETTERS,
    intrinsic_of,
)
from numfuse.backends.cuda.compile.toolchain import SIMULATED, ir


def _place(builder: Any, address: Any, index: Any, dtype: str) -> Any:
    pointer = builder.inttoptr(address, ir.PointerType(FORMATS[dtype][0], addrspace=1))
    return builder.gep(pointer, [index])


def _held(dtype: str) -> tuple[Any, Any, int]:
    """How the simulator finds an element: its type in memory and in NumPy, and its bytes."""
    import ml_dtypes

    size = FORMATS[dtype][1]
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype).type
    return {2: ctypes.c_uint16, 4: ctypes.c_float, 8: ctypes.c_double}[size], kind, size


@functools.cache
def loads(dtype: str) -> Any:
    """``load(address, index)``: an element, float16 and bfloat16 as float32."""
    if SIMULATED:
        held, kind, size = _held(dtype)

        def simulated(address, index):
            value = held.from_address(int(address) + size * int(index)).value
            return np.float32(np.uint16(value).view(kind)) if size == 2 else kind(value)

        simulated.numfuse_key = f"load_{dtype}"
        return simulated

    letter = ACCUMULATORS["float64" if dtype == "float64" else "float32"]

    def body(builder, address, index):
        value = builder.load(_place(builder, address, index, dtype))
        return widened(builder, value, dtype, LETTERS[letter][0])

    return intrinsic_of("load_element", dtype, "ul", body, letter)


@functools.cache
def stores(dtype: str) -> Any:
    """``store(address, index, value)``: of the accumulator's value, rounded to nearest even."""
    if SIMULATED:
        held, kind, size = _held(dtype)

        def simulated(address, index, value):
            narrow = int(kind(value).view(np.uint16)) if size == 2 else value
            held.from_address(int(address) + size * int(index)).value = narrow

        simulated.numfuse_key = f"store_{dtype}"
        return simulated

    def body(builder, address, index, value):
        # bfloat16: by the bits, as the instruction is there since sm_80
        by_bits = dtype == "bfloat16"
        narrow = _bfloat16(builder, value) if by_bits else narrowed(builder, value, dtype)
        builder.store(narrow, _place(builder, address, index, dtype))

    letter = ACCUMULATORS["float64" if dtype == "float64" else "float32"]
    return intrinsic_of("store_element", dtype, "ul" + letter, body)


# --- shared memory --------------------------------------------------------------------------------
def shared_place(builder: Any, memory: Any, index: Any, real: str) -> Any:
    """Return the address of an element of shared memory."""
    return builder.add(memory, builder.shl(index, I32(3 if real == "float64" else 2)))


@functools.cache
def peek(real: str) -> Any:
    """``peek(memory, index)``: a value of shared memory, which begins at this address (int32).

    An index of Numba's is compared with 0 first, and is 64 bits long. In the simulator memory is
    the array.
    """
    if SIMULATED:

        def simulated(memory, index):
            return memory[index]

        simulated.numfuse_key = f"peek_{real}"
        return simulated

    def body(builder, memory, index):
        at = shared_place(builder, memory, index, real)
        return read_vector(builder, at, 0, FORMATS[real][0], 1)[0]

    return intrinsic_of("peek", real, "rr", body, ACCUMULATORS[real])


@functools.cache
def poke(real: str) -> Any:
    """``poke(memory, index, value)``: write a value of shared memory."""
    if SIMULATED:

        def simulated(memory, index, value):
            memory[index] = value

        simulated.numfuse_key = f"poke_{real}"
        return simulated

    def body(builder, memory, index, value):
        write_vector(builder, shared_place(builder, memory, index, real), 0, [value])

    return intrinsic_of("poke", real, "rr" + ACCUMULATORS[real], body)


def _bfloat16(builder: Any, value: Any) -> Any:
    """Rounded to nearest even on the bits, which every capability can; NaN stays NaN."""
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(builder.add(bits, I32(0x7FFF)), odd), I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, I32(0x7FFF), rounded), I16)
