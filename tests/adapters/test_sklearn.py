r"""scikit-learn's perceptrons by numfuse: the results of scikit-learn's own, step for step.

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

import copy
import gc
import inspect
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn import neural_network as theirs
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from tolerance import gamma

import numfuse as nf
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
