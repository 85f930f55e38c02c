"""The estimators: scikit-learn's own, whose networks, losses and optimisers are numfuse's.

Parameters and their checks, labels, initial weights, scores, tags and lbfgs are inherited. What is
overridden are private methods of scikit-learn: these four, which have had their names since 0.18
(`_forward_pass_fast` since 1.0). A test in tests/adapters/test_sklearn_inputs.py fails if one is
renamed, changes its parameters, or is called no longer.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from numpy import ndarray
from sklearn import neural_network
from sklearn.neural_network._multilayer_perceptron import BaseMultilayerPerceptron
from sklearn.utils import validation

from numfuse.adapters.sklearn import losses, networks, training

_FIT_STOCHASTIC = inspect.signature(BaseMultilayerPerceptron._fit_stochastic)
_LOSS_GRAD = inspect.signature(BaseMultilayerPerceptron._loss_grad_lbfgs)


class _Fused(BaseMultilayerPerceptron):
    """A base of both: networks, losses and optimisers by numfuse."""

    coefs_: list[ndarray]
    intercepts_: list[ndarray]

    def __getstate__(self) -> dict[str, Any]:
        # Of the network all is in coefs_ and intercepts_, which a pickle holds once.
        state: dict[str, Any] = super().__getstate__()
        return {name: x for name, x in state.items() if name not in ("_network", "_objective")}

    def _forward_pass_fast(self, X: Any, check_input: bool = True) -> ndarray:
        """Return the predictions of the last layer, its activation included."""
        if check_input:
            X = validation.validate_data(self, X, accept_sparse=["csr", "csc"], reset=False)
        coefs, intercepts = self.coefs_, self.intercepts_
        dtype = np.result_type(X.dtype, coefs[0].dtype)
        if dtype not in (np.float32, np.float64):  # long double: NumPy's
            return super()._forward_pass_fast(X, check_input=False)
        X = X.astype(dtype, copy=False)
        if coefs[0].dtype != dtype:
            coefs, intercepts = ([y.astype(dtype) for y in x] for x in (coefs, intercepts))
        final = losses.final(self.out_activation_)
        z = networks.forward(X, coefs, intercepts, self.activation, final)
        return losses.link(self.out_activation_, z)

    def _fit_stochastic(self, *args: Any, **options: Any) -> None:
        given = _FIT_STOCHASTIC.bind(self, *args, **options).arguments
        weight = given.get("sample_weight")
        training.fit_stochastic(self, given["X"], given["y"], weight, given["incremental"])

    def _fit_lbfgs(self, X: Any, y: ndarray, *args: Any, **options: Any) -> None:
        try:
            super()._fit_lbfgs(X, y, *args, **options)
        finally:
            self.__dict__.pop("_objective", None)
        # (SciPy's lbfgs works in float64, where its line search has the digits it needs)
        self.coefs_, self.intercepts_ = (
            [z.astype(X.dtype, copy=False) for z in group]
            for group in (self.coefs_, self.intercepts_)
        )

    def _loss_grad_lbfgs(self, *args: Any, **options: Any) -> tuple[float, ndarray]:
        """Return loss and gradient, a new array, at the parameters of one vector."""
        given = _LOSS_GRAD.bind(self, *args, **options).arguments
        flat, x, y = given["packed_coef_inter"], given["X"], given["y"]
        objective = getattr(self, "_objective", None)
        if objective is None:
            units = training.units_of(self)
            net = networks.Network(np.empty_like(flat), units, self.activation)
            weight = given.get("sample_weight")
            made = training.Objective(net, y, weight, self.out_activation_, self.alpha)
            objective = self._objective = training.Whole(made, x.astype(flat.dtype, copy=False))
        return objective(flat)


class MLPClassifier(_Fused, neural_network.MLPClassifier):
    """:class:`sklearn.neural_network.MLPClassifier` with numfuse's networks.

    Parameters, attributes, methods and results are scikit-learn's, those of the installed version:
    the same `random_state` gives the same initial weights and the same batches.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from numfuse.adapters.sklearn import MLPClassifier
    >>> x, y = load_iris(return_X_y=True)
    >>> network = MLPClassifier((8,), learning_rate_init=0.02, max_iter=500, random_state=0)
    >>> network.fit(x, y).score(x, y) > 0.95
    True
    """


class MLPRegressor(_Fused, neural_network.MLPRegressor):
    """:class:`sklearn.neural_network.MLPRegressor` with numfuse's networks.

    Parameters, attributes, methods and results are scikit-learn's, as for :class:`MLPClassifier`.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from numfuse.adapters.sklearn import MLPRegressor
    >>> x, y = load_diabetes(return_X_y=True)
    >>> network = MLPRegressor(learning_rate_init=0.02, max_iter=500, random_state=0)
    >>> network.fit(10 * x, y / 100).score(10 * x, y / 100) > 0.5
    True
    """
