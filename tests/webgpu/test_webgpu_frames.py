"""Python frames of a call on arrays of a device: a bound on what stands before its dispatches."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import normal
from conftest import compiles_slowly, unavailable
from frames import frames

import numfuse as nf

F32 = np.dtype(np.float32)
#: A public function, an adapter's, the look-up, the launch, its memory and its turn to be
#: submitted; one more each for the name of a gate and for an activation that is no name.
MOST = 8
#: Where several calls are submitted together; and the frames of that, of any number of calls.
SUBMITS, SUBMIT = "backends/webgpu/device/submits.py", 5


def of_the_call(opened):
    """Return the frames without those of a submit, which a call may do for those before it."""
    turn = SUBMITS, "turn"
    rest = [x for x in opened if x[0] == SUBMITS and x != turn]
    assert len(rest) <= SUBMIT * (turn in opened), opened
    return [x for x in opened if x not in rest]


@pytest.fixture(scope="module", autouse=True)
def adapter():
    status = nf.backends()["webgpu"]
    if not status:
        unavailable("webgpu", str(status))


def arrays(shapes, host=False):
    rng = np.random.default_rng(0)
    made = [normal(rng, shape, F32) for shape in shapes]
    return made if host else [nf.to_device(x, "webgpu") for x in made]


M, N, K = 33, 20, 17
A, B, BIAS, OUT = (M, K), (K, N), (N,), (M, N)
gelu_of = nf.activations()["gelu"]

#: {name: (function, shapes of its operands, options)}
CALLS = {
    "layer": (nf.matmul_bias_activation, (A, B, BIAS), {"activation": "gelu"}),
    "activation": (nf.matmul_bias_activation, (A, B, BIAS), {"activation": gelu_of}),
    "saved": (
        nf.matmul_bias_activation, (A, B), {"activation": "gelu", "return_pre_activation": True},
    ),
    "1-D": (nf.matmul_bias_activation, ((K,), B), {}),
    "batch": (nf.matmul_bias_activation, ((3, 1, *A), (2, *B)), {"activation": "silu"}),
    "residual": (nf.matmul_bias_residual, (A, B, BIAS, OUT), {}),
    "layer_bwd": (
        nf.matmul_bias_activation_bwd, (OUT, A, B, BIAS), {"activation": "gelu", "guard": False},
    ),
    "needs": (
        nf.matmul_bias_activation_bwd, (OUT, A, B, BIAS), {"activation": "gelu", "needs": ["b"]},
    ),
    "planes": (nf.matmul_bias_activation_bwd, ((1500, N), (1500, K), B, BIAS), {}),
    "batch_bwd": (
        nf.matmul_bias_activation_bwd, ((3, *OUT), (3, *A), (3, *B), BIAS), {"sum_batch": True},
    ),
    "residual_bwd": (nf.matmul_bias_residual_bwd, (OUT, A, B, BIAS, (1, N)), {}),
    "layer_double_bwd": (
        nf.matmul_bias_activation_double_bwd, (A, B, BIAS, OUT, A, B, BIAS), {"activation": "gelu"},
    ),
    "residual_double_bwd": (
        nf.matmul_bias_residual_double_bwd, (A, B, BIAS, OUT, OUT, A, B, BIAS, OUT), {},
    ),
    "layer_jvp": (nf.matmul_bias_activation_jvp, (A, B, BIAS, A, B, BIAS), {"activation": "gelu"}),
    "residual_jvp": (nf.matmul_bias_residual_jvp, (A, B, BIAS, OUT, A, B, BIAS, OUT), {}),
    "gated_layer": (nf.matmul_activation_mul, (A, B, B, BIAS, BIAS), {}),
    "gated_layer_bwd": (nf.matmul_activation_mul_bwd, (OUT, A, B, B, BIAS, BIAS), {}),
    "gate": (nf.activation_mul, (A, A), {"activation": "tanh"}),
    "gate_bwd": (nf.activation_mul_bwd, (A, A, A), {"activation": gelu_of}),
    "gate_double_bwd": (nf.activation_mul_double_bwd, (A, A, A, A, A), {"activation": "silu"}),
    "gate_jvp": (nf.activation_mul_jvp, (A, A, A, A), {"activation": "silu"}),
    **{
        f"{name}_mul{end}": (getattr(nf, f"{name}_mul{end}"), (A,) * count, {})
        for name in ("silu", "gelu", "relu", "sigmoid")
        for end, count in (("", 2), ("_bwd", 3))
    },
}  # fmt: skip


def sliced(x):
    """Return the elements of an array as a part of a larger one, in another order of memory."""
    host = nf.to_numpy(x)
    base = np.zeros((*host.shape[:-2], *(n + 3 for n in host.shape[-2:])), F32)
    index = (..., *(slice(2, n + 2) for n in host.shape[-2:]))
    base[index] = host
    return nf.to_device(base, "webgpu")[index]


def parts(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def same(first, second):
    return all(
        np.array_equal(nf.to_numpy(x), nf.to_numpy(y), equal_nan=True)
        for x, y in zip(parts(first), parts(second), strict=True)
    )


@pytest.mark.parametrize("views", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_opens_few_frames(name, views):
    function, shapes, options = CALLS[name]
    operands = arrays(shapes)
    if views:
        operands = [sliced(x) for x in operands]
    first = function(*operands, **options)
    function(*operands, **options)  # (the temporaries are there, and the pool has the results)
    for _ in range(5):  # (results take turns: each has its bind groups by then)
        again, opened = frames(lambda: function(*operands, **options))
        assert same(first, again)
    assert len(of_the_call(opened)) <= MOST, opened


@pytest.mark.parametrize(
    "name", ["layer", "saved", "residual", "layer_bwd", "residual_bwd", "gate_bwd"]
)
def test_a_repeated_call_with_outputs_opens_few_frames(name):
    function, shapes, options = CALLS[name]
    operands = arrays(shapes)
    first = function(*operands, **options)
    outs = [nf.to_device(np.full(x.shape, np.nan, F32), "webgpu") for x in parts(first)]
    out = tuple(outs) if name.endswith("bwd") else outs[0]
    for _ in range(5):  # (results take turns: each has its bind groups by then)
        again, opened = frames(lambda: function(*operands, **options, out=out))
    assert len(of_the_call(opened)) <= MOST, opened
    assert same(first, again)
    assert parts(again)[0] is outs[0]


# Arrays of NumPy are uploaded and downloaded, each by a dozen frames.
@pytest.mark.parametrize(
    "name, most", [("layer", 66), ("layer_bwd", 96), ("gate", 56), ("gate_bwd", 96)]
)
def test_a_repeated_call_on_arrays_of_the_host_opens_a_bounded_number(name, most):
    function, shapes, options = CALLS[name]
    operands = arrays(shapes, host=True)
    for _ in range(3):
        _, opened = frames(lambda: function(*operands, **options, backend="webgpu"))
    assert len(opened) <= most, opened


#: Of a first call of a shape, in a process of its own (others pass some 10 functions fewer):
#: functions of numfuse, each counted once, and the frames that they open, comprehensions included.
FIRST = {
    "layer": (99, 245),
    "residual": (100, 280),
    "layer_bwd": (130, 650),
    "residual_bwd": (142, 755),
    "layer_double_bwd": (140, 1630),
    "layer_jvp": (124, 780),
    "gate": (108, 330),
    "gate_bwd": (103, 470),
    "gelu_mul": (108, 330),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_first_call_passes_few_functions(name):
    function, shapes, options = CALLS[name]
    for more in (16, 8, 0):  # (of lengths that are alike, so that shaders are compiled before)
        grown = [tuple(n if n == 1 else n + more for n in shape) for shape in shapes]
        operands = arrays(grown)
        _, opened = frames(lambda: function(*operands, **options))  # noqa: B023
    first = {x for x in opened if not x[1].startswith("<")}
    functions, most = FIRST[name]
    if not compiles_slowly("webgpu"):  # a GPU has tiles to weigh, and may cut K
        functions, most = functions + 14, most + 60
    assert len(first) <= functions, sorted(first)
    assert len(opened) <= most, opened


@pytest.mark.parametrize("where", ["cpu", "webgpu"])
def test_a_repeated_call_is_that_of_its_own_arguments(where):
    """A name that means another formula now, and arrays that were one and are two, or the other
    way round."""
    backend = {"backend": "webgpu"} if where == "cpu" else {}
    x, y = (nf.to_device(x, where) for x in arrays((A, A), host=True))
    wanted = {}
    for k in (2, 3, 2):

        def renewed(t, k=k):
            return nf.expr.tanh(k * t)

        nf.activation(renewed)
        for first, second in ((x, x), (x, y), (y, x), (y, y)):
            key = k, first is x, second is x
            got = nf.to_numpy(nf.activation_mul(first, second, "renewed", **backend))
            exact = np.tanh(k * np.float64(nf.to_numpy(first))) * nf.to_numpy(second)
            assert np.abs(got - exact).max() < 1e-5
            assert np.array_equal(wanted.setdefault(key, got), got)
    for _ in range(3):
        (out,) = (nf.to_device(x, where) for x in arrays((A,), host=True))
        assert nf.relu_mul(out, y, out=out, **backend) is out
        exact = np.maximum(nf.to_numpy(x), 0) * nf.to_numpy(y)
        assert np.array_equal(nf.to_numpy(out), exact)
