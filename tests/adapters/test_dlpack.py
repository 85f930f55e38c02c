"""Arrays of other libraries by DLPack and the array API standard: taken, given, let go of once.

`Old` and `New` write the structures of dlpack.h by hand: what numfuse reads is not what it wrote.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
from arrays import NUMPY_KNOWS_DLPACK_1
from conftest import unavailable

import numfuse as nf
from numfuse.runtime import dispatch, dlpack

DTYPES = {
    "float64": (np.float64, 2, 64), "float32": (np.float32, 2, 32),
    "float16": (np.float16, 2, 16), "bfloat16": (ml_dtypes.bfloat16, 4, 16),
}  # fmt: skip
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Old:
    """An array that has DLPack alone, as it was before version 1."""

    versioned = False

    def __init__(
        self, x, *, version=(1, 0), flags=0, device=(1, 0), kind=None, lanes=1, strides=True
    ):
        self.x, self.version, self.flags, self.device = x, version, flags, device
        self.kind, self.lanes, self.strides = kind or DTYPES[x.dtype.name][1:], lanes, strides
        self.asked, self.deleted, self._alive = [], [], []

    def capsule(self):
        x, (code, bits) = self.x, self.kind
        shape = (ctypes.c_int64 * max(1, x.ndim))(*x.shape)
        steps = (ctypes.c_int64 * max(1, x.ndim))(*[s // x.itemsize for s in x.strides])
        at = ctypes.addressof(steps) if self.strides else 0
        data = 0 if self.kind == "nothing" else x.__array_interface__["data"][0]
        tensor = struct.pack(
            "=QiiiBBHQQQ", data, *self.device, x.ndim, code, bits, self.lanes,
            ctypes.addressof(shape), at, 0,
        )  # fmt: skip
        deleter = _DELETER(self.deleted.append)
        where = ctypes.cast(deleter, ctypes.c_void_p).value
        if self.versioned:
            raw = struct.pack("=IIQQQ", *self.version, 0, where, self.flags) + tensor
        else:
            raw = tensor + struct.pack("=QQ", 0, where)
        memory = ctypes.create_string_buffer(raw, len(raw))
        self._alive.append((shape, steps, deleter, memory))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(memory), name, None)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        self.asked.append({"stream": stream})
        return self.capsule()


class New(Old):
    """An array that has DLPack alone, of version 1."""

    versioned = True

    def __dlpack__(self, **asked):
        self.asked.append(asked)
        return self.capsule()


@pytest.fixture(autouse=True)
def _reference():
    # How arrays come and go depends on no backend: the slow one needs no compilation.
    with nf.use_backend("reference"):
        yield


def rng(*shape, dtype=np.float64):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


# --- arrays that have DLPack alone ----------------------------------------------------------------
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", [Old, New])
def test_an_array_that_has_dlpack_is_an_operand_and_is_let_go_of_once(kind, name):
    x = [rng(5, 4, dtype=DTYPES[name][0]), rng(3, 4, dtype=DTYPES[name][0]).T, rng(3)[::-1]]
    x[2] = x[2].astype(DTYPES[name][0])
    given = [kind(y) for y in x]
    found = nf.matmul_bias_activation(*given, "tanh")
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, nf.matmul_bias_activation(*x, "tanh"))
    gc.collect()
    assert [len(y.deleted) for y in given] == [1, 1, 1]
    asked = {"max_version": dlpack.VERSION} if kind is New else {"stream": None}
    assert [y.asked for y in given] == [[asked]] * 3


def test_strides_may_be_left_out():
    x = rng(4, 3)
    np.testing.assert_array_equal(nf.silu_mul(Old(x, strides=False), Old(x)), nf.silu_mul(x, x))


def test_numpy_stands_beside_what_has_dlpack_alone():
    x = rng(4, 3)
    found = nf.silu_mul(x, New(x))
    np.testing.assert_array_equal(found, nf.silu_mul(x, x))


def test_a_method_that_says_the_device_may_be_missing():
    x = New(rng(3, 3))
    bare = type("Bare", (), {"__dlpack__": lambda self, **how: x.__dlpack__(**how)})()
    np.testing.assert_array_equal(nf.silu_mul(bare, bare), nf.silu_mul(x.x, x.x))
    x.device = (15, 0)
    with pytest.raises(TypeError, match="a must be in the host's memory, got an array on WebGPU"):
        nf.silu_mul(bare, bare)


@pytest.mark.parametrize("kind", [Old, New])
def test_an_output_is_written_where_it_is(kind):
    x = rng(4, 3)
    out = kind(np.full((4, 3), np.nan))
    assert nf.silu_mul(kind(x), kind(x), out=out) is out
    np.testing.assert_array_equal(out.x, nf.silu_mul(x, x))
    gc.collect()
    assert len(out.deleted) == 1
    if kind is New:
        assert out.asked == [{"max_version": dlpack.VERSION, "copy": False}]


def test_an_output_that_may_not_be_written_or_is_a_copy_is_refused():
    x = rng(4, 3)
    for out, error, message in (
        (New(np.empty((4, 3)), flags=1), ValueError, "out must be writable, got a read-only array"),
        (
            New(np.empty((4, 3)), flags=2),
            TypeError,
            "out must be exported by DLPack without a copy",
        ),
        (Old(np.empty((4, 2))), ValueError, r"out must have shape \(4, 3\), got \(4, 2\)"),
    ):
        with pytest.raises(error, match=message):
            nf.silu_mul(New(x, flags=1), New(x, flags=2), out=out)
        gc.collect()
        assert len(out.deleted) == 1


def test_an_output_may_not_overlap_an_operand():
    x = rng(4, 3)
    with pytest.raises(ValueError, match="must be exactly a or apart from it"):
        nf.silu_mul(New(x[1:]), New(x[1:].copy()), out=New(x[:-1]))


_WRONG = [
    ({"kind": (0, 32)}, "a must have dtype float64, float32, float16 or bfloat16, got int32"),
    ({"kind": (5, 64)}, "got complex64"),
    ({"kind": (2, 64), "lanes": 4}, "got float64 in vectors of 4"),
    ({"kind": (17, 4)}, "got type code 17 of 4"),
    ({"version": (2, 7)}, r"a must be exported by DLPack 1\.x, got version 2\.7"),
]


@pytest.mark.parametrize(("how", "message"), _WRONG)
def test_what_no_function_reads_is_refused_and_let_go_of_once(how, message):
    given = New(rng(4, 3), **how)
    with pytest.raises(TypeError, match=message):
        nf.silu_mul(given, given)
    gc.collect()
    assert len(given.deleted) == 1


def test_elements_without_memory_are_refused_and_no_elements_are_none():
    class Nothing(New):
        def capsule(self):
            made = super().capsule()
            ctypes.memset(ctypes.addressof(self._alive[-1][-1]) + 32, 0, 8)  # DLTensor.data
            return made

    x = rng(4, 3)
    with pytest.raises(ValueError, match=r"a must have memory, got shape \(4, 3\) at no address"):
        nf.silu_mul(Nothing(x), Nothing(x))
    assert nf.silu_mul(Nothing(x[:0]), Nothing(x[:0])).shape == (0, 3)


@pytest.mark.parametrize(
    ("device", "told"),
    [((15, 0), "WebGPU"), ((14, 0), "oneAPI"), ((10, 1), "ROCm"), ((99, 0), "an unknown device")],
)
def test_a_device_that_numfuse_has_no_backend_for_is_named(device, told):
    x = New(rng(4, 3), device=device)
    wanted = f"a must be in the host's memory or on a CUDA device, got .*New on {told}"
    with pytest.raises(TypeError, match=wanted):
        nf.silu_mul(x, x)
    assert not x.asked


def test_a_capsule_that_was_taken_is_refused():
    x = New(rng(4, 3))
    once = x.capsule()
    x.capsule = lambda: once
    with pytest.raises(TypeError, match=r"b must give a new capsule .* got one 'used_dltensor_"):
        nf.silu_mul(x, x)
    gc.collect()
    assert len(x.deleted) == 1
    x.capsule = lambda: 3
    with pytest.raises(TypeError, match="a must give a capsule by __dlpack__, got int"):
        nf.silu_mul(x, x)


def test_the_refusal_of_a_library_is_told():
    class Refuses(New):
        def capsule(self):
            raise BufferError("it requires a gradient")

    x = Refuses(rng(4, 3))
    wanted = r"a must be exported by DLPack, which .*Refuses refuses: it requires a gradient"
    with pytest.raises(TypeError, match=wanted):
        nf.silu_mul(x, x)


@pytest.mark.parametrize("root", ["tensorflow", "mlx"])
def test_a_library_whose_gradient_would_be_lost_is_refused(root):
    x = New(rng(4, 3))
    theirs = type("Array", (New,), {"__module__": f"{root}.core"})(x.x)
    with pytest.raises(TypeError, match="convert it to NumPy yourself if its gradient and device"):
        nf.silu_mul(theirs, theirs)
    assert not theirs.asked


def test_an_array_lives_as_long_as_what_sees_it():
    x = New(rng(4, 3))
    seen = nf.to_numpy(x)
    part = seen[1:]
    np.testing.assert_array_equal(seen, x.x)
    del seen
    gc.collect()
    assert not x.deleted
    del part
    gc.collect()
    assert len(x.deleted) == 1


# --- capsules that numfuse gives ------------------------------------------------------------------
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_what_is_given_is_what_is_taken(name, max_version):
    x = rng(4, 6, dtype=DTYPES[name][0])[::2, ::-1]
    memory = weakref.ref(owner := x.base if x.base is not None else x)
    held = dlpack.Imported("x", dlpack.export(x, (1, 0), max_version))
    assert (held.shape, held.strides) == (x.shape, tuple(s // x.itemsize for s in x.strides))
    assert held.dtype == name and held.writable and not held.copied
    assert held.address == x.__array_interface__["data"][0]
    del x, owner
    gc.collect()
    assert memory() is not None
    del held
    gc.collect()
    assert memory() is None


def test_a_read_only_array_says_so_or_is_not_given():
    x = rng(3)
    x.flags.writeable = False
    if NUMPY_KNOWS_DLPACK_1:
        assert not dlpack.Imported("x", dlpack.export(x, (1, 0), (1, 0))).writable
    with pytest.raises(BufferError, match="readonly"):
        dlpack.export(x)


def test_a_capsule_that_nobody_takes_lets_go_of_its_array():
    x = rng(3)
    memory = weakref.ref(x)
    capsule = dlpack.export(x, (15, 2), (1, 0), copied=True)
    del x
    gc.collect()
    assert memory() is not None
    del capsule
    gc.collect()
    assert memory() is None


def test_torch_reads_what_is_given():
    torch = pytest.importorskip("torch")
    x = rng(4, 3, dtype=ml_dtypes.bfloat16).T

    class Given:
        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, *, max_version=None, **_):
            return dlpack.export(x, (1, 0), max_version)

    found = torch.from_dlpack(Given())
    assert found.dtype is torch.bfloat16
    np.testing.assert_array_equal(found.float().numpy(), x.astype(np.float32))


def _webgpu(x):
    try:
        return nf.to_device(x, "webgpu")
    except nf.BackendUnavailable as error:
        unavailable("webgpu", str(error))


def test_an_array_of_webgpu_is_copied_to_the_host_where_that_is_asked_for():
    x = rng(4, 6, dtype=np.float32)
    there = _webgpu(x)[:, ::2]
    assert there.__dlpack_device__() == (15, 0)
    held = dlpack.Imported("x", there.__dlpack__(max_version=(1, 0), dl_device=(1, 0)))
    assert held.copied == NUMPY_KNOWS_DLPACK_1
    if NUMPY_KNOWS_DLPACK_1:
        np.testing.assert_array_equal(np.from_dlpack(there, device="cpu"), x[:, ::2])
    with pytest.raises(
        BufferError, match=r"in the host's memory alone: dl_device must be \(1, 0\)"
    ):
        np.from_dlpack(there)
    with pytest.raises(BufferError, match="as a copy, got copy=False"):
        there.__dlpack__(dl_device=(1, 0), copy=False)


@pytest.mark.skipif(not NUMPY_KNOWS_DLPACK_1, reason="NumPy 2.0 gives capsules of before DLPack 1")
def test_jax_reads_an_array_of_webgpu_on_the_host():
    jax = pytest.importorskip("jax")
    x = rng(4, 3, dtype=np.float32)
    there = _webgpu(x)
    found = jax.dlpack.from_dlpack(np.from_dlpack(there, device="cpu"))
    np.testing.assert_array_equal(np.asarray(found), x)


# --- libraries of the array API standard ----------------------------------------------------------
@pytest.fixture
def strict():
    return pytest.importorskip("array_api_strict")


def _calls():
    a, b, c, w = rng(6, 4), rng(4, 3), rng(3), rng(6, 3)
    u = rng(6, 4)
    square = nf.epilogue(lambda z, bias, scale: (z + bias) * (z + bias) * scale)
    net = [rng(4, 5), rng(5, 2)], [rng(5), None]
    dots = rng(2, 6, 4)
    yield "forward", nf.matmul_bias_activation, (a, b, c, "gelu"), {"return_pre_activation": True}
    yield "backward", nf.matmul_bias_activation_bwd, (w, a, b, c, "gelu"), {"needs": ("a", "bias")}
    yield "residual", nf.matmul_bias_residual, (a, b, c, w), {}
    yield "double", nf.matmul_bias_activation_double_bwd, (u, None, c, w, a, b, c, "tanh"), {}
    yield "tangent", nf.matmul_bias_activation_jvp, (a, b, c, u, None, c, "tanh"), {}
    yield "gate", nf.silu_mul, (a, u), {}
    yield "gate backward", nf.activation_mul_bwd, (u, a, u, "tanh"), {}
    yield "epilogue", nf.matmul_epilogue, (a, b, square, c, 2.0), {}
    yield "epilogue backward", nf.matmul_epilogue_bwd, (w, a, b, square, c, 2.0), {}
    yield "elementwise", nf.elementwise, (lambda x, y: (x * y, x - y), a, u), {}
    yield "gated", nf.matmul_activation_mul, (a, b, b, c, None, "silu"), {}
    yield "jet", nf.matmul_bias_activation_jet, (a, b, c, "tanh", dots), {"keep": True}
    yield "network", nf.mlp, (a, *net), {}
    yield (
        "network backward",
        nf.mlp_bwd,
        (rng(6, 2), a, *net),
        {"needs": ("x", "weights", "biases")},
    )
    yield "network tangent", nf.mlp_jvp, (a, *net, u, None, None), {}
    yield "network jet", nf.mlp_jet, (a, *net), {}
    yield "network jet backward", nf.mlp_jet_bwd, (rng(6, 2), None, None, a, *net), {}
    yield "activation", nf.activations()["gelu"], (a,), {}
    yield "activation's derivative", nf.activations()["gelu"].derivative, (a,), {}
    yield "formula", nf.epilogue(lambda x, y: x * y), (a, u), {}


_CALLS = {name: call for name, *call in _calls()}


def test_the_cpu_sees_these_arrays_where_they_are(strict):
    x, net = rng(6, 4), [rng(4, 5), rng(5, 2)]
    exact = nf.mlp(x, net, None, backend="cpu")
    for made in (strict.asarray, New):
        found = nf.mlp(made(x), list(map(made, net)), None, backend="cpu")
        np.testing.assert_array_equal(np.asarray(found), exact)


def mapped(made, x):
    """Return nested sequences with `made` of their arrays."""
    if isinstance(x, (tuple, list)):
        parts = [mapped(made, y) for y in x]
        return tuple.__new__(type(x), parts) if isinstance(x, tuple) else parts
    return made(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("name", _CALLS)
def test_a_library_of_the_standard_gets_arrays_of_its_own(strict, name):
    if name == "network tangent" and not NUMPY_KNOWS_DLPACK_1:
        pytest.skip("an array that NumPy 2.0 made by DLPack cannot go on by DLPack")
    function, operands, options = _CALLS[name]
    found = function(*mapped(strict.asarray, operands), **options)
    kinds = set()

    def back(x):
        if isinstance(x, (tuple, list)):
            return [back(y) for y in x]
        if hasattr(type(x), "__array_namespace__"):
            kinds.add(x.__array_namespace__())
            return np.asarray(x)
        return x

    exact = back(function(*operands, **options))
    assert kinds == {np}
    kinds.clear()
    _same(back(found), exact)
    assert kinds == {strict}


def _same(found, exact):
    if isinstance(exact, list):
        assert len(found) == len(exact)
        for x, y in zip(found, exact, strict=True):
            _same(x, y)
    elif isinstance(exact, np.ndarray):
        assert found.dtype == exact.dtype
        np.testing.assert_array_equal(found, exact)
    elif exact is None:
        assert found is None


def test_outputs_devices_and_mixtures_of_the_standard(strict):
    x = strict.asarray(rng(4, 3))
    out = strict.asarray(np.full((4, 3), np.nan))
    assert nf.silu_mul(x, x, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), np.asarray(nf.silu_mul(x, x)))
    for given, message in (
        ((x, rng(4, 3)), "arrays of one kind, got a array_api_strict.*, b numpy.ndarray"),
        ((x, New(rng(4, 3))), "arrays of one kind, got a array_api_strict.*, b .*New"),
        (
            (x, strict.asarray(rng(4, 3), dtype=strict.float32)),
            "same dtype, got a float64, b float32",
        ),
        ((x, strict.asarray(np.ones((4, 3), np.int32))), "b must have dtype .* got int32"),
    ):
        with pytest.raises(TypeError, match=message):
            nf.silu_mul(*given)
    with pytest.raises(TypeError, match="out must be an array of array_api_strict as the operands"):
        nf.silu_mul(x, x, out=np.empty((4, 3)))
    assert nf.silu_mul(x, x).device == x.device
    assert type(nf.to_numpy(x)) is np.ndarray and np.shares_memory(nf.to_numpy(x), np.asarray(x))


def test_a_library_of_an_earlier_standard_is_asked_as_that_says(strict):
    x = strict.asarray(rng(4, 3))
    exact = np.asarray(nf.silu_mul(x, x))
    with strict.ArrayAPIStrictFlags(api_version="2022.12"):
        np.testing.assert_array_equal(np.asarray(nf.silu_mul(x, x)), exact)


def test_numpys_own_namespace_changes_nothing():
    x = rng(4, 3)
    assert type(nf.silu_mul(x, x)) is np.ndarray


def test_a_library_of_the_standard_without_dlpack_is_refused():
    class Lazy:
        """As ndonnx has them: a name, and no elements yet."""

        def __array_namespace__(self, *, api_version=None):
            return types.ModuleType("lazy")

        def __array__(self, *_, **__):
            raise AssertionError("was turned into a NumPy array")

    with pytest.raises(TypeError, match=r"a must be a NumPy array, got .*Lazy"):
        nf.silu_mul(Lazy(), Lazy())


@pytest.mark.parametrize(("name", "module"), [("torch", ""), ("jax", ".numpy"), ("dask", ".array")])
def test_the_table_of_libraries_agrees_with_array_api_compat(name, module):
    """numfuse's table is by names, with rows that array-api-compat lacks; theirs says the same."""
    compat = pytest.importorskip("array_api_compat")
    x = pytest.importorskip(name + module).ones(2)
    assert getattr(compat, f"is_{name}_array")(x)
    assert dispatch.adapter_of(x=x).__name__ == f"numfuse.adapters.{name}"
