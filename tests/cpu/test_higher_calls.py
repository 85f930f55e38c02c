"""Double backward and forward mode on the CPU: blocks, threads, what None costs; derived tables.

Guards: the second order keeps the bounds, the bits and the costs of the first
(docs/derivatives.md).
"""

from __future__ import annotations

import pickle

import numba
import numpy as np
import pytest
import tolerance
from arrays import bits, normal
from test_blocks import CHUNK, FORMATS, tiny, whole  # noqa: F401  (fixtures)
from tolerance import DTYPES, assert_within

import numfuse as nf
from numfuse import expr as ex
from numfuse.backends.cpu import descriptors, tiling
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.kernels import library
from numfuse.runtime.replay import Replay


def operands(fmt, m, n, k, seed=0, batch=()):
    dtype, rng = DTYPES[fmt], np.random.default_rng(seed)
    a, b = normal(rng, (*batch, m, k), dtype), normal(rng, (*batch, k, n), dtype, k**-0.5)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (*batch, m, n), dtype)
    return grad, a, b, bias, *(normal(rng, x.shape, dtype) for x in (a, b, bias))


@pytest.mark.parametrize("activation", ["gelu", "relu", "none"])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("m", [CHUNK + 20, 3 * CHUNK + 1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_rows_are_exact_to_second_order(fmt, m, batch, activation, tiny):  # noqa: F811
    grad, a, b, bias, u, v, w = operands(fmt, m, 45, 13, batch=batch)
    dtype = a.dtype
    pre = nf.matmul_bias_activation(a, b, bias, activation, return_pre_activation=True)[1]
    tiny.clear()
    rounded = activation != "none" and a.itemsize == 2 and library.grad_pre_format(fmt) == fmt
    for saved in (None, pre, pre.astype(dtype)):
        result = nf.matmul_bias_activation_double_bwd(
            u, v, w, grad, a, b, bias, activation, pre_activation=saved
        )
        wanted = tolerance.double_backward(
            u, v, w, None, grad, a, b, bias, activation, dtype, rounded_grad_pre=rounded,
            pre=None if activation == "none" else saved,
        )  # fmt: skip
        for name, value in zip(result._fields, result, strict=True):
            assert_within(name, value, *wanted[name])
    result = nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, activation)
    wanted = tolerance.tangent(u, v, w, None, a, b, bias, activation, dtype)
    for name, value in zip(result._fields, result, strict=True):
        assert_within(name, value, *wanted[name])
    assert max(map(len, tiny)) > 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_number_of_threads_gives_the_same_bits(fmt):
    grad, a, b, bias, u, v, w = operands(fmt, 600, 130, 70)
    found = []
    before = numba.get_num_threads()
    try:
        for threads in (1, before):
            numba.set_num_threads(threads)
            found.append(
                (
                    *nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "gelu"),
                    *nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, "gelu"),
                    *nf.activation_mul_double_bwd(grad, grad, grad, grad, grad, "gelu"),
                )
            )
    finally:
        numba.set_num_threads(before)
    for left, right in zip(*found, strict=True):
        assert (bits(left) == bits(right)).all()


@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_large_gates_past_the_caches_have_the_same_bits(fmt):
    dtype, rng = DTYPES[fmt], np.random.default_rng(4)
    shape = (1100, 1031)
    a, b, u, v = (normal(rng, shape, dtype) for _ in range(4))
    for x_dot, y_dot in ((u, v), (u, None), (None, v)):
        large = nf.activation_mul_jvp(a, b, x_dot, y_dot, "silu")
        for i in (0, 517, 1099):
            row = [None if x is None else x[i : i + 1] for x in (a, b, x_dot, y_dot)]
            for whole_, part in zip(large, nf.activation_mul_jvp(*row, "silu"), strict=True):
                assert (bits(whole_[i : i + 1]) == bits(part)).all()


@pytest.fixture
def products(monkeypatch):
    """How many products the calls plan."""
    found = []
    make = descriptors.product

    def counted(*args, **kwargs):
        found.append(args)
        return make(*args, **kwargs)

    monkeypatch.setattr(descriptors, "product", counted)
    monkeypatch.setattr(BACKEND, "replay", Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES))
    return found


@pytest.mark.parametrize("pattern", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
def test_what_is_none_costs_no_product(products, pattern):
    grad, a, b, bias, *moved = operands("float32", 40, 30, 20)
    u, v, w = (x if there else None for x, there in zip(moved, pattern, strict=True))
    there = (u is not None) + (v is not None)
    nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, "gelu")
    assert len(products) == 1 + there
    products.clear()
    nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "gelu")
    # T, pre, a product with Q for d_a and d_b each, and one with S for each cotangent
    assert len(products) == ((there + 1 + 2 + there) if any(pattern) else 0)
    products.clear()
    nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "relu")
    assert len(products) == ((there + 1 + there) if any(pattern) else 0)
    products.clear()
    nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "none", needs=("grad", "bias"))
    assert len(products) == there
    products.clear()
    nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "gelu", needs=())
    assert not products


# --- the table, shifted -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "tanh", "softplus", "relu", "none"])
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_derived_activation_has_the_derivative_as_its_value(name, order):
    act = nf.activations()[name]
    x = np.linspace(-3, 3, 25)
    one = np.ones_like(x)
    shifted = act.derived(order)
    wanted = (act, act.derivative, act.second_derivative, act.third_derivative)[order](x)
    np.testing.assert_allclose(nf.activation_mul(x, one, shifted), wanted, rtol=1e-13, atol=1e-15)
    assert act.derived(1).derived(order).name == act.derived(order + 1).name
    again = pickle.loads(pickle.dumps(shifted))
    assert again.digest == shifted.digest


def test_past_the_table_a_derivative_raises_unless_it_is_zero():
    x = np.ones(3)
    third = nf.activations()["gelu"].derived(3)
    assert nf.activation_mul_bwd(x, x, x, third, needs=("b",)).d_b.shape == (3,)
    with pytest.raises(ValueError, match="ends with third derivatives, got order 4 of 'gelu'"):
        nf.activation_mul_bwd(x, x, x, third)
    assert (nf.activation_mul_bwd(x, x, x, nf.activations()["relu"].derived(3)).d_a == 0).all()
    with pytest.raises(TypeError, match="is derived"):
        third.derivative(lambda x: x)


def test_a_redefined_activation_changes_what_is_derived_from_it():
    @nf.activation(name="higher_test")
    def formula(x):
        return x * x

    slope = formula.derived(1)
    x = np.array([3.0])
    assert nf.activation_mul(x, x, slope)[0] == 18
    formula.derivative(lambda x: ex.exp(0.0 * x))
    assert nf.activation_mul(x, x, slope)[0] == 3
