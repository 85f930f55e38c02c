"""How accurate long sums are: the CPU's beside NumPy's and its BLAS's, the others' beside them.

All are compared by what they are off by, over many sums at once, so that luck averages out; the
seeds are fixed. Wrong sums are found by the conformance suite; here a worse order of summation is.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import SIMULATED
from tolerance import DTYPES, roundoff

import numfuse as nf
from numfuse.backends.cpu import tiling

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


def values(rng, shape, kind):
    if kind == "positive":
        return rng.uniform(0, 1, shape)
    if kind == "ill-scaled":  # sixteen orders of magnitude from row to row
        return rng.standard_normal(shape) * 10.0 ** rng.uniform(-8, 8, (shape[0], 1))
    if kind == "cancelling":  # halves that are each other's negatives, in any order
        half = rng.standard_normal((shape[0] // 2, shape[1])) * 10.0 ** rng.uniform(
            -4, 4, (shape[0] // 2, 1)
        )
        rest = np.full((shape[0] % 2, shape[1]), 1e-3)
        return rng.permutation(np.concatenate([half, -half, rest]))
    return rng.standard_normal(shape)


def exact_sums(x):
    """Exactly rounded sums of the columns."""
    return np.array([math.fsum(column) for column in x.astype(np.float64).T])


def pairwise_sums(x):
    """NumPy sums a contiguous axis in pairs of blocks of 128 with eight sums each."""
    return np.array([np.add.reduce(np.ascontiguousarray(column)) for column in x.T])


def d_bias_of(grad, activation="none"):
    m, n = grad.shape
    a, b = np.zeros((m, 1), grad.dtype), np.zeros((1, n), grad.dtype)
    return nf.matmul_bias_activation_bwd(
        grad, a, b, np.zeros(n, grad.dtype), activation, needs=("bias",), backend="cpu"
    ).d_bias


def chain(m, rows):
    """Additions behind one another in the sum of m rows: a run, the runs of a chunk, the join.

    The join is made in float64 with its errors added, so it rounds twice, whatever its length.
    """
    run = min(m, tiling.RUN)
    return (run - 1) + (-(-min(m, rows) // tiling.RUN) - 1) + 2


@pytest.mark.parametrize("kind", ["normal", "positive", "ill-scaled", "cancelling"])
@pytest.mark.parametrize("m", [7, 56, 57, 1000, 10_007, 1_000_003])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_d_bias_is_as_accurate_as_a_pairwise_sum(dtype, m, kind):
    n = 12 if m > 100_000 else 32
    x = values(np.random.default_rng(m), (m, n), kind).astype(dtype)
    exact, magnitude = exact_sums(x), np.abs(x.astype(np.float64)).sum(0)
    off = np.abs(d_bias_of(x).astype(np.float64) - exact)
    u = roundoff(dtype)
    # The bound of its chains, Higham (4.4), and no such chain for any number of rows.
    assert (off <= 1.01 * u * chain(m, 56) * magnitude).all()
    # Beside NumPy's, on the average of many sums. Ours has chains of 13 at the most, NumPy's of 18
    # in a block of 128, but of m / 8 + 3 in fewer rows, 9 at 56. Errors grow with the root of that:
    # sqrt(13 / 9) = 1.2, and half as much again for the scatter of an average over so few sums. The
    # result itself is rounded in both.
    peer = np.abs(pairwise_sums(x).astype(np.float64) - exact)
    mine, others = (float(np.sqrt(np.mean((e / magnitude) ** 2))) for e in (off, peer))
    rounding = u * float(np.sqrt(np.mean((exact / magnitude) ** 2)))
    assert mine <= 1.5 * 1.2 * others + rounding


def test_d_bias_of_a_batch_is_as_accurate_as_that_of_its_rows():
    rng = np.random.default_rng(0)
    batch, m, n, k = 300, 113, 5, 2
    grad = rng.uniform(0, 1, (batch, m, n))
    a, b = np.zeros((batch, m, k)), np.zeros((batch, k, n))
    d_bias = nf.matmul_bias_activation_bwd(
        grad, a, b, np.zeros(n), needs=("bias",), backend="cpu"
    ).d_bias
    exact = exact_sums(grad.reshape(-1, n))
    assert (np.abs(d_bias - exact) <= chain(batch * m, 56) * roundoff(DOUBLE) * exact).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_error_of_a_sum_does_not_spoil_an_infinite_one(value):
    """The errors of sums with an infinity are NaN, and no part of the result."""
    for m in (5, 57, 1000):
        grad = np.ones((m, 4), np.float32)
        grad[m // 2, 1] = value
        grad[0, 2] = grad[m - 1, 2] = 3e38  # overflows as it is summed
        got = d_bias_of(grad)
        np.testing.assert_array_equal(got[[0, 1, 3]], np.float32([m, value, m]))
        assert got[2] > 3e38


# --- products -----------------------------------------------------------------------------------


def frobenius(x, exact):
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("k", [1, 16, 200, 256, 257, 400, 512, 513, 1100, 4000, 30_000])
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_products_are_as_accurate_as_those_of_blas(dtype, k, kind):
    """Relative error in the Frobenius norm, over 1500 sums.

    15% for the scatter of that, and as much for kernels of OpenBLAS with shorter chains of sums
    than ours: at K = 400 and 512 its Haswell kernel's error is 1 / 1.22 of ours, other ones' equal.
    """
    rng = np.random.default_rng(k)
    m, n = 37, 41
    a, b = (values(rng, shape, kind).astype(dtype) for shape in ((m, k), (k, n)))
    wide = np.float64 if dtype == SINGLE else np.longdouble
    exact = a.astype(wide) @ b.astype(wide)
    peer = frobenius(a @ b, exact)
    # The same sums over K, over N and over M.
    a_t, b_t, unread = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), np.zeros((m, n), dtype)
    run = nf.matmul_bias_activation_bwd
    for got in (
        nf.matmul_bias_activation(a, b, backend="cpu"),
        run(a, unread, b_t, needs=("a",), backend="cpu").d_a,
        run(b, a_t, unread, needs=("b",), backend="cpu").d_b,
    ):
        assert frobenius(got, exact) <= 1.3 * peer


@pytest.mark.memory("device")
@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("k", [600, 100_000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_any_length_are_off_by_no_more_than_twice_the_cpus(backend, dtype, k, kind):
    """Of products, over K, N and M, and of columns, over M: in the Frobenius norm.

    A chain of sums of its own length would be off by the root of that: 3 times as much at 600
    positive terms, 50 times at 100,000.
    """
    rng = np.random.default_rng(k)
    m, n = (6, 14) if SIMULATED else (12, 40)
    a, b = (values(rng, shape, kind).astype(DTYPES[dtype]) for shape in ((m, k), (k, n)))
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    columns = b.astype(np.longdouble).sum(0)
    a_t, b_t, unread = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T), np.zeros_like(exact)
    unread, bias = unread.astype(a.dtype), np.zeros(n, a.dtype)

    def errors(backend):
        run = nf.matmul_bias_activation_bwd
        out = nf.matmul_bias_activation(a, b, backend=backend)
        d_a = run(a, unread, b_t, needs=("a",), backend=backend).d_a
        of_m = run(b, a_t, unread, bias, needs=("b", "bias"), backend=backend)
        found = (out, d_a, of_m.d_b, of_m.d_bias)
        return [
            frobenius(x, wanted)
            for x, wanted in zip(found, (exact, exact, exact, columns), strict=True)
        ]

    for ours, cpus in zip(errors(backend), errors("cpu"), strict=True):
        assert ours <= 2 * cpus
