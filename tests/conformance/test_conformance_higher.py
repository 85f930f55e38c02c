"""What every backend has to fulfil beyond the first derivative."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import oracle
import pytest
import tolerance
from arrays import bits, in_layout, normal, unwritten
from conftest import SIMULATED, traits
from hypothesis import strategies as st
from oracle import ACTIVATIONS
from test_conformance import (
    activations,
    arrays,  # noqa: F401  (a fixture that every test here uses)
    dtypes,
    gemms,
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    rounds_grad_pre,
    sampled,
    seeds,
    sizes,
    tier,
    unrecorded,  # noqa: F401  (a fixture)
)
from tolerance import DTYPES, assert_within

import numfuse as nf

PATTERNS = tuple(itertools.product((True, False), repeat=3))
patterns = st.sampled_from(PATTERNS)
CURVED = tuple(name for name in ACTIVATIONS if name not in ("none", "relu"))


def moves(rng, operands, pattern, layout="c"):
    """A cotangent or tangent for each operand that is there and that the pattern asks for."""
    found = []
    for x, there in zip(operands, pattern, strict=True):
        made = None
        if x is not None and there:
            made = normal(rng, x.shape, x.dtype)
            made = in_layout(made, layout) if made.ndim else made
        found.append(made)
    return found


def check(result, wanted, dtype):
    for name, value in zip(result._fields, result, strict=True):
        if name not in wanted:
            assert value is None
            continue
        assert value.dtype == dtype
        assert value.flags.c_contiguous
        assert_within(name, value, *wanted[name])


# --- values -------------------------------------------------------------------------------------


@sampled(120, case=gemms, activation=activations, pattern=patterns, layout=layouts, data=st.data())
def test_double_backward_is_exact_within_the_bound(
    backend, case, activation, pattern, layout, data
):
    a, b, bias, shape, rng = case
    grad = in_layout(normal(rng, shape, a.dtype), layout)
    u, v, w = moves(rng, (a, b, bias), pattern, layout)
    pre = None
    if data.draw(st.booleans()):
        _, pre = nf.matmul_bias_activation(
            a, b, bias, activation, return_pre_activation=True, backend=backend
        )
        if data.draw(st.booleans()):
            pre = pre.astype(a.dtype)
    with unwritten(grad, a, b, bias, u, v, w, pre):
        result = nf.matmul_bias_activation_double_bwd(
            u, v, w, grad, a, b, bias, activation, pre_activation=pre, backend=backend
        )
    if activation == "none":
        pre = None
    rounded = activation != "none" and rounds_grad_pre(backend, a.dtype)
    wanted = tolerance.double_backward(
        u, v, w, None, grad, a, b, bias, activation, a.dtype, pre=pre, rounded_grad_pre=rounded,
        backend=backend,
    )  # fmt: skip
    check(result, wanted, a.dtype)


@sampled(100, case=gemms, activation=activations, pattern=patterns, layout=layouts)
def test_forward_mode_is_exact_within_the_bound(backend, case, activation, pattern, layout):
    a, b, bias, _, rng = case
    tangents = moves(rng, (a, b, bias), pattern, layout)
    with unwritten(a, b, bias, *tangents):
        result = nf.matmul_bias_activation_jvp(a, b, bias, *tangents, activation, backend=backend)
    wanted = tolerance.tangent(*tangents, None, a, b, bias, activation, a.dtype, backend=backend)
    check(result, wanted, a.dtype)
    plain = nf.matmul_bias_activation(a, b, bias, activation, backend=backend)
    assert (bits(result.out) == bits(plain)).all()


@sampled(60, case=gemms, pattern=patterns, layout=layouts, data=st.data())
def test_residual_is_exact_within_the_bound_to_second_order(backend, case, pattern, layout, data):
    a, b, bias, shape, rng = case
    own = [length if data.draw(st.booleans()) else 1 for length in shape]
    residual = normal(rng, tuple(own[data.draw(st.integers(0, len(own))) :]), a.dtype)
    grad = in_layout(normal(rng, shape, a.dtype), layout)
    u, v, w = moves(rng, (a, b, bias), pattern, layout)
    z = normal(rng, residual.shape, a.dtype) if data.draw(st.booleans()) else None
    with unwritten(grad, a, b, bias, u, v, w, z):
        result = nf.matmul_bias_residual_double_bwd(
            u, v, w, z, grad, a, b, bias, residual, backend=backend
        )
        tangent = nf.matmul_bias_residual_jvp(a, b, bias, residual, u, v, w, z, backend=backend)
    wanted = tolerance.double_backward(
        u, v, w, z, grad, a, b, bias, "none", a.dtype, backend=backend
    )
    zero = np.zeros(residual.shape)
    check(result, {**wanted, "d_residual": (zero, zero)}, a.dtype)
    wanted = tolerance.tangent(u, v, w, z, a, b, bias, "none", a.dtype, residual, backend=backend)
    check(tangent, wanted, a.dtype)


@sampled(
    100,
    shape=st.one_of(
        st.tuples(sizes),
        st.tuples(sizes, sizes),
        st.tuples(st.integers(0, 3), sizes, st.sampled_from((1, 5, 17))),
        st.just(()),
    ),
    dtype=dtypes,
    activation=activations,
    pattern=st.tuples(st.booleans(), st.booleans()),
    orders=st.tuples(*(layouts,) * 5),
    seed=seeds,
)
def test_gated_is_exact_within_the_bound_to_second_order(
    backend, shape, dtype, activation, pattern, orders, seed
):
    dtype, rng = DTYPES[dtype], np.random.default_rng(seed)
    a, b, grad, u, v = (normal(rng, shape, dtype, 2) for _ in range(5))
    if shape:
        a, b, grad, u, v = (
            in_layout(x, o) for x, o in zip((a, b, grad, u, v), orders, strict=True)
        )
    u, v = (x if there else None for x, there in zip((u, v), pattern, strict=True))
    with unwritten(a, b, grad, u, v):
        result = nf.activation_mul_double_bwd(u, v, grad, a, b, activation, backend=backend)
        tangent = nf.activation_mul_jvp(a, b, u, v, activation, backend=backend)
    wide_a, wide_b, g = oracle.wide(a), oracle.wide(b), oracle.wide(grad)
    zero = np.zeros_like(wide_a)
    wide_u, wide_v = (zero if x is None else oracle.wide(x) for x in (u, v))
    unit = tolerance.roundoff(tolerance.accumulator(dtype))
    value, slope, second = (
        (f(wide_a), tolerance.evaluated(f, wide_a, zero, dtype, backend))
        for f in (f[activation] for f in (oracle.VALUE, oracle.SLOPE, oracle.SECOND))
    )

    def bound(*terms):
        """A sum of products of exact factors with a value that errs."""
        exact = sum(factor * f for factor, (f, _) in terms)
        error = sum(np.abs(factor) * (e + 4 * unit * np.abs(f)) for factor, (f, e) in terms)
        lost = sum(1 + np.abs(factor) for factor, _ in terms) * float(
            np.finfo(tolerance.accumulator(dtype)).smallest_normal
        )
        return exact, tolerance.stored(exact, error + lost, dtype, backend)

    check(
        result,
        {
            "d_grad": bound((wide_u * wide_b, slope), (wide_v, value)),
            "d_a": bound((wide_u * g * wide_b, second), (wide_v * g, slope)),
            "d_b": bound((wide_u * g, slope)),
        },
        dtype,
    )
    check(
        tangent,
        {
            "out": bound((wide_b, value)),
            "out_dot": bound((wide_u * wide_b, slope), (wide_v, value)),
        },
        dtype,
    )
    plain = nf.activation_mul(a, b, activation, backend=backend)
    assert (bits(tangent.out) == bits(plain)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_in_every_dtype_to_second_order(backend, activation, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(31)
    a, b = normal(rng, (33, 29), dtype, 29**-0.5), normal(rng, (29, 17), dtype)
    bias, grad = normal(rng, (17,), dtype), normal(rng, (33, 17), dtype)
    u, v, w = moves(rng, (a, b, bias), (True, True, True))
    result = nf.matmul_bias_activation_double_bwd(
        u, v, w, grad, a, b, bias, activation, backend=backend
    )
    rounded = activation != "none" and rounds_grad_pre(backend, dtype)
    wanted = tolerance.double_backward(
        u, v, w, None, grad, a, b, bias, activation, dtype, rounded_grad_pre=rounded,
        backend=backend,
    )  # fmt: skip
    check(result, wanted, dtype)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_double_backward_is_the_derivative_of_backward(backend, activation):
    rng = np.random.default_rng(32)
    at = [rng.standard_normal(s) for s in ((5, 4), (5, 3), (3, 4), (4,))]  # grad, a, b, bias
    u, v, w = (rng.standard_normal(x.shape) for x in at[1:])
    directions = [rng.standard_normal(x.shape) for x in at]

    def loss(step):
        here = [x + step * d for x, d in zip(at, directions, strict=True)]
        result = nf.matmul_bias_activation_bwd(*here, activation, backend=backend)
        return sum(np.sum(x * y) for x, y in zip((u, v, w), result, strict=True))

    h = 1e-3
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    result = nf.matmul_bias_activation_double_bwd(u, v, w, *at, activation, backend=backend)
    expected = sum(np.sum(g * d) for g, d in zip(result, directions, strict=True))
    assert slope == pytest.approx(expected, rel=1e-8, abs=1e-7)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_mode_is_the_transpose_of_backward(backend, activation):
    rng = np.random.default_rng(33)
    a, b, bias = rng.standard_normal((5, 3)), rng.standard_normal((3, 4)), rng.standard_normal(4)
    grad = rng.standard_normal((5, 4))
    tangents = [rng.standard_normal(x.shape) for x in (a, b, bias)]
    dot = nf.matmul_bias_activation_jvp(a, b, bias, *tangents, activation, backend=backend).out_dot
    gradients = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
    expected = sum(np.sum(g * t) for g, t in zip(gradients, tangents, strict=True))
    assert np.sum(grad * dot) == pytest.approx(expected, rel=1e-12)
    x, y, x_dot, y_dot, g = rng.standard_normal((5, 40))
    dot = nf.activation_mul_jvp(x, y, x_dot, y_dot, activation, backend=backend).out_dot
    d_x, d_y = nf.activation_mul_bwd(g, x, y, activation, backend=backend)
    np.testing.assert_allclose(g * dot, d_x * x_dot + d_y * y_dot, rtol=1e-11, atol=1e-13)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_double_backward_is_the_derivative_of_gated_backward(backend, activation):
    rng = np.random.default_rng(34)
    grad, a, b, u, v = rng.standard_normal((5, 40))
    h = 1e-3

    def slope(g_step, a_step, b_step):
        def at(step):
            result = nf.activation_mul_bwd(
                grad + step * g_step, a + step * a_step, b + step * b_step, activation,
                backend=backend,
            )  # fmt: skip
            return u * result.d_a + v * result.d_b

        return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)

    result = nf.activation_mul_double_bwd(u, v, grad, a, b, activation, backend=backend)
    for value, step in zip(result, np.eye(3), strict=True):
        np.testing.assert_allclose(value, slope(*step), rtol=1e-7, atol=1e-8)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_double_backward_agrees_with_torch(backend, activation):
    import torch

    functions = {
        "none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu_erf": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
        "softplus": lambda x: torch.nn.functional.softplus(x, threshold=1e3),
    }  # fmt: skip
    rng = np.random.default_rng(35)
    given = [rng.standard_normal(s) for s in ((6, 5), (6, 3), (3, 5), (5,))]
    cotangents = [rng.standard_normal(x.shape) for x in given[1:]]
    grad, a, b, bias = (torch.tensor(x, requires_grad=True) for x in given)
    out = functions[activation](a @ b + bias)
    first = torch.autograd.grad(out, (a, b, bias), grad, create_graph=True)
    wanted = torch.autograd.grad(
        first, (grad, a, b, bias), [torch.tensor(x) for x in cotangents],
        materialize_grads=True,
    )  # fmt: skip
    result = nf.matmul_bias_activation_double_bwd(*cotangents, *given, activation, backend=backend)
    for value, other in zip(result, wanted, strict=True):
        np.testing.assert_allclose(value, other.numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", CURVED)
def test_double_backward_agrees_with_arbitrary_precision(backend, activation):
    mpmath = pytest.importorskip("mpmath")
    mp = mpmath.mp.clone()
    mp.dps = 40
    root = mp.sqrt(2 / mp.pi)
    functions = {
        "gelu": lambda x: x / 2 * (1 + mp.tanh(root * (x + mp.mpf("0.044715") * x**3))),
        "silu": lambda x: x / (1 + mp.exp(-x)), "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
        "tanh": mp.tanh, "gelu_erf": lambda x: x / 2 * mp.erfc(-x / mp.sqrt(2)),
        "softplus": lambda x: mp.log(1 + mp.exp(x)),
    }  # fmt: skip
    for x in (-9.5, -3.25, -0.75, 0.0, 0.5, 2.5, 8.0):
        # one element: d_grad = f' (u b + a v), d_a = grad f'' (u b + a v) b + grad f' v
        grad, a, b, u, v = 0.75, x, 1.0, 1.5, 0.25
        shaped = [np.full((1, 1), value) for value in (u, v, grad, a, b)]
        result = nf.matmul_bias_activation_double_bwd(
            *shaped[:2], None, *shaped[2:], None, activation, backend=backend
        )
        slope, second, third = (mp.diff(functions[activation], mp.mpf(x), n) for n in (1, 2, 3))
        t = u * b + a * v
        # A formula is exact at a point that is a few units off: near a zero that is what counts.
        wide_slope, wide_second = (
            abs(f) + abs(x * change) for f, change in ((slope, second), (second, third))
        )
        for value, exact, size in (
            (result.d_grad, slope * t, wide_slope * abs(t)),
            (result.d_a, grad * (second * t * b + slope * v),
             grad * (wide_second * abs(t * b) + wide_slope * v)),
            (result.d_b, grad * (second * t * a + slope * u),
             grad * (wide_second * abs(t * a) + wide_slope * u)),
        ):  # fmt: skip
            off = abs(mp.mpf(float(value[0, 0])) - exact)
            units = 2 * tolerance.EVALUATION * tolerance.roundoff(np.dtype(np.float64))
            assert off <= units * size


# --- bit for bit --------------------------------------------------------------------------------


@sampled(60, case=gemms, activation=activations, pattern=patterns, data=st.data())
def test_a_part_of_the_second_gradients_is_the_same_as_in_all_of_them(
    backend, case, activation, pattern, data
):
    a, b, bias, shape, rng = case
    grad = normal(rng, shape, a.dtype)
    cotangents = moves(rng, (a, b, bias), pattern)
    names = ("grad", "a", "b", "bias")
    needs = tuple(name for name in names if data.draw(st.booleans()))
    full, part = (
        nf.matmul_bias_activation_double_bwd(
            *cotangents, grad, a, b, bias, activation, needs=wanted, backend=backend
        )
        for wanted in (names, needs)
    )
    for name, left, right in zip(names, full, part, strict=True):
        if name not in needs or left is None:
            assert right is None
        else:
            assert (bits(left) == bits(right)).all()


@sampled(40, case=gemms, activation=activations, data=st.data())
def test_a_view_gives_what_its_copy_gives_to_second_order(backend, case, activation, data):
    a, b, bias, shape, rng = case
    grad = normal(rng, shape, a.dtype)
    copies = [np.array(x, order="C") for x in (*moves(rng, (a, b), (True, True)), grad, a, b)]
    kept = layouts.filter(lambda o: o != "zero_stride")
    views = [in_layout(x, data.draw(kept)) for x in copies]
    by_axes = "axes" in traits(backend).order and a.ndim > 2
    needs = ("grad", "a") if by_axes else ("grad", "a", "b", "bias")
    results, tiers = [], []
    for u, v, g, x, y in (copies, views):
        second = nf.matmul_bias_activation_double_bwd(
            u, v, None, g, x, y, bias, activation, needs=needs, backend=backend
        )
        first = tier(backend)
        moved = nf.matmul_bias_activation_jvp(x, y, bias, u, v, None, activation, backend=backend)
        results.append((*second, *moved))
        tiers.append((first, tier(backend)))
    if tiers[0] != tiers[1]:
        return  # strides decide on the tier, and that on the order within a product
    for left, right in zip(*results, strict=True):
        assert left is right is None or (bits(left) == bits(right)).all()


@pytest.mark.parametrize("operation", ["none", "gelu", "residual"])
@pytest.mark.parametrize(
    "batch, m", [((3,), 17), ((2, 3), 7), ((2, 1, 2), 7 if SIMULATED else 260)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_views_over_one_b_is_summed_as_its_copy_to_second_order(
    backend, dtype, batch, m, operation
):
    dtype, rng = DTYPES[dtype], np.random.default_rng(37)
    k, n = 13, 9
    a, b, bias = (normal(rng, s, dtype, 0.3) for s in ((*batch, m, k), (k, n), (n,)))
    u, v, w = (normal(rng, x.shape, dtype) for x in (a, b, bias))
    grad = normal(rng, (*batch, m, n), dtype)
    residual, z = (normal(rng, (*batch, 1, n), dtype) for _ in range(2))

    def second(u, grad, a, z):
        if operation == "residual":
            return nf.matmul_bias_residual_double_bwd(
                u, v, w, z, grad, a, b, bias, residual, backend=backend
            )
        return nf.matmul_bias_activation_double_bwd(
            u, v, w, grad, a, b, bias, operation, backend=backend
        )

    every = (u, grad, a, z)
    wanted, first = second(*every), tier(backend)
    for layout in ("sliced", "transposed", "reversed"):
        for chosen in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
            given = [in_layout(x, layout) if i in chosen else x for i, x in enumerate(every)]
            got = second(*given)
            if first != tier(backend):
                continue
            for name, one, two in zip(wanted._fields, got, wanted, strict=True):
                if "axes" in traits(backend).order and name in ("d_b", "d_bias"):
                    continue  # they are summed over the members
                assert (bits(one) == bits(two)).all(), (name, layout, chosen)


@pytest.mark.parametrize("needs", [("grad",), ("a",), ("b",), ("a", "b"), ()])
@pytest.mark.parametrize("pattern", [(True, True), (True, False), (False, True)])
def test_a_part_of_the_second_gated_gradients_is_the_same(backend, needs, pattern, unrecorded):  # noqa: F811
    a, b, grad, *moved = np.random.default_rng(36).standard_normal((5, 50)).astype(np.float32)
    moved = [x if there else None for x, there in zip(moved, pattern, strict=True)]
    full = nf.activation_mul_double_bwd(*moved, grad, a, b, "silu", backend=backend)
    part = nf.activation_mul_double_bwd(*moved, grad, a, b, "silu", needs=needs, backend=backend)
    for name, left, right in zip(("grad", "a", "b"), full, part, strict=True):
        assert (bits(left) == bits(right)).all() if name in needs else right is None


# --- shapes -------------------------------------------------------------------------------------


@pytest.mark.dtype("float64")
@pytest.mark.parametrize(
    "a_shape,b_shape",
    [((5,), (5, 4)), ((3, 5), (5,)), ((5,), (5,)), ((5,), (2, 5, 4)), ((2, 3, 5), (5,))],
)
def test_one_dimensional_operands_are_those_of_two_axes(backend, a_shape, b_shape):
    rng = np.random.default_rng(37)
    a, b = rng.standard_normal(a_shape), rng.standard_normal(b_shape)
    bias = rng.standard_normal(b_shape[-1] if len(b_shape) > 1 else 1)
    grad = np.asarray(rng.standard_normal(np.matmul(a, b).shape))
    u, v, w = moves(rng, (a, b, bias), (True, True, True))
    row, column = len(a_shape) == 1, len(b_shape) == 1

    def full(x, like_a):
        if like_a:
            return x[None] if row else x
        return x[:, None] if column else x

    full_grad = grad[..., None] if column else grad
    full_grad = full_grad[..., None, :] if row else full_grad
    got = nf.matmul_bias_activation_double_bwd(u, v, w, grad, a, b, bias, "tanh", backend=backend)
    wanted = nf.matmul_bias_activation_double_bwd(
        full(u, True), full(v, False), w, full_grad, full(a, True), full(b, False), bias, "tanh",
        backend=backend,
    )  # fmt: skip
    for x, y, like in zip(got, wanted, (grad, a, b, bias), strict=True):
        assert x.shape == like.shape
        assert (x == y.reshape(like.shape)).all()
    got = nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, "tanh", backend=backend)
    wanted = nf.matmul_bias_activation_jvp(
        full(a, True), full(b, False), bias, full(u, True), full(v, False), w, "tanh",
        backend=backend,
    )  # fmt: skip
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == grad.shape and (x == y.reshape(grad.shape)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "tanh"])
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (0, 4, 0), (3, 0, 0)], ids=str
)
def test_axes_may_have_length_zero_to_second_order(backend, shape, activation, dtype, unrecorded):  # noqa: F811
    (m, n, k), dtype = shape, DTYPES[dtype]
    a, b, bias = np.ones((m, k), dtype), np.ones((k, n), dtype), np.full(n, 2, dtype)
    grad = np.ones((m, n), dtype)
    u, v, w = np.ones_like(a), np.ones_like(b), np.ones_like(bias)
    result = nf.matmul_bias_activation_double_bwd(
        u, v, w, grad, a, b, bias, activation, backend=backend
    )
    wanted = tolerance.double_backward(
        u, v, w, None, grad, a, b, bias, activation, dtype,
        rounded_grad_pre=rounds_grad_pre(backend, dtype), backend=backend,
    )  # fmt: skip
    check(result, wanted, dtype)
    tangent = nf.matmul_bias_activation_jvp(a, b, bias, u, v, w, activation, backend=backend)
    wanted = tolerance.tangent(u, v, w, None, a, b, bias, activation, dtype, backend=backend)
    check(tangent, wanted, dtype)


def test_without_cotangents_everything_is_zero(backend, unrecorded):  # noqa: F811
    a, b, grad = (
        np.ones((3, 4), np.float32),
        np.ones((4, 5), np.float32),
        np.ones((3, 5), np.float32),
    )
    for activation in ("none", "relu", "gelu"):
        result = nf.matmul_bias_activation_double_bwd(
            None, None, None, grad, a, b, grad[0], activation, backend=backend
        )
        assert [x.shape for x in result] == [(3, 5), (3, 4), (4, 5), (5,)]
        assert all((x == 0).all() for x in result)
        result = nf.activation_mul_double_bwd(
            None, None, grad, grad, grad, activation, backend=backend
        )
        assert all((x == 0).all() for x in result)
        _, dot = nf.matmul_bias_activation_jvp(
            a, b, None, None, None, None, activation, backend=backend
        )
        assert dot.shape == (3, 5) and (dot == 0).all()


# --- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_zeroes_both_derivatives(backend, activation, guard, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(38)
    m, n, k, row = 19, 35, 17, 5
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    grad, w = normal(rng, (m, n), dtype), normal(rng, (n,), dtype)
    bias = normal(rng, (n,), dtype)
    clean = a.copy()
    a[row] = np.nan
    u = normal(rng, (m, k), dtype)
    result = nf.matmul_bias_activation_double_bwd(
        u, None, w, grad, a, b, bias, activation, guard=guard, needs=("grad", "a", "bias"),
        backend=backend,
    )  # fmt: skip
    plain = nf.matmul_bias_activation_double_bwd(
        u, None, w, grad, clean, b, bias, activation, needs=("grad", "a", "bias"), backend=backend
    )
    rest = np.arange(m) != row
    for name in ("d_grad", "d_a"):
        left, right = getattr(result, name), getattr(plain, name)
        assert (bits(left[rest]) == bits(right[rest])).all()
    tangent = nf.matmul_bias_activation_jvp(
        a, b, bias, u, None, w, activation, guard=guard, backend=backend
    )
    if activation in ("none", "relu"):  # constant slopes, also at NaN
        assert np.isfinite(result.d_grad).all() and np.isfinite(tangent.out_dot).all()
        assert (result.d_a == 0).all() and (result.d_bias == 0).all()
    elif guard:
        assert (result.d_grad[row] == 0).all() and (tangent.out_dot[row] == 0).all()
        assert (result.d_a[row] == 0).all() and np.isfinite(result.d_bias).all()
    else:
        assert np.isnan(result.d_grad[row]).all() and np.isnan(tangent.out_dot[row]).all()
        assert np.isnan(result.d_a[row]).all() and np.isnan(result.d_bias).all()


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", CURVED)
def test_infinity_gives_the_limit_of_the_second_derivative(backend, activation, dtype):
    dtype = DTYPES[dtype]
    huge = float(np.finfo(np.float32).max) / 2 if dtype != np.float16 else 6e4
    x = np.array([-np.inf, -huge, huge, np.inf] * 9, dtype)
    one = np.ones_like(x)
    result = nf.activation_mul_double_bwd(
        one, None, one, x, one, activation, guard=False, needs=("a",), backend=backend
    )
    assert (result.d_a == 0).all()
    a, b = x[:, None], np.ones((1, 1), dtype)
    result = nf.matmul_bias_activation_double_bwd(
        None, None, np.ones(1, dtype), np.ones_like(a), a, b, np.zeros(1, dtype), activation,
        guard=False, needs=("a", "bias"), backend=backend,
    )  # fmt: skip
    assert (result.d_a == 0).all() and (result.d_bias == 0).all()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"u": np.ones((2, 4))}, ValueError, r"u must have the shape of a \(2, 3\), got \(2, 4\)"),
        ({"v": np.ones(4)}, ValueError, r"v must have the shape of b \(3, 4\), got \(4,\)"),
        ({"bias": None}, ValueError, "w must be None where bias is None, got an array"),
        ({"w": np.ones(4, np.float32)}, TypeError, "w float32"),
        ({"u": [[1.0]]}, TypeError, "u must be .*, got list"),
        ({"needs": ("c",)}, ValueError, "needs must hold names out of"),
        ({"grad": np.ones((2, 3))}, ValueError, r"grad must have the result's shape \(2, 4\)"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(backend, change, error, message, unrecorded):  # noqa: F811
    given = {
        "u": np.ones((2, 3)), "v": np.ones((3, 4)), "w": np.ones(4), "grad": np.ones((2, 4)),
        "a": np.ones((2, 3)), "b": np.ones((3, 4)), "bias": np.ones(4), **change,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        nf.matmul_bias_activation_double_bwd(**given, backend=backend)
    if "grad" in change or "needs" in change:
        return
    tangents = {
        {"u": "a_dot", "v": "b_dot", "w": "bias_dot"}.get(name, name): x
        for name, x in given.items()
        if name not in ("grad", "needs")
    }
    names = {"u": "a_dot", "v": "b_dot", "w": "bias_dot"}
    for short, long in names.items():
        if message.startswith(short):
            message = long + message[1:]
    with pytest.raises(error, match=message):
        nf.matmul_bias_activation_jvp(**tangents, backend=backend)
