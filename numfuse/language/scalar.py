"""The operations of `numfuse.expr` as branch-free scalar functions, and the printing of a formula.

For every target that compiles Python: a target brings its decorator and a dozen intrinsics
(:class:`Target`), and the arithmetic is the same, so that a formula gives the same bits on each.
Every primitive is straight-line code of adds, products, fmas and selects. The method of each is
told in `numfuse.language.coefficients`.

Nothing here has fast-math flags: a product is merged with a sum where the text says so (`fused`),
and nowhere else. A compiler would do it where a product has no other use, which depends on what is
computed beside it: a derivative would have other bits alone than together with its value.
"""

# A compiled function has no annotations.
# mypy: disable-error-code="no-untyped-def, arg-type"
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from numfuse.expr import Expr, constant, node, rounded, topological
from numfuse.language.bounds import Range, ranges
from numfuse.language.coefficients import (
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
from numfuse.language.graph import expand

__all__ = ["Target", "primitives", "render"]


@dataclass(frozen=True)
class Target:
    """The intrinsics that a compiler of Python brings: each a function of scalars of one type."""

    #: Decorates a function that is inlined wherever it is called.
    jit: Callable[[Any], Any]
    absolute: Any
    square_root: Any
    copy_sign: Any
    #: a * b + c, rounded once
    fused: Any
    #: a * b, never merged with a sum
    rounded_product: Any
    #: a where the condition holds, else b
    select: Any
    both: Any
    either: Any
    negation: Any
    #: 2^n for a normal result, n the low bits of ``n + 1.5 * 2^mantissa``
    power_of_two: Any
    #: 2^(k - bias), k > 0 the low bits of ``k + 1.5 * 2^mantissa``
    raised_exponent: Any
    #: two normal numbers whose product is 2^n, n as above, from -2 * bias to 2 * bias
    two_powers_of_two: Any
    #: (k, m, 2^(2 - k)) of a normal u = 2^k m, m from sqrt(1/2) to sqrt(2), k above -125
    exponent_parts: Any
    #: the first argument, its sign turned where the second is negative
    toward: Any
    #: {dtype: 1 / g, rounded correctly, of a normal g with a normal inverse}; by a division where
    #: there is none
    inverses: Mapping[str, Any] | None = None


# --- primitives ---------------------------------------------------------------------------------
def primitives(dtype: str, target: Target) -> SimpleNamespace:
    """The primitives of one dtype ("float32" or "float64"), by the names of `numfuse.expr`."""
    jit, select, fused, rounded_product = (
        target.jit,
        target.select,
        target.fused,
        target.rounded_product,
    )
    absolute, square_root, copy_sign = target.absolute, target.square_root, target.copy_sign
    power_of_two, raised_exponent = target.power_of_two, target.raised_exponent
    two_powers_of_two, exponent_parts = target.two_powers_of_two, target.exponent_parts
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
        return jit(scope["polynomial"])

    def paired(coefficients: tuple[float, ...]) -> Any:
        """polynomial(x, x * x): the same number of fmas, in a chain that is half as long."""
        values = [real(c) for c in coefficients]
        names = [f"c{i}" for i in range(len(values))]
        scope: dict[str, Any] = dict(zip(names, values, strict=True)) | {"fma": fused}
        first = names.pop(0) if len(names) % 2 else f"fma({names.pop(0)}, x, {names.pop(0)})"
        for odd, even in zip(names[::2], names[1::2], strict=True):
            first = f"fma({first}, square, fma({odd}, x, {even}))"
        exec(f"def polynomial(x, square):\n    return {first}", scope)
        return jit(scope["polynomial"])

    exp_polynomial, log_polynomial = paired(EXP[dtype]), horner(LOG[dtype])
    erf_polynomial, mills_polynomial = horner(ERF[dtype]), horner(MILLS[dtype])

    @jit
    def finite(x):
        return select(absolute(x) < infinity, x, zero)

    @jit
    def product(a, b):
        return rounded_product(a, b)

    @jit
    def product_low(a, b):
        return fused(a, b, -rounded_product(a, b))

    @jit
    def maximum(a, b):
        return select((a <= b) | (b != b), b, a)

    @jit
    def minimum(a, b):
        return select((b <= a) | (b != b), b, a)

    @jit
    def exp_less_one(r):
        square = r * r
        return fused(square, exp_polynomial(r, square), r)

    @jit
    def reduced(hi, lo):
        """n (shifted) and e^r - 1, with hi + lo = n ln2 + r."""
        shifted = fused(hi, log2e, magic)
        n = shifted - magic
        # The small words first: r is rounded once.
        r = fused(-n, ln2_head, hi) + fused(-n, ln2_tail, lo)
        return shifted, exp_less_one(r)

    @jit
    def plain_reduced(x):
        """Return n (shifted) and e^r - 1, with x = n ln2 + r: `reduced` without a low word."""
        shifted = fused(x, log2e, magic)
        n = shifted - magic
        r = fused(-n, ln2_tail, fused(-n, ln2_head, x))
        return shifted, exp_less_one(r)

    @jit
    def exp_range(x):
        return select(x < exp_low, exp_low, select(x > exp_high, exp_high, x))

    @jit
    def exp_of(factor, parts):
        shifted, p = parts
        s1, s2 = two_powers_of_two(shifted)
        return (fused(factor, p, factor) * s1) * s2

    @jit
    def scaled_exp(factor, hi, lo):
        return exp_of(factor, reduced(exp_range(hi), lo))

    @jit
    def plain_exp(factor, x):
        return exp_of(factor, plain_reduced(exp_range(x)))

    @jit
    def exp(x):
        return plain_exp(one, x)

    @jit
    def decay_range(hi):
        size = -absolute(hi)
        return select(size < exp_low, exp_low, size)

    @jit
    def decay_of(parts):
        """e^-y = (1 + p) s1 s2 and 1 + e^-y with its rounding error, y >= 0."""
        shifted, p = parts
        s1, s2 = two_powers_of_two(shifted)
        # One rounding where it matters: 1 + s is exact, or s too small to count.
        s = s1 * s2
        d = fused(s, p, one + s)
        return p, s1, s2, d, fused(s, p, (one + s) - d)

    @jit
    def decay(hi, lo):
        return decay_of(reduced(decay_range(hi), select(hi < zero, lo, -lo)))

    @jit
    def plain_decay(x):
        return decay_of(plain_reduced(decay_range(x)))

    @jit
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

    @jit
    def scaled_sigmoid(factor, hi, lo):
        return sigmoid_of(factor, hi < zero, decay(hi, lo))

    @jit
    def plain_sigmoid(factor, x):
        return sigmoid_of(factor, x < zero, plain_decay(x))

    # s(-v) by the same e^-|v| as s(v): where a formula has both, there is one exponential.

    @jit
    def scaled_complement(factor, hi, lo):
        return sigmoid_of(factor, hi >= zero, decay(hi, lo))

    @jit
    def plain_complement(factor, x):
        return sigmoid_of(factor, x >= zero, plain_decay(x))

    @jit
    def sigmoid(x):
        return plain_sigmoid(one, x)

    # Where the factor is known to be small, everything comes from g = sigma (1 + e^y), y >= 0, and
    # from 1 / g: s(-y) is sigma / g, and s(y) is 1 less that. sigma, a power of two, keeps g, 1 / g
    # and a factor times 1 / g normal numbers to the very end of the tail: the last step alone meets
    # a subnormal number (which costs a processor a hundred cycles and more). The numerator is
    # exact, and e^y and 1 + e^y are not rounded at their worst together: 1.9 ULP.

    @jit
    def growth_of(shifted, p):
        s = raised_exponent(shifted)
        t = s + sigma
        # What t lost: nothing, or all of sigma where s is 2^24 (2^53) of it and more.  The product
        # by a power of two is exact where it is nothing: one rounding.  2.7 ULP without it.
        lost = select(t == s, sigma, zero)
        return t + fused(s, p, lost)

    @jit
    def growth(hi, lo):
        hi = select(hi > growth_end, growth_end, hi)
        shifted = fused(hi, log2e, growth_magic)
        n = shifted - growth_magic
        r = fused(-n, ln2_head, hi) + fused(-n, ln2_tail, lo)
        return growth_of(shifted, exp_less_one(r))

    @jit
    def plain_growth(x):
        x = select(x > growth_end, growth_end, x)
        shifted = fused(x, log2e, growth_magic)
        n = shifted - growth_magic
        r = fused(-n, ln2_tail, fused(-n, ln2_head, x))
        return growth_of(shifted, exp_less_one(r))

    @jit
    def quotient(factor, inverse, g):
        """factor / g, rounded as a division would (Markstein 1990), `inverse` being 1 / g.

        As long as the remainder does not underflow: a factor below 2^-100 (2^-970) needs a g that
        is a power of two, which it is where factor and argument are 0 together.
        """
        q = factor * inverse
        return fused(fused(-q, g, factor), inverse, q)

    inverse = (target.inverses or {}).get(dtype)
    if inverse is not None:

        @jit
        def ratio(a, g):
            return quotient(a, inverse(g), g)

    else:

        @jit
        def inverse(g):
            return one / g

        @jit
        def ratio(a, g):
            return a / g

    @jit
    def unscaled(q):
        return q * sigma

    @jit
    def less_unscaled(value, q):
        return fused(-q, sigma, value)

    @jit
    def bell_of(factor, parts):
        p, s1, s2, d, _ = parts
        return fused(factor, p, factor) / (d * d) * s1 * s2

    @jit
    def scaled_bell(factor, hi, lo):
        return bell_of(factor, decay(hi, lo))

    @jit
    def plain_bell(factor, x):
        return bell_of(factor, plain_decay(x))

    @jit
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
        return copy_sign(ratio(em + d_low, d), x)

    @jit
    def log_of(f, k, correction):
        """k ln2 + log(1 + f) + correction."""
        s = f / (two + f)
        z = s * s
        square = half * f * f
        inner = fused(s, fused(z, log_polynomial(z), square), fused(k, ln2_tail, correction))
        return fused(k, ln2_head, f - (square - inner))

    @jit
    def log(x):
        small = x < tiny
        k, m, _ = exponent_parts(select(small, x * lift, x))
        value = log_of(m - one, k - select(small, unlift, zero), zero)
        value = select(x == zero, -infinity, select(x < zero, nan, value))
        return select(x < infinity, value, x)  # infinity and NaN

    @jit
    def log1p(x):
        u = one + x
        k, _, scale = exponent_parts(u)
        # (1 + x) 2^-k - 1: x itself where k is 0
        f = fused(x, quarter * scale, quarter * scale - one)
        value = log_of(f, k, zero)
        value = select(u == zero, -infinity, select(u < zero, nan, value))
        return select(x < infinity, select(x == zero, x, value), x)

    @jit
    def mills(y):
        """Phi(-y) / e^(-y^2/2) for y >= 0."""
        return mills_polynomial((y - five) / (y + five)) / (one + y)

    @jit
    def normal_tail(factor, y):
        """factor * Phi(-y) for y >= 0."""
        y = select(y > mills_end, mills_end, y)
        return scaled_exp(factor * mills(y), -half * product(y, y), -half * product_low(y, y))

    @jit
    def scaled_normal_cdf(factor, x):
        positive = x > zero
        tail = normal_tail(select(positive, one, factor), absolute(x))
        return select(positive, factor * (one - tail), tail)

    @jit
    def erf(x):
        y = absolute(x)
        near = fused(x, erf_polynomial(x * x), x)
        far = copy_sign(fused(-two, normal_tail(one, y * root_two), one), x)
        return select(y < one, near, far)

    return SimpleNamespace(
        abs=absolute,
        sqrt=square_root,
        copysign=copy_sign,
        fma=fused,
        where=select,
        both=target.both,
        either=target.either,
        negation=target.negation,
        product=product,
        product_low=product_low,
        maximum=maximum,
        minimum=minimum,
        exp=exp,
        log=log,
        log1p=log1p,
        tanh=tanh,
        sigmoid=sigmoid,
        erf=erf,
        scaled_exp=scaled_exp,
        scaled_sigmoid=scaled_sigmoid,
        scaled_bell=scaled_bell,
        scaled_normal_cdf=scaled_normal_cdf,
        plain_exp=plain_exp,
        plain_sigmoid=plain_sigmoid,
        plain_bell=plain_bell,
        plain_complement=plain_complement,
        scaled_complement=scaled_complement,
        growth=growth,
        plain_growth=plain_growth,
        quotient=quotient,
        inverse=inverse,
        ratio=ratio,
        unscaled=unscaled,
        less_unscaled=less_unscaled,
        toward=target.toward,
        finite=finite,
    )


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
    inverse = node("inverse", g)
    if op == "scaled_bell":
        rise = node("less_unscaled", 1, inverse)
        return node("unscaled", node("mul", node("mul", factor, rise), inverse))
    q = inverse if factor is constant(1) else node("quotient", factor, inverse, g)
    below, above = node("unscaled", q), node("less_unscaled", factor, q)
    if high[0] >= 0:
        return above
    return below if high[1] <= 0 else node("where", node("lt", hi, 0), below, above)


def _divided(exprs: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The graphs with a ratio for each quotient that is the only use of its inverse.

    The bits are the same (see `quotient`); a lone division has three instructions less.
    """
    order = topological(exprs)
    uses = Counter(a for e in order for a in e.args)
    made: dict[Expr, Expr] = {}
    for e in order:
        args = [made[a] for a in e.args]
        if e.op == "quotient" and uses[e.args[1]] == 1:
            made[e] = node("ratio", args[0], args[2])
        else:
            made[e] = node(e.op, *args) if args else e
    return tuple(made[e] for e in exprs)


def lowered(exprs: tuple[Expr, ...], growth: bool = True) -> tuple[Expr, ...]:
    """The graphs with every node as the primitives here have it."""
    made: dict[Expr, Expr] = {}
    known = ranges(exprs)
    for e in topological(exprs):
        op, args, old = e.op, [made[a] for a in e.args], e.args
        if op == "sigmoid":
            one, zero = constant(1), constant(0)
            op, args, old = "scaled_sigmoid", [one, *args, zero], (one, *old, zero)
        factor = known.get(old[0], (1.0, 1.0)) if old else None
        small = growth and op in ("scaled_sigmoid", "scaled_bell")
        if small and max(map(abs, factor)) <= GROWTH_FACTOR:
            made[e] = _shared(op, args, known[old[1]])
        else:
            made[e] = _lowered(op, args) if args else e
    return _divided(tuple(made[e] for e in exprs))


def render(
    exprs: tuple[Expr, ...],
    dtype: str,
    name: str = "formula",
    growth: bool = True,
    arguments: tuple[str, ...] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return the graphs as the text of one Python function, and the constants that it names.

    Parameters
    ----------
    exprs : tuple of Expr
        One for a scalar result, several for a tuple of results that share what they can.
    dtype : {"float32", "float64"}
    name : str
        Of the function.
    growth : bool
        False: no sigmoid is made of a growing exponential, for targets whose own is short.
    arguments : tuple of str, optional
        The names of the graphs' inputs in the order of the function's arguments. By default the
        function has one argument, the symbol.
    """
    constants: dict[str, Any] = {}
    names: dict[Expr, str] = {}
    lines: list[str] = []
    exprs = lowered(expand(exprs), growth)
    for e in topological(exprs):
        if e.op == "x":
            names[e] = "x"
        elif e.op == "input":
            names[e] = f"in_{e.payload}"
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
    given = "x" if arguments is None else ", ".join(f"in_{name}" for name in arguments)
    return "\n".join([f"def {name}({given}):", *lines, f"    return {result}", ""]), constants
