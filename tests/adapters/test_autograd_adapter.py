"""HIPS autograd: every operation, to every order that the table has, forwards and backwards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

autograd = pytest.importorskip("autograd", reason="autograd is not installed")

import autograd.numpy as anp  # noqa: E402
from autograd.test_util import check_grads  # noqa: E402
from oracle import ACTIVATIONS  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import autograd as adapter  # noqa: E402

SMOOTH = [name for name in ACTIVATIONS if name != "relu"]
# a, b, bias: plain, broadcast batches, a bias per member, 1-D operands
SHAPES = {
    "plain": ((3, 2), (2, 4), (4,)),
    "shared b": ((2, 3, 2), (2, 4), (4,)),
    "shared a": ((3, 2), (2, 2, 4), (2, 1, 4)),
    "bias alone": ((3, 2), (2, 4), (2, 1, 4)),
    "ones": ((1, 3, 2), (2, 2, 4), (1, 1, 4)),
    "row": ((2,), (2, 4), (4,)),
    "column": ((3, 2), (2,), (1,)),
}


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def away_from_kinks(arrays):
    """relu has no derivative at 0 for finite differences to find."""
    return [np.where(np.abs(x) < 0.1, 0.1 + np.abs(x), x) for x in arrays]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["tanh", "none"])
def test_products_to_third_order_for_every_broadcast(activation, shape, with_bias):
    a, b, bias = draw(SHAPES[shape])
    if with_bias:
        check_grads(lambda *x: nf.matmul_bias_activation(*x, activation), modes=["rev"], order=3)(
            a, b, bias
        )
        check_grads(lambda *x: nf.matmul_bias_activation(*x, activation), modes=["fwd"], order=1)(
            a, b, bias
        )
    else:
        for modes, order in ((["rev"], 3), (["fwd"], 1)):
            check_grads(
                lambda a, b: nf.matmul_bias_activation(a, b, None, activation),
                modes=modes, order=order,
            )(a, b)  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_to_third_order(activation):
    a, b, bias, x, y = draw(((3, 2), (2, 4), (4,), (5,), (5,)), 1)
    (x,) = away_from_kinks([x])
    for modes, order in ((["rev"], 3), (["fwd"], 1)):
        check_grads(lambda *z: nf.matmul_bias_activation(*z, activation), modes=modes, order=order)(
            a, b, bias
        )
        check_grads(lambda *z: nf.activation_mul(*z, activation), modes=modes, order=order)(x, y)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_backward_and_the_double_backward_are_differentiable(activation):
    grad, a, b, bias = draw(((3, 4), (3, 2), (2, 4), (4,)), 2)
    u, v, w = draw((a.shape, b.shape, bias.shape), 3)

    def backward(*x):
        return anp.concatenate(
            [anp.ravel(g) for g in nf.matmul_bias_activation_bwd(*x, activation)]
        )

    def double(*x):
        found = nf.matmul_bias_activation_double_bwd(*x, activation)
        return anp.concatenate([anp.ravel(g) for g in found])

    check_grads(backward, modes=["rev"], order=2)(grad, a, b, bias)
    check_grads(backward, modes=["fwd"], order=1)(grad, a, b, bias)
    check_grads(double, modes=["rev"], order=1)(u, v, w, grad, a, b, bias)
    check_grads(double, modes=["fwd"], order=1)(u, v, w, grad, a, b, bias)


# check_grads asks for derivatives of what is constant, and autograd says so
@pytest.mark.filterwarnings("ignore:Output seems independent of input")
@pytest.mark.parametrize("activation", ["gelu", "none", "relu"])
@pytest.mark.parametrize("pattern", list(itertools.product((True, False), repeat=3)))
def test_every_pattern_of_none(activation, pattern):
    grad, a, b, bias = draw(((3, 4), (3, 2), (2, 4), (4,)), 4)
    moved = [
        x if there else None
        for x, there in zip(draw((a.shape, b.shape, bias.shape), 5), pattern, strict=True)
    ]
    needs = tuple(n for n, there in zip(("a", "b", "bias"), pattern, strict=True) if there)

    def double(*x):
        found = nf.matmul_bias_activation_double_bwd(*moved, *x, activation)
        return anp.concatenate([anp.ravel(g) for g in found])

    def tangent(*x):
        return nf.matmul_bias_activation_jvp(*x, *moved, activation).out_dot

    check_grads(double, modes=["rev"], order=1)(grad, a, b, bias)
    check_grads(tangent, modes=["rev"], order=2)(a, b, bias)
    if needs:

        def backward(*x):
            found = nf.matmul_bias_activation_bwd(*x, activation, needs=needs)
            return anp.concatenate([anp.ravel(g) for g in found if g is not None])

        check_grads(backward, modes=["rev"], order=2)(grad, a, b, bias)
        check_grads(backward, modes=["fwd"], order=1)(grad, a, b, bias)


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("pattern", [(True, True), (True, False), (False, True)])
def test_gates_through_their_derivatives(activation, pattern):
    grad, a, b, *moved = draw(((6,),) * 5, 6)
    u, v = (x if there else None for x, there in zip(moved, pattern, strict=True))
    needs = tuple(name for name, there in zip(("a", "b"), pattern, strict=True) if there)

    def backward(*x):
        found = nf.activation_mul_bwd(*x, activation, needs=needs)
        return anp.concatenate([g for g in found if g is not None])

    def double(*x):
        return anp.concatenate(list(nf.activation_mul_double_bwd(u, v, *x, activation)))

    for function, order in ((backward, 2), (double, 1)):
        check_grads(function, modes=["rev"], order=order)(grad, a, b)
        check_grads(function, modes=["fwd"], order=1)(grad, a, b)
    check_grads(
        lambda *x: nf.activation_mul_jvp(*x, u, v, activation).out_dot, modes=["rev"], order=2
    )(a, b)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("residual_shape", ["full", "row", "scalar"])
def test_residuals_to_third_order(shape, residual_shape):
    a, b, bias = draw(SHAPES[shape], 7)
    out = nf.matmul_bias_activation(a, b, bias)
    own = {"full": out.shape, "row": out.shape[-1:], "scalar": ()}[residual_shape]
    (residual,) = draw((own,), 8)
    residual = np.asarray(residual)
    check_grads(nf.matmul_bias_residual, modes=["rev"], order=3)(a, b, bias, residual)
    check_grads(nf.matmul_bias_residual, modes=["fwd"], order=1)(a, b, bias, residual)

    grad, *moved = draw((out.shape, a.shape, b.shape, bias.shape, own), 9)
    grad, moved = np.asarray(grad), [np.asarray(x) for x in moved]

    def flat(function, *before):
        return lambda *x: anp.concatenate([anp.ravel(g) for g in function(*before, *x)])

    check_grads(flat(nf.matmul_bias_residual_bwd), modes=["rev"], order=2)(
        grad, a, b, bias, residual
    )
    check_grads(flat(nf.matmul_bias_residual_double_bwd, *moved), modes=["rev"], order=1)(
        grad, a, b, bias, residual
    )
    check_grads(lambda *x: nf.matmul_bias_residual_jvp(*x, *moved).out_dot, modes=["rev"], order=2)(
        a, b, bias, residual
    )


def test_sum_batch_and_the_pre_activation_are_differentiable():
    a, b, grad = draw(((2, 3, 2), (2, 2, 4), (2, 3, 4)), 10)

    def summed(*x):
        return nf.matmul_bias_activation_bwd(*x, None, "tanh", sum_batch=True, needs=("b",)).d_b

    assert summed(grad, a, b).shape == (2, 4)
    check_grads(summed, modes=["rev"], order=2)(grad, a, b)

    def both(a, b):
        out, pre = nf.matmul_bias_activation(a, b, None, "tanh", return_pre_activation=True)
        return out * pre

    check_grads(both, modes=["rev"], order=3)(a, b)


def test_a_saved_pre_activation_that_is_differentiated_is_an_operand():
    a, b, bias, grad = draw(((3, 2), (2, 4), (4,), (3, 4)), seed=70)
    u, v, w = draw(((3, 2), (2, 4), (4,)), seed=71)
    pre = a @ b + bias

    def total(found):
        return sum(anp.sum(x) for x in found)

    for function, operands in (
        (nf.matmul_bias_activation_bwd, (grad, a, b, bias)),
        (nf.matmul_bias_activation_double_bwd, (u, v, w, grad, a, b, bias)),
    ):
        check_grads(
            lambda pre, f=function, x=operands: total(f(*x, "tanh", pre_activation=pre)),
            modes=["rev"],
            order=1,
        )(pre)
        with pytest.raises(ValueError, match="pre_activation must have the result's shape"):
            autograd.grad(
                lambda a, f=function, x=operands: total(
                    f(*x[:-3], a, b, bias, pre_activation=pre[:1])
                )
            )(a)


def test_an_activation_of_a_box_has_derivatives():
    (x,) = draw(((5,),), seed=72)
    check_grads(nf.activations()["gelu"], modes=["rev", "fwd"], order=2)(x)


def test_zero_is_zero_beside_infinities():
    a, b, residual = draw(((3, 2), (2, 4), (4,)), seed=73)
    residual[0] = np.inf
    given = (np.ones((3, 4)), a, b, None, residual)
    found = adapter.matmul_bias_residual_double_bwd(None, None, None, None, *given)
    assert not np.any(found.d_residual) and not np.any(found.d_grad)
    dots = adapter.matmul_bias_residual_jvp(*given[1:], None, None, None, None)
    assert not np.any(dots.out_dot)


def test_results_are_those_of_the_core():
    grad, a, b, bias = draw(((3, 4), (3, 2), (2, 4), (4,)), 11)
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    out = autograd.make_vjp(lambda x: nf.matmul_bias_activation(*x, "gelu"))((a, b, bias))[0](grad)
    for left, right in zip(out, wanted, strict=True):
        assert (left == right).all()
    assert type(adapter.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")) is type(wanted)


def test_float32_stays_float32():
    a, b = (x.astype(np.float32) for x in draw(((3, 2), (2, 4)), 12))
    gradient = autograd.grad(lambda a: anp.sum(nf.matmul_bias_activation(a, b, None, "gelu") ** 2))
    assert gradient(a).dtype == np.float32
    second = autograd.grad(lambda a: anp.sum(gradient(a) ** 2))
    assert second(a).dtype == np.float32


def test_past_the_table_a_derivative_raises_and_never_stops_silently():
    x = np.array([0.3, -0.2])

    def f(x):
        return anp.sum(nf.activation_mul(x, np.ones(2), "gelu"))

    for _ in range(3):
        f = (lambda g: lambda x: anp.sum(autograd.grad(g)(x)))(f)
    exact = nf.activations()["gelu"].third_derivative(x)
    np.testing.assert_allclose(f(x), exact.sum(), rtol=1e-12)
    with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'gelu'"):
        autograd.grad(f)(x)


def test_relu_can_be_differentiated_without_end():
    def f(x):
        return anp.sum(nf.activation_mul(x, x, "relu"))

    for _ in range(5):
        f = (lambda g: lambda x: anp.sum(autograd.grad(g)(x)))(f)
    assert f(np.array([0.5, -1.0])) == 0


def test_out_is_refused_and_a_box_is_never_lost():
    x = np.ones((2, 2))
    with pytest.raises(ValueError, match="out must be None under automatic differentiation"):
        autograd.grad(lambda a: anp.sum(nf.matmul_bias_activation(a, x, out=x)))(x)
    hessian = autograd.hessian(lambda a: anp.sum(nf.matmul_bias_activation(a, x, None, "tanh")))(x)
    assert hessian.shape == (2, 2, 2, 2) and hessian.any()


def test_a_hessian_vector_product_is_that_of_the_hessian():
    a, b, v = draw(((4, 3), (3, 2), (3, 2)), 13)

    def loss(b):
        return anp.sum(nf.matmul_bias_activation(a, b, None, "gelu") ** 2)

    product = autograd.hessian_vector_product(loss)(b, v)
    full = np.tensordot(autograd.hessian(loss)(b), v, 2)
    np.testing.assert_allclose(product, full, rtol=1e-11, atol=1e-12)


@st.composite
def problems(draw):
    """Shapes of a, b, bias and residual: 1-D, batched and broadcast, in every combination."""
    m, n, k = (draw(st.integers(1, 3)) for _ in "mnk")
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))

    def lead():
        own = batch[draw(st.integers(0, len(batch))) :]
        return tuple(draw(st.sampled_from([1, length])) for length in own)

    row, column = draw(st.booleans()), draw(st.booleans())
    a = (k,) if row else (*lead(), m, k)
    b = (k,) if column else (*lead(), k, n)
    kinds = [None, (1 if column else n,)] + ([] if column else [(*lead(), 1, n)])
    bias = draw(st.sampled_from(kinds))
    bias_there = np.zeros(1 if column else n) if bias is None else np.zeros(bias)
    out = nf.matmul_bias_activation(np.zeros(a), np.zeros(b), bias_there).shape
    residual = out[draw(st.integers(0, len(out))) :]
    return a, b, bias, draw(st.sampled_from([None, residual]))


def reference(shapes, activation):
    """autograd's own layer, over matrices."""
    row, column = len(shapes[0]) == 1, len(shapes[1]) == 1

    def layer(a, b, bias, residual):
        z = anp.matmul(a[None] if row else a, b[:, None] if column else b)
        z = z if bias is None else z + bias
        shape = z.shape[:-2] + (() if row else z.shape[-2:-1]) + (() if column else z.shape[-1:])
        z = anp.reshape(z, shape)
        z = anp.tanh(z) if activation == "tanh" else z
        return z if residual is None else z + residual

    return layer


@pytest.mark.filterwarnings("ignore:Output seems independent of input")
@example(((2,), (2,), None, None), "tanh", 0)
@example(((2,), (2,), (1,), ()), "none", 3)
@given(problems(), st.sampled_from(["tanh", "none"]), st.integers(0, 3))
def test_every_shape_in_every_mode_is_that_of_autograd(shapes, activation, moved):
    a, b, bias, residual = (
        None if shape is None else np.asarray(x)
        for x, shape in zip(draw([s or () for s in shapes], 14), shapes, strict=True)
    )
    if residual is not None:
        activation = "none"
    operands = [a, b, bias, residual]
    moved = moved if operands[moved] is not None else 0
    x = operands[moved]
    (v,) = (np.asarray(y) for y in draw([x.shape], 15))

    def own(a, b, bias, residual):
        if residual is None:
            return nf.matmul_bias_activation(a, b, bias, activation)
        return nf.matmul_bias_residual(a, b, bias, residual)

    found = []
    for layer in (own, reference(shapes, activation)):

        def f(y, layer=layer):
            return anp.sum(layer(*operands[:moved], y, *operands[moved + 1 :]) ** 2)

        gradient = autograd.grad(f)
        tangent = lambda y, f=f: autograd.make_jvp(f)(y)(v)[1]  # noqa: E731
        found.append(
            (
                gradient(x),
                tangent(x),
                autograd.make_jvp(gradient)(x)(v)[1],
                autograd.grad(tangent)(x),
                autograd.make_jvp(tangent)(x)(v)[1],
                autograd.jacobian(gradient)(x),
                autograd.hessian_vector_product(f)(x, v),
            )
        )
    for left, right in zip(*found, strict=True):
        assert np.shape(left) == np.shape(right)
        np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-10)


def test_gates_of_no_axes_in_every_mode():
    x = np.array([0.3, -0.7])
    found = []
    for gate in (lambda a, b: nf.activation_mul(a, b, "tanh"), lambda a, b: anp.tanh(a) * b):

        def f(x, gate=gate):
            return gate(x[0], x[1]) ** 2

        gradient = autograd.grad(f)
        found.append((gradient(x), autograd.make_jvp(gradient)(x)(x)[1], autograd.hessian(f)(x)))
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12)


def test_an_infinite_residual_has_finite_derivatives():
    x, v = np.ones((2, 2)), np.full((2, 2), 2.0)
    residual = np.array([[np.inf, 1.0], [np.nan, -np.inf]])
    tangent = autograd.make_jvp(lambda r: nf.matmul_bias_residual(x, x, None, r))(residual)(v)[1]
    assert (tangent == 2).all()
    second = adapter.matmul_bias_residual_double_bwd(x, None, None, v, x, x, x, None, residual)
    assert (second.d_residual == 0).all()


def test_an_activation_of_a_box_is_a_box_with_derivatives():
    act = nf.activations()["gelu"]
    x = np.array([[0.5, -1.0], [2.0, 0.1]])
    own = lambda x: adapter.activation(x, act)  # noqa: E731
    np.testing.assert_allclose(own(x), act(x), rtol=1e-14)
    np.testing.assert_allclose(autograd.elementwise_grad(own)(x), act.derivative(x), rtol=1e-13)
    second = autograd.elementwise_grad(autograd.elementwise_grad(own))(x)
    np.testing.assert_allclose(second, act.second_derivative(x), rtol=1e-12)
    tangent = autograd.make_jvp(own)(x)(np.ones_like(x))[1]
    np.testing.assert_allclose(tangent, act.derivative(x), rtol=1e-13)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the core: name, whether a pre-activation was given, and the needed gradients."""
    made = []

    def recorded(name, function):
        def call(*args, **options):
            given = options.get("pre_activation") is not None
            made.append((name, given, options.get("needs")))
            return function(*args, **options)

        return call

    for name, function in vars(adapter.CORE).items():
        monkeypatch.setattr(adapter.CORE, name, recorded(name, function))
    return made


def layer_loss(a, b, bias):
    return anp.sum(nf.matmul_bias_activation(a, b, bias, "tanh") ** 2)


def test_only_the_gradients_that_are_asked_for_are_made(calls):
    operands = draw(((3, 2), (2, 4), (4,)), 20)
    for place, name in enumerate(("a", "b", "bias")):
        calls.clear()
        autograd.grad(layer_loss, place)(*operands)
        assert [needs for *_, needs in calls] == [None, (name,)]
    calls.clear()
    autograd.grad(layer_loss, (0, 2))(*operands)
    assert calls[-1][2] == ("a", "bias")


def test_the_product_of_a_forward_is_made_once_for_every_order(calls):
    a, b, bias = draw(((3, 2), (2, 4), (4,)), 21)

    def second(a, b, bias):
        du = autograd.elementwise_grad(lambda a: nf.matmul_bias_activation(a, b, bias, "tanh"))
        return anp.sum(autograd.elementwise_grad(lambda a: du(a)[:, 0])(a) ** 2)

    autograd.grad(second, (0, 1, 2))(a, b, bias)
    names = [name for name, *_ in calls]
    derivatives = [given for name, given, _ in calls if name.startswith("matmul_bias_activation_")]
    # the layer's; and of the third order T = u @ b and its cotangent's, but no a @ b + bias
    assert names.count("matmul_bias_activation") == 3
    assert derivatives[:2] == [True, True]


def test_a_gradient_that_nobody_uses_has_no_cotangent(calls):
    grad, a, b, bias = draw(((3, 4), (3, 2), (2, 4), (4,)), 22)

    def loss(a):
        found = nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh")
        return anp.sum(found.d_bias**2)

    gradient = autograd.grad(loss)(a)
    direct = autograd.grad(
        lambda a: anp.sum(
            nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh", needs=("bias",)).d_bias ** 2
        )
    )(a)
    np.testing.assert_array_equal(gradient, direct)
    assert [name for name, *_ in calls].count("matmul_bias_activation_double_bwd") == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_narrow_dtype_keeps_its_own_to_third_order(dtype):
    wide = draw(((3, 2), (2, 4), (4,)), 23)

    def second(a, b, bias):
        du = autograd.elementwise_grad(lambda a: nf.matmul_bias_activation(a, b, bias, "tanh"))
        return anp.sum(autograd.elementwise_grad(lambda a: du(a)[:, 0])(a) * a)

    third = autograd.grad(second, (0, 1, 2))
    exact = third(*wide)
    found = third(*(x.astype(dtype) for x in wide))
    for left, right in zip(found, exact, strict=True):
        assert left.dtype == dtype
        scale = np.abs(right).max()
        np.testing.assert_allclose(left / scale, right / scale, atol=64 * np.finfo(dtype).eps)
