"""Scalar intrinsics: what `numfuse.language.scalar` needs.

Each has two texts: LLVM for the compiler, and Python for Numba's simulator.
"""

# A Numba function has no annotations, and a call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, unreachable, arg-type, attr-defined"
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np

from numfuse.backends.cuda.compile import intrinsics
from numfuse.backends.cuda.compile.toolchain import SIMULATED, device_function, intrinsic, ir, types
from numfuse.language import scalar
from numfuse.language.scalar import Target

__all__ = [
    "TARGET",
    "is_finite",
    "primitives",
]


def _llvm(bits: int) -> tuple[Any, Any, int, int]:
    """Float type, integer type, mantissa bits and exponent bias of a float of `bits` bits."""
    if bits == 32:
        return ir.FloatType(), ir.IntType(32), 23, 127
    return ir.DoubleType(), ir.IntType(64), 52, 1023


def _either_text(simulated: Callable[..., Any]) -> Callable[[Any], Any]:
    """The intrinsic where there is a compiler, else the Python text."""

    def decorate(typed: Any) -> Any:
        return simulated if SIMULATED else intrinsic(typed)

    return decorate


def _bits(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(np.uint32 if x.itemsize == 4 else np.uint64)


def _format(x: Any) -> tuple[Any, Any, int, int]:
    """NumPy's float type, unsigned type, mantissa bits and bias."""
    if np.asarray(x).itemsize == 4:
        return np.float32, np.uint32, 23, 127
    return np.float64, np.uint64, 52, 1023


def _from_bits(bits: int, kind: Any, unsigned: Any) -> Any:
    width = 8 * np.dtype(kind).itemsize
    return np.asarray(bits % (1 << width), unsigned).view(kind)[()]


_SPLITTER = 2.0**27 + 1.0  # Veltkamp: halves of 26 bits, whose products are exact


# --- arithmetic ---------------------------------------------------------------------------------
def _simulated_fma(a, b, c):
    kind = type(a)
    if kind is np.float32:
        # A product of two float32 is exact in float64; its sum is rounded twice, which a fused
        # one is not: good to the last place but for one case in 2^29.
        return kind(float(a) * float(b) + float(c))
    a, b, c = float(a), float(b), float(c)
    product = a * b
    if not 1e-290 < abs(product) < 1e290 or abs(a) > 1e150 or abs(b) > 1e150 or not abs(c) < 1e300:
        from fractions import Fraction

        if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
            return kind(product + c)
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if not exact:
            return kind(product + c)
        try:
            return kind(float(exact))
        except OverflowError:
            return kind(math.copysign(math.inf, exact))
    # the sum and its error (Knuth), the product's error (Dekker): as above, good to the last place
    total = product + c
    back = total - product
    low = (product - (total - back)) + (c - back)
    a_high, b_high = a * _SPLITTER, b * _SPLITTER
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return kind(total + (low + error))


@_either_text(_simulated_fma)
def fused(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):
        return intrinsics.fused(builder, *args)

    return a(a, a, a), codegen


@_either_text(lambda a, b: a * b)
def rounded_product(typingctx, a, b):
    """a * b as a product of its own, which is merged into no fma."""

    def codegen(context, builder, signature, args):
        return intrinsics.rounded_product(builder, *args)

    return a(a, a), codegen


@_either_text(lambda x: np.result_type(x).type(np.sqrt(x)))
def square_root(typingctx, x):
    """Correctly rounded."""

    def codegen(context, builder, signature, args):
        return intrinsics.square_root(builder, *args)

    return x(x), codegen


@_either_text(lambda x: np.float32(1) / x)
def inverse(typingctx, x):
    """1 / x of float32, rounded correctly; x and 1 / x normal."""

    def codegen(context, builder, signature, args):
        return intrinsics.inverse(builder, *args)

    return types.float32(types.float32), codegen


def _on_bits(function: Any) -> Any:
    """The code of an operation on the bits of floats."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
        words = [builder.bitcast(a, integer) for a in args]
        made = function(builder, integer, mantissa, bias, *words)
        if isinstance(made, tuple):
            return context.make_tuple(builder, signature.return_type, list(made))
        return made if signature.return_type is types.boolean else builder.bitcast(made, real)

    return codegen


def _bitwise(arity: int, made: Any, simulated: Callable[..., Any]) -> Any:
    """Return the intrinsic of an operation on bits, of one float or of two."""
    if SIMULATED:
        return simulated
    if arity == 1:
        return intrinsic(lambda typingctx, x: (x(x), _on_bits(made)))
    return intrinsic(lambda typingctx, x, y: (x(x, x), _on_bits(made)))


def _sign(integer: Any) -> int:
    return 1 << (integer.width - 1)


def _with_sign(b: Any, integer: Any, mantissa: int, bias: int, w: Any, v: Any) -> Any:
    return b.or_(b.and_(w, integer(_sign(integer) - 1)), b.and_(v, integer(_sign(integer))))


#: |x|
absolute = _bitwise(
    1,
    lambda b, integer, mantissa, bias, w: b.and_(w, integer(_sign(integer) - 1)),
    lambda x: np.result_type(x).type(abs(x)),
)
#: |x| with the sign of y
copy_sign = _bitwise(2, _with_sign, lambda x, y: np.copysign(x, y))
#: `low`, its sign turned where `high` is negative
toward = _bitwise(
    2,
    lambda b, integer, mantissa, bias, w, v: b.xor(w, b.and_(v, integer(_sign(integer)))),
    lambda low, high: -low if np.signbit(high) else low,
)


@_either_text(lambda condition, a, b: a if condition else b)
def select(typingctx, condition, a, b):
    """Both sides are computed, nothing branches."""
    return a(types.boolean, a, a), lambda context, builder, signature, args: builder.select(*args)


def _logical(name: str, simulated: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, name)(*args)

    truth = types.boolean
    if SIMULATED:
        return simulated
    if name == "not_":
        return intrinsic(lambda typingctx, a: (truth(truth), codegen))
    return intrinsic(lambda typingctx, a, b: (truth(truth, truth), codegen))


both = _logical("and_", lambda a, b: a and b)
either = _logical("or_", lambda a, b: a or b)
negation = _logical("not_", lambda a: not a)


@_either_text(lambda x: bool(np.isfinite(x)))
def is_finite(typingctx, x):
    """Neither NaN nor an infinity, by the bits."""

    def made(b, integer, mantissa, bias, w):
        infinity = integer((2 * bias + 1) << mantissa)
        return b.icmp_unsigned("!=", b.and_(w, infinity), infinity)

    return types.boolean(x), _on_bits(made)


# --- powers of two ------------------------------------------------------------------------------
def _magic(mantissa: int) -> int:
    """The bits of 1.5 * 2^mantissa: n in the low bits of a sum with it."""
    return 0x4B400000 if mantissa == 23 else 0x4338000000000000


def _simulated_power_of_two(shifted):
    kind, unsigned, mantissa, bias = _format(shifted)
    return _from_bits((int(_bits(shifted)) + bias) << mantissa, kind, unsigned)


def _simulated_raised_exponent(shifted):
    kind, unsigned, mantissa, _ = _format(shifted)
    return _from_bits(int(_bits(shifted)) << mantissa, kind, unsigned)


#: 2^n for a normal result, n the low bits of ``n + 1.5 * 2^mantissa``
power_of_two = _bitwise(
    1,
    lambda b, integer, mantissa, bias, w: b.shl(b.add(w, integer(bias)), integer(mantissa)),
    _simulated_power_of_two,
)
#: 2^(k - bias), k > 0 the low bits of ``k + 1.5 * 2^mantissa``
raised_exponent = _bitwise(
    1,
    lambda b, integer, mantissa, bias, w: b.shl(w, integer(mantissa)),
    _simulated_raised_exponent,
)


def _simulated_two_powers_of_two(shifted):
    kind, unsigned, mantissa, bias = _format(shifted)
    n = int(_bits(shifted)) - (_magic(mantissa) - 2 * bias)
    half = n >> 1
    return (
        _from_bits(half << mantissa, kind, unsigned),
        _from_bits((n - half) << mantissa, kind, unsigned),
    )


@_either_text(_simulated_two_powers_of_two)
def two_powers_of_two(typingctx, shifted):
    """Two normal numbers whose product is 2^n, n from -2 * bias to 2 * bias."""

    def codegen(context, builder, signature, args):
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
        n = builder.sub(builder.bitcast(args[0], integer), integer(_magic(mantissa) - 2 * bias))
        half = builder.lshr(n, integer(1))
        rest = builder.sub(n, half)
        parts = [builder.bitcast(builder.shl(h, integer(mantissa)), real) for h in (half, rest)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(shifted, 2)(shifted), codegen


def _root_half(mantissa: int) -> int:
    return 0x3F3504F3 if mantissa == 23 else 0x3FE6A09E667F3BCD


def _simulated_exponent_parts(u):
    kind, unsigned, mantissa, bias = _format(u)
    bits, width = int(_bits(u)), 8 * np.dtype(kind).itemsize
    difference = bits - _root_half(mantissa)
    if bits >> (width - 1):  # a negative number, as the signed word that the GPU has
        difference -= 1 << width
    k = difference >> mantissa
    return (
        kind(k),
        _from_bits(bits - (k << mantissa), kind, unsigned),
        _from_bits((bias + 2 - k) << mantissa, kind, unsigned),
    )


@_either_text(_simulated_exponent_parts)
def exponent_parts(typingctx, u):
    """(k, m, 2^(2 - k)) with u = 2^k m, m from sqrt(1/2) to sqrt(2); u normal, k above -125."""

    def codegen(context, builder, signature, args):
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
        shift = integer(mantissa)
        bits = builder.bitcast(args[0], integer)
        k = builder.ashr(builder.sub(bits, integer(_root_half(mantissa))), shift)
        m = builder.sub(bits, builder.shl(k, shift))
        scale = builder.shl(builder.sub(integer(bias + 2), k), shift)
        parts = [builder.sitofp(k, real), builder.bitcast(m, real), builder.bitcast(scale, real)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(u, 3)(u), codegen


_HERE = globals()
TARGET = Target(
    jit=device_function,
    # (with float64's own, a gradient's kernel has no registers left, and is no faster)
    inverses={"float32": inverse},
    **{x.name: _HERE[x.name] for x in fields(Target) if x.name not in ("jit", "inverses")},
)


@functools.cache
def primitives(dtype: str) -> SimpleNamespace:
    """The primitives of one dtype ("float32" or "float64"), by the names of `numfuse.expr`."""
    return scalar.primitives(dtype, TARGET)
