r"""Pairs of perceptrons, scikit-learn's and numfuse's, and how far their results may be apart.

Both begin with the same weights and take the same batches; what differs is rounding. A gradient's
element is a sum of n products, n the samples of a batch or the units of a layer: it errs by
gamma_n G, with G the largest product, and so do the two from each other, twice that. Adam's step
is rate m / (sqrt(v) + eps), which changes by at most rate / eps of a change of the gradient; that
of SGD by rate / (1 - momentum). So parameters are apart by at most

    steps * rate * slope * 2 gamma_n G,    slope = 1 / eps, or 1 / (1 - momentum),

times what earlier differences do to later gradients: GROWTH, the curvature's, over a few dozen
steps of small rates. With Adam's usual eps of 1e-8 that says little in float32, where the tests
take 1e-2.
"""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest
import scipy.sparse
from sklearn import neural_network as theirs
from sklearn.exceptions import ConvergenceWarning
from tolerance import gamma

from numfuse.adapters import sklearn as ours

GROWTH = 20
SAMPLES, FEATURES = 60, 7
TASKS = ("binary", "multiclass", "multilabel", "regression", "regressions", "poisson")
SMALL = {
    "hidden_layer_sizes": (9, 5), "batch_size": 16, "max_iter": 6, "random_state": 3,
    "epsilon": 1e-2, "learning_rate_init": 1e-2,
}  # fmt: skip
WEIGHTED = "sample_weight" in inspect.signature(theirs.MLPClassifier.fit).parameters
POISSON = "loss" in theirs.MLPRegressor().get_params()
weighted = pytest.mark.skipif(not WEIGHTED, reason="this scikit-learn has no sample_weight")


def data(task, dtype=np.float64):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((SAMPLES, FEATURES)).astype(dtype)
    signs = x @ rng.standard_normal((FEATURES, 3)) > 0
    if task == "binary":
        return x, np.where(signs[:, 0], "yes", "no")
    if task == "multiclass":
        return x, signs.sum(axis=1)
    if task == "multilabel":
        return x, signs.astype(int)
    y = (x[:, :2] ** 2).astype(dtype)
    return x, y if task == "regressions" else y[:, 0]


def pair(task, **options):
    """Return scikit-learn's estimator and numfuse's."""
    options = SMALL | options
    if task == "poisson":
        if not POISSON:
            pytest.skip("this scikit-learn has no Poisson loss")
        options["loss"] = "poisson"
    name = "MLPRegressor" if task in TASKS[3:] else "MLPClassifier"
    return getattr(theirs, name)(**options), getattr(ours, name)(**options)


def fitted(pair, *args, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return [estimator.fit(*args, **more) for estimator in pair]


def tolerance(estimator, x, steps=None):
    """Return how far parameters may be apart after so many steps (see above)."""
    n = max(x.shape[0] if estimator.solver == "lbfgs" else SMALL["batch_size"], 16)
    if steps is None:
        steps = estimator.n_iter_ * -(-x.shape[0] // SMALL["batch_size"])
    apart = 2 * gamma(n, x.dtype) * np.abs(x).max() ** 2
    if estimator.solver == "lbfgs":
        # the line search divides differences of gradients: a digit an iteration
        return GROWTH * apart * 10 ** min(estimator.n_iter_, 6)
    slope = 1 / estimator.epsilon if estimator.solver == "adam" else 1 / (1 - estimator.momentum)
    return GROWTH * apart * (1 + steps * estimator.learning_rate_init * slope)


def assert_same(found, x, bound=None):
    """Every public attribute of scikit-learn's estimator is there, and its predictions are ours."""
    right, made = found
    dense = x.toarray() if scipy.sparse.issparse(x) else np.asarray(x)
    bound = tolerance(right, dense) if bound is None else bound
    public = {name for name in vars(right) if not name.startswith("_")}
    assert public == {name for name in vars(made) if not name.startswith("_")}
    for name in ("n_iter_", "n_outputs_", "n_layers_", "out_activation_", "t_", "n_features_in_"):
        assert getattr(made, name) == getattr(right, name), name
    for name in ("coefs_", "intercepts_"):
        for y, z in zip(getattr(made, name), getattr(right, name), strict=True):
            assert y.shape == z.shape
            np.testing.assert_allclose(y, z, rtol=0, atol=bound, err_msg=name)
    for name in ("loss_", "best_loss_", "loss_curve_", "best_validation_score_"):
        if getattr(right, name, None) is not None:
            mine, his = getattr(made, name), getattr(right, name)
            np.testing.assert_allclose(mine, his, rtol=0, atol=10 * bound, err_msg=name)
    if getattr(right, "validation_scores_", None) is not None:
        np.testing.assert_allclose(
            made.validation_scores_, right.validation_scores_, rtol=0, atol=10 * bound
        )
    if hasattr(right, "classes_"):
        np.testing.assert_array_equal(made.classes_, right.classes_)
        np.testing.assert_array_equal(made.predict(x), right.predict(x))
        mine, his = made.predict_proba(x), right.predict_proba(x)
    else:
        mine, his = made.predict(x), right.predict(x)
    assert mine.shape == his.shape
    # a result is a few sums of weights, each as far off as the weights
    np.testing.assert_allclose(mine, his, rtol=0, atol=100 * bound * max(1, np.abs(his).max()))
