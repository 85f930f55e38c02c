"""Scalar intrinsics: what `numfuse.language.scalar` needs.

Each is LLVM; Numba's simulator runs what the compiler of the host makes of it. What is a line of
PTX has a Python text for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import njit
from numba.core.compiler_lock import global_compiler_lock

from numfuse.backends.cuda.compile import intrinsics
from numfuse.backends.cuda.compile.intrinsics import F32, F64, I32, I64, intrinsic_of
from numfuse.backends.cuda.compile.toolchain import SIMULATED, device_function, types
from numfuse.language import scalar
from numfuse.language.scalar import Target


def _on_host(made: Any, operands: str) -> Any:
    """Return an intrinsic of float32 or float64 as a function of NumPy's scalars."""
    # (a compilation while the simulator's threads wait for each other takes ten times as long)
    kinds = [(types.UniTuple(real, len(operands)),) for real in (types.float32, types.float64)]
    # (a thread that compiles takes this lock before that of what Numba shares of a target)
    with global_compiler_lock:
        function = njit(kinds)(lambda *values: made(*values))

    def call(*values: Any) -> Any:
        found, kind = function(*values), type(values[-1])
        if isinstance(found, tuple):
            return tuple(map(kind, found))
        return found if isinstance(found, bool) else kind(found)

    return call


def _scalar(
    name: str, operands: str, body: Callable[..., Any], results: str = "x", simulated: Any = None
) -> Any:
    """Return the function of what `body` emits (`intrinsic_of`)."""
    made = intrinsic_of(name, "", operands, body, results)
    return (simulated or _on_host(made, operands)) if SIMULATED else made


# --- arithmetic ---------------------------------------------------------------------------------
#: a * b + c, rounded once
fused = _scalar("fused", "xxx", intrinsics.fused)
#: a * b as a product of its own, which is merged into no fma
rounded_product = _scalar(
    "rounded_product", "xx", intrinsics.rounded_product, simulated=lambda a, b: a * b
)
#: correctly rounded
square_root = _scalar(
    "square_root", "x", intrinsics.square_root, simulated=lambda x: type(x)(np.sqrt(x))
)
#: 1 / x, rounded correctly (see there); x and 1 / x normal
inverse = _scalar("inverse", "x", intrinsics.inverse, simulated=lambda x: type(x)(1) / x)
#: a where the condition holds, else b: both are computed, nothing branches
select = _scalar(
    "select",
    "pxx",
    lambda builder, condition, a, b: builder.select(condition, a, b),
    simulated=lambda condition, a, b: a if condition else b,
)
both = _scalar("both", "pp", lambda builder, a, b: builder.and_(a, b), "p", lambda a, b: a and b)
either = _scalar("either", "pp", lambda builder, a, b: builder.or_(a, b), "p", lambda a, b: a or b)
negation = _scalar("negation", "p", lambda builder, a: builder.not_(a), "p", lambda a: not a)


def approximate(name: str, simulated: Callable[[Any], Any]) -> Any:
    """Return an instruction of the special function unit (`intrinsics.approximate`)."""

    def body(builder: Any, x: Any) -> Any:
        return intrinsics.approximate(builder, name, x)

    return _scalar(f"{name}_approx", "f", body, "f", simulated)


# --- operations on bits -------------------------------------------------------------------------
def _on_bits(name: str, operands: str, body: Callable[..., Any], results: str = "x") -> Any:
    """Return the function that emits ``body(builder, integer, mantissa, bias, *words)``.

    These are the integer type, mantissa bits and exponent bias of the floats, and their bits; so
    are its results.
    """

    def on_words(builder: Any, *floats: Any) -> Any:
        real = floats[0].type
        form = (I32, 23, 127) if real == F32 else (I64, 52, 1023)
        made = body(builder, *form, *(builder.bitcast(x, form[0]) for x in floats))
        if isinstance(made, list):
            return [x if x.type == real else builder.bitcast(x, real) for x in made]
        return made if results == "p" else builder.bitcast(made, real)

    return _scalar(name, operands, on_words, results)


def _sign(integer: Any) -> int:
    return 1 << (integer.width - 1)


#: |x|
absolute = _on_bits(
    "absolute", "x", lambda b, integer, mantissa, bias, w: b.and_(w, integer(_sign(integer) - 1))
)


def _with_sign(b: Any, integer: Any, mantissa: int, bias: int, w: Any, v: Any) -> Any:
    return b.or_(b.and_(w, integer(_sign(integer) - 1)), b.and_(v, integer(_sign(integer))))


#: |x| with the sign of y
copy_sign = _on_bits("copy_sign", "xx", _with_sign)
#: `low`, its sign turned where `high` is negative
toward = _on_bits(
    "toward",
    "xx",
    lambda b, integer, mantissa, bias, w, v: b.xor(w, b.and_(v, integer(_sign(integer)))),
)


def _finite(b: Any, integer: Any, mantissa: int, bias: int, w: Any) -> Any:
    infinity = integer((2 * bias + 1) << mantissa)
    return b.icmp_unsigned("!=", b.and_(w, infinity), infinity)


#: neither NaN nor an infinity
is_finite = _on_bits("is_finite", "x", _finite, "p")

#: 2^n for a normal result, n the low bits of ``n + 1.5 * 2^mantissa``
power_of_two = _on_bits(
    "power_of_two",
    "x",
    lambda b, integer, mantissa, bias, w: b.shl(b.add(w, integer(bias)), integer(mantissa)),
)
#: 2^(k - bias), k > 0 the low bits of ``k + 1.5 * 2^mantissa``
raised_exponent = _on_bits(
    "raised_exponent", "x", lambda b, integer, mantissa, bias, w: b.shl(w, integer(mantissa))
)


def _two_powers(b: Any, integer: Any, mantissa: int, bias: int, w: Any) -> list[Any]:
    # the bits of 1.5 * 2^mantissa: n in the low bits of a sum with it
    magic = 0x4B400000 if mantissa == 23 else 0x4338000000000000
    n = b.sub(w, integer(magic - 2 * bias))
    half = b.lshr(n, integer(1))
    return [b.shl(h, integer(mantissa)) for h in (half, b.sub(n, half))]


#: two normal numbers whose product is 2^n, n from -2 * bias to 2 * bias
two_powers_of_two = _on_bits("two_powers_of_two", "x", _two_powers, "xx")


def _exponent_parts(b: Any, integer: Any, mantissa: int, bias: int, w: Any) -> list[Any]:
    root_half = 0x3F3504F3 if mantissa == 23 else 0x3FE6A09E667F3BCD
    shift = integer(mantissa)
    k = b.ashr(b.sub(w, integer(root_half)), shift)
    scale = b.shl(b.sub(integer(bias + 2), k), shift)
    real = F32 if mantissa == 23 else F64
    return [b.sitofp(k, real), b.sub(w, b.shl(k, shift)), scale]


#: (k, m, 2^(2 - k)) with u = 2^k m, m from sqrt(1/2) to sqrt(2); u normal, k above -125
exponent_parts = _on_bits("exponent_parts", "x", _exponent_parts, "xxx")


_HERE = globals()
TARGET = Target(
    jit=device_function,
    # (with float64's own, a gradient's kernel has no registers left, and is no faster)
    inverses={"float32": inverse},
    **{x.name: _HERE[x.name] for x in fields(Target) if x.default is MISSING and x.name != "jit"},
)


@functools.cache
def primitives(dtype: str, straight: bool = False) -> SimpleNamespace:
    """The primitives of one dtype ("float32" or "float64"), by the names of `numfuse.expr`.

    `straight`: no inverse has a branch, in float64 either.
    """
    every = dict.fromkeys(("float32", "float64"), inverse)
    return scalar.primitives(dtype, replace(TARGET, inverses=every) if straight else TARGET)
