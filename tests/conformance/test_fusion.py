"""Epilogues of a user's own, elementwise formulas and the gated layer: what every backend fulfils.

Each formula is written twice: for numfuse, and as plain NumPy in long double, whose slopes are found
by the complex step (`oracle.slopes`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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
    dtypes,
    layouts,
    on_its_own_backend,  # noqa: F401  (a fixture that every test here uses)
    rounds_grad_pre,
    sampled,
    seeds,
    sizes,
    tier,
    unrecorded,  # noqa: F401  (a fixture)
)
from tolerance import DTYPES, Running, assert_within

import numfuse as nf
from numfuse import definitions, epilogues
from numfuse import expr as ex

pytestmark = pytest.mark.kind("fused")

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


def gradient_of_factors(a, factors, slopes, dtype, backend, sum_batch=False):
    """d_a and the gradients of the right factors: (exact, bound) of each."""
    rounded = rounds_grad_pre(backend, dtype)
    if rounded:
        lost = float(tolerance.ml_dtypes.finfo(dtype).smallest_subnormal) / 2
        unit = tolerance.roundoff(dtype)
        slopes = [
            Running(g.value, g.error + unit * (np.abs(g.value) + g.error) + lost) for g in slopes
        ]

    def turned(x):
        return Running(x.value.swapaxes(-1, -2), x.error.swapaxes(-1, -2))

    def summed(pairs, shape, inner):
        exact = size = error = np.zeros(shape, oracle.LONG)
        terms = 0
        for x, y in pairs:
            value, weight, off = tolerance.product_of(x, y, dtype, backend)
            exact = exact + oracle.sum_to(value, shape)
            size, error = size + oracle.sum_to(weight, shape), error + oracle.sum_to(off, shape)
            terms += inner * max(1, value.size // max(1, exact.size)) + 1
        error = error + tolerance.gamma(terms, dtype) * (size + error)
        return exact, tolerance.stored(exact, error, dtype, backend)

    n, m = factors[0].shape[-1], a.shape[-2]
    pairs = [(g, turned(Running.of(b))) for g, b in zip(slopes, factors, strict=True)]
    d_a = summed(pairs, a.shape, n)
    d_b = []
    for g, b in zip(slopes, factors, strict=True):
        shape = b.shape[-2:] if sum_batch else b.shape
        d_b.append(summed([(turned(Running.of(a)), g)], shape, m))
    return d_a, d_b


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
    """Gradients of operands: each summed to its shape, and a number's in the accumulator's dtype."""
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
        got = nf.matmul_epilogue_bwd(
            grad, *given, pre_activation=pre, needs=needs, backend=backend
        )
    found = gradients(formula, (grad,), sums, widened(operands, dtype), dtype, backend)
    slopes = [whole(g, shape) for g in found[:count]]
    d_a, d_b = gradient_of_factors(a, factors, slopes, dtype, backend)
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
