"""Epilogues of a user's own, formulas of elements and the gated layer on a CUDA device.

Run on a GPU where there is one, and in the simulator by `test_cuda_simulator`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from conftest import SIMULATED, unavailable
from on_device import poisoned

import numfuse as nf
from numfuse import expr as ex

status = nf.backends()["cuda"]
if not status:
    unavailable("cuda", str(status))

from numfuse.backends.cuda.call.arrays import DeviceArray  # noqa: E402
from numfuse.backends.cuda.call.record import REPLAY  # noqa: E402
from numfuse.backends.cuda.compile import toolchain  # noqa: E402

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
GELU = nf.activations()["gelu"]


@pytest.fixture(autouse=True)
def memory_holds_nan(monkeypatch):
    poisoned(monkeypatch, "cuda")


def scaled(z, bias, scale):
    return ex.tanh(z + bias) * scale


def two(z, w, x, s):
    return GELU(z + x) * w + s


def mixed(x, y, s):
    return x + s * y, ex.tanh(x) * y


def draw(*shapes, dtype=np.float64, seed=0):
    rng = np.random.default_rng([seed, *sum(shapes, ())])
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def there(x):
    if isinstance(x, (tuple, list)):
        return tuple(map(there, x))
    return nf.to_device(x, "cuda") if isinstance(x, np.ndarray) else x


def parts(x):
    return [z for y in x for z in parts(y)] if isinstance(x, (tuple, list)) else [x]


def check(function, *arguments, **options):
    """Compare a call on the device, and on NumPy arrays that go there, with the reference.

    16-bit results and slopes are rounded once each; sums of few terms lose some units of others.
    """
    wanted = parts(function(*arguments, **options, backend="reference"))
    moved = {name: there(x) for name, x in options.items()}
    for _ in range(2):  # recorded, then repeated
        found = parts(function(*map(there, arguments), **moved))
        call = nf.last_call()
        assert (call.backend, call.kernel.partition("/")[0]) == ("cuda", "fused")
        moved_there = parts(function(*arguments, **options, backend="cuda"))
        assert nf.last_call() == call
        for x, y, wide in zip(found, moved_there, wanted, strict=True):
            if wide is None:
                assert x is None and y is None
                continue
            assert isinstance(x, DeviceArray) and isinstance(y, np.ndarray)
            here, unit = nf.to_numpy(x), float(ml_dtypes.finfo(wide.dtype).eps)
            assert here.dtype == y.dtype == wide.dtype and here.shape == y.shape == wide.shape
            wide = wide.astype(np.float64)
            units = 4 if unit > 1e-4 else 64
            room = units * unit * (1 + np.abs(wide).max(initial=0))
            assert np.abs(here.astype(np.float64) - wide).max(initial=0) <= room
            assert np.abs(y.astype(np.float64) - wide).max(initial=0) <= room


@pytest.mark.parametrize("shape", [(5, 1), (1, 1), (), (4,), (5, 4), None])
def test_an_operand_of_any_shape_has_a_value_gradients_and_a_tangent(shape):
    a, b, bias, grad = draw((5, 7), (7, 4), (4,), (5, 4))
    scale = 2.5 if shape is None else draw(shape, seed=1)[0]
    check(nf.matmul_epilogue, a, b, scaled, bias, scale)
    check(nf.matmul_epilogue_bwd, grad, a, b, scaled, bias, scale)
    check(nf.matmul_epilogue_bwd, grad, a, b, scaled, bias, scale, needs=(1,))
    dots = bias, -0.5 if shape is None else scale
    check(nf.matmul_epilogue_jvp, a, b, scaled, (bias, scale), a, None, dots)


@pytest.mark.long(shared=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_products_and_what_was_saved(dtype):
    a, b, c, x, grad = draw((5, 7), (7, 4), (7, 4), (5, 1), (5, 4), dtype=dtype)
    check(nf.matmul_epilogue, a, (b, c), two, x, 0.5)
    check(nf.matmul_epilogue_bwd, grad, a, (b, c), two, x, 0.5)
    _, sums = nf.matmul_epilogue(
        a, (b, c), two, x, 0.5, return_pre_activation=True, backend="reference"
    )
    check(nf.matmul_epilogue, a, (b, c), two, x, 0.5, return_pre_activation=True)
    check(nf.matmul_epilogue_bwd, grad, a, (b, c), two, x, 0.5, pre_activation=sums)
    check(nf.matmul_epilogue_jvp, a, (b, c), two, (x, 0.5), a, (None, c), (x, None))


@pytest.mark.parametrize(
    "batch, own",
    [((3,), (5, 1)), ((2, 3), (2, 1, 5, 1)), ((2, 3), (3, 1, 4)), ((2, 1), (2, 1, 1, 1))],
)
def test_gradients_are_summed_over_a_batch(batch, own):
    a, grad, bias, scale = draw((*batch, 5, 7), (*batch, 5, 4), (4,), own)
    for shape in ((7, 4), (batch[-1], 7, 4)):
        (b,) = draw(shape, seed=2)
        check(nf.matmul_epilogue, a, b, scaled, bias, scale)
        check(nf.matmul_epilogue_bwd, grad, a, b, scaled, bias, scale)


def test_arrays_of_any_strides_are_read_in_place():
    a, b, bias, scale, grad = draw((3, 5, 7), (7, 4), (4,), (5, 1), (3, 5, 4))
    wanted = nf.matmul_epilogue_bwd(grad, a, b, scaled, bias, scale, backend="reference")
    turned = there(np.ascontiguousarray(a.transpose(1, 0, 2))).transpose(1, 0, 2)
    sparse = there(np.repeat(bias, 2))[::2]
    other = there(grad[..., ::-1].copy())[..., ::-1], turned, there(b.T.copy()).T
    found = nf.matmul_epilogue_bwd(*other, scaled, sparse, there(scale))
    for x, y in zip(parts(found), parts(wanted), strict=True):
        np.testing.assert_allclose(nf.to_numpy(x), y, rtol=1e-12, atol=1e-12)
    x, y = there(a)[:, ::2, ::-1], there(np.arange(7.0))
    for given in ((x, y), (x.transpose(0, 2, 1), y[:, None]), (y, x)):
        found = nf.elementwise(mixed, *given, 2.0)
        wanted = nf.elementwise(mixed, *map(nf.to_numpy, given), 2.0, backend="reference")
        for u, v in zip(found, wanted, strict=True):
            np.testing.assert_allclose(nf.to_numpy(u), v, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_formula_of_elements_has_results_and_gradients(dtype):
    for shape, other in (((3, 4, 5), (4, 1)), ((20,), (20,)), ((3, 4), (3, 4)), ((), ())):
        x, y, g = draw(shape, other, shape, dtype=dtype)
        check(nf.elementwise, mixed, x, y, 2.0)
        check(nf.elementwise_bwd, (g, g), mixed, x, y, 2.0)
        check(nf.elementwise_bwd, (None, g), mixed, x, y, 2.0, needs=(1,))


def test_a_gradient_of_what_is_not_used_is_zero():
    a, b, c, x = draw((5, 7), (7, 4), (7, 4), (5, 4))
    check(nf.elementwise_bwd, x, lambda x, y: ex.tanh(x), x, x[0], needs=(1,))
    check(nf.elementwise_bwd, x, lambda x, y: ex.tanh(x), x, x[0])
    check(nf.matmul_epilogue_bwd, x, a, (b, c), lambda z, w, x: z * x, x)
    check(nf.matmul_epilogue_bwd, x, a, (b, c), lambda z, w, x: w * x, x, needs=("b",))
    check(nf.matmul_epilogue, a, b, lambda z, x: x + 1, x)


def test_a_result_may_be_an_operand_and_nothing_else_of_one():
    x, y = draw((6, 5), (5,))
    on_device, scale = there(x), there(y)
    for n in range(1, 3):
        out = nf.elementwise(lambda x, y, s: x + s * y, on_device, scale, float(n), out=on_device)
        assert out is on_device
    np.testing.assert_allclose(nf.to_numpy(on_device), x + 3 * y)
    whole = there(np.zeros((7, 5)))
    with pytest.raises(ValueError, match="overlap"):
        nf.elementwise(lambda x, s: x * s, whole[:-1], 2.0, out=whole[1:])
    moment, value = there(x), there(2 * x)
    results = nf.elementwise(lambda m, v: (m + v, m - v), moment, value, out=(value, None))
    assert results[0] is value
    np.testing.assert_allclose(nf.to_numpy(value), 3 * x)
    np.testing.assert_allclose(nf.to_numpy(results[1]), -x)
    with pytest.raises(ValueError, match=r"out must be \(out\[0\], out\[1\]\)"):
        nf.elementwise(lambda m, v: (m + v, m - v), moment, value, out=(value,))


def test_a_number_is_given_with_the_addresses():
    """Guards: another number compiles nothing, records nothing and is rounded as an array is."""
    for dtype in DTYPES:
        a, b, bias = draw((5, 7), (7, 4), (4,), dtype=dtype)
        on_device = there((a, b))
        for number in (0.25, there(np.array(0.25, dtype))):
            nf.matmul_epilogue(*on_device, scaled, there(bias), number)
        nf.elementwise(mixed, on_device[0], on_device[0], 1)
        known, before = len(toolchain.kernels()), REPLAY.statistics()
        for n, number in enumerate((-1.7, 3.1e-5, 0.0, 65504.0), 1):
            found = nf.matmul_epilogue(*on_device, scaled, there(bias), number)
            array = there(np.array(number, dtype))
            same = nf.matmul_epilogue(*on_device, scaled, there(bias), array)
            assert (nf.to_numpy(found) == nf.to_numpy(same)).all()
            left, _ = nf.elementwise(mixed, on_device[0], on_device[0], number)
            wanted, _ = nf.elementwise(mixed, a, a, number, backend="reference")
            unit = float(ml_dtypes.finfo(dtype).eps)
            wide = wanted.astype(np.float64)
            np.testing.assert_allclose(nf.to_numpy(left).astype(np.float64), wide, rtol=4 * unit)
            after = REPLAY.statistics()
            assert (after.hits - before.hits, after.misses) == (3 * n, before.misses)
        assert len(toolchain.kernels()) == known


def test_what_a_call_has_beside_the_arrays_is_in_its_fingerprint():
    """Guards: a recorded call is repeated for its own formula, flags and gradients alone."""
    a, b, grad = map(there, draw((5, 7), (7, 4), (5, 4)))

    def run(f, *x, **options):
        found = nf.matmul_epilogue_bwd(grad, a, b, f, *x, **options)
        return [None if y is None else nf.to_numpy(y) for y in parts(found)]

    first = run(lambda z, s: z * s, 2.0)
    assert (run(lambda z, s: z * s, 4.0)[0] == 2 * first[0]).all()
    assert run(lambda z, s: z * s, 2.0, needs=("a",))[1:] == [None, None]
    assert (run(lambda z, s: z - s, 2.0)[2] != first[2]).all()
    array = run(lambda z, s: z * s, there(np.full((), 2.0)))
    assert all((x == y).all() for x, y in zip(array, first, strict=True))


def programs(call):
    """Return the names of the kernels of a call."""
    REPLAY.clear()
    call()
    (kept,) = REPLAY.programs()
    return kept.program.names.split(", ")


def test_a_product_ends_in_its_epilogue_where_it_can():
    """Guards: a bias and one operand more cost no pass, nor do sums of columns (docs/cuda.md)."""
    a, b, c, bias, scale, grad = map(there, draw((5, 7), (7, 4), (7, 4), (4,), (5, 1), (5, 4)))
    names = programs(lambda: nf.matmul_epilogue(a, b, scaled, bias, scale))
    assert len(names) == 1 and names[0].endswith("scaled")
    names = programs(lambda: nf.matmul_epilogue(a, b, lambda z, x: GELU(z + x), bias))
    assert len(names) == 1
    names = programs(lambda: nf.matmul_epilogue(a, b, lambda z, x, y: GELU(z + x) * y, bias, bias))
    assert len(names) == 1
    halves = [there(nf.to_numpy(x).astype(np.float16)) for x in (a, b, c)]
    names = programs(
        lambda: nf.matmul_epilogue(halves[0], halves[1:], lambda z, w, s: z * w + s, 2)
    )
    assert not any("number" in name for name in names)
    backward = programs(lambda: nf.matmul_epilogue_bwd(grad, a, b, lambda z, x: GELU(z + x), bias))
    # the slope with its sums, their join, and a product for each gradient of a factor
    assert len(backward) == 4
    layer = programs(lambda: nf.matmul_activation_mul(a, b, c, bias, bias))
    assert len(layer) == 2
    saved = programs(
        lambda: nf.matmul_activation_mul(a, b, c, bias, bias, return_pre_activation=True)
    )
    assert len(saved) == 2


@pytest.mark.skipif(SIMULATED, reason="the simulator has warps of one thread")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_by_row_and_in_all_take_no_array_of_the_results_size(dtype):
    """Guards: docs/guide/epilogues.md, such gradients are summed where they are made."""
    for m, n in ((300, 1001), (1000, 64), (7, 4096)):
        x, scale, grad = draw((m, n), (m, 1), (m, n), dtype=dtype)
        given = there(grad), mixed_sums, there(x), there(scale), 2.5
        REPLAY.clear()
        found = nf.elementwise_bwd(*given, needs=(1, 2))
        (kept,) = REPLAY.programs()
        assert kept.program.nbytes < grad.nbytes // 4 + 2**16
        wide = [y.astype(np.float64) for y in (grad, x, scale)]
        wanted = nf.elementwise_bwd(wide[0], mixed_sums, wide[1], wide[2], 2.5, needs=(1, 2))
        for mine, exact in zip(found[1:], wanted[1:], strict=True):
            room = 4 * np.finfo(dtype).eps * np.sqrt(m * n) * np.abs(wide[0]).max() * 10
            np.testing.assert_allclose(nf.to_numpy(mine), exact, rtol=0, atol=room)


def mixed_sums(x, scale, number):
    return ex.tanh(x * scale) * number


def test_the_value_beside_a_tangent_has_the_bits_of_the_forward():
    for dtype in DTYPES:
        a, b, bias, scale = map(there, draw((9, 7), (7, 5), (5,), (9, 1), dtype=dtype))
        out = nf.matmul_epilogue(a, b, scaled, bias, scale)
        found = nf.matmul_epilogue_jvp(a, b, scaled, (bias, scale), a, b, (None, scale)).out
        assert (nf.to_numpy(out) == nf.to_numpy(found)).all()
        out = nf.matmul_activation_mul(a, b, b, bias, None)
        found = nf.matmul_activation_mul_jvp(a, b, b, bias, None, a, b, None, None, None).out
        assert (nf.to_numpy(out) == nf.to_numpy(found)).all()


@pytest.mark.long(shared=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_layer_and_its_derivatives(dtype):
    m, k, n = 5, 7, 4
    shapes = (m, k), (k, n), (k, n), (n,), (m, 1), (m, n)
    *x, grad = draw(*shapes, dtype=dtype)
    *c, _ = draw(*shapes, dtype=dtype, seed=1)
    check(nf.matmul_activation_mul, *x)
    check(nf.matmul_activation_mul, *x[:3], activation="gelu", return_pre_activation=True)
    _, saved = nf.matmul_activation_mul(*x, return_pre_activation=True, backend="reference")
    check(nf.matmul_activation_mul, *x, return_pre_activation=True)
    for pre in (None, saved):
        check(nf.matmul_activation_mul_bwd, grad, *x, pre_activation=pre)
        check(nf.matmul_activation_mul_double_bwd, *c, grad, *x, pre_activation=pre)
    check(nf.matmul_activation_mul_bwd, grad, *x, needs=("b_up", "bias_gate"))
    check(nf.matmul_activation_mul_double_bwd, c[0], *[None] * 4, grad, *x)
    check(nf.matmul_activation_mul_jvp, *x, c[0], c[1], None, c[3], None)


def test_the_weights_of_a_gated_layer_may_be_views_of_one_array():
    a, w, grad = draw((5, 7), (7, 8), (5, 4))
    whole = there(w)
    for left, right in ((np.s_[:, :4], np.s_[:, 4:]), (np.s_[:, ::2], np.s_[:, 1::2])):
        found = nf.matmul_activation_mul_bwd(there(grad), there(a), whole[left], whole[right])
        wanted = nf.matmul_activation_mul_bwd(grad, a, w[left], w[right], backend="reference")
        for x, y in zip(found[:3], wanted[:3], strict=True):
            np.testing.assert_allclose(nf.to_numpy(x), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_plan_of_alternate_columns_is_not_replayed_for_those_of_two_arrays(dtype):
    """Guards: a fingerprint says which array begins how far behind another one."""
    m, k, n = (5, 7, 8) if SIMULATED else (200, 256, 264)
    a, w, other, grad = draw((m, k), (k, 2 * n), (k, 2 * n), (m, n), dtype=dtype)
    first, second, a0, g0 = there((w, other, a, grad))
    unit = {np.float32: 2.0**-24}.get(dtype, 2.0**-8)
    even, odd = np.s_[:, ::2], np.s_[:, 1::2]
    pairs = [(first, w), (first, w)], [(first, w), (second, other)], [(second, other)] * 2
    for (x, x_host), (y, y_host) in (*pairs, *pairs[::-1]):
        given = x_host[even], y_host[odd]
        out = nf.matmul_activation_mul(a0, x[even], y[odd])
        wanted = nf.matmul_activation_mul(*(z.astype(float) for z in (a, *given)))
        bound = (4 * k * 2.0**-24 + 2 * unit) * abs(wanted).max()
        np.testing.assert_allclose(nf.to_numpy(out).astype(float), wanted, atol=bound, rtol=0)
        found = nf.matmul_activation_mul_bwd(g0, a0, x[even], y[odd])
        exact = nf.matmul_activation_mul_bwd(*(z.astype(float) for z in (grad, a, *given)))
        for got, best in zip(found[:3], exact[:3], strict=True):
            bound = (4 * (k + m + n) * 2.0**-24 + 8 * unit) * abs(best).max()
            np.testing.assert_allclose(nf.to_numpy(got).astype(float), best, atol=bound, rtol=0)


@pytest.mark.parametrize("odd_first", [False, True])
@pytest.mark.parametrize("weights, cotangents", [(True, True), (True, False), (False, True)])
def test_second_order_over_alternate_columns(weights, cotangents, odd_first):
    """Guards: docs/cuda.md, factors of alternate columns alternate, in every term of a sum."""
    # (many rows: the sums over them are cut)
    m, k, n = (5, 7, 8) if SIMULATED else (9000, 256, 264)
    dtype = ml_dtypes.bfloat16
    a, c_a, w, c_w, grad = draw((m, k), (m, k), (k, 2 * n), (k, 2 * n), (m, n), dtype=dtype)
    columns = (np.s_[:, ::2], np.s_[:, 1::2])[:: -1 if odd_first else 1]
    host = [tuple(x[view] for view in columns) for x in (w, c_w)]
    given = []
    for x, views, alternate in zip((w, c_w), host, (weights, cotangents), strict=True):
        whole = there(x)
        given.append([whole[view] for view in columns] if alternate else there(views))
    (b, c_b), (b_host, c_host) = given, host
    g0, a0, c0 = there((grad, a, c_a))
    calls = (
        (nf.matmul_activation_mul, (a0, *b), (a, *b_host)),
        (nf.matmul_activation_mul_bwd, (g0, a0, *b), (grad, a, *b_host)),
        (
            nf.matmul_activation_mul_double_bwd,
            (c0, *c_b, None, None, g0, a0, *b), (c_a, *c_host, None, None, grad, a, *b_host),
        ),
    )  # fmt: skip
    for call, mine, others in calls:
        found = call(*mine)
        exact = call(*(x if x is None else x.astype(float) for x in others))
        if not isinstance(found, tuple):
            found, exact = (found,), (exact,)
        for got, best in zip(found, exact, strict=True):
            assert (got is None) == (best is None)
            if best is not None:
                # (pre-gradients are rounded to 16 bits, too)
                bound = (4 * (k + m + n) * 2.0**-24 + 4 * 2.0**-8) * abs(best).max()
                got = nf.to_numpy(got).astype(float)
                np.testing.assert_allclose(got, best, atol=bound, rtol=0)


def test_a_batch_of_weights_may_be_summed():
    a, b, c, grad = draw((3, 5, 7), (3, 7, 4), (1, 7, 4), (3, 5, 4))
    for sum_batch in (False, True):
        check(nf.matmul_activation_mul_bwd, grad, a, b, c, sum_batch=sum_batch)


@pytest.mark.parametrize("m, k, n", [(0, 7, 4), (5, 0, 4), (5, 7, 0), (1, 1, 1)])
def test_lengths_of_zero_and_one(m, k, n):
    a, b, bias, scale, grad = draw((m, k), (k, n), (n,), (m, 1), (m, n))
    check(nf.matmul_epilogue_bwd, grad, a, b, scaled, bias, scale)
    check(nf.matmul_activation_mul_bwd, grad, a, b, b, bias, None)
    out = nf.matmul_epilogue(there(a), there(b), scaled, there(bias), there(scale))
    wanted = nf.matmul_epilogue(a, b, scaled, bias, scale, backend="reference")
    np.testing.assert_allclose(nf.to_numpy(out), wanted, rtol=1e-12)


def test_a_gradient_has_its_bits_whichever_others_are_asked_for():
    """Guards: where columns are summed hangs on the result alone (docs/cuda.md, "Numbers")."""
    formulas = (
        lambda z, x, y: GELU(z + x) + y,
        lambda z, x, y: GELU(z + x) * y,
        lambda z, x, y: ex.tanh(z * y + x),
    )
    for dtype in (np.float32, np.float16):
        a, b, x, y, grad = map(there, draw((40, 7), (7, 5), (5,), (5,), (40, 5), dtype=dtype))
        for f in formulas:
            every = parts(nf.matmul_epilogue_bwd(grad, a, b, f, x, y))
            for needs in (("a",), ("b", 0), (0,), (1,), (0, 1)):
                found = parts(nf.matmul_epilogue_bwd(grad, a, b, f, x, y, needs=needs))
                for u, v in zip(found, every, strict=True):
                    assert u is None or (nf.to_numpy(u) == nf.to_numpy(v)).all()


@pytest.mark.long
@pytest.mark.skipif(SIMULATED, reason="the simulator has one tier, and wants small shapes")
@pytest.mark.parametrize("m, n, k", [(256, 256, 256), (133, 258, 129), (40, 1024, 512), (8, 8, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tier_and_access_gives_what_the_reference_gives(dtype, m, n, k):
    a, b, c, bias, grad = draw((m, k), (k, n), (k, n), (n,), (m, n), dtype=dtype)
    a /= dtype(np.sqrt(k))
    for scale in (*draw((m, 1), (n,), (m, n), (1, 1), dtype=dtype), -0.75):
        check(nf.matmul_epilogue, a, b, scaled, bias, scale)
        check(nf.matmul_epilogue_bwd, grad, a, b, scaled, bias, scale)
        check(nf.elementwise, mixed, grad, grad if np.ndim(scale) == 0 else scale, 2.0)
        check(nf.elementwise_bwd, (grad, grad), mixed, grad, scale, 2.0)
    check(nf.matmul_epilogue_bwd, grad, a, b, lambda z, x: GELU(z + x), bias)
    layer = a, b, c, bias, bias
    check(nf.matmul_activation_mul, *layer, return_pre_activation=True)
    check(nf.matmul_activation_mul_bwd, grad, *layer)
    check(nf.matmul_activation_mul_jvp, *layer, a, b, None, bias, None)


def test_what_cannot_be_run_is_refused():
    a, b, bias = draw((5, 7), (7, 4), (4,))
    on_device = there(a), there(b)
    with pytest.raises(TypeError, match=r"b must be on cuda:0 as the other operands, got numpy"):
        nf.matmul_epilogue(on_device[0], b, scaled, there(bias), 1.0)
    with pytest.raises(TypeError, match=r"scale must be on cuda:0 as the other operands"):
        nf.matmul_epilogue(*on_device, scaled, there(bias), bias)
    with pytest.raises(ValueError, match="backend must be 'cuda'"):
        nf.matmul_epilogue(*on_device, scaled, there(bias), 1.0, backend="cpu")
    with pytest.raises(TypeError, match="same dtype"):
        nf.matmul_epilogue(*on_device, scaled, there(bias.astype(np.float32)), 1.0)
    with pytest.raises(ValueError, match="bias must broadcast"):
        nf.matmul_epilogue(*on_device, scaled, there(bias[:3]), 1.0)


@pytest.mark.skipif(not SIMULATED, reason="device functions are Python's in the simulator alone")
@pytest.mark.parametrize("slope", [False, True])
def test_the_short_form_is_far_below_the_rounding_of_16_bits(slope):
    """Guards: the bound of `elementwise`, relative to results of any size.

    What an exponential makes small has an argument of the logarithm of this.
    """
    from numfuse import epilogues
    from numfuse.backends.cuda.kernels.elementwise import formula

    def check(name, short, exact, given, depth):
        with np.errstate(over="ignore", under="ignore"):
            found = float(np.ravel(short(*given))[0])
        wanted = float(np.ravel(exact(*map(np.float64, given)))[0])
        depth += abs(np.log(abs(wanted))) if wanted else 0
        bound = (2.0**-18 + depth * 2.0**-21) * abs(wanted) + 2.0**-120
        assert abs(found - wanted) <= bound, (name, given, found, wanted)

    for name, act in nf.activations().items():
        made = epilogues.layer(act.curve).select("out")
        made = made.backward().select("d_z") if slope else made
        inputs = tuple(made.inputs)
        short, exact = (
            formula(made, inputs, dtype, short=dtype == "float32").build()
            for dtype in ("float32", "float64")
        )
        for x in np.linspace(-13, 13, 261, dtype=np.float32):
            values = {"z": x, "grad_out": np.float32(1)}
            given = [values.get(key, np.float32(0)) for key in inputs]
            check(name, short, exact, given, 4)
