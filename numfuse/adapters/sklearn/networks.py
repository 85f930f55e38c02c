"""A network whose parameters are views of one flat vector, and its gradient, views of another.

The order is scikit-learn's, that of its lbfgs: all weights, layer by layer, then all biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse
from numpy import ndarray

import numfuse as nf
from numfuse.adapters.sklearn.formulas import recorded
from numfuse.definitions import UserEpilogue

#: {scikit-learn's activation: numfuse's}
ACTIVATIONS = {"identity": "none", "logistic": "sigmoid", "tanh": "tanh", "relu": "relu"}


def _shifted(name: str) -> UserEpilogue:
    """Return the formula of a first layer after its product."""
    act = nf.activations()[name]

    return recorded(f"{name}_of_sum", "a layer")(lambda z, bias: act(z + bias))


_SHIFTED = {name: _shifted(name) for name in ACTIVATIONS.values()}


def views(flat: ndarray, units: Sequence[int]) -> tuple[list[ndarray], list[ndarray]]:
    """Return weights and biases of layers between so many units, as views of a flat vector."""
    found: tuple[list[ndarray], list[ndarray]] = [], []
    start = 0
    for k, n in pairwise(units):
        found[0].append(flat[start : start + k * n].reshape(k, n))
        start += k * n
    for n in units[1:]:
        found[1].append(flat[start : start + n])
        start += n
    return found


def forward(
    x: Any, coefs: Sequence[ndarray], intercepts: Sequence[ndarray], activation: str, final: str
) -> ndarray:
    """Return a network's results; of a sparse `x` the first product is SciPy's."""
    act = ACTIVATIONS[activation]
    if scipy.sparse.issparse(x):
        z = np.ascontiguousarray(x @ coefs[0])
        last = len(coefs) == 1
        x = nf.elementwise(_SHIFTED[final if last else act], z, intercepts[0], out=z)
        if last:
            return x
        coefs, intercepts = coefs[1:], intercepts[1:]
    made: ndarray = nf.mlp(x, coefs, intercepts, act, final=final)
    return made


class Network:
    """Parameters and gradient of a network that is trained.

    Attributes
    ----------
    flat, gradient : 1-D arrays
    coefs, intercepts : lists of views of `flat`
    weights : 1-D array
        The part of `flat` that the penalty holds for.
    decay : 1-D array
        1 where it does, and 0 behind.
    """

    def __init__(self, flat: ndarray, units: Sequence[int], activation: str) -> None:
        self.flat, self.gradient = flat, np.empty_like(flat)
        self.activation_name, self.activation = activation, ACTIVATIONS[activation]
        self.coefs, self.intercepts = views(flat, units)
        self.d_coefs, self.d_intercepts = views(self.gradient, units)
        weights = sum(w.size for w in self.coefs)
        self.weights, self.decay = flat[:weights], np.zeros_like(flat)
        self.decay[:weights] = 1
        self._kept: Any = None

    def logits(self, x: Any) -> ndarray:
        """Return the last layer's sums, a new contiguous array, and keep what `back` takes."""
        hidden = 0
        if scipy.sparse.issparse(x):
            z, hidden = np.ascontiguousarray(x @ self.coefs[0]), 1
            act = self.activation if len(self.coefs) > 1 else "none"
            sums, x = (x, z), nf.elementwise(_SHIFTED[act], z, self.intercepts[0])
            if len(self.coefs) == 1:
                self._kept = sums, x, None
                return x
        else:
            sums = None
        rest = self.coefs[hidden:], self.intercepts[hidden:], self.activation
        made, kept = nf.mlp(x, *rest, keep=True)
        self._kept = sums, x, kept
        result: ndarray = made
        return result

    def back(self, grad: ndarray) -> None:
        """Write the gradient, by that of the sums that `logits` returned last."""
        (sums, x, kept), self._kept = self._kept, None
        if sums is None:
            self._back(grad, x, 0, ("weights", "biases"), kept)
            return
        given, z = sums
        if len(self.coefs) > 1:
            grad = self._back(grad, x, 1, ("x", "weights", "biases"), kept)
            formula = _SHIFTED[self.activation]
            grad, d_b = nf.elementwise_bwd(grad, formula, z, self.intercepts[0])
            self.d_intercepts[0][...] = d_b
        else:
            np.sum(grad, axis=0, out=self.d_intercepts[0])
        self.d_coefs[0][...] = given.T @ grad

    def _back(self, grad: ndarray, x: Any, first: int, needs: tuple[str, ...], kept: Any) -> Any:
        """Write the gradients of layers from `first` on; return that of their input, if needed."""
        rest = self.coefs[first:], self.intercepts[first:], self.activation
        found = nf.mlp_bwd(grad, x, *rest, needs=needs, kept=kept)
        for to, d in zip(self.d_coefs[first:], found.d_weights, strict=True):
            to[...] = d
        for to, d in zip(self.d_intercepts[first:], found.d_biases, strict=True):
            to[...] = d
        return found.d_x
