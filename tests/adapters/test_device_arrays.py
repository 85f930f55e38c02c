"""Arrays that stay on a WebGPU device, and problems that are cut to its limits."""

from __future__ import annotations

import numpy as np
import pytest
import tolerance
from arrays import bits, normal
from conftest import unavailable
from on_device import poisoned
from tolerance import assert_within

import numfuse as nf

F32 = np.dtype(np.float32)
WEBGPU = "webgpu"


@pytest.fixture(scope="module", autouse=True)
def adapter():
    status = nf.backends()[WEBGPU]
    if not status:
        unavailable(WEBGPU, str(status))


@pytest.fixture(autouse=True)
def memory_holds_nan(monkeypatch):
    poisoned(monkeypatch, WEBGPU)


def operands(m, n, k, batch=(), seed=0):
    """grad, a, b, bias"""
    rng = np.random.default_rng(seed)
    return (
        normal(rng, (*batch, m, n), F32), normal(rng, (*batch, m, k), F32, k**-0.5),
        normal(rng, (*batch, k, n), F32), normal(rng, (n,), F32),
    )  # fmt: skip


def moved(*arrays):
    return [nf.to_device(x, WEBGPU) for x in arrays]


def assert_same(got, host):
    """An array of the device with the bits of one of the host."""
    assert type(got).__name__ == "DeviceArray"
    back = nf.to_numpy(got)
    assert (got.shape, got.dtype) == (host.shape, host.dtype) == (back.shape, back.dtype)
    assert (bits(back) == bits(host)).all()


def assert_all_same(got, host):
    for x, y in zip(got, host, strict=True):
        assert_same(x, y)


# --- the same bits as for NumPy arrays ----------------------------------------------------------


def test_a_layer_stays_on_the_device():
    host = operands(33, 17, 29)
    grad, a, b, bias = moved(*host)
    out, pre = nf.matmul_bias_activation(a, b, bias, "gelu", return_pre_activation=True)
    assert_same(out, nf.matmul_bias_activation(*host[1:], "gelu", backend=WEBGPU))
    assert_same(pre, nf.matmul_bias_activation(*host[1:], backend=WEBGPU))
    wanted = nf.matmul_bias_activation_bwd(*host, "gelu", backend=WEBGPU)
    assert_all_same(nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"), wanted)
    saved = nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", pre_activation=pre)
    assert_all_same(saved, wanted)


def test_two_layers_in_a_chain_move_nothing(monkeypatch):
    host = operands(20, 24, 24)
    _, a, b, bias = moved(*host)
    device = a.device

    def refuse(*_, **__):
        raise AssertionError("bytes moved")

    monkeypatch.setattr(device, "upload", refuse)
    monkeypatch.setattr(device, "download", refuse, raising=False)
    monkeypatch.setattr(device.queue, "read_buffer", refuse)
    hidden = nf.matmul_bias_activation(a, b, bias, "silu")
    out = nf.silu_mul(nf.matmul_bias_activation(hidden, b, bias, "gelu"), hidden)
    monkeypatch.undo()
    first = nf.matmul_bias_activation(*host[1:], "silu", backend=WEBGPU)
    second = nf.matmul_bias_activation(first, *host[2:], "gelu", backend=WEBGPU)
    assert_same(out, nf.silu_mul(second, first, backend=WEBGPU))


@pytest.mark.parametrize("sum_batch", [False, True])
def test_batches_broadcast_as_they_do_in_numpy(sum_batch):
    rng = np.random.default_rng(1)
    a, b = normal(rng, (2, 3, 5, 7), F32), normal(rng, (3, 7, 4), F32)
    bias, grad = normal(rng, (2, 1, 1, 4), F32), normal(rng, (2, 3, 5, 4), F32)
    host = (grad, a, b, bias)
    assert_same(
        nf.matmul_bias_activation(*moved(a, b, bias), "tanh"),
        nf.matmul_bias_activation(a, b, bias, "tanh", backend=WEBGPU),
    )
    assert_all_same(
        nf.matmul_bias_activation_bwd(*moved(*host), "tanh", sum_batch=sum_batch),
        nf.matmul_bias_activation_bwd(*host, "tanh", sum_batch=sum_batch, backend=WEBGPU),
    )


@pytest.mark.parametrize("shape", [(33, 17), (1, 17), (33, 1), (17,), (1, 1)])
def test_a_residual_of_any_shape_is_added_and_summed_back(shape):
    host = operands(33, 17, 29)
    residual = normal(np.random.default_rng(2), shape, F32)
    grad, a, b, bias, added = moved(*host, residual)
    assert_same(
        nf.matmul_bias_residual(a, b, bias, added),
        nf.matmul_bias_residual(*host[1:], residual, backend=WEBGPU),
    )
    got = nf.matmul_bias_residual_bwd(grad, a, b, bias, added)
    wanted = nf.matmul_bias_residual_bwd(*host, residual, backend=WEBGPU)
    assert_all_same(got[:3], wanted[:3])
    wanted = tolerance.residual_gradient(host[0], shape, F32, WEBGPU)
    assert_within("d_residual", nf.to_numpy(got.d_residual), *wanted)


def test_views_are_read_where_they_lie():
    grad, a, b, _ = operands(33, 17, 29)
    g, x, y = moved(grad, a, b)
    for take in (
        lambda a, b: (a[::-1, 2:9], b[2:9, ::2]),
        lambda a, b: (b.T, a.T),
        lambda a, b: (a[3, None], b),
        lambda a, b: (a[..., :1], b[:1]),
    ):
        assert_same(
            nf.matmul_bias_activation(*take(x, y), None, "gelu"),
            nf.matmul_bias_activation(*take(a, b), None, "gelu", backend=WEBGPU),
        )
    assert_same(
        nf.silu_mul(g[:, 1:4], g.T[:3].T), nf.silu_mul(grad[:, 1:4], grad.T[:3].T, backend=WEBGPU)
    )
    assert_all_same(
        nf.silu_mul_bwd(g[1:], g[:-1], g[::-1][1:]),
        nf.silu_mul_bwd(grad[1:], grad[:-1], grad[::-1][1:], backend=WEBGPU),
    )


def test_a_shape_that_takes_no_copy_is_a_view():
    x = np.arange(24, dtype=F32).reshape(2, 3, 4)
    (on,) = moved(x)
    assert_same(on.reshape(6, -1), x.reshape(6, -1))
    assert_same(on[:, ::-1].reshape((2, 3, 2, 2)), x[:, ::-1].reshape(2, 3, 2, 2))
    assert on[:0].reshape(0).shape == (0,)
    with pytest.raises(ValueError, match="without a copy"):
        on.T.reshape(-1)
    with pytest.raises(ValueError, match="cannot reshape"):
        on.reshape(5)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
def test_empty_arrays_are_arrays(shape):
    m, n, k = shape
    grad, a, b, bias = operands(m, n, max(k, 1))
    host = grad, a[:, :k], b[:k], bias
    assert_all_same(
        nf.matmul_bias_activation_bwd(*moved(*host), "gelu"),
        nf.matmul_bias_activation_bwd(*host, "gelu", backend=WEBGPU),
    )


# --- out= -----------------------------------------------------------------------------------------


def test_only_the_output_is_written():
    host = operands(33, 17, 29)
    _, a, b, bias = moved(*host)
    (base,) = moved(np.full((40, 30), np.nan, F32))
    out = base[3:36, 5:22]
    assert nf.matmul_bias_activation(a, b, bias, "gelu", out=out) is out
    found = nf.to_numpy(base)
    wanted = nf.matmul_bias_activation(*host[1:], "gelu", backend=WEBGPU)
    assert (bits(found[3:36, 5:22]) == bits(wanted)).all()
    found[3:36, 5:22] = np.nan
    assert np.isnan(found).all()
    for x, y in zip((a, b, bias), host[1:], strict=True):
        assert_same(x, y)


def test_a_gate_may_overwrite_its_operand_and_a_product_may_not():
    grad, *_ = operands(9, 9, 9)
    x, y = moved(grad, grad)
    assert nf.silu_mul(x, y, out=x) is x
    assert_same(x, nf.silu_mul(grad, grad, backend=WEBGPU))
    with pytest.raises(ValueError, match="out"):
        nf.matmul_bias_activation(y, x, out=y)
    assert_same(y, grad)
    (both,) = moved(np.concatenate([grad, np.zeros_like(grad)]))
    nf.matmul_bias_activation(both[:9], *moved(np.eye(9, dtype=F32)), out=both[9:])
    assert (nf.to_numpy(both)[9:] == grad).all()  # another part of one buffer is no overlap


# --- errors ---------------------------------------------------------------------------------------


def test_nothing_moves_unasked():
    _, a, b, _ = operands(4, 5, 6)
    x, y = moved(a, b)
    for call in (
        lambda: np.asarray(x),
        lambda: nf.matmul_bias_activation(x, b),
        lambda: nf.matmul_bias_activation(a, y),
        lambda: nf.to_device([1.0], WEBGPU),
        lambda: nf.to_device(np.arange(3), WEBGPU),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match="must be 'webgpu'"):
        nf.matmul_bias_activation(x, y, backend="cpu")
    with pytest.raises(ValueError, match="K"):
        nf.matmul_bias_activation(x, x)


def test_a_first_call_of_device_arrays_is_one_submit():
    grad, a, b, bias = moved(*operands(71, 40, 90))
    device = a.device
    for call in (
        lambda: nf.matmul_bias_activation(a, b, bias, "gelu"),
        lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu"),
        lambda: nf.silu_mul_bwd(grad, grad, grad),
    ):
        device.submit()
        before = device.submits
        call()
        assert device.submits - before == 1 and not device.waiting


def test_kept_calls_read_new_arrays():
    for seed in range(4):  # of one kind, at other places
        host = operands(24, 20, 28, seed=seed)
        assert_all_same(
            nf.matmul_bias_activation_bwd(*moved(*host), "silu"),
            nf.matmul_bias_activation_bwd(*host, "silu", backend=WEBGPU),
        )


def test_a_kept_call_goes_with_its_own_activation_alone():
    """It is found by the name until that is defined again, and not until another one is."""
    (a,) = moved(np.ones((4, 4), F32))

    def call():
        return nf.matmul_bias_activation(a, a, None, "of this test")

    for factor in (2, 3):
        nf.activation(lambda x, factor=factor: x * factor, name="of this test")
        for _ in range(2):
            assert_same(call(), np.full((4, 4), 4 * factor, F32))
    nf.activation(lambda x: x, name="another of this test")
    hits = a.device.programs.statistics().hits
    call()
    assert a.device.programs.statistics().hits == hits + 1


def test_a_kept_call_reads_a_pre_activation_in_its_own_dtype():
    """One of the accumulator's and one of the operands' may have the same shape and strides."""
    rng = np.random.default_rng(6)
    half = np.dtype(np.float16)
    grad, a, b = (normal(rng, shape, half) for shape in ((1, 4), (1, 3), (3, 4)))
    wide = nf.matmul_bias_activation(a, b, None, "gelu", return_pre_activation=True)[1]
    apart = np.full((1, 8), np.nan, half)
    apart[:, ::2] = wide
    for pre, there in ((wide, moved(wide)[0]), (apart[:, ::2], moved(apart)[0][:, ::2])):
        assert there.strides == (16, 4)
        assert_all_same(
            nf.matmul_bias_activation_bwd(
                *moved(grad, a, b), None, "silu", needs=("a",), pre_activation=there
            )[:1],
            nf.matmul_bias_activation_bwd(
                grad, a, b, None, "silu", needs=("a",), pre_activation=pre, backend=WEBGPU
            )[:1],
        )


def test_a_copy_of_another_shape_is_refused():
    """It would be read with another's strides, past its buffer."""
    from numfuse.backends.webgpu.device.commands import Commands
    from numfuse.backends.webgpu.stores import copy, fresh

    device = nf.to_device(np.ones(1, F32), WEBGPU).device
    for source, out in (((1, 8), (8,)), ((8,), (1, 8)), ((4, 2), (2, 4)), ((8,), (7,))):
        commands = Commands(device)
        with pytest.raises(AssertionError, match="equal sizes"):
            copy(commands, *(fresh(device, shape, F32, "a test's") for shape in (source, out)))
        assert not commands.steps


# --- limits ---------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        {"max-storage-buffer-binding-size": 16384, "max-compute-workgroups-per-dimension": 7},
        {"max-storage-buffer-binding-size": 4096},
    ],
    ids=["16 KiB and 7 workgroups", "4 KiB"],
)
def small(request):
    """A backend of a device with small limits."""
    from numfuse.backends.webgpu.face import WebGpuBackend

    return WebGpuBackend(limits=request.param)


def assert_layer(backend, given, host, activation):
    """Forward, saved pre-activation and gradients within the bounds of tests/tolerance.py."""
    grad, a, b, bias = host
    out, pre = nf.matmul_bias_activation(
        *given[1:], activation, return_pre_activation=True, backend=backend
    )
    exact = tolerance.forward(a, b, bias, activation, F32, backend=WEBGPU)
    assert_within("out", nf.to_numpy(out), exact.out, exact.out_error)
    assert_within("pre", nf.to_numpy(pre), exact.pre, exact.pre_error)
    for sum_batch in (False, True):
        got = nf.matmul_bias_activation_bwd(
            *given, activation, sum_batch=sum_batch, backend=backend
        )
        exact = tolerance.backward(
            grad, a, b, bias, activation, F32, backend=WEBGPU,
            d_b_shape=b.shape[-2:] if sum_batch else None,
        )  # fmt: skip
        for name, value in zip(("d_a", "d_b", "d_bias"), got, strict=True):
            assert_within(
                name, nf.to_numpy(value), getattr(exact, name), getattr(exact, f"{name}_error")
            )


CUT = [
    ((), 300, 70, 50), ((), 30, 200, 17), ((3,), 90, 40, 33), ((2, 3), 17, 50, 21),
    ((5,), 1, 100, 3),
]  # fmt: skip


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("batch, m, n, k", CUT)
def test_a_problem_beyond_the_limits_is_cut(small, batch, m, n, k, where):
    host = operands(m, n, k, batch)
    given = [small.to_device(x) for x in host] if where == "device" else host
    assert_layer(small, given, host, "gelu")


def test_a_call_that_was_cut_is_cut_when_it_comes_again(small):
    """Also where each array could be bound at once, and only a sum in between could not."""
    half = np.dtype(np.float16)
    limit = small.device.binding_limit
    n = 64 if limit == 16384 else 32
    whole, part = (normal(np.random.default_rng(5), (n, n), dtype) for dtype in (F32, half))
    assert whole.nbytes == limit and part.nbytes <= limit - 2 * small.device.alignment
    for x, name, options in (
        (whole, "silu_mul", {}),
        (whole, "silu_mul_bwd", {}),
        (whole, "matmul_bias_activation", {}),
        (part, "matmul_bias_activation_bwd", {"bias": None, "activation": "gelu"}),
    ):
        count = 3 if name.endswith("bwd") else 2
        found = []
        for _ in range(3):
            given = [small.to_device(x) for _ in range(count)]
            got = getattr(nf, name)(*given, **options, backend=small)
            parts = got if isinstance(got, tuple) else (got,)
            found.append([nf.to_numpy(part) for part in parts if part is not None])
        for value in zip(*found, strict=True):
            assert np.isfinite(value[0]).all(), name
            assert all((bits(value[0]) == bits(later)).all() for later in value[1:]), name


@pytest.mark.parametrize("shape", [(2, 70, 60), (70, 60), (1, 60), (70, 1), (2, 1, 1), ()])
def test_a_sum_to_a_residual_is_cut(small, shape):
    grad, a, b, bias = operands(70, 60, 20, (2,))
    host = grad, a, b, bias, normal(np.random.default_rng(2), shape, F32)
    for dtype in (F32, np.dtype(np.float16)):
        given = [x.astype(dtype) for x in host]
        got = nf.matmul_bias_residual_bwd(
            *(small.to_device(x) for x in given), needs=("residual",), backend=small
        ).d_residual
        assert got.shape == shape and got.dtype == dtype
        wanted = tolerance.residual_gradient(given[0], shape, dtype, WEBGPU)
        assert_within("d_residual", nf.to_numpy(got), *wanted)


@pytest.mark.parametrize("shared", ["a", "b"])
def test_a_shared_operand_is_cut_too(small, shared):
    grad, a, b, bias = operands(60, 50, 20, (4,))
    host = (grad, a[0], b, bias) if shared == "a" else (grad, a, b[0], bias)
    assert_layer(small, host, host, "silu")


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("pattern", [(1, 1, 1), (0, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("batch, m, n, k", CUT)
def test_a_second_order_beyond_the_limits_is_cut(small, batch, m, n, k, activation, pattern, where):
    grad, a, b, bias = operands(m, n, k, batch)
    rng = np.random.default_rng(1)
    directions = [
        normal(rng, x.shape, F32) if there else None
        for x, there in zip((a, b, bias), pattern, strict=True)
    ]

    def given(*arrays):
        if where == "host":
            return arrays
        return [None if x is None else small.to_device(x) for x in arrays]

    _, pre = nf.matmul_bias_activation(a, b, bias, activation, return_pre_activation=True)
    for saved in (None, pre):
        *rest, own_pre = given(*directions, grad, a, b, bias, saved)
        second = nf.matmul_bias_activation_double_bwd(
            *rest, activation, pre_activation=own_pre, backend=small
        )
        exact = tolerance.double_backward(
            *directions, None, grad, a, b, bias, activation, F32,
            pre=None if activation == "none" else saved, backend=WEBGPU,
        )  # fmt: skip
        for name, value in zip(second._fields, second, strict=True):
            assert_within(name, nf.to_numpy(value), *exact[name])
    moved = nf.matmul_bias_activation_jvp(
        *given(a, b, bias, *directions), activation, backend=small
    )
    exact = tolerance.tangent(*directions, None, a, b, bias, activation, F32, backend=WEBGPU)
    for name, value in zip(moved._fields, moved, strict=True):
        assert_within(name, nf.to_numpy(value), *exact[name])


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("shape", [(2, 70, 60), (1, 1, 60), (2, 70, 1), ()])
def test_a_residual_of_second_order_is_cut_too(small, shape, where):
    grad, a, b, bias = operands(70, 60, 20, (2,))
    rng = np.random.default_rng(2)
    residual, z = (normal(rng, shape, F32) for _ in range(2))
    u, v, w = (normal(rng, x.shape, F32) for x in (a, b, bias))
    host = u, v, w, z, grad, a, b, bias, residual
    given = [small.to_device(x) for x in host] if where == "device" else host
    second = nf.matmul_bias_residual_double_bwd(*given, backend=small)
    exact = tolerance.double_backward(u, v, w, z, grad, a, b, bias, "none", F32, backend=WEBGPU)
    for name, value in zip(second._fields, second, strict=True):
        if name == "d_residual":
            assert value.shape == shape and not nf.to_numpy(value).any()
        else:
            assert_within(name, nf.to_numpy(value), *exact[name])
    u, v, w, z, grad, a, b, bias, residual = given
    moved = nf.matmul_bias_residual_jvp(a, b, bias, residual, u, v, w, z, backend=small)
    u, v, w, z, _, a, b, bias, residual = host
    exact = tolerance.tangent(u, v, w, z, a, b, bias, "none", F32, residual, backend=WEBGPU)
    for name, value in zip(moved._fields, moved, strict=True):
        assert_within(name, nf.to_numpy(value), *exact[name])


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_gate_of_second_order_is_cut(small, where):
    rng = np.random.default_rng(3)
    host = [normal(rng, (7, 33, 50), F32) for _ in range(5)]
    given = [small.to_device(x) for x in host] if where == "device" else host
    u, v, _, a, b = given
    got = (
        *nf.activation_mul_double_bwd(*given, "gelu", backend=small),
        *nf.activation_mul_jvp(a, b, u, v, "gelu", backend=small),
    )
    u, v, _, a, b = host
    wanted = (
        *nf.activation_mul_double_bwd(*host, "gelu", backend=WEBGPU),
        *nf.activation_mul_jvp(a, b, u, v, "gelu", backend=WEBGPU),
    )
    for x, y in zip(got, wanted, strict=True):
        assert (bits(nf.to_numpy(x)) == bits(nf.to_numpy(y))).all()


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_a_batch_of_views_is_summed_as_its_copy(activation):
    """Rows that lie apart are copied together on the device, and a result's brought back."""
    _, _, b, bias = operands(18, 17, 29, (3,))
    b = b[0]
    rng = np.random.default_rng(4)
    grad, a, u = (normal(rng, (3, 19, length), F32) for length in (17, 29, 29))
    host = [x[:, 1:] for x in (grad, a, u)]
    there = [nf.to_device(x, WEBGPU)[:, 1:] for x in (grad, a, u)]
    weights = moved(b, bias, b, bias)
    given = (there[0], there[1], *weights[:2], activation)
    for _ in range(2):  # the second time by what is kept of the first
        out = nf.to_device(np.full((3, 20, 29), np.nan, F32), WEBGPU)
        first = nf.matmul_bias_activation_bwd(*given)
        into = nf.matmul_bias_activation_bwd(*given, out=(out[:, 2:], None, None))
        second = nf.matmul_bias_activation_double_bwd(there[2], *weights[2:], *given)
        copies = [np.array(x) for x in host]
        wanted = nf.matmul_bias_activation_bwd(
            copies[0], copies[1], b, bias, activation, backend=WEBGPU
        )
        assert_all_same(first, wanted)
        assert_all_same(into, wanted)
        assert_all_same(
            second,
            nf.matmul_bias_activation_double_bwd(
                copies[2], b, bias, copies[0], copies[1], b, bias, activation, backend=WEBGPU
            ),
        )
        assert np.isnan(nf.to_numpy(out)[:, :2]).all()


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_gate_beyond_the_limits_is_cut(small, where):
    rng = np.random.default_rng(0)
    host = [normal(rng, (7, 33, 50), F32) for _ in range(3)]
    given = [small.to_device(x) for x in host] if where == "device" else host
    got = (nf.silu_mul(*given[:2], backend=small), *nf.silu_mul_bwd(*given, backend=small))
    free = [nf.to_device(x, WEBGPU) for x in host]
    wanted = (nf.silu_mul(*free[:2]), *nf.silu_mul_bwd(*free))
    for x, y in zip(got, wanted, strict=True):
        assert (bits(nf.to_numpy(x)) == bits(nf.to_numpy(y))).all()


def test_what_no_cut_makes_fit_is_an_error_before_anything_runs(small):
    submits = small.device.submits
    with pytest.raises(ValueError, match=r"max-storage-buffer-binding-size = \d+ bytes .* 20000"):
        nf.matmul_bias_activation(np.ones((1, 5000), F32), np.ones((5000, 1), F32), backend=small)
    assert small.device.submits == submits
    eye = np.eye(2, dtype=F32)
    assert (nf.matmul_bias_activation(eye, eye, backend=small) == eye).all()
