"""Networks of other libraries' arrays: the values of NumPy's, and gradients that are not lost."""

from __future__ import annotations

import numpy as np
import pytest

import numfuse as nf

SHAPES = (3, 6), (6, 5), (5, 2)


@pytest.fixture
def given():
    """Points, weights, biases, and a cotangent of the result, in float32."""
    rng = np.random.default_rng(5)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return draw(9, 3), [draw(*s) for s in SHAPES], [draw(n) for _, n in SHAPES], draw(9, 2)


def gradients(given):
    x, weights, biases, grad = given
    return nf.mlp_bwd(grad, x, weights, biases, "silu", needs=("x", "weights", "biases"))


def close(got, wanted):
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=2e-5, atol=2e-5)


def test_torch_differentiates_a_network(given):
    torch = pytest.importorskip("torch")
    wanted = gradients(given)
    x, weights, biases, grad = given
    point = torch.from_numpy(x).requires_grad_()
    # (modules have their weights transposed)
    modules = [torch.nn.Linear(k, n) for k, n in SHAPES]
    with torch.no_grad():
        for module, w, b in zip(modules, weights, biases, strict=True):
            module.weight.copy_(torch.from_numpy(w.T.copy()))
            module.bias.copy_(torch.from_numpy(b))
    out = nf.mlp(point, [y.weight.T for y in modules], [y.bias for y in modules], "silu")
    close([out.detach()], [nf.mlp(x, weights, biases, "silu")])
    out.backward(torch.from_numpy(grad))
    close([point.grad, *[y.weight.grad.T for y in modules]], [wanted.d_x, *wanted.d_weights])
    close([y.bias.grad for y in modules], wanted.d_biases)


def test_torch_differentiates_the_backward_of_a_network():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    leaves = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4, 2))]
    x = torch.randn(5, 3, dtype=torch.float64)

    def call(g, *weights):
        found = nf.mlp_bwd(g, x, weights, None)
        return tuple(found.d_weights)

    g = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (g, *leaves))


def test_jax_differentiates_a_network(given):
    jax = pytest.importorskip("jax")
    wanted = gradients(given)
    x, weights, biases, grad = given

    def loss(x, weights, biases):
        return (nf.mlp(x, weights, biases, "silu") * grad).sum()

    arrays = jax.device_put((x, weights, biases))
    d_x, d_weights, d_biases = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    close([d_x, *d_weights, *d_biases], [wanted.d_x, *wanted.d_weights, *wanted.d_biases])


def test_autograd_differentiates_a_network(given):
    autograd = pytest.importorskip("autograd")
    wanted = gradients(given)
    x, weights, biases, grad = given

    def loss(x, weights, biases):
        return autograd.numpy.sum(nf.mlp(x, weights, biases, "silu") * grad)

    d_x, d_weights, d_biases = autograd.grad(loss, (0, 1, 2))(x, weights, biases)
    close([d_x, *d_weights, *d_biases], [wanted.d_x, *wanted.d_weights, *wanted.d_biases])


def test_dask_cuts_a_network_by_rows(given):
    dask = pytest.importorskip("dask.array")
    x, weights, biases, _ = given
    rows = dask.from_array(x, chunks=(4, 3))
    whole = [[dask.from_array(y, chunks=-1) for y in group] for group in (weights, biases)]
    found = nf.mlp(rows, *whole, "silu")
    assert isinstance(found, dask.Array) and found.numblocks == (3, 1)
    close([found.compute()], [nf.mlp(x, weights, biases, "silu")])


@pytest.mark.memory("device")
def test_second_derivatives_of_a_network_stay_on_their_device(given, backend):
    x, weights, biases, grad = given

    def moved(y):
        return [moved(z) for z in y] if isinstance(y, list) else nf.to_device(y, backend)

    wanted = nf.mlp_double_bwd(x, weights, biases, grad, x, weights, biases, "silu")
    call = x, weights, biases, grad, x, weights, biases
    found = nf.mlp_double_bwd(*map(moved, call), "silu")
    for got, exact in zip(found, wanted, strict=True):
        if isinstance(exact, tuple):
            close([nf.to_numpy(y) for y in got], exact)
        else:
            close([nf.to_numpy(got)], [exact])
