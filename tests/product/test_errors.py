# ruff: noqa: E501 (a table: one row, one line)
"""Every wrong call raises, says what was expected and what came, and does nothing."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import numfuse as nf
from numfuse.runtime import dispatch

F32 = np.float32


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    # A library in the table that has no adapter in this version.
    monkeypatch.setitem(dispatch.ADAPTERS, "mxnet", "numfuse.adapters.mxnet")
    # The checks come before the backend: the slow one, which needs no compilation, will do.
    with nf.use_backend("reference"):
        yield


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


A, B, BIAS, GRAD, RESIDUAL = ones(4, 3), ones(3, 5), ones(5), ones(4, 5), ones(4, 5)


def forward(a=A, b=B, bias=BIAS, activation="relu", **keywords):
    return nf.matmul_bias_activation(a, b, bias, activation, **keywords)


def residual(a=A, b=B, bias=BIAS, residual=RESIDUAL, **keywords):
    return nf.matmul_bias_residual(a, b, bias, residual, **keywords)


def backward(grad=GRAD, a=A, b=B, bias=BIAS, activation="relu", **keywords):
    return nf.matmul_bias_activation_bwd(grad, a, b, bias, activation, **keywords)


def residual_backward(grad=GRAD, a=A, b=B, bias=BIAS, residual=RESIDUAL, **keywords):
    return nf.matmul_bias_residual_bwd(grad, a, b, bias, residual, **keywords)


def gated(a=A, b=A, activation="relu", **keywords):
    return nf.activation_mul(a, b, activation, **keywords)


def gated_backward(grad=A, a=A, b=A, activation="relu", **keywords):
    return nf.activation_mul_bwd(grad, a, b, activation, **keywords)


def tensor(root):
    """An object whose class says that it was defined in another array library."""
    return type("Tensor", (), {"__module__": f"{root}.deep.inside"})()


def read_only(*shape):
    x = ones(*shape)
    x.flags.writeable = False
    return x


def unaligned(*shape):
    return np.zeros(int(np.prod(shape)) * 4 + 1, np.uint8)[1:].view(F32).reshape(shape)


LOOP = np.lib.stride_tricks.as_strided(np.zeros(5, F32), (4, 5), (0, 4))
FRAME = type("DataFrame", (), {"__module__": "pandas", "shape": (4, 3), "dtype": A.dtype})()
MASKED = np.ma.masked_array(A, mask=False)
V, T = ValueError, TypeError

# (what is wrong, call, exception, what the message says in full or in part)
TABLE = [
    # rank and size
    ("a has no axis", lambda: forward(a=ones()), V, "a must have shape (..., M, K) or (K,), got ()"),
    ("b has no axis", lambda: forward(b=ones()), V, "b must have shape (K, N), (..., K, N) or (K,)"),
    ("K differs", lambda: forward(b=ones(4, 5)), V,
     "b must have shape (..., K, N) with K = 3, the last axis of a (4, 3), got (4, 5)"),
    ("K differs, 1-D", lambda: forward(b=ones(4), bias=None), V, "shape (K,) with K = 3"),
    ("bias too long", lambda: forward(bias=ones(6)), V, "bias must have shape (N,) = (5,), got (6,)"),
    ("bias a scalar", lambda: forward(bias=ones()), V, "bias must have shape (N,) = (5,), got ()"),
    ("bias a column", lambda: forward(bias=ones(5, 1)), V,
     "bias must have shape (N,) = (5,) or (..., 1, N) = (..., 1, 5), got (5, 1)"),
    ("bias of the result's shape", lambda: forward(bias=ones(4, 5)), V, "got (4, 5)"),
    ("bias of length 1", lambda: forward(bias=ones(1)), V, "(N,) = (5,), got (1,)"),
    ("bias 2-D beside 1-D b", lambda: forward(b=ones(3), bias=ones(1, 1)), V, "shape (1,) where b is 1-D"),
    ("batches differ", lambda: forward(a=ones(2, 4, 3), b=ones(3, 3, 5)), V,
     "the batch axes of b must broadcast with (2,), got (3,); the operands are a (2, 4, 3) and b (3, 3, 5)"),
    ("bias batch differs", lambda: forward(a=ones(2, 4, 3), bias=ones(3, 1, 5)), V,
     "the batch axes of bias must broadcast with (2,), got (3,)"),
    ("residual too large", lambda: residual(residual=ones(2, 4, 5)), V,
     "residual must broadcast to the result's shape (4, 5), got (2, 4, 5)"),
    ("residual of another size", lambda: residual(residual=ones(3, 5)), V, "got (3, 5)"),
    ("residual in the backward", lambda: residual_backward(residual=ones(3, 5)), V, "got (3, 5)"),
    ("grad of another shape", lambda: backward(grad=ones(5, 4)), V,
     "grad must have the result's shape (4, 5), got (5, 4)"),
    ("grad is not broadcast", lambda: backward(grad=ones(5)), V, "(4, 5), got (5,)"),
    ("pre_activation's shape", lambda: backward(pre_activation=ones(4, 4)), V,
     "pre_activation must have the result's shape (4, 5), got (4, 4)"),
    ("gated shapes differ", lambda: gated(b=ones(4, 1)), V,
     "b must have the shape of a (4, 3), got (4, 1)"),
    ("gated grad", lambda: gated_backward(grad=ones(3)), V, "grad must have the shape of a (4, 3), got (3,)"),
    ("gated b in the backward", lambda: gated_backward(b=ones(3)), V, "b must have the shape of a"),
    # dtype
    ("mixed", lambda: forward(b=ones(3, 5, dtype=float)), T,
     "a, b and bias must have the same dtype, got a float32, b float64, bias float32"),
    ("mixed bias", lambda: forward(bias=ones(5, dtype=np.float16)), T, "bias float16"),
    ("mixed residual", lambda: residual(residual=ones(4, 5, dtype=float)), T, "residual float64"),
    ("mixed grad", lambda: backward(grad=ones(4, 5, dtype=float)), T, "grad float64, a float32"),
    ("mixed gated", lambda: gated(b=ones(4, 3, dtype=ml_dtypes.bfloat16)), T, "a float32, b bfloat16"),
    ("mixed gated grad", lambda: gated_backward(grad=ones(4, 3, dtype=float)), T, "grad float64"),
    ("integers", lambda: forward(a=ones(4, 3, dtype=np.int32)), T,
     "a must have dtype float64, float32, float16 or ml_dtypes.bfloat16, got int32"),
    ("complex", lambda: forward(b=ones(3, 5, dtype=np.complex64)), T, "b must have dtype float64"),
    ("bool", lambda: forward(bias=ones(5, dtype=bool)), T, "got bool"),
    ("object", lambda: forward(a=ones(4, 3, dtype=object)), T, "got object"),
    ("long double", lambda: gated(ones(3, dtype=np.longdouble), ones(3, dtype=np.longdouble)), T,
     f"got {np.dtype(np.longdouble)}"),
    ("float8", lambda: forward(a=ones(4, 3, dtype=ml_dtypes.float8_e4m3fn)), T, "got float8_e4m3fn"),
    ("text", lambda: forward(a=np.array([["x"]])), T, "got <U1"),
    ("byte-swapped", lambda: forward(a=ones(4, 3, dtype=np.dtype(F32).newbyteorder())), T,
     "a must be in the native byte order"),
    ("integer grad", lambda: backward(grad=ones(4, 5, dtype=int)), T, "grad must have dtype float64"),
    ("pre_activation's dtype", lambda: backward(pre_activation=ones(4, 5, dtype=float)), T,
     "pre_activation must have dtype float32, got float64"),
    ("integer pre_activation", lambda: backward(pre_activation=ones(4, 5, dtype=int)), T, "got int"),
    ("half pre_activation", lambda: nf.matmul_bias_activation_bwd(
        *(ones(2, 2, dtype=np.float16) for _ in "gab"),
        pre_activation=ones(2, 2, dtype=float)), T, "dtype float32 or float16, got float64"),
    # kinds of array
    ("a list", lambda: forward(a=[[1.0, 2.0, 3.0]]), T, "a must be a NumPy array, got list; "
     "convert it with numpy.asarray(a, dtype=...)"),
    ("a number", lambda: forward(bias=1.0), T, "bias must be a NumPy array, got float"),
    ("a NumPy scalar", lambda: forward(a=F32(1)), T, "a must be a NumPy array, got numpy.float32"),
    ("None", lambda: forward(a=None), T, "a must be an array, got None"),
    ("None for b", lambda: gated(b=None), T, "b must be an array, got None"),
    ("None for grad", lambda: backward(grad=None), T, "grad must be an array, got None"),
    ("None for residual", lambda: residual(residual=None), T, "residual must be an array, got None"),
    ("a string", lambda: forward(b="b"), T, "got str"),
    ("a memoryview", lambda: forward(a=memoryview(A)), T, "got memoryview"),
    ("a data frame", lambda: forward(a=FRAME), T, "got pandas.DataFrame; convert it with numpy.asarray"),
    ("a masked array", lambda: forward(a=MASKED), T, "a must be a plain numpy.ndarray, got its subclass"),
    ("a masked bias", lambda: forward(bias=np.ma.masked_array(BIAS)), T, "bias must be a plain"),
    ("a matrix", lambda: forward(a=A.view(np.matrix)), T, "got its subclass numpy.matrix"),
    ("a masked grad", lambda: gated_backward(grad=MASKED), T, "grad must be a plain"),
    ("another kind of array", lambda: forward(a=tensor("mxnet")), T, "got mxnet.deep.inside.Tensor"),
    ("another kind for bias", lambda: forward(bias=tensor("mxnet")), T, "numfuse.adapters.mxnet"),
    ("another kind for grad", lambda: backward(grad=tensor("mxnet")), T, "grad must be a NumPy array"),
    ("another kind, gated", lambda: gated(b=tensor("mxnet")), T, "b must be a NumPy array"),
    ("another kind, gated bwd", lambda: gated_backward(a=tensor("mxnet")), T, "a must be a NumPy array"),
    ("another kind, residual", lambda: residual(residual=tensor("mxnet")), T, "residual must be a NumPy"),
    ("another kind, residual bwd", lambda: residual_backward(b=tensor("mxnet")), T, "b must be a NumPy"),
    ("two kinds", lambda: forward(a=tensor("mxnet"), b=tensor("autograd")), T,
     "the operands must be arrays of one kind, got a mxnet.deep.inside.Tensor, b autograd.deep.inside.Tensor"),
    # names
    ("unknown activation", lambda: forward(activation="rleu"), V, "relu"),
    ("no activation", lambda: forward(activation=None), T, "NoneType"),
    ("unknown gate", lambda: gated(activation="swish2"), V, "swish2"),
    ("a function", lambda: gated(activation=np.tanh), T, "ufunc"),
    ("unknown backend", lambda: forward(backend="gpu"), V,
     "backend must be one of 'cpu', 'cuda', 'webgpu', 'reference' or a backend object, got 'gpu'"),
    ("a number for a backend", lambda: forward(backend=3), T, "a name or a backend object, got int"),
    ("needs as text", lambda: backward(needs="a"), T,
     "needs must be a tuple of names out of ('a', 'b', 'bias'), got 'a'"),
    ("needs a number", lambda: backward(needs=1), T, "needs must be a tuple of names"),
    ("needs unknown", lambda: backward(needs=("a", "grad")), V, "needs must hold names out of"),
    ("needs residual there", lambda: backward(needs=("residual",)), V, "got 'residual'"),
    ("needs bias, gated", lambda: gated_backward(needs=("bias",)), V, "out of ('a', 'b'), got 'bias'"),
    ("needs d_a", lambda: residual_backward(needs=["d_a"]), V, "got 'd_a'"),
    # out
    ("out's shape", lambda: forward(out=ones(5, 4)), V, "out must have shape (4, 5), got (5, 4)"),
    ("out's rank", lambda: forward(out=ones(1, 4, 5)), V, "out must have shape (4, 5)"),
    ("out's dtype", lambda: forward(out=ones(4, 5, dtype=float)), T, "out must have dtype float32, got float64"),
    ("out read-only", lambda: forward(out=read_only(4, 5)), V, "out must be writable, got a read-only array"),
    ("out a list", lambda: forward(out=[[0.0] * 5] * 4), T, "out must be a NumPy array of shape (4, 5)"),
    ("out a tuple", lambda: forward(out=(ones(4, 5), ones(4, 5))), T, "got tuple"),
    ("out masked", lambda: forward(out=np.ma.masked_array(ones(4, 5))), T, "out must be a plain"),
    ("out unaligned", lambda: forward(out=unaligned(4, 5)), V, "out must be aligned"),
    ("out overlaps itself", lambda: forward(out=LOOP), V, "out must not overlap itself"),
    ("out of the residual", lambda: residual(out=RESIDUAL), V, "out must not share memory with residual"),
    ("gated out's shape", lambda: gated(out=ones(3, 4)), V, "out must have shape (4, 3)"),
    ("backward out an array", lambda: backward(out=ones(3, 4, 3)), T,
     "out must be a tuple (d_a, d_b, d_bias) with None where to allocate, got ndarray"),
    ("backward out too short", lambda: backward(out=(None, None)), V,
     "out must have 3 entries (d_a, d_b, d_bias), got 2"),
    ("residual out too short", lambda: residual_backward(out=(None,) * 3), V, "out must have 4 entries"),
    ("d_a's shape", lambda: backward(out=(ones(3, 4), None, None)), V, "d_a must have shape (4, 3)"),
    ("d_b's dtype", lambda: backward(out=(None, ones(3, 5, dtype=float), None)), T, "d_b must have dtype"),
    ("d_bias read-only", lambda: backward(out=(None, None, read_only(5))), V, "d_bias must be writable"),
    ("d_a not needed", lambda: backward(needs=("b",), out=(ones(4, 3), None, None)), V,
     "d_a in out must be None where 'a' is not in needs, got an array"),
    ("d_bias without bias", lambda: backward(bias=None, out=(None, None, ones(5))), V,
     "d_bias in out must be None where bias is None"),
    ("d_b over b", lambda: backward(out=(None, B, None)), V, "d_b must not share memory with b"),
    ("d_residual over grad", lambda: residual_backward(out=(None, None, None, GRAD)), V,
     "d_residual must not share memory with grad"),
    ("gated d_a over a", lambda: gated_backward(out=(A, None)), V, "d_a must not share memory with"),
    ("gated d_b's shape", lambda: gated_backward(out=(None, ones(3))), V, "d_b must have shape (4, 3)"),
    # the rest of the interface
    ("use_backend unknown", lambda: nf.use_backend("gpu"), V, "got 'gpu'"),
    ("use_backend None", lambda: nf.use_backend(None), T, "got NoneType"),
    ("use_backend device", lambda: nf.use_backend("reference", device=1), V,
     "device and precision must be None for the backend 'reference', got device=1, precision=None"),
    ("use_backend precision", lambda: nf.use_backend("reference", precision="tf32"), V, "precision='tf32'"),
    ("warmup text", lambda: nf.warmup("gelu"), T, "activations must be an iterable, such as ['gelu']"),
    ("warmup text dtypes", lambda: nf.warmup(dtypes="float32"), T, "such as ['float32']"),
    ("warmup unknown", lambda: nf.warmup(["no_such"]), V, "no_such"),
    ("warmup dtype", lambda: nf.warmup(dtypes=[int]), T, "dtypes must have dtype float64"),
    ("to_numpy of a list", lambda: nf.to_numpy([1.0]), T, "x must be an array, got list"),
    ("to_numpy of another kind", lambda: nf.to_numpy(tensor("mxnet")), T, "x must be a NumPy array"),
    ("to_device of a list", lambda: nf.to_device([1.0], "reference"), T, "x must be an array, got list"),
    ("to_device unknown", lambda: nf.to_device(A, "gpu"), V, "got 'gpu'"),
    ("synchronize a list", lambda: nf.synchronize([1.0]), T, "x must be an array, got list"),
]  # fmt: skip


@pytest.mark.parametrize(
    "call,kind,message", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_wrong_call_says_what_was_expected_and_what_came(call, kind, message):
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    assert type(caught.value) is kind


def interleaved(shape):
    """Two views that share no element, only the bounds of their memory."""
    base = np.full((shape[0], 2 * shape[1]), np.nan, F32)
    return base[:, ::2], base[:, 1::2]


def test_interleaved_views_overlap():
    a, out = interleaved((4, 4))
    a[...] = 1
    with pytest.raises(ValueError, match="out must not share memory with a, got overlapping"):
        nf.matmul_bias_activation(a, ones(4, 4), out=out)
    assert np.isnan(out).all()
    one, two = interleaved((4, 3))
    with pytest.raises(ValueError, match="d_b must not share memory with d_a"):
        nf.silu_mul_bwd(A, A, A, out=(one, two))


@pytest.mark.parametrize(
    "index", [np.s_[3::-1], np.s_[1:5], np.s_[:2]], ids=["reversed", "shifted", "a part"]
)
def test_the_gated_out_is_exactly_an_operand_or_apart(index):
    base = ones(6, 3)
    a = base[:4] if base[index].shape == (4, 3) else base[1:3]
    with pytest.raises(ValueError, match="out must be exactly a or apart from it"):
        nf.silu_mul(a, np.ones_like(a), out=base[index])
    assert (base == 1).all()


def test_the_gated_out_may_be_one_operand_and_not_overlap_the_other():
    base = ones(5, 3)
    with pytest.raises(ValueError, match="out must be exactly b or apart from it"):
        nf.silu_mul(base[:4], base[1:], out=base[:4])
    assert (base == 1).all()


@pytest.mark.parametrize(
    "names", [("grad", "d_a"), ("a", "d_a"), ("b", "d_b"), ("bias", "d_bias"), ("pre", "d_a"), ("d_a", "d_b")]
)  # fmt: skip
def test_no_output_of_the_backward_overlaps_anything(names):
    n = 3
    memory = np.full(2 * n * n, 1, F32)
    arrays = {
        "grad": ones(n, n),
        "a": ones(n, n),
        "b": ones(n, n),
        "bias": ones(n),
        "pre": ones(n, n),
    }
    outs = {"d_a": None, "d_b": None, "d_bias": None}
    for i, name in enumerate(names):
        part = memory[i : i + n] if "bias" in names[0] else memory[i : i + n * n].reshape(n, n)
        (outs if name in outs else arrays)[name] = part
    with pytest.raises(ValueError, match=f"{names[1]} must not share memory with"):
        nf.matmul_bias_activation_bwd(
            arrays["grad"], arrays["a"], arrays["b"], arrays["bias"], "tanh",
            pre_activation=arrays["pre"], out=tuple(outs.values()),
        )  # fmt: skip
    assert (memory == 1).all()


def test_a_call_that_raises_leaves_out_untouched():
    out = np.full((4, 5), 7, F32)
    for wrong in (
        {"bias": ones(6)},
        {"activation": "no_such"},
        {"backend": "no_such"},
        {"backend": "webgpu_x"},
        {"b": ones(3, 5, dtype=float)},
    ):
        with pytest.raises((ValueError, TypeError)):
            forward(**wrong, out=out)
    outs = np.full((4, 3), 7, F32), np.full((3, 5), 7, F32), read_only(5)
    with pytest.raises(ValueError, match="d_bias must be writable"):
        backward(out=outs)
    assert (out == 7).all() and (outs[0] == 7).all() and (outs[1] == 7).all()


def test_overlap_is_judged_before_anything_is_written_also_where_a_name_is_wrong():
    a = ones(3, 3)
    with pytest.raises(ValueError):
        nf.matmul_bias_activation(a, a, out=a, backend="no_such")
    assert (a == 1).all()


def test_inputs_may_overlap_one_another():
    a = ones(3, 3)
    assert (nf.matmul_bias_activation(a, a, a[0]) == 4).all()
    assert (nf.silu_mul(a, a) == nf.silu_mul(a, a.copy())).all()


@pytest.mark.parametrize("name", ["cuda", "webgpu"])
def test_a_missing_backend_names_its_extra_and_the_reason(name):
    if nf.backends()[name]:
        pytest.skip(f"the backend {name} runs here")
    for call in (
        lambda: forward(backend=name),
        lambda: nf.use_backend(name),
        lambda: nf.to_device(A, name),
        lambda: nf.warmup(backend=name),
    ):
        with pytest.raises(nf.BackendUnavailable, match=rf"numfuse\[{name}\]") as caught:
            call()
        error = caught.value
        assert (error.backend, error.extra) == (name, name)
        assert error.reason in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and again.reason == error.reason


def test_a_subclass_of_a_tensor_is_a_tensor():
    base = type("Tensor", (), {"__module__": "mxnet"})
    mine = type("Mine", (base,), {"__module__": "my.own.module"})()
    with pytest.raises(TypeError, match=r"got my\.own\.module\.Mine"):
        forward(a=mine)


def test_a_tensor_is_never_turned_into_a_numpy_array():
    class Tensor:
        __module__ = "mxnet"

        def __array__(self, *_, **__):
            raise AssertionError("was turned into a NumPy array")

    for keywords in ({"a": Tensor()}, {"b": Tensor()}, {"bias": Tensor()}, {"out": Tensor()}):
        with pytest.raises(TypeError, match="mxnet"):
            forward(**keywords)


def test_an_object_with_a_forward_and_a_name_is_a_backend():
    seen = []
    mine = SimpleNamespace(name="mine", forward=seen.append)
    forward(backend=mine)
    with nf.use_backend(mine):
        forward()
    assert [type(p).__name__ for p in seen] == ["GemmProblem", "GemmProblem"]


def test_a_backend_that_stops_at_first_derivatives_says_so():
    class First:
        name = "first"

        def forward(self, p):
            raise AssertionError

        def __repr__(self):
            return "First()"

    x = np.ones((2, 2))
    wanted = r"^backend must have the operation 'double_backward', got First\(\) without it$"
    with pytest.raises(ValueError, match=wanted):
        nf.matmul_bias_activation_double_bwd(x, None, None, x, x, x, backend=First())
    with pytest.raises(ValueError, match="the operation 'gated_tangent'"):
        nf.activation_mul_jvp(x, x, x, None, "gelu", backend=First())
