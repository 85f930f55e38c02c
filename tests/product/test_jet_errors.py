"""What is wrong in a call of a jet is told by its name, before anything is computed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from arrays import unwritten

import numfuse as nf

A = np.linspace(-1, 1, 35).reshape(5, 7)
B = np.linspace(0, 1, 28).reshape(7, 4)
DOT = np.ones((2, 5, 7))
DDOT = np.ones((3, 5, 7))
WEIGHTS = np.ones((3, 2))
GRAD = np.ones((5, 4))
X = np.ones((6, 2))
NET = [np.ones((2, 3)), np.ones((3, 1))]
BIASES = [np.ones(3), np.ones(1)]


def single(x):
    return x.astype(np.float32)


def forward(a=A, b=B, dot=DOT, ddot=None, **options):
    return nf.matmul_bias_activation_jet(a, b, None, "tanh", dot, ddot, **options)


def backward(grad=GRAD, grad_dot=None, grad_ddot=None, **options):
    given = grad, grad_dot, grad_ddot, A, B, None, "tanh", DOT
    return nf.matmul_bias_activation_jet_bwd(*given, **options)


def shifted(z, weights, low):
    return z * weights + low


def formula(a=A, b=B, operands=(1.0, 2.0), dot=DOT, ddot=None, f=shifted, **options):
    return nf.matmul_epilogue_jet(a, b, f, operands, dot, ddot, **options)


def formula_backward(*grads, operands=(1.0, 2.0), **options):
    return nf.matmul_epilogue_jet_bwd(*grads, A, B, shifted, operands, DOT, **options)


def net(x=X, weights=NET, biases=BIASES, **options):
    return nf.mlp_jet(x, weights, biases, **options)


def net_backward(*grads, **options):
    return nf.mlp_jet_bwd(*grads, X, NET, BIASES, **options)


ERRORS = [
    (lambda: forward(dot=None), TypeError, "a_dot must be an array, got None"),
    (lambda: forward(dot=A), ValueError, "a_dot must have the shape (D, *a.shape)"),
    (lambda: forward(ddot=DDOT), ValueError, "weights must be given unless a_ddot has one"),
    (lambda: forward(ddot=DDOT, weights=np.ones((1, 2))), ValueError, "a_ddot must have the shape "
     "(S, *a.shape) = (1, 5, 7), got (3, 5, 7)"),
    (lambda: forward(weights=np.ones(2)), ValueError, "weights must have shape (S, D) = (S, 2), "
     "got (2,)"),
    (lambda: forward(weights=np.ones((1, 3))), ValueError, "weights must have shape (S, D)"),
    (lambda: forward(weights=[["x", "y"]]), TypeError, "weights must be real numbers"),
    (lambda: forward(weights=np.ones((1, 2)) * 1j), TypeError, "weights must be real numbers"),
    (lambda: forward(b=single(B)), TypeError, "b float32"),
    (lambda: forward(dot=single(DOT)), TypeError, "a_dot float32"),
    (lambda: forward(a=A[:, :5]), ValueError, "a (5, 5)"),
    (lambda: forward(out=GRAD), TypeError, "out must be a tuple (out, out_dot, out_ddot)"),
    (lambda: forward(out=(None, None)), ValueError, "out must have 3 entries"),
    (lambda: forward(out=(np.ones((5, 3)), None, None)), ValueError, "out must have shape (5, 4)"),
    (lambda: forward(a=A.tolist()), TypeError, "a must be a NumPy array, got list"),
    (lambda: backward(GRAD[0]), ValueError, "grad must have the result's shape (5, 4), got (4,)"),
    (lambda: backward(None, GRAD), ValueError, "grad_dot must have the shape (D, *out.shape)"),
    (lambda: backward(None, None, GRAD), ValueError, "grad_ddot must have the shape (S, *out.sh"),
    (lambda: backward(needs=("c",)), ValueError, "needs must hold names out of"),
    (lambda: backward(out=(None,)), ValueError, "out must have 5 entries"),
    (lambda: formula(b=(B,)), TypeError, "b must be an array, got a tuple: matmul_epilogue_jet"),
    (lambda: formula(operands=1.0), TypeError, "operands must be a tuple, one for each operand"),
    (lambda: formula(operands=(1.0,)), TypeError, "takes 3 arguments, 1 product (z) and 2"),
    (lambda: formula(f=lambda z, x, y: (z, x + y)), TypeError, "product must return one value"),
    (lambda: formula(f=lambda z, x, y: z if x > 0 else y), TypeError, "cannot decide a branch"),
    (lambda: formula(operands=(None, 1.0)), TypeError, "operands[0] must be an array, got None"),
    (lambda: formula(operands=(1.0, None)), TypeError, "low must be an array, got None"),
    (lambda: formula(operands=(1.0, np.ones(5))), ValueError, "low must broadcast to the result's "
     "shape (5, 4), got (5,)"),
    (lambda: formula(operands=(1.0, single(GRAD))), TypeError, "low float32"),
    (lambda: formula(a=None), TypeError, "a must be an array, got None"),
    (lambda: formula(dot=None), TypeError, "a_dot must be an array, got None"),
    (lambda: formula(ddot=DDOT), ValueError, "weights must be given unless a_ddot has one"),
    (lambda: formula(out=GRAD), TypeError, "out must be a tuple (out, out_dot, out_ddot)"),
    (lambda: formula_backward(GRAD[0], None, None), ValueError, "grad must have the result's"),
    (lambda: formula_backward(GRAD, None, None, needs=("low",)), ValueError, "needs must hold "
     "names out of ('a', 'b', 0, 1, 'a_dot', 'a_ddot'), got 'low'"),
    (lambda: formula_backward(GRAD, None, None, out=(None,)), ValueError, "out must have 5"),
    (lambda: formula_backward(GRAD, None, None, out=(None, None, (None, np.ones(1)), None, None)),
     ValueError, "d_low must have shape (), got (1,)"),
    (lambda: formula_backward(GRAD, None, None, needs=(0,), out=(None, None, (None, np.ones(())),
     None, None)), ValueError, "d_low in out must be None where it is not needed, got an array"),
    (lambda: formula_backward(GRAD, None, None, kept=(GRAD,)), ValueError, "kept must have 3"),
    (lambda: net(weights=NET[0]), TypeError, "weights must be a sequence of arrays, got ndarray"),
    (lambda: net(weights=NET[1:]), ValueError, "biases must be None or a sequence of 1"),
    (lambda: net(weights=NET[::-1]), ValueError, "weights[0] must have shape (..., 2, N), got"),
    (lambda: net(biases=BIASES[::-1]), ValueError, "biases[0] must have shape (3,)"),
    (lambda: net(weights=[single(w) for w in NET]), TypeError, "weights[0] float32"),
    (lambda: net(weights=[NET[0].tolist(), NET[1]]), TypeError, "weights[0] must be a NumPy array"),
    (lambda: net(x=X[0]), ValueError, "x must have shape (..., M, d_0), got (2,)"),
    (lambda: net(activation=("tanh", "tanh")), ValueError, "activation must be one or 1, got 2"),
    (lambda: net(directions=np.ones((2, 3))), ValueError, "directions must have shape (D, 2)"),
    (lambda: net(second=np.ones((2, 3))), ValueError, "second must have shape (S, D) = (S, 2)"),
    (lambda: net(out=X), TypeError, "out must be a tuple of 3 (u, u_dot, u_ddot)"),
    (lambda: net_backward(X, None, None), ValueError, "grad must have the result's shape (6, 1)"),
    (lambda: net_backward(None, X, None), ValueError, "grad_dot must have"),
    (lambda: net_backward(None, None, None, needs=("bias",)), ValueError, "needs must hold names"),
    (lambda: net_backward(None, None, None, out=X), TypeError, "out must be a tuple (d_x, "),
    (lambda: net_backward(None, None, None, out=(None, NET[:1], None)), ValueError, "d_weights in "
     "out must be None or a tuple of 2, got 1 entries"),
    (lambda: net_backward(None, None, None, out=(X, None, None)), ValueError, "d_x in out must be "
     "None where it is not needed, got an array"),
    (lambda: net_backward(None, None, None, out=(None, NET, None)), ValueError, "d_weights[0] must "
     "not share memory with weights[0]"),
    (lambda: net_backward(None, None, None, out=(None, None, (None, np.ones(2)))), ValueError,
     "d_biases[1] must have shape (1,), got (2,)"),
    (lambda: net_backward(single(X[:, :1]), None, None), TypeError, "grad float32"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_an_error_says_what_was_expected_and_what_was_given(call, kind, message):
    with (
        unwritten(A, B, DOT, DDOT, GRAD, X, *NET, *BIASES),
        pytest.raises(kind, match=re.escape(message)),
    ):
        call()


def test_a_backend_without_jets_is_told():
    class Without:
        name = "without"

        def forward(self, p):
            raise AssertionError

    with pytest.raises(ValueError, match="must have the operation 'jet', got 'without' without"):
        forward(backend=Without())
    with pytest.raises(ValueError, match="must have the operation 'jet', got 'without' without"):
        net(backend=Without())


def test_arrays_of_another_library_are_told():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"b must be a torch\.Tensor as the other operands"):
        forward(a=torch.ones(5, 7, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"must be a torch\.Tensor as the other operands"):
        net(x=torch.ones(6, 2, dtype=torch.float64))
