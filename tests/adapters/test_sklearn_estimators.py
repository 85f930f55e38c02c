"""scikit-learn's perceptrons by numfuse as estimators: its checks and its tools, and the losses."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from scipy.special import expit, log_softmax, xlogy
from sklearn import neural_network
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from tolerance import DTYPES, EVALUATION, gamma, roundoff

from numfuse.adapters.sklearn import MLPClassifier, MLPRegressor, losses


@pytest.mark.parametrize("solver", ["adam", "lbfgs"])
@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_scikit_learns_own_checks_pass(kind, solver):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (of convergence, and what the checks provoke)
        check_estimator(kind(max_iter=20, solver=solver))


def test_a_grid_search_over_a_pipeline_finds_what_scikit_learns_finds():
    x, y = load_digits(n_class=3, return_X_y=True)
    grid = {"mlp__alpha": [1e-4, 10.0], "mlp__activation": ["relu", "tanh"]}
    how = {"batch_size": 32, "max_iter": 6, "random_state": 0}
    searched = []
    for kind in (neural_network.MLPClassifier, MLPClassifier):
        steps = Pipeline([("scale", StandardScaler()), ("mlp", kind((8,), **how))])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            searched.append(GridSearchCV(steps, grid, cv=2, n_jobs=1).fit(x, y))
    right, made = searched
    scores = [found.cv_results_["mean_test_score"] for found in searched]
    np.testing.assert_array_equal(*scores)  # (counts of right classes)
    assert made.best_params_ == right.best_params_ and made.best_score_ > 0.7
    assert type(made.best_estimator_["mlp"]) is MLPClassifier


def test_without_scikit_learn_the_import_names_the_extra():
    code = (
        "import sys\nsys.modules['sklearn'] = None\n"  # (what Python takes for: it is not there)
        "try:\n    import numfuse.adapters.sklearn\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "scikit-learn" in done.stdout and 'pip install "numfuse[sklearn]"' in done.stdout


# --- losses ---------------------------------------------------------------------------------------
ROWS, SAMPLES = 37, 50


def exact(activation, z, y):
    """Return losses by row, as sums of outputs, and gradients: textbook, in float64."""
    eps = np.finfo(z.dtype).eps
    z, y = z.astype(np.float64), y.astype(np.float64)
    low, high = -np.log1p(-float(eps)), -np.log(float(eps))
    if activation == "softmax":
        log_p = log_softmax(z, axis=1)
        return np.clip(-(y * log_p).sum(axis=1), low, high), np.exp(log_p) - y
    if activation == "logistic":
        return np.clip(np.logaddexp(0, z) - y * z, low, high).sum(axis=1), expit(z) - y
    if activation == "identity":
        return ((z - y) ** 2 / 2).sum(axis=1), z - y
    return (xlogy(y, y) - y * z - y + np.exp(z)).sum(axis=1), np.exp(z) - y


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("outputs", [1, 3, 10, 33])
@pytest.mark.parametrize("activation", ["softmax", "logistic", "identity", "exp"])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_losses_and_gradients_are_the_textbooks(name, activation, outputs, weighted):
    rng, dtype = np.random.default_rng(2), DTYPES[name]
    labels = activation in ("softmax", "logistic")
    z = (3 * rng.standard_normal((ROWS, outputs))).astype(dtype)
    z[0] *= 100 if labels else 1  # saturated
    if activation == "softmax":
        y = rng.integers(0, outputs, SAMPLES)[:, None] == np.arange(outputs)
    elif labels:
        y = rng.random((SAMPLES, outputs)) < 0.5
    else:
        y = (rng.integers(0, 4, (SAMPLES, outputs)) / 2).astype(dtype)
    index = rng.permutation(SAMPLES)[:ROWS]
    weights = rng.uniform(0, 2, SAMPLES if weighted else 0).astype(dtype)
    coefs = rng.standard_normal(1001).astype(dtype)
    own = weights[index].astype(np.float64) if weighted else np.ones(ROWS)
    by_row, slopes = exact(activation, z, y[index])
    given = y.view(np.uint8) if labels else y
    if activation == "softmax":
        given = y.argmax(axis=1)
    for array in (given, index, weights, coefs):
        array.flags.writeable = False
    found, size = z.copy(), np.abs(z).max(axis=1, initial=1).astype(np.float64)
    total, weight, squares = losses.rows_pass(activation, name, labels)(
        found, given, index, weights, coefs, losses.room(outputs, dtype)[:7]
    )
    # an exponential errs by a few u and by u of its argument; a row's sum by gamma of its outputs
    u = (EVALUATION + 2 * size) * roundoff(dtype) + gamma(outputs + 3, dtype)
    scale = own / own.sum()
    magnitude = np.maximum(np.abs(slopes), np.exp(z) if activation == "exp" else 1)
    assert (np.abs(found - slopes * scale[:, None]) <= (u * scale)[:, None] * magnitude).all()
    # (-log p of p near eps has the relative error of p; of p near 1 its absolute one)
    bound = (own * u * (1 + 4 * np.abs(by_row) + magnitude.sum(axis=1))).sum()
    assert abs(total - (own * by_row).sum()) <= bound
    assert abs(weight - own.sum()) <= gamma(ROWS, DTYPES["float64"]) * own.sum()
    wide = (coefs.astype(np.float64) ** 2).sum()
    assert abs(squares - wide) <= gamma(coefs.size, dtype) * wide


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("activation", ["softmax", "logistic", "identity", "exp"])
def test_a_nan_stays_in_its_row(name, activation):
    dtype = DTYPES[name]
    labels = activation in ("softmax", "logistic")
    z = np.ones((70, 5), dtype)
    z[40, 2] = np.nan
    y = np.zeros((70, 5), np.uint8 if labels else dtype)
    y = np.zeros(70, np.int64) if activation == "softmax" else y
    none = np.empty(0, dtype)
    operands = z, y, np.arange(70), none, none, losses.room(5, dtype)
    total, *_ = losses.rows_pass(activation, name, labels)(*operands)
    assert np.isnan(total) and np.isnan(z[40, 2]) and np.isfinite(np.delete(z, 40, axis=0)).all()
    assert activation != "softmax" or np.isnan(z[40]).all()


@pytest.mark.parametrize("classes", [1, 2, 10, 257])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_softmax_is_that_of_scipy_for_any_size_of_logits(name, classes):
    dtype = DTYPES[name]
    z = np.random.default_rng(0).standard_normal((67, classes)).astype(dtype)
    z[::3] *= 1e3
    right = np.exp(log_softmax(z.astype(np.float64), axis=1))
    bound = (EVALUATION + 2 * np.abs(z).max(axis=1)) * roundoff(dtype) + gamma(classes, dtype)
    assert (np.abs(losses.link("softmax", z.copy()) - right) <= bound[:, None]).all()
    assert losses.link("softmax", z[:0].copy()).shape == (0, classes)
