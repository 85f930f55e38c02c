"""JAX's compiled calls: machine code in XLA's threads, callbacks to Python in its place."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading

import numpy as np
import once
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

import numfuse as nf  # noqa: E402
from numfuse.adapters import jax as adapter  # noqa: E402
from numfuse.adapters.jax import ffi, operations, table  # noqa: E402
from numfuse.adapters.jax.operations import Form  # noqa: E402
from numfuse.adapters.primitives import PRIMITIVES, How  # noqa: E402


@pytest.fixture(autouse=True)
def double_precision():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def draw(*shapes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def layer(*x):
    return nf.matmul_bias_activation(*x, "gelu")


def lowered(function, *x):
    """The text of what XLA is given."""
    return jax.jit(function).lower(*x).as_text()


def test_info_tells_that_machine_code_is_called(capsys):
    assert ffi.refusal() is None
    assert adapter.describe().startswith("machine code (XLA's FFI 0.")
    from numfuse.cli import info

    assert info.collect()["jax"] == adapter.describe()


#: How each operation is called: its kinds of operands in JAX's order.
SHAPES = {"a": (9, 5), "b": (5, 7), "c": (7,), "r": (7,), "o": (9, 7), "e": (6, 3)}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_operation_is_one_custom_call_with_the_bits_of_numpy(name, dtype):
    operation = PRIMITIVES[name]
    act = nf.activations()["none" if name == "residual" else "gelu"]
    how = How(act, operation.names or ())
    x = draw(*(SHAPES[kind] for kind in operation.ordered_kinds), dtype=dtype)
    form = Form(how, (True,) * len(x))

    def call(*x):
        from numfuse.adapters.jax.primitives import call

        return call(name, how, x)

    text = lowered(call, *x)
    assert text.count(ffi.TARGET) == 1 and "callback" not in text
    wanted = operations.on_host(operation, form, [np.asarray(one) for one in x])
    for left, right in zip(jax.jit(call)(*x), wanted, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("rows", [0, 1, 37, 1000])
def test_sizes_with_no_elements_with_temporaries_and_for_several_threads(rows):
    """Blocks of rows, sums in the accumulator's dtype, and helpers of XLA's pool."""
    x, w, c = draw((rows, 600), (600, 300), (300,), dtype="bfloat16")

    def loss(x, w, c):
        return jnp.sum(layer(x, w, c).astype("float32") ** 2)

    gradients = jax.grad(loss, (0, 1, 2))
    assert "callback" not in lowered(gradients, x, w, c)
    grad = (2 * layer(x, w, c).astype("float32")).astype("bfloat16")
    wanted = nf.matmul_bias_activation_bwd(*map(np.asarray, (grad, x, w, c)), "gelu")
    # XLA has its threads flush subnormal numbers to zero; all others have the same bits
    tiny = float(jnp.finfo("bfloat16").tiny)
    for left, right in zip(jax.jit(gradients)(x, w, c), wanted, strict=True):
        flushed = np.where(abs(right.astype(np.float32)) < tiny, 0, right)
        kept = np.where(abs(np.asarray(left, np.float32)) < tiny, 0, left)
        np.testing.assert_array_equal(kept, flushed)


def test_many_threads_at_once_have_memory_of_their_own():
    """Eight threads, with large and small calls, each of which waits for nobody's workspace."""
    x, w, c = draw((400, 256), (256, 256), (256,))
    f = jax.jit(jax.grad(lambda *z: jnp.sum(layer(*z) ** 2), (0, 1, 2)))
    given = [(x[: 50 * (i + 1)] * i, w, c) for i in range(8)]
    wanted = [[np.asarray(y) for y in f(*z)] for z in given]
    wrong = []

    def work(i):
        for _ in range(20):
            for left, right in zip(f(*given[i]), wanted[i], strict=True):
                if not np.array_equal(left, right):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_scan_vmap_and_donation_are_without_callbacks():
    x, w, c = draw((6, 4), (4, 4), (4,))
    plain = lambda x, w, c: jax.nn.gelu(x @ w + c)  # noqa: E731

    def of(f):
        def body(h, _):
            h = f(h, w, c)
            return h, jnp.sum(h)

        return lambda x: jax.lax.scan(body, x, length=5)

    assert "callback" not in lowered(of(layer), x)
    for left, right in zip(jax.jit(of(layer))(x), of(plain)(x), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)
    per_row = jax.vmap(jax.grad(lambda x, w: jnp.sum(layer(x, w, c))), (0, None))
    assert "callback" not in lowered(per_row, x, w)
    wanted = jax.vmap(jax.grad(lambda x, w: jnp.sum(plain(x, w, c))), (0, None))(x, w)
    np.testing.assert_allclose(jax.jit(per_row)(x, w), wanted, rtol=1e-12, atol=1e-12)
    step = jax.jit(layer, donate_argnums=0)
    given, wanted = x + 0, layer(x, w, c)
    np.testing.assert_allclose(step(given, w, c), wanted, rtol=1e-14)
    assert given.is_deleted()


def test_arrays_that_are_there_are_compiled_for_when_they_come_again(monkeypatch):
    """Guards: an eager call costs what one of JAX's own does, and a single one no compilation."""
    x, w, c = draw((3, 11), (11, 5), (5,), seed=3)
    calls = []
    call = operations.Call
    host = call.on_host
    monkeypatch.setattr(call, "on_host", lambda *z: calls.append(z) or host(*z))
    first, second, third = (layer(x, w, c) for _ in range(3))
    assert len(calls) == 1
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    with jax.disable_jit():
        np.testing.assert_array_equal(layer(x, w, c), first)
    with nf.use_backend("reference"):
        layer(x, w, c)
    assert len(calls) == 3


def test_a_call_on_another_backend_goes_back_to_python():
    x, w, c = draw((3, 2), (2, 4), (4,))
    f = lambda *x: nf.matmul_bias_activation(*x, "gelu", backend="reference")  # noqa: E731
    assert "callback" in lowered(f, x, w, c)
    np.testing.assert_allclose(jax.jit(f)(x, w, c), layer(x, w, c), rtol=1e-14)


def test_a_dropped_program_is_recorded_again_from_its_description():
    x, w, c = draw((3, 13), (13, 4), (4,))
    f = jax.jit(layer)
    wanted = np.asarray(f(x, w, c))
    before = table.records().statistics().entries
    table.records().clear()
    gc.collect()
    assert table.records().statistics().entries == 0 < before
    np.testing.assert_array_equal(f(x, w, c), wanted)
    assert table.records().statistics().entries == 1


def test_a_formula_of_the_users_goes_and_its_compiled_calls_stay():
    x, w = draw((3, 2), (2, 4))

    def compiled_for(act):
        f = jax.jit(lambda x, w: nf.matmul_bias_activation(x, w, None, act))
        return f.lower(x, w).compile()

    compiled = compiled_for(nf.activation(lambda x: x * x + 1, name="of_one_test"))
    np.testing.assert_allclose(compiled(x, w), (x @ w) ** 2 + 1, rtol=1e-14)
    nf.activation(lambda x: x + 3, name="of_one_test")
    table.records().clear()
    gc.collect()
    np.testing.assert_allclose(compiled(x, w), (x @ w) ** 2 + 1, rtol=1e-14)


def test_the_table_is_thinned_out_where_keys_lead_nowhere(monkeypatch):
    """Guards: a process that compiles for ever has a table that finds what is there."""
    x, w, c = draw((3, 17), (17, 4), (4,))
    f = jax.jit(layer)
    wanted = np.asarray(f(x, w, c))
    for key in range(1, table.PLACES // 2 + 8):
        table.insert(key * 7919, 0)
    for n in range(3):
        jax.jit(layer).lower(x[: n + 1], w, c)
    np.testing.assert_array_equal(f(x, w, c), wanted)


def test_a_description_that_says_nothing_is_an_error_of_xla():
    x, _ = draw((3, 2), (2, 4))
    call = jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct((3, 2), x.dtype))
    with pytest.raises(Exception, match="numfuse: a call cannot be made again from its desc"):
        jax.jit(lambda x: call(x, key=np.int64(5), what="[]"))(x).block_until_ready()


# --- processes of their own -----------------------------------------------------------------------
_CACHED = """
import json, logging, sys
import jax, jax.numpy as jnp, numpy as np, numfuse as nf
from numfuse.adapters.jax import ffi
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
twice = nf.activation(lambda x: 2 * x, name="twice")
def f(x, w):
    return nf.matmul_bias_activation(nf.matmul_bias_activation(x, w, None, "tanh"), w, None, twice)
x = jnp.asarray(np.arange(12.0).reshape(3, 4) / 12, "float32")
w = jnp.asarray(np.arange(16.0).reshape(4, 4) / 16, "float32")
compiled = jax.jit(f)
out = compiled(x, w)
print(json.dumps([
    any("cache_hits" in name for name in hits),
    np.asarray(out).tolist(),
    "callback" in compiled.lower(x, w).as_text(),
    nf.activations().keys() >= {"twice"},
]))
"""


FIRST = once.Process(lambda place: [sys.executable, "-c", _CACHED, str(place)])
SECOND = once.Process(lambda _: [sys.executable, "-c", _CACHED, str(FIRST.directory)])


@pytest.mark.long
def test_two_processes_share_a_compilation_cache():
    found = [json.loads(process.result().stdout) for process in (FIRST, SECOND)]
    assert [hit for hit, *_ in found] == [False, True]
    assert found[0][1:] == found[1][1:] and not found[0][2]


#: As if jaxlib were of another time.
_FALLBACK = """
import sys, pathlib, jax, jax.ffi
place = pathlib.Path(sys.argv[1], "xla", "ffi", "api")
place.mkdir(parents=True)
text = "#define XLA_FFI_API_MAJOR 9\\n#define XLA_FFI_API_MINOR 1\\n"
(place / "c_api.h").write_text(text)
jax.ffi.include_dir = lambda: sys.argv[1]
import jax.numpy as jnp, numpy as np, numfuse as nf
from numfuse.adapters.jax import describe
f = jax.jit(lambda x: nf.matmul_bias_activation(x, x, None, "tanh"))
x = jnp.ones((3, 3)) / 3
np.testing.assert_allclose(f(x), jnp.tanh(x @ x), rtol=1e-6)
for _ in range(3):
    np.testing.assert_allclose(nf.activation_mul(x, x, "tanh"), jnp.tanh(x) * x, rtol=1e-6)
print("callback" in f.lower(x).as_text(), describe())
"""


FALLBACK = once.Process(lambda place: [sys.executable, "-c", _FALLBACK, str(place)])


@pytest.mark.long
def test_another_version_of_the_interface_is_called_back_from():
    run = FALLBACK.result()
    assert run.stdout.startswith("True callbacks to Python (XLA's FFI must have version"), (
        run.stderr
    )
    assert "got 9.1" in run.stdout


#: What runs when the interpreter ends.
_END = """
import jax, jax.numpy as jnp, numfuse as nf
f = jax.jit(lambda x: jax.lax.fori_loop(
    0, 20, lambda _, x: nf.matmul_bias_activation(x, x, None, "tanh"), x))
f(jnp.ones((8, 8), "float32")).block_until_ready()
out = f(jnp.ones((700, 700), "float32"))
print("ends", flush=True)
"""


END = once.Process(lambda _: [sys.executable, "-c", _END])


@pytest.mark.long
def test_a_process_ends_while_a_computation_runs():
    run = END.result()
    assert (run.returncode, run.stdout) == (0, "ends\n"), run.stderr[-2000:]


# --- CUDA, as far as no device is needed ----------------------------------------------------------
class _Xla:
    """A call frame of XLA's on CUDA, and what is asked of XLA, written down."""

    def __init__(self, key, what, operands, results):
        self.log, self.kept = [], []
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
        self.api = self.words(*[0] * 24)
        for number, function in {
            6: self.failed, 10: self.stream, 15: self.allocate, 16: self.free,
        }.items():  # fmt: skip
            made = kind(function)
            self.kept.append(made)
            self.api[number] = ctypes.cast(made, ctypes.c_void_p).value
        buffers = [
            [ctypes.addressof(self.words(48, 0, 11, at, 0, 0)) for at in some]
            for some in (operands, results)
        ]
        text = ctypes.create_string_buffer(what.encode())
        self.kept.append(text)
        scalar = self.words(5, ctypes.addressof(self.words(key)))
        span = self.words(ctypes.addressof(text), len(what))
        attributes = self.words(ctypes.addressof(scalar), ctypes.addressof(span))
        lists = [ctypes.addressof(self.words(*some)) for some in buffers]
        lists.append(ctypes.addressof(attributes))
        self.frame = self.words(168, 0, ctypes.addressof(self.api), 4711, 3, *[0] * 17)
        self.frame[9], self.frame[14], self.frame[20] = lists

    def words(self, *values):
        made = (ctypes.c_int64 * max(1, len(values)))(*values)
        self.kept.append(made)
        return made

    def stream(self, about):
        about = (ctypes.c_int64 * 4).from_address(about)
        assert (about[0], about[2]) == (32, 4711)
        about[3] = 55
        return 0

    def allocate(self, about):
        about = (ctypes.c_int64 * 6).from_address(about)
        assert (about[0], about[2]) == (48, 4711)
        self.log.append(("allocate", about[3], about[4]))
        about[5] = 1_000_016
        return 0

    def free(self, about):
        about = (ctypes.c_int64 * 5).from_address(about)
        assert (about[0], about[2]) == (40, 4711)
        self.log.append(("free", about[3], about[4]))
        return 0

    def failed(self, about):
        about = (ctypes.c_int64 * 4).from_address(about)
        self.log.append(ctypes.string_at(about[2]).decode())
        return about[3] & 0xFFFFFFFF


def test_on_cuda_xlas_stream_gets_the_launches_with_the_addresses_of_its_buffers():
    """Guards: what JAX computes on a GPU; here the driver and XLA are functions of the test."""
    from numfuse.adapters.jax import frame
    from numfuse.backends.cuda.driver import launcher

    assert ffi.refusal() is None
    log = []

    def get_device(where):
        ctypes.c_int.from_address(where).value = 2
        return 0

    def launch(config, handle, arguments, extra):
        stream = ctypes.c_int64.from_address(config + launcher.STREAM_OFFSET).value
        given = list((ctypes.c_int64 * 4).from_address(arguments))
        log.append((handle, stream, given))
        return 7 if handle == 13 else 0

    integer = ctypes.c_int64
    kinds = {n: ctypes.CFUNCTYPE(ctypes.c_int32, *[integer] * n) for n in (1, 2, 4)}
    nothing = kinds[1](lambda where: 0)
    functions = kinds[4](launch), nothing, nothing
    entry = lambda f: ctypes.cast(f, ctypes.c_void_p).value  # noqa: E731
    asked = kinds[1](get_device)
    handler = frame.handler(launcher.inlined())
    call = ctypes.CFUNCTYPE(integer, integer)(handler.address)
    root = table.root({"R_DEVICE": entry(asked), "R_NOT_LAUNCHED": table.message("refused")})
    xla = _Xla(99, "[]", [100, 200], [300])
    call(ctypes.addressof(xla.words(-1, root)))

    def record(key, handle, size):
        """Two addresses of XLA's, one of memory, and the second base: as arguments of a launch."""
        arguments = xla.words(0, 0, 0, 0)
        config = xla.words(*[0] * 8)
        at = ctypes.addressof(arguments)
        launches = xla.words(ctypes.addressof(config), handle, at)
        updates = xla.words(at, 2, 8, at + 8, 4, 0, at + 16, 5, 0, at + 24, 1, 0)
        bases = xla.words(*[0] * 6)
        named = dict(
            zip(("LAUNCH", "GET_CURRENT", "SET_CURRENT"), map(entry, functions), strict=True)
        )
        named |= {"LAUNCH_COUNT": 1, "LAUNCHES": ctypes.addressof(launches)}
        named |= {"UPDATE_COUNT": 4, "UPDATES": ctypes.addressof(updates)}
        named["BASES"] = ctypes.addressof(bases)
        plan = xla.words(*[named.get(name, 0) for name in launcher.PLAN])
        head = {"C_SIZE": size, "C_WORK": 64, "C_PLAN": ctypes.addressof(plan),
                "C_BASES": ctypes.addressof(bases), "C_ARRAYS": 4}  # fmt: skip
        source = frame.SOURCE
        sources = [
            0 << 2 | source["OPERAND"], 1 << 2 | source["OPERAND"], 0 << 2 | source["RESULT"],
            512 << 2 | source["MEMORY"],
        ]  # fmt: skip
        words = xla.words(*frame.ON_STREAM.words(head), *sources)
        table.insert(key ^ 3 << frame.DEVICE_BITS, ctypes.addressof(words))

    record(99, 12, 1000)
    assert call(ctypes.addressof(xla.frame)) == 0
    base = 1_000_192  # the next multiple of 256
    assert log == [(12, 55, [108, 300, base + 512, base + 64])]
    assert xla.log == [("allocate", 1256, 16), ("free", 1256, 1_000_016)]
    # without memory; and where the driver refuses
    record(99, 13, 0)
    xla.log.clear()
    assert call(ctypes.addressof(xla.frame)) == 13
    assert xla.log == ["refused"] and len(log) == 2
    # a key that leads nowhere, with a description that says nothing
    table.insert(99 ^ 3 << frame.DEVICE_BITS, 0)
    assert call(ctypes.addressof(xla.frame)) == 9
    assert "cannot be made again" in xla.log[-1]


def test_on_cuda_without_a_device_there_is_a_clear_error():
    if nf.backends()["cuda"].available:
        pytest.skip("there is a device")
    x = jnp.ones((2, 2))
    traced = jax.jit(lambda x: nf.matmul_bias_activation(x, x)).trace(x)
    with pytest.raises(TypeError, match=r"must run on the CPU .* no kernel can be launched there"):
        traced.lower(lowering_platforms=("cuda",))
