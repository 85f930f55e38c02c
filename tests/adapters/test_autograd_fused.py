"""HIPS autograd: epilogues, elementwise formulas and the gated layer, to every order."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

autograd = pytest.importorskip("autograd", reason="autograd is not installed")

import autograd.numpy as anp  # noqa: E402
from autograd.test_util import check_grads  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse import expr as ex  # noqa: E402
from numfuse.adapters import autograd as adapter  # noqa: E402

GELU = nf.activations()["gelu"]


def scaled(z, bias, scale):
    return ex.tanh(z + bias) * scale


def two(z, w, s):
    return GELU(z) * w + s


def pair(x, y):
    return x * ex.exp(y), x * x + y


def of_pair(x, y):
    p, q = nf.elementwise(pair, x, y)
    return p + q * q


def epilogue(a, b, bias, scale):
    return nf.matmul_epilogue(a, b, scaled, bias, scale)


USES = {
    "epilogue": (epilogue, ((3, 2), (2, 4), (4,), (3, 1))),
    "two factors": (
        lambda a, b, c, s: nf.matmul_epilogue(a, (b, c), two, s),
        ((3, 2), (2, 4), (2, 4), ()),
    ),
    "a number": (
        lambda a, b, c: nf.matmul_epilogue(a, (b, c), two, 0.5),
        ((3, 2), (2, 4), (2, 4)),
    ),
    "gated layer": (nf.matmul_activation_mul, ((3, 2), (2, 4), (2, 4), (4,), (3, 4))),
    "elementwise": (of_pair, ((3, 4), (4,))),
}


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.standard_normal(shape)) for shape in shapes]


def joined(found):
    return anp.concatenate([anp.ravel(x) for x in found if x is not None])


@pytest.mark.parametrize("use", USES)
def test_every_use_to_second_order(use):
    f, shapes = USES[use]
    check_grads(f, modes=["rev"], order=2)(*draw(shapes))
    check_grads(f, modes=["fwd"], order=2)(*draw(shapes, 1))


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_every_use_to_third_order(use):
    f, shapes = USES[use]
    check_grads(f, modes=["rev"], order=3)(*draw(shapes, 2))


@pytest.mark.parametrize("shapes", [
    ((2, 3, 2), (2, 4), (4,), (3, 1)), ((2, 3, 2), (2, 2, 4), (4,), (3, 4)),
    ((2,), (2, 4), (4,), ()), ((3, 2), (2,), (), (3,)), ((3, 2), (2, 2, 4), (2, 1, 4), (1,)),
])  # fmt: skip
def test_batches_and_1d_operands(shapes):
    check_grads(epilogue, modes=["rev"], order=1)(*draw(shapes, 3))
    check_grads(epilogue, modes=["fwd"], order=1)(*draw(shapes, 4))


def test_derivatives_of_the_derivatives_functions():
    _, shapes = USES["gated layer"]
    x, dots, (grad,) = draw(shapes, 5), draw(shapes, 6), draw(((3, 4),), 7)
    saved = nf.matmul_activation_mul(*x, return_pre_activation=True)[1]

    def backward(*z):
        return joined(nf.matmul_activation_mul_bwd(*z, pre_activation=None))

    def double(*z):
        return joined(nf.matmul_activation_mul_double_bwd(*z, needs=("grad", "b_up", "bias_gate")))

    def tangent(*z):
        return nf.matmul_activation_mul_jvp(*z).out_dot

    check_grads(backward, modes=["rev", "fwd"], order=1)(grad, *x)
    check_grads(double, modes=["rev", "fwd"], order=1)(*dots, grad, *x)
    check_grads(tangent, modes=["rev", "fwd"], order=1)(*x, *dots)
    by_grad = lambda g: joined(  # noqa: E731
        nf.matmul_activation_mul_bwd(g, *x, pre_activation=saved, needs=("b_up", "a"))
    )
    check_grads(by_grad, modes=["rev"], order=1)(grad)
    some = lambda g, x, y: joined(nf.elementwise_bwd((g, None), pair, x, y))  # noqa: E731
    check_grads(some, modes=["rev", "fwd"], order=1)(*draw(((3, 4), (3, 4), (4,)), 8))


def test_what_a_forward_kept_is_differentiable():
    a, b, c, bias = draw(((3, 2), (2, 4), (2, 4), (4,)), 9)

    def gated(a, b, c, bias):
        out, pre = nf.matmul_activation_mul(a, b, c, bias, return_pre_activation=True)
        return joined([out, *pre])

    def sums(a, b, c):
        out, pre = nf.matmul_epilogue(a, (b, c), two, 0.5, return_pre_activation=True)
        return joined([out, *pre])

    check_grads(gated, modes=["rev"], order=2)(a, b, c, bias)
    check_grads(sums, modes=["rev"], order=2)(a, b, c)


@given(st.data())
def test_gradients_are_those_of_the_reference(data):
    lead = data.draw(st.sampled_from([(), (2,), (3, 2)]))
    m, k, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    own = data.draw(st.sampled_from([(), lead, lead[1:]]))
    full = (*lead, m, n)
    shape = full[data.draw(st.integers(0, len(full))) :]
    shape = tuple(length if data.draw(st.booleans()) else 1 for length in shape)
    x = draw(((*lead, m, k), (*own, k, n), (n,), shape), m + 7 * n)
    (grad,) = draw((full,), 1)
    loss = lambda *z: anp.sum(epilogue(*z) * grad)  # noqa: E731
    found = autograd.grad(loss, (0, 1, 2, 3))(*x)
    wanted = nf.matmul_epilogue_bwd(grad, *x[:2], scaled, *x[2:], backend="reference")
    pairs = zip(found, (wanted.d_a, wanted.d_b, *wanted.d_operands), strict=True)
    for left, right in pairs:
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=1e-11, atol=1e-12)


def test_float32_stays_float32():
    x = [v.astype("float32") for v in draw(USES["gated layer"][1], 10)]
    found = autograd.grad(lambda *z: anp.sum(nf.matmul_activation_mul(*z)), (0, 1, 2, 3, 4))(*x)
    wanted = nf.matmul_activation_mul_bwd(np.ones((3, 4), "float32"), *x)
    for left, right in zip(found, wanted, strict=True):
        assert left.dtype == np.float32
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_a_batch_of_weights_can_be_summed_over():
    a, b, c, grad = draw(((6, 3, 2), (6, 2, 4), (6, 2, 4), (6, 3, 4)), 11)

    def summed(a):
        return joined(nf.matmul_activation_mul_bwd(grad, a, b, c, sum_batch=True)[1:3])

    def whole(a):
        return joined([x.sum(0) for x in nf.matmul_activation_mul_bwd(grad, a, b, c)[1:3]])

    found, wanted = (autograd.grad(lambda a, f=f: anp.sum(f(a) ** 2))(a) for f in (summed, whole))
    np.testing.assert_allclose(found, wanted, rtol=1e-10)


def test_errors_and_plain_arrays():
    x = draw(USES["epilogue"][1], 12)
    assert type(adapter.matmul_epilogue(*x[:2], scaled, *x[2:])) is np.ndarray
    with pytest.raises(ValueError, match="out must be None under automatic differentiation"):
        autograd.grad(lambda a: anp.sum(nf.elementwise(lambda x: x * x, a, out=x[0])))(x[0])
    with pytest.raises(ValueError, match="scale must broadcast"):
        autograd.grad(lambda a: anp.sum(epilogue(a, *x[1:3], x[3][:2])))(x[0])


@pytest.mark.long
def test_a_primitive_takes_few_microseconds_of_its_own():
    """Guards: the host time of a use, which is that of many small calls."""
    x = [v.astype("float32") for v in draw(((8, 8), (8, 8), (8, 8)), 13)]
    op = nf.matmul_activation_mul
    grad = autograd.grad(lambda *z: anp.sum(op(*z)), (0, 1, 2))
    plain = autograd.grad(lambda a, b, c: anp.sum(a * b * c), (0, 1, 2))  # as many operands
    one = np.ones((8, 8), "float32")

    def kernels():
        op(*x, return_pre_activation=True)
        nf.matmul_activation_mul_bwd(one, *x, needs=("a", "b_gate", "b_up"))

    def least(f):
        times = []
        for _ in range(300):
            begin = time.perf_counter()
            f()
            times.append(time.perf_counter() - begin)
        return min(times)

    for f in (kernels, lambda: grad(*x), lambda: plain(*x)):
        f()
    own = least(lambda: grad(*x)) - least(kernels)
    assert own < least(lambda: plain(*x)) + 100e-6, own
