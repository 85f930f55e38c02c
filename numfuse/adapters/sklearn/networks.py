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

from numfuse.activations import Activation, formulas
from numfuse.adapters.sklearn.formulas import recorded
from numfuse.adapters.sklearn.repeated import Repeated
from numfuse.definitions import UserEpilogue
from numfuse.functional import matmul_bias_activation, matmul_bias_activation_bwd
from numfuse.fusion import elementwise, elementwise_bwd
from numfuse.multilayer import mlp

#: {scikit-learn's activation: numfuse's}
#: (The objects: a user's activation may take a name.)
ACTIVATIONS = {
    "identity": formulas.none,
    "logistic": formulas.sigmoid,
    "tanh": formulas.tanh,
    "relu": formulas.relu,
}


def _shifted(act: Activation) -> UserEpilogue:
    """Return the formula of a first layer after its product."""
    return recorded(f"{act.name}_of_sum", "a layer")(lambda z, bias: act(z + bias))


_SHIFTED = {act: _shifted(act) for act in ACTIVATIONS.values()}


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
    x: Any,
    coefs: Sequence[ndarray],
    intercepts: Sequence[ndarray],
    activation: str,
    final: Activation,
) -> ndarray:
    """Return a network's results; of a sparse `x` the first product is SciPy's."""
    act = ACTIVATIONS[activation]
    if scipy.sparse.issparse(x):
        z = np.ascontiguousarray(x @ coefs[0])
        last = len(coefs) == 1
        x = elementwise(_SHIFTED[final if last else act], z, intercepts[0], out=z)
        if last:
            return x
        coefs, intercepts = coefs[1:], intercepts[1:]
    made: ndarray = mlp(x, coefs, intercepts, act, final=final)
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
    x : (samples, d) array
        The input of the first layer, which may have other values at the next pass.
    first : int, default 0
        The first layer that it has.

    Attributes
    ----------
    logits : function
        Returns the last layer's sums, contiguous.
    back : function
        Writes the network's gradient, by that of the logits, which is in their place.
    """

    def __init__(self, net: Network, x: ndarray, first: int = 0) -> None:
        self.net, self.x, self.first = net, x, first
        self.act = ACTIVATIONS[net.activation]
        self.logits, self.back = Repeated(self._layers), Repeated(self._layers_back)

    # (All that follows is recorded: see `Repeated`.)
    def _layers(self, backend: Any) -> ndarray:
        net, h = self.net, self.x
        self._kept: list[tuple[ndarray, ndarray | None]] = []
        for i in range(self.first, len(net.coefs)):
            layer: Any = h, net.coefs[i], net.intercepts[i]
            if i == len(net.coefs) - 1:
                self._kept.append((h, None))
                h = matmul_bias_activation(*layer, backend=backend)
            else:
                how: Any = {"activation": self.act, "return_pre_activation": True}
                out, pre = matmul_bias_activation(*layer, **how, backend=backend)
                self._kept.append((h, pre))
                h = out
        self._logits = h
        return h

    def _layers_back(self, backend: Any) -> None:
        net, grad = self.net, self._logits
        for i in range(len(net.coefs) - 1, self.first - 1, -1):
            h, pre = self._kept[i - self.first]
            layer: Any = grad, h, net.coefs[i], net.intercepts[i]
            how: Any = {"pre_activation": pre, "backend": backend}
            how["activation"] = formulas.none if pre is None else self.act
            how["needs"] = ("a", "b", "bias") if i else ("b", "bias")
            out = None, net.d_coefs[i], net.d_intercepts[i]
            grad = matmul_bias_activation_bwd(*layer, **how, out=out).d_a
        self.grad = grad


class SparsePass:
    """A pass of so many samples that are rows of sparse matrices.

    The first layer's products are SciPy's: those with what is not zero.
    """

    def __init__(self, net: Network, samples: int) -> None:
        self.net = net
        self.z = np.empty((samples, net.units[1]), net.flat.dtype)
        self.d_z, self.rest = np.empty_like(self.z), Pass(net, np.empty_like(self.z), 1)
        self._shifted = _SHIFTED[self.rest.act if len(net.coefs) > 1 else formulas.none]
        self._into, self._from = Repeated(self._shift), Repeated(self._shift_back)
        #: The samples' inputs, to be set before a pass.
        self.x: Any = None

    def logits(self) -> ndarray:
        """Return the last layer's sums, contiguous."""
        self.z[...] = self.x @ self.net.coefs[0]
        self._into()
        return self.rest.logits()

    def back(self) -> None:
        """Write the network's gradient, by that of the logits, which is in their place."""
        self.rest.back()
        self._from()
        self.net.d_coefs[0][...] = self.x.T @ self.d_z

    # (Recorded, too.)
    def _shift(self, backend: Any) -> None:
        operands = self.z, self.net.intercepts[0]
        elementwise(self._shifted, *operands, out=self.rest.x, backend=backend)

    def _shift_back(self, backend: Any) -> None:
        out = self.d_z, self.net.d_intercepts[0]
        operands = self.z, self.net.intercepts[0]
        elementwise_bwd(self.rest.grad, self._shifted, *operands, out=out, backend=backend)
