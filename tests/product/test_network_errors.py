"""What is wrong in a call of a network is told by its name, before anything is computed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from arrays import unwritten

import numfuse as nf

X = np.ones((6, 2))
NET = [np.ones((2, 3)), np.ones((3, 1))]
BIASES = [np.ones(3), None]
GRAD = np.ones((6, 1))


def single(x):
    return x.astype(np.float32)


def value(x=X, weights=NET, biases=BIASES, **options):
    return nf.mlp(x, weights, biases, **options)


def backward(grad=GRAD, **options):
    return nf.mlp_bwd(grad, X, NET, BIASES, **options)


def moved(x_dot=None, weights_dot=None, biases_dot=None):
    return nf.mlp_jvp(X, NET, BIASES, x_dot, weights_dot, biases_dot)


def twice(u=None, v=None, w=None, grad=GRAD, **options):
    return nf.mlp_double_bwd(u, v, w, grad, X, NET, BIASES, **options)


ERRORS = [
    (lambda: value(weights=NET[0]), TypeError, "weights must be a sequence of arrays, got ndarray"),
    (lambda: value(weights=[]), TypeError, "weights must be a sequence of arrays, got list"),
    (lambda: value(weights=NET[1:]), ValueError, "biases must be None or a sequence of 1"),
    (lambda: value(weights=NET[::-1]), ValueError, "weights[0] must have shape (..., 2, N), got"),
    (lambda: value(biases=[np.ones(1), None]), ValueError, "biases[0] must have shape (3,)"),
    (lambda: value(weights=[single(w) for w in NET]), TypeError, "weights[0] float32"),
    (lambda: value(weights=[NET[0].tolist(), NET[1]]), TypeError, "weights[0] must be a NumPy"),
    (lambda: value(x=X[0]), ValueError, "x must have shape (..., M, d_0), got (2,)"),
    (lambda: value(x=X.tolist()), TypeError, "x must be a NumPy array, got list"),
    (lambda: value(activation=("tanh", "tanh")), ValueError, "activation must be one or 1, got 2"),
    (lambda: value(activation="no"), ValueError, "no"),
    (lambda: value(out=X), ValueError, "out must have shape (6, 1), got (6, 2)"),
    (lambda: value(out=single(GRAD)), TypeError, "out must have dtype float64, got float32"),
    (lambda: value(x=X[:, :1], weights=[np.ones((1, 1))], biases=None, out=X[:, :1]), ValueError,
     "out must not"),
    (lambda: backward(X), ValueError, "grad must have the result's shape (6, 1), got (6, 2)"),
    (lambda: backward(single(GRAD)), TypeError, "grad float32"),
    (lambda: backward(needs=("bias",)), ValueError, "needs must hold names out of"),
    (lambda: moved(x_dot=GRAD), ValueError, "x_dot must have shape (6, 2), got (6, 1)"),
    (lambda: moved(x_dot=single(X)), TypeError, "x_dot float32"),
    (lambda: moved(weights_dot=NET[:1]), ValueError, "weights_dot must be None or a sequence of 2"),
    (lambda: moved(weights_dot=NET[::-1]), ValueError, "weights_dot[0] must have shape (2, 3)"),
    (lambda: moved(biases_dot=[None, np.ones(1)]), ValueError, "biases_dot[1] must be None where"),
    (lambda: twice(u=GRAD), ValueError, "u must have shape (6, 2), got (6, 1)"),
    (lambda: twice(v=[None]), ValueError, "v must be None or a sequence of 2"),
    (lambda: twice(w=[np.ones(2), None]), ValueError, "w[0] must have shape (3,), got (2,)"),
    (lambda: twice(grad=X), ValueError, "grad must have the result's shape (6, 1), got (6, 2)"),
    (lambda: twice(needs=("kept",)), ValueError, "needs must hold names out of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_an_error_says_what_was_expected_and_what_was_given(call, kind, message):
    with unwritten(X, *NET, BIASES[0], GRAD), pytest.raises(kind, match=re.escape(message)):
        call()


def test_arrays_of_another_library_are_told():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor as the other operands"):
        value(x=torch.ones(6, 2, dtype=torch.float64))
