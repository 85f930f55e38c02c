"""The operations of `numfuse.expr` as branch-free Numba functions, and the printing of a formula.

Every primitive is straight-line code of adds, products, fmas and selects, without a call of libm,
so that LLVM turns a plain loop over it into vector code (Numba's wheels have no SVML). Integer work
on the bits of a float is in a few intrinsics, as Numba promotes int32 arithmetic to int64. The
method of each is told in `numfuse.coefficients`.

Nothing here has fast-math flags: a product is merged with a sum where the text says so (`fused`),
and nowhere else. LLVM would do it where a product has no other use, which depends on what is
computed beside it: a derivative would have other bits alone than together with its value.
"""

# A Numba function has no annotations, and a call of an intrinsic leaves out its first argument.
# mypy: disable-error-code="no-untyped-def, call-arg, unreachable, var-annotated, arg-type"
from __future__ import annotations

import functools
import hashlib
import math
import pathlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from numfuse import coefficients
from numfuse.coefficients import (
    ERF,
    EXP,
    EXP_RANGE,
    GROWTH_END,
    GROWTH_FACTOR,
    GROWTH_SHIFT,
    LN2,
    LOG,
    MILLS,
    MILLS_END,
    TANH_END,
)
from numfuse.expr import Expr, constant, dumps, node, rounded, topological
from numfuse.ranges import Range, ranges

__all__ = ["device_function", "primitives", "render", "scalar_function"]

# An option that is left out would be the caller's: a kernel has fast-math flags.
_OPTIONS: dict[str, Any] = {"forceinline": True, "error_model": "numpy", "fastmath": False}
_jit = njit(**_OPTIONS)


# --- intrinsics ---------------------------------------------------------------------------------
def _llvm(bits: int) -> tuple[Any, Any, int, int]:
    """Float type, integer type, mantissa bits and exponent bias of a float of `bits` bits."""
    if bits == 32:
        return ir.FloatType(), ir.IntType(32), 23, 127
    return ir.DoubleType(), ir.IntType(64), 52, 1023


def _named(name: str, operands: int) -> Any:
    """An LLVM intrinsic of `operands` floats of one type."""

    def typed(x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            ty = args[0].type
            function = builder.module.declare_intrinsic(
                name, [ty], ir.FunctionType(ty, [ty] * operands)
            )
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


rounded_product.numfuse_key = "rounded_product"  # type: ignore[attr-defined]


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
def raised_exponent(typingctx: Any, shifted: Any) -> Any:
    """2^(k - bias), k > 0 the low bits of ``k + 1.5 * 2^mantissa``: one shift drops the others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, _ = _llvm(signature.return_type.bitwidth)
        return builder.bitcast(
            builder.shl(builder.bitcast(args[0], integer), integer(mantissa)), real
        )

    return shifted(shifted), codegen


@intrinsic
def toward(typingctx: Any, low: Any, high: Any) -> Any:
    """`low`, its sign turned where `high` is negative: the low word of abs(high + low)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, _, _ = _llvm(signature.return_type.bitwidth)
        sign = integer(1 << (integer.width - 1))
        low, high = (builder.bitcast(a, integer) for a in args)
        return builder.bitcast(builder.xor(low, builder.and_(high, sign)), real)

    return low(low, low), codegen


@intrinsic
def two_powers_of_two(typingctx: Any, shifted: Any) -> Any:
    """Two normal numbers whose product is 2^n, n from -2 * bias to 2 * bias."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
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
def exponent_parts(typingctx: Any, u: Any) -> Any:
    """(k, m, 2^(2 - k)) with u = 2^k m, m from sqrt(1/2) to sqrt(2); u normal, k above -125.

    2^-k itself is subnormal for the largest u.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        real, integer, mantissa, bias = _llvm(signature.args[0].bitwidth)
        root = 0x3F3504F3 if mantissa == 23 else 0x3FE6A09E667F3BCD
        shift = integer(mantissa)
        bits = builder.bitcast(args[0], integer)
        k = builder.ashr(builder.sub(bits, integer(root)), shift)
        m = builder.sub(bits, builder.shl(k, shift))
        scale = builder.shl(builder.sub(integer(bias + 2), k), shift)
        parts = [builder.sitofp(k, real), builder.bitcast(m, real), builder.bitcast(scale, real)]
        return context.make_tuple(builder, signature.return_type, parts)

    return types.UniTuple(u, 3)(u), codegen


# --- primitives ---------------------------------------------------------------------------------
@functools.cache
def primitives(dtype: str) -> SimpleNamespace:
    """The primitives of one dtype ("float32" or "float64"), by the names of `numfuse.expr`."""
    real = np.dtype(dtype).type
    mantissa = 23 if dtype == "float32" else 52
    zero, quarter, half, one, two, five = (real(v) for v in (0.0, 0.25, 0.5, 1.0, 2.0, 5.0))
    magic, log2e = real(1.5 * 2.0**mantissa), real(math.log2(math.e))
    ln2_head, ln2_tail = (real(v) for v in LN2[dtype])
    exp_low, exp_high = real(-EXP_RANGE[dtype][0]), real(EXP_RANGE[dtype][1])
    mills_end, tanh_end, root_two = (
        real(v) for v in (MILLS_END[dtype], TANH_END[dtype], math.sqrt(2.0))
    )
    share = real(0.96)
    growth_end, sigma = real(GROWTH_END[dtype]), real(2.0 ** -GROWTH_SHIFT[dtype])
    # Adds the exponent's bias and the shift to n, where `raised_exponent` finds them.
    bias = 127 if dtype == "float32" else 1023
    growth_magic = real(1.5 * 2.0**mantissa + bias - GROWTH_SHIFT[dtype])
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

    def paired(coefficients: tuple[float, ...]) -> Any:
        """polynomial(x, x * x): the same number of fmas, in a chain that is half as long."""
        values = [real(c) for c in coefficients]
        names = [f"c{i}" for i in range(len(values))]
        scope: dict[str, Any] = dict(zip(names, values, strict=True)) | {"fma": fused}
        first = names.pop(0) if len(names) % 2 else f"fma({names.pop(0)}, x, {names.pop(0)})"
        for odd, even in zip(names[::2], names[1::2], strict=True):
            first = f"fma({first}, square, fma({odd}, x, {even}))"
        exec(f"def polynomial(x, square):\n    return {first}", scope)
        return _jit(scope["polynomial"])

    exp_polynomial, log_polynomial = paired(EXP[dtype]), horner(LOG[dtype])
    erf_polynomial, mills_polynomial = horner(ERF[dtype]), horner(MILLS[dtype])

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
    def exp_less_one(r):
        square = r * r
        return fused(square, exp_polynomial(r, square), r)

    @_jit
    def reduced(hi, lo):
        """n (shifted) and e^r - 1, with hi + lo = n ln2 + r."""
        shifted = fused(hi, log2e, magic)
        n = shifted - magic
        # The small words first: r is rounded once.
        r = fused(-n, ln2_head, hi) + fused(-n, ln2_tail, lo)
        return shifted, exp_less_one(r)

    @_jit
    def plain_reduced(x):
        """The same without a low word."""
        shifted = fused(x, log2e, magic)
        n = shifted - magic
        r = fused(-n, ln2_tail, fused(-n, ln2_head, x))
        return shifted, exp_less_one(r)

    @_jit
    def exp_range(x):
        return select(x < exp_low, exp_low, select(x > exp_high, exp_high, x))

    @_jit
    def exp_of(factor, parts):
        shifted, p = parts
        s1, s2 = two_powers_of_two(shifted)
        return (fused(factor, p, factor) * s1) * s2

    @_jit
    def scaled_exp(factor, hi, lo):
        return exp_of(factor, reduced(exp_range(hi), lo))

    @_jit
    def plain_exp(factor, x):
        return exp_of(factor, plain_reduced(exp_range(x)))

    @_jit
    def exp(x):
        return plain_exp(one, x)

    @_jit
    def decay_range(hi):
        size = -absolute(hi)
        return select(size < exp_low, exp_low, size)

    @_jit
    def decay_of(parts):
        """e^-y = (1 + p) s1 s2 and 1 + e^-y with its rounding error, y >= 0."""
        shifted, p = parts
        s1, s2 = two_powers_of_two(shifted)
        # One rounding where it matters: 1 + s is exact, or s too small to count.
        s = s1 * s2
        d = fused(s, p, one + s)
        return p, s1, s2, d, fused(s, p, (one + s) - d)

    @_jit
    def decay(hi, lo):
        return decay_of(reduced(decay_range(hi), select(hi < zero, lo, -lo)))

    @_jit
    def plain_decay(x):
        return decay_of(plain_reduced(decay_range(x)))

    @_jit
    def sigmoid_of(factor, below, parts):
        """factor * s(-y) where `below`, else factor * s(y), from the parts of e^-y, y >= 0."""
        p, s1, s2, d, d_low = parts
        # The numerator takes up what the denominator lost: (1 + p) d_low / d of it.  d is near 1
        # where that matters (results just below a power of two), and a fixed share is cheaper than
        # a division.  Largest error in float32: 2.7 ULP for x s(v(x)) of gelu without it, 2.1 with
        # it; a share without the factor 1 + p leaves 2.3.  An infinite factor stays as it is.
        p = fused(-fused(share, p, share), d_low, p)
        ratio = select(below, fused(factor, p, factor), factor) / d
        ratio = select(below, ratio * s1, ratio)
        return select(below, ratio * s2, ratio)

    @_jit
    def scaled_sigmoid(factor, hi, lo):
        return sigmoid_of(factor, hi < zero, decay(hi, lo))

    @_jit
    def plain_sigmoid(factor, x):
        return sigmoid_of(factor, x < zero, plain_decay(x))

    # s(-v) by the same e^-|v| as s(v): where a formula has both, there is one exponential.

    @_jit
    def scaled_complement(factor, hi, lo):
        return sigmoid_of(factor, hi >= zero, decay(hi, lo))

    @_jit
    def plain_complement(factor, x):
        return sigmoid_of(factor, x >= zero, plain_decay(x))

    @_jit
    def sigmoid(x):
        return plain_sigmoid(one, x)

    # Where the factor is known to be small, everything comes from g = sigma (1 + e^y), y >= 0, and
    # from 1 / g: s(-y) is sigma / g, and s(y) is 1 less that. sigma, a power of two, keeps g, 1 / g
    # and a factor times 1 / g normal numbers to the very end of the tail: the last step alone meets
    # a subnormal number (which costs a processor a hundred cycles and more). The numerator is
    # exact, and e^y and 1 + e^y are not rounded at their worst together: 1.9 ULP.

    @_jit
    def growth_of(shifted, p):
        s = raised_exponent(shifted)
        t = s + sigma
        # What t lost: nothing, or all of sigma where s is 2^24 (2^53) of it and more.  The product
        # by a power of two is exact where it is nothing: one rounding.  2.7 ULP without it.
        lost = select(t == s, sigma, zero)
        return t + fused(s, p, lost)

    @_jit
    def growth(hi, lo):
        hi = select(hi > growth_end, growth_end, hi)
        shifted = fused(hi, log2e, growth_magic)
        n = shifted - growth_magic
        r = fused(-n, ln2_head, hi) + fused(-n, ln2_tail, lo)
        return growth_of(shifted, exp_less_one(r))

    @_jit
    def plain_growth(x):
        x = select(x > growth_end, growth_end, x)
        shifted = fused(x, log2e, growth_magic)
        n = shifted - growth_magic
        r = fused(-n, ln2_tail, fused(-n, ln2_head, x))
        return growth_of(shifted, exp_less_one(r))

    @_jit
    def quotient(factor, inverse, g):
        """factor / g, rounded as a division would (Markstein 1990), `inverse` being 1 / g.

        As long as the remainder does not underflow: a factor below 2^-100 (2^-970) needs a g that
        is a power of two, which it is where factor and argument are 0 together.
        """
        q = factor * inverse
        return fused(fused(-q, g, factor), inverse, q)

    @_jit
    def unscaled(q):
        return q * sigma

    @_jit
    def less_unscaled(value, q):
        return fused(-q, sigma, value)

    @_jit
    def bell_of(factor, parts):
        p, s1, s2, d, _ = parts
        return fused(factor, p, factor) / (d * d) * s1 * s2

    @_jit
    def scaled_bell(factor, hi, lo):
        return bell_of(factor, decay(hi, lo))

    @_jit
    def plain_bell(factor, x):
        return bell_of(factor, plain_decay(x))

    @_jit
    def tanh(x):
        y = absolute(x)
        y = select(y > tanh_end, tanh_end, y)
        shifted, p = plain_reduced(-two * y)
        s = power_of_two(shifted)
        em = fused(s, p, s - one)  # e^-2|x| - 1, exact near 0
        d = fused(s, p, one + s)
        # Where both are near 1 in size, it takes up all of what the denominator lost: 1.9 ULP, and
        # 2.4 without it.  Near 0 that would add more error than it takes.
        d_low = select(y > one, fused(s, p, (one + s) - d), zero)
        return copy_sign((em + d_low) / d, x)

    @_jit
    def log_of(f, k, correction):
        """k ln2 + log(1 + f) + correction."""
        s = f / (two + f)
        z = s * s
        square = half * f * f
        inner = fused(s, fused(z, log_polynomial(z), square), fused(k, ln2_tail, correction))
        return fused(k, ln2_head, f - (square - inner))

    @_jit
    def log(x):
        small = x < tiny
        k, m, _ = exponent_parts(select(small, x * lift, x))
        value = log_of(m - one, k - select(small, unlift, zero), zero)
        value = select(x == zero, -infinity, select(x < zero, nan, value))
        return select(x < infinity, value, x)  # infinity and NaN

    @_jit
    def log1p(x):
        u = one + x
        k, _, scale = exponent_parts(u)
        # (1 + x) 2^-k - 1: x itself where k is 0
        f = fused(x, quarter * scale, quarter * scale - one)
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
        far = copy_sign(fused(-two, normal_tail(one, y * root_two), one), x)
        return select(y < one, near, far)

    return SimpleNamespace(
        abs=absolute, sqrt=square_root, copysign=copy_sign, fma=fused, where=select, both=both,
        either=either, negation=negation, product=product, product_low=product_low,
        maximum=maximum, minimum=minimum, exp=exp, log=log, log1p=log1p, tanh=tanh,
        sigmoid=sigmoid, erf=erf, scaled_exp=scaled_exp, scaled_sigmoid=scaled_sigmoid,
        scaled_bell=scaled_bell, scaled_normal_cdf=scaled_normal_cdf, plain_exp=plain_exp,
        plain_sigmoid=plain_sigmoid, plain_bell=plain_bell, plain_complement=plain_complement,
        scaled_complement=scaled_complement, growth=growth, plain_growth=plain_growth,
        quotient=quotient, unscaled=unscaled, less_unscaled=less_unscaled, toward=toward,
    )  # fmt: skip


# --- printing -----------------------------------------------------------------------------------
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
}


def _lowered(op: str, args: list[Expr]) -> Expr:
    """A node as the primitives here have it."""
    if op == "sub" and args[1].op == "unscaled":
        return node("less_unscaled", args[0], args[1].args[0])
    if op in ("add", "sub"):
        # a * b + c is one fma wherever it occurs, whatever else uses the product.
        for at, other in ((0, 1), (1, 0)):
            if args[at].op == "mul":
                a, b = args[at].args
                c = args[other]
                if op == "sub":
                    a, c = (a, node("neg", c)) if at == 0 else (node("neg", a), c)
                return node("fma", a, b, c)
    if op not in ("scaled_exp", "scaled_sigmoid", "scaled_bell"):
        return node(op, *args)
    factor, hi, lo = args
    kind = op.removeprefix("scaled")
    plain = lo is constant(0)
    if kind == "_sigmoid" and hi.op == "neg" and (plain or lo.op == "neg"):
        kind, hi, lo = "_complement", hi.args[0], lo if plain else lo.args[0]
    if plain:
        return node(f"plain{kind}", factor, hi)
    return node(f"scaled{kind}", factor, hi, lo)


def _shared(op: str, args: list[Expr], high: Range) -> Expr:
    """A sigmoid or bell with a small factor, made of nodes that all of one argument share."""
    factor, hi, lo = args
    plain = lo is constant(0)
    if high[1] <= 0 and hi.op == "neg":
        size, low = hi.args[0], lo.args[0] if lo.op == "neg" else node("neg", lo)
    elif high[0] >= 0:
        size, low = hi, lo
    else:
        size, low = node("abs", hi), node("toward", lo, hi)
    g = node("plain_growth", size) if plain else node("growth", size, low)
    inverse = node("div", 1, g)
    if op == "scaled_bell":
        rise = node("less_unscaled", 1, inverse)
        return node("unscaled", node("mul", node("mul", factor, rise), inverse))
    q = inverse if factor is constant(1) else node("quotient", factor, inverse, g)
    below, above = node("unscaled", q), node("less_unscaled", factor, q)
    if high[0] >= 0:
        return above
    return below if high[1] <= 0 else node("where", node("lt", hi, 0), below, above)


def _divided(exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The graphs with a division for each quotient that is the only use of its inverse.

    The bits are the same (see `quotient`); a lone division has three instructions less.
    """
    order = topological(exprs)
    uses = Counter(a for e in order for a in e.args)
    made: dict[Expr, Expr] = {}
    for e in order:
        args = [made[a] for a in e.args]
        if e.op == "quotient" and uses[e.args[1]] == 1:
            made[e] = node("div", args[0], args[2])
        else:
            made[e] = node(e.op, *args) if args else e
    return tuple(made[e] for e in exprs)


def lowered(exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The graphs with every node as the primitives here have it."""
    made: dict[Expr, Expr] = {}
    known = ranges(exprs)
    for e in topological(exprs):
        op, args, old = e.op, [made[a] for a in e.args], e.args
        if op == "sigmoid":
            one, zero = constant(1), constant(0)
            op, args, old = "scaled_sigmoid", [one, *args, zero], (one, *old, zero)
        factor = known.get(old[0], (1.0, 1.0)) if old else None
        if op in ("scaled_sigmoid", "scaled_bell") and max(map(abs, factor)) <= GROWTH_FACTOR:
            made[e] = _shared(op, args, known[old[1]])
        else:
            made[e] = _lowered(op, args) if args else e
    return _divided(tuple(made[e] for e in exprs))


def render(
    exprs: tuple[Expr, ...], dtype: str, name: str = "formula"
) -> tuple[str, dict[str, Any]]:
    """The graphs as the text of one Python function, and the constants that it names."""
    constants: dict[str, Any] = {}
    names: dict[Expr, str] = {}
    lines: list[str] = []
    exprs = lowered(exprs)
    for e in topological(exprs):
        if e.op == "x":
            names[e] = "x"
        elif e.op == "const":
            names[e] = f"c{len(constants)}"
            constants[names[e]] = rounded(e, dtype)
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
    return b"".join(pathlib.Path(f).read_bytes() for f in (__file__, coefficients.__file__))


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
        Branch-free; ``numfuse_key`` is the digest of its text, its dtype, this file
        and the coefficients.
    """
    if dtype not in EXP:
        raise TypeError(f"expected dtype 'float32' or 'float64', got {dtype!r}")
    key = dumps(exprs), dtype
    known = _FUNCTIONS.get(key)
    if known is not None:
        return known
    text, constants = render(exprs, dtype)
    material = f"{dtype}\n{constants}\n{text}".encode() + _own_text()
    scope: dict[str, Any] = {**vars(primitives(dtype)), **constants}
    exec(compile(text, f"<numfuse {dtype} formula>", "exec"), scope)
    made = _jit(scope["formula"])
    made.numfuse_key = hashlib.sha256(material).hexdigest()
    return _FUNCTIONS.setdefault(key, made)


def device_function(expr: Expr, name: str) -> Callable[..., Any]:
    """The graph as a Numba function for float32 and float64 scalars (integers become float64)."""

    def stub(x):
        raise NotImplementedError  # Numba replaces it by the function that its overload picks

    @overload(stub, inline="never", jit_options=_OPTIONS)
    def pick(x):
        if isinstance(x, types.Float):
            function = scalar_function((expr,), f"float{x.bitwidth}")
            return lambda x: function(x)
        if isinstance(x, (types.Integer, types.Boolean)):
            function = scalar_function((expr,), "float64")
            return lambda x: function(np.float64(x))
        return None

    def call(x):
        return stub(x)

    call.__name__ = call.__qualname__ = name
    return _jit(call)
