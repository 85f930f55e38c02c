"""What is wrong in a call of a network is told by its name, before anything is computed."""

from __future__ import annotations

import itertools
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


MASKED = np.ma.masked_array(X)
#: Of other points, from a backend whose layers keep what they read.
KEPT = nf.mlp(X[:3], NET, BIASES, keep=True, backend="reference")[1]
JET_KEPT = nf.mlp_jet(X[:3], NET, BIASES, keep=True, backend="reference")[1]

ERRORS = [
    (lambda: value(x=MASKED), TypeError, "x must be a plain numpy.ndarray, got its subclass"),
    (lambda: value(weights=[NET[0].view(np.matrix), NET[1]]), TypeError, "weights[0] must be a pl"),
    (lambda: nf.mlp_jet(X, NET, [MASKED[:, 0], None]), TypeError, "biases[0] must be a plain"),
    (lambda: nf.mlp_jet_bwd([[1.0]] * 6, None, None, X, NET, None), TypeError, "grad must be a N"),
    (lambda: backward(grad=GRAD.tolist()), TypeError, "grad must be a NumPy array, got list"),
    (lambda: moved(x_dot=X.tolist()), TypeError, "x_dot must be a NumPy array, got list"),
    (lambda: moved(weights_dot=["x", None]), TypeError, "weights_dot[0] must be a NumPy array"),
    (lambda: twice(u=MASKED), TypeError, "u must be a plain numpy.ndarray"),
    (lambda: twice(grad=GRAD.tolist()), TypeError, "grad must be a NumPy array, got list"),
    (lambda: value(weights=NET[0]), TypeError, "weights must be a sequence of arrays, got ndarray"),
    (lambda: value(weights=[]), TypeError, "weights must be a sequence of arrays, got an empty"),
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
    (lambda: backward(kept=3), TypeError, "kept must be what the forward returned with keep=True, "
     "got int"),
    (lambda: backward(kept=KEPT), ValueError, "kept must come from a forward of 2 layers on points "
     "(6,), got 2 arrays for points (3,)"),
    (lambda: nf.mlp_jet_bwd(GRAD, None, None, X, NET, BIASES, kept=(X,)), TypeError, "kept must be "
     "what the forward returned with keep=True, got tuple"),
    (lambda: nf.mlp_jet_bwd(GRAD, None, None, X, NET, BIASES, kept=JET_KEPT), ValueError, "kept "
     "must come from a forward of 2 layers on points (6,), got 2 arrays for points (3,)"),
    (lambda: nf.matmul_bias_activation_jet_bwd(GRAD, None, None, X, NET[0][:, :1], None, "tanh",
     X[None], kept=3), TypeError, "kept must be a tuple of 3, got int"),
    (lambda: value(biases=BIASES[0]), ValueError, "biases must be None or a sequence of 2 arrays "
     "or None, got ndarray"),
    (lambda: value(biases=BIASES[:1]), ValueError, "arrays or None, got 1 entries"),
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


# --- what is no error -----------------------------------------------------------------------------
@pytest.mark.parametrize("final", ["none", "silu"])
@pytest.mark.parametrize("back", [nf.mlp_bwd, nf.mlp_jet_bwd])
def test_what_was_kept_of_a_network_is_taken(back, final):
    """Of the reference, whose layers are calls of their own; with it nothing changes."""
    how = {"final": final, "backend": "reference"}
    forward, none = (nf.mlp, ()) if back is nf.mlp_bwd else (nf.mlp_jet, (None, None))
    kept = forward(X, NET, BIASES, keep=True, **how)[1]
    assert len(kept.inputs) >= len(NET)
    found = [back(GRAD, *none, X, NET, BIASES, **how, **more) for more in ({}, {"kept": kept})]
    for x, y in zip(*(y.d_weights for y in found), strict=True):
        np.testing.assert_array_equal(x, y)


NETWORKS = {
    "mlp": lambda x, w, b, **how: nf.mlp(x, w, b, final="silu", **how),
    "mlp_bwd": lambda x, w, b, **how: nf.mlp_bwd(x[:, :1], x, w, b, needs=("x", "weights"), **how),
    "mlp_jvp": lambda x, w, b, **how: nf.mlp_jvp(x, w, b, x, w, b, **how),
    "mlp_double_bwd": lambda x, w, b, **how: nf.mlp_double_bwd(x, w, b, x[:, :1], x, w, b, **how),
    "mlp_jet": lambda x, w, b, **how: nf.mlp_jet(x, w, b, final="silu", **how),
    "mlp_jet_bwd": lambda x, w, b, **how: nf.mlp_jet_bwd(x[:, :1], None, None, x, w, b, **how),
}


def flat(found):
    if isinstance(found, tuple):
        return [y for part in found for y in flat(part)]
    return [] if found is None else [found]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("function", NETWORKS)
def test_what_numpy_is_to_do_with_an_overflow_changes_nothing(function, backend):
    rng = np.random.default_rng(0)
    x, *w = (
        (scale * rng.standard_normal(shape)).astype(np.float16)
        for scale, shape in ((4000, (6, 2)), (300, (2, 3)), (300, (3, 1)))
    )
    x[0] = 1e-7
    biases, found = [np.ones(3, np.float16), np.ones(1, np.float16)], []
    for how in ("raise", "ignore"):
        with np.errstate(all=how):
            found.append(flat(NETWORKS[function](x, w, biases, backend=backend)))
    for raising, ignoring in zip(*found, strict=True):
        np.testing.assert_array_equal(raising, ignoring)


@pytest.mark.parametrize("function", NETWORKS)
def test_fields_of_packed_records_are_operands_like_their_copies(function):
    def packed(x):
        records = np.zeros(x.shape, np.dtype([("before", "u1"), ("value", x.dtype)]))
        records["value"] = x
        return records["value"]

    rng = np.random.default_rng(1)
    given = [rng.standard_normal(s) for s in ((6, 2), (2, 3), (3, 1), (3,), (1,))]
    found = []
    for laid in (packed, np.copy):
        x, *rest = map(laid, given)
        found.append(flat(NETWORKS[function](x, rest[:2], rest[2:])))
    for strided, copied in zip(*found, strict=True):
        np.testing.assert_array_equal(strided, copied)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("hidden", [(), (3,)])
def test_a_network_may_be_much_narrower_than_its_input(hidden, backend):
    """The gradient of a jet by x has more elements there than any other array of the call."""
    rng = np.random.default_rng(2)
    sizes = (300, *hidden, 1)
    x = rng.standard_normal((5, 300))
    w = [rng.standard_normal(s) / 20 for s in itertools.pairwise(sizes)]
    grad = rng.standard_normal((5, 1))
    how = {"directions": np.eye(300)[:7], "needs": ("x",), "backend": backend}
    found = nf.mlp_jet_bwd(grad, None, None, x, w, None, **how).d_x
    alone = nf.mlp_bwd(grad, x, w, None, needs=("x",), backend="reference").d_x
    np.testing.assert_allclose(found, alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_strided_cotangent_gives_the_gradients_of_its_copy(backend):
    """Also by the layers' own operations, as of layers that are wider than 256 on the CPU."""
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((301, 2)), [rng.standard_normal(s) for s in ((2, 300), (300, 3))]
    biases, grad = [np.zeros(300), np.zeros(3)], rng.standard_normal((3, 301)).T
    rest = None, None, x, w, biases
    found = [nf.mlp_jet_bwd(g, *rest, backend=backend) for g in (grad, grad.copy())]
    assert not grad.flags.c_contiguous
    for strided, copied in zip(*map(flat, found), strict=True):
        np.testing.assert_array_equal(strided, copied)
