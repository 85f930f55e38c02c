"""HIPS autograd: jets of layers and networks, their gradients and what is beyond."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

autograd = pytest.importorskip("autograd", reason="autograd is not installed")

import autograd.numpy as anp  # noqa: E402
from autograd.test_util import check_grads  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import autograd as adapter  # noqa: E402
from numfuse.adapters import jets  # noqa: E402

WIDTHS = (2, 6, 6, 1)
PAIRS = list(itertools.pairwise(WIDTHS))
COUNT = len(PAIRS)


def drawn(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def operands():
    return [*drawn((5, 2)), *drawn(*PAIRS, seed=1), *drawn(*[(n,) for _, n in PAIRS], seed=2)]


def loss(x, *rest, **options):
    found = nf.mlp_jet(x, rest[:COUNT], rest[COUNT:], **options)
    return anp.sum(found.u**2) + anp.sum(found.u_dot**3) + anp.sum(found.u_ddot**2)


def value(x, rest):
    for w, bias in zip(rest[: COUNT - 1], rest[COUNT:-1], strict=True):
        x = anp.tanh(x @ w + bias)
    return x @ rest[COUNT - 1] + rest[-1]


def test_a_network_is_nested_autograd():
    x, *rest = operands()
    first = autograd.elementwise_grad(lambda x: value(x, rest))
    found = adapter.mlp_jet(x, rest[:COUNT], rest[COUNT:])
    np.testing.assert_allclose(found.u, value(x, rest), atol=1e-12)
    np.testing.assert_allclose(found.u_dot[..., 0].T, first(x), atol=1e-12)
    for i in range(2):
        second = autograd.elementwise_grad(lambda x, i=i: first(x)[:, i])(x)[:, i]
        np.testing.assert_allclose(found.u_ddot[i, :, 0], second, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"second": np.ones((1, 2))}, {"second": np.zeros((0, 2))}])
def test_gradients_are_the_cores(options, monkeypatch):
    made = []
    forward = jets.NetworkCall.forward
    monkeypatch.setattr(jets.NetworkCall, "forward", lambda *x: made.append(x) or forward(*x))
    x, *rest = operands()
    found = autograd.grad(loss, argnum=tuple(range(1 + 2 * COUNT)))(x, *rest, **options)
    assert len(made) == 1  # (what it keeps serves the backward)
    groups = rest[:COUNT], rest[COUNT:]
    u, u_dot, u_ddot = nf.mlp_jet(x, *groups, **options)
    needs = ("x", "weights", "biases")
    wanted = nf.mlp_jet_bwd(
        2 * u, 3 * u_dot**2, 2 * u_ddot, x, *groups, needs=needs, **options
    )  # fmt: skip
    every = [wanted.d_x, *wanted.d_weights, *wanted.d_biases]
    for ours, theirs in zip(found, every, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_network_is_differentiable_to_the_second_order_and_forwards():
    check_grads(loss, modes=["rev", "fwd"], order=2)(*operands())


def test_a_layer_is_differentiable_to_the_second_order_and_forwards():
    def call(a, b, bias, a_dot, a_ddot):
        more = {"weights": [[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]}
        found = nf.matmul_bias_activation_jet(a, b, bias, "gelu", a_dot, a_ddot, **more)
        return sum(anp.sum(y**2) for y in found)

    shapes = (4, 3), (3, 2), (2,), (3, 4, 3), (2, 4, 3)
    check_grads(call, modes=["rev", "fwd"], order=2)(*drawn(*shapes))


def test_the_parameters_may_be_a_list_of_boxes():
    x, *rest = operands()
    found = autograd.grad(lambda w: anp.sum(nf.mlp_jet(x, w, None).u_dot))(rest[:COUNT])
    assert [y.shape for y in found] == PAIRS


def test_the_backward_is_differentiable():
    x, *rest = operands()

    def call(g, *weights):
        found = nf.mlp_jet_bwd(g, None, None, x, weights, rest[COUNT:])
        return anp.sum(found.d_weights[1] ** 2) + anp.sum(found.d_biases[0])

    check_grads(call, modes=["rev"], order=1)(*drawn((5, 1), seed=4), *rest[:COUNT])


def test_bad_calls_are_refused():
    x, *rest = operands()
    with pytest.raises(ValueError, match="keep must be False"):
        autograd.grad(lambda x: nf.mlp_jet(x, rest[:COUNT], None, keep=True)[0].u[0, 0])(x)
    with pytest.raises(ValueError, match="out must be None"):
        out = None, None, None
        autograd.grad(lambda x: nf.mlp_jet(x, rest[:COUNT], None, out=out).u[0, 0])(x)


def test_a_formula_is_differentiable_to_the_second_order_and_forwards():
    def formula(z, shift, scale, square):
        return nf.activations()["gelu"](z + shift) * scale + square * z * z

    def call(a, b, shift, scale, a_dot, a_ddot):
        more = {"weights": [[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]}
        operands = shift, scale, 0.5
        found = nf.matmul_epilogue_jet(a, b, formula, operands, a_dot, a_ddot, **more)
        return sum(anp.sum(y**2) for y in found)

    shapes = (4, 3), (3, 2), (2,), (4, 1), (3, 4, 3), (2, 4, 3)
    check_grads(call, modes=["rev", "fwd"], order=2)(*drawn(*shapes))
