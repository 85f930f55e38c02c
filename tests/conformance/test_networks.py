"""Values of whole networks, their gradients, theirs and their tangents, on every backend.

Values and gradients are held to running errors: each layer's bound is that of `tolerance`, and what
its input or its cotangent errs by is handed on.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import tolerance
from arrays import Fenced, bits, in_layout, normal, unwritten
from conftest import served, traits
from hypothesis import strategies as st
from test_conformance import (
    arrays,  # noqa: F401  (a fixture that every test here uses)
    dtypes,
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    sampled,
    seeds,
    unrecorded,  # noqa: F401  (a fixture)
)
from tolerance import DTYPES

import numfuse as nf

pytestmark = [pytest.mark.host]

WIDTHS = st.sampled_from((1, 2, 7, 8, 13, 16, 17, 33, 65))
POINTS = st.sampled_from((0, 1, 2, 7, 8, 9, 63, 301))
ACTIVATIONS = st.sampled_from(("tanh", "none", "relu", "silu", "sigmoid"))
EVERY = ("x", "weights", "biases")


@st.composite
def networks(draw, backend, activations=ACTIVATIONS):
    """Points, weights and biases in any layout, activations, a cotangent, and a generator."""
    dtype = DTYPES[draw(dtypes(backend))]
    rng = np.random.default_rng(draw(seeds))
    sizes = draw(st.lists(WIDTHS, min_size=2, max_size=5))
    points, batch = draw(POINTS), draw(st.sampled_from(((), (), (1,), (3,))))
    if batch == (3,):
        points = min(points, 9)

    def part():
        return draw(st.sampled_from((batch, ())))

    def array(*shape, scale=1.0):
        return in_layout(normal(rng, shape, dtype, scale), draw(layouts))

    x = array(*part(), points, sizes[0])
    weights = [array(*part(), k, n, scale=k**-0.5) for k, n in itertools.pairwise(sizes)]
    biases = [
        draw(st.sampled_from((None, array(n), array(*part(), 1, n), array(n)))) for n in sizes[1:]
    ]
    hidden = [draw(activations) for _ in sizes[2:]]
    given = {"x": x, "weights": weights, "biases": biases, "activation": hidden}
    given["final"] = draw(activations)
    leads = [y.shape[:-2] for y in (x, *weights, *biases) if y is not None and y.ndim > 1]
    shape = *np.broadcast_shapes(*leads), points, sizes[-1]
    return given, array(*shape), rng


def there(given):
    return [given["x"], *given["weights"], *[y for y in given["biases"] if y is not None]]


def layers(given):
    return zip(
        given["weights"], given["biases"], (*given["activation"], given["final"]), strict=True
    )


def turned(x):
    return x.swapaxes(-1, -2)


def product(x, ex, y, ey, terms, dtype):
    """A product of factors that have errors, and its error."""
    mx, my = np.abs(x), np.abs(y)
    error = ex @ my + mx @ ey + ex @ ey + tolerance.gamma(terms, dtype) * ((mx + ex) @ (my + ey))
    return x @ y, error


def ahead(given, backend):
    """Each layer's input, its sums, and their errors; then the result with its own."""
    dtype = tolerance.accumulator(given["x"].dtype)
    h, e, found = oracle.wide(given["x"]), oracle.wide(0 * given["x"]), []
    for w, bias, f in layers(given):
        w, k = oracle.wide(w), w.shape[-2]
        z, ez = product(h, e, w, 0 * w, k + 1, dtype)
        ez = ez + tolerance.flushed(h, w, dtype, backend)
        if bias is not None:
            z, ez = (
                z + oracle.wide(bias),
                ez + tolerance.gamma(k + 1, dtype) * np.abs(oracle.wide(bias)),
            )
        found.append((h, e, z, ez))
        h = oracle.VALUE[f](z)
        e = ez if f == "none" else tolerance.evaluated(oracle.VALUE[f], z, ez, dtype, backend)
        e = tolerance.stored(h, e, dtype, backend)
    return found, h, e


def behind(grad, given, found, backend):
    """The gradients by x, weights and biases, each with its error."""
    dtype = tolerance.accumulator(given["x"].dtype)
    u = tolerance.roundoff(dtype)
    g, e = oracle.wide(grad), oracle.wide(0 * grad)
    d_weights, d_biases = [], []
    for (w, bias, f), (h, eh, z, ez) in reversed(list(zip(layers(given), found, strict=True))):
        w, points = oracle.wide(w), max(1, z.size // z.shape[-1])
        if f != "none":
            s, es = oracle.SLOPE[f](z), tolerance.evaluated(oracle.SLOPE[f], z, ez, dtype, backend)
            e = np.abs(g) * es + e * (np.abs(s) + es)
            g = g * s
            e = e + u * (np.abs(g) + e) + float(np.finfo(dtype).smallest_normal)
        one, error = product(turned(h), turned(eh), g, e, points, dtype)
        error = error + tolerance.flushed(turned(h), g, dtype, backend)
        d_weights.insert(0, tuple(oracle.sum_to(y, w.shape) for y in (one, error)))
        if bias is not None:
            error = e + tolerance.gamma(points, dtype) * (np.abs(g) + e)
            d_biases.insert(0, tuple(oracle.sum_to(y, bias.shape) for y in (g, error)))
        else:
            d_biases.insert(0, None)
        lost = tolerance.flushed(g, turned(w), dtype, backend)
        g, e = product(g, e, turned(w), 0 * turned(w), w.shape[-1], dtype)
        e = e + lost
        e = tolerance.stored(g, e, dtype, backend)
    d_x = tuple(oracle.sum_to(y, given["x"].shape) for y in (g, e))
    return d_x, d_weights, d_biases


def check(name, got, wanted, dtype, backend):
    exact, error = wanted
    # sums over a batch, and layers that a device may flush
    bound = tolerance.stored(exact, error, dtype, backend)
    assert got.shape == exact.shape and got.dtype == dtype, name
    off = np.abs(oracle.wide(got) - exact)
    assert (off <= bound).all(), (name, float((off / bound).max()))


def run(given, backend, **how):
    rest = {name: y for name, y in given.items() if name not in ("x", "weights", "biases")}
    return nf.mlp(*[given[x] for x in EVERY], **rest, backend=backend, **how)


def back(grad, given, backend, **how):
    rest = {name: y for name, y in given.items() if name not in ("x", "weights", "biases")}
    return nf.mlp_bwd(grad, *[given[x] for x in EVERY], **rest, backend=backend, **how)


@pytest.mark.long
@pytest.mark.usefixtures("unrecorded")
@sampled(90, call=networks)
def test_a_network_and_its_gradients_are_exact_within_the_bound(backend, call):
    given, grad, _ = call
    dtype = given["x"].dtype
    with unwritten(*there(given), grad):
        got = run(given, backend)
        again, kept = run(given, backend, keep=True)
        gradients = back(grad, given, backend, needs=EVERY)
        saved = back(grad, given, backend, needs=EVERY, kept=kept)
    found, value, error = ahead(given, backend)
    check("out", got, (value, error), dtype, backend)
    assert (bits(got) == bits(again)).all()
    d_x, d_weights, d_biases = behind(grad, given, found, backend)
    for one in (gradients, saved):
        check("d_x", one.d_x, d_x, dtype, backend)
        for i, (d, wanted) in enumerate(zip(one.d_weights, d_weights, strict=True)):
            check(f"d_weights[{i}]", d, wanted, dtype, backend)
        for i, (d, wanted) in enumerate(zip(one.d_biases, d_biases, strict=True)):
            if wanted is None:
                assert d is None
            else:
                check(f"d_biases[{i}]", d, wanted, dtype, backend)


@st.composite
def ensembles(draw, backend):
    """Several networks of one activation, with points of their own or the same ones."""
    known = [x for x in ("float32", "float64") if x in served(backend)]
    dtype = DTYPES[draw(st.sampled_from(known))]
    rng, count = np.random.default_rng(draw(seeds)), draw(st.sampled_from((1, 2, 3)))
    hidden = draw(st.lists(st.sampled_from((7, 8, 13)), min_size=1, max_size=3))
    sizes = [draw(st.sampled_from((1, 3, 8))), *hidden, draw(st.sampled_from((1, 5)))]
    points, own = draw(st.sampled_from((1, 5, 17))), draw(st.booleans())

    def array(*shape, scale=1.0):
        return in_layout(normal(rng, shape, dtype, scale), draw(layouts))

    pairs = list(itertools.pairwise(sizes))
    given = {"x": array(*((count,) if own else ()), points, sizes[0])}
    given["weights"] = [array(count, k, n, scale=k**-0.5) for k, n in pairs]
    given["biases"] = [array(count, 1, n) if draw(st.booleans()) else None for _, n in pairs]
    given |= {"activation": [draw(ACTIVATIONS)] * len(hidden), "final": "none"}
    return given, array(count, points, sizes[-1]), EVERY if own else EVERY[1:]


def of_device(x, backend):
    """The same arrays, on a device if the backend has one."""
    if isinstance(x, list):
        return [of_device(y, backend) for y in x]
    there = isinstance(x, np.ndarray) and traits(backend).memory == "device"
    return nf.to_device(x, backend) if there else x


@pytest.mark.long
@sampled(36, call=ensembles)
def test_several_networks_are_exact_within_the_bound_each(backend, call):
    given, grad, needs = call
    dtype, own = given["x"].dtype, {name: of_device(y, backend) for name, y in given.items()}
    got = nf.to_numpy(run(own, backend))
    made = back(of_device(grad, backend), own, backend, needs=needs)
    found, value, error = ahead(given, backend)
    check("out", got, (value, error), dtype, backend)
    d_x, d_weights, d_biases = behind(grad, given, found, backend)
    if "x" in needs:
        check("d_x", nf.to_numpy(made.d_x), d_x, dtype, backend)
    for name, group, exact in (
        ("d_weights", made.d_weights, d_weights),
        ("d_biases", made.d_biases, d_biases),
    ):
        for i, (d, wanted) in enumerate(zip(group, exact, strict=True)):
            assert (d is None) == (wanted is None)
            if d is not None:
                check(f"{name}[{i}]", nf.to_numpy(d), wanted, dtype, backend)


@pytest.mark.usefixtures("unrecorded")
@sampled(40, call=networks, data=st.data())
def test_what_is_not_needed_is_none_and_changes_nothing(backend, call, data):
    given, grad, _ = call
    needs = tuple(name for name in EVERY if data.draw(st.booleans()))
    whole = back(grad, given, backend, needs=EVERY)
    some = back(grad, given, backend, needs=needs)
    for name, x, y in zip(EVERY, whole, some, strict=True):
        if name not in needs:
            assert y is None
            continue
        for p, q in zip((x,) if name == "x" else x, (y,) if name == "x" else y, strict=True):
            assert (p is None and q is None) or (bits(p) == bits(q)).all()


@pytest.mark.usefixtures("unrecorded")
@sampled(40, call=networks, strided=st.booleans())
def test_a_network_writes_its_result_where_it_is_told(backend, call, strided):
    given, *_ = call
    wanted = run(given, backend)
    fenced = Fenced(wanted.shape, wanted.dtype, strided)
    assert run(given, backend, out=fenced.array) is fenced.array
    assert (bits(fenced.array) == bits(wanted)).all()
    fenced.assert_untouched()


def textbook(x, weights, biases):
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        x = x @ w + (0 if b is None else b)
        x = np.tanh(x) if i < len(weights) - 1 else x
    return x


def textbook_backward(grad, x, weights, biases):
    """The gradients of the textbook's network by x, weights and biases; complex numbers too."""
    inputs, d_weights, d_biases = [x], [], []
    for w, b in zip(weights, biases, strict=True):
        x = inputs[-1] @ w + (0 if b is None else b)
        inputs.append(np.tanh(x))
    for i in range(len(weights) - 1, -1, -1):
        if i < len(weights) - 1:
            grad = grad * (1 - inputs[i + 1] ** 2)
        d_weights.insert(0, inputs[i].T @ grad)
        d_biases.insert(0, grad.sum(0))
        grad = grad @ weights[i].T
    return grad, d_weights, d_biases


def moved(x, along, step=1e-30j):
    """Operands a complex step further."""
    if isinstance(x, list) and along is not None:
        return [moved(*pair) for pair in zip(x, along, strict=True)]
    return x if x is None or along is None else x + step * along


def inner(x, y):
    if isinstance(x, (list, tuple)):
        return sum(inner(*pair) for pair in zip(x, y, strict=True))
    return 0 if x is None or y is None else (x * y).sum()


@pytest.fixture
def small():
    """Points, weights and biases of a small network, one bias None, and what draws their like."""
    rng = np.random.default_rng(11)
    weights = [rng.standard_normal(s) for s in ((3, 6), (6, 5), (5, 2))]
    operands = rng.standard_normal((9, 3)), weights, [rng.standard_normal(6), None, np.ones(2)]

    def like(x):
        if isinstance(x, list):
            return [like(y) for y in x]
        return None if x is None else rng.standard_normal(x.shape)

    return operands, like


TANGENTS = list(itertools.product((True, False), repeat=3))


def some(given, kinds):
    return [y if kind else None for y, kind in zip(given, kinds, strict=True)]


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("kinds", TANGENTS)
def test_forward_mode_is_the_complex_step(backend, small, kinds):
    operands, like = small
    along = some([like(x) for x in operands], kinds)
    got = nf.mlp_jvp(*operands, *along, backend=backend)
    wanted = textbook(*[moved(x, y) for x, y in zip(operands, along, strict=True)])
    np.testing.assert_allclose(got.out, wanted.real, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(got.out_dot, wanted.imag / 1e-30, rtol=1e-11, atol=1e-12)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("kinds", TANGENTS)
def test_the_double_backward_is_the_derivative_of_the_backward(backend, small, kinds):
    operands, like = small
    u, v, w = some([like(x) for x in operands], kinds)
    grad = like(np.empty((9, 2)))
    got = nf.mlp_double_bwd(u, v, w, grad, *operands, backend=backend)
    along = [like(grad), *[like(x) for x in operands]]
    step = [moved(x, y) for x, y in zip((grad, *operands), along, strict=True)]
    d_x, d_weights, d_biases = textbook_backward(*step)
    total = sum(inner(*p) for p in ((u, d_x), (v, d_weights), (w, d_biases)) if p[0] is not None)
    slope = np.imag(total) / 1e-30
    assert (got.d_biases[1] is None) == (operands[2][1] is None)
    every = got.d_grad, got.d_x, got.d_weights, got.d_biases
    size = sum(abs(inner(np.abs(x), np.abs(y))) for x, y in zip(every[:2], along, strict=False))
    found = sum(inner(x, y) for x, y in zip(every, along, strict=True))
    assert abs(found - slope) < 1e-11 * (1 + size + abs(slope))
    only = nf.mlp_double_bwd(u, v, w, grad, *operands, needs=("x",), backend=backend)
    assert only.d_grad is only.d_weights is only.d_biases is None
    assert (bits(only.d_x) == bits(got.d_x)).all() or "tier" in traits(backend).order


@pytest.mark.dtype("float64")
def test_a_sequence_of_activations_is_one_of_each_hidden_layer(backend):
    rng = np.random.default_rng(2)
    weights: list[Any] = [rng.standard_normal(s) for s in ((2, 4), (4, 4), (4, 1))]
    x = rng.standard_normal((5, 2))
    got = nf.mlp(x, weights, None, ("sigmoid", "relu"), final="tanh", backend=backend)
    wanted = np.tanh(np.maximum(1 / (1 + np.exp(-(x @ weights[0]))) @ weights[1], 0) @ weights[2])
    np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-14)
