"""Training: scikit-learn's epochs, batches and stopping, with steps of numfuse.

The loop is one of numfuse's own because half of a step's time in scikit-learn goes to what is
around its products: the batch's indexing, its checks, a new array for each line of the loss and of
the optimiser. What a subclass or a next release may change, it leaves to scikit-learn: the
initialisation, the random numbers, the scores and the count of epochs without improvement.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from typing import Any

import numpy as np
import scipy.sparse
from numpy import ndarray
from sklearn.base import is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network._multilayer_perceptron import BaseMultilayerPerceptron
from sklearn.utils import gen_batches

from numfuse.adapters.sklearn import losses
from numfuse.adapters.sklearn.networks import Network, Pass, SparsePass
from numfuse.adapters.sklearn.optimisers import optimiser

#: How many of inputs, targets and weights to validate by the count of epochs takes: weights came
#: with scikit-learn 1.7.
_HELD = len(inspect.signature(BaseMultilayerPerceptron._update_no_improvement_count).parameters) - 2


class Objective:
    """The loss and its gradient on some samples.

    Parameters
    ----------
    net : Network
    y : (samples, outputs) array
        Labels, true or false, or numbers.
    sample_weight : (samples,) array or None
    out_activation : str
        scikit-learn's name of the output's activation, by which the loss is known.
    alpha : float
        The penalty.
    """

    def __init__(
        self, net: Network, y: ndarray, sample_weight: Any, out_activation: str, alpha: float
    ) -> None:
        self.net, self.alpha = net, float(alpha)
        dtype = net.flat.dtype
        labels = y.dtype == bool
        if out_activation == "softmax":
            y = y.argmax(axis=1)
        elif labels:
            y = y.view(np.uint8)
        else:
            y = y.astype(dtype, copy=False)
        self.y = np.ascontiguousarray(y)
        self.weighted = sample_weight is not None
        given = sample_weight if self.weighted else ()
        self.sample_weight = np.ascontiguousarray(given, dtype)
        self.room = losses.room(net.units[-1], dtype)
        self.rows_pass = losses.rows_pass(out_activation, dtype.name, labels)
        # (scikit-learn's squared error is a mean over outputs, but its gradient that of a sum)
        self.share = 1 / y.shape[1] if out_activation == "identity" else 1.0

    def __call__(self, made: Pass | SparsePass, index: ndarray) -> tuple[float, float]:
        """Write the gradient on the samples ``y[index]`` but for the penalty's.

        Their inputs are those of the pass. Returns the loss, penalty included, and the penalty's
        factor in the gradient.
        """
        given = self.y, index, self.sample_weight, self.net.weights, self.room
        loss, weight, squares = self.rows_pass(made.logits(), *given)
        if weight == 0:
            raise ZeroDivisionError("Weights sum to zero, can't be normalized")
        made.back()
        penalty = self.alpha / weight
        return loss * self.share / weight + 0.5 * penalty * squares, penalty


class Whole:
    """The loss on all samples, of a vector that an optimiser brings."""

    def __init__(self, objective: Objective, x: Any) -> None:
        self.objective, self.index = objective, np.arange(x.shape[0], dtype=np.int64)
        self.made: Pass | SparsePass
        if scipy.sparse.issparse(x):
            self.made = SparsePass(objective.net, x.shape[0])
            self.made.x = x
        else:
            self.made = Pass(objective.net, x)

    def __call__(self, flat: ndarray) -> tuple[float, ndarray]:
        """Return the loss and its gradient, a new array."""
        net = self.objective.net
        net.flat[...] = flat
        loss, penalty = self.objective(self.made, self.index)
        net.gradient[: net.weights.size] += penalty * net.weights
        return loss, net.gradient.astype(np.float64)


def units_of(estimator: Any) -> list[int]:
    """Return the numbers of features, hidden units and outputs."""
    return [len(estimator.coefs_[0]), *(w.shape[1] for w in estimator.coefs_)]


def network(estimator: Any) -> Network:
    """Return the network of an estimator, of which its coefficients are views from here on."""
    known: Network | None = getattr(estimator, "_network", None)
    current = [*estimator.coefs_, *estimator.intercepts_]
    if known is not None:
        mine = [*known.coefs, *known.intercepts]
        same = len(mine) == len(current) and all(map(operator.is_, mine, current))
        if same and known.activation == estimator.activation:
            return known
    flat = np.concatenate([x.ravel() for x in current])
    made = Network(flat, units_of(estimator), estimator.activation)
    estimator.coefs_, estimator.intercepts_ = list(made.coefs), list(made.intercepts)
    estimator._network = made
    return made


class _Batches:
    """The batches of an epoch: each copied to one place, so that every step has the same arrays."""

    def __init__(self, x: Any, size: int, shuffled: bool, net: Network) -> None:
        self.sparse, self.shuffled = scipy.sparse.issparse(x), shuffled
        # (of csc, rows would be searched for in all columns; of an array whose rows lie apart, as
        # those of load_digits do, NumPy would copy all before it takes some)
        self.x = x.tocsr() if self.sparse else np.ascontiguousarray(x)
        self.steps = []
        passes: dict[int, Any] = {}
        for batch in gen_batches(x.shape[0], size):
            count = batch.stop - batch.start
            if count not in passes:
                if self.sparse:
                    passes[count] = SparsePass(net, count)
                else:
                    passes[count] = Pass(net, np.empty((count, x.shape[1]), x.dtype))
            self.steps.append((batch, count, passes[count]))

    def fill(self, made: Any, batch: slice, index: ndarray) -> None:
        """Bring the inputs of a batch to its pass."""
        if self.sparse:
            made.x = self.x[index if self.shuffled else batch]
        elif self.shuffled:
            # ("clip" writes to the place at once, "raise" by way of a copy; all numbers are right)
            self.x.take(index, 0, made.x, "clip")
        else:
            made.x[...] = self.x[batch]


def _split(est: Any, x: Any, y: ndarray, sample_weight: Any) -> tuple[Any, ...]:
    """Return inputs, targets and weights to train on, then those to validate, drawn as there."""
    given = [x, y] if sample_weight is None else [x, y, sample_weight]
    # (labels of several outputs cannot be stratified)
    stratify = y if is_classifier(est) and est.n_outputs_ == 1 else None
    parts = train_test_split(
        *given, random_state=est._random_state, test_size=est.validation_fraction, stratify=stratify
    )
    if sample_weight is None:
        parts += [None, None]
    if parts[1].shape[0] < 2:
        raise ValueError(
            "The validation set is too small. Increase 'validation_fraction' or the size of your "
            f"dataset: it must have 2 samples or more, got {parts[1].shape[0]}"
        )
    if is_classifier(est):
        parts[3] = est._label_binarizer.inverse_transform(parts[3])
    return parts[0::2] + parts[1::2]


def fit_stochastic(est: Any, x: Any, y: ndarray, sample_weight: Any, incremental: bool) -> None:
    """Train an estimator by batches, as scikit-learn's `_fit_stochastic` does."""
    if est.early_stopping and incremental:
        raise ValueError("partial_fit does not support early_stopping=True")
    net = network(est)
    x = x.astype(net.flat.dtype, copy=False)  # (parameters keep the dtype that they began with)
    if not incremental or not hasattr(est, "_optimizer"):
        est._optimizer = optimiser(est.solver, est, net.flat)
    est._optimizer.begin(net)
    held: Any = (None, None, None)
    if est.early_stopping:
        x, y, sample_weight, *held = _split(est, x, y, sample_weight)
    samples = x.shape[0]
    size = min(200, samples) if est.batch_size == "auto" else est.batch_size
    if size > samples:
        warnings.warn(
            "Got `batch_size` less than 1 or larger than sample size. It is going to be clipped",
            stacklevel=5,
        )
        size = samples
    batches = _Batches(x, int(size), est.shuffle, net)
    objective = Objective(net, y, sample_weight, est.out_activation_, est.alpha)
    try:
        _epochs(est, objective, batches, held[:_HELD], incremental)
    except KeyboardInterrupt:
        warnings.warn("Training interrupted by user.", stacklevel=5)
    if est.early_stopping:
        est.coefs_, est.intercepts_ = est._best_coefs, est._best_intercepts


def _epochs(
    est: Any, objective: Objective, batches: _Batches, held: tuple[Any, ...], incremental: bool
) -> None:
    samples, update = len(objective.y), est._optimizer.update
    order = np.arange(samples, dtype=np.int64)
    est.n_iter_ = 0
    for _ in range(est.max_iter):
        if batches.shuffled:
            # (scikit-learn's `shuffle`, whose checks take 70 us)
            permutation = np.arange(samples)
            est._random_state.shuffle(permutation)
            order = order[permutation]
        total = 0.0
        for batch, count, made in batches.steps:
            index = order[batch]
            batches.fill(made, batch, index)
            loss, penalty = objective(made, index)
            total += loss * count
            update(penalty)
        est.n_iter_ += 1
        est.loss_ = total / samples
        est.t_ += samples
        est.loss_curve_.append(est.loss_)
        if est.verbose:
            print(f"Iteration {est.n_iter_}, loss = {est.loss_:.8f}")
        est._update_no_improvement_count(est.early_stopping, *held)
        est._optimizer.iteration_ends(est.t_)
        if est._no_improvement_count > est.n_iter_no_change:
            what = "Validation score" if est.early_stopping else "Training loss"
            told = (
                f"{what} did not improve more than tol={est.tol:f} for {est.n_iter_no_change} "
                f"consecutive epochs."
            )
            if est._optimizer.trigger_stopping(told, est.verbose):
                break
            est._no_improvement_count = 0
        if incremental:
            break
        if est.n_iter_ == est.max_iter:
            warnings.warn(
                f"Stochastic Optimizer: Maximum iterations ({est.max_iter}) reached and the "
                f"optimization hasn't converged yet.",
                ConvergenceWarning,
                stacklevel=6,
            )
