"""The backward of the CPU backend by blocks, here of one chunk of rows each, and its memory.

Guards: a backward's memory is bounded whatever M and K are, and blocks change no bit
(docs/design.md, "Memory is bounded").
"""

from __future__ import annotations

import tracemalloc

import numba
import numpy as np
import pytest
import test_fusion
import tolerance
from arrays import Fenced, bits, in_layout, normal, unwritten
from tolerance import DTYPES, assert_within

import numfuse as nf
from numfuse.backends.cpu import schedule as blocks
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.kernels import library
from numfuse.backends.cpu.launch import workspace
from numfuse.runtime.replay import Replay

FORMATS = tuple(DTYPES)
CHUNK = max(library.chunk(fmt) for fmt in FORMATS)


@pytest.fixture(params=["one launch", "a launch a block"])
def whole(request, monkeypatch):
    """Calls take the general way whatever their size; returns the blocks of each schedule made."""
    found: list[list] = []
    make = blocks._Schedule.blocks

    def made(schedule):
        found.append(list(make(schedule)))
        return found[-1]

    monkeypatch.setattr(blocks._Schedule, "blocks", made)
    monkeypatch.setattr(BACKEND, "replay", Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES))
    monkeypatch.setattr(tiling, "PARALLEL_FMAS", 0)
    limit = 1000 if request.param == "one launch" else 0
    monkeypatch.setattr(tiling, "BLOCKS_IN_ONE_LAUNCH", limit)
    return found


@pytest.fixture
def tiny(whole, monkeypatch):
    """Blocks of one chunk of rows."""
    monkeypatch.setattr(tiling, "GRAD_PRE_BYTES", 0)
    monkeypatch.setattr(tiling, "GRAD_PRE_ROWS", 1)
    return whole


def operands(rng, m, n, k, fmt, batch=(), layout="c", b_batch=None):
    dtype = DTYPES[fmt]
    b_batch = batch if b_batch is None else b_batch
    shapes = (*batch, m, k), (*b_batch, k, n), (*b_batch, 1, n), (*batch, m, n)
    scales = 1, k**-0.5, 1, 1
    return [
        in_layout(normal(rng, shape, dtype, scale), layout)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def steps(schedules):
    return [len(schedule) for schedule in schedules]


def check(grad, a, b, bias, activation, result, **how):
    fmt = next(name for name, dtype in DTYPES.items() if dtype == a.dtype)
    rounded = activation != "none" and a.itemsize == 2 and library.grad_pre_format(fmt) == fmt
    how["rounded_grad_pre"] = rounded
    wanted = tolerance.backward(grad, a, b, bias, activation, a.dtype, **how)
    for name, value in zip(("d_a", "d_b", "d_bias"), result, strict=True):
        if value is not None:
            assert_within(name, value, getattr(wanted, name), getattr(wanted, f"{name}_error"))


@pytest.mark.parametrize("layout", ["c", "transposed", "inner_sliced", "reversed"])
@pytest.mark.parametrize("m", [CHUNK + 20, 2 * CHUNK, 4 * CHUNK - 1, 4 * CHUNK + 1])
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_rows_are_exact_within_the_bound(fmt, m, layout, tiny):
    rng = np.random.default_rng(0)
    n, k = 45, 13
    a, b, bias, grad = operands(rng, m, n, k, fmt, layout=layout)
    outs = [Fenced(x.shape, x.dtype, strided=x.ndim > 1) for x in (a, b, bias)]
    with unwritten(a, b, bias, grad):
        result = nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "gelu", out=tuple(fenced.array for fenced in outs)
        )
    assert steps(tiny) == [-(-m // library.chunk(fmt))]
    for fenced, value in zip(outs, result, strict=True):
        assert value is fenced.array
        fenced.assert_untouched()
    check(grad, a, b, bias, "gelu", result)


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradients_may_be_written_in_any_layout(fmt, tiny):
    """d_b is read again by the blocks after the first."""
    a, b, bias, grad = operands(np.random.default_rng(1), 3 * CHUNK + 5, 33, 17, fmt)
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu")
    backwards = (slice(None, None, -2),) * 2
    outs = (
        np.full((2 * a.shape[0], 2 * a.shape[1]), np.nan, a.dtype)[backwards],
        np.full(b.shape[::-1], np.nan, b.dtype).T,
        np.full((1, 3 * b.shape[1]), np.nan, b.dtype)[:, ::3],
    )
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", out=outs)
    assert steps(tiny) == [4, 4]
    for got, right in zip(result, wanted, strict=True):
        np.testing.assert_array_equal(bits(got), bits(right))


@pytest.mark.parametrize("activation", ["gelu", "none"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_needs_and_a_saved_pre_activation_change_no_bit(fmt, activation, tiny):
    a, b, bias, grad = operands(np.random.default_rng(2), 3 * CHUNK + 9, 37, 11, fmt)
    full = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation)
    _, pre = nf.matmul_bias_activation(a, b, bias, activation, return_pre_activation=True)
    for saved in (None, pre, np.asfortranarray(pre)):
        for needs in ((), ("a",), ("b",), ("bias",), ("a", "bias"), ("a", "b", "bias")):
            part = nf.matmul_bias_activation_bwd(
                grad, a, b, bias, activation, pre_activation=saved, needs=needs
            )
            for name, left, right in zip(("a", "b", "bias"), full, part, strict=True):
                assert (right is not None) == (name in needs)
                if right is not None:
                    np.testing.assert_array_equal(bits(left), bits(right))
    # Of the operands' own dtype: converted block by block.
    rounded = pre.astype(a.dtype)
    part = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, pre_activation=rounded)
    check(grad, a, b, bias, activation, part, pre=rounded)
    assert max(steps(tiny)) == 4


@pytest.mark.parametrize("members", ["rows of members", "one by one", "by twos"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_batch_in_blocks_gives_what_a_loop_gives(fmt, members, whole, monkeypatch):
    rng = np.random.default_rng(3)
    m = 2 * CHUNK + 5
    rows = {"rows of members": 1, "one by one": m, "by twos": 2 * m}[members]
    monkeypatch.setattr(tiling, "GRAD_PRE_BYTES", 0)
    monkeypatch.setattr(tiling, "GRAD_PRE_ROWS", rows)
    a, b, bias, grad = operands(rng, m, 21, 9, fmt, (2, 5))
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, "tanh")
    assert steps(whole) == [{1: 30, m: 10, 2 * m: 6}[rows]]
    for i in np.ndindex(2, 5):
        single = nf.matmul_bias_activation_bwd(grad[i], a[i], b[i], bias[i][0], "tanh")
        for alone, together in zip(single, result, strict=True):
            np.testing.assert_array_equal(bits(alone), bits(together[i].reshape(alone.shape)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("batch, m", [((3,), CHUNK + 7), ((2, 5), 31), ((5, 3, 2), 9)])
def test_rows_that_lie_apart_are_gathered_block_by_block(tiny, batch, m, fmt):
    """Blocks that begin and end within a member, of views that cannot be folded."""
    rng = np.random.default_rng(6)
    n, k = 19, 5
    a, b, bias, grad = operands(rng, m, n, k, fmt, batch, b_batch=())
    u, v, w = (normal(rng, x.shape, x.dtype) for x in (a, b, bias))
    saved = normal(rng, grad.shape, a.dtype)
    # The last of a longer member's rows, so that no member ends where the next one begins.
    apart = [
        np.concatenate([np.full_like(x[..., :1, :], np.nan), x], axis=-2)[..., 1:, :]
        for x in (grad, a, u, saved)
    ]
    for activation in ("none", "silu"):
        for pre, own in ((None, None), (saved, apart[3])):
            out = np.full((*batch, m + 1, k), np.nan, a.dtype)
            wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, pre_activation=pre)
            before = len(tiny)
            got = nf.matmul_bias_activation_bwd(
                apart[0], apart[1], b, bias, activation, pre_activation=own,
                out=(out[..., 1:, :], None, None),
            )  # fmt: skip
            made = [block for schedule in tiny[before:] for block in schedule]
            if activation != "none" or pre is None:  # else it is kept
                assert len(made) > 1
                assert any(block[0] for block in made) and any(block[-1] for block in made)
            assert np.isnan(out[..., 0, :]).all()
            second = [
                nf.matmul_bias_activation_double_bwd(
                    x, v, w, g, y, b, bias, activation, pre_activation=p
                )
                for x, g, y, p in ((u, grad, a, pre), (apart[2], *apart[:2], own))
            ]
            for x, y in (*zip(got, wanted, strict=True), *zip(*second, strict=True)):
                assert (bits(x) == bits(y)).all()


def test_rows_that_lie_apart_are_told_by_their_shape_too(whole):
    """Two views with the same strides, of another shape each, and everything else the same."""
    rng = np.random.default_rng(7)
    n, k = 11, 5
    b, memory = normal(rng, (k, n), np.float32), normal(rng, (1000,), np.float32)
    a, grad = normal(rng, (6, k), np.float32), normal(rng, (6, n), np.float32)
    for batch, m in ((2, 3), (3, 2), (2, 3)):
        pre = np.lib.stride_tricks.as_strided(memory, (batch, m, n), (600, 100, 4))
        rows = grad.reshape(batch, m, n), a.reshape(batch, m, k), b
        got, wanted = (
            nf.matmul_bias_activation_bwd(*rows, None, "silu", pre_activation=saved)
            for saved in (pre, pre.copy())
        )
        for x, y in zip(got[:2], wanted[:2], strict=True):
            np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("rows", [1, 2 * CHUNK, 6 * CHUNK])
@pytest.mark.parametrize("a_batch", [(3, 2), (1, 2), ()])
@pytest.mark.parametrize("b_batch", [(3, 2), (3, 1), (2,), ()])
@pytest.mark.parametrize("fmt", ["float64", "float32", "bfloat16"])
def test_gradients_summed_over_batch_axes_grow_block_by_block(
    fmt, a_batch, b_batch, rows, whole, monkeypatch
):
    monkeypatch.setattr(tiling, "GRAD_PRE_BYTES", 0)
    monkeypatch.setattr(tiling, "GRAD_PRE_ROWS", rows)
    rng = np.random.default_rng(4)
    dtype = DTYPES[fmt]
    m, n, k = CHUNK + 7, 19, 5
    a = normal(rng, (*a_batch, m, k), dtype)
    b = normal(rng, (*b_batch, k, n), dtype)
    bias = normal(rng, (*b_batch, 1, n), dtype)
    batch = np.broadcast_shapes(a_batch, b_batch)
    grad = np.broadcast_to(normal(rng, (m, n), dtype), (*batch, m, n))
    for sum_batch in (False, True):
        outs = [np.full(x.shape, np.nan, dtype) for x in (a, b, bias)]
        if sum_batch:
            outs[1] = np.full((k, n), np.nan, dtype)
        result = nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "silu", sum_batch=sum_batch, out=tuple(outs)
        )
        how = {"d_b_shape": (k, n)} if sum_batch else {}
        check(grad, a, b, bias, "silu", result, **how)


@pytest.mark.parametrize("batch,m,n,k", [((), 0, 3, 2), ((0,), 4, 3, 2), ((2,), 0, 3, 2)])
def test_an_empty_sum_of_blocks_is_zero(batch, m, n, k, tiny):
    a, b, bias, grad = operands(np.random.default_rng(5), m, n, k, "float32", batch, b_batch=())
    for activation in ("gelu", "none"):
        outs = [np.full(x.shape, np.nan, x.dtype) for x in (a, b, bias)]
        nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, out=tuple(outs))
        assert outs[0].size == 0 and not outs[1].any() and not outs[2].any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_and_infinity_reach_what_they_reach_in_one_block(fmt, whole, monkeypatch):
    chunk = library.chunk(fmt)
    a, b, bias, grad = (x.copy() for x in operands(np.random.default_rng(6), 3 * chunk, 23, 8, fmt))
    a[chunk + 1, 3] = np.nan
    grad[5, 7] = np.inf
    a[2 * chunk, 1] = -np.inf
    plain = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    monkeypatch.setattr(tiling, "GRAD_PRE_BYTES", 0)
    monkeypatch.setattr(tiling, "GRAD_PRE_ROWS", 1)
    BACKEND.replay.clear()
    cut = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    assert steps(whole) == [1, 3]
    for left, right in zip(plain, cut, strict=True):
        left, right = left.astype(np.float64), right.astype(np.float64)
        for kind in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(kind(left), kind(right))
    assert np.isnan(cut[1].astype(np.float64)).any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_have_the_same_bits_on_any_number_of_threads(fmt, tiny):
    a, b, bias, grad = operands(np.random.default_rng(7), 5 * CHUNK + 1, 301, 70, fmt)
    before = numba.get_num_threads()
    results = []
    try:
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            results.append(nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"))
    finally:
        numba.set_num_threads(before)
    assert steps(tiny) == [6] * before
    for result in results:
        for got, wanted in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(bits(got), bits(wanted))


def test_sums_over_blocks_are_no_worse_than_over_one(whole, monkeypatch):
    """The usual error of a long sum of one sign, where rounding drifts if it is done in order."""
    rng = np.random.default_rng(8)
    chunk = library.chunk("float32")
    m, n, k = 400 * chunk, 16, 16
    a, grad = (rng.random(shape, np.float32) + 0.5 for shape in ((m, k), (m, n)))
    b, bias = np.zeros((k, n), np.float32), np.ones(n, np.float32)
    exact = nf.matmul_bias_activation_bwd(
        *(x.astype(np.float64) for x in (grad, a, b, bias)), "relu", backend="reference"
    )
    errors = []
    for rows in (m, 40 * chunk, 4 * chunk):
        monkeypatch.setattr(tiling, "GRAD_PRE_BYTES", 0)
        monkeypatch.setattr(tiling, "GRAD_PRE_ROWS", rows)
        BACKEND.replay.clear()
        result = nf.matmul_bias_activation_bwd(grad, a, b, bias, "relu")
        errors.append(
            [float(np.abs(x / y - 1).max()) for x, y in zip(result[1:], exact[1:], strict=True)]
        )
    assert steps(whole) == [1, 10, 100]
    unit = 2.0**-24
    for d_b, d_bias in errors:
        # d_b: 512 terms in registers, then at most a hundred blocks; d_bias: 56, then in float64.
        assert d_b < 4 * np.sqrt(512) * unit and d_bias < 2 * np.sqrt(chunk) * unit


def test_blocks_cover_every_row_of_every_member_once():
    for batch, m, rows, members in (
        ((), 10, 3, 1), ((4,), 5, 5, 3), ((3, 4), 5, 5, 2), ((3, 4), 5, 5, 9), ((2, 3), 7, 2, 1),
    ):  # fmt: skip
        seen = np.zeros((*batch, m), int)
        sizes = []
        for block in blocks.cut(batch, m, rows, members):
            seen[(*block.batch, block.rows)] += 1
            sizes.append(np.prod(block.sizes))
        assert (seen == 1).all()
        assert sizes[0] == max(sizes) <= rows * members


# --- memory -------------------------------------------------------------------------------------


def extra_bytes(monkeypatch, m, n, k, fmt, **how):
    """Bytes that a backward takes beside its operands and results: NumPy's, and its workspaces."""
    rng = np.random.default_rng(0)
    dtype = DTYPES[fmt]
    a, b, grad = (rng.random(shape, np.float32).astype(dtype) for shape in ((m, k), (k, n), (m, n)))
    bias = b[0].copy()
    outs = tuple(np.empty_like(x) for x in (a, b, bias))
    made = []

    class Counted(workspace.Workspace):
        def __init__(self, size):
            super().__init__(size)
            made.append(self.size)

    monkeypatch.setattr(workspace, "Workspace", Counted)
    monkeypatch.setattr(workspace, "pool", [])
    activation = how.pop("activation", "gelu")
    warm = tuple(np.empty_like(x) for x in (a[:9], b, bias))
    nf.matmul_bias_activation_bwd(grad[:9], a[:9], b, bias, activation, out=warm)
    del made[:], workspace.pool[:]
    tracemalloc.start()
    try:
        nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, out=outs, **how)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(made) == 1  # one piece for the whole call
    return peak + sum(made)


def bound(n, k, fmt):
    """What docs/design.md promises: a block, the workspaces, and d_b of a half type in float32."""
    itemsize = library.registers(library.accumulator(fmt)).itemsize
    block = max(tiling.GRAD_PRE_BYTES, tiling.GRAD_PRE_ROWS * n * itemsize)
    total = 4 * k * n if DTYPES[fmt].itemsize == 2 else 0
    # Partial sums are one row in a chunk; two huge pages of rounding.
    return block + block // CHUNK + total + numba.get_num_threads() * (27 << 20) + (5 << 20)


@pytest.mark.parametrize("activation", ["gelu", "none"])
@pytest.mark.parametrize("fmt", ["float64", "float32", "bfloat16"])
def test_extra_memory_of_a_backward_does_not_grow_with_m(fmt, activation, monkeypatch):
    n, k = 2048, 32
    sizes = [
        extra_bytes(monkeypatch, m, n, k, fmt, activation=activation) for m in (4096, 8192, 16384)
    ]
    assert max(sizes) <= bound(n, k, fmt)
    # Blocks are of a few chunks more or less, cells of some rows, memory comes in huge pages, and
    # where level 2 is small, d_a's sums over N have planes, up to 16 MiB of a thread.
    planes = numba.get_num_threads() * (16 << 20)
    assert max(sizes) - min(sizes) <= CHUNK * n * 8 + (8 << 20) + planes
    # In one piece, grad_pre alone would be more.
    assert max(sizes) < 16384 * n * library.registers(library.accumulator(fmt)).itemsize


def test_extra_memory_of_a_backward_does_not_grow_with_k(monkeypatch):
    n = 512
    sizes = [extra_bytes(monkeypatch, 8192, n, k, "float32") for k in (512, 1024, 2048)]
    assert max(sizes) <= bound(n, 2048, "float32")


def test_a_saved_pre_activation_of_a_half_type_is_widened_by_blocks(monkeypatch):
    m, n, k = 16384, 1024, 16
    pre = np.ones((m, n), DTYPES["bfloat16"])
    size = extra_bytes(monkeypatch, m, n, k, "bfloat16", pre_activation=pre)
    assert size <= bound(n, k, "bfloat16") + tiling.GRAD_PRE_BYTES < 3 * 4 * m * n


def test_batches_and_wide_blocks_are_bounded_too():
    for itemsize in (4, 8):
        for n in (1, 64, 2048, 50257):
            most = max(tiling.GRAD_PRE_BYTES, tiling.GRAD_PRE_ROWS * n * itemsize)
            for m in (1, 100, 5000, 1 << 20):
                rows, members = tiling.backward_block(m, n, 0, itemsize, CHUNK)
                assert rows == m or rows % CHUNK == 0
                assert rows * members * n * itemsize <= most
                assert members == 1 or rows == m


def test_kept_workspaces_are_bounded(monkeypatch):
    monkeypatch.setattr(workspace, "pool", [])
    page = workspace.HUGE_PAGE
    monkeypatch.setattr(tiling, "KEPT_BYTES", 3 * page)
    for size in (page, 2 * page, 4 * page):
        borrowed = [workspace.borrow(size) for _ in range(3)]
        assert all(x.size >= size for x in borrowed)
        for x in borrowed:
            workspace.give_back(x)
        assert sum(x.size for x in workspace.pool) <= 3 * page
    for _ in range(10):
        workspace.give_back(workspace.borrow(5 * page))
    assert sum(x.size for x in workspace.pool) <= 3 * page
    del workspace.pool[:]
    monkeypatch.setattr(tiling, "KEPT_BYTES", 100 * page)
    borrowed = [workspace.borrow(1) for _ in range(9)]
    for x in borrowed:
        workspace.give_back(x)
    assert len(workspace.pool) == workspace.KEPT_WORKSPACES


@pytest.mark.long
@pytest.mark.parametrize("batch, shared", [((), "b"), ((3,), "a"), ((3,), "b")])
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_an_epilogue_are_exact_within_the_bound(fmt, batch, shared, tiny):
    """Two right factors, and operands whose gradients are summed over each set of axes."""
    rng, dtype = np.random.default_rng(4), DTYPES[fmt]
    m, n, k = 2 * CHUNK + 5, 21, 13
    a = normal(rng, (m, k) if shared == "a" else (*batch, m, k), dtype, k**-0.5)
    own = () if shared == "b" else batch
    factors = tuple(normal(rng, (*own, k, n), dtype) for _ in range(2))
    grad = normal(rng, (*batch, m, n), dtype)
    formula = test_fusion.PRODUCTS[1]
    for form in ((), (n,), (m, 1), (m, n)):
        x = normal(rng, form, dtype)
        got = nf.matmul_epilogue_bwd(grad, a, factors, formula.ours, x)
        sums = test_fusion.sums_of(a, factors, "cpu")
        how = formula, (grad,), sums, test_fusion.widened([x], dtype), dtype, "cpu"
        *slopes, d_x = (test_fusion.whole(y, grad.shape) for y in test_fusion.gradients(*how))
        d_a, d_b = test_fusion.gradient_of_factors([(a, factors, slopes)], dtype, "cpu")
        test_fusion.check_array("d_a", got.d_a, d_a, dtype)
        for y, wanted in zip(got.d_b, d_b, strict=True):
            test_fusion.check_array("d_b", y, wanted, dtype)
        test_fusion.check_operands(got.d_operands, [x], [d_x], dtype, "cpu")
    assert max(steps(tiny)) > 1


@pytest.mark.parametrize("fmt", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shared", [(), (3,)], ids=["one b", "a b for each"])
def test_an_operand_that_a_batch_shares_has_the_sum_of_its_gradients(fmt, shared, tiny):
    """Guards: a result that is summed over the batch alone, by blocks of rows and of members."""
    rng, dtype, m = np.random.default_rng(3), DTYPES[fmt], 2 * CHUNK + 1
    shapes = (3, m, 6), (3, m, 4), (*shared, 4, 6), (m, 6), (6,)
    grad, a, b, x, y = (normal(rng, shape, dtype) for shape in shapes)

    def f(z, x, y):
        return z * x + y * z

    found = nf.matmul_epilogue_bwd(grad, a, b, f, x, y)
    wide = [v.astype(np.float64) for v in (grad, a, b, x, y)]
    wanted = nf.matmul_epilogue_bwd(*wide[:3], f, *wide[3:], backend="reference")
    tol = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.05}[fmt]
    for left, right in zip(found.d_operands, wanted.d_operands, strict=True):
        assert left.shape == right.shape and left.dtype == dtype
        np.testing.assert_allclose(left.astype(np.float64), right, tol, tol * np.abs(right).max())
