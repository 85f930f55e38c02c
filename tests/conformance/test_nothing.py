"""Calls whose result, or whose sums, have no element: they return at once, however long the other
axes are.

The operands are one value seen through strides of 0, so their lengths cost nothing to make.
"""

from __future__ import annotations

import time
from math import prod
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as of

import numfuse as nf

#: Seconds of a call, on a machine that has other work: 2^40 steps of anything would take minutes.
LIMIT = 10
#: Elements of a result that a test asks for.
FITS = 1 << 20
LONG = 1 << 40
NEEDS = ("a", "b", "bias")


def seen(*shape: int) -> Any:
    """One value of these many."""
    return np.broadcast_to(np.float32(0.5), shape)


def called(function, *operands, backend, **options):
    """What a call returns, within the limit."""
    start = time.monotonic()
    found = function(*operands, backend=backend, **options)
    took = time.monotonic() - start
    shapes = [None if x is None else x.shape for x in operands if not isinstance(x, str)]
    assert took < LIMIT, f"{function.__name__} of {shapes} took {took:.1f} s"
    return found


def fitting(shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    return tuple(name for name, shape in shapes.items() if prod(shape) <= FITS)


def zero(x):
    assert x is None or not np.any(x)


def products(batch, m, n, k, own, activation, backend, sum_batch=False):
    """Every function of a product of (*batch, m, k) and (*own, k, n) without an element."""
    a, b, bias = seen(*batch, m, k), seen(*own, k, n), seen(n)
    grad = residual = seen(*batch, m, n)
    assert not grad.size
    out = called(nf.matmul_bias_activation, a, b, bias, activation, backend=backend)
    assert out.shape == grad.shape
    out, pre = called(
        nf.matmul_bias_activation, a, b, bias, activation, backend=backend,
        return_pre_activation=True,
    )  # fmt: skip
    assert out.shape == pre.shape == grad.shape
    assert called(nf.matmul_bias_residual, a, b, bias, residual, backend=backend).shape == out.shape
    d_b = (k, n) if sum_batch else b.shape
    needs = fitting({"a": a.shape, "b": d_b, "bias": bias.shape})
    for pre in (None, out):
        for x in called(
            nf.matmul_bias_activation_bwd, grad, a, b, bias, activation, backend=backend,
            needs=needs, sum_batch=sum_batch, pre_activation=pre,
        ):  # fmt: skip
            zero(x)
    for x in called(
        nf.matmul_bias_residual_bwd, grad, a, b, bias, residual, backend=backend,
        needs=(*needs, "residual"), sum_batch=sum_batch,
    ):  # fmt: skip
        zero(x)
    second = fitting({"a": a.shape, "b": b.shape, "bias": bias.shape})
    for x in called(
        nf.matmul_bias_activation_double_bwd, a, b, bias, grad, a, b, bias, activation,
        backend=backend, needs=("grad", *second),
    ):  # fmt: skip
        zero(x)
    for x in called(
        nf.matmul_bias_activation_jvp, a, b, bias, a, b, bias, activation, backend=backend
    ):
        assert x.shape == grad.shape


def gates(shape, backend):
    a = seen(*shape)
    for found in (
        (called(nf.activation_mul, a, a, "silu", backend=backend),),
        called(nf.activation_mul_bwd, a, a, a, "silu", backend=backend),
        called(nf.activation_mul_double_bwd, a, a, a, a, a, "silu", backend=backend),
        called(nf.activation_mul_jvp, a, a, a, a, "silu", backend=backend),
    ):
        assert all(x.shape == shape for x in found)


LENGTHS = st.sampled_from([0, 0, 1, 3, 1 << 20, LONG])


@st.composite
def shapes(draw):
    """(batch, m, n, k, batch of b) with no element in the result, as NumPy can have them."""
    batch = draw(st.lists(LENGTHS, max_size=2).map(tuple))
    m, n, k = draw(LENGTHS), draw(LENGTHS), draw(LENGTHS)
    if prod((*batch, m, n)):
        m, n = draw(st.sampled_from([(0, n), (m, 0)]))
    own = draw(st.sampled_from([(), batch]))
    for shape in ((*batch, m, n), (*batch, m, k), (*own, k, n)):
        # NumPy multiplies the lengths that are not 0, and has no larger arrays.
        while prod(x for x in shape if x) * 8 >= 1 << 62:
            batch, own, k = (), (), min(k, 3)
            shape = (m, n)
            m, n = (0, min(n, LONG)) if not m else (min(m, LONG), 0)
    return batch, m, n, k, own


@pytest.mark.memory("host")
@example(sizes=((), LONG, 0, 3, ()), activation="gelu", sum_batch=False)
@example(sizes=((), LONG, 0, 0, ()), activation="gelu", sum_batch=False)
@example(sizes=((), 0, LONG, 0, ()), activation="none", sum_batch=False)
@example(sizes=((LONG,), 0, 4, 3, ()), activation="gelu", sum_batch=True)
@example(sizes=((1 << 20, 1 << 20), 0, 4, 3, (1 << 20, 1 << 20)), activation="gelu", sum_batch=True)
@example(sizes=((LONG,), 2, 0, 3, (LONG,)), activation="none", sum_batch=True)
@given(sizes=shapes(), activation=st.sampled_from(["none", "gelu"]), sum_batch=st.booleans())
@of(max_examples=60)
def test_a_product_without_a_result_returns_at_once(backend, sizes, activation, sum_batch):
    batch, m, n, k, own = sizes
    products(batch, m, n, k, own, activation, backend, sum_batch)


@pytest.mark.memory("host")
@example(shape=(LONG, 0))
@example(shape=(0, LONG))
@example(shape=(1 << 20, 1 << 20, 0))
@given(shape=st.lists(st.sampled_from([0, 1, 3, 1 << 20]), min_size=1, max_size=3).map(tuple))
@of(max_examples=20)
def test_a_gate_without_an_element_returns_at_once(backend, shape):
    gates(shape if 0 in shape else (*shape[:2], 0), backend)


@pytest.mark.memory("host")
def test_gradients_that_have_no_element_cost_nothing_beside_long_sums(backend):
    """K = 0: the product of (M, 0) and (0, N) is zero, and d_a and d_b are empty."""
    a, b, grad = seen(LONG, 0), seen(0, 5), seen(LONG, 5)
    found = called(
        nf.matmul_bias_activation_bwd, grad, a, b, None, "gelu", backend=backend
    )  # fmt: skip
    assert found.d_a.shape == a.shape and found.d_b.shape == b.shape


@pytest.mark.memory("device")
def test_devices_return_at_once_too(backend):
    products((), 0, 0, 0, (), "gelu", backend)
    gates((0,), backend)
    products((), 1 << 20, 0, 3, (), "gelu", backend)
    for batch, m, n, k, own in (
        ((), LONG, 0, 3, ()), ((), 0, LONG, 0, ()), ((LONG,), 0, 4, 3, ()), ((LONG,), 2, 0, 3, ()),
        ((), LONG, 0, 0, ()), ((1 << 20, 1 << 20), 0, 4, 3, (1 << 20, 1 << 20)),
    ):  # fmt: skip
        products(batch, m, n, k, own, "gelu", backend, True)
    gates((LONG, 0), backend)


@pytest.mark.parametrize("lengths", [(0, 3, 4, 0), (2, 0, 4, 3), (0, 3, 0, 2), (2, 3, 4, 0)])
def test_a_formulas_jet_of_nothing_has_its_shapes(lengths):
    """An operand with an empty axis is no operand of one row."""
    batch, m, k, n = lengths
    a, b, x = np.ones((batch, m, k)), np.ones((k, n)), np.ones((batch, m, n))
    found = nf.matmul_epilogue_jet(a, b, lambda z, y: z * y, (x,), a[None], a[None])
    assert [y.shape for y in found] == [x.shape, (1, *x.shape), (1, *x.shape)]
