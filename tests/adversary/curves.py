"""Activations and the functions of formulas, with three derivatives, from the textbook.

A function is a tuple: its value and its derivatives over arrays of long double, None for one that
is zero everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
from numpy import ndarray

from .bounded import F64, LONG, Number, greater, larger, where

#: The factor c of the error of a function, by the order of its derivative.
STABLE = (16, 24, 40, 80)
_STEP = LONG.type(2) ** -12
Function = tuple[Callable[[ndarray], ndarray] | None, ...]


def _gelu_third(x: ndarray) -> ndarray:
    # (x s)''' = 3 s'' + x s''', s = logistic(v(x)), by the chain rule
    x = np.clip(x, -1000, 1000)
    c = 2 * np.sqrt(2 / LONG.type(np.pi))
    v = c * (x + LONG.type("0.044715") * x**3)
    v3 = c * 6 * LONG.type("0.044715")
    v1, v2 = c + v3 * x**2 / 2, v3 * x
    bell, odd = oracle.SLOPE["sigmoid"](v), -np.tanh(v / 2)
    second = v1**2 * odd + v2
    third = (1 - 6 * bell) * v1**3 + 3 * odd * v1 * v2 + v3
    return bell * (3 * second + x * third)


def _gelu_erf_third(x: ndarray) -> ndarray:
    x = np.clip(x, -1000, 1000)
    return x * (x**2 - 4) * np.exp(-(x**2) / 2) / np.sqrt(2 * LONG.type(np.pi))


def _silu_third(x: ndarray) -> ndarray:
    x = np.clip(x, -12000, 12000)
    bell = oracle.SLOPE["sigmoid"](x)
    return bell * (-3 * np.tanh(x / 2) + x * (1 - 6 * bell))


_THIRD = {
    "gelu": _gelu_third,
    "gelu_erf": _gelu_erf_third,
    "silu": _silu_third,
    "sigmoid": oracle.THIRD["sigmoid"],
    "tanh": oracle.THIRD["tanh"],
    "softplus": oracle.SECOND["sigmoid"],
}
#: By the name of an activation.
ACTIVATIONS: dict[str, Function] = {
    name: (oracle.VALUE[name], oracle.SLOPE[name], oracle.SECOND[name], third)
    for name, third in _THIRD.items()
}
ACTIVATIONS["none"] = (lambda x: x, None, None, None)
ACTIVATIONS["relu"] = (oracle.VALUE["relu"], oracle.SLOPE["relu"], None, None)

_ROOT = (
    np.sqrt,
    lambda x: 0.5 / np.sqrt(x),
    lambda x: -0.25 * x ** LONG.type(-1.5),
    lambda x: 0.375 * x ** LONG.type(-2.5),
)
_LOG1P = (
    np.log1p,
    lambda x: 1 / (1 + x),
    lambda x: -1 / (1 + x) ** 2,
    lambda x: 2 / (1 + x) ** 3,
)


def curve(f: Function, x: Number, order: int = 0, guard: bool | None = None) -> Number:
    """Return a function of a number; `guard` counts a derivative that is not finite as 0.

    A `guard` of None is that of a function that is no activation, which has none.
    """
    r, value = x.rules, f[order]
    assert value is not None
    point = x.v.astype(LONG)
    with np.errstate(all="ignore"):
        v = value(point)
        c = STABLE[order] + 2 * (2 * r.division - 1)
        finite = np.isfinite(point)
        size = np.where(finite, np.abs(point), 0)
        reach = np.where(finite, x.e, 0) + c * r.u * size + (r.normal if r.flushed else 0)
        change = np.maximum(np.abs(value(point + reach) - v), np.abs(value(point - reach) - v))
        e = 2 * change + np.where(finite, x.e, 0).astype(LONG) ** 2 + c * r.u * np.abs(v) + r.normal
        if order:  # (near its zeros a derivative is as accurate as its own slope is large)
            steep = np.abs(value(point + _STEP) - value(point - _STEP)) / (2 * _STEP)
            e = e + c * r.u * np.where(np.isfinite(steep), steep, 0) / (1 + size)
        if order and guard:
            wrong = ~np.isfinite(v)
            v, e = np.where(wrong, 0, v), np.where(wrong, 0, e)
    v = v.astype(r.wide)
    m = np.abs(v).astype(F64)

    def pull(g: Number) -> tuple[Number | None]:
        return (times_slope(f, g, x, order, guard),)

    return Number(r, v, m, e.astype(F64), (x,), pull)


def times_slope(f: Function, g: Number, x: Number, order: int, guard: bool | None) -> Number | None:
    """Return g times the derivative of the order-th derivative of f."""
    if f is ACTIVATIONS["none"]:
        return g if order == 0 else None
    return None if f[order + 1] is None else g * curve(f, x, order + 1, guard)


def activation(name: str, x: Number, guard: bool = True) -> Number:
    """Return an activation's value."""
    return x if name == "none" else curve(ACTIVATIONS[name], x, 0, guard)


def slope(name: str, x: Number, guard: bool, order: int = 1) -> Number | None:
    """Return a derivative of an activation; None where it is zero everywhere."""
    f = ACTIVATIONS[name]
    if name == "none":
        one = x.rules.number(np.ones(x.shape))
        return one if order == 1 else None
    return None if f[order] is None else curve(f, x, order, guard)


class Math:
    """The functions that formulas are written with, for numbers: `numfuse.expr` has their like."""

    def __init__(self, guard: bool = True) -> None:
        self.guard = guard

    def act(self, name: str, x: Any) -> Any:
        return activation(name, x, self.guard)

    def tanh(self, x: Any) -> Any:
        return curve(ACTIVATIONS["tanh"], x)

    def sigmoid(self, x: Any) -> Any:
        return curve(ACTIVATIONS["sigmoid"], x)

    def exp(self, x: Any) -> Any:
        return curve((np.exp,) * 4, x)

    def sqrt(self, x: Any) -> Any:
        return curve(_ROOT, x)

    def log1p(self, x: Any) -> Any:
        return curve(_LOG1P, x)

    def maximum(self, x: Any, y: Any) -> Any:
        return larger(x, y)

    def where_positive(self, x: Any, y: Any, z: Any) -> Any:
        return where(greater(x, 0.0), y, z)
