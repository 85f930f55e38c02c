"""The table of activations: value, first, second and third derivative of each, and its source.

A row is one formula and its derivatives, written by hand beside it, because stability is a choice:
every one holds its relative accuracy in the far tails, and none needs a guard. No finite or
infinite x gives NaN: a formula holds x within +-40 (gelu) or +-800 (silu) before a product that
could be inf * 0. Both limits serve every dtype: beyond them the value has long been 0 (or x, or 1)
in float64 and float32 alike, and no power of them overflows float32.

Largest errors of compiled values, in units in the last place: 2 in float32 and 2.01 in float64
(gelu_erf 3.2). `docs/numerics.md` has the table, of the derivatives too.

``relu'(0) = 0``; at NaN a value is NaN, and so is every derivative that depends on x, but a
comparison is false there: ``relu'(NaN) = relu''(NaN) = 0``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numfuse import expr as ex
from numfuse.activations.row import Activation, Formula
from numfuse.activations.table import register
from numfuse.expr import Expr, constant


def _row(number: int | None, source: str) -> Callable[[Formula], Activation]:
    return lambda formula: register(formula, formula.__name__, source, number)


#: The same functions in fewer operations: {id of a trace: (the trace, the short one)}.
_SHORT: dict[int, tuple[Expr, Expr]] = {}


def _short(row: Activation, order: int) -> Callable[[Formula], Formula]:
    """A formula of `row`'s derivative of this order for results that are rounded to 16 bits.

    It may lose what 16 bits do not hold: some 2^-17 of a value in the far tails. NaN goes through
    the exponential, infinities meet a factor that is clamped.
    """

    def decorate(formula: Formula) -> Formula:
        trace = row.trace(order)
        _SHORT[id(trace)] = trace, ex.trace(formula)
        return formula

    return decorate


def short_form(expr: Expr) -> Expr:
    """The graph in few operations where the table has one for 16-bit results, else itself."""
    return _SHORT.get(id(expr), (expr, expr))[1]


@_row(0, "identity")
def none(x: Any) -> Any:
    return x


none.derivative(lambda x: 1.0)


@_row(1, "Nair and Hinton 2010, ICML, Rectified linear units")
def relu(x: Any) -> Any:
    return ex.maximum(x, 0.0)


relu.derivative(lambda x: ex.where(x > 0.0, 1.0, 0.0))
relu.second_derivative(lambda x: 0.0)


# f(x) = x s(v(x)) with an odd v is max(x, 0) - y s(-v(y)), y = |x|: one tail, of known sign, for
# both sides, and an infinite x needs nothing of its own. f' is f'(-y) below zero, else 1 - f'(-y).
def _size(x: Any, limit: float) -> Any:
    # Not abs(x), whose derivative at 0 is 0: here it is 1, as that of _positive.
    return ex.minimum(ex.copysign(x, 1.0), limit)


def _positive(x: Any) -> Any:
    """x or 0; -0 stays -0."""
    return ex.where(x < 0.0, 0.0, x)


# gelu = x s(v), v = 2 sqrt(2/pi) (x + 0.044715 x^3), never x (1 + tanh(v/2)) / 2, which loses the
# negative tail. There the relative error of s(v) is the absolute error of v, which reaches -100 in
# float32: rounding v alone would cost 180 units in the last place. So v is carried as hi + lo, and
# its two constants as head and tail.
_V1 = constant("1.59576912160573071175978423973752747390343")  # 2 sqrt(2/pi)
_V3 = constant("0.07135481627260024877633875227986354099559")  # 0.044715 of that
# 15 bits: V1_HEAD - q below is exact for q < 2^9 in float32 (2^38 in float64), |x| <= 40 gives 116.
_V1_HEAD, _V1_TAIL = _V1.split(15)
_V3_HEAD, _V3_TAIL = _V3.split(24)
_GELU_LIMIT = 40.0


def _gelu_argument(x: Any) -> tuple[Any, Any]:
    """v(x) as hi + lo, the low word of which is up to 2^-15 of the whole."""
    square, square_low = ex.product(x, x), ex.product_low(x, x)
    q = ex.fma(square, _V3_HEAD, _V1_HEAD)
    tails = _V1_TAIL + _V3_TAIL * square + _V3_HEAD * square_low
    rest = ex.fma(square, _V3_HEAD, _V1_HEAD - q)  # comes last: the longest chain
    return ex.product(x, q), ex.product_low(x, q) + x * tails + x * rest


@_row(2, "Hendrycks and Gimpel 2016, arXiv:1606.08415 (tanh form)")
def gelu(x: Any) -> Any:
    y = _size(x, _GELU_LIMIT)
    hi, lo = _gelu_argument(y)
    return _positive(x) - ex.scaled_sigmoid(y, -hi, -lo)


@_short(gelu, 0)
def _(x: Any) -> Any:
    return ex.scaled_sigmoid(ex.maximum(x, -_GELU_LIMIT), x * ex.fma(x * x, _V3, _V1))


@gelu.derivative
def _(x: Any) -> Any:
    y = _size(x, _GELU_LIMIT)
    hi, lo = _gelu_argument(y)
    v1 = _V1 + 3 * _V3 * (y * y)
    tail = ex.scaled_sigmoid(1.0 - y * v1 * ex.scaled_sigmoid(1.0, hi, lo), -hi, -lo)
    return ex.where(x < 0.0, tail, 1.0 - tail)


@_short(gelu, 1)
def _(x: Any) -> Any:
    s = ex.sigmoid(x * ex.fma(x * x, _V3, _V1))
    y = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return s * ex.fma(y * ex.fma(y * y, 3 * _V3, _V1), 1.0 - s, 1.0)


@gelu.second_derivative
def _(x: Any) -> Any:
    # s'' = s' t with t = 1 - 2 s;  (x s(v))'' = s' (2 v' + x (t v'^2 + v''))
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    hi, lo = _gelu_argument(x)
    v1, v2 = _V1 + 3 * _V3 * (x * x), 6 * _V3 * x
    t = 1.0 - 2.0 * ex.scaled_sigmoid(1.0, hi, lo)
    return ex.scaled_bell(2.0 * v1 + x * (t * (v1 * v1) + v2), hi, lo)


@gelu.third_derivative
def _(x: Any) -> Any:
    # s''' = s' (1 - 6 s');  3 (s(v))'' + x (s(v))''', all over s'
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    hi, lo = _gelu_argument(x)
    v1, v2, v3 = _V1 + 3 * _V3 * (x * x), 6 * _V3 * x, 6 * _V3
    t = 1.0 - 2.0 * ex.scaled_sigmoid(1.0, hi, lo)
    bell = ex.scaled_bell(1.0, hi, lo)
    third = (1.0 - 6.0 * bell) * (v1 * v1 * v1) + 3.0 * t * v1 * v2 + v3
    return ex.scaled_bell(3.0 * (t * (v1 * v1) + v2) + x * third, hi, lo)


# silu: s(-746) is below the smallest float64.
_SILU_LIMIT = 800.0


@_row(3, "Elfwing et al. 2017, arXiv:1702.03118")
def silu(x: Any) -> Any:
    y = _size(x, _SILU_LIMIT)
    return _positive(x) - ex.scaled_sigmoid(y, -y)


@_short(silu, 0)
def _(x: Any) -> Any:
    return ex.scaled_sigmoid(ex.maximum(x, -_SILU_LIMIT), x)


@silu.derivative
def _(x: Any) -> Any:
    y = _size(x, _SILU_LIMIT)
    tail = ex.scaled_sigmoid(1.0 - y * ex.sigmoid(y), -y)
    return ex.where(x < 0.0, tail, 1.0 - tail)


@_short(silu, 1)
def _(x: Any) -> Any:
    s = ex.sigmoid(x)
    return s * ex.fma(ex.clamp(x, -_SILU_LIMIT, _SILU_LIMIT), 1.0 - s, 1.0)


@silu.second_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_SILU_LIMIT, _SILU_LIMIT)
    return ex.scaled_bell(2.0 + x * (1.0 - 2.0 * ex.sigmoid(x)), x)


@silu.third_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_SILU_LIMIT, _SILU_LIMIT)
    t = 1.0 - 2.0 * ex.sigmoid(x)
    return ex.scaled_bell(3.0 * t + x * (1.0 - 6.0 * ex.scaled_bell(1.0, x)), x)


sigmoid = _row(4, "logistic function, Verhulst 1845")(ex.sigmoid)


def _sigmoid_prime(x: Any) -> Any:
    return ex.scaled_bell(1.0, x)


def _sigmoid_second(x: Any) -> Any:
    # 1 - 2 s(x) = -tanh(x / 2), which does not cancel near 0
    return ex.scaled_bell(-ex.tanh(0.5 * x), x)


def _sigmoid_third(x: Any) -> Any:
    return ex.scaled_bell(1.0 - 6.0 * ex.scaled_bell(1.0, x), x)


sigmoid.derivative(_sigmoid_prime)
sigmoid.second_derivative(_sigmoid_second)
sigmoid.third_derivative(_sigmoid_third)


tanh = _row(5, "hyperbolic tangent")(ex.tanh)
# 1 - tanh^2 = 4 s(2x) s(-2x): the bell, which does not cancel where tanh is near 1.
tanh.derivative(lambda x: ex.scaled_bell(4.0, 2.0 * x))
tanh.second_derivative(lambda x: ex.scaled_bell(-8.0 * ex.tanh(x), 2.0 * x))


@tanh.third_derivative
def _(x: Any) -> Any:
    t = ex.tanh(x)
    return ex.scaled_bell(24.0 * (t * t) - 8.0, 2.0 * x)


_DENSITY = constant("0.39894228040143267793994605993438186847585863116493")  # 1 / sqrt(2 pi)


def _normal_density(factor: Any, x: Any) -> Any:
    """factor * exp(-x^2 / 2) / sqrt(2 pi), the square as a double word."""
    return ex.scaled_exp(_DENSITY * factor, -0.5 * ex.product(x, x), -0.5 * ex.product_low(x, x))


@_row(None, "Hendrycks and Gimpel 2016, arXiv:1606.08415 (exact form, x Phi(x))")
def gelu_erf(x: Any) -> Any:
    x = ex.maximum(x, -_GELU_LIMIT)
    return ex.scaled_normal_cdf(x, x)


@gelu_erf.derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return ex.normal_cdf(x) + _normal_density(x, x)


@gelu_erf.second_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return _normal_density(2.0 - x * x, x)


@gelu_erf.third_derivative
def _(x: Any) -> Any:
    x = ex.clamp(x, -_GELU_LIMIT, _GELU_LIMIT)
    return _normal_density(x * (x * x - 4.0), x)


@_row(None, "Dugas et al. 2001, NIPS 13")
def softplus(x: Any) -> Any:
    return ex.maximum(x, 0.0) + ex.log1p(ex.exp(-ex.abs(x)))


softplus.derivative(ex.sigmoid)
softplus.second_derivative(_sigmoid_prime)
softplus.third_derivative(_sigmoid_second)
