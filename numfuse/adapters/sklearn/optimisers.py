"""The stochastic optimisers: scikit-learn's rates and stopping, an update in one pass over memory.

Parameters, gradients and what an optimiser remembers are flat vectors, so that an update is one
call of :func:`numfuse.elementwise`, in place. The penalty's gradient is part of the formula: it
holds for weights and not for biases, which `decay`, 1 and 0, tells apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy import ndarray

# (Private modules of scikit-learn's, whose names have stood since 0.18; a test looks for them.)
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer

from numfuse import expr as ex
from numfuse.adapters.sklearn.formulas import recorded
from numfuse.adapters.sklearn.networks import Network
from numfuse.adapters.sklearn.repeated import Repeated
from numfuse.definitions import UserEpilogue
from numfuse.fusion import elementwise


@recorded("sgd", "scikit-learn's SGDOptimizer")
def sgd(p: Any, velocity: Any, g: Any, decay: Any, penalty: Any, rate: Any, momentum: Any) -> Any:
    """Return parameters and velocity after a step."""
    velocity = momentum * velocity - rate * (g + penalty * decay * p)
    return p + velocity, velocity


@recorded("nesterov", "scikit-learn's SGDOptimizer, with Nesterov's momentum")
def nesterov(
    p: Any, velocity: Any, g: Any, decay: Any, penalty: Any, rate: Any, momentum: Any
) -> Any:
    """Return parameters and velocity after a step."""
    step = rate * (g + penalty * decay * p)
    velocity = momentum * velocity - step
    return p + (momentum * velocity - step), velocity


@recorded("adam_with_decay", "Kingma and Ba 2014, arXiv:1412.6980, before 2.1")
def adam(
    p: Any, mean: Any, square: Any, g: Any, decay: Any, penalty: Any, rate: Any, beta_1: Any,
    rest_1: Any, beta_2: Any, rest_2: Any, epsilon: Any,
) -> Any:  # fmt: skip
    """Return parameters, mean and square after a step; the rate undoes that both began at 0."""
    g = g + penalty * decay * p
    mean = beta_1 * mean + rest_1 * g
    square = beta_2 * square + rest_2 * (g * g)
    return p - rate * mean / (ex.sqrt(square) + epsilon), mean, square


class _Flat:
    """A base: the update of flat vectors, with numbers that are arrays of their dtype."""

    state: tuple[ndarray, ...]
    learning_rate: float

    def start(self, state: int, flat: ndarray, *constants: float) -> None:
        """Begin with vectors of zeros, and numbers: penalty and rate, which change, and others."""
        self.state = tuple(np.zeros_like(flat) for _ in range(state))
        self.numbers = tuple(np.array(x, flat.dtype) for x in (0.0, 0.0, *constants))

    def begin(self, net: Network) -> None:
        """Take the network whose parameters the next steps change."""
        self._net, self._take = net, Repeated(self._step)

    def update(self, penalty: float) -> None:
        """Take a step along the network's gradient, in place."""
        self.advance()
        self.numbers[0][()] = penalty
        self.numbers[1][()] = self.learning_rate
        self._take()

    def _step(self, backend: Any) -> None:
        net = self._net
        where = net.flat, *self.state
        operands = *where, net.gradient, net.decay, *self.numbers
        elementwise(self.formula(), *operands, out=where, backend=backend)

    def formula(self) -> UserEpilogue:
        """Return the update."""
        raise NotImplementedError

    def advance(self) -> None:
        """Count a step."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("_net", "_take")}


class Sgd(_Flat, SGDOptimizer):
    """Stochastic gradient descent, with momentum."""

    def __init__(self, flat: ndarray, *how: Any) -> None:
        super().__init__([], *how)
        self.start(1, flat, self.momentum)

    def formula(self) -> UserEpilogue:
        """Return the update."""
        return nesterov if self.nesterov else sgd


class Adam(_Flat, AdamOptimizer):
    """Adam."""

    def __init__(self, flat: ndarray, *how: Any) -> None:
        super().__init__([], *how)
        betas = self.beta_1, 1 - self.beta_1, self.beta_2, 1 - self.beta_2
        self.start(2, flat, *betas, self.epsilon)

    def formula(self) -> UserEpilogue:
        """Return the update."""
        return adam

    def advance(self) -> None:
        """Count a step, on which the rate depends."""
        self.t += 1
        unbiased = math.sqrt(1 - self.beta_2**self.t) / (1 - self.beta_1**self.t)
        self.learning_rate = self.learning_rate_init * unbiased


def optimiser(solver: str, estimator: Any, flat: ndarray) -> Sgd | Adam:
    """Return the optimiser that an estimator's parameters ask for."""
    rate = estimator.learning_rate_init
    if solver == "sgd":
        schedule, power = estimator.learning_rate, estimator.power_t
        momentum = estimator.momentum, estimator.nesterovs_momentum
        return Sgd(flat, rate, schedule, *momentum, power)
    return Adam(flat, rate, estimator.beta_1, estimator.beta_2, estimator.epsilon)
