"""JAX: jit, vmap, grad of grad of grad; no deadlock; forward mode says that it is not there."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from oracle import ACTIVATIONS  # noqa: E402

import numfuse as nf  # noqa: E402

SHAPES = {
    "plain": ((3, 2), (2, 4), (4,)),
    "shared b": ((2, 3, 2), (2, 4), (4,)),
    "shared a": ((3, 2), (2, 2, 4), (2, 1, 4)),
    "bias alone": ((3, 2), (2, 4), (2, 1, 4)),
    "ones": ((1, 3, 2), (2, 2, 4), (1, 1, 4)),
    "row": ((2,), (2, 4), (4,)),
    "column": ((3, 2), (2,), (1,)),
}


@pytest.fixture(autouse=True)
def double_precision():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def reference(activation):
    functions = {
        "none": lambda x: x, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh,
        "gelu": jax.nn.gelu, "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
        "silu": jax.nn.silu, "softplus": jax.nn.softplus,
    }  # fmt: skip
    return functions[activation]


def check(function, operands, order):
    check_grads(function, operands, order=order, modes=["rev"], atol=1e-5, rtol=1e-5, eps=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_have_three_orders_of_derivatives(shape, with_bias):
    a, b, bias = draw(*SHAPES[shape])
    operands = (a, b, bias) if with_bias else (a, b)

    def layer(a, b, bias=None):
        return nf.matmul_bias_activation(a, b, bias, "tanh")

    check(layer, operands, 3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_three_orders_of_derivatives(activation):
    a, b, bias, x, y = draw((3, 2), (2, 4), (4,), (5,), (5,), seed=1)
    check(lambda *z: nf.matmul_bias_activation(*z, activation), (a, b, bias), 3)
    check(lambda *z: nf.activation_mul(*z, activation), (x, y), 3)
    out = nf.matmul_bias_activation(a, b, bias, activation)
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, reference(activation)(a @ b + bias), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pattern", list(itertools.product((True, False), repeat=3)))
def test_the_backward_and_the_double_backward_are_differentiable(pattern):
    grad, a, b, bias = draw((3, 4), (3, 2), (2, 4), (4,), seed=2)
    moved = draw(a.shape, b.shape, bias.shape, seed=3)
    moved = [x if there else None for x, there in zip(moved, pattern, strict=True)]
    needs = tuple(n for n, there in zip(("a", "b", "bias"), pattern, strict=True) if there)
    if needs:
        check(
            lambda *x: [
                g for g in nf.matmul_bias_activation_bwd(*x, "gelu", needs=needs) if g is not None
            ],
            (grad, a, b, bias), 2,
        )  # fmt: skip
    check(
        lambda *x: list(nf.matmul_bias_activation_double_bwd(*moved, *x, "gelu")),
        (grad, a, b, bias), 1,
    )  # fmt: skip
    check(lambda *x: nf.matmul_bias_activation_jvp(*x, *moved, "gelu").out_dot, (a, b, bias), 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_residuals_have_derivatives(shape):
    a, b, bias = draw(*SHAPES[shape], seed=4)
    visible = nf.matmul_bias_activation(a, b, bias).shape
    for own in (visible, visible[-1:], ()):
        (residual,) = draw(own, seed=5)
        check(nf.matmul_bias_residual, (a, b, bias, residual), 2)


def test_gates_through_their_derivatives():
    u, v, grad, a, b = draw(*((6,),) * 5, seed=6)
    check(lambda *x: list(nf.activation_mul_bwd(*x, "gelu")), (grad, a, b), 2)
    check(lambda *x: list(nf.activation_mul_double_bwd(*x, "gelu")), (u, v, grad, a, b), 1)
    check(lambda *x: nf.activation_mul_jvp(*x, "gelu").out_dot, (a, b, u, v), 2)


def losses(activation):
    def ours(w, x, c):
        h = nf.matmul_bias_activation(x, w, c, activation)
        h = nf.activation_mul(h, h, activation)
        return jnp.sum(nf.matmul_bias_residual(h, w.T, None, x) ** 2)

    def theirs(w, x, c):
        f = reference(activation)
        h = f(x @ w + c)
        return jnp.sum(((f(h) * h) @ w.T + x) ** 2)

    return ours, theirs


@pytest.mark.parametrize("activation", ["tanh", "gelu", "none"])
def test_transformations_compose(activation):
    w, x, c, *more = draw((2, 4), (3, 2), (4,), (2, 4), (3, 2), seed=7)
    found = []
    for f in losses(activation):
        found.append(
            (
                *jax.jit(jax.grad(f, argnums=(0, 1, 2)))(w, x, c),
                jax.jacrev(jax.jacrev(f))(w, x, c),
                jax.jit(jax.jacrev(jax.jacrev(f)))(w, x, c),
                # the gradients of every sample; one vmap in another
                jax.vmap(jax.grad(f), (None, 0, None))(w, jnp.stack([x, more[1]]), c),
                jax.vmap(jax.vmap(f, (None, 0, None)), (0, None, None))(
                    jnp.stack([w, more[0]]), x[:, None], c
                ),
                # a Hessian-vector product, reverse over reverse
                jax.grad(lambda w, f=f: jnp.vdot(jax.grad(f)(w, x, c), more[0]))(w),
            )
        )
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_vmap_is_a_loop(shape):
    shapes = SHAPES[shape]
    for axes in itertools.product((0, None), repeat=3):
        if not any(axis == 0 for axis in axes):
            continue
        operands = [
            x for axis, s in zip(axes, shapes, strict=True)
            for x in draw((3, *s) if axis == 0 else s, seed=8)
        ]  # fmt: skip

        def gradients(a, b, bias):
            f = lambda *z: jnp.sum(nf.matmul_bias_activation(*z, "tanh") ** 2)  # noqa: E731
            return jax.grad(f, argnums=(0, 1, 2))(a, b, bias)

        got = jax.vmap(gradients, axes)(*operands)
        for i in range(3):
            member = [x[i] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
            for left, right in zip(got, gradients(*member), strict=True):
                np.testing.assert_allclose(left[i], right, rtol=1e-12, atol=1e-13)


def test_zero_is_zero_beside_infinities():
    a, b, grad = jnp.ones((3, 2)), jnp.ones((2, 4)), jnp.ones((3, 4))
    residual = jnp.array([jnp.inf, 0.0, 1.0, 2.0])
    found = nf.matmul_bias_residual_double_bwd(
        None, None, None, None, grad, a, b, None, residual
    )  # fmt: skip
    assert not found.d_residual.any() and not found.d_grad.any()
    dots = nf.matmul_bias_residual_jvp(a, b, None, residual, None, None, None, None)
    assert not dots.out_dot.any()
    with pytest.raises(ValueError, match="pre_activation must have the result's shape"):
        nf.matmul_bias_activation_bwd(grad, a, b, None, "gelu", pre_activation=grad[:1])


def test_a_third_derivative_is_that_of_jax():
    """The weight gradient of a loss that holds a second derivative: a physics-informed network."""
    x, w1, b1, w2 = draw((7, 1), (1, 5), (5,), (5, 1), seed=9)

    def loss(layer):
        def of(w1, b1, w2):
            u = lambda x: jnp.sum(layer(x, w1, b1) @ w2)  # noqa: E731
            u_x = jax.grad(u)
            u_xx = jax.grad(lambda x: jnp.sum(u_x(x)))
            return jnp.mean((u_xx(x) + u_x(x)) ** 2)

        return jax.grad(of, argnums=(0, 1, 2))(w1, b1, w2)

    ours = loss(lambda *z: nf.matmul_bias_activation(*z, "tanh"))
    for left, right in zip(ours, loss(lambda x, w, b: jnp.tanh(x @ w + b)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-11)


def test_forward_mode_raises_a_sentence_that_says_so():
    a, b = draw((3, 2), (2, 4), seed=10)
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(lambda a: nf.matmul_bias_activation(a, b), (a,), (a,))
    _, dot = jax.jit(lambda a, d: nf.matmul_bias_activation_jvp(a, b, None, d, None, None, "tanh"))(
        a, a
    )
    np.testing.assert_allclose(dot, (1 - jnp.tanh(a @ b) ** 2) * (a @ b), rtol=1e-12)


def test_past_the_table_a_derivative_raises_and_never_stops_silently():
    f = lambda x: nf.activation_mul(x, jnp.ones(()), "gelu")  # noqa: E731
    for _ in range(3):
        f = jax.grad(f)
    exact = nf.activations()["gelu"].third_derivative(np.float64(0.3))
    np.testing.assert_allclose(f(jnp.float64(0.3)), exact, rtol=1e-12)
    with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'gelu'"):
        jax.grad(f)(jnp.float64(0.3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_keeps_its_kind(dtype):
    a, b = (x.astype(dtype) for x in draw((3, 2), (2, 4), seed=11))
    out = nf.matmul_bias_activation(a, b, None, "silu")
    assert out.dtype == dtype
    gradient = jax.grad(lambda a: jnp.sum(nf.matmul_bias_activation(a, b, None, "silu")))(a)
    assert gradient.dtype == dtype


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"b": np.ones((3, 4))}, ValueError, "b must have shape"),
        ({"b": np.ones((2, 4), np.float32)}, TypeError, "all operands must have the same dtype"),
        ({"b": [[1.0]]}, TypeError, "operands must be JAX arrays, got list"),
        ({"a": jnp.ones((3, 2), int)}, TypeError, "an operand must have dtype float64"),
        ({"out": np.ones((3, 4))}, ValueError, "out must be None under JAX"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(change, error, message):
    given = {"a": jnp.ones((3, 2)), "b": np.ones((2, 4)), **change}
    with pytest.raises(error, match=message):
        nf.matmul_bias_activation(**given)


def test_large_callbacks_in_one_computation_do_not_wait_for_each_other():
    code = """
import jax, jax.numpy as jnp, numfuse as nf
@jax.jit
def step(a, b):
    for _ in range(4):
        c = nf.matmul_bias_activation(a, b, None, "tanh")
        a = jnp.sin(c) @ b + c
    return a
a = jnp.full((700, 700), 1e-3, jnp.float32)
for _ in range(3):
    out = step(a, a)
out.block_until_ready()
print("done")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert run.stdout == "done\n", run.stderr[-2000:]
