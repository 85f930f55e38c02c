"""Dask: epilogues, elementwise formulas and the gated layer, in blocks of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numfuse as nf
from numfuse import expr as ex

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

from numfuse.adapters import dask as adapter  # noqa: E402

M, K, N = 13, 7, 4


@nf.epilogue
def scaled_rows(z, bias, scale):
    return ex.tanh(z + bias) * scale


def two(z, w, s):
    return z * w + s


def pair(x, y, c):
    return x + c * y, x * y


@pytest.fixture(autouse=True)
def local_scheduler():
    with dask.config.set(scheduler="threads", num_workers=2):
        yield


def draw(*shapes, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def lazy(x, *chunks):
    return da.from_array(x, chunks=chunks)


def same(found, wanted, tol=1e-12):
    """Every part is lazy, and what it promises is what it is."""
    if isinstance(wanted, tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other, tol)
    elif wanted is None:
        assert found is None
    else:
        assert isinstance(found, da.Array)
        found = found.persist()
        blocks = [block.shape for block in dask.compute(*found.to_delayed().ravel())]
        value = found.compute()
        assert value.shape == found.shape == wanted.shape
        assert value.dtype == found.dtype == wanted.dtype
        assert sum(map(np.prod, blocks)) == wanted.size
        np.testing.assert_allclose(value.astype(float), wanted.astype(float), tol, 10 * tol)


def test_every_function_is_that_of_numpy():
    a, b, bias, scale, grad = draw((M, K), (K, N), (N,), (M, 1), (M, N))
    x, s, g = lazy(a, 5, 7), lazy(scale, 5, 1), lazy(grad, 5, 4)
    keep = {"return_pre_activation": True}
    cases = [
        ("matmul_epilogue", (x, b, scaled_rows, bias, s), {}),
        ("matmul_epilogue", (x, lazy(b, 7, 4), scaled_rows, bias, s), keep),
        ("matmul_epilogue_bwd", (g, x, b, scaled_rows, bias, s), {}),
        ("matmul_epilogue_bwd", (g, x, b, scaled_rows, bias, s), {"needs": ("b", 0)}),
        ("matmul_epilogue_bwd", (g, x, (b, b), two, 2.0), {}),
        ("matmul_epilogue_jvp", (x, b, scaled_rows, (bias, s), x, None, (bias, None)), {}),
        ("matmul_activation_mul", (x, b, b, bias, None, "gelu"), {}),
        ("matmul_activation_mul", (x, b, b, bias), keep),
        ("matmul_activation_mul_bwd", (g, x, b, b, bias), {}),
        ("matmul_activation_mul_double_bwd", (x, b, None, bias, None, g, x, b, b, bias), {}),
        ("matmul_activation_mul_jvp", (x, b, b, bias, None, x, None, b, None), {}),
        ("elementwise", (pair, x, a[:1], 2.0), {}),
        ("elementwise", (pair, lazy(a, 5, 3), lazy(a[:1], 1, 3), 2.0), {}),
        ("elementwise_bwd", ((lazy(a, 5, 3), None), pair, lazy(a, 5, 3), a[:1], 2.0), {}),
    ]  # fmt: skip

    def whole(v):
        if isinstance(v, tuple):
            return tuple(map(whole, v))
        return v.compute() if isinstance(v, da.Array) else v

    for name, args, options in cases:
        wanted = getattr(nf, name)(*map(whole, args), **options)
        for functions in (nf, adapter):
            same(getattr(functions, name)(*args, **options), wanted)


def test_what_a_forward_kept_saves_its_products():
    a, b, c, grad = draw((M, K), (K, N), (K, N), (M, N), seed=1)
    x, g = lazy(a, 5, 7), lazy(grad, 5, 4)
    pre = nf.matmul_activation_mul(x, b, c, return_pre_activation=True)[1]
    found = nf.matmul_activation_mul_bwd(g, x, b, c, pre_activation=pre)
    same(found, nf.matmul_activation_mul_bwd(grad, a, b, c))


@given(st.data())
@settings(max_examples=15)
def test_gradients_are_summed_over_blocks(data):
    lead = data.draw(st.sampled_from([(), (3,)]))
    own = data.draw(st.sampled_from([(), lead]))
    full = (*lead, M, N)
    shape = full[data.draw(st.integers(0, len(full))) :]
    shape = tuple(length if data.draw(st.booleans()) else 1 for length in shape)
    cut = (*(data.draw(st.integers(1, 3)) for _ in lead), data.draw(st.integers(3, M)))
    arrays = draw((*lead, M, K), (*own, K, N), (N,), shape, full, seed=len(shape))
    a, b, bias, scale, grad = arrays

    def chunks(x, last):
        every = (*cut, last)[len(cut) + 1 - x.ndim :]
        return lazy(x, *(min(c, n) for c, n in zip(every, x.shape, strict=True)))

    own_b = lazy(b, *cut[:-1], K, N) if b.ndim > 2 else b
    x, g, s = chunks(a, K), chunks(grad, N), chunks(scale, N)
    found = nf.matmul_epilogue_bwd(g, x, own_b, scaled_rows, bias, s)
    same(found, nf.matmul_epilogue_bwd(grad, a, b, scaled_rows, bias, scale, backend="reference"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_half_types_are_rounded_once(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    a, b, bias, scale, grad = draw((200, K), (K, N), (N,), (200, 1), (200, N), dtype=dtype)
    found = nf.matmul_epilogue_bwd(
        lazy(grad, 10, N), lazy(a, 10, K), b, scaled_rows, bias, lazy(scale, 10, 1)
    )
    wide = [x.astype("float64") for x in (grad, a, b, bias, scale)]
    wanted = nf.matmul_epilogue_bwd(*wide[:3], scaled_rows, *wide[3:], backend="reference")
    for left, right in ((found.d_b, wanted.d_b), (found.d_operands[0], wanted.d_operands[0])):
        assert left.dtype == dtype
        bound = 2e-3 if dtype == "float16" else 1.6e-2
        error = np.abs(left.compute().astype("float64") - right).max() / np.abs(right).max()
        assert error < bound, error
    number = nf.elementwise_bwd(lazy(a, 10, K), lambda x, c: x * c, lazy(a, 10, K), 2.0)[1]
    assert number.dtype == number.compute().dtype == np.float32


def test_a_batch_of_weights_can_be_summed_over():
    a, b, grad = draw((6, 5, K), (6, K, N), (6, 5, N), seed=2)
    x, w, g = lazy(a, 2, 3, K), lazy(b, 2, K, N), lazy(grad, 2, 3, N)
    found = nf.matmul_activation_mul_bwd(g, x, w, w, sum_batch=True)
    same(found, nf.matmul_activation_mul_bwd(grad, a, b, b, sum_batch=True))


def test_errors_say_what_to_do():
    a, b, bias, scale = draw((M, K), (K, N), (N,), (M, 1))
    x, s = lazy(a, 5, 7), lazy(scale, 5, 1)
    f = nf.matmul_epilogue
    with pytest.raises(ValueError, match=r"a must have K in one chunk, got 3: .*rechunk"):
        f(lazy(a, 5, 3), b, scaled_rows, bias, s)
    with pytest.raises(ValueError, match=r"b must have the columns \(N\) in one chunk"):
        f(x, lazy(b, 7, 2), scaled_rows, bias, s)
    with pytest.raises(ValueError, match="bias must broadcast to the result's shape"):
        f(x, b, scaled_rows, bias[:3], s)
    with pytest.raises(ValueError, match=r"scale must be chunked along the rows \(M\) as a is"):
        f(x, b, scaled_rows, bias, lazy(scale, 4, 1))
    with pytest.raises(ValueError, match="out must be None for Dask arrays"):
        f(x, b, scaled_rows, bias, s, out=np.empty((M, N)))
    with pytest.raises(TypeError, match="must have the same dtype"):
        f(x, b.astype("float32"), scaled_rows, bias, s)
    with pytest.raises(ValueError, match="a must have 2 or more axes as a Dask array"):
        f(lazy(a[0], 7), b, scaled_rows, bias, 1.0)
    with pytest.raises(TypeError, match="takes 3 arguments"):
        f(x, b, scaled_rows, bias)
