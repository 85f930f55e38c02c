"""The same bits: for any number of threads, at any place of a batch, in any slice of rows.

Guards: the promises of `docs/numerics.md` under "The same bits", and nothing beyond. The order of
summation over K depends on dtype, K and N alone; sums over M run in chunks of fixed length that are
joined in a fixed order. Which cell, tile, thread or path computes an element must not show in it,
so every case here is one that such a choice tells apart from another: B read in place and packed,
one block of K and several, edges, the short path of small calls and the parallel one.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import weekly
from arrays import LAYOUTS, bits, in_layout, normal
from tolerance import DTYPES

import numfuse as nf
from numfuse import expr as ex
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.kernels import library
from numfuse.backends.cpu.launch import workspace

ROWS = 157
#: (N, K): one column, edges of a vector and of a tile; one block of K and several; a B within level
#: 2 and one beyond it; rows of B a large power of two apart.
FORMS = [
    (1, 1), (1, 1100), (3, 33), (16, 17), (31, 513), (33, 512), (64, 1100), (131, 127), (257, 700),
    (1024, 513), (1500, 600),
]  # fmt: skip
SLICES = [
    *(slice(0, m) for m in range(1, 21)), slice(5, 6), slice(13, 15), slice(31, 88),
    slice(140, ROWS), slice(3, ROWS), slice(None, None, 2), slice(None, None, -1),
]  # fmt: skip
ACTIVATION = "gelu"


def operands(m, n, k, dtype, seed=0, batch=()):
    rng = np.random.default_rng(seed)
    dtype = DTYPES[dtype]
    return (
        normal(rng, (*batch, m, n), dtype),
        normal(rng, (*batch, m, k), dtype, k**-0.5),
        normal(rng, (*batch, k, n), dtype),
        normal(rng, (*batch, *(1,) * bool(batch), n), dtype),
    )


def assert_same(got, wanted, where):
    assert got.shape == wanted.shape, where
    different = bits(got) != bits(wanted)
    assert not different.any(), (where, np.argwhere(different)[:3].tolist())


# --- threads ------------------------------------------------------------------------------------

# Shapes of which some take several threads and some do not; tall, wide, deep, thin, batched.
PROGRAM = """
import hashlib, sys
import ml_dtypes, numba, numpy as np
import numfuse as nf
from numfuse import expr as ex

def normal(rng, shape):
    return rng.standard_normal(shape, np.float32).astype(sys.argv[1])

def every(x):
    return [y for part in x for y in every(part)] if isinstance(x, tuple) else [x]

def everything():
    digest = hashlib.sha256()
    rng = np.random.default_rng(0)
    forms = [
        ((), 263, 263, 251), ((), 3001, 67, 131), ((), 67, 2003, 131), ((), 97, 131, 1801),
        ((), 5, 2100, 1700), ((), 1900, 1, 1100), ((11,), 45, 137, 300), ((3, 2), 130, 61, 520),
    ]
    for batch, m, n, k in forms:
        a, b, grad = (normal(rng, (*batch, *shape)) for shape in ((m, k), (k, n), (m, n)))
        bias = normal(rng, (n,))
        results = list(nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True))
        results += nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
        results += nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "silu", pre_activation=results[1], sum_batch=True
        )
        results += nf.matmul_bias_activation_bwd(grad, a, b, bias, "none")
        gate = grad[..., ::-1]
        results += [nf.silu_mul(grad, gate), *nf.gelu_mul_bwd(grad, gate, grad)]
        fused = a, (b, b[..., ::-1]), lambda z, w, x, y: ex.tanh(z + x) * w * y, bias
        for operand in (grad[..., :1], 0.5):
            results += every(tuple(nf.matmul_epilogue_bwd(grad, *fused, operand)))
        results += nf.matmul_activation_mul_bwd(grad, a, b, b[..., ::-1], bias, None)
        for other in (bias, grad[..., :1], grad.reshape(-1, n)[:1, :1]):
            results += every(nf.elementwise_bwd(grad, lambda x, y, z: x * y * z, grad, other, 0.5))
        flat = grad.reshape(-1)
        results += nf.elementwise_bwd(flat, lambda x, y: x * y, flat, 0.5, needs=(1,))
        for x in results:
            if x is not None:
                digest.update(x.tobytes())
    # d_bias of many rows: more chunks than one thread takes
    grad = normal(rng, (300_011, 3))
    one = grad[:, :1], normal(rng, (1, 3)), normal(rng, (3,))
    for activation in ("none", "tanh"):
        digest.update(
            nf.matmul_bias_activation_bwd(grad, *one, activation, needs=("bias",)).d_bias.tobytes()
        )
    return digest.hexdigest()

for threads in map(int, sys.argv[2:]):
    numba.set_num_threads(threads)
    print(everything())
"""
#: {threads that a process has: how many it is set to, one after the other}
COUNTS = {1: [1], 2: [1, 2], 5: [1, 2, 3, 4, 5]} if weekly.ALL else {1: [1], 5: [2, 5]}


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    """Also more threads than there are cores, and a process that has one only."""
    digests = []
    for threads, counts in COUNTS.items():
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, dtype, *map(str, counts)],
            capture_output=True, text=True, timeout=600, check=False,
            env=os.environ | {"NUMBA_NUM_THREADS": str(threads)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found = done.stdout.split()
        assert len(found) == len(counts)
        digests += found
    assert len(set(digests)) == 1, digests


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_slice_of_rows_has_the_bits_that_it_has_in_the_whole(form, dtype):
    n, k = form
    grad, a, b, bias = operands(ROWS, n, k, dtype)
    out, pre = nf.matmul_bias_activation(a, b, bias, ACTIVATION, return_pre_activation=True)
    residual = nf.matmul_bias_residual(a, b, bias, grad)
    d_a = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION).d_a
    d_a_saved = nf.matmul_bias_activation_bwd(
        grad, a, b, bias, ACTIVATION, pre_activation=pre, needs=("a",)
    ).d_a
    assert_same(d_a_saved, d_a, "saved")
    for rows in SLICES:
        part = a[rows], b, bias
        own, own_pre = nf.matmul_bias_activation(*part, ACTIVATION, return_pre_activation=True)
        assert_same(own_pre, pre[rows], ("pre", rows))
        assert_same(own, out[rows], ("out", rows))
        assert_same(nf.matmul_bias_residual(*part, grad[rows]), residual[rows], ("residual", rows))
        for needs in (("a",), ("a", "b", "bias")):
            got = nf.matmul_bias_activation_bwd(grad[rows], *part, ACTIVATION, needs=needs).d_a
            assert_same(got, d_a[rows], ("d_a", rows, needs))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_row_of_a_small_call_has_the_bits_of_a_large_one(dtype):
    n, k = 300, 520
    m = tiling.PARALLEL_FMAS // (n * k) + 30
    grad, a, b, bias = operands(m, n, k, dtype)
    out = nf.matmul_bias_activation(a, b, bias, ACTIVATION)
    d_a = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION).d_a
    for rows in (slice(0, 1), slice(17, 19), slice(40, 95), slice(m - 5, m)):
        part = a[rows], b, bias, ACTIVATION
        assert_same(nf.matmul_bias_activation(*part), out[rows], rows)
        assert_same(nf.matmul_bias_activation_bwd(grad[rows], *part).d_a, d_a[rows], rows)


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form", [(1, 7, 3), (17, 37, 21), (45, 37, 1100), (130, 520, 65), (3, 1030, 257)], ids=str
)
def test_a_member_of_a_batch_has_the_bits_that_it_has_alone(form, dtype):
    m, n, k = form
    count = 7
    grad, a, b, bias = operands(m, n, k, dtype, batch=(count,))
    out, pre = nf.matmul_bias_activation(a, b, bias, ACTIVATION, return_pre_activation=True)
    gradients = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION)
    plain = nf.matmul_bias_activation_bwd(grad, a, b, bias, "none")
    for i in (0, 3, count - 1):
        mine = a[i], b[i], bias[i, 0]
        own, own_pre = nf.matmul_bias_activation(*mine, ACTIVATION, return_pre_activation=True)
        assert_same(own, out[i], i)
        assert_same(own_pre, pre[i], i)
        for activation, whole in ((ACTIVATION, gradients), ("none", plain)):
            single = nf.matmul_bias_activation_bwd(grad[i], *mine, activation)
            for name, x, y in zip(single._fields, single, whole, strict=True):
                assert_same(x, y[i].reshape(x.shape), (i, name, activation))
    # The place does not matter: the same batch in another order, and a part of it.
    order = np.array([4, 0, 6, 2])
    again = nf.matmul_bias_activation_bwd(grad[order], a[order], b[order], bias[order], ACTIVATION)
    for name, x, y in zip(again._fields, again, gradients, strict=True):
        assert_same(x, y[order], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_weight_gives_every_member_its_own_bits(dtype):
    """A batch over one B is folded into M, unless strides forbid it: no row may tell."""
    grad, a, b, bias = operands(39, 33, 527, dtype, batch=(5,))
    b, bias = b[0], bias[0, 0]
    for view in (a, a[:, ::-1], in_layout(a, "transposed")):
        out = nf.matmul_bias_activation(view, b, bias, ACTIVATION)
        d_a = nf.matmul_bias_activation_bwd(grad, view, b, bias, ACTIVATION).d_a
        for i in range(5):
            assert_same(nf.matmul_bias_activation(view[i], b, bias, ACTIVATION), out[i], i)
            single = nf.matmul_bias_activation_bwd(grad[i], view[i], b, bias, ACTIVATION)
            assert_same(single.d_a, d_a[i], i)


# --- storage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "zero_stride"])
@pytest.mark.parametrize(
    "form", [(3, 257, 700), (12, 1030, 60), (61, 70, 1100), (200, 131, 33)], ids=str
)
def test_storage_of_the_same_values_does_not_show(form, layout, dtype):
    m, n, k = form
    values = operands(m, n, k, dtype)
    grad, a, b, bias = values
    out = nf.matmul_bias_activation(a, b, bias, ACTIVATION)
    gradients = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION)
    for which in range(4):  # one operand at a time: each of them chooses its own path
        some = [in_layout(x, layout) if i == which else x for i, x in enumerate(values)]
        got = nf.matmul_bias_activation(*some[1:], ACTIVATION)
        assert_same(got, out, which)
        mine = nf.matmul_bias_activation_bwd(*some, ACTIVATION)
        for name, x, y in zip(mine._fields, mine, gradients, strict=True):
            assert_same(x, y, (which, name))
    strided = [np.full((*x.shape[:-1], 3 * x.shape[-1]), np.nan, x.dtype) for x in gradients]
    views = tuple(x[..., ::3] for x in strided)
    nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION, out=views)
    for name, x, y in zip(gradients._fields, views, gradients, strict=True):
        assert_same(x, y, name)


# --- elements -----------------------------------------------------------------------------------


@functools.cache
def arguments(dtype):
    rng = np.random.default_rng(7)
    x = np.concatenate([rng.uniform(-r, r, 300) for r in (1e-3, 1.0, 9.0, 40.0)])
    return rng.permutation(x).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [x for x, y in nf.activations().items() if y.id is not None])
def test_an_element_has_the_same_bits_at_every_place_of_a_row(activation, dtype):
    """A loop over a row ends in a shorter one or in single elements: both compute alike."""
    x = arguments(dtype)
    one = np.ones_like(x)
    value = nf.activation_mul(x, one, activation)
    slope = nf.activation_mul_bwd(one, x, one, activation).d_a
    a, unit = x[:, None], np.ones((1, 1), x.dtype)
    fused = nf.matmul_bias_activation(a, unit, None, activation)[:, 0]
    fused_slope = nf.matmul_bias_activation_bwd(
        one[:, None], a, unit, None, activation, needs=("a",)
    ).d_a[:, 0]
    assert_same(fused, value, "fused")
    # The product for d_a is a sum that begins with 0, and 0 + -0 is 0: equal but for such a sign.
    # Products of bfloat16 as it is take a subnormal factor as zero.
    tiny = float(np.finfo(np.float32).smallest_normal)
    flushed = dtype == "bfloat16" and library.kind(dtype, dtype) != "fma"
    factor = np.where(flushed & (np.abs(slope.astype(np.float32)) < tiny), 0, slope)
    np.testing.assert_array_equal(fused_slope, factor.astype(slope.dtype))
    for start in (0, 1, 5, 111):
        for length in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127, 130):
            part = slice(start, start + length)
            assert_same(nf.activation_mul(x[part], one[part], activation), value[part], part)
            got = nf.activation_mul_bwd(one[part], x[part], one[part], activation)
            assert_same(got.d_a, slope[part], part)
            assert_same(got.d_b, value[part], part)
            # as a row of a product: K = 1, the pre-activation is x itself
            row = nf.matmul_bias_activation(unit, x[None, part], None, activation)
            assert_same(row[0], value[part], part)


def test_a_repeated_call_gives_the_same_bits_whatever_ran_before():
    """Workspaces are kept from call to call: nothing of another call may be left in a result.

    How many are kept is what docs/design.md promises under "Memory is bounded".
    """
    grad, a, b, bias = operands(61, 70, 1100, "float32")
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION)
    noise = [np.full(shape, np.nan, np.float32) for shape in ((300, 300), (300, 1300), (1300, 300))]
    for _ in range(3):
        nf.matmul_bias_activation_bwd(*noise, None, "relu")
        nf.matmul_bias_activation(noise[1], noise[2])
        got = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION)
        for name, x, y in zip(got._fields, got, wanted, strict=True):
            assert_same(x, y, name)
    assert len(workspace.pool) <= workspace.KEPT_WORKSPACES


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_of_columns_has_the_bits_that_it_has_in_the_whole(dtype):
    """Of the forward and of d_b and d_bias, which sum over K and over M; d_a sums over columns."""
    for m, n, k in ((61, 131, 1100), (3, 1500, 600), (157, 257, 33)):
        grad, a, b, bias = operands(m, n, k, dtype)
        out = nf.matmul_bias_activation(a, b, bias, ACTIVATION)
        gradients = nf.matmul_bias_activation_bwd(grad, a, b, bias, ACTIVATION)
        for columns in (slice(0, 1), slice(5, 38), slice(100, n), slice(None, None, 3)):
            part = a, b[:, columns], bias[columns], ACTIVATION
            assert_same(nf.matmul_bias_activation(*part), out[:, columns], columns)
            got = nf.matmul_bias_activation_bwd(grad[:, columns], *part)
            assert_same(got.d_b, gradients.d_b[:, columns], columns)
            assert_same(got.d_bias, gradients.d_bias[columns], columns)


# --- epilogues, elementwise formulas and gated layers -------------------------------------------


def formula(z, w, row, column):
    return ex.tanh(z + row) * w * column


def every(x):
    """Return the arrays of a nest of tuples."""
    return [y for part in x for y in every(part)] if isinstance(x, tuple) else [x]


def fused(grad, a, b, row, column):
    """Return what a formula of two products and a gated layer give, forward and backward."""
    both = b, b[..., ::-1]
    given, layer = (a, both, formula, row, column), (a, *both, row, None, ACTIVATION)
    return (
        nf.matmul_epilogue(*given),
        nf.matmul_activation_mul(*layer),
        nf.matmul_epilogue_bwd(grad, *given),
        nf.matmul_activation_mul_bwd(grad, *layer),
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [(1, 7), (17, 37), (33, 512), (257, 70)], ids=str)
def test_a_slice_of_rows_has_its_bits_in_an_epilogue_too(form, dtype):
    n, k = form
    grad, a, b, row = operands(ROWS, n, k, dtype)
    column = a[:, :1]
    out, layer, d, d_layer = fused(grad, a, b, row, column)
    for rows in SLICES[::3]:
        got = fused(grad[rows], a[rows], b, row, column[rows])
        assert_same(got[0], out[rows], rows)
        assert_same(got[1], layer[rows], rows)
        assert_same(got[2].d_a, d.d_a[rows], rows)
        if len(a[rows]) > 1:  # (of one row, (1, 1) is summed over both axes)
            assert_same(got[2].d_operands[1], d.d_operands[1][rows], rows)
        assert_same(got[3].d_a, d_layer.d_a[rows], rows)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_gradient_of_an_epilogue_has_its_bits_alone_and_in_company(dtype):
    """M is more than a block, so that the sums over rows are sums over blocks."""
    m, n, k = 2600, 1408, 3
    grad, a, b, row = operands(m, n, k, dtype)
    column, both = a[:, :1], (b, b[:, ::-1])
    given = a, both, formula, row, column
    whole = nf.matmul_epilogue_bwd(grad, *given)
    _, pre = nf.matmul_epilogue(*given, return_pre_activation=True)
    for how in ({"needs": ("b",)}, {"needs": (0,)}, {"needs": (0, 1)}, {"pre_activation": pre}):
        got = nf.matmul_epilogue_bwd(grad, *given, **how)
        for x, y in zip(every(tuple(got)), every(tuple(whole)), strict=True):
            assert x is None or (bits(x) == bits(y)).all(), list(how)
    layer = a, *both, row, row, ACTIVATION
    whole = nf.matmul_activation_mul_bwd(grad, *layer)
    for needs in (("b_gate",), ("b_up", "bias_up"), ("bias_gate",), ("a",)):
        got = nf.matmul_activation_mul_bwd(grad, *layer, needs=needs)
        for name, x, y in zip(got._fields, got, whole, strict=True):
            assert x is None or (bits(x) == bits(y)).all(), (name, needs)
    _, d_row = nf.elementwise_bwd(grad, lambda x, y: x * y, grad, row, needs=(1,))
    assert_same(d_row, nf.elementwise_bwd(grad, lambda x, y: x * y, grad, row)[1], "elementwise")


@pytest.mark.parametrize("axes", [(2, 0, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("lengths", [(3, 1, 1), (1, 21, 1), (5,), (1, 1), ()])
def test_a_sum_of_grad_alone_has_the_bits_of_its_copy(axes, lengths):
    grad, a, b, _ = operands(21, 5, 7, "float32", batch=(3,))
    residual = np.ones(lengths, np.float32)
    wanted = nf.matmul_bias_residual_bwd(grad, a, b[0], None, residual).d_residual
    view = np.ascontiguousarray(grad.transpose(axes)).transpose(np.argsort(axes))
    got = nf.matmul_bias_residual_bwd(view, a, b[0], None, residual).d_residual
    assert_same(got, wanted, axes)


def strided(shape, dtype, kind):
    """Return an array to write, whose leading axes do not merge, or whose columns are apart."""
    if kind == "turned":
        return np.full((*shape[:-2], *shape[:-3:-1]), np.nan, dtype).swapaxes(-1, -2)
    return np.full((*shape[:-2], shape[-2] + 3, shape[-1] + 2), np.nan, dtype)[..., 3:, 2:]


@pytest.mark.parametrize("kind", ["turned", "cut"])
@pytest.mark.parametrize("m, n, k", [(17, 3, 64), (700, 5, 8)])
def test_where_a_result_lies_does_not_show_in_the_others(m, n, k, kind):
    """A batch over one B is folded for its sums over rows, wherever d_a is written.

    The 1400 points of the jet are enough for its d_b to be joined from pieces.
    """
    grad, a, b, bias = operands(m, n, k, "float64", batch=(2,))
    b, row, a_dot, grad_dot = b[0], bias[0, 0], a[None, :, ::-1], grad[None, :, ::-1]
    calls = [
        lambda **how: nf.matmul_activation_mul_bwd(grad, a, b, b[::-1], row, None, "silu", **how),
        lambda **how: nf.matmul_epilogue_bwd(grad, a, b, lambda z, x: z * z * x, row, **how),
        lambda **how: nf.matmul_bias_activation_jet_bwd(
            grad, grad_dot, grad_dot, a, b, row, "silu", a_dot, **how
        ),
    ]
    for call in calls:
        wanted = call()
        for place in (0, 1):  # d_a, then d_b
            out: list = [None] * len(wanted)
            if isinstance(wanted[-1], tuple):
                out[-1] = (None,) * len(wanted[-1])
            out[place] = strided(wanted[place].shape, np.float64, kind)
            got = call(out=tuple(out))
            assert got[place] is out[place]
            for x, y in zip(every(tuple(got)), every(tuple(wanted)), strict=True):
                assert (x is None and y is None) or (bits(x) == bits(y)).all(), place
