"""Networks' tangents and double backwards, on every backend, held to running errors.

As in `test_networks`, whose bounds these are: each product and each factor errs by what its
operands err by, and by its own rounding (points 2, 4 and 8 of `tolerance`).
"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import tolerance
from arrays import bits, in_layout, normal, unwritten
from conftest import served, traits
from hypothesis import strategies as st
from test_conformance import (
    arrays,  # noqa: F401  (a fixture that every test here uses)
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    sampled,
    unrecorded,  # noqa: F401  (a fixture)
)
from test_networks import (
    EVERY,
    ahead,
    check,
    layers,
    networks,
    product,
    there,
    turned,
)
from tolerance import DTYPES, times

import numfuse as nf
from numfuse import expr as ex

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("unrecorded")]

SECOND = ("grad", *EVERY)
#: Curved, without a second derivative, and without a formula: each takes kernels of its own.
ACTIVATIONS = st.sampled_from(("tanh", "relu", "none"))


def share(backend):
    """One of so many examples: a device makes a shader for each form, and goes layer by layer."""
    return 3 if traits(backend).memory == "host" else 20


#: By kind of operand (x, weights, biases): whether it moves; a layer's own is drawn besides.
kinds = st.tuples(st.booleans(), st.booleans(), st.booleans())


@st.composite
def moving(draw, backend):
    """A network, a cotangent of its result, and tangents, each in a layout of its own."""
    given, grad, rng = draw(networks(backend, ACTIVATIONS))
    x_moves, *groups = draw(kinds)

    def like(y):
        return in_layout(normal(rng, y.shape, y.dtype), draw(layouts))

    along = [like(given["x"]) if x_moves else None]
    for name, moves in zip(EVERY[1:], groups, strict=True):
        some = [None if y is None or not draw(st.booleans()) else like(y) for y in given[name]]
        along.append(some if moves else None)
    return given, grad, along


def run(function, given, before, after, backend, **how):
    rest = {name: y for name, y in given.items() if name not in EVERY}
    return function(*before, *[given[x] for x in EVERY], *after, **rest, backend=backend, **how)


class Running:
    """A number that errs; None is zero."""

    def __init__(self, given, backend):
        self.dtype, self.backend = tolerance.accumulator(given["x"].dtype), backend
        self.u = tolerance.roundoff(self.dtype)
        self.tiny = float(np.finfo(self.dtype).smallest_normal)

    def sum(self, *terms):
        found = [x for x in terms if x is not None]
        if not found:
            return None
        value, error = sum(x for x, _ in found), sum(e for _, e in found)
        size = sum(np.abs(x) for x, _ in found)
        more = len(found) - 1
        return value, error + more * self.u * (size + error) + more * self.tiny

    def product(self, x, y, more=4):
        """The product of matrices; so many more sums take place around it."""
        if x is None or y is None:
            return None
        value, error = product(*x, *y, x[0].shape[-1] + more, self.dtype)
        return value, error + tolerance.flushed(x[0], y[0], self.dtype, self.backend)

    def times(self, x, y):
        if x is None or y is None:
            return None
        return x[0] * y[0], times(*x, *y, self.u) + self.tiny

    def at(self, curve, z):
        return curve(z[0]), tolerance.evaluated(curve, *z, self.dtype, self.backend)


def exact(x):
    return None if x is None else (oracle.wide(x), oracle.wide(0 * x))


def opposite(x):
    return None if x is None else tuple(map(turned, x))


def tangents(given, along, of, found):
    """The tangent before each layer and of its sums, then of the result."""
    x_dot, *groups = along
    t, made = exact(x_dot), []
    own = [[None] * len(given["weights"]) if y is None else y for y in groups]
    rows = zip(layers(given), found, *own, strict=True)
    for (w, _, f), (h, eh, z, ez), w_dot, b_dot in rows:
        parts = of.product(t, exact(w)), of.product((h, eh), exact(w_dot)), exact(b_dot)
        moved = of.sum(*parts)
        if moved is not None:
            moved = tuple(np.broadcast_to(y, z.shape) for y in moved)
        made.append((t, moved, exact(w_dot)))
        t = moved if f == "none" else of.times(moved, of.at(oracle.SLOPE[f], (z, ez)))
        if t is not None:
            t = t[0], tolerance.stored(*t, of.dtype, of.backend)
    return made, t


def gradients(given, grad, of, found, made):
    """The gradients by x, weights and biases of what the tangent of the result is worth."""
    by_value, by_tangent, groups = None, exact(grad), ([], [])
    rows = zip(layers(given), found, made, strict=True)
    for (w, bias, f), (h, eh, z, ez), (t, moved, w_dot) in reversed(list(rows)):
        s, q = by_tangent, by_value
        if f != "none":
            slope, bend = (of.at(x[f], (z, ez)) for x in (oracle.SLOPE, oracle.SECOND))
            s = of.times(by_tangent, slope)
            q = of.sum(of.times(by_value, slope), of.times(of.times(by_tangent, bend), moved))
        if moved is None:
            s = None
        zero = np.zeros(z.shape, oracle.LONG)
        q = (zero, zero) if q is None else q
        points = max(1, z.size // z.shape[-1])
        d_w = of.sum(
            of.product(opposite((h, eh)), q, points + 4),
            of.product(opposite(t), s, points + 4),
        )
        groups[0].insert(0, d_w)
        error = q[1] + tolerance.gamma(points + 4, of.dtype) * (np.abs(q[0]) + q[1])
        groups[1].insert(0, None if bias is None else (q[0], error))
        by_value = of.sum(of.product(q, opposite(exact(w))), of.product(s, opposite(w_dot)))
        by_tangent = None if t is None else of.product(s, opposite(exact(w)))
    return by_value, *groups


def close(name, got, wanted, dtype, backend):
    if wanted is None:
        wanted = (np.zeros(got.shape, oracle.LONG),) * 2
    summed = tuple(oracle.sum_to(np.asarray(y), got.shape) for y in wanted)
    check(name, got, summed, dtype, backend)


@sampled(120, share, call=moving)
def test_a_network_and_its_tangent_are_exact_within_the_bound(backend, call):
    given, _, along = call
    dtype, of = given["x"].dtype, Running(given, backend)
    moved = [y for group in along[1:] for y in group or ()]
    with unwritten(*there(given), along[0], *moved):
        got = run(nf.mlp_jvp, given, (), along, backend)
    found, value, error = ahead(given, backend)
    check("out", got.out, (value, error), dtype, backend)
    _, wanted = tangents(given, along, of, found)
    close("out_dot", got.out_dot, wanted, dtype, backend)


@pytest.mark.long
@sampled(120, share, call=moving)
def test_a_double_backward_is_exact_within_the_bound(backend, call):
    given, grad, along = call
    dtype, of = given["x"].dtype, Running(given, backend)
    moved = [y for group in along[1:] for y in group or ()]
    with unwritten(*there(given), grad, along[0], *moved):
        got = run(nf.mlp_double_bwd, given, (*along, grad), (), backend)
    found, *_ = ahead(given, backend)
    made, wanted = tangents(given, along, of, found)
    close("d_grad", got.d_grad, wanted, dtype, backend)
    d_x, d_weights, d_biases = gradients(given, grad, of, found, made)
    close("d_x", got.d_x, d_x, dtype, backend)
    for name, ds, exacts in (
        ("weights", got.d_weights, d_weights), ("biases", got.d_biases, d_biases)
    ):  # fmt: skip
        for i, (d, wanted, y) in enumerate(zip(ds, exacts, given[name], strict=True)):
            assert (d is None) == (y is None)
            if d is not None:
                close(f"d_{name}[{i}]", d, wanted, dtype, backend)


@sampled(60, share, call=moving, data=st.data())
def test_a_double_backward_has_what_is_needed_and_no_more(backend, call, data):
    given, grad, along = call
    needs = tuple(name for name in SECOND if data.draw(st.booleans()))
    whole = run(nf.mlp_double_bwd, given, (*along, grad), (), backend)
    some = run(nf.mlp_double_bwd, given, (*along, grad), (), backend, needs=needs)
    for name, x, y in zip(SECOND, whole, some, strict=True):
        if name not in needs:
            assert y is None
            continue
        for p, q in zip(*[(z,) if name in ("grad", "x") else z for z in (x, y)], strict=True):
            assert (p is None) == (q is None)
            assert p is None or (bits(p) == bits(q)).all()


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("name", ["relu", "gelu", "rooted"])
def test_a_derivative_that_is_not_finite_counts_as_the_reference_says(backend, guard, name):
    """A user's formula with a kink and a pole of its derivatives, some sums being 0."""
    dtype = DTYPES[served(backend)[0]]

    @nf.activation(name="rooted_network")
    def rooted(z):
        return ex.sqrt(ex.abs(z))

    f = rooted if name == "rooted" else name
    rng = np.random.default_rng(3)
    x = rng.integers(-1, 2, (9, 2)).astype(dtype)
    weights = [rng.integers(-1, 2, s).astype(dtype) for s in ((2, 5), (5, 3), (3, 1))]
    along = np.ones_like(x), [np.ones_like(w) for w in weights], None
    grad = np.ones((9, 1), dtype)
    with np.errstate(all="ignore"):
        wanted, tangent = (
            nf.mlp_jvp(x, weights, None, *along, f, guard=guard, backend=y)
            for y in ("reference", backend)
        )
        expected, second = (
            nf.mlp_double_bwd(*along, grad, x, weights, None, f, guard=guard, backend=y)
            for y in ("reference", backend)
        )
    pairs = [*zip(tangent, wanted, strict=True), (second.d_grad, expected.d_grad)]
    pairs += [(second.d_x, expected.d_x), *zip(second.d_weights, expected.d_weights, strict=True)]
    for got, exactly in pairs:
        assert not guard or np.isfinite(got).all()
        # (an infinity may meet another one in another order of sums)
        finite = np.isfinite(exactly)
        assert guard or name == "rooted" or finite.all()
        assert (np.isfinite(got) == finite).all()
        np.testing.assert_allclose(got[finite], exactly[finite], rtol=2e-5, atol=2e-5)
