"""Whole networks on WebGPU: one dispatch each way, with the results of every other way.

Guards: arrays of the device and NumPy's have the same bits, whatever their layout; smaller devices
serve them; what is in no array of the call is in no result. The bounds of errors are held by the
conformance suite.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from arrays import bits, in_layout, normal
from conftest import unavailable
from hypothesis import given, settings
from hypothesis import strategies as st

import numfuse as nf
from numfuse import expr as ex

if not nf.backends()["webgpu"]:
    unavailable("webgpu", str(nf.backends()["webgpu"]))

from on_device import poisoned

from numfuse.adapters import webgpu
from numfuse.backends.webgpu import split, tiling
from numfuse.backends.webgpu.device.device import Device
from numfuse.backends.webgpu.face import BACKEND, WebGpuBackend
from numfuse.backends.webgpu.shaders.networks import NetworkPass

F32 = np.dtype(np.float32)
EVERY = ("x", "weights", "biases")
SECOND = np.array([[1.0, -0.5]])
LAYOUTS = ("c", "transposed", "sliced", "inner_sliced", "reversed", "offset")
SIZES = (2, 33, 16, 1)


def network(sizes=SIZES, points=37, seed=0, dtype=F32):
    """Return x, weights and biases of a network, one of these None."""
    rng = np.random.default_rng(seed)
    pairs = list(itertools.pairwise(sizes))
    weights = [normal(rng, pair, dtype, pair[0] ** -0.5) for pair in pairs]
    biases = [normal(rng, (n,), dtype) for _, n in pairs]
    if len(biases) > 2:
        biases[1] = None
    return normal(rng, (points, sizes[0]), dtype), weights, biases


def cotangents(x, weights, *_, counts=(2, 1), seed=1):
    rng = np.random.default_rng(seed)
    value = len(x), weights[-1].shape[1]
    return [normal(rng, (*lead, *value), x.dtype) for lead in ((), *((n,) for n in counts))]


def moved(x):
    """Return an argument with arrays of the device for NumPy's, views of the same strides."""
    if isinstance(x, (list, tuple)):
        return [moved(y) for y in x]
    if x is None:
        return None
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    order = np.argsort([-abs(s) for s in base.strides], kind="stable")
    flat = base.transpose(order).reshape(-1)
    there = nf.to_device(flat, "webgpu")
    at = x.__array_interface__["data"][0] - flat.__array_interface__["data"][0]
    ghost = np.ndarray(x.shape, x.dtype, there.ghost, at, x.strides)
    return there._view(ghost)


def back(x):
    if isinstance(x, (list, tuple)):
        return [y for one in x for y in back(one)]
    return [x if x is None or isinstance(x, np.ndarray) else nf.to_numpy(x)]


def same(got, wanted):
    """Assert that results, on the device or not, have the same bits."""
    got, wanted = back(got), back(wanted)
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert np.isfinite(x).all() and (bits(x) == bits(y)).all()


def close(got, wanted):
    """Assert that results are near those of the reference; the conformance suite has the bounds."""
    for x, y in zip(back(got), back(wanted), strict=True):
        assert (x is None) == (y is None)
        if x is not None and y.size:
            assert x.shape == y.shape
            assert np.abs(x - y).max() <= 3e-5 * max(1, np.abs(y).max())


def jets(call, grads, **how):
    """Return a jet and its gradients, and what ran each."""
    how = {"second": SECOND, **how}
    found = nf.mlp_jet(*call, **how)
    ran = nf.last_call().kernel
    return [found, nf.mlp_jet_bwd(*grads, *call, **how, needs=EVERY)], [
        ran,
        nf.last_call().kernel,
    ]


def values(call, grads, **how):
    """Return a value and its gradients, and what ran each."""
    found = nf.mlp(*call, **how)
    ran = nf.last_call().kernel
    return [found, nf.mlp_bwd(grads[0], *call, **how, needs=EVERY)], [ran, nf.last_call().kernel]


@pytest.fixture
def poison(monkeypatch):
    """All memory that the device gives holds NaN."""
    poisoned(monkeypatch, "webgpu")


KERNELS = ["network/tanh", "network backward/tanh"]


@pytest.mark.parametrize("results", [jets, values])
def test_a_network_is_one_dispatch_each_way_and_found_again(results, submits, monkeypatch, poison):
    host = network()
    grads = cotangents(*host)
    call, on_device = moved(host), moved(grads)
    results(call, on_device)  # (what the device leaves open is tried once)
    first = None
    for again in range(3):
        if again == 1:  # from here on calls are found
            monkeypatch.setattr(split, "run", None)
        for one, given_grads in ((call, on_device), (host, grads)):
            submits.clear()
            numpy = one is host
            found, ran = results(one, given_grads, **({"backend": "webgpu"} if numpy else {}))
            assert ran == KERNELS
            way = ["pack", "network"]
            # Gradients of weights with 33 columns, and with one, have no padding but their own.
            ends = ["join"] if numpy else ["join", "copy", "copy"]
            assert submits == [way, way + ends]
            first = first or found
            same(found, first)
        if not again:
            close(first, results(host, grads, backend="reference")[0])


@settings(max_examples=10)
@given(
    sizes=st.lists(st.sampled_from((1, 2, 3, 4, 5, 31, 32, 33, 61, 64)), min_size=2, max_size=7),
    points=st.sampled_from((1, 2, 15, 16, 17, 67)),
    needs=st.sets(st.sampled_from(EVERY), min_size=1),
    some=st.lists(st.booleans(), min_size=3, max_size=3),
    data=st.data(),
)
def test_the_layout_of_arrays_changes_no_bit(sizes, points, needs, some, data):
    x, weights, biases = network((2, *sizes), points)
    needs = tuple(sorted(needs))
    grads = cotangents(x, weights)
    grads = [y if there else None for y, there in zip(grads, some, strict=True)]
    plain = x, weights, biases

    def laid(y):
        if isinstance(y, (list, tuple)):
            return [laid(one) for one in y]
        return None if y is None else in_layout(y, data.draw(st.sampled_from(LAYOUTS)))

    given, there = moved(laid(plain)), moved(laid(grads))
    host = {"second": SECOND, "backend": "webgpu"}
    same(nf.mlp_jet(*given, second=SECOND), nf.mlp_jet(*plain, **host))
    whole = nf.mlp_jet_bwd(*grads, *plain, **host, needs=EVERY)
    wanted = [y if name in needs else None for name, y in zip(EVERY, whole, strict=True)]
    same(nf.mlp_jet_bwd(*there, *given, second=SECOND, needs=needs), wanted)
    assert nf.last_call().kernel.startswith("network backward")


def test_outputs_are_written_and_nothing_around_them():
    """Guards: results in parts of one array, gradients in arrays of any strides."""
    host = network()
    grads = cotangents(*host)
    wanted = jets(host, grads, backend="webgpu")[0] + [nf.mlp(*host, backend="webgpu")]
    call, on_device = moved(host), moved(grads)
    room = nf.to_device(np.full((4, 40, 3), np.nan, F32), "webgpu")
    parts = room[0, :37, :1], room[1:3, 1:38, :1], room[3:, 2:39, 2:]
    for _ in range(2):
        got = nf.mlp_jet(*call, second=SECOND, out=parts)
        assert all(x is y for x, y in zip(got, parts, strict=True))
        same(got, wanted[0])
        outside = nf.to_numpy(room)
        for at in (np.s_[0, :37, :1], np.s_[1:3, 1:38, :1], np.s_[3:, 2:39, 2:]):
            outside[at] = np.nan
        assert np.isnan(outside).all()

        def new(y):
            if isinstance(y, (list, tuple)):
                return [new(one) for one in y]
            if y is None:
                return None
            wide = nf.to_device(np.full((*y.shape[:-1], y.shape[-1] + 2), np.nan, F32), "webgpu")
            return wide[..., 1:-1]

        out = tuple(new(wanted[1]))
        out[1][0] = None
        how = {"second": SECOND, "needs": EVERY}
        made = nf.mlp_jet_bwd(*on_device, *call, **how, out=out)
        assert made.d_x is out[0] and made.d_weights[1] is out[1][1]
        assert made.d_biases[0] is out[2][0]
        same(made, wanted[1])
        single = nf.to_device(np.full((37, 1), np.nan, F32), "webgpu")
        assert nf.mlp(*call, out=single) is single
        same(single, wanted[2])


def poisoned_like(x):
    return nf.to_device(np.full(x.shape, np.nan, x.dtype), "webgpu")


def test_the_gradients_of_a_value_are_written_where_they_are_wanted(submits):
    host = network()
    grad, call = moved(cotangents(*host)[:1])[0], moved(host)
    wanted = nf.mlp_bwd(grad, *call, needs=EVERY)
    x, weights, biases, *_ = call
    for again in range(2):
        outs = [
            [None if y is None else poisoned_like(y) for y in group]
            for group in ([x], weights, biases)
        ]
        out = outs[0][0], (*outs[1][:-1], None), tuple(outs[2])
        before = len(submits)
        got = nf.mlp_bwd(grad, *call, needs=EVERY, out=out)
        assert len(submits) == before + 1, again
        assert got.d_x is out[0] and got.d_weights[0] is out[1][0] and got.d_biases == out[2]
        same(got, wanted)
    for wrong, message in (
        ((None, None), "3 entries"),
        ((x, None, None), "d_x"),
        ((None, (weights[0], *[None] * (len(weights) - 1)), None), r"d_weights\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            nf.mlp_bwd(grad, *call, needs=EVERY, out=wrong)


@pytest.mark.parametrize("groups", [1, 3, 528])
def test_any_number_of_workgroups_adds_up_all_points(monkeypatch, groups, poison):
    """Guards: tiles one after another in a workgroup, planes that are joined in two stages."""
    host = network((2, 7, 1), 1101)
    grads = cotangents(*host)
    hosted = BACKEND.device.hosted
    hosted.clear()
    monkeypatch.setattr(tiling, "NETWORK_GROUPS", groups)
    monkeypatch.setattr(tiling, "NETWORK_FORWARD_GROUPS", groups)
    got, ran = jets(host, grads, backend="webgpu")
    hosted.clear()
    assert ran == KERNELS
    close(got, jets(host, grads, backend="reference")[0])


def test_more_workgroups_than_a_row_of_a_grid_has(monkeypatch):
    host = network((2, 7, 1), 300)
    grads = cotangents(*host)
    wanted, _ = jets(host, grads, backend="webgpu")
    BACKEND.device.hosted.clear()
    monkeypatch.setattr(BACKEND.device, "grid_limit", 5)
    same(jets(host, grads, backend="webgpu")[0], wanted)
    BACKEND.device.hosted.clear()


LEAST = {
    "max-compute-workgroup-storage-size": 16384,
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-invocations-per-workgroup": 256,
}


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [(LEAST, (2, 64, 64, 61, 5, 1)), ({}, (2, 64, 33, 5)), ({}, (3, 20, 31, 1))],
    ids=["least", "GPU", "narrow"],
)
def test_other_devices_take_a_network_at_once(monkeypatch, submits, poison, limits, sizes):
    """Guards: tiles of a GPU, and of 16 KiB of workgroup memory; eight bindings."""
    monkeypatch.setattr(tiling, "NETWORK_CPU_TILES", tiling.NETWORK_TILES)
    other = WebGpuBackend(limits=limits)
    host = network(sizes, 45)
    grads = cotangents(*host)
    how = {"directions": np.eye(2, sizes[0]), "second": SECOND}
    got, ran = jets(host, grads, backend=other, **how)
    assert ran == KERNELS
    # Of eight bindings, six are weights and biases: ten take two dispatches.
    assert sum(x.count("pack") for x in submits) == (4 if len(sizes) == 6 else 2)
    close(got, jets(host, grads, backend="reference", **how)[0])


#: Tiles of other shapes than the tables have: two teams, tiles of two slices, few rows.
TILES = {
    64: [(32, 64, 2, 8, 8, 8, True), (64, 32, 8, 8, 8, 8)],
    32: [(128, 64, 8, 4, 4, 4, False, True), (32, 32, 2, 4, 4, 4, True), (64, 64, 8, 4, 8, 4)],
}


def curved(x):
    """Return what compilers take no time for."""
    return x + 0.1 * (x * x)


@pytest.mark.parametrize("width", TILES)
def test_tiles_of_any_shape_give_one_network(monkeypatch, poison, width):
    """Guards: what the benchmark compares; and indices in range, as checks would change results."""
    host = network((3, width, width - 3, 1), 150)
    grads = cotangents(*host)
    how = {"directions": np.eye(2, 3), "second": SECOND, "activation": nf.activation(curved)}
    wanted = jets(host, grads, backend="reference", **how)[0]
    for i, sizes in enumerate(TILES[width]):
        tiles = {**tiling.NETWORK_CPU_TILES, width: (sizes,)}
        monkeypatch.setattr(tiling, "NETWORK_CPU_TILES", tiles)
        found = []
        for trusted in (True, False)[: 1 + (i == 0)]:
            monkeypatch.setattr(NetworkPass, "trusted", trusted)
            found.append(jets(host, grads, backend=WebGpuBackend(limits={}), **how))
            assert found[-1][1] == ["network/curved", "network backward/curved"]
        close(found[0][0], wanted)
        same(found[0][0], found[-1][0])


def test_a_tile_fits_the_memory_of_its_device(monkeypatch):
    """Guards: weights of 64 x 64 whole where there is room, in slices where 16 KiB are all."""
    monkeypatch.setattr(tiling, "NETWORK_ROWS", dict.fromkeys(tiling.NETWORK_WIDTHS))
    sizes = 48, 32, 16, 15
    found = [tiling.network_tile(64, kib << 10, 256, False, 1 << 20) for kib in sizes]
    assert [t and (t.rows, t.slice) for t in found] == [(128, 64), (64, 64), (32, 32), None]
    assert all(t is None or t.nbytes <= kib << 10 for t, kib in zip(found, sizes, strict=True))
    assert tiling.network_tile(65, 1 << 20, 1024, False, 1) is None


@pytest.mark.parametrize("width", tiling.NETWORK_WIDTHS)
def test_few_points_have_smaller_tiles(monkeypatch, width):
    """Guards: enough invocations at work, from the first row to where one tile is the best."""
    monkeypatch.setattr(tiling, "NETWORK_ROWS", dict.fromkeys(tiling.NETWORK_WIDTHS))
    found = [tiling.network_tile(width, 32 << 10, 256, False, 4 << i, 4) for i in range(20)]
    sums = [tile.rows * tile.mr * tile.nr for tile in found]
    assert sums == sorted(sums) and sums[0] < sums[-1]
    # and tiles of few rows hold no point of many members
    assert tiling.network_tile(width, 32 << 10, 256, False, 4, 20).rows == 64


def test_a_gpu_takes_so_many_rows_at_once_and_others_by_layers(monkeypatch):
    for rows, taken in ((1000, True), (1001, False)):
        monkeypatch.setattr(tiling, "NETWORK_ROWS", {32: None, 64: 1000})
        assert (tiling.network_tile(64, 32 << 10, 256, False, rows) is not None) == taken
        assert tiling.network_tile(64, 32 << 10, 256, True, rows) is not None
        assert tiling.network_tile(32, 32 << 10, 256, False, rows) is not None


def test_what_a_gpu_has_too_many_rows_of_goes_layer_by_layer(monkeypatch):
    """Guards: one rule for forwards and backwards, values and jets; what was kept is served."""
    host = network((2, 40, 1), 20)
    grads = cotangents(*host)
    adapter = BACKEND.device.adapter._replace(kind="DiscreteGPU")
    monkeypatch.setattr(BACKEND.device, "adapter", adapter)
    for name, of_cpu in (
        ("NETWORK_TILES", tiling.NETWORK_CPU_TILES),
        ("TILES", (tiling.CPU_TILE,)),
    ):
        monkeypatch.setattr(tiling, name, of_cpu)
    for results, rows in ((values, 20), (jets, 80)):
        wanted = results(host, grads, backend="reference")[0]
        for most in (rows, rows - 1):
            for kept in (BACKEND.device.hosted, BACKEND.device.programs):
                kept.clear()
            monkeypatch.setattr(tiling, "NETWORK_ROWS", {32: None, 64: most})
            for arrays in ((moved(host), moved(grads)), (host, grads)):
                how = {"backend": "webgpu"} if arrays[0] is host else {}
                got, ran = results(*arrays, **how)
                assert [kernel.startswith("network") for kernel in ran] == [most == rows] * 2
                close(got, wanted)
    call = moved(host)
    found, kept = nf.mlp_jet(*call, second=SECOND, keep=True)
    made = nf.mlp_jet_bwd(*moved(grads), *call, second=SECOND, kept=kept, needs=EVERY)
    close([found, made], wanted)
    BACKEND.device.hosted.clear()
    BACKEND.device.programs.clear()


def test_more_rows_of_a_point_than_half_a_tile_go_layer_by_layer():
    host = network((2, 5, 1), 3)
    how = {"directions": np.ones((40, 2)), "second": np.ones((1, 40))}
    wanted = nf.mlp_jet(*host, **how, backend="reference")
    for got in (nf.mlp_jet(*host, **how, backend="webgpu"), nf.mlp_jet(*moved(host), **how)):
        assert not nf.last_call().kernel.startswith("network")
        close(got, wanted)


@pytest.mark.parametrize("batch", [(), (2,)], ids=["wide", "batch"])
def test_what_does_not_go_at_once_goes_layer_by_layer(batch):
    x, weights, biases = network((2, 9 if batch else 65, 1), 9)
    call = x, [np.broadcast_to(w, (*batch, *w.shape)).copy() for w in weights], biases
    grads = [np.ones((*lead, *batch, 9, 1), F32) for lead in ((), (2,), (1,))]
    wanted = jets(call, grads, backend="reference")[0]
    for got, ran in (jets(call, grads, backend="webgpu"), jets(moved(call), moved(grads))):
        assert not any("network" in kernel for kernel in ran)
        close(got, wanted)


def test_half_types_are_rounded_once():
    """Guards: float16 in memory alone; the layers' own way rounds every result."""
    if "float16" not in BACKEND.device.dtypes:
        pytest.skip("the device has no float16")
    host = network(dtype=np.dtype(np.float16))
    grads = cotangents(*host)

    def wide(y):
        if isinstance(y, (list, tuple)):
            return [wide(one) for one in y]
        return None if y is None else y.astype(np.float32)

    got, ran = jets(moved(host), moved(grads))
    assert ran == KERNELS
    exact, _ = jets(wide(host), wide(grads), backend="webgpu")
    same(got, [y if y is None else y.astype(np.float16) for y in back(exact)])


def pole(x):
    return ex.log(x * x)


def test_what_is_no_column_of_a_layer_is_in_no_result(poison):
    """Guards: an activation that is infinite at 0, which padding holds."""
    act = nf.activation(pole)
    host = network()
    grads = cotangents(*host)
    how = {"activation": act, "final": "silu"}
    got, ran = jets(moved(host), moved(grads), **how)
    assert ran == ["network/pole", "network backward/pole"]
    wanted = jets(*(wide64(y) for y in (host, grads)), **how, backend="reference")[0]
    for x, y in zip(back(got), back(wanted), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert np.isfinite(x).all()
            assert np.abs(x - y).max() <= 2e-3 * max(1, np.abs(y).max())


def wide64(y):
    if isinstance(y, (list, tuple)):
        return [wide64(one) for one in y]
    return None if y is None else y.astype(np.float64)


def test_points_that_there_are_not_are_in_no_gradient():
    """Guards: an infinite weight, whose product with the zeros of a tile's idle rows is no zero."""
    x, weights, biases = network((2, 6, 5, 1), 3)
    weights[1][2, 3] = np.inf
    grads = cotangents(x, weights)
    how = {"needs": EVERY, "second": SECOND}
    got = nf.mlp_jet_bwd(*moved(grads), *moved([x, weights, biases]), "relu", **how)
    assert nf.last_call().kernel == "network backward/relu"
    wanted = nf.mlp_jet_bwd(*grads, x, weights, biases, "relu", **how, backend="reference")
    finite = 0
    for a, b in zip(back(got), back(wanted), strict=True):
        if b is not None:
            np.testing.assert_allclose(a[np.isfinite(b)], b[np.isfinite(b)], rtol=1e-4, atol=1e-4)
            finite += np.isfinite(b).sum()
    assert finite


def root(x):
    return ex.sqrt(ex.maximum(x, 0.0))


def test_the_guard_decides_on_derivatives_that_are_not_finite():
    act = nf.activation(root)
    x, weights, biases = network((2, 5, 1), 3)
    x[1] = 0
    biases[0][:] = 0
    grads = cotangents(x, weights)
    for guard in (True, False):
        how = {"activation": act, "second": SECOND, "guard": guard, "needs": EVERY}
        got = nf.mlp_jet_bwd(*moved(grads), *moved([x, weights, biases]), **how)
        assert nf.last_call().kernel == "network backward/root"
        wanted = nf.mlp_jet_bwd(*grads, x, weights, biases, **how, backend="reference")
        for a, b in zip(back(got), back(wanted), strict=True):
            assert (np.isfinite(a) == np.isfinite(b)).all()
            there = np.isfinite(b)
            np.testing.assert_allclose(a[there], b[there], rtol=2e-4, atol=2e-4)
        assert all(np.isfinite(y).all() for y in back(got)) == guard


def test_layers_may_each_have_an_activation_of_their_own():
    host = network((2, 9, 8, 7, 1), 11)
    how = {"activation": ("sigmoid", "none", "tanh"), "final": "sigmoid"}
    grads = cotangents(*host)
    got, ran = values(moved(host), moved(grads), **how)
    assert all(kernel.startswith("network") for kernel in ran)
    close(got, values(host, grads, **how, backend="reference")[0])


def test_a_redefined_activation_is_another_network():
    x, weights, biases = network((2, 8, 1), 5)
    given = moved([x, weights, biases])

    def with_slope(slope):
        @nf.activation
        def leaning(z):
            return slope * z

        return nf.to_numpy(nf.mlp(*given, "leaning")), nf.mlp(
            x, weights, biases, "leaning", backend="webgpu"
        )

    hidden = x @ weights[0] + biases[0]
    for slope in (1.0, 2.0):
        for got in with_slope(slope):
            np.testing.assert_allclose(
                got, slope * hidden @ weights[1] + biases[1], rtol=1e-5, atol=1e-6
            )


def test_a_wrong_call_has_the_message_of_the_layers(monkeypatch):
    x, weights, biases = network((2, 8, 1), 5)
    grad = np.ones((5, 1), F32)
    calls = []
    for at, other in (
        ((0,), x[:, :1]),
        ((1, 1), weights[1][:-1]),
        ((2, 0), biases[0][:-1]),
        ((2, 1), biases[1].astype(np.float16)),
        ((1,), weights[:1]),
    ):
        given = [x, list(weights), list(biases)]
        part = given
        for i in at[:-1]:
            part = part[i]
        part[at[-1]] = list(other) if isinstance(other, list) else other
        calls.append((nf.mlp, moved(given), {}))
    good = moved([x, weights, biases])
    calls += [
        (nf.mlp, good, {"activation": "no such"}),
        (nf.mlp, good, {"backend": "cpu"}),
        (nf.mlp, good, {"out": nf.to_device(np.ones((4, 1), F32), "webgpu")}),
        (nf.mlp_bwd, [nf.to_device(grad[:4], "webgpu"), *good], {}),
        (nf.mlp_bwd, [nf.to_device(grad, "webgpu"), *good], {"needs": ("w",)}),
    ]

    def told(function, given, how):
        with pytest.raises((TypeError, ValueError)) as error:
            function(*given, **how)
        return error.type, str(error.value)

    found = [told(*call) for call in calls]
    monkeypatch.setattr(webgpu, "perceptron_at_once", lambda *_: None)
    assert found == [told(*call) for call in calls]


def test_a_failure_leaves_results_as_they_were(monkeypatch):
    host = network()
    call, on_device = moved(host), moved(cotangents(*host))
    outs = [nf.to_device(np.full(y.shape, 7, F32), "webgpu") for y in back(on_device)]
    gradients = [nf.to_device(np.full(w.shape, 7, F32), "webgpu") for w in host[1]]
    dispatch = Device.pipeline

    def failing(self, shader):
        if "network" in shader.label and "pack" not in shader.label:
            raise MemoryError("no room")
        return dispatch(self, shader)

    monkeypatch.setattr(Device, "pipeline", failing)
    how = {"second": SECOND, "guard": False}
    with pytest.raises(MemoryError, match="no room"):
        nf.mlp_jet(*call, **how, out=tuple(outs))
    with pytest.raises(MemoryError, match="no room"):
        nf.mlp_jet_bwd(*on_device, *call, **how, out=(None, gradients, None))
    numpy = np.full((37, 1), 7, F32)
    with pytest.raises(MemoryError, match="no room"):
        nf.mlp(*host, "gelu", out=numpy, backend="webgpu")
    for y in back([*outs, *gradients, numpy]):
        assert (y == 7).all()
