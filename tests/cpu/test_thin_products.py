"""Products of few rows or columns have the bits that the kernels of many rows give them.

Guards: the order of summation over K depends on dtype and length alone, in every kernel
(docs/numerics.md, "The same bits").
"""

from __future__ import annotations

import numpy as np
import pytest
from arrays import LAYOUTS, bits, in_layout, normal
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.kernels import library

# K: one, less than a vector, two chains, two blocks, rows a page apart, what is left of a lane.
DEPTHS = (1, 7, 130, 259, 513, 1024, 1102)
FEW = (1, 2, 3, 4, 5, 8, 12, 13, 16)


def results(operands):
    """A forward and its backward, with the pre-activation made again, saved, and without any."""
    grad, a, b, bias = operands
    out, pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)
    found = [out, pre, *nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")]
    found += nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", pre_activation=pre)
    found += nf.matmul_bias_activation_bwd(grad, a, b, bias, "none")
    found += nf.matmul_bias_activation_bwd(
        grad, a, b, bias, "relu", pre_activation=pre, needs=("bias",)
    )
    return [x for x in found if x is not None]


@pytest.fixture
def usual(monkeypatch):
    """Return what calls the kernels of many rows."""

    def call(operands):
        BACKEND.replay.clear()
        with monkeypatch.context() as patch:
            patch.setattr(tiling, "THIN_ROWS", -1)
            patch.setattr(tiling, "NARROW", -1)
            found = operands() if callable(operands) else results(operands)
        BACKEND.replay.clear()
        return found

    return call


def assert_same(got, wanted, where):
    assert len(got) == len(wanted)
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert (bits(x) == bits(y)).all(), (where, i)


def operands(m, n, k, dtype, batch=()):
    rng = np.random.default_rng(m * n * k)
    shapes = (m, n), (m, k), (k, n), (*(1,) * bool(batch), n)
    return [normal(rng, (*batch, *shape), DTYPES[dtype]) for shape in shapes]


@pytest.mark.parametrize("few", FEW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_or_columns_have_the_bits_of_many(dtype, few, usual):
    for k in DEPTHS:
        for m, n in ((few, 37), (61, few), (few, few), (few, 531)):
            values = operands(m, n, k, dtype)
            assert_same(results(values), usual(values), (m, n, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2)])
def test_few_results_have_the_bits_of_many(m, n, dtype, usual):
    """Guards: chains that run side by side, of whole blocks of K and of what is left of it."""
    for k in (1, 256, 257, 511, 512, 1024, 1300, 4096, 4099, 9000):
        values = operands(m, n, k, dtype)
        assert_same(results(values), usual(values), k)
    BACKEND.replay.clear()
    nf.matmul_bias_activation(*values[1:], "relu")
    assert "thin" in nf.last_call().kernel or dtype not in ("float32", "float64")


def test_one_result_of_a_sum_of_products_has_the_bits_of_many(usual):
    """Its terms are added in their order: two rows of a second order's sum."""
    rng = np.random.default_rng(8)
    a, b, bias, u, v, grad = (
        normal(rng, shape, np.float32)
        for shape in ((1, 700), (700, 1), (1,), (1, 700), (700, 1), (1, 1))
    )

    def second():
        found = nf.matmul_bias_activation_double_bwd(u, v, bias, grad, a, b, bias, "tanh")
        return [x for x in found if x is not None]

    wanted = usual(second)
    assert_same(second(), wanted, "second order")


@pytest.mark.parametrize("few", (1, 2, 5, 8, 11, 12))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_a_large_factor_passes_have_the_bits_of_many(
    streamed, dtype, few, usual, monkeypatch
):
    """By groups of rows in narrow panels, or all at once in long pieces: on any processor."""
    monkeypatch.setattr(tiling, "THIN_SHARE", 0)  # (so every factor is a large one)
    monkeypatch.setattr(tiling, "STREAMED_VECTORS", (16, 32, 64) if streamed else ())
    _, a, b, bias = operands(few, 37, 65, dtype)
    asked, make = [], library.thin_cell
    with monkeypatch.context() as patch:
        patch.setattr(library, "thin_cell", lambda *how: asked.append(how) or make(*how))
        BACKEND.replay.clear()
        nf.matmul_bias_activation(a, b, bias, "relu")
    assert asked == [(dtype, True, streamed)]
    assert "thin" in nf.last_call().kernel
    for k, n in ((7, 37), (130, 700), (514, 389), (1102, 37)):
        for size in ((few, n, k), (n, few, k)):
            values = operands(*size, dtype)
            assert_same(results(values), usual(values), size)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_their_storage_does_not_show(dtype, layout, usual):
    for m, n, k in ((1, 45, 70), (3, 261, 300), (75, 1, 37), (130, 4, 514), (58, 11, 33)):
        values = operands(m, n, k, dtype)
        for which in range(4):
            some = [in_layout(x, layout) if i == which else x for i, x in enumerate(values)]
            assert_same(results(some), usual(some), (m, n, k, which))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_batches_of_them_and_sums_over_a_batch(dtype, usual):
    for m, n, k in ((2, 33, 300), (40, 3, 21)):
        grad, a, b, bias = operands(m, n, k, dtype, batch=(5,))
        for values in ((grad, a, b, bias), (grad, a, b[0], bias[0, 0])):
            assert_same(results(values), usual(values), (m, n, k))


def test_which_kernel_takes_which_product():
    for m, n, thin in ((1, 300, True), (4, 300, True), (5, 300, False), (300, 4, True)):
        _, a, b, bias = operands(m, n, 64, "float32")
        nf.matmul_bias_activation(a, b, bias, "relu")
        assert ("thin" in nf.last_call().kernel) == thin, (m, n, nf.last_call())
    _, a, b, bias = operands(1, 300, 64, "float16")
    nf.matmul_bias_activation(a, b, bias, "relu")
    assert "gemm" in nf.last_call().kernel


def test_any_number_of_threads_gives_thin_products_the_same_bits(monkeypatch):
    values = operands(9000, 3, 65, "float32"), operands(2, 3000, 300, "float64")
    found = []
    for threshold in (1 << 40, 0):
        monkeypatch.setattr(tiling, "PARALLEL_THIN", threshold)
        monkeypatch.setattr(tiling, "PARALLEL_FMAS", threshold)
        monkeypatch.setattr(tiling, "PARALLEL_ELEMENTS", threshold)
        BACKEND.replay.clear()
        found.append([results(x) for x in values])
    BACKEND.replay.clear()
    for one, two in zip(*found, strict=True):
        assert_same(one, two, "threads")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("rows", [40, 3000])
def test_a_result_that_lies_by_columns_has_the_bits_of_one_by_rows(dtype, batch, rows, monkeypatch):
    """It is computed as its transpose, in several blocks where grad_pre is held in blocks."""
    monkeypatch.setattr(tiling, "GRAD_PRE_BYTES", 1 << 16)
    BACKEND.replay.clear()
    grad, a, b, bias = operands(rows, 37, 29, dtype, batch)

    def turned(x):
        return np.full_like(x.swapaxes(-1, -2), np.nan, order="C").swapaxes(-1, -2)

    for activation in ("none", "gelu"):
        wanted = nf.matmul_bias_activation(a, b, bias, activation)
        out = nf.matmul_bias_activation(a, b, bias, activation, out=turned(wanted))
        assert_same([out], [wanted], activation)
        wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation)
        outs = [turned(x) for x in wanted[:2]]
        nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, out=(*outs, None))
        assert_same(outs, wanted[:2], activation)
    BACKEND.replay.clear()
