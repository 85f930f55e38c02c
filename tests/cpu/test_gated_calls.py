"""Gated operations on the CPU: stores past the caches, and small calls that are kept by form.

Guards: a gate has the same bits for any size, strides, threads and `out=` (docs/numerics.md).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numba
import numpy as np
import pytest
from arrays import Fenced, bits, in_layout, normal, unwritten
from guard_pages import guarded
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends.cpu import descriptors, tiling
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.kernels import rows
from numfuse.runtime.replay import Replay

FORMATS = tuple(DTYPES)
STEP = tiling.STREAM_STEP
#: Around a step, a line and a block of rows that go past the caches.
LENGTHS = (1, STEP - 1, STEP, STEP + 1, 5 * STEP + 37, tiling.STREAM_ROW_BLOCK + STEP + 3)
ACTIVATION = "gelu"


@pytest.fixture
def streamed(monkeypatch):
    """Results of any size go past the caches; says how often a plan was made for that."""
    made: list[Any] = []
    plain = descriptors.rows

    def spied(*arguments, stream=None, **options):
        made.append(stream)
        return plain(*arguments, stream=stream, **options)

    monkeypatch.setattr(BACKEND, "replay", Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES))
    monkeypatch.setattr(descriptors, "rows", spied)
    monkeypatch.setattr(tiling, "STREAM_BYTES", 0)
    return made


def operands(shape, fmt="float32", layout="c", seed=0):
    rng = np.random.default_rng(seed)
    return [in_layout(normal(rng, shape, DTYPES[fmt]), layout) for _ in range(3)]


def at_offset(size: int, dtype: np.dtype, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """All of a buffer of NaN, and `size` of its elements from `offset` behind a line on."""
    buffer = np.full(size + 256, np.nan, dtype)
    first = -(buffer.__array_interface__["data"][0] // dtype.itemsize) % (64 // dtype.itemsize)
    return buffer, buffer[first + 64 + offset : first + 64 + offset + size]


def assert_fenced(buffer: np.ndarray, inner: np.ndarray) -> None:
    """All outside of `inner` is still NaN."""
    inner[...] = np.nan
    assert np.isnan(buffer).all(), "a store went past the output"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("offset", [0, 1, 5, 31])
def test_stores_past_the_caches_write_the_same_bits_and_nothing_else(fmt, offset, streamed):
    for size in LENGTHS:
        grad, a, b = operands((size,), fmt, seed=size)
        with pytest.MonkeyPatch.context() as usual:
            usual.setattr(tiling, "STREAM_BYTES", 1 << 60)
            wanted = nf.activation_mul(a, b, ACTIVATION)
            wanted_d_a, wanted_d_b = nf.activation_mul_bwd(grad, a, b, ACTIVATION)
        BACKEND.replay.clear()
        for second in (offset, offset + 3):  # results whose lines begin together, or apart
            buffers = [at_offset(size, DTYPES[fmt], x) for x in (offset, offset, second)]
            out, d_a, d_b = (inner for _, inner in buffers)
            with unwritten(grad, a, b):
                nf.activation_mul(a, b, ACTIVATION, out=out)
                nf.activation_mul_bwd(grad, a, b, ACTIVATION, out=(d_a, d_b))
            np.testing.assert_array_equal(bits(out), bits(wanted))
            np.testing.assert_array_equal(bits(d_a), bits(wanted_d_a))
            np.testing.assert_array_equal(bits(d_b), bits(wanted_d_b))
            for buffer, inner in buffers:
                assert_fenced(buffer, inner)
    assert any(streamed)


@pytest.mark.parametrize("layout", ["transposed", "inner_sliced", "reversed", "zero_stride"])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_any_strides_with_stores_past_the_caches(fmt, layout, streamed):
    for shape in ((3, 5 * STEP + 7), (41, 2 * STEP + 1), (2, 3, STEP + 9)):
        grad, a, b = operands(shape, fmt, layout)
        plain = [np.ascontiguousarray(x) for x in (grad, a, b)]
        out = Fenced(shape, DTYPES[fmt], strided=True)
        gradients = [Fenced(shape, DTYPES[fmt], strided=True) for _ in range(2)]
        nf.activation_mul(a, b, ACTIVATION, out=out.array)
        nf.activation_mul_bwd(grad, a, b, ACTIVATION, out=tuple(x.array for x in gradients))
        with pytest.MonkeyPatch.context() as usual:
            usual.setattr(tiling, "STREAM_BYTES", 1 << 60)
            usual.setattr(BACKEND, "replay", Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES))
            wanted = nf.activation_mul(*plain[1:], ACTIVATION)
            wanted_gradients = nf.activation_mul_bwd(*plain, ACTIVATION)
        np.testing.assert_array_equal(bits(out.array), bits(wanted))
        for x, right in zip(gradients, wanted_gradients, strict=True):
            np.testing.assert_array_equal(bits(x.array), bits(right))
            x.assert_untouched()
        out.assert_untouched()
    assert any(streamed)


@pytest.mark.parametrize("fmt", FORMATS)
def test_in_place_with_stores_past_the_caches(fmt, streamed):
    size = 3 * tiling.STREAM_ROW_BLOCK + 11
    _, a, b = operands((size,), fmt)
    wanted = nf.activation_mul(a, b, ACTIVATION)
    first, second = a.copy(), b.copy()
    assert nf.activation_mul(first, b, ACTIVATION, out=first) is first
    assert nf.activation_mul(a, second, ACTIVATION, out=second) is second
    np.testing.assert_array_equal(bits(first), bits(wanted))
    np.testing.assert_array_equal(bits(second), bits(wanted))
    assert any(streamed)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("at_end", [True, False])
def test_stores_past_the_caches_end_with_the_memory(fmt, at_end, streamed):
    """A stray access ends the process: nothing beyond the page may be touched."""
    for size in (STEP, STEP + 1, tiling.STREAM_ROW_BLOCK + 2 * STEP + 5):
        x, y, z, out, d_a, d_b = (guarded((size,), DTYPES[fmt], at_end) for _ in range(6))
        for array, values in zip((x, y, z), operands((size,), fmt), strict=True):
            array[...] = values
        nf.activation_mul(x, y, ACTIVATION, out=out)
        nf.activation_mul_bwd(z, x, y, ACTIVATION, out=(d_a, d_b))
        assert not any(np.isnan(array).any() for array in (out, d_a, d_b))
    assert any(streamed)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="there is one thread only")
@pytest.mark.parametrize("fmt", ["float32", "float16"])
def test_large_results_have_the_same_bits_with_any_number_of_threads(fmt):
    size = max(tiling.STREAM_BYTES, 2 * tiling.STREAM_CELL_BYTES) // DTYPES[fmt].itemsize + 777
    assert size > tiling.PARALLEL_ELEMENTS
    grad, a, b = operands((size,), fmt)
    before = numba.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            out = nf.activation_mul(a, b, ACTIVATION)
            results.append([bits(x) for x in (out, *nf.activation_mul_bwd(grad, a, b, ACTIVATION))])
    finally:
        numba.set_num_threads(before)
    for one, two in pairwise(results):
        for x, y in zip(one, two, strict=True):
            np.testing.assert_array_equal(x, y)


def test_small_results_stay_in_the_caches(monkeypatch):
    made = []
    plain = rows.fused
    monkeypatch.setattr(BACKEND, "replay", Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES))
    monkeypatch.setattr(rows, "fused", lambda *x: made.append(len(x) > 5 and x[5]) or plain(*x))
    _, a, b = operands((64, 64))
    nf.activation_mul(a, b, ACTIVATION)
    assert made == [False]


@given(m=st.integers(0, 3000), n=st.integers(0, 1 << 27), itemsize=st.sampled_from([2, 4, 8]))
def test_streamed_cells_tile_the_output(m, n, itemsize):
    t = tiling.streamed(m, n, itemsize)
    assert (t.cells_m - 1) * t.cell_m < max(m, 1) <= t.cells_m * t.cell_m
    assert (t.cells_n - 1) * t.cell_n < max(n, 1) <= t.cells_n * t.cell_n
    assert t.nc <= tiling.STREAM_ROW_BLOCK
    # A round-up of rows and of columns may each double a cell.
    assert t.cell_m * t.cell_n * itemsize <= 4 * tiling.STREAM_CELL_BYTES


@pytest.mark.parametrize("fmt", FORMATS)
def test_kept_calls_give_what_the_first_gave(fmt, monkeypatch):
    kept = Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES)
    monkeypatch.setattr(BACKEND, "replay", kept)
    for layout in ("c", "transposed", "inner_sliced", "reversed", "zero_stride"):
        for shape in ((), (5,), (3, 7), (2, 3, 4), (0, 3)):
            if layout != "c" and len(shape) < 2:
                continue
            grad, a, b = operands(shape, fmt, layout)
            plain = [x.copy(order="C") for x in (grad, a, b)]

            def every(grad, a, b):
                results = [nf.activation_mul(a, b, "silu")]
                for needs in (("a", "b"), ("a",), ("b",), ()):
                    for guard in (True, False):
                        results += nf.activation_mul_bwd(
                            grad, a, b, "silu", needs=needs, guard=guard
                        )
                return [None if x is None else bits(x).tolist() for x in results]

            first = every(grad, a, b)
            count = len(kept.programs())
            assert every(grad, a, b) == first
            assert len(kept.programs()) == count  # the second time every call is a kept one
            assert every(*plain) == first
    assert len(kept.programs()) > 20


def test_a_call_that_comes_again_refuses_what_the_first_refuses():
    grad, a, b = (x.copy() for x in operands((8, 8)))
    whole = np.empty((9, 8), np.float32)
    x, y = whole[:8], whole[1:]
    apart = np.empty((3, 8, 8), np.float32)
    nf.activation_mul(x, b, "relu", out=apart[0])
    nf.activation_mul_bwd(grad, a, b, "relu", out=(apart[1], apart[2]))
    nf.activation_mul_bwd(grad, a, b, "relu", out=(apart[1], None))
    with pytest.raises(ValueError, match="out must be exactly a or apart from it"):
        nf.activation_mul(x, b, "relu", out=y)
    with pytest.raises(ValueError, match="d_b must not share memory with d_a"):
        nf.activation_mul_bwd(grad, a, b, "relu", out=(x, y))
    with pytest.raises(ValueError, match="d_a must not share memory with a"):
        nf.activation_mul_bwd(grad, a, b, "relu", out=(a, None))
    locked = np.empty_like(a)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        nf.activation_mul(a, b, "relu", out=locked)
    with pytest.raises(TypeError, match="dtype"):
        nf.activation_mul(a, b.astype(np.float64), "relu")
    with pytest.raises(ValueError, match="shape"):
        nf.activation_mul(a, b[:4].copy(), "relu")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_left_factor_without_the_batch_meets_each_member(backend, rows):
    """Where a saved pair leaves out what has the batch, one row of `a` is not one for all of it."""
    rng = np.random.default_rng(0)
    a, (gate, up) = rng.standard_normal((rows, 6)), rng.standard_normal((2, 5, 6, 4))
    grad, pre = rng.standard_normal((5, rows, 4)), (a @ gate, a @ up)
    found = nf.matmul_activation_mul_bwd(
        grad, a, gate, up, activation="tanh", pre_activation=pre, needs=("b_gate", "b_up"),
        sum_batch=True, backend=backend,
    )  # fmt: skip
    slopes = grad * pre[1] * (1 - np.tanh(pre[0]) ** 2), grad * np.tanh(pre[0])
    for got, slope in zip(found[1:3], slopes, strict=True):
        np.testing.assert_allclose(got, (a.T @ slope).sum(axis=0), 1e-12, 1e-12)
