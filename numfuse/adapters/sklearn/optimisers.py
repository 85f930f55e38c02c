"""The stochastic optimisers: scikit-learn's rates and stopping, and an update in one pass over memory.

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

import numfuse as nf
from numfuse import expr as ex
from numfuse.adapters.sklearn.formulas import recorded


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
    """What both have: the update of flat vectors, whose numbers are arrays of their dtype."""

    state: tuple[ndarray, ...]

    def _numbers(self, dtype: np.dtype[Any], *values: float) -> tuple[ndarray, ...]:
        # Arrays, which each step finds as they are: a Python number would be made one each time.
        return tuple(np.array(x, dtype) for x in values)


class Sgd(_Flat, SGDOptimizer):  # type: ignore[misc]
    """Stochastic gradient descent, with momentum."""

    def __init__(self, flat: ndarray, *how: Any) -> None:
        super().__init__([], *how)
        self.state = (np.zeros_like(flat),)
        self.numbers = self._numbers(flat.dtype, 0.0, 0.0, self.momentum)

    def update(self, flat: ndarray, gradient: ndarray, decay: ndarray, penalty: float) -> None:
        """Take a step of the parameters `flat`, in place."""
        self.numbers[0][...], self.numbers[1][...] = penalty, self.learning_rate
        formula = nesterov if self.nesterov else sgd
        where = flat, *self.state
        nf.elementwise(formula, *where, gradient, decay, *self.numbers, out=where)


class Adam(_Flat, AdamOptimizer):  # type: ignore[misc]
    """Adam."""

    def __init__(self, flat: ndarray, *how: Any) -> None:
        super().__init__([], *how)
        self.state = np.zeros_like(flat), np.zeros_like(flat)
        rests = self.beta_1, 1 - self.beta_1, self.beta_2, 1 - self.beta_2, self.epsilon
        self.numbers = self._numbers(flat.dtype, 0.0, 0.0, *rests)

    def update(self, flat: ndarray, gradient: ndarray, decay: ndarray, penalty: float) -> None:
        """Take a step of the parameters `flat`, in place."""
        self.t += 1
        unbiased = math.sqrt(1 - self.beta_2**self.t) / (1 - self.beta_1**self.t)
        self.learning_rate = self.learning_rate_init * unbiased
        self.numbers[0][...], self.numbers[1][...] = penalty, self.learning_rate
        where = flat, *self.state
        nf.elementwise(adam, *where, gradient, decay, *self.numbers, out=where)


def optimiser(solver: str, estimator: Any, flat: ndarray) -> Sgd | Adam:
    """Return the optimiser that an estimator's parameters ask for."""
    rate = estimator.learning_rate_init
    if solver == "sgd":
        schedule, power = estimator.learning_rate, estimator.power_t
        momentum = estimator.momentum, estimator.nesterovs_momentum
        return Sgd(flat, rate, schedule, *momentum, power)
    return Adam(flat, rate, estimator.beta_1, estimator.beta_2, estimator.epsilon)
