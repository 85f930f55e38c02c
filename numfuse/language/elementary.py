"""The operations of `numfuse.expr` over NumPy arrays, in float64: the reference.

Each is as accurate as double words make it; none is fast. SciPy is imported at the first use of a
function that NumPy lacks. NaN and infinities follow IEEE throughout, silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from numfuse.language.curves import expand
from numfuse.language.graph import SYMBOL, Expr, rounded, topological

__all__ = ["apply", "evaluate", "values"]

_SPLITTER = 2.0**27 + 1.0  # Veltkamp: halves of 26 bits, whose products are exact
# Beyond this, exp is (close to) subnormal: it is computed as exp(x + 512) * exp(-512).
_TAIL, _SHIFT = -600.0, 512.0


def _halves(a: Any) -> tuple[Any, Any]:
    big = a * _SPLITTER
    high = big - (big - a)
    return high, a - high


def _product_low(a: Any, b: Any) -> Any:
    (ah, al), (bh, bl) = _halves(a), _halves(b)
    p = a * b
    low = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    return np.where(np.isfinite(low), low, 0.0)  # an infinite product is exact


def _fma(a: Any, b: Any, c: Any) -> Any:
    p = a * b
    s = p + c
    back = s - p
    low = (p - (s - back)) + (c - back) + _product_low(a, b)
    return s + np.where(np.isfinite(low), low, 0.0)


def _scaled_exp(factor: Any, hi: Any, lo: Any) -> Any:
    tail = hi < _TAIL
    # The shift is exact: _TAIL > -2 * _SHIFT, and beyond -1024 the result is 0 all the same.
    value = factor * (np.exp(np.where(tail, hi + _SHIFT, hi)) * np.exp(lo))
    return np.where(tail, value * np.exp(-_SHIFT), value)


def _scaled_sigmoid(factor: Any, hi: Any, lo: Any) -> Any:
    negative = hi < 0
    toward = np.where(negative, lo, -lo)
    e = np.exp(-np.abs(hi)) * np.exp(toward)
    small = _scaled_exp(factor, -np.abs(hi), toward) / (1.0 + e)
    return np.where(negative, small, factor / (1.0 + e))


def _sigmoid(x: Any) -> Any:
    # SciPy's expit ends at -709.8, where the result is still a (subnormal) number.
    return _scaled_sigmoid(1.0, x, 0.0)


def _scaled_bell(factor: Any, hi: Any, lo: Any) -> Any:
    toward = np.where(hi < 0, lo, -lo)
    e = np.exp(-np.abs(hi)) * np.exp(toward)
    return _scaled_exp(factor, -np.abs(hi), toward) / ((1.0 + e) * (1.0 + e))


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


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, 0.0)


def _erf(x: Any) -> Any:
    from scipy.special import erf

    return erf(x)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "abs": np.abs, "sqrt": np.sqrt, "lt": np.less, "le": np.less_equal, "eq": np.equal,
    "ne": np.not_equal, "both": np.logical_and, "either": np.logical_or,
    "negation": np.logical_not, "where": np.where, "maximum": np.maximum,
    "minimum": np.minimum, "copysign": np.copysign, "fma": _fma, "product": np.multiply,
    "product_low": _product_low, "exp": np.exp, "log": np.log, "log1p": np.log1p,
    "tanh": np.tanh, "sigmoid": _sigmoid, "erf": _erf,
    "scaled_normal_cdf": _scaled_normal_cdf, "scaled_exp": _scaled_exp,
    "scaled_sigmoid": _scaled_sigmoid, "scaled_bell": _scaled_bell, "finite": _finite,
}  # fmt: skip


def apply(op: str, *args: Any) -> Any:
    """One operation over arrays: computed in float64, given back in the arrays' common dtype.

    Python numbers do not take part in the promotion, as in NumPy; integers become float64.
    """
    numbers = args[1:] if op == "where" else args
    kinds = [np.result_type(a) if isinstance(a, (np.ndarray, np.generic)) else a for a in numbers]
    dtype = np.result_type(*kinds)
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    wide = [
        np.asarray(a, None if op == "where" and not i else np.float64) for i, a in enumerate(args)
    ]
    with np.errstate(all="ignore"):
        return np.asarray(_OPERATIONS[op](*wide)).astype(dtype, copy=False)[()]


def evaluate(expr: Expr, x: Any) -> Any:
    """The graph over an array of arguments: computed in float64, rounded once to the array's dtype.

    Parameters
    ----------
    expr : Expr
    x : array_like of real numbers, any shape
        Integers and Python numbers give float64.

    Raises
    ------
    TypeError
        For complex, object or non-numeric arrays.
    """
    array = np.asarray(x)
    dtype = array.dtype
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64)
    elif dtype.kind != "f" and dtype.name != "bfloat16":  # ml_dtypes' bfloat16 has kind "V"
        raise TypeError(f"expected an array of real numbers, got dtype {array.dtype}")
    wide = array.astype(np.float64)
    (out,) = values((expr,), {SYMBOL: wide})
    return np.broadcast_to(out, wide.shape).astype(dtype)[()]


def values(exprs: Iterable[Expr], leaves: Mapping[Expr, Any]) -> tuple[Any, ...]:
    """The graphs over arrays, one per leaf, that broadcast: in the arrays' own dtype.

    NaN and infinities follow IEEE, silently.
    """
    exprs = expand(exprs)
    value: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for e in topological(exprs):
            if e.op == "const":
                value[e] = rounded(e, "float64")
            elif not e.args:
                value[e] = leaves[e]
            else:
                value[e] = _OPERATIONS[e.op](*(value[a] for a in e.args))
    return tuple(value[e] for e in exprs)
