"""Signed zeros, infinities, NaN and subnormal numbers: what docs/numerics.md says of each.

Values and first derivatives are those of the public functions; a second derivative is the value of
an activation that is made of it, so that it runs in the same kernel.
"""

import sys

import ml_dtypes
import numpy as np
import pytest
from arrays import bits
from conftest import traits
from tolerance import DTYPES

import numfuse as nf

BUILT_IN = [name for name, act in nf.activations().items() if act.id is not None]
ORDERS = [0, 1, 2]
INF = float("inf")

#: f, f', f'' at 0 and at -0; None where the sign is that of the argument.
AT_ZERO = {
    "none": (None, 1.0, 0.0),
    "relu": (0.0, 0.0, 0.0),
    "gelu": (None, 0.5, 0.7978845608028654),
    "silu": (None, 0.5, 0.5),
    "sigmoid": (0.5, 0.25, None),
    "tanh": (None, 1.0, None),
}
#: f, f', f'' at -inf and at inf.
AT_INFINITY = {
    "none": ((-INF, INF), (1, 1), (0, 0)),
    "relu": ((0, INF), (0, 1), (0, 0)),
    "gelu": ((0, INF), (0, 1), (0, 0)),
    "silu": ((0, INF), (0, 1), (0, 0)),
    "sigmoid": ((0, 1), (0, 0), (0, 0)),
    "tanh": ((-1, 1), (0, 0), (0, 0)),
}
#: The factor c of f(x) = c x for the smallest x; None where f(0) is not 0.
SLOPE_AT_ZERO = {"none": 1, "relu": None, "gelu": 0.5, "silu": 0.5, "sigmoid": None, "tanh": 1}


@pytest.fixture(scope="module")
def second():
    """Activations whose values are second derivatives; their names vanish after the module."""
    module = sys.modules["numfuse.activations.table"]
    before = module.TABLE
    module.TABLE = dict(before)
    yield {
        name: nf.activation(nf.activations()[name].second_derivative, name=f"{name}_second")
        for name in BUILT_IN
    }
    module.TABLE = before


@pytest.fixture
def at(second, backend):
    def evaluate(name, order, x):
        one = np.ones_like(x)
        if order == 1:
            run = nf.activation_mul_bwd
            return run(one, x, one, name, needs=("a",), guard=False, backend=backend).d_a
        return nf.activation_mul(x, one, name if order == 0 else second[name], backend=backend)

    return evaluate


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_zeros_keep_their_sign(at, name, order, dtype):
    x = np.array([0.0, -0.0] * 20, DTYPES[dtype])  # vectors and what is left of them
    got, wanted = at(name, order, x), AT_ZERO[name][order]
    if wanted is None and order == 2:
        np.testing.assert_array_equal(bits(got), bits(-x))  # sigmoid'' and tanh'' fall through 0
    elif wanted is None:
        np.testing.assert_array_equal(bits(got), bits(x))
    elif wanted == 0:
        assert not got.any()
    else:
        np.testing.assert_allclose(
            got.astype(np.float64), wanted, rtol=2 * float(ml_dtypes.finfo(x.dtype).eps)
        )


def test_relu_of_minus_zero_is_zero_in_value(at):
    x = np.array([-0.0, 0.0, -1.0], np.float32)
    assert not at("relu", 0, x).any() and not at("relu", 1, x).any()


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_infinities_give_the_limits(at, name, order, dtype):
    x = np.array([-INF, INF] * 20, DTYPES[dtype])
    got = at(name, order, x).astype(np.float64)
    low, high = AT_INFINITY[name][order]
    assert (got[0::2] == low).all() and (got[1::2] == high).all()


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_nan_stays_nan_and_alone(at, name, order, dtype):
    """But where the derivative is a constant or asks for the sign of x only."""
    x = np.linspace(-3, 3, 41).astype(DTYPES[dtype])
    clean = at(name, order, x)
    x[[3, 40]] = np.nan, -np.nan
    got = at(name, order, x)
    rest = ~np.isnan(x.astype(np.float64))
    np.testing.assert_array_equal(bits(got[rest]), bits(clean[rest]))
    if order == 0 or name not in ("none", "relu"):
        assert np.isnan(got[~rest].astype(np.float64)).all()
    else:
        constant = 1 if (name, order) == ("none", 1) else 0
        assert (got[~rest] == constant).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_says_which_subnormal_numbers_it_flushes(backend, dtype):
    info = ml_dtypes.finfo(DTYPES[dtype])
    tiny, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    a = np.array([2 * tiny, -16 * tiny, normal, -normal] * 10, DTYPES[dtype])
    b = np.array([1, 1, 0.5, 0.25] * 10, DTYPES[dtype])
    got = nf.activation_mul(a, b, "none", backend=backend)
    exact = (a.astype(np.float64) * b.astype(np.float64)).astype(DTYPES[dtype])
    kept = bits(got) == bits(exact)
    assert kept.all() or not got[~kept].any()  # it is kept, or 0
    assert kept.all() == (dtype not in traits(backend).subnormals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_subnormal_arguments_are_not_flushed(at, backend, name, dtype):
    """But where the backend says that they count as zero: then they may."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    tiny = float(info.smallest_subnormal)
    count = np.arange(2, 42, 2) * np.resize([1, -1], 20)  # even, so that half of them is exact
    x = (count * tiny).astype(DTYPES[dtype])
    assert (x != 0).all()
    value, slope, curve = (at(name, order, x).astype(np.float64) for order in ORDERS)
    wide = x.astype(np.float64)

    def assert_is(got, exact, error=0.0):
        zero = (got == 0) & (dtype in traits(backend).subnormals)
        assert ((np.abs(got - exact) <= error) | zero).all()

    if name == "relu":
        assert_is(value, np.maximum(wide, 0))
        assert_is(slope, wide > 0)
    elif SLOPE_AT_ZERO[name] is not None:
        assert_is(value, SLOPE_AT_ZERO[name] * wide)
        assert (slope == AT_ZERO[name][1]).all()
    else:
        assert (value == 0.5).all() and (slope == 0.25).all()
    if name == "tanh":
        assert_is(curve, -2 * wide)
    elif name == "sigmoid":
        # -x / 8 is rounded to a whole number of subnormal units
        assert_is(curve, -wide / 8, 0.75 * tiny)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid"])
def test_subnormal_results_are_not_flushed(at, backend, name, dtype):
    """The far negative tail goes through the subnormal numbers down to the smallest one, but where
    the backend says that they count as zero: there through the normal ones."""
    info = np.finfo(dtype)
    far = {"gelu": -22.0, "silu": -760.0, "sigmoid": -750.0}[name]
    if dtype == "float32":
        far = {"gelu": -14.0, "silu": -112.0, "sigmoid": -105.0}[name]
    x = np.linspace(far, 0.6 * far, 20001).astype(dtype)
    got = np.abs(at(name, 0, x))
    least = info.smallest_subnormal
    if dtype in traits(backend).subnormals:
        least = info.smallest_normal
    else:
        assert ((got > 0) & (got < info.smallest_normal)).sum() > 100
    assert (got == 0).any() and got[got > 0].min() <= 8 * least


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_numpy_is_to_do_with_an_overflow_changes_nothing(backend, dtype):
    """Errors of NumPy's are not the kernels', and a call that raises would have written a part; in
    the first call of a formula too, when its constants are rounded."""
    large, small = (float(f(ml_dtypes.finfo(dtype))) for f in (lambda i: i.max, lambda i: i.tiny))
    a = np.full((4, 3), large, dtype)
    a[0] = 0, small, -large
    b, bias, residual = a[:3].copy(), a[0].copy(), a[:1].copy()

    def results():
        # (a constant that is subnormal in float32: a new formula each time)
        constant = 1e-45 * (2 + len(found))
        act = nf.activation(lambda x: x * x + constant, name=f"squared {constant}")
        out = np.empty_like(residual)
        yield from nf.matmul_bias_residual_bwd(
            a, a, b, bias, residual, out=(None, None, None, out), backend=backend
        )
        yield nf.matmul_bias_residual(a, b, bias, residual, backend=backend)
        yield from nf.activation_mul_bwd(a, a, a, act, backend=backend)
        yield from nf.activation_mul_jvp(a, a, a, a, "silu", backend=backend)

    found = []
    for how in ("raise", "ignore"):
        with np.errstate(all=how):
            found.append(list(results()))
    for raising, ignoring in zip(*found, strict=True):
        np.testing.assert_array_equal(raising, ignoring)
    assert any(np.isinf(x).any() for x in found[0])
