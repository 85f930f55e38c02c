"""JAX: jets of layers and networks under every transformation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import jax as adapter  # noqa: E402

WIDTHS = (2, 6, 6, 1)
PAIRS = list(itertools.pairwise(WIDTHS))


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


def drawn(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def operands():
    return drawn((7, 2))[0], drawn(*PAIRS, seed=1), drawn(*[(n,) for _, n in PAIRS], seed=2)


def value(x, weights, biases):
    for w, bias in zip(weights[:-1], biases[:-1], strict=True):
        x = jnp.tanh(x @ w + bias)
    return x @ weights[-1] + biases[-1]


def nested(x, weights, biases):
    """The value and the pure derivatives as users of JAX write them: forward over forward."""

    def along(direction):
        dot = jnp.broadcast_to(direction, x.shape)

        def first(p):
            return jax.jvp(lambda y: value(y, weights, biases), (p,), (dot,))

        (u, u_dot), (_, u_ddot) = jax.jvp(first, (x,), (dot,))
        return u, u_dot, u_ddot

    u, u_dot, u_ddot = jax.vmap(along)(jnp.eye(2))
    return u[0], u_dot, u_ddot


def jet(x, weights, biases):
    return tuple(nf.mlp_jet(x, weights, biases))


def at_points(x, weights, biases):
    """A function of one point, mapped over points."""
    return jax.vmap(lambda p: jet(p[None], weights, biases))(x)


def at_each(x, weights, biases, options):
    return jax.vmap(lambda p: tuple(nf.mlp_jet(p[None], weights, biases, **options)))(x)


def at_points_plain(x, weights, biases):
    return jax.vmap(lambda p: nested(p[None], weights, biases))(x)


PAIRED = (jet, nested), (at_points, at_points_plain)


def close(ours, theirs):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def loss(function):
    def run(*args):
        return sum((y**2 * (i + 1)).sum() for i, y in enumerate(function(*args)))

    return run


def ensembles(*groups):
    return [[jnp.stack([y, 0.5 * y]) for y in group] for group in groups]


def test_a_network_is_nested_forward_mode_at_once_and_compiled():
    x = operands()
    close(jet(*x), nested(*x))
    close(jax.jit(jet)(*x), nested(*x))


@pytest.mark.parametrize("pair", PAIRED, ids=["net", "vmap"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_nested_forward_mode(pair, compiled):
    ours, theirs = (jax.grad(loss(function), (0, 1, 2)) for function in pair)
    close((jax.jit(ours) if compiled else ours)(*operands()), theirs(*operands()))


@pytest.mark.parametrize(
    "inner", [(jet, nested), (at_points, at_points_plain)], ids=["net", "vmap"]
)
def test_an_ensemble_is_mapped_over(inner):
    x, weights, biases = operands()
    members = ensembles(weights, biases)
    ours, theirs = (
        jax.vmap(lambda w, y, f=f: (f(x, w, y), jax.grad(loss(f), (0, 1, 2))(x, w, y)))
        for f in inner
    )
    close(ours(*members), theirs(*members))
    ours, theirs = (
        jax.grad(lambda x, w, y, f=f: loss(jax.vmap(lambda w, y: f(x, w, y)))(w, y), (0, 1, 2))
        for f in inner
    )
    close(ours(x, *members), theirs(x, *members))


def test_gradients_of_single_points_are_not_summed():
    x, weights, biases = operands()

    def each(function):
        return jax.vmap(lambda p: jax.grad(loss(function), 1)(p[None], weights, biases))(x)

    close(each(jet), each(nested))


def test_forward_mode_and_jacobians():
    x = operands()
    close(jax.jvp(jet, x, x), jax.jvp(nested, x, x))
    for derivative in (jax.jacfwd, jax.jacrev):
        close(derivative(jet, 2)(*x), derivative(nested, 2)(*x))


@pytest.mark.long
def test_a_network_is_differentiable_twice():
    x, weights, biases = operands()
    ours, theirs = (
        jax.hessian(lambda w, f=f: loss(f)(x, [weights[0], w, weights[2]], biases))
        for f in (jet, nested)
    )
    close(ours(weights[1]), theirs(weights[1]))
    check_grads(jet, (x, weights, biases), 2, rtol=1e-3)


def test_constants_of_a_call():
    x, weights, biases = operands()
    second = nested(x, weights, biases)[2]
    found = jax.jit(lambda x: nf.mlp_jet(x, weights, biases, second=np.ones((1, 2))).u_ddot)(x)
    close(found, second.sum(0, keepdims=True))
    none = nf.mlp_jet(x, weights, biases, second=np.zeros((0, 2)))
    assert none.u_ddot.shape == (0, 7, 1)
    one = nf.mlp_jet(x, weights, biases, directions=[[1.0, 0.0]])
    close(one.u_ddot, second[:1])
    for options in ({"second": np.zeros((0, 2))}, {"directions": np.zeros((0, 2))}):
        found, wanted = (
            jax.grad(lambda w, f=f: f(w).sum())(weights)
            for f in (
                lambda w, more=options: at_each(x, w, biases, more)[0],
                lambda w: value(x, w, biases),
            )
        )
        close(found, wanted)


def test_a_layer_is_differentiable_and_mapped():
    x = drawn((4, 3), (3, 2), (2,), (3, 4, 3), (2, 4, 3))
    weights = [[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]

    def call(a, b, bias, a_dot, a_ddot):
        more = {"weights": weights}
        return tuple(nf.matmul_bias_activation_jet(a, b, bias, "gelu", a_dot, a_ddot, **more))

    check_grads(call, x, 2, rtol=1e-3)
    biases = jnp.stack([x[2], 2 * x[2]])
    found = jax.vmap(call, (None, None, 0, None, None))(*x[:2], biases, *x[3:])
    singly = [call(*x[:2], bias, *x[3:]) for bias in biases]
    close(found, jax.tree.map(lambda *y: jnp.stack(y), *singly))


def test_the_backward_takes_tracers():
    x, weights, biases = operands()
    u, pull = jax.vjp(lambda w: jet(x, w, biases), weights)
    (wanted,) = pull(u)
    found = jax.jit(lambda *g: nf.mlp_jet_bwd(*g, x, weights, biases).d_weights)(*u)
    close(found, wanted)


def test_arrays_of_numpy_are_taken_by_the_adapter():
    x, weights, biases = operands()
    arrays = [np.asarray(y) for y in weights]
    found = adapter.mlp_jet(np.asarray(x), arrays, None, second=np.ones((1, 2)))
    assert isinstance(found.u, jax.Array)
    close(found.u, value(x, weights, [0.0] * len(biases)))


def test_what_xla_compiles_for_cuda_is_the_plain_way():
    """Guards: arrays of a GPU under jit have derivatives too, without a call of the host."""
    export = pytest.importorskip("jax.export")
    x, weights, biases = operands()
    program = export.export(jax.jit(jax.grad(loss(jet), 1)), platforms=["cuda"])
    text = program(x, weights, biases).mlir_module()
    assert "tanh" in text
    assert "callback" not in text


def test_bad_calls_are_refused_when_they_are_traced():
    x, weights, biases = operands()
    with pytest.raises(ValueError, match=r"weights\[1\] must have shape"):
        jax.jit(jet)(x, [weights[0], weights[0], weights[2]], biases)
    with pytest.raises(TypeError, match="dtype"):
        jet(x, [y.astype(jnp.float32) for y in weights], biases)
    with pytest.raises(ValueError, match="keep must be False"):
        nf.mlp_jet(x, weights, biases, keep=True)
    with pytest.raises(ValueError, match="directions must have shape"):
        nf.mlp_jet(x, weights, biases, directions=np.eye(3))


def test_a_formula_is_differentiable_compiled_and_mapped():
    def formula(z, shift, scale, square):
        return nf.activations()["gelu"](z + shift) * scale + square * z * z

    x = drawn((4, 3), (3, 2), (2,), (4, 1), (3, 4, 3), (2, 4, 3))
    weights = [[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]

    def call(a, b, shift, scale, a_dot, a_ddot):
        operands = shift, scale, 0.5
        return tuple(
            nf.matmul_epilogue_jet(a, b, formula, operands, a_dot, a_ddot, weights=weights)
        )

    check_grads(call, x, 2, rtol=1e-3)
    close(jax.jit(call)(*x), call(*x))
    shifts = jnp.stack([x[2], 2 * x[2]])
    found = jax.vmap(call, (None, None, 0, None, None, None))(*x[:2], shifts, *x[3:])
    singly = [call(*x[:2], shift, *x[3:]) for shift in shifts]
    close(found, jax.tree.map(lambda *y: jnp.stack(y), *singly))


def test_an_operand_without_axes_has_a_gradient_without_axes():
    """As an array, where 0.5 is a constant of the formula's call."""
    formula = nf.epilogue(lambda z, row, number: nf.expr.tanh(z * number) * row)
    a, b, row, a_dot = drawn((4, 3), (3, 2), (2,), (1, 4, 3))

    def call(number):
        return nf.matmul_epilogue_jet(a, b, formula, (row, number), a_dot).out_ddot.sum()

    number = jnp.asarray(1.5)
    for grad in (jax.grad(call), jax.jit(jax.grad(call))):
        assert grad(number).shape == ()
    step = 1e-5
    slope = (call(number + step) - call(number - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(call)(number), slope, rtol=1e-6)
