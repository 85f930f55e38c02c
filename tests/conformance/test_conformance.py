"""What every backend has to fulfil: one suite, run on each of them through the public functions."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import tolerance
import weekly
from arrays import LAYOUTS, Fenced, bits, in_layout, normal, unwritten
from conftest import ARRAYS, SIMULATED, compiles_slowly, device_of, served, traits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from on_device import OnDevice, poisoned
from oracle import ACTIVATIONS
from tolerance import DTYPES, assert_within

import numfuse as nf
from numfuse.backends import latest

# 0, 1, primes, and one less, as many and one more than every tile that a backend may choose:
# 4, 12, 14, 16, 32, 56, 64. 512 +- 1, where a long sum may be cut, is for K alone.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 14, 15, 16, 17, 29, 31, 32, 33, 55, 56, 57, 63, 64, 65)
DEPTHS = (*SIZES, 127, 257, 511, 512, 513)
if SIMULATED:  # tiles of 16 x 16 x 8
    SIZES, DEPTHS = (0, 1, 2, 7, 16, 17), (0, 1, 8, 9, 17)
BATCHES = ((), (1,), (3,), (2, 3), (0,))

activations = st.sampled_from(ACTIVATIONS)
layouts = st.sampled_from(LAYOUTS)
sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(params=ARRAYS)
def arrays(request):
    """The kind of array that the calls of a test are given, in turn."""
    return request.param


@pytest.fixture(autouse=True)
def on_its_own_backend(request, arrays, monkeypatch):
    """What a test calls runs on its own backend, and on the device that was asked for.

    With arrays of the kind asked for; and memory that a device gives holds NaN.
    """
    backend = request.getfixturevalue("backend")
    device = device_of(backend)
    if arrays != "host":
        monkeypatch.setattr(
            request.module, "nf", OnDevice(backend, arrays, request.node.originalname)
        )
    poisoned(monkeypatch, backend)
    latest.call = None
    yield
    call = nf.last_call()
    if call is not None or "unrecorded" not in request.fixturenames:
        assert call is not None and (call.backend, call.device) == (backend, device)


@pytest.fixture
def unrecorded():
    """For a test whose calls are in another process, are refused, or have nothing to compute."""


def dtypes(backend):
    return st.sampled_from(served(backend))


@st.composite
def gemms(draw, backend):
    """Operands (a, b, bias) of two axes or more, in any layout, and the shape of their result."""
    dtype = DTYPES[draw(dtypes(backend))]
    m, n, k = draw(sizes), draw(sizes), draw(st.sampled_from(DEPTHS))
    rng = np.random.default_rng(draw(seeds))
    batch = draw(st.sampled_from(BATCHES))
    if int(np.prod(batch)) > 1:
        m, n = min(m, 33), min(n, 33)

    def part(kind):
        """Of the batch: all of it, none, or with its first axis of length 1."""
        return {"all": batch, "none": (), "some": (1, *batch[1:]) if batch else ()}[kind]

    kinds = st.sampled_from(("all", "none", "some"))
    a_batch, b_batch = part(draw(kinds)), part(draw(kinds))
    bias_batch = draw(st.sampled_from((None, "vector", "all", "none", "some")))
    a = in_layout(normal(rng, (*a_batch, m, k), dtype, max(1, k) ** -0.5), draw(layouts))
    b = in_layout(normal(rng, (*b_batch, k, n), dtype), draw(layouts))
    if bias_batch is None:
        bias = None
    elif bias_batch == "vector":
        bias = in_layout(normal(rng, (n,), dtype), draw(layouts))
    else:
        bias = in_layout(normal(rng, (*part(bias_batch), 1, n), dtype), draw(layouts))
    shape = np.broadcast_shapes(
        a.shape[:-2], b.shape[:-2], () if bias is None or bias.ndim == 1 else bias.shape[:-2]
    )
    return a, b, bias, (*shape, m, n), rng


def usual_share(backend):
    """One of so many examples: the whole suite has to fit a quarter of an hour."""
    return 10 if SIMULATED else 6


def compiling_share(backend):
    """Fewer examples where nearly each one has kernels of its own, seconds each on a processor."""
    if compiles_slowly(backend):
        return 20
    return 15 if traits(backend).memory == "host" and not weekly.ALL else usual_share(backend)


def sampled(examples, /, share=usual_share, **strategies):
    """Run a test on so many examples; a strategy may be a function of the backend's name."""

    def decorate(test):
        def run(backend):
            drawn = {
                name: strategy(backend) if callable(strategy) else strategy
                for name, strategy in strategies.items()
            }
            how = settings(
                max_examples=max(1, examples // share(backend)),
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            )
            how(given(**drawn)(test))(backend=backend)

        functools.update_wrapper(run, test)
        del run.__wrapped__  # pytest would take the drawn arguments for fixtures
        return run

    return decorate


def rounds_grad_pre(backend, dtype):
    """Whether a backend's products for d_a and d_b take grad_pre in the storage dtype."""
    return dtype.name in traits(backend).grad_pre


def tier(backend):
    """Return what decides, beside dtype and shape, on the order of the latest call's sums."""
    return nf.last_call().tier if "tier" in traits(backend).order else None


def check_backward(backend, grad, a, b, bias, activation, result, **how):
    how["rounded_grad_pre"] = activation != "none" and rounds_grad_pre(backend, a.dtype)
    wanted = tolerance.backward(grad, a, b, bias, activation, a.dtype, backend=backend, **how)
    for name in ("d_a", "d_b", "d_bias"):
        value = getattr(result, name)
        if bias is None and name == "d_bias":
            assert value is None
            continue
        assert value.dtype == a.dtype
        assert value.flags.c_contiguous
        assert_within(name, value, getattr(wanted, name), getattr(wanted, f"{name}_error"))


# --- values -------------------------------------------------------------------------------------


@sampled(120, case=gemms, activation=activations)
def test_forward_is_exact_within_the_bound(backend, case, activation):
    a, b, bias, shape, _ = case
    with unwritten(a, b, bias):
        out, pre = nf.matmul_bias_activation(
            a, b, bias, activation, return_pre_activation=True, backend=backend
        )
    assert out.shape == pre.shape == shape
    assert out.dtype == a.dtype
    assert pre.dtype == tolerance.accumulator(a.dtype)
    assert out.flags.c_contiguous and pre.flags.c_contiguous
    wanted = tolerance.forward(a, b, bias, activation, a.dtype, backend=backend)
    assert_within("pre", pre, wanted.pre, wanted.pre_error)
    assert_within("out", out, wanted.out, wanted.out_error)
    alone = nf.matmul_bias_activation(a, b, bias, activation, backend=backend)
    assert (bits(alone) == bits(out)).all()


@sampled(100, case=gemms, activation=activations, layout=layouts)
def test_backward_is_exact_within_the_bound(backend, case, activation, layout):
    a, b, bias, shape, rng = case
    grad = in_layout(normal(rng, shape, a.dtype), layout)
    with unwritten(grad, a, b, bias):
        result = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
    check_backward(backend, grad, a, b, bias, activation, result)


@sampled(60, case=gemms, layout=layouts, data=st.data())
def test_residual_is_exact_within_the_bound_both_ways(backend, case, layout, data):
    a, b, bias, shape, rng = case
    own = [length if data.draw(st.booleans()) else 1 for length in shape]
    residual = normal(rng, tuple(own[data.draw(st.integers(0, len(own))) :]), a.dtype)
    if residual.ndim:
        residual = in_layout(residual, layout)
    with unwritten(a, b, bias, residual):
        out = nf.matmul_bias_residual(a, b, bias, residual, backend=backend)
    wanted = tolerance.forward(a, b, bias, "none", a.dtype, residual, backend=backend)
    assert out.dtype == a.dtype
    assert_within("out", out, wanted.out, wanted.out_error)

    grad = normal(rng, shape, a.dtype)
    result = nf.matmul_bias_residual_bwd(grad, a, b, bias, residual, backend=backend)
    check_backward(backend, grad, a, b, bias, "none", result)
    wanted = tolerance.residual_gradient(grad, residual.shape, a.dtype, backend)
    assert_within("d_residual", result.d_residual, *wanted)
    assert not np.may_share_memory(result.d_residual, grad)


@pytest.mark.dtype("float32")
@pytest.mark.parametrize("layout", ["c", "inner_sliced"])
@pytest.mark.parametrize(
    "shape, own", [((1, 8), (8,)), ((1, 2, 8), (2, 8)), ((1, 5, 1), (5, 1)), ((1, 1, 8), (8,))],
    ids=str,
)  # fmt: skip
def test_a_residual_that_lacks_axes_of_length_one_has_its_gradient(backend, shape, own, layout):
    """Nothing is summed, yet the residual has fewer axes than the result."""
    grad = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    given = np.ones((*shape[:-1], 3), np.float32), np.ones((3, shape[-1]), np.float32)
    got = nf.matmul_bias_residual_bwd(
        in_layout(grad, layout), *given, None, np.ones(own, np.float32), backend=backend
    )
    assert (got.d_residual == grad.reshape(own)).all()


@st.composite
def broadcasts(draw):
    """Shapes of `a`, `b`, which may be 1-D, and their product, and one that broadcasts to that."""
    lengths = st.sampled_from((0, 1, 1, 2, 3, 5))
    batch = draw(st.sampled_from(((), (1,), (2,), (1, 1), (2, 1), (1, 3), (0,))))
    m, n, k = draw(lengths), draw(lengths), 2
    a, b = draw(
        st.sampled_from(
            (((*batch, m, k), (k, n)), ((*batch, m, k), (k,)), ((k,), (*batch, k, n)), ((k,), (k,)))
        )
    )
    shape = np.matmul(np.zeros(a), np.zeros(b)).shape
    ones = next((i for i, length in enumerate(shape) if length != 1), len(shape))
    own = [length if draw(st.booleans()) else 1 for length in shape]
    return a, b, shape, draw(st.sampled_from((shape[ones:], tuple(own[ones:]), tuple(own))))


@pytest.mark.usefixtures("unrecorded")
@sampled(240, case=broadcasts(), dtype=dtypes, layout=layouts, given_out=st.booleans(), seed=seeds)
def test_a_residual_has_its_gradient_whatever_axes_it_lacks(
    backend, case, dtype, layout, given_out, seed
):
    """Alone, with no products beside it; d_residual may be written to an array of the caller's."""
    dtype, rng = DTYPES[dtype], np.random.default_rng(seed)
    a, b, grad, residual = (normal(rng, shape, dtype) for shape in case)
    grad = in_layout(grad, layout) if grad.ndim else grad
    fenced = Fenced(residual.shape, dtype, strided=True)
    out = (None, None, None, fenced.array) if given_out else None
    for _ in range(2):
        got = nf.matmul_bias_residual_bwd(
            grad, a, b, None, residual, needs=("residual",), out=out, backend=backend
        )
        assert got[:3] == (None, None, None)
        wanted = tolerance.residual_gradient(grad, residual.shape, dtype, backend)
        assert_within("d_residual", got.d_residual, *wanted)
        if given_out:
            assert got.d_residual is fenced.array
            fenced.assert_untouched()


@sampled(
    100,
    shape=st.one_of(
        st.tuples(sizes),
        st.tuples(sizes, sizes),
        st.tuples(st.integers(0, 3), sizes, st.sampled_from((1, 5, 17))),
        st.just(()),
    ),
    dtype=dtypes,
    activation=activations,
    orders=st.tuples(layouts, layouts, layouts),
    seed=seeds,
)
def test_gated_is_exact_within_the_bound_both_ways(backend, shape, dtype, activation, orders, seed):
    dtype, rng = DTYPES[dtype], np.random.default_rng(seed)
    a, b, grad = (normal(rng, shape, dtype, 3) for _ in range(3))
    if shape:
        a, b, grad = (in_layout(x, o) for x, o in zip((a, b, grad), orders, strict=True))
    with unwritten(a, b, grad):
        out = nf.activation_mul(a, b, activation, backend=backend)
        result = nf.activation_mul_bwd(grad, a, b, activation, backend=backend)

    wide_a, wide_b, wide_grad = oracle.wide(a), oracle.wide(b), oracle.wide(grad)
    zero = np.zeros_like(wide_a)
    u = tolerance.roundoff(tolerance.accumulator(dtype))
    value, slope = oracle.VALUE[activation], oracle.SLOPE[activation]
    value_error = tolerance.evaluated(value, wide_a, zero, dtype, backend)
    slope_error = tolerance.evaluated(slope, wide_a, zero, dtype, backend)
    for name, got, exact, error in (
        ("out", out, value(wide_a) * wide_b, value_error * np.abs(wide_b)),
        (
            "d_a",
            result.d_a,
            wide_grad * wide_b * slope(wide_a),
            slope_error * np.abs(wide_grad * wide_b),
        ),
        ("d_b", result.d_b, wide_grad * value(wide_a), value_error * np.abs(wide_grad)),
    ):
        assert got.dtype == dtype
        assert got.flags.c_contiguous
        error = error + 2 * u * np.abs(exact)  # two products
        assert_within(name, got, exact, tolerance.stored(exact, error, dtype, backend))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_in_every_dtype(backend, activation, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(5)
    a, b = normal(rng, (33, 29), dtype, 29**-0.5), normal(rng, (29, 17), dtype)
    bias, grad = normal(rng, (17,), dtype), normal(rng, (33, 17), dtype)
    out = nf.matmul_bias_activation(a, b, bias, activation, backend=backend)
    wanted = tolerance.forward(a, b, bias, activation, dtype, backend=backend)
    assert_within("out", out, wanted.out, wanted.out_error)
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
    check_backward(backend, grad, a, b, bias, activation, result)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tails_are_accurate_relatively(backend, activation, dtype):
    dtype = DTYPES[dtype]
    x = np.concatenate(
        [np.linspace(-45, 45, 91 if SIMULATED else 901), [-700, -88, -1e-3, -1e-20, 1e-20, 88, 700]]
    )
    a, b = x.astype(dtype)[:, None], np.ones((1, 1), dtype)  # the pre-activation is exactly x
    out = nf.matmul_bias_activation(a, b, None, activation, backend=backend)
    wanted = tolerance.forward(a, b, None, activation, dtype, backend=backend)
    assert_within("out", out, wanted.out, wanted.out_error)
    d_a = nf.matmul_bias_activation_bwd(
        np.ones_like(a), a, b, None, activation, needs=("a",), backend=backend
    ).d_a
    exact = tolerance.backward(np.ones_like(a), a, b, None, activation, dtype, backend=backend)
    assert_within("d_a", d_a, exact.d_a, exact.d_a_error)


@pytest.mark.parametrize(
    "m,n,k", [(1, 1, 4001), (3001, 1, 2), (1, 3001, 2), (2, 2, 0), (300, 301, 1)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_thin_deep_and_shallow(backend, m, n, k, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(m + n + k)
    a, b = normal(rng, (m, k), dtype, max(k, 1) ** -0.5), normal(rng, (k, n), dtype)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (m, n), dtype)
    out = nf.matmul_bias_activation(a, b, bias, "silu", backend=backend)
    wanted = tolerance.forward(a, b, bias, "silu", dtype, backend=backend)
    assert_within("out", out, wanted.out, wanted.out_error)
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend=backend)
    check_backward(backend, grad, a, b, bias, "silu", result)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_is_the_derivative_of_forward(backend, activation):
    rng = np.random.default_rng(11)
    a, b, bias = rng.standard_normal((5, 3)), rng.standard_normal((3, 4)), rng.standard_normal(4)
    grad = rng.standard_normal((5, 4))
    directions = [rng.standard_normal(x.shape) for x in (a, b, bias)]

    def loss(step):
        moved = [x + step * d for x, d in zip((a, b, bias), directions, strict=True)]
        out = nf.matmul_bias_activation(*moved, activation, backend=backend)
        return np.sum(grad * out)

    # Richardson's extrapolation of central differences: O(h^4), against a roundoff of eps / h.
    h = 1e-3
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
    expected = sum(np.sum(g * d) for g, d in zip(result, directions, strict=True))
    assert slope == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_backward_is_the_derivative_of_gated_forward(backend, activation):
    rng = np.random.default_rng(12)
    a, b, grad = rng.standard_normal((3, 40))
    h = 1e-3
    result = nf.activation_mul_bwd(grad, a, b, activation, backend=backend)

    def slope(u, v):
        def at(step):
            return nf.activation_mul(a + step * u, b + step * v, activation, backend=backend)

        return grad * (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)

    np.testing.assert_allclose(result.d_a, slope(1, 0), rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(result.d_b, slope(0, 1), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["silu", "gelu", "relu", "sigmoid"])
def test_named_gates_are_activation_mul(backend, name):
    rng = np.random.default_rng(13)
    a, b, grad = rng.standard_normal((3, 7, 5)).astype(np.float32)
    got = getattr(nf, f"{name}_mul")(a, b, backend=backend)
    assert (bits(got) == bits(nf.activation_mul(a, b, name, backend=backend))).all()
    got = getattr(nf, f"{name}_mul_bwd")(grad, a, b, backend=backend)
    wanted = nf.activation_mul_bwd(grad, a, b, name, backend=backend)
    assert all((bits(x) == bits(y)).all() for x, y in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["none", "gelu", "tanh"])
def test_half_types_are_accumulated_in_float32_and_rounded_once(backend, activation, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(14)
    m, n, k = 19, 23, 513
    a, b = normal(rng, (m, k), dtype, k**-0.5), normal(rng, (k, n), dtype)
    bias = normal(rng, (n,), dtype)
    out = nf.matmul_bias_activation(a, b, bias, activation, backend=backend)
    # Rounding is monotonic: the float32 result lies in an interval, so its rounding does too. And
    # float32's own error seldom moves the result across the middle of two half numbers, whereas
    # one rounding more, of the sum or of a partial sum, moves it half of the time.
    single = np.dtype(np.float32)
    wanted = tolerance.forward(
        *(x.astype(single) for x in (a, b, bias)), activation, single, backend=backend
    )
    low = (wanted.out - wanted.out_error).astype(dtype)
    high = (wanted.out + wanted.out_error).astype(dtype)
    assert ((low <= out) & (out <= high)).all()
    assert (out == wanted.out.astype(dtype)).mean() > 0.98


@pytest.mark.host
def test_a_dtype_that_is_not_served_is_a_type_error(backend, unrecorded):
    known = ", ".join(sorted(served(backend)))
    for name in set(DTYPES) - set(served(backend)):
        x = np.ones((2, 2), DTYPES[name])
        for kind, call in (
            ("forward", lambda x: nf.matmul_bias_activation(x, x, backend=backend)),
            ("forward", lambda x: nf.matmul_bias_residual(x, x, None, x, backend=backend)),
            ("backward", lambda x: nf.matmul_bias_activation_bwd(x, x, x, backend=backend)),
            ("gated", lambda x: nf.silu_mul(x, x, backend=backend)),
            ("gated_backward", lambda x: nf.silu_mul_bwd(x, x, x, backend=backend)),
            ("an array", lambda x: nf.to_device(x, backend)),
        ):
            with pytest.raises(TypeError) as caught:
                call(x)
            wanted = f"{kind} on {device_of(backend)} must have dtype {known}, got {name}"
            assert str(caught.value) == wanted
    if traits(backend).memory == "host":
        assert served(backend) == tuple(DTYPES)
    assert "float32" in served(backend)


# --- bit for bit --------------------------------------------------------------------------------


@sampled(60, case=gemms, activation=activations, data=st.data())
def test_a_view_gives_what_its_copy_gives(backend, case, activation, data):
    a, b, bias, shape, rng = case
    copies = [None if x is None else np.array(x, order="C") for x in (a, b, bias)]
    views = [
        None if x is None else in_layout(x, data.draw(layouts.filter(lambda o: o != "zero_stride")))
        for x in copies
    ]
    grad = normal(rng, shape, a.dtype)
    turned = in_layout(grad, "transposed")

    for one, two in (((a, b, bias), copies), (views, copies)):
        x = nf.matmul_bias_activation(*one, activation, backend=backend)
        first = tier(backend)
        y = nf.matmul_bias_activation(*two, activation, backend=backend)
        assert first != tier(backend) or (bits(x) == bits(y)).all()
        x = nf.matmul_bias_activation_bwd(turned, *one, activation, backend=backend)
        first = tier(backend)
        y = nf.matmul_bias_activation_bwd(grad, *two, activation, backend=backend)
        if first == tier(backend):
            for left, right in zip(x, y, strict=True):
                assert left is right is None or (bits(left) == bits(right)).all()
        check_backward(backend, turned, *one, activation, x)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize(
    "batch, m", [((3,), 17), ((2, 3), 7), ((4,), 1), ((2, 1, 2), 7 if SIMULATED else 260)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_views_over_one_b_is_summed_as_its_copy(backend, dtype, batch, m, activation):
    """Sums over the rows of a batch, d_b and d_bias, whether or not its axes merge to one."""
    dtype, rng = DTYPES[dtype], np.random.default_rng(19)
    k, n = 13, 9
    a, b = normal(rng, (*batch, m, k), dtype), normal(rng, (k, n), dtype, 0.3)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (*batch, m, n), dtype)
    _, pre = nf.matmul_bias_activation(
        a, b, bias, activation, return_pre_activation=True, backend=backend
    )
    every = (grad, a, pre)
    by_axes = "axes" in traits(backend).order
    for saved in (None, pre, pre.astype(dtype)):
        given = (grad, a, b, bias, activation)
        wanted = nf.matmul_bias_activation_bwd(*given, pre_activation=saved, backend=backend)
        first = tier(backend)
        few = SIMULATED and not weekly.ALL
        for layout in ("sliced",) if few else ("sliced", "transposed", "reversed"):
            views = [None if x is None else in_layout(x, layout) for x in (grad, a, saved)]
            outs = [Fenced(x.shape, dtype, strided=True) for x in wanted]
            room = np.full((*batch, m + 1, k), np.nan, dtype)
            for chosen in ((0,), (1,), (2,), (0, 1, 2)):
                g, x, y = (views[i] if i in chosen else every[i] for i in range(3))
                y = None if saved is None else saved if 2 not in chosen else y
                out = None
                if chosen == (1,):
                    out = (room[..., :m, :], outs[1].array, outs[2].array)
                got = nf.matmul_bias_activation_bwd(
                    g, x, b, bias, activation, pre_activation=y, out=out, backend=backend
                )
                if first != tier(backend):
                    continue
                for name, one, two in zip(wanted._fields, got, wanted, strict=True):
                    if by_axes and name != "d_a":
                        continue  # it is summed over the members
                    assert (bits(one) == bits(two)).all(), (name, layout, chosen)
            assert np.isnan(room[..., m:, :]).all()
            for out in outs[1:]:
                out.assert_untouched()
        for name in ("b", "bias"):
            part = nf.matmul_bias_activation_bwd(
                views[0], views[1], b, bias, activation, pre_activation=saved, needs=(name,),
                backend=backend,
            )  # fmt: skip
            one, two = (getattr(x, f"d_{name}") for x in (part, wanted))
            assert by_axes or (bits(one) == bits(two)).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["b", "a", "neither"])
@pytest.mark.parametrize("per_member", [False, True])
def test_a_batch_gives_what_a_loop_gives(backend, shared, per_member, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(15)
    count, m, k, n = (2, 17, 9, 3) if SIMULATED else (3, 17, 37, 21)
    a = normal(rng, (m, k) if shared == "a" else (count, m, k), dtype, k**-0.5)
    b = normal(rng, (k, n) if shared == "b" else (count, k, n), dtype)
    bias = normal(rng, (count, 1, n) if per_member else (n,), dtype)
    grad = normal(rng, (count, m, n), dtype)
    out = nf.matmul_bias_activation(a, b, bias, "gelu", backend=backend)
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend=backend)
    for i in range(count):
        mine = (
            a if shared == "a" else a[i],
            b if shared == "b" else b[i],
            bias[i] if per_member else bias,
        )
        member = nf.matmul_bias_activation(*mine, "gelu", backend=backend)
        assert (bits(out[i]) == bits(member)).all()
        member = nf.matmul_bias_activation_bwd(grad[i], *mine, "gelu", backend=backend)
        if shared != "a":
            assert (bits(result.d_a[i]) == bits(member.d_a)).all()
        if shared != "b":
            assert (bits(result.d_b[i]) == bits(member.d_b)).all()
        if per_member:
            assert (bits(result.d_bias[i]) == bits(member.d_bias)).all()
    check_backward(backend, grad, a, b, bias, "gelu", result)


@sampled(40, case=gemms, activation=activations, data=st.data())
def test_a_part_of_the_gradients_is_the_same_as_in_all_of_them(backend, case, activation, data):
    a, b, bias, shape, rng = case
    grad = normal(rng, shape, a.dtype)
    needs = tuple(name for name in ("a", "b", "bias") if data.draw(st.booleans()))
    full = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
    part = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, needs=needs, backend=backend)
    for name, left, right in zip(("a", "b", "bias"), full, part, strict=True):
        if name not in needs or left is None:
            assert right is None
        else:
            assert (bits(left) == bits(right)).all()


@pytest.mark.parametrize("needs", [("a",), ("b",), ()])
def test_a_part_of_the_gated_gradients_is_the_same_as_in_all_of_them(backend, needs):
    a, b, grad = np.random.default_rng(16).standard_normal((3, 50)).astype(np.float32)
    full = nf.silu_mul_bwd(grad, a, b, backend=backend)
    part = nf.silu_mul_bwd(grad, a, b, needs=needs, backend=backend)
    for name, left, right in zip(("a", "b"), full, part, strict=True):
        assert (bits(left) == bits(right)).all() if name in needs else right is None


@sampled(60, case=gemms, activation=activations, half=st.booleans(), layout=layouts)
def test_a_saved_pre_activation_gives_what_computing_it_again_gives(
    backend, case, activation, half, layout
):
    a, b, bias, shape, rng = case
    grad = normal(rng, shape, a.dtype)
    _, pre = nf.matmul_bias_activation(
        a, b, bias, activation, return_pre_activation=True, backend=backend
    )
    if half:
        pre = pre.astype(a.dtype)  # the operands' dtype is accepted too
    pre = in_layout(pre, layout)
    saved = nf.matmul_bias_activation_bwd(
        grad, a, b, bias, activation, pre_activation=pre, backend=backend
    )
    check_backward(backend, grad, a, b, bias, activation, saved, pre=pre)
    held = np.dtype(traits(backend).intermediate or tolerance.accumulator(a.dtype))
    if layout != "zero_stride" and pre.dtype == held:
        again = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
        for name, left, right in zip(saved._fields, saved, again, strict=True):
            if "saved" in traits(backend).order and name == "d_bias":
                continue
            assert left is right is None or (bits(left) == bits(right)).all()


@sampled(60, case=gemms, activation=activations)
def test_sum_batch_is_the_sum_of_the_members(backend, case, activation):
    a, b, bias, shape, rng = case
    grad = normal(rng, shape, a.dtype)
    result = nf.matmul_bias_activation_bwd(
        grad, a, b, bias, activation, sum_batch=True, backend=backend
    )
    assert result.d_b.shape == b.shape[-2:]
    check_backward(backend, grad, a, b, bias, activation, result, d_b_shape=b.shape[-2:])


# --- shapes -------------------------------------------------------------------------------------


@pytest.mark.dtype("float64")
@pytest.mark.parametrize(
    "a_shape,b_shape",
    [
        ((5,), (5, 4)),
        ((3, 5), (5,)),
        ((5,), (5,)),
        ((5,), (2, 5, 4)),
        ((2, 3, 5), (5,)),
        ((0,), (0,)),
    ],
)
def test_one_dimensional_operands_are_treated_as_by_matmul(backend, a_shape, b_shape):
    rng = np.random.default_rng(17)
    a, b = rng.standard_normal(a_shape), rng.standard_normal(b_shape)
    n = b_shape[-1] if len(b_shape) > 1 else 1
    bias = rng.standard_normal(n)
    added = bias if len(b_shape) > 1 else bias[0]
    wanted = np.tanh(np.matmul(a, b) + added)
    out, pre = nf.matmul_bias_activation(
        a, b, bias, "tanh", return_pre_activation=True, backend=backend
    )
    assert isinstance(out, np.ndarray) and isinstance(pre, np.ndarray)
    np.testing.assert_allclose(out, wanted, rtol=1e-13, atol=1e-15)
    residual = rng.standard_normal(wanted.shape)
    out = nf.matmul_bias_residual(a, b, bias, np.asarray(residual), backend=backend)
    np.testing.assert_allclose(out, np.matmul(a, b) + added + residual, rtol=1e-13, atol=1e-15)

    grad = np.asarray(rng.standard_normal(wanted.shape))
    result = nf.matmul_bias_residual_bwd(grad, a, b, bias, np.asarray(residual), backend=backend)
    full = grad.reshape(
        *wanted.shape[: wanted.ndim - (len(a_shape) > 1) - (len(b_shape) > 1)],
        a_shape[-2] if len(a_shape) > 1 else 1,
        n,
    )
    full_a = a if a.ndim > 1 else a[None]
    full_b = b if b.ndim > 1 else b[:, None]
    d_a = oracle.sum_to(full @ full_b.swapaxes(-1, -2), full_a.shape)
    d_b = oracle.sum_to(full_a.swapaxes(-1, -2) @ full, full_b.shape)
    np.testing.assert_allclose(result.d_a, d_a.reshape(a_shape), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(result.d_b, d_b.reshape(b_shape), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(
        result.d_bias, full.reshape(-1, n).sum(axis=0), rtol=1e-13, atol=1e-14
    )
    assert (result.d_residual == grad).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (0, 4, 0), (3, 0, 0)], ids=str
)
def test_axes_may_have_length_zero(backend, shape, dtype, unrecorded):
    (m, n, k), dtype = shape, DTYPES[dtype]
    a, b, bias = np.ones((m, k), dtype), np.ones((k, n), dtype), np.full(n, 2, dtype)
    out = nf.matmul_bias_activation(a, b, bias, "relu", backend=backend)
    assert out.shape == (m, n)
    assert (out == dtype.type(k + 2)).all()  # K = 0 leaves act(bias)
    result = nf.matmul_bias_activation_bwd(
        np.ones((m, n), dtype), a, b, bias, "relu", backend=backend
    )
    assert (result.d_a == dtype.type(n)).all() and result.d_a.shape == a.shape
    assert (result.d_b == dtype.type(m)).all() and result.d_b.shape == b.shape
    assert (result.d_bias == dtype.type(m)).all() and result.d_bias.shape == bias.shape


@pytest.mark.dtype("float32")
def test_the_guard_leaves_the_value_of_a_derived_activation(backend):
    """act' is a derivative where it is one, and a value where it is the gate's own function."""
    a, one = np.array([np.nan, 1.0], np.float32), np.ones(2, np.float32)
    slope = nf.activations()["tanh"].derived(1)
    d_a, d_b = nf.activation_mul_bwd(one, a, one, slope, backend=backend)
    assert d_a[0] == 0 and d_a[1] != 0
    assert np.isnan(d_b[0]) and np.isfinite(d_b[1])
    _, out_dot = nf.activation_mul_jvp(a, one, None, one, slope, backend=backend)
    assert np.isnan(out_dot[0]) and np.isfinite(out_dot[1])


@pytest.mark.dtype("float64")
def test_a_batch_of_length_zero_sums_to_zero(backend):
    a, b, bias = np.ones((0, 3, 4)), np.ones((4, 5)), np.ones(5)
    assert nf.matmul_bias_activation(a, b, bias, backend=backend).shape == (0, 3, 5)
    result = nf.matmul_bias_activation_bwd(np.ones((0, 3, 5)), a, b, bias, backend=backend)
    assert result.d_a.shape == a.shape
    assert (result.d_b == 0).all() and (result.d_bias == 0).all()
    a, b = np.ones((1, 3, 4)), np.ones((0, 4, 5))
    result = nf.matmul_bias_activation_bwd(
        np.ones((0, 3, 5)), a, b, sum_batch=True, backend=backend
    )
    assert (result.d_a == 0).all() and result.d_a.shape == a.shape
    assert (result.d_b == 0).all() and result.d_b.shape == (4, 5)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    "m,n,k", [(1, 1, 1), (7, 13, 5), (14, 32, 16), (15, 33, 17), (13, 31, 0), (57, 65, 29)]
)
def test_output_fence_is_untouched(backend, m, n, k, strided, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(18)
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (m, n), dtype)

    out = Fenced((m, n), dtype, strided)
    got = nf.matmul_bias_activation(a, b, bias, "gelu", out=out.array, backend=backend)
    assert got is out.array
    assert (got == nf.matmul_bias_activation(a, b, bias, "gelu", backend=backend)).all()
    out.assert_untouched()

    out = Fenced((m, n), dtype, strided)
    nf.matmul_bias_residual(a, b, bias, grad, out=out.array, backend=backend)
    out.assert_untouched()
    assert not np.isnan(out.array).any()

    outs = [Fenced(x.shape, dtype, strided) for x in (a, b, bias)]
    got = nf.matmul_bias_activation_bwd(
        grad, a, b, bias, "gelu", out=tuple(x.array for x in outs), backend=backend
    )
    wanted = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", backend=backend)
    for fenced, value, plain in zip(outs, got, wanted, strict=True):
        assert value is fenced.array
        assert (bits(value) == bits(plain)).all()
        fenced.assert_untouched()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(1,), (31,), (33,), (7, 13), (5, 3, 17)], ids=str)
def test_gated_output_fence_is_untouched(backend, shape, strided, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(19)
    a, b, grad = (normal(rng, shape, dtype) for _ in range(3))
    out = Fenced(shape, dtype, strided)
    got = nf.silu_mul(a, b, out=out.array, backend=backend)
    assert got is out.array
    assert (bits(got) == bits(nf.silu_mul(a, b, backend=backend))).all()
    out.assert_untouched()
    outs = [Fenced(shape, dtype, strided) for _ in range(2)]
    got = nf.silu_mul_bwd(grad, a, b, out=tuple(x.array for x in outs), backend=backend)
    wanted = nf.silu_mul_bwd(grad, a, b, backend=backend)
    for fenced, value, plain in zip(outs, got, wanted, strict=True):
        assert (bits(value) == bits(plain)).all()
        fenced.assert_untouched()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_the_gated_forward_may_write_over_an_operand(backend, which, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(20)
    a, b = normal(rng, (9, 31), dtype), normal(rng, (9, 31), dtype)
    if which == "both":
        b = a
    wanted = nf.silu_mul(a.copy(), b.copy(), backend=backend)
    target = b if which == "b" else a
    assert nf.silu_mul(a, b, out=target, backend=backend) is target
    assert (bits(target) == bits(wanted)).all()


@pytest.mark.dtype("float64")
def test_a_batch_in_out_is_written_in_place(backend):
    rng = np.random.default_rng(21)
    a, b, bias = rng.standard_normal((4, 5, 3)), rng.standard_normal((3, 7)), rng.standard_normal(7)
    wanted = nf.matmul_bias_activation(a, b, bias, "tanh", backend=backend)
    base = np.full((4, 9, 7), np.nan)
    out = base[:, 2:7]  # not one block: it cannot be folded
    assert nf.matmul_bias_activation(a, b, bias, "tanh", out=out, backend=backend) is out
    assert (out == wanted).all()
    assert np.isnan(base[:, :2]).all() and np.isnan(base[:, 7:]).all()


@pytest.mark.long
@pytest.mark.host
@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are set up with mprotect")
def test_no_operand_is_read_or_written_past_its_pages(backend, unrecorded):
    # In a process of its own: a stray access ends it.
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "guard_pages.py"), backend],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, f"died in the case {run.stdout[-300:]!r}: {run.stderr[-2000:]}"
    assert run.stdout.endswith("all cases passed\n")


# --- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("guard", [True, False])
def test_nan_stays_in_its_row(backend, activation, guard, dtype):
    dtype, rng = DTYPES[dtype], np.random.default_rng(22)
    m, n, k = (17, 9, 12) if SIMULATED else (19, 35, 17)
    row, column = 5, 11
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    bias, grad = normal(rng, (n,), dtype), normal(rng, (m, n), dtype)
    clean = a.copy()
    a[row, column] = np.nan
    out, pre = nf.matmul_bias_activation(
        a, b, bias, activation, return_pre_activation=True, backend=backend
    )
    rest = np.arange(m) != row
    assert np.isnan(out[row]).all() and np.isnan(pre[row]).all()
    plain = nf.matmul_bias_activation(clean, b, bias, activation, backend=backend)
    assert (bits(out[rest]) == bits(plain[rest])).all()

    result = nf.matmul_bias_activation_bwd(
        grad, a, b, bias, activation, guard=guard, backend=backend
    )
    plain = nf.matmul_bias_activation_bwd(grad, clean, b, bias, activation, backend=backend)
    assert (bits(result.d_a[rest]) == bits(plain.d_a[rest])).all()
    # The operand itself follows IEEE arithmetic: NaN times the gradient, guarded to 0 or not.
    assert np.isnan(result.d_b[column]).all()
    if activation in ("none", "relu"):  # constant slopes, also at NaN
        assert np.isfinite(np.delete(result.d_b, column, axis=0)).all()
    elif guard:
        assert (result.d_a[row] == 0).all()
        assert np.isfinite(np.delete(result.d_b, column, axis=0)).all()
        assert np.isfinite(result.d_bias).all()
    else:
        assert np.isnan(result.d_a[row]).all()
        assert np.isnan(result.d_b).all() and np.isnan(result.d_bias).all()


@pytest.mark.dtype("float64")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("guard", [True, False])
def test_nan_in_the_gradient_is_not_guarded(backend, activation, guard):
    rng = np.random.default_rng(23)
    a, b, grad = rng.standard_normal((6, 5)), rng.standard_normal((5, 7)), np.ones((6, 7))
    grad[2, 3] = np.nan
    result = nf.matmul_bias_activation_bwd(
        grad, a, b, np.ones(7), activation, guard=guard, backend=backend
    )
    assert np.isnan(result.d_a[2]).all() and np.isnan(result.d_a).sum() == 5
    assert np.isnan(result.d_b[:, 3]).all() and np.isnan(result.d_b).sum() == 5
    assert np.isnan(result.d_bias[3]) and np.isnan(result.d_bias).sum() == 1


LIMITS = {  # f(-inf), f(inf), f'(-inf), f'(inf)
    "none": (-np.inf, np.inf, 1, 1),
    "relu": (0, np.inf, 0, 1),
    "gelu": (0, np.inf, 0, 1),
    "silu": (0, np.inf, 0, 1),
    "sigmoid": (0, 1, 0, 0),
    "tanh": (-1, 1, 0, 0),
    "gelu_erf": (0, np.inf, 0, 1),
    "softplus": (0, np.inf, 0, 1),
}


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinity_gives_the_limit_without_the_guard(backend, activation, dtype):
    dtype = DTYPES[dtype]
    huge = float(np.finfo(np.float32).max) / 2 if dtype != np.float16 else 6e4
    x = np.array([-np.inf, -huge, huge, np.inf] * 9, dtype)
    one = np.ones_like(x)
    low, high, low_slope, high_slope = LIMITS[activation]
    out = nf.activation_mul(x, one, activation, backend=backend)
    slope = nf.activation_mul_bwd(one, x, one, activation, guard=False, backend=backend).d_a
    assert (out[0::4] == low).all() and (out[3::4] == high).all()
    assert (slope[0::4] == low_slope).all() and (slope[3::4] == high_slope).all()
    assert (slope[1::4] == low_slope).all() and (slope[2::4] == high_slope).all()
    assert np.isfinite(out[1::4]).all() and np.isfinite(out[2::4]).all()

    a, b = x[:, None], np.ones((1, 1), dtype)
    fused = nf.matmul_bias_activation(a, b, None, activation, backend=backend)
    assert (fused[:, 0] == out).all()
    fused = nf.matmul_bias_activation_bwd(
        np.ones_like(a), a, b, None, activation, needs=("a",), guard=False, backend=backend
    )
    assert (fused.d_a[:, 0] == slope).all()


@pytest.mark.compiles
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_guard_zeroes_the_derivative_alone(backend, activation, dtype):
    dtype = DTYPES[dtype]
    a = np.array([np.nan, 1.0] * 20, dtype)
    one = np.ones_like(a)
    assert np.isnan(nf.activation_mul(a, one, activation, backend=backend)[0::2]).all()
    result = nf.activation_mul_bwd(one, a, one, activation, backend=backend)
    slope_at_nan = 1 if activation == "none" else 0
    assert (result.d_a[0::2] == slope_at_nan).all() and np.isfinite(result.d_a).all()
    assert np.isnan(result.d_b[0::2]).all() and np.isfinite(result.d_b[1::2]).all()
    bare = nf.activation_mul_bwd(one, a, one, activation, guard=False, backend=backend)
    if activation not in ("none", "relu"):
        assert np.isnan(bare.d_a[0::2]).all()
    b = one * dtype.type(np.nan)
    assert np.isnan(nf.activation_mul_bwd(one, one, b, activation, backend=backend).d_a).all()
