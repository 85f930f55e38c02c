"""Sums of an epilogue's results over rows, columns and all, made in the pass that makes these."""

from __future__ import annotations

import math
import tracemalloc

import numba
import numpy as np
import pytest
from arrays import bits, normal
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends.cpu.kernels import library
from numfuse.backends.cpu.launch import workspace
from numfuse.backends.cpu.llvm import vectors


def plus(x, s):
    return x + s


def times(z, s):
    return z * s


def extra_bytes(monkeypatch, call):
    """Bytes that a call takes beside its operands and results: NumPy's, and its workspaces."""
    made = []

    class Counted(workspace.Workspace):
        def __init__(self, size):
            super().__init__(size)
            made.append(size)

    call()
    monkeypatch.setattr(workspace, "Workspace", Counted)
    monkeypatch.setattr(workspace, "pool", [])
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] + sum(made)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", [(1500, 1), (1, 1100), (), (1, 1)], ids=str)
@pytest.mark.parametrize("product", [False, True], ids=["elementwise", "product"])
def test_no_array_of_the_shape_of_the_result_is_made(monkeypatch, product, form):
    """Guards: the sums of gradients of operands cost no pass over the output."""
    m, n = 1500, 1100
    grad, s = np.ones((m, n), np.float32), np.ones(form, np.float32)
    a, b = np.ones((m, 3), np.float32), np.ones((3, n), np.float32)
    d_s = (np.empty_like(s),)

    def call():
        if product:
            out = None, None, d_s
            nf.matmul_epilogue_bwd(grad, a, b, times, s, needs=(0,), out=out, backend="cpu")
        else:
            nf.elementwise_bwd(grad, plus, grad, s, needs=(1,), out=(None, *d_s), backend="cpu")

    own = numba.get_num_threads() * (1 << 20 if product else 1 << 17)
    assert extra_bytes(monkeypatch, call) < grad.nbytes / 8 + own


@pytest.mark.parametrize("length", [1, 31, 3_000_001])
def test_a_total_of_one_long_row_takes_little_memory(monkeypatch, length):
    """Guards: an update of all parameters that are one vector, and the gradient of its rate."""
    x, out = np.ones(length, np.float32), np.empty((), np.float32)

    def call():
        nf.elementwise_bwd(x, plus, x, 0.5, needs=(1,), out=(None, out), backend="cpu")

    assert extra_bytes(monkeypatch, call) < x.nbytes / 8 + numba.get_num_threads() * (1 << 17)
    assert out == length


def row_sums(x, fmt):
    """Sums of rows in the order of docs/numerics.md."""
    acc = np.dtype(library.accumulator(fmt))
    lanes = library.registers_of(fmt).vector_bytes // vectors.itemsize(acc.name)
    m, n = x.shape
    padded = np.zeros((m, -(-n // library.group(fmt)) * library.group(fmt)), acc)
    padded[:, :n] = x
    parts = list(np.moveaxis(padded.reshape(m, -1, library.group(fmt) // lanes, lanes), 2, 0))
    while len(parts) > 1:
        pairs = [x + y for x, y in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    (sums,) = parts
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return np.array([math.fsum(row) for row in sums[..., 0].tolist()]).astype(acc)


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("m,n", [(1, 1000), (57, 3), (61, 32), (2, 33), (300, 1111), (7, 20_011)])
def test_sums_of_rows_have_the_order_that_is_promised(fmt, m, n):
    """Guards: groups of columns in a tree, the groups exactly, whatever cells and threads are."""
    dtype = DTYPES[fmt]
    rng = np.random.default_rng(m * n)
    grad, x = (normal(rng, (m, n), dtype) for _ in range(2))
    wanted = row_sums(grad, fmt).astype(dtype)[:, None]
    for backwards in (grad, grad[:, ::-1].copy()[:, ::-1]):
        got = nf.elementwise_bwd(backwards, plus, x, x[:, :1], needs=(1,), backend="cpu")[1]
        # (the sum of one row alone has lanes)
        assert m == 1 or (bits(got) == bits(wanted)).all()
    a, b = normal(rng, (m, 2), dtype), normal(rng, (2, n), dtype)
    got = nf.matmul_epilogue_bwd(grad, a, b, plus, x[:, :1], needs=(0,), backend="cpu")
    assert (bits(got.d_operands[0]) == bits(wanted)).all()
    for i in (0, m - 1):
        alone = grad[i : i + 1], a[i : i + 1], b, plus, x[i : i + 1, :1]
        one = nf.matmul_epilogue_bwd(*alone, needs=(0,), backend="cpu").d_operands[0]
        assert bits(one) == bits(wanted[i])


@pytest.mark.parametrize("m,n", [(1, 1_000_003), (1000, 1003), (100_003, 5), (9, 40_001)])
def test_sums_are_as_accurate_as_a_pairwise_sum(m, n):
    """Guards: "no chain of additions is longer than 13" of docs/numerics.md, of positive terms."""
    grad = np.random.default_rng(5).random((m, n), np.float32)
    for form in ((), (m, 1)):
        s = np.zeros(form, np.float32)
        (got,) = nf.elementwise_bwd(grad, plus, grad, s, needs=(1,), backend="cpu")[1:]
        exact = grad.sum(axis=None if form == () else 1, dtype=np.longdouble).reshape(form)
        assert (np.abs(got - exact) <= 14 * 2.0**-24 * exact).all()


def test_infinities_and_nan_are_summed_as_they_are():
    """Guards: no padding and no lost bits stand in for what is not finite."""
    grad = np.ones((4, 1100), np.float32)
    grad[1, 7], grad[2, 1099], grad[3, 5:7] = np.inf, np.nan, (np.inf, -np.inf)
    d_s = nf.elementwise_bwd(grad, plus, grad, grad[:, :1], needs=(1,), backend="cpu")[1][:, 0]
    assert d_s[0] == 1100 and d_s[1] == np.inf and np.isnan(d_s[2:]).all()
    assert nf.elementwise_bwd(grad[:2], plus, grad[:2], 0.5, needs=(1,), backend="cpu")[1] == np.inf
