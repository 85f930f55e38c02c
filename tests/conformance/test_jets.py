"""Jets of layers and networks: what every backend that has them fulfils.

Values and gradients are held to running errors of the derived formulas; that these are the right
ones, textbook derivatives, the complex step and mpmath say.
"""

from __future__ import annotations

import itertools
from typing import Any

import mpmath
import numpy as np
import oracle
import pytest
import tolerance
import weekly
from arrays import bits, in_layout, normal, unwritten
from conftest import compiles_slowly, traits
from hypothesis import strategies as st
from test_conformance import (
    BATCHES,
    arrays,  # noqa: F401  (a fixture that every test here uses)
    dtypes,
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    sampled,
    seeds,
    unrecorded,  # noqa: F401  (a fixture)
    usual_share,
)
from test_fusion import check_array, gradient_of_factors, run_of, stored, sums_of
from tolerance import DTYPES, Running

import numfuse as nf
from numfuse.epilogues import layer_jet, layer_jet_backward

pytestmark = [pytest.mark.kind("jet")]


def share(backend):
    """Fewer examples where nearly each one has kernels of its own, 2 s each on a processor."""
    compiles = compiles_slowly(backend) or traits(backend).memory == "host"
    return 15 if compiles and not weekly.ALL else usual_share(backend)


SIZES = st.sampled_from((0, 1, 2, 7, 13, 14, 15, 31, 32, 33, 57, 65))
ACTIVATIONS = st.sampled_from(("tanh", "none", "relu", "silu", "sigmoid"))


@st.composite
def layers(draw, backend):
    """Operands of a layer's jet by name, weights, and a random generator."""
    dtype = DTYPES[draw(dtypes(backend))]
    rng = np.random.default_rng(draw(seeds))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = draw(st.sampled_from(BATCHES))
    if int(np.prod(batch)) > 1:
        m, n = min(m, 15), min(n, 33)
    d = draw(st.sampled_from((0, 1, 2, 3, 4, 5, 9)))
    kind = draw(st.sampled_from(("identity", "sum", "some", "none")))
    weights = None
    if kind != "identity":
        s = {"sum": 1, "none": 0}.get(kind, draw(st.sampled_from((1, 2, 6))))
        weights = np.where(rng.random((s, d)) < 0.6, rng.standard_normal((s, d)), 0.0)
        weights = weights.astype(tolerance.accumulator(dtype))
    s = d if weights is None else len(weights)

    def part():
        kind = draw(st.sampled_from(("all", "none")))
        return {"all": batch, "none": ()}[kind]

    a_batch, scale = part(), max(1, k) ** -0.5

    def array(*shape, scale=1.0):
        return in_layout(normal(rng, shape, dtype, scale), draw(layouts))

    given: dict[str, Any] = {
        "a": array(*a_batch, m, k, scale=scale),
        "b": array(*part(), k, n),
        "bias": array(n) if draw(st.booleans()) else None,
        "a_dot": array(d, *a_batch, m, k, scale=scale),
        "a_ddot": array(s, *a_batch, m, k, scale=scale) if draw(st.booleans()) else None,
    }
    return given, weights, draw(ACTIVATIONS), rng


def ahead(given, weights, f, backend):
    """The sums of a layer, its running results, and the weights as a matrix."""
    a, b, dtype = given["a"], given["b"], given["a"].dtype
    d = len(given["a_dot"])
    table = np.eye(d) if weights is None else weights
    z = sums_of(a, (b,), backend, (given["bias"],))[0]
    dots = [sums_of(x, (b,), backend)[0] for x in given["a_dot"]]
    ddots = [None] * len(table)
    if given["a_ddot"] is not None:
        ddots = [sums_of(x, (b,), backend)[0] for x in given["a_ddot"]]
    return z, dots, ddots, table, tolerance.roundoff(tolerance.accumulator(dtype))


def added(terms, shape, u):
    """A sum of numbers that have errors, in any order."""
    value = error = size = np.zeros(shape, oracle.LONG)
    for x in terms:
        value, error = value + x.value, error + x.error
        size = size + np.abs(x.value) + x.error
    return Running(value, error + (len(terms) + 1) * u * size)


def scaled(w, x, u):
    value = oracle.wide(w) * x.value
    return Running(value, np.abs(w) * x.error + u * (np.abs(value) + np.abs(w) * x.error))


def without_bias(jet, *absent):
    return jet.each(lambda part: part.without("bias", *absent))


def exact_forward(given, weights, f, backend):
    """(value, directions, second derivatives), each with its error."""
    *sums, table, _ = ahead(given, weights, f, backend)
    return results_of(sums, table, f, given["a"].dtype, backend)


def results_of(sums, table, f, dtype, backend):
    """A layer's results by its sums, (z, directions, second derivatives or None)."""
    z, dots, ddots = sums
    u = tolerance.roundoff(tolerance.accumulator(dtype))
    jet = without_bias(layer_jet(nf.activations()[f].curve))

    def run(part, **leaves):
        leaves = {name: x for name, x in leaves.items() if name in part.inputs}
        return run_of(part, leaves, dtype, backend)

    zero = Running.of(np.zeros_like(z.value))
    value = run(jet.value, z=z)["out"]
    moved = [run(jet.direction, z=z, z_dot=x) for x in dots]
    out_ddot = []
    for row, x in zip(table, ddots, strict=True):
        terms = [scaled(w, y.get("bent", zero), u) for w, y in zip(row, moved, strict=True) if w]
        if x is not None:
            terms.append(run(jet.second, z=z, z_ddot=x).get("straight", zero))
        out_ddot.append(added(terms, z.value.shape, u))
    return value, [y.get("out_dot", zero) for y in moved], out_ddot


def exact_backward(grads, given, weights, f, backend):
    """The gradients by the sums, each with its error."""
    *sums, table, _ = ahead(given, weights, f, backend)
    zero = Running.of(np.zeros(sums[0].value.shape))

    def members(x, count):
        return [zero] * count if x is None else [Running.of(y) for y in x]

    g = zero if grads[0] is None else Running.of(grads[0])
    given_grads = g, members(grads[1], len(sums[1])), members(grads[2], len(table))
    return slopes_of(given_grads, sums, table, f, given["a"].dtype, backend)


def slopes_of(grads, sums, table, f, dtype, backend):
    """The gradients by a layer's sums of cotangents that have errors; see `results_of`."""
    (g, g_dot, g_ddot), (z, dots, ddots) = grads, sums
    u = tolerance.roundoff(tolerance.accumulator(dtype))
    jet = without_bias(layer_jet_backward(nf.activations()[f].curve))
    shape = z.value.shape
    zero = Running.of(np.zeros(shape))

    def run(part, **leaves):
        leaves = {name: x for name, x in leaves.items() if name in part.inputs}
        return run_of(part, leaves, dtype, backend)

    terms = [run(jet.value, z=z, grad=g).get("d_z", zero)]
    q_dot, q_ddot = [], []
    for i, (x, y) in enumerate(zip(dots, g_dot, strict=True)):
        bent = [scaled(row[i], r, u) for row, r in zip(table, g_ddot, strict=True) if row[i]]
        found = run(jet.direction, z=z, z_dot=x, grad_dot=y, grad_bent=added(bent, shape, u))
        terms.append(found.get("d_z", zero))
        q_dot.append(found.get("d_z_dot", zero))
    for x, y in zip(ddots, g_ddot, strict=True):
        found = run(jet.second, z=z, z_ddot=zero if x is None else x, grad_ddot=y)
        if x is not None:
            terms.append(found.get("d_z", zero))
            q_ddot.append(found.get("d_z_ddot", zero))
    return added(terms, shape, 2 * u), q_dot, q_ddot


def forward(given, weights, f, backend, **how):
    x = given["a"], given["b"], given["bias"], f, given["a_dot"], given["a_ddot"]
    return nf.matmul_bias_activation_jet(*x, weights=weights, backend=backend, **how)


def backward(grads, given, weights, f, backend, **how):
    x = given["a"], given["b"], given["bias"], f, given["a_dot"], given["a_ddot"]
    how |= {"weights": weights, "backend": backend}
    return nf.matmul_bias_activation_jet_bwd(*grads, *x, **how)


def there(given):
    return [x for x in given.values() if x is not None]


# --- layers -------------------------------------------------------------------------------------
@pytest.mark.long
@sampled(90, share, call=layers)
def test_a_jet_is_exact_within_the_bound(backend, call):
    given, weights, f, _ = call
    dtype = given["a"].dtype
    with unwritten(*there(given)):
        got = forward(given, weights, f, backend)
    value, dots, ddots = exact_forward(given, weights, f, backend)
    check_array("out", got.out, stored(value, dtype, backend), dtype)
    assert got.out_dot.shape == (len(dots), *got.out.shape)
    assert got.out_ddot.shape == (len(ddots), *got.out.shape)
    for name, found, wanted in (("dot", got.out_dot, dots), ("ddot", got.out_ddot, ddots)):
        for x, y in zip(found, wanted, strict=True):
            check_array(f"out_{name}", x, stored(y, dtype, backend), dtype)
    again, kept = forward(given, weights, f, backend, keep=True)
    for x, y in zip(got, again, strict=True):
        assert (bits(x) == bits(y)).all()
    assert len(kept) == 3


@pytest.mark.long
@sampled(90, share, call=layers, data=st.data())
def test_gradients_of_a_jet_are_exact_within_the_bound(backend, call, data):
    given, weights, f, rng = call
    dtype = given["a"].dtype
    results, kept = forward(given, weights, f, backend, keep=True)
    grads = [
        in_layout(normal(rng, x.shape, dtype), data.draw(layouts))
        if data.draw(st.sampled_from((True, True, False)))
        else None
        for x in results
    ]
    with unwritten(*there(given), *(g for g in grads if g is not None)):
        got = backward(grads, given, weights, f, backend)
        saved = backward(grads, given, weights, f, backend, kept=kept)
    q, q_dot, q_ddot = exact_backward(grads, given, weights, f, backend)
    b = given["b"]
    lefts = [(given["a"], got.d_a, saved.d_a, q)]
    for name, slopes in (("a_dot", q_dot), ("a_ddot", q_ddot)):
        if given[name] is not None:
            of = [getattr(x, f"d_{name}") for x in (got, saved)]
            lefts += list(zip(given[name], *of, slopes, strict=True))
        else:
            assert getattr(got, f"d_{name}") is None
    for x, found, again, slope in lefts:
        wanted, _ = gradient_of_factors([(x, (b,), (slope,))], dtype, backend)
        for y in (found, again):
            check_array("d_a", np.ascontiguousarray(y), wanted, dtype)
    _, (d_b,) = gradient_of_factors([(x, (b,), (s,)) for x, *_, s in lefts], dtype, backend)
    for y in (got, saved):
        check_array("d_b", y.d_b, d_b, dtype)
        if given["bias"] is None:
            assert y.d_bias is None
        else:
            total = tolerance.summed(q, given["bias"].shape, dtype)
            check_array("d_bias", y.d_bias, stored(total, dtype, backend), dtype)


@sampled(40, call=layers, data=st.data())
def test_what_is_not_needed_is_none_and_changes_nothing(backend, call, data):
    given, weights, f, rng = call
    grads = [normal(rng, x.shape, x.dtype) for x in forward(given, weights, f, backend)]
    names = ("a", "b", "bias", "a_dot", "a_ddot")
    needs = tuple(name for name in names if data.draw(st.booleans()))
    whole = backward(grads, given, weights, f, backend)
    some = backward(grads, given, weights, f, backend, needs=needs)
    out = tuple(None if x is None else np.empty_like(x) for x in whole)
    into = backward(grads, given, weights, f, backend, out=out)
    for name, x, y, z, w in zip(names, whole, some, into, out, strict=True):
        assert z is w
        if x is not None:
            assert (bits(x) == bits(z)).all()
        if name not in needs or given[name] is None:
            assert y is None
        else:
            assert (bits(x) == bits(y)).all()


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_the_backward_is_the_derivative_of_the_textbook_forward(backend, activation):
    rng = np.random.default_rng(7)
    a, b, bias = (rng.standard_normal(s) for s in ((9, 5), (5, 6), (6,)))
    a_dot, a_ddot = rng.standard_normal((3, 9, 5)), rng.standard_normal((2, 9, 5))
    w = np.array([[1.0, 0.0, 0.5], [0.0, -2.0, 1.0]])

    def textbook(a, b, bias, a_dot, a_ddot):
        z = a @ b + bias
        if activation == "tanh":
            y = np.tanh(z)
            slope, bend = 1 - y * y, -2 * y * (1 - y * y)
        else:
            y = 1 / (1 + np.exp(-z))
            slope, bend = y * (1 - y), y * (1 - y) * (1 - 2 * y)
        dots = a_dot @ b
        return y, slope * dots, slope * (a_ddot @ b) + bend * np.tensordot(w, dots**2, 1)

    given = {"a": a, "b": b, "bias": bias, "a_dot": a_dot, "a_ddot": a_ddot}
    for x, y in zip(forward(given, w, activation, backend), textbook(*given.values()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)
    grads = [rng.standard_normal(x.shape) for x in textbook(*given.values())]
    got = backward(grads, given, w, activation, backend)
    for name, gradient in zip(("a", "b", "bias", "a_dot", "a_ddot"), got, strict=True):
        for _ in range(3):
            v = rng.standard_normal(gradient.shape)
            moved = given | {name: given[name] + 1e-30j * v}
            moved = textbook(*moved.values())
            slope = sum((g * x.imag).sum() for g, x in zip(grads, moved, strict=True)) / 1e-30
            assert abs((gradient * v).sum() - slope) < 1e-11 * np.abs(gradient * v).sum()


@pytest.mark.dtype("float64")
def test_the_second_derivative_of_relu_counts_as_zero(backend):
    x = np.array([[-1.0, 0.0, 2.0]])
    out = nf.matmul_bias_activation_jet(
        x, np.eye(3), None, "relu", np.ones((1, 1, 3)), backend=backend
    )
    assert (out.out_ddot == 0).all()
    assert out.out_dot.tolist() == [[[0.0, 0.0, 1.0]]]


# --- networks -----------------------------------------------------------------------------------
def network(rng, sizes, dtype=np.float64, batch=()):
    weights = [
        (rng.standard_normal((*batch, k, n)) / np.sqrt(k)).astype(dtype)
        for k, n in itertools.pairwise(sizes)
    ]
    biases = [
        rng.standard_normal((*batch, 1, n)[-1 - bool(batch) :]).astype(dtype) for n in sizes[1:]
    ]
    if batch:
        biases = [rng.standard_normal((*batch, 1, n)).astype(dtype) for n in sizes[1:]]
    return weights, biases


@pytest.mark.dtype("float64")
def test_a_small_network_has_the_derivatives_that_mpmath_finds(backend):
    rng = np.random.default_rng(3)
    weights, biases = network(rng, (2, 5, 4, 1))
    x = rng.standard_normal((3, 2))
    u, u_dot, u_ddot = nf.mlp_jet(x, weights, biases, backend=backend)

    def value(p, q, weights=weights):
        h = [p, q]
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            h = [sum(h[r] * w[r][c] for r in range(len(h))) + b[c] for c in range(len(b))]
            h = [mpmath.tanh(y) for y in h] if i < 2 else h
        return h[0]

    with mpmath.workdps(50):
        for m in range(3):
            at = tuple(map(mpmath.mpf, x[m]))
            assert abs(value(*at) - u[m, 0]) < 1e-14
            for d, order in enumerate(((1, 0), (0, 1))):
                assert abs(mpmath.diff(value, at, order) - u_dot[d, m, 0]) < 1e-13
                twice = tuple(2 * n for n in order)
                assert abs(mpmath.diff(value, at, twice) - u_ddot[d, m, 0]) < 1e-12
        # the gradient of the sum of all u_xx by one weight
        grad = np.zeros_like(u_ddot)
        grad[0] = 1
        got = nf.mlp_jet_bwd(None, None, grad, x, weights, biases, backend=backend)

        def loss(t):
            moved = [[[mpmath.mpf(v) for v in row] for row in w] for w in weights]
            moved[1][2][1] += t
            at = [tuple(map(mpmath.mpf, row)) for row in x]
            return sum(mpmath.diff(lambda p, q: value(p, q, moved), y, (2, 0)) for y in at)

        step = mpmath.mpf(10) ** -12
        slope = (loss(step) - loss(-step)) / (2 * step)
        assert abs(slope - got.d_weights[1][2, 1]) < 1e-9


CASES = [
    ((2, 8, 8, 1), (), (), None, None, "none"),
    ((3, 9, 7, 2), (), (), 2, 1, "none"),
    ((3, 9, 7, 2), (), (), 6, 3, "tanh"),
    ((3, 8, 2), (), (), 2, 0, "none"),
    ((3, 2), (), (), 2, 2, "none"),
    ((3, 2), (), (), 2, 2, "tanh"),
    ((64, 3), (), (), 2, 1, "tanh"),  # inputs wider than all layers
    ((2, 6, 5, 1), (4,), (), 2, 1, "none"),
    ((2, 6, 5, 1), (4,), (4,), 2, 1, "sigmoid"),
    ((2, 6, 5, 1), (), (3,), None, None, "none"),
]


def nested(x, weights, biases, directions, second, final):
    """The results as layers' jets give them, in NumPy, complex steps included."""

    def curve(name, z):
        if name == "none":
            return z, 1 + 0 * z, 0 * z
        if name == "tanh":
            t = np.tanh(z)
            return t, 1 - t * t, -2 * t * (1 - t * t)
        s = 1 / (1 + np.exp(-z))
        return s, s * (1 - s), s * (1 - s) * (1 - 2 * s)

    h = x = x + np.zeros((*weights[0].shape[:-2], 1, 1))
    ones = [1] * (x.ndim - 1)
    dot = directions.reshape(len(directions), *ones, -1) + 0 * x
    ddot = 0 * dot
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        z, dot, ddot = h @ w + (0 if b is None else b), dot @ w, ddot @ w
        h, slope, bend = curve("tanh" if i < len(weights) - 1 else final, z)
        dot, ddot = slope * dot, slope * ddot + bend * dot**2
    return h, dot, np.tensordot(second, ddot, 1)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("case", CASES)
def test_a_network_has_the_jets_and_gradients_of_its_layers(backend, case):
    check_network(backend, case)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("case", [CASES[i] for i in (1, 4, 5, 8, 9)])
def test_tangents_that_are_one_row_for_all_points_give_the_same(backend, case, monkeypatch):
    """Guards: the first layer's way for many points, on arrays of a device."""
    monkeypatch.setattr("numfuse.adapters.stacks.SHARED_BYTES", 0)
    check_network(backend, case)


def check_network(backend, case):
    sizes, batch, x_batch, d, s, final = case
    rng = np.random.default_rng(5)
    weights, biases = network(rng, sizes, batch=batch)
    if len(biases) > 2:
        biases[0] = None
    x = rng.standard_normal((*x_batch, 21, sizes[0]))
    directions = None if d is None else rng.standard_normal((d, sizes[0]))
    units = np.eye(sizes[0]) if d is None else directions
    second = None if s is None else np.round(rng.standard_normal((s, len(units))))
    table = np.eye(len(units)) if s is None else second
    how = {"directions": directions, "second": second, "final": final, "backend": backend}
    got = nf.mlp_jet(x, weights, biases, **how)
    again, kept = nf.mlp_jet(x, weights, biases, keep=True, **how)
    wanted = nested(x, weights, biases, units, table, final)
    for a, b, c in zip(got, again, wanted, strict=True):
        assert a.shape == c.shape
        np.testing.assert_allclose(a, c, rtol=1e-11, atol=1e-12)
        assert (bits(a) == bits(b)).all()
    grads = [rng.standard_normal(y.shape) for y in got]
    every = ("x", "weights", "biases")
    for saved in (kept, None):
        d_x, d_w, d_b = nf.mlp_jet_bwd(*grads, x, weights, biases, needs=every, kept=saved, **how)
        assert (d_b[0] is None) == (biases[0] is None)
        for at in range(-1, 2 * len(weights)):
            given = [x, *weights, *biases]
            found = [d_x, *d_w, *d_b][at + 1]
            if given[at + 1] is None:
                continue
            assert found.shape == given[at + 1].shape
            v = rng.standard_normal(found.shape)
            given[at + 1] = given[at + 1] + 1e-30j * v
            count = len(weights) + 1
            moved = nested(given[0], given[1:count], given[count:], units, table, final)
            slope = sum((g * y.imag).sum() for g, y in zip(grads, moved, strict=True)) / 1e-30
            scale = np.abs(found * v).sum() + np.abs(slope)
            assert abs((found * v).sum() - slope) <= 1e-10 * scale


@pytest.mark.host
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_network_in_less_precision_rounds_its_results_once(backend, dtype):
    rng = np.random.default_rng(6)
    dtype = DTYPES[dtype]
    weights, biases = network(rng, (2, 32, 32, 1), dtype)
    x = rng.standard_normal((65, 2)).astype(dtype)
    wide = [[y.astype(np.float64) for y in part] for part in (weights, biases)]
    got = nf.mlp_jet(x, weights, biases, backend=backend)
    exact = nf.mlp_jet(x.astype(np.float64), *wide, backend=backend)
    grads = [normal(rng, y.shape, dtype) for y in got]
    back = nf.mlp_jet_bwd(*grads, x, weights, biases, backend=backend)
    wanted = nf.mlp_jet_bwd(
        *(g.astype(np.float64) for g in grads), x.astype(np.float64), *wide, backend=backend
    )
    pairs = [*zip(got, exact, strict=True)]
    pairs += zip(
        (*back.d_weights, *back.d_biases), (*wanted.d_weights, *wanted.d_biases), strict=True
    )
    for a, b in pairs:
        assert a.dtype == dtype
        # (sums of some hundred float32 terms through three layers, and one rounding)
        bound = tolerance.roundoff(dtype) * np.abs(b) + 2e-5 * np.abs(b).max()
        assert (np.abs(a.astype(np.float64) - b) <= bound).all()


@pytest.mark.host
@pytest.mark.dtype("float64")
def test_points_by_blocks_give_what_they_give_at_once(backend, monkeypatch):
    """Guards: memory is bounded, and blocks change no value but the order of sums over points."""
    rng = np.random.default_rng(8)
    few = traits(backend).simulator
    weights, biases = network(rng, (2, 2, 1) if few else (2, 16, 16, 1))
    x = rng.standard_normal((264 if few else 700, 2))
    got = nf.mlp_jet(x, weights, biases, backend=backend)
    grads = [rng.standard_normal(y.shape) for y in got]
    whole = nf.mlp_jet_bwd(*grads, x, weights, biases, backend=backend)
    monkeypatch.setattr("numfuse.perceptron.BLOCK_BYTES", 1)
    for a, b in zip(got, nf.mlp_jet(x, weights, biases, backend=backend), strict=True):
        assert (bits(a) == bits(b)).all()
    parts = nf.mlp_jet_bwd(*grads, x, weights, biases, backend=backend)
    for a, b in zip(
        (*whole.d_weights, *whole.d_biases), (*parts.d_weights, *parts.d_biases), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-11)


def test_a_call_that_comes_again_gives_the_same_bits(backend):
    rng = np.random.default_rng(9)
    few = traits(backend).simulator
    width, points = (5, 9) if few else (33, 501)
    weights, biases = network(rng, (2, width, width, 1), np.float32)
    x = rng.standard_normal((points, 2)).astype(weights[0].dtype)
    found = []
    for _ in range(3):
        results, kept = nf.mlp_jet(x, weights, biases, keep=True, backend=backend)
        back = nf.mlp_jet_bwd(*results, x, weights, biases, kept=kept, backend=backend)
        found.append([*results, *back.d_weights, *back.d_biases])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (bits(a) == bits(b)).all()


@pytest.mark.dtype("float32")
@pytest.mark.parametrize("final", ["none", "tanh"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
def test_gradients_of_a_network_are_written_where_they_are_asked_for(backend, final, batch):
    rng = np.random.default_rng(10)
    few = traits(backend).simulator
    weights, biases = network(rng, (2, 3, 2) if few else (2, 7, 5, 2), np.float32, batch)
    biases[0] = None
    x = rng.standard_normal((4, 2)).astype(np.float32)
    grads = [y.copy() for y in nf.mlp_jet(x, weights, biases, final=final, backend=backend)]
    call = *grads, x, weights, biases
    how: dict[str, Any] = {"final": final, "needs": ("x", "weights", "biases"), "backend": backend}
    wanted = nf.mlp_jet_bwd(*call, **how)

    def new(y):
        return tuple(map(new, y)) if isinstance(y, tuple) else None if y is None else np.nan * y

    out = new(tuple(wanted))
    out = out[0], (None, *out[1][1:]), out[2]
    got = nf.mlp_jet_bwd(*call, out=out, **how)
    assert got.d_x is out[0]
    for found, given in zip((*got.d_weights, *got.d_biases), (*out[1], *out[2]), strict=True):
        assert given is None or found is given
    pairs = [(got.d_x, wanted.d_x), *zip(got.d_weights, wanted.d_weights, strict=True)]
    pairs += [
        pair for pair in zip(got.d_biases, wanted.d_biases, strict=True) if pair[1] is not None
    ]
    for y, z in pairs:
        assert (bits(y) == bits(z)).all()


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("batches", [((), ()), ((2, 1), ()), ((), (3,)), ((3,), (3,))])
def test_a_bias_with_batch_axes_is_a_layer_for_each(backend, batches):
    rng = np.random.default_rng(11)
    of_a, of_b = batches
    a, b = rng.standard_normal((*of_a, 4, 3)), rng.standard_normal((*of_b, 3, 5))
    bias, dot = rng.standard_normal((3, 1, 5)), rng.standard_normal((2, *of_a, 4, 3))
    got, kept = nf.matmul_bias_activation_jet(a, b, bias, "tanh", dot, keep=True, backend=backend)
    grads = [rng.standard_normal(x.shape) for x in got]
    call = a, b, bias, "tanh", dot
    found = nf.matmul_bias_activation_jet_bwd(*grads, *call, kept=kept, backend=backend)
    total: Any = [0, np.zeros_like(b), np.zeros_like(bias), 0]
    for i in range(3):
        own = b[i] if of_b else b
        lead = of_a == (3,)
        left = (a[i], dot[:, i]) if lead else (a, dot)
        layer = left[0], own, bias[i, 0], "tanh", left[1]
        one = nf.matmul_bias_activation_jet(*layer, backend=backend)
        for x, y in zip(got, one, strict=True):
            x = x[..., i, :, :].reshape(y.shape)
            np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-14)
        gs = [g[..., i, :, :].reshape(y.shape) for g, y in zip(grads, one, strict=True)]
        back = nf.matmul_bias_activation_jet_bwd(*gs, *layer, backend=backend)
        total[1][i if of_b else ...] += back.d_b
        total[2][i, 0] += back.d_bias
        if lead:
            np.testing.assert_allclose(found.d_a[i], back.d_a, rtol=1e-12, atol=1e-13)
        else:
            total[0], total[3] = total[0] + back.d_a, total[3] + back.d_a_dot
    pairs = [(found.d_b, total[1]), (found.d_bias, total[2])]
    pairs += [] if of_a == (3,) else [(found.d_a, total[0]), (found.d_a_dot, total[3])]
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)
