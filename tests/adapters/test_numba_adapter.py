"""numfuse inside a user's own njit functions: products, gates, device functions, prange."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import numba
import numpy as np
import pytest
from arrays import bits
from numba.core.errors import NumbaWarning, TypingError

import numfuse as nf
import numfuse.adapters.numba

DTYPES = ("float64", "float32")


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@numba.njit
def layer(a, b, bias):
    return nf.matmul_bias_activation(a, b, bias, "gelu")


@numba.njit
def bare(a, b):
    return nf.matmul_bias_activation(a, b)


@numba.njit
def gradients(grad, a, b, bias):
    return nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")


@numba.njit
def gradients_without(grad, a, b):
    return nf.matmul_bias_activation_bwd(grad, a, b, None, "silu")


@numba.njit
def gates(grad, a, b):
    return nf.activation_mul(a, b, "tanh"), nf.silu_mul(a, b), nf.gelu_mul_bwd(grad, a, b)


@numba.njit
def gate(a, b):
    return nf.silu_mul(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (7, 5, 3), (65, 33, 17), (300, 290, 1100), (0, 3, 4), (3, 0, 4), (3, 4, 0)]
)
def test_products_have_the_bits_of_the_core(shape, dtype):
    m, n, k = shape
    a, b, bias, grad = draw(dtype, (m, k), (k, n), (n,), (m, n))
    assert (bits(layer(a, b, bias)) == bits(nf.matmul_bias_activation(a, b, bias, "gelu"))).all()
    assert (bits(bare(a, b)) == bits(nf.matmul_bias_activation(a, b))).all()
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    for x, y in zip(gradients(grad, a, b, bias), wanted, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * 10 * max(1, m, n) ** 0.5)
    d_a, d_b, d_bias = gradients_without(grad, a, b)
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, None, "silu")
    assert d_bias is None
    np.testing.assert_allclose(d_a, wanted.d_a, rtol=tolerance, atol=tolerance * 200)
    np.testing.assert_allclose(d_b, wanted.d_b, rtol=tolerance, atol=tolerance * 200)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_taken_as_they_are(dtype):
    wide, b, bias = draw(dtype, (40, 31), (21, 60), (39,), seed=1)
    for x, y, z in (
        (wide[:, ::2][:, :12], b[:12, ::3][:, :20], bias[::2]),
        (wide.T[:, :21], b[::-1, :39], bias),
        (wide[::-1, 3:24], np.asfortranarray(b)[:, :39], bias[::-1]),
    ):
        assert (bits(layer(x, y, z)) == bits(nf.matmul_bias_activation(x, y, z, "gelu"))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9,), (4, 5), (2, 3, 4), (0,)])
def test_gates_have_the_bits_of_the_core(shape, dtype):
    grad, a, b = draw(dtype, shape, shape, shape, seed=2)
    first, second, third = gates(grad, a, b)
    assert (bits(first) == bits(nf.activation_mul(a, b, "tanh"))).all()
    assert (bits(second) == bits(nf.silu_mul(a, b))).all()
    for x, y in zip(third, nf.gelu_mul_bwd(grad, a, b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6 if dtype == "float32" else 1e-14)
    assert (bits(gate(a[::-1], b[::-1])) == bits(nf.silu_mul(a[::-1], b[::-1]))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.long
def test_fast_math_around_a_call_changes_no_bit(dtype):
    """The flags of a caller say that there is no NaN; the guard is there for those that come."""
    fast = [numba.njit(fastmath=True)(f.py_func) for f in (layer, gradients, gates)]
    a, b, bias, grad = draw(dtype, (5, 9), (9, 33), (33,), (5, 33), seed=6)
    a[1, 2], a[2, 3], a[3, 4] = np.nan, np.inf, -np.inf
    x = np.array([np.nan, np.inf, -np.inf, -0.0, np.finfo(dtype).max, 0.3] * 5, dtype)
    for quick, function, operands in zip(
        fast,
        (layer, gradients, gates),
        ((a, b, bias), (grad, a, b, bias), (x[::-1], x, np.ones_like(x))),
        strict=True,
    ):
        found, wanted = (
            np.concatenate([np.ravel(y) for y in _leaves(f(*operands))]) for f in (quick, function)
        )
        np.testing.assert_array_equal(found, wanted)
    # d_a of the row with a NaN is that of a derivative of 0, by the guard.
    assert (fast[1](np.ones_like(grad), a, b, bias)[0][1] == 0).all()


def _leaves(x):
    return [z for y in x for z in _leaves(y)] if isinstance(x, tuple) else [x]


@numba.njit(parallel=True)
def many(a, b, bias):
    out = np.empty((a.shape[0], a.shape[1], b.shape[1]), a.dtype)
    for i in numba.prange(a.shape[0]):
        out[i] = nf.matmul_bias_activation(a[i], b, bias, "silu")
    return out


@pytest.mark.long
def test_calls_in_a_prange_of_ones_own():
    a, b, bias = draw("float32", (64, 30, 40), (40, 50), (50,), seed=3)
    wanted = nf.matmul_bias_activation(a, b, bias, "silu")
    for _ in range(3):
        assert (bits(many(a, b, bias)) == bits(wanted)).all()


@pytest.mark.parametrize("name", ["gelu", "tanh", "softplus"])
def test_device_functions_work_in_ones_own_kernels(name):
    act = nf.activations()[name]
    value, slope, second = act.njit, act.njit_derivative, act.njit_second_derivative

    @numba.njit
    def kernel(x):
        out = np.empty((3, x.size), x.dtype)
        for i in range(x.size):
            out[0, i], out[1, i], out[2, i] = value(x[i]), slope(x[i]), second(x[i])
        return out

    x = np.linspace(-5, 5, 41)
    wanted = np.stack([act(x), act.derivative(x), act.second_derivative(x)])
    np.testing.assert_allclose(kernel(x), wanted, rtol=1e-13, atol=1e-15)
    assert kernel(x.astype(np.float32)).dtype == np.float32


def test_what_cannot_be_served_is_a_typing_error():
    a, b = draw("float64", (3, 4), (4, 5), seed=4)
    single = a.astype(np.float32)

    @numba.njit
    def chosen(a, b, activation):
        return nf.matmul_bias_activation(a, b, None, activation)

    with pytest.raises(TypingError, match="activation must be a literal"):
        chosen(a, b, "gelu")
    with pytest.raises(TypingError, match="must be of one dtype, float32 or float64"):
        bare(single, b)
    with pytest.raises(TypingError, match="a must have 2 axes, got 3"):
        bare(a[None], b)
    with pytest.raises(ValueError, match="b must have shape"):
        bare(a, a)


def test_numba_is_told_not_to_cache_addresses(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    function = numba.njit(cache=True)(bare.py_func)
    a, b = draw("float64", (3, 4), (4, 5), seed=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(a, b)
    assert any(
        issubclass(w.category, NumbaWarning) and "Cannot cache compiled function" in str(w.message)
        for w in caught
    )
    assert not list(tmp_path.rglob("*.nbc"))


def test_numba_finds_the_adapter_by_its_entry_point():
    text = (Path(nf.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)["project"]["entry-points"]["numba_extensions"]
    assert found == {"init": "numfuse.adapters.numba:init"}
