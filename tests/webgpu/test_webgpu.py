"""The WebGPU backend beyond what every backend has to fulfil: adapters, tiles, caches, errors.

Guards: one submit a call, bounded memory, errors that name the kernel or the limit
(docs/webgpu.md).
"""

from __future__ import annotations

import gc
import os
import pathlib
import re
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import once
import pytest
import tolerance
from arrays import bits, normal
from conftest import served, unavailable
from tolerance import DTYPES, assert_within

import numfuse as nf
from numfuse.backends.webgpu import tiling
from numfuse.runtime.replay import Replay

#: Default limits of the specification of WebGPU: no device offers less.
LEAST_STORAGE, LEAST_INVOCATIONS = 16384, 256


@pytest.fixture(scope="module")
def webgpu():
    """The backend object."""
    status = nf.backends()["webgpu"]
    if not status:
        unavailable("webgpu", str(status))
    from numfuse.backends import resolve

    return resolve("webgpu")


@pytest.fixture
def device(webgpu):
    return webgpu.device


@pytest.fixture
def adapters(webgpu):
    from numfuse.backends.webgpu.face import adapters

    return adapters()


@pytest.fixture
def giving(adapters):
    """The adapters that give a device: some are listed and do not, as NVIDIA's OpenGL."""
    from numfuse.backends.webgpu.device.adapters import choose

    found = []
    for adapter in adapters:
        try:
            nf.use_backend("webgpu", device=adapter.number).backend.device  # noqa: B018
        except nf.BackendUnavailable as why:
            assert str(adapter) in str(why) and "gives no device" in str(why)
        else:
            found.append(adapter)
    assert str(choose()) in map(str, found)
    return found


def operands(m, n, k, dtype="float32", seed=0):
    """grad, a, b, bias"""
    rng, dtype = np.random.default_rng(seed), DTYPES[dtype]
    return (
        normal(rng, (m, n), dtype), normal(rng, (m, k), dtype, k**-0.5), normal(rng, (k, n), dtype),
        normal(rng, (n,), dtype),
    )  # fmt: skip


def layer(grad, a, b, bias, activation="gelu", backend="webgpu"):
    """A forward and its backward."""
    out = nf.matmul_bias_activation(a, b, bias, activation, backend=backend)
    result = nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, backend=backend)
    return out, *result


def assert_layer(grad, a, b, bias, activation="gelu", saved=False):
    pre = None
    if saved:
        out, pre = nf.matmul_bias_activation(
            a, b, bias, activation, return_pre_activation=True, backend="webgpu"
        )
        got = (
            out,
            *nf.matmul_bias_activation_bwd(
                grad, a, b, bias, activation, pre_activation=pre, backend="webgpu"
            ),
        )
    else:
        got = layer(grad, a, b, bias, activation)
    forward = tolerance.forward(a, b, bias, activation, a.dtype, backend="webgpu")
    backward = tolerance.backward(grad, a, b, bias, activation, a.dtype, pre=pre, backend="webgpu")
    assert_within("out", got[0], forward.out, forward.out_error)
    for name, value in zip(("d_a", "d_b", "d_bias"), got[1:], strict=True):
        assert_within(name, value, getattr(backward, name), getattr(backward, f"{name}_error"))


def met(monkeypatch):
    """The shaders that calls dispatch from now on."""
    from numfuse.backends.webgpu.device.commands import Commands

    found, dispatch = set(), Commands.dispatch

    def spied(self, shader, *rest):
        found.add(shader)
        dispatch(self, shader, *rest)

    monkeypatch.setattr(Commands, "dispatch", spied)
    return found


def kept(table):
    return table.statistics().entries


def same(first, second):
    return all((bits(x) == bits(y)).all() for x, y in zip(first, second, strict=True))


# --- adapters -----------------------------------------------------------------------------------


def test_calls_run_on_the_adapter_that_is_meant(device, adapters):
    wanted = os.environ.get("NUMFUSE_WEBGPU_ADAPTER", "")
    if wanted.isdecimal():
        assert str(adapters[int(wanted)]) == str(device.adapter)
    else:
        assert wanted.casefold() in f"{device.name} {device.adapter.interface}".casefold()
    if not wanted:  # the best: no CPU where there is a GPU
        assert device.adapter.kind != "CPU" or all(a.kind == "CPU" for a in adapters)
    assert device.handle.adapter.info["device"] == device.name
    assert device.handle.adapter.info["backend_type"] == device.adapter.interface
    layer(*operands(5, 4, 3))
    call = nf.last_call()
    assert (call.backend, call.device, call.tier) == ("webgpu", device.name, "float32")
    assert call.kernel == "backward/gelu"


def test_an_adapter_is_chosen_by_index_and_by_name(giving):
    for adapter in giving:
        for which in (adapter.number, str(adapter.number)):
            with nf.use_backend("webgpu", device=which) as chosen:
                layer(*operands(5, 4, 3), backend=None)
                assert nf.last_call().device == adapter.name
                assert str(chosen.device.adapter) == str(adapter)
        with nf.use_backend("webgpu", device=f"{adapter.name} {adapter.interface}".upper()) as it:
            found = it.device.adapter
            assert (found.name, found.interface) == (adapter.name, adapter.interface)
    number = giving[0].number
    first = nf.use_backend("webgpu", device=number).backend
    assert first is nf.use_backend("webgpu", device=str(number)).backend  # one device, not two


@pytest.mark.parametrize("which", ["no such adapter", 99, -1, "99"])
def test_an_adapter_that_is_not_there_is_an_error_that_lists_the_others(adapters, which):
    with pytest.raises(ValueError, match=r"^device must be") as caught:
        nf.use_backend("webgpu", device=which)
    assert all(str(adapter) in str(caught.value) for adapter in adapters)
    assert str(which) in str(caught.value)


@pytest.mark.parametrize("which", [1.5, True, ["llvmpipe"]])
def test_an_adapter_is_a_name_or_an_index(webgpu, which):
    with pytest.raises(TypeError, match=r"^device must be a name or an index, got"):
        nf.use_backend("webgpu", device=which)


def test_there_is_one_precision(webgpu):
    with pytest.raises(ValueError, match=r"^precision must be None for the backend 'webgpu'"):
        nf.use_backend("webgpu", precision="tf32")


def test_the_environment_names_the_adapter(adapters, monkeypatch):
    from numfuse.backends.webgpu.device.adapters import choose

    for adapter in adapters:
        monkeypatch.setenv("NUMFUSE_WEBGPU_ADAPTER", str(adapter.number))
        assert str(choose()) == str(adapter)
        monkeypatch.setenv("NUMFUSE_WEBGPU_ADAPTER", adapter.interface)
        assert choose().interface == adapter.interface
    monkeypatch.setenv("NUMFUSE_WEBGPU_ADAPTER", "no such adapter")
    with pytest.raises(nf.BackendUnavailable) as caught:
        choose()
    assert "NUMFUSE_WEBGPU_ADAPTER is 'no such adapter'" in str(caught.value)
    assert all(str(adapter) in str(caught.value) for adapter in adapters)
    assert choose(adapters[0].number).number == adapters[0].number  # an argument goes before


#: Two threads compute on every adapter, beside one that makes devices and one that lists adapters.
LISTING = """
import sys, threading, time
import numpy as np, numfuse as nf
from numfuse.backends.webgpu.device.adapters import choose

end, x, failed = time.monotonic() + 2, np.ones((40, 40), np.float32), []

def in_turn(work):
    try:
        while time.monotonic() < end:
            work()
    except BaseException as error:
        failed.append(error)

def compute(number):
    out = nf.matmul_bias_activation(x, x, backend=nf.use_backend("webgpu", device=number).backend)
    assert (out == 40).all()

works = [lambda: nf.webgpu.adapters()]
for number in map(int, sys.argv[1:]):
    works += [lambda number=number: compute(number)] * 2
    works += [lambda number=number: choose(number).handle.request_device_sync()]
threads = [threading.Thread(target=in_turn, args=(work,)) for work in works]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


def test_adapters_are_listed_while_devices_compute(giving):
    """A list of wgpu's own would end the process in most runs of this, where OpenGL computes."""
    run = subprocess.run(
        [sys.executable, "-c", LISTING, *(str(adapter.number) for adapter in giving)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


def info(**environment):
    run = subprocess.run(
        [sys.executable, "-m", "numfuse", "info"], capture_output=True, text=True, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_info_lists_the_adapters(device, adapters):
    text = info()
    assert all(str(adapter) in text for adapter in adapters)
    assert f"{device.name} ({device.adapter.kind}, {device.adapter.interface})" in text


def test_info_says_why_the_environments_adapter_is_none(adapters):
    text = info(NUMFUSE_WEBGPU_ADAPTER="no such adapter")
    assert "webgpu: not available" in text
    assert "NUMFUSE_WEBGPU_ADAPTER is 'no such adapter'" in text
    assert all(str(adapter) in text for adapter in adapters)


def test_a_device_without_a_dtype_refuses_it(giving):
    """Every adapter has float32; what another one lacks depends on its features."""
    from numfuse.backends.webgpu.device.device import FEATURES

    for adapter in giving:
        with nf.use_backend("webgpu", device=adapter.number) as chosen:
            known = chosen.device.dtypes
            assert "float32" in known and "bfloat16" not in known
            for name, needs in FEATURES.items():
                assert (name in known) == set(needs).issubset(adapter.handle.features)
            for name in DTYPES:
                x = np.ones((3, 3), DTYPES[name])
                if name in known:
                    assert (nf.matmul_bias_activation(x, x) == 3).all()
                    continue
                with pytest.raises(TypeError) as caught:
                    nf.matmul_bias_activation(x, x)
                wanted = f"forward on {adapter.name} must have dtype {', '.join(sorted(known))}"
                assert str(caught.value) == f"{wanted}, got {name}"


# --- tiles --------------------------------------------------------------------------------------

CASES = [(tile, "float32") for tile in tiling.TILES]
CASES += [(tiling.TILES[-1], name) for name in ("float64", "float16")]


@pytest.mark.parametrize("tile,dtype", CASES, ids=lambda x: getattr(x, "block_m", x))
def test_every_tile_reads_factors_of_either_order_by_fours_and_one_by_one(
    device, monkeypatch, tile, dtype
):
    """The tiles of a GPU on whatever device is there, a CPU's driver included."""
    if dtype not in served("webgpu"):
        pytest.skip(f"{device.name} has no {dtype}")
    itemsize = tolerance.accumulator(DTYPES[dtype]).itemsize
    limit = device.limits["max-compute-workgroup-storage-size"]
    if tiling._workgroup_bytes(tile, tile.block_k, itemsize) > limit:
        pytest.skip(f"{device.name} has {limit} bytes of workgroup memory")
    monkeypatch.setattr(tiling, "tile", lambda *_: tile)
    tolerance.vanishing("webgpu", DTYPES[dtype])  # asks the device, at its first use
    made = met(monkeypatch)
    device.hosted.clear()
    # more than one block each way, the last ones in part, and more than one slice of K
    m, n = tile.block_m + 4, tile.block_n + 8
    for sizes in ((m, n, 36), (m - 1, n - 1, 35)):
        grad, a, b, bias = operands(*sizes, dtype)
        # Of a large tile, which a CPU's driver compiles for seconds, each product once.
        assert_layer(grad, a, b, bias, saved=tile is not tiling.TILES[-1])
        assert nf.last_call().tiling == tile
        # A^T B^T: the order that neither the forward nor the backward of contiguous operands has
        columns = [np.asfortranarray(x) for x in (a, b)]
        turned, straight = (
            nf.matmul_bias_activation(
                *factors, bias, "gelu", return_pre_activation=True, backend="webgpu"
            )
            for factors in (columns, (a, b))
        )
        assert same(turned, straight)
    products = [shader for shader in made if getattr(shader, "factors", None)]
    assert {shader.tile for shader in products} == {tile}
    factors = [shader.factors for shader in products]
    orders = {(x.turned, y.turned, x.wide, y.wide) for x, y in factors}
    assert orders >= {
        (x, y, wide, wide) for x in (False, True) for y in (False, True) for wide in (False, True)
    }


@pytest.mark.parametrize("chain", [0, 1, 2, 5])
def test_chains_of_sums_end_anywhere(webgpu, device, monkeypatch, chain):
    """Within a part of K, where one ends or the batch goes on, and nowhere: in so many slices."""
    tile = replace(tiling.TILES[-1], block_k=8)
    monkeypatch.setattr(tiling, "tile", lambda *_: replace(tile, chain=8 * chain))
    device.hosted.clear()
    for sizes in ((33, 34, 8), (33, 34, 41), (1100, 20, 16)):
        assert_layer(*operands(*sizes))
    grad, a, b, bias = (np.stack([x] * 3) for x in operands(9, 10, 20))
    got = nf.matmul_bias_activation_bwd(grad, a, b, bias[0], sum_batch=True, backend="webgpu")
    exact = tolerance.backward(
        grad, a, b, bias[0], "none", a.dtype, backend="webgpu", d_b_shape=b.shape[1:]
    )
    assert_within("d_b", got.d_b, exact.d_b, exact.d_b_error)


@pytest.mark.parametrize("storage", [LEAST_STORAGE, 32768, 49152])
@pytest.mark.parametrize("invocations", [LEAST_INVOCATIONS, 1024])
@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("factors", [1, 2, 3])
def test_a_tile_keeps_the_limits_of_its_device(storage, invocations, itemsize, factors):
    sizes = [1, 33, 300, 1024, 1 << 14]
    found = set()
    for m in sizes:
        for n in sizes:
            tile = tiling.tile(m, n, itemsize, storage, invocations, False, 0, factors)
            assert tile.invocations <= invocations
            assert tiling._workgroup_bytes(tile, tile.block_k, itemsize, factors) <= storage
            assert factors * tile.mr * tile.nr * itemsize <= 512
            assert tile.block_k % 4 == tile.mr % 4 == tile.nr % 4 == 0
            found.add(tile)
            # of a group without sums over rows or columns an invocation has fewer sums
            how = itemsize, storage, invocations, False, 0, factors, True
            bare = tiling.tile(m, n, *how)
            assert tiling._workgroup_bytes(bare, bare.block_k, itemsize, factors) <= storage
            assert bare.block_m <= (tiling.GROUP_ROWS if factors > 1 else tile.block_m)
    assert len(found) > 1 or itemsize * factors > 16  # small results get small tiles


# --- what is kept -------------------------------------------------------------------------------


def test_a_second_call_compiles_nothing_and_makes_no_uniform(device):
    grad, a, b, bias = operands(37, 29, 31)
    first = layer(grad, a, b, bias)
    pipelines, constants = kept(device.pipelines), kept(device.constants)
    assert pipelines and constants
    made = []
    create = device.handle.create_buffer_with_data
    device.handle.create_buffer_with_data = lambda **how: made.append(how) or create(**how)
    try:
        assert same(layer(grad, a, b, bias), first)
    finally:
        del device.handle.create_buffer_with_data
    assert made == []
    assert kept(device.pipelines) == pipelines
    assert kept(device.constants) == constants


def test_a_call_is_one_submit(device):
    grad, a, b, bias = operands(700, 33, 20)  # d_b in parts, joined
    batched = np.stack([a[:50], a[50:100]])
    for call in (
        lambda: nf.matmul_bias_activation(a, b, bias, "silu", backend="webgpu"),
        lambda: nf.matmul_bias_activation_bwd(grad, a, b, bias, "silu", backend="webgpu"),
        lambda: nf.matmul_bias_activation_bwd(
            np.ones((2, 50, 33), np.float32), batched, b, bias, "silu", backend="webgpu"
        ),
        lambda: nf.matmul_bias_residual(a, b, bias, grad, backend="webgpu"),
        lambda: nf.silu_mul(grad, grad, backend="webgpu"),
        lambda: nf.silu_mul_bwd(grad, grad.T.copy().T, grad, backend="webgpu"),
    ):
        before = device.submits
        call()
        assert device.submits == before + 1


def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("where", ["cpu", "webgpu"])
def test_a_thousand_calls_take_no_more_memory_than_a_hundred(device, monkeypatch, where):
    """Arrays of NumPy, and arrays that stay on the device."""
    cases = [
        tuple(nf.to_device(x, where) for x in operands(m, 40, 24, seed=m)) for m in (33, 64, 90)
    ]
    backend = "webgpu" if where == "cpu" else None

    def some(count):
        for i in range(count):
            grad, a, b, bias = cases[i % len(cases)]
            layer(grad, a, b, bias, backend=backend)
            nf.silu_mul(grad, grad, backend=backend)

    # Bind groups that go as soon as they may: those of few buffers would be found again.
    monkeypatch.setattr(device, "groups", Replay(4, 1 << 30))

    def held():
        gc.collect()
        return (
            device.free.nbytes, len(device.free), len(device._live), len(device._staging),
            *map(kept, (device.pipelines, device.constants, device.groups)),
            *map(kept, (device.programs, device.hosted)),
        )  # fmt: skip

    some(100)
    # Less than the smallest of the buffers for each of the calls; a driver may take memory of its
    # own for a while, and a leak takes it every time.
    for _ in range(5):
        before, memory = held(), resident()
        some(350)  # three calls each
        assert held() == before
        grown = resident() - memory
        if grown < 1050 * 256:
            break
    assert grown < 1050 * 256


def test_what_is_compiled_for_a_formula_goes_with_it(device):
    """A redefinition is another formula: pipelines and programs of the one before are dropped."""
    x = np.ones((8, 8), np.float32)
    there = nf.to_device(x, "webgpu")

    def held(k):
        def renewed(t):
            return nf.expr.tanh(k * t)

        nf.activation(renewed)
        nf.activation_mul_bwd(x, x, x, "renewed", backend="webgpu")
        nf.matmul_bias_activation_double_bwd(
            there, there, None, there, there, there, None, "renewed"
        )
        gc.collect()
        return kept(device.pipelines), kept(device.programs), kept(device.hosted)

    before = kept(device.pipelines)
    held(1)  # (the first one of a process keeps less)
    first = held(2)
    assert first[0] > before
    assert held(3) == held(4) == first


@pytest.mark.long
def test_a_buffer_of_a_cycle_comes_back_alive(device):
    """A cycle of garbage ends its members in any order: not the handle before its buffer."""
    for _ in range(20):
        buffer = device.buffer(12345)
        cycle = [buffer]
        cycle.append(cycle)
        del buffer, cycle
        gc.collect()
        grad, a, b, bias = operands(40, 77, 3)  # results of nearly that size
        assert_layer(grad, a, b, bias, "none")
        handle = device.buffer(12345).handle
        device.queue.write_buffer(handle, 0, np.zeros(4, np.uint8))


def test_giving_the_pool_back_is_harmless(device):
    case = operands(37, 29, 31)
    first = layer(*case)
    device.trim()
    assert device.free.nbytes == len(device.free) == 0
    assert same(layer(*case), first)


# --- threads ------------------------------------------------------------------------------------


def test_calls_from_several_threads_give_what_one_gives(webgpu):
    shapes = [(33, 20, 17), (64, 64, 64), (5, 90, 31), (41, 41, 130)]
    cases = [operands(*shape, seed=i) for i, shape in enumerate(shapes)]
    wanted = [layer(*case, "tanh") for case in cases]
    wrong, start = [], threading.Barrier(len(cases))

    def work(i):
        try:
            start.wait()
            for turn in range(12):
                j = (i + turn) % len(cases)
                # a kernel of this thread's own every now and then, compiled beside the others' work
                own = nf.silu_mul(*cases[j][:1] * 2, backend="webgpu") if turn == i else None
                if not same(layer(*cases[j], "tanh"), wanted[j]):
                    wrong.append((i, turn))
                if own is not None and not np.isfinite(own).all():
                    wrong.append((i, "gate"))
        except BaseException as error:
            wrong.append((i, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text.replace("fn main(", "fn main(("),
        lambda text: text.replace("@binding(1)", "@binding(7)"),
        lambda text: text.replace("fn main(", "fn other("),
    ],
    ids=["syntax", "binding", "entry point"],
)
def test_a_kernel_that_does_not_compile_is_named_and_the_next_call_works(
    device, monkeypatch, broken
):
    from numfuse.backends.webgpu.shaders.epilogues import Gemm

    grad, a, b, _ = operands(34, 35, 36)
    out = np.full((34, 35), np.nan, np.float32)
    text = Gemm.text
    with monkeypatch.context() as patch:
        patch.setattr(device, "pipelines", Replay(100, 1))
        device.hosted.clear()
        patch.setattr(Gemm, "text", lambda shader: broken(text(shader)))
        with pytest.raises(nf.DeviceError, match=f"^{device.name.split('(')[0]}") as caught:
            nf.matmul_bias_residual(a, b, None, grad, out=out, backend="webgpu")
    assert "refused 'gemm residual layer f32" in str(caught.value)
    assert not isinstance(caught.value, nf.DeviceLost)
    assert np.isnan(out).all()
    got = nf.matmul_bias_residual(a, b, None, grad, out=out, backend="webgpu")
    wanted = tolerance.forward(a, b, None, "none", a.dtype, grad, backend="webgpu")
    assert_within("out", got, wanted.out, wanted.out_error)


def test_memory_that_a_device_does_not_have_is_a_memory_error(device, monkeypatch):
    import wgpu

    case = operands(34, 35, 36)
    wanted = layer(*case)

    def refuse(**how):
        raise wgpu.GPUOutOfMemoryError("Not enough memory left")

    device.trim()
    with monkeypatch.context() as patch:
        patch.setattr(device.handle, "create_buffer", refuse)
        with pytest.raises(MemoryError, match=r"is out of memory in 'buffer of \d+ bytes'"):
            layer(*case)
    assert same(layer(*case), wanted)


def test_a_buffer_beyond_the_limit_is_an_error_that_says_so(device):
    size = device.buffer_limit + 1
    with pytest.raises(ValueError) as caught:
        device.buffer(size, "an operand")
    assert str(caught.value) == (
        f"an operand must have at most max-buffer-size = {device.buffer_limit} bytes on "
        f"{device.name}, got {size}"
    )


def test_after_a_lost_device_numpy_arrays_go_on_and_its_own_are_gone(webgpu):
    case = operands(34, 35, 36)
    wanted = layer(*case)
    kept = nf.to_device(case[1], "webgpu")
    lost = webgpu.device
    lost.handle.destroy()
    with pytest.raises(nf.DeviceLost, match="is lost"):
        for _ in range(2):  # it may be noticed at once, or at the next use
            layer(*case)
    assert lost.lost
    assert same(layer(*case), wanted)
    assert webgpu.device is not lost and str(webgpu.device.adapter) == str(lost.adapter)
    with pytest.raises(nf.DeviceLost, match=r"was on .*: it is lost"):
        nf.to_numpy(kept)
    del kept  # its buffer is no longer anybody's
    assert same(layer(*case), wanted)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "tanh"])
def test_every_nan_is_found_by_its_bits(device, activation, dtype):
    """Quiet and signalling, of either sign, any payload: a compiler may assume there is none."""
    if dtype not in served("webgpu"):
        pytest.skip(f"{device.name} has no {dtype}")
    dtype = DTYPES[dtype]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    infinity = int(np.array(np.inf, dtype).view(unsigned))
    sign, quiet = 1 << (8 * dtype.itemsize - 1), 1 << (np.finfo(dtype).nmant - 1)
    patterns = [infinity | payload for payload in (1, 2, quiet, quiet | 1, quiet - 1)]
    patterns += [sign - 1]
    patterns += [sign | pattern for pattern in patterns]
    nan = np.array(patterns * 3, unsigned).view(dtype)
    assert np.isnan(nan).all()
    one = np.ones_like(nan)
    column, unit = nan[:, None], np.ones((1, 1), dtype)
    assert np.isnan(nf.activation_mul(nan, one, activation, backend="webgpu")).all()
    out, pre = nf.matmul_bias_activation(
        column, unit, None, activation, return_pre_activation=True, backend="webgpu"
    )
    assert np.isnan(out).all() and np.isnan(pre).all()
    at_nan = {"none": 1, "relu": 0}.get(activation)  # constant slopes
    for guard in (True, False):
        how = {"guard": guard, "backend": "webgpu"}
        gated = nf.activation_mul_bwd(one, nan, one, activation, **how)
        fused = nf.matmul_bias_activation_bwd(
            one[:, None], column, unit, None, activation, needs=("a",), **how
        )
        for slope in (gated.d_a, fused.d_a[:, 0]):
            if at_nan is None and not guard:
                assert np.isnan(slope).all()
            else:
                assert (slope == (at_nan or 0)).all()
        assert np.isnan(gated.d_b).all()
        # in grad and in the other operand a NaN is no matter of the guard
        assert np.isnan(nf.activation_mul_bwd(nan, one, one, activation, **how).d_a).all()


def test_the_order_of_the_sums_is_the_same_every_time(webgpu):
    case = operands(1500, 20, 24)  # d_b in parts, and d_bias in two stages
    first = layer(*case)
    assert all(same(layer(*case), first) for _ in range(5))


def test_no_compiler_chooses_whether_a_product_and_its_sum_are_one(webgpu, monkeypatch):
    """WGSL leaves it open, and NVIDIA's compiler chooses by what else needs the product.

    So the bits of a gradient would depend on which others are asked for. Those of this device may
    not: what is looked at is the text of the kernels.
    """
    shaders = met(monkeypatch)
    webgpu.device.hosted.clear()
    grad, a, b, bias = operands(5, 4, 3)
    for needs in (("bias",), ("a", "b", "bias")):
        nf.matmul_bias_activation_bwd(grad, a, b, bias, "gelu", needs=needs, backend="webgpu")
    for needs in (("grad",), ("grad", "a", "b")):
        nf.activation_mul_double_bwd(a, a, a, a, a, "silu", needs=needs, backend="webgpu")
    assert {s.label.split()[0] for s in shaders} >= {"gemm", "join", "elementwise"}
    sums = 0
    for shader in shaders:
        text = shader.text()
        if "fn epilogue" not in text:
            continue
        # an operation a line, each with a name of its own
        lines = text[text.index("fn epilogue") : text.index("@compute")].splitlines()
        products = {line.split()[1] for line in lines if " * " in line}
        for line in lines:
            sums += "fma(" in line
            terms = set(re.findall(r"\w+", line)) if re.search(r" [+-] ", line) else set()
            assert not terms & products, (shader.label, line)
    assert sums


# --- a fork -------------------------------------------------------------------------------------

#: A parent that holds all kinds of objects, and its children. Each has an exit status of its own.
FORKS = """
import gc, multiprocessing, os, signal, sys, threading
import numpy as np
import numfuse as nf
from numfuse.backends import resolve

a = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
wanted = nf.silu_mul(a, a)
x = nf.to_device(a, "webgpu")
y = nf.matmul_bias_activation(x, x)
shaders, backend = nf.webgpu.reference_shaders(), resolve("webgpu")
nf.silu_mul(a, a, backend=shaders)
cycle = [nf.to_device(a, "webgpu")]
cycle.append(cycle)
held = threading.Event()
def hold():  # a thread that is in the middle of something is not there in a child
    with backend._lock, backend.device._lock, backend.device.free._lock:
        held.set()
        threading.Event().wait()

def refused(call):
    try:
        call()
    except nf.BackendUnavailable as error:
        assert "forked after WebGPU had begun" in str(error) and "'spawn'" in str(error), error
    else:
        raise AssertionError("no error")

def calls():
    refused(lambda: nf.silu_mul(a, a, backend="webgpu"))
    refused(lambda: nf.silu_mul(a, a, backend=backend))
    refused(lambda: nf.silu_mul(a, a, backend=shaders))
    refused(lambda: nf.silu_mul(x, x))
    refused(lambda: nf.matmul_bias_activation(x, x, out=y))
    refused(lambda: nf.to_numpy(x[1:]))
    refused(lambda: nf.synchronize(x))
    refused(lambda: nf.to_device(a, "webgpu"))
    refused(nf.webgpu.adapters)
    refused(lambda: nf.webgpu.load_shaders("fn f() {}"))
    refused(lambda: nf.use_backend("webgpu", device=0))
    assert not nf.backends()["webgpu"] and "forked" in str(nf.backends()["webgpu"])
    assert (nf.silu_mul(a, a) == wanted).all()

def collected():
    global x, y, cycle, shaders, backend
    x = y = cycle = shaders = backend = None
    gc.collect()

def child(what, leave):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # to hang is to fail
        what()
        leave(7)
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)

def nested(status):
    assert child(calls, sys.exit) == 7
    sys.exit(status)

for what in (lambda: None, calls, collected):
    for leave in (sys.exit, os._exit):
        assert child(what, leave) == 7, (what, leave)
assert child(lambda: None, nested) == 7
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.apply(calls) is None
    pool.close()
    pool.join()
# The parent's own is all there.
assert (nf.to_numpy(x) == a).all() and nf.to_numpy(nf.silu_mul(x, y)).shape == (8, 8)
for chosen in ("webgpu", shaders):
    assert np.allclose(nf.silu_mul(a, a, backend=chosen), wanted, 1e-5)
threading.Thread(target=hold, daemon=True).start()
held.wait()
assert child(calls, sys.exit) == child(collected, sys.exit) == 7
"""
FORKING = once.Process(lambda _: [sys.executable, "-c", FORKS], timeout=240)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.long
def test_a_forked_child_is_told_to_use_spawn_and_ends_like_any_other(device):
    """Calls are refused at once, with arrays and objects of the parent too; the CPU computes; what
    the parent made may be collected; and the process ends by itself, with its exit status."""
    done = FORKING.result()
    assert done.returncode == 0, done.stderr[-3000:]
