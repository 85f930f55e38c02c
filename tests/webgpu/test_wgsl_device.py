"""The WGSL functions on a real adapter: every activation, every derivative, both dtypes.

Bounds, in the units in the last place (ULP) of `docs/webgpu_ulp.py`. The formulas themselves have
1.5 times those of the compiled ones (`test_activations.BOUND`), as WGSL's sigmoid does without one
correction. WGSL promises a division within 2.5 ULP, where IEEE has 0.5: 2 more each, of units of
the result or twice as many. No formula has more than two divisions whose errors add up (a sigmoid
in the factor of another one), so that is 8 more: 14 for a value, 20, 44 and 104 for derivatives.
fma may be two roundings, or products contracted with sums: neither counts
(`test_wgsl_text_computes_the_activation` computes both). A device that flushes subnormal numbers
may be off by the smallest normal one.

Where a driver reassociates sums (as Mesa does for OpenGL), the text keeps apart those that must not
be one. Without that, exp is 67 ULP off there, and an argument of gelu without its low word costs
about 2 |v| ULP: 200 in float32, 1500 in float64, in the far tail.
"""

import importlib.util
import os
import pathlib
import sys

import numpy as np
import oracle
import pytest
from conftest import unavailable
from test_activations import BOUND
from tolerance import EVALUATION, roundoff

import numfuse as nf
from numfuse import expr as ex

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "webgpu_ulp.py"
ROWS = [name for name, act in nf.activations().items() if act.source != "user-defined"]
ORDERS = range(4)
DTYPES = ["float32", "float64"]
MOST = [1.5 * bound + 8 for bound in BOUND]
#: Functions that a user's formula may call, beside those that the table calls.
PRIMITIVES = ["exp", "log", "log1p", "erf", "sqrt", "normal_cdf", "sigmoid", "tanh"]
WITHOUT_X = {("none", 1), ("none", 2), ("none", 3), ("relu", 2), ("relu", 3)}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("webgpu_ulp", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def adapter(script):
    try:
        found = script.find_adapter()
    except script.Unavailable as why:
        unavailable("webgpu", str(why))
    return found


class Results:
    """One run of all functions over all arguments, and what else is known of the device."""

    def __init__(self, script, adapter, dtype):
        table = script.table_functions()
        self.functions = {
            k: v for k, v in table.items() if k.split("_", 1)[1].startswith(tuple(ROWS))
        }
        self.functions |= {f"of_{name}": getattr(ex, name)(ex.SYMBOL) for name in PRIMITIVES}
        self.functions["halved"] = ex.SYMBOL * 0.5
        self.info = np.finfo(dtype)
        self.run = script.Runner(adapter, self.functions, dtype)
        self.x = arguments(script, dtype)
        self.got = self.run(self.x)
        tiny = np.array([self.info.smallest_normal], dtype)
        self.flushes = self.run(tiny)["halved"][0] == 0

    def of(self, name, order, script):
        return self.got[f"act_{name}{script.ENDINGS[order]}"]


@pytest.fixture(scope="module")
def results(script, adapter):
    made = {}

    def of(dtype):
        if dtype not in made:
            try:
                made[dtype] = Results(script, adapter, dtype)
            except script.Unavailable as why:
                pytest.skip(str(why))  # an adapter may lack f64
        return made[dtype]

    return of


def special(dtype):
    info = np.finfo(dtype)
    x = np.array(
        [0, info.smallest_subnormal, info.smallest_normal / 4, info.smallest_normal, 1e-30, 1e-9,
         30, 40, 50, 100, 800, 1e3, 1e10, 1e20, info.max / 4, info.max, np.inf],
        dtype,
    )  # fmt: skip
    return np.concatenate([x, -x])


def arguments(script, dtype):
    """Dense where activations bend and in their tails, all exponents, and around every zero."""
    zeros = (0.6585, 0.7525, 1.2785, 1.317, 1.4142, 1.4185, 2.0, 2.0130, 2.3994, 3.4358)
    near = [z + d for z in zeros for d in np.concatenate([[0], np.geomspace(1e-12, 1e-2, 40)])]
    near = np.array([*near, *(-v for v in near)], dtype)
    return np.concatenate([special(dtype), near, script.arguments(dtype, 1 << 16, seed=7)])


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


# --- the device ---------------------------------------------------------------------------------


def test_the_adapter_is_the_one_that_is_meant(script, adapter, results, record_property):
    info = adapter.info
    print(f"{info['device']}, {info['backend_type']}, {info['adapter_type']}")
    record_property("adapter", dict(info))
    wanted = os.environ.get("NUMFUSE_WEBGPU_ADAPTER", "").lower()
    assert wanted in f"{info['device']} {info['backend_type']}".lower()
    assert info["device"] and info["adapter_type"] in ("CPU", "IntegratedGPU", "DiscreteGPU")
    vulkan = [a for a in script.adapters() if a.info["backend_type"] == "Vulkan"]
    assert info["backend_type"] == "Vulkan" or wanted or not vulkan
    # what ran is a device of that adapter
    assert results("float32").run.device.adapter.info["device"] == info["device"]


def test_an_adapter_that_does_not_exist_is_named(script, adapter, monkeypatch):
    monkeypatch.setenv("NUMFUSE_WEBGPU_ADAPTER", "no such adapter")
    with pytest.raises(script.Unavailable, match="no WebGPU adapter is called 'no such adapter'"):
        script.find_adapter()


# --- accuracy -----------------------------------------------------------------------------------


def assert_within(script, done, name, order):
    x, got = done.x, done.of(name, order, script)
    graph = nf.activations()[name].trace(order)
    off = script.errors(graph, order, x, got)
    if done.flushes:
        with np.errstate(invalid="ignore"):  # two infinities
            lost = np.abs(got - script.reference(graph, x)) <= done.info.smallest_normal
        off = np.where(lost, 0, off)
        if (name, order) == ("relu", 1):  # a subnormal argument may count as zero, where it jumps
            off = np.where((x != 0) & (np.abs(x) < done.info.smallest_normal), 0, off)
    worst = off.argmax()
    assert off[worst] <= MOST[order], (name, order, x[worst], got[worst])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROWS)
def test_errors_are_within_the_bound(script, results, name, order, dtype):
    assert_within(script, results(dtype), name, order)


def test_errors_are_within_the_bound_on_every_other_adapter(script, adapter):
    """Another interface has another compiler: Mesa reassociates sums of OpenGL, not of Vulkan."""
    others = [a for a in script.adapters() if dict(a.info) != dict(adapter.info)]
    tried = 0
    for other in others:
        try:
            done = Results(script, other, "float32")
        except script.Unavailable:
            continue  # it gives no device, as NVIDIA's OpenGL
        tried += 1
        for name in ROWS:
            for order in ORDERS:
                assert_within(script, done, name, order)
    if not tried:
        pytest.skip("one adapter only")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", ROWS)
def test_results_agree_with_the_textbook(script, results, name, order, dtype):
    """Point 2 of `tolerance`, against formulas that know nothing of numfuse."""
    done = results(dtype)
    f = (oracle.VALUE, oracle.SLOPE)[order][name]
    moderate = np.abs(done.x) <= 100
    if done.flushes and (name, order) == ("relu", 1):  # as above
        moderate &= (done.x == 0) | (np.abs(done.x) >= done.info.smallest_normal)
    x, got = oracle.wide(done.x[moderate]), done.of(name, order, script)[moderate]
    u = (EVALUATION + 8) * roundoff(np.dtype(dtype))
    with np.errstate(all="ignore"):
        want = f(x)
        change = np.maximum(*(np.abs(f(x + s * u * np.abs(x)) - want) for s in (1, -1)))
    if name == "gelu_erf":  # the oracle's erfc is a float64
        change = change + 16 * np.finfo(np.float64).eps * np.abs(want)
        change = change + 8 * np.finfo(np.float64).eps * (order == 1)
    error = 2 * change + u * np.abs(want) + 4 * u * u + done.info.smallest_normal
    wrong = ~(np.abs(oracle.wide(got) - want) <= error)
    assert not wrong.any(), (x[wrong][:4], got[wrong][:4], want[wrong][:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_functions_of_a_formula_are_accurate(script, results, name, dtype):
    done = results(dtype)
    graph, got = done.functions[f"of_{name}"], done.got[f"of_{name}"]
    # A subnormal argument of log may count as zero, where log is not continuous.
    kept = (np.abs(done.x) >= done.info.smallest_normal) | (done.x == 0) | (not done.flushes)
    off = script.errors(graph, 0, done.x[kept], got[kept])
    if done.flushes:
        with np.errstate(invalid="ignore"):  # two infinities
            lost = np.abs(got[kept] - script.reference(graph, done.x[kept]))
        off = np.where(lost <= done.info.smallest_normal, 0, off)
    worst = off.argmax()
    assert off[worst] <= MOST[0], (done.x[kept][worst], got[kept][worst])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_functions_are_exact(script, results, dtype):
    done = results(dtype)
    normal = (np.abs(done.x) >= done.info.smallest_normal) | (done.x == 0) | (not done.flushes)
    x = done.x[normal]
    assert same_bits(done.of("none", 0, script)[normal], x)
    np.testing.assert_array_equal(done.of("relu", 0, script)[normal], np.maximum(x, 0))
    np.testing.assert_array_equal(done.of("relu", 1, script)[normal], x > 0)


# --- special values -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan_and_nothing_else_becomes_one(script, results, dtype):
    """Every NaN counts: quiet or signalling, of either sign, with any payload."""
    done = results(dtype)
    unsigned = np.dtype(f"u{done.info.bits // 8}")
    top = np.array([np.inf], dtype).view(unsigned)[0]
    one, sign = unsigned.type(1), unsigned.type(1 << (done.info.bits - 1))
    quiet = unsigned.type(1 << (done.info.nmant - 1))
    bits = np.array([top | one, top | quiet, top | (quiet - one), sign - one], unsigned)
    nans = np.concatenate([bits, bits | sign]).view(dtype)
    assert np.isnan(nans).all()
    got = done.run(np.repeat(nans, 40))
    for name in ROWS:
        for order in ORDERS:
            y = got[f"act_{name}{script.ENDINGS[order]}"]
            if (name, order) in WITHOUT_X or (name, order) == ("relu", 1):
                assert (y == (1 if name == "none" and order == 1 else 0)).all(), (name, order)
            else:
                assert np.isnan(y).all(), (name, order)
            assert not np.isnan(done.of(name, order, script)).any(), (name, order)
    for name in PRIMITIVES:
        assert np.isnan(got[f"of_{name}"]).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ROWS)
def test_infinite_arguments_give_the_limits(script, results, name, order, dtype):
    run = results(dtype).run
    x = np.array([-np.inf, np.inf], dtype)
    got = run(x)[f"act_{name}{script.ENDINGS[order]}"]
    act = nf.activations()[name]
    want = (act, act.derivative, act.second_derivative, act.third_derivative)[order](x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", "gelu", "silu", "tanh", "gelu_erf"])
def test_odd_at_zero_keeps_its_sign(script, results, name, dtype):
    got = results(dtype).run(np.array([-0.0, 0.0], dtype))[f"act_{name}"]
    assert np.signbit(got).tolist() == [True, False] and not got.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_has_the_same_bits_at_every_place(results, dtype):
    done = results(dtype)
    back = done.run(done.x[::-1][:1001])
    for name, y in done.got.items():
        assert same_bits(back[name], y[::-1][:1001].copy()), name
