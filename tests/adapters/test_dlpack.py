"""Arrays of other libraries by DLPack: taken where they are, given, and let go of once.

Guards: memory of another library is neither kept nor let go of twice, nor written where it says no.
"""

from __future__ import annotations

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from arrays import NUMPY_KNOWS_DLPACK_1
from conftest import unavailable
from dlpack_arrays import DTYPES, New, Old, rng

import numfuse as nf
from numfuse.runtime import dlpack


@pytest.fixture(autouse=True)
def _reference():
    # How arrays come and go depends on no backend: the slow one needs no compilation.
    with nf.use_backend("reference"):
        yield


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


def test_what_another_library_makes_of_pythons_functions_is_its_own(monkeypatch):
    """Guards: functions of `ctypes.pythonapi` are shared, and so are their argument types."""
    for name in ("PyCapsule_GetName", "PyCapsule_GetPointer", "PyCapsule_SetName"):
        function = getattr(ctypes.pythonapi, name)
        monkeypatch.setattr(function, "argtypes", [ctypes.c_int] * 3)
    x = rng(4, 3)
    np.testing.assert_array_equal(nf.silu_mul(New(x), New(x)), nf.silu_mul(x, x))
