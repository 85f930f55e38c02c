"""Calls of networks that come again, and packed weights: the bits of a first call, at once."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from arrays import bits
from frames import frames
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_networks import network
from tolerance import DTYPES

import numfuse as nf
from numfuse import perceptron
from numfuse.backends.cpu import networks
from numfuse.backends.cpu.face import BACKEND
from numfuse.backends.cpu.launch import workspace
from numfuse.expr import Expr
from numfuse.problem.operands import apart
from numfuse.runtime import fingerprint

EVERY = ("x", "weights", "biases")


def flat(found):
    """The arrays of a result, one after another."""
    if isinstance(found, np.ndarray) or found is None:
        return [found]
    return [y for part in found for y in flat(part)]


def same(found, expected):
    for y, z in zip(flat(found), flat(expected), strict=True):
        assert (y is None) == (z is None)
        if y is not None:
            assert y.shape == z.shape and y.dtype == z.dtype
            assert (bits(y) == bits(z)).all()


def calls(x, weights, biases, grad, activation="tanh", final="none"):
    """The functions of networks on these operands, by name."""
    how = {"final": final}
    ones = np.ones((2, *grad.shape), grad.dtype)
    # (kernels that other tests take too)
    jet = how | {"directions": np.eye(2, x.shape[-1]), "second": np.eye(2)[:1]}
    operands = x, weights, biases, activation
    return {
        "mlp": lambda **more: nf.mlp(*operands, **how, **more),
        "mlp_bwd": lambda **more: nf.mlp_bwd(grad, *operands, **how, needs=EVERY, **more),
        "mlp_jet": lambda **more: nf.mlp_jet(*operands, **jet, **more),
        "mlp_jet_bwd": lambda **more: nf.mlp_jet_bwd(
            grad, ones, None, *operands, **jet, needs=EVERY, **more
        ),
    }


def drawn(sizes, points, dtype, seed=0):
    x, weights, biases = network(sizes, points, dtype, seed)
    grad = np.random.default_rng(seed + 1).standard_normal((points, sizes[-1])).astype(dtype)
    return x, weights, biases, grad


@pytest.mark.parametrize("name", ["mlp", "mlp_bwd", "mlp_jet", "mlp_jet_bwd"])
def test_a_call_that_comes_again_opens_few_frames(name, monkeypatch):
    """So a small network costs what it computes, and not what checks it."""
    call = calls(*drawn((3, 8, 5), 9, np.float32))[name]
    # (memory of a test before costs a call that puts this one back beside it)
    monkeypatch.setattr(workspace, "pool", [])
    first = call()
    again = min((frames(call)[1] for _ in range(3)), key=len)
    assert len(again) <= 12, again
    same(call(), first)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("points", [9, 130])
def test_weights_that_are_copied_further_apart_give_the_same_bits(points, dtype, monkeypatch):
    """As they are where rows would meet in few sets of a cache: here on any processor."""
    x, weights, biases, grad = operands = drawn((16, 32, 48, 16), points, dtype)
    given, dots = (x, weights, biases, "tanh"), [np.ones_like(w) for w in weights]

    def found():
        BACKEND.replay.clear()
        every = calls(*operands)
        _, kept = nf.mlp(*given, keep=True)
        return [
            *(call() for call in every.values()),
            nf.mlp_bwd(grad, *given, needs=EVERY, kept=kept),
            nf.mlp_jvp(x, weights, biases, x, dots, None, "tanh"),
            nf.mlp_double_bwd(None, dots, None, grad, *given),
        ]

    expected = found()
    monkeypatch.setattr(networks, "APART_ROWS", 1)
    monkeypatch.setattr(networks.Layout, "_apart", lambda self, step, rows: step + 64)
    same(found(), expected)
    BACKEND.replay.clear()


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "none"])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((3, 300, 5), "float32"), ((270, 8), "float64"), ((3, 8, 5), "float16"),
     ((5, 270, 3), "bfloat16")],
    ids=str,
)  # fmt: skip
def test_a_call_that_goes_by_other_calls_is_checked_once(sizes, dtype, bias, monkeypatch):
    """Wide networks go layer by layer, half types in float32: with the bits of a first call."""

    def operands(seed):
        x, weights, biases, grad = drawn(sizes, 9, DTYPES[dtype], seed)
        return x, weights, biases if bias else None, grad

    def found(x, weights, biases, grad):
        given = x, weights, biases, "tanh"
        value, kept = nf.mlp(*given, keep=True)
        every = [nf.mlp(*given), value]
        for needs in (EVERY, ("weights", "biases"), ("x",)):
            every.append(nf.mlp_bwd(grad, *given, needs=needs))
            every.append(nf.mlp_bwd(grad, *given, needs=needs, kept=kept))
        return every

    BACKEND.replay.clear()
    expected = found(*operands(1))
    BACKEND.replay.clear()
    found(*operands(2))
    same(found(*operands(1)), expected)

    def checks(*_):
        raise AssertionError("a call that came before is checked again")

    monkeypatch.setattr(perceptron.Network, "__init__", checks)
    same(found(*operands(1)), expected)
    x, weights, biases, _ = operands(1)
    with pytest.raises(AssertionError, match="checked again"):
        nf.mlp(x[:8], weights, biases, "tanh")


LAYOUTS = {
    "C": lambda x: x,
    "F": np.asfortranarray,
    "reversed": lambda x: x[::-1].copy()[::-1],
    "apart": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "rows": lambda x: np.repeat(x, 2, axis=0)[::2],
}
_case = st.tuples(
    st.sampled_from(((3, 16, 16, 2), (3, 17, 5), (3, 16, 2), (3, 2))),
    st.sampled_from((1, 2, 33)),
    st.sampled_from((np.float32, np.float64)),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(("tanh", "relu")),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=20, deadline=None)
@given(st.lists(_case, min_size=2, max_size=4))
def test_no_call_is_taken_for_another(cases):
    """Whatever came before, a call has the bits that it has where nothing did."""
    made = []
    for sizes, points, dtype, layout, activation, biased, packed in cases:
        x, weights, biases, grad = drawn(sizes, points, dtype)
        x, weights = LAYOUTS[layout](x), [LAYOUTS[layout](w) for w in weights]
        if packed:
            weights = nf.pack(weights)
        given = x, weights, biases if biased else None, grad, activation
        made += calls(*given).values()
    BACKEND.replay.clear()
    one = [call() for call in made]
    two = [call() for call in made]
    for call, first, second in zip(made, one, two, strict=True):
        BACKEND.replay.clear()
        alone = call()
        same(first, alone)
        same(second, alone)


def test_results_go_where_they_are_wanted_every_time():
    x, weights, biases, grad = drawn((3, 16, 5, 2), 20, np.float32)
    call = calls(x, weights, biases, grad)["mlp_bwd"]
    expected = call()
    size = sum(y.size for y in (*weights, *biases))
    vector = np.full(size + 2, np.nan, np.float32)
    ends = np.cumsum([0, *(y.size for y in (*weights, *biases))]) + 1
    views = [
        vector[i:j].reshape(y.shape)
        for (i, j), y in zip(itertools.pairwise(ends), (*weights, *biases), strict=True)
    ]
    d_x = np.full(x.shape, np.nan, np.float32)
    out = d_x, tuple(views[:3]), views[3:]
    for _ in range(3):
        for y in (d_x, vector):
            y.fill(np.nan)
        found = call(out=out)
        assert found.d_x is d_x and found.d_weights[1] is views[1]
        same(found, expected)
        assert np.isnan(vector[[0, -1]]).all()
    same(call(out=(None, None, (None, views[4], None))), expected)
    # (of any strides)
    wide = np.full((6, 32), np.nan, np.float32)
    turned = np.full((5, 16), np.nan, np.float32).T
    for _ in range(2):
        same(call(out=(None, (wide[::2, ::2], turned, None), None)), expected)
        assert np.isnan(wide[1::2]).all() and np.isnan(wide[:, 1::2]).all()
    with pytest.raises(ValueError, match=r"d_weights\[0\].*overlap|overlap.*d_weights\[0\]"):
        call(out=(None, (weights[0], None, None), None))
    with pytest.raises(ValueError, match="overlap"):
        call(out=(None, (views[0], views[1], views[2]), (views[3], views[3][:5], None)[:3]))
    out = np.empty((20, 2), np.float32)
    forward = calls(x, weights, biases, grad)["mlp"]
    for _ in range(2):
        out.fill(np.nan)
        assert forward(out=out) is out
        same(out, forward())
    one = np.ones((4, 4))
    for _ in range(3):
        with pytest.raises(ValueError, match="overlap"):
            nf.mlp(one, [np.eye(4)], None, out=one)
        nf.mlp(one, [np.eye(4)], None, out=np.empty((4, 4)))


def test_what_is_wrong_is_said_after_calls_that_were_right():
    x, weights, biases, grad = drawn((3, 8, 2), 5, np.float64)
    for call in calls(x, weights, biases, grad).values():
        call(), call()
    with pytest.raises(ValueError, match="tahn"):
        nf.mlp(x, weights, biases, "tahn")
    with pytest.raises(ValueError, match="2 arrays"):
        nf.mlp(x, weights, biases[:1])
    with pytest.raises(TypeError, match="float32"):
        nf.mlp(x.astype(np.float32), weights, biases)
    with pytest.raises(ValueError, match="grad must have the result"):
        nf.mlp_bwd(grad[:3], x, weights, biases)
    with pytest.raises(ValueError, match="d_weights in out"):
        nf.mlp_bwd(grad, x, weights, biases, out=(None, (None,), None))
    read_only = np.empty((5, 2))
    read_only.flags.writeable = False
    nf.mlp(x, weights, biases, out=np.empty((5, 2)))
    with pytest.raises(ValueError, match=r"read-only|writeable"):
        nf.mlp(x, weights, biases, out=read_only)


def test_constants_may_be_changed_by_their_owner():
    """A call has the directions and weights that it was given, not what became of the first."""
    x, weights, biases, _ = drawn((3, 5, 4), 7, "float64")
    for name, first in (("second", np.ones((1, 3))), ("directions", np.eye(3)[:2].copy())):
        again = first.copy()
        found = [nf.mlp_jet(x, weights, biases, **{name: first}) for _ in range(3)]
        grads = [np.ones_like(y) for y in found[0]]
        pulled = [nf.mlp_jet_bwd(*grads, x, weights, biases, **{name: first}) for _ in range(3)]
        first[0, 0] = 5.0
        same(nf.mlp_jet(x, weights, biases, **{name: again}), found[0])
        same(nf.mlp_jet_bwd(*grads, x, weights, biases, **{name: again}), pulled[0])
        exact = nf.mlp_jet(x, weights, biases, **{name: first}, backend="reference")
        for y, z in zip(nf.mlp_jet(x, weights, biases, **{name: first}), exact, strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-12, atol=1e-12)


def test_a_redefined_activation_is_another_one():
    x, weights, biases, _ = drawn((3, 8, 2), 5, np.float64)
    for factor in (2.0, 3.0, 2.0):

        def scaled(y: Expr, factor=factor) -> Expr:
            return y * factor

        nf.activation(scaled, name="scaled_again")
        expected = (x @ weights[0] + biases[0]) * factor @ weights[1] + biases[1]
        for _ in range(2):
            np.testing.assert_allclose(nf.mlp(x, weights, biases, "scaled_again"), expected)
            np.testing.assert_allclose(nf.mlp(x, weights, biases, ["scaled_again"]), expected)


# --- packed weights -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("sizes", [(3, 16, 16, 2), (2, 17, 40, 33, 1), (4, 300, 3)])
def test_packed_weights_give_the_bits_of_their_arrays(sizes, dtype):
    x, weights, biases, grad = drawn(sizes, 21, dtype)
    packed = nf.pack([LAYOUTS["F"](w) for w in weights])
    for one, two in zip(
        calls(x, packed, biases, grad).values(),
        calls(x, weights, biases, grad).values(),
        strict=True,
    ):
        for _ in range(2):
            same(one(), two())
    u = np.ones_like(x)
    same(
        nf.mlp_double_bwd(u, None, None, grad, x, packed, biases),
        nf.mlp_double_bwd(u, None, None, grad, x, weights, biases),
    )
    same(
        nf.mlp_jvp(x, packed, biases, u, None, None), nf.mlp_jvp(x, weights, biases, u, None, None)
    )
    same(
        nf.mlp(x, packed, biases, backend="reference"),
        nf.mlp(x, weights, biases, backend="reference"),
    )


def test_packed_weights_are_a_sequence_that_stays_as_it_is():
    x, weights, biases, _ = drawn((3, 17, 2), 4, np.float64)
    before = [w.copy() for w in weights]
    packed = nf.pack(weights)
    expected = nf.mlp(x, weights, biases)
    for w in weights:
        w[...] = np.nan
    for found in (packed, nf.pack(packed), pickle.loads(pickle.dumps(packed))):
        assert len(found) == 2 and found[0].shape == (3, 17)
        assert [(y == z).all() for y, z in zip(found, before, strict=True)] == [True, True]
        same(nf.mlp(x, found, biases), expected)
        with pytest.raises(ValueError, match="read-only"):
            found[0][...] = 0
    assert repr(packed) == "<packed weights: 3x17 17x2, float64>"


def test_packed_weights_of_a_batch_of_networks():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((4, 3, 9)), rng.standard_normal((4, 9, 2))]
    x, grad = rng.standard_normal((4, 7, 3)), rng.standard_normal((4, 7, 2))
    packed = nf.pack(weights)
    for _ in range(2):
        same(nf.mlp(x, packed, None), nf.mlp(x, weights, None))
        found = nf.mlp_bwd(grad, x, packed, None, needs=EVERY)
        same(found, nf.mlp_bwd(grad, x, weights, None, needs=EVERY))


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        (np.ones((2, 2)), TypeError, "sequence of arrays, got ndarray"),
        ([], TypeError, "sequence of arrays, got an empty list"),
        ([np.ones((2, 3)), np.ones((2, 3))], ValueError, r"weights\[1\] .* \(..., 3, N\), got"),
        ([np.ones(3)], ValueError, r"weights\[0\] .* \(..., K, N\), got \(3,\)"),
        ([np.ones((2, 2)), np.ones((2, 2), "f4")], TypeError, "float32"),
        ([np.ones((2, 2), int)], TypeError, "int64"),
        ([[[1.0]]], TypeError, r"weights\[0\] must be a NumPy array, got list"),
    ],
)
def test_what_cannot_be_packed_is_refused(weights, kind, message):
    with pytest.raises(kind, match=message):
        nf.pack(weights)


# --- forms --------------------------------------------------------------------------------------
class Own(np.ndarray):
    pass


def arrays():
    """Arrays and Nones, some of which are alike."""
    base = np.arange(48.0).reshape(6, 8)
    made = [None, base, base.copy(), base.T, base[::2], base[:, ::2], base[:, 1:], base[::-1]]
    made += [base.astype("f4"), base[None], base.astype(">f8"), base[:0], base[0, 0:1], base[0, 0:]]
    shut = base.copy()
    shut.flags.writeable = False
    return [*made, shut, np.broadcast_to(base[0], (6, 8)), np.float64(3) * np.ones(())]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_forms_are_alike_where_what_numpy_tells_is(data):
    """Guards: no call is taken for another, whatever its arrays are."""
    known = arrays()
    pick = st.lists(st.sampled_from(range(len(known))), max_size=4)
    one, two = (tuple(known[i] for i in data.draw(pick)) for _ in range(2))
    forms = [fingerprint.form_of(x) for x in (one, two)]
    asked = [fingerprint._asked(x) for x in (one, two)]
    assert (forms[0] == forms[1]) == (asked[0] == asked[1])
    assert hash(forms[0]) == hash(fingerprint.form_of(one))


def test_what_is_no_plain_array_has_no_form():
    """Guards: what an adapter or a check has to see goes the long way."""
    base = np.zeros(9)
    unaligned = np.zeros(17, np.uint8)[1:].view(np.float64)
    for x in (base.view(Own), 3.0, [base], np.float64(1), unaligned, np.ma.masked_array(base)):
        assert fingerprint.form_of((base, x)) is None
        assert fingerprint._asked((base, x)) is None


def test_this_interpreter_can_be_read():
    """Guards: a call that comes again costs a look-up and a launch."""
    assert fingerprint.LEGIBLE


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_arrays_lie_apart_where_numpy_says_so(data):
    """Guards: an output that overlaps an operand is refused, every time."""
    memory = np.zeros(40, np.float32)

    def one():
        start, size = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 9))
        step = data.draw(st.sampled_from((1, 2, -1)))
        x = memory[start : start + size][::step]
        return data.draw(st.sampled_from((x, x.copy(), None)))

    operands = tuple(one() for _ in range(data.draw(st.integers(0, 3))))
    outs = tuple(one() for _ in range(data.draw(st.integers(1, 3))))
    seen, wanted = [x for x in operands if x is not None], True
    for x in outs:
        if x is not None:
            wanted = wanted and not any(np.may_share_memory(x, y) for y in seen)
            seen.append(x)
    assert fingerprint.lie_apart(operands, outs) == apart(outs, operands) == wanted


def test_outputs_of_several_dtypes_are_looked_at_one_by_one():
    """Guards: what is not known to be apart is checked."""
    x = np.zeros(3)
    outs = x, np.zeros(3, np.float32)
    assert not fingerprint.lie_apart((), outs)
    assert apart(outs, ()) and not apart(outs, (x[1:],))
