"""scikit-learn's perceptrons by numfuse: inputs of every kind, copies, and what numfuse runs."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
import scipy.sparse

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from perceptrons import TASKS, WEIGHTED, assert_same, data, fitted, pair, tolerance
from sklearn import neural_network as theirs
from sklearn.base import clone
from tolerance import gamma

import numfuse as nf
from numfuse.adapters import sklearn as ours


# --- inputs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("solver", ["adam", "lbfgs"])
@pytest.mark.parametrize("hidden", [(), (9,), (9, 5)], ids=len)
@pytest.mark.parametrize("form", ["csr_array", "csc_array", "csr_matrix"])
def test_sparse_inputs_give_what_dense_ones_give(form, hidden, solver):
    x, y = data("multiclass")
    x[np.abs(x) < 0.8] = 0
    sparse = getattr(scipy.sparse, form)(x)
    options = {"hidden_layer_sizes": hidden, "solver": solver, "activation": "tanh"}
    made = fitted(pair("multiclass", **options), sparse, y)
    assert_same(made, sparse)
    dense = fitted(pair("multiclass", **options), x, y)[1]
    assert_same([dense, made[1]], sparse)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("layout", ["columns", "every other", "read-only", "lists"])
def test_inputs_of_any_layout_are_what_their_copies_are(layout, shuffle):
    x, y = data("regressions")
    given = {
        "columns": np.asfortranarray(x),
        "every other": np.repeat(x, 2, axis=1)[:, ::2],
        "read-only": x.copy(),
        "lists": x.tolist(),
    }[layout]
    targets = y.copy()
    if layout == "read-only":
        given.flags.writeable = targets.flags.writeable = False
    found = [fitted(pair("regressions", shuffle=shuffle), z, targets)[1] for z in (x, given)]
    for a, b in zip(found[0].coefs_, found[1].coefs_, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("solver", ["adam", "sgd", "lbfgs"])
def test_float32_stays_float32(solver, task):
    x, y = data(task, np.float32)
    found = fitted(pair(task, solver=solver, activation="tanh", max_iter=3), x, y)
    assert_same(found, x)
    made = found[1]
    assert {z.dtype for z in (*made.coefs_, *made.intercepts_)} == {np.dtype(np.float32)}
    predicted = made.predict(x) if task in TASKS[3:] else made.predict_proba(x)
    assert predicted.dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "int64", "bool", "longdouble"])
@pytest.mark.parametrize("of", ["float32", "float64"])
def test_other_dtypes_are_taken_as_scikit_learn_takes_them(of, dtype):
    x, y = data("regression", of)
    found = fitted(pair("regression"), x, y)
    other = x.astype(dtype)
    right, made = (estimator.predict(other) for estimator in found)
    # (in float32 the parameters differ too; their bound, as in `assert_same`)
    bound = 100 * tolerance(found[0], x) * max(1, np.abs(right).max())
    np.testing.assert_allclose(made, right, rtol=0, atol=bound)
    assert made.dtype == right.dtype
    again = fitted(pair("regression"), other, y)
    assert [z.coefs_[0].dtype for z in again] == [np.dtype(np.float64)] * 2


@pytest.mark.parametrize("given, kept", [("float64", "float32"), ("float32", "float64")])
def test_predictions_have_the_wider_dtype(given, kept):
    x, y = data("multiclass", kept)
    found = fitted(pair("multiclass"), x, y)
    right, made = (estimator.predict_proba(x.astype(given)) for estimator in found)
    assert right.dtype == made.dtype == np.float64
    np.testing.assert_allclose(made, right, rtol=0, atol=100 * tolerance(found[0], x))


# --- estimators -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["MLPClassifier", "MLPRegressor"])
def test_parameters_and_their_defaults_are_the_same(name):
    right, made = getattr(theirs, name), getattr(ours, name)
    assert made().get_params() == right().get_params()
    assert repr(made(alpha=1)) == repr(right(alpha=1))
    assert isinstance(made(), right)


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_copies_and_pickles_predict_what_the_original_does(task):
    x, y = data(task)
    made = fitted(pair(task), x, y)[1]
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        np.testing.assert_array_equal(other.predict(x), made.predict(x))
        assert type(other) is type(made)
    fresh = clone(made)
    assert fresh.get_params() == made.get_params() and not hasattr(fresh, "coefs_")
    # parameters, Adam's mean and square, and the best parameters: what scikit-learn's pickle has
    wide = fitted(pair(task, hidden_layer_sizes=(256, 64), max_iter=1), x, y)
    assert len(pickle.dumps(wide[1])) <= len(pickle.dumps(wide[0]))


def test_rows_of_probabilities_sum_to_one_however_large_logits_are():
    x, y = data("multiclass")
    made = fitted(pair("multiclass"), x, y)[1]
    for scale in (1, 1e4, 1e300):
        found = made.predict_proba(scale * x)
        assert (found >= 0).all()
        # a sum of K numbers that are rounded quotients
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=0, atol=gamma(6, np.dtype("f8")))


def test_an_interrupted_training_keeps_what_it_has(monkeypatch):
    x, y = data("regression")
    made = pair("regression")[1]
    update = type(made)._update_no_improvement_count

    def interrupt(self, *args):
        if self.n_iter_ == 2:
            raise KeyboardInterrupt
        update(self, *args)

    monkeypatch.setattr(ours.MLPRegressor, "_update_no_improvement_count", interrupt)
    with pytest.warns(UserWarning, match="Training interrupted by user"):
        made.fit(x, y)
    assert made.n_iter_ == 2 and np.isfinite(made.predict(x)).all()


def test_partial_fit_refuses_what_scikit_learn_refuses():
    x, y = data("regression")
    for estimator in pair("regression", early_stopping=True):
        with pytest.raises(ValueError, match="partial_fit does not support early_stopping"):
            estimator.partial_fit(x, y)
    for estimator in pair("regression", early_stopping=True, validation_fraction=0.01)[
        not WEIGHTED :
    ]:
        with pytest.raises(ValueError, match="validation set is too small"):
            estimator.fit(x, y)
    for estimator in pair("regression", solver="lbfgs"):
        assert getattr(estimator, "partial_fit", None) is None or estimator.solver == "lbfgs"


# --- numfuse --------------------------------------------------------------------------------------
def test_numfuse_runs_it_and_scikit_learn_does_not(monkeypatch):
    x, y = data("multiclass")

    def fail(*_, **__):
        raise AssertionError("scikit-learn's own network ran")

    base = theirs._multilayer_perceptron.BaseMultilayerPerceptron
    for name in ("_backprop", "_forward_pass", "_compute_loss_grad"):
        monkeypatch.setattr(base, name, fail)
    for solver in ("adam", "sgd", "lbfgs"):
        made = pair("multiclass", solver=solver)[1]
        fitted([made], x, y)
        assert nf.last_call().backend == "cpu"
        made.predict(x)
        assert nf.last_call().backend == "cpu"


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array])
def test_recorded_calls_have_the_bits_of_calls(monkeypatch, form):
    """Guards: a step that is recorded once and launched again is the step that it was."""
    x, y = data("multiclass")
    recorded = fitted(pair("multiclass"), form(x), y)[1]
    module = __import__("numfuse.adapters.sklearn.repeated", fromlist=["Repeated"])
    monkeypatch.setattr(module.Repeated, "__call__", lambda self: self._calls(None))
    plain = fitted(pair("multiclass"), form(x), y)[1]
    for a, b in zip(recorded.coefs_, plain.coefs_, strict=True):
        np.testing.assert_array_equal(a, b)
    assert recorded.loss_curve_ == plain.loss_curve_


def test_another_backend_trains_by_its_own_calls():
    x, y = data("regression")
    found = list(pair("regression"))
    fitted(found[:1], x, y)
    with nf.use_backend("reference"):
        fitted(found[1:], x, y)
    assert_same(found, x)
    assert nf.last_call().backend == "cpu"  # (the prediction)


@pytest.mark.parametrize("solver", ["adam", "sgd"])
def test_steps_go_on_from_one_backend_to_another(solver):
    x, y = data("regression")
    found = pair("regression", solver=solver)
    for backend in ("cpu", "reference", "cpu"):
        with nf.use_backend(backend):
            for estimator in found:
                estimator.partial_fit(x, y)
    assert_same(found, x, tolerance(found[0], x, 12))


def test_a_users_activation_of_the_same_name_changes_nothing():
    x, y = data("regression")
    before = fitted(pair("regression"), x, y)[1]
    nf.activation(lambda z: 3.0 * z, name="relu")
    after = fitted(pair("regression"), x, y)[1]
    assert after.loss_curve_ == before.loss_curve_
    np.testing.assert_array_equal(after.predict(x), before.predict(x))


def test_memory_of_batches_goes_when_a_fit_ends():
    """Guards: no pass is part of a cycle, which would wait for Python's collector."""
    x, y = data("regression")
    passes = {"Pass", "SparsePass", "Objective"}
    gc.collect()
    gc.disable()
    try:
        for form in (np.asarray, scipy.sparse.csr_array):
            for solver in ("adam", "lbfgs"):
                fitted(pair("regression", solver=solver)[1:], form(x), y)
        left = [type(z).__name__ for z in gc.get_objects() if type(z).__name__ in passes]
    finally:
        gc.enable()
    assert not left


HOOKS = {
    "_forward_pass_fast": ["self", "X", "check_input"],
    "_fit_stochastic": ["self", "X", "y", "incremental"],
    "_fit_lbfgs": ["self", "X", "y"],
    "_loss_grad_lbfgs": ["self", "packed_coef_inter", "X", "y"],
    "_update_no_improvement_count": ["self", "early_stopping"],
}


@pytest.mark.parametrize("name", HOOKS)
def test_scikit_learn_still_has_the_methods_that_are_overridden_and_calls_them(name, monkeypatch):
    base = theirs._multilayer_perceptron.BaseMultilayerPerceptron
    code = getattr(base, name).__code__
    parameters = code.co_varnames[: code.co_argcount]
    assert [p for p in parameters if p in HOOKS[name]] == HOOKS[name]
    called = []
    own = getattr(ours.MLPRegressor, name)

    def method(self, *args, **options):
        called.append(name)
        return own(self, *args, **options)

    monkeypatch.setattr(ours.MLPRegressor, name, method)
    x, y = data("regression")
    for solver in ("adam", "lbfgs"):
        fitted([pair("regression", solver=solver)[1]], x, y)[0].predict(x)
    assert called


def test_attributes_that_the_training_reads_and_sets_are_those_of_scikit_learn():
    x, y = data("regression")
    right = fitted(pair("regression", early_stopping=True)[:1], x, y)[0]
    needed = {
        "_best_coefs", "_best_intercepts", "_no_improvement_count", "_optimizer", "_random_state",
    }  # fmt: skip
    assert needed <= vars(right).keys()
    assert {"iteration_ends", "trigger_stopping", "learning_rate"} <= set(dir(right._optimizer))
