"""Jets of whole networks, and their gradients, within running errors on every backend.

Each layer's bound is that of its jet; what its inputs or its cotangents err by is handed on.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tolerance
from arrays import in_layout, normal, unwritten
from conftest import served, traits
from hypothesis import strategies as st
from test_conformance import (
    arrays,  # noqa: F401  (a fixture that every test here uses)
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    sampled,
    seeds,
    unrecorded,  # noqa: F401  (a fixture)
)
from test_fusion import check_array, stored
from test_jets import added, results_of, slopes_of
from tolerance import DTYPES, Running

import numfuse as nf

pytestmark = [pytest.mark.host, pytest.mark.kind("jet")]

WIDTHS = st.sampled_from((1, 2, 4, 5, 13, 31, 32, 33, 61, 64))
POINTS = st.sampled_from((0, 1, 2, 7, 16, 17, 67))
#: Directions, and how they make second derivatives.
FORMS = st.sampled_from((2, 2, 4)), st.sampled_from(("first", "identity", "any"))
EVERY = ("x", "weights", "biases")


def share(backend):
    """One of so many examples: CPUs take seconds for the kernels of one, and have other tests."""
    return 8 if traits(backend).memory == "device" else 21


@st.composite
def networks(draw, backend):
    """Arguments of a network's jet by name, cotangents, the directions and the weights."""
    # (devices have whole networks in float32)
    known = [x for x in ("float32", "float32", "float32", "float64") if x in served(backend)]
    dtype = DTYPES[draw(st.sampled_from(known))]
    rng = np.random.default_rng(draw(seeds))
    sizes = draw(st.lists(WIDTHS, min_size=2, max_size=5))
    directions, form = map(draw, FORMS)
    second = np.eye(1, directions) if form == "first" else None
    if form == "any":
        second = rng.integers(-1, 2, (directions, directions)).astype(np.float64)

    def array(*shape, scale=1.0):
        return in_layout(normal(rng, shape, dtype, scale), draw(layouts))

    units = normal(rng, (directions, sizes[0]), dtype)
    points = draw(POINTS)
    given = {
        "x": array(points, sizes[0]),
        "weights": [array(k, n, scale=k**-0.5) for k, n in itertools.pairwise(sizes)],
        "biases": [draw(st.sampled_from((None, array(n), array(1, n)))) for n in sizes[1:]],
        "activation": draw(st.sampled_from(("tanh", "silu"))),
        "final": draw(st.sampled_from(("none", "none", "tanh"))),
        "directions": units,
        "second": second,
        "guard": draw(st.sampled_from((True, True, True, False))),
    }
    table = np.eye(directions) if second is None else second
    value = points, sizes[-1]
    leads = (), (directions,), (len(table),)
    grads = [array(*y, *value) if draw(st.integers(0, 4)) else None for y in leads]
    return given, grads, units, table


def layers(given):
    activations = *[given["activation"]] * (len(given["weights"]) - 1), given["final"]
    return list(zip(given["weights"], given["biases"], activations, strict=True))


def turned(x):
    return Running(x.value.swapaxes(-1, -2), x.error.swapaxes(-1, -2))


def product(x, y, backend, dtype, more=0):
    """A product of factors that have errors, its sum having so many terms `more`."""
    value, size, error = tolerance.product_of(x, y, dtype, backend)
    terms = x.value.shape[-1] + more
    return Running(value, error + tolerance.gamma(terms, dtype) * (size + error))


def ahead(given, units, table, backend):
    """The inputs and the sums of every layer, and the results."""
    x, dtype = given["x"], given["x"].dtype
    u = tolerance.roundoff(tolerance.accumulator(dtype))
    value = Running.of(x)
    dots = [Running.of(np.broadcast_to(v, x.shape)) for v in units]
    ddots, found = [None] * len(table), []
    for w, bias, f in layers(given):
        w = Running.of(w)

        def through(y, w=w):
            return None if y is None else product(y, w, backend, dtype)

        z = through(value)
        if bias is not None:
            z = added([z, Running.of(np.broadcast_to(bias, z.value.shape))], z.value.shape, u)
        inputs = value, dots, ddots
        sums = z, [*map(through, dots)], [*map(through, ddots)]
        found.append((inputs, sums))
        value, dots, ddots = results_of(sums, table, f, dtype, backend)
    return found, (value, dots, ddots)


def behind(grads, given, found, table, backend):
    """The gradients by x, weights and biases, each with its error."""
    dtype = given["x"].dtype
    d_weights, d_biases = [], []
    for (w, bias, f), (inputs, sums) in reversed(list(zip(layers(given), found, strict=True))):
        q, q_dot, q_ddot = slopes_of(grads, sums, table, f, dtype, backend)
        pairs = [(inputs[0], q), *zip(inputs[1], q_dot, strict=True)]
        pairs += [(x, y) for x, y in zip(inputs[2], q_ddot, strict=False) if x is not None]
        points = given["x"].shape[-2] * (1 + len(q_dot) + len(q_ddot))
        terms = [product(turned(x), y, backend, dtype, points) for x, y in pairs]
        zero = Running.of(np.zeros(w.shape))
        u = tolerance.roundoff(tolerance.accumulator(dtype))
        d_weights.insert(0, added([*terms, zero], w.shape, u))
        d_biases.insert(0, None if bias is None else tolerance.summed(q, bias.shape, dtype))
        back = turned(Running.of(w))

        def through(y, back=back):
            return product(y, back, backend, dtype)

        grads = through(q), [*map(through, q_dot)], [*map(through, q_ddot)]
    return grads[0], d_weights, d_biases


@st.composite
def ensembles(draw, backend):
    """Several networks of one form, as `networks` draws one."""
    known = [x for x in ("float32", "float64") if x in served(backend)]
    dtype = DTYPES[draw(st.sampled_from(known))]
    rng, count = np.random.default_rng(draw(seeds)), draw(st.sampled_from((1, 2, 3)))
    hidden = draw(st.lists(st.sampled_from((5, 8, 13)), min_size=1, max_size=3))
    sizes = [draw(st.sampled_from((1, 3))), *hidden, draw(st.sampled_from((1, 4)))]
    points, own = draw(st.sampled_from((1, 7, 17))), draw(st.booleans())

    def array(*shape, scale=1.0):
        return in_layout(normal(rng, shape, dtype, scale), draw(layouts))

    units = normal(rng, (2, sizes[0]), dtype)
    given = {
        "x": array(*((count,) if own else ()), points, sizes[0]),
        "weights": [array(count, k, n, scale=k**-0.5) for k, n in itertools.pairwise(sizes)],
        "biases": [array(count, 1, n) if draw(st.booleans()) else None for n in sizes[1:]],
        "activation": draw(st.sampled_from(("tanh", "silu"))),
        "final": "none",
        "directions": units,
        "second": np.eye(1, 2),
    }
    value = count, points, sizes[-1]
    return given, [array(*lead, *value) for lead in ((), (2,), (1,))], units, np.eye(1, 2)


@pytest.mark.long
@sampled(28, call=ensembles)
def test_several_networks_are_exact_within_the_bound_each(backend, call):
    check(backend, call, EVERY[1:])


@pytest.mark.long
@pytest.mark.usefixtures("unrecorded")
@sampled(42, share, call=networks)
def test_a_networks_jet_and_its_gradients_are_exact_within_the_bound(backend, call):
    check(backend, call, EVERY)


def check(backend, call, needs):
    """The results and the gradients are right, and nothing that is read is written."""
    given, grads, units, table = call
    dtype, how = given["x"].dtype, given | {"backend": backend}
    read = given["x"], *given["weights"], *(y for y in given["biases"] if y is not None)
    with unwritten(*read, *(y for y in grads if y is not None)):
        got = nf.mlp_jet(**how)
        back = nf.mlp_jet_bwd(*grads, **how, needs=needs)
    found, (value, dots, ddots) = ahead(given, units, table, backend)
    shape = value.value.shape
    assert [y.shape for y in got] == [shape, (len(dots), *shape), (len(ddots), *shape)]
    results = [("u", got.u, value), *(("u_dot", *y) for y in zip(got.u_dot, dots, strict=True))]
    results += [("u_ddot", *y) for y in zip(got.u_ddot, ddots, strict=True)]
    for name, y, wanted in results:
        check_array(name, y, stored(wanted, dtype, backend), dtype)
    zero = Running.of(np.zeros(shape))
    counts = (None, len(dots), len(ddots))

    def members(y, count):
        if count is None:
            return zero if y is None else Running.of(y)
        return [zero] * count if y is None else [Running.of(one) for one in y]

    given_grads = tuple(itertools.starmap(members, zip(grads, counts, strict=True)))
    d_x, d_weights, d_biases = behind(given_grads, given, found, table, backend)
    gradients = [("d_x", back.d_x, d_x)] if "x" in needs else []
    for i in range(len(d_weights)):
        gradients.append((f"d_weights[{i}]", back.d_weights[i], d_weights[i]))
        assert (back.d_biases[i] is None) == (d_biases[i] is None)
        if d_biases[i] is not None:
            gradients.append((f"d_biases[{i}]", back.d_biases[i], d_biases[i]))
    for name, y, wanted in gradients:
        check_array(name, y, stored(wanted, dtype, backend), dtype)
