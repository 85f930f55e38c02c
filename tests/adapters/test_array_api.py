"""Arrays of libraries of the array API standard that no table of numfuse's names."""

from __future__ import annotations

import types

import numpy as np
import pytest
from arrays import NUMPY_KNOWS_DLPACK_1
from dlpack_arrays import New, rng

import numfuse as nf
from numfuse.runtime import dispatch


@pytest.fixture(autouse=True)
def _reference():
    # How arrays come and go depends on no backend: the slow one needs no compilation.
    with nf.use_backend("reference"):
        yield


@pytest.fixture
def strict():
    return pytest.importorskip("array_api_strict")


def _calls():
    a, b, c, w = rng(6, 4), rng(4, 3), rng(3), rng(6, 3)
    u = rng(6, 4)
    square = nf.epilogue(lambda z, bias, scale: (z + bias) * (z + bias) * scale)
    net = [rng(4, 5), rng(5, 2)], [rng(5), None]
    dots = rng(2, 6, 4)
    yield "forward", nf.matmul_bias_activation, (a, b, c, "gelu"), {"return_pre_activation": True}
    yield "backward", nf.matmul_bias_activation_bwd, (w, a, b, c, "gelu"), {"needs": ("a", "bias")}
    yield "residual", nf.matmul_bias_residual, (a, b, c, w), {}
    yield "double", nf.matmul_bias_activation_double_bwd, (u, None, c, w, a, b, c, "tanh"), {}
    yield "tangent", nf.matmul_bias_activation_jvp, (a, b, c, u, None, c, "tanh"), {}
    yield "gate", nf.silu_mul, (a, u), {}
    yield "gate backward", nf.activation_mul_bwd, (u, a, u, "tanh"), {}
    yield "epilogue", nf.matmul_epilogue, (a, b, square, c, 2.0), {}
    yield "epilogue backward", nf.matmul_epilogue_bwd, (w, a, b, square, c, 2.0), {}
    yield "elementwise", nf.elementwise, (lambda x, y: (x * y, x - y), a, u), {}
    yield "gated", nf.matmul_activation_mul, (a, b, b, c, None, "silu"), {}
    yield "jet", nf.matmul_bias_activation_jet, (a, b, c, "tanh", dots), {"keep": True}
    yield "network", nf.mlp, (a, *net), {}
    yield (
        "network backward",
        nf.mlp_bwd,
        (rng(6, 2), a, *net),
        {"needs": ("x", "weights", "biases")},
    )
    yield "network tangent", nf.mlp_jvp, (a, *net, u, None, None), {}
    yield "network jet", nf.mlp_jet, (a, *net), {}
    yield "network jet backward", nf.mlp_jet_bwd, (rng(6, 2), None, None, a, *net), {}
    yield "activation", nf.activations()["gelu"], (a,), {}
    yield "activation's derivative", nf.activations()["gelu"].derivative, (a,), {}
    yield "formula", nf.epilogue(lambda x, y: x * y), (a, u), {}


_CALLS = {name: call for name, *call in _calls()}


def test_the_cpu_sees_these_arrays_where_they_are(strict):
    x, net = rng(6, 4), [rng(4, 5), rng(5, 2)]
    exact = nf.mlp(x, net, None, backend="cpu")
    for made in (strict.asarray, New):
        found = nf.mlp(made(x), list(map(made, net)), None, backend="cpu")
        np.testing.assert_array_equal(np.asarray(found), exact)


def mapped(made, x):
    """Return nested sequences with `made` of their arrays."""
    if isinstance(x, (tuple, list)):
        parts = [mapped(made, y) for y in x]
        return tuple.__new__(type(x), parts) if isinstance(x, tuple) else parts
    return made(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("name", _CALLS)
def test_a_library_of_the_standard_gets_arrays_of_its_own(strict, name):
    if name == "network tangent" and not NUMPY_KNOWS_DLPACK_1:
        pytest.skip("an array that NumPy 2.0 made by DLPack cannot go on by DLPack")
    function, operands, options = _CALLS[name]
    found = function(*mapped(strict.asarray, operands), **options)
    kinds = set()

    def back(x):
        if isinstance(x, (tuple, list)):
            return [back(y) for y in x]
        if hasattr(type(x), "__array_namespace__"):
            kinds.add(x.__array_namespace__())
            return np.asarray(x)
        return x

    exact = back(function(*operands, **options))
    assert kinds == {np}
    kinds.clear()
    _same(back(found), exact)
    assert kinds == {strict}


def _same(found, exact):
    if isinstance(exact, list):
        assert len(found) == len(exact)
        for x, y in zip(found, exact, strict=True):
            _same(x, y)
    elif isinstance(exact, np.ndarray):
        assert found.dtype == exact.dtype
        np.testing.assert_array_equal(found, exact)
    elif exact is None:
        assert found is None


def test_outputs_devices_and_mixtures_of_the_standard(strict):
    x = strict.asarray(rng(4, 3))
    out = strict.asarray(np.full((4, 3), np.nan))
    assert nf.silu_mul(x, x, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), np.asarray(nf.silu_mul(x, x)))
    for given, message in (
        ((x, rng(4, 3)), "arrays of one kind, got a array_api_strict.*, b numpy.ndarray"),
        ((x, New(rng(4, 3))), "arrays of one kind, got a array_api_strict.*, b .*New"),
        (
            (x, strict.asarray(rng(4, 3), dtype=strict.float32)),
            "same dtype, got a float64, b float32",
        ),
        ((x, strict.asarray(np.ones((4, 3), np.int32))), "b must have dtype .* got int32"),
    ):
        with pytest.raises(TypeError, match=message):
            nf.silu_mul(*given)
    with pytest.raises(TypeError, match="out must be an array of array_api_strict as the operands"):
        nf.silu_mul(x, x, out=np.empty((4, 3)))
    assert nf.silu_mul(x, x).device == x.device
    assert type(nf.to_numpy(x)) is np.ndarray and np.shares_memory(nf.to_numpy(x), np.asarray(x))


def test_a_library_of_an_earlier_standard_is_asked_as_that_says(strict):
    x = strict.asarray(rng(4, 3))
    exact = np.asarray(nf.silu_mul(x, x))
    with strict.ArrayAPIStrictFlags(api_version="2022.12"):
        np.testing.assert_array_equal(np.asarray(nf.silu_mul(x, x)), exact)


def test_numpys_own_namespace_changes_nothing():
    x = rng(4, 3)
    assert type(nf.silu_mul(x, x)) is np.ndarray


def test_a_library_of_the_standard_without_dlpack_is_refused():
    class Lazy:
        """As ndonnx has them: a name, and no elements yet."""

        def __array_namespace__(self, *, api_version=None):
            return types.ModuleType("lazy")

        def __array__(self, *_, **__):
            raise AssertionError("was turned into a NumPy array")

    with pytest.raises(TypeError, match=r"a must be a NumPy array, got .*Lazy"):
        nf.silu_mul(Lazy(), Lazy())


@pytest.mark.parametrize(("name", "module"), [("torch", ""), ("jax", ".numpy"), ("dask", ".array")])
def test_the_table_of_libraries_agrees_with_array_api_compat(name, module):
    """numfuse's table is by names, with rows that array-api-compat lacks; theirs says the same."""
    compat = pytest.importorskip("array_api_compat")
    x = pytest.importorskip(name + module).ones(2)
    assert getattr(compat, f"is_{name}_array")(x)
    assert dispatch.adapter_of(x=x).__name__ == f"numfuse.adapters.{name}"
