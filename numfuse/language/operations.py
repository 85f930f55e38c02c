"""The operations of a formula: one table of their meaning, bounds and derivatives.

The meaning is the function over NumPy arrays in float64: as accurate as double words make it, and
not fast. SciPy is imported at the first use of a function that NumPy lacks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np

#: The least and the greatest value of a node, NaN aside.
Range: TypeAlias = tuple[float, float]
ANY: Range = (-math.inf, math.inf)


class Operation(NamedTuple):
    """A row of the table."""

    #: The operation over arrays.
    value: Callable[..., Any]
    #: From the operands' bounds to the result's, over all finite operands; None: any number.
    bounds: Callable[..., Range] | None = None
    #: From (node, e, *operands) to the derivative by each operand, None where one does not count;
    #: `e` is the result, `node(name, *operands)` makes another operation. Those without have a rule
    #: of their own in `numfuse.language.derivatives`.
    partials: Callable[..., tuple[Any, ...]] | None = None
    #: The ufuncs that mean the same, beside that which `value` is.
    ufuncs: tuple[str, ...] = ()
    #: Whether the result is a truth value.
    truth: bool = False

    @property
    def arity(self) -> int:
        """The number of operands."""
        own = self.value
        count: int = own.nin if isinstance(own, np.ufunc) else own.__code__.co_argcount
        return count


# --- bounds -----------------------------------------------------------------------------------
def hull(values: Iterable[float]) -> Range:
    """Return the bounds of some numbers, among which a NaN can be any number."""
    found = list(values)
    return ANY if any(map(math.isnan, found)) else (min(found), max(found))


def absolute(a: Range) -> Range:
    """Return the bounds of the absolute value."""
    return max(a[0], -a[1], 0.0), max(-a[0], a[1])


def _product(a: Range, b: Range) -> Range:
    return hull(p * q for p, q in itertools.product(a, b))


def _sum(a: Range, b: Range) -> Range:
    return hull((a[0] + b[0], a[1] + b[1]))


def _negated(a: Range) -> Range:
    return -a[1], -a[0]


def _either_sign(a: Range) -> Range:
    return hull(sign * value for sign in (-1, 1) for value in a)


# --- meanings ---------------------------------------------------------------------------------
_SPLITTER = 2.0**27 + 1.0  # Veltkamp: halves of 26 bits, whose products are exact
# Beyond this, exp is (close to) subnormal: it is computed as exp(x + 512) * exp(-512).
_TAIL, _SHIFT = -600.0, 512.0
_TWO_OVER_SQRT_PI = Fraction("1.12837916709551257389615890312154517168810125865800")
_ONE_OVER_SQRT_2PI = Fraction("0.39894228040143267793994605993438186847585863116493")


def _halves(a: Any) -> tuple[Any, Any]:
    big = a * _SPLITTER
    high = big - (big - a)
    return high, a - high


def _product_low(a: Any, b: Any) -> Any:
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    p = a * b
    # An infinite product is exact.
    return _finite(((ah * bh - p) + ah * bl + al * bh) + al * bl)


def _fma(a: Any, b: Any, c: Any) -> Any:
    p = a * b
    s = p + c
    back = s - p
    return s + _finite((p - (s - back)) + (c - back) + _product_low(a, b))


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, 0.0)


def _scaled_exp(factor: Any, hi: Any, lo: Any) -> Any:
    tail = hi < _TAIL
    # The shift is exact: _TAIL > -2 * _SHIFT, and beyond -1024 the result is 0 all the same.
    value = factor * (np.exp(np.where(tail, hi + _SHIFT, hi)) * np.exp(lo))
    return np.where(tail, value * np.exp(-_SHIFT), value)


def _decay(factor: Any, hi: Any, lo: Any) -> tuple[Any, Any]:
    """Return factor * e^-y and 1 + e^-y with y = |hi + lo|."""
    toward = np.where(hi < 0, lo, -lo)
    e = np.exp(-np.abs(hi)) * np.exp(toward)
    return _scaled_exp(factor, -np.abs(hi), toward), 1.0 + e


def _scaled_sigmoid(factor: Any, hi: Any, lo: Any) -> Any:
    small, one_more = _decay(factor, hi, lo)
    return np.where(hi < 0, small, factor) / one_more


def _scaled_bell(factor: Any, hi: Any, lo: Any) -> Any:
    small, one_more = _decay(factor, hi, lo)
    return small / (one_more * one_more)


def _sigmoid(x: Any) -> Any:
    # SciPy's expit ends at -709.8, where the result is still a (subnormal) number.
    return _scaled_sigmoid(1.0, x, 0.0)


def _scaled_normal_cdf(factor: Any, x: Any) -> Any:
    from scipy.special import erfcx, ndtr

    y = np.minimum(np.abs(x), 40.0)
    square = y * y
    mills = 0.5 * erfcx(y * np.sqrt(0.5))
    scale = np.where(x > 0, 1.0, factor)  # multiplied in before the tail becomes subnormal
    tail = _scaled_exp(scale * mills, -0.5 * square, -0.5 * _product_low(y, y))
    # Near 0 SciPy's erfcx is the less accurate of the two.
    small = np.where(x > 0, factor * (1.0 - tail), tail)
    return np.where(np.abs(x) < 1.0, factor * ndtr(x), small)


def _erf(x: Any) -> Any:
    from scipy.special import erf

    return erf(x)


# --- the table --------------------------------------------------------------------------------
OPERATIONS = {
    "add": Operation(np.add, _sum),
    "sub": Operation(np.subtract, lambda a, b: _sum(a, _negated(b))),
    "mul": Operation(np.multiply, _product),
    "div": Operation(np.divide),
    "neg": Operation(np.negative, _negated),
    "abs": Operation(
        np.abs,
        absolute,
        lambda node, e, x: (node("where", x > 0, 1.0, node("where", x < 0, -1.0, 0.0)),),
        ("fabs",),
    ),
    "sqrt": Operation(np.sqrt, None, lambda node, e, x: (0.5 / e,)),
    "lt": Operation(np.less, truth=True),
    "le": Operation(np.less_equal, truth=True),
    "eq": Operation(np.equal, truth=True),
    "ne": Operation(np.not_equal, truth=True),
    "both": Operation(np.logical_and, truth=True),
    "either": Operation(np.logical_or, truth=True),
    "negation": Operation(np.logical_not, truth=True),
    "where": Operation(
        lambda condition, a, b: np.where(condition, a, b),
        lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    ),
    "maximum": Operation(np.maximum, lambda a, b: (max(a[0], b[0]), max(a[1], b[1]))),
    "minimum": Operation(np.minimum, lambda a, b: (min(a[0], b[0]), min(a[1], b[1]))),
    "copysign": Operation(
        np.copysign,
        lambda a, b: absolute(a) if b[0] > 0 else _either_sign(absolute(a)),
        lambda node, e, x, _: (node("where", node("eq", e, x), 1.0, -1.0), None),
    ),
    "fma": Operation(_fma, lambda a, b, c: _sum(_product(a, b), c)),
    "product": Operation(lambda a, b: a * b, _product),
    # A rounding error is smaller than what was rounded, and has either sign.
    "product_low": Operation(_product_low, lambda a, b: _either_sign(_product(a, b))),
    "finite": Operation(_finite, lambda a: (min(a[0], 0.0), max(a[1], 0.0))),
    "exp": Operation(np.exp, None, lambda node, e, x: (e,)),
    "log": Operation(np.log, None, lambda node, e, x: (1.0 / x,)),
    "log1p": Operation(np.log1p, None, lambda node, e, x: (1.0 / (1.0 + x),)),
    "tanh": Operation(
        np.tanh,
        lambda a: (-1.0, 1.0),
        # 1 - tanh^2 = 4 s(2x) s(-2x), without the cancellation
        lambda node, e, x: (node("scaled_bell", 4.0, 2.0 * x, 0.0),),
    ),
    "sigmoid": Operation(
        _sigmoid,
        lambda a: (0.0, 1.0),
        lambda node, e, x: (node("scaled_bell", 1.0, x, 0.0),),
        ("expit",),
    ),
    "erf": Operation(
        _erf,
        lambda a: (-1.0, 1.0),
        lambda node, e, x: (_TWO_OVER_SQRT_PI * node("exp", -(x * x)),),
        ("erf",),
    ),
    "scaled_normal_cdf": Operation(
        _scaled_normal_cdf,
        None,
        lambda node, e, factor, x: (
            node("scaled_normal_cdf", 1.0, x),
            factor * (_ONE_OVER_SQRT_2PI * node("exp", -0.5 * x * x)),
        ),
    ),
    "scaled_exp": Operation(_scaled_exp),
    "scaled_sigmoid": Operation(
        _scaled_sigmoid, lambda factor, hi, lo: _product(factor, (0.0, 1.0))
    ),
    "scaled_bell": Operation(_scaled_bell, lambda factor, hi, lo: _product(factor, (0.0, 0.25))),
}
#: Operations whose result is a truth value.
TRUTH = frozenset(name for name, row in OPERATIONS.items() if row.truth)
#: {ufunc of NumPy or SciPy: the operation that means the same}.
UFUNCS = {
    ufunc: name
    for name, row in OPERATIONS.items()
    for ufunc in (*row.ufuncs, *([row.value.__name__] if isinstance(row.value, np.ufunc) else []))
}
