"""JAX: forward and reverse mode in every order of nesting, vmap around and within, beside JAX."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import jax as adapter  # noqa: E402

PRODUCTS = ("matmul_bias_activation", "matmul_bias_residual")
#: The derivatives that the table has beyond those that a function evaluates itself.
ORDERS = {"": 3, "_bwd": 2, "_double_bwd": 1, "_jvp": 2}
# a, b, bias, residual
SHAPES = {
    "plain": ((3, 2), (2, 4), (4,), (3, 4)),
    "shared b": ((2, 3, 2), (2, 4), (4,), (3, 4)),
    "shared a": ((3, 2), (2, 2, 4), (2, 1, 4), (1,)),
    "bias alone": ((3, 2), (2, 4), (2, 1, 4), (2, 3, 4)),
    "row": ((2,), (2, 4), (4,), (4,)),
    "column": ((3, 2), (2,), (1,), (3,)),
    "dot": ((2,), (2,), (1,), ()),
}


@pytest.fixture(autouse=True)
def double_precision():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def plain(name, suffix, activation):
    """JAX's own function of this name."""
    act = {"tanh": jnp.tanh, "none": lambda x: x, "relu": jax.nn.relu}[activation]

    def pre(a, b, bias):
        z = a @ b
        return z + (bias[0] if z.ndim == 0 else bias)

    forward = {
        "matmul_bias_activation": lambda *x: act(pre(*x)),
        "matmul_bias_residual": lambda a, b, bias, residual: pre(a, b, bias) + residual,
        "activation_mul": lambda a, b: act(a) * b,
    }[name]

    def backward(grad, *x):
        return jax.vjp(forward, *x)[1](grad)

    def double(*x):
        n = len(x) // 2
        return jax.vjp(backward, *x[n:])[1](x[:n])

    def tangent(*x):
        n = len(x) // 2
        return jax.jvp(forward, x[:n], x[n:])

    return {"": forward, "_bwd": backward, "_double_bwd": double, "_jvp": tangent}[suffix]


def ours(name, suffix, activation):
    function = getattr(nf, name + suffix)
    end = () if name == "matmul_bias_residual" else (activation,)
    return lambda *x: function(*x, *end)


def draw(shapes, seed):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def operand_shapes(name, suffix, shape):
    if name == "activation_mul":
        own, out = ((3,), (3,)), (3,)
    else:
        own = SHAPES[shape][: 4 if name == "matmul_bias_residual" else 3]
        out = nf.matmul_bias_activation(*map(np.zeros, own[:3])).shape
    return {"": own, "_bwd": (out, *own), "_double_bwd": (*own, out, *own), "_jvp": own * 2}[suffix]


def flat(function):
    return lambda *x: jnp.concatenate([jnp.ravel(y) for y in jax.tree.leaves(function(*x))])


def derivatives(function, order, directions):
    """{"frf": the function's derivative in these modes, the first innermost}."""

    def forward(f, v):
        return lambda *x: jax.jvp(f, x, v)[1]

    def reverse(f):
        def call(*x):
            y, back = jax.vjp(f, *x)
            return jnp.concatenate(
                [jnp.ravel(g) for g in back(jnp.cos(jnp.arange(1.0, y.size + 1)))]
            )

        return call

    found = {}
    for n in range(1, order + 1):
        for modes in itertools.product("fr", repeat=n):
            f = flat(function)
            for mode, v in zip(modes, directions, strict=False):
                f = forward(f, v) if mode == "f" else reverse(f)
            found["".join(modes)] = f
    return found


def assert_alike(mine, theirs, order, x, mapped=None):
    """All derivatives of both functions, compiled as one computation each.

    `mapped`: the axes of a vmap around them.
    """
    members = [y[0] if mapped and mapped[i] == 0 else y for i, y in enumerate(x)]
    directions = [tuple(draw([y.shape for y in members], seed)) for seed in range(1, order + 1)]
    found = []
    for function in (mine, theirs):
        every = derivatives(function, order, directions)
        call = lambda *x, every=every: {name: f(*x) for name, f in every.items()}  # noqa: E731
        found.append(jax.jit(jax.vmap(call, mapped) if mapped else call)(*x))
    for name, got in found[0].items():
        np.testing.assert_allclose(got, found[1][name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("suffix", ORDERS)
@pytest.mark.parametrize("name", [*PRODUCTS, "activation_mul"])
def test_every_function_in_every_mix_of_modes(name, suffix):
    x = draw(operand_shapes(name, suffix, "plain"), 0)
    pair = (f(name, suffix, "tanh") for f in (ours, plain))
    assert_alike(*pair, ORDERS[suffix], x)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "plain"])
@pytest.mark.parametrize("activation", ["tanh", "none"])
def test_every_shape_in_every_mix_of_modes(shape, activation):
    for name in PRODUCTS:
        x = draw(operand_shapes(name, "", shape), 0)
        pair = (f(name, "", activation) for f in (ours, plain))
        assert_alike(*pair, 2, x)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0), (None, None, 0)])
@pytest.mark.parametrize("shape", ["row", "shared a"])
def test_derivatives_of_a_vmap_and_a_vmap_of_derivatives(axes, shape):
    name, shapes = "matmul_bias_activation", SHAPES[shape][:3]
    wide = [(3, *s) if axis == 0 else s for s, axis in zip(shapes, axes, strict=True)]
    x = draw(wide, 0)
    mine, theirs = (f(name, "", "tanh") for f in (ours, plain))
    assert_alike(jax.vmap(mine, axes), jax.vmap(theirs, axes), 2, x)
    assert_alike(mine, theirs, 2, x, axes)
    # both: the inner axis is summed over in gradients of what its members share, the outer is not
    twice = [jnp.stack([y, 2 * y]) if axis is None else y for y, axis in zip(x, axes, strict=True)]
    outer = tuple(0 if axis is None else None for axis in axes)
    if any(axis == 0 for axis in outer):
        assert_alike(jax.vmap(mine, axes), jax.vmap(theirs, axes), 2, twice, outer)


@pytest.mark.long
def test_the_functions_of_jax_that_are_made_of_them():
    w, x, c = draw(((2, 4), (3, 2), (4,)), 0)

    def of(layer, gate):
        f = lambda w: jnp.sum(gate(layer(x, w, c), layer(x, w, c)) ** 2)  # noqa: E731
        return (
            jax.hessian(f)(w),
            jax.jacfwd(jax.jacfwd(f))(w),
            jax.jacrev(jax.jacfwd(f))(w),
            jax.jvp(jax.grad(f), (w,), (w,))[1],
            jax.jit(jax.jacfwd(f))(w),
            jax.linearize(jax.grad(f), w)[1](w),
            jax.grad(jax.checkpoint(f))(w),
            jax.lax.scan(lambda s, _: (s - 0.1 * jax.grad(f)(s), f(s)), w, length=3)[1],
        )

    mine = of(ours("matmul_bias_activation", "", "tanh"), ours("activation_mul", "", "tanh"))
    theirs = of(plain("matmul_bias_activation", "", "tanh"), plain("activation_mul", "", "tanh"))
    for left, right in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


def test_a_tangent_past_the_table_raises():
    f = lambda x: nf.activation_mul(x, jnp.ones(()), "gelu")  # noqa: E731
    for _ in range(3):
        f = (lambda g: lambda x: jax.jvp(g, (x,), (jnp.ones(()),))[1])(f)
    exact = nf.activations()["gelu"].third_derivative(np.float64(0.3))
    np.testing.assert_allclose(f(jnp.float64(0.3)), exact, rtol=1e-12)
    for transformed in (jax.grad(f), jax.jacfwd(f), jax.jit(jax.jacfwd(f))):
        with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'gelu'"):
            transformed(jnp.float64(0.3))


def test_what_the_guard_counts_as_zero_is_zero_in_every_mode():
    a = jnp.asarray([[np.nan, 1.0], [0.5, 2.0]])
    b = jnp.eye(2)
    f = lambda c: nf.matmul_bias_activation(a, b, c, "tanh")  # noqa: E731
    c = jnp.zeros(2)
    assert np.isfinite(jax.jacfwd(f)(c)).all() and np.isfinite(jax.jacrev(f)(c)).all()
    total = lambda c: jnp.nansum(f(c))  # noqa: E731
    assert np.isfinite(jax.hessian(total)(c)).all()


def test_the_derivatives_of_a_tanh_layer_hold_their_far_tails():
    one, x = jnp.ones((1, 1)), jnp.asarray([0.01, 0.3, 1.0, 8.0, 19.0, 40.0])
    f = lambda x: nf.matmul_bias_activation(x.reshape(1, 1), one, None, "tanh")[0, 0]  # noqa: E731
    for order in (1, 2, 3):
        f = jax.grad(f)
        exact = nf.activations()["tanh"].derived(order)(np.asarray(x))
        np.testing.assert_allclose(jax.jit(jax.vmap(f))(x), exact, rtol=1e-14)


def test_what_is_elementwise_in_a_layers_derivatives_is_left_to_xla():
    """Guards: the speed of a physics-informed step, most of which is passes over elements."""
    x, b = draw(((3, 2), (2, 2)), 0)
    f = lambda x: jnp.sum(nf.matmul_bias_activation(x, b, None, "tanh"))  # noqa: E731
    second = lambda x: jax.jvp(jax.grad(f), (x,), (x,))[1]  # noqa: E731
    text = jax.jit(second).lower(x).as_text()
    assert not any(name in text for name in ("gate_bwd", "gate_tangent", "gate_double"))


def test_an_activation_of_an_array_is_an_array_with_derivatives():
    (x,) = draw(((2, 3),), 0)
    act = nf.activations()["gelu"]
    own = lambda x: adapter.activation(x, act)  # noqa: E731
    theirs = jax.nn.gelu
    out = own(x)
    assert isinstance(out, jax.Array) and out.dtype == x.dtype
    np.testing.assert_allclose(out, act(np.asarray(x)), rtol=1e-15)
    for form in (jax.jit, jax.vmap):
        np.testing.assert_allclose(form(own)(x), theirs(x), rtol=1e-12, atol=1e-15)
    both = []
    for f in (own, theirs):
        g = lambda x, f=f: jnp.sum(f(x) ** 2)  # noqa: E731
        both.append((jax.grad(g)(x), jax.hessian(g)(x), jax.jvp(f, (x,), (x,))[1]))
    for left, right in zip(*both, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)
    half = jnp.ones(3, jnp.bfloat16)
    assert own(half).dtype == half.dtype and own(jnp.asarray(0.5)).shape == ()
    np.testing.assert_allclose(
        adapter.activation(x, act.derived(1)), act.derivative(np.asarray(x)), rtol=1e-12
    )
