"""Epilogues of a user's own, elementwise formulas and the gated layer on WebGPU.

Guards: one pass over the operands, nothing compiled for another number, one meaning in pieces and
with the bindings of a smaller device (docs/webgpu.md). The bounds of errors are held by the
conformance suite; here all backends but one share the formulas, and the sums are short.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from arrays import in_layout, normal
from conftest import served, unavailable
from on_device import strided
from tolerance import DTYPES

import numfuse as nf
from numfuse import expr as ex

if not nf.backends()["webgpu"]:
    unavailable("webgpu", str(nf.backends()["webgpu"]))

from numfuse.backends.webgpu import tiling

M, N, K = 37, 20, 24
#: Largest difference to the reference, in the largest value of a result.
CLOSE = {"float32": 2e-6, "float64": 2e-15, "float16": 2e-3}
BINDINGS, BINDING = "max-storage-buffers-per-shader-stage", "max-storage-buffer-binding-size"


@nf.epilogue
def scaled(z, bias, scale, c):
    return ex.tanh(z + bias) * scale + c * z


@nf.epilogue
def mixed(z, w, y, bias, x):
    return nf.activations()["gelu"](z + bias) * w - x * y


@nf.epilogue
def adam(p, m, v, g, rate, b1, b2):
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return p - rate * m / (ex.sqrt(v) + 1e-3), m, v


#: By the number of right factors.
sum_of_squares = {
    2: nf.epilogue(lambda z, w: z * z + w, name="two squares"),
    3: nf.epilogue(lambda z, w, y: z * z + w - y * w, name="three squares"),
}


class Arrays:
    """Random operands of one dtype."""

    def __init__(self, dtype="float32", seed=0):
        self.rng, self.dtype = np.random.default_rng(seed), DTYPES[dtype]

    def __call__(self, *shape, scale=1.0):
        return normal(self.rng, shape, self.dtype, scale)


def flat(x):
    """Return the arrays in a result, in their order; None where there is none."""
    return [y for part in x for y in flat(part)] if isinstance(x, tuple) else [x]


def moved(x):
    """Return arguments with arrays of the device for NumPy's."""
    if isinstance(x, tuple):
        return tuple(map(moved, x))
    return nf.to_device(x, "webgpu") if isinstance(x, np.ndarray) else x


def assert_close(got, wanted):
    got, wanted = flat(got), flat(wanted)
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        if y is None:
            assert x is None
            continue
        x = nf.to_numpy(x)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        size = np.abs(np.float64(y)).max(initial=1e-30)
        close = CLOSE[x.dtype.name] * max(1, y.ndim)
        np.testing.assert_allclose(np.float64(x) / size, np.float64(y) / size, rtol=0, atol=close)


def assert_same_meaning(function, *args, **options):
    """Compare a call with the reference's: on arrays of NumPy and of the device, and repeated."""
    wanted = function(*args, **options, backend="reference")
    there = moved(args)
    more = {name: moved(x) if name == "pre_activation" else x for name, x in options.items()}
    found = [function(*args, **options, backend="webgpu"), function(*there, **more)]
    found.append(function(*there, **more))
    for got in found:
        assert_close(got, wanted)
    for x, y in zip(flat(found[1]), flat(found[2]), strict=True):
        if x is not None:
            assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y), equal_nan=True)


@pytest.fixture
def dispatched(monkeypatch):
    """The labels of the shaders that calls dispatch."""
    from numfuse.backends.webgpu.device.commands import Commands

    found, dispatch = [], Commands.dispatch

    def spied(self, shader, *rest):
        if not shader.label.startswith("rounding"):  # (a device is tried once)
            found.append(shader.label)
        dispatch(self, shader, *rest)

    monkeypatch.setattr(Commands, "dispatch", spied)
    return found


@pytest.fixture
def device():
    from numfuse.backends import load

    return load("webgpu").device


def smaller(**limits):
    """Return a backend with less than the adapter has."""
    from numfuse.backends.webgpu.face import WebGpuBackend

    return WebGpuBackend(limits={name.replace("_", "-"): n for name, n in limits.items()})


dtypes = pytest.mark.parametrize("dtype", [x for x in CLOSE if x in served("webgpu")])
#: Shapes of the operands of `scaled` that broadcast to (..., M, N).
FORMS = {
    "row": ((N,), (1, 1)),
    "column": ((1,), (M, 1)),
    "whole": ((M, N), (N,)),
    "scalar": ((), (M, N)),
}


# --- a product and a formula --------------------------------------------------------------------
@dtypes
@pytest.mark.parametrize("form", FORMS)
def test_operands_broadcast_and_their_gradients_are_summed(form, dtype):
    r = Arrays(dtype)
    a, b, grad = r(M, K, scale=K**-0.5), r(K, N), r(M, N)
    bias, scale = (r(*shape) for shape in FORMS[form])
    assert_same_meaning(nf.matmul_epilogue, a, b, scaled, bias, scale, 0.5)
    assert_same_meaning(nf.matmul_epilogue_bwd, grad, a, b, scaled, bias, scale, 0.5)
    dots = (r(*bias.shape), None, 2.0)
    args = a, b, scaled, (bias, scale, 0.5), r(*a.shape), r(*b.shape), dots
    assert_same_meaning(nf.matmul_epilogue_jvp, *args)


@pytest.mark.parametrize("form", [(), (1, 1), (300, 1), (200,)], ids=str)
def test_sums_of_gradients_take_no_array_of_the_shape_of_the_result(form, device, monkeypatch):
    """Guards: sums of rows, columns and all are made in the pass that makes what they sum."""
    r, m, n = Arrays(), 300, 200
    forms = (m, K), (K, n), (m, n), (m, n), form, (m * n,)
    a, b, grad, x, s, long = moved(tuple(r(*y) for y in forms))
    sizes, buffer = [], type(device).buffer

    def spied(self, nbytes, what):
        sizes.append(nbytes)
        return buffer(self, nbytes, what)

    monkeypatch.setattr(type(device), "buffer", spied)
    nf.matmul_epilogue_bwd(grad, a, b, lambda z, s: ex.tanh(z) * s, s, needs=(0,))
    nf.elementwise_bwd(grad, lambda x, s: x * s, x, s, needs=(1,))
    if form == ():
        nf.elementwise_bwd(long, lambda x, s: x * s, long, s, needs=(1,))
    assert sizes and max(sizes) <= 4 * m * n / 16


@dtypes
@pytest.mark.parametrize("n", [2047, 2048, 2049, 5000])
@pytest.mark.parametrize("step", [1, -2])
def test_a_long_row_is_summed_whatever_its_length(dtype, n, step):
    r = Arrays(dtype)
    grad, x = np.abs(r(n)), np.abs(r(2 * n))[:: abs(step)][:n][:: np.sign(step)]
    s = r()
    for y in (s, 0.5):
        assert_same_meaning(nf.elementwise_bwd, grad, lambda x, y, c: ex.tanh(x) * y + c, x, y, s)


@dtypes
@pytest.mark.parametrize("sizes", [(1, 3, 65), (5, 70, 3), (1, 33, 1), (3, 130, 66)], ids=str)
def test_several_sums_of_rows_columns_and_all(dtype, sizes):
    r, (count, m, n) = Arrays(dtype), sizes
    grad, shared = r(count, m, n), r(m, 1)
    rest = r(count, m, 1), r(count, 1, n), r(count, 1, 1), r(1), shared

    def f(x, y, z, u, v, w):
        return x * y * z + ex.tanh(x) * u * v - w * w * x

    assert_same_meaning(nf.elementwise_bwd, grad, f, r(count, m, n), *rest)


@pytest.mark.parametrize("factors", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (33, 34, 41), (130, 36, 16), (4, 5, 0)])
def test_one_to_three_right_factors(factors, sizes):
    m, n, k = sizes
    r = Arrays()

    def formula(*x):
        return sum(nf.activations()["silu"](z) * (i + 1) for i, z in enumerate(x[:-1])) * x[-1]

    f = {
        1: lambda z, x: formula(z, x),
        2: lambda z, w, x: formula(z, w, x),
        3: lambda z, w, y, x: formula(z, w, y, x),
    }[factors]
    a, b = r(m, k, scale=max(1, k) ** -0.5), tuple(r(k, n) for _ in range(factors))
    x, grad = r(m, 1), r(m, n)
    assert_same_meaning(nf.matmul_epilogue, a, b, f, x, return_pre_activation=True)
    assert_same_meaning(nf.matmul_epilogue_bwd, grad, a, b, f, x)
    pre = nf.matmul_epilogue(a, b, f, x, return_pre_activation=True, backend="reference")[1]
    assert_same_meaning(nf.matmul_epilogue_bwd, grad, a, b, f, x, pre_activation=pre)
    b_dot = (r(k, n), *[None] * (factors - 1))
    assert_same_meaning(nf.matmul_epilogue_jvp, a, b, f, (x,), r(m, k), b_dot, (None,))


@pytest.mark.parametrize("where", ["a", "b", "both", "bias"])
def test_batches_broadcast_and_gradients_are_summed_over_them(where):
    r = Arrays()
    a = r(3, 2, 9, K, scale=K**-0.5) if where != "b" else r(9, K, scale=K**-0.5)
    b = tuple(r(2, K, N) if where in ("b", "both") else r(K, N) for _ in range(2))
    bias = r(3, 1, 1, N) if where == "bias" else r(N)
    x = r(2, 9, 1)

    def f(z, w, bias, x):
        return ex.tanh(z + bias) * w * x

    out = nf.matmul_epilogue(a, b, f, bias, x, backend="reference")
    assert_same_meaning(nf.matmul_epilogue, a, b, f, bias, x)
    assert_same_meaning(nf.matmul_epilogue_bwd, r(*out.shape), a, b, f, bias, x)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "inner_sliced", "reversed", "offset"])
def test_strides_give_what_copies_give(layout):
    r = Arrays()
    a, b, w, bias, scale, grad = (
        in_layout(x, layout)
        for x in (r(M, K, scale=K**-0.5), r(K, N), r(K, N), r(N), r(M, 1), r(M, N))
    )

    def f(z, w, bias, scale):
        return nf.activations()["gelu"](z + bias) * w * scale

    assert_same_meaning(nf.matmul_epilogue, a, (b, w), f, bias, scale)
    assert_same_meaning(nf.matmul_epilogue_bwd, grad, a, (b, w), f, bias, scale)


def test_rows_of_a_batch_that_do_not_merge_are_gathered_on_the_device():
    """The batch is one product over one right factor, so d_b has the bits of contiguous rows."""
    r = Arrays()
    a, grad = r(2, 9, K), r(2, 9, N)
    b, bias = r(K, N), r(N)
    views = [nf.to_device(np.concatenate([x, x], 1), "webgpu")[:, :9] for x in (a, grad)]

    def f(z, bias):
        return ex.tanh(z + bias)

    first = nf.matmul_epilogue_bwd(*moved((grad, a, b)), f, moved(bias))
    second = nf.matmul_epilogue_bwd(views[1], views[0], *moved((b,)), f, moved(bias))
    for x, y in zip(flat(tuple(first)), flat(tuple(second)), strict=True):
        assert np.array_equal(nf.to_numpy(x), nf.to_numpy(y))


@pytest.mark.parametrize("kind", ["turned", "cut"])
def test_where_a_result_lies_does_not_show_in_the_others(kind):
    """Guards: the rows of a batch over one B are one sum, wherever d_a is written; found again."""
    r = Arrays()
    grad, a, b, w = moved((r(2, 17, 3), r(2, 17, 64), r(64, 3), r(64, 3)))
    wanted = nf.matmul_activation_mul_bwd(grad, a, b, w, None, None, "silu")
    base = moved(np.full(2 * 20 * 66, np.nan, np.float32))
    offset, steps = (0, (17 * 64, 1, 17)) if kind == "turned" else (3 * 66 + 2, (20 * 66, 66, 1))
    for _ in range(2):
        d_a = strided(base, offset, (2, 17, 64), tuple(4 * step for step in steps))
        out = d_a, None, None, None, None
        got = nf.matmul_activation_mul_bwd(grad, a, b, w, None, None, "silu", out=out)
        assert got.d_a is d_a
        for x, y in zip(got[:3], wanted[:3], strict=True):
            np.testing.assert_array_equal(nf.to_numpy(x), nf.to_numpy(y), strict=True)


# --- formulas of arrays alone -------------------------------------------------------------------
@dtypes
def test_elementwise_formulas_broadcast(dtype):
    r = Arrays(dtype)
    shapes = [((300,), (), (300,)), ((4, 1, 7), (5, 1), (1, 7)), ((3, 1), (1, 4), (3, 4))]
    shapes += [((1,), (1,), (1,)), ((2, 3, 4, 5, 6), (3, 1, 5, 1), (6,)), ((8, 64), (64,), (8, 1))]
    for three in shapes:
        x, y, w = (r(*shape) for shape in three)

        def f(x, y, w, c):
            return x * y + c * w, ex.tanh(x) - w

        out = nf.elementwise(f, x, y, w, 0.25, backend="reference")
        assert_same_meaning(nf.elementwise, f, x, y, w, 0.25)
        grads = tuple(r(*z.shape) for z in out)
        assert_same_meaning(nf.elementwise_bwd, grads, f, x, y, w, 0.25)
        assert_same_meaning(nf.elementwise_bwd, (None, grads[1]), f, x, y, w, 0.25, needs=(0, 3))


def test_an_elementwise_update_is_one_dispatch_in_place(device, dispatched):
    r = Arrays()
    host = [r(1003) for _ in range(3)] + [r(1003)]
    host[2] = np.abs(host[2])
    wanted = nf.elementwise(adam, *host, 0.1, 0.9, 0.99, backend="reference")
    p, m, v, g = moved(tuple(host))
    dispatched.clear()
    found = nf.elementwise(adam, p, m, v, g, 0.1, 0.9, 0.99, out=(p, m, v))
    assert found[0] is p and found[1] is m and found[2] is v
    assert Counter(dispatched) == {"elementwise adam f32x4": 1, "elementwise adam f32": 1}
    assert_close(found, wanted)
    # parts of one buffer: what is written is read by nothing else
    whole = nf.to_device(np.concatenate(host), "webgpu")
    parts = [whole[i * 1003 : (i + 1) * 1003] for i in range(4)]
    for _ in range(2):
        nf.elementwise(adam, *parts, 0.1, 0.9, 0.99, out=tuple(parts[:3]))
    again = nf.elementwise(adam, *wanted, host[3], 0.1, 0.9, 0.99, backend="reference")
    assert_close(tuple(parts[:3]), again)


def test_another_number_compiles_nothing(device, dispatched):
    r = Arrays()
    x, y = moved((r(6, 5), r(6, 5)))
    a, b, bias = moved((r(6, 5), r(5, 4), r(4)))

    def f(c, x, y):  # (the number comes first)
        return c * x + y

    def calls(c):
        return nf.elementwise(f, c, x, y), nf.matmul_epilogue(a, b, scaled, bias, 1.5, c)

    first = calls(0.5)
    pipelines, constants = device.pipelines.statistics(), device.constants.statistics()
    programs, many = device.programs.statistics(), len(dispatched)
    for c in (0.5, 2.0, -1.0):
        found = calls(c)
        wanted = c * nf.to_numpy(x) + nf.to_numpy(y)
        assert np.abs(nf.to_numpy(found[0]) - wanted).max() < 1e-6
        host = [nf.to_numpy(z) for z in (a, b, bias)]
        assert_close(found[1], nf.matmul_epilogue(*host[:2], scaled, host[2], 1.5, c))
    assert device.pipelines.statistics().entries == pipelines.entries
    assert device.constants.statistics().entries == constants.entries
    assert device.programs.statistics().hits == programs.hits + 6
    assert len(dispatched) == many  # (what is replayed is no new dispatch)
    assert_close(calls(0.5), tuple(nf.to_numpy(z) for z in first))


# --- the gated layer ----------------------------------------------------------------------------
def gated(r, m=M, n=N, k=K, batch=()):
    return r(*batch, m, k, scale=k**-0.5), r(k, n), r(k, n), r(n), r(n)


@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu", "none"])
def test_the_gated_layer_and_all_its_derivatives(activation, dtype):
    r = Arrays(dtype)
    x, grad = gated(r), r(M, N)
    keep = {"return_pre_activation": True}
    assert_same_meaning(nf.matmul_activation_mul, *x, activation, **keep)
    _, pre = nf.matmul_activation_mul(*x, activation, **keep, backend="reference")
    dots = [r(*y.shape) for y in x]
    assert_same_meaning(nf.matmul_activation_mul_jvp, *x, *dots, activation)
    for saved in (None, pre):
        known = {"pre_activation": saved}
        assert_same_meaning(nf.matmul_activation_mul_bwd, grad, *x, activation, **known)
        double = nf.matmul_activation_mul_double_bwd
        assert_same_meaning(double, *dots, grad, *x, activation, **known)
    some = dots[0], None, dots[2], None, None
    double = nf.matmul_activation_mul_double_bwd
    assert_same_meaning(double, *some, grad, *x[:3], None, x[4], activation, needs=("grad", "b_up"))


def test_a_gated_forward_is_one_dispatch_and_its_pre_gradients_are_another(dispatched):
    r = Arrays()
    x, grad = moved(gated(r)), moved(r(M, N))
    nf.matmul_activation_mul(*x)
    assert len(dispatched) == 1 and "f32x4t.f32x4+f32x4" in dispatched[0]
    dispatched.clear()
    nf.matmul_activation_mul_bwd(grad, *x[:3], needs=("a", "b_gate", "b_up"))
    # both pre-gradients, d_a over both (two separate weights are put side by side), both weights'
    assert Counter(label.split()[0] for label in dispatched) == {"gemm": 3, "copy": 2}
    dispatched.clear()
    whole = moved(r(K, 2 * N))
    for gate, up in ((whole[:, :N], whole[:, N:]), (whole[:, ::2], whole[:, 1::2])):
        nf.matmul_activation_mul(x[0], gate, up)
        nf.matmul_activation_mul_bwd(grad, x[0], gate, up)
    assert Counter(label.split()[0] for label in dispatched) == {"gemm": 8}


def test_outputs_of_the_caller_are_written_and_returned():
    r = Arrays()
    x, grad = moved(gated(r)), moved(r(M, N))
    for function, args in (
        (nf.matmul_activation_mul, x),
        (nf.matmul_activation_mul_bwd, (grad, *x)),
    ):
        made = function(*args)
        outs = tuple(nf.to_device(np.full(y.shape, np.nan, "f4"), "webgpu") for y in flat(made))
        out = outs if isinstance(made, tuple) else outs[0]
        for _ in range(3):
            found = function(*args, out=out)
            assert all(y is z for y, z in zip(flat(found), outs, strict=True))
            assert_close(found, tuple(nf.to_numpy(y) for y in flat(made)))


def test_a_repeated_call_is_replayed(device):
    r = Arrays()
    x, grad = moved(gated(r)), moved(r(M, N))
    for _ in range(2):
        before = device.programs.statistics()
        nf.matmul_activation_mul(*x)
        nf.matmul_activation_mul_bwd(grad, *x)
        nf.matmul_epilogue(x[0], x[1], scaled, x[3], 1.0, 2)
        hosted = device.hosted.statistics()
        nf.matmul_activation_mul(*map(nf.to_numpy, x), backend="webgpu")
    assert device.programs.statistics().hits == before.hits + 3
    assert device.hosted.statistics().hits == hosted.hits + 1


@pytest.mark.parametrize("tile", tiling.TILES, ids=lambda tile: tile.block_m * tile.block_n)
@pytest.mark.parametrize("factors", [2, 3])
def test_every_tile_serves_a_group_of_products(device, monkeypatch, tile, factors):
    """The tiles of a GPU on whatever device is there, a CPU's driver included."""
    made = tiling.divided(tile, factors)
    storage = device.limits["max-compute-workgroup-storage-size"]
    if tiling._workgroup_bytes(made, made.block_k, 4, factors) > storage:
        pytest.skip(f"{device.name} has {storage} bytes of workgroup memory")
    monkeypatch.setattr(tiling, "tile", lambda *how: tiling.divided(tile, how[-2]))
    r = Arrays()
    m, n = made.block_m + 4, made.block_n + 8
    for sizes in ((m, n, 300), (m - 1, n - 1, 35)):
        a, b = r(sizes[0], sizes[2], scale=0.1), tuple(r(*sizes[:0:-1]) for _ in range(factors))
        out = nf.matmul_epilogue(*moved((a, b)), sum_of_squares[factors])
        assert_close(out, nf.matmul_epilogue(a, b, sum_of_squares[factors], backend="reference"))


# --- limits -------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_device_with_few_bindings_takes_more_passes():
    """8 arrays are what every device of WebGPU binds."""
    r = Arrays()
    small = smaller(max_storage_buffers_per_shader_stage=8)
    x, grad = gated(r), r(M, N)
    others = [r(M, 1), r(N), r(M, N), r(1, 1)]

    def f(z, w, x, y, u, v, c, d, e):
        return ex.tanh(z * x + y) * u + w * v + c * d * e

    numbers = 0.5, 2.0, 3.0
    for function, args in (
        (nf.matmul_activation_mul_bwd, (grad, *x)),
        (nf.matmul_activation_mul_double_bwd, (*x, grad, *x)),
        (nf.matmul_epilogue, (x[0], x[1:3], f, *others, *numbers)),
        (nf.matmul_epilogue_bwd, (grad, x[0], x[1:3], f, *others, *numbers)),
        (nf.elementwise, (adam, *(np.abs(r(40, 3)) for _ in range(4)), *(r(1) for _ in range(3)))),
    ):
        assert_close(function(*args, backend=small), function(*args, backend="reference"))
    x, y, u, v = (r(5, 4) for _ in range(4))
    with pytest.raises(ValueError, match=f"{BINDINGS} = 4"):
        chosen = smaller(max_storage_buffers_per_shader_stage=4)
        nf.elementwise(lambda x, y, u, v: ex.where(x < y, u, v), x, y, u, v, backend=chosen)


def test_an_update_in_place_in_several_passes_reads_what_was_there():
    from numfuse.backends.webgpu.arrays import to_device

    small, r = smaller(max_storage_buffers_per_shader_stage=4), Arrays()
    host = [np.abs(r(40)) for _ in range(4)]
    wanted = nf.elementwise(adam, *host, 0.1, 0.9, 0.99, backend="reference")
    p, m, v, g = (to_device(x, small.device) for x in host)
    found = nf.elementwise(adam, p, m, v, g, 0.1, 0.9, 0.99, out=(p, m, v), backend=small)
    assert_close(found, wanted)


@pytest.mark.long
def test_problems_beyond_a_binding_are_cut():
    small, r = smaller(max_storage_buffer_binding_size=1 << 14), Arrays()
    x, grad = gated(r, 300, 70, 30), r(300, 70)
    row, column = r(70), r(300, 1)

    def f(z, w, row, column, c):
        return ex.tanh(z + row) * w * column + c

    for function, args in (
        (nf.matmul_activation_mul, x),
        (nf.matmul_activation_mul_bwd, (grad, *x)),
        (nf.matmul_activation_mul_double_bwd, (*x, grad, *x)),
        (nf.matmul_activation_mul_jvp, (*x, *x)),
        (nf.matmul_epilogue_bwd, (grad, x[0], x[1:3], f, row, column, 0.5)),
        (nf.elementwise, (lambda x, y, z: x * y + z, grad, row, column)),
        (nf.elementwise_bwd, (grad, lambda x, y, z: x * y + z, grad, row, column)),
    ):
        assert_close(function(*args, backend=small), function(*args, backend="reference"))
    wide = r(2, 1 << 13)
    with pytest.raises(ValueError, match=BINDING):
        nf.matmul_epilogue(wide, r(1 << 13, 2), lambda z: z * z, backend=small)


# --- errors -------------------------------------------------------------------------------------
def test_arrays_that_are_elsewhere_are_refused():
    r = Arrays()
    a, b, bias, scale = r(M, K), r(K, N), r(N), r(M, 1)
    there = moved((a, b, bias, scale))
    with pytest.raises(TypeError, match=r"bias must be on .*to_device"):
        nf.matmul_epilogue(*there[:2], scaled, bias, there[3], 1.0)
    with pytest.raises(ValueError, match="backend must be 'webgpu'"):
        nf.matmul_epilogue(*there[:2], scaled, *there[2:], 1.0, backend="cpu")
    with pytest.raises(ValueError, match="scale must broadcast"):
        nf.matmul_epilogue(*there[:2], scaled, there[2], there[2][:3], 1.0)
    with pytest.raises(ValueError, match="must not share memory"):
        nf.matmul_epilogue(*there[:2], scaled, *there[2:], 1.0, out=there[0][:, :N])
