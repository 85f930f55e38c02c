"""The table of activations: every row, every order, both dtypes, every target.

Bounds are in units in the last place (ULP). A value's are its own. A derivative has zeros, near
which no formula in working precision keeps its relative error, so its units are those of the local
scale ``max(|f^(k)(x)|, |f^(k+1)(x)| / (1 + |x|))``: what a relative change of x would move.
Every bound holds down to the smallest normal number, far tails included; below, the unit is fixed.

Guards: the errors of activations in docs/numerics.md, and the values at their limits.
"""

import ast
import copy
import functools
import importlib.util
import itertools
import json
import math
import pathlib
import pickle
import re
import subprocess
import sys
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from golden.regenerate import table
from numba import njit
from test_expr import DTYPES, compiled, exact, ulps

import numfuse as nf
from numfuse import expr as ex
from numfuse.activations import Activation, get
from numfuse.activations.table import register
from numfuse.language import elementary, wgsl, wgsl_arithmetic

ROWS = [name for name, act in nf.activations().items() if act.source != "user-defined"]
ORDERS = [0, 1, 2, 3]
#: Most units by order of differentiation; 6 for a value of the array reference (SciPy's erfcx: 4).
BOUND = [4, 8, 24, 64]
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

#: The formulas as their sources print them, where one can be written in mpmath.
TEXTBOOK = {
    "none": lambda x: x,
    "relu": lambda x: max(x, mp.mpf(0)),
    "gelu": lambda x: x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3))),
    "silu": lambda x: x / (1 + mp.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
    "tanh": mp.tanh,
    "gelu_erf": lambda x: x / 2 * (1 + mp.erf(x / mp.sqrt(2))),
    "softplus": lambda x: mp.log(1 + mp.exp(x)),
}


def array_function(act, order):
    return (act, act.derivative, act.second_derivative, act.third_derivative)[order]


@functools.cache
def exact_graphs(name):
    """The value's graph and its derivatives by the chain rule, not by the hand-written formulas."""
    graphs = [get(name).trace(0)]
    for _ in range(4):
        graphs.append(ex.differentiate(graphs[-1]))
    return graphs


def points(dtype, seed=11, count=60):
    """Arguments near 0, where activations bend, and out to where every tail has underflowed."""
    random = np.random.default_rng(seed)
    reach = [1.0, 4.0, 12.0, 40.0, 95.0] + ([720.0] if dtype == "float64" else [])
    drawn = [random.uniform(-r, r, count) for r in reach]
    tiny = random.standard_normal(count) * 10.0 ** random.uniform(-30, 0, count)
    return np.concatenate([*drawn, tiny]).astype(dtype)


@functools.cache
def exact_values(name, dtype):
    graphs = exact_graphs(name)
    with mp.workdps(60):
        return [[exact(graph, float(x)) for x in points(dtype)] for graph in graphs]


# --- the formulas -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_its_source_its_number_and_four_graphs(name):
    act = get(name)
    assert act.name == name and act.source
    gpu = ("none", "relu", "gelu", "silu", "sigmoid", "tanh")
    assert act.id == (gpu.index(name) if name in gpu else None)
    assert all(isinstance(act.trace(order), ex.Expr) for order in ORDERS)
    with pytest.raises(ValueError, match="order must be 0, 1, 2 or 3, got 4"):
        act.trace(4)


@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_value_is_the_textbook_formula(name):
    with mp.workdps(50):
        for x in (-9.0, -3.3, -1.0, -0.01, 0.0, 0.02, 0.8, 2.5, 8.0):
            got, want = exact(get(name).trace(0), x), TEXTBOOK[name](mp.mpf(x))
            assert mp.almosteq(got, want, 1e-34, 1e-38), x


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_hand_written_derivatives_are_derivatives_of_the_value(name, order):
    graphs = [get(name).trace(k) for k in (0, order)]
    with mp.workdps(60):
        for x in (-11.0, -5.2, -2.1, -0.9, -0.3, 0.4, 1.1, 3.7, 9.5):
            want = mp.diff(lambda v: exact(graphs[0], v), mp.mpf(x), order)
            assert mp.almosteq(exact(graphs[1], x), want, 1e-25, 1e-35), x


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", ROWS)
def test_derivatives_match_finite_differences_in_float64(name, order):
    act = get(name)
    below, here = array_function(act, order - 1), array_function(act, order)
    x = np.setdiff1d(np.linspace(-6, 6, 240), 0.0)
    h = 2e-4
    # central, fourth order: truncation h^4 f^(5) / 30, rounding 1.5 eps / h
    slope = (8 * (below(x + h) - below(x - h)) - (below(x + 2 * h) - below(x - 2 * h))) / (12 * h)
    np.testing.assert_allclose(here(x), slope, atol=5e-11)


# --- accuracy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROWS)
def test_compiled_and_reference_are_accurate_into_the_tails(name, order, dtype):
    act, x = get(name), points(dtype)
    values = exact_values(name, dtype)
    want, above = values[order], values[order + 1]
    for got, most in (
        (compiled(act.trace(order), dtype)(x), BOUND[order]),
        (array_function(act, order)(x), max(BOUND[order], 6)),
    ):
        assert got.dtype == x.dtype
        worst = 0.0
        for v, g, w, a in zip(x, got, want, above, strict=True):
            scale = abs(w) if order == 0 else max(abs(w), abs(a) / (1 + abs(float(v))))
            worst = max(worst, ulps(g, w, dtype, scale))
        assert worst <= most


@pytest.mark.parametrize("name", ROWS)
def test_compiled_values_are_accurate_on_a_dense_float32_grid(name):
    # The float64 reference, rounded, stands for the exact value: half a unit more.
    x = np.concatenate([np.linspace(-100, 20, 300_001), np.geomspace(1e-38, 20, 50_001)])
    x = x.astype(np.float32)
    x = np.concatenate([x, -x[x < 0][:1], -x[-50_001:]])
    want = get(name)(x.astype(np.float64))
    unit = np.spacing(np.maximum(np.abs(want), np.finfo(np.float32).tiny).astype(np.float32))
    error = np.abs(compiled(get(name).trace(0), "float32")(x) - want) / unit
    assert error.max() <= BOUND[0], x[error.argmax()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROWS)
def test_no_finite_or_infinite_argument_gives_nan(name, order, dtype):
    info = np.finfo(dtype)
    x = np.array(
        [0, info.smallest_subnormal, info.tiny / 4, info.tiny, 1e-20, 1, 30, 50, 100, 800, 1e3,
         1e4, 1e10, 1e20, info.max, np.inf],
        dtype,
    )  # fmt: skip
    x = np.concatenate([x, -x])
    got, want = compiled(get(name).trace(order), dtype)(x), array_function(get(name), order)(x)
    assert not np.isnan(got).any()
    np.testing.assert_allclose(got, want, rtol=16 * info.eps, atol=4 * info.smallest_subnormal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROWS)
def test_infinite_arguments_give_the_limits(name, order, dtype):
    run = compiled(get(name).trace(order), dtype)
    for sign in (-1.0, 1.0):
        with mp.workdps(400):
            far, farther = (exact(exact_graphs(name)[order], sign * v) for v in (2e2, 4e2))
        limit = sign * math.inf if abs(farther) > 1.5 * abs(far) > 1 else float(round(farther))
        if name == "gelu" and order == 0 and sign > 0:
            limit = math.inf
        assert run(np.array([sign * np.inf], dtype))[0] == limit
        if order == 1:
            # the derivative has long arrived: nothing overflows on the way
            np.testing.assert_array_equal(run(np.array([sign * 1e20], dtype)), [limit])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_nan_stays_nan(name, dtype):
    x = np.array([np.nan, -np.nan], dtype)
    act = get(name)
    assert np.isnan(compiled(act.trace(0), dtype)(x)).all()
    assert np.isnan(act(x)).all()
    for order in (1, 2, 3):
        smooth = name not in ("none", "relu")
        assert np.isnan(compiled(act.trace(order), dtype)(x)).all() == smooth
        assert np.isnan(array_function(act, order)(x)).all() == smooth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", "gelu", "silu", "tanh", "gelu_erf"])
def test_odd_at_zero_keeps_its_sign(name, dtype):
    for got in (compiled(get(name).trace(0), dtype), get(name)):
        value = got(np.array([-0.0, 0.0], dtype))
        assert np.signbit(value).tolist() == [True, False] and not value.any()


def test_relu_has_derivative_0_at_0():
    relu = get("relu")
    assert relu.derivative([-1.0, -0.0, 0.0, 1.0]).tolist() == [0, 0, 0, 1]
    assert njit(lambda f=relu.njit_derivative: f(0.0))() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROWS)
def test_a_plain_loop_becomes_vector_code_without_libm(name, order, dtype):
    run = compiled(get(name).trace(order), dtype)
    run(np.zeros(4, dtype))
    [text] = run.loop.inspect_llvm().values()
    word = {"float32": "float", "float64": "double"}[dtype]
    # a loop that stores one number becomes a memset
    assert re.search(rf"store <\d+ x {word}>|call void @llvm\.memset", text)
    called = set(re.findall(r"call [^@\n]*@([\w.]+)\(", text))
    libm = r"_*(exp|exp2|expm1|log|log1p|tanh|erf|erfc|pow|ldexp|fma)f?"
    assert not [c for c in called if re.fullmatch(libm, c)]
    assert not [c for c in called if re.match(r"llvm\.(exp|log|pow|tanh|ldexp)", c)]
    other = "double" if dtype == "float32" else "float"
    assert not re.search(rf"\bf(add|sub|mul|div) [^\n]*\b{other}\b", text)


# --- WGSL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "file"), [("float32", "activations.wgsl"), ("float64", "activations_f64.wgsl")]
)
def test_wgsl_of_the_table_is_the_golden_text(dtype, file):
    made = subprocess.run(
        [sys.executable, GOLDEN / "regenerate.py", dtype],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert made.stdout == (GOLDEN / file).read_text()


class Contracted(ast.NodeTransformer):
    """Every sum of a product, written or named, becomes an fma, as a compiler may have it."""

    def __init__(self, sides):
        self.sides, self.products = sides, {}

    def visit_FunctionDef(self, node):
        self.products = {}
        return self.generic_visit(node)

    def visit_Assign(self, node):
        node = self.generic_visit(node)
        if isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Mult):
            self.products[node.targets[0].id] = node.value
        return node

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        if not isinstance(node.op, (ast.Add, ast.Sub)):
            return node
        minus = isinstance(node.op, ast.Sub)

        def negated(v, condition):
            return ast.UnaryOp(ast.USub(), v) if condition else v

        for side in self.sides:
            found = getattr(node, side)
            found = self.products.get(getattr(found, "id", None), found)
            if isinstance(found, ast.BinOp) and isinstance(found.op, ast.Mult):
                right = side == "right"
                addend = node.left if right else negated(node.right, minus)
                args = [negated(found.left, minus and right), found.right, addend]
                return ast.Call(ast.Name("fma", ast.Load()), args, [])
        return node


class Factored(ast.NodeTransformer):
    """fma is two roundings, and of every sum a b + a c + ... becomes a (b + c) + ..., once."""

    def __init__(self):
        self.named = {}

    def visit_FunctionDef(self, node):
        self.named = {}
        return self.generic_visit(node)

    def visit_Assign(self, node):
        self.named[node.targets[0].id] = node.value
        return self.generic_visit(node)

    def known(self, node):
        while isinstance(node, ast.Name) and node.id in self.named:
            node = self.named[node.id]
        if isinstance(node, ast.Call) and node.func.id == "fma":
            a, b, c = node.args
            return ast.BinOp(ast.BinOp(a, ast.Mult(), b), ast.Add(), c)
        return node

    def terms(self, node, sign):
        whole = self.known(node)
        if isinstance(whole, ast.UnaryOp) and isinstance(whole.op, ast.USub):
            return self.terms(whole.operand, -sign)
        if isinstance(whole, ast.BinOp) and isinstance(whole.op, (ast.Add, ast.Sub)):
            minus = -sign if isinstance(whole.op, ast.Sub) else sign
            return self.terms(whole.left, sign) + self.terms(whole.right, minus)
        minus, factors = self.factors(node)
        return [(sign * minus, factors)]

    def factors(self, node):
        whole = self.known(node)
        if isinstance(whole, ast.UnaryOp) and isinstance(whole.op, ast.USub):
            sign, factors = self.factors(whole.operand)
            return -sign, factors
        if isinstance(whole, ast.BinOp) and isinstance(whole.op, ast.Mult):
            (s, left), (t, right) = self.factors(whole.left), self.factors(whole.right)
            return s * t, left + right
        return 1, [node]

    @staticmethod
    def joined(parts, op):
        return functools.reduce(lambda a, b: ast.BinOp(a, op, b), parts)

    def product(self, sign, factors):
        made = self.joined([self.generic_visit(copy.deepcopy(f)) for f in factors], ast.Mult())
        return made if sign > 0 else ast.UnaryOp(ast.USub(), made)

    def visit_Call(self, node):
        whole = self.known(node)
        return self.generic_visit(node) if whole is node else self.visit(whole)

    def visit_BinOp(self, node):
        if not isinstance(node.op, (ast.Add, ast.Sub)):
            return self.generic_visit(node)
        terms = self.terms(node, 1)
        for (i, (s, left)), (j, (t, right)) in itertools.combinations(enumerate(terms), 2):
            for k, n in itertools.product(range(len(left)), range(len(right))):
                if ast.dump(left[k]) == ast.dump(right[n]) and len(left) + len(right) > 2:
                    one = [ast.parse("real(1)", mode="eval").body]
                    rests = (left[:k] + left[k + 1 :] or one), (right[:n] + right[n + 1 :] or one)
                    inner = [self.product(c, r) for c, r in zip((s, t), rests, strict=True)]
                    common = self.product(1, [left[k]])
                    made = ast.BinOp(common, ast.Mult(), self.joined(inner, ast.Add()))
                    others = [self.product(*v) for m, v in enumerate(terms) if m not in (i, j)]
                    return self.joined([made, *others], ast.Add())
        return self.generic_visit(node)


class Rough(ast.NodeTransformer):
    """Every operation as loose as WGSL allows: see `rough` below."""

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        division = ast.Constant(isinstance(node.op, ast.Div))
        return ast.Call(ast.Name("rough", ast.Load()), [node, division], [])


def python_of_wgsl(text, dtype, rounding):
    """The functions of a module of straight-line scalar WGSL, as Python over NumPy's scalars.

    `rounding` is how a driver computes: "fused" has an fma of one rounding, "unfused" none;
    "left" and "right" have one and contract sums, that operand first if both are products;
    "factored" has none and takes two products for one where they have a common factor;
    "rough" has one, flushes subnormal numbers to zero and divides with an error of 2.5 units.
    """
    real = np.dtype(dtype).type
    lines = []
    for line in text.splitlines():
        if head := re.fullmatch(r"fn (\w+)\((.*)\) -> \w+ \{", line):
            names = re.sub(r": \w+", "", head[2])
            lines.append(f"def {head[1]}({names}):")
        elif body := re.fullmatch(r"    (?:let (\w+) = |(return) )(.*);", line):
            value = re.sub(r"(?<![\w.])(\d+\.?\d*(?:e[+-]?\d+)?)l?f\b", r"real('\1')", body[3])
            value = re.sub(r"\b(0x[0-9a-f]+|\d+)l?u\b", r"\1", value)
            value = re.sub(r"bitcast<(\w)\d\d>", r"bitcast_\1", value)
            value = re.sub(r"!(?!=)", " not ", value.replace("&&", " and "))
            lines.append(f"    {'return' if body[2] else body[1] + ' ='} {value}")
        else:
            assert line in ("", "}"), line
    tree = ast.parse("\n".join(lines))
    if rounding in ("left", "right"):
        tree = Contracted([rounding, {"left": "right", "right": "left"}[rounding]]).visit(tree)
        tree = ast.fix_missing_locations(tree)

    if rounding == "factored":
        tree = ast.fix_missing_locations(Factored().visit(tree))
    if rounding == "rough":
        tree = ast.fix_missing_locations(Rough().visit(tree))
    turns = itertools.cycle([1, 1, -1, 1, -1, -1])

    def rough(value, division=False):
        if not isinstance(value, real):
            return value
        if division and np.isfinite(value):
            value += real(2 * next(turns)) * np.spacing(value)
        return np.copysign(real(0), value) if abs(value) < np.finfo(dtype).tiny else value

    def fma(a, b, c):
        if rounding == "rough":
            return rough(exact_fma(a, b, c))
        return exact_fma(a, b, c)

    def exact_fma(a, b, c):
        if rounding in ("unfused", "factored") or not np.isfinite([a, b, c]).all():
            return a * b + c
        if dtype == "float32":
            return real(np.float64(a) * np.float64(b) + np.float64(c))
        try:
            made = real(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
        except OverflowError:
            return a * b + c
        return made if made else a * b + c  # the sign of zero

    def select(no, yes, condition):
        return yes if condition else no

    size = np.dtype(dtype).itemsize
    unsigned = np.dtype(f"u{size}").type

    def bits(x):
        return int(x.view(unsigned)) if isinstance(x, real) else x & (1 << 8 * size) - 1

    def signed(x):
        return bits(x) - (bits(x) >> 8 * size - 1 << 8 * size)

    def integer(x):
        return 0 if np.isnan(x) else int(x)

    scope = {
        "real": real, "f32": real, "f64": real, "i32": integer, "i64": integer, "abs": np.abs,
        "rough": rough, "min": np.minimum, "max": np.maximum, "sqrt": np.sqrt, "round": np.rint,
        "fma": fma, "select": select, "bitcast_u": bits, "bitcast_i": signed,
        "bitcast_f": lambda x: unsigned(bits(x)).view(real),
    }  # fmt: skip
    exec(compile(tree, "wgsl", "exec"), scope)
    return scope


# No low word may be lost to a driver: the argument of gelu reaches 100, and 750 in float64. A rough
# division errs by 2 units more, of those that the result has or twice as many, and no formula has
# more than two whose errors add up.
@pytest.mark.parametrize(
    "rounding", ["one", "fused", "unfused", "left", "right", "factored", "rough"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_wgsl_text_computes_the_activation(name, dtype, rounding):
    text = table({name: get(name)}, dtype)
    if rounding == "one":  # a device that was found to round once is given a shorter text
        functions = text[text.index(f"fn {name}(") :]
        text = f"{wgsl.prelude(functions, dtype, True)}\n\n{functions}"
        rounding = "fused"
    module = python_of_wgsl(text, dtype, rounding)
    x, info = points(dtype), np.finfo(dtype)
    chosen = np.random.default_rng(3).permutation(x.size)[:72]
    values = exact_values(name, dtype)
    with np.errstate(all="ignore"):
        for order, ending in enumerate(("", "_prime", "_second", "_third")):
            run, worst = module[name + ending], 0.0
            most = 1.5 * BOUND[order] + (8 if rounding == "rough" else 0)
            for i in chosen:
                got, want, above = run(x[i]), values[order][i], values[order + 1][i]
                assert got.dtype == x.dtype
                if rounding == "rough" and abs(got - want) < info.tiny:
                    continue
                scale = max(abs(want), abs(above) / (1 + abs(float(x[i]))) if order else 0)
                worst = max(worst, ulps(got, want, dtype, scale))
            assert worst <= most
            # a rough division could bring the largest number to infinity
            special = [0.0, -0.0, 1e20, -1e20, info.max / 4, np.inf, -np.inf, np.nan]
            special = np.array(special, dtype)
            np.testing.assert_allclose(
                np.array([run(v) for v in special]), array_function(get(name), order)(special),
                rtol=most * info.eps, atol=most * info.eps if rounding == "rough" else 0,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["fused", "factored"])
@pytest.mark.parametrize("name", ["log", "log1p", "erf", "sqrt", "exp", "normal_cdf"])
def test_wgsl_primitives_compute(name, rounding, dtype):
    graph = getattr(ex, name)(ex.SYMBOL)
    text = wgsl.function(graph, "f", dtype)
    run = python_of_wgsl(f"{wgsl.prelude(text, dtype)}\n\n{text}\n", dtype, rounding)["f"]
    x = np.array(
        [0.0, -0.0, 1e-9, 1e-3, 0.3, 0.9, 1.0, 1.1, 2.5, 40, 1e30, np.inf, -1, -2, np.nan], dtype
    )
    with np.errstate(all="ignore"):
        got = np.array([run(v) for v in x])
    np.testing.assert_allclose(got, elementary.evaluate(graph, x), rtol=4 * np.finfo(dtype).eps)


def test_wgsl_names_the_functions_of_the_language_that_it_calls():
    texts = wgsl_arithmetic.TEMPLATES.values()
    called = {name for text in texts for name in re.findall(r"\b([a-z]\w*)\(", text)}
    assert {name for name in called if not name.startswith("nf_")} <= wgsl._CALLED
    assert wgsl._BUILTIN <= wgsl._CALLED


def test_wgsl_refuses_what_it_cannot_write():
    assert "3.4028235e+38f" in wgsl.function(ex.maximum(ex.SYMBOL, -math.inf), "f")
    with pytest.raises(ValueError, match="NaN constant"):
        wgsl.function(ex.SYMBOL * math.nan, "f")
    assert "1.7976931348623157e+308lf" in wgsl.function(
        ex.maximum(ex.SYMBOL, -math.inf), "f", "float64"
    )
    with pytest.raises(ValueError, match="cannot be called 'sqrt'"):
        wgsl.function(ex.SYMBOL, "sqrt")
    with pytest.raises(ValueError, match="dtype must be 'float32' or 'float64', got 'float16'"):
        wgsl.function(ex.SYMBOL, "f", "float16")


# --- a user's own -------------------------------------------------------------------------------


OWN = {
    "mish": (
        lambda x: x * ex.tanh(ex.log1p(ex.exp(x))),
        lambda x: x * mp.tanh(mp.log1p(mp.exp(x))),
    ),
    "softsign": (lambda x: x / (1 + abs(x)), lambda x: x / (1 + abs(x))),
    "squared_relu": (lambda x: np.maximum(x, 0) ** 2, lambda x: max(x, mp.mpf(0)) ** 2),
    "elu": (
        lambda x: ex.where(x > 0, x, ex.exp(ex.minimum(x, 0)) - 1),
        lambda x: x if x > 0 else mp.expm1(x),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OWN)
def test_left_out_derivatives_are_traced(name, dtype):
    formula, textbook = OWN[name]
    act = nf.activation(formula, name=name, source="a test")
    assert get(name) is act and nf.activations()[name] is act and act.id is None
    x = np.array([-5.5, -2.2, -0.6, 0.3, 1.7, 6.1], dtype)
    for order in ORDERS:
        with mp.workdps(60):
            want = [float(mp.diff(textbook, mp.mpf(float(v)), order)) for v in x]
        tolerance = 100 * np.finfo(dtype).eps
        got = compiled(act.trace(order), dtype)(x)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
        got = array_function(act, order)(x)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_the_decorators_define_value_and_derivatives():
    @nf.activation(source="a test")
    def cube(x):
        return x**3

    @cube.derivative
    def cube_prime(x):
        return 3 * x * x

    assert isinstance(cube, Activation) and cube.name == "cube" and cube.source == "a test"
    assert cube(2.0) == 8 and cube.derivative(2.0) == 12
    assert cube.second_derivative(2.0) == 12 and cube.third_derivative(2.0) == 6
    assert cube_prime(2.0) == 12  # stays a function

    before = cube.digest
    cube.derivative(lambda x: 3 * x**2 + 1e-9)
    assert cube.digest != before
    cube.second_derivative(lambda x: 7.0)
    assert cube.second_derivative(1.0) == 7 and cube.third_derivative(1.0) == 0


def test_an_activation_may_be_made_of_activations():
    silu = get("silu")
    twice = nf.activation(lambda x: silu(silu(x)) + silu.derivative(x), name="twice")
    x = np.linspace(-3, 3, 13)
    np.testing.assert_allclose(twice(x), silu(silu(x)) + silu.derivative(x), rtol=1e-14)


def test_redefinition_replaces_and_the_digest_follows_the_formula():
    first = nf.activation(lambda x: x * 2, name="again")
    second = nf.activation(lambda x: x * 3, name="again")
    third = nf.activation(lambda y: 2 * y, name="again")
    assert get("again") is third
    assert first.digest == third.digest != second.digest
    assert (first(1.0), second(1.0), third(1.0)) == (2, 3, 2)


def test_a_branch_is_refused_where_it_stands_and_nothing_is_registered():
    with pytest.raises(TypeError, match=r"numfuse\.expr\.where\(condition, a, b\)"):

        @nf.activation
        def branches(x):
            return x if x > 0 else 0.0

    assert "branches" not in nf.activations()
    with pytest.raises(TypeError, match=r"numfuse\.expr\.exp\(x\) for math\.exp"):
        get("silu").derivative(lambda x: math.exp(x))
    assert get("silu").derivative(0.0) == 0.5


def test_pickles_by_its_graph_also_in_a_fresh_process(tmp_path):
    act = nf.activation(lambda x: x / (1 + abs(x)), name="soft", source="a test")
    x = [-2.0, 0.0, 3.0]
    path = tmp_path / "act.pickle"
    path.write_bytes(pickle.dumps([act, get("gelu")]))
    program = (
        "import json, pickle, sys, numfuse\n"
        f"act, gelu = pickle.load(open({str(path)!r}, 'rb'))\n"
        "assert gelu is numfuse.activations()['gelu'] and 'soft' not in numfuse.activations()\n"
        "assert 'numba' not in sys.modules and 'scipy' not in sys.modules\n"
        f"print(json.dumps([act.name, act.source, act.digest, list(act.derivative({x}))]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    name, source, digest, values = json.loads(run.stdout)
    assert (name, source, digest) == ("soft", "a test", act.digest)
    assert values == list(act.derivative(x))
    assert pickle.loads(pickle.dumps(act)) is act


def test_names_and_kinds_are_checked():
    assert get("silu") is nf.activations()["silu"] is get(get("silu"))
    with pytest.raises(
        ValueError, match=r"one of none, relu, .*, got 'slu' \(did you mean 'silu'\?\)"
    ):
        get("slu")
    with pytest.raises(ValueError, match=r"got 'Q'$"):
        get("Q")
    with pytest.raises(
        TypeError, match=r"a name \(str\) or a numfuse\.activations\.Activation, got int"
    ):
        get(2)
    nf.activations().clear()
    assert "silu" in nf.activations()


@pytest.mark.parametrize("name", ROWS)
def test_njit_functions_serve_a_users_own_kernel(name):
    act = get(name)
    value, slope = act.njit, act.njit_derivative
    curve, third = act.njit_second_derivative, act.njit_third_derivative
    assert act.njit is value

    @njit
    def kernel(x):
        return value(x), slope(x), curve(x), third(x)

    for x in (np.float32(0.7), np.float64(-1.3), 2):
        got = kernel(x)
        dtype = np.float32 if isinstance(x, np.float32) else np.float64
        for order, v in enumerate(got):
            want = array_function(act, order)(dtype(x))
            assert v == pytest.approx(want, rel=100 * float(np.finfo(dtype).eps), abs=1e-15)
    single = {str(s.return_type) for s in value.nopython_signatures if "float32" in str(s.args)}
    assert single == {"float32"}


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is not None,
    reason="numba-cuda is there: tests/cuda/test_cuda_compile.py holds .cuda",
)
def test_cuda_functions_say_what_is_missing():
    with pytest.raises(nf.BackendUnavailable, match=r"'cuda' is not available.*numfuse\[cuda\]"):
        _ = get("silu").cuda


def test_a_row_is_one_formula():
    # What the table's own decorator does, a user's does too, but for the number.
    row = register(lambda x: x + 1, "<lambda>", "a test", 7)
    assert row.id == 7 and row.trace(1) is ex.constant(1) and row.trace(2) is ex.constant(0)
