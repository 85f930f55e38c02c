"""The table of recorded calls: what it keeps, for how long, and what it says of itself.

Guards: a repeated call gives what its first gave, in bounded memory, after any redefinition.
"""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from arrays import Fenced, bits, in_layout, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import numfuse as nf
from numfuse import expr as ex
from numfuse.backends.cpu.face import BACKEND
from numfuse.runtime.replay import Replay


def test_a_program_is_found_by_its_fingerprint_alone():
    table: Replay[str] = Replay(10, 1000)
    assert table.find(("gelu", 3)) is None
    assert table.keep(("gelu", 3), "first", nbytes=5) == "first"
    assert table.find(("gelu", 3)) == "first" and table.find(("gelu", 4)) is None
    assert table.keep(("gelu", 3), "second", nbytes=7) == "second"
    assert table.find(("gelu", 3)) == "second"
    assert table.statistics() == (2, 2, 1, 7)  # hits, misses, entries, bytes


def test_the_oldest_goes_beyond_the_entries_and_beyond_the_bytes():
    table: Replay[int] = Replay(3, 100)
    for i in range(10):
        table.keep(i, i)
        assert table.programs() == list(range(max(0, i - 2), i + 1))
    table.keep("large", 10, nbytes=100)
    assert table.statistics().entries == 3
    table.keep("larger", 11, nbytes=99)
    assert table.programs() == [11]
    table.keep("too large", 12, nbytes=101)
    assert table.find("too large") is None and table.programs() == [11]


@pytest.mark.parametrize("limits", [(0, 0), (0, 10), (1, 0)])
def test_a_table_without_room_keeps_nothing_that_takes_room(limits):
    table: Replay[int] = Replay(*limits)
    assert table.keep("x", 1, nbytes=1) == 1
    assert not table.programs() and table.statistics().nbytes == 0


def test_a_program_goes_with_the_first_of_its_formulas():
    table: Replay[int] = Replay(10, 100)
    one, two = ex.exp(ex.SYMBOL * 1.125), ex.exp(ex.SYMBOL * 1.375)
    table.keep("one", 1, (one,), 4)
    table.keep("both", 2, (one, two), 8)
    table.keep("none", 3, (), 16)
    del two
    gc.collect()
    assert table.programs() == [1, 3] and table.statistics().nbytes == 20
    del one
    gc.collect()
    assert table.programs() == [3] and table.statistics().nbytes == 16
    table.clear()
    assert not table.programs() and table.statistics().nbytes == 0


def test_threads_that_keep_and_find_at_once_leave_the_table_within_its_limits():
    table: Replay[int] = Replay(20, 200)

    def work(t):
        for i in range(2000):
            key = (t * i) % 50
            found = table.find(key)
            assert found in (None, key)
            if found is None:
                table.keep(key, key, nbytes=key % 20)
            if i % 500 == 499:
                table.clear()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    table.keep("last", 0)
    kept = table.programs()
    assert 0 < len(kept) <= 20 and table.statistics().nbytes == sum(x % 20 for x in kept)


def test_a_cleared_backend_records_its_calls_again():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((6, 6), np.float32) for _ in range(2))
    wanted = bits(nf.matmul_bias_activation(a, b, None, "gelu"))
    before = BACKEND.replay.statistics()
    nf.matmul_bias_activation(a, b, None, "gelu")
    again = BACKEND.replay.statistics()
    assert (again.hits, again.misses) == (before.hits + 1, before.misses)
    BACKEND.replay.clear()
    assert BACKEND.replay.statistics().entries == 0
    assert (bits(nf.matmul_bias_activation(a, b, None, "gelu")) == wanted).all()
    assert BACKEND.replay.statistics().entries == 1


# --- calls of the public functions ----------------------------------------------------------------

LAYOUTS = ("c", "transposed", "inner_sliced", "reversed", "zero_stride")


def results(found):
    """Return the bits of a result, whether that is an array or a tuple."""
    found = found if isinstance(found, tuple) else (found,)
    return [None if x is None else bits(x).tolist() for x in found]


@st.composite
def calls(draw):
    """A call as a function of operands and outputs, and the shapes of both."""
    m, n, k = (draw(st.sampled_from((0, 1, 2, 5, 17))) for _ in range(3))
    batch = draw(st.sampled_from(((), (1,), (2,), (2, 3))))
    a, b, bias, grad = (*batch, m, k), (k, n), (n,), (*batch, m, n)
    if draw(st.booleans()):
        b = (*batch, k, n)
    residual = draw(st.sampled_from((grad, (n,), (m, 1), (1, n), ())))
    act = draw(st.sampled_from(("gelu", "relu", "none")))
    kind = draw(st.sampled_from(("forward", "residual", "backward", "d_residual", "gate", "slope")))
    if kind == "forward":
        return lambda x, out: nf.matmul_bias_activation(*x, act, out=out), (a, b, bias), grad
    if kind == "residual":
        return lambda x, out: nf.matmul_bias_residual(*x, out=out), (a, b, bias, residual), grad
    if kind == "backward":
        given = (grad, a, b, bias)
        return lambda x, out: nf.matmul_bias_activation_bwd(*x, act, out=out), given, [a, b, bias]
    if kind == "d_residual":
        given, made = (grad, a, b, bias, residual), [a, b, bias, residual]
        return lambda x, out: nf.matmul_bias_residual_bwd(*x, out=out), given, made
    if kind == "gate":
        return lambda x, out: nf.activation_mul(*x, act, out=out), (a, a), a
    return lambda x, out: nf.activation_mul_bwd(*x, act, out=out), (a, a, a), [a, a]


@settings(max_examples=150, deadline=None)
@given(
    case=calls(),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=3),
    given_out=st.booleans(),
    strided=st.booleans(),
    unaligned=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_call_that_comes_again_gives_what_a_first_one_gives(
    case, layouts, given_out, strided, unaligned, seed
):
    """Other data, and other strides of the same shapes, by turns; with `out`, and without."""
    call, shapes, made = case
    rng = np.random.default_rng(seed)
    outs = None
    if given_out:
        fenced = [
            Fenced(x, np.dtype("f4"), strided) for x in (made if type(made) is list else [made])
        ]
        outs = tuple(x.array for x in fenced) if type(made) is list else fenced[0].array
    rounds = []
    for layout in layouts * 2:
        operands = []
        for shape in shapes:
            x = normal(rng, shape, np.dtype("f4"))
            x = in_layout(x, layout) if len(shape) > 1 else x
            if unaligned and not operands:
                raw = np.empty(x.nbytes + 1, np.uint8)[1:].view(np.float32)
                x, source = raw.reshape(shape), x
                x[...] = source
            operands.append(x)
        rounds.append((operands, results(call(operands, outs))))
        if given_out:
            for x in fenced:
                x.assert_untouched()
    for operands, found in rounds:
        BACKEND.replay.clear()
        assert results(call(operands, None)) == found


@given(data=st.data(), act=st.sampled_from(("gelu", "none")))
@settings(max_examples=60, deadline=None)
def test_a_call_that_comes_again_refuses_outputs_that_overlap(data, act):
    memory = np.zeros(400, np.float32)
    a, b = np.ones((6, 6), np.float32), np.ones((6, 6), np.float32)
    apart = np.empty((6, 6), np.float32)

    def window(name):
        start = data.draw(st.integers(0, 360), name)
        return memory[start : start + 36].reshape(6, 6)

    nf.matmul_bias_activation(window("warm"), b, None, act, out=apart)  # (and views are known)
    nf.matmul_bias_activation_bwd(apart, window("warm"), b, None, act, out=(a.copy(), None, None))
    x, out = window("x"), window("out")
    if np.may_share_memory(x, out):
        with pytest.raises(ValueError, match="out must not share memory with a"):
            nf.matmul_bias_activation(x, b, None, act, out=out)
        with pytest.raises(ValueError, match="d_a must not share memory with grad"):
            nf.matmul_bias_activation_bwd(x, a, b, None, act, out=(out, None, None))
        with pytest.raises(ValueError, match="d_b must not share memory with d_a"):
            nf.matmul_bias_activation_bwd(a, a, b, None, act, out=(x, out, None))
    else:
        wanted = nf.matmul_bias_activation(x, b, None, act)
        assert nf.matmul_bias_activation(x, b, None, act, out=out) is out
        assert (out == wanted).all()


def test_a_gate_that_comes_again_may_be_in_place():
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((2, 5, 7), np.float32) for _ in range(2))
    wanted = [nf.silu_mul(x, y) for x, y in zip(a, b, strict=True)]
    for x, y, right in zip(a, b, wanted, strict=True):
        x = x.copy()
        assert np.array_equal(nf.silu_mul(x, y, out=x[:]), right) and np.array_equal(x, right)
    whole = np.empty((6, 7), np.float32)
    nf.silu_mul(whole[:5], b[0], out=a[0])
    with pytest.raises(ValueError, match="out must be exactly a or apart from it"):
        nf.silu_mul(whole[:5], b[0], out=whole[1:])


def test_a_redefined_activation_is_not_the_recorded_one():
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    for factor in (2.0, 3.0, 2.0):
        act = nf.activation(lambda x, factor=factor: factor * x * x, name="of this test")
        for which in ("of this test", act):
            for _ in range(2):
                found = nf.activation_mul(x, x, which)
                np.testing.assert_allclose(found, factor * x**3, rtol=1e-6)
    act.derivative(lambda x: 7.0 + 0.0 * x)
    found = nf.activation_mul_bwd(x, x, x, "of this test").d_a
    np.testing.assert_allclose(found, 7 * x * x, rtol=1e-6)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="there is one thread only")
def test_the_threads_of_a_call_are_those_of_its_turn():
    rng = np.random.default_rng(2)
    large, small = (rng.standard_normal((n, n), np.float32) for n in (300, 30))
    BACKEND.replay.clear()
    found = []
    before = numba.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            numba.set_num_threads(threads)
            found.append(bits(nf.matmul_bias_activation(large, large, None, "gelu")))
            nf.matmul_bias_activation(small, small, None, "gelu")
    finally:
        numba.set_num_threads(before)
    assert all((x == found[0]).all() for x in found)
    programs = [entry.program for entry in BACKEND.replay.programs() if entry.program is not None]
    # A small call is the same whatever the threads are: it never asks for them.
    assert sorted(program.threads for program in programs) == [1, 1, 2]


@pytest.mark.parametrize(
    "needs",
    [["a"], ("a",), {"a"}, {"a": 1}, iter(["a"]), (x for x in "a")],
    ids=lambda x: type(x).__name__,
)
def test_needs_may_be_any_iterable_of_names(needs):
    x = np.ones((4, 4), np.float32)
    nf.matmul_bias_activation_bwd(x, x, x, needs=("a",))
    found = nf.matmul_bias_activation_bwd(x, x, x, needs=needs)
    assert (found.d_a == 4).all() and found.d_b is found.d_bias is None


def test_a_call_that_is_recorded_holds_none_of_its_arrays():
    a = np.ones((4, 4), np.float32)
    whole = weakref.ref(a)
    out = nf.matmul_bias_activation(a, a, None, "gelu", out=np.empty_like(a))
    gone = weakref.ref(out)
    del a, out
    gc.collect()
    assert whole() is None and gone() is None


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_saved_pre_activation_is_an_operand_where_nothing_is_left_to_sum(backend):
    x, pre = np.ones((0, 4), np.float32), np.ones((0, 5), np.float32)
    pre.flags.writeable = False
    b = np.ones((4, 5), np.float32)
    for _ in range(2):
        found = nf.matmul_bias_activation_bwd(
            pre, x, b, None, "gelu", pre_activation=pre, backend=backend
        )
        assert found.d_a.shape == (0, 4) and not found.d_b.any()


def test_a_call_that_comes_again_refuses_an_empty_tuple_of_outputs():
    x = np.ones((5, 5), np.float32)
    for _ in range(2):
        nf.silu_mul_bwd(x, x, x)
    with pytest.raises(ValueError, match="out must have 2 entries"):
        nf.silu_mul_bwd(x, x, x, out=())


def test_the_stride_of_an_axis_of_length_one_changes_nothing():
    """Guards: an array in one piece is known by its shape, whatever strides it tells."""
    rng = np.random.default_rng(7)
    wide, b = rng.standard_normal((6, 40), np.float32), rng.standard_normal((40, 3), np.float32)
    odd = np.lib.stride_tricks.as_strided(wide[2], (1, 40), (52, 4))
    for a in (wide[:1].copy(), odd, wide[3:4]):
        assert a.flags.c_contiguous
        layer, gate = nf.matmul_bias_activation(a, b, None, "gelu"), nf.silu_mul(a, a)
        own = a.copy()
        assert (bits(layer) == bits(nf.matmul_bias_activation(own, b, None, "gelu"))).all()
        assert (bits(gate) == bits(nf.silu_mul(own, own))).all()
