"""The scalar language: what it records, refuses, prints, differentiates and computes.

Guards: a user's formula means what NumPy means by it, with exact constants, and one that cannot be
written is refused in a sentence (`numfuse.activation`).
"""

import math
import operator
import pickle

import mpmath as mp
import numpy as np
import pytest
import weekly
from numba import njit

import numfuse as nf
from numfuse import expr as ex
from numfuse.activations import get
from numfuse.backends.cpu.llvm.primitives import render, scalar_function
from numfuse.language import elementary, wgsl
from numfuse.language.python import ranges
from numfuse.language.text import digest

X = ex.SYMBOL
DTYPES = ["float32", "float64"]

# --- exact values: every operation of the language in mpmath ------------------------------------


def _scaled(f):
    return lambda factor, hi, lo: factor * f(hi + lo)


def _bell(v):
    e = mp.exp(-abs(v))
    return e / (1 + e) ** 2


def _sigmoid(v):
    return 1 / (1 + mp.exp(-v)) if v > 0 else mp.exp(v) / (1 + mp.exp(v))


EXACT = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "product": operator.mul, "product_low": lambda a, b: mp.mpf(0), "neg": operator.neg,
    "abs": abs, "sqrt": mp.sqrt, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "ne": operator.ne, "both": lambda a, b: a and b, "either": lambda a, b: a or b,
    "negation": operator.not_, "where": lambda c, a, b: a if c else b, "maximum": max,
    "minimum": min, "copysign": lambda a, b: abs(a) if b >= 0 else -abs(a),
    "fma": lambda a, b, c: a * b + c, "exp": mp.exp, "log": mp.log, "log1p": mp.log1p,
    "tanh": lambda v: mp.sign(v) * (1 - 2 / (mp.expm1(2 * abs(v)) + 2)), "sigmoid": _sigmoid,
    "erf": mp.erf, "scaled_normal_cdf": lambda f, v: f * mp.erfc(-v / mp.sqrt(2)) / 2,
    "scaled_exp": _scaled(mp.exp), "scaled_sigmoid": _scaled(_sigmoid),
    "scaled_bell": _scaled(_bell),
}  # fmt: skip


def exact(graph, x):
    """The graph at `x`, in mpmath's working precision."""
    value = {}
    for e in ex.topological((graph,)):
        if e.op == "x":
            value[e] = mp.mpf(x)
        elif e.op == "const":
            value[e] = mp.mpf(e.payload.numerator) / e.payload.denominator
        else:
            value[e] = EXACT[e.op](*(value[a] for a in e.args))
    return value[graph]


def ulps(got, want, dtype, scale=None):
    """|got - want| in units in the last place of the scale (at least that of normal numbers)."""
    info = np.finfo(dtype)
    scale = max(abs(want) if scale is None else scale, mp.mpf(float(info.tiny)))
    unit = mp.ldexp(1, mp.frexp(scale)[1] - 1) * mp.mpf(float(info.eps))
    return float(abs(mp.mpf(float(got)) - want) / unit)


def compiled(graph, dtype):
    """A plain loop over an array, as a kernel's epilogue would be."""
    f = scalar_function((graph,), dtype)

    @njit(fastmath=ex.FASTMATH, error_model="numpy")
    def loop(x, y):
        for i in range(x.size):
            y[i] = f(x[i])

    def run(x):
        y = np.full_like(x, np.nan)
        loop(x, y)
        return y

    run.loop = loop
    return run


# --- recording ----------------------------------------------------------------------------------


def test_equal_expressions_are_one_node():
    assert ex.exp(X * 2 + 1) is ex.exp(2 * X + 1.0)
    assert ex.maximum(0, X) is ex.maximum(X, 0)
    assert ex.exp(X * 2) is not ex.exp(X * 3)


def test_constants_fold_exactly():
    third = ex.constant(1) / 3
    assert third * 3 is ex.constant(1)
    assert (ex.constant("0.1") + ex.constant("0.2")) is ex.constant("0.3")
    assert X * 1 is X and X / 1 is X and X - 0 is X and operator.neg(-X) is X
    # x + 0 turns -0 into 0, and 0 * x is not 0 for infinity or NaN: neither may fold
    assert (X + 0) is not X
    assert (X * 0).op == "mul"


def test_negative_zero_infinity_and_nan_stay_distinct_constants():
    kinds = [ex.constant(v) for v in (0.0, -0.0, math.inf, -math.inf, math.nan)]
    assert len(set(map(id, kinds))) == 5
    assert ex.constant(math.nan) is kinds[-1]
    assert math.copysign(1, elementary.evaluate(ex.copysign(X, ex.constant(-0.0)), 2.0)) == -1


def test_a_constant_is_rounded_once():
    # Just above the middle of two float32, by less than float64 can tell.
    value = ex.constant("1.000000059604644775390626")
    assert ex.rounded(value, "float32") == np.nextafter(np.float32(1), np.float32(2))
    assert ex.rounded(ex.constant("1.000000059604644775390625"), "float32") == np.float32(1)
    assert ex.rounded(ex.constant("1e300"), "float32") == np.inf
    assert ex.rounded(ex.constant("0.1"), "float64") == 0.1


@pytest.mark.parametrize("bits", [1, 15, 24])
@pytest.mark.parametrize("text", ["1.5957691216057307", "-0.0713548162726", "3e-7", "12345.678"])
def test_a_split_constant_has_a_short_head_and_an_exact_tail(text, bits):
    value = ex.constant(text)
    head, tail = value.split(bits)
    assert head.payload + tail.payload == value.payload
    significand = head.payload.numerator
    while significand % 2 == 0:
        significand //= 2
    assert abs(significand) < 2**bits
    assert abs(tail.payload) <= abs(value.payload) / 2**bits


def test_powers_are_products_roots_and_reciprocals():
    for n in range(1, 9):
        assert elementary.evaluate(X**n, 3.0) == 3.0**n
    assert X**2 is X * X
    assert X**0.5 is ex.sqrt(X)
    assert elementary.evaluate(X**-3, 2.0) == 0.125
    assert X**0 is ex.constant(1)


def test_numpy_functions_record_the_same_node():
    assert np.exp(X) is ex.exp(X)
    assert np.maximum(X, 0.0) is ex.maximum(X, 0.0)
    assert np.float64(2.0) * X is X * 2
    assert np.float32(0.5) + X is X + 0.5
    assert np.where(X > 0, X, 0.0) is ex.where(X > 0, X, 0.0)
    assert np.clip(X, -1.0, 1.0) is ex.clamp(X, -1.0, 1.0)
    assert np.square(X) is X * X
    assert np.greater(X, 1) is (X > 1)


@pytest.mark.parametrize(
    ("formula", "remedy"),
    [
        pytest.param(lambda x: x if x > 0 else 0.0, r"numfuse\.expr\.where\(condition", id="if"),
        pytest.param(lambda x: (x > 0 and x) or 0.0, r"numfuse\.expr\.where\(condition", id="and"),
        pytest.param(lambda x: ex.where(0 < x < 1, x, 0), r"joined with & \|", id="chain"),
        pytest.param(lambda x: bool(x), r"numfuse\.expr\.where\(condition", id="bool"),
        pytest.param(lambda x: max(x, 0.0), r"numfuse\.expr\.maximum", id="max"),
        pytest.param(lambda x: not x, r"numfuse\.expr\.where\(condition", id="not"),
        pytest.param(lambda x: float(x), r"numfuse\.expr\.exp\(x\) for math\.exp", id="float"),
        pytest.param(lambda x: int(x), r"numfuse\.expr\.exp\(x\) for math\.exp", id="int"),
        pytest.param(lambda x: math.exp(x), r"numfuse\.expr\.exp\(x\) for math\.exp", id="math"),
        pytest.param(lambda x: [v for v in x], "one scalar to one scalar", id="iteration"),
        pytest.param(lambda x: x[0], "one scalar to one scalar", id="index"),
        pytest.param(lambda x: len(x), "one scalar to one scalar", id="len"),
        pytest.param(lambda x: np.sin(x), r"numpy\.sin.*functions of numfuse\.expr", id="ufunc"),
        pytest.param(lambda x: np.add.reduce(x), r"numpy\.add\.reduce", id="reduce"),
        pytest.param(lambda x: np.sum(x), "functions of numfuse.expr", id="sum"),
        pytest.param(lambda x: np.asarray(x), "functions of numfuse.expr", id="array"),
        pytest.param(lambda x: x * np.ones(3), "mixed with arrays", id="mixed"),
        pytest.param(lambda x: x % 2, "smooth pieces", id="modulo"),
        pytest.param(lambda x: round(x), "smooth pieces", id="round"),
        pytest.param(lambda x: x**1.5, r"exp\(p \* numfuse\.expr\.log\(x\)\)", id="power"),
        pytest.param(lambda x: 2**x, r"numfuse\.expr\.exp\(x \* log", id="exponent"),
        pytest.param(lambda x: x > 0, r"where\(condition, 1, 0\)", id="condition"),
        pytest.param(lambda x: x + (x > 0), r"where\(condition, 1, 0\)", id="arithmetic"),
        pytest.param(lambda x: ex.where(x, 1, 0), "a condition such as x > 0", id="no condition"),
        pytest.param(lambda x: x * True, "True or False", id="truth"),
        pytest.param(lambda x: None, "got NoneType", id="nothing"),
    ],
)
def test_what_a_symbol_cannot_do_says_what_to_write(formula, remedy):
    with pytest.raises(TypeError, match=remedy):
        ex.trace(formula)


def repeated(step, count):
    def formula(x):
        y = x
        for _ in range(count):
            y = step(x, y)
        return y

    return formula


@pytest.mark.parametrize(
    "step", [lambda x, y: y * y, lambda x, y: ex.tanh(y), lambda x, y: x / (y + 1)],
    ids=["squares", "functions", "fractions"],
)  # fmt: skip
def test_a_formula_of_more_operations_than_compile_is_refused(step):
    """At its definition, and so on every backend; one as large as may be is printed for all."""
    for count in (20_000, 1_001):
        with pytest.raises(ValueError, match=r"at most 1000 operations, got \d+"):
            nf.activation(repeated(step, count), name="too long")
    assert "too long" not in nf.activations()
    act = nf.activation(repeated(step, 333), name="long")
    assert np.isfinite(act(np.zeros(3))).all()
    for order in range(4):
        graph = act.trace(order)
        wgsl.function(graph, "long")
        render((graph,), "float32")
        assert len(repr(graph)) < 10_000 and len(digest((graph,))) == 64


def test_graphs_survive_text_and_pickle():
    graphs = (ex.trace(lambda x: ex.where((x > 0) & ~(x >= 2), ex.exp(-x) / 3, -0.0)), X * math.inf)
    assert ex.loads(ex.dumps(graphs)) == graphs or all(
        a is b for a, b in zip(ex.loads(ex.dumps(graphs)), graphs, strict=True)
    )
    for graph in graphs:
        assert ex.loads(ex.dumps((graph,)))[0] is graph
        assert pickle.loads(pickle.dumps(graph)) is graph
    for wrong in ("", "x\n", "nonsense 1 2\n= 0"):
        with pytest.raises(ValueError, match=r"numfuse\.expr\.dumps"):
            ex.loads(wrong)


def test_substitution_composes():
    inner, outer = ex.exp(-X), X / (1 + X)
    assert ex.substitute(outer, inner) is inner / (1 + inner)


# --- printing -----------------------------------------------------------------------------------


def test_shared_subexpressions_are_printed_once():
    s = ex.sigmoid(X)
    text, constants = render((s * s, s + 1), "float32")
    assert text.count("growth(") == text.count("inverse(") == 1
    assert text.startswith("def formula(x):")
    assert {type(c) for c in constants.values()} == {np.float32}


@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid"])
def test_a_value_and_its_derivative_share_one_exponential_and_one_division(name):
    act = get(name)
    for orders in ((0,), (1,), (0, 1)):
        text, _ = render(tuple(map(act.trace, orders)), "float32")
        assert text.count("growth(") == text.count("inverse(") + text.count("ratio(") == 1
        assert " / " not in text
    # alone, a value is a plain quotient
    assert "quotient(" not in render((act.trace(0),), "float32")[0]


def test_tanh_and_its_derivatives_share_one_exponential_and_one_inverse():
    act = get("tanh")
    for orders in ((1,), (0, 1), (2,), (0, 1, 2, 3)):
        text, _ = render(tuple(map(act.trace, orders)), "float64")
        assert text.count("decay_sum(") == text.count("inverse(") == text.count("decay_bell(") == 1
        assert "growth(" not in text and " tanh(" not in text
    assert " tanh(x)" in render((act.trace(0),), "float64")[0]  # alone it is a primitive


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hi", [X, 2.0 * X], ids=["bell", "slope of tanh"])
def test_a_power_of_two_of_a_bells_factor_costs_no_bit(hi, dtype):
    """Guards: the constant goes into the last product, which rounds nothing."""
    one, four, more, scaled = (
        scalar_function((ex.node("scaled_bell", factor, hi, 0.0),), dtype)
        for factor in (1.0, 4.0, 1.0 + X * X, -0.5 * (1.0 + X * X))
    )

    @njit
    def count(x):
        different = 0
        for v in x:
            different += 4 * one(v) != four(v)
            different += more(v) != -2 * scaled(v)
        return different

    assert count(np.random.default_rng(7).uniform(-30, 30, 100_000).astype(dtype)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hi", [X, 2.0 * X], ids=["bell", "slope of tanh"])
def test_a_bells_factor_may_be_of_any_size(hi, dtype):
    """Guards: what is scaled by a power of two neither overflows nor vanishes with its factor."""
    most = {"float32": 110, "float64": 1000}[dtype]
    scales = [2.0**power for power in (-most, -33, 33, most)]
    graphs = [
        ex.node("scaled_bell", factor, hi, 0.0)
        for scale in scales
        for factor in (scale, scale * (1.0 + X * X))
    ]
    made = scalar_function(tuple(graphs), dtype)
    at = njit(lambda x: made(x))
    for x in map(np.dtype(dtype).type, (-2.0, 0.0, 0.5, 3.0)):
        wanted = [elementary.evaluate(graph, np.float64(x)) for graph in graphs]
        np.testing.assert_allclose(at(x), wanted, 8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid", "tanh"])
def test_a_quotient_by_the_inverse_has_the_bits_of_a_division(name, dtype):
    act = get(name)
    alone, both = (
        scalar_function(g, dtype) for g in ((act.trace(0),), (act.trace(0), act.trace(1)))
    )

    @njit
    def count(x):
        different = 0
        for i in range(x.size):
            a, b = alone(x[i]), both(x[i])[0]
            different += a != b
        return different

    random = np.random.default_rng(6)
    tails = [random.uniform(-r, r, 100_000) for r in (1, 12, 120, 800)]
    tiny = random.standard_normal(100_000) * 10.0 ** random.uniform(-44, 0, 100_000)
    assert count(np.concatenate([*tails, tiny]).astype(dtype)) == 0


def test_ranges_hold_what_a_formula_can_be():
    y = ex.minimum(ex.abs(X), 3)
    for graph, want in (
        (X, (-math.inf, math.inf)),
        (y, (0, 3)),
        (ex.copysign(ex.clamp(X, -2, 1), 1.0), (0, 2)),
        (ex.copysign(y, X), (-3, 3)),
        (ex.clamp(X, -2, 1) * ex.clamp(X, -2, 1), (0, 4)),
        (1 - y * ex.sigmoid(X), (-2, 1)),
        (ex.fma(y, y, 1) - y, (-2, 10)),
        (ex.product_low(y, y), (-9, 9)),
        (ex.where(X > 0, y, -5), (-5, 3)),
        (ex.scaled_sigmoid(-y, X), (-3, 0)),
        (X * 0, (-math.inf, math.inf)),
        (ex.exp(y), (-math.inf, math.inf)),
    ):
        assert ranges((graph,))[graph] == want


def test_several_results_come_as_a_tuple_of_the_dtype():
    for dtype in DTYPES:
        f = scalar_function((X * 2, ex.where(X > 0, 1, 0)), dtype)
        out = njit(lambda v, f=f: f(v))(np.dtype(dtype).type(3))
        assert out == (6, 1)
        signature = f.nopython_signatures[0]
        assert str(signature.return_type) == f"UniTuple({dtype} x 2)"


def test_the_key_tells_formulas_and_dtypes_apart():
    # the last constant is 2 in float32 (there it is the same text), not in float64
    graphs = (X, X * 2, X * (2 + 2**-50))
    single, double = (
        [scalar_function((g,), dtype).numfuse_key for g in graphs] for dtype in DTYPES
    )
    assert len(set(double)) == 3
    assert single[1] == single[2] != single[0]
    assert not set(single) & set(double)
    assert scalar_function((X * 2,), "float32") is scalar_function((2 * X,), "float32")
    with pytest.raises(TypeError, match="'float32' or 'float64', got 'float16'"):
        scalar_function((X,), "float16")


# --- differentiation ----------------------------------------------------------------------------

FORMULAS = {
    "quotient": lambda x: (x * x - 3) / (x + 5),
    "constant over x": lambda x: 2 / (3 + x),
    "exp": lambda x: ex.exp(-x * x),
    "log": lambda x: ex.log(x * x + 1) * ex.log1p(ex.exp(x)),
    "tanh": lambda x: ex.tanh(2 * x) - ex.sigmoid(x) ** 3,
    "erf": lambda x: ex.erf(x) * ex.normal_cdf(-x),
    "sqrt": lambda x: 1 / ex.sqrt(1 + x * x),
    "abs": lambda x: ex.abs(x) / (1 + ex.abs(x)),
    "where": lambda x: ex.where((x > 0) | (x < -1), x * x, ex.exp(x)),
    "clamp": lambda x: ex.clamp(x, -1, 1) * ex.minimum(x, 2.0) - ex.maximum(0.5, x),
    "copysign": lambda x: ex.copysign(x * x, x),
    "fma": lambda x: ex.fma(x, x + 1, ex.exp(x)),
    "double words": lambda x: ex.scaled_exp(x, ex.product(x, x), ex.product_low(x, x)),
    "scaled sigmoid": lambda x: ex.scaled_sigmoid(x * x, 2 * x, 0),
    "scaled bell": lambda x: ex.scaled_bell(x + 1, x * x),
    "scaled normal": lambda x: ex.scaled_normal_cdf(x, 3 * x),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_traced_derivatives_are_derivatives(name):
    graphs = [ex.trace(FORMULAS[name])]
    for _ in range(3):
        graphs.append(ex.differentiate(graphs[-1]))
    with mp.workdps(60):
        for x in (-2.3, -1.5, -0.7, -0.1, 0.2, 0.9, 1.7, 2.6):
            for order in (1, 2, 3):
                want = mp.diff(lambda v: exact(graphs[0], v), mp.mpf(x), order)
                assert mp.almosteq(exact(graphs[order], x), want, 1e-25, 1e-25), (x, order)


def test_a_kink_takes_the_right_hand_operand():
    assert elementary.evaluate(ex.differentiate(ex.maximum(X, 0)), 0.0) == 0
    assert elementary.evaluate(ex.differentiate(ex.abs(X)), 0.0) == 0
    assert ex.differentiate(ex.constant(3)) is ex.constant(0)


# --- numbers ------------------------------------------------------------------------------------

# Arguments, and the bound in units in the last place. The array functions hold the same bound, but
# for the normal distribution function: 6, as SciPy's erfcx has 4.
ACCURACY = {
    "exp": (ex.exp, lambda r: r.uniform(-87, 88, 300), 2),
    "log": (ex.log, lambda r: np.exp(r.uniform(-87, 88, 300)), 2),
    "log near 1": (ex.log, lambda r: 1 + r.uniform(-0.3, 0.3, 300), 2),
    "log1p": (ex.log1p, lambda r: np.exp(r.uniform(-87, 88, 300)), 2),
    "log1p below": (ex.log1p, lambda r: -np.exp(r.uniform(-20, -0.001, 300)), 2),
    "tanh": (ex.tanh, lambda r: r.standard_normal(300) * 10.0 ** r.uniform(-8, 1, 300), 3),
    "sigmoid": (ex.sigmoid, lambda r: r.uniform(-87, 40, 300), 3),
    "erf": (ex.erf, lambda r: r.standard_normal(300) * 10.0 ** r.uniform(-8, 1, 300), 3),
    "normal_cdf": (ex.normal_cdf, lambda r: r.uniform(-12.9, 8, 300), 4),
    "sqrt": (ex.sqrt, lambda r: np.exp(r.uniform(-80, 80, 300)), 0.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACCURACY)
def test_primitives_hold_their_bound(name, dtype):
    function, draw, bound = ACCURACY[name]
    x = draw(np.random.default_rng(5)).astype(dtype)
    graph = function(X)
    with mp.workdps(60):
        want = [exact(graph, float(v)) for v in x]
        array_bound = 6 if name == "normal_cdf" else bound
        for got, most in ((compiled(graph, dtype)(x), bound), (function(x), array_bound)):
            assert got.dtype == x.dtype
            assert max(ulps(g, w, dtype) for g, w in zip(got, want, strict=True)) <= most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function",
    [ex.exp, ex.log, ex.log1p, ex.tanh, ex.sigmoid, ex.erf, ex.normal_cdf, ex.sqrt, ex.abs],
    ids=lambda f: f.__name__,
)
def test_primitives_at_special_values_agree_with_numpy(function, dtype):
    info = np.finfo(dtype)
    x = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -1, -2, info.max, -info.max, info.tiny,
         -info.tiny, info.smallest_subnormal, -info.smallest_subnormal, info.tiny / 8],
        dtype,
    )  # fmt: skip
    got, want = compiled(function(X), dtype)(x), function(x)
    np.testing.assert_allclose(got, want, rtol=4 * info.eps, atol=0)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_wins_in_maximum_and_minimum(dtype):
    x = np.array([np.nan, 1.0, -1.0, np.inf, -np.inf], dtype)
    for function in (ex.maximum, ex.minimum):
        for other in (0.0, math.nan):
            graph = function(X, ex.constant(other))
            want = function(x, x.dtype.type(other))
            np.testing.assert_array_equal(compiled(graph, dtype)(x), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logic_selects_without_branches(dtype):
    graph = ex.where(((X > 0) & (X < 2)) | ~(X >= -2) | (X == -1) | (X != X), 1, 0)
    x = np.array([-3, -2, -1.5, -1, 0, 1, 2, 3, np.nan], dtype)
    want = np.array([1, 0, 0, 1, 0, 1, 0, 0, 1])
    np.testing.assert_array_equal(compiled(graph, dtype)(x), want)
    np.testing.assert_array_equal(elementary.evaluate(graph, x), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_and_its_low_word_are_the_exact_product(dtype):
    # Under the contract flag a naive a * b - product(a, b) would be merged, or be 0.
    x = np.random.default_rng(1).uniform(-30, 30, 200).astype(dtype)
    other = ex.constant("1.7320508075688772")
    y = ex.rounded(other, dtype)
    high = compiled(ex.product(X, other), dtype)(x)
    low = compiled(ex.product_low(X, other), dtype)(x)
    both = compiled(ex.product(X, other) + ex.product_low(X, other), dtype)(x)
    with mp.workdps(60):
        for v, h, lo in zip(x, high, low, strict=True):
            assert mp.mpf(float(h)) + mp.mpf(float(lo)) == mp.mpf(float(v)) * mp.mpf(float(y))
    np.testing.assert_array_equal(both, high)


def test_a_late_scale_keeps_a_product_with_a_subnormal_factor():
    for dtype, x in (("float32", -91.0), ("float64", -711.0)):
        # sigmoid(x) is subnormal and has lost bits, x * sigmoid(x) is normal
        graph = ex.scaled_sigmoid(X, X)
        value = np.array([x], dtype)
        with mp.workdps(60):
            want = exact(graph, x)
            assert float(want / x) < np.finfo(dtype).tiny < abs(float(want))
            assert ulps(compiled(graph, dtype)(value)[0], want, dtype) <= 3
            assert ulps(elementary.evaluate(graph, value)[0], want, dtype) <= 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.long
def test_a_sigmoid_takes_any_factor(dtype):
    """What is known of the factor and of the sign of the argument changes the way alone."""
    factors = [1, -3, 0.1, 1e11]
    if not weekly.ALL:  # (each is ten compilations)
        factors = factors[dtype == "float64" :: 2]
    big = 1e26 if dtype == "float32" else 1e260
    x = np.concatenate([np.linspace(-140, 140, 401), np.linspace(-1060, 1060, 401)]).astype(dtype)
    size = ex.abs(X)
    for factor in (*factors, big):
        for graph in (
            ex.scaled_sigmoid(factor, X), ex.scaled_sigmoid(factor, -X), ex.scaled_bell(factor, X),
            ex.scaled_sigmoid(factor, size), ex.scaled_sigmoid(factor, -size),
            ex.scaled_bell(factor, -size), ex.scaled_sigmoid(factor, 0.5 * X, 2**-18 * X),
            ex.scaled_sigmoid(factor, 0.5 * size, -(2**-18) * size),
            ex.scaled_sigmoid(factor, -0.5 * size, -(2**-18) * size),
            ex.scaled_bell(factor, -0.5 * X, 2**-18 * X),
        ):  # fmt: skip
            got = compiled(graph, dtype)(x)
            with mp.workdps(40):
                for v, g in zip(x[::7], got[::7], strict=True):
                    assert ulps(g, exact(graph, float(v)), dtype) <= 6, (graph, v)


def test_array_functions_keep_the_dtype_and_evaluate_refuses_other_kinds():
    for dtype in (np.float16, np.float32, np.float64):
        assert ex.exp(np.ones(2, dtype)).dtype == dtype
        assert ex.maximum(np.ones(2, dtype), 0.0).dtype == dtype
        assert elementary.evaluate(ex.exp(X), np.ones(2, dtype)).dtype == dtype
    assert ex.exp(1) == np.exp(1.0)
    assert ex.where(np.array([True, False]), 1.0, np.float32([2, 3])).tolist() == [1, 3]
    assert elementary.evaluate(X * 0.5, np.array([1, 2])).dtype == np.float64
    for wrong in (np.ones(2, complex), np.array(["a"]), np.array([None])):
        with pytest.raises(TypeError, match="expected an array of real numbers"):
            elementary.evaluate(X, wrong)


def test_what_holds_formulas_is_compared_without_asking_a_formula_for_its_truth():
    from dataclasses import dataclass

    @dataclass(frozen=True, eq=False)
    class Kernel(ex.Keyed):
        name: str
        value: ex.Expr | None
        parts: tuple = ()

    one, other = ex.exp(X), ex.tanh(X)
    kernels = [
        Kernel("k", one), Kernel("k", other), Kernel("k", None), Kernel("l", one),
        Kernel("k", one, ((one, 1),)), Kernel("k", one, ((other, 1),)),
    ]  # fmt: skip
    for i, a in enumerate(kernels):
        for j, b in enumerate(kernels):
            assert (a == b) is (i == j) and (a != b) is (i != j)
        again = Kernel(a.name, a.value, tuple(a.parts))
        assert again == a and hash(again) == hash(a) and {a: i}[again] == i
    assert kernels[0] != one and kernels[0] != "k"
