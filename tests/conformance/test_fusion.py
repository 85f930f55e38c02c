"""Epilogues of a user's own, elementwise formulas and the gated layer: what every backend fulfils.

Each formula is written twice: for numfuse, and as plain NumPy in long double, whose slopes the
complex step finds (`oracle.slopes`).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest
import tolerance
from arrays import LAYOUTS, Fenced, bits, in_layout, normal, unwritten
from conftest import SIMULATED, traits
from hypothesis import strategies as st
from oracle import ACTIVATIONS
from test_conformance import (
    BATCHES,
    DEPTHS,
    activations,
    arrays,  # noqa: F401  (a fixture that every test here uses)
    compiling_share,
    dtypes,
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    rounds_grad_pre,
    seeds,
    sizes,
    tier,
    unrecorded,  # noqa: F401  (a fixture)
)
from test_conformance import sampled as usually_sampled
from tolerance import DTYPES, Running, assert_within

import numfuse as nf
from numfuse import definitions, epilogues
from numfuse import expr as ex

pytestmark = [pytest.mark.kind("fused"), pytest.mark.compiles]


sampled = functools.partial(usually_sampled, share=compiling_share)

GELU = nf.activations()["gelu"]
#: An activation of a user's own; no name is left behind in the table.
SOFTSIGN = nf.activation(lambda x: x / (1.0 + ex.abs(x)), name="softsign of the tests")
sys.modules["numfuse.activations.table"].TABLE.pop(SOFTSIGN.name)


# --- the formulas, twice ------------------------------------------------------------------------


class Formula(NamedTuple):
    ours: Callable[..., Any]
    exact: Callable[..., Any]
    factors: int
    operands: int

    @property
    def name(self):
        return self.ours.__name__

    def epilogue(self):
        return definitions.get(self.ours).over(self.factors)


def masked_tanh(z, bias, scale, mask):
    return ex.tanh(z + bias) * scale * mask


def gate_and_shift(z, w, s):
    return GELU(z) * w + s


def three_products(z, u, v, x):
    return z * ex.sigmoid(u) + v * x


def leaky(z, low):
    return ex.where((z < low) & (low > -3.0), (z - low) * ex.constant("0.1"), z * z)


def log_and_sqrt(z, x):
    return ex.log(z * z + x * x + 1.0) + ex.sqrt(z * z + 0.5)


def ten_operations(z, row, column):
    y = z * row + column
    t = ex.tanh(y) * ex.sigmoid(y - column)
    return t + y * 0.25 - row / (column * column + 1.0)


def own_activation(z, bias, scale):
    return SOFTSIGN(z + bias) * scale


def plain_sum(z, x):
    return z + x


PRODUCTS = [
    Formula(masked_tanh, lambda z, b, s, m: np.tanh(z + b) * s * m, 1, 3),
    Formula(gate_and_shift, lambda z, w, s: oracle.gelu(z) * w + s, 2, 1),
    Formula(three_products, lambda z, u, v, x: z * oracle.logistic(u) + v * x, 3, 1),
    Formula(
        leaky,
        lambda z, low: np.where(
            (np.real(z) < np.real(low)) & (np.real(low) > -3),
            (z - low) * oracle.LONG("0.1"),
            z**2,
        ),
        1,
        1,
    ),
    Formula(log_and_sqrt, lambda z, x: np.log(1 + z**2 + x**2) + np.sqrt(z**2 + 0.5), 1, 1),
    Formula(
        ten_operations,
        lambda z, r, c: (
            np.tanh(z * r + c) * oracle.logistic(z * r) + (z * r + c) / 4 - r / (c**2 + 1)
        ),
        1,
        2,
    ),
    Formula(own_activation, lambda z, b, s: s * (z + b) / (1 + oracle.larger(z + b, -z - b)), 1, 2),
    Formula(plain_sum, lambda z, x: z + x, 1, 1),
]


def adam(p, g, m, v, rate, beta, gamma):
    m = beta * m + (1.0 - beta) * g
    v = gamma * v * v + (1.0 - gamma) * g * g
    return p - rate * m / (ex.sqrt(v) + 0.125), m, v


def _adam(p, g, m, v, rate, beta, gamma):
    m = m * beta + g * (1 - beta)
    v = v**2 * gamma + g**2 * (1 - gamma)
    return p - m * rate / (np.sqrt(v) + oracle.LONG(0.125)), m, v


def smooth_l1(x, y, weight):
    off = ex.abs(x - y)
    loss = ex.where(off < 1.0, 0.5 * off * off, off - 0.5)
    return loss * weight, ex.clamp(x - y, -1.0, 1.0)


def _smooth_l1(x, y, weight):
    off = x - y
    small = np.abs(off.real) < 1
    size = np.where(off.real < 0, -off, off)
    cut = np.where(small, off, np.sign(off.real))
    return np.where(small, off**2 / 2, size - 0.5) * weight, cut


def product_of_three(x, y, z):
    return x * y * z


ELEMENTS = [
    Formula(adam, _adam, 0, 7),
    Formula(smooth_l1, _smooth_l1, 0, 3),
    Formula(product_of_three, lambda x, y, z: x * y * z, 0, 3),
]
NUMBERS = (0.75, 1, -0.3, 2.5)


def by_name(formula):
    return formula.name


# --- what is exact, and how far off a result may be ---------------------------------------------


def widened(operands, dtype):
    """Operands without an error; a Python number is one of the arrays' dtype."""
    return [Running.of(np.asarray(x, dtype) if type(x) in (int, float) else x) for x in operands]


def sums_of(a, factors, backend, biases=()):
    """The exact sums of a call, and their errors."""
    found = []
    for i, b in enumerate(factors):
        z, size, error = tolerance.product_of(Running.of(a), Running.of(b), a.dtype, backend)
        terms = a.shape[-1]
        if i < len(biases) and biases[i] is not None:
            z, size = z + oracle.wide(biases[i]), size + np.abs(oracle.wide(biases[i]))
            terms += 1
        found.append(Running(z, error + tolerance.gamma(terms, a.dtype) * size))
    return found


def moved_sums(a, factors, a_dot, b_dots, backend, bias_dots=()):
    """The tangents of the sums; None where nothing moves one."""
    found: list[Running | None] = []
    for i, (b, b_dot) in enumerate(zip(factors, b_dots, strict=True)):
        w = bias_dots[i] if i < len(bias_dots) else None
        if a_dot is None and b_dot is None and w is None:
            found.append(None)
            continue
        shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*shape, a.shape[-2], b.shape[-1])
        found.append(
            Running(*tolerance.moved(a_dot, b_dot, w, None, a, b, shape, a.dtype, backend))
        )
    return found


def whole(x, shape):
    return Running(np.broadcast_to(x.value, shape), np.broadcast_to(x.error, shape))


def stored(x, dtype, backend):
    return x.value, tolerance.stored(x.value, x.error, dtype, backend)


def run_of(epilogue, leaves, dtype, backend):
    """The results of an epilogue by name, with their running errors."""
    found = tolerance.running(epilogue.graphs, leaves, dtype, backend)
    return dict(zip([name for name, _ in epilogue.results], found, strict=True))


def leaves_of(epilogue, sums, operands):
    return dict(zip(epilogue.inputs, [*sums, *operands], strict=True))


def exactly(value, found):
    """A value that was found independently, with the error that a formula's evaluation has."""
    error = np.zeros(np.shape(value)) if found is None else found.error
    return Running(*np.broadcast_arrays(value, error))


def gradient_of_factors(parts, dtype, backend, sum_batch=False):
    """d_a and the gradients of the right factors, (exact, bound) of each.

    Each of `parts`, (a, right factors, slopes by their sums), adds to them.
    """
    rounded = rounds_grad_pre(backend, dtype)
    lost = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2 if rounded else 0
    unit = tolerance.roundoff(dtype) if rounded else 0

    def held(g):
        return Running(g.value, g.error + unit * (np.abs(g.value) + g.error) + lost)

    def turned(x):
        return Running(x.value.swapaxes(-1, -2), x.error.swapaxes(-1, -2))

    def summed(pairs, shape):
        exact = size = error = np.zeros(shape, oracle.LONG)
        terms = 0
        for x, y in pairs:
            value, weight, off = tolerance.product_of(x, y, dtype, backend)
            exact = exact + oracle.sum_to(value, shape)
            size, error = size + oracle.sum_to(weight, shape), error + oracle.sum_to(off, shape)
            terms += x.value.shape[-1] * max(1, value.size // max(1, exact.size)) + 1
        error = error + tolerance.gamma(terms, dtype) * (size + error)
        return exact, tolerance.stored(exact, error, dtype, backend)

    by_a = []
    by_factor: list[Any] = [[] for _ in parts[0][1]]
    for a, factors, slopes in parts:
        for i, (b, g) in enumerate(zip(factors, map(held, slopes), strict=True)):
            by_a.append((g, turned(Running.of(b))))
            by_factor[i].append((turned(Running.of(a)), g))
    a, factors, _ = parts[0]
    shapes = [b.shape[-2:] if sum_batch else b.shape for b in factors]
    d_b = [summed(pairs, shape) for pairs, shape in zip(by_factor, shapes, strict=True)]
    return summed(by_a, a.shape), d_b


def gradients(formula, grads, sums, operands, dtype, backend):
    """The gradients of sums and operands, element by element, as exact values with errors."""
    made = formula.epilogue()
    values = [x.value for x in (*sums, *operands)]
    results, partials = oracle.slopes(formula.exact, *values)
    wide = [np.zeros_like(results[0]) if g is None else oracle.wide(g) for g in grads]
    names = ["grad"] if len(grads) == 1 else [f"grad_out_{i}" for i in range(len(grads))]
    leaves = leaves_of(made, sums, operands)
    leaves |= {name: Running.of(g) for name, g in zip(names, wide, strict=True)}
    errors = run_of(made.backward(), leaves, dtype, backend)
    found = []
    for i, name in enumerate(made.inputs):
        exact = sum(g * by_input[i] for g, by_input in zip(wide, partials, strict=True))
        found.append(exactly(exact, errors.get(f"d_{name}")))
    return found


def check_array(name, got, wanted, dtype):
    assert got.dtype == dtype, name
    assert got.flags.c_contiguous, name
    assert_within(name, got, *wanted)


def check_operands(got, operands, found, dtype, backend, wanted=None):
    """Gradients of operands, summed to their shapes; a number's is in the accumulator's dtype."""
    for i, (x, d_x, g) in enumerate(zip(operands, got, found, strict=True)):
        if wanted is not None and i not in wanted:
            assert d_x is None
            continue
        number = type(x) in (int, float)
        own = tolerance.accumulator(dtype) if number else dtype
        exact = tolerance.summed(g, np.shape(x), dtype)
        check_array(f"d_operands[{i}]", np.asarray(d_x), stored(exact, own, backend), own)


# --- operands -----------------------------------------------------------------------------------


def operand(draw, rng, shape, dtype):
    """One that broadcasts to a result's shape: an array in a layout, a NumPy scalar, a number."""
    kinds = ("number", "scalar", "row", "(1, N)", "(M, 1)", "(M, N)", "members", "whole", "any")
    kind = draw(st.sampled_from(kinds))
    if kind == "number":
        return draw(st.sampled_from(NUMBERS))
    m, n = shape[-2:]
    batch = shape[:-2]
    own = {
        "scalar": (), "row": (n,), "(1, N)": (1, n), "(M, 1)": (m, 1), "(M, N)": (m, n),
        "members": (*batch, 1, 1), "whole": shape,
    }.get(kind)  # fmt: skip
    if own is None:
        own = tuple(length if draw(st.booleans()) else 1 for length in shape)
    x = normal(rng, own, dtype)
    if kind == "scalar":
        return x[()] if draw(st.booleans()) else x
    return in_layout(x, draw(layouts))


@st.composite
def calls(draw, backend, formulas=PRODUCTS):
    """(formula, a, right factors, operands, the result's shape, a random generator)."""
    formula = draw(st.sampled_from(formulas))
    dtype = DTYPES[draw(dtypes(backend))]
    m, n, k = draw(sizes), draw(sizes), draw(st.sampled_from(DEPTHS))
    rng = np.random.default_rng(draw(seeds))
    batch = draw(st.sampled_from(BATCHES))
    if int(np.prod(batch)) > 1:
        m, n = min(m, 33), min(n, 33)

    def part():
        kind = draw(st.sampled_from(("all", "none", "some")))
        return {"all": batch, "none": (), "some": (1, *batch[1:]) if batch else ()}[kind]

    own = part()
    a = in_layout(normal(rng, (*part(), m, k), dtype, max(1, k) ** -0.5), draw(layouts))
    factors = tuple(
        in_layout(normal(rng, (*own, k, n), dtype), draw(layouts)) for _ in range(formula.factors)
    )
    shape = (*np.broadcast_shapes(a.shape[:-2], own), m, n)
    operands = tuple(operand(draw, rng, shape, dtype) for _ in range(formula.operands))
    return formula, a, factors, operands, shape, rng


def right(factors):
    """One right factor is given as it is, several as a tuple."""
    return factors[0] if len(factors) == 1 else factors


def each(x, count):
    return (x,) if count == 1 else x


# --- values -------------------------------------------------------------------------------------


@sampled(120, call=calls)
def test_a_formula_of_products_is_exact_within_the_bound(backend, call):
    formula, a, factors, operands, shape, _ = call
    dtype = a.dtype
    with unwritten(a, *factors, *operands):
        out, pre = nf.matmul_epilogue(
            a, right(factors), formula.ours, *operands, return_pre_activation=True, backend=backend
        )
    assert type(pre) is tuple and len(pre) == formula.factors
    sums = sums_of(a, factors, backend)
    acc = tolerance.accumulator(dtype)
    for i, (x, z) in enumerate(zip(pre, sums, strict=True)):
        check_array(f"sums[{i}]", x, stored(z, acc, backend), acc)
    made, wide = formula.epilogue(), widened(operands, dtype)
    found = run_of(made, leaves_of(made, sums, wide), dtype, backend)["out_0"]
    (exact,), _ = oracle.slopes(formula.exact, *(x.value for x in (*sums, *wide)))
    wanted = whole(exactly(exact, found), shape)
    check_array("out", out, stored(wanted, dtype, backend), dtype)
    alone = nf.matmul_epilogue(a, right(factors), formula.ours, *operands, backend=backend)
    assert (bits(alone) == bits(out)).all()


@sampled(120, call=calls, layout=layouts, data=st.data())
def test_gradients_of_a_formula_are_exact_within_the_bound(backend, call, layout, data):
    formula, a, factors, operands, shape, rng = call
    dtype, count = a.dtype, formula.factors
    grad = in_layout(normal(rng, shape, dtype), layout)
    given = a, right(factors), formula.ours, *operands
    pre, sums = None, sums_of(a, factors, backend)
    if data.draw(st.booleans()):
        _, pre = nf.matmul_epilogue(*given, return_pre_activation=True, backend=backend)
        if data.draw(st.booleans()):
            pre = tuple(x.astype(dtype) for x in pre)
        sums = [Running.of(x) for x in pre]
    names = ("a", "b", *range(formula.operands))
    needs = None
    if data.draw(st.booleans()):
        needs = tuple(name for name in names if data.draw(st.booleans()))
    with unwritten(grad, a, *factors, *operands, *(pre or ())):
        got = nf.matmul_epilogue_bwd(grad, *given, pre_activation=pre, needs=needs, backend=backend)
    found = gradients(formula, (grad,), sums, widened(operands, dtype), dtype, backend)
    slopes = [whole(g, shape) for g in found[:count]]
    d_a, d_b = gradient_of_factors([(a, factors, slopes)], dtype, backend)
    needs = names if needs is None else needs
    if "a" in needs:
        check_array("d_a", got.d_a, d_a, dtype)
    else:
        assert got.d_a is None
    assert (type(got.d_b) is tuple) == (count > 1)
    for i, x in enumerate(each(got.d_b, count)):
        if "b" in needs:
            check_array(f"d_b[{i}]", x, d_b[i], dtype)
        else:
            assert x is None
    assert type(got.d_operands) is tuple
    rest = [whole(g, shape) for g in found[count:]]
    check_operands(got.d_operands, operands, rest, dtype, backend, needs)


def tangents(rng, draw, operands, dtype):
    found = []
    for x in operands:
        if type(x) in (int, float):
            found.append(draw(st.sampled_from((None, 0.5, -2))))
        else:
            there = draw(st.booleans())
            found.append(normal(rng, np.shape(x), dtype) if there else None)
    return tuple(found)


@sampled(100, call=calls, data=st.data())
def test_forward_mode_of_a_formula_is_exact_within_the_bound(backend, call, data):
    formula, a, factors, operands, shape, rng = call
    dtype = a.dtype
    a_dot, *b_dots = tangents(rng, data.draw, (a, *factors), dtype)
    dots = tangents(rng, data.draw, operands, dtype)
    given = a, right(factors), formula.ours
    b_dot = right(b_dots) if any(x is not None for x in b_dots) else None
    with unwritten(a, *factors, *operands, a_dot, *b_dots, *dots):
        got = nf.matmul_epilogue_jvp(*given, operands, a_dot, b_dot, dots, backend=backend)
    plain = nf.matmul_epilogue(*given, *operands, backend=backend)
    assert (bits(got.out) == bits(plain)).all()

    sums, wide = sums_of(a, factors, backend), widened(operands, dtype)
    moving = moved_sums(a, factors, a_dot, b_dots, backend)
    every = [*moving, *(None if x is None else widened((x,), dtype)[0] for x in dots)]
    made = formula.epilogue()
    leaves = leaves_of(made, sums, wide)
    there = {x: dot for x, dot in zip(made.inputs, every, strict=True) if dot is not None}
    leaves |= {f"{name}_dot": dot for name, dot in there.items()}
    found = run_of(made.tangent(tuple(there)), leaves, dtype, backend)["out_0_dot"]
    _, (slopes,) = oracle.slopes(formula.exact, *(x.value for x in (*sums, *wide)))
    exact = np.zeros(shape, oracle.LONG)
    for slope, dot in zip(slopes, every, strict=True):
        exact = exact + (0 if dot is None else slope * dot.value)
    check_array("out_dot", got.out_dot, stored(exactly(exact, found), dtype, backend), dtype)


@st.composite
def elements(draw, backend):
    """(formula, operands of it, their joint shape, a random generator)."""
    formula = draw(st.sampled_from(ELEMENTS))
    dtype, rng = DTYPES[draw(dtypes(backend))], np.random.default_rng(draw(seeds))
    forms = st.one_of(
        st.tuples(sizes),
        st.tuples(sizes, sizes),
        st.tuples(st.integers(0, 3), sizes, st.sampled_from((1, 5, 17))),
        st.just(()),
    )
    shape = draw(forms)
    operands: list[Any] = []
    for _ in range(formula.operands):
        own = tuple(length if draw(st.integers(0, 3)) else 1 for length in shape)
        own = own[draw(st.sampled_from((0, 0, 0, len(own)))) :]
        x = normal(rng, own, dtype)
        kind = draw(st.sampled_from(("array", "array", "array", "number")))
        if kind == "number" and operands:
            operands.append(draw(st.sampled_from(NUMBERS)))
        else:
            operands.append(in_layout(x, draw(layouts)) if own else x)
    if formula.ours is adam:  # weights of a mean
        operands[5:] = [0.75, 0.5]
    return formula, tuple(operands), np.broadcast_shapes(*map(np.shape, operands)), rng


@sampled(160, call=elements, layout=layouts, data=st.data())
def test_elementwise_is_exact_within_the_bound_both_ways(backend, call, layout, data):
    formula, operands, shape, rng = call
    dtype = next(x.dtype for x in operands if hasattr(x, "dtype"))
    with unwritten(*operands):
        out = nf.elementwise(formula.ours, *operands, backend=backend)
    wide, made = widened(operands, dtype), formula.epilogue()
    results = len(made.results)
    found = run_of(made, leaves_of(made, (), wide), dtype, backend)
    exact, _ = oracle.slopes(formula.exact, *(x.value for x in wide))
    assert (type(out) is tuple) == (results > 1)
    for i, x in enumerate(each(out, results)):
        wanted = whole(exactly(exact[i], found[f"out_{i}"]), shape)
        check_array(f"out[{i}]", x, stored(wanted, dtype, backend), dtype)

    grads = [normal(rng, shape, dtype) for _ in range(results)]
    grads = [in_layout(g, layout) if shape else g for g in grads]
    if results > 1:
        grads = [g if data.draw(st.booleans()) else None for g in grads]
    needs = None
    if data.draw(st.booleans()):
        needs = tuple(i for i in range(formula.operands) if data.draw(st.booleans()))
    given = tuple(grads) if results > 1 else grads[0]
    with unwritten(*grads, *operands):
        got = nf.elementwise_bwd(given, formula.ours, *operands, needs=needs, backend=backend)
    assert type(got) is tuple
    slopes = [whole(g, shape) for g in gradients(formula, grads, (), wide, dtype, backend)]
    check_operands(got, operands, slopes, dtype, backend, needs)


# --- the gated layer ----------------------------------------------------------------------------


@st.composite
def layers(draw, backend):
    """(a, both weights, both biases, the result's shape, a random generator)."""
    dtype = DTYPES[draw(dtypes(backend))]
    m, n, k = draw(sizes), draw(sizes), draw(st.sampled_from(DEPTHS))
    rng = np.random.default_rng(draw(seeds))
    batch = draw(st.sampled_from(BATCHES))
    if int(np.prod(batch)) > 1:
        m, n = min(m, 33), min(n, 33)
    own = draw(st.sampled_from((batch, ())))
    a = in_layout(normal(rng, (*batch, m, k), dtype, max(1, k) ** -0.5), draw(layouts))
    weights = [in_layout(normal(rng, (*own, k, n), dtype), draw(layouts)) for _ in range(2)]
    kind = draw(st.sampled_from(("apart", "halves", "alternate")))
    if kind != "apart":
        both = normal(rng, (*own, k, 2 * n), dtype)
        weights = [both[..., :n], both[..., n:]]
        if kind == "alternate":
            weights = [both[..., ::2], both[..., 1::2]][:: draw(st.sampled_from((1, -1)))]
    forms = (None, (n,), (1, n), (*batch, 1, n), (m, 1))
    biases = []
    for _ in range(2):
        form = draw(st.sampled_from(forms))
        biases.append(None if form is None else in_layout(normal(rng, form, dtype), draw(layouts)))
    return a, tuple(weights), tuple(biases), (*batch, m, n), rng


def layer(activation):
    return epilogues.gated_layer(nf.activations()[activation].curve)


def curves(activation, z):
    return [f[activation](z) for f in (oracle.VALUE, oracle.SLOPE, oracle.SECOND)]


def saved_sums(data, backend, call, a, weights, biases):
    """A saved pair, or None, and what the sums are then."""
    if not data.draw(st.booleans()):
        return None, sums_of(a, weights, backend, biases)
    pre = nf.matmul_activation_mul(*call, return_pre_activation=True, backend=backend)[1]
    return pre, [Running.of(x) for x in pre]


@sampled(100, call=layers, activation=activations)
def test_a_gated_layer_is_exact_within_the_bound(backend, call, activation):
    a, weights, biases, shape, _ = call
    dtype, given = a.dtype, (a, *weights, *biases, activation)
    with unwritten(a, *weights, *biases):
        out, pre = nf.matmul_activation_mul(*given, return_pre_activation=True, backend=backend)
    sums = [whole(z, shape) for z in sums_of(a, weights, backend, biases)]
    for name, x, z in zip(("gate", "up"), pre, sums, strict=True):
        check_array(f"pre_{name}", x, stored(z, dtype, backend), dtype)
    z, w = sums
    made = layer(activation)
    found = run_of(made, leaves_of(made, sums, ()), dtype, backend)["out_0"]
    exact = exactly(oracle.VALUE[activation](z.value) * w.value, found)
    check_array("out", out, stored(exact, dtype, backend), dtype)
    alone = nf.matmul_activation_mul(*given, backend=backend)
    assert (bits(alone) == bits(out)).all()


@sampled(100, call=layers, activation=activations, layout=layouts, data=st.data())
def test_gradients_of_a_gated_layer_are_exact_within_the_bound(
    backend, call, activation, layout, data
):
    a, weights, biases, shape, rng = call
    dtype, given = a.dtype, (a, *weights, *biases, activation)
    grad = in_layout(normal(rng, shape, dtype), layout)
    pre, sums = saved_sums(data, backend, given, a, weights, biases)
    names = ("a", "b_gate", "b_up", "bias_gate", "bias_up")
    needs = tuple(name for name in names if data.draw(st.integers(0, 3)))
    sum_batch = data.draw(st.booleans())
    with unwritten(grad, a, *weights, *biases, *(pre or ())):
        got = nf.matmul_activation_mul_bwd(
            grad, *given, pre_activation=pre, needs=needs, sum_batch=sum_batch, backend=backend
        )
    made, g = layer(activation), Running.of(grad)
    leaves = leaves_of(made, sums, ()) | {"grad": g}
    found = run_of(made.backward(), leaves, dtype, backend)
    z, w = (x.value for x in sums)
    value, slope, _ = curves(activation, z)
    exact = (g.value * w * slope, g.value * value)
    slopes = [whole(exactly(x, found.get(f"d_z_{i}")), shape) for i, x in enumerate(exact)]
    d_a, d_b = gradient_of_factors([(a, weights, slopes)], dtype, backend, sum_batch)
    wanted = dict(zip(names, (d_a, *d_b), strict=False))
    for name, bias, x in zip(names[3:], biases, slopes, strict=True):
        if bias is not None:
            wanted[name] = stored(tolerance.summed(x, bias.shape, dtype), dtype, backend)
    for name, x in zip(names, got, strict=True):
        if name in needs and name in wanted:
            check_array(f"d_{name}", x, wanted[name], dtype)
        else:
            assert x is None


@sampled(80, call=layers, activation=activations, data=st.data())
def test_forward_mode_of_a_gated_layer_is_exact_within_the_bound(backend, call, activation, data):
    a, weights, biases, shape, rng = call
    dtype, given = a.dtype, (a, *weights, *biases)
    dots = [
        normal(rng, x.shape, dtype) if x is not None and data.draw(st.booleans()) else None
        for x in given
    ]
    with unwritten(*given, *dots):
        got = nf.matmul_activation_mul_jvp(*given, *dots, activation, backend=backend)
    plain = nf.matmul_activation_mul(*given, activation, backend=backend)
    assert (bits(got.out) == bits(plain)).all()
    sums = sums_of(a, weights, backend, biases)
    moving = moved_sums(a, weights, dots[0], dots[1:3], backend, dots[3:])
    made = layer(activation)
    there = {f"z_{i}": dot for i, dot in enumerate(moving) if dot is not None}
    leaves = leaves_of(made, sums, ()) | {f"{name}_dot": dot for name, dot in there.items()}
    found = run_of(made.tangent(tuple(there)), leaves, dtype, backend)["out_0_dot"]
    z, w = (x.value for x in sums)
    value, slope, _ = curves(activation, z)
    t, s = (0 if dot is None else dot.value for dot in moving)
    exact = np.broadcast_to(w * slope * t + value * s, shape)
    wanted = whole(exactly(exact, found), shape)
    check_array("out_dot", got.out_dot, stored(wanted, dtype, backend), dtype)


@sampled(100, call=layers, activation=activations, data=st.data())
def test_double_backward_of_a_gated_layer_is_exact_within_the_bound(
    backend, call, activation, data
):
    a, weights, biases, shape, rng = call
    dtype, operands = a.dtype, (a, *weights, *biases)
    given = (*operands, activation)
    grad = normal(rng, shape, dtype)
    c = [
        normal(rng, x.shape, dtype) if x is not None and data.draw(st.booleans()) else None
        for x in operands
    ]
    pre, sums = saved_sums(data, backend, given, a, weights, biases)
    names = ("grad", "a", "b_gate", "b_up", "bias_gate", "bias_up")
    needs = tuple(name for name in names if data.draw(st.integers(0, 3)))
    with unwritten(grad, *operands, *c, *(pre or ())):
        got = nf.matmul_activation_mul_double_bwd(
            *c, grad, *given, pre_activation=pre, needs=needs, backend=backend
        )
    moving = moved_sums(a, weights, c[0], c[1:3], backend, c[3:])
    made = layer(activation).backward()
    there = {f"d_z_{i}": f"t_{i}" for i, t in enumerate(moving) if t is not None}
    to = {"grad": "d_grad", "z_0": "q_0", "z_1": "q_1"}
    g = Running.of(grad)
    leaves = leaves_of(layer(activation), sums, ()) | {"grad": g}
    leaves |= {f"t_{i}": t for i, t in enumerate(moving) if t is not None}
    found = run_of(made, leaves, dtype, backend)
    found |= run_of(made.pulled_back(there, to), leaves, dtype, backend)
    z, w = (x.value for x in sums)
    value, slope, second = curves(activation, z)
    t, s = (0 if x is None else x.value for x in moving)
    exact = {
        "d_grad": w * slope * t + value * s,
        "q_0": g.value * (w * second * t + slope * s),
        "q_1": g.value * slope * t,
        "d_z_0": g.value * w * slope,
        "d_z_1": g.value * value,
    }
    run = {name: whole(exactly(x, found.get(name)), shape) for name, x in exact.items()}
    wanted = {"grad": stored(run["d_grad"], dtype, backend)}
    q, d = (run["q_0"], run["q_1"]), (run["d_z_0"], run["d_z_1"])
    none = [np.zeros_like(x) for x in (a, *weights)]
    u, *v = (x if there is None else there for x, there in zip(none, c, strict=False))
    d_a, d_b = gradient_of_factors([(a, weights, q), (u, v, d)], dtype, backend)
    wanted |= dict(zip(names[1:4], (d_a, *d_b), strict=True))
    for name, bias, x in zip(names[4:], biases, q, strict=True):
        if bias is not None:
            wanted[name] = stored(tolerance.summed(x, bias.shape, dtype), dtype, backend)
    for name, x in zip(names, got, strict=True):
        if name in needs and name in wanted:
            check_array(f"d_{name}", x, wanted[name], dtype)
        else:
            assert x is None


@pytest.mark.host
@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", [x for x in ACTIVATIONS if x not in ("none", "relu")])
def test_double_backward_of_a_gated_layer_is_the_derivative_of_backward(backend, activation):
    rng = np.random.default_rng(61)
    shapes = (5, 3), (5, 4), (4, 3), (4, 3), (3,), (3,)
    at = [rng.standard_normal(shape) for shape in shapes]  # grad and the operands
    c = [rng.standard_normal(x.shape) for x in at[1:]]
    directions = [rng.standard_normal(x.shape) for x in at]

    def loss(step):
        here = [x + step * d for x, d in zip(at, directions, strict=True)]
        got = nf.matmul_activation_mul_bwd(*here, activation, backend=backend)
        return sum(np.sum(x * y) for x, y in zip(c, got, strict=True))

    h = 1e-3
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    got = nf.matmul_activation_mul_double_bwd(*c, *at, activation, backend=backend)
    expected = sum(np.sum(g * d) for g, d in zip(got, directions, strict=True))
    assert slope == pytest.approx(expected, rel=1e-8, abs=1e-7)


@pytest.mark.host
@pytest.mark.dtype("float64")
@pytest.mark.parametrize("formula", PRODUCTS, ids=by_name)
def test_gradients_of_a_formula_are_what_a_small_step_says(backend, formula):
    rng = np.random.default_rng(62)
    a, factors = rng.standard_normal((5, 4)), rng.standard_normal((formula.factors, 4, 3))
    forms = (3,), (5, 1), (5, 3), ()
    operands = [np.asarray(rng.standard_normal(forms[i])) for i in range(formula.operands)]
    if formula.ours is leaky:
        operands = [np.full(3, -20.0)]  # (the formula has a jump)
    at = [a, *factors, *operands]
    grad = rng.standard_normal((5, 3))
    directions = [rng.standard_normal(x.shape) for x in at]

    def loss(step):
        x, *rest = (x + step * d for x, d in zip(at, directions, strict=True))
        b = right(tuple(rest[: formula.factors]))
        rest = rest[formula.factors :]
        return np.sum(grad * nf.matmul_epilogue(x, b, formula.ours, *rest, backend=backend))

    h = 1e-3
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    b = right(tuple(factors))
    got = nf.matmul_epilogue_bwd(grad, a, b, formula.ours, *operands, backend=backend)
    found = (got.d_a, *each(got.d_b, formula.factors), *got.d_operands)
    expected = sum(np.sum(g * d) for g, d in zip(found, directions, strict=True))
    assert slope == pytest.approx(expected, rel=1e-7, abs=1e-7)
    dots = directions[0], right(tuple(directions[1 : 1 + formula.factors]))
    rest = directions[1 + formula.factors :]
    moved = nf.matmul_epilogue_jvp(a, b, formula.ours, operands, *dots, rest, backend=backend)
    assert np.sum(grad * moved.out_dot) == pytest.approx(expected, rel=1e-12)


# --- bit for bit --------------------------------------------------------------------------------
views = st.sampled_from([x for x in LAYOUTS if x != "zero_stride"])


def same(x, y):
    return all(
        one is two is None or (bits(np.asarray(one)) == bits(np.asarray(two))).all()
        for one, two in zip(flat(x), flat(y), strict=True)
    )


def flat(x):
    """The arrays of a nest of tuples, None included."""
    return [y for part in x for y in flat(part)] if isinstance(x, tuple) else [x]


def laid(draw, x):
    """The same values in another layout; what is no array, or has no axis, as it is."""
    return in_layout(np.array(x, order="C"), draw(views)) if np.ndim(x) else x


def contiguous(x):
    return np.array(x, order="C") if np.ndim(x) else x


@sampled(80, call=calls, data=st.data())
def test_a_view_gives_what_its_copy_gives(backend, call, data):
    formula, a, factors, operands, shape, rng = call
    every = (normal(rng, shape, a.dtype), a, *factors, *operands)
    copies = [contiguous(x) for x in every]
    others = [laid(data.draw, x) for x in every]
    count = formula.factors

    def both(grad, a, *rest):
        given = a, right(tuple(rest[:count])), formula.ours, *rest[count:]
        out = nf.matmul_epilogue(*given, backend=backend)
        first = tier(backend)
        return out, nf.matmul_epilogue_bwd(grad, *given, backend=backend), first, tier(backend)

    one, two = both(*copies), both(*others)
    assert one[2] != two[2] or same(one[:1], two[:1])
    if one[3] == two[3] and "axes" not in traits(backend).order:
        assert same(one[1], two[1])


@sampled(60, call=layers, activation=activations, data=st.data())
def test_a_view_gives_what_its_copy_gives_to_a_gated_layer(backend, call, activation, data):
    a, weights, biases, shape, rng = call
    every = (normal(rng, shape, a.dtype), a, *weights, *biases)
    copies = [contiguous(x) if x is not None else None for x in every]
    others = [laid(data.draw, x) if x is not None else None for x in every]

    def both(grad, *given):
        out = nf.matmul_activation_mul(*given, activation, backend=backend)
        first = tier(backend)
        d = nf.matmul_activation_mul_bwd(grad, *given, activation, backend=backend)
        return out, d, first, tier(backend)

    one, two, three = both(*copies), both(*others), both(every[0], *every[1:])
    for other in (two, three):
        assert one[2] != other[2] or same(one[:1], other[:1])
        if one[3] == other[3] and "axes" not in traits(backend).order:
            assert same(one[1], other[1])


@sampled(60, call=elements, data=st.data())
def test_a_view_gives_what_its_copy_gives_element_by_element(backend, call, data):
    formula, operands, shape, rng = call
    dtype = next(x.dtype for x in operands if hasattr(x, "dtype"))
    grads = tuple(normal(rng, shape, dtype) for _ in formula.epilogue().results)

    def both(operands, grads):
        out = nf.elementwise(formula.ours, *operands, backend=backend)
        first, grads = tier(backend), grads if len(grads) > 1 else grads[0]
        d = nf.elementwise_bwd(grads, formula.ours, *operands, backend=backend)
        return out, d, first, tier(backend)

    one = both([contiguous(x) for x in operands], grads)
    two = both([laid(data.draw, x) for x in operands], tuple(laid(data.draw, g) for g in grads))
    assert one[2] != two[2] or same((one[0],), (two[0],))
    if one[3] == two[3] and "axes" not in traits(backend).order:
        assert same(one[1], two[1])


@sampled(40, call=calls, data=st.data())
def test_a_part_of_the_gradients_is_what_it_is_in_all_of_them(backend, call, data):
    formula, a, factors, operands, shape, rng = call
    grad = normal(rng, shape, a.dtype)
    given = grad, a, right(factors), formula.ours, *operands
    needs = [name for name in ("a", "b", *range(len(operands))) if data.draw(st.booleans())]
    full = nf.matmul_epilogue_bwd(*given, backend=backend)
    part = nf.matmul_epilogue_bwd(*given, needs=needs, backend=backend)
    assert part.d_a is None if "a" not in needs else same((part.d_a,), (full.d_a,))
    if "b" in needs:
        assert same((part.d_b,), (full.d_b,))
    else:
        assert flat(part.d_b) == [None] * formula.factors
    for i, (x, y) in enumerate(zip(part.d_operands, full.d_operands, strict=True)):
        assert same((x,), (y,)) if i in needs else x is None


@sampled(60, call=calls)
def test_saved_sums_give_what_computing_them_again_gives(backend, call):
    formula, a, factors, operands, shape, rng = call
    given = a, right(factors), formula.ours, *operands
    grad = normal(rng, shape, a.dtype)
    _, pre = nf.matmul_epilogue(*given, return_pre_activation=True, backend=backend)
    again = nf.matmul_epilogue_bwd(grad, *given, backend=backend)
    first = tier(backend)
    got = nf.matmul_epilogue_bwd(grad, *given, pre_activation=pre, backend=backend)
    exact = traits(backend).intermediate in (None, tolerance.accumulator(a.dtype).name)
    if exact and first == tier(backend) and "saved" not in traits(backend).order:
        assert same(got, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["b", "a", "neither"])
def test_a_batch_gives_what_a_loop_gives(backend, shared, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(63)
    count, m, k, n = (2, 17, 9, 3) if SIMULATED else (3, 17, 37, 21)
    a = normal(rng, (m, k) if shared == "a" else (count, m, k), dtype, k**-0.5)
    b = normal(rng, (k, n) if shared == "b" else (count, k, n), dtype)
    bias, scale = normal(rng, (count, 1, n), dtype), normal(rng, (count, m, 1), dtype)
    mask, grad = normal(rng, (count, m, n), dtype), normal(rng, (count, m, n), dtype)
    out = nf.matmul_epilogue(a, b, masked_tanh, bias, scale, mask, backend=backend)
    got = nf.matmul_epilogue_bwd(grad, a, b, masked_tanh, bias, scale, mask, backend=backend)
    for i in range(count):
        mine = (
            a if shared == "a" else a[i], b if shared == "b" else b[i], masked_tanh,
            bias[i], scale[i], mask[i],
        )  # fmt: skip
        assert same((nf.matmul_epilogue(*mine, backend=backend),), (out[i],))
        member = nf.matmul_epilogue_bwd(grad[i], *mine, backend=backend)
        if shared != "a":
            assert same((member.d_a,), (got.d_a[i],))
        if shared != "b":
            assert same((member.d_b,), (got.d_b[i],))
        assert same(member.d_operands, tuple(x[i] for x in got.d_operands))


@pytest.mark.dtype("float32")
@pytest.mark.parametrize("view", ["halves", "alternate columns", "rows of the transposed"])
def test_weights_that_are_views_of_one_array_give_what_copies_give(backend, view):
    rng = np.random.default_rng(64)
    m, k, n = (5, 7, 9) if SIMULATED else (41, 67, 45)
    both = normal(rng, (k, 2 * n), np.float32)
    weights = {
        "halves": (both[:, :n], both[:, n:]),
        "alternate columns": (both[:, ::2], both[:, 1::2]),
        "rows of the transposed": tuple(np.ascontiguousarray(both.T).reshape(2, n, k).mT),
    }[view]
    a, grad = normal(rng, (m, k), np.float32), normal(rng, (m, n), np.float32)
    copies = [np.ascontiguousarray(x) for x in weights]
    one = nf.matmul_activation_mul(a, *weights, backend=backend)
    first = tier(backend)
    two = nf.matmul_activation_mul(a, *copies, backend=backend)
    assert first != tier(backend) or same((one,), (two,))
    one = nf.matmul_activation_mul_bwd(grad, a, *weights, backend=backend)
    first = tier(backend)
    two = nf.matmul_activation_mul_bwd(grad, a, *copies, backend=backend)
    assert first != tier(backend) or same(one, two)


# --- shapes -------------------------------------------------------------------------------------


@pytest.mark.dtype("float64")
@pytest.mark.parametrize(
    "a_shape, b_shape",
    [((4,), (4, 3)), ((5, 4), (4,)), ((4,), (4,)), ((2, 5, 4), (4,)), ((4,), (2, 4, 3))], ids=str
)  # fmt: skip
def test_one_dimensional_factors_are_treated_as_by_matmul(backend, a_shape, b_shape):
    rng = np.random.default_rng(65)
    a, b, c = (rng.standard_normal(shape) for shape in (a_shape, b_shape, b_shape))
    shape = np.matmul(a, b).shape
    full, grad = rng.standard_normal(shape), rng.standard_normal(shape)
    for operand in (full, 0.5, np.float64(0.5), full[..., :1] if shape else full):
        given = a, (b, c), gate_and_shift, operand
        out, pre = nf.matmul_epilogue(*given, return_pre_activation=True, backend=backend)
        assert out.shape == pre[0].shape == pre[1].shape == shape
        z, w = oracle.wide(a) @ oracle.wide(b), oracle.wide(a) @ oracle.wide(c)
        exact = oracle.VALUE["gelu"](np.asarray(z)) * w + operand
        np.testing.assert_allclose(out, exact.astype(float), rtol=1e-12, atol=1e-13)
        for saved in (None, pre):
            got = nf.matmul_epilogue_bwd(grad, *given, pre_activation=saved, backend=backend)
            assert got.d_a.shape == a_shape and got.d_b[1].shape == b_shape
            assert got.d_operands[0].shape == np.shape(operand)
            total = oracle.sum_to(grad, np.shape(operand))
            np.testing.assert_allclose(got.d_operands[0], total, rtol=1e-12, atol=1e-13)
            # <gradients, step> = <grad, tangent>
            moved = nf.matmul_epilogue_jvp(*given[:3], (operand,), a, (b, c), backend=backend)
            inner = np.sum(got.d_a * a) + np.sum(got.d_b[0] * b) + np.sum(got.d_b[1] * c)
            assert np.sum(grad * moved.out_dot) == pytest.approx(inner, rel=1e-11)
    bias = rng.standard_normal(shape[-1:] if len(b_shape) > 1 else (1,))
    if len(b_shape) > 1 or not shape:
        bias = rng.standard_normal(shape[-1:])
        layer = nf.matmul_activation_mul(a, b, c, bias, None, "gelu", backend=backend)
        exact = oracle.VALUE["gelu"](np.asarray(z + bias)) * w
        np.testing.assert_allclose(layer, exact.astype(float), rtol=1e-12, atol=1e-13)
        got = nf.matmul_activation_mul_bwd(grad, a, b, c, bias, None, "gelu", backend=backend)
        assert [x.shape for x in got[:4]] == [a_shape, b_shape, b_shape, bias.shape]


@pytest.mark.usefixtures("unrecorded")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (5, 0, 4), (5, 3, 0), (0, 0, 0), (0, 3, 0), (5, 0, 0)], ids=str
)
def test_axes_may_have_length_zero(backend, shape, dtype):
    m, n, k = shape
    dtype, rng = DTYPES[dtype], np.random.default_rng(66)
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    row, column, grad = (normal(rng, x, dtype) for x in ((n,), (m, 1), (m, n)))
    given = a, b, ten_operations, row, column
    out, (pre,) = nf.matmul_epilogue(*given, return_pre_activation=True, backend=backend)
    assert out.shape == pre.shape == (m, n) and not pre.any()
    for number in (False, True):
        rest = (0.5, column) if number else (row, column)
        got = nf.matmul_epilogue_bwd(grad, a, b, ten_operations, *rest, backend=backend)
        wanted = [a.shape, b.shape, np.shape(rest[0]), column.shape]
        assert [x.shape for x in (*got[:2], *got.d_operands)] == wanted
        if not grad.size:
            assert not any(x.any() for x in (*got[:2], *got.d_operands))
        if not k:
            assert not got.d_a.any() and not got.d_b.any()
    moved = nf.matmul_epilogue_jvp(a, b, ten_operations, (row, column), a, b, backend=backend)
    assert moved.out_dot.shape == (m, n) and (k or not moved.out_dot.any())
    gated = nf.matmul_activation_mul(a, b, b, row, None, backend=backend)
    assert gated.shape == (m, n)
    got = nf.matmul_activation_mul_bwd(grad, a, b, b, row, row, backend=backend)
    assert [x.shape for x in got] == [a.shape, b.shape, b.shape, row.shape, row.shape]
    if not grad.size:
        assert not any(x.any() for x in got)
    every = a, b, b, row, row
    got = nf.matmul_activation_mul_double_bwd(*every, grad, *every, backend=backend)
    assert [x.shape for x in got] == [grad.shape, *(x.shape for x in every)]
    out = nf.elementwise(product_of_three, grad, row, 2.0, backend=backend)
    assert out.shape == (m, n)
    got = nf.elementwise_bwd(grad, product_of_three, grad, row, 2.0, backend=backend)
    assert [x.shape for x in got] == [(m, n), (n,), ()]
    assert grad.size or not any(x.any() for x in got)


@pytest.mark.dtype("float32")
@pytest.mark.usefixtures("unrecorded")
def test_a_batch_of_length_zero_sums_to_zero(backend):
    a, b = np.ones((0, 3, 4), np.float32), np.ones((4, 5), np.float32)
    grad, row = np.ones((0, 3, 5), np.float32), np.ones(5, np.float32)
    got = nf.matmul_epilogue_bwd(grad, a, b, ten_operations, row, 0.5, backend=backend)
    assert got.d_a.shape == a.shape
    assert not got.d_b.any() and not any(x.any() for x in got.d_operands)
    got = nf.matmul_activation_mul_bwd(grad, a, b, b, row, None, backend=backend)
    assert not got.d_b_gate.any() and not got.d_b_up.any() and not got.d_bias_gate.any()


@pytest.mark.parametrize("m,n,k", [(1, 1, 2001), (2001, 1, 2), (1, 2001, 2), (200, 201, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_thin_deep_and_shallow(backend, m, n, k, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(m + n + k)
    formula = PRODUCTS[0]
    a, b = normal(rng, (m, k), dtype, max(k, 1) ** -0.5), normal(rng, (k, n), dtype)
    operands = [normal(rng, shape, dtype) for shape in ((n,), (m, 1), (m, n))]
    grad = normal(rng, (m, n), dtype)
    got = nf.matmul_epilogue_bwd(grad, a, b, formula.ours, *operands, backend=backend)
    sums = sums_of(a, (b,), backend)
    found = gradients(formula, (grad,), sums, widened(operands, dtype), dtype, backend)
    d_a, d_b = gradient_of_factors([(a, (b,), found[:1])], dtype, backend)
    check_array("d_a", got.d_a, d_a, dtype)
    check_array("d_b", got.d_b, d_b[0], dtype)
    check_operands(got.d_operands, operands, found[1:], dtype, backend)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3)], ids=str)
def test_an_operand_of_any_shape_has_its_gradient(backend, batch):
    """Whatever axes of the result it lacks, in a product and without one."""
    rng = np.random.default_rng(71)
    for m, n in (
        ((1, 3), (2, 1), (2, 3)) if SIMULATED else ((1, 1), (1, 3), (2, 1), (2, 3), (9, 40))
    ):
        shape = (*batch, m, n)
        a, grad = rng.standard_normal((*batch, m, 5)), rng.standard_normal(shape)
        own = rng.standard_normal((*batch, 5, n))
        forms = set()
        for kept in itertools.product((False, True), repeat=len(shape)):
            form = tuple(length if k else 1 for k, length in zip(kept, shape, strict=True))
            forms |= {form[axis:] for axis in range(len(form) + 1)}
        for form, b in itertools.product(sorted(forms), (own, own.reshape(-1, 5, n)[0])):
            x = rng.standard_normal(form)
            wanted = oracle.sum_to(grad * np.tanh(a @ b), form)
            for _ in range(2):  # (once more, in memory that has been used)
                got = nf.matmul_epilogue_bwd(
                    grad, a, b, lambda z, x: ex.tanh(z) * x, x, needs=(0,), backend=backend
                ).d_operands[0]
                np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)
                _, got = nf.elementwise_bwd(
                    grad, lambda y, x: y * x, grad, x, needs=(1,), backend=backend
                )
                np.testing.assert_allclose(
                    got, oracle.sum_to(grad * grad, form), rtol=1e-11, atol=1e-12
                )


# --- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (7, 13, 5), (33, 17, 29), (16, 64, 33)])
def test_output_fences_are_untouched(backend, m, n, k, strided, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(67)
    acc = tolerance.accumulator(dtype)
    a, b, c = (normal(rng, shape, dtype) for shape in ((m, k), (k, n), (k, n)))
    row, column, grad = (normal(rng, x, dtype) for x in ((n,), (m, 1), (m, n)))

    def fences(*shapes, dtypes=None):
        dtypes = dtypes or [dtype] * len(shapes)
        return [Fenced(x, d, strided) for x, d in zip(shapes, dtypes, strict=True)]

    given = a, b, ten_operations, row, column
    (out,) = fences((m, n))
    wanted = nf.matmul_epilogue(*given, backend=backend)
    got = nf.matmul_epilogue(*given, out=out.array, backend=backend)
    assert got is out.array and same((got,), (wanted,))
    out.assert_untouched()
    outs = fences(a.shape, b.shape, c.shape, row.shape, column.shape)
    d_a, d_b, d_c, d_row, d_column = (x.array for x in outs)
    given = a, (b, c), lambda z, w, x, y: ex.tanh(z) * w * x + y, row, column
    wanted = nf.matmul_epilogue_bwd(grad, *given, backend=backend)
    got = nf.matmul_epilogue_bwd(
        grad, *given, out=(d_a, (d_b, None), (None, d_column)), backend=backend
    )
    assert got.d_a is d_a and got.d_b[0] is d_b and got.d_operands[1] is d_column
    assert same(got, wanted)
    got = nf.matmul_epilogue_bwd(
        grad, *given, out=(None, (None, d_c), (d_row, None)), backend=backend
    )
    assert got.d_b[1] is d_c and got.d_operands[0] is d_row and same(got, wanted)
    for x in outs:
        x.assert_untouched()

    every = a, b, c, row, row
    outs = fences((m, n))
    wanted, _ = nf.matmul_activation_mul(*every, return_pre_activation=True, backend=backend)
    got = nf.matmul_activation_mul(*every, out=outs[0].array, backend=backend)
    assert got is outs[0].array and same((got,), (wanted,))
    outs += fences(*(x.shape for x in every))
    wanted = nf.matmul_activation_mul_bwd(grad, *every, backend=backend)
    got = nf.matmul_activation_mul_bwd(
        grad, *every, out=tuple(x.array for x in outs[1:]), backend=backend
    )
    assert all(x is y.array for x, y in zip(got, outs[1:], strict=True)) and same(got, wanted)

    outs += fences((m, n), (m, n))
    wanted = nf.elementwise(smooth_l1, grad, row, 2.0, backend=backend)
    got = nf.elementwise(
        smooth_l1, grad, row, 2.0, out=(outs[-2].array, outs[-1].array), backend=backend
    )
    assert got[0] is outs[-2].array and got[1] is outs[-1].array and same(got, wanted)
    outs += fences(grad.shape, row.shape, (), dtypes=[dtype, dtype, acc])
    wanted = nf.elementwise_bwd((grad, None), smooth_l1, grad, row, 2.0, backend=backend)
    got = nf.elementwise_bwd(
        (grad, None), smooth_l1, grad, row, 2.0,
        out=tuple(x.array for x in outs[-3:]), backend=backend,
    )  # fmt: skip
    assert all(x is y.array for x, y in zip(got, outs[-3:], strict=True)) and same(got, wanted)
    for x in outs:
        x.assert_untouched()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["c", "inner_sliced", "reversed", "transposed"])
def test_elementwise_may_write_over_its_operands(backend, layout, dtype):
    """The three arrays of Adam, each updated in place."""
    dtype, rng = DTYPES[dtype], np.random.default_rng(68)
    given = [normal(rng, (7, 33), dtype) for _ in range(4)]
    rest = 0.01, 0.75, 0.5
    wanted = nf.elementwise(adam, *given, *rest, backend=backend)
    p, g, m, v = (in_layout(x, layout) for x in given)
    for x in (p, m, v):
        x.flags.writeable = True
    got = nf.elementwise(adam, p, g, m, v, *rest, out=(p, m, v), backend=backend)
    assert got[0] is p and got[1] is m and got[2] is v
    assert same(got, wanted) and same((g,), (given[1],))


# --- half types, NaN, infinities, the guard -----------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_computed_in_float32_and_rounded_once(backend, dtype):
    """As in test_conformance: the rounding of a float32 result lies in an interval."""
    dtype, rng = DTYPES[dtype], np.random.default_rng(69)
    single = np.dtype(np.float32)
    m, n, k = 19, 23, 257
    a, b, c = normal(rng, (m, k), dtype, k**-0.5), *normal(rng, (2, k, n), dtype)
    row, column = normal(rng, (n,), dtype), normal(rng, (m, 1), dtype)
    formula = PRODUCTS[5]
    for factors, operands, f in (
        ((b,), (row, column), formula),
        ((b, c), (column,), PRODUCTS[1]),
    ):
        out = nf.matmul_epilogue(a, right(factors), f.ours, *operands, backend=backend)
        wide = [x.astype(single) for x in (a, *factors, *operands)]
        sums = sums_of(wide[0], wide[1 : 1 + f.factors], backend)
        rest = widened(wide[1 + f.factors :], single)
        made = f.epilogue()
        found = run_of(made, leaves_of(made, sums, rest), single, backend)["out_0"]
        (exact,), _ = oracle.slopes(f.exact, *(x.value for x in (*sums, *rest)))
        wanted, error = stored(exactly(exact, found), single, backend)
        assert (
            ((wanted - error).astype(dtype) <= out) & (out <= (wanted + error).astype(dtype))
        ).all()
        assert (out == wanted.astype(dtype)).mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row(backend, value, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(70)
    a, b, c = normal(rng, (9, 5), dtype), *normal(rng, (2, 5, 7), dtype)
    scale, grad = normal(rng, (9, 1), dtype), normal(rng, (9, 7), dtype)
    clean = nf.matmul_epilogue(a, (b, c), gate_and_shift, scale, backend=backend)
    d_clean = nf.matmul_epilogue_bwd(grad, a, (b, c), gate_and_shift, scale, backend=backend)
    layer = nf.matmul_activation_mul(a, b, c, backend=backend)
    rest = np.arange(9) != 4
    bad = a.copy()
    bad[4, 2] = value
    out = nf.matmul_epilogue(bad, (b, c), gate_and_shift, scale, backend=backend)
    assert same((out[rest],), (clean[rest],)) and not np.isfinite(out[4].astype(float)).all()
    got = nf.matmul_activation_mul(bad, b, c, backend=backend)
    assert same((got[rest],), (layer[rest],)) and not np.isfinite(got[4].astype(float)).all()
    got = nf.matmul_epilogue_bwd(grad, bad, (b, c), gate_and_shift, scale, backend=backend)
    assert same((got.d_a[rest],), (d_clean.d_a[rest],))
    # An operand with such a value: its own row and no other.
    bad = scale.copy()
    bad[4] = value
    out = nf.matmul_epilogue(a, (b, c), gate_and_shift, bad, backend=backend)
    assert same((out[rest],), (clean[rest],)) and not np.isfinite(out[4].astype(float)).any()
    x = np.array([1.0, value, 2.0], dtype)
    out = nf.elementwise(product_of_three, x, np.ones(1, dtype), 2.0, backend=backend)
    assert same((out[[0, 2]],), (np.array([2.0, 4.0], dtype),))
    assert np.isnan(out[1]) if np.isnan(value) else out[1] == value


@pytest.mark.host
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_guard_zeroes_the_derivative_of_an_activation_alone(backend, dtype):
    dtype = DTYPES[dtype]
    one = np.ones((1, 1), dtype)
    z = np.array([[np.nan], [0.5]], dtype)
    w, grad = np.array([[2.0]], dtype), np.ones((2, 1), dtype)
    given = grad, z, (one, w), gate_and_shift, 0.0
    got = nf.matmul_epilogue_bwd(*given, needs=("a", 0), guard=True, backend=backend)
    # d_a = grad (gelu'(z) w 1 + gelu(z) 2): the slope counts as 0, the value does not
    assert np.isnan(got.d_a[0, 0]) and np.isfinite(got.d_a[1, 0]) and got.d_operands[0] == 2
    every = grad[:1], one, one, one
    bias, needs = np.array([np.nan], dtype), ("b_gate", "bias_gate", "b_up")
    for guard in (True, False):
        got = nf.matmul_activation_mul_bwd(
            *every, bias, None, needs=needs, guard=guard, backend=backend
        )
        assert np.isnan(got.d_b_gate[0, 0]) == np.isnan(got.d_bias_gate[0]) == (not guard)
        assert np.isnan(got.d_b_up[0, 0])
    out_dot = nf.matmul_activation_mul_jvp(
        one, one, one, bias, None, None, None, None, one[0], None, guard=True, backend=backend
    ).out_dot
    assert out_dot[0, 0] == 0
    x = np.array([np.nan, 0.5], dtype)
    ones = np.ones(2, dtype)
    for guard in (True, False):
        (d_x,) = nf.elementwise_bwd(ones, lambda x: GELU(x), x, guard=guard, backend=backend)
        assert np.isnan(d_x[0]) != guard and np.isfinite(d_x[1])
    # What is no activation is never guarded.
    (d_x,) = nf.elementwise_bwd(ones, lambda x: ex.exp(x) * x, x, guard=True, backend=backend)
    assert np.isnan(d_x[0]) and np.isfinite(d_x[1])
