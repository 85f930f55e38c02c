"""Activations and their derivatives in NumPy, as one writes them for speed: ufuncs in place.

With the logistic function s, silu(x) = x s(x) and gelu(x) = x s(v), v = 2 sqrt(2 / pi)
(x + 0.044715 x**3), the tanh form. The slope is s (1 + x v' (1 - s)), for silu with v = x.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
CUBE, SCALE = 0.044715, 2 * math.sqrt(2 / math.pi)


def numpy_activation(x: Array, activation: str, scratch: Array) -> Array:
    """x becomes activation(x), with one array of scratch; the same array is returned."""
    if activation == "relu":
        return np.maximum(x, 0, out=x)
    if activation == "silu":
        np.negative(x, out=scratch)
    else:
        np.multiply(x, x, out=scratch)
        scratch *= -SCALE * CUBE
        scratch -= SCALE
        scratch *= x  # -v
    np.exp(scratch, out=scratch)
    scratch += 1
    return np.divide(x, scratch, out=x)


def numpy_times_slope(x: Array, activation: str, grad: Array, s: Array, t: Array) -> Array:
    """grad * activation'(x), written to `s`; `t` is scratch and x is kept."""
    if activation == "relu":
        np.greater(x, 0, out=s, casting="unsafe")
    else:
        v = slope = x  # slope = x v'
        if activation == "gelu":
            np.multiply(x, x, out=t)
            np.multiply(t, SCALE * CUBE, out=s)
            s += SCALE
            s *= x
            t *= 3 * SCALE * CUBE
            t += SCALE
            t *= x
            v, slope = s, t
        np.exp(v, out=s)
        s += 1
        np.reciprocal(s, out=s)  # 1 - s(v)
        np.multiply(slope, s, out=t)
        t += 1
        np.subtract(1, s, out=s)
        s *= t
    s *= grad
    return s
