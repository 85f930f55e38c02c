"""What the operations are, a second time: straight from the textbook, in long double.

Independent of numfuse on purpose: no formula, no shape rule and no array of the package is used, so
that the reference backend is tested like any other. `erf` is the one function that NumPy lacks; it
is SciPy's, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import ndarray
from scipy.special import erfc

LONG = np.longdouble


def wide(x: Any) -> ndarray:
    return np.asarray(x).astype(LONG)


def _sigmoid(x: ndarray) -> ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def _gelu_argument(x: ndarray) -> tuple[ndarray, ndarray]:
    # 2 u and 2 u'; x is held where the cubes are finite and the sigmoid long 0 or 1
    x = np.clip(x, -1000, 1000)
    c = 2 * np.sqrt(2 / LONG(np.pi))
    return c * (x + LONG("0.044715") * x**3), c * (1 + 3 * LONG("0.044715") * x**2)


def _gelu_slope(x: ndarray) -> ndarray:
    argument, slope = _gelu_argument(x)
    return _sigmoid(argument) + np.clip(x, -1000, 1000) * _bell(argument) * slope


def _bell(x: ndarray) -> ndarray:
    return _sigmoid(x) * _sigmoid(-x)


def _phi(x: ndarray) -> ndarray:
    return np.exp(-(np.clip(x, -1e3, 1e3) ** 2) / 2) / np.sqrt(2 * LONG(np.pi))


def _normal(x: ndarray) -> ndarray:
    return wide(erfc(-x.astype(np.float64) / np.sqrt(2))) / 2


def _times(x: ndarray, y: ndarray) -> ndarray:
    """x y with 0 for inf * 0, the limit of all the products below."""
    return np.where(y == 0, np.where(np.isnan(x), x, 0), x * y)


VALUE = {
    "none": lambda x: x,
    "relu": lambda x: np.where(x < 0, 0, x),
    "gelu": lambda x: _times(x, _sigmoid(_gelu_argument(x)[0])),
    "silu": lambda x: _times(x, _sigmoid(x)),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "gelu_erf": lambda x: _times(x, _normal(x)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
}
SLOPE = {
    "none": np.ones_like,
    "relu": lambda x: np.where(x > 0, LONG(1), LONG(0)),
    "gelu": _gelu_slope,
    "silu": lambda x: _sigmoid(x) + _times(x, _bell(x)),
    "sigmoid": _bell,
    "tanh": lambda x: 4 * _bell(2 * x),
    "gelu_erf": lambda x: _normal(x) + _times(x, _phi(x)),
    "softplus": _sigmoid,
}


def _gelu_second(x: ndarray) -> ndarray:
    # (x s(v))'' = 2 s'(v) v' + x (s''(v) v'^2 + s'(v) v''), s'' = s' (1 - 2 s)
    argument, slope = _gelu_argument(x)
    x = np.clip(x, -1000, 1000)
    bend = 2 * np.sqrt(2 / LONG(np.pi)) * 6 * LONG("0.044715") * x
    turn = -np.tanh(argument / 2) * slope**2 + bend
    return _bell(argument) * (2 * slope + x * turn)


def _silu_second(x: ndarray) -> ndarray:
    return _times(2 - np.clip(x, -3000, 3000) * np.tanh(x / 2), _bell(x))


SECOND = {
    "none": np.zeros_like,
    "relu": lambda x: np.zeros_like(x),
    "gelu": _gelu_second,
    "silu": _silu_second,
    "sigmoid": lambda x: -_bell(x) * np.tanh(x / 2),
    "tanh": lambda x: -8 * _bell(2 * x) * np.tanh(x),
    "gelu_erf": lambda x: _times(2 - np.clip(x, -1e3, 1e3) ** 2, _phi(x)),
    "softplus": _bell,
}
#: Third derivatives, of some.
THIRD = {
    "sigmoid": lambda x: _bell(x) * (1 - 6 * _bell(x)),
    "tanh": lambda x: 4 * _bell(2 * x) * (6 * np.tanh(x) ** 2 - 2),
    "silu": lambda x: (
        3 * _bell(x) * (_sigmoid(-x) - _sigmoid(x)) + _times(x, _bell(x) * (1 - 6 * _bell(x)))
    ),
}
ACTIVATIONS = tuple(VALUE)


def sum_to(x: ndarray, shape: tuple[int, ...]) -> ndarray:
    """Sum over the axes along which `shape` was broadcast."""
    while x.ndim > len(shape):
        x = x.sum(axis=0)
    for axis, length in enumerate(shape):
        if length == 1 and x.shape[axis] != 1:
            x = x.sum(axis=axis, keepdims=True)
    return x


def pre_activation(a: ndarray, b: ndarray, bias: ndarray | None) -> ndarray:
    pre = wide(a) @ wide(b)
    if bias is not None:
        pre = pre + wide(bias)
    return pre


# --- formulas of a user's own ---------------------------------------------------------------------
# Written with arithmetic and the functions below, of real or of complex arguments.
#: Half of the digits of every product of two such steps are lost below the smallest number.
STEP = LONG(2) ** -300


def slopes(f: Any, *inputs: Any) -> tuple[list[ndarray], list[list[ndarray]]]:
    """The results of a formula, and the partial derivatives of each, in long double.

    By the complex step: Im f(x + ih) / h has no cancellation, and h may be as small as one likes
    (Squire and Trapp 1998, doi:10.1137/S003614459631241X). Where `f` has pieces, it chooses among
    them by the real part.
    """

    def results(arguments: list[ndarray]) -> list[ndarray]:
        made = f(*arguments)
        return list(np.broadcast_arrays(*(made if isinstance(made, tuple) else (made,))))

    real = list(np.broadcast_arrays(*(wide(x) for x in inputs)))
    partials: list[list[ndarray]] = []
    for i in range(len(real)):
        moved = [x.astype(np.clongdouble) for x in real]
        moved[i] += STEP * np.clongdouble(1j)
        partials.append([y.imag / STEP for y in results(moved)])
    return results(real), [list(by_input) for by_input in zip(*partials, strict=True)]


def logistic(x: ndarray) -> ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: ndarray) -> ndarray:
    return x * logistic(2 * np.sqrt(2 / LONG(np.pi)) * (x + LONG("0.044715") * x**3))


def larger(x: Any, y: Any) -> ndarray:
    return np.where(np.real(x) > np.real(y), x, y)
