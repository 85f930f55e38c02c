"""The operations of `numfuse.expr` as branch-free Numba functions, and the printing of a formula.

Every primitive is straight-line code of adds, products, fmas and selects, without a call of libm, so
that LLVM turns a plain loop over it into vector code (Numba's wheels have no SVML). Integer work on
the bits of a float is in a few intrinsics, as Numba promotes int32 arithmetic to int64.

Method. exp: x = n ln2 + r with ln2 in two words (Cody and Waite 1980), e^r - 1 = r + r^2 P(r), and
the scale 2^n in two halves, the last factors, so that a subnormal result is rounded once. Logarithm:
log(1 + f) by the series in s = f / (2 + f) (fdlibm, Sun 1993, e_log.c). Normal tail: Mills' ratio
M(y) = Phi(-y) / e^(-y^2/2) times (1 + y) as a polynomial in w = (y - 5) / (y + 5). Polynomials are
minimax for the error of the final result, by Remez' exchange in 40 digits; `log2 error` is theirs.
"""

from __future__ import annotations

import functools
import hashlib
import math
import pathlib
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from numfuse.expr import FASTMATH, Expr, dumps, topological

__all__ = ["device_function", "primitives", "render", "scalar_function"]

_OPTIONS: dict[str, Any] = {"forceinline": True, "error_model": "numpy", "fastmath": FASTMATH}
_jit = njit(**_OPTIONS)


# --- intrinsics ---------------------------------------------------------------------------------
def _llvm(bits: int) -> tuple[Any, Any, int, int]:
    """Float type, integer type, mantissa bits and exponent bias of a float of `bits` bits."""
    if bits == 32:
        return ir.FloatType(), ir.IntType(32), 23, 127
    return ir.DoubleType(), ir.IntType(64), 52, 1023


def _named(name: str, operands: int) -> Any:
    """An LLVM intrinsic of `operands` floats."""

    def call(builder: Any, values: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic(name, [values[0].type], kind), values)

    kind: Any = None

    def typed(x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            ty = args[0].type
            function = builder.module.declare_intrinsic(name, [ty], ir.FunctionType(ty, [ty] * operands))
            return builder.call(function, args)

        return x(*[x] * operands), codegen

    if operands == 1:
        return intrinsic(lambda typingctx, x: typed(x))
    if operands == 2:
        return intrinsic(lambda typingctx, x, y: typed(x))
    return intrinsic(lambda typingctx, x, y, z: typed(x))


absolute = _named("llvm.fabs", 1)
square_root = _named("llvm.sqrt", 1)
copy_sign = _named("llvm.copysign", 2)
fused = _named("llvm.fma", 3)


@intrinsic
def rounded_product(typingctx: Any, a: Any, b: Any) -> Any:
    """a * b as a product of its own.

    Numba gives its fast-math flags to every instruction that has none; `arcp` says nothing about a
    product, and without `contract` LLVM never merges it into an fma.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args, flags=("arcp",))

    return a(a, a), codegen


@intrinsic
def select(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """LLVM's select: both sides are computed, nothing branches."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(types.boolean, a, a), codegen


def _logical(name: str) -> Any:
    def typed() -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return codegen

    if name == "not_":
        return intrinsic(lambda typingctx, a: (types.boolean(types.boolean), typed()))
    return intrinsic(lambda typingctx, a, b: (types.boolean(types.boolean, types.boolean), typed()))


both, either, negation = _logical("and_"), _logical("or_"), _logical("not_")


@intrinsic
def power_of_two(typingctx: Any, shifted: Any) -> Any:
    """2^n for a normal result, n the low bits of ``n + 1.5 * 2^mantissa``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.return_type.bitwidth)
        n = builder.bitcast(args[0], integer)
        raised = builder.shl(builder.add(n, integer(bias)), integer(mantissa))
        return builder.bitcast(raised, real)

    return shifted(shifted), codegen


@intrinsic
def two_powers_of_two(typingctx: Any, shifted: Any) -> Any:
    """Two normal numbers whose product is 2^n, n from -2 * bias to 2 * bias."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(args[0].type.intrinsic_name == "f32" and 32 or 64)
        # The top bits of the shifted float are those of 1.5 * 2^mantissa: take them away, and
        # work with n + 2 * bias, which is not negative (an arithmetic shift of 64 bits is slow).
        magic = 0x4B400000 if mantissa == 23 else 0x4338000000000000
        n = builder.sub(builder.bitcast(args[0], integer), integer(magic - 2 * bias))
        half = builder.lshr(n, integer(1))
        rest = builder.sub(n, half)
        parts = [builder.bitcast(builder.shl(h, integer(mantissa)), real) for h in (half, rest)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(shifted, 2)(shifted), codegen


@intrinsic
def exponent_and_scale(typingctx: Any, u: Any) -> Any:
    """(k, 2^-k) as floats, with u = 2^k m and m from sqrt(1/2) to sqrt(2); u normal and positive."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(args[0].type.intrinsic_name == "f32" and 32 or 64)
        root = 0x3F3504F3 if mantissa == 23 else 0x3FE6A09E667F3BCD
        shift = integer(mantissa)
        k = builder.ashr(builder.sub(builder.bitcast(args[0], integer), integer(root)), shift)
        scale = builder.shl(builder.sub(integer(bias), k), shift)
        parts = [builder.sitofp(k, real), builder.bitcast(scale, real)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(u, 2)(u), codegen


# --- constants per dtype ------------------------------------------------------------------------
def _hex(*words: str) -> tuple[float, ...]:
    return tuple(float.fromhex(word) for word in words)


# e^r = 1 + r + r^2 P(r) for |r| <= ln2 / 2, highest power first. log2 error -28.3, -57.9.
_EXP = {
    "float32": _hex(
        "0x1.6a23de484dbbfp-10", "0x1.123a360ac6b57p-7", "0x1.5558f33f615e9p-5",
        "0x1.555490e6c2e21p-3", "0x1.fffffb96eec9dp-2",
    ),
    "float64": _hex(
        "0x1.ad7b43bc8bd83p-26", "0x1.28ada3de6fab7p-22", "0x1.71df287fce3b9p-19",
        "0x1.a01999dcfe10fp-16", "0x1.a01a0128af3afp-13", "0x1.6c16c18438ddep-10",
        "0x1.1111111128165p-7", "0x1.5555555550849p-5", "0x1.55555555554f8p-3",
        "0x1.000000000000ap-1",
    ),
}  # fmt: skip
# log((1 + s) / (1 - s)) = 2 s + s^3 R(s^2) for |s| <= 3 - 2 sqrt(2). log2 error -36.6, -58.5.
_LOG = {
    "float32": _hex(
        "0x1.e3053431cc726p-3", "0x1.24387ad6fe809p-2", "0x1.999a7bde704eep-2",
        "0x1.555554fcf5054p-1",
    ),
    "float64": _hex(
        "0x1.2f15137779cc5p-3", "0x1.39a04423b4465p-3", "0x1.74664c743d31dp-3",
        "0x1.c71c51cc3bfafp-3", "0x1.24924942363a7p-2", "0x1.999999997f946p-2",
        "0x1.5555555555593p-1",
    ),
}  # fmt: skip
# erf(x) = x + x P(x^2) for |x| <= 1. log2 error -29.7, -57.0.
_ERF = {
    "float32": _hex(
        "0x1.4ae4c59dcdbf3p-14", "-0x1.a485f7f7ff144p-11", "0x1.5419f962ab742p-8",
        "-0x1.b7fbb56196242p-6", "0x1.ce2d1fae8ac4ep-4", "-0x1.81273ecb64b3ap-2",
        "0x1.06eba7f8bac62p-3",
    ),
    "float64": _hex(
        "-0x1.acdff90b8ebd8p-31", "0x1.d784936618cc2p-27", "-0x1.5c16e30fb0d45p-23",
        "0x1.b9827b1885f9bp-20", "-0x1.f4ca94990cb86p-17", "0x1.f9a2bf73f0c68p-14",
        "-0x1.c02db072f3fe0p-11", "0x1.565bccfa9a825p-8", "-0x1.b82ce312062bcp-6",
        "0x1.ce2f21a041018p-4", "-0x1.812746b0379c2p-2", "0x1.06eba8214db68p-3",
    ),
}  # fmt: skip
# M(y) (1 + y) in w = (y - 5) / (y + 5), y to 14.5 and to 39. log2 error -29.2, -56.6.
_MILLS = {
    "float32": _hex(
        "0x1.aac5a482ccfb1p-13", "-0x1.6a531883003c5p-15", "-0x1.c07b50a52d4a9p-10",
        "0x1.ac604483f4ffcp-8", "-0x1.f0aa8d1f43a8bp-7", "0x1.91fd7ee2de973p-6",
        "-0x1.b096133188476p-6", "0x1.47c2249fa8103p-7", "0x1.fc6732a5f9fabp-6",
        "-0x1.76ff8697a8914p-4", "0x1.d8979b0247f25p-2",
    ),
    "float64": _hex(
        "0x1.7f9780200d352p-31", "0x1.0924850ddf0e5p-28", "0x1.00d60529c7d51p-31",
        "-0x1.0edda05e725f2p-25", "-0x1.784f0d917cbc2p-26", "0x1.a9b2b9a8f6908p-23",
        "0x1.0b48ea0a62ed3p-23", "-0x1.5f81d4c1f96e8p-20", "-0x1.2719ae49b86bdp-24",
        "0x1.300907d4d67cap-17", "-0x1.4c131e231d5a4p-17", "-0x1.c1b23abcaab04p-15",
        "0x1.7e61f341aa72cp-13", "0x1.0572006d19714p-17", "-0x1.b75f4fd05aab2p-10",
        "0x1.ab6d03879c2d3p-8", "-0x1.f11aab023b941p-7", "0x1.92037bab5f001p-6",
        "-0x1.b08e0007b930cp-6", "0x1.47c1d03053222p-7", "0x1.fc66cc64a1511p-6",
        "-0x1.76ff86859eb0ep-4", "0x1.d8979b0f2b39dp-2",
    ),
}  # fmt: skip
# ln2 as a head of few bits, whose product with any exponent is exact, and a tail.
_LN2 = {
    "float32": _hex("0x1.62e4p-1", "0x1.7f7d1cf79abcap-20"),
    "float64": _hex("0x1.62e42fee00000p-1", "0x1.a39ef35793c76p-33"),
}
# Beyond these, exp(-x) is 0 and exp(x) is infinite.
_EXP_RANGE = {"float32": (104.0, 89.0), "float64": (746.0, 710.0)}
# Beyond this, e^(-y^2/2) is 0 (and the polynomial of Mills' ratio leaves its interval).
_MILLS_END = {"float32": 14.5, "float64": 39.0}
# Beyond this, tanh is 1 to the last place.
_TANH_END = {"float32": 10.0, "float64": 20.0}


@functools.cache
def primitives(dtype: str) -> SimpleNamespace:
    """The primitives of one dtype ("float32" or "float64"), by the names of `numfuse.expr`."""
    real = np.dtype(dtype).type
    mantissa = 23 if dtype == "float32" else 52
    zero, half, one, two, five = (real(v) for v in (0.0, 0.5, 1.0, 2.0, 5.0))
    magic, log2e = real(1.5 * 2.0**mantissa), real(math.log2(math.e))
    ln2_head, ln2_tail = (real(v) for v in _LN2[dtype])
    exp_low, exp_high = real(-_EXP_RANGE[dtype][0]), real(_EXP_RANGE[dtype][1])
    mills_end, tanh_end, root_two = real(_MILLS_END[dtype]), real(_TANH_END[dtype]), real(math.sqrt(2.0))
    # Subnormal arguments of log are scaled by a power of two first.
    tiny, lift = np.finfo(real).tiny, real(2.0 ** (mantissa + 2))
    unlift, infinity, nan = real(mantissa + 2), real(np.inf), real(np.nan)

    def horner(coefficients: tuple[float, ...]) -> Any:
        """The polynomial as one expression: a loop over a tuple would compile slowly."""
        scope: dict[str, Any] = {f"c{i}": real(c) for i, c in enumerate(coefficients)}
        text = "c0"
        for i in range(1, len(coefficients)):
            text = f"fma({text}, x, c{i})"
        exec(f"def polynomial(x):\n    return {text}", scope | {"fma": fused}, scope)
        scope["polynomial"].__globals__.update(scope)
        return _jit(scope["polynomial"])

    exp_polynomial, log_polynomial = horner(_EXP[dtype]), horner(_LOG[dtype])
    erf_polynomial, mills_polynomial = horner(_ERF[dtype]), horner(_MILLS[dtype])

    @_jit
    def product(a, b):
        return rounded_product(a, b)

    @_jit
    def product_low(a, b):
        return fused(a, b, -rounded_product(a, b))

    @_jit
    def maximum(a, b):
        return select((a <= b) | (b != b), b, a)

    @_jit
    def minimum(a, b):
        return select((b <= a) | (b != b), b, a)

    @_jit
    def reduced(hi, lo):
        """n (shifted) and e^r - 1, with hi + lo = n ln2 + r."""
        shifted = fused(hi, log2e, magic)
        n = shifted - magic
        r = fused(-n, ln2_tail, fused(-n, ln2_head, hi)) + lo
        return shifted, fused(r * r, exp_polynomial(r), r)

    @_jit
    def scaled_exp(factor, hi, lo):
        hi = select(hi < exp_low, exp_low, select(hi > exp_high, exp_high, hi))
        shifted, p = reduced(hi, lo)
        s1, s2 = two_powers_of_two(shifted)
        return ((factor + factor * p) * s1) * s2

    @_jit
    def exp(x):
        return scaled_exp(one, x, zero)

    @_jit
    def decay(hi, lo):
        """e^-|hi + lo| as 2^n m: n (shifted), m, and 2^n m (flushed to 0 where subnormal)."""
        size = -absolute(hi)
        toward = select(hi < zero, lo, -lo)
        size = select(size < exp_low, exp_low, size)
        shifted, p = reduced(size, toward)
        m = one + p
        s1, s2 = two_powers_of_two(shifted)
        return m, s1, s2, m * s1 * s2

    @_jit
    def scaled_sigmoid(factor, hi, lo):
        m, s1, s2, e = decay(hi, lo)
        negative = hi < zero
        ratio = factor * select(negative, m, one) / (one + e)
        return ratio * select(negative, s1, one) * select(negative, s2, one)

    @_jit
    def sigmoid(x):
        return scaled_sigmoid(one, x, zero)

    @_jit
    def scaled_bell(factor, hi, lo):
        m, s1, s2, e = decay(hi, lo)
        d = one + e
        return factor * m / (d * d) * s1 * s2

    @_jit
    def tanh(x):
        y = absolute(x)
        y = select(y > tanh_end, tanh_end, y)
        shifted, p = reduced(-two * y, zero)
        s = power_of_two(shifted)
        em = fused(s, p, s - one)  # e^-2|x| - 1, exact near 0
        return copy_sign(em / (two + em), x)

    @_jit
    def log_of(f, k, correction):
        """k ln2 + log(1 + f) + correction."""
        s = f / (two + f)
        z = s * s
        square = half * f * f
        inner = fused(s, square + z * log_polynomial(z), fused(k, ln2_tail, correction))
        return fused(k, ln2_head, f - (square - inner))

    @_jit
    def log(x):
        small = x < tiny
        k, scale = exponent_and_scale(select(small, x * lift, x))
        f = select(small, x * lift, x) * scale - one
        value = log_of(f, k - select(small, unlift, zero), zero)
        value = select(x == zero, -infinity, select(x < zero, nan, value))
        return select(x < infinity, value, x)  # infinity and NaN

    @_jit
    def log1p(x):
        u = one + x
        k, scale = exponent_and_scale(u)
        f = fused(x, scale, scale - one)  # (1 + x) 2^-k - 1: x itself where k is 0
        value = log_of(f, k, zero)
        value = select(u == zero, -infinity, select(u < zero, nan, value))
        return select(x < infinity, select(x == zero, x, value), x)

    @_jit
    def mills(y):
        """Phi(-y) / e^(-y^2/2) for y >= 0."""
        return mills_polynomial((y - five) / (y + five)) / (one + y)

    @_jit
    def normal_tail(factor, y):
        """factor * Phi(-y) for y >= 0."""
        y = select(y > mills_end, mills_end, y)
        return scaled_exp(factor * mills(y), -half * product(y, y), -half * product_low(y, y))

    @_jit
    def scaled_normal_cdf(factor, x):
        positive = x > zero
        tail = normal_tail(select(positive, one, factor), absolute(x))
        return select(positive, factor * (one - tail), tail)

    @_jit
    def erf(x):
        y = absolute(x)
        near = fused(x, erf_polynomial(x * x), x)
        far = copy_sign(one - two * normal_tail(one, y * root_two), x)
        return select(y < one, near, far)

    return SimpleNamespace(
        abs=absolute, sqrt=square_root, copysign=copy_sign, fma=fused, where=select, both=both,
        either=either, negation=negation, product=product, product_low=product_low,
        maximum=maximum, minimum=minimum, exp=exp, log=log, log1p=log1p, tanh=tanh,
        sigmoid=sigmoid, erf=erf, scaled_exp=scaled_exp, scaled_sigmoid=scaled_sigmoid,
        scaled_bell=scaled_bell, scaled_normal_cdf=scaled_normal_cdf,
    )  # fmt: skip


# --- printing -----------------------------------------------------------------------------------
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}


def _literal(payload: Any, dtype: str) -> Any:
    """A constant rounded to `dtype` once (through float64 it could be rounded twice)."""
    real = np.dtype(dtype).type
    if dtype == "float64" or not isinstance(payload, Fraction):
        return real(payload)
    near = np.float32(float(payload))
    if not np.isfinite(near):
        return near
    around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    # nearest, ties to even: the last bit of an even float32 is 0
    return min(
        (c for c in around if np.isfinite(c)),
        key=lambda c: (abs(Fraction(float(c)) - payload), int(c.view(np.int32)) & 1),
    )


def render(exprs: tuple[Expr, ...], dtype: str, name: str = "formula") -> tuple[str, dict[str, Any]]:
    """The graphs as the text of one Python function, and the constants that it names."""
    constants: dict[str, Any] = {}
    names: dict[Expr, str] = {}
    lines = []
    for e in topological(exprs):
        if e.op == "x":
            names[e] = "x"
        elif e.op == "const":
            names[e] = f"c{len(constants)}"
            constants[names[e]] = _literal(e.payload, dtype)
        else:
            args = [names[a] for a in e.args]
            sign = _INFIX.get(e.op)
            if sign is not None:
                text = f"{args[0]} {sign} {args[1]}"
            elif e.op == "neg":
                text = f"-{args[0]}"
            else:
                text = f"{e.op}({', '.join(args)})"
            names[e] = f"t{len(lines)}"
            lines.append(f"    {names[e]} = {text}")
    result = ", ".join(names[e] for e in exprs)
    return "\n".join([f"def {name}(x):", *lines, f"    return {result}", ""]), constants


@functools.cache
def _own_text() -> bytes:
    return pathlib.Path(__file__).read_bytes()


_FUNCTIONS: dict[tuple[str, str], Any] = {}


def scalar_function(exprs: tuple[Expr, ...], dtype: str) -> Any:
    """The graphs as one Numba function of a scalar, inlined wherever it is called.

    Parameters
    ----------
    exprs : tuple of Expr
        One for a scalar result, several for a tuple of results that share what they can.
    dtype : {"float32", "float64"}
        The type of the argument, of every operation and of the results.

    Returns
    -------
    numba dispatcher
        Branch-free; ``numfuse_key`` is the digest of its text, its dtype and this file.
    """
    if dtype not in _EXP:
        raise TypeError(f"expected dtype 'float32' or 'float64', got {dtype!r}")
    known = _FUNCTIONS.get((dumps(exprs), dtype))
    if known is not None:
        return known
    text, constants = render(exprs, dtype)
    material = f"{dtype}\n{constants}\n{text}".encode() + _own_text()
    scope: dict[str, Any] = {**vars(primitives(dtype)), **constants}
    exec(compile(text, f"<numfuse {dtype} formula>", "exec"), scope)
    made = _jit(scope["formula"])
    made.numfuse_key = hashlib.sha256(material).hexdigest()
    return _FUNCTIONS.setdefault((dumps(exprs), dtype), made)


def device_function(expr: Expr, name: str) -> Callable[..., Any]:
    """The graph as a Numba function for float32 and float64 scalars (integers become float64)."""

    def stub(x):  # type: ignore[no-untyped-def]
        raise NotImplementedError  # Numba replaces it by the function that its overload picks

    @overload(stub, inline="never", jit_options=_OPTIONS)
    def pick(x):  # type: ignore[no-untyped-def]
        if isinstance(x, types.Float):
            function = scalar_function((expr,), f"float{x.bitwidth}")
            return lambda x: function(x)
        if isinstance(x, (types.Integer, types.Boolean)):
            function = scalar_function((expr,), "float64")
            return lambda x: function(np.float64(x))
        return None

    def call(x):  # type: ignore[no-untyped-def]
        return stub(x)

    call.__name__ = call.__qualname__ = name
    return _jit(call)
