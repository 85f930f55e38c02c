"""Small calls of the CPU backend: one native call over a sequence of plans that is kept by form."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from arrays import Fenced, bits, in_layout, normal
from tolerance import DTYPES

import numfuse as nf
from numfuse.backends.cpu import tiling
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.kernels import library, rows
from numfuse.backends.cpu.launch import entries
from numfuse.runtime.replay import Replay

FORMATS = tuple(DTYPES)
LAYOUTS = ("c", "transposed", "inner_sliced", "reversed", "zero_stride")


def programs(kept):
    """Return the recorded programs; a call on threads has an entry more, which has none."""
    return [entry.program for entry in kept.programs() if entry.program is not None]


@pytest.fixture
def kept(monkeypatch):
    """The programs that this test records, and no others."""
    found = Replay(tiling.KEPT_PLANS, tiling.KEPT_PLAN_BYTES)
    monkeypatch.setattr(BACKEND, "replay", found)
    return found


def operands(m, n, k, fmt="float32", layout="c", seed=0):
    rng = np.random.default_rng(seed)
    a, b, bias, grad = (
        in_layout(normal(rng, shape, DTYPES[fmt]), layout)
        for shape in ((m, k), (k, n), (n,), (m, n))
    )
    return a, b, bias, grad


def every_call(a, b, bias, grad):
    """The results of all that a small call may be."""
    out, pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)
    results = [out, pre, nf.matmul_bias_activation(a, b, bias, "none")]
    results += nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    saved = pre, pre.astype(a.dtype), pre[::-1]
    for pre_activation in saved:
        results += nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "gelu", pre_activation=pre_activation
        )
    for needs in (("a",), ("b",), ("bias",), ("bias", "a"), ()):
        for activation in ("silu", "none"):
            results += nf.matmul_bias_activation_bwd(
                grad, a, b, bias, activation, needs=needs, guard=False
            )
    results += nf.matmul_bias_activation_bwd(grad, a, b, None, "silu")
    for residual in (grad, grad[:1], grad[:, :1]):
        results += [nf.matmul_bias_residual(a, b, bias, residual)]
        results += nf.matmul_bias_residual_bwd(grad, a, b, bias, residual)
    return [None if x is None else bits(x) for x in results]


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for one, two in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, two)  # None is equal to None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_small_call_has_the_bits_of_a_large_one(fmt, layout, kept, monkeypatch):
    shapes = (1, 1, 1), (31, 33, 35), (130, 5, 3), (0, 3, 4), (3, 0, 4), (4, 5, 0)
    small = [every_call(*operands(*shape, fmt, layout)) for shape in shapes]
    again = [every_call(*operands(*shape, fmt, layout)) for shape in shapes]
    assert kept.programs()
    # Each block a launch of its own, on several threads.
    monkeypatch.setattr(tiling, "PARALLEL_FMAS", 0)
    monkeypatch.setattr(tiling, "BLOCKS_IN_ONE_LAUNCH", 0)
    kept.clear()
    large = [every_call(*operands(*shape, fmt, layout)) for shape in shapes]
    assert any(len(made.sequences) > 1 for made in programs(kept))
    for got, once_more, wanted in zip(small, again, large, strict=True):
        assert_equal(got, wanted)
        assert_equal(once_more, wanted)


def test_objects_that_cannot_be_read_are_asked_for_their_address(kept, monkeypatch):
    wanted = every_call(*operands(31, 33, 35))
    kept.clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(entries, "OBJECTS_CAN_BE_READ", False)
            entries.entry.cache_clear()
            assert_equal(every_call(*operands(31, 33, 35)), wanted)
    finally:
        entries.entry.cache_clear()


def test_a_form_is_kept_once_whatever_the_arrays(kept):
    a, b, bias, grad = operands(8, 8, 8)
    square = nf.matmul_bias_activation(a, a, bias, "gelu")
    both = nf.matmul_bias_activation(a, b, bias, "gelu")
    assert len(kept.programs()) == 1
    one = nf.matmul_bias_activation_bwd(a, a, a, bias, "gelu")
    two = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu")
    assert len(kept.programs()) == 2
    kept.clear()
    np.testing.assert_array_equal(both, nf.matmul_bias_activation(a, b, bias, "gelu"))
    np.testing.assert_array_equal(square, nf.matmul_bias_activation(a, a.copy(), bias, "gelu"))
    assert_equal(two, nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"))
    assert_equal(one, nf.matmul_bias_activation_bwd(a.copy(), a, a.copy(), bias, "gelu"))


def test_another_form_is_another_sequence(kept):
    a, b, bias, grad = operands(6, 6, 6)
    calls = [
        {},
        {"bias": None},
        {"activation": "tanh"},
        {"a": np.asfortranarray(a)},
        {"grad": np.asfortranarray(grad)},
        {"guard": False},
        {"needs": ("a",)},
        {"pre_activation": grad},
        {"out": (np.empty_like(a).T, None, None)},
        {"out": (None, None, np.empty(12, a.dtype)[::2])},
    ]
    for call in calls:
        arguments = {"grad": grad, "a": a, "b": b, "bias": bias, "activation": "gelu"} | call
        got = nf.matmul_bias_activation_bwd(**arguments)
        wanted = nf.matmul_bias_activation_bwd(**{**arguments, "out": None}, backend="reference")
        for one, two in zip(got, wanted, strict=True):
            assert (one is None) == (two is None)
            if two is not None:
                np.testing.assert_allclose(one, two, 1e-4, 1e-5)
    assert len(kept.programs()) == len(calls)


def test_the_number_of_kept_programs_is_bounded(kept):
    kept.limits = 3, tiling.KEPT_PLAN_BYTES
    for size in range(1, 12):
        a, b, bias, grad = operands(size, size, size)
        nf.matmul_bias_activation(a, b, bias, "relu")
        nf.matmul_bias_activation_bwd(grad, a, b, bias, "relu")
        assert 0 < len(kept.programs()) <= 3
    kept.limits = 1000, 20_000
    for size in range(12, 40):
        a, b, bias, grad = operands(size, size, size)
        nf.matmul_bias_activation_bwd(grad, a, b, bias, "relu")
        assert 0 < sum(made.nbytes for made in programs(kept)) <= 20_000


@pytest.mark.parametrize("m", [8, 1000, 30000])
def test_temporaries_of_a_sequence_are_bounded(kept, m):
    a, b, bias, grad = operands(m, 512, 1)
    nf.matmul_bias_activation_bwd(grad, a, b, bias, "relu")
    (program,) = programs(kept)
    (made,) = program.sequences
    # The block of grad_pre, and of each thread at most its panels, block, strips and plane.
    assert program.size - made.threads * made.stride < tiling.GRAD_PRE_BYTES + (1 << 20)
    assert made.stride < 32 << 20


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("rows", ["none", "one chunk", "three chunks", "many chunks"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_partial_sums_are_joined_in_float64_and_rounded_once(fmt, rows, strided):
    acc = np.dtype(library.accumulator(fmt))
    chunk = library.chunk(fmt)
    m = {"none": 0, "one chunk": chunk, "three chunks": 2 * chunk + 1, "many chunks": 50 * chunk}
    m = m[rows]
    a, b, bias, grad = operands(m, 45, 1, fmt)
    wide = grad.astype(acc)
    wanted, lost = np.zeros((2, 45), np.float64)
    for start in range(0, m, chunk):
        runs = []
        for first in range(start, min(start + chunk, m), tiling.RUN):
            runs.append(np.zeros(45, acc))
            for row in wide[first : min(first + tiling.RUN, start + chunk)]:
                runs[-1] += row
        before = np.zeros(45, acc)
        for run in runs[:-1]:
            before += run
        for partial in (runs[-1], before):
            after = wanted + partial
            added = after - wanted
            lost += (wanted - (after - added)) + (partial - added)
            wanted = after
    wanted = wanted + lost
    fenced = Fenced((45,), DTYPES[fmt])
    out = np.full(3 * 45, np.nan, DTYPES[fmt])[::3] if strided else fenced.array
    (_, _, got) = nf.matmul_bias_activation_bwd(
        grad, a, b, bias, "none", needs=("bias",), out=(None, None, out)
    )
    assert got is out
    np.testing.assert_array_equal(bits(got), bits(wanted.astype(acc).astype(DTYPES[fmt])))
    fenced.assert_untouched()


def test_joined_sums_have_the_same_bits_on_any_number_of_threads():
    chunk = library.chunk("float32")
    n = 16384
    m = chunk * (1 + tiling.PARALLEL_ELEMENTS // n)
    grad = np.random.default_rng(0).standard_normal((m, n), np.float32)
    a, b, bias = np.ones((m, 1), np.float32), np.ones((1, n), np.float32), np.ones(n, np.float32)
    results = []
    before = numba.get_num_threads()
    try:
        for threads in range(1, before + 1):
            numba.set_num_threads(threads)
            results.append(
                nf.matmul_bias_activation_bwd(grad, a, b, bias, "none", needs=("bias",)).d_bias
            )
    finally:
        numba.set_num_threads(before)
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], grad.sum(0, dtype=np.float64), 1e-5, 1e-3)


def test_calls_at_once_get_what_single_calls_get(kept):
    shapes = [(16, 16, 16), (31, 33, 35), (130, 5, 3), (64, 64, 64)]
    wanted = [every_call(*operands(*shape, seed=1)) for shape in shapes]
    kept.clear()  # so that the first calls are at once as well

    def work(t):
        for i in range(12):
            which = (t + i) % len(shapes)
            assert_equal(every_call(*operands(*shapes[which], seed=1)), wanted[which])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_kernel_that_cannot_be_made_leaves_every_output_untouched(kept, monkeypatch):
    def broken(fmt):
        raise RuntimeError("no compiler")

    a, b, bias, grad = operands(9, 7, 5)
    outs = [Fenced(x.shape, x.dtype) for x in (a, b, bias)]
    monkeypatch.setattr(rows, "store", broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        nf.matmul_bias_activation_bwd(
            grad, a, b, bias, "gelu", out=tuple(fenced.array for fenced in outs)
        )
    for fenced in outs:
        fenced.assert_untouched()
        assert np.isnan(fenced.array).all()
    assert not kept.programs()
