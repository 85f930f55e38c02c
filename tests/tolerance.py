r"""How far a result may be from the exact one: functions of the dtype and the length of the sums.

Nothing here is tuned to a test. With u the unit roundoff of the accumulator and v that of the
storage dtype, and every bound componentwise (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, chapter 3):

1. A sum of n products, in any order, with or without FMA, errs by at most gamma_n \|x\|^T \|y\|,
   gamma_n = n u / (1 - n u). The bias is one more term: the pre-activation P errs by
   e = gamma_(K+1) (\|A\| \|B\| + \|bias\|).
2. An activation f, as it is evaluated, is mixed forward-backward stable: its result is within a
   relative ``EVALUATION u`` of f at a point within a relative ``EVALUATION u`` of the argument. So
   f(P) errs by at most the change of f over P +- (e + EVALUATION u \|P\|), and EVALUATION u \|f\|.
   The change is measured on the textbook function at both ends (and doubled, for the curvature
   between them, plus the square of e for an inflection), not bounded by max \|f'\|: in the tails,
   where f and f' are tiny, the bound is a relative one.
3. The same with f' for f gives the error s of the slope. At the kink of relu the change over the
   interval is the jump, and either side is right. G = grad f'(P) errs by \|grad\| s + u \|G\|.
4. A gradient is a sum of n products of G (n counts the axes that are summed over): it errs by
   gamma_n \|G\| \|Y\| plus the error of G times \|Y\|.
5. A half type is rounded once, at the store: relative v, or half of its smallest subnormal.
   Where a backend may round G to the storage dtype for d_a and d_b (``rounded_grad_pre``), that is
   v \|G\| more in 4, or half of its smallest subnormal.

6. Where bfloat16 factors are multiplied as they are, a subnormal factor counts as 0, and so does a
   product or a sum below the smallest normal number t of float32: at most t (\|x\| + \|y\| + 2)
   more in each of the n terms.  (float16 factors and their products are far above t.)
7. WGSL lets a device take any subnormal number for 0. Where the device at hand does (its backend's
   trait `subnormals` says in which dtypes), point 6 holds for its products, an argument and a value
   of an activation and grad f'(P) lose t each, and so does a half type at the store, with its own
   t. What is not below t keeps its relative bound.

8. T = u B + A v + w + z is a sum of all their terms: gamma of their number, times the sum of their
   magnitudes. A product of factors that err by x and y errs by \|f\| y + \|g\| x + x y, and by
   u \|f g\|: so the error of Q = grad f''(P) T, of S = grad f'(P) and of f'(P) T. A gradient of the
   double backward is a sum of two products: the terms of both count in gamma. The gates' second
   derivatives are sums of two such products.

9. An epilogue of a user's own, and what is derived of it, is one formula after another: each number
   carries its error from node to node of the recorded graph (:func:`running`). A sum, a difference
   and a product err by u of their value beside what their operands hand on, whether or not they
   are one fused multiply-add; a quotient by the division's own error and a rounding more; the
   functions as point 2 says, and a comparison that an error may turn hands on either branch. Sums
   over rows, columns and K add gamma_n as in 4.

`EVALUATION` is 16: exp and tanh are polynomials that err by 1 to 2 u, and the formulas have at most
six more operations. Underflow of an intermediate adds the smallest normal number. In WGSL it is 24:
a division errs by up to 2.5 units in the last place (the trait `division`), 5 u where IEEE's errs
by 1 u, and no formula has more than two divisions whose errors add up. WGSL promises no fused
multiply-add and no order of sums: point 1 asks for neither, and what the formulas need of them is
said in `numfuse.language.wgsl`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from numpy import ndarray

from numfuse.backends import resolve
from numfuse.language.curves import Curve
from numfuse.language.graph import Expr, bottom_up, rounded

EVALUATION = 16
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BF16,
}


def roundoff(dtype: np.dtype) -> float:
    """The unit roundoff: half of the distance from 1 to the next number."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def accumulator(dtype: np.dtype) -> np.dtype:
    return dtype if dtype == np.float64 else np.dtype(np.float32)


def gamma(n: int, dtype: np.dtype) -> float:
    """gamma_n of the accumulator of a dtype; long double, the oracle's, is taken as exact."""
    u = roundoff(accumulator(dtype))
    return n * u / (1 - n * u)


def vanishing(backend: str, dtype: np.dtype) -> float:
    """Return the number below which one of this dtype may count as 0; 0 if none does (point 7)."""
    flushes = dtype.name in resolve(backend).traits.subnormals
    return float(ml_dtypes.finfo(dtype).smallest_normal) if flushes else 0.0


def flushed(x: ndarray, y: ndarray, dtype: np.dtype, backend: str = "cpu") -> ndarray | float:
    """What x @ y may lose to numbers below the normal ones (points 6 and 7)."""
    tiny = max(vanishing(backend, dtype), vanishing(backend, accumulator(dtype)))
    if dtype == BF16:
        tiny = float(np.finfo(np.float32).smallest_normal)
    if not tiny:
        return 0.0
    rows, columns = (np.abs(oracle.wide(factor)) + 1 for factor in (x, y))
    return tiny * (rows.sum(axis=-1, keepdims=True) + columns.sum(axis=-2, keepdims=True))


def stored(
    exact: ndarray, error: ndarray | float, dtype: np.dtype, backend: str = "cpu"
) -> ndarray:
    """The bound after the store: `error`, and the rounding of a value that is off by that much."""
    info = ml_dtypes.finfo(dtype)
    floor = float(ml_dtypes.finfo(accumulator(dtype)).smallest_normal)
    if dtype != accumulator(dtype):
        floor += max(float(info.smallest_subnormal) / 2, vanishing(backend, dtype))
    return error + roundoff(dtype) * (np.abs(exact) + error) + floor


def residual_gradient(
    grad: ndarray, shape: tuple[int, ...], dtype: np.dtype, backend: str = "cpu"
) -> tuple[ndarray, ndarray]:
    """d_residual, the sum of grad to a residual's shape, and its bound: one sum, one store."""
    exact = oracle.sum_to(oracle.wide(grad), shape)
    terms = max(1, grad.size // max(1, exact.size))
    error = gamma(terms, dtype) * oracle.sum_to(np.abs(oracle.wide(grad)), shape)
    return exact, stored(exact, error, dtype, backend)


def evaluated(
    f: Callable[[ndarray], ndarray], x: ndarray, error: ndarray, dtype: np.dtype,
    backend: str = "cpu",
) -> ndarray:  # fmt: skip
    """The error of f(x) where x errs by `error` (points 2 and 7)."""
    divisions = 2 * (2 * resolve(backend).traits.division - 1)
    u = (EVALUATION + divisions) * roundoff(accumulator(dtype))
    tiny = max(vanishing(backend, dtype), vanishing(backend, accumulator(dtype)))
    reach = error + u * np.abs(x) + tiny
    here = f(x)
    change = np.maximum(np.abs(f(x + reach) - here), np.abs(f(x - reach) - here))
    return 2 * change + error**2 + u * np.abs(here) + tiny


@dataclass
class Forward:
    """The exact forward in long double, with its bounds."""

    pre: ndarray
    pre_error: ndarray
    out: ndarray
    out_error: ndarray


def forward(
    a: ndarray, b: ndarray, bias: ndarray | None, activation: str, dtype: np.dtype,
    residual: ndarray | None = None, *, backend: str = "cpu",
) -> Forward:  # fmt: skip
    """The exact act(a @ b + bias) + residual, for operands of two axes or more."""
    pre = oracle.pre_activation(a, b, bias)
    magnitude = oracle.pre_activation(np.abs(a), np.abs(b), None if bias is None else np.abs(bias))
    out = oracle.VALUE[activation](pre)
    terms = a.shape[-1] + 1
    if residual is not None:
        out = out + oracle.wide(residual)
        magnitude = magnitude + np.abs(oracle.wide(residual))
        terms += 1
    error = gamma(terms, dtype) * magnitude + flushed(a, b, dtype, backend)
    if activation == "none":
        out_error = error
    else:
        out_error = evaluated(oracle.VALUE[activation], pre, error, dtype, backend)
    acc = accumulator(dtype)
    return Forward(
        pre, stored(pre, error, acc, backend), out, stored(out, out_error, dtype, backend)
    )


@dataclass
class Backward:
    """The exact gradients in long double, with their bounds."""

    d_a: ndarray
    d_b: ndarray
    d_bias: ndarray | None
    d_a_error: ndarray
    d_b_error: ndarray
    d_bias_error: ndarray | None


def backward(
    grad: ndarray, a: ndarray, b: ndarray, bias: ndarray | None, activation: str,
    dtype: np.dtype, *, pre: ndarray | None = None, d_b_shape: tuple[int, ...] | None = None,
    rounded_grad_pre: bool = False, backend: str = "cpu",
) -> Backward:  # fmt: skip
    """The exact gradients, for operands of two axes or more; `pre` as saved, None to recompute."""
    if pre is None:
        saved = forward(a, b, bias, "none", dtype, backend=backend)
        pre, error = (
            saved.pre,
            gamma(a.shape[-1] + 1, dtype)
            * oracle.pre_activation(np.abs(a), np.abs(b), None if bias is None else np.abs(bias))
            + flushed(a, b, dtype, backend),
        )
    else:
        pre, error = oracle.wide(pre), np.zeros_like(oracle.wide(pre))
    grad, a, b = oracle.wide(grad), oracle.wide(a), oracle.wide(b)
    slope = oracle.SLOPE[activation](pre)
    g = grad * slope
    u = roundoff(accumulator(dtype))
    slope_error = g_error = 0
    if activation != "none":
        slope_error = evaluated(oracle.SLOPE[activation], pre, error, dtype, backend)
        g_error = vanishing(backend, accumulator(dtype))
    g_error = np.abs(grad) * slope_error + u * np.abs(g) + g_error
    operand_error = g_error
    if rounded_grad_pre:
        lost = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
        operand_error = g_error + roundoff(dtype) * (np.abs(g) + g_error) + lost

    def summed(y, magnitude, y_error, shape, inner):
        exact = oracle.sum_to(y, shape)
        terms = inner * max(1, y.size // max(1, exact.size))
        bound = gamma(terms, dtype) * oracle.sum_to(magnitude, shape) + oracle.sum_to(
            y_error, shape
        )
        return exact, stored(exact, bound, dtype, backend)

    b_t, a_t = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
    d_a, d_a_error = summed(
        g @ b_t, np.abs(g) @ np.abs(b_t),
        operand_error @ np.abs(b_t) + flushed(g, b_t, dtype, backend), a.shape, b.shape[-1],
    )  # fmt: skip
    d_b, d_b_error = summed(
        a_t @ g, np.abs(a_t) @ np.abs(g),
        np.abs(a_t) @ operand_error + flushed(a_t, g, dtype, backend),
        b.shape if d_b_shape is None else d_b_shape, a.shape[-2],
    )  # fmt: skip
    d_bias = d_bias_error = None
    if bias is not None:
        d_bias, d_bias_error = summed(g, np.abs(g), g_error, bias.shape, 1)
    return Backward(d_a, d_b, d_bias, d_a_error, d_b_error, d_bias_error)


def times(f: ndarray, f_error: Any, g: ndarray, g_error: Any, u: float) -> ndarray:
    """The error of f g, where both err (point 8)."""
    error = np.abs(f) * g_error + np.abs(g) * f_error + f_error * g_error
    error += u * (np.abs(f * g) + error)
    return error


def moved(
    u: ndarray | None, v: ndarray | None, w: ndarray | None, z: ndarray | None, a: ndarray,
    b: ndarray, shape: tuple[int, ...], dtype: np.dtype, backend: str = "cpu",
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """T = u @ b + a @ v + w + z, and its error."""
    exact, size, error = (np.zeros(shape, oracle.LONG) for _ in range(3))
    terms = 0
    for x, y in ((u, b), (a, v)):
        if x is not None and y is not None:
            exact = exact + oracle.wide(x) @ oracle.wide(y)
            size = size + np.abs(oracle.wide(x)) @ np.abs(oracle.wide(y))
            error = error + flushed(x, y, dtype, backend)
            terms += x.shape[-1] + 1
    for x in (w, z):
        if x is not None:
            exact, size, terms = exact + oracle.wide(x), size + np.abs(oracle.wide(x)), terms + 1
    return exact, error + gamma(terms, dtype) * size


def _at_pre(
    a: ndarray, b: ndarray, bias: ndarray | None, pre: ndarray | None, dtype: np.dtype,
    backend: str,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    if pre is not None:
        return oracle.wide(pre), np.zeros_like(oracle.wide(pre))
    size = oracle.pre_activation(np.abs(a), np.abs(b), None if bias is None else np.abs(bias))
    error = gamma(a.shape[-1] + 1, dtype) * size + flushed(a, b, dtype, backend)
    return oracle.pre_activation(a, b, bias), error


def double_backward(
    u: ndarray | None, v: ndarray | None, w: ndarray | None, z: ndarray | None, grad: ndarray,
    a: ndarray, b: ndarray, bias: ndarray | None, activation: str, dtype: np.dtype, *,
    pre: ndarray | None = None, rounded_grad_pre: bool = False, backend: str = "cpu",
) -> dict[str, tuple[ndarray, ndarray]]:  # fmt: skip
    """{result: (exact, bound)} of the double backward, for operands of two axes or more."""
    unit = roundoff(accumulator(dtype))
    pre, pre_error = _at_pre(a, b, bias, pre, dtype, backend)
    t, t_error = moved(u, v, w, z, a, b, grad.shape, dtype, backend)
    slope, second = oracle.SLOPE[activation](pre), oracle.SECOND[activation](pre)
    slope_error = second_error = np.zeros_like(pre)
    lost = np.zeros_like(pre)
    if activation != "none":
        slope_error = evaluated(oracle.SLOPE[activation], pre, pre_error, dtype, backend)
        floor = float(np.finfo(accumulator(dtype)).smallest_normal)
        lost = lost + max(floor, vanishing(backend, accumulator(dtype)))
    if activation not in ("none", "relu"):
        second_error = evaluated(oracle.SECOND[activation], pre, pre_error, dtype, backend)
    g = oracle.wide(grad)
    bent = g * second
    bent_error = times(g, 0, second, second_error, unit) + lost
    q, s = bent * t, g * slope
    q_error = times(bent, bent_error, t, t_error, unit) + lost
    s_error = times(g, 0, slope, slope_error, unit) + lost
    if activation == "none":
        s_error = 0 * s_error
    held_q, held_s = q_error, s_error
    if rounded_grad_pre:
        least = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2
        held_q = q_error + roundoff(dtype) * (np.abs(q) + q_error) + least
        held_s = s_error + roundoff(dtype) * (np.abs(s) + s_error) + least
    d_grad = slope * t
    d_grad_error = times(slope, slope_error, t, t_error, unit) + lost
    if activation == "none":
        d_grad_error = t_error
    found = {"d_grad": (d_grad, stored(d_grad, d_grad_error, dtype, backend))}

    def products(pairs, shape, inner):
        exact, size, error = (np.zeros(shape, oracle.LONG) for _ in range(3))
        terms = 0
        for x, x_error, y, y_error in pairs:
            whole = x @ y
            terms += inner * max(1, whole.size // max(1, exact.size)) + 1
            exact = exact + oracle.sum_to(whole, shape)
            size = size + oracle.sum_to(np.abs(x) @ np.abs(y), shape)
            off = x_error @ np.abs(y) if y_error is None else np.abs(x) @ y_error
            error = error + oracle.sum_to(off + flushed(x, y, dtype, backend), shape)
        return exact, stored(exact, gamma(terms, dtype) * size + error, dtype, backend)

    def turned(x):
        return oracle.wide(x).swapaxes(-1, -2)

    flat = activation in ("none", "relu")
    pairs = [] if flat else [(q, held_q, turned(b), None)]
    pairs += [] if v is None else [(s, held_s, turned(v), None)]
    found["d_a"] = products(pairs, a.shape, b.shape[-1])
    pairs = [] if flat else [(turned(a), None, q, held_q)]
    pairs += [] if u is None else [(turned(u), None, s, held_s)]
    found["d_b"] = products(pairs, b.shape, a.shape[-2])
    if bias is not None:
        exact = oracle.sum_to(q, bias.shape)
        terms = max(1, q.size // max(1, exact.size))
        error = gamma(terms, dtype) * oracle.sum_to(np.abs(q), bias.shape)
        error = error + oracle.sum_to(q_error, bias.shape)
        found["d_bias"] = exact, stored(exact, error, dtype, backend)
    return found


def tangent(
    u: ndarray | None, v: ndarray | None, w: ndarray | None, z: ndarray | None, a: ndarray,
    b: ndarray, bias: ndarray | None, activation: str, dtype: np.dtype,
    residual: ndarray | None = None, *, backend: str = "cpu",
) -> dict[str, tuple[ndarray, ndarray]]:  # fmt: skip
    """{result: (exact, bound)} of forward mode, for operands of two axes or more."""
    plain = forward(a, b, bias, activation, dtype, residual, backend=backend)
    ones = np.ones(plain.out.shape)
    moving = double_backward(
        u, v, w, z, ones, a, b, bias, activation, dtype, backend=backend
    )["d_grad"]  # fmt: skip
    return {"out": (plain.out, plain.out_error), "out_dot": moving}


def assert_within(name: str, result: ndarray, exact: ndarray, error: ndarray) -> None:
    """Every component within its bound; the message names the worst."""
    assert result.shape == exact.shape, f"{name}: shape {result.shape}, not {exact.shape}"
    if not result.size:
        return
    off = np.abs(oracle.wide(result) - exact)
    wrong = ~(off <= error)  # a NaN is wrong too
    if wrong.any():
        ratio = np.where(np.isnan(off), np.inf, off / error)
        at = np.unravel_index(np.argmax(ratio), ratio.shape)
        raise AssertionError(
            f"{name}{[int(i) for i in at]} is {result[at]!s}, exactly {exact[at]!s}: off by "
            f"{off[at]:.3e}, allowed {error[at]:.3e}; {wrong.sum()} of {wrong.size} are wrong"
        )


# --- formulas of a user's own ---------------------------------------------------------------------
@dataclass
class Running:
    """Exact values, and how far what a backend has in their place may be off."""

    value: ndarray
    error: ndarray

    @classmethod
    def of(cls, x: Any) -> Running:
        """Return numbers that have no error."""
        return cls(oracle.wide(x), np.zeros(np.shape(x), oracle.LONG))

    def far(self, other: Running) -> ndarray:
        """How far another number, with its error, may be from this one."""
        return np.abs(self.value - other.value) + other.error


@dataclass
class Truth:
    """A condition, and whether errors leave it as it is."""

    value: ndarray
    sure: ndarray


_FUNCTIONS: dict[str, Callable[[ndarray], ndarray]] = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sigmoid": oracle.VALUE["sigmoid"],
    "sqrt": lambda x: np.sqrt(np.maximum(x, 0)),
}
_SCALED = {"scaled_sigmoid": oracle.VALUE["sigmoid"], "scaled_bell": oracle.SLOPE["sigmoid"]}
_ORDERS = (oracle.VALUE, oracle.SLOPE, oracle.SECOND, oracle.THIRD)


def running(
    graphs: tuple[Expr, ...], leaves: dict[str, Running], dtype: np.dtype, backend: str
) -> list[Running]:
    """The values of recorded formulas, and their running errors (point 9)."""
    acc = accumulator(dtype)
    u = roundoff(acc)
    divided = (2 * resolve(backend).traits.division + 1) * u
    least = max(float(ml_dtypes.finfo(acc).smallest_subnormal), vanishing(backend, acc))

    def made(value: ndarray, error: ndarray, unit: float = u) -> Running:
        return Running(value, error + unit * (np.abs(value) + error) + (least if unit else 0))

    def product(x: Running, y: Running) -> Running:
        error = np.abs(x.value) * y.error + np.abs(y.value) * x.error + x.error * y.error
        return made(x.value * y.value, error)

    def function(f: Callable[[ndarray], ndarray], x: Running) -> Running:
        return Running(f(x.value), evaluated(f, x.value, x.error, dtype, backend))

    def chosen(test: Truth, x: Running, y: Running) -> Running:
        value = np.where(test.value, x.value, y.value)
        here = Running(value, np.where(test.value, x.error, y.error))
        either = np.maximum(here.far(x), here.far(y))
        return Running(value, np.where(test.sure, here.error, either))

    def compared(op: str, x: Running, y: Running) -> Truth:
        value = {"lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal}[op]
        sure = np.abs(x.value - y.value) > x.error + y.error
        return Truth(value(x.value, y.value), sure | (x.error + y.error == 0))

    def rule(e: Expr, args: list[Any], at: Running | None = None) -> Any:
        match e.op:
            case "const":
                exact = oracle.LONG(e.payload.numerator) / oracle.LONG(e.payload.denominator)
                return Running(exact, np.abs(oracle.LONG(rounded(e, acc.name)) - exact))
            case "x":
                return at
            case "input":
                return leaves[str(e.payload)]
            case "call":
                return curve(e.payload, args[0])
            case "neg":
                return Running(-args[0].value, args[0].error)
            case "abs":
                return Running(np.abs(args[0].value), args[0].error)
            case "finite":
                return args[0]
            case "add" | "sub":
                x, y = args
                value = x.value + y.value if e.op == "add" else x.value - y.value
                return made(value, x.error + y.error)
            case "mul":
                return product(*args)
            case "fma":
                x = product(*args[:2])
                return made(x.value + args[2].value, x.error + args[2].error)
            case "div":
                x, y = args
                value = x.value / y.value
                room = np.abs(y.value) - y.error
                assert (room > 0).all(), "a divisor's error reaches 0: no bound holds"
                return made(value, (x.error + np.abs(value) * y.error) / room, divided)
            case "lt" | "le" | "eq" | "ne":
                return compared(e.op, *args)
            case "both" | "either":
                x, y = args
                join = np.logical_and if e.op == "both" else np.logical_or
                return Truth(join(x.value, y.value), x.sure & y.sure)
            case "negation":
                return Truth(~args[0].value, args[0].sure)
            case "where":
                return chosen(*args)
            case "maximum" | "minimum":
                x, y = args
                larger = np.maximum if e.op == "maximum" else np.minimum
                return Running(larger(x.value, y.value), np.maximum(x.error, y.error))
            case "scaled_sigmoid" | "scaled_bell":
                factor, high, low = args
                x = Running(high.value + low.value, high.error + low.error)
                return product(factor, function(_SCALED[e.op], x))
        return function(_FUNCTIONS[e.op], args[0])

    def curve(f: Curve, x: Running) -> Running:
        orders = _ORDERS[f.order] if f.order < len(_ORDERS) else {}
        if f.name in orders:
            return function(orders[f.name], x)
        return bottom_up((f.trace,), lambda e, args: rule(e, args, x))[0]  # the user's own

    return list(bottom_up(graphs, rule))


def product_of(
    x: Running, y: Running, dtype: np.dtype, backend: str = "cpu"
) -> tuple[ndarray, ndarray, ndarray]:
    """x @ y, the sum of its terms' magnitudes, and what the errors of the factors make of it."""
    size = np.abs(x.value) @ np.abs(y.value)
    off = np.abs(x.value) @ y.error + x.error @ np.abs(y.value) + x.error @ y.error
    return x.value @ y.value, size, off + flushed(x.value, y.value, dtype, backend)


def summed(x: Running, shape: tuple[int, ...], dtype: np.dtype) -> Running:
    """The sum of all that is broadcast from this shape."""
    exact = oracle.sum_to(x.value, shape)
    terms = max(1, x.value.size // max(1, exact.size))
    size = oracle.sum_to(np.abs(x.value) + x.error, shape)
    chain = gamma(terms, dtype) * size if terms > 1 else 0
    return Running(exact, chain + oracle.sum_to(x.error, shape))
