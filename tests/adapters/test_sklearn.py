"""scikit-learn's perceptrons by numfuse: the results of scikit-learn's own, step for step."""

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from perceptrons import SAMPLES, TASKS, assert_same, data, fitted, pair, tolerance, weighted
from sklearn.exceptions import ConvergenceWarning


# --- results --------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
@pytest.mark.parametrize("solver", ["adam", "sgd", "lbfgs"])
def test_results_are_those_of_scikit_learn(solver, activation, task):
    x, y = data(task)
    made = pair(task, solver=solver, activation=activation)
    before = x.copy(), y.copy()
    assert_same(fitted(made, x, y), x)
    for array, copied in zip((x, y), before, strict=True):
        np.testing.assert_array_equal(array, copied)


OPTIONS = {
    "no penalty": {"alpha": 0.0},
    "a large penalty": {"alpha": 3.0},
    "in order": {"shuffle": False},
    "early stopping": {"early_stopping": True, "validation_fraction": 0.2, "max_iter": 9},
    "one batch": {"batch_size": SAMPLES},
    "automatic batches": {"batch_size": "auto"},
    "no hidden layer": {"hidden_layer_sizes": ()},
    "one hidden layer": {"hidden_layer_sizes": 4},
    "wide": {"hidden_layer_sizes": (300,), "max_iter": 2},
    "usual epsilon": {"epsilon": 1e-8, "learning_rate_init": 1e-3},
    "other decays": {"beta_1": 0.5, "beta_2": 0.9},
    "invscaling": {"solver": "sgd", "learning_rate": "invscaling", "power_t": 0.3},
    "adaptive": {"solver": "sgd", "learning_rate": "adaptive", "tol": 0.5, "n_iter_no_change": 2},
    "no Nesterov": {"solver": "sgd", "nesterovs_momentum": False},
    "no momentum": {"solver": "sgd", "momentum": 0.0},
}


@pytest.mark.parametrize("task", ["multiclass", "regressions"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_means_what_it_means_there(name, task):
    x, y = data(task)
    assert_same(fitted(pair(task, **OPTIONS[name]), x, y), x)


def test_a_batch_larger_than_the_data_is_clipped_with_a_warning():
    x, y = data("regression")
    for estimator in pair("regression", batch_size=SAMPLES + 1, max_iter=1):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            estimator.fit(x, y)
        assert {str(w.message)[:16] for w in told} == {"Got `batch_size`", "Stochastic Optim"}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_training_ends_at_the_same_epoch(task, early):
    x, y = data(task)
    options = {"tol": 1e-2, "n_iter_no_change": 3, "max_iter": 300, "early_stopping": early}
    found = fitted(pair(task, **options), x, y)
    assert found[0].n_iter_ == found[1].n_iter_ < 300
    # (differences that grow over some hundred steps decide nothing before they reach tol)
    assert_same(found, x, 1e-6)


def test_what_is_told_is_the_same(capsys):
    x, y = data("multiclass")
    told = []
    for estimator in pair("multiclass", verbose=True, tol=10.0, n_iter_no_change=2):
        fitted([estimator], x, y)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and "Iteration 3, loss" in told[0] and "Stopping" in told[0]


@pytest.mark.parametrize("task", ["multiclass", "regression"])
@pytest.mark.parametrize("solver", ["adam", "sgd", "lbfgs"])
def test_a_warm_start_goes_on(solver, task):
    x, y = data(task)
    found = pair(task, warm_start=True, solver=solver)
    for _ in range(2):
        fitted(found, x, y)
    assert_same(found, x, 2 * tolerance(found[0], x))


@pytest.mark.parametrize("solver", ["adam", "sgd"])
@pytest.mark.parametrize("task", ["multiclass", "multilabel", "regression"])
def test_partial_fits_go_on_with_the_optimiser_as_it_is(task, solver):
    x, y = data(task)
    found = list(pair(task, solver=solver, batch_size=8))
    more = {} if task == "regression" else {"classes": range(3) if y.ndim > 1 else range(4)}
    for step in range(4):
        rows = slice(15 * step, 15 * step + 15)
        for estimator in found:
            estimator.partial_fit(x[rows], y[rows], **more)
        more = {}
        if step == 1:  # what goes through a pickle goes on as well
            found[1] = pickle.loads(pickle.dumps(found[1]))
    assert_same(found, x, tolerance(found[0], x, 8))


@pytest.mark.parametrize("first, then", [("float32", "float64"), ("float64", "float32")])
def test_parameters_keep_the_dtype_that_they_began_with(first, then):
    x, y = data("regression", first)
    found = pair("regression", activation="tanh", warm_start=True)
    for dtype in (first, then):
        fitted(found, x.astype(dtype), y.astype(dtype))
    assert {z.dtype for estimator in found for z in estimator.coefs_} == {np.dtype(first)}
    assert_same(found, x, 2 * tolerance(found[0], x.astype("float32")))


def test_fits_in_several_threads_do_not_disturb_each_other():
    x, y = data("multiclass")
    alone = fitted(pair("multiclass", max_iter=40), x, y)[1]
    with warnings.catch_warnings(), ThreadPoolExecutor(4) as threads:
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimators = [pair("multiclass", max_iter=40)[1] for _ in range(8)]
        for made in threads.map(lambda estimator: estimator.fit(x, y), estimators):
            assert made.loss_curve_ == alone.loss_curve_


def test_parameters_set_by_hand_are_where_the_next_step_begins():
    x, y = data("regression")
    found = pair("regression", shuffle=False)
    for estimator in found:
        estimator.partial_fit(x, y)
        estimator.coefs_[0] = np.full_like(estimator.coefs_[0], 0.1)
        estimator.intercepts_[0][:] = 0.2
        estimator.partial_fit(x, y)
    assert_same(found, x, tolerance(found[0], x, 8))


@weighted
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("solver", ["adam", "lbfgs"])
def test_samples_weights_are_theirs(solver, task):
    x, y = data(task)
    weight = np.random.default_rng(1).uniform(0, 3, SAMPLES)
    weight[::7] = 0
    # (tanh: with relu a trial of lbfgs' line search has logits of 33, for which scikit-learn's
    # log(1 - p) has two digits)
    found = fitted(pair(task, solver=solver, activation="tanh"), x, y, sample_weight=weight)
    assert_same(found, x, 3 * tolerance(found[0], x))


@weighted
def test_weights_are_split_with_their_samples():
    x, y = data("regression")
    weight = np.random.default_rng(1).uniform(0.5, 3, SAMPLES)
    found = fitted(pair("regression", early_stopping=True), x, y, sample_weight=weight)
    assert_same(found, x, 3 * tolerance(found[0], x))


@weighted
def test_a_batch_without_weight_is_an_error_in_both():
    x, y = data("regression")
    for estimator in pair("regression", shuffle=False):
        with pytest.raises(ZeroDivisionError, match="Weights sum to zero"):
            estimator.fit(x, y, sample_weight=np.eye(SAMPLES)[0])
