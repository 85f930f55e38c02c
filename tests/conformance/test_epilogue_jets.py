"""Jets of a user's own formula of a product: what every backend that has them fulfils.

Values and gradients are held to running errors of the derived formulas; that these are the right
ones, textbook derivatives, the complex step and mpmath say.
"""

from __future__ import annotations

import functools
from typing import Any

import mpmath
import numpy as np
import pytest
import tolerance
from arrays import bits, in_layout, normal, unwritten
from conftest import traits
from hypothesis import strategies as st
from test_conformance import (
    BATCHES,
    arrays,  # noqa: F401  (a fixture that every test here uses)
    compiling_share,
    dtypes,
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    seeds,
    unrecorded,  # noqa: F401  (a fixture)
)
from test_conformance import sampled as usually_sampled
from test_fusion import (
    NUMBERS,
    check_array,
    check_operands,
    gradient_of_factors,
    leaky,
    log_and_sqrt,
    masked_tanh,
    operand,
    own_activation,
    plain_sum,
    run_of,
    stored,
    ten_operations,
    whole,
    widened,
)
from test_jets import added, ahead, scaled
from tolerance import DTYPES, Running

import numfuse as nf
from numfuse import definitions
from numfuse import expr as ex
from numfuse.epilogues import epilogue_jet, epilogue_jet_backward

pytestmark = [pytest.mark.kind("jet"), pytest.mark.compiles]

SIZES = st.sampled_from((0, 1, 2, 7, 13, 15, 31, 33))


sampled = functools.partial(usually_sampled, share=compiling_share)


def curved(z, w, s):
    return nf.activations()["silu"](z * w) + s * z * z


def without_sum(z, x):
    return x * x


def square(z):
    return z * z


#: Each formula, and how many operands it has.
FORMULAS = {
    masked_tanh: 3, curved: 2, leaky: 1, log_and_sqrt: 1, ten_operations: 2, own_activation: 2,
    plain_sum: 1, without_sum: 1, square: 0,
}  # fmt: skip


@st.composite
def calls(draw, backend):
    """(formula, operands, the others by name, weights, the result's shape, a random generator)."""
    formula = draw(st.sampled_from(list(FORMULAS)))
    dtype = DTYPES[draw(dtypes(backend))]
    rng = np.random.default_rng(draw(seeds))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = draw(st.sampled_from(BATCHES))
    if int(np.prod(batch)) > 1:
        m, n = min(m, 15), min(n, 15)
    d = draw(st.sampled_from((0, 1, 2, 3, 5, 9)))
    kind = draw(st.sampled_from(("identity", "sum", "some", "none")))
    weights, s = None, d
    if kind != "identity":
        s = {"sum": 1, "none": 0}.get(kind, draw(st.sampled_from((1, 2, 6))))
        weights = np.where(rng.random((s, d)) < 0.6, rng.standard_normal((s, d)), 0.0)
        weights = weights.astype(tolerance.accumulator(dtype))

    def part():
        return draw(st.sampled_from((batch, ())))

    a_batch, b_batch, scale = part(), part(), max(1, k) ** -0.5

    def array(*shape):
        return in_layout(normal(rng, shape, dtype, scale), draw(layouts))

    given = {
        "a": array(*a_batch, m, k),
        "b": array(*b_batch, k, n),
        "bias": None,
        "a_dot": array(d, *a_batch, m, k),
        "a_ddot": array(s, *a_batch, m, k) if draw(st.booleans()) else None,
    }
    shape = (*np.broadcast_shapes(a_batch, b_batch), m, n)
    operands = tuple(operand(draw, rng, shape, dtype) for _ in range(FORMULAS[formula]))
    return formula, operands, given, weights, shape, rng


def parts_of(call, backend, backward):
    """What the parts of a derived formula make, by the names of further inputs."""
    formula, operands, given, *_ = call
    made = definitions.get(formula).over(1)
    jet = (epilogue_jet_backward if backward else epilogue_jet)(made)
    dtype = given["a"].dtype
    fixed = dict(zip(made.operands, widened(operands, dtype), strict=True))

    def run(part, **leaves):
        leaves = {name: x for name, x in (leaves | fixed).items() if name in part.inputs}
        found = run_of(part, leaves, dtype, backend) if part.results else {}
        return {name: whole(x, call[4]) for name, x in found.items()}

    return jet, run


def exact_forward(call, backend):
    """(value, directions, second derivatives), each with its error."""
    _, _, given, weights, shape, _ = call
    z, dots, ddots, table, u = ahead(given, weights, None, backend)
    jet, run = parts_of(call, backend, False)
    zero = Running.of(np.zeros(shape))
    moved = [run(jet.direction, z=z, z_dot=x) for x in dots]
    out_ddot = []
    for row, x in zip(table, ddots, strict=True):
        terms = [scaled(w, y.get("bent", zero), u) for w, y in zip(row, moved, strict=True) if w]
        if x is not None:
            terms.append(run(jet.second, z=z, z_ddot=x).get("straight", zero))
        out_ddot.append(added(terms, shape, u))
    value = run(jet.value, z=z)["out"]
    return value, [y.get("out_dot", zero) for y in moved], out_ddot


def exact_backward(grads, call, backend):
    """The gradients by the sums and by operands, element by element, each with its error."""
    formula, _, given, weights, shape, _ = call
    z, dots, ddots, table, u = ahead(given, weights, None, backend)
    jet, run = parts_of(call, backend, True)
    zero = Running.of(np.zeros(shape))

    def members(x, count):
        return [zero] * count if x is None else [Running.of(y) for y in x]

    g = zero if grads[0] is None else Running.of(grads[0])
    g_dot, g_ddot = members(grads[1], len(dots)), members(grads[2], len(table))
    parts = [run(jet.value, z=z, grad=g)]
    q_dot, q_ddot = [], []
    for i, (x, y) in enumerate(zip(dots, g_dot, strict=True)):
        bent = [scaled(row[i], r, u) for row, r in zip(table, g_ddot, strict=True) if row[i]]
        bent = added(bent, shape, u)
        parts.append(run(jet.direction, z=z, z_dot=x, grad_dot=y, grad_bent=bent))
        q_dot.append(parts[-1].get("d_z_dot", zero))
    for x, y in zip(ddots, g_ddot, strict=True):
        if x is not None:
            parts.append(run(jet.second, z=z, z_ddot=x, grad_ddot=y))
            q_ddot.append(parts[-1].get("d_z_ddot", zero))
    names = ["d_z", *(f"d_x_{i}" for i in range(FORMULAS[formula]))]
    totals = [added([y[name] for y in parts if name in y], shape, 2 * u) for name in names]
    return totals[0], totals[1:], q_dot, q_ddot


def forward(call, backend, **how):
    formula, operands, given, weights, *_ = call
    x = given["a"], given["b"], formula, operands, given["a_dot"], given["a_ddot"]
    return nf.matmul_epilogue_jet(*x, weights=weights, backend=backend, **how)


def backward(grads, call, backend, **how):
    formula, operands, given, weights, *_ = call
    x = given["a"], given["b"], formula, operands, given["a_dot"], given["a_ddot"]
    how |= {"weights": weights, "backend": backend}
    return nf.matmul_epilogue_jet_bwd(*grads, *x, **how)


def there(call):
    return [x for x in (*call[2].values(), *call[1]) if isinstance(x, np.ndarray)]


@sampled(90, call=calls)
def test_a_jet_of_a_formula_is_exact_within_the_bound(backend, call):
    dtype = call[2]["a"].dtype
    with unwritten(*there(call)):
        got = forward(call, backend)
    value, dots, ddots = exact_forward(call, backend)
    check_array("out", got.out, stored(value, dtype, backend), dtype)
    assert got.out_dot.shape == (len(dots), *got.out.shape)
    assert got.out_ddot.shape == (len(ddots), *got.out.shape)
    for name, found, wanted in (("dot", got.out_dot, dots), ("ddot", got.out_ddot, ddots)):
        for x, y in zip(found, wanted, strict=True):
            check_array(f"out_{name}", x, stored(y, dtype, backend), dtype)
    again, kept = forward(call, backend, keep=True)
    for x, y in zip(got, again, strict=True):
        assert (bits(x) == bits(y)).all()
    assert len(kept) == 3


@sampled(90, call=calls, data=st.data())
def test_gradients_of_a_formulas_jet_are_exact_within_the_bound(backend, call, data):
    _, operands, given, _, _, rng = call
    dtype = given["a"].dtype
    results, kept = forward(call, backend, keep=True)
    grads = [
        in_layout(normal(rng, x.shape, dtype), data.draw(layouts))
        if data.draw(st.sampled_from((True, True, False)))
        else None
        for x in results
    ]
    with unwritten(*there(call), *(g for g in grads if g is not None)):
        got = backward(grads, call, backend)
        needs = some_of(call, data)
        saved = backward(grads, call, backend, kept=kept, needs=needs)
    q, slopes, q_dot, q_ddot = exact_backward(grads, call, backend)
    b = given["b"]
    lefts = [(given["a"], got.d_a, saved.d_a, q)]
    for name, of_sums in (("a_dot", q_dot), ("a_ddot", q_ddot)):
        if given[name] is not None:
            of = [getattr(x, f"d_{name}") for x in (got, saved)]
            assert (of[1] is None) == (name not in needs)
            of[1] = [None] * len(of[0]) if of[1] is None else of[1]
            lefts += list(zip(given[name], *of, of_sums, strict=True))
        else:
            assert getattr(got, f"d_{name}") is None
    for x, found, again, slope in lefts:
        wanted, _ = gradient_of_factors([(x, (b,), (slope,))], dtype, backend)
        for y in (found, again):
            if y is None:
                continue
            check_array("d_a", np.ascontiguousarray(y), wanted, dtype)
    _, (d_b,) = gradient_of_factors([(x, (b,), (s,)) for x, *_, s in lefts], dtype, backend)
    for y, wanted in ((got, ("b", *range(len(operands)))), (saved, needs)):
        assert type(y.d_operands) is tuple
        check_operands(y.d_operands, operands, slopes, dtype, backend, wanted)
        if "b" in wanted:
            check_array("d_b", y.d_b, d_b, dtype)
        else:
            assert y.d_b is None


def some_of(call, data):
    """Operands whose gradients are wanted."""
    names = ("a", "b", *range(len(call[1])), "a_dot", "a_ddot")
    return tuple(name for name in names if data.draw(st.booleans()))


@sampled(40, call=calls, data=st.data())
def test_what_is_not_needed_is_none_and_changes_nothing(backend, call, data):
    _, operands, given, _, _, rng = call
    grads = [normal(rng, x.shape, x.dtype) for x in forward(call, backend)]
    names = ("a", "b", *range(len(operands)), "a_dot", "a_ddot")
    needs = some_of(call, data)
    found = backward(grads, call, backend)
    some = backward(grads, call, backend, needs=needs)

    def new(x):
        return tuple(map(new, x)) if isinstance(x, tuple) else None if x is None else x.copy()

    out = new(tuple(found))
    into = backward(grads, call, backend, out=out)

    def flat(x):
        return [*x[:2], *x[2], *x[3:]]

    for name, *four in zip(names, *map(flat, (found, some, into, out)), strict=True):
        x, y, z, w = four
        assert z is w
        if x is not None:
            assert (bits(x) == bits(z)).all()
        if name not in needs or given.get(name, x) is None:
            assert y is None
        elif not traits(backend).reassociates:  # (the bounds hold there)
            assert (bits(x) == bits(y)).all()


def textbook(z, zd, zdd, w, bias, scale):
    """The jet of tanh(z + bias) scale + z^2 scale, complex steps included."""
    t = np.tanh(z + bias)
    slope, bend = (1 - t * t) * scale + 2 * z * scale, (2 - 2 * t * (1 - t * t)) * scale
    return t * scale + z * z * scale, slope * zd, slope * zdd + bend * np.tensordot(w, zd**2, 1)


def both(z, bias, scale):
    return ex.tanh(z + bias) * scale + z * z * scale


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("count", [2, 6])
def test_the_backward_is_the_derivative_of_the_textbook_forward(backend, count):
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((9, 5)), rng.standard_normal((5, 6))
    a_dot, a_ddot = rng.standard_normal((3, 9, 5)), rng.standard_normal((count, 9, 5))
    w = np.round(rng.standard_normal((count, 3)))
    operands = rng.standard_normal(6), rng.standard_normal((9, 1))

    def wanted(a, b, a_dot, a_ddot, *operands):
        return textbook(a @ b, a_dot @ b, a_ddot @ b, w, *operands)

    given = [a, b, a_dot, a_ddot, *operands]
    call = a, b, both, operands, a_dot, a_ddot
    got = nf.matmul_epilogue_jet(*call, weights=w, backend=backend)
    for x, y in zip(got, wanted(*given), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    grads = [rng.standard_normal(x.shape) for x in got]
    made = nf.matmul_epilogue_jet_bwd(*grads, *call, weights=w, backend=backend)
    found = made.d_a, made.d_b, made.d_a_dot, made.d_a_ddot, *made.d_operands
    for i, gradient in enumerate(found):
        for _ in range(3):
            v = rng.standard_normal(gradient.shape)
            moved = [x + 1e-30j * v if i == j else x for j, x in enumerate(given)]
            moved = wanted(*moved)
            slope = sum((g * x.imag).sum() for g, x in zip(grads, moved, strict=True)) / 1e-30
            assert abs((gradient * v).sum() - slope) < 1e-11 * np.abs(gradient * v).sum()


@pytest.mark.dtype("float64")
def test_a_formula_has_the_derivatives_that_mpmath_finds(backend):
    rng = np.random.default_rng(2)
    x, row, number = rng.standard_normal((2, 3)), rng.standard_normal(2), 0.75
    b, v = rng.standard_normal((3, 2)), rng.standard_normal((1, 3))
    along = np.broadcast_to(v[:, None, :], (1, 2, 3)).copy()
    call = x, b, ten_operations, (row, number), along
    got = nf.matmul_epilogue_jet(*call, backend=backend)

    def value(t, m, n, c=number):
        z = sum((mpmath.mpf(x[m, k]) + t * v[0, k]) * b[k, n] for k in range(3))
        y = z * row[n] + c
        half = mpmath.tanh(y) / (1 + mpmath.exp(c - y))
        return half + y / 4 - row[n] / (mpmath.mpf(c) ** 2 + 1)

    with mpmath.workdps(50):
        for m, n in np.ndindex(2, 2):
            for order, found in enumerate((got.out, got.out_dot[0], got.out_ddot[0])):
                exact = mpmath.diff(functools.partial(value, m=m, n=n), 0, order)
                assert abs(exact - found[m, n]) < 1e-13
        # the gradient of the sum of all second derivatives by the number
        grad = np.ones_like(got.out_ddot)
        made = nf.matmul_epilogue_jet_bwd(None, None, grad, *call, backend=backend)

        def loss(c):
            every = np.ndindex(2, 2)
            return sum(mpmath.diff(lambda t, at=at: value(t, *at, c), 0, 2) for at in every)

        assert abs(mpmath.diff(loss, mpmath.mpf(number)) - made.d_operands[1]) < 1e-12


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("way", ["relu", "where", "maximum"])
def test_the_second_derivative_of_a_kink_counts_as_zero(backend, way):
    kinks = {
        "relu": lambda z, s: nf.activations()["relu"](z) * s,
        "where": lambda z, s: ex.where(z > 0.0, z, 0.0) * s,
        "maximum": lambda z, s: ex.maximum(z, 0.0) * s,
    }
    x, along = np.array([[-1.0, 0.0, 2.0]]), np.ones((1, 1, 3))
    call = x, np.eye(3), kinks[way], (3.0,), along
    out = nf.matmul_epilogue_jet(*call, backend=backend)
    assert (out.out_ddot == 0).all()
    assert out.out_dot[0, 0, ::2].tolist() == [0.0, 3.0]
    made = nf.matmul_epilogue_jet_bwd(None, None, np.ones((1, 1, 3)), *call, backend=backend)
    assert (made.d_a == 0).all() and made.d_operands[0] == 0


@pytest.mark.dtype("float32")
@pytest.mark.parametrize("batch", [(), (3,)], ids=["rows", "batch"])
def test_an_activation_as_a_formula_has_the_jet_of_its_layer(backend, batch):
    """Guards: one meaning of a layer, whichever function it is asked of."""
    rng = np.random.default_rng(4)

    def array(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    a, b, bias = array(*batch, 21, 7), array(7, 9), array(9)
    dots = array(50, *batch, 21, 7), None
    weights = np.ones((1, 50))
    layer = a, b, bias, "tanh", *dots
    call = a, b, lambda z, bias: nf.activations()["tanh"](z + bias), (bias,), *dots
    how: dict[str, Any] = {"weights": weights, "backend": backend}
    wanted = nf.matmul_bias_activation_jet(*layer, **how)
    got = nf.matmul_epilogue_jet(*call, **how)
    grads = [array(*x.shape) for x in got]
    back = nf.matmul_bias_activation_jet_bwd(*grads, *layer, **how)
    made = nf.matmul_epilogue_jet_bwd(*grads, *call, **how)
    pairs = [*zip(got, wanted, strict=True), (made.d_a, back.d_a), (made.d_b, back.d_b)]
    pairs += [(made.d_operands[0], back.d_bias), (made.d_a_dot, back.d_a_dot)]
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * np.abs(y).max())


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_a_value_of_the_call(backend, number):
    rng = np.random.default_rng(4)
    a, b, dot = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (3, 4), (2, 5, 3)))
    got = nf.matmul_epilogue_jet(a, b, curved, (1.0, number), dot, backend=backend)
    array = np.asarray(number, np.float32)
    wanted = nf.matmul_epilogue_jet(a, b, curved, (1.0, array), dot, backend=backend)
    for x, y in zip(got, wanted, strict=True):
        assert (bits(x) == bits(y)).all()
