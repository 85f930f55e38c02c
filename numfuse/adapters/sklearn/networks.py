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
from numfuse.adapters.sklearn.repeated import Repeated
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
    d_coefs, d_intercepts : lists of views of `gradient`
    weights : 1-D array
        The part of `flat` that the penalty holds for.
    decay : 1-D array
        1 where it does, and 0 behind.
    """

    def __init__(self, flat: ndarray, units: Sequence[int], activation: str) -> None:
        self.flat, self.gradient, self.units = flat, np.empty_like(flat), tuple(units)
        self.activation = activation
        self.coefs, self.intercepts = views(flat, units)
        self.d_coefs, self.d_intercepts = views(self.gradient, units)
        weights = sum(w.size for w in self.coefs)
        self.weights, self.decay = flat[:weights], np.zeros_like(flat)
        self.decay[:weights] = 1


class Pass:
    """A network's logits on so many samples, and its gradient, in memory that stays.

    Parameters
    ----------
    net : Network
    x : (samples, features) array, or how many samples there are
        The inputs, which may have other values at the next pass; a number: they will be sparse, and
        are given to `logits`. Of these the first layer's products are SciPy's.
    """

    def __init__(self, net: Network, x: ndarray | int) -> None:
        self.net, self.act = net, ACTIVATIONS[net.activation]
        self.first = int(isinstance(x, int))
        if isinstance(x, int):
            self.z = np.empty((x, net.units[1]), net.flat.dtype)
            x, self.d_z = np.empty_like(self.z), np.empty_like(self.z)
        self.x = x
        self._forward, self._back = Repeated(self._layers), Repeated(self._layers_back)
        self._into, self._from = Repeated(self._shift), Repeated(self._shift_back)

    def logits(self, sparse: Any = None) -> ndarray:
        """Return the last layer's sums, contiguous."""
        if self.first:
            self._given = sparse
            self.z[...] = sparse @ self.net.coefs[0]
            self._into()
        return self._forward()

    def back(self) -> None:
        """Write the network's gradient, by that of the logits, which is in their place."""
        self._back()
        if self.first:
            self._from()
            self.net.d_coefs[0][...] = self._given.T @ self.d_z

    # (All that follows is recorded: see `Repeated`.)
    def _layers(self, backend: Any) -> ndarray:
        net, h = self.net, self.x
        self._kept: list[tuple[ndarray, ndarray | None]] = []
        for i in range(self.first, len(net.coefs)):
            layer: Any = h, net.coefs[i], net.intercepts[i]
            if i == len(net.coefs) - 1:
                self._kept.append((h, None))
                h = nf.matmul_bias_activation(*layer, backend=backend)
            else:
                how: Any = {"activation": self.act, "return_pre_activation": True}
                out, pre = nf.matmul_bias_activation(*layer, **how, backend=backend)
                self._kept.append((h, pre))
                h = out
        self._logits = h
        return h

    def _layers_back(self, backend: Any) -> None:
        net, grad = self.net, self._logits
        for i in range(len(net.coefs) - 1, self.first - 1, -1):
            h, pre = self._kept[i - self.first]
            needs = ("a", "b", "bias") if i else ("b", "bias")
            grad = nf.matmul_bias_activation_bwd(
                *(grad, h, net.coefs[i], net.intercepts[i], "none" if pre is None else self.act),
                pre_activation=pre,
                needs=needs,
                out=(None, net.d_coefs[i], net.d_intercepts[i]),
                backend=backend,
            ).d_a
        self._grad = grad

    @property
    def _shifted(self) -> UserEpilogue:
        return _SHIFTED[self.act if len(self.net.coefs) > 1 else "none"]

    def _shift(self, backend: Any) -> None:
        nf.elementwise(self._shifted, self.z, self.net.intercepts[0], out=self.x, backend=backend)

    def _shift_back(self, backend: Any) -> None:
        out = self.d_z, self.net.d_intercepts[0]
        operands = self.z, self.net.intercepts[0]
        nf.elementwise_bwd(self._grad, self._shifted, *operands, out=out, backend=backend)
