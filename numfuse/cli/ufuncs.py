"""Activations and their derivatives in NumPy, as one writes them for speed: ufuncs in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def numpy_activation(x: Array, activation: str, scratch: Array) -> Array:
    """x becomes activation(x), with one array of scratch; the same array is returned."""
    if activation == "relu":
        return np.maximum(x, 0, out=x)
    if activation == "silu":
        np.negative(x, out=scratch)
        np.exp(scratch, out=scratch)
        scratch += 1
        return np.divide(x, scratch, out=x)
    np.multiply(x, x, out=scratch)  # gelu, tanh form
    scratch *= 0.044715
    scratch += 1
    scratch *= x
    scratch *= math.sqrt(2 / math.pi)
    np.tanh(scratch, out=scratch)
    scratch += 1
    x *= scratch
    x *= 0.5
    return x


def numpy_times_slope(x: Array, activation: str, grad: Array, s: Array, t: Array) -> Array:
    """grad * activation'(x), written to `s`; `t` is scratch and x is kept."""
    if activation == "relu":
        np.greater(x, 0, out=s, casting="unsafe")
    elif activation == "silu":
        np.negative(x, out=s)
        np.exp(s, out=s)
        s += 1
        np.reciprocal(s, out=s)
        np.subtract(1, s, out=t)
        t *= x
        t += 1
        s *= t
    else:
        np.multiply(x, x, out=t)
        np.multiply(t, 0.044715, out=s)
        s += 1
        s *= x
        s *= math.sqrt(2 / math.pi)
        np.tanh(s, out=s)
        t *= 3 * 0.044715
        t += 1
        t *= x
        t *= math.sqrt(2 / math.pi)  # t = x u'
        np.subtract(1, s, out=s)  # e = 1 - tanh u; the slope is (2 - e)(1 + t e) / 2
        t *= s
        t += 1
        np.subtract(2, s, out=s)
        s *= t
        s *= 0.5
    s *= grad
    return s
